"""Law 4: any number of ranks, with any micro-batches, train what one does; what fails on one hangs no other."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, IterableDataset

import autoaccum
from autoaccum.distributed import gradients
from autoaccum.errors import AutoaccumError
from autoaccum.events import OutOfMemory, Replanned, Shared, StepReport, Validated
from autoaccum.step.across_ranks import SharedTransaction
from autoaccum.step.step import Step
from autoaccum.testing import simulated_memory
from tests.distributed.launching import check_ends, launch
from tests.faults import launches, oom_in_window, sizes, strides
from tests.processes import in_turn

pytestmark = in_turn
SAMPLES, WINDOW = 101, 23
"""Both are primes: shares differ, and the last window has fewer samples than four ranks have micro-batches."""


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def net(outputs: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs)).double()


def data(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (samples,), generator=generator)
    labels[::7] = -100
    return torch.randn(samples, 6, generator=generator, dtype=torch.float64), labels


def penalised(model: Any, batch: Any) -> torch.Tensor:
    penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
    return mse_loss(model(batch[0]), torch.ones(len(batch[0]), 5).double(), reduction="sum") + penalty


def masked(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    counts = batch[1] != -100
    outputs = model(batch[0])
    each = cross_entropy(outputs, batch[1], reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1), {
        "right": (outputs.argmax(1) == batch[1]).double().mean(),
        "rows": outputs.detach()[:, 0],
    }


class Texts(Dataset[Any]):
    """(tokens, labels) of lengths of their own."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        length = 1 + index * 7 % 11
        return torch.randn(length, 6, generator=generator).double(), torch.randint(0, 5, (length,), generator=generator)


def padded(samples: list[Any]) -> Any:
    inputs = nn.utils.rnn.pad_sequence([sample[0] for sample in samples], batch_first=True)
    return inputs, nn.utils.rnn.pad_sequence([sample[1] for sample in samples], batch_first=True, padding_value=-100)


def tokens(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


RUNS: dict[str, dict[str, Any]] = {
    "ignored targets, clipped, validated": {"loss_fn": cross_entropy, "clip_norm": 0.5, "validation_data": data(30)},
    "a sum and a penalty": {"training_step": penalised, "max_micro_batch": 4},
    "a mask, with outputs": {"training_step": masked},
    "sizes that are found": {"loss_fn": cross_entropy, "micro_batch": "auto", "effective_batch": 40, "epochs": 12},
    "counted by the user": {"loss_fn": cross_entropy, "num_items": lambda batch: (batch[1] != -100).sum()},
    "a schedule, with the noise measured": {"loss_fn": cross_entropy, "effective_batch": "6, 40:17", "noise_scale": True},
    "samples of many lengths": {
        "training_step": tokens, "data": Texts(), "collate_fn": padded, "effective_batch": 7, "epochs": 3,
    },
}  # fmt: skip


class Stream(IterableDataset[Any]):
    """Samples that nobody can count."""

    def __iter__(self) -> Any:
        return iter(zip(*data(), strict=True))


class StreamOfTexts(IterableDataset[Any]):
    """The same of samples of many lengths."""

    def __iter__(self) -> Any:
        return (Texts()[index] for index in range(40))


RUNS |= {
    "a stream": {"data": Stream(), "loss_fn": cross_entropy},
    "a stream of many lengths": {**RUNS["samples of many lengths"], "data": StreamOfTexts()},
}


class Trained(NamedTuple):
    """What a run leaves, that can be sent."""

    weights: torch.Tensor
    losses: list[float]
    outputs: list[dict[str, Any]]
    held_out: list[float]
    plans: list[tuple[int, ...]]
    replays: int


def trained(result: autoaccum.FitResult) -> Trained:
    reports = result.history
    return Trained(
        torch.cat([p.detach().flatten() for p in result.model.parameters()]),
        [report.loss for report in reports],
        [dict(report.outputs) for report in reports],
        [event.loss for event in result.events if isinstance(event, Validated)],
        [report.micro_batches for report in reports],
        sum(report.replays for report in reports),
    )


def fit(**options: Any) -> Trained:
    given: dict[str, Any] = {"model": net(), "data": data(), "effective_batch": WINDOW, "micro_batch": 4, "epochs": 6}
    given |= {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01), "device": "cpu"}
    return trained(autoaccum.fit(**{**given, "progress": False, "cache": False, **options}))


