"""Storages of sweeps: opened by a text, and told as such when they cannot be."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage

from autoaccum.errors import ArgumentError
from autoaccum.sweeps.storages import open_storage


def test_storages(tmp_path: Path) -> None:
    assert isinstance(open_storage(None, tmp_path), RDBStorage)
    assert (tmp_path / "study.db").exists()
    for text in (f"journal:{tmp_path}/a", f"{tmp_path}/b.log"):
        assert isinstance(open_storage(text, tmp_path), JournalStorage)
    assert {path.name for path in tmp_path.iterdir()} >= {"a", "b.log"}
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
        f"journal:{tmp_path}/missing/study.log",
        f"journal:{tmp_path}/text",
        "foo://me:secret@host/name",
        7,
    ):
        with pytest.raises(ArgumentError, match="storage=.*: expected") as raised:
            open_storage(text, tmp_path)  # type: ignore[arg-type]
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize("torn", ['{"op_code": 5, "worker_id": "ab', "{"])
def test_a_journal_with_an_unfinished_last_line_goes_on(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    for count in (1, 2, 3):
        storage = open_storage(str(path), tmp_path)
        study = optuna.create_study(storage=storage, study_name="torn", load_if_exists=True)
        study.add_trial(optuna.trial.create_trial(value=1.0))
        assert len(study.trials) == count
        whole = path.read_text()
        path.write_text(whole + torn)
    open_storage(str(path), tmp_path)
    assert path.read_text() == whole
    path.write_text(torn)
    assert not open_storage(str(path), tmp_path).get_all_studies()
