"""What tests and doctests share: no memory of past runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_past(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test, its child processes too, begins from nothing and leaves nothing."""
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path_factory.mktemp("past") / "autoaccum"))
