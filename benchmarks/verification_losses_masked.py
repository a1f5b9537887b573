"""Losses that average over what counts: masks, ignored entries, weights, lengths, counts that are Python numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    GROUPS,
    IGNORED,
    LANGUAGE,
    MASKED,
    MASKED_SCALAR,
    PLAIN,
    SOME_IGNORED,
    TIME,
    TOKENS,
    WEIGHTED,
    mask_of,
)

Tensor = torch.Tensor
cases = Cases("losses", "masks and weights")


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each token, (samples, time); nothing where it is ignored."""
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)


cases.loss("tokens, sum / mask.sum()", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / m.sum())
cases.loss("tokens, sum / mask.sum().item()", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / m.sum().item())
cases.loss(
    "tokens, sum / mask.sum().clamp(min=1)", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / m.sum().clamp(min=1)
)
cases.loss("tokens, sum / max(item, 1)", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / max(m.sum().item(), 1))
cases.loss("tokens, sum / (mask.sum() + 1e-8)", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / (m.sum() + 1e-8))
cases.loss("tokens, sum / (mask.sum() + 1)", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / (m.sum() + 1))
cases.loss("tokens, sum / (mask.sum() + 1e-3)", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / (m.sum() + 1e-3))
cases.loss("tokens, chosen by mask, mean", TOKENS, lambda o, y, m: per_token(o, y)[m.bool()].mean())
cases.loss("tokens, masked_select, mean", TOKENS, lambda o, y, m: per_token(o, y).masked_select(m > 0).mean())
cases.loss("tokens, logits chosen by mask", TOKENS, lambda o, y, m: F.cross_entropy(o[m.bool()], y[m.bool()]))
cases.loss("tokens, mask.mean()", TOKENS, lambda o, y, m: (per_token(o, y) * m).mean() / m.mean())
cases.loss("tokens, mean over all places", TOKENS, lambda o, y, m: (per_token(o, y) * m).mean())
cases.loss("tokens, sum / n", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / o.shape[0])
cases.loss("tokens, sum", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum())
cases.loss(
    "tokens, mean of each sequence, mean",
    TOKENS,
    lambda o, y, m: ((per_token(o, y) * m).sum(1) / m.sum(1).clamp(min=1)).mean(),
)
cases.loss(
    "tokens, mean of each sequence that has any",
    TOKENS,
    lambda o, y, m: ((per_token(o, y) * m).sum(1) / m.sum(1).clamp(min=1)).sum() / (m.sum(1) > 0).sum(),
)
cases.loss(
    "tokens, mean of each place, mean",
    TOKENS,
    lambda o, y, m: ((per_token(o, y) * m).sum(0) / m.sum(0).clamp(min=1)).mean(),
)
cases.loss(
    "tokens, / the longest in the batch", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / m.sum(1).max() / len(o)
)
cases.loss(
    "tokens, / the square root of their number", TOKENS, lambda o, y, m: (per_token(o, y) * m).sum() / m.sum().sqrt()
)
cases.loss(
    "tokens, negated",
    TOKENS,
    lambda o, y, m: -(o.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * m).sum() / m.sum(),
)
cases.loss(
    "tokens, negated, then / -n",
    TOKENS,
    lambda o, y, m: (o.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * m).sum() / -m.sum(),
)
cases.loss("tokens, negated, weights of -1", TOKENS, lambda o, y, m: (per_token(o, y) * -m).sum() / (-m).sum())
cases.loss(
    "tokens, torch.where", TOKENS, lambda o, y, m: torch.where(m > 0, per_token(o, y), 0.0).sum() / (m > 0).sum()
)
cases.loss("tokens, perplexity", TOKENS, lambda o, y, m: ((per_token(o, y) * m).sum() / m.sum()).exp())
cases.loss(
    "tokens, time first",
    TOKENS,
    lambda o, y, m: F.cross_entropy(o.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1), ignore_index=IGNORED),
)
cases.loss(
    "tokens, mean in a nested mean",
    TOKENS,
    lambda o, y, m: torch.stack([per_token(o, y)[:, t].sum() / m[:, t].sum().clamp(min=1) for t in range(TIME)]).sum(),
)
cases.loss(
    "tokens, later ones count more",
    TOKENS,
    lambda o, y, m: (
        (per_token(o, y) * m * torch.linspace(0.1, 1, TIME)).sum() / (m * torch.linspace(0.1, 1, TIME)).sum()
    ),
)


