"""What a forward saves, and how much of it is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum.window.tape import Entry, most_held, no_trace, record
from tests.models import noisy

CPU = torch.device("cpu")
ROWS, WIDTH = 32, 64
ONE = ROWS * WIDTH * 4
"""Bytes of one activation."""


def chain(depth: int) -> nn.Sequential:
    """Of each layer the output alone is saved: by tanh, and as the next layer's input."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


def tape(model: nn.Module, batch: torch.Tensor) -> tuple[Entry, ...]:
    return record(lambda: model(batch).sum(), [model], batch, CPU)


def saved_bytes(entries: tuple[Entry, ...]) -> int:
    return sum(size for _, size in {(e.storage, e.held_bytes) for e in entries if not e.input_of})


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_each_storage_is_counted_once_and_what_is_there_anyway_never(depth: int) -> None:
    """Nothing is held, so that a freed storage's id soon is another's: those are told apart."""
    entries = tape(chain(depth), torch.randn(ROWS, WIDTH))
    assert saved_bytes(entries) == depth * ONE
    assert most_held(entries) >= depth * ONE


def test_nothing_is_held() -> None:
    alive: list[Any] = []

    def forward() -> torch.Tensor:
        x = batch
        for layer in model:
            x = layer(x)
            alive.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        return x.sum()

    model, batch = chain(5), torch.randn(ROWS, WIDTH)
    record(forward, [model], batch, CPU)
    assert all(reference.expired() for reference in alive)


def test_gradients_that_a_backward_works_on() -> None:
    batch = torch.randn(ROWS, WIDTH, requires_grad=True)
    entries = record(lambda: batch.tanh().tanh(), [], batch, CPU)
    assert most_held(entries) == 2 * ONE + 2 * ONE, "both outputs, the gradient of the last and of what it is made of"
    layer = nn.Linear(WIDTH, 3)
    entries = record(lambda: layer(batch), [layer], batch, CPU)
    assert most_held(entries) == 4 * 3 * WIDTH + ONE + 4 * 3 * ROWS, "of weight, input and output"


def test_checkpointed_blocks_keep_their_inputs_and_one_its_inside() -> None:
    deep = nn.Sequential(*(chain(4) for _ in range(5)))
    blocks = {str(index): block for index, block in enumerate(deep)}
    batch = torch.randn(ROWS, WIDTH)
    entries = record(lambda: deep(batch).sum(), [deep], batch, CPU, blocks)
    gradients = 3 * ONE  # of the last layer: weight's, input's and output's
    weight = WIDTH * WIDTH * 4
    assert most_held(entries) == pytest.approx(20 * ONE + gradients, abs=ONE + weight)
    inputs, inside = 4 * ONE, 4 * ONE
    assert most_held(entries, checkpointed=set(blocks)) == pytest.approx(inputs + inside + gradients, abs=ONE + weight)


def test_what_is_already_checkpointed_saves_nothing_more() -> None:
    model, batch = chain(4), torch.randn(ROWS, WIDTH, requires_grad=True)
    entries = record(lambda: checkpoint(model, batch, use_reentrant=False).sum(), [model], batch, CPU)
    assert saved_bytes(entries) == 0


def test_what_is_elsewhere_comes_back_one_by_one() -> None:
    entries = [
        Entry(storage=1, held_bytes=8, loaded_bytes=8, working_bytes=2),
        Entry(storage=2, held_bytes=20, loaded_bytes=5, working_bytes=4),
        Entry(loaded_bytes=7),
    ]
    assert most_held(entries) == 32
    assert most_held(entries, elsewhere=True) == 10


def test_blocks_inside_are_held_even_if_their_inputs_are_elsewhere() -> None:
    entries = [
        Entry(storage=1, held_bytes=8, input_of="one"),
        Entry(storage=2, held_bytes=5, within=(("one", 1),)),
        Entry(storage=3, held_bytes=6, within=(("one", 1),), working_bytes=1),
        Entry(storage=3, held_bytes=6, input_of="other"),
        Entry(storage=4, held_bytes=9, within=(("other", 2),)),
    ]
    assert most_held(entries) == 5 + 6 + 9
    assert most_held(entries, checkpointed={"one", "other"}) == 8 + 6 + 9
    assert most_held(entries, checkpointed={"one", "other"}, elsewhere=True) == 5 + 6 + 1
    assert most_held(entries, checkpointed={"others"}) == 5 + 6 + 9


def test_small_storages_stay_where_others_are_elsewhere() -> None:
    entries = [
        Entry(storage=1, held_bytes=8, loaded_bytes=8),
        Entry(storage=2, held_bytes=3, loaded_bytes=3),
        Entry(storage=1, held_bytes=8, loaded_bytes=2, working_bytes=1),
        Entry(loaded_bytes=7),
        Entry(storage=3, held_bytes=9, within=(("one", 1),)),
        Entry(storage=1, held_bytes=8, loaded_bytes=8, within=(("one", 1),)),
    ]
    assert most_held(entries, checkpointed={"one"}) == 8 + 3 + 9
    assert most_held(entries[:4], elsewhere=True, above_bytes=3) == 8, "and what is there anyway is not brought back"
    assert most_held(entries[1:4], elsewhere=True, above_bytes=3) == 3 + 2 + 1
    assert most_held(entries, checkpointed={"one"}, elsewhere=True, above_bytes=3) == 3 + 9 + 8


def test_a_backward_in_the_forward_is_refused() -> None:
    model, batch = chain(2), torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="a backward within a forward"):
        record(lambda: model(batch).sum().backward(), [model], batch, CPU)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_trace() -> None:
    model, batch = noisy(), torch.randn(4, 8)
    model[0].weight.grad = gradient = torch.ones(16, 8)
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    before = [dict(vars(m)) for m in model.modules()]
    with no_trace([model], CPU):
        tape(model, batch)
        model.zero_grad()
        model[0].calls = 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert model[0].weight.grad is gradient
    assert [dict(vars(m)) for m in model.modules()] == before
