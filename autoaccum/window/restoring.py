"""Checks the state of modules, of their optimizer and of the steps before it is put back: nothing is changed here."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoaccum._kinds import (
    MOST,
    Check,
    a,
    anything,
    below,
    by_name,
    entries,
    every,
    number,
    one_of,
    optional,
    parts,
    refuse,
    shown,
    whole,
)
from autoaccum.loss.hypotheses import WORDS
from autoaccum.loss.weighting import zero_gradient
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.saved import PLAN, TUNER
from autoaccum.ranks.units import is_distributed
from autoaccum.window.modules import State, buffer_places, load_optimizer, new_buffer_place
from autoaccum.window.optimizers import with_types_of

_SCALER = entries(
    {
        "scale": number(0),
        "growth_factor": number(0),
        "backoff_factor": number(0),
        # Both are kept in 32 bits.
        "growth_interval": whole(1, 2**31 - 1),
        "_growth_tracker": whole(0, 2**31 - 1),
    }
)
_SIGNS = entries(
    {
        "graphs": lambda value, entry: _check_graphs(value, entry),
        "modes": optional(every(a(bool))),
    }
)
_OCCASIONS = entries(
    {
        "status": one_of("unmeasured", "passed", "failed"),
        "surprises": whole(),
        "largest": whole(),
        "is_short_measured": a(bool),
        "next_round": whole(1),
        "next_look": whole(1),
        # Of measurements that came to nothing there may be any number.
        "tries": whole(-MOST),
    },
    optionally={"is_changed": a(bool), "next_joined": whole(1)},
)
_VERIFIED = entries(
    {
        "hypothesis": one_of(None, *WORDS),
        "signs": _SIGNS,
        "occasions": _OCCASIONS,
        "counts_samples": a(bool),
        "largest_joined": whole(),
        "is_owed": a(bool),
        "smallest": whole(1),
    }
)
_RUNNER = entries(
    {"_checked": a(bool), "_examining": a(bool), "_deferred": a(bool)},
    # Which came later.
    optionally={
        "verified": _VERIFIED,
        "attributes": by_name(anything),
        "by_name": a(bool),
        "outputs": a(bool),
        "counted": parts(number(), whole(1)),
        "arrivals": every(whole()),
        "comes_once": a(bool),
        "in_pieces": a(bool),
    },
)


_SAVING = entries(
    {
        # A name, the blocks, the bytes that are held and those that are computed twice.
        "rungs": every(parts(a(str), every(a(str)), whole(), whole())),
        "refused": every(a(str)),
        "left": by_name(whole()),
        "guards": a(bool),
        "wanted": every(whole()),
    },
    # Which came later: ways that were asked for; of each rung the bytes on the host, of saved tensors and of a state;
    # whether another rung is to be tried, and what the best so far took; whether each rung above has failed.
    optionally={
        "asked": every(one_of("checkpoint", "offload")),
        "elsewhere": every(parts(whole(), whole())),
        "contest": entries(
            {"is_open": a(bool), "above": optional(parts(number(0), whole(1), whole(-1)))},
            optionally={"beaten": whole(), "windows": whole()},
        ),
        "failed": every(a(bool)),
    },
)


_ROWS = optional(parts(whole(), whole(1)))
_JOINED = entries(
    {
        "reason": a(str),
        "layout": entries(
            {
                "opened": every(a(str)),
                "copied": every(a(str)),
                "rows": by_name(every(parts(every(_ROWS), every(_ROWS)))),
            }
        ),
        "rounds": whole(),
    }
)


def engine(*, has_scaler: bool | None) -> Check:
    """Return the check of the state of ``Step``, with that of a gradient scaler or without; None: either."""
    scaler = optional(_SCALER) if has_scaler is None else _SCALER if has_scaler else one_of(None)
    return entries(
        {
            "step": whole(),
            "announced": every(a(str)),
            "announced of windows": every(a(str)),
            "plan": PLAN,
            "runner": _RUNNER,
            "scaler": scaler,
            "tuner": TUNER,
        },
        optionally={"uncompiled": a(bool), "saving": _SAVING, "joined": _JOINED},
    )


def _check_graphs(value: Any, entry: str) -> None:
    """Check the marks of graphs by the samples of a micro-batch: nodes, root, terms."""
    a(dict)(value, entry)
    for size, marks in value.items():
        whole(1)(size, entry)
        parts(whole(), a(str), every(a(str), tuple))(marks, below(entry, size))


def check_like(value: Any, present: Any, entry: str) -> None:
    """Check that a value is of the kind of the one that it takes the place of.

    Numbers stand for each other, and are finite where the present one is. What is off in the present one, None or
    False, may be missing: options of a later PyTorch are.

    Raises:
        CheckpointCorruptError: it is of another kind.
    """
    if type(present) in (int, float):
        number(finite=math.isfinite(present), nan=math.isnan(present))(value, entry)
    elif isinstance(present, torch.Tensor):
        _check_tensor(value, present, entry)
    elif isinstance(present, Mapping):
        a(type(present))(value, entry)
        for name, item in present.items():
            if name in value:
                check_like(value[name], item, below(entry, name))
            elif item is not None and item is not False:
                refuse(below(entry, name), "is missing")
        for name in value.keys() - present.keys():
            _check_plain(value[name], below(entry, name))
    elif isinstance(present, list | tuple):
        a(type(present))(value, entry)
        if len(value) != len(present):
            refuse(entry, f"has {len(value)} entries, not {len(present)}")
        for index, (item, other) in enumerate(zip(value, present, strict=True)):
            check_like(item, other, f"{entry}[{index}]")
    elif present is None or isinstance(present, bool):  # an option is off as None and as False
        one_of(None, False, True)(value, entry)
    elif type(value) is not type(present):
        refuse(entry, f"is {shown(value)}, not such as {shown(present)}")


def _check_plain(value: Any, entry: str) -> None:
    """Check that an entry that nothing is known of is a plain value."""
    if value is not None and type(value) not in (bool, int, float, str):
        refuse(entry, f"is {shown(value)}, where there is nothing")


def _check_tensor(value: Any, present: torch.Tensor, entry: str, *, in_place: bool = False) -> None:
    """Check that a value is a tensor of the shape and type of the present one; lying in memory like it if asked."""
    if not isinstance(value, torch.Tensor):
        refuse(entry, f"is {shown(value)}, not a tensor")
    if value.shape != present.shape:
        refuse(entry, f"has the shape {tuple(value.shape)}, not {tuple(present.shape)}")
    if value.dtype != present.dtype:
        refuse(entry, f"is of {value.dtype}, not of {present.dtype}")
    # A dimension of one entry may have any stride. Fused kernels go through memory, whatever the order in it.
    if in_place and _layout(value) != _layout(present):
        refuse(entry, f"has the strides {value.stride()}, not {present.stride()}")


def check_tensors(present: Sequence[torch.Tensor], values: Any, entry: str) -> None:
    """Check what is to be put back into tensors that no module holds."""
    a(list)(values, entry)
    if len(values) != len(present):
        refuse(entry, f"has {len(values)} entries, not {len(present)}")
    for index, (tensor, value) in enumerate(zip(present, values, strict=True)):
        _check_tensor(value, tensor, f"{entry}[{index}]")


def _layout(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def check_module(module: nn.Module, weights: Any, buffers: Any, names: tuple[str, str]) -> None:
    """Check what ``load_modules`` is to put back into a module.

    A forward may have made, dropped or resized buffers of layers that are a user's own; PyTorch's keep theirs.

    Args:
        module: as it is now.
        weights: its state_dict, as it was saved.
        buffers: those that the state_dict leaves out.
        names: of the two in the state.

    Raises:
        CheckpointCorruptError: an entry is not such as the module can have.
    """
    of_weights, of_buffers = names
    named, places = module.state_dict(), buffer_places(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for value, entry in ((weights, of_weights), (buffers, of_buffers)):
        if not isinstance(value, dict):
            refuse(entry, f"is {shown(value)}, not a dict")
    for key, (layer, name) in places.items():
        is_left_out = name in layer._non_persistent_buffers_set
        saved, entry = (buffers, of_buffers) if is_left_out else (weights, of_weights)
        there = layer._buffers[name]
        if key in saved:
            _check_buffer(saved[key], there, layer, below(entry, key))
        elif there is not None and _is_of_torch(layer):
            refuse(below(entry, key), "is missing")
    for key in named.keys() - places.keys() - weights.keys():
        refuse(below(of_weights, key), "is missing")
    tied: dict[int, Any] = {}
    for key, value in weights.items():
        entry = below(of_weights, key)
        if key in parameters:
            _check_tensor(value, parameters[key], entry)
            other = tied.setdefault(id(parameters[key]), value)
            if value is not other and not torch.equal(value, other):
                refuse(entry, "differs from the weights that it is one with")
        elif key not in named and (key not in places or places[key][1] in places[key][0]._non_persistent_buffers_set):
            refuse(entry, "is nothing that the model has")
    for key, value in buffers.items():
        if key not in places:
            layer_of_new = new_buffer_place(module, key)
            if layer_of_new is None or _is_of_torch(layer_of_new[0]):
                refuse(below(of_buffers, key), "is nothing that the model has")
            _check_buffer(value, None, layer_of_new[0], below(of_buffers, key))
        elif places[key][1] not in places[key][0]._non_persistent_buffers_set:
            refuse(below(of_buffers, key), "is among the weights of the model")
    # The versions of layers, after the tensors, by which people know their model.
    check_like(getattr(weights, "_metadata", None), getattr(named, "_metadata", None), f"{of_weights}._metadata")


def _check_buffer(value: Any, there: torch.Tensor | None, layer: nn.Module, entry: str) -> None:
    if there is not None and _is_of_torch(layer):
        _check_tensor(value, there, entry)
    elif not isinstance(value, torch.Tensor):
        refuse(entry, f"is {shown(value)}, not a tensor")


def _is_of_torch(thing: object) -> bool:
    """Return whether an object is of a class of PyTorch's own: a layer, an optimizer, a scheduler."""
    return f"{type(thing).__module__}.".startswith(("torch.nn.", "torch.optim."))


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any, entry: str) -> None:
    """Check a state that ``load_optimizer`` is to put back.

    Where ``allocate_state`` has made the state, entries are compared with it. Of others that PyTorch's steps go by,
    tensors are as large as their parameter, or one number. What a step of a user's own keeps, nobody knows.

    Raises:
        CheckpointCorruptError: an entry is not such as the optimizer can have.
    """
    present = optimizer.state_dict()
    a(dict)(state, entry)
    for name in present:
        if name not in state:
            refuse(below(entry, name), "is missing")
    for name in state.keys() - present.keys():
        refuse(below(entry, name), "is no entry that there is")
    # A class of the user's own may write its state in a form of its own, a wrapper that of what it wraps.
    if not {"param_groups", "state"} <= present.keys():
        return
    groups, kept = state["param_groups"], state["state"]
    of_groups, of_state = below(entry, "param_groups"), below(entry, "state")
    is_known = inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim.")
    if is_known:
        check_like(groups, present["param_groups"], of_groups)
    else:
        _check_groups(groups, present["param_groups"], of_groups)
    for index, (group, now) in enumerate(zip(groups, present["param_groups"], strict=True)):
        if list(map(repr, group["params"])) != list(map(repr, now["params"])):
            refuse(f"{of_groups}[{index}].params", "are other parameters than there are")
    a(dict)(kept, of_state)
    parameters = {
        number: p
        for group, now in zip(optimizer.param_groups, present["param_groups"], strict=True)
        for p, number in zip(group["params"], now["params"], strict=True)
    }
    for number_of_p in present["state"].keys() - kept.keys():
        refuse(below(of_state, number_of_p), "is missing")
    seen: dict[int, str] = {}
    for key, values in kept.items():
        name = below(of_state, key)
        if type(key) is not int or key not in parameters:
            # PyTorch's optimizers keep nothing that is of no parameter; one of a user's own may, under a text.
            if is_known or type(key) is not str:
                refuse(name, "is of no parameter that there is")
        elif is_known:
            has_parts = not any("fused" in group for group in optimizer.param_groups)
            _check_state(values, present["state"].get(key), parameters[key], name, has_parts=has_parts)
            # One tensor in two places would be written to twice in each step.
            for of, value in values.items():
                is_large = isinstance(value, torch.Tensor) and value.numel() > 1
                if is_large and (other := seen.setdefault(id(value), below(name, of))) != below(name, of):
                    refuse(below(name, of), f"is the same tensor as {other}")
    if is_known and _is_of_torch(optimizer):
        _try_step(optimizer, state, entry)


