"""Lists of samples are told from the parts of a batch where that can be known, and refused where it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import ones
from torch.utils.data import default_collate

from autoaccum.data.lists import columns, holds_samples, unpacked_levels
from autoaccum.data.splits import Automatic, samples, tensors
from autoaccum.errors import AmbiguousBatchError, DataError, RaggedBatchError


def images(*widths: int) -> list[torch.Tensor]:
    return [ones(3, 4, width) for width in widths]


class TestWhatIsKnown:
    @pytest.mark.parametrize(
        "batch",
        [
            default_collate([(ones(3, 4), 1) for _ in range(5)]),
            default_collate([(ones(3), ones(2)) for _ in range(5)]),
            default_collate([(ones(1), ones(1)) for _ in range(2)]),
            default_collate([((ones(1), ones(2)), ones(1)) for _ in range(5)]),
            [ones(4, 3, 8, 8), ones(4, 3, 16, 16)],  # two resolutions of four images
            ([ones(5, 3, 8, 8)] * 2, ones(5)),  # two crops of five images
            [ones(8), ones(8), ones(8)],  # users, items, ratings
            [ones(6, 7, 3), ones(6, 7, 3)],  # sequences, and what is made of them
            ({"a": ones(4, 2)}, [ones(4), ones(4, 2)]),
            (ones(2, 5, 3), (ones(2, 2, 4), ones(2, 2, 4))),
        ],
    )
    def test_parts_of_a_batch(self, batch: Any) -> None:
        assert not holds_samples(batch)
        assert Automatic().count(batch) == tensors.count(batch)

    @pytest.mark.parametrize(
        ("batch", "count"),
        [
            ((images(5, 6, 7, 8), [{"boxes": ones(n, 4)} for n in (0, 2, 1, 3)]), 4),
            ((tuple(images(5, 6)), tuple({"boxes": ones(n, 4)} for n in (0, 2))), 2),
            ((tuple(images(5, 6, 7, 8)), ones(4)), 4),
            ((images(5, 6, 7, 8), [1, 2, 3, 4]), 4),
            ({"images": images(5, 6), "labels": [ones(2), ones(1)]}, 2),
            ([{"image": image, "label": ones(())} for image in images(5, 6)], 2),
            ([{"image": image, "label": 1} for image in images(5, 6, 7, 8)], 4),
            ([(image, 1) for image in images(5, 6, 7)], 3),
            ([ones(n, 2) for n in (5, 3, 8)], 3),
            ([np.ones((n, 2)) for n in (5, 3)], 2),
            ([(ones(n, 2), 1) for n in (5, 3)], 2),
        ],
    )
    def test_lists_of_samples(self, batch: Any, count: int) -> None:
        assert holds_samples(batch)
        assert Automatic().count(batch) == count

    def test_no_list_is_no_question(self) -> None:
        for batch in (ones(3), (ones(3), ones(3)), {"x": ones(3), "names": ["a", "b", "c"]}, ["a", "b"]):
            assert holds_samples(batch) is None


class TestWhatCannotBeKnown:
    @pytest.mark.parametrize(
        ("batch", "counts"),
        [
            (images(5, 6, 7), (3, 3)),  # three images, or three rows of three tensors
            (images(5, 5), (2, 3)),
            ([ones(1, 28, 28)], (1, 1)),
            ([ones(12, 5, 6), ones(12, 5, 7), ones(12, 6, 6)], (3, 12)),  # of a satellite's twelve bands
            ([ones(1, 30, 30, 30), ones(1, 40, 40, 40)], (2, 1)),  # volumes
            ([{"image": image} for image in images(5, 6)], (2, 3)),
            ([{"input_ids": ones(16)}, {"input_ids": ones(16)}], (2, 16)),  # texts that are padded already
            ((images(5, 6, 7), [ones(3), ones(3), ones(3)]), (3, 3)),
        ],
    )
    def test_what_fits_both_is_refused_with_both_cures(self, batch: Any, counts: tuple[int, int]) -> None:
        with pytest.raises(AmbiguousBatchError, match=r"^batch: a batch holds a list of ") as caught:
            Automatic().count(batch)
        assert (caught.value.samples, caught.value.rows) == counts
        for cure in ("split=autoaccum.splits.samples", "split=autoaccum.splits.tensors", "between its channels"):
            assert cure in str(caught.value)
        assert (samples.count(batch), tensors.count(batch)) == counts

    def test_what_a_batch_has_shown_holds_for_those_that_follow(self) -> None:
        reading = Automatic()
        assert reading.count([ones(8, 5, 6), ones(8)]) == 8
        assert reading.count([ones(2, 5, 6), ones(2)]) == 2
        pairs = Automatic()
        assert pairs.count([ones(8, 5, 6), ones(8, 5, 6)]) == 8
        assert pairs.count([ones(3, 5, 6), ones(3, 5, 6)]) == 3, "the last batch of an epoch, which may be images"
        detection = Automatic()
        assert detection.count((images(5, 6, 7, 8), [ones(2)] * 4)) == 4
        assert detection.count((images(5, 6, 7), [ones(3)] * 3)) == 3
        assert [image.shape for image in detection((images(5, 6, 7), [ones(3)] * 3), 1, 1)[0]] == [(3, 4, 6)]

    def test_what_fits_neither_names_the_cure(self) -> None:
        with pytest.raises(RaggedBatchError, match=r"autoaccum\.splits: \.samples for lists of samples"):
            Automatic().count((ones(5), ones(4)))
        # Two tensors of one shape beside one of another: the hidden state of an LSTM is no list of two samples.
        with pytest.raises(RaggedBatchError):
            Automatic().count((ones(2, 5, 3), (ones(1, 2, 4), ones(1, 2, 4))))


class TestWhatIsCalledWithIt:
    def test_what_a_model_is_called_with_is_no_list_of_samples(self) -> None:
        def loss_fn(outputs: Any, targets: Any) -> Any: ...

        assert [unpacked_levels(None, loss_fn), unpacked_levels(None, None), unpacked_levels(loss_fn, None)] == [
            0,
            1,
            2,
        ]
        # Its entries are positional arguments: the batch's own, and beside a loss_fn those of its inputs.
        assert not holds_samples(images(5, 6, 7), unpacked=1)
        assert not holds_samples((images(5, 6), ones(3)), unpacked=2)
        assert holds_samples((images(5, 6), ones(2)), unpacked=1)
        assert Automatic(2).count([images(5, 6), ones(3)]) == 3

    def test_a_number_that_is_known_decides(self) -> None:
        pair = images(5, 6)
        assert Automatic().known(pair, 2) is samples
        assert Automatic().known(pair, 3) is tensors
        assert samples.known(pair, 3) is samples


class TestWhatIsSaid:
    def test_a_list_is_one_of_samples_and_a_tuple_of_lists_is_of_columns(self) -> None:
        assert samples.count([(image, ones(())) for image in images(5, 6, 7)]) == 3
        assert samples.count((images(5, 6, 7), [ones(1)] * 3)) == 3
        assert samples.count(tuple(images(5, 6))) == 2
        assert samples.count(({"a": ones(2)}, {"b": ones(3)})) == 2
        # Both of two kinds: images and labels are columns.
        assert samples.count([tuple(images(5, 6, 7)), (ones(()), ones(()), ones(()))]) == 3
        assert samples.count(["a", "b"]) == 2

    def test_lists_of_other_lengths_are_refused(self) -> None:
        with pytest.raises(RaggedBatchError):
            samples.count((images(5, 6, 7), [ones(1)] * 2))
        with pytest.raises(DataError):
            samples.count({"a": 3})

    def test_it_is_cut_and_joined_by_entries(self) -> None:
        batch = {"images": tuple(images(5, 6, 7)), "labels": torch.arange(3), "scale": 2}
        part = samples(batch, 1, 2)
        assert [image.shape[2] for image in part["images"]] == [6, 7]
        assert (part["labels"].tolist(), part["scale"]) == ([1, 2], 2)
        joined = samples.join([part, samples(batch, 0, 1)])
        assert [image.shape[2] for image in joined["images"]] == [6, 7, 5]
        assert joined["labels"].tolist() == [1, 2, 0]

    def test_columns_are_the_lists_themselves(self) -> None:
        batch = ([1, 2], {"a": ["x", "y"]}, ones(2))
        assert columns(batch, is_said=True) == [[1, 2], ["x", "y"]]
