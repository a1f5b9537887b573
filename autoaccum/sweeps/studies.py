"""A sweep's study: found by its directory or its storage, and what it has come to."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from autoaccum.errors import ArgumentError, NoHistoryError
from autoaccum.reporting.columns import Run, load_run
from autoaccum.sweeps.claims import SEED, directory_of, folders_of
from autoaccum.sweeps.facts import AGAIN, SETTINGS, WHY, facts_of
from autoaccum.sweeps.storages import open_storage


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
    return None if "://" in url else Path(url.removeprefix("journal:"))


def runs_of(study: optuna.Study, directory: Path) -> dict[int, Run]:
    """Return what trials have recorded there, by their numbers; those run in other directories are left out."""
    found = {}
    for number, folder in folders_of(study, directory).items():
        with suppress(NoHistoryError):  # it has not begun to train
            found[number] = load_run(folder)
    return found


def best_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the complete trials, the best first; of several objectives those on the Pareto front, by the first."""
    trials = study.get_trials(deepcopy=False)
    return [trials[number] for number in facts_of(study).best]


def again(study: optuna.Study, trial: FrozenTrial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the recipe was called with for a trial, and the arguments of ``fit`` that come to its value again.

    Both are empty where a search_space has drawn for it, which alone knows what it made of that.

    Args:
        study: of the sweep.
        trial: one that has ended.
    """
    calls = [call for call in study.user_attrs.get(AGAIN, ()) if call["since"] <= trial.number]
    if not calls:  # an earlier version ran it
        return {}, {}
    known = calls[-1]
    values = {**known["values"], **trial.params}
    if values.keys() != {*known["recipe"], *known["fit"]}:
        return {}, {}
    # A recipe that makes its own optimizer takes the lr, which fit would refuse beside it.
    of_recipe, of_fit = ({name: values[name] for name in known[whose]} for whose in ("recipe", "fit"))
    of_fit |= {"seed": trial.user_attrs[SEED], "samples": study.user_attrs[SETTINGS]["samples"]}
    # Micro-batches of validations grow from one to the next: after as many the sum is the same to the bit.
    return of_recipe, of_fit | {"validate_every": known["validate_every"]}


def totals(study: optuna.Study) -> dict[str, Any]:
    """Count the trials by what became of them, and sum what they took; see ``sweep`` for the words."""
    facts = facts_of(study)
    # Optuna knows all of these as pruned, and so do the numbers here: they are told apart besides.
    became = {name: facts.counts[state] for name, state in WHY.items()}
    complete, pruned = facts.counts["complete"], facts.counts["pruned"] + sum(became.values())
    return {
        "metric": facts.metrics,
        "direction": facts.directions,
        "finished": complete + pruned,
        "complete": complete,
        "pruned": pruned,
        "failed": facts.counts["failed"],
        **became,
        **facts.totals,
    }
