"""What the script of a page knows of a picture: its axes and the values of its curves; and the legend beside it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from autoaccum.reporting.plots import INK  # first, for it says what to install where there is no matplotlib

# isort: split
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

GLYPHS = {"o": "●", "X": "✖", "x": "\u00d7", "P": "✚", "v": "▼", "s": "■", ">": "▶", "D": "◆", "|": "|", "+": "+"}
"""Characters that look like the markers that pictures have, for legends."""
_STYLES = {"-": "solid", "--": "dashed", ":": "dotted"}
"""Styles of lines, by their names in matplotlib, as CSS calls them."""

# Beside the artists and not in them: matplotlib has no place for what is shown of a point.
_NAMES: WeakKeyDictionary[Artist, str | Sequence[str]] = WeakKeyDictionary()


def name_points(artist: Artist, names: str | Sequence[str]) -> None:
    """Have the nearest point of a picture shown by its name, instead of all curves: one for all points, or of each."""
    _NAMES[artist] = names


def described(figure: Figure) -> dict[str, Any]:
    """Return the axes of a drawn figure, in points from its upper left corner, and its curves, as JSON takes them.

    Picture and data have to agree, so the values are read off what is drawn.
    """
    axes = figure.axes[0]
    width, height = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    frame = axes.get_position()
    # Downwards, as a page counts.
    box = (frame.x0 * width, (1 - frame.y1) * height, frame.x1 * width, (1 - frame.y0) * height)
    return {
        "box": list(map(_short, box)),
        "x": {"name": axes.get_xlabel(), **_scale(axes.get_xlim(), axes.get_xscale())},
        "y": {"name": axes.get_ylabel(), **_scale(axes.get_ylim(), axes.get_yscale())},
        "curves": [curve for artist in (*axes.lines, *axes.collections) if (curve := _curve(axes, artist))],
        # Texts and points of collections stay where they are, and ticks of a logarithmic axis would be none.
        "zooms": axes.get_xscale() == "linear" and not axes.texts,
        "nearest": any(artist in _NAMES for artist in (*axes.lines, *axes.collections)),
    }


def _scale(limits: tuple[float, float], kind: str) -> dict[str, Any]:
    """Return the ends of an axis, and whether it is logarithmic."""
    return {"from": float(limits[0]), "to": float(limits[1]), "log": kind == "log"}


def _curve(axes: Axes, artist: Any) -> dict[str, Any] | None:
    """Return the name, colour and values of what was drawn; None of what says nothing, such as lines of a grid."""
    names = _NAMES.get(artist)
    label = str(artist.get_label())
    # matplotlib's own names say nothing; what begins with an underscore besides has a name, and none in the legend.
    if names is None and (label.startswith("_child") or not isinstance(artist, Line2D)):
        return None
    points: Any
    if isinstance(artist, Line2D):
        points = artist.get_xydata()
        colour = artist.get_color() if artist.get_marker() == "None" else artist.get_markeredgecolor()
    else:
        points, colour = artist.get_offsets(), None  # each has its own, by its value
    if not len(points):
        return None
    # Marks of events stand above the axes, and have no value.
    is_mark = isinstance(artist, Line2D) and artist.get_transform() != axes.transData
    return {
        "name": names if isinstance(names, str) else label.removeprefix("_"),
        "names": list(names) if names is not None and not isinstance(names, str) else None,
        "colour": None if colour is None else to_hex(colour),
        "is_line": isinstance(artist, Line2D) and artist.get_linestyle() != "None",
        "x": [_short(float(x)) for x, _ in points],
        "y": None if is_mark else [_short(float(y)) for _, y in points],
    }


def _short(value: float) -> float | None:
    """Return a value in the digits that people read, since a page has thousands; None for what is no number.

    >>> _short(0.123456789), _short(1234567.0), _short(math.inf)
    (0.123457, 1234567, None)
    """
    if not math.isfinite(value):
        return None
    # Numbers of samples are whole, and keep all their digits.
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def html_legend(figure: Figure) -> str:
    """Return a figure's legend as HTML, whose texts are as large as those of the page, however narrow that is."""
    entries = []
    for handle, label in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        entries.append(f"<span>{_key(handle)}{html.escape(label)}</span>\n")
    return f"<figcaption>{''.join(entries)}</figcaption>" if entries else ""


def _key(handle: Any) -> str:
    """Return what stands before a name in a legend: the line, the marker or the band that it is the name of."""
    if not isinstance(handle, Line2D):
        colour = to_hex(handle.get_facecolor()[0])
        return f'<i class="band" style="color: {colour}"></i>'
    style, marker = _STYLES.get(handle.get_linestyle()), str(handle.get_marker())
    colour = to_hex(handle.get_color() if style else handle.get_markeredgecolor())
    if colour == INK:  # as dark or light as the page's text
        colour = "currentColor"
    # Hollow markers have a glyph of the outline alone.
    is_hollow = handle.get_markerfacecolor() == "none"
    glyph = {"o": "○", "D": "◇"}.get(marker, "") if is_hollow else ""
    glyph = glyph or GLYPHS.get(marker, "")
    line = f' style="border-top-style: {style}"' if style else ' class="none"'
    faint = handle.get_alpha()
    opacity = "" if faint is None else f"; opacity: {max(faint, 0.5)}"  # there it is a few pixels
    return f'<i style="color: {colour}{opacity}"><b{line}></b>{glyph}</i>'
