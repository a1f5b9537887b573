"""Optimizers with train() and eval(): what counts is what they evaluate, and what trains is what they step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EMA
from autoaccum.errors import ArgumentError
from autoaccum.events import StepReport, Validated
from autoaccum.training import optimizer_attributes
from tests.models import classes, mlp


class ScheduleFree(torch.optim.Optimizer):
    """Steps on weights between two others, and is about their average, which it computes from them and back."""

    def __init__(self, params: Any, lr: float = 0.3) -> None:
        super().__init__(params, {"lr": lr, "is_training": False, "taken": 0})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(1 - 1 / 0.9, is_training=False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(0.1, is_training=True)

    def _move(self, weight: float, *, is_training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if group["is_training"] is not is_training and "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"], "not in train mode"
            group["taken"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["taken"]).sub_(p.grad, alpha=group["lr"] * 0.9 * (1 - 1 / group["taken"]))
                z.sub_(p.grad, alpha=group["lr"])


class HandsOn(torch.optim.SGD):
    """It hands its modes on to what it wraps, which has none."""

    def train(self) -> None:
        self.wrapped.train()

    def eval(self) -> None:
        self.wrapped.eval()


DATA, OTHERS = classes(24, seed=1), classes(10, seed=2)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(**options: Any) -> tuple[Any, torch.Tensor]:
    """Return what fit returns, and the weights that the last step has left."""
    torch.manual_seed(0)
    model, left = mlp(), []

    def note(record: Any) -> None:
        if isinstance(record, StepReport):
            left[:] = [flat(model)]

    options = {"epochs": 2, **options}
    callbacks = [note, *options.pop("callbacks", ())]
    result = autoaccum.fit(
        model, DATA, effective_batch=6, micro_batch=4, loss_fn=cross_entropy, progress=False, cache=False,
        optimizer=ScheduleFree(model.parameters()), callbacks=callbacks, shuffle=False, **options,
    )  # fmt: skip
    return result, left[0] if left else torch.empty(0)


def by_hand(steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = mlp()
    optimizer = ScheduleFree(model.parameters())
    optimizer.train()
    for step in range(steps):
        rows = slice(step % 4 * 6, step % 4 * 6 + 6)
        optimizer.zero_grad()
        cross_entropy(model(DATA[0][rows]), DATA[1][rows]).backward()
        optimizer.step()
    optimizer.eval()
    return model


def test_what_is_evaluated_is_validated_saved_and_returned(tmp_path: Path) -> None:
    result, left = train(validation_data=OTHERS, run_dir=tmp_path)
    expected = by_hand(8)
    assert (flat(result.model) - flat(expected)).norm() < 1e-6
    assert (left - flat(expected)).norm() > 1e-3, "else nothing is shown"
    losses = [event.loss for event in result.events if isinstance(event, Validated)]
    own = [float(cross_entropy(model(OTHERS[0]), OTHERS[1]).detach()) for model in (by_hand(4), expected)]
    assert losses == pytest.approx(own, rel=1e-5)
    best = autoaccum.load_best(tmp_path, mlp())
    assert (flat(best) - flat(by_hand(4 if own[0] < own[1] else 8))).norm() < 1e-6


def test_validations_and_checkpoints_leave_no_mark(tmp_path: Path) -> None:
    _, expected = train()
    _, found = train(validation_data=OTHERS, validate_every=6, run_dir=tmp_path, checkpoint_every=1)
    assert torch.equal(found, expected)


def test_a_run_that_goes_on_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    whole, expected = train(validation_data=OTHERS)

    def stop(record: Any) -> None:
        if isinstance(record, StepReport) and record.step == 5:
            raise autoaccum.StopTraining

    train(validation_data=OTHERS, run_dir=tmp_path, callbacks=[stop])
    result, found = train(validation_data=OTHERS, run_dir=tmp_path)
    assert torch.equal(found, expected)
    assert torch.equal(flat(result.model), flat(whole.model))
    with pytest.warns(autoaccum.AutoaccumWarning, match="is finished"):
        again, _ = train(validation_data=OTHERS, run_dir=tmp_path)
    assert torch.equal(flat(again.model), flat(whole.model))


def test_averages_are_of_what_is_evaluated() -> None:
    ema = EMA(decay=0.0, validate=True)
    result, _ = train(callbacks=[ema], validation_data=OTHERS)
    averages = torch.cat([ema.weights[name].flatten() for name, _ in result.model.named_parameters()])
    assert (averages - flat(result.model)).norm() < 1e-6


def test_modes_are_left_alone_once_a_run_has_ended() -> None:
    result, _ = train()
    with optimizer_attributes.evaluating(result.optimizer):
        pass
    assert not result.optimizer.param_groups[0]["is_training"]
    assert (
        optimizer_attributes.evaluated_weights(result.model, result.optimizer).keys()
        == result.model.state_dict().keys()
    )


def test_tied_weights_are_saved_as_one() -> None:
    model = mlp()
    model.again = model[0]
    optimizer = ScheduleFree(model.parameters())
    optimizer_attributes.into_training(optimizer)
    found = optimizer_attributes.evaluated_weights(model, optimizer)
    assert found["again.weight"] is found["0.weight"]
    assert not optimizer_attributes.has_modes(torch.optim.SGD(model.parameters(), lr=0.1))


def test_one_that_hands_its_modes_on_to_an_optimizer_without_them_is_refused() -> None:
    model = mlp()
    optimizer = HandsOn(model.parameters(), lr=0.1)
    optimizer.wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"optimizer='HandsOn': expected one whose train\(\) can be called"):
        autoaccum.fit(model, DATA, effective_batch=6, loss_fn=cross_entropy, optimizer=optimizer, progress=False)
