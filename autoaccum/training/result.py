"""``FitResult``: what a run leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from torch import nn

from autoaccum.events import Event, Finished, StepReport, StepSkipped
from autoaccum.planning.plans import Plan, sizes_text
from autoaccum.reporting.lines import Facts, as_line, as_table

Ended = Literal["finished", "interrupted", "stopped", "diverged"]
"""How a run has ended; an error of it is raised."""


def cut_last(
    ran: Mapping[bool, tuple[int, ...]], reports: Iterable[StepReport] = (), asked: int = 0
) -> tuple[int, ...] | None:
    """Return the sizes of the last window that was full, else of the last one; None where there was none.

    Args:
        ran: the micro-batches of the last window that was full, by True, and of the last that was short, by False.
        reports: of windows, oldest first, to go by where this process has run none: those of an earlier one.
        asked: the effective batch of the newest of them.
    """
    # Of an epoch's last window, which is short, nothing follows for the others.
    found = dict(ran) or {report.effective_batch == asked: report.micro_batches for report in reports}
    return found.get(True, found.get(False))


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

    @property
    def ended(self) -> Ended:
        """``finished`` (the budget was spent), ``interrupted`` (a signal), ``stopped`` (a callback) or ``diverged``."""
        if (reason := self._reason) == "interrupted":
            return "interrupted"
        return "diverged" if self.divergence else "stopped" if reason == "stopped" else "finished"

    @property
    def divergence(self) -> str:
        """The training loss of the last step and since when it is NaN or infinite; empty if it is finite.

        Skipped steps and validation do not count.
        """
        # A skipped step has changed nothing: none of its samples counts, or its gradient overflowed.
        skipped = {event.step for event in self.events if isinstance(event, StepSkipped)}
        stepped = (report for report in reversed(self.history) if report.step not in skipped)
        if tail := list(takewhile(lambda report: not math.isfinite(report.loss), stepped)):
            return f"the loss is {tail[0].loss} since step {tail[-1].step}"
        return ""

    @property
    def _reason(self) -> str:
        return next((event.reason for event in reversed(self.events) if isinstance(event, Finished)), "")

    # A cell of a notebook that ends in it would show every window and every weight.

    def __repr__(self) -> str:
        return as_line("FitResult", self._facts())

    def _repr_html_(self) -> str:
        return as_table("FitResult", self._facts())

    def _facts(self) -> Facts:
        facts: Facts = {"ended": self.ended, "num_steps": self.num_steps, "num_samples": self.num_samples}
        if self.history:
            facts["loss"] = f"{self.history[-1].loss:.6g}"
        return facts | {"plan": sizes_text(self.plan.sizes), "model": type(self.model).__name__}
