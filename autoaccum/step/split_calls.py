"""Splits the calls of modules into micro-batches of rows, so that a window's loss is computed once, on everything.

::

    with SplitCalls(layout, sizes, device):
        loss = step(model, whole_window)    # each outermost call of a module runs by rows, and keeps no graph
        loss.backward()                     # each micro-batch runs again, with a graph, one at a time

A call returns the joined outputs of its micro-batches. When backward arrives at it with the gradient of these, it runs
each micro-batch again and goes back through it: gradient checkpointing by rows instead of by layers (Tianqi Chen
et al. 2016, https://arxiv.org/abs/1604.06174), which GradCache does for one encoder and one loss (Luyu Gao et al. 2021,
https://arxiv.org/abs/2101.06983). The last micro-batch keeps its graph and does not run again.

A module whose outputs are no rows, such as a model that returns its own loss, is *opened*: its own code runs on the
whole window, and its children are split in its place. ``Layout`` says which modules are opened.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoaccum.data import randomness
from autoaccum.data.randomness import generator_state, set_generator_state
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.step.python_state import (
    CONTAINERS,
    GENERATORS,
    OWN,
    Attributes,
    StandIn,
    contents_of,
    is_generator,
    objects_of,
    version_of,
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
"""Types of arguments that are the same for every micro-batch."""
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors that can be cut; a subclass may mean something else by its rows."""

_NUMBERS = frozenset((int, float, complex))
_FLAGS = frozenset((type(None), bool, str, bytes, torch.dtype, torch.device, torch.Size, tuple))

_STATED = frozenset((type(None), bool, str, int, float))

_FEW = 3
"""Samples, of which a list of plain values may have as many by chance: a size of two or three dimensions, say."""
_MOST_NUMBERS = 8
"""Kinds of calls of a module that differ in nothing but numbers, such as a step's; with more of them it is opened."""
_SMALL_BYTES = 256
"""Bytes of a tensor in which zeros are looked for, and entries of a container that are."""
_DEEPEST = 2
"""Containers in containers that are looked into."""
_OF_LAYERS = OWN - {"training"}
_TWICE = "the step takes the gradient of a gradient"
_A_NUMBER = "it returns a number, which may be a count of samples"

Rows = tuple[int, int]
"""The dimension in which samples lie, and how many rows each of them has there."""


class Known(NamedTuple):
    """Where the samples lie in a kind of call, as was measured."""

    inputs: tuple[Rows | None, ...]
    outputs: tuple[Rows | None, ...]


class NotRowsError(Exception):
    """A module's call cannot be split, so the module has to be opened."""

    is_agreed = False
    """Whether all ranks know of it."""

    def __init__(self, module: nn.Module, why: str, *, is_deep: bool = False) -> None:
        """Set up; ``is_deep`` says that none of the modules inside can be split either."""
        super().__init__(why)
        self.module = module
        self.is_deep = is_deep


class UnknownCallError(NotRowsError):
    """A kind of call that was not measured: a module that was not called before, or is called otherwise."""

    def __init__(self, module: nn.Module, signature: str) -> None:
        """Set up; ``signature`` is that of the call."""
        super().__init__(module, "it was not called like this where it was measured")
        self.signature = signature


