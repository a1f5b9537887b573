"""``probe``: the search for the largest micro-batch on throw-away trials, for those who want only the answer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum._units import format_bytes
from autoaccum.data.base import Source
from autoaccum.data.sources import open_source
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.distributed.gradients import zero_gradient
from autoaccum.errors import NothingFitsError
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.limit import Limit, MemoryLimit
from autoaccum.memory.oom import RanOut, attempt, named, room_for_model, without_frames
from autoaccum.memory.waiting import Patience, Shortage
from autoaccum.planning.attempts import Piece, Reading
from autoaccum.planning.costs import MemoryModel, TimeModel, Trial, fit_time_model
from autoaccum.planning.cuts import cut
from autoaccum.planning.limits import Limits
from autoaccum.planning.plans import Plan, plan, sizes_text
from autoaccum.planning.schedules import Progress, Schedule, schedule_of
from autoaccum.planning.search import FEW_SIZES_FIRST
from autoaccum.planning.trials import Trials
from autoaccum.reporting.lines import Facts, as_line, as_table
from autoaccum.step.error_context import beyond_memory, may_need_another
from autoaccum.step.job import Autocast, Precision, autocast
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.memory_saving import advise
from autoaccum.step.meter import compiled_parts, heard
from autoaccum.step.module_state import into_training, smallest_micro_batch
from autoaccum.step.optimizers import (
    OptimizerLike,
    allocate_state,
    bare_tensors,
    make_optimizer,
    move,
    sparsely_trained,
    trainable_parameters,
)
from autoaccum.step.terms import LossOf, total
from autoaccum.training.declarations import check
from autoaccum.training.options import CHECKS, EACH, modules_of, without_schedule
from autoaccum.training.single_process import Ranks, only_run, refuse_ranks
from autoaccum.training.synonyms import answering
from autoaccum.training.traces import no_trace

GROWTH = 64
"""How many times its largest success a probe may try next, where the device itself refuses what is too much."""


told: ContextVar[Callable[[Trial], None] | None] = ContextVar("told", default=None)
"""What is called with each trial as it ends, by whoever shows them before the report is there."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ProbeReport:
    """All that a probe found out."""

    max_micro_batch: int
    """The largest micro-batch that was tried and fitted, within 2 % of the largest there is, and 2 % more for each
    trial beyond four."""
    trials: tuple[Trial, ...]
    """Everything that was tried, in order."""
    memory_model: MemoryModel | None
    """Peak bytes by samples; None when a single size was enough to know."""
    time_model: TimeModel | None
    """Seconds by samples; None likewise."""
    limit_bytes: int
    """Bytes this process may use on the device, the headroom included."""
    plan: Plan | None
    """For the effective batch that was passed; None where a function is to say it, and where no plan has micro-batches
    of at least ``min_micro_batch`` that fit."""
    num_samples: int | None = None
    """Samples of the data, which are repeated where more of them are tried; None where nobody knows."""

    # Trials and models are for whoever computes with them: shown, they would hide the answer.

    def __repr__(self) -> str:
        return as_line("ProbeReport", self._facts())

    def _repr_html_(self) -> str:
        return as_table("ProbeReport", self._facts())

    def _facts(self) -> Facts:
        facts: Facts = {"max_micro_batch": self.max_micro_batch, "trials": len(self.trials)}
        facts["limit"] = format_bytes(self.limit_bytes)
        return facts if self.plan is None else facts | {"plan": sizes_text(self.plan.sizes)}


