"""``check``: what a run measures before its first step, on a batch or on samples of the data."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autoaccum.data import batches, foreign
from autoaccum.data.arrays import converted
from autoaccum.data.base import Window
from autoaccum.data.sources import open_source
from autoaccum.data.splits import SplitLike, is_said, tensors
from autoaccum.data.streams import is_iterator
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    EmptyDatasetError,
    NonFiniteLossError,
)
from autoaccum.events import HYPOTHESES, Notice
from autoaccum.memory import clock
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory, named, room_for_model
from autoaccum.step import exactness_notices
from autoaccum.step.error_context import tell_micro_batch
from autoaccum.step.findings import FOREIGN, Decision, Verdict
from autoaccum.step.infer_reduction import conclude
from autoaccum.step.job import Job
from autoaccum.step.joined import why_not_joined
from autoaccum.step.joined_measurement import measure_joined
from autoaccum.step.loss_graph import read_reduction, without_graph
from autoaccum.step.measured_samples import MOST, choose, cuts_of
from autoaccum.step.module_state import into_training, smallest_micro_batch
from autoaccum.step.notices import not_joined, not_measured_joined
from autoaccum.step.optimizers import trainable_parameters
from autoaccum.step.python_state import surroundings_of
from autoaccum.step.rounding import tolerance_of
from autoaccum.step.snapshot import State
from autoaccum.step.split_calls import Layout
from autoaccum.step.terms import CountItems, Reducing, Reduction, total
from autoaccum.step.verdict import measure
from autoaccum.step.verification import DRAWN, SideEffects, why_uncertain
from autoaccum.training.options import OF_FIT, FitArguments
from autoaccum.training.setup import GivenBatch, job_of
from autoaccum.training.single_process import Ranks, only_run, refuse_ranks
from autoaccum.training.synonyms import answering
from autoaccum.training.traces import no_trace

_READ = 128
"""Samples of a data set that those to measure are chosen from."""


class Examples(Protocol):
    """What makes example batches: any data, or a batch."""

    def example(self, num_samples: int) -> Any:
        """Return a batch of that many samples, on the device."""


def open_samples(
    batch: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    device: torch.device,
    split: Any = tensors,
    *,
    are_pairs: bool = False,
) -> tuple[Window, Examples]:
    """Return the samples to choose from, and what makes examples of them.

    Raises:
        ArgumentError: it is neither a batch nor data.
        DataError: it has no samples.
    """
    foreign.refuse("batch", batch)
    if _is_batch(batch, split) and not _are_samples(batch, collate_fn, split, are_pairs):
        if collate_fn is not None:
            cure = "A batch is collated already: leave collate_fn out, or pass the Dataset."
            raise ConflictingArgumentsError("collate_fn", collate_fn, "a batch", cure)
        batch = batch if is_said(split) else converted(batch)
        given = GivenBatch(batch, split.count(batch, "batch"), device, split=split)
        return given, given
    if is_iterator(batch):
        cure = "What is read of it would be lost to you: pass one batch of it, next(iterator)."
        raise ArgumentTypeError("batch", batch, "a batch, or data that can be read again", cure)
    if isinstance(batch, DataLoader) and batch.num_workers:
        # A few samples are read in this process as quickly as workers start. The caller's own loader stays as it is.
        batch = copy.copy(batch)
        batch.num_workers, batch.timeout = 0, 0
    # In a new order, for data often come sorted, and samples of one kind tell little.
    source = open_source(
        batch, seed=0, shuffle=True, device=device, collate_fn=collate_fn, argument="batch", split=split
    )
    window = source.read(0, lambda position: (_READ,)).window(_READ)
    if window is None:
        raise EmptyDatasetError("batch", "reading it yields nothing.")
    return window, source


def _is_batch(batch: Any, split: Any) -> bool:
    """Return whether something is one batch, and not data to read some of."""
    # What is a tree, or has rows, is a batch, with a split or without.
    _, spec = batches.flatten(batch)
    if not spec.is_leaf() or batches.has_rows(batch):
        return True
    if not is_said(split) or isinstance(batch, Dataset | DataLoader) or is_iterator(batch):
        return False
    # Of any form: the split knows it. What it does not know may yield batches that it does.
    try:
        # One that it can count is a batch, and one without samples is none.
        return bool(split.count(batch))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False


def _are_samples(batch: Any, collate_fn: Callable[[list[Any]], Any] | None, split: Any, are_pairs: bool) -> bool:
    """Return whether a list is data, as ``fit`` takes it, and no batch, as a DataLoader yields it."""
    if type(batch) is not list or is_said(split):
        return False
    if collate_fn is not None:  # which nobody passes for what is a batch already
        return True
    # What a training_step takes may be a list of samples itself, as of images and their boxes.
    if not (are_pairs and all(isinstance(entry, tuple | list | Mapping) for entry in batch)):
        return False
    # Of inputs and targets a batch has two parts: more are samples, or batches that follow each other.
    return len(batch) > 2


def refuse_few(num_samples: int, smallest: int) -> None:
    """Refuse samples that are too few to be cut into parts of at least so many.

    Raises:
        ArgumentError: they are.
    """
    fewest = 2 * smallest
    if num_samples < fewest:
        why = "they are run whole, and in parts"
        if smallest > 1:
            groups = f", in groups of {smallest} here" if smallest > 2 else ""
            why = f"a part needs {smallest} where BatchNorm trains{groups}"
        cure = f"Pass more of them, {max(MOST, 3 * smallest)} at best: {why}."
        found = f"{num_samples} sample{'s' if num_samples != 1 else ''}"
        raise ArgumentError("batch", found, f"at least {fewest} samples", cure)


_MOST_TENSORS = 5
"""Tensors that are listed: the worst of them tell where to look."""
_WIDTH = 100
"""Characters of a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedCut:
    """One way in which the samples were cut."""

    sizes: tuple[int, ...]
    """Samples of each micro-batch."""
    error: float
    """How far its gradient is off that of the whole."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CheckReport:
    """Whether cut windows have the gradient of whole ones, as far as some samples tell.

    Errors are relative: the larger of that of all of the gradient and that of its worst tensor; 1 is as much as the
    gradient itself.
    """

    passed: bool | None
    """Whether they have; None where it could not be measured, and ``notice`` says why."""
    hypothesis: str | None = None
    """What the loss is (see ``events.Verified``); where none passed, what is the least wrong; None where micro-batches
    are joined, or nothing was measured, as all that follows is then but for the tolerance."""
    error: float | None = None
    """That of the worst cut."""
    tolerance: float
    """Up to which error gradients are the same; float64 has a tighter one."""
    tensor: str | None = None
    """The worst tensor's name; None, too, where none is off."""
    samples: int = 0
    """How many were measured."""
    cuts: tuple[CheckedCut, ...] = ()
    """How they were cut, with the error of each."""
    # A mapping has no hash: reports are equal by theirs too, and are hashed without them.
    hypotheses: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What the loss might be, with the error of the worst cut if it were that; the one that is held comes first."""
    tensors: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Every parameter by its name, with its error in the worst cut; the worst come first."""
    accumulate: str = "weighted"
    """By which rule a run makes the gradient: ``"weighted"`` or ``"joined"``."""
    reason: str | None = None
    """Why micro-batches are joined; None where they are weighted."""
    held: float | None = None
    """Bytes that a joined step holds for backward, its micro-batch excluded, as a fraction of the full batch's."""
    notice: Notice | None = None
    """What is wrong, what comes of it and what cures it; None where nothing is."""
    seconds: float
    """Wall time that it took."""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<CheckReport: {next(self._lines())}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _lines(self) -> Iterator[str]:
        if self.passed is None:
            yield "NOT MEASURED: whether split batches have the gradient of the full batch"
        elif self.passed:
            yield "EXACT: split batches have the gradient of the full batch"
        else:
            yield "NOT EXACT: split batches have another gradient than the full batch"
        yield ""
        if self.notice is not None:
            yield from _entry("cause", f"{self.notice.cause}.")
            yield from _entry("consequence", f"{self.notice.consequence}.")
            yield from _entry("cure", f"{self.notice.cure}.")
        if self.passed is None or self.error is None:
            return
        if self.reason is not None:
            yield from _entry("joined", "the loss is computed once, on the outputs of all micro-batches.")
            yield from _entry("reason", f"{self.reason}.")
            yield from _entry("memory", f"{self.held:.0%} of what the full batch holds for backward, and a micro-batch")
        elif self.passed:
            yield from _entry("the loss", HYPOTHESES.get(self.hypothesis or "", ""))
        rounding = f"up to {format_error(self.tolerance)} is rounding"
        yield from _entry("error", f"{format_error(self.error)}, relative to the gradient ({rounding})")
        yield from _entry("measured", f"on {self.samples} samples, in {self.seconds:.2g} s")
        sizes = {cut: " + ".join(map(str, cut.sizes)) for cut in self.cuts}
        yield from _table("split into", [(sizes[cut], cut.error) for cut in self.cuts], self.tolerance)
        rows = [(HYPOTHESES[name], error) for name, error in self.hypotheses.items()]
        # Of a loss that is exact the others are what it is not.
        yield from _table("if the loss were", rows, self.tolerance, "ruled out" if self.passed else "not exact")
        worst = list(self.tensors.items())
        yield from _table("parameter", worst[:_MOST_TENSORS], self.tolerance)
        if len(worst) > _MOST_TENSORS:
            yield f"  and {len(worst) - _MOST_TENSORS} more, with smaller errors"


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of a text that has a name."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<13}", subsequent_indent=" " * 15)


