"""Random states are saved and put back whole, kept apart, and seeded from names."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data.randomness import IsolatedRandomness, get_state, mix, preserved_randomness, seed_host, set_state


def draw() -> list[Any]:
    """Draw an odd count from each generator: NumPy and Python keep a spare normal, torch a place in its block."""
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        float(np.random.randn()),
        np.random.permutation(9).tolist(),
    ]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_host(2024)
    draw()


def test_a_state_put_back_draws_the_same_from_all_three_generators() -> None:
    state = get_state()
    first, later = draw(), draw()
    assert all(a != b for a, b in zip(first, later, strict=True))
    set_state(state)
    assert [draw(), draw()] == [first, later]
    set_state(state)  # it was not used up
    assert draw() == first


DRAWS: dict[str, Callable[[], object]] = {
    "a number": random.random,
    "the first of two normal numbers": lambda: (random.seed(3), random.gauss(0, 1)),
    "the second of them": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(3),
    "a whole key": lambda: [random.random() for _ in range(312)],
    "a seed": lambda: random.seed(7),
}


@pytest.mark.parametrize("is_known", [True, False])
def test_the_state_of_python_is_read_anew_only_where_something_was_drawn(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:  # as where another Python lays its memory out in another way
        monkeypatch.setattr("autoaccum.data.randomness._is_where_expected", lambda: False)
    state = get_state()
    assert (get_state()[1] is state[1]) is is_known
    for name, drawn in DRAWS.items():
        before = random.getstate()
        drawn()
        assert get_state()[1] == random.getstate() != before, name
        after = random.random()
        set_state(state)
        assert random.getstate() == state[1], name
        random.setstate(before)
        drawn()
        assert random.random() == after, name


def test_a_generator_that_takes_the_place_of_pythons_is_the_one_that_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = random.Random(5)
    for name in ("random", "getstate", "setstate", "gauss"):
        monkeypatch.setattr(random, name, getattr(other, name))
    state = get_state()
    first = random.random()
    set_state(state)
    assert random.random() == first


def test_on_the_cpu_the_device_changes_nothing() -> None:
    cpu = torch.device("cpu")
    state = get_state(cpu)
    first = draw()
    set_state(state, cpu)
    assert draw() == first


def test_seed_host_seeds_all_three() -> None:
    seed_host(mix(7))  # 64 bits: more than NumPy takes, and than torch takes without a sign
    first = draw()
    seed_host(mix(7))
    assert draw() == first
    seed_host(mix(8))
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_preserved_leaves_no_mark_also_when_it_raises() -> None:
    state = get_state()
    expected = draw()
    set_state(state)
    with preserved_randomness():
        draw()
        seed_host(1)
    assert draw() == expected
    set_state(state)

    def body() -> None:
        with preserved_randomness():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert draw() == expected


class TestIsolatedRandomness:
    def test_continues_where_it_left_off(self) -> None:
        isolated = IsolatedRandomness(5)
        seed_host(5)
        expected = [draw() for _ in range(3)]
        found = []
        for _ in range(3):
            draw()  # what happens outside does not matter
            with isolated():
                found.append(draw())
        assert found == expected

    def test_leaves_the_outside_alone(self) -> None:
        state = get_state()
        expected = [draw() for _ in range(2)]
        set_state(state)
        isolated = IsolatedRandomness(5)
        found = [draw()]
        with isolated():
            draw()
        found.append(draw())
        assert found == expected

    def test_also_when_the_body_raises(self) -> None:
        isolated = IsolatedRandomness(5)
        seed_host(5)
        inside = [draw(), draw()]
        seed_host(9)
        outside = draw()
        seed_host(9)

        def body() -> None:
            with isolated():
                assert draw() == inside[0]
                raise StopIteration

        with pytest.raises(StopIteration):
            body()
        assert draw() == outside
        with isolated():
            assert draw() == inside[1], "what was drawn before the error counts"

    def test_two_do_not_disturb_each_other(self) -> None:
        first, second = IsolatedRandomness(1), IsolatedRandomness(1)
        with first():
            expected = [draw(), draw()]
        with second():
            found = [draw()]
            with IsolatedRandomness(3)():
                draw()
            found.append(draw())
        assert found == expected

    def test_the_seed_decides(self) -> None:
        found = []
        for seed in (1, 1, 2):
            with IsolatedRandomness(seed)():
                found.append(draw())
        assert found[0] == found[1] != found[2]


class TestMix:
    def test_is_splitmix64(self) -> None:
        """Compare with the first two outputs of its reference implementation, seeded with 0."""
        assert mix(0) == 0xE220A8397B1DCDAF
        assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4

    def test_no_collisions(self) -> None:
        seeds = [
            mix(*numbers)
            for numbers in itertools.chain(
                itertools.product(range(64)),
                itertools.product(range(64), range(64)),
                itertools.product(range(16), range(16), range(256)),
                itertools.product(range(8), range(8), range(64), range(2)),
            )
        ]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**64 for seed in seeds)

    def test_every_input_bit_turns_half_of_the_output_bits(self) -> None:
        bases = [(seed, epoch, position) for seed in (0, 1, 12345) for epoch in (0, 3) for position in (0, 1, 1000)]
        turned = [[0] * 64 for _ in range(3)]
        for base, place, bit in itertools.product(bases, range(3), range(64)):
            other = list(base)
            other[place] ^= 1 << bit
            difference = mix(*base) ^ mix(*other)
            assert 8 <= difference.bit_count() <= 56
            for output in range(64):
                turned[place][output] += difference >> output & 1
        trials = len(bases) * 64
        for counts in turned:
            assert mean(counts) == pytest.approx(trials / 2, rel=0.02)
            assert all(0.42 * trials < count < 0.58 * trials for count in counts)


class TestNumpysStateIsReadOnlyWhenItHasChanged:
    @pytest.mark.parametrize(
        "draw",
        [
            lambda: np.random.rand(),
            lambda: np.random.rand(700),
            lambda: np.random.randn(),
            lambda: np.random.seed(3),
            lambda: np.random.shuffle(np.arange(5)),
            lambda: np.random.set_state(np.random.RandomState(9).get_state()),
        ],
    )
    def test_whatever_is_drawn_is_put_back(self, draw: Any) -> None:
        for _ in range(3):
            state = get_state()
            draw()
            drawn = np.random.randn(3)
            set_state(state)
            draw()
            assert np.array_equal(np.random.randn(3), drawn)

    def test_the_second_of_two_normal_numbers_counts(self) -> None:
        """Drawing it does not move the generator."""
        np.random.seed(0)
        np.random.randn()
        get_state()
        second = np.random.randn()
        after = get_state()
        third = np.random.randn()
        set_state(after)
        assert np.random.randn() == third != second

    def test_it_is_not_read_again_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        np.random.seed(0)
        first = get_state()[2]
        monkeypatch.setattr(np.random, "get_state", None)
        assert get_state()[2] is first


def test_a_normal_number_that_waits_is_part_of_the_state() -> None:
    """States may differ in it alone, and it lies outside of the generator's memory."""
    np.random.seed(3)
    state = get_state()
    kind, key, position, _, _ = state[2]
    set_state((*state[:2], (kind, key, position, 1, 0.25), None))
    assert get_state()[2][3:] == (1, 0.25)
    set_state(state)
    assert get_state()[2][3:] == state[2][3:]
