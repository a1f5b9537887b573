"""What is said of a run whose gradient may not be that of the whole window: cause, consequence and cure of each."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import nn

from autoaccum.distributed.gradients import type_of_gradient
from autoaccum.events import Notice
from autoaccum.step.findings import FOREIGN, Decision, Verdict
from autoaccum.step.infer_reduction import conclude
from autoaccum.step.loss_graph import HALVES
from autoaccum.step.module_state import count_batch_norms
from autoaccum.step.terms import Reduction

# Each names its cause so that it can be found in the user's code, and a cure that can be tried. One is told from
# another by its consequence, which therefore holds no numbers: it is said once in a run.


_SHOWN = 3
"""Name so many tensors of a model at most."""
_REGROUP = (
    "Pass accumulate='joined', which is exact, or micro_batch=32, by which statistics are always those of 32 samples; "
    "use GroupNorm or LayerNorm"
)


def batch_norm_notices(modules: Sequence[nn.Module]) -> list[Notice]:
    """Return what to say when windows of a model with BatchNorm are cut."""
    # Only those that normalise by a batch: by running statistics no sample meets another.
    layers = count_batch_norms(modules)
    notice = Notice(
        cause=f"The model holds {layers} BatchNorm layer{'s' if layers > 1 else ''} in training mode",
        consequence="Each normalises by the statistics of a micro-batch instead of the window, so that the gradient "
        "depends on how windows are cut",
        cure=f"{_REGROUP} (autoaccum.convert_batch_norm), put the BatchNorm "
        "layers in eval mode, or pass micro_batch= the whole window if it fits",
    )
    return [notice] if layers else []


def half_precision_notices(parameters: Sequence[torch.Tensor]) -> list[Notice]:
    """Return what to say when windows of a model whose gradients have 16 bits, as its parameters, are cut."""
    # Not of autocast: with that, parameters and so gradients have 32 bits.
    dtypes = {str(p.dtype).removeprefix("torch.") for p in parameters if type_of_gradient(p) in HALVES}
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


def compiled_notice() -> Notice:
    """Return what to say when compiled code hides the items that its loss is a mean over, and is left out for that."""
    return Notice(
        cause="The loss was compiled, and is a mean over items: how many of them a micro-batch has does not show in "
        "compiled code",
        consequence="From here on the run is exact and not compiled, which may be slower and take more memory",
        cure="Pass num_items=(micro-batch) -> how many items its loss is a mean over, or compile the model and not the "
        "loss",
    )


def untrained_notice(modules: Sequence[nn.Module], trained: Set[int]) -> Notice | None:
    """Return what to say when nothing of the model gets a gradient; None where something does, or all of it is frozen.

    Args:
        modules: what may be trained: the model, and what the user's functions hold beside it.
        trained: the ids of the parameters that have a gradient.
    """
    model, *others = modules
    own = [id(p) for p in model.parameters() if p.requires_grad]
    if not own or not trained.isdisjoint(own):
        return None
    # Of a notebook, say, whose step calls the model by its global name, and not the one that it is given.
    instead = [type(module).__name__ for module in others if not trained.isdisjoint(map(id, module.parameters()))]
    held = f", but {' and '.join(instead)} that a function holds which is passed" if instead else ""
    return Notice(
        cause=f"Nothing of the model, a {type(model).__name__}, has a gradient{held}",
        consequence="No gradient of the loss reaches the model, which is not trained by it",
        cure="Compute the loss with the model that the function is called with, and not with one that it finds by its "
        "name; where that is meant, call model.requires_grad_(False)",
    )


def failure_notice(
    decision: Decision,
    samples: int,
    modules: Sequence[nn.Module],
    suspicion: Notice | None,
    *,
    counts_items: bool = False,
    is_stated: bool = False,
) -> Notice:
    """Return what to say of windows whose gradient was measured to depend on how they are cut.

    Args:
        decision: what was measured.
        samples: how many were measured.
        modules: the model's.
        suspicion: what the graph of the loss says against it.
        counts_items: whether num_items was passed.
        is_stated: whether reduction was.
    """
    known = [*batch_norm_notices(modules), suspicion]
    unknown = _MISSTATED if is_stated and not counts_items else _unknown(counts_items=counts_items)
    found = [notice for notice in known if notice is not None] or [unknown]
    off = f"windows that are cut get a gradient {percent(decision.error)} off the whole window's"
    return Notice(
        cause=f"{' and '.join(notice.cause for notice in found)}: {off}, measured on {samples} samples",
        consequence=found[0].consequence,
        cure="; ".join(notice.cure for notice in found),
    )


_UNKNOWN = Notice(
    cause="The loss is neither a mean over samples or items, nor a sum over them, or samples meet in the model",
    consequence="No weights of micro-batches add them up to the loss of their window, so that the gradient depends on "
    "how windows are cut",
    cure="Let the loss end in one mean, or one sum, over samples; or pass accumulate='joined', by which statistics of "
    "a batch, those that inputs are normalised by too, are the window's; or micro_batch= the whole window if it fits, "
    "or num_items=(micro-batch) -> how many items its loss is a mean over (of losses in a dict, a dict of such "
    "functions)",
)


_MISCOUNTED = replace(
    _UNKNOWN,
    cause="The loss is neither a mean over what num_items counts, nor over samples, nor a sum over these",
    cure="Let num_items return what the loss of the micro-batch that it is given is divided by (of losses in a dict, "
    "let it be a dict of such functions by the same names), and let nothing be done to that mean, such as squaring it; "
    "or pass accumulate='joined', by which statistics of a batch are the window's, or micro_batch= the whole window "
    "if it fits",
)


_MISSTATED = replace(
    _UNKNOWN,
    cause="The loss is not the mean, or the sum, that reduction says",
    cure="Leave reduction out, or pass the other one; a loss that is neither needs accumulate='joined'",
)


def _unknown(*, counts_items: bool) -> Notice:
    """Return what to say of a loss of which nothing shows why it does not add up."""
    return _MISCOUNTED if counts_items else _UNKNOWN


_MIXED = Notice(
    cause="The collate_fn mixes the samples of a batch, as MixUp and CutMix do",
    consequence="It is given a micro-batch instead of the window, so that samples are mixed with others than in "
    "the whole, and with none where a micro-batch is one sample",
    cure="Pass accumulate='joined', by which the full batch is collated at once, or mix samples in the "
    "training_step; or pass micro_batch= the whole window if it fits",
)


def suspected(verdict: Verdict, shown: Notice | None) -> Notice | None:
    """Return by what samples meet, as was measured, or as graphs show."""
    return _MIXED if verdict.mixes else shown


def percent(error: float) -> str:
    """Return an error as people write it.

    >>> percent(0.2731), percent(3.2e-5), percent(5.214)
    ('27 %', '0.0032 %', '521 %')
    """
    if not math.isfinite(error):
        return "infinitely far (100 % of it is wrong)"
    return f"{error * 100:.2g} %" if error < 0.99 else f"{error * 100:.0f} %"


def uncertain_notice(why: str) -> Notice:
    """Return what to say of weights that are right for a few samples, and may be wrong for others."""
    return Notice(
        cause=why,
        consequence="Its weights were right for the samples that were measured, and may be wrong for others",
        cure="Pass accumulate='joined', which computes the loss of the whole window, or num_items=(micro-batch) -> how "
        "many items it is a mean over",
    )


def state_notice(names: Sequence[str]) -> Notice:
    """Return what to say of state of these names that moves with each micro-batch."""
    shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return Notice(
        cause=f"Forwards write to {shown}, and splitting the batch changes the result",
        consequence="Running statistics and counters are updated once per micro-batch instead of once per step, so "
        "evaluation differs from training on full batches",
        cure="Leave accumulate out or pass accumulate='joined': layers that write then run once, on the full batch. Or "
        "pass micro_batch= the full batch, if it fits",
    )


def drawn_once_notice() -> Notice:
    """Return what to say of a number that a forward draws once for all samples of a batch, as the weight of a MixUp."""
    return Notice(
        cause="The forward draws something once for all samples of a batch (a weight, a scale, a layer to skip), and "
        "all parts were given the same here",
        consequence="A run draws it for each micro-batch by itself, so that a window is a mean over several draws "
        "instead of one",
        cure="Draw it in the training_step and pass accumulate='joined', where it is to be the same for all samples of "
        "a window",
    )


def uncounted_notice() -> Notice:
    """Return what to say of a micro-batch that ``num_items`` counts 0 in, but which has a loss."""
    return Notice(
        cause="The loss of a micro-batch in which num_items counts 0 is not 0",
        consequence="A micro-batch that counts nothing is left out, with its loss",
        cure='Return the sum alone, divided by nothing, with reduction="sum" and num_items=(micro-batch) -> its share '
        "of what the sum of the whole window is divided by; or pass accumulate='joined'",
    )


def joined_notice(error: float, samples: int, suspicion: Notice | None, *, counts_items: bool = False) -> Notice:
    """Return what to say of micro-batches whose losses do not add up to that of two of them joined."""
    known = suspicion or _unknown(counts_items=counts_items)
    off = f"two micro-batches have a loss {percent(error)} off that of the {samples} samples joined"
    return replace(known, cause=f"{known.cause}: {off}, while those of a few samples are not")


def unmeasured_notice(why: str) -> Notice:
    """Return what to say when it could not be measured whether windows that are cut have the whole one's gradient."""
    return Notice(
        cause=f"It could not be measured whether split batches have the gradient of the full batch: {why}",
        consequence="What the loss is was read off its graph, and not compared with a whole window",
        cure="Draw by PyTorch's, as torch.rand and torch.randint do, whose draws each part is given"
        if why == FOREIGN
        else "Look at it with autoaccum.check(model, batch, ...), or pass micro_batch= the whole window if it fits",
    )


