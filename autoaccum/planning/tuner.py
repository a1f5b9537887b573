"""Decides how each window is cut: while a search goes on, while plans are timed, and as memory comes and goes.

Every size that it hands out is useful work. It sees numbers alone (readings of memory and of a clock), so that it can
be tested by the million. Sizes are chosen by weight: the samples of a micro-batch, or where these differ in length what
they weigh: see ``history``. The search looks for the largest weight that fits; ``fastest`` says which weight up to that
one to use; ``patience`` when to give way to memory that moves, and when to try for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from autoaccum._units import format_bytes
from autoaccum.errors import NothingFitsError
from autoaccum.planning.attempts import Attempt, Piece, length_at, pieces_of
from autoaccum.planning.costs import MemoryModel, TimeModel, Trial, fit_memory_model, fit_time_model, weigher
from autoaccum.planning.cuts import Lengths
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.fastest import Fastest
from autoaccum.planning.history import History, in_weights
from autoaccum.planning.limits import Limits
from autoaccum.planning.patience import Pressure
from autoaccum.planning.search import has_plateaued
from autoaccum.planning.searching import ENDLESS, Searching

WORTHWHILE = 1.2
"""Plans give way to a limit that fell, or to strain, by this factor at least, and grow again for as much."""
SURELY_MORE = 1.05
"""What did not fit is tried again under a limit larger by this factor."""
NO_FASTER = "larger micro-batches are no faster"
MORE_PADDING = "with larger micro-batches more would be padding"


class Tuner:
    """Decides the sizes; ``history`` holds what was learnt."""

    def __init__(
        self,
        *,
        ceiling: int,
        limit_bytes: int,
        headroom: float,
        search: bool,
        largest: int = 0,
        smallest: int = 1,
        few_sizes: bool = False,
        fewest: int = 1,
    ) -> None:
        """Set up.

        Args:
            ceiling: the most samples in a micro-batch of any use.
            limit_bytes: what this process may use.
            headroom: the fraction of it that plans leave free.
            search: whether to find out how large a micro-batch may be.
            largest: what may be used untried: a user's own micro-batch.
            smallest: no micro-batch has fewer samples, unless its window does.
            few_sizes: whether to try few sizes, and large ones: for each new one costs a compilation, or small ones
                are worth little.
            fewest: micro-batches that each window is cut into at least, where it has enough samples.
        """
        self._learns = search
        self._cutter = Cutter(smallest=smallest, fewest=fewest, ceiling=ceiling, by_samples=not search)
        self.limits = Limits(limit_bytes, headroom)
        self._fastest = Fastest(self._cutter, lambda: self.largest, few_sizes=few_sizes)
        self._search = Searching(self._cutter, self.limits, self._fastest.up_to, few_sizes=few_sizes)
        self._pressure = Pressure()
        self.searching = search
        """Whether sizes are being tried, in this run or once more since memory came back."""
        self.largest = largest or smallest
        """The largest weight to use now."""
        self.past: tuple[Trial, ...] = ()
        """The trials of an earlier run."""
        self.told: Trial | None = None
        """What ran out of memory in an earlier run, and would again."""
        self.refused_at = 0
        """The lowest limit under which anything ran out of memory."""
        self._best = 0  # the largest weight that ever ran well
        self._refused: tuple[int, int] | None = None  # (weight, the limit that it was too much for)
        self._enough: int | None = None  # the weight beyond which nothing is faster
        self._grown_from = 0  # the largest weight when it was last tried to grow again
        self._passed_limit = False  # whether the last window that was measured passed the target
        self._last_cut: tuple[object, tuple[Piece, ...]] = (None, ())  # (what decided it, the pieces of a window)

    # What is known.

    @property
    def history(self) -> list[Trial]:
        """Return what was tried, oldest first."""
        return self._history.trials

    @property
    def _history(self) -> History:
        return self._cutter.history

    @property
    def memory_model(self) -> MemoryModel | None:
        """Return the memory model fitted to the trials so far, in samples and lengths."""
        return fit_memory_model(self.history)

    @property
    def full_window(self) -> tuple[int, Lengths]:
        """Return (samples of the last full window, their lengths)."""
        return self._cutter.full_window

    @property
    def smallest(self) -> int:
        """Return the samples that every micro-batch has at least."""
        return self._cutter.smallest

    @property
    def is_timing(self) -> bool:
        """Return whether windows are to be timed."""
        return self._fastest.timing is not None or self._fastest.checks > 0

    @property
    def micro_batch(self) -> int:
        """Return the most samples in a micro-batch of the longest of the last full window's samples."""
        return max(1, self.largest // self._cutter.each(self.full_window[1]))

    def predicted_bytes(self, weight: int) -> int | None:
        """Return the peak that the memory model expects at that weight; None while there is no model."""
        model = self._history.model
        return None if model is None else model.predict(weight)

    def weights(self, sizes: Sequence[int], lengths: Lengths = None) -> list[int]:
        """Return the weights of the micro-batches of a window."""
        return self._cutter.weights(sizes, lengths)

    def set_smallest(self, smallest: int) -> None:
        """Heed that the model has got other layers, or another mode: see ``coupling.smallest_micro_batch``."""
        self._cutter.smallest = smallest
        self.largest = max(self.largest, smallest)

    def recall(self, past: Sequence[Trial], held_bytes: int, refused: Trial | None = None) -> None:
        """Begin from what an earlier run has ``learnt``.

        Args:
            past: its trials. Whether they fitted was a matter of that run's limit.
            held_bytes: what is in use now before the first sample, which that run may have had less of.
            refused: what ran out of memory, where there is no more of it now.
        """
        self.past = tuple(past)
        weighed = in_weights(self.past, weigher(self.past))
        if (model := fit_memory_model(weighed)) is not None:
            self._history.prior = replace(model, fixed_bytes=max(model.fixed_bytes, held_bytes))
            self._search.known = max(t.micro_batch for t in weighed if t.peak_bytes is not None)
            self._fastest.recall(fit_time_model(weighed))
        if refused is not None:
            self._record(refused)
        self.told = refused

    def refused(self) -> Trial | None:
        """Return the smallest trial that ran out of memory; not that of the smallest size, which is tried always."""
        return self._history.refused(above=self.smallest)

    def learnt(self) -> tuple[Trial, ...]:
        """Return what a later run may begin from: the trials, with the seconds that windows of them took."""
        model = self._fastest.model
        if self._search.has_lengths:  # no window is like another: they are timed again
            return tuple(replace(trial, seconds=None) for trial in self.history)
        if model is None:
            return tuple(self.history)
        trials = {}
        for size, _ in model.points:
            trials[size] = Trial(micro_batch=size, fits=True, peak_bytes=self.predicted_bytes(size))
        for trial in self.history:
            trials[trial.micro_batch] = trial
        return tuple(replace(trial, seconds=model.predict(size)) for size, trial in trials.items())

    # How windows are cut.

    def window(self, num_samples: int, lengths: Lengths = None, plan: Sequence[int] | None = None) -> Attempt:
        """Begin a window: in the sizes of a recorded ``plan``, or in those that are chosen here."""
        is_timed = self.is_timing
        if plan is None:
            if (lengths is not None) is not self._search.has_lengths and self._learns:
                self._start_over(has_lengths=lengths is not None)
            if num_samples > self.full_window[0]:
                self._cutter.full_window = (num_samples, lengths)
        return Attempt(self, num_samples, lengths, plan, is_timed=is_timed)

    def plan(self, num_samples: int, lengths: Lengths = None) -> tuple[int, ...]:
        """Return how to cut a window without trials; one that there was not, before the first, into nothing."""
        return self._cutter.sizes(num_samples, lengths, self._weight()) if num_samples else ()

    def _weight(self) -> int:
        """Return the weight that plans are made of."""
        fastest = self._fastest.weight
        return self.largest if fastest is None else min(fastest, self.largest)

    def pieces(self, num_samples: int, lengths: Lengths) -> Iterator[Piece]:
        """Return the pieces of a window one by one; trials are chosen as the outcomes of those before come in."""
        if not self.searching and lengths is None:  # nearly every window of a run, and most are cut as the last one
            decided_by = (num_samples, self._weight(), self.smallest)
            if decided_by != self._last_cut[0]:
                sizes = self._cutter.sizes(num_samples, None, self._weight())
                self._last_cut = (decided_by, pieces_of(sizes))
            return iter(self._last_cut[1])
        return self._chosen(num_samples, lengths)

    def _chosen(self, num_samples: int, lengths: Lengths) -> Iterator[Piece]:
        """Choose trials while there is room for one, then cut what is left.

        A trial is measured with the window's gradients in memory, as most micro-batches run: so it is never a window's
        first micro-batch, unless it is its only one.
        """
        position, left = 0, lengths
        while self.searching and (remaining := num_samples - position):
            trial = self._search.trial_for(num_samples, left)
            if trial is None or not self._search.has_room(trial, remaining):
                break
            is_first = position == 0 and trial < num_samples
            size = trial
            if is_first:
                size = self._search.first_size(num_samples, lengths, trial, self.plan(num_samples, lengths)[0])
            yield Piece(position, size, length_at(lengths, position), not is_first)
            position += size
            left = None if lengths is None else lengths[position:]
        if position == num_samples:
            return
        for size in self._cutter.sizes(num_samples - position, left, self._weight(), fewest=1 if position else None):
            # Much longer samples than any before are a trial too, although nothing is searched.
            is_new = position > 0 and lengths is not None and self._history.is_new(lengths[position])
            yield Piece(position, size, length_at(lengths, position), self._learns and is_new)
            position += size

    def trial_for(self, num_samples: int, lengths: Lengths = None) -> int | None:
        """Return the next size worth a trial for such windows, if any: see ``Searching``."""
        return self._search.trial_for(num_samples, lengths)

    def _may_try(self, num_samples: int, lengths: Lengths) -> bool:
        return self._search.may_try(num_samples, lengths, self.plan(num_samples, lengths)[0])

    # What became of it.

    def observe(self, micro_batch: int, peak_bytes: int, seconds: float | None = None, length: int = 1) -> None:
        """Take the reading of a trial. The smallest may use the headroom; nothing may pass the limit.

        Raises:
            NothingFitsError: the smallest passed the limit.
        """
        is_smallest = micro_batch <= self.smallest
        fits = self.limits.allows(peak_bytes, is_smallest=is_smallest)
        if is_smallest:
            if not fits:
                raise self._nothing_fits(micro_batch, peak_bytes)
            self.limits.learn_least(peak_bytes)
        length = length if self._learns else 1
        predicted = self.predicted_bytes(micro_batch * self._history.weight(length))
        self._record(
            Trial(
                micro_batch=micro_batch,
                fits=fits,
                peak_bytes=peak_bytes,
                predicted_bytes=predicted,
                seconds=seconds,
                length=length,
            )
        )

    def out_of_memory(
        self,
        micro_batch: int,
        num_samples: int,
        lengths: Lengths = None,
        *,
        length: int = 1,
        peak_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> tuple[int, ...]:
        """Take it that a micro-batch ran out of memory; return smaller ones for its window, as for those that follow.

        ``peak_bytes`` is what was reached; ``limit_bytes`` the limit now, which may be lower than when it was planned.

        Raises:
            NothingFitsError: there is none.
        """
        self.limits.heed(limit_bytes or self.limits.limit_bytes)
        self._record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))
        model = self._history.model
        if model is not None and model.predict(self.largest) > self.limits.limit_bytes:
            self._shrink(int(model.largest_within(self.limits.target_bytes)))
        plan = self.plan(num_samples, lengths)
        starts = accumulate(plan[:-1], initial=0)
        # A plan that holds as much again, in samples and in length, would end in the same error for ever.
        holds_as_much = any(
            size >= micro_batch and (lengths is None or lengths[start] >= length)
            for size, start in zip(plan, starts, strict=True)
        )
        if micro_batch <= self.smallest or holds_as_much:
            raise self._nothing_fits(micro_batch, peak_bytes)
        return plan

    def killed(self, micro_batch: int, length: int) -> None:
        """Take it that such a micro-batch, larger than the smallest, was too much for the last process."""
        self._record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))

    def needs_room(self, held_bytes: int, piece: Piece, window_bytes: int) -> bool:
        """Return whether a piece would pass the target beside ``held_bytes``, which only the allocator holds.

        ``window_bytes`` is the peak of the last window, which stands for what no model foretells yet.
        """
        model = self.memory_model
        predicted = window_bytes if model is None else model.predict(piece.size, piece.length)
        return held_bytes + predicted > self.limits.target_bytes

    def measured(self, sizes: Sequence[int], lengths: Lengths, peak_bytes: int) -> tuple[int, ...] | None:
        """Take the peak of a window, where nobody but us keeps the limit; return a smaller plan if one is called for.

        One is when two windows in a row pass the target although their trials did not: a single one may be the doing of
        the C library's heap, which keeps what was freed.
        """
        passed, self._passed_limit = self._passed_limit, peak_bytes > self.limits.target_bytes
        if not (passed and self._passed_limit):
            return None
        weights = self.weights(sizes, lengths)
        index = weights.index(max(weights))
        # A weight beyond the largest is there because no micro-batch may have fewer samples than the smallest.
        if sizes[index] <= self.smallest or weights[index] > self.largest:
            return None
        self.observe(sizes[index], peak_bytes, length=length_at(lengths, sum(sizes[:index])))
        self._refused = (self._history.in_weights[-1].micro_batch, self.limits.limit_bytes)
        self._passed_limit = False
        return self.plan(sum(sizes), lengths)

    def committed(self, sizes: Sequence[int], lengths: Lengths = None) -> None:
        """Take a window that went well; it is news only if no trial has said so of its largest micro-batch."""
        fits, fails = self._history.bounds
        if lengths is None and max(sizes) <= min(fits, self._best):  # for nearly every window of a run
            return
        weights = self.weights(sizes, lengths)
        if lengths is not None:  # what could not be made smaller says nothing of what to choose
            weights = [weight if size > self.smallest else 0 for size, weight in zip(sizes, weights, strict=True)]
        weight = max(weights)
        self._best = max(self._best, weight)
        if weight > fits and (fails is None or weight < fails):
            index = weights.index(weight)
            length = length_at(lengths, sum(sizes[:index])) if self._learns else 1
            largest = max(self.largest, weight)
            self._record(Trial(micro_batch=sizes[index], fits=True, length=length))
            self.largest = largest

    def timed(self, seconds: float, num_samples: int, lengths: Lengths = None) -> None:
        """Take the time of a window; it is of use if the window was one of those that plans are made for."""
        if not self.searching and num_samples == self.full_window[0]:
            weights = self.weights(self.plan(num_samples, lengths), lengths)
            if self._fastest.is_belied(seconds, weights):  # another machine, or another load on it
                self._search.known = 0
                self._forget()
        self._fastest.observe(seconds, num_samples, lengths)

    def settle(self, num_samples: int, lengths: Lengths = None) -> bool:
        """Look back on a full window; return whether it has just become clear how to cut those that follow."""
        self._cutter.full_window = (num_samples, lengths)
        if self.searching:
            if self._may_try(num_samples, lengths):
                return False
            self.searching = False
            if self._search.goal is not None and self.largest <= self._grown_from:
                self._pressure.shrank()  # there was nothing to be had
            self._search.goal = None
            self._choose()
        elif self._fastest.timing is None:
            return False
        if self._fastest.timing is not None:
            if not self._fastest.compare():
                return False
            is_rising = self._fastest.is_still_rising() and not self._search.doubts_plateau
            if is_rising and has_plateaued(self._history.in_weights):  # trials said so, and windows say otherwise
                self._search.doubts_plateau = True
                self.searching = self.trial_for(num_samples, lengths) is not None
        if not self.searching and self.reason() == NO_FASTER:
            self._enough = self._weight()
        return not self.searching

    def resize(self, num_samples: int, lengths: Lengths = None) -> None:
        """Make ready for full windows of so many samples: it may take other sizes to be the fastest."""
        self._cutter.full_window = (num_samples, lengths)
        if not self._learns or self.searching:
            return
        self.searching = self._may_try(num_samples, lengths)
        if self.searching or not self._fastest.keeps_comparing(num_samples):
            self._choose()

    def reason(self) -> str:
        """Return why plans have no larger micro-batches, for people to read."""
        if not self._learns:
            return "micro_batch was passed"
        num_samples, lengths = self.full_window
        fewest = self._cutter.fewest
        if len(self.plan(num_samples, lengths)) <= fewest:
            return "the whole window fits" if fewest == 1 else f"{fewest} micro-batches are wanted"
        of_full = self._cutter.weights_of_full
        if len(of_full(self._weight())) > len(of_full(self.largest)) or self._search.is_enough(self.largest):
            return NO_FASTER
        predicted = self.predicted_bytes(2 * self.largest)
        may_fit = self._history.bounds[1] is None and (predicted is None or predicted <= self.limits.target_bytes)
        return MORE_PADDING if lengths is not None and may_fit else "larger micro-batches do not fit"

    # As memory comes and goes.

    def look(self, limit_bytes: int, strain: str | None) -> str | None:
        """Look at the memory before a window; return why it is cut smaller than the last one, if it is.

        Growing again begins here too.

        Args:
            limit_bytes: what this process may use now.
            strain: what shows that memory is short, although the limit does not.
        """
        before = self.limits.limit_bytes
        self.limits.heed(limit_bytes)
        # Sizes that are new to an allocator make it try again as a matter of course.
        is_settled = not self.searching and self._fastest.timing is None
        is_strained = self._pressure.look(limit_bytes, strain is not None and is_settled)
        if not self._learns:
            return None
        weight = max(self._cutter.weights_of_full(self._weight()))
        if weight > self.smallest * self._cutter.each(self.full_window[1]):
            model = self._history.model
            if model is not None and (needed := model.predict(weight)) > limit_bytes:
                within = int(model.largest_within(self.limits.target_bytes))
                self._shrink(min(weight - 1, int(weight / WORTHWHILE), within))
                if limit_bytes < before:
                    return f"the limit fell to {format_bytes(limit_bytes)}"
                return f"it would need {format_bytes(needed)} of {format_bytes(limit_bytes)}"
            if is_strained:
                self._shrink(int(weight / WORTHWHILE))
                return strain
        if not self.searching and self._fastest.timing is None:
            self._grow()
        return None

    def _shrink(self, weight: int) -> None:
        """Use no larger weight from now on; what was tried is judged by the limit as it is now."""
        self.largest = max(weight, self.smallest)

        def judged(trial: Trial, weight: int) -> Trial | None:
            # That a larger one has fitted is forgotten, unless its peak tells whether it still does.
            is_of_use = weight <= self.largest or not trial.fits or trial.peak_bytes
            return self._judged(trial) if is_of_use else None

        self._history.judge(judged)
        self._pressure.shrank()
        self._choose()

    def _grow(self) -> None:
        """Search again, once memory has been back for long enough, from what is in use now."""
        limit_bytes = self._pressure.lowest_limit()
        model = self._history.model
        if limit_bytes is None or model is None:
            return
        weight = self._weight()
        goal = min(model.largest_within(self.limits.target_of(limit_bytes)), self._enough or ENDLESS)
        if self._refused is not None and limit_bytes < SURELY_MORE * self._refused[1]:
            goal = min(goal, (weight + self._refused[0]) // 2)  # half-way to what failed under a limit like this one
        goal = int(min(goal, ENDLESS))
        of_full = self._cutter.weights_of_full
        if goal <= weight or WORTHWHILE * len(of_full(goal)) > len(of_full(weight)):
            return
        self._history.judge(lambda trial, weight: self._judged(trial) if weight <= self.largest else None)
        self._search.goal, self._grown_from, self.searching = goal, self.largest, True
        self._fastest.use_largest()
        self._pressure.grew()

    # Small change.

    def _choose(self) -> None:
        self._fastest.choose(is_settled=self._learns and not self.searching)

    def _judged(self, trial: Trial) -> Trial:
        """Return a trial as it stands by the limit of now."""
        if trial.peak_bytes is None:
            return trial
        is_smallest = trial.micro_batch <= self.smallest
        return replace(trial, fits=self.limits.allows(trial.peak_bytes, is_smallest=is_smallest))

    def _start_over(self, *, has_lengths: bool) -> None:
        """Drop what is known: a stream has begun, or ceased, to tell how long its samples are, and so units change."""
        if self.history and self._search.has_lengths is not None:
            self._cutter.history = History()
            self._cutter.full_window, self._search.known = (0, None), 0
            self.largest = self.smallest
            self._forget()
        self._search.has_lengths = has_lengths

    def _forget(self) -> None:
        """Search again: what was known of weights is in other units now."""
        self._fastest.forget()
        self._search.goal = self._refused = self._enough = None
        self._best = 0
        self.searching = True

    def _record(self, trial: Trial) -> None:
        """Keep a trial, and all that follows from it."""
        before = self.largest
        if not self.searching and self._history.is_new(trial.length):
            self._forget()
        # After the search plans are made of weights as they are.
        weight = self._history.add(trial, reweigh=self.searching and self._search.goal is None)
        self.largest = self._history.bounds[0] or max(self.smallest, min(before, weight) // 2)
        if trial.fits:
            self._best = max(self._best, weight)
            return
        if trial.peak_bytes is None:
            self.refused_at = min(self.limits.limit_bytes, self.refused_at or self.limits.limit_bytes)
        if weight > self._best:
            self._refused = (weight, self.limits.limit_bytes)
        if self._search.goal is not None:  # one miss is enough
            self._search.goal, self.searching = None, False
            self._pressure.shrank()
        elif self.largest < before:
            self._pressure.shrank()
        self._choose()

    def _nothing_fits(self, micro_batch: int, peak_bytes: int | None) -> NothingFitsError:
        return NothingFitsError(
            phase="training", micro_batch=micro_batch, peak_bytes=peak_bytes, limit_bytes=self.limits.limit_bytes
        )

    # What outlives the process. The keys are those of the first version of the format.

    def state_dict(self) -> dict[str, Any]:
        """Return how windows are cut, and what that was learnt from, as plain values."""
        model = self._fastest.model
        return {
            "loads": self._history.state_dict(),
            "past": [asdict(trial) for trial in self.past],
            "times": None if model is None else model.points,
            "is_timing": self._fastest.timing is not None,
            "searching": self.searching,
            "smallest": self.smallest,
            "largest": self.largest,
            "least_bytes": self.limits.least_bytes,
            "window": self.full_window,
            "_known": self._search.known,
            "_is_ragged": self._search.has_lengths,
            "_cap": self._fastest.weight,
            "_doubts_plateau": self._search.doubts_plateau,
            "_best": self._best,
            "_refused": self._refused,
            "_enough": self._enough,
            "_goal": self._search.goal,
            "_grown_from": self._grown_from,
        }

    def load_state_dict(self, state: dict[str, Any], *, is_same_device: bool) -> None:
        """Put back what ``state_dict`` returned, under the limit as it is now.

        On another device, or with sizes of the user's own, memory and time are to be found out again.
        """
        self._cutter.full_window = state["window"]
        if not is_same_device or not self._learns:
            return
        self._history.load_state_dict(state["loads"])
        self.past = tuple(Trial(**trial) for trial in state["past"])
        self._fastest.model = None if state["times"] is None else TimeModel(points=state["times"])
        self.searching, self.largest = state["searching"], state["largest"]
        self._cutter.smallest = state["smallest"]
        self._search.known, self._search.has_lengths = state["_known"], state["_is_ragged"]
        self._search.doubts_plateau, self._search.goal = state["_doubts_plateau"], state["_goal"]
        self._best, self._refused, self._enough = state["_best"], state["_refused"], state["_enough"]
        self._grown_from = state["_grown_from"]
        self._fastest.weight = state["_cap"]
        self.limits.least_bytes = state["least_bytes"]
        self.limits.heed(self.limits.limit_bytes)
        if state["is_timing"]:  # a comparison that goes on begins anew
            self._choose()