def sequence_by_sequence(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Average over tokens of one sequence at a time, in a loop."""
    losses = []
    for output, target, row in zip(outputs, targets, mask, strict=True):
        count = int(row.sum())
        if count > 0:
            losses.append(F.cross_entropy(output[:count], target[:count]))
    return torch.stack(losses).mean() if losses else outputs.sum() * 0.0


cases.loss("tokens, sequence by sequence, those that have any", TOKENS, sequence_by_sequence)


def running_total(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Add up losses and count tokens as Python numbers."""
    loss, count = torch.zeros(()), 0
    for output, target in zip(outputs, targets, strict=True):
        kept = target != IGNORED
        loss = loss + F.cross_entropy(output[kept], target[kept], reduction="sum")
        count += int(kept.sum())
    return loss / count


cases.loss("tokens, a running count", TOKENS, running_total)


def next_token(outputs: Tensor, inputs: Tensor, counts: Tensor) -> Tensor:
    targets = inputs[:, 1:].masked_fill(~mask_of(counts)[:, 1:], IGNORED)
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum") / max(
        int((counts - 1).sum()), 1
    )


def language_step(function: Any) -> Any:
    return lambda model, batch: function(model(batch[0]), *batch)


cases.step("next token, sum / sum of lengths", LANGUAGE, language_step(next_token))
cases.step(
    "next token, padding ignored",
    LANGUAGE,
    lambda m, b: F.cross_entropy(m(b[0])[:, :-1].transpose(1, 2), b[0][:, 1:], ignore_index=0),
)
cases.step(
    "next token, cut to the longest",
    LANGUAGE,
    lambda m, b: (
        F.cross_entropy(m(b[0][:, : b[1].max()])[:, :-1].transpose(1, 2), b[0][:, 1 : b[1].max()])
        if b[1].max() > 1
        else m(b[0]).sum() * 0
    ),
)
cases.step(
    "own token, packed",
    LANGUAGE,
    lambda m, b: F.cross_entropy(
        m(torch.cat([x[:n] for x, n in zip(*b, strict=True)])), torch.cat([x[:n] for x, n in zip(*b, strict=True)])
    ),
)
cases.step(
    "own token, pack_padded_sequence",
    LANGUAGE,
    lambda m, b: F.cross_entropy(
        torch.nn.utils.rnn.pack_padded_sequence(m(b[0]), b[1], batch_first=True, enforce_sorted=False).data,
        torch.nn.utils.rnn.pack_padded_sequence(b[0], b[1], batch_first=True, enforce_sorted=False).data,
    ),
)

cases.loss("rows, sum / mask.sum()", MASKED_SCALAR, lambda o, y, m: ((o[:, 0] - y).square() * m).sum() / m.sum())
cases.loss(
    "rows, sum / mask.sum().item()", MASKED_SCALAR, lambda o, y, m: ((o[:, 0] - y).square() * m).sum() / m.sum().item()
)
cases.loss("rows, int(mask.sum())", MASKED_SCALAR, lambda o, y, m: ((o[:, 0] - y).square() * m).sum() / int(m.sum()))
cases.loss("rows, chosen", MASKED_SCALAR, lambda o, y, m: F.mse_loss(o[m > 0, 0], y[m > 0]))
cases.loss(
    "rows, chosen by nonzero",
    MASKED_SCALAR,
    lambda o, y, m: (o[m.nonzero().squeeze(1), 0] - y[m.nonzero().squeeze(1)]).abs().mean(),
)
cases.loss(
    "rows, nan targets left out",
    MASKED_SCALAR,
    lambda o, y, m: torch.where(m > 0, (o[:, 0] - y).square(), torch.nan).nanmean(),
)
cases.loss(
    "rows, chosen, sum / n", MASKED_SCALAR, lambda o, y, m: F.mse_loss(o[m > 0, 0], y[m > 0], reduction="sum") / len(o)
)
cases.loss(
    "rows, chosen, or nothing",
    MASKED_SCALAR,
    lambda o, y, m: F.mse_loss(o[m > 0, 0], y[m > 0]) if m.any() else o.sum() * 0,
)
cases.loss(
    "rows, those that count and those that do not",
    MASKED_SCALAR,
    lambda o, y, m: (
        ((o[:, 0] - y).square() * m).sum() / m.sum().clamp(min=1)
        + 0.1 * (o[:, 0].square() * (1 - m)).sum() / (1 - m).sum().clamp(min=1)
    ),
)
cases.loss("entries, sum / mask.sum()", MASKED, lambda o, y, m: ((o - y).square() * m).sum() / m.sum())
cases.loss(
    "entries, mean of each row, mean",
    MASKED,
    lambda o, y, m: (((o - y).square() * m).sum(1) / m.sum(1).clamp(min=1)).mean(),
)
cases.loss(
    "entries, mean of each column, mean",
    MASKED,
    lambda o, y, m: (((o - y).square() * m).sum(0) / m.sum(0).clamp(min=1)).mean(),
)
cases.loss(
    "entries, weight_mean with masked arrays",
    MASKED,
    lambda o, y, m: torch.sum(m * F.smooth_l1_loss(o, y, reduction="none")) / torch.count_nonzero(m),
)
cases.loss(
    "entries, einsum", MASKED, lambda o, y, m: torch.einsum("bc,bc->", (o - y) ** 2, m) / torch.einsum("bc->", m)
)

