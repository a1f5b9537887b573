"""Pictures of runs, by matplotlib: at most a few thousand points each, however long the run was."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.errors import MissingExtraError
from autoaccum.reporting.columns import Run
from autoaccum.reporting.curves import SMOOTH, Values, binned, smoothed, thinned
from autoaccum.reporting.plan_changes import Period, periods, replans

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "plot", "autoaccum report") from None

MARKS = 120
"""Draw at most so many marks of one kind of event in a picture."""
MOST_OUTPUTS = 24
"""Draw at most so many outputs, those that came first."""
FAR = 6.7
"""Leave out a limit that is so many times the greatest peak: it would press the peaks onto the axis."""
SIZE = (5.4, 2.9)
"""Size of a picture in inches: so small that its texts can be read on a phone, where the picture is smaller still."""
WIDE = 8.0
"""Give values a logarithmic axis whose greatest is so many times the least."""

# Hues that can be read on white and on black; of neighbours in the list also by those who see few colours.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b7fc4", "#e0822f", "#2f9e77", "#d1495b", "#8d6cc0", "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
INK = "#30343a"
"""Colour of text and axes: in a page it is the colour of the text, dark or light."""

# Text stays text in an SVG, so that it is searched and takes the page's colour; "$" in a path is no formula.
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.5,
    "lines.solid_joinstyle": "round",
    "path.simplify": True,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """How one kind of event is marked in each picture."""

    label: str
    color: str
    marker: str
    steps: Callable[[Run], Values]
    """Gives the steps in which it happened."""
    height: float = 1.04
    """Place above the picture, in heights of the axes."""
    before: bool = False
    """True if it belongs to the beginning of its step's window rather than to the end."""


def _steps_of(event: str) -> Callable[[Run], Values]:
    return lambda run: run.events[event]["step"]


def _replanned(run: Run) -> Values:
    """Return the steps of re-plans, but for those that a schedule asked for, which the picture of the batch shows."""
    return np.array([step for step, *_ in replans(run)])


# In red what failed, in orange what was planned anew, in green where the run went on. Validations have a row of their
# own above the others, for they are many and no news.
_MARKS = (
    _Mark(label="out of memory", color=RED, marker="X", steps=_steps_of("OutOfMemory"), before=True),
    _Mark(label="re-plan", color=ORANGE, marker="v", steps=_replanned, before=True),
    # Above what it came of, which it would lie under.
    _Mark(label="memory saving", color=ORANGE, marker="P", steps=_steps_of("MemorySaving"), height=1.085, before=True),
    _Mark(label="step skipped", color=PURPLE, marker="s", steps=_steps_of("StepSkipped")),
    _Mark(label="resume", color=GREEN, marker=">", steps=_steps_of("Resumed")),
    _Mark(label="checkpoint", color=BLUE, marker="D", steps=_steps_of("Saved")),
    _Mark(label="validation", color=GREY, marker="|", steps=_steps_of("Validated"), height=1.085),
)


def pictures(run: Run) -> dict[str, Figure]:
    """Draw the pictures of one run; return them by their names, none before its first window."""
    found: dict[str, Figure] = {}
    if not len(run):
        return found
    windows = run.windows
    with matplotlib.rc_context(STYLE):
        for name, title, draw in (
            ("loss", "Loss", _draw_loss),
            ("memory", "Device memory", _draw_memory),
            ("batch", "Batch", _draw_batch),
            ("throughput", "Samples per second", _draw_throughput),
        ):
            with _axes(title, run) as (figure, axes):
                draw(axes, run)
            found[name] = figure
            if name == "loss":  # beside it stands what was returned beside it
                found |= _outputs(run)
        for name, title, column in (
            ("lr", "Learning rate", "lr"),
            ("gradient-norm", "Norm of the gradient", "grad_norm"),
            ("noise-scale", "Gradient noise scale, samples", "noise_scale"),
        ):
            if np.isfinite(windows[column]).any():  # else it was not asked for
                with _axes(title, run) as (figure, axes):
                    _draw_column(axes, run, column)
                found[name] = figure
    return found


