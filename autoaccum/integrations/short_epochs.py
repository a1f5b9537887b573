"""Says, of a loop that is not ours, that a step asks for more samples than an epoch has."""

from __future__ import annotations

from typing import Any

from autoaccum.events import Event
from autoaccum.window import notices
from autoaccum.window.announcer import Announcer


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
