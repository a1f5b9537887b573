"""Optimizers are made or taken as they are, and their state is there before the first step without a trace."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import autoaccum
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    ForeignOptimizerError,
    NoTrainableParametersError,
)
from autoaccum.step.optimizers import (
    allocate_state,
    check_optimizer,
    make_optimizer,
    trainable_parameters,
    with_types_of,
    words_of,
)
from autoaccum.testing import oom_at
from autoaccum.training.trainer import Trainer
from tests.models import classes, mlp

CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1, "t0": 1.0}],
    "Adadelta": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1, "maximize": True}],
    "Adafactor": [{}, {"foreach": True}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"initial_accumulator_value": 0.5}],
    "Adam": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"weight_decay": 0.1}],
    "AdamW": [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True, "fused": True}],
    "Adamax": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "LBFGS": [{}],
    "Muon": [{}, {"nesterov": False}],
    "NAdam": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"foreach": True}, {"foreach": False}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"foreach": True}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}, {"foreach": True}, {"foreach": False}, {"maximize": True}],
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "foreach": True},
        {"momentum": 0.9, "foreach": False},
        {"momentum": 0.9, "fused": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "maximize": True},
    ],
    "SparseAdam": [{}],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{'-'.join(f'{key}={value}' for key, value in options.items())}")
    for name, configurations in CONFIGURATIONS.items()
    for options in configurations
]
ALLOCATING = [
    pytest.param(*case.values, id=case.id)
    for case in CASES
    if case.values[0] != "LBFGS" and "dampening" not in case.values[1]
]
"""All but those that make their state of the gradient."""
every_case = pytest.mark.parametrize(("name", "options"), CASES)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Matrices, of which the last is frozen; one is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(4, 3, generator=generator, dtype=dtype),
        torch.randn(3, 5, generator=generator, dtype=dtype).t(),
    ]
    return [*(nn.Parameter(tensor) for tensor in made), nn.Parameter(torch.ones(2, 2), requires_grad=False)]


def make(name: str, options: dict[str, Any], trained: list[nn.Parameter]) -> Optimizer:
    optimizer: Optimizer = getattr(torch.optim, name)(trained, **{"lr": 0.01, **options})
    return optimizer


def step(optimizer: Optimizer, trained: list[nn.Parameter], seed: int) -> None:
    """Gradients with exact zeros in them, of both signs, and laid out like their parameters, as autograd's are."""
    generator = torch.Generator().manual_seed(seed)
    for p in trained:
        if p.requires_grad:
            dense = torch.empty_like(p, requires_grad=False)
            dense.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
            dense[0] = 0.0
            dense[-1, 0] = -0.0
            p.grad = dense
            if isinstance(optimizer, torch.optim.SparseAdam):
                p.grad = dense.to_sparse(1)
            elif isinstance(optimizer, torch.optim.LBFGS):
                p.grad = dense.contiguous()  # it takes no other
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(lambda: torch.tensor(1.0))  # type: ignore[arg-type, return-value]
    else:
        optimizer.step()
    optimizer.zero_grad()


def run(name: str, options: dict[str, Any], *, allocate: bool, num_steps: int = 3) -> tuple[Any, Any]:
    """(parameters, state) after some steps."""
    trained = parameters()
    optimizer = make(name, options, trained)
    if allocate:
        allocate_state(optimizer)
    for seed in range(num_steps):
        step(optimizer, trained, seed)
    return exactly(trained), exactly(optimizer.state_dict())


