"""What ``fit`` and ``Accumulator`` share, where neither shows it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import AutoaccumWarning, LossSideEffectError, NonFiniteLossError, NothingFitsError
from autoaccum.events import Event, Notice, Planned, Replanned, StepSkipped
from autoaccum.memory.devices import memory_of
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.step import Step
from autoaccum.step.verification import Examination
from autoaccum.training.setup import GivenBatch
from tests.devices import DEVICE
from tests.models import classes, mlp, same
from tests.reporting.synthetic import verified
from tests.step.making import step_of

HERE = torch.device(DEVICE)
pytestmark = pytest.mark.device


def step(events: list[Event], **options: Any) -> Step:
    return step_of(mlp(), emit=events.append, **options)


def window(num_samples: int = 8) -> GivenBatch:
    return GivenBatch(classes(num_samples), num_samples, HERE)


def test_a_recorded_plan_is_followed_while_its_sizes_fit() -> None:
    made = step([])
    assert made.run(window(), (3, 4, 1))[0].sizes == (3, 4, 1)
    made.tuner.out_of_memory(4, 8)
    assert made.run(window(), (3, 4, 1))[0].sizes == (2, 2, 2, 2)


def test_a_loss_that_is_not_finite_is_refused_in_the_first_window_only() -> None:
    def training_step(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1]) * factor["value"]

    factor = {"value": float("nan")}
    made = step([], loss_of=loss_function(None, training_step))
    with pytest.raises(NonFiniteLossError, match="loss of the first window is nan"):
        made.run(window())
    assert all(p.grad is None for group in made.job.optimizer.param_groups for p in group["params"])
    made = step([], loss_of=loss_function(None, training_step))
    factor["value"] = 1.0
    made.run(window())
    factor["value"] = float("nan")
    assert made.run(window())[0].loss.isnan()


def test_steps_are_counted_and_left_out_where_there_is_nothing_to_learn() -> None:
    events: list[Event] = []
    made = step(events)
    made.apply(made.run(window())[0])
    before = [p.clone() for group in made.job.optimizer.param_groups for p in group["params"]]
    inputs, targets = classes(8)
    nothing = GivenBatch((inputs, targets.fill_(-100)), 8, HERE)
    with pytest.warns(AutoaccumWarning, match="Nothing in window 2 counts"):
        assert made.apply(made.run(nothing)[0]) is False
    assert made.number == 2
    assert events[1:] == [StepSkipped(step=2, reason="no micro-batch of the window has an item to learn from")]
    assert same(before, [p for group in made.job.optimizer.param_groups for p in group["params"]])


def test_the_search_ends_with_a_plan_that_is_said() -> None:
    events: list[Event] = []
    made = step(events, micro_batch=None)
    for _ in range(4 if HERE.type == "cpu" else 8):  # where each size is run once before it is measured
        made.run(window())
        made.settle(8)
    assert [type(event) for event in events] == [Planned]
    assert events[0].sizes == (8,)  # type: ignore[union-attr]
    assert made.tuner.searching is False


def test_a_limit_below_the_devices_own_is_watched() -> None:
    memory = memory_of(HERE)
    # Unless the device can be told to keep that one.
    assert step([], limit_now=lambda: 2**60 - 1, memory=memory).limit.is_enforced is (HERE.type != "cpu")
    assert step([], memory=memory).limit.is_enforced is memory.enforced


def test_one_sample_that_does_not_fit_is_named() -> None:
    def training_step(model: Any, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(NothingFitsError, match="a micro-batch of 1") as caught:
        step([], loss_of=loss_function(None, training_step)).run(window())
    assert (caught.value.micro_batch, caught.value.limit_bytes) == (1, 2**60)


@pytest.mark.parametrize("what", ["backward", "zero_grad"])
def test_a_training_step_that_does_more_than_return_the_loss_is_refused(what: str) -> None:
    def training_step(model: Any, batch: Any) -> torch.Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        if what == "backward":
            loss.backward(retain_graph=True)
        else:
            model.zero_grad()
        return loss

    with pytest.raises(LossSideEffectError, match=r"Leave backward\(\), zero_grad\(\), step\(\) and clipping"):
        step([], loss_of=loss_function(None, training_step)).run(window())


def test_a_loss_that_is_not_finite_later_is_said_once() -> None:
    events: list[Event] = []
    made = step(events)
    with pytest.warns(AutoaccumWarning, match="The loss of window 0 is nan"):
        made.announce_not_finite(float("nan"))
    made.announce_not_finite(float("inf"))
    assert len(events) == 1


def test_a_plan_that_gives_way_before_a_short_window_is_told_of_full_ones() -> None:
    events: list[Event] = []
    limit = {"now": 1000}
    made = step(events, micro_batch=None, limit_now=lambda: limit["now"], headroom=0.0)
    for size in (1, 2, 4, 8):
        made.tuner.observe(size, 100 + 100 * size)
    made.tuner.settle(8)
    assert made.tuner.plan(8) == (8,)
    limit["now"] = 550
    made.plans.look(window(3))
    (told,) = [event for event in events if isinstance(event, Replanned)]
    assert (told.old, told.new, told.reason) == ((8,), (4, 4), "the limit fell to 550 B")


def test_a_plan_that_holds_although_more_was_tried_is_not_told_as_another() -> None:
    events: list[Event] = []
    made = step(events)
    made.plans.replanned((4, 4), (4, 4), "out of memory")
    assert events == []
    made.plans.replanned((4, 4), (3, 3, 2), "out of memory")
    assert len(events) == 1


def test_a_limit_below_the_smallest_micro_batch_is_said_once() -> None:
    events: list[Event] = []
    limit = {"now": 2**60}
    made = step(events, micro_batch=None, limit_now=lambda: limit["now"])
    made.run(window())
    limit["now"] = made.tuner.limits.least_bytes - 1
    made.plans.next_look = 0.0
    with pytest.warns(AutoaccumWarning, match="Training goes on above the limit"):
        made.run(window())
    made.plans.next_look = 0.0
    made.run(window())
    assert sum(isinstance(event, Notice) for event in events) == 1


class Told:
    """An examiner that says what it is told to say of a window."""

    is_checked = True
    has_failed = joins = verifies = is_owed = False

    def __init__(self, *found: Any) -> None:
        self.found = list(found)
        self.seen: list[tuple[int, tuple[int, ...], int]] = []
        self.withheld: list[Any] = []
        self.uncertain: str | None = None

    def begin_attempt(self, number: int, announce: Any, way: object) -> None:
        """Do nothing."""

    def put_back(self) -> None:
        pass

    def break_off(self) -> None:
        """Do nothing."""

    def check_first(self, gradient: Any) -> None:
        """Do nothing."""

    def examine(self, window: Any, gradient: Any, number: int, most: int, aside: Any = None) -> Any:
        self.seen.append((number, gradient.sizes, most))
        return self.found.pop(0) if self.found else Examination()


@pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
def test_a_window_that_was_cut_is_examined_and_what_is_found_is_told_in_order() -> None:
    events: list[Event] = []
    made = step(events)
    notice = Notice(cause="a", consequence="b", cure="c")
    verified_event = verified(0.1)
    made._examiner = told = Told(Examination([verified_event, notice, notice]))  # type: ignore[assignment]
    made.run(window())
    assert told.seen == [(1, (4, 4), 8)]
    assert [event for event in events if event in (verified_event, notice)] == [verified_event, notice], "once"
    events.clear()
    made.run(window(4))
    assert len(told.seen) == 1, "a whole one is not"


def test_a_window_that_was_weighed_otherwise_is_run_again_in_the_same_sizes() -> None:
    made = step([])
    made._examiner = told = Told(Examination(again=True))  # type: ignore[assignment]
    gradient, replays = made.run(window(), (3, 4, 1))
    assert gradient.sizes == (3, 4, 1)
    assert [sizes for _, sizes, _ in told.seen] == [(3, 4, 1)] * 2
    assert replays == 0, "memory did not run out"


def test_a_window_with_smaller_micro_batches_than_can_be_computed_is_cut_anew() -> None:
    made = step([])
    made._examiner = told = Told(Examination(smallest=2))  # type: ignore[assignment]
    gradient, _ = made.run(window(), (3, 4, 1))
    assert min(gradient.sizes) >= 2
    assert made.tuner.smallest == 2
    assert len(told.seen) == 2


@pytest.mark.parametrize("micro_batch", [1, 4, 7, "auto"])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_one_sample_that_is_no_number_ends_the_run_before_the_first_step(micro_batch: Any, place: int) -> None:
    """Its micro-batch is left out at first, as one that counts nothing is, until the whole is found to be none either."""
    inputs, targets = classes(12)
    inputs[place] = math.nan
    model = mlp()
    before = [p.tolist() for p in model.parameters()]
    with pytest.raises(NonFiniteLossError, match="loss of the first window is nan; no step was taken"):
        autoaccum.fit(
            model, (inputs, targets), effective_batch=12, micro_batch=micro_batch, loss_fn=cross_entropy, device=DEVICE,
            progress=False, cache=False, shuffle=False,
        )  # fmt: skip
    assert [p.tolist() for p in model.parameters()] == before
