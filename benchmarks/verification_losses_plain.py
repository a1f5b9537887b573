"""Losses of torch.nn.functional, with each reduction and with reductions by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases, flat
from verification_tasks import (
    BINARY,
    BINARY_SCALAR,
    CLASSES,
    COLUMN,
    DISTRIBUTIONS,
    IGNORED,
    PIXELS,
    PLAIN,
    POSITIVE,
    PROBABILITIES,
    REGRESSION,
    SCALAR,
    SIGNS,
    SOME_IGNORED,
    SPEECH,
    TOKEN_PAIRS,
    TRIPLES,
    VIEWS,
)

cases = Cases("losses", "torch.nn.functional")
WEIGHTS = torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)

cases.loss("mse, mean", REGRESSION, F.mse_loss)
cases.loss("mse, sum", REGRESSION, lambda o, y: F.mse_loss(o, y, reduction="sum"))
cases.loss("mse, none then mean", REGRESSION, lambda o, y: F.mse_loss(o, y, reduction="none").mean())
cases.loss(
    "mse, none, sum of features, mean", REGRESSION, lambda o, y: F.mse_loss(o, y, reduction="none").sum(1).mean()
)
cases.loss("l1, mean", REGRESSION, F.l1_loss)
cases.loss("l1, sum / batch size", REGRESSION, lambda o, y: F.l1_loss(o, y, reduction="sum") / o.size(0))
cases.loss("smooth l1", REGRESSION, F.smooth_l1_loss)
cases.loss("smooth l1, beta", REGRESSION, lambda o, y: F.smooth_l1_loss(o, y, beta=0.3))
cases.loss("huber", REGRESSION, nn.HuberLoss(delta=0.5))
cases.loss("huber, sum", REGRESSION, nn.HuberLoss(delta=0.5, reduction="sum"))
cases.loss("cross entropy", PLAIN, F.cross_entropy)
cases.loss("cross entropy, sum", PLAIN, nn.CrossEntropyLoss(reduction="sum"))
cases.loss("cross entropy, none, mean", PLAIN, lambda o, y: F.cross_entropy(o, y, reduction="none").mean())
cases.loss("cross entropy, class weights", PLAIN, nn.CrossEntropyLoss(weight=WEIGHTS))
cases.loss("cross entropy, class weights, sum", PLAIN, nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"))
cases.loss(
    "cross entropy, class weights, none, mean",
    PLAIN,
    lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS, reduction="none").mean(),
)
cases.loss("cross entropy, smoothed", PLAIN, nn.CrossEntropyLoss(label_smoothing=0.2))
cases.loss("cross entropy, smoothed, weighted", PLAIN, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2))
cases.loss("cross entropy, some ignored", SOME_IGNORED, F.cross_entropy)
cases.loss("cross entropy, some ignored, weighted", SOME_IGNORED, nn.CrossEntropyLoss(weight=WEIGHTS))
cases.loss(
    "cross entropy, some ignored, smoothed, weighted",
    SOME_IGNORED,
    nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
)
cases.loss(
    "cross entropy, some ignored, none, mean over all",
    SOME_IGNORED,
    lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
)
cases.loss("cross entropy, some ignored, sum", SOME_IGNORED, nn.CrossEntropyLoss(reduction="sum"))
cases.loss("cross entropy, class 1 ignored", PLAIN, nn.CrossEntropyLoss(ignore_index=3))
cases.loss("cross entropy, probabilities as targets", DISTRIBUTIONS, F.cross_entropy)
cases.loss("cross entropy, probabilities, weighted", DISTRIBUTIONS, nn.CrossEntropyLoss(weight=WEIGHTS))
cases.loss("cross entropy, tokens", TOKEN_PAIRS, flat(F.cross_entropy))
cases.loss("cross entropy, tokens transposed", TOKEN_PAIRS, lambda o, y: F.cross_entropy(o.transpose(1, 2), y))
cases.loss("cross entropy, tokens, sum", TOKEN_PAIRS, flat(nn.CrossEntropyLoss(reduction="sum")))
cases.loss("cross entropy, tokens, smoothed", TOKEN_PAIRS, flat(nn.CrossEntropyLoss(label_smoothing=0.1)))
cases.loss("cross entropy, pixels", PIXELS, nn.CrossEntropyLoss(ignore_index=255))
cases.loss("cross entropy, pixels, weighted", PIXELS, nn.CrossEntropyLoss(ignore_index=255, weight=WEIGHTS))
cases.loss("nll", PLAIN, lambda o, y: F.nll_loss(o.log_softmax(1), y))
cases.loss("nll, weighted", PLAIN, lambda o, y: F.nll_loss(F.log_softmax(o, dim=-1), y, weight=WEIGHTS))
cases.loss("nll, some ignored", SOME_IGNORED, lambda o, y: F.nll_loss(o.log_softmax(1), y, ignore_index=IGNORED))
cases.loss("bce with logits", BINARY, F.binary_cross_entropy_with_logits)
cases.loss("bce with logits, sum", BINARY, nn.BCEWithLogitsLoss(reduction="sum"))
cases.loss("bce with logits, pos_weight", BINARY, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS))
cases.loss("bce with logits, weight", BINARY, nn.BCEWithLogitsLoss(weight=WEIGHTS))
cases.loss(
    "bce with logits, squeezed",
    BINARY_SCALAR,
    lambda o, y: F.binary_cross_entropy_with_logits(o.squeeze(), y.squeeze()),
)
cases.loss("bce", PROBABILITIES, F.binary_cross_entropy)
cases.loss("bce, sum", PROBABILITIES, lambda o, y: F.binary_cross_entropy(o, y, reduction="sum"))
cases.loss("kl, batchmean", DISTRIBUTIONS, lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean"))
cases.loss("kl, mean", DISTRIBUTIONS, lambda o, y: F.kl_div(o.log_softmax(1), y))
cases.loss("kl, sum", DISTRIBUTIONS, lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="sum"))
cases.loss(
    "kl, none, sum, mean", DISTRIBUTIONS, lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="none").sum(-1).mean()
)
cases.loss("poisson", POSITIVE, F.poisson_nll_loss)
cases.loss("poisson, full, sum", POSITIVE, nn.PoissonNLLLoss(full=True, reduction="sum"))
cases.loss("gaussian nll", REGRESSION, lambda o, y: F.gaussian_nll_loss(o, y, F.softplus(o) + 0.1))
cases.loss("gaussian nll, one variance", SCALAR, lambda o, y: F.gaussian_nll_loss(o.squeeze(-1), y, torch.ones_like(y)))
cases.loss("soft margin", SIGNS, lambda o, y: F.soft_margin_loss(o.squeeze(-1), y))
cases.loss("hinge embedding", SIGNS, lambda o, y: F.hinge_embedding_loss(o.squeeze(-1), y))
cases.loss("multi margin", PLAIN, F.multi_margin_loss)
cases.loss("multi margin, weighted", PLAIN, nn.MultiMarginLoss(weight=WEIGHTS, p=2))
cases.loss("multilabel soft margin", BINARY, F.multilabel_soft_margin_loss)
cases.loss(
    "multilabel margin", PLAIN, lambda o, y: F.multilabel_margin_loss(o, F.pad(y[:, None], (0, CLASSES - 1), value=-1))
)
cases.step("cosine embedding", VIEWS, lambda m, b: F.cosine_embedding_loss(m(b[0]), m(b[1]), 1.0 - 2.0 * (b[2] % 2)))
cases.step(
    "margin ranking", VIEWS, lambda m, b: F.margin_ranking_loss(m(b[0])[:, 0], m(b[1])[:, 0], 1.0 - 2.0 * (b[2] % 2))
)
cases.step("triplet margin", TRIPLES, lambda m, b: F.triplet_margin_loss(m(b[0]), m(b[1]), m(b[2])))
cases.step("triplet margin, sum", TRIPLES, lambda m, b: F.triplet_margin_loss(*map(m, b), reduction="sum"))
cases.step(
    "triplet margin with a distance",
    TRIPLES,
    lambda m, b: F.triplet_margin_with_distance_loss(
        *map(m, b), distance_function=lambda x, y: 1 - F.cosine_similarity(x, y)
    ),
)
cases.loss(
    "ctc, mean", SPEECH, lambda o, y, n, t: F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, n, t, zero_infinity=True)
)
cases.loss(
    "ctc, sum", SPEECH, lambda o, y, n, t: F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, n, t, reduction="sum")
)
cases.loss(
    "ctc, none, over target tokens",
    SPEECH,
    lambda o, y, n, t: F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, n, t, reduction="none").sum() / t.sum(),
)

cases = Cases("losses", "reduced by hand")

cases.loss("squares, mean", REGRESSION, lambda o, y: ((o - y) ** 2).mean())
cases.loss("squares, sum / len", REGRESSION, lambda o, y: (o - y).pow(2).sum() / len(y))
cases.loss("squares, sum / shape[0]", REGRESSION, lambda o, y: (o - y).pow(2).sum() / y.shape[0])
cases.loss("squares, sum / numel", REGRESSION, lambda o, y: (o - y).pow(2).sum() / y.numel())
cases.loss("squares, sum / a constant 8", REGRESSION, lambda o, y: (o - y).pow(2).sum() / 8)
cases.loss("squares, sum / the effective batch", REGRESSION, lambda o, y: (o - y).pow(2).sum() / 12)
cases.loss("squares, sum * 0.25", REGRESSION, lambda o, y: (o - y).pow(2).sum() * 0.25)
cases.loss("squares, mean(0).sum()", REGRESSION, lambda o, y: (o - y).square().mean(0).sum())
cases.loss("squares, mean(1).sum()", REGRESSION, lambda o, y: (o - y).square().mean(1).sum())
cases.loss("squares, sum(1).mean()", REGRESSION, lambda o, y: (o - y).square().sum(1).mean())
cases.loss("half squares, torch.mean", REGRESSION, lambda o, y: 0.5 * torch.mean(torch.sum((o - y) ** 2, dim=-1)))
cases.loss("squeezed at the end", SCALAR, lambda o, y: F.mse_loss(o.squeeze(-1), y))
cases.loss("squeezed wholly, of rows", SCALAR, lambda o, y: F.mse_loss(o.squeeze(), y.squeeze()))
cases.loss("viewed as one row", SCALAR, lambda o, y: F.mse_loss(o.view(-1), y))
cases.loss("column against column", COLUMN, F.mse_loss)
cases.loss("row against column, broadcast", COLUMN, lambda o, y: F.mse_loss(o.squeeze(1), y))
cases.loss("root of mean squares", REGRESSION, lambda o, y: F.mse_loss(o, y).sqrt())
cases.loss("log of mean squares", REGRESSION, lambda o, y: F.mse_loss(o, y).log())
cases.loss("norm over everything", REGRESSION, lambda o, y: torch.linalg.norm(o - y))
cases.loss("norm of rows, mean", REGRESSION, lambda o, y: (o - y).norm(dim=1).mean())
cases.loss("norm / sqrt(n)", REGRESSION, lambda o, y: (o - y).norm() / len(o) ** 0.5)
cases.loss("sum / sqrt(n)", REGRESSION, lambda o, y: (o - y).square().sum() / len(o) ** 0.5)
cases.loss("sum / (n + 1)", REGRESSION, lambda o, y: (o - y).square().sum() / (len(o) + 1))
cases.loss("sum / (n - 1 or 1)", REGRESSION, lambda o, y: (o - y).square().sum() / max(len(o) - 1, 1))
cases.loss("sum / n squared", REGRESSION, lambda o, y: (o - y).square().sum() / len(o) ** 2)
cases.loss("cumulative sum's last", REGRESSION, lambda o, y: (o - y).square().mean(1).cumsum(0)[-1])
cases.loss("cumulative sum's last / n", REGRESSION, lambda o, y: (o - y).square().mean(1).cumsum(0)[-1] / len(o))
cases.loss("mean of cumulative sums", REGRESSION, lambda o, y: (o - y).square().mean(1).cumsum(0).mean())
cases.loss("cumulative over features", REGRESSION, lambda o, y: (o - y).square().cumsum(1).mean())
cases.loss("mean of [None]", REGRESSION, lambda o, y: (o - y).square()[None].mean())
cases.loss("mean over [None]'s first", REGRESSION, lambda o, y: (o - y).square()[None].mean(0).sum())
cases.loss("sum of [None] / n", REGRESSION, lambda o, y: (o - y).square()[None].sum((1, 2)).squeeze() / len(o))
cases.loss("median", REGRESSION, lambda o, y: (o - y).square().mean(1).median())
cases.loss("largest", REGRESSION, lambda o, y: (o - y).square().mean(1).max())
cases.loss("largest of features, mean", REGRESSION, lambda o, y: (o - y).square().amax(1).mean())
cases.loss("log sum exp over the batch", REGRESSION, lambda o, y: (o - y).square().mean(1).logsumexp(0))
cases.loss("log mean exp over the batch", REGRESSION, lambda o, y: (o - y).square().mean(1).exp().mean().log())
cases.loss("product of probabilities", PLAIN, lambda o, y: -o.softmax(1).gather(1, y[:, None]).log().sum() / len(y))
cases.loss("geometric mean", PLAIN, lambda o, y: -o.softmax(1).gather(1, y[:, None]).log().mean().exp())
cases.loss("variance of residuals", REGRESSION, lambda o, y: (o - y).var())
cases.loss("mean and deviation of residuals", REGRESSION, lambda o, y: (o - y).square().mean() + (o - y).std(0).mean())
cases.loss(
    "explained variance",
    SCALAR,
    lambda o, y: (o.squeeze(-1) - y).square().sum() / (y - y.mean()).square().sum().clamp(min=1e-3),
)
cases.loss("relative error over the batch", REGRESSION, lambda o, y: (o - y).norm() / y.norm())
cases.loss("relative error of samples", REGRESSION, lambda o, y: ((o - y).norm(dim=1) / y.norm(dim=1)).mean())
cases.loss("log cosh", REGRESSION, lambda o, y: torch.log(torch.cosh(o - y)).mean())
cases.loss("charbonnier", REGRESSION, lambda o, y: torch.sqrt((o - y) ** 2 + 1e-6).mean())
cases.loss("pinball", SCALAR, lambda o, y: torch.max(0.9 * (y - o[:, 0]), -0.1 * (y - o[:, 0])).mean())
cases.loss("mape", POSITIVE, lambda o, y: 100.0 * torch.mean(torch.abs((y - o) / y)))
cases.loss(
    "huber at a quantile of the batch",
    SCALAR,
    lambda o, y: F.huber_loss(o[:, 0], y, delta=float((o[:, 0] - y).abs().quantile(0.7)) + 1e-3),
)
