"""Tries at once whether a run could go on from its first checkpoint: it is loaded into copies, and compared."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch

from autoaccum.data import randomness
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory
from autoaccum.runs.checkpoint import Checkpoint
from autoaccum.runs.states import Packed, pack
from autoaccum.runs.tensor_files import as_bytes
from autoaccum.training.optimizer_attributes import OptimizerAttributes
from autoaccum.window.modules import State, with_wrapped
from autoaccum.window.optimizers import allocate_state, with_types_of

_TIMES = 4
"""Bytes that a trial takes, by those of the checkpoint: it is read, held beside two copies, and compared."""


def problem_of(run: Any, checkpoint: Checkpoint) -> str:
    """Return what would keep a later process from going on from a checkpoint; empty where nothing would.

    Nothing is tried where the host, or the device, has no room for copies, or where the model cannot be copied.

    Args:
        run: its ``RunState``.
        checkpoint: that was written of it.
    """
    host = CpuMemory()
    if _TIMES * sum(size for size, _ in checkpoint.files.values()) > host.limit() - host.used():
        return ""
    with randomness.preserved_randomness():
        found = attempt(lambda: _tried(run, checkpoint))
    return "" if isinstance(found, RanOut) else found


def _tried(run: Any, checkpoint: Checkpoint) -> str:
    try:
        copied = _copied(run)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return ""
    weights, state = checkpoint.load()
    state.pop("trained", None)
    try:
        copied.load_trained(*copied.placed(weights, state))
        found = _entries(*copied.trained())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}".partition(" Resume from another checkpoint")[0]
    for entry, saved in _entries(weights, state).items():
        if entry not in found or not _is_same(pack({}, saved), pack({}, found[entry])):
            return f"{entry} comes back as something else"
    return ""


def _entries(weights: State, state: State) -> dict[str, Any]:
    """Return what is compared."""
    found: dict[str, Any] = {f"the weight {name}": value for name, value in weights.items()}
    found |= {"buffers": state["buffers"], "modules": state["modules"]}
    for name, value in state.get("optimizer_attributes", {}).items():
        found[f"optimizer_attributes.{name}"] = value
    optimizer = state["optimizer"]
    kept = optimizer.get("state") if isinstance(optimizer, dict) else None
    for number, values in kept.items() if isinstance(kept, dict) else ():
        for name, value in values.items() if isinstance(values, dict) else (("", values),):
            found[f"optimizer.state[{number!r}].{name}".rstrip(".")] = value
    return found | {"optimizer": optimizer}


def _is_same(saved: Packed, found: Packed) -> bool:
    if saved.tree != found.tree or saved.others.keys() != found.others.keys():
        return False
    return all(_is_equal(tensor, found.others[name]) for name, tensor in saved.others.items())


def _is_equal(saved: torch.Tensor, found: torch.Tensor) -> bool:
    is_alike = saved.dtype == found.dtype and saved.shape == found.shape
    return is_alike and torch.equal(as_bytes(saved.cpu()), as_bytes(found.cpu()))


def _copied(run: Any) -> Any:
    """Return a run over copies of what is trained, whose optimizer has taken no step."""
    memo: dict[int, Any] = {}
    model, others = copy.deepcopy((run.model, run.others), memo)
    for made, module in zip((model, *others), (run.model, *run.others), strict=True):
        with_types_of(made.parameters(), module.parameters())
    optimizer = _copy_of(run.optimizer, memo)
    for path, one in with_wrapped(optimizer).items():
        # What steps have put there may be of the parameters that were copied: views by their addresses.
        vars(one).update(copy.deepcopy(run.optimizer_attributes.empty(path)))
    allocate_state(optimizer, [model, *others])
    attributes = OptimizerAttributes(optimizer, [model, *others])
    return replace(run, model=model, others=others, optimizer=optimizer, optimizer_attributes=attributes)


def _copy_of(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without its state: its own ``__getstate__`` would leave out its attributes."""
    wrapped = with_wrapped(optimizer).values()
    for one in wrapped:
        memo[id(one)], memo[id(one.state)] = object.__new__(type(one)), defaultdict(dict)
    for one in wrapped:
        # Where a scheduler has wrapped it, its step is a function over the optimizer itself.
        own = {name: value for name, value in vars(one).items() if name != "step"}
        vars(memo[id(one)]).update(copy.deepcopy(own, memo))
    return memo[id(optimizer)]  # type: ignore[no-any-return]
