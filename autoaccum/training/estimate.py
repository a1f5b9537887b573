"""``estimate``: what fits on a device that is not at hand, by steps on tensors without values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum._units import format_bytes
from autoaccum.data import randomness
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.errors import ArgumentError, EmptyDatasetError, ValuesNeededError
from autoaccum.memory import clock
from autoaccum.memory.fake import Fakes, RealParameterError, asked_for
from autoaccum.planning.cuts import cut
from autoaccum.planning.limits import Limits, SavingMode, kinds_asked_for
from autoaccum.planning.schedules import Progress, Schedule, schedule_of
from autoaccum.planning.trials import Trials
from autoaccum.reporting.lines import Facts, as_line, as_table
from autoaccum.step.checkpointing import OFF, Level
from autoaccum.step.job import Precision
from autoaccum.step.module_state import smallest_micro_batch
from autoaccum.step.optimizers import OptimizerLike, refuse_lazy, trainable_parameters
from autoaccum.step.python_state import Outside
from autoaccum.training.check import open_samples
from autoaccum.training.declarations import check
from autoaccum.training.fake_steps import FakeSamples, FakeStep, Peak
from autoaccum.training.options import CHECKS, EACH, modules_of, without_schedule
from autoaccum.training.probe import GROWTH
from autoaccum.training.synonyms import answering

MOST = 3.7
"""How many times the bytes of tensors a process has been measured to take at most, in
``benchmarks/results/estimates_resident.md``: on a CPU, whose heap holds more in fragments than a device's allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateParts:
    """What the bytes of a peak are taken by; those of the activations once for each sample."""

    parameters: int
    """Bytes of parameters and buffers."""
    gradients: int
    """Bytes of the gradients that the micro-batches before have left."""
    optimizer: int
    """Bytes of the optimizer's state."""
    activations_per_sample: int
    """Bytes that one sample more adds to the peak."""
    working: int
    """Bytes of the rest: copies of buffers, what a backward or a step works on, whatever the number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Estimate:
    """What training is expected to take on a device, by a step that was run without values.

    ``peak_bytes`` counts tensors, as a device's allocator rounds them. A process takes more: kernels have workspaces,
    an allocator holds fragments that nobody can use. By how much is not known of a device on which nothing was run:
    ``range_bytes`` is from the tensors alone to the most that processes have been measured to take for as many.
    """

    fits: bool
    """Whether the smallest micro-batch fits, in bytes of tensors."""
    micro_batch: int
    """The largest micro-batch that fits, in samples; the smallest there is where none does."""
    accumulation_steps: int | None
    """Micro-batches of a step; None without an effective batch, and where none can be made of those that fit."""
    memory_saving: str
    """How memory is saved, as plans and reports say it: "off", or which blocks compute their forward twice."""
    peak_bytes: int
    """Most bytes that tensors take at once, with a micro-batch of that size."""
    device_memory_bytes: int
    """Bytes of the device."""
    parts: EstimateParts
    """What the peak consists of."""
    seconds: float
    """Wall time that the estimate took."""

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Return the least and the most bytes that a process may take, nothing having been measured on the device."""
        return self.peak_bytes, int(MOST * self.peak_bytes)

    @property
    def is_sure(self) -> bool:
        """Return whether it fits at the far end of the range, too."""
        return self.range_bytes[1] <= self.device_memory_bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return as_line("Estimate", self._facts())

    def _repr_html_(self) -> str:
        return as_table("Estimate", self._facts())

    def _facts(self) -> Facts:
        # What decides comes first; the parts are for the page.
        facts: Facts = {"fits": self.fits, "micro_batch": self.micro_batch}
        if self.accumulation_steps is not None:
            facts["accumulation_steps"] = self.accumulation_steps
        if self.memory_saving != "off":
            facts["memory_saving"] = self.memory_saving
        facts["peak"] = format_bytes(self.peak_bytes)
        return facts | {"device_memory": format_bytes(self.device_memory_bytes)}

    def _lines(self) -> Iterator[str]:
        # The first line answers the question, as that of a check does.
        device, samples = format_bytes(self.device_memory_bytes), "sample" if self.micro_batch == 1 else "samples"
        if self.fits:
            # By tensors alone it may be far from that: who reads no further is not to be told that it fits.
            verdict = "FITS" if self.is_sure else "MAY FIT, by tensors alone"
            yield f"{verdict}: micro-batches of {self.micro_batch} {samples} in {device}"
        else:
            yield (
                f"DOES NOT FIT: {self.micro_batch} {samples} would take {format_bytes(self.peak_bytes)}, "
                f"and there are {device}"
            )
        yield ""
        if self.accumulation_steps is not None:
            yield f"  accumulation steps    {self.accumulation_steps}"
        yield f"  memory saving         {self.memory_saving}"
        yield f"  peak of tensors       {format_bytes(self.peak_bytes)}"
        # Said wherever the figure is read: it is no measurement, and looks like one.
        least, most = map(format_bytes, self.range_bytes)
        yield f"  a process may take    {least} to {most}: nothing was measured on the device"
        yield ""
        parts = self.parts
        for name, num_bytes in (
            ("parameters, buffers", parts.parameters),
            ("gradients", parts.gradients),
            ("optimizer's state", parts.optimizer),
            ("activations a sample", parts.activations_per_sample),
            ("the rest", parts.working),
        ):
            yield f"  {name:<20}  {format_bytes(num_bytes):>10}"
        yield ""
        yield f"estimated in {self.seconds:.1f} s; autoaccum probe measures it on the device"


_CPU = torch.device("cpu")
_FEW = 8
"""Samples that are read of data; larger batches repeat these."""


def of_device_memory(device_memory: object) -> int:
    """Return the bytes of a device."""
    found = _checks.num_bytes("device_memory", device_memory, "bytes as an int, or a text such as '24GiB'")
    _checks.no_bytes("device_memory", found)
    return found


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
            DataLoader or another iterable of batches, of which a few samples are read; beside a loss_fn a list of three
            samples or batches or more, and beside a collate_fn any list of samples, too. Batches of other sizes are
            made of these, without values: shapes alone count.
        device_memory: memory of the device that a process may use, as bytes or a text such as "24GiB".
        effective_batch: samples per optimizer step, the most of them where it is a schedule: no larger micro-batch is
            tried, and a plan is made.
        loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a
            dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
        training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
            neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
        optimizer: an Optimizer or a function (parameters) -> Optimizer; AdamW when left out. Its state must fit too.
        max_micro_batch: the most samples to try at once; of use where a model loops over its samples, whose operations
            are run one by one.
        min_micro_batch: the fewest samples of one forward and backward.
        headroom: fraction of the limit to leave free, but for the smallest micro-batch.
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
    checked = check(without_schedule(locals()), EACH, (*CHECKS, of_device_memory))
    started, schedule, limit_bytes = clock.now(), checked.get(schedule_of), checked[of_device_memory]
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
        limits = Limits(limit_bytes, headroom)
        # As a run goes down them: the first on which the smallest micro-batch fits is the one that it would stand on.
        levels = [OFF, *([] if memory_saving == "off" else step.levels())]
        # Whoever asks for what the model does not have gets a run without it, and is told.
        for level in levels[-1:] if asked else levels:
            peaks = {smallest: step.peak(smallest, level)}
            if fits := limits.allows(peaks[smallest].bytes, is_smallest=True):
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
            peaks[piece.size] = step.peak(piece.size, level)
        search.fitted(piece, peaks[piece.size].bytes)
    return search.largest


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
