"""Steps for tests: a small model on the device of the tests, with whatever a test wants otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.events import Event
from autoaccum.memory.base import Memory
from autoaccum.memory.devices import memory_of
from autoaccum.memory.limit import Limit
from autoaccum.step.job import Job, Precision
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.step import Step
from autoaccum.step.terms import CountItems, LossOf
from autoaccum.training.options import FitArguments
from autoaccum.training.setup import Place, make_step
from tests.devices import DEVICE, there

HERE = torch.device(DEVICE)
ENDLESS = 2**60


class Within:
    """Another memory, of which there is so much in all."""

    def __init__(self, memory: Memory, total_bytes: int) -> None:
        self._memory = memory
        self._total_bytes = total_bytes

    def limit(self) -> int:
        return self._total_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def step_of(
    model: nn.Module,
    *,
    emit: Callable[[Event], None] = lambda event: None,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: LossOf | None = None,
    num_items: CountItems | None = None,
    precision: Precision = "fp32",
    memory: Memory | None = None,
    limit_now: Callable[[], int] = lambda: ENDLESS,
    full_window: int | None = 8,
    micro_batch: int | None = 4,
    headroom: float = 0.05,
    patience: float = 0.0,
    clip_norm: float | None = None,
    noise_scale: bool = False,
    verify: bool = False,
    strict: bool = False,
) -> Step:
    """Return a step of a model whose outputs are classified; its device has boundless memory, and nothing is measured."""
    memory, model = memory_of(HERE) if memory is None else memory, there(model)
    job = Job(
        model=model,
        modules=(model,),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer,
        loss_of=loss_function(cross_entropy, None) if loss_of is None else loss_of,
        num_items=num_items,
        device=HERE,
        precision=precision,
    )
    limit = Limit(Within(memory, ENDLESS), limit_now)  # type: ignore[arg-type]
    return make_step(
        job,
        FitArguments(
            model, None, effective_batch=8, headroom=headroom, patience=patience, clip_norm=clip_norm, verify=verify,
            strict=strict,
        ),
        Place(device=HERE, memory=memory, limit=limit),
        emit,
        micro_batch=micro_batch,
        full_window=full_window,
        noise_scale=noise_scale,
    )  # fmt: skip
