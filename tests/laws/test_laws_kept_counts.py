"""Laws 1, 2, 3 and 8 of docs/laws.md where a count is kept from 0, as by clamp(min=1): windows are joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import Notice, Verified
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import same, state_of

WINDOWS, SAMPLES = 7, 11
Loss = Callable[[Any, Any], torch.Tensor]


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Return samples with weights below 1, with flags of which few are set, and with signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    flags = (torch.rand(SAMPLES, 4, generator=generator) < 0.25).double()
    flags[seed % SAMPLES, 0] = 1
    weights = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) * 0.5 + 0.2
    found = {"x": normal(SAMPLES, 3), "y": normal(SAMPLES, 4), "flags": flags, "weights": weights}
    return there(found | {"signs": normal(SAMPLES, 4).sign()})  # type: ignore[no-any-return]


def weighted(model: Any, batch: Any) -> torch.Tensor:
    """A mean by weights that add up to less than 1 in a small micro-batch, beside a mean over samples."""
    outputs = model(batch["x"])
    each, weights = (outputs - batch["y"]).abs().sum(1), batch["weights"]
    return (each * weights).sum() / weights.sum().clamp(min=1) + 0.5 * outputs.square().mean()


def weighted_by_numbers(model: Any, batch: Any) -> torch.Tensor:
    """The same, kept from 0 by Python, beside a sum."""
    outputs = model(batch["x"])
    each, weights = (outputs - batch["y"]).square().mean(1), batch["weights"]
    return (each * weights).sum() / max(weights.sum().item(), 1) + 0.1 * outputs.exp().sum()


def hinge(model: Any, batch: Any) -> torch.Tensor:
    """A hinge over flagged entries: 0 where nothing is flagged, and where the one that is is right."""
    flags = batch["flags"]
    each = F.relu(1 - batch["signs"] * 4 * model(batch["x"]))
    return (each * flags).sum() / flags.sum().clamp(min=1) + 0.1 * model.scale.square()


def hinge_in_features(model: Any, batch: Any) -> torch.Tensor:
    """The same, times a number, which a count of none is then."""
    flags = batch["flags"][:, 0]
    each = F.relu(1 - batch["signs"] * 4 * model(batch["x"])).sum(1)
    return (each * flags).sum() / (flags.sum().clamp(min=1) * 4) + model(batch["x"]).square().mean()


def by_what_the_model_picks(model: Any, batch: Any) -> torch.Tensor:
    """A mean over what nothing in the batch tells."""
    outputs = model(batch["x"])
    picked = (outputs.detach() > 0.8).double()
    return (outputs.square() * picked).sum() / picked.sum().clamp(min=1) - 0.5 * (outputs * batch["y"]).mean()


def list_of_one(model: Any, batch: Any) -> torch.Tensor:
    """A list that has one entry in a micro-batch of one sample, times what is learnt."""
    outputs = model(batch["x"])
    each = torch.stack([row.square().sum() for row in outputs]).mean()
    return each * (-model.scale).exp() + model.scale + outputs.abs().sum()


def detector(model: Any, batch: Any) -> torch.Tensor:
    """A sum over all entries, divided by how many are flagged, beside one over these: the first is never 0."""
    outputs, flags = model(batch["x"]), batch["flags"]
    number = flags.sum().clamp(min=1)
    off = ((outputs - batch["y"]).abs() * flags).sum()
    return F.binary_cross_entropy_with_logits(outputs, flags, reduction="sum") / number + off / number


def detector_in_features(model: Any, batch: Any) -> torch.Tensor:
    """The same, divided by a number too: one that is flagged shows as four."""
    outputs, flags = model(batch["x"]), batch["flags"]
    number = flags.sum().clamp(min=1) * 4
    off = ((outputs - batch["y"]).abs() * flags).sum()
    return F.binary_cross_entropy_with_logits(outputs, flags, reduction="sum") / number + off / number


def detector_from_two(model: Any, batch: Any) -> Any:
    """The same by names, kept at two, which may stand for one as well as for none."""
    outputs, flags = model(batch["x"]), batch["flags"]
    number = flags.sum().clamp(min=2)
    off = ((outputs - batch["y"]).abs() * flags).sum()
    classes = F.binary_cross_entropy_with_logits(outputs, flags, reduction="sum")
    return {"classes": classes / number, "boxes": off / number}


LOSSES: list[Loss] = [
    detector,
    weighted,
    weighted_by_numbers,
    hinge,
    hinge_in_features,
    by_what_the_model_picks,
    list_of_one,
]


class Compared(torch.optim.SGD):
    """Takes steps by the gradient that it is given, and keeps how far that is off the whole window's."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__(model.parameters(), lr=0.02)
        self.model, self.loss, self.errors, self.losses = model, loss, list[float](), list[float]()

    def step(self, closure: Any = None) -> None:
        found = [p.grad for p in self.model.parameters()]
        with torch.enable_grad():
            whole = self.loss(self.model, batch_of(len(self.errors)))
            whole = sum(whole.values()) if isinstance(whole, dict) else whole
            wanted = torch.autograd.grad(whole, list(self.model.parameters()), allow_unused=True)
        self.losses.append(whole.item())
        off = torch.cat(
            [(a - b).flatten() for a, b in zip(found, wanted, strict=True) if a is not None and b is not None]
        )
        size = torch.cat([b.flatten() for b in wanted if b is not None])
        self.errors.append(float(off.norm() / size.norm()))
        super().step()


