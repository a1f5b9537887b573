"""Models that keep something from one forward to the next: teachers, codebooks, queues, counters, auxiliary losses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    Setting,
    class_data,
    mlp,
    regression_data,
    view_data,
)

Tensor = torch.Tensor
cases = Cases("models", "state")


class Momentum(nn.Module):
    """A student and a teacher that follows it, in each forward: before or after it is used."""

    def __init__(self, *, first: bool, predictor: bool = True) -> None:
        super().__init__()
        self.student, self.predictor = mlp(), nn.Linear(CLASSES, CLASSES) if predictor else nn.Identity()
        self.teacher, self.first = copy.deepcopy(self.student).requires_grad_(False), first

    @torch.no_grad()
    def follow(self) -> None:
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                p.mul_(0.9).add_(0.1 * q)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        if self.first:
            self.follow()
        with torch.no_grad():
            target = self.teacher(other)
        if not self.first:
            self.follow()
        return 1 - F.cosine_similarity(self.predictor(self.student(one)), target).mean()


cases.step(
    "a teacher that follows before use", Setting(lambda: Momentum(first=True), view_data), lambda m, b: m(*b[:2])
)
cases.step(
    "a teacher that follows after use", Setting(lambda: Momentum(first=False), view_data), lambda m, b: m(*b[:2])
)
cases.step(
    "a teacher of one's own step, which follows at its end",
    Setting(lambda: Momentum(first=False), view_data),
    lambda m, b: m(*b[:2]) + F.cross_entropy(m.student(b[0]), b[2]),
)


class Quantised(nn.Module):
    """A codebook of vectors, learnt by gradients or moved to the means of what they stand for."""

    def __init__(self, *, moves: bool, commitment: float = 0.25) -> None:
        super().__init__()
        self.encoder, self.decoder, self.moves = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES), moves
        codes = torch.randn(5, 4)
        if moves:
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes)
        self.register_buffer("counts", torch.ones(5))
        self.commitment = commitment

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        z = self.encoder(inputs)
        chosen = torch.cdist(z.detach(), self.codes.detach()).argmin(1)
        q = self.codes[chosen].clone()
        loss = self.commitment * F.mse_loss(z, q.detach())
        if self.moves and self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 5).double()
                self.counts = 0.8 * self.counts + 0.2 * hot.sum(0)
                self.codes = 0.8 * self.codes + 0.2 * hot.T @ z / self.counts[:, None].clamp(min=0.1)
        else:
            loss = loss + F.mse_loss(q, z.detach())
        return loss + F.mse_loss(self.decoder(z + (q - z).detach()), targets)


cases.step("a codebook that moves", Setting(lambda: Quantised(moves=True), regression_data), lambda m, b: m(*b))
cases.step("a codebook by gradients", Setting(lambda: Quantised(moves=False), regression_data), lambda m, b: m(*b))


class WithQueue(nn.Module):
    """Keys of the last forwards, as a buffer that is written in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("queue", F.normalize(torch.randn(16, CLASSES), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        q, k = F.normalize(self.net(one), dim=1), F.normalize(self.net(other), dim=1).detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.5
        for row in k:
            self.queue[int(self.place)] = row
            self.place = (self.place + 1) % 16
        return F.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))


cases.step("a queue in a buffer", Setting(WithQueue, view_data), lambda m, b: m(*b[:2]))


class Routed(nn.Module):
    """Experts, with a loss that balances them, kept on the module or returned; some drop what exceeds a capacity."""

    def __init__(self, *, balance: str = "none", capacity: float | None = None, top: int = 1) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 3), nn.ModuleList(mlp() for _ in range(3))
        self.balance, self.capacity, self.top = balance, capacity, top
        self.auxiliary: Any = 0.0

    def forward(self, rows: Tensor) -> Tensor:
        p = self.gate(rows).softmax(1)
        _, chosen = p.topk(self.top, dim=1)
        hot = F.one_hot(chosen, 3).double().sum(1)
        if self.capacity is not None:
            hot = hot * (hot.cumsum(0) <= self.capacity * len(rows) / 3)
        if self.balance == "switch":
            self.auxiliary = 3 * (hot.mean(0) * p.mean(0)).sum()
        elif self.balance == "entropy":
            self.auxiliary = -(p * p.log()).sum(1).mean()
        elif self.balance == "z":
            self.auxiliary = self.gate(rows).logsumexp(1).square().mean()
        elif self.balance == "importance":
            self.auxiliary = p.sum(0).std() / p.sum(0).mean()
        return torch.einsum("be,ebc->bc", p * hot, torch.stack([expert(rows) for expert in self.experts]))


