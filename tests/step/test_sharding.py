"""Law 4 for models that FSDP2 shards: ``fit`` trains what one process does, and no failure of a rank hangs another."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.distributed.fsdp import is_distributed
from autoaccum.distributed.group import join
from autoaccum.errors import AutoaccumError
from autoaccum.events import StepReport
from autoaccum.step.meter import Meter
from autoaccum.step.step import Step
from autoaccum.testing import oom_at, simulated_memory
from tests.distributed.launching import launch
from tests.distributed.test_fsdp import data, net, rank, shard
from tests.faults import launches, strides
from tests.processes import in_turn

pytestmark = in_turn


class Trained(NamedTuple):
    """What a run leaves."""

    weights: torch.Tensor
    losses: list[float]
    norms: list[float | None]
    plans: list[tuple[int, ...]]
    replays: int


def trained(shards: bool, wanted: dict[str, Any]) -> Any:
    model = net()
    if shards:
        if "RANK" in os.environ:
            join(torch.device("cpu"))
        shard(model, **wanted.pop("how", {}))
    given: dict[str, Any] = {"model": model, "data": data(47), "effective_batch": 13, "epochs": 3, "micro_batch": 3}
    given |= {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01), "device": "cpu"}
    result = autoaccum.fit(**{**given, "loss_fn": cross_entropy, "progress": False, "cache": False, **wanted})
    return outcome_of(model, result)


def outcome_of(model: nn.Module, result: Any) -> Any:
    weights = [p.full_tensor() if is_distributed(p) else p for p in model.parameters()]  # type: ignore[attr-defined]
    reports = result.history
    return Trained(
        torch.cat([p.detach().flatten() for p in weights]),
        [report.loss for report in reports],
        [report.grad_norm for report in reports],
        [report.micro_batches for report in reports],
        sum(report.replays for report in reports),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "searched": {"micro_batch": "auto"},
    "few": {"effective_batch": 3, "micro_batch": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fit_trains_what_one_process_trains(name: str) -> None:
    alone = launch(trained, 1, False, OPTIONS[name])[0]
    for found in launch(trained, 2, True, OPTIONS[name]):
        torch.testing.assert_close(found.weights, alone.weights, rtol=1e-10, atol=1e-12)
        assert found.losses == pytest.approx(alone.losses, rel=1e-10, nan_ok=True)
        assert found.norms == pytest.approx(alone.norms, rel=1e-10)
        assert list(map(sum, found.plans)) == list(map(sum, alone.plans))


def test_fit_trains_copies_of_a_sharded_model() -> None:
    alone = launch(trained, 1, False, OPTIONS["clipped"])[0]
    for found in launch(trained, 4, True, {"clip_norm": 0.5, "how": {"copies": 2}}):
        torch.testing.assert_close(found.weights, alone.weights, rtol=1e-10, atol=1e-12)
        assert found.norms == pytest.approx(alone.norms, rel=1e-10)


def with_faults(of_rank: int, first: int, stride: int, reshards: bool) -> tuple[int, list[float]]:
    """Return the operations of a window of ``fit``, and how far off runs end where memory ran out at some of them."""
    run, number, operation, is_reached = Step.run, 0, 10**6, False

    def faulty(self: Step, window: Any, plan: Any = None) -> Any:
        nonlocal number, is_reached
        number += 1
        is_faulty = rank() == of_rank and number == 2
        with oom_at(operation if is_faulty else None) as fails:
            found = run(self, window, plan)
        is_reached = is_reached or (is_faulty and fails.operations >= operation)
        return found

    Step.run = faulty  # type: ignore[method-assign]
    options: dict[str, Any] = {"data": data(26), "clip_norm": 0.5, "epochs": 1}
    how = {"reshards": reshards}
    clean, found, operation = trained(True, {**options, "how": how}), [], first
    while True:
        number, is_reached = 0, False
        one = trained(True, {**options, "how": how})
        found.append(float((one.weights - clean.weights).norm() / clean.weights.norm()))
        if not any(_told(is_reached)):
            return operation, found
        operation += stride


def _told(value: bool) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


@strides(397)
@pytest.mark.parametrize("of_rank", [0, 1])
@pytest.mark.parametrize("reshards", [True, False])
def test_an_oom_at_every_operation_of_a_window_of_fit_hangs_nobody(of_rank: int, reshards: bool, stride: int) -> None:
    for first, every in launches(stride, 72):
        for operations, found in launch(with_faults, 2, of_rank, first, every, reshards):
            assert operations > 700
            assert max(found) < 1e-12


def of_unequal_limits() -> Trained:
    with simulated_memory((200 * 2**10, 60 * 2**10)[rank()]):
        return trained(True, {"micro_batch": "auto", "data": data(600), "effective_batch": 150, "epochs": 1})  # type: ignore[no-any-return]


def test_ranks_of_unequal_memory_train_a_sharded_model() -> None:
    options = {"data": data(600), "effective_batch": 150, "epochs": 1, "micro_batch": 10}
    alone = launch(trained, 1, False, options)[0]
    large, small = launch(of_unequal_limits, 2)
    assert torch.equal(large.weights, small.weights)
    torch.testing.assert_close(large.weights, alone.weights, rtol=1e-10, atol=1e-12)
    assert large.replays == small.replays


CANNOT: dict[str, dict[str, Any]] = {
    "noise_scale": {"noise_scale": True},
    "precision": {"precision": "fp16"},
    "compile": {"compile": True},
}


def ending(what: str) -> tuple[str, str]:
    options: dict[str, Any] = dict(CANNOT.get(what, {}))
    if what == "an error":
        options["callbacks"] = [_raise_after_two] if rank() == 1 else []
    if what == "a loss":
        options["loss_fn"] = _failing
    try:
        trained(True, options)
    except AutoaccumError as error:
        return getattr(error, "argument", type(error).__name__), str(error)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", ""


def _raise_after_two(record: Any) -> None:
    if isinstance(record, StepReport) and record.step == 2:
        raise ValueError("no such token")


_calls: list[int] = []


def _failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    _calls.append(len(targets))
    if rank() == 1 and len(_calls) == 7:
        raise ValueError("no such token")
    return cross_entropy(outputs, targets)


@pytest.mark.parametrize("argument", CANNOT)
def test_what_is_not_done_with_a_sharded_model_is_refused(argument: str) -> None:
    for found, why in launch(ending, 2, argument):
        assert found == argument
        assert "sharded model" in why


@pytest.mark.parametrize("what", ["an error", "a loss"])
def test_an_error_of_one_rank_ends_fit_on_all(what: str) -> None:
    first, second = launch(ending, 2, what)
    assert second == ("ValueError", "no such token")
    assert first[0] == "RankError"
    assert "rank 1 has failed: ValueError: no such token" in first[1]


def counted(batch: Any) -> int:
    return int((batch[1] >= 0).sum())


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a mean that is no number where nothing counts."""
    each = cross_entropy(outputs, targets, reduction="none")
    return each.sum() / (targets >= 0).sum()


