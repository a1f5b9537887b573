"""A sample of a kind that was not there is noticed, and one that was is not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.verification.kinds import Kinds
from tests.devices import DEVICE, there

LABELS = torch.tensor([1, 2, 1, 2], device=DEVICE)
INPUTS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 1.0], [2.0, 2.0]], device=DEVICE)


def seen(*batches: Any) -> Kinds:
    kinds = Kinds()
    for batch in batches:
        kinds.begin()
        kinds.look_at(batch)
        kinds.accept()
    kinds.begin()
    return kinds


def new(kinds: Kinds, *batches: Any) -> set[str]:
    """Of a window of these micro-batches."""
    kinds.begin()
    for batch in batches:
        kinds.look_at(batch)
    return kinds.new()


@pytest.mark.device
@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((INPUTS, LABELS), set()),
        ((INPUTS, LABELS[[0, 1]]), set()),  # of fewer samples
        ((INPUTS + 1, LABELS + 5), set()),  # other classes of the same kind
        ((INPUTS, there(torch.tensor([1, 2, -1, 2]))), {"1: negatives", "1: nothing but negatives"}),
        ((INPUTS, there(torch.tensor([1, 2, 255, 2]))), {"1: numbers beyond 1e1", "1: numbers beyond 1e2"}),
        ((INPUTS, there(torch.tensor([1, 2, math.nan, 2]))), {"1: no numbers"}),
        ((INPUTS * there(torch.tensor([0.0, 1.0])), LABELS), {"0: zeros"}),
        ((INPUTS * there(torch.tensor([[1], [1], [0], [1]])), LABELS), {"0: zeros", "0: nothing but zeros"}),
        ((INPUTS.repeat(1, 2), LABELS), {"0: (4,)"}),
        (((INPUTS, LABELS), LABELS), {"2: several values", "2: ()"}),
    ],
)
def test_what_a_window_holds_and_none_before_it_did(batch: Any, found: set[str]) -> None:
    assert new(seen((INPUTS, LABELS)), batch) == found


def test_several_classes_are_new_where_there_was_one() -> None:
    one = seen((INPUTS, torch.ones(4)))
    assert new(one, (INPUTS, torch.ones(4))) == set()
    assert new(one, (INPUTS, torch.ones(4)), (INPUTS, 2 * torch.ones(4))) == {"1: several values"}


@pytest.mark.device
def test_a_window_is_all_of_its_micro_batches_and_nothing_of_an_attempt_before() -> None:
    kinds = seen((INPUTS, LABELS))
    assert new(kinds, (INPUTS, LABELS), (INPUTS, -LABELS)) != set()
    assert new(kinds, (INPUTS, LABELS)) == set()


@pytest.mark.device
def test_what_was_accepted_is_known_from_then_on() -> None:
    kinds = seen((INPUTS, LABELS))
    assert new(kinds, (INPUTS, -LABELS)) != set()
    kinds.accept()
    assert new(kinds, (INPUTS, -LABELS)) == set()


def test_arrays_are_looked_at_as_tensors_are_and_other_things_left_alone() -> None:
    assert new(seen(INPUTS.cpu().numpy()), -INPUTS.cpu().numpy()) == {"0: negatives", "0: nothing but negatives"}
    others = {"text": ["a"], "scalar": torch.tensor(3.0), "none": None, "objects": np.array(["a", None])}
    others |= {"sparse": INPUTS.to_sparse(), "empty": torch.zeros(0)}
    assert new(Kinds(), others) == set()


def test_of_large_samples_only_the_shape_is_looked_at() -> None:
    images = torch.ones(2, 33, 32)
    assert new(seen(images), -images) == set()
    assert new(seen(images), images[:, 1:]) != set()


def test_and_nothing_of_them_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoaccum.verification.kinds.numbers_of", lambda leaf: pytest.fail("it was copied"))
    seen(torch.ones(2, 33, 32))


@pytest.mark.device
def test_what_is_known_is_kept() -> None:
    kinds = Kinds()
    kinds.load_state_dict(seen((INPUTS, -LABELS)).state_dict())
    assert new(kinds, (INPUTS, -LABELS)) == set()
