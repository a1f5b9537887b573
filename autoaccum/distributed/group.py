"""The processes that train together, and how they agree.

All that ranks tell each other goes through ``exchange``, in which every rank takes part: with what it has to say, or
with the error that has ended it. So collectives have one order, and none waits for one that has failed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from autoaccum.distributed.channel import Channel, as_tensor, undisturbed
from autoaccum.distributed.gradients import Summing
from autoaccum.distributed.launcher import is_launched
from autoaccum.errors import RankError

T = TypeVar("T")
_joined: Group | None = None


class Group:
    """The ranks of one launcher."""

    def __init__(self, device: torch.device) -> None:
        """Join the processes that were started together, which is waited for."""
        self.channel = Channel(device)
        self.rank, self.size = self.channel.rank, self.channel.size
        self.summing = Summing(self.channel)
        """What adds up gradients."""
        # NCCL's is made by the first sum, which takes memory: now, and not when a window's gradients are there.
        with undisturbed():
            self.channel.begin_sum(torch.zeros(1, device=device))()

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes, shows and measures for all."""
        return self.rank == 0

    @property
    def is_over(self) -> bool:
        """Return whether one of them has failed, so that nothing can be told any more."""
        return self.channel.is_over

    @property
    def waited_seconds(self) -> float:
        """Return how long this rank was in collectives, most of it waiting for others."""
        return self.channel.waited_seconds

    def exchange(self, told: T) -> list[T]:
        """Tell all ranks something that can be pickled, and return what each of them has told.

        Raises:
            RankError: one of them has failed, or is gone.
        """
        found = self._exchange((None, told, self.summing.is_begun))
        for rank, (error, *_) in enumerate(found):
            if error is not None:
                self.channel.is_over = True
                raise RankError(rank, error)
        return [value for _, value, _ in found]

    def fail(self, error: BaseException) -> None:
        """Tell all ranks, in the exchange that they are about to make, that this one has ended by an error."""
        # Heard from another rank, or told before: nobody takes part in another exchange.
        if self.channel.is_over:
            return
        reason = f"{type(error).__name__}: {error}"
        with suppress(RankError):  # they are gone, too: the error that is on its way says more
            self.summing.drain()
            # Whoever waits for a sum that this rank has not begun hears no exchange.
            self.channel.call(reason)
            told = self._exchange((reason, None, False))
            if any(is_begun for *_, is_begun in told):
                self.summing.catch_up()
        self.channel.is_over = True

    def leave(self) -> None:
        """Take part in no exchange any more: others wait elsewhere, for something that this rank cannot do."""
        self.channel.is_over = True

    def from_first(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the first rank, which alone calls it."""
        data = _packed(function()) if self.is_first else b""
        # In this its error would be heard. What it returns is sent by one alone: it may be as large as the model.
        size = self.exchange(len(data))[0]
        with undisturbed():
            sent = as_tensor(data, size)
            self.channel.broadcast(sent)
            return pickle.loads(sent.numpy().data)  # type: ignore[no-any-return]

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the first rank's values of some tensors to all of them."""
        with torch.no_grad():
            for tensor in tensors:
                value = tensor.detach().to("cpu").contiguous()
                with undisturbed():
                    self.channel.broadcast(value)
                # In place, for modules hold the tensor; the first rank's is what was sent.
                if not self.is_first:
                    tensor.copy_(value)

    def _exchange(self, told: Any) -> list[Any]:
        # On the host, whatever the device: it is some hundred bytes, and no rank may wait for its device to tell.
        with undisturbed():
            return [pickle.loads(each) for each in self.channel.gather(_packed(told))]


class _Pickler(pickle.Pickler):
    """Pickles tensors on the host as their bytes, a tenth of the time that those of a file take."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is not torch.Tensor or found.layout != torch.strided or not found.is_cpu:
            return NotImplemented
        values = found.detach().resolve_conj().resolve_neg().contiguous()
        # One that has lain in a column has its stride even as one number, of which no bytes are seen.
        data = values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        return _unpacked, (data, found.dtype, tuple(found.shape))


def _packed(told: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(told)
    return file.getvalue()


def _unpacked(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:  # of which PyTorch makes no tensor
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def join(device: torch.device) -> Group | None:
    """Return the group of this process, which is waited for the first time; None where it is alone."""
    global _joined
    if not is_launched():
        return None
    # One for the whole process, for to make it takes a second; and a new one after an error, which has ended it.
    if _joined is None or _joined.is_over:
        _joined = Group(device)
    return _joined


def speaks() -> bool:
    """Return whether this process is the one that shows and writes for all ranks that it has joined."""
    return _joined is None or _joined.is_first
