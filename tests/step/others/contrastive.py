"""Representations learnt by comparison: MoCo with its momentum encoder and queue, SupCon with pairs in the batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop


def encoder(dim: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, dim))


class MoCo(nn.Module):
    """Both encoders and the queue of past keys, moved on in each forward as in the paper's code."""

    def __init__(self, dim: int = 6, size: int = 24, momentum: float = 0.9, temperature: float = 0.2) -> None:
        super().__init__()
        self.momentum, self.temperature, self.size = momentum, temperature, size
        self.encoder_q = encoder(dim)
        self.encoder_k = copy.deepcopy(self.encoder_q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.momentum + q.data * (1 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        places = (int(self.pointer) + torch.arange(len(keys))) % self.size
        self.queue[:, places] = keys.T
        self.pointer[0] = (int(self.pointer) + len(keys)) % self.size

    def training_step(self, batch: Any) -> torch.Tensor:
        first, second = batch
        q = F.normalize(self.encoder_q(first), dim=1)
        with torch.no_grad():
            self.update_key_encoder()
            k = F.normalize(self.encoder_k(second), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        self.enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def moco() -> Loop:
    torch.manual_seed(0)
    model = MoCo().double()
    with torch.no_grad():  # as if trained a while: the two encoders are no longer the same
        for p in model.encoder_q.parameters():
            p.add_(0.1 * torch.randn_like(p))
    images = torch.randn(36, 8, dtype=torch.double)
    views = tuple(images + 0.1 * torch.randn_like(images) for _ in range(2))
    return Loop(model, views, window=12, micro_batch=4, training_step=MoCo.training_step)


class SupConLoss(nn.Module):
    """Each view beside all views of the batch: those of its own class are to be near."""

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        views = features.shape[1]
        mask = torch.eq(labels[:, None], labels[None, :]).to(features.dtype)
        contrast = torch.cat(torch.unbind(features, dim=1), dim=0)
        dots = torch.matmul(contrast, contrast.T) / self.temperature
        logits = dots - dots.max(dim=1, keepdim=True).values.detach()
        mask = mask.repeat(views, views)
        others = 1 - torch.eye(len(mask), dtype=features.dtype)
        mask = mask * others
        log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
        mean_log_prob = (mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)
        return -mean_log_prob.view(views, len(labels)).mean()


def supcon() -> Loop:
    torch.manual_seed(0)
    model, criterion = encoder().double(), SupConLoss()
    images, labels = torch.randn(36, 2, 8, dtype=torch.double), torch.randint(0, 3, (36,))

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        views, labels = batch
        features = F.normalize(model(views.flatten(0, 1)), dim=1)
        loss: torch.Tensor = criterion(features.view(*views.shape[:2], -1), labels)
        return loss

    return Loop(model, (images, labels), window=12, micro_batch=4, training_step=training_step)
