"""Laws 1 to 3 where memory is saved on a device: what is elsewhere for a while changes no bit, whatever fails."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumWarning, MemoryLimitError, NothingFitsError
from autoaccum.events import MemorySaving, OutOfMemory, Recomputed
from autoaccum.training.trainer import FitResult
from tests import standin
from tests.devices import DEVICE
from tests.faults import strides
from tests.models import same, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Blocks are computed once more .* and there was no memory to compare"),
]

LENGTH, WIDTH = 16384, 64
"""A tensor of these takes 4 MiB."""
MIB = 2**20
BOTH = ["checkpoint", "offload"]
ALL = "checkpoint, every Block"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        h = F.relu(self.up(x))
        h = h * h.sigmoid()
        drawn = F.dropout(torch.ones_like(x[..., :4]), 0.1)
        return x + self.down(h) * drawn.repeat(1, 1, WIDTH // 4)


class Stack(nn.Module):
    """Blocks whose insides are saved, and a weight of 16 MiB, of which a corner is used."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(2048, 2048) / 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.wide[:WIDTH, :WIDTH]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def data(num_samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randn(num_samples, LENGTH, 1, generator=generator)


def held() -> int:
    """Return the bytes that tests before have left on the device."""
    gc.collect()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved()


@cache
def leave_workspaces() -> None:
    """Have the device keep what it keeps from the first run on, for its kernels."""
    fit(memory_saving=BOTH)


@pytest.fixture(autouse=True)
def filled() -> Iterator[None]:
    """Fill the gaps in what tests before have left: a run that used them would fit below limits that it does not."""
    leave_workspaces()
    before, kept = held(), []
    size = 2 * MIB + before
    while size >= 512:
        kept.append(torch.empty(size, dtype=torch.uint8, device=torch.accelerator.current_accelerator()))
        if torch.accelerator.memory_reserved() > before:
            kept.pop()
            torch.accelerator.empty_cache()
            size = size * 3 // 4
    yield
    kept.clear()


def fit(optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, **options: Any) -> FitResult:
    held()
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "effective_batch": 2, "micro_batch": 1, "steps": 3, "loss_fn": F.mse_loss, "optimizer": optimizer,
        "headroom": 0.0, "patience": 0, "verify": False, **options,
    }  # fmt: skip
    return autoaccum.fit(Stack(), data(), progress=False, cache=False, **given)


@dataclass
class Clean:
    """What a run has left that had all the memory there is; on the host, for it is to take none of the device's."""

    state: list[torch.Tensor]
    losses: list[float]
    norms: list[float | None]
    peak: int
    """Bytes, without those that were held before."""


def peak(found: FitResult) -> int:
    """Return the peak of the last window: the allocator's cache of what was before is in those of the first."""
    return found.history[-1].peak_bytes


def of(result: Any, kind: type) -> list[Any]:
    return [event for event in result.events if isinstance(event, kind)]


def left_by(found: FitResult, before: int = 0) -> Clean:
    history = found.history
    state = [tensor.detach().cpu() for tensor in state_of(found)]
    return Clean(state, [r.loss for r in history], [r.grad_norm for r in history], peak(found) - before)


@cache
def unlimited(optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, mode: Any = "off") -> Clean:
    before = held()
    return left_by(fit(optimizer, memory_saving=mode if isinstance(mode, str) else list(mode)), before)


@cache
def needed(mode: Any) -> int:
    """Return the bytes that a run takes which saves memory this way, beside those that are held."""
    most = unlimited(sgd, mode).peak
    if DEVICE == "standin:0":
        return most
    # A GPU copies beside its work, and with room to spare what is on its way to the host stays longer.
    least = 0
    while most - least > 2 * MIB:
        middle = (least + most) // 2
        limit = held() + middle
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AutoaccumWarning)  # of a limit below which not even a forward fits
                fit(memory_limit=limit, memory_saving=mode if isinstance(mode, str) else list(mode))
        except MemoryLimitError:
            least = middle
        else:
            most = middle
    return most


def assert_same(found: FitResult, clean: Clean) -> None:
    left = left_by(found)
    assert same(left.state, clean.state)
    assert (left.losses, left.norms) == (clean.losses, clean.norms)


class TestLevels:
    @pytest.mark.parametrize(
        ("below", "above", "name"),
        [
            ("off", "checkpoint", ALL),
            ("checkpoint", tuple(BOTH), f"{ALL}; offload"),
        ],
    )
    def test_one_sample_that_does_not_fit_is_trained_on(self, below: Any, above: Any, name: str) -> None:
        """The limit lies between what two levels need."""
        between = (needed(above) + needed(below)) // 2
        limit = held() + between
        found = fit(memory_limit=limit)
        assert_same(found, unlimited())
        assert peak(found) <= limit
        assert {change.step for change in of(found, MemorySaving)} == {1}
        assert of(found, MemorySaving)[-1].new == name
        assert [(measured.step, measured.saving) for measured in of(found, Recomputed)] == [(1, name)]

    def test_nothing_fits_where_the_lowest_level_does_not(self) -> None:
        below = needed(tuple(BOTH)) - 8 * MIB
        with pytest.raises(NothingFitsError) as caught:
            fit(memory_limit=held() + below)
        assert not {"activation checkpointing", "offload", "save_on_cpu"} & {one.name for one in caught.value.advice}

    def test_what_is_switched_off_is_advised(self) -> None:
        between = (needed(tuple(BOTH)) + needed("checkpoint")) // 2
        limit = held() + between
        with pytest.raises(NothingFitsError) as caught:
            fit(memory_limit=limit, memory_saving="off")
        how = {one.name: one.how for one in caught.value.advice}
        assert how["offload"] == how["activation checkpointing"] == 'memory_saving="auto"'
        with pytest.raises(NothingFitsError) as caught:
            fit(memory_limit=limit, memory_saving="checkpoint")
        how = {one.name: one.how for one in caught.value.advice}
        assert how["offload"] == 'memory_saving=["checkpoint", "offload"]'
        assert "activation checkpointing" not in how


