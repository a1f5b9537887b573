"""All that a forward and backward may change is remembered, wherever it is held, and put back."""

from __future__ import annotations

import argparse
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.step.snapshot import Gradients, State, same
from autoaccum.testing import oom_at
from tests.devices import DEVICE

HERE = torch.device(DEVICE)
pytestmark = pytest.mark.usefixtures("made_there")

VALUE = 3


class Held:
    """An object whose method is the loss."""

    def __init__(self) -> None:
        self.calls = 0
        self.queue = torch.zeros(2)
        self.layer = nn.BatchNorm1d(2)

    def loss(self, model: Any, batch: Any) -> Any:
        return VALUE


def state_of(model: nn.Module, loss: Any = lambda model, batch: None, written: Any = ()) -> State:
    return State([model], [loss], HERE, [p for p in model.parameters() if p.requires_grad], written)


@pytest.mark.device
def test_tensors_come_back_in_place_wherever_they_are_held() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    model.queue, model.table = torch.ones(2), {"a": [torch.ones(3)]}  # type: ignore[assignment]
    held = Held()
    tensors = [*model.parameters(), *model.buffers(), model.queue, model.table["a"][0]]
    tensors += [held.queue, *held.layer.buffers()]
    before = [t.detach().clone() for t in tensors]
    state = state_of(model, held.loss)
    assert state.moved() == []
    for _ in range(2):
        with torch.no_grad():
            for t in tensors:
                t.data.add_(1)
        assert {id(t) for t in state.moved()} == {id(t) for t in tensors}
        state.restore()
        assert all(torch.equal(t, value) for t, value in zip(tensors, before, strict=True))


TOTAL, SEEN = torch.zeros(()), [0]


def test_names_that_stand_for_another_thing_after_each_call_come_back() -> None:
    """As sums of what was seen do that are kept in a global tensor or list."""
    before = TOTAL, SEEN

    def loss(model: Any, batch: Any) -> Any:
        global TOTAL, SEEN
        TOTAL, SEEN = TOTAL + 1, [*SEEN, 1]
        return model(batch) * TOTAL

    state = state_of(nn.Linear(1, 1), loss)
    loss(nn.Identity(), torch.ones(()))
    state.restore()
    assert TOTAL is before[0]
    assert SEEN is before[1]
    assert (TOTAL.item(), SEEN) == (0.0, [0])


