"""Samples come out of a packet as they went in, without what they were views of."""

from __future__ import annotations

import numpy as np
import torch

from autoaccum.data.workers import pack, unpack


def test_everything_comes_back() -> None:
    items = [
        (0, 3, {"ids": [1, 2], "text": "a", "array": np.arange(3)}),
        (0, 4, (torch.arange(6).view(2, 3).T, torch.tensor(2.5), torch.tensor([True]), torch.empty(0))),
        (0, 5, torch.ones(3, dtype=torch.bfloat16)),
        (0, 6, torch.eye(2).to_sparse()),
    ]
    (_, _, named), (_, position, dense), (_, _, half), (_, _, sparse) = unpack(pack(items))
    assert position == 4
    assert (named["ids"], named["text"], named["array"].tolist()) == ([1, 2], "a", [0, 1, 2])
    for found, expected in zip(dense, items[1][2], strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert torch.equal(half, items[2][2])  # type: ignore[arg-type]
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.eye(2))


def test_a_view_takes_only_itself_along() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.zeros(1000, 100, dtype=dtype)
        assert len(pack(rows[3])) < 2000


def test_what_comes_back_can_be_edited() -> None:
    found = unpack(pack([torch.zeros(3)]))[0]
    found += 1
    assert found.tolist() == [1.0, 1.0, 1.0]
