"""The trials of past runs: one small file per key, of what a micro-batch costs, in the user's cache directory.

``past_of_run`` has what one run does with them, and ``cost_key`` what the key is made of.

Everything here is a help and never a condition: what cannot be read is unknown, what cannot be written is not kept.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoaccum._kinds import accepts
from autoaccum.memory import clock
from autoaccum.planning.costs import Trial
from autoaccum.planning.patience import SURELY_MORE
from autoaccum.planning.saved import trials_of
from autoaccum.runs.files import read_small

FORMAT = 1
"""Version of files and of keys: with another number nothing that was written before is found."""
MAX_FILES = 1000
"""Keep at most so many files; the one that was not used for longest is dropped for a new one."""
MAX_TRIALS = 32
"""Keep at most so many trials in a file, the newest."""
CLOSE = 0.9
"""The share of a limit from which on a peak is close to it, and what ran there may have been slow for that."""
# Names of our files, half-written ones too. The directory may be one that the user named and keeps other files in.
_OURS = re.compile(r"trials-[0-9a-f]{32}(\.json|\.\w+\.tmp)")
_OUTCOME = ("fits", "peak_bytes", "predicted_bytes", "seconds", "allocated_bytes")
"""Fields of a trial that say what came of it; the others say what was tried."""


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

    def load(self, key: str, limit_bytes: int = 0) -> tuple[Trial, ...]:
        """Return the trials saved under a key, oldest first; none when there is no such file, or no sense in it.

        ``fits`` was said under that run's limit, and peaks on a CPU count what else that process held. What came close
        to that limit does not say how long it took, where ``limit_bytes`` are clearly more.
        """
        path = self._path(key)
        document = _read(path)
        if document is None:
            return ()
        with suppress(OSError):
            os.utime(path)  # the files used last are the last to be dropped
        # A size that just fits is slow for reasons of its own: memory is given back and taken again. Believed under a
        # limit that leaves room it would look as if larger ones were no faster, and no run would ever try them.
        limits = _limits(document)
        return tuple(
            replace(trial, seconds=None) if _was_close(trial, limits.get(tried(trial)), limit_bytes) else trial
            for trial in _trials(document) or ()
        )

    def limits(self, key: str) -> dict[Any, int]:
        """Return under which limit each of the trials under a key was, by what was ``tried``."""
        return _limits(_read(self._path(key)) or {})

    def save(
        self, key: str, trials: Iterable[Trial], *, model: str, device: str, limits: Mapping[Any, int] | None = None
    ) -> None:
        """Keep the newest trial of each size, at most ``MAX_TRIALS`` of them, in place of what the key had.

        Args:
            key: see ``cost_key.key``.
            trials: oldest first.
            model: class of the model, for people to read.
            device: its type and name, likewise.
            limits: under which limit each was tried, by what was ``tried``; None where nobody knows.
        """
        document = {
            "format": FORMAT,
            "saved": datetime.fromtimestamp(clock.stamp(), UTC).isoformat(timespec="seconds"),
            "model": model,
            "device": device,
            "trials": [_entry(trial, (limits or {}).get(tried(trial))) for trial in _newest(trials)],
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


def _entry(trial: Trial, limit_bytes: int | None) -> dict[str, Any]:
    """Return a trial as plain values: what came later than others only where it says something."""
    values = {**asdict(trial), "limit_bytes": limit_bytes}
    later = ("allocated_bytes", "limit_bytes")
    return {name: value for name, value in values.items() if value is not None or name not in later}


def tried(trial: Trial) -> tuple[Any, ...]:
    """Return what was tried, whatever came of it: a size at a length."""
    # By exclusion, so that a field that a later version adds tells kinds apart and loses no trial.
    return tuple(value for name, value in asdict(trial).items() if name not in _OUTCOME)


def _limits(document: dict[str, Any]) -> dict[Any, int]:
    """Return the limits of a file's trials, as far as they make sense: the user may have edited it."""
    found = {}
    for trial, entry in zip(_trials(document) or (), document.get("trials", ()), strict=False):
        limit = entry.get("limit_bytes")
        if isinstance(limit, int) and 0 < limit < 2**63:
            found[tried(trial)] = limit
    return found


def _was_close(trial: Trial, of_then: int | None, limit_bytes: int) -> bool:
    """Return whether a trial came close to the limit of then, where there is clearly more now."""
    if of_then is None or trial.peak_bytes is None or limit_bytes <= SURELY_MORE * of_then:
        return False
    # What is clearly beyond it was tried under another one.
    return CLOSE * of_then < trial.peak_bytes <= SURELY_MORE * of_then


def _newest(trials: Iterable[Trial]) -> list[Trial]:
    """Return the last trial of each kind, oldest first, where a kind is all that was tried: a size at a length."""
    found: dict[Any, Trial] = {}
    for trial in trials:
        kind = tried(trial)
        found.pop(kind, None)  # a dict keeps the place of a key that is set again: this moves it to the end
        found[kind] = trial
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
    """Return the trials of a file, or None where it does not hold trials.

    They are read by the fields that trials have now: another version may have written more, or fewer.
    """
    trials = document.get("trials")
    if not isinstance(trials, list) or not all(isinstance(trial, dict) for trial in trials):
        return None
    names = {field.name for field in fields(Trial)}
    known = [{name: value for name, value in trial.items() if name in names} for trial in trials]
    # The user may have edited the file.
    return tuple(Trial(**trial) for trial in known) if accepts(trials_of(Trial), known) else None
