"""Runs a training loop cut into micro-batches, and each of its windows whole from the state that it began with."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

import autoaccum
from autoaccum.data.batches import take
from autoaccum.events import Event, Notice, StepReport

TrainingStep = Callable[[Any, Any], torch.Tensor]

TOLERANCE = 1e-9
"""Relative error of a gradient in float64, below which it is that of the whole window."""
PERCENTAGE = re.compile(r"(\d[\d.,]*(?:e[+-]?\d+)?)\s?%")
"""How a notice states the error that was measured."""


@dataclass
class Loop:
    """A training loop: everything that ``fit`` or ``Accumulator`` is given, and how its windows are cut."""

    model: nn.Module
    data: Any
    """One row or sample for each sample of all windows, in their order."""
    window: int
    micro_batch: int
    """Samples, a divisor of the window: cuts of equal sizes. The unequal ones are of one sample more."""
    training_step: TrainingStep | None = None
    """None where the model returns its loss."""
    through: Literal["fit", "Accumulator"] = "fit"
    optimizer: torch.optim.Optimizer | None = None
    """SGD when left out."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_items: Callable[[Any], Any] | None = None
    is_comparable: bool = True
    """Whether the whole window draws what its micro-batches draw."""
    held: Sequence[nn.Module] = ()
    """Modules that the optimizer trains and only the step's closure, globals or arguments know."""
    make_step: Callable[..., TrainingStep] | None = None
    """Makes the same training step of other ``held`` modules: what a function holds is not copied with it."""
    before: Callable[[int], None] | None = None
    """Called with the number of each window before it begins, as a schedule of the user's own is."""

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a batch as the user's code computes it."""
        if self.training_step is not None:
            return self.training_step(model, batch)
        loss: torch.Tensor = (model(**batch) if isinstance(batch, dict) else model(*batch))["loss"]
        return loss

    def num_samples(self) -> int:
        """Return the samples of all windows together."""
        if self.collate_fn is not None:
            return len(self.data)
        return len(torch.utils._pytree.tree_leaves(self.data)[0])

    def batch(self, number: int) -> Any:
        """Return a window as one batch."""
        start, stop = number * self.window, min((number + 1) * self.window, self.num_samples())
        if self.collate_fn is not None:
            return self.collate_fn([self.data[index] for index in range(start, stop)])
        return take(self.data, start, stop)


@dataclass
class Outcome:
    """What became of a run, window by window."""

    errors: list[float] = field(default_factory=list)
    """Of each window's gradient, as a fraction of the whole window's."""
    events: list[Event] = field(default_factory=list)
    cuts: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def notices(self) -> list[Notice]:
        """Return what was said."""
        return [event for event in self.events if isinstance(event, Notice)]

    @property
    def said(self) -> str:
        """Return what was said as one text."""
        return "\n".join(map(str, self.notices))


