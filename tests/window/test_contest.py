"""A rung is chosen by time: the next one is tried where that may gain, and kept if windows are faster.

The clock moves in the forward of the whole model, which no rung computes twice: by as much for each micro-batch, so that
few large ones are faster, or by as much for each sample, so that nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import autoaccum
from autoaccum.events import MemorySaving, OutOfMemory, Planned, StepReport
from autoaccum.memory.clock import ManualClock
from autoaccum.testing import manual_clock, simulated_memory
from tests.window.test_saving import UNLIMITED, Stack, data, of, sgd

STEPS = 30


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock() as given:
        yield given


class Timed(Stack):
    def __init__(self, tick: Callable[[int], None]) -> None:
        super().__init__()
        self.tick = tick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tick(len(x))
        return super().forward(x)


def train(limit: int, tick: Callable[[int], None], **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    given: dict[str, Any] = {"effective_batch": 8, "steps": STEPS, "verify": False, **options}
    with simulated_memory(limit) as device:
        found = autoaccum.fit(
            Timed(tick), data(16), loss_fn=F.mse_loss, optimizer=sgd, device="cpu", progress=False, cache=False,
            **given,
        )  # fmt: skip
    return found, device


@pytest.fixture(scope="module")
def limit() -> int:
    """Holds one sample plainly, and two with all blocks computed twice."""
    plain, twice = (
        train(UNLIMITED, lambda samples: None, micro_batch=size, memory_saving=how, steps=2)[1].peak
        for size, how in ((1, "off"), (2, "checkpoint"))
    )
    assert twice < plain
    return int(plain * 1.1)


def rungs(found: Any) -> list[str]:
    return [change.new for change in of(found, MemorySaving)]


def per_micro_batch(clock: ManualClock) -> Callable[[int], None]:
    return lambda samples: clock.advance(1.0)


def per_sample(clock: ManualClock) -> Callable[[int], None]:
    return lambda samples: clock.advance(float(samples))


def test_it_is_kept_where_it_is_faster(clock: ManualClock, limit: int) -> None:
    found, device = train(limit, per_micro_batch(clock))
    assert rungs(found)
    assert "off" not in rungs(found)
    last = found.history[-1]
    assert max(last.micro_batches) > 1
    assert last.memory_saving == rungs(found)[-1]
    assert device.peak <= limit
    assert "ms a sample in micro-batches of 1 may be more than it takes so" in of(found, MemorySaving)[0].reason
    plainly, _ = train(limit, per_micro_batch(clock), memory_saving="off")
    assert {max(report.micro_batches) for report in plainly.history} == {1}
    assert [report.effective_batch for report in found.history] == [8] * STEPS


def test_what_is_no_faster_is_left_and_the_plan_of_before_is_used_at_once(clock: ManualClock, limit: int) -> None:
    found, _ = train(limit, per_sample(clock))
    assert rungs(found)[-1] == "off"
    left = of(found, MemorySaving)[-1]
    assert "were enough without" in left.reason
    assert not [event for event in of(found, OutOfMemory) if event.step >= left.step], "nothing is searched for again"
    assert [event.step for event in of(found, Planned)][-1] == left.step - 1
    assert {report.memory_saving for report in found.history[left.step :]} == {"off"}
    assert {report.micro_batches for report in found.history[left.step :]} == {(1,) * 8}


@pytest.mark.parametrize("options", [{"memory_saving": "off"}, {"micro_batch": 1}])
def test_nothing_is_tried_where_the_user_has_said_how(options: dict[str, Any], clock: ManualClock, limit: int) -> None:
    assert rungs(train(limit, per_micro_batch(clock), **options)[0]) == []


def test_nothing_is_tried_where_windows_are_not_cut_small(clock: ManualClock) -> None:
    assert rungs(train(UNLIMITED, per_micro_batch(clock))[0]) == []


@pytest.mark.parametrize("stop", range(4, 16, 3))
def test_a_run_that_is_resumed_in_its_midst_comes_to_the_same_rung(
    stop: int, clock: ManualClock, limit: int, tmp_path: Path
) -> None:
    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == stop:
            raise autoaccum.StopTraining

    for tick in (per_micro_batch(clock), per_sample(clock)):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        whole, _ = train(limit, tick)
        train(limit, tick, run_dir=place, checkpoint_every=1, callbacks=[end])
        found, _ = train(limit, tick, run_dir=place, checkpoint_every=1)
        assert found.history[-1].memory_saving == whole.history[-1].memory_saving
        assert found.history[-1].micro_batches == whole.history[-1].micro_batches
