"""How long to train: one budget, in epochs, steps or samples, and the exact number of optimizer steps it comes to.

A schedule of effective batches is followed window by window until it settles; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from autoaccum._checks import positive_int
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.events import StepReport
from autoaccum.planning.schedules import Progress, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """At most one is set; all None means one epoch."""

    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        """Check that at most one is given, and that it is an int of at least 1."""
        given = {name: value for name in ("epochs", "steps", "samples") if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            positive_int(name, value)
        if len(given) > 1:
            first, second = list(given)[:2]
            raise ConflictingArgumentsError(second, given[second], first, "Give one budget.")

    @property
    def max_epochs(self) -> int | None:
        """Passes over the data; None when another budget ends the run."""
        return self.epochs or (None if self.steps or self.samples else 1)

    def most_samples(self, epoch_samples: int | None) -> int | None:
        """Of the whole run; None when neither the budget nor the data says so."""
        if self.max_epochs is None or epoch_samples is None:
            return self.samples
        return self.max_epochs * epoch_samples

    def spent(self, steps: int, samples: int) -> bool:
        """Whether a budget in steps or samples is used up."""
        # Past it too: a run that is resumed may be allowed less than it has had.
        return (self.steps is not None and steps >= self.steps) or (
            self.samples is not None and samples >= self.samples
        )

    def totals(self, epoch_samples: int | None, schedule: Schedule, drop_last: bool) -> tuple[int | None, int | None]:
        """(optimizer steps, samples) of the whole run, exact; None where only training will tell.

        Args:
            epoch_samples: samples in one pass over the data, when known.
            schedule: samples per full window.
            drop_last: whether the short window at the end of a pass is left out.

        Raises:
            ArgumentError: ``drop_last`` would leave out all of an epoch.
        """
        if epoch_samples is None:
            return self.steps, self.samples
        steps = samples = epoch = begin = 0
        try:
            for progress, size in self.windows(epoch_samples, schedule, drop_last):
                if progress.epoch > epoch:
                    epoch, begin = progress.epoch, progress.samples
                if schedule.settled(progress):
                    left = epoch_samples - (progress.samples - begin)
                    return self._settled_totals(epoch_samples, schedule.at(progress), drop_last, progress, left)
                steps, samples = progress.step + 1, progress.samples + size
        except _UnforeseeableError:
            whole = None if self.max_epochs is None or drop_last else self.max_epochs * epoch_samples
            return self.steps, self.samples or whole
        return steps, samples

    def windows(self, epoch_samples: int, schedule: Schedule, drop_last: bool) -> Iterator[tuple[Progress, int]]:
        """(where the run stands before it, samples) of one window after the other, to the end of the budget.

        Raises:
            ArgumentError: ``drop_last`` leaves out all of an epoch.
        """
        step = samples = epoch = 0
        before = None
        while epoch != self.max_epochs:
            left = epoch_samples
            while left:
                progress = Progress(step=step, epoch=epoch, samples=samples, effective_batch=before, reports=_UNSEEN)
                if not schedule.foreseeable:
                    raise _UnforeseeableError
                asked = schedule.at(progress)
                size = asked if self.samples is None else min(asked, self.samples - samples)
                if size > left:
                    if drop_last:
                        break
                    size = left
                yield progress, size
                step += 1
                samples += size
                left -= size
                before = min(asked, epoch_samples)
                if self.spent(step, samples):
                    return
            if left == epoch_samples:
                raise ArgumentError(
                    "drop_last",
                    True,
                    f"data of at least effective_batch={asked} samples in epoch {epoch}",
                    f"It has {epoch_samples}, so the only window of that epoch would be left out.",
                )
            epoch += 1

    def _settled_totals(
        self, epoch_samples: int, batch: int, drop_last: bool, progress: Progress, left: int
    ) -> tuple[int, int]:
        """The totals when every window from ``progress`` on asks for ``batch``; its epoch has ``left`` samples to come.

        One of these windows has been found to exist, so with ``drop_last`` too an epoch has one: no divisor is 0.
        """

        def cut(samples: int) -> tuple[int, int]:
            used = samples - samples % batch if drop_last else samples
            return -(-used // batch), used

        windows, used = cut(epoch_samples)
        windows_now, used_now = cut(left)
        if self.steps is not None:
            more = self.steps - progress.step
            if more < windows_now:
                return self.steps, progress.samples + more * batch
            epochs, rest = divmod(more - windows_now, windows)
            return self.steps, progress.samples + used_now + epochs * used + rest * batch
        if self.samples is not None:
            more = self.samples - progress.samples
            if more <= left:
                return progress.step - (-more // batch), self.samples
            epochs, rest = divmod(more - used_now, used)
            return progress.step + windows_now + epochs * windows - (-rest // batch), self.samples
        epochs = (self.max_epochs or 1) - progress.epoch - 1
        return progress.step + windows_now + epochs * windows, progress.samples + used_now + epochs * used


class _UnforeseeableError(BaseException):
    """What a schedule asks for depends on what training shows. No ``except Exception`` of a user's is to catch it."""


class _Unseen(Sequence[StepReport]):
    """Reports of windows that were not run."""

    def _look(self, *_: object) -> NoReturn:
        raise _UnforeseeableError

    __len__ = __getitem__ = __eq__ = __hash__ = _look


_UNSEEN = _Unseen()
