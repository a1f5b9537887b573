"""The protocol by which windows are cut."""

from __future__ import annotations

from autoaccum.planning.attempts import Piece, Reading, length_at, pieces_from, pieces_of
from autoaccum.planning.tuner import Tuner


def test_the_length_of_a_piece_is_that_of_its_first_sample() -> None:
    assert length_at(None, 5) == 1
    assert length_at((9, 7, 3), 1) == 7
    assert pieces_from((1, 2), (9, 7, 3)) == [Piece(0, 1, 9), Piece(1, 2, 7)]


def test_pieces_cover_their_window() -> None:
    assert pieces_of((3, 2, 2)) == (Piece(0, 3), Piece(3, 2), Piece(5, 2))


def test_an_attempt_that_ran_out_of_memory_gives_a_smaller_one_for_the_same_window() -> None:
    tuner = Tuner(ceiling=64, limit_bytes=1000, headroom=0, search=False, largest=8)
    first = tuner.window(20)
    assert [piece.size for piece in first] == [7, 7, 6]
    second = first.ran_out(7, 1, None, 900)
    assert (second.replays, second.replaced, second.sizes) == (1, (7, 7, 6), (3, 3, 3, 3, 3, 3, 2))
    assert [piece.start for piece in second] == [0, 3, 6, 9, 12, 15, 18]
    assert tuner.limits.limit_bytes == 900
    third = second.repeated((3, 3, 3, 3, 3, 3, 2))
    assert (third.replays, third.sizes) == (1, second.sizes)


def test_a_recorded_plan_is_handed_out_as_it_is() -> None:
    tuner = Tuner(ceiling=64, limit_bytes=1000, headroom=0, search=False, largest=8)
    assert [piece.size for piece in tuner.window(9, None, (2, 4, 3))] == [2, 4, 3]


def test_the_time_of_a_window_that_was_replayed_tells_nothing() -> None:
    tuner = Tuner(ceiling=64, limit_bytes=1000, headroom=0, search=False, largest=8)
    told: list[float] = []
    tuner.timed = lambda seconds, *_: told.append(seconds)  # type: ignore[method-assign,assignment]
    first = tuner.window(8)
    first.committed((8,), 1.5)
    first.committed((8,), None)
    first.ran_out(8, 1, None, 1000).committed((4, 4), 2.5)
    assert told == [1.5]


class TestColdReadings:
    """A trial in which something was made ready, such as compiled code, tells of that."""

    def cold(self, piece: Piece) -> Reading:
        reading = Reading(piece, 10 * piece.size, 100.0)
        reading.is_cold = True
        return reading

    def test_such_a_size_is_tried_again(self) -> None:
        tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0.0, search=True, few_sizes=True)
        attempt, sizes = tuner.window(64), []
        for piece in attempt:
            sizes.append(piece.size)
            if piece.is_trial:
                attempt.fitted(self.cold(piece) if len(sizes) == 2 else Reading(piece, 10 * piece.size, 1.0))
        assert sizes == [16, 16, 16, 16]
        assert [(trial.micro_batch, trial.seconds) for trial in tuner.history] == [(16, 1.0)]

    def test_once_and_then_its_memory_is_believed_and_its_time_is_not(self) -> None:
        tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0.0, search=True)
        attempt, piece = tuner.window(64), Piece(0, 8, 1, True)
        attempt.fitted(self.cold(piece))
        assert tuner.history == []
        attempt.fitted(self.cold(piece))
        assert [(t.micro_batch, t.peak_bytes, t.seconds) for t in tuner.history] == [(8, 80, None)]

    def test_of_samples_of_other_lengths_none_comes_again(self) -> None:
        tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0.0, search=True)
        attempt = tuner.window(4, [7, 7, 6, 5])
        attempt.fitted(self.cold(Piece(0, 2, 7, True)))
        assert [(t.micro_batch, t.peak_bytes, t.seconds) for t in tuner.history] == [(2, 20, None)]

    def test_a_whole_window_of_it_is_not_yet_known_to_fit(self) -> None:
        tuner = Tuner(ceiling=8, limit_bytes=10**6, headroom=0.0, search=True)
        attempt = tuner.window(8)
        attempt.fitted(self.cold(Piece(0, 8, 1, True)))
        attempt.committed((8,), None)
        assert tuner.history == []

    def test_few_sizes_are_tried_from_when_it_is_known(self) -> None:
        tuner = Tuner(ceiling=64, limit_bytes=10**6, headroom=0.0, search=True)
        assert tuner.trial_for(64) == 1
        tuner.expect_few_sizes()
        assert tuner.trial_for(64) == 16
