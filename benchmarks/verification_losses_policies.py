"""Losses of reinforcement learning and of generative models."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    POLICY,
    REGRESSION,
    TRIPLES,
    Setting,
    mlp,
    regression_data,
)

Tensor = torch.Tensor
cases = Cases("losses", "policies and generators")


def chosen(outputs: Tensor, actions: Tensor) -> Tensor:
    return outputs[:, :CLASSES].log_softmax(1).gather(1, actions[:, None])[:, 0]


def standardised(advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)


def ppo(outputs: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
    ratio = (chosen(outputs, actions) - old).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    logits = outputs[:, :CLASSES]
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    return policy + 0.5 * F.mse_loss(outputs[:, CLASSES], returns) - 0.01 * entropy


cases.loss("ppo", POLICY, ppo)
cases.loss("ppo, advantages standardised", POLICY, lambda o, a, old, d, r: ppo(o, a, old, standardised(d), r))
cases.loss("ppo, values standardised", POLICY, lambda o, a, old, d, r: ppo(o, a, old, d, standardised(r)))
cases.loss("reinforce", POLICY, lambda o, a, old, d, r: -(chosen(o, a) * r).mean())
cases.loss("reinforce, sum", POLICY, lambda o, a, old, d, r: -(chosen(o, a) * r).sum())
cases.loss(
    "reinforce, a baseline of the batch", POLICY, lambda o, a, old, d, r: -(chosen(o, a) * (r - r.mean())).mean()
)
cases.loss(
    "actor and critic",
    POLICY,
    lambda o, a, old, d, r: (
        -(chosen(o, a) * (r - o[:, CLASSES].detach())).mean() + 0.5 * (r - o[:, CLASSES]).pow(2).mean()
    ),
)
cases.loss(
    "actor, advantages / their deviation",
    POLICY,
    lambda o, a, old, d, r: -(chosen(o, a) * d / (d.std(unbiased=False) + 1e-6)).mean(),
)
cases.loss(
    "importance weights, normalised",
    POLICY,
    lambda o, a, old, d, r: -((w := (chosen(o, a) - old).exp()) / w.sum() * r).sum(),
)
cases.loss("importance weights", POLICY, lambda o, a, old, d, r: -((chosen(o, a) - old).exp() * r).mean())
cases.loss(
    "advantage-weighted, softmax of the batch", POLICY, lambda o, a, old, d, r: -(chosen(o, a) * d.softmax(0)).sum()
)
cases.loss("advantage-weighted, exp", POLICY, lambda o, a, old, d, r: -(chosen(o, a) * d.exp().clamp(max=5)).mean())
cases.loss(
    "td error",
    POLICY,
    lambda o, a, old, d, r: F.smooth_l1_loss(o.gather(1, a[:, None])[:, 0], r + 0.9 * o.amax(1).detach()),
)
cases.loss(
    "conservative q",
    POLICY,
    lambda o, a, old, d, r: (
        F.mse_loss(o.gather(1, a[:, None])[:, 0], r) + (o.logsumexp(1) - o.gather(1, a[:, None])[:, 0]).mean()
    ),
)
cases.loss(
    "quantile regression",
    POLICY,
    lambda o, a, old, d, r: (
        (
            (torch.linspace(0.1, 0.9, CLASSES + 1) - ((r[:, None] - o) < 0).double()).abs()
            * F.huber_loss(o, r[:, None].expand_as(o), reduction="none")
        )
        .sum(1)
        .mean()
    ),
)
cases.loss(
    "trust: kl to the old, squared",
    POLICY,
    lambda o, a, old, d, r: -(chosen(o, a) * d).mean() + (old - chosen(o, a)).mean() ** 2,
)
cases.loss(
    "group-relative advantages",
    POLICY,
    lambda o, a, old, d, r: -((chosen(o, a) - old).exp() * standardised(r).clamp(-2, 2)).mean(),
)
cases.loss(
    "values clipped",
    POLICY,
    lambda o, a, old, d, r: torch.max(
        (o[:, CLASSES] - r).square(), (o[:, CLASSES].clamp(-0.2, 0.2) - r).square()
    ).mean(),
)

TWICE = Setting(lambda: mlp(2 * CLASSES), regression_data)


def beta_vae(outputs: Tensor, targets: Tensor, reduce: str) -> Tensor:
    mean, log_variance = outputs.chunk(2, 1)
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
    off = (mean - targets).square()
    if reduce == "sum":
        return off.sum() + kl.sum()
    if reduce == "mean and sum":
        return off.mean() + 0.1 * kl.sum()
    if reduce == "sum / n":
        return (off.sum() + 0.5 * kl.sum()) / len(mean)
    return off.mean() + 0.1 * kl.sum(1).mean()


for how in ("sum", "mean and sum", "sum / n", "mean"):
    cases.loss(f"reconstruction and kl, {how}", TWICE, lambda o, y, how=how: beta_vae(o, y, how))
cases.loss(
    "gaussian nll by hand",
    TWICE,
    lambda o, y: 0.5 * (o[:, CLASSES:] + (y - o[:, :CLASSES]).square() / o[:, CLASSES:].exp()).mean(),
)
cases.loss(
    "kl of the aggregate", TWICE, lambda o, y: F.mse_loss(o[:, :CLASSES], y) + o[:, CLASSES:].mean(0).square().sum()
)
cases.loss(
    "a distribution's log_prob",
    TWICE,
    lambda o, y: (
        -torch.distributions.Normal(o[:, :CLASSES], F.softplus(o[:, CLASSES:]) + 0.1).log_prob(y).sum(-1).mean()
    ),
)
cases.loss(
    "a distribution's log_prob, sum",
    TWICE,
    lambda o, y: -torch.distributions.Normal(o[:, :CLASSES], F.softplus(o[:, CLASSES:]) + 0.1).log_prob(y).sum(),
)
cases.loss(
    "a mixture of gaussians",
    TWICE,
    lambda o, y: (
        -torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=o[:, :4]), torch.distributions.Normal(o[:, 4:], 1.0)
        )
        .log_prob(y[:, 0])
        .mean()
    ),
)
cases.loss(
    "kl of distributions",
    TWICE,
    lambda o, y: torch.distributions.kl_divergence(
        torch.distributions.Normal(o[:, :CLASSES], o[:, CLASSES:].exp()), torch.distributions.Normal(y, 1.0)
    ).mean(),
)
cases.loss(
    "energy matched to the batch's",
    REGRESSION,
    lambda o, y: (o.square().sum(1).mean() - y.square().sum(1).mean()).square(),
)
cases.loss("score matching", REGRESSION, lambda o, y: 0.5 * (o + y).square().sum(1).mean())
cases.step("generator, not saturating", TRIPLES, lambda m, b: F.softplus(-m(b[0])[:, 0]).mean())
cases.step(
    "discriminator, bce",
    TRIPLES,
    lambda m, b: (
        F.binary_cross_entropy_with_logits(m(b[0])[:, :1], torch.ones(len(b[0]), 1))
        + F.binary_cross_entropy_with_logits(m(b[1])[:, :1], torch.zeros(len(b[1]), 1))
    ),
)
cases.step(
    "discriminator, real and fake in one batch",
    TRIPLES,
    lambda m, b: F.binary_cross_entropy_with_logits(
        m(torch.cat(b[:2]))[:, 0], torch.cat([torch.ones(len(b[0])), torch.zeros(len(b[1]))])
    ),
)
cases.step("feature matching", TRIPLES, lambda m, b: (m(b[0]).mean(0) - m(b[1]).mean(0).detach()).abs().mean())
