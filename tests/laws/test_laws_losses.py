"""Law 1 for every kind of loss: the items of a mean are read off the loss, wherever and however it is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Notice, StepSkipped, Verified
from autoaccum.step.loss_graph import is_number
from tests.devices import DEVICE, there
from tests.models import relative_error

Loss = Callable[[Any, Any], torch.Tensor]

SAMPLES, CLASSES, TIME = 11, 5, 6
WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.7, 4.0], dtype=torch.float64, device=DEVICE)


def labels(*shape: int) -> torch.Tensor:
    """Classes of which the later ones of each row, ever more of them, are ignored; some rows have none left."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randint(0, CLASSES, shape, generator=generator)
    for row in range(shape[0]):
        kept = (5 * row) % 7 if len(shape) > 1 else (row % 3 != 1) * 7
        found[row].reshape(-1)[kept:] = -100
    return found


class PerToken(nn.Module):
    """(samples, time, 4) -> (samples, time, classes)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


def gradient_of(result: autoaccum.FitResult | nn.Module) -> torch.Tensor:
    model = result if isinstance(result, nn.Module) else result.model
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def errors(step: Loss, data: Any, micro_batch: Any, **options: Any) -> tuple[float, float, list[Notice]]:
    """Relative errors of gradient and loss beside the big batch's, and what was announced."""
    big = there(PerToken())
    expected = step(big, there(data))
    expected.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoaccumWarning)
        result = autoaccum.fit(
            PerToken(),
            data,
            effective_batch=len(data[0]),
            micro_batch=micro_batch,
            training_step=step,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            shuffle=False,
            device=DEVICE,
            progress=False,
            **options,
        )
    found = result.history[0].loss
    notices = [event for event in result.events if isinstance(event, Notice)]
    return relative_error(gradient_of(result), gradient_of(big)), abs(found / expected.item() - 1), notices


def tokens(loss: Loss) -> Loss:
    """The loss of all tokens in one row each."""
    return lambda model, batch: loss(model(batch[0]).flatten(0, 1), batch[1].flatten())


def rows(loss: Loss) -> Loss:
    """The loss of one item a sample: its first token."""
    return lambda model, batch: loss(model(batch[0])[:, 0], batch[1][:, 0])


def numbers(loss: Loss) -> Loss:
    """The loss of outputs beside numbers in [0, 1]."""
    return lambda model, batch: loss(model(batch[0]), _unit(batch[1]))


def _unit(targets: torch.Tensor) -> torch.Tensor:
    return ((targets.clamp(0).double() + 0.5) / (CLASSES + 1)).unsqueeze(-1).expand(-1, -1, CLASSES)


def masked_mean(model: Any, batch: Any) -> torch.Tensor:
    each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    mask = batch[1] != -100
    return (each * mask).sum() / mask.sum()


def clamped_mean(model: Any, batch: Any) -> torch.Tensor:
    each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    mask = batch[1] != -100
    return (each * mask).sum() / mask.sum().clamp(min=1)


def picked_mean(model: Any, batch: Any) -> torch.Tensor:
    each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    return each[batch[1] != -100].mean()


def penalty(model: Any) -> torch.Tensor:
    return 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def vae(model: Any, batch: Any) -> torch.Tensor:
    """The textbook's: two sums over samples, one with a constant factor."""
    outputs = model(batch[0])
    mean, log_variance = outputs[..., 0], outputs[..., 1]
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return F.mse_loss(outputs[..., 2:], torch.ones_like(outputs[..., 2:]), reduction="sum") + divergence


