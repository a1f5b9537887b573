"""Validation: the items' mean over the held-out data, each sample once, whatever fits, and no trace on training."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import autoaccum
from autoaccum.data import randomness
from autoaccum.data.sources import open_source
from autoaccum.errors import DataError, NothingFitsError
from autoaccum.events import Event, Notice, OutOfMemory, Resumed, Validated
from autoaccum.memory.devices import memory_of
from autoaccum.memory.limit import Limit
from autoaccum.planning.limits import Limits
from autoaccum.step.job import autocast
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.snapshot import Snapshot
from autoaccum.testing import simulated_memory
from autoaccum.training.hooks import Ready
from autoaccum.training.validation import Validator
from tests.devices import DEVICE, there
from tests.models import classes, mlp, noisy, same, state_of, wide
from tests.step.making import Within

HERE = torch.device(DEVICE)
IGNORED = -100


def validator(model: nn.Module, data: Any, **options: Any) -> tuple[Validator, list[Event]]:
    """And the list that its events go to."""
    events: list[Event] = []
    arguments: dict[str, Any] = {
        "loss_of": loss_function(cross_entropy, None),
        "of_outputs": "loss_of" not in options,
        "num_items": None,
        "autocast": nullcontext,
        "device": HERE,
        "memory": memory_of(HERE),
        "patience": 0.0,
        "snapshot": Snapshot([model], HERE),
        "emit": events.append,
    }
    limits = Limits(options.pop("limit_bytes", 2**60), headroom=0.0)
    limits.target_bytes = options.pop("target_bytes", 2**60)
    source = open_source(data, seed=0, shuffle=False, device=HERE)
    given = {**arguments, **options}
    # A limit below the device's own, so that nobody but us keeps it.
    given.setdefault("limit", Limit(Within(given["memory"], 2**60 + 1), limits.limit_bytes))
    model.to(HERE)
    return Validator(model, [model], source, limits=limits, **given), events


def validated(model: nn.Module, data: Any, micro_batch: int = 4, **options: Any) -> Validated:
    """The report of one pass that meets no error."""
    run, events = validator(model, data, **options)
    run.run(7, 3, micro_batch)
    (report,) = events
    assert isinstance(report, Validated)
    return report


def with_ignored(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes of which two in three are ignored, unevenly: none of the second four counts."""
    inputs, targets = classes(num_samples, torch.float64, seed=3)
    targets[::3] = targets[1::3] = IGNORED
    targets[4:8] = IGNORED
    return inputs, targets


def count(batch: Any) -> torch.Tensor:
    return (batch[1] != IGNORED).sum()


class Watching(nn.Module):
    """Knows what it was called with, and in which state; runs out of memory when told to."""

    def __init__(self, fits: Callable[[int], bool] = lambda size: True) -> None:
        super().__init__()
        self.net = mlp()
        self.fits = fits
        self.sizes: list[int] = []
        self.seen: list[float] = []
        self.modes: set[tuple[bool, bool]] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.fits(len(inputs)):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes.append(len(inputs))
        self.seen += inputs[:, 0].tolist()
        self.modes |= {(module.training, torch.is_grad_enabled()) for module in self.modules()}
        return self.net(inputs)  # type: ignore[no-any-return]


