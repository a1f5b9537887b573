"""Pictures of a sweep, by matplotlib: a map of what was tried, curves of trials, fronts and importances."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from autoaccum.reporting.columns import Run
from autoaccum.reporting.curves import Values, thinned
from autoaccum.reporting.plots import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SIZE, STYLE, scale_loss
from autoaccum.sweeps.facts import StudyFacts, TrialFacts, shown

Curve = tuple[Values, Values]
"""x and y."""

_COLOURS = "viridis"
"""Name of the colour map: as bright to those who see few colours, and read in greys too."""
_FAINT = 0.5
"""Opacity of what is there to compare with."""
_BARS = 12
"""Draw at most so many bars."""
_TICKS = 8
"""Mark at most so many effective batches that were tried; of more, powers of two."""
_NUMBERED = 40
"""Write the numbers of trials beside the points of a front, if there are at most so many trials."""


def pictures(facts: StudyFacts, runs: Mapping[int, Run], importances: Mapping[str, float]) -> dict[str, Figure]:
    """Draw the pictures of a study; return them by their names, none of what it has not searched or not got to.

    Args:
        facts: of the study.
        runs: what trials have recorded, by their numbers.
        importances: shares of parameters, which sum to 1.
    """
    found: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        if any(trial.place for trial in facts.trials):
            found["map"] = _drawn(f"{_titled(facts.metrics[0])} by lr and effective batch", _draw_map, facts)
        if facts.best_lrs:  # of several metrics by the first, which the title says
            by = f", by {_worded(facts.metrics[0])}" if len(facts.metrics) > 1 else ""
            found["best-lr"] = _drawn(f"Best lr of each effective batch{by}", _draw_best_lrs, facts)
        # Over samples and over seconds of training: the one says what is learnt from, the other what it takes.
        for name, metric, over, curves in _curves(facts, runs):
            if curves:
                with _axes(f"{_titled(metric)} over {over}") as (figure, axes):
                    _draw_curves(axes, facts, curves, metric)
                    axes.set_xlabel(over.partition(" ")[0])
                    if over == "samples":
                        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
                found[name] = figure
        for at, metric in enumerate(facts.metrics[1:], start=1):
            ended = [trial for trial in facts.trials if trial.values]
            if finite := [trial for trial in ended if np.isfinite([trial.values[0], trial.values[at]]).all()]:
                height = "upper" if facts.is_maximised() else "lower"
                corner = f"{height} {'right' if facts.is_maximised(at) else 'left'}"
                both = f"{_worded(facts.metrics[0])} and {_worded(metric)}"
                with _axes(f"Pareto front: {both}, best at the {corner}") as (figure, axes):
                    _draw_front(axes, facts, finite, at)
                found["front-" + re.sub(r"\W", "-", metric)] = figure  # a name may not be one of a file
        if importances:
            with _axes(f"Importance of parameters for {_worded(facts.metrics[0])}") as (figure, axes):
                _draw_importances(axes, importances)
            found["importance"] = figure
    return found


def _drawn(title: str, draw: Callable[[Axes, StudyFacts], None], facts: StudyFacts) -> Figure:
    """Draw a picture of lr over the effective batch, both logarithmic."""
    with _axes(title) as (figure, axes):
        draw(axes, facts)
        places = [trial.place for trial in facts.trials if trial.place]
        # All that was searched, and not only where trials have been so far: what is empty says something too.
        _scale_batches(axes, [batch for batch, _ in places], facts.ranges.get("effective_batch"))
        searched = [lr for _, lr in places] + [end for end in facts.ranges.get("lr", ()) if end > 0]
        axes.set_yscale("log")
        axes.set_ylim(min(searched) / 1.4, max(searched) * 1.4)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=10))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylabel("lr")
    return figure


@contextmanager
def _axes(title: str) -> Iterator[tuple[Figure, Axes]]:
    """Give a figure to draw in; afterwards it is named above, and what is drawn is named below."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_title(title, pad=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, handlelength=1.6)


