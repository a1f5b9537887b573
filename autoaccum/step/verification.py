"""Decides before a step whether its micro-batches are weighted or joined, and which windows are measured.

The first one is measured (``measurement``), and what the loss is, is decided by that for the run. It is measured again
when a window shows what was not there before: another graph, another mode; and forwards alone are compared now and
then. Between these a window costs a comparison or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from autoaccum.data.base import Window
from autoaccum.errors import LossError, LossSideEffectError, NonFiniteLossError, NotExactError
from autoaccum.events import Event, Notice, Verified
from autoaccum.memory import clock
from autoaccum.step import exactness_notices
from autoaccum.step.findings import Decision, Verdict
from autoaccum.step.gradient import Gradient, are_alike, are_terms_apart
from autoaccum.step.infer_reduction import BY_ONE, PENALTIES, conclude
from autoaccum.step.job import Job
from autoaccum.step.loss_graph import is_one, read_reduction, without_graph
from autoaccum.step.snapshot import State
from autoaccum.step.terms import Doubt, Hypothesis, LossOf, Reduction, without_none
from autoaccum.step.transaction import Transaction


def likely_hypothesis(job: Job, gradient: Gradient) -> Hypothesis:
    """Return what a window looks like that nothing was measured of."""
    if job.num_items is not None:
        return "num_items"
    return "items" if gradient.conclusion is None or not gradient.conclusion.is_sum else "sum"


def is_weighed_alike(gradient: Gradient, before: Hypothesis | None, after: Hypothesis | None) -> bool:
    """Return whether another hypothesis would weigh a window as the one did by which it was run."""
    if before == after or gradient.conclusion is None:
        return True
    return before is None and (after == "num_items" or gradient.conclusion.is_sum == (after == "sum"))


def is_hidden(gradient: Gradient) -> bool:
    """Return whether what micro-batches count cannot be read off them because their loss was compiled."""
    return any(term.is_compiled for reduction in gradient.reductions for term in reduction.terms)


def pieces(gradient: Gradient) -> list[tuple[int, int]]:
    """Return (start, samples) of each micro-batch."""
    starts = accumulate(gradient.sizes, initial=0)
    return list(zip(starts, gradient.sizes, strict=False))


def suspicion(job: Job, sizes: Sequence[int], shown: Sequence[Reduction]) -> Notice | None:
    """Return what the graphs say against a loss that was measured not to add up; None where they say nothing."""
    # What its graph does not tell, the user has told.
    return None if is_told(job) else exactness_notices.doubt_of(sizes, shown)


def is_told(job: Job) -> bool:
    """Return whether the user has said what a loss is, or is a mean over."""
    return job.num_items is not None or job.reduction is not None


def doubts(job: Job, gradient: Gradient, shown: Sequence[Reduction]) -> list[Notice]:
    """Return why the gradient may not be that of the window, as far as that can be read, where nothing was measured."""
    if gradient.conclusion is None:
        return []
    said = exactness_notices.batch_norm_notices(job.modules)
    doubt = None if job.num_items is not None else _doubt(job, gradient, shown)
    return [*said, *([] if doubt is None else [exactness_notices.doubt_notice(*doubt)])]


def _doubt(job: Job, gradient: Gradient, shown: Sequence[Reduction]) -> Doubt | None:
    assert gradient.conclusion is not None
    if job.reduction == "sum":  # which the user says, and which is wrong where penalties stand beside it
        found = conclude(gradient.sizes, shown).doubt if len(shown) == len(gradient.sizes) else None
        return found if found is PENALTIES else None
    has_ones = gradient.is_kept_from_none and any(map(is_one, gradient.reductions))
    return gradient.conclusion.doubt or (BY_ONE if has_ones else None)


T = TypeVar("T")


class SideEffects:
    """The gradients as they were before a loss was computed."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        # A copy would cost as much memory as the gradients. Another tensor has another id, and writing in place moves a
        # tensor's version: both together show every change but one that is made through ``.data``.
        self._parameters = parameters
        self._before = self._versions()

    def refuse(self) -> None:
        """Compare the gradients with those of before.

        Raises:
            LossSideEffectError: there are other ones, or they were written to.
        """
        if self._versions() != self._before:
            raise LossSideEffectError("loss_fn, training_step or the model")

    def refuse_in(self, compute: Callable[[], T]) -> T:
        """Return what is computed, if that leaves gradients as they are.

        Raises:
            LossSideEffectError: it does not.
        """
        # Errors of other kinds come out as they are, among them memory that ran out: these have a replay to come.
        try:
            computed = compute()
        except LossError:
            # Whoever calls backward() returns no loss, or one that is detached: that is not what he is to be told of.
            self.refuse()
            raise
        self.refuse()
        return computed

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(p.grad), p.grad._version) for p in self._parameters if p.grad is not None]


