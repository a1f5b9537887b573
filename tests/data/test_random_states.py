"""Random states that generators come to are accepted, and no others: they would be drawn from behind their end."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.data.random_states import check_random_states
from autoaccum.data.randomness import load_state_dict, state_dict
from autoaccum.errors import CheckpointCorruptError
from tests.data.test_randomness import draw

CPU = torch.device("cpu")


def numpy_state(**changes: Any) -> tuple[Any, ...]:
    names = ("kind", "key", "position", "has_gauss", "gauss")
    found = dict(zip(names, np.random.RandomState(1).get_state(), strict=True))
    return tuple({**found, **changes}.values())


def torch_state(at: int, value: int) -> torch.Tensor:
    found = torch.Generator().manual_seed(1).get_state()
    found[at] = value
    return found


class TestStatesOfAStranger:
    @pytest.mark.parametrize("draws", [0, 1, 3, 623, 624, 625, 2000])
    def test_what_generators_come_to_is_accepted(self, draws: int) -> None:
        torch.rand(draws)
        torch.randn(min(draws, 5))
        np.random.rand(draws)
        np.random.randn(draws % 2)
        random.gauss(0, 1)
        state = state_dict(CPU)
        check_random_states(state, CPU, "randomness")
        expected = draw()
        load_state_dict(state, CPU)
        assert draw() == expected

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("numpy", numpy_state(position=10**9)),  # would be read at, far behind the generator
            ("numpy", numpy_state(position=625)),
            ("numpy", numpy_state(position=-1)),
            ("numpy", numpy_state(key=np.zeros(624, np.uint64))),
            ("numpy", numpy_state(key=np.zeros(3, np.uint32))),
            ("numpy", numpy_state(kind="PCG64")),
            ("numpy", numpy_state(gauss="x")),
            ("numpy", {"bit_generator": "PCG64", "state": {}}),
            ("numpy", None),
            ("torch", torch_state(8, 200)),  # the words that are left, with the next word behind the last
            ("torch", torch_state(16, 77)),
            ("torch", torch_state(12, 0)),
            ("torch", torch.zeros(5056, dtype=torch.uint8)),
            ("torch", torch.zeros(7, dtype=torch.uint8)),
            ("torch", torch.zeros(5056)),
            ("torch", "x"),
            ("python", (3, (0,) * 624, None)),
            ("python", (3, (0,) * 624 + (625,), None)),
            ("python", (3, (0,) * 624 + (3,), "x")),
            ("python", (3, (2**32,) * 624 + (3,), None)),
            ("python", (2, (0,) * 625, None)),
            ("device", torch.zeros(3)),
            ("more", 1),
        ],
    )
    def test_what_no_generator_comes_to_is_refused(self, name: str, value: Any) -> None:
        before = state_dict(CPU)
        with pytest.raises(CheckpointCorruptError) as caught:
            check_random_states({**before, name: value}, CPU, "randomness")
        assert caught.value.entry.startswith(f"randomness.{name}")
        assert str(state_dict(CPU)) == str(before), "tried on others than those in use"

    @pytest.mark.parametrize("kind", [np.random.PCG64, np.random.Philox, np.random.SFC64])
    def test_of_another_generator_of_numpy(self, kind: Any) -> None:
        before = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(kind(3))  # type: ignore[attr-defined]
        try:
            np.random.rand(5)
            state = state_dict(CPU)
            check_random_states(state, CPU, "randomness")
            for wrong in (numpy_state(), {**state["numpy"], "buffer_pos": 10**9}, {**state["numpy"], "state": 3}):
                with pytest.raises(CheckpointCorruptError):
                    check_random_states({**state, "numpy": wrong}, CPU, "randomness")
        finally:
            np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_a_state_of_another_kind_of_device_is_of_no_use_and_no_error() -> None:
    """Kinds differ in the sizes of their states; a run that is moved between them is exact, and draws anew."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    device = torch.device(device.type, 0)
    state = state_dict(device)
    check_random_states(state, device, "randomness")
    own = state["device"].clone()
    state["device"] = torch.zeros(5, dtype=torch.uint8)
    check_random_states(state, device, "randomness")
    load_state_dict(state, device)
    assert torch.equal(torch.get_device_module(device).get_rng_state(device), own)
    draws = torch.rand(3, device=device).tolist()
    state["device"] = own
    load_state_dict(state, device)
    assert torch.rand(3, device=device).tolist() == draws


@pytest.mark.gpu
def test_a_state_that_the_device_refuses_is_refused_by_its_entry() -> None:
    device = torch.device(torch.accelerator.current_accelerator().type, 0)  # type: ignore[union-attr]
    torch.rand(3, device=device)
    state = state_dict(device)
    state["device"] = torch.full_like(state["device"], 255)
    if device.type == "cuda":
        pytest.skip("any seed and most offsets are a state of CUDA's")
    with pytest.raises(CheckpointCorruptError) as caught:
        check_random_states(state, device, "randomness")
    assert caught.value.entry == "randomness.device"
