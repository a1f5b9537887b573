"""Losses of several terms: penalties, data terms with counts of their own, learnt weights, terms that begin later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases, total
from verification_tasks import (
    CLASSES,
    FEATURES,
    MASKED_SCALAR,
    PLAIN,
    REGRESSION,
    SCALAR,
    SOME_IGNORED,
    TOKENS,
    VIEWS,
    WEIGHTED,
    mlp,
)

Tensor = torch.Tensor
cases = Cases("losses", "penalties and several terms")


def squares(model: nn.Module) -> Tensor:
    return total(p.square().sum() for p in model.parameters())


def absolutes(model: nn.Module) -> Tensor:
    return total(p.abs().sum() for p in model.parameters())


def orthogonality(model: nn.Module) -> Tensor:
    weight = model[0].weight  # type: ignore[index]
    return (weight @ weight.T - torch.eye(len(weight))).square().sum()


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


cases.step("mean and l2", PLAIN, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.05 * squares(m))
cases.step("mean and l1", PLAIN, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.05 * absolutes(m))
cases.step(
    "mean and l2 norms",
    REGRESSION,
    lambda m, b: F.mse_loss(m(b[0]), b[1]) + 0.1 * total(p.norm() for p in m.parameters()),
)
cases.step("mean and orthogonality", PLAIN, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.05 * orthogonality(m))
cases.step(
    "mean and singular values",
    PLAIN,
    lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * torch.linalg.svdvals(m[0].weight).sum(),
)
cases.step("sum and l2", PLAIN, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") + 0.5 * squares(m))
cases.step(
    "sum and l2 / n",
    PLAIN,
    lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="sum") + 0.5 * squares(m)) / len(b[1]),
)
cases.step("some ignored and l2", SOME_IGNORED, lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.05 * squares(m))
cases.step(
    "mean and l2 of the mean of parameters",
    REGRESSION,
    lambda m, b: F.mse_loss(m(b[0]), b[1]) + 0.5 * torch.cat([p.flatten() for p in m.parameters()]).square().mean(),
)
cases.step(
    "sum, no data in the second term",
    REGRESSION,
    lambda m, b: (m(b[0]) - b[1]).square().sum() + m[0].bias.square().sum(),
)
cases.loss("mean and entropy", PLAIN, lambda o, y: F.cross_entropy(o, y) - 0.1 * entropy(o))
cases.loss(
    "mean and entropy of the mean prediction",
    PLAIN,
    lambda o, y: F.cross_entropy(o, y) + 0.1 * (o.softmax(1).mean(0) * o.softmax(1).mean(0).log()).sum(),
)
cases.loss("mean and sum", REGRESSION, lambda o, y: F.mse_loss(o, y) + 0.1 * (o - y).abs().sum())
cases.loss("sum and mean of outputs", REGRESSION, lambda o, y: (o - y).square().sum() + o.abs().mean())
cases.loss("mean and the square of the mean output", REGRESSION, lambda o, y: F.mse_loss(o, y) + o.mean() ** 2)
cases.loss(
    "mean and the variance of outputs",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) - 0.1 * o.var(0).mean() if len(o) > 1 else F.mse_loss(o, y),
)
cases.loss("mean and activity", REGRESSION, lambda o, y: F.mse_loss(o, y) + 1e-2 * o.square().mean())
cases.loss("mean and the largest output", REGRESSION, lambda o, y: F.mse_loss(o, y) + 0.1 * o.abs().max())
cases.loss("ignored in one term alone", SOME_IGNORED, lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().mean())
cases.loss("ignored and sum", SOME_IGNORED, lambda o, y: F.cross_entropy(o, y) + 0.1 * o.square().sum())
cases.loss(
    "ignored, both over the same", SOME_IGNORED, lambda o, y: F.cross_entropy(o, y) + 0.1 * o[y >= 0].square().mean()
)
cases.loss("ignored times a term", SOME_IGNORED, lambda o, y: F.cross_entropy(o, y) * (1 + o.square().mean()))
cases.loss(
    "two masks",
    MASKED_SCALAR,
    lambda o, y, m: (
        ((o[:, 0] - y).square() * m).sum() / m.sum().clamp(min=1)
        + ((o[:, 0] + y).abs() * (y > 0)).sum() / (y > 0).sum().clamp(min=1)
    ),
)
cases.loss(
    "tokens and sequences",
    TOKENS,
    lambda o, y, m: F.cross_entropy(o.flatten(0, 1), y.flatten()) + F.softplus(o.mean(1)[:, 0]).mean(),
)
cases.loss(
    "tokens and z-loss over all",
    TOKENS,
    lambda o, y, m: F.cross_entropy(o.flatten(0, 1), y.flatten()) + 1e-2 * o.logsumexp(-1).square().mean(),
)
cases.loss(
    "tokens and z-loss over the same",
    TOKENS,
    lambda o, y, m: (
        F.cross_entropy(o.flatten(0, 1), y.flatten()) + 1e-2 * (o.logsumexp(-1).square() * m).sum() / m.sum()
    ),
)
cases.loss(
    "weighted and plain",
    WEIGHTED,
    lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * w).sum() / w.sum() + 0.2 * F.cross_entropy(o, y),
)
cases.loss("the larger of two means", REGRESSION, lambda o, y: torch.maximum(F.mse_loss(o, y), F.l1_loss(o, y)))
cases.loss("product of two means", REGRESSION, lambda o, y: F.mse_loss(o, y) * F.l1_loss(o, y))
cases.loss("ratio of two means", REGRESSION, lambda o, y: F.mse_loss(o, y) / (F.l1_loss(o.detach(), y) + 1e-6))
cases.loss(
    "terms scaled to be alike, detached",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) + F.l1_loss(o, y) * (F.mse_loss(o, y) / F.l1_loss(o, y)).detach(),
)
cases.loss("flooded", PLAIN, lambda o, y: (F.cross_entropy(o, y) - 1.2).abs() + 1.2)
cases.loss("clamped mean", PLAIN, lambda o, y: F.cross_entropy(o, y).clamp(max=1.5))
cases.loss("clamped samples", PLAIN, lambda o, y: F.cross_entropy(o, y, reduction="none").clamp(max=1.5).mean())
cases.loss(
    "free bits over the batch",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) + torch.clamp(0.5 * o.square().mean(0), min=0.05).sum(),
)
cases.loss(
    "free bits of samples",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) + torch.clamp(0.5 * o.square(), min=0.05).sum(1).mean(),
)
cases.loss(
    "a focal factor of the mean",
    PLAIN,
    lambda o, y: (1 - torch.exp(-F.cross_entropy(o, y))) ** 2 * F.cross_entropy(o, y),
)
cases.step(
    "consistency of two views",
    VIEWS,
    lambda m, b: F.cross_entropy(m(b[0]), b[2]) + F.mse_loss(m(b[0]).softmax(1), m(b[1]).softmax(1).detach()),
)
cases.step(
    "confident pseudo labels, / n",
    VIEWS,
    lambda m, b: (
        F.cross_entropy(m(b[0]), b[2])
        + (F.cross_entropy(m(b[1]), m(b[0]).argmax(1), reduction="none") * (m(b[0]).softmax(1).amax(1) > 0.3)).mean()
    ),
)
cases.step(
    "confident pseudo labels, / their number",
    VIEWS,
    lambda m, b: (
        F.cross_entropy(m(b[0]), b[2])
        + (F.cross_entropy(m(b[1]), m(b[0]).argmax(1), reduction="none") * (m(b[0]).softmax(1).amax(1) > 0.3)).sum()
        / (m(b[0]).softmax(1).amax(1) > 0.3).sum().clamp(min=1)
    ),
)
cases.step(
    "mean of two micro losses",
    VIEWS,
    lambda m, b: (F.cross_entropy(m(b[0]), b[2]) + F.cross_entropy(m(b[1]), b[2])) / 2,
)
cases.step(
    "two views, one below the other", VIEWS, lambda m, b: F.cross_entropy(m(torch.cat(b[:2])), torch.cat([b[2], b[2]]))
)
cases.step(
    "sum of two views / 2n",
    VIEWS,
    lambda m, b: F.cross_entropy(m(torch.cat(b[:2])), b[2].repeat(2), reduction="sum") / (2 * len(b[2])),
)


def gradient_penalty(model: nn.Module, batch: Any, reduce: Any) -> Tensor:
    inputs = batch[0].detach().requires_grad_()
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.mse_loss(outputs, batch[1]) + 0.1 * reduce(gradient)


cases.step(
    "gradient penalty, norms of samples",
    REGRESSION,
    lambda m, b: gradient_penalty(m, b, lambda g: (g.norm(dim=1) - 1).square().mean()),
)
cases.step(
    "gradient penalty, the whole norm",
    REGRESSION,
    lambda m, b: gradient_penalty(m, b, lambda g: (g.norm() - 1).square()),
)
cases.step("gradient penalty, sum", REGRESSION, lambda m, b: gradient_penalty(m, b, lambda g: g.square().sum()))


def energy_and_forces(model: nn.Module, batch: Any) -> Tensor:
    places = batch[0].detach().requires_grad_()
    energy = model(places)[:, 0]
    (forces,) = torch.autograd.grad(-energy.sum(), places, create_graph=True)
    return F.mse_loss(energy, batch[1]) + 10 * F.mse_loss(forces, torch.zeros_like(forces) + 0.1)


def forces_of_the_mean(model: nn.Module, batch: Any) -> Tensor:
    places = batch[0].detach().requires_grad_()
    energy = model(places)[:, 0]
    (forces,) = torch.autograd.grad(-energy.mean(), places, create_graph=True)
    return F.mse_loss(energy, batch[1]) + 10 * F.mse_loss(forces, torch.zeros_like(forces) + 0.1)


cases.step("energies and forces", SCALAR, energy_and_forces)
cases.step("energies, and forces of the mean energy", SCALAR, forces_of_the_mean)


class Uncertainty(nn.Module):
    """Weights of two terms, which are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        losses = torch.stack([one, other])
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


