"""Which checkpoints a run's directory holds, read from their manifests without PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autoaccum.runs.files import read_small


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A checkpoint by its manifest; nothing verifies its files."""

    path: Path
    """Directory of the checkpoint."""
    step: int
    serial: int
    is_best: bool


def manifests(run_dir: Path) -> list[Manifest]:
    """Return the checkpoints of a run, newest first; those whose manifest cannot be read are left out."""
    found = []
    for path in (run_dir / "checkpoints").glob("step-*"):
        try:
            document = json.loads(read_small(path / "manifest.json"))
            step, serial, is_best = (document[name] for name in ("step", "serial", "is_best"))
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            continue
        found.append(Manifest(path=path, step=step, serial=serial, is_best=is_best))
    return sorted(found, key=lambda manifest: manifest.serial, reverse=True)
