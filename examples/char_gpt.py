"""A small GPT that learns, character by character, to write like the Python standard library; nothing is downloaded.

    autoaccum fit examples/char_gpt.py --effective-batch 256
    autoaccum fit examples/char_gpt.py --effective-batch 256 --memory-limit 0.5
    python examples/char_gpt.py        # the same run, then a sample of what the model writes

Shapes: N crops in the data, B crops in a micro-batch, T characters in a crop, C channels, V characters in the alphabet.
"""

import math
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import autoaccum
from autoaccum.events import Finished, Record, Validated

ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + "\x7f"  # the last stands for any other character
CONTEXT = 128
VALIDATION_CROPS = 512


def read_text(max_chars: int = 3_000_000) -> str:
    """The top-level modules of the standard library, one after the other."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8", errors="replace") for module in modules)
    return re.sub(r"[^\n -~]", ALPHABET[-1], text[:max_chars])


def encode(text: str) -> Tensor:
    """(len(text),) int64: the position of each character in ``ALPHABET``."""
    codes = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)
    return (codes.long() - 31).clamp(min=0)  # "\n" is 10, " " is 32


def crops(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (N, T): the targets are the inputs, one character later. Views, not copies."""
    return ids[:-1].unfold(0, CONTEXT, CONTEXT), ids[1:].unfold(0, CONTEXT, CONTEXT)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, C')
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)  # (B, T, C)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, dropout: float = 0.02) -> None:
        super().__init__()
        self.characters = nn.ModuleList(nn.Embedding(len(ALPHABET), width) for _ in range(4))
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))
        for embedding in (*self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.positions.weight[: ids.shape[1]]  # (T, C)
        # A minute is too short to learn to look back by a few characters, so each position is told its last three.
        for back, embedding in enumerate(self.characters):
            x = x + embedding(F.pad(ids, (back, 0))[:, : ids.shape[1]])  # (B, T, C)
        return self.head(self.norm(self.blocks(x)))


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:  # (B, T, V), (B, T) -> nats per character
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def warmup_then_cosine(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    warmup = max(1, num_steps // 10)

    def factor(step: int) -> float:
        progress = (step - warmup) / max(1, num_steps - warmup)
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


def unigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Nats per character of a model that knows only how frequent each character is in the training text."""
    counts = torch.bincount(train, minlength=len(ALPHABET)).double() + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()


def compare_with(unigram: float) -> Callable[[Record], None]:
    """A callback that says, when the run is over, what the model has learned."""
    model = "not validated yet"  # as where the run was stopped

    def callback(record: Record) -> None:
        nonlocal model
        if isinstance(record, Validated):
            model = f"{record.loss:.3f}"
        elif isinstance(record, Finished):
            print(f"held-out text, nats per character: unigram {unigram:.3f}, model {model}", file=sys.stderr)

    return callback


def recipe() -> dict[str, Any]:
    ids = encode(read_text())
    train, held_out = ids.split([len(ids) - VALIDATION_CROPS * CONTEXT - 1, VALIDATION_CROPS * CONTEXT + 1])
    torch.manual_seed(0)
    return {  # no budget: one epoch, unless a flag says otherwise
        "model": CharGPT(),
        "data": crops(train),
        "loss_fn": loss_fn,
        "lr": 7e-3,
        "lr_scheduler": warmup_then_cosine,
        "clip_norm": 1.0,
        "validation_data": crops(held_out),
        "callbacks": [compare_with(unigram_loss(train, held_out))],
    }


def generate(model: CharGPT, prompt: str, length: int = 400) -> str:
    ids = encode(prompt).to(next(model.parameters()).device)[None]  # (1, T)
    model.eval()
    with torch.inference_mode():
        for _ in range(length):
            probabilities = (model(ids[:, -CONTEXT:])[:, -1] / 0.8).softmax(-1)  # (1, V)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return "".join(ALPHABET[i] for i in ids[0].tolist())


if __name__ == "__main__":
    model = autoaccum.fit(**recipe(), effective_batch=256).model
    print(generate(model, "def "))
