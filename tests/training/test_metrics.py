"""Metrics of validations: the mean over all values, whatever the cut, from the loss's own forward, without a trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers.modeling_outputs import CausalLMOutput

import autoaccum
from autoaccum.cli.app import main
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError, EmptyDatasetError, NothingFitsError
from autoaccum.events import Notice, OutOfMemory, Started, StepReport, Validated
from autoaccum.reporting import load_run, read_records
from autoaccum.testing import simulated_memory
from autoaccum.training.metrics import SharedTree
from autoaccum.training.trainer import FitResult
from tests.devices import DEVICE, there
from tests.models import classes, mlp, noisy, same, state_of, wide

IGNORED = -100


def fit(**options: Any) -> FitResult:
    defaults: dict[str, Any] = {
        "model": mlp(),
        "data": classes(16),
        "effective_batch": 8,
        "micro_batch": 4,
        "validation_data": classes(11, seed=5),
        "device": DEVICE,
        "progress": False,
        "cache": False,
    }
    if "training_step" not in options:
        defaults["loss_fn"] = cross_entropy
    return autoaccum.fit(**{**defaults, **options})


def validated(result: FitResult) -> list[Validated]:
    return [event for event in result.events if isinstance(event, Validated)]


def last(**options: Any) -> Validated:
    return validated(fit(**options))[-1]


def correct(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(-1) == targets


def correct_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counts = targets != IGNORED
    return (outputs.argmax(-1) == targets)[counts]


def with_ignored(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of which two in three are ignored, unevenly: none of the second four counts."""
    inputs, targets = classes(num_samples, seed=3)
    targets[::3] = targets[1::3] = IGNORED
    targets[4:8] = IGNORED
    return inputs, targets


class Counting(nn.Module):
    """Knows how many samples each of its forwards in eval mode had."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.sizes: list[int] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.sizes.append(len(inputs))
        return self.net(inputs)  # type: ignore[no-any-return]


class ReturnsLoss(nn.Module):
    """As Hugging Face's do: keywords in, loss and logits out."""

    def __init__(self, wrap: Callable[..., Any] = dict) -> None:
        super().__init__()
        self.net = mlp()
        self.wrap = wrap

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.net(inputs)
        return self.wrap(loss=cross_entropy(logits, labels), logits=logits)


def of_dict(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"inputs": batch[0], "labels": batch[1]}


@pytest.mark.parametrize(
    "function",
    [
        lambda outputs, targets: correct(outputs, targets).float().mean().reshape(1),
        lambda outputs, targets: outputs.argmax(-1, keepdim=True) == targets,
    ],
)
def test_values_that_depend_on_the_micro_batches_are_refused_before_training(function: Any) -> None:
    """One sample does not show it."""
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ArgumentError, match="metrics='m': .* It returned . for 3 samples together, and 1 and . for 1 and 2"
    ):
        fit(model=model, metrics={"m": function})
    assert same(list(model.parameters()), before)


