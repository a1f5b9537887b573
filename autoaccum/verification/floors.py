"""Tells rounding from a wrong weight: by whole products of 32 bits, and by 64 bits where those leave a doubt.

A device may multiply 32 bits as fewer (TF32, bfloat16), which a measurement does without where it can. Sums that are
long, or that cancel, round all the same, and kernels differ with the size of a batch; in 64 bits none of that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from autoaccum.data import batches, objects
from autoaccum.memory.oom import attempt
from autoaccum.verification.comparison import TOLERANCES

T = TypeVar("T")
_MARK = "autoaccum"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Have 32 bits multiplied as 32 bits within it, whatever PyTorch's settings, or an autocast around it, allow."""
    casts = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if casts else nullcontext(), _whole_products():
        yield


@contextmanager
def _whole_products() -> Iterator[None]:
    backends: Any = torch.backends
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    places = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    # What inherits from a wider setting shows that one's value; only what is reduced is touched.
    settings = [(place, place.fp32_precision) for place in places]
    if all(value in ("ieee", "none") for _, value in settings):
        yield
        return
    # PyTorch has these settings twice, and some of its code refuses to read either while they contradict each other: so
    # both are set, and both put back, the older ones first.
    products, convolutions = _read(torch.get_float32_matmul_precision), _read(lambda: cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for place, value in settings:
        if value not in ("ieee", "none"):
            place.fp32_precision = "ieee"
    try:
        yield
    finally:
        # Those of a program that has contradicted itself are as they were at first, as far as it could tell.
        torch.set_float32_matmul_precision("highest" if products is None else products)
        cudnn.allow_tf32 = True if convolutions is None else convolutions
        for place, value in settings:
            if place.fp32_precision != value:
                place.fp32_precision = value


def _read(setting: Callable[[], T]) -> T | None:
    """Return one of the older settings; None where a program has contradicted it, so that it cannot be read."""
    try:
        return setting()
    except RuntimeError:
        return None


@contextmanager
def widened(parameters: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have parameters and the tensors of modules, those of 32 bits that are plain, in 64 bits within it."""
    tensors = [*parameters, *(t for module in modules for t in (*module.parameters(), *module.buffers()))]
    plain = {id(one): one for one in tensors if _is_narrow(one) and type(one) in (torch.Tensor, torch.nn.Parameter)}
    kept, of_tables = [(one, one.data) for one in plain.values()], torch.get_default_dtype()
    try:
        for one, data in kept:
            one.data = data.double()
        # Tables that are made without a type, as by torch.full(shape, -1e16), have to hold what is written to them.
        torch.set_default_dtype(torch.float64 if of_tables is torch.float32 else of_tables)
        # An epsilon that goes by the type is that of 32 bits, or a loss that it makes wrong would be right here alone.
        with _Widening(), mock.patch.object(torch, "finfo", _finfo):
            yield
    finally:
        torch.set_default_dtype(of_tables)
        for one, data in kept:
            one.data = data


def _finfo(dtype: torch.dtype | None = None, of: Any = torch.finfo) -> Any:
    return of(torch.float32 if dtype in (None, torch.float64) else dtype)


class _Widening(TorchFunctionMode):
    """Computes with 64 bits where code says 32, and has them meet what else is there of 32, such as class weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide_type(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # What is of a type that is asked for stays that for whoever asks, and tensors stay what they are for most: code
        # writes to them, and only what refuses to compute with both gets copies.
        try:
            return func(*map(_wide_type, args), **kwargs)
        except Exception:
            leaves = batches.flatten((args, kwargs))[0]
            if not {torch.float32, torch.float64} <= {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}:
                raise
        args, kwargs = widen((args, kwargs))
        return func(*map(_wide_type, args), **kwargs)


def _wide_type(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def widen(batch: Any) -> Any:
    """Return a batch with tensors of 32 bits in 64 bits."""
    leaves, spec = batches.flatten(batch)
    return spec.unflatten(
        [objects.mapped(leaf, _wide) if objects.has_samples(leaf) else _wide(leaf) for leaf in leaves]
    )


def _wide(leaf: Any) -> Any:
    return leaf.double() if _is_narrow(leaf) else leaf


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 and not leaf.is_meta


class Widens(Protocol):
    """A measurement, as far as it is needed here."""

    parameters: list[torch.Tensor]

    def widened(self) -> AbstractContextManager[None]:
        """Compute in 64 bits within it, the whole as well."""


def is_right_in_64_bits(measurement: Widens, error_of: Callable[[], float]) -> bool:
    """Return whether what is off in 32 bits is right where the whole and its parts are computed in 64.

    Args:
        measurement: of both.
        error_of: measures the parts once more; returns the relative error.
    """
    if not any(p.dtype is torch.float32 for p in measurement.parameters):  # they are already
        return False

    def asked() -> bool:
        if any(map(_is_listened_to, measurement.parameters)):
            return False
        with measurement.widened():
            return error_of() <= TOLERANCES[torch.float64]

    try:
        return attempt(asked) is True  # where there is no room for it, what 32 bits have shown stands
    except Exception:  # code that is written for 32 bits alone
        return False


def _is_listened_to(p: torch.Tensor) -> bool:
    """Return whether somebody holds what adds to a parameter's gradient, as DDP does: another type makes it another."""
    if not p.requires_grad:
        return False
    # What nobody holds is made anew each time.
    _adder_of(p).metadata[_MARK] = True
    return bool(_adder_of(p).metadata.pop(_MARK, False))


def _adder_of(p: torch.Tensor) -> Any:
    with torch.enable_grad():
        return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
