"""What tests of a run's facts have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoaccum.events import Record
from autoaccum.reporting import load_run
from autoaccum.reporting.facts import Facts, facts_of
from tests.reporting.synthetic import write


@pytest.fixture
def of(tmp_path: Path) -> Any:
    def facts(*records: Record) -> Facts:
        return facts_of(load_run(write(tmp_path / "run", *records)))

    return facts


@pytest.fixture
def of_new(tmp_path: Path) -> Any:
    def facts(*records: Record) -> Facts:
        return facts_of(load_run(write(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", *records)))

    return facts
