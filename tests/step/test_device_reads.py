"""What windows wait for on a device: at most one read each, at their end, whatever the loss; and nothing is given back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumWarning
from autoaccum.events import StepReport, Validated
from autoaccum.step.transaction import Transaction
from autoaccum.step.verification import Occasions
from autoaccum.training.validation import Validator
from tests import standin
from tests.models import relative_error

# The stand-in device makes outputs before operators run, and some are reduced in place of a larger one.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.measured,
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
Loss = Callable[[Any, Any], Any]

SAMPLES, TIME, CLASSES = 11, 6, 5
SIZES, WINDOWS = (4, 4, 3), 7
"""The first windows are looked at and measured; of the others each is a settled one."""
_FIRST_SETTLED = 5


def _waits(entry: standin.Entry) -> bool:
    return entry.kind == "sync" and entry.what != "synchronize an event"


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows settle after a few, as they do after a hundred, of which then one in ten is looked at."""
    if not hasattr(torch, "standin"):
        pytest.skip("only the stand-in device has a log")

    def looked(self: Occasions, number: int, *, is_measured: bool) -> None:
        self.next_look = number + 1 if number < _FIRST_SETTLED - 1 else 10**6

    monkeypatch.setattr(Occasions, "looked", looked)


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


class Net(nn.Module):
    """(samples, time, 4) -> (samples, time, classes)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]


def data(*, empty: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and labels of which rows ignore ever more; the first ``empty`` rows all."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, CLASSES, (SAMPLES, TIME), generator=generator)
    for row in range(SAMPLES):
        labels[row, 1 + (5 * row) % 6 :] = -100
    labels[:empty] = -100
    return torch.randn(SAMPLES, TIME, 4, generator=generator), labels


def unit(targets: torch.Tensor) -> torch.Tensor:
    return ((targets.clamp(0).float() + 0.5) / (CLASSES + 1)).unsqueeze(-1).expand(-1, -1, CLASSES)


def tokens(model: Any, batch: Any, **options: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), **options)


def each(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")


def masked(model: Any, batch: Any) -> torch.Tensor:
    mask = batch[1] != -100
    return (each(model, batch) * mask).sum() / mask.sum()


def clamped(model: Any, batch: Any) -> torch.Tensor:
    mask = batch[1] != -100
    return (each(model, batch) * mask).sum() / mask.sum().clamp(min=1)


def weights_of(batch: Any) -> torch.Tensor:
    return batch[0][:, 0, 0].abs() + 0.1  # type: ignore[no-any-return]


def of_samples(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0])[:, 0], batch[1][:, 0].clamp(0), reduction="none")


def penalty(model: Any) -> Any:
    return 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def weighted(model: Any, batch: Any) -> torch.Tensor:
    return (of_samples(model, batch) * weights_of(batch)).sum() / weights_of(batch).sum()


def class_weights(model: Any, batch: Any) -> torch.Tensor:
    weight = torch.arange(1, CLASSES + 1, device=batch[0].device) / 3  # made where it is used: a copy would wait
    return tokens(model, batch, weight=weight)


def vae(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    divergence = -0.5 * torch.sum(1 + outputs[..., 0] - outputs[..., 0].exp())
    return F.mse_loss(outputs[..., 2:], torch.ones_like(outputs[..., 2:]), reduction="sum") + divergence


def beside(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    right = model(batch[0]).argmax(-1) == batch[1]
    count = (batch[1] != -100).sum()
    return tokens(model, batch), {"right": right.float().mean(), "of those": (right.sum() / count, count)}


def with_rows(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    outputs = model(batch[0])
    rows = {"labels": outputs.argmax(-1), "scores": outputs.detach(), "largest": outputs.detach().amax((1, 2))}
    return F.cross_entropy(outputs[:, 0], batch[1][:, 0].clamp(0)), {**rows, "mean": outputs.detach().mean()}


LOSSES: dict[str, Loss] = {
    "mean squared error": lambda m, b: F.mse_loss(m(b[0]), unit(b[1])),
    "cross entropy": lambda m, b: F.cross_entropy(m(b[0])[:, 0], b[1][:, 0].clamp(0)),
    "ignore_index": tokens,
    "class weights": class_weights,
    "label smoothing": lambda m, b: tokens(m, b, label_smoothing=0.1),
    "sample weights": lambda m, b: (of_samples(m, b) * weights_of(b)).mean(),
    "sample weights, divided by their sum": weighted,
    "masked mean": masked,
    "masked mean, kept from 0": clamped,
    "sum over a count of items": lambda m, b: tokens(m, b, reduction="sum") / (b[1] != -100).sum(),
    "language model": lambda m, b: F.cross_entropy(m(b[0])[:, :-1].flatten(0, 1), b[1][:, 1:].flatten()),
    "BCE": lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), unit(b[1])),
    "KL divergence": lambda m, b: F.kl_div(m(b[0]).log_softmax(-1), unit(b[1]), reduction="batchmean"),
    "sum": lambda m, b: F.mse_loss(m(b[0]), unit(b[1]), reduction="sum"),
    "two sums": vae,
    "with a penalty": lambda m, b: tokens(m, b) + penalty(m),
    "outputs beside it": beside,
    "rows beside it": with_rows,
}


class Found(NamedTuple):
    """What was in the log of a window."""

    within: int
    """Waits for the device from the first micro-batch to the end of the last backward."""
    waits: int
    """Waits in all."""
    given_back: int
    """Segments freed, and flushes of the cache."""


class Watch:
    """Marks in the log where windows begin and end, and where their micro-batches do."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, int]] = []

    def mark(self, what: str) -> None:
        self.marks.append((what, standin.logged()))

    def found(self, log: list[standin.Entry]) -> list[Found]:
        """Return what was in each settled window, in turn."""
        windows, begun, pieces = [], 0, list[int]()
        for what, at in self.marks:
            if what == "begin":
                begun, pieces = at, []
            elif what == "end" and pieces:
                inside, all_of_it = log[pieces[0] : pieces[-1]], log[begun:at]
                # The thread that writes a checkpoint waits for its own copy, by an event, whenever that is.
                waits = [sum(_waits(entry) for entry in part) for part in (inside, all_of_it)]
                given_back = sum(entry.kind in ("segment free", "flush") for entry in all_of_it)
                windows.append(Found(waits[0], waits[1], given_back))
            else:
                pieces.append(at)
        return windows[_FIRST_SETTLED - 1 :]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    found = Watch()
    begin, add = Transaction.begin, Transaction.add

    def marked_begin(self: Transaction, window: Any) -> None:
        found.mark("begin")
        begin(self, window)

    def marked_add(self: Transaction, piece: Any) -> None:
        found.mark("piece")
        add(self, piece)
        found.mark("piece")

    monkeypatch.setattr(Transaction, "begin", marked_begin)
    monkeypatch.setattr(Transaction, "add", marked_add)
    return found