def routed(name: str, **options: Any) -> None:
    cases.step(
        name,
        Setting(lambda: Routed(**options), class_data),
        lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * m.auxiliary,
    )


routed("experts")
routed("experts, two of three", top=2)
routed("experts, balanced as in Switch", balance="switch")
routed("experts, their importance balanced", balance="importance")
routed("experts, an entropy of samples", balance="entropy")
routed("experts, a z-loss", balance="z")
routed("experts with a capacity of the batch", capacity=1.0)


class Counting(nn.Module):
    """Counts its forwards, in an attribute or a buffer, and does something with the count."""

    def __init__(self, use: Callable[[Tensor, float], Tensor], *, buffer: bool) -> None:
        super().__init__()
        self.net, self.use, self.buffer, self.calls = mlp(), use, buffer, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        if self.buffer:
            self.count += 1
            return self.use(self.net(rows), self.count.item())
        self.calls += 1
        return self.use(self.net(rows), self.calls)


def counting(name: str, use: Callable[[Tensor, float], Tensor], *, buffer: bool) -> None:
    cases.model(name, lambda: Counting(use, buffer=buffer), class_data, F.cross_entropy)


counting("a counter that nothing depends on", lambda x, n: x, buffer=False)
counting("a counter in a buffer that nothing depends on", lambda x, n: x, buffer=True)
counting("a temperature by a counter", lambda x, n: x / (1 + 0.1 * n), buffer=False)
counting("a temperature by a counter in a buffer", lambda x, n: x / (1 + 0.1 * n), buffer=True)
counting("something else in every second forward", lambda x, n: x if n % 2 else x.tanh(), buffer=False)


class Remembering(nn.Module):
    """Adds what it saw last to what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("last", torch.zeros(CLASSES))

    def forward(self, rows: Tensor) -> Tensor:
        result = self.net(rows) + self.last
        self.last = result.detach().mean(0)
        return result


cases.model("the last outputs' mean added", Remembering, class_data, F.cross_entropy)


class Observed(nn.Module):
    """Rounds to a grid whose range follows the largest value seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("range", torch.tensor(0.1))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.net(rows)
        self.range = torch.maximum(self.range, x.detach().abs().max())
        step = self.range / 7
        return self.head(x + ((x / step).round() * step - x).detach())


cases.model("a quantiser that follows the range", Observed, class_data, F.cross_entropy)


class Tracked(nn.Module):
    """A running mean of activations that a penalty keeps small."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)
        self.penalty: Any = 0.0

    def forward(self, rows: Tensor) -> Tensor:
        x = self.net(rows).sigmoid()
        rate = x.mean(0)
        self.penalty = (0.1 * (0.1 / rate).log() + 0.9 * (0.9 / (1 - rate)).log()).sum()
        return self.head(x)


cases.step(
    "a sparse autoencoder's mean activity",
    Setting(Tracked, class_data),
    lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * m.penalty,
)


class Keeping(nn.Module):
    """Keeps its last activations, and a history of losses, as logging code does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.last = mlp(), [], None

    def forward(self, rows: Tensor) -> Tensor:
        self.last = self.net(rows)
        self.seen.append(float(self.last.detach().mean()))
        return self.last


cases.model("activations kept for a log", Keeping, class_data, F.cross_entropy)


def stepping_in_backward(model: nn.Module) -> None:
    for p in model.parameters():

        def step(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
            parameter.grad = None

        p.register_post_accumulate_grad_hook(step)


def clipping(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))


def doubling(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_hook(lambda gradient: 2 * gradient)


def scaling_to_one(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))


PLAIN = Setting(mlp, class_data)


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


cases.step("parameters stepped in the backward", PLAIN, plain, hooks=stepping_in_backward, by_update=True)
cases.step("hooks that clip parameters' gradients", PLAIN, plain, hooks=clipping)
cases.step("hooks that double gradients", PLAIN, plain, hooks=doubling)
cases.step("hooks that scale gradients to one", PLAIN, plain, hooks=scaling_to_one)
