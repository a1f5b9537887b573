"""What micro-batches add up to, seen together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoaccum.step.infer_reduction import conclude
from autoaccum.step.terms import Factor, Reduction, Term


def mean(*items: float, counted: bool = True) -> Reduction:
    terms = tuple(Term(means=count, numbers=100 + int(count), averages=True, counts_items=counted) for count in items)
    return Reduction(items[0], terms)


def total(numbers: int, constants: tuple[float, ...] = (), divisor: float | None = None) -> Reduction:
    factor = Factor() if divisor is None else Factor().times("Div", divisor, True)
    return Reduction(divisor or 1.0, (Term(factor=factor, numbers=numbers),), constants)


def penalised(items: float, *constants: float) -> Reduction:
    return replace(mean(items), constants=constants)


def by_factor(factor: float, items: float) -> Reduction:
    """A mean that is multiplied by a number."""
    return Reduction(items / factor, (Term(means=items, factor=Factor().times("Mul", factor, True), numbers=99),))


def kept(*constants: float, counted: bool) -> Reduction:
    """A mean over one item, or over none whose count was kept from 0."""
    factor = Factor().times("Div", 1.0, not counted)
    return Reduction(1.0, (Term(factor=factor, averages=True, numbers=4),), constants)


@pytest.mark.parametrize(
    ("sizes", "reductions", "is_sum", "doubt"),
    [
        ([4, 3], [Reduction(7.0), Reduction(2.0)], False, None),
        ([4, 3], [mean(7), mean(2)], False, None),
        ([4, 4], [mean(7), mean(7)], False, None),
        ([4, 3], [mean(7), mean(7)], False, None),  # counts may be equal by chance, numbers of a program not
        ([4, 3], [mean(12, counted=False), mean(12, counted=False)], False, "a constant or a count"),
        ([4, 3], [total(n, divisor=2.0) for n in (4, 3)], True, None),
        ([4, 4], [total(4, divisor=5.0)] * 2, True, "a constant or a count"),
        ([4, 3], [mean(7, 14), mean(5, 10)], False, None),
        ([4, 3], [mean(7, 4), mean(5, 3)], False, "different counts"),
        ([4, 3], [mean(0, 4), mean(5, 3)], False, "different counts"),
        ([4, 3], [mean(7, 7), mean(5)], False, "different counts"),
        (
            [4, 3],
            [Reduction(n, (*mean(n).terms, *total(s).terms)) for n, s in ((7.0, 4), (5.0, 3))],
            False,
            "a sum and",
        ),
        ([4, 3, 2], [mean(7), Reduction(0.0), mean(2)], False, None),  # one that counts nothing says nothing
        ([4, 3], [total(4), total(3)], True, None),
        ([4, 4], [total(4), total(4)], True, None),
        ([4, 4], [total(4, (0.1,)), total(4, (0.1,))], True, "parameters alone stands beside a sum"),
        ([4, 3], [penalised(7, 0.1), penalised(5, 0.1)], False, None),
        ([4, 3], [penalised(7, 0.25), penalised(5, 0.33)], False, "different counts"),
        ([4, 3], [penalised(7, 0.1), penalised(5)], False, "different counts"),
        ([4, 3], [penalised(2, 0.1), kept(0.1, counted=True)], False, "divides by 1"),
        ([4, 3], [penalised(2, 0.1), kept(0.1, counted=False)], False, "divides by 1"),
        ([2, 1], [penalised(2, 0.1), kept(0.1, counted=False)], False, None),  # a number that is that of the samples
        ([4, 3], [mean(2), kept(counted=True)], False, None),  # whose loss would be 0
        ([4, 3], [by_factor(1.0, 7.5), by_factor(1.0, 5.25)], False, None),  # the weights of targets
        ([4, 3], [by_factor(0.3, 4.0), by_factor(0.7, 3.0)], False, "a constant or a count"),
        ([4], [Reduction(4, (Term(operation="Sqrt"),))], False, "leads to Sqrt"),
    ],
)
def test_conclude(sizes: list[int], reductions: list[Reduction], is_sum: bool, doubt: str | None) -> None:
    found = conclude(sizes, reductions)
    assert found.is_sum is is_sum
    assert (found.doubt is None) if doubt is None else (found.doubt is not None and doubt in found.doubt[0])
