"""A sweep in numbers and sentences: what was searched, what was best, what it cost, and how lr goes with the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autoaccum.reporting.amounts import format_seconds
from autoaccum.reporting.answers import Answer
from autoaccum.sweeps.best_lr import BestLr, Growth, best_lrs_of, growth_answer, growth_of
from autoaccum.sweeps.spaces import described

SETTINGS = "autoaccum"
"""Name of the user attribute by which a study is known to be a sweep's, and that holds its settings."""
ORIGIN = "autoaccum origin"
"""Name of the user attribute that holds by what the last call of a study was started: versions, command, commit."""
AGAIN = "autoaccum again"
"""Name of the user attribute that holds by what a trial is trained once more, as the last call has it."""
_ENOUGH = 8
"""Number of complete trials from which on something is said about importance."""
_FEW_RANGES = 3
"""Number of ranges of one parameter, of calls that follow each other, up to which each is told."""
_TOTALS = ("num_samples", "seconds", "search_trials", "ooms", "replays", "wasted_samples")
"""User attributes of trials that are summed."""
_LOSS = "validation_loss"
_TAKEN = ("seconds", "samples")
"""Metrics of what a trial has taken, which no validation reports."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFacts:
    """One trial in a few numbers."""

    # As plain values, so that ``report --json`` can print them.
    number: int
    state: str
    """complete, pruned, did not fit, diverged, stopped, running, failed or waiting"""
    params: Mapping[str, Any]
    values: tuple[float, ...]
    """Values of a complete one, in the order of the study's metrics; empty for others."""
    reports: tuple[tuple[int, float], ...]
    """(samples seen, value of what the study's ``reported`` names)."""
    num_samples: int | None
    """Samples that it was trained on; None for one that has not ended."""
    seconds: float | None
    """Seconds of training, likewise."""
    ooms: int | None
    micro_batches: tuple[int, ...]
    seed: int | None
    """Of all that is random in it; None for one that nobody has begun."""

    @property
    def place(self) -> tuple[int, float] | None:
        """Return effective batch and learning rate; None where not both were searched for, or one has no logarithm."""
        batch, lr = self.params.get("effective_batch"), self.params.get("lr")
        if not isinstance(batch, int) or not isinstance(lr, int | float):
            return None
        # A recipe may have searched a parameter of the same name for something else.
        return (batch, lr) if batch > 0 and 0 < lr < math.inf else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts:
    """A study in a few numbers and sentences."""

    name: str
    state: str
    metrics: tuple[str, ...]
    directions: tuple[str, ...]
    """minimize or maximize, of each metric"""
    num_samples: int
    """Budget of a trial, in samples."""
    counts: Mapping[str, int]
    """Number of trials in each state."""
    totals: Mapping[str, float]
    """Sums over trials of num_samples, seconds, search_trials, ooms, replays and wasted_samples."""
    best: tuple[int, ...]
    """Numbers of complete trials, the best first; of several metrics those of the Pareto front."""
    best_lrs: tuple[BestLr, ...]
    growth: Growth | None
    """None with fewer than two effective batches to compare."""
    ranges: Mapping[str, tuple[float, float]]
    """The least and the greatest number that was searched, of each parameter that is one."""
    trials: tuple[TrialFacts, ...]
    """The best first."""
    answers: tuple[Answer, ...]
    origin: Mapping[str, Any]
    """By what the last call was started: versions, command, commit; empty of studies of earlier versions."""

    @property
    def reported(self) -> str:
        """Return what trials report of their validations: the first metric, or the loss where validations have none."""
        return _LOSS if self.metrics[0] in _TAKEN else self.metrics[0]

    def is_maximised(self, at: int = 0) -> bool:
        """Return whether the metric at this place is to be as high as can be."""
        return self.directions[at] == "maximize"


