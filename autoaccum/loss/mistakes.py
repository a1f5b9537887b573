"""Says what is wrong with what was returned as a loss, and what to return instead: nothing else decides by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Number
from typing import Any

import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError, NonScalarLossError

_NO_NUMBER = (
    "No gradient comes from a number: return the loss as the tensor that it is, without .item(), float() or .numpy(). "
    "A sum over none of several losses is a number as well, sum([]) == 0: begin it with outputs.sum() * 0."
)
_NOTHING = (
    'Where there is nothing of any of them, return one of 0 that depends on the model: {"name": outputs.sum() * 0}.'
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
    return _swapped(training_step, fact, of, rest)


def refuse_swapped(training_step: Callable[..., Any], model: Any, batch: Any, error: Exception) -> None:
    """Raise if a ``training_step`` has failed because the model came first, whatever its parameters are called.

    Raises:
        ArgumentTypeError: it computes a loss of them in another order, or has taken the model for a batch.
    """
    second = next(
        (name for name, given in (("model", model), ("0", 0)) if returns_loss(training_step, batch, given)), ""
    )
    if second or f"'{type(model).__name__}' object is not subscriptable" in str(error):
        fact = (
            f"training_step got the model first, as autoaccum calls training_step(model, batch), and failed: {error}."
        )
        raise _swapped(training_step, fact, "", [second] * bool(second)) from error


def _swapped(function: Callable[..., Any], fact: str, of: str, rest: list[str]) -> ArgumentTypeError:
    name = str(getattr(function, "__name__", ""))
    cure = f"Pass training_step=lambda model, batch: {of}{name}({', '.join(['batch', *rest])})"
    if not name.isidentifier() or not rest:
        cure = "Write it as training_step=lambda model, batch: ..., the model first."
    return ArgumentTypeError("training_step", function, "a function (model, batch) -> loss", cure, fact=fact)


def returns_loss(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a function that has failed with other arguments computes a loss of these."""
    try:
        return is_loss(function(*arguments))
    except Exception:  # it may do anything with what it was not made for
        return False


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
        return among_others(source, returned)
    if isinstance(returned, Mapping | list | tuple):
        return NonScalarLossError(source, f"no loss, in an empty {_kind(returned)}", _NOTHING)
    return NonScalarLossError(source, found, "Return the loss, as a tensor.")


def among_others(source: str, returned: Any) -> NonScalarLossError:
    """Return the error for losses in a dict, a list or a tuple that holds other things too."""
    entries = entries_of(returned)
    # Whether a gradient comes from it tells a loss from an accuracy, whatever these are called.
    losses = [name for name, entry in entries.items() if is_loss(entry)]
    others = [name for name in entries if name not in losses]
    found = f"a {_kind(returned)} of {_names(entries)}" if isinstance(returned, Mapping) else describe(returned)
    # Nearly always there is a loss among them, and the rest is what else a forward has shown.
    odd = next((name for name, entry in entries.items() if not _is_scalar(entry)), None)
    if odd is not None and not (isinstance(returned, Mapping) and "loss" in losses):
        found += f" whose {odd!r} is {describe(entries[odd])}"
    if not losses:
        has_numbers = all(map(is_number, entries.values()))
        cure = _NO_NUMBER if has_numbers else "Return the loss, a scalar tensor that depends on the parameters."
        return NonScalarLossError(source, found, cure)
    # Of some ``loss`` is one of several, of others the sum of all, or a loss beside things to look at.
    if isinstance(returned, Mapping) and "loss" in losses:
        beside = [name for name in entries if name != "loss"]
        cure = f"If 'loss' is what is trained on, {_written(returned, ['loss'], beside)}."
        # As the outputs for each word of texts, which are padded to another length in each micro-batch.
        if any(not _is_scalar(entries[name]) for name in beside):
            cure += " Leave out what has another shape for each batch."
        if len(losses) > 1:
            cure += " If all losses are to be added, let none of them be named 'loss'."
        return NonScalarLossError(source, found, cure)
    cure = "Losses that are added are scalars with a gradient. Beside them goes what is to be seen: "
    # One may be meant all the same: a part of the model is frozen, say.
    is_added = not isinstance(returned, list) and odd is None and all(map(_is_scalar, entries.values()))
    also = " To add it although no gradient comes from it, return a list." if is_added else ""
    return NonScalarLossError(source, found, f"{cure}{_written(returned, losses, others)}.{also}")


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


def _written(returned: Any, losses: list[str], others: list[str]) -> str:
    """Return the statement to write instead."""
    name: Callable[[str], str] = str if isinstance(returned, Mapping) else partial(_place, losses)
    # Short, for it is to be copied: the names are those of the entries, and not those of variables nobody knows.
    first = " + ".join(map(name, losses)) if len(losses) < 4 else "the sum of the losses"
    beside = ", ".join(f'"{name(other)}": ...' for other in others[:3])
    return f"return {first}, {{{beside}}}" if others else f"return {first}"


def _place(losses: list[str], index: str) -> str:
    """Return a name for what stands at a place of a tuple."""
    return "loss" if losses[:1] == [index] else f"output_{index}"
