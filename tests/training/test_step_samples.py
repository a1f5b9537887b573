"""Steps of samples: micro-batches are collated for themselves, and a replay is given what the first attempt was."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from autoaccum import Accumulator
from autoaccum.errors import ArgumentTypeError, EmptyDatasetError
from autoaccum.training.accumulator import StepSamples
from tests.devices import DEVICE, there

HERE = torch.device(DEVICE)


def numbered(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.full((length,), float(index + 1)) for index, length in enumerate(lengths)]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


@pytest.mark.device
def test_samples_are_served_longest_first_and_padded_by_themselves() -> None:
    window = StepSamples(pad, 0, HERE).window(numbered((2, 5, 3, 1)), 0)
    assert window.num_samples == 4
    assert window.lengths == (5, 3, 2, 1)
    assert [window.micro_batch(start, 2).shape for start in (0, 2)] == [(2, 5), (2, 2)]
    assert window.micro_batch(1, 2)[:, 0].tolist() == [3, 1]
    assert window.samples([3, 0])[:, 0].tolist() == [4, 2]


@pytest.mark.device
def test_of_one_shape_they_stay_in_their_order() -> None:
    window = StepSamples(default_collate, 0, HERE).window([(torch.tensor(i), i) for i in range(40)], 0)
    assert window.micro_batch(30, 3)[1].tolist() == [30, 31, 32]
    assert window.micro_batch(0, 40)[0].tolist() == list(range(40))


@pytest.mark.device
def test_what_a_collate_fn_draws_is_drawn_again_and_disturbs_nobody() -> None:
    def masked(samples: list[torch.Tensor]) -> torch.Tensor:
        return pad(samples) * (torch.rand(len(samples), 1) + random.random())

    samples, of_steps = numbered((2, 2, 2)), StepSamples(masked, 7, HERE)
    states = torch.get_rng_state(), random.getstate()
    window = of_steps.window(samples, 0)
    first = window.micro_batch(1, 2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    torch.rand(3)
    assert torch.equal(window.micro_batch(1, 2), first)
    assert not torch.equal(of_steps.window(samples, 1).micro_batch(1, 2), first), "other draws in the next step"
    assert not torch.equal(StepSamples(masked, 8, HERE).window(samples, 0).micro_batch(1, 2), first)


@pytest.mark.device
def test_parts_that_it_takes_out_of_samples_are_there_again() -> None:
    def popping(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.stack([sample.pop("x") for sample in samples])

    samples = [{"x": torch.tensor([index])} for index in range(3)]
    window = StepSamples(popping, 0, HERE).window(samples, 0)
    for _ in range(2):
        assert window.micro_batch(0, 3).tolist() == [[0], [1], [2]]
    assert len(samples[0]) == 1


@pytest.mark.device
def test_a_step_is_replayed_with_the_same_draws() -> None:
    def masked(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * torch.rand(len(samples), 1)

    def gradient(size: int, fails: bool) -> tuple[torch.Tensor, tuple[int, ...]]:
        torch.manual_seed(0)
        model, calls = there(nn.Linear(3, 1)), []

        def step(model: Any, batch: torch.Tensor) -> torch.Tensor:
            calls.append(len(batch))
            if fails and len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return model(batch).square().mean()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = Accumulator(
            model, optimizer, training_step=step, collate_fn=masked, micro_batch=size, verify=False
        )
        with nullcontext():
            accumulator.backward([torch.arange(3.0) + index for index in range(8)])
        assert model.weight.grad is not None
        return model.weight.grad, accumulator.micro_batches

    found, sizes = gradient(4, fails=True)
    wanted, again = gradient(max(sizes), fails=False)
    assert sizes == again != (4, 4)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("batch", [torch.ones(3, 2), {"x": 3}, (sample for sample in ())])
def test_what_is_no_list_of_samples_is_refused(batch: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="expected a list of samples. With collate_fn, a step is given samples"):
        StepSamples(pad, 0, HERE).window(batch, 0)
    with pytest.raises(EmptyDatasetError, match="it is an empty list"):
        StepSamples(pad, 0, HERE).window([], 0)
