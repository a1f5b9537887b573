"""Law 6, of plans: sizes sum exactly, near-equal, none above what fits."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.planning.cuts import AS_CHEAP, cheapest, cut, cut_by_weight
from autoaccum.planning.plans import plan

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


@given(num_samples=SIZES, max_micro_batch=SIZES, smallest=st.integers(1, 4))
def test_cut_goes_below_the_smallest_only_with_the_window(
    num_samples: int, max_micro_batch: int, smallest: int
) -> None:
    sizes = cut(num_samples, max_micro_batch, smallest)
    assert sum(sizes) == num_samples
    assert min(sizes) >= min(smallest, num_samples)
    assert max(sizes) <= max(max_micro_batch, 2 * smallest - 1)


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


class TestCheapest:
    @given(
        num_samples=st.integers(1, 200),
        max_micro_batch=st.integers(1, 220),
        smallest=st.integers(1, 3),
        rises=st.lists(st.floats(0, 1), min_size=220, max_size=220),
        first=st.floats(1e-3, 10),
    )
    def test_no_near_equal_cut_is_faster(
        self, num_samples: int, max_micro_batch: int, smallest: int, rises: list[float], first: float
    ) -> None:
        times = [first + sum(rises[:size]) for size in range(220)]
        max_micro_batch = max(max_micro_batch, 2 * smallest - 1)
        found = cheapest(num_samples, max_micro_batch, times.__getitem__, smallest)
        assert sum(found) == num_samples
        assert max(found) - min(found) <= 1
        assert max(found) <= max_micro_batch
        assert min(found) >= min(smallest, num_samples)
        for largest in range(1, max_micro_batch + 1):
            other = cut(num_samples, largest, smallest)
            if max(other) <= max_micro_batch:
                assert sum(map(times.__getitem__, found)) <= (1 + AS_CHEAP) * sum(map(times.__getitem__, other)) + 1e-9

    @pytest.mark.parametrize(
        ("seconds", "expected"),
        [
            (lambda size: 1.0, (86, 85, 85)),  # a device that is never busy: the fewest
            (lambda size: 1.0 * size, (64, 64, 64, 64)),  # all the same: equal sizes, and of these the fewest
            (lambda size: 5.0 + size, (86, 85, 85)),
            (lambda size: -(-size // 32), (64, 64, 64, 64)),
            (lambda size: -(-size // 48), (86, 85, 85)),
            (lambda size: size**1.2, (1,) * 256),  # caches that overflow
        ],
    )
    def test_by_what_a_device_is_like(self, seconds: Callable[[int], float], expected: tuple[int, ...]) -> None:
        assert cheapest(256, 100, seconds) == expected


def loads(weights: list[int], sizes: tuple[int, ...]) -> list[int]:
    """Of micro-batches that are padded to their heaviest sample, the first."""
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return [size * weights[start] for size, start in zip(sizes, starts, strict=True)]


heaviest_first = st.lists(st.integers(1, 1000), min_size=1, max_size=60).map(lambda w: sorted(w, reverse=True))


class TestCutByWeight:
    @given(heaviest_first, st.integers(1, 20_000), st.integers(1, 4))
    def test_sums_exactly_and_passes_the_cap_only_where_nothing_smaller_is_allowed(
        self, weights: list[int], max_weight: int, smallest: int
    ) -> None:
        sizes = cut_by_weight(weights, max_weight, smallest)
        assert sum(sizes) == len(weights)
        assert min(sizes) >= min(smallest, len(weights))
        for size, load in zip(sizes, loads(weights, sizes), strict=True):
            assert load <= max_weight or size < 2 * smallest

    @given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(1, 60))
    def test_no_cut_into_neighbours_has_fewer(self, weights: list[int], max_weight: int) -> None:
        weights = sorted(weights, reverse=True)
        sizes = cut_by_weight(weights, max_weight)
        fewest = min(
            len(cuts) + 1
            for count in range(len(weights))
            for cuts in itertools.combinations(range(1, len(weights)), count)
            if all(
                load <= max_weight or size == 1
                for parts in [tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(weights))))]
                for size, load in zip(parts, loads(weights, parts), strict=True)
            )
        )
        assert len(sizes) == fewest

    @given(heaviest_first, st.integers(1000, 20_000))
    def test_none_is_heavier_than_their_number_needs(self, weights: list[int], max_weight: int) -> None:
        """The heaviest is within 1/32 of the least with which as few are enough."""
        sizes = cut_by_weight(weights, max_weight)
        cap = max(loads(weights, sizes))
        smaller = int(cap * 31 / 32) - 2
        if smaller >= max(weights[0], max_weight // 2 + max_weight // 32):
            assert len(cut_by_weight(weights, smaller)) > len(sizes)

    def test_equal_weights_are_cut_into_near_equal_sizes(self) -> None:
        assert cut_by_weight([10] * 256, 1000) == (86, 86, 84)
        assert cut_by_weight([7] * 5, 14, 2) == (2, 3)
        assert cut_by_weight([10] * 6, 40, 3) == (3, 3)  # 4 would leave too few
