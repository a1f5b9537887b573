"""The optimizer: the default one, the user's, and its lazy state allocated before training needs the memory."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from autoaccum.distributed.gradients import type_of_gradient, zero_gradient
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    ForeignOptimizerError,
    NoTrainableParametersError,
)
from autoaccum.step.loss_graph import HALVES
from autoaccum.step.python_state import Attributes, surroundings_of

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""An optimizer, or a function (params) -> optimizer."""

# Parameters whose gradients' type was chosen here, and not by the user.
_chosen: Any = WeakTensorKeyDictionary()
# Optimizers that step on such types.
_served: WeakSet[torch.optim.Optimizer] = WeakSet()


def trainable_parameters(model: object, modules: Sequence[nn.Module], optimizer: object = None) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, of the model and of a loss that is a module too.

    There may be none where the optimizer, if there is one already, holds something of its own to train.

    Raises:
        ArgumentTypeError: the model is no module.
        NoTrainableParametersError: there are none, and no optimizer has anything else.
        ArgumentError: they hold no numbers, or no shapes.
    """
    if isinstance(model, type):
        cure = f"It is the class and not an instance: make one, {model.__name__}(...)."
        raise ArgumentTypeError("model", model.__name__, "a torch.nn.Module", cure)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", type(model).__name__, "a torch.nn.Module", "It is the first argument.")
    # By id: a loss may share parameters with the model, and an optimizer refuses one that it is given twice.
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    parameters = list(found.values())
    if not parameters and not any(tensor.requires_grad for tensor in bare_tensors(optimizer, modules)):
        raise NoTrainableParametersError(model)
    if any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers())):
        cure = "Call its to_empty(device='cpu') and initialise it, or load a state_dict with assign=True."
        raise ArgumentError("model", type(model).__name__, "a model that is not on the meta device", cure)
    refuse_lazy(model, (tensor for module in modules for tensor in (*module.parameters(), *module.buffers())))
    return parameters


def refuse_lazy(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a model with layers that learn their shapes from the first batch (``nn.LazyLinear``).

    Raises:
        ArgumentError: one of its tensors has no shape.
    """
    if any(map(is_lazy, tensors)):
        cure = "Call it once on a batch: model(inputs)."
        raise ArgumentError("model", type(model).__name__, "a model whose lazy layers know their shapes", cure)


