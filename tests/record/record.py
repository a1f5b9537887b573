"""Turns what the configurations yield into plain JSON, writes it, and compares it with what was written before.

::

    python tests/record/record.py --write [NAMES]        writes data/NAME.json with the version that is imported
    python tests/record/record.py --compare [NAMES]      compares with what is there

Floats are written as ``float.hex`` has them, so that not one bit can change unseen, and tensors as the beginning of the
SHA-256 of their bytes. What is worded for people stands apart, under ``messages``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import html
import json
import math
import os
import platform
import random
import re
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # as a script it has the tests to find by itself
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import tests.machine  # noqa: F401  # isort: skip
import numpy as np
import torch
from torch.nn import functional

import autoaccum
from autoaccum.runs.checkpoint import Checkpoint
from tests.machine import nothing_measured
from tests.record import configurations
from tests.record.clock import Clock, given_clock, import_all
from tests.record.configurations import Command, Directory, Drawn, Lines, Ran, Stepped

HERE = Path(__file__).parent
DATA = HERE / "data"
DIGEST = "#"
"""Begins what stands for bytes, and means nothing on another machine."""
PROCESSOR = f"cpu {platform.machine()}"
"""Is what a report calls this machine."""
ABOUT = 512
"""Is by how many bytes peaks may differ where the text of a checkpoint is part of them."""
RELATIVE, ABSOLUTE = 2e-3, 1e-5
"""Are how far floats may be off on another machine."""
NORMS = 2e-2, 1e-3
"""Are how far norms of tensors may be: Adam makes steps of its usual size of gradients that are rounding alone."""

REPORT = (
    "step",
    "epoch",
    "num_samples",
    "effective_batch",
    "micro_batches",
    "loss",
    "lr",
    "grad_norm",
    "seconds",
    "peak_bytes",
    "limit_bytes",
    "replays",
    "noise_scale",
    "gradient_squared",
    "gradient_variance",
)
"""Are the fields of a ``StepReport``; later ones are not looked at."""
WORDED = {"reason", "cause", "consequence", "cure", "text", "question", "advice", "announced", "announced of windows"}
"""Are the names of what is worded for people; of ``Finished`` the reason is one of a few words that mean something."""
NOT_SAID = {
    "time",
    "started",
    "saved",
    "checksum",
    "path",
    "directory",
    "autoaccum directory",
    "os",
    "python",
    "torch",
    "numpy",
    "cpu_count",
}
NOT_SAID |= {"run_dir", "bytes"}
"""Are the names of what differs from one machine, or one moment, to another."""

Messages = list[Any]


# What plain values are made of.


def plain(value: Any) -> Any:
    """Return it as JSON, every bit of it."""
    if isinstance(value, bool | None | str | int):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Tensor):
        return tensor_of(value)
    if isinstance(value, np.ndarray):
        return tensor_of(torch.from_numpy(value))
    if isinstance(value, bytes):
        return digest(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list | deque):
        return [plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} has no plain form")


def tensor_of(tensor: torch.Tensor) -> list[Any]:
    """Return type, shape, digest and norm: the last for machines that have other bits."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().contiguous()
    norm = tensor.double().norm().item() if tensor.is_floating_point() else None
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), digest(raw), *([] if norm is None else [norm.hex()])]


def digest(raw: bytes) -> str:
    """Return what tells bytes from others."""
    return DIGEST + hashlib.sha256(raw).hexdigest()[:16]


def digest_of(document: Any) -> str:
    """Return what tells a document from others."""
    return digest(json.dumps(document, sort_keys=True).encode())


