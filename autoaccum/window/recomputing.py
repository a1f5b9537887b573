"""Has chosen blocks compute their forward again in backward, to the bit, so that less is held between the two.

``forward`` is wrapped on the instances, for as long as a loss is computed and no longer: between windows, and within
backward, state_dict, names, ids, hooks, ``deepcopy`` and pickling are as without. A forward that is computed again
finds what it found: random states, buffers and attributes are as of then, and today's are put back after it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from autoaccum.data import randomness
from autoaccum.data.batches import flatten
from autoaccum.loss.stated import LossOf
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.window.attributes import CONTAINERS, Attributes, is_expanded
from autoaccum.window.state import generator_state, set_generator_state
from autoaccum.window.surroundings import GENERATORS, surroundings_of
from autoaccum.window.tape import no_trace

_SMALL_BYTES = 2**20
"""Bytes of a tensor that is copied before each forward: of larger ones a version that has moved tells whether to."""
_ABSENT = object()


class NotRepeatableError(Exception):
    """A forward that cannot be computed again: it would not come to what it came to."""

    def __init__(self, block: nn.Module, what: str) -> None:
        self.block = block
        super().__init__(f"{type(block).__name__}: {what}")


def is_refusal(error: BaseException) -> bool:
    """Return whether an error says that a forward cannot be computed again."""
    return isinstance(error, NotRepeatableError | CheckpointError)


class Recomputing:
    """The blocks of one run whose forward is computed again, and how."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Iterable[object],
        device: torch.device,
        is_elsewhere: Callable[[torch.Tensor], bool] = lambda tensor: False,
    ) -> None:
        """Set up without any block.

        Args:
            modules: all that forwards may run.
            functions: of the user's, which may hold generators and state of their own.
            device: whose random states there are.
            is_elsewhere: whether a tensor that a block is given is kept elsewhere, as it is now.
        """
        self.device = device
        self.blocks: list[nn.Module] = []
        """Those whose forward is computed again; none of them lies within another."""
        self.is_compared = False
        """Whether each forward that is computed again is compared with the first, operation by operation."""
        self.compared = 0
        """Operations that were compared, and found to come to the same bits."""
        self.guards_all = False
        """Whether blocks were seen to change what lies outside of them, which is put back then in all windows."""
        self._modules, self._functions, self._is_elsewhere = tuple(modules), tuple(functions), is_elsewhere
        self._is_within = False  # a block's forward
        self._held: list[Any] = []  # generators that functions hold

    def of_loss(self, loss_of: LossOf) -> LossOf:
        """Return a loss that is computed with the blocks wrapped, where it is computed for a backward."""

        # A validation comes by here too, and has nothing to go back from.
        def recomputed(model: Any, batch: Any) -> Any:
            if not self.blocks or not torch.is_grad_enabled():
                return loss_of(model, batch)
            with self.installed():
                return loss_of(model, batch)

        return recomputed

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the blocks within this."""
        self._held = surroundings_of(self._functions).generators
        with ExitStack() as stack:
            # A cache of keys and values would be appended to once more, and keep all of them alive.
            for config in _caching(self._modules):
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
            for block in self.blocks:
                stack.enter_context(self._wrapped(block))
            yield

    @contextmanager
    def _wrapped(self, block: nn.Module) -> Iterator[None]:
        # Accelerate and others put forwards of their own on instances: these are what is run then, and put back.
        own, original = vars(block).get("forward", _ABSENT), block.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # A block that is called within another one is part of what that computes again.
            if self._is_within or not torch.is_grad_enabled():
                return original(*args, **kwargs)
            # As it is without, so that what is remembered of its attributes is what a second forward will find.
            _assign(block, own)
            self._is_within = True
            try:
                call = _Call(self, block, original, len(args), tuple(kwargs))
                # All by position: of tensors among these checkpoint sees whether they are written to before it reads
                # them again.
                return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=False)
            finally:
                self._is_within = False
                _assign(block, forward)

        _assign(block, forward)
        try:
            yield
        finally:
            _assign(block, own)

    @contextmanager
    def no_trace(self) -> Iterator[None]:
        """Put back, at its end, what a forward has changed, but for the values of tensors that are no buffers."""
        outside, random = Outside(self._modules, self._functions), self._random([])
        try:
            with no_trace(self._modules, self.device):
                yield
        finally:
            outside.restore()
            random.put_back()

    def _random(self, own: Sequence[Any]) -> _Random:
        return _Random([*own, *surroundings_of(self._functions).generators], self.device)

    def moment(self, layers: Sequence[nn.Module], values: Sequence[Any]) -> _Moment:
        """Return how things stand before a forward of these layers that is called with these values."""
        # Looked for anew each time, for a forward may make them: twenty attributes of each layer.
        own = [value for layer in layers for value in vars(layer).values() if isinstance(value, GENERATORS)]
        # To look at their versions would hold them, and whoever writes to them now writes to no copy.
        copied = {id(value) for value in values if isinstance(value, torch.Tensor) and self._is_elsewhere(value)}
        return _Moment(layers, values, _Random([*own, *self._held], self.device), copied)

    @contextmanager
    def guarding(self, block: nn.Module) -> Iterator[None]:
        """See, where forwards are compared, that what lies outside of a block stays as it is; or put it back."""
        # All modules of a model, for each of its blocks: worth it while that is measured, and where it has shown to be.
        if not (self.is_compared or self.guards_all):
            yield
            return
        outside = Outside(self._modules, self._functions)
        try:
            yield
        finally:
            # Found out by measuring: from then on in all windows.
            self.guards_all = outside.restore() or self.guards_all


class Outside:
    """What a forward may change that lies in no tensor: attributes, variables of functions and what functions hold."""

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[object]) -> None:
        """Remember it as it is now."""
        held = surroundings_of(functions)
        layers = {id(layer): layer for module in (*modules, *held.modules) for layer in module.modules()}
        self._attributes = Attributes([*layers.values(), *held.objects], held.containers)
        self._cells = [(cell, cell.cell_contents) for cell in held.cells]
        self._names = [(namespace, name, namespace[name]) for namespace, name in held.names]

    def restore(self) -> bool:
        """Put it back; return whether anything had changed."""
        has_changed = self._attributes.have_changed()
        if has_changed:
            self._attributes.restore()
        for cell, contents in self._cells:
            if cell.cell_contents is not contents:
                cell.cell_contents, has_changed = contents, True
        for namespace, name, value in self._names:
            if namespace[name] is not value:
                namespace[name], has_changed = value, True
        return has_changed


class _Call:
    """One call of a block's forward: run once as it is, and then again as it was."""

    def __init__(
        self,
        recomputing: Recomputing,
        block: nn.Module,
        forward: Callable[..., Any],
        count: int,
        names: tuple[str, ...],
    ) -> None:
        self._recomputing = recomputing
        self._block = block
        self._forward = forward
        self._count, self._names = count, names  # arguments by position; names of the others
        self._layers = list(block.modules())
        self._before: _Moment | None = None  # none until it has run
        # A number for each operation, where keeping what it came to would take the memory that is to be saved.
        self._seen: list[int] | None = None  # marks of what each operation came to

    def __call__(self, *values: Any) -> Any:
        """Run the forward; the second time in the state of the first."""
        args, kwargs = values[: self._count], dict(zip(self._names, values[self._count :], strict=True))
        # Checkpoint calls this for the forward, and once more when backward asks for the first of its tensors.
        if self._before is None:
            self._before = self._recomputing.moment(self._layers, values)
            if not self._recomputing.is_compared:
                return self._forward(*args, **kwargs)
            self._seen = []
            with _Marks(self._seen):
                return self._forward(*args, **kwargs)
        try:
            with self._recomputing.guarding(self._block), self._as_it_was(self._before, values), self._comparing():
                return self._forward(*args, **kwargs)
        except Exception as error:
            # Checkpoint ends a forward that has come to all that is wanted by an exception of its own.
            if type(error).__module__.startswith("torch") or is_out_of_memory(error) or is_refusal(error):
                raise
            raise NotRepeatableError(self._block, f"computed again, its forward raises {error!r}") from error

    @contextmanager
    def _as_it_was(self, before: _Moment, values: Sequence[Any]) -> Iterator[None]:
        """Put back what the first forward found, and in the end what there is today."""
        # Today's are remembered first, whatever is put back after that.
        random = before.random.renewed()
        attributes = Attributes([*self._layers, *before.objects], before.containers)
        # What it computes by must be what it was; of the inputs that come by position checkpoint sees to that as well.
        written = before.written()
        if written is not None:
            raise NotRepeatableError(self._block, f"{written} is written to after its forward has read it")
        try:
            before.put_back()
            yield
        finally:
            if attributes.have_changed():
                attributes.restore()
            random.put_back()

    def _comparing(self) -> Any:
        if self._seen is None:
            return nullcontext()
        return _Compared(self._seen, self._block, self._recomputing)


