"""A budget's totals against a count of the windows one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.planning.budget import Budget
from autoaccum.schedules import (
    Constant,
    Function,
    Geometric,
    Linear,
    Milestones,
    NoiseScale,
    Progress,
    Schedule,
)

budgets = st.just(Budget()) | st.sampled_from(["epochs", "steps", "samples"]).flatmap(
    lambda name: st.integers(1, 80).map(lambda value: Budget(**{name: value}))
)
batches = st.integers(1, 50)
units = st.sampled_from(["steps", "samples", "epochs"])
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(Constant, batches),
    st.builds(Linear, batches, batches, st.integers(1, 30), units),
    st.builds(Geometric, batches, batches, st.integers(1, 30), units),
    st.builds(
        Milestones,
        batches,
        st.dictionaries(st.integers(1, 30), batches, min_size=1).map(lambda found: dict(sorted(found.items()))),
        units,
    ),
    st.builds(
        lambda a, b: Function(lambda p: 1 + (a * p.step + b * p.epoch + (p.effective_batch or 7)) % 13),
        batches,
        batches,
    ),
)


class NoWindowError(Exception):
    """An epoch in which drop_last leaves nothing."""


def windows(budget: Budget, epoch_samples: int, schedule: Schedule, drop_last: bool) -> list[tuple[Progress, int]]:
    """Where the run stands before each window and its samples, cut from epoch after epoch until the budget is spent."""
    done: list[tuple[Progress, int]] = []
    last = None
    samples = 0
    for epoch in range(budget.max_epochs or 10_000):
        begun = len(done)
        left = epoch_samples
        while left > 0:
            before = Progress(step=len(done), epoch=epoch, samples=samples, effective_batch=last)
            asked = wanted = schedule.at(before)
            if budget.samples is not None:
                wanted = min(wanted, budget.samples - samples)
            if drop_last and left < wanted:
                break
            size = min(wanted, left)
            done.append((before, size))
            samples += size
            left -= size
            last = min(asked, epoch_samples)
            if budget.spent(len(done), samples):
                return done
        if len(done) == begun:
            raise NoWindowError
    return done


def shown(progress: Progress) -> tuple[int, int, int, int | None]:
    return progress.step, progress.epoch, progress.samples, progress.effective_batch


@given(budgets, st.integers(1, 40), schedules, st.booleans())
def test_totals_are_those_of_the_windows(
    budget: Budget, epoch_samples: int, schedule: Schedule, drop_last: bool
) -> None:
    try:
        expected = windows(budget, epoch_samples, schedule, drop_last)
    except NoWindowError:
        with pytest.raises(ArgumentError, match="drop_last=True: expected data of at least effective_batch="):
            budget.totals(epoch_samples, schedule, drop_last)
        return
    assert budget.totals(epoch_samples, schedule, drop_last) == (len(expected), sum(size for _, size in expected))
    walked = list(budget.windows(epoch_samples, schedule, drop_last))
    assert [(shown(progress), size) for progress, size in walked] == [
        (shown(progress), size) for progress, size in expected
    ]


@pytest.mark.parametrize(
    ("budget", "drop_last", "expected"),
    [
        (Budget(), False, (3, 20)),
        (Budget(), True, (2, 16)),
        (Budget(epochs=3), False, (9, 60)),
        (Budget(epochs=3), True, (6, 48)),
        (Budget(steps=2), False, (2, 16)),
        (Budget(steps=3), False, (3, 20)),
        (Budget(steps=6), False, (6, 40)),
        (Budget(steps=7), False, (7, 48)),
        (Budget(steps=7), True, (7, 56)),
        (Budget(samples=33), False, (5, 33)),
        (Budget(samples=33), True, (5, 33)),
    ],
)
def test_totals_of_20_samples_in_windows_of_8(budget: Budget, drop_last: bool, expected: tuple[int, int]) -> None:
    assert budget.totals(20, Constant(8), drop_last) == expected


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        (Milestones(4, {2: 8}), [4, 4, 8, 4, 8, 8, 4]),
        (Milestones(4, {5: 8}, by="samples"), [4, 4, 8, 4, 8, 8, 4]),
        (Milestones(4, {1: 8}, by="epochs"), [4, 4, 4, 4, 4, 8, 8, 4]),
        (Linear(2, 8, over=3), [2, 4, 6, 8, 8, 8, 4]),
        (Milestones(5, {1: 10}, by="epochs"), [5, 5, 5, 5, 10, 10]),
    ],
)
def test_windows_of_two_epochs_of_20_samples(schedule: Schedule, sizes: list[int]) -> None:
    assert [size for _, size in Budget(epochs=2).windows(20, schedule, False)] == sizes
    assert Budget(epochs=2).totals(20, schedule, False) == (len(sizes), 40)


def test_what_a_schedule_is_told_of_the_window_before() -> None:
    """It is what was asked for: of a short window too, but never more than the data has."""
    told = [p.effective_batch for p, _ in Budget(epochs=3).windows(20, Milestones(12, {1: 16, 2: 64}), False)]
    assert told == [None, 12, 16, 20]


def test_a_schedule_that_has_settled_is_counted_without_a_walk() -> None:
    asked = []

    class Counting(Constant):
        def at(self, progress: Progress) -> int:
            asked.append(progress)
            return self.effective_batch

    totals = Budget(samples=10**12).totals(50_001, Counting(7), True)
    assert totals == (142_857_142_858, 10**12)
    assert len(asked) < 10
    assert Budget(steps=10**12).totals(10**6, Milestones(64, {10: 128}), False)[0] == 10**12
    assert Budget(epochs=10**12).totals(100, Milestones(10, {3: 20}, by="epochs"), False) == (
        10 * 3 + 5 * (10**12 - 3),
        10**14,
    )


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget(), (None, None)),
        (Budget(epochs=2), (None, None)),
        (Budget(steps=7), (7, None)),
        (Budget(samples=33), (None, 33)),
    ],
)
def test_totals_of_data_of_unknown_length(budget: Budget, expected: tuple[int | None, int | None]) -> None:
    assert budget.totals(None, Constant(8), False) == expected


LOOKS: dict[str, Callable[[Progress], object]] = {
    "len": lambda p: len(p.reports),
    "bool": lambda p: bool(p.reports),
    "index": lambda p: p.reports[-1],
    "slice": lambda p: p.reports[-3:],
    "iteration": lambda p: list(p.reports),
    "reversed": lambda p: next(reversed(p.reports), None),
    "in": lambda p: None in p.reports,
    "equality": lambda p: p.reports == (),
    "hash": lambda p: hash(p),
}


def looks(look: Callable[[Progress], object]) -> Function:
    """Looks at the reports from the third step on, and catches what errors come of it."""

    def function(progress: Progress) -> int:
        if progress.step >= 3:
            try:
                look(progress)
            except Exception:
                return 8
        return 8

    return Function(function)


@pytest.mark.parametrize("schedule", [NoiseScale(8, 64), *map(looks, LOOKS.values())], ids=["noise scale", *LOOKS])
@pytest.mark.parametrize(
    ("budget", "drop_last", "expected"),
    [
        (Budget(), False, (None, 100)),
        (Budget(), True, (None, None)),
        (Budget(epochs=3), False, (None, 300)),
        (Budget(epochs=3), True, (None, None)),
        (Budget(steps=7), False, (7, None)),
        (Budget(samples=33), True, (None, 33)),
    ],
)
def test_totals_where_only_training_will_tell(
    schedule: Schedule, budget: Budget, drop_last: bool, expected: tuple[int | None, int | None]
) -> None:
    assert budget.totals(100, schedule, drop_last) == expected


def test_a_function_that_looks_at_no_report_is_counted_in_advance() -> None:
    assert Budget(steps=5).totals(100, Function(lambda progress: 3 + progress.step), False) == (5, 25)


def test_a_function_that_never_gets_to_look_is_counted_in_advance() -> None:
    assert Budget(steps=3).totals(100, looks(len), False) == (3, 24)


def test_drop_last_that_leaves_out_an_epoch() -> None:
    schedule = Milestones(8, {2: 64}, by="epochs")
    with pytest.raises(ArgumentError) as caught:
        Budget(steps=100).totals(20, schedule, True)
    assert (caught.value.argument, caught.value.value) == ("drop_last", True)
    assert str(caught.value) == (
        "drop_last=True: expected data of at least effective_batch=64 samples in epoch 2. It has 20, so the only "
        "window of that epoch would be left out. That of a DataLoader counts too."
    )
    assert Budget(epochs=2).totals(20, schedule, True) == (4, 32), "it never gets there"
    assert Budget(samples=40).totals(20, schedule, True) == (5, 40), "the budget allows 8 more, which there are"


def test_spent() -> None:
    assert [Budget(steps=3).spent(steps, 100) for steps in (2, 3)] == [False, True]
    assert [Budget(samples=30).spent(100, samples) for samples in (29, 30, 31)] == [False, True, True]
    assert not Budget().spent(10**9, 10**9)
    assert not Budget(epochs=1).spent(10**9, 10**9)


def test_max_epochs() -> None:
    found = [budget.max_epochs for budget in (Budget(), Budget(epochs=4), Budget(steps=4), Budget(samples=4))]
    assert found == [1, 4, None, None]


@pytest.mark.parametrize("name", ["epochs", "steps", "samples"])
def test_each_is_an_int_of_at_least_one(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}=0: expected an int of at least 1"):
        Budget(**{name: 0})
    with pytest.raises(ArgumentTypeError, match=f"{name}=1.0: expected an int of at least 1"):
        Budget(**{name: 1.0})


def test_one_at_most() -> None:
    with pytest.raises(ConflictingArgumentsError, match="at most one of steps and epochs") as caught:
        Budget(epochs=1, steps=2)
    assert (caught.value.argument, caught.value.value, caught.value.conflicts_with) == ("steps", 2, "epochs")
    with pytest.raises(ConflictingArgumentsError, match="at most one of samples and steps"):
        Budget(samples=1, steps=2)


@pytest.mark.parametrize(
    ("budget", "steps", "samples", "expected"),
    [
        (Budget(steps=5), 4, 99, False),
        (Budget(steps=5), 5, 0, True),
        (Budget(steps=5), 6, 0, True),
        (Budget(samples=5), 99, 4, False),
        (Budget(samples=5), 0, 5, True),
        (Budget(samples=5), 0, 6, True),
        (Budget(epochs=1), 99, 99, False),
    ],
)
def test_spent_or_past_it(budget: Budget, steps: int, samples: int, expected: bool) -> None:
    assert budget.spent(steps, samples) is expected


PLANS = [
    (Budget(epochs=2), 20, Constant(8), False, [(5, 3), (8,), (4,), (4, 4)], ""),
    (Budget(epochs=2), 20, Constant(8), False, [(5, 3), (8,), (8,), (4, 3)], "sum to 4 in window 3"),
    (Budget(epochs=2), 20, Constant(8), False, [(5, 3), (4, 3)], "sum to 8 in window 2"),
    (Budget(epochs=2), 20, Constant(8), True, [(8,), (8,), (8,)], ""),
    (Budget(epochs=2), 20, Constant(8), False, [(8,), (8,), (4,)] * 9, ""),  # more than the run has windows
    (Budget(samples=11), 20, Constant(8), False, [(8,), (3,)], ""),
    (Budget(samples=11), 20, Constant(8), False, [(8,), (8,)], "sum to 3 in window 2"),
    (Budget(steps=3), 90, Linear(2, 4, 2), False, [(2,), (2, 1), (4,)], ""),
    (Budget(steps=3), 90, Linear(2, 4, 2), False, [(2,), (2, 2)], "sum to 3 in window 2"),
    (Budget(steps=3), 90, NoiseScale(2, 8), False, [(2,), (7,)], ""),  # which only training tells
    (Budget(steps=3), None, Constant(8), False, [(8,), (5,)], ""),
    (Budget(steps=3), None, Constant(8), False, [(8,), (9,)], "sum to at most 8 in window 2"),
]


@pytest.mark.parametrize(("budget", "epoch", "schedule", "drop_last", "plans", "words"), PLANS)
def test_plans_are_those_of_their_windows(
    budget: Budget, epoch: int | None, schedule: Schedule, drop_last: bool, plans: list[tuple[int, ...]], words: str
) -> None:
    if not words:
        budget.check_plans(plans, epoch, schedule, drop_last)
        return
    with pytest.raises(ArgumentError, match=words) as caught:
        budget.check_plans(plans, epoch, schedule, drop_last)
    assert caught.value.argument == "micro_batch"
    assert caught.value.value in plans
