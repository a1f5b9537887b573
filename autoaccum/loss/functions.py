"""Makes one function (model, batch) -> loss of the three ways to say what the loss of a batch is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from traceback import walk_tb
from typing import Any

import torch

from autoaccum import _checks
from autoaccum.errors import (
    ArgumentTypeError,
    ConflictingArgumentsError,
    DataError,
    LossWithoutGradError,
    NonScalarLossError,
)
from autoaccum.loss import mistakes
from autoaccum.loss.counting import count_items, never_zero
from autoaccum.loss.stated import Computed, CountItems, LossOf, Reducing
from autoaccum.loss.terms import divisor_of
from autoaccum.loss.types import mistaken


def loss_function(
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
) -> LossOf:
    """Make the loss of a batch of ``loss_fn(outputs, targets)``, ``training_step(model, batch)`` or the model itself.

    A model is called with a mapping's values as keywords, a tuple's or list's as positional arguments, and anything
    else as its one argument.

    Raises:
        ConflictingArgumentsError: both functions are given.
        ArgumentTypeError: one is no function.
    """
    # loss_fn=nn.MSELoss, without the parentheses, can be called, and would fail only in the first micro-batch.
    for name, given, two in (
        ("loss_fn", loss_fn, ("outputs", "targets")),
        ("training_step", training_step, ("model", "batch")),
    ):
        if given is not None:
            _checks.no_class(name, given, "a function")
            takes = _checks.positional(given)
            names = () if takes is None else takes.names
            if name == "training_step" and (swapped := mistakes.in_order(given, names)) is not None:
                raise swapped
            _checks.function(name, given, two, "loss")
    # With neither of them the model has to return its loss, which shows when it is called for the first time.
    if loss_fn is not None and training_step is not None:
        raise ConflictingArgumentsError(
            "training_step", training_step, "loss_fn", "A training_step computes the whole loss: leave loss_fn out."
        )
    return _explaining(_loss_of(loss_fn, training_step), loss_fn, training_step)


def _loss_of(loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None) -> LossOf:
    """Make the loss of one of the three ways; each checks what it gets, so that errors name what the user passed."""
    if loss_fn is not None:

        def by_loss_fn(model: Any, batch: Any) -> torch.Tensor | Computed:
            inputs, targets = inputs_and_targets(batch)
            return checked(loss_fn(call(model, inputs), targets), "loss_fn")

        return by_loss_fn
    if training_step is not None:
        return lambda model, batch: checked(training_step(model, batch), "training_step")
    return lambda model, batch: checked(_model_loss(call_on_batch(model, batch)), "the model")


def _explaining(
    loss_of: LossOf, loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None
) -> LossOf:
    """Make the same loss, whose errors of types name the part of a batch that is of another type, or the function."""

    def explaining(model: Any, batch: Any) -> torch.Tensor | Computed:
        # A try costs nothing until something is raised.
        try:
            return loss_of(model, batch)
        except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
            if training_step is not None and isinstance(error, TypeError | AttributeError):
                mistakes.refuse_swapped(training_step, model, batch, error)
            if loss_fn is not None and isinstance(error, TypeError) and mistakes.returns_loss(loss_fn, model, batch):
                cure = "It returns a loss for (model, batch), as a training_step does: pass training_step=."
                raise ArgumentTypeError("loss_fn", loss_fn, "a function (outputs, targets) -> loss", cure) from error
            if (found := mistaken(error, model, batch)) is None:
                raise
            raise found from error

    return explaining


def stated(
    loss_of: LossOf, num_items: CountItems | None, reduction: Reducing
) -> tuple[LossOf, CountItems | None, Reducing, bool]:
    """Return the loss, what is said of it, and whether that is a sum which is divided by what the user counts.

    Such a sum is a mean then.
    """
    if num_items is None or reduction != "sum":
        return loss_of, num_items, reduction, False
    # A sum over the window's count is a mean over it, and means are what is weighed. One of a micro-batch that counts
    # nothing belongs to the window's too, as that over all anchors beside a count of those that are an object's.
    counting: CountItems = never_zero(num_items)

    def divided(model: Any, batch: Any) -> torch.Tensor | Computed:
        computed, counted = loss_of(model, batch), count_items(counting, batch)
        if not isinstance(counted, dict):
            if isinstance(computed, Computed):
                return computed._replace(loss=computed.loss / divisor_of(counted), terms={})
            return computed / divisor_of(counted)
        if not isinstance(computed, Computed):
            raise NonScalarLossError("num_items", f"a count for each of {', '.join(counted)}, beside one loss")
        divisors = {name: divisor_of(items) for name, items in counted.items()}
        terms = {name: loss / divisors[name] if name in divisors else loss for name, loss in computed.terms.items()}
        # Numbers in the place of losses are not divided.
        return computed._replace(loss=reduce(add, terms.values()) + computed.rest, terms=terms)

    return divided, counting, None, True


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Split a batch for ``loss_fn`` into what the model is called with and what its outputs are compared with.

    Raises:
        DataError: the batch is no pair.
    """
    # A list is what default_collate makes of pairs. A dict is not taken apart: which entry is the target, nothing says.
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    has_labels = isinstance(batch, Mapping) and "labels" in batch  # as those of models that compute their loss
    leave_out = " Leave loss_fn out where the model returns its loss, as .loss or ['loss']." if has_labels else ""
    raise DataError(
        f"data: with loss_fn, batches are (inputs, targets), but this one is {mistakes.describe(batch)}. Let the data "
        f"yield pairs, or pass training_step=(model, batch) -> loss, which takes any batch.{leave_out}"
    )


