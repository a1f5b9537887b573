"""Decides how each window is cut: while a search goes on, while plans are timed, and as memory comes and goes.

Every size that it hands out is useful work. It sees numbers alone (readings of memory and of a clock), so that it can
be tested by the million. Sizes are chosen by weight: the samples of a micro-batch, or where these differ in length what
they weigh: see ``history``.

``searching`` decides which weight is worth a trial, ``largest`` which one fits, ``fastest`` which one of those is used;
``cutter`` makes micro-batches of it. ``warm_start`` has what an earlier run found. Training speaks to the tuner by the
protocol in ``attempts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from autoaccum.planning.attempts import Piece, Reading, length_at, pieces_from, pieces_of
from autoaccum.planning.costs import MemoryModel, Trial, fit_memory_model
from autoaccum.planning.cuts import Lengths, is_padded
from autoaccum.planning.cutter import Cutter
from autoaccum.planning.fastest import KNOWN, Fastest
from autoaccum.planning.history import History
from autoaccum.planning.largest import Largest
from autoaccum.planning.limits import Limits
from autoaccum.planning.searching import NO_FASTER, Searching
from autoaccum.planning.warm_start import learnt, recalled

SAVED = (
    "loads past times is_timing searching smallest largest least_bytes window _known _is_ragged _cap _doubts_plateau "
    "_best _refused _enough _goal _grown_from"
)
"""The names of a tuner's state in checkpoints, in their order: those of the first version of the format."""


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
        floor: int = 1,
        few_sizes: bool = False,
        warms_up: bool = False,
    ) -> None:
        """Set up.

        Args:
            ceiling: the most samples in a micro-batch of any use.
            limit_bytes: what this process may use.
            headroom: the fraction of it that plans leave free.
            search: whether to find out how large a micro-batch may be.
            largest: what may be used untried: a user's own micro-batch.
            smallest: no micro-batch has fewer samples, unless its window does.
            floor: nor fewer than these, which are the user's own: ``set_smallest`` does not go below them.
            few_sizes: whether to try few sizes, and large ones: for each new one costs a compilation, or small ones
                are worth little.
            warms_up: whether a size is run once before it is tried: see ``Searching``.
        """
        # Whether sizes are found out at all. If not they are the user's, which hold however fast others may be, and
        # give way only where memory runs out, or where nobody else keeps the limit.
        self._learns = search
        self._cutter = Cutter(smallest=smallest, ceiling=ceiling, by_samples=not search, floor=floor)
        self.limits = Limits(limit_bytes, headroom)
        """What micro-batches may take."""
        # These three ask each other: which plan is the fastest depends on which fit, and the search is over where
        # larger ones are known to be no faster. The first is told the weight of the third, which is yet to be made.
        self._fastest = Fastest(
            self._cutter, lambda: self._largest.weight, lambda: self._largest.reach, few_sizes=few_sizes
        )
        self.search = Searching(
            self._cutter, self.limits, self._fastest.up_to, is_on=search, few_sizes=few_sizes, warms_up=warms_up
        )
        """What is tried next; ``search.is_on`` says whether anything is."""
        self._largest = Largest(
            self._cutter, self.limits, self.search, self._fastest, weight=largest or self.smallest, learns=search
        )
        self.past: tuple[Trial, ...] = ()
        """The trials of an earlier run."""
        self.told: Trial | None = None
        """What ran out of memory in an earlier run, and would again."""
        self._given = largest  # a user's own micro-batch
        self.saves_memory = False
        """Whether micro-batches take less than they would by themselves, so that no other run is to know of them."""
        self.keeps_last = False
        """Whether a window's last micro-batch is as large as fits: joined ones compute all but the last one twice."""
        self._last_cut: tuple[object, tuple[Piece, ...]] = (None, ())  # (what decided it, the pieces of a window)

    # What is known.

    @property
    def history(self) -> list[Trial]:
        """Return what was tried, oldest first."""
        return self._cutter.history.trials

    @property
    def searching(self) -> bool:
        """Return whether sizes are being tried, in this run or once more since memory came back."""
        return self.search.is_on

    @searching.setter
    def searching(self, is_on: bool) -> None:
        self.search.is_on = is_on

    @property
    def largest(self) -> int:
        """Return the largest weight to use now."""
        return self._largest.weight

    @property
    def refused_at(self) -> int:
        """Return the lowest limit under which anything ran out of memory; 0 while nothing did."""
        return self._largest.refused_at

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
    def ceiling(self) -> int:
        """Return the most samples in a micro-batch of any use."""
        return self._cutter.ceiling

    def cut(self, num_samples: int, max_micro_batch: int, smallest: int | None = None) -> tuple[int, ...]:
        """Return how a window of samples that are alike is cut into micro-batches of at most so many samples."""
        return self._cutter.cut(num_samples, max_micro_batch, smallest)

    @property
    def min_micro_batch(self) -> int | None:
        """Return the user's own smallest size, where that is why there is none smaller."""
        return self._cutter.min_micro_batch

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
        model = self._cutter.history.model
        return None if model is None else model.predict(weight)

    def weights(self, sizes: Sequence[int], lengths: Lengths = None) -> list[int]:
        """Return the weights of the micro-batches of a window."""
        return self._cutter.weights(sizes, lengths)

    def set_smallest(self, smallest: int, largest: int | None = None) -> None:
        """Heed that the model has got other layers, or another mode: see ``coupling.smallest_micro_batch``.

        Args:
            smallest: the fewest samples that can be computed.
            largest: the largest weight, where that is to be what it was before; None: the present one, or more.
        """
        self._cutter.set_smallest(smallest)
        self._largest.weight = max(self._largest.weight if largest is None else largest, self.smallest)

    def split_least(self, num_samples: int, lengths: Lengths = None) -> bool:
        """Use the largest micro-batches that fit, however fast others are, because split windows are not exact.

        Return whether such a window surely fits at once.
        """
        if not self._learns:
            return False
        if not self.search.wants_full:
            self.search.wants_full = self._fastest.wants_full = True
            self._fastest.forget()
            self.search.is_on = self.search.is_on or (num_samples > 0 and self._may_try(num_samples, lengths))
        fits = self._cutter.history.bounds[0]
        return num_samples * self._cutter.each(lengths) <= fits or self.search.surely_fits_whole(num_samples, lengths)

    def recall(
        self, past: Sequence[Trial], held_bytes: int, refused: Trial | None = None, limit_bytes: int | None = None
    ) -> None:
        """Begin from what an earlier run has ``learnt``.

        Args:
            past: its trials. Whether they fitted was a matter of that run's limit.
            held_bytes: what is in use now before the first sample, which that run may have had less of.
            refused: what ran out of memory, where there is no more of it now.
            limit_bytes: the largest limit that it had; None where nobody knows.
        """
        self.past = tuple(past)
        found = recalled(self.past, held_bytes)
        if found is not None:
            self._cutter.history.prior = found.memory
            self.search.known = found.known
            # Of a run that memory has ended, times say nothing of the larger ones that fit now.
            reached = 0.0 if limit_bytes is None else self._reach(found.memory, limit_bytes)
            was_bounded = 0 < reached <= KNOWN * found.known or not all(trial.fits for trial in self.past)
            is_short = was_bounded and self._reach(found.memory, self.limits.limit_bytes) > KNOWN * found.known
            self._fastest.recall(None if is_short else found.times)
        # As if it had failed in this run: so nothing as large is tried, unless smaller ones show that it would fit.
        if refused is not None:
            self._largest.record(refused)
        self.told = refused

    def _reach(self, memory: MemoryModel, limit_bytes: int) -> float:
        """Return the largest weight that plans would have under such a limit."""
        return memory.largest_within(self.limits.target_of(limit_bytes))

    def refused(self) -> Trial | None:
        """Return the smallest trial that ran out of memory; not that of the smallest size, which is tried always."""
        return None if self.saves_memory else self._cutter.history.refused(above=self.smallest)

    def learnt(self) -> tuple[Trial, ...]:
        """Return what a later run may begin from: the trials, with the seconds that windows of them took."""
        if self.saves_memory:
            return ()
        return learnt(self._cutter.history, self._fastest.model, has_lengths=bool(self.search.has_lengths))

    # How windows are cut.

    def window(self, num_samples: int, lengths: Lengths = None, plan: Sequence[int] | None = None) -> Attempt:
        """Begin a window: in the sizes of a recorded ``plan``, or in those that are chosen here."""
        if plan is None:
            # Weights of samples with lengths are in other units than those of samples without.
            if (lengths is not None) is not self.search.has_lengths and self._learns:
                self._start_over(has_lengths=lengths is not None)
            # Until ``settle`` says which windows are full, the largest so far stands for them.
            if num_samples > self._cutter.full_window[0]:
                self._cutter.full_window = (num_samples, lengths)
        is_timed = self._fastest.timing is not None or self._fastest.checks > 0
        return Attempt(self, num_samples, lengths, plan, is_timed=is_timed)

    @property
    def planned_weight(self) -> int:
        """Return the weight that plans are made of: what no micro-batch is above."""
        return self._fastest.planned()

    def plan(self, num_samples: int, lengths: Lengths = None, weight: int | None = None) -> tuple[int, ...]:
        """Return how to cut a window without trials; one that there was not, before the first, into nothing.

        ``weight`` is the one that plans were made of once; None for that of now.
        """
        weight = self.planned_weight if weight is None else weight
        return self._sizes(num_samples, lengths, weight) if num_samples else ()

    def _sizes(self, num_samples: int, lengths: Lengths, weight: int) -> tuple[int, ...]:
        rest = num_samples - weight
        if self.keeps_last and lengths is None and rest >= max(1, self.smallest):
            return (*self._cutter.sizes(rest, None, weight), weight)
        return self._cutter.sizes(num_samples, lengths, weight)

    def in_two(self, num_samples: int, lengths: Lengths = None) -> tuple[int, ...] | None:
        """Return a cut in two of a window that would be one micro-batch; None where it is left as it is."""
        # A size that was passed is the user's own.
        if not self._learns or len(self.plan(num_samples, lengths)) != 1:
            return None
        return self._cutter.sizes(num_samples, lengths, self._fastest.planned(), fewest=2)

    def pieces(self, num_samples: int, lengths: Lengths) -> Iterator[Piece]:
        """Return the pieces of a window one by one; trials are chosen as the outcomes of those before come in."""
        # Nearly every window of a run: its pieces are made once, and handed out again and again.
        if not self.search.is_on and lengths is None:
            decided_by = (
                num_samples, self._largest.weight, self._fastest.weight, self._cutter.smallest, self.keeps_last
            )  # fmt: skip
            if decided_by != self._last_cut[0]:
                sizes = self._sizes(num_samples, None, self._fastest.planned())
                self._last_cut = (decided_by, pieces_of(sizes))
            return iter(self._last_cut[1])
        return self.search.pieces(num_samples, lengths, self._fastest.planned)

    def trial_for(self, num_samples: int, lengths: Lengths = None) -> int | None:
        """Return the next size worth a trial for such windows, if any: see ``Searching``."""
        return self.search.trial_for(num_samples, lengths)

    def _may_try(self, num_samples: int, lengths: Lengths) -> bool:
        return self.search.may_try(num_samples, lengths, self.plan(num_samples, lengths)[0])

    def start_over(self, *, saves: bool) -> None:
        """Forget what was tried, for micro-batches take other memory from now on; ``saves`` is ``saves_memory``."""
        self.saves_memory, self.past, self.told = saves, (), None
        self._cutter.history, self.search.known = History(), 0
        # A user's own size is tried once more: what was too much for one way may not be for another.
        self._largest.weight = max(self._given, self.smallest)
        if self._learns:
            self._largest.forget()
        self.limits.learn_least(0)

    def _start_over(self, *, has_lengths: bool) -> None:
        """Drop what is known: a stream has begun, or ceased, to tell how long its samples are, and so units change."""
        if self.history and self.search.has_lengths is not None:
            self._cutter.history = History()
            self._cutter.full_window, self.search.known = (0, None), 0
            self._largest.weight = self.smallest
            self._largest.forget()
        self.search.has_lengths = has_lengths

    # What became of it.

    def observe(
        self,
        micro_batch: int,
        peak_bytes: int,
        seconds: float | None = None,
        length: int = 1,
        *,
        allocated_bytes: int | None = None,
        start_bytes: int | None = None,
        fell_short: bool = False,
    ) -> None:
        """Take the reading of a trial. The smallest may use the headroom; nothing may pass the limit.

        One that ``fell_short`` of memory does not fit, although it ran: it was slower than it has to be.

        Raises:
            NothingFitsError: the smallest passed the limit.
        """
        length = length if self._learns else 1
        self.search.start_bytes = start_bytes
        if fell_short and micro_batch > self.smallest:
            self._largest.record(Trial(micro_batch=micro_batch, fits=False, length=length))
        else:
            self._largest.observe(micro_batch, peak_bytes, seconds, length, allocated_bytes)

    def is_to_be_repeated(self, micro_batch: int) -> bool:
        """Take a trial that tells nothing, for something was made ready in it; return whether it is run once more.

        It is once for each size: one for which code is compiled again and again would be tried for ever.
        """
        return self.search.is_run_cold(micro_batch)

    def expect_few_sizes(self) -> None:
        """Try few sizes from now on, and large ones: it has turned out that each may cost a compilation."""
        self.search.few_sizes = self._fastest.few_sizes = True

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
        # Sizes of the user's own are of samples, however long these are.
        self._largest.record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))
        # Where the limit has fallen, what fitted before may fail as well. The model says at once how far to give way:
        # to find that out by halves would cost a replay each time.
        model = self._cutter.history.model
        if model is not None and model.predict(self._largest.weight) > self.limits.limit_bytes:
            self._largest.shrink(int(model.largest_within(self.limits.target_bytes)))
        plan = self.plan(num_samples, lengths)
        starts = accumulate(plan[:-1], initial=0)
        # A plan that holds as much again, in samples and in length, would end in the same error for ever.
        holds_as_much = any(
            size >= micro_batch and (lengths is None or lengths[start] >= length)
            for size, start in zip(plan, starts, strict=True)
        )
        if micro_batch <= self.smallest or holds_as_much:
            raise self._largest.nothing_fits(micro_batch, peak_bytes)
        return plan

    def killed(self, micro_batch: int, length: int) -> None:
        """Take it that such a micro-batch, larger than the smallest, was too much for the last process."""
        self._largest.record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))

    def room_at_once(self, largest: int, peak_bytes: int, *, is_enforced: bool, is_given: bool) -> int:
        """Return how many samples there is room for at once, to examine a window with.

        They are some few, or two of its micro-batches, of whose joined forward nothing is kept for a backward.

        Args:
            largest: samples of the largest micro-batch of the window, which has just been run.
            peak_bytes: what it has taken; 0 where that was not read.
            is_enforced: whether the device refuses what passes the limit.
            is_given: whether the size of micro-batches is the user's own.
        """

        def is_room_for(size: int) -> bool:
            predicted = self.predicted_bytes(size)
            return predicted is None or predicted <= self.limits.target_bytes

        few = next((size for size in (6, 3, 2) if size <= largest or is_room_for(size)), largest)
        double, smallest = 2 * largest, self.smallest
        # Where the kernel may kill the process, nothing is run at once that is larger than what has fitted before.
        is_safe = is_enforced or is_given or double <= self.largest
        if is_safe and (is_enforced or is_room_for(double)):
            few = max(few, double)
        if smallest < 3 or few >= 3 * smallest:
            return few
        # Parts that have to be larger take more: what so many have taken is in proportion an upper bound of it.
        target, each = self.limits.target_bytes, peak_bytes / largest
        return max([few, *(size for size in (2 * smallest, 3 * smallest) if each and size * each <= target)])

    def needs_room(self, held_bytes: int, piece: Piece, window_bytes: int) -> bool:
        """Return whether a piece would pass the target beside ``held_bytes``, which only the allocator holds.

        ``window_bytes`` is the peak of the last window, which stands for what no model foretells yet.
        """
        model = self.memory_model
        predicted = window_bytes if model is None else model.predict(piece.size, piece.length)
        return held_bytes + predicted > self.limits.target_bytes

    def measured(self, sizes: Sequence[int], lengths: Lengths, peak_bytes: int) -> tuple[int, ...] | None:
        """Take the peak of a window where nobody but us keeps the limit; return a smaller plan if one is called for."""
        return self.plan(sum(sizes), lengths) if self._largest.passes(sizes, lengths, peak_bytes) else None

    def ran_within(self, sizes: Sequence[int], lengths: Lengths, peak_bytes: int) -> None:
        """Take the peak of a window where the device keeps the limit: see ``Largest.ran_within``."""
        if self._learns:
            self._largest.ran_within(sizes, lengths, peak_bytes)

    def committed(self, sizes: Sequence[int], lengths: Lengths = None) -> None:
        """Take a window that went well; it is news only if no trial has said so of its largest micro-batch."""
        fits, fails = self._cutter.history.bounds
        if lengths is None and max(sizes) <= min(fits, self._largest.best):  # for nearly every window of a run
            return
        weights = self.weights(sizes, lengths)
        if lengths is not None:  # what could not be made smaller says nothing of what to choose
            weights = [weight if size > self.smallest else 0 for size, weight in zip(sizes, weights, strict=True)]
        weight = max(weights)
        self._largest.best = max(self._largest.best, weight)
        is_to_be_tried = self.search.is_on and weight == self.search.warm
        if is_padded(lengths) and weight <= self._largest.reach:
            return
        if weight > fits and not is_to_be_tried and (fails is None or weight < fails):
            index = weights.index(weight)
            length = length_at(lengths, sum(sizes[:index])) if self._learns else 1
            # The largest weight may be one that was never tried, as a user's own is, and the window a short one: that
            # a smaller one went well does not lower it.
            before = max(self._largest.weight, weight)
            self._largest.record(Trial(micro_batch=sizes[index], fits=True, length=length))
            # In a first search the trial has changed what lengths weigh, and so the units of the weight before.
            if lengths is None or not self.search.is_on or self.search.goal is not None:
                self._largest.weight = before

    def timed(self, seconds: float, num_samples: int, lengths: Lengths = None) -> None:
        """Take the time of a window; it is of use if the window was one of those that plans are made for."""
        if not self.is_timing:
            return
        # An earlier run's times are for full windows, and are checked on those that are cut by them.
        if not self.search.is_on and num_samples == self.full_window[0]:
            weights = self.weights(self.plan(num_samples, lengths), lengths)
            if self._fastest.is_belied(seconds, weights):  # another machine, or another load on it
                self.search.known, self.search.untold = 0, self._cutter.history.bounds[0]
                self._largest.forget()
        self._fastest.observe(seconds, num_samples, lengths)

    def settle(self, num_samples: int, lengths: Lengths = None) -> bool:
        """Look back on a full window; return whether it has just become clear how to cut those that follow."""
        self._cutter.full_window = (num_samples, lengths)
        if self.search.is_on:
            if self._may_try(num_samples, lengths):  # the next window has a trial to make
                return False
            self._largest.end_search()
        elif self._fastest.timing is None:
            return False
        if self._fastest.timing is not None:
            if not self._fastest.compare():
                return False
            is_rising = self._fastest.rises and not self.search.doubts_plateau
            # The search may have ended because trials gained nothing any more. Those are cold runs: where warm windows
            # say otherwise they are right, and the search goes on; once, or it would swing to and fro.
            if is_rising and self.search.has_plateaued():
                self.search.doubts_plateau = True
                self.search.is_on = self.trial_for(num_samples, lengths) is not None
        # When memory comes back, there is no need to grow beyond this.
        if not self.search.is_on and self.reason() == NO_FASTER:
            self._largest.enough = self._fastest.planned()
        return not self.search.is_on

    def resize(self, num_samples: int, lengths: Lengths = None) -> None:
        """Make ready for full windows of so many samples: it may take other sizes to be the fastest."""
        self._cutter.full_window = (num_samples, lengths)
        if not self._learns or self.search.is_on:  # the search will settle on what is best for these windows
            return
        # Larger windows may have room for trials that were of no use in smaller ones.
        self.search.is_on = self._may_try(num_samples, lengths)
        if self.search.is_on or not self._fastest.keeps_comparing(num_samples):
            self._largest.choose()

    def reason(self) -> str:
        """Return why plans have no larger micro-batches, for people to read."""
        if not self._learns:
            return "micro_batch is set"
        return self.search.reason(self._fastest.planned(), self._largest.weight)

    # As memory comes and goes.

    def look(self, limit_bytes: int, strain: str | None, *, is_enforced: bool = False) -> str | None:
        """Look at the memory before a window; return why it is cut smaller than the last one, if it is.

        Growing again begins here too.

        Args:
            limit_bytes: what this process may use now.
            strain: what shows that memory is short, although the limit does not.
            is_enforced: whether the device refuses what passes the limit, so that strain costs time and no more.
        """
        return self._largest.look(limit_bytes, strain, is_enforced=is_enforced)

    # What outlives the process: each part keeps its own.

    def state_dict(self) -> dict[str, Any]:
        """Return how windows are cut, and what that was learnt from, as plain values."""
        found = {
            "past": [trial.state_dict() for trial in self.past],
            "least_bytes": self.limits.least_bytes,
            **self._cutter.state_dict(),
            **self.search.state_dict(),
            **self._largest.state_dict(),
            **self._fastest.state_dict(),
        }
        return {name: found[name] for name in [*SAVED.split(), "_warm"] if name in found}

    def load_state_dict(self, state: dict[str, Any], *, is_same_device: bool) -> None:
        """Put back what ``state_dict`` returned, under the limit as it is now.

        On another device, or with sizes of the user's own, memory and time are to be found out again.
        """
        # The windows are those of the data, whatever they run on.
        self._cutter.full_window = state["window"]
        if not is_same_device or not self._learns:
            return
        self.past = tuple(Trial(**trial) for trial in state["past"])
        for part in (self._cutter, self.search, self._largest, self._fastest):
            part.load_state_dict(state)
        self.limits.learn_least(state["least_bytes"])
        # A comparison that was going on begins anew: its first half was timed by another process. It comes last of all,
        # for it begins with what fits.
        if state["is_timing"]:
            self._largest.choose()


