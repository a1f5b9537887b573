"""What several ranks cost: ``fit`` on them beside DistributedDataParallel with ``no_sync``, and what ranks tell.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --ranks 2 --rounds 7

Both train the same model on the same windows, cut into the same micro-batches on each rank, with the same optimizer,
and read the loss once per window. They alternate in the same processes, of one thread each, which wait for each other
before each of them; a figure is the median over the rounds. Their last losses must agree, or nothing is written. A
second table has what a window of each number of ranks sends, and how long it takes; a third one works that out from
its parts; and a fourth is of a pair of which one rank takes twice as long for a sample.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import autoaccum
from autoaccum.distributed.group import join
from autoaccum.step.across_ranks import SharedTransaction

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CharGPT
from char_gpt import loss_fn as gpt_loss

MICRO_BATCH = 8
LENGTH = 32
"""Characters of each of the GPT's samples."""
Made = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Callable[..., torch.Tensor]]


def tiny_mlp() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, (torch.randn(4096, 32), torch.randint(0, 10, (4096,))), cross_entropy


def gpt(width: int, depth: int) -> Made:
    torch.manual_seed(0)
    ids = torch.randint(0, len(ALPHABET), (512, LENGTH + 1))
    return CharGPT(width, depth, dropout=0.0), (ids[:, :-1], ids[:, 1:]), gpt_loss


MODELS: dict[str, tuple[Callable[[], Made], int, int, int]] = {
    "tiny MLP": (tiny_mlp, 110, 300, 4),
    "GPT, 11 million parameters": (lambda: gpt(384, 6), 4, 20, 2),
}
"""(model, windows to leave out, windows to time, micro-batches of each rank)"""


def by_ddp(make: Callable[[], Made], before: int, windows: int, pieces: int, **_: Any) -> tuple[float, float]:
    """(seconds after the first windows, last loss) of the loop that a careful person writes."""
    model, (inputs, targets), loss_fn = make()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    share = MICRO_BATCH * pieces
    loss = 0.0
    for window in range(before + windows):
        if window == before:
            started = time.perf_counter()
        start = (window * share * size + rank * share) % len(inputs)
        optimizer.zero_grad()
        total = torch.zeros(())
        for piece in range(pieces):
            rows = slice(start + piece * MICRO_BATCH, start + (piece + 1) * MICRO_BATCH)
            with nullcontext() if piece == pieces - 1 else parallel.no_sync():
                micro_loss = loss_fn(parallel(inputs[rows]), targets[rows]) / pieces
                micro_loss.backward()
            total += micro_loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        loss = total.item() / size
    return time.perf_counter() - started, loss


