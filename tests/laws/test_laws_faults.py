"""Law 2 of docs/laws.md, where it is hard: a fault at every operation, in real models, optimizers and data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.errors import LimitBelowModelError, NothingFitsError, OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory, Planned, Record, Replanned, Started, StepReport, Validated
from autoaccum.memory.clock import ManualClock
from autoaccum.memory.simulated import MemorySimulation
from autoaccum.testing import manual_clock, oom_at, simulated_memory
from autoaccum.training.trainer import FitResult
from tests.devices import DEVICE
from tests.faults import Operations, strides
from tests.models import classes, mlp, noisy, same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:The model holds [12] BatchNorm")

Plans = tuple[tuple[int, ...], ...]


class Block(nn.Module):
    """Attention and a perceptron, dropout in and after both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.2 if self.training else 0.0
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


@cache
def gpt() -> nn.Module:
    """A template, to be copied."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Dropout(0.2), Block(8, 2), Block(8, 2), nn.LayerNorm(8), nn.Linear(8, 11)
    )


@cache
def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16, 3),
    )


@cache
def hugging_face() -> nn.Module:
    """Built from a configuration, so nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model  # type: ignore[no-any-return]


def drawn(seed: int, *shape: int, below: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator) if below is None else torch.randint(below, shape, generator=generator)
    )


def token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def text() -> dict[str, torch.Tensor]:
    """Sequences of which some tokens are not learned from; one has none."""
    ids = drawn(2, 7, 6, below=13)
    labels = ids.clone()
    labels[drawn(3, 7, 6) < -0.7] = -100
    labels[4, 1:] = -100
    return {"input_ids": ids, "labels": labels}


def decay(optimizer: torch.optim.Optimizer, num_steps: int) -> LinearLR:
    return LinearLR(optimizer, 1.0, 0.1, num_steps)


CASES: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": gpt,
        "data": (drawn(0, 7, 6, below=11), drawn(1, 7, 6, below=11)),
        "loss_fn": token_loss,
        "effective_batch": 5,
        "micro_batch": 3,
    },
    # Micro-batches of a model with BatchNorm have two samples or more, so its windows are larger.
    "convolutions": {
        "model": convolutions,
        "data": (drawn(0, 17, 2, 6, 6), drawn(1, 17, below=3)),
        "loss_fn": cross_entropy,
        "effective_batch": 9,
        "micro_batch": 5,
    },
    "hugging_face": {
        "model": hugging_face,
        "data": text(),
        "precision": "bf16",
        "num_items": lambda batch: (batch["labels"][:, 1:] != -100).sum(),
        "effective_batch": 5,
        "micro_batch": 3,
    },
}


def seen(result: FitResult | autoaccum.Trainer) -> list[Any]:
    """All that callbacks saw of the windows, but for times, memory and replays."""
    return [
        (report.step, report.epoch, report.num_samples, report.micro_batches, report.loss, report.lr, report.grad_norm)
        for report in result.history
    ]


def scaler_state(trainer: autoaccum.Trainer) -> Any:
    """The loss scale, and how many steps ago it moved; None without a scaler."""
    scaler = trainer._step.transaction.scaler
    return None if scaler is None else scaler.state_dict()


