"""A run read from its directory: columns instead of records, so that a million windows take little memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.errors import NoHistoryError
from autoaccum.runs.files import open_regular, read_small
from autoaccum.runs.records import FIELDS, HISTORY, documents, value_of

Columns = Mapping[str, NDArray[Any]]

# By name the dtypes of the columns of numbers, in the order in which they are kept; null is NaN.
_WINDOWS: dict[str, np.dtype[Any]] = {}
for _name, _kind in {"time": float, **FIELDS["StepReport"], "micro_batch": int, "accumulation_steps": int}.items():
    if _kind in (int, float, float | None):
        _WINDOWS[_name] = np.dtype(np.int64 if _kind is int else np.float64)
_OUTPUT = "output"
"""First part of the key of an output's column, beside its name, which is the user's and may be that of a field."""
_ROWS = 20_000
"""Make columns of so many lines at a time, for as objects windows take far more memory."""


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
    voided: int
    """Number of windows that were trained again after a resume."""
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

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Return the seconds of training after each window: those of validation and between processes are left out."""
        return np.cumsum(self.windows["seconds"])


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Read what a run has recorded so far; it may go on meanwhile.

    Raises:
        NoHistoryError: the directory holds no ``history.jsonl``.
        OSError: it cannot be read.
    """
    path = Path(run_dir)
    # In chunks, so that the file is never in memory as a whole; and as bytes, which JSON is read from anyway.
    loading = _Loading()
    try:
        with open(open_regular(path / HISTORY, os.O_RDONLY, links=True), "rb") as file:
            while lines := list(islice(file, _ROWS)):
                for document in documents(lines):
                    loading.take(document)
                loading.pack()
    except OSError as error:
        if (path / HISTORY).is_file():
            raise
        raise NoHistoryError(run_dir, HISTORY) from error  # nothing is there, or a pipe, which would never end
    return Run(
        path=path,
        windows=loading.windows(),
        outputs=loading.outputs(),
        events={name: _columns(name, rows) for name, rows in loading.events.items()},
        finished=loading.finished,
        last_time=loading.last_time,
        voided=loading.voided,
        garbled=loading.garbled,
        config=_document(path / "config.json"),
        environment=_document(path / "environment.json"),
    )


class _Loading:
    """The columns of a run, while its lines come."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[Any, ...]]] = {name: [] for name in FIELDS if name != "StepReport"}
        self.finished: str | None = None
        self.last_time: float | None = None
        self.voided = 0
        self.garbled = 0
        self._rows: list[dict[Any, Any]] = []  # windows that are objects still
        self._packed: list[dict[Any, NDArray[Any]]] = []  # those before them, as columns
        self._last_step = 0
        self._begun: dict[str, int] = {}  # by type, events before the last Started

    def take(self, document: dict[str, Any] | None) -> None:
        """Take what one line holds, None where that is no record."""
        if document is None:
            self.garbled += 1
            return
        name = document["type"]
        try:
            if name == "StepReport":
                self._window(document)
            elif name in FIELDS:
                self._event(name, document)
            else:  # of a newer version
                return
            if math.isfinite(seconds := float(document["time"])):
                self.last_time = seconds
        except (KeyError, TypeError, ValueError, OverflowError):  # JSON, with other fields or values than a record's
            self.garbled += 1

    def _window(self, document: dict[Any, Any]) -> None:
        sizes = document.pop("micro_batches")
        document["micro_batch"], document["accumulation_steps"] = max(sizes), len(sizes)
        # Tensors are for whoever reads the records: a million windows of them would not be in memory.
        outputs = document.pop("outputs", {})
        if not isinstance(outputs, dict):
            raise ValueError(f"{outputs!r} are no outputs")
        document |= {(_OUTPUT, name): value for name, value in outputs.items() if not isinstance(value, list)}
        if document["step"] <= self._last_step:  # a run from the beginning in the directory of another
            # Without a checkpoint there is no Resumed: whatever was recorded before the last Started is of that other
            # run, events that have no step included.
            self._void(document["step"] - 1)
            for name, count in self._begun.items():
                del self.events[name][:count]
            self._begun = {}
        self._last_step = document["step"]
        self._rows.append(document)

    def _event(self, name: str, document: dict[str, Any]) -> None:
        # Before anything is changed by it: an event whose values cannot be read is garbled, and nothing else.
        values = [value_of(document[field], kind) for field, kind in FIELDS[name].items()]
        if name == "Resumed":
            self._resume(document["step"])
        if name == "Started":
            self._begun = {name: len(rows) for name, rows in self.events.items()}
        if name in ("Resumed", "Started"):
            self.finished = None
        elif name == "Finished":
            self.finished = document["reason"]
        self.events[name].append((float(document["time"]), *values))

    def _resume(self, step: int) -> None:
        """Drop what came after this step, from which the run goes on; that it was resumed before stays."""
        self._void(step)
        for name, rows in self.events.items():
            if "step" in FIELDS[name] and name != "Resumed":
                at = 1 + list(FIELDS[name]).index("step")
                rows[:] = [row for row in rows if row[at] <= step]
        self._begun = {}

    def _void(self, step: int) -> None:
        """Drop the windows after this step."""
        self.pack()
        windows = self._joined()
        kept = int(np.searchsorted(windows["step"], step, side="right"))
        self.voided += len(windows["step"]) - kept
        # What was packed at once may be kept in part only, so all parts become one.
        self._packed = [{name: column[:kept] for name, column in windows.items()}]
        self._last_step = step

    def pack(self) -> None:
        """Make columns of the rows; a window whose values cannot be read is garbled."""
        rows, self._rows = self._rows, []
        try:
            self._packed.append(_packed(rows))
        except (KeyError, TypeError, ValueError, OverflowError):
            # One of them cannot be read: one by one, which is slow and rare, it shows which.
            for row in rows:
                try:
                    self._packed.append(_packed([row]))
                except (KeyError, TypeError, ValueError, OverflowError):
                    self.garbled += 1

    def windows(self) -> dict[str, NDArray[Any]]:
        """Return the columns of the windows that are packed."""
        return {name: column for name, column in self._joined().items() if isinstance(name, str)}

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Return the columns of their outputs."""
        return {name[1]: column for name, column in self._joined().items() if not isinstance(name, str)}

    def _joined(self) -> dict[Any, NDArray[Any]]:
        """Return all columns; in a part of the run that had no output of a name, that is NaN."""
        parts = self._packed or [_packed([])]
        joined = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            lacking = (np.full(len(part["step"]), np.nan) if name not in part else part[name] for part in parts)
            joined[name] = np.concatenate(list(lacking))
        return joined


def _packed(rows: list[dict[Any, Any]]) -> dict[Any, NDArray[Any]]:
    """Return the rows as columns."""
    # numpy reads null as NaN, and the texts of what JSON has not.
    columns: dict[Any, NDArray[Any]]
    columns = {name: np.array([row[name] for row in rows], dtype) for name, dtype in _WINDOWS.items()}
    outputs = dict.fromkeys(key for row in rows for key in row if isinstance(key, tuple))
    columns |= {name: np.array([row.get(name) for row in rows], np.float64) for name in outputs}
    # A list in place of a number makes a matrix, and seconds are summed: neither would show later on.
    if any(column.ndim != 1 for column in columns.values()) or not np.isfinite(columns["seconds"]).all():
        raise ValueError("a value that no run has written")
    return columns


def _columns(name: str, rows: list[tuple[Any, ...]]) -> dict[str, NDArray[Any]]:
    """Return the events of a type as columns; what is neither an int nor a float is one of objects."""
    kinds = {"time": float, **FIELDS[name]}
    found = {}
    for at, (column_of, kind) in enumerate(kinds.items()):
        dtype: Any = {int: np.int64, float: np.float64}.get(kind, object)
        column = np.empty(len(rows), dtype)
        for index, row in enumerate(rows):  # numpy would take a column of tuples for a matrix
            column[index] = row[at]
        found[column_of] = column
    return found


def _document(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; a user may have edited it, so that anything may be in it."""
    try:
        document = json.loads(read_small(path, links=True))
    except FileNotFoundError:
        return {}
    except OSError as error:
        return {"error": f"{path.name} cannot be read: {error.strerror}"}
    except (ValueError, RecursionError):
        return {"error": f"{path.name} is not JSON"}
    return document if isinstance(document, dict) else {"value": document}
