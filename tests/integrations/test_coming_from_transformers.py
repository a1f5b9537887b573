"""Both halves of the diffs that docs/coming_from_transformers.md shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("sentence_transformers")

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_transformers.md"

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def half(diff: str, sign: str) -> str:
    """Return the script before (-) or after (+) a diff."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign))


@pytest.mark.parametrize("diff", blocks("diff"), ids=["accumulates", "searches"])
def test_both_halves_of_a_diff_train_the_same(diff: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    losses = []
    for sign in "-+":
        names: dict[str, Any] = {}
        exec(blocks("python")[0] + half(diff, sign), names)
        assert names["trainer"].state.global_step == 6
        losses.append(names["trainer"].state.log_history[-1]["train_loss"])
    # What the page says of the stock trainer: its accumulated means of BERT's are added up, and never divided.
    too_large = 4 if "gradient_accumulation_steps" in diff else 1
    assert losses[0] == pytest.approx(losses[1] * too_large, rel=1e-5)


def test_the_classes_of_the_page_are_trainers() -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    assert issubclass(names["AutoAccumDPOTrainer"], names["DPOTrainer"])
