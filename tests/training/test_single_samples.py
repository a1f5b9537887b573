"""What cannot be computed of a single sample is computed of two; every other error comes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.events import Notice, Replanned
from tests.devices import DEVICE
from tests.models import same

Model = Callable[[], nn.Module]


class Squeezed(nn.Module):
    """Loses the dimension of the samples where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).squeeze()


class Normalised(Squeezed):
    """Has no BatchNorm that could be found among its modules."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(self.linear(inputs), None, None, training=True)


class Broken(Squeezed):
    """Cannot be computed of any number of samples."""

    is_mended = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs if self.is_mended else inputs.T)


class Picky(Squeezed):
    """Says by itself what it does not take."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 1:
            raise ValueError("one is too few")
        return self.linear(inputs)


def data(count: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.arange(count) % 2


def train(model: nn.Module, **options: Any) -> tuple[list[Any], autoaccum.FitResult]:
    events: list[Any] = []
    result = autoaccum.fit(
        model, data(), effective_batch=8, loss_fn=functional.cross_entropy, steps=3, shuffle=False, device=DEVICE,
        callbacks=[events.append], progress=False, **options,
    )  # fmt: skip
    return events, result


@pytest.mark.device(every=2)
@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}, {"max_micro_batch": 1}, {"max_micro_batch": 7}])
def test_two_are_taken(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, whole = Squeezed(), Squeezed()
    whole.load_state_dict(model.state_dict())
    events, result = train(model, **options)
    train(whole, micro_batch=8)
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    assert min(min(report.micro_batches) for report in result.history) >= 2
    told = [event for event in events if isinstance(event, Replanned)]
    assert [event.step for event in told] == [1]
    assert told[0].reason.startswith("a single sample cannot be computed: RuntimeError: size mismatch")
    assert not [event for event in events if isinstance(event, Notice)]


@pytest.mark.device
def test_what_is_left_of_a_window_is_not_one_sample() -> None:
    _, result = train(Squeezed(), micro_batch=7)
    assert [report.micro_batches for report in result.history] == [(4, 4)] * 3


@pytest.mark.weighted
@pytest.mark.device
@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")
def test_functional_batch_norm_is_announced_instead_of_failing() -> None:
    events, result = train(Normalised(), micro_batch=1)
    assert [report.micro_batches for report in result.history] == [(2, 2, 2, 2)] * 3
    assert any(isinstance(event, Notice) for event in events)


@pytest.mark.device
@pytest.mark.parametrize("micro_batch", [1, "auto"])
def test_an_error_of_any_size_comes_through_and_says_nothing_of_single_samples(micro_batch: Any) -> None:
    events: list[Any] = []
    model = Broken()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        autoaccum.fit(
            model, data(), effective_batch=8, micro_batch=micro_batch, loss_fn=functional.cross_entropy, steps=1,
            device=DEVICE, callbacks=[events.append], progress=False,
        )  # fmt: skip
    assert not [event for event in events if isinstance(event, Replanned)]
    assert same(before, list(model.parameters()))


@pytest.mark.weighted
def test_what_is_raised_by_hand_is_tried_with_two() -> None:
    _, result = train(Picky(), micro_batch=1)
    assert {report.micro_batches for report in result.history} == {(2,) * 4}


def test_an_accumulator_that_failed_for_another_reason_goes_on_in_single_samples() -> None:
    model = Broken()
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=1, loss_fn=functional.cross_entropy
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        accumulator.step(data(8))
    model.is_mended = True
    accumulator.step(data(8))
    assert accumulator.micro_batches == (1,) * 8


@pytest.mark.device
@pytest.mark.parametrize("model", [Squeezed, Picky])
@pytest.mark.parametrize("options", [{"effective_batch": 24}, {"max_micro_batch": 7}])
def test_a_probe_takes_two(options: dict[str, Any], model: Model) -> None:
    report = autoaccum.probe(model(), data(), loss_fn=functional.cross_entropy, device=DEVICE, **options)
    assert report.max_micro_batch == options.get("max_micro_batch", 24)
    assert min(trial.micro_batch for trial in report.trials) == 2


@pytest.mark.parametrize(("model", "options"), [(Broken, {}), (Squeezed, {"max_micro_batch": 1})])
def test_a_probe_lets_other_errors_through(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        autoaccum.probe(model(), data(), loss_fn=functional.cross_entropy, device=DEVICE, **options)
