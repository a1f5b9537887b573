"""Models by what they are made of: attention, embeddings, convolutions, graphs, hooks on tensors, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    Batch,
    class_data,
    convolution,
    image_data,
    language_data,
    mask_of,
    mlp,
    pixel_data,
    scalar_data,
)

Tensor = torch.Tensor
cases = Cases("models", "layers")


def over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Module(nn.Module):
    """Layers before and after a function of what is between them: (module, rows) -> rows."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.before, self.after = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, rows: Tensor) -> Tensor:
        return self.after(self.function(self, self.before(rows)))


def between(name: str, function: Callable[[Any, Tensor], Tensor], **layers: Callable[[], nn.Module]) -> None:
    def make() -> nn.Module:
        return Module(function, **{key: layer() for key, layer in layers.items()})

    cases.model(name, make, class_data, F.cross_entropy)


def attention() -> nn.Module:
    return nn.MultiheadAttention(8, 2, dropout=0.0)


def clipped(rows: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
    if rows.requires_grad:
        rows.register_hook(how)
    return rows


def equilibrium(rows: Tensor, steps: int, of_all: bool) -> Tensor:
    """Iterate to a fixed point, until all samples are there or for a number of steps."""
    z = torch.zeros_like(rows)
    for _ in range(steps):
        new = (0.5 * z + rows).tanh()
        if of_all and float((new - z).detach().abs().max()) < 1e-2:
            break
        z = new
    return z


class Reversal(torch.autograd.Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class NormalisedGradient(torch.autograd.Function):
    """Scales the gradient of a batch to one."""

    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


between("attention across the batch", lambda m, x: m.mix(x[:, None], x[:, None], x[:, None])[0][:, 0], mix=attention)
between(
    "attention of [None]: the batch as time",
    lambda m, x: m.mix(x[None], x[None], x[None])[0][0],
    mix=lambda: nn.MultiheadAttention(8, 2, batch_first=True),
)
between(
    "attention within samples",
    lambda m, x: m.mix(*[x.view(-1, 2, 4)] * 3)[0].flatten(1),
    mix=lambda: nn.MultiheadAttention(4, 1, batch_first=True),
)
between("minibatch discrimination", lambda m, x: x + (-torch.cdist(x, x + 1e-4, p=1)).exp().sum(1, keepdim=True))
between("the standard deviation of the batch", lambda m, x: x + (x.var(0, unbiased=False) + 1e-8).sqrt().mean())
between("the mean of the batch added", lambda m, x: x + x.mean(0))
between("the mean of the batch added, detached", lambda m, x: x + x.detach().mean(0))
between(
    "the nearest in the batch added",
    lambda m, x: x + x[torch.cdist(x, x).topk(min(2, len(x)), largest=False).indices[:, -1]],
)
between("a graph of the batch's neighbours", lambda m, x: torch.softmax(-torch.cdist(x, x + 1e-4), 1) @ x)
between("sorted over the batch", lambda m, x: x + x.sort(0).values)
between("ranked over the batch", lambda m, x: x * x.detach().argsort(0).argsort(0))
between("the largest of the batch kept", lambda m, x: x * (x.detach() >= x.detach().quantile(0.3, dim=0)))
between("the largest features kept", lambda m, x: x * (x.detach() >= x.detach().quantile(0.3, dim=1, keepdim=True)))
between("cumulative sums over the batch", lambda m, x: x.cumsum(0).tanh())
between("cumulative sums over features", lambda m, x: x.cumsum(1).tanh())
between("convolved over the batch", lambda m, x: m.mix(x.T[None])[0].T, mix=lambda: nn.Conv1d(8, 8, 3, padding=1))
between("convolved over features", lambda m, x: m.mix(x[:, None])[:, 0], mix=lambda: nn.Conv1d(1, 1, 3, padding=1))
between("the size of the batch told", lambda m, x: x * len(x) ** 0.5)
between("an equilibrium of 12 steps", lambda m, x: equilibrium(x, 12, False))
between("an equilibrium when all are there", lambda m, x: equilibrium(x, 40, True))
between(
    "checkpointed",
    lambda m, x: checkpoint(m.mix, x, use_reentrant=False),
    mix=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
)
between(
    "checkpointed, reentrant",
    lambda m, x: checkpoint(m.mix, x, use_reentrant=True),
    mix=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
)
between(
    "checkpointed with BatchNorm",
    lambda m, x: checkpoint(m.mix, x, use_reentrant=False),
    mix=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)),
)
between("a hook that clips each gradient's entries", lambda m, x: clipped(x, lambda g: g.clamp(-1e-2, 1e-2)))
between("a hook that clips the gradient's norm", lambda m, x: clipped(x, lambda g: g / g.norm().clamp(min=0.1)))
between("a hook that reverses the gradient", lambda m, x: clipped(x, lambda g: -g))
between("a function that reverses the gradient", lambda m, x: Reversal.apply(x))
between("a function that scales the gradient to one", lambda m, x: NormalisedGradient.apply(x))
between("gated", lambda m, x: m.mix(x).sigmoid() * x, mix=lambda: nn.Linear(8, 8))
between("a frozen layer", lambda m, x: m.mix(x).tanh(), mix=lambda: nn.Linear(8, 8).requires_grad_(False))
between("a layer that is never used", lambda m, x: x.tanh(), mix=lambda: nn.Linear(8, 8))
between(
    "a layer that some batches use",
    lambda m, x: m.mix(x).tanh() if float(x.detach().mean()) > 0 else x,
    mix=lambda: nn.Linear(8, 8),
)
between(
    "layers by the sample's sign",
    lambda m, x: torch.where(x.sum(1, keepdim=True) > 0, m.one(x), m.two(x)),
    one=lambda: nn.Linear(8, 8),
    two=lambda: nn.Linear(8, 8),
)
between("one layer twice", lambda m, x: m.mix(m.mix(x).tanh()), mix=lambda: nn.Linear(8, 8))
between("retained gradients", lambda m, x: (x.retain_grad() or x.tanh()) if x.requires_grad else x.tanh())
between(
    "dispatched to layers by their argmax",
    lambda m, x: sum((x.argmax(1, keepdim=True) == i) * layer(x) for i, layer in enumerate(m.mix)),
    mix=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(8)),
)


