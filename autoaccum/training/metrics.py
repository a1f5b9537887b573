"""What validations report beside the loss: the mean over the values of all samples or items, whatever the cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from autoaccum._units import kind_of
from autoaccum.data import batches, splits
from autoaccum.errors import ArgumentError, AutoaccumError
from autoaccum.step.error_context import may_need_another
from autoaccum.step.job import Autocast
from autoaccum.step.loss_functions import call, call_on_batch, inputs_and_targets
from autoaccum.step.readback import Numbers

Metric = Callable[[Any, Any], torch.Tensor]
"""(outputs, targets), (model, batch) or (outputs, batch), as the loss is computed -> the values, of any shape but ()"""
Sums = dict[str, tuple[torch.Tensor, int]]
"""The sum of each metric's values, on their device, and how many they are."""


_VALUES = "a function that returns a tensor with one real value per sample or item"


class SharedTree:
    """A batch or outputs for several functions in turn, each of which may empty containers and write to tensors."""

    def __init__(self, tree: Any) -> None:
        """Hold the tensors without a graph; containers are made anew for each function."""
        leaves, self._spec = batches.flatten(tree)
        self._leaves = [_detached(leaf) for leaf in leaves]
        self._versions = self._now()

    def tree(self) -> Any:
        """Return the same tensors, without a graph, in containers of their own."""
        return self._spec.unflatten(self._leaves)

    @property
    def is_intact(self) -> bool:
        """Return whether no tensor was written to."""
        # Tensors are shared and not copied: outputs may be the largest of all, and hardly any function writes to them.
        return self._now() == self._versions

    def _now(self) -> list[int]:
        """Return the version of each tensor, which PyTorch counts up whenever it is written to."""
        # PyTorch has no public name for the counter, by which it finds writes that would spoil a backward.
        tensors = [tensor for leaf in self._leaves for tensor in _tensors(leaf).values()]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]  # which has no counter


