"""The pieces that benchmarks/compositions.py puts together: losses of items, masks, ways to reduce, what couples.

Each is Python code in which ``{...}`` is filled in. The names in it are those of a batch (compositions_runs.py): ``o``,
the model's outputs, ``y``, labels of which some are ignored, ``c``, labels none of which is, ``r``, targets as ``o``,
``m``, a mask of the items, ``k``, one of the samples, ``w``, weights of samples, ``s``, signs of samples.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What a loss of items is shaped like, and what it can be masked or weighted with."""

    letters: str
    """A letter for each dimension: n samples, t times, k outputs; f for samples and times in one."""
    masks: tuple[str, ...]
    """Zeros and ones, all of the same shape."""
    weights: tuple[str, ...]
    """Any numbers that broadcast to it."""


# Of a model with outputs (n, k).
OF_SAMPLES = Shape("n", ("k", "(y >= 0).double()"), ("w", "k * w", "(w / 2)"))
OF_OUTPUTS = Shape("nk", ("m",), ("w[:, None]", "k[:, None]", "m * w[:, None]", "k[:, None] * m"))
# Of one with outputs (n, t, k).
OF_TOKENS = Shape("nt", ("m", "(y >= 0).double()"), ("w[:, None]", "k[:, None]", "m * w[:, None]", "k[:, None] * m"))
OF_ALL_TOKENS = Shape("f", ("m.flatten()", "(y >= 0).double().flatten()"), ("(m * w[:, None]).flatten()",))
OF_ALL = Shape("ntk", ("m[..., None].expand_as(o)",), ("w[:, None, None]", "m[..., None]", "k[:, None, None]"))

SAMPLES = (
    'F.cross_entropy(o, y, reduction="none")',
    'F.cross_entropy(o, c, reduction="none")',
    'F.cross_entropy(o, c, weight=torch.linspace(0.5, 2, o.shape[1]), reduction="none")',
    'F.cross_entropy(o, y, label_smoothing=0.1, reduction="none")',
    "-o.log_softmax(1).gather(1, c[:, None]).squeeze(1)",
    "-o.log_softmax(1)[torch.arange(len(o)), c]",
    "-torch.distributions.Categorical(logits=o).log_prob(c)",
    "-torch.distributions.Normal(o[:, 0], 0.5).log_prob(r[:, 0])",
    "-o.log_softmax(1)[:, 0] * r[:, 0]",
    "o.logsumexp(1) - r.mean(1)",
    "F.relu(1 - s * o[:, 0])",
    "F.softplus(-s * o[:, 0])",
    "(1 - s * o.mean(1)).clamp(min=0).square()",
    "(o - r).square().sum(1)",
    "(o - r).abs().mean(1)",
    "(o - r).norm(dim=1)",
    "1 - F.cosine_similarity(o, r)",
    'F.kl_div(o.log_softmax(1), r.softmax(1), reduction="none").sum(1)',
    'F.multi_margin_loss(o, c, reduction="none")',
    "(o * r).sum(1)",
    'torch.einsum("nk,nk->n", o, r)',
    "F.relu(o.amax(1) - o[:, 0] + 0.5)",
    'F.huber_loss(o[:, 0], r[:, 0], reduction="none")',
    'F.binary_cross_entropy_with_logits(o[:, 0], k, reduction="none")',
)
ELEMENTS = (
    'F.mse_loss(o, r, reduction="none")',
    "(o - r).square()",
    "(o - r) ** 2",
    "(o - r).abs()",
    'F.l1_loss(o, r, reduction="none")',
    'F.huber_loss(o, r, reduction="none")',
    'F.smooth_l1_loss(o, r, reduction="none")',
    'F.binary_cross_entropy_with_logits(o, (r > 0).double(), reduction="none")',
    'F.binary_cross_entropy(o.sigmoid(), (r > 0).double(), reduction="none")',
    'F.kl_div(o.log_softmax(-1), r.softmax(-1), reduction="none")',
    "-o.log_softmax(-1) * r.softmax(-1)",
    'F.poisson_nll_loss(o, r.abs(), reduction="none")',
    'F.gaussian_nll_loss(o, r, torch.ones_like(o), reduction="none")',
    "torch.log(torch.cosh(o - r))",
    "torch.log1p((-o * r).exp())",
    "o.square()",
    "o * r",
)
TOKENS = (
    'F.cross_entropy(o.transpose(1, 2), y, reduction="none")',
    'F.cross_entropy(o.transpose(1, 2), c, reduction="none")',
    "-o.log_softmax(-1).gather(-1, c[..., None]).squeeze(-1)",
    "o.logsumexp(-1) - o[..., 0]",
    "(o - r).square().mean(-1)",
    "(o - r).abs().sum(-1)",
    "F.relu(1 - s[:, None] * o[..., 0])",
    "F.softplus(o[..., 0] * r[..., 0])",
)
ALL_TOKENS = (
    'F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="none")',
    'F.cross_entropy(o.reshape(-1, o.shape[-1]), c.reshape(-1), reduction="none")',
    "(o - r).square().mean(-1).flatten()",
)

