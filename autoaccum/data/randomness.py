"""Saves every random state that a window can draw from, and puts it back; makes seeds that depend on numbers alone."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch

RandomState = tuple[Any, ...]
"""States of torch's CPU generator, Python's, NumPy's, and a tuple of those of devices (None without a device)."""


def get_state(device: torch.device | None = None) -> RandomState:
    """Return the states of torch's CPU generator, Python's and NumPy's, and with ``device`` of all of its kind."""
    on_devices = None
    if device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        on_devices = tuple([module.get_rng_state(*as_argument(one)) for one in _all_of_its_kind(device)])
    return torch.default_generator.get_state(), _python_state(), _numpy_state(), on_devices


def are_same(before: RandomState, now: RandomState) -> bool:
    """Return whether nothing was drawn on the host between two calls of ``get_state``."""
    (on_cpu, python, numpy, _), (on_cpu_now, python_now, numpy_now, _) = before, now
    if numpy_now is not numpy:  # it is another object where a normal number waits
        are_keys = type(numpy) is type(numpy_now) is tuple and numpy[2:] == numpy_now[2:]
        if not are_keys or not np.array_equal(numpy[1], numpy_now[1]):
            return False
    return python_now is python and torch.equal(on_cpu_now, on_cpu)


def _all_of_its_kind(device: torch.device) -> list[torch.device]:
    """Return all devices of the kind of one, that one first: users' functions may draw on any of them."""
    count = 1 if device.type == "mps" or device.index is None else torch.accelerator.device_count()
    return [device, *(torch.device(device.type, at) for at in range(count) if at != device.index)][: max(count, 1)]


WORDS = 624
"""Words of the key of MT19937, by which torch's CPU generator, Python's and NumPy's draw."""
_MT19937_BYTES = WORDS * 4 + 4
"""Bytes of the generator's C struct: its key of 624 words, and the position in it."""
# The generator, its memory and its state when the state was last asked for.
_last_numpy: tuple[Any, bytes, Any] = (None, b"", None)
# The same of Python's, without the generator: it is one and the same for ever.
_last_python: tuple[bytes, Any] = (b"", None)
_PYTHON = cast("Any", random._inst)
_PYTHON_ADDRESS = id(_PYTHON) + object.__basicsize__


def _python_state() -> Any:
    """Return ``random.getstate()``; the last one again while nothing was drawn.

    Each is a tuple of 625 numbers, and a block whose forward is computed again looks at it four times.
    """
    global _last_python
    # Another one may have taken its place, by whose methods the module's functions were replaced.
    is_other = getattr(random.getstate, "__self__", None) is not _PYTHON
    if is_other or not _is_where_expected():
        return random.getstate()
    memory = ctypes.string_at(_PYTHON_ADDRESS, _MT19937_BYTES)
    then, state = _last_python
    # The second of two normal numbers waits outside of this memory, and is the last entry of a state.
    if then != memory or state[2] is not _PYTHON.gauss_next:
        state = random.getstate()
        _last_python = (memory, state)
    return state


@functools.cache
def _is_where_expected() -> bool:
    """Return whether the memory of Python's generator begins as it does in CPython: its position, then its key."""
    *key, position = random.getstate()[1]
    return ctypes.string_at(_PYTHON_ADDRESS, _MT19937_BYTES) == struct.pack(f"=i{WORDS}I", position, *key)


def _numpy_state() -> Any:
    """Return ``np.random.get_state()``; the last one again while nothing was drawn.

    That function takes 30 µs, more than all the others together, and a window may take 100.
    """
    global _last_numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return np.random.get_state(legacy=False)
    memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    known, then, state = _last_numpy
    # What was drawn shows in the generator's memory, but for the second of two normal numbers, which waits outside of
    # it (has_gauss, the fourth entry of a state): with one waiting, the next draw would leave the memory as it is.
    if known is not generator or then != memory or state[3]:
        state = np.random.get_state()
        _last_numpy = (generator, memory, state)
    return state


def set_state(state: RandomState, device: torch.device | None = None) -> None:
    """Put back what ``get_state`` returned for the same device."""
    global _last_numpy
    torch.default_generator.set_state(state[0])
    # These are slow, and rarely of use: the state of now is the very same object while nothing was drawn.
    if _python_state() is not state[1]:
        random.setstate(state[1])
    if _numpy_state() is not state[2]:
        np.random.set_state(state[2])
        # A normal number that waits is all that two may differ in, and would not show in the generator's memory.
        _last_numpy = (None, b"", None)
    if device is not None and state[3] is not None:
        # A checkpoint has the state of one: zip ends with it.
        for one, on_device in zip(_all_of_its_kind(device), state[3], strict=False):
            torch.get_device_module(device).set_rng_state(on_device, *as_argument(one))


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of PyTorch's, NumPy's or Python's."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def bytes_of(generator: Any) -> bytes:
    """Return the state of such a generator as bytes, which tell whether it was drawn from."""
    state = generator_state(generator)
    return as_bytes(state) if isinstance(state, torch.Tensor) else pickle.dumps(state)


