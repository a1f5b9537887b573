"""Schedules are read from what users give, and back from their own texts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.schedules import (
    Constant,
    Function,
    Geometric,
    Linear,
    Milestones,
    NoiseScale,
    Schedule,
    parse,
    schedule_of,
)
from tests.planning.test_schedule_kinds import doubled, schedules


def test_what_fit_takes() -> None:
    linear = Linear(64, 128, over=5)
    found = [schedule_of(given) for given in (8, "8", "linear 64:128 over 5", linear, doubled)]
    assert found == [Constant(8), Constant(8), linear, linear, Function(doubled)]


@given(schedules)
@example(NoiseScale(2, 3, 5e-324, 10))
@example(NoiseScale(2, 3, 0, 10))
def test_its_text_is_read_back(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule
    assert parse(str(schedule).replace(" ", "")) == schedule
    assert parse(" \t" + str(schedule).replace(":", " : ").replace(" ", "\n ") + " ") == schedule


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("256", Constant(256)),
        (" 1_024 ", Constant(1024)),
        ("64, 1000:256, 5000:1024", Milestones(64, {1000: 256, 5000: 1024})),
        ("64,10_000s:256,50_000s:1024", Milestones(64, {10_000: 256, 50_000: 1024}, by="samples")),
        ("64, 3e:256", Milestones(64, {3: 256}, by="epochs")),
        ("linear 64:1024 over 5000", Linear(64, 1024, over=5000)),
        ("linear 64 : 1024 over 5000 s", Linear(64, 1024, over=5000, by="samples")),
        ("geometric 64:1024 over 10e", Geometric(64, 1024, over=10, by="epochs")),
        ("noise 64:1024", NoiseScale(64, 1024)),
        ("noise 64:1024 smoothing 0.9", NoiseScale(64, 1024, smoothing=0.9)),
        ("noise 64:1024 smoothing 0 patience 5", NoiseScale(64, 1024, smoothing=0.0, patience=5)),
    ],
)
def test_texts(text: str, schedule: Schedule) -> None:
    assert parse(text) == schedule


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Constant(256), "256"),
        (Milestones(64, {1000: 256, 5000: 1024}, by="samples"), "64, 1000s:256, 5000s:1024"),
        (Linear(64, 1024, 5000), "linear 64:1024 over 5000"),
        (Geometric(64, 1024, 10, "epochs"), "geometric 64:1024 over 10e"),
        (NoiseScale(64, 1024), "noise 64:1024"),
        (NoiseScale(64, 1024, 0.9, 5), "noise 64:1024 smoothing 0.9 patience 5"),
    ],
)
def test_its_text(schedule: Schedule, text: str) -> None:
    assert str(schedule) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, "expected '256', '64, 1000:256, 5000:1024', 'linear 64:1024 over 5000'")
            for text in (
                "", "  ", "many", "-8", "1e6", "64e", "1.5", "1__0", "64,", "64, 1000", "64, 1000 256", "64, 1000:",
                "64, 1000:256 5000:1024", "64, 10e:256, 5000s:1024", "64, 1000:256, 5000 s:1024", "linear",
                "linear 64-128 over 5", "linear 64:128", "linear 64:128 every 5", "linear 64:128 over 1e3",
                "linear 64:128 over 5, 7", "noise 2:64 smoothing x", "noise 2:64 patience 5 smoothing 0", "8" * 5000,
                str(2**63), "8, 5:" + "9" * 50, "8" + ", 5:9" * 10**4 + "x",
            )
        ),
        ("64, 1000:256, 1000:1024", "expected 1000 to be more than 1000 (points)"),
        ("0", "expected an int of at least 1 (effective_batch)"),
        ("64, 0:256", "expected an int of at least 1 (points)"),
        ("linear 64:128 over 0", "expected an int of at least 1 (over)"),
        ("linear 64:0 over 5", "expected an int of at least 1 (end)"),
        ("noise 1:64", "expected an int of at least 2 (min)"),
        ("noise 64:2", "expected at least min=64 (max)"),
        ("noise 2:64 smoothing 1.5", "expected a number of at least 0 and below 1 (smoothing)"),
        ("noise 2:64 patience 51", "expected at most 50 (patience)"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    assert (caught.value.argument, caught.value.value) == ("effective_batch", text)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@given(st.text(alphabet="0159_,: selinarovdubymthp.-", max_size=30))
def test_any_text_is_a_schedule_or_an_error(text: str) -> None:
    try:
        schedule = parse(text)
    except ArgumentError:
        return
    assert parse(str(schedule)) == schedule


def test_what_is_no_text_is_refused() -> None:
    for value in (3, None, b"64", ["64"]):
        with pytest.raises(ArgumentTypeError, match="text=.*: expected the text of a schedule"):
            parse(value)  # type: ignore[arg-type]
