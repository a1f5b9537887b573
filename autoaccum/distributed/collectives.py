"""The collectives of a sharded model: noted as a micro-batch launches them, so that who fails can make up for them.

A model sharded by FSDP2 gathers the parameters of a unit before it is used, and sums and scatters its gradient after.
Each rank has to launch the same ones in the same order: one that leaves a backward in its midst lets the others wait
for ever. So what a micro-batch launches is noted once; a rank that fails later on launches what is left of it, with
memory that was taken while it was noted, and nobody waits. What the others got of it is thrown away with the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoaccum.distributed.channel import Channel, undisturbed
from autoaccum.distributed.launcher import backends
from autoaccum.errors import RankError
from autoaccum.memory.oom import is_out_of_memory

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


class _Scattered:
    """A scatter that runs: a sum, of which this rank takes its part at the end."""

    def __init__(self, taken: torch.Tensor, given: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
        self._taken, self._summed, self._place = taken, given.clone(), dist.get_rank(group)
        self._sum = dist.all_reduce(self._summed, op=op, group=group, async_op=True)

    def wait(self, *timeout: Any) -> None:
        """Wait for it, for so long at most."""
        self._sum.wait(*timeout)
        self._taken.copy_(self._summed.view(-1, *self._taken.shape)[self._place])

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        return bool(self._sum.is_completed())


def scatter(taken: torch.Tensor, given: torch.Tensor, *, op: Any, group: dist.ProcessGroup, is_async: bool) -> Any:
    """Begin to sum what each rank gives, and to scatter it; return what waits for it where that is asked for."""
    # Gloo does the same by itself, but its own can be waited for for ever alone.
    if is_async and given.is_cpu and "gloo" in backends(group, "cpu"):
        return _Scattered(taken, given, op, group)
    return dist.reduce_scatter_single(taken, given, op=op, group=group, async_op=is_async)


class Collectives:
    """What the units of a model launch, in its order, over a micro-batch."""

    def __init__(self, channel: Channel) -> None:
        """Begin with nothing noted; ``channel`` is that of this rank, which hears of those that are lost."""
        self._channel = channel
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

    def launch(self, call: Call, collective: Callable[[bool], Any], *, is_async: bool = False) -> Any:
        """Launch a collective and note it; return what it returns.

        Args:
            call: what is noted.
            collective: launches it; of True it returns at once what waits for it.
            is_async: whether that is asked for.

        Raises:
            RankError: memory ran out in it, so that nobody can tell who has taken part; or another rank is gone.
        """
        self._reserve(call)
        self._begun = call
        try:
            # In one step with the noting of it, where nothing that looks at operations may raise in between.
            with undisturbed():
                found = self._run(call, collective, is_async)
        except RankError:
            raise
        except RuntimeError as error:  # of gloo and NCCL alike
            reason = str(error).splitlines()[0]
            if is_out_of_memory(error):
                raise self._lost(f"memory ran out in the {call.kind} of a unit: {reason}") from error
            raise self._channel.gone(reason) from error
        self._note(call)
        return found

    def _run(self, call: Call, collective: Callable[[bool], Any], is_async: bool) -> Any:
        if call.device.type != "cpu":
            return collective(is_async)
        # On the host PyTorch would wait for it in C++, where nobody hears of a rank that is lost.
        work = collective(True)
        if work is not None:  # of a group that this rank is in
            self._channel.wait(work)
        return None

    @contextmanager
    def _waiting_here(self, call: Call) -> Iterator[None]:
        """Let the sum that FSDP2 launches itself be waited for as all others are."""
        sums = dist.all_reduce

        def waited(*args: Any, **options: Any) -> Any:
            return self._run(call, lambda is_async: sums(*args, **{**options, "async_op": is_async}), False)

        dist.all_reduce = waited
        try:
            yield
        finally:
            dist.all_reduce = sums

    def await_sum(self, call: Call) -> None:
        """Note that the sum over the copies of a model comes next, which is launched where nobody sees it.

        Until ``summed`` is called no mode that looks at operations can come in between.
        """
        self._reserve(call)
        self._aside.enter_context(undisturbed())
        self._aside.enter_context(self._waiting_here(call))
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
                except RankError:
                    raise
                except RuntimeError as error:
                    raise self._channel.gone(str(error).splitlines()[0]) from error

    def _lost(self, what: str) -> RankError:
        """Return the error of a rank that leaves the others in what it cannot make up for."""
        return RankError(self._channel.rank, f"{what}, and what the others wait for cannot be told")

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

        def launch(is_async: bool) -> Any:
            if call.kind == "all_gather":
                return dist.all_gather_single(taken, given, group=call.group, async_op=is_async)
            if call.kind == "reduce_scatter":
                return scatter(taken, given, op=dist.ReduceOp.SUM, group=call.group, is_async=is_async)
            return dist.all_reduce(given, group=call.group, async_op=is_async)

        self._run(call, launch, False)


class _Of:
    """What a unit calls to make its collectives: the interface of FSDP2's ``Comm``."""

    def __init__(self, collectives: Collectives, unit: int) -> None:
        self._collectives = collectives
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the memory of a collective, as FSDP2 takes it by itself."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _call(self, kind: str, given: torch.Tensor, taken: torch.Tensor, group: dist.ProcessGroup) -> Call:
        return Call(kind, self._unit, given.numel(), taken.numel(), given.dtype, given.device, group)


class Gathers(_Of):
    """Gathers the parameters of a unit."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather what each rank gives into what each gets."""
        return self._collectives.launch(
            self._call("all_gather", input_tensor, output_tensor, group),
            lambda is_async: dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=is_async),
            is_async=async_op,
        )


class Scatters(_Of):
    """Sums the gradient of a unit, and scatters it."""

    def __init__(self, collectives: Collectives, unit: int, copies: dist.ProcessGroup | None) -> None:
        """Set up.

        Args:
            collectives: what notes them.
            unit: which one it is.
            copies: the ranks that hold the same part of copies of the model, over which FSDP2 itself sums next.
        """
        super().__init__(collectives, unit)
        self._copies = copies

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum what each rank gives, and scatter it."""
        found = self._collectives.launch(
            self._call("reduce_scatter", input_tensor, output_tensor, group),
            lambda is_async: scatter(output_tensor, input_tensor, op=op, group=group, is_async=is_async),
            is_async=async_op,
        )
        if self._copies is not None:
            self._collectives.await_sum(self._call("all_reduce", output_tensor, output_tensor, self._copies))
        return found

    def summed(self, _: torch.Tensor) -> None:
        """Hear that FSDP2 has summed over the copies."""
        self._collectives.summed()
