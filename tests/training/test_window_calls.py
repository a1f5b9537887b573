"""What a settled window costs, counted and not timed: the calls of this package's own functions in it.

Time would depend on load. A call of Python is about a third of a microsecond; a window of a tiny model takes 300.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.events import StepReport
from autoaccum.testing import manual_clock

PACKAGE = str(Path(autoaccum.__file__).parent)
SETTLED, COUNTED = 150, 10
"""Windows before those that are counted, in which some are measured, and how many these are."""


def made() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(512, 8), torch.randint(4, (512,)))


def counting(found: Counter[str]) -> Callable[[FrameType, str, Any], None]:
    """Make a profiler that counts calls of the package's functions, by file and function."""

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found[f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"] += 1

    return count


def calls_of_fit(num_micro_batches: int, **options: Any) -> Counter[str]:
    model, optimizer, data = made()
    found: Counter[str] = Counter()

    def begin_and_end(record: object) -> None:
        if isinstance(record, StepReport) and record.step == SETTLED:
            sys.setprofile(counting(found))
        elif isinstance(record, StepReport) and record.step == SETTLED + COUNTED:
            sys.setprofile(None)

    # Its clock stands still, so that no window has a look at the memory, as fifty a second have.
    with manual_clock():
        autoaccum.fit(
            model,
            data,
            effective_batch=8 * num_micro_batches,
            micro_batch=8,
            steps=SETTLED + COUNTED,
            loss_fn=nn.functional.cross_entropy,
            optimizer=optimizer,
            callbacks=[begin_and_end],
            progress=False,
            **options,
        )
    return found


def calls_of_accumulator(num_micro_batches: int) -> Counter[str]:
    model, optimizer, data = made()
    accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=nn.functional.cross_entropy, micro_batch=8)
    found: Counter[str] = Counter()
    batch = tuple(part[: 8 * num_micro_batches] for part in data)
    with manual_clock():
        for _ in range(SETTLED):
            accumulator.step(batch)
        sys.setprofile(counting(found))
        for _ in range(COUNTED):
            accumulator.step(batch)
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("calls", "most"),
    [
        (lambda: calls_of_fit(1), 126),
        (lambda: calls_of_fit(8), 308),
        (lambda: calls_of_fit(8, accumulate="joined"), 728),
        (lambda: calls_of_accumulator(8), 444),
    ],
    ids=["one micro-batch", "eight", "eight, joined", "Accumulator, eight"],
)
def test_calls_of_a_settled_window(calls: Callable[[], Counter[str]], most: int) -> None:
    """Raise a number only for what users get by it: each call is in every window of every run."""
    found = calls()
    assert found.total() / COUNTED <= most, found.most_common(20)
