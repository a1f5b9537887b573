"""Loops whose loss or model becomes another one after some windows, and texts whose padding a model sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.step.others.harness import Loop

BEGINS = 2
"""The number of the window in which it begins, from 0."""


class Phased(nn.Module):
    """A model that is told in which phase training is, as schedules of users' own do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=False).eval(), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.is_late = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.body(x)
        return z, self.head(z)

    def train(self, mode: bool = True) -> Phased:
        """Keep BatchNorm frozen until told otherwise, as fine-tuning does."""
        super().train(mode)
        self.body[1].eval()
        return self


def pairs(z: torch.Tensor) -> torch.Tensor:
    """Return a contrastive term: each sample is to be told from all others of its batch."""
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


def uniformity(z: torch.Tensor) -> torch.Tensor:
    return torch.pdist(F.normalize(z, dim=1)).pow(2).mul(-2).exp().mean().log()


def masked(loss: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (loss * (y == 0)).sum() / (y == 0).sum()


def moved(z: torch.Tensor) -> torch.Tensor:
    """Return the correlation of features over the batch, by operations that are no product of all with all."""
    return (z * z.roll(1, 1)).mean(0).pow(2).sum()


LATER: dict[str, Any] = {
    "contrast": lambda z, loss, y: loss.mean() + pairs(z),
    "uniformity": lambda z, loss, y: loss.mean() + 0.1 * uniformity(z),
    "moments": lambda z, loss, y: loss.mean() + moved(z),
    "a masked mean": lambda z, loss, y: loss.mean() + masked(loss, y),
    "a masked mean instead": lambda z, loss, y: masked(loss, y),
    "a sum instead": lambda z, loss, y: loss.sum(),
    "batch normalisation": None,
}
"""The loss of the later windows: (features, each sample's loss, classes) -> loss; None where the model changes."""


def loop(name: str, through: Any) -> Loop:
    """Return a loop of five windows whose loss is a plain mean in the first ones."""
    torch.manual_seed(0)
    model = Phased().double()
    late = LATER[name]

    def before(window: int) -> None:
        model.is_late = window >= BEGINS
        if late is None and model.is_late:
            model.body[1].train()

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        z, logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="none")
        if model.is_late and late is not None:
            return late(z, loss, y)  # type: ignore[no-any-return]
        return loss.mean()

    data = (torch.randn(60, 6, dtype=torch.double), torch.randint(0, 3, (60,)))
    return Loop(model, data, window=12, micro_batch=4, training_step=training_step, before=before, through=through)


class Texts(torch.utils.data.Dataset[Any]):
    """Rows of tokens of very different lengths, each with a class."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(1, 9, (num_samples,), generator=generator).tolist()
        self.rows = [torch.randint(1, 9, (length,), generator=generator) for length in lengths]
        self.labels = torch.randint(0, 3, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index], self.labels[index]


def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows to the longest of them with zeros, which are no token."""
    rows, labels = zip(*samples, strict=True)
    return pad_sequence(list(rows), batch_first=True), torch.stack(labels)


class Reader(nn.Module):
    """Reads a text as the mean of its tokens, or by attention; with padding left out or not."""

    def __init__(self, attends: bool, masks: bool) -> None:
        super().__init__()
        self.attends, self.masks = attends, masks
        self.embed, self.query, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, inside = self.embed(tokens), (tokens != 0) | (not self.masks)
        if self.attends:
            scores = self.query(x) @ x.transpose(1, 2)
            x = scores.masked_fill(~inside[:, None], float("-inf")).softmax(-1) @ x
        pooled = (x * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        logits: torch.Tensor = self.head(pooled)
        return logits


def texts(attends: bool, masks: bool) -> Loop:
    """Return a classifier of texts that are padded to the longest of their micro-batch."""
    torch.manual_seed(0)
    return Loop(
        Reader(attends, masks).double(), Texts(36), window=12, micro_batch=4, collate_fn=collate,
        training_step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip
