"""A run in a few numbers, computed from its records: the table at the head of its report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum._units import format_bytes
from autoaccum.memory import clock
from autoaccum.reporting.amounts import format_rate, format_seconds
from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import counted, end_text, is_scheduled, metrics_text
from autoaccum.runs.manifests import manifests
from autoaccum.runs.oom_files import oom_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best validation of a run, by the metric of ``KeepBest``, or else by the loss."""

    metric: str
    """``"loss"``, or the name of a metric."""
    value: float
    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A line of code or a command that continues with a run, and the checkpoint that it reads."""

    text: str
    effect: str
    """A sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A run in a few numbers."""

    name: str
    title: str
    """Model, effective batch and outcome."""
    state: str
    """The outcome: ``finished``, ``stopped by NAME``, ``interrupted``, ``failed (ERROR)`` or ``diverged``; of a run
    without a recorded end a text with the age of its last record."""
    model: str
    effective_batch: str
    """As passed, or the range in the records."""
    device: str
    started: float | None
    """Unix seconds of the first record; None without one."""
    num_steps: int
    num_samples: int
    seconds: float
    """Seconds of training, without validation and without the time between processes."""
    samples_per_second: float | None
    loss: float | None
    """Mean over the last twentieth of the steps; None if the last one is not finite."""
    best: Best | None
    """None if no validation had a finite value."""
    load: Load | None
    """None if there is no checkpoint."""
    metrics: Mapping[str, float]
    """Metrics of the last validation, by name."""
    peak_bytes: int
    limit_share: float | None
    """Greatest share of the limit that a step used; None before the first step."""
    num_out_of_memory: int
    num_replayed: int
    """Number of steps that were run again after an out-of-memory error."""
    oom_files: tuple[str, ...]
    """Names of the files that say what held the memory."""
    num_replans: int
    """Number of re-plans, without those of the schedule."""
    num_resumed: int
    prediction_error: float | None
    """Relative error of the last memory prediction that was compared with a measurement; None without one."""
    gradient_error: float | None
    """Largest relative error of a split batch's gradient; None if none was measured."""
    gradients_failed: int
    """Number of measurements above their tolerance."""
    num_ranks: int

    def rows(self) -> dict[str, str]:
        """Return the facts as texts, by their names; unknown ones are left out."""
        best = ooms = ""
        if self.best is not None:
            best = f"{self.best.metric} {self.best.value:.4g} (step {self.best.step:,}, epoch {self.best.epoch:,})"
        if self.num_out_of_memory:
            ooms = f"{counted(self.num_out_of_memory, 'time')}, {counted(self.num_replayed, 'step')} replayed"
        if self.oom_files:
            ooms += f"; see {self.oom_files[0]}" + (" and others" if len(self.oom_files) > 1 else "")
        wrong = f" ({counted(self.gradients_failed, 'measurement')} failed)" if self.gradients_failed else ""
        off = f", predicted within {self.prediction_error:.1%}" if self.prediction_error is not None else ""
        found = {
            "state": self.state,
            "effective batch": self.effective_batch,
            "steps": f"{self.num_steps:,}",
            "samples": f"{self.num_samples:,}",
            "training time": format_seconds(self.seconds),
            "samples per second": format_rate(self.samples_per_second) if self.samples_per_second else "",
            "training loss at the end": "not finite" if self.loss is None else f"{self.loss:.4g}",
            "best validation": best,
            "metrics at the end": metrics_text(self.metrics),
            "peak memory": f"{format_bytes(self.peak_bytes)}{off}",
            "most of the limit": "" if self.limit_share is None else f"{self.limit_share:.0%}",
            "out of memory": ooms or "never",
            "re-plans": f"{self.num_replans:,}",
            "resumed": counted(self.num_resumed, "time") if self.num_resumed else "",
            "gradient error": "not measured" if self.gradient_error is None else f"{self.gradient_error:.1e}{wrong}",
        }  # fmt: skip
        if not self.num_steps:
            return {"state": self.state}
        return {name: text for name, text in found.items() if text}


