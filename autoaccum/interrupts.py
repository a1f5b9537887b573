"""Ctrl-C that ends a run after the window instead of in its midst."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_calls(function: Callable[[], None]) -> Iterator[None]:
    """Within it, the first Ctrl-C calls ``function``; a second one does what it did before, which is to stop at once.

    Outside of the main thread, which alone receives signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT) or signal.default_int_handler

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        function()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
