"""``fit`` and ``Trainer``: budgets, schedules, precisions, plans, interruptions, and what is reported."""

from __future__ import annotations

import copy
import inspect
import math
import os
import signal
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import Dataset

import autoaccum
from autoaccum import schedules
from autoaccum.errors import AutoaccumWarning, NothingFitsError
from autoaccum.events import (
    Compiled,
    Finished,
    Notice,
    OutOfMemory,
    Planned,
    Replanned,
    Started,
    StepReport,
    StepSkipped,
    Validated,
)
from autoaccum.memory.clock import ManualClock
from autoaccum.runs.past import Past
from autoaccum.testing import oom_at, simulated_memory
from tests.faults import Operations, strides
from tests.models import classes, mlp, noisy, same, state_of, wide

pytestmark = pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")


def fit(model: nn.Module | None = None, data: Any = None, **options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {
        "loss_fn": cross_entropy,
        "effective_batch": 8,
        "device": "cpu",
        "progress": False,
        "cache": False,
    }
    if "training_step" in options:
        del arguments["loss_fn"]
    return autoaccum.fit(model or mlp(), classes(20) if data is None else data, **{**arguments, **options})


def sizes(result: autoaccum.FitResult) -> list[int]:
    return [report.effective_batch for report in result.history]


class TestBudget:
    @pytest.mark.parametrize(
        ("budget", "expected"),
        [
            ({}, [8, 8, 4]),
            ({"epochs": 2}, [8, 8, 4, 8, 8, 4]),
            ({"steps": 4}, [8, 8, 4, 8]),
            ({"samples": 33}, [8, 8, 4, 8, 5]),
            ({"epochs": 2, "drop_last": True}, [8, 8, 8, 8]),
            ({"steps": 3, "drop_last": True}, [8, 8, 8]),
            ({"samples": 33, "drop_last": True}, [8, 8, 8, 8, 1]),
        ],
    )
    def test_windows(self, budget: dict[str, Any], expected: list[int]) -> None:
        result = fit(**budget)
        assert sizes(result) == expected
        assert result.num_steps == len(expected)
        assert result.num_samples == sum(expected) == result.history[-1].num_samples
        assert isinstance(result.events[0], Started)
        assert (result.events[0].num_steps, result.events[0].num_samples) == (len(expected), sum(expected))

    @given(
        num_samples=st.integers(1, 30),
        effective_batch=st.integers(1, 12),
        drop_last=st.booleans(),
        budget=st.fixed_dictionaries({})
        | st.sampled_from(["epochs", "steps", "samples"]).flatmap(
            lambda name: st.fixed_dictionaries({name: st.integers(1, 70 if name == "samples" else 6)})
        ),
    )
    @settings(max_examples=60, deadline=None)
    def test_steps_are_known_up_front(
        self, num_samples: int, effective_batch: int, drop_last: bool, budget: dict[str, int]
    ) -> None:
        effective_batch = min(effective_batch, num_samples)
        trainer = autoaccum.Trainer(
            mlp(),
            classes(num_samples),
            effective_batch=effective_batch,
            drop_last=drop_last,
            micro_batch=min(16, effective_batch),
            loss_fn=cross_entropy,
            device="cpu",
            progress=False,
            **budget,
        )
        result = trainer.fit()
        assert (result.num_steps, result.num_samples) == (trainer.num_steps, trainer.num_samples)

    def test_epochs_of_a_stream_end_with_a_short_window(self) -> None:
        batches = [classes(7), classes(7), classes(3)]
        result = fit(data=batches, epochs=2, effective_batch=8)
        assert sizes(result) == [8, 8, 1, 8, 8, 1]
        assert result.events[0].num_steps is None  # type: ignore[union-attr]

    def test_an_effective_batch_beyond_the_data_is_one_short_window(self) -> None:
        with pytest.warns(AutoaccumWarning, match="effective_batch=64 is more than the data's 20 samples") as warned:
            result = fit(effective_batch=64, epochs=2)
        assert sizes(result) == [20, 20]
        assert len(warned) == 1
        assert sum(isinstance(event, Notice) for event in result.events) == 1

    @pytest.mark.parametrize("effective_batch", [20, 64])
    def test_a_stream_of_less_than_one_window_is_planned(self, effective_batch: int) -> None:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            result = fit(data=[classes(20)], epochs=12, effective_batch=effective_batch)
        assert len(warned) == (effective_batch > 20)
        assert sizes(result) == [20] * 12
        assert any(isinstance(event, Planned) and sum(event.sizes) == 20 for event in result.events)


class TestLossForms:
    def test_all_agree(self) -> None:
        class ReturnsLoss(nn.Module):
            def __init__(self, form: str) -> None:
                super().__init__()
                self.net = mlp()
                self.form = form

            def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
                loss = cross_entropy(self.net(inputs), targets)
                return {"dict": {"loss": loss}, "tensor": loss}[self.form]

        inputs, targets = classes(20)
        expected = [report.loss for report in fit(micro_batch=3).history]
        by_step = fit(micro_batch=3, training_step=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
        assert [report.loss for report in by_step.history] == expected
        for form in ("dict", "tensor"):
            for data in ((inputs, targets), {"inputs": inputs, "targets": targets}):
                result = fit(ReturnsLoss(form), data, micro_batch=3, loss_fn=None)
                assert [report.loss for report in result.history] == expected

    def test_several_inputs(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return self.net(a - b)  # type: ignore[no-any-return]

        inputs, targets = classes(20)
        expected = [report.loss for report in fit(micro_batch=3).history]
        zeros = torch.zeros_like(inputs)
        for model_inputs in ((inputs, zeros), {"a": inputs, "b": zeros}):
            assert [r.loss for r in fit(Two(), (model_inputs, targets), micro_batch=3).history] == expected


class TestOptimizer:
    def test_adamw_by_default_with_the_learning_rate(self) -> None:
        result = fit(lr=0.25)
        assert type(result.optimizer) is torch.optim.AdamW
        assert result.optimizer.param_groups[0]["lr"] == 0.25
        assert fit().optimizer.param_groups[0]["lr"] == 1e-3

    def test_matches_a_hand_written_loop(self) -> None:
        """The same windows, one forward each: bit for bit what PyTorch does without us."""
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
        data = classes(20)
        result = fit(
            data=data,
            micro_batch=8,
            epochs=2,
            shuffle=False,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        )
        losses = []
        for _ in range(2):
            for start in range(0, 20, 8):
                optimizer.zero_grad()
                loss = cross_entropy(model(data[0][start : start + 8]), data[1][start : start + 8])
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert [report.loss for report in result.history] == losses
        assert same([*result.model.parameters()], [*model.parameters()])

    def test_an_instance_is_used_as_it_is(self) -> None:
        model = mlp()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
        assert fit(model, optimizer=optimizer).optimizer is optimizer

    def test_scheduler_steps_once_a_window_with_the_true_number_of_steps(self) -> None:
        told: list[int] = []

        def one_cycle(optimizer: torch.optim.Optimizer, num_steps: int) -> OneCycleLR:
            told.append(num_steps)
            return OneCycleLR(optimizer, max_lr=1.0, total_steps=num_steps)

        result = fit(lr_scheduler=one_cycle, epochs=2, micro_batch=2)  # OneCycleLR raises on a step too many
        assert told == [6]
        reference = OneCycleLR(torch.optim.AdamW(mlp().parameters()), max_lr=1.0, total_steps=6)
        expected = []
        for _ in range(6):
            expected.append(reference.get_last_lr()[0])
            reference.optimizer.step()
            if len(expected) < 6:
                reference.step()
        assert [report.lr for report in result.history] == expected

    def test_a_replay_is_one_step_to_schedulers_and_callbacks(self) -> None:
        seen: list[Any] = []
        trainer = autoaccum.Trainer(
            mlp(),
            classes(20),
            effective_batch=8,
            micro_batch=8,
            loss_fn=cross_entropy,
            device="cpu",
            progress=False,
            callbacks=[seen.append],
            lr_scheduler=lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 0.5**step),
        )
        with oom_at(40):
            result = trainer.fit()
        assert [report.lr for report in result.history] == [1e-3, 5e-4, 2.5e-4]
        assert [record.step for record in seen if isinstance(record, StepReport)] == [1, 2, 3]
        assert sum(report.replays for report in result.history) == 1

    def test_gradient_is_clipped_as_a_window(self) -> None:
        norms = [[report.grad_norm for report in fit(micro_batch=m, clip_norm=0.01).history] for m in (8, 3)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert min(norm for norm in norms[0] if norm is not None) > 0.01
        model = mlp()
        before = [p.detach().clone() for p in model.parameters()]
        fit(model, clip_norm=0.01, steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
        moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_gradient_is_measured_where_it_is_not_clipped(self, precision: Any) -> None:
        plain = fit(micro_batch=3, precision=precision)
        # Clipped to what no window reaches it is what it was, so that both have the same windows throughout.
        clipped = fit(micro_batch=3, precision=precision, clip_norm=1e9)
        assert [r.grad_norm for r in plain.history] == [r.grad_norm for r in clipped.history]
        assert [r.loss for r in plain.history] == [r.loss for r in clipped.history]
        inputs, targets = classes(20)
        model = mlp()
        cross_entropy(model(inputs), targets).backward()
        found = fit(micro_batch=3, precision="fp32", effective_batch=20, steps=1).history[0].grad_norm
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        assert found == pytest.approx(expected.item(), rel=1e-5)

    def test_of_nothing_that_counts_there_is_no_norm(self) -> None:
        data = (classes(20)[0], torch.full((20,), -100))
        data[1][:8] = 1  # the first window alone has something to learn from
        with pytest.warns(AutoaccumWarning, match="Nothing in window 2 counts"):
            result = fit(data=data, shuffle=False)
        assert [report.grad_norm is None for report in result.history] == [False, True, True]


class TestPrecision:
    def test_bf16_computes_in_bfloat16(self) -> None:
        seen = set()

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            outputs = model(batch[0])
            seen.add(outputs.dtype)
            return cross_entropy(outputs.float(), batch[1])

        result = fit(training_step=step, precision="bf16", micro_batch=3)
        assert seen == {torch.bfloat16}
        full = fit(micro_batch=3)
        assert [r.loss for r in result.history] == pytest.approx([r.loss for r in full.history], rel=0.02)

    def test_fp16_scales_the_loss_and_unscales_the_gradient(self) -> None:
        half = fit(precision="fp16", clip_norm=1e9, micro_batch=3)
        full = fit(clip_norm=1e9, micro_batch=3)
        norms = [[r.grad_norm for r in result.history] for result in (half, full)]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)

    def test_fp16_overflow_skips_the_window_once(self) -> None:
        calls = []

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            calls.append(1)
            loss = cross_entropy(model(batch[0]), batch[1])
            return loss * (float("inf") if len(calls) == 5 else 1.0)  # second window, second micro-batch

        model = mlp()
        result = fit(model, training_step=step, precision="fp16", micro_batch=3, shuffle=False, verify=False)
        assert [event.step for event in result.events if isinstance(event, StepSkipped)] == [2]
        assert sizes(result) == [8, 8, 4]
        assert all(p.isfinite().all() for p in model.parameters())

    @strides(73)
    def test_fp16_replays_exactly_while_unscaling(self, stride: int) -> None:
        """An OOM after the gradients were unscaled must not leave the scaler believing that they still are."""

        def half() -> autoaccum.Trainer:
            return autoaccum.Trainer(
                noisy(),
                classes(20),
                effective_batch=8,
                micro_batch=8,
                loss_fn=cross_entropy,
                device="cpu",
                progress=False,
                precision="fp16",
                clip_norm=0.1,
            )

        with Operations() as operations:
            half().fit()
        replayed = 0
        for operation in operations.every(stride, offset=6):
            trainer = half()
            try:
                with oom_at(operation):
                    result = trainer.fit()
            except (autoaccum.AutoaccumError, torch.OutOfMemoryError):
                continue
            plans = [report.micro_batches for report in result.history]
            clean = fit(noisy(), micro_batch=plans, precision="fp16", clip_norm=0.1)
            assert same(state_of(result), state_of(clean))
            replayed += 1
        assert replayed * stride > 40 * 7


class TestPlans:
    def test_auto_grows_within_the_first_window_and_settles(self) -> None:
        result = fit(data=classes(200), effective_batch=64, epochs=10)
        assert result.history[0].micro_batches == (1, 1, 2, 4, 8, 16, 32)
        assert result.history[1].micro_batches == (64,)
        assert [type(e).__name__ for e in result.events] == ["Started", "Verified", "Planned", "Finished"]
        assert result.plan.sizes == (64,)

    def test_the_fastest_is_kept_where_smaller_ones_are_faster(self, work_clock: ManualClock) -> None:
        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            work_clock.advance((len(outputs) / 8) ** 2 / 1024)  # beside the 1 / 1024 that any micro-batch takes
            return cross_entropy(outputs, targets)

        result = fit(data=classes(256), effective_batch=64, epochs=20, loss_fn=loss_fn)
        (planned,) = [event for event in result.events if isinstance(event, Planned)]
        assert planned.sizes == result.plan.sizes == (8,) * 8
        assert planned.reason == "larger micro-batches are no faster"
        assert {(64,), (32, 32)} <= {report.micro_batches for report in result.history}

    @pytest.mark.weighted
    @pytest.mark.parametrize(("verify", "fewest"), [(False, 5), (True, 2)])
    def test_batch_norm_never_sees_one_sample_and_is_announced(self, verify: bool, fewest: int) -> None:
        seen = []
        model = noisy()
        model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        result = fit(model, data=classes(200), effective_batch=65, verify=verify)
        # Few sizes, and large ones, from the first; 5 is an epoch's end. A measurement has parts of two.
        assert min(seen) == fewest
        assert all(min(report.micro_batches) >= 5 for report in result.history)
        assert sum(sizes(result)) == 200
        notices = [event for event in result.events if isinstance(event, Notice)]
        assert len(notices) == 1
        assert "1 BatchNorm layer" in notices[0].cause
        assert ("off the whole window's" in notices[0].cause) == verify

    def test_finds_the_limit_without_losing_a_sample(self) -> None:
        with simulated_memory("3MiB") as memory:
            result = fit(wide(2000), data=classes(2000), effective_batch=500, epochs=10)
            assert memory.peak <= memory.limit
        largest = max(result.plan.sizes)
        assert sizes(result) == [500] * 40
        assert sum(isinstance(event, Planned) for event in result.events) == 1
        assert largest in {size for report in result.history for size in report.micro_batches}
        assert largest > 40

    def test_an_oom_is_replayed_smaller_and_told(self) -> None:
        model = wide(2000)
        with simulated_memory("3MiB"):
            result = fit(model, data=classes(1000), effective_batch=500, micro_batch=500)
        ooms = [event for event in result.events if isinstance(event, OutOfMemory)]
        plans = [event for event in result.events if isinstance(event, Replanned)]
        assert [event.micro_batch for event in ooms] == [500, 250, 125]
        assert [(event.old[0], event.new[0], event.reason) for event in plans] == [
            (500, 250, "out of memory"),
            (250, 125, "out of memory"),
            (125, 56, "out of memory"),
        ]
        assert [(sum(r.micro_batches), max(r.micro_batches), r.replays) for r in result.history] == [
            (500, 56, 3),
            (500, 56, 0),
        ]

    def test_memory_that_shrinks_in_the_midst_of_a_run(self) -> None:
        model = wide(2000)
        with simulated_memory("16MiB") as memory:

            def shrink(record: Any) -> None:
                if isinstance(record, StepReport) and record.step == 3:
                    memory.limit = 3 * 2**20

            result = fit(model, data=classes(2000), effective_batch=400, callbacks=[shrink])
        assert sizes(result) == [400] * 5
        assert max(result.history[2].micro_batches) > 2 * max(result.history[4].micro_batches)
        assert sum(report.replays for report in result.history) == 0, "it could be seen coming"
        assert [(e.step, e.reason) for e in result.events if isinstance(e, Replanned)] == [
            (4, "the limit fell to 3.00 MiB")
        ]

    def test_recorded_plans_repeat_a_run(self) -> None:
        first = fit(noisy(), micro_batch=[(5, 3), (2, 2, 4), (2, 2)])
        again = fit(noisy(), micro_batch=[report.micro_batches for report in first.history])
        assert [report.micro_batches for report in again.history] == [(5, 3), (2, 2, 4), (2, 2)]
        assert same(state_of(first), state_of(again))

    def test_a_plan_that_does_not_sum_is_refused(self) -> None:
        seen: list[Any] = []
        model = mlp()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(autoaccum.AutoaccumError, match="sizes that sum to 4 in window 3"):
            fit(model, micro_batch=[(8,), (8,), (8,)], callbacks=[seen.append])
        assert seen == []
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_the_plan_of_a_stream_is_refused_when_its_window_comes(self) -> None:
        with pytest.raises(autoaccum.AutoaccumError, match="sizes that sum to 4 in window 3"):
            fit(data=[classes(20)], micro_batch=[(8,), (8,), (8,)])

    @pytest.mark.parametrize("data", [{}, [], ()])
    def test_empty_validation_data_are_called_so(self, data: Any) -> None:
        with pytest.raises(
            autoaccum.errors.EmptyDatasetError, match="^validation_data holds no sample: it is an empty"
        ):
            fit(validation_data=data)

    def test_validation_data_without_samples_are_called_so(self) -> None:
        with pytest.raises(autoaccum.errors.DataError, match="^validation_data: a batch of type dict holds no tensor"):
            fit(validation_data={"a": 3})

    @pytest.mark.filterwarnings("ignore:The model sees the padding")  # which it sums like any token
    @pytest.mark.parametrize("limit", [None, 30_000])
    @pytest.mark.parametrize("lengths", [[0] * 12, [0, 3, 1, 0, 5, 0] * 2, [0] * 6 + [50] * 6, [50] * 6 + [0] * 6])
    def test_samples_of_length_0(self, lengths: list[int], limit: int | None) -> None:
        class Texts(Dataset[Any]):
            def __len__(self) -> int:
                return len(lengths)

            def __getitem__(self, index: int) -> list[int]:
                return [1] * lengths[index]

        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
        with nullcontext() if limit is None else simulated_memory(limit):
            result = fit(
                model,
                Texts(),
                effective_batch=6,
                epochs=2,
                training_step=lambda model, batch: model[1](model[0](batch).sum(1)).mean(),
                collate_fn=lambda texts: pad_sequence(
                    [torch.tensor(text, dtype=torch.long) for text in texts], batch_first=True
                ),
            )
        assert [report.effective_batch for report in result.history] == [6] * 4

    def test_max_micro_batch(self) -> None:
        for micro_batch in ("auto", 8):
            result = fit(data=classes(100), effective_batch=32, micro_batch=micro_batch, max_micro_batch=5)
            assert max(size for report in result.history for size in report.micro_batches) == 5

    def test_nothing_fits(self) -> None:
        model = wide(100_000)
        needed = sum(p.nbytes for p in model.parameters()) * 4
        with simulated_memory(needed + 500_000), pytest.raises(NothingFitsError, match="a micro-batch of 1") as caught:
            fit(model)
        assert caught.value.limit_bytes == needed + 500_000

    def test_frozen_parts_stay_frozen(self) -> None:
        model = noisy()
        model[1].eval()
        model[4].requires_grad_(False)
        before = model[4].weight.clone(), model[1].running_mean.clone()
        fit(model)
        assert torch.equal(model[4].weight, before[0])
        assert torch.equal(model[1].running_mean, before[1])
        evaluated = noisy().eval()
        fit(evaluated, micro_batch=8)
        assert evaluated[3].training

    def test_peak_memory_does_not_grow_with_the_effective_batch(self) -> None:
        peaks = []
        for effective_batch in (16, 256, 4096):
            with simulated_memory("64MiB"):
                result = fit(data=classes(4096), effective_batch=effective_batch, micro_batch=16, steps=1)
            peaks.append(result.history[0].peak_bytes)
        assert max(peaks) - peaks[1] < 1024
        assert max(peaks) - peaks[0] < 4096  # a window of one micro-batch holds no gradient while it runs forward

    def test_peak_memory_falls_with_the_micro_batch_as_the_model_says(self) -> None:
        with simulated_memory("64MiB"):
            model = autoaccum.probe(mlp(), classes(4096), loss_fn=cross_entropy, device="cpu").memory_model
            assert model is not None
        peaks = {}
        for micro_batch in (64, 256, 1024):
            with simulated_memory("64MiB"):
                result = fit(data=classes(4096), effective_batch=2048, micro_batch=micro_batch, steps=1)
            peaks[micro_batch] = result.history[0].peak_bytes
        for small, large in ((64, 256), (256, 1024)):
            predicted = model.predict(large) - model.predict(small)
            assert peaks[large] - peaks[small] == pytest.approx(predicted, rel=0.02)


class TestPast:
    """Runs begin from the trials of earlier ones with the same key."""

    @staticmethod
    def trainer(**options: Any) -> autoaccum.Trainer:
        arguments: dict[str, Any] = {"data": classes(64), "model": mlp(), "effective_batch": 16, **options}
        return autoaccum.Trainer(**arguments, loss_fn=cross_entropy, device="cpu", progress=False)

    @pytest.mark.parametrize("data", ["tensors", "batches", "iterator"])
    def test_a_second_run_recalls_what_the_first_measured(self, data: str) -> None:
        made = {"tensors": lambda: classes(64), "batches": lambda: [classes(32)] * 2}
        made["iterator"] = lambda: iter(made["batches"]())
        first, second, other = (
            self.trainer(data=made[data](), model=model, seed=seed)
            for model, seed in ((mlp(), 0), (mlp(seed=5), 3), (wide(), 0))
        )
        result = first.fit()
        assert result.num_samples == 64, "looking at the shapes took no sample"
        assert first._tuner.past == ()
        second.fit()
        measured = [trial for trial in first._tuner.history if trial.peak_bytes is not None]
        assert measured
        assert {(t.micro_batch, t.peak_bytes) for t in second._tuner.past} >= {
            (t.micro_batch, t.peak_bytes) for t in measured
        }
        other.fit()
        assert other._tuner.past == ()

    @pytest.mark.parametrize("options", [{"cache": False}, {"micro_batch": 4}])
    def test_without_it_or_without_a_search_nothing_is_kept_or_recalled(self, options: dict[str, Any]) -> None:
        self.trainer(**options).fit()
        assert Past().files() == []
        self.trainer().fit()
        assert len(Past().files()) == 1
        again = self.trainer(**options)
        again.fit()
        assert again._tuner.past == ()

    def test_what_was_measured_before_an_error_is_kept(self) -> None:
        def fail(record: Any) -> None:
            if isinstance(record, StepReport):
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            self.trainer(callbacks=[fail]).fit()
        assert len(Past().files()) == 1

    def test_a_model_that_cannot_say_what_it_is_trains_without(self) -> None:
        class Mute(nn.Linear):
            def extra_repr(self) -> str:
                raise RuntimeError("mute")

        model = Mute(8, 3)
        assert self.trainer(model=model).fit().num_steps == 4
        assert Past().files() == []

    def test_looking_at_the_shapes_changes_no_number(self) -> None:
        with_past = fit(noisy(), cache=True, effective_batch=4, epochs=2)
        plans = [report.micro_batches for report in with_past.history]
        without = fit(noisy(), cache=False, effective_batch=4, epochs=2, micro_batch=plans)
        assert same(state_of(with_past), state_of(without))


class TestValidation:
    def test_reports_the_loss_after_each_epoch(self) -> None:
        held_out = classes(11, seed=9)
        model = mlp()
        result = fit(model, validation_data=held_out, epochs=2, micro_batch=4)
        reports = [event for event in result.events if isinstance(event, Validated)]
        assert [(r.epoch, r.step, r.num_samples) for r in reports] == [(0, 3, 11), (1, 6, 11)]
        with torch.no_grad():
            assert reports[-1].loss == pytest.approx(cross_entropy(model(held_out[0]), held_out[1]).item(), rel=1e-6)

    def test_leaves_training_as_it_is(self) -> None:
        plain = fit(noisy(), epochs=2, cache=False)
        validated = fit(noisy(), epochs=2, cache=False, validation_data=classes(11))
        assert same(state_of(plain), state_of(validated))

    def test_its_oom_never_touches_trainings_plan(self) -> None:
        class OnlyInValidation(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if not self.training and len(inputs) > 3:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return self.net(inputs)  # type: ignore[no-any-return]

        result = fit(OnlyInValidation(), validation_data=classes(11), micro_batch=8, epochs=2)
        ooms = [event for event in result.events if isinstance(event, OutOfMemory)]
        assert [(event.phase, event.micro_batch) for event in ooms] == [("validation", 8), ("validation", 4)]
        reports = [event for event in result.events if isinstance(event, Validated)]
        assert [(r.micro_batch, r.num_samples) for r in reports] == [(3, 11), (3, 11)]
        assert {report.micro_batches for report in result.history} == {(8,), (4,)}

    def test_nothing_fits(self) -> None:
        class Never(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if not self.training:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return self.net(inputs)  # type: ignore[no-any-return]

        with pytest.raises(NothingFitsError, match="validation: a micro-batch of 1"):
            fit(Never(), validation_data=classes(11), patience=0)


class TestEnd:
    def test_a_callback_ends_the_run_after_the_window(self) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == 2:
                raise autoaccum.StopTraining

        result = fit(callbacks=[stop], epochs=5)
        assert result.num_steps == 2
        assert result.events[-1] == Finished(step=2, reason="stopped", stopped_by="stop")

    def test_a_run_may_end_before_its_first_window(self) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, Started):
                raise autoaccum.StopTraining

        result = fit(callbacks=[stop])
        assert (result.num_steps, result.plan.sizes) == (0, ())
        assert result.events[-1] == Finished(step=0, reason="stopped", stopped_by="stop")

    def test_ctrl_c_ends_the_run_after_the_window(self) -> None:
        def press(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        result = fit(callbacks=[press], epochs=500)
        assert 2 <= result.num_steps <= 3
        assert isinstance(result.events[-1], Finished)
        assert result.events[-1].reason == "interrupted"
        assert signal.getsignal(signal.SIGINT) is before

    def test_a_second_ctrl_c_stops_at_once(self) -> None:
        def press(record: Any) -> None:
            if isinstance(record, StepReport):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            fit(callbacks=[press], epochs=500)

    def test_callbacks_see_everything_in_order(self) -> None:
        seen: list[Any] = []
        result = fit(callbacks=[seen.append], validation_data=classes(4))
        assert [record for record in seen if isinstance(record, StepReport)] == list(result.history)
        assert [record for record in seen if not isinstance(record, StepReport)] == list(result.events)
        assert isinstance(seen[0], Started)
        assert isinstance(seen[-1], Finished)


def test_fit_shows_the_trainers_signature() -> None:
    fit_parameters = inspect.signature(autoaccum.fit).parameters
    assert fit_parameters == inspect.signature(autoaccum.Trainer).parameters
    assert inspect.signature(autoaccum.fit).return_annotation == "FitResult"


def test_the_run_is_a_function_of_the_seed() -> None:
    first, again, other = (fit(noisy(), micro_batch=4, seed=seed) for seed in (3, 3, 4))
    assert same(state_of(first), state_of(again))
    assert [r.loss for r in first.history] != [r.loss for r in other.history]


@pytest.mark.filterwarnings("ignore")
def test_compile() -> None:
    plain, compiled = (fit(micro_batch=4, compile=flag) for flag in (False, True))
    assert [r.loss for r in compiled.history] == pytest.approx([r.loss for r in plain.history], rel=1e-5)
    assert not any(isinstance(event, Compiled) for event in plain.events)
    told = [event for event in compiled.events if isinstance(event, Compiled)]
    assert [event.compilations for event in told] == [1] * len(told), "by inductor"
    assert 1 <= len(told) <= 2, "one size of the user's own, and the short window's"


class TestSchedules:
    def test_reports_and_the_last_batch_are_shown_to_a_function(self) -> None:
        last: dict[int, schedules.Progress] = {}

        def asks(progress: schedules.Progress) -> int:
            if progress.reports:
                last[progress.step] = progress
            return 5 if progress.step == 2 else 8

        result = fit(effective_batch=asks, epochs=2)
        assert sizes(result) == [8, 8, 4, 8, 8, 4]
        shown = [last[step] for step in range(1, 6)]
        assert [progress.epoch for progress in shown] == [0, 0, 1, 1, 1]
        assert [progress.samples for progress in shown] == [8, 16, 20, 28, 36]
        assert [progress.effective_batch for progress in shown] == [8, 8, 5, 8, 8]
        assert [progress.reports[-1] for progress in shown] == list(result.history[:-1])

    def test_at_most_a_hundred_reports(self) -> None:
        seen: list[int] = []
        fit(effective_batch=lambda progress: [seen.append(len(progress.reports)), 1][1], steps=120)
        assert max(seen) == 100

    @pytest.mark.parametrize("returned", [0, 2.5, None, True])
    def test_what_a_function_returns_is_checked_before_training(self, returned: Any) -> None:
        model = mlp()
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(autoaccum.AutoaccumError, match="The function passed as effective_batch returned it"):
            fit(model, effective_batch=lambda progress: 8 if progress.step < 4 else returned, epochs=3)
        assert same([p.detach() for p in model.parameters()], [p.detach() for p in before])

    def test_a_function_that_is_not_one_of_its_argument_is_told_on(self) -> None:
        calls = iter(range(1000))
        with pytest.warns(AutoaccumWarning, match="took . steps instead of the . that were foreseen"):
            fit(effective_batch=lambda progress: 10 - next(calls) // 3, epochs=1)

    def test_drop_last_that_would_leave_out_an_epoch_is_refused(self) -> None:
        with pytest.raises(autoaccum.AutoaccumError, match=r"drop_last=True.*32 samples in epoch 1"):
            fit(effective_batch="8, 2:32", epochs=2, drop_last=True)

    def test_a_change_is_an_event_and_so_is_what_comes_of_it(self) -> None:
        result = fit(effective_batch="4, 2:8, 3:4", data=classes(40), micro_batch=4, steps=5)
        assert [(event.step, event.old, event.new, event.reason) for event in replans(result)] == [
            (3, (4,), (4, 4), "the effective batch is 8 now"),
            (4, (4, 4), (4,), "the effective batch is 4 now"),
        ]

    def test_recorded_plans_repeat_a_schedule_bit_for_bit(self) -> None:
        def run(**options: Any) -> autoaccum.FitResult:
            schedule = "linear 4:19 over 90s"
            return fit(
                noisy(), classes(90), effective_batch=schedule, epochs=2, lr_scaling="sqrt", base_batch=4, **options
            )

        first = run()
        again = run(micro_batch=[report.micro_batches for report in first.history])
        assert same(state_of(first), state_of(again))
        assert [report.lr for report in first.history] == [report.lr for report in again.history]

    @pytest.mark.filterwarnings("ignore:effective_batch=50 is more than the data's 20")
    def test_streams_follow_too(self) -> None:
        result = fit(data=[classes(7), classes(9), classes(4)], effective_batch="3, 4:7, 9:50", epochs=3)
        assert sizes(result) == [3, 3, 3, 3, 7, 1, 7, 7, 6, 20]
        assert result.events[0].num_steps is None  # type: ignore[union-attr]

    @pytest.mark.filterwarnings("ignore:The model sees the padding")  # over which it averages
    def test_samples_of_different_lengths_are_planned_for_each_batch(self) -> None:
        rows = [(torch.full((1 + 7 * index % 23,), index),) for index in range(60)]

        def step(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            return model(nn.functional.one_hot(tokens % 8, 8).float()).square().mean(dim=(1, 2)).sum() / len(tokens)

        result = fit(
            data=Rows(rows),
            collate_fn=lambda samples: nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True),
            training_step=step,
            effective_batch="5, 4:31, 6:9",
            micro_batch=4,
            epochs=2,
        )
        assert sizes(result) == [5, 5, 5, 5, 31, 9, 9, 9, 9, 9, 9, 9, 6]
        assert [sum(event.new) for event in replans(result) if "effective batch" in event.reason] == [31, 9]


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def replans(result: autoaccum.FitResult) -> list[Replanned]:
    return [event for event in result.events if isinstance(event, Replanned)]


class TestNoiseScale:
    def test_it_is_reported_on_request_alone(self) -> None:
        plain, noise = fit(epochs=3), fit(epochs=3, noise_scale=True)
        assert {(r.noise_scale, r.gradient_squared, r.gradient_variance) for r in plain.history} == {(None,) * 3}
        # The second window tries the whole at once, which tells nothing; all others are cut for it.
        assert [len(report.micro_batches) for report in noise.history] == [4, 1] + [2] * 7
        assert noise.history[1].noise_scale == noise.history[0].noise_scale
        assert noise.history[1].gradient_squared is None
        squared = variance = 0.0
        for report in [noise.history[0], *noise.history[2:]]:
            assert report.gradient_squared is not None
            assert report.gradient_variance is not None
            squared = 0.95 * squared + 0.05 * report.gradient_squared
            variance = 0.95 * variance + 0.05 * report.gradient_variance
            assert report.noise_scale == pytest.approx(variance / squared if squared > 0 else math.inf)

    @pytest.mark.weighted
    def test_it_changes_no_parameter(self) -> None:
        plans = [report.micro_batches for report in fit(noisy(), noise_scale=True, epochs=3).history]
        runs = [fit(noisy(), micro_batch=plans, epochs=3, noise_scale=noise) for noise in (False, True)]
        assert same(state_of(runs[0]), state_of(runs[1]))

    def test_one_micro_batch_is_announced_with_the_cure(self) -> None:
        with pytest.warns(
            AutoaccumWarning, match=r"takes two to estimate the noise scale.*Leave micro_batch out"
        ) as told:
            result = fit(micro_batch=8, noise_scale=True, epochs=2)
        assert len(told) == 1
        assert {report.noise_scale for report in result.history} == {None}

    def test_a_short_window_of_one_sample_is_not_worth_a_word(self) -> None:
        result = fit(data=classes(17), noise_scale=True)
        assert [report.gradient_squared is None for report in result.history] == [False, True, True]
        assert result.history[-1].noise_scale == result.history[0].noise_scale, "the averages stand"

    def test_the_effective_batch_follows_it(self) -> None:
        """Targets that nothing explains: all of the gradient is noise, and the batch grows from 4 to 32 by doubling."""
        schedule = schedules.NoiseScale(4, 32, smoothing=0.5, patience=3)
        torch.manual_seed(0)
        data = torch.randn(3000, 8), torch.randint(0, 3, (3000,))
        result = fit(data=data, effective_batch=schedule, steps=60)
        asked = sizes(result)
        assert asked[0] == 4
        assert asked[-1] == 32
        changes = [index for index in range(1, 60) if asked[index] != asked[index - 1]]
        assert len(changes) >= 3
        assert all(b - a >= 3 for a, b in zip([0, *changes], changes, strict=False))
        assert all(asked[i] <= 2 * asked[i - 1] for i in changes)
        assert result.events[0].num_steps == 60  # type: ignore[union-attr]

    def test_steps_are_not_known_up_front(self) -> None:
        result = fit(data=classes(64), effective_batch="noise 4:16", epochs=1)
        started = result.events[0]
        assert isinstance(started, Started)
        assert (started.num_steps, started.num_samples) == (None, 64)

    def test_batch_norm_needs_two_samples_in_each_of_two_micro_batches(self) -> None:
        with pytest.raises(autoaccum.AutoaccumError, match=r"noise 2:16.*a min of at least 4"):
            fit(noisy(), effective_batch="noise 2:16")
        result = fit(noisy(), effective_batch="noise 4:16")
        assert result.history[0].micro_batches == (2, 2)


class TestValidateEvery:
    def test_it_needs_something_to_validate_on(self) -> None:
        with pytest.raises(autoaccum.AutoaccumError, match=r"validate_every=10.*validation_data beside it"):
            fit(validate_every=10)

    @pytest.mark.parametrize("wrong", [0, -1, 2.5, "epoch"])
    def test_it_is_a_number_of_samples(self, wrong: Any) -> None:
        with pytest.raises(autoaccum.AutoaccumError, match="validate_every=.*at least 1.*at the end of each epoch"):
            fit(validate_every=wrong, validation_data=classes(4))

    def test_not_after_a_callback_has_ended_the_run(self) -> None:
        def stop(record: object) -> None:
            if isinstance(record, StepReport) and record.step == 2:
                raise autoaccum.StopTraining

        result = fit(validate_every=8, validation_data=classes(4), callbacks=[stop])
        assert [event.step for event in result.events if isinstance(event, Validated)] == [1]
