"""Collectives that end: by what they return, or by the error that a rank is gone, or is stopped."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum.errors import RankError
from autoaccum.memory import clock
from autoaccum.ranks.launcher import meet
from autoaccum.ranks.watch import Place, Watch

_PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for another that is there, such as one that validates; one that is lost is seen much sooner."""
_SLICE = datetime.timedelta(milliseconds=50)
"""How long one is waited for before anything else is looked at."""
_GATHERED = 2**18
"""Bytes of all ranks up to which each is sent to all and added up there: gloo's own sum takes twice as long."""
_GRACE = 1.0
"""Seconds for a rank that is lost to be named, and for what it has sent before to arrive."""


class Channel:
    """The collectives of one launcher's processes, as one of them takes part in them."""

    def __init__(self, device: torch.device) -> None:
        """Join the processes that were started together, which is waited for."""
        if not dist.is_initialized():
            own = _own_backend(device)
            store, rank, size = meet()
            backend = "gloo" if own is None else f"cpu:gloo,{device.type}:{own}"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            atexit.register(dist.destroy_process_group)
        # Of its own, for what is said here must not get between collectives of the user's.
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        # Sums may have begun on some ranks when another tells that it has failed, which must not be taken for a sum.
        self._sums = dist.new_group(backend="gloo", timeout=_PATIENCE)
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
        self._open: list[Any] = []  # those that were begun and have not ended
        self._watch = Watch()
        atexit.register(self._leave)

    @property
    def place(self) -> Place:
        """Return where the other ranks' watches find this one."""
        return self._watch.place

    def watch(self, places: list[Place]) -> None:
        """Have ranks that are lost named from now on; ``places`` are those of all."""
        self._watch.begin(self.rank, places)

    def call(self, reason: str) -> None:
        """Tell those that wait for this rank, in whatever, that it has failed."""
        self._watch.call(reason)

    def gather(self, data: bytes, size: int) -> list[memoryview]:
        """Return the first ``size`` bytes of what each rank has passed, and zeros where that was less."""
        own, found = as_tensor(data, size), [torch.empty(size, dtype=torch.uint8) for _ in range(self.size)]
        self.run(size, lambda: dist.all_gather(found, own, group=self._group, async_op=True))
        return [each.numpy().data for each in found]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Put the first rank's values into a tensor on the host."""
        self.run(tensor.nbytes, lambda: dist.broadcast(tensor, 0, group=self._group, async_op=True))

    # Begun and waited for by themselves, so that a backward goes on in between.
    def begin_sum(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to add up what all ranks have in a buffer, in place; return what waits for it."""
        speaks = buffer.is_cpu or _own_backend(buffer.device) == "nccl"
        # Of a device that no backend speaks to it goes through the host.
        sent = buffer if speaks else buffer.to("cpu")
        if sent.is_cpu and sent.nbytes * self.size <= _GATHERED:
            of_all = [torch.empty_like(sent) for _ in range(self.size)]
            work = self._begin(sent.nbytes, lambda: dist.all_gather(of_all, sent, group=self._sums, async_op=True))
        else:
            of_all, group = [], self._sums if sent.is_cpu else None
            work = self._begin(sent.nbytes, lambda: dist.all_reduce(sent, group=group, async_op=True))

        def end() -> None:
            self._end(work, waits=sent.is_cpu)
            if of_all:
                sent.copy_(of_all[0])
            for other in of_all[1:]:  # in one order on all ranks
                sent.add_(other)
            if sent is not buffer:
                buffer.copy_(sent)

        return end

    def run(self, num_bytes: int, launch: Callable[[], Any]) -> None:
        """Run a collective, to which this rank gives so many bytes.

        Raises:
            RankError: another rank is gone, or is stopped.
        """
        self._end(self._begin(num_bytes, launch))

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
                self._wait_for(work, started, waits=waits)
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
            if isinstance(error, RuntimeError) and not isinstance(error, RankError):  # of gloo and NCCL alike
                raise self._named(str(error).splitlines()[0]) from error
            raise

    def _wait_for(self, work: Any, started: float, *, waits: bool) -> None:
        """Wait until a collective has ended, well or not.

        Args:
            work: the collective.
            started: when it was begun to be waited for.
            waits: whether it can be waited for for a while, or else is asked.

        Raises:
            RankError: a rank is lost without which it does not end.
        """
        # Again and again: while a thread waits in PyTorch, no signal reaches Python, nor does a rank's loss.
        lost_for = 0.0
        while not _has_ended(work, waits=waits):
            waited = clock.now() - started
            # What the rank has sent before may be on its way, so that this one needs no more of it.
            if waited > _GRACE and (lost := self._watch.lost) is not None:
                lost_for = lost_for or waited
                if waited - lost_for > _GRACE:
                    raise RankError(*lost)

    def _named(self, reason: str) -> RankError:
        """Return the error for a collective that was broken off, with the rank that is lost, if that is soon known."""
        until = clock.now() + 2 * _GRACE
        while self._watch.lost is None and clock.now() < until:
            clock.sleep(0.05)
        return RankError(*(self._watch.lost or (None, reason)))

    def _leave(self) -> None:
        """End with the process."""
        self._watch.close()
        # PyTorch waits for its collectives when it ends, and one that was left may need a rank that is stopped.
        if not all(work.is_completed() for work in self._open):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(hasattr(sys, "last_value"))  # as of an error that nobody has caught


def _own_backend(device: torch.device) -> str | None:
    """Return the backend that devices of a kind have for themselves; None where there is none in this PyTorch."""
    # Asked in this way, for of a kind that PyTorch does not know itself there is an error else.
    own: str | None = dist.Backend.default_device_backend_map.get(device.type)
    return None if own in (None, "gloo") or not dist.is_backend_available(own) else own


def _has_ended(work: Any, *, waits: bool) -> bool:
    """Wait for a collective, but not for long; return whether it has ended, well or not."""
    if waits:
        with suppress(RuntimeError):  # its time has passed; or it has failed, which is raised when it is read
            work.wait(_SLICE)
    elif not work.is_completed():  # NCCL's hold up the stream, and are aborted when their time has passed
        clock.sleep(1e-4)
    return bool(work.is_completed())


def undisturbed() -> AbstractContextManager[None]:
    """Return a context in which no mode of whoever looks at operations, or makes them fail, comes between ranks."""
    return _disable_current_modes()


def as_tensor(data: bytes, size: int) -> torch.Tensor:
    """Return the first ``size`` bytes of some data, as what collectives take; zeros where there are fewer."""
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
