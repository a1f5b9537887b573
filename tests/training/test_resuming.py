"""Law 3: a run that was stopped after any of its windows ends bit-identical to the one that never was."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import autoaccum
from autoaccum.errors import StopTraining
from autoaccum.events import Notice, Planned, Resumed, StepReport, StepSkipped, Validated
from autoaccum.memory.clock import ManualClock
from autoaccum.testing import manual_clock, simulated_memory
from autoaccum.training.trainer import FitResult, Trainer
from tests.devices import DEVICE
from tests.models import classes, mlp, noisy, relative_error, wide

pytestmark = pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")

Make = Callable[[], dict[str, Any]]
"""() -> arguments of fit: all new, as in a new process."""


def fit(**options: Any) -> FitResult:
    defaults: dict[str, Any] = {
        "model": mlp(),
        "data": classes(40),
        "loss_fn": cross_entropy,
        "effective_batch": 8,
        "micro_batch": 3,
        "device": DEVICE,
        "progress": False,
        "cache": False,
    }
    if "training_step" in options:
        del defaults["loss_fn"]
    return autoaccum.fit(**{**defaults, **options})


def stop(record: Any) -> None:
    if isinstance(record, StepReport):
        raise autoaccum.StopTraining


def stopped_after_each_window(make: Make, directory: Path, most: int = 60) -> FitResult:
    """Each process trains one window, and the last one finds that nothing is left."""
    steps = -1
    for _ in range(most):
        disturb()
        result = fit(**make(), run_dir=directory, callbacks=[stop])
        if result.num_steps == steps:
            return result
        assert result.num_steps in (steps + 1, 1), "one window each"
        steps = result.num_steps
    raise AssertionError(f"not finished after {most} starts")


def disturb() -> None:
    """What a new process has not, and nothing may depend on."""
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def everything(result: FitResult) -> dict[str, Any]:
    """All that law 3 speaks of, by name; tensors as their bytes."""
    state = result.optimizer.state_dict()
    found: dict[str, Any] = {f"parameter {name}": p for name, p in result.model.named_parameters()}
    found |= {f"buffer {name}": b for name, b in result.model.named_buffers()}
    for number, entries in state["state"].items():
        found |= {f"optimizer {number} {name}": value for name, value in entries.items()}
    found |= {f"group {n}": group for n, group in enumerate(state["param_groups"])}
    found["history"] = [of_report(report) for report in result.history]
    found["validated"] = [of_event(event) for event in result.events if isinstance(event, Validated)]
    found["torch"] = torch.get_rng_state()
    found["numpy"] = np.random.get_state()[1].tolist()
    found["python"] = random.getstate()
    return {name: bits(value) for name, value in found.items()}


def of_report(report: StepReport) -> dict[str, Any]:
    return {
        name: repr(value)
        for name, value in dataclasses.asdict(report).items()
        if name not in ("seconds", "peak_bytes", "limit_bytes")
    }


def of_event(event: Any) -> dict[str, Any]:
    return {name: repr(value) for name, value in dataclasses.asdict(event).items() if name != "seconds"}


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().flatten().view(torch.uint8).tolist()
    return value


def assert_same(found: FitResult | dict[str, Any], expected: FitResult | dict[str, Any]) -> None:
    first, second = (r if isinstance(r, dict) else everything(r) for r in (found, expected))
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


# What is trained.


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs * self.scale, targets)


class Changing(nn.Module):
    """Buffers: one is written to, one replaced by a larger one, one there only after a forward, one none any more."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)
        self.register_buffer("grown", torch.zeros(1), persistent=persistent)
        self.register_buffer("late", None, persistent=persistent)
        self.register_buffer("early", torch.ones(1), persistent=persistent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.grown = torch.cat([self.grown, self.calls[None]])
            self.late = self.calls / 2 if self.late is None else self.late + 1
            self.early = None
        return self.net(inputs) * (1 + 0.01 * self.calls) + 0.001 * self.grown.sum() + 0.001 * self.late


def expanded() -> dict[str, Any]:
    model = mlp()
    model.register_buffer("same", torch.zeros(1).expand(5), persistent=False)
    return {"model": model}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(inputs).tanh()))


class InFloat32(torch.optim.Optimizer):
    """Momentum in more bits than the parameters have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                if p.grad is not None:
                    state["momentum"].mul_(0.9).add_(p.grad.float())
                    p.sub_((group["lr"] * state["momentum"]).to(p.dtype))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def steep(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Too much, at first, for the scale that float16 begins with."""
    return 1000 * cross_entropy(outputs, targets)