def _scale_batches(axes: Axes, batches: Sequence[int], searched: tuple[float, float] | None) -> None:
    """Scale the axis of effective batches, with ticks where there are trials and at its ends, or at powers of two."""
    ends = [int(end) for end in searched or () if end >= 1]
    low, high = min([*batches, *ends]), max([*batches, *ends])
    axes.set_xscale("log", base=2)
    places = sorted({*batches, *ends})
    if len(places) > _TICKS:
        places = [2**power for power in range(low.bit_length() - 1, high.bit_length() + 1)]
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(low / 1.4, high * 1.4)
    axes.set_xlabel("effective batch")


def _draw_map(axes: Axes, facts: StudyFacts) -> None:
    """Draw every trial where it was in lr and effective batch, complete ones in the colour of their value."""
    placed = [trial for trial in facts.trials if trial.place]
    for states, marker, label in (
        (("pruned", "stopped"), "o", "pruned or stopped"),
        (("did not fit", "diverged", "failed"), "x", "did not fit, diverged or failed"),
        (("running",), "+", "running"),
    ):
        if some := [trial for trial in placed if trial.state in states]:
            axes.plot(*_places(some), label=label, **_mark(marker, GREY, size=6))
    complete = [trial for trial in placed if trial.values and np.isfinite(trial.values[0])]
    if not complete:  # nothing to colour, and no bar
        return
    values = np.array([trial.values[0] for trial in complete])
    maximised = facts.is_maximised()
    # One that is far worse than others would leave all of these the same colour.
    low, high = (float(end) for end in np.percentile(values, (10, 100) if maximised else (0, 90)))
    wide = not maximised and low > 0 and high > 4 * low
    if low == high:
        low, high = (low - 1, high) if maximised else (low, high + 1)
    colours = matplotlib.colormaps[_COLOURS].resampled(32)
    drawn = axes.scatter(
        *_places(complete),
        c=values,
        norm=LogNorm(low, high) if wide else Normalize(low, high),
        cmap=colours if maximised else colours.reversed(),  # the better, the brighter
        s=60,
        edgecolors=INK,
        linewidths=0.6,
        zorder=3,
    )
    # The bar has an arrow where values lie beyond its end.
    beyond = "neither"
    if values.min() < low:
        beyond = "min"
    elif values.max() > high:
        beyond = "max"
    bar = axes.figure.colorbar(drawn, ax=axes, pad=0.02, extend=beyond, label=_sought(facts))
    bar.outline.set_visible(False)
    if wide:
        bar.locator = LogLocator(subs=(1.0, 2.0, 5.0), numticks=8)
        bar.minorlocator = NullLocator()
        bar.formatter = FuncFormatter(lambda value, _: f"{value:g}")
        bar.update_ticks()
    best = [trial for trial in complete if trial.number in _shown_best(facts)]
    if best:
        axes.plot(*_places(best), zorder=4, label=_of_best(facts), **_mark("o", RED, size=14))


def _draw_best_lrs(axes: Axes, facts: StudyFacts) -> None:
    """Draw the best lr of each effective batch, the line fitted to them, and the two rules beside it."""
    ended = [trial for trial in facts.trials if trial.values and trial.place]
    axes.plot(*_places(ended), "o", color=GREY, alpha=_FAINT, markersize=4, label="complete trials")
    x, y = np.array([(best.effective_batch, best.lr) for best in facts.best_lrs]).T
    if (growth := facts.growth) is not None:
        # Through the middle of the points, as the fitted line is.
        span = np.array([x.min() / 1.3, x.max() * 1.3])
        # Means of logarithms, for the axes are logarithmic: a power law is a straight line there, of slope its power.
        middle, height = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
        axes.plot(span, height * (span / middle) ** 0.5, "--", color=GREEN, label="square root")
        axes.plot(span, height * (span / middle), ":", color=PURPLE, linewidth=1.8, label="linear")
        fitted = growth.factor * span**growth.exponent
        axes.plot(span, fitted, color=BLUE, label=f"fitted: power {growth.exponent:z.2f}")
    # Hollow where the best may lie beyond what was tried.
    edge = np.array([best.is_edge for best in facts.best_lrs])
    for which, face, label in ((~edge, ORANGE, "best"), (edge, "none", "best, at the edge of what was tried")):
        if which.any():
            axes.plot(x[which], y[which], zorder=3, label=label, **_mark("D", ORANGE, size=8, face=face))