def bare_tensors(optimizer: object, modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return what an optimizer holds and no module does, in its order: a learnt temperature that is a tensor, say."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return []
    of_modules = {id(p) for module in modules for p in module.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in of_modules]


def move(modules: Sequence[nn.Module], optimizer: object, device: torch.device) -> None:
    """Move modules to a device, and what else an optimizer trains if there is one already.

    Raises:
        ArgumentError: the optimizer holds parameters that are none of the modules' any more.
    """
    bare = bare_tensors(optimizer, modules)
    before = {id(p): p for module in modules for p in module.parameters()}
    for module in modules:
        module.to(device)
    # In place, as most parameters are: the function that computes with them goes on holding them.
    for tensor in bare:
        tensor.data = tensor.data.to(device)
    # Of some, tensors of other types say, Module.to makes new ones: whoever holds the old ones trains nothing.
    if isinstance(optimizer, torch.optim.Optimizer):
        now = {id(p) for module in modules for p in module.parameters()}
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if any(key in before and key not in now for key in held):
            cure = f"Moving the model to {device} made new parameters, which this one does not hold."
            raise ArgumentError("optimizer", type(optimizer).__name__, "a function (params) -> Optimizer", cure)


def make_optimizer(
    optimizer: OptimizerLike | None,
    lr: float | None,
    parameters: list[nn.Parameter],
    functions: Sequence[object] = (),
) -> torch.optim.Optimizer:
    """Return the user's optimizer, or AdamW: fused where PyTorch has it, which is fast and allocates nothing in a step.

    Args:
        optimizer: the user's, or what makes it; None for AdamW.
        lr: the learning rate of AdamW; None for 1e-3.
        parameters: those to train.
        functions: of the user's, which may hold tensors to train too.

    Raises:
        ConflictingArgumentsError: ``lr`` beside an optimizer, which has its own.
        ForeignOptimizerError: the optimizer holds none of the parameters.
        ArgumentTypeError: it is no optimizer.
    """
    if optimizer is None:
        found = _adamw(parameters, 1e-3 if lr is None else lr)
        _choose_types(found)
        return found
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
    check_optimizer(made, parameters, "a torch.optim.Optimizer, or a function (params) -> Optimizer", functions)
    if needs_closure(made):
        raise refuse_closure(made)
    return made  # type: ignore[no-any-return]


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    # The fused kernel takes no complex parameters, which it says only in a step.
    if all(p.is_floating_point() for p in parameters):
        try:
            return torch.optim.AdamW(parameters, lr=lr, fused=True)
        except RuntimeError:  # a device without the kernel
            pass
    return torch.optim.AdamW(parameters, lr=lr)


def check_optimizer(
    optimizer: object,
    parameters: Sequence[nn.Parameter],
    accepted: str = "an optimizer: AdamW(model.parameters())",
    functions: Sequence[object] = (),
) -> None:
    """Refuse what is no optimizer, or one that would train nothing; choose the types of its gradients.

    Args:
        optimizer: what was passed, or made.
        parameters: those to train, of which it has to hold one at least: others may be frozen on purpose.
        accepted: what to pass instead, for the error.
        functions: of the user's: what these hold may be trained too.

    Raises:
        ArgumentTypeError: it is no optimizer.
        ForeignOptimizerError: it holds none of the parameters, nor anything else that is trained here.
        ArgumentError: it steps on something else than gradients, or cannot on those of the type that is asked for.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError("optimizer", optimizer, accepted)
    refuse_other_gradients(optimizer)
    _choose_types(optimizer)
    wanted = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(p) in wanted for p in held):
        return
    # Parameters are made by modules, and those of no module that is known here may be another model's. A tensor that
    # is none, and requires a gradient, somebody has made to train it.
    known = {id(tensor) for tensor in surroundings_of(functions).tensors}
    if not any(p.requires_grad and (id(p) in known or not isinstance(p, nn.Parameter)) for p in held):
        raise ForeignOptimizerError(optimizer)


def _choose_types(optimizer: torch.optim.Optimizer) -> None:
    """Have gradients of parameters of 16 bits summed in float32 where an optimizer of PyTorch's can step on these.

    Raises:
        ArgumentError: it cannot step on the type that a parameter's ``grad_dtype`` asks for.
    """
    give_types_back(optimizer)  # as a run before has chosen them, by what its own optimizer can do
    _served.add(optimizer)
    if not is_pytorchs(optimizer):
        return
    # Another Accumulator's may step on the same parameters: they have one type for both.
    others = [one for one in _served if one is not optimizer]
    refusing = {id(p) for one in others for p in _refused(one, torch.float32)}
    for group in optimizer.param_groups:
        refusals: dict[tuple[torch.dtype, torch.dtype], Exception | None] = {}
        for p in group["params"]:
            own, asked = p.dtype, type_of_gradient(p)
            # Not of a subclass, a sharded parameter's: whoever gives it its gradient has chosen a type.
            is_free = own is asked and own in HALVES and type(p) in (nn.Parameter, torch.Tensor)
            is_free &= id(p) not in refusing
            wanted = torch.float32 if is_free and hasattr(p, "grad_dtype") else asked
            if wanted is own:
                continue
            if (own, wanted) not in refusals:
                refusals[own, wanted] = _refusal(type(optimizer), group, p, wanted)
            refusal = refusals[own, wanted]
            if refusal is not None and wanted is asked:
                accepted = (
                    f"one that steps on gradients of {asked} for parameters of {own}, as SGD, Adagrad and RMSprop do"
                )
                cure = f"Or leave the parameters' grad_dtype as it is. ({str(refusal).partition(chr(10))[0]})"
                raise ArgumentError("optimizer", type(optimizer).__name__, accepted, cure)
            if refusal is None and wanted is not asked:
                _set_type(p, wanted)
                _chosen[p] = None


def _refused(optimizer: torch.optim.Optimizer, of_gradient: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the parameters of 16 bits on whose gradients of another type an optimizer cannot step, or may not."""
    for group in optimizer.param_groups:
        for own in HALVES:
            held = [p for p in group["params"] if p.dtype is own]
            if held and not (is_pytorchs(optimizer) and _refusal(type(optimizer), group, held[0], of_gradient) is None):
                yield from held


def give_types_back(optimizer: torch.optim.Optimizer) -> None:
    """Let parameters have gradients of their own type again, where another was chosen here."""
    _served.discard(optimizer)
    for p in [p for group in optimizer.param_groups for p in group["params"] if p in _chosen]:
        _set_type(p, p.dtype)
        del _chosen[p]


def _set_type(p: torch.Tensor, of_gradient: torch.dtype) -> None:
    gradient, p.grad = p.grad, None
    p.grad_dtype = of_gradient
    p.grad = None if gradient is None else gradient.to(of_gradient)


def _refusal(kind: Any, group: dict[str, Any], p: torch.Tensor, of_gradient: torch.dtype) -> Exception | None:
    """Return the error of an optimizer of a kind that steps, as a group of another does, on gradients of a type."""
    # Computed also where all else is fake, and without the hooks that all optimizers' steps have.
    with unset_fake_temporarily(), torch.no_grad():
        tiny = nn.Parameter(torch.zeros(1, 1, dtype=p.dtype, device=p.device))
        tiny.grad_dtype = of_gradient
        tiny.grad = torch.ones_like(tiny, dtype=of_gradient)
        try:
            inspect.unwrap(kind.step)(kind([{**group, "params": [tiny]}]))
        except Exception as error:
            return error
    return None


def refuse_other_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that steps on something that a backward leaves on parameters beside ``.grad``.

    It is told by an attribute of parameters that is named after gradients, and that the optimizer's code reads.

    Raises:
        ArgumentError: it does.
    """
    if is_pytorchs(optimizer):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = {name: value for p in parameters for name, value in vars(p).items() if "grad" in name}
    named = {name for name, value in held.items() if value is None or isinstance(value, torch.Tensor | list)}
    if not named or not (read := sorted(named & words_of(optimizer))):
        return
    cure = (
        f"It reads p.{read[0]} of its parameters, which autoaccum neither weighs nor adds up. Step it in a loop of "
        f"your own; for Opacus, opacus.utils.batch_memory_manager.BatchMemoryManager splits batches of any size."
    )
    raise ArgumentError("optimizer", type(optimizer).__name__, "an optimizer that steps on .grad", cure)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step cannot be called without a closure, as that of LBFGS."""
    # Nearly every step has the argument; those that can do without it have a default.
    return any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in _arguments_of_step(optimizer))


