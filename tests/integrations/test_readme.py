"""The README's change of a Trainer script: both halves run, and the second has the loss of the full batch."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.pages import halves
from tests.test_docs import blocks

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore")
def test_both_halves_of_the_trainer_script_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = blocks(ROOT / "README.md", "diff")[1]
    assert len(re.findall(r"^[+-]", script, re.MULTILINE)) == 2, "one line"
    losses = []
    for half in halves(script):
        namespace: dict[str, Any] = {}
        exec(re.sub(r"^(Trainer\(.*\))\.train\(\)$", r"trained = \1.train()", half, flags=re.MULTILINE), namespace)
        losses.append(namespace["trained"].training_loss)
    stock, ours = losses
    assert stock > 2.5, "the stock Trainer logs four times the loss"
    assert ours == pytest.approx(math.log(2), abs=0.1)
