"""Says what a user should know of, each thing once: as an event of the run, and as a warning at the user's own line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Event, Notice


class Announcer:
    """Remembers what was said."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """Set up; ``emit`` takes the events."""
        self._emit = emit
        self._said: set[str] = set()  # consequences: the same one may have causes that differ in a number

    def tell(self, event: Event) -> None:
        """Emit an event; announce it where it is a notice, once."""
        if isinstance(event, Notice):
            self.say_once(event)
        else:
            self._emit(event)

    def say_once(self, notice: Notice) -> None:
        """Announce a notice, unless one of the same consequence was announced by this."""
        if notice.consequence not in self._said:
            self._said.add(notice.consequence)
            self.say(notice)

    def say(self, notice: Notice) -> None:
        """Announce a notice whatever was said before."""
        # Both: the event is for callbacks and records, and the warning for whoever looks at neither.
        self._emit(notice)
        # The warning is to point at the first line that is neither ours nor PyTorch's.
        level, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("autoaccum", "torch"):
            level, frame = level + 1, frame.f_back
        warnings.warn(str(notice), AutoaccumWarning, stacklevel=level)

    def state_dict(self) -> list[str]:
        """Return what was said, for a checkpoint: a resumed run does not say it again."""
        return sorted(self._said)

    def load_state_dict(self, said: list[str]) -> None:
        """Add what an earlier process has said."""
        self._said.update(said)
