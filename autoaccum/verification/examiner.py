"""Examines windows that are cut, before they are stepped on: is their gradient that of the whole window?

The first one is measured (``measurement``), and what the loss is, is decided by that for the run. It is measured again
when a window shows what was not there before: another graph, another mode, counts that hypotheses weigh differently,
samples of another kind; and forwards alone are compared now and then. Between these a window costs a comparison or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoaccum.data.base import Window
from autoaccum.errors import NonFiniteLossError, NotExactError
from autoaccum.events import Event, Notice, Verified
from autoaccum.loss.coupling import Crossing, couples_samples, crossings
from autoaccum.loss.hypotheses import Hypothesis, is_sum
from autoaccum.loss.reductions import Reduction, read, without_graph
from autoaccum.memory import clock
from autoaccum.verification import notices
from autoaccum.verification.decision import Decision, is_one
from autoaccum.verification.kinds import Kinds
from autoaccum.verification.side_effects import SideEffects
from autoaccum.verification.verdict import Verdict, measure
from autoaccum.window.gradient import Gradient, are_alike
from autoaccum.window.job import Job
from autoaccum.window.state import State
from autoaccum.window.transaction import Transaction

_CLOSELY = 100
"""Windows of which each is looked at for samples of a kind that was not there; of later ones every tenth or so is."""
_MOST_SURPRISES = 4
"""Measurements because of what a window shows, after which they are made at every doubling of the number of surprises
only: a graph that depends on its data changes all the time."""


class Examination(NamedTuple):
    """What came of looking at a window."""

    events: Sequence[Event] = ()
    """To be told."""
    again: bool = False
    """Whether the window has to be run again, for it was weighed by a hypothesis that has failed."""
    smallest: int = 1
    """The fewest samples of a micro-batch whose loss can be computed."""


class Examiner:
    """Looks at the windows of one run, and decides what its loss is."""

    def __init__(self, job: Job, transaction: Transaction, *, verify: bool = True, strict: bool = False) -> None:
        """Put itself beside a transaction, whose hypothesis it sets.

        Args:
            job: what is computed.
            transaction: runs the windows.
            verify: whether anything is measured.
            strict: whether a gradient that is not the whole window's ends the run.
        """
        self._job = job
        self._transaction = transaction
        self._verify = verify
        self._strict = strict
        self._parameters = [p for module in job.modules for p in module.parameters()]
        self._is_checked = False  # whether a first window had a finite loss
        self._is_first = True  # until a window that was cut has been examined
        # What the run goes by: "unmeasured" (what can be read is said), "passed", or "failed" (and said).
        self._status = "unmeasured"
        self._rivals: frozenset[str] = frozenset()
        self._kinds = Kinds()
        self._written: dict[int, torch.Tensor] = {}  # parameters that forwards write to, by id
        self._remembered: State | None = None  # how things were when the window of that number began
        self._remembered_of = 0
        self._smallest = 1
        self._off_by_ones = 0.0  # the error of windows that hold a count of 1 which stands for none
        self._surprises = 0
        self._largest = 0  # samples of the largest window that was measured
        self._is_short_measured = False
        self._next_round = 2  # the number of the window at which forwards are compared next
        self._tries = _MOST_SURPRISES  # how often it is still tried to measure what could not be measured
        transaction.drops_nan = verify
        self.next_look = 1
        """The number of the next window whose forwards are to be looked at."""
        self._begin()

    def begin_attempt(self, number: int, announce: Callable[[Notice], None]) -> None:
        """Look at the forwards of an attempt; forget what one that was rolled back has shown.

        Args:
            number: of the window.
            announce: says what cannot wait for the window's end.
        """
        # Of a window that is to be measured: what it moves is put back for that. Its second attempt begins no more as
        # the first one did, for not everything that a forward may move is rolled back.
        is_due = number >= self._next_round or (self._status == "unmeasured" and self._tries)
        if self._verify and is_due and number != self._remembered_of:
            self._remembered = State(self._job, self._transaction.trained(), ())
            self._remembered_of = number
        # The transaction knows nothing of being examined: this is put around its forward from outside.
        self._transaction.forward = self.forward
        self._announce = announce
        self._begin()

    def _begin(self) -> None:
        self._met: list[tuple[int, set[Crossing]]] = []  # by which operations samples meet, and how many there were
        self._shown: list[Reduction] = []  # how losses were reduced, whatever num_items says
        self._claimed: list[float] = []  # what the user counts in each micro-batch, or what was counted instead
        self._kinds.begin()

    def forward(self, batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
        """Return the loss of a micro-batch, having looked at it.

        Raises:
            LossSideEffectError: gradients have changed while it was computed.
        """
        is_part = num_samples < window_samples
        if not is_part and self._is_checked:  # a whole window has nothing to hide, and needs no second look
            return self._transaction.plain_forward(batch, num_samples, window_samples)
        if is_part and self._is_first and not self._met and notices.has_backward_hooks(self._parameters):
            self._refuse_or_say(notices.backward_hook_notice(), None)
        # Of a whole window too: gradients that a loss changes are wrong however the window is cut.
        before = SideEffects(self._parameters) if self._is_first else None
        versions = [p._version for p in self._parameters]
        if is_part:
            self._kinds.look_at(batch)
        loss = self._transaction.plain_forward(batch, num_samples, window_samples)
        if before is not None:
            before.refuse()
        for p, version in zip(self._parameters, versions, strict=True):
            if p._version != version:
                self._written[id(p)] = p
        if is_part:
            # The graph is walked here, for the backward that follows frees it.
            if self._status != "passed":
                self._met.append((num_samples, crossings(loss, num_samples)))
            if self._status != "passed" or "items" in self._rivals:
                self._shown.append(without_graph(read(loss, num_samples)))
        return loss

    def check_first(self, gradient: Gradient) -> None:
        """Look at the loss of the very first window that counts anything, before it is stepped on.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
        """
        if self._is_checked or gradient.conclusion is None:
            return
        # It waits for the device, and so is asked of one window only.
        if not math.isfinite(value := gradient.loss.item()):
            raise NonFiniteLossError(value)
        self._is_checked = True

    def wants(self, window: Window, number: int) -> bool:
        """Return whether a window that was cut is to be examined, before it is stepped on."""
        signs = self._transaction.signs
        return number >= self.next_look or signs.have_changed or window.num_samples < self._largest

    def examine(self, window: Window, gradient: Gradient, number: int, most: int) -> Examination:
        """Examine a window that was cut.

        Args:
            window: its samples, as they can still be read.
            gradient: that of the window, in ``.grad``, which stays.
            number: of the window.
            most: samples that memory has room for in one micro-batch.

        Raises:
            NotExactError: it is not that of the whole window, and the run is strict.
        """
        said: list[Event] = []
        is_weighed_otherwise = False
        if gradient.conclusion is not None:
            if self._is_first:
                trained = [p for p in self._parameters if p.requires_grad]
                said.extend(notices.half_precision_notices(trained))
                self._is_first = False
            before = self._transaction.hypothesis
            self._claimed = self._claims(gradient)
            reason = self._reason(window, number)
            if reason is not None:
                self._measure(window, gradient, number, most, reason, said)
            if self._status == "unmeasured":
                said.extend(self._doubts(gradient))
            if self._status == "passed" and self._is_half_unknown(gradient):
                doubt = notices.doubt_of(gradient.sizes, gradient.reductions)
                said.extend([] if doubt is None else [doubt])
            if self._status == "passed" and self._off_by_ones and self._has_one(gradient):
                self._fail(notices.ones_notice(self._off_by_ones), self._off_by_ones, said)
            after = self._transaction.hypothesis
            is_weighed_otherwise = before != after and not self._is_same(gradient, before, after)
            if gradient.dropped and not self._transaction.drops_nan:
                is_weighed_otherwise = True
        self._transaction.signs.have_changed = False
        self._remembered = None
        if number >= self.next_look:
            self.next_look = _next_look(number)
            self._transaction.forward = self._transaction.plain_forward
        return Examination(said, is_weighed_otherwise, self._smallest)

    def _reason(self, window: Window, number: int) -> str | None:
        """Return how a window is measured: "whole", or by its "losses" alone; None where it need not be."""
        if not self._verify or self._status == "failed":
            return None
        if self._status == "unmeasured":
            return "whole" if self._tries else None
        if self._transaction.signs.have_changed or self._rivals_differ():
            self._surprises += 1
            if self._surprises <= _MOST_SURPRISES or self._surprises & (self._surprises - 1) == 0:
                return "whole"
        if number >= self.next_look and self._kinds.new():
            return "whole"
        is_short = window.num_samples < self._largest and not self._is_short_measured
        return "losses" if number >= self._next_round or is_short else None

    def _rivals_differ(self) -> bool:
        """Return whether what the graphs count is not what the user counts, where both did when it was measured."""
        if "items" not in self._rivals or self._transaction.hypothesis != "num_items":
            return False
        shown = [float(reduction.items) for reduction in self._shown]
        return len(shown) == len(self._claimed) and not are_alike(self._claimed, shown)

    def _measure(
        self, window: Window, gradient: Gradient, number: int, most: int, reason: str, said: list[Event]
    ) -> None:
        """Measure a window, and go by what comes of it."""
        self._is_short_measured = self._is_short_measured or window.num_samples < self._largest
        self._largest = max(self._largest, window.num_samples)
        if number >= self._next_round:
            self._next_round = _next_round(number)
        started = clock.now()
        held = self._transaction.hypothesis
        likely = held or self._likely(gradient)
        verdict = Verdict()
        if reason == "losses":
            verdict = self._verdict(window, likely, most, forward_only=True)
        # Where losses alone show that something is wrong, gradients tell what.
        if reason == "whole" or (verdict.decision is not None and not verdict.decision.passed):
            verdict = self._verdict(window, likely, most, include=gradient.dropped)
        # What was left out, for its loss is not a number, counts nothing only if it was measured to.
        is_passed = verdict.decision is not None and verdict.decision.passed
        if gradient.dropped and not (is_passed and verdict.counts_nothing):
            self._transaction.drops_nan = False
        if verdict.decision is None:
            self._tell_unmeasured(verdict, number, said)
            return
        if reason == "losses" and verdict.decision.passed:
            self._kinds.accept()
            return
        self._decide(verdict.decision, verdict, number, clock.now() - started, said)

    def _verdict(
        self,
        window: Window,
        likely: Hypothesis,
        most: int,
        *,
        include: Sequence[int] = (),
        forward_only: bool = False,
    ) -> Verdict:
        written = self._written.values()
        return measure(
            self._job,
            window,
            likely,
            most=most,
            written=written,
            rewind=self._rewind,
            include=include,
            forward_only=forward_only,
        )

    def _rewind(self) -> None:
        """Put back what the window began with: of one that was not to be measured, buffers and random states alone."""
        if self._remembered is not None:
            self._remembered.restore()
        else:
            self._transaction.snapshot.restore()

    def _likely(self, gradient: Gradient) -> Hypothesis:
        """Return what a window looks like that nothing was measured of."""
        if self._job.num_items is not None:
            return "num_items"
        if gradient.conclusion is None or not gradient.conclusion.is_sum:
            return "items"
        return "sum and penalties" if any(reduction.constants for reduction in gradient.reductions) else "sum"

    def _decide(self, decision: Decision, verdict: Verdict, number: int, seconds: float, said: list[Event]) -> None:
        """Go by what was measured, and say it."""
        held = self._transaction.hypothesis
        self._transaction.hypothesis = decision.hypothesis
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
        if self._status == "passed" and decision is verdict.ones:
            # What was verified before is in doubt only where a count is 1: it stands for this window if none is.
            self._off_by_ones, signs.compares_ones = decision.error, True
            self._transaction.hypothesis = held
            return
        if decision.passed:
            self._status = "passed"
            self._off_by_ones = verdict.ones.error if verdict.ones is not None else 0.0
            signs.compares_ones = verdict.ones is not None
            self._kinds.accept()
            # Weights that differ by nothing but the number of samples are compared in each window, for nothing.
            self._rivals = decision.rivals
            signs.compares_samples = "samples" in decision.rivals
            return
        suspicion = self._suspicion() or (notices.state_notice() if verdict.rebinds else None)
        notice = notices.failure_notice(decision, verdict.causes, verdict.samples, self._job.modules, suspicion)
        self._fail(notice, decision.error, said)

    def _is_half_unknown(self, gradient: Gradient) -> bool:
        """Return whether the graphs of some micro-batches tell what they count, and those of others do not."""
        if self._transaction.hypothesis != "items":
            return False
        known = {
            any(term.kind != "unknown" or term.numbers for term in r.terms) for r in gradient.reductions if r.terms
        }
        return len(known) > 1

    @staticmethod
    def _has_one(gradient: Gradient) -> bool:
        """Return whether a micro-batch was divided by 1 and counted: what counts nothing was left out."""
        pairs = zip(gradient.reductions, gradient.counts, strict=True)
        return any(is_one(reduction) and abs(count) == 1 for reduction, count in pairs)

    def _fail(self, notice: Notice, error: float, said: list[Event]) -> None:
        """Say that windows that are cut have another gradient, and look no further."""
        self._status = "failed"
        self._transaction.signs.compares_samples = self._transaction.signs.compares_ones = False
        self._refuse_or_say(notice, error, said)

    def _suspicion(self) -> Notice | None:
        """Return what the graph of the window's losses says against it."""
        if couples_samples(self._met):
            return notices.coupling_notice()
        return notices.doubt_of(self._sizes_of_met(), self._shown)

    def _sizes_of_met(self) -> list[int]:
        return [size for size, _ in self._met]

    def _tell_unmeasured(self, verdict: Verdict, number: int, said: list[Event]) -> None:
        """Say that nothing could be measured, once it is not tried again."""
        self._tries -= 1
        if self._status == "unmeasured" and not (verdict.is_zero and self._tries):
            self._refuse_or_say(notices.unmeasured_notice(verdict.unmeasured), None, said)

    def _refuse_or_say(self, notice: Notice, error: float | None, said: list[Event] | None = None) -> None:
        """Say that windows that are cut are not exact, or may not be; in a strict run that is an error.

        Raises:
            NotExactError: the run is strict.
        """
        if self._strict:
            raise NotExactError(notice.cause, notice.consequence, notice.cure, error)
        if said is None:
            self._announce(notice)
        else:
            said.append(notice)

    def _is_same(self, gradient: Gradient, before: Hypothesis | None, after: Hypothesis | None) -> bool:
        """Return whether a window would be weighed as it was by the hypothesis that is held by now."""
        found = gradient.conclusion
        if before is not None or found is None or after == "num_items":
            return before is None
        counts = [float(reduction.items) for reduction in gradient.reductions]
        if after is not None and is_sum(after):
            with_terms = any(reduction.constants for reduction in gradient.reductions)
            return found.is_sum and self._job.num_items is None and (after == "sum and penalties" or not with_terms)
        if after == "items":
            return not found.is_sum and self._job.num_items is None
        return not found.is_sum and are_alike(gradient.sizes, counts)

    def _doubts(self, gradient: Gradient) -> list[Notice]:
        """Return why the gradient may not be that of the window, as far as that can be read."""
        found = gradient.conclusion
        if found is None:
            return []
        said = notices.batch_norm_notices(self._job.modules)
        if couples_samples(self._met):  # no count makes it exact
            return [*said, notices.coupling_notice()]
        if self._job.num_items is not None:
            # What the user says is compared with what the losses show, of every micro-batch or not at all.
            if len(self._shown) == len(gradient.sizes):
                notice = notices.contradiction_notice(self._claims(gradient), gradient.sizes, self._shown)
                said.extend([] if notice is None else [notice])
            return said
        if found.doubt is not None:
            said.append(notices.doubt_notice(*found.doubt))
        return said

    @staticmethod
    def _claims(gradient: Gradient) -> list[float]:
        return [float(reduction.items) for reduction in gradient.reductions]

    def state_dict(self) -> dict[str, Any]:
        """Return what was looked at and measured, for a checkpoint."""
        return {
            "_checked": self._is_checked,
            "_examining": self._is_first,
            "verified": {
                "hypothesis": self._transaction.hypothesis,
                "status": self._status,
                "rivals": sorted(self._rivals),
                "kinds": self._kinds.state_dict(),
                "surprises": self._surprises,
                "largest": self._largest,
                "is_short_measured": self._is_short_measured,
                "next_round": self._next_round,
                "next_look": self.next_look,
                "tries": self._tries,
                "smallest": self._smallest,
                "off_by_ones": self._off_by_ones,
                "signs": self._transaction.signs.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; an older version had measured nothing."""
        self._is_checked, self._is_first = state["_checked"], state["_examining"]
        measured = state.get("verified")
        if measured is None:
            return
        self._transaction.hypothesis = measured["hypothesis"]
        self._status = measured["status"]
        self._rivals = frozenset(measured["rivals"])
        self._kinds.load_state_dict(measured["kinds"])
        self._surprises = measured["surprises"]
        self._largest = measured["largest"]
        self._is_short_measured = measured["is_short_measured"]
        self._next_round = measured["next_round"]
        self.next_look = measured["next_look"]
        self._tries = measured["tries"]
        self._smallest = measured["smallest"]
        self._off_by_ones = measured["off_by_ones"]
        self._transaction.signs.load_state_dict(measured["signs"])


def _next_look(number: int) -> int:
    """Return which window is looked at after one: the next, and after the hundredth one in ten, in a hundred, ..."""
    every = 1 if number < _CLOSELY else 10 ** (len(str(number)) - 2)
    return (number // every + 1) * every


def _next_round(number: int) -> int:
    """Return at which window losses are compared next: 2, 3, then 10, 100, 1,000, ..."""
    return number + 1 if number < 3 else int(10 ** len(str(number)))