def exactly(value: Any) -> Any:
    """Comparable by ==, bit for bit but for the sign of zero, with the order of keys."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return [(key, exactly(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple):
        return [exactly(entry) for entry in value]
    return value


def test_every_optimizer_of_pytorch_is_tested() -> None:
    found = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    assert found == set(CONFIGURATIONS)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
class TestAllocateState:
    @every_case
    def test_three_steps_are_bit_identical(self, name: str, options: dict[str, Any]) -> None:
        plain, allocated = (run(name, options, allocate=allocate) for allocate in (False, True))
        assert plain[0] != exactly(parameters())
        assert allocated == plain

    @pytest.mark.parametrize(("name", "options"), ALLOCATING)
    def test_allocates_what_the_first_step_would(self, name: str, options: dict[str, Any]) -> None:
        def sizes(optimizer: Optimizer) -> list[Any]:
            return [
                [
                    (key, tuple(entry.shape), entry.dtype)
                    for key, entry in optimizer.state[p].items()
                    if torch.is_tensor(entry)
                ]
                for p in optimizer.param_groups[0]["params"]
                if p in optimizer.state
            ]

        allocated = make(name, options, parameters())
        allocate_state(allocated)
        stepped_parameters = parameters()
        stepped = make(name, options, stepped_parameters)
        step(stepped, stepped_parameters, 0)
        assert sizes(allocated) == sizes(stepped)

    @every_case
    def test_takes_no_step(self, name: str, options: dict[str, Any]) -> None:
        trained = parameters()
        optimizer = make(name, options, trained)
        groups = exactly(optimizer.state_dict()["param_groups"])
        allocate_state(optimizer)
        assert exactly(trained) == exactly(parameters())
        assert exactly(optimizer.state_dict()["param_groups"]) == groups
        counters = [state["step"] for state in optimizer.state.values() if "step" in state]
        assert [float(counter) for counter in counters] == [0.0] * len(counters)

    @every_case
    def test_leaves_no_gradients(self, name: str, options: dict[str, Any]) -> None:
        trained = parameters()
        allocate_state(make(name, options, trained))
        assert [p.grad for p in trained] == [None] * 3

    @every_case
    def test_changes_no_state_that_is_there(self, name: str, options: dict[str, Any]) -> None:
        trained = parameters()
        optimizer = make(name, options, trained)
        for seed in range(2):
            step(optimizer, trained, seed)
        before = exactly(optimizer.state_dict())
        allocate_state(optimizer)
        allocate_state(optimizer)
        assert exactly(optimizer.state_dict()) == before

    def test_twice_is_once(self) -> None:
        trained = parameters()
        optimizer = torch.optim.Adam(trained)
        allocate_state(optimizer)
        tensors = [entry for state in optimizer.state.values() for entry in state.values()]
        allocate_state(optimizer)
        again = [entry for state in optimizer.state.values() for entry in state.values()]
        assert all(first is second for first, second in zip(tensors, again, strict=True))

    @pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
    def test_frozen_parameters_get_none(self, name: str) -> None:
        trained = parameters()
        optimizer = make(name, {"momentum": 0.9} if name != "Adam" else {}, trained)
        allocate_state(optimizer)
        assert set(optimizer.state) == set(trained[:2])
        assert trained[2].grad is None

    def test_gradients_that_are_there_stay(self) -> None:
        trained = parameters()
        trained[0].grad = gradient = torch.full((4, 3), 2.0)
        allocate_state(torch.optim.Adam(trained))
        assert trained[0].grad is gradient
        assert gradient.eq(2.0).all()
        assert trained[1].grad is None

    def test_all_groups(self) -> None:
        trained = parameters()
        groups = [{"params": trained[:1]}, {"params": trained[1:], "momentum": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        allocate_state(optimizer)
        assert set(optimizer.state) == {trained[0]}
        optimizer.param_groups[1]["momentum"] = 0.5
        allocate_state(optimizer)
        assert set(optimizer.state) == {trained[0], trained[1]}
        buffers = [optimizer.state[p]["momentum_buffer"] for p in trained[:2]]
        assert [buffer.shape for buffer in buffers] == [p.shape for p in trained[:2]]

    @pytest.mark.parametrize("name", ["AdamW", "SGD"])
    def test_no_call_at_all_to_an_optimizer_of_others(self, name: str) -> None:
        """Also where it derives from one of PyTorch's: nobody knows what its methods do."""
        base: Any = getattr(torch.optim, name)
        calls: list[str] = []

        class Foreign(base):  # type: ignore[misc]
            def __getattribute__(self, attribute: str) -> Any:
                if attribute not in ("__class__", "__dict__"):
                    calls.append(attribute)
                return super().__getattribute__(attribute)

            def step(self, closure: Any = None) -> None:
                raise AssertionError("stepped")

        trained = parameters()
        optimizer = Foreign(trained, lr=0.1)
        calls.clear()
        allocate_state(optimizer)
        assert calls == []
        assert len(optimizer.state) == 0
        assert [p.grad for p in trained] == [None] * 3

    @pytest.mark.parametrize(("name", "options"), ALLOCATING)
    @pytest.mark.parametrize("begun", [False, True])
    def test_an_oom_at_any_operation_leaves_no_trace(self, name: str, options: dict[str, Any], begun: bool) -> None:
        """Half of a state would fail the next step, with a KeyError."""

        def start() -> tuple[list[nn.Parameter], Optimizer]:
            trained = parameters()
            optimizer = make(name, options, trained)
            if begun:  # as when parameters were added since
                step(optimizer, trained[:1], seed=5)
            return trained, optimizer

        if begun and options.get("momentum") and options.get("fused"):
            return  # PyTorch's fused SGD takes no step where some have a buffer and others have none
        _, optimizer = start()
        with oom_at(None) as counter:
            allocate_state(optimizer)
        results = []
        for operation in range(1, counter.operations + 1):
            trained, optimizer = start()
            before = exactly(optimizer.state_dict())
            entries = {p: (state, dict(state)) for p, state in optimizer.state.items()}
            attributes = dict(vars(optimizer))
            with oom_at(operation), pytest.raises(torch.OutOfMemoryError):
                allocate_state(optimizer)
            assert exactly(optimizer.state_dict()) == before
            assert vars(optimizer) == attributes
            for p, (state, held) in entries.items():
                assert optimizer.state[p] is state
                assert all(state[key] is value for key, value in held.items())
            assert [p.grad for p in trained] == [None] * 3
            step(optimizer, trained, seed=6)
            results.append((exactly(trained), exactly(optimizer.state_dict())))
        trained, optimizer = start()
        step(optimizer, trained, seed=6)
        assert counter.operations
        assert results == [(exactly(trained), exactly(optimizer.state_dict()))] * counter.operations

    def test_an_interrupt_leaves_no_trace_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        trained = parameters()
        optimizer = torch.optim.Adam(trained)

        def fail(group: Any, *lists: Any) -> None:
            optimizer.state[trained[0]]["step"] = 1
            raise KeyboardInterrupt

        monkeypatch.setattr(optimizer, "_init_group", fail)
        with pytest.raises(KeyboardInterrupt):
            allocate_state(optimizer)
        assert [p.grad for p in trained] == [None] * 3
        assert len(optimizer.state) == 0

    @pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
    def test_no_dense_buffer_for_a_sparse_gradient(self, layer: Any) -> None:
        model = nn.ModuleList([layer(4, 2, sparse=True), layer(4, 2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        allocate_state(optimizer, [model])
        assert set(optimizer.state) == {model[1].weight}


class Foreign(Optimizer):
    """One that PyTorch does not know, and that remembers which of its methods were called from outside of its step."""

    def __init__(self, trained: Any) -> None:
        self.calls: list[str] = []
        self.depth = 1
        super().__init__(trained, {"lr": 0.1})
        self.depth = 0

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not callable(value) or name.startswith("__"):
            return value

        @functools.wraps(value)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.depth:
                self.calls.append(name)
            self.depth += 1
            try:
                return value(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class TestForeign:
    """An optimizer of others sees a hook before its steps, one ``step`` a window, and no other call."""

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    @pytest.mark.parametrize("fails_at", [None, 20])
    @pytest.mark.parametrize("is_function", [False, True])
    def test_one_step_a_window(self, precision: Any, fails_at: int | None, is_function: bool) -> None:
        model = mlp()
        optimizer = Foreign(model.parameters())
        trainer = Trainer(
            model,
            classes(20),
            effective_batch=8,
            micro_batch=3,
            loss_fn=cross_entropy,
            optimizer=(lambda given: optimizer) if is_function else optimizer,
            clip_norm=0.5,
            precision=precision,
            epochs=2,
            validation_data=classes(5),
            device="cpu",
            progress=False,
        )
        assert optimizer.calls == ["register_step_pre_hook"]
        optimizer.calls.clear()
        with oom_at(fails_at):
            result = trainer.fit()
        assert sum(report.replays for report in result.history) == (fails_at is not None)
        assert optimizer.calls == ["step"] * 6
        assert result.num_steps == 6


class TestMakeOptimizer:
    def test_adamw_fused_by_default(self) -> None:
        trained = parameters()[:2]
        for lr, expected in ((None, 1e-3), (0.25, 0.25), (0, 0)):
            optimizer = make_optimizer(None, lr, trained)
            assert type(optimizer) is torch.optim.AdamW
            assert optimizer.param_groups[0]["params"] == trained
            assert optimizer.param_groups[0]["lr"] == expected
            assert optimizer.param_groups[0]["fused"] is True

    def test_adamw_where_there_is_no_fused_one(self) -> None:
        optimizer = make_optimizer(None, 0.5, [nn.Parameter(torch.ones(2, dtype=torch.complex64))])
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.param_groups[0]["lr"] == 0.5
        allocate_state(optimizer)
        assert not optimizer.param_groups[0]["fused"]

    def test_an_instance_is_used_as_it_is(self) -> None:
        trained = parameters()
        optimizer = torch.optim.Adagrad(trained)
        assert make_optimizer(optimizer, None, trained) is optimizer

    def test_a_function_gets_the_parameters(self) -> None:
        trained = parameters()
        for function in (torch.optim.SGD, lambda given: torch.optim.SGD(given, lr=0.5)):
            optimizer = make_optimizer(function, None, trained)
            assert type(optimizer) is torch.optim.SGD
            assert optimizer.param_groups[0]["params"] == trained

    def test_one_that_holds_some_of_the_parameters(self) -> None:
        trained = parameters()
        other = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([{"params": [other]}, {"params": [trained[1]]}], lr=0.1)
        assert make_optimizer(optimizer, None, trained) is optimizer

    def test_lr_beside_an_optimizer(self) -> None:
        for optimizer in (torch.optim.SGD, torch.optim.SGD(parameters(), lr=0.1)):
            for lr in (0.1, 0.0):
                with pytest.raises(ConflictingArgumentsError, match="lr=.*at most one of lr and optimizer"):
                    make_optimizer(optimizer, lr, parameters())

    def test_one_of_other_parameters(self) -> None:
        with pytest.raises(ForeignOptimizerError, match="optimizer='SGD'"):
            make_optimizer(torch.optim.SGD(parameters(), lr=0.1), None, parameters())

    @pytest.mark.parametrize("optimizer", ["adam", 3, lambda given: None, lambda given: given])
    def test_no_optimizer(self, optimizer: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"expected a torch\.optim\.Optimizer, or a function"):
            make_optimizer(optimizer, None, parameters())

    def test_one_that_needs_a_closure(self) -> None:
        with pytest.raises(ArgumentTypeError, match="optimizer='LBFGS': expected .* needs no closure"):
            make_optimizer(torch.optim.LBFGS, None, parameters())


class TestTrainableParameters:
    def test_those_that_require_a_gradient_once_each(self) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.requires_grad_(False)
        model[2].weight = model[1].weight
        model[2].bias = model[0].bias
        found = trainable_parameters(model, [model])
        assert [id(p) for p in found] == [id(p) for p in (model[0].weight, model[0].bias, model[1].bias)]

    def test_refuses(self) -> None:
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.raises(NoTrainableParametersError, match="model='Linear'") as caught:
            trainable_parameters(frozen, [frozen])
        assert isinstance(caught.value, ArgumentError)
        for model in (nn.Linear, None, lambda inputs: inputs):
            with pytest.raises(ArgumentTypeError, match=r"expected a torch\.nn\.Module"):
                trainable_parameters(model, [])
        with pytest.raises(ArgumentTypeError, match=r"model='Linear'.*not an instance: make one, Linear\(\.\.\.\)"):
            trainable_parameters(nn.Linear, [])


class OfHelpers(torch.optim.SGD):
    """It reads an attribute of parameters in a function that its step calls."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            _helper(p)


def _helper(p: Any) -> Any:
    return [getattr(one, "by_text", None) for one in (p.by_name,)]


def test_words_of_an_optimizer_are_those_of_what_it_calls_too() -> None:
    found = words_of(OfHelpers([nn.Parameter(torch.ones(1))], lr=0.1))
    assert {"by_name", "by_text", "_helper"} <= found
    assert "momentum_buffer" not in found, "PyTorch's own code is known"


class OnSamples(torch.optim.SGD):
    """It steps on a gradient for each sample, which hooks leave on parameters, as differential privacy does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data -= 0.1 * p.grad_sample.sum(0)


@pytest.mark.parametrize("is_early", [True, False])
def test_what_steps_on_something_else_than_gradients_is_refused_before_its_first_step(is_early: bool) -> None:
    model = mlp()
    for p in model.parameters():
        if is_early:
            p.grad_sample = None  # type: ignore[attr-defined]
        p.register_hook(lambda gradient, p=p: setattr(p, "grad_sample", gradient[None]))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ArgumentError, match=r"steps on \.grad.* reads p\.grad_sample .*BatchMemoryManager"):
        Trainer(
            model, classes(12), effective_batch=6, loss_fn=cross_entropy, progress=False, cache=False, micro_batch=2,
            optimizer=OnSamples(model.parameters(), lr=0.1),
        ).fit()  # fmt: skip
    assert all(map(torch.equal, before, model.parameters()))


def test_what_is_left_on_parameters_for_others_is_none_of_an_optimizers() -> None:
    model = mlp()
    for p in model.parameters():
        p.grad_norms, p.grad_of_teacher = [1.0], None  # type: ignore[attr-defined]
    check_optimizer(OfHelpers(model.parameters(), lr=0.1), list(model.parameters()))
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters()))


needs_types_of_gradients = pytest.mark.skipif(
    not hasattr(torch.zeros(()), "grad_dtype"), reason="grad_dtype came with PyTorch 2.13"
)


def halves() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    return model


@needs_types_of_gradients
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adafactor])
def test_gradients_of_another_type_than_their_parameters(kind: Any, tmp_path: Path) -> None:
    inputs = torch.randn(24, 6).bfloat16()
    model = halves()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    for steps in (2, 4):
        model = halves()
        autoaccum.fit(
            model, inputs, effective_batch=12, micro_batch=4, training_step=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda ps: kind(ps, lr=0.1, **options), steps=steps, run_dir=tmp_path, device="cpu", progress=False,
            shuffle=False,
        )  # fmt: skip
    plain = halves()
    optimizer = kind(plain.parameters(), lr=0.1, **options)
    for batch in inputs.split(12) * 2:
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=0.05, atol=0.05)
    other = halves()
    other.weight.grad_dtype = torch.bfloat16
    with_types_of(other.parameters(), model.parameters())
    assert other.weight.grad_dtype is torch.float32


