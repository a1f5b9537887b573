"""Lengths of samples are told, and what a collate_fn makes of them is learned."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data.lengths import BatchLengths, Padding, length_of, lengths_of, repeat_longest, try_twice


@dataclass
class Pair:
    source: list[int]
    target: torch.Tensor


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (torch.zeros(3, 4), 12),
        (torch.tensor(7), 1),
        (np.zeros((2, 5)), 10),
        ("seven..", 7),
        (b"four", 4),
        ([1, 2, 3], 3),
        ((1.5, 2, True), 3),
        ([np.int64(1), np.float32(2)], 2),
        ((torch.zeros(6), 3), 6),
        ((3, torch.zeros(6)), 6),
        ({"ids": [1, 2, 3], "text": "ab", "label": 9}, 3),
        (OrderedDict(text="abcde", ids=[1]), 5),
        (Pair([1, 2, 3, 4], torch.zeros(2)), 4),
        ([[1, 2], [3, 4, 5]], 3),
        (["a", "text"], 4),
        (5, 0),
        (None, 0),
        ([], 0),
        ({}, 0),
    ],
)
def test_length_is_the_largest_parts(sample: Any, expected: int) -> None:
    assert length_of(sample) == expected


def items_of(*lengths: int) -> list[Any]:
    return [(0, position, [1] * length) for position, length in enumerate(lengths)]


def pad(items: list[Any], most: int = 10**6) -> torch.Tensor:
    rows = [torch.tensor(sample[:most]) for _, _, sample in items]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Collating:
    """Remembers the lengths of the samples that were collated alone."""

    def __init__(self, most: int = 10**6) -> None:
        self.most = most
        self.seen: list[int] = []

    def __call__(self, items: list[Any]) -> torch.Tensor:
        self.seen.append(len(items[0][2]))
        return pad(items, self.most)


def truncated(padding: Padding, *lengths: int) -> tuple[int, ...]:
    return padding.truncated(lengths, items_of(*lengths).__getitem__)


class TestPadding:
    def test_longer_samples_make_larger_batches(self) -> None:
        collate = Collating()
        padding = Padding(collate)
        assert padding.grows(*items_of(2, 5))
        assert padding.grows(*items_of(5, 5)), "learned once"
        assert collate.seen == [2, 5]

    @pytest.mark.parametrize(
        "collate",
        [
            lambda items: torch.zeros(len(items), 8),
            lambda items: torch.zeros(len(items), 8 - len(items[0][2])),
            lambda items: [sample for _, _, sample in items],
            lambda items: 1 / 0,
        ],
    )
    def test_what_gains_nothing(self, collate: Any) -> None:
        assert not Padding(collate).grows(*items_of(2, 5))

    def test_a_collate_fn_may_take_parts_out_of_its_samples(self) -> None:
        samples = [(0, 0, {"x": torch.zeros(2)}), (0, 1, {"x": torch.zeros(5)})]
        assert Padding(lambda items: items[0][2].pop("x")).grows(*samples)
        assert all("x" in sample for _, _, sample in samples)

    def test_truncated_samples_count_as_one_length(self) -> None:
        assert truncated(Padding(Collating(6)), 11, 9, 7, 6, 5, 2) == (6, 6, 6, 6, 5, 2)

    def test_without_truncation_lengths_stay(self) -> None:
        padding = Padding(Collating())
        assert truncated(padding, 9, 7, 7, 2) == (9, 7, 7, 2)
        assert truncated(padding, 20, 10, 3) == (20, 10, 3)

    def test_the_bound_is_that_of_the_shortest_that_is_known_to_be_truncated(self) -> None:
        padding = Padding(Collating(6))
        assert truncated(padding, 5, 2) == (5, 2), "nothing is truncated yet"
        assert truncated(padding, 12, 8, 5) == (8, 8, 5)
        assert truncated(padding, 30, 12, 8, 7, 1) == (8, 8, 8, 7, 1)

    def test_few_samples_are_collated(self) -> None:
        """Collate the longest, when it is longer than any before, and some by bisection when its batch is larger too."""
        collate = Collating(6)
        padding = Padding(collate)
        truncated(padding, *range(1000, 0, -1))
        assert len(collate.seen) <= 11
        collate.seen.clear()
        truncated(padding, 900, 3)
        assert collate.seen == []
        truncated(padding, 1001, 3)
        assert collate.seen == [1001]

    def test_one_that_cannot_be_collated_tells_nothing(self) -> None:
        def collate(items: list[Any]) -> torch.Tensor:
            if len(items[0][2]) > 9:
                raise ValueError
            return pad(items)

        padding = Padding(collate)
        assert truncated(padding, 12, 3) == (12, 3)
        assert truncated(padding, 8, 3) == (8, 3)
        assert truncated(padding, 12, 9, 3) == (12, 9, 3)


def test_longest_are_copies() -> None:
    first, second, third = (items := repeat_longest([(0, i, {"x": "a" * (i % 2 + 1)}) for i in range(3)], 3))
    assert [position for _, position, _ in items] == [1, 1, 1]
    first[2].pop("x")
    assert second[2] == third[2] == {"x": "aa"}


def test_alike_come_in_turn() -> None:
    assert [position for _, position, _ in repeat_longest(items_of(4, 4), 3)] == [0, 1, 0]


@pytest.mark.parametrize(("error", "tries"), [(MemoryError, 2), (ValueError, 1)])
def test_a_second_try_only_when_memory_ran_out(error: type[Exception], tries: int) -> None:
    calls = 0

    def fails() -> None:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(error):
        try_twice(fails)
    assert calls == tries


def test_an_empty_sample_is_as_long_as_one_of_one() -> None:
    """What weighs nothing has no plan."""
    assert lengths_of(items_of(0, 3, 0)) == [1, 3, 1]
    length_of_batch = BatchLengths()
    assert [length_of_batch(torch.zeros(4, length), 4) for length in (3, 0, 5, 0)] == [None, 1, 5, 1]


def test_what_was_seen_of_batches_outlives_the_process() -> None:
    first, second = BatchLengths(), BatchLengths()
    short, long = torch.zeros(2, 3), torch.zeros(2, 5)
    assert first(short, 2) is None
    second.load_state_dict(first.state_dict())
    assert second(long, 2) == 5  # the first of its own, but not the first
    third = BatchLengths()
    third.load_state_dict(second.state_dict())
    assert third(short, 2) == 3
