"""The store of past trials: what is kept comes back, and nothing that happens to the files is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoaccum.planning.costs import Trial
from autoaccum.runs.past import MAX_TRIALS, Past, directory

KEY, OTHER = "0" * 31 + "a", "f" * 32
TRIALS = (
    Trial(micro_batch=1, fits=True, peak_bytes=1000, seconds=0.1 + 0.2),
    Trial(micro_batch=8, fits=True, peak_bytes=8000, seconds=1.0),
    Trial(micro_batch=16, fits=False),
)


@pytest.fixture
def store(tmp_path: Path) -> Past:
    return Past(tmp_path / "not" / "there" / "yet")


def save(store: Past, key: str = KEY, trials: tuple[Any, ...] = TRIALS) -> Path:
    store.save(key, trials)
    return store.where / f"trials-{key}.json"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# What is kept.


def test_what_was_saved_is_loaded_to_the_bit(store: Past) -> None:
    save(store)
    assert Past(store.where).load(KEY)[0] == TRIALS
    assert store.load(OTHER)[0] == ()


def test_the_limit_is_kept(store: Past) -> None:
    store.save(KEY, TRIALS, limit_bytes=8800)
    assert store.load(KEY) == (TRIALS, 8800)


def test_a_second_save_replaces_the_first(store: Past) -> None:
    save(store)
    save(store, trials=TRIALS[:1])
    assert store.load(KEY)[0] == TRIALS[:1]
    assert len(list(store.where.iterdir())) == 1


def test_the_newest_word_on_a_size_is_kept_in_its_place(store: Past) -> None:
    newer = replace(TRIALS[0], peak_bytes=1234, fits=False)
    save(store, trials=(*TRIALS, newer))
    assert store.load(KEY)[0] == (*TRIALS[1:], newer)


def test_no_more_trials_than_the_newest(store: Past) -> None:
    many = tuple(Trial(micro_batch=size, fits=True, peak_bytes=size) for size in range(1, MAX_TRIALS + 6))
    save(store, trials=many)
    assert store.load(KEY)[0] == many[5:]


# Files that make no sense.


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"3", b"{}", b"[" * 100_000,
        b'{"format": 1}', b'{"format": 1, "trials": [3]}',
    ],
)  # fmt: skip
def test_a_corrupt_file_is_unknown_and_replaced(content: bytes, store: Past) -> None:
    path = save(store)
    path.write_bytes(content)
    assert store.load(KEY)[0] == ()
    save(store)
    assert store.load(KEY)[0] == TRIALS


def test_a_trial_without_its_size_makes_its_file_unknown(store: Past) -> None:
    rewrite(save(store), trials=[{"fits": True}])
    assert store.load(KEY)[0] == ()


# Directories that cannot be used.


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Past(tmp_path / "file" / "below")
    save(store)
    assert store.load(KEY)[0] == ()
    assert store.files() == []


def test_a_directory_that_cannot_be_written_is_no_error(store: Past) -> None:
    """In a child process that is not root, whom no permission stops; it is there before it loses the right to come."""
    save(store).chmod(0o644)
    script = (
        "import os\n"
        "from pathlib import Path\n"
        "from autoaccum.planning.costs import Trial\n"
        "from autoaccum.runs.past import Past\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "assert not os.access('.', os.W_OK, effective_ids=True)\n"
        "store = Past(Path())\n"
        f"store.save({OTHER!r}, [Trial(micro_batch=1, fits=True)])\n"
        f"print(len(store.load({KEY!r})[0]), len(store.load({OTHER!r})[0]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    store.where.chmod(0o555)
    try:
        child = subprocess.run(
            [sys.executable, "-c", script], cwd=store.where, env=environment, capture_output=True, text=True
        )
    finally:
        store.where.chmod(0o755)
    assert (child.stdout, child.stderr) == ("3 0\n", "")


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(store: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save(store)
    monkeypatch.setattr(os, "replace", refuse)
    save(store, trials=TRIALS[:1])
    assert store.load(KEY)[0] == TRIALS
    assert len(list(store.where.iterdir())) == 1


# Several processes.


def test_processes_that_write_at_once_leave_whole_files(store: Past) -> None:
    """Each writes trials that agree in their peak: a file of two would not."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from autoaccum.planning.costs import Trial\n"
        "from autoaccum.runs.past import Past\n"
        "store, mine = Past(Path(sys.argv[1])), int(sys.argv[2])\n"
        "trials = [Trial(micro_batch=size, fits=True, peak_bytes=mine) for size in range(1, mine)]\n"
        "for _ in range(200):\n"
        f"    store.save({KEY!r}, trials)\n"
        f"    found = store.load({KEY!r})[0]\n"
        "    assert {trial.peak_bytes for trial in found} == {len(found) + 1}, found\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(store.where), str(mine)], stderr=subprocess.PIPE, text=True)
        for mine in (5, 12, 30)
    ]
    assert [child.communicate()[1] for child in children] == ["", "", ""]
    assert len(list(store.where.iterdir())) == 1


def test_our_files_are_told_from_others(store: Past) -> None:
    ours = [save(store, KEY), save(store, OTHER), store.where / f"trials-{KEY}.json.71.tmp"]
    others = [store.where / name for name in ("notes.txt", "trials-2024.json", f"trials-{KEY}.json.bak", f"{KEY}.json")]
    for path in (ours[2], *others):
        path.write_text("")
    assert store.files() == sorted(ours)


# Where it is.


def test_the_directory_is_the_users_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "~/scratch")
    assert directory() == tmp_path / "scratch"
    for unset in (False, True):
        monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")
        if unset:
            monkeypatch.delenv("AUTOACCUM_CACHE_DIR")
        assert directory().name == "autoaccum"
        assert tmp_path in directory().parents
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sys.platform != "linux" or directory() == tmp_path / "xdg" / "autoaccum"


def test_tests_leave_the_users_directory_alone() -> None:
    assert Path(os.environ["AUTOACCUM_CACHE_DIR"]) == directory()
    assert not directory().exists()
