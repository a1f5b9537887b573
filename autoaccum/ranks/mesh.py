"""Gathers what each rank tells, over connections of their own, in as many steps as their number has binary digits.

In each step a rank has heard twice as many of the others, and passes all of it on: Bruck et al. 1997, "Efficient
algorithms for all-to-all communications in multiport message-passing systems". Of a few hundred bytes gloo's takes ten
times as long, for it goes through several threads on each rank, and around a ring of all of them.
"""

from __future__ import annotations

import selectors
import socket
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from autoaccum.ranks.watch import connected

_HEADER = struct.Struct("!BBQQ")
"""What comes before a message: of which stream, of which step, of which gathering of that stream; its bytes."""
_LENGTH = struct.Struct("!Q")
"""What comes before each rank's part of a message: its bytes."""
_GREETING = struct.Struct("!32sB")
"""What a connection begins with: the word of whoever is called, and of which step it is."""
_CHUNK = 2**20
"""Bytes that are read at once."""
_HASTE = 5.0
"""Seconds for whoever has connected to say who it is, which ranks do at once."""


class Stream(IntEnum):
    """What gatherings are of; those of one stream begin in one order on all ranks, whatever the other's do."""

    WORDS = 0
    """What ranks tell each other."""
    SUMS = 1
    """What they add up."""


@dataclass(slots=True)
class Gathering:
    """What each rank tells, as far as it has come."""

    key: tuple[Stream, int]
    parts: list[bytes]
    """Of this rank, the next one and so on, up to the last number and on from 0."""
    step: int = 0
    """How many steps have come: each brings as many parts as are there, but for the last."""


@dataclass(slots=True)
class _Line:
    """A connection in one direction: to the rank that hears this one in a step, or of the one that it hears."""

    socket: socket.socket
    step: int
    is_out: bool
    data: bytearray = field(default_factory=bytearray)
    """What is still to be sent, or what has come of a message."""
    is_closed: bool = False


