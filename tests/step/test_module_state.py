"""The state of modules and optimizers comes back whole, to the bit, with what a state_dict leaves out."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.step.module_state import into_training, left_out, load_modules, load_optimizer, state_of_modules

CPU = torch.device("cpu")


class Inner(nn.Module):
    """A parameter, a buffer that a state_dict has, two that it leaves out, and one of each that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("same", torch.zeros(1).expand(3), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("hidden_none", None, persistent=False)


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Inner()))


def buffers(module: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in module.named_buffers()}


def test_the_buffers_that_a_state_dict_leaves_out_are_named_as_it_would() -> None:
    found = left_out(nested())
    assert {key: buffer.tolist() for key, buffer in found.items()} == {"1.0.hidden": [1, 1], "1.0.same": [0, 0, 0]}
    assert sorted(left_out(Inner())) == ["hidden", "same"]


def test_several_modules_come_back_with_all_of_their_values() -> None:
    modules = [nested(), Inner()]
    for module in modules:
        for value in (*module.parameters(), *module.buffers()):
            value.data = torch.full_like(value, 7)
    states = copy.deepcopy(state_of_modules(modules))
    fresh = [nested(), Inner()]
    load_modules(fresh, states, CPU)
    for module, expected in zip(fresh, modules, strict=True):
        assert buffers(module) == buffers(expected)
        for p, q in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["kept", "hidden"])
@pytest.mark.parametrize(
    "value", [torch.full((2,), 3.0), torch.full((5,), 3.0), torch.full((2,), 3, dtype=torch.int64)], ids=str
)
def test_a_buffer_comes_back_in_the_shape_and_type_that_it_had(name: str, value: torch.Tensor) -> None:
    first, second = Inner(), Inner()
    setattr(first, name, value)
    load_modules([second], state_of_modules([first]), CPU)
    found = getattr(second, name)
    assert (found.tolist(), found.dtype) == (value.tolist(), value.dtype)


@pytest.mark.parametrize("name", ["none", "hidden_none"])
def test_a_buffer_that_a_forward_had_made_is_made(name: str) -> None:
    first, second = Inner(), Inner()
    setattr(first, name, torch.full((2,), 3.0))
    load_modules([second], state_of_modules([first]), CPU)
    assert getattr(second, name).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", ["kept", "hidden"])
def test_a_buffer_that_a_forward_had_dropped_is_dropped(name: str) -> None:
    first, second = Inner(), Inner()
    setattr(first, name, None)
    load_modules([second], state_of_modules([first]), CPU)
    assert getattr(second, name) is None


def test_a_buffer_of_the_same_shape_stays_the_tensor_that_it_is() -> None:
    """What holds it besides, such as another module, goes on sharing it."""
    first, second = Inner(), Inner()
    with torch.no_grad():
        first.hidden.fill_(3)  # type: ignore[operator]
    before = second.hidden
    load_modules([second], state_of_modules([first]), CPU)
    assert second.hidden is before
    assert before.tolist() == [3.0, 3.0]


class Quantised(nn.Module):
    """It writes a scale that it does not read, as layers do whose weights are quantised when they are moved."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.tensor(scale)
        self.register_buffer("codes", torch.ones(2, dtype=torch.int8))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes.scale"] = self.scale


def test_what_a_layer_writes_and_does_not_read_has_to_be_the_same() -> None:
    saved = state_of_modules([Quantised(0.5)])
    load_modules([Quantised(0.5)], saved, CPU)
    with pytest.raises(ValueError, match=r"Quantised does not read 'codes\.scale'"):
        load_modules([Quantised(0.25)], saved, CPU)
    with pytest.raises(ValueError, match="Linear lacks 'weight', 'bias'; does not read 'codes'"):
        load_modules([nn.Linear(1, 1)], saved, CPU)


class InFloat32(torch.optim.Optimizer):
    """Its momentum has more bits than its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def fill(self, value: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"momentum": torch.full_like(p, value, dtype=torch.float32), "step": 3}


def test_what_an_optimizer_keeps_in_more_bits_than_its_parameters_is_not_rounded() -> None:
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = (InFloat32([{"params": [p]} for p in parameters]) for _ in range(2))
    first.fill(1 / 3)
    first.param_groups[1]["lr"] = 0.25
    load_optimizer(second, first.state_dict())
    third = torch.tensor(1 / 3)
    assert third.bfloat16() != third, "else nothing is shown"
    for p in parameters:
        assert second.state[p]["momentum"].dtype is torch.float32
        assert second.state[p]["momentum"].tolist() == [third.item()] * 2
        assert second.state[p]["step"] == 3
    assert [group["lr"] for group in second.param_groups] == [0.05, 0.25]


