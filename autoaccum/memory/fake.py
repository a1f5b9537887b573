"""Fake tensors, which have shapes and no values, and a count of the memory that they would take on a device.

Operations on them compute nothing and take no time to speak of, so that a step can be run of a model, and at a
size, for which there is no memory on any machine at hand. They are PyTorch's own (``torch._subclasses``), which
``torch.compile`` traces by, and say that they lie on the CPU: those that say "cuda" end the process of a build without
CUDA.
"""

# PyTorch's dispatch modes carry no annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum.memory.simulated import MemorySimulation

BLOCK_BYTES = 512
"""An allocation of PyTorch's caching allocators is a multiple of so many bytes (kMinBlockSize)."""
_LSTM_BYTES = 63
"""Workspace of oneDNN's kernel of LSTMs for each element of its output, as measured: its fake tells of none."""
_BOUNDLESS = 2**62
_CPU = torch.device("cpu")
_OF_VALUES = re.compile(r"fake ?tensor|data pointer|tensor subclass|storage of Tensor", re.IGNORECASE)
"""What PyTorch says where Python code asks a tensor without values for them: ``.numpy()``, ``.data_ptr()``."""


class FakeMemory(MemorySimulation):
    """A dispatch mode that counts the storages of fake tensors, in whole blocks, and refuses nothing."""

    _counts = "meta"  # a fake tensor says "cpu", and its storage where it really lies
    _block_bytes = BLOCK_BYTES

    def __init__(self) -> None:
        super().__init__(_BOUNDLESS)
        self.answers_items = False
        """Whether a number that is read off a tensor is 1 where nobody knows it, instead of an error."""

    def hold(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count tensors that are there already; return the bytes that they add to what is counted."""
        more_bytes, grown = self._growth((list(tensors),))
        self._count(more_bytes, grown)
        return more_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        _refuse_real((args, tuple((kwargs or {}).values())))
        # The kernel multiplies the grouped matrices of experts in float32 as well; PyTorch's fake of it refuses that.
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float32:
            product = _grouped_product(*args, **(kwargs or {}))
            self.hold([*args[:2], product])
            return product
        reads = func is torch.ops.aten._local_scalar_dense.default
        try:
            # PyTorch 2.14 reads integers off real tensors: numbers from before the operations that computed nothing.
            if reads and not isinstance(args[0], FakeTensor):
                raise DataDependentOutputException(cast("Any", func))
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            # An optimizer reads its count of steps, or a norm, and computes with it; it decides nothing by them.
            if self.answers_items and reads:
                return _one(args[0].dtype)
            raise
        # Its size depends on the kernel; without one an LSTM seemed to take a third of what it does.
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            workspace = result[0].new_empty(_LSTM_BYTES * result[0].numel(), dtype=torch.uint8)
            self.hold([workspace])
            return (*result[:3], workspace)
        return result


def _grouped_product(
    first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None = None, *_: object, **__: object
) -> torch.Tensor:
    """Return a tensor of the shape of ``torch.nn.functional.grouped_mm(first, second, offs=offs)``."""
    if first.ndim == second.ndim:
        groups = len(first) if offs is None else len(offs)
        return first.new_empty(groups, first.shape[-2], second.shape[-1])
    return first.new_empty(first.shape[-2], second.shape[-1])


class RealParameterError(Exception):
    """A real parameter among fake tensors: its gradient would be written to it."""


def _refuse_real(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _refuse_real(value)
        # By the very type, for a fake parameter passes for an instance of it.
        elif type(value) is nn.Parameter and value.requires_grad:
            raise RealParameterError


def _one(dtype: torch.dtype) -> bool | int | float | complex:
    """Return 1 as a number of this type."""
    if dtype.is_complex:
        return 1 + 0j
    return dtype is torch.bool or (1.0 if dtype.is_floating_point else 1)


class Fakes:
    """Makes fake tensors of real ones: of the same shape and type, and sharing memory where these share it."""

    def __init__(self) -> None:
        # What is made of no tensor, such as torch.arange in a forward, is fake within the mode; what was overlooked and
        # is real becomes so when it is used.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the address of the real one's
        self._kept: list[torch.UntypedStorage] = []  # the real ones, so that no other gets the address

    def within(self) -> AbstractContextManager[Any]:
        """Return a context in which operations make fake tensors."""
        return cast("AbstractContextManager[Any]", self._mode)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor in the place of one that may lie anywhere, on the meta device too."""
        # Others are made of several tensors, which PyTorch's own converter knows.
        is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not is_plain or is_traceable_wrapper_subclass(tensor):
            return cast("torch.Tensor", self._mode.from_tensor(tensor))
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._kept.append(storage)
            self._storages[key] = torch.UntypedStorage(storage.nbytes(), device="meta")
        # A view of the same storage, wherever the real one is a view of its own.
        bare = torch.empty(0, dtype=tensor.dtype, device="meta")
        bare.set_(self._storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
        fake: torch.Tensor = FakeTensor(self._mode, bare, _CPU)
        if not isinstance(tensor, nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        made = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        # By marks that models put on parameters, functions that make optimizers sort them into groups.
        if not isinstance(tensor, FakeTensor):
            vars(made).update({name: value for name, value in vars(tensor).items() if name not in vars(made)})
        return made


def asked_for(error: BaseException) -> str | None:
    """Return the operation that needs values and was called on fake tensors; None where an error is another one."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException | UnsupportedOperatorException):
        return str(error.func)
    if isinstance(error, UnsupportedFakeTensorException):
        return str(error.reason)
    # Untyped, for it is raised before any operation is dispatched.
    if isinstance(error, RuntimeError | NotImplementedError | TypeError) and _OF_VALUES.search(str(error)):
        return str(error).partition("\n")[0]
    return None
