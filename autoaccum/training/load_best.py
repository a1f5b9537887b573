"""``load_best``: the weights of a run's best checkpoint, put into a model."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.distributed.fsdp import units_of
from autoaccum.errors import ArgumentError, ArgumentTypeError, CheckpointCorruptError, NoHistoryError
from autoaccum.runs import checkpoint
from autoaccum.runs.parted import of_module
from autoaccum.step.module_state import buffer_places, load_modules


def load_best(
    run_dir: str | os.PathLike[str],
    model: nn.Module,
    *,
    averaged: bool | None = None,
) -> nn.Module:
    """Put the weights of a run's best checkpoint into a model, and return it.

    The best is the one of the lowest validation loss so far, or by what ``callbacks.KeepBest`` says. ``fit`` writes it
    as soon as that is known, beside the last ones, which a run goes on from: to load it changes nothing there, and does
    not wait for the run to end.
    No code is run by reading it. Buffers are loaded too; the model stays on its device, and in its mode.

    Args:
        run_dir: that was passed to ``fit``, beside ``validation_data``.
        model: to load into, of the architecture that was trained.
        averaged: load the averages of the run's ``EMA`` in place of the weights, at that same checkpoint; when left
            out, whichever of the two its validations went by.

    Raises:
        NoHistoryError: no run has been there.
        ArgumentError: none of its checkpoints is the best, for no validation had a finite loss; or it has no averages;
            or its weights are those of another model.
        CheckpointCorruptError: what is there is not as it was written.

    >>> import autoaccum, tempfile, torch
    >>> model, data = torch.nn.Linear(3, 1), (torch.randn(20, 3), torch.randn(20, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = autoaccum.fit(
    ...         model, data, effective_batch=4, loss_fn=torch.nn.functional.mse_loss, progress=False, device="cpu",
    ...         validation_data=data, run_dir=folder,
    ...     )
    ...     best = load_best(folder, torch.nn.Linear(3, 1))
    """
    place = Path(_checks.path("run_dir", run_dir))
    if averaged is not None:
        _checks.flag("averaged", averaged)
    found, skipped = checkpoint.best(place / "checkpoints")
    if found is None:
        raise _nothing_there(place, skipped)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("model", model, "a model, which the weights are put into")
    if units_of(model):
        cure = "Load into the model as it is before fully_shard is called: all of the weights are read."
        raise ArgumentError("model", type(model).__name__, "a model that this process has all of", cure)
    # All of it is on the host, and is compared with the model before any of that is changed.
    weights, state = found.load()
    ema = _ema_in(state)
    if ema.get("validate") is True if averaged is None else averaged:
        weights = _averages(found, weights, ema)
    weights = of_module(model, weights)  # several ranks may have written it in parts
    if differs := _differing(model, weights):
        cure = f"Make it as it was when it was trained: in {found.path}, {differs}."
        raise ArgumentError("model", type(model).__name__, "the model that was trained there", cure)
    on = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    load_modules([model], [{"state": weights, "buffers": state["buffers"]}], on[0] if on else torch.device("cpu"))
    return model


def _differing(model: nn.Module, weights: Mapping[str, Any]) -> str:
    """Return how saved weights differ from those of a model; empty where they do not."""
    there = model.state_dict()
    # A forward may have made, dropped or resized buffers.
    for name in [name for name in {**there, **weights} if name not in buffer_places(model)]:
        if name not in weights:
            return f"weights.{name} is missing"
        if name not in there:
            return f"weights.{name} is nothing that the model has"
        saved, own = (getattr(one, "shape", None) for one in (weights[name], there[name]))
        if saved != own:
            return f"weights.{name} has the shape {tuple(saved or ())}, not {tuple(own or ())}"
    return ""


def _nothing_there(place: Path, skipped: tuple[str, ...]) -> Exception:
    """Return the error for a directory without a best checkpoint."""
    if skipped:
        return CheckpointCorruptError(place / "checkpoints", f"holds no whole best checkpoint: {' '.join(skipped)}")
    # A run that has never validated has checkpoints, of which none is better than another.
    written, _ = checkpoint.every(place / "checkpoints")
    if not written:
        return NoHistoryError(place, "the checkpoints of a run", "")
    # NaN is lower than nothing: a run that has diverged validates, and has no best.
    if losses := [loss for one in written if isinstance(loss := one.facts.get("validation_loss"), float)]:
        value = "metric, the one that KeepBest goes by" if any(map(math.isfinite, losses)) else "loss"
        cure = "All were NaN or infinite: look for such numbers in validation_data, lower lr, or pass clip_norm to fit."
        return ArgumentError("run_dir", str(place), f"a run one of whose validations had a finite {value}", cure)
    cure = "Pass validation_data to fit: by it the best is known, from the first validation on. A run that was "
    cure += "stopped goes on from its last checkpoint when fit is called again."
    return ArgumentError("run_dir", str(place), "the directory of a run that has validated", cure)


def _ema_in(state: Any) -> dict[str, Any]:
    """Return the state of the first EMA among the callbacks of a run; nothing where it had none."""
    return next((entry["state"] for entry in state.get("callbacks", ()) if entry["type"] == "EMA"), {})


def _averages(found: checkpoint.Checkpoint, weights: Any, ema: dict[str, Any]) -> Any:
    """Return the averages that an EMA has kept in a checkpoint, in the place of weights and of buffers.

    Raises:
        ArgumentError: there is none.
    """
    if not ema:
        cure = "Pass callbacks=[autoaccum.callbacks.EMA(validate=True)] to fit."
        raise ArgumentError("averaged", True, f"an EMA among the callbacks of the run in {found.path.parent}", cure)
    averages = ema["weights"]
    # Tied weights have one average, under the first of their names: those of the others are the same tensor.
    same = {id(value): averages[name] for name, value in weights.items() if name in averages}
    replaced = copy.copy(weights)  # with what a state_dict has beside its entries
    for name, value in weights.items():
        if id(value) in same:
            replaced[name] = same[id(value)].to(value.dtype)  # of 16 bits they are kept in 32
    return replaced
