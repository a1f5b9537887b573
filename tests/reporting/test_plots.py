"""Pictures: what is drawn is what was measured, in few points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from autoaccum.errors import MissingExtraError
from autoaccum.events import OutOfMemory, Replanned, Resumed, StepSkipped
from autoaccum.reporting import Run, load_run
from autoaccum.reporting.plots import MARKS, MOST_OUTPUTS, POINTS, pictures, svg, thinned
from tests.reporting.synthetic import GIB, planned, report, saving, started, validated, write

MIB = 2**20


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three steps of 8 samples, with everything that can happen."""
    return load_run(
        write(
            tmp_path / "a <b> $c$ _",
            started(),
            report(1, grad_norm=1.0, limit_bytes=4 * MIB),
            planned(4, 4, step=1, predicted_bytes=3 * MIB),
            Replanned(step=2, old=(4, 4), new=(4, 4, 2), reason="the effective batch is 10 now"),
            report(2, grad_norm=2.0, limit_bytes=4 * MIB),
            Resumed(step=2, num_samples=16, checkpoint="p"),
            OutOfMemory(step=3, phase="training", micro_batch=4),
            saving(step=3),
            Replanned(step=3, old=(4, 4), new=(2,) * 4, reason="out of memory"),
            report(3, (2,) * 4, grad_norm=3.0, noise_scale=5.0, limit_bytes=4 * MIB, outputs={"a/b": 1.0}),
            StepSkipped(step=3, reason="overflow"),
            validated(3, 0.5, f1=0.25),
        )
    )


def drawn(figure: Any, label: str) -> list[tuple[float, float]]:
    """The points of the line with this label."""
    (found,) = [one for one in figure.axes[0].lines if one.get_label() == label]
    return [(float(x), float(y)) for x, y in found.get_xydata() if np.isfinite(y)]


def test_curves_go_over_samples(run: Run) -> None:
    found = pictures({"run": run})
    assert list(found) == [
        "Loss", "a/b", "f1", "Memory, MiB", "Batch, samples", "Samples per second", "Learning rate", "Gradient norm",
        "Noise scale",
    ]  # fmt: skip
    assert drawn(found["Loss"], "each step") == [(8, 2), (16, 1), (24, 2.0 / 3)]
    assert drawn(found["Loss"], "validation") == [(24, 0.5)]
    assert drawn(found["a/b"], "each step") == [(24, 1)]
    assert drawn(found["f1"], "validation") == [(24, 0.25)]
    assert drawn(found["Memory, MiB"], "peak") == [(8, 1), (16, 2), (24, 3)]
    assert drawn(found["Memory, MiB"], "limit") == [(8, 4), (16, 4), (24, 4)]
    assert drawn(found["Batch, samples"], "effective batch") == [(8, 8), (16, 8), (24, 8)]
    assert drawn(found["Batch, samples"], "micro-batch") == [(8, 4), (16, 4), (24, 2)]
    assert drawn(found["Samples per second"], "each step") == [(8, 80), (16, 80), (24, 80)]
    assert drawn(found["Gradient norm"], "each step") == [(8, 1), (16, 2), (24, 3)]


@pytest.mark.parametrize("event", ["OutOfMemory", "Replanned", "MemorySaving", "StepSkipped", "Resumed"])
def test_events_are_marked_where_they_happened(event: str, run: Run) -> None:
    for name, figure in pictures({"run": run}).items():
        ((x, _),) = drawn(figure, event)
        assert x == (16 if event == "Resumed" else 24), name
        assert event in [text.get_text() for text in figure.legends[0].get_texts()]


def test_what_was_not_measured_has_no_picture(tmp_path: Path) -> None:
    plain = load_run(write(tmp_path / "plain", report(1, peak_bytes=MIB, limit_bytes=64 * GIB, outputs={"a": np.nan})))
    found = pictures({"run": plain})
    assert list(found) == ["Loss", "Memory, MiB", "Batch, samples", "Samples per second", "Learning rate"]
    assert [line.get_label() for line in found["Memory, MiB"].axes[0].lines] == ["peak"], "limit far above"
    assert pictures({"run": load_run(write(tmp_path / "empty"))}) == {}


def test_runs_share_their_axes(run: Run, tmp_path: Path) -> None:
    empty = load_run(write(tmp_path / "empty"))
    third = load_run(write(tmp_path / "third", report(1, seconds=2.0), validated(1, 0.75)))
    found = pictures({"1: a": run, "2: b": empty, "3: c": third})
    assert drawn(found["Loss"], "1: a") == [(8, 2), (16, 1), (24, 2.0 / 3)]
    assert drawn(found["Loss"], "3: c, validation") == [(8, 0.75)]
    assert drawn(found["Samples per second"], "3: c") == [(8, 4)]
    assert drawn(found["f1"], "3: c") == []
    assert found["Loss"].axes[0].get_xlabel() == "samples"
    colors = {line.get_label(): line.get_color() for line in found["Loss"].axes[0].lines}
    assert (colors["1: a"], colors["3: c"]) == ("C0", "C2")
    assert "OutOfMemory" not in colors


def test_a_long_run_has_few_points_and_few_marks(tmp_path: Path) -> None:
    steps = range(1, 3001)
    ooms = [OutOfMemory(step=step, phase="training", micro_batch=1) for step in steps]
    long = load_run(write(tmp_path, *(report(step, loss=1e4 if step == 7 else 2.0) for step in steps), *ooms))
    figure = pictures({"run": long})["Loss"]
    assert len(drawn(figure, "each step")) == POINTS
    assert len(drawn(figure, "mean of steps")) == 100
    assert len(drawn(figure, "OutOfMemory")) <= MARKS + 1
    wide = load_run(write(tmp_path / "wide", *(report(step, loss=1.0 / step**2) for step in range(1, 50))))
    assert pictures({"run": wide})["Loss"].axes[0].get_yscale() == "log"
    many = load_run(write(tmp_path / "many", report(1, outputs={f"m{n}": 1.0 for n in range(200)})))
    assert len([name for name in pictures({"run": many}) if name.startswith("m")]) == MOST_OUTPUTS


def test_means_and_peaks_of_parts() -> None:
    x, y = np.arange(1, 7), np.array([1.0, 3.0, np.nan, 5.0, 7.0, np.inf])
    assert [list(part) for part in thinned(x, y, 2)] == [[2, 5], [2, 6]]
    assert [list(part) for part in thinned(x, y, 2, np.max)] == [[2, 5], [3, 7]]
    assert [list(part) for part in thinned(x, y)] == [[1, 2, 4, 5], [1, 3, 5, 7]]


def test_the_same_run_makes_the_same_picture(run: Run) -> None:
    first, second = (svg(pictures({"run": run})["Loss"]) for _ in range(2))
    assert first == second
    assert b"<svg" in first


@pytest.mark.parametrize("module", ["reporting.plots", "reporting.page", "sweeps.page"])
def test_without_matplotlib(module: str) -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from autoaccum.errors import MissingExtraError\n"
        "import autoaccum.reporting\n"
        f"try: import autoaccum.{module}\n"
        "except MissingExtraError as error: print(error)"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == str(MissingExtraError("matplotlib", "plot", "autoaccum report"))
