"""Where in a run memory is to run out: at every operation with ``-m slow``, at some of each kind without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.step.step import Step
from autoaccum.testing import oom_at


def sizes(*often: int) -> pytest.MarkDecorator:
    """Parametrize a test with ``size``, a number of ranks: these, and others up to 4 behind ``slow``."""
    others = [pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 4) if size not in often]
    return pytest.mark.parametrize("size", [*often, *others])


def strides(stride: int) -> pytest.MarkDecorator:
    """Parametrize a test with ``stride``: as given, and 1, which takes minutes, behind ``slow``."""
    return pytest.mark.parametrize("stride", [stride, pytest.param(1, id="every operation", marks=pytest.mark.slow)])


def launches(stride: int, parts: int = 6) -> list[tuple[int, int]]:
    """Return (first operation, stride) of each launch, each of which a busy machine ends within its time."""
    return [(1, stride)] if stride > 4 else [(first, parts * stride) for first in range(1, parts * stride + 1, stride)]


class Operations(TorchDispatchMode):
    """Notes the names of the operations within it, numbered as ``oom_at`` numbers them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __enter__(self) -> Operations:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def every(self, stride: int, offset: int = 0) -> list[int]:
        """Return every ``stride``-th number; tests that sweep the same code take different offsets."""
        return list(range(1 + offset % stride, len(self.names) + 1, stride))

    def of_each_kind(self, stride: int, offset: int = 0) -> list[int]:
        """Return numbers: of each kind of operation the first, and every ``stride``-th from ``offset`` on."""
        met: Counter[str] = Counter()
        numbers = []
        for number, name in enumerate(self.names, start=1):
            if met[name] % stride == offset % stride or met[name] == 0:
                numbers.append(number)
            met[name] += 1
        return numbers


@dataclass
class Fault:
    """Memory that runs out in a window."""

    is_reached: bool = False
    """Whether the operation at which it does was come to."""


@contextmanager
def oom_in_window(window: int, operation: int) -> Iterator[Fault]:
    """Let memory run out within this at an operation of a window, both counted from 1; at 0, in none."""
    run, count, fault = Step.run, 0, Fault()

    def faulty(self: Step, given: Any, plan: Any = None) -> Any:
        nonlocal count
        count += 1
        if count != window or not operation:
            return run(self, given, plan)
        with oom_at(operation) as fails:
            found = run(self, given, plan)
        fault.is_reached = fails.operations >= operation
        return found

    Step.run = faulty  # type: ignore[method-assign]
    try:
        yield fault
    finally:
        Step.run = run  # type: ignore[method-assign]
