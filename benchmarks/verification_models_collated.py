"""Samples that a collate_fn makes batches of: padded, sorted, packed, masked, drawn anew and mixed.

A window's whole batch is what the function makes of all of its samples. Where it draws, nothing is comparable: what is
counted is whether anything is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import default_collate
from verification_cases import Cases, Work
from verification_tasks import (
    CLASSES,
    FEATURES,
    TIME,
    VOCABULARY,
    Batch,
    Setting,
    class_data,
    labels,
    language_data,
    mlp,
)

Tensor = torch.Tensor
cases = Cases("models", "collated")
MASK = 0
"""The token that hides another, which is the padding's too: a model that heeds the latter is told by its lengths."""


def rows(batch: Batch) -> list[Any]:
    """Return the samples as a dataset of tensors does."""
    return list(zip(*batch, strict=True))


def texts(batch: Batch) -> list[Any]:
    """Return each text's own tokens, and a label."""
    ids, counts, targets = batch
    return [(one[:count], target) for one, count, target in zip(ids, counts.tolist(), targets, strict=True)]


def text_data(samples: int, same: bool) -> Batch:
    ids, counts = language_data(samples, same)
    return ids, counts, labels(samples, same)


def collated(
    name: str,
    setting: Setting,
    split: Callable[[Batch], list[Any]],
    collate: Any,
    function: Any,
    draws: str | None = None,
) -> None:
    """Add a case: its model, the samples of a window, what makes batches of them, and a training step."""
    make = lambda: Work(  # noqa: E731
        model=setting.model(), data=setting.data, build=lambda _: function, samples=split, collate=collate
    )
    cases.add(name, make, draws)


# Texts of several lengths


def padded(samples: list[Any]) -> dict[str, Tensor]:
    ids, targets = zip(*samples, strict=True)
    counts = torch.tensor([len(one) for one in ids])
    return {"ids": pad_sequence(ids, batch_first=True), "counts": counts, "labels": torch.stack(targets)}


def padded_left(samples: list[Any]) -> dict[str, Tensor]:
    batch = padded([(ids.flip(0), target) for ids, target in samples])
    return {**batch, "ids": batch["ids"].flip(1)}


def longest_first(samples: list[Any]) -> dict[str, Tensor]:
    return padded(sorted(samples, key=lambda sample: -len(sample[0])))


