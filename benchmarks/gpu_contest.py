"""Throughput beside the best fixed micro-batch, and memory used below a limit: stages b and c of ``gpu.py``.

Each contestant is a process that stays and trains windows when it is told to: so they alternate on one card, each
within its share of it, and neither sees what the other one has compiled or keeps in its cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_allocator import backend
from gpu_checks import Row, row
from gpu_models import (
    Case,
    adamw,
    device,
    fraction,
    gpt,
    images,
    runs_out,
    timed,
    total_bytes,
    window_by_hand,
)

import autoaccum
from autoaccum.events import OutOfMemory, Planned

CASES: dict[str, Callable[[], Case]] = {"gpt": gpt, "conv": images}
ROUNDS = 7
MOST_WINDOWS = 60
"""In which a search has to settle."""


def _windows(case: Case) -> list[Any]:
    """Two windows, on the device."""
    data = case.data(2 * case.effective_batch)
    return [tuple(part.to(device()).chunk(2)[index] for part in data) for index in range(2)]


def _is_compiled(how: str) -> bool:
    return how == "compiled"


class ByHand:
    """The loop of somebody who tries every size and keeps the fastest."""

    def __init__(self, case: Case, how: str) -> None:
        self._case, self._how = case, how
        self._model = case.model().to(device())
        self._optimizer, self._batches = adamw(self._model.parameters()), _windows(case)
        self._called: Any = self._model

    def _use(self, size: int) -> None:
        self._size = size
        if _is_compiled(self._how):
            # For this size alone, which is the fastest code that there is for it.
            torch.compiler.reset()
            self._called = torch.compile(self._model, backend=backend(), dynamic=False)

    def _train(self, windows: int) -> None:
        for number in range(windows):
            batch = self._batches[number % 2]
            window_by_hand(self._case, self._called, self._optimizer, batch, self._size)

    def begin(self) -> dict[str, Any]:
        rates: dict[int, float] = {}
        # To compile for a size takes half a minute: there every second one has to do.
        for size in self._case.sizes[1::2] if _is_compiled(self._how) else self._case.sizes:
            self._use(size)
            if runs_out(lambda: self._train(1)):
                self._optimizer.zero_grad()
                break
            seconds = statistics.median(timed(lambda: self._train(1)) for _ in range(3))
            rates[size] = self._case.effective_batch / seconds
        # What barely fitted once may not a second time, with an allocator's pieces in other places.
        for size in sorted(rates, key=rates.__getitem__, reverse=True):
            self._use(size)
            torch.accelerator.empty_cache()
            if not runs_out(lambda: self._train(2)):
                break
            self._optimizer.zero_grad()
        return {"size": self._size, "rates": rates}

    def windows(self, windows: int) -> float:
        return timed(lambda: self._train(windows))


class ByAutoaccum:
    """The same in five lines, which are told no size."""

    def __init__(self, case: Case, how: str) -> None:
        model = case.model().to(device())
        called: Any = torch.compile(model, backend=backend()) if _is_compiled(how) else model
        self._events: list[Any] = []
        self._accumulator = autoaccum.Accumulator(
            called,
            adamw(model.parameters()),
            loss_fn=case.loss_fn,
            precision=case.precision,
            callbacks=[self._events.append],
        )
        self._batches = _windows(case)

    def _train(self, windows: int) -> None:
        for number in range(windows):
            self._accumulator.step(self._batches[number % 2]).item()

    def begin(self) -> dict[str, Any]:
        searched = 0
        while searched < MOST_WINDOWS and not any(isinstance(event, Planned) for event in self._events):
            self._train(1)
            searched += 1
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        self._train(3)
        plans = [event for event in self._events if isinstance(event, Planned)]
        return {"windows": searched, "error": plans[-1].prediction_error if plans else None}

    def windows(self, windows: int) -> float:
        return timed(lambda: self._train(windows))

    def end(self) -> dict[str, Any]:
        return {
            "ooms": sum(isinstance(event, OutOfMemory) for event in self._events),
            "sizes": list(self._accumulator.micro_batches),
            "peak": torch.accelerator.max_memory_reserved(),
        }


def serve(who: str, name: str, how: str) -> None:
    """Do what is asked for, line by line: ``begin``, ``windows 3``, ``end``."""
    warnings.simplefilter("ignore")
    case = CASES[name]()
    with fraction(case.share):
        contestant = {"hand": ByHand, "autoaccum": ByAutoaccum}[who](case, how)
        for line in sys.stdin:
            method, *arguments = line.split()
            print("answer", json.dumps(getattr(contestant, method)(*map(int, arguments))), flush=True)


class _Process:
    def __init__(self, *arguments: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, what: str) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(what, file=self._child.stdin)
        for line in self._child.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise SystemExit(f"a contestant ended with {self._child.wait()}")

    def end(self) -> None:
        self._child.communicate()


def throughput(name: str, how: str) -> list[Row]:
    """Alternate the two, after each has found its size."""
    case = CASES[name]()
    hand, own = _Process("hand", name, how), _Process("autoaccum", name, how)
    best, found = hand.ask("begin"), own.ask("begin")
    print(best, found, flush=True)
    ratios, rates = [], []
    for turn in range(ROUNDS):
        seconds = {}
        for process in (hand, own) if turn % 2 else (own, hand):
            process.ask("windows 1")
            seconds[process] = process.ask("windows 2")
        ratios.append(seconds[hand] / seconds[own])
        rates.append(2 * case.effective_batch / seconds[own])
    last = own.ask("end")
    hand.end()
    own.end()
    ratio, ooms, error = statistics.median(ratios), last["ooms"], found["error"]
    plan = f"micro-batches of {max(last['sizes'])}, by hand {best['size']}, the best of {len(best['rates'])} that fit"
    speed = f"{ratio:.1%} of the best by hand; {statistics.median(rates):.1f} samples/s, {plan}"
    # Near-equal micro-batches: what they leave of the share may be nearly one more of them, cut in two.
    filled = last["peak"] / (case.share * total_bytes())
    return [
        row(speed, "99 %", ratio >= 0.99),
        row(f"{ooms} out-of-memory errors; settled after {found['windows']} windows", "at most 1", ooms <= 1),
        row(
            "no size was predicted" if error is None else f"prediction error {abs(error):.1%}",
            "5 %",
            abs(error or 0) <= 0.05,
        ),
        row(f"peak of settled windows {filled:.1%} of the share", "100 %", filled <= 1),
    ]


def memory_used(name: str) -> list[Row]:
    """How much of a limit the largest micro-batch takes that a probe finds, beside the largest that there is."""
    case = CASES[name]()
    with fraction(case.share):
        limit = torch.get_device_module().get_per_process_memory_fraction() * total_bytes()
        report = autoaccum.probe(
            case.model(), case.data(64), loss_fn=case.loss_fn, optimizer=adamw, precision=case.precision, headroom=0.0
        )
        largest = report.max_micro_batch
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        model = case.model().to(device())
        optimizer = adamw(model.parameters())

        def once(size: int) -> None:
            batch = tuple(part.to(device()) for part in case.data(size))
            window_by_hand(case, model, optimizer, batch, size)  # type: ignore[arg-type]

        once(1)  # which makes the optimizer's state
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        if runs_out(lambda: once(largest)):
            return [row(f"a probe's {largest} samples do not fit", "95 %", False)]
        peak = torch.accelerator.max_memory_reserved()
        fits = largest
        for percent in range(101, 116):
            size = max(largest + 1, largest * percent // 100)
            if runs_out(lambda size=size: once(size)):  # type: ignore[misc]
                break
            fits = max(fits, size)
    trials = ", ".join(str(trial.micro_batch) for trial in report.trials)
    return [
        row(
            f"a probe's {largest} samples (after {trials}) take {peak / limit:.1%} of the limit",
            "95 %",
            peak >= 0.95 * limit,
        ),
        row(f"{largest / fits:.1%} of the {fits} that fit by hand", "95 %", largest >= 0.95 * fits),
    ]


if __name__ == "__main__":
    serve(*sys.argv[1:])
