"""Which micro-batch size to try next, from the history of trials; and how to cut windows while that is being learnt.

One policy with two drivers: a probe asks ``next_trial`` until it has no more to ask; training asks ``Tuner`` for the
sizes of each window, and the tuner tries what ``next_trial`` says on samples that had to be trained on anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoaccum.costs import MemoryModel, Trial, fit_memory_model
from autoaccum.errors import NothingFitsError
from autoaccum.planner import cut

TOLERANCE = 0.02
"""The search ends when no size this much larger than the largest that fitted is expected to fit."""


def bounds(history: Sequence[Trial]) -> tuple[int, int | None]:
    """(largest size that fits, smallest that does not) by the newest word on each: memory may have moved meanwhile.

    The first is 0 while nothing fitted; the second None while nothing failed.
    """
    fits: set[int] = set()
    fails: set[int] = set()
    for trial in history:
        if trial.fits:
            fits.add(trial.micro_batch)
            fails = {size for size in fails if size > trial.micro_batch}
        else:
            fails.add(trial.micro_batch)
            fits = {size for size in fits if size < trial.micro_batch}
    return max(fits, default=0), min(fails, default=None)


def next_trial(
    history: Sequence[Trial], *, limit_bytes: int, ceiling: int, smallest: int = 1, growth: int = 2
) -> int | None:
    """The size to try next, or None when the search is over and ``bounds(history)[0]`` is its answer.

    Sizes double until two trials give a memory model, then jump to what the model predicts, never beyond ``growth``
    times the largest success; a prediction that failed falls back to bisection.

    Args:
        history: the trials so far, oldest first.
        limit_bytes: peak that is to be kept.
        ceiling: the largest size of any use.
        smallest: the size to begin with, and not to go below.
        growth: how far beyond the largest success a trial may go.
    """
    fits, fails = bounds(history)
    if fits >= ceiling or (fails is not None and fails <= smallest):
        return None
    if fits == 0:
        return min(smallest, ceiling) if fails is None else max(smallest, fails // 2)
    step = max(1, int(TOLERANCE * fits))
    if fails is not None and fails - fits <= step:
        return None
    model = fit_memory_model(history)
    if model is None:
        return min(2 * fits, ceiling) if fails is None else (fits + fails) // 2
    largest = min(fits * growth, ceiling, ceiling if fails is None else fails - 1)
    predicted = model.largest_within(limit_bytes)
    if predicted < fits + step:
        return None
    if fails is not None and predicted >= fails:  # the model has been wrong about this size: halve the gap instead
        return (fits + fails) // 2
    return int(min(predicted, largest))


class Tuner:
    """How each window is cut while the search goes on, and after it.

    Every size that it hands out is useful work. ``history`` holds what was learnt.
    """

    def __init__(
        self, *, ceiling: int, limit_bytes: int, headroom: float, search: bool, largest: int = 0, smallest: int = 1
    ) -> None:
        """Set up.

        Args:
            ceiling: the largest micro-batch of any use.
            limit_bytes: what this process may use.
            headroom: the fraction of it that plans leave free.
            search: whether to find out how large a micro-batch may be.
            largest: what may be used untried: a user's own micro-batch.
            smallest: no micro-batch has fewer samples, unless its window does.
        """
        self.history: list[Trial] = []
        self.limit_bytes = limit_bytes
        self.target_bytes = int(limit_bytes * (1 - headroom))
        self.searching = search
        self.largest = largest or smallest
        """The largest micro-batch to use now."""
        self.smallest = smallest
        self._ceiling = ceiling

    @property
    def memory_model(self) -> MemoryModel | None:
        """Fitted to the trials so far."""
        return fit_memory_model(self.history)

    def set_smallest(self, smallest: int) -> None:
        """The model has got other layers, or another mode: see ``coupling.smallest_micro_batch``."""
        self.smallest = smallest
        self.largest = max(self.largest, smallest)

    def plan(self, num_samples: int) -> tuple[int, ...]:
        """How to cut a window, without trials."""
        return cut(num_samples, self.largest, self.smallest)

    def sizes(self, num_samples: int) -> Iterator[tuple[int, bool]]:
        """Sizes for a window, each with whether it is a trial, chosen one by one as the outcomes come in.

        A trial is measured with the window's gradients in memory, as most micro-batches run: so it is never a
        window's first micro-batch, unless it is its only one.
        """
        remaining = num_samples
        while self.searching and (trial := self.trial_for(num_samples)) is not None:
            if remaining == num_samples != trial:
                size = self.plan(remaining)[0]
                yield size, False
            elif trial == remaining or trial <= remaining - self.smallest:
                size = trial
                yield size, True
            else:
                break
            remaining -= size
        if remaining:
            yield from ((size, False) for size in self.plan(remaining))

    def trial_for(self, num_samples: int) -> int | None:
        """The next size worth a trial for windows of so many samples, if any.

        Only sizes that make a better plan are worth an out-of-memory error: a window of 256 takes three micro-batches
        with 86 samples in each and with 127.
        """
        ceiling = min(self._ceiling, num_samples)
        fits, _ = bounds(self.history)
        size = next_trial(self.history, limit_bytes=self.target_bytes, ceiling=ceiling, smallest=self.smallest)
        if size is None or fits == 0:
            return size
        size = cut(num_samples, size, self.smallest)[0]
        return size if size > fits else None

    def observe(self, micro_batch: int, peak_bytes: int, seconds: float | None = None) -> None:
        """A trial ran, and this is what it took. The smallest may use the headroom; nothing may pass the limit.

        Raises:
            NothingFitsError: the smallest passed the limit.
        """
        smallest = micro_batch <= self.smallest
        fits = peak_bytes <= (self.limit_bytes if smallest else self.target_bytes)
        if smallest and not fits:
            raise self._nothing_fits(micro_batch, peak_bytes)
        self.history.append(Trial(micro_batch=micro_batch, fits=fits, peak_bytes=peak_bytes, seconds=seconds))
        self._use_what_fits(micro_batch)

    def out_of_memory(self, micro_batch: int, num_samples: int, peak_bytes: int | None = None) -> tuple[int, ...]:
        """A micro-batch ran out of memory, ``peak_bytes`` being reached: smaller ones for its window, and from now on.

        Raises:
            NothingFitsError: there is none.
        """
        self.history.append(Trial(micro_batch=micro_batch, fits=False))
        self._use_what_fits(micro_batch)
        plan = self.plan(num_samples)
        if plan[0] >= micro_batch:
            raise self._nothing_fits(micro_batch, peak_bytes)
        return plan

    def committed(self, micro_batch: int) -> None:
        """A window's largest micro-batch went well; news only if no trial has said so, or has said otherwise."""
        fits, fails = bounds(self.history)
        if micro_batch > fits and (fails is None or micro_batch < fails):
            self.history.append(Trial(micro_batch=micro_batch, fits=True))
            self.largest = max(self.largest, micro_batch)

    def _use_what_fits(self, tried: int) -> None:
        known = bounds(self.history)[0]
        self.largest = known or max(self.smallest, min(self.largest, tried) // 2)

    def _nothing_fits(self, micro_batch: int, peak_bytes: int | None) -> NothingFitsError:
        return NothingFitsError(
            phase="training", micro_batch=micro_batch, peak_bytes=peak_bytes, limit_bytes=self.limit_bytes
        )
