"""A run read from its directory: columns instead of records, so that a million windows take little memory."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.errors import NoHistoryError
from autoaccum.events import Finished, Resumed, Started, StepReport
from autoaccum.runs.records import FIELDS, HISTORY, read_records

Columns = Mapping[str, NDArray[Any]]

_WINDOWS = {
    name: kind
    for name, kind in {"time": float, **FIELDS["StepReport"], "micro_batch": int, "accumulation_steps": int}.items()
    if kind in (int, float, float | None)
}
"""Types of the columns of numbers by their names; null is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All that a run's directory tells; what a ``Resumed`` made void is not in it."""

    path: Path
    windows: Columns
    """One row a ``StepReport``: its fields, NaN for None; ``time`` in unix seconds; in place of ``micro_batches`` the
    largest, ``micro_batch``, and their number, ``accumulation_steps``."""
    events: Mapping[str, Columns]
    """For each type of event one row an event: its fields and ``time``. A type that did not happen has no rows."""
    finished: str | None
    """Why the run ended; None while it runs, and when it was killed."""
    last_time: float | None
    """Unix seconds of the last record; None before the first."""
    garbled: int
    """Number of lines of the history that hold no record."""
    config: Mapping[str, Any]
    """``config.json``; empty when there is none."""
    environment: Mapping[str, Any]
    """``environment.json``; empty when there is none."""
    outputs: Columns = field(default_factory=dict)
    """Means of what was returned beside the loss, by name: one row a window, NaN where it had none of that name."""

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.windows["step"])

    def samples_at(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples trained on after each of these steps, shape ``(n,)`` as they are; 0 before the first."""
        at = np.searchsorted(self.windows["step"], steps, side="right")
        return np.concatenate(([0], self.windows["num_samples"]))[at]


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Read what a run has recorded so far; it may go on meanwhile.

    Raises:
        NoHistoryError: the directory holds no ``history.jsonl``.
        OSError: it cannot be read.
    """
    path = Path(run_dir)
    try:
        records = read_records(path / HISTORY, void=False)
    except OSError as error:
        if (path / HISTORY).is_file():
            raise
        raise NoHistoryError(run_dir, HISTORY) from error
    # Doubles, in which integers up to 2**53 are exact.
    windows = {name: array("d") for name in _WINDOWS}
    outputs: dict[str, array[float]] = {}
    events: dict[str, list[tuple[float, Any]]] = {name: [] for name in FIELDS if name != "StepReport"}
    finished: str | None = None
    for record in records:
        assert records.time is not None
        if isinstance(record, StepReport):
            _add(record, records.time, windows, outputs)
            continue
        events[type(record).__name__].append((records.time, record))
        if isinstance(record, Started | Resumed | Finished):
            finished = record.reason if isinstance(record, Finished) else None
    return Run(
        path=path,
        windows={
            name: np.array(column, np.int64 if _WINDOWS[name] is int else np.float64)
            for name, column in windows.items()
        },
        outputs={name: np.array(column) for name, column in outputs.items()},
        events={name: _columns(name, rows) for name, rows in events.items()},
        finished=finished,
        last_time=records.time,
        garbled=records.garbled,
        config=_document(path / "config.json"),
        environment=_document(path / "environment.json"),
    )


def _add(
    report: StepReport, time: float, windows: Mapping[str, array[float]], outputs: dict[str, array[float]]
) -> None:
    """Add the numbers of a window to the columns."""
    sizes = report.micro_batches
    made = {"time": time, "micro_batch": max(sizes), "accumulation_steps": len(sizes)}
    # Tensors are for whoever reads the records: a million windows of them would not be in memory.
    means = {name: value for name, value in report.outputs.items() if isinstance(value, float)}
    for name in means:
        outputs.setdefault(name, array("d", [math.nan] * len(windows["step"])))
    for name, column in outputs.items():
        column.append(means.get(name, math.nan))
    for name, column in windows.items():
        value = made[name] if name in made else getattr(report, name)
        column.append(math.nan if value is None else value)


def _columns(name: str, rows: list[tuple[float, Any]]) -> dict[str, NDArray[Any]]:
    """Return the events of a type as columns; what is neither an int nor a float is one of objects."""
    found = {"time": np.array([time for time, _ in rows], np.float64)}
    for field_name, kind in FIELDS[name].items():
        dtype: Any = {int: np.int64, float: np.float64}.get(kind, object)
        found[field_name] = column = np.empty(len(rows), dtype)
        for index, (_, record) in enumerate(rows):  # numpy would take a column of tuples for a matrix
            column[index] = getattr(record, field_name)
    return found


def _document(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; a user may have edited it, so that anything may be in it."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        return {"error": f"{path.name} cannot be read: {error.strerror}"}
    except (ValueError, RecursionError):
        return {"error": f"{path.name} is not JSON"}
    return document if isinstance(document, dict) else {"value": document}
