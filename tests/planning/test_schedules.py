"""Schedules are read from what users give, and back from their own texts."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentTypeError, ScheduleError
from autoaccum.schedules import (
    Constant,
    Doubling,
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
        ("double 64:1024 every 2e", Doubling(64, 1024, every=2)),
        ("double 64:1024 every 2", Doubling(64, 1024, every=2, by="steps")),
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
        (Doubling(64, 1024, 2), "double 64:1024 every 2e"),
        (NoiseScale(64, 1024), "noise 64:1024"),
        (NoiseScale(64, 1024, 0.9, 5), "noise 64:1024 smoothing 0.9 patience 5"),
    ],
)
def test_its_text(schedule: Schedule, text: str) -> None:
    assert str(schedule) == text


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 1, "expected a number of samples, or linear, geometric, double or noise at"),
        ("  ", 3, "expected a number of samples, or linear"),
        ("many", 1, "expected a number of samples, or linear"),
        ("-8", 1, "expected a number of samples, or linear"),
        (
            "1e6",
            3,
            "',' or the end of the text at character 3. e means epochs: write a number in full, such as 1_000_000",
        ),
        ("12s6", 4, "s means samples: write"),
        ("64e", 3, "expected ',' or the end of the text"),
        ("1.5", 2, "expected ',' or the end of the text"),
        ("1__0", 2, "expected ',' or the end of the text"),
        ("64,", 4, "expected a number of steps (with s: samples, with e: epochs)"),
        ("64, 1e6:256", 7, "expected ':' at character 7. e means epochs: write"),
        ("64, 1000", 9, "expected ':'"),
        ("64, 1000 256", 10, "expected ':'"),
        ("64, 1000:", 10, "expected a number of samples"),
        ("64, 1000:256 5000:1024", 14, "expected ',' or the end of the text"),
        ("64, 1000:256, 1000:1024", 15, "expected a milestone after 1000"),
        ("32, 50:64, 1e:128", 13, "expected steps like the milestone before"),
        ("64, 1000:256, 5000s:1024", 19, "expected steps like the milestone before"),
        ("64, 1000s:256, 5000:1024", 20, "expected samples like the milestone before"),
        ("64, 1000:256, 5000 s:1024", 20, "expected steps like the milestone before"),
        ("64, 10e:256, 5000s:1024", 18, "expected epochs like the milestone before"),
        ("0", 1, "expected an int of at least 1"),
        ("64, 0:256", 5, "expected an int of at least 1"),
        ("64, 100:0", 9, "expected an int of at least 1"),
        ("linear", 7, "expected a number of samples"),
        ("linear 64-128 over 5", 10, "expected ':'"),
        ("linear 64:128", 14, "expected 'over'"),
        ("linear 64:128 every 5", 15, "expected 'over'"),
        ("linear 64:128 over 0", 20, "expected an int of at least 1"),
        ("linear 64:0 over 5", 11, "expected an int of at least 1"),
        ("linear 64:128 over 1e3", 22, "e means epochs"),
        ("linear 64:128 over 5, 7", 21, "expected the end of the text"),
        ("double 64:32 every 2", 11, "expected at least start=64"),
        ("double 64:128 over 2", 15, "expected 'every'"),
        ("noise 1:64", 7, "expected an int of at least 2"),
        ("noise 64:2", 10, "expected at least min=64"),
        ("noise 2:64 smoothing 1.5", 22, "expected a number of at least 0 and below 1"),
        ("noise 2:64 smoothing .5", 22, "expected a number below 1"),
        ("noise 2:64 patience 51", 21, "expected at most 50"),
        ("noise 2:64 patience 5 smoothing 0", 23, "expected the end of the text"),
    ],
)
def test_texts_that_cannot_be_read(text: str, position: int, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    first, shown, caret = str(caught.value).splitlines()
    assert caught.value.position == position
    assert (caught.value.argument, caught.value.value) == ("effective_batch", text)
    assert words in first
    assert f"at character {position}." in first
    assert shown == f"  {text}"
    assert caret == " " * (position + 1) + "^"


def test_the_caret_stands_below_the_character_whatever_the_spaces_are() -> None:
    with pytest.raises(ScheduleError) as caught:
        parse("64,\n\t1000;256")
    assert str(caught.value).splitlines()[1:] == ["  64,  1000;256", "           ^"]


@given(st.text(alphabet="0159_,: selinarovdubymthp.-", max_size=30))
def test_any_text_is_a_schedule_or_an_error_within_it(text: str) -> None:
    try:
        schedule = parse(text)
    except ScheduleError as error:
        position = error.position
    else:
        position = 1
        assert parse(str(schedule)) == schedule
    assert 1 <= position <= len(text) + 1


def test_what_is_no_text_is_refused() -> None:
    for value in (3, None, b"64", ["64"]):
        with pytest.raises(ArgumentTypeError, match="text=.*: expected the text of a schedule"):
            parse(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["8" * 5000, str(2**63), "8, 5:" + "9" * 50])
def test_numbers_that_are_too_long(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"an int below 2\*\*63") as caught:
        parse(text)
    assert len(str(caught.value)) < 1000


def test_of_a_long_text_the_place_is_shown() -> None:
    text = "8" + ", 5:9" * 10**4
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    lines = str(caught.value).splitlines()
    assert len(str(caught.value)) < 1000
    assert lines[-2][lines[-1].index("^")] == text[caught.value.position - 1]
