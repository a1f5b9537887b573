"""Ready ``embed`` and ``loss_fn`` for what other libraries bring: each function here returns arguments of ``fit``.

::

    fit(model, data, effective_batch=4096, **clip_model(model))
    fit(model, data, effective_batch=4096, **sentence_loss(MultipleNegativesRankingLoss(model)))

They go by what objects have, and import neither library. What they cannot make exact they refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.loss.contrastive import clip, sig_lip


class WindowArguments(TypedDict):
    """The arguments of ``fit``, ``Trainer`` or ``Accumulator`` for a loss over the whole window."""

    loss_scope: Literal["window"]
    embed: Callable[[Any, Any], Any]
    loss_fn: Callable[[Any], torch.Tensor]


# Models of images and texts.

_OF_CLIP = "a model of images and texts such as transformers' CLIPModel or SiglipModel"


def clip_model(model: nn.Module) -> WindowArguments:
    """Return the arguments for a model of images and texts that has CLIP's loss or SigLIP's, in chunks of rows.

    It is called with a micro-batch's entries as keywords, and returns an object with ``image_embeds`` and
    ``text_embeds``, (N, D) each, as ``CLIPModel``, ``SiglipModel``, ``ChineseCLIPModel``, ``AltCLIPModel`` and
    ``VisionTextDualEncoderModel`` of transformers do. Its ``logit_scale`` is the logarithm of the factor of
    similarities. Where it has a ``logit_bias`` the loss is SigLIP's, else CLIP's. That these are the model's own logits
    and loss is measured on the first micro-batch of several samples.

    Args:
        model: which is trained; not what ``torch.compile`` has made of it, which ``fit(compile=True)`` does.

    Raises:
        ArgumentTypeError: it has no ``logit_scale`` of one number.
        ArgumentError: its logits or its loss are others; said by the first micro-batch.
    """
    scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
    if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
        raise ArgumentTypeError("model", type(model).__name__, _OF_CLIP, "For another one write embed and loss_fn.")
    is_measured, has_bias = False, bias is not None

    def loss_fn(embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, texts = embeddings
        if not has_bias:
            return clip(images, texts, logit_scale=model.logit_scale.exp())  # type: ignore[operator]
        return sig_lip(images, texts, logit_scale=model.logit_scale.exp(), logit_bias=model.logit_bias)  # type: ignore

    def embed(called: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal is_measured
        if not isinstance(batch, Mapping):
            raise DataError(f"data: expected dicts with what {type(model).__name__} is called with, not {type(batch)}")
        # A processor may ask for the loss of each batch, which is that of a micro-batch here.
        inputs = {name: value for name, value in batch.items() if name != "return_loss"}
        if is_measured:
            outputs = called(**inputs)
            return outputs.image_embeds, outputs.text_embeds
        outputs = called(**inputs, return_loss=True)
        images, texts = (getattr(outputs, name, None) for name in ("image_embeds", "text_embeds"))
        if not isinstance(images, torch.Tensor) or not isinstance(texts, torch.Tensor) or images.ndim != 2:
            raise ArgumentError("model", type(model).__name__, _OF_CLIP)
        # Of one sample the cross entropy is 0 whatever the logits are.
        if len(images) > 1:
            _compare(model, outputs, loss_fn((images, texts)))
            is_measured = True
        return images, texts

    return {"loss_scope": "window", "embed": embed, "loss_fn": loss_fn}


@torch.no_grad()
def _compare(model: nn.Module, outputs: Any, loss: torch.Tensor) -> None:
    """Compare the logits and the loss of a micro-batch with the model's own ones.

    Raises:
        ArgumentError: they are others.
    """
    logits = model.logit_scale.exp() * outputs.image_embeds @ outputs.text_embeds.T  # type: ignore[operator]
    if (bias := getattr(model, "logit_bias", None)) is not None:
        logits = logits + bias
    own = outputs.logits_per_image, outputs.loss
    for name, found, expected in zip(("logits", "loss"), (logits, loss), own, strict=True):
        # Of 16 bits a product has 3 digits; what computes otherwise is off by more.
        tolerance = 1e-4 if expected is not None and expected.dtype in (torch.float32, torch.float64) else 3e-2
        if expected is None or expected.shape != found.shape or not _is_near(found, expected, tolerance):
            cure = f"Its {name} are computed in another way than CLIP's or SigLIP's: write embed and loss_fn for it."
            raise ArgumentError("model", type(model).__name__, _OF_CLIP, cure)


def _is_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    far = (found.float() - expected.float()).abs().amax()
    return bool(far <= tolerance * (1 + expected.float().abs().amax()))


# Losses of sentences.

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
    try:
        for layer, name in places:
            layer._modules[name] = encoder
        yield
    finally:
        for layer, name in places:
            layer._modules[name] = model
