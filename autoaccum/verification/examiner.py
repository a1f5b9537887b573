"""Examines windows that are cut, before they are stepped on: is their gradient that of the whole window?

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
from typing import Any, NamedTuple

import torch

from autoaccum.data.base import Window
from autoaccum.errors import NonFiniteLossError, NotExactError
from autoaccum.events import Event, Notice, Verified
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import read, without_graph
from autoaccum.loss.stated import LossOf
from autoaccum.loss.terms import Reduction
from autoaccum.memory import clock
from autoaccum.verification import notices, readings
from autoaccum.verification.certain import DRAWN, KEPT, NOT_FINITE, why_uncertain, why_unweighted
from autoaccum.verification.findings import Decision, Verdict
from autoaccum.verification.micro_batches import measure_pair, pair_of
from autoaccum.verification.occasions import Occasions
from autoaccum.verification.side_effects import SideEffects
from autoaccum.window.gradient import Gradient
from autoaccum.window.job import Job
from autoaccum.window.state import State
from autoaccum.window.transaction import Transaction

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
    """Whether nothing was measured, for windows are to be joined; where they cannot be, it is to be looked at again."""
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
        self._short_bytes = 0  # that it would have taken
        self._smallest = 1
        self._begin()

    def begin_attempt(
        self, number: int, announce: Callable[[Notice], None], way: object = None, spare_bytes: int | None = None
    ) -> None:
        """Look at the forwards of an attempt; forget what one that was rolled back has shown.

        Args:
            number: of the window.
            announce: says what cannot wait for the window's end.
            way: what the memory depends on that it leaves, such as the largest micro-batch; compared by ``==``.
            spare_bytes: what windows leave of it; None where that is not known.
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
        may_fit = spare_bytes is None or self._short_bytes <= spare_bytes
        self._is_to_remember = self.verifies and is_due and may_fit and (way is None or way != self._short_way)
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
        self._short_bytes = self._remembered.num_bytes()
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
        if is_part and self._is_first and not self._sizes and notices.has_backward_hooks(self._parameters):
            self._refuse_or_say(notices.backward_hook_notice(), None)
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
                self._shown.append(without_graph(read(loss, num_samples)))
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
        if not notices.has_backward_hooks(self._parameters):
            found = {id(p) for module in self._job.modules for p in module.parameters() if p.grad is not None}
            if (notice := notices.untrained_notice(self._job.modules, found)) is not None:
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
                said.extend(notices.half_precision_notices(trained))
                self._is_first = False
            if self.joins and self._transaction.hypothesis is None:
                self.uncertain = why_unweighted(self._job, gradient.sizes, gradient.counts, gradient.reductions)
                if self.uncertain is not None:  # nothing is to be measured
                    return Examination(said, is_put_off=True)
            before, reason = self._transaction.hypothesis, None
            if self.verifies:
                is_surprising = self._transaction.signs.have_changed
                reason = self._occasions.reason(window.num_samples, number, is_surprising=is_surprising)
            joins = reason == "whole" or (
                reason is not None and self._occasions.is_for_joined(window.num_samples, number)
            )
            if reason is not None:
                with aside():
                    self._measure(window, gradient, number, most, reason, said)
            self._say_doubts(gradient, said)
            if gradient.is_uncounted and self._occasions.status != "failed":
                self._refuse_or_say(notices.uncounted_notice(), None, said)
            is_passed, after = self._occasions.status == "passed", self._transaction.hypothesis
            if self.joins and is_passed:
                self.uncertain = self._why_uncertain(gradient)
            elif self.joins and after is None and gradient.is_kept_from_none and not readings.is_told(self._job):
                self.uncertain = KEPT  # of samples whose gradient is 0 nothing could be measured
            # What was measured is true of code as it is written, of which windows that run compiled code see nothing.
            is_read = is_passed and after == "items" and not self._counts_samples
            hides_items = is_read and readings.is_hidden(gradient)
            said.extend([notices.compiled_notice()] if hides_items else [])
            if after != before:
                self._transaction.signs.forget_graphs()
            is_weighed_otherwise = hides_items or not readings.is_weighed_alike(gradient, before, after)
            # What each micro-batch counts was found by the hypothesis that is held. Nothing is given back for nothing.
            if is_passed and self.uncertain is None and self.verifies and not is_weighed_otherwise:
                with aside():
                    self._compare_pair(window, gradient, number, most, is_due=joins, said=said)
        self._transaction.signs.have_changed = self._occasions.is_changed
        # Joined windows are measured next, from where this one began.
        if not self.withheld and self.uncertain is None:
            self._remembered = None
        if number >= self._transaction.signs.next_look:
            self._occasions.looked(number)
            self._tell_signs()
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
        return why_uncertain(
            self._job,
            gradient.sizes,
            gradient.counts,
            gradient.reductions,
            is_sum=self._transaction.hypothesis == "sum",
            counts_samples=self._counts_samples,
        )

    def _compare_pair(
        self, window: Window, gradient: Gradient, number: int, most: int, *, is_due: bool, said: list[Event]
    ) -> None:
        """Compare two of the largest micro-batches, joined and apart, when that is due or they have grown."""
        here, held = gradient.of_first_samples(window.num_samples), self._transaction.hypothesis
        largest = max(here.sizes, default=0)
        if held is None or not (is_due or largest > self._largest_joined):
            return
        pair = pair_of(here, number, most)
        if pair is None:
            return
        self._largest_joined = max(self._largest_joined, largest)
        parts, counts = [part for part, _ in pair], [count for _, count in pair]
        error = measure_pair(self._job, window, held, parts, counts, rewind=self._rewind, like=self._remembered)
        if error:
            suspicion, counts_items = self._suspicion(), self._job.num_items is not None
            samples = sum(map(len, parts))
            self._failed_on = [((*parts[0], *parts[1]), (len(parts[0]), len(parts[1])))]
            self._fail(notices.joined_notice(error, samples, suspicion, counts_items=counts_items), error, said)

    def _suspicion(self) -> Notice | None:
        return readings.suspicion(self._job, self._sizes, self._shown)

    def _tell_signs(self) -> None:
        """Let windows ask nothing but their signs whether they are to be examined."""
        signs, occasions = self._transaction.signs, self._occasions
        signs.next_look, signs.short_below = occasions.next_look, occasions.short_below

    def _measure(
        self, window: Window, gradient: Gradient, number: int, most: int, reason: str, said: list[Event]
    ) -> None:
        """Measure a window, and go by what comes of it."""
        self._occasions.measured(window.num_samples, number)
        self._tell_signs()
        started = clock.now()
        held = self._transaction.hypothesis
        likely = held or readings.likely(self._job, gradient)
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
            for doubt in readings.doubts(self._job, gradient, self._shown):
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
                notice = notices.state_notice(verdict.left)
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
        notice = notices.failure_notice(
            decision,
            verdict.samples,
            self._job.modules,
            notices.suspected(verdict, self._suspicion()),
            counts_items=self._job.num_items is not None,
            is_stated=self._job.reduction is not None,
        )
        is_owed, self.is_owed = self.is_owed, False
        if is_owed and self.joins:  # else the failure itself is said
            self._say(notices.measured_late_notice(decision.error), decision.error, None)
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
            self._refuse_or_say(notices.unmeasured_notice(verdict.unmeasured), None, said)

    def measure_late(
        self, window: Window, gradient: Gradient, aside: Callable[[], AbstractContextManager[None]]
    ) -> list[Event]:
        """Measure a window that is not cut, for those before it that were: return what is said of them.

        Raises:
            NotExactError: they had another gradient than whole ones, and the run is strict.
        """
        said: list[Event] = []
        with aside():
            verdict = self._verdict(window, readings.likely(self._job, gradient), window.num_samples)
        # Of windows that are cut after it, each is measured by itself.
        self.is_owed = self.is_owed and verdict.ran_out
        if verdict.decision is not None and not verdict.decision.passed:
            self._say(notices.measured_late_notice(verdict.decision.error), verdict.decision.error, said)
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
        self._tell_signs()
        self._counts_samples, self._largest_joined = measured["counts_samples"], measured["largest_joined"]
        self._smallest, self.is_owed = measured["smallest"], measured["is_owed"]
