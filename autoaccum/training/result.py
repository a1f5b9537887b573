"""``FitResult``: what a run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoaccum.events import Event, StepReport
from autoaccum.planning.plans import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """All that a run leaves to whoever called it."""

    history: Sequence[StepReport]
    """One report per window; with a ``run_dir`` read from there when it is looked at."""
    events: Sequence[Event]
    """Everything else that happened, in order; likewise."""
    plan: Plan
    """How the last full window was cut."""
    num_steps: int
    """Optimizer steps taken."""
    num_samples: int
    """Samples trained on."""
    model: nn.Module
    """The model that was passed in, trained in place."""
    optimizer: torch.optim.Optimizer
    """With its state."""