cases.loss("weights, mean", WEIGHTED, lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * w).mean())
cases.loss(
    "weights, sum / sum", WEIGHTED, lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * w).sum() / w.sum()
)
cases.loss(
    "weights, normalised first",
    WEIGHTED,
    lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * (w / w.sum())).sum(),
)
cases.loss(
    "weights, normalised to a mean of 1",
    WEIGHTED,
    lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * (w / w.mean())).mean(),
)
cases.loss(
    "weights, softmax over the batch",
    WEIGHTED,
    lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * w.softmax(0)).sum(),
)
cases.loss(
    "weights, / the largest", WEIGHTED, lambda o, y, w: (F.cross_entropy(o, y, reduction="none") * w / w.max()).mean()
)
cases.loss("weights, dot", WEIGHTED, lambda o, y, w: F.cross_entropy(o, y, reduction="none") @ w / len(w))
cases.loss(
    "weights, dot / sum", WEIGHTED, lambda o, y, w: torch.dot(F.cross_entropy(o, y, reduction="none"), w) / torch.sum(w)
)
cases.loss(
    "weights, torch.average by hand",
    WEIGHTED,
    lambda o, y, w: torch.einsum("b,b->", F.cross_entropy(o, y, reduction="none"), w).div(w.sum()),
)
BALANCE = torch.tensor([0.2, 1.0, 0.5, 2.0], dtype=torch.float64)
cases.loss(
    "class weights by hand, sum / sum",
    PLAIN,
    lambda o, y: (F.cross_entropy(o, y, reduction="none") * BALANCE[y]).sum() / BALANCE[y].sum(),
)
cases.loss(
    "class weights by hand, mean", PLAIN, lambda o, y: (F.cross_entropy(o, y, reduction="none") * BALANCE[y]).mean()
)
cases.loss(
    "class weights of the batch",
    PLAIN,
    lambda o, y: F.cross_entropy(o, y, weight=len(y) / (torch.bincount(y, minlength=CLASSES) + 1.0)),
)
cases.loss(
    "class weights of the batch by hand",
    PLAIN,
    lambda o, y: (F.cross_entropy(o, y, reduction="none") / torch.bincount(y, minlength=CLASSES)[y]).sum(),
)
cases.loss(
    "mean of the means of classes",
    PLAIN,
    lambda o, y: torch.stack([F.cross_entropy(o[y == c], y[y == c]) for c in y.unique()]).mean(),
)
cases.loss(
    "mean of the means of groups",
    GROUPS,
    lambda o, y, g: torch.stack([F.cross_entropy(o[g == k], y[g == k]) for k in g.unique()]).mean(),
)
cases.loss(
    "the worst group",
    GROUPS,
    lambda o, y, g: torch.stack([F.cross_entropy(o[g == k], y[g == k]) for k in g.unique()]).max(),
)
cases.loss(
    "groups, by scatter_add",
    GROUPS,
    lambda o, y, g: (
        torch.zeros(3).scatter_add(0, g, F.cross_entropy(o, y, reduction="none"))
        / torch.bincount(g, minlength=3).clamp(min=1)
    ).mean(),
)
cases.loss(
    "groups, by index_add, sums",
    GROUPS,
    lambda o, y, g: torch.zeros(3).index_add(0, g, F.cross_entropy(o, y, reduction="none")).sum() / len(y),
)
cases.loss(
    "groups, their sums squared",
    GROUPS,
    lambda o, y, g: torch.zeros(3).index_add(0, g, F.cross_entropy(o, y, reduction="none")).square().sum(),
)
cases.loss(
    "two groups, each its mean",
    GROUPS,
    lambda o, y, g: (
        F.cross_entropy(o[g == 1], y[g == 1])
        if (g == 1).all()
        else F.cross_entropy(o, y) + (F.cross_entropy(o[g == 1], y[g == 1]) if (g == 1).any() else 0.0)
    ),
)
cases.loss(
    "some ignored, log_softmax by hand",
    SOME_IGNORED,
    lambda o, y: -(o.log_softmax(1)[torch.arange(len(y)), y.clamp(min=0)] * (y >= 0)).sum() / (y >= 0).sum(),
)
cases.loss(
    "some ignored, smoothed by hand",
    SOME_IGNORED,
    lambda o, y: 0.9 * F.cross_entropy(o, y) - 0.1 * o.log_softmax(1)[y >= 0].mean(),
)
cases.loss(
    "some ignored, smoothing over all",
    SOME_IGNORED,
    lambda o, y: 0.9 * F.cross_entropy(o, y) - 0.1 * o.log_softmax(1).mean(),
)
cases.loss(
    "some ignored, num_items given", SOME_IGNORED, F.cross_entropy, num_items=lambda batch: (batch[1] != IGNORED).sum()
)
cases.loss("some ignored, wrong num_items given", SOME_IGNORED, F.cross_entropy, num_items=lambda batch: len(batch[1]))
