"""Train PyTorch models at an exact effective batch, in whatever memory there is.

>>> import autoaccum
>>> autoaccum.plan(effective_batch=256, max_micro_batch=100).sizes
(86, 85, 85)

The names below are imported when they are first used (PEP 562), so that those without torch stay quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoaccum._version import __version__

if TYPE_CHECKING:
    from autoaccum.errors import AutoaccumError as AutoaccumError
    from autoaccum.errors import AutoaccumWarning as AutoaccumWarning
    from autoaccum.errors import StopTraining as StopTraining
    from autoaccum.events import StepReport as StepReport
    from autoaccum.planning.plans import Plan as Plan
    from autoaccum.sweeps.sweep import sweep as sweep
    from autoaccum.training.accumulator import Accumulator as Accumulator
    from autoaccum.training.check import CheckReport as CheckReport
    from autoaccum.training.check import check as check
    from autoaccum.training.convert_batch_norm import convert_batch_norm as convert_batch_norm
    from autoaccum.training.estimate import Estimate as Estimate
    from autoaccum.training.estimate import estimate as estimate
    from autoaccum.training.evaluate import evaluate as evaluate
    from autoaccum.training.fit import fit as fit
    from autoaccum.training.load_best import load_best as load_best
    from autoaccum.training.predict import predict as predict
    from autoaccum.training.probe import ProbeReport as ProbeReport
    from autoaccum.training.probe import probe as probe
    from autoaccum.training.result import FitResult as FitResult
    from autoaccum.training.synonyms import plan as plan
    from autoaccum.training.trainer import Trainer as Trainer

_HOMES = {
    "Accumulator": "training.accumulator",
    "AutoaccumError": "errors",
    "AutoaccumWarning": "errors",
    "CheckReport": "training.check",
    "Estimate": "training.estimate",
    "FitResult": "training.result",
    "Plan": "planning.plans",
    "ProbeReport": "training.probe",
    "StepReport": "events",
    "StopTraining": "errors",
    "Trainer": "training.trainer",
    "check": "training.check",
    "convert_batch_norm": "training.convert_batch_norm",
    "estimate": "training.estimate",
    "evaluate": "training.evaluate",
    "fit": "training.fit",
    "load_best": "training.load_best",
    "plan": "training.synonyms",
    "predict": "training.predict",
    "probe": "training.probe",
    "sweep": "sweeps.sweep",
}

_REMOVED = {
    "moe_balancing": "leave it out, because in one process a router loss is exact by default (accumulate='auto')",
}
"""Removed names, each with what to do instead."""

_MODULES = ("callbacks", "errors", "events", "reporting", "schedules", "splits", "testing")

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # whose names are used as autoaccum.schedules.Linear
        return import_module(f"{__name__}.{name}")
    if name in _REMOVED:
        raise AttributeError(f"{__name__}.{name} was removed: {_REMOVED[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoaccum.errors import MissingExtraError

    home = f"{__name__}.{_HOMES[name]}"
    try:
        value = globals()[name] = getattr(import_module(home), name)  # looked up once
    except MissingExtraError:
        # The call raises it, so that ``help(autoaccum)`` and ``from autoaccum import *``, which get every name, do not.
        return lambda *args, **kwargs: getattr(import_module(home), name)(*args, **kwargs)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