def bfloat16() -> dict[str, Any]:
    inputs, targets = classes(40)
    return {"model": mlp(torch.bfloat16), "data": (inputs.bfloat16(), targets), "optimizer": InFloat32}


TRAINED: dict[str, Make] = {
    "plain": lambda: {"lr": 0.01, "epochs": 2},
    "milestones": lambda: {
        "model": noisy(),
        "effective_batch": "8, 3:14, 5:6",
        "optimizer": momentum,
        "lr_scheduler": lambda optimizer, steps: OneCycleLR(optimizer, 0.2, steps),
    },
    "ramp by samples": lambda: {"effective_batch": "linear 4:16 over 60s", "epochs": 2, "optimizer": fused},
    "more by epochs": lambda: {"effective_batch": "8, 1e:16, 2e:32", "epochs": 3, "lr": 0.01},
    "noise scale": lambda: {"effective_batch": "noise 6:40 smoothing 0.5 patience 2", "epochs": 3, "lr": 0.01},
    "measured noise": lambda: {"noise_scale": True, "lr": 0.01},
    "fused": lambda: {"model": noisy(), "optimizer": fused, "epochs": 2},
    "lambda": lambda: {
        "optimizer": momentum,
        "lr_scheduler": lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / (2 * steps)),
    },
    "scaled": lambda: {"effective_batch": "8, 2:16", "lr_scaling": "sqrt", "base_batch": 8, "optimizer": momentum},
    "fp16": lambda: {"precision": "fp16", "optimizer": momentum},
    "fp16 that overflows": lambda: {"precision": "fp16", "optimizer": momentum, "loss_fn": steep},
    "bf16": lambda: {"precision": "bf16", "optimizer": momentum},
    "bfloat16 parameters": bfloat16,
    "clipped": lambda: {"clip_norm": 0.5, "optimizer": momentum},
    "loss with a parameter": lambda: {"loss_fn": Scaled(), "optimizer": momentum},
    "buffers": lambda: {"model": nn.Sequential(Changing(persistent=True)), "optimizer": momentum},
    "expanded buffers": expanded,
    "hidden buffers": lambda: {"model": Changing(persistent=False), "optimizer": momentum},
    "diverges": lambda: {"optimizer": lambda params: torch.optim.SGD(params, lr=1e38)},
    "tied": lambda: {"model": Tied(), "optimizer": fused},
}


def test_what_is_trained_does_what_it_is_there_for() -> None:
    whole = fit(**TRAINED["fp16 that overflows"]())
    skipped = [event.step for event in whole.events if isinstance(event, StepSkipped)]
    assert 2 in skipped
    assert whole.num_steps not in skipped
    assert math.isnan(fit(**TRAINED["diverges"]()).history[-1].loss)
    sizes = {report.effective_batch for report in fit(**TRAINED["noise scale"]()).history if report.epoch == 0}
    assert len(sizes) > 2


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript(tmp_path: Path) -> None:
    """Whose buffers are in no dict."""

    def make() -> dict[str, Any]:
        return {"model": torch.jit.trace(mlp(), torch.zeros(2, 8)), "optimizer": momentum}

    assert_same(stopped_after_each_window(make, tmp_path), everything(fit(**make())))


@pytest.mark.device(every=5)
@pytest.mark.parametrize("name", TRAINED)
def test_whatever_is_trained(name: str, tmp_path: Path) -> None:
    whole = everything(fit(**TRAINED[name]()))
    assert len(whole["history"]) >= 3
    assert_same(stopped_after_each_window(TRAINED[name], tmp_path), whole)


# What it is trained on.


class Samples(Dataset[Any]):
    """With augmentation, by the generators of torch, NumPy and Python."""

    def __init__(self) -> None:
        self.inputs, self.targets = classes(29)

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(8) * (random.random() + float(np.random.rand()))
        return self.inputs[index] + noise, self.targets[index]


