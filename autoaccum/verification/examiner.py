"""Examines windows that are cut, before they are stepped on: is their gradient that of the whole window?

The first one is measured (``measurement``), and what the loss is, is decided by that for the run. It is measured again
when a window shows what was not there before: another graph, another mode, counts that hypotheses weigh differently,
samples of another kind; and forwards alone are compared now and then. Between these a window costs a comparison or two.
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
from autoaccum.loss.coupling import Crossing, crossings
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import read, without_graph
from autoaccum.loss.stated import LossOf
from autoaccum.loss.terms import Reduction
from autoaccum.memory import clock
from autoaccum.memory.oom import insist
from autoaccum.verification import notices, readings
from autoaccum.verification.certain import why_uncertain, why_unweighted
from autoaccum.verification.findings import Decision, Verdict
from autoaccum.verification.kinds import Kinds
from autoaccum.verification.micro_batches import MicroBatches
from autoaccum.verification.occasions import Occasions
from autoaccum.verification.side_effects import SideEffects
from autoaccum.window import contributions
from autoaccum.window.gradient import Gradient, are_alike
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
        self._checked_in = 0  # which one that was
        self._num_empty = 0  # windows in which nothing counts
        self._is_first = True  # until a window that was cut has been examined
        self._occasions = Occasions()
        self._rivals: frozenset[str] = frozenset()
        self._kinds = Kinds()
        self._micro_batches = MicroBatches(job, self._kinds, lambda: transaction.drops_gradients)
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
        transaction.drops_nan = transaction.signs.watches_least = verify
        # What graphs show to count nothing has no loss; of what the user says it is to be measured.
        transaction.signs.is_counted = verify and job.num_items is not None
        transaction.signs.knows_nothing = not transaction.signs.is_counted
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
        self._job = self._micro_batches.job = self._job.computed_by(loss_of)

    def break_off(self) -> None:
        """Forget how a window began that an error has ended: the next one has its number, and begins otherwise."""
        self._remembered, self._remembered_of, self._failed_on, self.uncertain = None, 0, [], None

    def let_go(self) -> bool:
        """Forget how the window began where that takes of the memory that it is short of; return whether it did."""
        # Buffers and random states, which its rollback has anyway, are put back all the same to measure it.
        if self._remembered is None or self._job.device.type != "cpu":
            return False
        self._short_bytes = self._remembered.num_bytes()
        self._remembered, self._short_way = None, self._way
        return True

    def _begin(self) -> None:
        self._met: list[tuple[int, set[Crossing]]] = []  # by which operations samples meet, and how many there were
        self._shown: list[Reduction] = []  # how losses were reduced, whatever num_items says
        self._kinds.begin()

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
        if is_part and self._is_first and not self._met and notices.has_backward_hooks(self._parameters):
            self._refuse_or_say(notices.backward_hook_notice(), None)
        # Of a whole window too: gradients that a loss changes are wrong however the window is cut.
        before = SideEffects(self._parameters) if self._is_first else None
        versions = [p._version for p in self._parameters]
        if is_part and self.verifies:
            self._kinds.look_at(batch)
        run = partial(self._transaction.plain_forward, batch, num_samples, window_samples)
        loss = run() if before is None else before.refuse_in(run)
        for p, version in zip(self._parameters, versions, strict=True):
            if p._version != version:
                self._written[id(p)] = p
        if is_part:
            # The graph is walked here, for the backward that follows frees it.
            if self._occasions.status != "passed":
                self._met.append((num_samples, crossings(loss, num_samples)))
            if self._occasions.status != "passed" or "items" in self._rivals:
                self._shown.append(without_graph(read(loss, num_samples)))
        return loss

    def check_first(self, gradient: Gradient) -> None:
        """Look at the loss and the gradient of the very first window that counts anything, before it is stepped on.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
        """
        if self.is_checked or gradient.conclusion is None:
            return
        # It waits for the device, and so is asked of one window only.
        if not math.isfinite(value := gradient.loss.item()):
            raise NonFiniteLossError(value)
        self.is_checked, self._checked_in = True, self._number
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
        if number >= self._transaction.signs.next_look and self._is_spoilt(gradient):
            self._transaction.drops_gradients = True
            return Examination(again=True)
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
            before, drops = self._transaction.hypothesis, self._transaction.drops_nan
            reason = None
            if self.verifies:
                is_surprising = self._is_surprising(gradient, number)
                reason = self._occasions.reason(window.num_samples, number, is_surprising=is_surprising)
            joins = reason == "whole" or (
                reason is not None and self._occasions.is_for_joined(window.num_samples, number)
            )
            if reason is not None:
                with aside():
                    self._measure(window, gradient, number, most, reason, said)
            if not gradient.dropped:
                self._say_doubts(gradient, said)
            is_passed = self._occasions.status == "passed"
            # What was measured is true of code as it is written, of which windows that run compiled code see nothing.
            hides_items = is_passed and readings.is_hidden(gradient, self._transaction.hypothesis, self._rivals)
            if hides_items:
                said.append(notices.compiled_notice())
            elif is_passed and self._transaction.hypothesis == "items" and readings.is_guessed(gradient, self._rivals):
                guess = notices.doubt_of(gradient.sizes, gradient.reductions)
                said.extend([] if guess is None else [guess])
            if reason == "whole" or (is_passed and gradient.suspects):
                with aside():
                    self._check_parts(window, gradient, said, is_passed=is_passed)
            # Of a loss that is NaN by mistake, and not for want of items, nothing else is to be said.
            if gradient.dropped and (self._transaction.drops_nan or not drops):
                self._say_doubts(gradient, said)
            after = self._transaction.hypothesis
            if after != before:
                self._transaction.signs.forget_graphs()
            is_weighed_otherwise = not readings.is_weighed_alike(self._job, gradient, before, after)
            is_weighed_otherwise |= hides_items or bool(gradient.dropped and drops and not self._transaction.drops_nan)
            # What each micro-batch counts was found by the hypothesis that is held. Nothing is given back for nothing.
            is_passed = self._occasions.status == "passed" and self.verifies and not is_weighed_otherwise
            here = gradient.of_first_samples(window.num_samples)
            is_larger = max(here.sizes, default=0) > self._kinds.largest_joined
            if is_passed and here.sizes and (joins or is_larger):
                with aside():
                    found = self._micro_batches.joined(
                        window,
                        here,
                        after,
                        number=number,
                        most=most,
                        is_due=joins,
                        suspicion=lambda: readings.suspicion(self._job, self._met, self._shown),
                        rewind=self._rewind,
                        like=self._remembered,
                    )
                    if found is not None:
                        self._fail(*found, said)
            if self.joins and self._occasions.status == "passed":
                held, counts, reductions = self._transaction.hypothesis, gradient.counts, gradient.reductions
                self.uncertain = why_uncertain(self._job, held, gradient.sizes, counts, reductions)
        self._transaction.signs.have_changed, self._transaction.signs.has_suspects = self._occasions.is_changed, False
        # Joined windows are measured next, from where this one began.
        if not self.withheld and self.uncertain is None:
            self._remembered = None
        if number >= self._transaction.signs.next_look:
            self._occasions.looked(number)
            self._tell_signs()
            self._transaction.forward = self._transaction.plain_forward
        return Examination(said, is_weighed_otherwise, self._smallest, hides_items=hides_items)

    def _is_spoilt(self, gradient: Gradient) -> bool:
        """Return whether a window has a finite loss and a gradient that is not, as nan_to_num leaves it: 0 / 0 * 0."""
        transaction = self._transaction
        if not transaction.drops_nan or transaction.drops_gradients or transaction.scaler is not None:
            return False
        trained = transaction.trained()
        if not gradient.items or not trained or not math.isfinite(insist(gradient.loss.item, "the loss was read")):
            return False
        return not math.isfinite(insist(lambda: contributions.norm(trained).item(), "a gradient was looked at"))

    def _tell_signs(self) -> None:
        """Let windows ask nothing but their signs whether they are to be examined."""
        signs, occasions = self._transaction.signs, self._occasions
        signs.next_look, signs.short_below = occasions.next_look, occasions.short_below

    def _is_surprising(self, gradient: Gradient, number: int) -> bool:
        """Return whether a window shows what no window before it did."""
        if self._transaction.signs.have_changed:
            return True
        if number < self._transaction.signs.next_look:
            return False
        # What the graphs count is compared with what the user counts, where both would have done so far.
        if "items" in self._rivals and self._transaction.hypothesis == "num_items":
            shown, claimed = [float(reduction.items) for reduction in self._shown], readings.claims(gradient)
            if len(shown) == len(claimed) and not are_alike(claimed, shown):
                return True
        return bool(self._kinds.new())

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
        # Those of a sum beside terms of the parameters alone add up to more than the whole one's, unlike gradients.
        if reason == "losses" and held != "sum and penalties":
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
        if reason == "losses" and verdict.decision.passed and verdict.decision.hypothesis == likely:
            self._kinds.accept()
            return
        self._decide(verdict.decision, verdict, number, clock.now() - started, said)

    def _say_doubts(self, gradient: Gradient, said: list[Event]) -> None:
        """Say what speaks against the weights of a window of which nothing was measured."""
        if self._occasions.status == "unmeasured":
            for doubt in readings.doubts(self._job, gradient, self._met, self._shown):
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
            seconds, together = clock.now() - started, notices.coupling_notice()  # for together they have one
            self._decide(verdict.decision, verdict, number, seconds, said, together)

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
            drops_gradients=self._transaction.drops_gradients,
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
        suspicion: Notice | None = None,
    ) -> None:
        """Go by what was measured, and say it; ``suspicion`` is what speaks against the loss besides its graph."""
        if decision.passed:
            held, self._transaction.hypothesis = self._transaction.hypothesis, decision.hypothesis
            # Of some windows one hypothesis is true by chance: the next one has to show it once more.
            self._occasions.is_changed = held not in (None, decision.hypothesis)
            by_name = self._transaction.counts_by_name
            unused = notices.unused_notice(self._job.num_items, decision.hypothesis, counts_by_name=by_name)
            said.extend([] if unused is None else [unused])
            said.extend([notices.part_of_state_notice()] if verdict.leaves_part else [])
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
        signs = self._transaction.signs
        self._smallest = decision.smallest
        if decision.passed:
            self._occasions.status = "passed"
            self._kinds.accept()
            # Weights that differ by nothing but the number of samples are compared in each window, for nothing.
            self._rivals = decision.rivals
            signs.compares_samples = "samples" in decision.rivals
            return
        self._failed_on = verdict.failing(decision)
        suspicion = suspicion or readings.suspicion(self._job, self._met, self._shown)
        notice = notices.failure_notice(
            decision,
            verdict.samples,
            self._job.modules,
            notices.suspected(verdict, suspicion),
            statistics=self._job.batch_norm,
            counts_items=self._job.num_items is not None,
        )
        self._fail(notice, decision.error, said)

    def _check_parts(self, window: Window, gradient: Gradient, said: list[Event], *, is_passed: bool) -> None:
        """Measure micro-batches of which it is a guess what they count."""
        here = gradient.of_first_samples(window.num_samples)
        hypothesis = self._transaction.hypothesis
        lost = here.uncounted if hypothesis == "num_items" else ()
        error, leaves_out = None, bool(gradient.dropped or lost)
        if leaves_out:
            likely = hypothesis or readings.likely(self._job, gradient)
            error = self._micro_batches.dropped(window, replace(here, dropped=(*here.dropped, *lost)), likely)
        if error == math.inf:  # the loss of the whole is not a number either, and nothing else is told by it
            self._transaction.drops_nan = self._transaction.drops_gradients = False
            # The loss of a first window, which was finite without them, is looked at once more.
            self.is_checked = self.is_checked and self._checked_in != self._number
            return
        found = self._micro_batches.ones(window, here, hypothesis) if is_passed else None
        if found is not None:
            self._fail(*found, said)
        if error:
            notice = notices.uncounted_notice if lost else notices.dropped_notice
            self._fail(notice(error), error, said)
        elif error is not None:
            self._kinds.accept_nothing()
            self._transaction.signs.knows_nothing = True
        elif leaves_out and not (self._kinds.nothing_is_known or lost):
            self._refuse_or_say(notices.unmeasured_notice("a loss that is not a number may count nothing"), None, said)

    def _fail(self, notice: Notice, error: float, said: list[Event]) -> None:
        """Say that windows that are cut have another gradient, and look no further."""
        self._occasions.status = "failed"
        signs = self._transaction.signs
        signs.compares_samples = signs.watches_least = False
        self._refuse_or_say(notice, error, said)

    def _tell_unmeasured(self, verdict: Verdict, number: int, said: list[Event]) -> None:
        """Say that nothing could be measured, once it is not tried again."""
        occasions = self._occasions
        occasions.tries -= 1
        # Of a run that was verified, for a window that is other than those were, it is said too.
        is_passing = verdict.is_passing or (verdict.ran_out and occasions.status == "unmeasured")
        if not is_passing or (occasions.status == "unmeasured" and not occasions.tries):
            self._refuse_or_say(notices.unmeasured_notice(verdict.unmeasured), None, said)

    def _refuse_or_say(self, notice: Notice, error: float | None, said: list[Event] | None = None) -> None:
        """Say that windows that are cut are not exact, or may not be; in a strict run that is an error.

        Raises:
            NotExactError: the run is strict.
        """
        if self.joins:
            self.withheld.append((notice, error))
            return
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
        self.joins, withheld, self.withheld, self.uncertain = False, self.withheld, [], None
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
                # Of a run that measures nothing it says nothing.
                "drops": (transaction.drops_nan or not self.verifies, transaction.drops_gradients),
                "signs": transaction.signs.state_dict(),
                "occasions": self._occasions.state_dict(),
                "rivals": sorted(self._rivals),
                "kinds": self._kinds.state_dict(),
                "smallest": self._smallest,
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
        drops_nan, transaction.drops_gradients = measured["drops"]
        transaction.drops_nan = self.verifies and drops_nan
        transaction.signs.load_state_dict(measured["signs"])
        self._occasions.load_state_dict(measured["occasions"])
        transaction.signs.watches_least = self.verifies and self._occasions.status != "failed"
        self._tell_signs()
        self._rivals = frozenset(measured["rivals"])
        self._kinds.load_state_dict(measured["kinds"])
        transaction.signs.knows_nothing = transaction.signs.knows_nothing or self._kinds.nothing_is_known
        self._smallest = measured["smallest"]
