"""Declarations: what is said of an argument once, and how it differs where something else takes it too."""

from __future__ import annotations

from dataclasses import MISSING

import pytest

from autoaccum.training.declarations import Own, arguments, arguments_of, check, option, values_of

calls: list[str] = []


def both(low: int, high: int | None) -> int:
    calls.append("both")
    if high is not None and high < low:
        raise ValueError("high")
    return low if high is None else high - low


def named(name: str) -> str:
    calls.append("named")
    return name.upper()


@arguments
class Range:
    low: int = option("where it begins.", check=both, is_positional=True, probe=Own())
    high: int | None = option("where it ends.", default=None, check=both, decides="budget")
    name: str = option(
        "of the range.",
        default="a",
        check=named,
        probe=Own(text="of the probe.", annotation="str | None", default=MISSING, is_positional=True),
    )


def test_an_argument_has_what_was_said_of_it() -> None:
    low, high, name = arguments_of(Range).values()
    assert (low.name, low.annotation, low.is_required, low.is_positional) == ("low", "int", True, True)
    assert (high.default, high.text, high.decides, high.type) == (None, "where it ends.", "budget", int | None)
    assert (name.is_positional, name.decides, name.in_sweeps, name.is_rest) == (False, "how", "searched", False)


def test_others_take_those_that_they_share_as_they_say() -> None:
    assert arguments_of(Range, "accumulator") == {}
    low, name = arguments_of(Range, "probe").values()
    assert low == arguments_of(Range)["low"]
    assert (name.text, name.type, name.is_required, name.is_positional) == ("of the probe.", str | None, True, True)
    assert name.check is named


def test_a_required_argument_is_required_of_the_object_too() -> None:
    with pytest.raises(TypeError, match="low"):
        Range()  # type: ignore[call-arg]
    assert values_of(Range(low=1)) == {"low": 1, "high": None, "name": "a"}


def test_each_check_is_made_once_in_the_order_that_is_asked_for() -> None:
    calls.clear()
    checked = check(arguments_of(Range), (named, both, len), low=2, high=5, name="b")
    assert calls == ["named", "both"]
    assert (checked[named], checked[both]) == ("B", 3)


def test_what_a_caller_does_not_take_is_none() -> None:
    assert check(arguments_of(Range, "probe"), (both, named), low=2, name="b")[both] == 2