def _curves(facts: StudyFacts, runs: Mapping[int, Run]) -> Iterator[tuple[str, str, str, dict[int, Curve]]]:
    """Yield pictures of what trials report, and of the loss: name, metric, over what, and curves by trial."""
    for metric, name in {facts.reported: "metric", "validation_loss": "loss"}.items():
        # Records have all validations; the storage has the reports of one metric, also by trials of other directories.
        validated = {number: curves for number, run in runs.items() if (curves := _validated(run, metric))}
        reported: dict[int, Curve] = {}
        if metric == facts.reported:
            told = {trial.number: _columns(trial.reports) for trial in facts.trials if trial.reports}
            reported = {number: curve for number, curve in told.items() if np.isfinite(curve[1]).any()}
        yield name, metric, "samples", {number: curve for number, (curve, _) in validated.items()} | reported
        yield f"{name}-seconds", metric, "seconds of training", {at: curve for at, (_, curve) in validated.items()}


def _draw_curves(axes: Axes, facts: StudyFacts, curves: Mapping[int, Curve], metric: str) -> None:
    """Draw the curves of trials faintly, and those of the best above them."""
    complete = {trial.number for trial in facts.trials if trial.state == "complete"}
    labelled: set[str] = set()  # one curve of a kind is named in the legend
    best = [number for number in _shown_best(facts) if number in curves]
    for number, (x, y) in sorted(curves.items()):
        if number in best:
            continue
        is_complete = number in complete
        label = "complete" if is_complete else "others, pruned for the most part"
        named: dict[str, Any] = {} if label in labelled else {"label": label}
        labelled.add(label)
        style = "-" if is_complete else "--"
        # A curve of a point or two would hardly be seen.
        marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(x) < 3 else {}
        colour = BLUE if is_complete else GREY
        axes.plot(x, y, style, color=colour, alpha=_FAINT, linewidth=1, **marker, **named)
    for at, number in enumerate(best):
        name = None if at else _of_best(facts, metric)
        axes.plot(*curves[number], color=RED, linewidth=2.2, marker="o", markersize=3, zorder=3, label=name)
    maximised = metric == facts.metrics[0] and facts.is_maximised()
    scale_loss(axes, np.concatenate([y for _, y in curves.values()]), logarithmic=not maximised)
    axes.set_xlim(left=0)  # where every trial began
    axes.set_ylabel(_worded(metric))


def _draw_front(axes: Axes, facts: StudyFacts, complete: Sequence[TrialFacts], at: int) -> None:
    """Draw what complete trials came to in two metrics, and the front that none of them has beaten in all."""
    beaten = [trial for trial in complete if trial.number not in facts.best]
    best = sorted(
        (trial for trial in complete if trial.number in facts.best), key=lambda t: (t.values[at], t.values[0])
    )
    front = [(trial.values[at], trial.values[0]) for trial in best]
    places = [trial.values[at] for trial in beaten], [trial.values[0] for trial in beaten]
    axes.plot(*places, "o", color=GREY, alpha=0.6, label="beaten in all")
    # Nothing beyond the steps has been reached: each goes from its trial to where x is worse.
    steps = "steps-pre" if facts.is_maximised(at) else "steps-post"
    # Of three metrics and more the front is no line in two of them.
    style: dict[str, Any] = {"drawstyle": steps} if len(facts.metrics) == 2 else {"linestyle": "none"}
    x, y = [x for x, _ in front], [y for _, y in front]
    axes.plot(x, y, marker="D", color=RED, label="Pareto front", clip_on=False, **style)
    if len(complete) <= _NUMBERED:
        # Trials of the same values are one point, and one number stands beside it.
        number_of = {(trial.values[at], trial.values[0]): trial.number for trial in complete}
        for place in front:
            axes.annotate(str(number_of[place]), place, (5, 4), textcoords="offset points", fontsize=8, color=INK)
    logarithmic = not facts.is_maximised() and min(y, default=0) > 0
    scale_loss(axes, np.array([trial.values[0] for trial in complete]), logarithmic=logarithmic)
    low, high = axes.get_ylim()
    axes.set_ylim(min([low, *y]), max([high, *y]))  # however odd the best are
    axes.set_xlabel(_sought(facts, at))
    axes.set_ylabel(_sought(facts))


