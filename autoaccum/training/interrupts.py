"""Signals that end a run after the window instead of in its midst."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autoaccum.reporting.progress import Teller

CLUSTERS = [number for name in ("SIGTERM", "SIGUSR1") if (number := getattr(signal, name, None)) is not None]
"""What schedulers of clusters send some time before they kill."""


@contextmanager
def interrupt_calls(
    function: Callable[[], None], teller: Teller | None = None, *, clusters: bool = False
) -> Iterator[None]:
    """Call ``function``, within it, at the first Ctrl-C; a second one does what it did before: it stops at once.

    Where there is a ``teller``, it says at once that the signal was heard: a window may take minutes.

    With ``clusters`` the signals that clusters send call it too, however often they come.

    Outside of the main thread, which alone receives signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Looked up, for whoever calls may have handlers of its own: they are put back, and a second Ctrl-C goes to them.
    caught = [signal.SIGINT, *(CLUSTERS if clusters else [])]
    before = {number: signal.getsignal(number) for number in caught}

    def interrupt(number: int, frame: Any) -> None:
        # A person who presses twice does not want to wait. What clusters send may come several times, and they give
        # time before they kill.
        if number == signal.SIGINT:
            # A shell has what it starts in the background ignore Ctrl-C. Who sends it all the same means it.
            is_deaf = before[number] in (None, signal.SIG_IGN)
            signal.signal(number, signal.default_int_handler if is_deaf else before[number])
        function()
        if teller is not None:
            teller.ending(may_repeat=number == signal.SIGINT)

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        # A handler that was not installed from Python reads as None, and cannot be put back.
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
