"""Checkpoints: whatever happens to the process, the disk or the files, a resume is right or refused, and runs no code."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoaccum import errors
from autoaccum.runs import checkpoint
from autoaccum.runs.checkpoint import MANIFEST, STATE, WEIGHTS, Checkpoint, Checkpoints, best, every, newest
from tests.processes import in_turn
from tests.runs.children import child, content


def is_content(loaded: tuple[Any, Any], step: int) -> bool:
    weights, state = loaded
    expected = content(step)
    return (
        list(weights) == ["w", "b"]
        and all(torch.equal(weights[name], expected["weights"][name]) for name in weights)
        and torch.equal(state[0][0], expected["state"][0][0])
        and {**state, 0: None} == {**expected["state"], 0: None}
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def writer(directory: Path) -> Iterator[Checkpoints]:
    writer = Checkpoints(directory)
    yield writer
    writer.close()


def save(writer: Checkpoints, *steps: int, **options: Any) -> Path:
    for step in steps:
        path = writer.save(step=step, **{**content(step), **options})
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def rewrite(path: Path, **changes: Any) -> None:
    """The manifest as somebody would write it who knows how: with sizes and checksums that are right."""
    manifest = path / MANIFEST
    document = json.loads(manifest.read_text())
    document.pop("checksum")
    for name in (WEIGHTS, STATE):
        if (path / name).is_file():
            raw = (path / name).read_bytes()
            document["files"][name] = [len(raw), hashlib.sha256(raw).hexdigest()]
    document.update(changes)
    manifest.write_text(json.dumps({**document, "checksum": checkpoint._checksum(document)}))


# What is written is there.


def test_what_was_saved_is_loaded(writer: Checkpoints, directory: Path) -> None:
    assert newest(directory) == (None, ())
    facts = {"samples": 256, "loss": float("inf"), "validation": {"loss": [0.1 + 0.2, None]}}
    path = save(writer, 7, facts=facts)
    found, skipped = newest(directory)
    assert skipped == ()
    assert found is not None
    assert (found.path, found.step, found.is_best, found.facts) == (path, 7, False, facts)
    assert path.name == "step-00000007"
    assert is_content(found.load(), 7)
    assert is_content(Checkpoint.at(path).load(), 7)
    assert sorted(os.listdir(path)) == [MANIFEST, WEIGHTS, STATE]
    assert torch.load(path / WEIGHTS).keys() == {"w", "b"}
    assert (
        hashlib.sha256((path / WEIGHTS).read_bytes()).hexdigest()
        == json.loads((path / MANIFEST).read_text())["files"][WEIGHTS][1]
    ), "sha256sum says the same"


def test_a_directory_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert every(tmp_path / "no") == ([], ())
    assert newest(tmp_path / "no") == best(tmp_path / "no") == (None, ())


def test_nothing_at_all_is_a_state_too(writer: Checkpoints, directory: Path) -> None:
    save(writer, 1, weights={}, state=None)
    found, _ = newest(directory)
    assert found is not None
    assert found.load() == ({}, None)


def test_a_second_save_waits_for_the_first(writer: Checkpoints, directory: Path) -> None:
    for step in (1, 2, 3):
        writer.save(step=step, **content(step))
        assert step == 1 or newest(directory)[0].step >= step - 1  # type: ignore[union-attr]


# What is kept.


def test_the_newest_and_the_best_are_kept(writer: Checkpoints, directory: Path) -> None:
    save(writer, 1, is_best=True)
    save(writer, 2, is_best=True)
    save(writer, 3, 4, 5)
    assert names(directory) == ["step-00000002", "step-00000004", "step-00000005"]
    assert [found.step for found in every(directory)[0]] == [5, 4, 2]
    found, _ = best(directory)
    assert found is not None
    assert found.step == 2
    assert is_content(found.load(), 2)
    save(writer, 6, is_best=True)
    assert names(directory) == ["step-00000005", "step-00000006"]


def test_the_older_ones_go_when_the_new_one_is_on_the_disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls: data, manifest, its directory, the name, the name's directory; and only then others."""
    calls: list[str] = []

    def told(call: str, function: Any) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            what = (
                arguments[0] if isinstance(arguments[0], (str, Path)) else os.readlink(f"/proc/self/fd/{arguments[0]}")
            )
            calls.append(f"{call} {Path(what).relative_to(directory)}")
            return function(*arguments, **options)

        return wrapper

    writer = Checkpoints(directory, keep=1)
    save(writer, 1)
    monkeypatch.setattr(os, "fsync", told("fsync", os.fsync))
    monkeypatch.setattr(os, "rename", told("rename", os.rename))
    save(writer, 2)
    writer.close()
    partial = ".step-00000002.partial"
    assert calls == [
        f"fsync {partial}/{WEIGHTS}",
        f"fsync {partial}/{STATE}",
        f"fsync {partial}/{MANIFEST}",
        f"fsync {partial}",
        f"rename {partial}",
        "fsync .",
        "rename step-00000001",
    ]


