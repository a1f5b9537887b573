"""Cuts windows into micro-batches: by samples, or by length where samples differ in length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoaccum.planning.cuts import Lengths, are_alike, cheapest, cut, cut_by_weight
from autoaccum.planning.history import History


class Cutter:
    """What there is to cut, and into what; which weight is right is for others to say."""

    def __init__(self, *, smallest: int, ceiling: int, by_samples: bool, floor: int = 1) -> None:
        """Set up.

        Args:
            smallest: samples that every micro-batch has at least, unless its window has fewer.
            ceiling: the most samples in a micro-batch of any use.
            by_samples: whether sizes are a user's own, and so of samples however long they are.
            floor: the fewest samples of a micro-batch as the user has it, below which ``smallest`` never falls.
        """
        # What samples weigh is told by the trials. A history that is begun anew takes this one's place, so that others
        # ask for it here each time.
        self.history = History()
        self._floor = floor
        self.set_smallest(smallest)
        self.full_window: tuple[int, Lengths] = (0, None)
        """Samples of the last full window, and their lengths; 0 before the first."""
        # What is searched for and timed is the best for these; a shorter one, at an epoch's end, is cut in passing.
        self.ceiling = ceiling
        """The most samples in a micro-batch of any use."""
        self._by_samples = by_samples

    def set_smallest(self, needed: int) -> None:
        """Take how few samples can be computed; micro-batches have as many at least, and as the user has asked for."""
        # Apart, for a later process may be told another floor, and what a model needs may become less.
        self.needed = needed
        """The fewest samples that can be computed."""
        self.smallest = max(needed, self._floor)
        """Samples that every micro-batch has at least, unless its window has fewer."""

    @property
    def min_micro_batch(self) -> int | None:
        """Return the user's own smallest size, where that is why there is none smaller."""
        return self._floor if self._floor > self.needed else None

    def lengths_that_count(self, lengths: Lengths) -> Lengths:
        """Return the lengths by which micro-batches are weighed: none where sizes are the user's own."""
        return None if self._by_samples else lengths

    def sizes(self, num_samples: int, lengths: Lengths, weight: int, fewest: int = 1) -> tuple[int, ...]:
        """Cut a window into near-equal micro-batches, none heavier than ``weight`` but those of the smallest size.

        There are ``fewest`` at least, where it has enough samples.
        """
        lengths = self.lengths_that_count(lengths)
        most = -(-num_samples // fewest)  # rounded up: as many micro-batches of that size hold the window
        if lengths is None or are_alike(lengths):
            # One sample may weigh more than the weight, and still has to be run.
            return self.cut(num_samples, min(most, max(1, weight // self.history.each(lengths))))
        weights = [self.history.weight(length) for length in lengths]
        sizes = cut_by_weight(weights, weight, self.smallest)
        # By weight alone there may be fewer than are wanted.
        return sizes if len(sizes) >= fewest else self.cut(num_samples, most)

    def cut(self, num_samples: int, max_micro_batch: int, smallest: int | None = None) -> tuple[int, ...]:
        """Cut a window of samples that are alike; ``smallest`` in place of the smallest size that there is."""
        smallest = self.smallest if smallest is None else smallest
        return cut(num_samples, max_micro_batch, smallest)

    def cheapest(self, num_samples: int, max_micro_batch: int, seconds: Callable[[int], float]) -> int:
        """Return the samples of the largest micro-batch of the cut of a window that takes least time."""
        return cheapest(num_samples, max_micro_batch, seconds, self.smallest)[0]

    def weights(self, sizes: Sequence[int], lengths: Lengths = None) -> list[int]:
        """Return the weights of the micro-batches of a window that is cut into these sizes."""
        return self.history.weights(sizes, self.lengths_that_count(lengths))

    def weights_of(self, window: tuple[int, Lengths], weight: int) -> list[int]:
        """Return the weights of the micro-batches that a window is cut into, none being heavier than ``weight``."""
        num_samples, lengths = window
        return self.weights(self.sizes(num_samples, lengths, weight), lengths)

    def weights_of_full(self, weight: int) -> list[int]:
        """Return the same for a full window; before the first one it stands for a single micro-batch."""
        return self.weights_of(self.full_window, weight) if self.full_window[0] else [weight]

    def work(self, window: tuple[int, Lengths]) -> int:
        """Return what the samples of a window weigh without padding."""
        num_samples, lengths = window
        return self.history.work(num_samples, self.lengths_that_count(lengths))

    def each(self, lengths: Lengths) -> int:
        """Return what each of so many samples weighs that are padded to the first of them."""
        return self.history.each(self.lengths_that_count(lengths))

    def heaviest(self, num_samples: int, each: int) -> int:
        """Return the most that a micro-batch of such a window may weigh, where each sample weighs ``each``."""
        return min(self.ceiling, num_samples) * each

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"loads": self.history.state_dict(), "smallest": self.needed, "window": self.full_window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.history.load_state_dict(state["loads"])
        self.set_smallest(state["smallest"])
        self.full_window = state["window"]
