"""Laws 1 and 5 of steps that draw for all samples of a batch: an order, a coin, noise that is centred."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import Joined, Notice

pytestmark = pytest.mark.measured

Step = Callable[[Any, Any], torch.Tensor]
SAMPLES, WINDOWS = 12, 8


def mixed(order: Callable[[int], torch.Tensor], coin: Callable[[], bool] = lambda: True) -> Step:
    """Return a step that mixes each sample with another one, where a coin says so."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch[0], F.one_hot(batch[1], 3).double()
        if coin():
            other = order(len(x))
            x, y = 0.7 * x + 0.3 * x[other], 0.7 * y + 0.3 * y[other]
        return F.cross_entropy(model(x), y)

    return step


def centred_noise(model: Any, batch: Any) -> torch.Tensor:
    noise = torch.randn_like(batch[0])
    return F.cross_entropy(model(batch[0] + noise - noise.mean(0)), batch[1])


def mask_over_its_mean(model: Any, batch: Any) -> torch.Tensor:
    mask = (torch.rand(len(batch[0]), 6) > 0.3).double()
    return F.cross_entropy(model(batch[0] * mask / mask.mean()), batch[1])


def sliced_wasserstein(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    directions = F.normalize(torch.randn(3, 10), dim=0)
    prior = torch.randn_like(outputs)
    differences = (outputs @ directions).sort(0).values - (prior @ directions).sort(0).values
    return F.cross_entropy(outputs, batch[1]) + differences.square().mean()


def some_samples_mixed(model: Any, batch: Any) -> torch.Tensor:
    x, order = batch[0], torch.randperm(len(batch[0]))
    return F.cross_entropy(model(torch.where(torch.rand(len(x), 1) < 0.5, 0.5 * x + 0.5 * x[order], x)), batch[1])


STEPS: dict[str, Step] = {
    "an order of random numbers": mixed(lambda n: torch.rand(n).argsort()),
    "a multinomial order": mixed(lambda n: torch.multinomial(torch.ones(n), n)),
    "an order of an order": mixed(lambda n: torch.randperm(n)[torch.randperm(n)]),
    "a coin": mixed(torch.randperm, lambda: bool(torch.rand(()) < 0.5)),
    "a coin that is mostly heads": mixed(torch.randperm, lambda: bool(torch.rand(()) < 0.8)),
    "Python's coin": mixed(torch.randperm, lambda: random.random() < 0.5),
    "NumPy's coin": mixed(torch.randperm, lambda: bool(np.random.rand() < 0.5)),
    "centred noise": centred_noise,
    "a mask over its mean": mask_over_its_mean,
    "sliced Wasserstein": sliced_wasserstein,
    "some samples mixed": some_samples_mixed,
}


def ran(step: Step, *, plain: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the parameters that a loop leaves, and what it told."""
    generator = torch.Generator().manual_seed(7)
    batches = [
        (torch.randn(SAMPLES, 6, generator=generator).double(), torch.randint(3, (SAMPLES,), generator=generator))
        for _ in range(WINDOWS)
    ]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    events: list[Any] = []
    if not plain:
        accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=4)
        events = accumulator.events
    for batch in batches:
        if plain:
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
        else:
            accumulator.step(batch)
    return [p.detach().clone() for p in model.parameters()], events


@pytest.mark.parametrize("name", STEPS)
def test_what_is_drawn_for_a_batch_is_drawn_once_and_for_all_of_it(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        wanted, _ = ran(STEPS[name], plain=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", autoaccum.AutoaccumWarning)
            found, events = ran(STEPS[name], plain=False)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert any(isinstance(event, Joined) for event in events)


def test_what_is_drawn_for_each_sample_needs_no_joining() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    accumulator = autoaccum.Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        training_step=lambda m, b: F.cross_entropy(m(b[0] + torch.randn_like(b[0])), b[1]),
        micro_batch=4,
    )
    for _ in range(2):
        accumulator.step((torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))))
    assert not any(isinstance(event, Joined | Notice) for event in accumulator.events)
