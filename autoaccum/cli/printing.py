"""What commands print: JSON documents, tables and lines, warnings and errors."""

from __future__ import annotations

import dataclasses
import math
import os
import select
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from json import dumps
from typing import TYPE_CHECKING, Any

from autoaccum._units import format_bytes
from autoaccum.cli.spelling import as_options
from autoaccum.errors import AutoaccumWarning, RecipeError
from autoaccum.planning.costs import Trial, prediction_error
from autoaccum.planning.plans import Plan, sizes_text

if TYPE_CHECKING:  # they take torch with them, which `plan` and `--help` have no use for
    from pathlib import Path

    from optuna import Study
    from optuna.trial import FrozenTrial

    from autoaccum.cli.keeping import Kept
    from autoaccum.training.check import CheckReport
    from autoaccum.training.probe import ProbeReport
    from autoaccum.training.result import FitResult

_CLEARLY_FASTER = 1.1
"""Say that a smaller size is the fastest where it has this many times the samples per second of the largest."""
CLOSED = 128 + 13
"""The exit code where nobody reads standard output any more: that of a process which SIGPIPE has ended."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 entry``, ``2 entries``."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


@contextmanager
def stdout_kept(json: bool) -> Iterator[None]:
    """Send to standard error what a recipe or a callback prints, where standard output is one JSON document."""
    if not json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(document: dict[str, Any]) -> None:
    """Print one document on one line."""
    # json would write NaN, which most other readers refuse.
    print(dumps(_finite(document), allow_nan=False))


def _finite(value: Any) -> Any:
    """Return the same with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if hasattr(value, "tolist"):  # a tensor beside a loss
        return _finite(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fit_document(result: FitResult) -> dict[str, Any]:
    """Return what ``fit --json`` prints: all that the run has reported."""
    # Without the model and the optimizer, which JSON cannot hold: a run_dir keeps them.
    return {
        "ended": result.ended,
        "num_steps": result.num_steps,
        "num_samples": result.num_samples,
        "plan": plan_document(result.plan),
        "history": [dataclasses.asdict(report) for report in result.history],
        "events": [{"type": type(event).__name__, **dataclasses.asdict(event)} for event in result.events],
    }


def kept_document(kept: Kept) -> dict[str, Any]:
    """Return what ``fit --json`` prints of where the run is kept; null where it is not."""
    place = None if kept.path is None else str(kept.path)
    return {"run_dir": place, "resume_command": kept.resume_command, "report_command": kept.report_command}


def check_document(report: CheckReport) -> dict[str, Any]:
    """Return what ``check --json`` prints: all that was measured, null where nothing could be."""
    return dataclasses.asdict(report)


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return what ``plan --json`` prints, and what others print of a plan."""
    return {
        "effective_batch": plan.effective_batch,
        "world_size": len(plan.ranks),
        "accumulation_steps": plan.accumulation_steps,
        "sizes": plan.sizes,
        "ranks": plan.ranks,
    }


def plan_line(plan: Plan) -> str:
    """Return one line, however many micro-batches there are: ``86 x 1 + 85 x 2 = 256 samples, ...``."""
    steps, ranks = plan.accumulation_steps, len(plan.ranks)
    return (
        f"{sizes_text(plan.sizes)} = {plan.effective_batch} samples: {counted(steps, 'accumulation step')} "
        f"on {f'each of {ranks} ranks' if ranks > 1 else '1 rank'}"
    )


class TrialRows:
    """Prints the table of a probe's trials, each as it ends: one of them may take minutes."""

    def __init__(self) -> None:
        self._has_begun = False

    def __call__(self, trial: Trial) -> None:
        """Print the row of a trial, and the head of the table above the first."""
        if not self._has_begun:
            print(
                f"{'micro-batch':>11}  {'fits':<4}  {'peak':>10}  {'predicted':>10}  {'seconds':>8}  {'samples/s':>9}"
            )
        self._has_begun = True
        # Of what ran out of memory no peak is known, and the first sizes have no prediction.
        peak, predicted = (
            "-" if value is None else format_bytes(value) for value in (trial.peak_bytes, trial.predicted_bytes)
        )
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.4f}"
        rate = "-" if not trial.seconds else f"{trial.micro_batch / trial.seconds:.0f}"
        fits = "yes" if trial.fits else "no"
        row = f"{trial.micro_batch:>11}  {fits:<4}  {peak:>10}  {predicted:>10}  {seconds:>8}  {rate:>9}"
        print(row, flush=True)


