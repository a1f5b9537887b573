"""The tasks of benchmarks/verification.py: models that fit them, and makers of their samples, ragged ones too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
"""Tensors with one row per sample."""

FEATURES, CLASSES, TIME, VOCABULARY = 6, 4, 5, 11
IGNORED = -100


@dataclass(frozen=True)
class Setting:
    """A task: what its samples look like, and a model that fits them."""

    model: Callable[[], nn.Module]
    data: Callable[[int, bool], Batch]
    """(samples, whether they are all of one kind: one label, one length, nothing ignored) -> batch."""


# Models


def mlp(outputs: int = CLASSES, inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def mlp_to(outputs: int) -> Callable[[], nn.Module]:
    return lambda: mlp(outputs)


def squashed() -> nn.Module:
    return nn.Sequential(mlp(), nn.Sigmoid())


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, CLASSES, 1))


def embedder() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


# Data


def lengths(samples: int, same: bool, longest: int = TIME, shortest: int = 1) -> torch.Tensor:
    return torch.full((samples,), longest) if same else torch.randint(shortest, longest + 1, (samples,))


def mask_of(counts: torch.Tensor, longest: int = TIME) -> torch.Tensor:
    return torch.arange(longest) < counts[:, None]


def labels(samples: int, same: bool, classes: int = CLASSES) -> torch.Tensor:
    return torch.ones(samples, dtype=torch.long) if same else torch.randint(0, classes, (samples,))


def features(samples: int) -> torch.Tensor:
    return torch.randn(samples, FEATURES)


def class_data(samples: int, same: bool) -> Batch:
    return features(samples), labels(samples, same)


def ignored_data(samples: int, same: bool) -> Batch:
    targets = labels(samples, same)
    if not same:
        targets[torch.rand(samples) < 0.4] = IGNORED
        targets[-1] = 2
    return features(samples), targets


def regression_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, CLASSES)


def scalar_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples)


def column_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, 1)


def positive_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.rand(samples, CLASSES) + 0.1


def binary_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.ones(samples, CLASSES) if same else (torch.rand(samples, CLASSES) < 0.4).double()


def binary_scalar_data(samples: int, same: bool) -> Batch:
    targets = torch.ones(samples) if same else (torch.rand(samples) < 0.5).double()
    if not same:
        targets[-1], targets[0] = 1.0, 0.0
    return features(samples), targets


def sign_data(samples: int, same: bool) -> Batch:
    inputs, targets = binary_scalar_data(samples, same)
    return inputs, 2 * targets - 1


def distribution_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, CLASSES).softmax(-1)


def weighted_data(samples: int, same: bool) -> Batch:
    weights = torch.ones(samples) if same else torch.rand(samples) * (torch.rand(samples) < 0.8) + 1e-3
    return features(samples), labels(samples, same), weights


def masked_scalar_data(samples: int, same: bool) -> Batch:
    """Samples that may count as nothing: in some windows whole micro-batches do."""
    mask = torch.ones(samples) if same else (torch.rand(samples) < 0.6).double()
    mask[-1] = 1.0
    return features(samples), torch.randn(samples), mask


def masked_vector_data(samples: int, same: bool) -> Batch:
    mask = torch.ones(samples, CLASSES) if same else (torch.rand(samples, CLASSES) < 0.5).double()
    mask[-1] = 1.0
    return features(samples), torch.randn(samples, CLASSES), mask


def token_data(samples: int, same: bool) -> Batch:
    """Sequences, some of which have no token that counts: inputs, targets, mask."""
    counts = lengths(samples, same, shortest=0)
    counts[-1] = TIME
    mask = mask_of(counts)
    targets = torch.randint(0, CLASSES, (samples, TIME))
    return torch.randn(samples, TIME, FEATURES), targets.masked_fill(~mask, IGNORED), mask.double()


def token_pair_data(samples: int, same: bool) -> Batch:
    return token_data(samples, same)[:2]


def language_data(samples: int, same: bool) -> Batch:
    """Token ids padded with 0, and their lengths."""
    counts = lengths(samples, same)
    counts[-1] = TIME
    ids = torch.randint(1, VOCABULARY, (samples, TIME))
    return ids.masked_fill(~mask_of(counts), 0), counts


def pixel_data(samples: int, same: bool) -> Batch:
    targets = torch.randint(0, CLASSES, (samples, 4, 4))
    if not same:
        targets[torch.rand(samples, 4, 4) < torch.rand(samples, 1, 1)] = 255
        targets[-1, 0] = 1
    return torch.randn(samples, 3, 4, 4), targets


def mask_data(samples: int, same: bool) -> Batch:
    share = torch.full((samples, 1, 1, 1), 0.5) if same else torch.rand(samples, 1, 1, 1)
    return torch.randn(samples, 3, 4, 4), (torch.rand(samples, CLASSES, 4, 4) < share).double()


def image_data(samples: int, same: bool) -> Batch:
    return torch.randn(samples, 3, 4, 4), labels(samples, same)


def view_data(samples: int, same: bool) -> Batch:
    inputs = features(samples)
    return inputs, inputs + 0.3 * features(samples), labels(samples, same)


def triple_data(samples: int, same: bool) -> Batch:
    return features(samples), features(samples), features(samples)


def policy_data(samples: int, same: bool) -> Batch:
    """What a policy is trained on: observations, actions, old log-probabilities, advantages, returns."""
    return (
        features(samples), labels(samples, same), -torch.rand(samples) - 0.5, torch.randn(samples), torch.randn(samples)
    )  # fmt: skip


def speech_data(samples: int, same: bool) -> Batch:
    """Inputs, targets, input lengths and target lengths of a transcription."""
    counts = lengths(samples, same, 8, 5)
    return (
        torch.randn(samples, 8, FEATURES), torch.randint(1, CLASSES, (samples, 3)), counts, lengths(samples, same, 3)
    )  # fmt: skip


def survival_data(samples: int, same: bool) -> Batch:
    """Inputs, times, and whether the event was seen."""
    seen = torch.ones(samples) if same else (torch.rand(samples) < 0.6).double()
    seen[-1] = 1.0
    return features(samples), torch.rand(samples), seen


def group_data(samples: int, same: bool) -> Batch:
    """Inputs, targets, and the group that each sample belongs to."""
    return features(samples), labels(samples, same), labels(samples, same, 3)


PLAIN = Setting(mlp, class_data)
SOME_IGNORED = Setting(mlp, ignored_data)
REGRESSION = Setting(mlp, regression_data)
SCALAR = Setting(mlp_to(1), scalar_data)
COLUMN = Setting(mlp_to(1), column_data)
POSITIVE = Setting(mlp, positive_data)
BINARY = Setting(mlp, binary_data)
BINARY_SCALAR = Setting(mlp_to(1), binary_scalar_data)
PROBABILITIES = Setting(squashed, binary_data)
SIGNS = Setting(mlp_to(1), sign_data)
DISTRIBUTIONS = Setting(mlp, distribution_data)
WEIGHTED = Setting(mlp, weighted_data)
MASKED_SCALAR = Setting(mlp_to(1), masked_scalar_data)
MASKED = Setting(mlp, masked_vector_data)
TOKENS = Setting(mlp, token_data)
TOKEN_PAIRS = Setting(mlp, token_pair_data)
LANGUAGE = Setting(embedder, language_data)
PIXELS = Setting(convolution, pixel_data)
SEGMENTS = Setting(convolution, mask_data)
VIEWS = Setting(mlp, view_data)
TRIPLES = Setting(mlp, triple_data)
POLICY = Setting(mlp_to(CLASSES + 1), policy_data)
SPEECH = Setting(mlp, speech_data)
SURVIVAL = Setting(mlp_to(1), survival_data)
GROUPS = Setting(mlp, group_data)
