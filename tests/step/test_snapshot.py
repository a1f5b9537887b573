"""Law 2, of the part that is not gradients: buffers and random states are put back bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.step.snapshot import Snapshot
from tests.devices import DEVICE

HERE = torch.device(DEVICE)
pytestmark = pytest.mark.usefixtures("made_there")


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", None)
        self.register_buffer("hidden", torch.tensor([True, False]), persistent=False)
        self.inner = nn.BatchNorm1d(2)


def state(model: nn.Module) -> list[tuple[str, str, Any]]:
    """Every buffer's name, in order, its dtype and its values."""
    return [
        (f"{path}.{name}", "" if buffer is None else str(buffer.dtype), None if buffer is None else buffer.tolist())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
    ]


def taken(*models: nn.Module) -> Snapshot:
    snapshot = Snapshot(models, HERE)
    snapshot.take()
    return snapshot


def write_in_place(model: Any) -> None:
    model.mean.mul_(7)
    model.count += 1
    model.hidden.logical_not_()
    model.inner(torch.randn(4, 2))


def write_through_data(model: Any) -> None:
    """As hand-written moving averages do: it moves no version counter."""
    version = model.mean._version
    model.mean.data.mul_(7)
    model.count.data += 1
    assert model.mean._version == version


def exchange_data(model: Any) -> None:
    model.mean.data = torch.tensor([8.0, 9.0])


def replace(model: Any) -> None:
    model.mean = model.mean * 7
    model.count = torch.tensor(9.5)


def replace_by_another_shape(model: Any) -> None:
    model.mean = torch.cat([model.mean, model.mean])


def fill_and_empty(model: Any) -> None:
    model.empty = torch.ones(3)
    model.hidden = None


def add(model: Any) -> None:
    model.register_buffer("late", torch.ones(3))
    model.inner.register_buffer("late", None)


def remove(model: Any) -> None:
    del model.count
    del model.inner.running_mean


CHANGES: list[Callable[[Any], None]] = [
    write_in_place,
    write_through_data,
    exchange_data,
    replace,
    replace_by_another_shape,
    fill_and_empty,
    add,
    remove,
]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@pytest.mark.device
@every_change
def test_puts_back(change: Callable[[Any], None]) -> None:
    model = Buffers()
    before, tensors = state(model), dict(model.named_buffers())
    snapshot = taken(model)
    change(model)
    assert state(model) != before
    snapshot.restore()
    assert state(model) == before
    assert all(buffer is tensors[name] for name, buffer in model.named_buffers()), "the tensors themselves came back"


@pytest.mark.device
@every_change
def test_puts_back_twice(change: Callable[[Any], None]) -> None:
    model = Buffers()
    before = state(model)
    snapshot = taken(model)
    for _ in range(2):
        change(model)
        snapshot.restore()
        assert state(model) == before


@pytest.mark.device
@every_change
def test_a_later_take_remembers_the_later_state(change: Callable[[Any], None]) -> None:
    model = Buffers()
    snapshot = taken(model)
    change(model)
    changed = state(model)
    snapshot.take()
    model.mean.fill_(100)
    model.inner.num_batches_tracked.fill_(100)
    assert state(model) != changed
    snapshot.restore()
    assert state(model) == changed


@pytest.mark.device
def test_state_dict_is_whole_after_a_restore() -> None:
    """hidden is not persistent, before and after."""
    model = Buffers()
    keys = list(model.state_dict())
    snapshot = taken(model)
    remove(model)
    fill_and_empty(model)
    snapshot.restore()
    assert list(model.state_dict()) == keys
    assert "hidden" not in keys


@pytest.mark.device
def test_a_shared_buffer_stays_shared() -> None:
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    second.running_mean = first.running_mean
    snapshot = taken(nn.ModuleList([first, second]), first)
    second.running_mean = torch.ones(2)
    assert first.running_mean is not None
    first.running_mean.add_(5)
    snapshot.restore()
    assert first.running_mean is second.running_mean
    assert first.running_mean.tolist() == [0.0, 0.0]


@pytest.mark.device
def test_several_modules() -> None:
    model, loss = nn.BatchNorm1d(2), Buffers()
    snapshot = taken(model, loss)
    before = state(model), state(loss)
    model(torch.randn(4, 2))
    write_in_place(loss)
    snapshot.restore()
    assert (state(model), state(loss)) == before


