"""Recipes: the Python functions from which the command line learns what to train.

A recipe is written ``path/to/file.py[:function]`` or ``package.module[:function]``; the function, ``recipe`` when none
is named, returns the keyword arguments of ``autoaccum.fit`` as a dict. It may have parameters, for which whoever calls
it may pass values: ``--set`` on the command line, and a sweep. Those for which nobody does need defaults.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from autoaccum._checks import non_negative_int
from autoaccum._units import kind_of, shown
from autoaccum.errors import ArgumentError, RecipeNotFoundError, RecipeResultError

# Shown in the help and in errors, so that both say the same.
FORMS = "path/to/file.py[:function] or package.module[:function]"
T = TypeVar("T")
# Not an argument of ``fit``, which knows nothing of recipes: a run's directory keeps what the recipe was called with.
passed: ContextVar[Mapping[str, Any]] = ContextVar("passed", default=MappingProxyType({}))
"""What the recipe that is open was called with, where that differs from its defaults."""


class RecipeRaised(Exception):
    """The recipe's own code raised ``__cause__``, whose traceback begins in the recipe."""


@contextmanager
def opened(
    recipe: str, parameters: Mapping[str, Any] | None = None, seed: int | None = None
) -> Iterator[dict[str, Any]]:
    """Import the recipe, call its function and give the arguments it returned, within a context: see ``imported``.

    Args:
        recipe: as it is written on a command line.
        parameters: what its function is called with, by name.
        seed: of what its function draws; nothing is seeded when left out.

    Raises:
        ArgumentError: it has no such parameter, or one without a default for which there is no value.
        RecipeNotFoundError: there is no such file, module or function.
        RecipeResultError: what the function returned is not a dict of ``fit``'s arguments, model and data included.
        RecipeRaised: the recipe's own code raised.
    """
    with imported(recipe, parameters) as function:
        for name, parameter in _settable(function).items():
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                cure = f"Pass --set {name}=VALUE, or give it a default."
                raise ArgumentError(name, None, f"a value, as {recipe} takes it", cure)
        if seed is not None:
            from autoaccum.data.randomness import seed_everywhere  # not at the top: it takes torch with it

            non_negative_int("seed", seed)
            # After the import, whose draws are those of whoever runs it first: a sweep imports once for all trials.
            seed_everywhere(seed)
        yield function()


@contextmanager
def imported(recipe: str, parameters: Mapping[str, Any] | None = None) -> Iterator[Callable[..., dict[str, Any]]]:
    """Import the recipe and give its function, which raises RecipeResultError and RecipeRaised when it is called.

    Within the context the recipe's folder is on ``sys.path``, as under ``python file.py``, and its module is in
    ``sys.modules``, so that data loading processes can unpickle its classes and import what stands beside it.

    Raises:
        ArgumentError: the function has no such parameter.
        RecipeNotFoundError: there is no such file, module or function.
        RecipeRaised: the recipe's own code raised.
    """
    target, function, is_file = module_and_function(recipe)
    # For a module it is the current folder: python -m has it on the path, the console script has not.
    folder = str(Path(target).resolve().parent if is_file else Path.cwd())
    name = _free_name(Path(target).stem) if is_file else target
    # First, as for a script that Python runs; whatever the recipe imports stands beside it.
    sys.path.insert(0, folder)
    try:
        module = _import_file(Path(target), name) if is_file else _import_module(target)
        found = _find(module, target, function)

        # With the signature of the recipe's own function, which a sweep looks at to pass what it has a parameter for.
        @wraps(found)
        def call(**given: Any) -> dict[str, Any]:
            return checked(_run(lambda: found(**given)), f"{target}:{function}")

        with binding(call, parameters or {}, recipe) as bound:
            yield bound
    finally:
        # The recipe may have changed the path itself.
        with suppress(ValueError):
            sys.path.remove(folder)
        if is_file:
            sys.modules.pop(name, None)


