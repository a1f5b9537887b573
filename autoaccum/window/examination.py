"""States what a step asks of whoever compares its windows with whole ones: see ``verification``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from autoaccum.data.base import Window
from autoaccum.events import Event, Joined, Notice
from autoaccum.window.gradient import Gradient
from autoaccum.window.split_calls import Layout


class Examination(Protocol):
    """What came of examining a window."""

    @property
    def events(self) -> Sequence[Event]:
        """Return what is to be told."""

    @property
    def again(self) -> bool:
        """Return whether the window has to be run again, now that it is known what its loss is."""

    @property
    def is_put_off(self) -> bool:
        """Return whether nothing was measured, for windows are to be joined."""

    @property
    def hides_items(self) -> bool:
        """Return whether compiled code hides what its losses are means over, so that it may not run compiled."""

    @property
    def smallest(self) -> int:
        """Return the fewest samples of a micro-batch whose loss can be computed."""


class Examiner(Protocol):
    """What compares windows that are cut with whole ones: see ``verification.examiner``."""

    is_checked: bool
    """Whether a first window had a finite loss."""

    verifies: bool
    """Whether anything is measured."""
    joins: bool
    """Whether windows may be joined instead: notices of inexact gradients then wait until that was tried."""
    withheld: list[tuple[Notice, float | None]]
    """Notices that wait, each with its measured error, or None."""
    is_trying: bool
    """Whether this window is to be joined because it is not finite."""
    uncertain: str | None
    """Why weights that were measured to be right are no certain count; None where they are, or nothing can join."""

    is_owed: bool
    """Whether windows were cut, and stepped on, that could not be measured for want of memory."""

    def measure_late(
        self, window: Window, gradient: Gradient, aside: Callable[[], AbstractContextManager[None]]
    ) -> list[Event]:
        """Measure a window that is not cut, for those; return what is said of them."""

    def say_withheld(self) -> list[Notice]:
        """Return what was withheld, to be said after all."""

    def remember(self, number: int) -> None:
        """Remember how the window of that number begins, to be measured from there."""

    def measured_by(self) -> dict[str, Any]:
        """Return the options of a measurement: parameters written to, and how the window's first state is put back."""

    @property
    def has_failed(self) -> bool:
        """Return whether windows that are cut were measured to have another gradient than whole ones."""

    def begin_attempt(
        self, number: int, announce: Callable[[Notice], None], way: object, spare_bytes: int | None
    ) -> None:
        """Look at the forwards of an attempt that is run in this way, and leaves so much memory where that is known."""

    def put_back(self) -> None:
        """Put back the parameters that the window began with, where they are remembered."""

    def let_go(self) -> bool:
        """Make room on a device that is short of memory; return whether there was anything to let go of."""

    def break_off(self) -> None:
        """Forget how a window began that an error has ended: the next one has its number, and begins otherwise."""

    def check_first(self, gradient: Gradient) -> None:
        """Refuse a first loss that is not finite."""

    def examine(
        self,
        window: Window,
        gradient: Gradient,
        number: int,
        most: int,
        aside: Callable[[], AbstractContextManager[None]],
    ) -> Examination:
        """Examine it, before it is stepped on."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""


class Joiner(Protocol):
    """What measures joined windows: see ``verification.joining``."""

    def is_due(self, number: int) -> bool:
        """Return whether a joined window is to be measured."""

    def measure(
        self,
        window: Window,
        layout: Layout | None,
        *,
        number: int,
        reason: str,
        most: int,
        **how: Any,
    ) -> tuple[Layout | None, Joined | None, str]:
        """Measure a window; return how modules are split, what was measured, or why nothing was."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put them back."""
