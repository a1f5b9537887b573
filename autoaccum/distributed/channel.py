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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, _set_pg_timeout
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.distributed.launcher import begin_group
from autoaccum.errors import RankError
from autoaccum.memory import clock

_TO_COME = datetime.timedelta(minutes=10)
"""How long processes may begin apart, as torchrun's agents may."""
_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for another that is there, such as one that validates; one that is lost is seen much sooner."""
_SLICE = datetime.timedelta(milliseconds=50)
"""How long one is waited for before anything else is looked at."""
_LENGTH = struct.Struct("!Q")
"""Header of a message: its length in bytes."""
_TOLD = 2**12
"""Bytes of an exchange, padded; a longer message takes a second one, of its length, on all ranks."""
_LOST = "autoaccum/lost"
"""Where in the store it says which rank has failed, and why."""
_EVERY = 0.5
"""Seconds after which whoever waits looks there."""
_GRACE = 1.0
"""Seconds for what a rank that is lost has sent before to arrive."""
_GRACE_WITHOUT_STORE = 5.0
"""The same where the store is gone: whoever held it may have come to its end, and others need nothing more of it."""


class Channel:
    """The collectives of one launcher's processes, as one of them takes part in them."""

    def __init__(self, device: torch.device) -> None:
        """Join the processes that were started together, which is waited for.

        Raises:
            RankError: not all of them have come.
        """
        self._open: list[Any] = []  # collectives that were begun and have not ended
        self._is_own = not dist.is_initialized()
        atexit.register(self._leave)
        try:
            if self._is_own:
                own = _own_backend(device)
                begin_group("gloo" if own is None else f"cpu:gloo,{device.type}:{own}", _TO_COME)
            # Of its own, for what is said here must not get between collectives of the user's.
            self._group = dist.new_group(backend="gloo", timeout=_TO_COME)
            # Sums may have begun on some ranks when another tells that it has failed: it must not be taken for a sum.
            self._sums = dist.new_group(backend="gloo", timeout=_TO_COME)
        except Exception as error:
            if not _is_lost(error):
                raise
            raise RankError(None, f"not all ranks have met: {_first_line(error)}") from error
        for group in (self._group, self._sums):
            _set_pg_timeout(_PATIENCE, group)
        self._store = _get_process_group_store(self._group)
        self._has_store = True
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

    def call(self, reason: str) -> None:
        """Tell those that wait for this rank, in whatever, that it has failed."""
        self._tell(f"{self.rank} {reason}")

    def _tell(self, said: str) -> None:
        with suppress(RuntimeError):  # of a store that is gone: whoever held it has ended, which is seen as well
            self._store.compare_set(_LOST, "", said)  # the first stands: others may have ended because of it

    def heard(self) -> RankError | None:
        """Return the error of the rank that has said that it has failed, or that was found to have ended."""
        try:
            if not self._store.check([_LOST]):
                return None
            rank, _, reason = self._store.get(_LOST).decode().partition(" ")
            return RankError(int(rank) if rank else None, reason)
        except RuntimeError:
            self._has_store = False
            return RankError(None, "the store is gone, which rank 0 or its launcher held")

    def gone(self, reason: str) -> RankError:
        """Return the error for a collective that another rank has broken off, and tell it to those that wait elsewhere.

        A rank that fails by itself has said so before its connections are closed; of one that was killed nobody knows
        which it was.
        """
        found = self.heard()
        if found is None or not self._has_store:
            found = RankError(None, reason)
            self._tell(f" {reason}")
        return found

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
                raise self.gone(_first_line(error)) from error
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
        looked_at, until, lost = started, 0.0, None
        while not has_ended():
            now = clock.now()
            if lost is None and now - looked_at > _EVERY:
                looked_at, lost = now, self.heard()
                # What the rank has sent before may be on its way, so that this one needs no more of it.
                until = now + (_GRACE if self._has_store else _GRACE_WITHOUT_STORE)
            if lost is not None and now > until:
                raise lost

    def _leave(self) -> None:
        """End with the process."""
        # PyTorch waits for its collectives when it ends, and one that was left may need a rank that does not answer.
        if not all(work.is_completed() for work in self._open):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(hasattr(sys, "last_value"))  # as of an error that nobody has caught
        # Not a group of the user's own, which others may be in as yet.
        if self._is_own and dist.is_initialized():
            dist.destroy_process_group()


def _own_backend(device: torch.device) -> str | None:
    """Return the backend that devices of a kind have for themselves; None where there is none in this PyTorch."""
    # Asked in this way, for of a kind that PyTorch does not know itself there is an error else.
    own: str | None = dist.Backend.default_device_backend_map.get(device.type)
    return None if own in (None, "gloo") or not dist.is_backend_available(own) else own


def _is_lost(error: BaseException) -> bool:
    """Return whether an error is what gloo, NCCL, a store or a connection raises of a rank that is lost."""
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, RankError)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


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
