"""Law 2 of docs/laws.md, where it is hard: a fault at every operation, in real models, optimizers and data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LinearLR

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory, Record, StepReport
from autoaccum.testing import oom_at
from autoaccum.trainer import FitResult
from tests.models import same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The model holds [12] BatchNorm")

Plans = tuple[tuple[int, ...], ...]


class Block(nn.Module):
    """Attention and a perceptron, dropout in and after both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.2 if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


@cache
def gpt() -> nn.Module:
    """A template, to be copied."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Dropout(0.2), Block(8, 2), Block(8, 2), nn.LayerNorm(8), nn.Linear(8, 11)
    )


@cache
def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 3),
    )


@cache
def hugging_face() -> nn.Module:
    """Built from a configuration, so nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model  # type: ignore[no-any-return]


def drawn(seed: int, *shape: int, below: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator) if below is None else torch.randint(below, shape, generator=generator)
    )


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def text() -> dict[str, torch.Tensor]:
    """Sequences of which some tokens are not learned from; one sequence has but two."""
    ids = drawn(2, 7, 6, below=13)
    labels = ids.clone()
    labels[drawn(3, 7, 6) < -0.7] = -100
    labels[4, 2:] = -100
    return {"input_ids": ids, "labels": labels}


CASES: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": gpt,
        "data": (drawn(0, 7, 6, below=11), drawn(1, 7, 6, below=11)),
        "loss_fn": token_loss,
        "effective_batch": 5,
        "micro_batch": 3,
    },
    # Micro-batches of a model with BatchNorm have two samples or more, so its windows are larger.
    "convolutions": {
        "model": convolutions,
        "data": (drawn(0, 17, 2, 6, 6), drawn(1, 17, below=3)),
        "loss_fn": cross_entropy,
        "effective_batch": 9,
        "micro_batch": 5,
    },
    "hugging_face": {
        "model": hugging_face,
        "data": text(),
        "precision": "bf16",
        "num_items": lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        "effective_batch": 5,
        "micro_batch": 3,
    },
}


@contextmanager
def frozen() -> Iterator[None]:
    """Each recovery collects garbage: it need not look at torch's hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def seen(result: FitResult) -> list[Any]:
    """All that callbacks saw of the windows, but for times, memory and replays."""
    return [
        (report.step, report.epoch, report.num_samples, report.micro_batches, report.loss, report.lr, report.grad_norm)
        for report in result.history
    ]


@dataclass
class Sweep:
    """An OOM at each operation of a run in turn, each run compared with a clean one of the same plans."""

    make: Callable[..., autoaccum.Trainer]
    """(micro_batch, callbacks) -> a new Trainer"""
    windows: list[int]
    operations: int = 0
    replayed: int = 0
    in_step: int = 0
    outside: set[str] = field(default_factory=set)
    plans: set[Plans] = field(default_factory=set)
    clean: dict[Plans, tuple[list[torch.Tensor], list[Any]]] = field(default_factory=dict)

    def run(self, micro_batch: int) -> None:
        counting = self.make(micro_batch)
        with oom_at(None) as counter:
            counting.fit()
        self.operations = counter.operations
        with frozen():
            for operation in range(1, self.operations + 1):
                self.fault(micro_batch, operation)

    def fault(self, micro_batch: int, operation: int) -> None:
        fault = ExitStack()  # left at the fault: from there on the run needs no more counting, which is slow
        records: list[Record] = []

        def callback(record: Record) -> None:
            records.append(record)
            if isinstance(record, OutOfMemory):
                fault.close()

        running = self.make(micro_batch, [callback])
        with fault:
            fault.enter_context(oom_at(operation))
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                self.in_step += 1
                return
            except torch.OutOfMemoryError as error:
                self.outside.add(str(error).split()[-1])
                return
        reports = [record for record in records if isinstance(record, StepReport)]
        assert reports == list(result.history)
        assert [report.effective_batch for report in reports] == self.windows
        assert sum(report.replays for report in reports) == 1
        assert sum(isinstance(record, OutOfMemory) for record in records) == 1
        plans = tuple(report.micro_batches for report in reports)
        state, reported = self.without_fault(plans)
        assert seen(result) == reported, f"operation {operation} is to be seen"
        assert same(state_of(result), state), f"operation {operation} left a mark"
        self.plans.add(plans)
        self.replayed += 1

    def without_fault(self, plans: Plans) -> tuple[list[torch.Tensor], list[Any]]:
        if plans not in self.clean:
            result = self.make(plans).fit()
            assert sum(report.replays for report in result.history) == 0
            self.clean[plans] = state_of(result), seen(result)
        return self.clean[plans]


# Outside of windows: the order of an epoch, and what writes to, or reads, memory that is there already.
OUTSIDE = {"aten.randperm.generator.", "aten._foreach_copy_.default.", "aten._local_scalar_dense.default."}


class TestEveryOperation:
    """Two windows, of which the second is short, with dropout, AdamW, clipping and a schedule."""

    @pytest.mark.parametrize(("name", "least"), [("gpt", 900), ("convolutions", 200), ("hugging_face", 600)])
    def test_an_oom_there_leaves_no_mark(self, name: str, least: int) -> None:
        def make(micro_batch: Any, callbacks: Any = ()) -> autoaccum.Trainer:
            options = {**CASES[name], "micro_batch": micro_batch, "callbacks": callbacks}
            return autoaccum.Trainer(
                deepcopy(options.pop("model")()),
                options.pop("data"),
                lr=0.01,
                lr_scheduler=lambda optimizer, num_steps: LinearLR(optimizer, 1.0, 0.1, num_steps),
                clip_norm=0.5,
                device="cpu",
                progress=False,
                **options,
            )

        num_samples = len(next(iter(text().values()))) if name == "hugging_face" else len(CASES[name]["data"][0])
        effective_batch = CASES[name]["effective_batch"]
        sweep = Sweep(make, [effective_batch, num_samples - effective_batch])
        sweep.run(CASES[name]["micro_batch"])
        print(
            f"{name}: {sweep.replayed} faults injected and replayed, {sweep.in_step} in the optimizer, "
            f"{sweep.operations} operations, plans {sorted(sweep.plans)}"
        )
        assert sweep.replayed > least
        assert sweep.in_step > 0
        assert sweep.outside <= OUTSIDE
        assert sweep.operations - sweep.replayed - sweep.in_step < 20
        assert {len(plan) for plan, _ in sweep.plans} >= {2, CASES[name]["effective_batch"] // 2}
