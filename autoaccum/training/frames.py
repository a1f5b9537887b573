"""Leaves the frames of this package out of tracebacks: users look for their own, of which some lie below ours.

An error of a model's forward comes up through twenty of our functions, which say nothing of the mistake. They stay
where this package's own code has failed, and in Python's development mode (``python -X dev``), for who looks for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from autoaccum.errors import AutoaccumError

F = TypeVar("F", bound=Callable[..., Any])

_TOLD = "Calls within autoaccum are left out above; python -X dev shows them."


def without_own_frames(function: F) -> F:
    """Make a function raise its errors without the frames of this package."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if sys.flags.dev_mode or _is_own_fault(error):
                raise
            _leave_out(error)
            raise error

    return cast(F, call)


def _is_own_fault(error: BaseException) -> bool:
    """Return whether code of this package raised an error that is none of those that it answers with."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _is_own(trace) and not isinstance(error, AutoaccumError)


def _leave_out(error: BaseException) -> None:
    link: BaseException | None = error
    seen = set()
    while link is not None and id(link) not in seen:  # a user's errors may be in a circle
        seen.add(id(link))
        link.__traceback__ = _without_own(link.__traceback__)
        link = link.__cause__ or link.__context__
    if not isinstance(error, AutoaccumError) and _TOLD not in getattr(error, "__notes__", ()):
        error.add_note(_TOLD)


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not _is_own(trace):
            kept.append(trace)
        trace = trace.tb_next
    below: TracebackType | None = None
    # New ones, for others may hold those that there are: a debugger, or whoever writes the error down.
    for one in reversed(kept):
        below = TracebackType(below, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return below


def _is_own(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "autoaccum"
