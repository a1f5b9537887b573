"""A run in a CSV file: a row for each window, validation and event, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from autoaccum.errors import ArgumentError
from autoaccum.events import Event, Finished, Notice, OutOfMemory, Resumed, Started, StepReport, Validated
from autoaccum.reporting.following import Follower, numbers_of, text_of, validation_of

COLUMNS = (
    "record", "step", "epoch", "num_samples", "loss", "lr", "grad_norm", "noise_scale", "effective_batch",
    "micro_batch", "accumulation_steps", "replays", "seconds", "samples_per_second", "peak_bytes", "limit_bytes",
    "text", "validation/loss",
)  # fmt: skip
"""Those that every file has; what stands beside the loss, and metrics, are further ones, as they come."""

Row = dict[str, Any]


class CSVReporter(Follower):
    """Callback that writes a run to a CSV file, a row for each record; ``record`` says of which class it is.

    A run that goes on goes on in the same file: rows of windows that are trained again are replaced. A file that
    another run has left is put away, as ``NAME.before-1.csv`` and so on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Write to that file, which need not be there, nor its folder.

        Raises:
            ArgumentError: it is there, and nothing that a ``CSVReporter`` has written.
        """
        super().__init__()
        self._path = Path(path).absolute()  # callbacks may change directory
        self._columns: list[str] = []
        # Notices are said once in a run; they have no step, and may be said again by a process that goes on.
        self._said: set[str] = set()
        self._file: TextIO | None = None  # open while a run is followed
        # Told now, and not when the run has begun.
        if self._path.is_file() and self._path.stat().st_size:
            with self._path.open(newline="", encoding="utf-8", errors="replace") as file:
                header = next(csv.reader(file), [])
            if tuple(header[: len(COLUMNS)]) != COLUMNS:
                accepted = "a new file, or one that a CSVReporter has written"
                raise ArgumentError("path", str(path), accepted, "Move it away, or choose another name.")

    def _begin(self, started: Started | None, resumed: Resumed | None) -> None:
        self._columns, self._said = list(COLUMNS), set()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_there = self._path.exists()
        if is_there and resumed is None:
            self._put_away()
        elif is_there and resumed is not None:
            self._columns = self._header()
            self._rewrite(lambda row: not _is_void(row, resumed.step))
            self._said = {row["text"] for row in self._rows() if row["record"] == Notice.__name__}
        self._open_file()

    def _window(self, report: StepReport) -> None:
        self._write({"record": "StepReport", "step": report.step, **numbers_of(report)})

    def _validation(self, validated: Validated) -> None:
        # Under the names that they have for a window, so that a column holds one kind of number.
        facts = {"epoch": validated.epoch, "micro_batch": validated.micro_batch, "seconds": validated.seconds}
        self._write({"record": "Validated", "step": validated.step, **facts, **validation_of(validated)})

    def _told(self, event: Event) -> None:
        row = {"record": type(event).__name__, "step": getattr(event, "step", None), "text": text_of(event)}
        if isinstance(event, Notice) and row["text"] in self._said:
            return
        # A training one is told by the re-plan that follows, which does not say how large it was.
        if isinstance(event, OutOfMemory):
            row["micro_batch"] = event.micro_batch
        self._write(row)

    def _end(self, reason: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, row: Row) -> None:
        """Append a row; a name that is new becomes a column."""
        # Rare, for names hardly ever come after the first window: so the whole file may be written anew.
        if new := [name for name in row if name not in self._columns]:
            self._end("")
            self._columns += new
            self._rewrite(lambda _: True)
            self._open_file()
        if self._file is not None:
            csv.DictWriter(self._file, self._columns, restval="").writerow(row)
            self._file.flush()  # what was written outlives the process

    def _open_file(self) -> None:
        """Open the file to append to it; give a new one its header."""
        self._file = self._path.open("a", newline="", encoding="utf-8")
        if not self._path.stat().st_size:
            csv.writer(self._file).writerow(self._columns)
            self._file.flush()

    def _header(self) -> list[str]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), list(COLUMNS))

    def _rows(self) -> Iterator[Row]:
        """Yield the rows of the file; a last one that a kill has torn off is none."""
        with self._path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader((text for text in file if text.endswith("\n")), restval="")

    def _rewrite(self, is_wanted: Any) -> None:
        """Write the file anew, with the columns of now and with the rows that are wanted."""
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(row for row in self._rows() if is_wanted(row))
        # At once the whole: a kill leaves the one file or the other.
        beside.replace(self._path)

    def _put_away(self) -> None:
        """Rename the file of another run."""
        for number in count(1):
            other = self._path.with_name(f"{self._path.stem}.before-{number}{self._path.suffix}")
            if not other.exists():
                self._path.rename(other)
                return


def _is_void(row: Row, step: int) -> bool:
    """Return whether a row is of what is trained again after that step, or of an end that was none."""
    return row["record"] == Finished.__name__ or (row["step"].isdecimal() and int(row["step"]) > step)
