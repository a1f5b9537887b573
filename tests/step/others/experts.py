"""A language model with a mixture of experts, whose routers keep the loss that balances them until it is collected."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop
from tests.step.others.language import VOCABULARY, text


class SwitchLayer(nn.Module):
    """One expert a token, chosen by a router; the balancing loss of the last forward stays on the layer."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.aux_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.size(-1))
        probs = F.softmax(self.router(flat), dim=-1)
        gate, chosen = probs.max(dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(flat[rows]) * gate[rows, None])
        # Switch: experts times the sum over experts of (share of tokens) * (mean probability).
        share = F.one_hot(chosen, len(self.experts)).to(probs.dtype).mean(0)
        self.aux_loss = len(self.experts) * (share * probs.mean(0)).sum()
        return x + out.view_as(x)


class MoELanguageModel(nn.Module):
    """Next tokens from the last few, through two layers of experts."""

    def __init__(self, dim: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList([SwitchLayer(dim, experts) for _ in range(2)])
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x + F.pad(x, (0, 0, 1, 0))[:, :-1])  # a token and the one before it
        logits: torch.Tensor = self.head(x)
        return logits

    def pop_aux_loss(self) -> torch.Tensor:
        losses = [layer.aux_loss for layer in self.layers if isinstance(layer, SwitchLayer)]
        for layer in self.layers:
            layer.aux_loss = None
        return torch.stack([loss for loss in losses if loss is not None]).sum()


def moe_step(model: Any, batch: Any) -> torch.Tensor:
    tokens, targets = batch
    logits = model(tokens)
    loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * model.pop_aux_loss()
    return loss


def moe() -> Loop:
    torch.manual_seed(0)
    tokens = text(24, 8)
    return Loop(
        MoELanguageModel().double(), (tokens[:, :-1], tokens[:, 1:]), window=8, micro_batch=2, training_step=moe_step
    )
