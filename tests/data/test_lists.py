"""Lists of samples are told from lists of batches by what a batch cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn, ones, tensor
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.data.lists import Reading, holds_samples, notice, read_list, refuse_sample
from autoaccum.errors import AmbiguousBatchError, DataError
from tests.models import classes, mlp

SAMPLES, NEW, BATCHES = Reading(True), Reading(True, is_new=True), Reading(False)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # What belongs to one sample stands beside the one part that has rows.
        ([(ones(8), 1), (ones(8), 0)], NEW),
        ([(ones(3, 4, 4), tensor(1)), (ones(3, 5, 5), tensor(0))], NEW),
        ([{"x": np.ones((2, 8)), "label": 1}] * 2, NEW),
        ([[ones(8), 1], [ones(8), 0]], NEW),
        # Vectors alone.
        ([ones(8), ones(8)], NEW),
        ([(ones(8), ones(8)), (ones(8), ones(8))], NEW),
        ([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 2, NEW),
        # What no batch could be.
        (["a text", "another"], SAMPLES),
        ([("a text", 1), ("another", 0)], SAMPLES),
        ([(ones(3, 4, 4), ones(1, 4, 4))] * 2, SAMPLES),
        ([1.5, 2.5], SAMPLES),
        # Batches, of one size or of several.
        ([(ones(16, 8), ones(16)), (ones(16, 8), ones(16))], BATCHES),
        ([(ones(16, 8), ones(16)), (ones(3, 8), ones(3))], BATCHES),
        ([{"x": ones(5, 8), "scale": 0.5, "y": ones(5)}] * 2, BATCHES),
        ([{"text": ["a", "b"], "y": ones(2)}, {"text": ["c", "d"], "y": ones(2)}], BATCHES),
        ([ones(16, 8)] * 3, BATCHES),
        ([ones(16, 8), ones(3, 8)], BATCHES),
        # Lists of samples within a batch: images of different sizes, dicts, texts, objects.
        ([([ones(3, 5, 5), ones(3, 6, 6)], [ones(2), ones(2)])] * 2, BATCHES),
        ([[{"image": ones(3, 5, 5), "boxes": ones(2, 4)}, {"image": ones(3, 6, 6), "boxes": ones(1, 4)}]] * 2, BATCHES),
        ([["a", "b"], ["c", "d"]], BATCHES),
        ([[object(), object()]] * 2, BATCHES),
        ([[[ones(5, 2), ones(5)], ones(5)]] * 2, BATCHES),
        ([((ones(5), ones(2)), 3)] * 2, SAMPLES),
        ([(ones(4), ones(5))], BATCHES),  # which is told so when it is read
    ],
)
def test_what_the_entries_are(data: list[Any], expected: Reading) -> None:
    assert read_list(data) == expected


def test_images_may_be_either() -> None:
    for data in ([ones(3, 4, 4)] * 5, [(ones(3, 4, 4), ones(3, 4, 4))] * 5):
        with pytest.raises(
            AmbiguousBatchError, match=r"data: .*5 samples.*batch of 15.*DataLoader\(data\) if"
        ) as caught:
            read_list(data)
        assert (caught.value.samples, caught.value.rows) == (5, 15)
    assert read_list([ones(16, 4, 4)] * 5) == BATCHES


def test_inputs_and_targets_are_a_tuple() -> None:
    with pytest.raises(DataError, match=r"^data: .*Pass them as a tuple: tuple\(data\)\.$"):
        read_list([ones(6, 2), ones(6)])
    assert read_list([ones(6, 2), ones(5, 2)]) == BATCHES
    for data in ([ones(6, 2), ones(6, 2)], [ones(6, 2), ones(6, 1)]):
        with pytest.raises(DataError, match=r"as a DataLoader yields inputs and targets.* Pass tuple\(data\) if"):
            read_list(data)


def test_vectors_of_other_lengths_are_samples_of_a_zip() -> None:
    with pytest.raises(DataError, match=r"it yields samples \(shape \(8,\), shape \(1,\)\), as zip"):
        refuse_sample((ones(8), ones(1)), "data")
    refuse_sample((ones(8), ones(8)), "data")
    refuse_sample((ones(8, 2), ones(7)), "data")  # rows that are missing are told as that


def test_one_odd_entry_is_seen_wherever_it_is() -> None:
    data: list[Any] = [(ones(8, 2), ones(8))] * 64
    data[63] = (ones(8, 2), 1)
    assert read_list(data) == NEW


def test_the_notice_has_the_cure() -> None:
    assert notice("validation_data").cure.startswith("Pass DataLoader(validation_data, batch_size=None)")


class TestIterables:
    """Whose entries are batches: a sample among them would be read as a batch of its own numbers."""

    @pytest.mark.parametrize(
        "entry",
        [
            (ones(8), tensor(1)),
            (ones(8), 0.5),
            ([0.5, 1.5], 1),
            {"x": np.ones(8), "y": np.int64(1)},
            (ones(1, 28, 28), tensor(1)),
            (ones(1, 28, 28), np.int64(1)),
            (0, ones(8)),
            (0.5, 1),
        ],
    )
    def test_a_label_beside_what_it_is_of_is_a_sample(self, entry: Any) -> None:
        with pytest.raises(DataError, match=r"^train: it yields samples .* Pass list\(train\)"):
            refuse_sample(entry, "train")

    @pytest.mark.parametrize(
        "entry",
        [
            (ones(8, 4), tensor(0.5)),
            (ones(8), ones(8)),
            {"input_ids": ones(8, 4), "num_items": 7},
            {"x": ones(8), "return_loss": True},
            (ones(8, 4), ones(8), 3),
            [ones(8, 4), ["a"] * 8],
            {"user": [1, 2], "item": [3, 4]},
            ones(8, 1),
            ["a", "b"],
            np.array(["a", "b"]),
            {"text": ["a", "b"]},
        ],
    )
    def test_what_a_batch_may_hold_is_none(self, entry: Any) -> None:
        refuse_sample(entry, "train")

    @pytest.mark.parametrize(
        "entry",
        [
            ones(8),
            np.ones(8),
            [1, 2, 3, 4, 5, 6, 7, 8],
            (ones(8),),
            {"x": ones(8)},
            {"input_ids": [1] * 8, "attention_mask": [1] * 8, "labels": [1] * 8},
        ],
    )
    def test_a_vector_alone_may_be_either(self, entry: Any) -> None:
        with pytest.raises(
            DataError, match=r"^train: it yields vectors of 8 numbers, .* Pass list\(train\).*splits.tensors"
        ):
            refuse_sample(entry, "train")

    def test_a_run_over_vectors_says_so_and_reads_a_list_of_them(self) -> None:
        vectors = [ones(4) * index for index in range(6)]
        options: Any = {"training_step": lambda model, x: model(x).square().mean(), "progress": False, "cache": False}
        with pytest.raises(DataError, match="it yields vectors of 4 numbers"):
            autoaccum.fit(nn.Linear(4, 1), iter(vectors), effective_batch=3, **options)
        with pytest.warns(autoaccum.AutoaccumWarning, match="read as a dataset"):
            result = autoaccum.fit(nn.Linear(4, 1), vectors, effective_batch=3, **options)
        assert result.num_samples == 6

    def test_a_run_over_samples_says_so_before_a_step(self) -> None:
        model = mlp()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(DataError, match=r"^data: it yields samples .* Pass list\(data\)"):
            autoaccum.fit(
                model, zip(*classes(8), strict=True), effective_batch=4, loss_fn=cross_entropy, progress=False
            )
        assert all(p.equal(old) for p, old in zip(model.parameters(), before, strict=True))


def test_two_tensors_of_one_shape_beside_others_are_a_state() -> None:
    """The hidden state (h, c) of an LSTM: two that differ may be as many samples."""
    assert holds_samples((ones(2, 4), (ones(2, 5, 3), ones(2, 5, 3)))) is False
    with pytest.raises(AmbiguousBatchError, match=r"a tuple of 2 of shapes \(2, 5, 3\), \(2, 7, 3\), which"):
        holds_samples((ones(2, 4), (ones(2, 5, 3), ones(2, 7, 3))))