def all_runs() -> dict[str, Trained]:
    return {name: fit(**options) for name, options in RUNS.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


@sizes(3)
def test_ranks_train_what_one_does(size: int, alone: dict[str, Trained]) -> None:
    found = launch(all_runs, size)
    for name, one in alone.items():
        of_ranks = [of_rank[name] for of_rank in found]
        assert all(torch.equal(of_ranks[0].weights, each.weights) for each in of_ranks), "to the bit, on all of them"
        assert of_ranks[0].losses == of_ranks[-1].losses
        torch.testing.assert_close(of_ranks[0].weights, one.weights, rtol=1e-10, atol=1e-12)
        if "penalty" not in name:  # a sum's reported loss has a penalty as often as there are micro-batches
            assert of_ranks[0].losses == pytest.approx(one.losses, rel=1e-10)
        assert of_ranks[-1].held_out == pytest.approx(one.held_out, rel=1e-10)
        assert list(map(sum, of_ranks[0].plans)) == list(map(sum, one.plans))
        for mine, theirs in zip(of_ranks[-1].outputs, one.outputs, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(theirs[key]), rtol=1e-9, atol=1e-11)


class Moving(nn.Module):
    """Writes in its forward: statistics, a buffer that it replaces, and a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(6).double()
        self.teacher = net().requires_grad_(False)
        self.register_buffer("seen", torch.zeros(6).double())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + inputs.detach().mean(0)
            with torch.no_grad():
                for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    p.lerp_(q, 0.1)
        return self.net(self.norm(inputs) + self.seen) + 0.1 * self.teacher(inputs)  # type: ignore[no-any-return]


def moving() -> list[torch.Tensor]:
    model = Moving()
    fit(model=model, loss_fn=cross_entropy, drop_last=True)
    return [*model.state_dict().values()]


def test_what_forwards_write_to_is_the_same_on_all_ranks() -> None:
    first, *others = launch(moving, 3)
    for other in others:
        assert all(map(torch.equal, first, other))


def finished(place: str) -> tuple[int, int]:
    found = [fit(loss_fn=cross_entropy, run_dir=place, validation_data=data(30)) for _ in range(2)]
    return len(found[0].losses), len(found[1].losses)


def test_a_finished_run_may_be_called_again(tmp_path: Path) -> None:
    first, second = launch(finished, 2, str(tmp_path / "run"))
    assert first == (30, 30)
    assert second == (30, 0), "of an earlier process the first rank alone has the records"


def normed(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(nn.functional.batch_norm(model(batch[0]), None, None, training=True), batch[1])


def of_one_each() -> tuple[str, str]:
    return refused({"effective_batch": 3, "micro_batch": "auto", "training_step": normed, "verify": False})


def test_a_share_of_one_sample_that_cannot_be_computed_ends_all() -> None:
    first, second = launch(of_one_each, 2)
    assert second[0] == "effective_batch"
    assert "min_micro_batch=2" in second[1]
    assert first[0] == "RankError"


def by_function(other: int) -> tuple[str, str]:
    return refused({"effective_batch": lambda progress: 12 + other * rank(), "loss_fn": cross_entropy, "steps": 4,
                    "epochs": None})  # fmt: skip


@pytest.mark.parametrize(("other", "argument"), [(0, ""), (1, "effective_batch")])
def test_a_function_for_the_batch_has_to_ask_for_the_same(other: int, argument: str) -> None:
    assert [found for found, _ in launch(by_function, 2, other)] == [argument] * 2


def of_unequal_limits() -> tuple[Trained, int]:
    limit = (200 * 2**10, 85 * 2**10)[rank()] if "RANK" in os.environ else 200 * 2**10
    seen: list[Any] = []
    options: dict[str, Any] = {"micro_batch": "auto", "data": data(960), "effective_batch": 160, "epochs": 5}
    with simulated_memory(limit):
        found = fit(loss_fn=cross_entropy, callbacks=[seen.append], **options)
    return found, sum(isinstance(record, OutOfMemory) for record in seen)


def test_ranks_of_unequal_memory_have_plans_of_their_own() -> None:
    (one, _), *_ = launch(of_unequal_limits, 1)
    (large, _), (small, _) = launch(of_unequal_limits, 2)
    assert torch.equal(large.weights, small.weights)
    torch.testing.assert_close(large.weights, one.weights, rtol=1e-10, atol=1e-12)
    plan = max(large.plans)  # not the last, which is the fastest on a machine as busy as it was then
    assert sum(plan) == 160
    assert plan[0] >= 2 * plan[-1], "the second rank has a third of the memory beside the model"


def of_a_tight_rank() -> tuple[Trained, list[int], int]:
    """Of 40 samples at once, for which the second rank has no memory, as it finds out in the first window."""
    seen: list[Any] = []
    options: dict[str, Any] = {"micro_batch": 40, "data": data(960), "effective_batch": 160, "epochs": 2}
    with simulated_memory((200 * 2**10, 85 * 2**10)[rank()]):
        found = fit(loss_fn=cross_entropy, callbacks=[seen.append], verify=False, **options)
    replays = [record.replays for record in seen if isinstance(record, StepReport)]
    return found, replays, sum(isinstance(record, OutOfMemory) for record in seen)


def test_a_rank_with_less_memory_costs_the_others_no_window() -> None:
    (large, of_large, none), (small, of_small, some) = launch(of_a_tight_rank, 2)
    assert torch.equal(large.weights, small.weights)
    assert (sum(of_large), none) == (0, 0)
    assert sum(of_small) == some > 0
    assert large.plans[-1][:2] == (40, 40)
    assert max(large.plans[-1][2:]) < 40


def of_unequal_speed() -> tuple[Trained, list[Any]]:
    seen: list[Any] = []

    def slow(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.004 * len(batch[0]) * (1 + 3 * rank()))
        return cross_entropy(model(batch[0]), batch[1])

    found = fit(training_step=slow, balance="speed", verify=False, callbacks=[seen.append])
    return found, [record for record in seen if isinstance(record, Shared | Replanned)]


def test_a_slow_rank_computes_less_of_the_same_gradient() -> None:
    (one, told), *_ = launch(of_unequal_speed, 1)
    assert not told
    (first, told), (second, _) = launch(of_unequal_speed, 2)
    assert torch.equal(first.weights, second.weights)
    torch.testing.assert_close(first.weights, one.weights, rtol=1e-10, atol=1e-12)
    shared = [record for record in told if isinstance(record, Shared)]
    assert next(record.reason for record in told if isinstance(record, Replanned)).startswith(f"of {WINDOW} samples")
    before, *_, after = (tuple(map(sum, record.micro_batches)) for record in shared)
    assert before == (12, 11)
    assert after[0] > 2 * after[1], "it takes four times as long"
    assert shared[0].waited_seconds[0] > shared[0].waited_seconds[1]


class Faulty(NamedTuple):
    """A fault in a window of one rank."""

    rank: int
    operation: int | None
    window: int = 2


def with_fault(fault: Faulty, **options: Any) -> tuple[Trained, bool]:
    """Return what a run with a fault leaves, and whether this rank has come to the operation that fails."""
    given: dict[str, Any] = {"data": data(24), "effective_batch": 12, "micro_batch": 3, "epochs": 2}
    given |= {"clip_norm": 0.5} | (options or {"loss_fn": cross_entropy})
    with oom_in_window(fault.window, fault.operation or 0 if rank() == fault.rank else 0) as met:
        # Made anew for each run.
        return fit(**{**given, "model": given.get("model", net)()}), met.is_reached


def at_every_operation(
    of_rank: int, stride: int, first: int = 1, window: int = 2, **options: Any
) -> tuple[int, list[float]]:
    (clean, _), off, operation = with_fault(Faulty(0, None), **options), [], first
    while True:
        found, is_reached = with_fault(Faulty(of_rank, operation, window), **options)
        off.append(float((found.weights - clean.weights).norm() / clean.weights.norm()))
        # Which operation is the last is known to the rank that has them. Not every fault makes ranks replay: one in
        # what the first rank measures ends the measurement.
        if not any(_told(is_reached)):
            return operation, off
        operation += stride


def _told(value: bool) -> list[bool]:
    found = [False, False]
    torch.distributed.all_gather_object(found, value)
    return found


def at_every_operation_with(
    overlaps: bool, in_place: bool, of_rank: int, first: int, stride: int
) -> tuple[int, list[float]]:
    # For good: the process ends with the test. Without, gradients are added up after the last backward.
    SharedTransaction._comes_once = overlaps
    if in_place:  # as large ones are, by gloo, the largest in several parts, and small ones in buckets
        gradients._BUCKET_BYTES, gradients._LOT_BYTES = 400, 1
    return at_every_operation(of_rank, stride, first)


@strides(89)
@pytest.mark.parametrize("of_rank", [0, 1])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_an_oom_at_every_operation_of_a_rank_hangs_nobody(
    overlaps: bool, in_place: bool, of_rank: int, stride: int
) -> None:
    for first, every in launches(stride):
        for operations, off in launch(at_every_operation_with, 2, overlaps, in_place, of_rank, first, every):
            assert operations > 90
            assert max(off) < 1e-12


@strides(53)
@pytest.mark.parametrize("of_rank", [0, 1])
def test_what_is_agreed_on_in_the_first_window_holds_on_a_rank_that_has_run_out_after_it(
    of_rank: int, stride: int
) -> None:
    for first, every in launches(stride):
        for operations, off in launch(at_every_operation, 2, of_rank, every, first, 1):
            assert operations > 90
            assert max(off) < 1e-12


def failing_of_one(model: Any, batch: Any) -> torch.Tensor:
    """A loss that raises for one sample."""
    if len(batch[0]) == 1:
        torch.ones(2) @ torch.ones(3)
    return cross_entropy(model(batch[0]), batch[1])


def of_one_sample() -> Trained:
    return fit(
        micro_batch=1, effective_batch=16, data=data(64), epochs=1, training_step=failing_of_one, accumulate="weighted"
    )


def test_the_fewest_samples_are_those_that_all_ranks_have_heard_of() -> None:
    first, second = launch(of_one_sample, 2)
    assert torch.equal(first.weights, second.weights)
    assert first.losses == second.losses
    assert min(map(min, first.plans)) == 2


def without_samples() -> str:
    """On a rank without samples, which has no memory for what it hears of the other one."""
    run, count = Step.run, 0

    class Never(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(word in str(func) for word in ("zeros", "empty", "new_")):
                raise torch.OutOfMemoryError("none left")
            return func(*args, **(kwargs or {}))

    def faulty(self: Step, given: Any, plan: Any = None) -> Any:
        nonlocal count
        count += 1
        with Never() if (rank(), count) == (1, 2) else nullcontext():
            return run(self, given, plan)

    Step.run = faulty  # type: ignore[method-assign]
    return refused({"effective_batch": 1, "micro_batch": 1, "loss_fn": cross_entropy, "epochs": 1, "patience": 0.0})[1]


def test_a_rank_without_samples_that_lacks_memory_says_so() -> None:
    first, second = launch(without_samples, 2)
    assert "memory ran out while other ranks told of their samples" in second
    assert "MemoryLimitError" in first


def failing(what: str) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank() == 1 and calls == 12:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such token") if what == "an error" else torch.OutOfMemoryError("CUDA out of memory.")
        if rank() == 1 and calls > 12 and what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cross_entropy(model(batch[0]), batch[1])

    calls, started = 0, time.monotonic()
    try:
        fit(training_step=loss, patience=0.0, verify=False)
    except Exception as error:
        text = f"{error}"
        return type(error).__name__, text, getattr(error, "rank", None), time.monotonic() - started
    return None


@pytest.mark.parametrize(
    ("what", "own", "of_others"),
    [
        ("an error", ("ValueError", "no such token"), "ValueError: no such token"),
        ("memory", ("NothingFitsError", ""), "NothingFitsError"),
        ("killed", None, "another rank has ended"),
    ],
)
def test_what_ends_one_rank_ends_all_of_them_with_its_reason(what: str, own: Any, of_others: str) -> None:
    check_ends(launch(failing, 3, what), own, of_others)


def stopping(what: str) -> tuple[int, str]:
    ended: list[Any] = []

    def stop(record: Any) -> None:
        ended.append(record)
        if isinstance(record, StepReport) and record.step == 4 and rank() == 1:
            if what == "a callback":
                raise autoaccum.StopTraining
            os.kill(os.getpid(), signal.SIGINT)

    fit(loss_fn=cross_entropy, callbacks=[stop])
    return max(record.step for record in ended if isinstance(record, StepReport)), ended[-1].reason


@pytest.mark.parametrize(("what", "reason"), [("a callback", "stopped"), ("a signal", "interrupted")])
def test_what_stops_one_rank_stops_all_after_the_same_window(what: str, reason: str) -> None:
    assert launch(stopping, 2, what) == [(4, reason)] * 2


def signalled() -> tuple[int, bool]:
    calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank() == 1 and calls == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(model(batch[0]), batch[1])

    result = autoaccum.fit(
        net(), data(), training_step=loss, effective_batch=30, micro_batch=15, epochs=40, lr=0.1, verify=False,
        device="cpu", progress=False, cache=False,
    )  # fmt: skip
    return result.num_steps, result.events[-1].reason == "interrupted"


def test_a_signal_stops_all_ranks_where_no_callback_listens() -> None:
    """It is told with the window that it came in."""
    (steps, is_interrupted), other = launch(signalled, 2)
    assert 12 <= steps < 20
    assert is_interrupted
    assert other == (steps, True)


def resumed(place: str, until: int | None) -> Trained:
    def stop(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == until:
            raise autoaccum.StopTraining

    model = net()
    model.append(nn.Dropout(0.2))
    options: dict[str, Any] = {"callbacks": [stop]} if until else {}
    return fit(model=model, loss_fn=cross_entropy, run_dir=place, checkpoint_every=2, **options)


def test_a_run_of_ranks_goes_on_from_the_first_ones_checkpoint(tmp_path: Path) -> None:
    whole = launch(resumed, 2, str(tmp_path / "whole"), None)
    launch(resumed, 2, str(tmp_path / "parts"), 7)
    parts = launch(resumed, 2, str(tmp_path / "parts"), None)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.weights, other.weights)
    assert len(list(tmp_path.glob("*/records.jsonl"))) <= 2


def refused(options: dict[str, Any]) -> tuple[str, str]:
    try:
        fit(**options)
    except AutoaccumError as error:
        return getattr(error, "argument", type(error).__name__), str(error)
    return "", ""


def other_data() -> tuple[str, str]:
    return refused({"data": data(SAMPLES + rank()), "loss_fn": cross_entropy})


def test_ranks_that_would_train_something_else_are_refused() -> None:
    for argument, text in launch(other_data, 2):
        assert argument == "data"
        assert "101 samples" in text


def without_data() -> tuple[str, str, float]:
    started = time.monotonic()
    found = refused({"data": data() if rank() == 0 else (torch.ones(2, 6), torch.ones(3)), "loss_fn": cross_entropy})
    return *found, time.monotonic() - started


def test_what_ends_one_rank_before_the_first_window_ends_all() -> None:
    first, second = launch(without_data, 2)
    assert second[0] == "RaggedBatchError"
    assert first[0] == "RankError"
    assert "rank 1 has failed: RaggedBatchError" in first[1]
    assert first[2] < 60


class SplitByRank(IterableDataset[Any]):
    """Other samples on each rank, as a stream for DistributedDataParallel has them."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __iter__(self) -> Any:
        inputs, labels = data()
        if self.what == "samples":
            return iter(list(zip(inputs, labels, strict=True))[rank() :: 2])
        return iter(zip(inputs[: 92 - rank()], labels[: 92 - rank()], strict=True))


def of_another_stream(what: str) -> tuple[str, str]:
    return refused({"data": SplitByRank(what), "loss_fn": cross_entropy, "shuffle": False})


@pytest.mark.parametrize("what", ["samples", "their number"])
def test_a_stream_that_differs_between_ranks_is_refused_on_all_of_them(what: str) -> None:
    for argument, text in launch(of_another_stream, 2, what):
        assert argument == "data"
        assert "do not split it by rank" in text
