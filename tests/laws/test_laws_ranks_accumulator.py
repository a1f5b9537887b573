"""Law 4 for loops of one's own: ranks that pass a part of a batch each step on the gradient of the joined batch."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import autoaccum
from autoaccum import Accumulator
from autoaccum.errors import ArgumentError, AutoaccumError, RankError
from autoaccum.events import Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.distributed.launching import TIMEOUT, check_ends, launch
from tests.faults import strides
from tests.laws.test_laws_ranks import Moving, Texts, data, fit, masked, net, padded, penalised, rank, tokens
from tests.processes import in_turn

pytestmark = in_turn
BATCHES = ((11, 4, 9), (5, 0, 18), (1, 7, 7), (8, 8, 7), (0, 3, 2), (6, 6, 6))
"""Samples of each rank, in one step after the other; of two ranks the second has those of the third, too."""


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def parts_of(batch: Any, sizes: Any) -> list[Any]:
    """Cut a batch into what ranks are given: rows of tensors, or some of a list of samples."""
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    places = list(itertools.pairwise(starts))
    if isinstance(batch, list):
        return [batch[start:stop] for start, stop in places]
    return [tuple(tensor[start:stop] for tensor in batch) for start, stop in places]


def given(step: int, batch: Any) -> Any:
    """Return what this rank is given of the batch of a step."""
    sizes = BATCHES[step % len(BATCHES)]
    if world() == 1:
        return batch
    together = {2: (sizes[0], sizes[1] + sizes[2]), 3: sizes}[world()]
    return parts_of(batch, together)[rank()]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all of the batch of a step, with a third of the targets ignored."""
    size = sum(BATCHES[step % len(BATCHES)])
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 5, (size,), generator=generator)
    labels[step % 3 :: 3] = -100
    return torch.randn(size, 6, generator=generator, dtype=torch.float64), labels


class Left(NamedTuple):
    """What a loop leaves, that can be sent."""

    weights: torch.Tensor
    losses: list[float]
    norms: list[float]
    outputs: list[dict[str, torch.Tensor]]
    sizes: list[tuple[int, ...]]


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loop(
    *, steps: int = 8, model: nn.Module | None = None, by: str = "step", samples: Any = None, **options: Any
) -> Left:
    """Step through the batches; by ``backward`` with a step of the loop's own where that is asked for."""
    model = model or net()
    make = options.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    optimizer = make(model.parameters())
    accumulator = Accumulator(model, optimizer, **{"micro_batch": 3, "loss_fn": cross_entropy, **options})
    losses, norms, outputs, sizes = [], [], [], []
    for step in range(steps):
        batch = given(step, samples[: sum(BATCHES[step % len(BATCHES)])] if samples else batch_of(step))
        losses.append(float(getattr(accumulator, by)(batch)))
        if by == "backward":
            optimizer.step()
        norms.append(-1.0 if accumulator.grad_norm is None else float(accumulator.grad_norm))
        outputs.append({name: torch.as_tensor(value).clone() for name, value in accumulator.outputs.items()})
        sizes.append(accumulator.micro_batches)
    return Left(weights_of(model), losses, norms, outputs, sizes)


TEXTS = [Texts()[index] for index in range(40)]
LOOPS: dict[str, dict[str, Any]] = {
    "ignored targets, clipped": {"clip_norm": 0.5},
    "by backward": {"by": "backward", "clip_norm": 0.5},
    "a sum and a penalty": {"loss_fn": None, "training_step": penalised},
    "a mask, with outputs": {"loss_fn": None, "training_step": masked},
    "sizes that are found": {"micro_batch": "auto", "steps": 12},
    "counted by the user": {"num_items": lambda batch: (batch[1] != -100).sum()},
    "a sum, as is said": {
        "loss_fn": lambda outputs, targets: cross_entropy(outputs, targets, reduction="sum"), "reduction": "sum",
    },
    "a sum over what some count none of": {
        "loss_fn": lambda outputs, targets: cross_entropy(outputs, targets.clamp(min=0), reduction="sum"),
        "reduction": "sum", "num_items": lambda batch: (batch[1] == 1).sum(),
    },
    "samples of many lengths": {"loss_fn": None, "training_step": tokens, "collate_fn": padded, "samples": TEXTS},
    "a closure": {"optimizer": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3), "steps": 4},
}  # fmt: skip