class Texts(Samples):
    """Of different lengths."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1 + index * 7 % 11, 8), self.targets[index]


def pad(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return pad_sequence(list(inputs), batch_first=True), torch.stack(targets)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = noisy()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs.sum(dim=1))


class Stream(IterableDataset[Any]):
    """Draws what it yields: another stream in each epoch."""

    def __init__(self, dataset: Dataset[Any], batch: int | None = None) -> None:
        self.dataset = dataset
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(29).tolist()
        samples = (self.dataset[index] for index in order)
        if self.batch is None:
            yield from samples
            return
        while some := [sample for _, sample in zip(range(random.randint(2, self.batch)), samples, strict=False)]:
            yield tuple(map(torch.stack, zip(*some, strict=True)))


def weighted() -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=5, sampler=WeightedRandomSampler([1.0 + n for n in range(29)], 21))


READ: dict[str, Make] = {
    "dataset": lambda: {"data": Samples(), "epochs": 2},
    "drop_last": lambda: {"data": Samples(), "epochs": 2, "drop_last": True},
    "workers": lambda: {"data": Samples(), "epochs": 2, "num_workers": 1, "effective_batch": "11, 2:8"},
    "workers and lengths": lambda: {
        "model": Mean(),
        "data": Texts(),
        "collate_fn": pad,
        "num_workers": 1,
        "effective_batch": 12,
    },
    "sampler": lambda: {"data": weighted(), "epochs": 2},
    "sampler and workers": lambda: {
        "data": DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=1, drop_last=True),
        "effective_batch": 12,
        "epochs": 2,
    },
    "lengths": lambda: {"model": Mean(), "data": Texts(), "collate_fn": pad, "epochs": 2},
    "stream of samples": lambda: {"data": Stream(Samples()), "epochs": 2},
    "stream of lengths": lambda: {"model": Mean(), "data": Stream(Texts()), "collate_fn": pad, "epochs": 2},
    "stream of batches": lambda: {"data": DataLoader(Stream(Samples(), 6), batch_size=None), "steps": 8},
    "stream and workers": lambda: {"data": Stream(Samples()), "num_workers": 1, "effective_batch": 12},
    "list": lambda: {"data": [classes(n, seed=n) for n in (5, 7, 4, 11)], "epochs": 2},
    "steps": lambda: {"data": Samples(), "steps": 6},
    "samples": lambda: {"data": Samples(), "samples": 43},
    "samples and a schedule": lambda: {"samples": 90, "effective_batch": "linear 4:12 over 40s"},
}


@pytest.mark.device(every=6)
@pytest.mark.parametrize("name", READ)
def test_whatever_it_is_trained_on(name: str, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"model": noisy(), "optimizer": momentum, **READ[name]()}

    whole = everything(fit(**make()))
    assert len(whole["history"]) >= 3
    assert_same(stopped_after_each_window(make, tmp_path), whole)


# What else is part of a run.

VALIDATED: dict[str, Make] = {
    "after each epoch": lambda: {"epochs": 2},
    "after samples": lambda: {"epochs": 2, "validate_every": 16},
    "after samples that do not divide": lambda: {"epochs": 2, "validate_every": 13},
    "at the end": lambda: {"steps": 7},
}


@pytest.mark.parametrize("name", VALIDATED)
def test_validation_is_done_once_whenever_it_is_due(name: str, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"model": noisy(), "optimizer": momentum, "validation_data": classes(23, seed=7), **VALIDATED[name]()}

    whole = everything(fit(**make()))
    assert len(whole["validated"]) >= 1
    assert_same(stopped_after_each_window(make, tmp_path), whole)


@pytest.mark.parametrize("every", [1, 3, "epoch"])
def test_what_came_after_the_checkpoint_is_done_again(every: int | str, tmp_path: Path) -> None:
    """A process that dies after any window, with whatever checkpoint there is then."""

    def make() -> dict[str, Any]:
        return {
            "model": noisy(),
            "data": Samples(),
            "optimizer": momentum,
            "epochs": 2,
            "validation_data": classes(9),
            "validate_every": 16,
        }

    class Died(Exception):
        pass

    whole = everything(fit(**make()))
    for step in (1, 4, 8):
        place = tmp_path / str(step)

        def die(record: Any, step: int = step) -> None:
            if isinstance(record, StepReport) and record.step == step:
                raise Died

        with pytest.raises(Died):
            fit(**make(), run_dir=place, checkpoint_every=every, callbacks=[die])
        assert_same(fit(**make(), run_dir=place, checkpoint_every=every), whole)


@pytest.mark.weighted
@pytest.mark.device
def test_several_stops_in_one_history(tmp_path: Path) -> None:
    result = stopped_after_each_window(TRAINED["milestones"], tmp_path)
    resumed = [event for event in result.events if isinstance(event, Resumed)]
    assert [event.step for event in resumed] == list(range(1, result.num_steps + 1))
    assert [report.step for report in result.history] == list(range(1, result.num_steps + 1))
    assert len([event for event in result.events if isinstance(event, Notice) and "BatchNorm" in event.cause]) == 1


def penalised(model: nn.Module, batch: Any) -> torch.Tensor:
    """A sum beside which a term of the parameters alone stands."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum") + 0.1 * sum(
        p.square().sum() for p in model.parameters()
    )