def facts_of(study: optuna.Study) -> StudyFacts:
    """Return the facts of a study that a sweep has made, as far as it has come."""
    settings = study.user_attrs[SETTINGS]
    metrics = tuple(settings["metric"])
    directions = tuple(direction.name.lower() for direction in study.directions)
    # Values times their signs are the better the lower, which is how everything below compares them.
    signs = [{"minimize": 1, "maximize": -1}[direction] for direction in directions]
    # Read once: trials may finish meanwhile, and the numbers below should be of one moment.
    frozen = study.get_trials(deepcopy=False)
    # Of one metric the order of the values is all there is.
    front = {trial.number for trial in study.best_trials} if len(metrics) > 1 else set()
    trials = sorted(map(_trial, frozen), key=lambda trial: _rank(trial, front, signs))
    # Of one metric all complete trials in their order, so that the second best can be told too.
    best = [trial.number for trial in trials if trial.values and (len(metrics) == 1 or trial.number in front)]
    counts = {state: sum(trial.state == state for trial in trials) for state in _STATES}
    # A trial that has not ended has no such attributes yet, and counts nothing.
    totals = {name: sum(trial.user_attrs.get(name, 0) for trial in frozen) for name in _TOTALS}
    space = _space(frozen)
    # Of a range of effective batches each trial has another one: there is something to compare only in octaves.
    best_lrs = best_lrs_of(
        _points(trials, signs[0]), by_octave=isinstance(space.get("effective_batch"), IntDistribution)
    )
    growth = growth_of(best_lrs)
    # Nothing in the storage tells a trial that runs from one whose process was killed.
    ended = sum(counts.values()) - counts["running"] - counts["waiting"]
    return StudyFacts(
        name=study.study_name,
        state=f"{counts['running']} running or killed, {ended} ended" if counts["running"] else f"{ended} ended",
        metrics=metrics,
        directions=directions,
        num_samples=settings["samples"],
        counts=counts,
        totals=totals,
        best=tuple(best),
        best_lrs=best_lrs,
        growth=growth,
        ranges={name: ends for name, searched in space.items() if (ends := _ends(searched)) is not None},
        trials=tuple(trials),
        answers=(
            _searched(space, frozen, settings["samples"], metrics, signs),
            _ended(counts),
            _found([trial for trial in trials if trial.number in best], metrics, signs),
            _cost(frozen, totals, counts),
            growth_answer(best_lrs, growth),
        ),
        origin=study.user_attrs.get(ORIGIN, {}),
    )


# States in the order in which trials are listed: the finished ones first.
_FINISHED = ("complete", "pruned", "did not fit", "diverged", "stopped")
_STATES = (*_FINISHED, "running", "failed", "waiting")
WHY = {"not_fitting": "did not fit", "diverged": "diverged", "stopped": "stopped"}
"""States of trials that Optuna knows as pruned, by the user attribute that tells them apart."""
_NAMES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.RUNNING: "running",
    TrialState.FAIL: "failed",
    TrialState.WAITING: "waiting",
}


def _trial(trial: FrozenTrial) -> TrialFacts:
    """Return the facts of one of Optuna's trials."""
    noted = trial.user_attrs
    state = _NAMES[trial.state]
    if trial.state == TrialState.PRUNED:
        # The first that applies; a trial has at most one of them.
        state = next((name for attribute, name in WHY.items() if attribute in noted), state)
    return TrialFacts(
        number=trial.number,
        state=state,
        params=trial.params,
        values=tuple(trial.values) if trial.state == TrialState.COMPLETE else (),
        reports=tuple(sorted(trial.intermediate_values.items())),
        num_samples=noted.get("num_samples"),
        seconds=noted.get("seconds"),
        ooms=noted.get("ooms"),
        micro_batches=tuple(noted.get("micro_batches", ())),
        seed=noted.get("seed"),
    )


def _rank(trial: TrialFacts, front: set[int], signs: Sequence[int]) -> tuple[Any, ...]:
    """Return a key to sort by, so that the best comes first.

    Complete trials go by their values, those of the Pareto front first; of the others who came further stands higher,
    and of two that came as far the one whose last report is better.
    """
    # math.inf puts a report that is not finite last among those that came as far.
    seen, last = trial.reports[-1] if trial.reports else (0, math.nan)
    values = tuple(sign * value for sign, value in zip(signs, trial.values, strict=False))
    how = values or (-seen, signs[0] * last if math.isfinite(last) else math.inf)
    return _STATES.index(trial.state), trial.number not in front, how, trial.number