def measured_late_notice(error: float) -> Notice:
    """Return what to say when steps were taken on split batches that turn out not to have been exact."""
    return Notice(
        cause=f"Batches were split before there was memory to measure that, and were not exact: {percent(error)} off",
        consequence="The steps until now were not those of the full batch",
        cure="Start again with accumulate='joined', or with more memory",
    )


def has_backward_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether something happens as soon as the gradient of a parameter is there, such as an optimizer's step."""
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)


def backward_hook_notice() -> Notice:
    """Return what to say of hooks that run after the gradient of a micro-batch was added."""
    return Notice(
        cause="Parameters have hooks that run once their gradient is accumulated "
        "(register_post_accumulate_grad_hook), as an optimizer's step in the backward does",
        consequence="They run after each micro-batch instead of after the window, on what was accumulated so far; "
        "nothing can be measured beside them",
        cure="Remove them: the optimizer is stepped once a window",
    )


def doubt_of(sizes: Sequence[int], reductions: Sequence[Reduction]) -> Notice | None:
    """Return what the graphs of some micro-batches say against their adding up; None when nothing does."""
    if not reductions or len(sizes) != len(reductions):
        return None
    doubt = conclude(sizes, reductions).doubt
    return None if doubt is None else replace(doubt_notice(*doubt), cause=doubt_cause(*doubt))


def doubt_cause(reason: str, _: str) -> str:
    """Return a doubt as a cause."""
    return f"The loss does not average over samples or items alone, nor sum them: {reason}"
