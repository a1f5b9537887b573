"""Has blocks compute their forward again in backward, by PyTorch's ``checkpoint``, so that less is held until then.

``forward`` is wrapped on the instances, for as long as a loss is computed and no longer: between windows, and within
backward, state_dict, names, ids, hooks, ``deepcopy`` and pickling are as without. A forward that is computed again
finds what the first one found: random states, attributes, and copies of buffers, which it writes to instead. Before a
block is relied on, the gradient of its first call is computed both ways and compared.

Forwards run uncompiled meanwhile: in compiled code nothing could be put back. PyTorch's compiler itself recomputes what
``torch._functorch.config.activation_memory_budget`` asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from copy import copy, deepcopy
from functools import update_wrapper
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointError, checkpoint

from autoaccum.data import randomness
from autoaccum.data.batches import flatten
from autoaccum.data.randomness import generator_state, set_generator_state
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory
from autoaccum.step.python_state import (
    CONTAINERS,
    Attributes,
    Outside,
    StandIn,
    functions_run,
    hooks_of,
    is_expanded,
    is_generator,
    records_among,
)
from autoaccum.step.terms import LossOf

T = TypeVar("T")
_ABSENT = object()


class NotRepeatableError(Exception):
    """A forward that cannot be computed again: its gradient would be another one."""

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
        *,
        has_values: bool = True,
    ) -> None:
        """Set up without any block.

        Args:
            modules: all that forwards may run.
            functions: of the user's, which may hold state of their own.
            device: whose random states there are.
            has_values: whether tensors have any that could be compared.
        """
        self.device = device
        self.blocks: list[nn.Module] = []
        """Those whose forward is computed again; none of them lies within another."""
        self.compared: list[nn.Module] = []
        """The blocks whose gradients were found to be the same, since somebody emptied this."""
        self.lacks_memory = False
        """Whether a gradient could not be compared, for want of memory."""
        self.is_within = False
        """Whether the forward of a block is running."""
        self._modules, self._functions, self._has_values = tuple(modules), tuple(functions), has_values
        self._forwards: dict[int, _Forward] = {}  # by the ids of blocks, as the next two are
        self._known: dict[int, _Held] = {}
        self._checked: dict[int, list[tuple[object, ...]]] = {}  # the layers with which a block was compared

    def of_loss(self, loss_of: LossOf) -> LossOf:
        """Return a loss that is computed with the blocks wrapped, where it is computed for a backward."""

        # A validation comes by here too, and has nothing to go back from.
        def recomputed(model: Any, batch: Any) -> Any:
            if not self.blocks or not torch.is_grad_enabled():
                return loss_of(model, batch)
            with self._installed():
                return loss_of(model, batch)

        return recomputed

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Wrap the blocks within this."""
        self._forwards = {id(block): self._forward_of(block) for block in self.blocks}
        with ExitStack() as stack:
            # A cache of keys and values would be appended to once more, and keep all of them alive.
            for config in _caching(self._modules):
                config.use_cache = False
                stack.callback(setattr, config, "use_cache", True)
            for forward in self._forwards.values():
                forward.put_on()
                stack.callback(forward.take_off)
            yield

    def _forward_of(self, block: nn.Module) -> _Forward:
        # Accelerate and others put forwards of their own on instances: these are what is run then, and put back.
        own = vars(block).get("forward", _ABSENT)
        known = self._forwards.get(id(block))
        if known is not None and known.block is block and known.own is own:
            return known
        return _Forward(self, block, own, block.forward)

    def held_by(self, block: nn.Module) -> _Held:
        """Return what a forward of a block may change, as it is now."""
        # Twenty attributes of each layer, of which a forward may change any: looked at, and remembered once for all
        # windows in which they are the same.
        known = self._known.get(id(block))
        if known is None or known.block is not block or known.has_changed():
            known = self._known[id(block)] = _Held(block)
        return known

    def forget(self, block: nn.Module) -> None:
        """Drop what is kept of a block from one forward to the next, which may hold what a forward came to."""
        self._known.pop(id(block), None)

    def check(self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Compare the gradient of this call, computed twice, with the plain one, unless that was done.

        It is done again once hooks, modes, classes or forwards of layers are others. Nothing of it remains.

        Raises:
            NotRepeatableError: they differ by more than the plain one does from itself.
        """
        layers = [
            (layer, type(layer), layer.training, vars(layer).get("forward"), *map(tuple, hooks_of(layer)))
            for layer in block.modules()
        ]
        if self._checked.get(id(block)) == layers or not self._has_values:
            return
        moment = _Moment(self, block, (*args, *kwargs.values()))

        def gradient(*, is_twice: bool) -> list[_Numbers]:
            moment.put_back(copies=True)
            return _gradient(_Call(self, block, forward) if is_twice else forward, block, args, kwargs)

        def compare() -> None:
            plain, twice = gradient(is_twice=False), gradient(is_twice=True)
            if twice == plain:
                return
            # Kernels that add in any order come to other bits each time, whatever a forward does.
            again = gradient(is_twice=False)
            if again == plain or not all(map(_is_rounding, plain, again, twice)):
                raise NotRepeatableError(block, "computed again, its forward gives another gradient")

        try:
            found = attempt(lambda: _with_own_variables(compare))
        except RuntimeError as error:
            if "inplace operation" not in f"{error}" and "in-place operation" not in f"{error}":
                raise  # as it would have been without
            raise NotRepeatableError(block, "it writes to what it is given, by an inplace operation") from error
        finally:
            moment.put_back()
        # What it takes more than a backward is no reason to do without.
        if isinstance(found, RanOut):
            self.lacks_memory = True
        else:
            self.compared += [block]
        self._checked[id(block)] = layers


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
        recomputing, block = self._recomputing, self.block
        # A block that is called within another one is part of what that computes again.
        if recomputing.is_within or not torch.is_grad_enabled():
            return self._original(*args, **kwargs)
        # As it is without, so that what is remembered of its attributes is what a second forward will find.
        is_on = self.take_off()
        recomputing.is_within = True
        try:
            recomputing.check(block, self._original, args, kwargs)
            return _Call(recomputing, block, self._original)(*args, **kwargs)
        finally:
            recomputing.is_within = False
            if is_on:
                self.put_on()

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Whoever copies a module within a loss, say for a teacher, gets one that computes by itself.
        if self.own is not _ABSENT:
            return deepcopy(self.own, memo)
        other = memo[id(self.block)]
        return MethodType(type(other).forward, other)


class _Call:
    """One call of a block's forward: run once as it is, and then again as it was."""

    def __init__(self, recomputing: Recomputing, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._recomputing, self._block, self._forward = recomputing, block, forward
        self._before: _Moment | None = None  # none until it has run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, which is run again in backward."""
        self._count, self._names = len(args), tuple(kwargs)
        # Random states are put back with all else: PyTorch's would be put back alone.
        return checkpoint(self._run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=False)

    def _run(self, *values: Any) -> Any:
        """Run the forward; the second time in the state of the first."""
        args, kwargs = values[: self._count], dict(zip(self._names, values[self._count :], strict=True))
        # Checkpoint calls this for the forward, and once more when backward asks for the first of its tensors.
        if self._before is None:
            self._before = _Moment(self._recomputing, self._block, values)
            return self._forward(*args, **kwargs)
        before, recomputing = self._before, self._recomputing
        # What it computes by must be what it was; of the inputs that come by position checkpoint sees to that.
        if (written := before.written()) is not None:
            raise NotRepeatableError(self._block, f"{written} is written to after its forward has read it")
        today = _Moment(recomputing, self._block, values, copies=False)
        was_within, recomputing.is_within = recomputing.is_within, True
        try:
            before.put_back(copies=True)
            return self._forward(*args, **kwargs)
        except Exception as error:
            # Checkpoint ends a forward that has come to all that is wanted by an exception of its own.
            if type(error).__module__.startswith("torch") or is_out_of_memory(error) or is_refusal(error):
                raise
            raise NotRepeatableError(self._block, f"computed again, its forward raises {error!r}") from error
        finally:
            recomputing.is_within = was_within
            today.put_back()
            if before.held is not today.held:
                recomputing.forget(self._block)


class _Held(Outside):
    """What a forward of a block may change, as it was: attributes of its layers, and what its functions hold."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        layers = list(block.modules())
        held = [value for layer in layers for value in vars(layer).values()]
        # Not what says how they are made, in which a cache is switched off and on: no forward writes to it.
        configs = {id(vars(layer).get("config")) for layer in layers}
        records = records_among(value for value in held if id(value) not in configs)
        super().__init__([block], functions_run([block], ()), records, with_modules=False)
        own = {id(one): one for one in (*self.generators, *filter(is_generator, held))}
        self.generators = list(own.values())
        self.parameters = [(name, p) for layer in layers for name, p in layer._parameters.items() if p is not None]
        # (where it stands, its name, itself) of each tensor that a forward may write to. Buffers are in a dict of their
        # own; other tensors are attributes like any other.
        spaces = [space for layer in layers for space in (vars(layer), cast("dict[str, Any]", layer._buffers))]
        self.tensors = [(space, name, value) for space in spaces for name, value in space.items() if _may_move(value)]


class _Moment:
    """How things stand before a forward of a block that is called with some values."""

    def __init__(
        self, recomputing: Recomputing, block: nn.Module, values: Sequence[Any], *, copies: bool = True
    ) -> None:
        self.held = recomputing.held_by(block)
        self._device = recomputing.device
        self._random = randomness.get_state(self._device)
        self._drawn = [(generator, generator_state(generator)) for generator in self.held.generators]
        # What is passed may be written to as well: a list that is appended to, a cache.
        leaves = flatten([value for value in values if not isinstance(value, torch.Tensor)])[0]
        objects, containers = filter(_has_attributes, leaves), [v for v in values if type(v) in CONTAINERS]
        self._given = Attributes(list(objects), containers)
        # Parameters are not copied, nor inputs: that they are the same still is seen by their versions.
        self._trained = [(p, p.requires_grad) for _, p in self.held.parameters]
        inputs = [("an input", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        named = [*self.held.parameters, *inputs]
        self._versions = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
        tensors = {id(tensor): tensor for _, _, tensor in self.held.tensors if copies}
        self._copies = {key: tensor.detach().clone() for key, tensor in tensors.items()}

    def written(self) -> str | None:
        """Return the name of a parameter, or of an input, that has other values since; None where none has."""
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)

    def put_back(self, *, copies: bool = False) -> None:
        """Put it back; with copies in the place of tensors that a forward may write to, or with themselves."""
        randomness.set_state(self._random, self._device)
        for generator, state in self._drawn:
            set_generator_state(generator, state)
        if self.held.has_changed():
            self.held.restore()
        self._given.restore()
        # The graph is that of the first forward: of a layer that was frozen in it other tensors are saved.
        for p, was_trained in self._trained:
            if p.requires_grad is not was_trained:
                p.requires_grad_(was_trained)
        # In their place and not in them: what was computed since may have saved them, and would find them written to.
        if copies:
            fresh = {key: copy.clone() for key, copy in self._copies.items()}
            for space, name, tensor in self.held.tensors:
                space[name] = fresh[id(tensor)]


def _with_own_variables(function: Callable[[], T]) -> T:
    """Call a function with copies of what context variables hold, in which hooks of libraries collect."""
    context = copy_context()

    def call() -> T:
        for variable, value in context.items():
            if type(value) in CONTAINERS:
                variable.set(_copied(value))
        return function()

    return context.run(call)


def _copied(value: Any) -> Any:
    """Return a container with copies of the containers in it."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return copy(value) if type(value) in CONTAINERS else value


_Numbers = tuple[float, float, float]
"""Of a gradient: its norm, its sum as far as it can be as large as that, and how far rounding may move both."""


def _gradient(forward: Callable[..., Any], block: nn.Module, args: Any, kwargs: Any) -> list[_Numbers]:
    """Return the gradient of a weighted sum of a forward's outputs, in its inputs and parameters, in a few numbers.

    The gradients themselves would take the memory that is to be saved.
    """
    leaves: list[torch.Tensor] = [p for p in block.parameters() if p.requires_grad]

    def alone(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor.detach().clone()  # which a forward may write to
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    given, named = tree_map_only(torch.Tensor, alone, (args, kwargs))
    outputs = [leaf for leaf in flatten(forward(*given, **named))[0] if isinstance(leaf, torch.Tensor)]
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs or not leaves:
        return []
    # Others for each feature: of what is normalised before it is returned, a plain sum has no gradient.
    weights = [
        torch.linspace(1, 2, one.shape[-1] if one.dim() else 1, device=one.device).to(one.dtype).expand(one.shape)
        for one in outputs
    ]
    return list(map(_numbers, torch.autograd.grad(outputs, leaves, weights, allow_unused=True)))


def _numbers(gradient: torch.Tensor | None) -> _Numbers:
    if gradient is None or not gradient.numel():
        return 0.0, 0.0, 0.0
    dense = gradient.to_dense()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    dtype = torch.promote_types(dense.dtype, torch.float32)
    norm = float(torch.linalg.vector_norm(dense, dtype=dtype))
    total = float(dense.sum(dtype=dtype)) / dense.numel() ** 0.5
    # What is not finite is alike.
    return (norm, total, torch.finfo(dense.dtype).eps ** 0.5) if math.isfinite(norm) else (0.0, 0.0, 1.0)


def _is_rounding(one: _Numbers, *others: _Numbers) -> bool:
    """Return whether gradients are the same in the first half of their digits, as a whole."""
    norm, total, share = one
    return all(max(abs(other[0] - norm), abs(other[1] - total)) <= share * norm for other in others)


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
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
        return False
    # Those of inference mode have no version, and nothing outside of it may write to them.
    is_plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_inference() or is_expanded(tensor))
    return is_plain and not tensor.requires_grad


def named_submodules(modules: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return all modules inside these, but ScriptModules, by their names, such as "model.layers.0"."""
    found: dict[str, nn.Module] = {}
    # The first module is the model: where a loss has something of the same name, the model's is meant.
    for root in reversed(modules):
        inner = dict(root.named_modules(prefix="model"))
        inner.pop("model", None)  # all of it is no block
        found |= inner
    return {name: module for name, module in found.items() if not isinstance(module, torch.jit.ScriptModule)}


def blocks_of(modules: Sequence[nn.Module], without: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks by their names, none within another.

    Args:
        modules: the model, and the loss if it is one too.
        without: names of classes that cannot be computed again, nor what holds one of them.
    """
    named = named_submodules(modules)
    usable = {
        name: module
        for name, module in named.items()
        if _is_block(module) and not any(_name(layer) in without for layer in module.modules())
    }
    repeated: set[type] = set()
    for module in (*modules, *named.values()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            # Of what torch.compile has made the module within. One of a list may be called again and again.
            inside = Counter(type(getattr(child, "_orig_mod", child)) for child in module)
            repeated |= {kind for kind, count in inside.items() if count > 1 or isinstance(module, nn.ModuleList)}
    if not any(type(module) in repeated for module in usable.values()):
        repeated = {kind for kind, count in Counter(map(type, usable.values())).items() if count > 1}
    found: dict[str, nn.Module] = {}
    # By depth, so that what others lie in comes before them.
    for name in sorted(usable, key=lambda name: name.count(".")):
        if type(usable[name]) in repeated and not any(name.startswith(f"{other}.") for other in found):
            found[name] = usable[name]
    return {name: module for name, module in named.items() if name in found}  # as they stand in the model


def _is_block(module: nn.Module) -> bool:
    """Return whether a module has layers of its own, and computes with them by one forward that may be wrapped."""
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or not children:
        return False
    # A stage: its members are the blocks, if any are.
    if isinstance(module, nn.Sequential) and any(map(_has_layers, children)):
        return False
    return not hasattr(module, "_orig_mod")  # what torch.compile has made of one


def _has_layers(module: nn.Module) -> bool:
    """Return whether a module has layers of its own, but for what computes its weights."""
    return any(name != "parametrizations" for name, _ in module.named_children())


def _name(module: nn.Module) -> str:
    return type(module).__name__


class Level(NamedTuple):
    """A way of saving memory."""

    name: str
    blocks: tuple[str, ...] = ()
    """The names of those that are computed twice."""
    offloads: bool = False
    """Whether saved tensors and the optimizer's state are on the host while a window runs."""

    @property
    def kinds(self) -> frozenset[str]:
        """Return in which ways it saves memory, in the words of the argument."""
        ways = {"checkpoint": bool(self.blocks), "offload": self.offloads}
        return frozenset(way for way, is_taken in ways.items() if is_taken)


OFF = Level("off")
"""The one on which nothing is saved, as in nearly all windows of nearly all runs."""


def levels_of(modules: Sequence[nn.Module], kinds: Collection[str], without: Collection[str] = ()) -> list[Level]:
    """Return the levels below ``OFF``, from the top down; none where nothing can be saved.

    Args:
        modules: the model, and the loss if it is one too.
        kinds: in which ways memory can be saved.
        without: names of classes that cannot be computed again.
    """
    blocks = blocks_of(modules, without) if "checkpoint" in kinds else {}
    classes = " and ".join(dict.fromkeys(map(_name, blocks.values())))
    # Computing twice first: it needs no memory elsewhere, and most kernels are faster than the way there and back.
    found = [Level(f"checkpoint, every {classes}", tuple(blocks))] if blocks else []
    if "offload" in kinds:
        found.append(Level("; ".join([*(level.name for level in found), "offload"]), tuple(blocks), offloads=True))
    return found


class SavedAlready(NamedTuple):
    """How memory is saved already, and how to have it saved in the ways that are left."""

    level: Level = OFF
    how_to_compute_twice: str | None = ""
    """How to have blocks computed twice; empty for the code that does, None where that was tried."""
    how_to_offload: str | None = ""
    """How to have tensors on the host, likewise."""

    @property
    def told(self) -> str:
        """Return what was done to save memory, as an error goes on with it; empty where nothing was tried."""
        done = [f"{len(self.level.blocks)} of the model's blocks computed twice"] if self.level.blocks else []
        done += ["what forwards save on the host"] if self.level.offloads else []
        if done:
            return f", with {' and '.join(done)}"
        none = ", and no block of the model was found that could be computed twice"
        return none if self.how_to_compute_twice is None else ""


NOTHING_SAVED = SavedAlready()
