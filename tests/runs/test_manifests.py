"""Checkpoints are found by their manifests, whatever else lies there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from autoaccum.runs.manifests import manifests
from autoaccum.runs.records import write_json


def write(run_dir: Path, name: str, **document: Any) -> Path:
    path = run_dir / "checkpoints" / name
    path.mkdir(parents=True)
    write_json(path / "manifest.json", document)
    return path


def test_the_newest_comes_first_whatever_its_step(tmp_path: Path) -> None:
    assert manifests(tmp_path) == []
    write(tmp_path, "step-00000009", step=9, serial=1, is_best=False)
    best = write(tmp_path, "step-00000003", step=3, serial=2, is_best=True)
    write(tmp_path, ".step-00000004", step=4, serial=3, is_best=True)
    found = manifests(tmp_path)
    assert [(one.step, one.serial, one.is_best) for one in found] == [(3, 2, True), (9, 1, False)]
    assert found[0].path == best


def test_what_is_no_manifest_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "step-1", step=1, serial=1)
    (write(tmp_path, "step-4") / "manifest.json").write_text("[")
    (write(tmp_path, "step-5") / "manifest.json").write_text("[]")
    path = write(tmp_path, "step-6") / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    write(tmp_path, "step-7", step=7, serial=7, is_best=False)
    assert [(one.step, one.is_best) for one in manifests(tmp_path)] == [(7, False)]
