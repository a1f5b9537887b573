"""Whether optimizers of several libraries train, resume and meet full memory as in a plain loop.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py torch timm --rows rows.jsonl

In a fresh environment with torch==2.13.0, pytorch_optimizer==4.1.0, timm==1.0.31, schedulefree==1.4.1,
prodigyopt==1.1.2, torchao==0.18.0, bitsandbytes==0.50.2, heavyball==3.2.1 and einops; a library that is not installed
is left out. A small model in float64 (float32 where the optimizer asks for it) takes 12 steps of 8 samples in
micro-batches of 3. Each optimizer is made with the defaults that it has, and draws the same random numbers in each run.
One that fit refuses, as its step needs a closure, is stepped by an Accumulator. Each line runs in a process of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.metadata
import inspect
import json
import multiprocessing
import os
import random
import re
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import write_table
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.testing import oom_at

SECONDS = 180
"""That a line may take, compilations included."""
OPERATIONS = 12
"""At which memory runs out, evenly spread over those of the optimizer's step."""
OF_RANKS = ("DeMo", "DistributedMuon")
"""Those that need a group of processes: here one of one."""
STEPS, BATCH = 12, 8
Make = Callable[[nn.Module], torch.optim.Optimizer]


def in_torch() -> dict[str, Make]:
    return {name: _of(kind) for name, kind in _classes("torch.optim").items()}


def in_schedulefree() -> dict[str, Make]:
    found = {name: _of(kind) for name, kind in _classes("schedulefree").items()}
    kind = importlib.import_module("schedulefree").ScheduleFreeWrapper
    return found | {"ScheduleFreeWrapper": _of(kind, momentum=0.9)}


def in_prodigyopt() -> dict[str, Make]:
    return {name: _of(kind) for name, kind in _classes("prodigyopt").items()}


def in_torchao() -> dict[str, Make]:
    return {name: _of(kind) for name, kind in _classes("torchao.optim").items()}


def in_bitsandbytes() -> dict[str, Make]:
    with_momentum = ("SGD", "LARS")  # which they do not do without
    return {
        name: _of(kind, **({"momentum": 0.9} if any(one in name for one in with_momentum) else {}))
        for name, kind in _classes("bitsandbytes.optim").items()
    }


def in_heavyball() -> dict[str, Make]:
    library = importlib.import_module("heavyball")
    importlib.import_module("heavyball.utils").compile_mode = None
    found = {name: _of(kind) for name, kind in _classes("heavyball").items() if name in library.__all__}
    return found | {
        "SplitOpt": lambda model: library.SplitOpt([{"params": model.parameters(), "optimizer": library.AdamW}])
    }


def in_timm() -> dict[str, Make]:
    optim = importlib.import_module("timm.optim")
    infos = [name for name in optim.list_optimizers() if "bnb" not in name and "fused" not in name]
    return {name: lambda model, name=name: optim.create_optimizer_v2(model, opt=name, lr=0.05) for name in infos}


def in_pytorch_optimizer() -> dict[str, Make]:
    library = importlib.import_module("pytorch_optimizer.optimizer")
    found = {kind.__name__: kind for kind in library.OPTIMIZERS.values() if isinstance(kind, type)}
    found |= _classes("pytorch_optimizer")
    muons = {"AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"}
    groups = {name: {"use_muon": True} if name in muons else {} for name in found}
    rho = types.SimpleNamespace(step=lambda: 0.05)
    return {name: _of(kind, in_group=groups[name]) for name, kind in sorted(found.items())} | {
        "GSAM": lambda model: found["GSAM"](model.parameters(), torch.optim.SGD(model.parameters()), model, rho)
    }


LIBRARIES = {
    "torch": in_torch,
    "schedulefree": in_schedulefree,
    "prodigyopt": in_prodigyopt,
    "torchao": in_torchao,
    "bitsandbytes": in_bitsandbytes,
    "timm": in_timm,
    "heavyball": in_heavyball,
    "pytorch_optimizer": in_pytorch_optimizer,
}


