"""Contrastive and self-supervised losses, and metric learning: with pairs in the batch, and with what is beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    PLAIN,
    TRIPLES,
    VIEWS,
)

Tensor = torch.Tensor
cases = Cases("losses", "contrastive and metric")


def info_nce(one: Tensor, other: Tensor, temperature: float = 0.5) -> Tensor:
    logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(one)))


def clip(one: Tensor, other: Tensor) -> Tensor:
    return (info_nce(one, other) + info_nce(other, one)) / 2


def nt_xent(one: Tensor, other: Tensor) -> Tensor:
    z = F.normalize(torch.cat([one, other]), dim=1)
    logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    n = len(one)
    return F.cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def supervised(features: Tensor, labels: Tensor) -> Tensor:
    z = F.normalize(features, dim=1)
    logits = z @ z.T / 0.5
    others = 1 - torch.eye(len(z))
    logits = logits - logits.max(dim=1, keepdim=True).values.detach()
    log_probabilities = logits - (logits.exp() * others).sum(1, keepdim=True).add(1e-9).log()
    positives = (labels[:, None] == labels).double() * others
    return -((positives * log_probabilities).sum(1) / positives.sum(1).clamp(min=1)).mean()


def sigmoid_pairs(one: Tensor, other: Tensor) -> Tensor:
    logits = F.normalize(one, dim=1) @ F.normalize(other, dim=1).T * 5
    return -F.logsigmoid(logits * (2 * torch.eye(len(one)) - 1)).sum() / len(one)


def barlow(one: Tensor, other: Tensor) -> Tensor:
    one, other = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-3) for z in (one, other))
    c = one.T @ other / len(one)
    return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()


def vicreg(one: Tensor, other: Tensor) -> Tensor:
    loss = F.mse_loss(one, other)
    for z in (one, other):
        z = z - z.mean(0)
        covariance = z.T @ z / max(len(z) - 1, 1)
        loss = loss + F.relu(1 - (z.var(0, unbiased=False) + 1e-4).sqrt()).mean()
        loss = loss + (covariance - torch.diag(covariance.diagonal())).square().sum() / CLASSES
    return loss


def batch_hard(features: Tensor, labels: Tensor) -> Tensor:
    distances = torch.cdist(features, features + 1e-4)
    same = labels[:, None] == labels
    furthest = (distances * same).amax(1)
    nearest = distances.masked_fill(same, 1e3).amin(1)
    return F.relu(furthest - nearest + 0.3).mean() + 1e-2 * furthest.mean()


def views(function: Any) -> Any:
    return lambda m, b: function(m(b[0]), m(b[1]))


cases.step("infonce", VIEWS, views(info_nce))
cases.step("infonce, stopped keys", VIEWS, lambda m, b: info_nce(m(b[0]), m(b[1]).detach()))
cases.step("clip", VIEWS, views(clip))
cases.step("nt-xent", VIEWS, views(nt_xent))
cases.loss("supervised contrastive", PLAIN, supervised)
cases.step("sigmoid pairs", VIEWS, views(sigmoid_pairs))
cases.step("barlow twins", VIEWS, views(barlow))
cases.step("vicreg", VIEWS, views(vicreg))
cases.loss("batch-hard triplets", PLAIN, batch_hard)
cases.step("cosine of views, stopped", VIEWS, lambda m, b: -F.cosine_similarity(m(b[0]), m(b[1]).detach()).mean())
cases.step("byol", VIEWS, lambda m, b: 2 - 2 * (F.normalize(m(b[0])) * F.normalize(m(b[1]).detach())).sum(1).mean())
cases.step("alignment", VIEWS, lambda m, b: (F.normalize(m(b[0])) - F.normalize(m(b[1]))).norm(dim=1).pow(2).mean())
cases.step(
    "alignment and uniformity",
    VIEWS,
    lambda m, b: (
        (F.normalize(m(b[0])) - F.normalize(m(b[1]))).norm(dim=1).pow(2).mean()
        + (torch.cdist(F.normalize(m(b[0])), F.normalize(m(b[0]))).square() * -2).exp().mean().log()
    ),
)
cases.step(
    "infonce with one negative of its own",
    TRIPLES,
    lambda m, b: F.cross_entropy(
        torch.stack([(m(b[0]) * m(b[1])).sum(1), (m(b[0]) * m(b[2])).sum(1)], 1),
        torch.zeros(len(b[0]), dtype=torch.long),
    ),
)
cases.step(
    "contrastive of labelled pairs",
    VIEWS,
    lambda m, b: torch.where(
        b[2] % 2 == 0, (m(b[0]) - m(b[1])).square().sum(1), F.relu(1 - (m(b[0]) - m(b[1])).norm(dim=1)).square()
    ).mean(),
)
cases.step(
    "n pairs",
    VIEWS,
    lambda m, b: F.cross_entropy(
        m(b[0]) @ m(b[1]).T, (b[2][:, None] == b[2]).double() / (b[2][:, None] == b[2]).sum(1)
    ),
)
cases.step(
    "preferences",
    TRIPLES,
    lambda m, b: -F.logsigmoid(m(b[0])[:, 0] - m(b[1])[:, 0]).mean(),
)
cases.step(
    "kto: a reference of the batch",
    TRIPLES,
    lambda m, b: (1 - torch.sigmoid(m(b[0])[:, 0] - (m(b[1]) - m(b[2])).mean().clamp(min=0).detach())).mean(),
)


class Prototypes(nn.Module):
    """Centres of classes, which are the means of the batch's features."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        hot = F.one_hot(labels, CLASSES).double()
        centres = hot.T @ features / hot.sum(0).clamp(min=1)[:, None]
        return F.cross_entropy(-torch.cdist(features, centres + 1e-4), labels)


cases.loss("prototypes of the batch", PLAIN, Prototypes())


class Queue:
    """Past keys: those of the last calls are negatives of the next."""

    def __init__(self) -> None:
        self.keys = F.normalize(torch.randn(8, CLASSES), dim=1)

    def add(self, keys: Tensor) -> None:
        self.keys = torch.cat([keys, self.keys])[:8]


def with_queue(queue: Queue) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(model(view), dim=1) for view in batch[:2])
        logits = torch.cat([(one * other.detach()).sum(1, keepdim=True), one @ queue.keys.T], 1) / 0.5
        queue.add(other.detach())
        return F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))

    return step


def with_fixed_bank(queue: Queue) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        one, other = (F.normalize(model(view), dim=1) for view in batch[:2])
        logits = torch.cat([(one * other).sum(1, keepdim=True), one @ queue.keys.T], 1) / 0.5
        return F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))

    return step


cases.kept("moco: a queue of keys", VIEWS, Queue, with_queue)
cases.kept("a bank of keys that stays", VIEWS, Queue, with_fixed_bank)


class Centre:
    """A running mean of the teacher's outputs."""

    def __init__(self) -> None:
        self.value = torch.zeros(CLASSES)


def dino(centre: Centre) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        student, teacher = model(batch[0]), model(batch[1]).detach()
        loss = -(((teacher - centre.value) / 0.5).softmax(1) * student.log_softmax(1)).sum(1).mean()
        centre.value = 0.9 * centre.value + 0.1 * teacher.mean(0)
        return loss

    return step


cases.kept("dino: a running centre", VIEWS, Centre, dino)
