"""What terms are shows in what they count, in parts and in the whole."""

from __future__ import annotations

from autoaccum.loss.hypotheses import kinds_in, of_terms
from autoaccum.loss.terms import Reduction, Term
from autoaccum.verification.counts import by_counts

WHOLE, FIRST, SECOND = (0, 1, 2, 3), (0,), (1, 2, 3)


def shown(**divisors: tuple[float, float, float]) -> dict[tuple[int, ...], Reduction]:
    """What each term was divided by, in the whole and in two parts."""
    found = {}
    for index, part in enumerate((WHOLE, FIRST, SECOND)):
        terms = tuple(
            Term("mean", divisor=of_parts[index], numbers=len(part), is_counted=True) for of_parts in divisors.values()
        )
        found[part] = Reduction(terms[0].divisor, terms)
    return found


def test_parts_of_a_mean_count_together_what_the_whole_counts() -> None:
    found = by_counts(shown(a=(4.0, 1.0, 3.0), b=(2.0, 1.0, 1.0)), 4, [(FIRST, SECOND)], "items")
    assert kinds_in(found) == {"0": "items", "1": "items"}


def test_more_than_that_is_counted_where_a_count_was_kept_from_0() -> None:
    found = by_counts(shown(a=(4.0, 1.0, 3.0), b=(2.0, 1.0, 2.0)), 4, [(FIRST, SECOND)], "items")
    assert kinds_in(found) == {"0": "items", "1": "items or none"}


def test_what_other_samples_have_shown_stays_and_so_do_names() -> None:
    likely = of_terms({"words": "items", "boxes": "items or none"})
    found = by_counts(shown(a=(4.0, 1.0, 3.0), b=(2.0, 1.0, 1.0)), 4, [(FIRST, SECOND)], likely)
    assert kinds_in(found) == {"words": "items", "boxes": "items or none"}


def test_of_one_term_there_is_nothing_to_tell() -> None:
    assert by_counts(shown(a=(4.0, 1.0, 3.0)), 4, [(FIRST, SECOND)], "items") is None