def _classes(module: str) -> dict[str, Any]:
    found = vars(importlib.import_module(module)).items()
    kinds = {name: kind for name, kind in found if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    return {n: kinds[n] for n in sorted(kinds) if kinds[n] is not torch.optim.Optimizer and not n.startswith("_")}


def _of(kind: Any, in_group: dict[str, Any] | None = None, **options: Any) -> Make:
    """Return what makes an optimizer of a kind, with what has no default."""
    needed = [p.name for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind < 2]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        given = {
            "params": [{"params": params, **in_group}] if in_group else params,
            "model": model,
            "lr": 0.05,
            "num_data": STEPS * BATCH,
            "num_iterations": STEPS,
            "base_optimizer": torch.optim.SGD,
            "base": torch.optim.SGD(params, lr=0.05),
            "optimizer": torch.optim.SGD(params, lr=0.05, momentum=0.9),
        }
        return kind(**{name: given[name] for name in needed if name in given}, **options)

    return make


# One line.


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 64, generator=g, dtype=dtype)
    return x, (x @ torch.randn(64, 3, generator=g, dtype=dtype) / 8).tanh()


def made(make: Make, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer, each of whose steps draws the same numbers in each run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 3, bias=False)).to(dtype)
    optimizer = make(model)
    model.register_buffer("taken", torch.zeros((), dtype=torch.int64))  # which a checkpoint has
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer.register_step_pre_hook(lambda *args: _seed(int(model.taken)))
        optimizer.register_step_post_hook(lambda *args: model.taken.add_(1))
    return model, optimizer


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain(make: Make, dtype: torch.dtype, noise: float = 0.0, *, has_closure: bool = False) -> torch.Tensor:
    """Return the weights after a plain loop, those that the optimizer evaluates.

    Args:
        make: makes the optimizer.
        dtype: of the model.
        noise: by how much each number of a gradient is changed, relatively.
        has_closure: whether to step with one.
    """
    model, optimizer = made(make, dtype)
    x, y = data(dtype)
    before, noises = weights(model).clone(), torch.Generator().manual_seed(2)
    _mode(optimizer, "train")
    for at in range(0, STEPS * BATCH, BATCH):

        @torch.enable_grad()
        def closure(at: int = at) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x[at : at + BATCH]), y[at : at + BATCH])
            loss.backward()
            for p in model.parameters() if noise else ():
                p.grad *= 1 + noise * torch.randn(p.shape, dtype=dtype, generator=noises)
            return loss

        closure()
        optimizer.step(closure) if has_closure else optimizer.step()
    _mode(optimizer, "eval")
    if torch.equal(weights(model), before):
        raise ValueError("no weight has moved")
    return weights(model).clone()


def by_closure(make: Make) -> str:
    """Return what becomes of an optimizer that fit refuses in an Accumulator, which has closures to give."""
    for dtype in (torch.float64, torch.float32):
        try:
            expected = plain(make, dtype, has_closure=True)
        except Exception as error:
            failed = error
            continue
        return f"with a closure, by an Accumulator: {compared(make, dtype, expected, by_accumulator, has_closure=True)}"
    return f"the plain loop fails with a closure too: {_short(failed)}"


def by_accumulator(make: Make, dtype: torch.dtype, micro_batch: int = 3) -> torch.Tensor:
    model, optimizer = made(make, dtype)
    x, y = data(dtype)
    _mode(optimizer, "train")
    accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=mse_loss, micro_batch=micro_batch, verify=False)
    for at in range(0, STEPS * BATCH, BATCH):
        accumulator.step((x[at : at + BATCH], y[at : at + BATCH]))
    _mode(optimizer, "eval")
    return weights(model)


def compared(
    make: Make, dtype: torch.dtype, expected: torch.Tensor, by: Callable[..., torch.Tensor], **options: Any
) -> str:
    """Return how far the weights after windows of micro-batches are from those of a plain loop."""
    off = _off(by(make, dtype), expected)
    if off < (1e-9 if dtype is torch.float64 else 1e-4):
        return f"exact ({off:.0e})"
    # One that rounds, goes by signs or by eigenvectors carries rounding far.
    by_rounding = _off(plain(make, dtype, noise=torch.finfo(dtype).eps, **options), expected)
    if torch.equal(by(make, dtype, micro_batch=BATCH), expected) and off < 10 * by_rounding:
        return f"whole batches bit-identical; split {off:.0e}, as by rounding alone ({by_rounding:.0e})"
    return f"WRONG: off by {off:.0e}"


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _mode(optimizer: Any, name: str) -> None:
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        with contextlib.suppress(AttributeError):  # one that only hands it on, to one that has none
            getattr(optimizer, name)()


