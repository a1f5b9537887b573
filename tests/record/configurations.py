"""Holds what is recorded: small runs of everything the library does, through its public names alone.

Each configuration is a generator function of a directory that yields named outcomes. It runs in a memory that is
simulated and by a clock that is given, so that nothing in it depends on the machine or its load.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

import autoaccum
from autoaccum import schedules
from autoaccum.cli import app
from autoaccum.testing import oom_at, simulated_memory
from tests.record.clock import work

HERE = Path(__file__).parent
ALL: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {}
Outcomes = Iterator[tuple[str, Any]]


def recorded(function: Callable[[Path], Outcomes]) -> Callable[[Path], Outcomes]:
    """Count it among the configurations."""
    ALL[function.__name__] = function
    return function


# What is yielded.


@dataclass
class Ran:
    """Holds a run: what it returned or raised, and what its callbacks were told."""

    result: Any = None
    records: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    peaks: str = "exact"
    """Says how peaks are compared: about, where the text of a checkpoint is part of them; not at all, where data that
    other processes read are, whenever they come."""


@dataclass
class Stepped:
    """Holds what an accumulator has done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    events: list[Any]
    steps: list[Any] = field(default_factory=list)
    error: BaseException | None = None


@dataclass
class Directory:
    """Stands for what a run has left in a directory."""

    path: Path


@dataclass
class Drawn:
    """Holds a study."""

    study: Any


@dataclass
class Command:
    """Holds what a command has printed, and the page that it has written."""

    code: int
    out: str
    err: str
    page: Path | None = None


@dataclass
class Lines:
    """Holds texts for people."""

    lines: list[str]


# What work costs: seconds of a forward and backward by its samples.

Cost = Callable[[int], float]


def linear(size: int) -> float:
    """Make the largest micro-batch the fastest."""
    return 0.001 + 0.0005 * size


def stepped(size: int) -> float:
    """Take samples by 16: sizes just above a multiple are slow."""
    return 0.0004 + 0.004 * math.ceil(size / 16)


def crowded(size: int) -> float:
    """Make samples beyond the twentieth slower: medium sizes are the fastest."""
    return 0.003 + 0.0005 * size + 0.0009 * max(0, size - 20)


def flat(size: int) -> float:
    """Cost the samples alone: no size is faster than another."""
    return 0.0006 * size


# What is trained.


