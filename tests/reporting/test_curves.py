"""Curves: few points that look like many."""

from __future__ import annotations

import numpy as np
import pytest

from autoaccum.reporting.curves import binned, smoothed, thinned


def test_a_long_curve_keeps_its_extremes_in_few_points() -> None:
    x, y = np.arange(10_000), np.zeros(10_000)
    y[5_003], y[7_777], y[9_999] = 7.0, -3.0, np.nan
    at, values = thinned(x, y)
    assert len(at) == len(values) == 2000
    assert (values.max(), values.min(), np.isnan(values).any()) == (7.0, -3.0, False)
    assert at[values.argmax()] == 5_000
    _, low, mean, high = binned(x, y)
    assert (low.min(), high.max()) == (-3.0, 7.0)
    assert mean[500] == pytest.approx(0.7)


def test_a_thinned_curve_goes_on_in_its_direction() -> None:
    x = np.arange(10_000)
    assert np.all(np.diff(thinned(x, x)[1]) >= 0)
    assert np.all(np.diff(thinned(x, -x)[1]) <= 0)


def test_a_short_curve_is_drawn_as_it_is() -> None:
    x = np.arange(2000)
    at, values = thinned(x, x * 2.0)
    assert at.tolist() == x.tolist()
    assert values.tolist() == (x * 2.0).tolist()
    assert np.isnan(thinned(np.array([1]), np.array([np.inf]))[1]), "no axis goes that far"


def test_means_are_of_those_around() -> None:
    values = np.arange(400.0)
    values[200] = np.nan
    values[300] = 1e30
    mean = smoothed(np.arange(400), values)[1]
    assert mean[100] == 100
    assert mean[0] == 2.0
    assert mean[200] == pytest.approx(200)
    assert mean[399] == 397.0, "whatever came before"


def test_means_of_many_are_few() -> None:
    x = np.arange(1_000_000)
    at, mean = smoothed(x, x.astype(float))
    assert len(at) == 1000
    assert mean[500] == pytest.approx(500_500, rel=1e-5)
