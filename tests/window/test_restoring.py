"""What modules and their optimizer have is accepted; what would crash them, or train something else, is refused first."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum._kinds import accepts
from autoaccum.errors import CheckpointCorruptError
from autoaccum.window.modules import left_out, load_modules, load_optimizer
from autoaccum.window.optimizers import allocate_state, needs_closure
from autoaccum.window.restoring import check_like, check_module, check_optimizer, engine


class Lazily(nn.Module):
    """A buffer that the first forward registers, as masks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((4,), 2.0), persistent=False)
        return self.norm(self.layer(inputs)) * self.mask


def problem_of(module: nn.Module, weights: Any, buffers: Any) -> str:
    with pytest.raises(CheckpointCorruptError) as caught:
        check_module(module, weights, buffers, ("weights", "buffers"))
    return f"{caught.value.entry} {caught.value.problem}"


class TestModules:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda w: w.pop("layer.bias"), "weights['layer.bias'] is missing"),
            (lambda w: w.update({"layer.bias": torch.zeros(3)}), "weights['layer.bias'] has the shape (3,), not (4,)"),
            (
                lambda w: w.update({"layer.bias": torch.zeros(4).double()}),
                "weights['layer.bias'] is of torch.float64, not of torch.float32",
            ),
            (lambda w: w.update({"layer.bias": 3}), "weights['layer.bias'] is 3, not a tensor"),
            (lambda w: w.update({"other": torch.zeros(3)}), "weights.other is nothing that the model has"),
            (lambda w: w.pop("norm.running_var"), "weights['norm.running_var'] is missing"),
            (
                lambda w: w.update({"norm.running_var": torch.ones(7)}),
                "weights['norm.running_var'] has the shape (7,), not (4,)",
            ),
            (lambda w: w.update({"grown": None}), "weights.grown is None, not a tensor"),
            (
                lambda w: w._metadata[""].update({"assign_to_params_buffers": [True]}),
                "weights._metadata[''].assign_to_params_buffers is a list of 1, where there is nothing",
            ),
        ],
    )
    def test_of_weights(self, change: Callable[[Any], Any], expected: str) -> None:
        weights = Lazily().state_dict()
        check_module(Lazily(), weights, {}, ("weights", "buffers"))
        change(weights)
        assert problem_of(Lazily(), weights, {}) == expected

    def test_a_users_own_buffers_may_have_grown_and_been_made(self) -> None:
        before = Lazily()
        before(torch.ones(3, 4))
        before.mask.mul_(3)
        before.grown = torch.zeros(5)
        weights, buffers, after = before.state_dict(), left_out(before), Lazily()
        check_module(after, weights, buffers, ("weights", "buffers"))
        load_modules([after], [{"state": weights, "buffers": buffers}], torch.device("cpu"))
        assert after.mask.tolist() == [6.0] * 4, "made in an earlier process, and not of the value that a new one has"
        assert after.grown.shape == (5,)

    @pytest.mark.parametrize("key", ["forward", "norm.late", "nowhere.mask", "grown", "", 3])
    def test_of_buffers_that_cannot_be(self, key: Any) -> None:
        problem_of(Lazily(), Lazily().state_dict(), {key: torch.zeros(1)})

    def test_tied_weights_are_one(self) -> None:
        tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        tied[1].weight = tied[0].weight
        weights = tied.state_dict()
        check_module(tied, weights, {}, ("weights", "buffers"))
        weights["1.weight"] = weights["1.weight"] + 1
        assert problem_of(tied, weights, {}) == "weights['1.weight'] differs from the weights that it is one with"


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer after two steps."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3))]
    if kind is not torch.optim.Muon:
        parameters.append(nn.Parameter(torch.randn(4)))
    made = kind(parameters, **options)
    allocate_state(made)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
            if kind is torch.optim.SparseAdam:
                p.grad = p.grad.to_sparse()
        made.step()
    return made


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind is not torch.optim.LBFGS])
def test_every_optimizer_of_pytorch(kind: type[torch.optim.Optimizer]) -> None:
    before, after = stepped(kind), stepped(kind)
    assert not needs_closure(before)
    state = before.state_dict()
    check_optimizer(after, state, "optimizer")
    fresh = stepped(kind)
    fresh.state.clear()
    check_optimizer(fresh, state, "optimizer")
    large = [(key, name) for key, kept in state["state"].items() for name, v in kept.items() if getattr(v, "ndim", 0)]
    for key, name in large:
        for wrong in (torch.zeros(3), state["state"][key][name].int(), "x", None):
            changed = copy.deepcopy(state)
            changed["state"][key][name] = wrong
            with pytest.raises(CheckpointCorruptError) as caught:
                check_optimizer(after, changed, "optimizer")
            assert caught.value.entry == f"optimizer.state[{key}].{name}"


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a step that is none": (lambda s: s["state"][0].update(step=torch.tensor(-1.0)), "optimizer.state[0].step"),
    "a step of NaN": (lambda s: s["state"][0].update(step=torch.tensor(float("nan"))), "optimizer.state[0].step"),
    "a moment in another order": (
        lambda s: s["state"][0].update(exp_avg=torch.zeros(3, 4).t()),
        "optimizer.state[0].exp_avg",
    ),
    "one moment twice": (
        lambda s: s["state"][0].update(exp_avg=s["state"][0]["exp_avg_sq"]),
        "optimizer.state[0].exp_avg_sq",
    ),
    "a parameter that is not there": (lambda s: s["state"].update({7: {}}), "optimizer.state[7]"),
    "a parameter less": (lambda s: s["state"].pop(1), "optimizer.state[1]"),
    "a group less": (lambda s: s["param_groups"].clear(), "optimizer.param_groups"),
    "parameters in another order": (
        lambda s: s["param_groups"][0].update(params=[1, 0]),
        "optimizer.param_groups[0].params",
    ),
    "a rate that is a text": (lambda s: s["param_groups"][0].update(lr="0.1"), "optimizer.param_groups[0].lr"),
    "a rate below 0": (lambda s: s["param_groups"][0].update(lr=-1.0), "optimizer.param_groups[0]"),
    "a moment that does not fade": (
        lambda s: s["param_groups"][0].update(betas=(1.0, 0.5)),
        "optimizer.param_groups[0]",
    ),
    "an option that this device has not": (
        lambda s: s["param_groups"][0].update(capturable=True, fused=None),
        "optimizer.param_groups[0]",
    ),
    "what the class decides": (
        lambda s: s["param_groups"][0].update(decoupled_weight_decay=False),
        "optimizer.param_groups[0].decoupled_weight_decay",
    ),
    "an entry more": (lambda s: s.update(more=1), "optimizer.more"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_optimizer_cannot_have(name: str) -> None:
    optimizer = stepped(torch.optim.AdamW, fused=True)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    check_optimizer(optimizer, state, "optimizer")
    change, entry = CHANGES[name]
    change(state)
    with pytest.raises(CheckpointCorruptError) as caught:
        check_optimizer(optimizer, state, "optimizer")
    assert caught.value.entry == entry
    after = optimizer.state_dict()
    assert repr(after) == repr(before), "nothing was changed"


class Own(torch.optim.Optimizer):
    """A step of a user's own, whose state nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("factors", [torch.ones(1, 1), torch.eye(7)])


class Derived(torch.optim.AdamW):
    """A class of a user's own with a step of PyTorch's."""


def test_of_optimizers_that_are_a_users_own() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    before, after = Own(parameters), Own(parameters)
    before.step()
    check_optimizer(after, before.state_dict(), "optimizer")
    state = stepped(Derived, fused=True).state_dict()
    check_optimizer(Derived([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))]), state, "optimizer")
    state["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointCorruptError, match=r"optimizer\.state\[0\]\.exp_avg has the shape \(3,\)"):
        check_optimizer(Derived([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))]), state, "optimizer")


class Counting(Own):
    """What it keeps is of all parameters together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        counts = self.state.setdefault("of all", {"steps": 0})  # type: ignore[call-overload]
        counts["steps"] += 1


class Buffering(Own):
    """It keeps in its groups what it has computed, in places that were empty: as RAdam did that came with its paper."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["buffer"] = [[None, None] for _ in range(2)]
        self.param_groups[0]["norm"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["buffer"][1][:] = [1, 0.5]
        group["norm"], group["seen"] = torch.ones(3), [1]


def test_groups_of_a_users_own() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    before, after = Buffering(parameters), Buffering(parameters)
    before.step()
    check_optimizer(after, before.state_dict(), "optimizer")
    load_optimizer(after, before.state_dict())
    assert after.param_groups[0]["buffer"] == [[None, None], [1, 0.5]]
    for name, value in {"lr": "0.1", "params": [1], "buffer": None}.items():
        state = copy.deepcopy(before.state_dict())
        state["param_groups"][0][name] = value
        if value is None:
            del state["param_groups"][0][name]
        with pytest.raises(CheckpointCorruptError, match=name):
            check_optimizer(after, state, "optimizer")


class Wrapping(Own):
    """Its state is in a form of its own, as that of many that wrap another optimizer."""

    inner: torch.optim.Optimizer

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])


def test_state_of_all_parameters_together() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    before, after = Counting(parameters), Counting(parameters)
    before.step()
    check_optimizer(after, before.state_dict(), "optimizer")
    load_optimizer(after, before.state_dict())
    assert after.state["of all"] == {"steps": 1}  # type: ignore[index]
    known = torch.optim.SGD(parameters)
    with pytest.raises(CheckpointCorruptError, match="of no parameter"):
        check_optimizer(known, {**known.state_dict(), "state": {"of all": {}}}, "optimizer")


def test_a_state_in_a_form_of_its_own() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    before, after = Wrapping(parameters), Wrapping(parameters)
    parameters[0].grad = torch.ones(2)
    before.inner.step()
    check_optimizer(after, before.state_dict(), "optimizer")
    load_optimizer(after, before.state_dict())
    assert after.inner.state[parameters[0]]["momentum_buffer"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "present", "is_like"),
    [
        (1, 0.5, True),
        (0.5, 1, True),
        (float("inf"), 0.5, False),
        (True, 1, False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 2, "b": None, "c": False}, True),
        ({"a": 1}, {"a": 2, "b": 0}, False),
        ({"a": 1, "new": "x"}, {"a": 2}, True),
        ({"a": 1, "new": []}, {"a": 2}, False),
        (None, None, True),
        (0, None, False),
        (True, None, True),
        (None, False, True),
        (1, True, False),
        (torch.zeros(2), torch.ones(2), True),
        (torch.zeros(3), torch.ones(2), False),
    ],
)
def test_what_is_like_what_is_there(value: Any, present: Any, is_like: bool) -> None:
    assert accepts(lambda found, entry: check_like(found, present, entry), value) is is_like


@pytest.mark.parametrize(
    "change",
    [{"scale": float("nan")}, {"growth_interval": 0}, {"_growth_tracker": 2**31}, {"scale": True}, {"more": 1}],
)
def test_of_a_scaler(change: dict[str, Any]) -> None:
    others: dict[str, Any] = {"step": 1, "announced": [], "announced of windows": [], "plan": (3, 3)}
    others["runner"] = {"_checked": True, "_examining": False, "_deferred": False}
    scaler = torch.amp.GradScaler("cpu").state_dict()
    for has_scaler, saved in ((True, {**scaler, **change}), (True, None), (False, scaler)):
        with pytest.raises(CheckpointCorruptError) as caught:
            engine(has_scaler=has_scaler)({**others, "scaler": saved, "tuner": {}}, "engine")
        assert caught.value.entry.startswith("engine.scaler")
    with pytest.raises(CheckpointCorruptError) as caught:
        engine(has_scaler=True)({**others, "scaler": scaler, "tuner": {}}, "engine")
    assert caught.value.entry.startswith("engine.tuner"), "the scaler's own state is sound"
