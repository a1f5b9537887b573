"""The device to train on, and its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoaccum.errors import UnknownDeviceError
from autoaccum.memory.accelerator import AcceleratorMemory
from autoaccum.memory.base import Memory
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.mps import MpsMemory
from autoaccum.memory.simulated import SimulatedMemory, active_simulation


@contextmanager
def current_device_kept() -> Iterator[None]:
    """Make the device current again, at its end, that was so at its beginning, whatever happens within it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        yield
        return
    # To ask a device that was never used would start it, which takes memory; the first one is current then.
    is_started = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)
    before = torch.accelerator.current_device_index() if is_started() else 0
    try:
        yield
    finally:
        if is_started():
            torch.accelerator.set_device_index(before)


@contextmanager
def being_current(device: torch.device) -> Iterator[None]:
    """Let a device be current within it."""
    # What allocates without naming a device (a model's own "cuda", a library's handle) has to land on this one.
    with torch.accelerator.device_index(device.index):
        yield


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device of that name; without one the accelerator that is current, or the CPU where there is none.

    An accelerator is made current: callers are within ``current_device_kept``.

    Raises:
        UnknownDeviceError: this machine, or this build of PyTorch, does not have it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = accelerator or "cpu"
    count = torch.accelerator.device_count() if accelerator is not None else 0
    available = ["cpu"]
    if accelerator is not None:
        available += [f"{accelerator.type}:{index}" for index in range(count)]
    try:
        found = torch.device(device)
    except Exception:  # of a text that is no device, an index of 30 digits, or anything else
        raise UnknownDeviceError(device, available) from None
    if found.type == "cpu":
        return torch.device("cpu")  # without an index: "cpu:0" does not compare equal to the device of a tensor
    # For an accelerator it is the other way round: tensors have an index, and "cuda" alone equals none of them.
    if found.index is None and accelerator is not None and found.type == accelerator.type:
        found = torch.device(found.type, torch.accelerator.current_device_index())
    if str(found) not in available:
        raise UnknownDeviceError(device, available)
    torch.accelerator.set_device_index(found.index)
    return found


def memory_of(device: torch.device) -> Memory:
    """Return the memory of ``device``; the CPU's is the simulated one inside ``autoaccum.testing.simulated_memory``."""
    if device.type == "cpu":
        simulation = active_simulation()
        return CpuMemory() if simulation is None else SimulatedMemory(simulation)
    return MpsMemory() if device.type == "mps" else AcceleratorMemory(device)
