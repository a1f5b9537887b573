"""Law 7 beside law 1: losses that are easily misread are exact, or announced, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from tests.laws.test_laws_losses import CLASSES, WEIGHTS, PerToken, data, errors, penalty

Loss = Callable[[Any, Any], torch.Tensor]
PLANS = pytest.mark.parametrize(
    "micro_batch", [1, 2, 3, 4, [(5, 1, 3, 2)], [(4, 4, 3)], [(3, 2, 6)], "auto"], ids=lambda plan: str(plan)
)
TIMES = torch.arange(1.0, 7.0, dtype=torch.double)


def of_samples(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Any], torch.Tensor]) -> Loss:
    """(logits, each sample's loss, mask, samples, model) -> loss"""

    def step(model: Any, batch: Any) -> torch.Tensor:
        logits, targets = model(batch[0])[:, 0], batch[1][:, 0].clamp(0)
        return loss(logits, F.cross_entropy(logits, targets, reduction="none"), targets != 0, len(targets), model)

    return step


def weighted(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """(each sample's loss, a weight of each) -> loss"""
    return lambda m, b: loss(
        F.cross_entropy(m(b[0])[:, 0], b[1][:, 0].clamp(0), reduction="none"), b[0].abs().mean((1, 2))
    )


MISREAD: dict[str, Loss] = {
    "sum times one over n": of_samples(lambda o, per, k, n, m: per.sum() * (1 / n)),
    "masked sum times a reciprocal": of_samples(lambda o, per, k, n, m: (per * k).sum() * k.sum().clamp(1).reciprocal()),
    "mean over a mean": of_samples(lambda o, per, k, n, m: (per * k).mean() / k.double().mean().clamp(1e-9)),
    "mean times n": of_samples(lambda o, per, k, n, m: per.mean() * n),
    "mean over n": of_samples(lambda o, per, k, n, m: per.mean() / n),
    "a weight that balances": of_samples(
        lambda o, per, k, n, m: per.mean() + o.pow(2).mean() * (per.mean() / o.pow(2).mean()).detach()
    ),
    "sum and penalty, over n": of_samples(lambda o, per, k, n, m: (per.sum() + penalty(m)) / n),
    "constant over n, and penalty": of_samples(lambda o, per, k, n, m: (12 / n) * per.sum() + penalty(m)),
    "each over n": of_samples(lambda o, per, k, n, m: (per / n).sum()),
    "each over the mask": of_samples(lambda o, per, k, n, m: (per * k / k.sum().clamp(1)).sum()),
    "weights": weighted(lambda per, w: (per * w).mean()),
    "weights, summed": weighted(lambda per, w: (w * per).sum()),
    "weights over their sum": weighted(lambda per, w: (per * w / w.sum()).sum()),
    "weights that sum to one": weighted(lambda per, w: (per * (w / w.sum())).sum()),
    "weights made to sum to one": weighted(lambda per, w: (per * w.softmax(0)).sum()),
    "weights that average to one": weighted(lambda per, w: (per * (w / w.mean())).mean()),
    "time first, sum then mean": lambda m, b: m(b[0]).pow(2).sum(2).T.sum(0).mean(),
    "time first, mean then sum": lambda m, b: m(b[0]).pow(2).sum(2).T.mean(0).sum(),
    "time first, flat": lambda m, b: m(b[0]).pow(2).transpose(0, 1).mean(),
    "weights of tasks": of_samples(lambda o, per, k, n, m: (o.pow(2).mean(0) * WEIGHTS).sum()),
    "means of columns": of_samples(lambda o, per, k, n, m: o.T.pow(2).mean(1).sum()),
    "a list, summed": of_samples(lambda o, per, k, n, m: torch.stack([o[:, i].pow(2).mean() for i in range(3)]).sum()),
    "a weighted list": of_samples(
        lambda o, per, k, n, m: (torch.stack([o[:, i].pow(2).mean() for i in range(3)]) * WEIGHTS[:3]).sum()
    ),
    "quantiles": of_samples(lambda o, per, k, n, m: torch.stack([o[:, i].pow(2) for i in range(3)]).sum(0).mean()),
    "learnt weights of a list": of_samples(
        lambda o, per, k, n, m: (torch.stack([per.mean(), o.pow(2).mean()]) * torch.exp(-m.scale) + m.scale).sum()
    ),
    "means of means": lambda m, b: m(b[0]).pow(2).mean(0).sum(0).sum(0),
    "sum of means of means": lambda m, b: m(b[0]).pow(2).sum(0).mean(0).mean(0),
    "a scalar, summed": of_samples(lambda o, per, k, n, m: per.mean().unsqueeze(0).sum()),
    "sum and sigmoid of parameters": of_samples(lambda o, per, k, n, m: per.sum() + m.net[0].weight.sigmoid().sum()),
    "constant divisor": of_samples(lambda o, per, k, n, m: o.abs().sum() / 12),
    "samples of another window": of_samples(lambda o, per, k, n, m: o.abs().sum() / 4),
    "kept above none": of_samples(lambda o, per, k, n, m: (per * k).sum() / max(1, int(k.sum()))),
    "a loop over samples": of_samples(lambda o, per, k, n, m: sum(F.mse_loss(o[i], WEIGHTS) for i in range(n))),  # type: ignore[arg-type,misc,return-value]
    "a mean of a loop": of_samples(lambda o, per, k, n, m: sum(F.mse_loss(o[i], WEIGHTS) for i in range(n)) / n),  # type: ignore[arg-type,misc,return-value]
    "learnt scale of a sum": of_samples(lambda o, per, k, n, m: torch.exp(-m.scale) * per.sum() + m.scale),
    "learnt offset in a sum": of_samples(lambda o, per, k, n, m: ((o - m.scale) ** 2).sum() + m.scale),
    "a norm that data use too": of_samples(
        lambda o, per, k, n, m: ((o * (w := m.net[0].weight.norm())) ** 2).sum() + w
    ),
    "entropy of no state": of_samples(lambda o, per, k, n, m: per.sum() + m.scale.expand(n).sum()),
    "samples times a parameter": of_samples(
        lambda o, per, k, n, m: 0.5 * torch.exp(-2 * m.scale) * o.pow(2).sum() + n * 4 * m.scale
    ),
    "sum over twice n": of_samples(lambda o, per, k, n, m: o.pow(2).sum() / (2 * n)),
    "sum over minus n": of_samples(lambda o, per, k, n, m: o.log_softmax(1)[:, 0].sum() / -n),
    "distillation": of_samples(
        lambda o, per, k, n, m: F.kl_div(o.log_softmax(1), WEIGHTS.softmax(0).expand(n, 5), reduction="batchmean") * 16
    ),
    "mixed soft targets": of_samples(
        lambda o, per, k, n, m: 0.3 * F.cross_entropy(o, WEIGHTS.softmax(0).expand(n, 5)) + 0.7 * per.mean()
    ),
    "mean times n and two": of_samples(lambda o, per, k, n, m: o.pow(2).mean() * n * 2),
    "masked patches": of_samples(lambda o, per, k, n, m: (o.pow(2).mean(-1) * k).sum() / k.sum().clamp(1)),
    "as many in each": lambda m, b: (m(b[0]).pow(2).mean(-1)[:, :3]).sum() / torch.ones(len(b[0]), 3).sum(),
    "kept above none, and penalty": of_samples(
        lambda o, per, k, n, m: (per * k).sum() / k.sum().clamp(1) + penalty(m)
    ),
    "hinge": of_samples(lambda o, per, k, n, m: F.relu(o[:, 0] + 0.1).sum() / torch.tensor(float(n))),
    "times a constant tensor": of_samples(lambda o, per, k, n, m: per.sum() * torch.tensor(0.25)),
    "over a constant tensor": of_samples(lambda o, per, k, n, m: per.sum() / torch.tensor(12.0)),
    "expanded": of_samples(lambda o, per, k, n, m: per.mean().expand(3).sum()),
    "filled in": of_samples(lambda o, per, k, n, m: torch.zeros(4).double().index_add(0, torch.arange(n) % 4, per).mean()),
    "a list of sum and penalty": of_samples(lambda o, per, k, n, m: torch.stack([per.sum(), penalty(m)]).sum()),
    "a loop of cross entropies": of_samples(
        lambda o, per, k, n, m: sum(F.cross_entropy(o[i : i + 1], torch.tensor([0])) for i in range(n))  # type: ignore[arg-type,misc,return-value]
    ),
    "a guard": lambda m, b: (
        F.cross_entropy(m(b[0]).flatten(0, 1)[v], b[1].flatten()[v])
        if (v := b[1].flatten() != -100).any()
        else m(b[0]).sum() * 0
    ),
    "two masks": of_samples(
        lambda o, per, k, n, m: (per * k).sum() / k.sum().clamp(1) + (per * ~k).sum() / (~k).sum().clamp(1)
    ),
    "picked": of_samples(lambda o, per, k, n, m: per[k].sum()),
    "picked over their number": of_samples(lambda o, per, k, n, m: per[k].sum() / k.sum().clamp(1)),
    "prefix sums": of_samples(lambda o, per, k, n, m: sum(per[: i + 1].sum() for i in range(n)) / n),  # type: ignore[return-value]
    "with a broken name": of_samples(lambda o, per, k, n, m: Clone.apply(o)),  # type: ignore[no-untyped-call]
    "gradient penalty": of_samples(
        lambda o, per, k, n, m: per.mean()
        + sum(g.pow(2).mean() for g in torch.autograd.grad(per.mean(), m.net.parameters(), create_graph=True))
    ),
}  # fmt: skip


class Clone(torch.autograd.Function):
    """A sum of squares under the name of an operation of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


NOTHING_SHOWS = ("a loop over samples-1", "a loop of cross entropies-1", "hinge-1")
"""Of one sample alone they are what a mean is."""


@pytest.mark.weighted
@pytest.mark.every(3)
@PLANS
@pytest.mark.parametrize("name", MISREAD)
def test_it_is_exact_or_announced(name: str, micro_batch: Any) -> None:
    gradient, _, notices = errors(MISREAD[name], data(), micro_batch)
    assert gradient < 1e-7 or notices or f"{name}-{micro_batch}" in NOTHING_SHOWS, gradient


SAME_AS_COUNTS = {
    "over a constant tensor": (2, 3, 4, 6), "times a constant tensor": (2, 4), "samples of another window": (4,),
    "mean times n": (2,), "mean over n": (2,), "mean times n and two": (2,),
    "learnt weights of a list": (2,), "expanded": (3,), "filled in": (2, 4),
}  # fmt: skip
"""In micro-batches of equal sizes a constant, or an extent, may be just what a count would be."""


@pytest.mark.weighted
@pytest.mark.every(3)
@pytest.mark.parametrize("micro_batch", [2, 3, 4, 6])
@pytest.mark.parametrize("name", MISREAD)
def test_it_is_exact_or_announced_in_equal_micro_batches_too(name: str, micro_batch: int) -> None:
    inputs, targets = data()
    twelve = torch.cat([inputs, inputs[:1] + 1]), torch.cat([targets, targets[:1]])
    gradient, _, notices = errors(MISREAD[name], twelve, micro_batch)
    assert gradient < 1e-7 or notices or micro_batch in SAME_AS_COUNTS.get(name, ()), gradient


PLAIN = {
    "sum over twice n", "sum over minus n", "distillation", "masked patches", "a guard", "mixed soft targets",
    "weights", "weights, summed", "weights over their sum",
    "one minus a mean", "mean times a number", "each over the mask", "time first, flat", "picked", "quantiles",
    "time first, sum then mean", "masked sum times a reciprocal", "a scalar, summed", "weights of tasks",
    "means of means", "sum of means of means", "picked over their number",
}  # fmt: skip


@pytest.mark.parametrize("micro_batch", [[(5, 4, 2)], [(4, 4, 3)]], ids=str)
@pytest.mark.parametrize("name", sorted(PLAIN & set(MISREAD)))
def test_what_is_exact_is_not_announced(name: str, micro_batch: Any) -> None:
    gradient, _, notices = errors(MISREAD[name], data(), micro_batch)
    assert gradient < 1e-7
    assert notices == []


COUPLED: dict[str, Loss] = {
    "pairs of samples": of_samples(lambda o, per, k, n, m: F.cross_entropy(o @ o.roll(1, 0).T, torch.arange(n))),
    "many passages each": of_samples(
        lambda o, per, k, n, m: F.cross_entropy(o @ o.repeat_interleave(8, 0).add(1).T, 8 * torch.arange(n))
    ),
    "linear with bias": of_samples(
        lambda o, per, k, n, m: F.cross_entropy(
            F.linear(o, o.exp(), torch.zeros(n, dtype=torch.double)), torch.arange(n)
        )
    ),
    "broadcast distances": of_samples(lambda o, per, k, n, m: (o[:, None] - o[None]).pow(2).sum(-1).exp().mean()),
    "Barlow Twins": of_samples(lambda o, per, k, n, m: (o.T @ o.exp() / n - torch.eye(CLASSES)).pow(2).sum()),
    "variances": of_samples(lambda o, per, k, n, m: (1 - o.std(0, correction=0)).relu().mean() + o.pow(2).mean()),
    "list-wise": of_samples(lambda o, per, k, n, m: -(o[:, 0].log_softmax(0) * o[:, 1].detach().softmax(0)).sum()),
    "Cox": of_samples(lambda o, per, k, n, m: (torch.logcumsumexp(o[:, 0], 0) - o[:, 0]).mean()),
    "hardest": of_samples(lambda o, per, k, n, m: per.topk(max(1, n // 2)).values.mean()),
    "spread": of_samples(lambda o, per, k, n, m: ((per - per.mean()) ** 2).mean()),
    "entropy of the mean": of_samples(lambda o, per, k, n, m: -(p := o.softmax(1).mean(0)).mul(p.log()).sum()),
}


@pytest.mark.weighted
@pytest.mark.parametrize("micro_batch", [[(5, 4, 2)], [(6, 5)], "auto"], ids=str)
@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_meet_are_announced(name: str, micro_batch: Any) -> None:
    gradient, _, notices = errors(COUPLED[name], data(), micro_batch)
    # Where it is not said how windows are split, the full batch runs at once, and its gradient is exact.
    assert gradient == 0 if micro_batch == "auto" else gradient > 1e-6
    assert [notice.consequence[:17] for notice in notices] in (["No weights of mic"], ["Micro-batches may"])


def _kd(o: torch.Tensor, per: torch.Tensor, k: torch.Tensor, n: int, m: Any) -> torch.Tensor:
    teacher = WEIGHTS.softmax(0).expand(n, 5)
    return 0.5 * per.mean() + 0.5 * 4 * F.kl_div((o / 2).log_softmax(1), teacher, reduction="batchmean")


COMMON: dict[str, Loss] = {
    "scaled": of_samples(lambda o, per, k, n, m: 100 * per.mean() / 7),
    "scaled sum": of_samples(lambda o, per, k, n, m: 0.01 * (o - 1).pow(2).sum()),
    "with a penalty": of_samples(lambda o, per, k, n, m: per.mean() + 0.01 * penalty(m) + penalty(m) / 2),
    "two halves": of_samples(lambda o, per, k, n, m: (per.mean() + F.mse_loss(o, o.detach() + 1)) / 2),
    "distillation": of_samples(_kd),
    "uncertainty": of_samples(
        lambda o, per, k, n, m: torch.exp(-m.scale) * per.mean() + m.scale + 0.5 * o.pow(2).mean() * torch.exp(m.scale)
    ),
    "evidence": of_samples(lambda o, per, k, n, m: per.mean() - 0.5 * torch.mean(1 + o - o.pow(2) - o.exp())),
    "evidence over samples": of_samples(
        lambda o, per, k, n, m: (per.sum() - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp())) / n
    ),
    "label smoothing": of_samples(
        lambda o, per, k, n, m: F.cross_entropy(o, torch.zeros(n).long(), label_smoothing=0.1)
    ),
    "soft targets": of_samples(lambda o, per, k, n, m: F.cross_entropy(o, WEIGHTS.softmax(0).expand(n, 5))),
    "soft targets by hand": of_samples(lambda o, per, k, n, m: -(WEIGHTS.softmax(0) * o.log_softmax(1)).sum(1).mean()),
    "focal": of_samples(lambda o, per, k, n, m: ((1 - (-per).exp()) ** 2 * per).mean()),
    "advantages of sequences": of_samples(
        lambda o, per, k, n, m: -((o.log_softmax(1) * o.detach()[:, :1]).mean(1) * k).sum() / k.sum().clamp(min=1)
    ),
    "auxiliary head": of_samples(lambda o, per, k, n, m: per.mean() + 0.4 * (2 * per).mean()),
    "entropy bonus": of_samples(
        lambda o, per, k, n, m: per.mean() + 0.01 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean()
    ),
    "Gaussian": of_samples(lambda o, per, k, n, m: F.gaussian_nll_loss(o, o.detach() + 1, torch.ones_like(o))),
    "margin": of_samples(lambda o, per, k, n, m: F.multi_margin_loss(o, torch.zeros(n).long())),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("micro_batch", [3, 4, 6, [(5, 4, 3)], "auto"], ids=str)
@pytest.mark.parametrize("name", COMMON)
def test_common_losses_are_exact_and_not_announced(name: str, micro_batch: Any) -> None:
    inputs, targets = data()
    twelve = torch.cat([inputs, inputs[:1] + 1]), torch.cat([targets, targets[:1]])
    gradient, loss, notices = errors(COMMON[name], twelve, micro_batch)
    assert max(gradient, loss) < 1e-9
    assert notices == []


@pytest.mark.weighted
def test_pairs_are_announced_in_micro_batches_of_one_too() -> None:
    assert errors(COUPLED["pairs of samples"], data(), 1)[2]


def test_a_graph_that_shares_its_nodes_is_read_in_time() -> None:
    """Walked path by path, forty halvings would be 2 ** 40 of them."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = model(batch[0]).pow(2).mean()
        for _ in range(40):
            loss = loss + 0.5 * loss
        return loss  # type: ignore[no-any-return]

    gradient, _, notices = errors(step, data(), 4)
    assert gradient < 1e-9 or notices


def test_a_recurrence_is_no_recursion() -> None:
    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = 0.0 * model.scale
        for _ in range(505):  # two nodes each, which is beyond Python's limit of 1000 calls
            loss = model(batch[0][:, :1]).pow(2).mean() * 0.01 + 0.9 * loss
        return loss

    assert errors(step, data(), 4)[0] < 1e-9


def test_checkpointed_layers_are_not_computed_again_to_be_read() -> None:
    """What a hook would have to bring back is left alone: the graph is read, no more."""
    calls = []

    class Checkpointed(PerToken):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            def run(x: torch.Tensor) -> torch.Tensor:
                calls.append(len(x))
                return (self.net(x) @ torch.eye(CLASSES, dtype=torch.double)).exp()

            return torch.utils.checkpoint.checkpoint(run, inputs, use_reentrant=False)  # type: ignore[no-any-return]

    autoaccum.fit(
        Checkpointed(),
        data(),
        effective_batch=11,
        micro_batch=4,
        verify=False,
        training_step=lambda model, batch: model(batch[0]).log().pow(2).mean(),
        device="cpu",
        progress=False,
    )
    assert len(calls) == 6  # a forward and its repetition in the backward, for each of three


def test_another_modules_gradients_are_corrected_too() -> None:
    """Two optimizers on one model: what the first does not hold has the gradient of the window as well."""
    inputs, targets = data()
    model, big = PerToken(), PerToken()

    def step(model: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    step(big, (inputs, targets)).backward()
    first = torch.optim.SGD(model.net[0].parameters(), lr=0.1)
    accumulator = autoaccum.Accumulator(model, first, training_step=step, micro_batch=3)
    accumulator.backward((inputs, targets))
    for p, q in zip(model.net.parameters(), big.net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-15)


def test_weights_do_not_round_to_the_losss_sixteen_bits() -> None:
    """3 / 700 has no bfloat16, and what it rounds to is 0.2 % off in each micro-batch alike."""
    torch.manual_seed(0)
    inputs = torch.randn(700, 8)
    model = nn.Linear(8, 4)
    found = []
    for micro_batch in (700, 3):
        autoaccum.fit(
            model,
            (inputs,),
            effective_batch=700,
            micro_batch=micro_batch,
            training_step=lambda m, b: m(b[0]).mean(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            precision="bf16",
            shuffle=False,
            device="cpu",
            progress=False,
        )
        assert model.bias.grad is not None
        found.append(model.bias.grad.clone())
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=0)
