"""Modules that only the training step knows: in its closure, a global, a partial, an object, a default argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.step.others.harness import Loop, TrainingStep

HEAD: nn.Module | None = None
"""What ``of_global`` trains."""


def loss_of(model: Any, batch: Any, head: nn.Module) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(head(model(inputs)), targets)


def of_closure(head: nn.Module) -> TrainingStep:
    def training_step(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model, batch, head)

    return training_step


def of_container(head: nn.Module) -> TrainingStep:
    parts: dict[str, Any] = {"heads": [head], "weight": 1.0}
    return lambda model, batch: loss_of(model, batch, parts["heads"][0])


def of_closures(head: nn.Module) -> TrainingStep:
    inner = of_closure(head)

    def logged(model: Any, batch: Any) -> torch.Tensor:
        return inner(model, batch)

    return logged


def of_global(head: nn.Module) -> TrainingStep:
    global HEAD
    HEAD = head

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        assert HEAD is not None
        return loss_of(model, batch, HEAD)

    return training_step


def of_partial(head: nn.Module) -> TrainingStep:
    return functools.partial(loss_of, head=head)


def of_partials(head: nn.Module) -> TrainingStep:
    return functools.partial(functools.partial(lambda parts, model, batch: loss_of(model, batch, parts[0]), (head,)))


def of_default(head: nn.Module) -> TrainingStep:
    def training_step(model: Any, batch: Any, head: nn.Module = head) -> torch.Tensor:
        return loss_of(model, batch, head)

    return training_step


class Task:
    """A plain object that holds the head beside other things."""

    def __init__(self, head: nn.Module) -> None:
        self.name, self.head = "task", head

    def training_step(self, model: Any, batch: Any) -> torch.Tensor:
        return loss_of(model, batch, self.head)

    __call__ = training_step


def of_method(head: nn.Module) -> TrainingStep:
    return Task(head).training_step


def of_object(head: nn.Module) -> TrainingStep:
    return Task(head)


HOLDERS: dict[str, Callable[[nn.Module], TrainingStep]] = {
    "a closure": of_closure,
    "a dict of lists in a closure": of_container,
    "a closure in a closure": of_closures,
    "a global": of_global,
    "a partial": of_partial,
    "a partial of a partial": of_partials,
    "a default argument": of_default,
    "a method's object": of_method,
    "an object that is called": of_object,
}


def in_model(has_batch_norm: bool) -> Loop:
    """Return the same loop with the head in the model, as nothing has to be found there."""
    parts = loop("a closure", has_batch_norm)
    model = nn.Sequential(parts.model, *parts.held)
    step = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    return Loop(model, parts.data, 12, 4, training_step=step, optimizer=parts.optimizer)


def loop(holder: str, has_batch_norm: bool = False, through: Any = "fit") -> Loop:
    """Return a training loop whose head, trained by the same optimizer, is held by ``holder`` alone."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if has_batch_norm else []
    head = nn.Sequential(nn.Linear(8, 8), *norm, nn.Tanh(), nn.Linear(8, 3)).double()
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()
    data = (torch.randn(36, 6, dtype=torch.double), torch.randint(0, 3, (36,)))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    return Loop(
        body, data, window=12, micro_batch=4, training_step=HOLDERS[holder](head), optimizer=optimizer, held=(head,),
        make_step=of_closure, through=through,
    )  # fmt: skip
