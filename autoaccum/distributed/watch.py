"""Watches that the processes of all ranks are there, so that those that wait for one which is dead learn which.

Each rank holds a connection to the next one, in a ring: the kernel closes it when that process ends, and notices when
its machine is gone. Whoever finds one lost calls all the others. None of this needs Python to run in the rank that is
watched, which may be busy, or stopped, for long.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

_EVERY = 0.5
"""Seconds after which it is looked whether all is over."""
_PATIENCE = 5.0
"""Seconds for a connection to be made."""
_MOST_SAID = 1000
"""Bytes that are said of a rank at most."""
_GONE = "its process has ended"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is found."""

    host: str
    port: int


class Watch:
    """What one rank does so that a rank which is lost is known to all of them."""

    def __init__(self) -> None:
        """Open a port for the others; ``begin`` says where they are."""
        self._port = socket.create_server(("", 0), backlog=128)
        self.lost: tuple[int, str] | None = None
        """(which rank is lost, why), the first that was found; None while all are there."""
        self._is_over = False
        self._rank = 0
        self.has_begun = False
        """Whether it is known where all ranks are."""
        self._places: dict[int, Place] = {}
        self._callers: list[socket.socket] = []
        """The connections that others have made to this rank."""
        self._thread: Thread | None = None

    @property
    def place(self) -> Place:
        """Return where the others find this rank."""
        return Place(_own_host(), self._port.getsockname()[1])

    def begin(self, rank: int, places: Sequence[Place]) -> None:
        """Watch, as the rank of that number, with the places of all."""
        self._rank, self._places, self.has_begun = rank, dict(enumerate(places)), True
        self._thread = Thread(target=self._run, name="autoaccum-watch", daemon=True)
        self._thread.start()

    def call(self, reason: str) -> None:
        """Tell all ranks that this one has failed."""
        self._call(self._rank, reason)

    def close(self) -> None:
        """Watch no more, as at the process's end."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join(4 * _EVERY)

    def _run(self) -> None:
        # In a ring, so that each is watched by one, whichever of the others are gone.
        following = (self._rank + 1) % len(self._places)
        with selectors.DefaultSelector() as selector:
            selector.register(self._port, selectors.EVENT_READ)
            try:
                selector.register(_connected(self._places[following]), selectors.EVENT_READ, following)
            except OSError:  # it has ended as soon as it had begun
                self._call(following, _GONE)
            while not self._is_over:
                for key, _ in selector.select(_EVERY):
                    if key.fileobj is self._port:
                        self._callers.append(self._port.accept()[0])
                        selector.register(self._callers[-1], selectors.EVENT_READ)
                    elif not self._heard(key.fileobj, key.data):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        if key.data is None:
                            self._callers.remove(key.fileobj)  # type: ignore[arg-type]
                        key.fileobj.close()  # type: ignore[union-attr]
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _heard(self, connection: socket.socket, of: int | None) -> bool:
        """Take what came through a connection; return False once it is closed.

        Args:
            connection: from whoever calls, or to a rank that is followed.
            of: the number of that one; None of whoever calls.
        """
        try:
            said = connection.recv(_MOST_SAID)
        except OSError:  # its machine does not answer any more
            said = b""
        if not said and of is not None:
            self._call(of, _GONE)
        if said and self.lost is None:
            number, _, reason = said.decode(errors="replace").partition(" ")
            self._learn(int(number), reason)
        return bool(said)

    def _call(self, lost: int, reason: str) -> None:
        """Tell all ranks that one is lost."""
        # The first stands: others may have ended because of it.
        if self.lost is not None or self._is_over:
            return
        self._learn(lost, reason)
        for other, place in self._places.items():
            if other not in (lost, self._rank):
                self._tell(place, lost, reason)

    def _learn(self, lost: int, reason: str) -> None:
        """Keep which rank is lost, and say it to those that follow this one."""
        self.lost = lost, reason
        # This process may end for it: they read it before they read that the connection is closed.
        for caller in list(self._callers):
            with suppress(OSError):
                caller.sendall(_message(lost, reason))

    @staticmethod
    def _tell(place: Place, lost: int, reason: str) -> None:
        with suppress(OSError), _connected(place) as connection:  # who is gone need not hear of it
            connection.sendall(_message(lost, reason))


def _message(lost: int, reason: str) -> bytes:
    return f"{lost} {reason}".encode()[:_MOST_SAID]


def _connected(place: Place) -> socket.socket:
    """Return a connection to another rank, which is kept alive.

    Raises:
        OSError: there is nobody.
    """
    # Nothing is sent through the watches': that they are open is what they say.
    found = socket.create_connection((place.host, place.port), timeout=_PATIENCE)
    found.settimeout(None)
    # A machine that is gone closes nothing: these are asked for by the kernel, whatever Python does there.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def _own_host() -> str:
    """Return by which name the other ranks can reach this machine."""
    meeting = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((meeting, 9))  # sends nothing: it is asked which way it would go
        own = towards.getsockname()[0]
        if not own.startswith("127."):
            return str(own)
    return meeting  # this is the machine where they meet, which all of them can reach
