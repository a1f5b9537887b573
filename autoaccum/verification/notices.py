"""What is said of a run whose gradient may not be that of the whole window: cause, consequence and cure of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autoaccum.events import Notice
from autoaccum.loss.conclusions import conclude, proportional
from autoaccum.loss.coupling import count_batch_norms
from autoaccum.loss.reductions import Reduction

# Each names its cause so that it can be found in the user's code, and a cure that can be tried. One is told from
# another by its consequence, which therefore holds no numbers: it is said once in a run.


def batch_norm_notices(modules: Sequence[nn.Module]) -> list[Notice]:
    """Return what to say when windows of a model with BatchNorm are cut."""
    # Only those that normalise by a batch: by running statistics no sample meets another.
    layers = count_batch_norms(modules)
    notice = Notice(
        cause=f"The model holds {layers} BatchNorm layer{'s' if layers > 1 else ''} in training mode",
        consequence="Each normalises by the statistics of a micro-batch instead of the window, so that the gradient "
        "depends on how windows are cut",
        cure="Use GroupNorm or LayerNorm, put the BatchNorm layers in eval mode, or pass micro_batch= the whole window "
        "if it fits",
    )
    return [notice] if layers else []


def coupling_notice() -> Notice:
    """Return what to say when windows are cut whose loss compares samples with each other."""
    return Notice(
        cause="The loss lets the samples of a batch meet, as contrastive losses and statistics over a batch do",
        consequence="Each sample meets those of its micro-batch only, instead of all in the window: another loss",
        cure="Pass micro_batch= the whole window if it fits, lower effective_batch if it does not, or let samples meet "
        "what does not come from the batch, such as a queue of past ones or running statistics",
    )


def half_precision_notices(parameters: Sequence[torch.Tensor]) -> list[Notice]:
    """Return what to say when windows of a model whose parameters have 16 bits themselves are cut."""
    # Not of autocast: with that, parameters and so gradients have 32 bits.
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters if p.dtype in (torch.bfloat16, torch.float16)}
    notice = Notice(
        cause=f"The model's parameters are {' and '.join(sorted(dtypes))}",
        consequence="Gradients are summed over micro-batches in that type too, each addition rounding: the more "
        "micro-batches, the further from the gradient of the window",
        cure="Keep the parameters in float32 and pass precision='bf16' or 'fp16'",
    )
    return [notice] if dtypes else []


def doubt_notice(reason: str, cure: str) -> Notice:
    """Return what to say when it does not show how micro-batches add up to their window."""
    return Notice(
        cause=f"How the loss averages over a micro-batch cannot be told: {reason}",
        consequence="Micro-batches may be weighted wrongly, so that the gradient depends on how windows are cut",
        cure=cure,
    )


def contradiction_notice(
    claimed: Sequence[float], sizes: Sequence[int], reductions: Sequence[Reduction]
) -> Notice | None:
    """Return what to say when the user's ``num_items`` is not what the loss shows; None when it may be."""
    found = conclude(sizes, reductions)
    # What cannot be read off the loss cannot contradict anybody.
    if found.doubt is not None:
        return None
    counts = [float(reduction.items) for reduction in reductions]
    # Counts that are the same but for a factor, as those of tokens and of pairs of tokens, are the same weights.
    if not found.is_sum and proportional(claimed, counts):
        return None
    # The first few show what is wrong; a window may have thousands.
    listed = [", ".join(f"{count:g}" for count in numbers[:4]) for numbers in (claimed, counts)]
    return Notice(
        cause=f"num_items says {listed[0]} for the first micro-batches, but their loss is "
        + ("a sum" if found.is_sum else f"a mean over {listed[1]}"),
        consequence="The gradient is weighted by num_items, and so depends on how windows are cut",
        cure="Leave num_items out: what the loss is a mean over was read off it; labels that a model shifts are "
        "counted as shifted",
    )


def penalty_notice() -> Notice:
    """Return what to say of terms that depend on parameters alone, beside a sum over samples."""
    return Notice(
        cause="The loss is a sum over samples and terms that depend on the parameters alone",
        consequence="The gradient counts those once a window, but the loss that is reported counts them once a "
        "micro-batch",
        cure="Let the loss be a mean, whose report is exact too, or look at its data term alone",
    )
