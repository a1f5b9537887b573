"""Tells what fails because a micro-batch has a single sample: statistics of one, and ``squeeze()``, which drops it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError

from autoaccum.memory.oom import is_out_of_memory, is_raised_by_hand


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

    Operations say so as errors of shapes, libraries by assertions and errors of their own.
    """
    is_own = type(error).__module__.partition(".")[0] == "autoaccum" or isinstance(error, CheckpointError)
    return not (is_own or isinstance(error, torch.AcceleratorError | StopIteration) or is_out_of_memory(error))


def reason(error: Exception) -> str:
    """Return why plans change, from the error of a single sample."""
    lines = str(error).strip().splitlines() or [""]
    return f"a single sample cannot be computed: {type(error).__name__}: {lines[0]}"


def of_one(error: Exception, num_samples: int) -> None:
    """Let a window of so many samples be cut anew, for one of them was refused; note on the error where it is all.

    Raises:
        SingleSampleError: there are others.
    """
    if num_samples > 1:
        raise SingleSampleError(error) from error
    if is_raised_by_hand(error):  # which says what it has to say
        return
    error.add_note(
        "The window has one sample in all. Where that is what an epoch leaves, drop_last=True leaves it out, and "
        "another effective batch may leave more than one."
    )


def beyond_memory(error: Exception) -> Exception:
    """Return the error of a single sample, of which two did not fit: whether these would do nobody knows."""
    error.add_note("It was raised for a micro-batch of one sample; with two of them memory ran out.")
    return error
