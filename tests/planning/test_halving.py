"""Sizes that ranks agree on: training's, and half of what has failed on any of them."""

from __future__ import annotations

from autoaccum.planning.attempts import Piece
from autoaccum.planning.halving import Halving
from autoaccum.planning.limits import Limits


def sizes(trials: Halving, num_samples: int, ceiling: int, fails_above: int) -> list[int]:
    """Return the sizes of a window's pieces that went well, where memory does for so many samples."""
    found = []
    for piece in trials.window(num_samples, ceiling):
        assert not piece.is_trial
        if piece.size > fails_above:
            trials.ran_out(piece)
        else:
            trials.fitted(piece, None)
            found.append(piece.size)
    return found


def test_training_s_sizes_are_taken_and_halved_where_they_fail() -> None:
    trials = Halving(Limits(100, headroom=0.0))
    assert sizes(trials, 20, 8, 8) == [8, 8, 4]
    assert sizes(trials, 20, 8, 5) == [4] * 5
    assert sizes(trials, 9, 8, 1) == [1] * 9
    assert trials.size(8) == 1


def test_no_size_is_below_the_smallest() -> None:
    trials = Halving(Limits(100, headroom=0.0), smallest=2)
    trials.ran_out(Piece(0, 4, is_trial=False))
    assert trials.size(8) == 2
    assert sizes(trials, 5, 8, 8) == [2, 3]


def test_what_failed_is_kept() -> None:
    trials, again = Halving(Limits(100, headroom=0.0)), Halving(Limits(100, headroom=0.0))
    trials.ran_out(Piece(0, 8, is_trial=False))
    again.load_state_dict(trials.state_dict())
    assert again.size(8) == trials.size(8) == 4