@pytest.mark.weighted
def test_what_was_announced_is_not_announced_again(tmp_path: Path) -> None:
    def squared(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1]).square()

    def make() -> dict[str, Any]:
        return {"effective_batch": 64, "epochs": 4, "lr": 0.01, "training_step": squared}

    whole = [event for event in fit(**make()).events if isinstance(event, Notice)]
    result = stopped_after_each_window(make, tmp_path)
    notices = [event for event in result.events if isinstance(event, Notice) and "is finished" not in event.cause]
    assert notices == whole
    assert len(whole) == 2


# Plans.


def found(directory: Path | None, **options: Any) -> FitResult:
    """On a device with room for some 20 of 60 samples."""
    with simulated_memory("800KiB"):
        return fit(
            **{
                "model": wide(),
                "data": classes(240),
                "effective_batch": 60,
                "epochs": 3,
                "lr": 0.01,
                "micro_batch": "auto",
                "run_dir": directory,
                **options,
            }
        )


def assert_close(result: FitResult, expected: FitResult) -> None:
    for one, other in zip(result.model.parameters(), expected.model.parameters(), strict=True):
        assert relative_error(one.detach(), other.detach()) < 1e-4
    assert [r.loss for r in result.history] == pytest.approx([r.loss for r in expected.history], rel=1e-4)