def probe_lines(report: ProbeReport) -> Iterable[str]:
    """Return what the trials of a probe have shown, to stand below their table."""
    yield ""
    if (model := report.memory_model) is not None:  # it takes two sizes to fit one
        error = prediction_error(report.trials)  # how far to trust the line that was fitted
        off = "" if error is None else f"; its last prediction was {error:.1%} off"
        each = format_bytes(model.bytes_per_sample)
        yield f"memory model: {format_bytes(model.fixed_bytes)} + {each} per sample{off}"
    is_kept_free = any(not t.fits and t.peak_bytes and t.peak_bytes <= report.limit_bytes for t in report.trials)
    yield f"limit: {format_bytes(report.limit_bytes)}{', less the headroom' * is_kept_free}"
    repeated = report.num_samples is not None and report.num_samples < report.max_micro_batch
    of = f" (the data's {report.num_samples}, repeated)" if repeated else ""
    yield f"largest micro-batch: {report.max_micro_batch}{of}"
    rates = {t.micro_batch: t.micro_batch / t.seconds for t in report.trials if t.fits and t.seconds}
    fastest = max(rates, key=rates.__getitem__, default=0)
    if fastest and rates[fastest] > _CLEARLY_FASTER * rates.get(report.max_micro_batch, rates[fastest]):
        yield f"fastest of these trials: {fastest}; training times whole windows, and chooses by that"
    if report.plan is not None:
        yield f"plan: {plan_line(report.plan)}"


def study_document(study: Study, found: Mapping[str, Any], best: Sequence[FrozenTrial], place: Path) -> dict[str, Any]:
    """Return what ``sweep --json`` prints: how the trials have ended, and what is known of each.

    Args:
        study: of the sweep.
        found: its totals.
        best: its best trials.
        place: its directory; null for a trial that has none there.
    """
    from autoaccum.sweeps.claims import folder_of

    trials = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "values": trial.values,
            "params": trial.params,
            **trial.user_attrs,
            "directory": str(folder) if (folder := folder_of(place, trial.number)).exists() else None,
        }
        for trial in study.trials
    ]
    return {"study": study.study_name, **found, "best": [trial.number for trial in best], "trials": trials}


def study_lines(best: Sequence[FrozenTrial], found: Mapping[str, Any]) -> Iterable[str]:
    """Return the table of a study's best trials, and below it how all of them have ended and what they cost."""
    # The best trial names the columns: trials of a study draw the same, unless its search_space goes by conditions.
    names = list(best[0].params) if best else []
    yield "  ".join([f"{'trial':>5}", *(f"{title:>15}" for title in (*found["metric"], *names))])
    for trial in best[:10]:  # of several metrics it is a front, which may be long
        values = [f"{value:.6g}" if isinstance(value, float) else f"{value}" for value in trial.params.values()]
        yield "  ".join(
            [f"{trial.number:>5}", *(f"{text:>15}" for text in (*(f"{v:.6g}" for v in trial.values), *values))]
        )
    yield ""
    yield (
        f"{counted(found['finished'], 'trial')}: {found['complete']} to the end, {found['pruned']} pruned, "
        f"of these {found['not_fitting']} that did not fit, {found['diverged']} that diverged and {found['stopped']} "
        f"that a callback stopped; {found['failed']} failed"
    )
    yield (
        f"cost of searching for micro-batches: {counted(found['search_trials'], 'size')} tried, "
        f"{counted(found['ooms'], 'OOM')}, at most {counted(found['wasted_samples'], 'sample')} of "
        f"{found['num_samples']} run again"
    )


def hush() -> bool:
    """Let what is still printed go nowhere if nobody reads it any more; return whether that is so."""
    is_gone = False
    for stream in (sys.stdout, sys.stderr):
        # Of a stream that is no file, as in a notebook, nobody has gone.
        with suppress(OSError, ValueError, AttributeError):
            number = stream.fileno()
            poll = select.poll()
            poll.register(number, 0)  # errors are told whatever is asked for
            if any(what & (select.POLLERR | select.POLLHUP) for _, what in poll.poll(0)):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)  # Python flushes what is left when it ends, and would complain
                os.close(nowhere)
                is_gone = True
    return is_gone


def fail(error: Exception, code: int) -> int:
    """Print an error as one message, and return the exit code."""
    # What a recipe returns is a dict, whose keys are mended in Python.
    text = str(error) if isinstance(error, RecipeError) else as_options(str(error))
    print(f"error: {text}", file=sys.stderr)
    return code


def show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning of ours as one line, and any other with the place that it comes from."""
    if issubclass(category, AutoaccumWarning):
        from tqdm import tqdm  # imported here, for most commands end without a warning

        tqdm.write(
            f"warning: {' '.join(as_options(str(message)).split())}", file=sys.stderr
        )  # above a progress bar, not in it
    else:
        print(warnings.formatwarning(message, category, *where[:2]), end="", file=sys.stderr)
