"""A small GPT that learns to write like the Python standard library, character by character. Downloads nothing.

    autoaccum fit examples/char_gpt.py --effective-batch 256
    autoaccum fit examples/char_gpt.py --effective-batch 256 --memory-limit 400MiB
    python examples/char_gpt.py        # the same run from Python

Shapes: N crops in the data, B crops in a micro-batch, T characters in a crop, C channels, V characters in the alphabet.
"""

import math
import re
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

INDENT = "\t"  # stands for four spaces
ALPHABET = "\n" + "".join(map(chr, range(32, 127))) + INDENT
CONTEXT = 128
"""Most characters that the model can look back."""
CROP = 32
"""Characters of a crop: in half a minute a small GPT learns more from many short crops than from few long ones."""
TRAINING_CROPS, VALIDATION_CROPS = 170 * 256, 2048


def read_text(max_chars: int = (TRAINING_CROPS + VALIDATION_CROPS) * CROP + 2) -> str:
    """The top-level modules of the standard library, one after the other."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(module.read_text(encoding="utf-8", errors="replace") for module in modules).replace("    ", INDENT)
    text = re.sub(f"{INDENT}{{4,}}", 3 * INDENT, text)  # deep indentation would fill crops with little to learn from
    return re.sub(f"[^{INDENT}\\n -~]", "?", text)[:max_chars]


def encode(text: str) -> Tensor:
    """(len(text),) int64: the position of each character in ``ALPHABET``."""
    codes = torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).long()
    # "\n" is 10, " " is 32.
    return torch.where(codes == ord(INDENT), len(ALPHABET) - 1, (codes - 31).clamp(min=0))


def crops(ids: Tensor, length: int = CROP) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (N, T): the targets are the inputs, one character later. Views, not copies."""
    return ids[:-1].unfold(0, length, length), ids[1:].unfold(0, length, length)


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
        # Half a minute is too short to learn to look back by a few characters, so each position is told its last three.
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


def generate(model: CharGPT, prompt: str = "def ", length: int = 300) -> str:
    ids = encode(prompt).to(next(model.parameters()).device)[None]  # (1, T)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(0)
        for _ in range(length):
            probabilities = (model(ids[:, -CROP:])[:, -1] / 0.6).softmax(-1)  # (1, V)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    model.train(was_training)
    return "".join(ALPHABET[i] for i in ids[0].tolist()).replace(INDENT, "    ")


def show_result(model: CharGPT, unigram: float) -> Callable[[Record], None]:
    """A callback that prints, at the end of the run, what the model has learned and a text that it writes."""
    learned = "not validated yet"  # as where the run was stopped

    def callback(record: Record) -> None:
        nonlocal learned
        if isinstance(record, Validated):
            learned = f"{record.loss:.2f} nats per character"
        elif isinstance(record, Finished):
            print(f"held-out loss: {learned} (character frequencies alone: {unigram:.2f})")
            print(f"\nThe model writes:\n\n{generate(model)}\n")

    return callback


def recipe() -> dict[str, Any]:
    ids = encode(read_text())
    train, held_out = ids.split([len(ids) - VALIDATION_CROPS * CROP - 1, VALIDATION_CROPS * CROP + 1])
    torch.manual_seed(0)
    model = CharGPT(depth=2)
    return {  # no budget: one epoch, unless a flag says otherwise
        "model": model,
        "data": crops(train),
        "loss_fn": loss_fn,
        "lr": 2e-2,
        "lr_scheduler": warmup_then_cosine,
        "clip_norm": 1.0,
        "validation_data": crops(held_out),
        "callbacks": [show_result(model, unigram_loss(train, held_out))],
    }


if __name__ == "__main__":
    autoaccum.fit(**recipe(), effective_batch=256)
