"""A fault that passes, as ``fit``, ``Accumulator`` and ``probe`` meet it; by a clock that waiting moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import ArgumentError, DataError, NothingFitsError
from autoaccum.events import OutOfMemory, StepReport, Waiting
from autoaccum.memory.clock import ManualClock
from autoaccum.testing import manual_clock, simulated_memory
from tests.models import classes, mlp, same, state_of, wide


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock() as given:
        yield given


class Fails:
    """A training step without memory until some second of the clock, from some call on, in training or validation."""

    def __init__(self, clock: ManualClock, until: float, *, after: int = 0, training: bool = True) -> None:
        self._clock, self._until, self._after, self._training = clock, until, after, training
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        if model.training is self._training:
            self.calls += 1
            if self.calls > self._after and self._clock.now() < self._until:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def fit(step: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"effective_batch": 4, "micro_batch": 1, "steps": 3, **options}
    return autoaccum.fit(mlp(), classes(12), training_step=step, device="cpu", progress=False, cache=False, **given)


def waits(result: Any) -> list[Waiting]:
    return [event for event in result.events if isinstance(event, Waiting)]


def test_a_window_waits_and_is_then_what_it_would_have_been(clock: ManualClock) -> None:
    result = fit(Fails(clock, 20.0, after=6))
    (event,) = waits(result)
    assert (event.step, event.phase, event.micro_batch, event.seconds) == (2, "training", 1, 60.0)
    assert [report.replays for report in result.history] == [0, 8, 0]  # one of them without what is laid aside
    assert clock.now() == 31.0
    assert same(state_of(result), state_of(fit(Fails(clock, 0.0))))


def test_patience_ends_and_the_cause_is_kept(clock: ManualClock) -> None:
    with pytest.raises(NothingFitsError, match="training: a micro-batch of 1") as caught:
        fit(Fails(clock, 1000.0), patience=10)
    assert clock.now() == 10.0
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__traceback__ is None


def test_a_validation_waits_too(clock: ManualClock) -> None:
    result = fit(Fails(clock, 5.0, training=False), validation_data=classes(5, seed=3))
    (event,) = waits(result)
    assert (event.step, event.phase) == (3, "validation")
    before = fit(Fails(clock, 0.0), validation_data=classes(5, seed=3))
    assert [e.loss for e in result.events if hasattr(e, "metrics")] == [
        e.loss for e in before.events if hasattr(e, "metrics")
    ]
    with pytest.raises(NothingFitsError, match="validation: a micro-batch of 1") as caught:
        fit(Fails(clock, 1e9, training=False), validation_data=classes(5, seed=3), patience=2.0)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_an_accumulator_waits_too(clock: ManualClock) -> None:
    model = mlp()
    step = Fails(clock, 5.0)
    accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), training_step=step)
    accumulator.step(classes(4))
    assert [event.seconds for event in accumulator.events if isinstance(event, Waiting)] == [60.0]
    assert clock.now() == 7.0


def test_a_probe_does_not_wait_unless_it_is_told_to(clock: ManualClock) -> None:
    arguments: dict[str, Any] = {"device": "cpu", "effective_batch": 4}
    with pytest.raises(NothingFitsError) as caught:
        autoaccum.probe(mlp(), classes(8), training_step=Fails(clock, 5.0), **arguments)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert clock.now() == 0.0
    report = autoaccum.probe(mlp(), classes(8), training_step=Fails(clock, 5.0), patience=60, **arguments)
    assert report.max_micro_batch == 4
    assert [trial.fits for trial in report.trials] == [True] * len(report.trials)


def test_what_is_ours_alone_and_too_little_is_refused_at_once(clock: ManualClock) -> None:
    model = wide(100_000)
    needed = sum(p.nbytes for p in model.parameters()) * 4
    for limits in ((needed + 500_000, None), ("1GiB", needed + 500_000)):
        events: list[Any] = []
        with simulated_memory(limits[0]), pytest.raises(NothingFitsError, match="a micro-batch of 1"):
            autoaccum.fit(
                wide(100_000), classes(8), effective_batch=4, loss_fn=cross_entropy, memory_limit=limits[1],
                device="cpu", progress=False, callbacks=[events.append],
            )  # fmt: skip
        assert not any(isinstance(event, Waiting | StepReport) for event in events)
        assert sum(isinstance(event, OutOfMemory) for event in events) <= 2  # with what is laid aside, and without
    assert clock.now() == 0.0


def test_memory_that_was_lent_to_others_is_waited_for(clock: ManualClock) -> None:
    """The limit falls below what one sample needs, and comes back when somebody says so."""
    with simulated_memory("64MiB") as device:

        def lend(record: Any) -> None:
            if isinstance(record, StepReport) and record.step == 1:
                device.limit = device.used + 10_000
            if isinstance(record, Waiting):
                assert record.needed_bytes > record.limit_bytes
                device.limit = 64 << 20

        result = autoaccum.fit(
            wide(10_000), classes(12), effective_batch=4, micro_batch=2, loss_fn=cross_entropy, steps=3,
            device="cpu", progress=False, callbacks=[lend], cache=False,
        )  # fmt: skip
    assert len(waits(result)) == 1
    assert clock.now() == 1.0
    assert [report.effective_batch for report in result.history] == [4, 4, 4]


@pytest.mark.parametrize("value", [-1, float("nan"), "60", True, None])
def test_patience_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(ArgumentError, match="patience"):
        fit(None, patience=value)


class Counts(nn.Module):
    """Writes to a buffer, and registers another, when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("evaluated", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.evaluated += 1
            self.register_buffer("cache", torch.ones(3))
        return self.net(inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_a_validation_leaves_no_trace_in_buffers(is_broken_off: bool) -> None:
    model = Counts()

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if is_broken_off and float(model.evaluated) > 3:
            raise KeyboardInterrupt
        return outputs.argmax(1) == targets

    def train() -> None:
        autoaccum.fit(
            model, classes(8), effective_batch=4, loss_fn=cross_entropy, validation_data=classes(9, seed=2),
            metrics={"accuracy": metric}, device="cpu", progress=False,
        )  # fmt: skip

    if is_broken_off:
        with pytest.raises(KeyboardInterrupt):
            train()
    else:
        train()
    assert float(model.evaluated) == 0.0
    assert dict(model.named_buffers()).keys() == {"evaluated"}
    assert model.training


class Samples(torch.utils.data.Dataset[Any]):
    """One of them is too large for the host, always or once; or so many of them at once are."""

    def __init__(self, fails_at: int | None = None, *, once: bool = False, most: int = 100) -> None:
        self.fails_at, self.once, self.most = fails_at, once, most

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.fails_at:
            if self.once:
                self.fails_at = None
            raise MemoryError(f"sample {index}")
        return torch.full((8,), float(index)), index % 3

    def collate(self, items: list[Any]) -> Any:
        if len(items) > self.most:
            raise MemoryError(f"{len(items)} samples")
        return torch.utils.data.default_collate(items)


def read(samples: Samples, **options: Any) -> Any:
    given: dict[str, Any] = {"effective_batch": 6, "micro_batch": 6, "epochs": 1, **options}
    return autoaccum.fit(
        mlp(), samples, loss_fn=cross_entropy, collate_fn=samples.collate, shuffle=False, device="cpu",
        progress=False, patience=0, **given,
    )  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_the_host_cannot_hold_is_named_and_shrinks_no_plan(num_workers: int) -> None:
    events: list[Any] = []
    with pytest.raises(DataError, match=r"sample 7 takes more memory .*MemoryError\('sample 7'\)") as caught:
        read(Samples(7), callbacks=[events.append], num_workers=num_workers)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not any(isinstance(event, OutOfMemory) for event in events)


def test_a_sample_that_fails_once_is_a_fault_that_passes() -> None:
    result = read(Samples(7, once=True))
    assert [sum(report.micro_batches) for report in result.history] == [6, 6]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_cannot_be_collated_at_once_is_read_in_smaller_pieces(num_workers: int) -> None:
    result = read(Samples(most=2), num_workers=num_workers)
    assert [report.micro_batches for report in result.history] == [(1,) * 6] * 2 or all(
        max(report.micro_batches) <= 2 for report in result.history
    )
    assert [sum(report.micro_batches) for report in result.history] == [6, 6]


def test_one_sample_that_cannot_be_collated_is_no_matter_of_plans() -> None:
    with pytest.raises(DataError, match="the sample at position 0 of epoch 0 takes more memory") as caught:
        read(Samples(most=0))
    assert str(caught.value.__cause__) == "1 samples"