def fit(watch: Watch, loss: Loss, samples: Any, windows: int = WINDOWS, **options: Any) -> list[Found]:
    """Train on a device; return what its settled windows waited for."""
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-3), "micro_batch": 4, **options}

    def end(record: Any) -> None:
        if isinstance(record, StepReport):
            watch.mark("end")

    with warnings.catch_warnings(), standin.recorded() as log:
        warnings.simplefilter("ignore", AutoaccumWarning)
        watch.result = autoaccum.fit(  # type: ignore[attr-defined]
            Net(), samples, effective_batch=SAMPLES, training_step=loss, epochs=windows, device=device(),
            progress=False, callbacks=[end], cache=False, **options,
        )  # fmt: skip
    found = watch.found(log)
    assert len(found) == windows - _FIRST_SETTLED + 1
    return found


ONE_READ = Found(within=0, waits=1, given_back=0)


@pytest.mark.parametrize("name", LOSSES)
def test_of_each_loss(name: str, watch: Watch) -> None:
    assert set(fit(watch, LOSSES[name], data())) == {ONE_READ}


OPTIONS: dict[str, dict[str, Any]] = {
    "a clipped norm": {"clip_norm": 0.1},
    "16 bits": {"precision": "bf16"},
    "a loss scale": {"precision": "fp16", "clip_norm": 1.0},
    "noise": {"noise_scale": True},
    "AdamW": {"optimizer": None},
    "its own counts": {"num_items": lambda batch: (batch[1] != -100).sum()},
    "a search": {"micro_batch": "auto", "max_micro_batch": 4, "memory_limit": "1GiB"},
    "nothing measured": {"verify": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_with(name: str, watch: Watch) -> None:
    windows = WINDOWS + 8 * (name == "a search")  # and the timing of plans after it
    assert set(fit(watch, tokens, data(), windows, **OPTIONS[name])[-2:]) == {ONE_READ}


@pytest.mark.parametrize("name", ["ignore_index", "masked mean", "label smoothing"])
def test_where_a_micro_batch_counts_nothing(name: str, watch: Watch) -> None:
    found = fit(watch, LOSSES[name], data(empty=4), WINDOWS, shuffle=False)
    assert set(found) == {ONE_READ}
    assert watch.result.history[-1].micro_batches == SIZES  # type: ignore[attr-defined]


def test_between_validations_and_checkpoints(tmp_path: Path, watch: Watch) -> None:
    options = {"validation_data": data(), "run_dir": tmp_path / "run", "checkpoint_every": 1}
    assert set(fit(watch, LOSSES["masked mean"], data(), **options)) == {ONE_READ}


@pytest.mark.parametrize("name", LOSSES)
def test_a_validation_is_read_once(name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many micro-batches it has, and whatever is reported beside its loss."""
    run, waits = Validator.run, list[int]()

    def watched(self: Validator, *args: Any) -> float:
        with standin.recorded() as log:
            loss = run(self, *args)
        waits.append(sum(map(_waits, log)))
        return loss

    options: dict[str, Any] = {"effective_batch": 11, "micro_batch": 2, "epochs": 3, "verify": False}
    options |= {"training_step": LOSSES[name], "optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    options |= {"validation_data": data(empty=3), "progress": False, "cache": False}
    options["metrics"] = {"right": lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).float().mean(1)}
    found = {}
    for place in ("cpu", device()):
        monkeypatch.setattr(Validator, "run", run if place == "cpu" else watched)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoaccumWarning)
            result = autoaccum.fit(Net(), data(), device=place, **options)
        found[str(place)] = [event for event in result.events if isinstance(event, Validated)][-1]
    on_host, there = found.values()
    assert waits == [1] * 3
    assert there.micro_batch == 2
    assert there.loss == pytest.approx(on_host.loss, rel=1e-5)
    assert there.metrics == pytest.approx(on_host.metrics, rel=1e-5)


@pytest.mark.parametrize("form", ["one", "by name"])
def test_counts_on_the_device_are_read_with_a_validation(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that count nothing are left out, though it is not known of them in time."""
    samples, waits, run = data(empty=4), list[int](), Validator.run

    def watched(self: Validator, *args: Any) -> float:
        with standin.recorded() as log:
            loss = run(self, *args)
        waits.append(sum(map(_waits, log)))
        return loss

    def loss(model: Any, batch: Any) -> Any:
        return tokens(model, batch) if form == "one" else {"tokens": tokens(model, batch)}

    def count(batch: Any) -> Any:
        return (batch[1] != -100).sum()

    monkeypatch.setattr(Validator, "run", watched)
    result = autoaccum.fit(
        Net(), data(), device=device(), training_step=loss, effective_batch=11, micro_batch=2, epochs=2, progress=False,
        num_items=count if form == "one" else {"tokens": count}, validation_data=samples, cache=False,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
    )  # fmt: skip
    whole = tokens(Net(), samples).item()
    assert [event.loss for event in result.events if isinstance(event, Validated)] == pytest.approx([whole] * 2)
    assert waits == [1, 1]


PLACES: dict[str, Callable[[Any], Any]] = {
    "all of it": lambda leaf: leaf.to(device()),
    "inputs alone": lambda leaf: leaf.to(device()) if leaf.is_floating_point() else leaf,
    "labels alone": lambda leaf: leaf if leaf.is_floating_point() else leaf.to(device()),
}


@pytest.mark.parametrize("place", PLACES)
def test_of_data_that_lie_on_the_device(place: str, watch: Watch) -> None:
    """Have their order there once an epoch, and not an index copied for each leaf of each micro-batch."""
    found = fit(watch, tokens, tuple(map(PLACES[place], data())))
    assert set(found) == {ONE_READ}


def test_of_data_on_the_device_beside_texts_and_arrays(watch: Watch) -> None:
    inputs, labels = (leaf.to(device()) for leaf in data())
    beside = {"names": [f"sample {row}" for row in range(SAMPLES)], "numbers": np.arange(SAMPLES)}
    found = fit(watch, lambda m, b: tokens(m, (b["x"], b["y"])), {"x": inputs, "y": labels, **beside})
    assert set(found) == {ONE_READ}


@pytest.mark.parametrize("name", LOSSES)
def test_of_an_accumulator(name: str, watch: Watch) -> None:
    model = Net().to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = tuple(leaf.to(device()) for leaf in data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoaccumWarning)
        accumulator = autoaccum.Accumulator(model, optimizer, training_step=LOSSES[name], micro_batch=4)
        with standin.recorded() as log:
            for _ in range(WINDOWS):
                loss = accumulator.step(batch)
                watch.mark("end")
    assert loss.device.type == device().type
    # What means over other items count in the window is counted in the batch before it, and that lies on the device.
    counted_before = "two" in name and "sums" not in name
    for found in watch.found(log):
        assert (found.within, found.given_back) == (0, 0)
        assert found.waits <= 1 + counted_before


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("empty", [0, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_each_is_that_of_the_whole_window(name: str, empty: int, watch: Watch) -> None:
    big, samples = Net().to(device()), data(empty=empty)
    loss = LOSSES[name](big, tuple(leaf.to(device()) for leaf in samples))
    loss = loss[0] if isinstance(loss, tuple) else loss
    loss = sum(loss.values()) if isinstance(loss, dict) else loss
    loss.backward()
    fit(watch, LOSSES[name], samples, shuffle=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    result = watch.result  # type: ignore[attr-defined]
    assert relative_error(gradient_of(result.model), gradient_of(big)) < 1e-5
    assert result.history[-1].loss == pytest.approx(loss.item(), rel=1e-5)
