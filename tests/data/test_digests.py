"""Digests of samples: the same for the same samples in each process, others for others, cheap for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data.digests import EACH, EVERY, Rolling, is_read


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