@contextmanager
def binding(
    function: Callable[..., dict[str, Any]], parameters: Mapping[str, Any], recipe: str
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Give a recipe's function with values for some of its parameters; ``passed`` tells of them within the context.

    Args:
        function: of the recipe.
        parameters: the values, by name.
        recipe: its name, for errors.

    Raises:
        ArgumentError: the function has no such parameter; it lists those that it has.
    """
    # Nothing is looked at where nothing is passed: a callable need not have a signature that can be read.
    settable = _settable(function) if parameters else {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in settable.values())
    for name, value in parameters.items():
        if name not in settable and not takes_any:
            listed = ", ".join(map(_listed, settable.values()))
            takes = f"takes {listed}" if listed else "takes none"
            cure = _suggest(name, list(settable)).strip()
            accepted = f"a parameter of the recipe {recipe}, which {takes}"
            raise ArgumentError(f"recipe_arguments[{name!r}]", value, accepted, cure)
    # What repeats a default is no other run than one in which it was not passed.
    differing = {n: v for n, v in parameters.items() if n not in settable or not _is_same(v, settable[n].default)}
    bound = function
    if parameters:
        bound = partial(function, **parameters)
        bound.__name__ = name_of(function)  # type: ignore[attr-defined]  # by which errors and studies call it
    token = passed.set(differing)
    try:
        yield bound
    finally:
        passed.reset(token)


def _listed(parameter: inspect.Parameter) -> str:
    """Return a parameter's name and default, not as ``lr=1``, which a command would tell as its own option."""
    default = "" if parameter.default is parameter.empty else f" ({parameter.default!r})"
    return f"{parameter.name!r}{default}"


def _settable(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name and have no value yet, and one that takes any."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind in by_name}


def _is_same(value: Any, default: Any) -> bool:
    """Return whether a plain value is the default; of what is no plain value nobody can tell."""
    return type(value) is type(default) and isinstance(value, bool | int | float | str | None) and value == default


def name_of(recipe: str | Callable[..., Any]) -> str:
    """Return the name of what is made of a recipe: a study, and its directory.

    >>> name_of("recipes/digits.py"), name_of("digits.py:small"), name_of("package.digits"), name_of(name_of)
    ('digits', 'digits-small', 'digits', 'name_of')
    """
    if not isinstance(recipe, str):
        return as_file_name(getattr(recipe, "__name__", type(recipe).__name__))
    target, _, function = recipe.partition(":")
    stem = Path(target).stem if target.endswith(".py") else target.rpartition(".")[2]
    return as_file_name(f"{stem}-{function}" if function not in ("", "recipe") else stem)


def as_file_name(text: str) -> str:
    """Return the text with nothing but letters, digits, ``_`` and ``-``.

    >>> as_file_name("../lr: 1e-4"), as_file_name("<lambda>")
    ('lr-1e-4', 'lambda')
    """
    return re.sub(r"[^\w-]+", "-", text).strip("-")


def module_and_function(recipe: str) -> tuple[str, str, bool]:
    """Return the file or module of a recipe, its function, and whether it is a file; a path may have a colon."""
    # From the right: what follows the last colon is a function only if it could be a name.
    target, colon, function = recipe.rpartition(":")
    if not (colon and function.isidentifier()):
        target, function = recipe.removesuffix(":"), "recipe"
    return target, function, target.endswith(".py") or "/" in target or os.sep in target


def _free_name(stem: str) -> str:
    """Return the module's name: the file's, by which spawned processes can import it, unless another module has it."""
    name = stem.replace(".", "_")
    while name in sys.modules:
        name = f"recipe_{name}"
    return name


def _import_file(path: Path, name: str) -> ModuleType:
    """Run the file as the module of that name; raise RecipeNotFoundError if there is none."""
    if not path.is_file() or path.suffix != ".py":
        with suppress(OSError):  # a folder that cannot be listed has nothing to suggest
            beside = [str(path.with_name(file.name)) for file in path.resolve().parent.glob("*.py")]
        raise RecipeNotFoundError(
            f"no recipe file {shown(str(path))} (looked for {path.resolve()}).{_suggest(str(path), beside)} "
            f"Pass {FORMS}."
        )
    # In sys.modules before it is run, as an import does: its own classes are looked up there to be pickled.
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _run(lambda: loader.exec_module(module))
    return module


def _import_module(name: str) -> ModuleType:
    """Import the module of that name; raise RecipeNotFoundError if there is none."""
    # Made here for two places: a name that cannot be one, and one that is not found.
    missing = RecipeNotFoundError(
        f"no recipe module {shown(name)} (looked for in {Path.cwd()} and on Python's path). Pass {FORMS}."
    )
    if not all(name.split(".")):
        raise missing
    try:
        return _run(lambda: importlib.import_module(name))
    except RecipeRaised as raised:
        error = raised.__cause__
        # Without a frame of its own it is the recipe that was not found, not something that the recipe imports.
        if isinstance(error, ModuleNotFoundError) and error.__traceback__ is None:
            raise missing from None
        raise


def _find(module: ModuleType, target: str, function: str) -> Callable[..., object]:
    """Return the recipe's function; raise RecipeNotFoundError, with those that are there, if it is none of them."""
    found = getattr(module, function, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    # Its own, and not those that it has imported.
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    other = f": it is {kind_of(found)}" if hasattr(module, function) else ""
    cure = (
        f"Its functions: {', '.join(names)}.{_suggest(function, names)} Pass {target}:FUNCTION."
        if names
        else f"Define one that returns the arguments of fit: def {function}(): "
        'return {"model": model, "data": data, "loss_fn": loss_fn}'
    )
    raise RecipeNotFoundError(f"{target} has no function {function!r}{other}. {cure}")


def checked(arguments: object, recipe: str) -> dict[str, Any]:
    """Return what a recipe of that name returned, if ``fit`` can take it.

    Raises:
        RecipeResultError: it is not a dict of ``fit``'s arguments, model and data included.
    """
    # Not at the top: `autoaccum plan` has no use for torch.
    from autoaccum.training.options import OF_FIT
    from autoaccum.training.synonyms import elsewhere

    if not isinstance(arguments, dict):
        raise RecipeResultError(
            f"{recipe} returned {type(arguments).__name__}, expected a dict of fit's arguments, such as "
            f'{{"model": ..., "data": ..., "loss_fn": ...}}.'
        )
    for key in arguments:
        if key not in OF_FIT:
            cure = f" {cure}" if (cure := elsewhere(str(key))) else _suggest(str(key), list(OF_FIT))
            all_of_them = f" It has {', '.join(OF_FIT)}."
            raise RecipeResultError(
                f"{recipe} returned {key!r}, but fit() has no argument {key!r}.{cure or all_of_them}"
            )
    for key in ("model", "data"):
        if key not in arguments:
            raise RecipeResultError(f"{recipe} returned no {key!r}: add it to the dict.")
    return arguments


def _suggest(word: str, words: list[str]) -> str:
    """Return a sentence with the most similar of the words; nothing where none is similar."""
    matches = get_close_matches(word, words, n=1)  # at difflib's own cutoff: a bad guess is worse than none
    return f" Did you mean {matches[0]!r}?" if matches else ""


def _run(call: Callable[[], T]) -> T:
    """Run the recipe's code; what it raises is cut down to the recipe's own frames."""
    try:
        return call()
    except Exception as error:
        # Our frames and those of the import system come first, and say nothing of where the mistake is.
        traceback = error.__traceback__
        while traceback is not None and (
            (file := traceback.tb_frame.f_code.co_filename) in (__file__, importlib.__file__)
            or file.startswith("<frozen importlib")
        ):
            traceback = traceback.tb_next
        raise RecipeRaised from error.with_traceback(traceback)
