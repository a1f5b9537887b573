"""One run of a case of benchmarks/verification.py under a plan: what became of each of its windows.

Before each window the model, and whatever state the loss keeps, is copied; the copy computes the user's own loss on the
whole window at once, and its gradient is what the optimizer should have got.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from verification_cases import Case, Work

import autoaccum
from autoaccum.errors import AutoaccumError
from autoaccum.events import Joined, Notice
from autoaccum.testing import simulated_memory

TOLERANCE = 1e-6
LR = 0.05
UNLIMITED = 2**60


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run's windows are cut."""

    name: str
    windows: tuple[int, ...]
    micro_batch: int | None = None
    max_micro_batch: int | None = None
    """With ``micro_batch="auto"``; neither of the two: memory decides."""
    first_alike: bool = False
    """Whether the samples of the first window are all of one kind."""
    by_fit: bool = False


PLANS = (
    Plan(name="ones of 6", windows=(6, 6, 6), micro_batch=1),
    Plan(name="twos of 7", windows=(7, 7, 7), micro_batch=2),
    Plan(name="threes of 8, a short end", windows=(8, 8, 5), micro_batch=3),
    Plan(name="fours of 11, by fit", windows=(11, 11, 7), micro_batch=4, by_fit=True),
    Plan(name="fives of 13, an end of 2", windows=(13, 13, 2), micro_batch=5),
    Plan(name="eights of 20", windows=(20, 20), micro_batch=8),
    Plan(name="whole, then fives", windows=(5, 12, 12), micro_batch=5),
    Plan(name="auto, at most 4 of 12", windows=(12, 12, 12, 12), max_micro_batch=4),
    Plan(name="auto, by memory", windows=(12, 12)),
    Plan(name="twos of 8, the first alike", windows=(8, 8, 8, 8), micro_batch=2, first_alike=True),
    Plan(name="auto, at most 3 of 11, the first alike", windows=(11, 11, 11, 11), max_micro_batch=3, first_alike=True),
    Plan(
        name="fours of 12, by fit, the first alike",
        windows=(12, 12, 12, 6),
        micro_batch=4,
        first_alike=True,
        by_fit=True,
    ),
)
QUICK = (PLANS[2], PLANS[9])


@dataclass(kw_only=True)
class Outcome:
    """What became of one window."""

    window: int
    error: float = math.nan
    """Of the gradient, relative to the whole window's; NaN where it cannot be compared."""
    notices: tuple[str, ...] = ()
    """What had been said in the run by then, this window included."""
    raised: BaseException | None = None
    state_error: float = 0.0
    """Of the buffers after the window."""
    is_joined: bool = False
    """Whether micro-batches were joined, and were measured to be exact by the run itself."""
    held: float | None = None
    """What such a window holds for backward, as a share of what the full batch holds."""

    @property
    def is_exact(self) -> bool:
        return self.error <= TOLERANCE


@dataclass(kw_only=True)
class Run:
    """What became of a case under a plan."""

    case: Case
    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def verdicts(self) -> list[tuple[Outcome, str]]:
        """Return what each window counts as."""
        # What was said and is true of a later window is no false alarm in an earlier one.
        was_wrong = any(not outcome.is_exact and not math.isnan(outcome.error) for outcome in self.outcomes)
        return [(outcome, self._verdict(outcome, was_wrong)) for outcome in self.outcomes]

    def _verdict(self, outcome: Outcome, was_wrong: bool) -> str:
        if outcome.raised is not None:
            return "refused" if isinstance(outcome.raised, AutoaccumError) else "raw error"
        said = bool(outcome.notices)
        if self.case.draws is not None:
            if self.case.draws == "either":
                return "not comparable"
            # What is not cut is exact, whatever is drawn.
            is_whole = self.plan.windows[outcome.window - 1] <= (self.plan.micro_batch or 0)
            was_wrong = self.case.draws == "together"
            # Nor can draws of the step's own differ where it runs once; what modules draw the run has compared.
            is_exact = is_whole or not was_wrong or outcome.is_joined
        elif math.isnan(outcome.error):
            return "not comparable"
        else:
            is_exact = outcome.is_exact
        if is_exact and not said:
            return "exact"
        if is_exact and said and not was_wrong:
            return "false alarm" if outcome.state_error <= TOLERANCE else "said of state"
        return "said" if said else "silently wrong"