@answering("probe")
@only_run("probe", picks_device=True)
def probe(
    model: nn.Module,
    data: Any,
    *,
    effective_batch: int | str | Schedule | Callable[[Progress], int] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    optimizer: OptimizerLike | None = None,
    max_micro_batch: int | None = None,
    min_micro_batch: int | None = None,
    memory_limit: MemoryLimit = None,
    headroom: float = 0.05,
    patience: float = 0.0,
    precision: Precision = "fp32",
    device: str | torch.device | None = None,
    ranks: Ranks = "together",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
) -> ProbeReport:
    """Find the largest micro-batch that fits, by forwards and backwards that leave no trace.

    Parameters, buffers, gradients, optimizer state, random states, training mode, what modules keep in attributes of
    their own, and data are afterwards what they were, to the bit. The memory of
    gradients and of the optimizer's state is counted, whether they are there yet or not.

    Args:
        model: the module to train.
        data: as for ``fit``; its first samples are repeated to make batches of any size.
        effective_batch: samples per optimizer step, the most of them where it is a schedule: no larger micro-batch is
            tried, and a plan is made.
        loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a
            dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
        training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
            neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
        optimizer: an Optimizer or a function (parameters) -> Optimizer; AdamW when left out. Its state must fit too.
        max_micro_batch: the most samples to try at once.
        min_micro_batch: the fewest samples of one forward and backward.
        memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one
            of these.
        headroom: fraction of the limit to leave free, but for the smallest micro-batch.
        patience: seconds to wait for memory that others hold where not even the smallest micro-batch fits beside it.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        device: where to train, such as cpu or cuda:1; an accelerator where there is one.
        ranks: together: several processes that were started together are refused; independent: each looks for itself.
        collate_fn: makes a batch of a list of samples.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits: samples,
            graphs, packed, flattened(...), tensors. Read off the batches when left out.
        batch_dim: the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent there
            (others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        NothingFitsError: not even one sample fits.
        LimitBelowModelError: not even the model fits.

    >>> import torch
    >>> report = probe(
    ...     torch.nn.Linear(3, 1), (torch.randn(10, 3), torch.randn(10, 1)), device="cpu",
    ...     loss_fn=torch.nn.functional.mse_loss, effective_batch=8,
    ... )
    >>> report.max_micro_batch, report.plan.sizes
    (8, (8,))
    """
    checked = check(without_schedule(locals()), EACH, CHECKS)
    refuse_ranks(ranks, "probe")
    loss_of, schedule = checked[loss_function], checked.get(schedule_of)
    most = None if schedule is None else schedule.largest
    modules = modules_of(model, loss_fn, training_step)
    trainable_parameters(model, modules, optimizer)  # raises where there are none
    bare = bare_tensors(optimizer, modules)
    on = find_device(device)
    memory = memory_of(on)  # by which peaks are read
    # Beyond a limit that only we know of, an allocation would succeed, and could take the machine's last memory.
    limit = Limit(memory, memory_limit)
    source = open_source(data, seed=0, shuffle=False, device=on, collate_fn=collate_fn, split=checked[split_of])
    # Samples are repeated, and without an effective batch nothing says how many are of use: a million is enough.
    ceiling, fewest = min(n for n in (max_micro_batch, most, 2**20) if n is not None), min_micro_batch or 1
    _checks.of_smallest_window(min_micro_batch, None if schedule is None else schedule.smallest)
    context = autocast(precision, on)
    with named("a probe was begun, or was undone"), no_trace(modules, optimizer, on, functions=[loss_of]), limit.kept():
        with room_for_model(memory, limit.bytes):
            move(modules, optimizer, on)
            parameters = trainable_parameters(model, modules, optimizer)  # to move some makes others of them
            sparse = sparsely_trained(modules)  # their gradients grow with the samples, so they are no fixed cost
            into_training(model)
            state_of = make_optimizer(optimizer, None, parameters, (loss_fn, training_step))
            _make_gradients([*parameters, *(tensor for tensor in bare if tensor.requires_grad)], sparse)
            allocate_state(state_of, modules)
        limits = Limits(limit.bytes, headroom)
        search = Trials(
            limits,
            smallest=max(needed := smallest_micro_batch(modules), fewest),  # 2 with BatchNorm
            first=FEW_SIZES_FIRST if compiled_parts(model, modules, [loss_of]) else None,
            growth=GROWTH if limit.is_enforced else 2,
            start_bytes=_begin(memory),
        )
        trying = Patience(limit, patience, lambda waiting: None, step=0, phase="probe")

        def run(piece: Piece) -> Reading | Shortage | Exception:
            for weight in sparse:  # as long as all the trials before it, by now
                weight.grad = None
            is_alone = piece.size == search.smallest == 1 < ceiling
            return _try(piece, model, source, loss_of, context, memory, on, is_alone=is_alone)

        cause, alone = _search(search, ceiling, partial(_measured, run, search, on), trying, limits, limit)
        history, largest = search.history, search.largest
        if largest == 0 and alone is not None:
            raise alone
        if largest == 0:  # asked for advice in here, where the model still is as it was tried
            raise NothingFitsError(
                phase="probe",
                micro_batch=search.smallest,
                peak_bytes=history[-1].peak_bytes,
                limit_bytes=limit.bytes,
                min_micro_batch=min_micro_batch if fewest > needed else None,
                advice=advise(modules, state_of, precision, on),
            ) from cause
    return ProbeReport(
        max_micro_batch=largest,
        trials=tuple(history),
        memory_model=search.memory_model,
        time_model=fit_time_model(history),
        limit_bytes=limit.bytes,
        plan=None if most is None else plan(most, largest) if min_micro_batch is None else _plan(most, largest, fewest),
        num_samples=source.num_samples,
    )


