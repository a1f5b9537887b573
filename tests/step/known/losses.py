"""Losses that were once stepped on wrongly, or not at all, with how their windows are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop

WINDOW = 24
FEATURES = 8
CUTS: tuple[Any, ...] = (1, 4, (7, 8, 9), (3, 2, 4, 5, 1, 3, 6), "auto")


class Net(nn.Module):
    """As many outputs as features, no randomness, no buffers; and parameters that data can be multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, FEATURES))
        self.head = nn.Linear(FEATURES, 1)
        self.table = nn.Embedding(5, FEATURES)
        self.offset = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


def data(empties: tuple[int, ...] = (0, 8, 40, 60)) -> dict[str, torch.Tensor]:
    """Return three windows of rows, of which some have nothing to count: single ones, and four from each of ``empties``."""
    generator = torch.Generator().manual_seed(1)
    n = 3 * WINDOW
    mask = torch.rand(n, FEATURES, generator=generator) < torch.rand(n, 1, generator=generator)
    mask[:, 0] = True
    for start in empties:
        mask[start : start + 4] = False
    for row in range(min(empties) + 4, n, 11):
        mask[row] = False
    return {
        "x": torch.randn(n, FEATURES, generator=generator, dtype=torch.double),
        "y": torch.randn(n, FEATURES, generator=generator, dtype=torch.double),
        "label": torch.randint(0, 5, (n,), generator=generator),
        "mask": mask,
    }


LATE = (WINDOW + 16, 2 * WINDOW + 12)
"""Rows with nothing to count in the second window and the third alone."""

