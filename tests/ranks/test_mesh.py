"""What each rank tells reaches all of them, in whatever order they come to it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from autoaccum.ranks.mesh import Gathering, Mesh, Stream, connect

Meshes = Callable[[int], list[Mesh]]


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    """Return a function for the connections of so many ranks, all of them in this process."""
    made: list[Mesh] = []

    def connected(size: int) -> list[Mesh]:
        steps = range((size - 1).bit_length())
        lines = {(rank, step): socket.socketpair() for rank in range(size) for step in steps}
        for rank in range(size):
            out = [lines[rank, step][0] for step in steps]
            into = [lines[(rank + 2**step) % size, step][1] for step in steps]
            made.append(Mesh(rank, size, out, into))
        return made[-size:]

    yield connected
    for mesh in made:
        mesh.close()


def ended(ranks: Sequence[Mesh], gatherings: Sequence[Gathering]) -> list[list[bytes]]:
    """Let ranks go on by turns until all have heard all."""
    for _ in range(10_000):
        if all(mesh.has_ended(gathering) for mesh, gathering in zip(ranks, gatherings, strict=True)):
            return [mesh.parts(gathering) for mesh, gathering in zip(ranks, gatherings, strict=True)]
        for mesh in ranks:
            mesh.advance(0)
    raise AssertionError("they wait for each other")


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 9, 16, 33])
def test_all_hear_all_in_the_order_of_their_numbers(size: int, meshes: Meshes) -> None:
    ranks = meshes(size)
    for number in range(3):
        told = [b"%d of %d" % (number, rank) * rank for rank in range(size)]  # of different lengths, the first of none
        found = ended(ranks, [mesh.begin(Stream.WORDS, part) for mesh, part in zip(ranks, told, strict=True)])
        assert found == [told] * size


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_passes_on_what_others_wait_for_whatever_it_waits_for_itself(size: int, meshes: Meshes) -> None:
    """As where one that gives up ends its sums before it tells so, and the others wait for its word first."""
    ranks = meshes(size)
    begun = []
    for rank, mesh in enumerate(ranks):
        order = (Stream.SUMS, Stream.WORDS) if rank else (Stream.WORDS, Stream.SUMS)
        begun.append({stream: mesh.begin(stream, b"%d %d" % (stream, rank)) for stream in order})
    for stream in (Stream.WORDS, Stream.SUMS):
        expected = [b"%d %d" % (stream, rank) for rank in range(size)]
        assert ended(ranks, [each[stream] for each in begun]) == [expected] * size


def test_a_rank_that_is_ahead_is_not_taken_for_what_others_are_in(meshes: Meshes) -> None:
    first, second = meshes(2)
    early = [first.begin(Stream.WORDS, b"%d" % number) for number in range(3)]
    for number in range(3):
        later = second.begin(Stream.WORDS, b"again %d" % number)
        assert ended([first, second], [early[number], later]) == [[b"%d" % number, b"again %d" % number]] * 2


def test_what_is_larger_than_a_connection_holds_is_passed_in_parts(meshes: Meshes) -> None:
    ranks = meshes(3)
    told = [bytes([rank]) * 3_000_000 for rank in range(3)]
    begun = [mesh.begin(Stream.WORDS, part) for mesh, part in zip(ranks, told, strict=True)]
    assert not any(mesh.has_ended(gathering) for mesh, gathering in zip(ranks, begun, strict=True))
    assert ended(ranks, begun) == [told] * 3


def test_a_rank_that_has_left_is_missed_by_those_who_wait_for_it_alone(meshes: Meshes) -> None:
    first, second, third = meshes(3)
    begun = [mesh.begin(Stream.WORDS, b"") for mesh in (first, second, third)]
    ended([first, second, third], begun)
    third.close()
    sums = first.begin(Stream.SUMS, b"")  # what it needs of the second comes, and what that one needs of it
    again = second.begin(Stream.SUMS, b"")
    for mesh in (first, second) * 3:
        mesh.advance(0)
    for mesh, gathering in ((first, sums), (second, again)):
        with pytest.raises(ConnectionResetError):
            mesh.has_ended(gathering)


def test_what_a_rank_has_told_before_it_ended_is_heard(meshes: Meshes) -> None:
    """As the reason for which it has ended, by ranks that wait for its part of a sum too."""
    first, second = meshes(2)
    sums, words = (first.begin(stream, b"") for stream in (Stream.SUMS, Stream.WORDS))
    last = second.begin(Stream.WORDS, b"no such token")
    ended([second], [last])
    second.close()
    assert ended([first], [words]) == [[b"", b"no such token"]]
    first.advance(0)
    with pytest.raises(ConnectionResetError):
        first.has_ended(sums)


def test_one_that_has_heard_all_may_end_before_the_others_have(meshes: Meshes) -> None:
    ranks = meshes(2)
    begun = [mesh.begin(Stream.WORDS, b"%d" % rank) for rank, mesh in enumerate(ranks)]
    ended(ranks[1:], begun[1:])
    ranks[1].close()
    assert ended(ranks[:1], begun[:1]) == [[b"0", b"1"]]


def test_a_stranger_is_not_heard() -> None:
    """What comes through connections is unpickled, so that it has to be a rank's."""
    places: dict[int, Any] = {}
    barrier, strangers = Barrier(3), []

    def of(rank: int) -> Mesh:
        def tell(own: Any) -> list[Any]:
            places[rank] = own
            barrier.wait(10)
            if rank == 0:  # before any rank connects
                stranger = socket.create_connection(own[:2])
                stranger.sendall(b"0" * 32 + b"\0")
                strangers.append(stranger)
            barrier.wait(10)
            return [places[each] for each in range(3)]

        return connect(rank, 3, "127.0.0.1", tell, 10.0)

    with ThreadPoolExecutor(3) as threads:
        ranks = list(threads.map(of, range(3)))
    assert strangers[0].recv(1) == b"", "it was hung up on"
    begun = [mesh.begin(Stream.WORDS, b"%d" % rank) for rank, mesh in enumerate(ranks)]
    assert ended(ranks, begun) == [[b"0", b"1", b"2"]] * 3
    for mesh in ranks:
        mesh.close()
    strangers[0].close()
