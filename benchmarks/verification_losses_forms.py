"""The same few losses in other forms: loops, lists, einsum, vmap, autograd functions, dictionaries, layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    GROUPS,
    PLAIN,
    REGRESSION,
    SCALAR,
    TIME,
    TOKENS,
    Setting,
    mlp,
    token_data,
)

Tensor = torch.Tensor
cases = Cases("losses", "forms")


class SquaredError(torch.autograd.Function):
    """A mean squared error with a backward of its own, over everything."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(outputs - targets)
        return (outputs - targets).square().mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (off,) = context.saved_tensors
        return gradient * 2 * off / off.numel(), None


class SquaredErrorOfRows(torch.autograd.Function):
    """Squared errors of rows, with a backward of their own."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(outputs - targets)
        return (outputs - targets).square().sum(1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (off,) = context.saved_tensors
        return gradient[:, None] * 2 * off, None


class SummedError(torch.autograd.Function):
    """Half the sum of squares, whose backward says so."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(outputs - targets)
        return 0.5 * (outputs - targets).square().sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.saved_tensors[0], None


class Centred(torch.autograd.Function):
    """The rows less their mean over the batch, in a function that shows nothing of it."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


def in_a_loop(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = torch.zeros(())
    for output, target in zip(outputs, targets, strict=True):
        loss = loss + F.mse_loss(output, target)
    return loss / len(outputs)


def by_features(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(outputs[:, i], targets[:, i]) for i in range(CLASSES)]).sum()


def one_by_one(model: nn.Module, batch: Any) -> Tensor:
    """Call the model on a sample at a time."""
    return torch.stack([F.cross_entropy(model(x[None]), y[None]) for x, y in zip(*batch, strict=True)]).mean()


def of_one_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(functional_call(model, dict(model.named_parameters()), (x,)), y)


def halves(outputs: Tensor, targets: Tensor) -> Tensor:
    middle = (len(outputs) + 1) // 2
    first = F.mse_loss(outputs[:middle], targets[:middle])
    return first if middle == len(outputs) else (first + F.mse_loss(outputs[middle:], targets[middle:])) / 2


def chunks_of_two(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(o, y) for o, y in zip(outputs.split(2), targets.split(2), strict=True)]).mean()


def meter(outputs: Tensor, targets: Tensor) -> Tensor:
    """Weigh chunks by their samples, as averaging meters do."""
    value: Any = 0.0
    for o, y in zip(outputs.split(2), targets.split(2), strict=True):
        value = value + F.mse_loss(o, y) * len(o)
    return value / len(outputs)


def in_place(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = outputs.sub(targets).square_()
    return loss.sum(1).div_(CLASSES).mean()


def preallocated(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = torch.zeros(len(outputs))
    for i in range(len(outputs)):
        losses[i] = F.mse_loss(outputs[i], targets[i])
    return losses.mean()


def python_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = [F.smooth_l1_loss(o, y) for o, y in zip(outputs, targets, strict=True)]
    return sum(losses) / len(losses)  # type: ignore[return-value]


cases.loss("autograd function, mean", REGRESSION, SquaredError.apply)
cases.loss("autograd function, sum", REGRESSION, SummedError.apply)
cases.loss("autograd function, rows, mean", REGRESSION, lambda o, y: SquaredErrorOfRows.apply(o, y).mean())
cases.loss("autograd function, rows, / n", REGRESSION, lambda o, y: SquaredErrorOfRows.apply(o, y).sum() / len(o))
cases.loss("autograd function that centres", REGRESSION, lambda o, y: F.mse_loss(Centred.apply(o), y))
cases.loss("a loop over samples", REGRESSION, in_a_loop)
cases.loss("a loop over features", REGRESSION, by_features)
cases.step("the model called one by one", PLAIN, one_by_one)
cases.step("vmap of a loss", REGRESSION, lambda m, b: vmap(F.mse_loss)(m(b[0]), b[1]).mean())
cases.step("vmap of the model", REGRESSION, lambda m, b: vmap(lambda x, y: of_one_sample(m, x, y))(*b).mean())
cases.step("vmap of the model, sum", REGRESSION, lambda m, b: vmap(lambda x, y: of_one_sample(m, x, y))(*b).sum())
cases.loss("mean of the means of halves", REGRESSION, halves)
cases.loss("mean of the means of chunks of two", REGRESSION, chunks_of_two)
cases.loss("chunks of two, weighed", REGRESSION, meter)
cases.loss("in place", REGRESSION, in_place)
cases.loss("into a tensor made before", REGRESSION, preallocated)
cases.loss("Python's sum / len", REGRESSION, python_sum)
cases.loss("einsum, mean", REGRESSION, lambda o, y: torch.einsum("bc,bc->b", o - y, o - y).mean())
cases.loss("einsum, all", REGRESSION, lambda o, y: torch.einsum("bc,bc->", o - y, o - y) / o.numel())
cases.loss("einsum over pairs", REGRESSION, lambda o, y: torch.einsum("bc,dc->bd", o, y).square().mean())
cases.loss(
    "matrix product with ones",
    REGRESSION,
    lambda o, y: (torch.ones(1, len(o)) @ (o - y).square() @ torch.ones(CLASSES, 1)).squeeze() / o.numel(),
)
cases.loss(
    "matrix product with 1 / n", REGRESSION, lambda o, y: (torch.full((1, len(o)), 1 / len(o)) @ (o - y).square()).sum()
)
cases.loss(
    "average pooled", REGRESSION, lambda o, y: F.adaptive_avg_pool1d((o - y).square().flatten()[None], 1).squeeze()
)
cases.loss(
    "average pooled, batch as channels", REGRESSION, lambda o, y: F.avg_pool1d((o - y).square()[None], CLASSES).mean()
)
cases.loss("stack of terms, mean", REGRESSION, lambda o, y: torch.stack([F.mse_loss(o, y), F.l1_loss(o, y)]).mean())
cases.loss("cat of terms, mean", SCALAR, lambda o, y: torch.cat([(o[:, 0] - y).square(), (o[:, 0] - y).abs()]).mean())
cases.loss(
    "cat of chosen terms, mean",
    SCALAR,
    lambda o, y: torch.cat([(o[:, 0] - y).square(), (o[y > 0, 0] - y[y > 0]).abs()]).mean(),
)
cases.loss("reshaped to one row", REGRESSION, lambda o, y: (o - y).square().reshape(1, -1).mean(1).squeeze(0))
cases.loss("transposed", REGRESSION, lambda o, y: (o.T - y.T).square().mean(1).mean(0))
cases.loss("permuted by label", PLAIN, lambda o, y: F.cross_entropy(o[y.argsort()], y.sort().values))
cases.loss(
    "weighted by place in the batch",
    PLAIN,
    lambda o, y: (F.cross_entropy(o, y, reduction="none") * torch.arange(1.0, len(y) + 1)).mean(),
)
cases.loss("the first sample alone", PLAIN, lambda o, y: F.cross_entropy(o[:1], y[:1]))
cases.loss("the last left out", PLAIN, lambda o, y: F.cross_entropy(o[: max(len(y) - 1, 1)], y[: max(len(y) - 1, 1)]))
cases.loss(
    "groups, segment sums by one-hot",
    GROUPS,
    lambda o, y, g: (F.one_hot(g, 3).double().T @ F.cross_entropy(o, y, reduction="none")).sum() / len(y),
)
cases.loss(
    "scatter of means",
    GROUPS,
    lambda o, y, g: (
        torch.zeros(3).scatter_reduce(0, g, F.cross_entropy(o, y, reduction="none"), "mean", include_self=False).sum()
    ),
)
cases.loss(
    "bincount weights",
    GROUPS,
    lambda o, y, g: (F.cross_entropy(o, y, reduction="none") * torch.bincount(g, minlength=3)[g]).mean(),
)
cases.loss("log sum exp as smooth maximum", REGRESSION, lambda o, y: 0.1 * ((o - y).square().sum(1) / 0.1).logsumexp(0))
cases.loss("log sum exp of features", REGRESSION, lambda o, y: (o.logsumexp(1) - (o * y).sum(1)).mean())
cases.loss("power mean", REGRESSION, lambda o, y: (o - y).abs().pow(4).mean().pow(0.25))
cases.loss("mean of detached scale", REGRESSION, lambda o, y: F.mse_loss(o, y) / F.mse_loss(o, y).detach())
cases.loss("/ a norm of the batch, detached", REGRESSION, lambda o, y: F.mse_loss(o, y) / o.detach().norm())
cases.loss("* len / len", REGRESSION, lambda o, y: F.mse_loss(o, y) * len(o) / y.shape[0])
cases.loss("* len", REGRESSION, lambda o, y: F.mse_loss(o, y) * len(o))
cases.loss("/ len of a mean", REGRESSION, lambda o, y: F.mse_loss(o, y) / len(o))
cases.loss("a float of len", REGRESSION, lambda o, y: (o - y).abs().sum() * (1.0 / float(o.size(0))))
cases.loss("a tensor of len", REGRESSION, lambda o, y: (o - y).abs().sum() / torch.tensor(o.size(0)))

EIGHT = Setting(lambda: mlp(8), lambda n, same: (torch.randn(n, 6), torch.randn(n, 8)))
cases.loss("eight features, sum / 8", EIGHT, lambda o, y: (o - y).square().sum() / 8)
cases.loss("eight features, mean over features", EIGHT, lambda o, y: ((o - y).square().sum(1) / 8).sum())
cases.loss("eight features, sum / 8 / n", EIGHT, lambda o, y: (o - y).square().sum() / 8 / len(o))
cases.loss("eight features, sum / shape[1]", EIGHT, lambda o, y: (o - y).square().sum() / o.shape[1])


class Returning(nn.Module):
    """A model that returns its loss, as those of Hugging Face do."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self.net, self.problem = mlp(1 if problem == "regression" else CLASSES), problem

    def forward(self, inputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(inputs)
        if self.problem == "regression":
            loss = F.mse_loss(logits.squeeze(), labels.squeeze())
        elif self.problem == "tokens":
            loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        else:
            assert mask is not None
            loss = F.cross_entropy(logits[mask > 0], labels[mask > 0], reduction="sum") / mask.sum()
        return {"loss": loss, "logits": logits}


def named(*names: str) -> Any:
    data = {3: token_data, 2: lambda n, same: (torch.randn(n, 6), torch.randn(n))}[len(names)]
    return lambda samples, same: dict(zip(names, data(samples, same), strict=True))


def tokens_named(samples: int, same: bool) -> Any:
    return dict(zip(("inputs", "labels"), token_data(samples, same)[:2], strict=True))


cases.step(
    "a model returns its loss: regression",
    Setting(lambda: Returning("regression"), named("inputs", "labels")),
    None,
    model_returns_loss=True,
)  # type: ignore[arg-type]
cases.step(
    "a model returns its loss: tokens",
    Setting(lambda: Returning("tokens"), tokens_named),
    None,
    model_returns_loss=True,
)  # type: ignore[arg-type]
cases.step(
    "a model returns its loss: by mask",
    Setting(lambda: Returning("mask"), named("inputs", "labels", "mask")),
    None,
    model_returns_loss=True,
)  # type: ignore[arg-type]
cases.loss(
    "time first, mean over time, then samples",
    TOKENS,
    lambda o, y, m: (o.transpose(0, 1).square().mean((0, 2)) * m.sum(1)).mean() / TIME,
)
