"""Refuses steps of the optimizer that nobody means: within a window, and once more on a gradient stepped on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from autoaccum.errors import AlreadySteppedError, LossSideEffectError

_TWICE = (
    "was called after accumulator.step(batch), which has taken that step. Leave optimizer.step() and zero_grad() out "
    "of the loop; or call accumulator.backward(batch), which leaves the gradient for a step of your own."
)


class _Open(Protocol):
    """What may be in the midst of a window."""

    @property
    def is_open(self) -> bool:
        """Return whether it is."""


class Strays:
    """Who steps one optimizer, for all that step it by ``Stepper``: see ``strays_of``."""

    def __init__(self) -> None:
        """Begin without a window."""
        # Weakly, for an Accumulator that nobody holds any more has no window either.
        self.windows: weakref.WeakSet[_Open] = weakref.WeakSet()
        """What is in a window while its ``is_open`` says so."""
        self._is_ours = 0  # how many steps of ours are under way: the closure of one may take another
        # The gradients that were stepped on, and their version counters; None where a step is somebody else's to take.
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] | None = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Let steps pass within this context."""
        self._is_ours += 1
        try:
            yield
        finally:
            self._is_ours -= 1

    def expect(self) -> None:
        """Let whoever comes next step on the gradient that is there."""
        self._left = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the gradient which is there now was stepped on."""
        self._left = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if gradient is not None:
                    self._left[id(p)] = weakref.ref(gradient), gradient._version

    def look_at(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a step that is about to be taken is none that anybody means.

        Raises:
            LossSideEffectError: it is taken in the midst of a window, whose gradient is not there yet.
            AlreadySteppedError: it is taken on the gradient that was stepped on, or on none that came after it.
        """
        if self._is_ours:
            return
        if any(window.is_open for window in self.windows):
            raise LossSideEffectError("training_step or the model", "called optimizer.step()")
        # Whoever passes a closure computes a gradient by it, and that is not there yet.
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        if self._left is not None and not has_closure and self._is_as_left(optimizer):
            raise AlreadySteppedError(f"{type(optimizer).__name__}.step() {_TWICE}")

    def _is_as_left(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether nothing was added to the gradients since: each is what it was, or gone, or 0."""
        left = self._left or {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient: torch.Tensor | None = p.grad
                if gradient is None:  # as zero_grad() leaves it
                    continue
                kept = left.get(id(p))
                if kept is None or kept[0]() is not gradient:
                    return False
                # zero_grad(set_to_none=False) writes zeros. Only of what was written to is a value asked for, and not
                # of sharded ones, whose ranks would have to ask together.
                if gradient._version != kept[1] and (type(gradient) is not torch.Tensor or _has_any(gradient)):
                    return False
        return True


def _has_any(gradient: torch.Tensor) -> bool:
    """Return whether anything in a gradient is not 0; of a sparse one nobody asks."""
    return gradient.layout is not torch.strided or bool(gradient.any())


def strays_of(optimizer: torch.optim.Optimizer) -> Strays:
    """Return what watches the steps of an optimizer: the same for all who ask, for as long as any of them is there."""
    # What wraps an optimizer, as Accelerate does, may have no hooks of its own, and steps the one within.
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return Strays()
        optimizer = inner
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, _Hook) and (found := hook.strays()) is not None:
            return found
    strays = Strays()
    handle = optimizer.register_step_pre_hook(_Hook(strays))
    weakref.finalize(strays, handle.remove)
    return strays


class _Hook:
    """A hook of an optimizer that keeps alive nothing but itself, and does nothing once that is gone."""

    def __init__(self, strays: Strays | None = None) -> None:
        """Set up; without anything to tell, as copies of an optimizer have it, it does nothing."""
        self._strays = None if strays is None else weakref.ref(strays)

    def __reduce__(self) -> tuple[Any, ...]:
        # Some optimizers copy and pickle their hooks: a copy is nobody's yet.
        return _Hook, ()

    def strays(self) -> Strays | None:
        """Return whom it tells, if that is still there."""
        return None if self._strays is None else self._strays()

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Compiled code looks at nothing of this.
        if not torch.compiler.is_compiling() and (strays := self.strays()) is not None:
            strays.look_at(optimizer, args, kwargs)
