"""The charts of a report, by matplotlib: at most a few thousand points each, however long the run was."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoaccum.errors import MissingExtraError
from autoaccum.reporting.columns import Run
from autoaccum.reporting.facts import replans, validated_values

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter
except ImportError:
    raise MissingExtraError("matplotlib", "plot", "autoaccum report") from None

Values = NDArray[Any]
"""Numbers, shape ``(n,)``."""

MARKS = 120
"""Draw at most so many marks of one kind of event."""
MOST_OUTPUTS = 24
"""Draw at most so many outputs and metrics, those that came first."""
POINTS, SMOOTH = 1000, 100
"""Draw at most so many points of a curve, and of its smoothed one."""
FAR = 6.7
"""Leave out a limit that is so many times the greatest peak: it would press the peaks onto the axis."""
WIDE = 32
"""Give values a logarithmic axis whose greatest is so many times the least."""
SIZE = (5.4, 2.9)
"""Inches: small enough that texts can be read on a phone."""
STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "font.size": 9.5,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "svg.hashsalt": "autoaccum",  # the same run makes the same picture
    "text.parse_math": False,  # "$" in a name is no formula
}

_EVENTS = (("OutOfMemory", "X", "tab:red"), ("Replanned", "v", "tab:orange"), ("MemorySaving", "P", "tab:brown"),
           ("StepSkipped", "s", "tab:purple"), ("Resumed", ">", "tab:green"))  # fmt: skip
"""Events that are marked above the pictures of a single run."""


def pictures(runs: Mapping[str, Run]) -> dict[str, Figure]:
    """Draw runs in the same axes; return the pictures by their titles, none before the first step.

    Args:
        runs: by their labels. A single run has its events and its plans as well.
    """
    drawn = [(label, run, f"C{at % 10}") for at, (label, run) in enumerate(runs.items()) if len(run)]
    alone = drawn[0][1] if len(runs) == 1 and drawn else None
    found: dict[str, Figure] = {}

    @contextmanager
    def axes_of(title: str) -> Iterator[Axes]:
        figure = found[title] = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        yield axes
        axes.set(xlabel="samples")
        axes.set_title(title, pad=16)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if alone is not None:
            _mark_events(axes, alone)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, handlelength=1.6)

    def curves(title: str, values: Callable[[Run], Values], metric: str = "") -> None:
        """Draw a curve of each run, and points of its validations."""
        shown = []
        with axes_of(title) as axes:
            for label, run, color in drawn:
                x, y = run.windows["num_samples"], values(run)
                is_long = len(x) >= 2 * SMOOTH
                if alone is not None and is_long:
                    axes.plot(*thinned(x, y), color=color, alpha=0.3, linewidth=0.8, label="each step")
                name = label if alone is None else "mean of steps" if is_long else "each step"
                axes.plot(*thinned(x, y, SMOOTH if is_long else POINTS), color=color, label=name)
                points = validated_values(run, metric)
                if np.isfinite(points).any():
                    steps = np.searchsorted(run.windows["step"], run.events["Validated"]["step"], "right")
                    name = "validation" if alone is not None else f"{label}, validation"
                    style: dict[str, Any] = {
                        "color": "C1" if alone is not None else color,
                        "linewidth": 0.8,
                        "label": name,
                    }
                    axes.plot(np.append(0, x)[steps], points, "o--", **style)
                shown += [y, points]
            _scale(axes, np.concatenate(shown))

    def column(name: str) -> Callable[[Run], Values]:
        return lambda run: run.windows[name]

    def output(name: str) -> Callable[[Run], Values]:
        return lambda run: run.outputs.get(name, np.full(len(run), np.nan))

    if not drawn:
        return found
    with matplotlib.rc_context(STYLE):
        curves("Loss", column("loss"), "loss")
        for name in _names([run for _, run, _ in drawn]):
            curves(name, output(name), name)
        with axes_of("Memory, MiB") as axes:
            most = max(run.windows["peak_bytes"].max() for _, run, _ in drawn)
            for label, run, color in drawn:
                x, limit = run.windows["num_samples"], run.windows["limit_bytes"]
                peak = "peak" if alone is not None else f"{label}, peak"
                axes.plot(*thinned(x, run.windows["peak_bytes"] / 2**20, how=np.max), color=color, label=peak)
                if limit.min() <= FAR * most:
                    name = "limit" if alone is not None else f"{label}, limit"
                    axes.plot(*thinned(x, limit / 2**20), "--", color=color, linewidth=1, label=name)
            axes.set_ylim(bottom=0)
        if alone is not None:
            sizes = {"effective batch": alone.windows["effective_batch"], "micro-batch": alone.windows["micro_batch"]}
            with axes_of("Batch, samples") as axes:
                for name, size in sizes.items():
                    axes.plot(*thinned(alone.windows["num_samples"], size, how=np.max), label=name)
                _scale(axes, np.concatenate([*sizes.values()]))
        curves(
            "Samples per second", lambda run: run.windows["effective_batch"] / np.maximum(run.windows["seconds"], 1e-9)
        )
        for title, name in (("Learning rate", "lr"), ("Gradient norm", "grad_norm"), ("Noise scale", "noise_scale")):
            if any(np.isfinite(run.windows[name]).any() for _, run, _ in drawn):
                curves(title, column(name))
    return found


def svg(figure: Figure) -> bytes:
    """Return a figure as an SVG file."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    return file.getvalue()


def thinned(
    x: Values, y: Values, points: int = POINTS, how: Callable[[Values], float] = np.mean
) -> tuple[Values, Values]:
    """Return a curve of at most so many points, without values that are not finite: each is the mean of a part.

    >>> thinned(np.array([8, 16, 24]), np.array([1.0, 3.0, np.inf]), points=1)
    (array([16]), array([2.]))
    """
    is_finite = np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= points:
        return x, y
    return np.array([part[-1] for part in np.array_split(x, points)]), np.array(
        [how(p) for p in np.array_split(y, points)]
    )


def _scale(axes: Axes, values: Values) -> None:
    """Scale an axis around what is usual, so that one odd step does not flatten all others."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = np.percentile(finite, (0.5, 99.5))
    if low > 0 and high / low > WIDE:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
    elif high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _mark_events(axes: Axes, run: Run) -> None:
    """Mark events above the axes."""
    for event, marker, color in _EVENTS:
        steps = np.array([step for step, *_ in replans(run)]) if event == "Replanned" else run.events[event]["step"]
        if len(steps):
            x = run.samples_at(np.asarray(steps, np.int64))
            x = x[
                np.unique(x * MARKS // max(1, run.windows["num_samples"][-1]), return_index=True)[1]
            ]  # none over another
            style: dict[str, Any] = {"linestyle": "none", "clip_on": False, "transform": axes.get_xaxis_transform()}
            axes.plot(x, np.full(len(x), 1.04), marker=marker, color=color, label=event, **style)


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the names of outputs and metrics that have a finite value."""
    outputs = [name for run in runs for name, values in run.outputs.items() if np.isfinite(values).any()]
    metrics = [name for run in runs for values in run.events["Validated"]["metrics"] for name in values]
    return list(dict.fromkeys([*outputs, *metrics]))[:MOST_OUTPUTS]
