"""The processes that train together: how they agree, and how they add up their gradients.

All that ranks tell each other goes through ``exchange``, in which every rank takes part: with what it has to say, or
with the error that has ended it. So there is one order of collectives, whatever happens to any of them, and none waits
for one that has failed. Gradients are added up through a buffer that is there from the beginning; a rank that runs out
of memory on the way goes on with whatever is in it, and says so in the next exchange.
"""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.errors import RankError
from autoaccum.memory import clock

T = TypeVar("T")
_PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for the others; for one that has ended it does not wait."""
_BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are added up at once: those of DistributedDataParallel."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun says to each process."""
_BACKENDS = ("gloo", "nccl")
_joined: Group | None = None


class Group:
    """The ranks of one launcher."""

    def __init__(self, device: torch.device) -> None:
        """Join the processes that were started together, which is waited for."""
        if not dist.is_initialized():
            own = None if device.type == "cpu" else dist.get_default_backend_for_device(device.type)
            has_own = own is not None and own != "gloo" and dist.is_backend_available(own)
            dist.init_process_group(f"cpu:gloo,{device.type}:{own}" if has_own else "gloo")
            atexit.register(_leave)
        # Of its own, for what is said here must not get between collectives of the user's.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank: int = dist.get_rank()
        """The number of this one, from 0 on."""
        self.size: int = dist.get_world_size()
        """How many there are."""
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self.waited_seconds = 0.0
        """How long this rank was in collectives, most of it waiting for others."""
        self._is_over = False  # whether one of them has failed, after which none speaks any more

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes, shows and measures for all."""
        return self.rank == 0

    def exchange(self, told: T) -> list[T]:
        """Tell all ranks something that can be pickled, and return what each of them has told.

        Raises:
            RankError: one of them has failed, or is gone.
        """
        found = self._exchange((None, told))
        for rank, (error, _) in enumerate(found):
            if error is not None:
                self._is_over = True
                raise RankError(rank, error)
        return [value for _, value in found]

    def fail(self, error: BaseException) -> None:
        """Tell all ranks, in the exchange that they are about to make, that this one has ended by an error."""
        # Heard from another rank, or told before: nobody takes part in another exchange.
        if self._is_over:
            return
        self._is_over = True
        with suppress(RankError):  # they are gone, too: the error that is on its way says more
            self._exchange((f"{type(error).__name__}: {error}", None))

    def from_first(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the first rank, which alone calls it."""
        found = [function()] if self.is_first else [None]
        self.exchange(None)  # in which its error would be heard
        # Sent, and not told by all: it may be as large as the model.
        with undisturbed():
            self._heard(lambda: dist.broadcast_object_list(found, 0, group=self._group))
        return found[0]  # type: ignore[return-value]

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the memory through which the gradients of these parameters are added up."""
        # Once, before memory is measured: so it is in every peak, and is there when nothing else is. A model that is
        # smaller than a bucket needs no more than itself.
        wanted: dict[tuple[torch.device, torch.dtype], int] = {}
        for p in parameters:
            place = (p.device, p.dtype)
            wanted[place] = min(wanted.get(place, 0) + p.numel(), max(1, _BUCKET_BYTES // p.element_size()))
        for (device, kind), count in wanted.items():
            there = self._buffers.get((device, kind))
            if there is None or there.numel() < count:
                self._buffers[device, kind] = torch.zeros(count, dtype=kind, device=device)

    @torch.no_grad()
    def add_up(self, parameters: Sequence[torch.Tensor], factor: float) -> None:
        """Replace the gradient of each parameter by the sum over all ranks, each times the rank's factor.

        All ranks have to pass the same parameters; one without a gradient counts as zeros. What goes wrong on this rank
        is raised when all of it is done, so that the others need not wait.
        """
        failure: list[Exception] = []

        def tried(function: Callable[[], None]) -> None:
            # What is left to do for the others is done with whatever is in the buffer.
            if not failure:
                try:
                    function()
                except Exception as error:
                    failure.append(error)

        # Whoever leaves this before its end, by Ctrl-C say, can take part in no exchange: others are in a sum.
        self._is_over = True
        for place, pieces in self._buckets(parameters):
            with undisturbed():
                buffer = self._buffers[place][: sum(length for _, _, length in pieces)]
            tried(lambda buffer=buffer, pieces=pieces: _pack(buffer, pieces, factor))  # type: ignore[misc]
            self._sum(buffer)
            tried(lambda buffer=buffer, pieces=pieces: _unpack(buffer, pieces))  # type: ignore[misc]
        self._is_over = False
        if failure:
            raise failure[0]

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the first rank's values of some tensors to all of them."""
        with torch.no_grad():
            for tensor in tensors:
                value = tensor.detach().to("cpu").contiguous()
                with undisturbed():
                    self._heard(lambda value=value: dist.broadcast(value, 0, group=self._group))  # type: ignore[misc]
                # In place, for modules hold the tensor; the first rank's is what was sent.
                if not self.is_first:
                    tensor.copy_(value)

    def _exchange(self, told: Any) -> list[Any]:
        # On the host, whatever the device: it is some hundred bytes, and no rank may wait for its device to say that it
        # has failed. Two collectives, for sizes differ.
        found: list[Any] = [None] * self.size
        with undisturbed():
            self._heard(lambda: dist.all_gather_object(found, told, group=self._group))
        return found

    def _sum(self, buffer: torch.Tensor) -> None:
        with undisturbed():
            if buffer.is_cpu:
                self._heard(lambda: dist.all_reduce(buffer, group=self._group))
            elif dist.get_default_backend_for_device(buffer.device.type) == "nccl":
                self._heard(lambda: dist.all_reduce(buffer))
            else:  # of a device that no backend speaks to
                on_host = buffer.to("cpu")
                self._heard(lambda: dist.all_reduce(on_host, group=self._group))
                buffer.copy_(on_host)

    def _heard(self, collective: Callable[[], Any]) -> None:
        """Run a collective.

        Raises:
            RankError: another rank is gone.
        """
        started = clock.now()
        try:
            collective()
        except RuntimeError as error:  # of gloo and NCCL alike
            self._is_over = True
            raise RankError(None, str(error).splitlines()[0]) from error
        except BaseException:  # Ctrl-C: this rank has left what others are in, and can take part in nothing else
            self._is_over = True
            raise
        finally:
            self.waited_seconds += clock.now() - started

    def _buckets(self, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[Any, list[tuple[torch.Tensor, int, int]]]]:
        """Yield (where the buffer lies, (parameter, first number, how many) of each part), in an order all ranks have.

        A parameter that is larger than a buffer comes in several parts.
        """
        # By place first, for a buffer holds numbers of one type; within it in the order of the parameters.
        for place, buffer in self._buffers.items():
            pieces: list[tuple[torch.Tensor, int, int]] = []
            room = buffer.numel()
            for p in parameters:
                start = 0
                while (p.device, p.dtype) == place and start < p.numel():
                    length = min(room, p.numel() - start)
                    pieces.append((p, start, length))
                    start, room = start + length, room - length
                    if not room:
                        yield place, pieces
                        pieces, room = [], buffer.numel()
            if pieces:
                yield place, pieces