WHOLE_FLAT = (
    "F.cross_entropy(o, y)",
    "F.cross_entropy(o, c)",
    'F.cross_entropy(o, y, reduction="sum")',
    "F.cross_entropy(o, y, weight=torch.linspace(0.5, 2, o.shape[1]))",
    "F.cross_entropy(o, y, label_smoothing=0.1)",
    "F.nll_loss(o.log_softmax(1), y)",
    "F.cross_entropy(o, r.softmax(1))",
    "F.cross_entropy(o[k > 0], c[k > 0])",
    "F.mse_loss(o[k > 0], r[k > 0])",
    'F.mse_loss(o, r, reduction="sum") / len(o)',
    "F.multi_margin_loss(o, c)",
    'F.kl_div(o.log_softmax(1), r.softmax(1), reduction="batchmean")',
    "F.mse_loss(o[:, 0], r[:, 0])",
    "F.mse_loss(o[:, :1].squeeze(), r[:, :1].squeeze())",
    "F.binary_cross_entropy_with_logits(o[:, 0], k)",
    "F.soft_margin_loss(o[:, 0], s)",
    "F.hinge_embedding_loss(o[:, 0], s)",
    "F.cosine_embedding_loss(o, r, s)",
    "F.mse_loss(o * m, r * m)",
    'F.mse_loss(o * m, r * m, reduction="sum") / m.sum()',
)
WHOLE_TOKENS = (
    "F.cross_entropy(o.transpose(1, 2), y)",
    'F.cross_entropy(o.transpose(1, 2), y, reduction="sum")',
    "F.cross_entropy(o.flatten(0, 1), y.flatten())",
    "F.cross_entropy(o.flatten(0, 1), c.flatten())",
    "F.cross_entropy(o[:, :-1].flatten(0, 1), c[:, 1:].flatten())",
    'F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / len(o)',
    'F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / (y >= 0).sum()',
    "F.cross_entropy(o[m > 0], c[m > 0])",
    "F.mse_loss(o[m > 0], r[m > 0])",
    "F.mse_loss(o.mean(1), r.mean(1))",
    "F.cross_entropy(o.mean(1), c[:, 0])",
)
WHOLE = (
    "F.mse_loss(o, r)",
    'F.mse_loss(o, r, reduction="sum")',
    "F.l1_loss(o, r)",
    'F.l1_loss(o, r, reduction="sum") / o.numel()',
    "F.huber_loss(o, r)",
    "F.smooth_l1_loss(o, r)",
    "F.binary_cross_entropy_with_logits(o, (r > 0).double())",
    'F.binary_cross_entropy_with_logits(o, (r > 0).double(), reduction="sum")',
    'F.kl_div(o.log_softmax(-1), r.softmax(-1), reduction="sum") / len(o)',
    "F.kl_div(o.log_softmax(-1), r.softmax(-1))",
)

