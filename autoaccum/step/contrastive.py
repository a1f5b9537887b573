"""Losses over a whole window, row by row, in memory that grows with its embeddings and not with their square.

``info_nce`` and ``clip`` return a 0-dim tensor, the mean over samples. They compare every sample with every other.
``in_chunks`` does that for some rows at a time, and once more in the backward, so that N samples take chunk x N numbers
and not N x N. In a ``training_step`` they are given the embeddings of the full batch, because micro-batches are joined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, normalize
from torch.utils.checkpoint import checkpoint

from autoaccum import _checks
from autoaccum._units import kind_of
from autoaccum.errors import ArgumentTypeError

CHUNK = 256
"""Rows that are compared at once: a product of so many is as fast per row as a larger one."""

LossRows = Callable[[slice], torch.Tensor]
"""(rows) -> the sum of the losses of these samples, a 0-dim tensor; it sees all others by its closure."""


def in_chunks(loss_rows: LossRows, num_samples: int, chunk: int = CHUNK) -> torch.Tensor:
    """Return the sum of a loss over all samples, of which a backward keeps what its closure holds and no more.

    Args:
        loss_rows: (rows) -> the sum of the losses of these rows. It is called twice where a gradient is wanted, and
            whatever it uses, embeddings or parameters, gets its gradient.
        num_samples: N.
        chunk: rows of one call.

    Raises:
        ArgumentError: chunk is no int of at least 1.
    """
    _checks.positive_int("chunk", chunk)
    total: torch.Tensor | None = None
    for start in range(0, num_samples, chunk):
        rows = slice(start, min(start + chunk, num_samples))
        # What it computes is let go, and computed again when the backward comes to it: one chunk is there at a time.
        part = checkpoint(loss_rows, rows, use_reentrant=False)
        total = part if total is None else total + part
    assert total is not None, "a window has a sample"
    return total


def _of_rows(call: str, **given: object) -> None:
    """Refuse what is no tensor: embeddings that were not taken apart, or a batch in the place of the second one.

    Raises:
        ArgumentTypeError: something is none; it shows the ``loss_fn``.
    """
    # Passed as loss_fn as they are, these would be called with (outputs, targets).
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            cure = f"Write a training_step that returns {call}."
            raise ArgumentTypeError(name, kind_of(value), "a tensor with one row per sample", cure)


def info_nce(
    queries: torch.Tensor, keys: torch.Tensor, *, temperature: float | torch.Tensor = 0.07, chunk: int = CHUNK
) -> torch.Tensor:
    """Return how well each query tells its own key from all others: the mean cross entropy of their similarities.

    van den Oord, Li, Vinyals: "Representation Learning with Contrastive Predictive Coding", 2018, equation 4, with the
    cosine for similarity.

    Args:
        queries: (N, D), normalised here.
        keys: (M, D), M at least N: the first N belong to the queries, row by row, what follows are further negatives.
        temperature: what similarities are divided by; a parameter gets its gradient.
        chunk: rows that are compared at once.
    """
    _of_rows("info_nce(*model(batch))", queries=queries, keys=keys)
    queries, keys = normalize(queries, dim=1), normalize(keys, dim=1)
    own = torch.arange(len(queries), device=queries.device)  # where the key of each query stands

    def loss_rows(rows: slice) -> torch.Tensor:
        return cross_entropy(queries[rows] @ keys.T / temperature, own[rows], reduction="sum")

    return in_chunks(loss_rows, len(queries), chunk) / len(queries)


def clip(
    images: torch.Tensor, texts: torch.Tensor, *, logit_scale: float | torch.Tensor, chunk: int = CHUNK
) -> torch.Tensor:
    """Return the mean of both directions' cross entropies, from images to texts and back.

    Radford et al.: "Learning Transferable Visual Models From Natural Language Supervision", 2021, figure 3.

    Args:
        images: (N, D), normalised here.
        texts: (N, D), row by row those of the images.
        logit_scale: the factor of similarities, exp(t) of the paper's t; a parameter gets its gradient.
        chunk: rows that are compared at once.
    """
    _of_rows("clip(*model(batch), logit_scale=...)", images=images, texts=texts)
    # Each direction compares rows of one with all of the other, so that neither has a product of its own to keep.
    forth = info_nce(images, texts, temperature=1 / logit_scale, chunk=chunk)
    return (forth + info_nce(texts, images, temperature=1 / logit_scale, chunk=chunk)) / 2
