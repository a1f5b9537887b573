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
        raise _refused(device, "", available) from None
    if found.type == "cpu":
        return torch.device("cpu")  # without an index: "cpu:0" does not compare equal to the device of a tensor
    # For an accelerator it is the other way round: tensors have an index, and "cuda" alone equals none of them.
    if found.index is None and accelerator is not None and found.type == accelerator.type:
        found = torch.device(found.type, torch.accelerator.current_device_index())
    if str(found) not in available:
        raise _refused(device, found.type, available)
    torch.accelerator.set_device_index(found.index)
    return found


def _refused(device: object, kind: str, available: list[str]) -> UnknownDeviceError:
    """Return the error for a device that is not among those available; its kind is empty where PyTorch has none."""
    built = torch.accelerator.current_accelerator()  # what the build is for, whether or not there is one
    is_there = len(available) > 1
    name = built.type if built is not None and is_there else "cpu"
    if kind in ("", "meta"):
        cure = f"Use device={name!r}, or leave device out."
        return UnknownDeviceError(device, available, "is no device to train on", cure)
    cure = f"Leave device out to train on {'the CPU' if name == 'cpu' else name}"
    if built is None:
        why = "this PyTorch build is CPU-only"
        cure += ", or install a build for CUDA (https://pytorch.org/get-started)" * (kind == "cuda")
    elif built.type != kind:
        why = f"this PyTorch build is for {built.type.upper()}"
    elif is_there:
        why = f"there are {', '.join(available)}"
    else:
        why = f"this PyTorch build is for {kind.upper()}, but no {kind.upper()} device works here"
        cure += ", or run nvidia-smi to see whether the driver finds a GPU" * (kind == "cuda")
    return UnknownDeviceError(device, available, f"is not available: {why}", f"{cure}.")


def memory_of(device: torch.device) -> Memory:
    """Return the memory of ``device``; the CPU's is the simulated one inside ``autoaccum.testing.simulated_memory``."""
    if device.type == "cpu":
        simulation = active_simulation()
        return CpuMemory() if simulation is None else SimulatedMemory(simulation)
    return MpsMemory() if device.type == "mps" else AcceleratorMemory(device)
