"""The optimizer's step, who else takes one, and closures of LBFGS and its kin."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from autoaccum.errors import AlreadySteppedError, LossSideEffectError, OptimizerOutOfMemoryError
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import RanOut, attempt, insist
from autoaccum.step.gradient import Gradient
from autoaccum.step.optimizers import may_need_closure, refuse_graphs, refuse_other_gradients
from autoaccum.step.snapshot import same


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
        # Copies on the host, looked at in the first call alone: many optimizers write past version counters.
        self._before: tuple[Copies, Copies] | None = _copied(self._parameters), _copied(self._gradients())
        self.is_called = False
        """Whether the step has called it."""

    def _gradients(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self._parameters]

    def __call__(self) -> torch.Tensor:
        """Return the loss, and leave its gradient in ``.grad``."""
        before, self._before = self._before, None
        self.is_called = True
        if before is not None and insist(partial(_are, self._parameters, before[0]), "parameters were compared"):
            if insist(partial(_are, self._gradients(), before[1]), "gradients were compared"):
                return self._loss
            # Only the gradient is gone. The window is run as if for the first time: it draws what it drew.
            self._rewind()
        return self._run().loss


Copies = list[torch.Tensor | None]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _values(tensor).to("cpu", copy=True)


def _copied(tensors: Sequence[torch.Tensor | None]) -> Copies:
    """Return copies on the host of the values of tensors, any of which may be missing."""
    return [None if one is None else insist(partial(_on_host, one), "parameters were copied") for one in tensors]


def _are(tensors: Sequence[torch.Tensor | None], copies: Copies) -> bool:
    """Return whether tensors hold what was copied, and the same ones are missing."""
    return all(
        tensor is copy if tensor is None or copy is None else _is(_values(tensor), copy)
        for tensor, copy in zip(tensors, copies, strict=True)
    )


def _is(values: torch.Tensor, copy: torch.Tensor) -> bool:
    return values.shape == copy.shape and same(values, copy)


class WithoutClosureError(Exception):
    """The first step was called without a closure, and its error says that it needs one."""


_IF_CLOSURE = (
    "The optimizer's step was called without a closure. If it needs one, give the parameter no default, "
    "def step(self, closure): then autoaccum.Accumulator passes one."
)


class Stepper:
    """Steps of an optimizer, none of which can be rolled back: memory that runs out in one ends the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, memory: Memory) -> None:
        """Set up for the steps of one optimizer, on a device with this memory."""
        self._optimizer = optimizer
        self._memory = memory
        self._has_stepped = False  # nor shown that it does without a closure
        self.strays = strays_of(optimizer)
        """Who else steps the optimizer."""

    def take(
        self,
        scaler: torch.amp.GradScaler | None,
        step: int,
        limit_bytes: int,
        overflow: tuple[bool, float] | None = None,
    ) -> str | None:
        """Take one step on gradients that are unscaled already; return why it was left out, if it was.

        Args:
            scaler: for float16; None without it.
            step: the number of the optimizer step, for the error: the first is 1.
            limit_bytes: what may be used of the device's memory.
            overflow: whether the scaler has found a gradient that is not finite, and its scale, where that is read.

        Raises:
            OptimizerOutOfMemoryError: memory ran out, perhaps half-way through the parameters.
            WithoutClosureError: the first step says that it needs a closure.
            ArgumentError: the optimizer steps on something else than gradients, or differentiates them.
        """
        optimizer = self._optimizer
        if step == 1:  # a backward may have been the first to leave something there
            refuse_other_gradients(optimizer)
        if scaler is None:
            self._attempt(optimizer.step, step, limit_bytes)
            self._has_stepped = True
            return None
        # The scaler itself would wait for the device to know of an overflow; its update stays on the device.
        scale = _scale_of(scaler) if overflow is None else overflow[1]
        if overflow is None:
            self._attempt(lambda: scaler.step(optimizer), step, limit_bytes)
        elif not overflow[0]:
            self._attempt(optimizer.step, step, limit_bytes)
        self._has_stepped = True
        # What the step has made of parameters and state is whole, and stays.
        insist(scaler.update, "the loss scale was updated")
        # It leaves the step out when a gradient is not finite, and tells it only by a scale that falls.
        is_left_out = _scale_of(scaler) < scale if overflow is None else overflow[0]
        return f"the float16 gradient overflowed at a loss scale of {scale:g}" if is_left_out else None

    def _attempt(self, take: Callable[[], Any], step: int, limit_bytes: int) -> None:
        try:
            self._take(take, step, limit_bytes)
        except OptimizerOutOfMemoryError:
            raise
        except Exception as error:
            if not self._has_stepped and may_need_closure(self._optimizer):
                # Libraries have errors of their own for both: they are told by their texts.
                if "grad_fn" in str(error):
                    raise refuse_graphs(self._optimizer) from error
                if "closure" in str(error).lower():
                    raise WithoutClosureError from error
                error.add_note(_IF_CLOSURE)
            raise

    def take_by_closure(self, closure: Closure, step: int, limit_bytes: int) -> None:
        """Take one step of an optimizer that computes the loss and its gradients itself, by a closure.

        Raises:
            OptimizerOutOfMemoryError: memory ran out.
        """
        self._take(lambda: self._optimizer.step(closure), step, limit_bytes)  # type: ignore[arg-type]

    def _take(self, take: Callable[[], object], step: int, limit_bytes: int) -> None:
        self.strays.num_ours += 1
        try:
            outcome = attempt(take)
        finally:
            self.strays.num_ours -= 1
        if isinstance(outcome, RanOut):
            raise OptimizerOutOfMemoryError(
                optimizer=type(self._optimizer).__name__,
                step=step,
                peak_bytes=self._memory.peak(),
                limit_bytes=limit_bytes,
            ) from outcome.error


