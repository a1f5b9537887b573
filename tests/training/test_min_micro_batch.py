"""``min_micro_batch``: no forward has fewer samples, but of a window or a validation that has fewer itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum import Accumulator, errors
from autoaccum.events import Notice, OutOfMemory, Verified
from autoaccum.schedules import Function, Linear, Milestones, NoiseScale
from autoaccum.testing import oom_at, simulated_memory
from tests.models import classes, mlp, wide

pytestmark = pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")


def data(num_samples: int, features: int = 6, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    return (
        torch.randn(num_samples, features, dtype=dtype, generator=generator),
        torch.randn(num_samples, 3, dtype=dtype, generator=generator),
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Picky:
    """A loss that is refused, in words of the user's own, for fewer samples than that."""

    def __init__(self, fewest: int) -> None:
        self.fewest = fewest
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        self.sizes.append(len(inputs))
        if len(inputs) < self.fewest:
            raise ValueError(f"{len(inputs)} samples are too few")
        return mse_loss(model(inputs), targets)


def fit(step: Any, *, model: nn.Module | None = None, num_samples: int = 48, **options: Any) -> autoaccum.FitResult:
    arguments = {"effective_batch": 24, "device": "cpu", "progress": False, "cache": False, "lr": 0.01, **options}
    return autoaccum.fit(net() if model is None else model, data(num_samples), training_step=step, **arguments)


class TestNoForwardHasFewer:
    @pytest.mark.parametrize("options", [{}, {"micro_batch": 5}, {"max_micro_batch": 5}, {"noise_scale": True}])
    def test_in_training_measurements_validation_and_metrics(self, options: Any) -> None:
        """A validation's last samples are run with those before them."""
        step = Picky(5)
        options = {"validation_data": data(11), "metrics": {"error": _error}, "min_micro_batch": 5, **options}
        result = fit(step, **options)
        assert min(step.sizes) == 5
        verified = [event for event in result.events if isinstance(event, Verified)]
        assert verified
        assert verified[0].error < 1e-12
        assert verified[0].samples >= 10
        assert all(len(report.micro_batches) > 1 for report in result.history[:1])
        assert not [event for event in result.events if isinstance(event, Notice)]

    def test_in_an_accumulator(self) -> None:
        step, model = Picky(5), net()
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step, min_micro_batch=5, max_micro_batch=8
        )
        for size in (24, 11, 40, 9, 5):
            accumulator.step(data(size))
            assert min(accumulator.micro_batches) >= 5
        assert min(step.sizes) == 5

    def test_where_memory_runs_out(self) -> None:
        step = Picky(4)
        with oom_at(60):
            result = fit(step, min_micro_batch=4, micro_batch=12)
        assert [event for event in result.events if isinstance(event, OutOfMemory)]
        assert min(step.sizes) >= 4

    def test_after_batch_norm_has_changed_its_mode(self) -> None:
        """It needs two samples, and none in eval mode: neither is less than what was asked for."""
        step = Picky(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step, min_micro_batch=3, max_micro_batch=4
        )
        for is_training in (True, False, True, False):
            model.train(is_training)
            accumulator.step(data(11))
            assert min(accumulator.micro_batches) >= 3

    def test_but_that_of_a_short_window_which_is_run_whole(self) -> None:
        step = Picky(1)
        result = fit(step, num_samples=27, min_micro_batch=8, max_micro_batch=8)
        assert [report.micro_batches for report in result.history] == [(8, 8, 8), (3,)]

    def test_after_a_run_that_was_told_of_more(self, tmp_path: Path) -> None:
        """What a run goes on by is what it is asked for now."""
        options: dict[str, Any] = {"run_dir": tmp_path, "verify": False, "effective_batch": 12, "num_samples": 96}
        for steps, fewest, most, sizes in ((4, 3, 4, (4, 4, 4)), (6, 5, 5, (6, 6)), (8, 12, None, (12,))):
            result = fit(_plain, min_micro_batch=fewest, max_micro_batch=most, steps=steps, **options)
            assert len(result.history) == steps
            assert result.history[-1].micro_batches == sizes


def _plain(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1])


