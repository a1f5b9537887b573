"""Pictures of runs, by matplotlib: at most a few thousand points each, however long the run was."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.errors import MissingExtraError
from autoaccum.reporting.columns import Run
from autoaccum.reporting.facts import periods
from autoaccum.reporting.lines import is_scheduled

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "plot", "autoaccum report") from None

Values = NDArray[Any]

BINS = 1000
"""A longer curve is drawn by the least and the greatest value of so many parts."""
SMOOTH = 100
"""Means are taken over twice the windows divided by this: shorter runs are drawn as they are."""
MARKS = 120
"""Most marks of one kind of event in a picture."""
WIDE = 8.0
"""Values whose greatest is so many times the least get a logarithmic axis."""

# Hues that can be read on white and on black; of neighbours in the list also by those who see few colours.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b7fc4", "#e0822f", "#2f9e77", "#d1495b", "#8d6cc0", "#8a8f98"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
INK = "#30343a"
"""Of text and axes: in a page it is the colour of the text, dark or light."""

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
    "font.size": 9,
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
    label: str
    color: str
    marker: str
    steps: Callable[[Run], Values]
    height: float = 1.04
    """In heights of the axes."""
    before: bool = False
    """Whether it belongs to the beginning of its step's window rather than to the end."""


def _steps_of(event: str) -> Callable[[Run], Values]:
    return lambda run: run.events[event]["step"]


def _replanned(run: Run) -> Values:
    columns = run.events["Replanned"]
    rows = zip(columns["old"], columns["new"], strict=True)
    return columns["step"][[not is_scheduled(old, new) for old, new in rows]] if len(columns["step"]) else np.empty(0)


_MARKS = (
    _Mark(label="out of memory", color=RED, marker="X", steps=_steps_of("OutOfMemory"), before=True),
    _Mark(label="re-plan", color=ORANGE, marker="v", steps=_replanned, before=True),
    _Mark(label="step skipped", color=PURPLE, marker="s", steps=_steps_of("StepSkipped")),
    _Mark(label="resume", color=GREEN, marker=">", steps=_steps_of("Resumed")),
    _Mark(label="checkpoint", color=BLUE, marker="D", steps=_steps_of("Saved")),
    _Mark(label="validation", color=GREY, marker="|", steps=_steps_of("Validated"), height=1.085),
)


def pictures(run: Run) -> dict[str, Figure]:
    """The pictures of one run by their names; none before its first window."""
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
        for name, title, column in (
            ("lr", "Learning rate", "lr"),
            ("gradient-norm", "Norm of the gradient", "grad_norm"),
            ("noise-scale", "Gradient noise scale, samples", "noise_scale"),
        ):
            if np.isfinite(windows[column]).any():
                with _axes(title, run) as (figure, axes):
                    _draw_column(axes, run, column)
                found[name] = figure
    return found


def comparison(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, Figure]:
    """The pictures of several runs in the same axes; ``labels`` name them."""
    shown = [(run, label, COLORS[at % len(COLORS)]) for at, (run, label) in enumerate(zip(runs, labels, strict=True))]
    shown = [one for one in shown if len(one[0])]
    found: dict[str, Figure] = {}
    if not shown:
        return found
    with matplotlib.rc_context(STYLE):
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
                    axes.plot(np.concatenate(([0], x))[at], events["loss"], "o", color=color, markersize=4)
                if any(len(run.events["Validated"]["step"]) for run, _, _ in shown):
                    axes.plot([], [], "o", color=INK, markersize=4, label="validation")
                scale_loss(
                    axes, np.concatenate([smoothed(_samples(run), run.windows["loss"])[1] for run, _, _ in shown])
                )
            found[name] = figure
        with _axes("Samples per second", None) as (figure, axes):
            for run, label, color in shown:
                axes.plot(*_mean_rate(run), color=color, label=label)
            axes.set_ylim(bottom=0)
        found["throughput"] = figure
        with _axes("Device memory: peak, and limit (dashed)", None) as (figure, axes):
            unit, unit_name = _unit(max(float(run.windows["peak_bytes"].max()) for run, _, _ in shown))
            for run, label, color in shown:
                x = _samples(run)
                for name, style, wide in (("peak_bytes", "-", 1.5), ("limit_bytes", "--", 1.0)):
                    at, held = thinned(x, run.windows[name] / unit)
                    named = label if style == "-" else None
                    axes.plot(at, held, style, color=color, drawstyle="steps-pre", linewidth=wide, label=named)
            axes.set_ylabel(unit_name)
            axes.set_ylim(bottom=0)
        found["memory"] = figure
    return found


