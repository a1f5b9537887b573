"""What past runs have told of a run like this one: by a key of what decides memory."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.memory.devices import memory_of
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.costs import Trial
from autoaccum.planning.limits import SURELY_MORE
from autoaccum.planning.tuner import Tuner
from autoaccum.runs.past import FORMAT, Past

# By directory and key, what ran out of memory in this process, and with how many bytes of room for it. In a file it
# would outlive its reasons: what else was on the device then, and how memory was fragmented.
_refused: dict[tuple[Path, str], tuple[Trial, int]] = {}
# Texts of objects have their addresses in them, which differ from process to process.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class PastOfRun:
    """What one run takes from the files of ``Past``, and what it leaves there for later runs of the same cost."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, device: torch.device, **facts: Any
    ) -> None:
        """Prepare for a run of these; ``facts`` are the other arguments of ``key_of`` but the batch."""
        self._past = Past()
        # The key is known once there is a first window; as long as it is None, nothing is recalled or kept.
        self._key: str | None = None
        self._key_of = partial(key_of, modules, optimizer, device=device, **facts)
        self._optimizer = optimizer

    def recall(self, window: Window, tuner: Tuner, used_bytes: int) -> None:
        """Let a tuner begin from what was kept, if anything.

        The shapes are those of the first window, for data need not bear to be read beside the pass that trains.

        Args:
            window: the run's first.
            tuner: of the run, before its first trial.
            used_bytes: in use now, before the first sample.
        """
        try:
            example = window.micro_batch(0, min(tuner.smallest, window.num_samples))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        try:
            self._key = self._key_of(batch=example, differ_in_length=window.lengths is not None)
        except Exception:  # code of others is asked what it is, and no answer of it may end the run
            return
        # The gradients are not there yet, and every peak that was measured has them in it.
        gradient_bytes = sum(p.nbytes for group in self._optimizer.param_groups for p in group["params"])
        self._used_bytes = used_bytes
        refused, room_bytes = _refused.get((self._past.where, self._key), (None, 0))
        # What failed is tried again once there is clearly more room for it than there was.
        has_no_more_room = tuner.limits.limit_bytes - used_bytes < SURELY_MORE * room_bytes
        past, limit_bytes = self._past.load(self._key)
        tuner.recall(past, used_bytes + gradient_bytes, refused if has_no_more_room else None, limit_bytes)

    def keep(self, tuner: Tuner) -> None:
        """Keep for later runs what was measured; and for those of this process, what failed with so much memory."""
        if self._key is None:
            return
        measured = [trial for trial in tuner.learnt() if trial.peak_bytes is not None]
        if measured:  # else what is there stays, untouched
            self._past.save(self._key, [*tuner.past, *measured], limit_bytes=tuner.limits.limit_bytes)
        refused = tuner.refused()
        if refused is not None and refused != tuner.told:
            _refused[self._past.where, self._key] = refused, tuner.refused_at - self._used_bytes
        elif refused is None and tuner.told is not None:  # it has fitted after all
            _refused.pop((self._past.where, self._key), None)


def key_of(
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    precision: str,
    batch: Any,
    device: torch.device,
    compiled: bool,
    differ_in_length: bool = False,
    functions: Iterable[Callable[..., Any] | None] = (),
) -> str:
    """Return a digest of 32 hexadecimal digits, the same in every process.

    Weights, the learning rate, the seed and the limit do not count, nor does the code of functions. A key that is the
    same for other costs costs a failed trial at most: what is recalled is tried before it is believed.

    Args:
        modules: the model, and the loss if it is one too; built, and in the modes that they train in.
        optimizer: over their parameters.
        precision: of forwards.
        batch: any pytree; of its rows only the shape of one sample counts.
        device: where to compute.
        compiled: whether the model runs through torch.compile.
        differ_in_length: whether samples do, so that their shapes do not count.
        functions: what computes the loss; of one that is no module the name counts.
    """
    leaves, structure = batches.flatten(batch)
    facts = {
        "format": FORMAT,
        "torch": torch.__version__,
        "modules": [_module(module) for module in modules],
        "functions": [None if function is None else _name(function) for function in functions],
        "optimizer": [_name(type(optimizer)), *(_group(group) for group in optimizer.param_groups)],
        "precision": precision,
        "compiled": compiled,
        "batch": [_ADDRESS.sub("", str(structure)), [_leaf(leaf, differ_in_length) for leaf in leaves]],
        "device": [describe(device), _size(device), type(memory_of(device)).__name__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def describe(device: torch.device) -> str:
    """Return the device's type and name, for people.

    >>> describe(torch.device("cpu")).split()[0]
    'cpu'
    """
    properties = _properties(device)
    return f"{device.type} {platform.machine() if properties is None else properties.name}"


def _size(device: torch.device) -> int:
    """Return the bytes of an accelerator, or the threads of the host.

    The host's memory is seldom all one's own, while its threads decide how fast it is.
    """
    properties = _properties(device)
    return torch.get_num_threads() if properties is None else int(properties.total_memory)


def _properties(device: torch.device) -> Any:
    """Return what the device says of itself; None for the host, and for Apple's GPU, which is a part of it."""
    return None if device.type in ("cpu", "mps") else torch.get_device_module(device).get_device_properties(device)


def _module(root: nn.Module) -> list[Any]:
    """Return the shapes and types of a module's tensors, and each layer with its switches."""
    tensors = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for named in (root.named_parameters(), root.named_buffers())
        for name, tensor in named
    ]
    layers = [
        [name, _name(type(layer)), _ADDRESS.sub("", layer.extra_repr()), _switches(vars(layer), 1)]
        for name, layer in root.named_modules()
    ]
    return [tensors, layers]


def _group(group: dict[str, Any]) -> list[Any]:
    # Schedulers add initial_lr, max_lr and the like.
    options = {name: value for name, value in group.items() if not name.endswith(("lr", "params"))}
    return [[list(p.shape) for p in group["params"]], _switches(options)]


def _switches(values: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return the numbers and texts among values, and those of a config that is one of them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, float):  # only whether there is a rate: without one an operation is left out
            found[name] = int(bool(value))
        elif isinstance(value, bool | int | str):
            found[name] = value
        elif depth and not isinstance(value, nn.Module) and not callable(value) and hasattr(value, "__dict__"):
            found[name] = _switches(vars(value))
    return found


def _leaf(leaf: Any, differ_in_length: bool) -> list[Any]:
    # Dim 0 is the samples, of which a micro-batch has any number; lengths that differ do not count either.
    if isinstance(leaf, torch.Tensor | np.ndarray):
        shape = leaf.ndim if differ_in_length else list(leaf.shape[1:])
        return [_name(type(leaf)), shape, str(leaf.dtype)]
    return [_name(type(leaf))]


def _name(value: Any) -> str:
    value = value.func if isinstance(value, partial) else value
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
