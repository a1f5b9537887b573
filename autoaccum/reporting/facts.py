"""A run in a few numbers, computed from its records: the table at the head of its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum._units import format_bytes
from autoaccum.memory import clock
from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import counted, end_text, format_rate, format_seconds, is_scheduled, metrics_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best validation of a run, by the metric of ``KeepBest``, or else by the loss."""

    metric: str
    """``"loss"``, or the name of a metric."""
    value: float
    step: int
    epoch: int


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
    """As passed; empty without a configuration."""
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
    metrics: Mapping[str, float]
    """Metrics of the last validation, by name."""
    peak_bytes: int
    limit_share: float | None
    """Greatest share of the limit that a step used; None before the first step."""
    num_out_of_memory: int
    num_replayed: int
    """Number of steps that were run again after an out-of-memory error."""
    num_replans: int
    """Number of re-plans, without those of the schedule."""
    num_resumed: int
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
        wrong = f" ({counted(self.gradients_failed, 'measurement')} failed)" if self.gradients_failed else ""
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
            "peak memory": format_bytes(self.peak_bytes),
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
    effective_batch = str(run.config.get("effective_batch", ""))
    last = windows["loss"][-max(1, len(run) // 20) :]
    shares = windows["peak_bytes"] / np.maximum(windows["limit_bytes"], 1)
    errors, allowed = (
        np.concatenate([events["Verified"][field], events["Joined"][field]]) for field in ("error", "tolerance")
    )
    shared = events["Shared"]["micro_batches"]
    return Facts(
        name=name,
        title=f"{model or name}{effective_batch and f', effective batch {effective_batch}'}: {state}",
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
        best=_best(run),
        metrics=metrics[-1] if len(metrics) else {},
        peak_bytes=int(windows["peak_bytes"].max(initial=0)),
        limit_share=float(shares.max()) if len(run) else None,
        num_out_of_memory=len(events["OutOfMemory"]["step"]),
        num_replayed=int((windows["replays"] > 0).sum()),
        num_replans=len(replans(run)),
        num_resumed=len(events["Resumed"]["step"]),
        gradient_error=float(errors.max()) if len(errors) else None,
        gradients_failed=int((errors > allowed).sum()),
        num_ranks=len(shared[-1]) if len(shared) else 1,
    )


def replans(run: Run) -> list[tuple[Any, ...]]:
    """Return (step, time, old, new, reason) of each re-plan that the schedule did not ask for."""
    columns = run.events["Replanned"]
    rows = zip(*(columns[field].tolist() for field in ("step", "time", "old", "new", "reason")), strict=True)
    return [row for row in rows if not is_scheduled(row[2], row[3])]


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


def validated_values(run: Run, metric: str) -> NDArray[Any]:
    """Return what validations report of that name, the loss among them; NaN where they report none."""
    validated = run.events["Validated"]
    if metric == "loss":
        losses: NDArray[Any] = validated["loss"]
        return losses
    return np.array([metrics.get(metric, np.nan) for metrics in validated["metrics"]], np.float64)


def _best(run: Run) -> Best | None:
    """Return the best validation; of equal ones the first, as ``KeepBest`` does."""
    kept = run.config.get("keep_best")
    kept = kept if isinstance(kept, Mapping) else {}  # the user may have edited the file
    metric, sign = str(kept.get("metric", "loss")), -1 if kept.get("mode") == "max" else 1
    validated, values = run.events["Validated"], validated_values(run, metric)
    if not np.isfinite(values).any():
        return None
    at = int(np.argmin(np.where(np.isfinite(values), sign * values, np.inf)))
    step, epoch = int(validated["step"][at]), int(validated["epoch"][at])
    return Best(metric=metric, value=float(values[at]), step=step, epoch=epoch)
