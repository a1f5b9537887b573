"""What becomes of a checkpoint that somebody has changed: 20,000 mutations of what runs wrote, each resumed by ``fit``.

Checksums are computed anew, so that the content alone is wrong. Each child process goes through many mutations and says
which one it is at: a crash or a hang is seen from outside, and is that one's. ``python benchmarks/fuzz_checkpoints.py
[number] [seed]`` writes the table; with ``show`` in front it prints one mutation in full.

A mutation ends well in three ways: as a ``CheckpointError`` that names the entry, as a run from the older checkpoint
with a notice that names it, or as a run whose state after loading is what the changed tree says.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, SequentialLR

import autoaccum
from autoaccum.errors import CheckpointCorruptError, CheckpointError, CheckpointUnsafeError, ResumeError
from autoaccum.events import Notice, Resumed, StepReport
from autoaccum.runs import tensor_files
from autoaccum.runs.checkpoint import MANIFEST, STATE, WEIGHTS, _checksum
from autoaccum.training.trainer import Trainer

SECONDS, STARTING = 60, 600
"""A mutation that takes longer hangs; a child has more time for its start."""
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where the runs are: not on a disk, which would have to bring each of their files there."""
PIECE = 2_500
"""Mutations of one child process."""

# The runs whose checkpoints are changed.


