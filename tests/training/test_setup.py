"""The parts of a run, made from its arguments; what they come to in a run is in ``test_trainer``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.planning.schedules import SMOOTHING, Constant, NoiseScale
from autoaccum.testing import simulated_memory
from autoaccum.training import setup
from autoaccum.training.options import FitArguments

DATA = (torch.zeros(6, 2), torch.zeros(6, 1))


def given(**options: Any) -> FitArguments:
    return FitArguments(**{"model": nn.Linear(2, 1), "data": DATA, "effective_batch": 8, **options})


def test_the_limit_of_a_place_is_read_once_and_can_be_asked_for_again() -> None:
    with simulated_memory("1MiB") as device:
        place = setup.place_of("cpu", 0.5)
        assert (place.device, place.limit.bytes, place.limit.is_enforced) == (torch.device("cpu"), 2**19, False)
        device.limit = 2**18
        assert (place.limit.now(), place.limit.bytes) == (2**18, 2**19)


def test_an_iterator_is_no_data_for_two_epochs() -> None:
    place = setup.place_of("cpu", None)
    assert setup.open_data(given(data=iter([DATA])), place).num_samples is None
    with pytest.raises(ArgumentError, match="which can be read only once"):
        setup.open_data(given(data=iter([DATA]), epochs=2), place)


def test_validation_data_are_read_in_their_order_and_more_than_once() -> None:
    place = setup.place_of("cpu", None)
    with pytest.raises(ArgumentTypeError, match="data that can be read again"):
        setup.open_validation_data(given(validation_data=iter([DATA])), place)
    rows = torch.arange(6.0)[:, None]
    source = setup.open_validation_data(given(validation_data=(rows, rows)), place)
    window = source.read(0, lambda position: (6,)).window(6)
    assert window is not None
    assert torch.equal(window.micro_batch(0, 6)[0], rows)


def test_a_loader_for_validation_brings_its_own_collate_fn() -> None:
    def refuse(samples: list[Any]) -> Any:
        raise AssertionError

    loader = DataLoader(TensorDataset(*DATA), batch_size=2)
    source = setup.open_validation_data(given(validation_data=loader, collate_fn=refuse), setup.place_of("cpu", None))
    assert source.example(2)[0].shape == (2, 2)


def test_seeds_are_set_for_all_who_draw() -> None:
    setup.seed_all(given(seed=3))
    first = torch.rand(2)
    setup.seed_all(given(seed=3))
    assert torch.equal(torch.rand(2), first)


def test_noise_is_smoothed_where_somebody_looks_at_it() -> None:
    assert setup.noise_of(given(), Constant(8)) is None
    reported = setup.noise_of(given(noise_scale=True), Constant(8))
    followed = setup.noise_of(given(), NoiseScale(min=8, max=16, smoothing=0.25))
    assert reported is not None
    assert followed is not None
    assert (reported.smoothing, followed.smoothing) == (SMOOTHING, 0.25)


def test_metrics_that_are_modules_are_moved_too() -> None:
    module = nn.PairwiseDistance()
    assert setup.metric_modules(given(metrics={"a": module, "b": print}, validation_data=DATA)) == [module]
    assert setup.metric_modules(given()) == []


def test_there_is_nothing_to_validate_or_to_recall_where_it_was_not_asked_for() -> None:
    arguments, place, nothing = given(cache=False), setup.place_of("cpu", None), lambda record: None
    checked = arguments.check()
    parameters = list(arguments.model.parameters())
    optimizer, _ = setup.build(arguments, checked, place, setup.open_data(arguments, place), parameters, 1)
    step = setup.step_of(arguments, checked, place, arguments.model, optimizer, 6, nothing, noise_scale=False)
    assert optimizer.state[parameters[0]], "it is allocated"
    assert step.tuner.searching
    assert setup.cache_of(arguments, place, optimizer, step.tuner) is None
    assert setup.validator_of(arguments, lambda model, batch: batch, place, arguments.model, step, nothing) is None
