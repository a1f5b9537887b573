"""Each term of a window's losses is weighed by a count of its own."""

from __future__ import annotations

import pytest
import torch

from autoaccum.loss.hypotheses import TermKind
from autoaccum.loss.stated import Computed
from autoaccum.loss.values import Values
from autoaccum.window.kept import InDoubt
from autoaccum.window.terms import Terms
from tests.devices import DEVICE

pytestmark = pytest.mark.device

# Micro-batches of 2, 1 and 3 samples, of which the second has no item of its second loss.
X = torch.arange(1.0, 7.0, dtype=torch.float64, device=DEVICE)
MASK = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64, device=DEVICE)
SIZES = [2, 1, 3]


def losses(weight: torch.Tensor, rows: slice, form: str) -> torch.Tensor | Computed:
    mean, masked = (weight * X[rows]).mean(), (weight**2 * X[rows] * MASK[rows]).sum() / MASK[rows].sum()
    if form == "kept":
        masked = (weight**2 * X[rows] * MASK[rows]).sum() / MASK[rows].sum().clamp(min=1)
    return Computed(mean + masked, {"a": mean, "b": masked}) if form == "named" else mean + masked


def run(
    form: str, kinds: dict[str, TermKind], totals: dict[str, float], sizes: list[int] = SIZES, start: int = 0
) -> tuple[Terms, torch.Tensor]:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True, device=DEVICE)
    terms = Terms(6, kinds, totals, deferred=False)
    for size in sizes:
        with Values() as values:
            loss = losses(weight, slice(start, start + size), form)
        computed = loss if isinstance(loss, Computed) else Computed(loss)
        _, backward = terms.add(computed, {}, size, values, lambda loss: loss)
        backward()
        start += size
    return terms, weight


def expected(weight: float = 0.5) -> tuple[float, float]:
    mean, masked = float(X.mean()), float((X * MASK).sum() / MASK.sum())
    return weight * mean + weight**2 * masked, mean + 2 * weight * masked


@pytest.mark.parametrize("form", ["plain", "named"])
def test_with_the_true_totals_gradient_and_loss_are_the_windows(form: str) -> None:
    names = ("a", "b") if form == "named" else ("0", "1")
    totals = dict(zip(names, (6.0, 3.0), strict=True))
    terms, weight = run(form, {}, totals)
    loss, gradient = expected()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(gradient, rel=1e-14)
    assert float(terms.losses()[0]) == pytest.approx(loss, rel=1e-14)
    assert not terms.lacks_values
    assert terms.true_totals(terms.kinds(), is_wide=True) is None
    assert terms.kinds() == dict.fromkeys(names, "items")
    assert terms.counting()[0] == [2.0, 1.0, 3.0]


def test_each_loss_that_has_a_name_is_told_by_itself() -> None:
    terms, _ = run("named", {}, {"a": 6.0, "b": 3.0})
    total, named = terms.losses()
    mean, masked = float(X.mean()), float((X * MASK).sum() / MASK.sum())
    assert {name: float(value) for name, value in named.items()} == pytest.approx(
        {"loss/a": 0.5 * mean, "loss/b": 0.25 * masked}, rel=1e-14
    )
    assert float(sum(named.values())) == pytest.approx(float(total), rel=1e-14)
    assert not any(value.requires_grad for value in named.values())
    assert run("plain", {}, {"0": 6.0, "1": 3.0})[0].losses()[1] == {}, "those of a sum have no names"


def test_a_loss_that_counts_nothing_in_a_window_has_no_value_there() -> None:
    terms, _ = run("named", {"a": "samples", "b": "items"}, {"b": 1.0}, [1], 2)
    assert list(terms.losses()[1]) == ["loss/a"]


def test_wrong_totals_are_told() -> None:
    terms, _ = run("plain", {}, {"0": 6.0, "1": 4.0})
    assert terms.true_totals(terms.kinds(), is_wide=True) == {"0": 6.0, "1": 3.0}
    assert not terms.are_known({"0": 6.0, "1": 5.0})
    assert terms.are_known({"0": 6.0, "1": 4.0})


def test_a_count_that_was_kept_from_0_is_in_doubt_until_it_is_known() -> None:
    terms, _ = run("kept", {}, {"0": 6.0, "1": 4.0})
    doubts, least = terms.doubtful({})
    assert doubts == [InDoubt(1, "1", 1.0, 1.0, is_zero=True)]
    assert least["1"].lowest == 1.0
    assert terms.settle(doubts, {}) == doubts
    assert terms.counts(terms.kinds())["1"] == [2.0, 1.0, 1.0]
    known, weight = run("kept", {"0": "items", "1": "items or none"}, {"0": 6.0, "1": 3.0})
    doubts, _ = known.doubtful({})
    assert doubts == [InDoubt(1, "1", 1.0, 0.0, is_zero=True)], "it is taken for what it was elsewhere"
    assert known.settle(doubts, {(1, "1"): 0.0}) == []
    assert known.counts(known.kinds())["1"] == [2.0, 0.0, 1.0]
    loss, gradient = expected()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(gradient, rel=1e-14)
    assert float(known.losses()[0]) == pytest.approx(loss, rel=1e-14)


