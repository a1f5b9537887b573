"""Evaluations of a run whose micro-batches are joined: the loss is that of a full batch, as it is in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from autoaccum.data import randomness
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.planning.cuts import cut
from autoaccum.verification.rows import COUNTS, RowChecks, sizes_of
from autoaccum.window.split_calls import Layout, NotRowsError, joining

T = TypeVar("T")


class JoinedEvaluations:
    """How the modules of a model are split where it is evaluated: more may have to be opened than in training."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Set up for what is called, which torch.compile may have made of a module."""
        self._model, self._device = model, device
        self._layout: Layout | None = None

    def follow(self, trained: Layout | None) -> bool:
        """Join evaluations where training is joined; return whether it is."""
        if trained is None:
            self._layout = None
            return False
        if self._layout is None:
            self._layout = Layout(trained.roots)
        for module in trained.opened():
            self._layout.open(module)
        return True

    def measure(self, num_samples: int, few: Callable[[int], object]) -> None:
        """Find out where the rows of each call lie, and which modules have to be opened; once.

        Args:
            num_samples: that there are.
            few: (count) -> the loss of so many of them.
        """
        assert self._layout is not None
        if self._layout.rows:
            return
        for count in (count for count in COUNTS if count <= num_samples):
            try:
                if not isinstance(attempt(partial(self._measured, self._layout, count, few)), RanOut):
                    return
            except Exception:  # of a step that wants the whole batch: shapes tell where its rows lie
                return

    def _measured(self, layout: Layout, count: int, few: Callable[[int], object]) -> None:
        state = randomness.get_state(self._device)
        try:
            with joining(self._model, layout, sizes_of(count), self._device, checks=RowChecks()):
                few(count)
        finally:
            randomness.set_state(state, self._device)

    def run(self, num_samples: int, most: int, compute: Callable[[], T]) -> T:
        """Return what a function returns whose calls are split.

        Args:
            num_samples: that it computes.
            most: samples of a micro-batch.
            compute: the function.
        """
        assert self._layout is not None
        sizes = cut(num_samples, most)
        while True:
            state = randomness.get_state(self._device)
            try:
                with joining(self._model, self._layout, sizes, self._device):
                    return compute()
            except NotRowsError as error:
                self._layout.open(error.module)
            randomness.set_state(state, self._device)
