"""``evaluate`` and ``predict``: a model on data that it is not trained on, in micro-batches of whatever fits.

Both are a validation's pass: in eval mode, without gradients, with modes, buffers and random states put back, and in
smaller micro-batches where memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, RandomSampler

from autoaccum import _checks
from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.data.sources import open_source
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.events import Event, Validated
from autoaccum.loss.functions import call, call_on_batch, loss_function, stated
from autoaccum.loss.stated import CountItems
from autoaccum.loss.terms import Reduction
from autoaccum.memory.devices import being_current, current_device_kept, memory_of
from autoaccum.memory.limit import Limit, MemoryLimit
from autoaccum.planning.attempts import Piece
from autoaccum.planning.limits import Limits
from autoaccum.ranks.units import units_of
from autoaccum.reporting.shown import Facts, as_line, as_table
from autoaccum.training.alone import is_sharing
from autoaccum.training.declarations import check
from autoaccum.training.metrics import Metric, Metrics
from autoaccum.training.options import CHECKS, OF_FIT, modules_of
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Loss, OneLoss
from autoaccum.window.precision import Precision, autocast
from autoaccum.window.snapshot import Snapshot

MOST = 1024
"""Samples of a micro-batch at most, unless more are asked for: larger ones are hardly faster without a backward."""
_HEADROOM, _PATIENCE = 0.05, 60.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Evaluation:
    """What a model comes to on data."""

    loss: float
    """Mean over the data's items; their sum where the loss is one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over all values of each metric, and of what stands beside the loss."""
    num_samples: int
    """Of the data."""
    micro_batch: int
    """Samples of the largest micro-batch."""
    seconds: float
    """That it took."""

    def __repr__(self) -> str:
        return as_line("Evaluation", self._facts())

    def _repr_html_(self) -> str:
        return as_table("Evaluation", self._facts())

    def _facts(self) -> Facts:
        facts: Facts = {"loss": f"{self.loss:.6g}"}
        facts |= {name: f"{value:.6g}" for name, value in self.metrics.items()}
        return facts | {"num_samples": self.num_samples, "micro_batch": self.micro_batch}


@torch.enable_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    num_items: CountItems | None = None,
    metrics: Mapping[str, Metric] | None = None,
    precision: Precision = "fp32",
    max_micro_batch: int | None = None,
    memory_limit: MemoryLimit = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
) -> Evaluation:
    """Return the loss and the metrics of a model on data, the same whatever the micro-batches.

    The model is evaluated where it lies, in eval mode, and left as it was: modes, buffers, gradients, random states.
    Under several ranks each process that calls this evaluates all of the data.

    Args:
        model: the module, on its device; not sharded.
        data: as for ``fit``; read once, in its order.
        loss_fn: (outputs, targets) -> loss, for batches that are (inputs, targets).
        training_step: (model, batch) -> loss, for any batch. With neither, the model returns its loss.
        num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss.
        metrics: names and functions (outputs, targets) -> one value per sample or item, as for ``fit``.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        max_micro_batch: the most samples to run at once; 1,024 when left out.
        memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () -> one
            of these.
        collate_fn: makes a batch of a list of samples.
        num_workers: processes that read the data.
        split: (batch, start, size) -> micro-batch, which cuts batches of any form.
        batch_dim: the dim in which samples lie, as for ``fit``.

    Raises:
        ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        NothingFitsError: not even one sample fits.
        DataError: the data cannot be cut.

    >>> import torch
    >>> data = torch.randn(20, 3), torch.randn(20, 1)
    >>> evaluate(torch.nn.Linear(3, 1), data, loss_fn=torch.nn.functional.mse_loss).num_samples
    20
    """
    given: dict[str, Any] = {
        "model": model, "data": data, "loss_fn": loss_fn, "training_step": training_step, "num_items": num_items,
        "metrics": metrics, "max_micro_batch": max_micro_batch, "collate_fn": collate_fn, "num_workers": num_workers,
        "split": split, "batch_dim": batch_dim,
    }  # fmt: skip
    # The checks are those of fit, which asks for validation_data beside metrics: here data are that.
    declared = {name: OF_FIT[name] for name in given}
    checked = check(declared, CHECKS, **given, validation_data=data, headroom=_HEADROOM)
    of: Any = "loss_fn" if loss_fn is not None else "training_step" if training_step is not None else "model"
    # Metrics that are modules are put into eval mode with the model, and run where it runs.
    held = [metric for metric in (metrics or {}).values() if isinstance(metric, nn.Module)]
    loss_of, _ = stated(checked[loss_function], num_items, None)
    # A validation tells what it has found as an event, whoever hears it.
    told: list[Event] = []
    device = _device_of(model)
    for module in held:
        module.to(device)
    context = autocast(precision, device)
    with current_device_kept(), being_current(device):
        options: dict[str, Any] = {"loss_of": loss_of, "of_outputs": loss_fn is not None, "num_items": num_items}
        options["metrics"] = Metrics(metrics, model, of=of, autocast=context) if metrics else None
        validator, limit = _pass(
            Validator, model, [*modules_of(model, loss_fn, training_step), *held], given, checked[split_of], context,
            memory_limit, told.append, **options,
        )  # fmt: skip
        with limit.kept():
            if metrics:
                validator.try_metrics(Metrics(metrics, model, of=of, autocast=context, split=checked[split_of]))
            validator.run(0, 0, max_micro_batch or MOST)
    found = next(event for event in told if isinstance(event, Validated))
    return Evaluation(
        loss=found.loss,
        metrics=found.metrics,
        num_samples=found.num_samples,
        micro_batch=found.micro_batch,
        seconds=found.seconds,
    )


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
    given: dict[str, Any] = {
        "model": model, "data": data, "max_micro_batch": max_micro_batch, "collate_fn": collate_fn,
        "num_workers": num_workers, "split": split, "batch_dim": batch_dim,
    }  # fmt: skip
    checked = check({name: OF_FIT[name] for name in given}, CHECKS, **given, headroom=_HEADROOM)
    if forward is not None:
        _checks.function("forward", forward, ("model", "batch"), "outputs")
    # Of a sampler of the user's own the order is theirs; what shuffle=True draws nobody could tell afterwards.
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        cure = "Outputs would come in an order that was drawn: pass one with shuffle=False."
        raise ArgumentError("data", "a DataLoader with shuffle=True", "data in an order of their own", cure)
    device = _device_of(model)
    context = autocast(precision, device)
    with current_device_kept(), being_current(device):
        predictor, limit = _pass(
            Predictor, model, modules_of(model, forward), given, checked[split_of], context, memory_limit,
            lambda event: None, loss_of=forward or _forward, of_outputs=False, num_items=None,
        )  # fmt: skip
        with limit.kept():
            predictor.run(0, 0, max_micro_batch or MOST)
        return predictor.joined()