class Layout:
    """Which modules are split, and which are opened."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        """Begin with the outermost of these modules split."""
        modules = list(roots)
        inner = {id(part) for module in modules for part in module.modules() if part is not module}
        self.roots = [module for module in modules if id(module) not in inner]
        self.name_modules()
        self._opened: dict[int, nn.Module] = {}
        self.rows: dict[str, list[Known]] = {}
        """Where the samples lie in each kind of call that was measured, by its signature."""

    def name_modules(self) -> None:
        """Name all modules by where they are now; some may have been replaced."""
        self._names = {id(part): f"{at}.{name}" for at, root in enumerate(self.roots) for name, part in named(root)}

    def open(self, module: nn.Module) -> None:
        """Run a module's own code on the whole window, and split its children."""
        self._opened[id(module)] = module

    def heed(self, error: NotRowsError) -> None:
        """Open the module of which an error says that it cannot be split."""
        for module in error.module.modules() if error.is_deep else (error.module,):
            self.open(module)

    def is_opened(self, module: nn.Module) -> bool:
        """Return whether a module's own code runs on the whole window."""
        return id(module) in self._opened

    def name(self, module: nn.Module) -> str:
        """Return a name that is the same in another process."""
        return self._names.get(id(module), "")

    def module_of(self, name: str) -> nn.Module:
        """Return the module of that name."""
        return next(part for root in self.roots for part in root.modules() if self.name(part) == name)

    def name_in_model(self, module: nn.Module) -> str:
        """Return a module's name as the user knows it: in the model, or its class where it is a root."""
        at, _, name = self.name(module).partition(".")
        return name or (type(self.roots[int(at)]).__name__ if at else "")

    def opened(self) -> list[nn.Module]:
        """Return the modules whose own code runs on the whole window."""
        return list(self._opened.values())

    def split(self) -> list[nn.Module]:
        """Return the modules that are split."""
        found: dict[int, nn.Module] = {}
        waiting = list(self.roots)
        seen = set()
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if self.is_opened(module):
                waiting.extend(called_children(module))
            else:
                found[id(module)] = module
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "opened": sorted(self._names.get(id(m), "") for m in self._opened.values()),
            "rows": {
                name: [(list(one.inputs), list(one.outputs)) for one in kinds] for name, kinds in self.rows.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        modules = {self._names[id(part)]: part for root in self.roots for _, part in named(root)}
        self._opened = {id(modules[name]): modules[name] for name in state["opened"] if name in modules}
        self.rows = {
            name: [Known(_as_rows(inputs), _as_rows(outputs)) for inputs, outputs in kinds]
            for name, kinds in state["rows"].items()
        }


def _as_rows(rows: Iterable[Any]) -> tuple[Rows | None, ...]:
    return tuple(None if one is None else (one[0], one[1]) for one in rows)


def named(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's parts with their names, itself first; without what torch.compile wraps around it."""
    for name, part in root.named_modules():
        yield name.replace("_orig_mod.", "").replace("_orig_mod", ""), part


def called_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside one that can be called; a list of modules cannot."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called_children(child)
        else:
            yield child


class Draws(Protocol):
    """Gives micro-batches their rows of what was drawn for all samples, where a window is measured."""

    def at(self) -> Any:
        """Return where in the draws of the whole the next one is."""

    def go(self, place: Any, low: int, high: int) -> None:
        """Go to a place, for samples ``low`` to ``high``."""


class Checks(Protocol):
    """Measures whether a call can be split: see ``step.row_check``."""

    def check(self, call: Call) -> None:
        """Raise ``NotRowsError`` where it cannot."""


class Ranks(Protocol):
    """The processes that run a share of each call's rows: see ``joined``."""

    size: int
    """How many there are."""
    start: int
    """The first sample of this one's share."""
    num_samples: int
    """Samples of all of them."""

    def drawing(self, call: Call) -> AbstractContextManager[None]:
        """Draw, within it, from random numbers of this rank's own."""

    def gather(self, call: Call, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of all samples, where each rank passes those of its own."""

    def sum(self, tensors: dict[int, torch.Tensor], like: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the mean over ranks of tensors; one that a rank has not is 0 there, and has the shape of ``like``."""


class SplitCalls:
    """Within it, the outermost calls of modules run by rows; use it as a context around forward and backward."""

    def __init__(
        self,
        layout: Layout,
        sizes: Sequence[int],
        device: torch.device,
        *,
        generators: Sequence[Any] = (),
        instead: dict[int, nn.Module] | None = None,
        checks: Checks | None = None,
        draws: Draws | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Set up.

        Args:
            layout: which modules are split.
            sizes: samples of each micro-batch, of this rank where there are several.
            device: where modules compute.
            generators: those that modules draw from, besides the default ones.
            instead: what torch.compile has made of a module, by the module's id: that is what steps call.
            checks: measures calls, and opens modules as it finds them unfit; None: ``NotRowsError`` goes to the caller.
            draws: gives micro-batches their rows of recorded draws.
            ranks: run the other rows of each call.
        """
        self.layout = layout
        self.device = device
        self.ranks = ranks
        self.num_samples = sum(sizes) if ranks is None else ranks.num_samples
        self.pieces: list[tuple[int, int]] = []
        for size in sizes:
            low = self.pieces[-1][1] if self.pieces else 0 if ranks is None else ranks.start
            self.pieces.append((low, low + size))
        self.num_calls = 0
        """Calls that were split."""
        self.called: set[int] = set()
        """The ids of the modules that were called."""
        self.checks = checks
        self.draws = draws
        self.generators = list(generators)
        self._instead = instead or {}
        self._installed: list[tuple[nn.Module, Any]] = []
        self._refused: NotRowsError | None = None  # the first one
        self.is_inside = False
        """Whether a micro-batch runs, in which no call is split."""
        self._thread = 0

    def __enter__(self) -> SplitCalls:
        """Put itself in the place of the calls of modules."""
        self._thread = threading.get_ident()
        for module in self.layout.split():
            self._install(self._instead.get(id(module), module), module)
        return self

    def __exit__(self, _: object, raised: BaseException | None, traceback: object) -> None:
        """Leave modules as they were.

        Raises:
            NotRowsError: a module was refused, whatever the step's own code has made of the error.
        """
        for target, before in reversed(self._installed):
            if before is None:
                vars(target).pop("_compiled_call_impl", None)
            else:
                vars(target)["_compiled_call_impl"] = before
        self._installed.clear()
        refused, self._refused = self._refused, None
        # With several ranks an error may tell that another one has left.
        if refused is not None and (raised is None or (isinstance(raised, Exception) and self.ranks is None)):
            raise refused.with_traceback(None) from None

    def refuse(self, error: NotRowsError) -> NotRowsError:
        """Return an error to be raised through code of the step's, which may catch it."""
        self._refused = self._refused or error
        return error

    def _install(self, target: nn.Module, module: nn.Module) -> None:
        # The slot that Module.compile() uses: per instance, asked for before anything else of a call, and in no copy
        # or pickle of the module once this is left.
        before = vars(target).get("_compiled_call_impl")
        compiled = before or (target._call_impl if isinstance(target, torch.jit.ScriptModule) else None)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.called.add(id(module))
            if self._passes() or self.layout.is_opened(module):
                return (before or target._call_impl)(*args, **kwargs)
            if compiled is not None:
                return self._split(module, compiled, args, kwargs)
            return self._within_hooks(target, module, args, kwargs)

        self._installed.append((target, before))
        vars(target)["_compiled_call_impl"] = called

    def _passes(self) -> bool:
        """Return whether a call is not split: within another one, of one micro-batch, traced, or of another thread."""
        return (
            self.is_inside
            or (len(self.pieces) < 2 and self.ranks is None)
            or threading.get_ident() != self._thread
            or torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch.autograd.forward_ad._current_level >= 0
        )

    def _within_hooks(self, target: nn.Module, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module such that its own hooks see the whole window, and its forward is split."""
        own, forward = vars(target).get("forward"), target.forward

        def split(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return self._split(module, forward, args, kwargs)

        def put_back() -> None:
            if own is None:
                vars(target).pop("forward", None)
            else:
                vars(target)["forward"] = own

        vars(target)["forward"] = split
        try:
            return target._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            put_back()

    def _split(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.checks is None:
            try:
                return Call(self, module, forward, args, kwargs).run()
            except NotRowsError as error:
                self.refuse(error)
                raise
        # A tensor of a multiple of the samples may have several rows of each, or none, as a mask of times by times.
        for has_several in (True, False):
            # Fresh containers, for a forward may put things into those that it is given.
            leaves, spec = pytree.tree_flatten((args, kwargs))
            own_args, own_kwargs = pytree.tree_unflatten(leaves, spec)
            call = Call(self, module, forward, own_args, own_kwargs, has_several=has_several)
            try:
                return call.run()
            except NotRowsError as error:
                if error.module is not module:
                    raise
            if not any(rows is not None and rows[1] > 1 for rows in call.rows):
                break
        self.layout.open(module)
        for child in called_children(module):
            if all(target is not child for target, _ in self._installed):
                self._install(self._instead.get(id(child), child), child)
        return forward(*args, **kwargs)


@contextmanager
def joining(
    model: Any, layout: Layout, sizes: Sequence[int], device: torch.device, **options: Any
) -> Iterator[SplitCalls]:
    """Within it, split the calls of modules into micro-batches, compiled ones too.

    Args:
        model: what the step calls, which torch.compile may have made.
        layout: which modules are split.
        sizes: samples of each micro-batch.
        device: where modules compute.
        options: further ones of ``SplitCalls``.
    """
    bare = getattr(model, "_orig_mod", model)
    is_eager = model is not bare and layout.is_opened(bare)
    instead = {id(bare): model} if model is not bare and not is_eager else None
    split = SplitCalls(layout, sizes, device, instead=instead, **options)
    with torch.compiler.set_stance("force_eager") if is_eager else nullcontext(), split:
        yield split


class _Unjoined:
    """Stands for an output that cannot be joined, such as a cache of keys and values, which training seldom reads.

    Whoever does has the module opened.
    """

    def __init__(self, call: Call, kind: type) -> None:
        vars(self).update(_split=call.split, _module=call.module, _kind=kind)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        why = f"its output of type {vars(self)['_kind'].__name__} is used"
        raise vars(self)["_split"].refuse(NotRowsError(vars(self)["_module"], why))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __eq__(self, other: object) -> bool:
        return type(other) is _Unjoined and vars(self) == vars(other)

    __hash__ = object.__hash__
    __iter__ = __len__ = __getitem__ = __call__ = __bool__ = __setattr__ = _refuse
    __array__ = __float__ = __int__ = __index__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __neg__ = __lt__ = __gt__ = _refuse


class Repeated(NamedTuple):
    """Stands for an output that is another output too, as the last of all hidden states is."""

    place: int
    """Of the other one, among all outputs."""


class Passed(NamedTuple):
    """Stands for an output that is an input as it is, such as an entry of a dict that is returned with others."""

    place: int
    """Of the input, among the tensors that the call is given."""


class Again(NamedTuple):
    """A micro-batch that has a graph."""

    inputs: list[torch.Tensor]
    outputs: list[Any]
    held: list[torch.Tensor]
    """What stands for the tensors that the module holds."""
    spec: Any
    """The structure of the outputs."""


class Call:
    """One call of a module, split."""

    def __init__(
        self,
        split: SplitCalls,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        has_several: bool = True,
    ) -> None:
        self.split = split
        self._has_several = has_several  # whether a tensor may have several rows of each sample
        self._lists = list(_plain_lists((args, kwargs)))
        self.rows: tuple[Rows | None, ...] = ()
        self.module = module
        self.pieces = split.pieces
        self._forward = forward
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._places = [at for at, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self._leaves[at] for at in self._places]
        self.name = split.layout.name(module)
        layers = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self.layers = layers
        self.objects: list[Any] = [*layers, *objects_of(layers)]
        """What may hold state that a call changes."""
        self.has_grad = torch.is_grad_enabled()
        kinds = dict.fromkeys(("cpu", split.device.type))
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in kinds
        ]
        self.held = held_by(module)
        self.spec: Any = None  # of the outputs
        self.out_rows: list[Rows | None] = []  # of each output that is a tensor; None: the same in each micro-batch
        self._generators = self._find_generators()
        self.random: list[Any] = []
        self.place = None if split.draws is None else split.draws.at()
        self.kept: dict[int, Again] = {}
        self.needs_grad: list[bool] = []  # of each output
        self.needs_input_grad: list[bool] = []

    def run(self) -> Any:
        """Run the call by rows; return what it returns for the whole window."""
        split = self.split
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in _TENSORS or leaf.layout is not torch.strided or leaf.is_nested:
                    raise NotRowsError(self.module, f"an argument is a {type(leaf).__name__}")
            elif not isinstance(leaf, (*_PLAIN, torch.Generator)) and not callable(leaf):
                raise NotRowsError(self.module, f"an argument is a {type(leaf).__name__}")
        # Of a few samples a shape may be as long by chance.
        if split.num_samples in self._lists and (split.checks is not None or split.num_samples > _FEW):
            raise NotRowsError(self.module, "an argument is a list of a value for each sample")
        flags, numbers = self._settings()
        kind = f"{self._kind()} {flags:08x}"
        self.signature = f"{kind} {self._numbers()} {numbers:08x}"
        kinds = split.layout.rows.get(self.signature, [])
        if not kinds and split.checks is None and split.layout.rows:
            if sum(signature.startswith(kind) for signature in split.layout.rows) >= _MOST_NUMBERS:
                raise NotRowsError(self.module, "it is called with other numbers all the time")
            raise UnknownCallError(self.module, self.signature)
        self.known = self._known_of(kinds)
        self.rows = self._find_rows()
        if not any(self.rows):
            # Nothing in it depends on the samples; what it computes is computed once.
            self.learn(())
            return self._forward(*pytree.tree_unflatten(self._leaves, self._spec)[0], **self._kwargs())
        self.attributes = Attributes(self.objects)
        if split.checks is not None:
            split.checks.check(self)
            self._generators = self._find_generators()  # which a first call may have made
        versions = [version_of(tensor) for tensor in self.tensors]
        moving = self._moving()
        state = [version_of(one) for one in moving]
        before = split.draws.at() if split.draws is not None else None
        # A rank without samples learns from those of another what the call returns.
        pieces, is_empty = self.pieces or [(0, min(2, split.num_samples))], not self.pieces
        parts: list[list[Any]] = []
        with nullcontext() if split.ranks is None else split.ranks.drawing(self):
            for index, (low, high) in enumerate(pieces):
                if index and split.draws is not None:
                    self.begin_alike()
                self.random.append(self.random_state())
                found = self.forward_of(low, high, before)
                if self.spec is not None and found.spec != self.spec:
                    raise NotRowsError(self.module, "its micro-batches return different structures")
                self.spec = found.spec
                if self.has_grad and index == len(pieces) - 1 and not is_empty:
                    self.kept[index] = found
                parts.append([one.detach() if isinstance(one, torch.Tensor) else one for one in found.outputs])
                self.note_needs(found)
                del found
            if split.draws is not None:
                split.draws.go(split.draws.at(), 0, split.num_samples)
            if [version_of(tensor) for tensor in self.tensors] != versions:
                raise NotRowsError(self.module, "it changes its inputs in place")
            # Which was measured not to be so; but code may come to other branches.
            if [version_of(one) for one in moving] != state or self.attributes.have_changed():
                raise NotRowsError(self.module, "it moves state")
            if split.draws is None and draws_elsewhere(self.random[0], self.random_state()):
                raise NotRowsError(self.module, "it draws from a generator that is not PyTorch's")
        split.num_calls += 1
        joined = self.joined(parts, [high - low for low, high in pieces])
        if split.ranks is not None:
            joined = split.ranks.gather(self, joined)
        if not self.has_grad or not any(self.needs_grad):
            self.kept.clear()
            return self._returned(list(map(self._given, joined)))
        self._keep_for_later(moving)
        self.outputs: list[torch.Tensor] = [one for one in joined if isinstance(one, torch.Tensor)]
        self.is_tensor = [isinstance(one, torch.Tensor) for one in joined]
        others = [None if isinstance(one, torch.Tensor) else self._given(one) for one in joined]
        del joined
        # A Function with gradients of its own for everything that the call depends on: so that autograd.grad, hooks and
        # wrappers see the gradient of the call as they see any other.
        returned = iter(_SplitCall.apply(self, *self.tensors, *[one for one, _ in self.held]))  # type: ignore[no-untyped-call]
        whole = [next(returned) if is_tensor else one for is_tensor, one in zip(self.is_tensor, others, strict=True)]
        return self._returned(whole)

    def note_needs(self, part: Again) -> None:
        """Note which outputs need gradients: those of some micro-batches may need none."""
        needs = [isinstance(one, torch.Tensor) and one.requires_grad for one in part.outputs]
        self.needs_grad = [any(pair) for pair in zip(needs, self.needs_grad or needs, strict=True)]

    def _returned(self, outputs: list[Any]) -> Any:
        outputs = [outputs[one.place] if isinstance(one, Repeated) else one for one in outputs]
        return pytree.tree_unflatten(outputs, self.spec)

    def _given(self, output: Any) -> Any:
        """Return the input that an output stands for, or the output."""
        return self._leaves[self._places[output.place]] if isinstance(output, Passed) else output

    def _kwargs(self) -> Any:
        return pytree.tree_unflatten(self._leaves, self._spec)[1]

    def _kind(self) -> str:
        """Return what tells this kind of call from others of the same module, but for the numbers that it is given."""
        # Not the very type: a measurement may compute in 64 bits.
        dims = [(one.ndim, _kind_of(one), self.has_grad and one.requires_grad) for one in self.tensors]
        others = [_told(leaf) for leaf in self._leaves if not isinstance(leaf, (torch.Tensor, int, float, complex))]
        flags = [str(leaf) for leaf in self._leaves if isinstance(leaf, bool)]
        return f"{self.name} {dims} {others} {flags} {self.has_grad}"

    def _numbers(self) -> list[str]:
        """Return the numbers that it is given, by which code may take other branches."""
        numbers = [
            leaf for leaf in self._leaves if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
        ]
        # A tensor of one number is one, where to read it waits for nothing.
        return [str(one) for one in numbers] + [str(one.item()) for one in self.tensors if not one.ndim and one.is_cpu]

    def _settings(self) -> tuple[int, int]:
        """Return what tells by which flags, names and functions its layers compute now, and by which numbers.

        A layer that changes a number itself, such as a count of its calls, is not split.
        """
        flags: list[str] = []
        numbers: list[str] = []
        for layer in self.layers:
            flags.append(type(layer).__qualname__)
            for hooks in (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks):
                flags.extend(map(_told, hooks.values()))
            for p in layer._parameters.values():
                if p is not None and p.requires_grad:
                    flags.append(str(self.has_grad))
                elif p is not None:
                    numbers.append(_zeros_of(p))
        for owner in self.objects:
            is_layer = isinstance(owner, nn.Module)
            buffers = owner._buffers.values() if is_layer else ()
            numbers.extend(_told_of_tensor(one) for one in buffers if one is not None)
            for name, value in vars(owner).items():
                if not (is_layer and name in _OF_LAYERS):
                    _note(value, flags, numbers, 0)
        return zlib.crc32("|".join(flags).encode()), zlib.crc32("|".join(numbers).encode())

    def _known_of(self, kinds: Sequence[Known]) -> Known | None:
        """Return which of several kinds a call is, by the rows of its arguments.

        Raises:
            NotRowsError: shapes do not tell.
        """
        if len(kinds) < 2 or self.split.checks is not None:
            return kinds[0] if kinds else None
        # A model may be called on the window, and on a fixed number of other rows.
        shapes = [tensor.shape for tensor in self.tensors]
        fit = [kind for kind in kinds if all(map(partial(_is_exact, self.split.num_samples), shapes, kind.inputs))]
        most = max((_num_with_rows(kind) for kind in fit), default=0)
        fit = [kind for kind in fit if _num_with_rows(kind) == most]
        if len(fit) != 1:
            raise NotRowsError(self.module, "its samples lie in other dimensions from call to call")
        return fit[0]

    def _find_rows(self) -> tuple[Rows | None, ...]:
        """Return in which dimension of each tensor the samples lie, as was measured, or as shapes have it."""
        n = self.split.num_samples
        if self.known is None or self.split.checks is not None:
            return tuple(rows_of(tensor.shape, n, has_several=self._has_several) for tensor in self.tensors)
        found = tuple(
            None if rows is None else rows_in(one.shape, rows[0], n)
            for one, rows in zip(self.tensors, self.known.inputs, strict=True)
        )
        if any(rows is None and known is not None for rows, known in zip(found, self.known.inputs, strict=True)):
            raise NotRowsError(self.module, "an argument has no longer a row for each sample")
        return found

    def learn(self, out_rows: Sequence[Rows | None]) -> None:
        """Remember where the samples of such calls lie."""
        if self.split.checks is None or not self.name:
            return
        kinds = self.split.layout.rows.setdefault(self.signature, [])
        dims = [one and one[0] for one in self.rows]
        if all([one and one[0] for one in known.inputs] != dims for known in kinds):
            kinds.append(Known(self.rows, tuple(out_rows)))

    def _moving(self) -> list[torch.Tensor]:
        held = [one for layer in self.layers for one in (*layer._buffers.values(), *layer._parameters.values())]
        return [*(one for one in held if one is not None), *self.attributes.tensors()]

    def _keep_for_later(self, moving: list[torch.Tensor]) -> None:
        """Keep what a micro-batch needs to run again, and note how it can be seen whether it was changed since."""
        self.flags = [(one, one.requires_grad) for one in moving if one.is_leaf]
        # A list of a buffer's value for each call would be another copy of the model's state; a version costs nothing.
        self._versions = [(one, version_of(one)) for one in (*moving, *self.tensors)]

    def was_moved(self) -> bool:
        """Return whether the step has changed what a micro-batch would need to run again."""
        return any(version_of(one) != version for one, version in self._versions)

    def forward_of(self, low: int, high: int, place: Any = None) -> Again:
        """Run samples ``low`` to ``high`` forward; what comes is detached from what the step has computed.

        Raises:
            NotRowsError: it fails on them.
        """
        inputs = [
            cut(tensor, rows, low, high).detach().requires_grad_(self.has_grad and tensor.requires_grad)
            for tensor, rows in zip(self.tensors, self.rows, strict=True)
        ]
        if self.split.draws is not None:
            self.split.draws.go(place, low, high)
        held = self.stand_in([one for one, _ in self.held]) if self.has_grad else []
        try:
            outputs, spec = self.call(inputs)
        except NotRowsError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotRowsError(self.module, f"it fails on a micro-batch: {type(error).__name__}: {error}") from None
        finally:
            if self.has_grad:
                self._leave_out_replaced(held)
                self.put_back_held()
        return Again(inputs, outputs, held, spec)

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], Any]:
        """Call the module itself with these tensors; return its outputs, flat, and their structure."""
        leaves = list(self._leaves)
        for at, tensor in zip(self._places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        # Weights that autocast has cast and kept would tie one micro-batch's graph to another's.
        torch.clear_autocast_cache()
        before, self.split.is_inside = self.split.is_inside, True
        try:
            with nullcontext() if _top_saved_tensors_hooks(True) is None else _own_saved_tensors():
                found = self._forward(*args, **kwargs)
        finally:
            self.split.is_inside = before
        torch.clear_autocast_cache()
        if self.split.checks is not None and not _are_same(pytree.tree_leaves((args, kwargs)), leaves):
            raise NotRowsError(self.module, "it changes the containers that it is given")
        outputs, spec = pytree.tree_flatten(found)
        kept = (torch.Tensor, Enum, *_PLAIN)
        outputs = [one if isinstance(one, kept) else _Unjoined(self, type(one)) for one in outputs]
        given: dict[int, Any] = {id(tensor): Passed(place) for place, tensor in enumerate(tensors)}
        for at, one in enumerate(outputs):
            outputs[at] = given.get(id(one), one)
            if isinstance(one, torch.Tensor):
                given.setdefault(id(one), Repeated(at))
        return outputs, spec

    # What the module holds that has a gradient.

    def stand_in(self, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Have the module hold stand-ins for what has a graph or hooks of its own; return what gradients are of."""
        found = []
        for (tensor, places), value in zip(self.held, held, strict=True):
            if tensor.is_leaf and not tensor._backward_hooks:
                found.append(value)
                continue
            detached = value.detach()
            alias = nn.Parameter(detached) if isinstance(tensor, nn.Parameter) else detached.requires_grad_()
            for namespace, name in places:
                namespace[name] = alias
            found.append(alias)
        return found

    def _leave_out_replaced(self, aliases: Sequence[torch.Tensor]) -> None:
        """Hold no more what the forward itself replaces, as hooks that compute a weight do: nothing depends on it."""
        for at, ((tensor, places), alias) in enumerate(zip(self.held, aliases, strict=True)):
            if not tensor.is_leaf and all(namespace.get(name) is not alias for namespace, name in places):
                self.held[at] = (tensor.detach(), [])

    def put_back_held(self) -> None:
        """Have the module hold its own tensors again."""
        for tensor, places in self.held:
            if not tensor.is_leaf or tensor._backward_hooks:
                for namespace, name in places:
                    namespace[name] = tensor

    # Outputs.

    def joined(self, parts: list[list[Any]], sizes: list[int]) -> list[Any]:
        """Join the outputs of all micro-batches; the lists are emptied on the way, for what they hold is large.

        Raises:
            NotRowsError: an output has no row for each sample.
        """
        known = () if self.known is None else self.known.outputs
        is_known = len(known) == sum(isinstance(one, torch.Tensor) for one in parts[0])
        joined: list[Any] = []
        self.out_rows = []
        for at in range(len(parts[0])):
            column = [part[at] for part in parts]
            for part in parts:
                part[at] = None
            first = column[0]
            if not isinstance(first, torch.Tensor):
                if any(type(one) is not type(first) or one != first for one in column):
                    raise NotRowsError(self.module, "it returns numbers that differ between micro-batches")
                if isinstance(first, (int, float, complex)) and not isinstance(first, bool):
                    raise NotRowsError(self.module, _A_NUMBER)
                joined.append(first)
                continue
            if any(type(one) not in _TENSORS or one.layout is not torch.strided for one in column):
                raise NotRowsError(self.module, f"it returns a {type(first).__name__}")
            measured = known[len(self.out_rows)] if is_known else None
            rows = None if is_known and measured is None else joined_rows(column, sizes, measured)
            if rows is None and not self.needs_grad[at] and _are_equal(column):
                if self.split.checks is not None and bool((first == first.reshape(-1)[:1]).all()):
                    raise NotRowsError(self.module, _A_NUMBER)
                self.out_rows.append(None)  # of no sample, such as positions
                joined.append(first)
                continue
            # Of a sample by itself what has a row for each sample of the batch may be broadcast against that.
            is_grown = measured is not None and rows is not None and rows[1] != measured[1]
            if rows is None or (is_grown and rows[1] % self.split.num_samples == 0):
                raise NotRowsError(self.module, "an output has no row for each sample")
            self.out_rows.append(rows)
            joined.append(torch.cat(column, rows[0]))
        return joined

    # Random states and state.

    def random_state(self) -> Any:
        """Return all random states that a micro-batch may draw from."""
        return randomness.get_state(self.split.device), [(one, generator_state(one)) for one in self._generators]

    def _find_generators(self) -> list[Any]:
        given = [one for one in self._leaves if isinstance(one, torch.Generator)]
        values = [value for layer in self.layers for value in vars(layer).values() if isinstance(value, GENERATORS)]
        own = [value for value in values if is_generator(value)]
        return list({id(one): one for one in (*self.split.generators, *given, *own)}.values())

    def set_random(self, state: Any) -> None:
        """Put back what ``random_state`` returned."""
        randomness.set_state(state[0], self.split.device)
        for generator, value in state[1]:
            set_generator_state(generator, value)

    def begin_alike(self) -> None:
        """Put back the random states with which the first micro-batch began."""
        self.set_random(self.random[0])

    def again(self, index: int, tensors: Sequence[torch.Tensor]) -> Again:
        """Run a micro-batch again as it ran before, with a graph."""
        low, high = self.pieces[index]
        draws = self.split.draws
        now, place = self.random_state(), None if draws is None else draws.at()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype, cached in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cached))
            inputs = [
                cut(tensor, rows, low, high).detach().requires_grad_(need)
                for tensor, rows, need in zip(tensors, self.rows, self.needs_input_grad, strict=False)
            ]
            self.set_random(self.random[index])
            if draws is not None:
                draws.go(self.place, low, high)
            held = self.stand_in(tensors[len(self.tensors) :])
            try:
                outputs, spec = self.call(inputs)
            finally:
                self.set_random(now)
                if draws is not None:
                    draws.go(place, 0, self.split.num_samples)
        return Again(inputs, outputs, held, spec)

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Put the module back to how it was when it was called: modes, flags, adapters, weights in use."""
        now = Attributes(self.objects) if self.attributes.have_changed() else None
        if now is not None:
            self.attributes.restore()
        flags = [(one, one.requires_grad) for one, flag in self.flags if one.requires_grad is not flag]
        for one, flag in flags:
            one.requires_grad_(not flag)
        try:
            yield
        finally:
            for one, flag in flags:
                one.requires_grad_(flag)
            self.put_back_held()
            if now is not None:
                now.restore()


def draws_elsewhere(before: Any, after: Any) -> bool:
    """Return whether Python's or NumPy's generator, or one of the program's own, was drawn from."""
    if before[0][1] is not after[0][1] and before[0][1] != after[0][1]:
        return True
    if before[0][2] is not after[0][2] and str(before[0][2]) != str(after[0][2]):
        return True
    own = zip(before[1], after[1], strict=False)
    return any(not isinstance(one, torch.Generator) and str(then) != str(now) for (one, then), (_, now) in own)


def rows_of(shape: Sequence[int], num_samples: int, *, has_several: bool = True) -> Rows | None:
    """Return where samples lie in a tensor: one row of each in dim 0 or 1, or several in dim 0; None: in neither."""
    for dim in (0, 1):
        if dim < len(shape) and shape[dim] == num_samples:
            return dim, 1
    if has_several and shape and shape[0] and shape[0] % num_samples == 0:
        return 0, shape[0] // num_samples
    return None


def _is_exact(num_samples: int, shape: Sequence[int], rows: Rows | None) -> bool:
    """Return whether a dimension is just as long as was measured of so many samples."""
    return rows is None or (rows[0] < len(shape) and shape[rows[0]] == num_samples * rows[1])


def _num_with_rows(known: Known) -> int:
    return sum(rows is not None for rows in known.inputs)


def _note(value: Any, flags: list[str], numbers: list[str], depth: int) -> None:
    """Note what code may go by: a flag, a name, a function, a number, or those in a container."""
    kind = type(value)
    if kind in _NUMBERS or isinstance(value, np.number):
        numbers.append(str(value))
    elif kind in _FLAGS or isinstance(value, Enum) or (callable(value) and not isinstance(value, nn.Module | StandIn)):
        flags.append(_told(value))
    elif isinstance(value, torch.Tensor):
        numbers.append(_told_of_tensor(value))
    elif kind is np.ndarray and value.nbytes <= _SMALL_BYTES and value.dtype.kind in "biufc":
        numbers.append(value.tobytes().hex())
    elif isinstance(value, (*CONTAINERS, frozenset)) and depth < _DEEPEST and len(value) <= _SMALL_BYTES:
        if not isinstance(value, list | deque):  # the keys of a dict, or what is in a set
            flags.extend(sorted(map(_told, value)))
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list | deque) else ():
            _note(one, flags, numbers, depth + 1)


def _kind_of(tensor: torch.Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() else "complex" if tensor.is_complex() else "int"


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one number, to read which waits for nothing."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() == 1 and not tensor.requires_grad


def _told_of_tensor(tensor: torch.Tensor) -> str:
    return str(tensor.item()) if _is_number(tensor) else _zeros_of(tensor)


def _zeros_of(tensor: torch.Tensor) -> str:
    """Return which numbers of a small tensor are not 0: a closed gate hides how rows depend on each other."""
    is_small = tensor.is_cpu and tensor.layout is torch.strided and tensor.nbytes <= _SMALL_BYTES
    return str((tensor != 0).tolist()) if is_small and not tensor.requires_grad else ""


def _told(value: Any) -> str:
    """Return words for a value by which code may take another branch, the same in another process."""
    if isinstance(value, partial):
        return f"{_told(value.func)} {[_told(one) for one in (*value.args, *value.keywords.items())]}"
    if isinstance(value, tuple):
        return str([_told(one) for one in value])
    if isinstance(value, FunctionType) and value.__closure__:
        held = [contents_of(cell) for cell in value.__closure__]
        return f"{value.__module__}.{value.__qualname__} {[str(one) for one in held if isinstance(one, _PLAIN)]}"
    if callable(value):
        own = getattr(getattr(value, "__self__", value), "__dict__", {})
        # Numbers count only as 0 or not 0, because an object may count its calls.
        held = [str(one if type(one) in _FLAGS else one != 0) for one in own.values() if type(one) in _STATED]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)} {held}"
    # The words of other objects, such as a generator, hold their address.
    return str(value) if isinstance(value, (*_PLAIN, Enum)) else type(value).__qualname__


def _plain_lists(arguments: Any) -> Iterator[int]:
    """Yield the lengths of lists of plain values among arguments."""
    if isinstance(arguments, list | tuple) and arguments and all(isinstance(one, _PLAIN) for one in arguments):
        yield len(arguments)
    elif isinstance(arguments, list | tuple | dict):
        for one in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _plain_lists(one)


def rows_in(shape: Sequence[int], dim: int, num_samples: int) -> Rows | None:
    """Return the rows of each sample in a dimension that was measured to hold samples."""
    if dim < len(shape) and shape[dim] and shape[dim] % num_samples == 0:
        return dim, shape[dim] // num_samples
    return None


def joined_rows(parts: Sequence[torch.Tensor], sizes: Sequence[int], measured: Rows | None) -> Rows | None:
    """Return where samples lie in the outputs of micro-batches: the dim that grows with their sizes."""
    first = parts[0]
    dims = list(range(first.ndim)) if measured is None else [measured[0]]
    is_uneven = len(set(sizes)) > 1
    # Only sizes that differ tell a dimension of samples from another one of the same extent.
    for dim in dims if is_uneven else dims[:1]:
        shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(shapes) > 1 or dim >= first.ndim:
            continue
        extents = [part.shape[dim] for part in parts]
        if all(e and e % size == 0 for e, size in zip(extents, sizes, strict=True)):
            each = {e // size for e, size in zip(extents, sizes, strict=True)}
            if len(each) == 1:
                return dim, each.pop()
    return None


def cut(tensor: torch.Tensor, rows: Rows | None, low: int, high: int) -> torch.Tensor:
    """Return the rows of samples ``low`` to ``high``; all of a tensor that has no rows of samples."""
    return tensor if rows is None else tensor.narrow(rows[0], low * rows[1], (high - low) * rows[1])


def _are_same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(leaves) == len(others) and all(one is other for one, other in zip(leaves, others, strict=True))


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:])