class Attempt:
    """One try at a window, as the module ``attempts`` has it: iterate, and say what became of each piece."""

    __slots__ = ("_lengths", "_sizes", "_tuner", "is_timed", "num_samples", "replaced", "replays")

    def __init__(
        self, tuner: Tuner, num_samples: int, lengths: Lengths, sizes: Sequence[int] | None, *, is_timed: bool = False
    ) -> None:
        """Cut a window into these sizes; None to have them chosen one by one, as what is tried turns out."""
        # Asked for pieces, and told what became of them; it keeps nothing of this attempt.
        self._tuner = tuner
        # The window, for a smaller attempt at it has to be cut from the same.
        self.num_samples = num_samples
        """Samples of the window."""
        self._lengths = lengths
        self._sizes = sizes  # None while they are chosen one by one: what is to be tried next depends on the last
        self.is_timed = is_timed
        """Whether the seconds of the whole window are wanted."""
        self.replays = 0
        """Attempts at this window that ran out of memory before."""
        self.replaced: tuple[int, ...] = ()
        """The plan in whose place this one is tried; empty for the first attempt."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of a plan; empty where they are chosen one by one."""
        return tuple(self._sizes or ())

    def __iter__(self) -> Iterator[Piece]:
        """Return the pieces in their order; the next one is chosen when it is asked for."""
        # What the tuner returns need not know its end yet: it goes on when the next piece is asked for, and by then it
        # has heard what became of the last one.
        if self._sizes is None:
            return self._tuner.pieces(self.num_samples, self._lengths)
        return iter(pieces_from(self._sizes, self._lengths))

    def fitted(self, reading: Reading) -> None:
        """Say that a trial ran well.

        Raises:
            NothingFitsError: it was of the smallest micro-batch, and passed the limit.
        """
        # That another piece ran well is no news: what ``committed`` says at the end is enough.
        assert reading.peak_bytes is not None
        # Its time and its peak may be those of a compiler. Lengths make each micro-batch a size of its own, whose peak
        # is all that will ever be known of it.
        if reading.is_cold and self._lengths is None and self._tuner.is_to_be_repeated(reading.piece.size):
            return
        self._tuner.observe(
            reading.piece.size,
            reading.peak_bytes,
            None if reading.is_cold else reading.seconds,
            reading.piece.length,
            allocated_bytes=reading.allocated_bytes,
            start_bytes=reading.start_bytes,
            fell_short=reading.fell_short,
        )

    def ran_out(self, micro_batch: int, length: int, peak_bytes: int | None, limit_bytes: int) -> Attempt:
        """Say that such a micro-batch ran out of memory, and return a smaller attempt at the same window.

        Args:
            micro_batch: its samples.
            length: of its longest sample.
            peak_bytes: what was reached.
            limit_bytes: the limit now, which may be lower than when the window was planned.

        Raises:
            NothingFitsError: there is no smaller one.
        """
        tuner, num_samples, lengths = self._tuner, self.num_samples, self._lengths
        # The plan that is given up, asked for before the tuner hears of the failure. In a search there was none, only
        # sizes that grew. So where samples are alike, the plan of the size that failed stands for them.
        old = tuner.cut(num_samples, micro_batch, 1) if lengths is None else tuner.plan(num_samples, lengths)
        new = tuner.out_of_memory(
            micro_batch, num_samples, lengths, length=length, peak_bytes=peak_bytes, limit_bytes=limit_bytes
        )
        smaller = Attempt(tuner, num_samples, lengths, new)
        # It is not timed: ``committed`` would not pass it on.
        smaller.replays, smaller.replaced = self.replays + 1, old
        return smaller

    def again(self) -> Attempt:
        """Return another attempt in the same sizes, after one that ran out of memory that may be there by now."""
        same = Attempt(self._tuner, self.num_samples, self._lengths, self._sizes)
        same.replays = self.replays + 1
        return same

    def following(self, other: Attempt) -> Attempt:
        """Return this as the attempt after another one at the same window, which ran out of memory."""
        # The tuner has begun anew in between, so that it is no smaller attempt of the other's.
        self.replays, self.is_timed = other.replays + 1, False
        return self

    def repeated(self, sizes: Sequence[int]) -> Attempt:
        """Return another attempt in the sizes that this one came to; memory was enough for them."""
        # Not in those that the tuner would choose by now, which may be others: the window is only to be run once more.
        again = Attempt(self._tuner, self.num_samples, self._lengths, sizes, is_timed=self.is_timed)
        again.replays = self.replays
        return again

    def committed(self, sizes: tuple[int, ...], seconds: float | None) -> None:
        """Say that the window went well in these sizes, and in how many seconds where that was wanted."""
        # A window that was rolled back took longer than one in these sizes does.
        if seconds is not None and not self.replays:
            self._tuner.timed(seconds, self.num_samples, self._lengths)
        self._tuner.committed(sizes, self._lengths)
