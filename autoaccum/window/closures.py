"""The closure of an optimizer's step: the gradient of the window that is there, and then as often as it is asked for.

Optimizers ask in two ways. Some call the closure first, as LBFGS does, and use no gradient from before it. Others use
the gradient that is there, move the parameters by it, and call the closure for another one where they are then, as
sharpness-aware minimisation does (Foret et al., 2021, algorithm 1). One closure serves both, for the two differ in
whether anything has been written by its first call: where nothing has, what is there already is what it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from autoaccum.memory.oom import insist
from autoaccum.window.gradient import Gradient

_CHUNK = 2**16
"""Numbers that are summed up at once: what that takes beside them is half a MiB, whatever the size of a model."""
_BETWEEN = 6364136223846793005
"""By which a sum is multiplied before the next chunk's is added, so that chunks do not stand for each other: odd, so
that nothing of it is lost (Knuth, The Art of Computer Programming, volume 2, 3.3.4)."""


class Closure:
    """Computes the loss and the gradient of one window again, wherever the parameters are by then."""

    def __init__(
        self,
        gradient: Gradient,
        optimizer: torch.optim.Optimizer,
        run: Callable[[], Gradient],
        rewind: Callable[[], None],
    ) -> None:
        """Set up before the optimizer's step.

        Args:
            gradient: of the window, in ``.grad``.
            optimizer: the one that is to be stepped.
            run: runs the window once more.
            rewind: puts the buffers and random states back that the window began with.
        """
        self._loss = gradient.loss
        self._run = run
        self._rewind = rewind
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Looked at in the first call, and only then.
        self._before: Mark | None = Mark(self._parameters)
        self._gradient = Mark(self._gradients())
        self.is_called = False
        """Whether the step has called it."""

    def _gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self._parameters]

    def __call__(self) -> torch.Tensor:
        """Return the loss, and leave its gradient in ``.grad``."""
        before, self._before = self._before, None
        self.is_called = True
        if before is not None and before.is_of(self._parameters):
            if self._gradient.is_of(self._gradients()):
                return self._loss
            # Only the gradient is gone. The window is run as if for the first time: it draws what it drew.
            self._rewind()
        return self._run().loss


class Mark:
    """A few numbers that tell whether tensors hold, to the bit, what they held: a copy would take their memory twice.

    Version counters do not tell, for many optimizers write through ``.data``, which moves none. These are sums of the
    values' bits, each times a random number of its place: two that differ are the same with a chance of 2^-32 or less
    (Dietzfelbinger et al., 1997).
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Take the mark of tensors, any of which may be missing."""
        most = max([0, *(tensor.numel() for tensor in tensors if tensor is not None)])
        self._factors = insist(partial(_factors, min(most, _CHUNK)), "parameters were looked at")
        self._sums = self._sums_of(tensors)

    def is_of(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Return whether these tensors hold the same, and the same ones are missing."""
        return self._sums == self._sums_of(tensors)

    def _sums_of(self, tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
        return insist(partial(self._read, tensors), "parameters were looked at")

    @torch.no_grad()
    def _read(self, tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
        found = [None if tensor is None else self._sum_of(tensor) for tensor in tensors]
        # Read at the end, for each reading waits until everything on the device is done.
        return [None if one is None else int(one.item()) for one in found]

    def _sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor._values()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = tensor.reshape(-1).view(kind)
        factors = self._factors.to(tensor.device)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for chunk in torch.split(bits, max(len(factors), 1)):
            total = total * _BETWEEN + (chunk.to(torch.int64) * factors[: len(chunk)]).sum()
        return total


def _factors(count: int) -> torch.Tensor:
    """Return so many odd random numbers, the same each time."""
    # A generator of its own: those of the run are left as they are.
    generator = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, (count,), dtype=torch.int64, generator=generator, device="cpu") | 1
