"""The command line: parse, call, print.

``fit``, ``probe``, ``plan`` and ``sweep`` have no option of their own besides ``--json`` (and ``--trials``): the others
are the parameters of the functions they call, as far as these can be written on a command line, and so cannot fall
behind them. ``cache`` shows and clears what is kept of past runs; ``report`` makes a page of what runs have recorded.

Exit codes: 0 done; 2 usage; 3 not even one sample fits; 4 stopped by a signal, with a checkpoint written; 130 by
Ctrl-C without one; 1 anything else.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import reduce
from json import dumps
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import App, CycloptsError, Parameter, Token

from autoaccum._units import format_bytes
from autoaccum._version import __version__
from autoaccum.errors import (
    ArgumentError,
    AutoaccumError,
    AutoaccumWarning,
    MemoryLimitError,
    RecipeError,
    ResumeError,
)
from autoaccum.events import Finished
from autoaccum.planning import cuts as planner
from autoaccum.planning.costs import prediction_error
from autoaccum.runs.past import Past
from autoaccum.training.recipes import FORMS, RecipeRaised, opened

if TYPE_CHECKING:  # they take torch with them, which `plan` and `--help` have no use for
    from optuna.trial import FrozenTrial

    from autoaccum.training.probing import ProbeReport
    from autoaccum.training.trainer import FitResult

BUDGETS = ("epochs", "steps", "samples")
STUDY = "study.db"
"""What a sweep keeps in its directory, unless told otherwise."""
_RECIPE_HELP = f"{FORMS}: a function (recipe() when none is named) that returns fit's arguments as a dict."

Recipe = Annotated[str, Parameter(help=_RECIPE_HELP)]
Json = Annotated[
    bool,
    Parameter(help="print one JSON document on standard output, and nothing else.", show_default=False, negative=()),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            # Parsed here and called here, so that cyclopts is in no traceback.
            command, bound, _ = _app().parse_args(
                sys.argv[1:] if argv is None else list(argv), print_error=False, exit_on_error=False
            )
            return command(*bound.args, **bound.kwargs) or 0
        except (CycloptsError, ArgumentError, RecipeError, ResumeError) as error:
            return _fail(error, 2)
        except MemoryLimitError as error:
            return _fail(error, 3)
        except AutoaccumError as error:
            return _fail(error, 1)
        except RecipeRaised as raised:
            traceback.print_exception(raised.__cause__)
            return 1
        except KeyboardInterrupt:
            return 130
        except Exception:
            traceback.print_exc()
            return 1


def _app() -> App:
    app = App(
        name="autoaccum",
        help="Train PyTorch models at an exact effective batch, in whatever memory there is.",
        version=__version__,
        help_format="plaintext",
    )
    override = "Options override what the recipe returns; what neither says is the default."
    # Made by __getattr__ below, and only when they are called: without torch, help and plan are quick.
    app.command("autoaccum.cli.app:fit", name="fit", help=f"Train what RECIPE returns.\n\n{override}")
    app.command(
        "autoaccum.cli.app:probe",
        name="probe",
        help=f"Find the largest micro-batch that fits, without training.\n\n{override}",
    )
    app.command(
        _command(_plan, _parameters(planner.plan), planner.plan.__doc__),
        name="plan",
        help="Cut a window into micro-batches: arithmetic alone.",
    )
    app.command("autoaccum.cli.app:sweep", name="sweep", help=f"Search for lr and effective batch.\n\n{override}")
    # What a default does is shown by the help of its App.
    cache = App(
        name="cache",
        help="Show what earlier runs found out about micro-batches, from which later ones begin.\n\n"
        "It is kept in the user's cache directory, or where the environment variable AUTOACCUM_CACHE_DIR says.",
    )
    cache.default(_cache)
    cache.command(_clear_cache, name="clear")
    app.command(cache)
    app.command(_report, name="report")
    return app


def __getattr__(name: str) -> Any:
    """The commands whose options torch has to be imported for (PEP 562)."""
    if name == "fit":
        from autoaccum.training import fitting, trainer

        return _command(_fit, _parameters(trainer.Trainer), fitting.fit.__doc__)
    if name == "probe":
        from autoaccum.training import probing

        return _command(_probe, _parameters(probing.probe), probing.probe.__doc__)
    if name == "sweep":
        from autoaccum.sweeps.sweep import sweep
        from autoaccum.training import fitting, trainer

        # What stands in both is the sweep's; --trials is our own.
        not_here = ("recipe", "num_trials", "run_dir", "resume", "epochs", "steps")
        own, of_fit = _parameters(sweep), _parameters(trainer.Trainer)
        both = {name: parameter for name, parameter in (own | of_fit | own).items() if name not in not_here}
        args = "\n".join(_args(function.__doc__) for function in (fitting.fit, sweep))
        return _command(_sweep, both, f"Search for lr and effective batch.\n\nArgs:\n{args}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _fit(recipe: Recipe, /, *, json: Json = False, **options: Any) -> int:
    from autoaccum.training.fitting import fit

    with _stdout_kept(json), opened(recipe) as arguments:
        if not options.keys().isdisjoint(BUDGETS):  # one budget replaces another
            arguments = {name: value for name, value in arguments.items() if name not in BUDGETS}
        arguments = {**arguments, **options}
        if "effective_batch" not in arguments:
            raise ArgumentError(
                "effective_batch", None, "samples", "Pass --effective-batch, or return it from the recipe."
            )
        result = fit(**arguments)
    if json:
        _print_json(_fit_document(result))
    finished = [event.reason for event in result.events if isinstance(event, Finished)]  # of each process of the run
    if finished[-1:] != ["interrupted"]:
        return 0
    return 130 if arguments.get("run_dir") is None else 4


def _probe(recipe: Recipe, /, *, json: Json = False, **options: Any) -> None:
    from autoaccum.training.probing import probe

    with _stdout_kept(json), opened(recipe) as arguments:
        taken = inspect.signature(probe).parameters  # a recipe serves fit too, which takes more
        report = probe(**{**{name: value for name, value in arguments.items() if name in taken}, **options})
    if json:
        _print_json(
            {**dataclasses.asdict(report), "plan": None if report.plan is None else _plan_document(report.plan)}
        )
    else:
        print("\n".join(_probe_lines(report)))


def _sweep(
    recipe: Recipe,
    /,
    *,
    trials: Annotated[int, Parameter(help="finished or pruned ones that the study is to end with.")] = 20,
    json: Json = False,
    **options: Any,
) -> int:
    from autoaccum._checks import positive_int
    from autoaccum.sweeps.studies import best_trials, totals
    from autoaccum.sweeps.sweep import sweep

    positive_int("trials", trials)
    with _stdout_kept(json):
        try:
            study = sweep(recipe, num_trials=trials, **options)
        except KeyboardInterrupt:  # not while a window was run: what it has come to is in the storage
            print("interrupted: the same command goes on", file=sys.stderr)
            return 4
    found = totals(study)
    if json:
        trials_of = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "values": trial.values,
                "params": trial.params,
                **trial.user_attrs,
            }
            for trial in study.trials
        ]
        best = [trial.number for trial in best_trials(study)]
        _print_json({"study": study.study_name, **found, "best": best, "trials": trials_of})
    else:
        print("\n".join(_study_lines(best_trials(study), found)))
    if found["finished"] and found["not_fitting"] == found["finished"]:
        print(f"error: none of {_counted(found['finished'], 'trial')} fits: see their not_fitting", file=sys.stderr)
        return 3
    return 0 if found["finished"] >= trials else 4


def _plan(*, json: Json = False, **options: Any) -> None:
    plan = planner.plan(**options)
    if json:
        _print_json(_plan_document(plan))
    else:
        print(_plan_line(plan))


def _cache(*, json: Json = False) -> None:
    past = Past()
    entries, num_bytes = past.entries(), past.num_bytes()
    if json:
        models = [dataclasses.asdict(entry) for entry in entries]
        _print_json({"directory": str(past.where), "num_entries": len(models), "bytes": num_bytes, "entries": models})
        return
    for entry in entries:
        print(f"{entry.saved}  {entry.model} on {entry.device}: {_counted(entry.num_trials, 'size')}")
    print(f"{past.where}: {_counted(len(entries), 'entry', 'entries')}, {format_bytes(num_bytes)}")


def _clear_cache(*, json: Json = False) -> int:
    """Remove all of it, and nothing else that is in the same directory."""
    past = Past()
    try:
        removed = past.clear()
    except OSError as error:
        return _fail(error, 1)
    if json:
        _print_json({"directory": str(past.where), "removed_files": removed})
    else:
        print(f"{past.where}: removed {_counted(removed, 'file')}")
    return 0


def _report(
    run_dirs: Annotated[
        list[str],
        Parameter(
            name="RUN_DIR", negative=(), help="where a run has kept its records; or a sweep's directory or storage."
        ),
    ],
    /,
    *,
    study: Annotated[str | None, Parameter(help="which one, of a storage with several.", show_default=False)] = None,
    output: Annotated[str | None, Parameter(help="where to write; the (first) RUN_DIR.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """Make a page of a run, of several side by side, or of a sweep: report.html, and its pictures as report-*.png.

    What still goes on is shown as far as it has come.
    """
    if study is not None or any(map(_is_sweep, run_dirs)):
        return _report_study(run_dirs, study, output, json)
    from autoaccum.reporting.page import write_report

    try:
        report = write_report(run_dirs, output)
    except OSError as error:
        return _fail(error, 1)
    if json:
        _print_json(
            {
                "path": str(report.path),
                "images": [str(image) for image in report.images],
                "runs": [dataclasses.asdict(facts) for facts in report.runs],
            }
        )
    else:
        print(report.path)
    return 0


def _is_sweep(place: str) -> bool:
    if Path(place).is_dir():
        return (Path(place) / STUDY).exists()
    return "://" in place or place.startswith("journal:") or place.endswith(".log")


def _report_study(places: Sequence[str], name: str | None, output: str | None, json: bool) -> int:
    from autoaccum.sweeps.page import write_study_report
    from autoaccum.sweeps.studies import load_study

    if len(places) > 1:
        raise ArgumentError("RUN_DIR", ", ".join(places), "one sweep", "Make a page of each.")
    study, directory = load_study(places[0], name)
    try:
        report = write_study_report(study, directory, output)
    except OSError as error:
        return _fail(error, 1)
    if json:
        images = [str(image) for image in report.images]
        _print_json({"path": str(report.path), "images": images, "study": dataclasses.asdict(report.study)})
    else:
        print(report.path)
    return 0


def _counted(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def _args(doc: str | None) -> str:
    """The lines of a docstring's ``Args:``."""
    return inspect.cleandoc(doc or "").partition("\nArgs:\n")[2].partition("\n\n")[0]