def all_loops() -> dict[str, Left]:
    return {name: loop(**options) for name, options in LOOPS.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Left]:
    return launch(all_loops, 1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_step_on_the_gradient_of_the_joined_batch(size: int, alone: dict[str, Left]) -> None:
    found = launch(all_loops, size)
    for name, one in alone.items():
        first, *others = (of_rank[name] for of_rank in found)
        assert all(torch.equal(first.weights, other.weights) for other in others), "to the bit, on all of them"
        assert all(first.losses == other.losses and first.norms == other.norms for other in others)
        tolerance = 1e-7 if name == "a closure" else 1e-10  # which computes gradients where gradients have led it
        torch.testing.assert_close(first.weights, one.weights, rtol=tolerance, atol=1e-2 * tolerance)
        assert first.norms == pytest.approx(one.norms, rel=tolerance)
        if "penalty" not in name:  # a sum's reported loss has a penalty as often as there are micro-batches
            assert first.losses == pytest.approx(one.losses, rel=tolerance)
        assert list(map(sum, first.sizes)) == list(map(sum, one.sizes))
        for mine, theirs in zip(others[-1].outputs, one.outputs, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                torch.testing.assert_close(value, theirs[key], rtol=1e-9, atol=1e-11)


def begun_apart() -> Left:
    """Begin with weights, buffers and moments that only the first rank is to keep."""
    model = Moving()
    for p in model.parameters():
        p.data.add_(0.1 * rank())
    model.norm.running_mean.add_(rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank() == 1:  # of other moments than the first one has
        model(batch_of(0)[0]).sum().backward()
        optimizer.step()
    accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=3)
    losses = [float(accumulator.step(given(step, batch_of(step)))) for step in (0, 3, 5)]
    state = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    moments = torch.cat([entry["exp_avg"].flatten() for entry in optimizer.state_dict()["state"].values()])
    return Left(torch.cat([state, moments]), losses, [], [], [])


def test_ranks_begin_as_the_first_and_keep_what_forwards_write_to_the_same() -> None:
    (one,) = launch(begun_apart, 1)
    for other in (found := launch(begun_apart, 2)):
        assert torch.equal(other.weights, found[0].weights)
        assert other.losses == found[0].losses
        # Statistics are those of micro-batches, which are others than of one process: of the first step they are none.
        assert other.losses[0] == pytest.approx(one.losses[0], abs=0.2)


def in_half_precision() -> tuple[Left, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=cross_entropy, micro_batch=3, precision="fp16",
        clip_norm=0.5,
    )  # fmt: skip
    losses = []
    for step in range(6):
        inputs, labels = batch_of(step)
        # Only the second rank, where there is one, has what overflows.
        inputs[-1, 0] = 1e30 if step == 3 else 1.0
        labels[-1] = 1
        losses.append(float(accumulator.step(given(step, (inputs.float(), labels)))))
    scaler = accumulator._step.transaction.scaler
    assert scaler is not None
    return Left(weights_of(model), losses, [], [], []), scaler.get_scale()


def test_ranks_skip_the_same_steps_in_half_precision() -> None:
    ((one, scale),) = launch(in_half_precision, 1)
    (first, of_first), (second, of_second) = launch(in_half_precision, 2)
    assert torch.equal(first.weights, second.weights)
    assert of_first == of_second == scale
    assert scale < 2.0**16, "the step that overflowed has halved it"
    torch.testing.assert_close(first.weights, one.weights, rtol=1e-2, atol=1e-3)


class Faulty(NamedTuple):
    """A step of one rank in which memory runs out at an operation."""

    rank: int
    operation: int | None


def with_fault(fault: Faulty) -> tuple[torch.Tensor, bool]:
    """Return the weights, and whether the operation was reached; what is tried again at once leaves no event."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=3, clip_norm=0.5)
    is_met = False
    for step in (0, 3):
        # Read before, for what the user's own loop does is no part of a window.
        batch = given(step, batch_of(step))
        if step == 3 and fault.operation is not None and rank() == fault.rank:
            accumulator._step.apply, apply = _without_fault, accumulator._step.apply  # type: ignore[method-assign]
            with oom_at(fault.operation) as reached:
                accumulator.backward(batch)
            is_met = reached.operations >= fault.operation
            accumulator._step.apply = apply  # type: ignore[method-assign]
        else:
            accumulator.backward(batch)
        optimizer.step()
    return weights_of(model), is_met


def _without_fault(*_: Any) -> bool:
    raise AssertionError("backward does not step")


def at_every_operation(of_rank: int, stride: int) -> tuple[int, list[float]]:
    (clean, _), off, operation = with_fault(Faulty(0, None)), [], 1
    while True:
        weights, met = with_fault(Faulty(of_rank, operation))
        off.append(float((weights - clean).norm() / clean.norm()))
        found = [False, False]
        torch.distributed.all_gather_object(found, met)
        if not any(found):
            return operation, off
        operation += stride


@strides(71)
@pytest.mark.parametrize("of_rank", [0, 1])
def test_an_oom_at_every_operation_of_a_rank_hangs_nobody(of_rank: int, stride: int) -> None:
    for operations, off in launch(at_every_operation, 2, of_rank, stride):
        assert operations > 60
        assert max(off) < 1e-12


def of_unequal_limits() -> tuple[Left, int]:
    limit = (400 * 2**10, 32 * 2**10)[rank()] if world() > 1 else 400 * 2**10
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with simulated_memory(limit):
        accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy)
        for step in range(6):
            inputs, labels = data(240)
            half = slice(None) if world() == 1 else slice(rank() * 120, rank() * 120 + 120)
            accumulator.step((inputs[half] + step, labels[half]))
    return Left(weights_of(model), [], [], [], [accumulator.micro_batches]), 0


def test_ranks_of_unequal_memory_have_plans_of_their_own() -> None:
    ((one, _),) = launch(of_unequal_limits, 1)
    (large, _), (small, _) = launch(of_unequal_limits, 2)
    assert torch.equal(large.weights, small.weights)
    torch.testing.assert_close(large.weights, one.weights, rtol=1e-10, atol=1e-12)
    (plan,) = large.sizes
    assert sum(plan) == 240
    assert plan[0] >= 2 * plan[-1], "the second rank has a twelfth of the memory"


def failing(what: str) -> Any:
    calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if rank() == 1 and calls == 12:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "an error":
                raise ValueError("no such token")
        if rank() == 1 and calls >= 12 and what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cross_entropy(model(batch[0]), batch[1])

    started = time.monotonic()
    model = net()
    options: dict[str, Any] = {"training_step": loss, "patience": 0.0, "verify": False, "micro_batch": 3}
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), **options)
    try:
        for step in range(30):
            if what == "ended" and rank() == 1 and step == 3:
                return "ended", "", None, 0.0
            batch = given(0, batch_of(0))
            if what == "a batch" and rank() == 1 and step == 3:
                batch = (batch[0], batch[1][:-1])
            accumulator.step(batch)
    except Exception as error:
        found = type(error).__name__, f"{error}", getattr(error, "rank", None), time.monotonic() - started
        with pytest.raises(RankError):  # at once, and on whatever rank
            accumulator.step(given(0, batch_of(0)))
        return found
    return None


@pytest.mark.parametrize(
    ("what", "own", "of_others"),
    [
        ("an error", ("ValueError", "no such token"), "ValueError: no such token"),
        ("memory", ("NothingFitsError", ""), "NothingFitsError"),
        ("a batch", ("RaggedBatchError", ""), "RaggedBatchError"),
        ("ended", ("ended", ""), "another rank has ended"),
        ("killed", None, "another rank has ended"),
    ],
)
def test_what_ends_one_rank_ends_all_of_them_with_its_reason(what: str, own: Any, of_others: str) -> None:
    check_ends(launch(failing, 3, what), own, of_others)


def refused(what: str) -> tuple[str, str, str]:
    options: dict[str, Any] = {"loss_fn": cross_entropy, "micro_batch": 3}
    model, other = net(4 + rank() if what == "another model" else 5), net()
    if what == "one sample each":
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).double()
        options |= {"micro_batch": "auto", "accumulate": "weighted"}
    if what == "another norm":
        options["clip_norm"] = 1.0 + rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        accumulator = Accumulator(model, optimizer, **options)
        second = Accumulator(other, torch.optim.SGD(other.parameters(), 0.1), loss_fn=cross_entropy)
        if what == "another of two" and rank() == 1:
            accumulator = second
        for step in range(3):
            batch = given(3, batch_of(3))
            if what == "nothing" and step:
                batch = (batch[0][:0], batch[1][:0])
            if what == "one sample each" and step:
                batch = (batch[0][:1], batch[1][:1].clamp(min=0))
            if what == "another rate" and step:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank())
            (accumulator.backward if what == "another call" and rank() else accumulator.step)(batch)
    except AutoaccumError as error:
        return type(error).__name__, getattr(error, "argument", ""), str(error)
    return "", "", ""


REFUSED = {
    "another model": ("model", "what rank 0 was given"),
    "another norm": ("clip_norm", "what rank 0 was given, 1.0"),
    "another rate": ("optimizer", "lr=0.1 of group 0 as on rank 0"),
    "another call": ("ranks", "step 1 of Accumulator"),
    "another of two": ("ranks", "step 1 of Accumulator"),
    "nothing": ("batch", "no rank was given any"),
    "nothing of the kind": ("", ""),
}
"""By what differs between the ranks: the argument that is named, and what is said."""


def refused_one_by_one() -> list[tuple[str, str, str]]:
    return [refused(what) for what in REFUSED]


def test_what_would_take_ranks_apart_is_refused_on_all_of_them() -> None:
    for found in launch(refused_one_by_one, 2):
        for (_, argument, said), (expected, text) in zip(found, REFUSED.values(), strict=True):
            assert argument == expected
            assert text in said


def test_a_part_of_one_sample_that_cannot_be_computed_ends_all() -> None:
    found = launch(refused, 2, "one sample each")
    assert {name for name, _, _ in found} <= {"ArgumentError", "RankError"}
    assert any(argument == "batch" and "two samples for each rank" in text for _, argument, text in found)


def coupled(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return mse_loss(outputs, outputs.mean(0, keepdim=True).detach().expand_as(outputs))


def measured(kind: str, small: bool) -> tuple[list[str], list[str]]:
    """Return the hypotheses that were measured, and what was said, where rank 0 has one sample at first or never."""
    options: dict[str, Any] = {"training_step": coupled} if kind == "coupled" else {"loss_fn": cross_entropy}
    model, options["accumulate"] = net(), "weighted"
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=3, **options)
    for step in range(6):
        inputs, labels = batch_of(3)
        of_first = 1 if small or step < 2 else 10
        part = slice(0, of_first) if rank() == 0 else slice(of_first, None)
        accumulator.step((inputs[part], labels.clamp(min=0)[part]))
    events = accumulator.events
    return [event.hypothesis for event in events if isinstance(event, Verified) and event.passed], [
        getattr(event, "cause", "") for event in events if hasattr(event, "cure")
    ]


LOOKS = {("a mean", False): (True, 0), ("coupled", False): (False, 1), ("a mean", True): (False, 1)}
"""By the loss, and whether rank 0 has one sample each time: whether a measurement has passed, and how much was said."""


def measured_one_by_one() -> list[tuple[list[str], list[str]]]:
    return [measured(kind, small) for kind, small in LOOKS]


def test_the_first_rank_measures_on_what_it_was_given() -> None:
    first, second = launch(measured_one_by_one, 2)
    assert first == second, "all of them are told"
    for (hypotheses, said), (has_passed, how_often) in zip(first, LOOKS.values(), strict=True):
        assert bool(hypotheses) == has_passed
        assert len(said) == how_often


CURES = {
    ("DistributedDataParallel", "data"): ("model", "model.module"),
    ("DistributedDataParallel", "Accumulator"): ("model", "model.module"),
    ("fully_shard", "Accumulator"): ("model", "Pass it to fit"),
    ("SyncBatchNorm", "data"): ("model", "Leave out convert_sync_batchnorm"),
    ("SyncBatchNorm", "Accumulator"): ("model", "Leave out convert_sync_batchnorm"),
    ("DistributedSampler", "data"): ("data", "pass the DataLoader with shuffle="),
    ("DistributedSampler", "validation_data"): ("validation_data", "pass the DataLoader with shuffle="),
    ("DistributedSampler", "Accumulator"): ("", ""),  # of which each rank has to have its own part
    ("a plain DataLoader", "data"): ("", ""),
}
"""By what is made for other ways to train on several ranks, and where it is passed: the argument, and the cure."""


def begun_one_by_one() -> list[tuple[str, str]]:
    torch.distributed.init_process_group("gloo")
    return [begun(what, by) for what, by in CURES]


def begun(what: str, by: str) -> tuple[str, str]:
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    rows: Any = TensorDataset(*data(24))
    loader: Any = DataLoader(rows, 4)
    if what == "DistributedDataParallel":
        model = nn.parallel.DistributedDataParallel(model)
    if what == "fully_shard":
        fully_shard(model)
    if what == "SyncBatchNorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if what == "DistributedSampler":
        loader = DataLoader(rows, 4, sampler=DistributedSampler(rows))
    try:
        if by == "Accumulator":
            accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=cross_entropy)
            for batch in loader:
                accumulator.step(batch)
        else:
            options: dict[str, Any] = {"data": data(24), by: loader, "progress": False, "cache": False}
            autoaccum.fit(model, **options, effective_batch=8, loss_fn=cross_entropy, device="cpu")
    except ArgumentError as error:
        return error.argument, f"{error}"
    return "", ""


def test_what_is_made_for_other_ways_is_refused_with_its_cure() -> None:
    for of_rank in launch(begun_one_by_one, 2):
        for (found, text), (argument, cure) in zip(of_rank, CURES.values(), strict=True):
            assert found == argument
            assert cure in text


def compiled() -> torch.Tensor:
    return fit(loss_fn=cross_entropy, compile=world() > 1, data=data(46), epochs=1).weights


def read_by_workers() -> torch.Tensor:
    inputs, labels = data(46)
    rows = [(inputs[index], labels[index]) for index in range(46)]
    return fit(loss_fn=cross_entropy, data=Rows(rows), num_workers=2 if world() > 1 else 0, epochs=2).weights


class Rows(Dataset[Any]):
    """A dataset that is not held as tensors, so that workers read it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@pytest.mark.slow
@pytest.mark.parametrize("function", [compiled, read_by_workers])
def test_ranks_train_the_same_compiled_and_with_workers(function: Any) -> None:
    (one,) = launch(function, 1)
    first, second = launch(function, 2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, one, rtol=1e-10, atol=1e-12)


RECIPE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss


def recipe():
    torch.manual_seed(0)
    data = torch.randn(24, 3, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    return {"model": nn.Linear(3, 1).double(), "data": data, "loss_fn": mse_loss, "effective_batch": 10}
"""


def test_the_command_under_torchrun_prints_once(tmp_path: Path) -> None:
    place = tmp_path / "recipe.py"
    place.write_text(RECIPE)
    fit = ["-m", "autoaccum", "fit", str(place), "--json", "--epochs", "2", "--device", "cpu"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for launcher in (torchrun, []):
        command = [sys.executable, *launcher, *fit]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment(), check=False)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))  # one document, and nothing beside it
    together, alone = found
    losses = [[report["loss"] for report in document["history"]] for document in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert len(losses[0]) == 6
    assert len(together["plan"]["ranks"]) == 2
    assert sum(map(sum, together["plan"]["ranks"])) == sum(map(sum, alone["plan"]["ranks"])) == 10


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