def as_bytes(state: torch.Tensor) -> bytes:
    """Return a state of PyTorch's as bytes."""
    # By no operation, which a mode would see and a full memory refuse.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put back what ``generator_state`` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seeded_state(generator: Any, seed: int) -> Any:
    """Return the state of such a generator that is seeded; it keeps its own."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed & 0x7FFFFFFFFFFFFFFF).get_state()
    if isinstance(generator, random.Random):
        return random.Random(seed).getstate()
    return bits_of(generator)(seed).state


def bits_of(generator: np.random.Generator | np.random.RandomState) -> Any:
    """Return the class by which a generator of NumPy's draws bits."""
    return type(getattr(generator, "bit_generator", None) or generator._bit_generator)  # type: ignore[union-attr]


def state_dict(device: torch.device) -> dict[str, Any]:
    """Return what ``get_state`` does by names, for a checkpoint."""
    of_torch, python, numpy, on_devices = get_state(device)
    return {"torch": of_torch, "python": python, "numpy": numpy, "device": on_devices and on_devices[0]}


def load_state_dict(state: dict[str, Any], device: torch.device) -> None:
    """Put back what ``state_dict`` returned; for another kind of device there is nothing to put back."""
    on_device = state["device"] if is_of_its_kind(state["device"], device) else None
    set_state((state["torch"], state["python"], state["numpy"], None if on_device is None else (on_device,)), device)


def is_of_its_kind(on_device: torch.Tensor | None, device: torch.device) -> bool:
    """Return whether a state has the size of those of a device's generator."""
    if on_device is None or device.type == "cpu":
        return False
    return on_device.shape == torch.get_device_module(device).get_rng_state(*as_argument(device)).shape  # type: ignore[no-any-return]


def default_generator(device: torch.device) -> torch.Generator:
    """Return what draws on a device where no generator is passed; the CPU's where PyTorch does not hand it out."""
    generators = () if device.type == "cpu" else getattr(torch.get_device_module(device), "default_generators", ())
    index = device.index or 0
    return generators[index] if index < len(generators) else torch.default_generator


def as_argument(device: torch.device) -> tuple[torch.device, ...]:
    """Return a device as the functions of its kind take it."""
    return () if device.type == "mps" else (device,)  # torch.mps has one device and takes no argument


collation: ContextVar[int] = ContextVar("collation", default=1)
"""What is mixed into the seeds under which batches are collated."""


@contextmanager
def collated_otherwise(way: int = 1) -> Iterator[None]:
    """Let a collate_fn draw other numbers within than it has drawn of the same samples; the random states move.

    There are as many ways as numbers, from 1 on.
    """
    seed_host(way)  # for those that collate under the states as they are
    before = collation.set(1 + way)
    try:
        yield
    finally:
        collation.reset(before)


def mix(*numbers: int) -> int:
    """Make a 64-bit seed of numbers: the finaliser of splitmix64 (Steele, Lea and Flood 2014) after each.

    Neighbouring inputs give unrelated seeds, which a sum or a product would not.
    """
    seed = 0
    for term in numbers:
        # The increment is 2**64 divided by the golden ratio; multipliers and shifts are Stafford's Mix13, as in the
        # reference implementation.
        seed = (seed + term + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return seed


def seed_host(seed: int) -> None:
    """Seed torch's CPU generator, Python's and NumPy's."""
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)  # torch takes 63 bits, NumPy 32
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_everywhere(seed: int) -> None:
    """Seed what ``seed_host`` does and all devices: all that a recipe may draw from, or a run."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed what ``seed_host`` does and all devices of the kind of one."""
    seed_host(seed)
    # Not by torch.manual_seed: it takes a millisecond where a kind of device is not there or was not used yet.
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Undo, at its end, whatever was drawn or seeded on the host within it."""
    outside = get_state()
    try:
        yield
    finally:
        set_state(outside)


class IsolatedRandomness:
    """Random states of their own for the data, so that reading it neither disturbs training nor depends on it."""

    def __init__(self, seed: int, generators: Sequence[Any] = ()) -> None:
        """Seed the global generators of the host, and further ones, which the data holds."""
        self._generators = generators
        # By the seed, and not by where they are: a thread that reads ahead draws its last numbers whenever it runs.
        seeds = [seed, *(mix(seed, place) >> 1 for place in range(1, len(generators)))]
        self._own = list(map(seeded_state, generators, seeds))
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the global generators within; the further ones go on."""
        with preserved_randomness():
            seed_host(seed)
            self._state = get_state()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let all of them continue, within it, from where this object's own left off."""
        outside = [generator_state(generator) for generator in self._generators]
        with preserved_randomness():
            set_state(self._state)
            self._put(self._own)
            try:
                yield
            finally:
                self._state, self._own = get_state(), [generator_state(generator) for generator in self._generators]
                self._put(outside)

    def _put(self, states: Sequence[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            set_generator_state(generator, state)
