from __future__ import annotations

import math

import pytest

from autoaccum.sweeps.best_lr import BestLr, Growth, best_lrs_of, growth_answer, growth_of


def parabola(batch: int, best: float, lrs: tuple[float, ...]) -> list[tuple[int, float, float | None]]:
    return [(batch, lr, 0.5 + math.log(lr / best) ** 2) for lr in lrs]


def at(batch: int, lr: float, *, is_edge: bool = False) -> BestLr:
    return BestLr(effective_batch=batch, lr=lr, num_trials=3, is_edge=is_edge)


def test_between_others_it_is_the_vertex_of_a_parabola() -> None:
    (found,) = best_lrs_of(parabola(32, 0.013, (0.1, 0.001, 0.01, 0.05)), by_octave=False)
    assert found.lr == pytest.approx(0.013)
    assert (found.effective_batch, found.num_trials, found.is_edge) == (32, 4, False)


def test_at_the_edge_it_is_what_was_tried() -> None:
    (found,) = best_lrs_of(parabola(32, 1.0, (0.1, 0.001, 0.01)), by_octave=False)
    assert (found.lr, found.is_edge) == (0.1, True)
    (found,) = best_lrs_of([(32, 0.1, 1.0), (32, 0.2, None)], by_octave=False)
    assert (found.lr, found.num_trials, found.is_edge) == (0.1, 2, True)


def test_what_was_pruned_is_no_neighbour_yet_is_beyond_the_best() -> None:
    (found,) = best_lrs_of([(32, 0.1, 1.0), (32, 0.01, 2.0), (32, 1.0, None)], by_octave=False)
    assert (found.lr, found.is_edge) == (0.1, False)


def test_no_vertex_is_fitted_to_noise() -> None:
    # As four trials of a sweep came out: the parabola's vertex lies at 0.003, and at a loss of 0.09.
    values = {0.00443: 0.4203, 0.04171: 0.4378, 0.00449: 0.4430, 0.00178: 0.6115}
    (found,) = best_lrs_of([(25, lr, value) for lr, value in values.items()], by_octave=False)
    assert (found.lr, found.is_edge) == (0.00443, False)
    # Nearly the same lr on both sides, however good the parabola through them.
    (found,) = best_lrs_of(parabola(25, 0.00441, (0.0040, 0.0044, 0.0048)), by_octave=False)
    assert found.lr == 0.0044


@pytest.mark.parametrize(("above", "is_fitted"), [(0.02, True), (0.04, False)])
def test_the_vertex_lies_not_clearly_below_all_that_was_seen(above: float, is_fitted: bool) -> None:
    # 0.1 below the best what was tried far below it, and a little below it what was tried a quarter above it: a vertex
    # that lies 0.03 below the best, or 0.07.
    (found,) = best_lrs_of([(32, 0.001, 0.5), (32, 0.01, 0.4), (32, 0.0125, 0.4 + above)], by_octave=False)
    assert (found.lr != 0.01) is is_fitted
    assert math.sqrt(0.001 * 0.01) < found.lr <= 0.01


def test_the_same_lr_twice_counts_by_its_better_value() -> None:
    twice = [(32, 0.01, 1.0), (32, 0.01, 3.0), (32, 0.1, 2.0), (32, 0.001, 2.0), (32, 0.001, math.inf)]
    (found,) = best_lrs_of(twice, by_octave=False)
    assert found.lr == pytest.approx(0.01)
    alike = [(32, lr, 1.0) for lr in (0.001, 0.01, 0.1)]
    assert best_lrs_of(alike, by_octave=False)[0].lr == 0.001


@pytest.mark.parametrize("tried", [[], [(32, 0.1, 1.0)], [(32, 0.1, None), (32, 0.2, None)], [(32, 0.1, math.inf)] * 2])
def test_there_may_be_nothing_to_compare(tried: list[tuple[int, float, float | None]]) -> None:
    assert best_lrs_of(tried, by_octave=False) == ()


def test_any_batches_are_taken_by_octaves() -> None:
    tried = [(30, 0.1, 1.0), (35, 0.2, 2.0), (60, 0.1, 3.0), (70, 0.3, 1.5), (500, 0.1, 1.0)]
    assert [(best.effective_batch, best.lr) for best in best_lrs_of(tried, by_octave=True)] == [(30, 0.1), (70, 0.3)]  # fmt: skip
    assert best_lrs_of(tried, by_octave=False) == ()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, -0.3])
def test_growth(power: float) -> None:
    growth = growth_of([at(batch, 0.002 * batch**power) for batch in (8, 20, 700)])
    assert growth is not None
    assert growth.exponent == pytest.approx(power, abs=1e-12)
    assert growth.factor == pytest.approx(0.002)
    assert growth.error == pytest.approx(0, abs=1e-12)


def test_the_error_is_that_of_least_squares() -> None:
    # x = 0, 1, 2 and y = 0, 3, 0 in doublings: slope 0, residuals -1, 2, -1, so sqrt(6 / 1 / 2).
    growth = growth_of([at(1, 1.0), at(2, 8.0), at(4, 1.0)])
    assert growth is not None
    assert (growth.exponent, growth.error) == (pytest.approx(0, abs=1e-12), pytest.approx(math.sqrt(3)))
    assert growth_answer([at(1, 1.0), at(4, 1.0)], growth).text.endswith("That is too uncertain to tell them apart.")


def test_no_growth_has_no_sign() -> None:
    assert growth_answer([at(8, 0.1)] * 2, Growth(exponent=-1e-17, error=None, factor=0.1)).text.startswith(
        "As its power 0.00, "
    )


def test_two_points_have_no_error_and_one_has_no_growth() -> None:
    two = [at(16, 0.1), at(64, 0.2, is_edge=True)]
    growth = growth_of(two)
    assert growth is not None
    assert (growth.exponent, growth.error) == (pytest.approx(0.5), None)
    text = growth_answer(two, growth).text
    assert "As its power 0.50, over 2 effective batches from 16 to 64" in text
    assert "At 1 of them" in text
    assert "Through two points any power fits." in text
    assert growth_of([at(16, 0.1)]) is None
    assert growth_answer([], None).text.startswith("It takes two effective batches")