MEANS: dict[str, Loss] = {
    "cross entropy": rows(lambda o, t: F.cross_entropy(o, t.clamp(0))),
    "ignore_index": rows(F.cross_entropy),
    "another ignore_index": rows(lambda o, t: F.cross_entropy(o, t.clamp(0), ignore_index=0)),
    "class weights": rows(lambda o, t: F.cross_entropy(o, t.clamp(0), weight=WEIGHTS)),
    "class weights and ignore_index": tokens(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "label smoothing": tokens(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "label smoothing and class weights": tokens(nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2)),
    "negative log likelihood": tokens(lambda o, t: F.nll_loss(o.log_softmax(-1), t, weight=WEIGHTS)),
    "probabilities as targets": lambda model, batch: F.cross_entropy(model(batch[0])[:, 0], batch[0].softmax(-1)[:, 0].repeat_interleave(2, 1)[:, :5]),
    "per token": tokens(F.cross_entropy),
    "per token, time last": lambda model, batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1]),
    "per pixel": lambda model, batch: F.cross_entropy(
        model(batch[0]).reshape(-1, 2, 3, CLASSES).permute(0, 3, 1, 2), batch[1].reshape(-1, 2, 3), weight=WEIGHTS
    ),
    "BCE with pos_weight": numbers(lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=WEIGHTS)),
    "BCE with weight": numbers(lambda o, t: F.binary_cross_entropy_with_logits(o, t, weight=WEIGHTS)),
    "BCE": numbers(lambda o, t: F.binary_cross_entropy(o.sigmoid(), t)),
    "mean squared error": numbers(F.mse_loss),
    "L1": numbers(F.l1_loss),
    "smooth L1": numbers(F.smooth_l1_loss),
    "Huber": numbers(F.huber_loss),
    "KL divergence": numbers(lambda o, t: F.kl_div(o.log_softmax(-1), t, reduction="batchmean")),
    "mean of sums": lambda model, batch: model(batch[0]).pow(2).sum((1, 2)).mean(),
    "sum of means over samples": lambda model, batch: model(batch[0]).pow(2).mean(0).sum(),
    "mean of means over samples": lambda model, batch: model(batch[0]).pow(2).mean(0).mean(),
    "sum divided by samples": lambda model, batch: model(batch[0]).pow(2).sum() / len(batch[0]),
    "sum divided by numbers": lambda model, batch: model(batch[0]).pow(2).sum() / batch[1].numel() / CLASSES,
    "masked mean by hand": masked_mean,
    "masked mean by hand, at least one": clamped_mean,
    "mean of what was picked": picked_mean,
    "one minus a mean": lambda model, batch: 2 - 2 * F.cosine_similarity(model(batch[0])[:, 0], WEIGHTS, dim=1).mean(),
    "penalty first, towards a value": lambda model, batch: (
        F.mse_loss(model.net[0].weight, torch.ones(8, 4, dtype=torch.double, device=DEVICE)) + tokens(F.cross_entropy)(model, batch)
    ),
    "distillation": lambda model, batch: (
        0.3 * rows(lambda o, t: F.cross_entropy(o, t.clamp(0)))(model, batch)
        + 0.7 * 4 * F.kl_div(model(batch[0])[:, 0].log_softmax(1), _unit(batch[1])[:, 0], reduction="batchmean")
    ),
    "mean of a mean, in another type": lambda model, batch: tokens(F.cross_entropy)(model, batch).float().mean() * 2,
    "penalty": lambda model, batch: tokens(F.cross_entropy)(model, batch) + penalty(model),
    "penalty as a mean": lambda model, batch: tokens(F.cross_entropy)(model, batch) + model.net[0].weight.abs().mean(),
    "two means over the same": lambda model, batch: (
        tokens(F.cross_entropy)(model, batch) + tokens(nn.CrossEntropyLoss(label_smoothing=0.1))(model, batch)
    ) / 2,
    "a list": lambda model, batch: torch.stack([tokens(F.cross_entropy)(model, batch)] * 7).mean(),
    "learnt weights": lambda model, batch: (
        tokens(F.cross_entropy)(model, batch) * torch.exp(-model.scale) + model.scale
    ),
}  # fmt: skip

SUMS: dict[str, Loss] = {
    "cross entropy": tokens(nn.CrossEntropyLoss(reduction="sum")),
    "class weights and label smoothing": tokens(
        nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS, label_smoothing=0.1)
    ),
    "squared error": numbers(nn.MSELoss(reduction="sum")),
    "sum": lambda model, batch: model(batch[0]).pow(2).sum(),
    "time first": lambda model, batch: model(batch[0]).transpose(0, 1).pow(2).sum(),
    "half a sum": lambda model, batch: 0.5 * model(batch[0]).pow(2).sum(),
    "sum of means over features": lambda model, batch: model(batch[0]).pow(2).mean((1, 2)).sum(),
    "VAE": vae,
}

