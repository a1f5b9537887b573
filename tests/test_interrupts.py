"""Ctrl-C, as a context."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from autoaccum.interrupts import interrupt_calls


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_calls_and_the_second_stops() -> None:
    called: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with interrupt_calls(lambda: called.append(1)):
        press()
        assert called == [1]
        with pytest.raises(KeyboardInterrupt):
            press()
    assert called == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def run() -> None:
        with interrupt_calls(lambda: None):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]
