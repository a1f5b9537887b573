"""Cuts into whole groups: sums, sizes, the rest of a window, and the search that knows of them."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoaccum.errors import NothingFitsError
from autoaccum.planning.granules import cheapest, cut, cut_by_weight, granules, within
from autoaccum.planning.tuner import Tuner
from tests.planning.simulation import Device, Training

SIZES = st.integers(1, 2_000)
GRANULES = st.integers(2, 100)


def holds_whole_ones(sizes: tuple[int, ...], granule: int) -> bool:
    """Return whether micro-batches have the granules of their window, each by its own size alone."""
    of_parts = [one for size in sizes for one in granules(size, granule)]
    return of_parts == list(granules(sum(sizes), granule))


@given(num_samples=SIZES, granule=GRANULES)
def test_granules_are_the_windows_samples_and_none_is_alone(num_samples: int, granule: int) -> None:
    found = granules(num_samples, granule)
    assert sum(found) == num_samples
    assert all(size == granule for size in found[:-1])
    assert found[-1] <= granule + 1
    assert min(found) > 1 or num_samples == 1


@given(num_samples=SIZES, largest=SIZES, granule=GRANULES, smallest=SIZES)
def test_a_cut_divides_no_granule_and_keeps_to_its_bounds(
    num_samples: int, largest: int, granule: int, smallest: int
) -> None:
    smallest = min(-(-smallest // granule), 5) * granule
    sizes = cut(num_samples, largest, smallest, granule)
    assert sum(sizes) == num_samples
    assert holds_whole_ones(sizes, granule)
    assert max(sizes) <= max(largest, granule + 1, 3 * smallest)
    assert max(sizes) <= max(largest, granule + 1) or smallest > granule
    if smallest > granule:
        assert min(sizes) >= min(smallest, num_samples)
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) <= granule  # near-equal, in granules


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=300),
    largest=st.integers(1, 20_000),
    granule=GRANULES,
)
def test_a_cut_by_weight_divides_none_either(lengths: list[int], largest: int, granule: int) -> None:
    lengths.sort(reverse=True)
    sizes = cut_by_weight(lengths, largest, granule, granule)
    assert sum(sizes) == len(lengths)
    assert holds_whole_ones(sizes, granule)
    for size, start in zip(sizes, accumulate(sizes, initial=0), strict=False):
        assert size * lengths[start] <= largest or len(granules(size, granule)) == 1


@given(num_samples=SIZES, largest=SIZES, granule=GRANULES)
@example(num_samples=257, largest=256, granule=2)
@example(num_samples=3, largest=1, granule=2)
def test_the_cheapest_is_a_cut_that_can_be_made(num_samples: int, largest: int, granule: int) -> None:
    found = cheapest(num_samples, largest, lambda size: 1.0 + size, granule, granule)
    is_whole = largest >= num_samples or len(granules(num_samples, granule)) == 1  # with a rest of one it is not cut
    assert found <= max(largest, granule, num_samples if is_whole else 0)
    assert found % granule == 0 or found == num_samples
    assert found == within(found, num_samples, granule)


@pytest.mark.parametrize("limit", [1_000 + 7 * fits for fits in (31, 32, 40, 64, 100, 127, 129, 200, 300)])
@pytest.mark.parametrize("num_samples", [20, 33, 64, 65, 96, 97, 127, 160, 251, 257])
def test_a_search_tries_whole_granules_alone_and_ends_with_the_best_of_them(limit: int, num_samples: int) -> None:
    fits = (limit - 1_000) // 7
    training = Training(Device(limit), num_samples, headroom=0.0, smallest=32, granule=32)
    if fits < min(num_samples, 32 + (num_samples % 32 == 1)):
        with pytest.raises(NothingFitsError) as caught:
            training.run(12)
        assert caught.value.group == (32 if num_samples > 32 else None)
        assert ("ghost:32" in str(caught.value)) == (num_samples > 32)
        return
    for _ in range(12):
        assert holds_whole_ones(training.run(), 32)
    plan = training.tuner.plan(num_samples)
    assert holds_whole_ones(plan, 32)
    assert max(plan) <= max(fits, 32)
    # No plan of fewer micro-batches fits; but for windows with a rest of one, whose last micro-batch has one more.
    if num_samples % 32 != 1:
        assert len(plan) == len(cut(num_samples, max(fits, 32), 32, 32))


def test_half_of_what_ran_out_of_memory_is_cut_into_whole_granules() -> None:
    tuner = Tuner(ceiling=256, limit_bytes=10**9, headroom=0.05, search=False, largest=256, smallest=32, granule=32)
    assert tuner.plan(256) == (256,)
    assert tuner.out_of_memory(256, 256) == (128, 128)
    assert tuner.out_of_memory(128, 256) == (64, 64, 64, 64)
    tuner.set_smallest(32)
    assert tuner.out_of_memory(64, 250) == (32,) * 7 + (26,)
    with pytest.raises(NothingFitsError, match="for it holds a whole group"):
        tuner.out_of_memory(32, 256)
    assert math.isclose(tuner.micro_batch, 32)


def test_a_users_own_smallest_size_is_rounded_up_to_whole_granules() -> None:
    tuner = Tuner(
        ceiling=256, limit_bytes=10**9, headroom=0.05, search=False, largest=40, smallest=32, floor=40, granule=32
    )
    assert tuner.smallest == 64
    assert tuner.plan(256) == (64,) * 4
    assert tuner.plan(148) == (148,)  # not 96 and 52


@pytest.mark.parametrize("largest", [2_000, 50_000, 90_000, 140_000])
def test_windows_of_several_lengths_are_cut_into_whole_granules(largest: int) -> None:
    tuner = Tuner(ceiling=256, limit_bytes=10**9, headroom=0.05, search=True, largest=largest, smallest=8, granule=8)
    sizes = tuner.plan(90, tuple(range(90, 0, -1)))
    assert len(sizes) > 2
    assert holds_whole_ones(sizes, 8)