PLANS = pytest.mark.parametrize("micro_batch", [11, 4, 3, [(5, 1, 3, 2)], [(1, 2, 4, 4)]], ids=str)


def data(kept_rows: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, TIME, 4, generator=generator, dtype=torch.float64), labels(SAMPLES, TIME)


@pytest.mark.device(every=4)
@pytest.mark.every(2)
@PLANS
@pytest.mark.parametrize("name", MEANS)
def test_means(name: str, micro_batch: Any) -> None:
    gradient, loss, notices = errors(MEANS[name], data(), micro_batch)
    assert gradient < (1e-6 if "type" in name else 1e-12)
    assert loss < (1e-6 if "type" in name else 1e-12)
    # A count that is read late is not seen to be clamped.
    assert notices == [] or ("at least one" in name and (DEVICE != "cpu" or "(1," in str(micro_batch)))


@pytest.mark.device(every=4)
@PLANS
@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str, micro_batch: Any) -> None:
    gradient, loss, notices = errors(SUMS[name], data(), micro_batch)
    assert gradient < 1e-12
    assert loss < 1e-12
    assert notices == []


@pytest.mark.device(every=4)
@PLANS
def test_a_penalty_beside_a_sum_is_counted_once(micro_batch: Any) -> None:
    gradient, _, notices = errors(
        lambda model, batch: SUMS["cross entropy"](model, batch) + penalty(model), data(), micro_batch
    )
    assert gradient < 1e-12
    assert notices == []


@pytest.mark.device(every=2)
@pytest.mark.parametrize("micro_batch", [11, 4, 5])
def test_a_sum_times_one_over_the_samples_is_a_mean(micro_batch: int) -> None:
    def step(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).pow(2).sum() * (1 / len(batch[0]))  # type: ignore[no-any-return]

    gradient, loss, notices = errors(step, data(), micro_batch)
    assert max(gradient, loss) < 1e-12
    assert notices == []


WRONG_COUNTS: dict[str, Any] = {
    "samples": lambda batch: len(batch[0]),
    "what the batch is a tuple of": len,
    "one": lambda batch: 1,
    "all tokens": lambda batch: batch[1].numel(),
}


@pytest.mark.device(every=2)
@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_a_count_that_is_wrong_is_not_gone_by(name: str) -> None:
    """Micro-batches are joined; where nothing is measured, the user is believed."""
    gradient, _, notices = errors(MEANS["per token"], data(), 3, num_items=WRONG_COUNTS[name])
    assert gradient < 1e-7
    assert notices == []
    assert errors(MEANS["per token"], data(), 3, num_items=WRONG_COUNTS[name], verify=False)[0] > 1e-3
    assert errors(MEANS["per token"], data(), 3, num_items=lambda batch: 2 * (batch[1] != -100).sum())[2] == []


def anchors(model: Any, batch: Any) -> torch.Tensor:
    """A sum over all there is, of which some are an object: the class of the first one in some samples."""
    targets = _unit(batch[1]).gt(0.5).double()
    return F.binary_cross_entropy_with_logits(model(batch[0]), targets, reduction="sum")


def objects(batch: Any) -> torch.Tensor:
    return (batch[1][:, 0] == 2).sum()  # of none of the first samples


