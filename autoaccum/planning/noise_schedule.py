"""The schedule that follows the gradient noise scale: the one whose batches only training can tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autoaccum._checks import number_between, positive_int
from autoaccum.errors import ArgumentError
from autoaccum.planning.noise_windows import WORTH, worth
from autoaccum.planning.schedule_kinds import REPORTS, Progress, Schedule

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
    stands for some that are not (see ``planning.noise_windows``), and there are fewer of them.
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