Loss = Callable[[Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
"""(model, outputs, squared differences, batch) -> loss"""


@dataclass
class Case:
    """A loss, and how its windows are cut."""

    loss: Loss
    cuts: tuple[Any, ...] = CUTS
    max_micro_batch: int = 4
    num_items: Callable[[Any], Any] | None = field(default=None)

    def loop(self, empties: tuple[int, ...] = (0, 8, 40, 60)) -> Loop:
        """Return it as a training loop of three windows, with rows that have nothing to count from each of ``empties``."""
        torch.manual_seed(0)

        def training_step(model: Any, batch: Any) -> torch.Tensor:
            outputs = model(batch["x"])
            return self.loss(model, outputs, (outputs - batch["y"]).pow(2), batch)

        return Loop(Net().double(), data(empties), WINDOW, 4, training_step=training_step, num_items=self.num_items)


def squeezed(m: Any, o: torch.Tensor, d: torch.Tensor, b: Any) -> torch.Tensor:
    """Compute a regression's loss as Hugging Face's models do for one label."""
    return F.mse_loss(m.head(o).squeeze(), b["y"][:, :1].squeeze())


def switch_balancing(m: Any, o: torch.Tensor, d: torch.Tensor, b: Any) -> torch.Tensor:
    probs = o.softmax(-1)
    share = F.one_hot(probs.argmax(-1), FEATURES).to(probs.dtype).mean(0)
    return d.mean() + 0.5 * FEATURES * (share * probs.mean(0)).sum()


ZERO_ITEMS: dict[str, Case] = {
    "over int(count)": Case(lambda m, o, d, b: (d * b["mask"]).sum() / int(b["mask"].sum())),
    "over count.item()": Case(lambda m, o, d, b: (d * b["mask"]).sum() / b["mask"].sum().item()),
    "over a float": Case(lambda m, o, d, b: (d * b["mask"]).sum() / float(b["mask"].sum())),
    "times one over int(count)": Case(lambda m, o, d, b: (d * b["mask"]).sum() * (1 / int(b["mask"].sum()))),
    "times one over count.item()": Case(lambda m, o, d, b: (d * b["mask"]).sum() * (1.0 / b["mask"].sum().item())),
    "over a count, picked": Case(lambda m, o, d, b: d[b["mask"]].sum() / b["mask"].sum().item()),
    "over a count, kept above none": Case(lambda m, o, d, b: (d * b["mask"]).sum() / max(int(b["mask"].sum()), 1)),
    "mean of what is picked": Case(lambda m, o, d, b: d[b["mask"]].mean()),
    "share of the mask": Case(lambda m, o, d, b: (d * b["mask"]).mean() / b["mask"].double().mean().item()),
}
"""Micro-batches with nothing to count, whose count is a Python number: none may raise, or make the model NaN."""

NEGATED: dict[str, Case] = {
    "minus a sum over a count": Case(
        lambda m, o, d, b: -(o.log_softmax(-1) * b["mask"]).sum() / b["mask"].sum()
    ),
    "a sum over minus a count": Case(
        lambda m, o, d, b: (o.log_softmax(-1) * b["mask"]).sum() / -b["mask"].sum()
    ),
    "minus all of it": Case(
        lambda m, o, d, b: -((o.log_softmax(-1) * b["mask"]).sum() / b["mask"].sum())
    ),
    "minus a sum over a count kept above none": Case(
        lambda m, o, d, b: -(o.log_softmax(-1) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "minus one times it": Case(
        lambda m, o, d, b: -1 * (o.log_softmax(-1) * b["mask"]).sum() / b["mask"].sum().clamp(min=1e-12)
    ),
    "a negative mask": Case(
        lambda m, o, d, b: (o.log_softmax(-1) * -b["mask"].double()).sum() / b["mask"].sum().clamp(min=1)
    ),
    "minus the mean of what is picked": Case(lambda m, o, d, b: -o.log_softmax(-1)[b["mask"]].mean()),
    "minus a sum over int(count)": Case(
        lambda m, o, d, b: -(o.log_softmax(-1) * b["mask"]).sum() / int(b["mask"].sum())
    ),
    "minus the sum of shares": Case(
        lambda m, o, d, b: -(o.log_softmax(-1) * b["mask"] / b["mask"].sum()).sum()
    ),
    "one minus a mean": Case(lambda m, o, d, b: 1 - (o * b["mask"]).sum() / b["mask"].sum()),
    "one minus a mean over a count kept above none": Case(
        lambda m, o, d, b: 1 - (o * b["mask"]).sum() / b["mask"].sum().clamp(min=1)
    ),
    "over a count kept below none": Case(
        lambda m, o, d, b: (o * b["mask"]).sum() / b["mask"].sum().neg().clamp(max=-1)
    ),
    "zero where it is not a number": Case(
        lambda m, o, d, b: -((o * b["mask"]).sum() / b["mask"].sum()).nan_to_num()
    ),
}  # fmt: skip
"""Masked means with a sign, which were a ZeroDivisionError."""

MISREAD: dict[str, Case] = {
    "squeeze": Case(squeezed),
    "squeeze, all micro-batches of one but one": Case(squeezed, cuts=((1,) * 22 + (2,),)),
    "sum over the features": Case(lambda m, o, d, b: d.sum() / FEATURES, cuts=(8, 4, (7, 8, 9), "auto"), max_micro_batch=8),
    "sum times a constant as large as one over a micro-batch": Case(lambda m, o, d, b: d.sum() * 0.25, cuts=(4, "auto")),
    "sum over a constant window": Case(lambda m, o, d, b: d.sum() / WINDOW, cuts=(4, 8, (7, 8, 9), "auto")),
    "sum, and a parameter times the data's sum": Case(lambda m, o, d, b: d.sum() + (m.offset * b["x"].sum(0)).sum()),
    "sum, and a parameter times all data": Case(lambda m, o, d, b: d.sum() + (m.offset * b["x"]).sum()),
    "sum, and a table at the labels": Case(lambda m, o, d, b: d.sum() + m.table.weight[b["label"]].sum()),
    "sum, and squares of embeddings": Case(lambda m, o, d, b: d.sum() + m.table(b["label"]).pow(2).sum()),
    "sum, and a learnt temperature": Case(
        lambda m, o, d, b: d.sum() - (m.offset[0].exp() * (b["y"][:, 0] + o[:, 0].detach())).sum()
    ),
    "sum, and a learnt temperature of a sum": Case(
        lambda m, o, d, b: d.sum() - m.offset[0].exp() * (b["y"][:, 0] + o[:, 0].detach()).sum()
    ),
    "sum, and learnt centres": Case(
        lambda m, o, d, b: d.sum() + (m.table(b["label"]) - o.detach()).pow(2).sum()
    ),
    "sum, and a parameter for each row": Case(
        lambda m, o, d, b: d.sum() + (m.offset.expand(len(d), -1) - 1).pow(2).sum()
    ),
    "sum, and a parameter times the rows": Case(lambda m, o, d, b: d.sum() + len(d) * m.offset[0]),
    "sum, and a parameter times a count": Case(lambda m, o, d, b: d.sum() + b["mask"].sum() * m.offset[0]),
    "mean, and a learnt temperature": Case(
        lambda m, o, d, b: d.mean() - (m.offset[0].exp() * (b["y"][:, 0] + o[:, 0].detach())).mean()
    ),
    "mean, and a parameter times the data's mean": Case(lambda m, o, d, b: d.mean() + (m.offset * b["x"].mean(0)).sum()),
    "mean, and squares of embeddings": Case(lambda m, o, d, b: d.mean() + 0.1 * m.table(b["label"]).pow(2).mean()),
    "embeddings alone": Case(
        lambda m, o, d, b: -F.logsigmoid((m.table(b["label"]) * b["x"]).sum(1)).sum() + 0.1 * m.table(b["label"]).pow(2).sum()
    ),
}  # fmt: skip
"""Read off the graph as something else than they are; each can be exact."""

NEITHER: dict[str, Case] = {
    "sum over n + 1": Case(lambda m, o, d, b: d.sum() / (len(d) + 1)),
    "mean of squares over n + 1": Case(lambda m, o, d, b: d.mean(1).sum() / (len(d) + 1)),
    "sum over the root of n": Case(lambda m, o, d, b: d.sum() / len(d) ** 0.5),
    "mean times the root of n": Case(lambda m, o, d, b: d.mean() * len(d) ** 0.5),
    "a count + 1": Case(lambda m, o, d, b: (d * b["mask"]).sum() / (b["mask"].sum() + 1)),
    "prefix sums": Case(lambda m, o, d, b: o.cumsum(0).pow(2).mean()),
    "all beside all, by None": Case(lambda m, o, d, b: (o[None] - o[:, None]).pow(2).sum(-1).neg().exp().mean()),
    "all beside all, by None, and a mean": Case(
        lambda m, o, d, b: d.mean() + (o[None] - o[:, None]).pow(2).sum(-1).neg().exp().mean()
    ),
    "batch_norm in training": Case(
        lambda m, o, d, b: F.mse_loss(F.batch_norm(o, None, None, training=True), b["y"]),
        cuts=(2, 4, (7, 8, 9)),
    ),
    "singular values": Case(lambda m, o, d, b: d.mean() - 0.1 * torch.linalg.svdvals(o).sum()),
    "nuclear norm over n": Case(lambda m, o, d, b: d.mean() + torch.linalg.svdvals(o).sum() / len(o)),
    "Switch balancing": Case(switch_balancing),
    "statistics that are detached": Case(lambda m, o, d, b: (d * (d.mean(1, keepdim=True) / d.mean()).detach()).mean()),
    "advantages made of the data": Case(
        lambda m, o, d, b: (o[:, 0] * (b["y"][:, 0] - b["y"][:, 0].mean())).mean()
    ),
}  # fmt: skip
"""No count makes them exact: each is joined."""

SILENCED: dict[str, Case] = {
    "masked mean, rows counted": Case(
        lambda m, o, d, b: (d * b["mask"]).sum() / b["mask"].sum(), num_items=lambda b: len(b["x"])
    ),
    "mean, the mask counted": Case(lambda m, o, d, b: d.mean(), num_items=lambda b: b["mask"].sum() + 1),
    "sum, rows counted": Case(lambda m, o, d, b: d.sum(), num_items=lambda b: len(b["x"])),
    "a count + 1, rows counted": Case(
        lambda m, o, d, b: (d * b["mask"]).sum() / (b["mask"].sum() + 1),
        num_items=lambda b: len(b["x"]),
    ),
    "sum over n + 1, rows counted": Case(
        lambda m, o, d, b: d.sum() / (len(d) + 1), num_items=lambda b: len(b["x"])
    ),
    "means over different things, one counted": Case(
        lambda m, o, d, b: d.mean() + (d * b["mask"]).sum() / b["mask"].sum().clamp(min=1),
        num_items=lambda b: b["mask"].sum(),
    ),
    "prefix sums, rows counted": Case(
        lambda m, o, d, b: o.cumsum(0).pow(2).mean(), num_items=lambda b: len(b["x"])
    ),
    "Switch balancing, rows counted": Case(switch_balancing, num_items=lambda b: len(b["x"])),
}  # fmt: skip
"""A ``num_items`` that is wrong, or right of what no count makes exact: it once kept everything else from being seen."""