def _points(trials: Sequence[TrialFacts], sign: int) -> list[tuple[int, float, float | None]]:
    """Return effective batch, lr and signed value, the lowest the best, of finished trials; None of one ended early."""
    found = []
    for trial in trials:
        if trial.state in _FINISHED and trial.place is not None:
            batch, lr = trial.place
            found.append((batch, lr, sign * trial.values[0] if trial.values else None))
    return found


def _searched(
    space: Mapping[str, BaseDistribution],
    trials: Sequence[FrozenTrial],
    num_samples: int,
    metrics: Sequence[str],
    signs: Sequence[int],
) -> Answer:
    """Say what was searched and for what, as the study's trials tell."""
    # From the trials and not from the call: several calls may have searched, with other ranges.
    each = []
    for name, whole in space.items():
        ranges = list(dict.fromkeys(described(t.distributions[name]) for t in trials if name in t.distributions))
        # A search_space may give each trial a range of its own, of which nobody reads a list.
        is_listed = len(ranges) <= _FEW_RANGES
        each.append(f"{name} {', then '.join(ranges) if is_listed else f'{described(whole)}, in {len(ranges)} ranges'}")
    what = f"{'; '.join(each)}. " if each else ""
    sought = [f"the {_END[sign]} {name}" for name, sign in zip(metrics, signs, strict=True)]
    text = f"{what}A trial has {num_samples:,} samples, and what is sought is {listed(sought)}."
    return Answer(question="What was searched?", text=text, good=None)


_END = {1: "lowest", -1: "highest"}
"""Words for the best value, by the metric's sign."""


def _space(trials: Sequence[FrozenTrial]) -> dict[str, BaseDistribution]:
    """Return what was searched: each range from the lowest to the highest that it has had.

    Optuna lets a range change from one call to the next, and choices not.
    """
    space: dict[str, Any] = {}
    for trial in trials:
        for name, new in trial.distributions.items():
            old: Any = space.setdefault(name, new)  # the first trial's
            if old != new and isinstance(new, IntDistribution | FloatDistribution):
                space[name] = type(new)(min(old.low, new.low), max(old.high, new.high), log=new.log)
    return space


def _ends(distribution: Any) -> tuple[float, float] | None:
    """Return the least and the greatest number that a distribution has; None where it has others than numbers."""
    if not isinstance(distribution, CategoricalDistribution):
        return distribution.low, distribution.high
    choices = distribution.choices
    if any(isinstance(choice, bool) or not isinstance(choice, int | float) for choice in choices):
        return None
    return min(choices), max(choices)  # type: ignore[type-var, return-value]


def _ended(counts: Mapping[str, int]) -> Answer:
    """Say how the trials ended."""
    question = "How did the trials end?"
    parts = [f"{number:,} {_WORDS[state]}" for state, number in counts.items() if number]
    if not parts:
        return Answer(question=question, text="There is none yet.", good=None)
    total = sum(counts.values())  # more than were asked for where some have failed
    text = f"{total:,} trial{'' if total == 1 else 's'}: {', '.join(parts)}."
    return Answer(question=question, text=text, good=not counts["failed"])


_WORDS = {
    "complete": "came to the end",
    "pruned": "pruned",
    "did not fit": "did not fit",
    "diverged": "diverged",
    "stopped": "stopped by a callback",
    "running": "running or killed",
    "failed": "failed",
    "waiting": "waiting",
}
"""Words for what became of a trial, by its state."""


def _found(best: Sequence[TrialFacts], metrics: Sequence[str], signs: Sequence[int]) -> Answer:
    """Say what was best; of several metrics the ends of the front."""
    question = "What was best?"
    if not best:
        return Answer(question=question, text="No trial has come to the end yet.", good=None)
    if len(metrics) > 1:  # no trial is the best of all: one for the best end of each metric
        ends = []
        for at, (name, sign) in enumerate(zip(metrics, signs, strict=True)):
            end = min(best, key=lambda trial: sign * trial.values[at])
            ends.append(f"{_named(end)} has the {_END[sign]} {name}, {end.values[at]:.4g}")
        count = f"{len(best)} trial{' is' if len(best) == 1 else 's are'} not beaten in all of {listed(metrics)}"
        return Answer(question=question, text=f"{count}; {'; '.join(ends)}.", good=None)
    first = best[0]
    # With what to pass to have it again.
    name = _named(first)
    text = f"{name[0].upper()}{name[1:]} has the {_END[signs[0]]} {metrics[0]}, {first.values[0]:.4g}"
    text += "." if first.seconds is None else f", after {format_seconds(first.seconds)} of training."
    if len(best) > 1:  # by how much the best is ahead says whether it is more than luck
        text += f" The next best has {best[1].values[0]:.4g}: {_named(best[1])}."
    return Answer(question=question, text=text, good=None)


