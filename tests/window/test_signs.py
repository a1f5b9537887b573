"""What windows show for next to nothing, and what of it calls for a measurement."""

from __future__ import annotations

import math

import pytest
import torch

from autoaccum.loss.terms import Reduction, Term
from autoaccum.window.gradient import Signs


class TestSigns:
    def test_the_first_graph_of_a_size_says_nothing_and_another_one_of_that_size_does(self) -> None:
        signs = Signs()
        for size, nodes in ((4, 9), (4, 9), (2, 5)):
            signs.of_graph(size, nodes, "MeanBackward0", ("mean",))
        assert not signs.have_changed
        signs.of_graph(2, 6, "MeanBackward0", ("mean",))
        assert signs.have_changed

    @pytest.mark.parametrize(
        "marks", [(8, "MeanBackward0", ("mean",)), (9, "SumBackward0", ("mean",)), (9, "MeanBackward0", ())]
    )
    def test_each_mark_counts(self, marks: tuple[object, ...]) -> None:
        signs = Signs()
        signs.of_graph(4, 9, "MeanBackward0", ("mean",))
        signs.of_graph(4, *marks)
        assert signs.have_changed

    def test_another_mode_of_a_module_is_a_change(self) -> None:
        signs = Signs()
        signs.of_modes([True, True])
        signs.of_modes([True, True])
        assert not signs.have_changed
        signs.of_modes([True, False])
        assert signs.have_changed
        signs.have_changed = False
        signs.of_modes([True, False])
        assert not signs.have_changed

    def test_counts_are_compared_while_they_could_be_samples(self) -> None:
        signs = Signs()
        signs.of_counts([3, 2], [3.0, 1.0], [])
        assert not signs.have_changed
        signs.compares_samples = True
        signs.of_counts([3, 2], [30.0, 20.0], [])
        assert not signs.have_changed
        signs.of_counts([3, 2], [3.0, 1.0], [])
        assert signs.have_changed

    def test_they_are_kept(self) -> None:
        signs, again = Signs(), Signs()
        signs.of_graph(4, 9, "MeanBackward0", ("mean",))
        signs.of_modes([True])
        signs.compares_samples = True
        again.load_state_dict(signs.state_dict())
        assert [getattr(again, name) for name in Signs.__slots__] == [getattr(signs, name) for name in Signs.__slots__]
        signs.of_graph(4, 8, "", ())
        again.of_graph(4, 9, "MeanBackward0", ("mean",))
        assert not again.have_changed, "a copy, which others do not reach"


def counted(count: float, penalties: int = 0) -> Reduction:
    return Reduction(count, terms=(Term("mean", divisor=count, is_counted=True),), constants=(1.0,) * penalties)


def suspects(signs: Signs, sizes: list[int], counts: list[float], losses: list[float], penalties: int = 0) -> list[int]:
    reductions = [counted(count, penalties) for count in counts]
    found = list(signs.suspects(sizes, counts, reductions, [torch.tensor(loss) for loss in losses]))
    assert signs.has_suspects is bool(found)
    return found


def of_two(first: float, second: float, kind: str = "mean") -> Reduction:
    terms = (Term("mean", divisor=first), Term(kind, divisor=second))  # type: ignore[arg-type]
    return Reduction(first, terms=terms)


