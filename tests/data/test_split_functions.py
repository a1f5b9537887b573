"""What a function cuts is joined in dim 0, if that gives what it cuts of two samples; else its join is asked for."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from autoaccum.data import objects
from autoaccum.data.splits import Given
from autoaccum.errors import DataError
from tests.graphs import GraphBatch, graphs


class Pair(NamedTuple):
    x: Any
    y: Any


ROWS = torch.arange(12).reshape(4, 3)

CUTS: dict[str, Any] = {
    "rows": lambda start, stop: ROWS[start:stop],
    "arrays": lambda start, stop: ROWS.numpy()[start:stop],
    "images in a list": lambda start, stop: [torch.full((3, 2), i) for i in range(start, stop)],
    "a tuple of columns": lambda start, stop: (tuple(ROWS[start:stop]), ["a", "b", "c", "d"][start:stop]),
    "parts in a list": lambda start, stop: [ROWS[start:stop], ROWS[start:stop, 0]],
    "a dict": lambda start, stop: {"x": ROWS[start:stop], "y": [1, 2, 3, 4][start:stop], "scale": 2.5, "none": None},
    "a mapping": lambda start, stop: UserDict(x=ROWS[start:stop], rate=float("nan")),
    "a named tuple": lambda start, stop: Pair(ROWS[start:stop], torch.tensor(3)),
    "packed": lambda start, stop: pack_sequence([ROWS[i, : 1 + i % 2] for i in range(start, stop)], False),
    "graphs": lambda start, stop: GraphBatch.from_data_list(graphs(4)[start:stop]),
}


def plain(value: Any) -> Any:
    if isinstance(value, dict | UserDict):
        return type(value).__name__, {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return [plain(part) for part in value[:2]]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(entry) for entry in value]
    if isinstance(value, GraphBatch):
        return plain(value.x), plain(value.batch)
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else repr(value)


def given(cut: Any) -> Given:
    return Given(lambda batch, start, size: cut(start, start + size))


@pytest.mark.parametrize("form", list(CUTS))
def test_parts_are_joined_in_their_order(form: str) -> None:
    cut = CUTS[form]
    split = given(cut)
    split.count(ROWS)
    assert plain(split.join([cut(0, 1), cut(1, 4)])) == plain(cut(0, 4))
    assert plain(split.join([cut(0, 2), cut(2, 3), cut(3, 4)])) == plain(cut(0, 4))
    # In another order too, of which the whole has none.
    if not objects.is_packed(cut(0, 1)):
        assert plain(split.join([cut(1, 3), cut(0, 1)])) != plain(cut(0, 3))


def test_one_part_is_what_it_is() -> None:
    part = object()
    assert Given(lambda batch, start, size: None).join([part]) is part


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        (lambda start, stop: ROWS.T[:, start:stop], "two samples joined in dim 0 are not what it cuts of both"),
        (lambda start, stop: torch.ones(stop - start, stop), "Sizes of tensors must match"),
        (lambda start, stop: ROWS[start:stop].flip(0), "two samples joined in dim 0 are not what it cuts of both"),
        (lambda start, stop: [ROWS] * 3 if stop - start > 1 else [ROWS], "two samples joined in dim 0"),
        (lambda start, stop: {start + stop: ROWS}, "they hold"),
        (lambda start, stop: ROWS if stop - start > 1 else 3, "two samples joined in dim 0"),
        (lambda start, stop: {"x": torch.tensor(start)}, "is tensor.0. in one of them"),
        (lambda start, stop: [][5], "cutting one sample failed"),
    ],
)
def test_what_does_not_show_it_names_the_cure(cut: Any, why: str) -> None:
    split = given(cut)
    split.count(ROWS)
    with pytest.raises(DataError, match=f"cannot be joined .*{why}.*split.join = lambda parts"):
        split.join([ROWS, ROWS])


def test_a_batch_of_one_sample_shows_nothing_and_the_next_one_does() -> None:
    split = Given(lambda batch, start, size: batch[start : start + size])
    split.count(ROWS[:1])
    with pytest.raises(DataError, match="no batch has had two samples"):
        split.join([ROWS[:1], ROWS[1:]])
    split.count(ROWS)
    assert torch.equal(split.join([ROWS[:1], ROWS[1:]]), ROWS)


def test_what_parts_have_in_common_has_to_be_the_same_in_all() -> None:
    split = given(lambda start, stop: {"x": ROWS[start:stop], "shared": torch.tensor(1)})
    split.count(ROWS)
    with pytest.raises(DataError, match="belongs to a whole batch, and is"):
        split.join([{"x": ROWS, "shared": torch.tensor(1)}, {"x": ROWS, "shared": torch.tensor(2)}])


def test_memory_that_runs_out_is_not_taken_for_an_answer() -> None:
    def cut(batch: Any, start: int, size: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        Given(cut).count(ROWS)
