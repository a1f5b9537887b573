"""Losses of segmentation and detection: overlaps, focal factors, counts of positives."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    BINARY,
    PIXELS,
    PLAIN,
    SEGMENTS,
    Setting,
    mlp,
)

Tensor = torch.Tensor
cases = Cases("losses", "vision")


def dice(outputs: Tensor, targets: Tensor, dims: tuple[int, ...], smooth: float = 1.0) -> Tensor:
    p = outputs.sigmoid()
    return 1 - (2 * (p * targets).sum(dims) + smooth) / (p.sum(dims) + targets.sum(dims) + smooth)


def tversky(outputs: Tensor, targets: Tensor, dims: tuple[int, ...]) -> Tensor:
    p = outputs.sigmoid()
    hit, false, missed = (p * targets).sum(dims), (p * (1 - targets)).sum(dims), ((1 - p) * targets).sum(dims)
    return 1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)


def jaccard(outputs: Tensor, targets: Tensor, dims: tuple[int, ...]) -> Tensor:
    p = outputs.sigmoid()
    both = (p * targets).sum(dims)
    return 1 - (both + 1) / (p.sum(dims) + targets.sum(dims) - both + 1)


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


def sigmoid_focal(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    p = outputs.sigmoid()
    return 0.25 * loss * (1 - (p * targets + (1 - p) * (1 - targets))) ** 2


ALL, EACH, CLASSES_OF_BATCH = (0, 1, 2, 3), (1, 2, 3), (0, 2, 3)

cases.loss("dice of each image", SEGMENTS, lambda o, y: dice(o, y, EACH).mean())
cases.loss("dice of each image and class", SEGMENTS, lambda o, y: dice(o, y, (2, 3)).mean())
cases.loss("dice of each class, over the batch", SEGMENTS, lambda o, y: dice(o, y, CLASSES_OF_BATCH).mean())
cases.loss("dice of everything", SEGMENTS, lambda o, y: dice(o.flatten()[:, None], y.flatten()[:, None], (0, 1)))
cases.loss(
    "dice of everything, and bce", SEGMENTS, lambda o, y: dice(o, y, ALL) + F.binary_cross_entropy_with_logits(o, y)
)
cases.loss(
    "dice of each image, and bce",
    SEGMENTS,
    lambda o, y: dice(o, y, EACH).mean() + F.binary_cross_entropy_with_logits(o, y),
)
cases.loss("dice, minus its log", SEGMENTS, lambda o, y: -torch.log(1 - dice(o, y, ALL)))
cases.loss(
    "dice of images that have any",
    SEGMENTS,
    lambda o, y: (dice(o, y, (2, 3)) * (y.sum((2, 3)) > 4)).sum() / (y.sum((2, 3)) > 4).sum().clamp(min=1),
)
cases.loss("tversky of each image", SEGMENTS, lambda o, y: tversky(o, y, EACH).mean())
cases.loss("tversky of everything", SEGMENTS, lambda o, y: tversky(o, y, ALL))
cases.loss("focal tversky of everything", SEGMENTS, lambda o, y: tversky(o, y, ALL) ** 0.75)
cases.loss("overlap of each image", SEGMENTS, lambda o, y: jaccard(o, y, EACH).mean())
cases.loss("overlap of everything", SEGMENTS, lambda o, y: jaccard(o, y, ALL))
cases.loss("focal", PLAIN, lambda o, y: focal(o, y).mean())
cases.loss("focal, sum", PLAIN, lambda o, y: focal(o, y).sum())
cases.loss(
    "focal, / its factors",
    PLAIN,
    lambda o, y: focal(o, y).sum() / (1 - o.softmax(1).gather(1, y[:, None])).square().sum().detach(),
)
cases.loss("sigmoid focal", BINARY, lambda o, y: sigmoid_focal(o, y).mean())
cases.loss("sigmoid focal, / positives", BINARY, lambda o, y: sigmoid_focal(o, y).sum() / y.sum().clamp(min=1))
cases.loss("sigmoid focal, / max(1, item)", BINARY, lambda o, y: sigmoid_focal(o, y).sum() / max(1.0, y.sum().item()))
cases.loss(
    "asymmetric",
    BINARY,
    lambda o, y: -(y * o.sigmoid().log() + (1 - y) * (1 - o.sigmoid()).log() * o.sigmoid() ** 2).sum(),
)
cases.loss(
    "poly loss",
    PLAIN,
    lambda o, y: (F.cross_entropy(o, y, reduction="none") + 1 - o.softmax(1).gather(1, y[:, None])[:, 0]).mean(),
)
cases.loss(
    "pixels, sum / valid",
    PIXELS,
    lambda o, y: F.cross_entropy(o, y, ignore_index=255, reduction="sum") / (y != 255).sum(),
)
cases.loss(
    "pixels, hardest of the batch",
    PIXELS,
    lambda o, y: F.cross_entropy(o, y, ignore_index=255, reduction="none").flatten().topk(8).values.mean(),
)
cases.loss(
    "pixels, hardest of each image",
    PIXELS,
    lambda o, y: F.cross_entropy(o, y, ignore_index=255, reduction="none").flatten(1).topk(4).values.mean(),
)
cases.loss(
    "pixels, those above a loss",
    PIXELS,
    lambda o, y: (
        (k := F.cross_entropy(o, y, ignore_index=255, reduction="none").flatten())[k > 1.3].mean()
        if (F.cross_entropy(o, y, ignore_index=255, reduction="none") > 1.3).any()
        else o.sum() * 0
    ),
)
cases.loss("total variation", SEGMENTS, lambda o, y: F.mse_loss(o, y) + 0.1 * (o[..., 1:] - o[..., :-1]).abs().mean())
cases.loss(
    "total variation, sum", SEGMENTS, lambda o, y: F.mse_loss(o, y) + 0.01 * (o[..., 1:] - o[..., :-1]).abs().sum()
)
cases.loss("peak signal to noise of the batch", SEGMENTS, lambda o, y: 10 * torch.log10(F.mse_loss(o, y)))
cases.loss(
    "peak signal to noise of images", SEGMENTS, lambda o, y: 10 * torch.log10((o - y).square().mean(EACH)).mean()
)


def boxes(samples: int, same: bool) -> tuple[Tensor, ...]:
    """Inputs, boxes, and which of an image's two boxes are there."""
    there = torch.ones(samples, 2) if same else (torch.rand(samples, 2) < 0.5).double()
    there[-1, 0] = 1.0
    return torch.randn(samples, 6), torch.rand(samples, 2, 2), there


