"""The protocol by which windows are cut: pieces are handed out one by one, and what became of each is said back.

::

    attempt = tuner.window(num_samples, lengths)
    for piece in attempt:
        with meter.measuring(piece) as reading:
            run(piece)
        attempt.fitted(reading)          # or, outside of this loop, attempt = attempt.ran_out(...)

``fit`` and ``Accumulator`` drive it with windows, ``probe`` with throw-away trials, a validation with what it reads,
and the tests with a simulated device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from autoaccum.planning.cuts import Lengths


class Piece(NamedTuple):
    """A micro-batch that is to be run next."""

    # A tuple is made faster than a frozen dataclass; where samples differ in length each micro-batch needs a new one.

    start: int
    """Samples of the window that come before it."""
    size: int
    """Its samples."""
    length: int = 1
    """Of its longest sample, to which the others are padded; 1 where samples are alike."""
    is_trial: bool = False
    """Whether its memory and time are to be measured, for nothing is known of its size yet."""


class Reading:
    """What a piece took, and the context that it runs in: a meter's own one measures it."""

    # This one measures nothing. It is what the tests' devices of numbers return, which know what a piece takes.

    __slots__ = ("allocated_bytes", "fell_short", "is_cold", "peak_bytes", "piece", "seconds", "start_bytes")

    def __init__(self, piece: Piece | None, peak_bytes: int | None = None, seconds: float | None = None) -> None:
        self.piece = piece
        """The piece, if it was a trial; None when it was not measured."""
        self.peak_bytes = peak_bytes
        """Most memory in use at once while it ran; None where it was not measured."""
        self.seconds = seconds
        """Wall time of its forward and backward; None where it was not measured."""
        self.allocated_bytes: int | None = None
        """Most that tensors held at once while it ran; None where nobody tells."""
        self.start_bytes: int | None = None
        """What tensors held before it; None where nobody tells."""
        self.fell_short = False
        """Whether memory ran out within it, and whoever asked for it made do without."""
        self.is_cold = False
        """Whether something was made ready in it that no later one needs, such as compiled code."""

    def take(self, peak_bytes: int, allocated_bytes: int, *, fell_short: bool) -> Reading:
        """Take over what the memory says at the end of the piece; return this."""
        self.peak_bytes, self.fell_short = peak_bytes, fell_short
        # The same number is no news: there nobody tells tensors from the rest.
        self.allocated_bytes = None if allocated_bytes == peak_bytes else allocated_bytes
        return self

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        return None


# One for all of them: nothing is ever written to it.
NOT_MEASURED = Reading(None)
"""Stands for the reading of every piece that is no trial."""


@lru_cache(maxsize=64)
def pieces_of(sizes: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return the pieces of a window of samples that are alike, cut into these sizes: the same for nearly every window.

    >>> pieces_of((3, 2))
    (Piece(start=0, size=3, length=1, is_trial=False), Piece(start=3, size=2, length=1, is_trial=False))
    """
    return tuple(pieces_from(sizes, None))


def pieces_from(sizes: Iterable[int], lengths: Lengths) -> list[Piece]:
    """Return the pieces of a window cut into these sizes, none of them a trial."""
    pieces = []
    start = 0
    for size in sizes:
        pieces.append(Piece(start, size, length_at(lengths, start)))
        start += size
    return pieces


def length_at(lengths: Lengths, position: int) -> int:
    """Return the length of the sample there, to which those after it are padded; 1 where samples are alike."""
    return 1 if lengths is None else lengths[position]


class Decider(Protocol):
    """What an attempt asks, and reports to: the tuner."""

    def pieces(self, num_samples: int, lengths: Lengths) -> Iterator[Piece]:
        """Return the pieces of a window one by one, chosen as the outcomes of those before come in."""

    def plan(self, num_samples: int, lengths: Lengths) -> tuple[int, ...]:
        """Return how to cut a window without trials."""

    def cut(self, num_samples: int, max_micro_batch: int, smallest: int | None) -> tuple[int, ...]:
        """Return how a window of samples that are alike is cut into micro-batches of at most so many samples."""

    def observe(
        self,
        micro_batch: int,
        peak_bytes: int,
        seconds: float | None,
        length: int,
        *,
        allocated_bytes: int | None,
        start_bytes: int | None,
        fell_short: bool,
    ) -> None:
        """Take the reading of a trial."""

    def is_to_be_repeated(self, micro_batch: int) -> bool:
        """Take a trial that tells nothing, for something was made ready in it; return whether it is run once more."""

    def out_of_memory(
        self,
        micro_batch: int,
        num_samples: int,
        lengths: Lengths,
        *,
        length: int,
        peak_bytes: int | None,
        limit_bytes: int,
    ) -> tuple[int, ...]:
        """Take a failure, and return a smaller plan for its window."""

    def timed(self, seconds: float, num_samples: int, lengths: Lengths) -> None:
        """Take the time of a whole window."""

    def committed(self, sizes: Sequence[int], lengths: Lengths) -> None:
        """Take the sizes of a window that went well."""


class Attempt:
    """One try at a window, as the module ``attempts`` has it: iterate, and say what became of each piece."""

    __slots__ = ("_lengths", "_sizes", "_tuner", "is_timed", "num_samples", "replaced", "replays")

    def __init__(
        self, tuner: Decider, num_samples: int, lengths: Lengths, sizes: Sequence[int] | None, *, is_timed: bool = False
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
        """Say that a piece ran well.

        Raises:
            NothingFitsError: it was a trial of the smallest micro-batch, and passed the limit.
        """
        # That a piece ran well is no news, unless it was a trial: what ``committed`` says at the end is enough.
        piece = reading.piece
        if piece is not None and reading.peak_bytes is not None:
            # Its time and its peak may be those of a compiler. Lengths make each micro-batch a size of its own, whose
            # peak is all that will ever be known of it.
            if reading.is_cold and self._lengths is None and self._tuner.is_to_be_repeated(piece.size):
                return
            self._tuner.observe(
                piece.size,
                reading.peak_bytes,
                None if reading.is_cold else reading.seconds,
                piece.length,
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