class Side(enum.Enum):
    ROWS = "rows"


class Moments(NamedTuple):
    first: torch.Tensor
    names: tuple[str, ...]


class Wrapped(torch.optim.Optimizer):
    """It writes its state in a form of its own, which holds that of what it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def state_dict(self) -> Any:
        return {"wrapped": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["wrapped"])


KEPT: dict[str, Any] = {
    "a list": lambda: [torch.full((2,), 1 / 3, dtype=torch.float64)],
    "dicts of several kinds": lambda: OrderedDict(a=defaultdict(list, b=[torch.zeros(2, dtype=torch.int8)])),
    "a text": lambda: "rows",
    "an enum": lambda: Side.ROWS,
    "a named tuple": lambda: Moments(torch.full((2,), 1 / 3, dtype=torch.float64), ("i,j", "j")),
    "a deque": lambda: deque([torch.full((2,), 1 / 3, dtype=torch.float64)], maxlen=3),
    "a size": lambda: torch.Size([2, 3]),
    "a set": lambda: {1, 2},
    "an array": lambda: np.zeros(2),
    "whole numbers": lambda: torch.tensor([2**40 + 1]),
    "bytes": lambda: b"ab",
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_what_an_optimizer_keeps_comes_back_of_the_same_type(name: str, is_wrapped: bool) -> None:
    p = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    first, second = InFloat32([p]), InFloat32([p])
    first.state[p] = {"kept": KEPT[name](), "deeper": [{"kept": KEPT[name]()}]}
    first.state["of none"] = {"kept": KEPT[name]()}  # type: ignore[index]
    saved = copy.deepcopy((Wrapped(first) if is_wrapped else first).state_dict())
    load_optimizer(Wrapped(second) if is_wrapped else second, saved)
    found = dict(second.state)
    assert repr(found) == repr(dict(first.state))
    assert type(found[p]["kept"]) is type(first.state[p]["kept"])
    assert getattr(found[p]["kept"], "maxlen", None) == getattr(first.state[p]["kept"], "maxlen", None)
    assert torch.optim.Optimizer.load_state_dict.__module__ == "torch.optim.optimizer"
    second.load_state_dict(torch.optim.SGD([p], lr=0.1).state_dict())  # as it is without us


def test_a_tensor_that_groups_and_states_share_stays_one() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    first, second = (InFloat32([{"params": [p]} for p in parameters]) for _ in range(2))
    first.param_groups[0]["taken"] = taken = torch.tensor(3)
    for p in parameters:
        first.state[p] = {"step": taken, "deeper": [taken]}
    load_optimizer(second, copy.deepcopy(first.state_dict()))
    second.param_groups[0]["taken"] += 1
    found = [second.state[p] for p in parameters]
    assert [(kept["step"].item(), kept["deeper"][0].item()) for kept in found] == [(4, 4)] * 2
    assert taken.item() == 3


def test_an_optimizer_that_took_no_step_has_nothing_to_come_back() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    first, second = (torch.optim.SGD([parameter], lr=lr, momentum=0.9) for lr in (0.5, 0.1))
    load_optimizer(second, first.state_dict())
    assert second.param_groups[0]["lr"] == 0.5
    assert not second.state


class Frozen(nn.Module):
    """A model that keeps its backbone in eval mode, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Sequential(nn.Dropout())

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_model_that_freezes_layers_itself_is_asked_to(is_inner: bool) -> None:
    own = Frozen()
    model = nn.Sequential(own, nn.Dropout()) if is_inner else own
    assert own.backbone.training  # as it is made
    into_training(model)
    assert [own.backbone.training, own.backbone[1].training, own.head.training] == [False, False, True]
    model.eval()
    into_training(model)
    assert [model.training, own.head.training, own.backbone.training] == [True, True, False]
    # What was frozen by hand stays so, and what has no such method is not touched.
    plain = nn.Sequential(nn.Dropout(), nn.Dropout())
    plain[0].eval()
    into_training(plain)
    assert [module.training for module in plain] == [False, True]


def test_a_run_asks_it_before_the_first_window() -> None:
    model, modes = Frozen(), list[bool]()

    def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        modes.append(model.backbone.training)
        return model.backbone(batch).square().mean()  # type: ignore[no-any-return]

    autoaccum.fit(model, torch.randn(8, 2), effective_batch=4, training_step=step, progress=False, device="cpu")
    assert set(modes) == {False}
