"""Layers that learn their shapes from the first batch (``nn.LazyLinear``): built before the optimizer needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from autoaccum.errors import ArgumentError, AutoaccumError, DataError
from autoaccum.loss.stated import LossOf
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.window.attributes import Attributes
from autoaccum.window.batch_norm import smallest_micro_batch
from autoaccum.window.precision import Autocast
from autoaccum.window.snapshot import Snapshot


class Examples(Protocol):
    """What makes example batches: any data, or a batch."""

    def example(self, num_samples: int) -> Any:
        """Return a batch of that many samples, on the device."""


def build_lazy_layers(
    model: nn.Module,
    modules: Sequence[nn.Module],
    source: Examples,
    loss_of: LossOf,
    autocast: Autocast,
    device: torch.device,
    fewest: int = 1,
) -> None:
    """Build what is not built yet by one forward on an example, of which nothing else remains.

    Parameters are built in place, so whoever holds them, an optimizer too, holds the built ones. What the layers draw
    for their first values is drawn from the global generators, as in any first forward.

    Raises:
        ArgumentError: that forward failed, or did not come to every layer.
    """
    if not _unbuilt(modules):
        return
    # Each once, though a layer may stand in several places: it would else be snapshot and restored more than once.
    layers = list({id(m): m for root in modules for m in root.modules()}.values())
    # What PyTorch itself goes by: the hook that builds a layer is there until it has been built.
    lazy: list[nn.Module] = [m for m in layers if isinstance(m, LazyModuleMixin) and hasattr(m, "_initialize_hook")]
    traces = [_Trace(layers, device)]  # of lazy layers those come after it that are taken when they have been built

    def built_now(layer: nn.Module, inputs: Any) -> None:
        """Note the layer's state once its own hook has built it, before its first forward leaves a trace."""
        handles.pop(layer).remove()
        traces.append(_Trace([layer], device))

    # Hooks run in the order in which they were registered, so these come after the ones that build.
    handles = {layer: layer.register_forward_pre_hook(built_now) for layer in lazy}
    try:
        # Under autocast as in training, for a layer may take its type from its input.
        with torch.no_grad(), autocast():
            loss_of(model, _example(model, modules, source, fewest))
    except Exception as error:
        # Our errors name their own cure, and too little memory is told of by whoever measures it.
        if isinstance(error, AutoaccumError) or is_out_of_memory(error):
            raise
        raise _refusal(model, f"a forward on an example batch failed ({type(error).__name__}: {error})") from error
    finally:
        for handle in handles.values():
            handle.remove()
        # Those of built layers come last, so that they stay built: the first trace knows them as lazy ones.
        for trace in traces:
            trace.remove()
    # A branch that this batch did not take would be built in some window: its parameters would be in no optimizer.
    if left := _unbuilt(modules):
        raise _refusal(model, f"a forward on an example batch did not come to {', '.join(left)}")


def refuse_lazy(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a model whose layers are not built yet, where a first forward is not ours to make.

    Raises:
        ArgumentError: one of its tensors has no shape.
    """
    if any(map(is_lazy, tensors)):
        cure = "Call it once on a batch: model(inputs)."
        raise ArgumentError("model", type(model).__name__, "a model whose lazy layers know their shapes", cure)


class _Trace:
    """What a forward leaves in modules and random states, to be taken away again."""

    def __init__(self, modules: list[nn.Module], device: torch.device) -> None:
        """Remember how things are."""
        self._snapshot = Snapshot(modules, device)
        self._snapshot.take()
        self._attributes = Attributes(modules)

    def remove(self) -> None:
        """Put everything back to how it was."""
        self._attributes.restore()
        self._snapshot.restore()


def _unbuilt(modules: Sequence[nn.Module]) -> list[str]:
    """Return the names of parameters and buffers without a shape."""
    named = ((name, t) for root in modules for name, t in (*root.named_parameters(), *root.named_buffers()))
    return [name for name, tensor in named if is_lazy(tensor)]


def _example(model: nn.Module, modules: Sequence[nn.Module], source: Examples, fewest: int) -> Any:
    """Return a batch of as few samples as the model can be called on.

    Raises:
        ArgumentError: the data cannot make one.
    """
    try:
        # Two with BatchNorm, which has no statistics of one.
        return source.example(max(smallest_micro_batch(modules), fewest))
    except DataError as error:
        raise _refusal(model, f"there is no example batch to build them by ({error})") from error


def _refusal(model: nn.Module, reason: str) -> ArgumentError:
    """Return the error for a model whose layers cannot be built here, with the way to do it oneself."""
    accepted = "a model whose lazy layers know their shapes, or learn them from a forward on an example batch"
    return ArgumentError(
        "model", type(model).__name__, accepted, f"Call it once on a batch, model(inputs), before: {reason}."
    )
