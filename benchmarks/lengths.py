"""Samples of different lengths: autoaccum groups them within each window; loops by hand pad what comes together.

    python benchmarks/lengths.py

The samples are the docstrings of Python's standard library, character by character, cut at ``LONGEST``: a few are
long. All contestants train the same model on the same windows' samples under the same simulated device memory, one
epoch each in every round. By hand the micro-batch is the best of those that fit: it has to fit its worst case, as many
samples of the longest.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import write_table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import autoaccum
from autoaccum.testing import simulated_memory

LONGEST, SAMPLES, EFFECTIVE_BATCH, WIDTH = 512, 2048, 128, 64
LIMITS = {"tight": "48MiB", "ample": "4GiB"}
Batch = tuple[Tensor, Tensor]


class Docstrings(Dataset[Tensor]):
    """(length,) codes of characters, 1 to 127."""

    def __init__(self) -> None:
        texts: dict[str, None] = {}
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                    texts[text[:LONGEST]] = None
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(len(texts), generator=generator)[:SAMPLES].tolist()
        every = list(texts)
        self.codes = [torch.tensor([min(ord(c), 127) or 1 for c in every[i]]) for i in chosen]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index]


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def pad_to_longest(samples: list[Tensor]) -> Tensor:
    return pad_sequence([*samples, torch.zeros(LONGEST, dtype=torch.long)], batch_first=True)[:-1]


class Causal(nn.Module):
    """Two layers of attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(128, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.mix = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 128)
        self.tokens = 0

    def forward(self, codes: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, 128)."""
        self.tokens += codes.numel()
        hidden = self.embed(codes) + self.position.weight[: codes.shape[1]]
        for mix, mlp in zip(self.mix, self.mlp, strict=True):
            query, key, value = mix(hidden).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + attended.transpose(1, 2).flatten(-2)
            hidden = hidden + mlp(hidden)
        return self.head(hidden)


def loss_of(model: Causal, codes: Tensor) -> Tensor:
    return cross_entropy(model(codes)[:, :-1].flatten(0, 1), codes[:, 1:].flatten(), ignore_index=0)


def with_autoaccum(data: Docstrings, limit: str) -> tuple[float, int, int, str]:
    """Seconds, tokens with their padding, optimizer steps, and sizes."""
    model = Causal()
    started = time.perf_counter()
    with simulated_memory(limit):
        result = autoaccum.fit(
            model,
            data,
            effective_batch=EFFECTIVE_BATCH,
            training_step=loss_of,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            collate_fn=pad,
            device="cpu",
            headroom=0,
            cache=False,
            progress=False,
        )
    sizes = [size for report in result.history[2:] for size in report.micro_batches]
    ooms = sum(report.replays for report in result.history)
    return (
        time.perf_counter() - started,
        model.tokens,
        result.num_steps,
        f"{min(sizes)} to {max(sizes)}, {ooms} out of memory",
    )


def by_hand(
    data: Docstrings, limit: str, collate: Callable[[list[Tensor]], Tensor], micro_batch: int
) -> tuple[float, int, int, str]:
    """The loop of a tutorial, token-weighted so that it is exact."""
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    steps = 0
    started = time.perf_counter()
    with simulated_memory(limit):
        order = torch.randperm(len(data), generator=generator).tolist()
        for first in range(0, len(order), EFFECTIVE_BATCH):
            window = order[first : first + EFFECTIVE_BATCH]
            total = sum(len(data[i]) - 1 for i in window)
            for codes in DataLoader(data, micro_batch, sampler=window, collate_fn=collate):
                items = int((codes[:, 1:] != 0).sum())
                (loss_of(model, codes) * (items / total)).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return time.perf_counter() - started, model.tokens, steps, str(micro_batch)


def fits(limit: str, micro_batch: int) -> bool:
    """As many samples of the longest, with gradients there."""
    model = Causal()
    try:
        with simulated_memory(limit):
            for _ in range(2):
                loss_of(model, torch.ones(micro_batch, LONGEST, dtype=torch.long)).backward()
    except torch.OutOfMemoryError:
        return False
    return True


def compare(data: Docstrings, limit: str, rounds: int) -> dict[str, list[tuple[float, int, int, str]]]:
    """Every contestant's runs."""
    possible = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if fits(limit, n)]
    sample = Docstrings()
    sample.codes = data.codes[: 2 * EFFECTIVE_BATCH]
    best = {
        collate: min(possible, key=lambda n: by_hand(sample, limit, collate, n)[0]) for collate in (pad, pad_to_longest)
    }
    contestants: dict[str, Callable[[], tuple[float, int, int, str]]] = {
        "autoaccum": lambda: with_autoaccum(data, limit),
        "by hand, padded to the longest of the micro-batch": lambda: by_hand(data, limit, pad, best[pad]),
        f"by hand, padded to {LONGEST}": lambda: by_hand(data, limit, pad_to_longest, best[pad_to_longest]),
    }
    runs: dict[str, list[tuple[float, int, int, str]]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant, run in contestants.items():
            runs[contestant].append(run())
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    data = Docstrings()
    lengths = sorted(map(len, data.codes))
    rows = []
    for name, limit in LIMITS.items():
        outcomes = compare(data, limit, arguments.rounds)
        ours = statistics.median(seconds for seconds, *_ in outcomes["autoaccum"])
        for contestant, runs in outcomes.items():
            seconds = statistics.median(s for s, *_ in runs)
            _, tokens, steps, sizes = runs[-1]
            padded = f"{tokens / sum(lengths):.2f}"
            rows.append(
                [f"{name}, {limit}", contestant, sizes, steps, padded, f"{seconds:.2f}", f"{seconds / ours:.2f}"]
            )
    write_table(
        "lengths",
        f"One epoch of {SAMPLES} docstrings of {lengths[0]} to {lengths[-1]} characters (median "
        f"{statistics.median(lengths):.0f}, mean {statistics.mean(lengths):.0f}), effective batch {EFFECTIVE_BATCH}, "
        f"from a cold start; medians of {arguments.rounds} rounds. The micro-batches by hand are the fastest that fit.",
        ["memory", "contestant", "micro-batches", "steps", "tokens with padding / tokens", "seconds", "ratio"],
        rows,
        threads=arguments.threads,
    )


if __name__ == "__main__":
    main()
