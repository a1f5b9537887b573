"""Runs a function in several processes that find each other, as torchrun starts them, and returns what each returned."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from autoaccum.errors import AutoaccumWarning

TIMEOUT = 240.0
"""Seconds after which processes that still run are taken to hang."""


class Ended(Exception):
    """A process has ended by an error of its own, or by a signal."""


def launch(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Call a function of a module, ``function(*args)``, on each of ``size`` ranks; return what each has returned.

    What ends by an exception returns that. One that was killed returns ``Ended``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        call = Path(place) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        ranks = []
        for rank in range(size):
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
            environment = {
                **os.environ,
                **{name: str(value) for name, value in where.items()},
                "MASTER_PORT": str(port),
            }
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", "tests.ranks.launching", str(call), f"{place}/{rank}"]
            ranks.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(TIMEOUT) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        found = []
        for rank, code in enumerate(codes):
            answer = Path(f"{place}/{rank}")
            found.append(pickle.loads(answer.read_bytes()) if answer.exists() else Ended(code))
        return found


def _run(call: str, answer: str) -> None:
    module, name, args = pickle.loads(Path(call).read_bytes())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoaccumWarning)
            found = getattr(import_module(module), name)(*args)
    except Exception as error:
        found = error
    Path(answer).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    _run(*sys.argv[1:])