class Recorder(torch.optim.Optimizer):
    """Plain gradient descent that keeps the gradients of its last step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.gradients: list[torch.Tensor | None] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.gradients = gradients_of(parameters)
        for p, gradient in zip(parameters, self.gradients, strict=True):
            if gradient is not None:
                p -= LR * gradient


def gradients_of(parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for p in parameters:
        gradient = None if p.grad is None else p.grad.detach()
        found.append(
            gradient if gradient is None else (gradient.to_dense() if gradient.is_sparse else gradient).clone()
        )
    return found


def relative(given: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> float:
    """Return how far vectors are from others, all in one; a missing one is zero."""
    off, size = 0.0, 0.0
    for one, other in zip(given, wanted, strict=True):
        if one is None and other is None:
            continue
        one = torch.zeros_like(other) if one is None else one
        other = torch.zeros_like(one) if other is None else other
        if one.shape != other.shape:
            return math.inf
        off += float((one - other).abs().square().sum())
        size += float(other.abs().square().sum())
    if math.isnan(size):
        return math.nan  # there is no gradient to compare with
    return math.inf if math.isnan(off) else math.sqrt(off) / max(math.sqrt(size), 1e-12)


def buffers_of(work: Work) -> list[torch.Tensor | None]:
    return [b.detach().clone() for b in work.model.buffers() if b.is_floating_point()]


class Watch:
    """Compares each window of a run with the same one done whole."""

    def __init__(self, work: Work, compares: bool) -> None:
        self._work, self._compares = work, compares
        self.parameters = work.parameters()
        self.optimizer = Recorder(self.parameters)
        self._before: Work | None = None
        self._wanted: list[torch.Tensor | None] | None = None

    def before(self) -> None:
        """Keep what there is before a window."""
        self.optimizer.gradients = self._before = self._wanted = None
        self._before = self._work.copy() if self._compares else None

    def whole(self, batch: Any) -> bool:
        """Compute the gradient of the window as one batch; return False where the user's own loss fails at it."""
        if self._before is None:
            return True
        work = self._before
        parameters = work.parameters()
        self._start = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = None
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                loss = work.loss(batch)
                loss.backward()
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError, AssertionError):
            return False
        self._wanted = gradients_of(parameters)
        if work.by_update:
            self._wanted = self._updates(parameters, self._wanted)
        self._wanted_buffers = buffers_of(work)
        return math.isfinite(loss.item())

    def _updates(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor | None] | None
    ) -> list[torch.Tensor | None]:
        """Return how parameters were moved, those not yet stepped on by their gradients included."""
        moved = []
        for index, (p, start) in enumerate(zip(parameters, self._start, strict=True)):
            gradient = None if gradients is None else gradients[index]
            moved.append((start - p.detach()) / LR + (0 if gradient is None else gradient))
        return list(moved)

    def after(self, window: int, events: list[Any]) -> Outcome:
        """Return what became of the window."""
        outcome = Outcome(window=window, notices=tuple(dict.fromkeys(e.consequence for e in notices_in(events))))
        for event in events:
            if isinstance(event, Joined) and event.passed:
                outcome.is_joined, outcome.held = True, event.held
        if self._before is not None:
            given = self.optimizer.gradients or [None] * len(self.parameters)
            if self._work.by_update:
                given = self._updates(self.parameters, None)
            outcome.error = relative(given, self._wanted)
            buffers = buffers_of(self._work)
            if len(buffers) == len(self._wanted_buffers):
                outcome.state_error = relative(buffers, self._wanted_buffers)
        return outcome


def notices_in(events: list[Any]) -> list[Notice]:
    return [event for event in events if isinstance(event, Notice)]


def batches_of(case: Case, work: Work, plan: Plan) -> list[Any]:
    """Return the windows of a run: other ones under every plan, but always the same."""
    torch.manual_seed(PLANS.index(plan) + 1)
    return [work.data(size, plan.first_alike and index == 0) for index, size in enumerate(plan.windows)]