class Metrics:
    """Sums of what the user's functions return for micro-batches."""

    def __init__(
        self,
        functions: Mapping[str, Metric],
        model: Callable[..., Any],
        *,
        of: Literal["loss_fn", "training_step", "model"],
        autocast: Autocast,
        split: Any = None,
    ) -> None:
        """Set up; ``of`` is what computes the loss, beside which functions are called, and ``split`` cuts batches."""
        self._split = splits.tensors if split is None else split
        self._functions = dict(functions)
        self._model = model
        self._of = of
        self._autocast = autocast
        # A training step may call its model several times, so there are no outputs that the loss was computed of.
        self.model: Any = model if of == "training_step" else _Remembering(model)
        """What the loss is to be computed with, so that one forward is enough."""
        self.begin()  # so that they can be tried before the first validation

    def begin(self) -> None:
        """Forget what was added up."""
        self._sums: Sums = {}

    def measure(self, batch: SharedTree, reread: Callable[[], Any]) -> Sums:
        """Return what the functions add up to with one more micro-batch, whose loss was computed or not.

        Args:
            batch: the micro-batch as it was before.
            reread: reads it once more, where that or the outputs have been written to.

        Raises:
            ArgumentError: a function returned no tensor of values.
        """
        # Those that the loss was computed of; where there are none, the first function's forward makes some for all.
        outputs = self._last_outputs()
        sums = {}
        for name, function in self._functions.items():
            # Each function is to see what it would see alone, so what another has written to is made anew.
            if not (batch.is_intact and (outputs is None or outputs.is_intact)):
                batch, outputs = SharedTree(reread()), None
            # In the precision of the loss, so that both are of the same outputs.
            with torch.no_grad(), self._autocast():
                if self._of == "training_step":
                    values = _called(name, function, self._model, batch.tree(), has_model=True)
                else:
                    outputs = outputs or SharedTree(self._forward(batch.tree()))
                    tree = batch.tree()
                    beside = tree[1] if self._of == "loss_fn" else tree
                    values = _called(name, function, outputs.tree(), beside, has_model=False)
            total, count = _summed(name, values)
            # A tensor on the device: to read it here would wait for the device in every micro-batch.
            before = self._sums.get(name)
            sums[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        return sums

    def check(self, example: Callable[[], Any], few: int) -> None:
        """Check that each function returns as many values for some samples as for two parts of them in all.

        Means, and what is broadcast, have other numbers. Where nothing can be cut, nothing is compared.

        Args:
            example: makes a batch of three times ``few`` samples.
            few: the fewest samples that can be computed.

        Raises:
            ArgumentError: a function returned values that depend on the micro-batches.
        """
        # Three to one and two: by chance, two samples are broadcast with two classes, and one with anything.
        together = self._counts(example)
        try:
            split = self._split.known(example(), 3 * few)
            # Read anew each time, for a function may write to what it is given.
            parts = [partial(lambda *part: split(example(), *part), *part) for part in ((0, few), (few, 2 * few))]
            if sum(split.count(part()) for part in parts) != 3 * few:
                return
        except AutoaccumError:  # a collate_fn has made one thing of them
            return
        try:
            counts = [self._counts(part) for part in parts]
        except Exception as error:
            if not may_need_another(error):  # by a model that cannot be called on a single sample
                raise
            return
        for name, number in together.items():
            if number != sum(count[name] for count in counts):
                raise ArgumentError(
                    "metrics",
                    name,
                    _VALUES,
                    f"It returned {number} for {3 * few} samples together, and {counts[0][name]} and {counts[1][name]} "
                    f"for {few} and {2 * few} of them, so that it would depend on the micro-batches. Return the "
                    f"values, not their mean, and compare tensors of the same shape: (n, 1) and (n,) are broadcast to "
                    f"(n, n).",
                )

    def _counts(self, read: Callable[[], Any]) -> dict[str, int]:
        """Return how many values each function returns for a batch."""
        return {name: count for name, (_, count) in self.measure(SharedTree(read()), read).items()}

    def keep(self, sums: Sums) -> None:
        """Let the micro-batch count whose ``measure`` returned these sums."""
        # Apart from measuring: nothing is computed here, so nothing can fail half-way and leave some metrics counted.
        self._sums = sums

    def want(self, numbers: Numbers) -> None:
        """Ask for what was added up on a device."""
        numbers.want(total for total, _ in self._sums.values())

    def take_read(self, numbers: Numbers) -> None:
        """Take it as it was read."""
        self._sums = {name: (numbers.tensor(total), count) for name, (total, count) in self._sums.items()}

    def read(self) -> dict[str, float]:
        """Return the means over all that was added up; NaN where that is nothing."""
        return {name: total.item() / count if count else float("nan") for name, (total, count) in self._sums.items()}

    def forget(self) -> None:
        """Let go the outputs of a micro-batch that failed, which may be large."""
        self._last_outputs()

    def _last_outputs(self) -> SharedTree | None:
        """Return what the model returned last, which is held no longer; None where nothing was."""
        return self.model.take() if self._of != "training_step" else None

    def _forward(self, batch: Any) -> Any:
        """Return the model's outputs for a batch, called as the loss calls it."""
        if self._of == "loss_fn":
            return call(self._model, inputs_and_targets(batch)[0])
        return call_on_batch(self._model, batch)


def _called(name: str, function: Metric, outputs: Any, batch: Any, *, has_model: bool) -> torch.Tensor:
    """Return what a function makes of outputs, or of a model, and a batch; name it where it fails."""
    try:
        return function(outputs, batch)
    except Exception as error:
        # PyTorch's message names neither, and without our frames the traceback may show a lambda alone.
        error.add_note(f"It was raised by metrics[{name!r}].")
        if has_model and isinstance(error, AttributeError | TypeError):  # it took them for outputs and targets
            error.add_note("Beside a training_step a metric is called with (model, batch).")
        raise


class _Remembering:
    """The model, which is called as ever; what it returned last is kept until it is taken."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._kept: SharedTree | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and keep what it returns."""
        outputs = self._model(*args, **kwargs)
        # Before the loss has them, which may write to them.
        self._kept = SharedTree(outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model: what computes the loss may look at its configuration."""
        return getattr(self._model, name)

    def take(self) -> SharedTree | None:
        """Return what the model returned last, once."""
        kept, self._kept = self._kept, None
        return kept


def _tensors(leaf: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a leaf that is one, or holds some: a dataclass, a SimpleNamespace, a distribution."""
    held = {"": leaf} if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {})
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _detached(leaf: Any) -> Any:
    """Return a leaf whose tensors have no graph, which would hold the activations of the forward."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if tensors := _tensors(leaf):
        leaf = copy.copy(leaf)  # the object is the user's
        vars(leaf).update({name: tensor.detach() for name, tensor in tensors.items()})
    return leaf


def _summed(name: str, values: Any) -> tuple[torch.Tensor, int]:
    """Return the sum of a metric's values, on their device, and their number.

    Raises:
        ArgumentError: they are no tensor with one real value per sample or item.
    """
    # A tensor of shape () is a mean already, which would weigh each micro-batch alike, whatever is in it.
    if not isinstance(values, torch.Tensor) or not values.ndim or values.is_complex():
        if isinstance(values, torch.Tensor):
            found = f"a {str(values.dtype).removeprefix('torch.')} tensor of shape {tuple(values.shape)}"
        else:
            found = "nothing" if values is None else kind_of(values)
        raise ArgumentError(
            "metrics",
            name,
            _VALUES,
            f"It returned {found}. Return the values, not their mean, which would depend on the micro-batches; of a "
            f"single sample too (squeeze(-1) rather than squeeze()).",
        )
    # In float64, for a validation may have millions of values; Apple's GPU has none.
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    return values.detach().sum(dtype=dtype), values.numel()
