"""Names of arguments that other trainers have, and misspelt ones: errors say what to pass here."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from autoaccum.errors import ArgumentTypeError, DataError
from autoaccum.planning import plans

F = TypeVar("F", bound=Callable[..., Any])

_BATCH = "Use effective_batch (samples per optimizer step)."
_FITS = "Leave it out: autoaccum finds how many samples fit at once."
_CLIP = "Use clip_norm."
_EPOCHS = "Use epochs (passes over the data)."
_PRECISION = "Use precision='bf16' or 'fp16'."

ELSEWHERE = {
    "batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _FITS,
    "accumulate_grad_batches": _FITS,
    "num_train_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "max_steps": "Use steps (optimizer steps).",
    "learning_rate": "Use lr.",
    "weight_decay": "Use optimizer=lambda params: torch.optim.AdamW(params, weight_decay=0.1).",
    "warmup_steps": "Use lr_scheduler (a function (optimizer, num_steps) -> scheduler).",
    "criterion": "Use loss_fn(outputs, targets), or training_step(model, batch).",
    "compute_metrics": "Use metrics (a dict of functions by name) with validation_data.",
    "train_dataset": "Use data, the second argument (tensors, a dataset or a DataLoader).",
    "eval_dataset": "Use validation_data.",
    "max_grad_norm": _CLIP,
    "gradient_clip_val": _CLIP,
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "output_dir": "Use run_dir (directory for checkpoints and records).",
    "gradient_checkpointing": "Use memory_saving='checkpoint' (left out, it is used where nothing fits otherwise).",
}
"""The most used arguments of other trainers, and what to pass here."""

_JOINED = "Leave it out: the loss is computed on the full batch wherever splitting would change it (accumulate='auto')."

REMOVED = {
    "loss_scope": _JOINED,
    "embed": _JOINED,
    "clip_model": _JOINED,
    "sentence_loss": _JOINED,
    "moe_balancing": _JOINED,
    "before_window": "Compute it in the training_step or loss_fn, which runs once on the full batch where it has to.",
    "batch_norm": "Leave it out: BatchNorm runs on the full batch. With micro_batch=32, accumulate='weighted' it takes "
    "the statistics of 32 samples, and layers in eval mode take their running ones.",
    "state": "Leave it out: steps whose forwards write state that the next one reads are joined (accumulate='auto').",
}
"""Arguments that there were during development, and what to do now."""

_IN_A_LOOP = {
    "effective_batch": "Pass all samples of one optimizer step to step(batch).",
    "lr_scheduler": "Call scheduler.step() after accumulator.step(batch).",
}
"""What a loop of the user's own does for arguments that an Accumulator does not have."""


def answering(name: str) -> Callable[[F], F]:
    """Make a decorator of functions that answers arguments that they do not have, and workers that have ended.

    Args:
        name: of the function, as users call it.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = signature.parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for argument in kwargs:
                # Before Python itself says that effective_batch is missing, which would hide the better answer.
                if argument not in parameters:
                    raise unknown_argument(name, argument, kwargs[argument], _cure(argument, name, list(parameters)))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # by the name that was called, whatever takes the arguments within
                raise TypeError(f"{name}() {error}") from None
            try:
                return function(*args, **kwargs)
            except Exception as error:
                refuse_ended_worker(error)
                raise

        return cast(F, call)

    return decorate


def refuse_ended_worker(error: BaseException) -> None:
    """Raise if an error says that a worker of a DataLoader was killed, or ended by itself.

    PyTorch raises it wherever the main process is when the signal arrives, in a forward too.

    Raises:
        DataError: it does.
    """
    is_told = type(error) is RuntimeError and str(error).startswith("DataLoader worker (pid")
    # Or its tensors cannot be fetched from it any more.
    modules = {str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)}
    if is_told or (isinstance(error, EOFError | OSError) and "torch.multiprocessing.reductions" in modules):
        raise DataError(
            f"data: a worker ended without an error of Python ({error!r}). On Linux the kernel kills processes when "
            f"memory runs out: use fewer workers, or a smaller prefetch_factor. Else the dataset or a library "
            f"that it calls crashes: num_workers=0 reads in this process, and shows where."
        ) from error


def of_one_batch(method: F) -> F:
    """Make a method (batch) answer to those who call it with inputs and targets, or with nothing.

    Raises:
        ArgumentTypeError: it is called with anything but one batch; it says how to pass that.
    """
    name = method.__qualname__

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        # As it is meant: a window may take no more than 100 µs, so that nothing else is looked at.
        if len(given) == 1 and not named:
            return method(self, given[0])
        if not given and named.keys() == {"batch"}:
            return method(self, named["batch"])
        cure = f"Pass inputs and targets as a tuple: {name}((inputs, targets))."
        if named:
            cure = f"Pass what the model takes by name as a dict: {name}({{'input_ids': ..., 'labels': ...}})."
        elif not given:
            cure = "Pass all samples of a step; after backward(batch) call optimizer.step()."
        found = ", ".join([type(value).__name__ for value in given] + [f"{key}=..." for key in named]) or "nothing"
        raise ArgumentTypeError("batch", found, "one batch", cure, fact=f"{name}() takes one batch, and got {found}.")

    return cast(F, call)


def unknown_argument(name: str, argument: str, value: object, cure: str) -> ArgumentTypeError:
    """Return the error for an argument that a function does not have."""
    fact = f"{name}() has no argument {argument!r}."
    return ArgumentTypeError(argument, value, f"an argument of {name}", cure, fact=fact)


def _cure(argument: str, name: str, parameters: list[str]) -> str:
    """Return what to pass to a function in the place of an argument that it does not have."""
    cure = elsewhere(argument)
    meant = meant_in(cure) or argument
    if name == "Accumulator" and meant in _IN_A_LOOP:
        return _IN_A_LOOP[meant]
    if not cure:
        return meant_by(argument, parameters)
    return cure if meant in (argument, *parameters) else f"Leave it out (fit() has {meant} for it)."


def meant_by(argument: str, parameters: Iterable[str]) -> str:
    """Return which parameter may have been meant by a name that none has; empty where none is like it."""
    # Two letters of three have to be right, or it is no help.
    spelt = {_plain(parameter): parameter for parameter in parameters}
    near = difflib.get_close_matches(_plain(argument), spelt, 1, cutoff=0.7)
    return f"Did you mean {spelt[near[0]]}?" if near else ""


def meant_in(cure: str) -> str:
    """Return the argument that a cure of ``elsewhere`` names; empty where it names none.

    >>> meant_in("Use effective_batch (samples per optimizer step)."), meant_in("Use torch.compile.")
    ('effective_batch', '')
    """
    found = re.match(r"Use (\w+)\b(?!\.\w)", cure)
    return found[1] if found else ""


def elsewhere(name: str) -> str:
    """Return what to do in the place of an argument, or an option, of other trainers, or a removed one; else empty."""
    return next((cure for other, cure in (ELSEWHERE | REMOVED).items() if _plain(other) == _plain(name)), "")


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


plan = answering("plan")(plans.plan)
"""The plan of an effective batch, as ``planning.plans`` has it, for those who call its arguments otherwise too."""
plan.__module__ = __name__  # pickled by the name that it is found by
