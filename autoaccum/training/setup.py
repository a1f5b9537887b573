"""From the arguments of a run to its parts: each function makes one part, and ``Trainer`` calls them in their order.

The order matters. The seed is set before anything is drawn from it, modules are moved before the optimizer is made of
their parameters, and the optimizer's state is allocated before a plan counts on the memory that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autoaccum import _checks
from autoaccum.data import batches, randomness
from autoaccum.data.base import Source
from autoaccum.data.sources import open_source, shuffles
from autoaccum.data.splits import split_of, tensors
from autoaccum.data.streams import is_iterator
from autoaccum.distributed.fsdp import own_part, units_of
from autoaccum.distributed.group import Group
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.events import Event
from autoaccum.memory.base import Memory
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.limit import Limit, MemoryLimit
from autoaccum.memory.oom import room_for_model
from autoaccum.planning.limits import SavingMode, kinds_asked_for
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.schedules import SMOOTHING, NoiseScale, Progress, Schedule, schedule_of
from autoaccum.planning.tuner import Tuner
from autoaccum.runs.past_of_run import PastOfRun
from autoaccum.step.across_ranks import ShardedTransaction
from autoaccum.step.job import Job
from autoaccum.step.joined import JoinableTransaction, JoinedShares, why_not_joined
from autoaccum.step.joined_measurement import Joiner
from autoaccum.step.loss_functions import loss_function, stated
from autoaccum.step.memory_saving import Saving
from autoaccum.step.meter import Compilations, Meter, captures, compiled_parts, graphs_refused
from autoaccum.step.module_state import into_training, smallest_micro_batch
from autoaccum.step.offloading import has_host_memory
from autoaccum.step.optimizers import allocate_state, make_optimizer, move, trainable_parameters
from autoaccum.step.step import Step
from autoaccum.step.transaction import Transaction
from autoaccum.step.verdict import measure
from autoaccum.step.verification import Examiner
from autoaccum.training.declarations import Checked
from autoaccum.training.learning_rate import LearningRate
from autoaccum.training.metrics import Metrics
from autoaccum.training.options import FitArguments
from autoaccum.training.single_process import refuse_beside_a_run
from autoaccum.training.validation import Validator, ValidatorOfAll

# An Accumulator does not know its batches beforehand, nor does a stream its length; a search wants some end.
BOUNDLESS = 2**30
"""Samples in a micro-batch where nothing says how many are of use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where windows are computed, and what memory they may use there."""

    device: torch.device
    memory: Memory
    limit: Limit
    """What may be used of it."""


@dataclass(slots=True)
class GivenBatch:
    """A batch of the caller's as a window, which is cut where it lies."""

    batch: Any
    num_samples: int
    device: torch.device
    lengths: tuple[int, ...] | None = None
    """Of each sample, where they have one."""
    split: Any = tensors
    """What cuts it."""

    def micro_batch(self, start: int, size: int) -> Any:
        """Return some of the samples, on the device."""
        # Copied, for a forward may write to its inputs, and a replay has to see the batch as it was.
        return batches.to_device(self.split(self.batch, start, size), self.device, copy=True)

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at those positions as one batch, where they lie."""
        # Neighbours are taken together: a sample at a time takes longer than the steps that are measured.
        runs: list[list[int]] = []
        for position in positions:
            if runs and position == runs[-1][-1] + 1:
                runs[-1].append(position)
            else:
                runs.append([position])
        return self.split.join([self.split(self.batch, run[0], len(run)) for run in runs])

    def example(self, num_samples: int) -> Any:
        """Return a batch of the first samples, on the device."""
        return self.micro_batch(0, num_samples)


def place_of(device: str | torch.device | None, memory_limit: MemoryLimit) -> Place:
    """Find the device, and read the limit a first time.

    Raises:
        ArgumentError: there is no such device, or the limit is none.
    """
    found = find_device(device)
    memory = memory_of(found)
    # A user's function for the limit is asked here, so that one that fails does so before anything is moved.
    return Place(device=found, memory=memory, limit=Limit(memory, memory_limit))


def device_of(model: nn.Module, tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the device that tensors of a model are on, or of what else a caller has placed; None of none.

    Raises:
        ArgumentError: they are on several.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise ArgumentError("model", type(model).__name__, "a model on one device", f"It is on {found}.")
    return devices.pop() if devices else None


def refuse_sizes(arguments: FitArguments, schedule: Schedule) -> None:
    """Refuse micro-batches that no window has the samples for.

    Raises:
        ArgumentError: min_micro_batch is more than a full window has, or micro_batch more than the largest.
    """
    _checks.of_smallest_window(arguments.min_micro_batch, schedule.smallest)
    micro_batch, largest = arguments.micro_batch, schedule.largest
    if isinstance(micro_batch, int) and largest is not None and micro_batch > largest:
        is_fixed = isinstance(arguments.effective_batch, int)
        found = f"effective_batch={largest}" if is_fixed else f"the largest effective_batch, {largest}"
        fact = f"micro_batch={micro_batch} is more than {found}: it is the samples of one forward and backward."
        cure = f"Pass micro_batch={largest}" + f", or effective_batch={micro_batch}" * is_fixed + "."
        raise ArgumentError("micro_batch", micro_batch, f"at most {largest}", cure, fact=fact)


def open_data(arguments: FitArguments, place: Place, split: Any = None) -> Source:
    """Open what is trained on.

    Raises:
        DataError: it cannot be cut into windows.
        ArgumentError: it can be read only once, and is to be read more often; or shuffle=False is not what it does.
    """
    if not arguments.shuffle and isinstance(arguments.data, DataLoader) and shuffles(arguments.data):
        cure = "The DataLoader says so itself: make it with shuffle=False, and without a sampler that draws."
        raise ConflictingArgumentsError("shuffle", False, "data=DataLoader(..., shuffle=True)", cure)
    # Samples wait for their window in host memory, wherever that is computed.
    on_cpu = place.device.type == "cpu"
    host = memory_of(torch.device("cpu"))
    host_bytes = min(host.limit(), place.limit.bytes) if on_cpu else host.limit()
    # Kept for replays before samples are read again; on a CPU it is taken from what micro-batches have.
    budget_bytes = max(0, host_bytes - host.used()) // (64 if on_cpu else 8)
    source = open_source(
        arguments.data,
        seed=arguments.seed,
        shuffle=arguments.shuffle,
        device=place.device,
        collate_fn=arguments.collate_fn,
        num_workers=arguments.num_workers,
        budget_bytes=budget_bytes,
        split=split,
    )
    # An iterable that is no iterator begins anew for each epoch. Of a budget in steps or samples nobody can tell here
    # whether one pass will do: that shows when it is over.
    epochs = arguments.epochs
    if is_iterator(arguments.data) and (epochs or 1) > 1:
        raise ArgumentError("epochs", epochs, "1 for an iterator, which can be read only once", "Pass a Dataset.")
    return source


def open_validation_data(arguments: FitArguments, place: Place, split: Any = None) -> Source:
    """Open what is validated on, in the order that it has.

    Raises:
        ArgumentTypeError: it can be read only once.
        DataError: it cannot be cut.
    """
    data = arguments.validation_data
    if is_iterator(data):
        cure = "It is read after each epoch, and an iterator yields its items only once: pass a Dataset or a list."
        raise ArgumentTypeError("validation_data", data, "data that can be read again", cure)
    # A DataLoader brings its own, which the training data's would contradict.
    is_loader = isinstance(data, DataLoader)
    return open_source(
        data,
        seed=arguments.seed,
        shuffle=False,
        device=place.device,
        collate_fn=None if is_loader else arguments.collate_fn,
        num_workers=0 if is_loader else arguments.num_workers,
        argument="validation_data",
        split=copy(split),  # for it remembers what it was found to be
    )


def seed_all(arguments: FitArguments) -> None:
    """Set the seeds of torch, Python and NumPy.

    Raises:
        AlreadyRunningError: a run goes on in this process, and draws from them.
    """
    refuse_beside_a_run("fit")
    # Of all three: layers draw from torch's, and augmentations of data often from the other two.
    randomness.seed_everywhere(arguments.seed)


def build(
    arguments: FitArguments,
    place: Place,
    num_steps: int | None,
) -> tuple[torch.optim.Optimizer, LearningRate]:
    """Move all modules to the device, make the optimizer, its schedule and its state there, and return the first two.

    All of the memory that a run needs before its first sample is taken here.

    Raises:
        LimitBelowModelError: the limit is below that.
        ArgumentError: the optimizer or its schedule cannot be used.
    """
    model, modules = arguments.model, arguments.modules()
    into_training(model)
    parameters = trainable_parameters(model, modules, arguments.optimizer)
    with room_for_model(place.memory, place.limit.bytes, [own_part(p) for p in parameters]):
        move(modules, arguments.optimizer, place.device)
        for module in metric_modules(arguments):
            module.to(place.device)
        parameters = trainable_parameters(model, modules, arguments.optimizer)  # to move some makes others of them
        functions = (arguments.loss_fn, arguments.training_step)
        optimizer = make_optimizer(arguments.optimizer, arguments.lr, parameters, functions)
        learning_rate = LearningRate(
            optimizer,
            arguments.lr_scheduler,
            num_steps=num_steps,
            lr_scaling=arguments.lr_scaling,
            base_batch=arguments.base_batch,
        )
        # Left to the first step, it would be allocated after plans have been measured without it.
        allocate_state(optimizer, modules)
    return optimizer, learning_rate


def metric_modules(arguments: FitArguments) -> list[nn.Module]:
    """Return the metrics that are modules, and so have to be on the device too."""
    return [metric for metric in (arguments.metrics or {}).values() if isinstance(metric, nn.Module)]


def noise_of(arguments: FitArguments, schedule: Schedule) -> Smoothed | None:
    """Return what smooths the noise scale, where the run reports it or its effective batch follows it."""
    if not arguments.noise_scale and not isinstance(schedule, NoiseScale):
        return None
    if isinstance(schedule, NoiseScale):
        return Smoothed(smoothing=schedule.smoothing, most_apart=schedule.most_apart)
    return Smoothed(smoothing=SMOOTHING)


def compiled_of(job: Job) -> list[Any]:
    """Return what of a job torch.compile has made, wherever it is found.

    Raises:
        ArgumentError: some of it is captured in CUDA graphs, and the next micro-batch writes over what one has left.
    """
    parts = compiled_parts(job.model, job.modules, job.functions)
    # Gradients are such memory too, to which the next backward would add itself, in silence (pytorch#96693). On other
    # devices nothing is captured, whatever was asked for. What is not found here is heard of when it is captured.
    for part in parts if job.device.type == "cuda" else ():
        if captures(part):
            raise graphs_refused(getattr(part, "__name__", type(part).__name__))
    return parts


def job_of(
    arguments: FitArguments, checked: Checked, device: torch.device, model: Any, optimizer: torch.optim.Optimizer
) -> Job:
    """Return what is computed: the model as it is called, compiled or not, and all that goes with it."""
    loss_of, num_items, reduction, divides = stated(checked[loss_function], arguments.num_items, arguments.reduction)
    return Job(
        model=model,
        modules=tuple(arguments.modules()),
        optimizer=optimizer,
        loss_of=loss_of,
        num_items=num_items,
        divides=divides,
        reduction=reduction,
        collate_fn=arguments.collate_fn or getattr(arguments.data, "collate_fn", None),
        min_micro_batch=arguments.min_micro_batch or 1,
        split=checked[split_of],
        device=device,
        precision=arguments.precision,
    )


def make_step(
    job: Job,
    arguments: FitArguments,
    place: Place,
    emit: Callable[[Event], None],
    *,
    micro_batch: int | None,
    full_window: int | None = None,
    noise_scale: bool = False,
    group: Group | None = None,
) -> Step:
    """Return what takes the steps of a run, or of a loop.

    Args:
        job: what is computed; everything is on the device, and the optimizer's state is allocated.
        arguments: say how.
        place: the device, its memory, and what may be used of that.
        emit: takes the events.
        micro_batch: its samples; None to find them.
        full_window: samples of the largest window of the run, where that is known.
        noise_scale: whether windows that are cut tell of the noise in their gradient.
        group: the ranks that share each window; None where there is one.

    Raises:
        ArgumentError: BatchNorm, and micro-batches of one sample; memory saving that cannot be had; or a model that was
            compiled to CUDA graphs.
    """
    compiled, memory, limit = compiled_of(job), place.memory, place.limit
    is_sharded = group is not None and bool(units_of(job.modules[0]))
    smallest, max_micro_batch = smallest_micro_batch(job.modules), arguments.max_micro_batch
    # Refused and not raised in silence: whoever passes 1 may count on what one sample takes.
    for name, value in (("micro_batch", micro_batch), ("max_micro_batch", max_micro_batch)):
        if value is not None and value < smallest <= (full_window or smallest):
            cure = "The model holds BatchNorm in training mode, which has no statistics of one sample."
            raise ArgumentError(name, value, f"an int of at least {smallest}", cure)
    # Nothing larger is tried: it would be of no use, or is not wanted.
    ceilings = [samples for samples in (full_window, max_micro_batch) if samples is not None]
    tuner = Tuner(
        ceiling=min(ceilings, default=BOUNDLESS),
        limit_bytes=limit.bytes,
        headroom=arguments.headroom,
        search=micro_batch is None,
        # A size that was passed is taken at its word; should it run out of memory, the window is cut smaller.
        largest=min(micro_batch or 0, max_micro_batch or micro_batch or 0),
        smallest=smallest,
        floor=job.min_micro_batch,
        few_sizes=smallest > 1 or bool(compiled),  # BatchNorm's statistics of a few samples are poor
        # Kernels and libraries are loaded when they are first used; on a CPU that is hardly more than nothing.
        warms_up=job.device.type != "cpu",
    )
    compilations = Compilations(job.device, tuner.expect_few_sizes, are_known=bool(compiled))
    # Sizes of the user's own are few, and the compiler's to see: code for one size is faster than code for all.
    if compiled and micro_batch is None:
        job = replace(job, loss_of=compilations.sparing(job.loss_of))
    kinds = _kinds_of_saving(job, arguments.memory_saving, is_compiled=bool(compiled), is_sharded=is_sharded)
    options: dict[str, Any] = {"clip_norm": arguments.clip_norm, "noise_scale": noise_scale}
    transaction: Transaction
    if group is None:
        transaction = JoinableTransaction(job, **options)
    elif is_sharded:
        transaction = ShardedTransaction(job, group, **options)
    else:
        transaction = JoinedShares(job, group=group, compression=arguments.compression, **options)
    examiner = Examiner(job, transaction, measure, verify=arguments.verify, strict=arguments.strict)
    why = why_not_joined(job, noise_scale=noise_scale, is_sharded=is_sharded)
    if why is not None and arguments.accumulate == "joined":
        raise ConflictingArgumentsError("accumulate", "joined", *why)
    return Step(
        job,
        transaction=transaction,
        examiner=examiner,
        tuner=tuner,
        meter=Meter(memory, job.device, is_enforced=limit.is_enforced, needs_room=tuner.needs_room),
        compilations=compilations,
        saving=Saving(
            job,
            arguments.memory_saving,
            kinds=kinds,
            users=(transaction, examiner),
        ),
        memory=memory,
        limit=limit,
        patience=arguments.patience,
        emit=emit,
        joiner=Joiner(job) if why is None else None,
        accumulate=arguments.accumulate,
    )


def _kinds_of_saving(job: Job, mode: SavingMode, *, is_compiled: bool, is_sharded: bool) -> frozenset[str]:
    """Return in which ways a run can save memory.

    Raises:
        ArgumentError: one of those that are asked for is none of these.
    """
    reason = _why_nothing_is_saved(job, is_sharded=is_sharded)
    # Whatever stands in the way of the one stands in the way of the other, which is wrapped around losses alike.
    reasons = {"checkpoint": reason, "offload": reason or _why_nothing_is_moved(job.device, is_compiled=is_compiled)}
    for kind in sorted(kinds_asked_for(mode)):
        if reasons[kind] is not None:
            accepted = '"auto" or "off"' if reason else '"auto", "off" or "checkpoint"'
            raise ArgumentError("memory_saving", mode, accepted, f"It cannot be had: {reasons[kind]}.")
    return frozenset(kind for kind, why in reasons.items() if why is None)


def _why_nothing_is_moved(device: torch.device, *, is_compiled: bool) -> str | None:
    """Return why no tensor goes to the host; None where it has another memory than the device."""
    if is_compiled:
        return "compiled code decides by itself what it keeps for backward, and writes over it"
    if has_host_memory(device):
        return None
    return f"tensors would be moved to the host, and all that {device.type} has of memory is the host's"


def _why_nothing_is_saved(job: Job, *, is_sharded: bool) -> str | None:
    """Return why no memory of a run is saved, however little there is; None where some may be."""
    if is_sharded:
        return "a forward of a sharded model that is computed again would have to be on all ranks at once"
    return None


def step_of(
    arguments: FitArguments,
    checked: Checked,
    place: Place,
    step_model: Any,
    optimizer: torch.optim.Optimizer,
    epoch_samples: int | None,
    emit: Callable[[Event], None],
    *,
    noise_scale: bool,
    group: Group | None = None,
) -> Step:
    """Return what takes the steps of a run, on the model as it is called: compiled, or as it is.

    Raises:
        ArgumentError: BatchNorm, and micro-batches of one sample; or a noise scale of fewer than two micro-batches.
    """
    # A recorded run's plans leave nothing to search for; the largest of them stands for the size of micro-batches.
    schedule, plans = checked[schedule_of], checked[_checks.recorded_plans]
    micro_batch = arguments.micro_batch
    fixed = micro_batch if isinstance(micro_batch, int) else max((max(plan) for plan in plans), default=None)
    job = job_of(arguments, checked, place.device, step_model, optimizer)
    # The same that an Accumulator makes: what is between the windows is all that differs.
    step = make_step(
        job,
        arguments,
        place,
        emit,
        micro_batch=fixed,
        # No micro-batch need be larger than a window, and no window is larger than the data.
        full_window=min((n for n in (schedule.largest, epoch_samples) if n is not None), default=None),
        noise_scale=noise_scale,
        group=group,
    )
    step.transaction.outputs.rows_to_host = True  # where reports have them
    # Said here, where the smallest micro-batch is known; the schedule's own checks know no model.
    if isinstance(schedule, NoiseScale) and schedule.min < 2 * step.tuner.smallest:
        cure = "A noise scale is estimated from two micro-batches, and BatchNorm has no statistics of one sample."
        if step.tuner.min_micro_batch is not None:
            cure = (
                f"A noise scale is estimated from two micro-batches: lower min_micro_batch={arguments.min_micro_batch}."
            )
        accepted = f"a min of at least {2 * step.tuner.smallest}"
        raise ArgumentError("effective_batch", str(schedule), accepted, cure)
    return step


def cache_of(arguments: FitArguments, place: Place, optimizer: torch.optim.Optimizer, tuner: Tuner) -> PastOfRun | None:
    """Return what earlier runs have found out, where there is something to search for."""
    # A micro-batch that was passed is no discovery: it may not even be near what fits.
    if not arguments.cache or not tuner.searching:
        return None
    return PastOfRun(
        arguments.modules(),
        optimizer,
        precision=arguments.precision,
        device=place.device,
        compiled=arguments.compile or bool(compiled_parts(arguments.model, arguments.modules(), ())),
        functions=(arguments.loss_fn, arguments.training_step),
    )


def validator_of(
    arguments: FitArguments,
    checked: Checked,
    place: Place,
    step_model: Any,
    step: Step,
    emit: Callable[[Event], None],
) -> Validator | None:
    """Return what validates, where there is something to validate on; its metrics have been tried once.

    Raises:
        ArgumentError: the data or a metric cannot be used.
    """
    if arguments.validation_data is None:
        return None
    loss_of = step.job.loss_of
    # Opened before the first window, so that what cannot be cut is told before hours of training.
    source = open_validation_data(arguments, place, step.job.split)
    of: Any = "model"  # what the loss is computed by, and so what metrics are called with
    if arguments.loss_fn is not None:
        of = "loss_fn"
    elif arguments.training_step is not None:
        of = "training_step"
    metrics = arguments.metrics
    # Put into eval mode together; a loss may hold dropout, and a metric that is a module too.
    modules: Sequence[nn.Module] = [*arguments.modules(), *metric_modules(arguments)]
    window_samples = checked[schedule_of].at(Progress())
    num_items, reduction = step.job.num_items, step.job.reduction
    kind: Any = Validator
    if isinstance(step.transaction, ShardedTransaction):
        transaction, tuner = step.transaction, step.tuner
        # Each forward asks all ranks for their parts.
        kind = partial(
            ValidatorOfAll,
            group=transaction.group,
            sharded=transaction.sharded,
            smallest=lambda: tuner.smallest,
        )
    # Validations read what losses count as windows do, and compiled code hides it from them too.
    context = partial(step.compilations.allowed_within, step.job.autocast)
    validator: Validator = kind(
        step_model,
        modules,
        source,
        loss_of=loss_of,
        of_outputs=arguments.loss_fn is not None,
        num_items=step.job.num_items,
        autocast=context,
        device=place.device,
        memory=place.memory,
        limit=place.limit,
        limits=step.tuner.limits,  # the same object, for the limit moves while training goes on
        patience=arguments.patience,
        snapshot=step.transaction.snapshot,
        emit=emit,
        metrics=Metrics(metrics, step_model, of=of, autocast=context) if metrics else None,
    )
    validator.set_fewest(arguments.min_micro_batch or 1)
    # Whoever passes the whole window does so for a loss that compares samples, of which a few are another loss.
    if isinstance(arguments.micro_batch, int) and arguments.micro_batch >= window_samples:
        validator.begin_with(arguments.micro_batch)
    validator.has_outputs = lambda: step.transaction.outputs.are_there
    stated = "items" if reduction == "mean" else None
    validator.weigh(lambda: step.transaction.hypothesis or stated)
    if isinstance(joinable := step.transaction, JoinableTransaction):
        validator.join(lambda: joinable.layout, window_samples)
        validator.joins_doubtful = num_items is None and reduction is None
    if metrics:
        # On the model as it is: a compiled one would be compiled for batches of one sample and of two.
        tried = Metrics(metrics, arguments.model, of=of, autocast=context, split=step.job.split)
        validator.try_metrics(tried)
    return validator