def _scale_of(scaler: torch.amp.GradScaler) -> float:
    return insist(scaler.get_scale, "the loss scale was read")


_TWICE = (
    "has nothing to do: accumulator.step(batch) has taken this step. Delete optimizer.step() and optimizer.zero_grad() "
    "from the loop; or call accumulator.backward(batch), which leaves the gradient for optimizer.step(). Call "
    "optimizer.zero_grad() before a backward of your own."
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
        self.num_ours = 0
        """Steps of ours that are under way: the closure of one may take another."""
        # The gradients of the last step; None while the user may step on them.
        self._left: list[weakref.ref[torch.Tensor]] | None = None
        self._smallest: tuple[torch.Tensor, int, torch.Tensor] | None = None  # of the first ones: version, copy
        self._were_asked = False

    def expect(self) -> None:
        """Let whoever comes next step on the gradient that is there."""
        self._left = self._smallest = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the gradient which is there now was stepped on."""
        there = _gradients_of(optimizer)
        self._left = [weakref.ref(gradient) for gradient in there]
        if self._were_asked:
            return
        plain = [gradient for gradient in there if type(gradient) is torch.Tensor and gradient.is_floating_point()]
        smallest = min(plain, key=torch.Tensor.numel, default=None)
        if smallest is not None and smallest.layout is torch.strided:
            copy = attempt(smallest.clone)
            self._smallest = None if isinstance(copy, RanOut) else (smallest, smallest._version, copy)

    def were_changed(self) -> bool:
        """Return whether the gradient that was stepped on was clipped, or scaled, since then; asked once."""
        # What a loop does between its steps it does between the first two.
        if self._smallest is None:
            return False
        (after, version, before), self._smallest, self._were_asked = self._smallest, None, True
        if after._version == version:  # nothing wrote to it
            return False
        # By its norm alone, as it is logged, nothing is clipped; and one that is zeroed is dropped.
        return attempt(lambda: bool(after.any()) and not after.equal(before) and _is_scaled(before, after)) is True

    def look_at(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a step that is about to be taken, and is none of ours, is none that anybody means.

        Raises:
            LossSideEffectError: it is taken in the midst of a window, whose gradient is not there yet.
            AlreadySteppedError: it is taken on the gradient that was stepped on, clipped say, or on none.
        """
        # Gradients are being added up: this step would be on a part of them, and a replay would take it again.
        if any(window.is_open for window in self.windows):
            raise LossSideEffectError("loss_fn, training_step or the model", "called optimizer.step()")
        # Whoever passes a closure computes a gradient by it, and that is not there yet.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._left is None or closure is not None:
            return
        left = {id(gradient) for reference in self._left if (gradient := reference()) is not None}
        if all(id(gradient) in left for gradient in _gradients_of(optimizer)):
            raise AlreadySteppedError(f"{type(optimizer).__name__}.step() {_TWICE}")


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _is_scaled(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether numbers are others multiplied with one, as by ``clip_grad_norm_``, or clamped to a range."""
    most, scale = after.abs().max(), after.norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)
    rounding = 16 * torch.finfo(before.dtype).eps
    is_multiple = torch.allclose(after, before * scale, rtol=rounding, atol=rounding * float(most))
    return is_multiple or torch.equal(after, before.clamp(-most, most))


_STRAYS: weakref.WeakKeyDictionary[torch.optim.Optimizer, Strays] = weakref.WeakKeyDictionary()


def strays_of(optimizer: torch.optim.Optimizer) -> Strays:
    """Return what watches the steps of an optimizer, the same for all who ask."""
    # What wraps an optimizer, as Accelerate does, may have no hooks of its own, and steps the one within.
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return Strays()
        optimizer = inner  # which may be wrapped once more
    if optimizer not in _STRAYS:
        _STRAYS[optimizer] = Strays()
        optimizer.register_step_pre_hook(_look)
    return _STRAYS[optimizer]


def _look(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Compiled code skips this. A copy of an optimizer has its hooks, and no entry in _STRAYS.
    if torch.compiler.is_compiling():
        return
    strays = _STRAYS.get(optimizer)
    if strays is not None and not strays.num_ours:
        strays.look_at(optimizer, args, kwargs)
