"""Calls every public function with arguments that nobody would mean, and some that somebody might.

Each call ends in a typed error before training, with nothing changed, or it works. Arguments are taken from signatures,
values from a pool; one or two of a call that works are replaced. Calls are made in a child process, which is ended where
one of them takes too long or takes the process with it, and begun again behind it. A ``PYTHONPATH`` says which package.

    python benchmarks/fuzz_arguments.py [--calls 5000] [--seed 0]
"""

# ruff: noqa: E501 (a pool of values is a table)
from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import io
import json
import math
import os
import random
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from results import write_table
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import autoaccum
from autoaccum import schedules, testing
from autoaccum.errors import AutoaccumError
from autoaccum.events import StepReport

DEADLINE = 60.0
"""Seconds that a call may take: on a busy machine the slowest take five."""
MEMORY = 6 * 2**30
"""Bytes that the child may take: what would take all of the machine's ends in an error."""


# What is passed.


class OwnError(Exception):
    """Raised by what was passed: it may come through as it is."""


def _raise(*_: Any, **__: Any) -> Any:
    raise OwnError("raised by what was passed")


def _evil(*names: str) -> type:
    return type("Evil" + "".join(names).title().replace("_", ""), (), dict.fromkeys(names, _raise))


class Samples(Dataset[Any]):
    def __init__(self, size: Any = 12, sample: Any = None) -> None:
        self.size, self.sample = size, sample

    def __len__(self) -> int:
        return self.size  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> Any:
        return (torch.ones(3), torch.ones(1)) if self.sample is None else self.sample


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            yield torch.ones(3), torch.ones(1)


class Cyclic(dict[Any, Any]):
    def __init__(self) -> None:
        self["self"] = self


def _cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _pairs(rows: int = 12, **options: Any) -> Any:
    return torch.ones(rows, 3, **options), torch.ones(rows, 1, **options)