class Watch:
    """Keeps the state that each window began with and the gradient that it ended with."""

    def __init__(self, loop: Loop) -> None:
        """Watch the optimizer of a loop, which is made if there is none."""
        parameters = {id(p): p for m in (loop.model, *loop.held) for p in m.parameters() if p.requires_grad}
        self.parameters = list(parameters.values())
        self.optimizer = loop.optimizer or torch.optim.SGD(self.parameters, lr=0.05)
        self.gradients: list[list[torch.Tensor]] = []
        self.outcome = Outcome()
        self._loop = loop
        self._states: list[Any] = []
        self._random: list[torch.Tensor] = []
        self.begin()
        self.optimizer.register_step_pre_hook(lambda *_: self.end())
        self.optimizer.register_step_post_hook(lambda *_: self.begin())

    def begin(self) -> None:
        """Copy all that the next window begins with: the model, what the step holds, the random state."""
        if self._loop.before is not None:
            self._loop.before(len(self._states))
        state = (self._loop.model, self._loop.training_step, self._loop.held, self.parameters)
        self._states.append(copy.deepcopy(state))
        self._random.append(torch.get_rng_state())

    def end(self) -> None:
        """Copy the gradient that the optimizer is about to step on."""
        self.gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters])

    def hear(self, record: Any) -> None:
        """Keep an event."""
        if not isinstance(record, StepReport):
            self.outcome.events.append(record)

    def whole(self, number: int, batch: Any) -> list[torch.Tensor]:
        """Return the gradient of a window in one batch, from where that window began."""
        model, step, held, parameters = self._states[number]
        if self._loop.make_step is not None:
            step = self._loop.make_step(*held)
        torch.set_rng_state(self._random[number])
        for p in parameters:
            p.grad = None
        fresh = Loop(model, None, 0, 0, training_step=step)
        fresh.loss(model, batch).backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]

    def errors(self) -> list[float]:
        """Return how far each gradient is from its window's, as a fraction of that."""
        found = []
        random = torch.get_rng_state()
        for number, gradient in enumerate(self.gradients):
            whole = self.whole(number, self._loop.batch(number))
            difference = torch.cat([(a - b).flatten() for a, b in zip(gradient, whole, strict=True)]).norm()
            found.append(float(difference / torch.cat([g.flatten() for g in whole]).norm()))
        torch.set_rng_state(random)
        return found


def run(loop: Loop, micro_batch: Any = "auto", max_micro_batch: int | None = None) -> Outcome:
    """Train one epoch of a loop, and measure each window beside its whole."""
    watch = Watch(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ours and PyTorch's: what is said is looked at among the events
        (_by_fit if loop.through == "fit" else _by_accumulator)(loop, watch, micro_batch, max_micro_batch)
    watch.outcome.errors = watch.errors() if loop.is_comparable else []
    return watch.outcome


def _by_fit(loop: Loop, watch: Watch, micro_batch: Any, max_micro_batch: int | None) -> None:
    # Plans are recorded ones: the same for every window.
    if isinstance(micro_batch, tuple):
        micro_batch = [micro_batch] * (loop.num_samples() // loop.window)
    result = autoaccum.fit(
        loop.model,
        loop.data,
        effective_batch=loop.window,
        training_step=loop.training_step,
        optimizer=watch.optimizer,
        num_items=loop.num_items,
        collate_fn=loop.collate_fn,
        micro_batch=micro_batch,
        max_micro_batch=max_micro_batch,
        shuffle=False,
        device="cpu",
        callbacks=[watch.hear],
        progress=False,
    )
    watch.outcome.cuts = [report.micro_batches for report in result.history]


def _by_accumulator(loop: Loop, watch: Watch, micro_batch: Any, max_micro_batch: int | None) -> None:
    accumulator = autoaccum.Accumulator(
        loop.model,
        watch.optimizer,
        training_step=loop.training_step,
        num_items=loop.num_items,
        micro_batch=max(micro_batch) if isinstance(micro_batch, tuple) else micro_batch,
        max_micro_batch=max_micro_batch,
        callbacks=[watch.hear],
    )
    for number in range(loop.num_samples() // loop.window):
        accumulator.step(loop.batch(number))
        watch.outcome.cuts.append(accumulator.micro_batches)


def check(outcome: Outcome, words: Sequence[str] = ()) -> None:
    """Assert that every window was exact and nothing was said, or that the measured error and its cause were said.

    Args:
        outcome: what became of the run.
        words: in lower case, of which a notice's cause holds one; none for what has to be exact.
    """
    error = max(outcome.errors, default=0.0)
    if error < TOLERANCE:  # which NaN is not
        assert not outcome.notices, "a false alarm"
        return
    assert words, f"it can be exact, and is {error:.2g} off"
    assert outcome.notices, f"silently wrong by {error:.2g}"
    figures = [float(figure.replace(",", "")) for figure in PERCENTAGE.findall(outcome.said)]
    assert any(figure > 0 for figure in figures), f"{error:.2g} off, without a measured error: {outcome.said}"
    causes = " ".join(notice.cause for notice in outcome.notices).lower()
    assert any(word in causes for word in words), f"another cause than {words}: {outcome.said}"