@dataclass
class Sweep:
    """An OOM at each operation of a run in turn, each run compared with a clean one of the same plans."""

    make: Callable[..., autoaccum.Trainer]
    """(micro_batch, callbacks) -> a new Trainer"""
    windows: list[int]
    stride: int = 1
    offset: int = 0
    operations: int = 0
    tried: int = 0
    replayed: int = 0
    in_step: int = 0
    plans: set[Plans] = field(default_factory=set)
    clean: dict[Plans, tuple[list[torch.Tensor], list[Any], Any]] = field(default_factory=dict)

    def run(self, micro_batch: int) -> None:
        counting = self.make(micro_batch)
        with Operations() as operations:
            counting.fit()
        self.operations = len(operations.names)
        for operation in operations.of_each_kind(self.stride, self.offset):
            self.tried += 1
            self.fault(micro_batch, operation)

    def fault(self, micro_batch: int, operation: int) -> None:
        fault = ExitStack()  # left at the fault: from there on the run needs no more counting, which is slow
        records: list[Record] = []

        def callback(record: Record) -> None:
            records.append(record)
            if isinstance(record, OutOfMemory):
                fault.close()

        running = self.make(micro_batch, [callback])
        with fault:
            fault.enter_context(oom_at(operation))
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                self.in_step += 1
                return
        reports = [record for record in records if isinstance(record, StepReport)]
        assert reports == list(result.history)
        assert [report.effective_batch for report in reports] == self.windows
        # Outside of windows, where a snapshot is taken, the same is done again.
        failed = [record for record in records if isinstance(record, OutOfMemory)]
        replays = sum(report.replays for report in reports)
        assert replays == sum(record.phase == "training" for record in failed)
        assert len(failed) <= 1
        plans = tuple(report.micro_batches for report in reports)
        state, reported, scaler = self.without_fault(plans)
        assert seen(result) == reported, f"operation {operation} is to be seen"
        assert same(state_of(result), state), f"operation {operation} left a mark"
        assert scaler_state(running) == scaler, f"operation {operation} left a mark on the scaler"
        self.plans.add(plans)
        self.replayed += replays

    def without_fault(self, plans: Plans) -> tuple[list[torch.Tensor], list[Any], Any]:
        if plans not in self.clean:
            running = self.make(plans)
            result = running.fit()
            assert sum(report.replays for report in result.history) == 0
            self.clean[plans] = state_of(result), seen(result), scaler_state(running)
        return self.clean[plans]


class TestEveryOperation:
    """Two windows, of which the second is short, with dropout, AdamW, clipping and a schedule."""

    @strides(47)
    @pytest.mark.parametrize(
        ("name", "offset", "least"), [("gpt", 0, 900), ("convolutions", 4, 200), ("hugging_face", 8, 600)]
    )
    def test_an_oom_there_leaves_no_mark(self, name: str, offset: int, least: int, stride: int) -> None:
        def make(micro_batch: Any, callbacks: Any = ()) -> autoaccum.Trainer:
            options = {**CASES[name], "micro_batch": micro_batch, "callbacks": callbacks}
            return autoaccum.Trainer(
                deepcopy(options.pop("model")()),
                options.pop("data"),
                lr=0.01,
                lr_scheduler=decay,
                clip_norm=0.5,
                device=DEVICE,
                progress=False,
                **options,
            )

        num_samples = len(next(iter(text().values()))) if name == "hugging_face" else len(CASES[name]["data"][0])
        effective_batch = CASES[name]["effective_batch"]
        sweep = Sweep(make, [effective_batch, num_samples - effective_batch], stride, offset)
        sweep.run(CASES[name]["micro_batch"])
        print(
            f"{name}: {sweep.replayed} faults injected and replayed, {sweep.in_step} in the optimizer, "
            f"{sweep.operations} operations, plans {sorted(sweep.plans)}"
        )
        assert sweep.replayed * stride > least
        assert sweep.in_step > 0
        assert sweep.tried - sweep.replayed - sweep.in_step < 30
        assert {len(plan) for plan, _ in sweep.plans} >= {2, CASES[name]["effective_batch"] // 2}


class SomebodyElses(torch.optim.AdamW):
    """Not PyTorch's own, so that its state is made in its first step: nobody knows what its methods do."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD with momentum, dampened": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "somebody else's": lambda parameters: SomebodyElses(parameters, lr=0.01),
}
LAZY = {"SGD with momentum, dampened", "somebody else's"}
"""Those whose state is made in their first step, whatever we do."""
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
all_but_lazy = pytest.mark.parametrize(
    "make", [pytest.param(make, id=name) for name, make in OPTIMIZERS.items() if name not in LAZY]
)
TWELVE = classes(12)


def stepping(model: nn.Module, optimizer: Any, **options: Any) -> autoaccum.Trainer:
    """Three windows of two micro-batches."""
    return autoaccum.Trainer(
        model,
        TWELVE,
        effective_batch=4,
        optimizer=optimizer,
        device=DEVICE,
        progress=False,
        **{"micro_batch": 2, "loss_fn": cross_entropy, "lr_scheduler": decay, **options},
    )


class FaultyStep:
    """A run in whose ``at``-th step of the optimizer one operation raises; with None they are only counted."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], at: int, operation: int | None) -> None:
        self.counter = oom_at(operation)
        self.happened: list[str] = []
        self._at = at
        self._fault = ExitStack()
        model = mlp()
        optimizer = make(model.parameters())
        model.register_forward_pre_hook(lambda *_: self.happened.append("forward"))
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda *_: self._fault.close())

        def callback(record: Record) -> None:
            if not isinstance(record, Started | Planned):
                self.happened.append(type(record).__name__)

        def schedule(optimizer: torch.optim.Optimizer, num_steps: int) -> LinearLR:
            self.schedule = decay(optimizer, num_steps)
            return self.schedule

        self.trainer = stepping(model, optimizer, callbacks=[callback], lr_scheduler=schedule)

    def _before(self, *_: object) -> None:
        self.happened.append("step")
        if self.happened.count("step") == self._at:
            self._fault.enter_context(self.counter)

    def fit(self) -> FitResult:
        with self._fault:
            return self.trainer.fit()


