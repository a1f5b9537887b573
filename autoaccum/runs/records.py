"""A run's records in a file, ``history.jsonl``: one JSON object a line, written as they come, read at any time.

``{"type": "StepReport", "time": 1700000000.25, "step": 1, ...}``: the record's class, unix seconds, its fields. JSON
has no NaN and no infinities: they are the texts ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, get_args, get_type_hints

from autoaccum._version import __version__
from autoaccum.events import Record
from autoaccum.memory import clock

HISTORY = "history.jsonl"
"""Name of the file in a run's directory."""

FIELDS: dict[str, dict[str, Any]] = {record.__name__: get_type_hints(record) for record in get_args(Record)}
"""Types of each record's fields, by the names of its class and of the field."""

# Looked up once: a record is written in every window, and dataclasses.asdict would copy all that is in it.
_VALUES: dict[str, Callable[[Any], tuple[Any, ...]]] = {name: attrgetter(*fields) for name, fields in FIELDS.items()}
_CLASSES: dict[str, type[Any]] = {record.__name__: record for record in get_args(Record)}


def _listed(value: Any) -> Any:
    """Return a tensor as lists of numbers.

    Raises:
        TypeError: it is none, and JSON has no such value.
    """
    if not hasattr(value, "tolist"):
        raise TypeError(f"{value!r} is nothing that JSON has")
    return value.tolist()


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_listed).encode


class RecordWriter:
    """A callback that appends each record to a file, so that whoever reads it sees it at once.

    Each line is one write to the operating system: it outlives the process, not the machine's power.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file, which need not be there, nor its folder.

        Raises:
            OSError: it cannot be written to.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(self._file).st_size
            # A run was killed while it wrote: its last line stays as it is, and what comes begins with one of its own.
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")
        except BaseException:
            self.close()
            raise

    def __call__(self, record: Record) -> None:
        """Take one record."""
        if self._file is None:
            raise ValueError("this RecordWriter is closed")
        line = memoryview(line_of(record, clock.stamp()))
        while line:  # all at once, but for a disk that is all but full
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def line_of(record: Record, seconds: float) -> bytes:
    """Return one line of the file, its end included; ``seconds`` are unix time."""
    name = type(record).__name__
    document: dict[str, Any] = {"type": name, "time": seconds}
    document.update(zip(FIELDS[name], _VALUES[name](record), strict=True))
    if name == "StepReport":
        # In every window, and most runs have none.
        outputs = document.pop("outputs")
        if outputs:
            document["outputs"] = outputs
            tensors = {key: value for key, value in outputs.items() if hasattr(value, "tolist")}
            # As JSON they are lists, which do not tell.
            dtypes = {key: str(value.dtype).removeprefix("torch.") for key, value in tensors.items()}
            document |= {"dtypes": dtypes} if dtypes else {}
    return f"{encode(document)}\n".encode()


def encode(document: Any) -> str:
    """Return a document as JSON, in which numbers that are not finite are texts."""
    try:
        return _encode(document)
    except ValueError:  # rare, and a look at every value takes longer than all else
        return _encode(_finite(document))


def _finite(value: Any) -> Any:
    """Return the value with a text in place of each number that JSON has not: ``"nan"``, ``"inf"``, ``"-inf"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if hasattr(value, "tolist"):
        return _finite(value.tolist())
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


class Records(Iterator[Record]):
    """The records of a file, read as they are asked for, and how many of its lines were none."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.time: float | None = None
        """Unix seconds of the last record so far; None before the first."""
        self.garbled = 0
        """Number of lines so far that hold no record, such as the last one of a run that was killed while it wrote."""
        self.unknown = 0
        """Number of lines so far with a record that a newer version of autoaccum wrote."""

    def __next__(self) -> Record:
        # A for loop over the rest: it ends at the first line that holds a record.
        for line in self._lines:
            try:
                document = json.loads(line)
                if document["type"] in FIELDS:
                    record, self.time = record_of(document), float(document["time"])
                    return record
                self.unknown += 1
            except (ValueError, LookupError, TypeError, RecursionError):
                self.garbled += 1
        raise StopIteration


def read_records(path: str | os.PathLike[str], *, void: bool = True) -> Records:
    """Return the records of a file, oldest first.

    Lines without a record are left out and counted, and so are fields that this version does not know.

    Args:
        path: of the file.
        void: whether to return records of windows too that were trained again, after the run was resumed from an older
            checkpoint or begun again without one.

    Raises:
        OSError: the file cannot be read.
    """

    def lines() -> Iterator[bytes]:
        with file:
            yield from file if void else _standing(file)

    # Opened now and not with the first line, so that what is wrong with it is said here.
    file = open(path, "rb")  # noqa: SIM115
    return Records(lines())


_HEAD = re.compile(rb'\{"type":"(\w+)","time":[^,]*(?:,"step":(\d+))?')
"""How each line begins; nearly all records have a step, as their first field."""


def _standing(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file of records that no later start of the run has made void."""
    heads = map(_HEAD.match, file)
    starts: list[tuple[int, int]] = []  # (number of a line, step from which the run goes on there)
    begins = False
    for number, head in enumerate(heads):
        kind, step = head.groups() if head else (b"", None)
        # A process that goes on says Started and then Resumed. One that says only Started has found no checkpoint.
        if kind == b"Resumed" or begins:
            starts.append((number, int(step or 0) if kind == b"Resumed" else 0))
        begins = kind == b"Started"
    file.seek(0)
    for number, line in enumerate(file):
        while starts and starts[0][0] <= number:
            starts.pop(0)
        head = _HEAD.match(line)
        step = int(head[2] or 0) if head and head[1] != b"Resumed" else 0
        if not starts or step <= min(step for _, step in starts):
            yield line


