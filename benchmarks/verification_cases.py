"""What benchmarks/verification.py trains: a case makes a fresh model, data and a loss; the files beside it hold them.

Losses are written as people write them, not as a reader of graphs would like them. Nothing here says which of them can
be cut exactly: that is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from verification_tasks import Batch, Setting

Step = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(kw_only=True)
class Work:
    """One fresh run's model, state and loss."""

    model: nn.Module
    data: Callable[[int, bool], Batch]
    build: Callable[[Any], Any]
    """(state) -> the training step or loss function; a state beside the model is handed on, so it can be copied."""
    state: Any = None
    is_loss_fn: bool = False
    """Whether what is built is (outputs, targets) -> loss."""
    model_returns_loss: bool = False
    hooks: Callable[[nn.Module], None] | None = None
    """Registers hooks on parameters, which a copy of a model does not have."""
    num_items: Callable[[Any], Any] | None = None
    samples: Callable[[Batch], list[Any]] | None = None
    """(window) -> its samples, which ``collate`` makes batches of."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples, of a micro-batch as of a window; such a case is trained by fit."""
    by_update: bool = False
    """Whether parameters are moved elsewhere than in the optimizer: then updates are compared, not gradients."""

    def __post_init__(self) -> None:
        self.function = self.build(self.state)
        if self.hooks is not None:
            self.hooks(self.model)

    def arguments(self) -> dict[str, Any]:
        """Return the loss as arguments of autoaccum's."""
        if self.model_returns_loss:
            return {"num_items": self.num_items}
        return {"loss_fn" if self.is_loss_fn else "training_step": self.function, "num_items": self.num_items}

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a window, as the user's own loop computes it."""
        if self.samples is not None and self.collate is not None:
            batch = self.collate(self.samples(batch))
        if self.model_returns_loss:
            return self.model(**batch)["loss"]
        if self.is_loss_fn:
            return self.function(self.model(batch[0]), batch[1])
        return self.function(self.model, batch)

    def parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer is given: all that is trained, of the model and of the state beside it."""
        found = {id(p): p for module in [self.model, *modules_in(self.state)] for p in module.parameters()}
        return [p for p in found.values() if p.requires_grad]

    def copy(self) -> Work:
        """Return the same work as it is now, which shares nothing with it."""
        memo: dict[int, Any] = {}
        for module in [self.model, *modules_in(self.state)]:
            for part in module.modules():
                # Results that a module keeps have a graph, and PyTorch refuses to copy those.
                for value in tensors_in(vars(part)):
                    if value.grad_fn is not None:
                        memo[id(value)] = value.detach().clone()
        model, state = copy.deepcopy((self.model, self.state), memo)
        return Work(
            model=model, data=self.data, build=self.build, state=state, is_loss_fn=self.is_loss_fn, hooks=self.hooks,
            model_returns_loss=self.model_returns_loss, num_items=self.num_items, by_update=self.by_update,
            samples=self.samples, collate=self.collate,
        )  # fmt: skip


def modules_in(state: Any) -> Iterator[nn.Module]:
    if isinstance(state, nn.Module):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from modules_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from modules_in(value)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    name: str
    kind: str
    """losses or models."""
    group: str
    make: Callable[[], Work]
    draws: str | None = None
    """Of one whose forward draws random numbers, so that windows cannot be compared: independent, together, or either
    (one draw for all samples of a forward: another distribution of the gradient, with the same mean)."""

    def fresh(self) -> Work:
        torch.manual_seed(0)
        return self.make()


CASES: list[Case] = []


class Cases:
    """The cases of one group, which its methods add."""

    def __init__(self, kind: str, group: str) -> None:
        self._kind, self._group = kind, group

    def add(self, name: str, make: Callable[[], Work], draws: str | None = None) -> None:
        assert all(case.name != name for case in CASES), name
        CASES.append(Case(name=name, kind=self._kind, group=self._group, make=make, draws=draws))

    def loss(self, name: str, setting: Setting, function: Callable[..., torch.Tensor], **options: Any) -> None:
        """Add a loss (outputs, *the batch's other tensors)."""

        def make() -> Work:
            model = setting.model()
            if len(setting.data(2, True)) == 2:
                return Work(model=model, data=setting.data, build=lambda _: function, is_loss_fn=True, **options)
            return Work(model=model, data=setting.data, build=lambda _: of_outputs(function), **options)

        self.add(name, make)

    def step(self, name: str, setting: Setting, function: Step, draws: str | None = None, **options: Any) -> None:
        """Add a training step (model, batch)."""
        make = lambda: Work(model=setting.model(), data=setting.data, build=lambda _: function, **options)  # noqa: E731
        self.add(name, make, draws)

    def kept(
        self, name: str, setting: Setting, state: Callable[[], Any], build: Callable[[Any], Step], **options: Any
    ) -> None:
        """Add a training step that keeps a state of its own from one call to the next, or has modules of its own."""
        self.add(name, lambda: Work(model=setting.model(), data=setting.data, build=build, state=state(), **options))

    def model(
        self,
        name: str,
        model: Callable[[], nn.Module],
        data: Callable[[int, bool], Batch],
        function: Any,
        draws: str | None = None,
        **options: Any,
    ) -> None:
        """Add a model, and a loss (outputs, *the batch's other tensors) for it."""
        self.step(name, Setting(model, data), of_outputs(function), draws, **options)


def of_outputs(function: Callable[..., torch.Tensor]) -> Step:
    """Return a training step that calls the model on a batch's first tensor and the function on the result."""
    return lambda model, batch: function(model(batch[0]), *batch[1:])


def flat(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the loss given tokens one below the other: outputs (tokens, classes), targets, further arguments."""
    return lambda outputs, targets, *others: function(
        outputs.flatten(0, 1), targets.flatten(), *(other.flatten() for other in others)
    )


def total(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, as Python's sum would."""
    first, *others = values
    for value in others:
        first = first + value
    return first
