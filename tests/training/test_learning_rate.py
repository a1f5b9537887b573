"""The learning rate: schedulers by windows, and its scaling with the effective batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.schedules import NoiseScale
from autoaccum.training.learning_rate import LearningRate


def sgd(lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "lr": 2 * lr}], lr=lr
    )


def learning_rate(optimizer: torch.optim.Optimizer | None = None, **options: Any) -> LearningRate:
    defaults: dict[str, Any] = {
        "lr_scheduler": None,
        "num_steps": 10,
        "lr_scaling": "none",
        "base_batch": None,
    }
    return LearningRate(optimizer or sgd(), **{**defaults, **options})


def fit(effective_batch: Any, **options: Any) -> autoaccum.FitResult:
    torch.manual_seed(0)
    data = torch.randn(160, 3), torch.randn(160, 1)
    defaults = {"loss_fn": mse_loss, "device": "cpu", "progress": False, "cache": False, "lr": 1.0}
    return autoaccum.fit(nn.Linear(3, 1), data, effective_batch=effective_batch, **{**defaults, **options})


class TestScaling:
    @pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
    def test_every_group_is_scaled_within_and_only_there(self, scaling: str, factor: float) -> None:
        optimizer = sgd()
        rate = learning_rate(optimizer, lr_scaling=scaling, base_batch=None if scaling == "none" else 16)
        with rate.scaled(64):
            assert [group["lr"] for group in optimizer.param_groups] == [0.5 * factor, factor]
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.0]
        assert rate.now(64) == 0.5 * factor

    def test_an_error_in_the_step_leaves_the_rates_of_the_scheduler(self) -> None:
        optimizer = sgd()
        rate = learning_rate(optimizer, lr_scaling="linear", base_batch=16)
        with pytest.raises(RuntimeError, match="step"), rate.scaled(64):
            raise RuntimeError("in the step")
        assert optimizer.param_groups[0]["lr"] == 0.5

    def test_a_rate_that_is_a_tensor_stays_the_same_object(self) -> None:
        rate = torch.tensor(0.5)
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=rate, capturable=False, foreach=False)
        with learning_rate(optimizer, lr_scaling="sqrt", base_batch=16).scaled(64):
            assert optimizer.param_groups[0]["lr"].item() == 1.0
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == 0.5

    @pytest.mark.parametrize("make", [lambda o, n: ExponentialLR(o, 0.9), lambda o, n: OneCycleLR(o, 1.0, n)])
    def test_on_top_of_a_scheduler_that_builds_on_the_last_rate(
        self, make: Callable[[torch.optim.Optimizer, int], LRScheduler]
    ) -> None:
        schedule = "8, 3:32, 5:2"
        plain = fit(schedule, steps=8, lr_scheduler=make)
        scaled = fit(schedule, steps=8, lr_scheduler=make, lr_scaling="linear", base_batch=8)
        factors = [b.lr / a.lr for a, b in zip(plain.history, scaled.history, strict=True)]
        assert factors == pytest.approx([1, 1, 1, 4, 4, 0.25, 0.25, 0.25])

    def test_the_step_is_taken_with_the_rate_that_is_reported(self) -> None:
        """Of SGD on one sample's gradient the rate can be read off the step."""
        model = nn.Linear(3, 1, bias=False)
        before = model.weight.detach().clone()
        inputs, targets = torch.randn(4, 3), torch.randn(4, 1)
        gradient = torch.autograd.grad(mse_loss(model(inputs), targets), model.weight)[0]
        result = autoaccum.fit(
            model,
            (inputs, targets),
            effective_batch=4,
            loss_fn=mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            lr_scaling="linear",
            base_batch=2,
            device="cpu",
            progress=False,
        )
        torch.testing.assert_close(model.weight.detach(), before - 0.2 * gradient)
        assert result.history[0].lr == pytest.approx(0.2)

    def test_a_short_window_has_the_rate_of_a_full_one(self) -> None:
        result = fit(60, lr_scaling="linear", base_batch=30, epochs=1)
        assert [(report.effective_batch, report.lr) for report in result.history] == [(60, 2.0), (60, 2.0), (40, 2.0)]

    def test_more_than_the_data_has_is_scaled_as_what_it_has(self) -> None:
        with pytest.warns(autoaccum.AutoaccumWarning, match="is more than the data's 160"):
            result = fit(1000, lr_scaling="linear", base_batch=80)
        assert [report.lr for report in result.history] == [2.0]