def _command(
    run: Callable[..., int | None], offered: Mapping[str, inspect.Parameter], doc: str | None
) -> Callable[..., Any]:
    """``run`` with those of the parameters that a command line can write in place of its ``**options``.

    cyclopts passes on only what was given, so the defaults, though shown in the help, stay the function's business.
    """
    own = inspect.signature(run, eval_str=True).parameters.values()
    recipe_may_say = any(parameter.name == "recipe" for parameter in own)
    options = []
    for parameter in offered.values():
        if members := writable(parameter.annotation):
            converter = None if members == (bool,) else _convert
            annotation: Any = Annotated[reduce(or_, members), Parameter(converter=converter)]
            # What a recipe may say need not be said again; None stands for nothing here and is never passed on.
            unsaid = recipe_may_say and parameter.default is parameter.empty
            default = None if unsaid else parameter.default
            options.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

    def command(*args: Any, **kwargs: Any) -> int | None:
        return run(*args, **kwargs)

    parameters = [p for p in own if p.kind is not inspect.Parameter.VAR_KEYWORD] + options
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command


def writable(annotation: Any) -> tuple[Any, ...]:
    """The members of an annotation that can be written on a command line; none of them when it is empty.

    >>> writable(int | Literal["auto"] | list[int] | None)
    (<class 'int'>, typing.Literal['auto'])
    """
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for one in get_args(annotation) for member in writable(one))
    return (annotation,) if annotation in (int, float, bool, str) or get_origin(annotation) is Literal else ()