def split(value: Any, messages: Messages) -> Any:
    """Take what is worded out of a document, and what depends on the moment or the machine."""
    if isinstance(value, list):
        return [split(entry, messages) for entry in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, entry in value.items():
        if name in WORDED and value.get("type") != "Finished":
            if entry not in (None, "", []):
                messages.append({name: entry})
        elif name not in NOT_SAID:
            found[name] = split(entry, messages)
    return found


# What the outcomes of configurations are made of.


def plain_record(record: Any, messages: Messages) -> list[Any]:
    """Return a report or event as its class and fields; its words go to the messages."""
    name = type(record).__name__
    if name == "StepReport":
        return [plain(getattr(record, field)) for field in REPORT]
    fields = plain({field.name: getattr(record, field.name) for field in dataclasses.fields(record)})
    words: Messages = []
    kept = split({"type": name, **fields}, words)
    kept.pop("type")
    if words:
        messages.append([name, *words])
    return [name, kept]


def plain_records(records: Iterable[Any], messages: Messages) -> list[Any]:
    """Return reports and events in their order."""
    return [plain_record(record, messages) for record in records]


def plain_modules(result: Any) -> dict[str, Any]:
    """Return all parameters and buffers, and the optimizer's state."""
    model, optimizer = result.model, result.optimizer
    tensors = {**dict(model.named_buffers()), **model.state_dict()}
    state = optimizer.state_dict()
    return {
        "model": {name: plain(tensors[name]) for name in sorted(tensors)},
        "gradients": digest_of([[n, None if p.grad is None else plain(p.grad)] for n, p in model.named_parameters()]),
        "optimizer": {str(key): plain(dict(sorted(state["state"][key].items()))) for key in sorted(state["state"])},
        "groups": [
            {name: plain(entry) for name, entry in sorted(group.items()) if isinstance(entry, float | int | tuple)}
            for group in state["param_groups"]
        ],
        "randomness": [
            digest(torch.get_rng_state().numpy().tobytes()),
            digest(repr(random.getstate()).encode()),
            digest(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr]
        ],
    }


def plain_ran(ran: Ran, messages: Messages) -> dict[str, Any]:
    """Return what a run was, window by window, and what it has left."""
    found: dict[str, Any] = {"heard": plain_records(ran.records, messages)}
    if ran.error is not None:
        found["error"] = plain_error(ran.error, messages)
    result = ran.result
    if result is not None:
        reports, events = plain_records(result.history, []), plain_records(result.events, [])
        if reports != [r for r in found["heard"] if not isinstance(r[0], str)]:
            found["history"] = reports
        if events != [r for r in found["heard"] if isinstance(r[0], str)]:
            found["events"] = events
        found["plan"] = plain(result.plan)
        found["num_steps"], found["num_samples"] = result.num_steps, result.num_samples
        found |= plain_modules(result)
    for record in (*found["heard"], *found.get("history", ())):
        if ran.peaks != "exact" and not isinstance(record[0], str):
            peak = record[REPORT.index("peak_bytes")]
            record[REPORT.index("peak_bytes")] = f"~{peak}" if ran.peaks == "about" else None
    return found


def plain_error(error: BaseException, messages: Messages) -> list[str]:
    """Return the classes of an error by which it can be caught; what it says is a message."""
    classes = [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException, Exception)]
    messages.append([type(error).__name__, str(error)])
    return classes


def plain_study(study: Any, messages: Messages) -> dict[str, Any]:
    """Return the trials of a study, and what it was begun with."""
    return {
        "settings": split(plain(study.user_attrs), messages),
        "directions": [direction.name for direction in study.directions],
        "trials": [
            split(
                {
                    "number": trial.number,
                    "state": trial.state.name,
                    "values": plain(trial.values),
                    "params": plain(trial.params),
                    "attributes": plain(trial.user_attrs),
                    "reported": plain(trial.intermediate_values),
                    "distributions": {name: str(entry) for name, entry in sorted(trial.distributions.items())},
                },
                messages,
            )
            for trial in study.trials
        ],
    }


def plain_directory(path: Path, messages: Messages) -> dict[str, Any]:
    """Return what a run has left on the disk, and the report of it."""
    found: dict[str, Any] = {"files": sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))}
    if (path / "config.json").exists():
        found["config"] = split(json.loads((path / "config.json").read_text()), messages)
    if (path / "history.jsonl").exists():
        lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
        found["lines"] = [line["type"] for line in lines if line["type"] != "StepReport"]
        found["reports"] = digest_of([split(_without_peaks(line), []) for line in lines])
    found["checkpoints"] = [plain_checkpoint(p, messages) for p in sorted(path.glob("checkpoints/step-*"))]
    return found


def plain_checkpoint(path: Path, messages: Messages) -> dict[str, Any]:
    """Return what a checkpoint holds: its tensors, and of the rest everything that is no tensor."""
    manifest = json.loads((path / "manifest.json").read_text())
    found: dict[str, Any] = {"name": path.name, "format": manifest["format"], "files": sorted(manifest["files"])}
    found |= {name: plain(manifest[name]) for name in ("step", "serial", "is_best", "facts")}
    weights, state = Checkpoint.at(path).load()
    found["weights"] = {name: plain(weights[name]) for name in sorted(weights)}
    found["state"] = split(_pruned(plain(state)), messages)
    return found


