"""A count that is kept from 0 shows only where nothing counts: whenever that is, whatever the count is multiplied with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.events import Notice, Verified
from tests.devices import DEVICE

pytestmark = pytest.mark.measured

FEATURES, SAMPLES, WINDOWS = 4, 8, 7
Loss = Callable[[Any, Any], torch.Tensor]


def errors_of(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets, mask = batch
    return (model(inputs) - targets) ** 2, mask


def by_tensors(model: nn.Module, batch: Any) -> torch.Tensor:
    errors, mask = errors_of(model, batch)
    return (errors * mask[:, None]).sum() / (mask.sum().clamp(min=1) * FEATURES)


def by_numbers(model: nn.Module, batch: Any) -> torch.Tensor:
    errors, mask = errors_of(model, batch)
    return (errors * mask[:, None]).sum() / (max(mask.sum().item(), 1) * FEATURES)


def with_penalty(model: nn.Module, batch: Any) -> torch.Tensor:
    penalty: torch.Tensor = sum(p.pow(2).sum() for p in model.parameters())  # type: ignore[assignment]
    return by_tensors(model, batch) + 0.01 * penalty


def by_weights(model: nn.Module, batch: Any) -> torch.Tensor:
    errors, mask = errors_of(model, batch)
    return ((mask / mask.sum().clamp(min=1))[:, None] * errors).mean(1).sum()


def of_two_heads(model: nn.Module, batch: Any) -> torch.Tensor:
    """Add two means, of which the second leaves out what the mask says, by a label of its own."""
    inputs, targets, mask = batch
    labels = torch.where(mask.bool(), targets[:, 1] > 0, 7).long()
    logits = model(inputs)
    first = nn.functional.cross_entropy(logits[:, :2], (targets[:, 0] > 0).long())
    return first + nn.functional.cross_entropy(logits[:, 2:], labels, ignore_index=7)


def sample_by_sample(model: nn.Module, batch: Any) -> Any:
    """Return two losses by name, each a mean over samples of what each one divides by its own count."""
    inputs, targets, mask = batch
    shares, rests = [], []
    for own, counts in zip((model(inputs) - targets) ** 2, mask > 0, strict=True):
        num = max(1, int(counts.sum()))
        shares.append(own[counts].sum() / num)
        rests.append(own.sum() / num)
    return {"rest": sum(rests) / len(mask), "marked": sum(shares) / len(mask)}


def gradients(
    loss: Loss, mask: torch.Tensor, micro_batch: int, window: int = SAMPLES, **options: Any
) -> tuple[list[torch.Tensor], list[tuple[int, Any]]]:
    """Return the gradient of each window, and what was said with the number of the window it was said in."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, len(mask), FEATURES, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, FEATURES).double()
    found: list[torch.Tensor] = []
    said: list[tuple[int, Any]] = []

    class Kept(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]

    def hear(event: Any) -> None:
        if isinstance(event, Notice | Verified):
            said.append((len(found) + 1, event))

    autoaccum.fit(
        model, (inputs, targets, mask), effective_batch=window, micro_batch=micro_batch, training_step=loss,
        optimizer=lambda parameters: Kept(parameters, lr=0.1), shuffle=False, device=DEVICE, callbacks=[hear],
        progress=False, steps=len(mask) // window, **options,
    )  # fmt: skip
    return found, said


def mask_of(window: int, first: int = 1) -> torch.Tensor:
    """Return a mask of all ones, but for a window of which the first few samples count."""
    mask = torch.ones(SAMPLES * WINDOWS, dtype=torch.float64)
    mask[(window - 1) * SAMPLES + first : window * SAMPLES] = 0
    return mask


@pytest.mark.device(every=7)
@pytest.mark.parametrize("micro_batch", [4, 2])
@pytest.mark.parametrize("window", [1, 3, 4, 6])
@pytest.mark.parametrize("loss", [by_tensors, by_numbers, with_penalty, by_weights, of_two_heads])
def test_no_window_is_wrong(loss: Loss, window: int, micro_batch: int) -> None:
    mask = mask_of(window)
    found, said = gradients(loss, mask, micro_batch)
    expected, _ = gradients(loss, mask, SAMPLES)
    assert len(found) == len(expected) == WINDOWS
    for gradient, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-9, atol=1e-12)
    assert not [event for _, event in said if isinstance(event, Notice)]


@pytest.mark.device
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_it_is_no_matter_what_terms_count_that_come_sample_by_sample(micro_batch: int) -> None:
    """They are others in each micro-batch, and each may be divided by 1 for none."""
    mask = torch.zeros(48, FEATURES, dtype=torch.float64)
    for sample, count in {3: 3, 7: 1, 17: 1, 20: 2, 25: 2, 40: 1}.items():
        mask[sample, :count] = 1
    found, said = gradients(sample_by_sample, mask, micro_batch, 24, strict=True)
    expected, _ = gradients(sample_by_sample, mask, 24, 24)
    assert not [event for _, event in said if isinstance(event, Notice)]
    for gradient, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12)
