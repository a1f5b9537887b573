"""Child processes that save checkpoints, and what they save."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

import autoaccum

CHILD = """
    import os, random, resource, signal, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from autoaccum import errors
    from autoaccum.runs.checkpoint import Checkpoints
    from tests.runs.children import content
    directory = Path({directory!r})
"""
ROOT = str(Path(autoaccum.__file__).parents[1])


def content(step: int) -> dict[str, Any]:
    """What step ``step`` should hold: weights and a state that differ in every step."""
    generator = torch.Generator().manual_seed(step)
    weights = {"w": torch.randn(16, 8, generator=generator), "b": torch.full((3,), step, dtype=torch.int64)}
    return {
        "weights": weights,
        "state": {"step": step, "random": random.Random(step).getstate(), 0: [weights["w"] * 2]},
    }


def child(directory: Path, script: str, **options: Any) -> subprocess.Popen[str]:
    code = textwrap.dedent(CHILD).format(root=ROOT, directory=str(directory)) + textwrap.dedent(script)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **options)
