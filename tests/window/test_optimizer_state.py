"""The optimizer's state leaves for a window and is back for the step, which is the one that it is without."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.window import optimizer_state as module
from autoaccum.window.optimizer_state import OptimizerState
from autoaccum.window.optimizers import allocate_state
from tests.devices import DEVICE
from tests.models import same

pytestmark = pytest.mark.device

HERE = torch.device(DEVICE)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}
if DEVICE == "cpu":
    OPTIMIZERS["AdamW, fused"] = lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)


def made(kind: str = "AdamW, foreach") -> tuple[nn.Module, torch.optim.Optimizer, OptimizerState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600)).to(HERE)
    optimizer = OPTIMIZERS[kind](model.parameters())
    allocate_state(optimizer)
    return model, optimizer, OptimizerState(optimizer, [model], HERE)


def tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in kept if isinstance(value, torch.Tensor)]


def is_out(tensor: torch.Tensor, state: OptimizerState) -> bool:
    """Whether it views memory that was taken for it: on a CPU it is the same device."""
    return any(tensor.untyped_storage() is host.untyped_storage() for host in state._staging.values())


def requested_bytes() -> int:
    """Return what tensors of the device take, without what the allocator gives beside it, by the gaps that there are."""
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(HERE)
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_step_is_the_same_to_the_bit(kind: str) -> None:
    (model, optimizer, state), (other, plainly, _) = made(kind), made(kind)
    before = tensors(optimizer)
    for seed in range(3):
        versions = [tensor._version for tensor in before]
        state.take_out()
        moved = [is_out(tensor, state) for tensor in before]
        assert moved == [tensor.nbytes > 2**20 for tensor in before]
        assert sum(moved) == 2 * {"SGD": 1, "AdamW, one by one": 3}.get(kind, 2)
        assert same([t.cpu() for t in before], [t.cpu() for t in tensors(plainly)]), "it may be read meanwhile"
        state.put_back()
        assert tensors(optimizer)[0] is before[0]
        assert not any(is_out(tensor, state) for tensor in before)
        assert [tensor.device for tensor in before] == [tensor.device for tensor in tensors(plainly)]
        assert [tensor._version for tensor in before] == versions
        step(model, optimizer, seed)
        step(other, plainly, seed)
    assert same([*model.parameters(), *before], [*other.parameters(), *tensors(plainly)])


def test_the_memory_that_it_leaves() -> None:
    _, optimizer, state = made()
    if DEVICE == "cpu":
        return
    gc.collect()
    before = requested_bytes()
    moved = 2 * 2 * 600 * 600 * 4
    state.take_out()
    assert before - requested_bytes() >= moved
    assert {t.device.type for t in tensors(optimizer) if t.nbytes > 2**20} == {"cpu"}
    state.put_back()
    assert {t.device.type for t in tensors(optimizer) if t.nbytes > 2**20} == {HERE.type}
    # What other tests have left may go at any moment, so that there may be less than before; never more.
    assert requested_bytes() <= before


def test_tensors_that_share_a_storage_share_it_on() -> None:
    model, optimizer, state = made("SGD")
    first, _, second, _ = model.parameters()
    whole = torch.randn(2, 600, 600).to(HERE)
    optimizer.state[first]["momentum_buffer"], optimizer.state[second]["momentum_buffer"] = whole[0], whole[1].t()
    values = [t.clone() for t in tensors(optimizer)]
    beside = whole.view(-1)
    del whole
    state.take_out()
    state.put_back()
    assert same(tensors(optimizer), values)
    optimizer.state[second]["momentum_buffer"].fill_(3.0)
    assert float(beside[-1]) == 3.0, "who holds it beside the state sees what is written to it"
    del beside
    state.take_out()
    state.put_back()
    a, b = (optimizer.state[p]["momentum_buffer"] for p in (first, second))
    assert a.untyped_storage() is b.untyped_storage()
    assert b.stride() == (1, 600)


def test_parameters_in_a_state_stay() -> None:
    model, optimizer, state = made("SGD")
    weight = next(model.parameters())
    optimizer.state[weight]["momentum_buffer"] = weight.detach()
    before = weight.untyped_storage()
    state.take_out()
    assert weight.untyped_storage() is optimizer.state[weight]["momentum_buffer"].untyped_storage() is before
    state.put_back()


def test_memory_that_runs_out_half_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, state = made()
    values = [t.clone() for t in tensors(optimizer)]
    state.take_out()
    calls, original = [0], module.on_device

    def on_device(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("as a test has it")
        return original(*args)

    monkeypatch.setattr(module, "on_device", on_device)
    with pytest.raises(torch.OutOfMemoryError):
        state.put_back()
    assert sum(is_out(t, state) for t in tensors(optimizer)) == 2
    if DEVICE != "cpu":  # where what is out is told by its device
        state.take_out()
        assert sum(is_out(t, state) for t in tensors(optimizer)) == 4
    state.put_back()
    assert not any(is_out(t, state) for t in tensors(optimizer))
    assert same(tensors(optimizer), values)


def test_memory_of_the_host_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, state = made()
    taken, original = [0], module.host_bytes

    def host_bytes(*args: Any) -> torch.Tensor:
        taken[0] += 1
        return original(*args)

    monkeypatch.setattr(module, "host_bytes", host_bytes)
    for _ in range(3):
        state.take_out()
        state.put_back()
    assert taken == [4]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state.take_out()
    state.put_back()
    assert taken == [8], "other tensors than before"