def timed(loss: Callable[..., torch.Tensor], cost: Cost = linear) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function that takes time."""

    def loss_fn(outputs: Any, targets: Any) -> torch.Tensor:
        work(cost(len(targets)))
        return loss(outputs, targets)

    return loss_fn


cross_entropy = functional.cross_entropy


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return a net of eight inputs and three classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def wide(width: int = 400) -> nn.Module:
    """Return one whose activations fill a small memory: of each sample ``width`` floats a layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def noisy() -> nn.Module:
    """Return one with everything that a replay has to put back: dropout's random states and BatchNorm's buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(64, 64),
        nn.Dropout(0.3),
        nn.Linear(64, 3),
    )


class ConvNet(nn.Module):
    """Has convolutions, BatchNorm, and dropout of whole channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.2),
            nn.Conv2d(6, 8, 3),
            nn.GroupNorm(2, 8),
            nn.GELU(),
        )
        self.head = nn.Linear(8 * 2 * 2, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a score for each class."""
        found: torch.Tensor = self.head(self.body(images).flatten(1))
        return found


class TransformerLM(nn.Module):
    """Predicts the next token, with two blocks of attention; input and output embeddings are tied."""

    def __init__(self, vocabulary: int = 23, width: int = 16, length: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
                    ),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores: (samples, length) -> (samples, length, vocabulary)."""
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            parts = block["qkv"](block["norm"](hidden)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
            hidden = hidden + block["out"](attended.transpose(1, 2).flatten(2))
            hidden = hidden + block["mlp"](hidden)
        found: torch.Tensor = self.head(hidden)
        return found


class WithLoss(nn.Module):
    """Returns its own loss, as Hugging Face's models do, of labels that it shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TransformerLM()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return the loss beside the scores."""
        work(0.002 + 0.001 * len(input_ids))
        scores = self.lm(input_ids)
        loss = cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=scores)


# What it is trained on.


def classes(num_samples: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (num_samples, 8) inputs and (num_samples,) targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 8, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (num_samples,), generator=generator)


def learnable(num_samples: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return classes that can be told from the inputs."""
    inputs, _ = classes(num_samples, seed=seed)
    return inputs, inputs[:, :3].argmax(1)


def images(num_samples: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (num_samples, 1, 8, 8) images of four classes."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return pictures, torch.randint(0, 4, (num_samples,), generator=generator)


def texts(num_samples: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of 12 tokens, of which the later ones, ever more of them, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 23, (num_samples, 12), generator=generator)
    targets = ids.roll(-1, 1)
    for row in range(num_samples):
        targets[row, (5 * row) % 13 :] = -100
    return ids, targets


class Ragged(Dataset[torch.Tensor]):
    """Holds texts of very different lengths."""

    def __init__(self, num_samples: int = 90, longest: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 9, (num_samples,), generator=generator)
        lengths[::7] = torch.randint(12, longest + 1, lengths[::7].shape, generator=generator)
        lengths[0] = longest
        self.texts = [torch.randint(1, 23, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Pad to the longest."""
    return pad_sequence(samples, batch_first=True)


class Texts(nn.Module):
    """Predicts tokens from those before them, in texts of any length."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(23, width, padding_idx=0)
        self.gru, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, 23)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return scores for each token."""
        hidden = self.tokens(ids)
        hidden = torch.tanh(self.gru(hidden.cumsum(1)))
        found: torch.Tensor = self.head(hidden)
        return found


def next_token_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens that are no padding; it costs what is computed, padding included."""
    work(0.001 + 0.00005 * ids.numel())
    return cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def token_step(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean over the tokens that are not ignored."""
    work(linear(len(batch[0])))
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return of each sample whether it was told."""
    return outputs.argmax(1) == targets


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return one with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


# Running.


def fit(*, limit: int | str = "64MiB", tells: Callable[[Any, Any], None] | None = None, **options: Any) -> Ran:
    """Run ``autoaccum.fit`` in a memory of ``limit`` bytes.

    ``tells`` is called with each record and the memory, whose limit it may change.
    """
    given: dict[str, Any] = {"device": "cpu", "progress": False, "cache": False, **options}
    if not {"training_step", "loss_fn"} & given.keys() and not isinstance(given["model"], WithLoss):
        given["loss_fn"] = timed(cross_entropy)
    ran = Ran(peaks="exact" if given.get("run_dir") is None else "about")
    with simulated_memory(limit) as memory:
        told = [ran.records.append, *([] if tells is None else [lambda record: tells(record, memory)])]
        given["callbacks"] = [*told, *given.get("callbacks", ())]
        try:
            ran.result = autoaccum.fit(**given)
        except (Exception, KeyboardInterrupt) as error:
            ran.error = error.with_traceback(None)
    return ran


def caught(call: Callable[[], Any]) -> BaseException:
    """Return what it raises."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


def is_report(record: Any) -> bool:
    """Tell a window's report from events."""
    return type(record).__name__ == "StepReport"


# Plain training.


@recorded
def plain(_place: Path) -> Outcomes:
    """Train a net with room for whole windows, with clipping, and with everything left out."""
    yield "clipped", fit(model=mlp(), data=classes(70), effective_batch=16, epochs=2, clip_norm=0.5, lr=0.01)
    yield "defaults", fit(model=mlp(), data=classes(40), effective_batch=8)
    yield (
        "fixed",
        fit(model=mlp(), data=classes(50), effective_batch=13, micro_batch=5, optimizer=sgd, shuffle=False, seed=3),
    )


@recorded
def grown(_place: Path) -> Outcomes:
    """Search for micro-batches in a memory where whole windows do not fit, and time plans."""
    shared: dict[str, Any] = {"data": classes(256), "effective_batch": 64, "steps": 26}
    for cost in (linear, stepped, crowded, flat):
        loss_fn = timed(cross_entropy, cost)
        yield cost.__name__, fit(limit=230_000, model=wide(), loss_fn=loss_fn, **shared)
    yield "plateau", fit(model=wide(), loss_fn=timed(cross_entropy, crowded), **shared)
    yield "headroom", fit(limit=230_000, model=wide(), headroom=0.3, optimizer=sgd, **{**shared, "steps": 12})
    yield "at most", fit(limit=230_000, model=wide(), max_micro_batch=11, **{**shared, "steps": 12})


@recorded
def moving_memory(_place: Path) -> Outcomes:
    """Let the memory fall, come back, and be strained, while a run goes on."""

    def tells(record: Any, memory: Any) -> None:
        if is_report(record):
            memory.limit = {8: 150_000, 30: 120_000, 42: 400_000}.get(record.step, memory.limit)
            memory.retries += 44 <= record.step < 80

    yield (
        "simulated",
        fit(limit=260_000, model=wide(), data=classes(256), effective_batch=64, steps=90, tells=tells, optimizer=sgd),
    )
    allowed = {"bytes": 240_000}

    def allows(record: Any, _memory: Any) -> None:
        if is_report(record):
            allowed["bytes"] = {14: 130_000, 30: 300_000}.get(record.step, allowed["bytes"])

    yield (
        "by a function",
        fit(
            limit=320_000,
            model=wide(),
            data=classes(256),
            loss_fn=timed(cross_entropy, stepped),
            effective_batch=48,
            steps=60,
            tells=allows,
            memory_limit=lambda: allowed["bytes"],
        ),
    )
    yield (
        "by a share",
        fit(limit=400_000, model=wide(), data=classes(96), effective_batch=48, steps=10, memory_limit=0.5),
    )
    yield (
        "by a text",
        fit(limit=400_000, model=wide(), data=classes(96), effective_batch=48, steps=10, memory_limit="180KB"),
    )


@recorded
def faults(_place: Path) -> Outcomes:
    """Run out of memory at single operations, of the first windows and of later ones."""

    def at_operation(n: int) -> Ran:
        with oom_at(n):
            return fit(model=noisy(), data=classes(60), effective_batch=20, epochs=2, micro_batch=10, clip_norm=1.0)

    for n in (150, 333, 700, 900):
        yield f"operation {n}", at_operation(n)
    calls = {"number": 0}

    def fails(outputs: Any, targets: Any) -> torch.Tensor:
        work(linear(len(targets)))
        calls["number"] += 1
        loss = cross_entropy(outputs, targets)
        if calls["number"] in (2, 40):
            raise torch.OutOfMemoryError("Simulated")
        if calls["number"] in (21, 22):
            loss.register_hook(_fail)
        return loss

    options: dict[str, Any] = {"data": classes(96), "effective_batch": 24, "epochs": 4, "clip_norm": 1.0}
    yield "forward and backward", fit(model=mlp(), micro_batch=16, loss_fn=fails, **options)

    def fails_above(outputs: Any, targets: Any) -> torch.Tensor:
        work(linear(len(targets)))
        if len(targets) > 9:
            raise torch.OutOfMemoryError("Simulated")
        return cross_entropy(outputs, targets)

    yield "larger than nine", fit(model=noisy(), loss_fn=fails_above, **options)
    yield "larger than nine, without norms", fit(model=mlp(), loss_fn=fails_above, noise_scale=True, **options)


def _fail(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("Simulated in the backward")


@recorded
def nothing_fits(_place: Path) -> Outcomes:
    """Allow too little memory for a sample, and for the model."""
    yield "before the first sample", fit(limit=70_000, model=wide(), data=classes(64), effective_batch=32)
    yield "with advice", fit(limit=86_000, model=wide(), data=classes(64), effective_batch=32, headroom=0.0)
    yield "not even the model", fit(limit=20_000, model=wide(), data=classes(64), effective_batch=32)
    yield (
        "validation",
        fit(
            limit=72_000,
            model=nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)),
            data=classes(8),
            effective_batch=4,
            training_step=lambda model, batch: cross_entropy(
                model(batch[0] if model.training else batch[0].repeat(400, 1).expand(400 * len(batch[0]), 8).tanh()),
                batch[1] if model.training else batch[1].repeat(400),
            ),
            validation_data=classes(8, seed=2),
        ),
    )


# Models.


@recorded
def transformer(_place: Path) -> Outcomes:
    """Train a language model on texts whose targets are partly ignored, one of them wholly."""
    shared: dict[str, Any] = {"data": texts(60), "effective_batch": 20, "training_step": token_step}
    yield "auto", fit(limit=600_000, model=TransformerLM(), epochs=4, clip_norm=1.0, **shared)
    yield "one by one", fit(model=TransformerLM(), micro_batch=1, **shared)
    counted = {"num_items": lambda batch: (batch[1] != -100).sum()}
    yield "counted", fit(model=TransformerLM(), micro_batch=7, **shared, **counted)


@recorded
def convolutions(_place: Path) -> Outcomes:
    """Train a net with BatchNorm and dropout, which is announced, and validate it."""
    yield (
        "auto",
        fit(
            limit=400_000,
            model=ConvNet(),
            data=images(90),
            effective_batch=32,
            epochs=4,
            optimizer=sgd,
            validation_data=images(20, seed=2),
            metrics={"right": right},
        ),
    )
    frozen = ConvNet().train()
    frozen.body[1].eval()
    yield "frozen", fit(model=frozen, data=images(40), effective_batch=16, micro_batch=5)


@recorded
def own_loss(_place: Path) -> Outcomes:
    """Train models that return their loss, of keywords."""
    ids, targets = texts(48)
    data = {"input_ids": ids, "labels": torch.where(targets == -100, -100, ids)}

    def perplexed(outputs: Any, batch: Any) -> torch.Tensor:
        kept = batch["labels"][:, 1:] != -100
        found = cross_entropy(outputs.logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
        return found[kept]

    yield "auto", fit(limit=500_000, model=WithLoss(), data=data, effective_batch=16, epochs=3)
    yield (
        "validated",
        fit(
            model=WithLoss(),
            data=data,
            effective_batch=16,
            micro_batch=5,
            validation_data={name: rows[:10] for name, rows in data.items()},
            metrics={"nats": perplexed},
        ),
    )


@recorded
def precisions(_place: Path) -> Outcomes:
    """Train in other precisions than float32."""
    shared: dict[str, Any] = {"effective_batch": 16, "epochs": 2, "micro_batch": 6, "clip_norm": 1.0}
    yield "float64", fit(model=mlp(torch.float64), data=classes(48, torch.float64), optimizer=sgd, **shared)
    yield "bf16", fit(model=mlp(), data=classes(48), precision="bf16", **shared)
    yield "fp16", fit(model=mlp(), data=classes(48), precision="fp16", **shared)
    yield "fp16 auto", fit(limit=230_000, model=wide(), data=classes(96), effective_batch=48, steps=6, precision="fp16")
    calls = {"number": 0}

    def overflows(outputs: Any, targets: Any) -> torch.Tensor:
        work(linear(len(targets)))
        calls["number"] += 1
        return cross_entropy(outputs, targets) * (1e4 if calls["number"] == 5 else 1.0)

    yield "overflow", fit(model=mlp(), data=classes(48), precision="fp16", loss_fn=overflows, **shared)
    half = fit(model=mlp(torch.bfloat16), data=classes(48, torch.bfloat16), **shared)
    yield "parameters of 16 bits", half


@recorded
def sparse(_place: Path) -> Outcomes:
    """Train embeddings whose gradients are sparse."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.bag, self.head = nn.EmbeddingBag(50, 6, sparse=True, mode="mean"), nn.Linear(6, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.bag(ids))
            return found

    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 50, (60, 5), generator=generator), torch.randint(0, 3, (60,), generator=generator)
    shared: dict[str, Any] = {"data": data, "effective_batch": 20, "epochs": 2, "optimizer": sgd}
    yield "fixed", fit(model=Bag(), micro_batch=7, clip_norm=0.2, **shared)
    yield "hardly any memory", fit(limit=12_000, model=Bag(), **shared)
    yield "auto", fit(limit=16_000, model=Bag(), **shared)
    adam: dict[str, Any] = {"optimizer": lambda p: torch.optim.SparseAdam(list(p)[:1])}
    yield "a part of it", fit(model=Bag(), **{**shared, **adam})
    adam = {"optimizer": lambda p: torch.optim.SparseAdam(list(p))}
    yield "refused by the optimizer", fit(model=Bag(), **{**shared, **adam})


@recorded
def unusual_models(_place: Path) -> Outcomes:
    """Train a loss with parameters of its own, frozen weights, and a model in evaluation mode."""
    torch.manual_seed(0)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            work(linear(len(targets)))
            self.calls += 1
            return cross_entropy(outputs * self.scale, targets)

    loss = Weighted()
    yield "loss with parameters", fit(model=mlp(), loss_fn=loss, data=classes(40), effective_batch=16, micro_batch=6)
    yield "its parameters", [loss.scale, loss.calls]
    frozen = mlp()
    frozen[0].requires_grad_(False)
    yield "frozen", fit(model=frozen, data=classes(32), effective_batch=16, micro_batch=6)
    yield "evaluating", fit(model=noisy().eval(), data=classes(32), effective_batch=16, micro_batch=6)
    yield (
        "optimizer",
        fit(
            model=mlp(),
            data=classes(64),
            effective_batch=16,
            micro_batch=6,
            optimizer=lambda p: torch.optim.RMSprop(
                [{"params": list(p), "lr": 0.003}], momentum=0.5, weight_decay=0.01
            ),
        ),
    )


# Losses.


@recorded
def losses(_place: Path) -> Outcomes:
    """Train with losses that are means over other things than samples, or sums."""
    weights = torch.tensor([0.3, 1.0, 2.0])
    model_of = {"penalty": mlp(), "penalised sum": mlp()}

    def penalty(model: nn.Module) -> torch.Tensor:
        return 0.01 * sum(p.square().sum() for p in model.parameters())

    ignored = classes(40)
    ignored[1][::3] = -100
    kinds: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "class weights": lambda o, t: cross_entropy(o, t, weight=weights),
        "label smoothing": lambda o, t: cross_entropy(o, t, label_smoothing=0.1),
        "both": lambda o, t: cross_entropy(o, t, weight=weights, label_smoothing=0.2),
        "sum": lambda o, t: cross_entropy(o, t, reduction="sum"),
        "penalty": lambda o, t: cross_entropy(o, t) + penalty(model_of["penalty"]),
        "penalised sum": lambda o, t: cross_entropy(o, t, reduction="sum") + penalty(model_of["penalised sum"]),
        "two terms": lambda o, t: cross_entropy(o, t) + 0.1 * functional.mse_loss(o.tanh(), o.detach()),
        "masked": lambda o, t: (cross_entropy(o, t, reduction="none") * (t > 0)).sum() / (t > 0).sum().clamp(min=1),
        "multi-margin": lambda o, t: functional.multi_margin_loss(o, t),
    }
    for name, loss in kinds.items():
        model = model_of.get(name) or mlp()
        yield (
            name,
            fit(
                model=model,
                data=classes(40),
                effective_batch=13,
                micro_batch=5,
                loss_fn=timed(loss),
                lr=0.002,
                shuffle=False,
            ),
        )
    yield "ignored", fit(model=mlp(), data=ignored, effective_batch=13, micro_batch=1)


@recorded
def notices(_place: Path) -> Outcomes:
    """Train what cannot be exact, or is probably not what was meant."""
    shared: dict[str, Any] = {"data": classes(26), "effective_batch": 13, "micro_batch": 5, "shuffle": False}
    weights = torch.tensor([0.3, 1.0, 2.0])
    kinds: dict[str, Callable[[Any, Any], torch.Tensor]] = {
        "coupled": lambda o, t: cross_entropy(o @ o.T, torch.arange(len(o))),
        "root": lambda o, t: functional.mse_loss(o, functional.one_hot(t, 3).float()).sqrt(),
        "product": lambda o, t: cross_entropy(o, t) * o.square().mean(),
        "detached count": lambda o, t: cross_entropy(o, t, reduction="sum") / 7.0,
        "largest": lambda o, t: cross_entropy(o, t, reduction="none").max(),
        "ratio": lambda o, t: (cross_entropy(o, t, reduction="none") * o.square().sum(1)).sum() / o.square().sum(),
        "not finite": lambda o, t: cross_entropy(o, t) * float("nan"),
    }
    for name, loss in kinds.items():
        yield name, fit(model=mlp(), loss_fn=timed(loss), **shared)
    yield (
        "contradicted",
        fit(
            model=mlp(),
            loss_fn=timed(lambda o, t: cross_entropy(o, t, weight=weights)),
            num_items=lambda b: 1,
            **shared,
        ),
    )
    nothing = classes(26)
    nothing[1][:] = -100
    yield "nothing counts", fit(model=mlp(), **{**shared, "data": nothing})
    half = classes(26)
    half[1][:13] = -100
    yield "a window in which nothing counts", fit(model=mlp(), **{**shared, "data": half})
    yield "more than there is", fit(model=mlp(), **{**shared, "effective_batch": 40})
    yield "norm", fit(model=noisy(), **shared)
    calls = {"number": 0}

    def later(outputs: Any, targets: Any) -> torch.Tensor:
        calls["number"] += 1
        return cross_entropy(outputs, targets) * (float("inf") if calls["number"] == 5 else 1.0)

    yield "later not finite", fit(model=mlp(), loss_fn=later, **shared)
    lazy = {"schedule": 0}

    def impure(progress: Any) -> int:
        lazy["schedule"] += 1
        return max(4, 10 - lazy["schedule"] // 3)

    yield "impure schedule", fit(model=mlp(), **{**shared, "effective_batch": impure})


# Data.


class Numbers(IterableDataset[Any]):
    """Yields samples in order."""

    def __iter__(self) -> Iterator[Any]:
        inputs, targets = classes(45)
        yield from zip(inputs, targets, strict=True)


class Random(Dataset[Any]):
    """Draws something for each sample that is read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator) + 0.1 * torch.randn(8), index % 3


@recorded
def data(_place: Path) -> Outcomes:
    """Read data of all kinds."""
    shared: dict[str, Any] = {"effective_batch": 14, "epochs": 2, "micro_batch": 5}
    inputs, targets = classes(45)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": cross_entropy(self.net(features), labels)}

    def of_names(model: Any, batch: Any) -> torch.Tensor:
        work(linear(len(batch["labels"])))
        return model(**batch)["loss"]

    yield (
        "names",
        fit(
            model=Named(),
            data={"features": inputs, "labels": targets},
            training_step=of_names,
            drop_last=True,
            **shared,
        ),
    )
    yield "dataset", fit(model=mlp(), data=TensorDataset(inputs, targets), **shared)
    yield "random dataset", fit(model=mlp(), data=Random(), **shared)
    yield "subset", fit(model=mlp(), data=Subset(Random(), range(3, 30)), **shared)
    yield "stream", fit(model=mlp(), data=Numbers(), **shared)
    batches = [(inputs[a:b], targets[a:b]) for a, b in ((0, 7), (7, 20), (20, 21), (21, 45))]
    yield "batches", fit(model=mlp(), data=batches, **shared)
    yield "generator", fit(model=mlp(), data=iter(batches), **{**shared, "epochs": 1})
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True, drop_last=True)
    yield "loader", fit(model=mlp(), data=loader, **shared)
    sampler = WeightedRandomSampler([1.0 + i % 4 for i in range(45)], 30, generator=torch.Generator().manual_seed(5))
    yield "sampler", fit(model=mlp(), data=DataLoader(TensorDataset(inputs, targets), sampler=sampler), **shared)
    yield "stream in a loader", fit(model=mlp(), data=DataLoader(Numbers(), batch_size=6), **shared)
    yield "stream, searching", fit(limit=150_000, model=wide(200), data=Numbers(), effective_batch=24, steps=9)


