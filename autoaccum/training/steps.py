"""Puts the parts of a ``Step`` together: for ``fit``, and for the loop of one's own that an ``Accumulator`` serves."""

from __future__ import annotations

from collections.abc import Callable

from autoaccum.errors import ArgumentError
from autoaccum.events import Event
from autoaccum.loss.coupling import is_compiled, smallest_micro_batch
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.planning.tuner import Tuner
from autoaccum.verification.examiner import Examiner
from autoaccum.window.job import Job
from autoaccum.window.meter import Meter
from autoaccum.window.step import Step
from autoaccum.window.transaction import Transaction

BOUNDLESS = 2**30
"""Samples in a micro-batch where nothing says how many are of use."""


def make_step(
    job: Job,
    *,
    micro_batch: int | None,
    max_micro_batch: int | None,
    full_window: int | None,
    memory: Memory,
    limit: Limit,
    headroom: float,
    clip_norm: float | None,
    emit: Callable[[Event], None],
    noise_scale: bool = False,
) -> Step:
    """Return what takes the steps of a run.

    Args:
        job: what is computed; everything is on the device, and the optimizer's state is allocated.
        micro_batch: its samples; None to find them.
        max_micro_batch: the most samples to try at once.
        full_window: samples of the largest window of the run, where that is known.
        memory: of the device.
        limit: what may be used of it.
        headroom: fraction of the limit that plans leave free.
        clip_norm: 2-norm to clip each window's gradient to.
        emit: takes the events.
        noise_scale: whether windows that are cut tell of the noise in their gradient.

    Raises:
        ArgumentError: BatchNorm, and micro-batches of one sample.
    """
    smallest = smallest_micro_batch(job.modules)
    for name, value in (("micro_batch", micro_batch), ("max_micro_batch", max_micro_batch)):
        if value is not None and value < smallest <= (full_window or smallest):
            cure = "The model holds BatchNorm in training mode, which has no statistics of one sample."
            raise ArgumentError(name, value, f"an int of at least {smallest}", cure)
    ceilings = [samples for samples in (full_window, max_micro_batch) if samples is not None]
    tuner = Tuner(
        ceiling=min(ceilings, default=BOUNDLESS),
        limit_bytes=limit.bytes,
        headroom=headroom,
        search=micro_batch is None,
        largest=min(micro_batch or 0, max_micro_batch or micro_batch or 0),
        smallest=smallest,
        few_sizes=smallest > 1 or is_compiled(job.model),  # statistics of a few samples are poor
        fewest=2 if noise_scale and micro_batch is None else 1,
    )
    transaction = Transaction(job, clip_norm=clip_norm, noise_scale=noise_scale)
    return Step(
        job,
        transaction=transaction,
        examiner=Examiner(job, transaction),
        tuner=tuner,
        meter=Meter(memory, job.device, is_enforced=limit.is_enforced, needs_room=tuner.needs_room),
        memory=memory,
        limit=limit,
        emit=emit,
    )
