"""Worker processes that read ahead: their signals, their end, and how they send samples."""

from __future__ import annotations

import io
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, get_worker_info


class StartWorker:
    """A worker_init_fn by which workers leave Ctrl-C, and what clusters send to all processes, to the main process.

    That one ends the run after the window, for which it still needs its workers. It is a class and no closure, for a
    worker that is spawned gets it pickled.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        """Remember the user's own ``worker_init_fn``, which is called last."""
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        """Set up a worker, in it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _ignore_once)
        # Clusters announce with it that a job is about to be killed; Windows has none.
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        info = get_worker_info()
        if info is not None:
            # A user's worker_init_fn expects to find the user's dataset there, and not our reader of it. The object
            # refuses assignments.
            object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker)


def _ignore_once(number: int, frame: Any) -> None:
    """Ignore a signal this time, and let the next one end the process.

    A second one is meant for this process alone, by a DataLoader that gives its workers up.
    """
    signal.signal(number, signal.SIG_DFL)


_iterators: WeakSet[Any] = WeakSet()
_process: int | None = None
"""That in which they were made: one that is forked has none yet."""


def iterate(loader: DataLoader[Any]) -> Any:
    """Return an iterator of a loader whose workers end with this process, whoever still holds the iterator then.

    An error that somebody keeps, or a cycle, may hold it. multiprocessing would end the workers by one SIGTERM, which
    they ignore, and wait for them for ever.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _iterators.clear()
        # Before the queues are closed by which workers are told, which have a priority of 10.
        Finalize(None, _end_workers, exitpriority=100)
    iterator = iter(loader)
    _iterators.add(iterator)
    return iterator


def _end_workers() -> None:
    for iterator in list(_iterators):
        iterator._shutdown_workers()  # as its own __del__ does


class _Pickler(pickle.Pickler):
    """A pickler that writes tensors as arrays of NumPy's, without what they are views of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented  # as any other pickler would; subclasses of tensors may hold more than numbers
        try:
            return torch.from_numpy, (obj.numpy(),)  # ten times as fast as torch does it
        except (TypeError, RuntimeError):  # bfloat16, sparse
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def pack(items: Any) -> bytes:
    """Return anything that can be pickled as bytes."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(items)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Return what was packed; its tensors can be written to."""
    return pickle.loads(packed)
