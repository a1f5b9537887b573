"""What windows cost beside the loop by hand, and what checkpoints, replays and restarts cost: stage e of ``gpu.py``."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import model_of
from gpu_checks import Row, row
from gpu_models import Case, adamw, device, gpt, images, is_small, timed, train
from overhead import MODELS, by_fit, by_hand
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.events import MemorySaving, Notice, OutOfMemory, Resumed, Saved, StepReport
from autoaccum.testing import oom_at

ROUNDS = 5


def _there(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return what makes the same model and data on the device."""

    def made() -> Any:
        model, data, loss_fn = make()
        return model.to(device()), tuple(part.to(device()) for part in data), loss_fn

    return made


def _of_case(case: Case) -> tuple[Callable[[], Any], int, int, int]:
    return lambda: (case.model(), case.data(64), case.loss_fn), 10, 3, 8


def beside_by_hand(name: str, aim: float) -> Row:
    """Alternate ``fit`` and the loop, which read the loss once a window."""
    models = {**MODELS, "GPT-2": _of_case(gpt(256)), "conv net": _of_case(images())}
    make, before, windows, pieces = models[name]
    made = _there(make)
    by_hand(made, 1, 2, pieces)
    by_fit(made, 1, 2, pieces)
    ratios, times, losses = [], [], []
    for _ in range(ROUNDS):
        hand, expected = by_hand(made, before, windows, pieces)
        own, loss = by_fit(made, before, windows, pieces)
        ratios.append(own / hand)
        times.append((own - hand) / windows)
        losses.append(abs(loss - expected) / abs(expected))
    # Rounding is all that may be between them: of kernels that add up in any order more than of the host's.
    if max(losses) > 1e-2:
        raise SystemExit(f"{name}: the losses are {max(losses):.1e} apart: not the same training")
    ratio = statistics.median(ratios)
    extra = statistics.median(times) * 1e6
    figures = f"{name}, windows of {pieces}: {ratio:.3f} of the loop by hand, {extra:+.0f} µs a window"
    return row(figures, f"{aim:.2f}", ratio <= aim)


def overhead() -> list[Row]:
    return [beside_by_hand("small GPT, cut" if is_small() else "GPT-2", 1.02), beside_by_hand("conv net", 1.02)]


def checkpoints() -> list[Row]:
    """How long training waits for one: until all of it is on the host."""
    case = gpt(256)
    if is_small():  # its toy has a state that is written in no time
        wide: dict[str, Any] = {"model": lambda: model_of(16)[0], "data": lambda n: (torch.ones(n, 512),) * 2}
        case = dataclasses.replace(case, loss_fn=mse_loss, **wide)

    def let_it_be_written(record: object) -> None:
        # The one before has to be on the disk first, which is no part of what is measured.
        if isinstance(record, Saved):
            time.sleep(0.3 if is_small() else 3.0)

    with tempfile.TemporaryDirectory() as folder:
        result, _ = train(
            case, 12, 32, micro_batch=16, run_dir=folder, checkpoint_every=2, callbacks=[let_it_be_written]
        )
        waits = [event.seconds for event in result.events if isinstance(event, Saved)]
        window = statistics.median(report.seconds for report in result.history)
    state_bytes = 3 * sum(p.nbytes for p in result.model.parameters())
    wait = statistics.median(waits[1:])
    rate = state_bytes / wait / 2**30
    figures = (
        f"{wait * 1e3:.1f} ms for {state_bytes / 2**20:.1f} MiB, {rate:.2f} GiB/s; a window takes {window * 1e3:.1f} ms"
    )
    aim = 0.1 if is_small() else 2.0
    return [row(figures, f"{aim} GiB/s", rate >= aim)]


