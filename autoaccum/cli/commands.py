"""The commands: each calls one function of the public interface, prints what it returns, and gives the exit code."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.cli import options
from autoaccum.cli.keeping import keeping, sweep_lines
from autoaccum.cli.literals import parameters_of
from autoaccum.cli.options import Json, Recipe, Settings
from autoaccum.cli.printing import (
    TrialRows,
    check_document,
    counted,
    fail,
    fit_document,
    kept_document,
    plan_document,
    plan_line,
    print_json,
    probe_lines,
    stdout_kept,
    study_document,
    study_lines,
)
from autoaccum.errors import ArgumentError, MissingExtraError
from autoaccum.planning import plans
from autoaccum.training.recipes import name_of, opened

STUDY = "study.db"
"""What a sweep keeps in its directory, unless told otherwise."""


def __getattr__(name: str) -> Any:
    """Return a command whose options torch has to be imported for (PEP 562)."""
    if name not in ("check", "estimate", "fit", "probe", "sweep"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoaccum.training.declarations import arguments_of
    from autoaccum.training.options import BUDGETS, NOT_IN_SWEEPS

    # Made anew each time: a process runs one command, and tests call several.
    run = {"check": _check, "estimate": _estimate, "fit": _fit, "probe": _probe}.get(name)
    if run is not None:
        return options.command(run, options.of_declared(arguments_of(getattr(autoaccum, name)).values()))
    try:
        from autoaccum.sweeps.sweep import sweep
    except MissingExtraError as error:
        return _without_optuna(error)
    # The recipe is the command's own argument, and --trials its own name; budgets but samples would not be the same
    # for trials of different effective batches.
    left_out = {"recipe", "num_trials", "fit_arguments", *NOT_IN_SWEEPS}
    own = arguments_of(sweep)
    offered = arguments_of(autoaccum.fit) | own
    first = [one for one in own if one not in left_out]
    rest = [one for one in offered if one not in {*left_out, *own, *BUDGETS}]
    return options.command(_sweep, options.of_declared(offered[one] for one in (*first, *rest)))


def _without_optuna(error: MissingExtraError) -> App:
    """Return a command that raises the error for any words, because cyclopts loads all to suggest one for a typo."""
    stub = App(name="sweep", help_flags=(), version_flags=())

    @stub.default
    def call(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
        raise error

    return stub


def _check(recipe: Recipe, /, *, settings: Settings = None, json: Json = False, **given: Any) -> int:
    """Measure whether cut windows have the gradient of whole ones; 1 where they have not, or it cannot be measured."""
    from autoaccum.training.check import check
    from autoaccum.training.declarations import arguments_of

    with stdout_kept(json), opened(recipe, parameters_of(settings)) as arguments:
        shared = {name: value for name, value in arguments.items() if name in arguments_of(check)}
        report = check(**{**shared, "batch": _data_of(arguments), **given})
    if json:
        print_json(check_document(report))
    else:
        print(report)
    return 0 if report.passed else 1


def _estimate(recipe: Recipe, /, *, settings: Settings = None, json: Json = False, **given: Any) -> int:
    """Estimate what fits on a device that is not at hand; 3 where nothing does."""
    from autoaccum.training.declarations import arguments_of
    from autoaccum.training.estimate import estimate

    with stdout_kept(json), opened(recipe, parameters_of(settings)) as arguments:
        # Not left to estimate, whose TypeError would speak of Python and not of options.
        if "device_memory" not in given:
            cure = "Pass --device-memory: no other argument says which device is meant."
            raise ArgumentError("device_memory", None, "bytes, or a text such as 24GiB", cure)
        shared = {name: value for name, value in arguments.items() if name in arguments_of(estimate)}
        report = estimate(**{**shared, "batch": _data_of(arguments), **given})
    if json:
        print_json(dataclasses.asdict(report) | {"range_bytes": report.range_bytes})
    else:
        print(report)
    return 0 if report.fits else 3


def _data_of(arguments: Mapping[str, Any]) -> Any:
    """Return a recipe's data as ``check`` takes data: it takes a list for one batch, and refuses what is read once."""
    from autoaccum.data.sources import holds_samples  # not sooner: to help takes no torch
    from autoaccum.data.streams import is_iterator

    data: Any = arguments.get("data")
    if holds_samples(data, collate_fn=arguments.get("collate_fn"), split=arguments.get("split")):
        return _Samples(data)
    # The recipe is asked anew by the next command, so nobody misses what is read here.
    return _Batches(data) if isinstance(data, list) or is_iterator(data) else data


