"""What held the memory when it ran out, looked at while it is held, and written once the run has recovered."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from autoaccum.events import OutOfMemory, Record
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import witnessed
from autoaccum.runs.oom_files import OomFiles
from autoaccum.window.holding import held
from autoaccum.window.step import Step

MOST_LOOKS = 32
"""Look so often in a process: a look takes as long as some windows of a tiny model, and not all are written."""


class Shortages:
    """Sees what holds the memory of a run when it runs out, and writes it into the run's directory."""

    def __init__(self, directory: Path, step: Step, memory: Memory, rank: int = 0) -> None:
        """Set up.

        Args:
            directory: of the run.
            step: takes the steps of the run; what it computes is known to be in memory.
            memory: of the device.
            rank: of this process.
        """
        self._directory = directory
        self._job, self._limit = step.job, step.limit
        self._memory = memory
        self._files = OomFiles(directory, rank)
        self._looks = 0
        self._seen: dict[str, Any] = {}  # at the last look, which no event has told of yet

    def look(self, error: Exception) -> None:
        """Keep what holds the memory, in numbers and texts."""
        # Where memory runs out again and again, what is in the files already says why.
        if self._looks >= MOST_LOOKS or self._files.is_full:
            return
        self._looks += 1
        self._seen = {}
        self._seen = held(self._job, self._memory, error)

    # A callback among the others, so that it hears of what has happened as they do.
    def __call__(self, record: Record) -> None:
        """Write what was seen, if a record says that memory has run out."""
        if isinstance(record, OutOfMemory) and self._directory.is_dir():
            seen, self._seen = self._seen, {}
            # Not before: by now the error is gone, and with it what could not be held.
            if seen:
                when = {"time": clock.stamp(), "limit_bytes": self._limit.bytes}
                self._files.write(record, {**when, **seen})


def watched(shortages: Shortages | None) -> AbstractContextManager[None]:
    """Return a context in which it is seen what holds the memory when it runs out, where that is to be kept."""
    return nullcontext() if shortages is None else witnessed(shortages.look)
