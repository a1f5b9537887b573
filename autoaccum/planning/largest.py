"""The largest weight that plans may use: what trials say of it, how it gives way as memory goes, and grows again.

What fits is found out by trials, and is true only while memory stays as it is. When the limit falls below what a plan
needs, or the allocator is strained, the weight gives way at once; after a calm a search looks for more again. When to
do either is the matter of ``limits``, to what is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoaccum._units import format_bytes
from autoaccum.errors import NothingFitsError
from autoaccum.planning.attempts import length_at
from autoaccum.planning.costs import MemoryModel, Trial
from autoaccum.planning.cuts import Lengths, is_padded
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.fastest import KNOWN, Fastest
from autoaccum.planning.limits import SURELY_MORE, Limits, Pressure
from autoaccum.planning.searching import ENDLESS, Searching

WORTHWHILE = 1.2
"""Give way to a limit that fell, or to strain, by this factor at least, and grow again only for as much."""


class Largest:
    """The largest weight to use, and what is remembered of those beyond it."""

    def __init__(
        self, cutter: Cutter, limits: Limits, search: Searching, fastest: Fastest, *, weight: int, learns: bool
    ) -> None:
        """Set up.

        Args:
            cutter: cuts the windows, and holds the history of trials.
            limits: what micro-batches may take.
            search: is begun again when what is known holds no longer, or when there may be room for more.
            fastest: chooses among the plans that fit; it is asked again whenever it has changed which do.
            weight: the one to begin with.
            learns: whether sizes are found out here; else they are a user's own, and give way to errors alone.
        """
        self.weight = weight
        """The largest weight to use now."""
        self.best = 0
        """The largest weight that ever ran well, under whatever limit."""
        self.enough: int | None = None
        """The weight beyond which nothing is faster, so that growth stops there; None where that is not known."""
        self.refused_at = 0
        """The lowest limit under which anything ran out of memory; 0 while nothing did."""
        self._cutter = cutter
        self._limits = limits
        self._search = search
        self._fastest = fastest
        self._learns = learns
        self._pressure = Pressure()
        # The last weight above ``best`` that failed, and the limit that it was too much for: growth goes only half-way
        # there until the limit is clearly larger, or it would end in the same error each time.
        self._refused: tuple[int, int] | None = None
        # The weight when growth began: a search that ends no higher was in vain, and the next waits for longer.
        self._grown_from = 0
        # Whether the last window that was measured passed the target: only two in a row are believed.
        self._passed_limit = False

    @property
    def reach(self) -> int:
        """Return the largest weight of plans of padded windows, a little more than was measured; 0 where it is risky.

        Each has a length of its own, and one that is longer than all before by a token is not to be cut for that. What
        is reached so is no trial, and raises nothing: it would reach further each time.
        """
        model, fails = self._cutter.history.model, self._cutter.history.bounds[1]
        if model is None or fails is not None or self._search.is_on or not is_padded(self._cutter.full_window[1]):
            return 0
        trials = self._cutter.history.in_weights
        measured = max((trial.micro_batch for trial in trials if trial.peak_bytes is not None), default=0)
        # Not where memory is what bounds plans, or is short, so that they have given way.
        is_free = KNOWN * measured <= self._within(model, self._limits.limit_bytes) and self.weight >= measured
        return int(KNOWN * measured) if is_free else 0

    # What trials say of it.

    def observe(
        self,
        micro_batch: int,
        peak_bytes: int,
        seconds: float | None,
        length: int,
        allocated_bytes: int | None = None,
    ) -> None:
        """Take the reading of a trial: see ``Tuner.observe``."""
        fits = self._limits.allows(peak_bytes, is_smallest=micro_batch <= self._cutter.smallest)
        # Nothing is smaller than the smallest, which moves the target where it uses the headroom.
        if micro_batch <= self._cutter.smallest:
            if not fits:
                raise self.nothing_fits(micro_batch, peak_bytes)
            self._limits.learn_least(peak_bytes)
        # Asked before the trial is among those that the model is fitted to: a prediction is no fit.
        model = self._cutter.history.model
        predicted = None if model is None else model.predict(micro_batch * self._cutter.history.weight(length))
        self.record(
            Trial(
                micro_batch=micro_batch,
                fits=fits,
                peak_bytes=peak_bytes,
                predicted_bytes=predicted,
                seconds=seconds,
                length=length,
                allocated_bytes=allocated_bytes,
            )
        )

    def record(self, trial: Trial) -> None:
        """Keep a trial, and draw all conclusions from it."""
        before, search, history = self.weight, self._search, self._cutter.history
        if not search.is_on and history.is_new(trial.length):
            self.forget()
        # In the first search each trial tells more of what a sample of its length weighs. After it plans are made of
        # weights as they are: other units would turn each weight that is remembered into another one.
        weight = history.add(trial, reweigh=search.is_on and search.goal is None)
        # While nothing has fitted, halves are as good a guess as any: plans have to be made of something.
        self.weight = history.bounds[0] or max(self._cutter.smallest, min(before, weight) // 2)
        if trial.fits:
            self.best = max(self.best, weight)
            return
        limit_bytes = self._limits.limit_bytes
        if trial.peak_bytes is None:  # it ran out of memory; else it ran, and took more than plans may
            self.refused_at = min(limit_bytes, self.refused_at or limit_bytes)
        # A weight that has run well before failed for want of memory that was there then, and may come back.
        if weight > self.best:
            self._refused = (weight, limit_bytes)
        if search.goal is not None:  # what fitted before is known: one miss is enough to end the growth
            search.goal, search.is_on = None, False
            self._pressure.shrank()
        elif self.weight < before:
            self._pressure.shrank()
        # Times of plans that do not fit any more are of no use, and the fastest may have been one of them.
        self.choose()

    def choose(self) -> None:
        """Choose the fastest plan anew, or begin to compare plans, unless a search goes on first."""
        self._fastest.choose(is_settled=self._learns and not self._search.is_on)

    def end_search(self) -> None:
        """Settle on this weight, nothing larger being worth a trial."""
        search = self._search
        search.is_on = False
        if search.goal is not None and self.weight <= self._grown_from:
            self._pressure.shrank()  # there was nothing to be had: the next try waits for longer
        search.goal = None
        self.choose()

    def forget(self) -> None:
        """Search again: what was known of weights is in other units now, or was of another machine."""
        self._fastest.forget()
        self._search.goal = self._refused = self.enough = None
        self.best = 0
        self._search.is_on = True

    # As memory comes and goes.

    def look(self, limit_bytes: int, strain: str | None, *, is_enforced: bool = False) -> str | None:
        """Look at the memory before a window: see ``Tuner.look``."""
        before = self._limits.limit_bytes
        self._limits.heed(limit_bytes)
        # Sizes that are new to an allocator make it try again as a matter of course: strain tells nothing before all
        # is settled. Nor is it the time to grow.
        is_settled = not self._search.is_on and self._fastest.timing is None
        is_strained = self._pressure.look(limit_bytes, strain is not None and is_settled)
        if not self._learns:
            return None
        # The heaviest of the plan, which may be much lighter than what plans are made of: a small window fits by far.
        weight = max(self._cutter.weights_of_full(self._fastest.planned()))
        if weight > self._cutter.smallest * self._cutter.each(self._cutter.full_window[1]):  # else none is smaller
            model = self._cutter.history.model
            # Only what needs all of the headroom too gives way: that is what the headroom is for.
            if model is not None and (needed := model.predict(weight)) > limit_bytes:
                within = self._within(model, limit_bytes)
                self.shrink(min(weight - 1, int(weight / WORTHWHILE), within))
                if limit_bytes < before:
                    return f"the limit fell to {format_bytes(limit_bytes)}"
                return f"it would need {format_bytes(needed)} of {format_bytes(limit_bytes)}"
            # Two plans of half of the target fit beside each other: then it is not for their size that the allocator
            # empties its cache, and smaller ones would gain nothing. Where nothing is refused, giving way is safe.
            is_size = not is_enforced or model is None or model.predict(weight) > self._limits.target_bytes / 2
            if is_strained and is_size:
                self.shrink(int(weight / WORTHWHILE))
                return strain
        if is_settled:
            self._grow()
        return None

    def shrink(self, weight: int) -> None:
        """Use no larger weight from now on; what was tried is judged by the limit as it is now."""
        self.weight = max(weight, self._cutter.smallest)

        def judged(trial: Trial, weight: int) -> Trial | None:
            # That a larger one has fitted is forgotten, unless its peak tells whether it still does.
            is_of_use = weight <= self.weight or not trial.fits or trial.peak_bytes
            return self._judged(trial) if is_of_use else None

        self._cutter.history.judge(judged)
        self._pressure.shrank()
        self.choose()

    def _grow(self) -> None:
        """Search again, once memory has been back for long enough, from what is in use now."""
        # What was there at each of the last looks is there to stay; a single high reading is not.
        limit_bytes = self._pressure.lowest_limit()
        model = self._cutter.history.model
        if limit_bytes is None or model is None:
            return
        weight = self._fastest.planned()
        goal = min(self._within(model, limit_bytes), self.enough or ENDLESS)
        if self._refused is not None and limit_bytes < SURELY_MORE * self._refused[1]:
            goal = min(goal, (weight + self._refused[0]) // 2)  # half-way to what failed under a limit like this one
        # A weight that cuts windows into as many micro-batches gains nothing, and one that saves few gains less than
        # a replay would cost.
        of_full = self._cutter.weights_of_full
        if goal <= weight or WORTHWHILE * len(of_full(goal)) > len(of_full(weight)):
            return
        # What failed beyond the weight in use failed under a limit that has passed: the search is to try it again.
        self._cutter.history.judge(lambda trial, weight: self._judged(trial) if weight <= self.weight else None)
        self._search.goal, self._grown_from, self._search.is_on = goal, self.weight, True
        self._fastest.use_largest()
        self._pressure.grew()

    def _within(self, model: MemoryModel, limit_bytes: int) -> int:
        """Return the largest weight that is expected to fit under a limit."""
        # It is infinite where samples cost nothing.
        return int(min(model.largest_within(self._limits.target_of(limit_bytes)), ENDLESS))

    def passes(self, sizes: Sequence[int], lengths: Lengths, peak_bytes: int) -> bool:
        """Take the peak of a window; give way and return True if such windows pass the target, their trials having not.

        It takes two in a row: a single one may be the doing of the C library's heap, which keeps what was freed.
        """
        before, self._passed_limit = self._passed_limit, peak_bytes > self._limits.target_bytes
        if not (before and self._passed_limit):
            return False
        weights = self._cutter.weights(sizes, lengths)
        index = weights.index(max(weights))
        # A weight beyond the largest is there because no micro-batch may have fewer samples than the smallest.
        if sizes[index] <= self._cutter.smallest or weights[index] > self.weight:
            return False
        length = length_at(self._cutter.lengths_that_count(lengths), sum(sizes[:index]))
        self.observe(sizes[index], peak_bytes, None, length)
        # Growth is to keep away from it. ``record`` takes a weight for refused only where it never ran well.
        self._refused = (self._cutter.history.in_weights[-1].micro_batch, self._limits.limit_bytes)
        self._passed_limit = False  # of smaller windows it takes two again
        return True

    def ran_within(self, sizes: Sequence[int], lengths: Lengths, peak_bytes: int) -> None:
        """Take the peak of a window that an allocator kept to the limit: it corrects a model that expects much more.

        It says nothing where it is higher: what an allocator was not short of it keeps.
        """
        history, weights = self._cutter.history, self._cutter.weights(sizes, lengths)
        model, weight = history.model, max(weights)
        if model is None or model.predict(weight) <= WORTHWHILE * peak_bytes:
            return
        index = weights.index(weight)
        length = length_at(self._cutter.lengths_that_count(lengths), sum(sizes[:index]))
        ran = Trial(micro_batch=sizes[index], fits=True, peak_bytes=peak_bytes, length=length)
        history.add(self._judged(ran), reweigh=False)

    def nothing_fits(self, micro_batch: int, peak_bytes: int | None) -> NothingFitsError:
        """Return the error for a micro-batch that does not fit while none is smaller."""
        return NothingFitsError(
            phase="training",
            micro_batch=micro_batch,
            peak_bytes=peak_bytes,
            limit_bytes=self._limits.limit_bytes,
            min_micro_batch=self._cutter.min_micro_batch,
        )

    def _judged(self, trial: Trial) -> Trial:
        """Return a trial as it stands by the limit of now."""
        # There is none to judge by where memory ran out, nor where a window just went well.
        if trial.peak_bytes is None:
            return trial
        is_smallest = trial.micro_batch <= self._cutter.smallest
        return replace(trial, fits=self._limits.allows(trial.peak_bytes, is_smallest=is_smallest))

    # What outlives the process. The patience does not: how memory moved under another process says little of this one.

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "largest": self.weight,
            "_best": self.best,
            "_refused": self._refused,
            "_enough": self.enough,
            "_grown_from": self._grown_from,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.weight, self.best, self.enough = state["largest"], state["_best"], state["_enough"]
        self._refused, self._grown_from = state["_refused"], state["_grown_from"]
