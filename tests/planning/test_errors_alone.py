"""The search where errors alone tell: every limit is found in as few trials as can be."""

from __future__ import annotations

import pytest

from autoaccum.planning.costs import Trial, bounds
from autoaccum.planning.errors_alone import by_errors, errors_left, told_apart
from autoaccum.planning.search import next_trial


@pytest.mark.parametrize(("ceiling", "truths", "trials"), [(128, range(1, 129), 8), (16_384, range(1, 16_385), 12)])
def test_by_errors_alone_every_limit_is_found(ceiling: int, truths: range, trials: int) -> None:
    for truth in truths:
        history: list[Trial] = []
        while size := next_trial(history, limit_bytes=1, ceiling=ceiling, growth=64):
            history.append(Trial(micro_batch=size, fits=size <= truth))
            assert len(history) <= trials, truth
        assert sum(not trial.fits for trial in history) <= 3
        assert bounds(history)[0] >= 0.93 * truth


def test_what_can_be_told_apart_is_what_the_recursion_says() -> None:
    for trials in range(1, 10):
        for errors in range(1, 4):
            failed = told_apart(trials - 1, errors - 1)
            assert told_apart(trials, errors) == failed + told_apart(trials - 1, errors) + 1


def test_the_first_of_the_fewest_trials_leaves_as_many_below_it_as_an_error_leaves_to_tell() -> None:
    assert by_errors(8, 16, 1) == 9, "one error left: upwards"
    assert by_errors(8, 16, 2) == 11
    assert by_errors(8, 9, 3) is None
    assert by_errors(100, 104, 3) is None, "nearer than 0.93"
    assert by_errors(100, 104, 3, is_open=True) == 103, "the last of use"


def test_errors_that_were_met_are_counted_beyond_what_fits() -> None:
    history = [Trial(micro_batch=size, fits=False) for size in (64, 32)]
    assert errors_left(history) == 1
    assert errors_left([*history, Trial(micro_batch=48, fits=True)]) == 2
    assert errors_left([*history, Trial(micro_batch=16, fits=False)]) == 2, "all were met: bisection"
