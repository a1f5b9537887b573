from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.errors import DataError, LimitBelowModelError, MemoryLimitError, NothingFitsError
from autoaccum.memory.devices import find_device, memory_of
from autoaccum.memory.oom import (
    RanOut,
    asked_bytes,
    attempt,
    insist,
    is_out_of_memory,
    named,
    room_for_model,
)
from autoaccum.testing import simulated_memory
from tests.processes import in_turn

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1 GiB is free.",
    "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB of which 780 MiB is free.",
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB of which 5.65 GiB is free.",
    "MPS backend out of memory (MPS allocated: 17.21 GiB, other allocations: 1.30 GiB, max allowed: 20.13 GiB). Tried "
    "to allocate 256 bytes on private pool.",
    "Invalid buffer size: 12.00 GiB",
    "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`.",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "GET was unable to find an engine to execute this computation",
    "miopenStatusAllocFailed",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to '
    "PyTorch. ",
    "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
    '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug to PyTorch. ',
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate 858993459 "
    "bytes.",
    "std::bad_alloc",
    "could not create a primitive",
    "could not create a memory object",
]

SOMETHING_ELSE = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "miopenStatusInternalError",
    'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "../c10/cuda/PeerToPeerAccess.cpp":83',
    'handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":403, please report a bug',
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error, NCCL version 2.21.5\nncclUnhandledCudaError: Call "
    "to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "out of resource: shared memory, Required: 132096, Hardware limit: 101376. Reducing block sizes may help.",
    "[enforce fail at alloc_cpu.cpp:83] ((ptrdiff_t)nbytes) >= 0. alloc_cpu() seems to have been called with negative "
    "number: 18446744073709551612",
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
    "the memory bank is empty",
    "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable "
    "ONEDNN_VERBOSE=all to get additional diagnostic information.",
    "memory is full of wonders, and out of memory comes wisdom",
    "Invalid buffer size: expected a multiple of 4",
    "",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_every_known_text_of_an_out_of_memory_error_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.AcceleratorError(text))


