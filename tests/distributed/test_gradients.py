"""How the gradients of all ranks are added up: at once, and each bucket as soon as it is whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum.distributed import gradients
from autoaccum.distributed.gradients import Compression, _cut
from autoaccum.distributed.group import Group, join
from autoaccum.testing import oom_at
from tests.distributed.launching import launch
from tests.processes import in_turn

pytestmark = in_turn


def joined() -> Group:
    found = join(torch.device("cpu"))
    assert found is not None
    return found


def parameters() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes, kinds = [(3, 4), (7,), (2, 5), (1,)], [torch.float32, torch.float64, torch.float32, torch.float64]
    return [torch.randn(shape, dtype=kind, requires_grad=True) for shape, kind in zip(shapes, kinds, strict=True)]


def added_up(bucket_bytes: int, operation: int | None) -> tuple[list[torch.Tensor], str]:
    gradients._BUCKET_BYTES = bucket_bytes
    found = joined()
    made = parameters()
    found.summing.prepare(made)
    for index, p in enumerate(made):
        if (index + found.rank) % 3:  # some have none, on this rank or that
            p.grad = torch.full_like(p, float(index + 1)) * (found.rank + 1)
    failed = ""
    try:
        with oom_at(operation if operation and found.rank == 1 else 10**6):
            found.summing.add_up(made, 0.5)
    except torch.OutOfMemoryError as error:
        failed = type(error).__name__
    # Whatever has happened, the next exchange is everybody's.
    assert found.exchange(found.rank) == [0, 1]
    return [p.grad for p in made if p.grad is not None], failed


@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 40, 1])
def test_gradients_are_added_up_in_buckets_of_any_size(bucket_bytes: int) -> None:
    (first, _), (second, _) = launch(added_up, 2, bucket_bytes, None)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        there = [rank + 1 for rank in range(2) if (index + rank) % 3]
        assert torch.equal(one, torch.full_like(one, 0.5 * (index + 1) * sum(there)))
        assert torch.equal(one, other)


@pytest.mark.parametrize("operation", [1, 2, 5])
def test_a_rank_that_runs_out_of_memory_goes_on_for_the_others(operation: int) -> None:
    (_, first), (_, second) = launch(added_up, 2, 40, operation)
    assert (first, second) == ("", "OutOfMemoryError")


def rounded(kinds: Sequence[torch.dtype]) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Return the sums in bfloat16, what this rank has of them, and the bytes that it has sent."""
    gradients._BUCKET_BYTES = 60
    found = joined()
    torch.manual_seed(found.rank)
    made = [torch.zeros(50, dtype=kind, requires_grad=True) for kind in kinds]
    for p in made:
        p.grad = torch.randn(50).to(p.dtype)
    own = [p.grad.clone() for p in made if p.grad is not None]
    found.summing.prepare(made, "bf16")
    before = found.channel.num_bytes
    found.summing.add_up(made, 1.0)
    return [p.grad for p in made if p.grad is not None], own, found.channel.num_bytes - before


@pytest.mark.parametrize("size", [2, 3])
def test_wide_gradients_are_added_up_in_bfloat16_and_narrow_ones_as_they_are(size: int) -> None:
    kinds = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    found = launch(rounded, size, kinds)
    assert [num_bytes for *_, num_bytes in found] == [2 * 50 * 4 + 8 * 50] * size
    for of_kind, kind in enumerate(kinds):
        sums, parts = [sums[of_kind] for sums, *_ in found], [own[of_kind] for _, own, _ in found]
        assert all(torch.equal(sums[0], each) for each in sums), "to the bit, on all of them"
        exact = torch.stack([part.to(torch.complex128) for part in parts]).sum(0)
        off = (sums[0] - exact).abs() / torch.stack(parts).abs().sum(0)
        # Each rank's part is rounded once, and so is each of their sums.
        assert off.max() <= (size * 2**-8 if kind != torch.complex64 else 1e-6)
        assert sums[0].dtype == kind
        if kind in (torch.float32, torch.float64):
            assert torch.equal(sums[0], sums[0].bfloat16().to(kind))
        if kind == torch.float16:
            assert off.max() <= size * 2**-11, "in its own eleven bits"


