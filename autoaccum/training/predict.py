"""``predict``: the outputs of a model for all samples, in micro-batches of whatever fits.

It is a validation's pass, as ``evaluate`` is, that keeps outputs in the place of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from autoaccum import _checks
from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.data.sources import shuffles
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.errors import ArgumentError, DataError
from autoaccum.memory.devices import being_current, current_device_kept
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.attempts import Piece
from autoaccum.step.job import Precision, autocast
from autoaccum.step.loss_functions import call, call_on_batch
from autoaccum.training.declarations import check
from autoaccum.training.evaluate import MOST, own_device, validator_of
from autoaccum.training.options import CHECKS, EACH, modules_of
from autoaccum.training.setup import place_of
from autoaccum.training.synonyms import answering
from autoaccum.training.validation import Loss, Validator


@answering("predict")
def predict(
    model: nn.Module,
    data: Any,
    *,
    forward: Callable[[Any, Any], Any] | None = None,
    precision: Precision = "fp32",
    max_micro_batch: int | None = None,
    memory_limit: MemoryLimit = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
) -> Any:
    """Return the outputs of a model for all samples, joined, on the host, in the order of the data.

    The model is called where it lies, in eval mode and without gradients, and left as it was. Under several ranks each
    process that calls this runs all of the data.

    Args:
        model: the module, on its device; not sharded.
        data: as for ``fit``; read once, in its order.
        forward: (model, batch) -> outputs, any pytree of tensors with one row per sample, or lists with one entry per
            sample. When left out the model is called as by ``fit``: with a mapping's values as keywords, with a tensor
            as it is, and of a pair (inputs, targets) with the inputs alone, unless it takes two; of what it returns in
            a mapping, a ``loss`` is left out.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        max_micro_batch: the most samples to run at once; 1,024 when left out.
        memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one
            of these.
        collate_fn: makes a batch of a list of samples.
        num_workers: processes that read the data.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form.
        batch_dim: the dim in which samples lie, as for ``fit``.

    Returns:
        What the model returns for one batch, with as many rows as there are samples.

    Raises:
        ArgumentError: an argument cannot be used, or outputs have not one row per sample.
        NothingFitsError: not even one sample fits.
        DataError: the data cannot be cut, or outputs of several micro-batches cannot be joined.

    >>> import torch
    >>> predict(torch.nn.Linear(3, 1), torch.randn(20, 3)).shape
    torch.Size([20, 1])
    """
    given = locals()
    checked = check(given, EACH, CHECKS)
    if forward is not None:
        _checks.function("forward", forward, ("model", "batch"), "outputs")
    # Of a sampler of the user's own the order is theirs; what shuffle=True draws nobody could tell afterwards.
    if isinstance(data, DataLoader) and shuffles(data):
        cure = "Outputs would come in an order that was drawn: pass one with shuffle=False."
        raise ArgumentError("data", "a DataLoader with shuffle=True", "data in an order of their own", cure)
    place = place_of(own_device(model), memory_limit)
    with current_device_kept(), being_current(place.device), place.limit.kept():
        predictor = validator_of(
            Predictor, model, modules_of(model, forward), given, checked[split_of], place, loss_of=forward or _forward,
            of_outputs=False, num_items=None, autocast=autocast(precision, place.device), emit=lambda event: None,
        )  # fmt: skip
        predictor.run(0, 0, max_micro_batch or MOST)
        return predictor.joined()


def _forward(model: Any, batch: Any) -> Any:
    """Return the outputs of a model for a batch, with or without targets."""
    # Most data that a model was trained on are pairs, whose targets it is not called with.
    if _takes_inputs(model, batch):
        outputs = call(model, batch[0])
    else:
        outputs = call_on_batch(model, batch, why="", cure="Pass forward=(model, batch) -> outputs.")
    # Of a micro-batch and not of its samples; some models compute one wherever there are labels.
    if isinstance(outputs, Mapping) and outputs.get("loss") is not None and len(outputs) > 1:
        return {name: value for name, value in outputs.items() if name != "loss"}
    return outputs


def _takes_inputs(model: Any, batch: Any) -> bool:
    """Return whether a model is called with the inputs alone of a batch that is a pair."""
    takes = _checks.positional(model)
    return isinstance(batch, tuple | list) and len(batch) == 2 and (takes is None or takes.required < 2)


class _Kept:
    """The outputs of micro-batches, on the host, with the positions of their samples in the data."""

    # In the place of what a validation keeps beside its losses, of which these are the only ones.
    are_there = False

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.parts: list[Any] = []
        self.positions: list[int] = []

    def absorb(self, other: _Kept) -> None:
        self.parts += other.parts
        self.positions += other.positions

    def means(self) -> dict[str, Any]:
        return {}

    def want(self, numbers: Any) -> None:
        """Ask for nothing: all of it is on the host."""

    def take_read(self, numbers: Any) -> None:
        """Take nothing."""


class Predictor(Validator):
    """Runner of a pass that keeps outputs, and computes no loss."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Set up; ``loss_of`` is what computes the outputs."""
        super().__init__(*arguments, **options)
        self._beside: Any = _Kept()
        self._window: Window
        self._piece: Piece

    def _try(self, window: Window, piece: Piece) -> Any:
        # What computes a micro-batch is told neither.
        self._window, self._piece = window, piece
        return super()._try(window, piece)

    def _outcome(self, micro_batch: Callable[[], Any], size: int) -> tuple[Loss, Any, Any]:
        """Return outputs in the place of what stands beside a loss, of which there is none."""
        batch = micro_batch()
        with torch.no_grad(), self._autocast():
            outputs = self._loss_of(self._model, batch)
        # Copied within the attempt: where the host has no room for them, the micro-batch is run in smaller pieces.
        found, start, done = _Kept(), self._piece.start, len(self._beside.positions)
        found.parts = [_on_host(outputs, size)]
        # Samples of different lengths are served longest first: a window of these says where each was. All others come
        # in the order of the data, and those that were done are those before them.
        places = getattr(self._window, "positions", None)
        found.positions = list(range(done, done + size) if places is None else places[start : start + size])
        return Loss({}, {}, size), {}, found

    def joined(self) -> Any:
        """Return the outputs of all samples, in the order of the data.

        Raises:
            DataError: those of several micro-batches are of different shapes.
        """
        # Joined once, at the end: joined as they come, all would be copied again and again.
        kept, places = self._beside.parts, self._beside.positions
        try:
            whole = kept[0] if len(kept) == 1 else batches.joined_by(kept, _is_leaf, batches.join_rows)
        except DataError as error:
            # Written for windows of training, of which there is none: only the cause is of use here.
            raise DataError(
                f"forward: the outputs of several micro-batches cannot be joined: {error.__cause__ or error}. "
                f"Return a list with one entry per sample, as by forward=lambda model, batch: list(model(batch)), or "
                f"what is of one shape."
            ) from None
        # Nearly always: to take rows by their places copies all of them once more.
        if places == sorted(places):
            return whole
        order = sorted(range(len(places)), key=places.__getitem__)
        leaves, spec = batches.flatten(whole, _is_leaf)
        return spec.unflatten([_in_order(leaf, order) for leaf in leaves])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, list) or batches.is_leaf(value)


def _on_host(outputs: Any, size: int) -> Any:
    """Return outputs in memory of their own on the host.

    Raises:
        ArgumentError: something of them has not one row per sample.
    """
    # What is of no sample would be joined all the same, to rows that belong to nobody.
    leaves, spec = batches.flatten(outputs, _is_leaf)
    for leaf in leaves:
        rows = leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else None
        rows = len(leaf) if isinstance(leaf, list) else rows
        if rows is not None and rows != size:
            accepted = f"outputs with one row per sample, {size} in a micro-batch of {size}"
            found = f"{rows} rows" if isinstance(leaf, list) else f"a tensor of shape {tuple(leaf.shape)}"
            raise ArgumentError("forward", found, accepted, "Return what is of each sample, samples first.")
    return spec.unflatten([_copied(leaf) for leaf in leaves])


def _copied(leaf: Any) -> Any:
    # A copy on the host too, for a model may return what it writes to in its next forward.
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True)
    return [_copied(entry) for entry in leaf] if isinstance(leaf, list) else leaf


def _in_order(leaf: Any, order: Sequence[int]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.ndim:
        return leaf[torch.tensor(order)]
    return [leaf[index] for index in order] if isinstance(leaf, list) else leaf
