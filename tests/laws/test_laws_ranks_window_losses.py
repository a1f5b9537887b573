"""Law 4 for losses over the whole window: ranks that embed a share each train what one rank does with all of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.events import OutOfMemory, Validated, Verified
from autoaccum.ranks.group import Group
from autoaccum.testing import simulated_memory
from tests.faults import launches, oom_in_window, strides
from tests.laws.test_laws_window_losses import F64, LOSSES, MakeLoss, Recorder, Towers, clip, data, embed, info_nce
from tests.processes import in_turn
from tests.ranks.launching import Ended, check_ends, launch

pytestmark = in_turn


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Left(NamedTuple):
    """What a run leaves, that can be sent."""

    gradients: list[torch.Tensor]
    weights: torch.Tensor
    losses: list[float]
    norms: list[float | None]
    outputs: list[dict[str, Any]]
    held_out: list[float]
    plans: list[tuple[int, ...]]
    verified: list[bool]
    calls: float


def weights_of(modules: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def fit(make: MakeLoss = clip, model: Any = None, **options: Any) -> Left:
    model = Towers() if model is None else model
    loss_fn = make(model)
    given: dict[str, Any] = {"data": data(), "effective_batch": 12, "micro_batch": 2, "epochs": 1, "shuffle": False}
    given |= {"optimizer": Recorder, "embed": embed, "device": "cpu", "progress": False, "cache": False}
    result = autoaccum.fit(model, loss_scope="window", loss_fn=loss_fn, **{**given, **options})
    reports = result.history
    return Left(
        getattr(result.optimizer, "gradients", []),
        weights_of([model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]),
        [report.loss for report in reports],
        [report.grad_norm for report in reports],
        [dict(report.outputs) for report in reports],
        [event.loss for event in result.events if isinstance(event, Validated)],
        [report.micro_batches for report in reports],
        [event.passed for event in result.events if isinstance(event, Verified)],
        float(model.calls),
    )


class Scaled(nn.Module):
    """A loss that has a parameter of its own, uses one that embeddings are made by, and returns more than the loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=F64))
        self.shared = [model.image[3].weight]

    def forward(self, e: Any) -> Any:
        logits = self.log_scale.exp() * e["image"] @ e["text"].T
        loss = cross_entropy(logits, torch.arange(len(logits))) + 0.1 * self.shared[0].square().sum()
        return loss, {"norm": e["image"].square().sum(), "first": e["text"][:, 0]}


RUNS: dict[str, dict[str, Any]] = {name: {"make": make} for name, make in LOSSES.items()}
RUNS |= {
    "parameters of the loss, with outputs": {"make": Scaled, "micro_batch": 3},
    "clipped, validated": {"clip_norm": 0.05, "validation_data": data(20)},
    "sizes that are found, a schedule": {"micro_batch": "auto", "effective_batch": "2, 3:13", "epochs": 3},
    "single samples, state of the window": {"micro_batch": 1, "state": "window"},
    "rounded on the way": {"make": info_nce, "compression": "bf16"},
}


class Everything(NamedTuple):
    """What many runs leave, in one launch of as many ranks."""

    runs: dict[str, Left]
    in_16_bits: list[tuple[Left, Left]]
    loops: list[Left]


def everything() -> Everything:
    return Everything({name: fit(**options) for name, options in RUNS.items()}, in_16_bits(), loops())


@pytest.fixture(scope="module")
def alone() -> Everything:
    return launch(everything, 1)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def of_ranks(request: pytest.FixtureRequest) -> list[Everything]:
    return launch(everything, request.param)


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    assert float((found - expected).norm() / expected.norm()) < bound, what


