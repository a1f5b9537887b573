"""Storages of sweeps: opened by a text, and told as such when they cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage

from autoaccum.errors import ArgumentError
from autoaccum.sweeps.storages import open_storage


def test_storages(tmp_path: Path) -> None:
    assert isinstance(open_storage(None, tmp_path), RDBStorage)
    assert (tmp_path / "study.db").exists()
    assert isinstance(open_storage(f"journal:{tmp_path}/a", tmp_path), JournalStorage)
    assert (tmp_path / "a").exists()
    memory = InMemoryStorage()
    assert open_storage(memory, tmp_path) is memory
    with pytest.raises(ArgumentError, match=r"write 'sqlite:///a\.db'"):
        open_storage("a.db", tmp_path)


def test_a_storage_that_cannot_be_opened_is_told_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for text in (
        "foo://host/name",
        f"sqlite:///{tmp_path}/missing/study.db",
        f"sqlite:///{tmp_path}/text",
        "foo://me:secret@host/name",
        7,
    ):
        with pytest.raises(ArgumentError, match="storage=.*: expected") as raised:
            open_storage(text, tmp_path)  # type: ignore[arg-type]
        assert "secret" not in str(raised.value)
