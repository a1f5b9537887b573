"""Optimizers that Hugging Face Accelerate has prepared, for an ``Accumulator``."""

from __future__ import annotations

from typing import Any

from autoaccum.errors import ConflictingArgumentsError


def unprepared(optimizer: Any) -> Any:
    """Return the optimizer within one that Accelerate has prepared; any other as it is.

    Raises:
        ConflictingArgumentsError: the Accelerator leaves out steps, or scales losses.
    """
    # By its name, for Accelerate is not imported for this.
    if not any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__):
        return optimizer
    steps = optimizer.gradient_state.num_steps
    if steps != 1:
        cure = "Each batch of an Accumulator is a step: leave it out, and let the loader yield all samples of a step."
        raise ConflictingArgumentsError("gradient_accumulation_steps", steps, "Accumulator", cure)
    if optimizer.scaler is not None:
        cure = "Its scaler waits for accelerator.backward: take mixed_precision='bf16'; or none, and Accumulator(..., "
        cure += "precision='fp16')."
        raise ConflictingArgumentsError("mixed_precision", "fp16", "Accumulator", cure)
    # What Accelerate adds are these two, so nothing is lost. Its scheduler goes by the optimizer that is within.
    return optimizer.optimizer