@recorded
def workers(_place: Path) -> Outcomes:
    """Read data by other processes."""
    loader = DataLoader(Random(), batch_size=4, shuffle=True, num_workers=2)
    yield "loader", replace(fit(model=mlp(), data=loader, effective_batch=14, epochs=2), peaks="none")
    ran = fit(model=mlp(), data=Random(), effective_batch=10, micro_batch=4, num_workers=2)
    yield "dataset", replace(ran, peaks="none")


@recorded
def lengths(_place: Path) -> Outcomes:
    """Cut windows of samples that differ in length."""
    shared: dict[str, Any] = {"collate_fn": padded, "training_step": next_token_step, "clip_norm": 1.0}
    yield "searching", fit(limit=260_000, model=Texts(), data=Ragged(), effective_batch=30, epochs=6, **shared)
    yield "fixed", fit(model=Texts(), data=Ragged(), effective_batch=30, micro_batch=8, **shared)
    yield (
        "validated",
        fit(
            limit=400_000,
            model=Texts(),
            data=Ragged(),
            validation_data=Ragged(20),
            effective_batch=45,
            epochs=2,
            noise_scale=True,
            **shared,
        ),
    )

    def alike(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([functional.pad(sample, (0, 40 - len(sample))) for sample in samples])

    yield (
        "all to one length",
        fit(
            limit=900_000, model=Texts(), data=Ragged(), effective_batch=30, epochs=2, **{**shared, "collate_fn": alike}
        ),
    )
    found = list(Ragged(48))
    batches = [padded(found[at : at + 6]) for at in range(0, 48, 6)]
    yield (
        "batches",
        fit(model=Texts(), data=batches, effective_batch=6, epochs=2, limit=300_000, training_step=next_token_step),
    )


# Schedules and budgets.


@recorded
def effective_batches(_place: Path) -> Outcomes:
    """Follow schedules of the effective batch."""
    kinds: dict[str, Any] = {
        "milestones": "8, 3:20, 7:13",
        "milestones in samples": "8, 30s:21",
        "milestones in epochs": schedules.Milestones(8, {1: 24}, by="epochs"),
        "linear": "linear 4:20 over 8",
        "geometric": "geometric 4:32 over 1e",
        "function": lambda progress: 7 + 3 * (progress.step // 4),
    }
    for name, kind in kinds.items():
        yield name, fit(limit=140_000, model=wide(200), data=classes(72), effective_batch=kind, epochs=2, optimizer=sgd)

    def by_loss(progress: Any) -> int:
        return 8 if not progress.reports or progress.reports[-1].loss > 1.09 else 16

    yield (
        "of reports",
        fit(model=mlp(), data=learnable(72), effective_batch=by_loss, samples=200, micro_batch=6, lr=0.02),
    )


@recorded
def learning_rates(_place: Path) -> Outcomes:
    """Move the learning rate with schedulers, and with the effective batch."""
    shared: dict[str, Any] = {"model": mlp(), "data": classes(72), "optimizer": sgd, "micro_batch": 9}
    runs: dict[str, dict[str, Any]] = {
        "one cycle": {
            "effective_batch": "8, 4:24",
            "epochs": 2,
            "lr_scheduler": lambda optimizer, n: OneCycleLR(optimizer, max_lr=0.1, total_steps=n),
            "lr_scaling": "linear",
            "base_batch": 8,
        },
        "root": {"effective_batch": "linear 8:32 over 2e", "epochs": 3, "lr_scaling": "sqrt", "base_batch": 16},
        "cosine": {"effective_batch": 20, "steps": 11, "lr_scheduler": CosineAnnealingLR},
        "adam": {"effective_batch": "8, 4:24", "optimizer": None, "lr": 0.004, "lr_scaling": "sqrt", "base_batch": 8},
    }
    for name, options in runs.items():
        yield name, fit(**{**shared, "model": mlp(), **options})


@recorded
def noise(_place: Path) -> Outcomes:
    """Measure the noise scale, and follow it."""
    yield "measured", fit(model=mlp(), data=learnable(96), effective_batch=24, epochs=3, noise_scale=True)
    yield (
        "measured, cut",
        fit(
            limit=160_000,
            model=wide(200),
            data=learnable(96),
            effective_batch=32,
            epochs=3,
            noise_scale=True,
            clip_norm=0.3,
        ),
    )
    yield (
        "followed",
        fit(
            limit=200_000,
            model=wide(200),
            data=learnable(160),
            effective_batch="noise 8:64 smoothing 0.7 patience 3",
            samples=1200,
            optimizer=sgd,
        ),
    )
    yield "one micro-batch", fit(model=mlp(), data=learnable(48), effective_batch=12, micro_batch=12, noise_scale=True)


@recorded
def budgets(_place: Path) -> Outcomes:
    """Meet budgets in steps, samples and epochs, with and without short windows."""
    for name, options in {
        "an epoch": {},
        "epochs": {"epochs": 2},
        "drop_last": {"epochs": 2, "drop_last": True},
        "steps": {"steps": 4},
        "samples": {"samples": 30},
        "samples, drop_last": {"samples": 30, "drop_last": True},
        "schedule": {"effective_batch": "8, 2:5", "epochs": 2},
        "schedule, drop_last": {"effective_batch": "8, 10s:5", "epochs": 2, "drop_last": True},
        "validate_every": {"epochs": 2, "validate_every": 10, "validation_data": classes(5, seed=2)},
        "validate at the end": {"effective_batch": 5, "steps": 3, "validate_every": 100, "validation_data": classes(5)},
        "seldom": {"epochs": 2, "validate_every": 25, "validation_data": classes(5, seed=2)},
    }.items():
        given: dict[str, Any] = {"effective_batch": 8, "micro_batch": 3, **options}
        yield name, fit(model=mlp(), data=classes(20), optimizer=sgd, **given)


@recorded
def plans(_place: Path) -> Outcomes:
    """Repeat recorded plans, refuse wrong ones, and cut windows by arithmetic alone."""
    options: dict[str, Any] = {"data": classes(96), "effective_batch": 40, "epochs": 4}
    first = fit(limit=160_000, model=wide(200), **options)
    yield "searched", first
    recorded_plans = [report.micro_batches for report in first.result.history]
    yield "repeated", fit(model=wide(200), micro_batch=recorded_plans, **options)
    yield "too few", fit(model=wide(200), micro_batch=recorded_plans[:4], **options)
    yield "wrong", fit(model=wide(200), micro_batch=[(20, 20), (20, 21)], **options)
    yield (
        "arithmetic",
        [autoaccum.plan(*numbers) for numbers in ((256, 100), (7, 2, 2), (3, 5, 4), (1, 1), (97, 8), (1000, 64, 3))],
    )


# Validation.


@recorded
def validation(_place: Path) -> Outcomes:
    """Validate with metrics, in as much memory as there is, with less than there was."""

    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - functional.one_hot(targets, 3)).square()

    metrics = {"right": right, "squared": squared}
    yield (
        "metrics",
        fit(
            limit=170_000,
            model=wide(200),
            data=learnable(90),
            effective_batch=30,
            epochs=4,
            validation_data=learnable(70, seed=2),
            metrics=metrics,
        ),
    )
    ignored = classes(30, seed=2)
    ignored[1][::4] = -100
    yield (
        "ignored",
        fit(model=noisy(), data=classes(40), effective_batch=20, micro_batch=8, epochs=2, validation_data=ignored),
    )
    step = {"calls": 0}

    def runs_out(model: Any, batch: Any) -> torch.Tensor:
        work(linear(len(batch[1])))
        if not model.training:
            step["calls"] += 1
            if len(batch[1]) > 3 and step["calls"] < 40:
                raise torch.OutOfMemoryError("Simulated")
        return cross_entropy(model(batch[0]), batch[1])

    yield (
        "out of memory",
        fit(
            model=mlp(),
            data=classes(60),
            effective_batch=20,
            micro_batch=10,
            epochs=4,
            training_step=runs_out,
            validation_data=classes(25, seed=2),
            metrics={"right": lambda model, batch: model(batch[0]).argmax(1) == batch[1]},
        ),
    )

    def tells(record: Any, memory: Any) -> None:
        if type(record).__name__ == "Validated":
            memory.limit = {1: 120_000, 2: 240_000}.get(record.epoch, memory.limit)

    yield (
        "less than there was",
        fit(
            limit=240_000,
            model=wide(200),
            data=classes(90),
            effective_batch=30,
            epochs=5,
            validation_data=TensorDataset(*classes(50, seed=2)),
            tells=tells,
            optimizer=sgd,
        ),
    )
    yield (
        "means",
        caught(
            lambda: autoaccum.fit(
                mlp(),
                classes(8),
                effective_batch=4,
                loss_fn=cross_entropy,
                validation_data=classes(8),
                metrics={"mean": lambda o, t: (o.argmax(1) == t).float().mean()},
                device="cpu",
            )
        ),
    )


# Directories.


def stops_after(step: int, error: BaseException) -> Callable[[Any], None]:
    """Return a callback that ends a run."""

    def stops(record: Any) -> None:
        if is_report(record) and record.step == step:
            raise error

    return stops


@recorded
def run_directory(place: Path) -> Outcomes:
    """Write checkpoints, keep some of them, and go on after the end."""
    options: dict[str, Any] = {
        "data": learnable(80),
        "effective_batch": 16,
        "limit": 140_000,
        "optimizer": sgd,
        "validation_data": learnable(24, seed=2),
        "run_dir": place / "run",
    }
    yield "first", fit(model=wide(200), epochs=2, checkpoint_every=2, keep_checkpoints=3, **options)
    yield "left", Directory(place / "run")
    yield "again", fit(model=wide(200), epochs=2, **options)
    yield "further", fit(model=wide(200), epochs=3, keep_checkpoints=1, checkpoint_every="epoch", **options)
    yield "left by that", Directory(place / "run")
    yield "anew", fit(model=wide(200), epochs=1, resume=False, checkpoint_every="20ms", **options)
    yield "left by both", Directory(place / "run")
    yield "another model", fit(model=wide(100), epochs=1, **options)
    yield "another seed", fit(model=wide(200), epochs=1, seed=4, **options)
    yield "nothing there", fit(model=wide(200), epochs=1, resume=True, **{**options, "run_dir": place / "other"})


def _resumable() -> dict[str, Any]:
    """Return arguments of a run that has many states."""
    return {
        "model": noisy(),
        "data": learnable(330),
        "effective_batch": "48, 4:80",
        "epochs": 4,
        "lr_scheduler": CosineAnnealingLR,
        "lr_scaling": "sqrt",
        "base_batch": 48,
        "noise_scale": True,
        "clip_norm": 1.0,
        "validation_data": learnable(20, seed=2),
        "metrics": {"right": right},
        "validate_every": 150,
        "limit": 240_000,
        "run_dir": "run",
        "checkpoint_every": 3,
    }


@recorded
def resumed(place: Path) -> Outcomes:
    """Stop runs after some window, and go on with them."""
    yield "stopped", fit(**_resumable(), callbacks=[stops_after(4, autoaccum.StopTraining())])
    yield "left", Directory(place / "run")
    yield "failed", fit(**_resumable(), callbacks=[stops_after(11, RuntimeError("no more"))])
    yield "to the end", fit(**_resumable())
    yield "finished", fit(**_resumable())
    searching: dict[str, Any] = {
        "data": classes(256),
        "effective_batch": 64,
        "steps": 24,
        "loss_fn": timed(cross_entropy, stepped),
        "limit": 230_000,
        "run_dir": "timing",
        "checkpoint_every": 1,
    }
    for step in (1, 3, 9, 15):
        stops = [stops_after(step, autoaccum.StopTraining())]
        yield f"searching, to {step}", fit(model=wide(), callbacks=stops, **searching)
    yield "searching, to the end", fit(model=wide(), **searching)
    of_lengths: dict[str, Any] = {
        "data": Ragged(),
        "collate_fn": padded,
        "training_step": next_token_step,
        "effective_batch": 25,
        "epochs": 3,
        "limit": 260_000,
        "run_dir": "lengths",
        "checkpoint_every": 2,
    }
    yield "lengths, stopped", fit(model=Texts(), callbacks=[stops_after(3, autoaccum.StopTraining())], **of_lengths)
    yield "lengths, to the end", fit(model=Texts(), **of_lengths)
    scaled: dict[str, Any] = {
        "data": Numbers(),
        "effective_batch": 10,
        "epochs": 2,
        "precision": "fp16",
        "micro_batch": 4,
        "run_dir": "scaled",
        "checkpoint_every": 2,
    }
    yield "stream in float16, failed", fit(model=mlp(), callbacks=[stops_after(7, KeyError("gone"))], **scaled)
    yield "stream in float16, to the end", fit(model=mlp(), **scaled)
    path = max((place / "run" / "checkpoints").glob("step-*")) / "state.pt"
    path.write_bytes(path.read_bytes()[:-1])
    yield "with a damaged checkpoint", fit(**{**_resumable(), "epochs": 5})


@recorded
def cached(place: Path) -> Outcomes:
    """Begin from what earlier runs have found."""
    options: dict[str, Any] = {"data": classes(256), "effective_batch": 64, "cache": True, "loss_fn": _stepped_loss}
    yield "first", fit(limit=230_000, model=wide(), steps=24, **options)
    yield "second", fit(limit=230_000, model=wide(), steps=8, **options)
    yield "in less memory", fit(limit=150_000, model=wide(), steps=12, **options)
    yield "in more memory", fit(limit=500_000, model=wide(), steps=12, **options)
    yield "another window", fit(limit=230_000, model=wide(), steps=12, **{**options, "effective_batch": 100})
    yield "another model", fit(limit=230_000, model=wide(300), steps=8, **options)
    lengths_options: dict[str, Any] = {"collate_fn": padded, "training_step": next_token_step, "cache": True}
    for name in ("lengths", "lengths again"):
        yield (
            name,
            fit(limit=260_000, model=Texts(), data=Ragged(), effective_batch=30, epochs=3, **lengths_options),
        )
    found = [json.loads(path.read_text()) for path in (place / "cache").glob("*.json")]
    yield "kept", sorted(found, key=lambda document: json.dumps(document["trials"]))
    yield "command", command("cache", "--json")
    yield "cleared", command("cache", "clear", "--json")


def _stepped_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Return a loss by a name that is the same in every process."""
    work(stepped(len(targets)))
    return cross_entropy(outputs, targets)


# Loops of one's own.


def accumulate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    limit: int | str = "64MiB",
    optimizer: torch.optim.Optimizer | None = None,
    backward: bool = False,
    tells: Callable[[int, Any], None] | None = None,
    **options: Any,
) -> Stepped:
    """Run an ``autoaccum.Accumulator`` over batches."""
    if "training_step" not in options:
        options = {"loss_fn": timed(cross_entropy), **options}
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    found = Stepped(model, optimizer, [])
    with simulated_memory(limit) as memory:
        try:
            accumulator = autoaccum.Accumulator(model, optimizer, **options)
            found.events = accumulator.events
            for number, batch in enumerate(batches):
                if tells is not None:
                    tells(number, memory)
                loss = (accumulator.backward if backward else accumulator.step)(batch)
                if backward:
                    optimizer.step()
                found.steps.append([loss, accumulator.micro_batches, accumulator.grad_norm])
        except Exception as error:
            found.error = error.with_traceback(None)
    return found


def batched(rows: tuple[torch.Tensor, ...], sizes: Iterable[int]) -> list[tuple[torch.Tensor, ...]]:
    """Cut rows into batches of these sizes, from the beginning again where they end."""
    found, at = [], 0
    for size in sizes:
        at = 0 if at + size > len(rows[0]) else at
        found.append(tuple(row[at : at + size] for row in rows))
        at += size
    return found


@recorded
def accumulators(_place: Path) -> Outcomes:
    """Step, in loops of one's own."""
    rows = classes(256)
    yield "steps", accumulate(wide(), batched(rows, [64] * 24), limit=230_000, loss_fn=timed(cross_entropy, stepped))
    sizes = [8, 30, 30, 7, 64, 64, 64, 20, 64, 64, 64, 64, 1, 64, 64, 64, 64, 64, 90, 90, 90, 90]
    yield "varying", accumulate(wide(), batched(rows, sizes), limit=230_000, clip_norm=0.5)
    yield "fixed", accumulate(noisy(), batched(rows, [20, 33, 20]), micro_batch=8)
    yield "backward", accumulate(mlp(), batched(rows, [30] * 6), micro_batch=8, clip_norm=0.1, backward=True)
    model = mlp(torch.float64)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    doubles = rows[0].double(), rows[1]
    yield "closure", accumulate(model, batched(doubles, [60] * 3), optimizer=lbfgs, micro_batch=25)
    yield "float16", accumulate(mlp(), batched(rows, [30] * 5), micro_batch=8, precision="fp16")

    def tells(number: int, memory: Any) -> None:
        memory.limit = {10: 140_000, 16: 300_000}.get(number, memory.limit)

    yield "moving memory", accumulate(wide(), batched(rows, [64] * 40), limit=230_000, tells=tells)
    found = list(Ragged(80))
    of_lengths = [padded(found[at : at + 16]) for at in range(0, 80, 16)] * 4
    yield "lengths", accumulate(Texts(), of_lengths, limit=260_000, training_step=next_token_step)
    yield "nothing fits", accumulate(wide(), batched(rows, [64] * 4), limit=86_000)
    yield "empty", accumulate(mlp(), [(rows[0][:0], rows[1][:0])])
    yield "ragged", accumulate(mlp(), [(rows[0][:5], rows[1][:4])])
    yield "not a scalar", accumulate(mlp(), batched(rows, [8]), loss_fn=lambda o, t: o)
    norms = noisy()
    modes: list[Any] = []

    def switches(number: int, _memory: Any) -> None:
        norms[1].train(number % 2 == 0)
        modes.append(number)

    yield "modes", accumulate(norms, batched(rows, [9] * 5), limit=300_000, tells=switches)


# Probes.


@recorded
def probes(_place: Path) -> Outcomes:
    """Look for the largest micro-batch on trials that are thrown away."""

    def probe(limit: int | str, model: nn.Module, rows: Any, **options: Any) -> Any:
        if "training_step" not in options and not isinstance(model, WithLoss):
            options = {"loss_fn": timed(cross_entropy), **options}
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with simulated_memory(limit):
            try:
                found = autoaccum.probe(model, rows, device="cpu", **options)
            except Exception as error:
                return error.with_traceback(None)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        return found

    yield "wide", probe(230_000, wide(), classes(256), effective_batch=200)
    yield "all of it", probe("64MiB", mlp(), classes(70), effective_batch=64)
    yield "schedule", probe(400_000, wide(), classes(256), effective_batch="16, 10:120", optimizer=sgd)
    yield "norms", probe(260_000, noisy(), classes(256), headroom=0.2, precision="bf16")
    yield "transformer", probe(700_000, TransformerLM(), texts(60), training_step=token_step, max_micro_batch=50)
    yield "lengths", probe(400_000, Texts(), Ragged(), training_step=next_token_step, collate_fn=padded)
    yield "limited", probe(400_000, wide(), classes(256), memory_limit="200KB")
    yield "nothing fits", probe(86_000, wide(), classes(256), headroom=0.0)
    yield "not even the model", probe(30_000, wide(), classes(256))
    calls = {"number": 0}

    def fails(outputs: Any, targets: Any) -> torch.Tensor:
        calls["number"] += 1
        if len(targets) > 37:
            raise torch.OutOfMemoryError("Simulated")
        work(linear(len(targets)))
        return cross_entropy(outputs, targets)

    yield "out of memory", probe("64MiB", mlp(), classes(256), loss_fn=fails)
    yield "trials", calls["number"]

    def at_operation(n: int) -> Any:
        with oom_at(n):
            return probe("64MiB", mlp(), classes(64))

    yield "at an operation", at_operation(60)


# Sweeps.


def small(width: int = 200) -> dict[str, Any]:
    """Return arguments of a trial."""
    torch.manual_seed(7)
    return {
        "model": nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)),
        "data": learnable(96),
        "validation_data": learnable(32, seed=2),
        "loss_fn": timed(cross_entropy),
        "metrics": {"right": right},
        "device": "cpu",
    }


