"""The optimizer: the default one, the user's, and its lazy state allocated before training needs the memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from autoaccum.errors import (
    ArgumentTypeError,
    ConflictingArgumentsError,
    ForeignOptimizerError,
    NoTrainableParametersError,
    OptimizerOutOfMemoryError,
)
from autoaccum.memory import Memory
from autoaccum.oom import is_out_of_memory

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trainable_parameters(model: object, modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that require a gradient, of the model and of a loss that is a module too.

    Raises:
        ArgumentTypeError: the model is no module, or is not built yet.
        NoTrainableParametersError: there are none.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", model, "a torch.nn.Module")
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    parameters = list(found.values())
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise ArgumentTypeError(
            "model",
            type(model).__name__,
            "a model whose lazy layers know their shapes",
            "Call it once on a batch: model(inputs).",
        )
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
    check_optimizer(made, parameters)
    if needs_closure(made):
        raise ArgumentTypeError(
            "optimizer",
            type(made).__name__,
            "an optimizer whose step needs no closure",
            "Take one that steps once on the gradient of the window (AdamW, SGD, Adafactor, ...), or step this one in "
            "a loop of your own, with autoaccum.Accumulator.",
        )
    return made  # type: ignore[no-any-return]


def check_optimizer(optimizer: object, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what is no optimizer, or one that would train nothing.

    Raises:
        ArgumentTypeError: it is no optimizer.
        ForeignOptimizerError: it holds none of the parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError("optimizer", optimizer, "a torch.optim.Optimizer, or a function (params) -> Optimizer")
    wanted = {id(p) for p in parameters}
    if not any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
        raise ForeignOptimizerError(optimizer)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step evaluates the loss itself, as that of LBFGS does."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(p.name == "closure" and p.default is p.empty for p in parameters)


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate now what PyTorch's optimizers allocate in their first step, so that it is in every measured peak.

    Their own ``_init_group`` does it: the part of a step that makes the missing state and reads the present one, before
    any arithmetic. It wants gradients, so parameters without one have zeros for the moment. SGD clones its first
    gradient instead; a buffer of zeros gives the same next value, 0 * momentum + gradient, unless it is dampened.

    Nothing is done to an optimizer that is not PyTorch's own, for nobody knows what its methods do.
    """
    is_pytorchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    if not is_pytorchs or not hasattr(optimizer, "_init_group"):
        return
    init_group = optimizer._init_group
    num_lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        without = [p for p in group["params"] if p.requires_grad and p.grad is None]
        try:
            for p in without:
                p.grad = torch.zeros_like(p)
            init_group(group, *([] for _ in range(num_lists)))
        finally:
            for p in without:
                p.grad = None
        if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.requires_grad and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


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
