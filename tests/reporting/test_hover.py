"""What the script of a page knows of a picture is what is drawn in it."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from autoaccum.reporting.hover import described, html_legend, name_points
from autoaccum.reporting.plots import INK, svg


@pytest.fixture
def figure() -> Figure:
    made = Figure(figsize=(5, 3), layout="constrained")
    axes = made.add_subplot()
    axes.plot([0, 5, 10], [1.0, float("nan"), 4.0], color="#112233", label="a <b>")
    axes.plot([5], [2.0], "o", color="#445566", label="_hidden")
    axes.axvline(3)
    axes.plot([7], [1.04], "X", transform=axes.get_xaxis_transform(), color="#778899", clip_on=False, label="event")
    axes.fill_between([0, 10], 1, 2, color="#abcdef", label="band")
    axes.set_xlabel("samples")
    axes.set_ylabel("MiB")
    axes.set_xlim(0, 10)
    return made


def test_the_frame_is_where_the_curve_is_drawn(figure: Figure) -> None:
    """The ends of the axis, and so the first and the last point of the curve, lie on the frame's sides."""
    figure.axes[0].lines[0].set_ydata([1.0, 2.0, 4.0])
    figure.axes[0].set_ylim(1, 4)
    text = svg(figure, salt="a")
    left, top, right, bottom = described(figure)["box"]
    (path,) = re.findall(r'class="curve">\s*<path d="([^"]*)"[^>]*stroke: #112233', text)
    places = [float(at) for at in re.findall(r"[\d.]+", path)]
    assert [*places[:2], *places[-2:]] == pytest.approx([left, bottom, right, top], abs=0.02)


def test_curves_have_names_colours_and_values(figure: Figure) -> None:
    known = json.loads(json.dumps(described(figure), allow_nan=False))
    assert known["x"] == {"name": "samples", "from": 0, "to": 10, "log": False}
    assert known["y"]["name"] == "MiB"
    line, hidden, event = known["curves"]
    assert (line["name"], line["colour"], line["x"], line["y"]) == ("a <b>", "#112233", [0, 5, 10], [1, None, 4])
    assert (hidden["name"], hidden["x"], hidden["y"], hidden["is_line"]) == ("hidden", [5], [2], False)
    assert (event["name"], event["x"], event["y"], event["colour"]) == ("event", [7], None, "#778899")
    assert line["is_line"]
    assert not known["nearest"]


def test_names_of_points_take_the_place_of_curves(figure: Figure) -> None:
    name_points(figure.axes[0].lines[1], ["trial 7"])
    known = described(figure)
    assert known["nearest"]
    assert known["curves"][1]["names"] == ["trial 7"]


def test_only_what_can_be_moved_is_zoomed(figure: Figure) -> None:
    assert described(figure)["zooms"]
    text = figure.axes[0].text(5, 2, "a")
    assert not described(figure)["zooms"]
    text.remove()
    figure.axes[0].set_xscale("log")
    assert not described(figure)["zooms"]


def test_a_legend_is_text_of_the_page(figure: Figure) -> None:
    found = html_legend(figure)
    assert re.findall(r"</i>([^<]*)</span>", found) == ["a &lt;b&gt;", "event", "band"]
    assert "border-top-style: solid" in found
    assert found.count("#112233") == found.count("#778899") == found.count("#abcdef") == 1
    figure.axes[0].plot([1], [1], "o", color=INK, label="validation")
    assert '<i style="color: currentColor"><b class="none"></b>●</i>validation' in html_legend(figure), "dark or light"
    assert html_legend(Figure(figsize=(1, 1)).add_subplot().figure) == ""