def comparison(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Figure]:
    """Draw the pictures of several runs in the same axes; ``labels`` name them."""
    shown = [(run, label, COLORS[at % len(COLORS)]) for at, (run, label) in enumerate(zip(runs, labels, strict=True))]
    # Left out only now: a run has the colour of its place in the page's table, whatever the others have recorded.
    shown = [one for one in shown if len(one[0])]
    found: dict[str, Figure] = {}
    if not shown:
        return found
    with matplotlib.rc_context(STYLE):
        # The same samples tell which run learns more from them; the same seconds, which is done sooner.
        for name, title, over in (
            ("loss", "Loss over samples", _samples),
            ("loss-seconds", "Loss over seconds of training", _seconds),
        ):
            with _axes(title, None, "samples" if over is _samples else "seconds") as (figure, axes):
                for run, label, color in shown:
                    x = over(run)
                    axes.plot(*smoothed(x, run.windows["loss"]), color=color, label=label)
                    events = run.events["Validated"]
                    at = np.searchsorted(run.windows["step"], events["step"], "right")
                    at_validations = np.concatenate(([0], x))[at]
                    axes.plot(
                        at_validations, events["loss"], "o", color=color, markersize=4, label=f"_{label}, validation"
                    )
                # Points of all runs are named once in the legend, by one that is not there.
                if any(len(run.events["Validated"]["step"]) for run, _, _ in shown):
                    axes.plot([], [], "o", color=INK, markersize=4, label="validation")
                # By the smoothed losses: single windows of a small batch lie far apart.
                scale_loss(
                    axes, np.concatenate([smoothed(_samples(run), run.windows["loss"])[1] for run, _, _ in shown])
                )
            found[name] = figure
        found |= _compared_outputs(shown)
        with _axes("Samples per second", None) as (figure, axes):
            for run, label, color in shown:
                axes.plot(*_mean_rate(run), color=color, label=label)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        found["throughput"] = figure
        with _axes("Device memory: peak of a window", None) as (figure, axes):
            peak = max(float(run.windows["peak_bytes"].max()) for run, _, _ in shown)
            unit, unit_name = _unit(peak)
            for run, label, color in shown:
                x = _samples(run)
                for name, style, wide in (("peak_bytes", "-", 1.5), ("limit_bytes", "--", 1.0)):
                    held = run.windows[name]
                    if style == "--" and held.min() > FAR * peak:
                        continue  # it would press all peaks onto the axis
                    at, held = thinned(x, held / unit)
                    named = label if style == "-" else f"{label}, limit"
                    axes.plot(at, held, style, color=color, drawstyle="steps-pre", linewidth=wide, label=named)
            axes.set_ylabel(unit_name)
            axes.set_ylim(bottom=0)
        found["memory"] = figure
    return found


def svg(figure: Figure, salt: str) -> str:
    """Return a figure as an element of a page, in which text and axes have the colour of the page's text.

    ``salt`` keeps its ids its own, for several figures share a page.
    """
    file = io.StringIO()
    # Without a date and with a fixed salt the same run makes the same page, byte for byte but for its footer.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # A hundredth of a point is enough for a place, and takes half the bytes.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    # Ids that nothing refers to would be the same in every figure.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return text.replace(INK, "currentColor")


def png(figure: Figure, path: Path) -> None:
    """Write a figure to a file of its own."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=200, facecolor="white", metadata={"Software": None})


@contextmanager
def _axes(title: str, run: Run | None, x_label: str = "samples") -> Iterator[tuple[Figure, Axes]]:
    """Give a figure to draw in; afterwards the events are marked above the axes, and all is named below."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_xlabel(x_label)
    if x_label == "samples":  # 50m seconds would be 50 ms
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if run is None:
        axes.margins(x=0.01)  # the first and the last window stand off the frame
    else:  # the same in all pictures of a run, also where there are values of a part of it alone
        last = float(_samples(run)[-1])
        axes.set_xlim(-0.01 * last, 1.01 * last)
    # Once all is drawn, so that the marks lie on the final axis; they take the room of the title's first line.
    marked = run is not None and _mark_events(axes, run)
    axes.set_title(title, pad=18 if marked else 8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, handlelength=1.6)


