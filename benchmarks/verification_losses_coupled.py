"""Losses in which samples meet: statistics, ranks, quantiles, mining, correlations, distances, balances."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    BINARY_SCALAR,
    CLASSES,
    PLAIN,
    REGRESSION,
    SCALAR,
    SURVIVAL,
    TRIPLES,
    VIEWS,
)

Tensor = torch.Tensor
cases = Cases("losses", "samples meet")


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


cases.loss("hardest half", PLAIN, lambda o, y: each(o, y).topk(max(len(y) // 2, 1)).values.mean())
cases.loss(
    "hardest quarter, sum / n",
    PLAIN,
    lambda o, y: each(o, y).sort(descending=True).values[: max(len(y) // 4, 1)].sum() / len(y),
)
cases.loss(
    "above a threshold, mean",
    PLAIN,
    lambda o, y: each(o, y)[each(o, y) > 1.2].mean() if (each(o, y) > 1.2).any() else each(o, y).mean(),
)
cases.loss("above a threshold, / n", PLAIN, lambda o, y: (each(o, y) * (each(o, y) > 1.2)).mean())
cases.loss("above the mean", PLAIN, lambda o, y: (each(o, y) * (each(o, y) > each(o, y).mean())).mean())
cases.loss(
    "below a quantile of the batch",
    PLAIN,
    lambda o, y: each(o, y)[each(o, y) <= each(o, y).detach().quantile(0.8)].mean(),
)
cases.loss(
    "trimmed: without the largest",
    PLAIN,
    lambda o, y: each(o, y).sort().values[:-1].mean() if len(y) > 1 else each(o, y).mean(),
)
cases.loss(
    "conditional value at risk", SCALAR, lambda o, y: (o[:, 0] - y).abs().topk(max(int(0.3 * len(y)), 1)).values.mean()
)
cases.loss(
    "weights softmax of detached losses", PLAIN, lambda o, y: (each(o, y) * each(o, y).detach().softmax(0)).sum()
)
cases.loss(
    "weights of detached losses / mean",
    PLAIN,
    lambda o, y: (each(o, y) * (each(o, y).detach() / each(o, y).detach().mean())).mean(),
)
cases.loss("weights of detached losses", PLAIN, lambda o, y: (each(o, y) * torch.tanh(each(o, y).detach())).mean())
cases.loss(
    "targets standardised by the batch",
    SCALAR,
    lambda o, y: F.mse_loss(o[:, 0], (y - y.mean()) / (y.std(unbiased=False) + 1e-3)),
)
cases.loss("targets less their mean", SCALAR, lambda o, y: F.mse_loss(o[:, 0], y - y.mean()))
cases.loss("targets scaled to the largest", SCALAR, lambda o, y: F.mse_loss(o[:, 0], y / y.abs().max()))
cases.loss("outputs less their mean", REGRESSION, lambda o, y: F.mse_loss(o - o.mean(0), y))
cases.loss("outputs less their detached mean", REGRESSION, lambda o, y: F.mse_loss(o - o.detach().mean(0), y))
cases.loss("outputs less the mean of all targets", REGRESSION, lambda o, y: F.mse_loss(o, y - y.mean(0, keepdim=True)))
cases.loss(
    "outputs less a mean of their own features", REGRESSION, lambda o, y: F.mse_loss(o - o.mean(1, keepdim=True), y)
)
cases.loss("softmax over the batch", PLAIN, lambda o, y: -o.log_softmax(0)[torch.arange(len(y)), y].mean())
cases.loss(
    "softmax over the batch and classes",
    PLAIN,
    lambda o, y: -o.flatten().log_softmax(0).view_as(o)[torch.arange(len(y)), y].mean(),
)
cases.loss(
    "rank over the batch", SCALAR, lambda o, y: F.mse_loss(torch.sigmoid(o - o.T).sum(1), y.argsort().argsort() + 1.0)
)
cases.loss("ranks of targets", SCALAR, lambda o, y: F.mse_loss(o[:, 0], y.argsort().argsort() / len(y)))
cases.loss("listwise", SCALAR, lambda o, y: F.kl_div(o[:, 0].log_softmax(0), y.softmax(0), reduction="sum"))
cases.loss("pairs in order, all", SCALAR, lambda o, y: F.softplus(-(o - o.T) * (y[:, None] - y).sign()).mean())
cases.loss(
    "neighbours in order",
    SCALAR,
    lambda o, y: F.relu(0.1 - (o[1:, 0] - o[:-1, 0]) * (y[1:] - y[:-1]).sign()).sum() / max(len(y) - 1, 1),
)
cases.loss(
    "smooth from sample to sample", REGRESSION, lambda o, y: F.mse_loss(o, y) + 0.1 * (o[1:] - o[:-1]).square().sum()
)
cases.loss(
    "area under the curve",
    BINARY_SCALAR,
    lambda o, y: F.softplus(-(o[y > 0] - o[y < 1].T)).sum() / ((y > 0).sum() * (y < 1).sum()).clamp(min=1),
)
cases.loss("pearson", SCALAR, lambda o, y: 1 - F.cosine_similarity(o[:, 0] - o.mean(), y - y.mean(), dim=0))
cases.loss(
    "pearson of features, mean of samples",
    REGRESSION,
    lambda o, y: (1 - F.cosine_similarity(o - o.mean(1, keepdim=True), y - y.mean(1, keepdim=True))).mean(),
)
cases.loss("cosine over the batch", SCALAR, lambda o, y: 1 - F.cosine_similarity(o[:, 0], y, dim=0))
cases.loss(
    "concordance",
    SCALAR,
    lambda o, y: (
        -2
        * ((o[:, 0] - o.mean()) * (y - y.mean())).mean()
        / (o.var(unbiased=False) + y.var(unbiased=False) + (o.mean() - y.mean()).square() + 1e-6)
    ),
)
cases.loss("r squared", SCALAR, lambda o, y: (o[:, 0] - y).square().sum() / ((y - y.mean()).square().sum() + 1e-2))
cases.loss(
    "cox",
    SURVIVAL,
    lambda o, t, s: (
        -((o[:, 0] - torch.stack([o[t >= at, 0].logsumexp(0) for at in t])) * s).sum() / s.sum().clamp(min=1)
    ),
)
cases.loss("survival, exponential", SURVIVAL, lambda o, t, s: (o[:, 0].exp() * t - s * o[:, 0]).mean())
cases.loss(
    "survival, / events", SURVIVAL, lambda o, t, s: (o[:, 0].exp() * t - s * o[:, 0]).sum() / s.sum().clamp(min=1)
)
cases.loss(
    "covariance decorrelated",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) + ((o - o.mean(0)).T @ (o - o.mean(0)) / len(o)).square().sum(),
)
cases.loss("gram of features", REGRESSION, lambda o, y: F.mse_loss(o.T @ o / len(o), y.T @ y / len(y)))
cases.loss("gram of features, a sum", REGRESSION, lambda o, y: (o.T @ y).square().sum())
cases.loss("bilinear, a sum", REGRESSION, lambda o, y: torch.trace(o.T @ y))
cases.loss(
    "singular values of outputs", REGRESSION, lambda o, y: F.mse_loss(o, y) + 0.1 * torch.linalg.svdvals(o).sum()
)
cases.loss(
    "log determinant",
    REGRESSION,
    lambda o, y: F.mse_loss(o, y) - 0.1 * torch.logdet(torch.eye(CLASSES) + o.T @ o / len(o)),
)
cases.loss(
    "nuclear norm / n",
    PLAIN,
    lambda o, y: F.cross_entropy(o, y) - 0.1 * torch.linalg.matrix_norm(o.softmax(1), "nuc") / len(o),
)
cases.loss("frobenius norm", REGRESSION, lambda o, y: torch.linalg.matrix_norm(o - y))
cases.loss("distances between all", REGRESSION, lambda o, y: (torch.cdist(o, o) - torch.cdist(y, y)).square().mean())
cases.loss("distances to fixed points", REGRESSION, lambda o, y: torch.cdist(o, torch.eye(CLASSES)).amin(1).mean())
cases.loss("nearest target in the batch", REGRESSION, lambda o, y: torch.cdist(o, y).amin(1).mean())
cases.loss("chamfer", REGRESSION, lambda o, y: torch.cdist(o, y).amin(1).mean() + torch.cdist(o, y).amin(0).mean())
cases.loss("sorted against sorted", SCALAR, lambda o, y: F.mse_loss(o[:, 0].sort().values, y.sort().values))
cases.loss(
    "mean discrepancy of kernels",
    REGRESSION,
    lambda o, y: (
        torch.exp(-torch.cdist(o, o)).mean()
        - 2 * torch.exp(-torch.cdist(o, y)).mean()
        + torch.exp(-torch.cdist(y, y)).mean()
    ),
)
cases.loss("means matched", REGRESSION, lambda o, y: (o.mean(0) - y.mean(0)).square().sum())
cases.loss("means matched, absolute", REGRESSION, lambda o, y: (o.mean() - y.mean()).abs())
cases.loss(
    "moments matched",
    REGRESSION,
    lambda o, y: F.mse_loss(o.mean(0), y.mean(0)) + F.mse_loss(o.square().mean(0), y.square().mean(0)),
)
cases.loss("neighbours of [None]", REGRESSION, lambda o, y: F.mse_loss(F.avg_pool1d(o.T[None], 3, 1, 1)[0].T, y))
cases.loss(
    "feature maps of [None]", REGRESSION, lambda o, y: F.layer_norm(o[None], o[None].shape[1:]).sub(y).square().mean()
)
cases.loss("normalised over the batch by F.normalize", REGRESSION, lambda o, y: F.mse_loss(F.normalize(o, dim=0), y))
cases.loss("normalised rows", REGRESSION, lambda o, y: F.mse_loss(F.normalize(o, dim=1), y))
cases.loss(
    "F.batch_norm of outputs",
    REGRESSION,
    lambda o, y: F.mse_loss(F.batch_norm(o, None, None, training=True) if len(o) > 1 else o, y),
)
cases.loss("F.layer_norm of outputs", REGRESSION, lambda o, y: F.mse_loss(F.layer_norm(o, (CLASSES,)), y))
cases.loss(
    "mixture of gaussians",
    REGRESSION,
    lambda o, y: -(torch.stack([-(o - y - c).square().sum(1) for c in (-1, 0, 1)]).logsumexp(0)).mean(),
)
cases.loss(
    "mixture with weights of the batch",
    REGRESSION,
    lambda o, y: -(o.softmax(1).mean(0).log() - (o - y).square()).logsumexp(1).mean(),
)
cases.loss(
    "multiple instances, the batch one bag",
    BINARY_SCALAR,
    lambda o, y: F.binary_cross_entropy_with_logits(o.logsumexp(0), y.amax(0, keepdim=True)),
)
cases.loss("label proportions", BINARY_SCALAR, lambda o, y: F.binary_cross_entropy(o.sigmoid().mean(), y.mean()))
cases.loss(
    "parity gap",
    BINARY_SCALAR,
    lambda o, y: (
        F.binary_cross_entropy_with_logits(o[:, 0], y)
        + ((o[:, 0] * y).sum() / y.sum().clamp(min=1) - (o[:, 0] * (1 - y)).sum() / (1 - y).sum().clamp(min=1)).abs()
    ),
)
cases.loss(
    "pos_weight of the batch",
    BINARY_SCALAR,
    lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y, pos_weight=(1 - y).sum() / y.sum().clamp(min=1)),
)
cases.loss(
    "balanced positives and negatives",
    BINARY_SCALAR,
    lambda o, y: (
        (F.softplus(-o[:, 0]) * y).sum() / y.sum().clamp(min=1)
        + (F.softplus(o[:, 0]) * (1 - y)).sum() / (1 - y).sum().clamp(min=1)
    ),
)
cases.loss(
    "normalised by positives",
    BINARY_SCALAR,
    lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y, reduction="sum") / y.sum().clamp(min=1),
)
cases.loss(
    "f1, soft",
    BINARY_SCALAR,
    lambda o, y: 1 - 2 * (o[:, 0].sigmoid() * y).sum() / (o[:, 0].sigmoid().sum() + y.sum() + 1e-6),
)
cases.loss(
    "even use of classes", PLAIN, lambda o, y: F.cross_entropy(o, y) + o.softmax(1).mean(0).square().sum() * CLASSES
)
cases.loss(
    "switch balance",
    PLAIN,
    lambda o, y: (
        F.cross_entropy(o, y)
        + CLASSES * (o.softmax(1).mean(0) * F.one_hot(o.argmax(1), CLASSES).double().mean(0)).sum()
    ),
)
cases.loss(
    "importance: coefficient of variation",
    PLAIN,
    lambda o, y: F.cross_entropy(o, y) + o.softmax(1).sum(0).var() / (o.softmax(1).sum(0).mean() ** 2 + 1e-6),
)
cases.loss(
    "sinkhorn assignments",
    PLAIN,
    lambda o, y: (
        -(((q := (o.detach() / 0.5).exp()) / q.sum(0) / (q / q.sum(0)).sum(1, keepdim=True)) * o.log_softmax(1))
        .sum(1)
        .mean()
    ),
)
cases.loss(
    "self-distilled: mean prediction as target",
    PLAIN,
    lambda o, y: F.kl_div(o.log_softmax(1), o.softmax(1).mean(0).detach().expand_as(o), reduction="batchmean"),
)
cases.step("swapped with the next sample", VIEWS, lambda m, b: F.mse_loss(m(b[0]), m(b[1]).roll(1, 0)))
cases.step(
    "wrong pairs by flip",
    VIEWS,
    lambda m, b: F.relu(1 + (m(b[0]) - m(b[1])).square().sum(1) - (m(b[0]) - m(b[1]).flip(0)).square().sum(1)).mean(),
)
cases.step(
    "triplets, those that matter",
    TRIPLES,
    lambda m, b: (t := F.triplet_margin_loss(*map(m, b), reduction="none")).sum() / (t > 0).sum().clamp(min=1),
)
cases.step(
    "relativistic",
    TRIPLES,
    lambda m, b: F.softplus(-(m(b[0]) - m(b[1]).mean(0))).mean() + F.softplus(m(b[1]) - m(b[0]).mean(0)).mean(),
)
cases.step(
    "hinge of a critic", TRIPLES, lambda m, b: F.relu(1 - m(b[0])[:, 0]).mean() + F.relu(1 + m(b[1])[:, 0]).mean()
)
cases.step(
    "wasserstein critic",
    TRIPLES,
    lambda m, b: m(b[1])[:, 0].mean() - m(b[0])[:, 0].mean() + 1e-2 * m(b[0])[:, 0].square().mean(),
)
cases.step(
    "least squares critic",
    TRIPLES,
    lambda m, b: 0.5 * (m(b[0])[:, 0] - 1).pow(2).mean() + 0.5 * m(b[1])[:, 0].pow(2).mean(),
)


class Adaptive(nn.Module):
    """A threshold for robust losses that is the median of the batch's residuals."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        residuals = outputs[:, 0] - targets
        scale = 1.48 * residuals.detach().abs().median() + 1e-3
        return torch.log1p((residuals / scale).square()).mean()


cases.loss("cauchy at the median of the batch", SCALAR, Adaptive())
cases.loss("cauchy at a fixed scale", SCALAR, lambda o, y: torch.log1p(((o[:, 0] - y) / 0.5).square()).mean())
