"""A run in a few numbers and sentences, computed from its records: the first screen of its report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoaccum.memory import clock
from autoaccum.reporting.amounts import format_seconds
from autoaccum.reporting.answers import (
    Answer,
    answers_of,
    has_diverged,
    mean_of,
    metrics_of,
    outputs_of,
    prediction_of,
    ranks_of,
    shares_of,
    twentieth,
)
from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import end_text
from autoaccum.reporting.plan_changes import batch_range, replans
from autoaccum.runs.manifests import manifests


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
    """A run in a few numbers and sentences."""

    name: str
    title: str
    """Model, effective batch and outcome."""
    state: str
    """The outcome: ``finished``, ``stopped by NAME``, ``interrupted``, ``failed (ERROR)`` or ``diverged``; of a run
    without a recorded end a text with the age of its last record."""
    is_over: bool
    """Whether the end was recorded; a killed run has none."""
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
    validation_loss: float | None
    """Loss of the last validation; None without one."""
    best_validation_loss: float | None
    best: Best | None
    """None if no validation had a finite value."""
    load: Load | None
    """None if there is no checkpoint."""
    metrics: Mapping[str, float]
    """Metrics of the last validation, by name."""
    outputs: Mapping[str, float]
    """Means of the outputs over the last twentieth of the steps, by name."""
    peak_bytes: int
    limit_share: float | None
    """Greatest share of the limit that a step used; None before the first step."""
    num_out_of_memory: int
    num_replans: int
    """Number of re-plans, without those of the schedule."""
    prediction_error: float | None
    """(predicted - measured) / measured of the last memory prediction; None without one."""
    gradient_error: float | None
    """Largest relative error of a split batch's gradient; None if none was measured."""
    num_ranks: int
    answers: tuple[Answer, ...]


def facts_of(run: Run, now: float | None = None) -> Facts:
    """Return the facts of a run; ``now`` is unix time, by default the clock's."""
    windows, events = run.windows, run.events
    # Record times would include the time between processes.
    seconds = float(windows["seconds"].sum())
    started, validated = events["Started"], events["Validated"]["loss"]
    device = str(started["device"][-1]) if len(started["device"]) else "unknown device"
    # environment.json names the machine's accelerator, which the run may not have used.
    named = str(run.environment.get("device", ""))
    name, state = run.path.resolve().name, _state(run, clock.stamp() if now is None else now)
    model = str(run.config.get("model", ""))
    effective_batch = str(run.config.get("effective_batch", batch_range(windows["effective_batch"])))
    best = _best(run)
    return Facts(
        name=name,
        title=f"{model or name}, effective batch {effective_batch}: {state}",
        state=state,
        is_over=run.finished is not None,
        model=model,
        effective_batch=effective_batch,
        device=named if named.startswith(device.split(":")[0]) else device,
        started=min((float(times[0]) for times in (started["time"], windows["time"]) if len(times)), default=None),
        num_steps=int(windows["step"][-1]) if len(run) else 0,
        num_samples=int(windows["num_samples"][-1]) if len(run) else 0,
        seconds=seconds,
        samples_per_second=int(windows["effective_batch"].sum()) / seconds if seconds else None,
        loss=mean_of(windows["loss"][-twentieth(run) :]) if np.isfinite(windows["loss"][-1:]).all() else None,
        validation_loss=float(validated[-1]) if len(validated) else None,
        best_validation_loss=float(np.nanmin(validated)) if np.isfinite(validated).any() else None,
        best=best,
        load=_load(run, best),
        metrics=metrics_of(run),
        outputs=outputs_of(run),
        peak_bytes=int(windows["peak_bytes"].max(initial=0)),
        limit_share=float(shares_of(run).max()) if len(run) else None,
        num_out_of_memory=len(events["OutOfMemory"]["step"]),
        num_replans=len(replans(run)),
        prediction_error=prediction_of(run)[0],
        gradient_error=max((float(e) for n in ("Verified", "Joined") for e in events[n]["error"]), default=None),
        num_ranks=ranks_of(run),
        answers=answers_of(run),
    )


def _state(run: Run, now: float) -> str:
    """Return the outcome; no file tells whether a process without a recorded end still runs."""
    if has_diverged(run):
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
    if not found or has_diverged(run):
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
