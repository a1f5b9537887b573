"""Laws 2, 3, 4 and 6 where micro-batches of several ranks are joined: the step runs on all of them, once a window."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import Joined, Notice
from autoaccum.testing import simulated_memory
from tests.distributed.launching import Ended, launch
from tests.faults import launches, oom_in_window, strides
from tests.laws.test_laws_joined import SCENARIOS, Recorder, contrast, coupled, data, noisy_model, plain_data
from tests.processes import in_turn

pytestmark = [in_turn, pytest.mark.measured]

HOOKED = "hooks_on_parameters"  # which see what a rank's own samples add to the gradient
NAMES = [name for name in SCENARIOS if name != HOOKED]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Left(NamedTuple):
    """What a run leaves, that can be sent."""

    gradients: list[torch.Tensor | None]
    state: list[torch.Tensor]
    losses: list[float]
    plans: list[tuple[int, ...]]
    is_joined: bool
    notices: list[str]


def left(result: autoaccum.FitResult) -> Left:
    return Left(
        getattr(result.optimizer, "gradients", []),
        list(result.model.state_dict().values()),
        [report.loss for report in result.history],
        [report.micro_batches for report in result.history],
        any(isinstance(event, Joined) for event in result.events),
        [event.cause for event in result.events if isinstance(event, Notice)],
    )


def fit(model: Any, samples: Any, **options: Any) -> Left:
    given: dict[str, Any] = {"effective_batch": 8, "epochs": 1, "shuffle": False, "micro_batch": 2}
    given |= {"device": "cpu", "progress": False, "cache": False}
    return left(autoaccum.fit(model, samples, **{**given, **options}))


def scenarios(accumulate: str, micro_batch: int) -> dict[str, Left]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in NAMES:
        torch.manual_seed(0)
        model, step = SCENARIOS[name]()
        options: dict[str, Any] = {"training_step": step, "optimizer": lambda p: Recorder(p, lr=0.1)}
        found[name] = fit(model, data(), accumulate=accumulate, micro_batch=micro_batch, **options)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Left]:
    return launch(scenarios, 1, "weighted", 8)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_ranks_have_the_gradient_of_the_full_batch(size: int, alone: dict[str, Left]) -> None:
    of_ranks = launch(scenarios, size, "auto", 2)
    for name, one in alone.items():
        first, *others = (found[name] for found in of_ranks)
        pairs = [(g, w) for g, w in zip(first.gradients, one.gradients, strict=True) if w is not None]
        off = sum(float((g - w).square().sum()) for g, w in pairs if g is not None) ** 0.5  # type: ignore[operator]
        # A mean over one thing has no gradient that could be measured, and is of no matter here.
        assert off <= 1e-12 * sum(float(w.square().sum()) for _, w in pairs) ** 0.5 or name == "a_mean_over_one", name
        assert first.losses == pytest.approx(one.losses, rel=1e-12), name
        for other in others:
            assert all(map(torch.equal, first.state, other.state)), f"{name}: to the bit, on all of them"
            assert (first.losses, first.plans) == (other.losses, other.plans)


def shared(**options: Any) -> Left:
    """Train a model that drops out and has statistics of the batch, with a loss that compares samples and draws."""
    torch.set_default_dtype(torch.float64)
    model = noisy_model()
    return fit(model, plain_data(24), **{"training_step": coupled, "accumulate": "joined", **options})


def test_ranks_leave_the_same_bits() -> None:
    first, second = launch(shared, 2)
    assert all(map(torch.equal, first.state, second.state))
    assert first.losses == second.losses


class Masks(nn.Module):
    """Adds to each sample what a dropout has left of a row of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones(len(x), 64), 0.5) * self.weight


def masks() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    seen = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(model(batch["x"]).detach() != 0)
        return contrast(model(batch["x"]))

    fit(Masks(), data(), training_step=step, accumulate="joined", verify=False)
    return seen[-1]


def test_each_sample_has_a_dropout_of_its_own() -> None:
    first, second = launch(masks, 2)
    assert torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 8


def by_turns(first: int, stride: int) -> list[tuple[int, list[tuple[bool, bool]]]]:
    return [at_every_operation(of_rank, first, stride) for of_rank in (0, 1)]


def at_every_operation(of_rank: int, first: int, stride: int) -> tuple[int, list[tuple[bool, bool]]]:
    """Return the last operation, and of each fault whether a window was cut anew, and whether it has left no mark."""
    given: dict[str, Any] = {"micro_batch": 3, "effective_batch": 12, "clip_norm": 0.5, "verify": False}
    clean: dict[Any, Left] = {}
    found, operation, is_met = [], first, True
    while is_met:
        with oom_in_window(2, operation if rank() == of_rank else 0) as met:
            faulty = shared(**given)
        plans = tuple(faulty.plans)
        if plans not in clean:
            clean[plans] = shared(**{**given, "micro_batch": list(plans)})
        same = all(map(torch.equal, faulty.state, clean[plans].state)) and faulty.losses == clean[plans].losses
        found.append((len(plans[1]) > len(plans[0]), same and plans == tuple(clean[plans].plans)))
        told: list[Any] = [None, None]
        torch.distributed.all_gather_object(told, met.is_reached)  # the last operation is known to the rank that has it
        is_met, operation = any(told), operation + stride
    return operation, found


@strides(53)
def test_an_oom_at_every_operation_of_a_rank_hangs_nobody_and_leaves_no_mark(stride: int) -> None:
    for first, every in launches(stride):
        for of_first, of_second in launch(by_turns, 2, first, every):
            for last, found in (of_first, of_second):
                assert last > 200
                assert all(leaves_no_mark for _, leaves_no_mark in found)
                assert any(is_cut_anew for is_cut_anew, _ in found)