def gradient_of_64(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the gradient that an optimizer steps on, of a window in micro-batches of one sample."""
    torch.manual_seed(1)
    inputs, seen = torch.randn(64, 6).bfloat16(), []
    optimizer.register_step_pre_hook(lambda *args: seen.append([p.grad.clone() for p in model.parameters()]))
    accumulator = autoaccum.Accumulator(
        model, optimizer, training_step=lambda model, batch: model(batch).square().mean(), micro_batch=1, verify=False
    )
    accumulator.step(inputs)
    return torch.cat([gradient.flatten() for gradient in seen[-1]])


@needs_types_of_gradients
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
def test_gradients_of_16_bits_are_summed_in_32_where_the_optimizer_can_step_on_them() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 4).bfloat16()

    errors = {}
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        own = model()
        wide = copy.deepcopy(own).double()
        torch.manual_seed(1)
        wide(torch.randn(64, 6).bfloat16().double()).square().mean().backward()
        exact = torch.cat([p.grad.flatten() for p in wide.parameters()])
        found = gradient_of_64(own, kind(own.parameters(), lr=0.0))
        errors[found.dtype] = float((found.double() - exact).norm() / exact.norm())
    assert errors[torch.float32] < 0.6 * errors[torch.bfloat16]


class OfOthers(nn.Parameter):
    """A parameter of a library's, such as a shard, which gives it its gradient."""


@needs_types_of_gradients
def test_parameters_of_a_subclass_keep_theirs() -> None:
    p = OfOthers(torch.zeros(3, dtype=torch.bfloat16))
    check_optimizer(torch.optim.SGD([p], lr=0.1), [p])
    p.grad = torch.ones_like(p)


@needs_types_of_gradients
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, torch.float32), ({"momentum": 0.9, "foreach": True}, torch.float32), ({"fused": True}, torch.float16)],
)
def test_whether_it_can_is_asked_of_its_options(options: dict[str, Any], expected: torch.dtype) -> None:
    model = nn.Linear(6, 1).half()
    model.weight.grad = torch.ones_like(model.weight)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options), list(model.parameters()))
    assert model.weight.grad_dtype is model.weight.grad.dtype is model.bias.grad_dtype is expected


