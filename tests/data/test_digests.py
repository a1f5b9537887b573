"""Digests of samples: the same for the same samples in each process, others for others, cheap for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data import digests
from autoaccum.data.digests import EACH, EVERY, MOST_BYTES, Rolling, digest_of, is_read


@dataclass
class Sample:
    inputs: Any
    label: int


class Object:
    """Has another address in each process."""


def digest(*things: Any) -> str:
    rolling = Rolling()
    for thing in things:
        rolling.add(thing)
    return rolling.value


PAIRS: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    (torch.arange(10**6), torch.arange(10**6) + 1),
    (np.arange(3), np.arange(3) + 1),
    (np.float32(1), np.float32(2)),
    ("a", "b"),
    (1, 2),
    (True, 1),
    (None, 0),
    ([1, 2], (1, 2)),
    ([[1], 2], [1, [2]]),
    ({"x": 1}, {"y": 1}),
    ({"x": torch.zeros(1)}, {"x": torch.ones(1)}),
    (Sample(torch.zeros(1), 3), Sample(torch.zeros(1), 4)),
    (torch.eye(2).to_sparse(), torch.eye(3).to_sparse()),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_others_have_another(one: Any, other: Any) -> None:
    assert digest(one) == digest(one) != digest(other)
    assert digest(one, other) != digest(other, one)
    assert digest(one, other) == (rolling := Rolling(digest(one)), rolling.add(other))[0].value


def test_objects_that_nobody_knows_are_their_types() -> None:
    assert digest(Object()) == digest(Object())
    assert digest([[[[[[[[[[1]]]]]]]]]]) == digest([[[[[[[[[[2]]]]]]]]]]), "deeper than anybody nests"


class Whole(torch.Tensor):
    """Has something for each of its rows, and so cannot be cut when it is flat."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            raise ValueError("no rows")
        return super().__torch_function__(function, types, args, kwargs)


def test_a_subclass_of_tensor_is_its_numbers() -> None:
    one, same, other = (numbers.as_subclass(Whole) for numbers in (torch.ones(3, 4), torch.ones(3, 4), torch.eye(3, 4)))
    assert digest(one) == digest(same) != digest(other)


def test_an_image_is_its_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    assert digest(image.new("L", (3, 3), 1)) != digest(image.new("L", (3, 3), 2))


def test_the_first_ones_are_read_and_every_so_manieth() -> None:
    assert all(map(is_read, range(EACH)))
    assert [at for at in range(EACH, EACH + 4 * EVERY) if is_read(at)] == list(range(EACH, EACH + 4 * EVERY, EVERY))


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
        read = sum(part.numel() for part in digests._parts(tensor, MOST_BYTES))
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