def _named(trial: TrialFacts) -> str:
    """Return a trial's number, its parameters and its seed, without which it is another one."""
    facts = [f"{name} {shown(value)}" for name, value in trial.params.items()]
    facts += [] if trial.seed is None else [f"seed {trial.seed}"]
    return f"trial {trial.number}" + (f" ({', '.join(facts)})" if facts else "")


def _cost(trials: Sequence[FrozenTrial], totals: Mapping[str, float], counts: Mapping[str, int]) -> Answer:
    """Say what it cost to find the micro-batches: what was tried, and what ran out of memory."""
    # Later trials begin from what the first has found, so its share tells what that saves.
    tried = [trial.user_attrs.get("search_trials", 0) for trial in trials]
    # At most, for a replay runs a window again from its beginning, and may have failed anywhere in it.
    samples, wasted, ooms = (int(totals[name]) for name in ("num_samples", "wasted_samples", "ooms"))
    text = (
        f"{sum(tried):,} size{' was' if sum(tried) == 1 else 's were'} tried"
        f"{f', {tried[0]:,} of them in the first trial' if tried else ''}; "
        f"the device ran out of memory {ooms:,} time{'' if ooms == 1 else 's'}, and at most {wasted:,} of {samples:,} "
        f"samples{f' ({wasted / samples:.1%})' if wasted else ''} had to be run again."
    )
    if ooms and not counts["failed"]:  # where a trial has failed, the storage does not say whether it was by that
        text += " No trial was lost by it."
    return Answer(question="What did the search for micro-batches cost?", text=text, good=not counts["failed"])


def shown(value: Any) -> str:
    """Format a parameter for people.

    >>> shown(0.00123456), shown(128), shown("sgd")
    ('0.001235', '128', 'sgd')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def listed(parts: Sequence[str]) -> str:
    """Join parts as a sentence has them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def importances_of(study: optuna.Study) -> tuple[dict[str, float], str]:
    """Return the shares of the parameters in what the first metric varies by, the greatest first; or none, and why."""
    few = f"Too few trials are complete to tell: it takes {_ENOUGH}."
    # Pruned ones have no value at the end that could be compared.
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < _ENOUGH:
        return {}, few
    # Only what every trial has drawn, and not all alike: else there is nothing to compare.
    varied = set.intersection(*({*trial.params} for trial in complete))
    names = []
    for name in sorted(varied):
        if len({trial.params[name] for trial in complete}) > 1:
            names.append(name)
    if len({trial.values[0] for trial in complete if math.isfinite(trial.values[0])}) < 2 or not names:
        return {}, "All complete trials are alike."
    try:
        # By its seed the shares are the same whenever the report is written.
        evaluator: Any = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(_alike(complete, names), evaluator=evaluator, params=names)
    except ImportError:
        return {}, "Optuna takes scikit-learn to tell: python -m pip install scikit-learn."
    return dict(sorted(found.items(), key=lambda one: -one[1])), ""


def _alike(trials: Sequence[FrozenTrial], names: Sequence[str]) -> optuna.Study:
    """Return a study of these parameters and the first values, as if the ranges had been the same for all trials."""
    # Ranges that were changed between calls would make Optuna refuse to compare the trials.
    space = _space(trials)
    # Optuna says that it has created a study, which nobody has asked for.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()  # in memory
    optuna.logging.set_verbosity(verbosity)
    for trial in trials:
        params = {name: trial.params[name] for name in names}
        distributions = {name: space[name] for name in names}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=trial.values[0]))
    return study