def _error(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    if len(inputs) < 5:
        raise ValueError("too few for a metric")
    return ((model(inputs) - targets) ** 2).mean(dim=1)


class TestMeasurement:
    def test_takes_more_samples_where_parts_have_to_be_larger(self) -> None:
        """Three smallest parts where there is room for them at once."""
        result = fit(Picky(8), min_micro_batch=8, micro_batch=12, num_samples=48, effective_batch=48)
        (verified,) = [event for event in result.events if isinstance(event, Verified)]
        assert verified.samples == 24
        assert all(min(cut) >= 8 for cut in verified.cuts)

    @pytest.mark.weighted
    def test_finds_what_is_wrong_all_the_same(self) -> None:
        def coupled(model: nn.Module, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            if len(inputs) < 4:
                raise ValueError("too few")
            outputs = model(inputs)
            return ((outputs - outputs.mean(dim=0)) ** 2).sum().sqrt() + mse_loss(outputs, targets)

        with pytest.warns(errors.AutoaccumWarning, match=r"leads to Sqrt.*measured on 12 samples"):
            fit(coupled, min_micro_batch=4, micro_batch=8)
        with pytest.raises(errors.NotExactError):
            fit(coupled, min_micro_batch=4, micro_batch=8, strict=True)

    def test_says_that_there_was_no_room_for_it(self) -> None:
        """Two smallest parts at once are more than memory has; one fits."""
        with simulated_memory(10**9) as memory:
            model = wide()
            inputs, targets = classes(96)
            report = autoaccum.probe(model, (inputs, targets), loss_fn=nn.functional.cross_entropy, device="cpu")
            assert report.memory_model is not None
            memory.limit = int(report.memory_model.predict(12) * 1.1)
            with pytest.warns(errors.AutoaccumWarning, match="could not be measured"):
                result = autoaccum.fit(
                    model, (inputs, targets), loss_fn=nn.functional.cross_entropy, effective_batch=32, device="cpu",
                    min_micro_batch=8, progress=False, cache=False, epochs=6,
                )  # fmt: skip
        assert {min(report.micro_batches) for report in result.history} == {8}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class TestNothingFits:
    def test_names_the_smallest_and_that_a_lower_one_is_a_cure(self) -> None:
        inputs, targets = classes(96)
        with simulated_memory(10**9) as memory:
            report = autoaccum.probe(wide(), (inputs, targets), loss_fn=nn.functional.cross_entropy, device="cpu")
            assert report.memory_model is not None
            memory.limit = int(report.memory_model.predict(10) * 1.05)
            options: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "device": "cpu", "patience": 0.0}
            for min_micro_batch in (32, 17):
                match = f"smallest that min_micro_batch={min_micro_batch} allows.*Lower min_micro_batch"
                with pytest.raises(errors.NothingFitsError, match=match) as caught:
                    autoaccum.fit(
                        wide(), (inputs, targets), effective_batch=64, min_micro_batch=min_micro_batch, progress=False,
                        cache=False, optimizer=sgd, **options,
                    )  # fmt: skip
                assert caught.value.min_micro_batch == min_micro_batch
                with pytest.raises(errors.NothingFitsError, match=match):
                    autoaccum.probe(
                        wide(), (inputs, targets), optimizer=sgd, min_micro_batch=min_micro_batch, **options
                    )

            def greedy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(outputs + torch.zeros(10**6).sum(), targets)

            with pytest.raises(errors.NothingFitsError, match="the smallest there is") as caught:
                autoaccum.fit(
                    wide(), (inputs, targets), effective_batch=64, progress=False, optimizer=sgd,
                    **{**options, "loss_fn": greedy},
                )  # fmt: skip
            assert caught.value.min_micro_batch is None

    def test_in_validation(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = mse_loss(model(batch[0]), batch[1])
            if not model.training and len(batch[0]) > 5:
                raise torch.OutOfMemoryError("out of memory")
            return loss

        with pytest.raises(errors.NothingFitsError, match=r"validation: a micro-batch of 6.*min_micro_batch=6 allows"):
            fit(step, min_micro_batch=6, validation_data=data(24), patience=0.0)
        fit(step, min_micro_batch=5, validation_data=data(24), patience=0.0)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"min_micro_batch": 0}, "min_micro_batch=0"),
            ({"min_micro_batch": 2.5}, "min_micro_batch=2.5"),
            ({"min_micro_batch": 6, "max_micro_batch": 5}, "min_micro_batch=6: expected at most max_micro_batch=5"),
            ({"min_micro_batch": 6, "micro_batch": 5}, "min_micro_batch=6: expected at most micro_batch=5"),
            ({"min_micro_batch": 6, "micro_batch": [(6, 5, 5, 8)]}, "min_micro_batch=6: expected at most 5"),
            ({"min_micro_batch": 25}, "min_micro_batch=25: expected at most 24"),
            ({"min_micro_batch": 9, "effective_batch": "8, 10:32"}, "min_micro_batch=9: expected at most 8"),
        ],
    )
    def test_what_contradicts_others_is_refused_before_training(self, options: Any, match: str) -> None:
        step = Picky(1)
        with pytest.raises(errors.ArgumentError, match=match):
            fit(step, **options)
        assert step.sizes == []

    def test_what_a_schedule_begins_with_is_no_refusal_where_a_function_says_it(self) -> None:
        smallest = [
            Linear(64, 8, over=3),
            Milestones(16, {3: 4, 5: 32}),
            NoiseScale(min=4, max=9),
        ]
        assert [schedule.smallest for schedule in smallest] == [8, 4, 4]
        assert Function(lambda progress: 3).smallest is None
        result = fit(Picky(1), min_micro_batch=5, effective_batch=lambda progress: 3, steps=2)
        assert [report.micro_batches for report in result.history] == [(3,), (3,)]

    def test_a_noise_scale_needs_two_of_them(self) -> None:
        with pytest.raises(errors.ArgumentError, match=r"a min of at least 10.*lower min_micro_batch=5"):
            fit(Picky(1), min_micro_batch=5, effective_batch=NoiseScale(min=8, max=64), steps=2)

    def test_an_accumulator_refuses_them_too(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(errors.ArgumentError, match="at most max_micro_batch=3"):
            Accumulator(model, optimizer, loss_fn=mse_loss, min_micro_batch=4, max_micro_batch=3)


class TestProbe:
    def test_tries_none_that_is_smaller(self) -> None:
        step = Picky(5)
        report = autoaccum.probe(
            net(), data(48), training_step=step, effective_batch=24, min_micro_batch=5, device="cpu"
        )
        assert min(trial.micro_batch for trial in report.trials) == 5
        assert step.sizes == [], "what a function keeps is as it was"
        assert report.plan is not None
        assert report.plan.sizes == (24,)

    def test_makes_no_plan_of_smaller_ones(self) -> None:
        for largest, sizes in ((7, None), (8, (8, 8)), (11, (8, 8))):
            report = autoaccum.probe(
                mlp(), classes(16), effective_batch=16,
                loss_fn=nn.functional.cross_entropy, min_micro_batch=6, max_micro_batch=largest, device="cpu",
            )  # fmt: skip
            assert (report.plan and report.plan.sizes) == sizes