def run(case: Case, plan: Plan) -> Run:
    """Train a case under a plan."""
    result = Run(case=case, plan=plan)
    work = case.fresh()
    batches = batches_of(case, work, plan)
    work.model.train()
    watch = Watch(work, compares=case.draws is None)
    torch.manual_seed(7)
    if work.collate is not None and plan.micro_batch is None and plan.max_micro_batch is None:
        return result  # what memory a batch takes is not told before it is made
    train = _by_fit if plan.by_fit or work.collate is not None else _by_accumulator
    events: list[Any] = []
    try:
        train(work, watch, plan, batches, events, result.outcomes)
    except _CannotCompareError:  # the user's own loss fails on this window whole: nobody could train on it
        result.outcomes.append(Outcome(window=len(result.outcomes) + 1))
    except Exception as error:
        said = tuple(event.consequence for event in notices_in(events))
        result.outcomes.append(Outcome(window=len(result.outcomes) + 1, notices=said, raised=error))
    return result


class _CannotCompareError(Exception):
    pass


def _by_accumulator(
    work: Work, watch: Watch, plan: Plan, batches: list[Any], events: list[Any], outcomes: list[Outcome]
) -> None:
    sizes: dict[str, Any] = {} if plan.micro_batch is None else {"micro_batch": plan.micro_batch}
    if plan.max_micro_batch is not None:
        sizes["max_micro_batch"] = plan.max_micro_batch
    with _memory(work, plan, batches[0]) as limits:
        accumulator = autoaccum.Accumulator(
            work.model,
            watch.optimizer,
            callbacks=[events.append],
            headroom=0.0,
            patience=0.0,
            **sizes,
            **work.arguments(),
        )
        for number, batch in enumerate(batches, 1):
            watch.before()
            comparable = watch.whole(copy.deepcopy(batch))
            if not comparable and number == 1:
                raise _CannotCompareError
            limits(True)
            accumulator.step(batch)
            limits(False)
            outcomes.append(watch.after(number, events) if comparable else Outcome(window=number))


@contextlib.contextmanager
def _memory(work: Work, plan: Plan, batch: Any) -> Iterator[Callable[[bool], None]]:
    """Run in a memory that a window's whole batch does not fit into, where a plan says no size."""
    if plan.micro_batch is not None or plan.max_micro_batch is not None:
        yield lambda limited: None
        return
    rows = len(next(iter(batch.values()) if isinstance(batch, dict) else iter(batch)))
    # What a window takes beside the parameters, when it is cut in halves; never less than its optimizer's step needs.
    more = max(_peak(work.copy(), batch, rows // 2), 6 * sum(p.nbytes for p in work.parameters()))
    with simulated_memory(UNLIMITED) as device:

        def limits(limited: bool) -> None:
            device.limit = device.used + more if limited else UNLIMITED

        yield limits


def _peak(work: Work, batch: Any, micro_batch: int) -> int:
    """Return the bytes that a window takes when it is cut like this."""
    with simulated_memory(UNLIMITED) as device, contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        accumulator = autoaccum.Accumulator(
            work.model, Recorder(work.parameters()), micro_batch=micro_batch, **work.arguments()
        )
        accumulator.step(batch)
        return device.peak - sum(p.nbytes for p in work.model.parameters())
    return UNLIMITED


def _by_fit(
    work: Work, watch: Watch, plan: Plan, batches: list[Any], events: list[Any], outcomes: list[Outcome]
) -> None:
    state = {"comparable": False}

    def begin() -> None:
        watch.before()
        state["comparable"] = watch.whole(copy.deepcopy(batches[len(outcomes)]))

    def callback(record: Any) -> None:
        events.append(record)
        if isinstance(record, autoaccum.StepReport):
            seen = events if state["comparable"] else None
            number = len(outcomes) + 1
            outcomes.append(Outcome(window=number) if seen is None else watch.after(number, events))
            if number < len(batches):
                begin()

    begin()
    if not state["comparable"]:
        raise _CannotCompareError
    sizes, limits = plan.windows, {}
    if work.samples is not None:
        data: Any = [sample for batch in batches for sample in work.samples(batch)]
        limits = {"collate_fn": work.collate}
    elif isinstance(batches[0], dict):
        data = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    else:
        data = tuple(torch.cat(columns) for columns in zip(*batches, strict=True))
    if plan.micro_batch is None:
        limits["max_micro_batch"] = plan.max_micro_batch
    autoaccum.fit(
        work.model, data, effective_batch=lambda progress: sizes[min(progress.step, len(sizes) - 1)],
        micro_batch=plan.micro_batch or "auto", optimizer=watch.optimizer, shuffle=False, progress=False, device="cpu",
        callbacks=[callback], epochs=1, **limits, **work.arguments(),
    )  # fmt: skip
