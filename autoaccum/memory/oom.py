"""Tells an out-of-memory error from every other error, whichever backend raised it and in whatever words.

Saying yes means "a smaller micro-batch may succeed": the window is rolled back and replayed. A yes too many replays a
fault that is no matter of size; a no too many kills a run that could have gone on. So each text is one that PyTorch, or
a library under it, is known to raise for memory and for nothing else.
"""

from __future__ import annotations

import dis
import gc
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from autoaccum.errors import AutoaccumError, LimitBelowModelError, MemoryLimitError
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
            # aten/src/ATen/native/cudnn/Conv_v8.cpp: no kernel fits into the memory that is left (pytorch#108645). It
            # says the same of a type that it has no kernel for: then not one sample runs, and the error is the cause.
            r"\b(GET|FIND) was unable to find an engine to execute this computation",
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
# * NCCL's "Cuda failure 2 'out of memory'": the communicator is lost with it, so no replay on this rank can succeed.


_OPENING = re.compile(
    r"(?:\[[^\]\n]*\][^.\n]*\.|(?:CUDA|HIP|cusolver|cuDNN|hipsolver) error:|Native API failed\. [^\n(]*\()\s*"
)
"""What libraries put before these words: ``[enforce fail at alloc_cpu.cpp:127] err == 0.``, ``cuDNN error:``."""
_QUOTING = ("torch", "triton", "autoaccum")
"""Packages whose Python code passes on what an allocator said, in words of their own around it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that memory ran out, on any device or on the host.

    It does so by its type, by its text, or because it was raised from such an error, or while one was being handled: a
    smaller micro-batch would then not have come to it. Errors of this package never do: they say what they mean.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    met: set[int] = set()  # a chain may be tied into a ring by hand
    link: BaseException | None = error
    while link is not None and id(link) not in met and not isinstance(link, AutoaccumError):
        if not isinstance(link, Exception):  # Ctrl-C while an error is handled is Ctrl-C
            return False
        if _says_so(link):
            return True
        met.add(id(link))
        link = link.__cause__ or _handled(link)
    return False


def _says_so(error: BaseException) -> bool:
    """Return whether the error itself is one of memory, whatever it was raised from."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):  # torch.AcceleratorError is one too
        return False
    # A user's own error may quote what an allocator said, days ago or in a log; one that begins with its words passes
    # it on.
    if is_raised_by_hand(error):
        text = str(error)
        return _TEXTS.match(text) is not None or _TEXTS.match(_OPENING.sub("", text, count=1)) is not None
    return _TEXTS.search(str(error)) is not None


def is_raised_by_hand(error: BaseException) -> bool:
    """Return whether a ``raise`` statement made the error, in code that is not PyTorch's; a C function has none."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    if module.split(".")[0] in _QUOTING:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _handled(error: BaseException) -> BaseException | None:
    """Return the error that was being handled when this one was raised, in a function that this one came through.

    One that is handled further out is no reason for it: training may be what somebody does after running out of memory.
    """
    context = error.__context__
    if context is None or error.__suppress_context__:
        return None
    if context.__traceback__ is None:  # dropped here, in an error that is passed on
        return context
    trace = error.__traceback__
    while trace is not None:
        # The outermost frame of an error that was caught is the one that caught it.
        if trace.tb_frame is context.__traceback__.tb_frame:
            return context
        trace = trace.tb_next
    return None


_ASKED = re.compile(r"(?:ried|Unable) to allocate (?:[\d.]+ \S+ \((\d+) bytes\)|([\d.]+) ([KMGTPE]iB|bytes))")
_UNITS = {unit: 1024**power for power, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))}


def asked_bytes(error: BaseException) -> int | None:
    """Return how much was asked for when memory ran out, as the error's text says; None where it does not.

    >>> asked_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of"))
    2147483648
    """
    link: BaseException | None = error
    for _ in range(10):  # of a chain no more is looked at than people would read
        if link is None:
            break
        if found := _ASKED.search(str(link)):
            exact, number, unit = found.groups()
            return int(exact) if exact else int(float(number) * _UNITS[unit])
        link = link.__cause__ or link.__context__
    return None


E = TypeVar("E", bound=BaseException)
T = TypeVar("T")


def without_frames(error: E) -> E:
    """Return the same error without its traceback, and without those of what led to it: their frames pin tensors."""
    met: set[int] = set()
    found: list[BaseException | None] = [error]
    while found:
        link = found.pop()
        if link is None or id(link) in met:
            continue
        met.add(id(link))
        # Cleared too, for another object may hold a frame, and a generator's is in reference cycles.
        traceback.clear_frames(link.__traceback__)
        with suppress(Exception):  # a class of the user's may let nothing be set
            link.__traceback__ = None
        found += [link.__cause__, link.__context__]
    return error


@dataclass(frozen=True, slots=True)
class RanOut:
    """What ``attempt`` returns when memory ran out."""

    error: Exception
    """The error, which pins nothing: the cause of whatever is raised in the end."""


class _Nothing(torch.autograd.Function):
    """Passes nothing on."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