def facts_of(run: Run, now: float | None = None) -> Facts:
    """Return the facts of a run; ``now`` is unix time, by default the clock's."""
    windows, events = run.windows, run.events
    # Record times would include the time between processes.
    seconds = float(windows["seconds"].sum())
    started, metrics = events["Started"], events["Validated"]["metrics"]
    device = str(started["device"][-1]) if len(started["device"]) else "unknown device"
    # environment.json names the machine's accelerator, which the run may not have used.
    named = str(run.environment.get("device", ""))
    name, state = run.path.resolve().name, _state(run, clock.stamp() if now is None else now)
    model = str(run.config.get("model", ""))
    effective_batch = str(run.config.get("effective_batch", _range(windows["effective_batch"])))
    best = _best(run)
    last = windows["loss"][-max(1, len(run) // 20) :]
    shares = windows["peak_bytes"] / np.maximum(windows["limit_bytes"], 1)
    errors, allowed = (
        np.concatenate([events["Verified"][field], events["Joined"][field]]) for field in ("error", "tolerance")
    )
    predictions = [error for error in events["Planned"]["prediction_error"] if error is not None]
    shared = events["Shared"]["micro_batches"]
    return Facts(
        name=name,
        title=f"{model or name}, effective batch {effective_batch}: {state}",
        state=state,
        model=model,
        effective_batch=effective_batch,
        device=named if named.startswith(device.split(":")[0]) else device,
        started=min((float(times[0]) for times in (started["time"], windows["time"]) if len(times)), default=None),
        num_steps=int(windows["step"][-1]) if len(run) else 0,
        num_samples=int(windows["num_samples"][-1]) if len(run) else 0,
        seconds=seconds,
        samples_per_second=int(windows["effective_batch"].sum()) / seconds if seconds else None,
        loss=float(last[np.isfinite(last)].mean()) if np.isfinite(last[-1:]).all() and len(last) else None,
        best=best,
        load=_load(run, best),
        metrics=metrics[-1] if len(metrics) else {},
        peak_bytes=int(windows["peak_bytes"].max(initial=0)),
        limit_share=float(shares.max()) if len(run) else None,
        num_out_of_memory=len(events["OutOfMemory"]["step"]),
        num_replayed=int((windows["replays"] > 0).sum()),
        oom_files=tuple(file.name for file in oom_files(run.path)),
        num_replans=len(replans(run)),
        num_resumed=len(events["Resumed"]["step"]),
        prediction_error=predictions[-1] if predictions else None,
        gradient_error=float(errors.max()) if len(errors) else None,
        gradients_failed=int((errors > allowed).sum()),
        num_ranks=len(shared[-1]) if len(shared) else 1,
    )


def replans(run: Run) -> list[tuple[Any, ...]]:
    """Return (step, time, old, new, reason) of each re-plan that the schedule did not ask for."""
    columns = run.events["Replanned"]
    rows = zip(*(columns[field].tolist() for field in ("step", "time", "old", "new", "reason")), strict=True)
    return [row for row in rows if not is_scheduled(row[2], row[3])]


def _range(values: NDArray[Any]) -> str:
    """Return the smallest and the largest effective batch, as a text."""
    if not len(values):
        return "unknown"
    # The last batch may hold the samples that were left over.
    if len(values) > 1 and values[-1] < values[:-1].min() == values[:-1].max():
        values = values[:-1]
    low, high = values.min(), values.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _has_diverged(run: Run) -> bool:
    """Return whether the last loss of a step that was not skipped is NaN or infinite, as ``FitResult.ended`` has it."""
    losses = run.windows["loss"][~np.isin(run.windows["step"], run.events["StepSkipped"]["step"])]
    return len(losses) > 0 and not np.isfinite(losses[-1])


def _state(run: Run, now: float) -> str:
    """Return the outcome; no file tells whether a process without a recorded end still runs."""
    if _has_diverged(run):
        return "diverged"
    # A killed process writes nothing more, and a step may take minutes: readers judge by the age.
    if run.finished is None:
        if run.last_time is None:
            return "nothing recorded yet"
        return f"running or killed (last record {format_seconds(max(0.0, now - run.last_time))} ago)"
    if run.finished == "budget":
        return "finished"
    if run.finished in ("stopped", "interrupted"):
        return end_text(run.finished, str(run.events["Finished"]["stopped_by"][-1]))
    return f"failed ({run.finished})"


def _best(run: Run) -> Best | None:
    """Return the best validation; of equal ones the first, as ``KeepBest`` does."""
    kept = run.config.get("keep_best")
    kept = kept if isinstance(kept, Mapping) else {}  # the user may have edited the file
    metric, sign = str(kept.get("metric", "loss")), -1 if kept.get("mode") == "max" else 1
    validated = run.events["Validated"]
    if metric == "loss":
        values = validated["loss"]
    else:
        values = np.array([metrics.get(metric, np.nan) for metrics in validated["metrics"]], np.float64)
    if not np.isfinite(values).any():
        return None
    at = int(np.argmin(np.where(np.isfinite(values), sign * values, np.inf)))
    step, epoch = int(validated["step"][at]), int(validated["epoch"][at])
    return Best(metric=metric, value=float(values[at]), step=step, epoch=epoch)


def _load(run: Run, best: Best | None) -> Load | None:
    """Return the line that loads the best checkpoint; without one the command that resumes, or loads the last one.

    A diverged run without a best checkpoint has neither. A run that a callback stopped would stop again at once.
    """
    found = manifests(run.path)
    place = json.dumps(str(run.path), ensure_ascii=False)
    # The newest best one, which is the one that load_best reads.
    for one in found:
        if one.is_best:
            which = "the best validation" if best is not None and best.step == one.step else "the best checkpoint"
            effect = f"Loads the weights of step {one.step:,}, {which}."
            return Load(text=f"import autoaccum; autoaccum.load_best({place}, model)", effect=effect)
    # The last weights of a diverged run may be NaN.
    if not found or _has_diverged(run):
        return None
    # A finished run has nothing to resume, and a notebook has no command.
    last = found[0]
    command = run.environment.get("command")
    if run.finished not in ("budget", "stopped") and isinstance(command, str):
        return Load(text=_resuming(command, str(run.path)), effect=f"Resumes from step {last.step:,}.")
    # load_best would refuse: no checkpoint is the best without a validation.
    weights = last.path / "model.safetensors"
    if not weights.is_file():  # several ranks wrote it in parts
        return None
    file = json.dumps(str(weights), ensure_ascii=False)
    text = f"import safetensors.torch; model.load_state_dict(safetensors.torch.load_file({file}))"
    effect = f"Loads the weights of step {last.step:,}, the last checkpoint."
    if run.finished == "stopped":
        callback = str(run.events["Finished"]["stopped_by"][-1]) or "The callback that stopped the run"
        effect += f" {callback} has to allow more steps before the run can resume."
    return Load(text=text, effect=effect)


def _resuming(command: str, run_dir: str) -> str:
    """Return the command that resumes a run.

    >>> _resuming("autoaccum fit a.py --lr 1", "runs/a"), _resuming("python train.py", "runs/a")
    ('autoaccum fit a.py --lr 1 --run-dir runs/a', 'python train.py')
    """
    # The command line named the directory itself; naming it again resumes there.
    is_made = command.startswith("autoaccum fit ") and "--run-dir" not in command and "--run_dir" not in command
    return f"{command} --run-dir {shlex.quote(run_dir)}" if is_made else command
