"""What tells that the layers, the data or the code of a run are not those that it was begun with.

The shapes and classes by which a run is told from another are in ``configuration``. What is here came later, and is
kept in ``environment.json``: directories of earlier versions lack it, and what they lack is no difference.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoaccum.events import Notice
from autoaccum.ranks.units import class_of
from autoaccum.runs.configuration import differing
from autoaccum.runs.files import read_small

_MOST_FUNCTIONS = 200
"""Read the code of at most so many functions that a function calls: a loss that calls half a library is one name."""
_LONGEST = 200
"""Keep a text of at most so many characters as it is; a longer one is no hyperparameter."""

Details = dict[str, Any]


def details_of(modules: Mapping[str, nn.Module], functions: Mapping[str, Any], content: str | None) -> Details:
    """Return what is compared when a run goes on.

    Args:
        modules: what is trained, by what it is called.
        functions: what the user passed, by the names of the arguments; None where nothing was.
        content: a digest of the data; None where they tell nothing.
    """
    layers: dict[str, str] = {}
    code: dict[str, str] = {}
    for called, root in modules.items():
        for name, module in root.named_modules():
            place, kind = f"{called} {name}".strip(), class_of(module)
            # PyTorch's own are what they say. What a class of the user's keeps in attributes may be anything.
            if kind.__module__.startswith("torch."):
                layers[place] = _hyperparameters(module)
            else:
                code[place] = _hyperparameters(module)
                code[f"forward of {kind.__qualname__}"] = code_of(kind.forward)
    code |= {name: code_of(function) for name, function in functions.items() if function is not None}
    return {
        "torch": torch.__version__,
        "python": [platform.python_implementation(), platform.python_version(), sys.flags.optimize],
        "layers": layers,
        "content": content,
        "code": code,
    }


def known(path: Path) -> Details:
    """Return what an earlier process has left in its ``environment.json``; nothing where that cannot be told."""
    try:
        found = json.loads(read_small(path))["details"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refused(before: Details, now: Details) -> list[str]:
    """Return how layers and data differ, which a run cannot go on with: as it cannot with another shape or rate."""
    found: list[str] = []
    # Attributes of layers, and what they are called, differ from version to version.
    if before.get("torch") == now["torch"] and isinstance(before.get("layers"), dict):
        found += differing(before["layers"], now["layers"])
    if before.get("content") is not None and now["content"] is not None:
        changed = list(differing({"data content": before["content"]}, {"data content": now["content"]}))
        # Of data that were mended on purpose what was learnt is wanted all the same.
        found += [f"{one} (to train on other data from there, load its model.safetensors)" for one in changed]
    return found


def announced(before: Details, now: Details, path: Path) -> Notice | None:
    """Return what to say where the code differs, which may be meant; None where it does not, or cannot be compared."""
    # Another Python compiles the same source to other code.
    if any(before.get(name) != now[name] for name in ("torch", "python")) or not isinstance(before.get("code"), dict):
        return None
    changed = list(differing(before["code"], now["code"]))
    if not changed:
        return None
    more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
    return Notice(
        cause=f"The code is not that with which the run in {path} was last run: {'; '.join(changed[:5])}{more}",
        consequence="It goes on with the code that is there now, and so ends otherwise than it would have",
        cure="Put the code back if that was not meant, or pass resume=False to begin anew",
    )


def _hyperparameters(module: nn.Module) -> str:
    """Return a module's class and what it was made with.

    >>> _hyperparameters(nn.Dropout(0.1))
    'Dropout(inplace=False, p=0.1)'
    """
    kind = class_of(module)
    return f"{kind.__name__}({', '.join(_attributes(module, kind))})"


def _attributes(value: Any, kind: type | None = None) -> Iterator[str]:
    """Yield what an object was made with, as ``name=value``, as far as it has kept it.

    ``kind`` is its class, where it goes by another one.
    """
    # What else it has in attributes may be a count of calls, or an average that goes along with training.
    try:
        taken = inspect.signature((type(value) if kind is None else kind).__init__).parameters  # type: ignore[misc]
    except (TypeError, ValueError):
        return
    kept = getattr(value, "__dict__", {})
    yield from _texts({name: kept[name] for name in taken if name in kept}, depth=1)


def _texts(attributes: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield attributes as ``name=value``, those of a config that is one of them by its name and theirs."""
    for name, entry in sorted(attributes.items()):
        if (text := _plain(entry)) is not None:
            yield f"{name}={text}"
        elif callable(entry) and not isinstance(entry, nn.Module):  # an activation function, say
            yield f"{name}={code_of(entry)}"
        elif depth and not isinstance(entry, nn.Module | torch.Tensor):
            inner = {key: value for key, value in getattr(entry, "__dict__", {}).items() if not key.startswith("_")}
            yield from (f"{name}.{text}" for text in _texts(inner, depth - 1))


