"""The trials of past runs: one small file per key, of what a micro-batch costs, in the user's cache directory.

Everything here is a help and never a condition: what cannot be read is unknown, what cannot be written is not kept.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoaccum.memory import clock
from autoaccum.planning.costs import Trial
from autoaccum.runs.files import read_small

FORMAT = 1
"""Version of files and of keys: with another number nothing that was written before is found."""
MAX_FILES = 1000
"""Keep at most so many files; the one that was not used for longest is dropped for a new one."""
MAX_TRIALS = 32
"""Keep at most so many trials in a file, the newest."""
# Names of our files, half-written ones too. The directory may be one that the user named and keeps other files in.
_OURS = re.compile(r"trials-[0-9a-f]{32}(\.json|\.\w+\.tmp)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file, as people are shown it."""

    saved: str
    """Time of writing, in UTC, as ISO 8601 to the second."""
    model: str
    """Name of the model's class."""
    device: str
    """Its type and name."""
    num_trials: int
    """Number of sizes that were measured."""


def directory() -> Path:
    """Return where the files are: ``AUTOACCUM_CACHE_DIR``, or the user's cache directory."""
    named = os.environ.get("AUTOACCUM_CACHE_DIR")
    # As PyTorch's hub and Hugging Face's have it, on every system.
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(named or os.path.join(base, "autoaccum")))


class Past:
    """The files of one directory; any number of processes may read and write them at once."""

    def __init__(self, where: Path | None = None) -> None:
        """Look for them in ``where``, which need not be there; in ``directory()`` when it is left out."""
        self.where = directory() if where is None else where

    def load(self, key: str) -> tuple[tuple[Trial, ...], int | None]:
        """Return the trials saved under a key, oldest first, and the limit they were under; none of an unknown key.

        ``fits`` was said under that run's limit, and peaks on a CPU count what else that process held.
        """
        path = self._path(key)
        document = _read(path)
        if document is None:
            return (), None
        with suppress(OSError):
            os.utime(path)  # the files used last are the last to be dropped
        return _trials(document) or (), document.get("limit_bytes")

    def save(
        self, key: str, trials: Iterable[Trial], *, model: str, device: str, limit_bytes: int | None = None
    ) -> None:
        """Keep the newest trial of each size, at most ``MAX_TRIALS`` of them, in place of what the key had.

        Args:
            key: see ``key_of``.
            trials: oldest first.
            model: class of the model, for people to read.
            device: its type and name, likewise.
            limit_bytes: under which they were tried; None where nobody knows.
        """
        document = {
            "format": FORMAT,
            "saved": datetime.fromtimestamp(clock.stamp(), UTC).isoformat(timespec="seconds"),
            "model": model,
            "device": device,
            "limit_bytes": limit_bytes,
            "trials": [asdict(trial) for trial in _newest(trials)],
        }
        with suppress(OSError):  # a full disk, a directory of another user: then the next run searches again
            self.where.mkdir(parents=True, exist_ok=True)
            # Renamed into place, so that nobody reads half of it.
            handle, name = tempfile.mkstemp(dir=self.where, prefix=f"trials-{key}.", suffix=".tmp")
            try:
                with open(handle, "w", encoding="utf-8") as file:
                    json.dump(document, file, indent=1)
                os.replace(name, self._path(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
            self._drop_oldest()

    def entries(self) -> list[Entry]:
        """Return what is there, newest first; files that make no sense are left out."""
        found = []
        for path, _ in self._files():
            document = _read(path)
            trials = None if document is None else _trials(document)
            if document is not None and trials is not None:
                saved, model, device = (str(document.get(name, "")) for name in ("saved", "model", "device"))
                found.append(Entry(saved=saved, model=model, device=device, num_trials=len(trials)))
        return sorted(found, key=lambda entry: entry.saved, reverse=True)

    def num_bytes(self) -> int:
        """Return the bytes of all our files."""
        return sum(status.st_size for _, status in self._files())

    def clear(self) -> int:
        """Remove all our files, and no others; returns how many.

        Raises:
            OSError: one cannot be removed.
        """
        return sum(_remove(path) for path, _ in self._files())

    def _path(self, key: str) -> Path:
        return self.where / f"trials-{key}.json"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield our files, those that a killed process left half-written too, and what the system knows of each."""
        with suppress(OSError):
            for path in sorted(self.where.iterdir()):
                if _OURS.fullmatch(path.name):
                    with suppress(FileNotFoundError):  # another process dropped it
                        yield path, path.stat()

    def _drop_oldest(self) -> None:
        """Remove the files that were not used for longest, so that sweeps over many models do not fill the disk."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns, reverse=True)
        for path, _ in files[MAX_FILES:]:
            _remove(path)


def _newest(trials: Iterable[Trial]) -> list[Trial]:
    """Return the last trial of each size at a length, oldest first."""
    found: dict[Any, Trial] = {}
    for trial in trials:
        tried = trial.micro_batch, trial.length
        found.pop(tried, None)  # a dict keeps the place of a key that is set again: this moves it to the end
        found[tried] = trial
    return list(found.values())[-MAX_TRIALS:]


def _remove(path: Path) -> bool:
    """Remove a file; return False if it was gone already."""
    try:
        path.unlink()
    except FileNotFoundError:  # another process was first
        return False
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None where it cannot be read or is of another format."""
    try:
        document = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):  # RecursionError: a file of brackets in brackets
        return None
    return document if isinstance(document, dict) and document.get("format") == FORMAT else None


def _trials(document: dict[str, Any]) -> tuple[Trial, ...] | None:
    """Return the trials of a file, or None where it does not hold trials as they are now."""
    try:
        return tuple([Trial(**entry) for entry in document["trials"]])
    except (LookupError, TypeError):
        return None


# By directory and key, what ran out of memory in this process, and with how many bytes of room for it. In a file it
# would outlive its reasons: what else was on the device then, and how memory was fragmented.