def sweep(limit: int | str = 200_000, make: Any = small, **options: Any) -> Drawn | BaseException:
    """Run ``autoaccum.sweep``."""
    given: dict[str, Any] = {"lr": (1e-3, 1e-1), "effective_batch": [16, 32], "progress": False, **options}
    with simulated_memory(limit):
        try:
            return Drawn(autoaccum.sweep(make, **given))
        except (Exception, KeyboardInterrupt) as error:
            return error.with_traceback(None)


@recorded
def sweeps(place: Path) -> Outcomes:
    """Search for learning rate and effective batch."""
    memory = optuna.storages.InMemoryStorage()
    yield "in memory", sweep(storage=memory, directory=place / "a", num_trials=3, samples=192)
    yield "going on", sweep(storage=memory, directory=place / "a", num_trials=4, samples=192)
    yield "a trial", Directory(place / "a" / "trial-0000")
    pruner = optuna.pruners.PercentilePruner(50.0, n_startup_trials=1, n_warmup_steps=0)
    yield (
        "pruned",
        sweep(directory=place / "b", num_trials=4, sampler="random", pruner=pruner, lr=[1e-6, 0.03], seed=5, epochs=2),
    )
    yield (
        "metric",
        sweep(
            directory=place / "c",
            metric="right",
            direction="maximize",
            sampler="grid",
            lr=[1e-3, 1e-1],
            num_trials=3,
            samples=96,
            cache=False,
        ),
    )

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 50, 400), "clip_norm": trial.suggest_float("clip_norm", 0.1, 1)}

    yield (
        "front",
        sweep(
            directory=place / "d",
            metric=("validation_loss", "seconds"),
            search_space=space,
            num_trials=3,
            samples=96,
            storage=f"journal:{place / 'journal.log'}",
        ),
    )
    inside: dict[str, Any] = {"num_trials": 2, "samples": 96, "storage": memory}
    yield "not fitting", sweep(20_000, directory=place / "e", study_name="not fitting", **inside)
    rough: dict[str, Any] = {"make": _rough, "lr": [1e30, 1e31]}
    yield "diverging", sweep(directory=place / "f", study_name="diverging", **rough, **inside)
    yield "no metric", sweep(directory=place / "g", metric="left", direction="maximize", **inside)
    yield "wrong argument", sweep(directory=place / "g", run_dir="here")
    yield "nothing to search", sweep(directory=place / "g", lr=0.1, effective_batch=16)
    yield "other settings", sweep(storage=memory, directory=place / "a", num_trials=4, samples=100)
    yield "report", command("report", str(place / "b"), "--json", page=place / "b" / "report.html")


