"""Checks random states before they are put back: some that no generator comes to would crash at the next draw."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch

from autoaccum._kinds import a, below, entries, every, number, optional, parts, refuse, shown, whole
from autoaccum.data.randomness import WORDS, bits_of, generator_state, is_of_its_kind, set_generator_state


def check_random_states(state: Any, device: torch.device, entry: str) -> None:
    """Check what ``randomness.load_state_dict`` is to put back, on generators of no use; those in use stay as they are.

    Raises:
        CheckpointCorruptError: a state is none that its generator can have. Some would be taken and end in a crash.
    """
    of_device = optional(_check_bytes)
    entries({"torch": _check_torch, "python": _check_python, "numpy": _check_numpy, "device": of_device})(state, entry)
    # A run may have been moved from another kind of device, whose states have another size and are of no use here.
    if is_of_its_kind(state["device"], device):
        try:
            torch.Generator(device).set_state(state["device"])
        except RuntimeError as error:
            refuse(below(entry, "device"), f"is none of this generator ({error})")


def _check_bytes(value: Any, entry: str) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        refuse(entry, f"is {shown(value)}, not a tensor of bytes")


def _check_torch(value: Any, entry: str) -> None:
    """Check a state of torch's CPU generator."""
    _check_bytes(value, entry)
    tried = torch.Generator()
    if value.shape != tried.get_state().shape:
        refuse(entry, f"has {value.numel()} bytes, not {tried.get_state().numel()}")
    # THGeneratorState in aten/src/ATen/CPUGeneratorImpl.cpp begins with the seed, the words that are left, whether it
    # was seeded, and the next word. PyTorch looks at the words that are left and at the next one apart: together they
    # may lead behind the last.
    _, left, _, position = struct.unpack_from("<QiiQ", value.numpy().tobytes())
    try:
        tried.set_state(value)
    except RuntimeError as error:
        refuse(entry, f"is none of this generator ({error})")
    is_sound = left + position == WORDS + 1 or (left, position) == (1, 0)  # the latter when nothing was drawn yet
    if not is_sound or not torch.equal(tried.get_state(), value):
        refuse(entry, "is none of this generator")


def _check_python(value: Any, entry: str) -> None:
    """Check a state of Python's generator."""
    parts(whole(3, 3), every(whole(0, 2**32 - 1), tuple), optional(number()))(value, entry)
    try:
        random.Random().setstate(value)
    except ValueError as error:
        refuse(entry, f"is none of this generator ({error})")


def _check_numpy(value: Any, entry: str) -> None:
    """Check a state of NumPy's generator, which is a tuple of its first kind and a dict of any other."""
    generator = type(np.random.get_bit_generator())  # type: ignore[attr-defined]
    legacy = generator is np.random.MT19937
    present: Any = np.random.get_state() if legacy else np.random.get_state(legacy=False)
    if type(value) is not type(present):
        refuse(entry, f"is {shown(value)}, not of {generator.__name__}, which NumPy draws by here")
    if legacy:
        parts(a(str), _check_key, whole(0, WORDS), whole(0, 1), number())(value, entry)
        if value[0] != present[0]:
            refuse(f"{entry}[0]", f"is {shown(value[0])}, not {present[0]!r}")
        return
    _check_bits(np.random.RandomState(generator()), value, entry)


def check_generator(generator: Any, value: Any, entry: str) -> None:
    """Check a state before it is put back into a generator of the data's: PyTorch's, NumPy's or Python's.

    Raises:
        CheckpointCorruptError: it is none that the generator can have.
    """
    if isinstance(generator, random.Random):
        _check_python(value, entry)
    elif not isinstance(generator, torch.Generator):
        _check_bits(type(generator)(bits_of(generator)()), value, entry)
    elif generator.device.type == "cpu":
        _check_torch(value, entry)
    else:
        _check_bytes(value, entry)
        try:
            torch.Generator(generator.device).set_state(value)
        except RuntimeError as error:
            refuse(entry, f"is none of this generator ({error})")


def _check_bits(tried: Any, value: Any, entry: str) -> None:
    """Check a state of a generator of NumPy's, on one of nobody."""
    name_of_bits = bits_of(tried).__name__
    a(dict)(value, entry)
    # Positions are taken as they are and read at: behind its words there is memory of others.
    state = value.get("state") if isinstance(value.get("state"), dict) else {}
    for of, name, words in ((value, "buffer_pos", "buffer"), (state, "pos", "key")):
        if name in of:
            whole(0, np.size(of.get(words, ())))(of[name], below(entry, name))
    try:
        set_generator_state(tried, value)
        is_sound = repr(generator_state(tried)) == repr(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        refuse(entry, f"is none of {name_of_bits} ({error!r})")
    if not is_sound:
        refuse(entry, f"is none of {name_of_bits}")


def _check_key(value: Any, entry: str) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint32 or value.shape != (WORDS,):
        refuse(entry, f"is {shown(value)}, not {WORDS} words of 32 bits")
