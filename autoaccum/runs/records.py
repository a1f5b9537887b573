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
from typing import Any, get_args, get_origin, get_type_hints

from autoaccum._version import __version__
from autoaccum.events import Record
from autoaccum.memory import clock
from autoaccum.runs.files import open_regular

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
        self._file: int | None = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
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
        self.garbled = 0
        """Number of lines so far that hold no record, such as the last one of a run that was killed while it wrote."""
        self.unknown = 0
        """Number of lines so far with a record that a newer version of autoaccum wrote."""

    def __next__(self) -> Record:
        # A for loop over the rest: it ends at the first line that holds a record.
        for line in self._lines:
            (document,) = documents([line])
            if document is None:
                self.garbled += 1
            elif document["type"] not in FIELDS:
                self.unknown += 1
            else:
                try:
                    return record_of(document)
                except (TypeError, ValueError, OverflowError):
                    self.garbled += 1
        raise StopIteration


def read_records(path: str | os.PathLike[str]) -> Records:
    """Return the records of a file, oldest first, as they were written: also those that a ``Resumed`` made void.

    Lines without a record are left out and counted, and so are fields that this version does not know.

    Raises:
        OSError: the file cannot be read, or is no file.
    """

    def lines() -> Iterator[bytes]:
        with file:
            yield from file

    # Opened now and not with the first line, so that what is wrong with it is said here.
    file = open(open_regular(path, os.O_RDONLY, links=True), "rb")  # noqa: SIM115
    return Records(lines())


def documents(lines: list[bytes]) -> list[dict[str, Any] | None]:
    """Return the JSON object of each line, if it has a ``type``; None where there is none."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # a third of the time that one by one takes
        is_whole = len(found) == len(lines)  # else a line such as "1,2" would stand for two
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        if len(lines) == 1:
            return [None]
        return [document for line in lines for document in documents([line])]
    return [entry if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None for entry in found]


def record_of(document: Mapping[str, Any]) -> Record:
    """Return the record that a line's object stands for; its type is a known one.

    Raises:
        TypeError: it lacks a field.
        ValueError: a field's value is of another type, as far as that is looked at.
        OverflowError: a number is larger than a float can be.
    """
    # Fields that a newer version has added are left out; one that it lacks is a TypeError, or takes its default.
    known = FIELDS[document["type"]]
    values = {name: value_of(document[name], kind) for name, kind in known.items() if name in document}
    if values.get("outputs"):
        values["outputs"] = _with_tensors(values["outputs"], document.get("dtypes", {}))
    record: Record = _CLASSES[document["type"]](**values)
    return record


def value_of(value: Any, kind: Any) -> Any:
    """Return a field's value as it was before it was JSON.

    >>> value_of("nan", float | None), value_of([3, 3, 2], tuple[int, ...]), value_of(None, int | None)
    (nan, (3, 3, 2), None)
    >>> value_of({"accuracy": 1}, Mapping[str, float]), value_of({"losses": [["inf"], [2]]}, Mapping[str, Any])
    ({'accuracy': 1.0}, {'losses': [[inf], [2]]})
    """
    if get_origin(kind) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not a value of {kind}")
        read = _numbers if get_args(kind)[1] is Any else float
        try:
            return {name: read(entry) for name, entry in value.items()}
        except RecursionError:
            raise ValueError("lists in lists without end are not a value of a tensor") from None
    if get_origin(kind) is tuple and get_args(kind)[0] is not int:
        if not isinstance(value, list):
            raise ValueError(f"{value!r} is not a value of {kind}")
        return tuple(value_of(entry, get_args(kind)[0]) for entry in value)
    members = get_args(kind) if type(None) in get_args(kind) else (kind,)
    if value is None and type(None) in members:
        return None
    if float in members:
        return float(value)
    accepted = list if get_origin(kind) is tuple else members[0]
    # bool is a subclass of int, and no record has a field of truth values.
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a value of {kind}")
    if isinstance(value, list) and not all(type(entry) is int for entry in value):
        raise ValueError(f"{value!r} is not a value of {kind}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{value} is more than a column can hold")
    return tuple(value) if accepted is list else value


def _numbers(value: Any) -> Any:
    """Return an output as it was before it was JSON: a number, or lists of numbers in place of a tensor."""
    return [_entry(entry) for entry in value] if isinstance(value, list) else float(value)


def _entry(value: Any) -> Any:
    """Return an entry of a list: one of lists, or a number; whole numbers and truth values stay what they are."""
    return value if isinstance(value, int) else _numbers(value)


def _with_tensors(outputs: Mapping[str, Any], dtypes: Any) -> dict[str, Any]:
    """Return outputs with tensors in place of lists, of the dtypes that they had.

    Raises:
        ValueError: they are no such tensors.
    """
    if not isinstance(dtypes, dict):
        raise ValueError(f"{dtypes!r} are no dtypes")
    found = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            # Here, so that to read what holds none takes no torch.
            import torch

            dtype = getattr(torch, str(dtypes.get(name)), None)
            try:
                value = torch.tensor(value, dtype=dtype, device="cpu")
            except (RuntimeError, TypeError) as error:  # rows of different lengths, or no dtype of numbers
                raise ValueError(str(error)) from None
        found[name] = value
    return found


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