@pytest.mark.device
def test_dtypes_and_requires_grad() -> None:
    model = nn.Module()
    for name, dtype in (("a", torch.float64), ("b", torch.bfloat16), ("c", torch.int64), ("d", torch.complex64)):
        model.register_buffer(name, torch.ones(2, dtype=dtype))
    model.register_buffer("e", torch.ones(2, requires_grad=True))
    before = state(model)
    snapshot = taken(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.mul_(3)
    snapshot.restore()
    assert state(model) == before
    assert model.get_buffer("e").requires_grad


@pytest.mark.device
def test_takes_share_their_memory() -> None:
    """Once it was taken, taking it again allocates nothing, whatever was written in place meanwhile."""
    model = Buffers()
    snapshot = taken(model)

    def copies() -> list[int]:
        return sorted(copy.data_ptr() for _, copy in snapshot._copies.values())

    first = copies()
    assert len(first) == len(list(model.buffers()))
    for _ in range(3):
        write_in_place(model)
        snapshot.take()
        assert copies() == first
    assert model.mean.tolist() == [343.0, 686.0]
    snapshot.restore()
    assert model.mean.tolist() == [343.0, 686.0], "that of the last take"


@pytest.mark.device
def test_what_is_gone_is_forgotten() -> None:
    model = Buffers()
    snapshot = taken(model)
    count = len(snapshot._copies)
    replace(model)
    remove(model)
    snapshot.take()
    assert len(snapshot._copies) == count - 2


@pytest.mark.device
def test_random_states_come_back() -> None:
    for model in (nn.Linear(2, 2), Buffers()):  # without buffers, and with them
        snapshot = taken(model)
        drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
        for _ in range(2):
            snapshot.restore()
            assert [torch.rand(2).tolist(), random.random(), np.random.rand()] == drawn


@pytest.mark.device
def test_a_later_take_remembers_the_later_random_states() -> None:
    snapshot = taken(Buffers())
    torch.rand(1), random.random(), np.random.rand()
    snapshot.take()
    drawn = [torch.rand(2).tolist(), random.random(), np.random.rand()]
    snapshot.restore()
    assert [torch.rand(2).tolist(), random.random(), np.random.rand()] == drawn


@pytest.mark.device
class TestUnusual:
    def test_the_first_buffer_of_a_module_is_taken_away_again(self) -> None:
        model = nn.Linear(2, 2)
        snapshot = taken(model)
        model.register_buffer("mean", torch.ones(2))
        snapshot.restore()
        assert dict(model.named_buffers()) == {}

    def test_data_of_another_shape(self) -> None:
        model = nn.Module()
        model.register_buffer("queue", torch.zeros(1, 2))
        snapshot = taken(model)
        model.queue.data = torch.ones(3, 2)
        snapshot.restore()
        assert model.queue.tolist() == [[0.0, 0.0]]

    def test_an_expanded_buffer(self) -> None:
        model = nn.Module()
        model.register_buffer("scale", torch.ones(1).expand(5))
        snapshot = taken(model)
        snapshot.restore()
        assert model.scale.tolist() == [1.0] * 5


@pytest.mark.device
def test_random_states_alone_are_put_back() -> None:
    layer = nn.BatchNorm1d(2)
    snapshot = Snapshot([layer], torch.device(DEVICE))
    snapshot.take()
    drawn = torch.rand(1), random.random(), np.random.rand()
    layer(torch.randn(4, 2))
    mean = layer.running_mean.clone()  # type: ignore[union-attr]
    snapshot.restore_random()
    assert (torch.rand(1), random.random(), np.random.rand()) == drawn
    assert torch.equal(layer.running_mean, mean)  # type: ignore[arg-type]


def test_the_modes_of_all_modules_are_told() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    snapshot = Snapshot([model, model[0]], torch.device(DEVICE))
    assert snapshot.modes() == [True, True, False]
    model.eval()
    assert snapshot.modes() == [False] * 3


def test_generators_of_the_users_own_go_back() -> None:
    """Those that functions and modules hold: PyTorch's, NumPy's and Python's."""
    held, numbers, plain = torch.Generator(), np.random.default_rng(0), random.Random(0)
    model = Buffers()
    model.generator = torch.Generator().manual_seed(3)

    def step() -> list[float]:
        drawn = [torch.rand((), generator=one, device="cpu").item() for one in (held, model.generator)]
        return [*drawn, numbers.random(), plain.random()]

    snapshot = Snapshot([model], HERE, [step])
    snapshot.take()
    first = step()
    assert step() != first
    snapshot.restore()
    assert step() == first
    snapshot.restore_random()
    assert step() == first


def test_a_generator_that_data_draw_from_too_is_not_put_back() -> None:
    """What was read stays read, so that its draws would be drawn once more."""
    shared, own = torch.Generator(), torch.Generator()

    def step() -> list[float]:
        return [torch.rand((), generator=one, device="cpu").item() for one in (shared, own)]

    snapshot = Snapshot([], HERE, [step])
    snapshot.take()
    read = snapshot.read_by(lambda: torch.rand((), generator=shared, device="cpu").item())
    first = step()
    snapshot.restore()
    later = step()
    assert later[1] == first[1]
    assert len({read, first[0], later[0]}) == 3
    assert Snapshot([], HERE).read_by(lambda: 3) == 3


def test_which_parameters_need_gradients_comes_back() -> None:
    """A step that has failed may have frozen some for a call, and others the other way around."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    snapshot = taken(model)
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    snapshot.restore()
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
