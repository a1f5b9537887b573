"""The same curve in any memory: a convolutional net with BatchNorm, in micro-batches of a fixed size.

    python examples/batch_norm.py        # half a minute on one core of an Intel Xeon

BatchNorm normalises a sample by those beside it, so that a smaller micro-batch is another model. By default autoaccum
runs BatchNorm on the full batch. That takes memory; where it does not fit, fix the micro-batch: with ``micro_batch=16``
a tight limit and a loose one train the same net. The memory is a simulated one, so that the limits are the same on each
machine.

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


def train(limit: str, micro_batch: int | str) -> tuple[autoaccum.FitResult, Tensor]:
    """Train under a limit; return the result and the running statistics, joined."""
    model = make_model()
    options: dict[str, Any] = {"effective_batch": 128, "steps": 20, "loss_fn": F.cross_entropy, "device": "cpu"}
    with simulated_memory(limit):
        result = autoaccum.fit(
            model,
            load(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            micro_batch=micro_batch,
            accumulate="weighted",
            progress=False,
            cache=False,
            **options,
        )
    return result, torch.cat([buffer.double().flatten() for buffer in model.buffers()])


if __name__ == "__main__":
    warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)  # that it is not the big batch is announced
    for micro_batch in ("auto", 16):
        print(f"micro_batch={micro_batch!r}")
        (tight, first), (loose, second) = (train(limit, micro_batch) for limit in ("3MiB", "64MiB"))
        for name, result in (("3 MiB", tight), ("64 MiB", loose)):
            losses = ", ".join(f"{report.loss:.6f}" for report in result.history[4::5])
            print(f"  {name:>6}: micro-batches of {max(result.history[-1].micro_batches):3}, losses {losses}")
        losses_apart = max(abs(a.loss - b.loss) for a, b in zip(tight.history, loose.history, strict=True))
        print(f"  apart: losses {losses_apart:.0e}, running statistics {(first - second).abs().max():.0e}")