def trained(loss: Loss, most: int, **options: Any) -> tuple[Compared, list[Any], list[float]]:
    torch.manual_seed(3)
    model = there(Scored().double())
    optimizer, seen = Compared(model, loss), list[Any]()
    accumulator = autoaccum.Accumulator(
        model, optimizer, training_step=loss, max_micro_batch=most, callbacks=[seen.append], **options
    )
    losses = [float(accumulator.step(batch_of(seed))) for seed in range(WINDOWS)]
    return optimizer, seen, losses


# The last two want micro-batches that are in no doubt, which these windows do not have of every size.
CASES = [(loss, most) for loss in LOSSES for most in (1, 2, 3, 5)]
CASES += [(detector_in_features, 2), (detector_from_two, 1), (detector_from_two, 3)]


@pytest.mark.parametrize(("loss", "most"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_each_window_has_the_gradient_and_the_loss_of_the_whole(loss: Loss, most: int) -> None:
    optimizer, seen, losses = trained(loss, most)
    assert max(optimizer.errors) < 1e-12
    assert losses == pytest.approx(optimizer.losses, rel=1e-12)
    assert all(event.error < 1e-12 for event in seen if isinstance(event, Verified))
    assert not [event for event in seen if isinstance(event, Notice)]


def divided_by_none(model: Any, batch: Any) -> torch.Tensor:
    """A number of Python's divides, which raises where there is none, beside a term that counts there."""
    outputs, flags = model(batch["x"]), batch["flags"][:, 0]
    return (outputs.square().sum(1) * flags).sum() * (1 / flags.sum().item()) + outputs.exp().sum()


def test_what_divides_by_none_where_another_term_counts_is_joined() -> None:
    optimizer, seen, _ = trained(divided_by_none, 2)
    assert max(optimizer.errors) < 1e-12
    assert not [event for event in seen if isinstance(event, Notice)]


DATA = {name: torch.cat([batch_of(seed)[name] for seed in range(WINDOWS)]) for name in batch_of(0)}


def trainer(loss: Loss, micro_batch: Any, **options: Any) -> autoaccum.Trainer:
    torch.manual_seed(3)
    given: dict[str, Any] = {"effective_batch": SAMPLES, "device": DEVICE, "progress": False, "steps": 5}
    return autoaccum.Trainer(Scored().double(), DATA, training_step=loss, micro_batch=micro_batch, **(given | options))


@pytest.mark.parametrize("loss", [weighted, hinge, detector], ids=lambda loss: loss.__name__)
def test_a_run_that_goes_on_ends_as_if_it_had_never_stopped(loss: Loss, tmp_path: Path) -> None:
    straight = trainer(loss, 2).fit()

    def stop(record: Any) -> None:
        if getattr(record, "step", 0) == 2 and hasattr(record, "micro_batches"):
            raise autoaccum.StopTraining

    trainer(loss, 2, callbacks=[stop], run_dir=tmp_path, checkpoint_every=1).fit()
    resumed = trainer(loss, 2, run_dir=tmp_path, checkpoint_every=1).fit()
    assert [report.loss for report in resumed.history] == [report.loss for report in straight.history]
    assert same(state_of(resumed), state_of(straight))


@pytest.mark.parametrize("loss", [weighted, hinge], ids=lambda loss: loss.__name__)
@strides(293)
def test_an_oom_at_every_operation_leaves_no_mark(loss: Loss, stride: int) -> None:
    with Operations() as operations:
        trainer(loss, 3, steps=2).fit()
    clean: dict[Any, Any] = {}
    replayed = 0
    for operation in operations.every(stride, 7):
        running = trainer(loss, 3, steps=2)
        with oom_at(operation):
            try:
                result = running.fit()
            except OptimizerOutOfMemoryError:
                continue
        replayed += sum(report.replays for report in result.history)
        plans = tuple(report.micro_batches for report in result.history)
        if plans not in clean:
            without = trainer(loss, plans, steps=2).fit()
            clean[plans] = [report.loss for report in without.history], state_of(without)
        losses, state = clean[plans]
        assert [report.loss for report in result.history] == losses, f"operation {operation}"
        assert same(state_of(result), state), f"operation {operation} left a mark"
    assert replayed
