"""What is returned beside the loss, through ``fit``, ``Accumulator``, validations and records."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

import autoaccum
from autoaccum.errors import OutputError
from autoaccum.events import Record, StepReport, Validated
from autoaccum.schedules import Progress
from tests.devices import DEVICE, there
from tests.models import classes, mlp

INPUTS, TARGETS = classes(30, torch.float64)
DATA = (INPUTS, TARGETS)


def values(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in outputs.items()}


def step(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A mean over samples, one over those that count, and a value for each sample."""
    inputs, targets = batch
    logits = model(inputs)
    losses = cross_entropy(logits, targets, reduction="none")
    counted = targets == 2
    return losses.mean(), {
        "right": (logits.argmax(1) == targets).double().mean(),
        "of two": (losses[counted].mean(), counted.sum()),
        "losses": losses,
    }


def fit(training_step: Any = step, data: Any = DATA, **options: Any) -> autoaccum.FitResult:
    arguments: dict[str, Any] = {
        "effective_batch": 30,
        "progress": False,
        "shuffle": False,
        "device": DEVICE,
        **options,
    }
    return autoaccum.fit(mlp(torch.float64), data, training_step=training_step, **arguments)


class TestExactness:
    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("sizes", [(30,), (15, 15), (1, 28, 1), (7, 8, 7, 8), (3,) * 10, (1,) * 30])
    def test_outputs_are_the_windows_whatever_the_plan(self, sizes: tuple[int, ...]) -> None:
        _, expected = step(there(mlp(torch.float64)), there(DATA))
        (report,) = fit(micro_batch=[sizes], verify=False).history
        assert report.micro_batches == sizes
        assert report.outputs["right"] == pytest.approx(expected["right"].item(), rel=1e-12)
        assert report.outputs["of two"] == pytest.approx(expected["of two"][0].item(), rel=1e-12)
        assert report.outputs["right"] != report.outputs["of two"]
        assert torch.allclose(report.outputs["losses"], expected["losses"].cpu(), rtol=1e-12)
        assert report.outputs["losses"].dtype == torch.float64
        assert not report.outputs["losses"].requires_grad

    @pytest.mark.device
    def test_a_value_that_the_loss_is_is_the_loss(self) -> None:
        for report in fit(lambda model, batch: (loss := step(model, batch)[0], {"it": loss}), micro_batch=7).history:
            assert report.outputs["it"] == pytest.approx(report.loss, rel=1e-12)

    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("micro_batch", [1, 4, 30])
    def test_micro_batches_that_num_items_counts_nothing_in_have_outputs(self, micro_batch: int) -> None:
        """They are not run for their gradient, and nobody knows that there are outputs before some are seen."""
        labels = torch.where(torch.arange(30) < 12, -100, TARGETS)
        labels[20:25] = -100

        def masked(model: Any, batch: Any) -> Any:
            inputs, indices, labels = batch
            return cross_entropy(model(inputs), labels), {"index": indices, "mean": inputs.mean()}

        def count(batch: Any) -> int:
            return int((batch[2] != -100).sum())

        data = (INPUTS, torch.arange(30), labels)
        result = fit(masked, data, micro_batch=micro_batch, num_items=count, epochs=2, verify=False)
        for report in result.history:
            assert report.outputs["index"].tolist() == list(range(30))
            assert report.outputs["mean"] == pytest.approx(INPUTS.mean().item(), rel=1e-12)
            assert report.replays == 0

        def plain(model: Any, batch: Any) -> Any:
            return masked(model, batch)[0]

        without = fit(plain, data, micro_batch=micro_batch, num_items=count, epochs=2, verify=False)
        for p, other in zip(result.model.parameters(), without.model.parameters(), strict=True):
            assert torch.equal(p, other)

    @pytest.mark.device
    def test_a_micro_batch_whose_loss_is_not_a_number_has_outputs(self) -> None:
        inputs = INPUTS.clone()
        kept = torch.arange(30) >= 10

        def over_kept(model: Any, batch: Any) -> Any:
            inputs, targets, kept, indices = batch
            losses = cross_entropy(model(inputs), targets, reduction="none")
            return losses[kept].mean(), {"index": indices, "one": 1}

        data = (inputs, TARGETS, kept, torch.arange(30))
        (report,) = fit(over_kept, data, micro_batch=5).history
        assert math.isfinite(report.loss)
        assert report.outputs["index"].tolist() == list(range(30))
        assert report.outputs["one"] == 1

    @pytest.mark.device
    def test_samples_are_in_the_order_in_which_they_are_served(self) -> None:
        """Those of different lengths are served longest first, and at once in the order of the data."""
        samples = [(torch.full((length,), 1.0), torch.tensor(0)) for length in (2, 5, 3, 9, 4, 1, 7, 6)]

        class Samples(Dataset[Any]):
            def __len__(self) -> int:
                return len(samples)

            def __getitem__(self, index: int) -> Any:
                return samples[index]

        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(1, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x.sum(1, keepdim=True))  # type: ignore[no-any-return]

        def lengths(model: Any, batch: Any) -> Any:
            return cross_entropy(model(batch[0]), batch[1]), {"length": batch[0].sum(1)}

        def collate(items: list[Any]) -> Any:
            padded = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
            return padded, torch.stack([item[1] for item in items])

        longest_first = [9, 7, 6, 5, 4, 3, 2, 1]
        for micro_batch, served in ((1, longest_first), (3, longest_first), (8, [2, 5, 3, 9, 4, 1, 7, 6])):
            result = autoaccum.fit(
                Mean(), Samples(), training_step=lengths, effective_batch=8, micro_batch=micro_batch, collate_fn=collate,
                progress=False, device=DEVICE, shuffle=False,
            )  # fmt: skip
            assert result.history[0].outputs["length"].tolist() == served