class Layers(nn.Module):
    """A chain of layers, one of which is left out where that is asked for, and one called anew in its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(6))
        self.left_out = -1
        self.is_reentrant = False

    def forward(self, x: torch.Tensor) -> Any:
        for index, layer in enumerate(self.layers):
            if self.is_reentrant and index in (1, 2):  # the same layer twice, each in a backward of its own
                x = checkpoint(self.layers[1], x, use_reentrant=True)
            elif index != self.left_out:
                x = layer(x).tanh()
        return x.sum()


def batch(rank: int, window: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + window)
    return torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)


def overlapped(
    bucket_bytes: int, operation: int | None, compression: Compression = "none", lot_bytes: int = 1
) -> tuple[list[list[torch.Tensor]], list[str], list[int]]:
    """Three windows: the first tells the order, in the second one memory runs out, in the third a layer is left out."""
    gradients._BUCKET_BYTES, gradients._LOT_BYTES = bucket_bytes, lot_bytes
    group, model = joined(), Layers()
    parameters = list(model.parameters())
    group.summing.prepare(parameters, compression)
    with group.summing.listening((), parameters):
        model(batch(group.rank, 0)).backward()
    ordered = [*group.summing.arrived]
    assert [*map(id, ordered)] == [*map(id, reversed(parameters))] or len(ordered) == len(parameters)
    found, failed, begun = [], [], []
    for window in (1, 2):
        model.left_out = 3 if window == 2 and group.rank == 1 else -1
        model.zero_grad()
        fault = operation if operation and group.rank == 1 and window == 1 else 10**6
        failed.append("")
        while True:
            is_ending = False
            try:
                with oom_at(fault):
                    loss = model(batch(group.rank, window))
                    with group.summing.listening(ordered):
                        loss.backward()
                    begun.append(group.summing._begun)
                    group.summing.begin_all(ordered)
                    is_ending = True
                    group.summing.end_all()
                break
            except torch.OutOfMemoryError:
                failed[-1] = "with others" if group.summing.is_begun or is_ending else "alone"
            if failed[-1] == "with others":
                group.summing.drain()
                break
            fault = 10**6  # of which the others hear nothing
            model.zero_grad()
        assert group.exchange(group.rank) == [0, 1], "whatever has happened, this is everybody's"
        found.append([p.grad.clone() for p in parameters if p.grad is not None])
    return found, failed, begun


def expected(window: int) -> list[torch.Tensor]:
    model, loss = Layers(), torch.zeros(()).double()
    for rank in range(2):
        model.left_out = 3 if window == 2 and rank == 1 else -1
        loss = loss + model(batch(rank, window))
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bucket_bytes", [2**20, 260, 40])
def test_sums_that_begin_in_the_backward_are_those_of_all_ranks(bucket_bytes: int) -> None:
    (first, _, begun), (second, _, begun_there) = launch(overlapped, 2, bucket_bytes, None)
    for window, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        for mine, theirs, whole in zip(one, other, expected(window), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-14)
    assert begun[0] == begun[1] == begun_there[0] > 0, "all of them, before the backward has ended"
    assert begun_there[1] < begun[1] or bucket_bytes == 2**20, "a gradient that does not come keeps those behind it"


@pytest.mark.parametrize("lot_bytes", [600, 10**6])
def test_sums_begin_in_lots(lot_bytes: int) -> None:
    (first, _, begun), (_, _, every) = launch(overlapped, 2, 40, None, "none", lot_bytes)
    for mine, whole in zip(first[0], expected(1), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-14)
    assert begun[0] == every[0]
    assert begun[0] > 15 if lot_bytes == 600 else begun[0] == 0, "600 bytes are 15 buckets"


@pytest.mark.parametrize(("operation", "compression"), [(1, "none"), (60, "none"), (75, "none"), (65, "bf16")])
def test_a_rank_that_runs_out_of_memory_in_its_backward_goes_on_for_the_others(
    operation: int, compression: Compression
) -> None:
    bucket_bytes = 260 if compression == "none" else 65  # of as many numbers
    (first, failed, _), (second, failed_there, _) = launch(overlapped, 2, bucket_bytes, operation, compression)
    assert failed == ["", ""]
    assert failed_there == ["alone" if operation < 40 else "with others", ""]
    rtol, atol = (1e-12, 1e-14) if compression == "none" else (2**-6, 1e-3)
    for mine, theirs, whole in zip(first[1], second[1], expected(2), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, whole, rtol=rtol, atol=atol)


def twice() -> bool:
    group, model = joined(), Layers()
    model.is_reentrant = True
    with group.summing.listening((), list(model.parameters())):
        model(batch(0, 0)).backward()
    return group.summing.came_twice


def test_a_gradient_that_comes_in_parts_is_seen() -> None:
    assert launch(twice, 1 + 1) == [True, True]


def by_turns() -> list[torch.Tensor]:
    """Return the gradients of two models that are trained by turns, after a window in which rank 1 has failed."""
    gradients._BUCKET_BYTES = 260
    group, kinds = joined(), (torch.float64, torch.float32)
    first, second = (list(nn.Linear(5, width).to(kind).parameters()) for width, kind in zip((5, 9), kinds, strict=True))
    ways: list[tuple[list[torch.Tensor], Compression]] = [(first, "bf16"), (second, "bf16"), (second, "none")]
    for parameters, compression in ways:
        group.summing.prepare(parameters, compression)
    for _ in range(2):
        for parameters, compression in ways:
            group.summing.expect(parameters, compression)
            for p in parameters:
                p.grad = torch.full_like(p, 1 + 2.0**-12)
            group.summing.begin_all(parameters)
            group.summing.end_all()
    parameters, compression = ways[0]
    group.summing.expect(parameters, compression)
    if group.rank == 0:
        group.summing.begin_all(parameters)
        group.summing.drain()
    else:  # it has begun none of them
        group.summing.catch_up()
    assert group.exchange(group.rank) == [0, 1]
    return [p.grad for p in (*first, *second) if p.grad is not None]


def test_models_that_are_trained_by_turns_have_sums_of_their_own() -> None:
    found = launch(by_turns, 2)
    for summed in found:
        assert isinstance(summed, list), summed
        whole = [2.0, 2.0, 2 + 2.0**-11, 2 + 2.0**-11]
        for gradient, value in zip(summed, whole, strict=True):
            assert torch.equal(gradient, torch.full_like(gradient, value))


def sizes(parameters: Sequence[torch.Tensor]) -> list[list[tuple[int, int, int]]]:
    names = {id(p): index for index, p in enumerate(parameters)}
    return [[(names[id(p)], start, length) for p, start, length in bucket.pieces] for bucket in _cut(parameters)]


def test_buckets_are_of_one_type_and_large_parameters_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_BUCKET_BYTES", 400)
    counts = (10, 4, 250, 7, *[12] * 8)
    made = [torch.zeros(count, dtype=torch.float64 if count in (4, 7) else torch.float32) for count in counts]
    large = [[(2, 0, 100)], [(2, 100, 100)], [(2, 200, 50)], [(3, 0, 7)]]
    small = [[(0, 0, 10), *((index, 0, 12) for index in range(4, 11)), (11, 0, 6)], [(1, 0, 4)], [(11, 6, 6)]]
    assert sizes(made) == large + small


def in_place(bucket_bytes: int) -> tuple[list[bool], list[torch.Tensor]]:
    """Return whether each sum is where the gradient was, and the sums, of gradients that lie in several ways."""
    gradients._BUCKET_BYTES = bucket_bytes
    group = joined()
    made = [torch.zeros(6, 4, requires_grad=True) for _ in range(4)]
    group.summing.prepare(made)
    whole, values = torch.arange(48.0).reshape(6, 8), torch.arange(24.0).reshape(6, 4)
    for p, gradient in zip(made, (values.clone(), values.t().contiguous().t(), whole[:, :4], None), strict=True):
        p.grad = None if group.rank and gradient is None else gradient
    if not group.rank:
        made[3].grad = values.clone()
    before = [0 if p.grad is None else p.grad.data_ptr() for p in made]
    group.summing.add_up(made, 2.0)
    found = [p.grad for p in made if p.grad is not None]
    return [p.data_ptr() == pointer for p, pointer in zip(found, before, strict=True)], found


@pytest.mark.parametrize("bucket_bytes", [96, 40, 2**20])
def test_gradients_are_added_up_however_they_lie(bucket_bytes: int) -> None:
    (lies, sums), (lies_there, others) = launch(in_place, 2, bucket_bytes)
    assert lies[0] is lies_there[0] is True, "what can be added up in place is"
    values = torch.arange(24.0).reshape(6, 4)
    wholes = [4 * values, 4 * values, 4 * torch.arange(48.0).reshape(6, 8)[:, :4], 2 * values]
    for one, other, whole in zip(sums, others, wholes, strict=True):
        assert torch.equal(one, whole)
        assert torch.equal(other, whole)


def of_one_place() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the sums of gradients that autograd has left in one place, and what they are without others' parts."""
    gradients._BUCKET_BYTES = 260
    group = joined()
    torch.manual_seed(group.rank)
    first, second, layer = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4)), nn.Linear(2, 4)
    x, made = torch.randn(1, 8, 2), [first, second, *layer.parameters()]

    def loss() -> torch.Tensor:
        # What comes to the layer is what the gradients of both are views of, and is read after they have come.
        return (layer(x) + first[None] + second[None]).square().sum()

    own = [*torch.autograd.grad(loss(), made)]
    group.summing.prepare(made)
    with group.summing.listening(made):
        loss().backward()
    group.summing.begin_all(made)
    group.summing.end_all()
    return [p.grad for p in made if p.grad is not None], own