def _convert(annotation: Any, tokens: Sequence[Token]) -> Any:
    """The value of a text, by the narrowest type that takes it.

    cyclopts' own conversion would round 2.5 to an int, and so read a memory limit of 0.5 as 0 bytes.
    """
    text = tokens[0].value
    members = writable(annotation)
    words = {str(choice): choice for member in members for choice in get_args(member)}
    if bool in members:
        words |= {"true": True, "false": False}
    if text in words:
        return words[text]
    for narrow in (int, float, str):
        if narrow in members:
            with suppress(ValueError):
                return narrow(text)
    numbers = ["a number"] if float in members else ["a whole number"] if int in members else []
    raise ValueError(f"expected {' or '.join([*words, *numbers])}, not {text!r}")


@contextmanager
def _stdout_kept(json: bool) -> Iterator[None]:
    """Send to standard error what a recipe or a callback prints, where standard output is one JSON document."""
    if not json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def _print_json(document: dict[str, Any]) -> None:
    print(dumps(_finite(document), allow_nan=False))


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fit_document(result: FitResult) -> dict[str, Any]:
    return {
        "num_steps": result.num_steps,
        "num_samples": result.num_samples,
        "plan": _plan_document(result.plan),
        "history": [dataclasses.asdict(report) for report in result.history],
        "events": [{"type": type(event).__name__, **dataclasses.asdict(event)} for event in result.events],
    }


