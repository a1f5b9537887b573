"""The size of pieces of an evaluation: half of what has not fitted, said aloud, down to a single sample."""

from __future__ import annotations

import pytest
import torch

from autoaccum.errors import AutoaccumWarning, NothingFitsError
from autoaccum.integrations.evaluation_sizes import smaller
from autoaccum.memory.oom import RanOut, attempt

pytestmark = pytest.mark.integrations


def ran_out() -> RanOut:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    outcome = attempt(fail)
    assert isinstance(outcome, RanOut)
    return outcome


def test_it_is_halved_and_said() -> None:
    with pytest.warns(AutoaccumWarning, match="of 7 samples.*evaluated 4 at a time.*Pass n=4.") as warned:
        assert smaller(7, ran_out(), "a phase", torch.device("cpu"), "Pass n={size}.") == 4
    assert len(warned) == 1


def test_less_than_one_sample_is_none() -> None:
    outcome = ran_out()
    with pytest.raises(NothingFitsError, match="^a phase") as caught:
        smaller(1, outcome, "a phase", torch.device("cpu"), "")
    assert caught.value.__cause__ is outcome.error
