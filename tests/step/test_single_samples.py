"""Errors of single samples, told from all others; runs that have them are in ``tests/training``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.step.error_context import SingleSampleError, beyond_memory, may_need_another, of_one, reason


def test_which_errors_may_be_those_of_a_single_sample() -> None:
    def raised(function: Callable[[], object]) -> Exception:
        try:
            function()
        except Exception as error:
            return error
        raise AssertionError

    one = torch.zeros(1, 3)
    assert may_need_another(raised(lambda: functional.batch_norm(one, None, None, training=True)))
    assert may_need_another(raised(lambda: one.squeeze().softmax(1)))
    assert may_need_another(raised(lambda: len(torch.tensor(0.0))))
    assert may_need_another(AssertionError("batch size > 1 but found 1"))
    assert not may_need_another(StopIteration())
    assert not may_need_another(torch.OutOfMemoryError())
    assert not may_need_another(autoaccum.AutoaccumError())


def test_a_reason_is_the_first_line_of_the_error() -> None:
    said = "a single sample cannot be computed: ValueError: no samples"
    assert reason(ValueError("no samples\nbut many words")) == said
    assert reason(ValueError()) == "a single sample cannot be computed: ValueError: "


def test_what_two_samples_would_have_shown_is_noted() -> None:
    error = beyond_memory(ValueError("no samples"))
    assert str(error) == "no samples"
    assert error.__notes__ == ["It was raised for a micro-batch of one sample; with two of them memory ran out."]


def test_of_a_window_of_one_sample_it_is_noted_how_it_is_left_out() -> None:
    error = ValueError("no samples")
    with pytest.raises(SingleSampleError):
        of_one(error, 2)
    assert not hasattr(error, "__notes__")
    of_one(error, 1)
    (note,) = error.__notes__
    assert "drop_last=True leaves it out" in note


@pytest.mark.parametrize("kind", [AssertionError, ValueError, NotImplementedError])
def test_what_a_library_refuses_of_one_sample_is_computed_of_two(kind: type[Exception]) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) < 2:
            raise kind("batch size > 1, but found 1")
        return model(batch).square().mean()

    result = autoaccum.fit(
        nn.Linear(4, 1), torch.randn(12, 4), training_step=step, effective_batch=6, progress=False, device="cpu",
        cache=False,
    )  # fmt: skip
    assert result.num_steps == 2
    assert min(size for report in result.history for size in report.micro_batches) > 1
