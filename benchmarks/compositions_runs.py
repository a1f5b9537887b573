"""Trains one composition of benchmarks/compositions.py, and compares each of its windows with the whole one."""

from __future__ import annotations

import linecache
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from compositions_strategies import Composition
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.events import Notice, StepReport, StepSkipped, Verified
from autoaccum.memory import clock

TOLERANCE = 1e-6
SMALLEST = 1e-9
"""The norm of a gradient that is taken for 0: of parameters of the order of 1, it is made of rounding."""
FILE = "<composition>"


class Ticks:
    """A clock that a run reads the same times from whenever it is run, so that it finds the same plans."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def now(self) -> float:
        self._seconds += 1e-5
        return self._seconds

    stamp = now

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds


class Tiny(nn.Module):
    """One or two layers, and a scalar beside them."""

    def __init__(self, composition: Composition) -> None:
        super().__init__()
        width = 3 if composition.is_deep else composition.features
        self.first = nn.Linear(composition.features, width) if composition.is_deep else nn.Identity()
        self.last = nn.Linear(width, composition.outputs)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x if isinstance(self.first, nn.Identity) else x.tanh())


class Enough(BaseException):
    """What became of a run is known."""


class Recorder(torch.optim.Optimizer):
    """Gradient descent by steps of bounded length, which compares each gradient with that of the whole window."""

    def __init__(self, model: nn.Module, loss: Any, windows: list[tuple[torch.Tensor, ...]]) -> None:
        super().__init__(model.parameters(), {"lr": 0.05})
        self._model, self._loss, self._windows = model, loss, windows
        self._parameters = list(model.parameters())
        self.is_known: Callable[[], bool] = lambda: False
        """Whether what becomes of the run is known, so that it may end."""
        self.window = 0
        """The number of windows that have ended."""
        self.errors: list[float] = []
        """Of each window; NaN where the loss of the whole is not finite."""
        self.has_gradient = False
        """Whether any window had one as a whole."""
        self.losses: list[float] = []
        """Of each window as a whole."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.compare()
        for p in self._parameters:
            if p.grad is not None:
                p -= 0.05 * p.grad / (1 + p.grad.norm())

    def compare(self) -> None:
        """Compare the gradient that is there, or its absence, with that of the next window."""
        with torch.enable_grad():
            loss = self._loss(self._model, self._windows[self.window])
            wanted = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        self.window += 1
        self.losses.append(loss.item())
        size = sum(float(one.abs().sum()) for one in wanted if one is not None)
        self.has_gradient = self.has_gradient or size > SMALLEST
        self.errors.append(error_of([p.grad for p in self._parameters], wanted))
        if self.is_known():
            raise Enough


def error_of(given: list[torch.Tensor | None], wanted: tuple[torch.Tensor | None, ...]) -> float:
    """Return how far a gradient is from another, relative to that."""
    off, size = 0.0, 0.0
    for one, other in zip(given, wanted, strict=True):
        if one is None and other is None:
            continue
        one = torch.zeros_like(other) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        off += float((one - other).square().sum())
        size += float(other.square().sum())
    if not math.isfinite(size):
        return math.nan
    return math.sqrt(off) / max(math.sqrt(size), SMALLEST) if math.isfinite(off) else math.inf


@dataclass(kw_only=True)
class Run:
    """What became of a composition."""

    number: int
    composition: Composition
    errors: list[float] = field(default_factory=list)
    """Of the gradient of each window."""
    said_at: int | None = None
    """In which window, counted from 0, the first notice came; None: never."""
    notices: list[Notice] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Windows without a step."""
    raised: BaseException | None = None
    is_own: bool = False
    """Whether it was raised by the loss itself, on samples that it cannot be computed of."""
    has_gradient: bool = True
    """Whether any whole window had a gradient: the cross entropy of a single class has none."""
    loss_error: float = 0.0
    """The largest one of what was reported as the loss of a window."""

    @property
    def verdict(self) -> str:
        if self.raised is not None:
            if isinstance(self.raised, AutoaccumError):
                return "refused"
            return "its own error" if self.is_own else "raw error"
        if any(map(self.is_silent, range(len(self.errors)))):
            return "silently wrong"
        if any(error > TOLERANCE for error in self.errors):
            return "said"
        if any(map(math.isnan, self.errors)):
            return "not comparable"
        if not self.has_gradient:
            return "no gradient"
        return "false alarm" if self.notices else "exact"

    def is_silent(self, window: int) -> bool:
        """Return whether a window was silently wrong."""
        return self.errors[window] > TOLERANCE and (self.said_at is None or self.said_at > window)


def batches_of(composition: Composition, number: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the windows of a run."""
    generator = torch.Generator().manual_seed(number)
    return [
        _batch(composition, size, not index and composition.first_alike, index, generator)
        for index, size in enumerate(composition.windows)
    ]


