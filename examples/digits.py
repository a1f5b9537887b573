"""A convolutional net on scikit-learn's handwritten digits, 8x8 pixels each; nothing is downloaded.

    autoaccum fit examples/digits.py --effective-batch 128
    autoaccum fit examples/digits.py --effective-batch 128 --set width=64
    python examples/digits.py

Shapes: B images in a micro-batch, one channel, 8x8 pixels; 10 classes.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.events import Finished, Record


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to train on and 360 held out, each class in proportion."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # (1797, 1, 8, 8), from 0 to 1
    labels = torch.tensor(digits.target)  # (1797,)
    train, held_out = train_test_split(torch.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def make_model(width: int = 32) -> nn.Sequential:
    # GroupNorm, not BatchNorm: batch statistics would depend on the micro-batch, and so on the memory there is.
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),  # (B, width, 8, 8)
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (B, 2 * width, 4, 4)
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(2 * width * 4 * 4, 10),
    )


def training_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch  # (B, 1, 8, 8), (B,)
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = (tensor.to(next(model.parameters()).device) for tensor in data.tensors)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        hits = model(images).argmax(dim=1) == labels
    model.train(was_training)
    return hits.float().mean().item()


def print_accuracy(model: nn.Module, held_out: TensorDataset) -> Callable[[Record], None]:
    """A callback that tells the accuracy when the run is over."""

    def callback(record: Record) -> None:
        if isinstance(record, Finished):
            print(f"accuracy on {len(held_out)} held-out digits: {accuracy(model, held_out):.2%}", file=sys.stderr)

    return callback


def recipe(width: int = 32) -> dict[str, Any]:
    torch.manual_seed(0)
    train, held_out = load()
    model = make_model(width)
    return {
        "model": model,
        "data": train,
        "training_step": training_step,
        "lr": 3e-3,
        "epochs": 15,
        "validation_data": held_out,
        "callbacks": [print_accuracy(model, held_out)],
    }


if __name__ == "__main__":
    autoaccum.fit(**recipe(), effective_batch=128)
