"""Samples that default_collate makes nothing of are named, with the collate_fn to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from autoaccum.data.collating import Counted, collate_of, collate_without_lists, plain_collate
from autoaccum.errors import DataError


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([{"x": torch.ones(2), "extra": None}] * 2, "found <class 'NoneType'>"),
        ([(torch.ones(2), 1), (torch.ones(2), None)], "NoneType"),
        ([(torch.ones(2), object())] * 2, r"found <class 'object'>.*ToTensor\(\)"),
        ([torch.ones(2), torch.ones(3)], r"got \[2\] at entry 0 and \[3\] at entry 1.*pad_sequence\(samples"),
        ([{"x": [1, 2]}, {"x": [1]}], "equal size.*pad_sequence"),
        ([(torch.ones(2), 1), None], "NoneType"),
        ([{"x": 1, "y": 2}, {"y": 3}], "KeyError"),
    ],
)
def test_what_is_wrong_is_named(samples: list[Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"^data: default_collate makes no batch of 2 samples .*{problem}") as caught:
        plain_collate(samples)
    assert isinstance(caught.value.__cause__, TypeError | RuntimeError | KeyError)


def test_lists_of_numbers_are_refused_where_nobody_has_made_them_so() -> None:
    samples = [{"input_ids": [1, 2, 3], "label": 0}] * 4
    with pytest.raises(DataError, match=r"'input_ids' of a sample is a list of numbers.*set_format\('torch'\)"):
        collate_without_lists(samples)
    # Of a Dataset of one's own it is default_collate's word.
    assert [column.tolist() for column in plain_collate(samples)["input_ids"]] == [[1] * 4, [2] * 4, [3] * 4]


def test_who_collates() -> None:
    assert isinstance(collate_of(list, []), Counted)
    assert collate_of(default_collate, []) is collate_without_lists
    assert collate_of(default_collate, torch.utils.data.TensorDataset(torch.ones(1))) is plain_collate
    datasets = pytest.importorskip("datasets")
    assert collate_of(default_collate, datasets.Dataset.from_dict({"x": [1]})) is collate_without_lists


def test_an_error_of_another_kind_comes_out_as_it_is() -> None:
    class Odd(dict[str, Any]):
        def __init__(self, *args: Any) -> None:
            raise RuntimeError("no copies")

    odd = Odd.__new__(Odd)
    odd["x"] = 1
    assert plain_collate([odd, odd])["x"].tolist() == [1, 1]


def test_the_cure_for_pairs_of_different_lengths_pads_them() -> None:
    samples = [(torch.ones(length, 2), length) for length in (2, 3)]
    with pytest.raises(DataError, match="pairs of a tensor and a number") as caught:
        plain_collate(samples)
    written = str(caught.value).partition("pairs of a tensor and a number by ")[2].partition("; of a tokenizer")[0]
    collate = eval(written, {"torch": torch})
    inputs, targets = collate(samples)
    assert (inputs.shape, targets.tolist()) == ((2, 3, 2), [2, 3])


class TestSamplesThatGetLost:
    """A collate_fn is refused if what comes out depends on fewer samples than went in."""

    SAMPLES = tuple(torch.full((2, 3), float(index)) for index in range(4))

    @pytest.mark.parametrize(
        "collate",
        [lambda samples: samples[0], lambda samples: samples[-1], lambda samples: torch.stack(samples[:2])],
        ids=["first", "last", "first two"],
    )
    def test_they_are_refused(self, collate: Any) -> None:
        with pytest.raises(
            DataError, match=r"collate_fn loses samples: of 4 .* DataLoader\(dataset, batch_size=None\)"
        ):
            Counted(collate)(list(self.SAMPLES))
        Counted(collate)([self.SAMPLES[0]])

    @pytest.mark.parametrize(
        "collate",
        [
            torch.stack,
            torch.cat,
            lambda samples: torch.cat(samples)[None],
            lambda samples: torch.stack([one for one in samples if one[0, 0] != 3]),
            lambda samples: sum(samples),
            lambda samples: {"text": "no rows", "of": samples},
        ],
        ids=["stack", "cat", "flat", "filter", "sum", "list"],
    )
    def test_others_are_not(self, collate: Any) -> None:
        for count in (1, 2, 4):
            Counted(collate)(list(self.SAMPLES[:count]))

    def test_what_is_none_is_left_out_and_rows_that_are_as_many_cost_no_second_call(self) -> None:
        calls = []

        def collate(samples: list[Any]) -> torch.Tensor:
            calls.append(len(samples))
            return torch.stack([one for one in samples if one is not None])

        Counted(collate)([*self.SAMPLES, None])
        Counted(collate)(list(self.SAMPLES))
        assert calls == [5, 4]
