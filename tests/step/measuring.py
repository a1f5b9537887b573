"""Jobs, windows and measurements for tests: a small model on a HERE, in float64 where nothing else is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.step.job import Job
from autoaccum.step.measurement import Measurement
from autoaccum.step.terms import CountItems
from autoaccum.training.setup import GivenBatch
from tests.devices import DEVICE, there
from tests.models import classes, mlp


class Log(list[Any]):
    """A list that is of no kind whose contents are put back: a test may write down what happens."""


HERE = torch.device(DEVICE)
DOUBLE = torch.float64


def plain(model: Any, batch: Any) -> torch.Tensor:
    """A mean over samples."""
    return cross_entropy(model(batch[0]), batch[1])


def summed(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def squared_mean(model: Any, batch: Any) -> torch.Tensor:
    """Neither a mean nor a sum, and nothing to blame but itself."""
    return plain(model, batch).square()


def pairs(model: Any, batch: Any) -> torch.Tensor:
    """Let samples meet."""
    outputs = model(batch[0])
    return cross_entropy(outputs @ outputs.exp().T, torch.arange(len(outputs), device=outputs.device))


def job_of(
    loss_of: Any = plain, model: nn.Module | None = None, num_items: CountItems | None = None, **options: Any
) -> Job:
    model = there(mlp(DOUBLE) if model is None else model)
    return Job(
        model=model,
        modules=(model,),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_of=loss_of,
        num_items=num_items,
        device=HERE,
        **options,
    )


def window_of(num_samples: int = 12, batch: Any = None) -> GivenBatch:
    return GivenBatch(classes(num_samples, DOUBLE) if batch is None else batch, num_samples, HERE)


def measurement_of(
    loss_of: Any = plain,
    model: nn.Module | None = None,
    *,
    batch: Any = None,
    num_items: CountItems | None = None,
    rewind: Callable[[], None] = lambda: None,
    forward_only: bool = False,
    count: int = 6,
) -> Measurement:
    """Return a measurement of the first samples of a window, not entered yet."""
    return Measurement(
        job_of(loss_of, model, num_items),
        window_of(count, batch),
        range(count),
        rewind=rewind,
        forward_only=forward_only,
    )
