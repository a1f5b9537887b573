"""What forwards save is elsewhere until backward, and every gradient is the same to the bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum.step import offloading as module
from autoaccum.step.checkpointing import Recomputing
from autoaccum.step.offloading import Offloading, has_host_memory
from tests.devices import DEVICE
from tests.models import same

HERE = torch.device(DEVICE)
of_device = pytest.mark.device
ROWS, WIDTH = 4096, 96
"""A tensor of these takes 1.5 MiB."""


def large(seed: int = 0, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(HERE).requires_grad_(options.get("requires_grad", False))


@pytest.fixture
def offloading() -> Offloading:
    return Offloading([], HERE)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """What was taken of the host's memory."""
    taken: list[weakref.ref[torch.Tensor]] = []
    original = module.host_bytes

    def host_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
        found = original(num_bytes, device)
        taken.append(weakref.ref(found))
        return found

    monkeypatch.setattr(module, "host_bytes", host_bytes)
    return taken


def attention(x: torch.Tensor) -> torch.Tensor:
    """Three views of one storage, one of them transposed; an index and a mask; what is saved as an output."""
    q, k, v = torch.cat([x * 2, x.sin(), x.cos()], dim=1).chunk(3, dim=1)
    mixed = (q * k).softmax(1) * v.t().exp().t()
    kept = torch.where(mixed > 0.01, mixed, mixed.detach() ** 2)
    return kept.flip(0).bfloat16().float() * x  # type: ignore[no-any-return]


def gradient(function: Callable[[torch.Tensor], torch.Tensor], offloading: Offloading | None = None) -> list[Any]:
    x = large(requires_grad=True)

    def loss_of(_: Any, batch: torch.Tensor) -> torch.Tensor:
        return function(batch * 1).sum()

    computed = loss_of if offloading is None else offloading.of_loss(loss_of)
    loss = computed(None, x)
    loss.backward()
    return [loss.detach(), x.grad]


@of_device
def test_gradients_are_the_same_to_the_bit(offloading: Offloading, copies: list[Any]) -> None:
    assert same(gradient(attention, offloading), gradient(attention))
    assert len(copies) == 5, "x * 2 and the rest of the three in one, and four results"
    assert not [copy for copy in copies if copy() is not None], "the graph is gone, and so are its copies"


@of_device
def test_views_of_one_storage_are_one_copy_and_come_back_as_one(offloading: Offloading, copies: list[Any]) -> None:
    with offloading.taking(()):
        both = large(requires_grad=True) * 2
        product = both[: ROWS // 2] * both[ROWS // 2 :].flip(1)[:, ::2].repeat(1, 2)
        a, b = both[1::2], both.t()[:, ::2]
        pair = a * b.t()
    first, second = pair.grad_fn._saved_self, pair.grad_fn._saved_other
    assert first.untyped_storage() is second.untyped_storage()
    assert first.untyped_storage() is not both.untyped_storage()
    assert torch.equal(first, a)
    assert torch.equal(second, b.t())
    assert (first.stride(), first.storage_offset()) == (a.stride(), a.storage_offset())
    assert second.stride() == b.t().stride()
    assert torch.equal(product.grad_fn._saved_self, both[: ROWS // 2])
    assert len(copies) == 1, "of both; what was repeated is small"


@of_device
def test_what_is_written_to_between_two_saves_is_two_copies(offloading: Offloading, copies: list[Any]) -> None:
    """Plainly it is an error: the first operation's input is gone."""
    y, a, b = large(1), large(2, requires_grad=True), large(3, requires_grad=True)
    before = y.clone()
    with offloading.taking(()):
        loss = (y * a).sum()
        y.mul_(2)
        loss = loss + (y * b).sum()
    assert len(copies) == 2
    loss.backward()
    assert torch.equal(a.grad, before)
    assert torch.equal(b.grad, before * 2)


@of_device
def test_what_is_there_anyway_and_what_is_small_stays(copies: list[Any]) -> None:
    layer = nn.Linear(WIDTH, ROWS * 2, device=HERE)
    layer.register_buffer("scale", large(1))
    batch = {"inputs": [large(2)]}
    offloading = Offloading([layer], HERE)
    with offloading.taking(batch):
        outputs = layer(batch["inputs"][0] * 1)[:, :WIDTH] * layer.scale
    assert len(copies) == 1, "of the layer's input"
    outputs.sum().backward()


@of_device
def test_what_stays_is_not_to_be_written_to(offloading: Offloading) -> None:
    """Where hooks are, autograd looks at no version; without them it raises the same."""
    small = torch.ones(3, device=HERE)
    weight = torch.ones(3, device=HERE, requires_grad=True)
    with offloading.taking(()):
        loss = (small * weight).sum()
    small.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@of_device
def test_nothing_of_it_is_held_on_the_device(offloading: Offloading) -> None:
    with offloading.taking(()):
        y = large(requires_grad=True).sin() * 2
        storages = [weakref.ref(y.untyped_storage())]
        z = y.exp()
        storages.append(weakref.ref(z.untyped_storage()))
        loss = z.tanh().sum()
    del y, z
    gc.collect()
    assert [storage() for storage in storages] == [None, None]
    loss.backward()


@of_device
def test_a_backward_may_be_repeated(offloading: Offloading) -> None:
    x = large(requires_grad=True)
    with offloading.taking(()):
        loss = attention(x * 1).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, first)


@of_device
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_other_types(dtype: torch.dtype, offloading: Offloading) -> None:
    if DEVICE != "cpu" and dtype.is_complex:
        pytest.skip("the stand-in has no complex kernels")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.to(dtype)
        return (y * y.conj() * (y + 1).conj()).abs() ** 2

    assert same(gradient(function, offloading), gradient(function))


@of_device
def test_blocks_that_are_computed_again_hold_no_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    model = model.to(HERE)
    x, seen = large(), []
    for block in model:
        block.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0].untyped_storage())))

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    def run(is_elsewhere: bool, is_twice: bool) -> list[Any]:
        torch.manual_seed(1)
        offloading = Offloading([model], HERE)
        recomputing = Recomputing([model], [], HERE)
        recomputing.blocks = list(model)
        computed = recomputing.of_loss(loss_of) if is_twice else loss_of
        seen.clear()
        loss = offloading.of_loss(computed)(model, x) if is_elsewhere else computed(model, x)
        alive = [storage() is not None for storage in seen[1:]]
        model.zero_grad()
        loss.backward()
        assert len(recomputing.compared) == (4 if is_twice else 0)
        return [alive, *(p.grad for p in model.parameters())]

    plain, twice, both = run(False, False), run(False, True), run(True, True)
    assert twice[0] == [True] * 3
    assert both[0] == [False] * 3
    assert same(plain[1:], twice[1:])
    assert same(plain[1:], both[1:])


@of_device
def test_a_validation_goes_by(offloading: Offloading, copies: list[Any]) -> None:
    with torch.no_grad():
        assert gradient_free(offloading) == gradient_free(None)
    assert not copies


def gradient_free(offloading: Offloading | None) -> float:
    loss_of = lambda _, batch: attention(batch).sum()  # noqa: E731
    return float((loss_of if offloading is None else offloading.of_loss(loss_of))(None, large()))


def test_which_devices_have_a_host_beside_them() -> None:
    assert [has_host_memory(torch.device(kind)) for kind in ("cpu", "mps", "cuda", "xpu")] == [False, False, True, True]