def svg(figure: Figure, salt: str) -> str:
    """As an element of a page, in which text and axes have the colour of the text; ``salt`` keeps its ids its own."""
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # A tenth of a point is enough for a place, and takes half the bytes.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    text = re.sub(r'<g id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend)[^"]*"', "<g", text)
    return text.replace(INK, "currentColor")


def png(figure: Figure, path: Path) -> None:
    """As a file of its own."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=150, facecolor="white", metadata={"Software": None})


@contextmanager
def _axes(title: str, run: Run | None, x_label: str = "samples") -> Iterator[tuple[Figure, Axes]]:
    """A figure to draw in; afterwards the events are marked above the axes, and all is named below."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    yield figure, axes
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.01)
    marked = run is not None and _mark_events(axes, run)
    axes.set_title(title, pad=18 if marked else 8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=5, handlelength=1.6)


def _mark_events(axes: Axes, run: Run) -> bool:
    anything = False
    for mark in _MARKS:
        steps = mark.steps(run)
        if not len(steps):
            continue
        x = run.samples_at(np.asarray(steps, np.int64) - mark.before).astype(float)
        span = max(1.0, float(run.windows["num_samples"][-1]))
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
        if mark.color in (RED, ORANGE, GREEN) and len(first) <= MARKS // 4:
            for at in x[first]:
                axes.axvline(at, color=mark.color, linewidth=0.7, alpha=0.45, zorder=0)
        anything = True
    return anything


def _draw_loss(axes: Axes, run: Run) -> None:
    loss = run.windows["loss"]
    _faint(axes, _samples(run), loss, BLUE)
    axes.plot(*smoothed(_samples(run), loss), color=BLUE, label="training")
    validated = run.events["Validated"]
    if len(validated["step"]):
        x = run.samples_at(validated["step"])
        axes.plot(x, validated["loss"], "o-", color=ORANGE, markersize=4, linewidth=1.2, label="validation loss")
    scale_loss(axes, np.concatenate((loss, validated["loss"])))


def scale_loss(axes: Axes, losses: Values, *, logarithmic: bool = True) -> None:
    """Around what is usual, so that one odd window does not flatten all others; ``logarithmic`` where that is wide."""
    finite = losses[np.isfinite(losses)]
    if not len(finite):
        return
    low, high = np.percentile(finite, (0.5, 99.5))
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
    x, peak, limit = _samples(run), run.windows["peak_bytes"], run.windows["limit_bytes"]
    near = peak.max() > 0.15 * limit.min()
    unit, name = _unit(float(limit.max() if near else peak.max()))
    axes.plot(*thinned(x, peak / unit), color=BLUE, drawstyle="steps-pre", label="peak of a window")
    edges = np.concatenate(([0], x))
    for index, period in enumerate([p for p in periods(run) if p.predicted_bytes is not None]):
        predicted = (period.predicted_bytes or 0) / unit
        span = [edges[period.first], edges[period.end]]
        label = "predicted" if index == 0 else None
        axes.plot(span, [predicted] * 2, "--", color=ORANGE, linewidth=1.8, label=label)
    if near:
        at, allowed = thinned(x, limit / unit)
        axes.plot(at, allowed, color=RED, drawstyle="steps-pre", linewidth=1.2, label="limit")
        headroom = run.config.get("headroom")
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