@pytest.mark.device
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("micro_batch", [11, 4, 2, 1])
def test_a_sum_is_divided_by_the_windows_count_where_some_count_none(micro_batch: int, verify: bool) -> None:
    def divided(model: Any, batch: Any) -> torch.Tensor:
        return anchors(model, batch) / objects(batch)

    def summed(model: Any, batch: Any) -> torch.Tensor:
        counts.append(int(objects(batch)))
        return anchors(model, batch)

    counts: list[int] = []
    options: dict[str, Any] = {"reduction": "sum", "num_items": objects, "verify": verify}
    inputs, targets = data()
    big = there(PerToken())
    expected = divided(big, there((inputs, targets)))
    expected.backward()
    model = there(PerToken())
    told: list[Any] = []
    running = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=summed, micro_batch=micro_batch,
        callbacks=[told.append], **options,
    )  # fmt: skip
    for _ in range(2):  # the second knows what the first has counted
        counts.clear()
        loss = running.step(there((inputs, targets)))
        assert (0 in counts) == (micro_batch < 11)
        assert relative_error(gradient_of(model), gradient_of(big)) < 1e-12
        assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
    assert [event for event in told if isinstance(event, Notice)] == []


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:Nothing in window 1 counts")
@pytest.mark.parametrize("micro_batch", [11, 4])
def test_a_sum_of_a_window_that_counts_none_takes_no_step(micro_batch: int) -> None:
    model = there(PerToken())
    told: list[Any] = []
    running = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=1.0), training_step=anchors, micro_batch=micro_batch,
        reduction="sum", num_items=lambda batch: (batch[1] > 100).sum(), callbacks=[told.append],
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    running.step(there(data()))
    assert [type(event) for event in told if isinstance(event, StepSkipped)] == [StepSkipped]
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.device
@pytest.mark.parametrize("micro_batch", [4, 1])
@pytest.mark.parametrize("none", [True, False])
def test_a_sum_of_several_is_divided_by_what_each_counts(none: bool, micro_batch: int) -> None:
    """One of them may count nothing in the window, and adds nothing then, by name and to the gradient."""

    def summed(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {"all": anchors(model, batch), "tokens": tokens(F.cross_entropy)(model, batch) * len(batch[0])}

    counts: dict[str, Any] = {
        "all": (lambda batch: (batch[1] > 100).sum()) if none else objects,
        "tokens": lambda batch: len(batch[0]),
    }
    batch = there((data()[0], data()[1].clamp(min=0)))
    told: list[Any] = []
    big, model = there(PerToken()), there(PerToken())
    expected = tokens(F.cross_entropy)(big, batch)
    if not none:
        expected = expected + anchors(big, batch) / objects(batch)
    expected.backward()
    running = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=summed, micro_batch=micro_batch,
        reduction="sum", num_items=counts, callbacks=[told.append],
    )  # fmt: skip
    for _ in range(2):
        loss = running.step(batch)
        assert relative_error(gradient_of(model), gradient_of(big)) < 1e-12
        assert float(loss) == pytest.approx(expected.item(), rel=1e-12)
        assert ("loss/all" in running.outputs) is not none
    assert [event for event in told if isinstance(event, Notice)] == []


def test_a_count_of_none_beside_a_loss_has_micro_batches_joined() -> None:
    """By the micro-batch itself, for those that are measured count some."""

    def clamped(model: Any, batch: Any) -> torch.Tensor:
        return anchors(model, batch) / objects(batch).clamp(min=1)

    targets = torch.where(torch.rand(80, TIME, generator=torch.Generator().manual_seed(0)) < 0.35, 2, 1)
    targets[:, 0] = 2  # each sample counts one,
    targets[70:75] = 1  # but in a micro-batch of the last window
    inputs = torch.randn(80, TIME, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batches = [there(batch) for batch in zip(inputs.split(20), targets.split(20), strict=True)]
    for accumulate in ("auto", "weighted"):
        model, big = there(PerToken()), there(PerToken())
        told: list[Any] = []
        running = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=clamped, micro_batch=5,
            num_items=objects, accumulate=accumulate, callbacks=[told.append],
        )  # fmt: skip
        for number, batch in enumerate(batches):
            with pytest.warns(AutoaccumWarning) if accumulate == "weighted" and number == 3 else nullcontext():
                running.step(batch)
            big.zero_grad()
            clamped(big, batch).backward()
            is_exact = relative_error(gradient_of(model), gradient_of(big)) < 1e-12
            assert is_exact is (accumulate == "auto" or number < 3)
        assert len([event for event in told if isinstance(event, Notice)]) == (accumulate == "weighted")


