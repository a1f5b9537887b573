"""What a run from a cold start takes beside the best fixed plan, found by trying them all: eight works, two devices.

    python benchmarks/cold_start.py                        # both tables
    python benchmarks/cold_start.py --part device

On the stand-in device (see ``tests/standin``) time is a virtual clock that launches move and that the host waits for
where it has to: a parallel device, without the noise of a machine. There each work is trained with as much memory as it
may want, and with about as much as half of a window needs, by a fixed micro-batch of every near-equal cut and by
``micro_batch="auto"``. On the CPU the loop by hand at the best of the same cuts takes turns with ``fit``, each in a
process of its own; its seconds are those of the machine. Every run begins knowing nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import OutOfMemory
from autoaccum.memory import clock

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import standin

WINDOWS = 100
FIXED, SETTLED = 3, 24
"""Windows that are run on the virtual clock of a fixed plan, and of one that is looked for: all that follow take as
long as the last of them."""
CUTS = 8
"""Fixed plans of at most so many micro-batches are tried, and some of more."""
COSTS = {"the host is slow": (1e-5, 1e-11), "both count": (1e-5, 1e-9), "the device is slow": (1e-6, 1e-8)}
"""Seconds of a launch on the host, and for each number that is read or written on the device."""
CLASSES = 10


class Work(NamedTuple):
    """Something to train."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one sample."""
    effective_batch: int


def mlp(inputs: int, width: int, depth: int) -> nn.Sequential:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, CLASSES))


def conv_net(width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES)),
    )