@pytest.mark.parametrize("text", SOMETHING_ELSE)
def test_no_other_runtime_error_is_taken_for_one(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(torch.AcceleratorError(text))


@pytest.mark.parametrize("error_type", [torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, MemoryError])
def test_the_type_is_enough(error_type: type[Exception]) -> None:
    assert is_out_of_memory(error_type())


def test_numpy_s_own_error_is_recognised() -> None:
    with pytest.raises(MemoryError) as raised:
        np.ones(2**60, dtype=np.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("error_type", [ValueError, OSError, KeyError, KeyboardInterrupt])
def test_the_text_counts_only_in_a_runtime_error(error_type: type[BaseException]) -> None:
    assert not is_out_of_memory(error_type("CUDA out of memory. Tried to allocate 2.00 GiB."))


def test_real_errors_of_a_wrong_shape_and_a_wrong_type_are_not_taken_for_one() -> None:
    with pytest.raises(RuntimeError) as shape:
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(RuntimeError) as kind:
        torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.int64)
    assert not is_out_of_memory(shape.value)
    assert not is_out_of_memory(kind.value)


CHILD = """
import re, resource, torch
from autoaccum.errors import DataError, LimitBelowModelError, MemoryLimitError, NothingFitsError
from autoaccum.memory.devices import memory_of
from autoaccum.memory.oom import RanOut, asked_bytes, attempt, insist, is_out_of_memory, named, room_for_model
from autoaccum.testing import simulated_memory

torch.set_num_threads(1)
data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (data + 256 * 2**20, resource.RLIM_INFINITY))
model = torch.nn.Linear(16, 16)
held = [torch.ones(2**16, 16)]
try:
    while True:  # 4 MiB a forward, so that the allocator fails inside an operation and not at one giant request
        held.append(model(held[-1]))
except RuntimeError as error:
    print(type(error).__name__, is_out_of_memory(error), str(error))
held.clear()
try:
    bytearray(2**29)
except MemoryError as error:
    print(type(error).__name__, is_out_of_memory(error), str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA holds back the allocator only on Linux")
@in_turn
def test_the_cpu_allocator_s_real_failure_is_recognised() -> None:
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    from_torch, from_python = child.stdout.splitlines()
    assert from_torch.startswith("RuntimeError True [enforce fail at alloc_cpu.cpp")
    assert from_python.startswith("MemoryError True")


class TestRoomForModel:
    def test_running_out_within_it_is_a_limit_below_the_model(self) -> None:
        with (
            pytest.raises(LimitBelowModelError) as caught,
            room_for_model(memory_of(torch.device("cpu")), 5 << 30),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert caught.value.limit_bytes == 5 << 30
        assert caught.value.needed_bytes > 5 << 30

    def test_gradients_that_are_not_there_yet_must_fit_too(self) -> None:
        with simulated_memory("1GiB"):
            memory = memory_of(torch.device("cpu"))
            parameters = [torch.zeros(1000)]
            with room_for_model(memory, 8000, parameters):
                parameters[0].add_(1)
            with pytest.raises(LimitBelowModelError), room_for_model(memory, 7999, parameters):
                pass

    def test_other_errors_pass(self) -> None:
        with pytest.raises(KeyError), room_for_model(memory_of(torch.device("cpu")), 1):
            raise KeyError


class TestAttempt:
    @pytest.mark.parametrize("value", [7, 0, None, "RAN_OUT"])
    def test_what_the_function_returns_is_returned(self, value: Any) -> None:
        assert attempt(lambda: value) is value

    @pytest.mark.parametrize(
        "error",
        [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("CUDA error: out of memory")],
        ids=repr,
    )
    def test_running_out_of_memory_is_a_value(self, error: Exception) -> None:
        def fails() -> None:
            raise error

        assert isinstance(attempt(fails), RanOut)

    @pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("of shapes"), KeyboardInterrupt()], ids=repr)
    def test_other_errors_come_through_as_they_are(self, error: BaseException) -> None:
        def fails() -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            attempt(fails)
        assert raised.value is error

    def test_nothing_holds_the_tensors_of_the_failed_frame_after_it(self) -> None:
        """Also without the garbage collector, which would find what an exception and its frames hold of each other."""
        references: list[weakref.ref[torch.Tensor]] = []

        def fails() -> None:
            outputs = torch.ones(3)
            references.append(weakref.ref(outputs))
            raise torch.OutOfMemoryError("CUDA out of memory.")

        gc.disable()
        try:
            assert isinstance(attempt(fails), RanOut)
            assert references[0]() is None
        finally:
            gc.enable()


def raised(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


class TestBackward:
    """Steps of a backward that failed stay in autograd's queue, with all that they would have gone back by."""

    def fail(self, held: list[Any], *, error: Exception) -> None:
        class Holds(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.large = torch.zeros(1000)
                held.append(weakref.ref(ctx.large))
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                return gradients[0]

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                raise error

        x = torch.ones((), requires_grad=True)
        side = Holds.apply(Holds.apply(x))
        (Fails.apply(x) + side).backward()

    def test_nothing_of_it_stays(self) -> None:
        held: list[Any] = []
        found = attempt(lambda: self.fail(held, error=torch.OutOfMemoryError("CUDA out of memory.")))
        assert isinstance(found, RanOut)
        gc.collect()
        assert [reference() for reference in held] == [None, None]
        # As PyTorch has it; if this fails it has mended that, and we need not.
        with pytest.raises(ValueError, match="another"):
            attempt(lambda: self.fail(held, error=ValueError("another")))
        gc.collect()
        assert any(reference() is not None for reference in held)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
    def test_whatever_mode_it_is_in(self, mode: Callable[[], Any]) -> None:
        held: list[Any] = []

        def run() -> Any:
            with torch.inference_mode(False), torch.enable_grad():
                self.fail(held, error=torch.OutOfMemoryError("CUDA out of memory."))

        with mode(), simulated_memory(10_000) as device:
            assert isinstance(attempt(run), RanOut)
            gc.collect()
            assert device.used == 0
        assert [reference() for reference in held] == [None, None]

    def test_where_no_backward_may_be_run_the_error_is_of_memory_still(self) -> None:
        def fail() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        found = []
        torch.func.vmap(lambda x: (found.append(attempt(fail)), x)[1])(torch.ones(3))
        assert isinstance(found[0], RanOut)


class TestWhoseItIs:
    """A user's own error is told from one of memory: by who raised it, and from what."""

    QUOTED = "step 5 failed before: CUDA out of memory. Tried to allocate 2.00 GiB"

    def test_an_error_of_ones_own_may_quote_one(self) -> None:
        def mine() -> None:
            raise RuntimeError(self.QUOTED)

        assert not is_out_of_memory(raised(mine))

    @pytest.mark.parametrize("text", OUT_OF_MEMORY)
    def test_one_that_begins_with_the_words_passes_them_on(self, text: str) -> None:
        def passed_on() -> None:
            raise RuntimeError(text)

        assert is_out_of_memory(raised(passed_on)) is not text.startswith("backend=")

    def test_pytorch_s_own_code_has_words_around_them(self) -> None:
        code = compile(f"def f():\n    raise RuntimeError({self.QUOTED!r})", "f", "exec")
        module: dict[str, Any] = {"__name__": "torch._dynamo.output_graph"}
        exec(code, module)
        assert is_out_of_memory(raised(module["f"]))

    def test_what_was_raised_from_one_is_one(self) -> None:
        def wrapped() -> None:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except torch.OutOfMemoryError as error:
                raise KeyError("batch too large") from error

        def while_handled() -> None:
            try:
                raise MemoryError
            except MemoryError:
                {}["the handler's own"]

        def hidden() -> None:
            try:
                raise MemoryError
            except MemoryError:
                raise KeyError("on purpose") from None

        def interrupted() -> None:
            try:
                raise MemoryError
            except MemoryError:
                raise KeyboardInterrupt from None

        assert is_out_of_memory(raised(wrapped))
        assert is_out_of_memory(raised(while_handled))
        assert not is_out_of_memory(raised(hidden))
        with pytest.raises(KeyboardInterrupt) as stopped:
            interrupted()
        assert not is_out_of_memory(stopped.value)

    def test_what_is_handled_further_out_is_no_reason(self) -> None:
        """Training may be what somebody does after running out of memory."""

        def fails() -> None:
            raise ValueError("a bug")

        try:
            raise MemoryError
        except MemoryError:
            error = raised(fails)
        assert isinstance(error.__context__, MemoryError)
        assert not is_out_of_memory(error)

    def test_errors_of_this_package_say_what_they_mean(self) -> None:
        error = DataError("iterating ran out of memory")
        error.__cause__ = MemoryError()
        assert not is_out_of_memory(error)
        later = ValueError("while that was handled")
        later.__cause__ = error
        assert not is_out_of_memory(later)

    def test_a_ring_has_an_end(self) -> None:
        first, second = ValueError("a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        assert not is_out_of_memory(first)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (OUT_OF_MEMORY[0], 2 << 30),
        ("Simulated device out of memory. Tried to allocate 4.00 KiB (4097 bytes). The device has (8 bytes)", 4097),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12", 8 << 30),
        ("Unable to allocate 1.50 MiB for an array with shape (3,)", 3 << 19),
        ("CUDA out of memory.", None),
    ],
)
def test_how_much_was_asked_for(text: str, asked: int | None) -> None:
    assert asked_bytes(RuntimeError(text)) == asked
    wrapped = ValueError("mine")
    wrapped.__cause__ = RuntimeError(text)
    assert asked_bytes(wrapped) == asked


def test_a_cause_is_kept_and_pins_nothing() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def fails() -> None:
        outputs = torch.ones(3)
        references.append(weakref.ref(outputs))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def wraps() -> None:
        try:
            fails()
        except torch.OutOfMemoryError as error:
            raise ValueError("mine") from error

    gc.disable()
    try:
        outcome = attempt(wraps)
        assert isinstance(outcome, RanOut)
        assert str(outcome.error) == "mine"
        assert isinstance(outcome.error.__cause__, torch.OutOfMemoryError)
        assert outcome.error.__traceback__ is outcome.error.__cause__.__traceback__ is None
        assert references[0]() is None
    finally:
        gc.enable()


class TestInsist:
    @pytest.mark.parametrize("failures", [0, 1, 2])
    def test_what_may_be_done_again_is(self, failures: int) -> None:
        calls = []

        def fails_at_first() -> int:
            calls.append(0)
            if len(calls) <= failures:
                raise MemoryError
            return 7

        assert insist(fails_at_first, "counting") == 7
        assert len(calls) == failures + 1

    def test_and_in_the_end_the_error_says_what_was_done(self) -> None:
        def fails() -> None:
            raise MemoryError("host")

        with pytest.raises(MemoryLimitError, match="memory ran out while counting") as caught:
            insist(fails, "counting")
        assert str(caught.value.__cause__) == "host"

    def test_other_errors_come_through_at_once(self) -> None:
        calls = []

        def fails() -> None:
            calls.append(0)
            raise KeyError

        with pytest.raises(KeyError):
            insist(fails, "counting")
        assert len(calls) == 1


def test_named_gives_an_error_a_type_and_keeps_where_it_was() -> None:
    with pytest.raises(MemoryLimitError, match="while nothing ran") as caught, named("nothing ran"):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.__cause__.__traceback__ is not None
    with pytest.raises(NothingFitsError), named("nothing ran"):
        raise NothingFitsError(phase="training", micro_batch=1, peak_bytes=None, limit_bytes=None)


@pytest.mark.gpu
def test_what_an_earlier_run_has_left_in_a_cycle_is_not_counted() -> None:
    device = find_device(None)
    memory = memory_of(device)
    memory.release()
    free = memory.used()
    left: list[object] = [torch.empty(2**27, dtype=torch.uint8, device=device)]
    left.append(left)
    gc.disable()
    try:
        del left
        assert memory.used() >= free + 2**27
        with room_for_model(memory, free + 2**26):
            pass
    finally:
        gc.enable()


def test_memory_that_ran_out_before_all_was_there_says_that_more_is_needed() -> None:
    device = torch.device("cpu")
    used = memory_of(device).used()
    with (
        pytest.raises(LimitBelowModelError, match=r"or more are needed .* and what a sample takes, or train") as caught,
        room_for_model(memory_of(device), used * 2),
    ):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {used * 3} bytes.")
    assert caught.value.needed_bytes == pytest.approx(4 * used, rel=0.2)