REDUCTIONS = (
    "{e}.mean()",
    "{e}.sum()",
    "{e}.sum() / len(o)",
    "{e}.sum() / o.shape[0]",
    "{e}.sum() / {e}.numel()",
    "{e}.sum() / {number}",
    "{e}.sum() * {number}",
    "{e}.mean() / {number}",
    "{e}.mean() * {number}",
    "{e}.sum().div(len(o))",
    "{e}.mean(0).sum()",
    "{e}.sum(0).mean()",
    "torch.stack([v.mean() for v in {e}]).mean()",
    "torch.stack([v.sum() for v in {e}]).sum()",
    "torch.stack([v.sum() for v in {e}]).mean()",
    "sum(v.mean() for v in {e}) / len(o)",
    "sum(v.sum() for v in {e})",
    "{e}.flatten().mean()",
    "{e}[None].mean()",
    "{e}.unsqueeze(0).sum(1).mean()",
    "{e}.squeeze().sum()",
    "{e}.squeeze().mean()",
    "{e}.nanmean()",
    'torch.einsum("{letters}->", {e})',
    'torch.einsum("{letters}->", {e}) / len(o)',
    "torch.ones(len({e}), dtype=torch.float64) @ {e}.reshape(len({e}), -1).mean(1)",
    "torch.cat([{e}.flatten(), {e}.flatten()]).mean()",
    "torch.cat([v.flatten() for v in {e}]).mean()",
    "torch.cat([{e}.flatten(), o.square().flatten()]).mean()",
    "torch.cat([{e}.flatten(), o.square().flatten()]).sum()",
    "torch.stack([{e}.mean(), o.square().mean()]).sum()",
    "torch.stack([{e}.sum(), o.abs().sum()]).mean()",
)
REDUCTIONS_OF_SEVERAL = (
    "{e}.mean(1).sum()",
    "{e}.sum(1).mean()",
    "{e}.mean(-1).mean(0).sum()",
    "{e}.mean(1).mean()",
    "{e}.sum(-1).sum(0).mean()",
    "{e}.flatten(1).sum(1).mean()",
    "{e}.flatten(1).mean(1).sum()",
    "{e}.sum(-1).mean(0).sum()",
    "{e}.mean(0).mean()",
    "{e}.logsumexp(-1).mean()",
    "{e}.logsumexp(-1).sum()",
    "{e}.amax(-1).mean()",
    "{e}.mean(dim=-1, keepdim=True).sum() / len(o)",
    "{e}.sum(1).sum() / {e}.shape[1]",
    "{e}.sum() / {e}.shape[-1]",
)
MASKED = (
    "({e} * {m}).sum() / {m}.sum()",
    "({e} * {m}).sum() / {m}.sum().clamp(min=1)",
    "({e} * {m}).sum() / max({m}.sum().item(), 1)",
    "({e} * {m}).sum() / ({m}.sum() + 1e-8)",
    "({e} * {m}).sum() * (1 / {m}.sum().item())",
    "({e} * {m}).sum().div({m}.sum())",
    "-({e} * {m}).sum() / {m}.sum()",
    "({e} * {m}).mean() / {m}.mean()",
    "({e} * {m}).mean()",
    "({e} * {m}).sum()",
    "({e} * {m}).sum() / len(o)",
    "({e} * {m}).sum() / {number}",
    "({e} * {m}).mean(0).sum()",
    "{e}[{m} > 0].mean()",
    "{e}[{m} > 0].sum()",
    "{e}[{m} > 0].sum() / len(o)",
    "{e}.masked_select({m} > 0).mean()",
    "{e}.masked_fill({m} == 0, 0.0).sum() / {m}.sum()",
    "torch.where({m} > 0, {e}, 0.0).mean()",
    "torch.where({m} > 0, {e}, 0.0).sum() / {m}.sum().clamp(min=1)",
    'torch.einsum("{letters},{letters}->", {e}, {m})',
    'torch.einsum("{letters},{letters}->", {e}, {m}) / {m}.sum()',
    "sum((v * u).sum() / u.sum().clamp(min=1) for v, u in zip({e}, {m}, strict=True)) / len(o)",
    "sum((v * u).sum() for v, u in zip({e}, {m}, strict=True)) / {m}.sum()",
    "torch.stack([(v * u).sum() for v, u in zip({e}, {m}, strict=True)]).mean()",
    "torch.dot({e}.flatten(), {m}.flatten()) / {m}.sum()",
)
MASKED_OF_SEVERAL = (
    "(({e} * {m}).sum(1) / {m}.sum(1).clamp(min=1)).mean()",
    "(({e} * {m}).sum(1) / {m}.sum(1).clamp(min=1)).sum()",
    "({e} * {m}).sum(1).mean()",
    "({e} * {m}).mean(1).sum()",
    "(({e} * {m}).sum(1) / ({m}.sum(1) + 1e-8)).mean()",
    "(({e} * {m}).sum(-1) / {m}.sum(-1).clamp(min=1)).sum() / len(o)",
)
WEIGHTED = (
    "({e} * {m}).mean()",
    "({e} * {m}).sum()",
    "({e} * {m}).sum() / len(o)",
    "({e} * {m}).sum() / {m}.sum()",
    "({e} * {m}).sum() / {m}.sum().clamp(min=1)",
    "({e} * {m}).sum() / {m}.expand_as({e}).sum()",
    "({e} * {m}).sum(0).mean()",
    "torch.stack([v.mean() for v in {e} * {m}]).sum()",
)