def test_ranks_train_what_one_does(alone: Everything, of_ranks: list[Everything]) -> None:
    for name, one in alone.runs.items():
        first, *others = (found.runs[name] for found in of_ranks)
        for other in others:
            assert torch.equal(first.weights, other.weights), f"{name}: to the bit, on all of them"
            assert (first.losses, first.held_out, first.norms) == (other.losses, other.held_out, other.norms)
            assert first.calls == other.calls
        bound = 1e-2 if "rounded" in name else 1e-12
        # The first one is of the same weights; those of later steps are of what rounding has left of them.
        assert_near(first.gradients[0], one.gradients[0], bound, name)
        assert_near(first.weights, one.weights, 100 * bound, name)
        for mine, theirs in zip(first.gradients, one.gradients, strict=True):
            assert_near(mine, theirs, 100 * bound, name)
        assert first.losses == pytest.approx(one.losses, rel=100 * bound)
        assert first.norms == pytest.approx(one.norms, rel=100 * bound)
        assert first.held_out == pytest.approx(one.held_out, rel=100 * bound)
        assert list(map(sum, first.plans)) == list(map(sum, one.plans))
        assert all(first.verified), name
        assert bool(first.verified) == bool(one.verified), name
        for mine, theirs in zip(others[-1].outputs, one.outputs, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():
                torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(theirs[key]), rtol=1e-9, atol=1e-11)
    assert len(alone.runs["clipped, validated"].held_out) == 1
    plan = of_ranks[0].runs["sizes that are found, a schedule"].plans[0]
    assert plan == (1, 1), "of two samples a third rank has none"


def in_16_bits() -> list[tuple[Left, Left]]:
    """Train where the third rank has no sample in the first window, and where memory then runs out on another one."""
    found = []
    for precision in ("bf16", "fp16"):
        given: dict[str, Any] = {"precision": precision, "data": data(dtype=torch.float32), "verify": False}
        given["effective_batch"] = "2, 1:13"
        plain = fit(model=Towers(dtype=torch.float32), **given)
        found.append((plain, with_fault(Faulty(0, 1, 60), model=Towers(dtype=torch.float32), **given)[0]))
    return found


def test_under_autocast(alone: Everything, of_ranks: list[Everything]) -> None:
    for found in of_ranks:
        every = zip(alone.in_16_bits, found.in_16_bits, of_ranks[0].in_16_bits, (2e-2, 2e-3), strict=True)
        for (one, _), (mine, replayed), (first, _), bound in every:
            assert torch.equal(mine.weights, first.weights)
            assert torch.equal(replayed.weights, mine.weights), "one sample is as small as a micro-batch can be"
            assert_near(mine.gradients[0], one.gradients[0], bound, "the first gradient")


class Noted:
    """An ``embed`` that notes the random states that it finds."""

    states: ClassVar[list[torch.Tensor]] = []  # of the class, for what an object holds is put back with all else

    @classmethod
    def embed(cls, model: Any, batch: Any) -> Any:
        cls.states.append(torch.get_rng_state())
        return embed(model, batch)


def with_dropout() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first gradient, and that of one backward through the joined forwards of all ranks' micro-batches."""

    def drawing(model: Any) -> Any:
        return lambda e, batch: clip(model)({name: nn.functional.dropout(z, 0.2) for name, z in e.items()}, batch)

    model, steps = Towers(0.3), 1
    after: list[torch.Tensor] = []

    def noting(e: Any, batch: Any) -> Any:
        after.append(torch.get_rng_state())
        return drawing(model)(e, batch)

    found = fit(lambda _: noting, model, embed=Noted.embed, micro_batch=2, verify=False, epochs=None, steps=steps)
    everything: list[Any] = [None] * world()
    torch.distributed.all_gather_object(everything, (Noted.states, after))
    big, embedded, start = Towers(0.3), [], 0
    pieces = [everything[0][0][:3], everything[1][0][:3]]  # both have 6 of 12 samples, in micro-batches of 2
    for states in pieces:
        for state in states:
            torch.set_rng_state(state)
            embedded.append(embed(big, {name: value[start : start + 2] for name, value in data().items()}))
            start += 2
    torch.set_rng_state(everything[0][1][0])
    joined = {name: torch.cat([one[name] for one in embedded]) for name in embedded[0]}
    drawing(big)(joined, None).backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in big.parameters()])
    assert not torch.equal(pieces[0][0], pieces[1][0]), "ranks draw apart"
    assert [len(loss) for _, loss in everything] == [1, 0], "the loss is computed once"
    return found.gradients[0], gradient


