"""The limit: as a user says it, and as it is now."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.memory.devices import memory_of
from autoaccum.memory.limit import Limit, memory_limit_bytes
from autoaccum.testing import simulated_memory

GIB = 2**30


class TestMemoryLimit:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, 8 * GIB),
            (1, 1),
            ("1", 1),
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

    @pytest.mark.parametrize("value", [True, [1], 1j])
    def test_refuses_types(self, value: Any) -> None:
        with pytest.raises(ArgumentTypeError, match="memory_limit="):
            memory_limit_bytes(value, 8 * GIB)

    def test_a_share_above_one_says_what_a_share_is(self) -> None:
        with pytest.raises(ArgumentError, match="A float is a share above 0 and up to 1"):
            memory_limit_bytes(2.0, 8 * GIB)

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

    def __init__(self, limit_bytes: int, *, enforced: bool = True) -> None:
        self.enforced = enforced
        self.limit_bytes = limit_bytes

    def limit(self) -> int:
        return self.limit_bytes


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
