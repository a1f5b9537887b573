"""What is done when not even the smallest micro-batch fits: try again at once, wait, or give up.

A fault may pass: an allocator fails while gigabytes are free, or another process holds for a minute what this one
needs. What is certain not to pass, because all of the memory that there is would not be enough, is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoaccum.events import Waiting
from autoaccum.memory import clock
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import asked_bytes

AT_ONCE = 2
"""Try again so often without a wait where memory was free: such a fault has nothing to wait for."""
FIRST_WAIT = 1.0
"""Seconds before the first try after a wait; each later one comes after twice as long."""
LONGEST_WAIT = 30.0
"""Seconds from one try to the next at most, however long the patience is."""
LOOK_EVERY = 1.0
"""Seconds between looks at the limit while others hold what is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A micro-batch for which memory did not do, and that cannot be made smaller."""

    micro_batch: int
    """Its samples."""
    peak_bytes: int
    """The most that was in use."""
    error: Exception
    """What was raised: without frames, so that it pins nothing."""
    ran: bool = False
    """Whether it ran nevertheless, past a limit that nobody enforces: then its peak is all that it needs."""

    @property
    def needed_bytes(self) -> int:
        """Return what it needs at least: what was in use, and what was asked for last where the error tells that."""
        return self.peak_bytes + (0 if self.ran else asked_bytes(self.error) or 0)


class Patience:
    """How often, and after which waits, the same micro-batch is tried again: for one window, or one validation."""

    def __init__(self, limit: Limit, seconds: float, emit: Callable[[Waiting], None], *, step: int, phase: str) -> None:
        """Begin with nothing tried.

        Args:
            limit: what may be used, read again while others are waited for.
            seconds: to wait in all.
            emit: is told when a wait begins.
            step: the number of the optimizer step, for what is told.
            phase: "training", "validation" or "probe", likewise.
        """
        self._limit = limit
        self._seconds = seconds
        self._emit = emit
        self.step = step
        """The number of the optimizer step."""
        self._phase = phase
        self._at_once = 0  # tries so far without a wait
        self._left = seconds  # of the patience
        self._next_wait = FIRST_WAIT

    def may_pass(self, shortage: Shortage, least_bytes: int = 0) -> bool:
        """Return whether to try again: True at once, or after a wait; False when it would be in vain.

        It is asked when everything that can be given back has been given back.

        Args:
            shortage: what failed.
            least_bytes: what such a micro-batch was seen to need before; 0 where it never ran.
        """
        needed = max(shortage.needed_bytes, least_bytes)
        if needed > self._limit.most():
            return False  # nobody holds what is missing: there is none
        is_free = needed <= self._limit.now()
        if is_free and self._at_once < AT_ONCE:
            self._at_once += 1
            return True
        if self._left <= 0:
            return False
        if self._left == self._seconds:
            self._emit(
                Waiting(
                    step=self.step,
                    phase=self._phase,
                    micro_batch=shortage.micro_batch,
                    needed_bytes=needed,
                    limit_bytes=self._limit.now(),
                    seconds=self._seconds,
                )
            )
        self._wait(None if is_free else needed)
        return True

    def _wait(self, needed_bytes: int | None) -> None:
        """Wait until the next try, or until so many bytes may be used, if that comes sooner."""
        # By what was slept, and not by what the clock shows: the tries in between may take long, and are no waiting.
        left = min(self._next_wait, self._left)
        self._left -= left
        self._next_wait = min(2 * self._next_wait, LONGEST_WAIT)
        while left > 0:
            nap = min(LOOK_EVERY, left)
            clock.sleep(nap)
            left -= nap
            if needed_bytes is not None and self._limit.now() >= needed_bytes:
                return
