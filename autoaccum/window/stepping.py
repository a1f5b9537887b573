"""The optimizer's step: once, or again where memory ran out before it had written anything; and by nobody else."""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from autoaccum.data import randomness
from autoaccum.errors import AlreadySteppedError, LossSideEffectError, OptimizerOutOfMemoryError
from autoaccum.events import OutOfMemory
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import RanOut, attempt, insist
from autoaccum.window.closures import Closure
from autoaccum.window.modules import OF_TORCH
from autoaccum.window.optimizers import (
    is_pytorchs,
    may_need_closure,
    refuse_graphs,
    refuse_other_gradients,
    words_of,
)
from autoaccum.window.surroundings import is_generator


class WithoutClosureError(Exception):
    """The first step was called without a closure, and its error says that it needs one."""


_IF_CLOSURE = (
    "The optimizer's step was called without a closure. If it needs one, give the parameter no default, "
    "def step(self, closure): then autoaccum.Accumulator passes one."
)

RETRIES = 2
"""Try a step again so often when memory ran out before it had written anything."""


class Stepper:
    """Steps of an optimizer, tried again where memory ran out before anything was written."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, memory: Memory, emit: Callable[[OutOfMemory], None] = lambda event: None
    ) -> None:
        """Set up for the steps of one optimizer.

        Args:
            optimizer: to step.
            memory: of the device.
            emit: takes the events: memory has run out, and the step is tried again.
        """
        self._optimizer = optimizer
        self._memory = memory
        self._emit = emit
        self._writes = Writes(optimizer)
        # Kernels that are given bare pointers move no counter. So a step that went well has to have shown that writes
        # are counted, but of PyTorch's own: of those it is known, and is looked at only when one has failed.
        self._is_pytorchs = is_pytorchs(optimizer)
        self._is_counted = False
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
        optimizer, writes = self._optimizer, self._writes
        if step == 1:  # a backward may have been the first to leave something there
            refuse_other_gradients(optimizer)
        writes.begin()
        left: list[Callable[[], Any]] = [optimizer.step]
        if scaler is not None and overflow is not None:  # the scaler itself would wait for the device to know
            is_overflow, scale = overflow  # its update stays on the device
            left = [scaler.update] if is_overflow else [optimizer.step, scaler.update]
        elif scaler is not None:
            scale = _scale_of(scaler)
            left = [lambda: scaler.step(optimizer), scaler.update]
        tries = 0
        while left:
            try:
                with self.strays.ours():
                    outcome = attempt(left[0])
            except Exception as error:
                if not self._has_stepped and may_need_closure(optimizer):
                    # Libraries have errors of their own for both: they are told by their texts.
                    if "grad_fn" in str(error):
                        raise refuse_graphs(optimizer) from error
                    if "closure" in str(error).lower():
                        raise WithoutClosureError from error
                    error.add_note(_IF_CLOSURE)
                raise
            if not isinstance(outcome, RanOut):
                del left[0]
                continue
            # The last of a scaler's two has nothing to do with the parameters, whatever was written by then: what the
            # step before it has made of state is whole, and stays.
            is_whole = scaler is not None and len(left) == 1
            if not is_whole:
                writes.put_back()
            is_counted = _counts(optimizer) if self._is_pytorchs else self._is_counted
            is_untouched = is_counted and not is_whole and not writes.are_there()
            if tries == RETRIES or not (is_whole or is_untouched):
                raise self._out_of_memory(step, limit_bytes, is_untouched=is_untouched) from outcome.error
            tries += 1
            self._memory.release()
            self._emit(OutOfMemory(step=step, phase="optimizer", micro_batch=0))
        self._has_stepped = True
        if not (self._is_pytorchs or self._is_counted):
            self._is_counted = writes.are_everywhere()
        # It leaves the step out when a gradient is not finite, and tells it only by a scale that falls.
        if scaler is None or not (is_overflow if overflow is not None else _scale_of(scaler) < scale):
            return None
        return f"the float16 gradient overflowed at a loss scale of {scale:g}"

    def take_by_closure(self, closure: Closure, step: int, limit_bytes: int) -> None:
        """Take one step of an optimizer that computes the loss and its gradients itself, by a closure.

        Raises:
            OptimizerOutOfMemoryError: memory ran out. It is not tried again, for the closure has drawn random numbers.
        """
        with self.strays.ours():
            outcome = attempt(lambda: self._optimizer.step(closure))  # type: ignore[arg-type]
        if isinstance(outcome, RanOut):
            raise self._out_of_memory(step, limit_bytes, is_untouched=False) from outcome.error

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _out_of_memory(self, step: int, limit_bytes: int, *, is_untouched: bool) -> OptimizerOutOfMemoryError:
        return OptimizerOutOfMemoryError(
            optimizer=type(self._optimizer).__name__,
            step=step,
            peak_bytes=self._memory.peak(),
            limit_bytes=limit_bytes,
            is_untouched=is_untouched,
        )


def _scale_of(scaler: torch.amp.GradScaler) -> float:
    return insist(scaler.get_scale, "the loss scale was read")


_UNCOUNTED = frozenset({"data", "data_ptr", "numpy"})
"""By which a tensor is written to past its version counter."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