_CLOSELY = 100
"""Windows of which each is looked at where nothing was measured; of later ones every tenth or so is."""
NEVER = 2**62
"""The number of no window."""
_MOST_SURPRISES = 4
"""Measurements because of what a window shows, after which they are made at every doubling of the number of surprises
only: a graph that depends on its data changes all the time."""

Status = Literal["unmeasured", "passed", "failed"]
"""What a run goes by: what can be read and is said, what was measured, or what has failed and was said."""

Reason = Literal["whole", "again", "losses"]
"""How a window is measured: wholly, which is told; once more, quietly where nothing has changed; or by its losses."""


class Occasions:
    """When to look, and when to measure: facts that outlive the process."""

    def __init__(self) -> None:
        """Begin before the first window."""
        self.status: Status = "unmeasured"
        self.surprises = 0
        """Windows that have shown what was not there before."""
        self.is_changed = False
        """Whether the last measurement has passed by another hypothesis than the one before."""
        self.next_round = 2
        """The number of the window at which is measured next, whatever it shows."""
        self.next_look = 1
        """The number of the next window whose forwards are looked at."""
        self.tries = _MOST_SURPRISES
        """How often it is still tried to measure what could not be measured."""

    def is_foreseen(self, number: int) -> bool:
        """Return whether a window is going to be measured, if it is cut, whatever it shows."""
        if self.status == "unmeasured":
            return self.tries > 0
        return self.status == "passed" and (self.is_changed or number >= self.next_round)

    def reason(self, number: int, *, is_surprising: bool) -> Reason | None:
        """Return how a window is measured; None where it need not be.

        Args:
            number: its number.
            is_surprising: whether it shows what no window before it did.
        """
        if self.status == "failed":
            return None
        if self.status == "unmeasured":
            return "whole" if self.tries else None
        if is_surprising:
            self.surprises += 1
            if self.surprises <= _MOST_SURPRISES or self.surprises & (self.surprises - 1) == 0:
                return "whole"
        # The samples of a first window may be alike, and what it sets up is not seen in it.
        if number == self.next_round == 2:
            return "again"
        return "losses" if number >= self.next_round else None

    def measured(self, number: int) -> None:
        """Take that a window is measured."""
        if number >= self.next_round:
            self.next_round = 3 if number < 3 else 10 ** len(str(number))

    def renew(self) -> None:
        """Take that there may be room for what could not be measured: try it once more at least."""
        self.tries = max(self.tries, 1)

    def looked(self, number: int, *, is_measured: bool) -> None:
        """Take that a window was looked at: the next one is that is to be measured; of a run that has failed none.

        Of one that is not measured yet each of the first hundred is, and then one in ten, in a hundred, and so on; if
        none is to be measured, the first three.
        """
        every = 1 if number < _CLOSELY else int(10 ** (len(str(number)) - 2))
        is_done = not is_measured and number > 2
        looks = {"unmeasured": NEVER if is_done else (number // every + 1) * every, "failed": NEVER}
        self.next_look = looks.get(self.status, number + 1 if self.is_changed else max(number + 1, self.next_round))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, for a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        vars(self).update(state)


def pair_of(gradient: Gradient, number: int, most: int) -> tuple[range, range] | None:
    """Choose two of a window's largest micro-batches; None where there are none that count, or no room for both.

    Args:
        gradient: of the window.
        number: of it; others are taken each time.
        most: samples that there is room for in a forward.

    Returns:
        the positions of the samples of each.
    """
    largest = max(gradient.sizes, default=0)
    # Of halves of one of them nothing is learnt that begins with its own size, such as the 16 hardest of a batch.
    counted = zip(pieces(gradient), gradient.counts, strict=True)
    of_them = [piece for piece, count in counted if without_none(count) and 2 * piece[1] > largest]
    if len(of_them) < 2 or most < 2 * largest:
        return None
    first, second = (of_them[(number + index) % len(of_them)] for index in range(2))
    return range(first[0], sum(first)), range(second[0], sum(second))


SEVERAL = "The terms of the loss are divided by different counts"
ONLY_PENALTIES = "The loss is a sum over samples plus terms of parameters alone"
CLAMPED = "The loss of a micro-batch is divided by exactly 1, which may stand for a count of 0"
KEPT = "The loss of a micro-batch that counts items is 0, which may be a count that is kept from 0"
HIDDEN = "The autograd graph does not show what the loss is divided by"
DRAWN = "What the step draws at random was not found to be each sample's own, and may mix samples"
NOT_FINITE = "The loss of a micro-batch, or its gradient, is not finite"


def why_uncertain(
    job: Job,
    sizes: Sequence[int],
    counts: Sequence[float],
    reductions: Sequence[Reduction],
    *,
    is_sum: bool,
    counts_samples: bool,
) -> str | None:
    """Return why no weight of micro-batches is certain, whatever was measured; None where one is.

    Args:
        job: what is computed. A count or a reduction that the user passed is certain.
        sizes: samples of each micro-batch of a window.
        counts: what each was found to count; 0 for none.
        reductions: how the loss of each was reduced.
        is_sum: whether it is a sum, or looks like one before it is measured.
        counts_samples: whether graphs of code that is not compiled have shown samples to count alike, or may yet.
    """
    if is_told(job) or not any(counts):
        return None
    if is_sum and any(reduction.constants for reduction in reductions):
        return ONLY_PENALTIES
    if is_sum:
        return SEVERAL if are_terms_apart(counts, reductions) else None
    found = [reduction for reduction, count in zip(reductions, counts, strict=True) if count]
    terms = [term for reduction in found for term in reduction.terms]
    unknown = [term for term in terms if term.kind == "unknown" and not (term.is_compiled and counts_samples)]
    if not all(term.numbers for term in unknown):
        return HIDDEN
    # A term that some micro-batches lack is over other items than the rest.
    if len({max(1, len(reduction.terms)) for reduction in found}) > 1:
        return SEVERAL
    # As long as each sample counts alike, it is no matter what is counted.
    if are_alike(sizes, counts):
        return None
    # Terms that are means over the same count, as cross entropy and a z-loss of the same tokens, are one path twice.
    differ = are_terms_apart(counts, reductions)
    if len(terms) > len(found) and (differ or any(term.kind != "mean" for term in terms)):
        return SEVERAL
    return CLAMPED if any(map(is_one, found)) else HIDDEN if unknown else None


Measure = Callable[..., Verdict]
"""(job, window, the hypothesis that comes first, ...) -> what was measured: see ``verdict.measure``."""


class Examination(NamedTuple):
    """What came of looking at a window."""

    events: Sequence[Event] = ()
    """To be told."""
    again: bool = False
    """Whether the window has to be run again, for it was weighed by a hypothesis that has failed."""
    smallest: int = 1
    """The fewest samples of a micro-batch whose loss can be computed."""
    is_put_off: bool = False
    """Whether nothing was measured because windows are joined next; if that fails, the window is examined again."""
    hides_items: bool = False
    """Whether compiled code hides what its losses are means over, so that it may not run compiled."""


class Examiner:
    """Looks at the windows of one run, and decides what its loss is."""

    def __init__(
        self,
        job: Job,
        transaction: Transaction,
        measure: Measure,
        *,
        verify: bool = True,
        strict: bool = False,
    ) -> None:
        """Put itself beside a transaction, whose hypothesis it sets.

        Args:
            job: what is computed.
            transaction: runs the windows.
            measure: measures one of them: ``verdict.measure``.
            verify: whether anything is measured.
            strict: whether a gradient that is not the whole window's ends the run.
        """
        self._job = job
        self._transaction = transaction
        self._measure_window = measure
        self.verifies = verify
        """Whether anything is measured."""
        self._strict = strict
        self._parameters = transaction.trained()
        self.joins = False
        """Whether windows may be joined instead: notices of inexact gradients then wait until that was tried."""
        self.withheld: list[tuple[Notice, float | None]] = []
        """Notices that wait, each with its measured error, or None."""
        self.uncertain: str | None = None
        """Why weights that were measured to be right are no certain count; None where they are, or nothing can join."""
        self._failed_on: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # samples, and sizes of the parts
        self.is_checked = False
        """Whether a first window had a finite loss."""
        self._num_empty = 0  # windows in which nothing counts
        self._is_first = True  # until a window that was cut has been examined
        self._occasions = Occasions()
        self._counts_samples = False  # whether graphs have shown, in a measurement, samples to count alike
        self._hides_draws = False  # whether the one that passed did not show draws to be each sample's own
        self.is_owed = False
        """Whether windows were cut, and stepped on, that could not be measured for want of memory."""
        self._largest_joined = 0  # samples of two micro-batches that were compared joined and apart
        self._has_tried_joining = False  # a window that is not finite
        self.is_trying = False
        """Whether that is what this window is to be joined for."""
        self._written: dict[int, torch.Tensor] = {}  # parameters that forwards write to, by id
        self._remembered: State | None = None  # how things were when the window of that number began
        self._remembered_of = 0
        self._number = 0  # of the window that is run
        self._is_to_remember = False
        # How windows are run; and how they were when there was no memory to remember how one of them began.
        self._way: object = None
        self._short_way: object = None
        self._smallest = 1
        self._begin()

    def begin_attempt(self, number: int, announce: Callable[[Notice], None], way: object = None) -> None:
        """Look at the forwards of an attempt; forget what one that was rolled back has shown.

        Args:
            number: of the window.
            announce: says what cannot wait for the window's end.
            way: what the memory depends on that it leaves, such as the largest micro-batch; compared by ``==``.
        """
        if way != self._way:
            # What there was no memory for may fit now. A run that goes on has nothing to compare with yet.
            if self._way is not None:
                self._occasions.renew()
            self._way = way
        # What a window moves is put back to measure it. Its second attempt begins no more as the first one did, for not
        # everything is rolled back. Those that are not cut, but for the first, would pay for it in vain.
        self._number = number
        is_due = self._occasions.is_foreseen(number) and number != self._remembered_of
        # Where it had to be let go of once it would have to be again: that is a replay for each window.
        self._is_to_remember = self.verifies and is_due and (way is None or way != self._short_way)
        if self._is_to_remember and not self.is_checked:
            self._remember()
        # The transaction knows nothing of being examined: this is put around its forward from outside.
        self._transaction.forward = self.forward
        self._announce = announce
        self._begin()

    def _remember(self) -> None:
        job = self._job
        self._remembered = State(job.modules, job.functions, job.device, self._transaction.trained())
        self._remembered_of, self._is_to_remember = self._number, False

    @property
    def has_failed(self) -> bool:
        """Return whether split windows were measured to have another gradient than whole ones."""
        return self._occasions.status == "failed"

    def compute_by(self, loss_of: LossOf) -> None:
        """Compute the losses of what is measured by this from now on."""
        self._job = self._job.computed_by(loss_of)

    def break_off(self) -> None:
        """Forget how a window began that an error has ended: the next one has its number, and begins otherwise."""
        self._remembered, self._remembered_of, self._failed_on = None, 0, []
        self.uncertain, self.is_trying = None, False

    def put_back(self) -> None:
        """Put back the parameters that the window began with, where they are remembered."""
        if self._remembered is not None and self._remembered_of == self._number:
            self._remembered.restore_parameters()

    def let_go(self) -> bool:
        """Forget how the window began where that takes of the memory that it is short of; return whether it did."""
        # Buffers and random states, which its rollback has anyway, are put back all the same to measure it.
        if self._remembered is None or self._job.device.type != "cpu":
            return False
        self._remembered, self._short_way = None, self._way
        return True

    def _begin(self) -> None:
        self._sizes: list[int] = []  # samples of micro-batches
        self._shown: list[Reduction] = []  # how their losses were reduced, whatever the user says

    def forward(self, batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
        """Return the loss of a micro-batch, having looked at it.

        Raises:
            LossSideEffectError: gradients have changed while it was computed.
        """
        is_part = num_samples < window_samples
        if not is_part and self.is_checked:  # a whole window has nothing to hide, and needs no second look
            return self._transaction.plain_forward(batch, num_samples, window_samples)
        if self._is_to_remember:
            self._remember()
        if is_part and self._is_first and not self._sizes and exactness_notices.has_backward_hooks(self._parameters):
            self._refuse_or_say(exactness_notices.backward_hook_notice(), None)
        # Of a whole window too: gradients that a loss changes are wrong however the window is cut.
        before = SideEffects(self._parameters) if self._is_first else None
        versions = [p._version for p in self._parameters]
        run = partial(self._transaction.plain_forward, batch, num_samples, window_samples)
        loss = run() if before is None else before.refuse_in(run)
        for p, version in zip(self._parameters, versions, strict=True):
            if p._version != version:
                self._written[id(p)] = p
        if is_part:
            # The graph is walked here, for the backward that follows frees it.
            self._sizes.append(num_samples)
            if self._occasions.status != "passed":
                self._shown.append(without_graph(read_reduction(loss, num_samples)))
        return loss

    def check_first(self, gradient: Gradient) -> None:
        """Look at the loss and the gradient of the very first window that counts anything, before it is stepped on.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
        """
        if self.is_checked or gradient.conclusion is None or self._is_to_be_joined(gradient):
            return
        # It waits for the device, and so is asked of one window only.
        if not math.isfinite(value := gradient.loss.item()):
            raise NonFiniteLossError(value, gradient.sizes)
        self.is_checked = True
        # Hooks may have stepped on gradients, and dropped them.
        if not exactness_notices.has_backward_hooks(self._parameters):
            found = {id(p) for module in self._job.modules for p in module.parameters() if p.grad is not None}
            if (notice := exactness_notices.untrained_notice(self._job.modules, found)) is not None:
                self._announce(notice)

    def examine(
        self,
        window: Window,
        gradient: Gradient,
        number: int,
        most: int,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Examination:
        """Examine a window that was cut.

        Args:
            window: its samples, as they can still be read; where ranks hold parts of it, those that lie here, which are
                its first.
            gradient: that of the whole window, in ``.grad``, which stays.
            number: of the window.
            most: samples that memory has room for in one micro-batch.
            aside: makes the context of what is measured, which is no part of the window.

        Raises:
            NotExactError: it is not that of the whole window, and the run is strict.
        """
        said: list[Event] = []
        is_weighed_otherwise = hides_items = False
        if self._is_to_be_joined(gradient):
            self._has_tried_joining, self.is_trying, self.uncertain = True, True, NOT_FINITE
            return Examination(said, is_put_off=True)
        self.check_first(gradient)
        if self.verifies and not gradient.items and self._is_due_empty():
            self._measure_empty(window, number, most, said, aside)
        if gradient.conclusion is not None:
            if self._is_first:
                trained = [p for p in self._parameters if p.requires_grad]
                said.extend(exactness_notices.half_precision_notices(trained))
                self._is_first = False
            if self.joins and self._transaction.hypothesis is None:
                self.uncertain = self._by_graph(gradient, is_sum=gradient.conclusion.is_sum, counts_samples=True)
                if self.uncertain is not None:  # nothing is to be measured
                    return Examination(said, is_put_off=True)
            before, reason = self._transaction.hypothesis, None
            if self.verifies:
                is_surprising = self._transaction.signs.have_changed
                reason = self._occasions.reason(number, is_surprising=is_surprising)
            if reason is not None:
                with aside():
                    self._measure(window, gradient, number, most, reason, said)
            self._say_doubts(gradient, said)
            if gradient.is_uncounted and self._occasions.status != "failed":
                self._refuse_or_say(exactness_notices.uncounted_notice(), None, said)
            is_passed, after = self._occasions.status == "passed", self._transaction.hypothesis
            if self.joins and is_passed:
                self.uncertain = self._why_uncertain(gradient)
            elif self.joins and after is None and gradient.is_kept_from_none and not is_told(self._job):
                self.uncertain = KEPT  # of samples whose gradient is 0 nothing could be measured
            # What was measured is true of code as it is written, of which windows that run compiled code see nothing.
            is_read = is_passed and after == "items" and not self._counts_samples
            hides_items = is_read and is_hidden(gradient)
            said.extend([exactness_notices.compiled_notice()] if hides_items else [])
            if after != before:
                self._transaction.signs.forget_graphs()
            is_weighed_otherwise = hides_items or not is_weighed_alike(gradient, before, after)
            # What each micro-batch counts was found by the hypothesis that is held. Nothing is given back for nothing.
            if is_passed and self.uncertain is None and self.verifies and not is_weighed_otherwise:
                with aside():
                    self._compare_pair(window, gradient, number, most, is_due=reason in ("whole", "losses"), said=said)
        self._transaction.signs.have_changed = self._occasions.is_changed
        # Joined windows are measured next, from where this one began.
        if not self.withheld and self.uncertain is None:
            self._remembered = None
        if number >= self._transaction.signs.next_look:
            self._occasions.looked(number, is_measured=self.verifies)
            self._transaction.signs.next_look = self._occasions.next_look
            self._transaction.forward = self._transaction.plain_forward
        return Examination(said, is_weighed_otherwise, self._smallest, hides_items=hides_items)

    def _is_to_be_joined(self, gradient: Gradient) -> bool:
        """Return whether a window is not finite, which may be for a micro-batch that has nothing to divide by."""
        return not gradient.is_finite and self.joins and not self._has_tried_joining

    def _why_uncertain(self, gradient: Gradient) -> str | None:
        if self._hides_draws:
            return DRAWN
        if gradient.is_kept_from_none and self._transaction.hypothesis == "items":
            return KEPT
        is_sum = self._transaction.hypothesis == "sum"
        return self._by_graph(gradient, is_sum=is_sum, counts_samples=self._counts_samples)

    def _by_graph(self, gradient: Gradient, *, is_sum: bool, counts_samples: bool) -> str | None:
        shown = gradient.sizes, gradient.counts, gradient.reductions
        return why_uncertain(self._job, *shown, is_sum=is_sum, counts_samples=counts_samples)

    def _compare_pair(
        self, window: Window, gradient: Gradient, number: int, most: int, *, is_due: bool, said: list[Event]
    ) -> None:
        """Compare the losses of two of the largest micro-batches, joined and apart, when due or if they have grown."""
        here, held = gradient.of_first_samples(window.num_samples), self._transaction.hypothesis
        largest = max(here.sizes, default=0)
        if held is None or not (is_due or largest > self._largest_joined):
            return
        pair = pair_of(here, number, most)
        if pair is None:
            return
        self._largest_joined = max(self._largest_joined, largest)
        verdict = self._verdict(window, held, most, forward_only=True, pair=pair)
        if verdict.decision is not None and not verdict.decision.passed:
            error, counts_items = verdict.decision.error, self._job.num_items is not None
            self._failed_on = verdict.failing(verdict.decision)
            notice = exactness_notices.joined_notice(
                error, verdict.samples, self._suspicion(), counts_items=counts_items
            )
            self._fail(notice, error, said)

    def _suspicion(self) -> Notice | None:
        return suspicion(self._job, self._sizes, self._shown)

    def _measure(
        self, window: Window, gradient: Gradient, number: int, most: int, reason: str, said: list[Event]
    ) -> None:
        """Measure a window, and go by what comes of it."""
        self._occasions.measured(number)
        self._transaction.signs.next_look = self._occasions.next_look
        started = clock.now()
        held = self._transaction.hypothesis
        likely = held or likely_hypothesis(self._job, gradient)
        verdict = None
        if reason == "losses":
            verdict = self._verdict(window, likely, most, forward_only=True)
        # Where losses alone show that something is wrong, gradients tell what.
        if verdict is None or (verdict.decision is not None and not verdict.decision.passed):
            verdict = self._verdict(window, likely, most)
        if verdict.decision is None and verdict.failed is not None and held is not None:
            # What was true of other samples is not true of these.
            verdict = replace(verdict, decision=verdict.failed)
        if verdict.decision is None:
            self._tell_unmeasured(verdict, number, said)
            return
        if reason != "whole" and verdict.decision.passed and verdict.decision.hypothesis == likely:
            self._counts_samples = self._counts_samples and (reason == "losses" or verdict.decision.counts_samples)
            self._hides_draws = self._hides_draws or verdict.decision.hides_draws
            return
        self._decide(verdict.decision, verdict, number, clock.now() - started, said)

    def _say_doubts(self, gradient: Gradient, said: list[Event]) -> None:
        """Say what speaks against the weights of a window of which nothing was measured."""
        if self._occasions.status == "unmeasured":
            for doubt in doubts(self._job, gradient, self._shown):
                self._refuse_or_say(doubt, None, said)

    def _is_due_empty(self) -> bool:
        """Return whether a window in which nothing counts is measured: the first, the second, the fourth and so on."""
        # Of targets that are all ignored the whole has no gradient either, and so may all windows be for a while.
        self._num_empty += 1
        return self._occasions.status == "unmeasured" and not self._num_empty & (self._num_empty - 1)

    def _measure_empty(
        self,
        window: Window,
        number: int,
        most: int,
        said: list[Event],
        aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Measure a window in which nothing counts: of a loss that compares samples no part may have any by itself."""
        started = clock.now()
        with aside():
            verdict = self._verdict(window, "items", most)
        if verdict.decision is not None and not verdict.decision.passed:
            self._decide(verdict.decision, verdict, number, clock.now() - started, said)

    def _verdict(
        self,
        window: Window,
        likely: Hypothesis,
        most: int,
        *,
        forward_only: bool = False,
        pair: tuple[range, range] | None = None,
    ) -> Verdict:
        written = self._written.values()
        return self._measure_window(
            self._job,
            window,
            likely,
            most=most,
            written=written,
            rewind=self._rewind,
            like=self._remembered,
            forward_only=forward_only,
            pair=pair,
        )

    def _rewind(self) -> None:
        """Put back what the window began with: of one that was not to be measured, buffers and random states alone."""
        if self._remembered is not None:
            self._remembered.restore()
        else:
            self._transaction.snapshot.restore()

    def _decide(
        self,
        decision: Decision,
        verdict: Verdict,
        number: int,
        seconds: float,
        said: list[Event],
    ) -> None:
        """Go by what was measured, and say it."""
        if decision.passed:
            held, self._transaction.hypothesis = self._transaction.hypothesis, decision.hypothesis
            # Of some windows one hypothesis is true by chance: the next one has to show it once more.
            self._occasions.is_changed = held not in (None, decision.hypothesis)
            if verdict.left:
                notice = exactness_notices.state_notice(verdict.left)
                self._refuse_or_say(notice, None, said)
        said.append(
            Verified(
                step=number,
                hypothesis=decision.hypothesis,
                error=decision.error,
                tolerance=verdict.tolerance,
                tensor=decision.tensor,
                samples=verdict.samples,
                cuts=tuple(tuple(map(len, cut)) for cut in decision.cuts),
                seconds=seconds,
            )
        )
        self._smallest = decision.smallest
        if decision.passed:
            self._occasions.status, self.is_owed = "passed", False
            self._counts_samples, self._hides_draws = decision.counts_samples, decision.hides_draws
            return
        self._failed_on = verdict.failing(decision)
        notice = exactness_notices.failure_notice(
            decision,
            verdict.samples,
            self._job.modules,
            exactness_notices.suspected(verdict, self._suspicion()),
            counts_items=self._job.num_items is not None,
            is_stated=self._job.reduction is not None,
        )
        is_owed, self.is_owed = self.is_owed, False
        if is_owed and self.joins:  # else the failure itself is said
            self._say(exactness_notices.measured_late_notice(decision.error), decision.error, None)
        self._fail(notice, decision.error, said)

    def _fail(self, notice: Notice, error: float, said: list[Event]) -> None:
        """Say that windows that are cut have another gradient, and look no further."""
        self._occasions.status = "failed"
        self._refuse_or_say(notice, error, said)

    def _tell_unmeasured(self, verdict: Verdict, number: int, said: list[Event]) -> None:
        """Say that nothing could be measured, once it is not tried again."""
        occasions = self._occasions
        occasions.tries -= 1
        # Of a run that was verified, for a window that is other than those were, it is said too.
        self.is_owed = self.is_owed or (verdict.ran_out and occasions.status == "unmeasured")
        is_passing = verdict.is_passing or (verdict.ran_out and occasions.status == "unmeasured")
        if not is_passing or (occasions.status == "unmeasured" and not occasions.tries):
            self.is_owed = False
            self._refuse_or_say(exactness_notices.unmeasured_notice(verdict.unmeasured), None, said)

    def measure_late(
        self, window: Window, gradient: Gradient, aside: Callable[[], AbstractContextManager[None]]
    ) -> list[Event]:
        """Measure a window that is not cut, for those before it that were: return what is said of them.

        Raises:
            NotExactError: they had another gradient than whole ones, and the run is strict.
        """
        said: list[Event] = []
        with aside():
            verdict = self._verdict(window, likely_hypothesis(self._job, gradient), window.num_samples)
        # Of windows that are cut after it, each is measured by itself.
        self.is_owed = self.is_owed and verdict.ran_out
        if verdict.decision is not None and not verdict.decision.passed:
            self._say(exactness_notices.measured_late_notice(verdict.decision.error), verdict.decision.error, said)
        return said

    def _refuse_or_say(self, notice: Notice, error: float | None, said: list[Event] | None = None) -> None:
        """Say that windows that are cut are not exact, or may not be; in a strict run that is an error.

        Raises:
            NotExactError: the run is strict.
        """
        if self.joins:
            self.withheld.append((notice, error))
        else:
            self._say(notice, error, said)

    def _say(self, notice: Notice, error: float | None, said: list[Event] | None) -> None:
        if self._strict:
            raise NotExactError(notice.cause, notice.consequence, notice.cure, error)
        if said is None:
            self._announce(notice)
        else:
            said.append(notice)

    def say_withheld(self) -> list[Notice]:
        """Return what was withheld, to be said after all.

        Raises:
            NotExactError: the run is strict.
        """
        # What is not finite may be so for a sample of its own, which says nothing of the windows after it.
        self.joins, withheld = self.joins and self.is_trying, self.withheld
        self.withheld, self.uncertain, self.is_trying = [], None, False
        said: list[Any] = []
        for notice, error in withheld:
            self._refuse_or_say(notice, error, said)
        return said

    def remember(self, number: int) -> None:
        """Remember how the window of that number begins, to be measured from there; once, for it may be let go of."""
        if self._remembered_of != number:
            self._number = number
            self._remember()

    def measured_by(self) -> dict[str, Any]:
        """Return the options of a measurement: parameters written to, and how the window's first state is put back."""
        how = {"written": self._written.values(), "rewind": self._rewind, "like": self._remembered}
        return how | {"failed_on": self._failed_on}

    def state_dict(self) -> dict[str, Any]:
        """Return what was looked at and measured, for a checkpoint."""
        transaction = self._transaction
        return {
            "_checked": self.is_checked,
            "_examining": self._is_first,
            "verified": {
                "hypothesis": transaction.hypothesis,
                "signs": transaction.signs.state_dict(),
                "occasions": self._occasions.state_dict(),
                "counts_samples": self._counts_samples,
                "largest_joined": self._largest_joined,
                "smallest": self._smallest,
                "is_owed": self.is_owed,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; an older version had measured nothing."""
        self.is_checked, self._is_first = state["_checked"], state["_examining"]
        measured = state.get("verified")
        if measured is None:
            return
        transaction = self._transaction
        transaction.hypothesis = measured["hypothesis"]
        transaction.signs.load_state_dict(measured["signs"])
        self._occasions.load_state_dict(measured["occasions"])
        self._transaction.signs.next_look = self._occasions.next_look
        self._counts_samples, self._largest_joined = measured["counts_samples"], measured["largest_joined"]
        self._smallest, self.is_owed = measured["smallest"], measured["is_owed"]