def record_of(document: Mapping[str, Any]) -> Record:
    """Return the record that a line's object stands for; its type is a known one.

    Raises:
        TypeError: it lacks a field.
        ValueError: a number is none.
    """
    # Fields that a newer version has added are left out; one that it lacks is a TypeError, or takes its default.
    kind, values = document["type"], dict(document)
    if "outputs" in values:
        dtypes = values.get("dtypes", {})
        values["outputs"] = {name: _output(value, dtypes.get(name)) for name, value in values["outputs"].items()}
    known = {name: field_of(values[name], of) for name, of in FIELDS[kind].items() if name in values}
    record: Record = _CLASSES[kind](**known)
    return record


def field_of(value: Any, kind: Any) -> Any:
    """Return a field's value as it was before it was JSON.

    >>> field_of("nan", float | None), field_of([3, 3, 2], tuple[int, ...]), field_of({"a": "inf"}, Mapping[str, float])
    (nan, (3, 3, 2), {'a': inf})
    """
    if isinstance(value, list):
        return tuple(field_of(entry, kind) for entry in value)
    if isinstance(value, dict):
        return {name: field_of(entry, kind) for name, entry in value.items()}
    return float(value) if isinstance(value, str) and kind not in _TEXTS else value


_TEXTS = (str, str | None, tuple[str, ...])


def _output(value: Any, dtype: str | None) -> Any:
    """Return an output as it was before it was JSON: a number, or a tensor."""
    if not isinstance(value, list):
        return float(value)
    import torch  # here, so that to read what holds none takes no torch

    return torch.tensor(_numbers(value), dtype=getattr(torch, str(dtype)), device="cpu")


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(value) if isinstance(value, str) else value


def write_json(path: str | os.PathLike[str], document: Any) -> None:
    """Write a JSON file so that whoever reads it finds it whole: the old one, or the new one.

    Raises:
        OSError: it cannot be written.
        TypeError: the document holds something that JSON has not.
    """
    text = json.dumps(_finite(document), indent=2, allow_nan=False)
    # By its number no other process writes to the same file; a rename within a folder is one step.
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    beside.parent.mkdir(parents=True, exist_ok=True)
    # What is there already is a leftover of a process of the same number, or a stranger's link to a file of ours.
    beside.unlink(missing_ok=True)
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())  # else the name may come to stand for an empty file when the power fails
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def environment() -> dict[str, Any]:
    """Return what a run runs on and by what it was started: versions, device, command line and commit.

    Nothing names the machine or its user but what was typed.
    """
    # Here, so that to read records takes no torch.
    import numpy
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        device = f"cpu {platform.machine()}"
    elif accelerator.type == "mps":
        device = f"mps {platform.machine()}"
    else:
        device = f"{accelerator.type} {torch.get_device_module(accelerator).get_device_properties(accelerator).name}"
    return {
        "autoaccum": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "os": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": device,
        "cuda": torch.version.cuda,
        "command": command_line(),
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(clock.stamp())),
    }


_PATIENCE = 5.0
"""Wait so many seconds for git, which reads every file of a working tree: a run does not wait longer to begin."""


def command_line() -> str | None:
    """Return what was typed to start this process, as a shell takes it; None in a session that nothing was typed for.

    Folders of the interpreter and of a console script are left out, and passwords in URLs.
    """
    words = list(sys.orig_argv)
    # An interpreter that runs a notebook, or reads from a prompt, was started long before anybody thought of the run.
    # A process of multiprocessing is started by another one, and not by anybody.
    if "--multiprocessing-fork" in words:
        return None
    if len(words) < 2 or not sys.argv[:1] or sys.argv[0] in ("", "-") or "ipykernel" in sys.argv[0]:
        return None
    if (
        Path(sys.argv[0]).parent == Path(sys.executable).parent
    ):  # a script that pip has installed beside the interpreter
        words = [sys.argv[0], *sys.argv[1:]]
    words[0] = Path(words[0]).name
    # A storage is named with the password to it, and this is read by whoever is shown the report.
    return re.sub(r"://[^/@\s]*@", "://...@", shlex.join(words))


def commit() -> str | None:
    """Return the commit of the working tree that the process is in, with ``-dirty`` where files differ from it.

    None where it is in none, or git cannot tell.
    """
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            # Nothing is asked of a terminal, and nothing is written to the working tree.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return said.stdout.strip() or None
