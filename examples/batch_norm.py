"""The same curve in any memory: a convolutional net with BatchNorm, whose statistics are those of fixed groups.

    python examples/batch_norm.py        # half a minute on one core of an Intel Xeon

BatchNorm normalises a sample by those beside it, so that a smaller micro-batch is another model. With
``batch_norm="ghost:16"`` the statistics are those of each 16 samples of a window, and micro-batches hold whole groups:
a tight limit and a loose one then train the same net, up to the last digits. The memory is a simulated one, so that
the limits are the same on each machine.

Shapes: B images in a micro-batch, one channel, 8x8 pixels; 10 classes.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import autoaccum
from autoaccum.testing import simulated_memory


def load() -> tuple[Tensor, Tensor]:
    """1,797 digits, (1797, 1, 8, 8) from 0 to 1, and their classes."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float64)[:, None] / 16, torch.tensor(digits.target)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False),  # (B, 16, 6, 6)
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=False),  # (B, 32, 4, 4)
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).double()  # in 64 bits the last digits are far off


def train(limit: str, batch_norm: str) -> tuple[autoaccum.FitResult, Tensor]:
    """Train under a limit; return the result and the running statistics, joined."""
    model = make_model()
    options: dict[str, Any] = {"effective_batch": 128, "steps": 20, "loss_fn": F.cross_entropy, "device": "cpu"}
    with simulated_memory(limit):
        result = autoaccum.fit(
            model,
            load(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            batch_norm=batch_norm,
            progress=False,
            cache=False,
            **options,
        )
    return result, torch.cat([buffer.double().flatten() for buffer in model.buffers()])


if __name__ == "__main__":
    warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)  # "micro" is announced, with a cure
    for batch_norm in ("micro", "ghost:16"):
        print(f'batch_norm="{batch_norm}"')
        (tight, first), (loose, second) = (train(limit, batch_norm) for limit in ("3MiB", "64MiB"))
        for name, result in (("3 MiB", tight), ("64 MiB", loose)):
            losses = ", ".join(f"{report.loss:.6f}" for report in result.history[4::5])
            print(f"  {name:>6}: micro-batches of {max(result.history[-1].micro_batches):3}, losses {losses}")
        losses_apart = max(abs(a.loss - b.loss) for a, b in zip(tight.history, loose.history, strict=True))
        print(f"  apart: losses {losses_apart:.0e}, running statistics {(first - second).abs().max():.0e}")
