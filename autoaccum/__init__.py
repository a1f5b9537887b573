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
    from autoaccum.accumulator import Accumulator as Accumulator
    from autoaccum.errors import AutoaccumError as AutoaccumError
    from autoaccum.errors import AutoaccumWarning as AutoaccumWarning
    from autoaccum.errors import StopTraining as StopTraining
    from autoaccum.events import StepReport as StepReport
    from autoaccum.fitting import fit as fit
    from autoaccum.planner import Plan as Plan
    from autoaccum.planner import plan as plan
    from autoaccum.probing import ProbeReport as ProbeReport
    from autoaccum.probing import probe as probe
    from autoaccum.sweeps import sweep as sweep
    from autoaccum.trainer import FitResult as FitResult
    from autoaccum.trainer import Trainer as Trainer

_HOMES = {
    "Accumulator": "accumulator",
    "AutoaccumError": "errors",
    "AutoaccumWarning": "errors",
    "FitResult": "trainer",
    "Plan": "planner",
    "ProbeReport": "probing",
    "StepReport": "events",
    "StopTraining": "errors",
    "Trainer": "trainer",
    "fit": "fitting",
    "plan": "planner",
    "probe": "probing",
    "sweep": "sweeps",
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
