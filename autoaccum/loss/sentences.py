"""Ready ``embed`` and ``loss_fn`` for losses of sentence-transformers, which is not imported here.

::

    fit(model, data, effective_batch=4096, **sentence_loss(MultipleNegativesRankingLoss(model)))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.loss.stated import WindowArguments

_OF_SENTENCES = "a loss of sentence-transformers, a module that holds its encoder as .model"
_ENCODERS = ("model", "sentence_embedder")
"""The names that losses hold their encoder by: those of triplets in a batch have a name of their own."""
_OF_COLUMN = (
    "input_ids",
    "sentence_embedding",
    "pixel_values",
    "input_features",
    "input_values",
    "pixel_values_videos",
)
"""Entries by one of which a column of a collated batch is known, behind its name."""
_FACTS = ("device", "dtype", "get_embedding_dimension", "get_sentence_embedding_dimension")
"""What a loss may ask of its encoder beside embeddings: they say nothing of samples."""


def sentence_loss(loss: nn.Module) -> WindowArguments:
    """Return the arguments for a loss of sentence-transformers, over the whole window.

    The loss runs as it is, with its encoder replaced by one that hands out the embeddings of the window. So it may be
    any that needs ``sentence_embedding`` and labels alone: ``MultipleNegativesRankingLoss``, ``TripletLoss``,
    ``CosineSimilarityLoss``, ``CoSENTLoss``, ``MatryoshkaLoss`` around one of them. Pass ``loss.model`` as the model.

    A batch is what the loss is called with, ``(features, labels)``, or what the collator of sentence-transformers
    makes: a dict whose entries begin with a column's name, ``anchor_input_ids``, ``anchor_attention_mask``, ``label``.

    Args:
        loss: called with a list of dicts and labels; labels are None where a batch has none.

    Raises:
        ArgumentTypeError: it holds no encoder.
        ArgumentError: it makes micro-batches of its own, holds parameters beside its encoder, or, which is said by the
            first window, asks for more than embeddings.
    """
    model = next((one for name in _ENCODERS if (one := getattr(loss, name, None)) is not None), None)
    if not isinstance(loss, nn.Module) or not isinstance(model, nn.Module):
        raise ArgumentTypeError("loss", type(loss).__name__, _OF_SENTENCES)
    # A loss around another one holds the encoder twice.
    places = [(layer, name) for layer in loss.modules() for name, child in layer._modules.items() if child is model]
    if any(_is_cached(layer) for layer, _ in places):
        cure = "Pass the loss that it is made after, as MultipleNegativesRankingLoss: the two passes are done here."
        raise ArgumentError("loss", type(loss).__name__, "a loss that makes no micro-batches of its own", cure)
    if any(p is not None for layer, _ in places for p in layer._parameters.values()):
        cure = "Put them into a module that the loss holds, which is then trained."
        raise ArgumentError("loss", type(loss).__name__, "a loss without parameters beside its encoder", cure)

    def embed(called: Any, batch: Any) -> dict[str, Any]:
        columns, labels = _columns_of(batch)
        # A copy of each, for modules add to what they are given.
        found = {"embeddings": [called(dict(column))["sentence_embedding"] for column in columns]}
        return found if labels is None else {**found, "labels": labels}

    def loss_fn(found: dict[str, Any]) -> torch.Tensor:
        columns = [_Found(sentence_embedding=one) for one in found["embeddings"]]
        labels = found["labels"].detach() if "labels" in found else None
        with _replaced(model, places):
            computed: torch.Tensor = loss(columns, labels)
        return computed

    return {"loss_scope": "window", "embed": embed, "loss_fn": loss_fn}


def _is_cached(loss: nn.Module) -> bool:
    """Return whether a loss runs its encoder in two passes of its own, as those whose names begin with Cached do."""
    # Those that may or may not do so say which; of older versions all that have such a size do.
    return bool(getattr(loss, "uses_gradient_cache", hasattr(loss, "mini_batch_size")))


def _columns_of(batch: Any) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """Return the dicts that an encoder is called with, one for each column, and the labels or None.

    Raises:
        DataError: the batch is none of the two forms.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], tuple | list):
        return batch[0], batch[1]
    # A column has several entries, and one by which it is known, whatever the order that they come in.
    columns: dict[str, Mapping[str, Any]] = {}  # by the beginnings of their entries
    for entry in batch if isinstance(batch, Mapping) else ():
        for prefix in (entry.removesuffix(ending) for ending in _OF_COLUMN if entry.endswith(f"_{ending}")):
            columns[prefix] = {n.removeprefix(prefix): value for n, value in batch.items() if n.startswith(prefix)}
    if not columns:
        raise DataError(
            "data: expected (features, labels), features being a list of dicts, or dicts with entries such as "
            f"anchor_input_ids, as the collator of sentence-transformers makes them, not {type(batch).__name__}"
        )
    return list(columns.values()), batch.get("label")


def _asks_for(name: str) -> ArgumentError:
    cure = "Write embed and loss_fn for it: embed may return whatever the loss needs of each sample."
    return ArgumentError("loss", f"one that asks for {name}", "a loss that needs sentence_embedding alone", cure)


class _Found(dict[str, Any]):
    """What an encoder is given and returns where embeddings are made already: these, and nothing else."""

    def __missing__(self, name: str) -> Any:
        raise _asks_for(name)


class _Encoder(nn.Module):
    """Stands in for the encoder of a loss, whose embeddings are made already."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        # Not as a part of this: it is asked for facts, and never run.
        self._facts = {name: getattr(own, name) for name in _FACTS if hasattr(own, name)}

    def forward(self, features: _Found, **_: Any) -> _Found:
        # A new one, for a loss may shorten the embeddings in what it gets.
        return _Found(features)

    def __getattr__(self, name: str) -> Any:
        if name in _FACTS and name in self._facts:
            return self._facts[name]
        raise _asks_for(f"its encoder's {name}")

    def __getitem__(self, index: Any) -> Any:
        raise _asks_for(f"its encoder's layer {index}")


@contextmanager
def _replaced(model: nn.Module, places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Let layers hold a stand-in for their encoder within this."""
    encoder = _Encoder(model)
    # By the dict that layers keep their parts in: an attribute that is set would be looked into, and noted by hooks.
    try:
        for layer, name in places:
            layer._modules[name] = encoder
        yield
    finally:
        for layer, name in places:
            layer._modules[name] = model