@pytest.mark.device
def test_a_count_of_none_without_a_loss_is_measured_once() -> None:
    """And nothing is said: a mean over nothing, kept from 0."""
    inputs, targets = data()
    model = there(PerToken())
    told: list[Any] = []
    running = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=clamped_mean, micro_batch=1,
        num_items=lambda batch: (batch[1] != -100).sum(), callbacks=[told.append],
    )  # fmt: skip
    for _ in range(3):
        running.step(there((inputs, targets)))
    assert [event for event in told if isinstance(event, Notice)] == []
    assert len([event for event in told if isinstance(event, Verified)]) == 1


@pytest.mark.weighted
@pytest.mark.filterwarnings("ignore:It could not be measured")
def test_of_a_count_of_none_beside_foreign_draws_nothing_is_told() -> None:
    """For no two micro-batches draw the same."""
    generator = np.random.default_rng(0)

    def noisy(model: Any, batch: Any) -> torch.Tensor:
        noise = there(torch.from_numpy(generator.standard_normal(batch[0].shape)))
        return clamped_mean(model, (batch[0] + noise, batch[1]))

    model = there(PerToken())
    told: list[Any] = []
    running = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), training_step=noisy, micro_batch=1,
        num_items=lambda batch: (batch[1] != -100).sum(), callbacks=[told.append],
    )  # fmt: skip
    for _ in range(3):
        running.step(there(data()))
    notices = [event for event in told if isinstance(event, Notice)]
    assert [notice.cause[:24] for notice in notices] == ["It could not be measured"]


def test_weights_by_samples_would_be_wrong() -> None:
    """So the tests above can fail."""
    gradient, _, _ = errors(MEANS["per token"], data(), 3, num_items=lambda batch: len(batch[0]), verify=False)
    assert gradient > 1e-2