class TestLoss:
    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("micro_batch", [1, 3, 4, 11, 50])
    def test_is_the_mean_over_all_samples(self, micro_batch: int) -> None:
        model, data = there((mlp(torch.float64), classes(11, torch.float64)))
        report = validated(model, data, micro_batch)
        assert report.loss == pytest.approx(cross_entropy(model(data[0]), data[1]).item(), rel=1e-12)
        assert (report.step, report.epoch, report.num_samples) == (7, 3, 11)
        assert report.micro_batch == min(micro_batch, 4)  # it has grown 1, 2, 4 when the samples end

    @pytest.mark.device(every=2)
    @pytest.mark.parametrize("micro_batch", [1, 3, 4, 5, 22])
    def test_is_the_mean_over_all_items_where_they_are_counted(self, micro_batch: int) -> None:
        model, data = there((mlp(torch.float64), with_ignored(22)))
        report = validated(model, data, micro_batch, num_items=count)
        expected = cross_entropy(model(data[0]), data[1]).item()
        assert report.loss == pytest.approx(expected, rel=1e-12)
        assert report.num_samples == 22

    @pytest.mark.device
    @pytest.mark.parametrize("of_outputs", [True, False])
    def test_items_are_read_off_the_loss(self, of_outputs: bool) -> None:
        model, data = there((mlp(torch.float64), with_ignored(22)))
        expected = cross_entropy(model(data[0]), data[1]).item()
        assert validated(model, data, 4, of_outputs=of_outputs).loss == pytest.approx(expected, rel=1e-12)
        by_samples = validated(model, data, 4, num_items=lambda batch: len(batch[0]) * (count(batch) > 0)).loss
        assert by_samples != pytest.approx(expected, rel=1e-3)

    @pytest.mark.device
    @pytest.mark.parametrize("of_outputs", [True, False])
    def test_of_a_sum_is_the_sum(self, of_outputs: bool) -> None:
        model, data = there((mlp(torch.float64), classes(11, torch.float64)))
        summed = loss_function(nn.CrossEntropyLoss(reduction="sum"), None)
        expected = cross_entropy(model(data[0]), data[1], reduction="sum").item()
        found = validated(model, data, 4, loss_of=summed, of_outputs=of_outputs).loss
        assert found == pytest.approx(expected, rel=1e-12)

    @pytest.mark.device
    def test_a_metric_without_a_gradient_is_averaged_over_samples(self) -> None:
        model, (inputs, targets) = there((mlp(torch.float64), classes(11, torch.float64)))
        accuracy = loss_function(None, lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).double().mean())
        expected = (model(inputs).argmax(1) == targets).double().mean().item()
        found = validated(model, (inputs, targets), 4, loss_of=accuracy, of_outputs=False).loss
        assert found == pytest.approx(expected, rel=1e-12)

    @pytest.mark.device
    def test_a_loss_that_writes_to_its_outputs_is_read_all_the_same(self) -> None:
        model, data = there((mlp(torch.float64), with_ignored(22)))

        def in_place(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs.clamp_(-0.1, 0.1), targets)

        expected = in_place(model(data[0]), data[1]).item()
        found = validated(model, data, 4, loss_of=loss_function(in_place, None), of_outputs=True).loss
        assert found == pytest.approx(expected, rel=1e-12)

    @pytest.mark.device
    def test_a_loss_that_asks_for_gradients_itself_is_read_all_the_same(self) -> None:
        model, (inputs, targets) = there((mlp(torch.float64), classes(11, torch.float64)))

        def forces(model: Any, batch: Any) -> torch.Tensor:
            x = batch[0].requires_grad_()
            (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            return force.square().mean()

        expected = forces(model, (inputs.clone(), targets)).item()
        found = validated(model, (inputs, targets), 4, loss_of=loss_function(None, forces), of_outputs=False).loss
        assert found == pytest.approx(expected, rel=1e-12)

    def test_what_cannot_be_run_with_a_graph_is_averaged_over_samples_and_said(self) -> None:
        model, (inputs, targets) = there((mlp(torch.float64), classes(11, torch.float64)))

        def by_numpy(model: Any, batch: Any) -> torch.Tensor:
            return torch.from_numpy(
                (model(batch[0]).argmax(1).numpy() == batch[1].numpy()).astype("float64")
            ).mean() + (0 * model(batch[0]).sum() if np.isfinite(model(batch[0]).numpy()).all() else 0)

        run, events = validator(model, (inputs, targets), loss_of=loss_function(None, by_numpy), of_outputs=False)
        run.run(1, 0, 4)
        assert [type(event) for event in events] == [Notice, Validated]
        expected = (model(inputs).argmax(1) == targets).double().mean().item()
        assert events[-1].loss == pytest.approx(expected, rel=1e-12)  # type: ignore[union-attr]

    def test_keeps_no_activations_although_it_reads_the_graph(self) -> None:
        """Of a model that is called for its loss, the peak is that without gradients."""
        model, data = wide(5000), classes(64)

        def step(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]).relu().exp().log(), batch[1])

        peaks = []
        for num_items in (None, lambda batch: len(batch[0])):
            with simulated_memory("1GiB") as memory:
                run, _ = validator(
                    model,
                    data,
                    loss_of=loss_function(None, step),
                    of_outputs=False,
                    num_items=num_items,
                    memory=memory_of(HERE),
                )
                run.run(1, 0, 64)
            peaks.append(memory.peak)
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)

    @pytest.mark.device
    def test_of_no_item_at_all_is_nan(self) -> None:
        inputs, targets = classes(6)
        report = validated(Watching(), (inputs, targets.fill_(IGNORED)), num_items=count)
        assert np.isnan(report.loss)
        assert report.num_samples == 6

    def test_is_computed_in_the_precision_of_training(self) -> None:
        seen: set[torch.dtype] = set()

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            outputs = model(batch[0])
            seen.add(outputs.dtype)
            return cross_entropy(outputs.float(), batch[1])

        validated(mlp(), classes(5), loss_of=loss_of, autocast=autocast("bf16", HERE))
        assert seen == {torch.bfloat16}


