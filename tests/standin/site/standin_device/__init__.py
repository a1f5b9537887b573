"""The stand-in device as torch sees it: ``torch.standin``, with what ``torch.cuda`` has of the same names.

torch loads it by itself in each process that has this on its path: so do the children of a test. What it is built of,
and what it is strict about, is in ``device.cpp``. The environment sets it up: STANDIN_COUNT devices of STANDIN_BYTES.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from typing import Any

import torch

library = ctypes.CDLL(os.environ["STANDIN_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
"""The device itself, for what no GPU offers: its log, its clock, and allocations that are made to fail."""
library.standin_set_fraction.argtypes = [ctypes.c_int, ctypes.c_double]
library.standin_fraction.restype = ctypes.c_double
library.standin_fail_in.argtypes = [ctypes.c_int, ctypes.c_int64]
library.standin_clock.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_double]
library.standin_advance.argtypes = [ctypes.c_double]
library.standin_now.restype = ctypes.c_double
for name in ("total", "touches", "allocations", "fails_in", "log_size"):
    getattr(library, f"standin_{name}").restype = ctypes.c_int64
library.standin_log_entry.argtypes = [
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_double),
    ctypes.c_char_p,
    ctypes.c_int,
]

_STATISTICS = (
    "memory_stats",
    "memory_allocated",
    "memory_reserved",
    "max_memory_allocated",
    "max_memory_reserved",
    "reset_peak_memory_stats",
)


def load() -> None:
    """Be what torch calls when it has found this: to import it has made the device."""


def _index(device: Any = None) -> int:
    if device is None:
        return torch._C._accelerator_getDeviceIndex()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if index is None else index


class _Properties:
    def __init__(self, index: int) -> None:
        self.name, self.total_memory, self.index = "Stand-in", library.standin_total(), index


class _Device:
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


def _make() -> None:
    torch.utils.rename_privateuse1_backend("standin")
    module: Any = types.ModuleType("torch.standin")
    module.is_available = module.is_initialized = lambda: True
    module._initialized = True  # torch.utils.checkpoint reads it before it saves the device's random state
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: bool(library.standin_forked())
    module.device_count = library.standin_count
    module.current_device = _index
    module.set_device = lambda device: torch._C._accelerator_setDeviceIndex(_index(device))
    module.synchronize = lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device))
    module.get_device_properties = lambda device=None: _Properties(_index(device))
    module.get_device_name = lambda device=None: "Stand-in"
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.empty_cache = torch.accelerator.empty_cache
    for name in _STATISTICS:
        setattr(module, name, getattr(torch.accelerator, name))
    module.memory_stats_as_nested_dict = lambda device=None: torch._C._accelerator_getDeviceStats(_index(device))
    module.mem_get_info = torch.accelerator.get_memory_info
    module.set_per_process_memory_fraction = lambda fraction, device=None: library.standin_set_fraction(
        _index(device), fraction
    )
    module.get_per_process_memory_fraction = lambda device=None: library.standin_fraction(_index(device))
    module._exchange_device = torch._C._accelerator_exchangeDevice
    module._maybe_exchange_device = torch._C._accelerator_maybeExchangeDevice
    module.device = _Device
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = torch.accelerator.current_stream
    torch._register_device_module("standin", module)
    sys.modules["torch.standin"] = module
    library.standin_default_generators(1)
    generators = tuple(torch.Generator(f"standin:{index}") for index in range(library.standin_count()))
    library.standin_default_generators(0)
    module.default_generators = generators
    module.get_rng_state = lambda device="standin": generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device="standin": generators[_index(device)].set_state(state)
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    module.set_rng_state_all = lambda states: [g.set_state(s) for g, s in zip(generators, states, strict=True)]
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators] and None
    module.seed = lambda: generators[_index()].seed()
    module.initial_seed = lambda: generators[_index()].initial_seed()
    torch.utils.generate_methods_for_privateuse1_backend()
    library.standin_begin()


_make()
