"""What is flattened is cut by the counts of each sample, chained where these count rows of another such entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.data.splits import flattened
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError, RaggedBatchError

GRIDS = torch.tensor([[1, 2, 2], [1, 1, 3], [2, 1, 1]])  # 4, 3 and 2 patches
BATCH: dict[str, Any] = {
    "input_ids": torch.arange(4),
    "num_images": torch.tensor([2, 0, 1, 0]),
    "image_grid_thw": GRIDS,
    "pixel_values": torch.arange(9),
    "scale": 0.5,
}
SPLIT = flattened(image_grid_thw="num_images", pixel_values="image_grid_thw")


def test_rows_of_each_sample() -> None:
    assert SPLIT.count(BATCH) == 4
    part = SPLIT(BATCH, 1, 2)
    assert part["input_ids"].tolist() == [1, 2]
    assert part["image_grid_thw"].tolist() == [[2, 1, 1]]
    assert part["pixel_values"].tolist() == [7, 8]
    assert part["scale"] == 0.5
    assert SPLIT(BATCH, 0, 1)["pixel_values"].tolist() == list(range(7))
    assert SPLIT(BATCH, 3, 1)["pixel_values"].tolist() == []


def test_parts_are_joined_in_their_order() -> None:
    joined = SPLIT.join([SPLIT(BATCH, 2, 1), SPLIT(BATCH, 3, 1), SPLIT(BATCH, 0, 1)])
    assert joined["pixel_values"].tolist() == [7, 8, *range(7)]
    assert joined["image_grid_thw"].tolist() == [[2, 1, 1], [1, 2, 2], [1, 1, 3]]
    assert SPLIT.count(joined) == 3


def test_none_stands_for_nothing_where_it_is_asked_for() -> None:
    split = flattened(none_if_empty=True, image_grid_thw="num_images", pixel_values="image_grid_thw")
    part = split(BATCH, 3, 1)
    assert part["pixel_values"] is None
    assert part["image_grid_thw"] is None
    assert split(BATCH, 0, 1)["pixel_values"].tolist() == list(range(7))
    for parts in ([part, split(BATCH, 2, 1)], [split(BATCH, 2, 1), part]):
        assert split.join(parts)["pixel_values"].tolist() == [7, 8]
    assert split.join([part, part])["pixel_values"] is None


def test_counts_of_a_function_of_a_list_and_of_one_image_a_sample() -> None:
    by_function = flattened(pixel_values=lambda batch: [7, 0, 2, 0])
    batch = {"input_ids": torch.arange(4), "pixel_values": torch.arange(9)}
    assert by_function(batch, 1, 3)["pixel_values"].tolist() == [7, 8]
    one_each = {"input_ids": torch.arange(3), "image_grid_thw": GRIDS, "pixel_values": torch.arange(9)}
    assert flattened(pixel_values="image_grid_thw")(one_each, 1, 1)["pixel_values"].tolist() == [4, 5, 6]
    pair = ({"counts": [1, 2], "pixels": torch.arange(3)}, torch.arange(2))
    assert flattened(pixels="counts")(pair, 1, 1)[0]["pixels"].tolist() == [1, 2]


def test_a_batch_without_images_is_one_of_texts() -> None:
    texts = {"input_ids": torch.arange(4), "pixel_values": None}
    assert SPLIT.count(texts) == 4
    assert SPLIT(texts, 1, 1) == {"input_ids": torch.tensor([1]), "pixel_values": None}


class TestRefuses:
    def test_counts_that_do_not_sum_to_what_there_is(self) -> None:
        with pytest.raises(DataError, match="'pixel_values' has 8 rows, and its counts sum to 9"):
            SPLIT.count(BATCH | {"pixel_values": torch.arange(8)})
        with pytest.raises(DataError, match="counted for 3 samples, of which the batch holds 4"):
            flattened(pixel_values=lambda batch: [7, 0, 2]).count({"x": torch.arange(4), "pixel_values": torch.ones(9)})

    @pytest.mark.parametrize("counts", [torch.tensor([0.5, 2.0]), torch.tensor(3), "two", [-1, 10]])
    def test_counts_that_are_none(self, counts: Any) -> None:
        batch = {"x": torch.arange(2), "pixels": torch.arange(9)}
        with pytest.raises(DataError, match="'pixels' "):
            flattened(pixels=lambda batch: counts).count(batch)

    def test_counts_that_are_not_there(self) -> None:
        with pytest.raises(DataError, match="'pixel_values' is counted by 'number', which the batch does not hold"):
            flattened(pixel_values="number").count({"x": torch.arange(2), "pixel_values": torch.arange(9)})
        with pytest.raises(RaggedBatchError):
            flattened(pixel_values="num_images").count(BATCH)

    def test_what_counts_nothing(self) -> None:
        with pytest.raises(ArgumentError, match="at least one entry"):
            flattened()
        with pytest.raises(ArgumentTypeError, match="pixels=3"):
            flattened(pixels=3)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="It is counted by itself"):
            flattened(a="b", b="a").count(dict.fromkeys("xab", torch.ones(2).long()))