@pytest.mark.weighted
@pytest.mark.device
@pytest.mark.parametrize("micro_batch", [11, 4])
def test_num_items_overrides(micro_batch: Any) -> None:
    """A mean of which nothing shows what it is over."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        count = (batch[1] != -100).sum()
        each = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
        return torch.dot(each.flatten(), each.new_full((each.numel(),), 1 / count.item()))

    assert errors(step, data(), micro_batch, num_items=lambda batch: (batch[1] != -100).sum())[0] < 1e-12
    gradient, _, notices = errors(step, data(), micro_batch)
    assert (gradient > 1e-3) == (micro_batch == 4)
    assert [notice.cure.split("=")[0] for notice in notices] == ["Pass num_items"] * (micro_batch == 4)


UNCERTAIN: dict[str, Loss] = {
    "not linear": lambda model, batch: F.mse_loss(model(batch[0]), torch.ones((), dtype=torch.double, device=DEVICE)).sqrt(),
    "divided by a constant": lambda model, batch: model(batch[0]).pow(2).sum() / 1000,
    "divided by a small constant": lambda model, batch: model(batch[0]).pow(2).sum() / 3,
    "two counts": lambda model, batch: (
        tokens(F.cross_entropy)(model, batch) + model(batch[0]).pow(2).mean()
    ),
    "a sum beside a mean": lambda model, batch: (
        tokens(F.cross_entropy)(model, batch) + 0.1 * model(batch[0]).pow(2).sum()
    ),
    "statistics of the batch": lambda model, batch: model(batch[0]).flatten(1).var(0, correction=0).sum(),
    "correlations": lambda model, batch: (model(batch[0]).flatten(1).T @ model(batch[0]).flatten(1)).pow(2).sum(),
    "weights that sum to one": lambda model, batch: (
        model(batch[0]).pow(2).mean((1, 2)) * torch.arange(1.0, len(batch[0]) + 1, device=DEVICE).softmax(0)
    ).sum(),
    "dice": lambda model, batch: 1 - 2 * model(batch[0]).sigmoid().prod(-1).sum() / model(batch[0]).sigmoid().sum(),
    "heads": lambda model, batch: torch.stack([model(batch[0])[..., i].pow(2).sum() for i in range(3)]).mean(),
}  # fmt: skip


@pytest.mark.device(every=4)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", UNCERTAIN)
@pytest.mark.parametrize("micro_batch", [4, [(5, 1, 3, 2)], "auto"], ids=str)
def test_what_cannot_be_told_is_announced(name: str, micro_batch: Any) -> None:
    inputs, targets = data()
    targets[:, 0] = 1  # a mean over nothing is NaN
    gradient, _, notices = errors(UNCERTAIN[name], (inputs, targets), micro_batch)
    said = [notice.consequence[:30] for notice in notices]
    assert said in (["Micro-batches may be weighted "], ["Each sample meets those of its"]) or gradient < 1e-12


class TestComparisons:
    """Law 7: losses that couple the samples of a batch."""

    @staticmethod
    def features(model: Any, batch: Any) -> torch.Tensor:
        return F.normalize(model(batch[0]).flatten(1), dim=1)

    def clip(self, model: Any, batch: Any) -> torch.Tensor:
        first = self.features(model, batch)
        logits = first @ first.roll(1, 1).T * model.scale.exp()
        same = torch.arange(len(first), device=DEVICE)
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2

    def two_views(self, model: Any, batch: Any) -> torch.Tensor:
        views = torch.cat([self.features(model, batch), self.features(model, (batch[0] + 0.1,))])
        eye = torch.eye(len(views), dtype=torch.bool, device=DEVICE)
        logits = torch.einsum("id,jd->ij", views, views).masked_fill(eye, -9)
        return F.cross_entropy(logits, torch.arange(len(views), device=DEVICE).roll(len(views) // 2))

    def frozen_side(self, model: Any, batch: Any) -> torch.Tensor:
        first = self.features(model, batch)
        return F.cross_entropy(first @ first.detach().T, torch.arange(len(first), device=DEVICE))

    def distances(self, model: Any, batch: Any) -> torch.Tensor:
        first = self.features(model, batch)
        return F.cross_entropy(-torch.cdist(first, first.roll(1, 1)), torch.arange(len(first), device=DEVICE))

    def softmax_over_samples(self, model: Any, batch: Any) -> torch.Tensor:
        return -(model(batch[0]).mean((1, 2)).log_softmax(0) * batch[0].mean((1, 2))).sum()

    def standardised(self, model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return F.cross_entropy(((outputs - outputs.mean(0)) / (1 + outputs.std(0)))[:, 0], batch[1][:, 0].clamp(0))

    def all_distances(self, model: Any, batch: Any) -> torch.Tensor:
        return MEANS["per token"](model, batch) + torch.pdist(model(batch[0]).flatten(1)).mean()

    def broadcast(self, model: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0])[:, 0, :1], batch[0][:, 0, 0])

    @pytest.mark.weighted
    @pytest.mark.device
    @pytest.mark.filterwarnings("ignore:Using a target size", "ignore:std")
    @pytest.mark.parametrize("name", ["softmax_over_samples", "standardised", "all_distances", "broadcast"])
    def test_statistics_of_a_batch_are_announced_too(self, name: str) -> None:
        _, _, notices = errors(getattr(self, name), data(), [(5, 4, 2)])
        (notice,) = notices
        assert "windows that are cut get a gradient" in notice.cause

    @pytest.mark.device
    def test_classes_that_are_texts_are_no_comparison(self) -> None:
        """Their number is a multiple of the micro-batches, but of no two sizes alike."""

        class WithTexts(PerToken):
            def __init__(self) -> None:
                super().__init__()
                self.texts = nn.Linear(6, TIME * CLASSES).double()

        def step(model: Any, batch: Any) -> torch.Tensor:
            texts = model.texts(torch.eye(6, dtype=torch.double, device=DEVICE)[:4])
            return F.cross_entropy(model(batch[0]).flatten(1) @ texts.T, batch[1][:, 0].clamp(0, 3))

        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoaccumWarning)
            for micro_batch in ("auto", [(4, 2, 2, 2, 1)], [(3, 3, 3, 2)]):
                autoaccum.fit(
                    WithTexts(),
                    data(),
                    effective_batch=SAMPLES,
                    micro_batch=micro_batch,  # type: ignore[arg-type]
                    training_step=step,
                    shuffle=False,
                    device=DEVICE,
                    progress=False,
                )

    @pytest.mark.weighted
    @pytest.mark.device(every=5)
    @pytest.mark.parametrize("name", ["clip", "two_views", "frozen_side", "distances"])
    @pytest.mark.parametrize("micro_batch", [4, 2, "auto"])
    def test_are_announced_once(self, name: str, micro_batch: Any) -> None:
        _, _, notices = errors(getattr(self, name), data(), micro_batch, epochs=2, max_micro_batch=4)
        (notice,) = notices
        assert "windows that are cut get a gradient" in notice.cause

    def test_are_not_announced_when_windows_are_whole(self) -> None:
        gradient, _, notices = errors(self.clip, data(), 11)
        assert gradient < 1e-12
        assert notices == []

    @pytest.mark.parametrize("name", MEANS)
    def test_as_many_classes_as_samples_are_no_comparison(self, name: str) -> None:
        """The head's weights make a product of the same shape."""
        assert errors(MEANS[name], data(), [(5, 5, 1)])[2] == []

    @pytest.mark.device
    def test_a_frozen_head_with_as_many_classes_is_no_comparison(self) -> None:
        head = there(
            nn.Parameter(torch.eye(TIME * CLASSES, 4, dtype=torch.float64).T.contiguous(), requires_grad=False)
        )

        def step(model: Any, batch: Any) -> torch.Tensor:
            return F.cross_entropy(
                self.features(model, batch) @ head.T, batch[0].new_zeros(len(batch[0]), dtype=torch.long)
            )

        gradient, _, notices = errors(step, data(), [(4, 4, 3)])
        assert gradient < 1e-12
        assert notices == []


