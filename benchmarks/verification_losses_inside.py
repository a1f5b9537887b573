"""Losses with more inside than operations on outputs: fused and chunked ones, other models, autograd, writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    IGNORED,
    MASKED_SCALAR,
    PIXELS,
    PLAIN,
    REGRESSION,
    SOME_IGNORED,
    TOKEN_PAIRS,
    VIEWS,
    Batch,
    Setting,
    masked_scalar_data,
    mlp,
    pixel_data,
)

Tensor = torch.Tensor
cases = Cases("losses", "inside")


class WithHead(nn.Module):
    """A body whose head the loss applies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()), nn.Linear(8, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Tasks(nn.Module):
    """Two heads, and a learned log-variance for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.label = mlp(8), nn.Linear(8, 1), nn.Linear(8, 3)
        self.s = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.value(h)[:, 0], self.label(h)


HEADED = Setting(WithHead, SOME_IGNORED.data)
TASKS = Setting(Tasks, masked_scalar_data)


def fused(model: Any, batch: Batch) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(model(batch[0]), model.head.weight, batch[1], options=options)


def in_chunks(model: Any, batch: Batch) -> Tensor:
    hidden, targets = model(batch[0]), batch[1]
    parts = zip(hidden.split(2), targets.split(2), strict=True)
    losses = [F.cross_entropy(model.head(h), y, reduction="sum", ignore_index=IGNORED) for h, y in parts]
    return torch.stack(losses).sum() / (targets != IGNORED).sum()


def in_checkpointed_chunks(model: Any, batch: Batch) -> Tensor:
    def part(h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.head(h), y, reduction="sum", ignore_index=IGNORED)

    parts = zip(model(batch[0]).split(2), batch[1].split(2), strict=True)
    total = sum(checkpoint(part, h, y, use_reentrant=False) for h, y in parts)
    return total / (batch[1] != IGNORED).sum().clamp(min=1)


cases.step("cross entropy fused with its head, in chunks", HEADED, fused)
cases.step("cross entropy in chunks of two", HEADED, in_chunks)
cases.step("cross entropy in checkpointed chunks", HEADED, in_checkpointed_chunks)


def weighted_tasks(model: Any, batch: Batch) -> Any:
    x, target, mask = batch
    value, label = model(x)
    there = mask > 0
    loss = (-model.s[1]).exp() * F.cross_entropy(label, target.abs().long() % 3) + model.s[1]
    if there.any():
        loss = loss + (-model.s[0]).exp() * (value[there] - target[there]).square().mean() + model.s[0]
    return loss


cases.step("learned weights of tasks that lack labels", TASKS, weighted_tasks)
cases.loss(
    "a mean that is expanded to the samples",
    SOME_IGNORED,
    lambda o, y: F.cross_entropy(o, y) + 0.5 * o.square().mean().expand(len(o)).mean(),
)
cases.loss(
    "a masked mean beside one of all",
    MASKED_SCALAR,
    lambda o, y, m: ((o[:, 0] - y).square() * m).sum() / m.sum().clamp(min=1) + o.square().mean(),
)


def by_index(outputs: Tensor, targets: Tensor) -> Tensor:
    table = torch.zeros(CLASSES)
    table = table.index_add(0, targets, (outputs.square().sum(1)).to(table.dtype))
    counts = torch.bincount(targets, minlength=CLASSES).clamp(min=1)
    return (table / counts).mean()


def overwriting(outputs: Tensor, targets: Tensor) -> Tensor:
    outputs = outputs.clone()
    outputs[targets == 1] = 0.5 * outputs[targets == 1]
    return outputs.square().sum(1).sqrt().mean()


def mutating(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x.mul_(0.5)), y)


cases.loss("written into a table of classes", PLAIN, by_index)
cases.loss("outputs that are overwritten by index", PLAIN, overwriting)
cases.step("a batch that is scaled in place", PLAIN, lambda m, b: mutating(m, [b[0].clone(), b[1]]))


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].detach().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + (slope.norm(dim=1) - 1).square().mean()


def inner_step(model: nn.Module, batch: Batch) -> Tensor:
    parameters = dict(model.named_parameters())
    loss = F.cross_entropy(functional_call(model, parameters, (batch[0],)), batch[1])
    slopes = torch.autograd.grad(loss, tuple(parameters.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), slopes, strict=True)}
    return F.cross_entropy(functional_call(model, fast, (batch[0] * 0.9,)), batch[1])


cases.step("a gradient penalty of each sample", PLAIN, gradient_penalty)
cases.step("a step of gradient descent inside", PLAIN, inner_step)


def slopes_of_each(model: nn.Module, batch: Batch) -> Tensor:
    parameters = dict(model.named_parameters())

    def energy(x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(batch[0]).square().sum(1).sqrt().mean()


cases.step("a gradient of each sample by torch.func", PLAIN, slopes_of_each)
cases.step(
    "a model called twice, its outputs compared",
    VIEWS,
    lambda m, b: F.cross_entropy(m(b[0]) @ m(b[1]).T, torch.arange(len(b[0]))),
)
cases.step("a model called on its own outputs", Setting(lambda: mlp(FEATURES), PLAIN.data), lambda m, b: (
    (m(m(b[0])) - b[0]).square().mean().sqrt()
))  # fmt: skip


def teacher() -> nn.Module:
    return mlp().requires_grad_(False)


cases.kept(
    "a teacher inside",
    PLAIN,
    teacher,
    lambda kept: (
        lambda m, b: (
            F.kl_div(m(b[0]).log_softmax(1), kept(b[0]).softmax(1), reduction="batchmean")
            + 0.1 * F.cross_entropy(m(b[0]), b[1])
        )
    ),
)
cases.kept(
    "a critic inside, of the batch's mean",
    REGRESSION,
    lambda: mlp(1, CLASSES).requires_grad_(False),
    lambda kept: lambda m, b: kept(m(b[0])).mean().exp() + F.mse_loss(m(b[0]), b[1]),
)
cases.kept(
    "features of a frozen net inside",
    Setting(lambda: nn.Conv2d(3, 3, 3, padding=1), pixel_data),
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()).requires_grad_(False),
    lambda kept: lambda m, b: (kept(m(b[0])) - kept(b[0])).square().mean().sqrt(),
)
cases.step(
    "a list of targets, one loss for each",
    PIXELS,
    lambda m, b: torch.stack([F.cross_entropy(o[None], y[None], ignore_index=255, reduction="sum") / 16
                              for o, y in zip(m(b[0]), list(b[1]), strict=True)]).mean(),
)  # fmt: skip
cases.step(
    "a compiled part of the loss",
    TOKEN_PAIRS,
    lambda m, b: (
        torch.compile(lambda o: o.square().mean((1, 2)), backend="eager")(m(b[0])).sqrt().mean()
        + F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())
    ),
)


def ragged(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch[0])
    counts = (batch[1] != IGNORED).sum(1)
    parts = [F.cross_entropy(o[:n], y[:n]) for o, y, n in zip(outputs, batch[1], counts.tolist(), strict=True) if n]
    return torch.stack(parts).mean()


cases.step("a mean of sequences that have any token", TOKEN_PAIRS, ragged)
