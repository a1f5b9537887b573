"""How long to train: one budget, in epochs, steps or samples, and the exact number of optimizer steps it comes to."""

from __future__ import annotations

from dataclasses import dataclass

from autoaccum.arguments import positive_int
from autoaccum.errors import ConflictingArgumentsError


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

    def spent(self, steps: int, samples: int) -> bool:
        """Whether a budget in steps or samples is used up."""
        return steps == self.steps or (self.samples is not None and samples >= self.samples)

    def totals(self, epoch_samples: int | None, effective_batch: int, drop_last: bool) -> tuple[int | None, int | None]:
        """(optimizer steps, samples) of the whole run; None where only reading the data will tell.

        Args:
            epoch_samples: samples in one pass over the data, when known.
            effective_batch: samples per full window.
            drop_last: whether the short window at the end of a pass is left out.
        """
        if epoch_samples is None:
            return self.steps, self.samples
        used = epoch_samples - epoch_samples % effective_batch if drop_last else epoch_samples
        windows = -(-used // effective_batch)
        if self.steps is not None:
            epochs, rest = divmod(self.steps, windows)
            return self.steps, epochs * used + min(rest * effective_batch, used)
        if self.samples is not None:
            epochs, rest = divmod(self.samples, used)
            return epochs * windows + -(-rest // effective_batch), self.samples
        epochs = self.max_epochs or 1
        return epochs * windows, epochs * used
