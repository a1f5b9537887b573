"""What windows show for next to nothing, and what of it calls for a measurement."""

from __future__ import annotations

import math

import pytest
import torch

from autoaccum.step.gradient import Signs, are_doubtful, are_terms_apart, is_kept_from_none
from autoaccum.step.terms import Factor, Reduction, Term


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

    def test_they_are_kept(self) -> None:
        signs, again = Signs(), Signs()
        signs.of_graph(4, 9, "MeanBackward0", ("mean",))
        signs.of_modes([True])
        again.load_state_dict(signs.state_dict())
        assert [getattr(again, name) for name in Signs.__slots__] == [getattr(signs, name) for name in Signs.__slots__]
        signs.of_graph(4, 8, "", ())
        again.of_graph(4, 9, "MeanBackward0", ("mean",))
        assert not again.have_changed, "a copy, which others do not reach"


def of_two(first: float, second: float, kind: str = "mean") -> Reduction:
    operation = "Sqrt" if kind == "unknown" else ""
    return Reduction(
        first, (Term(means=first, averages=True), Term(second, averages=kind == "mean", operation=operation))
    )


class TestTerms:
    """Means over different numbers of items, which no weights of micro-batches make exact."""

    def test_proportions_that_differ_are_apart(self) -> None:
        assert not are_terms_apart([4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, 12.0)])
        assert not are_terms_apart([4.0, 2.0], [of_two(4.0, 12.0), of_two(2.0, 6.0)])
        assert are_terms_apart([4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, 9.0)])

    def test_those_of_a_micro_batch_that_counts_nothing_are_none(self) -> None:
        assert not are_terms_apart([4.0, 0.0, 4.0], [of_two(4.0, 12.0), of_two(1.0, 12.0), of_two(4.0, 12.0)])

    @pytest.mark.parametrize("second", [math.inf, math.nan])
    def test_a_count_that_is_no_number_is_one(self, second: float) -> None:
        assert are_terms_apart([4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, second)])

    @pytest.mark.parametrize("kind", ["sum", "unknown"])
    def test_constants_are_left_alone(self, kind: str) -> None:
        assert not are_terms_apart([4.0, 2.0], [of_two(4.0, 1.0, kind), of_two(2.0, 1.0, kind)])


def test_counts_are_doubtful_where_something_is_divided_by_1_and_samples_do_not_count_alike() -> None:
    one, three = (Reduction(n, terms=(Term(factor=Factor().times("Div", n, False)),)) for n in (1.0, 3.0))
    assert are_doubtful([4, 4], [3.0, 1.0], [three, one])
    assert not are_doubtful([4, 4], [1.0, 1.0], [one, one])
    assert not are_doubtful([4, 4], [3.0, 3.0], [three, three])
    assert are_doubtful([4, 4], [4.0, 4.0], [of_two(4.0, 12.0), of_two(4.0, 9.0)])
    assert are_doubtful([4, 4], [4.0, 3.0], [of_two(4.0, 12.0), three]), "another number of terms"


class TestKeptFromNone:
    """A loss of 0 of a micro-batch that counts items, as where ``clamp(min=1)`` makes one of none."""

    def kept(self, counts: list[float], losses: list[float | None], *, has_terms: bool = True) -> bool:
        reductions = [Reduction(n, terms=(Term(means=n, averages=True),) * has_terms) for n in counts]
        tensors = [None if loss is None else torch.tensor(loss) for loss in losses]
        return is_kept_from_none([4, 4], counts, reductions, tensors)

    def test_it_is_seen_by_a_loss_of_0(self) -> None:
        assert self.kept([9.0, 1.0], [1.0, 0.0])
        assert not self.kept([9.0, 1.0], [1.0, 0.5])

    def test_where_samples_count_alike_it_is_of_no_matter(self) -> None:
        assert not self.kept([4.0, 4.0], [1.0, 0.0])

    def test_what_counts_nothing_or_is_counted_by_pytorch_or_the_user_is_none(self) -> None:
        assert not self.kept([9.0, 0.0], [1.0, None])
        assert not self.kept([9.0, 1.0], [1.0, 0.0], has_terms=False)