def fit(make: Make, dtype: torch.dtype, micro_batch: int = 3, **options: Any) -> tuple[torch.Tensor, Any]:
    model, optimizer = made(make, dtype)
    result = autoaccum.fit(
        model, data(dtype), effective_batch=BATCH, micro_batch=micro_batch, loss_fn=mse_loss, optimizer=optimizer,
        shuffle=False, progress=False, cache=False, device="cpu", **options,
    )  # fmt: skip
    return weights(model), result


def of_training(make: Make, dtype: torch.dtype, expected: torch.Tensor) -> str:
    return compared(make, dtype, expected, lambda *args, **options: fit(*args, **options)[0])


def of_resume(make: Make, dtype: torch.dtype) -> str:
    expected, _ = fit(make, dtype)

    def stop(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == STEPS // 2:
            raise autoaccum.StopTraining

    with tempfile.TemporaryDirectory() as folder:
        _, first = fit(make, dtype, run_dir=folder, callbacks=[stop])
        said = [str(event) for event in first.events if isinstance(event, autoaccum.events.Notice)]
        try:
            found, _ = fit(make, dtype, run_dir=folder)
        except Exception as error:
            return f"told: {said[0][:160]}" if said else f"WRONG: {_short(error)}"
    if torch.equal(found, expected):
        return "bit-identical" if not said else f"bit-identical; told: {said[0].partition(' of its own')[0][:160]}"
    return f"told: {said[0][:160]}" if said else f"WRONG: off by {float((found - expected).norm()):.0e}"


def of_memory(make: Make, dtype: torch.dtype) -> str:
    x, y = data(dtype)

    def run(operation: int | None) -> tuple[torch.Tensor, int, int]:
        model, optimizer = made(make, dtype)
        _mode(optimizer, "train")
        accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=mse_loss, micro_batch=BATCH, verify=False)
        accumulator.step((x[:BATCH], y[:BATCH]))
        first = [0]
        # Operations are not seen within what is compiled.
        with torch.compiler.set_stance("force_eager"), oom_at(operation) as count:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # else all operations of the window are tried
                optimizer.register_step_pre_hook(lambda *args: first.append(count.operations))
            accumulator.step((x[BATCH : 2 * BATCH], y[BATCH : 2 * BATCH]))
        at, operations = first[1] if len(first) > 1 else 0, count.operations
        accumulator.step((x[2 * BATCH : 3 * BATCH], y[2 * BATCH : 3 * BATCH]))
        return weights(model), operations, at

    expected, operations, first = run(None)
    span = range(first + 1, operations + 1)
    tried = sorted({span[round(i * (len(span) - 1) / (OPERATIONS - 1))] for i in range(OPERATIONS)}) if span else []
    again = ended = 0
    for operation in tried:
        try:
            found, _, _ = run(operation)
        except autoaccum.AutoaccumError:
            ended += 1
            continue
        if not torch.equal(found, expected):
            return f"WRONG: at operation {operation - first} of {len(span)}"
        again += 1
    return f"{again} tried again, {ended} ended in words"


def of_modes(make: Make, dtype: torch.dtype, expected: torch.Tensor) -> str:
    _, optimizer = made(make, dtype)
    if not (callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))):
        return "none"
    model, _ = made(make, dtype)
    x, y = data(dtype)
    nn.utils.vector_to_parameters(expected, model.parameters())
    own = float(mse_loss(model(x), y).detach())
    with tempfile.TemporaryDirectory() as folder:
        found, result = fit(make, dtype, run_dir=folder, validation_data=(x, y))
        best = weights(autoaccum.load_best(folder, model))
        loss = next(event.loss for event in result.events if isinstance(event, autoaccum.events.Validated))
    is_right = abs(loss - own) <= 1e-3 * own and torch.equal(best, found)
    return "evaluated" if is_right else f"WRONG: validated {loss:.4g}, right {own:.4g}"


