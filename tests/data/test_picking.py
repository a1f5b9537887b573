"""Samples of a window can be picked by their positions, from every kind of data, without another look at what was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.data.sources import open_source
from autoaccum.training.setup import GivenBatch
from tests.data.test_grouped import Texts, pad
from tests.data.test_sources import CPU, Numbers, every_kind, leaves, read_window, source_of

PICKED = [6, 0, 3, 3]


@every_kind
def test_they_are_those_of_the_window(kind: str) -> None:
    """In any order, of the second window too, with what was drawn for them; before the window is read and after it."""
    reader = source_of(kind).read(0, lambda position: [4, 4])
    for _ in range(2):
        window = reader.window(8)
        assert window is not None
        early = leaves(window.samples(PICKED))
        expected = read_window(window, 4)
        for index, drawn in (early, leaves(window.samples(PICKED))):
            assert list(zip(index.tolist(), drawn.tolist(), strict=True)) == [expected[p] for p in PICKED]
        assert read_window(window, 3) == expected, "none of them is missing afterwards"


class Counted(Numbers):
    """Counts how often each sample is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return super().__getitem__(index)


def test_no_sample_is_read_twice_without_workers() -> None:
    data = Counted()
    window = open_source(data, seed=0, shuffle=True, device=CPU).read(0, lambda position: [4, 4]).window(8)
    assert window is not None
    read_window(window, 4)
    window.samples(PICKED)
    window.samples([7])
    # But the first of all, which tells that samples draw.
    assert data.reads[0] == data.reads[1]
    assert sorted(data.reads[1:]) == sorted(set(data.reads))
    assert len(data.reads) == 9


def grouped() -> tuple[Any, Texts]:
    data = Texts()
    source = open_source(data, seed=0, shuffle=True, device=CPU, collate_fn=pad)
    window = source.read(0, lambda position: [5, 5]).window(16)
    assert window is not None
    return window, data


def test_texts_that_are_grouped_by_their_length_are_padded_to_the_longest_of_them() -> None:
    window, data = grouped()
    reads = data.reads
    order = window.micro_batch(0, 16)["index"].tolist()
    picked = window.samples([15, 2, 9])
    assert picked["index"].tolist() == [order[15], order[2], order[9]]
    assert picked["tokens"].shape[1] == window.lengths[2]
    assert torch.equal(picked["tokens"][1], window.micro_batch(2, 1)["tokens"][0])
    assert data.reads == reads, "none is read again"


@pytest.mark.parametrize("positions", [[0], [4, 1], [2, 2, 2]])
def test_of_a_batch_of_ones_own(positions: list[int]) -> None:
    inputs = torch.arange(10.0).reshape(5, 2)
    window = GivenBatch({"x": inputs, "scale": 3, "names": list("abcde")}, 5, CPU)
    picked = window.samples(positions)
    assert torch.equal(picked["x"], inputs[positions])
    assert picked["scale"] == 3
    picked["x"].zero_()
    assert inputs[4, 1] == 9
