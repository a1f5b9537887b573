"""Modules that only the training step holds are the model's: trained, rolled back, looked at, and else left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumError, AutoaccumWarning
from autoaccum.events import Notice
from autoaccum.testing import oom_at
from tests.models import classes, mlp
from tests.step.known.modules import HOLDERS, in_model, loop
from tests.step.others.harness import Loop, check, run

pytestmark = [pytest.mark.measured, pytest.mark.filterwarnings("ignore")]  # what is said is looked at among the events

EACH = pytest.mark.parametrize("holder", HOLDERS)
FAULTS = 20
"""Of the operations of a run, evenly spread, at which memory runs out."""


def fit(loop: Loop, micro_batch: Any, **options: Any) -> autoaccum.FitResult:
    return autoaccum.fit(
        loop.model,
        loop.data,
        effective_batch=loop.window,
        training_step=loop.training_step,
        micro_batch=micro_batch,
        shuffle=False,
        device="cpu",
        progress=False,
        **{"optimizer": loop.optimizer} | options,
    )


def state_of(loop: Loop) -> list[torch.Tensor]:
    """Everything that training leaves in the model and in what is held."""
    return [tensor.clone() for module in (loop.model, *loop.held) for tensor in module.state_dict().values()]


@pytest.mark.parametrize("through", ["fit", "Accumulator"])
@pytest.mark.parametrize("micro_batch", [4, 5, "auto"])
@EACH
def test_it_is_trained_exactly_by_the_users_optimizer(holder: str, micro_batch: Any, through: str) -> None:
    check(run(loop(holder, through=through), micro_batch, max_micro_batch=4 if micro_batch == "auto" else None))


@EACH
def test_it_is_trained_by_an_optimizer_that_is_made_of_the_parameters(holder: str) -> None:
    made = []
    for micro_batch in (4, 12):  # one after the other: a global holds one head at a time
        made.append(loop(holder))
        fit(made[-1], micro_batch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    tried, whole = made
    before = loop(holder).held[0].state_dict()
    for name, trained in tried.held[0].state_dict().items():
        assert not torch.equal(trained, before[name])
        torch.testing.assert_close(trained, whole.held[0].state_dict()[name], rtol=1e-9, atol=0)


@pytest.mark.parametrize("micro_batch", [4, "auto"])
@EACH
def test_its_batch_norm_normalises_by_the_window(holder: str, micro_batch: Any) -> None:
    outcome = run(loop(holder, has_batch_norm=True), micro_batch, max_micro_batch=4 if micro_batch == "auto" else None)
    assert min(map(min, outcome.cuts)) > 1
    check(outcome)


@pytest.mark.parametrize("holder", ["the model", *HOLDERS])
def test_after_running_out_of_memory_it_is_as_if_the_smaller_plan_had_been_used(holder: str) -> None:
    """Its gradients and its BatchNorm's buffers are rolled back with the model's; a measurement replays no window."""

    def fresh() -> Loop:
        return in_model(has_batch_norm=True) if holder == "the model" else loop(holder, has_batch_norm=True)

    with oom_at(None) as count:
        fit(fresh(), 4, verify=False)
    num_replayed = 0
    for n in range(1, count.operations + 1, count.operations // FAULTS):
        tried = fresh()
        try:
            with oom_at(n):
                result = fit(tried, 4, verify=False)
        except AutoaccumError:  # in the midst of the optimizer's step
            continue
        if not any(report.replays for report in result.history):
            continue
        num_replayed += 1
        again = fresh()
        fit(again, [report.micro_batches for report in result.history], verify=False)
        for found, expected in zip(state_of(tried), state_of(again), strict=True):
            assert torch.equal(found, expected), f"out of memory at operation {n} left a mark"
    assert num_replayed > 10


def test_a_frozen_teacher_in_a_closure_stays_as_it_is() -> None:
    """It is in eval mode, which is not for anybody to change, and so its BatchNorm couples nothing."""
    torch.manual_seed(0)
    student = nn.Linear(6, 3).double()
    teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    teacher.eval().requires_grad_(False)
    before = copy.deepcopy(teacher.state_dict())

    def make_step(teacher: nn.Module) -> Any:
        return lambda model, batch: F.kl_div(
            model(batch).log_softmax(1), teacher(batch).softmax(1), reduction="batchmean"
        )

    data = torch.randn(36, 6, dtype=torch.double)
    for micro_batch in (4, "auto"):
        distilled = Loop(student, data, 12, 4, training_step=make_step(teacher), held=(teacher,), make_step=make_step)
        check(run(distilled, micro_batch, max_micro_batch=4 if micro_batch == "auto" else None))
    assert not any(module.training for module in teacher.modules())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())


def test_what_the_step_does_not_use_is_left_alone() -> None:
    """A module that lies within reach of the step, and is never called, has nothing to say."""
    task = loop("a closure")
    bystander = nn.BatchNorm1d(8)
    table = {"unused": bystander}
    inner = task.training_step
    assert inner is not None

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        assert table
        return inner(model, batch)

    task.training_step = training_step
    check(run(task, 4))
    assert bystander.num_batches_tracked == 0
    assert all(p.grad is None for p in bystander.parameters())


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_a_model_that_gets_no_gradient_is_told_in_the_first_window(micro_batch: int) -> None:
    """As of a notebook, whose step calls another model by its global name."""
    model, other = mlp(), mlp(seed=1)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.warns(
        AutoaccumWarning, match="Nothing of the model, a Sequential, has a gradient, but Sequential that"
    ):
        result = autoaccum.fit(
            model, classes(16), training_step=lambda _, batch: F.cross_entropy(other(batch[0]), batch[1]), device="cpu",
            effective_batch=8, micro_batch=micro_batch, progress=False, cache=False,
        )  # fmt: skip
    assert [event.consequence for event in result.events if isinstance(event, Notice)] == [
        "No gradient of the loss reaches the model, which is not trained by it"
    ]
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.equal(old) for p, old in zip(other.parameters(), before, strict=True)), "it is trained beside it"


@pytest.mark.parametrize("micro_batch", [4, 8])
def test_gradients_that_hooks_have_dropped_are_none_that_are_missing(micro_batch: int) -> None:
    """As of an optimizer that steps within the backward."""
    model = mlp()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    result = autoaccum.fit(
        model, classes(16), loss_fn=F.cross_entropy, device="cpu", effective_batch=8, micro_batch=micro_batch,
        progress=False, cache=False,
    )  # fmt: skip
    assert not [event for event in result.events if isinstance(event, Notice) and "reaches the model" in str(event)]
