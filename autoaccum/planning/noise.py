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

from autoaccum.planning.noise_windows import SELDOM

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
