"""How each window is cut: while the search goes on, while plans are timed, and as memory comes and goes.

Every size that it hands out is useful work. It sees numbers alone, so that it can be tested by the million.

Sizes are samples where samples are alike. Where they differ in length, what is looked for is the largest load of a
micro-batch: see ``Loads``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from autoaccum._units import format_bytes
from autoaccum.errors import NothingFitsError
from autoaccum.planning.costs import MemoryModel, TimeModel, Trial, fit_memory_model, fit_time_model, weigher
from autoaccum.planning.cuts import cheapest, cut, cut_by_weight
from autoaccum.planning.history import Lengths, Loads, in_loads
from autoaccum.planning.patience import Pressure
from autoaccum.planning.search import COARSE_FIRST, COARSE_GROWTH, has_plateaued, next_trial, target_bytes
from autoaccum.planning.timing import Timing

WORTHWHILE = 1.2
"""Plans give way to a limit that fell, or to strain, by this factor at least, and grow again for as much."""
SURELY_MORE = 1.05
"""What did not fit is tried again under a limit larger by this factor."""
PATIENT = 3
"""Timings that may be broken off by windows of another size; later ones are not begun."""
UNTIMED = 16
"""Windows in a row that are not full, after which plans are timed no more: those to come will not be either."""
FAR_OFF = 1.5
"""Times of an earlier run are not believed when windows take as many times as long, or as short."""
KNOWN = 1.25
"""Times are foretold for loads up to the largest that was timed, times this."""

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
        coarse: bool = False,
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
            coarse: whether to try few sizes, and large ones.
            fewest: micro-batches that each window is cut into at least, where it has enough samples.
        """
        self._loads = Loads()
        self.past: tuple[Trial, ...] = ()
        """What an earlier run has learnt."""
        self.told: Trial | None = None
        """What ran out of memory then, and would again."""
        self.refused_at = 0
        """The lowest limit under which anything ran out of memory."""
        self.searching = search
        self.smallest = smallest
        self.largest = largest or smallest
        """The largest load to use now."""
        self._learns = search
        self._ceiling = ceiling
        self._fewest = fewest
        self._headroom = headroom
        self.least_bytes = 0
        """The peak of the smallest micro-batch, once it is known."""
        self._coarse = coarse
        self._heed(limit_bytes)
        self._known = 0  # the largest load that fitted in an earlier run
        self.window: tuple[int, Lengths] = (0, None)
        """Samples of the last full window, and their lengths."""
        self._is_ragged: bool | None = None  # until the first window
        self._cap: int | None = None  # the load of the fastest plan, or of the one that is being timed
        self._timing: Timing | None = None
        self._broken_off = 0  # timings, by windows of another size
        self._timed_window: tuple[int, Lengths] = (0, None)  # what others are likened to
        self._untimed = 0  # windows in a row
        self._checks = 0  # windows to time until recalled times are believed
        self._time_model: TimeModel | None = None
        self._doubts_plateau = False
        self._pressure = Pressure()
        self._best = 0  # the largest load that ever ran well
        self._refused: tuple[int, int] | None = None  # (load, limit that it was too much for)
        self._enough: int | None = None  # the load beyond which nothing is faster
        self._goal: int | None = None  # the load to reach when growing again
        self._grown_from = 0

    @property
    def history(self) -> list[Trial]:
        """What was tried, oldest first."""
        return self._loads.trials

    @property
    def memory_model(self) -> MemoryModel | None:
        """Fitted to the trials so far."""
        return fit_memory_model(self.history)

    @property
    def is_timing(self) -> bool:
        """Whether windows are to be timed."""
        return self._timing is not None or self._checks > 0

    def predicted_bytes(self, load: int) -> int | None:
        """The memory model's peak at that load."""
        model = self._loads.model
        return None if model is None else model.predict(load)

    def loads(self, sizes: Sequence[int], lengths: Lengths = None) -> list[int]:
        """Of the micro-batches of a window."""
        return self._loads.of(sizes, self._known_lengths(lengths))

    def _known_lengths(self, lengths: Lengths) -> Lengths:
        """Where sizes are the user's they are of samples, however long."""
        return lengths if self._learns else None

    @property
    def micro_batch(self) -> int:
        """The most samples in a micro-batch of the longest of the last window's samples."""
        return max(1, self.largest // self._loads.each(self._known_lengths(self.window[1])))

    def set_smallest(self, smallest: int) -> None:
        """The model has got other layers, or another mode: see ``coupling.smallest_micro_batch``."""
        self.smallest = smallest
        self.largest = max(self.largest, smallest)

    def recall(self, past: Sequence[Trial], held_bytes: int, refused: Trial | None = None) -> None:
        """Begin from what an earlier run has ``learnt``.

        Args:
            past: its trials. Whether they fitted was a matter of that run's limit.
            held_bytes: what is in use now before the first sample, which that run may have had less of.
            refused: what ran out of memory, where there is no more of it now.
        """
        self.past = tuple(past)
        loads = in_loads(self.past, weigher(self.past))
        if (model := fit_memory_model(loads)) is not None:
            self._loads.prior = replace(model, fixed_bytes=max(model.fixed_bytes, held_bytes))
            self._known = max(t.micro_batch for t in loads if t.peak_bytes is not None)
            self._time_model = fit_time_model(loads)
            self._checks = 2 if self._time_model is not None else 0
        if refused is not None:
            self._record(refused)
        self.told = refused

    def refused(self) -> Trial | None:
        """See ``Loads.refused``; not the smallest, which has to be tried again."""
        return self._loads.refused(above=self.smallest)

    def learnt(self) -> tuple[Trial, ...]:
        """What a later run may begin from: the trials, with the seconds that windows of them took."""
        model = self._time_model
        if self._is_ragged:  # no window is like another: they are timed again
            return tuple(replace(trial, seconds=None) for trial in self.history)
        if model is None:
            return tuple(self.history)
        timed = {
            size: Trial(micro_batch=size, fits=True, peak_bytes=self.predicted_bytes(size)) for size, _ in model.points
        }
        trials = timed | {trial.micro_batch: trial for trial in self.history}
        return tuple(replace(trial, seconds=model.predict(size)) for size, trial in trials.items())

    # How windows are cut.

    def plan(self, num_samples: int, lengths: Lengths = None) -> tuple[int, ...]:
        """How to cut a window, without trials; one that there was not, before the first, into nothing."""
        return self._cut(num_samples, lengths, self._load()) if num_samples else ()

    def _load(self) -> int:
        """Of the micro-batches that plans are made of."""
        return self.largest if self._cap is None else min(self._cap, self.largest)

    def _cut(self, num_samples: int, lengths: Lengths, load: int, fewest: int | None = None) -> tuple[int, ...]:
        lengths = self._known_lengths(lengths)
        fewest = self._fewest if fewest is None else fewest
        most = -(-num_samples // fewest)
        if lengths is None or lengths[0] == lengths[-1]:
            return cut(num_samples, min(most, max(1, load // self._loads.each(lengths))), self.smallest)
        sizes = cut_by_weight([self._loads.weight(length) for length in lengths], load, self.smallest)
        return sizes if len(sizes) >= fewest else cut(num_samples, most, self.smallest)

    def _most(self, num_samples: int) -> int:
        """Samples in a micro-batch of such a window."""
        return -(-num_samples // self._fewest)

    def sizes(self, num_samples: int, lengths: Lengths = None) -> Iterator[tuple[int, bool]]:
        """Sizes for a window, each with whether it is a trial, chosen one by one as the outcomes come in.

        A trial is measured with the window's gradients in memory, as most micro-batches run: so it is never a
        window's first micro-batch, unless it is its only one.
        """
        if (lengths is not None) is not self._is_ragged and self._learns:
            self._start_over(is_ragged=lengths is not None)
        if num_samples > self.window[0]:
            self.window = (num_samples, lengths)
        position, left = 0, lengths
        while self.searching and (remaining := num_samples - position):
            trial = self.trial_for(num_samples, left)
            if trial is None or not self._has_room(trial, remaining):
                break
            is_first = position == 0 and trial < num_samples
            size = self._first_size(num_samples, lengths, trial) if is_first else trial
            yield size, not is_first
            position += size
            left = None if lengths is None else lengths[position:]
        if position < num_samples:
            for size in self._cut(num_samples - position, left, self._load(), fewest=1 if position else None):
                is_new = position > 0 and lengths is not None and self._loads.is_new(lengths[position])
                yield size, self._learns and is_new
                position += size

    def trial_for(self, num_samples: int, lengths: Lengths = None) -> int | None:
        """The next size worth a trial for such windows, if any; where lengths differ, of the first samples.

        Only sizes that make a better plan are worth an out-of-memory error: a window of 256 takes three micro-batches
        with 86 samples in each and with 127.
        """
        each = self._loads.each(self._known_lengths(lengths))
        fits, _ = self._loads.bounds
        if fits and self._goal is None and self._is_enough(fits):
            return None
        load = next_trial(
            self._loads.in_loads,
            limit_bytes=self.target_bytes,
            ceiling=min(min(self._ceiling, self._most(num_samples)) * each, self._goal or 2**62),
            smallest=self.smallest * each,
            first=self._first(num_samples, each),
            growth=self._growth(fits),
            prior=self._loads.prior,
        )
        if load is None:
            return None
        size = cut(num_samples, load, self.smallest)[0] if lengths is None and fits else load // each
        return size if size * each > fits and size >= min(self.smallest, num_samples) else None

    def _may_try(self, num_samples: int, lengths: Lengths) -> bool:
        """Whether such a window has room for a trial behind its first micro-batch, which has the longest samples."""
        trial = self.trial_for(num_samples, lengths)
        if trial is None or trial == num_samples or not self._learns or self._coarse:
            return trial is not None
        first = self._first_size(num_samples, lengths, trial)
        left = num_samples - first
        if lengths is not None:
            trial = self.trial_for(num_samples, lengths[first:]) if left else None
        return trial is not None and self._has_room(trial, left)

    def _first_size(self, num_samples: int, lengths: Lengths, trial: int) -> int:
        """Of a window that goes on with a trial: one that is known to fit, if the trial has room behind it."""
        first = self.plan(num_samples, lengths)[0]
        if self._coarse or (lengths is None and not self._has_room(trial, num_samples - first)):
            return trial
        return first

    def _has_room(self, trial: int, left: int) -> bool:
        return trial == left or trial <= left - self.smallest

    def _is_enough(self, load: int) -> bool:
        """Whether larger ones are known to be no faster."""
        if self._known > load and self._time_model is not None and self._loads.prior is not None:
            return self._fastest(self._time_model, self._known) <= load
        return not self._doubts_plateau and has_plateaued(self._loads.in_loads)

    def _first(self, num_samples: int, each: int) -> int | None:
        """The load to begin with, if not the smallest."""
        if self._known and self._loads.prior is not None:
            known = self._known if self._time_model is None else self._fastest(self._time_model, self._known)
            return int(min(known, self._loads.prior.largest_within(self.target_bytes)))
        return min(COARSE_FIRST, num_samples // 2) * each if self._coarse else None

    def _growth(self, fits: int) -> int:
        """How many times as large as the largest success a trial may be."""
        model = self._loads.model
        if model is None:
            return COARSE_GROWTH if self._coarse else 2
        if not (self._coarse or self._is_ragged):  # a whole window may weigh more than its two halves
            return 2
        # A model is trusted further where it would do no harm if samples cost twice as much.
        return COARSE_GROWTH if 2 * model.predict(COARSE_GROWTH * fits) <= self.target_bytes else 2

    # What became of it.

    def observe(self, micro_batch: int, peak_bytes: int, seconds: float | None = None, length: int = 1) -> None:
        """A trial ran, and this is what it took. The smallest may use the headroom; nothing may pass the limit.

        Raises:
            NothingFitsError: the smallest passed the limit.
        """
        fits = self._is_within(micro_batch, peak_bytes)
        if micro_batch <= self.smallest:
            if not fits:
                raise self._nothing_fits(micro_batch, peak_bytes)
            self.least_bytes = peak_bytes
            self._heed(self.limit_bytes)
        length = length if self._learns else 1
        predicted = self.predicted_bytes(micro_batch * self._loads.weight(length))
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
        """A micro-batch ran out of memory, ``peak_bytes`` being reached: smaller ones for its window, and from now on.

        ``limit_bytes`` is the limit now, which may be lower than when it was planned.

        Raises:
            NothingFitsError: there is none.
        """
        self._heed(limit_bytes or self.limit_bytes)
        self._record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))
        model = self._loads.model
        if model is not None and model.predict(self.largest) > self.limit_bytes:
            self._shrink(int(model.largest_within(self.target_bytes)))
        plan = self.plan(num_samples, lengths)
        longest = lengths and [lengths[start] for start in accumulate(plan[:-1], initial=0)]
        again = any(s >= micro_batch and (longest is None or longest[i] >= length) for i, s in enumerate(plan))
        if micro_batch <= self.smallest or again:
            raise self._nothing_fits(micro_batch, peak_bytes)
        return plan

    def killed(self, micro_batch: int, length: int) -> None:
        """Such a micro-batch, larger than the smallest, was too much for the last process."""
        self._record(Trial(micro_batch=micro_batch, fits=False, length=length if self._learns else 1))

    def passed_limit(self, micro_batch: int, peak_bytes: int, length: int = 1) -> None:
        """Windows of such micro-batches pass the limit, although their trial did not."""
        self.observe(micro_batch, peak_bytes, length=length)
        self._refused = (self._loads.in_loads[-1].micro_batch, self.limit_bytes)

    def committed(self, sizes: Sequence[int], lengths: Lengths = None) -> None:
        """A window went well; news only if no trial has said so of its largest micro-batch, or has said otherwise."""
        fits, fails = self._loads.bounds
        if lengths is None and max(sizes) <= min(fits, self._best):  # for nearly every window of a run
            return
        loads = self.loads(sizes, lengths)
        if lengths is not None:  # what could not be made smaller says nothing of what to choose
            loads = [load if size > self.smallest else 0 for size, load in zip(sizes, loads, strict=True)]
        load = max(loads)
        self._best = max(self._best, load)
        if load > fits and (fails is None or load < fails):
            index = loads.index(load)
            length = 1 if lengths is None or not self._learns else lengths[sum(sizes[:index])]
            largest = max(self.largest, load)
            self._record(Trial(micro_batch=sizes[index], fits=True, length=length))
            self.largest = largest

    def timed(self, seconds: float, num_samples: int, lengths: Lengths = None) -> None:
        """A window took so long; of use if it was one of those that plans are made for."""
        if self._checks and not self.searching and num_samples == self.window[0]:
            self._check(seconds, num_samples, lengths)
        if self._timing is None or self._cap is None:
            return
        self._untimed = self._untimed + 1 if num_samples != self.window[0] else 0
        if not self._untimed:
            work = self._loads.work(num_samples, self._known_lengths(lengths))
            self._timing.observe(self._cap, seconds * self._loads.work(*self._timed_window) / work)

    def _check(self, seconds: float, num_samples: int, lengths: Lengths) -> None:
        """The second window that is cut as an earlier run's times say: if they are far off, the search begins anew."""
        self._checks -= 1
        if self._checks == 0 and self._time_model is not None:
            loads = self.loads(self.plan(num_samples, lengths), lengths)
            expected = sum(map(self._time_model.predict, loads))
            if not expected / FAR_OFF < seconds < expected * FAR_OFF:
                self._known = 0
                self._forget()

    def settle(self, num_samples: int, lengths: Lengths = None) -> bool:
        """After a full window; whether it has become clear how to cut those that follow."""
        self.window = (num_samples, lengths)
        if self.searching:
            if self._may_try(num_samples, lengths):
                return False
            self.searching = False
            if self._goal is not None and self.largest <= self._grown_from:
                self._pressure.shrank()  # there was nothing to be had
            self._goal = None
            self._choose()
        elif self._timing is None:
            return False
        if self._timing is not None:
            self._cap = self._timing.cap()
            if self._cap is not None and self._untimed < UNTIMED:
                return False
            timing, self._timing = self._timing, None
            self._cap, self._time_model = timing.fastest(), timing.model()
            if timing.rises() and not self._doubts_plateau and has_plateaued(self._loads.in_loads):
                self._doubts_plateau = True  # windows say otherwise
                self.searching = self.trial_for(num_samples, lengths) is not None
        if not self.searching and self.reason() == NO_FASTER:
            self._enough = self._load()
        return not self.searching

    def resize(self, num_samples: int, lengths: Lengths = None) -> None:
        """Full windows have so many samples from the next one on: it may take other sizes to be the fastest."""
        self.window = (num_samples, lengths)
        timed = self._timed_window[0]
        if not self._learns or self.searching:
            return
        self.searching = self._may_try(num_samples, lengths)
        # A window that is a little larger or smaller tells as much of what is timed: a ramp has no two alike.
        if self._timing is not None and not self.searching:
            if timed / WORTHWHILE < num_samples < timed * WORTHWHILE:
                return
            self._broken_off += 1
            if self._broken_off > PATIENT:  # windows never stay as they are: what is known has to do
                self._time_model = self._timing.model()
        self._choose()

    def reason(self) -> str:
        """Why plans have no larger micro-batches."""
        if not self._learns:
            return "micro_batch was passed"
        num_samples, lengths = self.window
        if len(self.plan(num_samples, lengths)) <= self._fewest:
            return "the whole window fits" if self._fewest == 1 else f"{self._fewest} micro-batches are wanted"
        more = len(self._window_loads(self._load())) > len(self._window_loads(self.largest))
        if more or self._is_enough(self.largest):
            return NO_FASTER
        predicted = self.predicted_bytes(2 * self.largest)
        may_fit = self._loads.bounds[1] is None and (predicted is None or predicted <= self.target_bytes)
        return MORE_PADDING if lengths is not None and may_fit else "larger micro-batches do not fit"

    # As memory comes and goes.

    def look(self, limit_bytes: int, strain: str | None) -> str | None:
        """Before a window: why it is cut smaller than the last one, if it is. Growing again begins here too.

        Args:
            limit_bytes: what this process may use now.
            strain: what shows that memory is short, although the limit does not.
        """
        before = self.limit_bytes
        self._heed(limit_bytes)
        # Sizes that are new to an allocator make it try again as a matter of course.
        is_strained = self._pressure.look(limit_bytes, strain is not None and not self.searching and not self._timing)
        if not self._learns:
            return None
        load = max(self._window_loads(self._load()))
        if load > self.smallest * self._loads.each(self._known_lengths(self.window[1])):
            model = self._loads.model
            if model is not None and (needed := model.predict(load)) > limit_bytes:
                self._shrink(min(load - 1, int(load / WORTHWHILE), int(model.largest_within(self.target_bytes))))
                if limit_bytes < before:
                    return f"the limit fell to {format_bytes(limit_bytes)}"
                return f"it would need {format_bytes(needed)} of {format_bytes(limit_bytes)}"
            if is_strained:
                self._shrink(int(load / WORTHWHILE))
                return strain
        if not self.searching and self._timing is None:
            self._grow()
        return None

    def _shrink(self, load: int) -> None:
        self.largest = max(load, self.smallest)
        self._loads.judge(
            lambda trial, load: (
                self._judged(trial) if load <= self.largest or not trial.fits or trial.peak_bytes else None
            )
        )
        self._pressure.shrank()
        self._choose()

    def _grow(self) -> None:
        """Search again, once memory has been back for long enough, from what is in use now."""
        limit_bytes = self._pressure.lowest_limit()
        model = self._loads.model
        if limit_bytes is None or model is None:
            return
        load = self._load()
        target = target_bytes(limit_bytes, self._headroom, self.least_bytes)
        goal = min(model.largest_within(target), self._enough or 2**62)
        if self._refused is not None and limit_bytes < SURELY_MORE * self._refused[1]:
            goal = min(goal, (load + self._refused[0]) // 2)
        goal = int(min(goal, 2**62))
        if goal <= load or WORTHWHILE * len(self._window_loads(goal)) > len(self._window_loads(load)):
            return
        self._loads.judge(lambda trial, load: self._judged(trial) if load <= self.largest else None)
        self._goal, self._grown_from, self._cap, self.searching = goal, self.largest, None, True
        self._pressure.grew()

    def _choose(self) -> None:
        """The fastest of the plans that fit, where times are known; else windows are to be timed."""
        self._timing = self._cap = None
        self._untimed = 0
        if self.searching or not self._learns or not self.window[0]:
            return
        if self._time_model is not None and self.largest <= KNOWN * self._time_model.points[-1][0]:
            self._cap = self._fastest(self._time_model, self.largest)
            return
        self._timed_window = num_samples, lengths = self.window
        alike = lengths is None
        self._timing = Timing(
            self.largest,
            cut=lambda load: self.loads(self._cut(num_samples, lengths, load), lengths),
            trials=self._loads.in_loads,
            choose=(lambda model: self._fastest(model, self.largest)) if alike else None,
            closely=alike and not self._coarse,
        )

    def _fastest(self, model: TimeModel, largest: int) -> int:
        """The load of the plan that takes least time, none of its micro-batches being larger."""
        num_samples, lengths = self.window
        if lengths is None:
            return cheapest(num_samples, min(largest, self._most(num_samples)), model.predict, self.smallest)[0]
        loads = [max(largest >> halvings, 1) for halvings in range(6)]
        return min(loads, key=lambda load: sum(map(model.predict, self._window_loads(load))))

    # Small change.

    def _window_loads(self, load: int) -> list[int]:
        """Of the micro-batches of a full window, none being larger."""
        num_samples, lengths = self.window
        return self.loads(self._cut(num_samples, lengths, load), lengths) if num_samples else [load]

    def _heed(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.target_bytes = target_bytes(limit_bytes, self._headroom, self.least_bytes)

    def _is_within(self, micro_batch: int, peak_bytes: int) -> bool:
        return peak_bytes <= (self.limit_bytes if micro_batch <= self.smallest else self.target_bytes)

    def _judged(self, trial: Trial) -> Trial:
        """By the limit as it is now."""
        if trial.peak_bytes is None:
            return trial
        return replace(trial, fits=self._is_within(trial.micro_batch, trial.peak_bytes))

    def _start_over(self, *, is_ragged: bool) -> None:
        """Sizes are in other units from now on: a stream has begun, or ceased, to tell how long its samples are."""
        if self.history and self._is_ragged is not None:
            self._loads, self.window, self._known = Loads(), (0, None), 0
            self.largest = self.smallest
            self._forget()
        self._is_ragged = is_ragged

    def _forget(self) -> None:
        """Search again: what was known of loads is in other units now."""
        self._time_model = self._timing = self._cap = self._goal = self._refused = self._enough = None
        self._best = 0
        self.searching = True

    def _record(self, trial: Trial) -> None:
        before = self.largest
        if not self.searching and self._loads.is_new(trial.length):
            self._forget()
        # After the search plans are made of loads as they are.
        load = self._loads.add(trial, reweigh=self.searching and self._goal is None)
        self.largest = self._loads.bounds[0] or max(self.smallest, min(before, load) // 2)
        if trial.fits:
            self._best = max(self._best, load)
            return
        if trial.peak_bytes is None:
            self.refused_at = min(self.limit_bytes, self.refused_at or self.limit_bytes)
        if load > self._best:
            self._refused = (load, self.limit_bytes)
        if self._goal is not None:  # one miss is enough
            self._goal, self.searching = None, False
            self._pressure.shrank()
        elif self.largest < before:
            self._pressure.shrank()
        self._choose()

    def _nothing_fits(self, micro_batch: int, peak_bytes: int | None) -> NothingFitsError:
        return NothingFitsError(
            phase="training", micro_batch=micro_batch, peak_bytes=peak_bytes, limit_bytes=self.limit_bytes
        )
