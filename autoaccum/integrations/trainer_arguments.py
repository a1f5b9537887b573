"""What the arguments of a Trainer of transformers mean where its windows are run here, and which cannot be heeded."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Trainer, TrainingArguments

from autoaccum import _checks
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.integrations.trainer_batches import KTO, is_one_of
from autoaccum.training.accumulator import Accumulator
from autoaccum.training.declarations import arguments_of
from autoaccum.training.synonyms import elsewhere, meant_by, unknown_argument

OPTIONS = (
    *("micro_batch", "max_micro_batch", "min_micro_batch", "memory_limit", "headroom", "memory_saving"),
    *("patience", "accumulate", "verify", "strict", "compression", "split", "batch_dim"),
)
"""Arguments of ``Accumulator`` that a trainer takes beside its own: the others are said by TrainingArguments."""
_USUAL_BATCH = 8
"""What transformers takes for per_device_train_batch_size where nobody says it: nothing tells whether somebody did."""
_LIBRARIES = ("transformers", "trl", "sentence_transformers", "autoaccum")
_LOADER = "get_train_dataloader"
_STEPS_INSIDE = ("lomo", "layerwise")
"""In the names of optimizers that step while a backward runs: there is no gradient of a whole window to leave them."""


def options_in(keywords: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of ``Accumulator`` out of those of a trainer, and return them."""
    return {name: keywords.pop(name) for name in OPTIONS if name in keywords}


