"""The trials of a run, and what samples weigh by them.

Where samples are alike each weighs one, and the *weight* of a micro-batch is its samples. Where they differ in length,
it is its samples times what the longest of them weighs, for the others are padded to it. Weights are such that
micro-batches of equal weight need about equal memory: so one search, for the largest weight that fits, serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from autoaccum.planning.costs import SPREAD, MemoryModel, Trial, bounds, memory_model, weigher
from autoaccum.planning.cuts import Lengths


class History:
    """Every trial so far, in samples and in weights."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        """Oldest first; ``micro_batch`` is in samples."""
        # Kept beside the others, for it is read far more often than a trial is added.
        self.in_weights: list[Trial] = []
        """The same as if of samples of length 1: ``micro_batch`` is the weight."""
        self.prior: MemoryModel | None = None
        """The memory model of an earlier run, in weights."""
        self.weighed: tuple[Trial, ...] = ()
        """The trials by which samples are weighed: those after the search leave the weights as they are."""
        self.weight: Callable[[int], int] = weigher(())
        """(length) -> what a sample of that length weighs."""
        self.bounds: tuple[int, int | None] = (0, None)
        """(largest weight that fits, smallest that does not): see ``costs.bounds``."""
        self._fitted: tuple[list[Trial] | None, MemoryModel | None, MemoryModel | None] = (None, None, None)

    @property
    def model(self) -> MemoryModel | None:
        """Return the model of peak bytes by weight, or None while too little is known."""
        # Asked for before every window, while trials are few and far between.
        trials, prior, model = self._fitted
        if trials is not self.in_weights or prior is not self.prior:
            model = memory_model(self.in_weights, self.prior)
            self._fitted = (self.in_weights, self.prior, model)
        return model

    def each(self, lengths: Lengths) -> int:
        """Return what each of so many samples weighs that are padded to the first of them."""
        return 1 if lengths is None else self.weight(lengths[0])  # the first is the longest

    def weights(self, sizes: Sequence[int], lengths: Lengths) -> list[int]:
        """Return the weight of each micro-batch of a window that is cut into these sizes."""
        if lengths is None:
            return list(sizes)
        # The longest come first, so that a micro-batch is padded to its first sample.
        weights, position = [], 0
        for size in sizes:
            weights.append(size * self.weight(lengths[position]))
            position += size
        return weights

    def work(self, num_samples: int, lengths: Lengths) -> int:
        """Return what a window's samples weigh without padding."""
        # By this windows of different samples are compared, however they are cut.
        return num_samples if lengths is None else sum(map(self.weight, lengths))

    def is_new(self, length: int) -> bool:
        """Return whether samples are so much longer than any that were tried that what they cost is worth a trial."""
        # While nothing was tried there is nothing to be longer than.
        return bool(self.trials) and length >= SPREAD * max(trial.length for trial in self.trials)

    def add(self, trial: Trial, *, reweigh: bool) -> int:
        """Keep one more trial, and return its weight. To ``reweigh`` changes the units of all weights."""
        # Weights that others remember are in the units of before then: ``Largest.record`` says when that does no harm.
        self.trials.append(trial)
        if reweigh:
            self._weigh_by(self.trials)
        self._update()
        return self.in_weights[-1].micro_batch

    def refused(self, above: int) -> Trial | None:
        """Return the smallest trial, of more than ``above`` samples, that ran out of memory, if that still stands.

        It has no peak, and is worth as much to a later run as all those that have one.
        """
        # The bounds are of weights, for only these can be compared where samples differ; who asks wants the samples.
        for trial, weighed in zip(self.trials, self.in_weights, strict=True):
            is_smallest_failure = weighed.micro_batch == self.bounds[1] and trial.peak_bytes is None
            if is_smallest_failure and trial.micro_batch > above:
                return trial
        return None

    def judge(self, judged: Callable[[Trial, int], Trial | None]) -> None:
        """Put what (trial, its weight) -> another trial returns in the place of each; None drops it."""
        found = []
        for trial, weighed in zip(self.trials, self.in_weights, strict=True):
            if (kept := judged(trial, weighed.micro_batch)) is not None:
                found.append(kept)
        self.trials = found
        # The weights stay: trials are dropped for what memory there was, not for what a sample takes of it.
        self._update()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            # Both, for which of the trials the weights were told from cannot be seen by looking at them.
            "trials": [trial.state_dict() for trial in self.trials],
            "weighed": [trial.state_dict() for trial in self.weighed],
            "prior": None if self.prior is None else asdict(self.prior),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.trials = [Trial(**trial) for trial in state["trials"]]
        prior = state["prior"]
        self.prior = prior and MemoryModel(**prior)
        # Before the trials are weighed.
        self._weigh_by([Trial(**trial) for trial in state["weighed"]])
        self._update()

    def _weigh_by(self, trials: Sequence[Trial]) -> None:
        self.weighed = tuple(trials)
        self.weight = weigher(trials)

    def _update(self) -> None:
        self.in_weights = in_weights(self.trials, self.weight)
        self.bounds = bounds(self.in_weights)


def in_weights(trials: Sequence[Trial], weight: Callable[[int], int]) -> list[Trial]:
    """Return the same trials as if of samples of length 1."""
    return [replace(trial, micro_batch=trial.micro_batch * weight(trial.length), length=1) for trial in trials]