def _mark_events(axes: Axes, run: Run) -> bool:
    """Mark the run's events above the axes; return False if there was none."""
    anything = False
    for mark in _MARKS:
        steps = mark.steps(run)
        if not len(steps):
            continue
        # ``before`` counts as 1: the samples of the step before are where the window begins.
        x = run.samples_at(np.asarray(steps, np.int64) - mark.before).astype(float)
        span = max(1.0, float(run.windows["num_samples"][-1]))
        # Of events that would be drawn over each other only the first: a place has at most one mark of a kind.
        _, first = np.unique(np.round(x / span * MARKS), return_index=True)
        axes.plot(
            x[first],
            np.full(len(first), mark.height),
            linestyle="none",
            marker=mark.marker,
            markersize=5,
            markeredgewidth=1.2 if mark.marker == "|" else 0,
            color=mark.color,
            clip_on=False,
            zorder=3 if mark.color == RED else 2,
            transform=axes.get_xaxis_transform(),
            label=mark.label,
        )
        # What changed the run gets a line through the picture as well, unless there would be a hatching of them.
        if mark.color in (RED, ORANGE, GREEN) and len(first) <= MARKS // 4:
            for at in x[first]:
                axes.axvline(at, color=mark.color, linewidth=0.7, alpha=0.45, zorder=0)
        anything = True
    return anything


def _draw_loss(axes: Axes, run: Run) -> None:
    """Draw the training loss and the losses of validations."""
    loss = run.windows["loss"]
    _faint(axes, _samples(run), loss, BLUE)
    axes.plot(*smoothed(_samples(run), loss), color=BLUE, label="training")
    validated = run.events["Validated"]
    if len(validated["step"]):
        x = run.samples_at(validated["step"])
        axes.plot(x, validated["loss"], "o-", color=ORANGE, markersize=4, linewidth=1.2, label="validation loss")
    scale_loss(axes, np.concatenate((loss, validated["loss"])))


def _outputs(run: Run) -> dict[str, Figure]:
    """Draw what was returned beside the loss, and metrics of validations: those of one name in a picture of its own."""
    found: dict[str, Figure] = {}
    for output in _names_of([run])[:MOST_OUTPUTS]:
        with _axes(output, run) as (figure, axes):
            values = run.outputs.get(output, _NOTHING)
            if np.isfinite(values).any():
                _faint(axes, _samples(run), values, BLUE)
                axes.plot(*smoothed(_samples(run), values), color=BLUE, label="training")
            x, means = _validated(run, output)
            if np.isfinite(means).any():
                axes.plot(x, means, "o-", color=ORANGE, markersize=4, linewidth=1.2, label="in validation")
            scale_loss(axes, np.concatenate((values, means)))
        found[_name_of(output, found)] = figure
    return found


def _compared_outputs(shown: Sequence[tuple[Run, str, str]]) -> dict[str, Figure]:
    """Draw the same of several runs, each name in a picture of its own."""
    found: dict[str, Figure] = {}
    for output in _names_of([run for run, _, _ in shown])[:MOST_OUTPUTS]:
        curves = []
        with _axes(f"{output} over samples", None) as (figure, axes):
            for run, label, color in shown:
                style: dict[str, Any] = {"color": color, "label": label}
                is_trained = output in run.outputs
                if is_trained:
                    x, y = smoothed(_samples(run), run.outputs[output])
                    axes.plot(x, y, **style)
                    curves.append(y)
                at, means = _validated(run, output)
                # Where training has a curve of the name, validations are points beside it, as those of losses are.
                if np.isfinite(means).any():
                    if is_trained:
                        style["label"] = f"_{label}, validation"
                    axes.plot(at, means, "o" if is_trained else "o-", markersize=4, linewidth=1.2, **style)
                    curves.append(means)
            scale_loss(axes, np.concatenate(curves))
        found[_name_of(output, found)] = figure
    return found


_NOTHING = np.zeros(0)


