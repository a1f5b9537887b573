"""Fake tensors: what they are made of, what is counted of them, and what they cannot do."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from autoaccum.memory.fake import BLOCK_BYTES, FakeMemory, Fakes, RealParameterError, asked_for


class TestFakes:
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_have_the_shape_the_type_and_no_values(self, device: str) -> None:
        real = torch.zeros(4, 6, dtype=torch.bfloat16, device=device).t()
        fake = Fakes().of(real)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.device == torch.device("cpu")
        assert fake.untyped_storage().device == torch.device("meta")

    def test_parameters_are_parameters_with_their_marks(self) -> None:
        real = nn.Parameter(torch.zeros(3), requires_grad=False)
        real.is_shared = True  # type: ignore[attr-defined]
        fake = Fakes().of(real)
        assert isinstance(fake, nn.Parameter)
        assert not fake.requires_grad
        assert fake.is_shared  # type: ignore[attr-defined]

    def test_share_memory_where_the_real_ones_do(self) -> None:
        base, fakes = torch.zeros(8, 1024), Fakes()
        memory = FakeMemory()
        assert memory.hold([fakes.of(base[:2]), fakes.of(base), fakes.of(torch.zeros(1024))]) == (8 + 1) * 4096

    def test_of_sparse_tensors(self) -> None:
        fake = Fakes().of(torch.eye(3).to_sparse())
        assert fake.layout is torch.sparse_coo
        assert fake.shape == (3, 3)


class TestCount:
    def test_in_whole_blocks_while_they_live(self) -> None:
        fakes, memory = Fakes(), FakeMemory()
        with fakes.within(), memory:
            small = torch.zeros(1)
            assert memory.used == BLOCK_BYTES
            large = torch.zeros(1025)
            assert memory.used == BLOCK_BYTES + 4096 + BLOCK_BYTES
            view = large[:2]
            del large, small
            assert memory.used == 4096 + BLOCK_BYTES
            del view
        gc.collect()
        assert memory.used == 0
        assert memory.peak == BLOCK_BYTES + 4096 + BLOCK_BYTES

    def test_of_a_backward_as_a_real_one(self) -> None:
        fakes, memory = Fakes(), FakeMemory()
        weight = fakes.of(nn.Parameter(torch.zeros(1024, 1024)))
        with fakes.within(), memory:
            memory.hold([weight])
            loss = (torch.zeros(4, 1024) @ weight).square().sum()
            loss.backward()
        assert weight.grad is not None
        assert 2 * 2**22 < memory.peak < 2 * 2**22 + 2**17

    def test_a_real_parameter_is_refused_before_it_gets_a_gradient(self) -> None:
        real, fakes = nn.Parameter(torch.ones(3)), Fakes()
        with fakes.within(), FakeMemory(), pytest.raises(RealParameterError):
            (real * 2).sum().backward()
        assert real.grad is None

    def test_no_number_is_drawn(self) -> None:
        before = torch.get_rng_state()
        with Fakes().within(), FakeMemory():
            nn.functional.dropout(torch.randn(100))
        assert torch.equal(before, torch.get_rng_state())


class TestGroupedMatrices:
    @pytest.mark.parametrize("ndims", [(2, 3), (3, 2), (2, 2), (3, 3)], ids=str)
    def test_products_in_float32_have_the_shape_of_real_ones(self, ndims: tuple[int, int]) -> None:
        """PyTorch's own fake takes 16 bits alone; so does torch.compile, and mixtures of experts could not be estimated."""
        first, second = torch.randn(*(2,) * (ndims[0] - 2), 8, 16), torch.randn(*(2,) * (ndims[1] - 2), 16, 8)
        ends = {(2, 3): 8, (3, 2): 8, (2, 2): 16}.get(ndims)
        offs = None if ends is None else torch.tensor([4, ends], dtype=torch.int32)
        real = torch._grouped_mm(first, second, offs=offs)
        fakes, memory = Fakes(), FakeMemory()
        a, b = fakes.of(first.requires_grad_()), fakes.of(second.requires_grad_())
        with fakes.within(), memory:
            product = torch._grouped_mm(a, b, offs=None if offs is None else fakes.of(offs))
            held = memory.used
            product.sum().backward()
        assert (product.shape, product.dtype) == (real.shape, real.dtype)
        assert held >= sum(each.nbytes for each in (first, second, real))
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad.shape, b.grad.shape) == (first.shape, second.shape)


class TestValues:
    def test_are_asked_for_by_an_operation_with_a_name(self) -> None:
        with Fakes().within(), FakeMemory(), pytest.raises(Exception) as caught:  # noqa: PT011
            torch.nonzero(torch.zeros(3))
        assert "aten.nonzero" in (asked_for(caught.value) or "")
        with Fakes().within(), FakeMemory(), pytest.raises(Exception) as caught:  # noqa: PT011
            torch.zeros(3).sum().item()
        assert "aten._local_scalar_dense" in (asked_for(caught.value) or "")
        assert asked_for(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None

    @pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32])
    def test_are_not_read_off_a_real_tensor_that_operations_would_have_changed(self, dtype: torch.dtype) -> None:
        overlooked = torch.tensor(1, dtype=dtype)
        with Fakes().within(), FakeMemory():
            overlooked.detach().copy_(torch.zeros(3, dtype=dtype).sum())
            with pytest.raises(Exception, match="_local_scalar_dense") as caught:
                overlooked.item()
        assert asked_for(caught.value) == "aten._local_scalar_dense.default"

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.complex64])
    def test_are_1_where_that_is_said(self, dtype: torch.dtype) -> None:
        memory = FakeMemory()
        memory.answers_items = True
        with Fakes().within(), memory:
            assert (torch.zeros(3, dtype=dtype) + 0)[0].item() == 1