def _begin(memory: Memory) -> int:
    """Return what is in use before the first trial, in bytes: by tensors, where these are told from the rest."""
    memory.release()  # as before each trial, so that their peaks begin here
    return memory.usage().allocated_bytes


def _search(
    search: Trials,
    ceiling: int,
    run: Callable[[Piece], Reading | Shortage | Exception],
    trying: Patience,
    limits: Limits,
    limit: Limit,
) -> tuple[Exception | None, Exception | None]:
    """Run one trial after the other; return what the last one that ran out of memory had, and what a single sample had
    where two of them ran out of it, so that nobody knows whether these would do.
    """
    cause: Exception | None = None
    alone: Exception | None = None
    for piece in search.until_known(ceiling):
        # Predicted before it is run, so that a report can tell how good predictions were.
        predicted = search.predicted_bytes(piece.size)
        while True:
            reading = run(piece)
            if piece.size > search.smallest or not isinstance(reading, Shortage) or not trying.may_pass(reading):
                break
            limits.heed(limit.read())
        if isinstance(reading, Exception):
            alone, search.smallest = beyond_memory(reading), 2
        elif isinstance(reading, Shortage):
            cause = reading.error
            search.ran_out(piece, predicted)
        else:
            search.fitted(piece, reading.peak_bytes, reading.seconds, predicted, reading.allocated_bytes)
            if piece.size <= search.smallest:  # as in training, which moves the target where little is free above it
                limits.learn_least(reading.peak_bytes or 0)
        if search.history and (tell := told.get()) is not None:
            tell(search.history[-1])
    return cause, alone


def _measured(
    run: Callable[[Piece], Reading | Shortage | Exception], search: Trials, device: torch.device, piece: Piece
) -> Reading | Shortage | Exception:
    """Run a trial, and return what it took: in its second run where the first compiles, or loads kernels."""
    before = heard()
    first = run(piece)
    if (device.type == "cpu" and heard() is before) or not isinstance(first, Reading):
        return first
    reading = run(piece)
    # What was asked for and not there was done without, more slowly: only of the smallest there is no other.
    if not isinstance(reading, Reading) or not reading.fell_short or piece.size <= search.smallest:
        return reading
    error = torch.OutOfMemoryError(f"A workspace did not fit beside {piece.size} samples.")
    return Shortage(micro_batch=piece.size, peak_bytes=reading.peak_bytes or 0, error=error)


def _make_gradients(parameters: Sequence[torch.Tensor], sparse: Sequence[torch.Tensor]) -> None:
    """Make gradients be there, as they are in every micro-batch of a window but the first."""
    for p in parameters:
        if not any(p is weight for weight in sparse):  # zeros would make its gradient dense
            p.grad = zero_gradient(p)


def _plan(effective_batch: int, largest: int, smallest: int) -> Plan | None:
    """Return the plan for a window; None where it cannot be cut into micro-batches of both bounds."""
    sizes = cut(effective_batch, largest, smallest)
    return None if max(sizes) > largest else Plan(ranks=(sizes,))


def _try(
    piece: Piece,
    model: nn.Module,
    source: Source,
    loss_of: LossOf,
    context: Autocast,
    memory: Memory,
    device: torch.device,
    *,
    is_alone: bool,
) -> Reading | Shortage | Exception:
    """Run one forward and backward; return what it took, or that memory ran out.

    Return the error of a single sample that cannot be computed, of which two may.
    """
    # What trials before it have left in the allocator would count in its peak.
    memory.release()
    memory.reset_peak()
    started, ooms = clock.now(), memory.usage().ooms

    def forward_and_backward() -> Reading:
        batch = source.example(piece.size)
        with context():
            loss = total(loss_of(model, batch))
        # The call of training itself, so that it takes the same.
        torch.autograd.backward(loss)
        if device.type != "cpu":  # kernels run behind the host, and errors and peaks come as late
            torch.accelerator.synchronize(device)
        seconds = clock.now() - started
        usage = memory.usage()
        reading = Reading(piece, seconds=seconds)
        return reading.take(usage.peak_bytes, usage.allocated_peak_bytes, fell_short=usage.ooms > ooms)

    try:
        outcome = attempt(forward_and_backward)
    except Exception as error:
        if is_alone and may_need_another(error):
            return without_frames(error)
        raise
    if not isinstance(outcome, RanOut):
        return outcome
    peak_bytes = memory.peak()
    gc.collect()  # a failed forward may have left reference cycles that hold tensors
    memory.release()
    return Shortage(micro_batch=piece.size, peak_bytes=peak_bytes, error=outcome.error)
