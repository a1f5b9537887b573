"""Collectives that end: by what they return, or by the error that a rank is gone."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.distributed.launcher import PATIENCE, meet
from autoaccum.distributed.watch import Place, Watch
from autoaccum.errors import RankError
from autoaccum.memory import clock

_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for another that is there, such as one that validates; one that is lost is seen much sooner."""
_SLICE = datetime.timedelta(milliseconds=50)
"""How long one is waited for before anything else is looked at."""
_LENGTH = struct.Struct("!Q")
"""Header of a message: its length in bytes."""
_TOLD = 2**12
"""Bytes of an exchange, padded; a longer message takes a second one, of its length, on all ranks."""
_GRACE = 1.0
"""Seconds for a rank that is lost to be named, and for what it has sent before to arrive."""


class Channel:
    """The collectives of one launcher's processes, as one of them takes part in them."""

    def __init__(self, device: torch.device) -> None:
        """Join the processes that were started together, which is waited for."""
        self._watch = Watch()
        self._is_open = False  # whether a process group was begun for it
        self._joining: Thread | None = None
        self._open: list[Any] = []  # collectives that were begun and have not ended
        atexit.register(self._leave)
        self._join(device)
        self.rank: int = dist.get_rank()
        """The number of this one, from 0 on."""
        self.size: int = dist.get_world_size()
        """How many there are."""
        self.waited_seconds = 0.0
        """How long this rank was in collectives, most of it waiting for others."""
        self.num_collectives = 0
        """How many it has begun."""
        self.num_bytes = 0
        """Bytes that it has given to them."""
        self.is_over = False
        """Whether one of them has failed, after which nothing can be told any more."""

    def _join(self, device: torch.device) -> None:
        """Join the other processes, unless one of those that have come is lost.

        Raises:
            RankError: one is.
        """
        self._until = clock.now() + PATIENCE
        failures: list[BaseException] = []

        def join() -> None:
            try:
                self._make_groups(device)
            except BaseException as error:
                failures.append(error)

        # In a thread, for PyTorch waits in C++ for those that are not there, and hears of no signal and no rank's loss.
        self._joining = Thread(target=join, name="autoaccum-join", daemon=True)
        self._joining.start()
        while self._joining.is_alive():
            self._joining.join(_SLICE.total_seconds())
            if self._watch.lost is not None and self._joining.is_alive():
                # That thread tells it to those that come just now.
                self._joining.join(2 * _GRACE)
                if self._joining.is_alive():
                    raise RankError(*self._watch.lost)
        if failures:
            error = failures[0]
            if _is_lost(error):  # of the store, of gloo, of a connection
                raise self.named(str(error).splitlines()[0]) from error
            raise error

    def _make_groups(self, device: torch.device) -> None:
        if not dist.is_initialized():
            own = _own_backend(device)
            store, rank, size = meet(self._watch, self._pause)
            backend = "gloo" if own is None else f"cpu:gloo,{device.type}:{own}"
            self._is_open = True
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        # Of its own, for what is said here must not get between collectives of the user's.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        # Sums may have begun on some ranks when another tells that it has failed, which must not be taken for a sum.
        self._sums = dist.new_group(backend="gloo", timeout=_PATIENCE)
        if not self._watch.has_begun:  # by a group of the user's own: from here on nobody waits for one that is lost
            self._watch.begin(dist.get_rank(), self._told(self.place))

    def _told(self, own: Any) -> list[Any]:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found

    def _pause(self, missing: int) -> None:
        """Wait a moment for a rank that has not come.

        Raises:
            RankError: that one has not come for long.
        """
        if clock.now() > self._until:
            raise RankError(missing, f"it has not come within {PATIENCE:.0f} seconds")
        clock.sleep(0.01)

    @property
    def place(self) -> Place:
        """Return where the other ranks' watches find this one."""
        return self._watch.place

    def call(self, reason: str) -> None:
        """Tell those that wait for this rank, in whatever, that it has failed."""
        self._watch.call(reason)

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each rank has passed.

        Raises:
            RankError: another rank is gone.
        """
        told = _LENGTH.pack(len(data)) + data
        found = self._all_gathered(told, _TOLD)
        lengths = [_LENGTH.size + _LENGTH.unpack_from(each)[0] for each in found]
        if max(lengths) > _TOLD:  # as all of them have heard
            found = self._all_gathered(told, max(lengths))
        return [each[_LENGTH.size : length] for each, length in zip(found, lengths, strict=True)]

    def _all_gathered(self, told: bytes, size: int) -> list[bytes]:
        """Return the first ``size`` bytes of each rank's message."""
        own = as_tensor(told, size)
        found = list(torch.empty(self.size, size, dtype=own.dtype, device="cpu"))
        self._end(self._begin(size, lambda: dist.all_gather(found, own, group=self._group, async_op=True)))
        return [each.numpy().tobytes() for each in found]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Put the first rank's values into a tensor on the host.

        Raises:
            RankError: another rank is gone.
        """
        self._end(self._begin(tensor.nbytes, lambda: dist.broadcast(tensor, 0, group=self._group, async_op=True)))

    # Begun and waited for by themselves, so that a backward goes on in between.
    def begin_sum(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to add up what all ranks have in a buffer, in place; return what waits for it."""
        speaks = buffer.is_cpu or _own_backend(buffer.device) == "nccl"
        # Of a device that no backend speaks to it goes through the host.
        sent = buffer if speaks else buffer.to("cpu")
        group = self._sums if sent.is_cpu else None
        work = self._begin(sent.nbytes, lambda: dist.all_reduce(sent, group=group, async_op=True))

        def end() -> None:
            self._end(work, waits=sent.is_cpu)
            if sent is not buffer:
                buffer.copy_(sent)

        return end

    def wait(self, work: Any) -> None:
        """Wait for a collective on CPU tensors that other code, such as FSDP2, has launched.

        Raises:
            RankError: a rank is lost without which it does not end.
        """
        self._open.append(work)
        started = clock.now()
        try:
            self._wait_for(lambda: _has_ended(work), started)
            self._open.remove(work)
            work.wait()
        finally:
            self.waited_seconds += clock.now() - started

    def _begin(self, num_bytes: int, launch: Callable[[], Any]) -> Any:
        # Counted for whoever wants to know what a window costs.
        self.num_collectives += 1
        self.num_bytes += num_bytes
        with self._failing():
            work = launch()
            self._open.append(work)
        return work

    def _end(self, work: Any, *, waits: bool = True) -> None:
        started = clock.now()
        try:
            with self._failing():
                self._wait_for(lambda: _has_ended(work, waits=waits), started)
                self._open.remove(work)
                work.wait()
        finally:
            self.waited_seconds += clock.now() - started

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # By Ctrl-C, say, this rank has left what others are in, and can take part in nothing else.
            self.is_over = True
            if _is_lost(error):
                raise self.named(str(error).splitlines()[0]) from error
            raise

    def _wait_for(self, has_ended: Callable[[], bool], started: float) -> None:
        """Wait until a collective has ended, well or not.

        Args:
            has_ended: waits for it for a moment, and returns whether it has.
            started: when it was begun to be waited for.

        Raises:
            RankError: a rank is lost without which it does not end.
        """
        # Again and again: while a thread waits in PyTorch, no signal reaches Python, nor does a rank's loss.
        lost_for = 0.0
        while not has_ended():
            waited = clock.now() - started
            # What the rank has sent before may be on its way, so that this one needs no more of it.
            if waited > _GRACE and (lost := self._watch.lost) is not None:
                lost_for = lost_for or waited
                if waited - lost_for > _GRACE:
                    raise RankError(*lost)

    def named(self, reason: str) -> RankError:
        """Return the error for a collective that was broken off, with the rank that is lost, if that is soon known."""
        until = clock.now() + 2 * _GRACE
        while self._watch.lost is None and clock.now() < until:
            clock.sleep(0.05)
        return RankError(*(self._watch.lost or (None, reason)))

    def _leave(self) -> None:
        """End with the process."""
        self._watch.close()
        is_joining = self._joining is not None and self._joining.is_alive()
        # PyTorch waits for its collectives when it ends, and one that was left may need a rank that does not answer.
        if is_joining or not all(work.is_completed() for work in self._open):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(hasattr(sys, "last_value"))  # as of an error that nobody has caught
        # Not a group of the user's own, which others may be in as yet.
        if self._is_open and dist.is_initialized():
            dist.destroy_process_group()