COUPLED = (
    "{e}.sum() / (len(o) + 1)",
    "{e}.sum() / len(o) ** 0.5",
    "{e}.sum() / (len(o) - 0.5)",
    "{e}.mean() * len(o) ** 0.5",
    "{e}.sum() / (({e} > 0.5).sum() + 1)",
    "({e}.mean().square() + 0.1).sqrt()",
    "({e}.square().mean() + 0.1).sqrt()",
    "{e}.mean().square()",
    "{e}.mean().exp()",
    "torch.log1p({e}.square().sum())",
    "({e}.softmax(0) * {e}).sum()",
    "({e}.detach().softmax(0) * {e}).sum()",
    "({e} * w.repeat_interleave(len({e}) // len(w)).reshape(-1, *[1] * ({e}.ndim - 1)) / w.max()).mean()",
    "({e} * w.repeat_interleave(len({e}) // len(w)).reshape(-1, *[1] * ({e}.ndim - 1)) / w.mean()).sum()",
    "{e}.max()",
    "{e}.amax(0).sum()",
    "{e}.logsumexp(0).sum()",
    "{e}.flatten().logsumexp(0)",
    "{e}.cumsum(0).mean()",
    "{e}.flatten().sort().values[: len(o)].mean()",
    "{e}.flatten().topk((len(o) + 1) // 2).values.mean()",
    "{e}.median()",
    "({e} - {e}.mean(0)).square().sum()",
    "({e} - {e}.mean()).square().mean()",
    "(({e} - {e}.detach().mean()) * {e}).mean()",
    "({e}.square().sum() + 0.1).sqrt()",
    "{e}.mean() * o.mean()",
    "{e}.mean() / (o.detach().square().mean() + 1)",
    "{e}.mean() * (1 + o.mean().item() ** 2)",
    "torch.outer({e}.flatten(), {e}.flatten()).mean()",
)
COUPLED_OUTPUTS = (
    "torch.cdist(o.flatten(1), r.flatten(1)).mean()",
    "(o.flatten(1)[:, None] - o.flatten(1)[None]).square().mean()",
    "(o.flatten(1) @ o.flatten(1).T).square().mean()",
    "F.cross_entropy(o.flatten(1) @ r.flatten(1).T, torch.arange(len(o)))",
    "(o - o.mean(0)).square().mean()",
    "(o.mean(0) - r.mean(0)).square().sum()",
    "F.mse_loss(o.softmax(0), r.softmax(0))",
    "(o.flatten(1).T @ o.flatten(1) / len(o)).square().sum()",
    "-(o.softmax(-1).flatten(0, -2).mean(0) * o.softmax(-1).flatten(0, -2).mean(0).log()).sum()",
    "F.mse_loss(o.flip(0), r)",
    "F.mse_loss(o.roll(1, 0), r)",
    "F.mse_loss(o - o.detach().mean(0), r)",
)

PENALTIES = (
    "sum(p.square().sum() for p in model.parameters())",
    "sum(p.abs().sum() for p in model.parameters())",
    "model.last.weight.square().sum()",
    "model.last.weight.abs().mean()",
    "model.last.weight.norm()",
    "torch.cat([p.flatten() for p in model.parameters()]).square().mean()",
    "model.scale.square()",
)
LEARNT = (
    "{a} * model.scale",
    "{a} * model.scale.exp()",
    "{a} * (-model.scale).exp() + model.scale",
    "{a} / (2 * model.scale.exp()) + model.scale / 2",
)
OTHER_FORMS = (
    "-{a}",
    "{number} * {a}",
    "{a} / {number}",
    "{a}[None].mean()",
    "{a}.reshape(1).squeeze()",
    "torch.stack([{a}]).sum()",
    "0 - {a}",
    "{a} - {a}.detach() + {number}",
    "{a} + {number}",
    "({a} + {a}) / 2",
)
NUMBERS = ("0.5", "2", "3", "4", "6", "8", "0.1", "10", "0.01", "100")