class _Samples:
    """A list of samples."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


class _Batches:
    """Batches that follow each other."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _fit(recipe: Recipe, /, *, settings: Settings = None, json: Json = False, **given: Any) -> int:
    """Train what the recipe returns."""
    from autoaccum.distributed.group import speaks
    from autoaccum.distributed.launcher import is_launched
    from autoaccum.reporting.logs import LoggingReporter
    from autoaccum.training.fit import fit
    from autoaccum.training.options import BUDGETS

    # Trained within the recipe's context, for processes that read data import what stands beside it.
    # Seeded as for a trial of a sweep, so that a recipe that draws its weights makes the same ones.
    with stdout_kept(json), opened(recipe, parameters_of(settings), given.get("seed")) as arguments:
        if not given.keys().isdisjoint(BUDGETS):  # one budget replaces another
            arguments = {name: value for name, value in arguments.items() if name not in BUDGETS}
        arguments = {**arguments, **given}
        # Not left to fit, whose TypeError would speak of Python and not of options.
        if "effective_batch" not in arguments:
            raise ArgumentError(
                "effective_batch", None, "samples", "Pass --effective-batch, or return it from the recipe."
            )
        if given.get("progress") is False:
            arguments["callbacks"] = _with(LoggingReporter(_log_on_stderr()), arguments.get("callbacks", ()))
        with keeping(recipe, arguments, json=json) as kept:
            # Not on several ranks, which would tell each other of callbacks after each window.
            if kept.is_new and not is_launched():
                arguments["callbacks"] = _with(kept, arguments.get("callbacks", ()))
            result = fit(**{**arguments, "run_dir": kept.path})
            kept.end(result)
    if json and speaks():
        print_json(fit_document(result) | kept_document(kept))
    # A run that was ended by a signal has come to its last checkpoint, if it has any: 4 says that it can go on.
    if kept.ended == "interrupted":
        return 130 if kept.path is None else 4
    return 1 if kept.ended == "diverged" else 0


def _log_on_stderr() -> logging.Logger:
    """Return a log without warnings, which the command prints itself."""
    # Made here and not looked up by a name, so that nothing of the process's own logging is changed.
    log, handler = logging.Logger("autoaccum"), logging.StreamHandler()
    handler.addFilter(lambda record: record.levelno == logging.INFO)
    log.addHandler(handler)
    return log


def _with(callback: Any, callbacks: Any) -> Any:
    """Return a recipe's callbacks with one more, the last; what is none is left to ``fit`` to refuse."""
    return [*callbacks, callback] if isinstance(callbacks, Iterable) else callbacks


def _probe(recipe: Recipe, /, *, settings: Settings = None, json: Json = False, **given: Any) -> None:
    """Find the largest micro-batch that fits."""
    from autoaccum.training.declarations import arguments_of
    from autoaccum.training.probe import probe, told

    with stdout_kept(json), opened(recipe, parameters_of(settings)) as arguments:
        # A recipe serves fit too, which takes more.
        shared = {name: value for name, value in arguments.items() if name in arguments_of(probe)}
        before = told.set(None if json else TrialRows())
        try:
            report = probe(**{**shared, **given})
        finally:
            told.reset(before)
    if json:
        print_json({**dataclasses.asdict(report), "plan": None if report.plan is None else plan_document(report.plan)})
    else:
        print("\n".join(probe_lines(report)))


def _sweep(
    recipe: Recipe,
    /,
    *,
    trials: Annotated[int, Parameter(help="finished or pruned ones that the study is to end with.")] = 20,
    settings: Settings = None,
    json: Json = False,
    **given: Any,
) -> int:
    """Run trials, as many as the study lacks, and print what they have come to."""
    from autoaccum._checks import positive_int
    from autoaccum.distributed.group import speaks
    from autoaccum.sweeps.claims import directory_of, folder_of
    from autoaccum.sweeps.studies import best_trials, totals
    from autoaccum.sweeps.sweep import sweep

    positive_int("trials", trials)  # by its name here, which is not that of sweep's argument
    with stdout_kept(json):
        try:
            study = sweep(recipe, num_trials=trials, recipe_arguments=parameters_of(settings) or None, **given)
        except KeyboardInterrupt:  # not while a window was run: what it has come to is in the storage
            print("interrupted: the same command resumes", file=sys.stderr)
            name = given.get("study_name") or name_of(recipe)
            # Before it was made there is nothing to say of it.
            if Path(given.get("directory") or directory_of(name)).exists() and speaks() and not json:
                _say_sweep(name, given, is_finished=False)
            return 4
    found = totals(study)  # of all processes that have worked on it
    if speaks() and json:  # the first rank for all
        place = Path(given.get("directory") or directory_of(study.study_name))
        print_json(study_document(study, found, best_trials(study), place))
    elif speaks():
        best = best_trials(study)
        print("\n".join(study_lines(best, found)), flush=True)
        place = Path(given.get("directory") or directory_of(study.study_name))
        more = [f"best weights: autoaccum.load_best({str(folder_of(place, best[0].number))!r}, model)"] if best else []
        _say_sweep(study.study_name, given, more, is_finished=found["finished"] >= trials)
    # Trials that do not fit are pruned, so the study has ended well; but nothing was learnt from it.
    if found["finished"] and found["not_fitting"] == found["finished"]:
        print(f"error: none of {counted(found['finished'], 'trial')} fits: see their not_fitting", file=sys.stderr)
        return 3
    # With fewer than were asked for it was interrupted: the same command goes on.
    return 0 if found["finished"] >= trials else 4


