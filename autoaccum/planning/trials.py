"""The search of probe and of validation, whose trials need no undo after memory has run out.

It speaks the protocol of ``attempts``: iterate over pieces, and say of each whether it fitted or ran out of memory. A
piece that ran out of memory is asked for again in smaller ones, for nothing that came before it has to be undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoaccum.planning.attempts import Piece
from autoaccum.planning.costs import MemoryModel, Trial, bounds, fit_memory_model
from autoaccum.planning.extrapolation import reach
from autoaccum.planning.limits import Limits
from autoaccum.planning.search import next_trial


class Trials:
    """What was tried, and what is to be tried next."""

    def __init__(
        self,
        limits: Limits,
        *,
        smallest: int = 1,
        first: int | None = None,
        growth: int = 2,
        start_bytes: int | None = None,
    ) -> None:
        """Begin with nothing known.

        Args:
            limits: what trials may take.
            smallest: the fewest samples to try.
            first: the samples to begin with; the smallest when left out.
            growth: how many times as large as the largest success a trial may be.
            start_bytes: what is in use before the first trial; None where it is not read.
        """
        self._limits = limits  # shared with whoever looks at the memory: they move
        self.smallest = smallest
        """The fewest samples to try."""
        self.first = first
        """The samples to begin with; None: the smallest."""
        self._growth = growth
        self._start_bytes = start_bytes
        self._done = 0  # samples of the present window that went well
        self.history: list[Trial] = []
        """Oldest first."""

    @property
    def largest(self) -> int:
        """Return the largest size that fitted; 0 while none did."""
        return bounds(self.history)[0]

    @property
    def memory_model(self) -> MemoryModel | None:
        """Return the memory model fitted to the trials so far; None while too little is known."""
        return fit_memory_model(self.history)

    def predicted_bytes(self, size: int) -> int | None:
        """Return the peak that is expected at that size; None where too little is known for a prediction."""
        known = reach(self.history, start_bytes=self._start_bytes)
        return None if known is None else known.predict(size)

    def until_known(self, ceiling: int) -> Iterator[Piece]:
        """Yield one trial after the other, until the largest size up to ``ceiling`` is known."""
        # What became of the last one is in the history by the time that the next is asked for.
        while size := self._next(ceiling):
            yield Piece(0, size, is_trial=True)

    def window(self, num_samples: int, ceiling: int) -> Iterator[Piece]:
        """Yield the pieces of a window, none above ``ceiling``: trials while there is something to be found out."""
        self._done = 0
        # A piece that ran out of memory is not done, and its samples come again in the next, which is smaller.
        while (left := num_samples - self._done) > 0:
            size = min(self.size(ceiling), left)
            if 0 < left - size < self.smallest and self.smallest > 1:
                size = self._with_rest(size, left)
            # Its size alone makes it a trial: what is left of a window may be less than what has fitted.
            yield Piece(self._done, size, is_trial=size > self.largest)

    def size(self, ceiling: int) -> int:
        """Return the samples of the next piece."""
        # The next trial, or what is known to fit; or as few as may be, while nothing is known and nothing left to try.
        return min(ceiling, self._next(ceiling) or self.largest or self.smallest)

    def _with_rest(self, size: int, left: int) -> int:
        """Return the samples of the next piece where after ``size`` of them fewer than the smallest would be left."""
        if left >= 2 * self.smallest:
            return left - left // 2
        # All of them at once, unless that is known to be too much: then there is no other way than a short one.
        fails = bounds(self.history)[1]
        return left if fails is None or left < fails else size

    def fitted(
        self,
        piece: Piece,
        peak_bytes: int | None,
        seconds: float | None = None,
        predicted_bytes: int | None = None,
        allocated_bytes: int | None = None,
    ) -> bool:
        """Say that a piece ran, and what it took where that was measured; return whether the limit allows as much."""
        self._done += piece.size
        if peak_bytes is None:
            return True
        fits = self._limits.allows(peak_bytes, is_smallest=piece.size <= self.smallest)
        # That what fitted before fits again is no news; that it passes the limit now is, for memory may have gone.
        if piece.is_trial or not fits:
            self.history.append(
                Trial(
                    micro_batch=piece.size,
                    fits=fits,
                    peak_bytes=peak_bytes,
                    predicted_bytes=predicted_bytes,
                    seconds=seconds,
                    allocated_bytes=allocated_bytes,
                )
            )
        return fits

    def ran_out(self, piece: Piece, predicted_bytes: int | None = None) -> None:
        """Say that a piece ran out of memory."""
        # Without a peak: what was reached before the error is less than what would have been needed.
        self.history.append(Trial(micro_batch=piece.size, fits=False, predicted_bytes=predicted_bytes))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain values, for a checkpoint."""
        return [trial.state_dict() for trial in self.history]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Put back what ``state_dict`` returned."""
        self.history[:] = [Trial(**trial) for trial in state]

    def _next(self, ceiling: int) -> int | None:
        return next_trial(
            self.history,
            limit_bytes=self._limits.target_bytes,
            ceiling=ceiling,
            smallest=self.smallest,
            first=self.first,
            growth=self._growth,
            start_bytes=self._start_bytes,
        )


class Halving(Trials):
    """Sizes on which several ranks agree without an exchange: training's, and half of them after each failure.

    Ranks that run micro-batches together must choose the same sizes, so the memory of one rank decides nothing.
    All ranks learn which sizes failed and halve alike. No size is tried, because training's sizes fit.
    """

    def window(self, num_samples: int, ceiling: int) -> Iterator[Piece]:
        """Yield the pieces of a window, none above ``ceiling``."""
        for piece in super().window(num_samples, ceiling):
            yield Piece(piece.start, piece.size, is_trial=False)

    def size(self, ceiling: int) -> int:
        """Return the samples of the next piece."""
        # Half of the smallest size that failed, which a checkpoint keeps.
        fails = bounds(self.history)[1]
        return ceiling if fails is None else max(self.smallest, min(ceiling, fails // 2))