def _pruned(tree: Any) -> Any:
    """Return a tree in which what is long and seldom looked at is a digest."""
    if isinstance(tree, dict):
        return {
            name: [len(entry), digest_of(_without_peaks(entry))]
            if name in ("reports", "randomness", "trained", "weights")
            else _pruned(entry)
            for name, entry in tree.items()
        }
    return [_pruned(entry) for entry in tree] if isinstance(tree, list) else tree


def _without_peaks(value: Any) -> Any:
    """Return a document without the peaks of runs that write checkpoints: the text of these takes memory too."""
    if isinstance(value, dict):
        return {name: _without_peaks(entry) for name, entry in value.items() if name != "peak_bytes"}
    return [_without_peaks(entry) for entry in value] if isinstance(value, list) else value


def plain_command(command: Command, messages: Messages) -> dict[str, Any]:
    """Return what a command has printed: a document, or else its words."""
    found: dict[str, Any] = {"code": command.code}
    try:
        document = json.loads(command.out)
        # Where a run is kept is this machine's matter: tests/cli/test_keeping.py sees to it.
        for name in ("run_dir", "resume_command", "report_command") if "history" in document else ():
            document.pop(name, None)
        found["document"] = split(plain(document), messages)
    except ValueError:
        messages.append({"out": command.out.splitlines()})
    messages.append({"err": [line for line in command.err.splitlines() if not line.startswith("  File ")]})
    if command.page is not None:
        text = command.page.read_text(encoding="utf-8").replace(PROCESSOR, "cpu MACHINE")
        text = re.sub(r"\d+ [A-Z][a-z]+ \d{4}, \d\d:\d\d UTC", "DATE", text)
        pictures = text.count("<img")
        text = re.sub(r"<img[^>]*>", "", text)
        body = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
        body = re.sub(r"<details><summary>Environment.*?</details>", "", body, flags=re.DOTALL)
        body = re.sub(r"<footer>.*?</footer>", "", body, flags=re.DOTALL)
        found["pictures"] = pictures
        messages.append({"page": [digest(body.encode()), *visible(body)]})
    return found


def visible(page: str) -> list[str]:
    """Return the text of a page, line by line."""
    page = re.sub(r"</(td|th|dt|summary|h1)>", " | ", page)
    return [line.strip() for line in html.unescape(re.sub(r"<[^>]*>", "", page)).splitlines() if line.strip()]


def plain_stepped(stepped: Stepped, messages: Messages) -> dict[str, Any]:
    """Return what an accumulator has done, batch by batch."""
    found = {"steps": plain(stepped.steps), "events": plain_records(stepped.events, messages)}
    if stepped.error is not None:
        found["error"] = plain_error(stepped.error, messages)
    return {**found, **plain_modules(stepped)}


def outcome_of(value: Any, messages: Messages) -> Any:
    """Return what a configuration has yielded as JSON; its words go to the messages."""
    if isinstance(value, Ran):
        return plain_ran(value, messages)
    if isinstance(value, Stepped):
        return plain_stepped(value, messages)
    if isinstance(value, Directory):
        return plain_directory(value.path, messages)
    if isinstance(value, Command):
        return plain_command(value, messages)
    if isinstance(value, Drawn):
        return plain_study(value.study, messages)
    if isinstance(value, BaseException):
        return plain_error(value, messages)
    if isinstance(value, Lines):
        messages.append(list(value.lines))
        return len(value.lines)
    return split(plain(value), messages)


# Running.


Configuration = Callable[[Path], Iterator[tuple[str, Any]]]


@contextmanager
def surroundings(place: Path) -> Iterator[list[warnings.WarningMessage]]:
    """Make everything that a run may depend on the same: clock, directory, cache, threads, random states, garbage.

    Garbage is collected between outcomes and not inside of them, as it may hold tensors, and when it is collected by
    itself depends on everything that was ever made.
    """
    before = os.getcwd(), os.environ.get("AUTOACCUM_CACHE_DIR"), torch.get_num_threads(), gc.isenabled()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    place.mkdir(parents=True, exist_ok=True)
    os.chdir(place)
    os.environ["AUTOACCUM_CACHE_DIR"] = str(place / "cache")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    import_all()
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again and again
    gc.disable()
    # A run notes how its process was started, which is one way or another way to run these.
    command = mock.patch("autoaccum.runs.records.command_line", return_value="python train.py")
    try:
        with command, given_clock(Clock()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for category in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning, ImportWarning):
                warnings.simplefilter("ignore", category)
            yield caught
    finally:
        gc.unfreeze()
        if before[3]:
            gc.enable()
        os.chdir(before[0])
        if before[1] is None:
            del os.environ["AUTOACCUM_CACHE_DIR"]
        else:
            os.environ["AUTOACCUM_CACHE_DIR"] = before[1]
        torch.set_num_threads(before[2])
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def run(configuration: Configuration, place: Path) -> dict[str, Any]:
    """Run it in a directory of its own, and return its outcomes and messages by their names."""
    place = place.resolve()
    outcomes: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    with surroundings(place) as caught:
        for name, value in configuration(place):
            assert name not in outcomes, name
            said: Messages = []
            outcomes[name] = outcome_of(value, said)
            del value
            for warning in caught:
                file = Path(warning.filename).name
                said.append({"warning": [warning.category.__name__, str(warning.message), file]})
            caught.clear()
            messages[name] = [_worded(entry, place) for entry in said]
            gc.collect()
            gc.freeze()
    found = {"outcomes": outcomes, "messages": messages}
    loaded: dict[str, Any] = json.loads(json.dumps(found).replace(PROCESSOR, "cpu MACHINE"))
    return loaded


