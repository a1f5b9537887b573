"""What ``autoaccum.fit`` costs beside the same loop written by hand: µs a window, and the ratio of the times.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --before ../an/older/checkout

Both train the same model on the same windows, cut into the same micro-batches, with the same optimizer, and read the
loss once per window, as a loop does that shows it. What is timed are windows that nothing is measured of: the first
hundred are looked at, some of them run again in part, and left out (``measurements.py`` times them). They alternate in
one process; a figure is the median over the rounds. Their last losses must agree, or nothing is written. With
``--before`` an older version of the package takes turns too: it and the present one then run in a process of their own
each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.testing import manual_clock

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import ALPHABET, CONTEXT, CharGPT
from char_gpt import loss_fn as gpt_loss

MICRO_BATCH = 8


def tiny_mlp() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, (torch.randn(4096, 32), torch.randint(0, 10, (4096,))), cross_entropy


def small_gpt() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, len(ALPHABET), (512, CONTEXT + 1))
    return CharGPT(dropout=0.0), (ids[:, :-1], ids[:, 1:]), gpt_loss


def by_hand(make: Callable[[], Any], before: int, windows: int, pieces: int) -> tuple[float, float]:
    """(seconds after the first windows, last loss) of the loop that a careful person writes."""
    model, (inputs, targets), loss_fn = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    size = MICRO_BATCH * pieces
    order = torch.arange(len(inputs), device=inputs.device)
    loss = 0.0
    model.train()
    for window in range(before + windows):
        if window == before:
            started = time.perf_counter()
        start = window * size % len(inputs)
        optimizer.zero_grad()
        total = torch.zeros((), device=inputs.device)
        for indices in order[start : start + size].split(MICRO_BATCH):
            micro_loss = loss_fn(model(inputs[indices]), targets[indices]) / pieces
            micro_loss.backward()
            total += micro_loss.detach()
        optimizer.step()
        loss = total.item()
    return time.perf_counter() - started, loss


def by_fit(
    make: Callable[[], Any], before: int, windows: int, pieces: int, progress: bool = False, **options: Any
) -> tuple[float, float]:
    """The same through ``fit``."""
    model, data, loss_fn = make()
    stamps: list[float] = []

    def stamp(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport):
            stamps.append(time.perf_counter())

    result = autoaccum.fit(
        model,
        data,
        effective_batch=MICRO_BATCH * pieces,
        micro_batch=MICRO_BATCH,
        loss_fn=loss_fn,
        steps=before + windows,
        shuffle=False,
        device=data[0].device,
        progress=progress,
        callbacks=[stamp],
        **options,
    )
    return stamps[-1] - stamps[before - 1], result.history[-1].loss


def by_fit_in_directory(make: Callable[[], Any], before: int, windows: int, pieces: int) -> tuple[float, float]:
    """With records, and the checkpoint that is written after the first window."""
    with tempfile.TemporaryDirectory() as folder:
        return by_fit(make, before, windows, pieces, run_dir=folder)


def calls(make: Callable[[], Any], before: int, pieces: int) -> float:
    """Count the calls of this package's functions in a window, which no load disturbs."""
    package, counted, found, seen = str(Path(autoaccum.__file__).parent), 10, 0, 0
    model, data, loss_fn = make()

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(package)

    def begin_and_end(record: Any) -> None:
        nonlocal seen
        seen += isinstance(record, autoaccum.StepReport)
        if isinstance(record, autoaccum.StepReport):
            sys.setprofile(count if before <= seen < before + counted else None)

    with manual_clock():  # which stands still: no window has a look at the memory, as fifty a second have
        autoaccum.fit(
            model,
            data,
            effective_batch=MICRO_BATCH * pieces,
            micro_batch=MICRO_BATCH,
            loss_fn=loss_fn,
            steps=before + counted,
            progress=False,
            callbacks=[begin_and_end],
        )
    return found / counted


MODELS: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "tiny MLP": (tiny_mlp, 1, 1000, 1),
    "tiny MLP, cut": (tiny_mlp, 110, 200, 8),
    # Each window of a hundred is looked at, which is nothing beside it; none of these is measured.
    "small GPT, cut": (small_gpt, 10, 3, 8),
}
"""(model, windows to leave out, windows to time, micro-batches in each)"""


Contestant = Callable[[str, int, int], tuple[float, float]]
"""(model, windows to leave out, windows to time) -> (seconds, last loss)"""


class InProcess:
    """``by_fit`` with the package of a checkout, in a process that stays."""

    def __init__(self, checkout: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, "--serve", "--threads", str(threads)]
        self._child = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __call__(self, name: str, before: int, windows: int) -> tuple[float, float]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(json.dumps([name, before, windows]), file=self._child.stdin)
        seconds, loss = json.loads(self._child.stdout.readline())
        return seconds, loss


def serve() -> None:
    for line in sys.stdin:
        name, before, windows = json.loads(line)
        make, *_, pieces = MODELS[name]
        print(json.dumps(by_fit(make, before, windows, pieces)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--before", type=Path, help="a checkout of an older version, to take turns with")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve()
        return

    def fitted(run: Callable[..., tuple[float, float]] = by_fit, **arguments: Any) -> Contestant:
        return lambda name, before, windows: run(MODELS[name][0], before, windows, MODELS[name][3], **arguments)

    contestants: dict[str, Contestant] = {
        "fit": fitted(),
        "fit, progress bar": fitted(progress=True),
        "fit, run_dir": fitted(by_fit_in_directory),
        "fit, noise scale": fitted(noise_scale=True),
    }
    if options.before is not None:
        contestants["fit before, own process"] = InProcess(options.before.resolve(), options.threads)
        contestants["fit now, own process"] = InProcess(Path(autoaccum.__file__).parents[1], options.threads)
    rows = []
    for name, (make, before, windows, pieces) in MODELS.items():
        by_hand(make, 1, 2, pieces)  # import and warm up whatever is lazy
        for run in contestants.values():
            run(name, 1, 2)
        times: dict[str, list[float]] = {"hand": [], **{label: [] for label in contestants}}
        ratios: dict[str, list[float]] = {label: [] for label in contestants}
        for _ in range(options.rounds):
            hand, expected = by_hand(make, before, windows, pieces)
            times["hand"].append(hand)
            for label, run in contestants.items():
                seconds, loss = run(name, before, windows)
                if abs(loss - expected) > 1e-5 * abs(expected):
                    raise SystemExit(f"{name}: the loss is {loss}, by hand {expected}: not the same training")
                times[label].append(seconds)
                ratios[label].append(seconds / hand)
        median = {label: statistics.median(values) / windows * 1e6 for label, values in times.items()}
        rows.append([name, "by hand", f"{median['hand']:.1f}", "", "1.00"])
        for label, values in ratios.items():
            extra = median[label] - median["hand"]
            rows.append([name, label, f"{median[label]:.1f}", f"{extra:+.1f}", f"{statistics.median(values):.3f}"])
    one, eight = calls(tiny_mlp, 150, 1), calls(tiny_mlp, 150, 8)
    write_table(
        "overhead",
        f"Windows of one micro-batch of {MICRO_BATCH} samples, and cut into 8; medians of {options.rounds} rounds. The "
        "first windows, which are looked at and measured, are left out: 110 of the tiny MLP's that are cut, 10 of the "
        "small GPT's. "
        f"A settled window of the tiny MLP calls {one:.0f} functions of this package; cut into 8, {eight:.0f}.",
        ["model", "loop", "µs a window", "beside by hand", "ratio"],
        rows,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
