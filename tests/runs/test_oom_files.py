"""Files of what held the memory: one for each occasion, so many at most, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoaccum.events import OutOfMemory
from autoaccum.runs.oom_files import MOST, OomFiles, oom_files


def ran_out(step: int, micro_batch: int = 4, phase: str = "training") -> OutOfMemory:
    return OutOfMemory(step=step, phase=phase, micro_batch=micro_batch)


def names(directory: Path) -> list[str]:
    return [path.name for path in oom_files(directory)]


def test_each_occasion_has_a_file(tmp_path: Path) -> None:
    files = OomFiles(tmp_path)
    for event in (ran_out(10), ran_out(2), ran_out(2, 2), ran_out(2, 2), ran_out(2, 2, "validation")):
        files.write(event, {"used_bytes": 5})
    assert names(tmp_path) == ["oom-2.json", "oom-2-2.json", "oom-2-3.json", "oom-10.json"]
    assert json.loads((tmp_path / "oom-2-3.json").read_text()) == {
        "step": 2, "phase": "validation", "micro_batch": 2, "used_bytes": 5
    }  # fmt: skip
    assert files.write(ran_out(10), {}) is None
    assert len(list(tmp_path.iterdir())) == 4


def test_there_are_so_many_at_most_in_all_processes(tmp_path: Path) -> None:
    files = OomFiles(tmp_path)
    for step in range(1, 6):
        files.write(ran_out(step), {})
    assert not files.is_full
    later = OomFiles(tmp_path)
    for step in range(4, 20):
        later.write(ran_out(step), {})
    assert later.is_full
    assert len(names(tmp_path)) == MOST == 8
    assert names(tmp_path)[3:6] == ["oom-4.json", "oom-4-2.json", "oom-5.json"]


def test_a_rank_has_names_and_a_number_of_its_own(tmp_path: Path) -> None:
    files, other = OomFiles(tmp_path), OomFiles(tmp_path, 3)
    for step in range(1, 20):
        files.write(ran_out(step), {})
        other.write(ran_out(1, step), {})
    assert len(names(tmp_path)) == 2 * MOST
    assert {"oom-1.json", "oom-1-rank3.json", "oom-1-8-rank3.json", "oom-8.json"} <= set(names(tmp_path))


def test_other_files_are_none_of_them(tmp_path: Path) -> None:
    for name in ("oom-notes.json", "oom.json", "oom-3.txt"):
        (tmp_path / name).write_text("")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_one_that_cannot_be_written_is_left_out(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "write_text", refuse)
    assert OomFiles(tmp_path).write(ran_out(1), {}) is None
    assert list(tmp_path.iterdir()) == []
