"""What users say of several losses is kept by their names, or by their places."""

from __future__ import annotations

import torch

from autoaccum.step.terms import Computed, by_name, total


def test_what_stands_in_a_sequence_has_its_place_for_a_name() -> None:
    assert by_name([3, 4]) == {"0": 3, "1": 4}
    assert by_name((3,)) == {"0": 3}
    assert by_name({"a": 3, 1: 4}) == {"a": 3, "1": 4}


def test_the_total_is_the_loss_that_is_trained_on() -> None:
    loss = torch.tensor(5.0)
    assert total(loss) is loss
    assert total(Computed(loss, {"a": torch.tensor(2.0)})) is loss