class Writes:
    """Writes of an optimizer's step, to its parameters, their gradients and their state, and to its groups.

    The version counter of a tensor rises with each write to it. Counters and plain values that are what they were say
    that nothing was written; what nobody can look into counts as written to. Plain values, and random states, can be
    put back.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Set up for the steps of one optimizer."""
        self._optimizer = optimizer
        # Code that writes past counters, be it in some steps alone, leaves nothing to go by.
        is_torchs = is_pytorchs(optimizer)
        self._is_uncounted = not is_torchs and not _UNCOUNTED.isdisjoint(words_of(optimizer))
        # PyTorch's own keep nothing on themselves, and draw nothing.
        self._has_own = not (is_torchs or self._is_uncounted)
        self._places = _of_state(optimizer)
        self.begin()

    def begin(self) -> None:
        """Note where everything stands before a step."""
        # State comes with the first step, and another dict of it when a checkpoint is loaded.
        if self._places.size != _size(self._optimizer):
            self._places = _of_state(self._optimizer)
        self._before = self._places.marks()
        # Each window has gradients of its own. A hook may clip them, and a step add the weight decay: once.
        self._gradients = self._gradients_now()
        if self._has_own:
            self._own = _of_attributes(self._optimizer)
            self._own_before, self._names = self._own.marks(), frozenset(vars(self._optimizer))
            self._random = randomness.get_state(self._device())
            generators = {id(one): one for places in (self._places, self._own) for one in places.generators}
            self._drawn = [(one, randomness.generator_state(one)) for one in generators.values()]

    def _device(self) -> torch.device:
        return next((p.device for group in self._optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    def _gradients_now(self) -> list[tuple[weakref.ref[torch.Tensor], int] | None]:
        """Return each parameter's gradient, where it has one, and its version counter."""
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"]]
        return [None if gradient is None else (weakref.ref(gradient), gradient._version) for gradient in gradients]

    def are_in_gradients(self) -> bool:
        """Return whether gradients were written to, or replaced, since ``begin``."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if len(parameters) != len(self._gradients):
            return True
        for p, before in zip(parameters, self._gradients, strict=True):
            gradient = p.grad
            if before is None or gradient is None:
                if before is not gradient:
                    return True
                continue
            reference, version = before
            if gradient._version != version or reference() is not gradient:
                return True
        return False

    def are_there(self) -> bool:
        """Return whether anything was written since ``begin``, or may have been."""
        is_own = self._has_own and self._own.are_written(_of_attributes(self._optimizer), self._own_before)
        return self._is_uncounted or is_own or self.are_in_state() or self.are_in_gradients()

    def are_in_state(self) -> bool:
        """Return whether parameters, groups or state were written to since ``begin``, or may have been."""
        return self._places.are_written(_of_state(self._optimizer), self._before)

    def are_everywhere(self) -> bool:
        """Return whether each parameter that has a gradient is known to have been written to."""
        now = self._places.marks()
        versions = iter(zip(self._before[0], now[0], strict=True))
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        # Parameters come first among the tensors.
        return all(before != after or p.grad is None for p, (before, after) in zip(parameters, versions, strict=False))

    def put_back(self) -> None:
        """Put back what a failed step has counted and drawn, and take out what it has begun to make.

        Half of a state would fail the next step.
        """
        state, known = self._optimizer.state, self._places.names
        for p in list(state):
            if p not in known:
                del state[p]
            elif isinstance(state[p], dict):
                for name in state[p].keys() - known[p]:
                    del state[p][name]
        self._places.put_back(self._before[1])
        if not self._has_own:
            return
        for name in vars(self._optimizer).keys() - self._names:
            del vars(self._optimizer)[name]
        self._own.put_back(self._own_before[1])
        randomness.set_state(self._random, self._device())
        for generator, drawn in self._drawn:
            randomness.set_generator_state(generator, drawn)


class Places:
    """Where an optimizer keeps what its steps write."""

    def __init__(self) -> None:
        """Begin with none."""
        self.size: tuple[int, ...] = ()
        """Numbers that change with the parameters, and with the state of these."""
        self.names: dict[Any, frozenset[Any]] = {}
        """What is kept of each parameter."""
        self.is_opaque = False
        """Whether there is something that nobody can look into."""
        self.generators: list[Any] = []
        """Random generators."""
        # Weakly, for a step that puts another tensor in place of one is to find the old one's memory free.
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._plain: list[tuple[Any, Any]] = []  # containers, and where in them a plain value is
        self._seen: set[int] = set()  # of containers and objects

    def add(self, values: Any, container: Any) -> None:
        """Find the tensors and the plain values below ``values``, which lie in the container under the same keys."""
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, torch.Tensor):
                self._tensors.append(weakref.ref(value))
            elif _is_value(value):
                self._plain.append((container, key))
            elif isinstance(value, dict | list | tuple | deque):
                self.add(value, value)
            elif is_generator(value):
                self.generators.append(value)
            elif _is_looked_into(value):
                self.add(vars(value), vars(value))
            elif not isinstance(value, _CODE):
                self.is_opaque = True

    def leave_out(self, tensors: set[int]) -> None:
        """Forget tensors, by their ids."""
        self._tensors = [ref for ref in self._tensors if id(ref()) not in tensors]

    def are_written(self, now: Places, before: tuple[list[int | None], list[Any]]) -> bool:
        """Return whether anything was written since these places were marked, or may have been."""
        return now.is_opaque or self.differ(now, before)

    def differ(self, now: Places, before: tuple[list[int | None], list[Any]]) -> bool:
        """Return whether anything was written, as far as it shows."""
        # A tensor in place of another one is a write too.
        return not self._is_same(now) or now.marks() != before

    def _is_same(self, other: Places) -> bool:
        """Return whether both have found the same tensors, and as many plain values."""
        if len(self._tensors) != len(other._tensors) or len(self._plain) != len(other._plain):
            return False
        return all(mine() is theirs() for mine, theirs in zip(self._tensors, other._tensors, strict=True))

    def marks(self) -> tuple[list[int | None], list[Any]]:
        """Return the version counters of the tensors, and the plain values."""
        versions = [None if (tensor := ref()) is None else tensor._version for ref in self._tensors]
        return versions, [container[key] for container, key in self._plain]

    def put_back(self, plain: list[Any]) -> None:
        """Put plain values back where they were; what has become of their containers, ``are_written`` tells."""
        for (container, key), value in zip(self._plain, plain, strict=True):
            if isinstance(container, dict) or (not isinstance(container, tuple) and key < len(container)):
                container[key] = value


def _is_value(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_value, value))
    return type(value) in _PLAIN or isinstance(value, Enum | np.generic)


_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, partial, logging.Logger)
"""What no step writes to."""


def _is_looked_into(value: Any) -> bool:
    """Return whether an object's attributes are all that it keeps, as far as anybody can tell."""
    if isinstance(value, _CODE) or not hasattr(value, "__dict__"):
        return False
    is_tools = type(value).__module__.partition(".")[0] in {"torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
    return not is_tools or isinstance(value, torch.optim.Optimizer | nn.Module)


def _of_state(optimizer: torch.optim.Optimizer) -> Places:
    """Return the places of parameters, which come first, of groups and of state."""
    found = Places()
    found.size = _size(optimizer)
    found.names = {p: frozenset(kept if isinstance(kept, dict) else ()) for p, kept in optimizer.state.items()}
    for group in optimizer.param_groups:
        found.add(group["params"], group["params"])
    for group in optimizer.param_groups:
        found.add({name: value for name, value in group.items() if name != "params"}, group)
    found.add(optimizer.state, optimizer.state)
    return found


def _of_attributes(optimizer: torch.optim.Optimizer) -> Places:
    """Return the places of what an optimizer keeps on itself."""
    found, own = Places(), vars(optimizer)
    found.add({name: value for name, value in own.items() if name not in OF_TORCH}, own)
    return found


def _size(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return numbers that change when the optimizer has other parameters, or other state for them."""
    state = optimizer.state
    kept = sum([len(entries) for entries in state.values() if isinstance(entries, dict)])
    return id(state), len(state), kept, *[len(group["params"]) for group in optimizer.param_groups]


def _counts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the writes of an optimizer of PyTorch's own are counted, as things are."""
    # Fused kernels count nothing; but before they are called, the steps are counted, which all of them but SGD's keep.
    if type(optimizer) is torch.optim.SGD and any(group.get("fused") for group in optimizer.param_groups):
        return False
    # Nor are writes to lists of tensors within the dispatch modes of others.
    try:
        tensors = [torch.zeros(()), torch.zeros(())]
        torch._foreach_add_(tensors, 1)
    except RuntimeError:  # memory is that short
        return False
    return all(tensor._version for tensor in tensors)


_TWICE = (
    "has nothing to do: accumulator.step(batch) has taken this step. Delete optimizer.step() and optimizer.zero_grad() "
    "from the loop; or call accumulator.backward(batch), which leaves the gradient for optimizer.step()."
)


_PLACE = -1
"""Where our hook is among those of an optimizer, which PyTorch counts from 0 on."""


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
        self._some: dict[int, torch.Tensor] = {}  # numbers of a few of them
        self._kept: tuple[int, torch.Tensor, int] | None = None  # the smallest one, past zero_grad()
        self._were_asked = False

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
        self._left, there = {}, []
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if gradient is not None:
                    self._left[id(p)] = weakref.ref(gradient), gradient._version
                    if _is_plain(gradient):
                        there.append(p)
        # By which what was done to them is told from a backward: both write to them.
        # The step is taken: where there is no memory for them, nothing is told by them.
        few = there[:1] + there[-1:]
        if there and not self._were_asked:  # which is done between the first two steps alone
            few.append(smallest := min(there, key=torch.Tensor.numel))
            self._kept = id(smallest), smallest.grad, smallest.grad._version
        some = attempt(lambda: {id(p): _some_of(p.grad) for p in few})
        self._some = {} if isinstance(some, RanOut) else some

    def were_changed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the gradient that was stepped on was clipped, or scaled, since then; asked once."""
        # What a loop does between its steps it does between the first two.
        if self._left is None or self._were_asked:
            return False
        self._were_asked, is_changed = True, False
        kept_one, self._kept = self._kept, None
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient, kept = p.grad, self._left.get(id(p))
                is_changed = is_changed or (gradient is not None and kept is not None and gradient._version != kept[1])
        if not is_changed:  # or it was, and zero_grad() came after it
            return kept_one is not None and attempt(lambda: self._was_scaled(*kept_one)) is True
        # By its norm alone, as it is logged, nothing is clipped; and one that is zeroed is dropped. Where there is no
        # memory to look at them nothing is told.
        found = attempt(lambda: self._is_as_left(optimizer) and any(map(self._differs, optimizer.param_groups)))
        return found is True

    def _was_scaled(self, parameter: int, gradient: torch.Tensor, version: int) -> bool:
        """Return whether a gradient that may be none by now was scaled or clipped, and is not 0."""
        if gradient._version == version:  # nothing wrote to it, which no operation is needed to tell
            return False
        before = self._some.get(parameter)
        after = _some_of(gradient)
        if before is None or before.equal(after) or not bool(after.any()):
            return False
        return _is_scaled(before, after)

    def _differs(self, group: dict[str, Any]) -> bool:
        """Return whether a gradient in a group is another one than that which was stepped on, and not 0."""
        there = [(self._some[id(p)], _some_of(p.grad)) for p in group["params"] if id(p) in self._some and _is_there(p)]
        return any(not before.equal(after) and bool(after.any()) for before, after in there)

    def look_at(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a step that is about to be taken is none that anybody means.

        Raises:
            LossSideEffectError: it is taken in the midst of a window, whose gradient is not there yet.
            AlreadySteppedError: it is taken on the gradient that was stepped on, or on none that came after it.
        """
        if self._is_ours:
            return
        # Gradients are being added up: this step would be on a part of them, and a replay would take it again.
        if any(window.is_open for window in self.windows):
            raise LossSideEffectError("loss_fn, training_step or the model", "called optimizer.step()")
        # Whoever passes a closure computes a gradient by it, and that is not there yet.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self._left is not None and closure is None and self._is_as_left(optimizer):
            raise AlreadySteppedError(f"{type(optimizer).__name__}.step() {_TWICE}")

    def _is_as_left(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether nothing was added to the gradients since: each is what it was, clipped say, or gone, or 0."""
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
                    return self._is_changed_alone(optimizer)
        return True

    def _is_changed_alone(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether gradients were scaled or clipped, as where a loop does before it steps, and none was added."""
        found = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                before = self._some.get(id(p))
                if before is None or p.grad is None:
                    continue
                after = _some_of(p.grad)
                if not (before.any() or after.any()):  # which tell nothing, as of rows that no token has met
                    continue
                found.append(_is_scaled(before, after))
        return bool(found) and all(found)


def _is_scaled(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether numbers are others multiplied with one, as by ``clip_grad_norm_``, or clamped to a range."""
    if not (before.isfinite().all() and after.isfinite().all()):  # of which nothing is told
        return False
    most, scale = after.abs().max(), after.norm() / before.norm().clamp(min=torch.finfo(before.dtype).tiny)
    rounding = 16 * torch.finfo(before.dtype).eps
    is_multiple = torch.allclose(after, before * scale, rtol=rounding, atol=rounding * float(most))
    return is_multiple or torch.equal(after, before.clamp(-most, most))


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether numbers may be read of a gradient: of a sharded one all ranks would have to ask together."""
    is_one = type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.is_contiguous()
    return is_one and gradient.is_floating_point() and gradient.numel() > 0


def _is_there(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and _is_plain(parameter.grad)


def _some_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a few numbers of a gradient, from all over it."""
    flat = gradient.detach().view(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()


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
        optimizer = inner  # which may be wrapped once more
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks
    # Two Accumulators may share an optimizer, and each has to know of the steps of the other.
    found: Strays | None = hooks[_PLACE].strays() if _PLACE in hooks else None
    if found is not None:
        return found
    strays = Strays()
    hooks[_PLACE] = hook = _Hook(strays)
    weakref.finalize(strays, _remove, hooks, hook)
    return strays


def _remove(hooks: dict[int, Any], hook: _Hook) -> None:
    """Take a hook out of those of an optimizer, unless another one has taken its place."""
    if hooks.get(_PLACE) is hook:
        del hooks[_PLACE]


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