def _own_backend(device: torch.device) -> str | None:
    """Return the backend that devices of a kind have for themselves; None where there is none in this PyTorch."""
    # Asked in this way, for of a kind that PyTorch does not know itself there is an error else.
    own: str | None = dist.Backend.default_device_backend_map.get(device.type)
    return None if own in (None, "gloo") or not dist.is_backend_available(own) else own


def _is_lost(error: BaseException) -> bool:
    """Return whether an error is what gloo, NCCL, a store or a connection raises of a rank that is lost."""
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, RankError)


def _has_ended(work: Any, *, waits: bool = True) -> bool:
    """Wait for a collective, but not for long; return whether it has ended, well or not.

    Args:
        work: the collective.
        waits: whether it can be waited for for a while, or else is asked.
    """
    if waits:
        with suppress(RuntimeError):  # its time has passed; or it has failed, which is raised when it is read
            work.wait(_SLICE)
            return True
    elif not work.is_completed():  # NCCL's hold up the stream, and are aborted when their time has passed
        clock.sleep(1e-4)
    return bool(work.is_completed())


def undisturbed() -> AbstractContextManager[None]:
    """Return a context in which no mode of whoever looks at operations, or makes them fail, comes between ranks."""
    return _disable_current_modes()


def as_tensor(data: bytes, size: int) -> torch.Tensor:
    """Return the first ``size`` bytes of some data, as what collectives take; zeros where there are fewer."""
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