@pytest.mark.parametrize("pace", [0.0, 0.01], ids=["larger ones are faster", "smaller ones are faster"])
@pytest.mark.parametrize(
    "step", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_a_search_goes_on_where_it_was(step: int, pace: float, tmp_path: Path, work_clock: ManualClock) -> None:
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        work_clock.advance(pace * len(outputs) ** 2)
        return cross_entropy(outputs, targets)

    whole = found(None, loss_fn=loss_fn)
    settled = next(event.step for event in whole.events if isinstance(event, Planned))

    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == step:
            raise autoaccum.StopTraining

    with simulated_memory("800KiB"):
        first = trainer(tmp_path, loss_fn=loss_fn, callbacks=[end])
        before = first.fit()
        second = trainer(tmp_path, loss_fn=loss_fn)
        second.fit()
    assert_close(found(tmp_path, loss_fn=loss_fn), whole)
    tried = [(trial.micro_batch, trial.peak_bytes) for trial in first._tuner.history]
    assert tried
    assert [(trial.micro_batch, trial.peak_bytes) for trial in second._tuner.history][: len(tried)] == tried
    assert len({size for size, _ in tried}) == len(tried), "nothing was tried twice"
    if before.num_steps >= settled:
        assert second._tuner.history == first._tuner.history
        assert not any(report.replays for report in second.history[step:])
    assert second._tuner.memory_model is not None
    assert not second._tuner.searching


def trainer(directory: Path, **options: Any) -> Trainer:
    return Trainer(
        wide(),
        classes(240),
        effective_batch=60,
        epochs=3,
        lr=0.01,
        device=DEVICE,
        progress=False,
        cache=False,
        run_dir=directory,
        **{"loss_fn": cross_entropy, **options},
    )


@pytest.mark.parametrize("options", [{"micro_batch": 5}, {"micro_batch": 60}, {"memory_limit": "500KiB"}])
def test_other_plans_after_a_resume_are_exact(options: dict[str, Any], tmp_path: Path) -> None:
    whole = found(None)

    def end(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == 5:
            raise autoaccum.StopTraining

    found(tmp_path, callbacks=[end])
    with simulated_memory("8MiB"):
        result = fit(
            **{
                "model": wide(),
                "data": classes(240),
                "effective_batch": 60,
                "epochs": 3,
                "lr": 0.01,
                "micro_batch": "auto",
                "run_dir": tmp_path,
                **options,
            }
        )
    assert_close(result, whole)
    assert result.history[6].micro_batches != whole.history[6].micro_batches


def test_a_lower_limit_is_heeded_from_the_first_window(tmp_path: Path) -> None:
    found(tmp_path, epochs=1)
    result = found(tmp_path, epochs=2, memory_limit="500KiB")
    assert not any(report.replays for report in result.history[4:])
    assert all(report.peak_bytes <= report.limit_bytes == 500 * 1024 for report in result.history[4:])


# Nothing that changes in a run is forgotten.

NOT_KEPT = {
    "OptimizerAttributes._of": "what each optimizer had before its first step",
    "Order._newest": "of the pass that runs; the next one begins where it was left",
    "Stepper._has_stepped": "whether a step of this process has ended well",
    "Strays.windows": "whose steps are watched: those of this process",
    # Of this process alone.
    "Trainer._callbacks": "those that were passed; what they keep is saved by Hooks",
    "Trainer._resumed": "an event of the process that goes on",
    "Trainer._ran": "told again by the reports that are kept",
    "Trainer._mark": "a reading of the clock",
    "Trainer._stop_reason": "why the first process ended",
    "Trainer._stopped_by": "the callback that ended the first process",
    "Validations.is_unsaved_best": "said to the checkpoint while it is written",
    "Saving._users": "those of this process",
    "Plans.next_look": "a reading of the clock",
    "Searching.gradient_bytes": "what the parameters take, asked for in each window of a search",
    "Plans.growing_from": "an event is worded by it",
    "Step._piece": "what runs at this moment",
    "Step._is_timed": "of the window that runs",
    "JoinableTransaction._has_totals": "of the window that runs",
    "Seeds._seeds": "a cache of constants",
    "History._fitted": "made again of the trials",
    "Trainer._wish": "why the first process ended",
    "JoinableTransaction.own_sizes": "of the window that runs",
    "Step.examining_seconds": "of the window that runs",
    "Examiner._number": "of the window that runs",
    "Examiner._sizes": "of the window that runs",
    "Examiner._shown": "of the window that runs",
    "Examiner._has_tried_joining": "whether to try is asked anew in each process",
    "Limit.bytes": "the limit of each process",
    "Limits.limit_bytes": "the limit of each process",
    "Limits.target_bytes": "follows from that",
    "Largest.refused_at": "for later runs of the same process",
    "Largest._passed_limit": "of readings of this process",
    "Validator._released_bytes": "a reading of this process",
    "Searching.start_bytes": "a reading of this process",
    "MeasuredNoise._number": "of the window that runs",
    "MeasuredNoise._is_wanted": "of the window that runs",
    # Begins anew, which costs time and changes nothing that is computed.
    "Fastest.timing": "a comparison of plans begins anew",
    "Fastest._timed_window": "goes with it",
    "Fastest._broken_off": "goes with it",
    "Fastest._not_full": "goes with it",
    "Fastest.checks": "goes with it",
    "Fastest.rises": "goes with it",
    # What only makes a run fast, or is read anew.
    "JoinableTransaction.scaler": "has a state_dict of its own, which is kept",
    "JoinableTransaction._nodes": "of the window that runs",
    "Examiner._way": "of the window that runs",
    "Examiner._short_way": "another process may have the memory that this one has not",
    "Examiner._short_bytes": "likewise",
    "Examiner._announce": "a function of each process",
    "Examiner._remembered_of": "of the window that is measured",
    "Step._was_examined": "of the window that runs",
    "Kinds._facts": "of the window that runs",
    "Kinds._shapes": "of the window that runs",
    "JoinableTransaction._tally": "of the window that runs",
    "JoinableTransaction._num_samples": "of the window that runs",
    "JoinableTransaction._sizes": "of the window that runs",
    "JoinableTransaction._losses": "of the window that runs",
    "JoinableTransaction._reductions": "of the window that runs",
    "JoinableTransaction._norms": "of the window that runs",
    "JoinableTransaction._shown": "of the window that runs",
    "JoinableTransaction._last": "found again in two windows, to the same bits",
    "JoinableTransaction.settled": "likewise",
    "Tally._num_samples": "of the window that runs",
    "Named._num_samples": "of the window that runs",
    "Tally._counts": "of the window that runs",
    "Tally.guess": "of the window that runs",
    "Tuner._last_cut": "a cache of the last cut",
    "Trials._done": "of the window that is validated",
    "Snapshot._copies": "taken before each window",
    "Snapshot._buffers": "taken before each window",
    "Snapshot._random": "taken before each window",
    "Attributes._contents": "taken before each window",
    "Moving._number": "what moves is looked for in the first windows anew",
    "Moving._marks": "the same",
}
"""What may differ between a run and one that was resumed where it stands, with the reason."""
READ_ANEW = {"Meter", "Pressure", "SimulatedMemory", "Retries", "RunDirectory", "PastOfRun", "ProgressBar", "Narrator"}
"""Classes whose state is readings of this process, or what the disk holds."""


def looks(value: Any, depth: int = 0) -> Any:
    """What shows that it changed: of plain values themselves, of objects the same a few levels down."""
    if value is None or isinstance(value, bool | int | float | str | bytes | type | torch.dtype | torch.device):
        return value
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return "function"
    if isinstance(value, torch.Tensor):
        return value.detach().clone().flatten().tolist()
    if depth > 5:
        return type(value).__name__
    if isinstance(value, dict):
        return {looks(k, depth + 1) if isinstance(k, str | int) else "": looks(v, depth + 1) for k, v in value.items()}
    if isinstance(value, set | frozenset):  # in whatever order
        return sorted(str(looks(entry, depth + 1)) for entry in value)
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        return [looks(entry, depth + 1) for entry in value]
    entries = dict(getattr(value, "__dict__", {}))
    entries.pop("_optimizer_step_pre_hooks", None)  # which PyTorch numbers over all optimizers of the process
    return type(value).__name__, {name: looks(entry, depth + 1) for name, entry in entries.items()}


def walk(owner: Any, found: dict[str, Any], seen: set[int]) -> dict[str, Any]:
    """All attributes of an object and of those of ours that it leads to, by class and name."""
    seen.add(id(owner))
    kind = type(owner).__name__
    attributes = dict(getattr(owner, "__dict__", {}))
    for base in type(owner).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(owner, name):
                attributes[name] = getattr(owner, name)
    for name, value in attributes.items():
        is_ours = type(value).__module__.startswith("autoaccum") and not isinstance(value, nn.Module)
        if is_ours and type(value).__name__ not in READ_ANEW:
            if id(value) not in seen:
                walk(value, found, seen)
        elif not is_ours:
            found[f"{kind}.{name}"] = looks(value)
    return found


def test_a_resumed_run_holds_what_the_first_one_held(tmp_path: Path) -> None:
    """Whatever changed in a run, each attribute of each object, is there again: or it has a reason not to be."""

    def made(*, steps: int, callback: Any) -> Trainer:
        return Trainer(
            wide(),
            classes(240),
            loss_fn=cross_entropy,
            effective_batch="30, 6:60",
            steps=steps,
            lr=0.01,
            precision="fp16",
            device=DEVICE,
            progress=False,
            noise_scale=True,
            validation_data=classes(20),
            validate_every=120,
            run_dir=tmp_path,
            checkpoint_every=1,
            callbacks=[callback],
        )

    with simulated_memory("800KiB") as device, manual_clock() as clock:
        held: list[dict[str, Any]] = []

        def stop(record: Any) -> None:
            if isinstance(record, StepReport):
                clock.advance(0.01 * len(record.micro_batches))
                if record.step == 9:
                    device.limit = 500 * 1024
                if record.step == 12:
                    raise StopTraining

        first = made(steps=14, callback=stop)
        at_first = walk(first, {}, set())
        first.fit()
        assert first.step == 12
        held.append(walk(first, {}, set()))

        def look(record: Any) -> None:
            if isinstance(record, Resumed):
                held.append(walk(second, {}, set()))

        device.limit = 800 * 1024
        second = made(steps=14, callback=look)
        second.fit()
    before, after = held
    changed = {name for name, value in before.items() if at_first.get(name) != value}
    assert {"Largest.weight", "Searching.is_on", "Pace.samples_seen", "Pace.epoch", "Validations.best_loss"} <= changed
    assert {
        "Step.number",
        "Plans.announced",
        "History.trials",
        "Smoothed.gradient_squared",
        "Examiner.is_checked",
    } <= changed
    forgotten = {name for name in changed if after.get(name) != before[name]} - set(NOT_KEPT)
    assert forgotten == set(), "keep it in its object's state_dict, or say why not"
