"""Checkpoints in a directory: each is there as a whole or not at all, whenever the process is killed or the disk full.

A checkpoint is a directory, ``step-00001234``, of weights that ``torch.load`` reads, the rest of the state, and a
manifest with the checksums of both and of itself. It is written beside, brought to the disk, and renamed.
Names that begin with ``.step-`` are unfinished or being deleted: the next writer removes them.

``every``, ``newest`` and ``best`` find checkpoints, and take no lock; ``Checkpoints`` writes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from autoaccum.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointStateError,
    CheckpointWriteError,
)
from autoaccum.memory import clock
from autoaccum.runs import parted, states
from autoaccum.runs.files import DirectoryLock, Save, sync_directory, write_durably
from autoaccum.runs.writers import Writers, Written

FORMAT = 1
"""Version of a checkpoint's files and of the state in them; one with another is refused, not guessed at."""
WEIGHTS, STATE, MANIFEST = "model.pt", "state.pt", "manifest.json"
"""Names of a checkpoint's files."""
WEIGHTS_IN_PARTS = "model-in-parts.pt"
"""Name in place of ``WEIGHTS`` where some weights lie in the files of several ranks."""
_NAME = re.compile(r"step-\d+(\.replaced)?")
"""Names of checkpoints that count: ``.replaced`` is one that is whole while another of its step takes its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was written as a whole; ``verify`` tells whether it still is."""

    path: Path
    """Its directory."""
    step: int
    """Optimizer steps that were taken."""
    serial: int
    """Number of this checkpoint among all that were written to the directory: the newest has the greatest, whatever its
    step, for a run may have gone back."""
    is_best: bool
    """Whether it was the best so far when it was written."""
    saved: str
    """Time of writing, in UTC, as ISO 8601 to the second."""
    facts: Mapping[str, Any]
    """What the writer noted: samples, losses."""
    files: Mapping[str, tuple[int, str]] = field(repr=False)
    """Number of bytes and their SHA-256 of each file, by its name."""

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Return the checkpoint in a directory, read from its manifest alone.

        Raises:
            CheckpointCorruptError: there is no manifest, or it is not as it was written.
        """
        manifest = path / MANIFEST
        try:
            document = json.loads(manifest.read_bytes())
        except OSError as error:
            raise CheckpointCorruptError(manifest, f"cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise CheckpointCorruptError(manifest, "is not a manifest")
        # Looked at first: another version may compute the checksum otherwise, and "changed" would be a wrong word.
        if document.get("format") != FORMAT:
            cure = "Resume with that version, or load its model.pt."
            raise CheckpointCorruptError(manifest, "was written by another version of autoaccum", cure=cure)
        # Checked before anything in it is believed. It tells of torn files; an attacker could compute it anew.
        if document.pop("checksum", None) != _checksum(document):
            raise CheckpointCorruptError(manifest, "was changed after it was written")
        document.pop("format")
        files = {name: (size, digest) for name, (size, digest) in document.pop("files").items()}
        return cls(path=path, **document, files=files)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Read all of its files and compare them with the checksums.

        Args:
            share: the number of this rank and of all. Of files that each rank has written one reads its share, and
                looks whether the others are there.

        Raises:
            CheckpointCorruptError: a file is missing, or not as it was written.
        """
        rank, num_ranks = share
        for index, (name, (size, digest)) in enumerate(sorted(self.files.items())):
            path = self.path / name
            try:
                found = path.stat().st_size
                if found != size:  # said with both numbers, and without reading gigabytes first
                    raise CheckpointCorruptError(path, f"has {found} bytes, not the {size} that were written")
                if parted.is_file(name) and index % num_ranks != rank:
                    continue
                with open(path, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        raise CheckpointCorruptError(path, "was changed after it was written")
            except OSError as error:
                raise CheckpointCorruptError(path, f"cannot be read: {error.strerror}") from None

    def load(self, share: tuple[int, int] = (0, 1)) -> tuple[Any, Any]:
        """Return the weights and the state that were saved, verified, with all tensors on the CPU.

        There they belong: ``load_state_dict`` of models and optimizers moves them to where the parameters are, while
        random states and counters have to stay. In the place of tensors that lie on several ranks there is ``Parted``.

        Args:
            share: (rank, number of ranks): which of the files this rank compares with their checksums.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
            CheckpointUnsafeError: a file could execute code.
        """
        # Read twice: once for the checksums and once to be used. Files of this size are in the page cache by then.
        self.verify(share)
        files = parted.Files(self.path, list(filter(parted.is_file, self.files)))
        weights = WEIGHTS if WEIGHTS in self.files else WEIGHTS_IN_PARTS
        return states.read(self.path / weights, files), states.read(self.path / STATE, files)


def every(directory: Path) -> tuple[list[Checkpoint], tuple[str, ...]]:
    """Return the checkpoints in a directory, newest first, by their manifests alone, and what is wrong with others."""
    found, skipped = [], []
    if directory.is_dir():
        for path in sorted(directory.iterdir()):
            if _NAME.fullmatch(path.name):
                try:
                    found.append(Checkpoint.at(path))
                except CheckpointError as error:
                    skipped.append(str(error))
    return sorted(found, key=lambda checkpoint: checkpoint.serial, reverse=True), tuple(skipped)


def newest(directory: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint in a directory, verified, and what is wrong with those that were passed over.

    When there is none but something was passed over, a run that begins anew would lose what may be saved by hand.
    """
    return _first_whole(*every(directory))


def best(directory: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the newest whole one that was the best when it was written, and what is wrong with those passed over."""
    found, skipped = every(directory)
    return _first_whole([checkpoint for checkpoint in found if checkpoint.is_best], skipped)


def _first_whole(found: list[Checkpoint], skipped: tuple[str, ...]) -> tuple[Checkpoint | None, tuple[str, ...]]:
    # Only as many are read in full as it takes to find a whole one: that is the first, but for a failing disk.
    for checkpoint in found:
        try:
            checkpoint.verify()
        except CheckpointError as error:
            skipped += (str(error),)
        else:
            return checkpoint, skipped
    return None, skipped


class Checkpoints:
    """The writer of one run's checkpoints; the directory is this run's until ``close``."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        """Take the directory, made where there is none.

        Args:
            directory: for nothing but checkpoints.
            keep: how many of the newest stay there, at least 1; the best stays besides.

        Raises:
            CheckpointLockedError: another run writes to it.
            CheckpointWriteError: it cannot be made or written to.
        """
        self.directory = directory
        self.keep = keep
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(directory)
            try:
                sync_directory(directory.parent)
                self._remove_unfinished()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise CheckpointWriteError(directory, 0, error.strerror or repr(error), has_begun=False) from None
        # The count goes on where it was, for a step says nothing of time: a run that went back writes its steps again.
        self._serial = max((checkpoint.serial for checkpoint in every(directory)[0]), default=0)

    def save(
        self,
        *,
        step: int,
        weights: Mapping[str, Any],
        state: Any,
        facts: Mapping[str, Any] | None = None,
        is_best: bool = False,
        writers: Writers | None = None,
    ) -> Path:
        """Write a checkpoint, with one tensor at a time copied to the host; one of the same step is replaced.

        Args:
            step: optimizer steps that were taken.
            weights: the model's state_dict.
            state: everything else.
            facts: JSON for people and tools to read: samples, losses.
            is_best: keep it until there is another best one.
            writers: the ranks that write it together, where the model is sharded over several.

        Returns:
            Where it is.

        Raises:
            CheckpointStateError: there is something in the state that cannot be kept; nothing was written.
            CheckpointWriteError: it could not be written.
        """
        try:
            noted = json.loads(json.dumps(dict(facts or {})))
        except (TypeError, ValueError) as error:
            raise CheckpointStateError(
                "facts", f"no JSON ({error})", "Give numbers, strings, lists and dicts."
            ) from None
        name = WEIGHTS if writers is None else WEIGHTS_IN_PARTS
        found = {name: states.of_weights(weights), STATE: states.examined(state)}
        parts = {name: tensor for one in found.values() for name, tensor in one.parts.items()}
        if writers is None and parts:
            raise CheckpointStateError("weights", "a part of what other ranks have the rest of", "Gather it first.")
        files: dict[str, Save] = {name: one.save for name, one in found.items()}
        num_bytes = sum(one.num_bytes for one in found.values())
        self._serial += 1
        manifest = {
            "format": FORMAT,
            "step": step,
            "serial": self._serial,
            "is_best": is_best,
            "saved": datetime.fromtimestamp(clock.stamp(), UTC).isoformat(timespec="seconds"),
            "facts": noted,
        }
        path = self.directory / f"step-{step:08d}"
        self._write(path, files, num_bytes, manifest, None if writers is None else partial(writers.write, parts))
        return path

    def close(self) -> None:
        """Give the directory back."""
        self._lock.release()

    def _write(
        self,
        path: Path,
        files: Mapping[str, Save],
        num_bytes: int,
        manifest: dict[str, Any],
        write_parts: Callable[[Path], Written] | None = None,
    ) -> None:
        # Under a name that counts for nothing until all of it is on the disk: files, their names, then its own.
        unfinished = self._hidden(path, "partial")
        try:
            unfinished.mkdir()
            written = {} if write_parts is None else write_parts(unfinished)
            written |= {name: write_durably(unfinished / name, save) for name, save in files.items()}
            # The manifest comes last, and with it the checksums: without it there is no checkpoint.
            document = {**manifest, "files": written}
            text = json.dumps({**document, "checksum": _checksum(document)}, indent=1)
            write_durably(unfinished / MANIFEST, lambda file: file.write(text.encode()))
            sync_directory(unfinished)
            self._put(unfinished, path)
        except OSError as error:
            raise CheckpointWriteError(path, num_bytes, error.strerror or repr(error)) from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # what was begun and failed; nothing once it was renamed
        self._prune()

    def _put(self, partial: Path, path: Path) -> None:
        """Rename a finished checkpoint to its name. One that has the name counts until then, under ``.replaced``."""
        before = path.with_name(f"{path.name}.replaced")
        if path.exists():
            self._discard(before)
            os.rename(path, before)  # a directory that is not empty cannot be renamed over
        os.rename(partial, path)
        sync_directory(self.directory)  # the new name is on the disk before anything older is deleted
        self._discard(before)

    def _prune(self) -> None:
        """Delete all but the newest and the best.

        Those whose manifests cannot be read stay: somebody may save them by hand.
        """
        found, _ = every(self.directory)
        best = [checkpoint for checkpoint in found if checkpoint.is_best][:1]  # of several the newest is the best
        for checkpoint in found[self.keep :]:
            if checkpoint not in best:
                with suppress(OSError):  # tried again after the next one
                    self._discard(checkpoint.path)

    def _discard(self, path: Path) -> None:
        """Delete a checkpoint; rename it first, so that one that is half deleted is not taken for a whole one."""
        if path.exists():
            discarded = self._hidden(path, "discarded")
            os.rename(path, discarded)
            shutil.rmtree(discarded, ignore_errors=True)  # tried again by the next writer

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _hidden(path: Path, suffix: str) -> Path:
        return path.with_name(f".{path.name}.{suffix}")


def _checksum(document: dict[str, Any]) -> str:
    # Of the content and not of the bytes, so that the checksum can stand in the file itself.
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
