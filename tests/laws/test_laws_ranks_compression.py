"""Law 4 for gradients that ranks round to bfloat16 on their way: near what one does, and the same on all to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from autoaccum import Accumulator
from autoaccum.errors import ArgumentError, ResumeError
from autoaccum.step.across_ranks import SharedTransaction
from autoaccum.testing import oom_at
from tests.distributed.launching import launch
from tests.faults import sizes, strides
from tests.laws.test_laws_ranks import Trained, at_every_operation, fit, net, rank, refused
from tests.laws.test_laws_ranks_accumulator import batch_of, given, weights_of
from tests.processes import in_turn

pytestmark = in_turn
ROUNDED = 2**-7
"""How far sums are off, of their norm: each rank's part is rounded by 2^-8 at the most, and so is each sum of them."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


COMPRESSED: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": sgd, "compression": "bf16", "epochs": 3}


def in_all_ways() -> dict[str, Trained]:
    found = {"plain": fit(**{**COMPRESSED, "compression": "none"}), "bf16": fit(**COMPRESSED)}
    SharedTransaction._comes_once = False
    try:
        found["bf16, after the backward"] = fit(**COMPRESSED)
    finally:
        SharedTransaction._comes_once = True
    return found


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return how far weights are off, of how far they have moved."""
    moved = exact - weights_of(net())
    return float((found - exact).norm() / moved.norm())


@sizes(3)
def test_rounded_gradients_train_nearly_what_one_rank_does(size: int) -> None:
    (alone,) = launch(in_all_ways, 1)
    assert torch.equal(alone["bf16"].weights, alone["plain"].weights), "one rank sends nothing, and rounds nothing"
    first, *others = launch(in_all_ways, size)
    for way, found in first.items():
        assert all(torch.equal(found.weights, other[way].weights) for other in others), "to the bit, on all of them"
        assert all(found.losses == other[way].losses for other in others)
        if way != "plain":
            assert 1e-5 < off(found.weights, alone["plain"].weights) < ROUNDED
            # What is told beside gradients is not rounded.
            assert found.losses[0] == pytest.approx(alone["plain"].losses[0], rel=1e-12)


def with_faults(of_rank: int, stride: int) -> tuple[int, list[float]]:
    return at_every_operation(of_rank, stride, **COMPRESSED)


@strides(71)
def test_an_oom_at_every_operation_of_a_rank_is_drained_in_as_many_bits(stride: int) -> None:
    for operations, offs in launch(with_faults, 2, 1, stride):
        assert operations > 90
        assert max(offs) < 1e-2


def resumed(place: str, compression: str, budget: int) -> tuple[str, str] | torch.Tensor:
    options = {**COMPRESSED, "compression": compression, "run_dir": place, "epochs": None, "steps": budget}
    try:
        return fit(**options, checkpoint_every=1).weights
    except ResumeError as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, ""


def gone_on(place: str) -> Any:
    whole = resumed(f"{place}/whole", "bf16", 8)
    resumed(f"{place}/parts", "bf16", 5)
    return whole, resumed(f"{place}/parts", "bf16", 8), resumed(f"{place}/parts", "none", 9)


def test_a_run_goes_on_with_the_compression_that_it_began_with(tmp_path: Path) -> None:
    first, second = launch(gone_on, 2, str(tmp_path))
    for whole, parts, _ in (first, second):
        assert torch.equal(whole, parts)
    assert first[-1][0] == "ResumeError"
    assert "compression" in first[-1][1]
    assert second[-1][0] == "RankError"


def two_accumulators() -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Train two models by turns, each in a way of its own; memory runs out on rank 1 in a step of either."""
    ways: dict[str, Any] = {"bf16": net(), "none": net()}
    loops = {
        compression: Accumulator(model, sgd(model.parameters()), loss_fn=cross_entropy, micro_batch=3, compression=compression)
        for compression, model in ways.items()
    }  # fmt: skip
    for step in range(6):
        batch = given(step, batch_of(step))
        for index, loop in enumerate(loops.values()):
            with oom_at(70 if rank() == 1 and step == 3 + index else 10**6):
                loop.backward(batch)
            sgd(loop._step.job.model.parameters()).step()
    try:
        other = "bf16" if rank() else "none"
        model = net()
        Accumulator(model, sgd(model.parameters()), loss_fn=cross_entropy, compression=other).step(
            given(0, batch_of(0))
        )
        said = ""
    except ArgumentError as error:
        said = error.argument
    return [weights_of(model) for model in ways.values()], [], said


def test_accumulators_round_or_not_each_by_itself() -> None:
    ((_, exact), *_), *_ = launch(two_accumulators, 1)
    ((rounded, whole), _, said), ((rounded_there, whole_there), _, said_there) = launch(two_accumulators, 2)
    assert said == said_there == "compression", "ranks that would send different bytes are refused"
    assert torch.equal(rounded, rounded_there)
    assert torch.equal(whole, whole_there)
    torch.testing.assert_close(whole, exact, rtol=1e-10, atol=1e-12)
    assert 1e-5 < off(rounded, exact) < ROUNDED


def sharded() -> tuple[str, str]:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    fully_shard(model)
    return refused({**COMPRESSED, "model": model})


def differing() -> tuple[str, str]:
    return refused({**COMPRESSED, "compression": "bf16" if rank() else "none"})


def no_such_thing() -> tuple[str, str]:
    return refused({**COMPRESSED, "compression": "fp8"})


def refusals() -> list[tuple[str, str]]:
    torch.distributed.init_process_group("gloo")
    return [no_such_thing(), differing(), sharded()]


def test_what_cannot_be_rounded_is_refused_on_all_ranks() -> None:
    for found in launch(refusals, 2):
        assert [argument for argument, _ in found] == ["compression"] * 3
        assert "'none', 'bf16'" in found[0][1]
        assert "rank 0 was given" in found[1][1]
        assert "sharded model" in found[2][1]
