"""A search where no window is at stake: each size is found out once, and a failure is tried again in smaller ones."""

from __future__ import annotations

import json

import pytest

from autoaccum.planning.attempts import Piece
from autoaccum.planning.costs import Trial
from autoaccum.planning.limits import Limits
from autoaccum.planning.trials import Halving, Trials


def peak(size: int) -> int:
    return 1000 + 7 * size


def trials(truth: int = 1000, *, smallest: int = 1, first: int | None = None, growth: int = 2) -> Trials:
    return Trials(Limits(peak(truth), 0.0), smallest=smallest, first=first, growth=growth)


def probe(made: Trials, ceiling: int, truth: int = 1000) -> list[Piece]:
    """Run trials until the largest is known, on a device that holds so many samples; those that there were."""
    found = []
    for piece in made.until_known(ceiling):
        found.append(piece)
        assert len(found) < 20, "tried without end"
        if piece.size > truth:
            made.ran_out(piece)
        else:
            made.fitted(piece, peak(piece.size))
    return found


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1, 2, 4, 8, 16, 32, 64]),
        ({"growth": 64}, [1, 16, 64]),
        ({"first": 16, "growth": 64}, [16, 64]),
        ({"smallest": 2}, [2, 4, 8, 16, 32, 64]),
    ],
)
def test_trials_grow_up_to_the_most_that_is_of_use(options: dict[str, int], sizes: list[int]) -> None:
    made = trials(**options)  # type: ignore[arg-type]
    assert probe(made, 64) == [Piece(0, size, is_trial=True) for size in sizes]
    assert made.largest == 64


def test_the_largest_within_the_limit_is_found_without_an_error() -> None:
    made = trials(truth=21)
    assert [piece.size for piece in probe(made, 64, truth=21)] == [1, 2, 4, 8, 16, 21]
    assert (made.largest, all(trial.fits for trial in made.history)) == (21, True)


def test_a_size_that_ran_out_of_memory_is_not_asked_for_again() -> None:
    """Here something that no peak shows leaves room for five."""
    made = trials()
    assert [piece.size for piece in probe(made, 64, truth=5)] == [1, 2, 4, 8, 6, 5]
    assert made.largest == 5
    assert [trial.micro_batch for trial in made.history if not trial.fits] == [8, 6]


def test_a_window_is_cut_into_trials_while_there_is_something_to_be_found_out() -> None:
    made = trials()
    windows = []
    for _ in range(3):
        pieces = []
        for piece in made.window(10, 8):
            made.fitted(piece, peak(piece.size))
            pieces.append((piece.start, piece.size, piece.is_trial))
        windows.append(pieces)
    assert windows == [
        [(0, 1, True), (1, 2, True), (3, 4, True), (7, 3, False)],
        [(0, 8, True), (8, 2, False)],
        [(0, 8, False), (8, 2, False)],
    ]


def test_a_piece_that_ran_out_of_memory_is_asked_for_again_in_smaller_ones() -> None:
    made = trials()
    pieces = []
    for piece in made.window(7, 4):
        pieces.append((piece.start, piece.size, piece.is_trial))
        assert len(pieces) < 20, "asked for without end"
        if piece.size > 2:
            made.ran_out(piece)
        else:
            made.fitted(piece, peak(piece.size))
    assert pieces == [(0, 1, True), (1, 2, True), (3, 4, True), (3, 3, True), (3, 2, False), (5, 2, False)]


def test_where_nothing_has_fitted_one_sample_is_tried() -> None:
    made = trials()
    made.ran_out(Piece(0, 1, is_trial=True))
    assert (made.largest, made.size(8)) == (0, 1)


def test_a_peak_past_the_limit_is_a_failure_that_was_seen_to_its_end() -> None:
    made = trials(truth=20)
    assert made.fitted(Piece(0, 20, is_trial=True), peak(20), 0.5, predicted_bytes=1200)
    assert not made.fitted(Piece(0, 21, is_trial=True), peak(21))
    assert made.history == [
        Trial(micro_batch=20, fits=True, peak_bytes=1140, predicted_bytes=1200, seconds=0.5),
        Trial(micro_batch=21, fits=False, peak_bytes=1147),
    ]


def test_what_is_no_trial_is_news_only_when_it_passes_the_limit() -> None:
    made = trials(truth=20)
    assert made.fitted(Piece(0, 20), peak(20))
    assert made.fitted(Piece(0, 20, is_trial=True), None)
    assert made.history == []
    assert not made.fitted(Piece(0, 21), peak(21))
    assert [trial.micro_batch for trial in made.history] == [21]


def test_two_sizes_give_a_model() -> None:
    made = trials()
    made.fitted(Piece(0, 1, is_trial=True), peak(1))
    assert made.memory_model is None
    made.fitted(Piece(0, 2, is_trial=True), peak(2))
    assert made.memory_model is not None
    assert made.memory_model.predict(50) == peak(50)


def test_three_sizes_that_lie_on_a_line_with_the_start_foretell_a_peak() -> None:
    made = Trials(Limits(peak(1000), 0.0), growth=64, start_bytes=1000)
    for size in (1, 16):
        made.fitted(Piece(0, size, is_trial=True), peak(size))
        assert made.predicted_bytes(50) is None
    made.fitted(Piece(0, 40, is_trial=True), peak(40))
    assert made.predicted_bytes(50) == peak(50)


def test_what_was_tried_is_kept_as_plain_values() -> None:
    first, second = trials(), trials()
    probe(first, 64, truth=5)
    second.ran_out(Piece(0, 1), predicted_bytes=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history
    assert second.largest == 5


# Sizes that ranks agree on: training's, and half of what has failed on any of them.


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