def _check_groups(groups: Any, present: list[dict[str, Any]], entry: str) -> None:
    """Check the groups of a step of a user's own, which may keep in them whatever it counts or computes."""
    every(a(dict))(groups, entry)
    if len(groups) != len(present):
        refuse(entry, f"has {len(groups)} entries, not {len(present)}")
    for index, (group, now) in enumerate(zip(groups, present, strict=True)):
        for name in now.keys() - group.keys():
            if now[name] is not None and now[name] is not False:
                refuse(below(f"{entry}[{index}]", name), "is missing")
        # Ours to scale and to report.
        if "lr" in group and now.get("lr") is not None:
            check_like(group["lr"], now["lr"], f"{entry}[{index}].lr")


def _check_state(
    values: Any, present: Mapping[str, Any] | None, p: torch.Tensor, entry: str, *, has_parts: bool
) -> None:
    """Check what is kept of one parameter; ``has_parts``: it may be of the parameter's rows or columns."""
    a(dict)(values, entry)
    for name in (present or {}).keys() - values.keys():
        refuse(below(entry, name), "is missing")
    for name, value in values.items():
        there = (present or {}).get(name)
        below_it = below(entry, name)
        if isinstance(there, torch.Tensor):
            _check_tensor(value, there, below_it, in_place=True)
        elif there is not None:
            check_like(value, there, below_it)
        elif isinstance(value, torch.Tensor):
            # Rows and columns alone are kept by optimizers without a fused kernel, which would read past their end.
            is_part = (
                has_parts
                and value.dim() == p.dim()
                and all(s in (1, n) for s, n in zip(value.shape, p.shape, strict=True))
            )
            is_sound = (value.shape == p.shape or is_part) and value.dtype in (p.dtype, torch.float32)
            if value.numel() > 1 and not is_sound:
                refuse(below_it, f"has the shape {tuple(value.shape)} of {value.dtype}, not {tuple(p.shape)}")
        else:
            optional(number())(value, below_it)
        if name == "step":
            count = float(value)
            if not (0 <= count < math.inf and count == int(count)):
                refuse(below_it, f"is {count}, not a number of steps")


