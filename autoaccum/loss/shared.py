"""What ``before_window`` returns, on its way to the user's functions: in the micro-batch, or as one more argument."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

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


class Sharer(Protocol):
    """What calls a ``before_window``: ``window.before`` has it, and what runs windows need not know how."""

    def begin(self, window: Any) -> Any:
        """Return a window that is prepared before its first micro-batch; all of them share what comes of that."""

    def alone(self, batch: Any) -> Beside:
        """Return a batch as the one micro-batch of a window of its own."""


def joined(before: BeforeWindow, batch: Any, shared: Any) -> Beside:
    """Return a micro-batch with its part of what ``before_window`` has returned.

    Raises:
        ArgumentTypeError: there is no way to hand it on.
    """
    # Where it is asked for by an argument of its own it is not merged as well: entries that a model does not know would
    # be keywords that it does not take.
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
    # A copy of the mapping and not of what is in it. In place, a batch that is used twice would be merged twice.
    if not isinstance(batch, MutableMapping):
        return {**batch, **shared}
    found = copy.copy(batch)
    for name, value in shared.items():
        found[name] = value
    return found


def plain(batch: Any) -> Any:
    """Return a micro-batch without what stands beside it."""
    return batch.batch if isinstance(batch, Beside) else batch