def by_fit(
    make: Callable[[], Made],
    before: int,
    windows: int,
    pieces: int,
    at_step: Callable[[], None] = lambda: None,
    **options: Any,
) -> tuple[float, float]:
    """The same through ``fit``; ``at_step`` is called in each step."""
    model, data, loss_fn = make()
    stamps: list[float] = []

    def stamped(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        optimizer.register_step_post_hook(lambda *_: (stamps.append(time.perf_counter()), at_step())[0])
        return optimizer

    result = autoaccum.fit(
        model, data, effective_batch=MICRO_BATCH * pieces * num_ranks(), micro_batch=MICRO_BATCH,
        steps=before + windows, shuffle=False, device="cpu", progress=False,
        optimizer=stamped, **{"loss_fn": loss_fn, **options},
    )  # fmt: skip
    return stamps[-1] - stamps[before - 1], result.history[-1].loss


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def without_overlap(*arguments: Any, **options: Any) -> tuple[float, float]:
    """``fit`` whose ranks add up gradients after the last backward."""
    before = SharedTransaction._comes_once
    SharedTransaction._comes_once = False
    try:
        return by_fit(*arguments, **options)
    finally:
        SharedTransaction._comes_once = before


CONTESTANTS = {"DDP": by_ddp, "fit": by_fit, "fit, added up after the backward": without_overlap}


def compared(rounds: int) -> dict[str, Any]:
    """Seconds of each contestant, by model."""
    found: dict[str, Any] = {}
    for name, (make, before, windows, pieces) in MODELS.items():
        # Measurements of law 8 fall into the first windows, which of the GPT are all that there is time for.
        options = {"verify": before > 100}
        for run in CONTESTANTS.values():
            run(make, 1, 1, pieces)
        times: dict[str, list[float]] = {label: [] for label in CONTESTANTS}
        for number in range(rounds):
            losses = []
            for label in list(CONTESTANTS)[:: 1 if number % 2 else -1]:  # who is later may find another machine
                dist.barrier()
                seconds, loss = CONTESTANTS[label](make, before, windows, pieces, **options)
                times[label].append(seconds / windows)
                losses.append(loss)
            if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
                raise SystemExit(f"{name}: the last losses are {losses}: not the same training")
        found[name] = times
    return found


def told(rounds: int) -> dict[str, Any]:
    """What a window sends and takes, by model; and seconds of an exchange, and of a full bucket's sum."""
    found: dict[str, Any] = {}
    group = join(torch.device("cpu"))
    for name, (make, before, windows, pieces) in MODELS.items():
        counts: list[tuple[int, int, float]] = []

        def count(counts: Any = counts) -> None:
            if group is not None:
                counts.append((group.channel.num_collectives, group.channel.num_bytes, group.waited_seconds))

        by_fit(make, 1, 1, pieces)
        runs = [without_overlap(make, before, windows, pieces, count, verify=False)[0] for _ in range(rounds)]
        first, last = (counts[-windows], counts[-1]) if counts else ((0, 0, 0.0), (0, 0, 0.0))
        found[name] = {
            "parameters": sum(p.numel() for p in make()[0].parameters()),
            "seconds": statistics.median(runs) / windows,
            "per window": [(after - then) / (windows - 1) for then, after in zip(first, last, strict=True)],
        }
    if group is not None:
        channel, bucket, small = group.channel, torch.zeros(25 * 2**16), torch.zeros(2762)
        found["exchange"] = _seconds(lambda: group.exchange(True), 200)
        found["sum of a bucket"] = _seconds(lambda: channel.begin_sum(bucket)(), 20)
        found["small sum"] = _seconds(lambda: channel.begin_sum(small)(), 200)
    return found


def _seconds(function: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        function()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def balanced(rounds: int) -> dict[str, list[float]]:
    """Seconds of a window on two ranks, one of which takes twice as long for a sample, by how it is shared out."""

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.005 * len(batch[0]) * (1 + dist.get_rank()))
        return cross_entropy(model(batch[0]), batch[1])

    times: dict[str, list[float]] = {"equal": [], "speed": []}
    for _ in range(rounds):
        for balance in times:
            dist.barrier()
            options = {"loss_fn": None, "training_step": slow, "balance": balance, "verify": False}
            times[balance].append(by_fit(tiny_mlp, 20, 20, 4, **options)[0] / 20)
    return times


TASKS = {"compared": compared, "told": told, "balanced": balanced}


def launch(task: str, size: int, rounds: int) -> Any:
    """Run a task on so many ranks; return what the first one has found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = {**os.environ, **{name: str(value) for name, value in where.items()}}
    command = [sys.executable, __file__, "--task", task, "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    found = [process.communicate()[0] for process in ranks]
    return json.loads(found[0])


def write_told(rounds: int) -> None:
    """Measure what ranks tell on one, two and four of them, and hold it beside what docs/scaling.md works out."""
    alone, cores = launch("told", 1, rounds), os.cpu_count() or 1
    told_rows, model_rows = [], []
    for size in (2, 4):
        found = launch("told", size, rounds)
        for name in MODELS:
            collectives, sent, waited = found[name]["per window"]
            parameters = found[name]["parameters"]
            told_rows.append([
                str(size), name, f"{parameters:,}", f"{collectives:.1f}", f"{sent - 4 * parameters:,.0f}",
                f"{waited * 1e3:.2f}", f"{found['exchange'] * 1e3:.2f}",
            ])  # fmt: skip
            buckets = 4 * parameters / (25 * 2**18)
            sums = buckets * found["sum of a bucket"] if buckets > 1 else found["small sum"]
            exchanges = collectives - max(1, math.ceil(buckets))
            worked_out = alone[name]["seconds"] * max(1, size / cores) + exchanges * found["exchange"] + sums
            measured = found[name]["seconds"]
            model_rows.append([
                str(size), name, f"{alone[name]['seconds'] * 1e3:.2f}", f"{exchanges * found['exchange'] * 1e3:.2f}",
                f"{sums * 1e3:.2f}", f"{worked_out * 1e3:.2f}", f"{measured * 1e3:.2f}", f"{measured / worked_out:.2f}",
            ])  # fmt: skip
    write_table(
        "ranks_told",
        "What each rank gives to collectives in a window, beside the gradients themselves (4 bytes a parameter).",
        [
            "ranks",
            "model",
            "parameters",
            "collectives",
            "bytes beside gradients",
            "ms in collectives",
            "ms an exchange",
        ],
        told_rows,
        threads=1,
    )
    write_table(
        "ranks_model",
        f"A window worked out from its parts, beside what was measured: that of one process, times ranks per core "
        f"where there are more (here {cores}), the exchanges, the sums. All in ms, gradients added up after the "
        f"backward; medians of {rounds} rounds.",
        ["ranks", "model", "one process", "exchanges", "sums", "worked out", "measured", "measured / worked out"],
        model_rows,
        threads=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--task", choices=list(TASKS))
    options = parser.parse_args()
    if options.task is not None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        join(torch.device("cpu"))
        print(json.dumps(TASKS[options.task](options.rounds)))
        return
    rows: list[list[str]] = []
    for name, times in launch("compared", options.ranks, options.rounds).items():
        for label, seconds in times.items():
            ratio = statistics.median(own / ddp for own, ddp in zip(seconds, times["DDP"], strict=True))
            rows.append([name, label, f"{statistics.median(seconds) * 1e3:.2f}", f"{ratio:.3f}"])
    write_table(
        "ranks",
        f"{options.ranks} ranks (gloo, one thread each), micro-batches of {MICRO_BATCH} samples; medians of "
        f"{options.rounds} rounds, the ratio that of the rounds' ratios.",
        ["model", "loop", "ms a window", "ratio to DDP"],
        rows,
        threads=1,
    )
    write_told(options.rounds)
    times = launch("balanced", 2, options.rounds)
    ratio = statistics.median(equal / speed for equal, speed in zip(times["equal"], times["speed"], strict=True))
    write_table(
        "ranks_balance",
        f"Two ranks, one of which takes twice as long for a sample; medians of {options.rounds} rounds. Equal shares "
        f"take {ratio:.2f} times as long as those by speed, of which the last 20 windows of 40 are timed.",
        ["balance", "ms a window"],
        [[name, f"{statistics.median(seconds) * 1e3:.1f}"] for name, seconds in times.items()],
        threads=1,
    )


if __name__ == "__main__":
    main()