def undisturbed() -> AbstractContextManager[None]:
    """Return a context in which no mode of whoever looks at operations, or makes them fail, comes between ranks."""
    return _disable_current_modes()


def is_launched() -> bool:
    """Return whether this process is one of several that can find each other: torchrun's, or those of a group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1 and dist.get_backend() in _BACKENDS
    return all(os.environ.get(name) for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


def join(device: torch.device) -> Group | None:
    """Return the group of this process, which is waited for the first time; None where it is alone."""
    global _joined
    if not is_launched():
        return None
    if _joined is None or _joined._is_over:
        _joined = Group(device)
    return _joined


def speaks() -> bool:
    """Return whether this process is the one that shows and writes for all ranks that it has joined."""
    return _joined is None or _joined.is_first


def own_device() -> str | None:
    """Return the accelerator that is this rank's of those of its machine; None where that is not said."""
    local, accelerator = os.environ.get("LOCAL_RANK", ""), torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not local.isdecimal():
        return None
    return f"{accelerator.type}:{int(local) % torch.accelerator.device_count()}"


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(buffer: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, int, int]], factor: float) -> None:
    at = 0
    for p, start, length in pieces:
        part = buffer[at : at + length]
        if p.grad is None:
            part.zero_()
        else:
            part.copy_(p.grad.reshape(-1)[start : start + length])
        at += length
    if factor != 1:
        buffer.mul_(factor)


def _unpack(buffer: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, int, int]]) -> None:
    at = 0
    for p, start, length in pieces:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if not p.grad.is_contiguous():
            p.grad = p.grad.contiguous()
        p.grad.view(-1)[start : start + length].copy_(buffer[at : at + length])
        at += length