def _names_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of outputs and of metrics that runs have finite values of, outputs first."""
    outputs = [name for run in runs for name, values in run.outputs.items() if np.isfinite(values).any()]
    metrics = []
    for run in runs:
        for name in dict.fromkeys(name for values in run.events["Validated"]["metrics"] for name in values):
            if np.isfinite(_validated(run, name)[1]).any():
                metrics.append(name)
    return list(dict.fromkeys([*outputs, *metrics]))


def _validated(run: Run, metric: str) -> tuple[Values, Values]:
    """Return what validations report of that name, over samples; NaN where they report none."""
    validated = run.events["Validated"]
    means = [metrics.get(metric, np.nan) for metrics in validated["metrics"]]
    return run.samples_at(validated["step"]), np.array(means, np.float64)


def _name_of(output: str, others: Container[str]) -> str:
    """Return the name of an output's picture, which becomes that of a file: the output's own may hold anything."""
    name = f"output-{re.sub(r'[^A-Za-z0-9_.]+', '-', output)[:60]}"
    number = 2
    while name in others:
        name, number = f"{name}-{number}", number + 1
    return name


def scale_loss(axes: Axes, losses: Values, *, logarithmic: bool = True) -> None:
    """Scale an axis around what is usual, so that one odd window does not flatten all others.

    The scale is logarithmic where that is wide, unless ``logarithmic`` is False.
    """
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return
    low, high = np.percentile(finite, (0.5, 99.5))
    # A loss that falls by a factor of thirty or less is read well enough on a plain axis.
    if logarithmic and low > 0 and high / low > 4 * WIDE:
        _scale_logarithmically(axes, base=10, subs=(1.0, 2.0, 5.0))
        axes.set_ylim(low / 1.2, high * 1.2)
    elif high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _scale_logarithmically(axes: Axes, base: int, subs: tuple[float, ...]) -> None:
    axes.set_yscale("log", base=base)
    axes.yaxis.set_major_locator(LogLocator(base=base, subs=subs, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_memory(axes: Axes, run: Run) -> None:
    """Draw the peaks of windows, what was predicted of them, and the limit with its headroom."""
    x, peak, limit = _samples(run), run.windows["peak_bytes"], run.windows["limit_bytes"]
    # A limit far above would press the peaks onto the axis: then it is only named.
    near = limit.min() < FAR * peak.max()
    unit, name = _unit(float(limit.max() if near else peak.max()))
    axes.plot(*thinned(x, peak / unit), color=BLUE, drawstyle="steps-pre", label="peak of a window")
    edges = np.concatenate(([0], x))  # samples at which windows begin, and the last one ends
    # A line for each prediction over the windows that it was good for; the first is named in the legend.
    for index, period in enumerate([p for p in periods(run) if p.predicted_bytes is not None]):
        predicted = (period.predicted_bytes or 0) / unit
        label = "_predicted" if index else "predicted"
        at = _within(run, period, edges)
        axes.plot(at, np.full(len(at), predicted), "--", color=ORANGE, linewidth=1.8, label=label)
    if near:
        at, allowed = thinned(x, limit / unit)
        axes.plot(at, allowed, color=RED, drawstyle="steps-pre", linewidth=1.2, label="limit")
        headroom = run.config.get("headroom")  # the user may have edited the file, or deleted it
        if isinstance(headroom, int | float) and headroom > 0:
            axes.fill_between(
                at, allowed * (1 - headroom), allowed, color=RED, alpha=0.13, linewidth=0, step="pre", label="headroom"
            )
    else:
        limit_unit, limit_name = _unit(float(limit.min()))
        axes.plot(
            [], [], color=RED, linewidth=1.2, label=f"limit: far above, {limit.min() / limit_unit:.3g} {limit_name}"
        )
    axes.set_ylim(0, 1.08 * max(float(limit.max()) if near else 0.0, float(peak.max())) / unit or 1.0)
    axes.set_ylabel(name)


def _within(run: Run, period: Period, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return both ends of each stretch of a period, with a gap for windows that tried more than was foretold."""
    is_larger = run.windows["micro_batch"][period.first : period.end] > period.micro_batch
    is_larger &= not period.is_by_length  # where short samples make large ones, as planned
    borders = np.flatnonzero(np.diff(np.concatenate(([True], is_larger, [True]))))
    ends = edges[period.first + borders].astype(float)
    return np.insert(ends, np.arange(2, len(ends), 2), np.nan)


