"""Arrays become tensors that share their memory where they can, or PyTorch says that there are none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data.arrays import as_tensor, converted, is_plain

NUMBERS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_memory_is_shared() -> None:
    array = NUMBERS.copy()
    tensor = as_tensor(array)
    array[0, 0] = 9
    assert tensor[0, 0] == 9


@pytest.mark.parametrize("array", [NUMBERS.astype(">f4"), NUMBERS[::-1][::-1].copy()[::-1][::-1], NUMBERS[:, ::-1]])
def test_any_layout(array: Any) -> None:
    assert as_tensor(array).tolist() == array.tolist()


def test_files_that_are_mapped_are_read_where_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", NUMBERS)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = as_tensor(mapped)
    assert tensor.tolist() == NUMBERS.tolist()
    assert tensor.data_ptr() == mapped.ctypes.data


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array(["a", "b"], dtype=object)])
def test_texts_are_a_list(array: Any) -> None:
    assert as_tensor(array) == ["a", "b"]


@pytest.mark.parametrize("array", [np.array([None, 1]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")])])
def test_of_what_there_is_no_tensor_pytorch_says_so(array: Any) -> None:
    with pytest.raises(TypeError, match="can't convert np.ndarray of type"):
        as_tensor(array)


def test_a_batch_keeps_its_form_and_what_is_no_array() -> None:
    batch = {"x": NUMBERS, "pair": [NUMBERS[:, 0], torch.ones(3)], "text": ["a", "b", "c"], "scale": np.float32(2)}
    found = converted(batch)
    assert [type(found[name]) for name in batch] == [torch.Tensor, list, list, np.float32]
    assert torch.equal(found["pair"][0], torch.tensor([0.0, 2, 4]))
    assert isinstance(batch["x"], np.ndarray)


def test_one_without_arrays_is_itself() -> None:
    for batch in ((torch.ones(2), torch.ones(2)), {"x": torch.ones(2)}):
        assert is_plain(batch)
        assert converted(batch) is batch
    batch_of_texts = (["a"], torch.ones(1))
    assert not is_plain(batch_of_texts)
    assert converted(batch_of_texts) is batch_of_texts