@pytest.mark.device
def test_attributes_variables_and_globals_come_back() -> None:
    global VALUE
    model, held, count, found = nn.Linear(1, 1), Held(), 1, [1]
    model.calls = 1  # type: ignore[assignment]

    def loss(model: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        found.append(2)
        return VALUE, held.loss

    state = state_of(model, loss)
    model.calls = held.calls = 9  # type: ignore[assignment]
    held.layer = nn.BatchNorm1d(2)
    loss(None, None)
    VALUE = 4
    state.restore()
    assert (model.calls, held.calls, count, found, VALUE) == (1, 0, 1, [1], 3)


@pytest.mark.device
def test_generators_come_back_those_of_users_too() -> None:
    own = torch.Generator(DEVICE).manual_seed(3)

    def draw() -> Any:
        return torch.rand(1).item(), random.random(), np.random.rand(), torch.rand(1, generator=own).item()

    state = state_of(nn.Linear(1, 1), lambda model, batch: own)
    expected = draw()
    state.restore()
    assert draw() == expected
    state.restore(random=False)
    assert draw()[:3] != expected[:3]


@pytest.mark.device
@pytest.mark.parametrize(
    ("draw", "is_foreign"),
    [(random.random, True), (np.random.rand, True), (lambda: torch.rand(1), False), (lambda: None, False)],
)
def test_draws_of_foreign_generators_are_noticed(draw: Callable[[], Any], is_foreign: bool) -> None:
    state = state_of(nn.Linear(1, 1))
    draw()
    assert state.foreign_draws() is is_foreign


@pytest.mark.device
def test_of_a_large_model_what_was_written_to_is_kept_and_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoaccum.step.snapshot.SMALL_BYTES", 8)
    model = nn.Linear(4, 4)
    frozen = nn.Sequential(model, nn.Linear(16, 16).requires_grad_(False))
    encoder = nn.Sequential(model, nn.Linear(4, 4).requires_grad_(False))
    for made, written, moved in ((frozen, (model.bias,), 1), (encoder, (), 2), (frozen, (), 0)):
        state = state_of(made, written=written)
        with torch.no_grad():
            for p in made.parameters():
                p.add_(1)
        assert len(state.moved()) == moved


@pytest.mark.device
def test_a_buffer_of_another_shape_comes_back() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("sizes", torch.zeros(2))
    state = state_of(model)
    model.sizes.resize_(5)
    state.restore()
    assert model.sizes.tolist() == [0.0, 0.0]


@pytest.mark.device
def test_it_is_tried_again_where_memory_runs_out() -> None:
    model = nn.BatchNorm1d(2)
    state = state_of(model)
    for number in range(1, 12):
        model.running_mean.add_(1)  # type: ignore[operator, union-attr]
        with oom_at(number):
            state.restore()
        assert not model.running_mean.any()  # type: ignore[operator, union-attr]


@pytest.mark.device
def test_gradients_are_taken_away_and_come_back() -> None:
    with_one, without = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with_one.grad = torch.tensor([1.0, 2.0])
    gradients = Gradients([with_one, without])
    assert with_one.grad is None
    for _ in range(2):
        with_one.grad = without.grad = torch.zeros(2)
        gradients.restore()
        assert with_one.grad is not None
        assert with_one.grad.tolist() == [1.0, 2.0]
        assert without.grad is None


def test_sparse_gradients_come_back_too() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    gradients = Gradients([p])
    gradients.restore()
    assert p.grad is not None
    assert p.grad.to_dense().tolist() == [0.0, 2.0, 0.0]


@pytest.mark.device
def test_a_value_is_the_same_to_the_bit_nan_for_nan() -> None:
    nan = float("nan")
    assert same(torch.tensor([1.0, nan]), torch.tensor([1.0, nan]))
    assert not same(torch.tensor([1.0, nan]), torch.tensor([nan, 1.0]))
    assert not same(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert same(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert not same(torch.tensor([1, 2]), torch.tensor([1, 3]))


@pytest.mark.device
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_of_other_libraries_come_back(make: Any) -> None:
    own = make(3)
    state = state_of(nn.Linear(1, 1), lambda model, batch: own)
    assert not state.foreign_draws()
    drawn = own.random()
    assert state.foreign_draws()
    state.restore()
    assert own.random() == drawn


@pytest.mark.device
@pytest.mark.parametrize("kind", [types.SimpleNamespace, argparse.Namespace])
def test_attributes_of_functions_and_namespaces_come_back(kind: Any) -> None:
    held = kind(calls=1)

    def loss(model: Any, batch: Any) -> None:
        held.calls += 1
        loss.calls += 1  # type: ignore[attr-defined]

    loss.calls = 1  # type: ignore[attr-defined]
    state = state_of(nn.Linear(1, 1), loss)
    loss(None, None)
    state.restore()
    assert (held.calls, loss.calls) == (1, 1)  # type: ignore[attr-defined]


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_buffers_of_scripted_modules_and_tensors_in_tuples_come_back() -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    model.pair = (torch.zeros(2), 1)  # type: ignore[assignment]
    state = state_of(model)
    model(torch.randn(4, 2))
    model.pair[0].add_(1)  # type: ignore[index,union-attr]
    state.restore()
    assert int(model[0].num_batches_tracked) == 0
    assert model.pair[0].tolist() == [0, 0]  # type: ignore[index,union-attr]


@pytest.mark.device
def test_what_another_one_remembers_is_not_copied_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(3))
    first = state_of(model)
    model[0].running_mean.add_(1)  # type: ignore[operator,union-attr]
    parameters = [p for p in model.parameters() if p.requires_grad]
    second = State([model], [], HERE, parameters, like=first)
    copied = [id(one) for one in second._values if all(one is not other for other in first._values)]
    assert len(copied) == 1
    model[0].running_mean.add_(1)  # type: ignore[operator,union-attr]
    second.restore()
    assert model[0].running_mean.tolist() == [1, 1]  # type: ignore[operator,union-attr]
    first.restore()
    assert model[0].running_mean.tolist() == [0, 0]  # type: ignore[operator,union-attr]


def test_what_is_large_is_the_data_where_functions_hold_it_and_state_where_modules_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoaccum.step.snapshot._LARGEST_BYTES", 64)

    class Held:
        def __init__(self) -> None:
            self.data, self.mean = torch.zeros(100), torch.zeros(2)

    held, model = Held(), nn.Linear(1, 1)
    model.cache = [torch.zeros(100)]
    state = State([model], [lambda: held], torch.device("cpu"), [])
    for tensor in (held.data, held.mean, model.cache[0]):
        tensor.add_(1)
    state.restore()
    assert [float(tensor[0]) for tensor in (held.data, held.mean, model.cache[0])] == [1, 0, 0]
    rows = [torch.zeros(16) for _ in range(9)]  # 64 bytes each, of which four times as many are copied
    adjacency = torch.eye(3).to_sparse()
    state = State([], [lambda: (rows, adjacency)], torch.device("cpu"), [])
    for tensor in rows:
        tensor.add_(1)
    state.restore()
    assert sum(float(tensor[0]) for tensor in rows) == 5


def test_which_parameters_need_gradients_comes_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    state = State([model], [], HERE, [])
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    state.restore()
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


def test_a_gradient_of_another_type_comes_back() -> None:
    """As of a step that computes in another type: it changes that of the parameter for the time being."""
    p = torch.ones(2, dtype=torch.float64, device=HERE).requires_grad_()
    own = p.data
    p.data = own.float()
    loss = (p * 3).sum()
    p.data = own
    loss.backward()
    gradients = Gradients([p])
    gradients.restore()
    assert p.grad is not None
    assert p.grad.tolist() == [3, 3]
