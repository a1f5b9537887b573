"""Where a run stands in its epochs, and how large its next window is to be."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from autoaccum.data.base import Reader, Window
from autoaccum.errors import EmptyDatasetError
from autoaccum.events import StepReport
from autoaccum.planning.budget import Budget
from autoaccum.planning.schedules import REPORTS, Constant, Progress, Schedule
from autoaccum.step import notices
from autoaccum.step.step import Step


class Pace:
    """A run's place in its epochs: it asks the schedule, and keeps to the data, the budget and recorded plans."""

    def __init__(
        self,
        schedule: Schedule,
        budget: Budget,
        *,
        num_samples: int | None,
        drop_last: bool,
        plans: Sequence[tuple[int, ...]],
        step: Step,
    ) -> None:
        """Begin with nothing trained.

        Args:
            schedule: says how many samples windows are to have.
            budget: when the run is over.
            num_samples: in one pass over the data, when known.
            drop_last: whether the short window at an epoch's end is left out.
            plans: of a recorded run, one a window.
            step: counts the steps, and says how windows are cut.
        """
        self._schedule = schedule
        # Most runs have one batch throughout: these need not say where they stand before each window.
        self._constant = schedule.effective_batch if isinstance(schedule, Constant) else None
        # (epochs, steps, samples), of which no more than one is finite: asked after each window.
        of_budget = (budget.max_epochs, budget.steps, budget.samples)
        self._allowance = tuple(math.inf if most is None else most for most in of_budget)
        self._budget = budget
        self._num_samples = num_samples
        self._drop_last = drop_last
        self._plans = plans
        self.has_plans = bool(plans)
        """Whether there are plans of a recorded run."""
        self._step = step
        self.epoch = 0
        """The pass over the data that the next window belongs to."""
        # A resumed run's reader passes over these; a stream can do so only by reading them again, one by one.
        self.windows = array("q")
        """The sizes of those of this epoch so far."""
        self.epoch_seen = 0
        """Their sum."""
        self.samples_seen = 0
        """Samples trained on."""
        # A schedule that follows the noise goes by steps from this one; 0 before the first window.
        self.effective_batch = 0
        """Samples that were asked for in the last window."""
        # Beside what was passed, for of a stream this changes, and checkpoints keep it.
        self.epoch_samples = num_samples
        """In one pass; of a stream as far as one has told."""
        # What a function for the effective batch may look at. In memory, for a run may have millions.
        self.reports: deque[StepReport] = deque(maxlen=REPORTS)
        """The newest, oldest first."""

    def has_passed(self, every: int | None) -> bool:
        """Return whether the last window has passed a multiple of so many samples; never of None."""
        seen = self.samples_seen
        return every is not None and bool(self.windows) and seen // every > (seen - self.windows[-1]) // every

    def next_window(self, reader: Reader) -> tuple[Window, int] | None:
        """Return the next window and the samples that were asked for; None after the epoch's last window.

        The window has fewer than were asked for at an epoch's end, and at the budget's.
        """
        if self.epoch_seen == self._num_samples:  # nothing is asked: a function may have no answer here
            return None
        asked = self.asked()
        is_free = not self.has_plans and self._budget.samples is None
        window = reader.window(asked if is_free else self._allowed(asked), self._drop_last)
        if window is None:
            return None
        # Of a stream it is known from its second pass on; and it may have more than in its last one.
        if self._num_samples is None and self.epoch_samples is not None:
            self.epoch_samples = max(self.epoch_samples, window.num_samples)
            asked = self._at_most(self.epoch_samples, asked)
        self.effective_batch = asked
        return window, asked

    def asked(self) -> int:
        """Samples that the schedule asks for next, and the data can give."""
        asked = self._constant
        if asked is not None and (self._num_samples is None or asked <= self._num_samples):
            return asked
        return self._at_most(self._num_samples, self._schedule.at(self._progress()) if asked is None else asked)

    def _at_most(self, there: int | None, asked: int) -> int:
        """Return what is asked for, or all the samples that are there if that is fewer, which is said once."""
        if there is None or asked <= there:
            return asked
        # Not an error: a schedule may grow past the data, and a window of all samples is what was asked for at best.
        self._step.announcer.say_once(notices.more_than_there_are(asked, there))
        return there

    def _allowed(self, asked: int) -> int:
        """Samples that the next window may have."""
        # A recorded run's window was cut to its own budget, so its plan has the last word.
        if (plan := self.recorded_plan()) is not None:
            return sum(plan)
        return asked if self._budget.samples is None else min(asked, self._budget.samples - self.samples_seen)

    def recorded_plan(self) -> tuple[int, ...] | None:
        """Return the plan that was passed for the next window; None where there is none."""
        return self._plans[self._step.number] if self._step.number < len(self._plans) else None

    def _progress(self) -> Progress:
        """Return what a schedule may go by."""
        return Progress(
            step=self._step.number,
            epoch=self.epoch,
            samples=self.samples_seen,
            effective_batch=self.effective_batch or None,
            reports=list(self.reports),
        )

    def sizes_ahead(self) -> Callable[[int], tuple[int, ...]]:
        """Return a function (position) -> how the window that begins there will be cut, as things stand.

        Workers collate by it. They ask for one window of the epoch after the other, ahead of training.
        """
        # Counted here, for training is still at an earlier window when they ask. What it changes meanwhile, a re-plan
        # say, they do not hear of: then batches are cut or joined once more.
        step, before = self._step.number, self.samples_seen - self.epoch_seen

        def sizes_at(position: int) -> tuple[int, ...]:
            nonlocal step
            if position == self.epoch_samples or self._budget.spent(step, before + position):
                return (1,)  # there will be no window
            # By what is known now: a schedule that goes by reports may ask otherwise once it is the window's turn.
            asked = self._schedule.at(replace(self._progress(), step=step, samples=before + position))
            step += 1
            left = asked if self.epoch_samples is None else self.epoch_samples - position
            return self._step.tuner.plan(max(1, min(asked, left)))

        return sizes_at

    def passed(self, num_samples: int) -> None:
        """Count a window of so many samples that has committed."""
        self.windows.append(num_samples)
        self.epoch_seen += num_samples
        self.samples_seen += num_samples

    def end_epoch(self) -> None:
        """Go on to the next epoch, for the data has no more.

        Raises:
            EmptyDatasetError: it had nothing in this one.
        """
        if not self.windows:
            raise EmptyDatasetError(
                "data", f"epoch {self.epoch} has no window (an iterator yields its items only once)."
            )
        if self._num_samples is None and not self._drop_last:  # which leaves no window short
            self.epoch_samples = max(self.epoch_samples or 0, self.epoch_seen)
        self.epoch += 1
        self.windows, self.epoch_seen = array("q"), 0

    @property
    def is_spent(self) -> bool:
        """Return whether the budget is used up."""
        epochs, steps, samples = self._allowance
        return self.epoch >= epochs or self._step.number >= steps or self.samples_seen >= samples

    def reported(self, report: StepReport) -> None:
        """Keep a report for schedules to look at: in a checkpoint too, and so without tensors, which may be large."""
        if report.outputs:
            report = replace(report, outputs={name: n for name, n in report.outputs.items() if isinstance(n, float)})
        self.reports.append(report)

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands, and the reports that a schedule may look at, as plain values."""
        # The step is counted by what takes the steps, and kept with it.
        return {
            "epoch": self.epoch,
            "epoch_samples": self.epoch_samples,
            "epoch_seen": self.epoch_seen,
            "samples_seen": self.samples_seen,
            "effective_batch": self.effective_batch,
            # (size, how many such windows) in a row: an epoch may have millions, which mostly are alike.
            "windows": [(size, len(list(alike))) for size, alike in groupby(self.windows)],
            "reports": [asdict(report) for report in self.reports],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.epoch, self.epoch_samples = state["epoch"], state["epoch_samples"]
        self.epoch_seen, self.samples_seen = state["epoch_seen"], state["samples_seen"]
        self.effective_batch = state["effective_batch"]
        self.windows = array("q", (size for size, count in state["windows"] for _ in range(count)))
        self.reports.clear()
        self.reports.extend(StepReport(**report) for report in state["reports"])
