"""A measurement ends in words: passed, failed and why, or not measured and why; what fails is no error of the run's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import autoaccum
from autoaccum.step.findings import Verdict
from autoaccum.step.measured_samples import choose
from autoaccum.step.measurement import Measurement
from autoaccum.step.terms import Hypothesis
from autoaccum.step.verdict import _mixes, measure
from autoaccum.testing import oom_at
from tests.devices import DEVICE
from tests.faults import Operations
from tests.models import classes, mlp
from tests.step.measuring import DOUBLE, job_of, pairs, plain, squared_mean, window_of

pytestmark = pytest.mark.measured


def verdict(
    loss: Any = plain, model: nn.Module | None = None, *, batch: Any = None, count: int = 8, **options: Any
) -> Verdict:
    likely: Hypothesis = options.pop("likely", "items")
    return measure(job_of(loss, model), window_of(count, batch), likely, **{"most": 6, **options})


def test_what_passes_says_by_how_much() -> None:
    found = verdict()
    assert found.decision is not None
    assert found.decision.passed
    assert (found.samples, found.tolerance, found.unmeasured) == (6, 1e-6, "")
    single = verdict(model=mlp(), batch=classes(8))
    assert single.tolerance == 2e-5


def test_what_fails_is_measured_in_parts_that_the_model_can_compute() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)
    found = verdict(model=model)
    assert found.decision is not None
    assert min(len(part) for cut in found.decision.cuts for part in cut) == 2
    for loss in (squared_mean, pairs):
        found = verdict(loss)
        assert found.decision is not None
        assert not found.decision.passed


@pytest.mark.parametrize(("most", "count", "samples"), [(6, 8, 6), (6, 4, 4), (3, 8, 3), (2, 8, 2), (6, 2, 2)])
def test_as_many_are_measured_as_there_is_room_for(most: int, count: int, samples: int) -> None:
    assert verdict(most=most, count=count).samples == samples


def test_where_there_is_no_room_for_two_parts_nothing_is_measured() -> None:
    found = verdict(most=1)
    assert found.decision is None
    assert found.unmeasured == "there is no room for two parts of at least 1 at once"
    assert not found.is_passing
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DOUBLE)
    assert verdict(model=model, most=3).unmeasured.endswith("two parts of at least 2 at once")


def unsettled(model: Any, batch: Any) -> torch.Tensor:
    """Draw an order, which has no rows, and numbers that no constant stands for."""
    torch.randperm(len(batch[0]))
    return plain(model, batch) + 0 * F.rrelu(-torch.ones(len(batch[0])), training=True).mean()


@pytest.mark.parametrize(
    ("loss", "words", "is_passing"),
    [
        (lambda model, batch: plain(model, batch) * 0, "the gradient of a few samples is 0", True),
        (lambda model, batch: plain(model, batch) / 0, "the loss of a few samples is not finite", True),
        (lambda model, batch: 1 / 0, "fails (ZeroDivisionError: division by zero)", False),
        (lambda model, batch: unsettled(model, batch), "draws for a few samples cannot be found among", False),
    ],
)
def test_what_cannot_be_measured_says_why_and_raises_nothing(loss: Any, words: str, is_passing: bool) -> None:
    found = verdict(loss)
    assert found.decision is None
    assert words in found.unmeasured
    assert found.is_passing is is_passing


def test_of_what_foreign_generators_draw_nothing_can_be_told() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0] * torch.from_numpy(np.random.rand(len(batch[0]), 1))), batch[1])

    found = verdict(loss)
    assert found.decision is None
    assert "Python's or NumPy's generator" in found.unmeasured
    # By which other samples would draw, too.
    report = autoaccum.check(
        mlp().to(DOUBLE), classes(6, DOUBLE), training_step=loss, device=DEVICE, accumulate="weighted"
    )
    assert report.notice is not None
    assert report.notice.cure == "Draw by PyTorch's, as torch.rand and torch.randint do, whose draws each part is given"
    assert verdict(lambda model, batch: plain(model, batch) + 0 * np.random.rand()).decision is not None


def test_gradients_of_sixteen_bits_are_not_called_wrong_for_their_rounding() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    found = verdict(loss, mlp(torch.bfloat16), batch=classes(8, torch.bfloat16))
    assert found.decision is None or found.decision.passed
    assert found.decision is not None or "16 bits" in found.unmeasured
    wrong = verdict(
        lambda model, batch: loss(model, batch).square(), mlp(torch.bfloat16), batch=classes(8, torch.bfloat16)
    )
    assert wrong.decision is not None
    assert wrong.decision.error > 0.1


def test_losses_alone_are_compared_by_one_hypothesis_alone() -> None:
    runs = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    model = Counted(8, 3).to(DOUBLE)
    found = verdict(model=model, forward_only=True)
    assert found.decision is not None
    assert found.decision.passed
    assert runs == [6, 1, 2, 3, 3, 2, 1, 2, 2, 2]  # the whole, and three cuts
    assert found.tolerance == 1e-12
    found = verdict(model=model, forward_only=True, likely="sum")
    assert found.decision is not None
    assert not found.decision.passed
    assert found.decision.hypothesis == "sum"


def test_where_memory_runs_out_fewer_are_measured_and_then_none() -> None:
    with Operations() as operations:
        job, window = job_of(plain), window_of(8)
        measure(job, window, "items", most=6)
    model = job.model
    found = set()
    for number in range(40, len(operations.names), 23):
        with oom_at(number):
            found.add(measure(job, window, "items", most=6).samples)
        assert all(p.grad is None for p in model.parameters())  # type: ignore[union-attr]
    assert found == {3, 6} or found == {3}

    def full(model: Any, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert verdict(full).unmeasured == "memory ran out in the attempt"


def test_noise_without_rows_is_measured_by_constants() -> None:
    """Of two copies of a batch the rows of one sample are not where they seem to be."""

    def doubled(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(torch.nn.functional.dropout(torch.cat([batch[0], batch[0]]), 0.3))
        return cross_entropy(outputs, torch.cat([batch[1], batch[1]]))

    found = verdict(doubled)
    assert found.decision is not None
    assert found.decision.passed


def test_what_fails_is_measured_by_what_was_likely() -> None:
    """The least wrong one of six samples is not that of a window."""
    found = verdict(squared_mean, likely="sum")
    assert found.decision is not None
    assert (found.decision.passed, found.decision.hypothesis) == (False, "sum")


class Drawing:
    """A window of texts that are masked anew whenever they are made into a batch, as by a collate_fn."""

    def __init__(self) -> None:
        self.lengths, self.num_samples = None, 8
        self.generator = torch.Generator()
        self.inner = window_of(8)

    def samples(self, positions: Any) -> Any:
        inputs, labels = self.inner.samples(positions)
        return inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.3), labels

    micro_batch = None


def test_samples_that_are_collated_anew_each_time_are_rows_of_one_batch() -> None:
    window = Drawing()
    job = job_of()
    found = measure(job, window, "items", most=6)  # type: ignore[arg-type]
    assert found.decision is not None
    assert found.decision.passed


BATCH = classes(12, DOUBLE)
FIRST = choose(window_of(12, BATCH), 12, 6)


def of_first(batch: Any) -> torch.Tensor:
    """Return whether samples are among those that are measured first, as a loss may tell them by what they hold."""
    return torch.isin(batch[0][:, 0], BATCH[0][FIRST, 0])


def each(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def late(model: Any, batch: Any) -> torch.Tensor:
    """A mean, and a sum that the first samples have no part in."""
    return each(model, batch).mean() + each(model, batch)[~of_first(batch)].sum()


def torn(model: Any, batch: Any) -> torch.Tensor:
    """A mean of the first samples, and a sum of the others."""
    return each(model, batch)[of_first(batch)].sum() / len(batch[0]) + each(model, batch)[~of_first(batch)].sum()


def silent(model: Any, batch: Any) -> torch.Tensor:
    """A mean that the first samples have no gradient in."""
    return (each(model, batch) * ~of_first(batch)).mean()


@pytest.mark.parametrize("loss", [late, torn])
def test_a_term_that_the_first_samples_have_no_part_in_is_seen(loss: Any) -> None:
    found = verdict(loss, batch=BATCH, count=12)
    assert found.decision is not None
    assert not found.decision.passed


def rooted(model: Any, batch: Any) -> torch.Tensor:
    """A mean, and the root of a sum of the others."""
    return each(model, batch).mean() + each(model, batch)[~of_first(batch)].sum().add(1).sqrt()


@pytest.mark.parametrize("loss", [rooted])
def test_a_term_that_the_first_samples_have_no_part_in_is_found_by_others(loss: Any) -> None:
    found = verdict(loss, batch=BATCH, count=12)
    assert found.decision is not None
    assert not found.decision.passed
    assert found.decision.error > 0.1
    assert not {*found.chosen} & {*FIRST}
    assert [sum(map(len, cut)) for cut in found.decision.cuts] == [6, 6, 6]


def test_where_the_first_samples_tell_nothing_others_are_asked() -> None:
    found = verdict(silent, batch=BATCH, count=12)
    assert found.decision is not None
    assert found.decision.passed
    assert not {*found.chosen} & {*FIRST}


def test_what_others_show_of_the_same_kind_changes_nothing() -> None:
    found = verdict(batch=BATCH, count=12)
    assert found.decision is not None
    assert found.decision.passed
    assert list(found.chosen) == FIRST


@pytest.mark.parametrize("mixed", [True, False])
def test_a_collate_fn_that_mixes_samples_is_found(mixed: bool) -> None:
    inputs, labels = classes(6, DOUBLE)

    def collate(samples: Any) -> Any:
        batch = default_collate(samples)
        order = torch.randperm(len(batch[0]))
        return [0.5 * batch[0] + 0.5 * batch[0][order] if mixed else batch[0] + torch.rand(1).double(), batch[1]]

    def plain(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    class Collated:
        num_samples, lengths = 6, None

        def samples(self, positions: Any) -> Any:
            return collate([(inputs[position], labels[position]) for position in positions])

        def micro_batch(self, start: int, size: int) -> Any:
            return self.samples(range(start, start + size))

    with Measurement(job_of(plain), Collated(), range(6)) as measurement:
        measurement.run_whole()
        assert _mixes(measurement) is mixed
