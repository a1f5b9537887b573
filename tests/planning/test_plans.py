"""Law 6, of plans: sizes sum exactly, near-equal, none above what fits."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.planning.plans import plan, sizes_text

SIZES = st.integers(1, 10_000)


@given(effective_batch=SIZES, max_micro_batch=SIZES, world_size=st.integers(1, 16))
def test_sizes_sum_exactly_are_near_equal_and_fit(effective_batch: int, max_micro_batch: int, world_size: int) -> None:
    found = plan(effective_batch, max_micro_batch, world_size)
    assert sum(found.sizes) == found.effective_batch == effective_batch
    assert max(found.sizes) <= max_micro_batch
    assert max(found.sizes) - min(found.sizes) <= 1
    assert len(found.ranks) == world_size
    shares = [sum(rank) for rank in found.ranks]
    assert max(shares) - min(shares) <= 1


@given(effective_batch=SIZES, max_micro_batch=SIZES)
def test_no_plan_has_fewer_micro_batches(effective_batch: int, max_micro_batch: int) -> None:
    steps = plan(effective_batch, max_micro_batch).accumulation_steps
    assert (steps - 1) * max_micro_batch < effective_batch


def test_every_prime() -> None:
    for prime in (p for p in range(2, 10_000) if all(p % d for d in range(2, int(p**0.5) + 1))):
        assert sum(plan(prime, 64).sizes) == prime


def test_ranks_share_the_window() -> None:
    assert plan(13, 3, world_size=2).ranks == ((3, 2, 2), (2, 2, 2))
    assert plan(2, 8, world_size=3).ranks == ((1,), (1,), ())


@pytest.mark.parametrize("argument", ["effective_batch", "max_micro_batch", "world_size"])
@pytest.mark.parametrize("value", [0, -3])
def test_refuses_less_than_one(argument: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=f"{argument}={value}: expected an int of at least 1") as caught:
        plan(**{"effective_batch": 8, "max_micro_batch": 2, argument: value})
    assert (caught.value.argument, caught.value.value) == (argument, value)


@pytest.mark.parametrize("value", [8.0, True, "8", None])
def test_refuses_what_is_no_int(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="effective_batch="):
        plan(value, 2)  # type: ignore[arg-type]


def test_imports_no_torch() -> None:
    code = "import sys, autoaccum; autoaccum.plan(256, 100); import autoaccum.planning.search; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("numbers", [(2**40, 1), (2**62, 3, 7), (8, 2, 2**31)])
def test_a_plan_that_nobody_could_hold_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="max_micro_batch=.*: expected a plan of at most 10,000,000 micro-batches"):
        plan(*numbers)


def test_a_plan_as_text_is_micro_batch_x_number() -> None:
    assert sizes_text((32,) * 4) == "32 x 4"
    assert sizes_text((3, 3, 2)) == "3 x 2 + 2 x 1"
    assert sizes_text((3, 3, 2, 3)) == "3 x 3 + 2 x 1"
    assert sizes_text(()) == ""