def _rough(lr: float) -> dict[str, Any]:
    return {**small(), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr)}


@recorded
def sweep_resumed(place: Path) -> Outcomes:
    """Interrupt a sweep inside of a trial, and go on."""
    options: dict[str, Any] = {"directory": place / "sweep", "num_trials": 3, "samples": 192, "study_name": "resumed"}
    ends = {"after": 15}

    def interrupts(record: Any) -> None:
        if is_report(record):
            ends["after"] -= 1
            if ends["after"] == 0:
                raise KeyboardInterrupt

    yield "interrupted", sweep(callbacks=[interrupts], checkpoint_every=2, **options)
    yield "left", Drawn(optuna.load_study(study_name="resumed", storage=f"sqlite:///{place / 'sweep' / 'study.db'}"))
    yield "to the end", sweep(checkpoint_every=2, **options)


# The command line.


def command(*argv: str, page: Path | None = None, limit: int | str = 200_000) -> Command:
    """Run one in this process."""
    out, err = io.StringIO(), io.StringIO()
    inside = nullcontext() if argv[0] in ("report", "plan", "cache") else simulated_memory(limit)
    with inside, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = app.main(list(argv))
        except SystemExit as error:
            code = int(error.code or 0)
    return Command(code, out.getvalue(), err.getvalue(), page if page is not None and page.exists() else None)


