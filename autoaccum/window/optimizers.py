"""The optimizer: the default one, the user's, and its lazy state allocated before training needs the memory."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    ForeignOptimizerError,
    NoTrainableParametersError,
    OptimizerOutOfMemoryError,
)
from autoaccum.events import OutOfMemory
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.window.attributes import Attributes

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""An optimizer, or a function (params) -> optimizer."""


def trainable_parameters(model: object, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, of the model and of a loss that is a module too.

    Raises:
        ArgumentTypeError: the model is no module.
        NoTrainableParametersError: there are none.
        ArgumentError: they hold no numbers.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", type(model).__name__, "a torch.nn.Module", "It comes first, the data second.")
    # By id: a loss may share parameters with the model, and an optimizer refuses one that it is given twice.
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    parameters = list(found.values())
    if not parameters:
        raise NoTrainableParametersError(model)
    if any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers())):
        cure = "Call its to_empty(device='cpu') and initialise it, or load a state_dict with assign=True."
        raise ArgumentError("model", type(model).__name__, "a model that is not on the meta device", cure)
    return parameters


def make_optimizer(
    optimizer: OptimizerLike | None, lr: float | None, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the user's optimizer, or AdamW: fused where PyTorch has it, which is fast and allocates nothing in a step.

    Args:
        optimizer: the user's, or what makes it; None for AdamW.
        lr: the learning rate of AdamW; None for 1e-3.
        parameters: those to train.

    Raises:
        ConflictingArgumentsError: ``lr`` beside an optimizer, which has its own.
        ForeignOptimizerError: the optimizer holds none of the parameters.
        ArgumentTypeError: it is no optimizer.
    """
    if optimizer is None:
        lr = 1e-3 if lr is None else lr
        # The fused kernel takes no complex parameters, which it says only in a step.
        if all(p.is_floating_point() for p in parameters):
            try:
                return torch.optim.AdamW(parameters, lr=lr, fused=True)
            except RuntimeError:  # a device without the kernel
                pass
        return torch.optim.AdamW(parameters, lr=lr)
    if lr is not None:
        raise ConflictingArgumentsError("lr", lr, "optimizer", "Set the learning rate where the optimizer is made.")
    made: Any = optimizer
    # What is neither of the two is refused below, with words that say what is accepted.
    # A module and any class can be called too, and would fail in words of their own.
    is_other = isinstance(optimizer, nn.Module)
    if isinstance(optimizer, type):
        is_other = not issubclass(optimizer, torch.optim.Optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer) and not is_other:
        made = optimizer(parameters)
    check_optimizer(made, parameters, "a torch.optim.Optimizer, or a function (params) -> Optimizer")
    if needs_closure(made):
        raise ArgumentTypeError(
            "optimizer",
            type(made).__name__,
            "an optimizer whose step needs no closure",
            "Take one that steps once on the gradient of the window (AdamW, SGD, Adafactor, ...), or step this one in "
            "a loop of your own, with autoaccum.Accumulator.",
        )
    return made  # type: ignore[no-any-return]


def check_optimizer(
    optimizer: object, parameters: Sequence[nn.Parameter], accepted: str = "an optimizer: AdamW(model.parameters())"
) -> None:
    """Refuse what is no optimizer, or one that would train nothing.

    Args:
        optimizer: what was passed, or made.
        parameters: those to train, of which it has to hold one at least: others may be frozen on purpose.
        accepted: what to pass instead, for the error.

    Raises:
        ArgumentTypeError: it is no optimizer.
        ForeignOptimizerError: it holds none of the parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError("optimizer", optimizer, accepted)
    wanted = {id(p) for p in parameters}
    if not any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
        raise ForeignOptimizerError(optimizer)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step evaluates the loss itself, as that of LBFGS does."""
    # Every step has the argument; those that can do without it have a default.
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


def allocate_state(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module] = ()) -> None:
    """Allocate now what PyTorch's optimizers allocate in their first step, so that it is in every measured peak.

    All of it or, when memory runs out, none: a state that is half there would fail the next step.

    Nothing is done to an optimizer that is not PyTorch's own, for nobody knows what its methods do; and nothing for
    parameters of ``modules`` whose gradients are sparse, but for SparseAdam's: their state is made of the gradient.
    """
    if not _is_pytorchs(optimizer):
        return
    # The state lies in dicts of the optimizer: to put its attributes back takes out what was added.
    before = Attributes([optimizer])
    try:
        _allocate(optimizer, {id(p) for p in sparsely_trained(modules)})
    except BaseException:  # an interrupt leaves no half of it either
        before.restore()
        raise


@torch.no_grad()
def _allocate(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """Allocate the missing state of each group; ``sparse`` are the ids of parameters whose gradients are sparse."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        if hasattr(optimizer, "_init_group"):
            _allocate_by_init_group(optimizer._init_group, group, [p for p in trained if id(p) not in sparse])
        # SGD clones its first gradient instead. A buffer of zeros gives the same next value, 0 * momentum + gradient,
        # unless it is dampened, or the gradient is sparse and its clone small.
        if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
            for p in trained:
                if id(p) not in sparse and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        # SparseAdam makes its state in the midst of its step: the same is made here. It is dense.
        if type(optimizer) is torch.optim.SparseAdam:
            for p in trained:
                if not optimizer.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": 0, **moments}


def _allocate_by_init_group(
    init_group: Callable[..., Any], group: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> None:
    """Allocate the state of a group by ``_init_group``, the part of a step that does so before any arithmetic.

    Args:
        init_group: the optimizer's own, which makes the missing state and reads the present one into lists.
        group: the parameter group.
        parameters: those of it whose state to allocate.
    """
    # It passes over parameters without a gradient, so these have zeros for the moment.
    without = [p for p in parameters if p.grad is None]
    # Behind the group come lists for it to fill, another number of them for each optimizer. Nobody reads them here.
    num_lists = len(inspect.signature(init_group).parameters) - 1
    try:
        for p in without:
            p.grad = torch.zeros_like(p)
        init_group(group, *([] for _ in range(num_lists)))
    finally:
        for p in without:
            p.grad = None


def sparsely_trained(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters whose gradients are sparse, as far as modules say so."""
    layers = (layer for module in modules for layer in module.modules())
    return [m.weight for m in layers if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]


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
        self._writes = _Writes(optimizer)
        # Kernels that are given bare pointers move no counter. So a step that went well has to have shown that writes
        # are counted, unless it is known.
        self._is_counted = False

    def take(self, scaler: torch.amp.GradScaler | None, step: int, limit_bytes: int) -> str | None:
        """Take one step on gradients that are unscaled already; return why it was left out, if it was.

        Args:
            scaler: for float16; None without it.
            step: the number of the optimizer step, for the error: the first is 1.
            limit_bytes: what may be used of the device's memory.

        Raises:
            OptimizerOutOfMemoryError: memory ran out, perhaps half-way through the parameters.
        """
        optimizer, writes = self._optimizer, self._writes
        writes.begin()
        scale = 1.0 if scaler is None else scaler.get_scale()
        left = [optimizer.step] if scaler is None else [lambda: scaler.step(optimizer), scaler.update]
        tries = 0
        while left:
            error = _failure_of(left[0])
            if error is None:
                del left[0]
                continue
            writes.take_out_new_state()
            # The last of a scaler's two has nothing to do with the parameters, whatever was written by then.
            is_whole = scaler is not None and len(left) == 1
            is_counted = self._is_counted or _counts(optimizer)
            is_untouched = is_counted and not is_whole and not writes.are_there()
            if tries == RETRIES or not (is_whole or is_untouched):
                raise self._out_of_memory(step, limit_bytes, is_untouched=is_untouched) from error
            tries += 1
            self._memory.release()
            self._emit(OutOfMemory(step=step, phase="optimizer", micro_batch=0))
        if not self._is_counted:
            self._is_counted = writes.are_everywhere()
        # It leaves the step out when a gradient is not finite, and tells it only by a scale that falls.
        if scaler is None or scaler.get_scale() >= scale:
            return None
        return f"the float16 gradient overflowed at a loss scale of {scale:g}"

    def take_by_closure(self, closure: Callable[[], Any], step: int, limit_bytes: int) -> None:
        """Take one step of an optimizer that computes the loss and its gradients itself, by a closure.

        Raises:
            OptimizerOutOfMemoryError: memory ran out. It is not tried again, for the closure has drawn random numbers.
        """
        error = _failure_of(lambda: self._optimizer.step(closure))
        if error is not None:
            raise self._out_of_memory(step, limit_bytes, is_untouched=False) from error

    def _out_of_memory(self, step: int, limit_bytes: int, *, is_untouched: bool) -> OptimizerOutOfMemoryError:
        return OptimizerOutOfMemoryError(
            optimizer=type(self._optimizer).__name__,
            step=step,
            peak_bytes=self._memory.peak(),
            limit_bytes=limit_bytes,
            is_untouched=is_untouched,
        )


def _failure_of(function: Callable[[], Any]) -> Exception | None:
    """Call a function; return the error where memory ran out in it, without the frames that pin its tensors."""
    try:
        function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return error.with_traceback(None)
    return None


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class _Writes:
    """Writes of an optimizer's step, to its parameters, to their state and to its groups.

    The version counter of a tensor rises with each write to it. Counters and plain values that are what they were say
    that nothing was written; what nobody can look into counts as written to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Set up for the steps of one optimizer."""
        self._optimizer = optimizer
        self._places = _Places(optimizer)
        self._before = self._places.marks()

    def begin(self) -> None:
        """Note where everything stands before a step."""
        # State comes with the first step, and another dict of it when a checkpoint is loaded.
        if self._places.size != _size(self._optimizer):
            self._places = _Places(self._optimizer)
        self._before = self._places.marks()

    def are_there(self) -> bool:
        """Return whether anything was written since ``begin``, or may have been."""
        now = _Places(self._optimizer)
        # A tensor in place of another one is a write too.
        return now.is_opaque or not now.is_same(self._places) or now.marks() != self._before

    def are_everywhere(self) -> bool:
        """Return whether each parameter that has a gradient is known to have been written to."""
        now = self._places.marks()
        versions = iter(zip(self._before[0], now[0], strict=True))
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        # Parameters come first among the tensors.
        return all(before != after or p.grad is None for p, (before, after) in zip(parameters, versions, strict=False))

    def take_out_new_state(self) -> None:
        """Take out state that a failed step has begun to make: half of it would fail the next one."""
        state, known = self._optimizer.state, self._places.names
        for p in list(state):
            if p not in known:
                del state[p]
            elif isinstance(state[p], dict):
                for name in state[p].keys() - known[p]:
                    del state[p][name]


class _Places:
    """Where an optimizer keeps what its steps write."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.size = _size(optimizer)
        self.names = {p: frozenset(kept) for p, kept in optimizer.state.items() if isinstance(kept, dict)}
        self.is_opaque = False
        # Weakly, for a step that puts another tensor in place of one is to find the old one's memory free.
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._plain: list[tuple[Any, Any]] = []  # containers, and where in them a plain value is
        for group in optimizer.param_groups:
            self._tensors += map(weakref.ref, group["params"])
        for group in optimizer.param_groups:
            self._collect({name: value for name, value in group.items() if name != "params"}, group)
        for kept in optimizer.state.values():
            self._collect(kept, kept)

    def _collect(self, values: Any, container: Any) -> None:
        """Find the tensors and the plain values below ``values``, which lie in the container under the same keys."""
        if not isinstance(values, dict | list | tuple):
            self.is_opaque = True
            return
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, torch.Tensor):
                self._tensors.append(weakref.ref(value))
            elif type(value) in _PLAIN:
                self._plain.append((container, key))
            else:
                self._collect(value, value)

    def is_same(self, other: _Places) -> bool:
        """Return whether both have found the same tensors, and as many plain values."""
        if len(self._tensors) != len(other._tensors) or len(self._plain) != len(other._plain):
            return False
        return all(mine() is theirs() for mine, theirs in zip(self._tensors, other._tensors, strict=True))

    def marks(self) -> tuple[list[int | None], list[Any]]:
        """Return the version counters of the tensors, and the plain values."""
        versions = [None if (tensor := ref()) is None else tensor._version for ref in self._tensors]
        return versions, [container[key] for container, key in self._plain]


def _size(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return numbers that change when the optimizer has other parameters, or other state for them."""
    state = optimizer.state
    kept = sum([len(entries) for entries in state.values() if isinstance(entries, dict)])
    return id(state), len(state), kept, *[len(group["params"]) for group in optimizer.param_groups]


def _counts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the writes of an optimizer of PyTorch's own are counted, as things are."""
    if not _is_pytorchs(optimizer):
        return False
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


def _is_pytorchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")
