"""Samples that lie in another dim than 0 are found, cut and joined there; what is not clear is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import ones, zeros

from autoaccum.data.dims import AtDim, check_dims, hint_of
from autoaccum.data.sources import open_source
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError, RaggedBatchError

CPU = torch.device("cpu")


def numbered(*shape: int, dim: int) -> torch.Tensor:
    """Sample i is full of i."""
    ends = [1] * len(shape)
    ends[dim] = shape[dim]
    return torch.arange(shape[dim]).reshape(ends).expand(shape)


@pytest.mark.parametrize(
    ("dims", "batch", "where"),
    [
        (1, numbered(5, 4, 3, dim=1), [1]),
        (1, (numbered(5, 4, 3, dim=1), numbered(4, dim=0)), [1, 0]),
        (1, (numbered(5, 4, 3, dim=1), numbered(5, 4, dim=1)), [1, 1]),
        (1, (numbered(5, 4, 3, dim=1), numbered(4, 2, dim=0)), [1, 0]),
        (1, (numbered(5, 4, 3, dim=1), numbered(4, 5, dim=0)), [1, 0]),  # as many classes as steps
        (1, {"x": numbered(4, 4, 3, dim=1), "y": numbered(4, dim=0), "names": ["0", "1", "2", "3"]}, [1, 0, 0]),
        (2, (numbered(3, 5, 4, dim=2), numbered(4, dim=0)), [2, 0]),
        (1, (numbered(5, 4, 3, dim=1).numpy(), 0.5), [1, None]),
        ((1, 0), (numbered(4, 4, 3, dim=1), numbered(4, 4, dim=0)), [1, 0]),
        ({"x": 1, "rest": 0, "shared": None}, {"x": numbered(5, 4, dim=1), "rest": [numbered(4, 9, dim=0)] * 2,
          "shared": ones(7)}, [1, 0, 0, None]),
        ([1, 0], (numbered(5, 4, dim=1), numbered(4, dim=0)), [1, 0]),
    ],
)  # fmt: skip
def test_where_samples_lie(dims: Any, batch: Any, where: list[int | None]) -> None:
    split = AtDim(dims)
    assert split.count(batch) == 4
    assert list(split.of_leaves(batch).values()) == where
    part = split(batch, 1, 2)
    assert split.count(split(batch, 1, 1)) == 1, "what a batch has shown holds for what is cut of it"

    def numbers(leaf: Any) -> list[int]:
        if isinstance(leaf, dict | list | tuple):
            inner = leaf.values() if isinstance(leaf, dict) else leaf
            return sorted({number for entry in inner for number in numbers(entry)})
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.dtype != torch.float32:
            return sorted(set(leaf.reshape(-1).tolist()))
        return [int(leaf)] if isinstance(leaf, str) else []

    assert numbers(part) == [1, 2]
    assert numbers(split.join([split(batch, 3, 1), part])) == [1, 2, 3]
    assert split.count(split.join([split(batch, 3, 1), part])) == 3


def test_rows_of_dim_0_are_what_they_are_without_it() -> None:
    batch = (torch.arange(4), ones(4, 3))
    assert AtDim(0).count(batch) == 4
    assert AtDim((0, 0))(batch, 1, 2)[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("dims", "error"),
    [(-1, ArgumentError), (1.0, ArgumentTypeError), (True, ArgumentTypeError), ("1", ArgumentTypeError),
     ({"x": "1"}, ArgumentTypeError), ((1, (0, -2)), ArgumentError)],
)  # fmt: skip
def test_what_is_no_dim_is_refused(dims: Any, error: type[ArgumentError]) -> None:
    with pytest.raises(error) as caught:
        check_dims(dims)
    assert caught.value.argument == "batch_dim"


def test_a_structure_of_dims_that_holds_itself_is_refused() -> None:
    dims: list[Any] = [0]
    dims.append(dims)
    with pytest.raises(ArgumentError, match="a structure that holds itself"):
        check_dims(dims)


class TestRefuses:
    def test_leaves_without_an_extent_in_common(self) -> None:
        with pytest.raises(RaggedBatchError, match="in the dims that batch_dim says") as caught:
            AtDim(1).count((ones(5, 4, 3), ones(6)))
        assert caught.value.sizes == {"[0]": 4, "[1]": 6}
        with pytest.raises(RaggedBatchError, match="in the dims that batch_dim says"):
            AtDim((1, 0)).count((ones(5, 4), ones(5)))

    def test_a_leaf_that_may_lie_in_either_dim(self) -> None:
        with pytest.raises(DataError, match=r"holds \[1\] of shape \(4, 4\).*batch_dim=\(1, 0\)"):
            AtDim(1).count((ones(5, 4, 3), ones(4, 4)))
        assert AtDim((1, 0)).count((ones(5, 4, 3), ones(4, 4))) == 4

    @pytest.mark.parametrize("state", [(zeros(2, 4, 6), zeros(2, 4, 6)), zeros(1, 4, 6)])
    def test_a_hidden_state_is_cut_with_its_samples(self, state: Any) -> None:
        batch = (ones(5, 4, 3), state, ones(4))
        assert AtDim(1).count(batch) == AtDim((1, 1, 0)).count(batch) == 4
        cut = AtDim(1)(batch, 1, 2)[1]
        assert all(part.shape[1] == 2 for part in (cut if isinstance(cut, tuple) else (cut,)))

    def test_dims_in_another_structure(self) -> None:
        with pytest.raises(ArgumentError, match=r"The batch holds \['y'\]"):
            AtDim({"x": 1}).count({"x": ones(5, 4), "y": ones(4)})
        with pytest.raises(ArgumentError, match="1 dimension"):
            AtDim(({"a": 1},)).count(({"a": ones(4)},))


class TestHints:
    def test_what_looks_time_first_is_told_the_argument(self) -> None:
        assert "with 4 in dim 1. If these are the samples, pass batch_dim=1" in hint_of((ones(5, 4, 3), ones(4)))
        assert hint_of((ones(5), ones(4))) == ""


class TestTensorsAsData:
    def test_their_samples_are_shuffled_and_gathered(self) -> None:
        data = (numbered(5, 6, 3, dim=1), numbered(6, dim=0))
        source = open_source(data, seed=0, shuffle=True, device=CPU, split=AtDim(1))
        assert source.num_samples == 6
        window = source.read(0, lambda position: (6,)).window(6)
        assert window is not None
        inputs, labels = window.micro_batch(0, 6)
        assert sorted(labels.tolist()) == [0, 1, 2, 3, 4, 5] != labels.tolist()
        assert inputs.shape == (5, 6, 3)
        assert torch.equal(inputs[2, :, 1], labels)
        assert torch.equal(window.samples([2, 0])[0][0, :, 0], labels[[2, 0]])
        assert source.example(8)[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
        # A run that goes on is refused other samples.
        other = open_source(data, seed=0, shuffle=True, device=CPU, split=AtDim((1, 0)))
        assert source.description()["batch_dim"] == 1
        assert source.description() != other.description()


def test_what_a_batch_has_shown_holds_for_its_parts() -> None:
    """Of four samples with four labels each, the part alone would not tell."""
    split, batch = AtDim(1), (ones(5, 8, 3), ones(8, 4))
    assert split.count(batch) == 8
    part = split(batch, 2, 4)
    assert [leaf.shape for leaf in part] == [(5, 4, 3), (4, 4)]
    assert [leaf.shape for leaf in split(part, 1, 2)] == [(5, 2, 3), (2, 4)]
    with pytest.raises(DataError, match="does not tell"):
        AtDim(1).count(part)
