"""Stock LightningModules, and runs of them with and without autoaccum that are the same but for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
IGNORED = -100
ROOT = Path(__file__).parents[2]
OF_CHILDREN = {**os.environ, "PYTHONPATH": str(ROOT)}
"""The environment of processes that import these modules."""


QUIET = [*map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning"))]
"""Marks of tests that train by Lightning, which warns of much."""


class Stock(pl.LightningModule):
    """What all of them share: an optimizer whose rate falls with each step."""

    optimizer: Any = torch.optim.SGD
    interval = "step"

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


class Classifier(Stock):
    """An MLP as Lightning's docs show it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", (logits.argmax(-1) == y).double().mean())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", cross_entropy(logits, y))
        self.log("val_right", (logits.argmax(-1) == y).double().sum(), reduce_fx="sum")


class Convolutional(Stock):
    """Convolutions with GroupNorm and dropout."""

    optimizer = torch.optim.AdamW

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Flatten(), nn.Linear(4 * 16, 3)),
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log_dict({"train_loss": loss, "weight": self.net[0].weight.norm()})
        return loss


class Tagger(Stock):
    """A small transformer whose loss is a mean over the tokens that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch["tokens"])
        loss = cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss.detach())
        return loss


class LanguageModel(Stock):
    """A Hugging Face GPT-2 in a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # seconds, which processes of other modules do without

        config = GPT2Config(vocab_size=19, n_positions=8, n_embd=8, n_layer=1, n_head=2, loss_type="ForCausalLM")
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.use_cache = False
        self.net = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.net(input_ids=batch["tokens"], labels=batch["labels"])
        loss, logits = outputs.loss, outputs.logits
        if logits.dtype == torch.float64:  # of which transformers itself makes float32
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss)
        return loss


class TwoLosses(Stock):
    """An autoencoder that classifies, and returns a dict of its losses and of what it has computed."""

    optimizer = torch.optim.Adam

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        code = self.encoder(x).tanh()
        rebuilt, logits = mse_loss(self.decoder(code), x), cross_entropy(self.head(code), y)
        loss = rebuilt + 0.5 * logits
        self.log("train_loss", loss)
        return {"loss": loss, "rebuilt": rebuilt, "codes": code}


class Normed(Stock):
    """Layers that normalise by samples alone, in a net with a residual, and a loss of regression."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = mse_loss(self.last(x + self.norm(self.first(x).relu())).squeeze(-1), y.to(x.dtype))
        self.log("train_loss", loss)
        return loss


class Rows(Dataset[Any]):
    """Samples that are dicts."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


MODULES = [Classifier, Convolutional, Tagger, LanguageModel, TwoLosses, Normed]


def data_of(kind: type, dtype: torch.dtype = torch.float64, samples: int = 60) -> Dataset[Any]:
    """Return data for one of them."""
    drawn = torch.Generator().manual_seed(5)
    if kind is Tagger or kind is LanguageModel:
        tokens = torch.randint(11, (samples, 6), generator=drawn)
        tags = torch.randint(5, (samples, 6), generator=drawn)
        # So that micro-batches count far fewer, or more, tokens than their share of the samples.
        tags[torch.arange(6) >= torch.randint(2, 7, (samples, 1), generator=drawn)] = IGNORED
        return Rows(tokens=tokens, **{"tags" if kind is Tagger else "labels": tags})
    shape = (samples, 1, 6, 6) if kind is Convolutional else (samples, 8)
    return TensorDataset(torch.randn(shape, generator=drawn).to(dtype), torch.randint(3, (samples,), generator=drawn))


class Watch(pl.Callback):
    """Keeps the gradients, losses, rates and logged values of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[list[torch.Tensor]] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.returned: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.gradients.append([p.grad.clone() for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.returned.append(outputs)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainer_of(callbacks: Sequence[pl.Callback] = (), **options: Any) -> pl.Trainer:
    """Return a Trainer that says and writes nothing."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    return pl.Trainer(**{**quiet, "max_steps": 20, "max_epochs": -1, **options}, callbacks=list(callbacks))


def module_of(kind: type, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return a module with the weights of a seed."""
    torch.manual_seed(3)
    return kind(**options).to(dtype)


def run(
    module: Any, batch: int, *callbacks: pl.Callback, data: Any = None, shuffle: bool = True, **options: Any
) -> Watch:
    """Train a module on its data with a DataLoader of that batch; return what was seen."""
    watch = Watch()
    dtype = next(module.parameters()).dtype
    data = data_of(type(module), dtype) if data is None else data
    torch.manual_seed(7)
    trainer = trainer_of([*callbacks, watch], **options)
    trainer.fit(module, DataLoader(data, batch_size=batch, shuffle=shuffle) if isinstance(data, Dataset) else data)
    return watch


def farthest(one: Sequence[Sequence[torch.Tensor]], other: Sequence[Sequence[torch.Tensor]]) -> float:
    """Return how far the gradients of any step are apart, as a part of the norm of those of that step."""
    found = 0.0
    for left, right in zip(one, other, strict=True):
        apart = sum(float((a - b).double().square().sum()) for a, b in zip(left, right, strict=True))
        whole = sum(float(b.double().square().sum()) for b in right)
        found = max(found, (apart / whole) ** 0.5)
    return found