def refuse_unknown(init: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Refuse arguments by names that a trainer does not have, where it is known what to do.

    Args:
        init: what makes the trainer.
        keywords: its arguments by name.

    Raises:
        ArgumentTypeError: one is the training arguments', or is called or spelt otherwise here.
    """
    known = inspect.signature(init).parameters
    # What the user's own class takes by any name is its matter.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in keywords.keys() - known.keys():
        cure = elsewhere(name)
        if hasattr(TrainingArguments, name) or name in TrainingArguments.__dataclass_fields__:
            cure = f"It is one of the training arguments: args=TrainingArguments(..., {name}=...)."
        elif name in arguments_of(Accumulator):
            cure = "The trainer says it, and an Accumulator is made with that."
        elif not cure.startswith("Use effective_batch"):  # the answers are those of fit
            cure = meant_by(name, ["effective_batch", *OPTIONS, *known])
        if not cure:  # an old name may be taken all the same
            continue
        raise unknown_argument("AutoAccumTrainer", name, keywords[name], cure)


def refuse(trainer: Any, step: Any) -> None:
    """Refuse what would train something else, or nothing, where the trainer sees one batch per window.

    Args:
        trainer: with all that it was given.
        step: the training_step in whose place windows are run.

    Raises:
        ArgumentError: a way to train that a window cannot be run in.
        ConflictingArgumentsError: an argument that says otherwise how windows are cut.
    """
    args = trainer.args
    if args.auto_find_batch_size:
        cure = "The micro-batch is found anyway, and the effective batch stays: leave auto_find_batch_size out."
        raise ConflictingArgumentsError("auto_find_batch_size", True, "effective_batch", cure)
    if args.fp16:
        cure = "Its scaler has to leave out steps that only it knows of: take bf16=True, or fit(precision='fp16')."
        raise ArgumentError("fp16", True, "False", cure)
    if args.n_gpu > 1:
        cure = "Start one process for each, torchrun --nproc-per-node, or show it one by CUDA_VISIBLE_DEVICES."
        raise ArgumentError("n_gpu", args.n_gpu, "one device in one process", cure)
    if args.accelerator_config.dispatch_batches:
        cure = "One process would read for all, and place whole windows: leave it out, each rank reads its own."
        raise ArgumentError("dispatch_batches", True, "None or False", cure)
    # Each cuts the model, or its steps, in a way of its own: what is in .grad is not the gradient of its parameters.
    taken = {
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "parallelism_config": trainer.accelerator.parallelism_config is not None,
        "device_map": trainer.is_model_parallel,
    }
    for name, is_taken in taken.items():
        if is_taken:
            cure = "Several ranks that each hold the whole model are fine; for FSDP2 take autoaccum.fit."
            raise ArgumentError(name, "given", "a model that each process holds as a whole, on one device", cure)
    if any(part in str(args.optim).lower() for part in _STEPS_INSIDE):
        raise ArgumentError("optim", str(args.optim), "an optimizer that steps after the backward")
    losses = getattr(trainer, "loss", None)
    for loss in losses.values() if isinstance(losses, Mapping) else [losses]:
        # Those of sentence-transformers whose names begin with Cached: they go back themselves, within their forward.
        if getattr(loss, "uses_gradient_cache", hasattr(loss, "mini_batch_size")):
            cure = (
                "Pass the loss that it is made after, as MultipleNegativesRankingLoss: micro-batches are joined here."
            )
            raise ArgumentError("loss", type(loss).__name__, "a loss that makes no micro-batches of its own", cure)
    # It would never be called, and what it does beside the loss would be missed by nobody here.
    if not _is_stock(step):
        cure = (
            "Define it in the class that has AutoAccumMixin among its bases, around super().training_step, which runs "
        )
        cure += "the window; what it does to the loss, in compute_loss."
        raise ArgumentError("training_step", step.__qualname__, "the one of transformers, TRL or others", cure)
    _refuse_batches(trainer, step)


def refuse_loop(trainer: Any, loader: Any) -> None:
    """Refuse a loop whose batches are not its windows, at the begin of a training.

    Raises:
        ConflictingArgumentsError: it accumulates.
        ArgumentError: its loader yields batches of another size.
    """
    args = trainer.args
    # Set since then, as by a search over it: each window would drop what the one before it has left.
    if args.gradient_accumulation_steps != 1:
        cure = "Each batch is a window, and a step: set, or search over, per_device_train_batch_size, its samples."
        steps = args.gradient_accumulation_steps
        raise ConflictingArgumentsError("gradient_accumulation_steps", steps, "AutoAccumMixin", cure)
    # The stock loader goes by the arguments. Of one that makes its batches by itself the size may not be known.
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    named = [vars(kind)[_LOADER] for kind in type(trainer).__mro__ if _LOADER in vars(kind)]
    owns = next((function for function in named if not _is_stock(function)), None)
    if owns is not None and isinstance(size, int) and size != args.per_device_train_batch_size:
        cure = f"It yields {size}: let it take batch_size=self.args.per_device_train_batch_size, the window's share."
        window = args.per_device_train_batch_size
        raise ArgumentError(owns.__qualname__, size, f"a loader that yields {window} samples for each step", cure)


def compares_batch(trainer: Any) -> bool:
    """Return whether a loss compares each sample with a mean over its batch, as that of TRL's KTO does.

    Raises:
        ArgumentError: there are several ranks, of which none has the whole window.
    """
    # Other losses of this trainer are means over answers, as any.
    if not is_one_of(type(trainer), KTO) or not trainer.calculate_KL:
        return False
    if trainer.accelerator.num_processes > 1:
        cure = "It compares all samples of a window: train in one process, or take 'apo_zero_unpaired'."
        raise ArgumentError("loss_type", trainer.loss_type, "one that needs no mean over what other ranks have", cure)
    return True


def _is_stock(function: Any) -> bool:
    """Return whether a method of a trainer comes from a library, or from here."""
    return str(function.__module__).split(".")[0] in _LIBRARIES


def makes_batches(step: Any) -> bool:
    """Return whether a training_step generates what it trains on, as its code says."""
    return any("generat" in name for name in inspect.unwrap(step).__code__.co_names)


def _refuse_batches(trainer: Any, step: Any) -> None:
    """Refuse trainers whose batches are not those that their loader yields, or cannot be cut by samples.

    Args:
        trainer: with all that it was given.
        step: its training_step, which would not be called.
    """
    if getattr(trainer, "padding_free", False) and "split" not in trainer.window_options:
        cure = "All samples of such a batch lie in one row: leave it out, with packing_strategy='wrapped' if packed."
        raise ArgumentError("padding_free", True, "False, or a split beside it", cure)
    # Those that generate while they train make their own batches of what they are given, some steps at a time.
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs or makes_batches(step):
        cure = "Trainers such as those of GRPO and GKD make their batches themselves; here a batch is what the loader "
        cure += "yields."
        raise ArgumentError("trainer", type(trainer).__name__, "a trainer that leaves batches as they are", cure)


def with_one_batch_per_window(args: Any, effective_batch: int | None) -> Any:
    """Return a copy of training arguments by which a trainer's loop sees one batch for each of its steps.

    Args:
        args: as the user gave them; they stay.
        effective_batch: samples per step over all ranks; None: as many as ``args`` would have come to.

    Raises:
        ArgumentError: it is no positive int, or cannot be shared out evenly among the ranks.
        ConflictingArgumentsError: ``args`` say another one.
    """
    said = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if effective_batch is None:
        effective_batch = said
    # Before it is compared with anything, so that the error is about what was passed.
    _checks.positive_int("effective_batch", effective_batch)
    # The usual batch of 8 is no word of the user's, unless it stands beside accumulation steps, which are.
    is_said = args.per_device_train_batch_size != _USUAL_BATCH or args.gradient_accumulation_steps != 1
    if is_said and said != effective_batch:
        name = "gradient_accumulation_steps" if args.gradient_accumulation_steps != 1 else "per_device_train_batch_size"
        cure = (
            f"It comes to {said} samples per step: leave it out, or leave out effective_batch; "
            "micro_batch= fixes the samples of one forward."
        )
        raise ConflictingArgumentsError(name, getattr(args, name), f"effective_batch={effective_batch}", cure)
    if effective_batch % args.world_size:
        cure = f"The loader of each of the {args.world_size} ranks yields batches of one size."
        raise ArgumentError("effective_batch", effective_batch, f"a multiple of {args.world_size}", cure)
    # A copy, for the same arguments may be given to another trainer.
    changed = copy.copy(args)
    # From here on the loop's own batch is a window, of which each rank reads its share.
    changed.per_device_train_batch_size = effective_batch // args.world_size
    changed.gradient_accumulation_steps = 1
    return changed


def of_windows(kind: type, argument: Any, effective_batch: int | None) -> Any:
    """Return an argument that a trainer is made with: those of training are changed where its data are made by them.

    Args:
        kind: of the trainer.
        argument: any of its arguments.
        effective_batch: as it was passed.
    """
    # Mismatched answers are those of neighbours within a batch, and are looked up when the trainer is made.
    if not (is_one_of(kind, KTO) and isinstance(argument, TrainingArguments)):
        return argument
    changed: Any = with_one_batch_per_window(argument, effective_batch)
    # What is computed beforehand is no part of a window, and has to fit as it was meant to.
    if changed.precompute_ref_batch_size is None:
        changed.precompute_ref_batch_size = argument.per_device_train_batch_size
    return changed
