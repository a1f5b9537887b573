"""Tells for which micro-batch an error was raised, and what fails because that has a single sample.

Statistics of one sample are such, and ``squeeze()``, which drops its dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autoaccum.data.batches import flatten
from autoaccum.errors import AutoaccumError
from autoaccum.memory.oom import is_out_of_memory, is_raised_by_hand

_SHOWN = 6
"""Name the shapes of so many tensors of a micro-batch at most."""


class SingleSampleError(Exception):
    """A single sample was refused: two of them may do."""

    def __init__(self, refused: Exception) -> None:
        """Take the error that it had."""
        super().__init__(str(refused))
        self.refused = refused


class Refusal(NamedTuple):
    """What was given up for micro-batches of two samples at least."""

    sizes: tuple[int, ...]
    """The plan, which held a single sample."""
    largest: int
    """The most that was known to fit."""
    error: Exception
    """What the single sample had; it pins nothing."""


def may_need_another(error: Exception) -> bool:
    """Return whether an error may be there for no more than that a micro-batch has one sample.

    Operations say so as errors of shapes. What a user's own ``raise`` says is meant for the user, and data that cannot
    be read stay so.
    """
    if not isinstance(error, IndexError | RuntimeError | TypeError | ValueError):
        return False
    if isinstance(error, AutoaccumError | torch.AcceleratorError) or is_out_of_memory(error):
        return False
    return not is_raised_by_hand(error)


def tell_micro_batch(error: Exception, batch: Any, size: int, num_samples: int) -> None:
    """Note on an error of the user's code the micro-batch that it was raised for, whose size nobody has chosen."""
    if isinstance(error, AutoaccumError) or is_out_of_memory(error):  # these say it themselves
        return
    shapes = [str(tuple(leaf.shape)) for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    shown = ", ".join([*shapes[:_SHOWN], *[f"and {len(shapes) - _SHOWN} more"] * (len(shapes) > _SHOWN)])
    of = "" if size == num_samples else f" of a window of {num_samples}"
    error.add_note(
        f"It was raised for a micro-batch of {size} sample{'s' * (size > 1)}{of}"
        + (f", of tensors {shown}." if shown else ".")
    )


def reason(error: Exception) -> str:
    """Return why plans change, from the error of a single sample."""
    lines = str(error).strip().splitlines() or [""]
    return f"a single sample cannot be computed: {type(error).__name__}: {lines[0]}"


def beyond_memory(error: Exception) -> Exception:
    """Return the error of a single sample, of which two did not fit: whether these would do nobody knows."""
    error.add_note("With micro-batches of two samples memory ran out.")
    return error
