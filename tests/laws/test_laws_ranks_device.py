"""Law 4 where ranks have an accelerator each: gradients go through the host, and its memory runs out on one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from autoaccum import Accumulator
from autoaccum.events import OutOfMemory
from autoaccum.step.step import Step
from tests import standin
from tests.distributed.launching import launch
from tests.faults import strides
from tests.laws.test_laws_ranks import RUNS, Moving, Trained, data, fit, net, rank
from tests.laws.test_laws_ranks_accumulator import batch_of, given, weights_of
from tests.processes import in_turn

pytestmark = [
    in_turn,
    pytest.mark.device(elsewhere=True),
    standin.only_there,  # of which there are two
]
MIB = 2**20
CHOSEN = (
    "ignored targets, clipped, validated",
    "a mask, with outputs",
    "sizes that are found",
    "samples of many lengths",
)


def on_device(**options: Any) -> Trained:
    """Train on the accelerator that is this rank's."""
    found = fit(**{"device": None, **options})
    return found._replace(weights=found.weights.cpu())


def all_runs() -> dict[str, Trained]:
    runs = {name: on_device(**RUNS[name]) for name in CHOSEN}
    runs["what forwards write to"] = on_device(model=Moving(), loss_fn=cross_entropy, effective_batch=12, micro_batch=6)
    runs["in bfloat16 on the way"] = on_device(loss_fn=cross_entropy, compression="bf16")
    assert standin.allocations(rank()) > 1000, "it ran there"
    return runs


def test_ranks_on_accelerators_train_what_one_does() -> None:
    (alone,) = launch(all_runs, 1)
    first, second = launch(all_runs, 2)
    for name, one in alone.items():
        assert torch.equal(first[name].weights, second[name].weights), name
        assert first[name].losses == second[name].losses
        if name in CHOSEN:
            torch.testing.assert_close(first[name].weights, one.weights, rtol=1e-10, atol=1e-12)
            assert first[name].losses == pytest.approx(one.losses, rel=1e-10)


def with_fault(of_rank: int, number: int) -> Trained:
    """Refuse an allocation of the device in the second window of one rank, as a full device does."""
    run, count = Step.run, 0

    def faulty(self: Step, window: Any, plan: Any = None) -> Any:
        nonlocal count
        count += 1
        if count != 2 or rank() != of_rank or not number:
            return run(self, window, plan)
        with standin.fails_at(number, rank()):
            return run(self, window, plan)

    Step.run = faulty  # type: ignore[method-assign]
    try:
        options: dict[str, Any] = {"loss_fn": cross_entropy, "clip_norm": 0.5}
        return on_device(data=data(24), effective_batch=12, micro_batch=3, epochs=2, **options)
    finally:
        Step.run = run  # type: ignore[method-assign]


def at_every_allocation(of_rank: int, stride: int) -> tuple[int, list[float]]:
    clean, off, number = with_fault(of_rank, 0), [], 1
    while True:
        found = with_fault(of_rank, number)
        off.append(float((found.weights - clean.weights).norm() / clean.weights.norm()))
        replays = [0, 0]
        torch.distributed.all_gather_object(replays, found.replays)
        if not any(replays):
            return number, off
        number += stride


@strides(13)
@pytest.mark.parametrize("of_rank", [0, 1])
def test_an_allocation_that_is_refused_on_a_rank_hangs_nobody(of_rank: int, stride: int) -> None:
    for allocations, off in launch(at_every_allocation, 2, of_rank, stride):
        assert allocations > 40
        assert max(off) < 1e-12


def of_unequal_memory(micro_batch: Any) -> tuple[Trained, int]:
    seen: list[Any] = []
    options: dict[str, Any] = {"micro_batch": micro_batch, "effective_batch": 60_000, "epochs": 3, "verify": False}
    # The device refuses what passes it, in segments of 2 and of 20 MiB.
    options |= {"memory_limit": (26 if rank() else 1024) * MIB, "callbacks": [seen.append]}
    found = on_device(data=data(120_000), loss_fn=cross_entropy, **options)
    return found, sum(isinstance(record, OutOfMemory) for record in seen)


def of_both_kinds() -> list[tuple[Trained, int]]:
    return [of_unequal_memory("auto"), of_unequal_memory(30_000)]


def test_ranks_of_unequal_memory_have_plans_of_their_own() -> None:
    (((one, _), _),) = launch(of_both_kinds, 1)
    of_large, of_small = launch(of_both_kinds, 2)
    assert of_small[1][1] > 0, "what was passed did not fit there"
    for (large, met), (small, _) in zip(of_large, of_small, strict=True):
        assert torch.equal(large.weights, small.weights)
        torch.testing.assert_close(large.weights, one.weights, rtol=1e-10, atol=1e-12)
        assert met == 0
        plan = large.plans[-1]
        assert sum(plan) == 60_000
    # Where sizes are searched for they are also those that are fastest, which a busy machine decides.
    plan = of_large[1][0].plans[-1]
    assert plan[0] == 30_000 >= 2 * plan[-1], "the second rank has a fortieth of the memory"


def in_half_precision() -> tuple[torch.Tensor, float, int]:
    """Step on batches of which one overflows on the second rank alone, in whose step memory runs out before that."""
    model = net().float().to(f"standin:{rank()}")
    options: dict[str, Any] = {"loss_fn": cross_entropy, "micro_batch": 3, "precision": "fp16", "clip_norm": 0.5}
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), 0.1), **options)
    for step in range(6):
        inputs, labels = batch_of(step)
        inputs[-1, 0] = 1e30 if step == 3 else 1.0
        labels[-1] = 1
        with standin.fails_at(20 if step in (2, 3) and rank() else 0, rank()):
            accumulator.step(given(step, (inputs.float(), labels)))
    scaler = accumulator._step.transaction.scaler
    assert scaler is not None
    met = sum(isinstance(event, OutOfMemory) for event in accumulator.events)
    return weights_of(model).cpu(), scaler.get_scale(), met


def test_an_overflow_on_one_rank_skips_the_step_of_all() -> None:
    ((one, scale, _),) = launch(in_half_precision, 1)
    (first, of_first, met), (second, of_second, met_there) = launch(in_half_precision, 2)
    assert torch.equal(first, second)
    assert of_first == of_second == scale == 2.0**15
    assert (met, met_there) == (0, 2)
    torch.testing.assert_close(first, one, rtol=1e-2, atol=1e-3)