def test_sums_are_not_put_where_other_gradients_are_read() -> None:
    (sums, own), (others, theirs) = launch(of_one_place, 2)
    for whole, again, part, other in zip(sums, others, own, theirs, strict=True):
        assert torch.equal(whole, again)
        torch.testing.assert_close(whole, part + other)


def odd() -> list[bool]:
    """Return whether gradients are added up rightly that lie as few do: conjugated, or one number of a column."""
    group = joined()
    torch.manual_seed(group.rank)
    wave, scale = nn.Parameter(torch.randn(200, dtype=torch.complex64)), nn.Parameter(torch.randn(1).double())
    (wave.conj() * torch.randn(200, dtype=torch.complex64)).real.sum().backward()
    scale.grad = torch.randn(2, 3).double()[:, 1][:1]
    made: list[torch.Tensor] = [wave, scale]
    own = [p.grad.resolve_conj().clone() for p in made if p.grad is not None]
    group.summing.prepare(made)
    group.summing.add_up(made, 1.0)
    sums = [sum(each) for each in zip(*group.exchange(own), strict=True)]
    return [torch.allclose(p.grad, whole) for p, whole in zip(made, sums, strict=True)]  # type: ignore[arg-type]


def test_gradients_whose_bytes_cannot_be_seen_are_added_up() -> None:
    assert launch(odd, 2) == [[True, True]] * 2


