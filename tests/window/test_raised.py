"""Errors of the user's code, which are told with their micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.window.raised import tell_micro_batch


def test_an_error_of_the_users_code_is_told_with_its_micro_batch() -> None:
    batch = [torch.zeros(2, 3), "a", "b", torch.tensor([7, -1])]
    error = ValueError("no samples")
    tell_micro_batch(error, lambda: batch, 2, " of a window of 8")
    tell_micro_batch(error, lambda: batch, 2, " of a window of 8")  # the same object, raised again
    tell_micro_batch(error, lambda: [torch.zeros(1, n) for n in range(9)], 1, "")
    tell_micro_batch(error, lambda: ["a"], 1, " of a window of 4")
    assert error.__notes__ == [
        "It was raised for a micro-batch of 2 samples of a window of 8, of tensors (2, 3), (2,) from -1 to 7.",
        "It was raised for a micro-batch of 1 sample, of tensors (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), and 3 more.",
        "It was raised for a micro-batch of 1 sample of a window of 4.",
    ]
    for other in (torch.OutOfMemoryError(), autoaccum.AutoaccumError()):
        tell_micro_batch(other, lambda: batch, 2, " of a window of 8")
        assert not hasattr(other, "__notes__")


@pytest.mark.parametrize("size", [1, 3])
def test_a_window_tells_it(size: int) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).view(5, 7).mean()

    with pytest.raises(RuntimeError, match="shape '.5, 7.' is invalid") as raised:
        autoaccum.fit(
            nn.Linear(4, 1), torch.randn(6, 4), training_step=step, effective_batch=6, progress=False, device="cpu",
            micro_batch=size, cache=False,
        )  # fmt: skip
    # After one sample two are tried, whose error it is.
    sizes = [f"It was raised for a micro-batch of {n} samples of a window of 6, of tensors ({n}, 4)." for n in (2, 3)]
    assert raised.value.__notes__ == [sizes[size == 3]]


def test_nothing_that_goes_wrong_with_the_telling_hides_the_error() -> None:
    class Closed(Exception):
        __notes__ = ()

    def endless() -> list[object]:  # of a batch that the user's code has put into itself
        raise RecursionError

    tell_micro_batch(Closed(), lambda: [torch.zeros(1)], 1, "")
    tell_micro_batch(ValueError("no samples"), endless, 1, "")


def test_what_the_user_raises_is_left_as_it_is() -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$") as raised:
        autoaccum.fit(
            nn.Linear(4, 1), torch.randn(6, 4), training_step=step, effective_batch=6, progress=False, device="cpu",
            cache=False,
        )  # fmt: skip
    assert not hasattr(raised.value, "__notes__")


def test_the_range_of_whole_numbers_is_told_where_there_is_one() -> None:
    error = IndexError("index out of range in self")
    batch = [torch.tensor([[4, 9]], dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), torch.tensor([True])]
    tell_micro_batch(error, lambda: batch, 1, "")
    assert error.__notes__ == [
        "It was raised for a micro-batch of 1 sample, of tensors (1, 2) from 4 to 9, (0,), (1,)."
    ]
