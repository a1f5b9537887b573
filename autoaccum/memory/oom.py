"""Tells an out-of-memory error from every other error, whichever backend raised it and in whatever words.

Saying yes means "a smaller micro-batch may succeed": the window is rolled back and replayed. A yes too many replays a
fault that is no matter of size; a no too many kills a run that could have gone on. So each text is one that PyTorch, or
a library under it, is known to raise for memory and for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Literal, TypeVar

import torch

from autoaccum.errors import LimitBelowModelError
from autoaccum.memory.base import Memory

# Only texts of untyped errors are needed: the caching allocators of CUDA, ROCm and XPU raise torch.OutOfMemoryError.
_TEXTS = re.compile(
    "|".join(
        (
            # c10/cuda/CUDACachingAllocator.cpp and c10/xpu/XPUCachingAllocator.cpp: "CUDA out of memory. Tried to
            # allocate". Typed where it is raised, but torch.compile wraps the text in errors of its own.
            # aten/src/ATen/mps/MPSAllocator.mm: "MPS backend out of memory (MPS allocated: ", a plain RuntimeError.
            r"\b(CUDA|HIP|XPU|MPS backend) out of memory\b",
            # c10/cuda/CUDAException.cpp: "CUDA error: " + cudaGetErrorString(cudaErrorMemoryAllocation), a
            # torch.AcceleratorError, for what is not taken from the caching allocator (pinned memory, a library's own).
            # C10_CUDA_DRIVER_CHECK in c10/cuda/driver_api.h: "CUDA driver error: " + cuGetErrorString's text.
            r"\b(CUDA|HIP)( driver)? error: out of memory\b",
            # Triton loads a kernel through the driver, past PyTorch's allocator and its retries.
            r"Triton Error \[(CUDA|HIP)\]: out of memory",
            # aten/src/ATen/cuda/Exceptions.cpp: the names of the libraries' status codes, spelt out.
            r"\b(CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED\b",
            # cudnnGetErrorString, after "cuDNN error: ": the first up to cuDNN 8, the others since 9.0.
            r"\bCUDNN_STATUS_ALLOC_FAILED\b",
            r"\bCUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED\b",
            # miopenGetErrorString, by way of MIOPEN_CHECK in aten/src/ATen/miopen/Exceptions.h.
            r"\bmiopenStatusAllocFailed\b",
            # On a MIG slice, reportProcessMemoryInfo may not ask NVML who holds the memory, and its assertion replaces
            # the OutOfMemoryError that was being written (pytorch#112377, accelerate#3803). It is called from nowhere
            # else in that file; the same assertion in PeerToPeerAccess.cpp is about links between devices.
            r"NVML_SUCCESS == [^\n]*INTERNAL ASSERT FAILED at [^\n]*CUDACachingAllocator\.cpp",
            # Level Zero under XPU, past the caching allocator (pytorch#177714).
            r"\bUR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY\b",
            # MPSAllocator.mm: one tensor above what a Metal buffer may hold, so a smaller micro-batch cures it.
            r"^Invalid buffer size: [0-9.]+ ([KMGT]i?B|bytes)",
            # c10/core/impl/alloc_cpu.cpp: the first on POSIX, the second on Windows and Android.
            r"DefaultCPUAllocator: can't allocate memory: you tried to allocate",
            r"DefaultCPUAllocator: not enough memory: you tried to allocate",
            # oneDNN keeps no more of a status than this (dnnl.hpp). What it does not support it refuses when the
            # descriptor of a primitive is made; the primitive fails for want of memory, for its code or its scratchpad.
            r"^could not create a (primitive|memory object)$",
            # operator new under an operation: torch/csrc/Exceptions.h turns a std::exception into a RuntimeError.
            r"\bstd::bad_alloc\b",
        )
    )
)

# Deliberately not among them:
# * CUBLAS_STATUS_NOT_INITIALIZED: cublasCreate says it on a full device, but as often after a device-side assertion (an
#   index out of range) has broken the context, where every replay would fail. The first micro-batches of a run are
#   small and create the handle, so the harmless cause is rare here.
# * "GET was unable to find an engine to execute this computation": cuDNN's for a workspace that it could not have, but
#   also for a type or a card without a kernel.
# * NCCL's "Cuda failure 2 'out of memory'": the communicator is lost with it, so no replay on this rank can succeed.


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that memory ran out, on any device or on the host.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch.AcceleratorError is a RuntimeError too.
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


T = TypeVar("T")


class RanOut(Enum):
    """What ``attempt`` returns when memory ran out."""

    RAN_OUT = "memory ran out"


RAN_OUT = RanOut.RAN_OUT


def attempt(function: Callable[[], T]) -> T | Literal[RanOut.RAN_OUT]:
    """Call a function and return what it returns, or ``RAN_OUT`` when memory ran out in it; other errors come through.

    The caller recovers after this has returned, and never within an ``except`` block: an exception that is being
    handled pins, through its traceback, the frames of the failed forward, and with them the very tensors that have to
    go (pytorch/pytorch#18853).
    """
    try:
        return function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return RAN_OUT


@contextmanager
def room_for_model(memory: Memory, limit_bytes: int, parameters: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Check, at its end, that the models and states made within it left room for the gradients.

    Args:
        memory: of the device that they are made on.
        limit_bytes: what this process may use of it.
        parameters: those that will have gradients, each as large as itself.

    Raises:
        LimitBelowModelError: memory ran out within it, or what is in use with the gradients passes the limit.
    """
    # The error is raised below and not in the ``except``, where the traceback would pin what was made half-way: that
    # would count as used, and the bytes needed are told to the user.
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out = True
    else:
        ran_out = False
    memory.release()
    needed = memory.used() + sum(p.nbytes for p in parameters)
    if ran_out or needed > limit_bytes:
        # How much was missing when it ran out is not known; it was more than the limit.
        raise LimitBelowModelError(needed_bytes=max(needed, limit_bytes + 1), limit_bytes=limit_bytes)
