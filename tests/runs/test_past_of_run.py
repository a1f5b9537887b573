"""One run's use of past trials, with a tuner alone: what a whole run keeps and recalls is in test_trainer.py."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.errors import NothingFitsError
from autoaccum.planning.costs import Trial
from autoaccum.planning.tuner import Tuner
from autoaccum.runs.past import Past
from autoaccum.runs.past_of_run import PastOfRun
from tests.models import mlp

CPU = torch.device("cpu")


class Window:
    """Of samples that are alike, or all of one length."""

    def __init__(self, num_samples: int = 64, length: int | None = None, error: Exception | None = None) -> None:
        self.num_samples = num_samples
        self.lengths = None if length is None else (length,) * num_samples
        self._error = error
        self.asked: list[tuple[int, int]] = []

    def micro_batch(self, start: int, size: int) -> Any:
        self.asked.append((start, size))
        if self._error is not None:
            raise self._error
        return torch.zeros(size, 8), torch.zeros(size, dtype=torch.long)


def cache(model: nn.Module | None = None, **facts: Any) -> PastOfRun:
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PastOfRun(
        [model], optimizer, device=CPU, **{"precision": "fp32", "compiled": False, "functions": (), **facts}
    )


def tuner(smallest: int = 1) -> Tuner:
    return Tuner(ceiling=64, limit_bytes=10**6, headroom=0, search=True, smallest=smallest)


def said(one: Tuner, num_samples: int, lengths: Any = None, most: int = 1) -> list[tuple[int, bool]]:
    """The first pieces of the next window: their samples, and whether they are trials."""
    return [(piece.size, piece.is_trial) for piece in islice(one.window(num_samples, lengths), most)]


def trained(one: Tuner) -> Tuner:
    for size in (1, 2, 4):
        one.observe(size, 1000 + 10 * size)
    return one


def test_what_was_measured_is_recalled_by_the_next() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=500)
    assert began.past == ()
    first.keep(trained(began))
    assert len(Past().files()) == 1
    second = tuner()
    cache(mlp(seed=5)).recall(Window(), second, used_bytes=500)
    assert [(trial.micro_batch, trial.peak_bytes) for trial in second.past] == [(1, 1010), (2, 1020), (4, 1040)]


@pytest.mark.parametrize("facts", [{"precision": "bf16"}, {"compiled": True}, {"model": nn.Linear(8, 3)}])
def test_another_key_another_past(facts: dict[str, Any]) -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    first.keep(trained(began))
    other = tuner()
    cache(**facts).recall(Window(), other, used_bytes=0)
    assert other.past == ()


def test_samples_that_differ_in_length_are_another_key() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    first.keep(trained(began))
    other = tuner()
    cache().recall(Window(length=7), other, used_bytes=0)
    assert other.past == ()


def test_what_is_held_now_counts_with_the_gradients() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    first.keep(trained(began))
    second = tuner()
    cache().recall(Window(), second, used_bytes=50_000)
    gradients = sum(p.nbytes for p in mlp().parameters())
    assert second.predicted_bytes(4) == 50_000 + gradients + 40


@pytest.mark.parametrize(("limit_bytes", "used_bytes", "is_told"), [(10**6, 10**5, True), (10**6, 10**4, False)])
def test_a_failure_is_told_to_runs_of_this_process_that_have_no_more_room(
    limit_bytes: int, used_bytes: int, is_told: bool
) -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=10**5)
    trained(began).out_of_memory(7, 64)
    first.keep(began)
    second = tuner()
    cache().recall(Window(), second, used_bytes=used_bytes)
    assert [trial.micro_batch for trial in second.past] == [1, 2, 4], "and to no other process"
    assert second.history == ([Trial(micro_batch=7, fits=False)] if is_told else [])
    assert said(second, 64, most=2) == [(1, False), (4, True)], "what was settled on then"


def test_a_failure_that_was_told_is_not_told_again_as_one_of_more_room() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=10**5)
    trained(began).out_of_memory(7, 64)
    first.keep(began)
    for used_bytes, is_told in ((70_000, True), (40_000, False)):  # each 3 % more room than the one before
        later, other = cache(), tuner()
        later.recall(Window(), other, used_bytes=used_bytes)
        assert (other.told is not None) == is_told
        later.keep(other)


def test_a_failure_that_a_success_has_overruled_is_not_told() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    trained(began).out_of_memory(7, 64)
    began.observe(8, 1080)
    first.keep(began)
    second = tuner()
    cache().recall(Window(), second, used_bytes=0)
    assert second.history == []


def test_the_room_of_a_failure_is_what_there_was_then() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    trained(began).out_of_memory(7, 64, limit_bytes=10**5)
    began.look(10**6, None)  # a neighbour has left
    first.keep(began)
    second = tuner()
    cache().recall(Window(), second, used_bytes=0)
    assert second.told is None


def test_that_the_smallest_failed_is_tried_again() -> None:
    """Whoever was told so could try nothing, and would never find out that memory came back."""
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    with pytest.raises(NothingFitsError):
        began.out_of_memory(1, 64)
    first.keep(began)
    second = tuner()
    cache().recall(Window(), second, used_bytes=0)
    assert second.told is None
    assert said(second, 64) == [(1, False)]
    assert said(second, 1) == [(1, True)]


def test_a_failure_that_was_told_and_overruled_is_told_no_more() -> None:
    first, began = cache(), tuner()
    first.recall(Window(), began, used_bytes=0)
    trained(began).out_of_memory(7, 64)
    first.keep(began)
    for is_told in (True, False):
        later, other = cache(), tuner()
        later.recall(Window(), other, used_bytes=0)
        assert (other.told is not None) == is_told
        other.observe(8, 1080)
        later.keep(other)


def test_of_samples_that_differ_in_length_too_a_failure_leaves_what_was_measured() -> None:
    first, began = cache(), tuner()
    first.recall(Window(length=7), began, used_bytes=0)
    said(began, 64, (7,) * 64)
    for size in (1, 2, 4):
        began.observe(size, 1000 + 10 * size, length=7)
    began.out_of_memory(8, 64, (7,) * 64, length=7)
    first.keep(began)
    second = tuner()
    cache().recall(Window(length=7), second, used_bytes=0)
    before = second.predicted_bytes(28)
    said(second, 64, (7,) * 64)
    assert second.told is not None
    assert second.history == [second.told]
    assert second.predicted_bytes(28) == before is not None


def test_without_anything_measured_nothing_is_kept() -> None:
    one, began = cache(), tuner()
    one.recall(Window(), began, used_bytes=0)
    one.keep(began)
    assert Past().files() == []


def test_what_was_not_recalled_is_not_kept() -> None:
    """A run that was resumed in its midst has no first window to tell the shapes by."""
    cache().keep(trained(tuner()))
    assert Past().files() == []


@pytest.mark.parametrize(("smallest", "num_samples", "expected"), [(1, 64, 1), (16, 64, 16), (16, 3, 3)])
def test_it_looks_at_the_smallest_micro_batch(smallest: int, num_samples: int, expected: int) -> None:
    window = Window(num_samples)
    cache().recall(window, tuner(smallest), used_bytes=0)
    assert window.asked == [(0, expected)]


def test_memory_that_runs_out_while_looking_is_no_error() -> None:
    one, began = cache(), tuner()
    one.recall(Window(error=torch.OutOfMemoryError("CUDA out of memory.")), began, used_bytes=0)
    one.keep(trained(began))
    assert Past().files() == []


def test_an_error_of_the_data_is_one() -> None:
    with pytest.raises(ValueError, match="mine"):
        cache().recall(Window(error=ValueError("mine")), tuner(), used_bytes=0)


def test_a_model_that_cannot_say_what_it_is_is_not_kept() -> None:
    class Mute(nn.Linear):
        def extra_repr(self) -> str:
            raise RuntimeError("mute")

    one, began = cache(Mute(8, 3)), tuner()
    one.recall(Window(), began, used_bytes=0)
    one.keep(trained(began))
    assert Past().files() == []
