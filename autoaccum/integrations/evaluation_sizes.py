"""Halves evaluation batches that ran out of memory, and warns of epochs shorter than a step, in loops of others."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch

from autoaccum.errors import AutoaccumWarning, NothingFitsError
from autoaccum.events import Event
from autoaccum.memory.devices import memory_of
from autoaccum.memory.oom import RanOut
from autoaccum.step import notices
from autoaccum.step.notices import Announcer

SAME = "with the same results"
"""What is said of an evaluation in pieces where its loss is one of the whole batch, however it is run."""
MEANS = (
    "with the same outputs, and the same loss where it is a mean over samples or what they count; one that compares "
    "the samples of a batch is another one in pieces"
)
"""What is said where nobody knows which loss it is."""


def smaller(tried: int, outcome: RanOut, phase: str, device: torch.device, cure: str, results: str = MEANS) -> int:
    """Return how many samples to run at once after so many have run out of memory: half of them; say so.

    Args:
        tried: the samples that were run at once.
        outcome: that they have run out of memory.
        phase: in which, as an error calls it.
        device: where they were run, which is given back what the allocator keeps.
        cure: how a user begins with fewer; "{size}" stands for the size that is returned.
        results: what becomes of the results.

    Raises:
        NothingFitsError: it was a single one.
    """
    # By halves and not by a search as in training: batches of evaluation are seldom at the edge.
    if tried < 2:
        error = NothingFitsError(phase=phase, micro_batch=1, peak_bytes=None, limit_bytes=None)
        raise error from outcome.error
    size = (tried + 1) // 2
    # What has failed may lie in circles of references.
    gc.collect()
    memory_of(device).release()
    warnings.warn(
        f"Memory ran out in an evaluation of {tried} samples at once. They are evaluated {size} at a time from here "
        f"on, {results}; training goes on as it did. {cure.format(size=size)}",
        AutoaccumWarning,
        stacklevel=3,
    )
    return size


class ShortEpochs:
    """Looks at the datasets of a run, before there is an ``Accumulator`` that could say what is wrong with one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """What was said, for the events of the accumulator."""
        self._announcer = Announcer(self.events.append)

    def look(self, effective_batch: int, *sources: Any) -> None:
        """Say once that there are fewer samples than each step asks for; nothing of a stream.

        Args:
            effective_batch: samples of a step.
            sources: a dataset, and what draws samples of it, which may be more.
        """
        try:
            there = max(map(len, sources))
        except (TypeError, NotImplementedError):
            return
        if there < effective_batch:
            self._announcer.say_once(notices.more_than_there_are(effective_batch, there))
