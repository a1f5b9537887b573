"""Plans as they change: looked at before windows, as memory comes and goes, and told, each once.

All plans, and all changes of plan, are told by this: whoever has found one out says so here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from autoaccum.data.base import Window
from autoaccum.events import Event, MemorySaving, Notice, Planned, Replanned
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.planning.contest import Best, Contest, Room, is_worth_it, is_worth_rising
from autoaccum.planning.costs import prediction_error
from autoaccum.planning.cuts import Lengths
from autoaccum.planning.limits import CLEARLY_OVER
from autoaccum.planning.searching import NO_FASTER
from autoaccum.planning.tuner import Tuner
from autoaccum.window import notices
from autoaccum.window.announcer import Announcer
from autoaccum.window.meter import Meter


class Saves(Protocol):
    """What decides how memory is saved: see ``saving``."""

    name: str
    is_off: bool
    contest: Contest

    @property
    def is_measured(self) -> bool:
        """Return whether windows are run as they will be from now on, and nothing of them is compared any more."""

    @property
    def may_rise(self) -> bool:
        """Return whether the rung above has not failed, but was left out for one that may be faster."""

    def look(self, limit_bytes: int, step: int) -> MemorySaving | None:
        """Look at the memory before a window; return what has changed by that."""

    def try_lower(self, batch: Callable[[], Any], step: int, limit_bytes: int, reason: str) -> MemorySaving | None:
        """Save more memory, for that may be faster."""

    def give_back(self, rungs: int, step: int, reason: str) -> MemorySaving:
        """Save as much as so many rungs above, which were tried or left out."""


class Plans:
    """The plans of one run, which a tuner decides."""

    def __init__(
        self,
        tuner: Tuner,
        saving: Saves,
        *,
        meter: Meter,
        memory: Memory,
        limit: Limit,
        announcer: Announcer,
        emit: Callable[[Event], None],
        number: Callable[[], int],
    ) -> None:
        """Set up.

        Args:
            tuner: decides how windows are cut.
            saving: decides how memory is saved where nothing fits otherwise.
            meter: gives memory back.
            memory: of the device.
            limit: what may be used of it.
            announcer: says what the user should know.
            emit: takes the events.
            number: () -> windows that were run and stepped on.
        """
        self._tuner = tuner
        self._saving = saving
        self._meter = meter
        self._memory = memory
        self._limit = limit
        self._announcer = announcer
        self._emit = emit
        self._number = number
        # A look may cost as much as a window of a tiny model.
        self.next_look = 0.0
        """The time from which on memory is to be looked at again."""
        self.announced: tuple[int, ...] = ()
        """What was announced for full windows, so that the same is not announced twice; empty before the first."""
        self.growing_from: int | None = None
        """The weight that plans were made of when growth began; None while nothing grows."""
        # Whether the last window passed the limit.
        self._was_over = False
        # What was known of sizes on the best rung so far, while another is tried: there it is true again.
        self._known_best: dict[str, Any] | None = None

    def look(self, window: Window) -> None:
        """Look at the memory before a window, for one that is short of it costs more than a look."""
        tuner, num_samples, lengths = self._tuner, window.num_samples, window.lengths
        if lengths is None:  # a short window is cut in passing: plans are those of full ones
            num_samples = max(num_samples, tuner.full_window[0])
        was_searching, weight = tuner.search.is_on, tuner.planned_weight
        old = tuner.plan(num_samples, lengths)
        limit_bytes, strain = self._limit.read(), self._memory.strained()
        if (told := self._saving.look(limit_bytes, self._number() + 1)) is not None:
            self.saves(told)
        if strain is not None and self._memory.can_enforce:  # only allocators with a cache have a limit of their own
            self._announcer.say_once(notices.cache_emptied(strain))
        reason = tuner.look(limit_bytes, strain, is_enforced=self._limit.is_enforced)
        if reason is not None:
            self.growing_from = None
            self._saving.contest.reopen()  # of micro-batches that are small by now
            self._meter.release()  # for whoever needs it
            self.replanned(old, tuner.plan(num_samples, lengths), reason)
        elif tuner.search.is_on and not was_searching:
            self.growing_from = weight  # the change is told when it is known to what
        if tuner.limits.least_bytes > self._limit.bytes:
            self._announcer.say_once(notices.above_limit(self._limit.bytes, tuner.limits.least_bytes))
        self.next_look = clock.now() + self._memory.reading_seconds

    def keep_limit(self, sizes: tuple[int, ...], lengths: Lengths, peak_bytes: int) -> None:
        """Give memory back after a window that passed the limit, which nobody else keeps; cut the next ones smaller."""
        # At once, for what the heap keeps may be all there is too much; the plan only if it happens again.
        if peak_bytes > self._tuner.limits.target_bytes:
            self._meter.release()
        self.tell_over(peak_bytes)
        smaller = self._tuner.measured(sizes, lengths, peak_bytes)
        if smaller is not None:
            self.replanned(sizes, smaller, "above what the limit leaves without the headroom")

    def tell_over(self, peak_bytes: int) -> None:
        """Say once that a window has passed the limit, which nobody else keeps, clearly or after one that had too.

        A trial may do so as well.
        """
        limit_bytes = self._limit.bytes
        # A heap is a little over now and then, seldom in two windows in a row.
        before, self._was_over = self._was_over, peak_bytes > limit_bytes
        # Where not even the smallest fits any more that is told by itself.
        is_again = before and self._tuner.limits.least_bytes <= limit_bytes
        if not self._limit.is_enforced and peak_bytes > (1 if is_again else CLEARLY_OVER) * limit_bytes:
            self._announcer.say_once(notices.over_limit(self._number() + 1, peak_bytes, limit_bytes))

    def settled(self, num_samples: int, lengths: Lengths = None) -> None:
        """Tell how windows are cut, now that the search, or the timing of plans, has ended."""
        # What the first search ends with is the plan of the run; what growth ends with is a change of it, if any. While
        # plans are timed it may be none; and of samples that differ in length each window has a plan of its own.
        if self.growing_from is None:
            self.announce(num_samples, lengths)
        elif not self._tuner.is_timing:
            old, new = (self._tuner.plan(num_samples, lengths, weight) for weight in (self.growing_from, None))
            # Where there is room for more, plans are timed again, and one of fewer may be the fastest.
            reason = "there is room for more" if max(new) >= max(old) else NO_FASTER
            self.replanned(old, new, reason, step=self._number())

    def resize(self, num_samples: int, lengths: Lengths = None, *, reason: str = "") -> None:
        """Make ready for full windows of so many samples; ``reason`` is told where it is not the effective batch."""
        tuner = self._tuner
        old = tuner.plan(*tuner.full_window) if self.announced and tuner.full_window[0] else None
        tuner.resize(num_samples, lengths)
        self._saving.contest.reopen()
        self.growing_from = None  # what grew was a plan of other windows
        if old is not None:  # else there is no plan yet to give up
            self.announced = tuner.plan(num_samples, lengths)
            self.replanned(old, self.announced, reason or f"the effective batch is {num_samples} now")

    def killed(self, micro_batch: int, length: int, num_samples: int) -> None:
        """Heed that the kernel killed the last process for its memory, in such a micro-batch.

        The next window has ``num_samples``.
        """
        tuner = self._tuner
        if micro_batch <= tuner.smallest:
            self._announcer.say(notices.killed_at_the_smallest(micro_batch))
            return
        tuner.killed(micro_batch, length)
        old = tuner.cut(num_samples, min(micro_batch, num_samples), 1)
        self.replanned(old, tuner.plan(num_samples), "the kernel killed the last process for its memory")

    def announce(self, num_samples: int, lengths: Lengths = None) -> None:
        """Say how such windows are cut, unless that was said before."""
        tuner = self._tuner
        # Where lengths differ and the next window is yet to be read, as by a resumed run, the last one stands for it.
        if lengths is None and tuner.full_window[0] == num_samples:
            lengths = tuner.full_window[1]
        sizes = tuner.plan(num_samples, lengths)
        if sizes == self.announced:
            return
        self.announced = sizes
        predicted = tuner.predicted_bytes(max(tuner.weights(sizes, lengths)))
        # Trials begin from released memory, and windows from what the process holds by now, its heap's rests included.
        if predicted is not None and not self._limit.is_enforced:
            predicted = max(predicted, self._memory.used())
            # With the plan, and not with the first window that does: then there is still time to stop.
            if predicted > self._limit.bytes:
                told = notices.over_limit(self._number() + 1, predicted, self._limit.bytes, is_expected=True)
                self._announcer.say_once(told)
        # With what it is expected to take, so that the record shows how good the memory model was.
        self._emit(
            Planned(
                step=self._number(),
                sizes=sizes,
                reason=tuner.reason(),
                predicted_bytes=predicted,
                prediction_error=prediction_error(tuner.history),
                limit_bytes=self._limit.bytes,
                memory_saving=self._saving.name,
            )
        )

    def replanned(self, old: tuple[int, ...], new: tuple[int, ...], reason: str, *, step: int | None = None) -> None:
        """Tell that plans have changed, as of the coming window unless another step is said."""
        if old == new:  # what was tried beyond the plan has failed, and the plan holds
            return
        self._emit(Replanned(step=self._number() + 1 if step is None else step, old=old, new=new, reason=reason))

    def saves(self, told: MemorySaving | Notice) -> None:
        """Tell how memory is saved from now on, and have sizes found out anew: they take other memory."""
        # That it cannot be saved leaves all as it is.
        if isinstance(told, Notice):
            self._announcer.say_once(told)
            return
        # Trials of another rung say nothing of this one: the same sizes have other peaks, and other seconds.
        self._emit(told)
        self._tuner.start_over(saves=not self._saving.is_off)
        self.growing_from, self.announced, self._known_best = None, (), None
        self._saving.contest.begin(None)

    def room(self, num_samples: int, trained: Sequence[torch.Tensor]) -> Room | None:
        """Return what there is for the samples of a window that was rolled back, beside the gradients to come.

        None where rungs are not chosen by what would be faster.
        """
        if not self._saving.contest.is_allowed:
            return None
        held = self._memory.used() + sum(p.nbytes for p in trained if p.requires_grad)
        most = min(self._tuner.ceiling, num_samples) // self._tuner.smallest
        return Room(max(0, self._tuner.limits.target_bytes - held), most)

    # Rungs by time: see ``planning.contest``.

    @property
    def are_settled(self) -> bool:
        """Return whether windows are run as they will be, as far as can be told."""
        return not (self._tuner.search.is_on or self._tuner.is_timing or self._saving.contest.is_awaited)

    @property
    def times_rung(self) -> bool:
        """Return whether a window's seconds are wanted to tell how fast the rung is."""
        return self._saving.contest.is_open and not (self._tuner.search.is_on or self._tuner.is_timing)

    def timed(self, seconds: float, window: Window) -> None:
        """Take the time of a window that was run at once."""
        # What is compared of a rung's first windows takes longer, and a short window tells of other micro-batches.
        if self.times_rung and self._saving.is_measured and window.num_samples == self._tuner.full_window[0]:
            self._saving.contest.observe(seconds / (sum(window.lengths) if window.lengths else window.num_samples))

    def weigh(self, window: Window, batch: Callable[[], Any]) -> None:
        """Try the next rung before a window where it may be faster, or come back from one that was not.

        Args:
            window: the samples.
            batch: () -> the smallest micro-batch.
        """
        tuner, contest, step = self._tuner, self._saving.contest, self._number() + 1
        # Where memory, or the time that windows take, is never the same twice, nobody knows when it would be told.
        if contest.is_overdue() and contest.best is not None:
            self._go_back(contest.best, f"the plan was not settled after {contest.windows} windows", batch)
            return
        if not self.times_rung:
            return
        sizes = tuner.plan(*tuner.full_window)
        most, best, seconds = max(sizes), contest.best, contest.seconds
        # Times are of weights, as samples that differ in length have them.
        weights = tuner.weights(sizes, tuner.full_window[1])
        # Where there is room for twice as many it is not for memory that there are no more of them at a time.
        of_twice = tuner.predicted_bytes(2 * max(weights))
        has_room = of_twice is not None and of_twice <= tuner.limits.target_bytes
        may_gain = not has_room and is_worth_it(weights, tuner.time_model)
        may_rise = best is None and self._saving.may_rise and most != contest.beaten_with
        may_rise = may_rise and is_worth_rising(weights, tuner.rough_times)
        if best is None and not (may_gain or may_rise):
            contest.close()
        # Each rung is timed in the plan that it has settled on, with as many samples at a time as there is room for.
        has_lost = contest.has_lost(most)
        if not contest.is_open or (seconds is None and not has_lost):
            return
        is_below, is_above = best is not None and best.rungs > 0, best is not None and best.rungs < 0
        # The next one may do although this one does not: every second block may leave too much for two at once.
        is_best = best is None or not has_lost
        if best is None or is_best:
            best, self._known_best = Best(seconds or 0.0, most, 0), tuner.state_dict()
        known, told, rungs = self._known_best, None, -1 if may_rise else best.rungs + 1
        why = (
            f"tried, for with {'less to compute' if may_rise else 'more at a time'} {self._unit} may take less than "
            f"the {_shown(best.seconds)} that it {'takes now' if is_best else 'took before'}, in micro-batches of "
            f"{best.most}"
        )
        if may_rise:
            told = self._saving.give_back(1, step, why)
        elif not is_above and (has_lost or may_gain):
            told = self._saving.try_lower(batch, step, self._limit.bytes, why)
        if told is not None:
            self.saves(told)
            contest.begin(best._replace(rungs=rungs))
            self._known_best = known
        elif has_lost:
            self._go_back(best, _lost(best, seconds, self._unit), batch)
        else:
            contest.close(most if is_below else 0)

    def comes_back(self, window: Window, batch: Callable[[], Any]) -> bool:
        """Come back from a rung that is tried, if it has just shown that it cannot win; return whether it has.

        Args:
            window: the samples, of which a micro-batch has run out of memory.
            batch: () -> the smallest micro-batch.
        """
        contest = self._saving.contest
        # Of samples of different lengths nobody knows how many the largest micro-batch may have.
        if contest.best is None or window.lengths is not None or not contest.has_lost(self._tuner.largest):
            return False
        self._go_back(contest.best, _lost(contest.best, contest.seconds, self._unit), batch)
        return True

    @property
    def _unit(self) -> str:
        """Return what times of rungs are of: of samples that differ in length, of their length."""
        return "a sample" if self._tuner.full_window[1] is None else "a unit of a sample's length"

    def gives_up(self, batch: Callable[[], Any]) -> bool:
        """Come back from a rung that is tried, on which not even the smallest micro-batch fits; return whether it has.

        No other is tried in this run: what the process holds by now, and gives back to nobody, may be too much for it.

        Args:
            batch: () -> the smallest micro-batch.
        """
        contest = self._saving.contest
        if contest.best is None or contest.best.rungs <= 0:
            return False
        self._go_back(contest.best, "not even the smallest micro-batch fits there", batch)
        contest.is_allowed = False
        return True

    def _go_back(self, best: Best, why: str, batch: Callable[[], Any]) -> None:
        """Come back to the best rung, from one of which it is said what speaks against it."""
        tuner, saving, step, known = self._tuner, self._saving, self._number() + 1, self._known_best
        is_above, why = best.rungs < 0, f"gone back, for {why}"
        if not is_above:
            self.saves(saving.give_back(best.rungs, step, why))
        elif (told := saving.try_lower(batch, step, self._limit.bytes, why)) is not None:
            self.saves(told)
        saving.contest.close(best.most if is_above else 0)
        if known is not None:
            # Nothing has to be searched for or timed once more.
            tuner.load_state_dict(known, is_same_device=True)
            self.announce(*tuner.full_window)


def _lost(best: Best, seconds: float | None, unit: str) -> str:
    """Return in words why a rung has lost against the best one; None: it was not timed, for it cannot win."""
    if seconds is None:
        return "there was room for no more samples at a time than before, and each takes more to compute"
    return f"{unit} took {_shown(seconds)}, and {_shown(best.seconds)} before, in micro-batches of {best.most}"


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"