DETECTION = Setting(lambda: mlp(6), boxes)


def detection(outputs: Tensor, wanted: Tensor, there: Tensor, count: str) -> Tensor:
    """Presence of each box, and the place of those that are there."""
    presence, places = outputs[:, :2], outputs[:, 2:].view(-1, 2, 2)
    seen = F.binary_cross_entropy_with_logits(presence, there, reduction="sum")
    off = (F.l1_loss(places, wanted, reduction="none").sum(2) * there).sum()
    if count == "boxes":
        return (seen + off) / there.sum().clamp(min=1)
    if count == "images":
        return (seen + off) / len(outputs)
    return seen / presence.numel() + off / max(int(there.sum()), 1)


cases.loss("boxes, / their number", DETECTION, lambda o, y, t: detection(o, y, t, "boxes"))
cases.loss("boxes, / images", DETECTION, lambda o, y, t: detection(o, y, t, "images"))
cases.loss("boxes, each term its own number", DETECTION, lambda o, y, t: detection(o, y, t, "each"))
cases.loss("boxes, chosen", DETECTION, lambda o, y, t: F.smooth_l1_loss(o[:, 2:].view(-1, 2, 2)[t > 0], y[t > 0]))
cases.loss(
    "boxes, matched",
    DETECTION,
    lambda o, y, t: torch.cdist(o[:, 2:].view(-1, 2, 2), y).amin(2).mean(),
)
