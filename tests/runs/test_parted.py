"""What any number of ranks has written in parts, any other number reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autoaccum.errors import CheckpointCorruptError
from autoaccum.runs import parted, parts
from autoaccum.runs.tensor_files import CODES
from tests.runs.meshes import as_rank, cut
from tests.runs.test_parts import whole, written


def there_of(folder: Path, names: list[str], name: str, like: torch.Tensor) -> parted.Parted:
    return parted.Parted(parted.Files(folder, names), parts.MODEL, name, CODES[like.dtype], list(like.shape))


@pytest.mark.parametrize("now", [(1,), (2,), (5,), (2, 2)])
@pytest.mark.parametrize(("then", "dim"), [((1,), 0), ((3,), 0), ((2,), 1), ((2, 2), 0)])
def test_ranks_read_what_others_have_written(
    then: tuple[int, ...], dim: int, now: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = whole()
    names = written(tmp_path, tensors, *then, dim=dim)
    for rank in range(torch.Size(now).numel()):
        with as_rank(rank, *now) as mesh:
            for name, tensor in tensors.items():
                there = cut(torch.zeros_like(tensor), mesh)
                found: Any = there_of(tmp_path, names, name, tensor).like(there)
                expected: Any = cut(tensor, mesh)
                assert torch.equal(found.to_local(), expected.to_local())
                assert (found.placements, found.shape) == (there.placements, tensor.shape)  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        assert torch.equal(there_of(tmp_path, names, name, tensor).like(torch.zeros_like(tensor)), tensor)


def test_what_is_cut_otherwise_now_is_read(tmp_path: Path) -> None:
    tensor = whole()["wide"]
    names = written(tmp_path, {"wide": tensor}, 3)
    with as_rank(1, 2) as mesh:
        found: Any = there_of(tmp_path, names, "wide", tensor).like(cut(torch.zeros_like(tensor), mesh, 1))
        assert torch.equal(found.to_local(), tensor[:, 3:])


def test_a_whole_tensor_is_put_as_a_part_and_others_as_they_are() -> None:
    tensor = whole()["wide"]
    with as_rank(1, 3) as mesh:
        found = parted.put(tensor, cut(torch.zeros_like(tensor), mesh))
        assert torch.equal(found.to_local(), tensor[3:6])
        assert parted.put(found, found) is found
    assert parted.put(tensor, torch.zeros_like(tensor)) is tensor
    assert parted.put(tensor, torch.zeros(3)) is tensor
    assert parted.put(3, tensor) == 3
    assert parted.put(tensor, None) is tensor


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    tensor = whole()["wide"]
    names = written(tmp_path, {"wide": tensor}, 3)
    with pytest.raises(CheckpointCorruptError, match="wide is not there as a whole"):
        there_of(tmp_path, names[:2], "wide", tensor).like(tensor)
    with pytest.raises(CheckpointCorruptError, match="not of torch.float32"):
        parted.Parted(parted.Files(tmp_path, names), parts.MODEL, "wide", "F32", [7, 5]).like(tensor)


@pytest.mark.parametrize(
    "told",
    [
        None,
        {"DCP_SHARDING_INFO": "{"},
        {"DCP_SHARDING_INFO": "[]"},
        {"DCP_SHARDING_INFO": json.dumps({"wide": {"saved_offsets": [0]}})},
    ],
)
def test_a_strangers_file_is_refused(told: Any, tmp_path: Path) -> None:
    name, tensor = parts.file_of(parts.MODEL, 0), torch.ones(7, 5)
    (tmp_path / parts.MODEL).mkdir()
    save_file({"wide": tensor}, tmp_path / name, told)
    with pytest.raises(CheckpointCorruptError, match="where its parts begin"):
        there_of(tmp_path, [name], "wide", tensor).like(tensor)
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointCorruptError, match="is not a safetensors file"):
        there_of(tmp_path, [name], "wide", tensor).like(tensor)


def test_a_shape_is_taken_for_one_alone() -> None:
    files = parted.Files(Path(), [])
    with pytest.raises(ValueError, match="shape"):
        parted.Parted(files, parts.MODEL, "wide", "F32", [-1])
    with pytest.raises(LookupError):
        parted.Parted(files, parts.MODEL, "wide", "pickle", [1])
