"""A page that is written again and again while what it is about goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoaccum.memory import clock

EVERY = 10.0
"""Write a page anew after so many seconds, and have browsers load it as often."""
_SHARE = 4
"""Wait at least so many times as long as a page took to write, which may be the longer the longer a run is."""

T = TypeVar("T")


def follow(write: Callable[[float | None], T], goes_on: Callable[[T], bool], begun: Callable[[T], object]) -> T:
    """Write until nothing goes on or Ctrl-C is pressed, and once more so that no browser loads it again; return that.

    Args:
        write: writes the page; it takes the seconds after which browsers are to load it again, None for never.
        goes_on: (what was written) -> whether there will be something new.
        begun: called with what was written first.
    """
    is_first = True
    try:
        while True:
            before = clock.now()
            written = write(EVERY)
            if is_first:
                begun(written)
                is_first = False
            if not goes_on(written):
                break
            clock.sleep(max(EVERY, _SHARE * (clock.now() - before)))
    except KeyboardInterrupt:
        pass  # whoever looks has seen enough; what goes on is another process
    return write(None)
