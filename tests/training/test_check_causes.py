"""Each kind of failure of a check is named, and so is why nothing could be measured."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from autoaccum import errors
from autoaccum.testing import simulated_memory
from autoaccum.training.check import CheckReport, format_error
from tests.models import classes, mlp
from tests.training.checks import DOUBLE, cause, check, linear


class Texts(torch.utils.data.Dataset[Any]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(index + 2, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(index))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Momentum(nn.Module):
    """A target that follows the model at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.weight.lerp_(self.net.weight.sin(), 0.5)
        return torch.as_tensor((self.net(inputs) - self.target(inputs)).square().mean())


class TestWhatIsNamed:
    """Failures by their causes, where these show."""

    @pytest.mark.weighted
    def test_batch_norm(self) -> None:
        report = check(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
        assert report.passed is False
        assert cause(report).startswith("The model holds 1 BatchNorm layer in training mode: ")
        assert report.error is not None
        assert report.error > 0.01
        assert all(cut.error > report.tolerance for cut in report.cuts)

    @pytest.mark.weighted
    def test_samples_that_are_drawn_by_their_places(self) -> None:
        def bootstrap(model: nn.Module, batch: Any) -> torch.Tensor:
            drawn = torch.randint(len(batch[0]), (len(batch[0]),))
            return cross_entropy(model(batch[0][drawn]), batch[1][drawn])

        report = check(linear(), training_step=bootstrap)
        assert report.passed is False
        assert report.notice is not None

    def test_what_is_drawn_for_a_sample_that_lies_in_one_part_is_no_draw_of_the_batch(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            hidden = inputs[:, 0] == inputs[:, 0].max().clamp(min=100)
            inputs = inputs.clone()
            inputs[hidden] += torch.rand(int(hidden.sum()), 8, dtype=DOUBLE)
            return cross_entropy(model(inputs), targets)

        inputs, targets = classes(6, DOUBLE)
        inputs[2, 0] = 1000.0
        assert check(linear(), (inputs, targets), training_step=step).notice is None

    @pytest.mark.parametrize("kind", ["once", "each", "one by one"])
    def test_what_is_drawn_once_for_a_batch(self, kind: str) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            if kind == "one by one":  # of which a part is given the first ones, whichever its samples are
                scale = torch.stack([torch.rand(1, dtype=DOUBLE).ceil() for _ in inputs])
            else:
                scale = torch.rand((1,) if kind == "once" else (len(inputs), 1), dtype=DOUBLE)
            return cross_entropy(model(inputs * scale), targets)

        report = check(linear(), training_step=step)
        assert report.passed
        if kind == "once":
            assert cause(report).startswith("The forward draws something once for all samples of a batch")
        else:
            assert report.notice is None

    @pytest.mark.weighted
    def test_what_nobody_knows(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), batch[1]) / (len(batch[0]) + 1)

        report = check(mlp(DOUBLE), training_step=step)
        assert report.passed is False
        assert report.notice is not None
        assert report.error is not None
        assert f" {format_error(report.error)} off" in report.notice.cause, "the error that is told is the report's"


class TestWhatCannotBeMeasured:
    def assert_unmeasured(self, report: CheckReport, why: str) -> None:
        assert report.passed is None
        assert not report.passed, "it does not pass for exact"
        assert why in cause(report)
        assert (report.error, report.hypothesis, report.tensor) == (None, None, None)
        assert (report.samples, report.cuts, report.hypotheses, report.tensors) == (0, (), {}, {})
        assert report.tolerance == 1e-6
        assert str(report).startswith("NOT MEASURED")

    def test_a_gradient_of_0(self) -> None:
        report = check(mlp(DOUBLE), loss_fn=lambda outputs, targets: outputs.sum() * 0)
        self.assert_unmeasured(report, "gradient of a few samples is 0")
        assert "autoaccum.check" not in str(report), "which is what was done"

    def test_hooks_that_run_after_a_backward_run_none(self) -> None:
        model = mlp(DOUBLE)
        called: list[int] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: called.append(1))
        self.assert_unmeasured(check(model), "register_post_accumulate_grad_hook")
        assert called == []

    @pytest.mark.weighted
    def test_generators_that_are_not_torchs(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]) * torch.tensor(np.random.rand(len(batch[0]), 1)), batch[1])

        self.assert_unmeasured(check(mlp(DOUBLE), training_step=step), "Python's or NumPy's generator")

    def test_too_little_memory(self) -> None:
        model, batch = linear(), classes(12, DOUBLE)

        def hungry(model: nn.Module, batch: Any) -> torch.Tensor:
            torch.empty(len(batch[0]) * 2**20)
            return cross_entropy(model(batch[0]), batch[1])

        with simulated_memory("15MiB"):
            assert check(model, batch, training_step=hungry).samples == 3
        with simulated_memory("5MiB"):
            self.assert_unmeasured(check(model, batch, training_step=hungry), "memory ran out")
        with simulated_memory(100), pytest.raises(errors.LimitBelowModelError):
            check(model, batch)


@pytest.mark.weighted
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_are_found() -> None:
    """(n, 1) beside (n,): each sample meets all targets."""
    inputs = torch.randn(12, 8, dtype=DOUBLE)
    report = check(nn.Linear(8, 1, dtype=DOUBLE), (inputs, torch.randn(12, dtype=DOUBLE)), loss_fn=mse_loss)
    assert report.passed is False
