"""A recipe: the GPT of the first example, of the size and with the crops that take memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from char_gpt import CONTEXT, CharGPT, crops, encode, loss_fn, read_text


def recipe() -> dict[str, Any]:
    return {"model": CharGPT(), "data": crops(encode(read_text(500_000)), CONTEXT), "loss_fn": loss_fn}
