"""The first checkpoint is loaded into copies at once: what cannot be resumed is told then, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice
from autoaccum.training import saving
from tests.models import classes, mlp

DATA = classes(12)


class Refuses(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("exp_avg")


class Forgets(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})


class Odd(nn.Module):
    """A layer whose extra state it cannot take up again."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError("no such state")


class Draws(torch.optim.SGD):
    """Its state is drawn anew whenever it is loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        torch.rand(3)


class Addressed(torch.optim.SGD):
    """It finds parameters by their addresses, and has modes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[Any, Any] = {}
        self.found: dict[int, Any] = {}

    def train(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p not in self.seen:
                self.seen[p], self.found[p.data_ptr()] = p, p
            assert self.found[p.data_ptr()] is p

    eval = train


class FailsInModes(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.is_loaded = True

    def train(self) -> None:
        assert not hasattr(self, "is_loaded"), "no such mode"

    eval = train


def train(tmp_path: Path, optimizer: Any = torch.optim.SGD, model: nn.Module | None = None, steps: int = 3) -> Any:
    torch.manual_seed(0)
    model = mlp() if model is None else model
    made = optimizer(model.parameters(), lr=0.1, momentum=0.9)
    return autoaccum.fit(
        model, DATA, effective_batch=6, micro_batch=6, loss_fn=cross_entropy, progress=False, cache=False,
        optimizer=made, run_dir=tmp_path, steps=steps, checkpoint_every=1,
    )  # fmt: skip


WRONG: dict[str, tuple[Any, Any, str]] = {
    "an optimizer that refuses": (Refuses, mlp, r"optimizer cannot be put back \(KeyError\('exp_avg'\)\)"),
    "an optimizer that forgets": (Forgets, mlp, r"optimizer\.state\[0\]\.momentum_buffer comes back as something else"),
    "an optimizer with modes": (FailsInModes, mlp, "AssertionError: no such mode"),
    "a layer": (torch.optim.SGD, lambda: nn.Sequential(mlp(), Odd()), r"weights cannot be put back .*no such state"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_resumed_is_told_at_once(tmp_path: Path, case: str) -> None:
    optimizer, model, problem = WRONG[case]
    with pytest.warns(autoaccum.AutoaccumWarning, match=f"cannot resume from it: .*{problem}"):
        result = train(tmp_path, optimizer, model())
    kinds = [type(event).__name__ for event in result.events]
    assert kinds.count("Notice") == 1
    assert kinds.index("Notice") == kinds.index("Saved") + 1


@pytest.mark.filterwarnings("ignore:Addressed changes found")
def test_what_is_found_by_addresses_is_found_in_the_copy(tmp_path: Path) -> None:
    result = train(tmp_path, Addressed)
    assert not [event for event in result.events if "cannot resume" in str(event)]


def test_it_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(tmp_path / "tried", Draws)
    calls = []
    monkeypatch.setattr("autoaccum.training.trainer.problem_of", lambda *args: calls.append(args) or "")
    second = train(tmp_path / "not tried", Draws)
    assert len(calls) == 1, "of the first checkpoint alone"
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    train(tmp_path / "tried", Draws, steps=4)
    assert len(calls) == 1, "not of one that was gone on from"


def test_nothing_is_tried_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_TIMES", 2**60)
    assert not [event for event in train(tmp_path, Refuses).events if isinstance(event, Notice)]


def test_a_model_that_cannot_be_copied_is_not_tried(tmp_path: Path) -> None:
    model = mlp()
    model.generator = iter(())
    object.__setattr__(model, "frames", (one for one in ()))
    assert not [event for event in train(tmp_path, Refuses, model).events if isinstance(event, Notice)]