class TestNothingToLearnFrom:
    @pytest.mark.device(every=3)
    @pytest.mark.parametrize(
        "name",
        ["per token", "label smoothing", "label smoothing and class weights", "per pixel", "masked mean by hand"],
    )
    @pytest.mark.parametrize("deferred", [False, True])
    def test_a_micro_batch_without_items_contributes_nothing(
        self, name: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor NaN, although its mean is 0 / 0; also where counts are read only at the end of a window."""
        if deferred:
            defer(monkeypatch)
        inputs, targets = data()
        targets[3:6] = -100
        gradient, loss, notices = errors(MEANS[name], (inputs, targets), [(3, 3, 3, 2)])
        assert gradient < 1e-12
        assert loss < 1e-12
        assert notices == []

    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("deferred", [False, True])
    def test_a_window_without_items_takes_no_step(self, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if deferred:
            defer(monkeypatch)
        inputs, targets = data()
        targets[4:8] = -100
        with pytest.warns(AutoaccumWarning, match="Nothing in window 2 counts"):
            result = autoaccum.fit(
                PerToken(),
                (inputs, targets),
                effective_batch=4,
                micro_batch=2,
                training_step=MEANS["per token"],
                shuffle=False,
                device=DEVICE,
                progress=False,
            )
        skipped = [event for event in result.events if isinstance(event, StepSkipped)]
        assert [event.step for event in skipped] == [2]
        assert int(result.optimizer.state[result.model.net[0].weight]["step"]) == 2
        assert all(p.isfinite().all() for p in result.model.parameters())


def defer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: counts stay tensors, and are read when the window is over."""
    monkeypatch.setattr(
        "autoaccum.step.loss_graph.value_of",
        lambda count: float(count.tolist()) if is_number(count) else count.reshape(()).double(),
    )
    monkeypatch.setattr("autoaccum.step.transaction.is_slow_to_read", lambda device: True)


@pytest.mark.every(3)
@PLANS
@pytest.mark.parametrize("name", MEANS)
def test_counts_read_late_are_the_same(name: str, micro_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defer(monkeypatch)
    inputs, targets = data()
    targets[:, 0] = 1  # no micro-batch without items
    gradient, loss, notices = errors(MEANS[name], (inputs, targets), micro_batch)
    assert max(gradient, loss) < (1e-6 if "type" in name else 1e-12)
    assert notices == []
