"""What held the memory when it ran out: small JSON files in a run's directory, ``oom-STEP.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from autoaccum.events import OutOfMemory

MOST = 8
"""Write so many of them in a run: the first say most, and a device that others fill may run out in each window."""


def oom_files(directory: Path) -> list[Path]:
    """Return those that are in a run's directory, the earliest first."""
    found = [path for path in directory.glob("oom-*.json") if path.stem.split("-")[1].isdecimal()]
    return sorted(found, key=lambda path: ([int(n) for n in path.stem.split("-")[1:] if n.isdecimal()], path.name))


class OomFiles:
    """Writes what was seen, once for each occasion, up to ``MOST`` of them in all processes of a run."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        """Write to a run's directory, under names with the rank where it is not the first."""
        self._directory = directory
        self._suffix = f"-rank{rank}" if rank else ""
        self._met: set[tuple[int, str, int]] = set()  # occasions of this process

    @property
    def is_full(self) -> bool:
        """Return whether there are as many as there may be."""
        # Those of earlier processes count, and those of other ranks do not.
        own = [path for path in oom_files(self._directory) if ("-rank" in path.stem) == bool(self._suffix)]
        return len(own) >= MOST

    def write(self, event: OutOfMemory, seen: Mapping[str, Any]) -> Path | None:
        """Write what was seen when memory ran out; return where, or None where nothing was written.

        Nothing is, for the same size in the same window a second time, beyond ``MOST``, and where the disk refuses: a
        run goes on without it.
        """
        occasion = (event.step, event.phase, event.micro_batch)
        if occasion in self._met or self.is_full:
            return None
        self._met.add(occasion)
        facts = {"step": event.step, "phase": event.phase, "micro_batch": event.micro_batch, **seen}
        try:
            path = self._free(event.step)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_text(json.dumps(facts, indent=1), encoding="utf-8")
            beside.replace(path)  # a kill leaves no half of one
        except (OSError, MemoryError):
            return None
        return path

    def _free(self, step: int) -> Path:
        """Return a name for a file of that window that no other one has."""
        for number in count(1):
            again = "" if number == 1 else f"-{number}"
            path = self._directory / f"oom-{step}{again}{self._suffix}.json"
            if not path.exists():
                return path
        raise AssertionError
