"""What a run is made of: all that a checkpoint holds of it, and how it is put back.

What follows from the arguments is not in it, for a run is resumed by the same call; nor is what only makes it fast: the
timing of plans that goes on begins anew, and so does the calm that growth waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from torch import nn

from autoaccum.data import randomness
from autoaccum.events import StepReport
from autoaccum.planning.costs import TimeModel, Trial
from autoaccum.planning.tuner import Tuner
from autoaccum.runs.cost_key import describe
from autoaccum.training.validation import Validator
from autoaccum.window.snapshot import is_expanded

State = dict[str, Any]
"""Plain values and tensors."""

OF_TUNER = (
    "searching",
    "smallest",
    "largest",
    "least_bytes",
    "window",
    "_known",
    "_is_ragged",
    "_cap",
    "_doubts_plateau",
    "_best",
    "_refused",
    "_enough",
    "_goal",
    "_grown_from",
)
"""Attributes that are plain values, and that later plans depend on."""
OF_TRAINER = ("_validated", "_validation_loss", "_best_loss")
"""What validations have shown."""
OF_PACE = ("epoch", "epoch_samples", "epoch_seen", "samples_seen", "effective_batch")
"""Where it stands."""
OF_RUNNER = ("_checked", "_has_sums", "_examining", "_deferred")
"""What a ``WindowRunner`` has found out about the loss."""


def state_of(trainer: Any) -> tuple[State, State]:
    """(the model's state_dict, everything else) after a window."""
    others = [module for module in trainer._modules if module is not trainer.model]
    noise = trainer._noise
    return trainer.model.state_dict(), {
        "buffers": _left_out(trainer.model),
        "modules": of_modules(others),
        "optimizer": trainer.optimizer.state_dict(),
        "learning_rate": trainer._learning_rate.state_dict(),
        "engine": of_engine(trainer._engine),
        "validator": None if trainer._validator is None else of_validator(trainer._validator),
        "noise": None if noise is None else (noise.gradient_squared, noise.gradient_variance),
        **{name: getattr(trainer._pace, name) for name in OF_PACE},
        "windows": of_windows(trainer._pace.windows),
        "reports": [asdict(report) for report in trainer._pace.reports],
        **{name: getattr(trainer, name) for name in OF_TRAINER},
        "device": describe(trainer.device),
        "randomness": of_randomness(trainer.device),
    }


def restore(trainer: Any, weights: State, state: State) -> None:
    """Put back what ``state_of`` returned, into a trainer that was made with the same arguments."""
    others = [module for module in trainer._modules if module is not trainer.model]
    of_all = [{"state": weights, "buffers": state["buffers"]}, *state["modules"]]
    to_modules([trainer.model, *others], of_all, trainer.device)
    to_optimizer(trainer.optimizer, state["optimizer"])
    trainer._learning_rate.load_state_dict(state["learning_rate"])
    same_device = state["device"] == describe(trainer.device)
    to_engine(trainer._engine, state["engine"], same_device=same_device)
    if trainer._validator is not None and state["validator"] is not None and same_device:
        to_validator(trainer._validator, state["validator"])
    if trainer._noise is not None and state["noise"] is not None:
        trainer._noise.gradient_squared, trainer._noise.gradient_variance = state["noise"]
    for name in OF_PACE:
        setattr(trainer._pace, name, state[name])
    trainer._pace.windows = [size for size, count in state["windows"] for _ in range(count)]
    trainer._pace.reports.extend(to_reports(state["reports"]))
    for name in OF_TRAINER:
        setattr(trainer, name, state[name])
    to_randomness(state["randomness"], trainer.device)


def to_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """``load_state_dict``, which rounds what is kept in more bits than the parameter has: that is put back after it."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for p, number in zip(parameters, numbers, strict=True):
        for name, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[p].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value.dtype != loaded.dtype:
                optimizer.state[p][name] = value.to(loaded.device)


def of_modules(modules: Sequence[nn.Module]) -> list[State]:
    """Of each its state_dict, and the buffers that this leaves out."""
    return [{"state": module.state_dict(), "buffers": _left_out(module)} for module in modules]


def _left_out(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: buffer
        for key, layer, name in _places(module)
        if name in layer._non_persistent_buffers_set and (buffer := layer._buffers[name]) is not None
    }


def _places(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(key in a state_dict, layer, name) of each buffer, those that are None too."""
    return [
        (f"{path}.{name}" if path else name, layer, name)
        for path, layer in module.named_modules()
        for name in layer._buffers.keys()  # noqa: SIM118 (no dict in TorchScript)
    ]


def to_modules(modules: Sequence[nn.Module], states: Sequence[State], device: torch.device) -> None:
    """Put back what ``of_modules`` returned; a forward may have made, dropped or resized buffers since."""
    for module, state in zip(modules, states, strict=True):
        kept, named = {**state["state"], **state["buffers"]}, module.state_dict()
        for key, layer, name in _places(module):
            value, there = kept.get(key), layer._buffers[name]
            if value is None:
                if key in named or name in layer._non_persistent_buffers_set:
                    layer._buffers[name] = None
            elif there is None or (there.shape, there.dtype) != (value.shape, value.dtype) or is_expanded(there):
                layer._buffers[name] = value.to(device)
            else:
                with torch.no_grad():
                    there.copy_(value)
        module.load_state_dict(state["state"])


def of_engine(engine: Any) -> State:
    """What has been found out about the loss, about memory and about time, and what was announced."""
    runner = engine._runner
    return {
        "step": engine.step,
        "announced": sorted(engine._announced),
        "announced of windows": sorted(runner._announced),
        "plan": engine._plan,
        "runner": {name: getattr(runner, name) for name in OF_RUNNER},
        "scaler": None if runner.scaler is None else runner.scaler.state_dict(),
        "tuner": of_tuner(engine.tuner),
    }


def to_engine(engine: Any, state: State, *, same_device: bool) -> None:
    """Put back what ``of_engine`` returned; on another device memory and time are to be found out again."""
    runner = engine._runner
    engine.step = state["step"]
    engine._announced |= set(state["announced"])
    runner._announced |= set(state["announced of windows"])
    for name, value in state["runner"].items():
        setattr(runner, name, value)
    if runner.scaler is not None and state["scaler"] is not None:
        runner.scaler.load_state_dict(state["scaler"])
    engine._plan = state["plan"]
    engine.tuner.window = state["tuner"]["window"]
    if same_device and engine.tuner._learns:
        to_tuner(engine.tuner, state["tuner"])


def of_tuner(tuner: Tuner) -> State:
    """How windows are cut, and what it was learnt from."""
    model = tuner._time_model
    return {
        "loads": tuner._loads.state_dict(),
        "past": [asdict(trial) for trial in tuner.past],
        "times": None if model is None else model.points,
        "is_timing": tuner._timing is not None,
        **{name: getattr(tuner, name) for name in OF_TUNER},
    }


def to_tuner(tuner: Tuner, state: State) -> None:
    """Put back what ``of_tuner`` returned, under the limit as it is now."""
    tuner._loads.load_state_dict(state["loads"])
    tuner.past = tuple(Trial(**trial) for trial in state["past"])
    tuner._time_model = None if state["times"] is None else TimeModel(points=state["times"])
    for name in OF_TUNER:
        setattr(tuner, name, state[name])
    tuner._heed(tuner.limit_bytes)
    if state["is_timing"]:
        tuner._choose()


def of_validator(validator: Validator) -> State:
    """How it cuts the data, which shows in the last bits of its loss."""
    return {"history": [asdict(trial) for trial in validator._history], "ways": list(validator._ways)}


def to_validator(validator: Validator, state: State) -> None:
    """Put back what ``of_validator`` returned."""
    validator._history[:] = [Trial(**trial) for trial in state["history"]]
    validator._ways[:] = state["ways"]


def to_reports(states: Sequence[State]) -> list[StepReport]:
    """Of their fields; those of another version are left out."""
    names = {field.name for field in dataclasses.fields(StepReport)}
    return [StepReport(**{name: value for name, value in state.items() if name in names}) for state in states]


def of_windows(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(size, how many such windows) in a row: those of an epoch are mostly alike.

    >>> of_windows([8, 8, 8, 5])
    [(8, 3), (5, 1)]
    """
    return [(size, len(list(alike))) for size, alike in groupby(sizes)]


def of_randomness(device: torch.device) -> State:
    """Of torch's generators, Python's and NumPy's."""
    torch_state, python, numpy, on_device = randomness.get_state(device)
    return {"torch": torch_state, "python": python, "numpy": numpy, "device": on_device}


def to_randomness(state: State, device: torch.device) -> None:
    """Put back what ``of_randomness`` returned; of another kind of device there is nothing to put back."""
    on_device = state["device"] if device.type != "cpu" else None
    randomness.set_state((state["torch"], state["python"], state["numpy"], on_device), device)
