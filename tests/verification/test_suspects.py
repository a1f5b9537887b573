"""The cause of a failure is named: what makes the gradient right once it is switched off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pad_sequence

import autoaccum
from autoaccum.verification.decision import decide
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.suspects import name_cause, pads, suspect_of
from tests.models import classes, mlp
from tests.verification.making import DOUBLE, HERE, job_of, measurement_of, pairs, plain, squared_mean


def causes(measurement: Measurement, smallest: int = 1) -> list[str]:
    with measurement:
        decision = decide(measurement, smallest, "items")
        assert not decision.passed
        before = everything(measurement)
        found = name_cause(measurement, decision.cuts, decision.hypothesis)
        assert everything(measurement) == before, "switched on again"
    return list(found)


def suspected(loss: Any) -> str | None:
    with measurement_of(loss) as measurement:
        decision = decide(measurement, 1, "items")
        assert not decision.passed
        assert not name_cause(measurement, decision.cuts, decision.hypothesis)
        return suspect_of(measurement)


def everything(measurement: Measurement) -> Any:
    modules = [module for held in measurement.job.modules for module in held.modules()]
    hooks = [list(p._backward_hooks or ()) for p in measurement.parameters]
    values = [t.tolist() for t in measurement.job.model.state_dict().values()]  # type: ignore[union-attr]
    return [module.training for module in modules], hooks, values


class Words:
    """A window of texts that are padded to the longest of a micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.texts = [torch.randint(1, 9, (length,)) for length in (2, 3, 4, 5, 6, 7)]
        self.num_samples = 6
        self.lengths = None

    def samples(self, positions: Sequence[int]) -> Any:
        return pad_sequence([self.texts[p] for p in positions], batch_first=True), torch.tensor(positions) % 3

    def micro_batch(self, start: int, size: int) -> Any:
        return self.samples(range(start, start + size))