def _pass(
    kind: Any,
    model: nn.Module,
    modules: Sequence[nn.Module],
    given: Mapping[str, Any],
    split: Any,
    context: Any,
    memory_limit: MemoryLimit,
    emit: Callable[[Event], None],
    **options: Any,
) -> tuple[Any, Limit]:
    """Return a validator of that kind, and the limit that it keeps to."""
    device = _device_of(model)
    # As a run is set up, but for all that training needs: nothing is moved, and nothing allocated ahead.
    memory = memory_of(device)
    limit = Limit(memory, memory_limit)
    source = open_source(
        given["data"], seed=0, shuffle=False, device=device, collate_fn=given["collate_fn"],
        num_workers=given["num_workers"], split=split,
    )  # fmt: skip
    # Its micro-batches are found anew in each call: what fits depends on what else there is by then.
    made = kind(
        model, modules, source, autocast=context, device=device, memory=memory, limit=limit,
        limits=Limits(limit.bytes, _HEADROOM), patience=_PATIENCE, snapshot=Snapshot(modules, device), emit=emit,
        **options,
    )  # fmt: skip
    return made, limit


def _device_of(model: Any) -> torch.device:
    """Return where a model is, which is not moved.

    Raises:
        ArgumentError: it cannot be run here by itself.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", model, "a torch.nn.Module")
    if units_of(model):
        cure = "Each of its forwards asks all ranks: validate within fit, or load it as a whole."
        raise ArgumentError("model", type(model).__name__, "a model that this process has all of", cure)
    for part in model.modules():
        # Its forward waits for that of other ranks, of which none need come.
        if is_sharing(part):
            cure = "Pass the module within it (model.module of DistributedDataParallel)."
            raise ArgumentError("model", type(part).__name__, "a model of this process alone", cure)
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        cure = "Call it once on a batch: model(inputs)."
        raise ArgumentError("model", type(model).__name__, "a model whose lazy layers know their shapes", cure)
    # Where the user has put it: to move it would leave an optimizer's state behind.
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise ArgumentError("model", type(model).__name__, "a model on one device", f"It is on {found}.")
    return devices.pop() if devices else torch.device("cpu")


def _forward(model: Any, batch: Any) -> Any:
    """Return the outputs of a model for a batch, with or without targets."""
    # Most data that a model was trained on are pairs, whose targets it is not called with.
    takes = _checks.positional(model)
    if isinstance(batch, tuple | list) and len(batch) == 2 and (takes is None or takes.required < 2):
        outputs = call(model, batch[0])
    else:
        outputs = call_on_batch(model, batch)
    # Of a micro-batch and not of its samples; some models compute one wherever there are labels.
    if isinstance(outputs, Mapping) and outputs.get("loss") is not None and len(outputs) > 1:
        return {name: value for name, value in outputs.items() if name != "loss"}
    return outputs


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
        with torch.no_grad(), self._autocast():
            outputs = self._loss_of(self._model, micro_batch())
        # Copied within the attempt: where the host has no room for them, the micro-batch is run in smaller pieces.
        found, start, done = _Kept(), self._piece.start, len(self._beside.positions)
        found.parts = [_on_host(outputs, size)]
        # Samples of different lengths are served longest first: a window of these says where each was. All others come
        # in the order of the data, and those that were done are those before them.
        places = getattr(self._window, "positions", None)
        found.positions = list(range(done, done + size) if places is None else places[start : start + size])
        return OneLoss(0.0, Reduction(0.0), size), {}, found

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
            raise DataError(
                f"the outputs of several micro-batches cannot be joined: {error} Pass forward=(model, batch) -> "
                f"outputs that returns what is of one shape, or a list with one entry per sample."
            ) from error
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
