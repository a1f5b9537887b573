"""Has chosen blocks compute their forward again in backward, to the bit, so that less is held between the two.

``forward`` is wrapped on the instances, for as long as a loss is computed and no longer: between windows, and within
backward, state_dict, names, ids, hooks, ``deepcopy`` and pickling are as without. A forward that is computed again
finds what it found: random states, buffers and attributes are as of then, and today's are put back after it.

In compiled code it is PyTorch's compiler that computes a block again. It puts random states back, takes no block whose
forward changes anything of Python's, and reads buffers as they are by then; so a block that writes to one is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import update_wrapper
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from autoaccum.data import randomness
from autoaccum.data.batches import flatten
from autoaccum.data.randomness import generator_state, set_generator_state
from autoaccum.errors import MemoryLimitError
from autoaccum.loss.stated import LossOf
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.window.attributes import CONTAINERS, Attributes, StandIn, is_expanded
from autoaccum.window.comparing import Comparison, First, Mark, NotRepeatableError, Second
from autoaccum.window.outside import Outside, functions_run, hooks_of
from autoaccum.window.state import State
from autoaccum.window.surroundings import is_generator, records_among, surroundings_of
from autoaccum.window.tape import no_trace

_SMALL_BYTES = 2**20
"""Bytes of a tensor that is copied before each forward: of larger ones a version that has moved tells whether to."""
_ABSENT = object()


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
        self.comparison = Comparison()
        self.guards_all = False
        """Whether blocks were seen to change what lies outside of them, which is put back then in all windows."""
        self._modules, self._functions, self._is_elsewhere = tuple(modules), tuple(functions), is_elsewhere
        self.is_within = False
        """Whether the forward of a block is running."""
        self.is_as_compiled = False
        """Whether a forward that is computed again finds the buffers of now, as it does in compiled code."""
        self.ran: set[int] = set()
        """The ids of the blocks whose forward was run in this attempt as it is written, and not compiled."""
        self._forwards: dict[int, _Forward] = {}  # by the ids of blocks
        # (block, name, tensor, version) of what a compiled forward must not write to, when the attempt began.
        self._untouched: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        # Marks of all layers, when it was last asked whether they have changed.
        self._layers: list[tuple[object, ...]] | None = None
        self._held: list[Any] = []  # generators that functions hold
        self._known: dict[int, _Layers] = {}  # by the ids of blocks
        # What was last found outside of a block, as long as one whose backward is still to come holds it: for in that
        # may be what forwards came to.
        self._found: Callable[[], Outside | None] = lambda: None

    def compare(self, is_compared: bool) -> None:
        """Compare from now on, or do not; nothing was compared yet."""
        self.is_compared = is_compared
        self.ran = set()
        self.comparison.begin()
        if is_compared:
            self._known.clear()  # of blocks of another rung
            self.guards_all = False  # a cache that the first forward of all has filled is changed no more

    def watch(self) -> None:
        """Note the versions of all that blocks hold: see ``refuse_written``."""
        # BatchNorm writes its running statistics, and in training mode computes nothing by them.
        self._untouched = [
            (block, name, tensor, tensor._version)
            for block in self.blocks
            for layer in block.modules()
            for name, tensor in _held_by(layer)
        ]

    def refuse_written(self) -> None:
        """See that forwards, which may have been compiled, have written to nothing of a block since ``watch``.

        Raises:
            NotRepeatableError: one has; compiled code would compute it again from what it has written.
        """
        for block, name, tensor, version in self._untouched:
            if tensor._version != version:
                raise NotRepeatableError(block, f"{name} is written to in a forward that is compiled")

    @property
    def num_run(self) -> int:
        """Return how many of the blocks were run in this attempt at a window as they are written, and not compiled."""
        return sum(id(block) in self.ran for block in self.blocks)

    def compare_apart(self, loss: Callable[[], torch.Tensor], times: int) -> None:
        """Compare what blocks compute twice where that is done in compiled code, of which nothing is seen.

        A loss is computed uncompiled, and its gradients, so many times in a row; nothing of that is kept.

        Raises:
            NotRepeatableError: a block that comes to something else with the buffers that its forward has written.
        """
        parameters = [p for module in self._modules for p in module.parameters() if p.requires_grad]
        self.is_compared = self.is_as_compiled = True
        try:
            # To its end, for compiled code computes all of a forward again, and not only what a backward has saved.
            whole = set_checkpoint_early_stop(False)
            with self.no_trace(), torch.compiler.set_stance("force_eager"), whole:
                for _ in range(times):
                    computed = loss()
                    if computed.requires_grad:
                        torch.autograd.grad(computed, parameters, allow_unused=True)
        except NotRepeatableError as error:
            if "comes to other bits" not in error.what:
                raise
            what = f"{error.what}, from the buffers that it has written to, as compiled code does"
            raise NotRepeatableError(error.block, what) from None
        finally:
            self.is_as_compiled = False

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
        self._forwards = {id(block): self._forward_of(block) for block in self.blocks}
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
        forward = self._forwards[id(block)]
        forward.put_on()
        try:
            yield
        finally:
            forward.take_off()

    def _forward_of(self, block: nn.Module) -> _Forward:
        # Accelerate and others put forwards of their own on instances: these are what is run then, and put back.
        own = vars(block).get("forward", _ABSENT)
        known = self._forwards.get(id(block))
        # The same from window to window: code is compiled for it.
        if known is not None and known.block is block and known.own is own:
            return known
        return _Forward(self, block, own, block.forward)

    @contextmanager
    def no_trace(self) -> Iterator[None]:
        """Put back, at its end, all that a forward has changed; no values of tensors where memory is too short."""
        kept = self._state()
        outside, random = self._outside(), self._random([])
        try:
            with no_trace(self._modules, self.device):
                yield
        finally:
            outside.restore()
            random.put_back()
            if kept is not None:
                kept.restore()

    def _state(self) -> State | None:
        parameters = [p for module in self._modules for p in module.parameters()]
        try:
            return State(self._modules, functions_run(self._modules, self._functions), self.device, parameters)
        except MemoryLimitError:
            return None

    def _outside(self) -> Outside:
        functions = functions_run(self._modules, self._functions)
        # To remember it all anew takes as long as some blocks do, and nearly always it is as it was.
        found = self._found()
        if found is None or not found.is_still(functions):
            found = Outside(self._modules, functions)
            self._found = weakref.ref(found)
        return found

    def _random(self, own: Sequence[Any]) -> _Random:
        return _Random([*own, *surroundings_of(self._functions).generators], self.device)

    def moment(self, block: nn.Module, values: Sequence[Any]) -> _Moment:
        """Return how things stand before a forward of a block that is called with these values."""
        # Twenty attributes of each layer, of which a forward may change any: looked at, and remembered once for all
        # windows in which they are the same.
        layers = self._known.get(id(block))
        if layers is None or layers.block is not block or layers.attributes.have_changed():
            layers = self._known[id(block)] = _Layers(block)
        # To look at their versions would hold them, and whoever writes to them now writes to no copy.
        copied = {id(value) for value in values if isinstance(value, torch.Tensor) and self._is_elsewhere(value)}
        return _Moment(layers, values, _Random([*layers.generators, *self._held], self.device), copied)

    def forget(self, block: nn.Module) -> None:
        """Drop what is kept of a block's layers from one forward to the next."""
        self._known.pop(id(block), None)

    def layers_have_changed(self) -> bool:
        """Return whether hooks, modes, classes or forwards of layers are others than when this was last asked."""
        before = self._layers
        self._layers = [
            (type(layer), layer.training, vars(layer).get("forward"), *map(tuple, hooks_of(layer)))
            for module in self._modules
            for layer in module.modules()
        ]
        return before is not None and before != self._layers

    @property
    def _looks_outside(self) -> bool:
        # At all modules of a model, for each of its blocks: while that is measured, and where it was found necessary.
        return self.is_compared or self.guards_all

    def found_outside(self) -> Outside | None:
        """Return what a block finds outside of it, where forwards are compared, or were seen to change that."""
        return self._outside() if self._looks_outside else None

    def forwards_around(self, forward: _Forward) -> list[_Forward]:
        """Return this one, and where what is outside of its block is looked at all the others on blocks."""
        return list(self._forwards.values()) if self._looks_outside else [forward]

    @contextmanager
    def guarding(self, found: Outside | None) -> Iterator[None]:
        """Put back what the first forward found outside of its block, and in the end what there is today."""
        if found is None:
            yield
            return
        today = self._outside()
        found = today if self.is_as_compiled else found
        found.restore()
        was_within, self.is_within = self.is_within, True
        try:
            yield
        finally:
            self.is_within = was_within
            # Found out by measuring: from then on in all windows.
            self.guards_all = found.has_changed() or self.guards_all
            today.restore()