class TestWays:
    def test_of_a_loss_fn(self) -> None:
        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
            return mse_loss(outputs, targets), {"targets": targets}

        targets = torch.arange(90.0, dtype=torch.float64).reshape(30, 3)
        model, data = mlp(torch.float64), (INPUTS, targets)
        result = autoaccum.fit(
            model, data, loss_fn=loss_fn, effective_batch=30, micro_batch=7, shuffle=False, progress=False
        )
        assert torch.equal(result.history[0].outputs["targets"], targets)

    def test_of_a_model(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = mlp(torch.float64)

            def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
                return step(self.layers, (inputs, targets))

        result = autoaccum.fit(Model(), DATA, effective_batch=30, micro_batch=7, shuffle=False, progress=False)
        assert result.history[0].outputs["losses"].mean().item() == pytest.approx(result.history[0].loss, rel=1e-12)

    def test_of_no_kind_that_there_is(self) -> None:
        def wrong(model: Any, batch: Any) -> Any:
            return step(model, batch)[0], {"names": ["a", "b"]}

        with pytest.raises(OutputError, match="'names' beside the loss is a list"):
            fit(wrong, micro_batch=7)

    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_in_half_precision(self, precision: Any) -> None:
        data = classes(30)
        result = autoaccum.fit(
            mlp(), data, training_step=step, effective_batch=30, micro_batch=7, precision=precision, progress=False,
            device=DEVICE, shuffle=False,
        )  # fmt: skip
        assert result.history[0].outputs["losses"].mean().item() == pytest.approx(result.history[0].loss, rel=1e-2)
        assert len(result.history[0].outputs["losses"]) == 30


class TestMemory:
    def test_no_graph_outlives_its_micro_batch(self) -> None:
        alive: list[weakref.ref[torch.Tensor]] = []

        def keeping(model: Any, batch: Any) -> Any:
            gc.collect()
            assert [ref for ref in alive if ref() is not None] == []
            hidden = model[0](batch[0])
            alive.append(weakref.ref(hidden))
            loss = cross_entropy(model[2](model[1](hidden)), batch[1])
            return loss, {"first": hidden[:, 0], "loss": loss}

        result = fit(keeping, micro_batch=7, verify=False, epochs=2)
        assert len(alive) == 2 * 5
        assert all(ref() is None for ref in alive)
        kept = result.history[-1].outputs["first"]
        assert kept.untyped_storage().nbytes() == kept.nbytes

    def test_what_is_measured_keeps_no_outputs(self) -> None:
        """``check`` and ``probe`` run the same functions, and do not ask what stands beside the loss."""

        def odd(model: Any, batch: Any) -> Any:
            return step(model, batch)[0], {"odd": object()}

        assert autoaccum.check(mlp(torch.float64), DATA, training_step=odd).passed
        report = autoaccum.probe(
            mlp(torch.float64), DATA, training_step=odd, effective_batch=8, max_micro_batch=8, device=DEVICE
        )
        assert report.max_micro_batch == 8


class TestAccumulator:
    def test_outputs_are_tensors_on_the_device(self) -> None:
        model = mlp(torch.float64)
        _, expected = step(model, DATA)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=7)
        assert accumulator.outputs == {}
        accumulator.step(DATA)
        assert accumulator.micro_batches == (6,) * 5
        assert all(isinstance(value, torch.Tensor) for value in accumulator.outputs.values())
        assert accumulator.outputs["right"].shape == ()
        assert accumulator.outputs["right"].item() == pytest.approx(expected["right"].item(), rel=1e-12)
        assert torch.allclose(accumulator.outputs["losses"], expected["losses"], rtol=1e-12)
        accumulator.backward((INPUTS[:4], TARGETS[:4]))
        assert accumulator.outputs["losses"].shape == (4,)

    def test_of_a_closure_they_are_those_of_the_loss(self) -> None:
        model = mlp(torch.float64)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=7)
        for _ in range(2):
            loss = accumulator.step(DATA)
            assert accumulator.outputs["losses"].mean().item() == pytest.approx(loss.item(), rel=1e-12)

    def test_none_where_there_are_none(self) -> None:
        model = mlp(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: list[Any] = [step, lambda model, batch: step(model, batch)[0]]
        accumulator = autoaccum.Accumulator(
            model, optimizer, training_step=lambda model, batch: given[0](model, batch), micro_batch=7
        )
        accumulator.step(DATA)
        assert accumulator.outputs
        given.pop(0)
        accumulator.step(DATA)
        assert accumulator.outputs == {}


class TestValidation:
    def validated(self, **options: Any) -> Validated:
        (event,) = [event for event in fit(micro_batch=7, **options).events if isinstance(event, Validated)]
        return event

    def test_means_are_beside_its_loss(self) -> None:
        event = self.validated(validation_data=(INPUTS[:23], TARGETS[:23]), lr=0.0)
        _, expected = step(mlp(torch.float64), (INPUTS[:23], TARGETS[:23]))
        assert list(event.metrics) == ["right", "of two"]
        assert event.metrics["right"] == pytest.approx(expected["right"].item(), rel=1e-12)
        assert event.metrics["of two"] == pytest.approx(expected["of two"][0].item(), rel=1e-12)

    def test_a_metric_of_the_same_name_counts(self) -> None:
        metrics = {"right": lambda model, batch: torch.full((len(batch[0]),), 7.0), "other": lambda m, b: b[1]}
        event = self.validated(validation_data=DATA, metrics=metrics)
        assert list(event.metrics) == ["right", "of two", "other"]
        assert event.metrics["right"] == 7
        assert event.metrics["other"] == TARGETS.double().mean().item()

    @pytest.mark.filterwarnings("ignore:The loss is not a mean over what num_items counts")
    def test_of_what_counts_nothing_too(self) -> None:
        event = self.validated(
            validation_data=(INPUTS[:4], torch.tensor([0, 0, 0, 2])), num_items=lambda batch: int((batch[1] > 0).sum())
        )
        model = fit(micro_batch=7, num_items=lambda batch: int((batch[1] > 0).sum())).model
        _, expected = step(model, (INPUTS[:4], torch.tensor([0, 0, 0, 2])))
        assert event.metrics["right"] == pytest.approx(expected["right"].item(), rel=1e-12)

    def test_only_of_validations(self) -> None:
        def in_eval(model: Any, batch: Any) -> Any:
            loss, outputs = step(model, batch)
            return loss if model.training else (loss, outputs)

        event = self.validated(training_step=in_eval, validation_data=DATA)
        assert list(event.metrics) == ["right", "of two"]


class TestRecords:
    def test_a_run_that_goes_on_has_them_as_one_that_was_never_stopped(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        def watching(progress: Progress) -> int:
            seen.append([values(report.outputs) for report in progress.reports])
            return 10

        def stop(record: Record) -> None:
            if isinstance(record, StepReport) and record.step == 4:
                raise autoaccum.StopTraining

        def run(directory: Path, *callbacks: Any) -> autoaccum.FitResult:
            options: dict[str, Any] = {"effective_batch": watching, "micro_batch": 4, "samples": 70}
            return fit(run_dir=directory, callbacks=callbacks, shuffle=True, **options)

        whole = run(tmp_path / "whole")
        of_whole, seen[:] = seen[-1], []
        run(tmp_path / "stopped", stop)
        result = run(tmp_path / "stopped")
        assert len(result.history) == len(whole.history) == 7
        assert [values(report.outputs) for report in result.history] == [values(r.outputs) for r in whole.history]
        assert result.history[0].outputs["losses"].dtype == torch.float64
        # What a schedule looks at is the same after a resume, and so without tensors, which no checkpoint holds.
        assert seen[-1] == of_whole
        assert set(seen[-1][0]) == {"right", "of two"}

    def test_are_those_without_a_run_dir(self, tmp_path: Path) -> None:
        def odd(model: Any, batch: Any) -> Any:
            loss, _ = step(model, batch)
            rows = {"ids": batch[1].short(), "half": batch[0][:, :2].half() / 0, "flags": batch[1] > 1}
            return loss, {**rows, "nothing": (1.0, 0), "inf": math.inf}

        kept = fit(odd, micro_batch=7).history
        read = fit(odd, micro_batch=7, run_dir=tmp_path).history
        assert [repr(report.outputs) for report in read] == [repr(report.outputs) for report in kept]
        assert read[0].outputs["ids"].dtype == torch.int16
        assert math.isnan(read[0].outputs["nothing"])

    def test_reports_are_equal_by_their_outputs(self) -> None:
        first, second = (fit(micro_batch=7).history[0] for _ in range(2))
        fields = {name: getattr(first, name) for name in first.__slots__ if name != "outputs"}
        assert StepReport(**fields, outputs=second.outputs) == first
        assert hash(StepReport(**fields, outputs=second.outputs)) == hash(first)
        assert StepReport(**fields, outputs={**second.outputs, "losses": second.outputs["losses"] + 1}) != first
        assert StepReport(**fields) != first


@pytest.mark.gpu
def test_on_an_accelerator_they_are_those_of_the_cpu() -> None:
    data = classes(30)
    device = torch.accelerator.current_accelerator()
    of_both = []
    for where in ("cpu", device):
        model = mlp()
        result = autoaccum.fit(
            model, data, training_step=step, effective_batch=30, micro_batch=7, shuffle=False, progress=False,
            device=where, epochs=2, validation_data=data,
        )  # fmt: skip
        (*_, validated) = [event for event in result.events if isinstance(event, Validated)]
        assert all(report.outputs["losses"].device.type == "cpu" for report in result.history)
        assert not any(report.outputs["losses"].is_pinned() for report in result.history)
        of_both.append([values(report.outputs) for report in result.history] + [dict(validated.metrics)])
    for on_cpu, on_device in zip(*of_both, strict=True):
        assert on_cpu.keys() == on_device.keys()
        for name, value in on_cpu.items():
            assert on_device[name] == pytest.approx(value, rel=1e-4)
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=7)
    accumulator.step(data)
    assert {value.device.type for value in accumulator.outputs.values()} == {device.type}  # type: ignore[union-attr]