def test_with_dropout_it_is_the_gradient_of_the_joined_forwards_of_all_ranks() -> None:
    for found, expected in launch(with_dropout, 2):
        assert_near(found, expected, 1e-12, "in embeddings and in the loss")


class Faulty(NamedTuple):
    """Memory that runs out at an operation of a window of one rank, counted from 1; 0: in none."""

    rank: int
    window: int
    operation: int


def with_fault(fault: Faulty, **options: Any) -> tuple[Left, bool]:
    """Return what a run with a fault leaves, and whether this rank has come to the operation that fails."""
    with oom_in_window(fault.window, fault.operation if rank() == fault.rank else 0) as met:
        return fit(**options), met.is_reached


def by_turns(first: int, stride: int) -> list[tuple[int, list[tuple[bool, bool]]]]:
    return [at_every_operation(of_rank, first, stride) for of_rank in (0, 1)]


def at_every_operation(of_rank: int, first: int, stride: int) -> tuple[int, list[tuple[bool, bool]]]:
    """Return the last operation, and of each fault whether a window was cut anew, and whether it has left no mark."""
    given: dict[str, Any] = {"data": data(24), "micro_batch": 3, "epochs": 1, "clip_norm": 0.5}
    given["verify"] = False
    clean: dict[Any, Left] = {}
    found, operation, is_met = [], first, True
    while is_met:
        left, is_reached = with_fault(Faulty(of_rank, 2, operation), model=Towers(0.3), **given)
        plans = tuple(left.plans)
        if plans not in clean:
            clean[plans] = fit(model=Towers(0.3), **{**given, "micro_batch": list(plans)})
        same = torch.equal(left.weights, clean[plans].weights) and left.losses == clean[plans].losses
        found.append((len(plans[1]) > 4, same and plans == tuple(clean[plans].plans)))
        # Which operation is the last is known to the rank that has them.
        told: list[Any] = [None] * world()
        torch.distributed.all_gather_object(told, is_reached)
        is_met, operation = any(told), operation + stride
    return operation, found


@strides(37)
def test_an_oom_at_every_operation_of_a_rank_hangs_nobody_and_leaves_no_mark(stride: int) -> None:
    for first, every in launches(stride):
        for of_first, of_second in launch(by_turns, 2, first, every):
            assert of_first[0] > of_second[0] > 200, "the first one computes the loss, too"
            for _, found in (of_first, of_second):
                assert all(leaves_no_mark for _, leaves_no_mark in found)
                assert sum(is_cut_anew for is_cut_anew, _ in found) > 0.7 * len(found)


class Failing:
    """Functions that run out of memory in the calls of a rank that are told by their numbers, from 1."""

    def __init__(self, *calls: int) -> None:
        # Of an object of its own kind, for what a plain one holds is put back with all else.
        self.numbers, Failing.count = calls, 0

    count: ClassVar[int] = 0

    def call(self) -> None:
        Failing.count += 1
        if Failing.count in self.numbers:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def one_after_the_other(of_rank: int) -> tuple[Left, Left]:
    """Return what a run leaves in which the first window fails where others wait, and again before that; and another.

    With micro-batches of 3 the first rank calls ``embed`` twice before the loss; the second one, twice and once more.
    """
    failing = Failing(3, 4, 5) if rank() == of_rank else Failing()
    model = Towers()

    def noting(called: Any, batch: Any) -> Any:
        failing.call()
        return embed(called, batch)

    def loss(e: Any, batch: Any) -> torch.Tensor:
        failing.call()
        return clip(model)(e, batch)

    given: dict[str, Any] = {"verify": False, "micro_batch": 3}
    found = fit(lambda _: loss, model, embed=noting, **given)
    return found, fit(**{**given, "micro_batch": found.plans})