@recorded
def commands(place: Path) -> Outcomes:
    """Plan, probe, fit, sweep and report by the command line."""
    given = str(HERE / "recipe.py")
    yield "plan", command("plan", "--effective-batch", "256", "--max-micro-batch", "100", "--world-size", "4", "--json")
    yield "plan as text", command("plan", "--effective-batch", "97", "--max-micro-batch", "8")
    yield "probe", command("probe", given, "--effective-batch", "64", "--json")
    yield "probe as text", command("probe", given, "--effective-batch", "64")
    quiet = ("--no-progress", "--run-dir", "none")
    fitting = ("fit", given, "--effective-batch", "48", "--run-dir", "run", "--checkpoint-every", "4")
    yield "fit", command(*fitting, "--epochs", "3", "--json")
    yield "fit again", command(*fitting, "--epochs", "4", "--lr-scaling", "sqrt", "--json")
    yield "fit further", command(*fitting, "--epochs", "4", "--json")
    yield "fit as text", command("fit", given, "--effective-batch", "8, 2:24", "--steps", "6", *quiet)
    yield "report", command("report", "run", "--json", page=place / "run" / "report.html")
    again = ("fit", given, "--effective-batch", "32", "--run-dir", "other", "--epochs", "2", "--clip-norm", "0.5")
    yield "another", command(*again, "--json")
    yield (
        "both",
        command("report", "run", "other", "--json", "--output", "both", page=place / "both" / "comparison.html"),
    )
    sweeping = ("sweep", given, "--lr", "1e-3:1e-1", "--effective-batch", "16,32", "--directory", "sweep")
    yield "sweep", command(*sweeping, "--trials", "2", "--samples", "96", "--no-progress", "--json")
    yield "sweep as text", command(*sweeping, "--trials", "2", "--samples", "96", "--no-progress")
    for name, argv in {
        "no batch": ("fit", given),
        "no recipe": ("fit", "nowhere.py", "--effective-batch", "4"),
        "no function": ("fit", f"{given}:nothing", "--effective-batch", "4"),
        "broken": ("fit", f"{given}:broken", "--effective-batch", "4"),
        "no number": ("fit", given, "--effective-batch", "4", "--steps", "many"),
        "no option": ("fit", given, "--effective-batches", "4"),
        "zero": ("plan", "--effective-batch", "0", "--max-micro-batch", "1"),
        "no run": ("report", "nowhere"),
    }.items():
        yield name, command(*argv)
    yield "too little", command("fit", given, "--effective-batch", "48", "--json", limit=20_000)


