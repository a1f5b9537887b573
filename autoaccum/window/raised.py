"""Tells for which micro-batch an error of the user's code was raised."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoaccum.errors import AutoaccumError
from autoaccum.memory.oom import is_out_of_memory

_SHOWN = 6
"""Name the shapes of so many tensors of a micro-batch at most."""


def tell_micro_batch(error: Exception, leaves: Iterable[object], size: int, num_samples: int) -> None:
    """Note on an error of the user's code the micro-batch that it was raised for, whose size nobody has chosen."""
    if isinstance(error, AutoaccumError) or is_out_of_memory(error):  # these say it themselves
        return
    shapes = [str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    shown = ", ".join([*shapes[:_SHOWN], *[f"and {len(shapes) - _SHOWN} more"] * (len(shapes) > _SHOWN)])
    of = "" if size == num_samples else f" of a window of {num_samples}"
    error.add_note(
        f"It was raised for a micro-batch of {size} sample{'s' * (size > 1)}{of}"
        + (f", of tensors {shown}." if shown else ".")
    )
