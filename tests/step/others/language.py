"""Language models trained on windows of text: nanoGPT, an LSTM time-first, BERT's two objectives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop

VOCABULARY = 13


def text(num_samples: int, length: int, seed: int = 1) -> torch.Tensor:
    """Return rows of tokens, of which some follow others more often."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (num_samples, length), generator=generator)
    return (steps.cumsum(1) + torch.randint(0, VOCABULARY, (num_samples, 1), generator=generator)) % VOCABULARY


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c = x.size()
        q, k, v = (h.view(n, t, self.heads, -1).transpose(1, 2) for h in self.c_attn(self.ln_1(x)).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training)
        x = x + self.c_proj((weights @ v).transpose(1, 2).reshape(n, t, c))
        mixed: torch.Tensor = x + self.mlp(self.ln_2(x))
        return mixed


class GPT(nn.Module):
    """A small one, its head tied to its embedding."""

    def __init__(self, dim: int = 8, block_size: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, dim), nn.Embedding(block_size, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Block(dim, 2, dropout) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, learning_rate: float) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def nanogpt(dropout: float = 0.0) -> Loop:
    torch.manual_seed(0)
    model = GPT(dropout=dropout).double()
    tokens = text(24, 11)
    targets = tokens[:, 1:].clone()
    for row in range(len(targets)):
        targets[row, : row % 7] = -1  # as prompts are, which are not learnt
    optimizer = model.configure_optimizers(0.1, 1e-2)
    return Loop(
        model, (tokens[:, :-1], targets), window=8, micro_batch=2, optimizer=optimizer, is_comparable=not dropout,
        training_step=lambda model, batch: model(*batch)[1],
    )  # fmt: skip


def nanogpt_dropout() -> Loop:
    return nanogpt(0.2)


class RNNModel(nn.Module):
    """An LSTM over (time, batch), whose state of the last batch is carried on where asked for."""

    def __init__(self, dim: int = 8, carries: bool = False) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(VOCABULARY, dim), nn.LSTM(dim, dim)
        self.decoder = nn.Linear(dim, VOCABULARY)
        self.dim, self.carries = dim, carries
        self.hidden: tuple[torch.Tensor, ...] | None = None

    def init_hidden(self, size: int) -> tuple[torch.Tensor, ...]:
        weight = next(self.parameters())
        return weight.new_zeros(1, size, self.dim), weight.new_zeros(1, size, self.dim)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        decoded = self.decoder(output.view(-1, self.dim))
        return decoded, output, hidden


def repackage_hidden(hidden: Any) -> Any:
    """Take hidden states out of the graph that made them."""
    return tuple(h.detach() for h in hidden)


def word_lm_step(model: Any, batch: Any, alpha: float = 2.0, beta: float = 1.0) -> torch.Tensor:
    """Return cross entropy, and the two regularisations of the outputs: how large they are, how fast they change."""
    data, targets = (rows.t().contiguous() for rows in batch)
    hidden = model.hidden if model.carries else None
    if hidden is None or hidden[0].size(1) != data.size(1):
        hidden = model.init_hidden(data.size(1))
    decoded, output, hidden = model(data, repackage_hidden(hidden))
    if model.carries:
        model.hidden = repackage_hidden(hidden)
    loss = F.cross_entropy(decoded, targets.view(-1))
    loss = loss + alpha * output.pow(2).mean()
    return loss + beta * (output[1:] - output[:-1]).pow(2).mean()


def word_lm(carries: bool = False) -> Loop:
    torch.manual_seed(0)
    tokens = text(24, 8)
    model = RNNModel(carries=carries).double()
    return Loop(
        model, (tokens[:, :-1], tokens[:, 1:]), window=8, micro_batch=2, through="Accumulator",
        training_step=word_lm_step,
    )  # fmt: skip


def word_lm_carried() -> Loop:
    return word_lm(carries=True)


class Bert(nn.Module):
    """An encoder with two heads: the tokens that were masked, and whether the second sentence follows the first."""

    def __init__(self, dim: int = 8, length: int = 10) -> None:
        super().__init__()
        self.tokens, self.segments, self.places = (nn.Embedding(n, dim) for n in (VOCABULARY + 1, 2, length))
        layer = nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.pooler, self.next_sentence = nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.masked = nn.Linear(dim, VOCABULARY)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        next_sentence_label: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        x = self.tokens(input_ids) + self.segments(token_type_ids) + self.places(torch.arange(input_ids.size(1)))
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        scores, relation = self.masked(x), self.next_sentence(torch.tanh(self.pooler(x[:, 0])))
        masked_lm_loss = F.cross_entropy(scores.view(-1, VOCABULARY), labels.view(-1))
        next_sentence_loss = F.cross_entropy(relation.view(-1, 2), next_sentence_label.view(-1))
        return {"loss": masked_lm_loss + next_sentence_loss}


def bert() -> Loop:
    torch.manual_seed(0)
    tokens = text(24, 10)
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(5, 11, (24, 1), generator=generator)
    attention = (torch.arange(10) < lengths).long()
    # Some texts have many masked tokens, and some have one.
    share = torch.linspace(0.1, 0.7, 24)[torch.randperm(24, generator=generator), None]
    masked = (torch.rand(24, 10, generator=generator) < share) & (attention == 1)
    masked[:, 1] |= ~masked.any(1)
    data = {
        "input_ids": tokens.masked_fill(masked, VOCABULARY),
        "token_type_ids": (torch.arange(10) >= lengths // 2).long(),
        "attention_mask": attention,
        "labels": tokens.masked_fill(~masked, -100),
        "next_sentence_label": torch.randint(0, 2, (24,), generator=generator),
    }
    return Loop(Bert().double(), data, window=8, micro_batch=2)