@needs_types_of_gradients
def test_an_optimizer_that_cannot_step_on_them_is_refused() -> None:
    model = halves()
    with pytest.raises(ArgumentError, match=r"gradients of torch.float32 for parameters of torch.bfloat16"):
        autoaccum.Accumulator(model, torch.optim.AdamW(model.parameters()), loss_fn=nn.functional.mse_loss)


@needs_types_of_gradients
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
def test_an_optimizer_that_cannot_may_follow_one_for_which_they_were_chosen() -> None:
    model, inputs = nn.Linear(6, 1).bfloat16(), torch.randn(8, 6).bfloat16()
    options: dict[str, Any] = {"training_step": lambda model, batch: model(batch).square().mean(), "micro_batch": 4}
    autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), **options).step(inputs)
    assert model.weight.grad_dtype is torch.float32
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        autoaccum.fit(
            model, inputs, effective_batch=8, optimizer=optimizer(model.parameters(), lr=0.1), steps=1, device="cpu",
            progress=False, **options,
        )  # fmt: skip
        assert model.weight.grad_dtype is torch.bfloat16, "a loop by hand may step on what fit leaves"
        assert model.weight.grad is None or model.weight.grad.dtype is torch.bfloat16


@needs_types_of_gradients
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
@pytest.mark.parametrize("kinds", [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_two_that_step_on_the_same_parameters_have_one_type(kinds: tuple[str, str]) -> None:
    """That which both can step on, whichever comes first; and the better one for those of the other alone."""
    torch.manual_seed(0)
    model, alone, inputs = nn.Linear(6, 1).bfloat16(), nn.Linear(6, 1).bfloat16(), torch.randn(8, 6).bfloat16()

    def step(model: Any, batch: Any) -> torch.Tensor:
        return (model(batch) + alone(batch)).square().mean()  # type: ignore[no-any-return]

    made = []
    for kind in kinds:
        parameters = [*model.parameters(), *(alone.parameters() if kind == "SGD" else ())]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        made.append(autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=4))
    for accumulator in (*made, *reversed(made)):
        before = [p.detach().clone() for p in model.parameters()]
        accumulator.step(inputs)
        assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert {p.grad_dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.grad_dtype for p in alone.parameters()} == {torch.float32}


@needs_types_of_gradients
def test_the_default_optimizer_is_refused_too() -> None:
    model = halves()
    with pytest.raises(ArgumentError, match=r"gradients of torch.float32 for parameters of torch.bfloat16"):
        make_optimizer(None, None, list(model.parameters()))
    assert model.weight.grad_dtype is torch.float32, "the user has asked for it"
