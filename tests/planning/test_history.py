"""Trials in samples and in history."""

from __future__ import annotations

from dataclasses import replace

from autoaccum.planning.costs import MemoryModel, Trial
from autoaccum.planning.history import History


def trial(samples: int, length: int = 1) -> Trial:
    """Of a device on which a sample costs 2 * length + length**2 / 8 bytes."""
    peak = 1000 + samples * (2 * length + length**2 / 8)
    return Trial(micro_batch=samples, fits=True, peak_bytes=int(peak), length=length)


def test_where_samples_are_alike_loads_are_samples() -> None:
    history = History()
    assert [history.add(trial(size), reweigh=True) for size in (1, 2, 4)] == [1, 2, 4]
    assert history.weights((3, 2), None) == [3, 2]
    assert (history.each(None), history.work(7, None)) == (1, 7)
    assert history.in_weights == history.trials


def test_where_they_differ_a_load_is_what_they_cost() -> None:
    history = History()
    for samples, length in ((1, 64), (4, 32), (2, 16), (8, 16)):
        history.add(trial(samples, length), reweigh=True)
    # 2 * length + length**2 / 8, in units of 2
    assert [history.weight(length) for length in (16, 32, 64)] == [32, 96, 320]
    assert history.weights((1, 2, 1), (64, 32, 32, 16)) == [320, 192, 32]
    assert history.work(3, (64, 32, 16)) == 448
    assert history.each((64, 16)) == 320
    model = history.model
    assert model is not None
    assert model.predict(320) == trial(1, 64).peak_bytes
    assert [t.micro_batch for t in history.in_weights] == [320, 384, 64, 256]


def test_units_stay_unless_they_are_weighed_again() -> None:
    history = History()
    history.add(trial(1, 64), reweigh=True)
    history.add(trial(4, 32), reweigh=True)
    before = history.weight(16)
    assert history.add(trial(8, 16), reweigh=False) == 8 * before
    assert history.add(trial(2, 16), reweigh=True) == 2 * 32
    assert history.weight(16) != before


def test_longer_samples_are_news() -> None:
    history = History()
    assert not history.is_new(100), "nothing to compare with"
    history.add(trial(1, 64), reweigh=True)
    assert [history.is_new(length) for length in (64, 95, 96)] == [False, False, True]


def test_trials_are_judged_again_or_dropped() -> None:
    history = History()
    for size in (1, 2, 4):
        history.add(trial(size), reweigh=True)
    history.judge(lambda one, load: None if load == 2 else replace(one, fits=load < 4))
    assert [(t.micro_batch, t.fits) for t in history.trials] == [(1, True), (4, False)]
    assert history.in_weights == history.trials


def test_an_earlier_runs_model_holds_until_two_sizes_are_known() -> None:
    history = History()
    history.prior = MemoryModel(fixed_bytes=500, bytes_per_sample=10)
    assert history.model == history.prior
    history.add(Trial(micro_batch=4, fits=True, peak_bytes=700), reweigh=True)
    assert history.model == MemoryModel(fixed_bytes=660, bytes_per_sample=10)
    history.add(Trial(micro_batch=8, fits=True, peak_bytes=704), reweigh=True)
    model = history.model
    assert model is not None
    assert [model.predict(size) for size in (4, 8, 12)] == [700, 704, 708]
