"""Parts of tensors on several ranks, of which each writes its own: in files that PyTorch reads too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from autoaccum.runs import parts
from tests.runs.meshes import as_rank, cut


def written(folder: Path, tensors: dict[str, torch.Tensor], *shape: int, dim: int = 0) -> list[str]:
    """Write tensors as the ranks of a mesh would; return the names of their files."""
    (folder / parts.MODEL).mkdir()
    names = []
    for rank in range(torch.Size(shape).numel()):
        with as_rank(rank, *shape) as mesh:
            own = {name: cut(tensor, mesh, min(dim, tensor.dim() - 1)) for name, tensor in tensors.items()}
            name = parts.file_of(parts.MODEL, rank)
            if parts.write(folder / name, own) is not None:
                names.append(name)
    return names


def whole() -> dict[str, torch.Tensor]:
    """Return tensors of few and many rows, and of one number."""
    torch.manual_seed(0)
    return {
        "wide": torch.randn(7, 5, dtype=torch.float64),
        "few": torch.randn(2, 3).bfloat16(),
        "one": torch.randn(1),
        "deep": torch.randn(4, 3, 2, dtype=torch.float16),
    }


def test_of_copies_the_first_is_written(tmp_path: Path) -> None:
    names = written(tmp_path, whole(), 2, 2)
    assert names == [parts.file_of(parts.MODEL, rank) for rank in (0, 1)]


def test_pytorch_reads_the_files(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    tensors = whole()
    written(tmp_path, tensors, 3)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / parts.MODEL)))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_names_of_files() -> None:
    assert all(parts.is_file(parts.file_of(folder, rank)) for folder in parts.FOLDERS for rank in (0, 99_998))
    for name in ("model.safetensors", "../model/shard-00001-model-00001-of-00001.safetensors", "model/x.safetensors"):
        assert not parts.is_file(name)


def test_what_every_rank_has_is_written_by_one(tmp_path: Path) -> None:
    with as_rank(0, 2):
        assert parts.write(tmp_path / "none", {}) is None
        assert parts.write(tmp_path / "one", {}, {"buffer": torch.ones(3)}) is not None
    with safe_open(tmp_path / "one", framework="pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {"buffer": {"saved_offsets": [0]}}


def test_only_what_is_cut_along_its_dimensions_can_be_told() -> None:
    from torch.distributed.tensor import DTensor, Partial

    with as_rank(0, 2) as mesh:
        assert parts.is_cut(cut(torch.ones(4), mesh))
        assert not parts.is_cut(cut(torch.ones(4, dtype=torch.complex128), mesh))
        assert not parts.is_cut(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
