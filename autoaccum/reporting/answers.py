"""The questions of a run's report, each answered with Yes, No or Not measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoaccum._units import format_bytes
from autoaccum.planning.searching import NO_FASTER
from autoaccum.reporting.amounts import format_rate, format_seconds, many, times
from autoaccum.reporting.columns import Run
from autoaccum.reporting.lines import cut_text, is_by_length, metrics_text
from autoaccum.reporting.plan_changes import (
    batch_range,
    last_reason,
    periods,
    ran_otherwise,
    replans,
    settled,
    tried_again,
)
from autoaccum.runs.oom_files import oom_files

CLOSE = 0.05
"""Relative differences of memory up to this one are small: those of a good prediction, say."""
USED = 0.8
"""Share of the limit from which on no memory counts as unused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one question, and whether it is good news."""

    question: str
    text: str
    good: bool | None
    """None if it is neither good nor bad, or unknown."""


def answers_of(run: Run) -> tuple[Answer, ...]:
    """Return the answers, in the order in which people ask."""
    if not len(run):
        return (Answer(question="Has training begun?", text="No: no step is complete yet.", good=None),)
    return (
        _memory(run), _verified(run), prediction_of(run)[1], _learning(run), _unused(run), _changes(run), _time(run),
    )  # fmt: skip


def twentieth(run: Run) -> int:
    """Return the number of steps that a mean at either end of the run covers."""
    return max(1, len(run) // 20)


def ranks_of(run: Run) -> int:
    """Return the number of processes that trained."""
    shared = run.events["Shared"]
    return len(shared["micro_batches"][-1]) if len(shared["step"]) else 1


def shares_of(run: Run) -> NDArray[np.float64]:
    """Return the share of the limit at that time that each step used."""
    shares: NDArray[np.float64] = run.windows["peak_bytes"] / np.maximum(run.windows["limit_bytes"], 1)
    return shares


def has_diverged(run: Run) -> bool:
    """Return whether the last loss of a step that was not skipped is NaN or infinite, as ``FitResult.ended`` has it."""
    losses = run.windows["loss"][~np.isin(run.windows["step"], run.events["StepSkipped"]["step"])]
    return len(losses) > 0 and not np.isfinite(losses[-1])


def mean_of(values: NDArray[np.float64]) -> float | None:
    """Return the mean of the finite values; None without one."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def metrics_of(run: Run) -> Mapping[str, float]:
    """Return the metrics of the last validation; empty without one."""
    found: Sequence[Mapping[str, float]] = run.events["Validated"]["metrics"][-1:].tolist()
    return found[0] if found else {}


