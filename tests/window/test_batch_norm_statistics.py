"""The formulas of BatchNorm by the statistics of a whole window, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import batch_norm

from autoaccum.window.batch_norm_statistics import Norm, normalised, normalised_alone

SHAPES = [(9, 3), (9, 3, 5), (9, 3, 4, 2)]


def drawn(shape: Any) -> torch.Tensor:
    # Far from 0, where a sum of squares would lose its digits.
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1 + 1000


def norm_of(x: torch.Tensor, *sizes: int) -> Norm:
    return Norm.joined([normalised_alone(part, None, None, 1e-5)[1] for part in x.split(sizes)])


class TestStatistics:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 1, 7)])
    def test_parts_have_those_of_the_whole_together(self, shape: Any, sizes: Any) -> None:
        x = drawn(shape)
        found, dims = norm_of(x, *sizes), [dim for dim in range(x.ndim) if dim != 1]
        assert found.count == x.numel() // 3
        torch.testing.assert_close(found.mean, x.mean(dims), rtol=1e-14, atol=0)
        torch.testing.assert_close(found.var, x.var(dims, correction=0), rtol=1e-10, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_those_of_16_bits_are_of_32(self, dtype: torch.dtype) -> None:
        found = normalised_alone(torch.full((4096, 2), 100.0, dtype=dtype), None, None, 1e-5)[1]
        assert found.mean.dtype == found.var.dtype == torch.float32
        assert torch.equal(found.mean, torch.full((2,), 100.0))  # whose sum has no room in 16 bits

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("affine", [False, True])
    def test_what_is_normalised_is_pytorchs(self, shape: Any, affine: bool) -> None:
        x = drawn(shape)
        weight, bias = (torch.randn(3, dtype=torch.float64) for _ in range(2)) if affine else (None, None)
        expected = batch_norm(x, None, None, weight, bias, training=True, eps=1e-3)
        torch.testing.assert_close(normalised(x, norm_of(x, 4, 5), weight, bias, 1e-3), expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_gradients_by_statistics_and_back_from_them_are_autograds(self, shape: Any) -> None:
        x = drawn(shape).requires_grad_()
        weight = torch.randn(3, dtype=torch.float64)
        seed = torch.randn(shape, dtype=torch.float64)
        (expected,) = torch.autograd.grad(batch_norm(x, None, None, weight, None, training=True), x, seed)
        norm = norm_of(x, 2, 7)
        norm.mean.requires_grad_()
        norm.var.requires_grad_()
        normalised(x, norm, weight, None, 1e-5).backward(seed)
        assert x.grad is not None
        found = x.grad + norm.cotangent(x.detach())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        assert not torch.allclose(x.grad, expected, rtol=0, atol=1e-3)

    def test_no_gradient_by_one_of_them_is_none(self) -> None:
        x = drawn((9, 3))
        norm = norm_of(x, 9)
        assert torch.equal(norm.cotangent(x), torch.zeros_like(x))
        norm.mean.grad = torch.full((3,), 18.0, dtype=torch.float64)
        assert torch.equal(norm.cotangent(x), torch.full_like(x, 2.0))
