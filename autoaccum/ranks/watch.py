"""Watches that the processes of all ranks run, so that those that wait for one which is dead or stopped learn which.

Each rank holds a connection to the next one, in a ring: the kernel closes it when that process ends, and notices when
its machine is gone. Of the next one on its own machine each asks the kernel whether it is stopped. Whoever finds one
lost calls all the others. None of this needs Python to run in the rank that is watched, which may be busy for long.

Until all of them are there, the first rank watches those that have come, and these watch it.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock, Thread

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


@dataclass(slots=True)
class _Followed:
    """A rank that is watched from here."""

    place: Place
    connects: bool
    """Whether by a connection to it."""
    looks: bool
    """Whether by a look at its process, where it is on this machine."""
    may_have_ended: bool = False
    """Whether the place may be that of a process which had ended before all of this began."""
    is_new: bool = True
    """Whether nothing was done yet of what follows."""
    connection: socket.socket | None = None
    process: psutil.Process | None = None
    stopped: int = 0
    """Looks in a row that have found it stopped."""


class Watch:
    """What one rank does so that a rank which is lost is known to all of them."""

    def __init__(self) -> None:
        """Open a port for the others; ``begin`` says where they are."""
        self._port = socket.create_server(("", 0), backlog=128)
        self._lost: tuple[int, str] | None = None
        self._is_over = False
        self._rank = 0
        self._has_begun = False
        self._places: dict[int, Place] = {}
        # Changed by whoever says whom to follow, and read by the thread that does.
        self._lock = Lock()
        self._followed: dict[int, _Followed] = {}
        self._callers: list[socket.socket] = []
        """The connections that others have made to this rank."""
        self._thread: Thread | None = None

    @property
    def place(self) -> Place:
        """Return where the others find this rank."""
        return Place(_own_host(), self._port.getsockname()[1], os.getpid(), psutil.Process().create_time())

    @property
    def lost(self) -> tuple[int, str] | None:
        """Return (which rank is lost, why), the first that was found; None while all are there."""
        return self._lost

    @property
    def has_begun(self) -> bool:
        """Return whether it is known where all ranks are."""
        return self._has_begun

    def meet(self, rank: int, other: int, place: Place, *, may_have_ended: bool = False) -> None:
        """Watch another rank before it is known where all are.

        Args:
            rank: the number of this one.
            other: that of the other one.
            place: where it is; a later one stands for an earlier one.
            may_have_ended: whether that may be where a process was which had ended before this one began.
        """
        with self._lock:
            self._rank, self._places[other] = rank, place
            self._followed[other] = _Followed(place, connects=True, looks=True, may_have_ended=may_have_ended)
        # Whoever comes when one is lost already has not heard of it.
        if self._lost is not None and other != self._lost[0]:
            self._tell(place, *self._lost)
        self._start()

    def begin(self, rank: int, places: Sequence[Place]) -> None:
        """Watch, as the rank of that number, with the places of all."""
        size = len(places)
        # In a ring, so that each is watched by one, whichever of the others are gone.
        # Those that the first rank has met are followed no more but by their neighbours, for there may be hundreds.
        following = [(rank + further) % size for further in range(1, size)]
        beside = next((other for other in following if _process(places[other]) is not None), None)
        with self._lock:
            self._rank, self._places, self._has_begun = rank, dict(enumerate(places)), True
            self._followed = {
                other: _Followed(places[other], connects=other == following[0], looks=other == beside)
                for other in following
                if other in (following[0], beside)
            }
        self._start()

    def call(self, reason: str) -> None:
        """Tell all ranks that this one has failed."""
        self._call(self._rank, reason)

    def close(self) -> None:
        """Watch no more, as at the process's end."""
        self._is_over = True
        if self._thread is not None:
            self._thread.join(4 * _EVERY)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="autoaccum-watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._port, selectors.EVENT_READ)
            while not self._is_over:
                with self._lock:
                    followed = dict(self._followed)
                self._take_up(followed, selector)
                for key, _ in selector.select(_EVERY):
                    if key.fileobj is self._port:
                        self._callers.append(self._port.accept()[0])
                        selector.register(self._callers[-1], selectors.EVENT_READ)
                    elif not self._heard(key.fileobj, key.data):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                        if key.data is None:
                            self._callers.remove(key.fileobj)  # type: ignore[arg-type]
                        key.fileobj.close()  # type: ignore[union-attr]
                for other, each in followed.items():
                    is_stopped = each.process is not None and _is_stopped(each.process)
                    each.stopped = each.stopped + 1 if is_stopped else 0
                    if each.stopped == _LOOKS:
                        self._call(other, _STOPPED)
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]

    def _take_up(self, followed: Mapping[int, _Followed], selector: selectors.BaseSelector) -> None:
        """Connect to those that are followed from now on, and close the connections to those that are not any more."""
        held = {id(each.connection) for each in followed.values()}
        for key in list(selector.get_map().values()):
            if key.data is not None and id(key.fileobj) not in held:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for other, each in followed.items():
            if not each.is_new:
                continue
            each.is_new = False
            each.process = _process(each.place) if each.looks else None
            if not each.connects:
                continue
            try:
                each.connection = connected(each.place.host, each.place.port)
                selector.register(each.connection, selectors.EVENT_READ, other)
            except OSError:  # it has ended as soon as it had begun, or long before
                if not each.may_have_ended:
                    self._call(other, _GONE)

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
            with self._lock:
                # It may be followed no more since, or elsewhere: it was a process that ended long before.
                each = self._followed.get(of)
            if each is not None and each.connection is connection:
                self._call(of, _GONE)
        if said and self._lost is None:
            number, _, reason = said.decode(errors="replace").partition(" ")
            self._learn(int(number), reason)
        return bool(said)

    def _call(self, lost: int, reason: str) -> None:
        """Tell all ranks that one is lost."""
        # The first stands: others may have ended because of it.
        if self._lost is not None or self._is_over:
            return
        self._learn(lost, reason)
        with self._lock:
            places = dict(self._places)
        for other, place in places.items():
            if other not in (lost, self._rank):
                self._tell(place, lost, reason)

    def _learn(self, lost: int, reason: str) -> None:
        """Keep which rank is lost, and say it to those that follow this one."""
        self._lost = lost, reason
        # This process may end for it: they read it before they read that the connection is closed.
        for caller in list(self._callers):
            with suppress(OSError):
                caller.sendall(_message(lost, reason))

    @staticmethod
    def _tell(place: Place, lost: int, reason: str) -> None:
        with suppress(OSError), connected(place.host, place.port) as connection:  # who is gone need not hear of it
            connection.sendall(_message(lost, reason))


def _message(lost: int, reason: str) -> bytes:
    return f"{lost} {reason}".encode()[:_MOST_SAID]


def connected(host: str, port: int) -> socket.socket:
    """Return a connection to another rank, which is kept alive.

    Raises:
        OSError: there is nobody.
    """
    # Nothing is sent through the watches': that they are open is what they say.
    found = socket.create_connection((host, port), timeout=_PATIENCE)
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