Held = list[tuple[torch.Tensor, list[tuple[Any, str]]]]
"""Tensors that need gradients, each with the namespaces and names that it is found by."""


def held_by(module: nn.Module) -> Held:
    """Return the tensors with gradients that a module reaches by itself: parameters, buffers and attributes."""
    found: dict[int, tuple[torch.Tensor, list[tuple[Any, str]]]] = {}
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            namespaces: tuple[Any, ...] = (dict(part.named_parameters(recurse=False)),)
        else:
            namespaces = (part._parameters, part._buffers, vars(part))
        for namespace in namespaces:
            for name, value in namespace.items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    found.setdefault(id(value), (value, []))[1].append((namespace, name))
    return list(found.values())


_top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keep what a micro-batch saves for its backward out of the sight of hooks around the whole call."""
    # Taken off, and not covered by hooks that return what they are given: of an output that is saved these make a
    # cycle, which nothing frees where there is no backward.
    hooks = []
    while (top := _top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class _SplitCall(torch.autograd.Function):
    """The joined outputs of a call, as a function of its inputs and of what the module holds."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # What the module holds is kept by reference: a checkpoint around the call hands back copies of what is saved.
        ctx.save_for_backward(*tensors[: len(call.tensors)])
        call.needs_input_grad = [tensor.requires_grad for tensor in tensors[: len(call.tensors)]]
        outputs, call.outputs = tuple(call.outputs), []
        learnt = [need for need, is_tensor in zip(call.needs_grad, call.is_tensor, strict=True) if is_tensor]
        ctx.mark_non_differentiable(*[one for one, need in zip(outputs, learnt, strict=True) if not need])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        if call.was_moved():
            why = "an input, a buffer or a frozen parameter was changed after the call"
            raise call.split.refuse(NotRowsError(call.module, why))
        tensors = (*ctx.saved_tensors, *[one for one, _ in call.held])
        known = [at for at, gradient in enumerate(gradients) if gradient is not None]
        wanted = [at for at, need in enumerate(ctx.needs_input_grad[1:]) if need]
        full: list[torch.Tensor | None] = [None] * len(tensors)
        if known:
            given = [gradients[at] for at in known]
            if call.split.ranks is not None:
                found = _go_back_of_share(call, call.split.ranks, known, wanted, tensors, given)
            elif torch.is_grad_enabled():
                raise call.split.refuse(NotRowsError(call.module, _TWICE, is_deep=True))
            else:
                found = _go_back(call, known, wanted, tensors, given)
            for at, gradient in zip(wanted, found, strict=True):
                full[at] = gradient
        return None, *full