class Pooled(nn.Module):
    """A mean over the words of a text, its padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words).mean(1))  # type: ignore[no-any-return]


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 3))).to(DOUBLE)


def clipped() -> nn.Module:
    model = mlp(DOUBLE)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def test_padding_that_the_model_sees() -> None:
    torch.manual_seed(0)
    measurement = Measurement(job_of(plain, Pooled().to(DOUBLE)), Words(), range(6))
    assert causes(measurement) == ["padding"]


def test_samples_that_are_packed_end_to_end_are_not_padded() -> None:
    """The pair of tokens at a seam counts in the whole alone; the batch has one row, whatever its samples."""

    class Packed(Words):
        def samples(self, positions: Sequence[int]) -> Any:
            ids = torch.cat([self.texts[p] for p in positions])[None]
            return ids, ids % 3

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(words))  # type: ignore[no-any-return]

    def next_tokens(model: Any, batch: Any) -> torch.Tensor:
        outputs, targets = model(batch[0]), batch[1]
        return cross_entropy(outputs[:, :-1].flatten(0, 1), targets[:, 1:].flatten())

    torch.manual_seed(0)
    measurement = Measurement(job_of(next_tokens, Each().to(DOUBLE)), Packed(), range(6))
    assert causes(measurement) == []
    with measurement:
        assert not pads(measurement)


@pytest.mark.parametrize(
    ("model", "cause"), [(normalised, "batch norm"), (spectral, "state"), (clipped, "hooks")]
)  # fmt: skip
def test_one_that_is_to_blame(model: Any, cause: str) -> None:
    assert causes(measurement_of(plain, model()), 2 if cause == "batch norm" else 1) == [cause]


@pytest.mark.device
def test_samples_that_are_paired_in_an_order_that_is_drawn() -> None:
    """Not so where what the order is used for adds up all the same, or the loss is no mean without it either."""

    def mixed(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        weight, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(inputs))
        outputs = model(weight * inputs + (1 - weight) * inputs[order])
        return weight * cross_entropy(outputs, targets) + (1 - weight) * cross_entropy(outputs, targets[order])

    def turned(model: Any, batch: Any) -> torch.Tensor:
        order = torch.randperm(len(batch[0]))
        return cross_entropy(model(batch[0][order]), batch[1][order])

    assert causes(measurement_of(mixed)) == ["pairing"]
    assert causes(measurement_of(lambda *given: mixed(*given).square())) == []
    with measurement_of(turned) as measurement:
        assert decide(measurement, 1, "items").passed


HOW = {
    "flip": lambda rows: rows.flip(0),
    "roll": lambda rows: rows.roll(1, 0),
    "halves": lambda rows: torch.cat([rows[len(rows) // 2 :], rows[: len(rows) // 2]]),
    "neighbours": lambda rows: torch.cat([rows[1::2], rows[::2]]),
}


@pytest.mark.parametrize("how", HOW)
def test_places_matter_where_each_is_mixed_with_that_of_another_place(how: str) -> None:
    def mixed(model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        share = torch.rand(1, dtype=inputs.dtype)
        outputs = model(share * inputs + (1 - share) * HOW[how](inputs))
        losses = share * cross_entropy(outputs, targets) + (1 - share) * cross_entropy(outputs, HOW[how](targets))
        return losses.squeeze()

    assert suspected(mixed) == "places"


def test_places_do_not_matter_where_samples_meet_as_a_set() -> None:
    def contrastive(model: Any, batch: Any) -> torch.Tensor:
        outputs = torch.nn.functional.dropout(model(batch[0]), 0.3)
        return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    assert suspected(contrastive) is None


@pytest.mark.parametrize(
    ("compared", "found"),
    [
        (lambda labels: labels[:, None] == labels, None),
        (lambda labels: (labels[:, None] - labels).abs(), "broadcast"),
    ],
)
def test_labels_that_are_compared_with_each_other_are_no_mistake(compared: Any, found: str | None) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return ((outputs @ outputs.T) * compared(batch[1])).mean()

    assert suspected(loss) == found


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_cancels_but_for_rounding_goes_by_no_places(seed: int) -> None:
    def advantage(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        reward = outputs.detach().sum(1) + batch[1]
        reward = (reward - reward.mean()) / reward.std(correction=0).clamp(min=1e-8)
        chosen = outputs.log_softmax(1).gather(1, batch[1][:, None])[:, 0]
        return -((chosen - chosen.detach()).exp() * reward).mean()

    torch.manual_seed(seed)
    data = torch.randn(6, 8), torch.randint(0, 3, (6,))
    report = autoaccum.check(mlp(torch.float32), data, training_step=advantage, device="cpu")
    assert report.passed is False
    assert report.notice is not None
    assert "depends on its place" not in report.notice.cause


def test_groups_of_batch_norm_are_no_places() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)
    report = autoaccum.check(
        model, classes(16, DOUBLE), loss_fn=lambda outputs, targets: cross_entropy(outputs, targets) * len(targets) ** 0.5,
        batch_norm="ghost:2", device="cpu",
    )  # fmt: skip
    assert report.notice is not None
    assert "depends on its place" not in report.notice.cause


def test_a_count_of_calls_is_no_place() -> None:
    class Calls:
        num = 0

    def counting(model: Any, batch: Any) -> torch.Tensor:
        Calls.num += 1  # of a class, which nobody puts back
        return plain(model, batch) * Calls.num

    assert suspected(counting) is None


def test_two_that_are_to_blame_together() -> None:
    def both() -> nn.Module:
        model = normalised()
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return model

    assert {"batch norm", "hooks"} <= set(causes(measurement_of(plain, both()), 2))


@pytest.mark.parametrize("loss", [squared_mean, pairs])
def test_nothing_is_blamed_for_what_the_loss_is(loss: Any) -> None:
    assert causes(measurement_of(loss)) == []
    assert causes(measurement_of(loss, clipped())) == []


def test_a_batch_that_cannot_be_cut_clears_nobody() -> None:
    """What the switch does not bear is no cause, and breaks nothing."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        if not model[1].training:
            raise ValueError("mine")
        return cross_entropy(model(batch[0]), batch[1])

    assert causes(measurement_of(loss, normalised()), 2) == []
    assert HERE.type == "cpu"
