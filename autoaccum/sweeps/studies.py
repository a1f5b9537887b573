"""A sweep's study: found by its directory or its storage, its trials in their order, and what they have come to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from autoaccum.errors import ArgumentError
from autoaccum.sweeps.claims import directory_of
from autoaccum.sweeps.storages import JOURNAL, open_storage

SETTINGS = "autoaccum"
"""Name of the user attribute by which a study is known to be a sweep's, and that holds its settings."""
ORIGIN = "autoaccum origin"
"""Name of the user attribute that holds how the last call was started: versions, command, commit."""
WHY = {"not_fitting": "did not fit", "diverged": "diverged", "stopped": "stopped"}
"""States of trials that Optuna knows as pruned, by the user attribute that tells them apart."""
STATES = ("complete", "pruned", *WHY.values(), "running", "failed", "waiting")
"""States in the order in which trials are listed."""
_TOTALS = ("num_samples", "seconds", "search_trials", "ooms", "replays", "wasted_samples")
"""User attributes of trials that are summed."""


def load_study(place: str, name: str | None = None) -> tuple[optuna.Study, Path]:
    """Return the study, and the directory of its sweep: below the current one, if it is found by its storage.

    Args:
        place: the directory of a sweep that named no storage, or a storage as ``sweep`` takes it.
        name: of the study; the only one when left out.

    Raises:
        ArgumentError: there is no such study of a sweep, or more than one.
    """
    # A directory of that name comes first: a storage's text is hardly ever one.
    is_directory = Path(place).is_dir()
    file = Path(place) / "study.db" if is_directory else _file_of(place)
    if file is not None and not file.exists():  # opening it would make one
        raise ArgumentError("RUN_DIR", place, "the directory of a run or a sweep, or the storage of a sweep")
    storage = open_storage(None if is_directory else place, Path(place))
    # Others may use the same storage: a study that no sweep has made lacks the settings that the report reads.
    names = sorted(study.study_name for study in storage.get_all_studies() if SETTINGS in study.user_attrs)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        accepted = f"one of {', '.join(names)}" if names else "a study that a sweep has made, and there is none"
        raise ArgumentError("study", name, accepted, f"Those of {place} are meant." if names else "")
    study = optuna.load_study(study_name=name, storage=storage)
    return study, Path(place) if is_directory else directory_of(study.study_name)


def _file_of(url: str) -> Path | None:
    """Return the file that a storage is kept in; None of one on a server."""
    if url.startswith("sqlite"):
        return Path(url.partition(":///")[2].partition("?")[0])
    return None if "://" in url else Path(url.removeprefix(JOURNAL))


def state_of(trial: FrozenTrial) -> str:
    """Return one of ``STATES``."""
    if trial.state == TrialState.PRUNED:
        return next((state for attribute, state in WHY.items() if attribute in trial.user_attrs), "pruned")
    return "failed" if trial.state == TrialState.FAIL else trial.state.name.lower()


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """Return all trials, the best first.

    Complete trials are sorted by the first metric, those of the Pareto front before others; the rest by how far they
    came, then by their last report.
    """
    trials = study.get_trials(deepcopy=False)
    sign = -1 if study.directions[0] == optuna.study.StudyDirection.MAXIMIZE else 1
    front = {trial.number for trial in study.best_trials} if len(study.directions) > 1 else set()

    def key(trial: FrozenTrial) -> tuple[Any, ...]:
        if trial.state == TrialState.COMPLETE:
            return STATES.index("complete"), trial.number not in front, sign * trial.values[0], trial.number
        seen, last = max(trial.intermediate_values.items(), default=(0, math.inf))
        return STATES.index(state_of(trial)), -seen, sign * last if math.isfinite(last) else math.inf, trial.number

    return sorted(trials, key=key)


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the complete trials, the best first; with several metrics only those on the Pareto front."""
    complete = [trial for trial in ranked(study) if trial.state == TrialState.COMPLETE]
    if len(study.directions) == 1:
        return complete
    front = {trial.number for trial in study.best_trials}
    return [trial for trial in complete if trial.number in front]


def totals(study: optuna.Study) -> dict[str, Any]:
    """Count the trials by their end, and sum what they took; see ``sweep`` for the words."""
    trials = study.get_trials(deepcopy=False)
    states = [trial.state for trial in trials]
    complete, pruned = states.count(TrialState.COMPLETE), states.count(TrialState.PRUNED)
    return {
        "metric": tuple(study.user_attrs[SETTINGS]["metric"]),
        "direction": tuple(direction.name.lower() for direction in study.directions),
        "finished": complete + pruned,
        "complete": complete,
        "pruned": pruned,
        "failed": states.count(TrialState.FAIL),
        **{name: sum(state_of(trial) == state for trial in trials) for name, state in WHY.items()},
        # A trial that has not ended has no such attributes yet.
        **{name: sum(trial.user_attrs.get(name, 0) for trial in trials) for name in _TOTALS},
    }