def replay() -> list[Row]:
    """What an out-of-memory error costs: the part of a window that was run, and what it takes to put all back."""
    case, plains, extras, ooms = gpt(256), [], [], 0
    batch = case.data(64)
    for _ in range(3):
        events: list[Any] = []
        model = case.model().to(device())
        accumulator = autoaccum.Accumulator(
            model, adamw(model.parameters()), loss_fn=case.loss_fn, precision="bf16", micro_batch=16, verify=False,
            callbacks=[events.append],
        )  # fmt: skip

        def step(at: int | None, accumulator: Any = accumulator) -> tuple[float, int]:
            with oom_at(at) as fault:  # it counts operations, which takes time: so both are timed within one
                return timed(lambda: accumulator.step(batch)), fault.operations

        step(None)
        plain = [step(None) for _ in range(3)]
        failed, _ = step(plain[-1][1] // 2)
        plains.append(statistics.median(seconds for seconds, _ in plain))
        extras.append(failed - plains[-1])
        ooms += sum(isinstance(event, OutOfMemory) for event in events)
    plain_seconds, extra = statistics.median(plains), statistics.median(extras)
    figures = f"{extra:.2f} s for memory that runs out in the midst of a window of {plain_seconds:.2f} s"
    # Python's garbage is collected before it is run again, which takes the host a while, whatever the window.
    return [row(f"{figures}; {ooms} errors in 3 windows", "a window and 1 s", ooms == 3 and extra <= plain_seconds + 1)]


def memory_saving() -> list[Row]:
    """What windows take in which memory is saved: the first, which compares gradients, and the rest; in what memory."""
    size, rows, plain = 192 if is_small() else 16, [], 0.0
    # Beside what a model takes that calls ``checkpoint`` on its blocks itself.
    for mode in ("off", "by hand", "checkpoint", "offload", ["checkpoint", "offload"]):
        case, saving = (gpt(256, checkpoints=True), "off") if mode == "by hand" else (gpt(256), mode)
        result, watched = train(case, 14, 4 * size, micro_batch=size, memory_saving=saving, verify=False)
        seconds = [report.seconds for report in watched.history]
        settled = statistics.median(seconds[3:])
        plain = plain or settled
        told = [str(event)[:200] for event in result.events if isinstance(event, Notice)]
        figures = (
            f"memory_saving={mode}: {settled * 1e3:.0f} ms a window of {4 * size}, {settled / plain:.2f} of it plain, "
            f"{watched.history[-1].peak_bytes / 2**20:.0f} MiB; the first two took {seconds[0]:.2f}, {seconds[1]:.2f} s"
        )
        is_kept = saving == "off" or any(isinstance(event, MemorySaving) for event in result.events)
        rows.append(row("; ".join([figures, *told]), "the same to the bit", is_kept))
        print(rows[-1], flush=True)
    return rows


STEPS, KILLED = 12, (3, 7)


def run_in(folder: str) -> None:
    """Train to the end from wherever it is, with a line for each window; then say what it has come to."""
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()

    def tell(record: object) -> None:
        if isinstance(record, Resumed):
            print("resumed", time.perf_counter() - started, flush=True)
        elif isinstance(record, StepReport):
            print("window", record.step, flush=True)

    result, _ = train(gpt(256), STEPS, 32, micro_batch=12, run_dir=folder, checkpoint_every=1, callbacks=[tell])
    digest = hashlib.sha256()
    moments = [m for state in result.optimizer.state.values() for m in state.values() if isinstance(m, torch.Tensor)]
    for tensor in (*result.model.state_dict().values(), *moments):
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    print("digest", digest.hexdigest(), flush=True)


def _run(folder: str, kill_at: int | None) -> list[list[str]]:
    """Run it in a process of its own, which is killed after a window; return the words of its lines."""
    child = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.split())
        if lines[-1] == ["window", str(kill_at)]:
            os.kill(child.pid, signal.SIGKILL)
    child.wait()
    return lines


def resume() -> list[Row]:
    """A run that is killed twice is the one that never was."""
    with tempfile.TemporaryDirectory() as folder:
        never = _run(str(Path(folder) / "never"), None)
        killed = [_run(str(Path(folder) / "killed"), step) for step in (*KILLED, None)]
    resumed = [float(words[1]) for lines in killed for words in lines if words[0] == "resumed"]
    is_same = never[-1][0] == "digest" and never[-1] == killed[-1][-1]
    ended = "the same to the bit" if is_same else "another run"
    took = ", ".join(f"{seconds:.2f}" for seconds in resumed)
    figures = f"killed after windows {KILLED[0]} and {KILLED[1]} of {STEPS}: {ended}; goes on after {took} s"
    return [row(figures, "same to the bit", is_same and len(resumed) == len(KILLED))]


if __name__ == "__main__":
    run_in(sys.argv[1])