def _draw_batch(axes: Axes, run: Run) -> None:
    batch, micro = run.windows["effective_batch"], run.windows["micro_batch"]
    axes.plot(*thinned(_samples(run), batch), color=BLUE, drawstyle="steps-pre", label="effective batch")
    axes.plot(*thinned(_samples(run), micro), color=GREEN, drawstyle="steps-pre", label="largest micro-batch")
    if batch.max() > WIDE * micro.min():
        _scale_logarithmically(axes, base=2, subs=(1.0,))
        axes.set_ylim(micro.min() / 1.3, batch.max() * 1.3)
    else:
        axes.set_ylim(0, batch.max() * 1.08)


def _draw_throughput(axes: Axes, run: Run) -> None:
    raw, (x, mean) = run.windows["effective_batch"] / _spent(run), _mean_rate(run)
    _faint(axes, _samples(run), raw, GREEN)
    axes.plot(x, mean, color=GREEN, label=_kind(run))
    finite = raw[np.isfinite(raw)]
    high = max(float(np.percentile(finite, 99)) if len(finite) else 0.0, float(np.nanmax(mean, initial=0)))
    axes.set_ylim(0, 1.08 * high or 1.0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_column(axes: Axes, run: Run, name: str) -> None:
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
    at, low, _, high = binned(x, y)
    if len(x) < SMOOTH:  # they are drawn as they are
        return
    if len(at) == len(x):
        axes.plot(at, high, color=color, alpha=0.3, linewidth=0.8, label="each window")
    else:
        axes.fill_between(at, low, high, color=color, alpha=0.22, linewidth=0, label="least to greatest")


def _kind(run: Run) -> str:
    return "each window" if len(run) < SMOOTH else "mean of those around"


def _samples(run: Run) -> Values:
    return run.windows["num_samples"]


def _seconds(run: Run) -> Values:
    return run.seconds


def _spent(run: Run) -> Values:
    return np.maximum(run.windows["seconds"], 1e-9)


def _mean_rate(run: Run) -> tuple[Values, Values]:
    """Samples per second of windows together."""
    x, samples = smoothed(_samples(run), run.windows["effective_batch"].astype(float))
    return x, samples / smoothed(_samples(run), _spent(run))[1]


def _unit(num_bytes: float) -> tuple[float, str]:
    power = min(4, max(0, int(np.log2(max(num_bytes, 1)) // 10)))
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def smoothed(x: Values, y: Values) -> tuple[Values, Values]:
    """A curve of the means of each value, or of ``binned`` ones, and of those around it, a fiftieth of them all.

    What is not finite is left out. A value says nothing of places far from it, however large it is.

    >>> smoothed(np.array([8, 16]), np.array([1.0, np.inf]))[1].tolist()
    [1.0, nan]
    """
    at, _, mean, _ = binned(x, y)
    around = np.ones(2 * (len(at) // SMOOTH) + 1)
    number = np.convolve(np.isfinite(mean), around, "same")
    return at, np.where(number > 0, np.convolve(np.nan_to_num(mean), around, "same") / np.maximum(number, 1), np.nan)


def binned(x: Values, y: Values) -> tuple[Values, Values, Values, Values]:
    """x, and the least, mean and greatest finite y, of at most 1000 parts; as they are when there are at most 2000."""
    y = np.where(np.isfinite(y), y, np.nan)
    if len(x) <= 2 * BINS:
        return x, y, y, y
    starts = np.linspace(0, len(x), BINS, endpoint=False).astype(int)
    number = np.add.reduceat(np.isfinite(y).astype(int), starts)
    mean = np.where(number > 0, np.add.reduceat(np.nan_to_num(y), starts) / np.maximum(number, 1), np.nan)
    return x[starts], np.fmin.reduceat(y, starts), mean, np.fmax.reduceat(y, starts)


def thinned(x: Values, y: Values) -> tuple[Values, Values]:
    """A curve of at most 2000 points that looks the same: of each part the least and the greatest value."""
    at, low, _, high = binned(x, y)
    if len(at) == len(x):
        return at, high
    first = np.searchsorted(x, at)
    rises = y[np.append(first[1:], len(x)) - 1] >= y[first]  # in the order in which the curve goes on
    return np.repeat(at, 2), np.stack((np.where(rises, low, high), np.where(rises, high, low)), axis=1).ravel()
