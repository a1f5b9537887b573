"""Tensors come back from a file as they were, aligned, and what hinders that is told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from autoaccum.runs import tensor_files
from autoaccum.testing import simulated_memory


def test_data_are_aligned(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64), "c": torch.ones(5)}
    size, _ = tensor_files.write(tmp_path / "f", tensors)
    raw = (tmp_path / "f").read_bytes()
    assert size == len(raw)
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    offsets = {name: entry.get("data_offsets") for name, entry in json.loads(raw[8 : 8 + length]).items()}
    assert offsets == {"__metadata__": None, "b": [0, 8], "c": [8, 28], "a": [28, 31]}


def test_a_file_without_memory_for_it_is_no_broken_file(tmp_path: Path) -> None:
    tensor_files.write(tmp_path / "f", {"a": torch.ones(1000)})
    with simulated_memory(3000), pytest.raises(MemoryError, match="no memory to read f"):
        tensor_files.read(tmp_path / "f")
    with simulated_memory(5000):
        assert tensor_files.read(tmp_path / "f")["a"].sum() == 1000
    (tmp_path / "f").write_bytes(b"12345678{}")
    with pytest.raises(SafetensorError):
        tensor_files.read(tmp_path / "f")