POOL: list[tuple[str, Callable[[], Any]]] = [
    *((repr(value), functools.partial(copy.copy, value)) for value in (
        None, True, False, 0, 1, 2, 3, 7, -1, 2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**400, 0.0, 0.5, 1.0, 1.5, -0.5,
        1e-300, 1e300, math.nan, math.inf, -math.inf, 1j, "", " ", "auto", "none", "linear", "sqrt", "epoch", "0", "1", "8GiB",
        "0.5", "1e6", "64, 1000:256", "linear 2:4 over 3", "double 1:4 every 1e", "noise 2:4", "30s", "fp32", "bf16", "fp16",
        "cpu", "cuda", "cuda:99", "meta", "mps", "False", "a\0b", "\ud800", "ü" * 300, "x" * 10**5, "8" * 5000, "../up", b"", b"a",
        (), [], {}, set(), frozenset({1}), (1,), [1], {"a": 1}, {1: 2}, [[]], [()], [(1,)], [(4,), (4,), (4,)], [(3, 1)] * 3,
        [(2**63,)], [[1, [2]]], (1e-4, 1e-2), [1e-4, 1e-3], (2, 4), [2, 4], "1e-4:1e-2", "2,4", "minimize", "loss",
        "validation_loss", "seconds", "tpe", "random", "median", range(0), range(3), slice(3), ...,
        Decimal("0.5"), Fraction(1, 2),
    )),
    *((f"tensor {shape} {dtype} {device}", functools.partial(torch.ones, shape, dtype=dtype, device=device))
      for shape in ((), (0,), (12,), (0, 3), (12, 0), (12, 3), (2, 0, 3))
      for dtype, device in ((torch.float32, "cpu"), (torch.int64, "cpu"), (torch.bool, "cpu"), (torch.complex64, "cpu"),
                            (torch.float32, "meta"))),
    ("sparse", lambda: torch.ones(12, 3).to_sparse()),
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])),
    ("parameter", lambda: nn.Parameter(torch.ones(3))),
    ("pair of tensors", _pairs),
    ("pair with NaN", lambda: (torch.full((12, 3), math.nan), torch.ones(12, 1))),
    ("pair on meta", lambda: _pairs(device="meta")),
    ("pair of int64", lambda: _pairs(dtype=torch.int64)),
    ("pair of 0 rows", lambda: _pairs(0)),
    ("ragged pair", lambda: (torch.ones(12, 3), torch.ones(11, 1))),
    ("pair of sparse", lambda: tuple(part.to_sparse() for part in _pairs())),
    ("dict of tensors", lambda: {"x": torch.ones(12, 3), "y": torch.ones(12, 1)}),
    ("dict of none", lambda: {"x": None}),
    ("arrays", lambda: (np.ones((12, 3), np.float32), np.ones((12, 1), np.float32))),
    ("object array", lambda: np.array([object()] * 12)),
    ("numpy scalars", lambda: [np.int64(3), np.float32(0.5), np.bool_(True)]),
    *((f"numpy {value!r}", functools.partial(copy.copy, value)) for value in
      (np.int64(3), np.int8(-1), np.float64(0.5), np.float32("nan"), np.bool_(True), np.str_("auto"), np.datetime64("2020"))),
    ("dataset", Samples),
    ("dataset of none", lambda: Samples(0)),
    ("dataset of negative length", lambda: Samples(-3)),
    ("dataset of a length that is a text", lambda: Samples("3")),
    ("dataset of 2**62", lambda: Samples(2**62)),
    ("dataset of texts", lambda: Samples(12, "text")),
    ("dataset of None", lambda: Samples(12, [None])),
    ("dataset of empty samples", lambda: Samples(12, (torch.ones(0), torch.ones(0)))),
    ("stream", Stream),
    ("loader", lambda: DataLoader(Samples(), batch_size=5)),
    ("loader of a stream", lambda: DataLoader(Stream(), batch_size=5)),
    ("loader of draws", lambda: DataLoader(Samples(), sampler=RandomSampler(Samples(), True, 10**10))),
    ("loader with a bad sampler", lambda: DataLoader(Samples(), sampler=["a", None])),
    ("tensor dataset", lambda: TensorDataset(*_pairs())),
    ("list of batches", lambda: [_pairs(5), _pairs(4)]),
    ("generator", lambda: (_pairs(5) for _ in range(3))),
    ("generator that raises", lambda: (_raise() for _ in range(3))),
    ("empty generator", lambda: iter(())),
    ("deque", lambda: deque([1, 2])),
    ("ordered dict", lambda: OrderedDict(a=torch.ones(12, 3))),
    ("cyclic list", _cycle),
    ("cyclic dict", Cyclic),
    ("list of a million", lambda: [1] * 10**6),
    ("deeply nested", lambda: functools.reduce(lambda inner, _: [inner], range(200), [])),
    ("no arguments", lambda: lambda: 3),
    ("one argument", lambda: lambda one: one),
    ("two arguments", lambda: lambda one, two: mse_loss(one, two) if isinstance(one, torch.Tensor) else 3),
    ("three arguments", lambda: lambda one, two, three: 3),
    ("any arguments", lambda: lambda *args, **kwargs: 3),
    ("keyword arguments", lambda: lambda *, one: one),
    ("a function that raises", lambda: _raise),
    ("a function of None", lambda: lambda *args: None),
    ("partial", lambda: functools.partial(mse_loss, reduction="sum")),
    ("builtin", lambda: len),
    ("print in a list", lambda: [lambda record: None]),
    ("functions in a dict", lambda: {"a": lambda outputs, targets: (outputs - targets).abs().mean(1)}),
    ("functions of none in a dict", lambda: {"a": lambda: 3}),
    ("a generator function", lambda: (lambda batch: (yield batch))),
    *((repr(kind), functools.partial(lambda kind: kind, kind)) for kind in
      (int, list, nn.Module, nn.MSELoss, Mock, Samples, torch.optim.SGD, torch.optim.Optimizer, schedules.Linear, OwnError)),
    ("module of Python", lambda: types),
    ("mock", Mock),
    ("object", object),
    ("evil repr", _evil("__repr__")),
    ("evil eq", type("EvilEq", (), {"__eq__": _raise, "__hash__": None})),
    ("evil bool", _evil("__bool__")),
    ("evil len", _evil("__len__")),
    ("evil len and items", _evil("__len__", "__getitem__", "__iter__")),
    ("evil attributes", _evil("__getattr__")),
    ("evil call", _evil("__call__")),
    ("evil path", _evil("__fspath__")),
    ("evil everything", _evil("__repr__", "__eq__", "__bool__", "__len__", "__iter__", "__getattr__", "__call__", "__hash__")),
    ("path", lambda: Path("place")),
    ("path with NUL", lambda: Path("a\0b")),
    ("pure path", lambda: PurePosixPath("place")),
    ("long path", lambda: Path("p" * 5000)),
    ("path below a file", lambda: Path("file/below")),
    ("linear", lambda: nn.Linear(3, 1)),
    ("frozen", lambda: nn.Linear(3, 1).requires_grad_(False)),
    ("meta module", lambda: nn.Linear(3, 1, device="meta")),
    ("empty module", nn.Module),
    ("lazy", lambda: nn.LazyLinear(1)),
    ("another shape", lambda: nn.Linear(4, 1)),
    ("dropout", lambda: nn.Dropout(0.5)),
    ("loss", nn.MSELoss),
    ("optimizer of another", lambda: torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)),
    ("schedule", lambda: schedules.Linear(2, 4, 3)),
    ("noise", lambda: schedules.NoiseScale(2, 4)),
    ("progress", schedules.Progress),
    ("exception", lambda: OwnError("passed")),
    ("device", lambda: torch.device("cpu")),
    ("dtype", lambda: torch.float16),
    ("lock", threading.Lock),
    ("file", io.StringIO),
]  # fmt: skip