class TestSchedulers:
    @pytest.mark.parametrize("budget", [{"epochs": 3}, {"steps": 29}, {"samples": 333}])
    @pytest.mark.parametrize("schedule", ["7, 5:31", "linear 3:40 over 200s", "geometric 50:5 over 9"])
    def test_one_cycle_ends_with_the_run(self, schedule: str, budget: dict[str, int]) -> None:
        """It raises on a step too many; with one too few its last rate would not be the lowest."""
        result = fit(schedule, lr_scheduler=lambda o, n: OneCycleLR(o, 1.0, n), **budget)
        rates = [report.lr for report in result.history]
        assert rates[-1] == pytest.approx(1.0 / 25 / 1e4, rel=1e-3)
        assert rates.count(min(rates)) == 1

    def test_a_function_of_where_the_run_stands_is_foreseen(self) -> None:
        told: list[int] = []

        def make(optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
            told.append(num_steps)
            return CosineAnnealingLR(optimizer, num_steps)

        result = fit(lambda progress: 5 + progress.step, lr_scheduler=make, epochs=2)
        assert told == [result.num_steps]

    def test_a_budget_in_steps_is_a_number_of_steps(self) -> None:
        told: list[int] = []

        def make(optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
            told.append(num_steps)
            return OneCycleLR(optimizer, 1.0, num_steps)

        fit(NoiseScale(4, 64, patience=2), lr_scheduler=make, steps=7)
        assert told == [7]

    def test_a_window_without_a_step_of_the_optimizer_counts(self) -> None:
        optimizer = sgd()
        rate = learning_rate(optimizer, lr_scheduler=lambda o, n: ExponentialLR(o, 0.5))
        rate.advance(stepped=False)
        assert optimizer.param_groups[0]["lr"] == 0.25


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "argument", "words"),
        [
            ({"lr_scaling": "cubic"}, "lr_scaling", "one of 'none', 'linear', 'sqrt'"),
            ({"lr_scaling": "sqrt"}, "base_batch", "the learning rate is right for"),
            ({"lr_scaling": "sqrt", "base_batch": 0}, "base_batch", "at least 1"),
            ({"base_batch": 8}, "base_batch", "lr_scaling beside it"),
            ({"lr_scheduler": lambda o, n: ReduceLROnPlateau(o)}, "lr_scheduler", "needs no metric.*ReduceOnPlateau"),
            (
                {"lr_scheduler": ExponentialLR, "num_steps": None},
                "lr_scheduler",
                "a budget in steps where",
            ),
        ],
    )
    def test_they_name_the_argument(self, options: dict[str, Any], argument: str, words: str) -> None:
        with pytest.raises(ArgumentError, match=words) as caught:
            learning_rate(**options)
        assert caught.value.argument == argument

    @pytest.mark.parametrize("none", [True, False])
    def test_an_optimizer_without_a_rate(self, none: bool) -> None:
        """Adafactor of transformers, that finds its own, has None."""
        optimizer = sgd()
        for group in optimizer.param_groups:
            if none:
                group["lr"] = None
            else:
                del group["lr"]
        assert math.isnan(learning_rate(optimizer).now(8))
        with pytest.raises(ArgumentError, match="SGD, which has no lr"):
            learning_rate(optimizer, lr_scaling="sqrt", base_batch=8)

    def test_a_scheduler_must_be_one(self) -> None:
        with pytest.raises(ArgumentTypeError, match="LRScheduler"):
            learning_rate(lr_scheduler=lambda o, n: None)