def test_a_run_that_went_back_is_resumed_from_where_it_went_on(directory: Path) -> None:
    """Steps 10 and 20, then again from 10: the newest is what was written last."""
    for steps in ((10, 20), (11,)):
        writer = Checkpoints(directory, keep=2)
        save(writer, *steps)
        writer.close()
    assert [found.step for found in every(directory)[0]] == [11, 20]


def test_a_torn_checkpoint_of_a_later_step_does_not_push_a_whole_one_out(directory: Path) -> None:
    writer = Checkpoints(directory, keep=1)
    torn = save(writer, 20)
    (torn / STATE).write_bytes(b"")
    save(writer, 11)
    found, skipped = newest(directory)
    assert found is not None
    assert (found.step, skipped) == (11, ())
    writer.close()


def test_the_same_step_is_replaced_and_there_is_always_a_whole_one(
    writer: Checkpoints, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(writer, 5)
    seen = []

    def looked(function: Any) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            found, skipped = newest(directory)
            assert found is not None
            seen.append((found.load()[0]["w"].sum().item(), skipped))
            return function(*arguments, **options)

        return wrapper

    for name in ("rename", "fsync"):
        monkeypatch.setattr(os, name, looked(getattr(os, name)))
    monkeypatch.setattr(shutil, "rmtree", looked(shutil.rmtree))
    save(writer, 5, weights=content(6)["weights"])
    old, new = (content(step)["weights"]["w"].sum().item() for step in (5, 6))
    assert list(dict.fromkeys(seen)) == [(old, ()), (new, ())]
    assert len(seen) >= 8
    assert names(directory) == ["step-00000005"]


@pytest.mark.parametrize("call", range(12))
@pytest.mark.parametrize("name", ["rename", "fsync"])
def test_killed_before_any_of_its_calls_it_leaves_a_whole_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """An exception that nothing handles, at the n-th call, in a save of a step that is there already."""

    class Killed(BaseException):
        pass

    writer = Checkpoints(directory, keep=1)
    save(writer, 4, 5)
    calls = iter(range(100))
    function = getattr(os, name)

    def dies(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= call:
            raise Killed
        return function(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, dies)
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        died = False
        try:
            save(writer, 5, weights=content(6)["weights"])
        except Killed:
            died = True
    writer.close()
    assert died == (call < {"rename": 3, "fsync": 5}[name])
    found, skipped = newest(directory)
    assert found is not None
    assert (found.step, skipped) == (5, ())
    assert torch.equal(found.load()[0]["w"], content(6)["weights"]["w"]) or is_content(found.load(), 5)
    writer = Checkpoints(directory, keep=1)
    save(writer, 6)
    writer.close()
    assert names(directory) == ["step-00000006"], "nothing is left behind"


def test_what_a_killed_run_left_unfinished_is_removed(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name in (".step-00000009.partial", ".step-00000003.discarded", "mine"):
        (directory / name).mkdir()
        (directory / name / WEIGHTS).write_text("half")
    writer = Checkpoints(directory)
    assert names(directory) == ["mine"]
    writer.close()


# Files that are torn or changed.


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    writer = Checkpoints(directory)
    save(writer, 1, 2)
    writer.close()
    return directory


def damaged(directory: Path, name: str, raw: bytes) -> None:
    """With that in a file of step 2, step 1 is found, and step 2 refused."""
    path = directory / "step-00000002"
    original = (path / name).read_bytes()
    try:
        (path / name).write_bytes(raw)
        found, skipped = newest(directory)
        assert found is not None
        assert found.step == 1
        assert len(skipped) == 1
        assert str(path / name) in skipped[0]
        with pytest.raises(errors.CheckpointError) as caught:
            Checkpoint.at(path).load()
        assert caught.value.path == str(path / name)
    finally:
        (path / name).write_bytes(original)


@pytest.mark.parametrize("name", [WEIGHTS, STATE, MANIFEST])
def test_a_file_cut_short_anywhere_is_noticed(two: Path, name: str) -> None:
    raw = (two / "step-00000002" / name).read_bytes()
    for percent in range(100):
        damaged(two, name, raw[: len(raw) * percent // 100])
    damaged(two, name, raw[:-1])
    damaged(two, name, bytes(len(raw)))
    found, _ = newest(two)
    assert found is not None
    assert is_content(found.load(), 2)
    assert is_content(every(two)[0][1].load(), 1)


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_changed_bytes_anywhere_are_noticed(two: Path, name: str) -> None:
    raw = (two / "step-00000002" / name).read_bytes()
    draw = random.Random(name)
    for _ in range(200):
        changed = bytearray(raw)
        for _ in range(draw.choice((1, 1, 3))):
            changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        damaged(two, name, bytes(changed) if changed != raw else raw + b"\0")


def test_changed_bytes_in_the_manifest_change_no_value(two: Path) -> None:
    """A bit of every byte of it: it is refused, or white space was changed for white space."""
    path = two / "step-00000002"
    raw = (path / MANIFEST).read_bytes()
    whole = Checkpoint.at(path)
    same = 0
    try:
        for place in range(len(raw)):
            changed = raw[place] ^ 1 << place % 7
            (path / MANIFEST).write_bytes(raw[:place] + bytes([changed]) + raw[place + 1 :])
            try:
                assert Checkpoint.at(path) == whole
            except errors.CheckpointError:
                continue
            assert raw[place : place + 1].isspace()
            same += 1
    finally:
        (path / MANIFEST).write_bytes(raw)
    assert same < len(raw) / 20


@pytest.mark.parametrize("name", [WEIGHTS, STATE, MANIFEST])
def test_a_file_that_is_missing(two: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(two, tmp_path / "copy")
    (tmp_path / "copy" / "step-00000002" / name).unlink()
    found, skipped = newest(tmp_path / "copy")
    assert found is not None
    assert found.step == 1
    assert "cannot be read: No such file or directory" in skipped[0]


def test_when_no_checkpoint_is_whole_it_is_said_and_not_nothing(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path / "copy")
    for step in (1, 2):
        (tmp_path / "copy" / f"step-0000000{step}" / WEIGHTS).write_bytes(b"x")
    found, skipped = newest(tmp_path / "copy")
    assert found is None
    assert [Path(said.split()[0]).parent.name for said in skipped] == ["step-00000002", "step-00000001"]
    assert "has 1 bytes, not the" in skipped[0]


def test_another_format_is_not_guessed_at(two: Path, tmp_path: Path) -> None:
    path = shutil.copytree(two / "step-00000002", tmp_path / "step-00000002")
    rewrite(path, format=checkpoint.FORMAT + 1)
    with pytest.raises(errors.CheckpointCorruptError, match="another version"):
        Checkpoint.at(path)
    writer = Checkpoints(tmp_path, keep=1)
    save(writer, 3, 4)
    writer.close()
    assert {path.name, "step-00000004"} == {name for name in names(tmp_path) if name.startswith("step")}, "nor deleted"


# Files that somebody else wrote.


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("kind", ["pickle", "old pickle", "torch", "torch, old"])
@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_files_that_would_run_code_are_refused_and_run_none(two: Path, tmp_path: Path, kind: str, name: str) -> None:
    path = shutil.copytree(two / "step-00000002", tmp_path / "step-00000002")
    proof = tmp_path / "proof"
    if kind.startswith("torch"):
        torch.save(Evil(proof), path / name, _use_new_zipfile_serialization=kind == "torch")
    else:
        (path / name).write_bytes(pickle.dumps(Evil(proof), protocol=0 if kind == "old pickle" else None))
    rewrite(path)
    found = Checkpoint.at(path)
    found.verify()
    expected = errors.CheckpointUnsafeError if kind == "torch" else errors.CheckpointCorruptError
    with pytest.raises(expected) as caught:
        found.load()
    assert type(caught.value) is expected
    assert not proof.exists()
    os.system(f"touch {proof}")
    assert proof.exists(), "else this test proves nothing"


@pytest.mark.parametrize(
    "document",
    [[], 3, None, {}, {"format": "x"}, {"checksum": 0}, "[" * 100_000, {"format": 1, "checksum": "", "files": 1}],
)
def test_manifests_that_make_no_sense(tmp_path: Path, document: Any) -> None:
    (tmp_path / MANIFEST).write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(errors.CheckpointCorruptError):
        Checkpoint.at(tmp_path)


# Writing that fails.


def test_a_state_that_cannot_be_kept_is_refused_at_once(writer: Checkpoints, directory: Path) -> None:
    save(writer, 1)
    with pytest.raises(errors.CheckpointStateError) as caught:
        writer.save(step=2, weights={}, state={"lr_scheduler": {"lr_lambdas": [print]}})
    assert caught.value.key == "lr_scheduler.lr_lambdas[0]"
    with pytest.raises(errors.CheckpointStateError, match="facts is no JSON"):
        writer.save(step=2, weights={}, state={}, facts={"loss": torch.ones(1)})
    assert names(directory) == ["step-00000001"]
    save(writer, 3)
    assert names(directory) == ["step-00000001", "step-00000003"]


@in_turn
def test_a_full_disk(directory: Path) -> None:
    """As a limit on the size of files gives it: EFBIG."""
    script = """
        writer = Checkpoints(directory, keep=1)
        writer.save(step=1, **content(1))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 10**9))
        try:
            writer.save(step=2, **content(2))
        except errors.CheckpointWriteError as error:
            print(error.needed_bytes, error.path, error, sep="|")
        print(*sorted(os.listdir(directory)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**9, 10**9))
        writer.save(step=3, **content(3))
        print(*sorted(os.listdir(directory)))
    """
    process = child(directory, script)
    said, then, later = process.communicate(timeout=600)[0].splitlines()
    assert process.returncode == 0
    needed, path, message = said.split("|")
    assert int(needed) == 16 * 8 * 4 * 2 + 3 * 8
    assert path == str(directory / "step-00000002")
    assert "File too large; 1.02 KiB were to be written." in message
    assert then == ".lock step-00000001"
    assert later == ".lock step-00000003"
    found, _ = newest(directory)
    assert found is not None
    assert is_content(found.load(), 3)


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_fails(
    writer: Checkpoints, directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    save(writer, 1)

    def fails(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(errors.CheckpointWriteError, match=os.strerror(code)):
            writer.save(step=2, **content(2))
    assert names(directory) == ["step-00000001"]
    save(writer, 3)
    assert names(directory) == ["step-00000001", "step-00000003"]


def test_what_cannot_be_deleted_is_tried_again_and_stops_nothing(
    writer: Checkpoints, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(writer, 1, 2)
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if Path(target).name.endswith("discarded"):
            raise OSError(errno.EBUSY, "busy")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        save(writer, 3)
    assert names(directory) == ["step-00000001", "step-00000002", "step-00000003"]
    save(writer, 4)
    assert names(directory) == ["step-00000003", "step-00000004"]


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CheckpointWriteError, match="(Not a directory|File exists). Choose a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints")


# Killed.


@in_turn
def test_killed_at_any_instant_it_leaves_what_was_there_or_what_came(directory: Path) -> None:
    """By the kernel, in a loop of saves, some of which replace the same step."""
    script = """
        for line in sys.stdin:
            step = int(line)
            if pid := os.fork():
                print(pid, flush=True)
                os.waitpid(pid, 0)
                print("dead", flush=True)
                continue
            writer = Checkpoints(directory, keep=2)
            for again in range(10**6):
                step += again % 3 > 0
                writer.save(step=step, **content(step))
                os.write(1, b"%d\\n" % step)  # by one call: print may be killed between a number and its end
    """
    draw = random.Random(0)
    durable, inside = 0, 0
    process = child(directory, script, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    stdout = process.stdout
    try:
        for _ in range(20):
            process.stdin.write(f"{durable}\n")
            process.stdin.flush()
            pid = int(process.stdout.readline())
            told = [int(process.stdout.readline()) for _ in range(draw.randrange(1, 4))]
            threading.Event().wait(draw.random() * 0.02)
            os.kill(pid, signal.SIGKILL)
            told += map(int, iter(lambda: stdout.readline().strip(), "dead"))
            inside += any(name.startswith(".step") for name in names(directory))
            found, skipped = newest(directory)
            assert skipped == ()
            assert found is not None
            assert found.step >= max(told)
            for whole in every(directory)[0]:
                assert is_content(whole.load(), whole.step)
            durable = found.step
    finally:
        process.kill()
    process.communicate()
    assert inside >= 3, "else no kill met a save"


def test_a_model_resumed_ends_as_one_that_was_not_stopped(directory: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def trained(parts: tuple[Any, Any, Any], steps: int) -> list[torch.Tensor]:
        model, optimizer, scheduler = parts
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    parts = made()
    trained(parts, 5)
    with_state = {"optimizer": parts[1].state_dict(), "scheduler": parts[2].state_dict(), "rng": torch.get_rng_state()}
    writer = Checkpoints(directory)
    writer.save(step=5, weights=parts[0].state_dict(), state=with_state)
    expected = trained(parts, 5)
    writer.close()
    found, _ = newest(directory)
    assert found is not None
    weights, state = found.load()
    parts = made()
    for part, saved in zip(parts, (weights, state["optimizer"], state["scheduler"]), strict=True):
        part.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    assert all(map(torch.equal, trained(parts, 5), expected))