def may_need_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its step can be called without a closure, and may still refuse to do without one.

    No optimizer of PyTorch's own does. Of others a default says little, for ``Optimizer.step`` has it.
    """
    return not is_pytorchs(optimizer) and bool(_arguments_of_step(optimizer)) and not needs_closure(optimizer)


def refuse_closure(optimizer: torch.optim.Optimizer) -> ArgumentTypeError:
    """Return the error for an optimizer that needs a closure where there is none to give."""
    return ArgumentTypeError(
        "optimizer",
        type(optimizer).__name__,
        "an optimizer whose step needs no closure",
        "Take one that steps once on the gradient of the window (AdamW, SGD, Adafactor, ...), or step this one in "
        "a loop of your own, with autoaccum.Accumulator.",
    )


def refuse_graphs(optimizer: torch.optim.Optimizer) -> ArgumentError:
    """Return the error for an optimizer that differentiates gradients."""
    return ArgumentError(
        "optimizer",
        type(optimizer).__name__,
        "an optimizer that needs no backward(create_graph=True)",
        "It differentiates gradients, and autoaccum accumulates them without a graph. Take a first-order one (AdamW, "
        "SGD, Adafactor, ...), or step this one in a loop of your own.",
    )


def _arguments_of_step(optimizer: torch.optim.Optimizer) -> list[inspect.Parameter]:
    """Return what its step can be called with: of one that a scheduler has wrapped, ``self`` is seen too."""
    found = inspect.signature(optimizer.step).parameters.values()
    return [p for p in found if p.name != "self" and p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]


def words_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the names and the texts in the code of an optimizer that is not PyTorch's own, and of what it calls."""
    found: set[str] = set()
    seen: set[int] = set()
    wrapped = [one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)]
    classes = {kind: None for one in (optimizer, *wrapped) for kind in type(one).__mro__}
    waiting: list[Any] = [value for kind in classes if not _is_of_a_tool(kind) for value in vars(kind).values()]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, property):
            waiting += [thing.fget, thing.fset]
            continue
        thing = inspect.unwrap(getattr(thing, "__func__", thing)) if callable(thing) else thing
        code = thing if isinstance(thing, CodeType) else getattr(thing, "__code__", None)
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        found |= {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        # Functions that it calls by a global name, or by that of a module.
        named = [getattr(thing, "__globals__", {}).get(name) for name in code.co_names]
        of_modules = [
            getattr(one, name, None) for one in named if isinstance(one, ModuleType) for name in code.co_names
        ]
        waiting += [one for one in (*named, *of_modules) if isinstance(one, FunctionType) and not _is_of_a_tool(one)]
    return frozenset(found)


def _is_of_a_tool(thing: Any) -> bool:
    return f"{thing.__module__}".partition(".")[0] in {"builtins", "torch", "numpy", *sys.stdlib_module_names} - {
        "__main__"
    }


def allocate_state(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module] = ()) -> None:
    """Allocate now what PyTorch's optimizers allocate in their first step, so that it is in every measured peak.

    All of it or, when memory runs out, none: a state that is half there would fail the next step.

    Nothing is done to an optimizer that is not PyTorch's own, for nobody knows what its methods do; and nothing for
    parameters of ``modules`` whose gradients are sparse, but for SparseAdam's: their state is made of the gradient.
    """
    if not is_pytorchs(optimizer):
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
                    optimizer.state[p]["momentum_buffer"] = zero_gradient(p)
        # SparseAdam makes its state in the midst of its step: the same is made here. It is dense.
        if type(optimizer) is torch.optim.SparseAdam:
            for p in trained:
                if not optimizer.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": 0, **moments}


def with_types_of(copies: Iterable[torch.Tensor], originals: Iterable[torch.Tensor]) -> None:
    """Have copies of parameters ask for gradients of the same types, which ``copy.deepcopy`` forgets."""
    for copy, p in zip(copies, originals, strict=True):
        if type_of_gradient(p) is not type_of_gradient(copy):
            copy.grad_dtype = type_of_gradient(p)


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
            p.grad = zero_gradient(p)
        init_group(group, *([] for _ in range(num_lists)))
    finally:
        for p in without:
            p.grad = None


def sparsely_trained(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the parameters whose gradients are sparse, as far as modules say so."""
    layers = (layer for module in modules for layer in module.modules())
    return [m.weight for m in layers if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]


def is_pytorchs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of PyTorch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")