def _table(title: str, rows: list[tuple[str, float]], tolerance: float, beyond: str = "not exact") -> Iterator[str]:
    """Yield a table of errors, with a word for those beyond what is allowed; nothing where it has no row."""
    if not rows:
        return
    width = max(len(title), *(len(name) for name, _ in rows))
    yield ""
    yield f"  {title:<{width}}  {'error':>8}"
    for name, error in rows:
        yield f"  {name:<{width}}  {format_error(error):>8}{'' if error <= tolerance else f'  {beyond}'}"


def format_error(error: float) -> str:
    """Return an error in few characters.

    >>> format_error(0.0), format_error(3.21e-17), format_error(0.2731), format_error(float("nan"))
    ('0', '3.2e-17', '27 %', 'NaN')
    """
    if math.isnan(error):
        return "NaN"
    # Below a thousandth nobody reads a share; above it nobody reads a power of ten.
    if error < 1e-3 or error >= 100:
        return f"{error:.2g}"
    return f"{error * 100:.2g} %" if error < 0.99 else f"{error * 100:.0f} %"


@answering("check")
@only_run("check", picks_device=True)
def check(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    num_items: CountItems | None = None,
    reduction: Reducing = None,
    accumulate: Literal["auto", "weighted", "joined"] = "auto",
    device: str | torch.device | None = None,
    ranks: Ranks = "together",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
) -> CheckReport:
    """Measure, on a few samples, whether windows that are cut into micro-batches have the gradient of whole ones.

    The samples are run whole, and in three cuts that are added up as training does it, in training mode and under the
    same random draws; the gradients are compared. What is wrong is named, with what would cure it. Nothing is trained:
    parameters, buffers, gradients, random states, training mode, what modules keep in attributes of their own, and what
    the functions hold, are afterwards what they were, to the bit.

    Args:
        model: the module to train.
        batch: a batch of at least 2 samples, any pytree whose tensors have one row per sample; or a Dataset, a
            DataLoader or another iterable of batches, of which some samples are read; beside a loss_fn a list
            of three samples or batches or more, and beside a collate_fn any list of samples, too. Six of them are
            measured, that differ as much as they can: the more kinds of sample it holds, the more is seen.
        loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and a
            dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
        training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
            neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
        num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss; of
            several losses a dict of these by their names, or a list.
        reduction: mean or sum: how the loss of a micro-batch combines its samples or items; measured if left out. With
            num_items, a sum is divided by the items of the full batch.
        accumulate: how micro-batches make the gradient: weighted: by what their losses count; joined: the loss is
            computed once, on the outputs of all of them, which run again in backward; auto: joined where weighted is
            not exact.
        device: where to compute, such as cpu or cuda:1; an accelerator where there is one.
        ranks: together: several processes that were started together are refused; independent: each looks for itself.
        collate_fn: makes a batch of a list of samples, where a Dataset is passed.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits: samples,
            graphs, packed, flattened(...), tensors. Read off the batches when left out.
        batch_dim: the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent there
            (others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.

    Returns:
        the report; printed, it is a page that says whether it is exact.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        DataError: the batch has no samples, or the data cannot be read.
        LossError: the loss is NaN, changes gradients, or cannot be trained on.
        LimitBelowModelError: the model does not fit on the device.

    >>> import torch
    >>> model, batch = torch.nn.Linear(3, 1).double(), (torch.randn(8, 3).double(), torch.randn(8, 1).double())
    >>> report = check(model, batch, loss_fn=torch.nn.functional.mse_loss, device="cpu")
    >>> report.passed, report.hypothesis, [cut.sizes for cut in report.cuts]
    (True, 'items', [(1, 2, 3), (3, 2, 1), (2, 2, 2)])
    """
    # What torch.compile wraps is measured eagerly.
    given = {name: value for name, value in locals().items() if name in OF_FIT}
    given["model"] = bare = getattr(model, "_orig_mod", model)
    arguments = FitArguments(**given, data=batch, effective_batch=1)
    checked = arguments.check()
    refuse_ranks(ranks, "check")
    started = clock.now()
    modules = arguments.modules()
    parameters = trainable_parameters(bare, modules)
    on = find_device(device)
    # Windows are made of what the model computes; the optimizer is there because a job has one, and never steps.
    job = job_of(arguments, checked, on, bare, torch.optim.SGD(parameters, lr=0.0))
    # Refused before any backward: they would see to it that something remains.
    if exactness_notices.has_backward_hooks(parameters):
        return _unmeasured(exactness_notices.backward_hook_notice(), parameters, started)
    held = surroundings_of([job.loss_of, num_items])
    every = [model, *modules, *held.modules]  # what only num_items holds too
    memory = memory_of(on)
    limit = Limit(memory, None)
    with (
        torch.enable_grad(),
        named("a check was begun, or was undone"),
        no_trace(every, None, on, held.tensors),
        _collator_kept(job),
    ):
        window, _ = open_samples(batch, collate_fn, on, job.split, are_pairs=loss_fn is not None)
        refuse_few(window.num_samples, smallest_micro_batch(modules))
        with room_for_model(memory, limit.bytes, parameters):
            for module in modules:
                module.to(on)
            into_training(model)
            # To move some makes others of them.
            job = replace(job, optimizer=torch.optim.SGD(trainable_parameters(bare, modules), lr=0.0))
        return _Check(job, window).in_force(accumulate, started)