class Net(nn.Module):
    """BatchNorm, dropout, a buffer that a state_dict leaves out.

    What a buffer of a layer of one's own may be, nobody knows but the layer: this one bears whatever there is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(inputs)) * self.scale.float().mean())))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def rows(number: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(number, 6, generator=generator), torch.randint(3, (number,), generator=generator)


def dict_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch["x"] + 0.01 * float(np.random.normal())), batch["y"])


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def foreach(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01, foreach=True)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def in_turn(optimizer: torch.optim.Optimizer, steps: int) -> SequentialLR:
    warmup = LinearLR(optimizer, start_factor=0.5, total_iters=2)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=steps)], milestones=[2])


CONFIGURATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "AdamW, fused": lambda: {"optimizer": adamw, "micro_batch": 8},
    "SGD with momentum, one cycle": lambda: {
        "optimizer": momentum,
        "micro_batch": 3,
        "lr_scheduler": lambda optimizer, steps: OneCycleLR(optimizer, 0.2, total_steps=steps),
    },
    "NAdam, schedulers in turn, validation": lambda: {
        "optimizer": foreach,
        "micro_batch": 4,
        "lr_scheduler": in_turn,
        "validation_data": rows(10),
    },
    "float16 with a scaler": lambda: {"optimizer": momentum, "micro_batch": 4, "precision": "fp16"},
    "noise scale": lambda: {"noise_scale": True, "effective_batch": "noise 4:12"},
    "BatchNorm and buffers": lambda: {"model": Net(), "optimizer": adamw, "micro_batch": 4},
    "a dict of tensors, NumPy": lambda: {
        "data": dict(zip("xy", rows(), strict=True)),
        "loss_fn": None,
        "training_step": dict_step,
        "micro_batch": 8,
    },
    "in search": lambda: {"effective_batch": 64, "data": rows(200), "memory_limit": "64GiB"},
    "settled": lambda: {"effective_batch": 8, "memory_limit": "64GiB"},
}


def options(name: str, where: Path, **others: Any) -> dict[str, Any]:
    defaults = {
        "model": None,
        "data": rows(),
        "loss_fn": cross_entropy,
        "effective_batch": 8,
        "epochs": 4,
        "device": "cpu",
        "progress": False,
        "cache": False,
        "run_dir": where,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
    }
    made = {**defaults, **CONFIGURATIONS[name](), **others}
    torch.manual_seed(1)
    if made["model"] is None:
        made["model"] = plain()
    return {key: value for key, value in made.items() if value is not None}


def stop_after(windows: int) -> Callable[[Any], None]:
    left = [windows]

    def callback(record: Any) -> None:
        if isinstance(record, StepReport):
            left[0] -= 1
            if left[0] <= 0:
                raise autoaccum.StopTraining

    return callback


def written(name: str, where: Path) -> Path:
    """Return the directory of a run that was stopped, with two checkpoints."""
    windows = {"in search": 2, "settled": 10}.get(name, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autoaccum.fit(**options(name, where, callbacks=[stop_after(windows)]))
    return where


# The mutations. A tree is JSON: lists, and dicts with one entry.

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**9, -(10**9), 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 0.0, 0.5, -1.5, 1e308,
    1e-320, "", "x", "cpu", "cuda:7", "a" * 300, "\ud800", [], [0], [None, None], [[]], {"float": "nan"},
    {"float": "inf"}, {"float": "-inf"}, {"int": hex(2**70)}, {"int": hex(-(2**4000))}, {"tuple": []},
    {"tuple": [1, 2]}, {"list": []}, {"dict": [[], None]}, {"dict": [[["a", 1]], None]}, {"OrderedDict": [[], None]},
    {"Counter": [[["a", 1]], None]}, {"set": [1]}, {"bytes": "AAAA"}, {"bytes": "*"}, {"complex": [0.0, 1.0]},
    {"device": "meta"}, {"device": "cuda:99"}, {"dtype": "float64"}, {"dtype": "x"}, {"unknown": 1}, {"tensor": "0"},
    {"tensor": "999"}, {"tensor": 3}, {"weight": "x"}, {"permuted": [{"tensor": "0"}, [0]]},
    {"scalar": ["<f8", "AAAAAAAA8D8="]}, {"scalar": ["|O", "AAAAAAAAAAA="]}, {"array": ["0", "<u4", [624]]},
    {"bits": ["0", "complex128", [1]]}, {"defaultdict": ["list", []]}, {},
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each node, as keys from the top."""
    yield path
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from places(item, (*path, index))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from places(item, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    at(tree, path[:-1])[path[-1]] = value


@cache
def content(path: Path) -> tuple[dict[str, Any], str, bytes, list[Any], list[Any]]:
    """Return the tensors of a checkpoint, its tree, its manifest, the places in the tree, and those in no long list."""
    files = {
        name: {key: value.clone() for key, value in tensor_files.read(path / name).items()} for name in (WEIGHTS, STATE)
    }
    text = files[STATE].pop("tree").numpy().tobytes().decode()
    tree = json.loads(text)
    everywhere = list(places(tree))
    no_words = [path for path in everywhere if path and not len(at(tree, path[:-1])) > 100]
    return files, text, (path / MANIFEST).read_bytes(), everywhere, no_words


class Mutation:
    """A checkpoint's content, and what is done to it."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.chance = chance
        files, self.tree, self.manifest, everywhere, no_words = content(path)
        self.files = {name: dict(tensors) for name, tensors in files.items()}
        self.tree, self.manifest = json.loads(self.tree), json.loads(self.manifest)
        self.said: list[str] = []
        # Big lists, of a generator's words, would else have nine mutations in ten.
        self.places = no_words + chance.sample(everywhere[1:], 40)

    def run(self) -> None:
        kinds = [self.replace, self.replace, self.replace, self.number, self.number, self.drop, self.add, self.twice,
                 self.swap, self.tensor, self.tensor, self.tensor, self.move, self.alias, self.metadata, self.deep,
                 self.of_manifest, self.rename, self.kind]  # fmt: skip
        for _ in range(self.chance.choice([1, 1, 1, 2, 4])):
            kind = self.chance.choice(kinds)
            try:
                kind()
            except (KeyError, IndexError, TypeError):  # what it was for is gone, by the one before
                self.said.append(f"{kind.__name__}: nothing")

    def _some(self, wanted: Callable[[Any], bool] = lambda node: True) -> tuple[Any, ...]:
        for _ in range(200):
            path = self.chance.choice(self.places)
            if wanted(at(self.tree, path)):
                return path
        raise KeyError

    def replace(self) -> None:
        path, value = self._some(), copy.deepcopy(self.chance.choice(ODD))
        self.said.append(f"{path} = {value!r:.60}")
        put(self.tree, path, value)

    def number(self) -> None:
        path = self._some(lambda node: isinstance(node, int | float))
        before = at(self.tree, path)
        value = self.chance.choice(
            [
                before + 1,
                before - 1,
                -before,
                before * 2,
                float(before),
                int(before),
                not before,
                str(before),
                2**63 - 1,
                0,
            ]
        )
        self.said.append(f"{path}: {before!r} -> {value!r}")
        put(self.tree, path, value)

    def drop(self) -> None:
        path = self._some(lambda node: isinstance(node, list) and bool(node))
        at(self.tree, path).pop(index := self.chance.randrange(len(at(self.tree, path))))
        self.said.append(f"{path} without its {index}")

    def add(self) -> None:
        path = self._some(lambda node: isinstance(node, list))
        value = copy.deepcopy(self.chance.choice(ODD))
        pair = self.chance.choice([value, [self.chance.choice(["x", "step", 5, None, "optimizer"]), value]])
        at(self.tree, path).insert(self.chance.randint(0, len(at(self.tree, path))), pair)
        self.said.append(f"{path} with {pair!r:.60}")

    def twice(self) -> None:
        path = self._some(lambda node: isinstance(node, list) and bool(node))
        items = at(self.tree, path)
        items.append(copy.deepcopy(self.chance.choice(items)))
        self.said.append(f"{path} with one of it twice")

    def swap(self) -> None:
        first, second = self._some(), self._some()
        if first == second[: len(first)] or second == first[: len(second)]:
            raise KeyError
        one, other = at(self.tree, first), at(self.tree, second)
        put(self.tree, first, other)
        put(self.tree, second, one)
        self.said.append(f"{first} <-> {second}")

    def rename(self) -> None:
        path = self._some(lambda node: isinstance(node, list) and len(node) == 2 and isinstance(node[0], str))
        at(self.tree, path)[0] = self.chance.choice(["x", "step", at(self.tree, path)[0] + "_", "params", "0.weight"])
        self.said.append(f"{path} has the name {at(self.tree, path)[0]!r}")

    def kind(self) -> None:
        path = self._some(lambda node: isinstance(node, dict) and len(node) == 1)
        ((before, content),) = at(self.tree, path).items()
        after = self.chance.choice(
            ["list", "tuple", "set", "dict", "OrderedDict", "Counter", "Size", "tensor", "weight"]
        )
        put(self.tree, path, {after: content})
        self.said.append(f"{path}: {before} -> {after}")

    def move(self) -> None:
        path = self._some(lambda node: isinstance(node, dict) and ("tensor" in node or "weight" in node))
        names = [{"tensor": name} for name in self.files[STATE]] + [{"weight": name} for name in self.files[WEIGHTS]]
        put(self.tree, path, self.chance.choice(names))
        self.said.append(f"{path} = {at(self.tree, path)}")

    def alias(self) -> None:
        of = [path for path in self.places if isinstance(at(self.tree, path), dict) and "tensor" in at(self.tree, path)]
        first, second = self.chance.sample(of, 2)
        put(self.tree, first, copy.deepcopy(at(self.tree, second)))
        self.said.append(f"{first} is {second}")

    def metadata(self) -> None:
        path = self._some(lambda node: isinstance(node, dict) and set(node) & {"dict", "OrderedDict"} != set())
        ((_, content),) = at(self.tree, path).items()
        content[1] = copy.deepcopy(
            self.chance.choice([*ODD, {"dict": [[["", {"dict": [[["assign_to_params_buffers", True]], None]}]], None]}])
        )
        self.said.append(f"{path} has the metadata {content[1]!r:.60}")

    def deep(self) -> None:
        path, depth = self._some(), self.chance.choice([20, 200, 900, 3000])
        value: Any = 1
        for _ in range(depth):
            value = self.chance.choice([[value], {"tuple": [value]}, {"dict": [[["a", value]], None]}])
        put(self.tree, path, value)
        self.said.append(f"{path} is nested {depth} deep")

    def tensor(self) -> None:
        of = self.chance.choice([WEIGHTS, STATE])
        name = self.chance.choice(list(self.files[of]))
        value = self.files[of][name]
        change = self.chance.randrange(9)
        if change == 0:
            value = value.reshape(-1)
        elif change == 1:
            value = torch.zeros(
                self.chance.choice([(), (0,), (1,), (3,), (2, 3), (1000,), (64, 32)]), dtype=value.dtype
            )
        elif change == 2:
            dtypes = [
                torch.float64,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.uint8,
                torch.bool,
                torch.complex64,
            ]
            value = value.to(self.chance.choice(dtypes))
        elif change == 3:
            value = torch.full_like(value, self.chance.choice([0, 1, 200])) if value.numel() else value
        elif change == 4 and value.is_floating_point():
            value = torch.full_like(value, self.chance.choice([float("nan"), float("inf"), -1.0, 1e30]))
        elif change == 5:
            value = torch.cat([value.reshape(-1), value.reshape(-1)])
        elif change == 6 and value.dim() > 1:
            value = value.transpose(0, 1).contiguous()
        elif change == 7 and value.dim() > 1 and of == STATE:
            for path in places(self.tree):
                if at(self.tree, path) == {"tensor": name}:
                    put(self.tree, path, {"permuted": [{"tensor": name}, list(reversed(range(value.dim())))]})
                    break
        else:
            flat = value.contiguous().reshape(-1).view(torch.uint8).clone()
            if flat.numel():
                for _ in range(self.chance.choice([1, 4, 16])):
                    flat[self.chance.randrange(min(flat.numel(), 32))] = self.chance.randrange(256)
                    flat[self.chance.randrange(flat.numel())] = self.chance.randrange(256)
            value = flat.view(value.dtype).reshape(value.shape)
        self.files[of][name] = value
        self.said.append(f"tensor {name} of {of}, change {change}: {value.dtype} {tuple(value.shape)}")

    def of_manifest(self) -> None:
        key = self.chance.choice(["step", "serial", "is_best", "saved", "facts", "format"])
        self.manifest[key] = self.chance.choice([None, -1, 0, 3, 2**70, 1.5, "x", [], {}, True, float("nan")])
        self.said.append(f"manifest {key} = {self.manifest[key]!r}")

    def write(self, place: Path) -> None:
        """Write it as a checkpoint whose checksums are right."""
        # Deeper than it may be read.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(30_000)
        try:
            text = json.dumps(self.tree).encode()
        finally:
            sys.setrecursionlimit(limit)
        tree = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        files = {
            WEIGHTS: tensor_files.write(place / WEIGHTS, self.files[WEIGHTS]),
            STATE: tensor_files.write(place / STATE, {**self.files[STATE], "tree": tree}),
        }
        document = {key: value for key, value in self.manifest.items() if key != "checksum"} | {"files": files}
        document = json.loads(json.dumps(document))
        (place / MANIFEST).write_text(json.dumps({**document, "checksum": _checksum(document)}))


# What comes of them.


def differences(found: Any, told: Any, entry: str = "") -> Iterator[str]:
    """Yield what is otherwise after loading than the tree says; what PyTorch adds, switched off, is no difference."""
    if isinstance(told, torch.Tensor):
        same = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (told.shape, told.dtype)
        if not same or tensor_files.as_bytes(found).tolist() != tensor_files.as_bytes(told).tolist():
            yield f"{entry}: another tensor"
    elif isinstance(told, np.ndarray):
        if not (isinstance(found, np.ndarray) and found.dtype == told.dtype and found.tolist() == told.tolist()):
            yield f"{entry}: another array"
    elif isinstance(told, dict):
        if not isinstance(found, dict):
            yield f"{entry}: {found!r:.50} is no dict"
            return
        for key in told.keys() | found.keys():
            if key not in told:
                if found[key] is not None and found[key] is not False:
                    yield f"{entry}.{key}: not in the tree"
            elif key not in found:
                yield f"{entry}.{key}: not there after loading"
            else:
                yield from differences(found[key], told[key], f"{entry}.{key}")
    elif isinstance(told, list | tuple):
        if type(found) is not type(told) or len(found) != len(told):
            yield f"{entry}: {found!r:.50} instead of {told!r:.50}"
            return
        for index, (one, other) in enumerate(zip(found, told, strict=True)):
            yield from differences(one, other, f"{entry}[{index}]")
    elif repr(found) != repr(told) and not (
        isinstance(found, int | float) and type(told) in (int, float) and found == told
    ):
        yield f"{entry}: {found!r:.50} instead of {told!r:.50}"


class Wrong(Exception):
    """A run that went on from another state than its checkpoint says."""


class Watched(Trainer):
    """Compares what it has loaded with what it was told to load."""

    def load_state_dict(self, weights: Any, state: Any) -> None:
        told = copy.deepcopy((dict(weights) if isinstance(weights, dict) else weights, state))
        super().load_state_dict(weights, state)
        found_weights, found = self.state_dict()
        is_timing, is_here = told[1]["engine"]["tuner"]["is_timing"], told[1]["device"] == found["device"]
        for of in (told[1], found):
            engine = of["engine"]
            engine["announced"] = sorted({*engine["announced"], *engine.pop("announced of windows")})
            # What another machine has found out is of no use here; sizes of a user's own are taken at their word.
            if not is_here:
                of["device"] = of["validator"] = of["engine"]["tuner"] = None
            elif not self._tuner._learns:
                of["engine"]["tuner"] = None
            elif is_timing:  # what was being timed is timed anew
                of["engine"]["tuner"] |= {"is_timing": None, "_cap": None, "times": None}
        wrong = [*differences(dict(found_weights), told[0], "weights"), *differences(found, told[1])]
        if wrong:
            raise Wrong("; ".join(wrong[:5]))


def outcome(name: str, where: Path) -> tuple[str, str]:
    """Resume the run, two windows on; return (kind of outcome, what was said)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A run that ends by the budget goes on for less than two windows.
            callbacks = [stop_after(2)]
            result = Watched(**options(name, where, callbacks=callbacks, checkpoint_every=1000)).fit()
    except CheckpointUnsafeError as error:
        return "refused, as unsafe", str(error)
    except ResumeError as error:
        return "refused, as another run's", str(error)
    except CheckpointCorruptError as error:
        return ("refused, the entry named" if error.entry else "refused"), str(error)
    except CheckpointError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Wrong as error:
        return "WRONG RESUME", str(error)
    except autoaccum.AutoaccumError as error:
        return "another typed error", f"{type(error).__name__}: {error}"
    except BaseException as error:
        return "RAW ERROR", f"{type(error).__name__}: {error}"
    events = list(result.events)
    said = [event.cause for event in events if isinstance(event, Notice) and "cannot be read" in event.cause]
    if said:
        return "the older one was used", said[-1]
    if any(isinstance(event, Resumed) for event in events):
        return "resumed as the tree says", ""
    return "BEGUN ANEW", ""


_NAMED = re.compile(r"(step-\d+|manifest\.json|state\.safetensors)")


def mutate(name: str, base: Path, place: Path, seed: int, *, alone: bool) -> Mutation:
    """Copy a run's directory to a place, with its newest checkpoint changed; ``alone``: without the older one."""
    shutil.rmtree(place, ignore_errors=True)
    (place / "checkpoints").mkdir(parents=True)
    *_, older, newest = sorted((base / "checkpoints").glob("step-*"))
    if not alone:
        shutil.copytree(older, place / "checkpoints" / older.name)
    mutation = Mutation(newest, random.Random(seed))
    mutation.run()
    (place / "checkpoints" / newest.name).mkdir()
    mutation.write(place / "checkpoints" / newest.name)
    return mutation


def one(name: str, base: Path, place: Path, seed: int) -> tuple[str, str, Mutation]:
    mutation = mutate(name, base, place, seed, alone=seed % 2 == 0)
    kind, said = outcome(name, place)
    if kind in ("the older one was used", "refused, the entry named", "refused") and not _NAMED.search(said):
        kind = "NOT NAMED"
    return kind, said, mutation


def child(names: list[str], first: int, count: int) -> None:
    """Go through mutations, of several runs in turn, and print a line after each."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        bases = [written(name, Path(folder) / f"base-{index}") for index, name in enumerate(names)]
        print("ready", flush=True)
        for seed in range(first, first + count):
            turn = seed % len(names)
            kind, said, mutation = one(names[turn], bases[turn], Path(folder) / "run", seed)
            bad = kind.isupper()
            print(json.dumps([seed, kind, said[:400] if bad else "", mutation.said if bad else []]), flush=True)


def in_children(names: list[str], first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """Yield (seed, outcome, what was said) of each mutation; a child that dies is followed by another one."""
    seed, end = first, first + count
    while seed < end:
        command = [sys.executable, __file__, "child", ",".join(map(str, map(list(CONFIGURATIONS).index, names)))]
        command += [str(seed), str(end - seed)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert process.stdout is not None
        hangs = False
        with process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if selector.select(STARTING):
                process.stdout.readline()
            while not (hangs := not selector.select(SECONDS)) and (line := process.stdout.readline()):
                at_seed, kind, said, done = json.loads(line)
                yield at_seed, kind, f"{said} {done}"
                seed = at_seed + 1
        if hangs:
            process.kill()
        code = process.wait()
        if seed < end:
            yield seed, "HANG" if hangs else "CRASH", f"exit status {code}"
            seed += 1


def run(number: int, seed: int = 0, names: list[str] | None = None) -> Counter[tuple[str, str]]:
    """Go through so many mutations, of all configurations in turn; print what is bad, and return how many of each."""
    counts: Counter[tuple[str, str]] = Counter()
    names = names or list(CONFIGURATIONS)
    for index, name in enumerate(names):
        of_name = number // len(names) + (index < number % len(names))
        for first in range(0, of_name, PIECE):
            begin = seed + index * 10**6 + first
            for at_seed, kind, said in in_children([name], begin, min(PIECE, of_name - first)):
                counts[name, kind] += 1
                if kind.isupper():
                    print(f"{kind}: {name}, {at_seed}: {said}", flush=True)
        print(name, {kind: n for (of, kind), n in counts.items() if of == name}, flush=True)
    return counts


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["child"]:
        names = [list(CONFIGURATIONS)[int(index)] for index in arguments[1].split(",")]
        child(names, int(arguments[2]), int(arguments[3]))
        return
    if arguments[:1] == ["show"]:
        with tempfile.TemporaryDirectory() as folder:
            base = written(arguments[1], Path(folder) / "base")
            kind, said, mutation = one(arguments[1], base, Path(folder) / "run", int(arguments[2]))
            print("\n".join(mutation.said), kind, said, sep="\n")
        return
    number, seed = (
        int(arguments[index]) if len(arguments) > index else value for index, value in enumerate((20_000, 0))
    )
    counts = run(number, seed)
    from benchmarks.results import write_table

    kinds = sorted(
        {kind for _, kind in counts}, key=lambda kind: -sum(n for (_, of), n in counts.items() if of == kind)
    )
    bad = sum(n for (_, kind), n in counts.items() if kind.isupper())
    write_table(
        "fuzz_checkpoints",
        f"{number:,} mutations of checkpoints, checksums right, each resumed for two windows, every second one without "
        f"an older checkpoint. Crashes, hangs, raw errors and wrong resumes: {bad}.",
        ["run", *kinds],
        [[name, *(counts[name, kind] for kind in kinds)] for name in CONFIGURATIONS]
        + [["all", *(sum(counts[name, kind] for name in CONFIGURATIONS) for kind in kinds)]],
        threads=1,
    )


if __name__ == "__main__":
    main()
