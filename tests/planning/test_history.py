"""Trials in samples and in loads."""

from __future__ import annotations

from dataclasses import replace

from autoaccum.planning.costs import MemoryModel, Trial
from autoaccum.planning.history import Loads


def trial(samples: int, length: int = 1) -> Trial:
    """Of a device on which a sample costs 2 * length + length**2 / 8 bytes."""
    peak = 1000 + samples * (2 * length + length**2 / 8)
    return Trial(micro_batch=samples, fits=True, peak_bytes=int(peak), length=length)


def test_where_samples_are_alike_loads_are_samples() -> None:
    loads = Loads()
    assert [loads.add(trial(size), reweigh=True) for size in (1, 2, 4)] == [1, 2, 4]
    assert loads.of((3, 2), None) == [3, 2]
    assert (loads.each(None), loads.work(7, None)) == (1, 7)
    assert loads.in_loads == loads.trials


def test_where_they_differ_a_load_is_what_they_cost() -> None:
    loads = Loads()
    for samples, length in ((1, 64), (4, 32), (2, 16), (8, 16)):
        loads.add(trial(samples, length), reweigh=True)
    # 2 * length + length**2 / 8, in units of 2
    assert [loads.weight(length) for length in (16, 32, 64)] == [32, 96, 320]
    assert loads.of((1, 2, 1), (64, 32, 32, 16)) == [320, 192, 32]
    assert loads.work(3, (64, 32, 16)) == 448
    assert loads.each((64, 16)) == 320
    model = loads.model
    assert model is not None
    assert model.predict(320) == trial(1, 64).peak_bytes
    assert [t.micro_batch for t in loads.in_loads] == [320, 384, 64, 256]


def test_units_stay_unless_they_are_weighed_again() -> None:
    loads = Loads()
    loads.add(trial(1, 64), reweigh=True)
    loads.add(trial(4, 32), reweigh=True)
    before = loads.weight(16)
    assert loads.add(trial(8, 16), reweigh=False) == 8 * before
    assert loads.add(trial(2, 16), reweigh=True) == 2 * 32
    assert loads.weight(16) != before


def test_longer_samples_are_news() -> None:
    loads = Loads()
    assert not loads.is_new(100), "nothing to compare with"
    loads.add(trial(1, 64), reweigh=True)
    assert [loads.is_new(length) for length in (64, 95, 96)] == [False, False, True]


def test_trials_are_judged_again_or_dropped() -> None:
    loads = Loads()
    for size in (1, 2, 4):
        loads.add(trial(size), reweigh=True)
    loads.judge(lambda one, load: None if load == 2 else replace(one, fits=load < 4))
    assert [(t.micro_batch, t.fits) for t in loads.trials] == [(1, True), (4, False)]
    assert loads.in_loads == loads.trials


def test_an_earlier_runs_model_holds_until_two_sizes_are_known() -> None:
    loads = Loads()
    loads.prior = MemoryModel(fixed_bytes=500, bytes_per_sample=10)
    assert loads.model == loads.prior
    loads.add(Trial(micro_batch=4, fits=True, peak_bytes=700), reweigh=True)
    assert loads.model == MemoryModel(fixed_bytes=660, bytes_per_sample=10)
    loads.add(Trial(micro_batch=8, fits=True, peak_bytes=704), reweigh=True)
    model = loads.model
    assert model is not None
    assert [model.predict(size) for size in (4, 8, 12)] == [700, 704, 708]
