"""Every random state that a window can draw from, saved and put back; and seeds that depend on names alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = tuple[Any, ...]


def get_state(device: torch.device | None = None) -> RandomState:
    """The states of torch's CPU generator, Python's and NumPy's, and with ``device`` of that device's generator."""
    on_device = None
    if device is not None and device.type != "cpu":
        on_device = torch.get_device_module(device).get_rng_state(*_index(device))
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state(), on_device


def set_state(state: RandomState, device: torch.device | None = None) -> None:
    """Put back what ``get_state`` returned for the same device."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    if device is not None and state[3] is not None:
        torch.get_device_module(device).set_rng_state(state[3], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no argument


def mix(*numbers: int) -> int:
    """A 64-bit seed from numbers: the finaliser of splitmix64 (Steele, Lea and Flood 2014) after each.

    Neighbouring inputs give unrelated seeds, which a sum or a product would not.
    """
    seed = 0
    for number in numbers:
        seed = (seed + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed


def seed_host(seed: int) -> None:
    """Seed torch's CPU generator, Python's and NumPy's."""
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn or seeded on the host within it leaves no mark."""
    outside = get_state()
    try:
        yield
    finally:
        set_state(outside)


class IsolatedRandomness:
    """Random states of their own for the data, so that reading it neither disturbs training nor depends on it."""

    def __init__(self, seed: int) -> None:
        with preserved():
            seed_host(seed)
            self._state = get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within it, the global generators continue from where this object's own left off."""
        with preserved():
            set_state(self._state)
            try:
                yield
            finally:
                self._state = get_state()