def padded_to_fours(samples: list[Any]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {**batch, "ids": F.pad(batch["ids"], (0, -batch["ids"].shape[1] % 4))}


def padded_to_all(samples: list[Any]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {**batch, "ids": F.pad(batch["ids"], (0, TIME - batch["ids"].shape[1]))}


def end_to_end(samples: list[Any]) -> dict[str, Tensor]:
    ids, targets = zip(*samples, strict=True)
    counts = torch.tensor([len(one) for one in ids])
    return {"ids": torch.cat(ids)[None], "counts": counts, "labels": torch.stack(targets)}


class Texts(nn.Module):
    """Classifies texts, in one of several ways of minding what they are padded with."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, CLASSES)
        self.net = nn.GRU(6, 6, batch_first=True)

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.way == "packed":
            return self.head(self.net(pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False))[1][0])
        if self.way == "sorted":
            return self.head(self.net(pack_padded_sequence(x, counts, batch_first=True))[1][0])
        if self.way == "last token":
            return self.head(self.net(x)[0][torch.arange(len(ids)), counts - 1])
        if self.way == "last place":
            return self.head(self.net(x)[0][:, -1])
        if self.way == "segments":
            places = torch.repeat_interleave(torch.arange(len(counts)), counts)
            return self.head(torch.zeros(len(counts), 6).index_add(0, places, x[0]) / counts[:, None])
        mask = (torch.arange(ids.shape[1]) < counts[:, None])[..., None]
        if self.way == "mean of all":
            return self.head(x.mean(1))
        if self.way == "largest of all":
            return self.head(x.amax(1))
        if self.way == "largest":
            return self.head(x.masked_fill(~mask, -1e9).amax(1))
        return self.head((x * mask).sum(1) / counts[:, None])


def text_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["counts"]), batch["labels"])


TEXTS: list[tuple[str, Any, str]] = [
    ("padded", padded, "mean"),
    ("padded", padded, "largest"),
    ("padded", padded, "mean of all"),
    ("padded", padded, "largest of all"),
    ("padded", padded, "packed"),
    ("padded", padded, "last token"),
    ("padded", padded, "last place"),
    ("padded on the left", padded_left, "last place"),
    ("sorted", longest_first, "sorted"),
    ("sorted", longest_first, "mean of all"),
    ("padded to a multiple of 4", padded_to_fours, "mean"),
    ("padded to a multiple of 4", padded_to_fours, "mean of all"),
    ("padded to one length", padded_to_all, "mean of all"),
    ("end to end", end_to_end, "segments"),
]
for name, collate, way in TEXTS:
    collated(f"texts {name}: {way}", Setting(lambda way=way: Texts(way), text_data), texts, collate, text_step)


class Tokens(nn.Module):
    """Predicts tokens from themselves, their places and, in one way, the mean of their text."""

    def __init__(self, sees_padding: bool = False) -> None:
        super().__init__()
        self.sees_padding = sees_padding
        self.embed, self.places, self.head = (
            nn.Embedding(VOCABULARY, 6),
            nn.Embedding(TIME, 6),
            nn.Linear(6, VOCABULARY),
        )

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        mask = torch.ones_like(ids) if self.sees_padding else (torch.arange(ids.shape[1]) < counts[:, None])
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head((x + mean).tanh())


def token_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["counts"]).flatten(0, 1), batch["labels"].flatten())


def next_tokens(samples: list[Any]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {**batch, "labels": pad_sequence([ids for ids, _ in samples], batch_first=True, padding_value=-100)}


def masked(samples: list[Any]) -> dict[str, Tensor]:
    """Hide a third of the tokens, at least one of each text: their mean is over those alone."""
    batch = next_tokens(samples)
    chances = torch.rand(batch["ids"].shape).masked_fill(batch["labels"] == -100, 2.0)
    is_hidden = (chances < 1 / 3) | (chances == chances.amin(1, keepdim=True))
    return {
        "ids": batch["ids"].masked_fill(is_hidden, MASK), "counts": batch["counts"],
        "labels": batch["labels"].masked_fill(~is_hidden, -100),
    }  # fmt: skip


def cut_short(samples: list[Any]) -> dict[str, Tensor]:
    """Cut all texts to one length that is drawn."""
    most = int(torch.randint(2, TIME + 1, ()))
    return next_tokens([(ids[:most], target) for ids, target in samples])


def cut_each(samples: list[Any]) -> dict[str, Tensor]:
    """Cut each text to a length that is drawn."""
    return next_tokens([(ids[: int(torch.randint(2, TIME + 1, ()))], target) for ids, target in samples])


TOKENS: list[tuple[str, Any, str | None]] = [
    ("padded", next_tokens, None),
    ("hidden anew", masked, "independent"),
    ("cut to a length that is drawn", cut_short, "either"),
    ("cut to lengths that are drawn", cut_each, "independent"),
]
for name, collate, draws in TOKENS:
    collated(f"tokens {name}", Setting(Tokens, text_data), texts, collate, token_step, draws)
    together = None if draws is None else "together"
    # Of several lengths in each window, without which there is no padding to be seen.
    seeing = Setting(lambda: Tokens(sees_padding=True), lambda samples, _: text_data(samples, same=False))
    collated(f"tokens {name}, their padding seen", seeing, texts, collate, token_step, together)


# Rows of numbers


def row_step(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted_step(model: nn.Module, batch: Batch) -> Tensor:
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).mean()


def standardised(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    return (inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 0.1), targets


def each_standardised(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    return (inputs - inputs.mean(1, keepdim=True)) / (inputs.std(1, keepdim=True) + 0.1), targets


def by_frequency(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    return inputs, targets, 1 / targets.bincount(minlength=CLASSES)[targets].double()


def noisy(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    return inputs + 0.1 * torch.randn_like(inputs), targets


def noisy_together(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    return inputs + 0.1 * torch.randn(FEATURES), targets


def shuffled(samples: list[Any]) -> Batch:
    return tuple(default_collate([samples[index] for index in torch.randperm(len(samples)).tolist()]))


def mixed(samples: list[Any]) -> Batch:
    """MixUp (Zhang and others 2018), with a share that is drawn for all."""
    inputs, targets = default_collate(samples)
    share, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(inputs))
    one_hot = F.one_hot(targets, CLASSES).double()
    return share * inputs + (1 - share) * inputs[order], share * one_hot + (1 - share) * one_hot[order]


def mixed_each(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    share, order = torch.rand(len(inputs), 1), torch.randperm(len(inputs))
    one_hot = F.one_hot(targets, CLASSES).double()
    return share * inputs + (1 - share) * inputs[order], share * one_hot + (1 - share) * one_hot[order]


def mixed_with_the_next(samples: list[Any]) -> Batch:
    inputs, targets = default_collate(samples)
    one_hot = F.one_hot(targets, CLASSES).double()
    return 0.7 * inputs + 0.3 * inputs.roll(1, 0), 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)


def pasted(samples: list[Any]) -> Batch:
    """CutMix (Yun and others 2019), of features instead of places."""
    inputs, targets = default_collate(samples)
    most, order = int(torch.randint(1, FEATURES, ())), torch.randperm(len(inputs))
    one_hot = F.one_hot(targets, CLASSES).double()
    other = torch.cat([inputs[order][:, :most], inputs[:, most:]], 1)
    return other, (1 - most / FEATURES) * one_hot + most / FEATURES * one_hot[order]


ROWS: list[tuple[str, Any, Any, str | None]] = [
    ("as they are", default_collate, row_step, None),
    ("standardised by the batch", standardised, row_step, None),
    ("standardised by themselves", each_standardised, row_step, None),
    ("weighted by the batch's frequencies", by_frequency, weighted_step, None),
    ("with noise", noisy, row_step, "independent"),
    ("with noise that all share", noisy_together, row_step, "either"),
    ("in another order", shuffled, row_step, "independent"),
    ("mixed", mixed, row_step, "together"),
    ("mixed, each by its own share", mixed_each, row_step, "together"),
    ("mixed with the next one", mixed_with_the_next, row_step, None),
    ("pasted into each other", pasted, row_step, "together"),
]
for name, collate, function, draws in ROWS:
    collated(f"rows {name}", Setting(mlp, class_data), rows, collate, function, draws)
