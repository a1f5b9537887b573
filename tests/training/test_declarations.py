"""Declarations: what is read off signatures and docstrings, and the order of checks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from autoaccum.training.declarations import arguments_of, check, taking, taking_method, values_of

calls: list[str] = []


def both(low: int, high: int | None) -> int:
    calls.append("both")
    if high is not None and high < low:
        raise ValueError("high")
    return low if high is None else high - low


def alone(name: str, value: str) -> None:
    calls.append(f"{name} {value}")


def made(low: int, *, high: int | None = None, **rest: int) -> None:
    """Make a range.

    Args:
        low: where it begins, which
            is part of it.
        high: where it ends: (low, high).
        **rest: any others.

    Returns:
        nothing: of it.
    """


@dataclass
class Range:
    low: int
    high: int | None = None


class Taker:
    @taking_method(Range)
    def __init__(self, *args: int, **kwargs: int) -> None:
        self.range = Range(*args, **kwargs)


def test_an_argument_has_what_signature_and_docstring_say_of_it() -> None:
    low, high, rest = arguments_of(made).values()
    assert (low.name, low.type, low.is_required) == ("low", int, True)
    assert low.text == "where it begins, which is part of it."
    assert (high.default, high.text, high.type, high.is_required) == (
        None,
        "where it ends: (low, high).",
        int | None,
        False,
    )
    assert rest.text == "any others."


@taking(Range)
def ranged(*args: int, **kwargs: int) -> Range:
    return Range(*args, **kwargs)


def test_a_function_and_a_method_take_what_a_class_takes() -> None:
    assert list(inspect.signature(ranged).parameters) == ["low", "high"]
    assert values_of(ranged(1, high=2)) == {"low": 1, "high": 2}
    assert list(inspect.signature(Taker).parameters) == ["low", "high"]
    assert values_of(Taker(1, high=2).range) == {"low": 1, "high": 2}
    with pytest.raises(TypeError, match="more"):
        Taker(1, more=2)  # type: ignore[call-arg]


def test_each_argument_is_checked_first_and_then_those_that_go_together() -> None:
    calls.clear()
    checked = check({"low": 2, "high": 5, "name": "b"}, {"name": alone}, (both,))
    assert calls == ["name b", "both"]
    assert checked[both] == 3


def test_what_a_caller_does_not_take_is_none_and_its_checks_are_not_made() -> None:
    assert check({"low": 2}, {"name": alone}, (both,))[both] == 2
    assert check({"high": 2}, {}, (both,)).get(both) is None