# Errors.


@recorded
def errors(place: Path) -> Outcomes:
    """Call wrongly."""
    rows = classes(20)

    def wrong(**options: Any) -> BaseException:
        given: dict[str, Any] = {"model": mlp(), "data": rows, "effective_batch": 8, "loss_fn": cross_entropy}
        return caught(lambda: autoaccum.fit(**{**given, "device": "cpu", "progress": False, "cache": False, **options}))

    def branched(model: Any, batch: Any) -> torch.Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        return loss

    kinds: dict[str, dict[str, Any]] = {
        "effective_batch 0": {"effective_batch": 0},
        "effective_batch of a wrong type": {"effective_batch": 2.5},
        "schedule": {"effective_batch": "8, 3e:16, 2e:20"},
        "another schedule": {"effective_batch": "linear 8:16 for 3"},
        "two losses": {"training_step": token_step},
        "two budgets": {"epochs": 1, "steps": 2},
        "steps": {"steps": -1},
        "micro_batch": {"micro_batch": 0},
        "plans": {"micro_batch": [(4, 0)]},
        "memory_limit": {"memory_limit": "8 bananas"},
        "headroom": {"headroom": 1.5},
        "precision": {"precision": "fp8"},
        "clip_norm": {"clip_norm": -1.0},
        "device": {"device": "toaster"},
        "metrics": {"metrics": {"right": right}},
        "validate_every": {"validate_every": 0, "validation_data": rows},
        "validate without data": {"validate_every": 5},
        "checkpoint_every": {"run_dir": place / "run", "checkpoint_every": "10 parsecs"},
        "lr and optimizer": {"lr": 0.1, "optimizer": sgd},
        "foreign optimizer": {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)},
        "no parameters": {"model": nn.ReLU()},
        "lr_scaling": {"lr_scaling": "linear"},
        "callbacks": {"callbacks": [3]},
        "empty data": {"data": (rows[0][:0], rows[1][:0])},
        "ragged data": {"data": (rows[0], rows[1][:5])},
        "no data": {"data": 5},
        "loss is no scalar": {"loss_fn": lambda o, t: o},
        "loss without a graph": {"loss_fn": lambda o, t: cross_entropy(o, t).detach()},
        "loss is no tensor": {"loss_fn": lambda o, t: 1.0},
        "loss calls backward": {"loss_fn": None, "training_step": branched},
        "loss is not finite": {"loss_fn": lambda o, t: cross_entropy(o, t) / 0},
        "small noise": {"effective_batch": schedules.NoiseScale(2, 8), "model": noisy()},
        "iterator": {"data": iter([rows]), "epochs": 2},
        "validation iterator": {"validation_data": iter([rows])},
        "drop_last of everything": {"effective_batch": 30, "drop_last": True},
        "num_workers": {"num_workers": -1},
        "unknown": {"effective_batches": 3},
    }
    for name, options in kinds.items():
        yield name, wrong(**options)
    yield "plan", caught(lambda: autoaccum.plan(8, 0))
    yield "simulated_memory", caught(lambda: simulated_memory("a lot"))
    yield "oom_at", caught(lambda: oom_at(0))
    yield (
        "closure in float16",
        accumulate(*_of_lbfgs(), precision="fp16", optimizer=torch.optim.LBFGS(mlp().parameters())).error or "nothing",
    )


