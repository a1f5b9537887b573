"""The digest of data: the same in each process, another one where a number that is read is another."""

from __future__ import annotations

import torch

from autoaccum.data import contents
from autoaccum.data.contents import MOST_BYTES, digest_of


def test_of_small_tensors_every_byte_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        one = torch.zeros(300, 5, dtype=dtype)
        for place in ((0, 0), (157, 3), (299, 4)):
            other = one.clone()
            other[place] = 1
            assert digest_of([one]) != digest_of([other]), dtype
        assert digest_of([one]) == digest_of([one.clone()])


def test_what_is_no_number_counts_as_its_bytes() -> None:
    nan = torch.full((10,), float("nan"))
    assert digest_of([nan]) == digest_of([nan.clone()]) != digest_of([torch.zeros(10)])
    values = torch.randn(10, dtype=torch.complex64)
    assert digest_of([values.conj()]) == digest_of([values.conj().resolve_conj()]) != digest_of([values])


def test_where_there_is_nothing_to_read() -> None:
    assert digest_of([]) is None
    assert digest_of([["a", "b"]]) is None
    assert digest_of([torch.zeros(3, 3).to_sparse()]) is None


def test_of_large_tensors_some_megabytes_are_read() -> None:
    """Of many small rows, of few large ones, and of one row after the other where even these are large."""
    for shape in ((3 * MOST_BYTES, 1), (1000, 5, 3000), (3, 2 * MOST_BYTES)):
        tensor = torch.zeros(shape, dtype=torch.uint8)
        read = sum(part.numel() for part in contents._parts(tensor, MOST_BYTES))
        assert MOST_BYTES / 4 < read <= MOST_BYTES
        before = digest_of([tensor])
        tensor[0].fill_(1)
        assert digest_of([tensor]) != before
        tensor[0].fill_(0)
        tensor[-1].fill_(1)
        assert digest_of([tensor]) != before


def test_several_share_what_is_read() -> None:
    tensors = [torch.zeros(MOST_BYTES, dtype=torch.uint8) for _ in range(4)]
    before = digest_of(tensors)
    tensors[3][-1] = 1
    assert digest_of(tensors) != before
