"""Compares gradients, and tells rounding from a wrong weight.

Where float32 leaves a doubt, the comparison is computed again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from autoaccum.data import batches, objects
from autoaccum.memory.oom import attempt

TOLERANCES = {torch.float64: 1e-6}
"""Relative errors up to which gradients are the same, by the narrowest type of a parameter that has no 16 bits.

Right ones stay below 1e-12. What lies between is a constant of the program's, as in ``/ (mask.sum() + 1e-8)``, which is
too small to matter for any step, and shows the most where few samples have few items."""
OF_STATE = 1e-7
"""The same where forwards move state: it may have come to rest by now, and not stay there."""
TOLERANCE = 2e-5
"""The same of float32, in which right ones stay below 3e-6, and wrong ones above 1e-4."""
MOST_ROUNDING = 0.1
"""The relative error below which 64 bits are asked whether rounding explains it."""
_LEAST_SHARE = 1e-2
"""A tensor's error is relative to its own norm, or to this share of what its norm would be if all entries of the
gradient were alike. A gradient that is 0 but for rounding, as that of a bias before a normalisation, has no digits."""


@dataclass(frozen=True, slots=True)
class Error:
    """How far a gradient is off another one."""

    relative: float
    """The larger of the error of all tensors together and of the worst one; 1 is as large as the gradient itself."""
    tensor: int | None
    """The index of the worst tensor; None where all are the same."""
    of_tensors: tuple[float, ...] = ()
    """The error of each tensor; empty where nothing can be compared."""


def error_of(gradients: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> Error | None:
    """Return how far gradients are off those that are wanted; None where these are 0, which nothing can be told by."""
    rows = []
    for found, right in zip(gradients, wanted, strict=True):
        rows.append(_norms(found, right))
    # One wait for the device.
    device = next((row.device for row in rows if row is not None), None)
    if device is None:
        return None
    zero = torch.zeros(2, dtype=torch.float64, device="cpu")
    numbers = torch.stack([zero if row is None else row.to("cpu", torch.float64) for row in rows]).tolist()
    present = [found if right is None else right for found, right in zip(gradients, wanted, strict=True)]
    sizes = [0 if gradient is None else gradient.numel() for gradient in present]
    total = math.sqrt(sum(right * right for _, right in numbers))
    if not total:
        return None
    if not math.isfinite(total):
        return Error(math.nan, None)
    worst, tensor = 0.0, None
    of_tensors = []
    count = sum(sizes) or 1
    for index, ((off, right), size) in enumerate(zip(numbers, sizes, strict=True)):
        relative = off / max(right, _LEAST_SHARE * total * math.sqrt(size / count)) if off else 0.0
        of_tensors.append(relative)
        if not relative <= worst:
            worst, tensor = relative, index
    whole = math.sqrt(sum(off * off for off, _ in numbers)) / total
    return Error(max(whole, worst) if not math.isnan(worst) else math.nan, tensor, tuple(of_tensors))


def _norms(found: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return (norm of the difference, norm of what is wanted) on the device; None where there is neither gradient."""
    if found is None and right is None:
        return None
    present = right if right is not None else found
    assert present is not None
    wide = torch.promote_types(present.dtype, torch.float32)
    found = None if found is None else _dense(found).to(wide)
    right = None if right is None else _dense(right).to(wide)
    off = found if right is None else (right if found is None else found - right)
    norm = torch.linalg.vector_norm(off)
    return torch.stack([norm, torch.zeros_like(norm) if right is None else torch.linalg.vector_norm(right)]).real


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient.detach()


def loss_tolerance_of(parameters: Sequence[torch.Tensor]) -> float:
    """Return the relative error up to which losses of these parameters are the same, as far as a first look tells.

    Where state converges, as that of a spectral norm does, the loss is off by the square of what its gradient is.
    """
    return 1e-12 if tolerance_of(parameters) < TOLERANCE else 2e-6


def tolerance_of(parameters: Sequence[torch.Tensor]) -> float:
    """Return the relative error up to which gradients of these parameters are the same."""
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    if dtypes and dtypes <= {torch.float64, torch.complex128}:
        return TOLERANCES[torch.float64]
    return TOLERANCE


def any_of(gradient: torch.Tensor) -> bool:
    """Return whether a gradient, a sparse one too, has any number but 0."""
    values = gradient.coalesce()._values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())


def names_of(
    tensors: Sequence[torch.Tensor],
    modules: Sequence[torch.nn.Module],
    other: str = "a parameter of the optimizer alone",
) -> list[str]:
    """Return the names of parameters and buffers, with that of their module where it is not the first.

    Args:
        tensors: these.
        modules: where to look for them.
        other: stands for the name of those that are not found.
    """
    names: dict[int, str] = {}
    for index, module in enumerate(modules):
        for name, one in chain(module.named_parameters(), module.named_buffers()):
            name = name.removeprefix("_orig_mod.")  # of what torch.compile made of it
            names.setdefault(id(one), name if not index else f"{type(module).__name__}.{name}")
    return [names.get(id(one), other) for one in tensors]


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
