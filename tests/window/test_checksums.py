"""Checksums: by the bits, on the host and on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.window import checksums
from autoaccum.window.checksums import checksum
from tests.devices import DEVICE


def test_a_checksum_is_of_the_values_however_they_lie_and_of_what_lies_plainly_by_no_operation() -> None:
    class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
        operations = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operations += 1
            return func(*args, **(kwargs or {}))

    plain = torch.arange(12.0).reshape(3, 4)
    part, turned = plain[1:], plain.t().contiguous().t()
    whole = torch.complex(plain, plain)
    with Counted() as counted:  # type: ignore[no-untyped-call]
        marks = [checksum(tensor) for tensor in (plain, part, whole)]
    assert counted.operations == 0
    assert len({*marks, checksum(plain.view(4, 3)), checksum(plain.view(torch.int32))}) == 5
    assert checksum(turned) == marks[0]
    assert checksum(part.clone()) == marks[1]
    assert checksum(whole.conj()) == checksum(whole.conj().resolve_conj()) != marks[2]
    assert checksum(whole.conj().imag) == checksum(-plain)
    without_bits = torch._efficientzerotensor((3,))
    assert checksum(without_bits) != checksum(torch._efficientzerotensor((4,)))
    plain[2, 3] += 1
    assert checksum(plain) != marks[0]
    assert checksum(part) != marks[1]


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
@pytest.mark.parametrize("shape", [(600, 401), (70, 11, 403)])
def test_a_checksum_tells_other_bits_wherever_they_are_on_a_device(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(shape, generator=generator).mul(100).to(dtype)
    ones = torch.ones_like(plain)

    def moved(place: int, other: float, tensor: torch.Tensor = plain) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[place] = other
        return tensor

    swapped = plain.flatten().clone()
    swapped[[5, 5000]] = swapped[[5000, 5]]
    several = [plain, swapped.view(shape), -plain, ones, ones * 2, moved(7, 2, ones), moved(8, 2, ones), plain * 0]
    several += [moved(0, 5000), moved(plain.numel() - 1, 5000), moved(plain.numel() // 2, 5000), plain.flatten()]
    if dtype.is_floating_point:
        several += [moved(3, float("nan")), plain * 0 + torch.nan, torch.where(plain > 0, torch.inf, plain)]
    marks = [checksum(tensor.to(DEVICE)) for tensor in several]
    assert len(set(marks)) == len(several)
    assert marks == [checksum(tensor.to(DEVICE)) for tensor in several]


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_tells_what_is_alike_in_all_sums_of_rows_and_columns(dtype: torch.dtype) -> None:
    n = 600
    eye, zeros = torch.eye(n).to(dtype), torch.zeros(n, n, dtype=dtype)
    half, board = zeros.clone(), torch.ones(n, n, dtype=dtype)
    half[::2] *= -1
    board[::2, ::2] = board[1::2, 1::2] = -1
    corners = torch.ones(n, n, dtype=dtype)
    corners[3::100, 5::100] = 2
    moved = torch.ones(n, n, dtype=dtype)
    moved[3::100, 6::100] = 2
    several = [eye, eye.flip(0), eye[torch.randperm(n)], zeros, -zeros, half, board, -board, corners, moved]
    assert len({checksum(tensor.contiguous().to(DEVICE)) for tensor in several}) == len(several)


@pytest.mark.device
def test_of_dimensions_in_another_order_it_is_by_what_each_element_is() -> None:
    image = torch.randn(8, 16, 32, 32)
    last = image.to(DEVICE).contiguous(memory_format=torch.channels_last)
    assert checksum(last) == checksum(last.clone())
    assert checksum(last) != checksum(last.flip(0).contiguous(memory_format=torch.channels_last))


@pytest.mark.device
@pytest.mark.parametrize("rows", [64, 65, 80, 81])
@pytest.mark.parametrize("start", [0, 1, 16])
def test_products_are_of_as_many_rows_and_begin_where_a_gpu_takes_them(
    rows: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, given = torch._int_mm, []

    def watched(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        given.append((one.shape[0], one.data_ptr() % 16))
        return multiply(one, other)

    monkeypatch.setattr(checksums, "_ROWS", 64)
    bits = torch.arange(rows * 2**13 + start, device=DEVICE).remainder(251).to(torch.uint8)[start:]
    first = checksum(bits)
    monkeypatch.setattr(torch, "_int_mm", watched)
    assert checksum(bits) == first == checksum(bits.clone())
    assert DEVICE == "cpu" or given
    assert all(count > 16 and not offset for count, offset in given)


@pytest.mark.device
def test_of_many_sums_it_is_by_the_sums_of_those() -> None:
    zeros = torch.zeros(5 * 2**23 + 3, dtype=torch.uint8, device=DEVICE)
    marks = [checksum(zeros)]
    for place in (0, 2**25, len(zeros) - 1):
        zeros[place] = 1
        marks.append(checksum(zeros))
    assert len(set(marks)) == 4
