"""The numbers of the README's figure: the drop-in logs the full batch's loss, and no sample is lost."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the script as the scripts next to it do."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("readme_figure")


@pytest.mark.integrations
def test_the_drop_in_logs_the_loss_of_the_full_batch_and_the_stock_trainer_does_not(figure: Any) -> None:
    pytest.importorskip("accelerate")
    found = figure.trainers(figure.QUICK_STEPS)
    assert found.ours.losses == pytest.approx(found.full.losses, abs=1e-4)
    assert found.split.losses[0] == pytest.approx(4 * found.full.losses[0], rel=1e-4)
    for of_trainers in found.summaries.values():
        assert of_trainers["split"]["norm"] == pytest.approx(4, rel=1e-3)
        assert of_trainers["ours"]["norm"] == pytest.approx(1, rel=1e-3)
        assert of_trainers["ours"]["parameters"] < 1e-3 < of_trainers["split"]["parameters"]


def test_a_limit_that_falls_in_mid_step_loses_no_sample(figure: Any) -> None:
    found = figure.memory(12)
    assert found.falls_in == 5
    assert [step for step, _ in found.failures][:1] == [5]
    assert found.times == pytest.approx((1, 1), abs=1e-3)
    assert found.num_samples == 12 * figure.EFFECTIVE_BATCH
    assert found.micro_batches[4] < found.micro_batches[3]
    assert found.weights_differ < 1e-4


def test_counts_tell_a_sample_that_was_trained_twice_from_one_that_was_lost(figure: Any) -> None:
    model = figure.Counting(figure.EFFECTIVE_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=figure.RATE)
    indices = torch.arange(figure.EFFECTIVE_BATCH)
    indices[0] = 1
    inputs = torch.randn(figure.EFFECTIVE_BATCH, figure.FEATURES)
    figure.counted_loss(model, (inputs, torch.zeros(figure.EFFECTIVE_BATCH, dtype=torch.long), indices)).backward()
    optimizer.step()
    assert model.times_trained()[:3].tolist() == pytest.approx([0, 2, 1])


def test_both_pictures_are_drawn_as_svg(figure: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    full, split = (figure.Logged([loss, loss / 2], [loss, loss], torch.ones(1)) for loss in (0.7, 2.8))
    found = figure.Numbers(figure.Trainers(full, split, full, {}), figure.memory(12))
    for name, theme in (("light", figure.LIGHT), ("dark", figure.DARK)):
        figure.draw(found, tmp_path / f"{name}.svg", theme)
        text = (tmp_path / f"{name}.svg").read_text()
        assert theme.text in text
        assert theme.ours in text
        assert len(text) < 150_000
