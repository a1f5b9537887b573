"""What a sweep is asked for, as it is written."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.sweeps import spaces


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((1e-5, 1e-2), (1e-5, 1e-2)),
        ("1e-5:1e-2", (1e-5, 1e-2)),
        ([1e-4, 1e-3], [1e-4, 1e-3]),
        ("1e-4,1e-3,0.1", [1e-4, 1e-3, 0.1]),
        ("0.1", 0.1),
        (1, 1.0),
        (None, None),
    ],
)
def test_learning_rates(given: Any, found: Any) -> None:
    assert spaces.learning_rates(given) == found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((32, 256), [32, 64, 128, 256]),
        ("1:4", [1, 2, 4]),
        ((32, 100), (32, 100)),
        ("48:64", (48, 64)),
        ([48, 16], [48, 16]),
        ("48,16", [48, 16]),
        ("48", 48),
        (48, 48),
    ],
)
def test_batches(given: Any, found: Any) -> None:
    assert spaces.batches(given) == found


@pytest.mark.parametrize(
    ("read", "given", "cure"),
    [
        (spaces.learning_rates, "1e-1:1e-4", "The lower end comes first: '0.0001:0.1'."),
        (spaces.batches, (256, 32), "The lower end comes first: '32:256'."),
        (spaces.batches, "32:32", "A range of one value is that value: 32."),
    ],
)
def test_a_range_that_is_none_is_told_why(read: Any, given: Any, cure: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read(given)
    assert str(caught.value).endswith(cure)


def test_a_schedule_is_not_read_as_a_list() -> None:
    with pytest.raises(ArgumentError, match="effective_batch='64, 1000:256': .* For schedules to choose from pass"):
        spaces.batches("64, 1000:256")
    with pytest.raises(ArgumentError, match="lr='1e-4,1e-3:1e-2': expected"):
        spaces.learning_rates("1e-4,1e-3:1e-2")


@pytest.mark.parametrize(
    ("metric", "direction", "names", "directions"),
    [
        ("validation_loss", None, ("validation_loss",), ("minimize",)),
        (("validation_loss", "seconds"), None, ("validation_loss", "seconds"), ("minimize", "minimize")),
        ("accuracy, samples", "maximize, minimize", ("accuracy", "samples"), ("maximize", "minimize")),
        (["accuracy"], ["maximize"], ("accuracy",), ("maximize",)),
    ],
)
def test_metrics(metric: Any, direction: Any, names: tuple[str, ...], directions: tuple[str, ...]) -> None:
    assert spaces.metrics(metric, direction) == (names, directions)


@pytest.mark.parametrize(
    ("metric", "direction", "message"),
    [
        ("accuracy", None, "direction=None: expected minimize or maximize, for each metric. Say which way 'accuracy'"),
        (("seconds", "seconds"), None, "expected one or more names, each once"),
        ((), None, "metric=(): expected one or more names"),
        (3, None, "metric=3: expected a text, or several"),
        ("accuracy", "max", "direction='max': expected one of 'minimize', 'maximize'"),
        ("accuracy,seconds", "maximize", "direction='maximize': expected as many as metrics, 2"),
        ("accuracy", 1, "direction=1: expected a text, or several"),
    ],
)
def test_metrics_that_cannot_be_used(metric: Any, direction: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        spaces.metrics(metric, direction)
    assert message in str(raised.value)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", spaces.SAMPLERS)
def test_samplers_by_name_draw_by_their_seed(name: str) -> None:
    def draw(seed: int) -> float:
        sampler = spaces.sampler_of(name)
        assert not isinstance(sampler, optuna.samplers.BaseSampler)
        trial = optuna.create_study(sampler=sampler(seed)).ask()
        chosen: float = trial.suggest_categorical("lr", [10.0**-power for power in range(30)])
        return chosen

    assert draw(3) == draw(3)
    assert len({draw(seed) for seed in range(5)}) > 1


def test_samplers_and_pruners_of_optuna_are_taken_as_they_are() -> None:
    sampler, pruner = optuna.samplers.RandomSampler(), optuna.pruners.ThresholdPruner(upper=3)
    assert spaces.sampler_of(sampler) is sampler
    assert spaces.pruner_of(pruner, 100) is pruner


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("none", optuna.pruners.NopPruner),
        ("hyperband", optuna.pruners.HyperbandPruner),
        ("halving", optuna.pruners.SuccessiveHalvingPruner),
        ("median", optuna.pruners.MedianPruner),
    ],
)
def test_pruners_by_name(name: str, kind: type) -> None:
    assert type(spaces.pruner_of(name, 90)) is kind


def test_what_is_no_sampler_or_pruner() -> None:
    with pytest.raises(ArgumentError, match="sampler='tpo': expected one of 'tpe', 'random', 'grid'"):
        spaces.sampler_of("tpo")
    for wrong in (optuna.samplers.TPESampler, None, 3):
        with pytest.raises(ArgumentTypeError, match="expected a sampler of Optuna, a function .seed. -> sampler, or"):
            spaces.sampler_of(wrong)
    with pytest.raises(ArgumentError, match="pruner='mean': expected one of 'median', 'none'"):
        spaces.pruner_of("mean", 100)
    for wrong in (optuna.pruners.NopPruner, None):
        with pytest.raises(ArgumentTypeError, match="expected a pruner of Optuna, or one of median, none"):
            spaces.pruner_of(wrong, 100)