def test_where_ones_may_stand_for_none_those_that_are_not_0_are_in_doubt_too() -> None:
    known, _ = run("kept", {"0": "items", "1": "items or one"}, {"0": 6.0, "1": 3.0})
    doubts, _ = known.doubtful({})
    assert doubts == [InDoubt(1, "1", 1.0, 0.0, is_zero=True), InDoubt(2, "1", 1.0, 1.0)]
    assert known.settle(doubts, {(1, "1"): 0.0, (2, "1"): 0.0}) == []
    assert known.counts(known.kinds())["1"] == [2.0, 0.0, 0.0]


def test_without_values_the_loss_is_said_not_to_be_known() -> None:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True, device=DEVICE)
    terms = Terms(6, {}, {}, deferred=False)
    loss = losses(weight, slice(0, 2), "plain")
    assert isinstance(loss, torch.Tensor)
    terms.add(Computed(loss), {}, 2, None, lambda loss: loss)
    assert terms.lacks_values


def test_what_the_user_counts_weighs_the_whole_of_a_loss() -> None:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True, device=DEVICE)
    terms = Terms(2, {}, {"a": 4.0}, deferred=False)
    for value, count in ((3.0, 1.0), (5.0, 3.0)):
        loss = weight * value
        _, backward = terms.add(Computed(loss, {"a": loss}), {"a": count}, 1, None, lambda loss: loss)
        backward()
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx((3 * 1 + 5 * 3) / 4, rel=1e-14)
    assert terms.kinds() == {"a": "items"}


def test_a_sum_counts_once_and_a_penalty_in_shares() -> None:
    weight = torch.nn.Parameter(torch.tensor([0.5, *[0.0] * 6, 2.0], dtype=torch.float64, device=DEVICE))
    terms, start = Terms(6, {}, {}, deferred=False), 0
    for size in SIZES:
        with Values() as values:
            loss = (weight[0] * X[start : start + size]).sum() + 0.1 * (weight**2).sum()
        _, backward = terms.add(Computed(loss), {}, size, values, lambda loss: loss)
        backward()
        start += size
    assert weight.grad is not None
    assert weight.grad[[0, -1]].tolist() == pytest.approx([21 + 0.1, 0.4], rel=1e-12)
    assert float(terms.losses()[0]) == pytest.approx(0.5 * 21 + 0.1 * 4.25, rel=1e-12)


def test_each_term_of_a_micro_batch_by_itself() -> None:
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True, device=DEVICE)
    with Values() as values:
        loss = losses(weight, slice(2, 3), "plain")  # which has no item of the second
    assert isinstance(loss, torch.Tensor)
    terms = Terms(1, {}, {}, deferred=False)
    terms.add(Computed(loss), {}, 1, values, lambda loss: loss)
    parts = [(name, value, float(reduction.items)) for _, name, value, reduction in terms.apart()]
    assert parts == [("0", 1.5, 1.0), ("1", 0.0, 0.0)]


@pytest.mark.parametrize("form", ["plain", "kept", "named"])
def test_those_of_several_ranks_are_those_of_one(form: str) -> None:
    names = ("a", "b") if form == "named" else ("0", "1")
    kinds: dict[str, TermKind] = dict(zip(names, ("samples", "items"), strict=True))
    totals = {names[1]: 3.0}
    (whole, gradient), (first, one), (second, other) = (
        run(form, kinds, totals),
        run(form, kinds, totals, SIZES[:1]),
        run(form, kinds, totals, SIZES[1:], 2),
    )
    joined = Terms(6, kinds, totals, deferred=False)
    for terms in (first, second):
        joined.absorb(terms)
    assert joined.are_of_all(SIZES)
    assert not first.are_of_all(SIZES)
    for terms in (whole, joined):
        terms.settle(terms.doubtful({})[0], {})
    assert joined.counts(kinds) == whole.counts(kinds)
    assert joined.true_totals(kinds, is_wide=True) == whole.true_totals(kinds, is_wide=True)
    assert joined.used_kinds() == whole.used_kinds() == kinds
    assert one.grad is not None
    assert other.grad is not None
    assert gradient.grad is not None
    assert float(one.grad + other.grad) == pytest.approx(float(gradient.grad), rel=1e-14)
    assert float(joined.losses()[0]) == pytest.approx(float(whole.losses()[0]), rel=1e-14)


def test_guesses_that_differ_between_ranks_are_right_for_none() -> None:
    joined = Terms(6, {"b": "items"}, {}, deferred=False)
    for totals, sizes, start in (({"b": 3.0}, SIZES[:1], 0), ({"b": 2.0}, SIZES[1:], 2)):
        joined.absorb(run("named", {"a": "samples", "b": "items"}, totals, sizes, start)[0])
    assert joined.true_totals({"b": "items"}, is_wide=True) == {"b": 3.0}


def test_what_ranks_take_for_different_things_is_taken_for_none() -> None:
    joined = Terms(6, {}, {}, deferred=False)
    joined.absorb(run("named", {"a": "samples", "b": "items"}, {}, SIZES[:1])[0])
    joined.absorb(run("named", {"a": "sum", "b": "items"}, {}, SIZES[1:], 2)[0])
    assert joined.used_kinds() == {"b": "items"}
