"""A device that others use too, and cold starts beside the peers' finders: stage d of ``gpu.py``."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from typing import Any

import torch
from gpu_checks import Row, not_run, row
from gpu_models import gpt, is_cuda, is_small, total_bytes, train
from time_to_train import CONTESTANTS, HAND, ON_DEVICE, in_a_process_of_its_own

from autoaccum.events import StepReport

TENANT = (
    "import sys, torch; device = torch.accelerator.current_accelerator(); torch.empty(1, device=device); "
    "free, _ = torch.accelerator.get_memory_info(); "
    "kept = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device=device); "
    "torch.accelerator.synchronize(); print('in', flush=True); input()"
)
WARM, HELD, WINDOWS = 15, 15, 60


class Tenant:
    """Another process: after some windows it leaves so many bytes to this one, and after others it is gone."""

    def __init__(self, leaves_bytes: int) -> None:
        self._bytes, self._process = leaves_bytes, None

    def __call__(self, record: object) -> None:
        if not isinstance(record, StepReport):
            return
        if record.step == WARM:
            torch.accelerator.empty_cache()  # between windows: what is cached nobody else could take
            leaves = self._bytes - torch.accelerator.memory_reserved()
            self._process: Any = subprocess.Popen(
                [sys.executable, "-c", TENANT, str(leaves)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            if self._process.stdout.readline() != "in\n":
                raise RuntimeError("the tenant found no memory")
        elif record.step == WARM + HELD:
            self.leave()

    def leave(self) -> None:
        if self._process is not None:
            self._process.communicate("\n")
            self._process = None


def tenant() -> list[Row]:
    """Half of the device goes and comes back."""
    effective_batch = 192 if is_small() else 1024
    # The stand-in is far larger than what is trained there: half of what the run may use is left to it.
    share = gpt().share * 1.33 if is_small() else None
    other = Tenant(int(total_bytes() * (share or 1.0) / 2))
    try:
        result, watched = train(gpt(256), WINDOWS, effective_batch, callbacks=[other], memory_limit=share)
    finally:
        other.leave()
    sizes = [max(report.micro_batches) for report in watched.history]
    before, during = sizes[WARM - 1], min(sizes[WARM : WARM + HELD])
    back = next((n for n, size in enumerate(sizes[WARM + HELD :]) if size >= 0.9 * before), None)
    lost = WINDOWS * effective_batch - result.num_samples
    returned = "never back" if back is None else f"back after {back} windows"
    replays = sum(report.replays for report in watched.history)
    return [
        row(f"{lost} samples lost, {replays} replays", "0 lost", lost == 0),
        row(
            f"micro-batches of {before}, {during} while half was gone, {sizes[-1]} at the end; {returned}",
            "back within 20 windows",
            back is not None and back <= 20,
        ),
    ]


NEEDED = {"Lightning": "lightning", "Accelerate": "accelerate", "Transformers": "accelerate"}


def _missing(name: str) -> str | None:
    """Return why a contestant cannot run here."""
    package = NEEDED.get(name.split()[0])
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    # On the stand-in peers would train on the host, whose memory nothing limits.
    return "needs CUDA" if package is not None and not is_cuda() else None


OURS = "autoaccum fit"


def cold_start() -> list[Row]:
    """Seconds from nothing known to the same samples trained, searches included."""
    model = "small GPT" if is_small() else "GPT-2"
    setting = ON_DEVICE[model]
    spec = {
        "model": model, "kind": "device", "limit_bytes": int(gpt().share * 0.9 * total_bytes()), "threads": 2,
        "quick": False, "short": False, "micro_batch": setting.room,
    }  # fmt: skip
    missing = {name: why for name in CONTESTANTS if (why := _missing(name))}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS if name not in missing}
    for turn in range(3 if is_small() else 1):  # a card is lent by the minute
        for name in list(results)[:: 1 if turn % 2 == 0 else -1]:
            if results[name] and "failed" in results[name][-1]:
                continue  # it would again
            results[name].append(in_a_process_of_its_own({**spec, "contestant": name}, 60))
            print(name, results[name][-1], flush=True)
    ours, rows = results[OURS], []
    for name, found in results.items():
        shown = f"by hand in micro-batches of {setting.room}" if name == HAND else name
        if "failed" in found[-1]:
            rows.append(Row(figures=shown, aim="", verdict=found[-1]["failed"]))
            continue
        seconds, last = statistics.median(one["seconds"] for one in found), found[-1]
        figures = f"{shown}: {seconds:.2f} s, micro-batch {last['micro_batch']}, {last['ooms']} out-of-memory errors"
        ratios = [own["seconds"] / one["seconds"] for own, one in zip(ours, found, strict=False) if "seconds" in own]
        if name == OURS or not ratios:
            rows.append(row(f"{figures}, for {setting.samples * setting.epochs} samples", "all are trained on", True))
            continue
        ratio, aim = statistics.median(ratios), 1.02 if name == HAND else 1.0
        rows.append(row(f"{figures}; autoaccum takes {ratio:.3f} of that", f"{aim:.2f}", ratio <= aim))
    return rows + [not_run(f"{name}: {why}") for name, why in missing.items()]
