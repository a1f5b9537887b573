"""A run in numbers and sentences: what people ask of it first, computed from its records.

Did it stay within memory, was that foreseen, what changed, is it exact, how fast was it, did it learn?
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum._units import format_bytes
from autoaccum.memory import clock
from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import cut_text, is_by_length, is_scheduled, metrics_text
from autoaccum.runs.oom_files import oom_files

CLOSE = 0.05
"""Call a prediction good that is off by at most this fraction of what was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer to one question in a sentence or two, and whether it is good news."""

    question: str
    text: str
    good: bool | None
    """None where it is neither good nor bad, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Period:
    """Windows for which one micro-batch size was planned."""

    first: int
    """Index of the first window."""
    end: int
    """Index after the last one."""
    micro_batch: int
    """Largest micro-batch in the plan."""
    predicted_bytes: int | None
    """Peak that was predicted for it; None where there is no memory model, and after a re-plan."""
    is_by_length: bool = False
    """Whether samples differ in length, so that each of the windows has sizes of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A run in a few numbers and sentences."""

    name: str
    state: str
    """``finished``, ``interrupted``, ``stopped``, the name of an error, or a text with the age of the last record"""
    is_over: bool
    """Whether its end was recorded; that of a killed run is not."""
    model: str
    effective_batch: str
    """The one that was asked for, as far as the configuration tells; else the range of those in the records."""
    device: str
    num_steps: int
    num_samples: int
    seconds: float
    """Seconds of training: those of validation, and those in which the run was not there, are left out."""
    samples_per_second: float | None
    loss: float | None
    """Mean over the last twentieth of the windows; None where none was finite."""
    validation_loss: float | None
    """Loss of the last validation; None without one."""
    best_validation_loss: float | None
    metrics: Mapping[str, float]
    """Metrics of the last validation, by name."""
    outputs: Mapping[str, float]
    """What was returned beside the loss, by name: mean over the last twentieth of the windows."""
    peak_bytes: int
    limit_share: float | None
    """Greatest share that a window took of the limit at that time; None before the first window."""
    num_out_of_memory: int
    num_replans: int
    """Number of re-plans that were not the schedule's."""
    prediction_error: float | None
    """(predicted - measured) / measured, of the last prediction that can be compared; None without one."""
    gradient_error: float | None
    """The most that gradients of cut windows were off whole ones', as fractions; None where none was measured."""
    num_ranks: int
    answers: tuple[Answer, ...]


def facts_of(run: Run, now: float | None = None) -> Facts:
    """Return the facts of a run; ``now`` is unix time, the clock's when left out."""
    windows, events = run.windows, run.events
    # Summed over reports: the times of records would count what lay between processes.
    seconds = float(windows["seconds"].sum())
    started, validated = events["Started"], events["Validated"]["loss"]
    device = str(started["device"][-1]) if len(started["device"]) else "unknown device"
    # environment.json names the accelerator of the machine, if it has one; the run need not have been on it.
    named = str(run.environment.get("device", ""))
    num_samples = int(windows["num_samples"][-1]) if len(run) else 0
    error, prediction = _prediction(run)
    return Facts(
        name=run.path.resolve().name,
        is_over=run.finished is not None,
        state=_state(run, clock.stamp() if now is None else now),
        model=str(run.config.get("model", "")),
        effective_batch=str(run.config.get("effective_batch", _range(windows["effective_batch"]))),
        device=named if named.startswith(device.split(":")[0]) else device,
        num_steps=int(windows["step"][-1]) if len(run) else 0,
        num_samples=num_samples,
        seconds=seconds,
        samples_per_second=int(windows["effective_batch"].sum()) / seconds if seconds else None,
        # Of the last windows together: a single one says more of its samples than of the model.
        loss=_mean(windows["loss"][-twentieth(run) :]),
        validation_loss=float(validated[-1]) if len(validated) else None,
        # NaN is no best, and where nothing was finite there is none.
        best_validation_loss=float(np.nanmin(validated)) if np.isfinite(validated).any() else None,
        metrics=_metrics(run),
        outputs=_outputs(run),
        peak_bytes=int(windows["peak_bytes"].max(initial=0)),
        limit_share=float(_shares(run).max()) if len(run) else None,
        num_out_of_memory=len(events["OutOfMemory"]["step"]),
        num_replans=len(replans(run)),
        prediction_error=error,
        gradient_error=float(events["Verified"]["error"].max()) if len(events["Verified"]["error"]) else None,
        num_ranks=_ranks(run),
        # In the order in which people ask; before the first window none of them can be answered.
        answers=(
            (_memory(run), prediction, _changes(run), _verified(run), _speed(run), _learning(run))
            if len(run)
            else (Answer(question="Has it begun?", text="No window has committed yet.", good=None),)
        ),
    )