_PLAUSIBLE = (
    "None", "True", "False", "1", "2", "3", "7", "0.5", "1.0", "1e-300", "'auto'", "'fp32'", "'bf16'", "'none'", "'linear'",
    "'sqrt'", "'cpu'", "'8GiB'", "'30s'", "'epoch'", "'random'", "'noise 2:4'", "'64, 1000:256'", "[2, 4]", "(2, 4)",
    "[(4,), (4,), (4,)]", "[(3, 1), (3, 1), (3, 1)]", "pair of tensors", "pair with NaN", "pair of int64", "arrays", "dataset",
    "loader", "loader of draws", "stream", "list of batches", "tensor dataset", "generator", "dict of tensors", "one argument",
    "two arguments", "any arguments", "partial", "mock", "print in a list", "functions in a dict", "linear", "lazy", "loss",
    "dropout", "schedule", "noise", "path", "device", "'validation_loss'", "'seconds'", "'loss'", "'tpe'", "0",
)  # fmt: skip
LIKELY = [number for number, (label, _) in enumerate(POOL) if label in _PLAUSIBLE]
"""Values that some argument takes: half of those that are drawn, for what works has to be tried too."""


# What is called.


@dataclass
class Call:
    """A call that works, before any of its arguments is replaced."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    names: list[str]
    """Of the arguments that may be replaced."""
    model: nn.Module | None = None
    seen: list[Any] = field(default_factory=list)
    """What its callbacks were told."""


def _stopping(seen: list[Any]) -> Callable[[Any], None]:
    """Return a callback that ends a run after its third window: a budget of 2**62 is none that is waited for."""

    def callback(record: Any) -> None:
        seen.append(record)
        if isinstance(record, StepReport) and record.step >= 3:
            raise autoaccum.StopTraining

    return callback


def _named(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds and name != "self"
    ]


def _trained(function: Callable[..., Any], **more: Any) -> Call:
    seen: list[Any] = []
    model = nn.Linear(3, 1)
    arguments = {"model": model, "data": _pairs(), "effective_batch": 4, "loss_fn": mse_loss, **more}
    if "callbacks" in inspect.signature(function).parameters:
        arguments |= {"callbacks": [_stopping(seen)], "progress": False}
    return Call(function, arguments, _named(function), model, seen)


def _of_fit() -> Call:
    return _trained(autoaccum.fit)


def _of_trainer() -> Call:
    call = _trained(autoaccum.Trainer)
    return Call(lambda **given: autoaccum.Trainer(**given).fit(), call.arguments, call.names, call.model, call.seen)


def _of_probe() -> Call:
    return _trained(autoaccum.probe, max_micro_batch=8)


def _accumulator(model: nn.Module, seen: list[Any]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "loss_fn": mse_loss, "callbacks": [_stopping(seen)]}


def _of_accumulator() -> Call:
    model, seen = nn.Linear(3, 1), []  # type: ignore[var-annotated]
    return Call(autoaccum.Accumulator, _accumulator(model, seen), _named(autoaccum.Accumulator), model, seen)


def _of_step(name: str) -> Call:
    model, seen = nn.Linear(3, 1), []  # type: ignore[var-annotated]
    method = getattr(autoaccum.Accumulator(**_accumulator(model, seen)), name)
    return Call(method, {"batch": _pairs(5)}, ["batch"], model, seen)


def _of_sweep() -> Call:
    seen: list[Any] = []

    def recipe() -> dict[str, Any]:
        return {
            "model": nn.Linear(3, 1),
            "data": _pairs(),
            "validation_data": _pairs(),
            "loss_fn": mse_loss,
            "epochs": 1,
        }

    arguments = {"recipe": recipe, "lr": [0.1, 0.2], "effective_batch": 4, "num_trials": 1, "progress": False}
    passed_on = [
        "clip_norm",
        "micro_batch",
        "precision",
        "shuffle",
        "metrics",
        "num_workers",
        "headroom",
        "memory_limit",
    ]
    return Call(autoaccum.sweep, arguments, [*_named(autoaccum.sweep), *passed_on], None, seen)


def _of_command(command: str) -> Call:
    """Flags take texts: of a value its text."""
    from autoaccum.cli import commands
    from autoaccum.cli.app import main

    Path("recipe.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef recipe():\n    x, y = torch.ones(12, 3), torch.ones(12, 1)\n"
        "    return dict(model=nn.Linear(3, 1), data=(x, y), loss_fn=nn.functional.mse_loss, steps=2, progress=False)\n"
    )
    base: dict[str, Any] = {"max_micro_batch": 3} if command == "plan" else {}
    base |= {"effective_batch": 4}

    def run(**given: Any) -> int:
        argv = [command] if command == "plan" else [command, "recipe.py"]
        for name, value in given.items():
            argv += [f"--{name.replace('_', '-')}", str(value).replace("\0", "0")]
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = main(argv)
        if code == 1 and "Traceback" in errors.getvalue():
            raise RuntimeError(errors.getvalue()[-300:])
        if code not in (0, 1, 2, 3):
            raise RuntimeError(f"exit code {code}")
        if code:
            raise AutoaccumError(errors.getvalue()[-300:])
        return code

    named = [
        name for name in inspect.signature(getattr(commands, command)).parameters if name not in ("recipe", "json")
    ]
    # A budget on the command line has no callback to end it.
    return Call(run, base, [name for name in named if name not in ("epochs", "steps", "samples")])


def _of_class(function: Callable[..., Any], /, **base: Any) -> Call:
    return Call(function, base, _named(function))


TARGETS: dict[str, tuple[int, Callable[[], Call]]] = {
    "fit": (30, _of_fit),
    "Trainer": (15, _of_trainer),
    "probe": (12, _of_probe),
    "Accumulator": (10, _of_accumulator),
    "Accumulator.step": (4, lambda: _of_step("step")),
    "Accumulator.backward": (4, lambda: _of_step("backward")),
    "sweep": (3, _of_sweep),
    "plan": (4, lambda: _of_class(autoaccum.plan, effective_batch=8, max_micro_batch=3)),
    "schedules.Constant": (1, lambda: _of_class(schedules.Constant, effective_batch=8)),
    "schedules.Linear": (2, lambda: _of_class(schedules.Linear, start=2, end=8, over=3)),
    "schedules.Geometric": (2, lambda: _of_class(schedules.Geometric, start=2, end=8, over=3)),
    "schedules.Milestones": (2, lambda: _of_class(schedules.Milestones, start=2, points={3: 8})),
    "schedules.Function": (1, lambda: _of_class(schedules.Function, function=lambda progress: 8)),
    "schedules.NoiseScale": (2, lambda: _of_class(schedules.NoiseScale, min=2, max=8)),
    "schedules.parse": (1, lambda: _of_class(schedules.parse, text="8")),
    "testing.simulated_memory": (1, lambda: _of_class(testing.simulated_memory, limit_bytes=1000)),
    "testing.oom_at": (1, lambda: _of_class(testing.oom_at, n=3)),
    "testing.manual_clock": (
        1,
        lambda: Call(lambda **given: testing.manual_clock(**given).__enter__(), {"seconds": 1.0}, ["seconds"]),
    ),
    "autoaccum fit": (3, lambda: _of_command("fit")),
    "autoaccum probe": (2, lambda: _of_command("probe")),
    "autoaccum plan": (2, lambda: _of_command("plan")),
}

IS_LONG = ("jobs", "num_trials", "num_workers")
"""Arguments of which a number above 1 is no mistake and starts as many processes or trials: those are left out."""


def drawn(seed: int, index: int) -> tuple[str, dict[str, int]]:
    """Return what call number ``index`` is: of what, and which arguments get which values of the pool."""
    draw = random.Random(f"{seed}/{index}")
    target = draw.choices(list(TARGETS), [weight for weight, _ in TARGETS.values()])[0]
    replaced: dict[str, int] = {}
    for _ in range(draw.choice((1, 1, 1, 2))):
        # By numbers: names are known only where the call is made.
        chosen = draw.choice(LIKELY) if draw.random() < 0.5 else draw.randrange(len(POOL))
        replaced[str(draw.randrange(10**6))] = chosen
    return target, replaced


# One call.


def _snapshot(call: Call, given: Mapping[str, Any]) -> Any:
    model = given.get("model", call.model)
    tensors = []
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor).__name__.startswith("Uninitialized") or tensor.is_meta:
                continue
            tensors.append((tensor.detach().clone(), None if tensor.grad is None else tensor.grad.clone()))
    return tensors


def _same(before: Any, after: Any) -> bool:
    if len(before) != len(after):
        return False
    for (value, grad), (value_now, grad_now) in zip(before, after, strict=True):
        if not torch.equal(value.nan_to_num(), value_now.nan_to_num()) or (grad is None) != (grad_now is None):
            return False
    return True


def call_once(seed: int, index: int) -> dict[str, str]:
    """Make one call in an empty directory of its own; return how it ended."""
    target, replaced = drawn(seed, index)
    before_directory = os.getcwd()
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(place)
        try:
            Path("file").write_text("")
            torch.manual_seed(0)
            call = TARGETS[target][1]()
            given, shown = dict(call.arguments), []
            for number, chosen in replaced.items():
                name = call.names[int(number) % len(call.names)]
                label, make = POOL[chosen]
                value = make()
                if name in IS_LONG and type(value) is int and value > 1:
                    continue
                given[name] = value
                shown.append(f"{name}={label[:40]}")
            result = {"target": target, "given": ", ".join(shown)}
            return result | _outcome(call, given, set(os.listdir()))
        finally:
            os.chdir(before_directory)


CALLS_OF_THE_USERS = {
    ("functions.py", "call"),
    ("functions.py", "by_loss_fn"),
    ("functions.py", "<lambda>"),
    ("pieces.py", "__call__"),
    ("pieces.py", "__getitems__"),
    ("metrics.py", "measure"),
    ("schedule_kinds.py", "at"),
    ("limit.py", "<lambda>"),
    ("draw.py", "chosen_by"),
    ("learning_rate.py", "_make"),
    ("weighting.py", "count_items"),
}
"""Where models, losses, datasets and functions are called: what these raise comes through as it is."""


def _outcome(call: Call, given: dict[str, Any], files: set[str]) -> dict[str, str]:
    state, threads = _snapshot(call, given), threading.active_count()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            call.function(**given)
        return {"outcome": "works"}
    except AutoaccumError as error:
        outcome, said = "refused", f"{type(error).__name__}: {error}"
        if len(said) > 3000:
            outcome = "a text too long"
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "autoaccum/" in frame.filename]
        where = (Path(frames[-1].filename).name, frames[-1].name) if frames else ("?", "")
        if not isinstance(error, OwnError) and where not in CALLS_OF_THE_USERS:
            return {"outcome": "raw", "said": f"{where} {type(error).__name__}: {str(error)[:200]}"}
        outcome, said = "the user's own error", f"{type(error).__name__}: {error}"
    trained = any(isinstance(record, StepReport) for record in call.seen)
    if outcome == "refused" and trained:
        outcome = "refused after windows"
    elif not trained and not _same(state, _snapshot(call, given)):
        outcome = "the model was changed"
    elif threading.active_count() > threads:
        outcome = "a thread was left"
    # What Python keeps of a recipe that was imported is its own.
    elif outcome == "refused" and not trained and (left := set(os.listdir()) - files - {"__pycache__"}):
        outcome, said = "files were left", f"{left} {said}"
    return {"outcome": outcome, "said": said[:300]}


FINE = ("works", "refused", "the user's own error")
"""Outcomes that are no mistake."""


# All of them, in children.


def _work(seed: int, indices: list[int]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for index in indices:
        print(json.dumps({"index": index, **call_once(seed, index)}), file=out, flush=True)


def run(seed: int, indices: list[int], deadline: float = DEADLINE) -> Iterator[dict[str, Any]]:
    """Make these calls in child processes; yield how each ended."""
    todo = deque(indices)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "AUTOACCUM_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        while todo:
            command = [sys.executable, __file__, "--seed", str(seed), "--work"]
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(list(todo)))
            child.stdin.close()
            with child.stdout, selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                while todo:
                    is_there = bool(selector.select(deadline))
                    line = child.stdout.readline() if is_there else ""
                    if not line:
                        child.kill()
                        target, replaced = drawn(seed, todo[0])
                        values = ", ".join(POOL[chosen][0][:40] for chosen in replaced.values())
                        ended = f"exit code {child.wait()}" if is_there else f"more than {deadline:.0f} s"
                        outcome = "crash" if is_there else "hang"
                        yield {
                            "index": todo.popleft(),
                            "target": target,
                            "given": values,
                            "outcome": outcome,
                            "said": ended,
                        }
                        break
                    todo.popleft()
                    yield json.loads(line)
            child.wait()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-table", action="store_true", help="print what is wrong, and write no table")
    given = parser.parse_args()
    if given.work:
        _work(given.seed, json.load(sys.stdin))
        return
    counts: Counter[tuple[str, str]] = Counter()
    for found in run(given.seed, list(range(given.first, given.first + given.calls))):
        outcome = found["outcome"] if found["outcome"] in FINE else "wrong"
        counts[found["target"], outcome] += 1
        if outcome == "wrong":
            print(found, flush=True)
    if not given.no_table:
        write(given.calls, counts)


def write(calls: int, counts: Counter[tuple[str, str]]) -> None:
    """Write the table."""
    columns = (*FINE, "wrong")
    rows: list[list[object]] = [
        [target, sum(counts[target, column] for column in columns), *(counts[target, column] for column in columns)]
        for target in TARGETS
    ]
    rows.append(["all", *(sum(int(str(row[number])) for row in rows) for number in range(1, len(columns) + 2))])
    write_table(
        "fuzz_arguments",
        f"{calls} calls, one or two arguments of each replaced by values of a pool of {len(POOL)}: numbers of all sizes, "
        "texts, containers, tensors of odd shapes and types, functions of odd arity, classes, objects that raise when they "
        "are looked at. *Refused* is a typed error before the first window, with nothing changed; *the user's own error* is "
        "one that what was passed raises. *Wrong* would be any other error, one that comes after windows, a hang, a crash, "
        "or a trace.",
        ["", "calls", *columns],
        rows,
        threads=1,
    )


if __name__ == "__main__":
    main()