class Encoder(nn.Module):
    """Classifies a sequence by the mean of what a transformer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(inputs).mean(1))


class Recurrent(nn.Module):
    """Classifies a sequence by the last state of a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back, self.head = nn.Linear(32, 128), nn.Linear(128, 128), nn.Linear(128, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = inputs.new_zeros(len(inputs), 128)
        for step in inputs.unbind(1):
            state = torch.tanh(self.into(step) + self.back(state))
        return self.head(state)


WORKS = {
    "small MLP": Work(lambda: mlp(32, 64, 2), (32,), 32768),
    "deep MLP": Work(lambda: mlp(32, 128, 12), (32,), 16384),
    "wide MLP": Work(lambda: mlp(256, 512, 2), (256,), 4096),
    "autoencoder": Work(lambda: nn.Sequential(mlp(2048, 128, 1)[:-1], nn.Linear(128, 2048), nn.GELU()), (2048,), 2048),
    "conv net": Work(lambda: conv_net(16), (3, 24, 24), 384),
    "wide conv net": Work(lambda: conv_net(32), (3, 16, 16), 300),
    "encoder": Work(Encoder, (32, 64), 320),
    "recurrent": Work(Recurrent, (16, 32), 4096),
}


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # The autoencoder's outputs are as many classes as it has inputs.
    return cross_entropy(outputs, targets)


def task(name: str, windows: int) -> tuple[nn.Module, torch.utils.data.TensorDataset, int]:
    """(model, data of so many windows, effective batch)"""
    work = WORKS[name]
    torch.manual_seed(0)
    samples = work.effective_batch * windows
    data = torch.utils.data.TensorDataset(torch.randn(samples, *work.shape), torch.randint(0, CLASSES, (samples,)))
    return work.make(), data, work.effective_batch


class Run(NamedTuple):
    """What a run came to."""

    seconds: float
    """Of all windows, from the cold start on."""
    micro_batch: int
    ooms: int
    reserved_bytes: int


def on_device(name: str, costs: tuple[float, float], micro_batch: Any, limit_bytes: int | None, windows: int) -> Run:
    """Train on the stand-in, by its clock."""
    standin.load()
    torch.set_num_threads(1)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    model, data, effective_batch = task(name, min(windows, 4))
    options = {} if limit_bytes is None else {"memory_limit": limit_bytes}
    with standin.VirtualClock(*costs) as device, clock.using(device):
        ends = [device.now()]
        result = autoaccum.fit(
            model, data, loss_fn=loss_fn, effective_batch=effective_batch, micro_batch=micro_batch, device="standin",
            callbacks=[lambda record: ends.append(device.now()) if isinstance(record, autoaccum.StepReport) else None],
            verify=False, cache=False, progress=False, steps=windows, **options,
        )  # fmt: skip
    seconds = ends[-1] - ends[0] + (WINDOWS - windows) * (ends[-1] - ends[-2])
    ooms = sum(isinstance(event, OutOfMemory) for event in result.events)
    return Run(seconds, result.plan.sizes[0], ooms, torch.accelerator.max_memory_reserved())


def on_cpu(name: str, micro_batch: Any, windows: int, by_hand: bool) -> Run:
    """Train on the CPU, by the machine's clock."""
    torch.set_num_threads(1)
    model, data, effective_batch = task(name, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = data.tensors
    loss_fn(model(inputs[:1]), targets[:1]).backward()  # libraries load at the first use, whoever makes it
    optimizer.zero_grad()
    started = time.perf_counter()
    if not by_hand:
        result = autoaccum.fit(
            model, data, loss_fn=loss_fn, effective_batch=effective_batch, micro_batch=micro_batch, steps=windows,
            optimizer=optimizer, verify=False, cache=False, progress=False, device="cpu",
        )  # fmt: skip
        return Run(time.perf_counter() - started, result.plan.sizes[0], 0, 0)
    model.train()
    for window in range(windows):
        if window % 4 == 0:
            order = torch.randperm(len(inputs))
        begin = window % 4 * effective_batch
        optimizer.zero_grad()
        total = torch.zeros(())
        for indices in order[begin : begin + effective_batch].split(micro_batch):
            loss = loss_fn(model(inputs[indices]), targets[indices]) * (len(indices) / effective_batch)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        total.item()
    return Run(time.perf_counter() - started, micro_batch, 0, 0)


def process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def is_hopeless(seconds: list[float]) -> bool:
    """Whether the last three plans are clearly slower than one before: those of smaller micro-batches are too."""
    return len(seconds) > 3 and min(seconds[-3:]) > 1.3 * min(seconds)


def alone(*arguments: Any) -> Run:
    """Train on the CPU in a process of its own."""
    with process() as child:
        return child.submit(on_cpu, *arguments).result()


def cuts(effective_batch: int) -> list[int]:
    """The micro-batches of near-equal cuts, the largest first: of few, and of ever twice as many."""
    parts = [*range(1, CUTS + 1), *(CUTS * 2**power for power in range(1, int(math.log2(effective_batch / CUTS)) + 1))]
    return list(dict.fromkeys(-(-effective_batch // count) for count in parts))


def device_rows(only: list[str]) -> tuple[list[list[object]], dict[str, list[float]]]:
    rows, ratios = [], {costs: [] for costs in COSTS}
    for name in only:
        with process() as child:

            def run(*arguments: Any, child: ProcessPoolExecutor = child, name: str = name) -> Run:
                return child.submit(on_device, name, *arguments).result()

            # A little more than half a window takes, so that no plan of two fails by the headroom alone.
            half = run(COSTS["both count"], int(0.55 * WORKS[name].effective_batch), None, FIXED)
            for limit_bytes in (None, int(half.reserved_bytes * 1.06)):
                for costs, of_clock in COSTS.items():
                    if limit_bytes is not None and costs != "both count":
                        continue
                    fixed: dict[int, float] = {}
                    for size in cuts(WORKS[name].effective_batch):
                        if is_hopeless(list(fixed.values())):
                            break
                        tried = run(of_clock, size, limit_bytes, FIXED)
                        if not tried.ooms and tried.micro_batch == size:
                            fixed[size] = tried.seconds
                    auto = run(of_clock, "auto", limit_bytes, SETTLED)
                    best = min(fixed, key=fixed.__getitem__)
                    ratios[costs].append(auto.seconds / fixed[best])
                    memory = "as wanted" if limit_bytes is None else f"{limit_bytes / 2**20:.0f} MiB"
                    spread = max(fixed.values()) / fixed[best]
                    figures = [best, auto.micro_batch, f"{ratios[costs][-1]:.3f}", auto.ooms, f"{spread:.2f}"]
                    rows.append([name, memory, costs, *figures])
                    print(*rows[-1], flush=True)
    return rows, ratios


def cpu_rows(only: list[str], rounds: int) -> tuple[list[list[object]], list[float]]:
    rows, ratios = [], []
    for name in only:
        quick: dict[int, float] = {}
        for size in cuts(WORKS[name].effective_batch):
            if not is_hopeless(list(quick.values())):
                quick[size] = alone(name, size, 10, True).seconds
        # The three that look best, for a few windows tell little.
        near = sorted(quick, key=quick.get)[:3]
        again = {size: min(quick[size], alone(name, size, 20, True).seconds / 2) for size in near}
        best = min(again, key=again.get)
        pairs = []
        for turn in range(rounds):
            runs = [(best, WINDOWS, True), ("auto", WINDOWS, False)]
            timed = {
                by_hand: alone(name, size, windows, by_hand) for size, windows, by_hand in runs[:: 1 - 2 * (turn % 2)]
            }
            pairs.append((timed[True].seconds, timed[False].seconds, timed[False].micro_batch))
        chosen = statistics.median_low(size for _, _, size in pairs)
        ratios.append(statistics.median(auto / hand for hand, auto, _ in pairs))
        rows.append(
            [
                name,
                "as wanted",
                "CPU",
                best,
                chosen,
                f"{ratios[-1]:.3f}",
                0,
                f"{max(quick.values()) / min(quick.values()):.2f}",
            ]
        )
        print(*rows[-1], flush=True)
    return rows, ratios


HEADER = ["work", "memory", "where", "best by hand", "chosen", "ratio", "OOMs", "slowest / fastest cut"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["device", "cpu"], help="one of the two tables")
    parser.add_argument("--only", action="append", choices=list(WORKS), help="without writing a table")
    parser.add_argument("--rounds", type=int, default=3, help="on the CPU")
    arguments = parser.parse_args()
    only = arguments.only or list(WORKS)
    begin = f"{WINDOWS} windows from a cold start, beside the best fixed micro-batch of near-equal cuts that fit"
    if arguments.part != "cpu":
        rows, ratios = device_rows(only)
        means = [f"{costs}: {statistics.mean(of):.3f}, worst {max(of):.3f}" for costs, of in ratios.items()]
        print("; ".join(means))
        if arguments.only is None:
            text = f"{begin}, on the stand-in device by its virtual clock. Mean of the ratios, {'; '.join(means)}."
            write_table("cold_start", text, HEADER, rows, threads=1)
    if arguments.part != "device":
        rows, of = cpu_rows(only, arguments.rounds)
        mean = f"{statistics.mean(of):.3f}, worst {max(of):.3f}"
        print(mean)
        if arguments.only is None:
            text = f"{begin}, by hand, on the CPU: medians of {arguments.rounds} rounds that take turns. Mean {mean}."
            write_table("cold_start_cpu", text, HEADER, rows, threads=1)


if __name__ == "__main__":
    main()
