"""The optimizer: the default one, the user's, and its lazy state allocated before training needs the memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.errors import (
    ArgumentTypeError,
    ConflictingArgumentsError,
    ForeignOptimizerError,
    NoTrainableParametersError,
    OptimizerOutOfMemoryError,
)
from autoaccum.memory.base import Memory
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.window.attributes import Attributes

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trainable_parameters(model: object, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that require a gradient, of the model and of a loss that is a module too.

    Raises:
        ArgumentTypeError: the model is no module.
        NoTrainableParametersError: there are none.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", type(model).__name__, "a torch.nn.Module", "It comes first, the data second.")
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    parameters = list(found.values())
    if not parameters:
        raise NoTrainableParametersError(model)
    return parameters


def make_optimizer(
    optimizer: OptimizerLike | None, lr: float | None, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The user's optimizer, or AdamW: fused where PyTorch has it, which is fast and allocates nothing in its step.

    Raises:
        ConflictingArgumentsError: ``lr`` beside an optimizer, which has its own.
        ForeignOptimizerError: the optimizer holds none of the parameters.
        ArgumentTypeError: it is no optimizer.
    """
    if optimizer is None:
        lr = 1e-3 if lr is None else lr
        if all(p.is_floating_point() for p in parameters):
            try:
                return torch.optim.AdamW(parameters, lr=lr, fused=True)
            except RuntimeError:  # a device without the kernel
                pass
        return torch.optim.AdamW(parameters, lr=lr)
    if lr is not None:
        raise ConflictingArgumentsError("lr", lr, "optimizer", "Set the learning rate where the optimizer is made.")
    made: Any = (
        optimizer if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer) else optimizer(parameters)
    )
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
    """Whether its step evaluates the loss itself, as that of LBFGS does."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


def allocate_state(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module] = ()) -> None:
    """Allocate now what PyTorch's optimizers allocate in their first step, so that it is in every measured peak.

    All of it or, when memory runs out, none: a state that is half there would fail the next step.

    Nothing is done to an optimizer that is not PyTorch's own, for nobody knows what its methods do; and nothing for
    parameters of ``modules`` whose gradients are sparse, but for SparseAdam's: their state is made of the gradient.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return
    before = Attributes([optimizer])
    try:
        _allocate(optimizer, {id(p) for p in sparsely_trained(modules)})
    except BaseException:
        before.restore()
        raise


@torch.no_grad()
def _allocate(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """By the optimizer's own ``_init_group`` where there is one.

    It is the part of a step that makes the missing state and reads the present one, before any arithmetic. It wants
    gradients, so parameters without one have zeros for the moment. SGD clones its first gradient instead; a buffer of
    zeros gives the same next value, 0 * momentum + gradient, unless it is dampened, or the gradient sparse and its
    clone small. SparseAdam has no such part.
    """
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        if hasattr(optimizer, "_init_group"):
            init_group = optimizer._init_group
            without = [p for p in trained if p.grad is None and id(p) not in sparse]
            try:
                for p in without:
                    p.grad = torch.zeros_like(p)
                init_group(group, *([] for _ in range(len(inspect.signature(init_group).parameters) - 1)))
            finally:
                for p in without:
                    p.grad = None
        if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
            for p in trained:
                if id(p) not in sparse and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        if type(optimizer) is torch.optim.SparseAdam:
            for p in trained:
                if not optimizer.state[p]:
                    moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[p] = {"step": 0, **moments}


def sparsely_trained(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The parameters whose gradients are sparse, as far as modules say so."""
    layers = (layer for module in modules for layer in module.modules())
    return [m.weight for m in layers if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]


def take_step(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    step: int,
    memory: Memory,
    limit_bytes: int,
    closure: Callable[[], Any] | None = None,
) -> str | None:
    """One step on gradients that are unscaled already, or on a closure's; returns why it was left out, if it was.

    Raises:
        OptimizerOutOfMemoryError: memory ran out, perhaps half-way through the parameters.
    """
    try:
        if closure is not None:
            optimizer.step(closure)
            return None
        if scaler is None:
            optimizer.step()
            return None
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped = scaler.get_scale() < scale
        return f"the float16 gradient overflowed at a loss scale of {scale:g}" if skipped else None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    raise OptimizerOutOfMemoryError(
        optimizer=type(optimizer).__name__, step=step, peak_bytes=memory.peak(), limit_bytes=limit_bytes
    )