@pytest.mark.parametrize("options", [{"num_items": counted}, {"loss_fn": summed}], ids=["counted", "by hand"])
def test_micro_batches_in_which_nothing_counts_add_nothing(options: dict[str, Any]) -> None:
    few = {"effective_batch": 7, "micro_batch": 1, **options}
    alone = launch(trained, 1, False, few)[0]
    for found in launch(trained, 2, True, few):
        torch.testing.assert_close(found.weights, alone.weights, rtol=1e-10, atol=1e-12)


def between(what: str) -> tuple[str, int, torch.Tensor | None]:
    """Return how a run ends in which the second rank fails between two micro-batches, once."""
    compiled, count = Meter.compiled, 0

    def failing(self: Meter) -> Any:
        nonlocal count
        count += 1
        if rank() == 1 and count == 5:
            raise ValueError("no such token") if what == "an error" else torch.OutOfMemoryError("CUDA out of memory.")
        return compiled(self)

    Meter.compiled = failing  # type: ignore[method-assign]
    try:
        found = trained(True, {})
    except (AutoaccumError, ValueError) as error:
        return f"{type(error).__name__}: {error}", 0, None
    return "", found.replays, found.weights


def test_what_fails_between_two_micro_batches_hangs_nobody() -> None:
    alone = launch(trained, 1, False, {})[0]
    for _, replays, weights in launch(between, 2, "memory"):
        assert replays == 1
        torch.testing.assert_close(weights, alone.weights, rtol=1e-10, atol=1e-12)
    first, second = launch(between, 2, "an error")
    assert second[0] == "ValueError: no such token"
    assert first[0].startswith("RankError: rank 1 has failed: ValueError: no such token")
