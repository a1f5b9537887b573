"""Memory faults and a clock on demand, on any machine: test that training code survives an out-of-memory error.

A hand-written loop that halves its micro-batch, tested on a device of 1 MiB that does not exist:

>>> import torch
>>> def train_step(model, inputs, micro_batch):
...     while True:
...         try:
...             for chunk in inputs.split(micro_batch):
...                 model(chunk).square().sum().backward()
...             return micro_batch
...         except torch.OutOfMemoryError:
...             if micro_batch == 1:
...                 raise
...         model.zero_grad()
...         micro_batch //= 2
>>> model = torch.nn.Sequential(torch.nn.Linear(16, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
>>> with simulated_memory("1MiB") as device:
...     micro_batch = train_step(model, torch.randn(1024, 16), micro_batch=1024)
>>> assert micro_batch == 128
>>> assert device.peak <= device.limit

And at every operation in turn, so that no place is left where an error would go unnoticed:

>>> inputs = torch.randn(4, 16)
>>> with oom_at(None) as count:
...     micro_batch = train_step(model, inputs, micro_batch=4)
>>> for n in range(1, count.operations + 1):
...     with oom_at(n):
...         assert train_step(model, inputs, micro_batch=4) == 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoaccum._checks import num_bytes, number_between
from autoaccum.errors import ArgumentError
from autoaccum.memory.clock import ManualClock, using
from autoaccum.memory.simulated import MemorySimulation, OutOfMemoryAt

# Public, and used by this package's own tests: what survives every fault here is what "nothing was lost" means.
__all__ = ["manual_clock", "oom_at", "simulated_memory"]


def simulated_memory(limit_bytes: int | str) -> MemorySimulation:
    """Make a context in which the CPU's tensors live in a memory of ``limit_bytes``, past which operations raise.

    It counts every storage that an operation of this thread takes or returns, once, for as long as it lives, and raises
    ``torch.OutOfMemoryError`` when they would not fit. Tensors made before it count from their first use inside it.
    ``.limit`` may be changed at any time; ``.used``, ``.peak`` and ``.reset_peak()`` tell how it went. Raise
    ``.retries`` to pretend that the allocator had to try again. Of nested contexts the innermost wins.

    >>> import torch
    >>> with simulated_memory("64MiB") as device:
    ...     kept = torch.zeros(1024, 1024)
    ...     device.used, device.limit
    (4194304, 67108864)

    Raises:
        ArgumentError: ``limit_bytes`` is not a number of bytes.
    """
    # 0 bytes are accepted: on such a device the first operation fails, which is a case to test too.
    accepted = "a number of bytes, as an int or a text such as '64MiB'"
    # Nothing happens before it is entered: tensors that are there already are counted when they are first used.
    # The simulation is the context itself, so that what it counted can still be asked for when it is over.
    return MemorySimulation(num_bytes("limit_bytes", limit_bytes, accepted, least=0))


def oom_at(n: int | None) -> OutOfMemoryAt:
    """Make a context in which the ``n``-th operation, from 1, raises ``torch.OutOfMemoryError`` before it runs, once.

    The operations are those that PyTorch dispatches in this thread, in forward, backward and optimizer alike.
    ``.operations`` is how many there were so far; ``oom_at(None)`` only counts them.

    >>> import torch
    >>> with oom_at(2) as fault:
    ...     one = torch.ones(1)
    ...     one + one
    Traceback (most recent call last):
        ...
    torch.OutOfMemoryError: Simulated out of memory at operation 2, aten.add.Tensor.
    >>> fault.operations
    2

    Raises:
        ArgumentError: ``n`` is not an int of at least 1.
    """
    # An operation that is never reached raises nothing: how many there are, a first run with None tells.
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ArgumentError("n", n, "an int of at least 1, or None to only count")
    return OutOfMemoryAt(n)


@contextmanager
def manual_clock(seconds: float = 0.0) -> Iterator[ManualClock]:
    """Let all that decides or reports by time read a clock that only ``advance`` moves.

    Plans are timed, limits are looked at and checkpoints come due by this clock, so that what a run does depends on
    nothing but its work.

    >>> with manual_clock() as clock:
    ...     clock.advance(1.5)
    ...     clock.now()
    1.5
    """
    number_between("seconds", seconds, 0)
    # One clock for the whole process, its threads included: what they measure has to agree.
    clock = ManualClock(seconds)
    with using(clock):
        yield clock
