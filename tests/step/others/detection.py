"""Detection of boxes: one location at a time with focal loss, and DETR, which matches a set of predictions."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop


class Images(torch.utils.data.Dataset[Any]):
    """Images of several sizes, each with no box, one or more."""

    def __init__(self, num_samples: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for index in range(num_samples):
            height, width = (4 * torch.randint(2, 5, (2,), generator=generator)).tolist()
            corners = torch.rand(index % 3, 2, generator=generator, dtype=torch.double) * 0.5
            size = torch.tensor([width, height], dtype=torch.double)
            sides = 0.2 + 0.3 * torch.rand(index % 3, 2, generator=generator, dtype=torch.double)
            self.samples.append(
                {
                    "image": torch.rand(2, height, width, generator=generator, dtype=torch.double),
                    "boxes": torch.cat([corners * size, (corners + sides) * size], dim=1),
                    "labels": torch.randint(0, 2, (index % 3,), generator=generator),
                }
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.samples[index]


def collate(samples: list[Any]) -> dict[str, Any]:
    """Pad images to the largest of the batch; boxes stay a list."""
    height, width = (max(sample["image"].shape[d] for sample in samples) for d in (1, 2))
    images = torch.zeros(len(samples), 2, height, width, dtype=torch.double)
    for image, sample in zip(images, samples, strict=True):
        image[:, : sample["image"].shape[1], : sample["image"].shape[2]] = sample["image"]
    return {
        "images": images,
        "sizes": torch.tensor([sample["image"].shape[1:] for sample in samples]),
        "boxes": [sample["boxes"] for sample in samples],
        "labels": [sample["labels"] for sample in samples],
    }


class Detector(nn.Module):
    """A score of each class and the distances to four sides, at each fourth pixel."""

    def __init__(self, masks_padding: bool) -> None:
        super().__init__()
        self.masks_padding = masks_padding
        self.stem, self.body = nn.Conv2d(2, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.cls_head, self.box_head = nn.Conv2d(8, 2, 3, 1, 1), nn.Conv2d(8, 4, 1)
        nn.init.constant_(self.cls_head.bias, -2.0)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = images
        for layer, stride in ((self.stem, 2), (self.body, 4)):
            x = torch.tanh(layer(x))
            if self.masks_padding:
                x = x * valid(x, sizes, stride)
        return self.cls_head(x), self.box_head(x).exp() * 4, valid(x, sizes, 4)


def valid(x: torch.Tensor, sizes: torch.Tensor, stride: int) -> torch.Tensor:
    """Return which locations of a map lie in their image, as (samples, 1, height, width)."""
    rows = torch.arange(x.shape[2]) < sizes[:, :1] // stride
    columns = torch.arange(x.shape[3]) < sizes[:, 1:] // stride
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def focal_loss(logits: torch.Tensor, targets: torch.Tensor, alpha: float = 0.25, gamma: float = 2.0) -> torch.Tensor:
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (alpha * targets + (1 - alpha) * (1 - targets)) * ce * (1 - p_t) ** gamma


def detection_step(model: Any, batch: Any) -> torch.Tensor:
    """Return focal loss and distances, both over the locations of the batch that lie in a box."""
    logits, distances, inside = model(batch["images"], batch["sizes"])
    ys, xs = (4.0 * torch.arange(n, dtype=torch.double) + 2 for n in logits.shape[2:])
    wanted, sides, positive = torch.zeros_like(logits), torch.zeros_like(distances), torch.zeros_like(logits[:, 0])
    for index, (boxes, labels) in enumerate(zip(batch["boxes"], batch["labels"], strict=True)):
        for (x0, y0, x1, y1), label in zip(boxes, labels, strict=True):
            hit = ((ys > y0) & (ys < y1))[:, None] & ((xs > x0) & (xs < x1))[None, :]
            four = torch.stack(
                torch.broadcast_tensors(xs[None] - x0, ys[:, None] - y0, x1 - xs[None], y1 - ys[:, None])
            )
            wanted[index, label][hit] = 1
            sides[index][:, hit] = four[:, hit]
            positive[index][hit] = 1
    num_positive = positive.sum().clamp(min=1)
    weights = inside if model.masks_padding else torch.ones_like(inside)
    loss_cls = (focal_loss(logits, wanted) * weights).sum() / num_positive
    loss_box = ((distances - sides).abs().sum(1) * positive).sum() / num_positive
    return loss_cls + 0.1 * loss_box


def detection(masks_padding: bool = False) -> Loop:
    torch.manual_seed(0)
    return Loop(
        Detector(masks_padding).double(), Images(36), window=12, micro_batch=4, training_step=detection_step,
        collate_fn=collate,
    )  # fmt: skip


def detection_masked() -> Loop:
    return detection(masks_padding=True)


class DETR(nn.Module):
    """Queries that look at an image's features, each of which predicts a class or none, and a box."""

    def __init__(self, dim: int = 8, queries: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.input_proj, self.query_embed = nn.Linear(6, dim), nn.Parameter(torch.randn(queries, dim))
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.class_embed, self.bbox_embed = nn.Linear(dim, classes + 1), nn.Linear(dim, 4)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = self.input_proj(features)
        queries = self.query_embed.expand(len(features), -1, -1)
        hs = queries + self.attention(queries, memory, memory, need_weights=False)[0]
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


class SetCriterion(nn.Module):
    """Matches predictions to boxes, then weighs classes, and divides by the boxes of the whole batch."""

    def __init__(self, classes: int = 3, eos_coef: float = 0.1) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("empty_weight", torch.ones(classes + 1).index_fill(0, torch.tensor([classes]), eos_coef))

    @torch.no_grad()
    def match(self, logits: torch.Tensor, boxes: torch.Tensor, target: dict[str, torch.Tensor]) -> tuple[int, ...]:
        """Return the query of each box: the cheapest of all assignments."""
        cost = 5 * torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["labels"]]
        columns = range(cost.shape[1])
        return min(
            permutations(range(len(cost)), len(columns)), key=lambda p: sum(float(cost[p[c], c]) for c in columns)
        )

    def forward(
        self, outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        num_boxes = torch.as_tensor([sum(len(t["labels"]) for t in targets)], dtype=torch.float).clamp(min=1).item()
        logits, boxes = outputs["pred_logits"], outputs["pred_boxes"]
        classes = torch.full(logits.shape[:2], self.classes)
        chosen, wanted = [], []
        for index, target in enumerate(targets):
            queries = list(self.match(logits[index], boxes[index], target))
            classes[index, queries] = target["labels"]
            chosen.append(boxes[index, queries])
            wanted.append(target["boxes"])
        found, true = torch.cat(chosen), torch.cat(wanted)
        return {
            "loss_ce": F.cross_entropy(logits.transpose(1, 2), classes, self.empty_weight),
            "loss_bbox": F.l1_loss(found, true, reduction="none").sum() / num_boxes,
            "loss_giou": (1 - overlap(found, true)).sum() / num_boxes,
        }


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the generalised intersection over union of boxes (centre x, centre y, width, height), pair by pair."""
    (low_a, high_a), (low_b, high_b) = ((b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2) for b in (first, second))
    common = (torch.min(high_a, high_b) - torch.max(low_a, low_b)).clamp(min=0).prod(1)
    union = first[:, 2:].prod(1) + second[:, 2:].prod(1) - common
    hull = (torch.max(high_a, high_b) - torch.min(low_a, low_b)).prod(1)
    return common / union - (hull - union) / hull


def detr() -> Loop:
    torch.manual_seed(0)
    model, criterion = DETR().double(), SetCriterion().double()
    n = 24
    features = torch.randn(n, 5, 6, dtype=torch.double)
    labels = torch.randint(0, 3, (n, 2)).masked_fill(torch.arange(n)[:, None] % 3 < torch.tensor([1, 2]), -1)
    boxes = 0.2 + 0.3 * torch.rand(n, 2, 4, dtype=torch.double)
    weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        features, labels, boxes = batch
        targets = [{"labels": row[row >= 0], "boxes": box[row >= 0]} for row, box in zip(labels, boxes, strict=True)]
        losses = criterion(model(features), targets)
        return sum(losses[name] * weight for name, weight in weights.items())  # type: ignore[return-value]

    return Loop(model, (features, labels, boxes), window=8, micro_batch=2, training_step=training_step)
