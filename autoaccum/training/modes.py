"""Optimizers with modes, ``train()`` and ``eval()``: they step on other weights than those that they are about."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autoaccum.errors import ArgumentError
from autoaccum.memory.oom import insist
from autoaccum.ranks.units import units_of

_EVALUATING: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those that were put into their mode for evaluation."""


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the model is to be evaluated after ``optimizer.eval()`` alone, as of schedule-free ones."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def refuse_sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has modes, over a model of which no rank has all.

    Raises:
        ArgumentError: it is one.
    """
    if has_modes(optimizer) and units_of(model):
        cure = "Its checkpoints would need two sets of weights: take another optimizer, or do not call fully_shard."
        raise ArgumentError("optimizer", type(optimizer).__name__, "one without train() and eval()", cure)


def into_training(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer that has modes into that for training.

    Raises:
        ArgumentError: it only hands on its train(), to an optimizer that has none.
    """
    if has_modes(optimizer):
        try:
            optimizer.train()  # type: ignore[attr-defined]
        except AttributeError as error:
            cure = f"It raised {error!r}. Have it wrap one with train() and eval(), or step it in a loop of your own."
            raise ArgumentError(
                "optimizer", type(optimizer).__name__, "one whose train() can be called", cure
            ) from error
        _EVALUATING.discard(optimizer)


def into_evaluation(optimizer: torch.optim.Optimizer) -> None:
    """Put an optimizer that has modes into that for evaluation, for good: the model has the weights that count."""
    if has_modes(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]
        _EVALUATING.add(optimizer)


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the model use the weights that the optimizer is about; those that it steps on are put back, to the bit."""
    if not has_modes(optimizer) or optimizer in _EVALUATING:
        yield
        return
    # Modes change weights by arithmetic, there and back, which rounds.
    parameters = parameters_of(optimizer)
    kept = insist(partial(_on_host, parameters), "the weights that an optimizer steps on were copied to the host")
    try:
        into_evaluation(optimizer)
        yield
    finally:
        into_training(optimizer)
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                insist(partial(p.copy_, value), "the weights that an optimizer steps on were put back")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def evaluated_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a model's state_dict with the weights that the optimizer is about: copies on the host, if it has modes."""
    if not has_modes(optimizer) or optimizer in _EVALUATING:
        return model.state_dict()
    with evaluating(optimizer):
        found: dict[str, Any] = model.state_dict(keep_vars=True)
        copies: dict[int, Any] = {}  # what is tied stays so
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and id(value) not in copies:
                copies[id(value)] = insist(partial(_on_host, [value]), "weights were copied to the host")[0]
            found[name] = copies.get(id(value), value)
    return found


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