def by_turns_one_after_the_other() -> list[tuple[Left, Left]]:
    return [one_after_the_other(of_rank) for of_rank in (0, 1)]


def test_a_replay_that_fails_too_is_run_again() -> None:
    own = (1,) * 6
    for found in launch(by_turns_one_after_the_other, 2):
        for (failed, clean), plan in zip(found, ((*own, 3, 3), (3, 3, *own)), strict=True):
            assert torch.equal(failed.weights, clean.weights)
            assert failed.losses == clean.losses
            assert failed.plans[0] == plan


def without_room(of_rank: int, number: int, comes_after: bool) -> Left:
    """Train where the host has no memory for one of the things that ranks tell each other in the second window."""
    exchange, counts = Group._exchange, Failing
    counts.count = -1

    def failing(self: Group, told: Any) -> Any:
        counts.count += counts.count >= 0
        is_meant = rank() == of_rank and counts.count == number
        if is_meant and not comes_after:
            raise MemoryError
        found = exchange(self, told)
        if is_meant:
            raise MemoryError
        return found

    def begin(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == 1:
            counts.count = 0

    Group._exchange = failing  # type: ignore[method-assign]
    try:
        return fit(verify=False, micro_batch=3, callbacks=[begin])
    finally:
        Group._exchange = exchange  # type: ignore[method-assign]


def in_all_places() -> list[tuple[tuple[int, ...], torch.Tensor]]:
    found = []
    for number in (2, 3):
        for of_rank in (0, 1):
            for comes_after in (False, True):
                left = without_room(of_rank, number, comes_after)
                found.append((left.plans[1], left.weights - fit(verify=False, micro_batch=left.plans).weights))
    return found


def test_embeddings_that_the_host_has_no_room_for_are_told_again() -> None:
    first, second = launch(in_all_places, 2)
    assert [plan for plan, _ in first] == [plan for plan, _ in second]
    assert all(len(plan) > 4 for plan, _ in first), "a rank has run its share again in smaller pieces"
    assert not any(off.any() for _, off in first + second)


def of_a_tight_rank() -> tuple[Left, int]:
    """Train where the first rank has memory for 60 samples at once, and the second for a few beside the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 5)).double()
    model.calls = 0.0  # type: ignore[assignment]
    rows = torch.randn(480, 8, generator=torch.Generator().manual_seed(1), dtype=F64)
    limit = (10**6, 190_000)[rank()]
    seen: list[Any] = []
    with simulated_memory(limit):
        found = fit(
            lambda _: lambda z: cross_entropy(z @ z.T, torch.arange(len(z))), model, data=(rows,), micro_batch=60,
            embed=lambda called, batch: called(batch[0]), effective_batch=120, epochs=2, callbacks=[seen.append],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip
    return found, sum(isinstance(record, OutOfMemory) for record in seen)


def test_a_rank_of_less_memory_finds_sizes_of_its_own() -> None:
    (one, _), *_ = launch(of_a_tight_rank, 1)
    (large, _), (small, failures) = launch(of_a_tight_rank, 2)
    assert torch.equal(large.weights, small.weights)
    assert_near(large.weights, one.weights, 1e-10, "weights")
    assert failures == 3, "60, 30 and 15 samples are too many"
    assert list(map(sum, large.plans)) == [120] * 8
    assert large.plans[-1][0] == 60
    assert max(large.plans[-1][1:]) <= 15


def ended(what: str) -> tuple[str, str, Any, float]:
    def failing(model: Any) -> Any:
        def loss(e: Any) -> torch.Tensor:
            raise ValueError("no such loss")

        return loss

    def other(model: Any, batch: Any) -> Any:
        found = embed(model, batch)
        return list(found.values()) if rank() == 1 else found

    try:
        fit(failing if what == "the loss" else clip, embed=other if what == "a structure" else embed)
    except AutoaccumError as error:
        return type(error).__name__, f"{error}", getattr(error, "rank", None), 0.0
    except ValueError as error:
        return "ValueError", f"{error}", None, 0.0
    raise AssertionError


@pytest.mark.parametrize(("what", "own"), [("the loss", "no such loss"), ("a structure", "of several structures")])
def test_what_the_first_rank_finds_wrong_ends_all(what: str, own: str) -> None:
    first, second = launch(ended, 2, what)
    assert own in first[1]
    assert second[0] == "RankError"
    assert second[2] == 0
    assert own in second[1]


def resumed(place: str, until: int | None) -> Left:
    def kill(record: Any) -> None:
        if isinstance(record, autoaccum.StepReport) and record.step == until:
            os.kill(os.getpid(), signal.SIGKILL)

    return fit(model=Towers(0.3), run_dir=place, checkpoint_every=2, callbacks=[kill], epochs=3, micro_batch=3)


def test_a_run_whose_ranks_were_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = launch(resumed, 2, str(tmp_path / "whole"), None)
    assert all(isinstance(found, Ended) for found in launch(resumed, 2, str(tmp_path / "parts"), 5))
    for one, other in zip(whole, launch(resumed, 2, str(tmp_path / "parts"), None), strict=True):
        assert torch.equal(one.weights, other.weights)
        assert one.losses[-1] == other.losses[-1]


BATCHES = ((7, 4, 1, 0), (0, 3, 8, 2), (5, 0, 6, 1), (1, 1, 1, 0))
"""Samples of each rank, in one step after the other; of fewer ranks the last one has those of all that are missing."""


def loops() -> list[Left]:
    found = []
    for make in (clip, info_nce, LOSSES["sup_con"]):
        model = Towers()
        optimizer = Recorder(model.parameters())
        accumulator = autoaccum.Accumulator(
            model, optimizer, loss_scope="window", embed=embed, loss_fn=make(model), micro_batch=2, clip_norm=1.0
        )
        losses, norms, plans = [], [], []
        for shares in BATCHES:
            sizes = (*shares[: world() - 1], sum(shares[world() - 1 :]))
            start = sum(sizes[: rank()])
            part = {name: value[start : start + sizes[rank()]] for name, value in data().items()}
            losses.append(float(accumulator.step(part)))
            norms.append(float(accumulator.grad_norm))  # type: ignore[arg-type]
            plans.append(accumulator.micro_batches)
        found.append(Left(optimizer.gradients, weights_of([model]), losses, norms, [], [], plans, [], 0.0))
    return found


def test_a_loop_of_ones_own_steps_on_the_gradient_of_the_joined_batch(
    alone: Everything, of_ranks: list[Everything]
) -> None:
    first, *others = (found.loops for found in of_ranks)
    for index, one in enumerate(alone.loops):
        assert all(torch.equal(first[index].weights, other[index].weights) for other in others)
        assert_near(first[index].gradients[0], one.gradients[0], 1e-12, "the first gradient")
        assert_near(first[index].weights, one.weights, 1e-10, "weights")
        assert first[index].losses == pytest.approx(one.losses, rel=1e-10)
        assert first[index].norms == pytest.approx(one.norms, rel=1e-10)
        assert list(map(sum, first[index].plans)) == list(map(sum, BATCHES))


def killed() -> tuple[str, str, Any, float]:
    def dying(model: Any, batch: Any) -> Any:
        # Of two micro-batches the first one is embedded once more after the loss.
        if rank() == 1 and len(Noted.states) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return Noted.embed(model, batch)

    try:
        fit(embed=dying, verify=False)
    except Exception as error:
        return type(error).__name__, f"{error}", getattr(error, "rank", None), 0.0
    raise AssertionError


def test_a_rank_that_is_killed_in_its_second_pass_ends_all() -> None:
    check_ends(launch(killed, 3), None, "its process has ended")