def outputs_of(run: Run) -> Mapping[str, float]:
    """Return the mean of each output over the last twentieth of the steps, without those that are not finite."""
    means = {name: mean_of(values[-twentieth(run) :]) for name, values in run.outputs.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _memory(run: Run) -> Answer:
    """Say how much of the limit was used, and whether memory ran out."""
    peak, limit, steps = run.windows["peak_bytes"], run.windows["limit_bytes"], run.windows["step"]
    # By shares, because the limit may have moved.
    share = shares_of(run)
    at, over = int(share.argmax()), int((share > 1).sum())
    worst = f"{share[at]:.0%} of the limit ({format_bytes(peak[at])} of {format_bytes(limit[at])}, step {steps[at]:,})"
    rank = "" if ranks_of(run) == 1 else " of rank 0"
    sentences = [f"The peak{rank} was {worst}."]
    if over:
        sentences = [f"{over:,} of {many(len(run), 'step')}{rank} exceeded the limit. The peak was {worst}."]
    # The largest peak may have been well within the limit of that time.
    if int(most := peak.argmax()) != at and peak[most] > (1 + CLOSE) * peak[at]:
        sentences.append(f"The largest peak was {format_bytes(peak[most])} (step {steps[most]:,}), at a higher limit.")
    # Rank 0 records the steps; of other ranks the records have the peaks that all ranks exchanged.
    if (other := _other_rank(run)) is not None:
        number, used, allowed = other
        over += used > allowed
        text = f"{used / allowed:.0%} ({format_bytes(used)} of {format_bytes(allowed)})"
        sentences.append(f"Rank {number} used the most of the other ranks: {text}.")
    # First, because it answers the question.
    if failed := len(run.events["OutOfMemory"]["step"]):
        told = [f"The device ran out of memory {times(failed)}."]
        # Steps and not failures: a step may fail more than once, and validation has no steps.
        if replayed := int((run.windows["replays"] > 0).sum()):
            told.append(f"{many(replayed, 'step')} {'was' if replayed == 1 else 'were'} replayed; no sample was lost.")
        if waited := len(run.events["Waiting"]["step"]):
            told.append(f"The run waited {times(waited)} for memory.")
        # Files of the first failures lie next to the report.
        if files := oom_files(run.path):
            more = f" and {many(len(files) - 1, 'more file')}" if len(files) > 1 else ""
            told.append(f"See {files[0].name}{more} for the tensors in memory at that moment.")
        sentences = told + sentences
    return _answer("Did it stay within memory?", not (over or failed), sentences, good=not (over or failed))


# Callers open the first sentence with a word that is not a name.
def _answer(question: str, is_yes: bool, sentences: Sequence[str], *, good: bool | None = None) -> Answer:
    text = " ".join(sentences)
    return Answer(question=question, text=f"{'Yes' if is_yes else 'No'}: {text[0].lower()}{text[1:]}", good=good)


def _other_rank(run: Run) -> tuple[int, int, int] | None:
    """Return (rank, peak bytes, limit) of the rank other than 0 that used the most of its limit."""
    shared = run.events["Shared"]
    found = [
        (rank, used, allowed)
        for peaks, limits in zip(shared["peak_bytes"], shared["limit_bytes"], strict=True)
        for rank, (used, allowed) in enumerate(zip(peaks, limits, strict=True))
        if rank
    ]
    return max(found, key=lambda one: one[1] / one[2], default=None)


def _verified(run: Run) -> Answer:
    """Say by how much the gradients of split batches differed from those of full ones."""
    question = "Are the gradients exact?"
    measured, joined = run.events["Verified"], run.events["Joined"]
    errors, allowed, steps = (np.concatenate([measured[name], joined[name]]) for name in ("error", "tolerance", "step"))
    is_wrong = re.compile(r"(gradient|micro-batches)\b.*(%|wrong\)) off\b").search
    wrong = [f"{cause}." for cause in run.events["Notice"]["cause"] if is_wrong(cause)]
    if (run.windows["accumulation_steps"] == 1).all():
        found = f"Splitting would change them by {errors.max():.1e}, relative." if (errors > allowed).any() else ""
        return _answer(question, True, ["No batch was split.", *filter(None, [found])], good=True)
    # Micro-batches that were measured alone and weighted wrongly appear in notices only.
    if not len(errors):
        if wrong:
            return _answer(question, False, ["A notice reports an error.", wrong[0]], good=False)
        return Answer(question=question, text=f"Not measured{_why(run)}.", good=None)
    # Tolerances differ between dtypes, so the worst is relative to its own.
    worst = int((errors / allowed).argmax())
    # A pass by rounding alone records the tolerance as its error.
    is_rounded = errors[worst] == allowed[worst]
    limit = "explained by rounding" if is_rounded else f"{allowed[worst]:.0e} allowed"
    most = "" if len(errors) == 1 else " at most"
    sentences = [f"Measured {times(len(errors))}, relative error{most} {errors[worst]:.1e} ({limit})."]
    if len(joined["step"]):
        sentences.append(f"Micro-batches are joined from step {int(joined['step'][0]):,} on.")
    # After a failure the notices say what the run did about it.
    if failed := int((errors > allowed).sum()):
        last = steps[errors > allowed][-1]
        sentences.append(f"{many(failed, 'measurement')} failed, the last in step {last:,}.")
    elif wrong:
        sentences += ["But a notice reports an error.", wrong[0]]
    return _answer(question, not (failed or wrong), sentences, good=not (failed or wrong))


def _why(run: Run) -> str:
    """Return why nothing was measured, as far as that is known."""
    if run.config.get("verify") is False:
        return ": verify=False was passed"
    causes = [cause for cause in run.events["Notice"]["cause"] if cause.startswith("It could not be measured")]
    return f": {causes[0].rpartition(': ')[2]}" if causes else ""


def prediction_of(run: Run) -> tuple[float | None, Answer]:
    """Return the relative error of the last memory prediction, None without one, and the answer about it."""
    question = "Was memory predicted well?"
    compared = []
    for period in periods(run):
        now = slice(period.first, period.end)
        # Short batches and replays say nothing about the prediction. Samples of different lengths split otherwise
        # each time, but their micro-batches take as much as the plan's.
        is_planned = run.windows["micro_batch"][now] == period.micro_batch
        if period.is_by_length:
            is_planned = (run.windows["replays"][now] == 0) & (run.windows["accumulation_steps"][now] > 1)
        # The largest peak, because the memory model predicts the most that a micro-batch takes.
        measured = run.windows["peak_bytes"][now][is_planned]
        if period.predicted_bytes is not None and len(measured) and measured.max() > 0:
            compared.append((period, period.predicted_bytes, int(measured.max())))
    if not compared:
        why = "no plan has a prediction (sizes were given, or the search had not ended)"
        if any(predicted is not None for predicted in run.events["Planned"]["predicted_bytes"]):
            why = "no step ran with the predicted plan"
            if ranks_of(run) > 1:
                why = "the prediction covers rank 0's plan, and steps hold the micro-batches of all ranks"
        return None, Answer(question=question, text=f"Not measured: {why}.", good=None)
    # Relative to the measurement, so that small and large micro-batches count alike.
    errors = [(predicted - peak) / peak for _, predicted, peak in compared]
    (period, predicted, peak), error, worst = compared[-1], errors[-1], max(errors, key=abs)
    of = f"up to {period.micro_batch}, split by length" if period.is_by_length else f"{period.micro_batch}"
    both = f"{format_bytes(predicted)} predicted, {format_bytes(peak)} measured"
    sentences = [f"{both} for micro-batches of {of} ({_off(error)})."]
    if len(errors) > 1:
        sentences.append(
            f"The worst of {len(errors)} predictions was {_off(worst)}."
            if worst != error
            else f"None of {len(errors)} predictions was worse."
        )
    is_good = abs(worst) <= CLOSE
    return error, _answer(question, is_good, sentences, good=is_good)


def _off(error: float) -> str:
    """Return a relative error in words."""
    if abs(error) < 0.0005:  # it would print as 0.0%
        return "exact"
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"


def _learning(run: Run) -> Answer:
    """Say how the training loss, the validation loss and the metrics moved."""
    question = "Did it learn?"
    # Means of both ends, because the losses of single steps vary more than they improve.
    losses, few = run.windows["loss"], twentieth(run)
    first, last = mean_of(losses[:few]), mean_of(losses[-few:])
    diverged, odd = has_diverged(run), np.flatnonzero(~np.isfinite(losses)).tolist()
    sentences = ["The run diverged."] if diverged else []
    if first is not None and last is not None and len(run) > 1 and not (diverged and last < first):
        over = "" if few == 1 else f" (means of the first and last {few:,} steps)"
        moved = f"fell from {first:.4g} to" if last < first else f"rose from {first:.4g} to"
        sentences.append(f"The training loss {'stayed at' if last == first else moved} {last:.4g}{over}.")
    if odd:
        where = f"the first in step {run.windows['step'][odd[0]]:,}"
        sentences.append(f"The loss of {many(len(odd), 'step')} was NaN or infinite, {where}.")
    validated = run.events["Validated"]
    if len(validated["loss"]) and np.isfinite(validated["loss"]).any():
        best = int(np.nanargmin(validated["loss"]))
        lowest = f"; the lowest was {validated['loss'][best]:.4g} (step {validated['step'][best]:,})"
        lowest = ", the lowest" if best == len(validated["loss"]) - 1 else lowest
        sentences.append(f"The last validation loss is {validated['loss'][-1]:.4g}{lowest}.")
    if metrics := metrics_of(run):
        sentences.append(f"Metrics of the last validation: {metrics_text(metrics)}.")
    if outputs := outputs_of(run):
        sentences.append(f"Outputs at the end: {metrics_text(outputs)}.")
    if len(run) == 1 and not diverged:
        return Answer(question=question, text=" ".join(["Not measured: the run has one step.", *sentences]), good=None)
    is_lower = first is not None and last is not None and last < first
    # A loss that was NaN once is no good news, however low the last ones are.
    return _answer(question, is_lower and not diverged, sentences, good=is_lower and not odd and not diverged)


def _unused(run: Run) -> Answer:
    """Say whether memory is left, and what would use it."""
    share = float(shares_of(run).max())
    rank = "" if ranks_of(run) == 1 else " of rank 0"
    if share >= USED:
        return _answer("Is memory left unused?", False, [f"The peak was {share:.0%} of the limit{rank}."])
    return _answer(
        "Is memory left unused?", True, [f"{1 - share:.0%} of the limit{rank} was never used.", *_advice(run)]
    )


def _advice(run: Run) -> list[str]:
    """Return the sentences that say what to do about unused memory, as far as the records support them."""
    # The largest of the last batches, because the last one of an epoch may be short.
    batches = run.windows["effective_batch"][-100:]
    at = len(run) - 1 - int(batches[::-1].argmax())
    if run.windows["accumulation_steps"][at] == 1:
        return [
            "The full batch fits in one micro-batch.",
            "To use more memory, raise effective_batch or train a larger model.",
        ]
    # In the planner's words.
    reason = last_reason(run)
    if reason is None:
        return ["The search for the micro-batch has not ended."]
    if reason == NO_FASTER:
        return ["Larger micro-batches are no faster, so there is nothing to gain."]
    if reason == "micro_batch is set":
        return ['micro_batch is set; micro_batch="auto" searches for the fastest size that fits.']
    if reason.startswith("max_micro_batch"):
        return ["max_micro_batch limits the micro-batch; raise it to use more memory."]
    if reason == "larger micro-batches do not fit":
        return ["Larger micro-batches do not fit, so there is nothing to gain."]
    return [f"The reason for the last plan: {reason}."]


def _changes(run: Run) -> Answer:
    """Say which plan the run settled on, and why it changed."""
    changed, plans = replans(run), settled(run)
    sentences = []
    if plans:
        step, sizes, reason = plans[0]
        when = f"after {many(step, 'step')}" if step else "before the first step"
        sentences.append(f"The run settled on {_plan_text(sizes)} {when} ({reason}).")
    # A change of memory saving starts a new search, which settles again.
    if len(plans) > 1:
        step, sizes, reason = plans[-1]
        last = ":" if len(plans) == 2 else ", the last time"
        again = f"It settled on another plan {times(len(plans) - 1)}{last} {_plan_text(sizes)}"
        others = sum(number for _, number, _ in tried_again(run))
        between = f"; {many(others, 'step')} in between tried other plans" if others else ""
        sentences.append(f"{again} after {many(step, 'step')} ({reason}){between}.")
    if changed:
        reasons = Counter(reason for *_, reason in changed).most_common(4)  # more would be a list
        listed = ", ".join(reason if count == 1 else f"{reason} ({count} times)" for reason, count in reasons)
        more = len(changed) - sum(count for _, count in reasons)
        # Only batches of the same size compare: the last one of an epoch may be short.
        largest = max(sum(old) for _, old, _, _ in changed)
        alike = [(old, new) for _, old, new, _ in changed if sum(old) == largest]
        where = "" if len(alike) == len(changed) else f" in batches of {largest:,} samples"
        text = f"The run re-planned {times(len(changed))}: {listed}{f', and {more} more' if more else ''}"
        sentences.append(f"{text}; from {cut_text(alike[0][0])} to {cut_text(alike[-1][1])}{where}.")
    otherwise = ran_otherwise(run)
    if otherwise is not None:
        number, sizes = otherwise
        sentences.append(f"The last {many(number, 'step') if number > 1 else 'step'} ran as {cut_text(sizes)}.")
    sentences += _saved(run)
    # Only their number, because a ramp may have thousands.
    if scheduled := len(run.events["Replanned"]["step"]) - len(changed):
        # The short batch at the end of an epoch is not the schedule's.
        asked, epochs = run.windows["effective_batch"], run.windows["epoch"]
        is_rest = np.append(epochs[1:] != epochs[:-1], True) & (asked < np.append(0, asked[:-1]))
        sentences.append(f"The effective batch changed {times(scheduled)} ({batch_range(asked[~is_rest])}).")
    is_changed = bool(changed or scheduled or len(plans) > 1 or otherwise or len(run.events["MemorySaving"]["step"]))
    sentences = sentences or ["No plan was settled on."]
    if resumed := len(run.events["Resumed"]["step"]):
        repeated = f"; {many(run.voided, 'step')} ran again" if run.voided else ""
        sentences.append(f"The run resumed {times(resumed)}{repeated}.")
    if ranks_of(run) > 1:
        sentences.append("These are the plans of rank 0.")
    return _answer("Did the plan change?", is_changed, sentences)


def _plan_text(sizes: tuple[int, ...]) -> str:
    """Return a plan as a text; samples that differ in length have another one in each step."""
    return f"micro-batches by length, such as {cut_text(sizes)}," if is_by_length(sizes) else cut_text(sizes)


def _saved(run: Run) -> list[str]:
    """Say how memory was saved, and whether recomputed values were measured."""
    saved, measured = run.events["MemorySaving"], run.events["Recomputed"]
    if not len(saved["step"]):
        return []
    name, step, reason = (saved[field][-1] for field in ("new", "step", "reason"))
    found = [f"Memory saving changed {times(len(saved['step']))}: {name} since step {step:,} ({reason})."]
    if len(measured["step"]):
        operations = int(measured["operations"].sum())
        found.append(f"Recomputed values were bit-identical in {many(operations, 'operation')}.")
    return found


def _time(run: Run) -> Answer:
    """Say how fast the run was, and which share of the time training took."""
    question = "Did training take most of the time?"
    batches, seconds = run.windows["effective_batch"], run.windows["seconds"]
    total = float(seconds.sum())
    if not total:
        return Answer(question=question, text="Not measured: no step has a duration.", good=None)
    validating, weighted, joined = (
        float(run.events[name]["seconds"].sum()) for name in ("Validated", "Verified", "Joined")
    )
    measuring = weighted + joined
    spent = total + validating + measuring
    text = f"{total / spent:.0%} of {format_seconds(spent)}, at {format_rate(batches.sum() / total)} samples/s."
    sentences = [text, f"A step took {format_seconds(float(np.median(seconds)))} (median)."]
    # The mean over the run includes the search.
    tail = slice(-max(1, len(run) // 10), None)
    # A tenth of fewer steps would be a single step.
    if len(run) >= 20 and seconds[tail].sum():
        sentences.append(f"The last tenth ran at {format_rate(batches[tail].sum() / seconds[tail].sum())} samples/s.")
    # The seconds of a step include the attempts that ran out of memory.
    if replayed := float(seconds[run.windows["replays"] > 0].sum()):
        sentences.append(f"Steps with replays took {replayed / total:.1%} of the training time.")
    if validating:
        sentences.append(f"Validation took {format_seconds(validating)}.")
    if measuring:
        sentences.append(f"Measuring gradients took {format_seconds(measuring)}.")
    return _answer(question, total >= spent / 2, sentences)