class Mesh:
    """The connections of one rank."""

    def __init__(self, rank: int, size: int, out: Sequence[socket.socket], into: Sequence[socket.socket]) -> None:
        """Take the connections to and of other ranks, those of one step after the other: see ``connect``."""
        self._rank, self._size = rank, size
        self._out = [_Line(each, step, True) for step, each in enumerate(out)]
        self._into = [_Line(each, step, False) for step, each in enumerate(into)]
        self._begun: Counter[Stream] = Counter()
        self._open: dict[tuple[Stream, int], Gathering] = {}
        self._early: dict[tuple[Stream, int, int], bytes] = {}  # what has come before it could be taken
        self._selector = selectors.DefaultSelector()
        for line in (*self._out, *self._into):
            line.socket.setblocking(False)
        for line in self._into:
            self._selector.register(line.socket, selectors.EVENT_READ, line)

    def begin(self, stream: Stream, data: bytes) -> Gathering:
        """Begin to tell all ranks something; all of them have to, as often as this one."""
        found = Gathering((stream, self._begun[stream]), [data])
        self._begun[stream] += 1
        self._open[found.key] = found
        self._send(found)
        self._take_early(found)
        return found

    def has_ended(self, gathering: Gathering) -> bool:
        """Return whether all ranks' parts have come, and all has left that others need of this one.

        Raises:
            OSError: a rank has ended of which something is missing.
        """
        if gathering.key in self._open and self._into[gathering.step].is_closed:
            raise ConnectionResetError("a rank has closed its connection")
        return gathering.key not in self._open and not any(line.data for line in self._out)

    @property
    def is_needed(self) -> bool:
        """Return whether something has begun and not ended, of which other ranks may need what this one passes on."""
        return bool(self._open) or any(line.data for line in self._out)

    def parts(self, gathering: Gathering) -> list[bytes]:
        """Return what each rank has told, the first one's first."""
        # They are there from this rank's own on.
        first = self._size - self._rank
        return gathering.parts[first:] + gathering.parts[:first]

    def advance(self, seconds: float) -> None:
        """Send and take what can be, of all that has begun; wait so long for it at most."""
        for key, _ in self._selector.select(seconds):
            if key.data.is_out:
                self._send_on(key.data)
            else:
                self._receive(key.data)

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for line in (*self._out, *self._into):
            line.socket.close()

    def _send(self, gathering: Gathering) -> None:
        """Send what the next step of a gathering needs."""
        passed = gathering.parts[: self._size - len(gathering.parts)]  # in the last step no more than are missing
        data = b"".join(piece for part in passed for piece in (_LENGTH.pack(len(part)), part))
        # It stays here until the kernel has room: to wait would keep this rank from hearing others.
        line = self._out[gathering.step]
        waits = bool(line.data)
        line.data += _HEADER.pack(gathering.key[0], gathering.step, gathering.key[1], len(data)) + data
        if not waits:
            self._send_on(line)
            if line.data:
                self._selector.register(line.socket, selectors.EVENT_WRITE, line)

    def _send_on(self, line: _Line) -> None:
        try:
            del line.data[: line.socket.send(line.data)]
        except BlockingIOError:
            return
        except OSError:  # who is gone need not hear of it; what it would have told is missed below
            line.data.clear()
        if not line.data and line.socket in self._selector.get_map():
            self._selector.unregister(line.socket)

    def _receive(self, line: _Line) -> None:
        try:
            found = line.socket.recv(_CHUNK)
        except OSError:
            found = b""
        if not found:  # as a rank does that has heard all it needs, and ends
            # Whether it is missed shows when something of it is: see ``has_ended``.
            line.is_closed = True
            self._selector.unregister(line.socket)
        line.data += found
        while len(line.data) >= _HEADER.size:
            stream, step, number, size = _HEADER.unpack_from(line.data)
            end = _HEADER.size + size
            if len(line.data) < end:
                return
            # It may be of a gathering that this rank has yet to begin, or of a later step than it waits for.
            self._early[Stream(stream), number, step] = bytes(line.data[_HEADER.size : end])
            del line.data[:end]
            if (gathering := self._open.get((Stream(stream), number))) is not None:
                self._take_early(gathering)

    def _take_early(self, gathering: Gathering) -> None:
        """Take all steps of a gathering that have come."""
        # One step may be all that others' later ones were waiting for here.
        while (data := self._early.pop((*gathering.key, gathering.step), None)) is not None:
            at = 0
            while at < len(data):
                (length,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size + length
                gathering.parts.append(data[at - length : at])
            gathering.step += 1
            if len(gathering.parts) == self._size:
                del self._open[gathering.key]
                return
            self._send(gathering)


def connect(rank: int, size: int, host: str, tell: Callable[[Any], list[Any]], patience: float) -> Mesh:
    """Return the connections of this rank.

    Args:
        rank: its number.
        size: how many there are, more than one.
        host: by which others reach its machine.
        tell: tells all ranks something, and returns what each has told.
        patience: seconds for another rank to connect.

    Raises:
        OSError: another rank cannot be reached, or does not come.
    """
    steps = range((size - 1).bit_length())
    with socket.create_server(("", 0), backlog=128) as port:
        port.settimeout(patience)  # one that is lost is seen much sooner, by the watches
        # A word that the ranks alone have heard: what comes through connections is unpickled.
        word = uuid.uuid4().hex.encode()
        places = tell((host, port.getsockname()[1], word))
        out = []
        # All of them are listening by now, and the kernel answers for those that are not asked to yet.
        for step in steps:
            other, number, its_word = places[(rank - 2**step) % size]
            out.append(connected(other, number))
            out[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # nothing follows that it could wait for
            out[-1].sendall(_GREETING.pack(its_word, step))
        into: dict[int, socket.socket] = {}
        while len(into) < len(steps):
            connection, _ = port.accept()
            greeting = _greeting(connection)
            if greeting[:-1] == word:
                into[greeting[-1]] = connection
            else:  # somebody else's, who is looking for something
                connection.close()
    return Mesh(rank, size, out, [into[step] for step in steps])


def _greeting(connection: socket.socket) -> bytes:
    """Return what a connection begins with, as far as it comes."""
    connection.settimeout(_HASTE)
    greeting = b""
    with suppress(OSError):
        while len(greeting) < _GREETING.size and (found := connection.recv(_GREETING.size - len(greeting))):
            greeting += found
    return greeting
