"""Where a run comes from: what was typed, and the commit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoaccum.runs.records import command_line, commit


@pytest.mark.parametrize(
    ("argv", "typed", "expected"),
    [
        (["train.py", "--lr", "0.1"], ["/usr/bin/python3", "train.py", "--lr", "0.1"], "python3 train.py --lr 0.1"),
        (["/a b/train.py"], ["python", "/a b/train.py"], "python '/a b/train.py'"),
        (["/env/bin/autoaccum", "fit"], ["/env/bin/python", "/env/bin/autoaccum", "fit"], "autoaccum fit"),
        (["/lib/autoaccum/__main__.py", "fit"], ["python", "-m", "autoaccum", "fit"], "python -m autoaccum fit"),
        (["-c"], ["python", "-c", "print(1)"], "python -c 'print(1)'"),
        (
            ["s.py", "postgresql://me:pass@host/db"],
            ["python", "s.py", "postgresql://me:pass@host/db"],
            "python s.py postgresql://...@host/db",
        ),
        ([""], ["python"], None),
        (["/lib/autoaccum/__main__.py", "sweep"], ["python", "-c", "from m", "--multiprocessing-fork"], None),
        (["/lib/ipykernel_launcher.py", "-f", "k.json"], ["python", "-m", "ipykernel_launcher", "-f", "k.json"], None),
    ],
)
def test_the_command_is_what_was_typed(
    argv: list[str], typed: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", typed)
    assert command_line() == expected


def test_the_commit_is_that_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None, "no repository"

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert commit() is None, "no commit"
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("commit", "-m", "one")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    assert commit() == head
    (tmp_path / "new.py").write_text("not tracked")
    assert commit() == head
    (tmp_path / "a.py").write_text("2")
    assert commit() == f"{head}-dirty"


def test_without_git_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_a_run_keeps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoaccum.reporting import environment, write_json

    monkeypatch.setattr("autoaccum.runs.records.commit", lambda: "abc-dirty")
    monkeypatch.setattr("autoaccum.runs.records.command_line", lambda: "python train.py")
    write_json(tmp_path / "environment.json", environment())
    found = json.loads((tmp_path / "environment.json").read_text())
    assert (found["command"], found["commit"]) == ("python train.py", "abc-dirty")
