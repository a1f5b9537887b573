"""The command line: parse and dispatch.

``check``, ``estimate``, ``fit``, ``probe``, ``plan`` and ``sweep`` have no option of their own besides ``--json`` (and
``--trials``): the others are the arguments of the functions they call, as far as these can be written on a command
line, and so cannot fall behind them. ``cache`` shows and clears what is kept of past runs; ``report`` makes a page of
what runs have recorded.

Exit codes: 0 done; 2 usage; 3 not even one sample fits; 4 stopped by a signal, with a checkpoint written; 130 by
Ctrl-C where nothing is kept, or by a second one; 141 where nobody read on what was printed; 1 anything else, of ``fit``
a run that diverged (its training loss is NaN or infinite at the end), of ``check`` a gradient that is not exact, or
that could not be measured.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, UnknownOptionError

from autoaccum._version import __version__
from autoaccum.cli.keeping import typed
from autoaccum.cli.options import writable
from autoaccum.cli.printing import CLOSED, fail, hush, show_warning
from autoaccum.cli.spelling import offered
from autoaccum.errors import ArgumentError, AutoaccumError, MemoryLimitError, RecipeError, ResumeError
from autoaccum.training.recipes import RecipeRaised
from autoaccum.training.synonyms import elsewhere, meant_in

COMMANDS = "autoaccum.cli.commands"
"""Where cyclopts finds a command by its name, once it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    with warnings.catch_warnings():  # puts showwarning back: main may be called from Python
        warnings.showwarning = show_warning
        words = sys.argv[1:] if argv is None else list(argv)
        typed.set(words)
        offered.set({})
        try:
            # Parsed here and called here, so that cyclopts is in no traceback.
            command, bound, _ = _app().parse_args(words, print_error=False, exit_on_error=False)
            offered.set(inspect.signature(command).parameters)
            code: int = command(*bound.args, **bound.kwargs) or 0
            # Here and not at the end of the process, where nobody could tell of a reader that has gone.
            sys.stdout.flush()
            return code
        except UnknownOptionError as error:
            option = (error.token.keyword or error.token.value).split("=")[0]
            offered.set(inspect.signature(error.target).parameters if error.target else {})
            cure = _instead(option)
            if words[:1] == ["sweep"] and {option.strip("-"), meant_in(elsewhere(option))} & {"epochs", "steps"}:
                # By these, trials of different effective batches would see other samples.
                cure = "Use --samples (the budget of each trial)."
            fact = f"{' '.join(['autoaccum', *words[:1]])} has no option {option}."
            return fail(CycloptsError(msg=f"{fact} {cure or str(error).partition('. ')[2]}".strip()), 2)
        except MissingArgumentError as error:
            # Of what was left out, as of an option without its value, cyclopts says that it requires an argument.
            is_there = error.keyword is not None or bool(error.argument and error.argument.tokens)
            cure = "requires an argument" if is_there else "is needed, and was left out"
            return fail(CycloptsError(msg=str(error).replace("requires an argument", cure, 1)), 2)
        # What another command line would cure is told in one line each, by the code that scripts can go by.
        except (CycloptsError, ArgumentError, RecipeError, ResumeError) as error:
            return fail(error, 2)
        except MemoryLimitError as error:
            return fail(error, 3)
        except AutoaccumError as error:
            # As Python does with what nobody has caught: by this a process ends that has left a collective.
            sys.last_value = error
            return fail(error, 1)
        # The user's own mistake: the traceback begins in the recipe, for our frames say nothing of it.
        except RecipeRaised as raised:
            traceback.print_exception(raised.__cause__)
            return 1
        except KeyboardInterrupt as error:
            sys.last_value = error
            return 130
        # ``autoaccum report --json | head``: nothing failed. A pipe of the recipe's own is another matter.
        except BrokenPipeError as error:
            if hush():
                return CLOSED
            return _show(error)
        except SystemExit as end:
            # What prints the help has found the same, and has seen to it by itself.
            if isinstance(end.__context__, BrokenPipeError):
                return CLOSED
            raise
        except Exception as error:
            return _show(error)


def _instead(option: str) -> str:
    """Return what to do in the place of an option that a command does not have; empty where that is not known."""
    # What is spelt alike is not what is meant: batch-size is near to batch-dim.
    cure, name = elsewhere(option), option.lstrip("-").replace("-", "_")
    if "recipe" not in offered.get():
        return cure
    import autoaccum  # not sooner: to plan and to help takes no torch
    from autoaccum.training.declarations import arguments_of

    of_fit = arguments_of(autoaccum.fit)
    meant = meant_in(cure) or ("" if cure else name)
    if meant in offered.get() or meant not in of_fit:
        return cure
    # A check has no epochs; but no command line can write a function, or a dataset.
    if writable(of_fit[meant].type):
        return f"Leave it out (autoaccum fit has --{meant.replace('_', '-')} for it)."
    return f"{cure} The recipe returns it: {{{meant!r}: ...}}.".strip()


def _show(error: Exception) -> int:
    """Print the traceback of an unexpected error; return the exit code."""
    traceback.print_exception(error)
    return 1


def _app() -> App:
    """Return the parser of all commands, none of which has been imported yet."""
    app = App(
        name="autoaccum",
        help="Train PyTorch models at an exact effective batch, in whatever memory there is.",
        version=__version__,
        help_format="plaintext",
    )
    override = "Options override what the recipe returns; what neither says is the default."
    # By their names, so that each is made, with its options, only when it is called: torch takes seconds to import,
    # and plan and help have no use for it.
    for name, text in {
        "check": "Measure whether split batches have the gradient of the full batch: the first thing to run.\n\n"
        f"The exit code is 0 where they have, and 1 where they have not or it cannot be measured. {override}",
        "estimate": "Estimate what fits on a device that is not at hand, without running anything.\n\n"
        f"The exit code is 3 where not one sample fits. {override}",
        "fit": f"Train what RECIPE returns.\n\n{override}",
        "probe": f"Find the largest micro-batch that fits, without training.\n\n{override}",
        "plan": "Cut a window into micro-batches: arithmetic alone.",
        "sweep": f"Search for lr and effective batch.\n\n{override}",
        "cache": "Show what earlier runs found out about micro-batches, from which later ones begin.\n\n"
        "It is kept in the user's cache directory, or where the environment variable AUTOACCUM_CACHE_DIR says.",
        "report": "Make a page of a run, or of a sweep: report.html; or of several runs side by side: comparison.html."
        "\n\nWhat still goes on is shown as far as it has come.",
    }.items():
        app.command(f"{COMMANDS}:{name}", name=name, help=text)
    return app
