"""What an optimizer keeps on itself: saved with the run, or announced after its first step."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice, StepReport
from autoaccum.training.optimizer_attributes import OptimizerAttributes
from tests.models import classes, mlp

DATA = classes(24, torch.float64)


class Decays(torch.optim.Optimizer):
    """Its rate falls by what it has counted and added up on itself, and by what it remembers by the ids of parameters."""

    taken = late = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3})
        self.taken, self.parameters = 0, [p for group in self.param_groups for p in group["params"]]
        self.total, self.seen = torch.zeros((), dtype=torch.float64), {"sums": np.zeros(1), "names": ["a"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        self.late += 1
        self.total += float(self.parameters[0].grad.abs().sum())
        self.seen["sums"][0] += 1
        self.seen["names"].append("b")
        for p in self.parameters:
            scale = self.taken + self.late + self.total + self.seen["sums"][0] + len(self.seen["names"])
            p.sub_(p.grad * (0.3 / scale))


class Tracker:
    count = 0


class Loses(Decays):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tracker, self.unchanged, self.by_id = Tracker(), Tracker(), dict[int, int]()
        self.model = torch.nn.ParameterList(self.parameters)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.tracker.count += 1
        self.by_id = {id(p): self.taken for p in self.parameters}


class Slots:
    __slots__ = ("__count", "unset")

    def __init__(self) -> None:
        self.__count = 0

    def add(self) -> None:
        self.__count += 1


class Hides(Decays):
    """Counts where neither attributes nor containers show it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slots, self.numbers, self.yielded = Slots(), itertools.count(), (number for number in range(99))
        self.counts, self.counts_in_a_list = counting(), counting_in_a_list()
        # None of these changes.
        self.other_slots, self.other_function, self.given, self.log = Slots(), counting(), params, io.StringIO()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.slots.add()
        next(self.numbers), next(self.yielded), self.counts(), self.counts_in_a_list()


def counting() -> Any:
    count = 0

    def more() -> None:
        nonlocal count
        count += 1

    return more


def counting_in_a_list() -> Any:
    count = [0]

    def more() -> None:
        count[0] += 1

    return more


def train(kind: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = mlp(torch.float64)
    result = autoaccum.fit(
        model, DATA, effective_batch=6, micro_batch=4, loss_fn=cross_entropy, progress=False, cache=False, epochs=2,
        optimizer=kind(model.parameters()), **options,
    )  # fmt: skip
    return result, torch.cat([p.detach().flatten() for p in model.parameters()])


def stop(record: Any) -> None:
    if isinstance(record, StepReport) and record.step == 5:
        raise autoaccum.StopTraining


def test_a_run_that_goes_on_finds_them(tmp_path: Path) -> None:
    _, expected = train(Decays)
    train(Decays, run_dir=tmp_path, callbacks=[stop])
    result, found = train(Decays, run_dir=tmp_path)
    assert torch.equal(found, expected)
    optimizer: Any = result.optimizer
    assert (optimizer.taken, optimizer.late, optimizer.seen["sums"].tolist()) == (8, 8, [8.0])
    assert len(optimizer.seen["names"]) == 9
    assert all(p is own for p, own in zip(optimizer.parameters, result.model.parameters(), strict=True))
    assert not [event for event in result.events if isinstance(event, Notice)]


class Wraps(torch.optim.Optimizer):
    """It hands on all that it does to one in a list, and that has the state."""

    def __init__(self, params: Any) -> None:
        self.inner = [Decays(params)]
        super().__init__(self.inner[0].param_groups, {"lr": 0.3})
        self.param_groups = self.inner[0].param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner[0].step(closure)

    def state_dict(self) -> Any:
        return {"inner": self.inner[0].state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner[0].load_state_dict(state_dict["inner"])


def test_those_of_one_that_is_wrapped_come_back_too(tmp_path: Path) -> None:
    _, expected = train(Wraps)
    train(Wraps, run_dir=tmp_path, callbacks=[stop])
    result, found = train(Wraps, run_dir=tmp_path)
    assert torch.equal(found, expected)
    optimizer: Any = result.optimizer
    assert optimizer.inner[0].taken == 8
    assert not [event for event in result.events if isinstance(event, Notice)]


class Draws(Decays):
    """Its rate is drawn."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.of_torch, self.of_numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.of_python, self.more = random.Random(3), [random.Random(4), random.Random(5)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = float(torch.rand((), generator=self.of_torch)) + self.of_numpy.random() + self.of_python.random()
        for p in self.parameters:
            p.sub_(p.grad * rate)


class DrawsMore(Draws):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.more[1].random()


def test_generators_of_an_optimizer_go_on_where_they_were(tmp_path: Path) -> None:
    _, expected = train(Draws)
    train(Draws, run_dir=tmp_path, callbacks=[stop])
    result, found = train(Draws, run_dir=tmp_path)
    assert torch.equal(found, expected)
    assert not [event for event in result.events if isinstance(event, Notice)]


def test_those_in_lists_are_announced(tmp_path: Path) -> None:
    with pytest.warns(autoaccum.AutoaccumWarning, match="DrawsMore changes more of its own"):
        train(DrawsMore, run_dir=tmp_path)


def test_what_cannot_be_saved_is_announced_after_the_first_step(tmp_path: Path) -> None:
    told = []
    with pytest.warns(autoaccum.AutoaccumWarning, match="Loses changes tracker, by_id of its own"):
        result, _ = train(Loses, run_dir=tmp_path, callbacks=[lambda record: told.append(type(record).__name__)])
    assert told.count("Notice") == 1
    assert told.index("Notice") < told.index("StepReport") + 4
    assert result.num_steps == 8


def test_what_lies_hidden_is_announced_too(tmp_path: Path) -> None:
    hidden = "slots, numbers, yielded, counts, counts_in_a_list"
    with pytest.warns(autoaccum.AutoaccumWarning, match=f"Hides changes {hidden} of its own"):
        train(Hides, run_dir=tmp_path)


def test_what_an_optimizers_own_state_dict_has_is_not_announced(tmp_path: Path) -> None:
    class Keeps(Loses):
        def state_dict(self) -> Any:
            place = {id(p): index for index, p in enumerate(self.parameters)}
            kept = {place[key]: value for key, value in self.by_id.items()}
            return {**super().state_dict(), "kept": kept, "count": self.tracker.count}

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.by_id = {id(self.parameters[index]): value for index, value in state_dict["kept"].items()}

    with pytest.warns(autoaccum.AutoaccumWarning, match="Keeps changes tracker of its own"):
        train(Keeps, run_dir=tmp_path)


def test_the_model_that_an_optimizer_holds_is_not_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(torch.float64), nn.BatchNorm1d(3, dtype=torch.float64))
    optimizer = Decays(model.parameters())
    optimizer.model = model  # type: ignore[attr-defined]
    result = autoaccum.fit(
        model, DATA, effective_batch=6, micro_batch=6, loss_fn=cross_entropy, progress=False, cache=False,
        optimizer=optimizer, run_dir=tmp_path,
    )  # fmt: skip
    assert not [event for event in result.events if isinstance(event, Notice)]


def test_pytorchs_own_keep_nothing_on_themselves() -> None:
    optimizer = torch.optim.LBFGS(mlp().parameters())
    found = OptimizerAttributes(optimizer)
    assert (found.state_dict(), found.lost()) == ({}, [])
