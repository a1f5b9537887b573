"""``evaluate``: the loss of a model on data that it is not trained on, in micro-batches of whatever fits.

It is a validation's pass: in eval mode, without gradients, with modes, buffers and random states put back, and in
smaller micro-batches where memory runs out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from autoaccum.data.base import Window, in_order
from autoaccum.data.sources import open_source
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.distributed.fsdp import units_of
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.events import Event, Notice, Validated
from autoaccum.memory.devices import being_current, current_device_kept
from autoaccum.memory.limit import MemoryLimit
from autoaccum.memory.oom import RanOut, attempt, insist
from autoaccum.planning.limits import Limits
from autoaccum.reporting.lines import Facts, as_line, as_table
from autoaccum.step.exactness_notices import percent
from autoaccum.step.job import Precision, autocast
from autoaccum.step.loss_functions import loss_function, stated
from autoaccum.step.notices import Announcer
from autoaccum.step.optimizers import refuse_lazy
from autoaccum.step.python_state import Attributes
from autoaccum.step.snapshot import Snapshot
from autoaccum.step.split_calls import Layout
from autoaccum.step.terms import CountItems, Reducing
from autoaccum.training.declarations import check
from autoaccum.training.metrics import Metric, Metrics
from autoaccum.training.options import CHECKS, EACH, modules_of
from autoaccum.training.setup import Place, device_of, place_of
from autoaccum.training.single_process import is_sharing
from autoaccum.training.synonyms import answering
from autoaccum.training.validation import Losses, Validator, read_losses

_FIRST = 15
"""Times the fewest samples there may be, that are compared: micro-batches that double have 1, 2, 4 and 8 of these."""
_ROUNDING = {False: 1e-3, True: 0.04}
"""Shares of a loss that are taken for rounding, by whether it has 16 bits, or what it is computed by."""

_DIVIDED_LATER = (
    'Return the sum alone, divided by nothing, with reduction="sum" and num_items=(micro-batch) -> its share of what '
    "the sum of the whole window is divided by"
)


class _Joined(Exception):
    """The pass is to begin again."""


class ComparingValidator(Validator):
    """Runner of one pass, whose micro-batches are weighted where that is measured to be right, and else joined."""

    def __init__(self, *arguments: Any, is_stated: bool, is_given: bool, most: int, **options: Any) -> None:
        """Set up.

        Args:
            arguments: those of ``Validator``.
            is_stated: whether the user says both what is counted and what the loss is: then nothing is measured.
            is_given: whether the user says one of these, so that micro-batches are not joined instead.
            most: samples of a joined window.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._is_decided, self._is_given, self._most, self._has_16_bits = is_stated, is_given, most, False

    def _run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        try:
            return super()._run(step, epoch, training_micro_batch)
        except _Joined:
            return super()._run(step, epoch, training_micro_batch)

    def _next_size(self, seen: int, ceiling: int) -> int:
        size = super()._next_size(seen, ceiling)
        if self._is_decided:
            return size
        return max(min(_FIRST * self._trials.smallest, self._most), self._trials.first or 0)

    def _compute(self, model: Any, batch: Any) -> torch.Tensor:
        loss = super()._compute(model, batch)
        self._has_16_bits = self._has_16_bits or loss.element_size() < 4
        return loss

    def _ran(self, window: Window, losses: Losses) -> None:
        """Decide, once the first window has run, whether losses of micro-batches may be weighted."""
        if self._is_decided:
            return
        self._is_decided = True
        insist(lambda: read_losses([losses]), "the losses of a validation were read")
        if all(len(values) == 1 for values in losses.by_name().values()):  # of one micro-batch
            return
        is_doubtful = not self._is_given and losses.are_doubtful()
        off = self._share_off(window, losses)
        if not is_doubtful and off <= _ROUNDING[self._is_rounded()]:
            return
        if not self._is_given and self._source.num_samples is not None and self._can_be_joined(window):
            raise _Joined
        if off > _ROUNDING[self._is_rounded()]:
            self._emit(_cut_notice(window.num_samples, off))

    def _share_off(self, window: Window, losses: Losses) -> float:
        """Return how far the loss of a window is off where it is cut, as a share of it; 0 where nothing tells."""

        def found() -> float:
            whole, again = self._loss_at_once(window), self._loss_at_once(window)
            cut = losses.joined()[0]
            if math.isnan(cut) and not math.isnan(whole):
                return math.inf
            # What draws, or keeps state, is another one each time: then nothing can be compared.
            if whole == cut or not abs(whole - again) <= 1e-3 * abs(whole - cut) or math.isnan(whole):
                return 0.0
            # Of a loss that is nearly 0, beside those of its micro-batches, all digits are rounding.
            parts = [abs(value) for values in losses.by_name().values() for _, value, _ in values]
            return abs(whole - cut) / max(abs(whole), *parts)

        return float(self._measured(found, nothing=0.0))

    def _can_be_joined(self, window: Window) -> bool:
        """Return whether the loss of a window is the same where its micro-batches are joined; join them from now on."""
        layout = Layout(self._modules)

        def found() -> bool:
            whole = self._loss_at_once(window)
            self._is_joined = self._joined.follow(layout)
            losses = Losses()
            losses.add(window.num_samples, self._joined_outcome(window, max(self._fewest, window.num_samples // 3))[0])
            read_losses([losses])
            joined = losses.joined()[0]
            return math.isclose(whole, joined, rel_tol=_ROUNDING[self._is_rounded()]) or math.isnan(whole)

        can_be = bool(self._measured(found, nothing=False))
        self._is_joined = False
        if can_be:
            self.join(lambda: layout, self._most)
        return can_be

    def _measured(self, found: Callable[[], Any], *, nothing: Any) -> Any:
        """Return what a function returns, of which nothing else remains; ``nothing`` where that cannot be computed."""
        # Counters of the user's own, such as a model's number of calls, are no buffers.
        attributes = Attributes(self._modules)
        try:
            measured = attempt(found)
        except Exception:
            return nothing  # of some parts there is no loss, or data are read but once
        finally:
            attributes.restore()
            if self._metrics is not None:
                self._metrics.forget()
        return nothing if isinstance(measured, RanOut) else measured

    def _loss_at_once(self, window: Window) -> float:
        """Return the loss of all samples of a window at once."""
        losses, count = Losses(), window.num_samples
        losses.add(count, self._loss(in_order(window), count))
        self._outputs_of(count)
        read_losses([losses])
        return losses.joined()[0]

    def _is_rounded(self) -> bool:
        """Return whether anything is computed in 16 bits, as far as that is seen."""
        with self._autocast():
            casts = torch.is_autocast_enabled(self._device.type)
        tensors = [parameter for module in self._modules for parameter in module.parameters(recurse=False)]
        return casts or self._has_16_bits or any(t.is_floating_point() and t.element_size() < 4 for t in tensors)


def _cut_notice(num_samples: int, share: float) -> Notice:
    off = f"{percent(share)} off" if math.isfinite(share) else "no number"
    return Notice(
        cause=f"The loss of the first {num_samples} samples is {off} where they are cut otherwise",
        consequence="The loss that is evaluated depends on the micro-batches that fit",
        cure="Pass num_items=(micro-batch) -> how many items it is a mean over, and reduction='sum' too where it is "
        f"their sum. Of what is divided by a count that is kept from 0: {_DIVIDED_LATER}",
    )


MOST = 1024
"""Samples of a micro-batch at most, unless more are asked for: larger ones are hardly faster without a backward."""
HEADROOM = 0.05
"""Of the limit, that stays free."""
_PATIENCE = 60.0

V = TypeVar("V", bound=Validator)


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


@answering("evaluate")
@torch.enable_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    training_step: Callable[[Any, Any], Any] | None = None,
    num_items: CountItems | None = None,
    reduction: Reducing = None,
    metrics: Mapping[str, Metric] | None = None,
    precision: Precision = "fp32",
    max_micro_batch: int | None = None,
    memory_limit: MemoryLimit = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    split: SplitLike | None = None,
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
) -> Evaluation:
    """Return the loss and the metrics of a model on data, the same whatever the micro-batches of a mean, or of a sum.

    The model is evaluated where it lies, in eval mode, and left as it was: modes, buffers, gradients, random states.
    The loss of the first 15 samples is compared with that of their micro-batches. If they differ, micro-batches are
    joined: the loss is the mean over batches of max_micro_batch samples. Beside num_items or reduction, or where data
    are read but once, an AutoaccumWarning says how far it is off. Under several ranks each process that calls this
    evaluates all of the data.

    Args:
        model: the module, on its device; not sharded.
        data: as for ``fit``; read once, in its order.
        loss_fn: (outputs, targets) -> loss, for batches that are (inputs, targets).
        training_step: (model, batch) -> loss, for any batch. With neither, the model returns its loss.
        num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss.
        reduction: as for ``fit``: a "sum" beside num_items is divided by what these count in all of the data.
        metrics: names and functions (outputs, targets) -> one value per sample or item, as for ``fit``.
        precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
        max_micro_batch: the most samples to run at once; 1,024 when left out. Joined, the samples of a batch.
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
    given = locals()
    # The checks are those of fit, which asks for validation_data beside metrics: here data are that.
    checked = check({**given, "validation_data": data}, EACH, CHECKS)
    of: Any = "loss_fn" if loss_fn is not None else "training_step" if training_step is not None else "model"
    # Metrics that are modules are put into eval mode with the model, and run where it runs.
    held = [metric for metric in (metrics or {}).values() if isinstance(metric, nn.Module)]
    loss_of, num_items, _, _ = stated(checked[loss_function], num_items, reduction)
    # A validation tells what it has found as an event, whoever hears it.
    told: list[Event] = []
    announcer = Announcer(told.append)
    place = place_of(own_device(model), memory_limit)
    for module in held:
        module.to(place.device)
    context = autocast(precision, place.device)
    with current_device_kept(), being_current(place.device), place.limit.kept():
        validator = validator_of(
            ComparingValidator, model, [*modules_of(model, loss_fn, training_step), *held], given, checked[split_of],
            place, loss_of=loss_of, of_outputs=loss_fn is not None, num_items=num_items, autocast=context,
            emit=announcer.tell, is_stated=num_items is not None and reduction is not None,
            is_given=num_items is not None or reduction is not None, most=max_micro_batch or MOST,
            metrics=Metrics(metrics, model, of=of, autocast=context) if metrics else None,
        )  # fmt: skip
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


def validator_of(
    kind: Callable[..., V],
    model: nn.Module,
    modules: Sequence[nn.Module],
    given: Mapping[str, Any],
    split: Any,
    place: Place,
    **options: Any,
) -> V:
    """Return a validator of that kind, for one pass over data.

    Args:
        kind: ``Validator``, or one after it.
        model: which is run where it lies.
        modules: all that is run, and left as it was.
        given: the arguments of ``fit`` that say how data are read.
        split: what cuts them.
        place: where the model is, and what memory may be used there.
        options: what else such a validator takes.
    """
    # As a run is set up, but for all that training needs: nothing is moved, and nothing allocated ahead.
    source = open_source(
        given["data"], seed=0, shuffle=False, device=place.device, collate_fn=given["collate_fn"],
        num_workers=given["num_workers"], split=split,
    )  # fmt: skip
    metrics = (given.get("metrics") or {}).values()
    functions = [options["loss_of"], options["num_items"], given["collate_fn"], *metrics]
    # Its micro-batches are found anew in each call: what fits depends on what else there is by then.
    return kind(
        model, modules, source, device=place.device, memory=place.memory, limit=place.limit,
        limits=Limits(place.limit.bytes, HEADROOM), patience=_PATIENCE,
        snapshot=Snapshot(modules, place.device, functions), **options,
    )  # fmt: skip


def own_device(model: Any) -> torch.device:
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
    # Where the user has put it: to move it would leave an optimizer's state behind.
    tensors = [*model.parameters(), *model.buffers()]
    refuse_lazy(model, tensors)
    return device_of(model, tensors) or torch.device("cpu")