def _batch(
    composition: Composition, n: int, alike: bool, index: int, generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def mask(*shape: int) -> torch.Tensor:
        drawn = (torch.rand(*shape, generator=generator) < 0.6).double()
        drawn[torch.randint(0, n, (), generator=generator)] = 1  # whole windows count something
        return torch.ones(*shape, dtype=torch.float64) if alike else drawn

    times = () if composition.times is None else (composition.times,)
    k = composition.outputs
    labels = torch.randint(0, 1 if alike else k, (n, *times), generator=generator)
    rows = mask(n, *times) if composition.times is None else mask(n, *times) * mask(n)[:, None]
    # Rows of which nothing counts are frequent, a window without any item is not.
    rows[0] = 1 if not rows.any() else rows[0]
    all_zero = mask(n)
    of_items = mask(n, *(times or (k,)))
    of_items = of_items if alike else of_items * all_zero.reshape(n, 1)
    of_items[0] = 1 if not of_items.any() else of_items[0]
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.2
    found = {
        "y": labels.masked_fill(rows == 0, -100),
        "r": normal(n, *times, k),
        "c": labels,
        "m": of_items,
        "k": all_zero,
        "w": torch.full_like(weights, 0.7) if alike and composition.equal_weights else weights,
        "s": torch.ones(n, dtype=torch.float64) if alike else normal(n).sign(),
    }
    return (normal(n, *times, composition.features), *(found[name] for name in composition.names))


def compiled(composition: Composition) -> Any:
    """Return the loss as a function."""
    names: dict[str, Any] = {"F": F, "torch": torch}
    linecache.cache[FILE] = (len(composition.source), None, composition.source.splitlines(True), FILE)
    exec(compile(composition.source, FILE, "exec"), names)
    return names["loss"]


def run(number: int, composition: Composition, *, brief: bool = False) -> Run:
    """Train a composition; a brief run ends with the first window that was announced, and rightly."""
    found = Run(number=number, composition=composition)
    torch.manual_seed(number)
    model = Tiny(composition)
    loss = compiled(composition)
    windows = batches_of(composition, number)
    optimizer = Recorder(model, loss, windows)
    reported: list[float] = []

    def is_known() -> bool:
        return brief and bool(found.notices) and any(error > TOLERANCE for error in optimizer.errors)

    optimizer.is_known = is_known

    def callback(event: Any) -> None:
        if isinstance(event, Notice):
            found.notices.append(event)
            # What is said of a window comes before its step.
            found.said_at = optimizer.window if found.said_at is None else found.said_at
        elif isinstance(event, Verified):
            found.verified.append(event)
        elif isinstance(event, StepReport):
            reported.append(event.loss)
        elif isinstance(event, StepSkipped):
            found.skipped.append(optimizer.window)
            optimizer.zero_grad()
            optimizer.compare()

    try:
        with clock.using(Ticks()):
            train = _by_fit if composition.by_fit else _by_accumulator
            train(model, loss, windows, optimizer, callback, reported, composition.max_micro_batch)
    except Enough:
        pass
    except Exception as error:
        found.raised = error
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        found.is_own = FILE in frames
    found.errors, found.has_gradient = optimizer.errors, optimizer.has_gradient
    if len(reported) == len(optimizer.losses):
        pairs = zip(reported, optimizer.losses, strict=True)
        found.loss_error = max((abs(one - other) / max(abs(other), SMALLEST) for one, other in pairs), default=0.0)
    return found


def _by_accumulator(
    model: nn.Module,
    loss: Any,
    windows: list[tuple[torch.Tensor, ...]],
    optimizer: Recorder,
    callback: Any,
    reported: list[float],
    most: int,
) -> None:
    accumulator = autoaccum.Accumulator(
        model, optimizer, training_step=loss, max_micro_batch=most, callbacks=[callback]
    )
    for batch in windows:
        reported.append(accumulator.step(batch).item())


def _by_fit(
    model: nn.Module,
    loss: Any,
    windows: list[tuple[torch.Tensor, ...]],
    optimizer: Recorder,
    callback: Any,
    reported: list[float],
    most: int,
) -> None:
    autoaccum.fit(
        model, tuple(map(torch.cat, zip(*windows, strict=True))), effective_batch=len(windows[0][0]), epochs=1,
        optimizer=optimizer, training_step=loss, max_micro_batch=most, shuffle=False, progress=False,
        device="cpu", callbacks=[callback],
    )  # fmt: skip
