"""Numbers of a device come to the host by one copy, as they are, and make of terms what they would be there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.step.loss_graph import read_reduction, without_graph
from autoaccum.step.readback import Numbers
from tests import standin


def device() -> torch.device:
    if not hasattr(torch, "standin"):
        pytest.skip("only the stand-in device has a log")
    return torch.device("standin")


@pytest.mark.gpu
def test_are_copied_together_and_exactly() -> None:
    values = [
        torch.tensor(0.1), torch.tensor(2**24 + 1), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([1.5, 2.5]),
        torch.tensor(0.1, dtype=torch.bfloat16),
    ]  # fmt: skip
    there = [value.to(device()) for value in values]
    numbers = Numbers()
    assert not numbers.are_wanted
    numbers.want([*there, None, 3.0, *there])
    with standin.recorded() as log:
        numbers.read()
    assert sum(entry.kind == "sync" for entry in log) == 1
    for value, found in zip(values, map(numbers.tensor, there), strict=True):
        assert found.is_cpu
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    assert numbers.count(there[0]) == pytest.approx(0.1)
    assert numbers.tensor(there[3]).tolist() == [1.5, 2.5]


def test_of_the_host_stay_as_they_are() -> None:
    numbers, value = Numbers(), torch.tensor(0.1)
    numbers.want([value])
    assert not numbers.are_wanted
    assert numbers.tensor(value) is value


def divided(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (outputs * mask).sum() / mask.sum()


def weighed(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (outputs * (mask / mask.sum())).sum()


def of_one(outputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (outputs[:1] * mask[:1]).mean()


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [divided, weighed, of_one])
@pytest.mark.parametrize("mask", [[1.0, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0]])
def test_terms_are_what_they_would_be_there(loss: Any, mask: list[float]) -> None:
    found = []
    for place in ("cpu", device()):
        weight = torch.ones(4, device=place, requires_grad=True)
        computed = loss(weight * torch.arange(4.0, device=place), torch.tensor(mask, device=place))
        samples = 1 if loss is of_one else 4
        found.append(without_graph(read_reduction(computed, samples)))
    on_host, on_device = found
    assert on_device.items == pytest.approx(on_host.items)
    for mine, other in zip(on_device.terms, on_host.terms, strict=True):
        assert (mine.kind, mine.is_one, mine.is_counted) == (other.kind, other.is_one, other.is_counted)
        assert not mine.is_unread
