"""What is handed from run to run: costs, and nothing that a limit has decided."""

from __future__ import annotations

import pytest

from autoaccum.planning.costs import MemoryModel, TimeModel, Trial
from autoaccum.planning.history import History
from autoaccum.planning.warm_start import learnt, recalled


def trial(size: int, **facts: float | bool) -> Trial:
    """Of a device on which a sample costs 10 bytes, beside 100."""
    return Trial(**{"micro_batch": size, "fits": True, "peak_bytes": 100 + 10 * size, **facts})  # type: ignore[arg-type]


def kept(*trials: Trial) -> History:
    history = History()
    for one in trials:
        history.add(one, reweigh=True)
    return history


class TestRecalled:
    @pytest.mark.parametrize("past", [[], [trial(4)], [trial(4), Trial(micro_batch=8, fits=False)]])
    def test_too_few_trials_say_nothing(self, past: list[Trial]) -> None:
        assert recalled(past, 0) is None

    def test_what_fitted_under_another_limit_is_not_asked(self) -> None:
        found = recalled([trial(1), trial(8, fits=False)], 0)
        assert found is not None
        assert found.known == 8
        assert found.memory == MemoryModel(fixed_bytes=100.0, bytes_per_sample=10.0)

    @pytest.mark.parametrize(("held_bytes", "fixed_bytes"), [(40, 100.0), (500, 500)])
    def test_as_much_as_is_held_now_is_there_without_any_sample(self, held_bytes: int, fixed_bytes: float) -> None:
        found = recalled([trial(1), trial(8)], held_bytes)
        assert found is not None
        assert found.memory.fixed_bytes == pytest.approx(fixed_bytes)
        assert found.memory.bytes_per_sample == pytest.approx(10)

    def test_times_are_those_of_the_trials_that_have_any(self) -> None:
        found = recalled([trial(1), trial(8, seconds=2.0)], 0)
        assert found is not None
        assert found.times == TimeModel(points=((8, 2.0),))
        untimed = recalled([trial(1), trial(8)], 0)
        assert untimed is not None
        assert untimed.times is None

    def test_where_samples_differ_in_length_it_is_known_in_weights(self) -> None:
        found = recalled([trial(1), trial(4, length=3, peak_bytes=220)], 0)
        assert found is not None
        assert found.known == 12
        assert found.memory.predict(12) == 220


class TestLearnt:
    def test_without_times_it_is_what_was_tried(self) -> None:
        trials = (trial(1, seconds=1.0), Trial(micro_batch=8, fits=False))
        assert learnt(kept(*trials), None, has_lengths=False) == trials

    def test_times_of_windows_take_the_place_of_those_of_cold_runs(self) -> None:
        history = kept(trial(1, seconds=9.0), trial(4, seconds=9.0))
        found = learnt(history, TimeModel(points=((1, 1.0), (4, 3.0))), has_lengths=False)
        assert found == (trial(1, seconds=1.0), trial(4, seconds=3.0))

    def test_sizes_that_were_timed_and_never_tried_are_told_with_the_models_peak(self) -> None:
        history = kept(trial(1), trial(4))
        found = learnt(history, TimeModel(points=((2, 1.5),)), has_lengths=False)
        assert {one.micro_batch: (one.peak_bytes, one.seconds) for one in found} == {
            1: (110, 1.5),
            2: (120, 1.5),
            4: (140, 3.0),
        }

    def test_where_samples_differ_in_length_no_times_are_told(self) -> None:
        history = kept(trial(1, seconds=9.0), trial(4, seconds=9.0))
        found = learnt(history, TimeModel(points=((1, 1.0),)), has_lengths=True)
        assert found == (trial(1), trial(4))

    def test_a_later_run_knows_what_this_one_did(self) -> None:
        history = kept(trial(1), trial(4), Trial(micro_batch=9, fits=False))
        found = recalled(learnt(history, TimeModel(points=((1, 1.0), (4, 3.0))), has_lengths=False), 0)
        assert found is not None
        assert found.known == 4
        assert found.memory == history.model
        assert found.times is not None
        assert [found.times.predict(size) for size in (1, 4)] == [1.0, 3.0]
