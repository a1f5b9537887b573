"""What is passed as a split counts and cuts, or says what is missing; what nobody passes is read off the batches."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import autoaccum
from autoaccum import splits
from autoaccum.data.dims import AtDim
from autoaccum.data.sources import open_source
from autoaccum.data.splits import Automatic, Given, is_said, split_of
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError, DataError, RaggedBatchError
from tests.graphs import GraphBatch, graphs

CPU = torch.device("cpu")
ROWS = torch.arange(12).reshape(6, 2)


def cut(batch: Any, start: int, size: int) -> Any:
    return batch[start : start + size]


class WithCount:
    """Knows how many there are."""

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        return batch["rows"][start : start + size]

    def count(self, batch: Any) -> Any:
        return batch["count"]

    def join(self, parts: list[Any]) -> Any:
        return torch.cat(parts).flip(0)


class Opaque:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class Sized(Opaque):
    def __len__(self) -> int:
        return len(self.rows)


class TestWhatIsPassed:
    def test_nothing_is_read_off_the_batches(self) -> None:
        found = split_of(None, 0, None, None)
        assert isinstance(found, Automatic)
        assert not is_said(found)
        assert isinstance(split_of(None, None, None, None), Automatic)  # of whoever has no such arguments
        assert isinstance(split_of(None, 1, None, None), AtDim)
        assert split_of(splits.samples, 0, None, None) is splits.samples
        assert is_said(split_of(cut, 0, None, None))

    @pytest.mark.parametrize(
        ("split", "dim", "error"),
        [
            (3, 0, ArgumentTypeError),
            (lambda batch: batch, 0, ArgumentTypeError),
            (WithCount, 0, ArgumentTypeError),
            (cut, 1, ConflictingArgumentsError),
            (splits.samples, (1, 0), ConflictingArgumentsError),
        ],
    )
    def test_what_cannot_be_one_is_refused(self, split: Any, dim: Any, error: type[ArgumentError]) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(error, match="split|batch_dim"):
            autoaccum.Accumulator(model, optimizer, split=split, batch_dim=dim)
        with pytest.raises(error):
            autoaccum.fit(model, [ROWS], effective_batch=2, split=split, batch_dim=dim)

    def test_they_are_named_in_errors(self) -> None:
        assert repr(splits.samples) == "autoaccum.splits.samples"


class TestCounts:
    def test_by_its_own_count(self) -> None:
        split = Given(WithCount())
        for count in (4, np.int64(4), torch.tensor(4)):
            assert split.count({"rows": ROWS, "count": count}) == 4
        for count in (-1, 2.5, None, True):
            with pytest.raises(DataError, match=r"its count\(batch\) returned"):
                split.count({"rows": ROWS, "count": count})

    def test_of_tensors_and_lists_as_without_it(self) -> None:
        assert Given(cut).count(ROWS) == 6
        assert Given(lambda batch, start, size: batch).count((list(ROWS), ["a"] * 6)) == 6
        assert Given(lambda batch, start, size: batch).count(GraphBatch.from_data_list(graphs(4))) == 4

    def test_of_other_objects_by_their_length(self) -> None:
        assert Given(lambda batch, start, size: batch.rows[start : start + size]).count(Sized(ROWS)) == 6

    @pytest.mark.parametrize("batch", [Opaque(ROWS), {"a": ROWS, "b": ROWS[:2]}, (ROWS, ROWS[:2]), 5])
    def test_of_what_does_not_tell_the_cure_is_named(self, batch: Any) -> None:
        """The length of a mapping or a tuple would be that of its parts."""
        with pytest.raises(DataError, match=r"batch: nothing tells how many samples.*split\.count = lambda batch"):
            Given(lambda batch, start, size: batch).count(batch)


class TestCuts:
    def test_a_stop_for_a_size_is_found_out(self) -> None:
        wrong = Given(lambda batch, start, stop: batch[start:stop])
        wrong.count(ROWS)
        assert torch.equal(wrong(ROWS, 0, 2), ROWS[:2])
        with pytest.raises(DataError, match=r"asked for 2 samples from 3 on, it returned 0.*\(batch, start, size\)"):
            wrong(ROWS, 3, 2)

    def test_nothing_is_no_micro_batch(self) -> None:
        with pytest.raises(DataError, match="it returned nothing"):
            Given(lambda batch, start, size: None)(ROWS, 0, 1)

    def test_its_own_join_is_taken(self) -> None:
        split = Given(WithCount())
        assert torch.equal(split.join([ROWS[:1], ROWS[1:2]]), ROWS[:2].flip(0))

    def test_images_that_are_as_many_as_their_channels_pass(self) -> None:
        images = [torch.ones(3, 4, 5)] * 4
        assert len(Given(cut)(images, 1, 2)) == 2


class TestData:
    def test_of_an_iterable_windows_go_across_its_batches(self) -> None:
        batches = [{"rows": ROWS[:4], "count": 4}, {"rows": ROWS[4:], "count": 2}]

        class Joining(WithCount):
            def join(self, parts: list[Any]) -> Any:
                return torch.cat(parts)

        source = open_source(batches, seed=0, shuffle=False, device=CPU, split=Given(Joining()))
        window = source.read(0, lambda position: (6,)).window(6)
        assert window is not None
        assert torch.equal(window.micro_batch(3, 2), ROWS[3:5])
        assert torch.equal(window.micro_batch(0, 4), ROWS[:4]), "of a whole one too a micro-batch is made"
        assert torch.equal(window.samples([5, 0]), ROWS[[5, 0]])
        assert source.example(9).shape == (9, 2)

    @pytest.mark.parametrize(
        ("batch", "split"),
        [
            (pack_sequence(list(ROWS)), splits.packed),
            (GraphBatch.from_data_list(graphs(6)), splits.graphs),
            ((list(ROWS), [1] * 6), splits.samples),
            ({"x": ROWS, "y": ROWS}, splits.tensors),
        ],
    )
    def test_a_batch_by_itself_is_data(self, batch: Any, split: Any) -> None:
        source = open_source(batch, seed=0, shuffle=False, device=CPU, split=split)
        assert split.count(source.example(8)) == 8
        window = source.read(0, lambda position: (4,)).window(4)
        assert window is not None
        assert split.count(window.micro_batch(1, 2)) == 2

    def test_lists_in_a_dict_of_data_are_columns(self) -> None:
        images = [torch.full((3, 4, 5 + index), index) for index in range(4)]
        source = open_source({"image": images, "label": torch.arange(4)}, seed=0, shuffle=True, device=CPU)
        assert source.num_samples == 4
        window = source.read(0, lambda position: (4,)).window(4)
        assert window is not None
        found = window.micro_batch(0, 4)
        assert [int(image[0, 0, 0]) for image in found["image"]] == found["label"].tolist()

    def test_what_looks_time_first_says_so(self) -> None:
        with pytest.raises(RaggedBatchError, match="pass batch_dim=1"):
            open_source((torch.ones(5, 4, 3), torch.ones(4)), seed=0, shuffle=False, device=CPU)


def test_an_import_of_it_imports_no_library_of_graphs() -> None:
    code = "import sys, autoaccum.data.sources; print({'torch_geometric', 'tensordict', 'monai'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
