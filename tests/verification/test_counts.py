"""What terms are shows in what they count, in parts and in the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.loss.hypotheses import kinds_in, of_terms
from autoaccum.loss.terms import Reduction, Term
from autoaccum.verification.counts import by_counts
from autoaccum.verification.decision import decide
from tests.models import classes
from tests.verification.making import DOUBLE, measurement_of

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


def test_what_no_sample_changes_is_what_a_sum_was_divided_by() -> None:
    found = {part: Reduction(1.0, (Term("mean", divisor=4.0, numbers=1),) * 2) for part in (WHOLE, FIRST, SECOND)}
    found |= {
        part: Reduction(1.0, (Term("mean", divisor=4.0, numbers=1), Term("mean", divisor=float(len(part)), numbers=9)))
        for part in (WHOLE, FIRST, SECOND)
    }
    assert kinds_in(by_counts(found, 4, [(FIRST, SECOND)], "items")) == {"0": "sum", "1": "items"}
    kept = shown(a=(4.0, 1.0, 3.0), b=(1.0, 1.0, 1.0))
    assert kinds_in(by_counts(kept, 4, [(FIRST, SECOND)], "items")) == {"0": "items", "1": "items or none"}


WEIGHTS = torch.tensor([0.3, 0.9, 0.0, 0.5, 0.4, 0.8, 0.7, 0.6], dtype=DOUBLE)


def weighed(model: Any, batch: Any) -> torch.Tensor:
    each, weights = cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[2]
    return (each * weights).sum() / weights.sum().clamp(min=1) + 0.1 * each.mean()


def rooted(model: Any, batch: Any) -> torch.Tensor:
    """Divide by what does not add up."""
    each = cross_entropy(model(batch[0]), batch[1], reduction="none")
    return each.sum() / len(each) ** 0.5 + 0.1 * each.mean()


TERMS = of_terms({"0": "items", "1": "items"})


@pytest.mark.parametrize(("loss", "is_passing"), [(weighed, True), (rooted, False)])
def test_parts_pass_by_what_they_count_where_that_adds_up(loss: Any, is_passing: bool) -> None:
    batch = (*classes(6, DOUBLE), WEIGHTS[:6])
    with measurement_of(loss, batch=batch) as measurement:
        decision = decide(measurement, 1, TERMS)
    assert decision.passed is is_passing
    if is_passing:
        assert kinds_in(decision.hypothesis) == {"0": "items or none", "1": "items"}, "it knows that some are kept"


def test_of_one_term_there_is_nothing_to_tell() -> None:
    assert by_counts(shown(a=(4.0, 1.0, 3.0)), 4, [(FIRST, SECOND)], "items") is None