def uncertain(module: nn.Module) -> Any:
    return lambda model, batch: module(F.cross_entropy(model(batch[0]), batch[1]), model(batch[0]).square().mean())


cases.kept("learnt weights of two means", PLAIN, Uncertainty, uncertain)
cases.kept("learnt weights, one over what is not ignored", SOME_IGNORED, Uncertainty, uncertain)
cases.kept(
    "a projector that the loss alone holds",
    VIEWS,
    lambda: mlp(3, CLASSES),
    lambda head: lambda m, b: F.mse_loss(head(m(b[0])), head(m(b[1]))) + F.cross_entropy(m(b[0]), b[2]),
)
cases.kept(
    "a critic with BatchNorm that the loss alone holds",
    PLAIN,
    lambda: nn.Sequential(nn.Linear(CLASSES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
    lambda head: lambda m, b: F.cross_entropy(head(m(b[0])), b[1]),
)
cases.kept(
    "a frozen teacher that the loss holds",
    PLAIN,
    lambda: mlp().requires_grad_(False),
    lambda t: lambda m, b: F.kl_div(m(b[0]).log_softmax(1), t(b[0]).softmax(1), reduction="batchmean"),
)
cases.kept(
    "learnt centres of classes",
    PLAIN,
    lambda: nn.Embedding(CLASSES, CLASSES),
    lambda c: lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * (m(b[0]) - c(b[1])).square().sum(1).mean(),
)
cases.kept(
    "a discriminator told the mean of features",
    PLAIN,
    lambda: nn.Linear(FEATURES, CLASSES),
    lambda d: lambda m, b: F.cross_entropy(m(b[0]) + d(b[0].mean(0)), b[1]),
)


def later(function: Any, start: int) -> Any:
    """Add a term once a counter of calls has come to a number."""

    def build(state: dict[str, int]) -> Any:
        def step(model: nn.Module, batch: Any) -> Tensor:
            state["calls"] += 1
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return loss + function(model(batch[0])) if state["calls"] > start else loss

        return step

    return build


cases.kept(
    "a term over samples that begins later", PLAIN, lambda: {"calls": 0}, later(lambda o: 0.1 * o.square().mean(), 9)
)
cases.kept(
    "a term over pairs that begins later",
    PLAIN,
    lambda: {"calls": 0},
    later(lambda o: 0.1 * (o @ o.T).square().mean(), 9),
)
cases.kept("a sum that begins later", PLAIN, lambda: {"calls": 0}, later(lambda o: 0.1 * o.square().sum(), 13))


def by_windows(function: Any, start: int) -> Any:
    """Add a term once the parameters have been moved a number of times, as loops that know their epoch do."""

    def build(state: dict[str, Any]) -> Any:
        def step(model: nn.Module, batch: Any) -> Tensor:
            bias = model[0].bias.detach()  # type: ignore[index]
            if state["last"] is None or not torch.equal(state["last"], bias):
                state["last"], state["windows"] = bias.clone(), state["windows"] + 1
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return loss + function(model(batch[0])) if state["windows"] > start else loss

        return step

    return build


def no_windows() -> dict[str, Any]:
    return {"last": None, "windows": 0}


cases.kept(
    "from the third window, a term over samples", PLAIN, no_windows, by_windows(lambda o: 0.1 * o.square().mean(), 2)
)
cases.kept(
    "from the third window, a term over pairs",
    PLAIN,
    no_windows,
    by_windows(lambda o: 0.1 * (o @ o.T).square().mean(), 2),
)
cases.kept("from the third window, a sum", PLAIN, no_windows, by_windows(lambda o: 0.1 * o.square().sum(), 2))
cases.kept("from the third window, a largest", PLAIN, no_windows, by_windows(lambda o: 0.1 * o.square().max(), 2))


def annealed(state: dict[str, float]) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        state["weight"] *= 0.9
        return F.cross_entropy(model(batch[0]), batch[1]) + state["weight"] * model(batch[0]).square().mean()

    return step


def running_mean(state: dict[str, float]) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.item()
        return loss / state["mean"]

    return step


cases.kept("a weight annealed with each call", PLAIN, lambda: {"weight": 1.0}, annealed)
cases.kept("divided by a running mean of itself", REGRESSION, lambda: {"mean": 1.0}, running_mean)
