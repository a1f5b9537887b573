"""The limit: as a user says it, and as it is now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.memory.devices import memory_of
from autoaccum.memory.limit import Limit, MemoryLimit, asked_limit
from autoaccum.testing import simulated_memory

GIB = 2**30


def memory_limit_bytes(value: MemoryLimit, available_bytes: int) -> int:
    """A limit in bytes, which is at most what is available."""
    asked_bytes = asked_limit(value, available_bytes, lambda: available_bytes)()
    return available_bytes if asked_bytes is None else min(asked_bytes, available_bytes)


class TestMemoryLimit:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, 8 * GIB),
            (512, 512),
            ("512", 512),
            (GIB, GIB),
            ("1GiB", GIB),
            ("1.5 GiB", 3 * GIB // 2),
            (0.5, 4 * GIB),
            ("0.5", 4 * GIB),
            (" .25 ", 2 * GIB),
            (1.0, 8 * GIB),
            ("1.0", 8 * GIB),
            (9 * GIB, 8 * GIB),
            ("1TiB", 8 * GIB),
        ],
    )
    def test_bytes_texts_and_shares_up_to_what_is_available(self, value: Any, expected: int) -> None:
        assert memory_limit_bytes(value, 8 * GIB) == expected

    @pytest.mark.parametrize("value", [0, -5, 0.0, -0.5, 1.5, "1.5", "0.0", "half", "", "-1GiB", float("nan")])
    def test_refuses_values(self, value: Any) -> None:
        with pytest.raises(ArgumentError, match="memory_limit=.*: expected bytes as an int, a text") as caught:
            memory_limit_bytes(value, 8 * GIB)
        assert not isinstance(caught.value, TypeError)

    @pytest.mark.parametrize("value", [24, "24", "24 B"])
    def test_a_number_of_gib_is_no_number_of_bytes(self, value: Any) -> None:
        with pytest.raises(ArgumentError) as caught:
            memory_limit_bytes(value, 80 * GIB)
        assert str(caught.value) == (
            "memory_limit=24 is 24 bytes. Pass memory_limit='24GiB', or a share such as memory_limit=0.5."
        )
        assert memory_limit_bytes("24GiB", 80 * GIB) == 24 * GIB
        assert memory_limit_bytes(0.5, 80 * GIB) == 40 * GIB

    @pytest.mark.parametrize("value", [True, [1], 1j])
    def test_refuses_types(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match="memory_limit="):
            memory_limit_bytes(value, 8 * GIB)

    def test_a_share_above_one_says_what_a_share_is(self) -> None:
        with pytest.raises(ArgumentError, match="A float is a share above 0 and up to 1"):
            memory_limit_bytes(2.0, 8 * GIB)

    @pytest.mark.parametrize(("value", "share"), [("50%", "0.5"), (" 12.5 % ", "0.125"), ("half%", "0.5")])
    def test_a_percentage_is_told_how_it_is_written(self, value: str, share: str) -> None:
        with pytest.raises(ArgumentError, match=rf"{value.strip()} is written as {share}\."):
            memory_limit_bytes(value, 8 * GIB)

    @pytest.mark.parametrize(("returned", "expected"), [(GIB, GIB), ("1GiB", GIB), (0.5, 4 * GIB), ("1TiB", 8 * GIB)])
    def test_a_function_is_called_for_any_of_these(self, returned: Any, expected: int) -> None:
        assert memory_limit_bytes(lambda: returned, 8 * GIB) == expected

    def test_a_function_is_called_each_time(self) -> None:
        limits = iter([GIB, 0.25])
        assert [memory_limit_bytes(lambda: next(limits), available) for available in (8 * GIB, 16)] == [GIB, 4]

    @pytest.mark.parametrize("returned", [0, 1.5, "half", -1])
    def test_refuses_values_that_a_function_returned_and_says_so(self, returned: Any) -> None:
        with pytest.raises(ArgumentError) as caught:
            memory_limit_bytes(lambda: returned, 8 * GIB)
        assert str(caught.value).startswith(f"memory_limit={returned!r}: expected bytes as an int, a text")
        assert str(caught.value).endswith("The function passed as memory_limit returned it.")

    @pytest.mark.parametrize("returned", [None, True, int])
    def test_refuses_types_that_a_function_returned_and_says_so(self, returned: Any) -> None:
        with pytest.raises(ArgumentTypeError, match="memory_limit=.*such as 0.5. The function passed as memory_limit"):
            memory_limit_bytes(lambda: returned, 8 * GIB)


class Told:
    """A memory of which there is so much."""

    def __init__(self, limit_bytes: int, *, enforced: bool = True, can_enforce: bool = False) -> None:
        self.enforced, self.can_enforce = enforced, can_enforce
        self.limit_bytes = limit_bytes
        self.told: list[int | None] = []

    def limit(self) -> int:
        return self.limit_bytes

    def enforce(self, limit_bytes: int | None) -> int | None:
        self.told.append(limit_bytes)
        return self.told[-2] if len(self.told) > 1 else None


def test_a_limit_is_what_it_was_when_it_was_last_read() -> None:
    memory: Any = Told(1000)
    limit = Limit(memory)
    memory.limit_bytes = 400
    assert (limit.bytes, limit.now()) == (1000, 400)
    assert limit.bytes == 1000
    assert (limit.read(), limit.bytes) == (400, 400)


@pytest.mark.parametrize(
    ("memory_limit", "enforced", "expected"), [(None, True, True), (0.5, True, False), (None, False, False)]
)
def test_only_the_device_s_own_limit_is_enforced(memory_limit: Any, enforced: bool, expected: bool) -> None:
    memory: Any = Told(1000, enforced=enforced)
    assert Limit(memory, memory_limit).is_enforced is expected


def test_the_most_that_it_may_come_to() -> None:
    """A number stays below what others may give back; a function may return anything some day."""
    with simulated_memory(1000) as device:
        memory = memory_of(torch.device("cpu"))
        plain, fixed, moving = Limit(memory), Limit(memory, 600), Limit(memory, lambda: 10)
        device.limit = 500  # as if others took the rest
        assert [limit.now() for limit in (plain, fixed, moving)] == [500, 500, 10]
        assert [limit.most() for limit in (plain, fixed, moving)] == [1000, 600, 1000]
        device.limit = 2000
        assert [limit.most() for limit in (plain, fixed, moving)] == [2000, 600, 2000]


def test_a_device_that_can_be_told_of_a_limit_enforces_it() -> None:
    memory: Any = Told(1000, can_enforce=True)
    limit = Limit(memory, 600)
    assert limit.is_enforced
    limit.now()
    assert memory.told == [], "not before the run begins"
    with limit.kept():
        memory.limit_bytes = 500  # what others take is refused by itself
        assert (limit.now(), limit.read()) == (500, 500)
        assert memory.told == [600]
    assert memory.told == [600, None]
    limit.now()
    assert memory.told == [600, None], "nor when it has ended"


def test_a_limit_that_moves_is_told_when_it_is_read() -> None:
    memory: Any = Told(1000, can_enforce=True)
    allowed = [600]
    limit = Limit(memory, lambda: allowed[0])

    def run() -> None:
        with limit.kept():
            allowed[0] = 300
            limit.read()
            limit.read()
            allowed[0] = 5000
            assert limit.now() == 1000
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert memory.told == [600, 300, 5000, None]


def test_all_that_there_is_need_not_be_told() -> None:
    memory: Any = Told(1000, can_enforce=True)
    with Limit(memory).kept():
        pass
    unable: Any = Told(1000)
    with Limit(unable, 600).kept():
        pass
    assert memory.told == unable.told == []


def test_of_nested_limits_the_inner_one_holds_and_the_outer_one_comes_back() -> None:
    memory: Any = Told(1000, can_enforce=True)
    outer, inner = Limit(memory, 600), Limit(memory, 550)
    with outer.kept():
        with outer.kept():
            assert memory.told == [600], "it is told already"
        with inner.kept():
            assert memory.told == [600, 550]
        assert memory.told == [600, 550, 600]


def test_more_than_there_is_may_be_had_once_others_give_it_back() -> None:
    memory: Any = Told(400)
    limit = Limit(memory, 600)
    assert (limit.bytes, limit.now()) == (400, 400)
    memory.limit_bytes = 1000
    assert limit.now() == 600
