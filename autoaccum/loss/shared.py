"""What ``before_window`` returns, on its way to the user's functions: in the micro-batch, or as one more argument."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from autoaccum import _checks
from autoaccum.errors import ArgumentTypeError

Gives = Literal["merged", "third", "either"]
"""How it reaches what computes the loss: within the micro-batch, as a third argument, or within where that can be."""


class Beside(NamedTuple):
    """A micro-batch with what ``before_window`` has returned for its window."""

    batch: Any
    """The micro-batch, with the entries of ``shared`` where these are merged into it."""
    shared: Any
    """What was returned: its rows of these samples, and all that belongs to the whole window."""
    is_merged: bool
    """Whether the batch holds all of it, so that no function needs it as an argument of its own."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return what stands behind the batch where a function is called: nothing, or what is shared."""
        return () if self.is_merged else (self.shared,)


@dataclass(frozen=True, kw_only=True, slots=True)
class BeforeWindow:
    """A ``before_window`` of the user's, and how what it returns reaches micro-batches."""

    function: Callable[..., Any]
    """(batch), or (batch, in_pieces), -> what micro-batches get."""
    takes_pieces: bool
    """Whether it wants ``in_pieces``, to run the model on the window."""
    gives: Gives
    """How micro-batches get it."""


def before_window_of(
    before_window: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
) -> BeforeWindow | None:
    """Return what is to be done before each window, as the signatures of these functions have it; None for nothing.

    Raises:
        ArgumentTypeError: it is no function of one or two arguments, or a loss_fn does not take what it returns.
    """
    if before_window is None:
        return None
    _checks.no_class("before_window", before_window, "a function")
    names = _checks.positional(before_window)
    takes_pieces = names is not None and (names.required == 2 or names.second == "in_pieces")
    parameters = ("batch", "in_pieces") if takes_pieces else ("batch",)
    cure = "It is called with all samples of a window; a second parameter is given in_pieces, which runs the model."
    _checks.function("before_window", before_window, parameters, "what micro-batches get", cure)
    return BeforeWindow(function=before_window, takes_pieces=takes_pieces, gives=_gives_of(loss_fn, training_step))


def _gives_of(loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None) -> Gives:
    # A loss_fn sees outputs and targets, and nothing of a batch that anything could be merged into.
    if loss_fn is not None:
        return "third"
    if training_step is None:
        return "merged"
    names = _checks.positional(training_step)
    if names is None:
        return "either"
    if names.required >= 3:
        return "third"
    return "either" if names.most >= 3 else "merged"


def joined(before: BeforeWindow, batch: Any, shared: Any) -> Beside:
    """Return a micro-batch with its part of what ``before_window`` has returned.

    Raises:
        ArgumentTypeError: there is no way to hand it on.
    """
    if before.gives == "third":
        return Beside(batch, shared, is_merged=False)
    if shared is None:  # there is nothing to hand on
        return Beside(batch, None, is_merged=True)
    if isinstance(batch, Mapping) and isinstance(shared, Mapping):
        return Beside(_merged(batch, shared), shared, is_merged=True)
    if before.gives == "either":
        return Beside(batch, shared, is_merged=False)
    found = f"{type(shared).__name__} beside a batch of type {type(batch).__name__}"
    cure = (
        "Entries are merged into batches that are mappings. Anything else is the third argument of a "
        "training_step=(model, batch, shared), or of a loss_fn=(outputs, targets, shared)."
    )
    raise ArgumentTypeError(
        "before_window", found, "a function that returns a mapping where batches are mappings", cure
    )


def _merged(batch: Mapping[Any, Any], shared: Mapping[Any, Any]) -> Any:
    """Return a batch of the same type with those entries, in place of its own of the same names."""
    if not isinstance(batch, MutableMapping):
        return {**batch, **shared}
    found = copy.copy(batch)
    for name, value in shared.items():
        found[name] = value
    return found


def plain(batch: Any) -> Any:
    """Return a micro-batch without what stands beside it."""
    return batch.batch if isinstance(batch, Beside) else batch


def counting(num_items: Any) -> Any:
    """Make a ``num_items`` that takes what micro-batches come in.

    One of one parameter is called with the micro-batch, merged or not, one of two with what is shared besides. Of
    several by name, each is made one.
    """
    if isinstance(num_items, Mapping):
        return {name: counting(one) for name, one in num_items.items()}
    if num_items is None:
        return None
    names = _checks.positional(num_items)
    if names is not None and names.required >= 2:
        return lambda given: num_items(given.batch, given.shared)
    return lambda given: num_items(plain(given))