def _say_sweep(name: str, given: Mapping[str, Any], more: Sequence[str] = (), *, is_finished: bool) -> None:
    """Print where a study of that name is kept to standard error, and more lines after it."""
    from autoaccum.sweeps.claims import directory_of

    place = given.get("directory") or directory_of(name)
    lines = sweep_lines(place, given.get("storage"), name, is_finished=is_finished)
    print(*lines, *more, sep="\n", file=sys.stderr)


def _plan(*, json: Json = False, **given: Any) -> None:
    """Cut a window, and print how."""
    plan = plans.plan(**given)
    if json:
        print_json(plan_document(plan))
    else:
        print(plan_line(plan))


# Made when this is imported and not when it is called, for it needs no torch.
plan = options.command(_plan, options.of_function(plans.plan), plans.plan.__doc__ or "")

cache = App(name="cache")


@cache.default
def _show_cache(*, json: Json = False) -> None:
    """Print where it is kept, and how much of it there is."""
    from autoaccum.runs.past import Past  # not sooner: to help takes no torch

    past = Past()
    files = past.files()
    num_bytes = sum(path.stat().st_size for path in files)
    if json:
        print_json({"directory": str(past.where), "num_files": len(files), "bytes": num_bytes})
    else:
        print(f"{past.where}: {counted(len(files), 'file')}, {format_bytes(num_bytes)}")


@cache.command(name="clear")
def _clear_cache(*, json: Json = False) -> int:
    """Remove all of it, and nothing else that is in the same directory."""
    from autoaccum.runs.past import Past

    past = Past()
    files = past.files()
    try:
        for path in files:
            path.unlink(missing_ok=True)  # another process was first
    except OSError as error:  # no error of ours, and no mistake in our code: told without a traceback
        return fail(error, 1)
    if json:
        print_json({"directory": str(past.where), "removed_files": len(files)})
    else:
        print(f"{past.where}: removed {counted(len(files), 'file')}")
    return 0


def report(
    run_dirs: Annotated[
        list[str],
        Parameter(
            name="RUN_DIR", negative=(), help="where a run has kept its records; or a sweep's directory or storage."
        ),
    ],
    /,
    *,
    study: Annotated[str | None, Parameter(help="which one, of a storage with several.", show_default=False)] = None,
    output: Annotated[
        str | None,
        Parameter(
            help="where to write: a directory, or a file that ends in .html or .htm; the (first) RUN_DIR.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Make a page of runs or of a sweep, and print where it is."""
    # Whoever names a study means a sweep; else what the places hold tells.
    if study is not None or any(map(_is_sweep, run_dirs)):
        return _report_study(run_dirs, study, output, json=json)
    # Imported here, for it takes matplotlib with it, which no other command has a use for.
    from autoaccum.reporting.page import write_report

    try:
        page = write_report(run_dirs, output)
    except OSError as error:
        return fail(error, 1)
    if json:
        print_json(
            {
                "path": str(page.path),
                "runs": [dataclasses.asdict(facts) for facts in page.runs],
            }
        )
    else:
        print(page.path)
    return 0


def _is_sweep(place: str) -> bool:
    """Return whether it is a sweep's directory, or a storage of studies, rather than a run's directory."""
    if Path(place).is_dir():
        return (Path(place) / STUDY).exists()  # a sweep's own storage, beside the folders of its trials
    # Otherwise as ``sweep`` reads the text: a URL of Optuna, or a journal file.
    return "://" in place or place.startswith("journal:")


def _report_study(places: Sequence[str], name: str | None, output: str | None, *, json: bool) -> int:
    """Make a page of a study, and print where it is."""
    from autoaccum.sweeps.page import write_study_report
    from autoaccum.sweeps.studies import best_trials, load_study, totals

    if len(places) > 1:
        raise ArgumentError("RUN_DIR", ", ".join(places), "one sweep", "Make a page of each.")
    study, directory = load_study(places[0], name)
    try:
        path = write_study_report(study, directory, output)
    except OSError as error:
        return fail(error, 1)
    if json:
        print_json({"path": str(path), **study_document(study, totals(study), best_trials(study), directory)})
    else:
        print(path)
    return 0