_MOMENTS = (
    (re.compile(r"last record .*? ago"), "last record AGO"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[Z0-9:+.]*( UTC)?"), "DATE"),
    (re.compile(r"process \d+"), "process PID"),
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
)


def _worded(message: Any, place: Path) -> Any:
    """Return a message without paths and moments."""
    if isinstance(message, dict):
        return {name: _worded(entry, place) for name, entry in message.items()}
    if isinstance(message, list):
        return [_worded(entry, place) for entry in message]
    if not isinstance(message, str):
        return message
    for path, name in ((place, "PLACE"), (HERE, "RECORD"), (HERE.parent.parent, "ROOT")):
        message = message.replace(str(path), name)
    for pattern, name in _MOMENTS:
        message = pattern.sub(name, message)
    return message


# Comparing.


def environment() -> dict[str, Any]:
    """Return what decides the bits of numbers: versions, what the processor can do, and a sample of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 3, 9, 9, generator=generator).requires_grad_()
    weights = torch.randn(5, 3, 3, 3, generator=generator).requires_grad_()
    outputs = functional.conv2d(inputs, weights).tanh().flatten(1)
    matrix = torch.randn(outputs.shape[1], 37, generator=generator).requires_grad_()
    hidden = functional.gelu(outputs @ matrix).unsqueeze(0)
    attended = functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
    loss = functional.cross_entropy(attended[0], torch.arange(24) % 37)
    loss.backward()
    half = (matrix.detach().bfloat16().T @ matrix.detach().bfloat16()).float()
    numbers = [loss, half, torch.exp(half / 100).log1p().sqrt(), *(t.grad for t in (inputs, weights, matrix))]
    torch.set_num_threads(threads)
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numbers": [tensor_of(tensor)[2] for tensor in numbers if tensor is not None],
    }


def is_same_machine() -> bool:
    """Return whether the numbers of this machine are those of the one that has written the data, bit for bit."""
    written, now = json.loads((DATA / "environment.json").read_text()), environment()
    return all(written[name] == now[name] for name in ("torch", "capability", "machine", "numbers"))


def is_same_torch() -> bool:
    """Return whether the data were written by this version of torch."""
    version: str = json.loads((DATA / "environment.json").read_text())["torch"]
    return version == torch.__version__


def check(expected: Any, found: Any, name: str) -> None:
    """Fail with the first differences, if there are any.

    Raises:
        AssertionError: there are some.
    """
    exactly = is_same_machine()
    different = list(differences(expected, found, exactly=exactly))
    if different:
        listed = "\n".join(different[:8])
        much = "bit for bit" if exactly else "to rounding, as this machine has other numbers"
        raise AssertionError(f"{name} differs in {len(different)} places ({much}):\n{listed}")


_HEX = re.compile(r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+|-?inf|nan")
_DIGITS = re.compile(r"\b[0-9a-f]{12,}\b")
_NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


def differences(expected: Any, found: Any, *, exactly: bool, path: str = "") -> Iterator[str]:
    """Yield what differs between two documents, in words; in numbers by more than rounding where not ``exactly``."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in dict.fromkeys([*expected, *found]):
            where = f"{path}/{name}"
            if name not in found:
                yield f"{where}: {_shown(expected[name])} is not there any more"
            elif name not in expected:
                yield f"{where}: {_shown(found[name])} was not there"
            else:
                yield from differences(expected[name], found[name], exactly=exactly, path=where)
    elif isinstance(expected, list) and isinstance(found, list):
        if not exactly and _is_tensor(expected) and _is_tensor(found) and expected[:2] == found[:2]:
            before, now = (float.fromhex(entry[3]) for entry in (expected, found))
            if not (math.isclose(before, now, rel_tol=NORMS[0], abs_tol=NORMS[1]) or before != before):
                yield f"{path}: the norm {before!r} became {now!r}"
            return
        names = _names(expected, path)
        for number, (before, now) in enumerate(zip(expected, found, strict=False)):
            yield from differences(before, now, exactly=exactly, path=f"{path}/{names(number)}")
        if len(expected) != len(found):
            at = min(len(expected), len(found))
            more = expected if len(expected) > len(found) else found
            yield f"{path}: {len(expected)} entries became {len(found)}; the first that is alone: {_shown(more[at])}"
    elif expected != found and not (_is_about(expected, found) or (not exactly and _is_near(expected, found, path))):
        yield f"{path}: {_shown(expected)} became {_shown(found)}"


def _names(entries: list[Any], path: str) -> Callable[[int], str]:
    """Return how to name the entries of a list: those of a report by its fields."""
    if path.split("/")[-2:-1] in (["heard"], ["history"]) and len(entries) == len(REPORT):
        return lambda number: REPORT[number]
    return str


def _is_tensor(entry: list[Any]) -> bool:
    return len(entry) == 4 and isinstance(entry[2], str) and entry[2].startswith(DIGEST)


def _is_about(expected: Any, found: Any) -> bool:
    """Tell peaks that a text may have moved."""
    peaks = [re.fullmatch(r"~(\d+)", entry) if isinstance(entry, str) else None for entry in (expected, found)]
    before, now = (None if peak is None else int(peak[1]) for peak in peaks)
    return before is not None and now is not None and abs(before - now) <= ABOUT


def _is_near(expected: Any, found: Any, path: str) -> bool:
    if isinstance(expected, int) and isinstance(found, int):
        return path.endswith("peak_bytes") and abs(expected - found) <= ABOUT
    if not (isinstance(expected, str) and isinstance(found, str)):
        return False
    if _HEX.fullmatch(expected) and _HEX.fullmatch(found):
        before, now = float.fromhex(expected), float.fromhex(found)
        same = before == now or (math.isnan(before) and math.isnan(now))
        return same or math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return _rough(expected) == _rough(found)


def _rough(text: str) -> str:
    """Return a text without its numbers and digests."""
    return _NUMBER.sub("N", _DIGITS.sub("D", text))


def _shown(value: Any) -> str:
    if isinstance(value, str) and _HEX.fullmatch(value):
        return f"{float.fromhex(value)!r} ({value})"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 300 else f"{text[:300]}..."


# Files.


def dumps(document: Any, depth: int = 4, indent: str = "") -> str:
    """Return it as JSON with a line for each entry of the outer levels, so that changes can be seen in a diff."""
    more = f"{indent} "
    if depth and isinstance(document, dict) and document:
        lines = (f"{json.dumps(name)}: {dumps(entry, depth - 1, more)}" for name, entry in document.items())
        return "{\n" + ",\n".join(more + line for line in lines) + f"\n{indent}}}"
    if depth and isinstance(document, list) and document and any(isinstance(entry, list | dict) for entry in document):
        return "[\n" + ",\n".join(more + dumps(entry, depth - 1, more) for entry in document) + f"\n{indent}]"
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def read(path: Path) -> Any:
    """Return a document."""
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, document: Any) -> None:
    """Write a document."""
    path.write_text(dumps(document) + "\n", encoding="utf-8")


def main() -> int:
    """Write or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--compare", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    print(f"autoaccum of {autoaccum.__file__}")
    with nothing_measured():  # as in the tests that compare with it
        return _written_or_compared(options)


def _written_or_compared(options: argparse.Namespace) -> int:
    if options.write:
        write(DATA / "environment.json", environment())
    code, exactly = 0, is_same_machine()
    for name in options.names or configurations.ALL:
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            found = run(configurations.ALL[name], Path(folder) / "place")
            seconds = time.process_time() - began
        if options.write:
            write(DATA / f"{name}.json", found)
            print(f"{name}: {seconds:.1f} s, {(DATA / f'{name}.json').stat().st_size} bytes", flush=True)
            continue
        different = list(differences(read(DATA / f"{name}.json"), found, exactly=exactly))
        print(f"{name}: {f'{len(different)} differences' if different else 'the same'} in {seconds:.1f} s", flush=True)
        for line in different[:10]:
            print(f"    {line}")
        code = code or int(bool(different))
    return code


if __name__ == "__main__":
    sys.exit(main())
