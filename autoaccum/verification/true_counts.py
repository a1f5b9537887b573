"""Measures what micro-batches truly count of terms whose counts may be kept from 0, as by ``clamp(min=1)``.

Joined with samples that count enough, a micro-batch makes a count grow by what it truly counts, whatever is kept from
0. That takes forwards of a few samples, and nothing of it remains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from autoaccum.data.base import Window
from autoaccum.loss.conclusions import finite
from autoaccum.loss.graph import graph_alone
from autoaccum.loss.hypotheses import Hypothesis, kinds_in
from autoaccum.memory.oom import TRIES, RanOut, attempt
from autoaccum.verification import readings
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.samples import MOST
from autoaccum.window.gradient import Gradient
from autoaccum.window.job import Job
from autoaccum.window.kept import ROUNDING, may_stand_for
from autoaccum.window.several import KeptCount

_MOST_GROUPS = 8
"""Micro-batches, or groups of them, that are tried to be joined with others."""
Piece = tuple[int, int]
"""Where a micro-batch begins in its window, and its samples."""


def true_counts(
    job: Job,
    window: Window,
    gradient: Gradient,
    hypothesis: Hypothesis,
    most: int,
    told: Collection[KeptCount] = (),
) -> dict[KeptCount, float]:
    """Measure what micro-batches truly count whose terms have counts that may be kept from 0.

    Args:
        job: what the run computes.
        window: the samples.
        gradient: that of the window, which says what is in doubt.
        hypothesis: the one that is held, which names the terms.
        most: samples that there is room for in a forward.
        told: those of which it is known already, which may count nothing.

    Returns:
        what each of them counts; without those of which it cannot be told.
    """
    names, found = list(kinds_in(hypothesis) or ()), dict[KeptCount, float]()
    pieces = readings.pieces(gradient)
    # One term after the other, for each counts the most in other samples; not those of a window that has more of them.
    for name in dict.fromkeys(doubt.name for doubt in gradient.doubts if doubt.name in names):
        doubts = {pieces[doubt.index]: doubt.count for doubt in gradient.doubts if doubt.name == name}
        counted = partial(_counted, job, window, names.index(name), len(names))
        dense = readings.densest(gradient, names.index(name))
        shown = {piece: count for piece, count in dense.items() if (*piece, name) not in told}
        counts = _true_counts_of(doubts, shown, counted, most)
        found |= {(*piece, name): count for piece, count in counts.items()}
    return found


def _true_counts_of(
    doubts: dict[Piece, float], shown: Mapping[Piece, float], counted: partial[list[float] | None], most: int
) -> dict[Piece, float]:
    """Return what micro-batches count of one term.

    Args:
        doubts: these, with what their graphs show: the least that the term ever counts.
        shown: the same of all micro-batches of the window of which the term counts anything, the densest first.
        counted: (lists of positions) -> what the term counts in each list as a batch of its own.
        most: samples that there is room for.
    """
    # As many as are measured anyway beside one of the window's own, of which next to nothing is kept.
    most = max(most, MOST + max(size for _, size in doubts))
    found: dict[Piece, float] = {}
    for base in _bases(doubts, shown, most):
        of = [piece for piece in base if piece in doubts]
        waiting = [piece for piece in doubts if piece not in found and piece not in of]
        inside, largest = _positions(base), max((size for _, size in waiting), default=1)
        # As many micro-batches at once as there is room for.
        several = max(1, (most - len(inside)) // largest)
        for chosen in [waiting[at : at + several] for at in range(0, len(waiting), several)] or [[]]:
            counts = counted([inside, *([*inside, *_positions([piece])] for piece in chosen)])
            if counts is None:
                return found
            alone, *joined = counts
            total = sum(shown[piece] for piece in base)
            # What counts for sure counts so together. Of others it has to be more than what they may be kept at, unless
            # these are all: a window that is kept from 0 as a whole counts that.
            least = abs(total) if not of else max(map(abs, doubts.values()))
            if abs(alone) < least * (1 - ROUNDING) or (of and waiting and abs(alone) <= least * (1 + ROUNDING)):
                break
            # What the base itself counts is known together, which is all that the window's total needs; and one by one
            # where what is left of it counts enough.
            if of and of[0] not in found and may_stand_for(alone, total):
                found |= {piece: doubts[piece] * alone / total for piece in of}
                without = counted([_positions([other for other in of if other != piece]) for piece in of])
                rest = dict(zip(of, without or [0.0] * len(of), strict=True))
                if all(abs(count) > least * (1 + ROUNDING) for count in rest.values()):
                    found |= {piece: _exact(alone - count, doubts[piece]) for piece, count in rest.items()}
            pairs = zip(chosen, (both - alone for both in joined), strict=True)
            found |= {piece: _exact(more, doubts[piece]) for piece, more in pairs if may_stand_for(more, doubts[piece])}
        if len(found) == len(doubts):
            break
    return found


def _bases(doubts: dict[Piece, float], shown: Mapping[Piece, float], most: int) -> Iterator[list[Piece]]:
    """Yield micro-batches to join others with, until these count enough."""
    room = most - max(size for _, size in doubts)  # for a base, beside one of those that are joined with it
    certain, doubtful = ([piece for piece in shown if (piece in doubts) is is_in] for is_in in (False, True))
    # One that counts for sure is enough; where none does some stand in for others, or all of them are known together.
    if not certain and sum(size for _, size in doubtful) <= most:
        yield doubtful
    yield from ([piece] for piece in certain[:_MOST_GROUPS] if piece[1] <= room)
    groups: list[list[Piece]] = [[]]
    for piece in doubtful:
        if sum(size for _, size in groups[-1]) + piece[1] > room:
            groups.append([])
        groups[-1].append(piece)
    yield from [group for group in groups if len(group) > 1][:_MOST_GROUPS]


def _positions(pieces: Sequence[Piece]) -> list[int]:
    return [position for start, size in pieces for position in range(start, start + size)]


def _exact(count: float, shown: float) -> float:
    """Return a count without the rounding of what is next to nothing, or next to all that is shown."""
    return next((exact for exact in (0.0, shown) if abs(count - exact) <= ROUNDING * abs(shown)), count)


def _counted(
    job: Job, window: Window, place: int, num_terms: int, batches: Sequence[Sequence[int]]
) -> list[float] | None:
    """Measure what a term counts in some samples of a window, as batches of their own; None where that fails.

    Args:
        job: what the run computes.
        window: the samples.
        place: which term.
        num_terms: terms of the loss.
        batches: the positions of the samples of each.
    """
    chosen = list(dict.fromkeys(position for batch in batches for position in batch))
    places = {position: index for index, position in enumerate(chosen)}

    def measured() -> list[float] | None:
        # A graph is all that is read: nothing is kept for a backward.
        with Measurement(job, window, chosen, forward_only=True) as measurement, graph_alone():
            measurement.run_whole()
            parts = [tuple(places[position] for position in batch) for batch in batches]
            if measurement.draws_anything and not measurement.counts_alike(parts[0]):
                return None  # what is drawn decides what counts, and was drawn otherwise
            terms = [measurement.shown_of(part).terms for part in parts]
            if any(len(found) != num_terms for found in terms):
                return None
            if any(found[place].kind == "unknown" and not found[place].numbers for found in terms):
                return None  # its graph shows no count
            return [finite(found[place].divisor) for found in terms]

    for _ in range(TRIES):
        try:
            outcome = attempt(measured)
        except Exception:  # what cannot be computed of these samples together
            return None
        if not isinstance(outcome, RanOut):
            return outcome
    return None
