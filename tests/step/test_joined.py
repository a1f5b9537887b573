"""When windows are joined, and when they are not any more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import AutoaccumWarning, ConflictingArgumentsError, NotExactError
from autoaccum.events import Joined, Notice, Verified
from autoaccum.testing import simulated_memory
from tests.devices import DEVICE
from tests.models import classes, mlp

pytestmark = pytest.mark.measured


def meeting(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets) + (outputs @ outputs.T).logsumexp(1).square().mean()


def trained(loss: Any = meeting, model: nn.Module | None = None, **options: Any) -> autoaccum.FitResult:
    options = {"effective_batch": 12, "micro_batch": 4, "steps": 3, **options}
    return autoaccum.fit(
        model or mlp(), classes(36), loss_fn=loss, device=DEVICE, cache=False, progress=False, shuffle=False, **options
    )


def joined(result: autoaccum.FitResult) -> list[Joined]:
    return [event for event in result.events if isinstance(event, Joined)]


@pytest.mark.device
def test_a_loss_that_is_a_mean_stays_weighted() -> None:
    result = trained(cross_entropy)
    assert not joined(result)
    assert [event for event in result.events if isinstance(event, Verified)]


@pytest.mark.device
def test_a_loss_whose_samples_meet_is_joined_from_the_first_step_on_and_nothing_is_announced() -> None:
    result = trained()
    (event,) = joined(result)
    assert event.passed
    assert event.step == 1
    assert event.held < 1
    assert "measured on 6 samples" in event.reason
    assert not [one for one in result.events if isinstance(one, Notice)]
    assert [report.micro_batches for report in result.history] == [(4, 4, 4)] * 3
    whole = trained(micro_batch=12)
    for report, other in zip(result.history, whole.history, strict=True):
        assert report.loss == pytest.approx(other.loss, rel=1e-5)


def test_it_can_be_forbidden() -> None:
    with pytest.warns(AutoaccumWarning, match="samples meet in the model"):
        assert not joined(trained(accumulate="weighted"))


@pytest.mark.device
def test_it_can_be_asked_for() -> None:
    (event,) = joined(trained(cross_entropy, accumulate="joined"))
    assert event.reason == "accumulate='joined' was passed"


def test_strict_runs_are_joined_where_that_is_exact() -> None:
    assert joined(trained(strict=True))


def test_what_cannot_be_joined_is_announced_and_ends_strict_runs() -> None:
    calls = {"number": 0}

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls["number"] += 1  # which nothing can put back, for a closure of a module's is not looked at
            return self.inner(x) * calls["number"]

    with pytest.warns(AutoaccumWarning, match="gradient"):
        assert not joined(trained(model=Counted()))
    with pytest.raises(NotExactError):
        trained(model=Counted(), strict=True)


def test_a_step_that_fails_on_a_micro_batch_is_joined() -> None:
    targets = torch.arange(12) % 3
    (event,) = joined(trained(lambda outputs, _: cross_entropy(outputs, targets)))
    assert event.reason.startswith("The step fails on a micro-batch (ValueError")


def test_a_step_that_fails_on_everything_raises_its_own_error() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trained(broken)


@pytest.mark.parametrize("options", [{"noise_scale": True}])
def test_what_it_cannot_be_combined_with_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConflictingArgumentsError, match="accumulate"):
        trained(accumulate="joined", **options)


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def test_a_head_that_joins_in_later_is_measured_before_it_is_split() -> None:
    """Nothing of the modules themselves tells that a step calls another one from now on."""
    losses = []
    for options in ({"micro_batch": 8}, {"micro_batch": 3, "accumulate": "joined"}):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"body": nn.Linear(4, 6), "head": nn.Sequential(nn.Linear(6, 5), Centred(), nn.Linear(5, 2))}
        )
        late: list[bool] = []

        def step(model: Any, batch: Any, late: list[bool] = late) -> torch.Tensor:
            hidden = model["body"](batch)
            loss = (hidden @ hidden.T).logsumexp(1).square().mean()
            return loss + model["head"](hidden).square().mean().sqrt() if late else loss

        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 1e-3), training_step=step, **options  # type: ignore[arg-type]
        )  # fmt: skip
        torch.manual_seed(1)
        found = []
        for number in range(5):
            late.extend([True] * (number == 3))
            found.append(float(accumulator.step(torch.randn(8, 4))))
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 4000))


@pytest.mark.filterwarnings("ignore")
def test_outputs_that_do_not_fit_send_a_run_back_to_weights() -> None:
    """1,024 rows of 4,000 numbers take 16 MB; a micro-batch of one takes little more than the gradient, 0.8 MB."""
    data = (torch.randn(1024, 5),)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        return outputs.mean(0).square().sum() + outputs.square().mean()

    with simulated_memory("9MB"):
        result = autoaccum.fit(
            wide(), data, effective_batch=1024, training_step=step, steps=2, optimizer=torch.optim.SGD, device="cpu",
            cache=False, progress=False, patience=0,
        )  # fmt: skip
    said = [event.cause for event in result.events if isinstance(event, Notice)]
    assert any("which does not fit" in cause for cause in said)
    assert result.num_steps == 2


class TestNotFinite:
    """A micro-batch without a finite loss, or gradient, may have nothing that a mean is over."""

    def of(self, masks: torch.Tensor, step: Any) -> tuple[list[float], list[float], Any]:
        """Return the losses of an accumulator and of the full batches, and the accumulator."""
        model, plain = mlp(torch.float64), mlp(torch.float64)
        inputs = classes(masks.numel(), torch.float64)[0].reshape(*masks.shape, -1)
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.1), training_step=step, micro_batch=2
        )
        optimizer = torch.optim.SGD(plain.parameters(), 0.1)
        found, wanted = [], []
        for batch in zip(inputs, masks, strict=True):
            found.append(float(accumulator.step(batch)))
            optimizer.zero_grad()
            loss = step(plain, batch)
            loss.backward()
            optimizer.step()
            wanted.append(loss.item())
        return found, wanted, accumulator

    @pytest.mark.parametrize("late", [0, 3])
    @pytest.mark.parametrize("way", ["0 / 0", "a gradient alone", "ZeroDivisionError"])
    def test_it_is_joined(self, way: str, late: int) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            inputs, mask = batch
            losses = model(inputs).square().sum(1) * mask
            number = int(mask.sum()) if way == "ZeroDivisionError" else mask.sum()
            loss = losses.sum() * (1 / number) if way == "ZeroDivisionError" else losses.sum() / number
            return loss.nan_to_num() if way == "a gradient alone" else loss

        masks = torch.ones(5, 8, dtype=torch.float64)
        masks[late, :6] = 0
        found, wanted, accumulator = self.of(masks, step)
        assert found == pytest.approx(wanted, rel=1e-12)
        assert not [event for event in accumulator.events if isinstance(event, Notice)]

    @pytest.mark.filterwarnings("ignore:The loss of window:autoaccum.AutoaccumWarning")
    @pytest.mark.parametrize(("place", "steps"), [(0, [4]), (36, [])])
    def test_where_a_sample_is_at_fault_the_run_goes_on_weighted(self, place: int, steps: list[int]) -> None:
        """Where it is none of the few that are measured, its window is joined, in vain."""
        marked = classes(4 * 64, torch.float64)[0][3 * 64 + place, 0]

        def step(model: Any, batch: Any) -> torch.Tensor:
            losses = model(batch[0]).square().mean(1)
            return torch.where(batch[0][:, 0] == marked, torch.nan, losses).mean()

        found, wanted, accumulator = self.of(torch.ones(4, 64), step)
        assert found[:3] == pytest.approx(wanted[:3], rel=1e-12)
        assert found[3] != found[3]
        assert accumulator.micro_batches == (2,) * 32
        assert accumulator.split_modules is None
        assert [event.step for event in accumulator.events if isinstance(event, Joined)] == steps
