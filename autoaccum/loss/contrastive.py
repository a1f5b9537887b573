"""Losses over a whole window, row by row, in memory that grows with its embeddings and not with their square.

Each of ``info_nce``, ``clip``, ``sig_lip``, ``sup_con`` and ``triplet`` returns a 0-dim tensor, the mean over samples.
They compare every sample with every other. ``in_chunks`` does that for some rows at a time, and once more in the
backward, so that N samples take chunk x N numbers and not N x N. In a ``training_step`` they are given the embeddings
of the full batch, because micro-batches are joined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize, relu
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


def sig_lip(
    images: torch.Tensor,
    texts: torch.Tensor,
    *,
    logit_scale: float | torch.Tensor,
    logit_bias: float | torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return the sigmoid loss: each of the N x N pairs is told by itself whether it belongs together.

    Zhai et al.: "Sigmoid Loss for Language Image Pre-Training", 2023, algorithm 1: a sum over pairs, divided by N.

    Args:
        images: (N, D), normalised here.
        texts: (N, D), row by row those of the images.
        logit_scale: the factor of similarities; a parameter gets its gradient.
        logit_bias: what is added to them; likewise.
        chunk: rows that are compared at once.
    """
    _of_rows("sig_lip(*model(batch), logit_scale=..., logit_bias=...)", images=images, texts=texts)
    images, texts = normalize(images, dim=1), normalize(texts, dim=1)
    columns = torch.arange(len(texts), device=texts.device)  # compared with rows, it marks the pairs that belong

    def loss_rows(rows: slice) -> torch.Tensor:
        logits = logit_scale * images[rows] @ texts.T + logit_bias
        signs = torch.where(columns[rows, None] == columns, 1.0, -1.0)
        return -logsigmoid(signs * logits).sum()

    return in_chunks(loss_rows, len(images), chunk) / len(images)


def sup_con(
    embeddings: torch.Tensor, labels: torch.Tensor, *, temperature: float | torch.Tensor = 0.1, chunk: int = CHUNK
) -> torch.Tensor:
    """Return how near samples of one label are to each other, beside all others.

    Khosla et al.: "Supervised Contrastive Learning", 2020, equation 2. Samples that are alone with their label have no
    loss, and the mean is over the others; 0 where there are none.

    Args:
        embeddings: (N, D), normalised here; two views of a sample are two rows.
        labels: (N,).
        temperature: what similarities are divided by; a parameter gets its gradient.
        chunk: rows that are compared at once.
    """
    _of_rows("sup_con(*model(batch))", embeddings=embeddings, labels=labels)
    embeddings = normalize(embeddings, dim=1)
    columns = torch.arange(len(labels), device=labels.device)
    # Of itself no sample is a positive; of sums over labels none of N x N is needed.
    _, groups, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    num_counting: torch.Tensor = (sizes[groups] > 1).sum().clamp(min=1)  # at least 1, so that no loss is 0 / 0

    def loss_rows(rows: slice) -> torch.Tensor:
        itself = columns[rows, None] == columns  # of which nothing is to be learnt
        logits = (embeddings[rows] @ embeddings.T / temperature).masked_fill(itself, -torch.inf)
        positives = (labels[rows, None] == labels) & ~itself
        chances = logits.log_softmax(1).masked_fill(~positives, 0)
        return -(chances.sum(1) / positives.sum(1).clamp(min=1)).sum()

    return in_chunks(loss_rows, len(labels), chunk) / num_counting


def triplet(embeddings: torch.Tensor, labels: torch.Tensor, *, margin: float = 0.2, chunk: int = CHUNK) -> torch.Tensor:
    """Return the triplet loss with the hardest positive and the hardest negative of each sample in the window.

    Hermans, Beyer, Leibe: "In Defense of the Triplet Loss for Person Re-Identification", 2017, equation 5, with
    Euclidean distances. Samples that lack a positive or a negative have no loss; the mean is over all N.

    Args:
        embeddings: (N, D).
        labels: (N,).
        margin: by how much the nearest of another label is to be farther than the farthest of the same.
        chunk: rows that are compared at once.
    """
    _of_rows("triplet(*model(batch))", embeddings=embeddings, labels=labels)
    columns = torch.arange(len(labels), device=labels.device)

    def loss_rows(rows: slice) -> torch.Tensor:
        far = torch.cdist(embeddings[rows], embeddings)
        is_same = labels[rows, None] == labels
        # At a distance of 0, to itself, no root has a gradient; it is never the hardest.
        positives = is_same & (columns[rows, None] != columns)
        hardest = far.masked_fill(~positives, -torch.inf).amax(1)
        nearest = far.masked_fill(is_same, torch.inf).amin(1)
        has_both = positives.any(1) & ~is_same.all(1)
        # Left out before the difference, for infinities have no gradient.
        return relu(hardest[has_both] - nearest[has_both] + margin).sum()

    return in_chunks(loss_rows, len(labels), chunk) / len(labels)
