"""What a run does so that its ranks stay the same: they begin alike, draw apart, and end after the same window."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autoaccum import _checks
from autoaccum.data import randomness
from autoaccum.data.base import Source
from autoaccum.errors import ArgumentError
from autoaccum.ranks.group import Group
from autoaccum.training.declarations import Checked
from autoaccum.training.followed import Followed
from autoaccum.training.options import FitArguments
from autoaccum.window.modules import State
from autoaccum.window.step import Step


def refuse(arguments: FitArguments, checked: Checked) -> None:
    """Refuse what several ranks cannot do together.

    Raises:
        ArgumentError: it was asked for.
    """
    refused = {
        "before_window": arguments.before_window is not None,
        "min_micro_batch": (arguments.min_micro_batch or 1) > 1,
        "micro_batch": bool(checked[_checks.recorded_plans]),
    }
    for name, is_asked_for in refused.items():
        if is_asked_for:
            cure = "Ranks do not do this together yet: leave it out, or train on one process."
            raise ArgumentError(name, getattr(arguments, name), "nothing of the kind with several ranks", cure)


class Kept(Protocol):
    """The state of a run: see ``run_state``."""

    @property
    def step(self) -> Step:
        """Return what takes its steps."""

    def state_dict(self) -> tuple[State, State]:
        """Return (the model's state_dict, everything else)."""

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned."""


def begin(group: Group, run: Kept, arguments: FitArguments, source: Source, num_steps: int | None) -> None:
    """Make all ranks begin as the first one does: in weights, buffers, the optimizer's state, and where it goes on.

    Args:
        group: the ranks.
        run: of this one, which the first rank has put where it goes on.
        arguments: those of this rank.
        source: its data.
        num_steps: of the run, where they are known.

    Raises:
        ArgumentError: a rank trains something else.
    """
    if source.num_samples is None:
        cure = "Each rank would read all of it by itself. Pass a dataset with a length."
        raise ArgumentError("data", type(arguments.data).__name__, "data whose samples can be counted", cure)
    parameters = run.step.transaction.trained()
    group.prepare([p for p in parameters if p.requires_grad])
    given = {
        "model": [tuple(p.shape) for p in parameters],
        "data": f"{source.num_samples} samples",
        # A function is another object on each rank; what it asks for is compared in each window.
        "effective_batch": _shown(arguments.effective_batch),
        "seed": arguments.seed,
        "steps": num_steps,
    }
    # What differs would show in no error: each rank would compute the gradient of another run, and add it up.
    told = group.exchange(given)
    for rank, found in enumerate(told):
        for name, value in found.items():
            if value != told[0][name]:
                raise ArgumentError(name, value, f"what rank 0 was given, {told[0][name]} (this is of rank {rank})")
    # By what a checkpoint holds, so that a run that goes on is told in the same way as one that begins. What the first
    # rank has found out about memory comes with it, and is judged by the limit of each.
    weights, state = group.from_first(run.state_dict)
    if not group.is_first:
        run.load_state_dict(weights, state)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | str) else type(value).__name__


def seed(group: Group, of_run: int, step: int) -> None:
    """Seed what this rank draws in a window: other numbers than other ranks, the same when it is run after a resume."""
    # By the step, and not by what was drawn before: a checkpoint has the random states of the first rank alone.
    number = randomness.mix(of_run, step, group.rank) >> 1
    torch.manual_seed(number)
    randomness.seed_host(number)


def agreed(group: Group, wish: str | None, followed: Followed) -> str | None:
    """Return why the run ends, if any rank wishes it to; make what forwards write to the same on all."""
    # A wish is no end yet: a rank that ended by itself would leave the others waiting in their next window.
    told = group.exchange((wish, followed.marks()))
    followed.make_same(group, [marks for _, marks in told])
    return next((found for found, _ in told if found is not None), None)