def _accumulates(tensor: torch.Tensor) -> bool:
    """Return whether the backward that is running adds to a parameter's ``.grad``, and nobody listens to that."""
    if not tensor.is_leaf:
        return True
    return not (tensor._post_accumulate_grad_hooks or tensor._backward_hooks) and _is_added_to(tensor)


def _is_added_to(tensor: torch.Tensor) -> bool:
    """Return whether the backward that is running adds to a parameter's ``.grad``."""
    try:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return False


def _go_back(
    call: Call,
    known: Sequence[int],
    wanted: Sequence[int],
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[Any],
) -> list[torch.Tensor | None]:
    """Run each micro-batch again, the last one first, and go back through it.

    Args:
        call: the call.
        known: the outputs, by their place, that ``gradients`` are of.
        wanted: the tensors, by their place, whose gradients are returned.
        tensors: inputs of the call, and what the module holds.
        gradients: of the outputs.
    """
    inputs = len(call.tensors)
    # Where parameters may get their gradient in ``.grad`` at once, no copy of all of them is needed.
    is_direct = all(_accumulates(tensors[at]) for at in wanted if at >= inputs)
    sums: dict[int, torch.Tensor] = {}
    with call.as_it_was():
        for index in reversed(range(len(call.pieces))):
            low, high = call.pieces[index]
            again = call.kept.pop(index, None) or call.again(index, tensors)
            outputs = [one for one in again.outputs if isinstance(one, torch.Tensor)]
            pairs = [
                (outputs[at], cut(gradient, call.out_rows[at], low, high))
                for at, gradient in zip(known, gradients, strict=True)
                if outputs[at].requires_grad
            ]
            leaves = [again.inputs[at] if at < inputs else again.held[at - inputs] for at in wanted]
            del again, outputs
            found = _gradient_of(call, pairs, leaves, is_direct=is_direct)
            del pairs
            for at, leaf, gradient in zip(wanted, leaves, found, strict=True):
                # What a parameter got is in its place already.
                if gradient is None or (is_direct and at >= inputs and leaf is tensors[at]):
                    continue
                if at < inputs and call.rows[at] is not None:
                    if at not in sums:
                        sums[at] = torch.zeros_like(tensors[at])
                    cut(sums[at], call.rows[at], low, high).add_(gradient)
                else:
                    sums[at] = gradient if at not in sums else sums[at] + gradient
            del found, leaves
    return [sums.get(at) for at in wanted]