def of_32_bits_for_parameters_of_16() -> bool:
    """Return whether gradients of another type than their parameters' are added up in it, here none of the second."""
    group = joined()
    made: list[torch.Tensor] = [nn.Parameter(torch.zeros(50).bfloat16()) for _ in range(2)]
    for index, p in enumerate(made):
        p.grad_dtype = torch.float32
        p.grad = None if index == group.rank == 1 else torch.full((50,), 1 + 2.0**-12)
    group.summing.prepare(made)
    group.summing.add_up(made, 1.0)
    wanted = [torch.full((50,), count + count * 2.0**-12) for count in (2, 1)]
    return all(p.grad is not None and torch.equal(p.grad, sums) for p, sums in zip(made, wanted, strict=True))


@pytest.mark.skipif(not hasattr(torch.zeros(()), "grad_dtype"), reason="grad_dtype came with PyTorch 2.13")
def test_gradients_are_added_up_in_their_own_type() -> None:
    assert launch(of_32_bits_for_parameters_of_16, 2) == [True] * 2


def small_between_large() -> float:
    """Return a sum behind a small one, which one rank waits for where the others have it in place."""
    gradients._BUCKET_BYTES = 100_000
    group = joined()
    # Two buckets, the second of which has ten numbers; and as many buckets of others as there are on their way at once.
    made = [torch.zeros(count, requires_grad=True) for count in (25_010, *[2500] * 120)]
    group.summing.prepare(made)
    for p in made:
        p.grad = torch.ones_like(p)
    if group.rank == 1:
        made[0].grad = None
    group.summing.add_up(made, 1.0)
    assert made[-1].grad is not None
    return float(made[-1].grad[0])


def test_a_rank_that_waits_for_a_large_sum_passes_on_a_small_one() -> None:
    assert launch(small_between_large, 3) == [3.0] * 3
