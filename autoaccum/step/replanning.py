"""Plans as they change: looked at before windows, as memory comes and goes, and told, each once.

All plans, and all changes of plan, are told by this: whoever has found one out says so here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from autoaccum.data.base import Window
from autoaccum.events import Event, MemorySaving, Notice, Planned, Replanned
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.planning.costs import prediction_error
from autoaccum.planning.cuts import Lengths
from autoaccum.planning.limits import CLEARLY_OVER
from autoaccum.planning.searching import NO_FASTER
from autoaccum.planning.tuner import Tuner
from autoaccum.step import notices
from autoaccum.step.meter import Meter
from autoaccum.step.notices import Announcer


class Saves(Protocol):
    """What decides how memory is saved: see ``memory_saving``."""

    name: str
    is_off: bool

    def look(self, limit_bytes: int, step: int) -> MemorySaving | None:
        """Look at the memory before a window; return what has changed by that."""


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
        # Trials of another level say nothing of this one: the same sizes have other peaks, and other seconds.
        self._emit(told)
        self._tuner.start_over(saves=not self._saving.is_off)
        self.growing_from, self.announced = None, ()

    @property
    def are_settled(self) -> bool:
        """Return whether windows are run as they will be, as far as can be told."""
        return not (self._tuner.search.is_on or self._tuner.is_timing)
