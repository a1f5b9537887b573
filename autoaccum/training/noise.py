"""The noise scale of a run: which of its windows are measured, and what their reports say of it."""

from __future__ import annotations

from typing import Any

from autoaccum.data.base import Window
from autoaccum.planning.noise import Smoothed
from autoaccum.planning.noise_windows import is_due, worth
from autoaccum.training import notices
from autoaccum.window.gradient import Gradient
from autoaccum.window.step import Step


class MeasuredNoise:
    """Has windows of a run measured, and tells what they come to."""

    def __init__(self, smoothed: Smoothed, step: Step, *, is_shared: bool) -> None:
        """Set up.

        Args:
            smoothed: the averages, which are the run's state.
            step: what runs the windows.
            is_shared: whether several ranks run a share of each, so that none is one micro-batch.
        """
        self.smoothed = smoothed
        """Moving averages of the estimates."""
        self._step, self._is_shared = step, is_shared
        self._number = 0  # windows before the one that runs
        self._is_wanted = False  # whether that one is to be measured, and its plan nobody else's to choose

    def begin(self, window: Window, plan: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Say whether the next window is to be measured; return its plan, which is to cut it for that.

        All of this follows from its number and its plan. So a run that repeats the plans of another one measures the
        same windows, whatever has been searched or timed there.
        """
        self._number, tuner = self._step.number, self._step.tuner
        self._step.transaction.measures_parts = measured = is_due(self._number, self.smoothed.most_apart)
        # A recorded plan is left as it is, and so is a size that is tried or timed: soon there is one that is settled.
        self._is_wanted = measured and plan is None and not (tuner.searching or tuner.is_timing)
        if not self._is_wanted or self._is_shared:
            return plan
        return tuner.in_two(window.num_samples, window.lengths)

    def report(self, gradient: Gradient) -> dict[str, Any]:
        """Take what a window tells; return the fields of its report."""
        noise = gradient.noise
        if noise is None:  # it was not measured, or in one piece: the averages stand as they are
            return {"noise_scale": self.smoothed.scale}
        self.smoothed.observe(noise, worth(self._number, self.smoothed.most_apart))
        return {
            "noise_scale": self.smoothed.scale,
            "gradient_squared": noise.gradient_squared,
            "gradient_variance": noise.gradient_variance,
        }

    def announce(self, window: Window, gradient: Gradient, *, is_full: bool) -> None:
        """Say what a window shows of how good the estimates are."""
        say_once = self._step.announcer.say_once
        if self._is_wanted and is_full and len(gradient.sizes) == 1:
            say_once(notices.no_noise(self._step.number, self._step.tuner.smallest))
        lengths = window.lengths
        if gradient.noise is not None and lengths is not None and lengths[0] != lengths[-1]:
            say_once(notices.NOISE_OF_SORTED)