def _try_step(optimizer: torch.optim.Optimizer, state: State, entry: str) -> None:
    """Take a step with these options and counts on parameters of one number each, that nobody needs.

    The constructor has bounds for options, and a step's own arithmetic fails on what no bound is known for.

    Raises:
        CheckpointCorruptError: the constructor refuses the options, or the step fails.
    """
    names = inspect.signature(type(optimizer)).parameters
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        tiny = [nn.Parameter(_tiny(p), requires_grad=p.requires_grad) for p in group["params"]]
        with_types_of(tiny, group["params"])
        options = {name: _own(value) for name, value in saved.items() if name != "params"}
        kept = {}
        for number_of_tiny, number_of_p in enumerate(saved["params"]):
            values = state["state"].get(number_of_p, {})
            if values:
                kept[number_of_tiny] = {name: _tiny_state(value) for name, value in values.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tried = type(optimizer)(tiny, **{name: value for name, value in options.items() if name in names})
                numbers = list(range(len(tiny)))
                load_optimizer(tried, {"state": kept, "param_groups": [{**options, "params": numbers}]})
                for p in tiny:
                    if p.requires_grad:
                        zeros = zero_gradient(p)
                        p.grad = zeros.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else zeros
                tried.step()
                now = tried.param_groups[0]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            refuse(f"{entry}.param_groups[{index}]", f"is none that {type(optimizer).__name__} can step by ({error!r})")
        for name, value in options.items():
            if repr(now[name]) != repr(value):  # AdamW without its own kind of weight decay is none
                refuse(
                    f"{entry}.param_groups[{index}].{name}", f"is {shown(value)}, where it can be {shown(now[name])}"
                )


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tiny(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _tiny_state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.numel() == 1 and not is_distributed(value) else _tiny(value)
    return value


def check_modules(modules: Sequence[nn.Module], states: Any, entry: str) -> None:
    """Check what ``load_modules`` is to put back into modules beside the model."""
    every(entries({"state": anything, "buffers": anything}))(states, entry)
    if len(states) != len(modules):
        refuse(entry, f"has {len(states)} entries, not {len(modules)}")
    for index, (module, state) in enumerate(zip(modules, states, strict=True)):
        names = (f"{entry}[{index}].state", f"{entry}[{index}].buffers")
        check_module(module, state["state"], state["buffers"], names)
