"""Rungs go from what costs little to what costs more, each worth it, by what a tape says."""

from __future__ import annotations

import pytest

from autoaccum.window.offloading import ABOVE_BYTES
from autoaccum.window.rungs import HIGHEST, rungs_of
from autoaccum.window.tape import Entry

BIG = 10 * ABOVE_BYTES
NAMES = ("one", "two", "three", "four")
FOUND = {"model.blocks": NAMES}


def tape(inner: int = 3, size: int = BIG) -> list[Entry]:
    """Four blocks, each of which is given a tensor and saves some more."""
    entries, number = [], 0
    for call, name in enumerate(NAMES):
        number += 1
        entries.append(Entry(storage=number, held_bytes=size, input_of=name))
        for _ in range(inner):
            number += 1
            entries.append(Entry(storage=number, held_bytes=size, loaded_bytes=size, within=((name, call),)))
    return entries


def test_all_rungs_in_their_order() -> None:
    rungs = rungs_of(tape(), FOUND, state_bytes=BIG)
    assert [
        (rung.name, rung.held_bytes // BIG, rung.offloaded_bytes // BIG, rung.state_bytes // BIG) for rung in rungs
    ] == [
        ("checkpoint, every 2nd of model.blocks", 8, 0, 0),
        ("checkpoint, model.blocks", 7, 0, 0),
        ("checkpoint, model.blocks; offload, saved tensors", 3, 4, 0),
        ("checkpoint, model.blocks; offload, saved tensors and optimizer state", 3, 4, 1),
    ]
    assert [sorted(rung.kinds) for rung in rungs] == [["checkpoint"]] * 2 + [["checkpoint", "offload"]] * 2
    assert HIGHEST.kinds == frozenset()


def test_where_there_is_no_host_beside_the_device() -> None:
    assert [rung.kinds for rung in rungs_of(tape(), FOUND, None)] == [{"checkpoint"}] * 2


def test_without_blocks_nothing_is_computed_twice() -> None:
    first, second = rungs_of(tape(), {}, state_bytes=BIG)
    assert (first.name, first.blocks, first.held_bytes) == ("offload, saved tensors", (), BIG)
    assert first.offloaded_bytes == 12 * BIG
    assert second.name == "offload, saved tensors and optimizer state"


@pytest.mark.parametrize(
    ("size", "state_bytes", "expected"),
    [
        (ABOVE_BYTES, BIG, ["offload, optimizer state"]),
        (ABOVE_BYTES, 0, []),
        (BIG, BIG // 200, ["offload, saved tensors"]),
    ],
)
def test_what_is_not_worth_it_is_left_out(size: int, state_bytes: int, expected: list[str]) -> None:
    """Storages of no more than 1 MiB stay; and so does a state that is less than a hundredth of what is held."""
    assert [rung.name for rung in rungs_of(tape(size=size), {}, state_bytes)] == expected