def test_a_rank_without_samples_takes_part() -> None:
    first, _, third = launch(few, 3)
    assert first.plans == [(1, 1), (1, 1)]
    (one,) = launch(few, 1)
    assert first.losses == pytest.approx(one.losses, rel=1e-12)
    assert all(map(torch.equal, first.state, third.state))


def few() -> Left:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4))
    step = lambda model, batch: contrast(model(batch[0]))  # noqa: E731
    joined = fit(model, plain_data(4), training_step=step, effective_batch=2, accumulate="joined", verify=False)
    # And where some windows have samples for all, which are joined after they were measured.
    fit(model, plain_data(9), training_step=step, effective_batch=4)
    return joined


def resumed(folder: Path) -> tuple[Left, Left]:
    whole = shared(steps=4, epochs=None)
    shared(steps=2, epochs=None, run_dir=folder)
    return whole, shared(steps=4, epochs=None, run_dir=folder)


def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    for whole, again in launch(resumed, 2, tmp_path / "run"):
        assert all(map(torch.equal, whole.state, again.state))
        assert whole.losses[2:] == again.losses[-2:]


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.GELU(), nn.Linear(40, 4000))


def tight() -> Left:
    """Train with a model whose outputs are larger than all that its micro-batches hold."""
    torch.set_default_dtype(torch.float64)
    with simulated_memory((10**10, 9 * 10**6)[rank()]):
        step = lambda model, batch: contrast(model(batch[0]))  # noqa: E731
        options: dict[str, Any] = {"training_step": step, "effective_batch": 64, "micro_batch": "auto"}
        return fit(wide(), plain_data(64), **options)


def test_where_it_does_not_fit_one_rank_all_weigh() -> None:
    first, second = launch(tight, 2)
    assert [any("does not fit" in cause for cause in each.notices) for each in (first, second)] == [True, True]
    assert all(map(torch.equal, first.state, second.state))


def own_loop(accumulate: str, sizes: list[int]) -> list[torch.Tensor]:
    """Step on batches of the ranks' own."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = lambda model, batch: contrast(model(batch[0]))  # noqa: E731
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=step, micro_batch=2, accumulate=accumulate)
    for number in range(3):
        start = 8 * number + sum(sizes[: rank()])
        batch = tuple(one[start : start + sizes[rank()]] for one in plain_data(24))
        accumulator.step(batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("accumulate", ["auto", "joined"])
def test_batches_of_the_ranks_own_are_joined(accumulate: str) -> None:
    (one,) = launch(own_loop, 1, "joined", [8])
    for weights in launch(own_loop, 2, accumulate, [5, 3]):
        for mine, theirs in zip(weights, one, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def failing_on_parts(of_all: bool) -> Left:
    """Train a step that one rank cannot run on a part of a batch, or not at all."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if rank() == 1 and (of_all or len(batch[0]) < 8):
            raise ValueError("on one rank alone")
        return F.cross_entropy(model(batch[0]), batch[1])

    return fit(model, plain_data(24), training_step=step)


def test_a_step_that_fails_on_the_micro_batches_of_one_rank_is_joined_on_all() -> None:
    (alone,) = launch(failing_on_parts, 1, False)
    for found in launch(failing_on_parts, 2, False):
        assert found.is_joined
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    for found in launch(failing_on_parts, 2, True):
        assert "on one rank alone" in str(found)


def failing() -> None:
    """Train a step that fails on one rank alone, within a call's rows."""
    torch.set_default_dtype(torch.float64)
    model = noisy_model()
    if rank() == 1:
        model.register_forward_hook(_fails)
    fit(model, plain_data(24), training_step=coupled, accumulate="joined", verify=False)


def _fails(*_: Any) -> None:
    raise ValueError("on one rank alone")


def test_an_error_of_one_rank_ends_all_of_them() -> None:
    for found in launch(failing, 2):
        assert not isinstance(found, Ended)
        assert "on one rank alone" in str(found)


def clamped(model: Any, batch: Any) -> torch.Tensor:
    """A sum over all samples, divided by how many of them are an object's."""
    return model(batch[0]).square().sum() / batch[1].sum().clamp(min=1)  # type: ignore[no-any-return]


def with_uncounted() -> Left:
    """No micro-batch of the last rank has an object in the last window."""
    torch.manual_seed(0)
    objects = torch.ones(32, dtype=torch.float64)
    objects[28:] = 0
    return fit(
        nn.Linear(4, 3).double(),
        (torch.randn(32, 4, dtype=torch.float64), objects),
        training_step=clamped,
        num_items=lambda batch: int(batch[1].sum()),
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
    )


def test_a_loss_that_is_not_counted_on_one_rank_has_all_of_them_join() -> None:
    (alone,) = launch(with_uncounted, 1)
    for found in launch(with_uncounted, 2):
        assert found.is_joined
        assert found.notices == []
        assert found.losses == pytest.approx(alone.losses, rel=1e-12)
        for one, other in zip(found.state, alone.state, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def asked_by_one() -> Left:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 4))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = contrast(model(batch[0]))
        if torch.distributed.is_initialized() and rank() == 1:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss

    return fit(model, plain_data(8), training_step=step, effective_batch=8, accumulate="joined", verify=False)


def test_what_one_rank_refuses_when_others_have_run_the_window_is_opened_on_all() -> None:
    first, second = launch(asked_by_one, 2)
    (one,) = launch(asked_by_one, 1)
    assert first.losses == second.losses == pytest.approx(one.losses, rel=1e-12)
    assert all(map(torch.equal, first.state, second.state))
    for found, expected in zip(first.state, one.state, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
