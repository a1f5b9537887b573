"""Adds up the gradients of all ranks in buckets: at a window's end, or in lots, as soon as these have come.

Buckets go through a few buffers, which are there from the beginning. All ranks begin the same sums in the same order,
whatever happens to any of them: one that runs out of memory goes on with whatever is in a buffer, and says so in what
is told next. So the order of buckets is one that all have agreed upon, and one that is ready waits for those before it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from autoaccum.distributed.channel import Channel, undisturbed

Compression = Literal["none", "bf16"]
"""What gradients are rounded to on their way between ranks: nothing, or bfloat16 where they have more bits."""
Place = tuple[torch.device, torch.dtype]
"""Where gradients lie, and the type in which they are added up."""
Piece = tuple[torch.Tensor, int, int]
"""A parameter, the first of its numbers, and how many."""
_BUCKET_BYTES = 25 * 2**18
"""Bytes of gradients that are added up at once."""
_LOT_BYTES = 100 * 2**18
"""Bytes of gradients that are there before their sums begin while a backward goes on."""
_LARGE = 8
"""A gradient that fills one in so many parts of a bucket is one of its own, added up where it lies."""
_RING = 4
"""Buckets of one type that may be on their way at once: together 25 MiB."""


@dataclass(slots=True)
class _Bucket:
    place: Place
    number: int  # among those of its place
    pieces: list[Piece] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)  # ids of parameters whose gradients have not come yet

    @property
    def length(self) -> int:
        return sum(length for _, _, length in self.pieces)

    @property
    def size(self) -> int:
        return self.length * self.place[1].itemsize


class Summing:
    """The sums of one rank."""

    def __init__(self, channel: Channel) -> None:
        """Begin without memory: see ``prepare``."""
        self._channel = channel
        self._compression: Compression = "none"
        self._expected: list[torch.Tensor] = []
        self._rings: dict[Place, list[torch.Tensor]] = {}
        self._prepared: list[torch.Tensor] = []
        self._ordered: list[torch.Tensor] = []
        self._all: list[_Bucket] = []  # of these
        self.arrived: list[torch.Tensor]
        """Parameters whose gradients have come in the last backward that was listened to, in their order."""
        self.came_twice: bool
        """Whether one of them came more than once, as it does where a backward runs another one."""
        self.made: list[torch.Tensor]
        """Those that had no gradient here, and were given one for what others had."""
        # A hook may be in a thread of the device's, which does not hear of an error in another one.
        self._lock = threading.RLock()
        self._generation = 0
        self._failure: Exception | None = None
        self._of: dict[int, list[_Bucket]] = {}
        self._begin(())
        self.forget()

    @property
    def rank(self) -> int:
        """Return the number of this rank."""
        return self._channel.rank

    def prepare(self, parameters: Sequence[torch.Tensor], compression: Compression = "none") -> None:
        """Take the memory through which the gradients of these parameters are added up, in that compression."""
        self._compress(compression)
        # Once, before memory is measured: so it is in every peak, and is there when nothing else is. A model that is
        # smaller than a bucket needs no more than itself.
        if _are_same(parameters, self._prepared):
            return
        self._prepared = list(parameters)
        totals: Counter[Place] = Counter()
        for p in parameters:
            totals[p.device, _sent_as(type_of_gradient(p), compression)] += p.numel()
        # Whatever the order in which they come, and so how they are cut: none is longer.
        for place, total in totals.items():
            ring, room = self._rings.setdefault(place, []), _room(place[1])
            length, most = min(total, room), min(_RING, math.ceil(total / room))
            if len(ring) < most or any(there.numel() < length for there in ring):
                ring[:] = [torch.zeros(length, dtype=place[1], device=place[0]) for _ in range(max(most, len(ring)))]

    def expect(self, ordered: Sequence[torch.Tensor], compression: Compression = "none") -> None:
        """Make ready for a window: its sums go in that compression, and those of its last backward in this order."""
        # Several models may be trained by turns, each in a way of its own. A rank that fails before its sums begin goes
        # on with those of the window that it has failed in.
        self._compress(compression)
        self._expected = list(ordered)

    def _compress(self, compression: Compression) -> None:
        if compression != self._compression:
            self._compression = compression
            self._prepared, self._ordered = [], []  # which were cut in another way

    @property
    def is_begun(self) -> bool:
        """Return whether sums were begun that others take part in, and have not ended."""
        return self._begun > 0

    @contextmanager
    def listening(self, ordered: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Begin sums, while a backward runs in this, as soon as the gradients of some buckets are there.

        Args:
            ordered: the parameters that are added up so, in an order that all ranks have.
            others: more of them, whose gradients are only seen to come.
        """
        with self._lock:
            self.forget()
            self._begin(ordered)
            hook = self._hook(self._generation)
        trained = [p for p in (*ordered, *others) if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(hook) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_all(self, ordered: Sequence[torch.Tensor]) -> None:
        """Begin what has not been begun of a window's sums, those of gradients that have not come too."""
        with self._lock:
            self._generation += 1
            if not self._buckets:  # no backward was listened to
                self._begin(ordered)
            while self._begun < len(self._buckets):
                self._begin_next(1.0)

    def end_all(self) -> None:
        """Put the sums that were begun into the gradients; all of a parameter's are there when this returns.

        Raises:
            Exception: what went wrong on this rank, with which it has gone on for the others.
        """
        self._take_all()
        failure = self._failure
        self._begin(())
        if failure is not None:
            raise failure

    def add_up(self, parameters: Sequence[torch.Tensor], factor: float) -> None:
        """Replace the gradient of each parameter by the sum over all ranks, each times the rank's factor.

        All ranks have to pass the same parameters; one without a gradient counts as zeros. What goes wrong on this rank
        is raised when all of it is done, so that the others need not wait.
        """
        with self._lock:
            self._begin(parameters)
            while self._begun < len(self._buckets):
                self._begin_next(factor)
        self.end_all()

    def catch_up(self) -> None:
        """Take part in all sums that others have begun in a window of which this rank has begun none."""
        self.begin_all(self._expected)
        self.drain()

    def drain(self) -> None:
        """Take part in all sums of a window that was begun, for the others; what they give is thrown away."""
        with self._lock:
            self._generation += 1
            if not self.is_begun:
                return
            self._failure = self._failure or RuntimeError("given up")
            while self._begun < len(self._buckets):
                self._begin_next(1.0)
            self._take_all()
            self._begin(())

    def _begin(self, ordered: Sequence[torch.Tensor]) -> None:
        """Begin anew, with none of the sums of these begun."""
        self._generation += 1
        if ordered and not _are_same(ordered, self._ordered):  # they are the same in nearly all windows
            self._ordered, self._all = list(ordered), _cut(ordered, self._compression)
            self._of = {}
            for bucket in self._all:
                for p, _, _ in bucket.pieces:
                    self._of.setdefault(id(p), []).append(bucket)
        self._buckets = self._all if ordered else []
        for bucket in self._buckets:
            bucket.missing = {id(p) for p, _, _ in bucket.pieces}
        self._begun = 0
        self._on_way: dict[tuple[Place, int], tuple[_Bucket, torch.Tensor, Callable[[], None]]] = {}
        self._failure = None

    def forget(self) -> None:
        """Begin an attempt at a window, of which no gradient has come yet."""
        self._buckets = []
        self.arrived, self.came_twice, self.made = [], False, []
        self._seen: set[int] = set()

    def _hook(self, generation: int) -> Callable[[torch.Tensor], None]:
        def arrive(p: torch.Tensor) -> None:
            with self._lock:
                if generation == self._generation:  # else of a backward that was given up
                    self._arrive(p)

        return arrive

    def _arrive(self, p: torch.Tensor) -> None:
        if id(p) in self._seen:
            self.came_twice = True
            return
        self._seen.add(id(p))
        self.arrived.append(p)
        is_any_whole = False
        for bucket in self._of.get(id(p), ()) if self._buckets else ():
            bucket.missing.discard(id(p))
            is_any_whole = is_any_whole or not bucket.missing
        if not is_any_whole:  # as after most gradients
            return
        # In the order that was agreed upon: what is ready behind a bucket that is not has to wait.
        ready, size = self._begun, 0
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            size += self._buckets[ready].size
            ready += 1
        # Sums that go on beside a backward take cores and caches from it, the less so the fewer times they begin.
        if size >= _LOT_BYTES:
            while self._begun < ready:
                self._begin_next(1.0)

    def _begin_next(self, factor: float) -> None:
        bucket = self._buckets[self._begun]
        found: list[torch.Tensor] = []
        # Sums are put there, and not into what else is read of it; but not under one that has begun.
        self._try(lambda: make_own([p for p, start, _ in bucket.pieces if not start]))
        self._try(lambda: found.extend(_lying(bucket, factor)))
        if found:
            slot, buffer = (bucket.place, -1 - bucket.number), found[0]  # no other has this slot
        else:
            ring = self._rings[bucket.place]
            slot = (bucket.place, bucket.number % len(ring))
            if slot in self._on_way:
                self._take(slot)
            with undisturbed():
                buffer = ring[slot[1]][: bucket.length]
            self._try(lambda: _pack(buffer, bucket.pieces, factor))
        # To begin it and to count it are one: whoever goes on for the others has to know how far this has come.
        self._begun += 1
        with undisturbed():
            self._on_way[slot] = bucket, buffer, self._channel.begin_sum(buffer)

    def _take_all(self) -> None:
        for slot in list(self._on_way):
            self._take(slot)

    def _take(self, slot: tuple[Place, int]) -> None:
        """Wait for a sum, and put it into the gradients."""
        bucket, buffer, end = self._on_way.pop(slot)
        with undisturbed():
            end()
        if slot[1] >= 0:
            self._try(lambda: self._unpack(buffer, bucket.pieces))

    def _try(self, function: Callable[[], None]) -> None:
        # What is left to do for the others is done with whatever is in the buffers.
        if self._failure is None:
            try:
                with torch.no_grad():
                    function()
            except Exception as error:
                self._failure = error

    def _unpack(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        at = 0
        for p, start, length in pieces:
            if p.grad is None:
                p.grad = zero_gradient(p)
                self.made.append(p)
            if not p.grad.is_contiguous():
                p.grad = p.grad.contiguous()
            p.grad.view(-1)[start : start + length].copy_(buffer[at : at + length])
            at += length


# By identity, for to compare tensors would compare their values.
def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _pack(buffer: torch.Tensor, pieces: Sequence[Piece], factor: float) -> None:
    at = 0
    for p, start, length in pieces:
        part = buffer[at : at + length]
        if p.grad is None:
            part.zero_()
        else:
            if p.grad.is_sparse:  # which it has never been before, or it would have been left out
                p.grad = p.grad.to_dense()
            part.copy_(p.grad.reshape(-1)[start : start + length])
        at += length
    if factor != 1:
        buffer.mul_(factor)


def _lying(bucket: _Bucket, factor: float) -> list[torch.Tensor]:
    """Return the gradient that a bucket is part of, or all of, where it can be added up in place; else nothing."""
    # Whether it can is each rank's own affair: others, and those that go on after a failure, do so in a buffer.
    (p, start, length), *others = bucket.pieces
    gradient = p.grad
    if others or gradient is None or gradient.is_sparse or gradient.dtype != bucket.place[1]:
        return []
    if not gradient.is_contiguous() or gradient.is_conj() or gradient.is_neg():
        return []
    part = gradient.view(-1)[start : start + length]
    if part.stride(0) != 1:  # as of one number that has lain in a column, of which no bytes are seen
        return []
    if factor != 1:
        part.mul_(factor)
    return [part]


def _sent_as(kind: torch.dtype, compression: Compression) -> torch.dtype:
    """Return the type in which gradients of a type are added up."""
    # bfloat16 has the range of float32, so that nothing has to be scaled. What has 16 bits gains nothing by it.
    is_wide = kind.is_floating_point and kind.itemsize > torch.bfloat16.itemsize
    return torch.bfloat16 if compression == "bf16" and is_wide else kind


def _room(kind: torch.dtype) -> int:
    """Return how many numbers of a type a bucket has at most."""
    return max(1, _BUCKET_BYTES // kind.itemsize)


def _cut(parameters: Sequence[torch.Tensor], compression: Compression = "none") -> list[_Bucket]:
    """Return parameters in buckets of one type each, in the order in which these are full.

    A large parameter shares its buckets with none; one that is larger than a bucket is in several.
    """
    full: list[_Bucket] = []
    open_: dict[Place, _Bucket] = {}
    numbers: Counter[Place] = Counter()

    def opened(place: Place) -> _Bucket:
        numbers[place] += 1
        return _Bucket(place, numbers[place] - 1)

    for p in parameters:
        own, start = type_of_gradient(p), 0
        kind = _sent_as(own, compression)
        place, room = (p.device, kind), _room(kind)
        is_large = kind == own and p.numel() * _LARGE >= room
        while start < p.numel():
            bucket = opened(place) if is_large else open_.get(place) or opened(place)
            length = min(room - bucket.length, p.numel() - start)
            bucket.pieces.append((p, start, length))
            start += length
            if is_large:
                full.append(bucket)
                continue
            open_[place] = bucket
            if bucket.length == room:
                full.append(open_.pop(place))
    return [*full, *open_.values()]


def type_of_gradient(p: torch.Tensor) -> torch.dtype:
    """Return of which type a parameter's gradient is: ``grad_dtype`` came with PyTorch 2.13."""
    return getattr(p, "grad_dtype", None) or p.dtype


def zero_gradient(p: torch.Tensor) -> torch.Tensor:
    """Return a gradient of zeros, of the type that the parameter's are of."""
    return torch.zeros_like(p, dtype=type_of_gradient(p))


@torch.no_grad()
def make_own(parameters: Iterable[torch.Tensor]) -> None:
    """Give each parameter a gradient of its own, whose place nothing else shares.

    Autograd keeps what comes to a parameter first as its gradient, even where that is a view: of ``x + p[None]`` it
    is what ``x`` is yet to be given, and of ``p[None] + q[None]`` the gradient of both, so that what is added to one
    in place, or multiplied by, comes to both.
    """
    for p in parameters:
        gradient = p.grad
        # Those of subclasses, such as sharded ones, lie elsewhere than they say.
        if type(gradient) is torch.Tensor and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            # It counts the gradient itself, and the object that was just made for it.
            if torch._C._storage_Use_Count(storage._cdata) > 2:
                p.grad = gradient.clone()