def _draw_importances(axes: Axes, importances: Mapping[str, float]) -> None:
    """Draw the share of each parameter as a bar, the greatest on top."""
    ranked = sorted(importances.items(), key=lambda one: one[1])[-_BARS:]
    bars = axes.barh([name for name, _ in ranked], [share for _, share in ranked], color=BLUE, height=0.6)
    axes.bar_label(bars, [f"{share:.0%}" for _, share in ranked], padding=4, color=INK)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.05)  # shares of 1, and room for the text of a large one
    spare = max(0, 4 - len(ranked)) / 2  # a bar or two would fill the picture
    axes.set_ylim(-0.6 - spare, len(ranked) - 0.4 + spare)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def _mark(marker: str, color: str, *, size: float, face: str = "none") -> dict[str, Any]:
    """Return the style of a mark, which is hollow unless it has a face."""
    edge = {"markerfacecolor": face, "markeredgecolor": color, "markeredgewidth": 1.6}
    return {"linestyle": "none", "marker": marker, "markersize": size, **edge}


def _worded(metric: str) -> str:
    """Return a metric's name in words."""
    return metric.replace("_", " ")


def _titled(metric: str) -> str:
    """Return a metric's name as a title begins with it.

    >>> _titled("validation_loss"), _titled("mAP")
    ('Validation loss', 'mAP')
    """
    return _worded(metric).capitalize() if metric.islower() else _worded(metric)


def _sought(facts: StudyFacts, at: int = 0) -> str:
    """Return the name of an axis: a metric, and which way it is better."""
    return f"{_worded(facts.metrics[at])} ({'higher' if facts.is_maximised(at) else 'lower'} is better)"


def _shown_best(facts: StudyFacts) -> tuple[int, ...]:
    """Return the numbers of the trials that stand out: the best one, or all of a front."""
    return facts.best[:1] if len(facts.metrics) == 1 else facts.best


def _of_best(facts: StudyFacts, metric: str | None = None) -> str:
    """Return the name of the best in a picture of a metric, the first one when left out."""
    if len(facts.metrics) > 1:
        return "Pareto front"
    # In a picture of another metric, say of which one it is the best.
    trial, first = facts.trials[0], facts.metrics[0]
    of = "" if metric in (None, first) else f" {_worded(first)}"
    return f"best{of}: trial {trial.number}, {shown(trial.values[0])}"


def _columns(pairs: Sequence[tuple[int, float]]) -> Curve:
    """Return the pairs as a curve."""
    x, y = np.array(pairs, float).T
    return x, y


def _validated(run: Run, metric: str) -> tuple[Curve, Curve] | None:
    """Return what a run's validations said of a metric, over samples and over seconds of training; None if nothing."""
    events = run.events["Validated"]
    steps, values = events["step"], events["loss"]
    if metric != "validation_loss":
        values = np.array([metrics.get(metric, math.nan) for metrics in events["metrics"]])
    if not len(steps) or np.isnan(values).all():
        return None
    # A validation comes after a window: at the seconds of training that there were then.
    seconds = np.concatenate(([0.0], run.seconds))[np.searchsorted(run.windows["step"], steps, "right")]
    return thinned(run.samples_at(steps).astype(float), values), thinned(seconds, values)


def _places(trials: Sequence[TrialFacts]) -> tuple[list[int], list[float]]:
    """Return effective batches and learning rates, as x and y."""
    places = [trial.place for trial in trials if trial.place]
    return [batch for batch, _ in places], [lr for _, lr in places]