def _short(error: BaseException) -> str:
    text = re.sub(r" object at 0x\w+", "", f"{type(error).__name__}: {error}".replace("|", "/"))
    return textwrap.shorten(text, 160, placeholder=" …")


def line(library: str, name: str, into: Any) -> None:
    """Put the cells of a line into a queue."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if name in OF_RANKS:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        into.put(cells(LIBRARIES[library]()[name]))


def cells(make: Make) -> list[str]:
    expected, dtype = None, torch.float64
    for dtype in (torch.float64, torch.float32):
        try:
            expected = plain(make, dtype)
        except Exception as error:
            refused = error
            continue
        if expected.isfinite().all():
            break
    if expected is None and "no weight" in str(refused):
        return [f"the plain loop moves no weight in {STEPS} steps", "", "", ""]
    if expected is None:
        try:
            fit(make, dtype)
        except autoaccum.AutoaccumError as error:
            return [f"fit refuses it: {_short(error)}; {by_closure(make)}", "", "", ""]
        except Exception as error:
            return [f"the plain loop fails: {_short(error)}", "", "", ""]
        return [f"WRONG: trained, where the plain loop fails: {_short(refused)}", "", "", ""]
    found = []
    for of in (of_training, of_resume, of_memory, of_modes):
        try:
            found.append(of(make, dtype, expected) if of in (of_training, of_modes) else of(make, dtype))
        except autoaccum.AutoaccumError as error:
            found.append(f"refused: {_short(error)}")
            if of is of_training:
                return [*found, "", "", ""]
        except Exception as error:
            found.append(f"WRONG: {_short(error)}")
    return found


def lines(libraries: list[str], known: dict[tuple[str, str], list[str]]) -> Iterator[list[str]]:
    context = multiprocessing.get_context("fork")
    for library in libraries:
        try:
            names = list(LIBRARIES[library]())
        except ImportError:
            continue
        version = importlib.import_module(library).__version__ if library == "torch" else _version(library)
        for name in names:
            if (f"{library} {version}", name) in known:
                continue
            queue = context.Queue()
            process = context.Process(target=line, args=(library, name, queue))
            process.start()
            try:
                found = queue.get(timeout=SECONDS)
            except Exception:
                found = [f"not within {SECONDS} s", "", "", ""]
            process.kill()
            process.join()
            yield [f"{library} {version}", name, *found]


COLUMNS = (
    f"Trained: the weights after {STEPS} steps in micro-batches, next to those of the plain loop. Resumed: stopped "
    f"after {STEPS // 2} steps and resumed, next to a run that was not stopped. Memory ran out: at up to {OPERATIONS} "
    "operations of one step, which ends in `OptimizerOutOfMemoryError`. Modes: "
    "validation and `load_best` use the weights after `eval()`."
)
KINDS = ("right", "refused in words", "not within the time", "failing in the plain loop", "wrong")


def kind(row: list[str]) -> str:
    """Return what a row shows."""
    cells = " ".join(row[2:])
    tells = {"WRONG": "wrong", "refuse": "refused in words", "not within": "not within the time"}
    tells |= {"the plain loop": "failing in the plain loop"}
    return next((name for tell, name in tells.items() if tell in cells), "right")


def _version(library: str) -> str:
    return importlib.metadata.version(library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES))
    parser.add_argument("--rows", type=Path, default=Path(os.devnull), help="JSON lines: those that are there are kept")
    arguments = parser.parse_args()
    known = {(row[0], row[1]): row for row in map(json.loads, arguments.rows.read_text().splitlines())}
    with arguments.rows.open("a") as file:
        for row in lines(arguments.libraries, known):
            known[row[0], row[1]] = row
            print(json.dumps(row), file=file, flush=True)
            print(*row, sep=" | ", flush=True)
    rows = sorted(known.values(), key=lambda row: (list(LIBRARIES).index(row[0].partition(" ")[0]), row[1]))
    counts = collections.Counter(map(kind, rows))
    ended = ", ".join(f"{counts[name]} {name}" for name in KINDS)
    write_table(
        "optimizers",
        f"{len(rows)} optimizers next to a plain loop: {ended}. {COLUMNS}",
        ["library", "optimizer", "trained", "resumed", "memory ran out", "modes"],
        rows,
        quiet=True,
    )


if __name__ == "__main__":
    main()