with torch.inference_mode(False), torch.enable_grad():
    # Made beforehand, so that to go back through it takes no memory, and is no operation of anybody's.
    _ROOT = _Nothing.apply(torch.zeros((), device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
    _ONE = torch.ones((), device="cpu")


def drop_what_is_due() -> None:
    """Have autograd forget the steps of a backward that has failed, which hold what they would have gone back by.

    They stay in the queue of the thread until the next backward, and so through the forward of a replay, which then has
    less memory than there is (pytorch/pytorch#82218).
    """
    try:
        torch.autograd.backward(_ROOT, _ONE, retain_graph=True)
    except Exception as failure:  # within a transform, that knows no backward: there is no reason to fail for that
        without_frames(failure)


def attempt(function: Callable[[], T]) -> T | RanOut:
    """Call a function and return what it returns, or a ``RanOut`` when memory ran out in it; other errors come through.

    The caller recovers after this has returned, and never within an ``except`` block: an exception that is being
    handled pins, through its traceback, the frames of the failed forward, and with them the very tensors that have to
    go (pytorch/pytorch#18853).
    """
    try:
        return function()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out = RanOut(without_frames(error))
    drop_what_is_due()
    return ran_out


TRIES = 3
"""Try so often what may simply be done again, and needs hardly any memory, before it is given up."""


def insist(function: Callable[[], T], what: str) -> T:
    """Call a function that may simply be called again when memory ran out in it; return what it returns.

    Args:
        function: what to call; a call that failed half-way is made good by the next one.
        what: what it does, for the error: "drawing the order of the samples".

    Raises:
        MemoryLimitError: memory ran out every time.
    """
    outcome = attempt(function)
    for _ in range(TRIES - 1):
        if not isinstance(outcome, RanOut):
            return outcome
        gc.collect()  # what failed may have left reference cycles that hold memory
        outcome = attempt(function)
    if not isinstance(outcome, RanOut):
        return outcome
    raise beyond_plans(what) from outcome.error


@contextmanager
def named(what: str) -> Iterator[None]:
    """Raise a typed error where memory runs out within it, beyond the reach of any plan; others come through.

    Raises:
        MemoryLimitError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The traceback stays, for nothing goes on from here; what its frames hold does not.
        traceback.clear_frames(error.__traceback__)
        raise beyond_plans(what) from error


def beyond_plans(what: str) -> MemoryLimitError:
    """Return the error for memory that ran out where no micro-batch is being run."""
    return MemoryLimitError(
        f"memory ran out while {what}, where no smaller micro-batch helps; the error above says where. Leave more "
        f"headroom, raise memory_limit, or free the device for this process.",
        micro_batch=None,
        peak_bytes=None,
        limit_bytes=None,
    )


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
    if memory.can_enforce and memory.used():
        gc.collect()  # an earlier run's optimizer refers to itself, and its state would count as this one's
    cause: Exception | None = None
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cause = error
    memory.release()
    # Where memory ran out, what was made half-way is still there, in frames of the error's: it is needed as well.
    in_use = memory.used()
    of_gradients = sum(p.nbytes for p in parameters)
    needed = in_use + of_gradients
    is_least = cause is not None and needed <= limit_bytes
    if cause is not None:
        if is_least:  # what was asked for last would have been beside it
            needed = max(in_use + (asked_bytes(cause) or 0), limit_bytes + 1)
        without_frames(cause)
    if needed > limit_bytes:
        raise LimitBelowModelError(
            needed_bytes=needed, limit_bytes=limit_bytes, model_bytes=2 * of_gradients, is_least=is_least
        ) from cause
