"""What a state that comes from a file may be: declared in a few words, and checked before anything is changed.

A ``Check`` is called with a value and with the name of its entry in the state, ``engine.tuner.largest``; it returns if
the value is one that it stands for, and else raises the error that names the entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from autoaccum.errors import CheckpointCorruptError

Check = Callable[[Any, str], None]
"""(value, name of its entry) -> None, or a CheckpointCorruptError."""
MOST = 2**63 - 1
"""The largest int that counters and columns hold."""


def refuse(entry: str, problem: str) -> NoReturn:
    """Raise the error of an entry that is not what was written.

    Raises:
        CheckpointCorruptError: always.
    """
    raise CheckpointCorruptError("", problem, entry=entry)


def below(entry: str, key: object) -> str:
    """Return the name of an entry within another one.

    >>> below("engine", "plan"), below("", "engine"), below("optimizer.state", 3)
    ('engine.plan', 'engine', 'optimizer.state[3]')
    """
    is_name = isinstance(key, str) and key.isidentifier()
    return f"{entry}.{key}".lstrip(".") if is_name else f"{entry}[{shown(key)}]"


def shown(value: object) -> str:
    """Return a value in a few words, however large it is.

    >>> shown(-3), shown("a" * 99), shown([1, 2]), shown(1 << 99)
    ('-3', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'...", 'a list of 2', 'an int of 100 bits')
    """
    if type(value) is int and abs(value) > MOST:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if isinstance(value, list | tuple | set | frozenset | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def anything(value: Any, entry: str) -> None:
    """Accept any value."""


def whole(least: int = 0, most: int = MOST) -> Check:
    """Return a check for an int from ``least`` to ``most``."""
    accepted = f"an int of at least {least}" if most == MOST else f"an int from {least} to {most}"

    def check(value: Any, entry: str) -> None:
        # By its very type: True is an int to Python, and no count.
        if type(value) is not int or not least <= value <= most:
            refuse(entry, f"is {shown(value)}, not {accepted}")

    return check


def number(least: float = -math.inf, *, finite: bool = True, nan: bool = False) -> Check:
    """Return a check for a number of at least ``least``; an int stands for a float too.

    Args:
        least: the lowest.
        finite: whether infinities are refused.
        nan: whether NaN is accepted.
    """
    accepted = ("a finite number" if finite else "a number") + (f" of at least {least:g}" if least > -math.inf else "")

    def check(value: Any, entry: str) -> None:
        is_number = type(value) is float or (type(value) is int and abs(value) <= MOST)
        if is_number and nan and math.isnan(value):
            return
        if not is_number or not value >= least or (finite and math.isinf(value)):
            refuse(entry, f"is {shown(value)}, not {accepted}")

    return check


def a(kind: type) -> Check:
    """Return a check for values of that very type: no subclass."""

    def check(value: Any, entry: str) -> None:
        if type(value) is not kind:
            refuse(entry, f"is {shown(value)}, not a {kind.__name__}")

    return check


def one_of(*values: object) -> Check:
    """Return a check for one of a few values, of their types too."""

    def check(value: Any, entry: str) -> None:
        if not any(type(value) is type(accepted) and value == accepted for accepted in values):
            refuse(entry, f"is {shown(value)}, not {' or '.join(map(shown, values))}")

    return check


def optional(of: Check) -> Check:
    """Return a check for None, or for what ``of`` accepts."""

    def check(value: Any, entry: str) -> None:
        if value is not None:
            of(value, entry)

    return check


def every(of: Check, kind: type = list) -> Check:
    """Return a check for a list, or another kind of sequence, whose entries are all such as ``of`` accepts."""

    def check(value: Any, entry: str) -> None:
        a(kind)(value, entry)
        for index, item in enumerate(value):
            of(item, f"{entry}[{index}]")

    return check


def by_name(of: Check) -> Check:
    """Return a check for a dict whose keys are texts, and whose values are all such as ``of`` accepts."""

    def check(value: Any, entry: str) -> None:
        a(dict)(value, entry)
        for name, item in value.items():
            a(str)(name, entry)
            of(item, below(entry, name))

    return check


def parts(*of: Check) -> Check:
    """Return a check for a tuple of so many entries, each such as its own check accepts."""

    def check(value: Any, entry: str) -> None:
        a(tuple)(value, entry)
        if len(value) != len(of):
            refuse(entry, f"has {len(value)} entries, not {len(of)}")
        for index, (item, accepts) in enumerate(zip(value, of, strict=True)):
            accepts(item, f"{entry}[{index}]")

    return check


def entries(of: Mapping[str, Check], *, optionally: Mapping[str, Check] | None = None) -> Check:
    """Return a check for a dict that has these entries, some of them ``optionally``, and no others."""
    known = {**of, **(optionally or {})}

    def check(value: Any, entry: str) -> None:
        a(dict)(value, entry)
        for name in of:
            if name not in value:
                refuse(below(entry, name), "is missing")
        for name, item in value.items():
            if type(name) is not str or name not in known:
                refuse(below(entry, name), "is no entry that there is")
            known[name](item, below(entry, name))

    return check


_OF_TYPES: dict[Any, Check] = {int: whole(), float: number(), bool: a(bool), str: a(str)}


def of_record(kind: type, *, in_full: bool = False, later: Container[str] = (), **narrower: Check) -> Check:
    """Return a check for the fields of a dataclass in a dict, as ``asdict`` gives them.

    Args:
        kind: the dataclass; its fields are ints of at least 0, finite numbers, bools, texts, or None where they may be.
        in_full: whether fields with a default, which came later than others, have to be there too.
        later: those of them that need not be there even so.
        narrower: checks of fields by their names, in place of those by their types.
    """
    of: dict[str, Check] = {}
    for name, annotation in get_type_hints(kind).items():
        types = get_args(annotation) or (annotation,)
        plain = [_OF_TYPES[member] for member in types if member in _OF_TYPES]
        by_type = plain[0] if plain else anything
        of[name] = narrower.get(name, optional(by_type) if NoneType in types else by_type)
    required = set()
    for field in fields(kind):
        if (in_full and field.name not in later) or (field.default is MISSING and field.default_factory is MISSING):
            required.add(field.name)
    return entries(
        {name: check for name, check in of.items() if name in required},
        optionally={name: check for name, check in of.items() if name not in required},
    )


def accepts(check: Check, value: Any) -> bool:
    """Return whether a check accepts a value: for what is left out and not an error."""
    try:
        check(value, "")
    except CheckpointCorruptError:
        return False
    return True
