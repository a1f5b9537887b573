"""The trials of past runs: one small file per key, of what a micro-batch costs, in the user's cache directory.

Everything here is a help and never a condition: what cannot be read is unknown, what cannot be written is not kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoaccum.planning.costs import Trial
from autoaccum.runs.records import write_json

FORMAT = 1
"""Version of keys, and so of files: with another number nothing that was written before is found."""
MAX_TRIALS = 32
"""Keep at most so many trials in a file, the newest."""
# Names of our files, half-written ones too. The directory may be one that the user named and keeps other files in.
_OURS = re.compile(r"trials-[0-9a-f]{32}\.json(\.\d+\.tmp)?")


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
        try:
            document = json.loads(self._path(key).read_bytes())
            return tuple([Trial(**entry) for entry in document["trials"]]), document["limit_bytes"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # of brackets in brackets
            return (), None

    def save(self, key: str, trials: Iterable[Trial], *, limit_bytes: int | None = None) -> None:
        """Keep the newest trial of each size, at most ``MAX_TRIALS`` of them, in place of what the key had.

        Args:
            key: see ``key_of``.
            trials: oldest first.
            limit_bytes: under which they were tried; None where nobody knows.
        """
        newest: dict[Any, Trial] = {}
        for trial in trials:
            tried = trial.micro_batch, trial.length
            newest.pop(tried, None)  # a dict keeps the place of a key that is set again: this moves it to the end
            newest[tried] = trial
        kept = [asdict(trial) for trial in newest.values()][-MAX_TRIALS:]
        with suppress(OSError):  # a full disk, a directory of another user: then the next run searches again
            write_json(self._path(key), {"limit_bytes": limit_bytes, "trials": kept})

    def files(self) -> list[Path]:
        """Return our files, those that a killed process left half-written too."""
        with suppress(OSError):
            return sorted(path for path in self.where.iterdir() if _OURS.fullmatch(path.name))
        return []

    def _path(self, key: str) -> Path:
        return self.where / f"trials-{key}.json"