class _Forward(StandIn):
    """The forward of a block, in whose place it stands: it is computed again in backward."""

    def __init__(self, recomputing: Recomputing, block: nn.Module, own: Any, original: Callable[..., Any]) -> None:
        """Stand for ``original``, which is the instance's ``own`` where it has one."""
        self._recomputing = recomputing
        self.block = block
        self.own = own
        self._original = original
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's compiler reads this, and what it finds in it is part of its code. All by position, as below.
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                return self._original(*args, **kwargs)
            return checkpoint(self._compiled, len(args), tuple(kwargs), *args, *kwargs.values(), use_reentrant=False)
        recomputing, block = self._recomputing, self.block
        # A block that is called within another one is part of what that computes again.
        if recomputing.is_within or not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        # As it is without, so that what is remembered of its attributes is what a second forward will find.
        taken_off = [one for one in recomputing.forwards_around(self) if one.take_off()]
        recomputing.is_within = True
        recomputing.ran.add(id(block))
        try:
            call = _Call(recomputing, block, self._original, len(args), tuple(kwargs))
            # All by position: of tensors among these checkpoint sees whether they are written to before it reads them
            # again.
            return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=False)
        finally:
            recomputing.is_within = False
            for one in taken_off:
                one.put_on()

    def put_on(self) -> None:
        """Stand on the block, where it has its own forward still; the user's code may have put another there."""
        if vars(self.block).get("forward", _ABSENT) is self.own:
            _assign(self.block, self)

    def take_off(self) -> bool:
        """Leave the block with its own forward; return whether this one stood there."""
        is_on = vars(self.block).get("forward") is self
        if is_on:
            _assign(self.block, self.own)
        return is_on

    def _compiled(self, count: int, names: tuple[str, ...], *values: Any) -> Any:
        # Where the compiler cannot take all of it, checkpoint is called as it is, and would compute it again in any
        # state.
        if not torch.compiler.is_compiling():
            raise NotRepeatableError(self.block, "PyTorch's compiler does not compile its forward as a whole")
        return self._original(*values[:count], **dict(zip(names, values[count:], strict=True)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Whoever copies a module within a loss, say for a teacher, gets one that computes by itself.
        if self.own is not _ABSENT:
            return deepcopy(self.own, memo)
        other = memo[id(self.block)]
        return MethodType(type(other).forward, other)


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
        self._before: _Moment | None = None  # none until it has run
        self._outside: Outside | None = None
        self._seen: list[Mark] | None = None  # marks of what each operation came to

    def __call__(self, *values: Any) -> Any:
        """Run the forward; the second time in the state of the first."""
        args, kwargs = values[: self._count], dict(zip(self._names, values[self._count :], strict=True))
        # Checkpoint calls this for the forward, and once more when backward asks for the first of its tensors.
        if self._before is None:
            self._before = self._recomputing.moment(self._block, values)
            self._outside = self._recomputing.found_outside()
            if not self._recomputing.is_compared:
                return self._forward(*args, **kwargs)
            self._seen = []
            with First(self._recomputing.comparison, self._seen, self._left_out(self._before)):
                return self._forward(*args, **kwargs)
        try:
            with (
                self._recomputing.guarding(self._outside),
                self._as_it_was(self._before, values),
                self._comparing(self._before),
            ):
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
        attributes = before.attributes_now()
        if before.have_moved:  # what is kept of its layers is of use no more, and may keep what a forward came to alive
            self._recomputing.forget(self._block)
        # What it computes by must be what it was; of the inputs that come by position checkpoint sees to that as well.
        written = before.written()
        if written is not None:
            raise NotRepeatableError(self._block, f"{written} is written to after its forward has read it")
        # The graph is that of the first forward: of a layer that was frozen in it other tensors are saved.
        retrained = before.retrained()
        try:
            for p in retrained:
                p.requires_grad_(not p.requires_grad)
            before.put_back(buffers=not self._recomputing.is_as_compiled)
            yield
        finally:
            for p in retrained:
                p.requires_grad_(not p.requires_grad)
            for held in attributes:
                if held.have_changed():
                    held.restore()
            random.put_back()

    def _comparing(self, before: _Moment) -> Any:
        if self._seen is None:
            return nullcontext()
        return Second(self._recomputing.comparison, self._seen, self._block, self._left_out(before))

    def _left_out(self, before: _Moment) -> Sequence[torch.Tensor]:
        # What a forward writes to these may differ where that starts from what the first has written; what it reads
        # of them may not.
        return before.buffers if self._recomputing.is_as_compiled else ()


class _Layers:
    """The layers of a block, and what they hold for as long as their attributes stay as they are."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        layers = list(block.modules())
        held = [value for layer in layers for value in vars(layer).values()]
        # Not what says how they are made, in which ``installed`` switches a cache off and on: no forward writes to it.
        configs = {id(vars(layer).get("config")) for layer in layers}
        records = records_among(value for value in held if id(value) not in configs)
        self.owners = [*layers, *records]
        self.attributes = Attributes(self.owners)
        self.generators = [value for value in held if is_generator(value)]
        parameters = [(name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
        self.parameters = parameters
        # (where it stands, its name, itself) of each tensor that a forward may write to. Buffers are in a dict of their
        # own; other tensors are attributes like any other.
        spaces = [space for layer in layers for space in (vars(layer), cast("dict[str, Any]", layer._buffers))]
        self.tensors = [(space, name, value) for space in spaces for name, value in space.items() if _may_move(value)]


class _Moment:
    """How things stood when the forward of a block began."""

    def __init__(self, layers: _Layers, values: Sequence[Any], random: _Random, copied: Container[int] = ()) -> None:
        """Remember it; ``copied`` are the ids of values that will be as they are now, whatever is written to them."""
        self.random = random
        self._layers = layers
        self.have_moved = False
        """Whether attributes of layers have changed since, as of when they were last looked at."""
        # What is passed may be written to as well: a list that is appended to, a cache.
        leaves = flatten(values)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in copied]
        self._objects = [leaf for leaf in leaves if _has_attributes(leaf)]
        self._containers = [value for value in values if type(value) in CONTAINERS]
        self._given = self._given_now()
        # Parameters are not copied, nor inputs: that they are the same still is seen by their versions.
        self._trained = [(p, p.requires_grad) for _, p in layers.parameters]
        named = [*layers.parameters, *(("an input", tensor) for tensor in tensors)]
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not is_lazy(tensor)]
        # (where it stands, its name, itself, its version, a copy) of each tensor that a forward may write to.
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor, int, torch.Tensor]] = []
        copies: dict[int, torch.Tensor] = {}
        for namespace, name, tensor in layers.tensors:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
            self._tensors.append((namespace, name, tensor, tensor._version, copies[id(tensor)]))

    def _given_now(self) -> list[Attributes]:
        return [Attributes(self._objects, self._containers)] if self._objects or self._containers else []

    def attributes_now(self) -> list[Attributes]:
        """Return the attributes of layers and arguments as they are by now."""
        known = self._layers.attributes
        # Nearly always they are what they were.
        self.have_moved = known.have_changed()
        return [Attributes(self._layers.owners) if self.have_moved else known, *self._given_now()]

    def written(self) -> str | None:
        """Return the name of a parameter, or of an input, that has other values since; None where none has."""
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return the tensors that the forward may write to."""
        return [tensor for _, _, tensor, _, _ in self._tensors]

    def retrained(self) -> list[nn.Parameter]:
        """Return the parameters that were trained and are frozen by now, or the other way round."""
        return [p for p, was_trained in self._trained if p.requires_grad is not was_trained]

    def put_back(self, *, buffers: bool) -> None:
        """Put it back, after ``attributes_now``; where tensors may have moved others are put, their values stay.

        Args:
            buffers: whether to put back these tensors, too.
        """
        self.random.put_back()
        if self.have_moved:
            self._layers.attributes.restore()
        for held in self._given:
            if held.have_changed():
                held.restore()
        # In their place and not in them: what was computed since may have saved them, and would find them written to.
        fresh: dict[int, torch.Tensor] = {}
        for namespace, name, tensor, version, copy in self._tensors if buffers else ():
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


def _held_by(layer: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a layer itself by which a forward may compute, with their names."""
    buffers = {} if isinstance(layer, _BatchNorm) else layer._buffers
    named = [*layer._parameters.items(), *buffers.items(), *vars(layer).items()]
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    # Those of inference mode have no version: see ``_may_move``.
    return [(name, value) for name, value in tensors if not (is_lazy(value) or value.is_inference())]


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
    # Those of inference mode have no version, and nothing outside of it may write to them.
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference() or is_expanded(tensor))
    return is_plain and not tensor.requires_grad
