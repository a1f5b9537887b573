"""Each thing is said once, as an event and as a warning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Event, Notice
from autoaccum.step.notices import Announcer


def notice(cause: str = "This", consequence: str = "That") -> Notice:
    return Notice(cause=cause, consequence=consequence, cure="So")


def say_once(announcer: Announcer, notices: Sequence[Notice]) -> None:
    for one in notices:
        announcer.say_once(one)


quiet = pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")


def test_what_is_announced_is_an_event_and_a_warning() -> None:
    events: list[Event] = []
    notice = Notice(cause="This", consequence="Therefore that", cure="Do so")
    with pytest.warns(AutoaccumWarning, match=r"Therefore that\. Do so\."):
        Announcer(events.append).say(notice)
    assert events == [notice]


def test_a_warning_points_at_the_users_line() -> None:
    with pytest.warns(AutoaccumWarning) as caught:
        Announcer([].append).say(Notice(cause="This", consequence="That", cure="So"))
    assert caught[0].filename == __file__


def test_one_consequence_is_said_once_whatever_caused_it() -> None:
    events: list[Event] = []
    announcer = Announcer(events.append)
    told = [notice("Window 3 is empty"), notice("Window 5 is empty"), notice(consequence="Another")]
    with pytest.warns(AutoaccumWarning) as caught:
        say_once(announcer, told)
    assert events == [told[0], told[2]]
    assert [str(warning.message) for warning in caught] == ["Window 3 is empty. That. So.", "This. Another. So."]


@quiet
def test_what_is_said_in_any_case_is_said_each_time() -> None:
    events: list[Event] = []
    announcer = Announcer(events.append)
    announcer.say(notice())
    announcer.say_once(notice())
    announcer.say(notice())
    assert events == [notice()] * 3, "what was only said has not been said once"
    assert announcer.state_dict() == ["That"]


@quiet
def test_what_an_earlier_process_said_is_not_said_again() -> None:
    events: list[Event] = []
    first, second = Announcer(events.append), Announcer(events.append)
    say_once(first, [notice(consequence="That"), notice(consequence="Another")])
    say_once(second, [notice(consequence="Its own")])
    assert first.state_dict() == ["Another", "That"]
    second.load_state_dict(first.state_dict())
    events.clear()
    say_once(second, [notice(consequence=consequence) for consequence in ("That", "Another", "Its own")])
    assert events == []
