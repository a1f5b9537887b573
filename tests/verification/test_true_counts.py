"""What micro-batches truly count shows where they are joined with others, whatever their counts are kept at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum.verification.true_counts import Piece, _counted, _true_counts_of
from tests.models import classes
from tests.verification.making import DOUBLE, job_of, window_of


def told(weights: Sequence[float], size: int, *, most: int = 6, kept_at: float = 1.0) -> dict[int, float]:
    """Return what micro-batches of that size count that are in doubt, by where they begin."""
    seen: list[int] = []

    def counted(batches: Sequence[Sequence[int]]) -> list[float]:
        seen.append(max(map(len, batches)))
        return [max(kept_at, sum(weights[at] for at in batch)) for batch in batches]

    pieces = [(start, min(size, len(weights) - start)) for start in range(0, len(weights), size)]
    shown = {piece: max(kept_at, sum(weights[piece[0] : sum(piece)])) for piece in pieces}
    doubts = {piece: count for piece, count in shown.items() if count == kept_at}
    found = _true_counts_of(doubts, shown, counted, most)  # type: ignore[arg-type]
    assert max(seen, default=0) <= max(most, 6 + size)
    return {start: count for (start, _), count in found.items()}


def test_one_that_counts_for_sure_is_enough() -> None:
    assert told([3.0, 0.25, 0.0, 1.0, 0.75], 1) == {1: 0.25, 2: 0.0, 3: 1.0, 4: 0.75}
    assert told([5.0, 2.0, 0.5, 0.0], 2, kept_at=2.0) == {2: 0.5}


def test_where_none_does_some_stand_in_for_others_and_are_known_one_by_one() -> None:
    weights = [0.75, 0.5, 0.5, 0.75, 0.25, 0.0, 0.5, 0.5, 0.25, 0.75, 0.5, 0.0]
    assert told(weights, 1) == dict(enumerate(weights))


def test_all_of_a_window_are_known_together() -> None:
    found = told([0.75, 0.5, 0.25], 1)
    assert sum(found.values()) == pytest.approx(1.5)
    # What is kept from 0 as a whole counts what it is kept at.
    assert sum(told([0.25, 0.25, 0.25], 1).values()) == pytest.approx(1.0)


def test_where_nothing_counts_enough_nothing_is_told() -> None:
    assert told([0.01] * 40, 1) == {}


def test_more_than_was_shown_is_no_count() -> None:
    assert told([3.0, 0.5], 1) == {1: 0.5}
    doubts: dict[Piece, float] = {(1, 1): 1.0}
    counted: Any = lambda batches: [3.0 * len(batch) ** 2 for batch in batches]  # noqa: E731
    assert _true_counts_of(doubts, {(0, 1): 3.0, (1, 1): 1.0}, counted, 6) == {}


WEIGHTS = torch.tensor([0.3, 0.9, 0.0, 0.5, 0.4, 0.8, 0.7, 0.6], dtype=DOUBLE)


def weighed(model: Any, batch: Any) -> torch.Tensor:
    each, weights = cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[2]
    return (each * weights).sum() / weights.sum().clamp(min=1) + 0.1 * each.mean()


def drawn(model: Any, batch: Any) -> torch.Tensor:
    return weighed(model, (batch[0] + 0.0 * torch.rand_like(batch[0]), *batch[1:]))


def drawn_counts(model: Any, batch: Any) -> torch.Tensor:
    return weighed(model, (*batch[:2], batch[2] * (torch.rand_like(batch[2]) < 0.7) + 0.5))


def measured(loss: Any, num_terms: int = 2) -> list[float] | None:
    window = window_of(8, (*classes(8, DOUBLE), WEIGHTS))
    counted = partial(_counted, job_of(loss), window, 0, num_terms)
    return counted([[0, 1, 3, 4, 5], [2], [7, 1]])


def test_counts_are_read_off_forwards_of_their_own() -> None:
    assert measured(weighed) == pytest.approx([2.9, 1.0, 1.5], rel=1e-12)
    assert measured(weighed, 3) is None, "there are as many terms as there are"


def test_what_is_drawn_may_decide_what_counts_or_not() -> None:
    assert measured(drawn) == pytest.approx([2.9, 1.0, 1.5], rel=1e-12)
    assert measured(drawn_counts) is None


def test_what_cannot_be_computed_tells_nothing() -> None:
    def failing(model: Any, batch: Any) -> torch.Tensor:
        if len(batch[0]) < 5:
            raise ValueError("too few")
        return weighed(model, batch)

    assert measured(failing) is None
