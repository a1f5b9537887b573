"""Runs a function in several processes that find each other, as torchrun starts them, and returns what each returned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumWarning

TIMEOUT = 240.0
"""Seconds after which processes that still run are taken to hang."""
_PRELOADED = [
    "pytest",
    "hypothesis",
    "optuna",
    "torch.distributed.fsdp",
    "autoaccum.testing",
    "autoaccum.training.fit",
    "autoaccum.training.accumulator",
    "autoaccum.training.check",
]
"""What modules of tests import, which takes each process a second and more."""
_context: ForkServerContext | None = None


class Ended(Exception):
    """A process has ended by an error of its own, or by a signal."""


def _server() -> ForkServerContext:
    """Return what begins processes that have imported all they need."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(_PRELOADED)
        # Read when PyTorch is imported. Two ranks of as many threads as there are cores would wait for each other.
        # An accelerator must not be there before a process is begun, which has to make its own.
        given = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        before = {name: os.environ.get(name) for name in given}
        os.environ |= given
        ensure_running()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return _context


def _free_port() -> int:
    """Return a port that is no connection's own: a rank that asks for the first one's before that listens could else be
    given the same port for itself, be connected with itself, and wait for ever."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports is free")


def launch(function: Callable[..., Any], size: int, *args: Any, lost: int | None = None) -> list[Any]:
    """Call a function of a module, ``function(*args)``, on each of ``size`` ranks; return what each has returned.

    What ends by an exception returns that. One that was killed returns ``Ended``, as does the one that is ``lost``,
    which is not waited for.
    """
    port = _free_port()
    call = (function.__module__, function.__qualname__, args)
    with tempfile.TemporaryDirectory() as place:
        ranks = []
        for rank in range(size):
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
            environment = {name: str(value) for name, value in {**where, "MASTER_PORT": port}.items()}
            process = _server().Process(target=_run, args=(environment, sys.path, call, f"{place}/{rank}"))
            process.start()
            ranks.append(process)
        try:
            for rank, process in enumerate(ranks):
                if rank != lost:
                    process.join(TIMEOUT)
                    if process.exitcode is None:
                        raise TimeoutError(f"rank {rank} of {size} has not ended after {TIMEOUT:.0f} s")
        finally:
            for process in ranks:
                process.kill()
                process.join()
        found = []
        for rank, process in enumerate(ranks):
            answer = Path(f"{place}/{rank}")
            found.append(pickle.loads(answer.read_bytes()) if answer.exists() else Ended(process.exitcode))
        return found


def _run(environment: dict[str, str], path: list[str], call: tuple[str, str, Any], answer: str) -> None:
    os.environ |= environment
    sys.path[:] = path
    if "STANDIN_LIBRARY" in os.environ:  # of pytest --device standin
        import_module("standin_device")
    module, name, args = call
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoaccumWarning)
            found = getattr(import_module(module), name)(*args)
    except Exception as error:
        found = error
    Path(answer).write_bytes(pickle.dumps(found))


def check_ends(found: Sequence[Any], own: tuple[str, str] | None, of_others: str) -> None:
    """Check how three ranks have ended, each of which tells (its error's type, its text, whose it was, seconds).

    Args:
        found: what they have told.
        own: the type of the second rank's error, and a part of its text; None where its process was ended.
        of_others: a part of the text of the others' errors.
    """
    first, second, third = found
    if own is None:
        assert isinstance(second, Ended)
    else:
        assert second[0] == own[0]
        assert own[1] in second[1]
    for name, text, of_rank, seconds in (first, third):
        assert name == "RankError"
        assert of_others in text
        assert of_rank == (None if own is None or own[0] == "ended" else 1)
        assert seconds < 60
