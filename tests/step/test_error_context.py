"""Errors of the user's code, which are told with their micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.step.error_context import of_window, tell_micro_batch


def test_an_error_of_the_users_code_is_told_with_its_micro_batch() -> None:
    batch = [torch.zeros(2, 3), "a", "b", torch.tensor([7, -1])]
    error = ValueError("no samples")
    tell_micro_batch(error, lambda: batch, of_window(4, 2, 8))
    tell_micro_batch(error, lambda: batch, of_window(4, 2, 8))  # the same object, raised again
    tell_micro_batch(error, lambda: [torch.zeros(1, n) for n in range(9)], of_window(0, 1, 1))
    tell_micro_batch(error, lambda: ["a"], of_window(3, 1, 4))
    assert error.__notes__ == [
        "autoaccum had split the step's 8 samples and was running a micro-batch of 2 (samples 4 to 5), of shapes (2, 3), "
        "(2,) with values -1 to 7. The full batch differs in the number of samples only.",
        "autoaccum was running the step's one sample, of shapes (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), and 3 "
        "more.",
        "autoaccum had split the step's 4 samples and was running a micro-batch of 1 (sample 3). The full batch differs "
        "in the number of samples only.",
    ]
    for other in (torch.OutOfMemoryError(), autoaccum.AutoaccumError()):
        tell_micro_batch(other, lambda: batch, of_window(4, 2, 8))
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
    n = 2 if size == 1 else 3
    assert raised.value.__notes__ == [
        f"autoaccum had split the step's 6 samples and was running a micro-batch of {n} (samples 0 to {n - 1}), of shapes "
        f"({n}, 4). The full batch differs in the number of samples only."
    ]


def test_a_wrong_number_of_features_is_told_with_the_micro_batch_that_was_running() -> None:
    data = torch.randn(16, 10), torch.randn(16, 4)
    told = (
        "autoaccum had split the step's 16 samples and was running a micro-batch of {0} (samples 0 to {1}), of shapes "
        "({0}, 10), ({0}, 4). The full batch differs in the number of samples only."
    )
    options = {"effective_batch": 16, "loss_fn": mse_loss, "progress": False, "device": "cpu", "cache": False}
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied \(4x10 and 8x4\)") as raised:
        autoaccum.fit(nn.Linear(8, 4), data, micro_batch=4, **options)
    assert raised.value.__notes__ == [told.format(4, 3)]
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        autoaccum.fit(nn.Linear(8, 4), data, micro_batch=16, **options)
    assert raised.value.__notes__ == ["autoaccum was running all 16 samples of the step, of shapes (16, 10), (16, 4)."]
    model = nn.Linear(8, 4)
    accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters()), loss_fn=mse_loss, micro_batch=4)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        accumulator.step(data)
    assert raised.value.__notes__ == [told.format(4, 3)]


def test_batches_that_a_collate_fn_pads_may_differ_otherwise() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        autoaccum.fit(
            nn.Linear(8, 4), [torch.zeros(10)] * 6, training_step=lambda model, batch: model(batch).mean(),
            collate_fn=torch.stack, effective_batch=6, micro_batch=3, progress=False, device="cpu", cache=False,
        )  # fmt: skip
    assert raised.value.__notes__ == [
        "autoaccum had split the step's 6 samples and was running a micro-batch of 3 (samples 0 to 2), of shapes (3, 10)."
    ]


def test_nothing_that_goes_wrong_with_the_telling_hides_the_error() -> None:
    class Closed(Exception):
        __notes__ = ()

    def endless() -> list[object]:  # of a batch that the user's code has put into itself
        raise RecursionError

    tell_micro_batch(Closed(), lambda: [torch.zeros(1)], "was running")
    tell_micro_batch(ValueError("no samples"), endless, "was running")


@pytest.mark.parametrize("micro_batch", [6, 3])
def test_what_is_raised_by_hand_is_noted_where_the_batch_was_split(micro_batch: int) -> None:
    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        autoaccum.fit(
            nn.Linear(4, 1), torch.randn(6, 4), training_step=step, effective_batch=6, progress=False, device="cpu",
            cache=False, micro_batch=micro_batch,
        )  # fmt: skip
    told = (
        "autoaccum had split the step's 6 samples and was running a micro-batch of 3 (samples 0 to 2), of shapes (3, 4)"
    )
    notes = getattr(raised.value, "__notes__", ())
    assert [note.partition(". ")[0] for note in notes] == [told] * (micro_batch < 6)


def test_the_range_of_whole_numbers_is_told_where_there_is_one() -> None:
    error = IndexError("index out of range in self")
    batch = [torch.tensor([[4, 9]], dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), torch.tensor([True])]
    tell_micro_batch(error, lambda: batch, of_window(0, 1, 1))
    assert error.__notes__ == [
        "autoaccum was running the step's one sample, of shapes (1, 2) of uint8 with values 4 to 9, (0,), (1,) of bool."
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_has_read_data_of_its_own_to_their_end_is_told_why() -> None:
    others = iter(torch.randn(3, 4, 8))
    with pytest.raises(StopIteration) as raised:
        autoaccum.fit(
            torch.nn.Linear(8, 3), torch.randn(12, 8), effective_batch=4, progress=False,
            training_step=lambda model, batch: model(batch).mean() * model(next(others)).mean(),
        )  # fmt: skip
    assert any("zip(loader, other)" in note for note in raised.value.__notes__)
