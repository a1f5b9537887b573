"""The parts of a run, made from its arguments; what they come to in a run is in ``test_trainer``."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.planning.schedules import SMOOTHING, Constant, NoiseScale
from autoaccum.testing import simulated_memory
from autoaccum.training import setup
from autoaccum.training.options import FitArguments
from tests.models import classes, mlp

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


def test_an_order_that_the_loader_draws_is_not_left_out_by_the_argument() -> None:
    place, samples = setup.place_of("cpu", None), TensorDataset(DATA[0])
    with pytest.raises(ConflictingArgumentsError, match=r"^shuffle=False: .*make it with shuffle=False, and without"):
        setup.open_data(given(data=DataLoader(samples, shuffle=True), shuffle=False), place)
    assert setup.open_data(given(data=DataLoader(samples), shuffle=False), place).num_samples == len(DATA[0])
    assert setup.open_data(given(data=DataLoader(samples, shuffle=True)), place).num_samples == len(DATA[0])


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
    optimizer, _ = setup.build(arguments, place, 1)
    step = setup.step_of(arguments, checked, place, arguments.model, optimizer, 6, nothing, noise_scale=False)
    assert optimizer.state[next(arguments.model.parameters())], "it is allocated"
    assert step.tuner.searching
    assert setup.cache_of(arguments, place, optimizer, step.tuner) is None
    assert setup.validator_of(arguments, lambda model, batch: batch, place, arguments.model, step, nothing) is None


@pytest.fixture
def new_parameters() -> Iterator[None]:
    """Module.to makes new Parameters, as it does of those whose tensors it cannot change in place."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.usefixtures("new_parameters")
class TestParametersThatAreMadeAnewByMovingThem:
    @pytest.mark.parametrize("optimizer", [None, sgd])
    def test_they_are_trained(self, optimizer: Any) -> None:
        trained = autoaccum.fit(
            mlp(),
            classes(24),
            effective_batch=12,
            loss_fn=cross_entropy,
            optimizer=optimizer,
            device="cpu",
            progress=False,
        )
        held = {id(p) for group in trained.optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in trained.model.parameters()}
        assert all(not torch.equal(p, q) for p, q in zip(trained.model.parameters(), mlp().parameters(), strict=True))

    def test_an_optimizer_that_holds_the_old_ones_is_refused(self) -> None:
        for call in (autoaccum.fit, autoaccum.probe):
            model = mlp()
            with pytest.raises(ArgumentError, match="Moving the model to cpu made new parameters") as caught:
                call(
                    model,
                    classes(24),
                    effective_batch=12,
                    loss_fn=cross_entropy,
                    optimizer=sgd(model.parameters()),
                    device="cpu",
                )
            assert caught.value.argument == "optimizer"

    def test_a_probe_and_a_check_leave_those_that_were_there(self) -> None:
        model = mlp(torch.float64)
        before = list(model.parameters())
        data = classes(24, torch.float64)
        report = autoaccum.probe(model, data, loss_fn=cross_entropy, device="cpu", max_micro_batch=8)
        assert report.max_micro_batch == 8
        checked = autoaccum.check(model, data, loss_fn=cross_entropy, device="cpu")
        assert checked.passed
        assert checked.error is not None
        assert checked.error < 1e-12
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        assert all(p.grad is None for p in before)


def in_parts(**how: Any) -> nn.Module:
    model = mlp()
    model[0].compile(**how)
    return model


GRAPHS: dict[str, Any] = {
    "a mode": lambda: torch.compile(mlp(), mode="reduce-overhead"),
    "an option": lambda: torch.compile(mlp(), options={"triton.cudagraphs": True}),
    "autotuned": lambda: torch.compile(mlp(), mode="max-autotune"),
    "in parts": lambda: in_parts(mode="reduce-overhead"),
}
NO_GRAPHS: dict[str, Any] = {
    "eager": mlp,
    "compiled": lambda: torch.compile(mlp()),
    "autotuned without": lambda: torch.compile(mlp(), mode="max-autotune-no-cudagraphs"),
    "in parts": in_parts,
}


def job_on(kind: str, model: Any) -> Any:
    modules = [getattr(model, "_orig_mod", model)]
    return types.SimpleNamespace(model=model, modules=modules, functions=[], device=torch.device(kind))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestCudaGraphs:
    @pytest.mark.parametrize("how", list(GRAPHS))
    def test_are_refused_where_they_would_be_captured(self, how: str) -> None:
        with pytest.raises(ArgumentError, match="expected a model without CUDA graphs. Compile it with mode='default'"):
            setup.compiled_of(job_on("cuda", GRAPHS[how]()))
        setup.compiled_of(job_on("cpu", GRAPHS[how]()))

    @pytest.mark.parametrize("how", list(NO_GRAPHS))
    def test_what_is_compiled_without_them_is_not(self, how: str) -> None:
        setup.compiled_of(job_on("cuda", NO_GRAPHS[how]()))

    def test_they_are_found_in_what_functions_hold(self) -> None:
        def job(**how: Any) -> Any:
            compiled = torch.compile(cross_entropy, **how)
            found = job_on("cuda", mlp())
            found.functions = [lambda outputs, targets: compiled(outputs, targets)]
            return found

        with pytest.raises(ArgumentError, match="without CUDA graphs"):
            setup.compiled_of(job(mode="reduce-overhead"))
        assert len(setup.compiled_of(job())) == 1

    def test_every_step_is_made_without_them(self) -> None:
        job = job_on("cuda", GRAPHS["a mode"]())
        options = dict.fromkeys(inspect.signature(setup.make_step).parameters)
        with pytest.raises(ArgumentError, match="without CUDA graphs"):
            setup.make_step(**{**options, "job": job})

    def test_also_where_compile_is_told_to_capture_for_all(self) -> None:
        with torch._inductor.config.patch({"triton.cudagraphs": True}), pytest.raises(ArgumentError):
            setup.compiled_of(job_on("cuda", torch.compile(mlp())))
