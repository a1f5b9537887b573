"""``estimate``: what fits on a device that is not at hand, by steps that are run without values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.errors import ArgumentError, EmptyDatasetError, ValuesNeededError
from autoaccum.memory import clock
from autoaccum.memory.fake import Fakes, RealParameterError, asked_for
from autoaccum.planning.cuts import cut
from autoaccum.planning.ladder import SavingMode, kinds_asked_for
from autoaccum.planning.limits import Limits
from autoaccum.planning.schedules import Progress, Schedule
from autoaccum.planning.trials import Trials
from autoaccum.training.check_samples import open_samples
from autoaccum.training.declarations import Argument, arguments, arguments_of, check, option
from autoaccum.training.estimate_report import Estimate, EstimateParts
from autoaccum.training.fake_copies import FakeSamples
from autoaccum.training.fake_steps import FakeStep, Peak
from autoaccum.training.lazy import refuse_lazy
from autoaccum.training.options import CHECKS, OF_CHECK, OF_FIT, OF_PROBE, modules_of, schedule_if_any
from autoaccum.training.probing import GROWTH
from autoaccum.training.synonyms import answering
from autoaccum.window.batch_norm import smallest_micro_batch
from autoaccum.window.blocks import OFF, Level
from autoaccum.window.optimizers import OptimizerLike, trainable_parameters
from autoaccum.window.outside import Outside
from autoaccum.window.precision import Precision

_CPU = torch.device("cpu")
_FEW = 8
"""Samples that are read of data; larger batches repeat these."""
_MANY_OPERATIONS = 50_000
"""What a step may run where it runs more operations the more samples there are: each takes some 0.3 ms."""


def of_device_memory(device_memory: object) -> int:
    """Return the bytes of a device."""
    found = _checks.num_bytes("device_memory", device_memory, "bytes as an int, or a text such as '24GiB'")
    _checks.no_bytes("device_memory", found)
    return found


@arguments
class _Own:
    """What no other function takes."""

    # No share, for there is no device that it would be one of; and no default, which would be a guess at the device.
    device_memory: int | str = option(
        'memory of the device that a process may use, as bytes or a text such as "24GiB".',
        check=of_device_memory,
    )


_BATCH = (
    "a batch of any number of samples, any pytree whose tensors have one row per sample; or a Dataset, a DataLoader or "
    "another iterable of batches, of which a few samples are read; beside a loss_fn or a collate_fn a list of samples, "
    "too. Batches of other sizes are made of these, without values: shapes alone count."
)
_SAVING = (
    "auto: where not even the smallest micro-batch fits, blocks of the model compute their forward once more in "
    "backward instead of keeping it, to the same bits; off: never; checkpoint: always. A run on the device also keeps "
    "tensors on the host below that, which cannot be estimated: there is one memory here."
)
_OF_PROBE = (
    "effective_batch", "loss_fn", "training_step", "optimizer", "max_micro_batch", "min_micro_batch",
    "headroom", "precision", "collate_fn", "split", "batch_dim",
)  # fmt: skip
"""Arguments of a probe that mean the same here."""


def _arguments() -> dict[str, Argument]:
    """Return the arguments of ``estimate``."""
    found = {"model": OF_CHECK["model"], "batch": replace(OF_CHECK["batch"], text=_BATCH)} | arguments_of(_Own)
    saving = {"memory_saving": replace(OF_FIT["memory_saving"], text=_SAVING)}
    return found | {name: OF_PROBE[name] for name in _OF_PROBE} | saving


OF_ESTIMATE = _arguments()


# Its parameters, their texts, and those checked, are written by tests/write_signatures.py.
@answering("estimate")
def estimate(
    model: nn.Module,
    batch: Any,
    *,
    device_memory: int | str,
    effective_batch: int | str | Schedule | Callable[[Progress], int] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    optimizer: OptimizerLike | None = None,
    max_micro_batch: int | None = None,
    min_micro_batch: int | None = None,
    headroom: float = 0.05,
    precision: Precision = "fp32",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
    memory_saving: SavingMode = "auto",
) -> Estimate:
    """Estimate what training takes on a device that is not at hand, by steps that compute nothing.

    Copies of the model, the functions and the optimizer, whose tensors have shapes and no values, are run forward,
    backward and through a step, and the bytes of all tensors that are alive are counted. The largest micro-batch is
    searched for as a probe does it; where not one sample fits, blocks are computed twice as a run does it. Nothing of
    the model's size is allocated, so that it may lie on the meta device, and nothing of what is passed changes, nor any
    random state. What depends on values cannot be estimated: routing among experts, ``.item()``, boolean masks.

    Args:
        model: the module to train.
        batch: a batch of any number of samples, any pytree whose tensors have one row per sample; or a Dataset, a
            DataLoader or another iterable of batches, of which a few samples are read; beside a loss_fn or a collate_fn
            a list of samples, too. Batches of other sizes are made of these, without values: shapes alone count.
        device_memory: memory of the device that a process may use, as bytes or a text such as "24GiB".
        effective_batch: samples per optimizer step, the most of them where it is a schedule: no larger micro-batch is
            tried, and a plan is made.
        loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a
            dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
        training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
            neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
        optimizer: an Optimizer or a function (parameters) -> Optimizer; AdamW when left out. Its state must fit too.
        max_micro_batch: the most samples to try at once.
        min_micro_batch: the fewest samples of one forward and backward.
        headroom: fraction of the limit to leave free, but for micro-batches of up to four samples.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        collate_fn: makes a batch of a list of samples.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits: samples,
            graphs, packed, flattened(...), tensors. Read off the batches when left out.
        batch_dim: the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent there
            (others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.
        memory_saving: auto: where not even the smallest micro-batch fits, blocks of the model compute their forward
            once more in backward instead of keeping it, to the same bits; off: never; checkpoint: always. A run on the
            device also keeps tensors on the host below that, which cannot be estimated: there is one memory here.

    Returns:
        the estimate; printed, it is a page that says whether it fits.

    Raises:
        ValuesNeededError: what is run depends on values; it names the operation.
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        DataError: the batch has no samples, or the data cannot be read.
        LossError: the loss cannot be trained on.

    >>> import torch
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512))
    >>> report = estimate(
    ...     model, (torch.randn(8, 512), torch.randn(8, 512)), loss_fn=torch.nn.functional.mse_loss,
    ...     device_memory="1GiB", effective_batch=100_000,
    ... )
    >>> report.fits, report.memory_saving, report.parts.parameters
    (True, 'off', 16795648)
    """
    checked = check(
        OF_ESTIMATE, (*CHECKS, of_device_memory), model=model, batch=batch, device_memory=device_memory,
        effective_batch=effective_batch, loss_fn=loss_fn, training_step=training_step, optimizer=optimizer,
        max_micro_batch=max_micro_batch, min_micro_batch=min_micro_batch, headroom=headroom, precision=precision,
        collate_fn=collate_fn, split=split, batch_dim=batch_dim, memory_saving=memory_saving,
    )  # fmt: skip
    started, schedule, limit_bytes = clock.now(), checked[schedule_if_any], checked[of_device_memory]
    fewest = min_micro_batch or 1
    asked = kinds_asked_for(memory_saving)
    if "offload" in asked:
        # It would be counted like any other tensor, and say that nothing is saved.
        cure = "What is kept on the host cannot be estimated: autoaccum fit measures it on the device."
        raise ArgumentError("memory_saving", memory_saving, '"auto", "off" or "checkpoint"', cure)
    _checks.of_smallest_window(min_micro_batch, None if schedule is None else schedule.smallest)
    most = None if schedule is None else schedule.largest
    ceiling = min(n for n in (max_micro_batch, most, 2**20) if n is not None)
    # Before anything is copied: what is no module has no parameters to look at.
    if not isinstance(model, nn.Module):
        trainable_parameters(model, ())  # which refuses it
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps: it is run eagerly
    modules = modules_of(bare, loss_fn, training_step)
    refuse_lazy(bare, (tensor for module in modules for tensor in (*module.parameters(), *module.buffers())))
    functions = {
        "loss_fn": loss_fn, "training_step": training_step, "optimizer": optimizer,
    }  # fmt: skip
    with _no_trace(modules, functions.values()), _naming(model), torch.enable_grad():
        fakes, split = Fakes(), checked[split_of]
        window, examples = open_samples(batch, collate_fn, _CPU, split, are_pairs=loss_fn is not None)
        if not window.num_samples:
            raise EmptyDatasetError("batch", "it has no rows.")
        given: object = examples  # the window itself, where a batch was passed: of data a few samples are read
        few = window.num_samples if window is given else min(window.num_samples, max(_FEW, fewest))
        step = FakeStep(fakes, FakeSamples(fakes, examples, few, split), modules, functions, precision)
        smallest = min(max(smallest_micro_batch(modules), fewest), ceiling)
        limits = Limits(limit_bytes, headroom, is_enforced=True)
        # As a run goes down them: the first on which the smallest micro-batch fits is the one that it would stand on.
        levels = [OFF, *([] if memory_saving == "off" else step.levels())]
        # Whoever asks for what the model does not have gets a run without it, and is told.
        for level in levels[-1:] if asked else levels:
            peaks = {smallest: step.peak(smallest, level)}
            if fits := limits.allows(peaks[smallest].bytes, is_few=True):
                break
        largest = _largest(step, level, peaks, smallest, ceiling, limits) if fits else smallest
    # Of a schedule the largest batch: smaller ones take no more of these.
    sizes = () if most is None or not fits else cut(most, largest, fewest)
    return Estimate(
        fits=fits,
        micro_batch=largest,
        accumulation_steps=len(sizes) if sizes and max(sizes) <= largest else None,
        memory_saving=level.name,
        peak_bytes=peaks[largest].bytes,
        device_memory_bytes=limit_bytes,
        parts=_parts(peaks, largest),
        seconds=clock.now() - started,
    )


def _largest(step: FakeStep, level: Level, peaks: dict[int, Peak], smallest: int, ceiling: int, limits: Limits) -> int:
    """Return the largest micro-batch that fits, as a probe finds it; ``peaks`` gets what each size takes."""
    # Here every trial tells what it takes, also one that does not fit.
    limits.learn_least(peaks[smallest].bytes)
    search = Trials(limits, smallest=smallest, growth=GROWTH, start_bytes=peaks[smallest].held)
    for piece in search.until_known(ceiling):
        if piece.size not in peaks:
            # Where the first trial of many may take long already, two of few samples tell.
            if len(peaks) == 1 < piece.size - smallest and peaks[smallest].operations * piece.size > _MANY_OPERATIONS:
                peaks[smallest + 1] = step.peak(smallest + 1, level)
            _refuse_loop(peaks, piece.size)
            peaks[piece.size] = step.peak(piece.size, level)
        search.fitted(piece, peaks[piece.size].bytes)
    return search.largest


def _refuse_loop(peaks: Mapping[int, Peak], size: int) -> None:
    """Refuse to try a size of a model that loops over its samples, where that would take minutes.

    Raises:
        ArgumentError: it would.
    """
    if len(peaks) < 2:
        return
    fewer, more = sorted(peaks)[-2:]
    each = (peaks[more].operations - peaks[fewer].operations) / (more - fewer)
    expected = peaks[more].operations + each * (size - more)
    if each > 0 and size > more and expected > _MANY_OPERATIONS:
        enough = 2 ** int(math.log2(_MANY_OPERATIONS / each))
        raise ArgumentError(
            "max_micro_batch", None, "an int",
            f"Pass max_micro_batch={enough}, or fewer: the largest up to that is searched for.",
            fact=f"The model loops over its samples: it runs {each:,.{1 if each < 10 else 0}f} operations for each, so "
            f"that a micro-batch of {size:,} cannot be tried in a short time.",
        )  # fmt: skip


def _parts(peaks: Mapping[int, Peak], size: int) -> EstimateParts:
    """Return what a peak consists of: what a sample adds is read off two sizes, the rest is what is left."""
    peak = peaks[size]
    other = max((one for one in peaks if one < size), default=None)
    # Bounded by what all samples add, for a loss may cost more from some size on, and the rest would be below 0.
    each = (peak.bytes - peak.held) // size
    if other is not None:  # where the first samples take the least, the rest is nothing
        each = min(each, (peak.bytes - peaks[other].bytes) // (size - other))
    return EstimateParts(
        parameters=peak.parameters,
        gradients=peak.gradients,
        optimizer=peak.optimizer,
        activations_per_sample=each,
        working=peak.bytes - peak.held + peak.copies - size * each,
    )


@contextmanager
def _no_trace(modules: Sequence[nn.Module], functions: Any) -> Iterator[None]:
    """Put back, at its end, what the user's functions keep in lists and variables, and all random states."""
    # Lists and objects that hold no tensor are not copied, so functions write to the user's own. Fake operations draw
    # nothing, but Python and NumPy do within them.
    outside, state = Outside(modules, functions), randomness.get_state()
    try:
        yield
    finally:
        outside.restore()
        randomness.set_state(state)


@contextmanager
def _naming(model: nn.Module) -> Iterator[None]:
    """Say of a model whose run needs values which operation does."""
    # It prints the whole stack of each operation that fails, as one of a mistaken user's does.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except RealParameterError as error:
        accepted = "a model whose parameters lie in it, or in the functions that are passed"
        cure = (
            "One is used that a hook or another object holds, of which there is no copy: autoaccum probe measures it."
        )
        raise ArgumentError("model", type(model).__name__, accepted, cure) from error
    except Exception as error:
        # The library's own wrappers, and the user's, may have put errors of their own around it.
        link: BaseException | None = error
        while link is not None and (operation := asked_for(link)) is None:
            link = link.__cause__ or link.__context__
        if link is None:
            raise
        raise ValuesNeededError(model, operation or "") from error
    finally:
        log.disabled = was_disabled
