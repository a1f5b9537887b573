"""A GAN with two Accumulators: a generator and a discriminator, each with an optimizer of its own, both exact.

    python examples/gan.py        # half a minute on one core of an Intel Xeon at 2.5 GHz

The generator learns eight blobs on a circle. Each step of either network is that of the whole batch, though no more
than a part of it is run at once; where memory runs out, the step is run again in smaller pieces. The noise is drawn
with the batch and cut with it, so that each sample keeps its own.

Shapes: B points in a micro-batch, 2 coordinates each; noise of 4 numbers for each.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoaccum

BLOBS, NOISE = 8, 4
BATCH = 256
"""Samples of one step, of either network."""
LARGEST = 96
"""Samples that are run at once, as if memory held no more."""


def real_points(num_samples: int) -> Tensor:
    """Points of the blobs, (num_samples, 2), of a spread of 0.05 each."""
    angles = torch.randint(BLOBS, (num_samples,)) * (2 * math.pi / BLOBS)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(num_samples, 2)


def make_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def make_discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def make_accumulators(
    generator: nn.Module, discriminator: nn.Module, lr: float = 2e-3, **options: Any
) -> tuple[autoaccum.Accumulator, autoaccum.Accumulator]:
    """The two that are stepped in turn, the discriminator's first.

    Each training step uses the other network too. What that gets of a gradient reaches no optimizer: the other's own
    step begins without it.
    """

    def of_discriminator(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch  # (B, 2), (B, NOISE)
        with torch.no_grad():
            made = generator(noise)
        return F.softplus(-model(real)).mean() + F.softplus(model(made)).mean()

    def of_generator(model: nn.Module, noise: Tensor) -> Tensor:
        return F.softplus(-discriminator(model(noise))).mean()

    def accumulator(model: nn.Module, training_step: Callable[[Any, Any], Tensor]) -> autoaccum.Accumulator:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.99))
        return autoaccum.Accumulator(model, optimizer, training_step=training_step, **options)

    return accumulator(discriminator, of_discriminator), accumulator(generator, of_generator)


def train(steps: int, batch: int = BATCH, **options: Any) -> tuple[nn.Module, list[tuple[float, float]]]:
    """The trained generator, and both losses of each step."""
    torch.manual_seed(0)
    generator, discriminator = make_generator(), make_discriminator()
    step_discriminator, step_generator = make_accumulators(generator, discriminator, **options)
    losses = []
    for _ in range(steps):
        of_discriminator = step_discriminator.step((real_points(batch), torch.randn(batch, NOISE)))
        of_generator = step_generator.step(torch.randn(batch, NOISE))
        losses.append((of_discriminator.item(), of_generator.item()))
    return generator, losses


@torch.no_grad()
def share_near_blobs(generator: nn.Module, num_samples: int = 2000) -> float:
    """How many of the generator's points lie within 0.2 of the middle of a blob, as a share of one."""
    angles = torch.arange(BLOBS) * (2 * math.pi / BLOBS)
    middles = torch.stack([angles.cos(), angles.sin()], dim=1)
    made = generator(torch.randn(num_samples, NOISE))
    return (torch.cdist(made, middles).min(dim=1).values < 0.2).float().mean().item()


if __name__ == "__main__":
    trained, found = train(600, max_micro_batch=LARGEST)
    print(f"losses at the end: discriminator {found[-1][0]:.3f}, generator {found[-1][1]:.3f}")
    print(f"{share_near_blobs(trained):.0%} of the points lie near a blob")
