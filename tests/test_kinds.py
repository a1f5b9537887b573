"""What is declared is accepted, and what is not is refused by the name of its entry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from autoaccum._kinds import (
    Check,
    a,
    accepts,
    below,
    entries,
    every,
    number,
    of_record,
    one_of,
    optional,
    parts,
    shown,
    whole,
)
from autoaccum.errors import CheckpointCorruptError


@dataclass(frozen=True, kw_only=True)
class Record:
    """One field of each type."""

    count: int
    seconds: float | None
    name: str = ""
    is_on: bool = False


CASES: dict[str, tuple[Check, list[Any], list[Any]]] = {
    "whole": (whole(1, 9), [1, 9], [0, 10, 1.0, True, "1", None, 2**70]),
    "whole, of 63 bits": (whole(), [0, 2**63 - 1], [-1, 2**63]),
    "number": (number(0), [0, 0.5, 1e308], [-0.1, math.nan, math.inf, True, "0", 2**70, None]),
    "number, any": (number(finite=False, nan=True), [math.nan, math.inf, -math.inf, 3], ["nan", None, False]),
    "number, infinite": (number(finite=False), [math.inf, -1], [math.nan]),
    "a bool": (a(bool), [True, False], [1, 0, None]),
    "one of": (one_of(None, 3), [None, 3], [3.0, True, "3"]),
    "optional": (optional(whole()), [None, 3], [-1]),
    "every": (every(whole()), [[], [1, 2]], [(1, 2), [-1], [None], {}]),
    "parts": (parts(whole(), a(str)), [(1, "a")], [[1, "a"], (1,), (1, "a", 2), ("a", 1)]),
    "entries": (entries({"a": whole()}), [{"a": 1}], [{}, {"a": -1}, {"a": 1, "b": 1}, [], None, {"a": 1, 3: 1}]),
    "entries, some of them": (entries({}, optionally={"a": whole()}), [{}, {"a": 1}], [{"a": -1}, {"b": 1}]),
    "record": (
        of_record(Record, seconds=optional(number(0))),
        [{"count": 1, "seconds": None}, {"count": 1, "seconds": 2.5, "name": "a", "is_on": True}],
        [
            {"count": 1},
            {"count": -1, "seconds": None},
            {"count": 1, "seconds": -1.0},
            {"count": 1, "seconds": 1, "b": 1},
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_accepted(name: str) -> None:
    check, good, bad = CASES[name]
    assert [value for value in good if not accepts(check, value)] == []
    assert [value for value in bad if accepts(check, value)] == []


@pytest.mark.parametrize(
    ("check", "value", "entry", "problem"),
    [
        (whole(1), -3, "engine.plan", "is -3, not an int of at least 1"),
        (every(whole()), [1, "x"], "engine.plan[1]", "is 'x', not an int of at least 0"),
        (entries({"a": whole()}), {}, "engine.plan.a", "is missing"),
        (entries({"a": whole()}), {"a": 1, 5: 2}, "engine.plan[5]", "is no entry that there is"),
        (parts(whole()), (1, 2), "engine.plan", "has 2 entries, not 1"),
    ],
)
def test_the_entry_is_named(check: Check, value: Any, entry: str, problem: str) -> None:
    with pytest.raises(CheckpointCorruptError) as caught:
        check(value, "engine.plan")
    assert (caught.value.entry, caught.value.problem) == (entry, problem)
    assert str(caught.value).startswith(f"{entry} {problem}. ")


def test_of_names_and_values_however_large() -> None:
    assert below("optimizer", "param groups") == "optimizer['param groups']"
    assert shown({"a": 1}) == "a dict of 1"
    assert shown(object()) == "a object"
    assert len(shown("x" * 10**6)) < 60
    assert shown(10**5000) == "an int of 16610 bits"
