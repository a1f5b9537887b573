"""The collectives of a sharded model: noted as a micro-batch launches them, so that who fails can make up for them.

A model sharded by FSDP2 gathers the parameters of a unit before it is used, and sums and scatters its gradient after.
Each rank has to launch the same ones in the same order: one that leaves a backward in its midst lets the others wait
for ever. So what a micro-batch launches is noted once; a rank that fails later on launches what is left of it, with
memory that was taken while it was noted, and nobody waits. What the others got of it is thrown away with the window.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoaccum.errors import RankError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.ranks.channel import undisturbed

_ALIGNMENT = 16
"""Bytes at whose multiples a buffer may be read as numbers of any type."""


MICRO_BATCH = "a micro-batch"
"""The kind of what ranks run together in training: a forward and a backward."""


class Call(NamedTuple):
    """A collective as a rank has launched it: what any rank has to repeat so that others find it."""

    kind: str
    """What it does: ``all_gather``, ``reduce_scatter`` or ``all_reduce``."""
    unit: int
    """Which of the model's units it is for, in the order of its modules."""
    given: int
    """Numbers that each rank gives."""
    taken: int
    """Numbers that each rank gets."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    """The ranks that take part."""

    @property
    def middle(self) -> int:
        """Return where, in the memory to launch it on nothing of value, that begins which it gets: bytes."""
        return -(-self.given * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Return the bytes of that memory."""
        return self.middle + self.taken * self.dtype.itemsize


class Collectives:
    """What the units of a model launch, in its order, over a micro-batch."""

    def __init__(self, rank: int) -> None:
        """Begin with nothing noted; ``rank`` is the number of this one."""
        self._rank = rank
        self.launched: list[Call] = []
        """Those of the micro-batch so far."""
        # Those of whole micro-batches that all ranks have run, by their kinds; and the kind of the one that runs.
        self._known: dict[str, list[tuple[Call, ...]]] = {}
        self._kind = MICRO_BATCH
        self._is_on = False  # whether they are noted: nobody makes up for what is launched outside of a micro-batch
        # A rank that has begun a collective, and not ended it, cannot tell whether others find it there.
        self._begun: Call | None = None
        self._scratch: dict[torch.device, torch.Tensor] = {}  # bytes, to launch what is left with
        self._aside = ExitStack()  # what is held between a scatter and the sum over copies of the model

    @property
    def are_known(self) -> bool:
        """Return whether a whole micro-batch was noted."""
        return bool(self._known.get(MICRO_BATCH))

    def begin(self, kind: str = MICRO_BATCH) -> None:
        """Begin a micro-batch, or another kind of what all ranks run together, such as a forward alone."""
        self.launched.clear()
        self._kind = kind
        self._is_on = True

    def launch(self, call: Call, collective: Callable[[], Any]) -> Any:
        """Launch a collective and note it; return what it returns.

        Raises:
            RankError: memory ran out in it, so that nobody can tell who has taken part; or another rank is gone.
        """
        self._reserve(call)
        self._begun = call
        try:
            # In one step with the noting of it, where nothing that looks at operations may raise in between.
            with undisturbed():
                found = collective()
        except RuntimeError as error:  # of gloo and NCCL alike
            reason = str(error).splitlines()[0]
            if is_out_of_memory(error):
                raise self._lost(f"memory ran out in the {call.kind} of a unit: {reason}") from error
            raise RankError(None, reason) from error
        self._note(call)
        return found

    def await_sum(self, call: Call) -> None:
        """Note that the sum over the copies of a model comes next, which is launched where nobody sees it.

        Until ``summed`` is called no mode that looks at operations can come in between.
        """
        self._reserve(call)
        self._aside.enter_context(undisturbed())
        self._begun = call

    def summed(self) -> None:
        """Note that the sum was launched."""
        if self._begun is not None:
            self._note(self._begun)
        self._aside.close()

    def _note(self, call: Call) -> None:
        if self._is_on:
            self.launched.append(call)
        self._begun = None

    def keep(self) -> None:
        """Keep what the micro-batch has launched: all ranks have come to its end."""
        self._is_on = False
        sequence, known = tuple(self.launched), self._known.setdefault(self._kind, [])
        if sequence not in known:
            known.append(sequence)

    def drain(self) -> None:
        """Launch what is left of the micro-batch, on nothing of value: others are in it, or will be.

        Raises:
            RankError: what is left is not known; or another rank is gone.
        """
        self._aside.close()
        self._is_on = False
        if self._begun is not None:
            raise self._lost(f"it has left the {self._begun.kind} of a unit in its midst")
        done = tuple(self.launched)
        # A forward alone begins as a micro-batch does: what comes next is told by its kind.
        known_ones = self._known.get(self._kind, [])
        left = {known[len(done) :] for known in known_ones if known[: len(done)] == done}
        # Of two kinds of micro-batches that begin alike it may be either: to guess could hang everybody.
        if len(left) != 1:
            raise self._lost("it has left a micro-batch of a kind that has not come to its end on all ranks before")
        with undisturbed(), torch.no_grad():
            for call in left.pop():
                try:
                    self._make_up(call)
                except RuntimeError as error:
                    raise RankError(None, str(error).splitlines()[0]) from error

    def _lost(self, what: str) -> RankError:
        """Return the error of a rank that leaves the others in what it cannot make up for."""
        return RankError(self._rank, f"{what}, and what the others wait for cannot be told")

    def _reserve(self, call: Call) -> None:
        """Take the memory that it would take to launch this on nothing of value."""
        there = self._scratch.get(call.device)
        if there is None or there.numel() < call.nbytes:
            self._scratch.pop(call.device, None)  # before the larger one is taken
            self._scratch[call.device] = torch.zeros(call.nbytes, dtype=torch.uint8, device=call.device)

    def _make_up(self, call: Call) -> None:
        scratch = self._scratch[call.device]
        given = scratch[: call.given * call.dtype.itemsize].view(call.dtype)
        taken = scratch[call.middle : call.nbytes].view(call.dtype)
        if call.kind == "all_gather":
            dist.all_gather_single(taken, given, group=call.group)
        elif call.kind == "reduce_scatter":
            dist.reduce_scatter_single(taken, given, group=call.group)
        else:
            dist.all_reduce(given, group=call.group)
