"""Trainers of sentence-transformers: their losses compare all samples of a window, embedded in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoaccum.integrations.trainer_batches import is_one_of
from autoaccum.loss.sentences import sentence_loss
from autoaccum.loss.windowed import Embedded, embedded, joined

_DATASET = "dataset_name"
"""The entry of a batch that says which of several datasets it is of: all samples of a batch are of one."""


class SentenceLosses:
    """The losses of a trainer of sentences: one, or one for each of its datasets."""

    def __init__(self, losses: nn.Module | Mapping[str, nn.Module]) -> None:
        """Set up for losses of sentence-transformers.

        Raises:
            ArgumentError: one makes micro-batches of its own.
        """
        given: Mapping[Any, nn.Module] = losses if isinstance(losses, Mapping) else {None: losses}
        self._windows = {name: sentence_loss(loss) for name, loss in given.items()}
        self._dataset: Any = next(iter(given))
        self._modules = tuple(given.values())
        self._embed = self._windows[self._dataset]["embed"]  # the same for all of them

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Take note of which dataset the coming batch is of."""
        # By an attribute, and not by the batch: a loss that is given the batch has all of it on the device.
        if len(self._windows) > 1:
            self._dataset = batch[_DATASET]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``Accumulator`` for them."""

        def loss_fn(found: Any) -> Any:
            return self._loss(found)

        # By which parameters of the losses' own are found, as of a classifier over pairs: they are trained too.
        loss_fn.modules = self._modules  # type: ignore[attr-defined]
        return {"loss_scope": "window", "embed": self._embed, "loss_fn": loss_fn}

    def _loss(self, found: Any) -> Any:
        """Return the loss of embeddings; of one that has parts their sum, with the parts beside it."""
        computed: Any = self._windows[self._dataset]["loss_fn"](found)
        if not isinstance(computed, Mapping):
            return computed
        return torch.stack(list(computed.values())).sum(), {name: part.detach() for name, part in computed.items()}

    @torch.no_grad()
    def of_pieces(self, trainer: Any, model: Any, pieces: list[Any]) -> torch.Tensor:
        """Return the loss of a batch that is embedded in pieces, without a gradient."""
        # One after the other, of which no more than the embeddings are kept.
        parts: list[Embedded] = [embedded(self._embed(model, piece), None) for piece in pieces]
        leaves = joined([part.leaves for part in parts])
        computed = self._loss(pytree.tree_unflatten(leaves, parts[0].spec))
        if isinstance(computed, tuple):
            trainer.track_loss_components(computed[1])
            computed = computed[0]
        loss: torch.Tensor = computed.detach()
        return loss


def sentence_losses_of(trainer: Any) -> SentenceLosses | None:
    """Return the losses of a trainer of sentence-transformers that compare the samples of a window; None of others.

    Raises:
        ArgumentError: a loss makes micro-batches of its own.
    """
    # A loss that the user's own class computes may be anything: it is run as it is, and measured.
    is_stock = type(trainer).compute_loss.__module__.startswith("sentence_transformers.")
    if not is_stock or not is_one_of(type(trainer), ("SentenceTransformerTrainer",)):
        return None
    return SentenceLosses(trainer.loss)