def _plain(value: Any) -> str | None:
    """Return the text of a number, a text, or a few of them; None for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value) if not isinstance(value, str) or len(value) <= _LONGEST else None
    if isinstance(value, tuple | list) and len(value) <= 8:
        parts = [_plain(entry) for entry in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return str(value) if isinstance(value, torch.dtype) else None


def code_of(function: Any) -> str:
    """Return the name of a function, and a digest of what it does that is the same in each process.

    Of its code, of what it calls in its own module or has in its closure, and of the constants that it names there.
    """
    digest = hashlib.sha256()
    for part in _parts(function, set()):
        digest.update(part.encode(errors="replace") + b"\\0")
    return f"{_name(function)}, code {digest.hexdigest()[:12]}"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """Yield texts that together say what a function does; a value that is none says its own text."""
    text = _plain(value)
    if text is not None:
        yield text
        return
    # A function may call itself, by way of others too.
    if id(value) in seen or len(seen) > _MOST_FUNCTIONS:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        yield from _parts(value.func, seen)
        for entry in (*value.args, *(entry for pair in sorted(value.keywords.items()) for entry in pair)):
            yield from _parts(entry, seen)
    elif isinstance(value, types.MethodType):
        yield from _parts(value.__func__, seen)
        if not isinstance(value.__self__, nn.Module | type):
            yield from _attributes(value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value, seen)
    elif isinstance(value, nn.Module):
        yield _hyperparameters(value)
        # PyTorch's own are what they say; a scripted one has no function that could be read.
        if not type(value).__module__.startswith("torch."):
            yield from _parts(type(value).forward, seen)
    elif isinstance(value, type | types.BuiltinFunctionType):
        yield _name(value)
    elif callable(value):  # an object with a __call__ of its own
        yield from _attributes(value)
        yield from _parts(type(value).__call__, seen)
    else:
        yield type(value).__qualname__


def _of_function(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    """Yield what a function written in Python does."""
    module = function.__module__ or ""
    # What PyTorch's own do is a matter of its version.
    if module == "torch" or module.startswith("torch."):
        yield _name(function)
        return
    yield from _of_code(function.__code__, function.__doc__)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield from _parts(default, seen)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _parts(content, seen)
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        # Of the same module: others are libraries, or hold what many a function shares.
        is_own = isinstance(called, types.FunctionType) and called.__module__ == module
        if is_own or isinstance(called, bool | int | float | str):
            yield from _parts(called, seen)


def _of_code(code: types.CodeType, doc: str | None = None) -> Iterator[str]:
    """Yield the instructions of compiled code, and the constants and names that they refer to by number."""
    # No names of variables, no lines and no files: to rename, move or comment a function changes nothing.
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function within
            yield from _of_code(constant)
        elif isinstance(constant, frozenset):  # whose order changes from process to process
            yield repr(sorted(map(repr, constant)))
        elif constant is None or constant != doc:
            yield repr(constant)
