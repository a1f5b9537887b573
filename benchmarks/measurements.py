"""What it costs that a run measures its own exactness: one measurement, and all of them as a share of a run.

    python benchmarks/measurements.py [--rounds 5] [--write]

A run of 100 windows, each cut into micro-batches, is trained several times; what its examiner does is timed where it is
done. Its first window is measured by gradients, windows 2, 3, 10 and 100 by losses, and all of them are
looked at. Of 10,000 windows two more are measured, and 180 more are looked at: their share is computed from that.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from overhead import MICRO_BATCH, small_gpt, tiny_mlp
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import StepReport
from autoaccum.step.verification import Examiner

WINDOWS = 100
MEASURED = (1, 2, 3, 10, 100)
MORE_MEASURED, MORE_LOOKS = 2, 180


def conv_net() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    layers = [layer for width in (16, 32, 64) for layer in (nn.LazyConv2d(width, 3, stride=2), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 32, 32))
    return model, (torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))), cross_entropy


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "tiny MLP": (tiny_mlp, 8),
    "conv net": (conv_net, 8),
    "small GPT": (small_gpt, 4),
}
"""(model, micro-batches of a window)"""


class Stopwatch:
    """Adds up the seconds that functions take, by the window in which they are called."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.window = 1

    def around(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent = sign * (time.perf_counter() - started)
                self.seconds[self.window] = self.seconds.get(self.window, 0.0) + spent

        return timed


def run(make: Callable[[], Any], pieces: int) -> tuple[list[float], list[float]]:
    """(seconds of each window, seconds of it that its examination took)"""
    watch, ends = Stopwatch(), [time.perf_counter()]
    forward = Examiner.forward

    def looked(self: Examiner, *arguments: Any) -> torch.Tensor:
        # The forward itself is the window's.
        plain = self._transaction.plain_forward
        self._transaction.plain_forward = watch.around(plain, -1)  # type: ignore[method-assign]
        try:
            return forward(self, *arguments)
        finally:
            del self._transaction.plain_forward

    def ended(record: Any) -> None:
        if isinstance(record, StepReport):
            ends.append(time.perf_counter())
            watch.window += 1

    kept = Examiner.begin_attempt, Examiner.examine, Examiner.forward
    Examiner.begin_attempt, Examiner.examine = watch.around(kept[0]), watch.around(kept[1])  # type: ignore[method-assign]
    Examiner.forward = watch.around(looked)  # type: ignore[method-assign]
    try:
        model, data, loss_fn = make()
        autoaccum.fit(
            model,
            data,
            loss_fn=loss_fn,
            effective_batch=MICRO_BATCH * pieces,
            micro_batch=MICRO_BATCH,
            steps=WINDOWS,
            device="cpu",
            progress=False,
            callbacks=[ended],
        )
    finally:
        Examiner.begin_attempt, Examiner.examine, Examiner.forward = kept  # type: ignore[method-assign]
    windows = [after - before for before, after in itertools.pairwise(ends)]
    return windows, [watch.seconds.get(number, 0.0) for number in range(1, WINDOWS + 1)]


def row(name: str, runs: list[tuple[list[float], list[float]]]) -> list[object]:
    plain = statistics.median(
        all_of[number - 1] - own[number - 1]
        for all_of, own in runs
        for number in range(1, WINDOWS + 1)
        if number not in MEASURED
    )
    spent = [statistics.median(own[number] for _, own in runs) for number in range(WINDOWS)]
    look = statistics.median(spent[number - 1] for number in range(1, WINDOWS + 1) if number not in MEASURED)
    losses = statistics.median(spent[number - 1] for number in MEASURED[1:])
    of_100 = sum(spent)
    of_10_000 = of_100 + MORE_MEASURED * losses + MORE_LOOKS * look
    return [
        name,
        f"{plain * 1e3:.1f}",
        f"{spent[0] * 1e3:.1f}",
        f"{spent[0] / plain:.2f}",
        f"{losses * 1e3:.1f}",
        f"{look * 1e6:.0f}",
        f"{of_100 / (WINDOWS * plain):.2%}",
        f"{of_10_000 / (10_000 * plain):.3%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="the models whose name contains this")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = [
        "model", "ms a window", "ms by gradients", "in windows", "ms by losses", "µs a look", "of 100 windows",
        "of 10,000 windows",
    ]  # fmt: skip
    chosen = {name: found for name, found in MODELS.items() if options.only in name}
    runs: dict[str, list[Any]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, (make, pieces) in chosen.items():
            runs[name].append(run(make, pieces))
    rows = [row(name, of_model) for name, of_model in runs.items()]
    text = (
        f"What the measurements of a run take, in windows of {MICRO_BATCH} samples a micro-batch; medians of "
        f"{options.rounds} runs of {WINDOWS} windows. By gradients: six samples whole and in three cuts, and the "
        "losses of up to twelve others. By losses: six samples, whole and in one cut."
    )
    if options.write:
        write_table("measurements", text, header, rows)
    else:
        for line in (header, *rows):
            print(*line, sep=" | ")


if __name__ == "__main__":
    main()
