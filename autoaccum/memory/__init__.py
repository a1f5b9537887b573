"""The memory of a device behind one interface: an accelerator's, the host's, or a simulated one for tests."""

from __future__ import annotations

import torch

from autoaccum.memory.accelerator import AcceleratorMemory, MpsMemory
from autoaccum.memory.base import Memory
from autoaccum.memory.cpu import CpuMemory
from autoaccum.memory.simulated import SimulatedMemory, active_simulation

__all__ = ["Memory", "memory_of"]


def memory_of(device: torch.device) -> Memory:
    """The memory of ``device``; the CPU's is the simulated one inside ``autoaccum.testing.simulated_memory``."""
    if device.type == "cpu":
        simulation = active_simulation()
        return CpuMemory() if simulation is None else SimulatedMemory(simulation)
    return MpsMemory() if device.type == "mps" else AcceleratorMemory(device)