def _draw_batch(axes: Axes, run: Run) -> None:
    """Draw the effective batch and the largest micro-batch of each window."""
    batch, micro = run.windows["effective_batch"], run.windows["micro_batch"]
    axes.plot(*thinned(_samples(run), batch), color=BLUE, drawstyle="steps-pre", label="effective batch")
    axes.plot(*thinned(_samples(run), micro), color=GREEN, drawstyle="steps-pre", label="largest micro-batch")
    if batch.max() > WIDE * micro.min():  # both are read by their ratio, in powers of two
        _scale_logarithmically(axes, base=2, subs=(1.0,))
        axes.set_ylim(micro.min() / 1.3, batch.max() * 1.3)
    else:
        axes.set_ylim(0, batch.max() * 1.08)


def _draw_throughput(axes: Axes, run: Run) -> None:
    """Draw samples per second, of each window and of windows together."""
    raw, (x, mean) = run.windows["effective_batch"] / _spent(run), _mean_rate(run)
    _faint(axes, _samples(run), raw, GREEN)
    axes.plot(x, mean, color=GREEN, label=_kind(run))
    finite = raw[np.isfinite(raw)]
    # Without the quickest windows of a hundred, but never below the means.
    high = max(float(np.percentile(finite, 99)) if len(finite) else 0.0, float(np.nanmax(mean, initial=0)))
    axes.set_ylim(0, 1.08 * high or 1.0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_column(axes: Axes, run: Run, name: str) -> None:
    """Draw one column of the windows; beside the noise scale the effective batch, which it is compared with."""
    values = run.windows[name]
    x = _samples(run)
    if name == "lr":
        axes.plot(*thinned(x, values), color=PURPLE, label="learning rate")
        axes.set_ylim(bottom=0)
        return
    _faint(axes, x, values, PURPLE)
    axes.plot(*smoothed(x, values), color=PURPLE, label=_kind(run))
    if name == "noise_scale":
        axes.plot(*thinned(x, run.windows["effective_batch"]), color=BLUE, linewidth=1, label="effective batch")
    scale_loss(axes, np.concatenate((values, run.windows["effective_batch"])) if name == "noise_scale" else values)


def _faint(axes: Axes, x: Values, y: Values, color: str) -> None:
    """Draw the values themselves faintly behind their means, or of many the band in which they lie."""
    at, low, _, high = binned(x, y)
    if len(x) < SMOOTH:  # the means of so few are the values themselves
        return
    if len(at) == len(x):
        axes.plot(at, high, color=color, alpha=0.3, linewidth=0.8, label="each window")
    else:
        axes.fill_between(at, low, high, color=color, alpha=0.22, linewidth=0, label="least to greatest")


def _kind(run: Run) -> str:
    """Return what a smoothed curve of the run is a curve of."""
    return "each window" if len(run) < SMOOTH else "mean of those around"


def _samples(run: Run) -> Values:
    return run.windows["num_samples"]


def _seconds(run: Run) -> Values:
    return run.seconds


def _spent(run: Run) -> Values:
    """Return the seconds of each window, as something to divide by."""
    return np.maximum(run.windows["seconds"], 1e-9)


def _mean_rate(run: Run) -> tuple[Values, Values]:
    """Return samples per second of windows together, over samples."""
    # Samples and seconds are smoothed each: a mean of rates would give a short window as much weight as a long one.
    x, samples = smoothed(_samples(run), run.windows["effective_batch"].astype(float))
    return x, samples / smoothed(_samples(run), _spent(run))[1]


def _unit(num_bytes: float) -> tuple[float, str]:
    """Return the bytes of a unit in which so many are a number below 1024, and its name."""
    power = min(4, max(0, int(np.log2(max(num_bytes, 1)) // 10)))
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
