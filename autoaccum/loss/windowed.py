"""A loss over the whole window: the user's two functions, and what stands in for it where a micro-batch is looked at.

``embed(model, batch)`` makes embeddings of a micro-batch, ``loss_fn(embeddings, batch)`` the loss of those of a whole
window. How these are brought together in less memory than the whole window takes is for ``window.two_passes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from autoaccum import _checks
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.loss.stated import WindowLoss
from autoaccum.memory.oom import is_out_of_memory


class Embedded(NamedTuple):
    """The embeddings of some samples: the leaves of a pytree, and the structure that they lie in."""

    leaves: tuple[torch.Tensor, ...]
    spec: Any


def window_loss_of(
    loss_scope: object,
    embed: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
    training_step: object,
    num_items: object,
    reduction: object,
    before_window: object,
    metrics: object,
    batch_norm: object,
) -> WindowLoss | None:
    """Return the loss of whole windows that was asked for; None where losses are those of micro-batches.

    Raises:
        ArgumentError: one of the two functions is missing, or cannot be called with what they are given.
        ConflictingArgumentsError: something was given beside it that only a loss of micro-batches has.
    """
    scopes = ("micro-batch", "window")
    if loss_scope is not None and _checks.one_of("loss_scope", loss_scope, scopes) == "window":
        given = {"training_step": training_step, "num_items": num_items, "reduction": reduction}
        given |= {"before_window": before_window, "metrics": metrics}
        given |= {"batch_norm": None if batch_norm == "micro" else batch_norm}
        # Each would be left out in silence, for nothing asks for it where there is one loss of all samples.
        for name, value in given.items():
            if value is not None:
                raise ConflictingArgumentsError(name, value, "loss_scope='window'", _WHY[name])
        if embed is None or loss_fn is None:
            missing = "embed" if embed is None else "loss_fn"
            accepted = "(model, micro_batch) -> embeddings" if embed is None else "(embeddings, batch) -> loss"
            raise ArgumentError(missing, None, f"a function {accepted} beside loss_scope='window'")
        _checks.no_class("embed", embed, "a function")
        _checks.function("embed", embed, ("model", "micro_batch"), "embeddings, one row per sample")
        _checks.no_class("loss_fn", loss_fn, "a function")
        takes = _checks.positional(loss_fn)
        # A second one that has a default and another name is an option of the loss's own, such as a temperature.
        takes_batch = takes is None or takes.required >= 2 or takes.most == math.inf or takes.names[1:2] == ("batch",)
        parameters = ("embeddings", "batch") if takes_batch else ("embeddings",)
        _checks.function("loss_fn", loss_fn, parameters, "the mean loss of the window")
        return WindowLoss(embed=embed, loss_fn=loss_fn, takes_batch=takes_batch)
    if embed is not None:
        cure = "It makes the embeddings of a loss over the whole window: pass loss_scope='window', or leave it out."
        raise ArgumentError("embed", embed, "nothing beside loss_scope='micro-batch'", cure)
    return None


_WHY = {
    "training_step": "The forward of a micro-batch is embed=, the loss of all of them loss_fn=.",
    "num_items": "There is one loss of the whole window, which is divided by whatever loss_fn divides by.",
    "reduction": "There is one loss of the whole window, and no others that it would add up with.",
    "before_window": "loss_fn sees the whole window: compute there what belongs to it.",
    "batch_norm": "Embeddings are made in two passes: leave it out, and call convert_batch_norm(model).",
    "metrics": "They look at outputs of micro-batches: compute them on the model by a callback.",
}
"""Why an argument cannot stand beside a loss of whole windows, and what to do."""


def embedded(computed: Any, num_samples: int | None) -> Embedded:
    """Return what ``embed`` has returned for a micro-batch, taken apart.

    Args:
        computed: a pytree of tensors.
        num_samples: of the micro-batch, which each of them has in dim 0; None: not compared.

    Raises:
        ArgumentError: it is something else.
    """
    # One for the whole micro-batch, such as a logit scale, cannot be joined: there would be one for each cut.
    leaves, spec = pytree.tree_flatten(computed)
    accepted = "a function that returns tensors with one row per sample, in any structure"
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentError("embed", f"a result with a {type(leaf).__name__}", accepted)
        if not leaf.ndim or (num_samples is not None and len(leaf) != num_samples):
            found = f"a tensor of shape {tuple(leaf.shape)} for {num_samples} samples"
            cure = "What belongs to no sample is computed in loss_fn, which may use the model's parameters."
            raise ArgumentError("embed", found, accepted, cure)
    if not any(leaf.is_floating_point() or leaf.is_complex() for leaf in leaves):
        raise ArgumentError("embed", "a result without embeddings", accepted)
    return Embedded(tuple(leaves), spec)


def joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the leaves of several micro-batches joined along the samples; refuse those of other shapes."""
    found = []
    for column in zip(*parts, strict=True):
        # What cannot be joined is the user's to mend, what there is no memory for is not.
        try:
            found.append(column[0] if len(column) == 1 else torch.cat(column))
        except (RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            shapes = " and ".join(sorted({str(tuple(leaf.shape)) for leaf in column}))
            cure = "Where samples differ in length, return one vector for each, or pad all to one length."
            raise ArgumentError("embed", f"tensors of shapes {shapes}", "rows of one shape", cure) from error
    return found


def stand_in_for(embed: Callable[[Any, Any], Any]) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss of a micro-batch whose gradient tells whether embeddings depend on the other samples in it.

    Given the embeddings, the loss of a window is the same however it was cut. So its gradient is exact if, and only if,
    a sample's embedding does not depend on its micro-batch: which holds of any function of it that is summed over
    samples. This one, sqrt(1 + (x_j - cos j)^2), grows in each of its numbers without an end, and is neither linear nor
    quadratic: sums of these two do not change where a BatchNorm's input does.
    """
    return lambda model, batch: spread(embedded(embed(model, batch), None).leaves)


def spread(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of ``stand_in_for`` for embeddings: a scalar, summed over samples."""
    terms = []
    for leaf in leaves:
        # Of complex numbers both parts are to be seen.
        if leaf.is_complex():
            leaf = torch.view_as_real(leaf)
        if leaf.is_floating_point():
            # Of 16 bits a sum over a micro-batch would lose what is to be measured.
            rows = leaf.reshape(len(leaf), -1)
            rows = rows if rows.dtype == torch.float64 else rows.float()
            phases = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype).cos()
            terms.append((1 + (rows - phases).square()).sqrt().sum())
    return torch.stack(terms).sum()
