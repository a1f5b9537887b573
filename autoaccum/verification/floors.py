"""Finds how far right gradients of 32 bits may be apart on a device, by its own kernels and not by its name.

A device may multiply 32 bits as fewer (TF32, bfloat16), which a measurement does without where it can: it looks for a
wrong weight, not for rounding. What remains is that kernels differ with the size of a batch, as convolutions do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from autoaccum.data import batches
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.memory.oom import attempt, insist
from autoaccum.verification.comparison import MAY_BE_ROUNDING, TOLERANCE, TOLERANCES, error_of
from autoaccum.verification.findings import Cut, Outcome

T = TypeVar("T")
_MARK = "autoaccum"
_TIMES = 40
"""A model has many layers, and its gradient cancels: it may be off by this many times what one kernel is."""


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


@lru_cache
def floor_of(device: torch.device, deterministic: bool) -> float:
    """Return the relative error up to which gradients of 32 bits are the same on a device: 2e-5, or more.

    Args:
        device: asked once a process, by one product of matrices and one convolution of six samples.
        deterministic: whether PyTorch's kernels are to be; other ones are.
    """
    # One of each kind of kernel: cuBLAS and cuDNN choose theirs by shapes, each by rules of its own.
    apart = max(_apart(torch.nn.functional.linear, (6, 96), (64, 96), device), _apart(_conv, *_IMAGES, device))
    return min(max(TOLERANCE, _TIMES * apart), MAY_BE_ROUNDING)


_IMAGES = (6, 8, 12, 12), (16, 8, 3, 3)


def _conv(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(images, weight, padding=1)


def _apart(
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: tuple[int, ...],
    weight: tuple[int, ...],
    device: torch.device,
) -> float:
    """Return how far the gradient of a layer's weight over a batch is off that of its parts, each weighted."""
    batch, parameter = _numbers(inputs, device), _numbers(weight, device).requires_grad_()

    def gradient(sizes: tuple[int, ...]) -> torch.Tensor:
        total = torch.zeros_like(parameter)
        with torch.enable_grad():
            for stop, size in zip(accumulate(sizes), sizes, strict=True):
                part, share = batch[stop - size : stop], size / len(batch)
                (found,) = torch.autograd.grad(layer(part, parameter).square().mean() * share, parameter)
                total += found
        return total

    whole = gradient((len(batch),))
    errors = [error_of([gradient(sizes)], [whole]) for sizes in ((1, 5), (2, 2, 2), (3, 3))]
    return max(math.inf if error is None else error.relative for error in errors)


def _numbers(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Not drawn: no generator is to be moved by this.
    numbers = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu") * 1.7
    return numbers.cos().reshape(shape).to(device, torch.float32)


_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


@contextmanager
def nudged(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Turn the last bit of each number of parameters within it, as far as they are plain tensors of floats."""
    turned: list[torch.Tensor] = []
    try:
        for p in parameters:
            if (bits := _bits_of(p)) is not None:
                bits.bitwise_xor_(1)
                turned.append(bits)
        yield
    finally:
        # In place, for which there is memory: where it fails all the same, none of it has been done.
        for bits in turned:
            insist(partial(bits.bitwise_xor_, 1), "parameters were put back")


def nudge(batch: Any) -> Any:
    """Turn the last bit of each number of the tensors in a batch, but of whole ones: they are flags, or labels."""
    for leaf in batches.flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor) and (bits := _bits_of(leaf)) is not None:
            numbers = leaf.detach()
            numbers = torch.view_as_real(numbers) if numbers.is_complex() else numbers
            bits.bitwise_xor_((numbers.isfinite() & (numbers != numbers.round())).to(bits.dtype))
    return batch


@contextmanager
def widened(parameters: Iterable[torch.Tensor], modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have parameters and the tensors of modules, those of 32 bits that are plain, in 64 bits within it."""
    tensors = [*parameters, *(t for module in modules for t in (*module.parameters(), *module.buffers()))]
    plain = {id(one): one for one in tensors if _is_narrow(one) and type(one) in (torch.Tensor, torch.nn.Parameter)}
    kept = [(one, one.data) for one in plain.values()]
    try:
        for one, data in kept:
            one.data = data.double()
        # An epsilon that goes by the type is that of 32 bits, or a loss that it makes wrong would be right here alone.
        with _Widening(), mock.patch.object(torch, "finfo", _finfo):
            yield
    finally:
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
    return spec.unflatten([leaf.double() if _is_narrow(leaf) else leaf for leaf in leaves])


def _is_narrow(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 and not leaf.is_meta


def _bits_of(tensor: torch.Tensor) -> torch.Tensor | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_BITS[plain.itemsize]) if plain.is_floating_point() and plain.itemsize in _BITS else None


class Widens(Protocol):
    """A measurement, as far as it is needed here."""

    tolerance: float
    parameters: list[torch.Tensor]

    def widened(self) -> AbstractContextManager[None]:
        """Compute in 64 bits within it, the whole as well."""

    def run(self, cuts: Sequence[Cut], hypothesis: Hypothesis | None) -> Outcome:
        """Run the samples in cuts, and compare with the whole."""


def is_right_in_64_bits(measurement: Widens, cuts: Sequence[Cut], hypothesis: Hypothesis | None) -> bool:
    """Return whether cuts of samples have the gradient of the whole where both are computed in 64 bits."""
    if measurement.tolerance < TOLERANCE:  # they are already
        return False

    def asked() -> bool:
        if any(map(_is_listened_to, measurement.parameters)):
            return False
        with measurement.widened():
            return measurement.run(cuts, hypothesis).error <= TOLERANCES[torch.float64]

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
