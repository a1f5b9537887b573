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
    from autoaccum.planning.cuts import Plan as Plan
    from autoaccum.planning.cuts import plan as plan
    from autoaccum.sweeps.sweep import sweep as sweep
    from autoaccum.training.accumulator import Accumulator as Accumulator
    from autoaccum.training.fitting import fit as fit
    from autoaccum.training.probing import ProbeReport as ProbeReport
    from autoaccum.training.probing import probe as probe
    from autoaccum.training.trainer import FitResult as FitResult
    from autoaccum.training.trainer import Trainer as Trainer

_HOMES = {
    "Accumulator": "training.accumulator",
    "AutoaccumError": "errors",
    "AutoaccumWarning": "errors",
    "FitResult": "training.trainer",
    "Plan": "planning.cuts",
    "ProbeReport": "training.probing",
    "StepReport": "events",
    "StopTraining": "errors",
    "Trainer": "training.trainer",
    "fit": "training.fitting",
    "plan": "planning.cuts",
    "probe": "training.probing",
    "sweep": "sweeps.sweep",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in ("schedules", "testing"):  # whose names are used as autoaccum.schedules.Linear
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
