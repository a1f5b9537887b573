"""Tables, dicts of datasets and texts are refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autoaccum.data.foreign import is_table, refuse, refuse_as_batch
from autoaccum.data.sources import open_source
from autoaccum.errors import ArgumentTypeError

DATASET = TensorDataset(torch.ones(4))


class Frame:
    """A table of a library that need not be here: it is known by its module."""

    def to_numpy(self) -> None: ...


Frame.__module__ = "polars.dataframe.frame"


def test_tables() -> None:
    assert is_table(Frame())
    assert not is_table(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match=r"data=.*Pass its columns as tensors: \(torch\.tensor\(df\[features\]"):
        refuse("data", Frame())
    for data, which in (((torch.ones(2), Frame()), "1"), ({"x": Frame()}, "'x'")):
        with pytest.raises(ArgumentTypeError, match=rf"^data\[{which}\]=.*torch\.tensor\(table\.to_numpy\(\)"):
            refuse("data", data)


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0]})
    assert is_table(frame)
    assert is_table(frame["a"])
    refuse("data", (torch.ones(2), [frame]))  # what a list holds is seen when it is read


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ({"train": DATASET, "test": DATASET}, r"pass one, such as data\['train'\]\.$"),
        ({"train": DataLoader(DATASET), "test": DATASET}, r"pass one, such as data\['train'\]\.$"),
        ([DataLoader(DATASET)], r"a list of 1.*pass one, such as data\[0\]"),
        ([DATASET, DATASET], r"ConcatDataset"),
        ("data.csv", r"Read the file"),
        (b"text", r"a list of one"),
    ],
)
def test_other_kinds(data: Any, cure: str) -> None:
    with pytest.raises(ArgumentTypeError, match=cure):
        refuse("data", data)


def test_a_table_is_named_as_what_it_is() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ArgumentTypeError, match=r"data='a DataFrame'.*Pass its columns as tensors"):
        open_source(pandas.DataFrame({"a": [1.0]}), seed=0, shuffle=False, device=torch.device("cpu"))


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": [1]})
    with pytest.raises(ArgumentTypeError, match=r"DatasetDict of \['train'\].*pass one"):
        refuse("data", datasets.DatasetDict(train=made))
    with pytest.raises(ArgumentTypeError, match="for batch in DataLoader"):
        refuse_as_batch(made)
    refuse("data", made)


def test_data_in_the_place_of_a_batch() -> None:
    for data in (DataLoader(DATASET), DATASET):
        with pytest.raises(ArgumentTypeError, match=r"batch=.*for batch in"):
            refuse_as_batch(data)
    refuse_as_batch((torch.ones(2), ["a", "b"]))


def test_a_loss_is_no_batch() -> None:
    with pytest.raises(ArgumentTypeError, match=r"such as a loss.*The loss is computed here"):
        refuse_as_batch(torch.ones(2, requires_grad=True).sum())