class TestLossScale:
    """In float16; the first window's gradient overflows, so that its step is left out and the scale halved."""

    @strides(11)
    def test_an_oom_leaves_no_mark_on_it(self, stride: int) -> None:
        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return 3 * cross_entropy(outputs, targets)

        def make(micro_batch: Any, callbacks: Any = ()) -> autoaccum.Trainer:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
            options = {"micro_batch": micro_batch, "callbacks": callbacks, "precision": "fp16", "clip_norm": 0.5}
            return stepping(model, None, **options, loss_fn=loss_fn)

        sweep = Sweep(make, [4, 4, 4], stride, offset=2)
        sweep.run(3)
        print(f"{sweep.replayed} faults injected and replayed, {sweep.in_step} in the optimizer")
        scales = [(scaler["scale"], scaler["_growth_tracker"]) for _, _, scaler in sweep.clean.values()]
        assert scales == [(2.0**15, 2)] * len(sweep.plans)
        assert sweep.replayed * stride > 200


class TestOptimizer:
    """Its step cannot be rolled back: an OOM in one ends the run, any other is replayed."""

    @every_optimizer
    @pytest.mark.parametrize("at", [1, 2])
    def test_an_oom_in_a_step_ends_the_run(self, make: Any, at: int) -> None:
        """At every operation of the first step, which may have state to make, and of a later one."""
        clean = FaultyStep(make, at, None)
        expected = state_of(clean.fit())
        window = ["forward", "forward", "step", "StepReport"]
        assert clean.happened == [*window * 3, "Finished"]
        assert clean.counter.operations > 0
        print(f"{clean.counter.operations} operations in step {at}")
        for operation in range(1, clean.counter.operations + 1):
            run = FaultyStep(make, at, operation)
            with pytest.raises(OptimizerOutOfMemoryError) as caught:
                run.fit()
            assert caught.value.step == at
            assert run.happened == (window * at)[:-1], f"the run went on after operation {operation}"
            assert len(run.trainer.history) == at - 1
            assert run.schedule.last_epoch == at - 1
        beyond = FaultyStep(make, at, clean.counter.operations + 1)
        assert same(state_of(beyond.fit()), expected), "so the sweep was of the whole step"

    @strides(5)
    def test_state_that_is_made_in_the_first_step_is_there_after_a_replay(self, stride: int) -> None:
        """A window before it, or after it, is replayed like any other."""
        sweep = Sweep(
            lambda micro_batch, callbacks=(): stepping(
                mlp(), OPTIMIZERS["somebody else's"], micro_batch=micro_batch, callbacks=callbacks
            ),
            [4, 4, 4],
            stride,
            offset=3,
        )
        sweep.run(3)
        print(f"{sweep.replayed} faults injected and replayed, {sweep.in_step} in the optimizer")
        assert sweep.replayed * stride > 100
        assert sweep.in_step * stride > 3 * 4

    @all_but_lazy
    def test_an_oom_while_its_state_is_allocated_can_be_mended(self, make: Any) -> None:
        """The same optimizer, and model, train as new ones do."""
        model = mlp()
        with oom_at(None) as counter:
            new = stepping(model, make(model.parameters()))
        expected = state_of(new.fit())
        assert counter.operations > 0
        print(f"{counter.operations} operations while the Trainer is made")
        for operation in range(1, counter.operations + 1):
            model = mlp()
            optimizer = make(model.parameters())
            with oom_at(operation), pytest.raises(LimitBelowModelError):
                stepping(model, optimizer)
            assert len(optimizer.state) == 0
            assert [p.grad for p in model.parameters()] == [None] * 4
            assert same(state_of(stepping(model, optimizer).fit()), expected), f"operation {operation} left a mark"

    @all_but_lazy
    def test_an_oom_while_the_rest_of_its_state_is_allocated_keeps_what_is_there(self, make: Any) -> None:
        """An optimizer that has trained a part of the model has the state of that part."""

        def entries(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
            return {p: {key: id(entry) for key, entry in state.items()} for p, state in optimizer.state.items()}

        def half_trained() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = mlp()
            model[2].requires_grad_(False)
            optimizer = make(model.parameters())
            stepping(model, optimizer).fit()
            model.requires_grad_(True)
            return model, optimizer

        with oom_at(None) as counter:
            model, optimizer = half_trained()
            counter.operations = 0
            stepping(model, optimizer)
        model, optimizer = half_trained()
        before = entries(optimizer)
        assert len(before) == 2
        assert counter.operations > 0
        for operation in range(1, counter.operations + 1):
            with oom_at(operation), pytest.raises(LimitBelowModelError):
                stepping(model, optimizer)
            assert entries(optimizer) == before


class Counts(nn.Module):
    """Its gradient counts samples: the loss is a mean of one parameter a sample, so each adds 1/N to its own.

    It makes activations too, so that memory depends on the micro-batch.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        self.register_buffer("hidden", torch.linspace(-1, 1, 64, dtype=torch.float64))


class MovingLimit:
    """Moves a simulated memory's limit, now and then: between windows, and anywhere in them.

    A micro-batch takes ``pace`` times the square of its samples in seconds, so that small ones may be the fastest.
    """

    def __init__(self, device: MemorySimulation, moves: list[int | None], pace: float, clock: ManualClock) -> None:
        self.device = device
        self._moves = iter(moves)
        self._pace = pace
        self._clock = clock

    def __call__(self, *_: object) -> None:
        if (limit := next(self._moves, None)) is not None:
            self.device.limit = limit

    def training_step(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self()
        counted = model.counts[batch]
        hidden = torch.tanh(counted[:, None] + model.hidden)
        hidden.register_hook(self)  # in the backward pass
        self()
        self._clock.advance(self._pace * len(batch) ** 2)
        return counted.mean() + 0 * hidden.square().mean()


class Numbers(torch.utils.data.Dataset):
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        return index


DATA: dict[str, Callable[[int], Any]] = {
    "tensors": torch.arange,
    "dataset": Numbers,
    "batches": lambda num_samples: DataLoader(list(torch.arange(num_samples).split(3)), batch_size=None),
}


def count_samples(
    kind: str, num_samples: int, moves: list[int | None], limit: int, pace: float = 0.0, **options: Any
) -> tuple[FitResult, torch.Tensor, int]:
    """(result, what the parameters should be if each epoch has each sample once, peak of the memory)"""
    with simulated_memory(limit) as device, manual_clock() as clock:
        limits = MovingLimit(device, moves, pace, clock)
        result = autoaccum.fit(
            Counts(num_samples),
            DATA[kind](num_samples),
            training_step=limits.training_step,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            callbacks=[limits],
            shuffle=False,
            device=DEVICE,
            progress=False,
            **options,
        )
        expected = torch.zeros(num_samples, dtype=torch.float64)
        for _ in range(options["epochs"]):
            for window in expected.split(options["effective_batch"]):
                window -= 1 / len(window)
        peak = max(device.peak, *(report.peak_bytes for report in result.history))
        return result, expected, peak


@cache
def least_limit(kind: str, num_samples: int, effective_batch: int) -> int:
    """The memory in which a run of micro-batches of one sample just fits."""
    options = {"epochs": 2, "effective_batch": effective_batch, "micro_batch": 1}
    return count_samples(kind, num_samples, [], 2**30, **options)[2]


class TestMovingLimit:
    """Whatever the memory's limit does, each epoch trains on each sample once."""

    @pytest.mark.parametrize("examples", [24, pytest.param(400, marks=pytest.mark.slow)])
    def test_no_sample_is_lost_or_repeated(self, examples: int) -> None:
        replays: list[int] = []

        @given(data=st.data())
        @settings(max_examples=examples, deadline=None)
        def check(data: st.DataObject) -> None:
            kind = data.draw(st.sampled_from(sorted(DATA)), "kind")
            num_samples = data.draw(st.integers(5, 30), "num_samples")
            effective_batch = data.draw(st.integers(2, min(16, num_samples)), "effective_batch")
            epochs = data.draw(st.integers(1, 2), "epochs")
            micro_batch = data.draw(st.sampled_from(["auto", min(5, effective_batch), effective_batch]), "micro_batch")
            least = least_limit(kind, num_samples, effective_batch)
            limits = st.integers(0, 16).map(lambda samples: least + samples * 1024 + 256)  # a few scalars are kept
            limit = data.draw(limits, "limit")
            pace = data.draw(st.sampled_from([0.0, 0.1]), "pace")
            moves = data.draw(st.lists(st.none() | limits, min_size=10, max_size=40), "moves")
            result, expected, _ = count_samples(
                kind,
                num_samples,
                moves,
                limit,
                pace,
                epochs=epochs,
                effective_batch=effective_batch,
                micro_batch=micro_batch,
            )
            assert (result.model.counts - expected).abs().max() < 1e-12
            assert result.num_samples == epochs * num_samples
            replays.append(sum(report.replays for report in result.history))

        check()
        print(f"{len(replays)} histories, {sum(replays)} replays, in {sum(map(bool, replays))} of them")
        assert len(replays) >= examples
        assert sum(map(bool, replays)) > examples / 8


class Remembers(nn.Module):
    """Dropout, and a buffer that every forward moves; micro-batches of one sample are as good as any."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(inputs.mean(dim=0), 0.1)
        return self.net(inputs - self.mean)  # type: ignore[no-any-return]


class Step:
    """A training step; some of its calls run out of memory at their end, when random states and buffers have moved."""

    def __init__(self, *failing: int) -> None:
        self.batches: list[torch.Tensor] = []
        """The inputs of each call."""
        self._failing = failing

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.batches.append(batch[0].clone())
        loss = cross_entropy(model(batch[0]), batch[1])
        if len(self.batches) in self._failing:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def remembering(step: Callable[[Any, Any], torch.Tensor], data: Any = TWELVE, **options: Any) -> autoaccum.Trainer:
    """Windows of 8 and 4 samples."""
    return autoaccum.Trainer(
        Remembers(),
        data,
        training_step=step,
        device=DEVICE,
        progress=False,
        **{"effective_batch": 8, "micro_batch": 4, "clip_norm": 0.5, **options},
    )


class TestWhereItHappens:
    @pytest.mark.device
    @pytest.mark.parametrize(
        ("micro_batch", "failing", "plans", "replays"),
        [
            pytest.param(4, [2], ((2, 2, 2, 2), (2, 2)), [1, 0], id="in the first window"),
            pytest.param(4, [3], ((4, 4), (2, 2)), [0, 1], id="in the last window, which is short"),
            pytest.param(8, [1, 3], ((2, 2, 2, 2), (2, 2)), [2, 0], id="twice in one window"),
            pytest.param(8, [1, 4], ((4, 4), (2, 2)), [1, 1], id="in both"),
            pytest.param(8, [1, 2, 5], ((1,) * 8, (1,) * 4), [3, 0], id="down to one sample"),
        ],
    )
    def test_the_window_is_replayed(
        self, micro_batch: int, failing: list[int], plans: Plans, replays: list[int]
    ) -> None:
        replayed = remembering(Step(*failing), micro_batch=micro_batch).fit()
        assert tuple(report.micro_batches for report in replayed.history) == plans
        assert [report.replays for report in replayed.history] == replays
        assert [report.num_samples for report in replayed.history] == [8, 12]
        clean = remembering(Step(), micro_batch=plans).fit()
        assert seen(replayed) == seen(clean)
        assert same(state_of(replayed), state_of(clean))

    def test_with_one_sample_there_is_no_smaller_plan(self) -> None:
        """What is there then, the window that did not fit left out, is good to go on from."""
        with simulated_memory("64MiB"):
            trainer = remembering(Step(*range(3, 100)), patience=0)
            with pytest.raises(NothingFitsError, match="training: a micro-batch of 1") as caught:
                trainer.fit()
        error = caught.value
        assert (error.phase, error.micro_batch, error.limit_bytes) == ("training", 1, 64 << 20)
        assert error.peak_bytes is not None
        assert 1000 < error.peak_bytes < 64 << 20
        clean = remembering(Step(), steps=1).fit()
        assert seen(trainer) == seen(clean)
        assert same(state_of(trainer), state_of(clean))
        assert all(p.grad is None for p in trainer.model.parameters())

    def test_one_sample_that_passes_a_limit_that_nobody_enforces(self) -> None:
        """Here no operation fails: that one sample is too many is measured in the first window's first trial."""

        def hungry(model: nn.Module, batch: Any) -> torch.Tensor:
            workspace = torch.zeros(1 << 20)
            return Step()(model, batch) + 0 * workspace.sum()

        with simulated_memory("64MiB"):
            trainer = remembering(hungry, memory_limit="1MiB", micro_batch="auto")
            torch.manual_seed(5)
            before = torch.default_generator.get_state()
            with pytest.raises(NothingFitsError) as caught:
                trainer.fit()
        error = caught.value
        assert (error.phase, error.micro_batch, error.limit_bytes) == ("training", 1, 1 << 20)
        assert error.peak_bytes is not None
        assert 4 << 20 < error.peak_bytes < 5 << 20
        assert torch.equal(torch.default_generator.get_state(), before)
        assert torch.equal(trainer.model.mean, torch.zeros(8))
        assert all(p.grad is None for p in trainer.model.parameters())
        assert same([*trainer.model.parameters()], [*Remembers().parameters()])

    def test_a_schedule_steps_once_a_window(self) -> None:
        schedules: list[LinearLR] = []
        steps: list[int] = []

        def schedule(optimizer: torch.optim.Optimizer, num_steps: int) -> LinearLR:
            schedules.append(decay(optimizer, num_steps))
            optimizer.register_step_post_hook(lambda *_: steps.append(schedules[0].last_epoch))
            return schedules[0]

        replayed = remembering(Step(1, 3, 9), micro_batch=8, epochs=2, lr_scheduler=schedule).fit()
        assert [report.replays for report in replayed.history] == [2, 1, 0, 0]
        assert steps == [0, 1, 2, 3]
        assert schedules[0].last_epoch == 4
        rates = [1e-3 * (1 - 0.9 * step / 4) for step in range(4)]
        assert [report.lr for report in replayed.history] == pytest.approx(rates)


class TestValidation:
    @strides(4)
    def test_an_oom_leaves_no_mark_on_training_nor_on_the_result(self, stride: int) -> None:
        """At operations of the first of two validations."""
        held_out = classes(7, torch.float64, seed=5)

        def drawing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs, targets) + 0 * torch.rand(())  # in eval mode too

        def make(callback: Callable[[Record], None] = lambda record: None) -> autoaccum.Trainer:
            return autoaccum.Trainer(
                noisy().double(),
                classes(11, torch.float64),
                effective_batch=6,
                micro_batch=3,
                loss_fn=drawing,
                epochs=2,
                validation_data=held_out,
                metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
                callbacks=[callback],
                device=DEVICE,
                progress=False,
            )

        def validated(result: FitResult) -> list[Validated]:
            return [event for event in result.events if isinstance(event, Validated)]

        spans: list[int] = []

        def callback(record: Record) -> None:
            if isinstance(record, Validated) or (isinstance(record, StepReport) and record.step == 2):
                spans.append(counter.operations)

        trainer = make(callback)
        with oom_at(None) as counter:
            clean = trainer.fit()
        expected = validated(clean)
        replayed = 0
        for operation in range(spans[0] + 1, spans[1] + 1, stride):
            trainer = make()
            with oom_at(operation):
                result = trainer.fit()
            failed = [(event.phase, event.step) for event in result.events if isinstance(event, OutOfMemory)]
            assert failed in ([("validation", 2)], [])
            assert seen(result) == seen(clean)
            assert same(state_of(result), state_of(clean)), f"operation {operation} left a mark"
            assert result.plan == clean.plan
            assert not any(isinstance(event, Replanned) for event in result.events)
            found = validated(result)
            assert [record.loss for record in found] == pytest.approx([e.loss for e in expected], rel=1e-12)
            assert [record.metrics for record in found] == [e.metrics for e in expected]
            assert [record.num_samples for record in found] == [7, 7]
            replayed += len(failed)
        print(f"{replayed} faults injected into validation, that of its first sample among them")
        assert replayed * stride > 25


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples that are drawn, from each of the generators that datasets draw from, every time that they are read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(8) + random.random() + float(np.random.rand())
        return index + 0.1 * noise, index % 3


