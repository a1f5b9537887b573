"""``check``: what a run measures before its first step, for whoever has a model and a batch, and nothing else yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.errors import NonFiniteLossError
from autoaccum.events import Notice
from autoaccum.loss.conclusions import conclude
from autoaccum.loss.functions import loss_function, stated
from autoaccum.loss.reductions import read, without_graph
from autoaccum.loss.stated import CountItems, Reducing, total
from autoaccum.loss.terms import Reduction
from autoaccum.memory import clock
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory, named, room_for_model
from autoaccum.training.alone import Ranks, only_run, refuse_ranks
from autoaccum.training.check_report import CheckedCut, CheckReport
from autoaccum.training.check_samples import open_samples, refuse_few
from autoaccum.training.declarations import check as check_arguments
from autoaccum.training.lazy import build_lazy_layers
from autoaccum.training.options import CHECKS, OF_CHECK, modules_of
from autoaccum.training.synonyms import answering
from autoaccum.training.traces import no_trace
from autoaccum.verification import notices
from autoaccum.verification.certain import DRAWN, why_uncertain, why_unweighted
from autoaccum.verification.comparison import tolerance_of
from autoaccum.verification.findings import FOREIGN, Decision, Verdict
from autoaccum.verification.joining import measure_joined
from autoaccum.verification.samples import MOST, choose, cuts_of
from autoaccum.verification.side_effects import SideEffects
from autoaccum.verification.verdict import measure
from autoaccum.window.batch_norm import smallest_micro_batch
from autoaccum.window.job import Job
from autoaccum.window.joined import why_not_joined
from autoaccum.window.modules import into_training
from autoaccum.window.notices import not_joined, not_measured_joined
from autoaccum.window.optimizers import trainable_parameters
from autoaccum.window.raised import tell_micro_batch
from autoaccum.window.split_calls import Layout
from autoaccum.window.state import State
from autoaccum.window.surroundings import surroundings_of


# Its parameters, their texts, and those checked, are written by tests/write_signatures.py.
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
            DataLoader or another iterable of batches, of which some samples are read; beside a loss_fn or a collate_fn
            a list of samples, and beside a loss_fn one of three batches or more, too. Six of them are measured, that
            differ as much as they can: the more kinds of sample it holds, the more is seen.
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
    checked = check_arguments(
        OF_CHECK, CHECKS, model=model, batch=batch, loss_fn=loss_fn, training_step=training_step, num_items=num_items,
        reduction=reduction, accumulate=accumulate, device=device, ranks=ranks, collate_fn=collate_fn, split=split,
        batch_dim=batch_dim,
    )  # fmt: skip
    refuse_ranks(ranks, "check")
    started = clock.now()
    loss_of, counts, reduction, divides = stated(checked[loss_function], num_items, reduction)
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps: it is measured eagerly
    modules = modules_of(bare, loss_fn, training_step)
    parameters = trainable_parameters(bare, modules)
    on = find_device(device)
    # Windows are made of what the model computes; the optimizer is there because a job has one, and never steps.
    job = Job(
        model=bare,
        modules=tuple(modules),
        optimizer=torch.optim.SGD(parameters, lr=0.0),
        loss_of=loss_of,
        num_items=counts,
        divides=divides,
        reduction=reduction,
        collate_fn=collate_fn or getattr(batch, "collate_fn", None),
        split=checked[split_of],
        device=on,
    )
    # Refused before any backward: they would see to it that something remains.
    if notices.has_backward_hooks(parameters):
        return _unmeasured(notices.backward_hook_notice(), parameters, started)
    held = surroundings_of([loss_of, num_items])
    every = [model, *modules, *held.modules]  # what only num_items holds too
    memory = memory_of(on)
    limit = Limit(memory, None)
    with (
        torch.enable_grad(),
        named("a check was begun, or was undone"),
        no_trace(every, None, on, held.tensors),
        _lazily_kept(job, every),
        _collator_kept(job),
    ):
        window, examples = open_samples(batch, collate_fn, on, job.split, are_pairs=loss_fn is not None)
        refuse_few(window.num_samples, smallest_micro_batch(modules))
        with room_for_model(memory, limit.bytes, parameters):
            for module in modules:
                module.to(on)
            into_training(model)
            build_lazy_layers(model, modules, examples, job.loss_of, job.autocast, on)
            # To move some makes others of them.
            job = replace(job, optimizer=torch.optim.SGD(trainable_parameters(bare, modules), lr=0.0))
        return _Check(job, window).in_force(accumulate, started)


def _aside(job: Job, modules: Sequence[nn.Module]) -> State:
    """Keep what forwards may change, every parameter too: whatever its size, one may be written to."""
    everything = [p for module in modules for p in module.parameters()]
    trained = [p for p in everything if p.requires_grad]
    return State(job.modules, job.functions, job.device, trained, everything)


@contextmanager
def _collator_kept(job: Job) -> Iterator[None]:
    """Put back what a collate_fn keeps, such as a generator of its own, by which it draws for each batch."""
    aside = State((), (job.collate_fn,), job.device, ())
    try:
        yield
    finally:
        aside.restore()


@contextmanager
def _lazily_kept(job: Job, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep what the forward changes that builds lazy layers, and put it back at its end; others need no copy for it."""
    if not any(is_lazy(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())):
        yield
        return
    aside = _aside(job, modules)
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
            reason = why_unweighted(self._job, shown.sizes, shown.items(), shown.reductions) or ""
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
            hypothesis=None,
            error=found.error,
            tolerance=found.tolerance,
            tensor=found.tensor,
            samples=found.samples,
            cuts=(CheckedCut(sizes=found.sizes, error=found.error),),
            hypotheses={},
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
        aside = _aside(self._job, self._job.modules)
        try:
            with torch.compiler.set_stance("force_eager"):
                self._look_at_whole(chosen)
                parts = next(iter(cuts_of(count, self._smallest)), ())
                for part in parts:
                    try:
                        self._look_at_part(self._batch([chosen[place] for place in part]), len(part), shown)
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
        if read(loss, len(positions)).items and not math.isfinite(value := loss.item()):
            raise NonFiniteLossError(value)

    def _look_at_part(self, batch: Any, num_samples: int, shown: _Shown) -> None:
        """Run some samples forward, and note what the graph of their loss shows."""
        loss = total(self._job.loss_of(self._job.model, batch))
        found = without_graph(read(loss, num_samples))
        shown.sizes.append(num_samples)
        shown.reductions.append(found)

    def _batch(self, positions: Sequence[int]) -> Any:
        return batches.to_device(self._window.samples(positions), self._job.device, copy=True)

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
                else why_uncertain(
                    self._job,
                    shown.sizes,
                    shown.items(),
                    shown.reductions,
                    is_sum=decision.hypothesis == "sum",
                    counts_samples=decision.counts_samples,
                )
            )
        by_error = sorted(decision.tensors.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
        rounded = notices.half_precision_notices(self._parameters)
        notice = rounded[0] if rounded else None
        if not decision.passed:
            counts_items, suspicion = self._job.num_items is not None, notice
            if notice is None and not counts_items and self._job.reduction is None:
                suspicion = notices.doubt_of(shown.sizes, shown.reductions)
            notice = notices.failure_notice(
                decision,
                verdict.samples,
                self._job.modules,
                notices.suspected(verdict, suspicion),
                counts_items=counts_items,
                is_stated=self._job.reduction is not None,
            )
        notice = notice or notices.untrained_notice(self._job.modules, verdict.trained)
        if notice is None and self._uncertain is not None:
            notice = notices.uncertain_notice(self._uncertain)
        # What else a run would do otherwise than was measured here.
        if notice is None and decision.passed and verdict.left:
            notice = notices.state_notice(verdict.left)
            self._uncertain = notice.cause
        if notice is None and decision.passed and verdict.draws_once:
            notice = notices.drawn_once_notice()
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
            accumulate="weighted",
            reason=None,
            held=None,
            notice=notice,
            seconds=clock.now() - started,
        )

    def _not_measured(self, verdict: Verdict, started: float) -> CheckReport:
        cure = "Pass other samples, or train with micro_batch= the whole window if it fits"
        if verdict.is_passing:
            cure = "Pass samples with targets that count, on which the loss is finite and has a gradient that is not 0"
        notice = notices.unmeasured_notice(verdict.unmeasured)
        if verdict.unmeasured != FOREIGN:  # by which other samples draw too
            notice = replace(notice, cure=cure)
        return _unmeasured(notice, self._parameters, started)


def _unmeasured(notice: Notice, parameters: Sequence[torch.Tensor], started: float) -> CheckReport:
    """Return the report of a check that could not measure anything."""
    return CheckReport(
        passed=None,
        hypothesis=None,
        error=None,
        tolerance=tolerance_of(parameters),
        tensor=None,
        samples=0,
        cuts=(),
        hypotheses={},
        tensors={},
        accumulate="weighted",
        reason=None,
        held=None,
        notice=notice,
        seconds=clock.now() - started,
    )
