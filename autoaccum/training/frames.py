"""Leaves the frames of this package out of tracebacks: users look for their own, of which some lie below ours.

An error of a model's forward comes up through twenty of our functions, which say nothing of the mistake. They stay
where this package's own code has failed, and in Python's development mode (``python -X dev``), for who looks for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, cast

from autoaccum.errors import AutoaccumError, DataError

F = TypeVar("F", bound=Callable[..., Any])

_OF_NO_USER = {"autoaccum", "torch", "numpy", "optuna", "psutil", "safetensors", "tqdm", *sys.stdlib_module_names}
"""Packages that this one calls itself: where an error has only their frames, it may be the one that is wrong."""


def without_own_frames(function: F) -> F:
    """Make a function raise errors of the user's without the frames of this package."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            if leave_out_own(error):
                del args, kwargs  # as others hold nothing any more
            refuse_ended_worker(error)
            raise

    return cast(F, call)


def refuse_ended_worker(error: BaseException) -> None:
    """Raise if an error says that a worker of a DataLoader was killed, or ended by itself.

    PyTorch raises it wherever the main process is when the signal arrives, in a forward too.

    Raises:
        DataError: it does.
    """
    is_told = type(error) is RuntimeError and str(error).startswith("DataLoader worker (pid")
    # Or its tensors cannot be fetched from it any more.
    modules = {str(trace.tb_frame.f_globals.get("__name__", "")) for trace in _traces(error.__traceback__)}
    if is_told or (isinstance(error, EOFError | OSError) and "torch.multiprocessing.reductions" in modules):
        raise DataError(
            f"data: a worker ended without an error of Python ({error!r}). On Linux the kernel kills processes when "
            f"memory runs out: use fewer workers, or a smaller prefetch_factor. Else the dataset or a library "
            f"that it calls crashes: num_workers=0 reads in this process, and shows where."
        ) from error


def leave_out_own(error: BaseException) -> bool:
    """Leave the frames of this package out of an error of the user's, or a Ctrl-C; return whether that was done."""
    # A class of the user's may let nothing be set on its errors.
    with suppress(Exception):
        if not sys.flags.dev_mode and _is_of_user(error):
            _leave_out(error)
            return True
    return False


def _is_of_user(error: BaseException) -> bool:
    """Return whether it is known that no code of this package has failed."""
    if isinstance(error, AutoaccumError | KeyboardInterrupt):
        return True
    from autoaccum.window.raised import is_told  # not sooner: to plan and to help takes no torch

    traces = list(_traces(error.__traceback__))
    # Of an error in a worker of a DataLoader its text shows where it was raised.
    is_of_worker = traces[-1].tb_frame.f_code.co_name == "reraise" and _root_of(traces[-1]) == "torch"
    return is_of_worker or is_told(error) or not {*map(_root_of, traces)} <= _OF_NO_USER


def _leave_out(error: BaseException) -> None:
    """Cut frames of this package out of a traceback, and drop what their functions hold; causes are left alone."""
    kept: TracebackType | None = None
    # New links, for others may hold those that there are: a debugger, or whoever writes the error down.
    for trace in reversed(list(_traces(error.__traceback__))):
        if _root_of(trace) != "autoaccum":
            kept = TracebackType(kept, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
            continue
        # Nobody could clear it any more, and whoever keeps the error would keep the model.
        with suppress(RuntimeError):  # those that have called this go on
            trace.tb_frame.clear()
    error.__traceback__ = kept


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _root_of(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
