"""Law 4 for what ``fit`` reports and follows besides: norms, noise, schedules, metrics, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.events import StepReport, StepSkipped, Validated
from autoaccum.step.step import Step
from autoaccum.testing import oom_at
from autoaccum.training.trainer import Trainer
from tests.distributed.launching import launch
from tests.faults import sizes
from tests.laws.test_laws_ranks import data, net, rank
from tests.processes import in_turn

pytestmark = in_turn


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return whether each target that counts was hit."""
    return (outputs.argmax(1) == targets)[targets != -100].double()


# Of single samples, micro-batches are the same on any number of ranks, and so is what noise is estimated from.
RUNS: dict[str, dict[str, Any]] = {
    "clipped, with the noise measured": {"noise_scale": True, "clip_norm": 0.3, "micro_batch": 1, "epochs": 2},
    "a ramp": {"effective_batch": "linear 2:8 over 3", "lr_scaling": "linear", "base_batch": 4, "epochs": 1},
    "as the noise has it": {"effective_batch": "noise 6:24", "micro_batch": 1, "epochs": None, "samples": 360},
    "metrics": {
        "validation_data": data(31), "metrics": {"right": right}, "validate_every": 50, "epochs": 1, "clip_norm": 5.0,
    },
    "a scheduler": {
        "lr_scheduler": lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        "drop_last": True, "epochs": 2,
    },
}  # fmt: skip
FIELDS = ("effective_batch", "num_samples", "loss", "lr", "grad_norm", "noise_scale", "gradient_squared")
FIELDS += ("gradient_variance",)


class Seen(NamedTuple):
    """What a run leaves, that can be sent."""

    weights: torch.Tensor
    reports: list[tuple[Any, ...]]
    validations: list[tuple[Any, ...]]
    skipped: list[int]
    scale: float | None


def trained(**options: Any) -> Seen:
    given: dict[str, Any] = {"model": net(), "data": data(), "effective_batch": 23, "micro_batch": 4, "device": "cpu"}
    given |= {"loss_fn": cross_entropy, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2)}
    trainer = Trainer(**{**given, "progress": False, "cache": False, **options})
    result = trainer.fit()
    scaler = trainer._step.transaction.scaler
    return Seen(
        torch.cat([p.detach().flatten() for p in result.model.parameters()]),
        [tuple(getattr(report, field) for field in FIELDS) for report in result.history],
        [(e.step, e.num_samples, e.loss, *e.metrics.values()) for e in result.events if isinstance(e, Validated)],
        [event.step for event in result.events if isinstance(event, StepSkipped)],
        None if scaler is None else scaler.get_scale(),
    )


def all_runs() -> dict[str, Seen]:
    return {name: trained(**options) for name, options in RUNS.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Seen]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


def assert_near(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]], name: str) -> None:
    assert len(found) == len(expected), name
    for mine, theirs in zip(found, expected, strict=True):
        assert [value is None for value in mine] == [value is None for value in theirs], name
        numbers = [value for value in theirs if value is not None]
        assert [value for value in mine if value is not None] == pytest.approx(numbers, rel=1e-8, nan_ok=True), name


@sizes(2, 3)
def test_ranks_report_and_follow_what_one_does(size: int, alone: dict[str, Seen]) -> None:
    assert any(report[5] for report in alone["clipped, with the noise measured"].reports), "there is noise to compare"
    assert len({report[0] for report in alone["as the noise has it"].reports[:-1]}) > 1, "the batch has grown"
    assert len(alone["metrics"].validations) == 2
    first, *others = launch(all_runs, size)
    for name, one in alone.items():
        for other in others:
            assert torch.equal(first[name].weights, other[name].weights), name
            assert first[name].validations == other[name].validations
            assert_near(other[name].reports, first[name].reports, name)
        torch.testing.assert_close(first[name].weights, one.weights, rtol=1e-10, atol=1e-12)
        assert_near(first[name].reports, one.reports, name)
        assert_near(first[name].validations, one.validations, name)


OVERFLOWING = 2
"""The window in which something overflows, counted from 0."""


def halves(**options: Any) -> Seen:
    """Train in 16 bits, with a sample that overflows in the last row of a window: in the share of the last rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    inputs, labels = data(92)
    inputs[OVERFLOWING * 23 + 22, 0] = 1e30
    labels[OVERFLOWING * 23 + 22] = 1
    given = {"model": model, "data": (inputs.float(), labels), "shuffle": False, "precision": "fp16", "epochs": 1}
    return trained(**{**given, "clip_norm": 0.5, **options})


def halves_with_a_fault(of_rank: int, operation: int) -> Seen:
    calls = 0

    def count(record: Any) -> None:
        nonlocal calls
        calls += isinstance(record, StepReport)

    run = Step.run

    def faulty(self: Step, window: Any, plan: Any = None) -> Any:
        is_meant = calls == OVERFLOWING and rank() == of_rank
        with oom_at(operation if is_meant else 10**6):
            return run(self, window, plan)

    Step.run = faulty  # type: ignore[method-assign]
    try:
        return halves(callbacks=[count])
    finally:
        Step.run = run  # type: ignore[method-assign]


def in_halves(place: str) -> list[Seen]:
    runs = [halves(), halves(clip_norm=None), halves(compression="bf16"), halves(noise_scale=True)]
    runs += [halves_with_a_fault(of_rank, operation) for of_rank in (0, 1) for operation in (5, 60)]
    for steps in (OVERFLOWING + 1, OVERFLOWING + 2):
        resumed = halves(epochs=None, steps=steps, run_dir=place)
    return [*runs, resumed]


def test_an_overflow_on_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    ((one, *_),) = launch(in_halves, 1, str(tmp_path / "alone"))
    assert one.skipped == [OVERFLOWING + 1]
    assert one.scale == 2.0**15
    first, second = launch(in_halves, 2, str(tmp_path / "run"))
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine.weights, theirs.weights), "to the bit"
        assert mine.weights.isfinite().all()
        assert mine.scale == theirs.scale == one.scale
    for found in (*first[:-1], *second[:-1]):
        assert found.skipped == one.skipped
    for found in (first[0], *first[4:]):
        torch.testing.assert_close(found.weights, one.weights, rtol=1e-2, atol=1e-3)
    assert torch.equal(first[-1].weights, first[0].weights), "of a run that went on after the step that was skipped"
