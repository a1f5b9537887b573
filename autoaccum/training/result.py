"""``FitResult``: what a run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoaccum.events import Event, StepReport
from autoaccum.planning.plans import Plan
from autoaccum.reporting.shown import Facts, as_line, as_table, sizes_text


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
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

    # A cell of a notebook that ends in it would show every window and every weight.

    def __repr__(self) -> str:
        return as_line("FitResult", self._facts())

    def _repr_html_(self) -> str:
        return as_table("FitResult", self._facts())

    def _facts(self) -> Facts:
        facts: Facts = {"num_steps": self.num_steps, "num_samples": self.num_samples}
        if self.history:
            facts["loss"] = f"{self.history[-1].loss:.6g}"
        return facts | {"plan": sizes_text(self.plan.sizes), "model": type(self.model).__name__}
