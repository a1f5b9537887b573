"""Pictures of a study, by what is in their axes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.ticker import EngFormatter
from optuna.distributions import CategoricalDistribution

from autoaccum.events import Validated
from autoaccum.reporting.plots import svg
from autoaccum.sweeps.facts import facts_of
from autoaccum.sweeps.plots import pictures
from autoaccum.sweeps.studies import runs_of
from tests.reporting.synthetic import report, write
from tests.sweeps.studies import law, running, study, trial


def drawn(*trials: Any, importances: dict[str, float] | None = None, **options: Any) -> dict[str, Axes]:
    found = pictures(facts_of(study(*trials, **options)), {}, importances or {})
    return {name: figure.axes[0] for name, figure in found.items()}


def line(axes: Axes, label: str) -> Any:
    (found,) = (one for one in axes.lines if str(one.get_label()).startswith(label))
    return found


def validated(step: int, loss: float, **metrics: float) -> Validated:
    return Validated(step=step, epoch=0, loss=loss, metrics=metrics, num_samples=5, micro_batch=3, seconds=1.0)


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
    assert axes.figure.axes[1].get_ylabel() == "validation loss (lower is better)"


def test_the_better_is_the_brighter() -> None:
    values = (0.1, 0.15, 0.7, 0.8, 0.9)
    trials = [trial(value, 0.1 * at, 64) for at, value in enumerate(values, start=1)]
    brightness = {}
    for direction in ("minimize", "maximize"):
        axes = drawn(*trials, metric=("top_5",), direction=(direction,))["map"]
        (points,) = axes.collections
        colours = points.to_rgba(np.array(values))[:, :3].sum(1)
        brightness[direction] = colours.tolist()
        assert axes.get_title(loc="left") == "Top 5 by lr and effective batch"
    assert brightness["minimize"] == sorted(brightness["minimize"], reverse=True)
    assert brightness["maximize"] == sorted(brightness["maximize"])
    assert isinstance(points.norm, Normalize)
    assert not isinstance(points.norm, LogNorm), "differences between the best would be lost"
    assert (points.norm.vmin, points.norm.vmax) == (pytest.approx(np.percentile(values, 10)), 0.9)
    assert axes.figure.axes[1].get_ylabel() == "top 5 (higher is better)"
    assert line(axes, "best: trial 4, 0.9").get_xydata().tolist() == [[64, 0.5]]


def test_values_that_are_alike_are_the_best_there_are() -> None:
    for direction, ends in (("minimize", (0.5, 1.5)), ("maximize", (-0.5, 0.5))):
        (points,) = drawn(trial(0.5), trial(0.5, 0.2), direction=(direction,))["map"].collections
        assert (points.norm.vmin, points.norm.vmax) == ends


def test_a_trial_that_was_stopped_is_on_the_map() -> None:
    axes = drawn(trial(None, 0.5, 64, stopped=True), trial(0.5))["map"]
    assert line(axes, "pruned or stopped").get_xydata().tolist() == [[64, 0.5]]


def test_many_batches_have_ticks_at_powers_of_two() -> None:
    from optuna.distributions import IntDistribution

    space: dict[str, Any] = {"effective_batch": IntDistribution(10, 100)}
    axes = drawn(*(trial(lr, lr, batch, space=space) for batch in range(20, 40, 2) for lr in (0.1, 0.2)))["map"]
    assert axes.get_xticks().tolist() == [8, 16, 32, 64, 128]


def test_the_axes_show_all_that_was_searched() -> None:
    tried = [trial(value, lr, batch) for value, lr in ((0.5, 0.05), (0.4, 0.1), (0.6, 0.2)) for batch in (16, 64)]
    found = drawn(*tried)
    for name in ("map", "best-lr"):
        low, high = found[name].get_xlim()
        assert low < 16 < 256 < high < 512
        assert found[name].get_xticks().tolist() == [16, 64, 256]
        low, high = found[name].get_ylim()
        assert 1e-5 < low < 1e-4 < 1 < high < 10


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
        trial(0.5, reports={500: 2.0, 1000: 0.5}), trial(0.7), trial(None, reports={100: 9.0}), trial(None, reports={})
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
    formatters = {name: figures[name].axes[0].xaxis.get_major_formatter() for name in ("loss", "loss-seconds")}
    assert isinstance(formatters["loss"], EngFormatter)
    assert not isinstance(formatters["loss-seconds"], EngFormatter), "500m would be half a second"


def curves(axes: Axes) -> list[Any]:
    return [one.get_xydata().tolist() for one in axes.lines]


def test_a_metric_of_validations_has_curves_beside_the_loss(tmp_path: Path) -> None:
    trials = [trial(0.9, directory="d", reports={4: 0.8, 10: 0.9}), trial(None, directory="d", reports={4: 0.3})]
    made = study(*trials, metric=("accuracy",), direction=("maximize",))
    facts = facts_of(made)
    assert pictures(facts, {}, {}).keys() == {"map", "metric"}, "what they report is no loss"
    (tmp_path / "id").write_text("d")
    write(tmp_path / "trial-0000", report(1, seconds=2.0), report(2, seconds=5.0), validated(2, 0.25, accuracy=0.85))
    write(tmp_path / "trial-0001", report(1, seconds=3.0), validated(1, 0.75))
    figures = pictures(facts, runs_of(made, tmp_path), {})
    assert figures.keys() == {"map", "metric", "metric-seconds", "loss", "loss-seconds"}
    axes = {name: figure.axes[0] for name, figure in figures.items()}
    assert curves(axes["metric"]) == [[[4, 0.3]], [[4, 0.8], [10, 0.9]]]
    assert curves(axes["metric-seconds"]) == [[[7.0, 0.85]]]
    assert curves(axes["loss"]) == [[[8, 0.75]], [[16, 0.25]]]
    assert curves(axes["loss-seconds"]) == [[[3.0, 0.75]], [[7.0, 0.25]]]
    assert line(axes["metric"], "best: trial 0, 0.9").get_xydata().tolist() == [[4, 0.8], [10, 0.9]]
    assert line(axes["loss"], "best accuracy: trial 0, 0.9").get_xydata().tolist() == [[16, 0.25]]
    titles = {name: axes[name].get_title(loc="left") for name in ("metric", "metric-seconds", "loss")}
    assert titles == {
        "metric": "Accuracy over samples",
        "metric-seconds": "Accuracy over seconds of training",
        "loss": "Validation loss over samples",
    }


def test_a_metric_that_is_maximised_has_no_logarithmic_axis() -> None:
    trials = [trial(0.9, reports={at: at / 1000 for at in range(10, 1000)}), trial(0.5, reports={10: 0.01})]
    for direction, scale in (("maximize", "linear"), ("minimize", "log")):
        assert drawn(*trials, metric=("accuracy",), direction=(direction,))["metric"].get_yscale() == scale


def test_trials_of_seconds_have_reported_losses() -> None:
    axes = drawn(trial(2.0, reports={500: 0.5}), metric=("seconds",))
    assert axes.keys() == {"map", "loss"}
    assert line(axes["loss"], "best seconds: trial 0, 2").get_xydata().tolist() == [[500, 0.5]]


def test_curves_of_several_metrics_are_from_the_trials_records(tmp_path: Path) -> None:
    trials = [trial(values, directory="d", reports={}) for values in ((0.9, 9.0), (0.8, 9.5))]
    made = study(*trials, metric=("accuracy", "seconds"), direction=("maximize", "minimize"))
    (tmp_path / "id").write_text("d")
    for number, (loss, accuracy) in enumerate(((0.3, 0.9), (60.0, float("nan")))):
        said = validated(1, loss, accuracy=accuracy)
        write(tmp_path / f"trial-{number:04d}", report(1, seconds=2.0), said)
    figures = pictures(facts_of(made), runs_of(made, tmp_path), {})
    assert curves(figures["metric"].axes[0]) == [[[8, 0.9]]]
    assert curves(figures["metric-seconds"].axes[0]) == [[[2.0, 0.9]]]
    assert curves(figures["loss"].axes[0]) == [[[8, 60.0]], [[8, 0.3]]]
    assert figures["loss"].axes[0].get_yscale() == "log", "losses are not what is maximised"
    other = study(*trials, metric=("recall", "seconds"), direction=("maximize", "minimize"))
    figures = pictures(facts_of(other), runs_of(other, tmp_path), {})
    assert figures.keys() == {"map", "loss", "loss-seconds", "front-seconds"}


@pytest.mark.parametrize(
    ("direction", "front", "steps", "corner"),
    [
        (("minimize", "minimize"), [[1.0, 0.3], [2.0, 0.1]], "steps-post", "lower left"),
        (("minimize", "maximize"), [[2.0, 0.1], [2.5, 0.5], [4.0, 0.7]], "steps-pre", "lower right"),
        (("maximize", "minimize"), [[1.0, 0.3], [2.5, 0.5], [3.0, 0.9]], "steps-post", "upper left"),
        (("maximize", "maximize"), [[3.0, 0.9], [4.0, 0.7]], "steps-pre", "upper right"),
    ],
)
def test_a_front_has_its_corner(direction: tuple[str, str], front: list[list[float]], steps: str, corner: str) -> None:
    values = ((0.3, 1.0), (0.1, 2.0), (0.9, 3.0), (0.7, 4.0), (0.5, 2.5))
    axes = drawn(*map(trial, values), metric=("validation_loss", "recall"), direction=direction)["front-recall"]
    found = line(axes, "Pareto front")
    assert (found.get_xydata().tolist(), found.get_drawstyle()) == (front, steps)
    assert len(line(axes, "beaten").get_xydata()) == 5 - len(front)
    assert axes.get_title(loc="left") == f"Pareto front: validation loss and recall, best at the {corner}"
    better = {"minimize": "lower", "maximize": "higher"}
    assert axes.get_ylabel() == f"validation loss ({better[direction[0]]} is better)"
    assert axes.get_xlabel() == f"recall ({better[direction[1]]} is better)"


def test_the_best_of_a_front_are_in_its_axes_however_odd() -> None:
    trials = [trial((0.5 + at / 1e4, at / 1e3)) for at in range(300)]
    axes = drawn(*trials, trial((0.99, 9.0)), metric=("val_F1", "seconds"), direction=("maximize", "minimize"))
    assert axes["front-seconds"].get_ylim()[1] >= 0.99
    assert axes["map"].get_title(loc="left") == "val F1 by lr and effective batch"


def test_a_front_below_zero_has_no_logarithmic_axis() -> None:
    many = [trial((0.01 * 1.05**at, 1.0)) for at in range(250)]
    for lowest, scale in ((0.005, "log"), (-0.005, "linear")):
        axes = drawn(*many, trial((lowest, 2.0)), metric=("validation_loss", "seconds"))["front-seconds"]
        assert axes.get_yscale() == scale


def test_a_front_leaves_out_what_is_not_finite() -> None:
    inf = float("inf")
    empty = drawn(trial((-inf, 0.0)), trial((0.5, 2.0)), metric=("a", "b"))["front-b"]
    assert len(line(empty, "beaten").get_xydata()) == 1
    axes = drawn(trial((inf, 1.0)), trial((0.5, 2.0)), metric=("validation_loss", "seconds"))["front-seconds"]
    assert line(axes, "Pareto front").get_xydata().tolist() == [[2.0, 0.5]]
    assert "front-seconds" not in drawn(trial((inf, 1.0)), metric=("validation_loss", "seconds"))


def test_several_metrics_have_a_front(tmp_path: Path) -> None:
    trials = [trial(values, directory="d", reports={}) for values in ((0.5, 9.0), (0.6, 9.5), (0.1, 20.0), (0.7, 1.0))]
    made = study(*trials, metric=("validation_loss", "seconds"))
    (tmp_path / "id").write_text("d")
    write(tmp_path / "trial-0000", report(1), validated(1, 0.5))
    figures = pictures(facts_of(made), runs_of(made, tmp_path), {})
    axes = figures["front-seconds"].axes[0]
    assert line(axes, "Pareto front").get_xydata().tolist() == [[1.0, 0.7], [9.0, 0.5], [20.0, 0.1]]
    assert line(axes, "Pareto front").get_drawstyle() == "steps-post"
    assert line(axes, "beaten").get_xydata().tolist() == [[9.5, 0.6]]
    assert [text.get_text() for text in axes.texts] == ["3", "0", "2"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "seconds (lower is better)",
        "validation loss (lower is better)",
    )
    assert figures["loss"].axes[0].lines[0].get_xydata().tolist() == [[8, 0.5]], "Optuna has no reports of these"
    two = drawn(trial((1.0, 2.0), 0.1), trial((2.0, 1.0), 0.2), metric=("validation_loss", "seconds"))
    assert two["best-lr"].get_title(loc="left") == "Best lr of each effective batch, by validation loss"
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
        ([trial(None, reports={})], {"map"}),
        ([trial(None)] * 2, {"map", "loss"}),
        ([trial(0.5)], {"map", "loss"}),
        ([trial(float("inf"), reports={1: float("nan")})], {"map"}),
        ([trial(value, reports={1: value}) for value in (float("inf"), float("-inf"), 1e300)], {"map", "loss"}),
        ([trial(0.5, 0.0, space={"lr": CategoricalDistribution([0.0])})], {"loss"}),
        ([trial(0.5, None, None)] * 2, {"loss"}),
        ([trial(0.5, lr, None) for lr in (0.1, 0.2)], {"loss"}),
    ],
)
def test_what_there_is_nothing_of_has_no_picture(trials: list[Any], names: set[str]) -> None:
    for direction in ("minimize", "maximize"):
        figures = pictures(facts_of(study(*trials, direction=(direction,))), {}, {})
        assert figures.keys() == names
        assert all(svg(figure, salt=name) for name, figure in figures.items())


def test_in_a_page_they_need_no_file() -> None:
    trials = [trial(number / 100, 0.001 * number, 16) for number in range(1, 40)]
    text = svg(pictures(facts_of(study(*trials)), {}, {})["map"], salt="map")
    assert "currentColor" in text
    assert not re.search(r"<image|href=\"(?!#)", text)