def _go_back_of_share(
    call: Call,
    ranks: Ranks,
    known: Sequence[int],
    wanted: Sequence[int],
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[Any],
) -> list[torch.Tensor | None]:
    """Do the same for the rows of one rank of several.

    Each rank goes back from the same loss divided by their number. So what arrives here is multiplied by it; parameters
    get what this rank's rows add to their gradient, as in a window that is not joined, and the step's own code gets
    that of all rows, divided again.

    Raises:
        NotRowsError: more is asked of the gradient than that it is added to parameters.
    """
    inputs = len(call.tensors)
    summed = {at for at in wanted if at >= inputs and tensors[at].is_leaf}  # at the window's end
    if torch.is_grad_enabled() or not all(_is_added_to(tensors[at]) for at in summed):
        raise NotRowsError(call.module, "the step itself asks for its gradient", is_deep=True)
    found = _go_back(call, known, wanted, tensors, [g * ranks.size for g in gradients])
    like = {at: tensors[at] for at in wanted if at not in summed}
    own = {at: g for at, g in zip(wanted, found, strict=True) if at in like and g is not None}
    means = ranks.sum(own, like) if like else {}
    return [means.get(at) if at in like else g for at, g in zip(wanted, found, strict=True)]


def _gradient_of(
    call: Call, pairs: Sequence[tuple[torch.Tensor, Any]], leaves: Sequence[torch.Tensor], *, is_direct: bool
) -> list[torch.Tensor | None]:
    """Return the gradients of leaves, from (output, its gradient) of a micro-batch."""
    if not pairs:
        return [None] * len(leaves)
    roots, seeds = zip(*pairs, strict=True)
    if is_direct:
        torch.autograd.backward(roots, seeds)
        return [leaf.grad for leaf in leaves]
    try:
        return list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
    why = "a checkpoint with use_reentrant=True in it knows backward() alone"
    raise call.split.refuse(NotRowsError(call.module, why, is_deep=True))
