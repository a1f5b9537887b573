"""What is to be known of a window at its end, read off its device by one copy, before anything is decided by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from autoaccum.step.gradient import Gradients, measured
from autoaccum.step.readback import Numbers
from autoaccum.step.terms import Reduction


class Late(Protocol):
    """What has numbers that are read at a window's end."""

    def want(self, numbers: Numbers) -> None:
        """Ask for them."""

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""


class Known(NamedTuple):
    """What a window has shown, on the host: as if it had been computed there."""

    losses: list[torch.Tensor | None]
    """Of each micro-batch."""
    reductions: list[Reduction]
    """How they were reduced."""
    norms: dict[int, torch.Tensor]
    """Of what micro-batches add to the gradient."""


class Ending:
    """The end of a window on a device that is slow to read: launched as a whole, and waited for once."""

    def __init__(self, gradients: Gradients) -> None:
        """Begin with nothing that is wanted."""
        self._gradients = gradients
        self._numbers = Numbers()
        self._norm: torch.Tensor | None = None
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._found: list[torch.Tensor] | None = None
        self._scale: torch.Tensor | None = None

    def want_whole(self, scaler: torch.amp.GradScaler | None) -> None:
        """Measure the gradient as it was accumulated, for the noise in it."""
        self._whole = measured(self._gradients.stepped(), scaler)
        self._numbers.want(self._whole)

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Take the loss scale out of the gradient, and ask for what is found in doing so."""
        scaler.unscale_(optimizer)
        # Looked up before the step: the scaler's own step would read what it has found, and wait for that alone.
        self._scale = scaler._scale
        self._found = list(scaler._found_inf_per_device(optimizer).values())
        self._numbers.want([self._scale, *self._found])

    def measure(self, *, clips: bool) -> None:
        """Measure the gradient that reaches the optimizer, up to the correction; it is read if anything is.

        ``clips`` tells whether it is going to be clipped: by that alone the device is waited for.
        """
        self._norm = self._gradients.norm()
        if clips:
            self._numbers.want([self._norm])

    def read(
        self,
        losses: Sequence[torch.Tensor | None],
        reductions: Sequence[Reduction],
        norms: Mapping[int, torch.Tensor],
        others: Sequence[Late],
    ) -> Known | None:
        """Read it all; None where losses say on the host all that is decided by, so that nothing has to be waited for.

        Args:
            losses: of micro-batches.
            reductions: how they were reduced.
            norms: of what micro-batches add to the gradient.
            others: what else has numbers to be read.
        """
        # All of it is asked for before any of it is read: the device has then nothing left to do but this copy.
        numbers = self._numbers
        numbers.want(norms.values())
        numbers.want_of(reductions)
        for other in others:
            other.want(numbers)
        # By losses that have terms it is told which micro-batch adds nothing.
        if not (numbers.are_wanted or any(reduction.terms for reduction in reductions)):
            return None
        numbers.want([*losses, self._norm])
        numbers.read()
        for other in others:
            other.take_read(numbers)
        return Known(
            [None if loss is None else numbers.tensor(loss) for loss in losses],
            list(map(numbers.reduction, reductions)),
            {index: numbers.tensor(norm) for index, norm in norms.items()},
        )

    def whole(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the norm of the gradient as it was accumulated, and the loss scale in it, on the host."""
        if self._whole is None:
            return None
        norm, scale = map(self._numbers.tensor, self._whole)
        return norm, scale

    def overflow(self) -> tuple[bool, float] | None:
        """Return whether the gradient is not finite for the loss scale, and that; None without a scaler."""
        if self._found is None or self._scale is None:
            return None
        return any(map(self._numbers.count, self._found)), self._numbers.count(self._scale)

    def is_finite(self) -> bool:
        """Return whether the gradient is finite; it waits once more where its norm was not measured."""
        norm = self._gradients.norm() if self._norm is None else self._numbers.tensor(self._norm)
        return bool(norm.isfinite())

    def norm(self, correction: float) -> torch.Tensor:
        """Return the norm of the gradient, which has been corrected; on the host if anything was read there."""
        return self._gradients.norm() if self._norm is None else self._numbers.tensor(self._norm) * abs(correction)

    def clip(self, max_norm: float, correction: float) -> torch.Tensor:
        """Clip the gradient, which has been corrected; return the norm that it had, on the host."""
        # The norm of now on the device, where it clips without a wait; and its value as it was read, to be told.
        norm = self._gradients.norm() if self._norm is None else self._norm * abs(correction)
        self._gradients.clip(max_norm, norm)
        return norm if self._norm is None else self._numbers.tensor(self._norm) * abs(correction)
