"""What a settled window costs, counted and not timed: calls of this package's functions, and what these call of C.

Time would depend on load.
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
    """Make a profiler that counts calls of the package's functions, by file and function, and those of C in them."""

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename.startswith(PACKAGE):
            of = "C in " if event == "c_call" else ""
            found[f"{of}{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"] += 1

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
    ("calls", "most", "most_of_c"),
    [
        (lambda: calls_of_fit(1), 91, 80),
        (lambda: calls_of_fit(8), 204, 216),
        (lambda: calls_of_fit(8, accumulate="joined"), 736, 1620),
        (lambda: calls_of_accumulator(8), 337, 245),
    ],
    ids=["one micro-batch", "eight", "eight, joined", "Accumulator, eight"],
)
def test_calls_of_a_settled_window(calls: Callable[[], Counter[str]], most: int, most_of_c: int) -> None:
    """Raise a number only for what users get by it: each call is in every window of every run."""
    found = calls()
    of_c = sum(count for name, count in found.items() if name.startswith("C in "))
    assert (found.total() - of_c) / COUNTED <= most, found.most_common(20)
    assert of_c / COUNTED <= most_of_c, found.most_common(20)
