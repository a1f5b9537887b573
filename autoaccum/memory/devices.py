"""The device to train on, and its memory."""

from __future__ import annotations

import torch

from autoaccum.errors import UnknownDeviceError
from autoaccum.memory.accelerator import AcceleratorMemory, MpsMemory
from autoaccum.memory.base import Memory
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.simulated import SimulatedMemory, active_simulation


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device of that name; without one the accelerator that is current, or the CPU where there is none.

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
    # What allocates without naming a device (a model's own "cuda", a library's handle) has to land on this one.
    torch.accelerator.set_device_index(found.index)
    return found


def memory_of(device: torch.device) -> Memory:
    """Return the memory of ``device``; the CPU's is the simulated one inside ``autoaccum.testing.simulated_memory``."""
    if device.type == "cpu":
        simulation = active_simulation()
        return CpuMemory() if simulation is None else SimulatedMemory(simulation)
    return MpsMemory() if device.type == "mps" else AcceleratorMemory(device)