def call(model: Any, inputs: Any) -> Any:
    """Return the model's outputs for one micro-batch of inputs.

    Raises:
        DataError: its ``forward`` takes other arguments than these.
    """
    try:
        if isinstance(inputs, torch.Tensor):  # by far the most frequent, and there are micro-batches of 100 µs
            return model(inputs)
        positional, keywords = _arguments(inputs)
        return model(*positional, **keywords)
    except TypeError as error:
        if not _is_misfit(model, inputs, error):
            raise
        # What is none of these is one argument, as a tensor is.
        cure = "If forward takes several, let the inputs be a tuple of them, or pass"
        if isinstance(inputs, Mapping):
            cure = _left_out(model, inputs)
        elif isinstance(inputs, tuple | list):
            cure = f"A {type(inputs).__name__} is passed on as an argument each: make one tensor of it, or pass"
        raise DataError(
            f"data: the model was called with the inputs of a batch, {mistakes.describe(inputs)}, and cannot take them "
            f"({error}). {cure} training_step=(model, batch) -> loss."
        ) from None


def _arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the positional arguments and the keywords by which a model is called with inputs."""
    # As the batches of Hugging Face's tokenizers and models are.
    if isinstance(inputs, Mapping):
        return (), inputs
    # Texts are one argument: a model that takes each of a batch for itself would have another signature each time.
    if isinstance(inputs, tuple | list) and not (inputs and all(isinstance(entry, str) for entry in inputs)):
        return inputs, {}
    return (inputs,), {}


_NO_LOSS = ", because neither loss_fn nor training_step was given"
_IF_NO_LOSS = "Pass loss_fn=(outputs, targets) -> loss, or a training_step."


def call_on_batch(model: Any, batch: Any, *, why: str = _NO_LOSS, cure: str | None = None) -> Any:
    """Call the model with a whole batch; say, when it cannot take one, why that was done and what cures it.

    Left out, the cure is that of a run whose model has to return its loss.
    """
    positional, keywords = _arguments(batch)
    try:
        return model(*positional, **keywords)
    except TypeError as error:
        if not _is_misfit(model, batch, error):
            raise
        if cure is None and keywords:  # which loss_fn does not take apart
            cure = f"{_left_out(model, keywords)} training_step=(model, batch) -> loss."
        raise DataError(
            f"data: the model was called with all of a batch, {mistakes.describe(batch)}{why}, and cannot take it "
            f"({error}). {cure or _IF_NO_LOSS}"
        ) from None


def _is_misfit(model: Any, inputs: Any, error: TypeError) -> bool:
    """Return whether a model has no such arguments: it raises TypeErrors for reasons of its own, too."""
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps, and takes anything for
    # A module with a call of its own may make other arguments of these, and so may a hook: then forward was begun.
    if not isinstance(bare, torch.nn.Module) or type(bare).__call__ is not torch.nn.Module.__call__:
        return False
    code = getattr(bare.forward, "__code__", None)
    if any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__)):
        return False
    positional, keywords = _arguments(inputs)
    try:
        signature = inspect.signature(bare.forward)
    except ValueError:  # that of a builtin
        return False
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        return True
    return False


def _left_out(model: Any, keywords: Mapping[str, Any]) -> str:
    """Return the beginning of a cure: which keywords a model does not know."""
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    extra = [repr(name) for name in keywords if not takes_any and name not in parameters]
    return f"Leave {' and '.join(extra)} out of the data, or pass" if extra else "Pass"


def _model_loss(outputs: Any) -> Any:
    """Take the loss out of a model's outputs: their ``loss``, or all of them when they are one number."""
    if _has_outputs(outputs):
        return outputs
    # Hugging Face's outputs are mappings with attributes, in which a loss that was not computed is None.
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0:
        return outputs
    # Those of detection models are a dict of losses while they train.
    scalars = list(outputs.values()) if isinstance(outputs, Mapping) and "loss" not in outputs else []
    if scalars and all(isinstance(scalar, torch.Tensor) and not scalar.ndim for scalar in scalars):
        return outputs
    # Hugging Face models have a loss of None when the batch holds no labels: another cure than for one without any.
    found = f"{mistakes.describe(outputs)} without a .loss or ['loss'] (neither loss_fn nor training_step was given)"
    raise mistakes.in_outputs(outputs, found)