def _of_lbfgs() -> tuple[nn.Module, list[Any]]:
    return mlp(), []


# What is left.


@recorded
def trainers(place: Path) -> Outcomes:
    """Look at a trainer while it runs, and log what it does."""
    seen: list[Any] = []
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    logger = logging.Logger("record")
    logger.addHandler(Kept())
    from autoaccum.reporting import LoggingReporter

    for name, run_dir in (("in memory", None), ("in a directory", place / "run")):
        with simulated_memory(230_000):
            trainer = autoaccum.Trainer(
                wide(),
                classes(128),
                effective_batch=64,
                loss_fn=timed(cross_entropy, crowded),
                epochs=6,
                device="cpu",
                progress=False,
                cache=False,
                run_dir=run_dir,
                validation_data=classes(16),
                callbacks=[
                    LoggingReporter(logger, every=0.2),
                    lambda _: seen.append([trainer.step, trainer.samples_seen, len(trainer.history)]),  # noqa: B023
                ],
            )
            seen.append([trainer.num_steps, trainer.num_samples, str(trainer.schedule)])
            result = trainer.fit()
        yield name, Ran(result, [*result.history, *result.events], peaks="about" if run_dir else "exact")
        yield f"{name}: seen", copy.copy(seen)
        yield f"{name}: logged", Lines([line for line in copy.copy(lines) if "/" not in line or "saved" not in line])
        seen.clear()
        lines.clear()