@contextmanager
def _collator_kept(job: Job) -> Iterator[None]:
    """Put back what a collate_fn keeps, such as a generator of its own, by which it draws for each batch."""
    aside = State((), (job.collate_fn,), job.device, ())
    try:
        yield
    finally:
        aside.restore()


# The measurement.


@dataclass(kw_only=True)
class _Shown:
    """What forwards have shown before anything is measured."""

    sizes: list[int] = field(default_factory=list)
    """Samples of some micro-batches."""
    reductions: list[Reduction] = field(default_factory=list)
    """How the loss of each was reduced."""
    written: list[torch.Tensor] = field(default_factory=list)
    """What forwards have written to."""

    def items(self) -> list[float]:
        """Return what each micro-batch counts, by its graph."""
        return [float(reduction.items) for reduction in self.reductions]


class _Check:
    """One check, of a job that is on its device."""

    def __init__(self, job: Job, window: Window) -> None:
        self._job = job
        self._window = window
        self._parameters = [p for module in job.modules for p in module.parameters() if p.requires_grad]
        self._smallest = smallest_micro_batch(job.modules)
        self._failed_on: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._uncertain: str | None = None  # why weights that were measured to be right are no certain count

    def _weighted(self, shown: _Shown, started: float) -> CheckReport:
        """Measure weighted micro-batches, and say what came of it."""
        is_sum = bool(shown.sizes) and conclude(shown.sizes, shown.reductions).is_sum
        is_sum = is_sum if self._job.reduction is None else self._job.reduction == "sum"
        counts_items = self._job.num_items is not None
        likely = "num_items" if counts_items else "sum" if is_sum else "items"
        most = max(MOST, 3 * self._smallest)
        verdict = measure(self._job, self._window, likely, most=most, written=shown.written)
        if verdict.decision is None:
            return self._not_measured(verdict, started)
        return self._measured(verdict, verdict.decision, shown, started)

    def in_force(self, accumulate: str, started: float) -> CheckReport:
        """Measure by the rule that a run would choose; return the report.

        Raises:
            LossError: the loss cannot be trained on.
        """
        looked = attempt(self._look)
        # Where there is no memory for so many samples there may be for fewer: the measurement tries.
        shown = _Shown() if isinstance(looked, RanOut) else looked
        can_join = why_not_joined(self._job, noise_scale=False, is_sharded=False) is None
        if accumulate == "weighted" or (accumulate == "auto" and not can_join):
            return self._weighted(shown, started)
        reason, weighted = "accumulate='joined' was passed", None
        if accumulate == "auto":
            is_sum = conclude(shown.sizes, shown.reductions).is_sum
            reason = self._why_uncertain(shown, is_sum=is_sum, counts_samples=True) or ""
            weighted = None if reason else self._weighted(shown, started)
        if weighted is not None:
            if weighted.passed and self._uncertain is None:
                return weighted
            reason = self._uncertain or ("" if weighted.notice is None else weighted.notice.cause)
        found = measure_joined(
            self._job,
            self._window,
            Layout(self._job.modules),
            most=self._window.num_samples,
            written=shown.written,
            failed_on=self._failed_on,
        )
        if accumulate == "auto" and not found.passed:
            return weighted or self._weighted(shown, started)
        if found.layout is None:
            notice = not_measured_joined(found.unmeasured)
            return replace(_unmeasured(notice, self._parameters, started), accumulate="joined")
        event = found.event(step=0, reason=reason, seconds=clock.now() - started)
        return CheckReport(
            passed=found.passed,
            error=found.error,
            tolerance=found.tolerance,
            tensor=found.tensor,
            samples=found.samples,
            cuts=(CheckedCut(sizes=found.sizes, error=found.error),),
            tensors={} if found.tensor is None else {found.tensor: found.error},
            accumulate="joined",
            reason=reason,
            held=found.share,
            notice=None if found.passed else not_joined(event),
            seconds=clock.now() - started,
        )

    def _look(self) -> _Shown:
        """Run some samples forward: whole, as training would, and in parts, whose graphs show what the loss may be.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
            LossSideEffectError: computing it changes gradients.
        """
        shown = _Shown()
        count = min(max(MOST, 3 * self._smallest), self._window.num_samples)
        chosen = choose(self._window, self._window.num_samples, count)
        job = self._job
        # Every parameter is kept too: whatever its size, one may be written to.
        everything = [p for module in job.modules for p in module.parameters()]
        trained = [p for p in everything if p.requires_grad]
        aside = State(job.modules, job.functions, job.device, trained, everything)
        try:
            with torch.compiler.set_stance("force_eager"):
                self._look_at_whole(chosen)
                parts = next(iter(cuts_of(count, self._smallest)), ())
                for part in parts:
                    try:
                        loss = total(job.loss_of(job.model, self._batch([chosen[place] for place in part])))
                        shown.reductions.append(without_graph(read_reduction(loss, len(part))))
                        shown.sizes.append(len(part))
                    except Exception as error:
                        # A sample by itself may be more than the loss bears: the measurement says what does then.
                        if is_out_of_memory(error):
                            raise
            shown.written = aside.moved()
        finally:
            aside.restore()
        return shown

    def _look_at_whole(self, positions: Sequence[int]) -> None:
        """Run samples forward as training would, and fail as it would."""
        batch = self._batch(positions)
        try:
            loss = total(SideEffects(self._parameters).refuse_in(partial(self._job.loss_of, self._job.model, batch)))
        except Exception as error:
            running = f"was running {len(positions)} samples that are checked"
            tell_micro_batch(error, lambda: batches.flatten(batch)[0], running)
            raise
        # Of what holds no items a mean is NaN, and counts for nothing.
        if read_reduction(loss, len(positions)).items and not math.isfinite(value := loss.item()):
            raise NonFiniteLossError(value)

    def _batch(self, positions: Sequence[int]) -> Any:
        return batches.to_device(self._window.samples(positions), self._job.device, copy=True)

    def _why_uncertain(self, shown: _Shown, *, is_sum: bool, counts_samples: bool) -> str | None:
        found = shown.sizes, shown.items(), shown.reductions
        return why_uncertain(self._job, *found, is_sum=is_sum, counts_samples=counts_samples)

    def _measured(
        self,
        verdict: Verdict,
        decision: Decision,
        shown: _Shown,
        started: float,
    ) -> CheckReport:
        """Return the report of what was measured."""
        self._failed_on = [] if decision.passed else verdict.failing(decision)
        if decision.passed:
            self._uncertain = (
                DRAWN
                if decision.hides_draws
                else self._why_uncertain(
                    shown, is_sum=decision.hypothesis == "sum", counts_samples=decision.counts_samples
                )
            )
        by_error = sorted(decision.tensors.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
        rounded = exactness_notices.half_precision_notices(self._parameters)
        notice = rounded[0] if rounded else None
        if not decision.passed:
            counts_items, suspicion = self._job.num_items is not None, notice
            if notice is None and not counts_items and self._job.reduction is None:
                suspicion = exactness_notices.doubt_of(shown.sizes, shown.reductions)
            notice = exactness_notices.failure_notice(
                decision,
                verdict.samples,
                self._job.modules,
                exactness_notices.suspected(verdict, suspicion),
                counts_items=counts_items,
                is_stated=self._job.reduction is not None,
            )
        notice = notice or exactness_notices.untrained_notice(self._job.modules, verdict.trained)
        if notice is None and self._uncertain is not None:
            notice = exactness_notices.uncertain_notice(self._uncertain)
        # What else a run would do otherwise than was measured here.
        if notice is None and decision.passed and verdict.left:
            notice = exactness_notices.state_notice(verdict.left)
            self._uncertain = notice.cause
        if notice is None and decision.passed and verdict.draws_once:
            notice = exactness_notices.drawn_once_notice()
        return CheckReport(
            passed=decision.passed,
            hypothesis=decision.hypothesis,
            error=decision.error,
            tolerance=max(verdict.tolerance, decision.error) if decision.passed else verdict.tolerance,
            tensor=decision.tensor,
            samples=verdict.samples,
            cuts=tuple(
                CheckedCut(sizes=tuple(map(len, cut)), error=error)
                for cut, error in zip(decision.cuts, decision.errors, strict=False)  # up to the first that fails
            ),
            hypotheses={decision.hypothesis: decision.error}
            | {outcome.hypothesis: outcome.error for outcome in decision.outcomes if outcome.hypothesis is not None},
            tensors=dict(by_error),
            notice=notice,
            seconds=clock.now() - started,
        )

    def _not_measured(self, verdict: Verdict, started: float) -> CheckReport:
        cure = "Pass other samples, or train with micro_batch= the whole window if it fits"
        if verdict.is_passing:
            cure = "Pass samples with targets that count, on which the loss is finite and has a gradient that is not 0"
        notice = exactness_notices.unmeasured_notice(verdict.unmeasured)
        if verdict.unmeasured != FOREIGN:  # by which other samples draw too
            notice = replace(notice, cure=cure)
        return _unmeasured(notice, self._parameters, started)


def _unmeasured(notice: Notice, parameters: Sequence[torch.Tensor], started: float) -> CheckReport:
    """Return the report of a check that could not measure anything."""
    tolerance, seconds = tolerance_of(parameters), clock.now() - started
    return CheckReport(passed=None, tolerance=tolerance, notice=notice, seconds=seconds)