class _Moment:
    """How things stood when the forward of a block began."""

    def __init__(
        self, layers: Sequence[nn.Module], values: Sequence[Any], random: _Random, copied: Container[int] = ()
    ) -> None:
        """Remember it; ``copied`` are the ids of values that will be as they are now, whatever is written to them."""
        self.random = random
        # What is passed may be written to as well: a list that is appended to, a cache.
        leaves = flatten(values)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in copied]
        self.objects = [leaf for leaf in leaves if _has_attributes(leaf)]
        """Those among the arguments that have attributes."""
        self.containers = [value for value in values if type(value) in CONTAINERS]
        """Those among the arguments."""
        self._attributes = Attributes([*layers, *self.objects], self.containers)
        # Parameters are not copied, nor inputs: that they are the same still is seen by their versions.
        parameters = [(name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
        named = [*parameters, *(("an input", tensor) for tensor in tensors)]
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not is_lazy(tensor)]
        # (where it stands, its name, itself, its version, a copy) of each tensor that a forward may write to.
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, torch.Tensor]] = []
        copies: dict[int, torch.Tensor] = {}
        # Buffers are in a dict of their own; other tensors are attributes like any other.
        for layer in layers:
            for namespace in (vars(layer), cast("dict[str, Any]", layer._buffers)):
                for name, tensor in namespace.items():
                    if not _may_move(tensor):
                        continue
                    if id(tensor) not in copies:
                        copies[id(tensor)] = tensor.detach().clone()
                    self._tensors.append((namespace, name, tensor, tensor._version, copies[id(tensor)]))

    def written(self) -> str | None:
        """Return the name of a parameter, or of an input, that has other values since; None where none has."""
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)

    def put_back(self) -> None:
        """Put it back: other tensors in the place of those that may have moved, whose values stay what they are."""
        self.random.put_back()
        if self._attributes.have_changed():
            self._attributes.restore()
        # In their place and not in them: what was computed since may have saved them, and would find them written to.
        fresh: dict[int, torch.Tensor] = {}
        for namespace, name, tensor, version, copy in self._tensors:
            # By the value where it is small, for what is written through ``.data`` moves no version.
            if tensor._version != version or tensor.nbytes <= _SMALL_BYTES:
                if id(tensor) not in fresh:
                    fresh[id(tensor)] = copy.clone()
                namespace[name] = fresh[id(tensor)]