def twentieth(run: Run) -> int:
    """Return the number of windows that a mean is taken over, so that one odd one says little."""
    return max(1, len(run) // 20)


def replans(run: Run) -> list[tuple[int, tuple[int, ...], tuple[int, ...], str]]:
    """Return (step, old, new, reason) of each re-plan that the schedule did not ask for."""
    columns = run.events["Replanned"]
    rows = zip(columns["step"].tolist(), columns["old"], columns["new"], columns["reason"], strict=True)
    return [row for row in rows if not is_scheduled(row[1], row[2])]


def _settled(run: Run) -> list[tuple[int, tuple[int, ...], str]]:
    """Return (windows before it, sizes, reason) of each plan that was settled on, and is none that stood already."""
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    # As in the table of plans: each by the first of its windows.
    settled = zip(planned["step"] + 1, planned["time"], planned["sizes"], planned["reason"], strict=True)
    told: list[tuple[Any, ...]] = [(*plan, None) for plan in settled]
    told += zip(*(replanned[field] for field in ("step", "time", "new", "reason", "old")), strict=True)
    found: list[tuple[int, tuple[int, ...], str]] = []
    last: tuple[int, ...] = ()
    for step, _, sizes, reason, old in sorted(told, key=lambda one: one[:2]):
        if old is None and sizes != last:
            found.append((int(step) - 1, sizes, reason))
        # A plan that memory has changed for the short window of an epoch's end is not the one that stands.
        if old is None or not last or is_scheduled(old, sizes) or sum(sizes) == sum(last):
            last = sizes
    return found


def tried_again(run: Run) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first step, number, plan before) of windows that were cut otherwise until another plan was settled on.

    As where windows took other times than those by which the first was chosen, so that plans were compared once more.
    """
    steps, asked = run.windows["step"], run.windows["effective_batch"]
    largest, number = run.windows["micro_batch"], run.windows["accumulation_steps"]
    # What else has changed between two of them is told by itself.
    changes = np.concatenate([run.events[name]["step"] for name in ("Replanned", "MemorySaving")])

    def cut_otherwise(after: int, until: float, sizes: tuple[int, ...]) -> NDArray[Any] | None:
        is_full = (steps > after) & (steps <= until) & (asked == sum(sizes))
        return steps[is_full & ((largest != max(sizes)) | (number != len(sizes)))] if is_full.any() else None

    plans = _settled(run)
    # Where samples differ in length each window is cut by its own: then those after the last plan are as well.
    rest = cut_otherwise(plans[-1][0], math.inf, plans[-1][1]) if plans else None
    if rest is None or len(rest):
        return []
    found = []
    for (after, sizes, _), (until, _, _) in pairwise(plans):
        others = cut_otherwise(after, until, sizes)
        if others is not None and len(others) and not np.any((changes > after) & (changes <= until)):
            found.append((int(others[0]), len(others), sizes))
    return found


def periods(run: Run) -> list[Period]:
    """Return how windows were to be cut, in order; a prediction stands for as long as its micro-batch is planned."""
    steps = run.windows["step"]
    planned, replanned = run.events["Planned"], run.events["Replanned"]
    # What is planned after a window is for the next ones; a re-plan is of the window that runs.
    starts = [
        *zip(planned["time"], np.searchsorted(steps, planned["step"], "right"), planned["sizes"], strict=True),
        *zip(replanned["time"], np.searchsorted(steps, replanned["step"], "left"), replanned["new"], strict=True),
    ]
    # Of the same indices; a re-plan records none.
    predictions: list[int | None] = [*planned["predicted_bytes"], *([None] * len(replanned["step"]))]
    found: list[tuple[int, int, int | None, bool]] = []  # first window, largest micro-batch, prediction, by length
    # In the order in which they happened: two of the same window tell by their time which came last.
    for index in sorted(range(len(starts)), key=lambda index: starts[index][0]):
        _, first, sizes = starts[index]
        predicted, largest = predictions[index], max(sizes)
        is_replan = index >= len(planned["step"])
        if is_replan and found and found[-1][1] == largest:  # only the number of micro-batches has changed
            continue
        found.append((int(first), largest, predicted, is_by_length(sizes)))
    # Each ends where the next begins, the last one with the run. One that a re-plan replaced at once has no window.
    return [
        Period(first=first, end=end, micro_batch=largest, predicted_bytes=predicted, is_by_length=by_length)
        for (first, largest, predicted, by_length), (end, *_) in pairwise([*found, (len(run), 0, None, False)])
        if end > first
    ]


def _state(run: Run, now: float) -> str:
    """Say how the run stands; from its files alone nobody can tell whether its process still runs."""
    if run.finished is not None:
        return "finished" if run.finished == "budget" else run.finished
    # A process that was killed writes nothing more, and a window may take minutes: the age is for people to judge.
    if run.last_time is None:
        return "nothing recorded yet"
    return f"running or killed: last record {format_seconds(max(0.0, now - run.last_time))} ago"


def _memory(run: Run) -> Answer:
    """Say how much of the limit was used, and what happened where that was too much."""
    peak, limit = run.windows["peak_bytes"], run.windows["limit_bytes"]
    # Shares and not bytes: the limit may have moved, and the largest peak may have been well within it.
    share = _shares(run)
    at, over = int(share.argmax()), int((share > 1).sum())
    worst = (
        f"{share[at]:.0%} of the limit ({format_bytes(peak[at])} of {format_bytes(limit[at])}, step "
        f"{run.windows['step'][at]:,})"
    )
    if int(most := peak.argmax()) != at and peak[most] > peak[at]:  # when the limit was another one
        worst += f"; its largest peak was {format_bytes(peak[most])}, step {run.windows['step'][most]:,}"
    is_alone = _ranks(run) == 1
    if over:
        where = "" if is_alone else " of rank 0"
        text = f"{over:,} of {_many(len(run), 'window')}{where} went over the limit, up to {worst}."
    else:
        text = f"{'It' if is_alone else 'Rank 0'} used at most {worst}."
    # Windows are recorded by rank 0; of the others there is what they had used whenever all have told.
    if (other := _other_rank(run)) is not None:
        rank, used, allowed = other
        over += used > allowed
        most_of_it = f"{used / allowed:.0%} ({format_bytes(used)} of {format_bytes(allowed)})"
        text += f" Of the others rank {rank} used the most, {most_of_it}."
    if failed := len(run.events["OutOfMemory"]["step"]):
        # Not the number of failures: a window may fail more than once, and validation has no windows.
        replayed = int((run.windows["replays"] > 0).sum())
        text += f" The device ran out of memory {_times(failed)}"
        if replayed:
            text += f"; {_many(replayed, 'window')} {'was' if replayed == 1 else 'were'} replayed, and no sample lost"
        if waited := len(run.events["Waiting"]["step"]):
            text += f"; it waited {_times(waited)} for memory to come back"
        text += "."
        # Of the first occasions, in files beside the page: too much for it, and what whoever wonders will look for.
        if files := oom_files(run.path):
            more = f" and {_many(len(files) - 1, 'more file')}" if len(files) > 1 else ""
            text += f" What held the memory then is in {files[0].name}{more}."
    text = f"{'Not always' if over or failed else 'Yes'}: {text[0].lower()}{text[1:]}"
    return Answer(question="Did it stay within memory?", text=text, good=not over and not failed)


def _ranks(run: Run) -> int:
    """Return how many processes have trained."""
    shared = run.events["Shared"]
    return len(shared["micro_batches"][-1]) if len(shared["step"]) else 1


def _other_rank(run: Run) -> tuple[int, int, int] | None:
    """Return (rank, peak bytes, limit) of the rank, beside the first, that has used the most of its limit."""
    shared = run.events["Shared"]
    told = zip(shared["peak_bytes"], shared["limit_bytes"], strict=True)
    found = [
        (rank, used, allowed)
        for peaks, limits in told
        for rank, (used, allowed) in enumerate(zip(peaks, limits, strict=True))
        if rank
    ]
    return max(found, key=lambda one: one[1] / one[2], default=None)


def _shares(run: Run) -> NDArray[np.float64]:
    """Return the share of the limit at that time that each window took."""
    shares: NDArray[np.float64] = run.windows["peak_bytes"] / np.maximum(run.windows["limit_bytes"], 1)
    return shares


def _prediction(run: Run) -> tuple[float | None, Answer]:
    """Return how far the last prediction was off, and say it; None where there is nothing to compare."""
    question = "Was the memory foreseen?"
    compared = []
    for period in periods(run):
        now = slice(period.first, period.end)
        # Of windows that were cut as planned: short ones, and replays in smaller pieces, say nothing of the prediction.
        # Where samples differ in length no two are cut alike, and micro-batches weigh what the plan's do.
        is_planned = run.windows["micro_batch"][now] == period.micro_batch
        if period.is_by_length:
            is_planned = (run.windows["replays"][now] == 0) & (run.windows["accumulation_steps"][now] > 1)
        measured = run.windows["peak_bytes"][now][is_planned]
        # The largest peak of the period, for the model predicts the most that a micro-batch takes.
        if period.predicted_bytes is not None and len(measured) and measured.max() > 0:
            compared.append((period, int(measured.max())))
    if not compared:
        is_there = any(foretold is not None for foretold in run.events["Planned"]["predicted_bytes"])
        why = "no plan had one, for sizes were given, or the search had not ended"
        if is_there:
            why = "no window was cut as the plan that had one"
            if _ranks(run) > 1:
                why = "the plan is rank 0's, and windows hold the micro-batches of all ranks"
        text = f"There is no prediction to compare: {why}."
        return None, Answer(question=question, text=text, good=None)
    # Relative to what was measured, so that small and large micro-batches count alike.
    errors = [((period.predicted_bytes or 0) - peak) / peak for period, peak in compared]
    (period, peak), error = compared[-1], errors[-1]
    worst = max(errors, key=abs)
    by_length = ", cut by length" if period.is_by_length else ""
    text = (
        f"{format_bytes(period.predicted_bytes or 0)} were predicted for micro-batches of "
        f"{'up to ' if by_length else ''}{period.micro_batch}{by_length}, and "
        f"{format_bytes(peak)} were measured: {_off(error)}."
    )
    if len(errors) > 1:
        others = f"The worst of {len(errors)} predictions was {_off(worst)}"
        text += f" {others if worst != error else f'None of {len(errors)} predictions was further off'}."
    return error, Answer(question=question, text=text, good=abs(worst) <= CLOSE)


def _off(error: float) -> str:
    """Return a relative error in words."""
    if abs(error) < 0.0005:  # it would be shown as 0.0 %
        return "right"
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"


def _changes(run: Run) -> Answer:
    """Say which plan the run settled on, and what became of it."""
    changed, plans = replans(run), _settled(run)
    sentences = []
    if plans:
        step, sizes, reason = plans[0]
        sentences.append(f"It settled on {_plan_text(sizes)} after {_many(step, 'window')}, for {reason}.")
    # As after another way of saving memory, for which sizes are found out anew.
    if len(plans) > 1:
        step, sizes, reason = plans[-1]
        last = ":" if len(plans) == 2 else ", the last time"
        again = f"It settled on another plan {_times(len(plans) - 1)}{last} {_plan_text(sizes)}"
        others = sum(number for _, number, _ in tried_again(run))
        between = f"; {_many(others, 'window')} in between tried other plans" if others else ""
        sentences.append(f"{again} after {_many(step, 'window')}, for {reason}{between}.")
    if changed:
        reasons = Counter(reason for *_, reason in changed).most_common(4)  # more would be a list and no answer
        listed = ", ".join(reason if count == 1 else f"{reason} ({count} times)" for reason, count in reasons)
        more = len(changed) - sum(count for _, count in reasons)
        text = f"It re-planned {_times(len(changed))}: {listed}{f', and {more} more' if more else ''}"
        # Windows of as many samples are compared: the last one of an epoch may have fewer.
        largest = max(sum(old) for _, old, _, _ in changed)
        alike = [(old, new) for _, old, new, _ in changed if sum(old) == largest]
        where = "" if len(alike) == len(changed) else f" in windows of {largest:,} samples"
        sentences.append(f"{text}; from {cut_text(alike[0][0])} to {cut_text(alike[-1][1])}{where}.")
    elif len(plans) < 2:
        sentences.append(f"Nothing made {'it' if _ranks(run) == 1 else 'rank 0'} re-plan.")
    sentences += _saved(run)
    # The schedule's own re-plans are told by their number: a ramp may have thousands.
    if scheduled := len(run.events["Replanned"]["step"]) - len(changed):
        # What an epoch leaves for its last window is not the schedule's.
        asked, epochs = run.windows["effective_batch"], run.windows["epoch"]
        is_rest = np.append(epochs[1:] != epochs[:-1], True) & (asked < np.append(0, asked[:-1]))
        batches = _range(asked[~is_rest])
        sentences.append(f"The effective batch changed {_times(scheduled)} ({batches}).")
    if resumed := len(run.events["Resumed"]["step"]):
        repeated = f"; {_many(run.voided, 'window')} had to be run again" if run.voided else ""
        sentences.append(f"It was resumed {_times(resumed)}{repeated}.")
    return Answer(question="What changed, and why?", text=" ".join(sentences), good=None)


def _plan_text(sizes: tuple[int, ...]) -> str:
    """Return a plan as a text, which of samples that differ in length is that of one window."""
    return f"micro-batches by length, as {cut_text(sizes)}," if is_by_length(sizes) else cut_text(sizes)


def _saved(run: Run) -> list[str]:
    """Say how memory was saved where a single sample did not fit otherwise, and that this was measured."""
    saved, measured = run.events["MemorySaving"], run.events["Recomputed"]
    if not len(saved["step"]):
        return []
    name, step, reason = (saved[field][-1] for field in ("new", "step", "reason"))
    changed = _times(len(saved["step"]))
    text = f"How memory is saved changed {changed}: it is {name} since step {step:,} ({reason})"
    if len(measured["step"]):
        operations = int(measured["operations"].sum())
        text += f"; what is computed twice came to the same bits, measured on {_many(operations, 'operation')}"
    return [f"{text}."]


def _why(run: Run) -> str:
    """Return why nothing was measured, as far as that is known."""
    if run.config.get("verify") is False:
        return ": verify=False was asked for"
    causes = [cause for cause in run.events["Notice"]["cause"] if cause.startswith("It could not be measured")]
    if causes:
        return f": {causes[0].rpartition(': ')[2]}"
    is_cut = bool((run.windows["micro_batch"] < run.windows["effective_batch"]).any())
    return "" if is_cut else ": none was cut"


def _verified(run: Run) -> Answer:
    """Say how far gradients of cut windows were off those of whole ones, where that was measured."""
    question = "Are its gradients exact?"
    measured = run.events["Verified"]
    errors, allowed = measured["error"], measured["tolerance"]
    if not len(errors):
        return Answer(question=question, text=f"No cut window was measured against a whole one{_why(run)}.", good=None)
    failed = int((errors > allowed).sum())
    # The worst by what was allowed it, which is not the same for all types of numbers.
    worst = int((errors / allowed).argmax())
    text = (
        f"cut windows were measured against whole ones {_times(len(errors))}, and were off by {errors[worst]:.1e} at "
        f"most, "
    )
    # What passes only for rounding, as 64 bits or other orders show, is taken for the tolerance itself.
    is_rounded = errors[worst] == allowed[worst]
    text += "for rounding, as was measured." if is_rounded else f"where {allowed[worst]:.0e} is allowed."
    # A measurement that fails is followed by others of what the run does about it, which the notices tell.
    if failed:
        text += f" {_many(failed, 'measurement')} failed, the last in step {measured['step'][errors > allowed][-1]:,}."
    # Micro-batches that were measured by themselves, and found to be weighed wrongly, are told by their notices alone.
    is_wrong = re.compile(r"(gradient|micro-batches)\b.*(%|wrong\)) off\b").search
    wrong = [cause for cause in run.events["Notice"]["cause"] if is_wrong(cause)]
    text += "" if failed or not wrong else f" But: {wrong[0]}."
    good = not (failed or wrong)
    return Answer(question=question, text=f"{'Yes' if good else 'Not always'}: {text}", good=good)


def _speed(run: Run) -> Answer:
    """Say how fast the run was, and what took time besides training."""
    batches, seconds = run.windows["effective_batch"], run.windows["seconds"]
    total = float(seconds.sum())
    question = "How fast was it?"
    if not total:
        return Answer(question=question, text="No time was measured.", good=None)
    text = (
        f"{format_rate(batches.sum() / total)} samples/s over {format_seconds(total)} of training; a window took "
        f"{format_seconds(float(np.median(seconds)))} (median)."
    )
    # Beside the mean over the whole run, which has the search in it, how fast it has become.
    tail = slice(-max(1, len(run) // 10), None)
    if len(run) >= 20 and seconds[tail].sum():  # a tenth of fewer would be a single window
        text += f" In the last tenth it was {format_rate(batches[tail].sum() / seconds[tail].sum())} samples/s."
    # With the attempts that ran out of memory, which a window's seconds hold too.
    if replayed := float(seconds[run.windows["replays"] > 0].sum()):
        text += f" Windows that were replayed took {replayed / total:.1%} of the time."
    if validating := float(run.events["Validated"]["seconds"].sum()):
        text += f" Validation took {format_seconds(validating)} besides."
    if measuring := float(run.events["Verified"]["seconds"].sum()):  # whole and cut windows, run beside training
        text += f" To measure that gradients are exact took {format_seconds(measuring)} besides."
    return Answer(question=question, text=text, good=None)


def _learning(run: Run) -> Answer:
    """Say what became of the training loss, of the validation loss, and of metrics."""
    # Means of both ends, for the losses of single windows go up and down by more than what was learnt.
    losses, few = run.windows["loss"], twentieth(run)
    first, last = _mean(losses[:few]), _mean(losses[-few:])
    validated = run.events["Validated"]
    sentences = []
    if first is not None and last is not None:
        over = "" if few == 1 else f" (means of the first and the last {few:,} windows)"
        verdict = "The"  # it fell, and was no number in between: that is said below
        if last >= first:
            verdict = "Not yet: the"
        elif np.isfinite(losses).all():
            verdict = "Yes: the"
        sentences.append(f"{verdict} training loss went from {first:.4g} to {last:.4g}{over}.")
    if outputs := _outputs(run):
        sentences.append(f"Beside it at the end: {metrics_text(outputs)}.")
    if len(validated["loss"]) and np.isfinite(validated["loss"]).any():
        best = int(np.nanargmin(validated["loss"]))
        at = run.samples_at(validated["step"][best : best + 1])[0]
        text = f"The validation loss is {validated['loss'][-1]:.4g}"
        is_last = best == len(validated["loss"]) - 1
        text += ", its best" if is_last else f"; its best was {validated['loss'][best]:.4g}, {at:,} samples in"
        sentences.append(f"{text}.")
    if metrics := _metrics(run):
        sentences.append(f"The last validation's metrics: {metrics_text(metrics)}.")
    if odd := np.flatnonzero(~np.isfinite(losses)).tolist():
        where = f"the first in step {run.windows['step'][odd[0]]:,}"
        sentences.append(f"The loss of {_many(len(odd), 'window')} was NaN or infinite, {where}.")
    # A loss that is not finite, if only once, is no good news, however low the last ones are.
    good = first is not None and last is not None and last < first and not odd
    return Answer(question="Did it learn?", text=" ".join(sentences), good=good)


def _metrics(run: Run) -> Mapping[str, float]:
    """Return the metrics of the last validation; empty without one."""
    found: Sequence[Mapping[str, float]] = run.events["Validated"]["metrics"][-1:].tolist()
    return found[0] if found else {}


def _outputs(run: Run) -> Mapping[str, float]:
    """Return the means of outputs at the end of a run, of those that were finite then."""
    means = {name: _mean(values[-twentieth(run) :]) for name, values in run.outputs.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean of the finite values; None without one."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _range(values: NDArray[Any]) -> str:
    """Return the smallest and the largest effective batch, as a text."""
    if not len(values):
        return "unknown"
    # All alike but for the last window, which has the samples that were left over.
    if len(values) > 1 and values[-1] < values[:-1].min() and values[:-1].min() == values[:-1].max():
        values = values[:-1]
    low, high = values.min(), values.max()  # a ramp is told by its ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _many(number: int, noun: str) -> str:
    """Return a number of things, as a text."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    """Return in words how often something happened."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def format_rate(per_second: float) -> str:
    """Format a rate for people.

    >>> format_rate(17023.4), format_rate(17.0234)
    ('17,023', '17.02')
    """
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> [format_seconds(s) for s in (0.0123, 1.5, 75, 7380, 200_000)]
    ['12 ms', '1.5 s', '1 min 15 s', '2 h 3 min', '2 d 7 h']
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.001 else f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    # The largest unit that there is one of, and of the next smaller one the rest.
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (part, part_name) in pairwise(units):
        if seconds >= size:
            rest = int(seconds % size) // part
            return f"{int(seconds // size)} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError(seconds)
