"""The ranks that call an ``Accumulator`` with a part of a batch each: what they compare, and make the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoaccum.data.base import Window
from autoaccum.distributed.group import Group, join
from autoaccum.distributed.launcher import is_launched
from autoaccum.distributed.shards import Part
from autoaccum.errors import ArgumentError, EmptyDatasetError, RankError
from autoaccum.step.module_state import State, load_modules, load_optimizer, state_of_modules
from autoaccum.step.optimizers import bare_tensors
from autoaccum.training import rank_sync
from autoaccum.training.rank_sync import Followed
from autoaccum.training.single_process import Ranks


class Meeting:
    """The ranks of one ``Accumulator``, one of which every rank has made."""

    _number = 0  # of the last that was made in this process

    def __init__(
        self, group: Group, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        """Set up; ranks are first heard of in the first step."""
        # Several Accumulators take turns, as of a generator and a discriminator: in the same order on all ranks.
        Meeting._number += 1
        self.group = group
        self._number = Meeting._number
        self._modules = modules
        self._optimizer = optimizer
        self._device = device
        self._followed = Followed(modules)
        self._has_begun = False

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell other ranks of the error that ends what is within it, for they wait for this one.

        Raises:
            RankError: an error has ended it before, on whatever rank.
        """
        if self.group.is_over:
            raise RankError(None, "an earlier step has failed, and ranks agree on nothing after that")
        try:
            yield
        except BaseException as error:
            self.group.fail(error)
            raise

    def part(self, window: Window, given: dict[str, Any], call: str) -> Part:
        """Return what this rank was given of a batch, as a part of what all of them were given.

        Args:
            window: of this rank, which may be empty.
            given: what is to be the same on all ranks; it is compared once.
            call: what is being done, as users call it, and its number.

        Raises:
            ArgumentError: ranks train something else, have come to another learning rate, or call something else.
            EmptyDatasetError: none of them was given any sample.
        """
        if not self._has_begun:  # and not when it is made: weights may be read from a file after that
            self._begin(given)
            self._has_begun = True
        said = f"{call} of Accumulator {self._number}"
        # One exchange for all of it, before any sample is computed: what follows are sums that all have to join.
        told = self.group.exchange((said, window.num_samples, _settings(self._optimizer)))
        for rank, (other, _, settings) in enumerate(told):
            if other != told[0][0]:
                cure = "Ranks train together: let all of them call the same, in the same order."
                raise ArgumentError("ranks", other, f"{told[0][0]} as on rank 0 (this is of rank {rank})", cure)
            if settings != told[0][2]:
                own, first = next(pair for pair in zip(settings, told[0][2], strict=False) if pair[0] != pair[1])
                cure = "Weights would come apart: let schedulers go by what is the same on all ranks."
                raise ArgumentError("optimizer", own, f"{first} as on rank 0 (this is of rank {rank})", cure)
        # An empty part is none of an error, as long as there is something to step on.
        sizes = [size for _, size, _ in told]
        if not sum(sizes):
            raise EmptyDatasetError("batch", "no rank was given any.")
        return Part(window, self.group.rank, sizes)

    def make_same(self) -> None:
        """Make what forwards write to the same on all ranks, after a window."""
        rank_sync.agreed(self.group, self.group.exchange((None, self._followed.marks())), self._followed)

    def _begin(self, given: dict[str, Any]) -> None:
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        # By shapes, and not by names: gradients are added up in the order of the parameters.
        shapes = [tuple(p.shape) for module in self._modules for p in module.parameters()]
        held = (type(self._optimizer).__name__, len(_settings(self._optimizer)), [tuple(p.shape) for p in trained])
        rank_sync.compare(self.group, {"model": shapes, "optimizer": held, **given})
        rank_sync.take_from_first(self.group, self)

    # As of a run: weights, and all else.

    def state_dict(self) -> tuple[State, State]:
        """Return all that steps go on from."""
        held = [tensor.detach() for tensor in bare_tensors(self._optimizer, self._modules)]
        return {}, {
            "modules": state_of_modules(self._modules),
            "optimizer": self._optimizer.state_dict(),
            "tensors": held,
        }

    def load_state_dict(self, weights: State, state: State) -> None:
        """Put back what ``state_dict`` returned on another rank."""
        load_modules(self._modules, state["modules"], self._device)
        with torch.no_grad():
            for tensor, value in zip(bare_tensors(self._optimizer, self._modules), state["tensors"], strict=True):
                tensor.copy_(value)
        load_optimizer(self._optimizer, state["optimizer"])


def meeting_of(
    ranks: Ranks, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
) -> Meeting | None:
    """Return the ranks that this process trains with, which are waited for the first time; None where it is alone."""
    group = join(device) if ranks == "together" and is_launched() else None
    return None if group is None else Meeting(group, modules, optimizer, device)


def _settings(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what an optimizer steps by, as far as it is plain numbers: rates, which schedulers change, and others."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            numbers = value if isinstance(value, tuple) else (value,)
            if all(isinstance(number, int | float) for number in numbers):
                found.append(f"{name}={value!r} of group {index}")
    return found
