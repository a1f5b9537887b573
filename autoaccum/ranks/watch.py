"""Watches that the processes of all ranks run, so that those that wait for one which is dead or stopped learn which.

Each rank holds a connection to the next one, in a ring: the kernel closes it when that process ends, and notices when
its machine is gone. Of the next one on its own machine each asks the kernel whether it is stopped. Whoever finds one
lost calls all the others. None of this needs Python to run in the rank that is watched, which may be busy for long.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Thread

import psutil

_EVERY = 0.5
"""Seconds between two looks at a process."""
_LOOKS = 10
"""Looks in a row that find a process stopped, after which it is taken to stay so."""
_PATIENCE = 5.0
"""Seconds for a connection to be made."""
_MOST_SAID = 1000
"""Bytes that are said of a rank at most."""
_GONE = "its process has ended"
_STOPPED = f"its process has been stopped for {_LOOKS * _EVERY:.0f} seconds"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is found."""

    host: str
    port: int
    pid: int
    began: float
    """When its process began: with its number this tells it from all others, those of other machines too."""


class Watch:
    """What one rank does so that a rank which is lost is known to all of them."""

    def __init__(self) -> None:
        """Open a port for the others; ``begin`` says where they are."""
        self._port = socket.create_server(("", 0), backlog=128)
        self._lost: tuple[int, str] | None = None
        self._is_over = False

    @property
    def place(self) -> Place:
        """Return where the others find this rank."""
        return Place(_own_host(), self._port.getsockname()[1], os.getpid(), psutil.Process().create_time())

    @property
    def lost(self) -> tuple[int, str] | None:
        """Return (which rank is lost, why), the first that was found; None while all are there."""
        return self._lost

    def begin(self, rank: int, places: Sequence[Place]) -> None:
        """Watch, as the rank of that number, with the places of all."""
        size = len(places)
        self._places, self._rank = places, rank
        self._after = (rank + 1) % size
        # In a ring, so that each is watched by one, whichever of the others are gone.
        following = [(rank + further) % size for further in range(1, size)]
        self._beside = next((other for other in following if _process(places[other]) is not None), None)
        self._thread = Thread(target=self._run, name="autoaccum-watch", daemon=True)
        self._thread.start()

    def call(self, reason: str) -> None:
        """Tell all ranks that this one has failed."""
        self._call(self._rank, reason)

    def close(self) -> None:
        """Watch no more, as at the process's end."""
        self._is_over = True
        self._thread.join(4 * _EVERY)

    def _run(self) -> None:
        beside = None if self._beside is None else _process(self._places[self._beside])
        stopped = 0  # looks in a row that have found it so
        with selectors.DefaultSelector() as selector, ExitStack() as opened:
            selector.register(opened.enter_context(self._port), selectors.EVENT_READ)
            try:
                after = opened.enter_context(_connected(self._places[self._after]))
                selector.register(after, selectors.EVENT_READ, self._after)
            except OSError:  # it has ended as soon as it had begun
                self._call(self._after, _GONE)
            while not self._is_over:
                for key, _ in selector.select(_EVERY):
                    if key.fileobj is self._port:
                        caller = opened.enter_context(self._port.accept()[0])
                        selector.register(caller, selectors.EVENT_READ)
                    elif not self._heard(key.fileobj, key.data):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                is_stopped = beside is not None and _is_stopped(beside)
                stopped = stopped + 1 if is_stopped else 0
                if stopped == _LOOKS:
                    self._call(self._beside, _STOPPED)  # type: ignore[arg-type]

    def _heard(self, connection: socket.socket, of: int | None) -> bool:
        """Take what came through a connection; return False once it is closed.

        Args:
            connection: from whoever calls, or to the next rank.
            of: the number of that one; None of whoever calls.
        """
        try:
            said = connection.recv(_MOST_SAID)
        except OSError:  # its machine does not answer any more
            said = b""
        if not said and of is not None:
            self._call(of, _GONE)
        if said and self._lost is None:
            number, _, reason = said.decode(errors="replace").partition(" ")
            self._lost = int(number), reason
        return bool(said)

    def _call(self, lost: int, reason: str) -> None:
        """Tell all ranks that one is lost."""
        # The first stands: others may have ended because of it.
        if self._lost is not None or self._is_over:
            return
        self._lost = lost, reason
        for other, place in enumerate(self._places):
            if other not in (lost, self._rank):
                with suppress(OSError), _connected(place) as connection:  # who is gone need not hear of it
                    connection.sendall(f"{lost} {reason}".encode()[:_MOST_SAID])


def _connected(place: Place) -> socket.socket:
    # Nothing is sent through most of these: that they are open is what they say.
    found = socket.create_connection((place.host, place.port), timeout=_PATIENCE)
    found.settimeout(None)
    # A machine that is gone closes nothing: these are asked for by the kernel, whatever Python does there.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def _process(place: Place) -> psutil.Process | None:
    """Return the process of a rank, where it is on this machine."""
    with suppress(psutil.Error):
        process = psutil.Process(place.pid)
        return process if process.create_time() == place.began else None
    return None


def _is_stopped(process: psutil.Process) -> bool:
    # One that a debugger has stopped is another thing: whoever holds it there does not want the run to end.
    with suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _own_host() -> str:
    """Return by which name the other ranks can reach this machine."""
    meeting = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((meeting, 9))  # sends nothing: it is asked which way it would go
        own = towards.getsockname()[0]
        if not own.startswith("127."):
            return str(own)
    return meeting  # this is the machine where they meet, which all of them can reach