class _Random:
    """All random states as they were when it was made: PyTorch's, Python's, NumPy's, and those of the user's own."""

    def __init__(self, generators: Sequence[Any], device: torch.device) -> None:
        self._device = device
        self._state = randomness.get_state(device)
        self._generators = [(generator, generator_state(generator)) for generator in generators]

    def renewed(self) -> _Random:
        """Return the same of now."""
        return _Random([generator for generator, _ in self._generators], self._device)

    def put_back(self) -> None:
        """Put them back; it may be done again."""
        randomness.set_state(self._state, self._device)
        for generator, state in self._generators:
            set_generator_state(generator, state)


class _Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of each operation what it came to: a checksum of its bits."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What is not written yet holds anything; checkpoint detaches what it hands on, the second time alone.
        if not any(word in str(func) for word in ("empty", "detach")):
            self._take(str(func), _checksum(result))
        return result

    def _take(self, operation: str, mark: int) -> None:
        self._seen.append(mark)


class _Compared(_Marks):  # type: ignore[no-untyped-call]
    """Compares each operation with what it came to the first time."""

    def __init__(self, seen: list[int], block: nn.Module, recomputing: Recomputing) -> None:
        super().__init__(seen)
        self._block = block
        self._recomputing = recomputing
        self._count = 0

    def _take(self, operation: str, mark: int) -> None:
        # Checkpoint ends a forward early, once it has come to all that is wanted: what is left out is not compared.
        if self._count >= len(self._seen) or self._seen[self._count] != mark:
            raise NotRepeatableError(self._block, f"computed again, {operation} comes to other bits")
        self._count += 1
        self._recomputing.compared += 1


def _checksum(result: Any) -> int:
    """Return a checksum of the bits of an operation's results; of what holds none that can be read, of its shape."""
    mark = 0
    is_one = isinstance(result, torch.Tensor)
    for tensor in (result,) if is_one else result if isinstance(result, list | tuple) else ():
        # Bytes beside other results are a library's workspace, not all of which it has written to.
        if not isinstance(tensor, torch.Tensor) or (not is_one and tensor.dtype is torch.uint8):
            continue
        mark = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), mark)
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            # To the host, where there is room for it: the device is short of it.
            bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            mark = zlib.crc32(bits.numpy().data, mark)
    return mark


def _caching(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations of modules, and those within these, that ask for a cache of keys and values."""
    found: dict[int, Any] = {}
    for module in modules:
        for layer in module.modules():
            # Where they are nested, as in models of two towers, each has one of its own.
            config = vars(layer).get("config")
            if config is not None and id(config) not in found and hasattr(config, "__dict__"):
                inner = [value for value in vars(config).values() if getattr(value, "use_cache", False) is True]
                found |= {id(one): one for one in (config, *inner)}
    return [config for config in found.values() if getattr(config, "use_cache", False) is True]


def _assign(block: nn.Module, forward: Any) -> None:
    """Set the instance's own ``forward``, or take it away."""
    # Past ``nn.Module.__setattr__``, which subclasses override.
    if forward is _ABSENT:
        vars(block).pop("forward", None)
    else:
        vars(block)["forward"] = forward


def _has_attributes(leaf: Any) -> bool:
    is_known = isinstance(leaf, torch.Tensor | nn.Module | type | torch.dtype | torch.device)
    return not is_known and not callable(leaf) and hasattr(leaf, "__dict__")


def _may_move(tensor: Any) -> bool:
    """Return whether a value is a tensor of its own that a forward may write to, and that is no parameter."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter) or is_lazy(tensor):
        return False
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not is_expanded(tensor)
    return is_plain and not tensor.requires_grad