class TestTerms:
    """Means over different numbers of items, which no weights of micro-batches make exact."""

    def test_proportions_that_differ_are_a_change(self) -> None:
        signs = Signs()
        signs.of_counts([4, 4], [4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, 12.0)])
        signs.of_counts([4, 2], [4.0, 2.0], [of_two(4.0, 12.0), of_two(2.0, 6.0)])
        assert not signs.have_changed
        signs.of_counts([4, 4], [4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, 9.0)])
        assert signs.have_changed

    def test_those_of_a_micro_batch_that_counts_nothing_are_none(self) -> None:
        signs = Signs()
        signs.of_counts([4, 4, 4], [4.0, 0.0, 4.0], [of_two(4.0, 12.0), of_two(1.0, 12.0), of_two(4.0, 12.0)])
        assert not signs.have_changed

    @pytest.mark.parametrize("second", [math.inf, math.nan])
    def test_a_count_that_is_no_number_is_one(self, second: float) -> None:
        signs = Signs()
        signs.of_counts([4, 4], [4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, second)])
        assert signs.have_changed

    @pytest.mark.parametrize("kind", ["sum", "unknown"])
    def test_constants_are_left_alone(self, kind: str) -> None:
        signs = Signs()
        signs.of_counts([4, 2], [4.0, 2.0], [of_two(4.0, 1.0, kind), of_two(2.0, 1.0, kind)])
        assert not signs.have_changed


class TestSuspects:
    """Micro-batches whose count may be one that was kept from 0."""

    def test_the_lowest_is_one_once_where_counts_vary(self) -> None:
        signs = Signs()
        assert suspects(signs, [4, 4, 4], [9.0, 3.0, 3.0], [1.0, 1.0, 1.0]) == [1, 2]
        assert suspects(signs, [4, 4, 4], [9.0, 3.0, 3.0], [1.0, 1.0, 1.0]) == []
        assert suspects(signs, [4, 4, 4], [9.0, 6.0, 12.0], [1.0, 0.0, 1.0]) == [], "not as low as it was"
        assert suspects(signs, [4, 4, 4], [-9.0, -2.0, -12.0], [1.0, 1.0, 1.0]) == [1]

    def test_one_that_is_as_low_is_one_again_where_it_adds_nothing(self) -> None:
        signs = Signs()
        suspects(signs, [4, 4], [9.0, 3.0], [1.0, 1.0])
        assert suspects(signs, [4, 4], [3.0, 3.0], [1.0, 0.0]) == [1], "also where counts are alike"

    def test_beside_penalties_a_loss_does_not_show_that(self) -> None:
        signs = Signs()
        suspects(signs, [4, 4], [9.0, 3.0], [1.0, 1.0], penalties=1)
        assert suspects(signs, [4, 4], [9.0, 3.0], [1.0, 0.1], penalties=1) == [1]
        assert suspects(signs, [4, 4], [3.0, 3.0], [1.0, 0.1], penalties=1) == [], "which are alike"

    def test_counts_that_are_like_samples_are_none_until_there_are_fewer_of_a_sample(self) -> None:
        signs = Signs()
        assert suspects(signs, [4, 2], [16.0, 8.0], [1.0, 1.0]) == []
        assert suspects(signs, [2, 1], [8.0, 4.0], [1.0, 1.0]) == []
        assert suspects(signs, [4, 4], [4.0, 4.0], [1.0, 1.0]) == [0, 1]

    def test_after_some_windows_only_each_doubling_of_their_number_is_looked_into(self) -> None:
        signs = Signs()
        suspects(signs, [4, 4], [9.0, 3.0], [1.0, 1.0])
        found = [bool(suspects(signs, [4, 4], [9.0, 3.0], [1.0, 0.0])) for _ in range(40)]
        assert [number for number, is_found in enumerate(found, 1) if is_found] == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]

    @pytest.mark.parametrize("reason", ["off", "counted by PyTorch", "without terms", "counts nothing"])
    def test_there_are_none_where_nothing_can_be_one(self, reason: str) -> None:
        signs, counts = Signs(), [9.0, 3.0]
        reductions = [counted(count) for count in counts]
        if reason == "off":
            signs.watches_least = False
        if reason == "counted by PyTorch":  # whose means over nothing are no numbers
            reductions = [Reduction(n, terms=(Term("mean", divisor=n, is_items=True),)) for n in counts]
        if reason == "without terms":
            reductions = [Reduction(count) for count in counts]
        if reason == "counts nothing":
            counts = [0.0, 0.0]
        assert signs.suspects([4, 4], counts, reductions, [torch.zeros(()), None]) == ()
