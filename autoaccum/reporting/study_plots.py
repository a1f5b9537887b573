"""Pictures of a sweep, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from autoaccum.reporting.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, STYLE, Values, scale_loss, thinned
from autoaccum.reporting.runs import Run
from autoaccum.reporting.study import StudyFacts, TrialFacts, shown

Curve = tuple[Values, Values]

_COLOURS = "viridis"
_FAINT = 0.35
_BARS = 12
"""Most bars of a picture."""


def pictures(facts: StudyFacts, runs: Mapping[int, Run], importances: Mapping[str, float]) -> dict[str, Figure]:
    """The pictures of a study by their names; of what it has not searched, or has not got to, there are none.

    Args:
        facts: of the study.
        runs: what trials have recorded, by their numbers.
        importances: shares of parameters, which sum to 1.
    """
    found: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        if any(trial.place for trial in facts.trials):
            found["map"] = _drawn(f"{_what(facts)} by lr and effective batch", _draw_map, facts)
        if facts.best_lrs:
            found["best-lr"] = _drawn("Best lr of each effective batch", _draw_best_lrs, facts)
        validated = {number: run for number, run in runs.items() if len(run.events["Validated"]["step"])}
        # Of several metrics Optuna takes no reports.
        over_samples = {number: _validated(run, over_seconds=False) for number, run in validated.items()}
        over_samples |= {trial.number: _columns(trial.losses) for trial in facts.trials if trial.losses}
        over_seconds = {number: _validated(run, over_seconds=True) for number, run in validated.items()}
        for name, title, curves in (
            ("loss", "Validation loss over samples", over_samples),
            ("loss-seconds", "Validation loss over seconds of training", over_seconds),
        ):
            if curves:
                with _axes(title) as (figure, axes):
                    _draw_curves(axes, facts, curves)
                    axes.set_xlabel(name.partition("-")[2] or "samples")
                found[name] = figure
        for at, name in enumerate(facts.metrics[1:], start=1):
            if facts.best:
                with _axes(f"Pareto front: {facts.metrics[0]} and {name}") as (figure, axes):
                    _draw_front(axes, facts, at)
                found[f"front-{name}"] = figure
        if importances:
            with _axes(f"Importance of parameters for {_what(facts).lower()}") as (figure, axes):
                _draw_importances(axes, importances)
            found["importance"] = figure
    return found


def _drawn(title: str, draw: Callable[[Axes, StudyFacts], None], facts: StudyFacts) -> Figure:
    with _axes(title) as (figure, axes):
        draw(axes, facts)
        _scale_batches(axes, [trial.place[0] for trial in facts.trials if trial.place])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=10))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylabel("lr")
    return figure


@contextmanager
def _axes(title: str) -> Iterator[tuple[Figure, Axes]]:
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_title(title, pad=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=5, handlelength=1.6)


def _scale_batches(axes: Axes, batches: Sequence[int]) -> None:
    """Ticks where there are trials, or at powers of two."""
    low, high = min(batches), max(batches)
    axes.set_xscale("log", base=2)
    places = sorted(set(batches))
    if len(places) > 8:
        places = [2**power for power in range(low.bit_length() - 1, high.bit_length() + 1)]
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(low / 1.4, high * 1.4)
    axes.set_xlabel("effective batch")


def _draw_map(axes: Axes, facts: StudyFacts) -> None:
    placed = [trial for trial in facts.trials if trial.place]
    for states, marker, label in (
        (("pruned",), "o", "pruned"),
        (("did not fit", "diverged", "failed"), "x", "did not fit, diverged or failed"),
        (("running",), "+", "running"),
    ):
        if some := [trial for trial in placed if trial.state in states]:
            axes.plot(*_places(some), label=label, **_mark(marker, GREY, size=6))
    complete = [trial for trial in placed if trial.values and np.isfinite(trial.values[0])]
    if not complete:
        return
    values = np.array([trial.values[0] for trial in complete])
    # One that is far worse than others would leave all of these the same colour.
    low, high = float(values.min()), float(np.percentile(values, 90))
    wide = low > 0 and high > 4 * low
    norm = LogNorm(low, high) if wide else Normalize(low, high if high > low else low + 1)
    drawn = axes.scatter(
        *_places(complete),
        c=values,
        norm=norm,
        cmap=matplotlib.colormaps[_COLOURS].reversed().resampled(32),
        s=60,
        edgecolors=INK,
        linewidths=0.6,
        zorder=3,
    )
    bar = axes.figure.colorbar(drawn, ax=axes, pad=0.02, extend="max" if values.max() > high else "neither")
    bar.outline.set_visible(False)
    if wide:
        bar.locator = LogLocator(subs=(1.0, 2.0, 5.0), numticks=8)
        bar.minorlocator = NullLocator()
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.update_ticks()
    best = [trial for trial in complete if trial.number in facts.best[: 1 if len(facts.metrics) == 1 else None]]
    axes.plot(*_places(best), zorder=4, label=_of_best(facts), **_mark("o", RED, size=14))


def _draw_best_lrs(axes: Axes, facts: StudyFacts) -> None:
    axes.plot(
        *_places([trial for trial in facts.trials if trial.values]),
        "o",
        color=GREY,
        alpha=_FAINT,
        markersize=4,
        label="complete trials",
    )
    x, y = np.array([(best.effective_batch, best.lr) for best in facts.best_lrs]).T
    if (growth := facts.growth) is not None:
        # Through the middle of the points, as the fitted line is.
        span = np.array([x.min() / 1.3, x.max() * 1.3])
        middle, height = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
        axes.plot(span, height * (span / middle) ** 0.5, "--", color=GREEN, label="square root")
        axes.plot(span, height * (span / middle), ":", color=PURPLE, linewidth=1.8, label="linear")
        fitted = growth.factor * span**growth.exponent
        axes.plot(span, fitted, color=BLUE, label=f"fitted: power {growth.exponent:.2f}")
    edge = np.array([best.is_edge for best in facts.best_lrs])
    for which, face, label in ((~edge, ORANGE, "best"), (edge, "none", "best, at the edge of what was tried")):
        if which.any():
            axes.plot(x[which], y[which], zorder=3, label=label, **_mark("D", ORANGE, size=8, face=face))


def _draw_curves(axes: Axes, facts: StudyFacts, curves: Mapping[int, Curve]) -> None:
    state_of = {trial.number: trial.state for trial in facts.trials}
    labelled: set[str] = set()
    best = [number for number in facts.best[: 1 if len(facts.metrics) == 1 else None] if number in curves]
    for number, (x, y) in sorted(curves.items()):
        if number in best:
            continue
        is_complete = state_of[number] == "complete"
        label = "complete" if is_complete else "others, pruned for the most part"
        named: dict[str, Any] = {} if label in labelled else {"label": label}
        labelled.add(label)
        style = "-" if is_complete else "--"
        marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(x) < 3 else {}
        axes.plot(x, y, style, color=BLUE if is_complete else GREY, alpha=_FAINT, linewidth=1, **marker, **named)
    for at, number in enumerate(best):
        name = None if at else _of_best(facts)
        axes.plot(*curves[number], color=RED, linewidth=2.2, marker="o", markersize=3, zorder=3, label=name)
    scale_loss(axes, np.concatenate([y for _, y in curves.values()]))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_front(axes: Axes, facts: StudyFacts, at: int) -> None:
    complete = [trial for trial in facts.trials if trial.values]
    beaten = [trial.values for trial in complete if trial.number not in facts.best]
    front = sorted((trial.values[at], trial.values[0]) for trial in complete if trial.number in facts.best)
    axes.plot([v[at] for v in beaten], [v[0] for v in beaten], "o", color=GREY, alpha=0.6, label="beaten in all")
    x, y = np.array(front).T
    # Nothing below and to the left of the steps has been reached.
    style: dict[str, Any] = {"drawstyle": "steps-post"} if len(facts.metrics) == 2 else {"linestyle": "none"}
    axes.plot(x, y, marker="D", color=RED, label="Pareto front", **style)
    if len(complete) <= 40:
        number_of = {(trial.values[at], trial.values[0]): trial.number for trial in complete}
        for place in front:
            axes.annotate(str(number_of[place]), place, (5, 4), textcoords="offset points", fontsize=8, color=INK)
    scale_loss(axes, np.array([trial.values[0] for trial in complete]))
    axes.set_xlabel(facts.metrics[at])
    axes.set_ylabel(facts.metrics[0])


def _draw_importances(axes: Axes, importances: Mapping[str, float]) -> None:
    ranked = sorted(importances.items(), key=lambda one: one[1])[-_BARS:]
    bars = axes.barh([name for name, _ in ranked], [share for _, share in ranked], color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{share:.0%}" for _, share in ranked], padding=4, color=INK)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.05)
    spare = max(0, 4 - len(ranked)) / 2  # a bar or two would fill the picture
    axes.set_ylim(-0.6 - spare, len(ranked) - 0.4 + spare)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def _mark(marker: str, color: str, *, size: float, face: str = "none") -> dict[str, Any]:
    """Hollow, unless it has a face."""
    edge = {"markerfacecolor": face, "markeredgecolor": color, "markeredgewidth": 1.6}
    return {"linestyle": "none", "marker": marker, "markersize": size, **edge}


def _what(facts: StudyFacts) -> str:
    return facts.metrics[0].replace("_", " ").capitalize()


def _of_best(facts: StudyFacts) -> str:
    if len(facts.metrics) > 1:
        return "Pareto front"
    trial = facts.trials[0]
    return f"best: trial {trial.number}, {shown(trial.values[0])}"


def _columns(pairs: Sequence[tuple[int, float]]) -> Curve:
    x, y = np.array(pairs, float).T
    return x, y


def _validated(run: Run, *, over_seconds: bool) -> Curve:
    """Validation losses over seconds of training, or over samples."""
    events = run.events["Validated"]
    at = np.searchsorted(run.windows["step"], events["step"], "right")
    x = np.concatenate(([0.0], run.seconds))[at] if over_seconds else run.samples_at(events["step"]).astype(float)
    return thinned(x, events["loss"])


def _places(trials: Sequence[TrialFacts]) -> tuple[list[int], list[float]]:
    places = [trial.place for trial in trials if trial.place]
    return [batch for batch, _ in places], [lr for _, lr in places]
