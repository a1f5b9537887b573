"""What ranks tell of their micro-batches, joined as if it were one's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoaccum.errors import ArgumentError
from autoaccum.step.across_ranks import Told, join, told
from autoaccum.step.item_counts import Tally
from autoaccum.step.terms import Reduction


def of_rank(guess: float, sizes: tuple[int, ...], **given: Any) -> Told:
    nothing: dict[str, Any] = {"late": (), "norms": {}, "outputs": {}, "has_changed": False, "is_uncounted": False}
    nothing |= {"named": None, "counts_by_name": False, "arrived": (), "came_twice": False}
    of_sizes = {
        "reductions": [Reduction(float(size)) for size in sizes],
        "losses": [torch.tensor(float(size)) for size in sizes],
        "counts": [float(size) for size in sizes],
        "gradients": [bool(sizes), False],
    }
    return Told(num_samples=8, sizes=sizes, guess=guess, **{**nothing, **of_sizes, **given})


def test_micro_batches_come_one_ranks_after_the_others() -> None:
    first = of_rank(8.0, (2, 1), late=(1,), norms={1: torch.tensor(3.0)})
    second = of_rank(4.0, (5,), late=(0,), norms={0: torch.tensor(3.0)}, has_changed=True)
    joined = join([first, second], 8)
    assert joined.sizes == [2, 1, 5]
    assert joined.tally.read() == [2.0, 1.0, 5.0]
    assert joined.tally.late == [1, 2]
    assert joined.gradients == [True, False]
    assert joined.has_changed


def test_the_first_guess_stands_for_all() -> None:
    """What others have weighed by another is told in its units: gradients by ``add_up``, norms here."""
    nothing, one, other = of_rank(0.0, ()), of_rank(8.0, (3,)), of_rank(4.0, (5,), norms={0: torch.tensor(3.0)})
    joined = join([nothing, one, other], 8)
    assert joined.tally.guess == 8.0
    assert joined.norms == {1: torch.tensor(1.5)}
    assert joined.tally.guess == joined.tally.total(is_sum=False)


def test_windows_that_are_not_the_same_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"asked for \[8, 9\] samples"):
        join([of_rank(8.0, (8,)), replace(of_rank(8.0, (8,)), num_samples=9)], 8)


def test_norms_of_ranks_without_a_guess_stay_as_they_are() -> None:
    joined = join([of_rank(0.0, (3,)), of_rank(0.0, (5,), norms={0: torch.tensor(3.0)})], 8)
    assert joined.norms == {1: torch.tensor(3.0)}


def test_a_rank_tells_counts_and_gradients() -> None:
    p, tally = torch.ones(3, requires_grad=True), Tally(3, deferred=False)
    p.grad = torch.ones(3)
    tally.weight(3, 2.0)
    nothing: dict[str, Any] = {"num_samples": 3, "sizes": (3,), "reductions": [], "losses": []}
    nothing |= {
        "norms": {},
        "outputs": {},
        "has_changed": False,
        "is_uncounted": False,
        "named": None,
        "counts_by_name": False,
    }
    nothing |= {"arrived": (), "came_twice": False}
    found = told([p, torch.ones(1)], tally, **nothing)
    assert (found.counts, found.guess, found.gradients) == ((2.0,), 2.0, [True, False])
