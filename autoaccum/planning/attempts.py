"""The protocol by which windows are cut: pieces are handed out one by one, and what became of each is said back.

::

    attempt = tuner.window(num_samples, lengths)
    for piece in attempt:                # of a trial the reading is told
        with meter.measuring(piece) as reading:
            run(piece)
        attempt.fitted(reading)          # or, outside of this loop, attempt = attempt.ran_out(...)

``fit`` and ``Accumulator`` drive it with windows, ``probe`` with throw-away trials, a validation with what it reads,
and the tests with a simulated device.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

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
    """What a trial took."""

    __slots__ = ("allocated_bytes", "fell_short", "is_cold", "peak_bytes", "piece", "seconds", "start_bytes")

    def __init__(self, piece: Piece, peak_bytes: int | None = None, seconds: float | None = None) -> None:
        self.piece = piece
        """The trial."""
        self.peak_bytes = peak_bytes
        """Most memory in use at once while it ran; None until it has ended well."""
        self.seconds = seconds
        """Wall time of its forward and backward; None where nobody tells."""
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
