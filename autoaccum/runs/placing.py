"""Puts tensors of a saved state where those of a run lie: parts of several ranks, whoever wrote them, or in one place.

What is no such state is handed on as it is, to whoever checks it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoaccum.errors import CheckpointCorruptError
from autoaccum.runs.parted import Parted, put


def placed(
    model: nn.Module, others: Sequence[nn.Module], optimizer: torch.optim.Optimizer, weights: Any, state: Any
) -> tuple[Any, Any]:
    """Return the weights and the state of a run with this rank's parts of what is distributed there.

    Raises:
        CheckpointCorruptError: a part is missing, or nothing is known of where it belongs.
    """
    found = of_module(model, weights)
    if not isinstance(state, dict):
        return found, state
    state = dict(state)
    modules = state.get("modules")
    if isinstance(modules, list) and len(modules) == len(others):
        state["modules"] = [
            {**saved, "state": of_module(module, saved.get("state"))} if isinstance(saved, dict) else saved
            for module, saved in zip(others, modules, strict=True)
        ]
    if "optimizer" in state:
        state["optimizer"] = _of_optimizer(optimizer, state["optimizer"])
    return found, state


def of_module(module: nn.Module, weights: Any) -> Any:
    """Return a module's weights with this rank's parts of what is distributed there.

    Raises:
        CheckpointCorruptError: a part is missing.
    """
    if not isinstance(weights, dict):
        return weights
    present, found = module.state_dict(), copy.copy(weights)
    made: dict[int, Any] = {}  # what is one tensor stays one
    for name, value in weights.items():
        if id(value) not in made:
            made[id(value)] = put(value, present.get(name))
        found[name] = made[id(value)]
    return found


def _of_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> Any:
    kept = state.get("state") if isinstance(state, dict) else None
    if not isinstance(kept, dict):
        return state
    # As a state_dict numbers them; a form of its own has other keys, and is left as it is.
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    found: dict[Any, Any] = dict(kept)
    for key, values in kept.items():
        p = parameters.get(key) if type(key) is int else None
        if p is None or not isinstance(values, dict):
            continue
        there = optimizer.state.get(p, {})
        found[key] = {}
        for name, value in values.items():
            # As the one that is there lies; before the first step there may be none, and most lie as the parameter.
            moment = put(value, p if there.get(name) is None else there[name])
            # Of a form of its own, of which no check knows that it is none of PyTorch's tensors.
            if isinstance(moment, Parted):
                problem = f"has the shape {tuple(moment.shape)}, not {tuple(p.shape)}"
                raise CheckpointCorruptError("", problem, entry=f"optimizer.state[{key}].{name}")
            found[key][name] = moment
    return {**state, "state": found}
