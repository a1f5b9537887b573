"""Makes one function (model, batch) -> loss of what users pass, and explains what is wrong with what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from numbers import Number
from operator import add
from traceback import walk_tb
from typing import Any

import torch

from autoaccum import _checks
from autoaccum.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConflictingArgumentsError,
    DataError,
    LossWithoutGradError,
    NonScalarLossError,
)
from autoaccum.step.item_counts import count_items, never_zero
from autoaccum.step.terms import Computed, CountItems, LossOf, Reducing, divisor_of


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
            if name == "training_step" and (swapped := in_order(given, names)) is not None:
                raise swapped
            _checks.function(name, given, two, "loss")
    # With neither of them the model has to return its loss, which shows when it is called for the first time.
    if loss_fn is not None and training_step is not None:
        raise ConflictingArgumentsError(
            "training_step", training_step, "loss_fn", "A training_step computes the whole loss: leave loss_fn out."
        )
    if loss_fn is not None:

        def by_loss_fn(model: Any, batch: Any) -> torch.Tensor | Computed:
            inputs, targets = batch if type(batch) is tuple and len(batch) == 2 else inputs_and_targets(batch)
            return checked(loss_fn(call(model, inputs), targets), "loss_fn")

        return by_loss_fn
    if training_step is not None:
        return lambda model, batch: checked(training_step(model, batch), "training_step")
    return lambda model, batch: checked(_model_loss(call_on_batch(model, batch)), "the model")


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
        f"data: with loss_fn, batches are (inputs, targets), but this one is {describe(batch)}. Let the data "
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
            f"data: the model was called with the inputs of a batch, {describe(inputs)}, and cannot take them "
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
            f"data: the model was called with all of a batch, {describe(batch)}{why}, and cannot take it "
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
    found = f"{describe(outputs)} without a .loss or ['loss'] (neither loss_fn nor training_step was given)"
    raise in_outputs(outputs, found)


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
        terms = entries_of(computed)
    if isinstance(computed, Mapping) and "loss" in computed and len(computed) > 1:
        raise error_for_several(source, computed)
    # A number stands where there is nothing to compute a loss of: it is added, and weighs nothing.
    numbers = [term for term in terms.values() if isinstance(term, int | float)]
    losses = {name: term for name, term in terms.items() if not isinstance(term, int | float)}
    for term in losses.values():
        if not isinstance(term, torch.Tensor) or term.ndim:
            raise error_for_several(source, computed)
    # A tuple is what Python makes of ``return loss, accuracy``, and in a dict an accuracy may stand beside losses.
    # Where nothing is added there is nothing wrong: a micro-batch has no samples for a term.
    is_seen = isinstance(computed, tuple | Mapping) and torch.is_grad_enabled()
    found = sum(map(is_loss, terms.values())) if is_seen else 0
    if 0 < found < len(terms) and any(map(float, (t for t in terms.values() if not is_loss(t)))):
        raise error_for_several(source, computed)
    loss = reduce(add, numbers, reduce(add, losses.values())) if losses else computed
    if not isinstance(loss, torch.Tensor) or loss.ndim or loss.is_complex():
        raise wrong(source, loss)
    # A model in inference mode, frozen or detached, would train nothing, and say so nowhere else.
    if torch.is_grad_enabled() and not loss.requires_grad:  # in validation no loss needs a gradient
        raise LossWithoutGradError(source)
    return Computed(loss, losses, rest=float(sum(numbers)) if losses else 0.0)


_NO_NUMBER = (
    "No gradient comes from a number: return the loss as the tensor that it is, without .item(), float() or .numpy(). "
    "A sum over none of several losses is a number as well, sum([]) == 0: begin it with outputs.sum() * 0."
)
_NOTHING = (
    'Where there is nothing of any of them, return one of 0 that depends on the model: {"name": outputs.sum() * 0}.'
)
_ONE_OR_SEVERAL = (
    'Return the loss, and beside it a dict of numbers to record: return loss, {"accuracy": ...}. Losses to be added go '
    "in a dict of scalars with a gradient, none of them named 'loss', or in a list, which may hold constants."
)
_COMPLEX = "Return a real number of it, for example with .abs() or .real."
_INDICES = ("batch_idx", "batch_index", "batch_nb")
"""What other trainers call the number of a batch, which follows it."""
_SHOWN = 12
"""Name so many entries of a dict at most."""


def in_order(training_step: Callable[..., Any], names: tuple[str, ...]) -> ArgumentTypeError | None:
    """Return the error for a ``training_step`` whose parameters are named for another order; None where they are not.

    Others have (batch, batch_idx), as a method of a LightningModule, or (batch, model).
    """
    # What wraps another function, as a decorator does, has the other's names and may have an order of its own.
    if hasattr(training_step, "__wrapped__") or names[:1] == ("model",):
        return None
    second, third = (*names[1:3], "", "")[:2]
    is_unbound = names[:2] == ("self", "batch") and third in _INDICES  # of the class, and not of an object of it
    if names != ("batch",) and second not in ("model", *_INDICES) and not is_unbound:
        return None
    of = "model." if is_unbound or isinstance(getattr(training_step, "__self__", None), torch.nn.Module) else ""
    rest = ["model" if name == "model" else "0" for name in names[1 + is_unbound :]]
    fact = f"training_step takes ({', '.join(names)}), but autoaccum calls training_step(model, batch)."
    name = str(getattr(training_step, "__name__", ""))
    cure = f"Pass training_step=lambda model, batch: {of}{name}({', '.join(['batch', *rest])})"
    if not name.isidentifier() or not rest:
        cure = "Write it as training_step=lambda model, batch: ..., the model first."
    return ArgumentTypeError("training_step", training_step, "a function (model, batch) -> loss", cure, fact=fact)


def wrong(source: str, returned: Any) -> NonScalarLossError:
    """Return the error for what is no loss and no several ones; ``source`` is what has returned it."""
    # In the order of how sure it is what was meant.
    found = describe(returned)
    if returned is None:
        return NonScalarLossError(source, "nothing", "End it with a return of the loss.")
    if isinstance(returned, torch.Tensor):
        if returned.is_complex() and not returned.ndim:
            return NonScalarLossError(source, "a complex number", _COMPLEX)
        return NonScalarLossError(source, found, _reduced(returned))
    if is_number(returned):
        return NonScalarLossError(source, found, _NO_NUMBER)
    # As the outputs of models are, which a training_step has to look into itself.
    if isinstance(getattr(returned, "loss", None), torch.Tensor):
        return NonScalarLossError(source, found, "Return its loss: return outputs.loss.")
    if isinstance(returned, Mapping | list | tuple) and returned:
        return error_for_several(source, returned)
    if isinstance(returned, Mapping | list | tuple):
        return NonScalarLossError(source, f"no loss, in an empty {_kind(returned)}", _NOTHING)
    return NonScalarLossError(source, found, "Return the loss, as a tensor.")


def error_for_several(source: str, returned: Any) -> NonScalarLossError:
    """Return the error for a dict, list or tuple that is not clearly one loss or several."""
    entries = entries_of(returned)
    found = f"a {_kind(returned)} of {_names(entries)}" if isinstance(returned, Mapping) else describe(returned)
    odd = next((name for name, entry in entries.items() if not _is_scalar(entry)), None)
    if odd is not None:
        found += f" whose {odd!r} is {describe(entries[odd])}"
    if any(map(is_loss, entries.values())):
        return NonScalarLossError(source, found, _ONE_OR_SEVERAL)
    has_numbers = all(map(is_number, entries.values()))
    cure = _NO_NUMBER if has_numbers else "Return the loss, a scalar tensor that depends on the parameters."
    return NonScalarLossError(source, found, cure)


def in_outputs(outputs: Any, found: str) -> NonScalarLossError:
    """Return the error for a model's outputs that hold a loss somewhere, or none.

    Args:
        outputs: what the model returned.
        found: that in words.
    """
    # Of a tuple nothing says that one of its numbers is the loss, so that it is for the user to say.
    if isinstance(outputs, tuple | list):
        places = [index for index, entry in enumerate(outputs) if is_loss(entry)]
        if len(places) == 1:
            cure = f"Say that it is the one at {places[0]}: training_step=lambda model, batch: "
            return NonScalarLossError("the model", found, f"{cure}model(*batch)[{places[0]}].")
    # Hugging Face's outputs are mappings with attributes, in which a loss that was not computed is None.
    if hasattr(outputs, "loss") or (isinstance(outputs, Mapping) and "loss" in outputs):
        return NonScalarLossError("the model", found, "Its loss is None: do the batches hold labels?")
    return NonScalarLossError(
        "the model",
        found,
        "Pass loss_fn or training_step; Hugging Face models compute a loss when the batch has labels.",
    )


def refuse_unknown(counted: Mapping[str, Any], terms: Mapping[str, torch.Tensor]) -> None:
    """Refuse counts of none of the losses that were returned: some may be absent, where there is nothing of them.

    Raises:
        ArgumentError: they are all of other names.
    """
    if counted and terms and counted.keys().isdisjoint(terms):
        raise ArgumentError("num_items", list(counted), f"names of the losses that were returned, {_names(terms)}")


def entries_of(returned: Any) -> dict[str, Any]:
    """Return what a dict, a list or a tuple holds, by names, or by places."""
    pairs = returned.items() if isinstance(returned, Mapping) else enumerate(returned)
    return {str(name): entry for name, entry in pairs}


def is_loss(entry: object) -> bool:
    """Return whether something is a scalar that a gradient comes from."""
    return isinstance(entry, torch.Tensor) and not entry.ndim and entry.requires_grad


def is_number(value: object) -> bool:
    """Return whether something is a number or an array of NumPy or Python, which has no gradient."""
    # By the module, for NumPy has a class for each of its numbers, and none of them has a gradient.
    return isinstance(value, Number) or type(value).__module__ == "numpy"


def describe(value: object) -> str:
    """Say in a few words what a value is, for an error: its own repr may hold thousands of numbers."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a value of type {type(value).__name__}"


def _is_scalar(entry: object) -> bool:
    return isinstance(entry, int | float) or (isinstance(entry, torch.Tensor) and not entry.ndim)


def _names(entries: Mapping[str, Any]) -> str:
    """Return the names of what a dict holds, and not all of very many."""
    return ", ".join([*map(repr, list(entries)[:_SHOWN]), *["..."] * (len(entries) > _SHOWN)])


def _kind(returned: object) -> str:
    return type(returned).__name__


def _reduced(tensor: torch.Tensor) -> str:
    """Return how to make a scalar of a tensor."""
    # A mean for one of one element too: as likely as not it is the loss of the one sample of a micro-batch.
    if tensor.ndim > 1:
        return "Reduce it, for example with .mean(); if these are outputs of the model, compute a loss of them."
    return "Reduce it, for example with .mean(); with reduction='none' a loss has a number for each sample."
