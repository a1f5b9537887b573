"""Ready ``embed`` and ``loss_fn`` for models of images and texts, such as transformers' CLIP and SigLIP.

::

    fit(model, data, effective_batch=4096, **clip_model(model))

It goes by what models have and return, and imports no library of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.loss.contrastive import clip, sig_lip
from autoaccum.loss.stated import WindowArguments

_OF_CLIP = "a model of images and texts such as transformers' CLIPModel or SiglipModel"


def clip_model(model: nn.Module) -> WindowArguments:
    """Return the arguments for a model of images and texts that has CLIP's loss or SigLIP's, in chunks of rows.

    It is called with a micro-batch's entries as keywords, and returns an object with ``image_embeds`` and
    ``text_embeds``, (N, D) each, as ``CLIPModel``, ``SiglipModel``, ``ChineseCLIPModel``, ``AltCLIPModel`` and
    ``VisionTextDualEncoderModel`` of transformers do. Its ``logit_scale`` is the logarithm of the factor of
    similarities. Where it has a ``logit_bias`` the loss is SigLIP's, else CLIP's. That these are the model's own logits
    and loss is measured on micro-batches up to the first one of several samples.

    Args:
        model: which is trained.

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
        # A processor may ask for the loss of each batch, or not to have it. Here it always is: a graph that has it once
        # would be another one than those of all later micro-batches.
        outputs = called(**{**batch, "return_loss": True})
        images, texts = (getattr(outputs, name, None) for name in ("image_embeds", "text_embeds"))
        if not isinstance(images, torch.Tensor) or not isinstance(texts, torch.Tensor) or images.ndim != 2:
            raise ArgumentError("model", type(model).__name__, _OF_CLIP)
        # To read a number waits for the device, and is done until a micro-batch has several samples: of one the cross
        # entropy is 0 whatever the logits are.
        if not is_measured:
            _compare(model, outputs, loss_fn)
            is_measured = len(images) > 1
        return images, texts

    return {"loss_scope": "window", "embed": embed, "loss_fn": loss_fn}


@torch.no_grad()
def _compare(model: nn.Module, outputs: Any, loss_fn: Callable[[Any], torch.Tensor]) -> None:
    """Compare the logits and the loss of a micro-batch with the model's own ones.

    Raises:
        ArgumentError: they are others.
    """
    logits = model.logit_scale.exp() * outputs.image_embeds @ outputs.text_embeds.T  # type: ignore[operator]
    if (bias := getattr(model, "logit_bias", None)) is not None:
        logits = logits + bias
    # Both, for where samples are nearly alike the loss is the same whatever logits are multiplied with.
    loss = loss_fn((outputs.image_embeds, outputs.text_embeds))
    pairs = {"logits": (logits, outputs.logits_per_image), "loss": (loss, outputs.loss)}
    for name, (found, expected) in pairs.items():
        # Of 16 bits a product has 3 digits; what computes otherwise is off by more.
        tolerance = 1e-4 if expected is not None and expected.dtype in (torch.float32, torch.float64) else 3e-2
        if expected is None or expected.shape != found.shape or not _is_near(found, expected, tolerance):
            cure = f"Its {name} are computed in another way than CLIP's or SigLIP's: write embed and loss_fn for it."
            raise ArgumentError("model", type(model).__name__, _OF_CLIP, cure)


def _is_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    far = (found.float() - expected.float()).abs().amax()
    return bool(far <= tolerance * (1 + expected.float().abs().amax()))
