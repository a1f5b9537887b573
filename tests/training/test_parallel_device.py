"""On a device whose work goes on while the host launches more, the plan is about as fast as the best by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.memory import clock
from tests import standin
from tests.models import classes

pytestmark = pytest.mark.gpu
WINDOW = 128


@pytest.fixture(autouse=True)
def _only_there(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "standin":
        pytest.skip("needs the clock of the stand-in device")


def fit(costs: tuple[float, float], micro_batch: Any, windows: int) -> tuple[autoaccum.FitResult, list[float]]:
    """Return a run, and the virtual seconds at the end of each window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    with standin.VirtualClock(*costs) as device, clock.using(device):
        ends: list[float] = []
        result = autoaccum.fit(
            model,
            classes(WINDOW * windows),
            effective_batch=WINDOW,
            micro_batch=micro_batch,
            loss_fn=cross_entropy,
            callbacks=[lambda record: ends.append(device.now()) if isinstance(record, autoaccum.StepReport) else None],
            verify=False,
            cache=False,
            progress=False,
            device="standin",
        )
    return result, ends


@pytest.mark.parametrize(
    ("per_launch", "per_number"),
    [(1e-5, 1e-11), (1e-5, 1e-8), (1e-6, 1e-7)],
    ids=["the host is slow", "both count", "the device is slow"],
)
def test_the_plan_is_about_as_fast_as_the_best_by_hand(per_launch: float, per_number: float) -> None:
    result, _ = fit((per_launch, per_number), "auto", 24)
    seconds = {}
    for micro_batch in (8, 16, 32, 64, 128, result.plan.sizes[0]):
        _, ends = fit((per_launch, per_number), micro_batch, 6)
        seconds[micro_batch] = ends[-1] - ends[1]
    assert max(seconds.values()) > 1.5 * min(seconds.values()) or per_number > 1e-8  # there is something to be chosen
    assert seconds[result.plan.sizes[0]] <= 1.05 * min(seconds.values())
