"""The gradient noise scale, from the micro-batches of windows: the batch up to which more samples are worth their time.

A window's gradient is an average over samples, so its squared norm is that of the true gradient plus noise that falls
with their number; micro-batches are batches of another size, and two sizes tell one from the other (McCandlish et al.
2018, "An Empirical Model of Large-Batch Training", appendix A.1). Squared norms are all that is needed:

A window has B samples and W items; micro-batch i has b_i and w_i of them. Its share h_i of the gradient G = sum_i h_i
is (w_i g + e_i) / W: g is the true gradient, e_i the sum of b_i independent vectors, one a sample, of mean 0 and of a
covariance whose trace is v. So

    E|h_i|^2 = (w_i^2 |g|^2 + b_i v) / W^2        E|G|^2 = |g|^2 + B v / W^2

    E(sum_i |h_i|^2 / b_i - c |G|^2) = (n - c B) v / W^2        with c = sum_i (w_i^2 / b_i) / W^2

for n parts, whatever the sizes, for |g|^2 cancels. S = B^2 v / W^2 is what makes E|G|^2 = |g|^2 + S / B, as the trace
of one sample's covariance does in the paper. Where items are samples, this is the variance between groups: what all
parts have in common cancels exactly, and the paper's two formulas are the case of two equal parts.

Other divisors would make |g|^2 cancel too. With this one parts of as many samples count alike, so that v is the mean
over all samples, also where those with more items are noisier. (Divided by its items a part of one short sample would
outweigh a long one: with lengths of 1 and of 50, one sample to a part, a thirteenth of v is left.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autoaccum._checks import number_between, positive_int
from autoaccum.errors import ArgumentError
from autoaccum.planning.schedule_kinds import REPORTS, Progress, Schedule

OFTEN = 16
"""Windows of a run of which each one is measured; of the next as many it is every second one, then every third."""

SELDOM = 64
"""Measure one of so many windows at least."""

WORTH = 4
"""Windows that an estimate stands for at most: those before it were not measured, but are as like it as it is."""

_CIRCLE = 2**32
_GOLDEN = 2_654_435_769  # of the circle, by the golden ratio


def gap(number: int, most: int = SELDOM) -> int:
    """Return of how many windows one is measured, once ``number`` of them were run; ``most`` at most.

    >>> [gap(number) for number in (0, 15, 16, 32, 10_000)]
    [1, 1, 2, 3, 64]
    """
    return min(most, number // OFTEN + 1)


def is_due(number: int, most: int = SELDOM) -> bool:
    """Return whether the window after ``number`` others is one of those that are measured.

    >>> [number for number in range(16, 32) if is_due(number)]
    [18, 20, 23, 25, 26, 28, 31]
    """
    # Multiples of the golden ratio fall evenly on a circle, and nothing has to be remembered of the window before. Each
    # n-th window might always be the same of an epoch, and so of data that are not shuffled always the same samples.
    return number * _GOLDEN % _CIRCLE * gap(number, most) < _CIRCLE


def worth(number: int, most: int = SELDOM) -> int:
    """Return how many windows the estimate from the one after ``number`` others stands for."""
    return min(gap(number, most), WORTH)


Part = tuple[int, float, float]
"""(samples, items, squared 2-norm of its share of the window's gradient) of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """One window's estimates of its gradient and of the noise in it; neither is biased, both scatter."""

    gradient_squared: float
    """Squared 2-norm of the true gradient; an estimate of it may be negative."""
    gradient_variance: float
    """Trace of the covariance of one sample's gradient; an estimate of it may be negative too."""


def estimate(parts: Sequence[Part], square: float) -> Noise | None:
    """Estimate the noise in a window's gradient from what its micro-batches add to it.

    Args:
        parts: one for each of its micro-batches, on all ranks; those without items are samples that add nothing.
        square: squared 2-norm of the window's gradient, in the same unit as those of the parts.

    Returns:
        the estimates; None when fewer than two parts have items, when some have less than none, when one of few
        samples has nearly all items, or when a number is not finite.

    >>> estimate([(4, 4, 0.5), (4, 4, 0.5)], square=1.25)
    Noise(gradient_squared=0.5, gradient_variance=6.0)
    """
    # A part without items counts among the n, for its samples count in B; but two parts are to have a gradient.
    counts = [items for _, items, _ in parts]
    numbers = [square, *(number for part in parts for number in part)]
    if sum(map(bool, counts)) < 2 or min(counts) < 0 or not all(map(math.isfinite, numbers)):
        return None
    num_samples = sum(samples for samples, _, _ in parts)
    # In the letters above: c, then the left side of the last equation, then its right side where v / W^2 is 1.
    share = sum(items * items / samples for samples, items, _ in parts) / sum(counts) ** 2
    between = sum(part / samples for samples, _, part in parts) - share * square
    expected = len(parts) - share * num_samples
    # Without n > c B nothing tells v: that is so where one part of few samples has nearly all items.
    if expected <= 0:
        return None
    # S = B^2 v / W^2, and |g|^2 = E|G|^2 - S / B.
    variance = num_samples**2 * between / expected
    squared = square - variance / num_samples
    return Noise(gradient_squared=squared, gradient_variance=variance)


@dataclass(kw_only=True, slots=True)
class Smoothed:
    """Moving averages of windows' estimates, each of its own: the mean of a ratio would be biased, and far wilder.

    Both begin at 0 and have the same weights, so what is missing from them at first cancels in their ratio.
    """

    smoothing: float
    """The share that the averages keep of themselves at each window, from 0 to below 1."""
    most_apart: int = SELDOM
    """Measure one of so many windows at least."""
    gradient_squared: float = 0.0
    """Moving average of that estimate."""
    gradient_variance: float = 0.0
    """Moving average of that estimate."""

    def observe(self, noise: Noise, windows: int = 1) -> None:
        """Take another window into the averages, which stands for so many."""
        kept = self.smoothing**windows
        self.gradient_squared = kept * self.gradient_squared + (1 - kept) * noise.gradient_squared
        self.gradient_variance = kept * self.gradient_variance + (1 - kept) * noise.gradient_variance

    def state_dict(self) -> tuple[float, float]:
        """Return the averages, for a checkpoint."""
        return self.gradient_squared, self.gradient_variance

    def load_state_dict(self, state: tuple[float, float]) -> None:
        """Put back what ``state_dict`` returned."""
        self.gradient_squared, self.gradient_variance = state

    @property
    def scale(self) -> float | None:
        """Return the noise scale in samples: infinite where no gradient shows through it; None before the first."""
        if not self.gradient_squared and not self.gradient_variance:
            return None
        # Estimates of a squared norm scatter around it: where the gradient is small, their average may be below 0.
        if self.gradient_squared <= 0:
            return math.inf
        return max(0.0, self.gradient_variance / self.gradient_squared)


SMOOTHING = 0.95
"""Weight of the past, from 0 to below 1, in the averages that noise scales are made of."""

GROW = 1.25
"""Ask for a larger batch where the noise scale is at least this many times the batch."""

SHRINK = 2.0
"""Ask for a smaller batch where the noise scale is at most the batch divided by this.

Between the two the batch stays: the estimate is noisy, and would move it to and fro.
"""


@dataclass(frozen=True, slots=True)
class NoiseScale(Schedule):
    """A batch that follows the gradient noise scale.

    Up to that scale a larger batch saves about as many steps as it costs samples (McCandlish et al., "An Empirical
    Model of Large-Batch Training", 2018, section 2.2: the ratio of the trace of the covariance of a sample's gradient
    to the squared norm of the true gradient). The batch moves by a factor of two at most, and only where ``patience``
    full windows at the present batch all say so: the estimate is noisy. Where not each window is measured, an estimate
    stands for some that are not (see ``planning.noise``), and there are fewer of them.
    """

    min: int
    """Samples at the beginning, and the fewest that it asks for."""
    max: int
    """The most samples that it asks for."""
    smoothing: float = SMOOTHING
    """Weight of the past in the averages over windows that the estimate is made of."""
    patience: int = 10
    """Full windows that have to agree, or for which estimates stand that do."""

    foreseeable: ClassVar[bool] = False  # what it asks for is in the reports of training

    def __post_init__(self) -> None:
        cure = "It takes two micro-batches to measure the noise, so a window needs two samples."
        if positive_int("min", self.min, cure) < 2:
            raise ArgumentError("min", self.min, "an int of at least 2", cure)
        if positive_int("max", self.max) < self.min:
            raise ArgumentError("max", self.max, f"at least min={self.min}")
        number_between("smoothing", self.smoothing, 0, 1)
        # Every second window may be the short one of an epoch.
        if positive_int("patience", self.patience) > REPORTS // 2:
            cure = f"{REPORTS} reports are kept, and up to half of them are of short windows."
            raise ArgumentError("patience", self.patience, f"at most {REPORTS // 2}", cure)

    def at(self, progress: Progress) -> int:
        """Return the present batch, or one nearer to the noise scale."""
        batch = progress.effective_batch
        if batch is None:
            return self.min
        known = self._scales(progress, batch)
        wanted: float = batch
        # All have to agree, and the most cautious of them says how far to go: never past any of the scales.
        if known:
            if all(scale >= GROW * batch for scale in known):
                wanted = math.floor(min(2 * batch, *known))
            elif all(scale <= batch / SHRINK for scale in known):
                wanted = math.ceil(max(batch / 2, *known))
        return int(min(max(wanted, self.min), self.max))

    @property
    def most_apart(self) -> int:
        """Return of how many windows one has to be measured, so that ``patience`` can be told from the last reports."""
        # Half of the reports may be of short windows.
        return REPORTS // 2 // -(-self.patience // WORTH)

    def _scales(self, progress: Progress, batch: int) -> list[float]:
        """Return the last estimates from full windows of the present batch; none where they stand for too few."""
        found: list[float] = []
        windows = 0  # that these stand for
        epoch = progress.epoch  # of the window after the one that is looked at
        for report in reversed(progress.reports):
            number = report.step - 1
            if report.effective_batch == batch:
                # Others repeat the scale of the averages, which a window that is not measured leaves as they are.
                if report.gradient_squared is not None and report.noise_scale is not None:
                    found.append(report.noise_scale)
                    windows += worth(number, self.most_apart)
            # Any window may be the short last one of its epoch: that is skipped. It is not if it is larger, or if its
            # epoch went on after it: another batch was asked for then, and what comes before it says nothing of this.
            elif report.effective_batch > batch or report.epoch == epoch:
                break
            if windows >= self.patience:
                return found
            epoch = report.epoch
        return []

    @property
    def largest(self) -> int:
        """Return ``max``."""
        return self.max

    @property
    def smallest(self) -> int:
        """Return ``min``."""
        return self.min

    def settled(self, progress: Progress) -> bool:
        """Return whether there is nowhere to go."""
        return self.min == self.max

    def __str__(self) -> str:
        smoothing = "" if self.smoothing == SMOOTHING else f" smoothing {self.smoothing}"
        patience = "" if self.patience == 10 else f" patience {self.patience}"
        return f"noise {self.min}:{self.max}{smoothing}{patience}"