class Cosine(nn.Module):
    """Cosines with a weight for each class, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight, self.scale = (
            mlp(8),
            nn.Parameter(torch.randn(CLASSES, 8)),
            nn.Parameter(torch.ones(()) * 3),
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.scale * F.normalize(self.net(rows)) @ F.normalize(self.weight).T


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, 6, max_norm=max_norm), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embed(ids).clone()).tanh() @ self.embed.weight.clone().T


class Complex(nn.Module):
    """A layer with complex numbers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 8, dtype=torch.complex128))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head((rows.to(torch.complex128) @ self.weight).abs())


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, FEATURES))
    return model


class Unet(nn.Module):
    """Down and up again, with a short cut."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inside = nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(7, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.inside(self.down(images).tanh()).tanh()
        return self.last(torch.cat([self.up(x), images], 1))


class Graph(nn.Module):
    """Samples are nodes of one graph, or each a graph of its own: messages are summed by scattering."""

    def __init__(self, *, one: bool) -> None:
        super().__init__()
        self.message, self.head, self.one = nn.Linear(3, 3), nn.Linear(6, CLASSES), one

    def forward(self, rows: Tensor) -> Tensor:
        nodes = rows.view(-1, 3)  # two for each sample
        places = torch.arange(len(nodes))
        target = (places + 1) % len(nodes) if self.one else places + 1 - 2 * (places % 2)
        gathered = torch.zeros_like(nodes).index_add(0, target, self.message(nodes))
        return self.head((nodes + gathered).tanh().view(-1, 6))


def language_pairs(samples: int, same: bool) -> Batch:
    ids, counts = language_data(samples, same)
    return ids, ids.masked_fill(~mask_of(counts), -100)


cases.model("a cosine classifier", Cosine, class_data, F.cross_entropy)
cases.model("tied embeddings", Tied, language_pairs, over_tokens)
cases.model("tied embeddings with max_norm", lambda: Tied(0.5), language_pairs, over_tokens)
cases.model("complex parameters", Complex, class_data, F.cross_entropy)
cases.model("lazy layers, built", lazy, class_data, F.cross_entropy)
cases.model("a convolutional net", convolution, pixel_data, lambda o, y: F.cross_entropy(o, y, ignore_index=255))
cases.model("a U-net", Unet, pixel_data, lambda o, y: F.cross_entropy(o, y, ignore_index=255))
cases.model("graphs, one for each sample", lambda: Graph(one=False), class_data, F.cross_entropy)
cases.model("the batch as one graph", lambda: Graph(one=True), class_data, F.cross_entropy)
cases.model(
    "pooled images",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
    image_data,
    F.cross_entropy,
)
cases.model(
    "3d convolution over the batch",
    lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(96, CLASSES)),
    image_data,
    F.cross_entropy,
)
cases.model("a bilinear layer", lambda: Twice(), class_data, F.cross_entropy)
cases.model("regression, squeezed in the model", lambda: nn.Sequential(mlp(1), Squeeze()), scalar_data, F.mse_loss)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows, rows)


class Squeeze(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.squeeze()
