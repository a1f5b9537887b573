"""Generative models: the critic of WGAN-GP, and VQ-VAE with a codebook of moving averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop


def gradient_penalty(critic: Any, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return how far the critic's slope is from one, at a random point between each real sample and a fake one."""
    epsilon = torch.rand(len(real), 1, dtype=real.dtype)
    between = (epsilon * real + (1 - epsilon) * fake).requires_grad_(True)
    scores = critic(between)
    (slope,) = torch.autograd.grad(
        outputs=scores, inputs=between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return ((slope.view(len(slope), -1).norm(2, dim=1) - 1) ** 2).mean()


def wgan_gp() -> Loop:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1)).double()
    generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)).double().requires_grad_(False)
    data = (torch.randn(24, 6, dtype=torch.double) + 1, torch.randn(24, 3, dtype=torch.double))

    def training_step(critic: Any, batch: Any) -> torch.Tensor:
        real, z = batch
        fake = generator(z).detach()
        loss: torch.Tensor = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake)
        return loss

    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    return Loop(
        critic, data, window=8, micro_batch=2, optimizer=optimizer, training_step=training_step, through="Accumulator"
    )


class Quantize(nn.Module):
    """The nearest code of each vector; in training the codes follow the vectors that chose them."""

    def __init__(self, dim: int, codes: int, decay: float = 0.9, eps: float = 1e-5) -> None:
        super().__init__()
        self.decay, self.eps, self.codes = decay, eps, codes
        embed = torch.randn(dim, codes)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distances = x.pow(2).sum(1, keepdim=True) - 2 * x @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        chosen = distances.argmin(1)
        onehot = F.one_hot(chosen, self.codes).type(x.dtype)
        quantized = F.embedding(chosen, self.embed.t())
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(x.detach().t() @ onehot, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            sizes = (self.cluster_size + self.eps) / (n + self.codes * self.eps) * n
            self.embed.data.copy_(self.embed_avg / sizes.unsqueeze(0))
        diff = (quantized.detach() - x).pow(2).mean()
        return x + (quantized - x).detach(), diff


class VQVAE(nn.Module):
    """An encoder, a codebook, a decoder."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(8, dim), nn.Linear(dim, 8)
        self.quantize = Quantize(dim, codes=6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, diff = self.quantize(self.enc(x))
        return self.dec(quantized), diff


def vqvae_step(model: Any, batch: Any) -> torch.Tensor:
    out, latent_loss = model(batch)
    return F.mse_loss(out, batch) + 0.25 * latent_loss


def vqvae() -> Loop:
    torch.manual_seed(0)
    return Loop(
        VQVAE().double(), torch.randn(36, 8, dtype=torch.double), window=12, micro_batch=4, training_step=vqvae_step
    )
