"""What is told of plans, and when memory is looked at."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Event, MemorySaving, Notice, Planned, Replanned
from autoaccum.planning.tuner import Tuner
from autoaccum.testing import simulated_memory
from tests.models import classes, mlp
from tests.step.making import step_of


def made_of(events: list[Event], **options: Any) -> Any:
    return step_of(mlp(), emit=events.append, **options)


def test_a_plan_is_told_once_and_says_how_memory_is_saved() -> None:
    events: list[Event] = []
    plans = made_of(events).plans
    plans.announce(8)
    plans.announce(8)
    (told,) = events
    assert isinstance(told, Planned)
    assert (told.sizes, told.memory_saving) == ((4, 4), "off")


def test_once_memory_is_saved_otherwise_the_plan_is_told_anew_and_nothing_is_known_of_sizes() -> None:
    events: list[Event] = []
    step = made_of(events, micro_batch=None)
    for size in (1, 2, 4, 8):
        step.tuner.observe(size, 100 + 100 * size)
    step.settle(8)
    assert [event.sizes for event in events if isinstance(event, Planned)] == [(8,)]
    assert step.tuner.limits.least_bytes == 200
    change = MemorySaving(step=1, old="off", new="on", reason="a test", blocks=1)
    step.saving.is_off = False
    step.plans.saves(change)
    assert events[-1] is change
    assert step.tuner.search.is_on
    assert (step.tuner.history, step.tuner.limits.least_bytes, step.tuner.micro_batch) == ([], 0, 1)
    step.tuner.observe(1, 50)
    assert step.tuner.learnt() == (), "no other run is to begin from that"
    assert step.plans.announced == ()


@pytest.mark.parametrize(("is_enforced", "predicted"), [(False, 5000), (True, 900)])
def test_no_less_is_foretold_of_a_process_than_it_holds(is_enforced: bool, predicted: int) -> None:
    """Its heap gives little back, so that a window takes no less than there is already."""
    events: list[Event] = []
    step = made_of(events, micro_batch=None)
    for size in (1, 2, 4, 8):
        step.tuner.observe(size, 100 + 100 * size)
    step.plans._memory = SimpleNamespace(used=lambda: 5000)
    step.plans._limit = SimpleNamespace(is_enforced=is_enforced, bytes=10_000)
    step.plans.announce(8)
    (told,) = events
    assert isinstance(told, Planned)
    assert told.predicted_bytes == predicted


def test_the_last_window_stands_for_one_whose_lengths_are_not_known_yet() -> None:
    events: list[Event] = []
    step = made_of(events, micro_batch=None)
    step.tuner.resize(4, (6, 3, 2, 1))
    for weight in (6, 9, 12):
        step.tuner.observe(1, 100 + weight, length=weight)
    step.plans.announce(4)
    (told,) = events
    assert isinstance(told, Planned)
    assert told.sizes == (1, 3) == step.tuner.plan(4, (6, 3, 2, 1))
    step.plans.announce(8)
    assert [event.sizes for event in events if isinstance(event, Planned)][1:] == [step.tuner.plan(8)]


def test_that_memory_cannot_be_saved_is_said_and_changes_nothing() -> None:
    events: list[Event] = []
    step = made_of(events)
    with pytest.warns(UserWarning, match="a. b. c."):
        step.plans.saves(Notice(cause="a", consequence="b", cure="c"))
    assert len(events) == 1
    assert step.tuner.micro_batch == 4


def test_a_change_to_the_same_is_none() -> None:
    events: list[Event] = []
    plans = made_of(events).plans
    plans.replanned((4, 4), (4, 4), "out of memory")
    assert events == []
    plans.replanned((4, 4), (2, 2, 2, 2), "out of memory")
    assert events == [Replanned(step=1, old=(4, 4), new=(2, 2, 2, 2), reason="out of memory")]


def growing(events: list[Event]) -> Any:
    """A step whose micro-batches of up to 16 in weight have fitted, before they grow, and have grown to 32."""
    step = made_of(events, micro_batch=None)
    step.tuner.search.has_lengths = True
    for length in (4, 8):
        step.tuner.observe(4, 100 * length, length=length)
    step.plans.growing_from = 16
    assert step.tuner.planned_weight == 32
    return step


def test_growth_is_told_as_it_cuts_one_window() -> None:
    """Of samples that differ in length each window has a plan of its own, and other plans are no change of it."""
    events: list[Event] = []
    step = growing(events)
    step.plans.settled(4, (4, 3, 2, 1))
    assert events == []
    step.plans.settled(4, (8, 2, 2, 2))
    (told,) = events
    assert isinstance(told, Replanned)
    assert (max(told.old), told.new, told.reason) == (3, (4,), "there is room for more")


def test_growth_that_ends_with_smaller_ones_is_not_put_down_to_room() -> None:
    """Plans are timed again where there is room, and those of smaller micro-batches may be the fastest."""
    events: list[Event] = []
    step = growing(events)
    step.plans.growing_from = 64
    step.plans.settled(4, (16, 16, 16, 16))
    (told,) = events
    assert isinstance(told, Replanned)
    assert (max(told.new) < max(told.old), told.reason) == (True, "larger micro-batches are no faster")


def test_growth_is_not_told_while_plans_are_still_timed() -> None:
    events: list[Event] = []
    step = growing(events)
    step.tuner._fastest.timing = object()
    step.plans.settled(4, (8, 2, 2, 2))
    assert events == []


def test_a_window_that_has_clearly_passed_the_limit_is_told_once() -> None:
    events: list[Event] = []
    step = made_of(events)
    step.plans._limit = SimpleNamespace(bytes=1000, is_enforced=False)
    step.plans.tell_over(1050)
    step.plans.tell_over(1000)
    step.plans.tell_over(1050)
    step.plans._limit.is_enforced = True
    step.plans.tell_over(2000)
    assert events == []
    step.plans._limit.is_enforced = False
    with pytest.warns(UserWarning, match="Window 1 took 1.03 KiB where the limit is 1000 B"):
        step.plans.tell_over(1051)
    step.plans.tell_over(2000)
    assert len(events) == 1


def test_two_windows_in_a_row_that_have_passed_the_limit_are_told() -> None:
    events: list[Event] = []
    step = made_of(events)
    step.plans._limit = SimpleNamespace(bytes=1000, is_enforced=False)
    step.plans.tell_over(1001)
    assert events == []
    with pytest.warns(UserWarning, match="Window 1 took 1001 B where the limit is 1000 B"):
        step.plans.tell_over(1001)


@pytest.mark.parametrize("used", [1000, 1001])
def test_a_plan_that_is_expected_to_pass_the_limit_is_told(used: int) -> None:
    events: list[Event] = []
    step = made_of(events, micro_batch=None)
    step.plans._limit = SimpleNamespace(bytes=1000, is_enforced=False)
    step.plans._memory = SimpleNamespace(used=lambda: used)
    for size in (1, 2, 4):
        step.tuner.observe(size, 100 + 100 * size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step.plans.announce(4)
    causes = [event.cause for event in events if isinstance(event, Notice)]
    assert causes == (["Window 1 is expected to take 1001 B where the limit is 1000 B"] if used > 1000 else [])


def test_no_search_learns_from_windows_where_the_limit_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their trials it knows more than of a window, in which each piece may be another trial."""
    was_searching: list[bool] = []

    def ran_within(tuner: Tuner, *_: Any) -> None:
        was_searching.append(tuner.search.is_on)

    monkeypatch.setattr(Tuner, "ran_within", ran_within)
    with simulated_memory(60 * 2**10):
        autoaccum.fit(
            mlp(), classes(512), effective_batch=64, loss_fn=cross_entropy, device="cpu", progress=False, cache=False,
            verify=False, epochs=1,
        )  # fmt: skip
    assert was_searching
    assert not any(was_searching)
