"""What tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.runs import window_mark
from autoaccum.runs.window_mark import OomKills
from tests.runs.machine import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "machine")
    monkeypatch.setattr(window_mark, "OomKills", lambda: OomKills(made.root / "proc", made.root / "none"))
    return made
