"""Trials, and what samples count for by them.

Where samples are alike each counts for one, and a micro-batch's *load* is its samples. Where they differ in length, it
is its samples times what the longest of them counts for, such that equal loads need about equal memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from autoaccum.planning.costs import SPREAD, MemoryModel, Trial, weigher
from autoaccum.planning.search import bounds, memory_model

Lengths = Sequence[int] | None
"""Of a window's samples, the longest first; None where they are alike."""


class Loads:
    """The history of trials in samples, and in loads."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.in_loads: list[Trial] = []
        """The same as if of samples of length 1: ``micro_batch`` is the load."""
        self.prior: MemoryModel | None = None
        """Of an earlier run, in loads."""
        self.weighed: tuple[Trial, ...] = ()
        """The trials by which samples are weighed."""
        self.weight: Callable[[int], int] = weigher(())
        """(length) -> what a sample counts for."""
        self.bounds: tuple[int, int | None] = (0, None)
        """(largest load that fits, smallest that does not): see ``search.bounds``."""

    @property
    def model(self) -> MemoryModel | None:
        """Peak bytes by load."""
        return memory_model(self.in_loads, self.prior)

    def each(self, lengths: Lengths) -> int:
        """What each of so many samples counts for that are padded to the first of them."""
        return 1 if lengths is None else self.weight(lengths[0])

    def of(self, sizes: Sequence[int], lengths: Lengths) -> list[int]:
        """Of the micro-batches of a window."""
        if lengths is None:
            return list(sizes)
        loads, position = [], 0
        for size in sizes:
            loads.append(size * self.weight(lengths[position]))
            position += size
        return loads

    def work(self, num_samples: int, lengths: Lengths) -> int:
        """What a window's samples count for without padding."""
        return num_samples if lengths is None else sum(map(self.weight, lengths))

    def is_new(self, length: int) -> bool:
        """Whether samples are so much longer than any that were tried that it is worth knowing what they cost."""
        return bool(self.trials) and length >= SPREAD * max(trial.length for trial in self.trials)

    def add(self, trial: Trial, *, reweigh: bool) -> int:
        """One more; returns its load. To ``reweigh`` changes the units of all loads."""
        self.trials.append(trial)
        if reweigh:
            self._weigh(self.trials)
        self._update()
        return self.in_loads[-1].micro_batch

    def refused(self, above: int) -> Trial | None:
        """The smallest, of more samples, that ran out of memory: the last word on it, and no peak tells as much."""
        tried = zip(self.trials, self.in_loads, strict=True)
        found = (trial for trial, load in tried if load.micro_batch == self.bounds[1] and trial.peak_bytes is None)
        return next((trial for trial in found if trial.micro_batch > above), None)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "trials": [asdict(trial) for trial in self.trials],
            "weighed": [asdict(trial) for trial in self.weighed],
            "prior": None if self.prior is None else asdict(self.prior),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``state_dict`` returned."""
        self.trials = [Trial(**trial) for trial in state["trials"]]
        self.prior = None if state["prior"] is None else MemoryModel(**state["prior"])
        self._weigh([Trial(**trial) for trial in state["weighed"]])
        self._update()

    def _weigh(self, trials: Sequence[Trial]) -> None:
        self.weighed = tuple(trials)
        self.weight = weigher(trials)

    def judge(self, judged: Callable[[Trial, int], Trial | None]) -> None:
        """Put (trial, its load) -> another one in the place of each; None drops it."""
        pairs = zip(self.trials, self.in_loads, strict=True)
        found = [judged(trial, seen.micro_batch) for trial, seen in pairs]
        self.trials = [trial for trial in found if trial is not None]
        self._update()

    def _update(self) -> None:
        self.in_loads = in_loads(self.trials, self.weight)
        self.bounds = bounds(self.in_loads)


def in_loads(trials: Sequence[Trial], weight: Callable[[int], int]) -> list[Trial]:
    """The same trials as if of samples of length 1."""
    return [replace(trial, micro_batch=trial.micro_batch * weight(trial.length), length=1) for trial in trials]
