"""The state that a tuner has is accepted in every phase of a run; one that it cannot have is not."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import asdict
from typing import Any

import pytest

from autoaccum._kinds import accepts
from autoaccum.errors import CheckpointCorruptError, NothingFitsError
from autoaccum.planning.costs import Trial
from autoaccum.planning.saved import NOISE, TUNER, trials_of
from tests.planning.simulation import Device, Training


def trained(seed: int, windows: int = 40) -> Training:
    """Return a run of which a seed decides the device, the sizes, the lengths and how memory moves."""
    chance = random.Random(seed)
    limit = chance.choice([3_000, 20_000, 400_000])
    pace = chance.choice([0.0, 0.01, 1.0])
    device = Device(limit, seconds=lambda size: 0.001 * size + pace)
    training = Training(
        device,
        chance.choice([1, 7, 64, 1000]),
        searches=chance.random() < 0.8,
        largest=chance.choice([0, 5]),
        few_sizes=chance.random() < 0.3,
    )
    has_lengths = chance.random() < 0.3
    for _ in range(windows):
        lengths = None
        if has_lengths:
            lengths = tuple(sorted((chance.randint(1, 40) for _ in range(training.num_samples)), reverse=True))
        try:
            training.window(training.num_samples, lengths)
        except NothingFitsError:  # one sample is too many for this device
            return training
        state = training.tuner.state_dict()
        TUNER(state, "tuner")
        if chance.random() < 0.1:
            device.limit_bytes = int(limit * chance.uniform(0.5, 1.5))
        if chance.random() < 0.05 and not has_lengths:
            training.resize(chance.randint(1, 500))
    return training


@pytest.mark.parametrize("seed", range(60))
def test_what_a_tuner_comes_to_is_accepted(seed: int) -> None:
    training = trained(seed)
    assert training.windows >= 0


CHANGES: dict[str, Any] = {
    "a size of 0": {"largest": 0},
    "a size that is a float": {"largest": 8.0},
    "a flag that is a number": {"searching": 1},
    "a list for a tuple": {"window": [64, None]},
    "a window of minus one sample": {"window": (-1, None)},
    "lengths of other samples": {"window": (3, (5, 4))},
    "lengths that rise": {"window": (2, (4, 5))},
    "times of no size": {"times": ()},
    "times that fall back": {"times": ((2, 0.1), (2, 0.2))},
    "a time that is none": {"times": ((2, math.nan),)},
    "bytes beyond 63 bits": {"least_bytes": 2**63},
    "a trial without a size": {"past": [{"fits": True}]},
    "a trial of no length": {"past": [{**asdict(Trial(micro_batch=1, fits=True)), "length": 0}]},
    "a trial whose length is left out": {"past": [{"micro_batch": 1, "fits": True}]},
    "a trial that is none": {"past": [3]},
    "a model that overflows": {"loads": {"trials": [], "weighed": [], "prior": {"fixed_bytes": math.inf, "bytes_per_sample": 1.0}}},
    "an entry that nobody knows": {"unknown": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_no_tuner_has_is_refused(name: str) -> None:
    state = trained(0).tuner.state_dict()
    TUNER(copy.deepcopy(state), "tuner")
    with pytest.raises(CheckpointCorruptError) as caught:
        TUNER({**state, **CHANGES[name]}, "tuner")
    assert caught.value.entry.startswith(f"tuner.{next(iter(CHANGES[name]))}")


def test_of_trials_and_noise() -> None:
    assert accepts(trials_of(Trial), [{"micro_batch": 1, "fits": False}])
    assert not accepts(trials_of(Trial), [{"micro_batch": 1, "fits": True, "seconds": -1.0}])
    assert accepts(NOISE, (-0.5, 3.0))
    assert not any(accepts(NOISE, bad) for bad in ((math.nan, 0.0), (0.0,), [0.0, 1.0], (0.0, math.inf), None))