class TestModes:
    @pytest.mark.parametrize("optimizer", [momentum, torch.optim.AdamW])
    @pytest.mark.parametrize("mode", ["offload", BOTH])
    def test_it_can_be_asked_for(self, mode: Any, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        found = fit(optimizer, memory_saving=mode)
        assert_same(found, unlimited(optimizer))
        (change,) = of(found, MemorySaving)
        assert (change.step, change.old) == (1, "off")
        assert change.blocks == (8 if mode is BOTH else 0)
        assert [measured.blocks for measured in of(found, Recomputed)] == ([8] if mode is BOTH else [])
        assert peak(found) < held() + unlimited(optimizer).peak


class Small(nn.Module):
    """Two blocks, of which one has a storage that is seen by three views."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Parameter(torch.randn(600, 600) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.wide[:WIDTH, :WIDTH]
        for block in self.blocks:
            x = block(x)
        q, k, v = torch.cat([x, x.sin(), x * 2], dim=-1).chunk(3, dim=-1)
        return self.head(q * k.tanh() + v.exp().clamp(max=2))  # type: ignore[no-any-return]


def accumulator(mode: Any, **options: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Small().to(DEVICE if DEVICE != "cpu" else "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    given: dict[str, Any] = {"micro_batch": 1, "memory_saving": mode, "verify": False, "patience": 0, **options}
    made = autoaccum.Accumulator(model, optimizer, training_step=loss_of, **given)
    batch = tuple(part[:, : LENGTH // 2].clone() for part in data(2))
    return made, model, optimizer, batch


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1].expand(-1, -1, WIDTH))


def left(made: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return all that a window has left, on the host: some is kept for other tests, and is to take none of the device."""
    gradients = [p.grad for p in model.parameters()]
    kept = [t for state in optimizer.state.values() for t in state.values()]
    there = [*gradients, *kept, *model.state_dict().values()]
    return [*(tensor.detach().to("cpu", copy=True) for tensor in there), torch.get_device_module().get_rng_state()]


@strides(17)
@pytest.mark.parametrize("windows_before", [0, 1])
@pytest.mark.parametrize("mode", ["offload", BOTH])
@pytest.mark.skipif("STANDIN_LIBRARY" not in os.environ, reason="only the stand-in refuses at will")
def test_memory_that_runs_out_at_any_allocation_is_replayed(mode: Any, windows_before: int, stride: int) -> None:
    """In copies to the host and back, in what is computed twice: compared or not."""

    def train(number: int | None) -> tuple[list[Any], int]:
        made, model, optimizer, batch = accumulator(mode)
        for _ in range(windows_before):
            made.step(batch)
        before = standin.allocations()
        with standin.fails_at(number or 0):
            made.backward(batch)
        count = standin.allocations() - before
        assert number is None or any(isinstance(event, OutOfMemory | MemorySaving) for event in made.events)
        return left(made, model, optimizer), count

    clean, count = train(None)
    assert same(clean, trained_plainly(windows_before))
    assert count > 50
    for number in range(1, count + 1, stride):
        assert same(train(number)[0], clean), number


@cache
def trained_plainly(windows_before: int) -> list[Any]:
    made, model, optimizer, batch = accumulator("off")
    for _ in range(windows_before):
        made.step(batch)
    made.backward(batch)
    return left(made, model, optimizer)


class TestBetweenWindows:
    def test_a_resumed_run_stands_on_its_level(self, tmp_path: Any) -> None:
        room = unlimited(momentum, tuple(BOTH)).peak + 4 * MIB
        limit = held() + room
        options: dict[str, Any] = {"memory_limit": limit, "run_dir": tmp_path, "checkpoint_every": 1}
        fit(momentum, **{**options, "steps": 2})
        then = fit(momentum, **{**options, "steps": 3})
        assert not of(then, OutOfMemory) or max(event.step for event in of(then, OutOfMemory)) == 1
        assert "offload" in then.history[-1].memory_saving
        assert same(left_by(then).state[:-2], unlimited(momentum).state[:-2])

    def test_a_state_is_taken_up_and_gone_down_from(self) -> None:
        """A run that stood on a level goes further down when that is too little."""
        first, *_, batch = accumulator("checkpoint")
        first.step(batch)
        state = first.state_dict()
        same_again, _, _, _ = accumulator("checkpoint")
        same_again.load_state_dict(state)
        same_again.step(batch)
        assert not of(same_again, MemorySaving), "it stands there already"
        more, _, _, _ = accumulator("auto")
        more.load_state_dict(state)
        told = more._step.saving.lower(2, 0, 0)
        assert told.old.startswith("checkpoint")
        assert told.new == f"{told.old}; offload"