def _plan_document(plan: planner.Plan) -> dict[str, Any]:
    return {
        "effective_batch": plan.effective_batch,
        "world_size": len(plan.ranks),
        "accumulation_steps": plan.accumulation_steps,
        "sizes": plan.sizes,
        "ranks": plan.ranks,
    }


def _plan_line(plan: planner.Plan) -> str:
    """One line however many micro-batches there are: ``86 x 1 + 85 x 2 = 256 samples, ...``."""
    counts = sorted(Counter(plan.sizes).items(), reverse=True)
    cut = " + ".join(f"{size} x {count}" for size, count in counts)
    steps, ranks = plan.accumulation_steps, len(plan.ranks)
    return (
        f"{cut} = {plan.effective_batch} samples: {steps} accumulation step{'' if steps == 1 else 's'} "
        f"on {f'each of {ranks} ranks' if ranks > 1 else '1 rank'}"
    )


def _probe_lines(report: ProbeReport) -> Iterable[str]:
    yield f"{'micro-batch':>11}  {'fits':<4}  {'peak':>10}  {'predicted':>10}  {'seconds':>8}  {'samples/s':>9}"
    for trial in report.trials:
        peak, predicted = (
            "-" if value is None else format_bytes(value) for value in (trial.peak_bytes, trial.predicted_bytes)
        )
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.4f}"
        rate = "-" if not trial.seconds else f"{trial.micro_batch / trial.seconds:.0f}"
        fits = "yes" if trial.fits else "no"
        yield f"{trial.micro_batch:>11}  {fits:<4}  {peak:>10}  {predicted:>10}  {seconds:>8}  {rate:>9}"
    yield ""
    if (model := report.memory_model) is not None:
        error = prediction_error(report.trials)
        off = "" if error is None else f"; its last prediction was {error:.1%} off"
        each = format_bytes(model.bytes_per_sample)
        yield f"memory model: {format_bytes(model.fixed_bytes)} + {each} per sample{off}"
    yield f"limit: {format_bytes(report.limit_bytes)}"
    yield f"largest micro-batch: {report.max_micro_batch}"
    if report.plan is not None:
        yield f"plan: {_plan_line(report.plan)}"


def _study_lines(best: Sequence[FrozenTrial], found: Mapping[str, Any]) -> Iterable[str]:
    names = list(best[0].params) if best else []
    yield "  ".join([f"{'trial':>5}", *(f"{title:>15}" for title in (*found["metric"], *names))])
    for trial in best[:10]:
        values = [f"{value:.6g}" if isinstance(value, float) else f"{value}" for value in trial.params.values()]
        yield "  ".join(
            [f"{trial.number:>5}", *(f"{text:>15}" for text in (*(f"{v:.6g}" for v in trial.values), *values))]
        )
    yield ""
    yield (
        f"{_counted(found['finished'], 'trial')}: {found['complete']} to the end, {found['pruned']} pruned, "
        f"of these {found['not_fitting']} that did not fit, {found['diverged']} that diverged and {found['stopped']} "
        f"that a callback stopped; {found['failed']} failed"
    )
    yield (
        f"cost of searching for micro-batches: {_counted(found['search_trials'], 'size')} tried, "
        f"{_counted(found['ooms'], 'OOM')}, at most {_counted(found['wasted_samples'], 'sample')} of "
        f"{found['num_samples']} run again"
    )


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, AutoaccumWarning):
        from tqdm import tqdm

        tqdm.write(f"warning: {' '.join(str(message).split())}", file=sys.stderr)  # above a progress bar, not in it
    else:
        print(warnings.formatwarning(message, category, *where[:2]), end="", file=sys.stderr)
