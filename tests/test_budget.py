"""A budget's totals against a count of the windows one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.budget import Budget
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError

budgets = st.just(Budget()) | st.sampled_from(["epochs", "steps", "samples"]).flatmap(
    lambda name: st.integers(1, 80).map(lambda value: Budget(**{name: value}))
)


def windows(budget: Budget, epoch_samples: int, effective_batch: int, drop_last: bool) -> list[int]:
    """The samples of each window, cut from epoch after epoch until the budget is spent."""
    done: list[int] = []
    for _ in range(budget.max_epochs or 10_000):
        left = epoch_samples
        while left > 0:
            wanted = effective_batch
            if budget.samples is not None:
                wanted = min(wanted, budget.samples - sum(done))
            if drop_last and left < wanted:
                break
            done.append(min(wanted, left))
            left -= done[-1]
            if budget.spent(len(done), sum(done)):
                return done
    return done


@given(budgets, st.integers(1, 40), st.integers(1, 50), st.booleans())
def test_totals_are_those_of_the_windows(
    budget: Budget, epoch_samples: int, effective_batch: int, drop_last: bool
) -> None:
    if drop_last:
        effective_batch = min(effective_batch, epoch_samples)  # else no epoch has a window
    expected = windows(budget, epoch_samples, effective_batch, drop_last)
    assert budget.totals(epoch_samples, effective_batch, drop_last) == (len(expected), sum(expected))


@pytest.mark.parametrize(
    ("budget", "drop_last", "expected"),
    [
        (Budget(), False, (3, 20)),
        (Budget(), True, (2, 16)),
        (Budget(epochs=3), False, (9, 60)),
        (Budget(epochs=3), True, (6, 48)),
        (Budget(steps=7), False, (7, 48)),
        (Budget(steps=7), True, (7, 56)),
        (Budget(samples=33), False, (5, 33)),
        (Budget(samples=33), True, (5, 33)),
    ],
)
def test_totals_of_20_samples_in_windows_of_8(budget: Budget, drop_last: bool, expected: tuple[int, int]) -> None:
    assert budget.totals(20, 8, drop_last) == expected


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
    assert budget.totals(None, 8, False) == expected


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