@pytest.mark.device
@pytest.mark.device
def test_where_whole_windows_are_asked_for_it_begins_with_as_many() -> None:
    """As for a loss that compares samples: of one alone a correlation is no number, and of two it is 1."""

    def correlation(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found, wanted = outputs[:, 0] - outputs[:, 0].mean(), targets.double() - targets.double().mean()
        return 1 - (found * wanted).sum() / (found.norm() * wanted.norm())

    model, data = there((mlp(torch.float64), classes(20, torch.float64)))
    result = autoaccum.fit(
        model, data, effective_batch=20, micro_batch=20, loss_fn=correlation, validation_data=data, device=DEVICE,
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        whole = correlation(model(data[0]), data[1]).item()
    (report,) = [event for event in result.events if isinstance(event, Validated)]
    assert report.loss == pytest.approx(whole, rel=1e-12)


class TestData:
    def test_in_its_own_order_each_sample_once(self) -> None:
        model, data = Watching(), classes(11)
        validated(model, data, 4)
        assert model.sizes == [1, 2, 4, 4]
        assert model.seen == data[0][:, 0].tolist()

    def test_a_stream_of_batches(self) -> None:
        model, (inputs, targets) = Watching(), classes(17)
        stream = [(inputs[start : start + 7], targets[start : start + 7]) for start in (0, 7, 14)]
        report = validated(model, stream, 5)
        assert report.num_samples == 17
        assert model.sizes == [1, 2, 4, 5, 5]
        assert model.seen == inputs[:, 0].tolist()
        assert report.loss == pytest.approx(cross_entropy(model.net(there(inputs)), there(targets)).item(), rel=1e-6)

    def test_a_stream_of_samples_through_fit(self) -> None:
        inputs, targets = classes(17, seed=3)

        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Iterator[Any]:
                return zip(inputs, targets, strict=True)

        model = mlp()
        result = autoaccum.fit(
            model,
            classes(20),
            effective_batch=8,
            loss_fn=cross_entropy,
            epochs=2,
            validation_data=Stream(),
            device=DEVICE,
            progress=False,
        )
        reports = [event for event in result.events if isinstance(event, Validated)]
        assert [(report.epoch, report.num_samples) for report in reports] == [(0, 17), (1, 17)]
        with torch.no_grad():
            assert reports[1].loss == pytest.approx(
                cross_entropy(model(there(inputs)), there(targets)).item(), rel=1e-6
            )


class TestMemory:
    @pytest.mark.device
    @pytest.mark.parametrize("streamed", [False, True])
    def test_shrinks_within_the_pass_and_sees_each_sample_once(self, streamed: bool) -> None:
        model, data = Watching(lambda size: size <= 3), classes(17)
        run, events = validator(model, [data] if streamed else data)
        run.run(7, 0, 16)
        assert model.seen == data[0][:, 0].tolist()
        assert [event for event in events if isinstance(event, OutOfMemory)] == [
            OutOfMemory(step=7, phase="validation", micro_batch=4)
        ]
        assert isinstance(events[-1], Validated)
        assert events[-1].micro_batch == 3
        assert events[-1].loss == pytest.approx(
            cross_entropy(model.net(there(data[0])), there(data[1])).item(), rel=1e-6
        )

    def test_keeps_its_own_size_for_later_passes(self) -> None:
        model = Watching(lambda size: size <= 3)
        run, events = validator(model, classes(18))
        run.run(1, 0, 4)
        del model.sizes[:]
        run.run(2, 1, 4)
        assert [type(event) for event in events] == [OutOfMemory, Validated, Validated]
        assert model.sizes == [3] * 6

    def test_one_sample_too_many(self) -> None:
        run, events = validator(Watching(lambda size: False), classes(6))
        with pytest.raises(NothingFitsError, match="validation: a micro-batch of 1") as caught:
            run.run(1, 0, 2)
        assert (caught.value.micro_batch, caught.value.limit_bytes) == (1, 2**60)
        assert [event.micro_batch for event in events if isinstance(event, OutOfMemory)] == [1, 1, 1]
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert caught.value.__cause__.__traceback__ is None

    def test_keeps_a_limit_that_nobody_else_keeps(self) -> None:
        """Samples 30 times as large as training's: the pass begins small, and no size is kept that passes the target."""
        data = torch.randn(60, 30, 8), torch.randint(0, 3, (60, 30))
        model = nn.Sequential(nn.Linear(8, 500), nn.Tanh(), nn.Linear(500, 3))

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

        with simulated_memory("1GiB") as device:
            options = {"memory": memory_of(HERE), "limit_bytes": 2**20, "target_bytes": 950_000}
            run, events = validator(model, data, loss_of=loss_of, **options)
            run.run(1, 0, 64)
            assert device.peak <= 2**20
        assert isinstance(events[-1], Validated)
        assert events[-1].num_samples == 60
        assert 1 < events[-1].micro_batch < 10

    @pytest.mark.parametrize(("over", "is_refused"), [(1.04, False), (1.06, True)])
    def test_what_a_heap_is_over_a_limit_ends_no_run(self, over: float, is_refused: bool) -> None:
        """A sample ran, and there is nothing smaller: an epoch is not lost for a hundredth of the limit."""

        def run(limit_bytes: int) -> tuple[int, list[Any]]:
            with simulated_memory("1GiB") as device:
                options = {"memory": memory_of(HERE), "limit_bytes": limit_bytes, "target_bytes": limit_bytes}
                made, events = validator(nn.Linear(8, 3), classes(4), **options)
                made.set_fewest(4)
                made.run(1, 0, 4)
                return device.peak, events

        peak, _ = run(2**30)
        if is_refused:
            with pytest.raises(NothingFitsError, match="validation"):
                run(int(peak / over))
        else:
            _, events = run(int(peak / over))
            assert [type(event) for event in events] == [Validated]

    def test_a_size_that_passed_the_limit_is_given_up(self) -> None:
        """It had been fine until the samples became larger."""

        class Grows(Watching):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if len(self.seen) >= 20 and len(inputs) > 2:
                    torch.zeros(3 << 20)  # 12 MiB
                return super().forward(inputs)

        model = Grows()
        with simulated_memory("1GiB"):
            options = {"memory": memory_of(HERE), "limit_bytes": 8 * 2**20, "target_bytes": 7 * 2**20}
            run, events = validator(model, classes(60), **options)
            run.run(1, 0, 4)
        assert model.sizes[:4] == [1, 2, 4, 4]
        assert max(model.sizes[-8:]) == 2
        assert len(model.seen) == 60
        assert [type(event) for event in events] == [Validated]

    def test_a_loss_that_is_a_module_is_evaluated_too(self) -> None:
        modes = []

        class Loss(nn.Module):
            def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                modes.append(self.training)
                return cross_entropy(outputs, targets)

        loss = Loss()
        autoaccum.fit(
            mlp(),
            classes(4),
            effective_batch=4,
            micro_batch=4,
            loss_fn=loss,
            validation_data=classes(1),
            device=DEVICE,
            progress=False,
        )
        assert modes == [True, False]
        assert loss.training


class TestNoTrace:
    def test_evaluates_without_gradients(self) -> None:
        model = Watching()
        validated(model, classes(5))
        assert model.modes == {(False, False)}
        assert all(p.grad is None for p in model.parameters())
        assert torch.is_grad_enabled()

    @pytest.mark.parametrize("fails", [False, True])
    def test_every_module_gets_its_own_mode_back(self, fails: bool) -> None:
        model = noisy()
        model[1].eval()
        model[5].eval()
        modes = [module.training for module in model.modules()]

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            if fails:
                raise KeyError
            return cross_entropy(model(batch[0]), batch[1])

        run, _ = validator(model, classes(5), loss_of=loss_of)
        with pytest.raises(KeyError) if fails else nullcontext():
            run.run(1, 0, 4)
        assert [module.training for module in model.modules()] == modes
        assert modes.count(False) == 2

    @pytest.mark.device
    def test_batch_norm_learns_nothing_from_it(self) -> None:
        model = noisy()
        before = [buffer.clone() for buffer in model.buffers()]
        validated(model, classes(9))
        assert same(list(model.buffers()), before)

    @pytest.mark.device
    @pytest.mark.parametrize("fails", [False, True])
    def test_random_states_are_put_back(self, fails: bool) -> None:
        def draws() -> list[float]:
            return [torch.rand(()).item(), random.random(), float(np.random.rand())]

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            draws()
            if fails:
                raise KeyError
            return cross_entropy(model(batch[0]), batch[1])

        run, _ = validator(mlp(), classes(5), loss_of=loss_of)
        randomness.seed_host(5)
        expected = draws()
        randomness.seed_host(5)
        with pytest.raises(KeyError) if fails else nullcontext():
            run.run(1, 0, 4)
        assert draws() == expected

    @pytest.mark.device
    def test_training_goes_on_as_if_nothing_had_been(self) -> None:
        """Also when the validation draws random numbers and runs out of memory."""

        class Drawing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = noisy()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                torch.rand(3), random.random(), np.random.rand()
                if not self.training and len(inputs) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return self.net(inputs + random.random())  # type: ignore[no-any-return]

        results = [
            autoaccum.fit(
                Drawing(),
                classes(20),
                effective_batch=8,
                micro_batch=8,
                epochs=3,
                loss_fn=cross_entropy,
                validation_data=validation_data,
                device=DEVICE,
                progress=False,
            )
            for validation_data in (None, classes(11))
        ]
        assert same(state_of(results[0]), state_of(results[1]))
        assert sum(isinstance(event, Validated) for event in results[1].events) == 3


class Writing(nn.Module):
    """Returns its outputs in memory that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("first", torch.zeros(()))
        self.register_buffer("second", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.net(inputs)
        found = {"a": (self.first, outputs.pow(2).mean()), "b": (self.second, outputs.abs().mean())}
        return {name: place.detach().copy_(value) for name, (place, value) in found.items()}


def of_all(result: autoaccum.FitResult) -> list[float]:
    return [event.loss for event in result.events if isinstance(event, Validated)]


@pytest.mark.device
def test_losses_by_name_may_lie_in_memory_that_is_written_again() -> None:
    model, (inputs, targets) = Writing(), classes(12)
    result = autoaccum.fit(
        model, (inputs, targets), training_step=lambda m, b: m(b[0]), effective_batch=12, micro_batch=2, epochs=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0), validation_data=(inputs, targets), cache=False, device=HERE,
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        whole = sum(model(inputs.to(HERE)).values()).item()
    assert of_all(result) == pytest.approx([whole] * 2)
    assert [report.loss for report in result.history] == pytest.approx([whole] * 2)


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:How the loss averages")
@pytest.mark.parametrize("by_user", [False, True])
def test_a_loss_by_name_that_is_left_alone_is_still_that_one(by_user: bool) -> None:
    """Where nothing of the others counts they are left out, as a notice advises."""
    inputs, targets = classes(12)
    targets = torch.where(torch.arange(12) % 6 < 2, IGNORED, targets)

    def losses(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        outputs = model(batch[0])
        found = {"b": outputs.pow(2).mean()}
        return {"a": cross_entropy(outputs, batch[1]), **found} if bool((batch[1] != IGNORED).any()) else found

    def counts(batch: Any) -> dict[str, Any]:
        return {"a": (batch[1] != IGNORED).sum(), "b": len(batch[1])}

    model = mlp().to(HERE)
    result = autoaccum.fit(
        model, (inputs, targets), training_step=losses, effective_batch=12, micro_batch=2, epochs=2, progress=False,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0), validation_data=(inputs, targets), cache=False, verify=False,
        num_items=counts if by_user else None, device=HERE, shuffle=False,
    )  # fmt: skip
    with torch.no_grad():
        whole = sum(losses(model, (inputs.to(HERE), targets.to(HERE))).values()).item()
    assert of_all(result) == pytest.approx([whole] * 2)


def test_an_error_of_its_data_says_that_it_is_of_them() -> None:
    inputs, targets = classes(8)
    with pytest.raises(RuntimeError, match="expected target dtype") as raised:
        autoaccum.fit(
            mlp(), (inputs, targets), effective_batch=4, loss_fn=cross_entropy, device="cpu", progress=False,
            validation_data=(inputs, targets.float()),
        )  # fmt: skip
    assert "They are samples of validation_data." in raised.value.__notes__
    with pytest.raises(RuntimeError, match="expected target dtype") as raised:
        autoaccum.fit(
            mlp(), (inputs, targets.float()), effective_batch=4, loss_fn=cross_entropy, device="cpu", progress=False,
            validation_data=(inputs, targets),
        )  # fmt: skip
    assert "They are samples of validation_data." not in raised.value.__notes__


def test_of_what_cannot_be_computed_the_micro_batch_is_told() -> None:
    inputs, targets = classes(8)
    with pytest.raises(RuntimeError) as raised:
        autoaccum.fit(
            mlp(), (inputs, targets), effective_batch=4, loss_fn=cross_entropy, device="cpu", progress=False,
            validation_data=(inputs[:, :-1], targets),
        )  # fmt: skip
    told, whose = raised.value.__notes__[:2]
    assert re.fullmatch(r"autoaccum was running \d+ samples? that are evaluated, of shapes .*\.", told)
    assert whose == "They are samples of validation_data."


def test_what_was_trained_is_kept_where_validation_fails(tmp_path: Path) -> None:
    """It goes on from there, and makes up for the validation that was none."""
    inputs, targets = classes(12)

    def run(validation_data: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        return autoaccum.fit(
            mlp(), (inputs, targets), effective_batch=4, micro_batch=4, loss_fn=cross_entropy, device="cpu",
            progress=False, validation_data=validation_data, **options,
        )  # fmt: skip

    wrong = targets.clone()
    wrong[-1] = 99
    with pytest.raises(IndexError, match="Target 99 is out of bounds"):
        run((inputs, wrong), run_dir=tmp_path, checkpoint_every=1000)
    again = run((inputs, targets), run_dir=tmp_path)
    (resumed,) = [event for event in again.events if isinstance(event, Resumed)]
    assert resumed.num_samples == 12
    (found,) = [event for event in again.events if isinstance(event, Validated)]
    whole = next(event for event in run((inputs, targets)).events if isinstance(event, Validated))
    assert (found.epoch, found.step) == (whole.epoch, whole.step)
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)  # in micro-batches of other sizes
    assert not [event for event in again.events if isinstance(event, Notice)]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_within_a_validation_loses_no_training(
    presses: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first one it is finished; the second breaks it off, and it is made up for."""
    pressed: list[int] = []

    def press(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # It is tried on a few samples before: a press then is one before training.
        while len(outputs) == 4 and len(pressed) < presses:
            pressed.append(1)
            signal.raise_signal(signal.SIGINT)
        return outputs.argmax(1) == targets

    def run() -> Any:
        torch.manual_seed(0)
        return autoaccum.fit(
            mlp(), classes(12), effective_batch=4, micro_batch=4, loss_fn=cross_entropy, device="cpu", epochs=2,
            validation_data=classes(12), metrics={"right": press}, run_dir=tmp_path, checkpoint_every=1000,
        )  # fmt: skip

    with nullcontext() if presses == 1 else pytest.raises(KeyboardInterrupt):
        assert run().num_samples == 12
    shown = capsys.readouterr().err
    assert "stopping after this validation; press Ctrl-C again to stop now" in shown
    assert "validating:  50%" in shown
    again = run()
    (resumed,) = [event for event in again.events if isinstance(event, Resumed)]
    assert resumed.num_samples == 12
    assert [event.epoch for event in again.events if isinstance(event, Validated)] == [0, 1]


class PutsBack(Ready):
    """Is interrupted once more while it puts back what a validation has changed, as averaged weights are."""

    def __call__(self, record: Any) -> None:
        pass

    @contextmanager
    def validating(self) -> Iterator[None]:
        try:
            yield
        finally:
            raise KeyboardInterrupt


def interrupted_when_told(record: Any) -> None:
    if isinstance(record, Validated):
        raise KeyboardInterrupt


@pytest.mark.parametrize("callback", [PutsBack(), interrupted_when_told])
def test_what_ctrl_c_has_left_halfway_is_not_saved(callback: Any, tmp_path: Path) -> None:
    """Neither weights that were being put back, nor the state of callbacks that have heard of a validation."""

    def press(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(outputs) == 4 and isinstance(callback, PutsBack):
            raise KeyboardInterrupt
        return outputs.argmax(1) == targets

    with pytest.raises(KeyboardInterrupt):
        autoaccum.fit(
            mlp(), classes(12), effective_batch=4, micro_batch=4, loss_fn=cross_entropy, device="cpu", epochs=2,
            validation_data=classes(12), metrics={"right": press}, run_dir=tmp_path, checkpoint_every=1000,
            callbacks=[callback], progress=False,
        )  # fmt: skip
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("bad", [0, 9, 23])
def test_a_validation_that_failed_leaves_how_losses_are_read(bad: int, tmp_path: Path) -> None:
    """By samples alone means over items would be weighed wrongly for the rest of the run."""
    inputs, targets = torch.randn(24, 4, 8), torch.randint(0, 3, (24, 4))
    targets[torch.arange(24)[:, None] % 4 + torch.arange(4) > 3] = -100  # other numbers of items in each sample

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def run(validation_data: Any, **options: Any) -> list[float]:
        torch.manual_seed(0)
        made = autoaccum.fit(
            nn.Linear(8, 3), (inputs, targets), effective_batch=8, micro_batch=8, training_step=loss, device="cpu",
            progress=False, validation_data=validation_data, epochs=2, **options,
        )  # fmt: skip
        return [event.loss for event in made.events if isinstance(event, Validated)]

    wrong = targets.clone()
    wrong[bad, 0] = 99
    with pytest.raises(IndexError):
        run((inputs, wrong), run_dir=tmp_path)
    assert run((inputs, targets), run_dir=tmp_path) == pytest.approx(run((inputs, targets)), rel=1e-6)


def test_what_metrics_are_tried_on_is_validation_data() -> None:
    inputs, targets = classes(8)
    with pytest.raises(DataError, match="^validation_data: with loss_fn, batches are"):
        autoaccum.fit(
            mlp(), (inputs, targets), effective_batch=4, loss_fn=cross_entropy, device="cpu", progress=False,
            validation_data=inputs, metrics={"right": lambda model, batch: model(batch[0]).argmax(1) == batch[1]},
        )  # fmt: skip


def test_what_is_wrong_with_both_is_laid_to_the_data() -> None:
    inputs, _ = classes(8)
    with pytest.raises(DataError, match="^data: with loss_fn, batches are"):
        autoaccum.fit(
            mlp(),
            inputs,
            effective_batch=4,
            loss_fn=cross_entropy,
            device="cpu",
            progress=False,
            validation_data=inputs,
        )


def test_unpadded_validation_data_beside_a_loader_is_to_have_a_loader_too() -> None:
    """As an argument a ``collate_fn`` is refused there, for the training data's DataLoader brings its own."""

    def padded(samples: list[Any]) -> Any:
        inputs = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
        return inputs[:, :2], torch.stack([target for _, target in samples])

    data = [(torch.randn(2 + index % 3), torch.randn(1)) for index in range(8)]
    options: dict[str, Any] = {"effective_batch": 4, "loss_fn": nn.MSELoss(), "progress": False}
    loader = DataLoader(data, 4, collate_fn=padded)
    with pytest.raises(
        DataError, match=r"^validation_data: .*pass validation_data as DataLoader\(dataset, collate_fn="
    ):
        autoaccum.fit(nn.Linear(2, 1), loader, validation_data=data, **options)
    followed = DataLoader(data, collate_fn=padded)
    result = autoaccum.fit(nn.Linear(2, 1), loader, validation_data=followed, **options)
    assert any(isinstance(event, Validated) for event in result.events)