class Stream:
    """An iterable that goes on where it was left, and counts what it gave."""

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self.yielded = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.yielded < self._num_batches:
            self.yielded += 1
            yield self.yielded + 0.1 * torch.randn(3, 8), torch.randint(0, 3, (3,))


@pytest.mark.device
class TestData:
    """A replay has the samples of the attempt that failed, to the bit, and the next window those that follow."""

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_random_augmentation_in_a_data_loader(self, shuffle: bool) -> None:
        def loader() -> Any:
            return torch.utils.data.DataLoader(Augmented(), batch_size=5, shuffle=shuffle, num_workers=0)

        replayed_step, clean_step = Step(1, 4), Step()
        replayed = remembering(replayed_step, loader(), micro_batch=8, epochs=2).fit()
        plans = tuple(report.micro_batches for report in replayed.history)
        assert plans == ((4, 4), (2, 2), (2, 2, 2, 2), (2, 2))
        clean = remembering(clean_step, loader(), micro_batch=plans, epochs=2).fit()
        assert same(state_of(replayed), state_of(clean))
        read = torch.cat(clean_step.batches)
        first_attempt, second_attempt = replayed_step.batches[0], replayed_step.batches[3]
        assert torch.equal(first_attempt, read[:8])
        assert torch.equal(second_attempt, read[8:12])
        assert torch.equal(torch.cat(replayed_step.batches[1:3] + replayed_step.batches[4:]), read)
        epochs = [rows[rows.mean(dim=1).argsort()] for rows in read.split(12)]
        assert (epochs[0] != epochs[1]).all(), "each epoch draws anew"

    def test_a_stateful_iterable(self) -> None:
        """What it gave for a window that fails is not asked of it again."""
        streams = Stream(7), Stream(7)
        replayed_step, clean_step = Step(1, 3, 9), Step()
        replayed = remembering(replayed_step, streams[0], micro_batch=8).fit()
        plans = tuple(report.micro_batches for report in replayed.history)
        assert [sum(plan) for plan in plans] == [8, 8, 5]
        assert [report.replays for report in replayed.history] == [2, 1, 0]
        clean = remembering(clean_step, streams[1], micro_batch=plans).fit()
        assert same(state_of(replayed), state_of(clean))
        assert (streams[0].yielded, replayed.num_samples) == (7, 21)
        committed = torch.cat(clean_step.batches)
        assert committed.mean(dim=1).round().tolist() == [float(batch) for batch in range(1, 8) for _ in range(3)]
