"""What validations report beside the loss: the mean over the values of all samples or items, whatever the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from autoaccum.data import batches
from autoaccum.errors import ArgumentError
from autoaccum.loss.functions import call, call_on_batch, inputs_and_targets
from autoaccum.window.precision import Autocast

Metric = Callable[[Any, Any], torch.Tensor]
"""(outputs, targets), (model, batch) or (outputs, batch), as the loss is computed -> the values, of any shape but ()"""
Sums = dict[str, tuple[torch.Tensor, int]]
"""The sum of each metric's values, on their device, and how many they are."""


class Kept:
    """A batch or outputs, for several functions in turn, each of which may empty containers and write to tensors."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = batches.flatten(tree)
        self._leaves = [_detached(leaf) for leaf in leaves]
        self._versions = self._now()

    def tree(self) -> Any:
        """The same tensors, without a graph, in containers of their own."""
        return self._spec.unflatten(self._leaves)

    @property
    def is_intact(self) -> bool:
        """Whether no tensor was written to."""
        return self._now() == self._versions

    def _now(self) -> list[int]:
        tensors = [tensor for leaf in self._leaves for tensor in _tensors(leaf).values()]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # which has no counter


class Metrics:
    """Calls the functions on micro-batches, and adds up what they return."""

    def __init__(
        self,
        functions: Mapping[str, Metric],
        model: Callable[..., Any],
        *,
        of: Literal["loss_fn", "training_step", "model"],
        autocast: Autocast,
    ) -> None:
        """``of`` is what computes the loss, beside which the functions are called."""
        self._functions = dict(functions)
        self._model = model
        self._of = of
        self._autocast = autocast
        self.model: Any = model if of == "training_step" else _Heard(model)
        """What the loss is to be computed with, so that one forward is enough."""
        self.begin()

    def begin(self) -> None:
        """Forget what was added up."""
        self._sums: Sums = {}

    def measure(self, batch: Kept, again: Callable[[], Any]) -> Sums:
        """What is added up with one more micro-batch, whose loss was computed or not.

        Args:
            batch: the micro-batch as it was before.
            again: reads it once more, where that or the outputs have been written to.

        Raises:
            ArgumentError: a function returned no tensor of values.
        """
        outputs = self._heard()
        sums = {}
        for name, function in self._functions.items():
            if not (batch.is_intact and (outputs is None or outputs.is_intact)):
                batch, outputs = Kept(again()), None
            with torch.no_grad(), self._autocast():
                if self._of == "training_step":
                    values = function(self._model, batch.tree())
                else:
                    outputs = outputs or Kept(self._forward(batch.tree()))
                    tree = batch.tree()
                    values = function(outputs.tree(), tree[1] if self._of == "loss_fn" else tree)
            total, count = _summed(name, values)
            before = self._sums.get(name)
            sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        return sums

    def check(self, batch: Any) -> None:
        """Of a batch of two samples there are as many values as of each alone: means and outer products have others.

        Raises:
            ArgumentError: a function returned values that depend on the micro-batches.
        """
        found = [self.measure(Kept(part), lambda part=part: part) for part in (batch, *_halves(batch))]  # type: ignore[misc]
        for name in self._functions:
            together, first, second = (sums[name][1] for sums in found)
            if together != first + second:
                raise ArgumentError(
                    "metrics",
                    name,
                    "a function that returns a tensor with one real value per sample or item",
                    f"It returned {together} for two samples together, and {first} and {second} for each alone, so "
                    f"that it would depend on the micro-batches. Return the values, not their mean, and compare "
                    f"tensors of the same shape: (n, 1) and (n,) are broadcast to (n, n).",
                )

    def keep(self, sums: Sums) -> None:
        """The micro-batch counts; nothing is computed here, so nothing can fail."""
        self._sums = sums

    def read(self) -> dict[str, float]:
        """The means over all that was added up; NaN where that is nothing."""
        return {name: total.item() / count if count else float("nan") for name, (total, count) in self._sums.items()}

    def forget(self) -> None:
        """The outputs of a micro-batch that failed, which may be large."""
        self._heard()

    def _heard(self) -> Kept | None:
        return self.model.take() if self._of != "training_step" else None

    def _forward(self, batch: Any) -> Any:
        if self._of == "loss_fn":
            return call(self._model, inputs_and_targets(batch)[0])
        return call_on_batch(self._model, batch)


class _Heard:
    """The model, which is called as ever; what it returned last is kept until it is taken."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._kept: Kept | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model(*args, **kwargs)
        self._kept = Kept(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def take(self) -> Kept | None:
        kept, self._kept = self._kept, None
        return kept


def _halves(batch: Any) -> tuple[Any, Any]:
    return batches.take(batch, 0, 1), batches.take(batch, 1, 2)


def _tensors(leaf: Any) -> dict[str, torch.Tensor]:
    """Of a leaf that is one, or an object that holds some: a dataclass, a SimpleNamespace, a distribution."""
    held = {"": leaf} if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {})
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if tensors := _tensors(leaf):
        leaf = copy.copy(leaf)
        vars(leaf).update({name: tensor.detach() for name, tensor in tensors.items()})
    return leaf


def _summed(name: str, values: Any) -> tuple[torch.Tensor, int]:
    if not isinstance(values, torch.Tensor) or not values.ndim or values.is_complex():
        if isinstance(values, torch.Tensor):
            found = f"a {str(values.dtype).removeprefix('torch.')} tensor of shape {tuple(values.shape)}"
        else:
            found = "nothing" if values is None else f"a {type(values).__name__}"
        raise ArgumentError(
            "metrics",
            name,
            "a function that returns a tensor with one real value per sample or item",
            f"It returned {found}. Return the values, not their mean, which would depend on the micro-batches; of a "
            f"single sample too (squeeze(-1) rather than squeeze()).",
        )
    # Apple's GPU has no float64.
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    return values.detach().sum(dtype=dtype), values.numel()