def checked(computed: Any, source: str) -> torch.Tensor | Computed:
    """Return a loss that can be trained on; ``source`` is what made it, as errors name it."""
    # Nearly every loss: the rest finds out what else it is, or the words for what is wrong with it.
    if (
        isinstance(computed, torch.Tensor)
        and computed.requires_grad
        and not computed.ndim
        and not computed.is_complex()
    ):
        return computed
    if _has_outputs(computed):
        # The same for the loss that something stands beside, for there are micro-batches of 100 µs.
        loss, outputs = computed
        if isinstance(loss, torch.Tensor) and loss.requires_grad and not loss.ndim and not loss.is_complex():
            return Computed(loss, {}, outputs)
        return _losses(loss, source)._replace(outputs=outputs)
    found = _losses(computed, source)
    return found if found.terms else found.loss


def _has_outputs(computed: Any) -> bool:
    """Return whether something is returned beside a loss: ``loss, {"accuracy": ...}``."""
    return isinstance(computed, tuple) and len(computed) == 2 and isinstance(computed[1], Mapping)


def _losses(computed: Any, source: str) -> Computed:
    """Return a loss, or the sum of several that are given by their names or one after the other."""
    # By names, or by places: a term keeps its name from micro-batch to micro-batch.
    terms: dict[str, Any] = {}
    if isinstance(computed, Mapping | list | tuple) and computed:
        terms = mistakes.entries_of(computed)
    if isinstance(computed, Mapping) and "loss" in computed and len(computed) > 1:
        raise mistakes.among_others(source, computed)
    # A number stands where there is nothing to compute a loss of: it is added, and weighs nothing.
    numbers = [term for term in terms.values() if isinstance(term, int | float)]
    losses = {name: term for name, term in terms.items() if not isinstance(term, int | float)}
    for term in losses.values():
        if not isinstance(term, torch.Tensor) or term.ndim:
            raise mistakes.among_others(source, computed)
    # A tuple is what Python makes of ``return loss, accuracy``, and in a dict an accuracy may stand beside losses.
    # Where nothing is added there is nothing wrong: a micro-batch has no samples for a term.
    is_seen = isinstance(computed, tuple | Mapping) and torch.is_grad_enabled()
    found = sum(map(mistakes.is_loss, terms.values())) if is_seen else 0
    if 0 < found < len(terms) and any(map(float, (t for t in terms.values() if not mistakes.is_loss(t)))):
        raise mistakes.among_others(source, computed)
    loss = reduce(add, numbers, reduce(add, losses.values())) if losses else computed
    if not isinstance(loss, torch.Tensor) or loss.ndim or loss.is_complex():
        raise mistakes.wrong(source, loss)
    # A model in inference mode, frozen or detached, would train nothing, and say so nowhere else.
    if torch.is_grad_enabled() and not loss.requires_grad:  # in validation no loss needs a gradient
        raise LossWithoutGradError(source)
    return Computed(loss, losses, rest=float(sum(numbers)) if losses else 0.0)
