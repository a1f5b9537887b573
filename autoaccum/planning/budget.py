"""The budget of a run: epochs, steps or samples, and the exact number of optimizer steps that it comes to.

A schedule of effective batches is followed window by window until it settles; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from autoaccum._checks import positive_int
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.events import StepReport
from autoaccum.planning.schedule_kinds import Progress, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The length of a run. At most one field is set; all None means one epoch."""

    epochs: int | None = None
    """Passes over the data."""
    steps: int | None = None
    """Optimizer steps."""
    samples: int | None = None
    """Samples trained on; the last window is cut short so that they come to exactly as many."""

    def __post_init__(self) -> None:
        """Check that at most one is given, and that it is an int of at least 1."""
        given = {}
        for name in ("epochs", "steps", "samples"):
            value = getattr(self, name)
            if value is not None:
                given[name] = positive_int(name, value)
        if len(given) > 1:
            first, second = list(given)[:2]
            raise ConflictingArgumentsError(second, given[second], first, "Give one budget.")

    @property
    def max_epochs(self) -> int | None:
        """Return the most passes over the data; None when another budget ends the run."""
        if self.steps or self.samples:
            return None
        return self.epochs or 1

    def spent(self, steps: int, samples: int) -> bool:
        """Return whether a budget in steps or samples is used up."""
        # Past it too: a run that is resumed may be allowed less than it has had.
        return (self.steps is not None and steps >= self.steps) or (
            self.samples is not None and samples >= self.samples
        )

    def totals(self, epoch_samples: int | None, schedule: Schedule, drop_last: bool) -> tuple[int | None, int | None]:
        """Return (optimizer steps, samples) of the whole run, exact; None where only training will tell.

        Args:
            epoch_samples: samples in one pass over the data, when known.
            schedule: samples per full window.
            drop_last: whether the short window at the end of a pass is left out.

        Raises:
            ArgumentError: ``drop_last`` would leave out all of an epoch.
        """
        if epoch_samples is None:
            return self.steps, self.samples
        # The epoch of the last window seen, and the samples that had been trained on when it began.
        epoch = begin = 0
        steps = samples = 0
        try:
            # Window by window, as training will go, but only until all further windows are alike: most schedules
            # settle early, and a run may have millions of windows.
            for progress, size in self.windows(epoch_samples, schedule, drop_last):
                if progress.epoch > epoch:
                    epoch, begin = progress.epoch, progress.samples
                if schedule.settled(progress):
                    left = epoch_samples - (progress.samples - begin)
                    return self._settled_totals(epoch_samples, schedule.at(progress), drop_last, progress, left)
                steps, samples = progress.step + 1, progress.samples + size
        except _UnforeseeableError:
            # However windows are cut, a pass has all of the data, unless its last samples may be dropped.
            if self.max_epochs is None or drop_last:
                return self.steps, self.samples
            return self.steps, self.samples or self.max_epochs * epoch_samples
        return steps, samples

    def check_plans(
        self, plans: Sequence[tuple[int, ...]], epoch_samples: int | None, schedule: Schedule, drop_last: bool
    ) -> None:
        """Check that recorded plans sum to the windows that they are for, as far as these can be foreseen.

        Args:
            plans: of a recorded run, one a window.
            epoch_samples: samples in one pass over the data, when known.
            schedule: samples per full window.
            drop_last: whether the short window at the end of a pass is left out.

        Raises:
            ArgumentError: one does not; of several the first.
        """
        try:
            if epoch_samples is None:
                # Where an epoch of a stream ends nobody knows, and a window there is short: none is longer.
                most = schedule.largest
                for number, plan in enumerate(plans, start=1):
                    if most is not None and sum(plan) > most:
                        raise _not_a_sum(plan, f"at most {most}", number)
            elif plans:
                windows = self.windows(epoch_samples, schedule, drop_last)
                for number, (plan, (_, size)) in enumerate(zip(plans, windows, strict=False), start=1):
                    if sum(plan) != size:
                        raise _not_a_sum(plan, str(size), number)
        except _UnforeseeableError:  # training will tell
            return

    def windows(self, epoch_samples: int, schedule: Schedule, drop_last: bool) -> Iterator[tuple[Progress, int]]:
        """Yield (where the run stands before it, samples) of one window after the other, to the end of the budget.

        Args:
            epoch_samples: samples in one pass over the data.
            schedule: samples per full window.
            drop_last: whether the short window at the end of a pass is left out.

        Raises:
            ArgumentError: ``drop_last`` leaves out all of an epoch.
        """
        step = samples = epoch = 0
        before = None  # what was asked for the window before
        while epoch != self.max_epochs:
            left = epoch_samples  # of this epoch
            while left:
                progress = Progress(step=step, epoch=epoch, samples=samples, effective_batch=before, reports=_UNSEEN)
                if not schedule.foreseeable:
                    raise _UnforeseeableError
                asked = schedule.at(progress)
                size = asked if self.samples is None else min(asked, self.samples - samples)
                # A window never reaches into the next epoch: it is short, or dropped.
                if size > left:
                    if drop_last:
                        break
                    size = left
                yield progress, size
                step += 1
                samples += size
                left -= size
                # What was asked for counts, and not the size of a window that the end of an epoch or of the budget has
                # cut short: a schedule goes on from the batch that it chose. But more than the data has was never had.
                before = min(asked, epoch_samples)
                if self.spent(step, samples):
                    return
            # Else a budget in steps or samples would never be spent, and the loop never end.
            if left == epoch_samples:
                raise ArgumentError(
                    "drop_last",
                    True,
                    f"data of at least effective_batch={asked} samples in epoch {epoch}",
                    f"It has {epoch_samples}, so the only window of that epoch would be left out. "
                    "That of a DataLoader counts too.",
                )
            epoch += 1

    def _settled_totals(
        self, epoch_samples: int, batch: int, drop_last: bool, progress: Progress, left: int
    ) -> tuple[int, int]:
        """Return the totals when every window from ``progress`` on asks for ``batch``.

        Args:
            epoch_samples: samples in one pass over the data.
            batch: samples of each full window to come.
            drop_last: whether the short window at the end of a pass is left out.
            progress: where the run stands.
            left: samples to come of the epoch that it is in.
        """

        def windows_of(samples: int) -> tuple[int, int]:
            """Return (windows, samples in them) of so many samples to the end of an epoch."""
            used = samples - samples % batch if drop_last else samples
            return -(-used // batch), used  # the quotient rounded up, in integers of any size

        # What is to come is the rest of this epoch, then whole epochs, then a part of one. The window at ``progress``
        # has been found to exist, so with ``drop_last`` too an epoch has one: no divisor is 0.
        windows, used = windows_of(epoch_samples)
        windows_now, used_now = windows_of(left)
        if self.steps is not None:
            more = self.steps - progress.step
            if more < windows_now:
                return self.steps, progress.samples + more * batch
            epochs, rest = divmod(more - windows_now, windows)
            return self.steps, progress.samples + used_now + epochs * used + rest * batch
        if self.samples is not None:
            more = self.samples - progress.samples
            # The last window of the run is cut to what the budget has left, and so is not dropped for being short.
            if more <= left:
                return progress.step - (-more // batch), self.samples
            epochs, rest = divmod(more - used_now, used)
            return progress.step + windows_now + epochs * windows - (-rest // batch), self.samples
        epochs = (self.max_epochs or 1) - progress.epoch - 1
        return progress.step + windows_now + epochs * windows, progress.samples + used_now + epochs * used


def _not_a_sum(plan: tuple[int, ...], wanted: str, window: int) -> ArgumentError:
    cure = "Pass the recorded run's effective_batch and budget too, or leave micro_batch out."
    return ArgumentError("micro_batch", plan, f"sizes that sum to {wanted} in window {window}", cure)


class _UnforeseeableError(BaseException):
    """The sign that a schedule depends on what training shows. No ``except Exception`` of a user's is to catch it."""


class _Unseen(Sequence[StepReport]):
    """Reports of windows that were not run: whoever looks at them cannot be counted in advance."""

    def _look(self, *_: object) -> NoReturn:
        raise _UnforeseeableError

    __len__ = __getitem__ = __eq__ = __hash__ = _look


_UNSEEN = _Unseen()
