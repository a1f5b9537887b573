"""``FitResult``: what a run leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from autoaccum.events import Event, StepReport
from autoaccum.planning.plans import Plan
from autoaccum.reporting.shown import Facts, as_line, as_table, sizes_text


class Ran:
    """How windows were cut on one rank: the last full one, and the last that was short."""

    def __init__(self) -> None:
        """Begin with none."""
        self._full: tuple[int, ...] | None = None
        self._short: tuple[int, ...] | None = None

    def see(self, sizes: tuple[int, ...], *, is_full: bool) -> None:
        """Take the micro-batches that a window has committed with."""
        # Of an epoch's last window, which is short, nothing follows for the others.
        if is_full:
            self._full = sizes
        else:
            self._short = sizes

    def last(self, reports: Iterable[StepReport] = (), asked: int = 0) -> tuple[int, ...] | None:
        """Return the sizes of the last full window, else of the last; None where there was none.

        Args:
            reports: of windows, oldest first, to go by where this process has run none: those of an earlier one.
            asked: the effective batch of the newest of them.
        """
        if self._full is self._short is None:
            for report in reports:
                self.see(report.micro_batches, is_full=report.effective_batch == asked)
        return self._short if self._full is None else self._full


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class FitResult:
    """All that a run leaves to whoever called it."""

    history: Sequence[StepReport]
    """One report per window; with a ``run_dir`` read from there when it is looked at."""
    events: Sequence[Event]
    """Everything else that happened, in order; likewise."""
    plan: Plan
    """How the last full window was cut, whatever the next one would have been; the last of all where none was full."""
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
