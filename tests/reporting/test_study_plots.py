"""Pictures of a study, by what is in their axes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from autoaccum.events import Validated
from autoaccum.reporting.plots import svg
from autoaccum.reporting.study import facts_of, runs_of
from autoaccum.reporting.study_plots import pictures
from tests.reporting.studies import law, running, study, trial
from tests.reporting.synthetic import report, write


def drawn(*trials: Any, importances: dict[str, float] | None = None, **options: Any) -> dict[str, Axes]:
    found = pictures(facts_of(study(*trials, **options)), {}, importances or {})
    return {name: figure.axes[0] for name, figure in found.items()}


def line(axes: Axes, label: str) -> Any:
    (found,) = (one for one in axes.lines if str(one.get_label()).startswith(label))
    return found


def validated(step: int, loss: float) -> Validated:
    return Validated(step=step, epoch=0, loss=loss, num_samples=5, micro_batch=3, seconds=1.0)


def test_the_map() -> None:
    trials = [trial(0.5, 0.1, 16), trial(0.25, 0.01, 64), trial(30.0, 0.9, 256), trial(None, 0.5, 64)]
    axes = drawn(*trials, trial(None, 0.6, 16, diverged=True), running())["map"]
    (points,) = axes.collections
    assert points.get_offsets().tolist() == [[64, 0.01], [16, 0.1], [256, 0.9]]
    assert points.get_array().tolist() == [0.25, 0.5, 30.0]
    assert isinstance(points.norm, LogNorm)
    assert (points.norm.vmin, points.norm.vmax) == (0.25, pytest.approx(np.percentile([0.25, 0.5, 30.0], 90)))
    pruned = line(axes, "pruned")
    assert (pruned.get_xydata().tolist(), pruned.get_markerfacecolor()) == ([[64, 0.5]], "none")
    assert line(axes, "did not fit").get_xydata().tolist() == [[16, 0.6]]
    assert line(axes, "best: trial 1, 0.25").get_xydata().tolist() == [[64, 0.01]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xticks().tolist() == [16, 64, 256]


def test_many_batches_have_ticks_at_powers_of_two() -> None:
    from optuna.distributions import IntDistribution

    space: dict[str, Any] = {"effective_batch": IntDistribution(10, 100)}
    axes = drawn(*(trial(lr, lr, batch, space=space) for batch in range(20, 40, 2) for lr in (0.1, 0.2)))["map"]
    assert axes.get_xticks().tolist() == [16, 32, 64]


def test_the_rules_go_through_the_middle_of_the_best() -> None:
    axes = drawn(*law(0.75))["best-lr"]
    middle = 0.001 * 64**0.75
    for label, power in (("square root", 0.5), ("linear", 1.0), ("fitted: power 0.75", 0.75)):
        x, y = line(axes, label).get_data()
        assert np.exp(np.log(y).mean()) == pytest.approx(middle)
        assert np.diff(np.log(y)) == pytest.approx(power * np.diff(np.log(x)))
    x, y = line(axes, "best").get_data()
    assert (x.tolist(), y.tolist()) == ([16, 64, 256], pytest.approx([0.001 * batch**0.75 for batch in (16, 64, 256)]))


def test_a_best_lr_at_the_edge_is_hollow() -> None:
    axes = drawn(trial(1.0, 0.1), trial(2.0, 0.2))["best-lr"]
    assert line(axes, "best, at the edge").get_markerfacecolor() == "none"
    assert "linear" not in [one.get_label() for one in axes.lines], "one batch has no slope"


def test_the_loss_over_samples() -> None:
    axes = drawn(
        trial(0.5, losses={500: 2.0, 1000: 0.5}), trial(0.7), trial(None, losses={100: 9.0}), trial(None, losses={})
    )["loss"]
    best = line(axes, "best: trial 0")
    assert best.get_xydata().tolist() == [[500, 2.0], [1000, 0.5]]
    assert best.get_linewidth() > 1.5 * line(axes, "complete").get_linewidth()
    assert line(axes, "others").get_linestyle() == "--"
    assert len(axes.lines) == 3


def test_the_loss_over_seconds_is_from_the_trials_records(tmp_path: Path) -> None:
    made = study(trial(0.5, directory="d"), trial(0.7, directory="d"), trial(0.1))
    (tmp_path / "id").write_text("d")
    write(tmp_path / "trial-0000", report(1, seconds=2.0), report(2, seconds=5.0), validated(2, 0.5))
    write(tmp_path / "trial-0001", report(1, seconds=3.0), validated(1, 0.7))
    figures = pictures(facts_of(made), runs_of(made, tmp_path), {})
    axes = figures["loss-seconds"].axes[0]
    assert [one.get_xydata().tolist() for one in axes.lines] == [[[7.0, 0.5]], [[3.0, 0.7]]]
    assert axes.get_xlabel() == "seconds"
    assert figures["loss"].axes[0].get_xlabel() == "samples"


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    trials = [trial(values, directory="d", losses={}) for values in ((0.5, 9.0), (0.6, 9.5), (0.1, 20.0), (0.7, 1.0))]
    made = study(*trials, metric=("validation_loss", "seconds"))
    (tmp_path / "id").write_text("d")
    write(tmp_path / "trial-0000", report(1), validated(1, 0.5))
    figures = pictures(facts_of(made), runs_of(made, tmp_path), {})
    axes = figures["front-seconds"].axes[0]
    assert line(axes, "Pareto front").get_xydata().tolist() == [[1.0, 0.7], [9.0, 0.5], [20.0, 0.1]]
    assert line(axes, "Pareto front").get_drawstyle() == "steps-post"
    assert line(axes, "beaten").get_xydata().tolist() == [[9.5, 0.6]]
    assert [text.get_text() for text in axes.texts] == ["3", "0", "2"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds", "validation_loss")
    assert figures["loss"].axes[0].lines[0].get_xydata().tolist() == [[8, 0.5]], "Optuna has no reports of these"
    three = drawn(
        *(trial((a, b, 1.0)) for a, b in ((1.0, 2.0), (2.0, 1.0))), metric=("validation_loss", "seconds", "samples")
    )
    assert {"front-seconds", "front-samples"} <= three.keys()
    assert line(three["front-seconds"], "Pareto front").get_linestyle() == "None"


def test_importance() -> None:
    axes = drawn(trial(0.5), importances={"lr": 0.25, "effective_batch": 0.75})["importance"]
    assert [patch.get_width() for patch in axes.patches] == [0.25, 0.75], "the greatest is on top"
    assert [text.get_text() for text in axes.texts] == ["25%", "75%"]


@pytest.mark.parametrize(
    ("trials", "names"),
    [
        ([], set()),
        ([running()], set()),
        ([trial(None, losses={})], {"map"}),
        ([trial(None)] * 2, {"map", "loss"}),
        ([trial(0.5)], {"map", "loss"}),
        ([trial(float("inf"), losses={1: float("nan")})], {"map", "loss"}),
        ([trial(0.5, lr, None) for lr in (0.1, 0.2)], {"loss"}),
    ],
)
def test_what_there_is_nothing_of_has_no_picture(trials: list[Any], names: set[str]) -> None:
    figures = pictures(facts_of(study(*trials)), {}, {})
    assert figures.keys() == names
    assert all(svg(figure, salt=name) for name, figure in figures.items())


def test_in_a_page_they_need_no_file() -> None:
    trials = [trial(number / 100, 0.001 * number, 16) for number in range(1, 40)]
    text = svg(pictures(facts_of(study(*trials)), {}, {})["map"], salt="map")
    assert "currentColor" in text
    assert not re.search(r"<image|href=\"(?!#)", text)
