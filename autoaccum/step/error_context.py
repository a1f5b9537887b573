"""Names the micro-batch in which the user's code raised; recognises errors of micro-batches of one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.utils.checkpoint import CheckpointError
from torch.utils.data import default_collate

from autoaccum.errors import AutoaccumError
from autoaccum.memory.oom import is_out_of_memory, is_raised_by_hand

_RUNNING = ("autoaccum was running ", "autoaccum had split ")
_READ_TO_THE_END = (
    "The step has read data of its own to their end. It runs more often than there are batches, for it is measured: "
    "put such data into the batch, as by zip(loader, other)."
)
_SHOWN = 6
"""Name the shapes of so many tensors of a micro-batch at most."""


def of_window(start: int, size: int, num_samples: int) -> str:
    """Return what was running, for ``tell_micro_batch``: a micro-batch of a window of so many samples."""
    if size == num_samples:
        return f"was running all {size} samples of the step" if size > 1 else "was running the step's one sample"
    which = f"sample {start}" if size == 1 else f"samples {start} to {start + size - 1}"
    return f"had split the step's {num_samples} samples and was running a micro-batch of {size} ({which})"


def tell_micro_batch(
    error: Exception, leaves: Callable[[], Iterable[object]], running: str, *, collate_fn: object = None
) -> None:
    """Note on an error what autoaccum was running, where the size is its own choice.

    What a ``raise`` says of the full batch is whole as it is.

    Args:
        error: that was raised.
        leaves: () -> what the micro-batch consists of.
        running: what was running.
        collate_fn: what made the micro-batch of samples, where anything did.
    """
    if isinstance(error, StopIteration):  # of an iterator of the user's
        _note(error, _READ_TO_THE_END)
    is_part = running.startswith("had split")
    if isinstance(error, AutoaccumError) or is_out_of_memory(error) or (is_raised_by_hand(error) and not is_part):
        return
    # What the user's code has made of the batch, or the user's class of the error, is not to hide the error itself.
    with suppress(Exception):
        shapes = [_described(leaf) for leaf in leaves() if isinstance(leaf, torch.Tensor)]
        shown = ", ".join([*shapes[:_SHOWN], *[f"and {len(shapes) - _SHOWN} more"] * (len(shapes) > _SHOWN)])
        told = f"autoaccum {running}{', of shapes ' * bool(shown)}{shown}."
        if is_part and collate_fn in (None, default_collate):  # another one may pad
            told += " The full batch differs in the number of samples only."
        _note(error, told)


def _note(error: Exception, told: str) -> None:
    if told not in getattr(error, "__notes__", ()):
        error.add_note(told)


def _described(tensor: torch.Tensor) -> str:
    """Return a tensor's shape, its type if it is an unusual one, and the range of whole numbers.

    A class or a token beyond the last is in no shape; NumPy's numbers are float64, and a model's weights float32.

    >>> _described(torch.zeros(2, 3)), _described(torch.tensor([4, 0, 7])), _described(torch.zeros(2).double())
    ('(2, 3)', '(3,) with values 0 to 7', '(2,) of float64')
    """
    is_usual = tensor.dtype in (torch.float32, torch.int64)
    shape = str(tuple(tensor.shape)) + f" of {str(tensor.dtype).removeprefix('torch.')}" * (not is_usual)
    # A device on which an operation has failed may answer nothing more.
    with suppress(Exception):
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
            least, most = (int(end) for end in torch.aminmax(tensor))
            return f"{shape} with values {least} to {most}"
    return shape


def is_told(error: BaseException) -> bool:
    """Return whether it was noted on an error which micro-batch it was raised for: then the user's code has failed."""
    notes = getattr(error, "__notes__", None) or ()
    return any(isinstance(note, str) and note.startswith(_RUNNING) for note in notes)


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