class TestValue:
    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 8])
    def test_is_that_over_all_samples_whatever_the_micro_batches_are(self, micro_batch: int) -> None:
        data = classes(11, seed=5)
        result = fit(micro_batch=micro_batch, metrics={"accuracy": correct, "again": correct})
        with torch.no_grad():
            expected = correct(result.model(there(data[0])), there(data[1])).double().mean().item()
        (event,) = validated(result)
        assert event.metrics == {"accuracy": expected, "again": expected}
        assert list(event.metrics) == ["accuracy", "again"]
        assert 0 < expected < 1

    def test_is_so_where_memory_decides_the_micro_batches(self) -> None:
        """The mean of the micro-batches' means would be another one."""
        seen: list[torch.Tensor] = []

        def watching(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen.append(correct(outputs, targets))
            return seen[-1]

        data = classes(200, seed=5)
        with simulated_memory("1MiB"):
            result = fit(
                model=wide(2000), data=classes(64), effective_batch=32, micro_batch="auto", validation_data=data,
                metrics={"accuracy": watching},
            )  # fmt: skip
        (event,) = validated(result)
        sizes = [len(values) for values in seen[3:]]  # the first three are of the try at the start
        assert sum(sizes) == 200
        assert len(set(sizes)) > 2
        with torch.no_grad():
            expected = correct(result.model(data[0]), data[1]).double().mean().item()
        assert event.metrics == {"accuracy": expected}
        of_means = np.mean([values.double().mean().item() for values in seen[3:]])
        assert abs(of_means - expected) > 0.005

    @pytest.mark.device
    @pytest.mark.parametrize("num_items", [None, lambda batch: (batch[1] != IGNORED).sum()])
    def test_is_that_over_all_tokens_that_count(self, num_items: Any) -> None:
        """Also of micro-batches without one, whose loss is not computed where num_items says so."""
        data, sizes = with_ignored(22), []

        def counting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            sizes.append(int((targets != IGNORED).sum()))
            return correct_tokens(outputs, targets)

        result = fit(
            validation_data=data,
            micro_batch=2,
            num_items=num_items,
            metrics={"accuracy": counting, "ignored": lambda outputs, targets: targets == IGNORED},
        )
        with torch.no_grad():
            expected = correct_tokens(result.model(there(data[0])), there(data[1])).double().mean().item()
        (event,) = validated(result)
        ignored = (data[1] == IGNORED).double().mean().item()
        assert event.metrics == {"accuracy": expected, "ignored": ignored}
        assert {0, 1} <= set(sizes[1:]), "they differ"

    @pytest.mark.device
    def test_of_no_value_at_all_is_nan(self) -> None:
        inputs, targets = classes(6)
        event = last(
            validation_data=(inputs, targets.fill_(IGNORED)),
            num_items=lambda batch: (batch[1] != IGNORED).sum(),
            metrics={"accuracy": correct_tokens},
        )
        assert math.isnan(event.metrics["accuracy"])

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
    def test_is_summed_in_float64(self, dtype: torch.dtype) -> None:
        """70,000 is more than float16 has, and 2**24 + 1 is no number of float32."""
        value = 1 if dtype in (torch.bool, torch.uint8) else 7
        event = last(metrics={"x": lambda outputs, targets: torch.full((len(targets), 10_000), value).to(dtype)})
        assert event.metrics == {"x": value}
        values = {"large": torch.tensor([2**24, 1], dtype=torch.float32), "thirds": torch.tensor([1, 0, 0])}
        event = last(
            metrics={
                name: lambda _, targets, found=found: found.repeat(len(targets), 1) for name, found in values.items()
            }
        )
        assert event.metrics == {"large": (2**24 + 1) / 2, "thirds": 1 / 3}

    @pytest.mark.parametrize("wrap", [dict, SimpleNamespace, CausalLMOutput])
    def test_of_a_model_that_returns_its_loss(self, wrap: Any) -> None:
        data, graphs = of_dict(with_ignored(22)), []

        def accuracy(outputs: Any, batch: Any) -> torch.Tensor:
            assert type(outputs) is wrap
            logits = outputs["logits"] if wrap is dict else outputs.logits
            graphs.append(logits.requires_grad)
            return correct_tokens(logits, batch["labels"])

        result = fit(
            model=ReturnsLoss(wrap), data=of_dict(classes(16)), loss_fn=None, validation_data=data,
            metrics={"accuracy": accuracy},
        )  # fmt: skip
        with torch.no_grad():
            expected = correct_tokens(result.model.net(data["inputs"]), data["labels"])  # type: ignore[operator]
        assert validated(result)[0].metrics == {"accuracy": expected.double().mean().item()}
        assert not any(graphs)

    def test_beside_a_training_step_it_is_called_with_model_and_batch(self) -> None:
        data, modes = of_dict(classes(11, seed=5)), set()

        def step(model: Any, batch: Any) -> torch.Tensor:
            labels = batch.pop("labels")
            return cross_entropy(model(batch["inputs"].mul_(1)), labels)

        def accuracy(model: Any, batch: Any) -> torch.Tensor:
            modes.add((model.training, torch.is_grad_enabled()))
            return model(batch["inputs"]).argmax(1) == batch.pop("labels")  # type: ignore[no-any-return]

        result = fit(
            training_step=step, data=of_dict(classes(16)), validation_data=data,
            metrics={"accuracy": accuracy, "again": accuracy},
        )  # fmt: skip
        with torch.no_grad():
            expected = correct(result.model(data["inputs"]), data["labels"]).double().mean().item()
        assert validated(result)[0].metrics == {"accuracy": expected, "again": expected}
        assert modes == {(False, False)}

    def test_gets_what_the_loss_gets_under_autocast(self) -> None:
        seen: dict[str, set[torch.dtype]] = {"loss": set(), "metric": set()}

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen["loss"].add(outputs.dtype)
            return cross_entropy(outputs, targets)

        def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            seen["metric"].add(outputs.dtype)
            seen["metric"].add((outputs @ outputs.float().T).dtype)
            return correct(outputs, targets)

        fit(loss_fn=loss, metrics={"accuracy": metric}, precision="bf16")
        assert seen["metric"] == seen["loss"] == {torch.bfloat16}

    def test_a_module_is_one_on_the_device_and_in_eval_mode(self) -> None:
        class Distance(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.drop = nn.Dropout(0.5)
                self.devices: list[Any] = []

            def to(self, device: Any) -> Any:
                self.devices.append(device)
                return super().to(device)

            def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return self.drop(torch.ones(len(targets)))  # type: ignore[no-any-return]

        distance = Distance()
        assert last(metrics={"distance": distance}).metrics == {"distance": 1.0}
        assert distance.drop.training
        assert distance.devices == [torch.device(DEVICE)]


class TestForward:
    @pytest.mark.parametrize("num_items", [None, lambda batch: len(batch[1])])
    def test_is_that_of_the_loss(self, num_items: Any) -> None:
        sizes = []
        for metrics in (None, {"accuracy": correct, "again": correct}):
            model = Counting()
            fit(model=model, metrics=metrics, num_items=num_items)
            sizes.append(model.sizes)
        assert sizes[0] == sizes[1] == [1, 2, 4, 4]

    def test_is_that_of_the_way_that_succeeded(self) -> None:
        """A loss that cannot be run with a graph fails for each way in turn; each sample counts once."""
        data = classes(11, seed=5)

        def by_numpy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if not model.training and outputs.requires_grad:
                raise RuntimeError("no graph, please")
            return cross_entropy(outputs, targets)

        model, calls = Counting(), []

        def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls.append(len(targets))
            assert not outputs.requires_grad
            return correct(outputs, targets)

        result = fit(model=model, loss_fn=by_numpy, metrics={"accuracy": metric})
        assert model.sizes == [1] * 3 + [1, 2, 4, 4], "three ways that fail, and the last one"
        assert calls == [3, 1, 2, 1, 2, 4, 4], "the first three are of the try at the start"
        assert sum(isinstance(event, Notice) for event in result.events) == 1
        with torch.no_grad():
            expected = correct(result.model(data[0]), data[1]).double().mean().item()
        assert validated(result)[0].metrics == {"accuracy": expected}

    @pytest.mark.parametrize("num_items", [None, lambda batch: len(batch[1])])
    def test_is_another_one_where_outputs_or_targets_were_written_to(self, num_items: Any) -> None:
        """By the loss, or by the metric before."""
        data = with_ignored(22)

        def writing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = cross_entropy(outputs.clone(), targets)
            outputs.neg_()
            return loss

        def careless(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            targets[targets == IGNORED] = 0
            return correct(outputs, targets)

        result = fit(
            validation_data=data, loss_fn=writing, num_items=num_items,
            metrics={"careless": careless, "accuracy": correct_tokens},
        )  # fmt: skip
        with torch.no_grad():
            outputs = result.model(data[0])
            expected = [careless(outputs, data[1].clone()), correct_tokens(outputs, data[1])]
        means = [values.double().mean().item() for values in expected]
        assert list(validated(result)[0].metrics.values()) == means
        assert means[0] != means[1]


class TestMemory:
    def test_an_error_in_a_function_makes_the_micro_batch_smaller_and_counts_nothing_twice(self) -> None:
        calls: list[tuple[str, int]] = []

        def first(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls.append(("first", len(targets)))
            return correct(outputs, targets)

        def second(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls.append(("second", len(targets)))
            if len(targets) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return correct(outputs, targets)

        data = classes(11, seed=5)
        result = fit(metrics={"first": first, "second": second})
        failed = [event for event in result.events if isinstance(event, OutOfMemory)]
        assert [(event.phase, event.micro_batch) for event in failed] == [("validation", 4), ("validation", 3)]
        assert ("first", 4) in calls
        with torch.no_grad():
            outputs = result.model(data[0])
        expected = correct(outputs, data[1]).double().mean().item()
        (event,) = validated(result)
        assert event.metrics == {"first": expected, "second": expected}
        assert event.loss == pytest.approx(cross_entropy(outputs, data[1]).item(), rel=1e-6)
        assert (event.num_samples, event.micro_batch) == (11, 2)

    def test_of_one_sample_too_many(self) -> None:
        def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with pytest.raises(NothingFitsError, match="validation: a micro-batch of 1"):
            fit(metrics={"x": metric}, patience=0)

    def test_what_they_need_is_in_what_is_learnt(self) -> None:
        """Values of 30,000 bytes a sample, beside outputs of twelve."""
        sizes = []
        for metrics in (None, {"x": lambda outputs, targets: torch.ones(len(targets), 7500)}):
            with simulated_memory("512KiB"):
                event = last(
                    data=classes(64), effective_batch=64, micro_batch=64, validation_data=classes(64, seed=5),
                    metrics=metrics,
                )  # fmt: skip
            sizes.append(event.micro_batch)
        assert sizes[0] >= 32
        assert 8 <= sizes[1] <= 17, "of 512 KiB"

    def test_outputs_are_let_go_before_a_smaller_micro_batch_is_tried(self) -> None:
        kept = SharedTree((torch.zeros(2), {"x": [torch.zeros(3)]}))
        assert kept.is_intact
        kept.tree()[1].clear()
        assert kept.tree()[1]["x"][0].shape == (3,)
        kept.tree()[1]["x"][0].add_(1)
        assert not kept.is_intact

        model: Any = mlp()
        held: list[int] = []

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if not model.training and len(targets) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return cross_entropy(outputs, targets)

        def hear(event: Any) -> None:
            if isinstance(event, OutOfMemory):
                held.append(trainer._validator._metrics.model._kept is not None)  # type: ignore[union-attr]

        trainer = autoaccum.Trainer(
            model, classes(8), effective_batch=8, micro_batch=4, loss_fn=loss, validation_data=classes(9),
            metrics={"accuracy": correct}, callbacks=[hear], device=DEVICE, progress=False, cache=False,
        )  # fmt: skip
        trainer.fit()
        assert held == [False, False]


@pytest.mark.device
class TestNoTrace:
    @pytest.mark.parametrize("by_step", [False, True])
    def test_training_is_the_same_bit_for_bit(self, by_step: bool) -> None:
        """Although the functions draw, and so does the model, which counts its forwards too."""

        class Drawing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = noisy()
                self.calls = 0
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if self.training or self.calls == 0:
                    self.calls += 1
                    self.seen += 1
                return self.net(inputs + 0.01 * self.calls * torch.rand(()))  # type: ignore[no-any-return]

        def metric(first: Any, second: Any) -> torch.Tensor:
            torch.rand(3), random.random(), np.random.rand()
            targets = second[1] if by_step else second
            return correct(first(second[0]) if by_step else first, targets)

        def step(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]), batch[1])

        options: dict[str, Any] = {"training_step": step} if by_step else {}
        results = [
            fit(model=Drawing(), data=classes(20), micro_batch=8, epochs=3, metrics=metrics, **options)
            for metrics in (None, {"accuracy": metric})
        ]
        assert same(state_of(results[0]), state_of(results[1]))
        assert [result.model.calls for result in results] == [results[0].model.calls] * 2
        assert [event.loss for event in validated(results[0])] == [event.loss for event in validated(results[1])]
        assert len(validated(results[1])) == 3

    def test_modes_and_random_states_are_as_they_were_after_the_try(self) -> None:
        model = noisy()
        model[1].eval()
        modes = [module.training for module in model.modules()]

        def fails(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            random.random()
            raise KeyError

        random.seed(0)
        with pytest.raises(KeyError):
            fit(model=model, seed=3, metrics={"x": fails})
        assert [module.training for module in model.modules()] == modes
        drawn = random.random()
        random.seed(3)
        assert drawn == random.random()


class TestErrors:
    @pytest.mark.parametrize(
        ("returned", "found"),
        [
            (lambda outputs, targets: correct(outputs, targets).float().mean(), "a float32 tensor of shape ()"),
            (lambda outputs, targets: 0.5, "a float"),
            (lambda outputs, targets: None, "nothing"),
            (lambda outputs, targets: [0.5, 1.0], "a list"),
            (lambda outputs, targets: outputs.to(torch.complex64), "a complex64 tensor of shape (3, 3)"),
        ],
    )
    def test_what_is_no_tensor_of_values_is_said_before_training(self, returned: Any, found: str) -> None:
        records: list[Any] = []
        with pytest.raises(ArgumentError) as caught:
            fit(metrics={"accuracy": correct, "mean": returned}, callbacks=[records.append])
        assert (caught.value.argument, caught.value.value) == ("metrics", "mean")
        assert "metrics='mean': expected a function that returns a tensor with one real value" in str(caught.value)
        assert f"It returned {found}. Return the values, not their mean" in str(caught.value)
        assert records == []

    def test_a_stream_is_tried_too(self) -> None:
        inputs, targets = classes(9)

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return zip(inputs, targets, strict=True)

        with pytest.raises(ZeroDivisionError):
            autoaccum.Trainer(
                mlp(), classes(8), effective_batch=8, loss_fn=cross_entropy, validation_data=Stream(), device=DEVICE,
                metrics={"x": lambda outputs, targets: 1 / 0}, progress=False,
            )  # fmt: skip
        assert last(validation_data=Stream(), metrics={"x": correct}).num_samples == 9

    def test_a_stream_without_samples(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(())

        with pytest.raises(EmptyDatasetError, match="validation_data holds no sample"):
            fit(validation_data=Stream(), metrics={"x": correct})

    def test_what_the_try_cannot_tell_is_said_by_the_validation(self) -> None:
        def mean_of_several(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            values = correct(outputs, targets).float()
            return values if len(values) == 1 else values.mean()

        with pytest.raises(ArgumentError, match="metrics='x'"):
            fit(metrics={"x": mean_of_several})

    def test_validation_data_that_the_loss_cannot_take(self) -> None:
        with pytest.raises(DataError, match="with loss_fn, batches are"):
            fit(metrics={"accuracy": correct}, validation_data=of_dict(classes(4)))

    @pytest.mark.parametrize(
        ("metrics", "kind", "said"),
        [
            ([correct], ArgumentTypeError, "expected names and functions"),
            (correct, ArgumentTypeError, "expected names and functions"),
            ({1: correct}, ArgumentTypeError, "metrics=1: expected names that are texts"),
            ({"top 5": correct}, ArgumentError, "metrics='top 5': expected names of letters, digits and underscores"),
            ({"": correct}, ArgumentError, "metrics='': expected names of letters"),
            ({"loss": correct}, ArgumentError, "metrics='loss': expected other names than loss, validation_loss"),
            ({"validation_loss": correct}, ArgumentError, "metrics='validation_loss': expected other names"),
            ({"accuracy": 0.5}, ArgumentTypeError, "metrics={'accuracy': 0.5}: expected a function for each name"),
            ({"accuracy": nn.Identity}, ArgumentTypeError, r"It is the class: make one, Identity\(\.\.\.\)"),
        ],
    )
    def test_arguments_that_are_none(self, metrics: Any, kind: type[ArgumentError], said: str) -> None:
        with pytest.raises(kind, match=said) as caught:
            fit(metrics=metrics)
        assert caught.value.argument == "metrics"

    def test_without_validation_data(self) -> None:
        with pytest.raises(ArgumentError, match="metrics='accuracy, x': expected validation_data beside them"):
            fit(metrics={"accuracy": correct, "x": correct}, validation_data=None)
        assert validated(fit(metrics={}, validation_data=None)) == []


class TestRecords:
    def test_come_back_as_they_were(self, tmp_path: Path) -> None:
        empty: Any = {"accuracy": correct, "nothing": lambda outputs, targets: correct(outputs, targets)[:0]}
        result = fit(metrics=empty, epochs=2, run_dir=tmp_path)
        read = [event for event in read_records(tmp_path / "history.jsonl") if isinstance(event, Validated)]
        assert [repr(event) for event in read] == [repr(event) for event in validated(result)]
        assert math.isnan(read[1].metrics["nothing"])
        column = load_run(tmp_path).events["Validated"]["metrics"]
        assert [metrics["accuracy"] for metrics in column] == [event.metrics["accuracy"] for event in read]
        assert json.loads((tmp_path / "config.json").read_text())["metrics"] == "accuracy, nothing"

    def test_a_run_goes_on_with_other_metrics_or_none(self, tmp_path: Path) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, autoaccum.StepReport):
                raise autoaccum.StopTraining

        whole = fit(epochs=3)
        for metrics in (None, {"accuracy": correct}, {"x": correct, "accuracy": correct}, None, {"x": correct}):
            fit(epochs=3, run_dir=tmp_path, metrics=metrics, callbacks=[stop])
        result = fit(epochs=3, run_dir=tmp_path, metrics={"accuracy": correct})
        assert sum(isinstance(event, Started) for event in result.events) == 6
        assert result.num_steps == 6
        assert same(state_of(result), state_of(whole))
        assert list(validated(result)[-1].metrics) == ["accuracy"]

    def test_a_run_that_was_stopped_reports_those_of_one_that_was_not(self, tmp_path: Path) -> None:
        def stop(record: Any) -> None:
            if isinstance(record, autoaccum.StepReport):
                raise autoaccum.StopTraining

        def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.norm(dim=1)

        options: dict[str, Any] = {"epochs": 3, "metrics": {"distance": distance}, "validate_every": 8}
        whole = validated(fit(**options))
        for _ in range(7):
            result = fit(**options, run_dir=tmp_path, callbacks=[stop])
        assert [(event.step, event.metrics) for event in validated(result)] == [(e.step, e.metrics) for e in whole]
        assert len(whole) == 6

    def test_a_recipe_may_return_them(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "recipe.py").write_text(
            "import torch\n"
            "from torch import nn\n\n\n"
            "def recipe():\n"
            "    data = torch.randn(8, 4), torch.randn(8, 1)\n"
            "    near = lambda outputs, targets: (outputs - targets).abs().flatten() < 1e9\n"
            "    return {'model': nn.Linear(4, 1), 'data': data, 'loss_fn': nn.functional.mse_loss,\n"
            "            'validation_data': data, 'metrics': {'near': near}}\n"
        )
        arguments = [str(tmp_path / "recipe.py"), "--effective-batch", "8", "--device", DEVICE]
        assert main(["fit", *arguments, "--no-progress", "--json"]) == 0
        events = json.loads(capsys.readouterr().out)["events"]
        assert [event["metrics"] for event in events if event["type"] == "Validated"] == [{"near": 1.0}]
        assert main(["fit", *arguments]) == 0
        assert "epoch 0: validation loss" in (shown := capsys.readouterr().err)
        assert shown.count(", near 1\n") == 2, "after the epoch, and in the summary"
        assert main(["probe", *arguments, "--json"]) == 0


def tokens(*lengths: int) -> list[Any]:
    return [(ids := torch.arange(length) % 8 + 1, ids) for length in lengths]


class Tagger(nn.Module):
    """Sees no padding beside a token: each output comes from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(ids)).transpose(1, 2)


def all_right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


def equal_only(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([ids for ids, _ in items]), torch.stack([targets for _, targets in items])


def test_samples_that_never_meet_are_not_tried_together() -> None:
    """A collate_fn that cannot pad is given one sample at a time."""
    samples = tokens(4, 3, 7, 2)
    autoaccum.evaluate(
        Tagger(), samples, loss_fn=cross_entropy, collate_fn=equal_only, max_micro_batch=1, metrics={"right": all_right}
    )  # fmt: skip


def test_what_a_metric_is_called_with_is_said_where_it_takes_that_for_outputs() -> None:
    with pytest.raises(AttributeError, match="argmax") as raised:
        autoaccum.fit(
            mlp(), classes(8), effective_batch=4, device="cpu", progress=False, validation_data=classes(8),
            training_step=lambda model, batch: cross_entropy(model(batch[0]), batch[1]), metrics={"right": all_right},
        )  # fmt: skip
    assert raised.value.__notes__ == [
        "It was raised by metrics['right'].",
        "Beside a training_step a metric is called with (model, batch).",
    ]


def test_what_is_broadcast_by_chance_for_one_sample_and_for_two_is_said_before_training_with_its_name() -> None:
    steps: list[int] = []
    with pytest.raises(RuntimeError, match="size of tensor") as raised:
        fit(
            metrics={"right": correct, "near": lambda outputs, targets: outputs[:, :2] == targets},
            callbacks=[lambda event: steps.append(1) if isinstance(event, StepReport) else None],
        )  # fmt: skip
    assert steps == []
    assert raised.value.__notes__[0] == "It was raised by metrics['near']."
