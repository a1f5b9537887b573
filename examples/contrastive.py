"""Contrastive learning on scikit-learn's digits: windows of four sizes in the same memory, and their features.

    python examples/contrastive.py

Two views of each image, shifted and noisy, are to be told from those of all other images of the window. What has been
learnt is measured by a linear probe: a logistic regression on the frozen features. All runs have the same memory, which
is a simulated one, so that it is the same on each machine: the largest window is cut, the smaller ones fit. Each is of
one seed: that the largest window has the best features may be otherwise with another.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import autoaccum
from autoaccum.step.contrastive import info_nce
from autoaccum.testing import simulated_memory

LIMIT = "6MiB"
STEPS = 50
"""Optimizer steps of each run, whatever its window."""


def load() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8), from 0 to 1
    return images[order], torch.tensor(digits.target)[order]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.GELU(), nn.Linear(64, 32),
    )  # fmt: skip


def view(images: Tensor) -> Tensor:
    """Shift each image by up to a pixel, and add noise."""
    right, down = torch.randint(-1, 2, (2,)).tolist()
    return images.roll((right, down), (2, 3)) + 0.2 * torch.randn_like(images)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Compare two views of all images of the window."""
    (images,) = batch
    return info_nce(
        model(view(images)), model(view(images)), temperature=0.2, chunk=64
    )  # rows that are compared at once


@torch.no_grad()
def probe(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of held-out digits that a linear model on the features tells."""
    features = model(images).numpy()
    linear = LogisticRegression(max_iter=2000).fit(features[:1297], labels[:1297])
    return float(linear.score(features[1297:], labels[1297:]))


def train(window: int) -> tuple[float, int]:
    """Return the probe's accuracy, and the largest micro-batch of the last window."""
    images, labels = load()
    model = make_model()
    with simulated_memory(LIMIT):
        result = autoaccum.fit(
            model, (images[:1297],), effective_batch=window, training_step=training_step,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3), steps=STEPS,
            device="cpu", cache=False, progress=False,
        )  # fmt: skip
    return probe(model, images, labels), max(result.history[-1].micro_batches)


def main(windows: tuple[int, ...] = (8, 32, 128, 512)) -> None:
    for window in windows:
        accuracy, micro_batch = train(window)
        print(f"window {window:4d}, micro-batches of up to {micro_batch:3d}: linear probe {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
