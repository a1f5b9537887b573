"""Pictures: what is drawn is what was measured, in few points."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from autoaccum.errors import MissingExtraError
from autoaccum.events import OutOfMemory, Replanned, Resumed, Saved, StepSkipped, Validated
from autoaccum.reporting import Run, load_run, write_json
from autoaccum.reporting.plots import COLORS, MOST_OUTPUTS, comparison, pictures, png, svg
from tests.reporting.synthetic import GIB, planned, report, saving, started, write

MIB = 2**20


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three windows of 8 samples, with everything that can happen."""
    folder = write(
        tmp_path / "a <b> $c$ _",
        started(),
        report(1, grad_norm=1.0, limit_bytes=4 * MIB),
        planned(4, 4, step=1, predicted_bytes=3 * MIB),
        Replanned(step=2, old=(4, 4), new=(4, 4, 2), reason="the effective batch is 10 now"),
        report(2, grad_norm=2.0, limit_bytes=4 * MIB),
        Saved(step=2, path="p", seconds=0.1),
        Resumed(step=2, num_samples=16, checkpoint="p"),
        OutOfMemory(step=3, phase="training", micro_batch=4),
        saving(step=3),
        Replanned(step=3, old=(4, 4), new=(2,) * 4, reason="out of memory"),
        report(3, (2,) * 4, grad_norm=3.0, noise_scale=5.0, limit_bytes=4 * MIB),
        StepSkipped(step=3, reason="overflow"),
        Validated(step=3, epoch=0, loss=0.5, num_samples=5, micro_batch=3, seconds=1.0),
    )
    write_json(folder / "config.json", {"headroom": 0.25})
    return load_run(folder)


def drawn(figure: Any, label: str) -> list[tuple[float, float]]:
    """The points of the line with this label."""
    (found,) = [one for one in figure.axes[0].lines if one.get_label() == label]
    return [(float(x), float(y)) for x, y in found.get_xydata()]


def test_there_is_a_picture_of_everything_that_was_measured(run: Run, tmp_path: Path) -> None:
    assert list(pictures(run)) == ["loss", "memory", "batch", "throughput", "lr", "gradient-norm", "noise-scale"]
    plain = load_run(write(tmp_path / "plain", report(1)))
    assert list(pictures(plain)) == ["loss", "memory", "batch", "throughput", "lr"]
    assert pictures(load_run(write(tmp_path / "empty"))) == {}


def test_curves_go_over_samples(run: Run) -> None:
    found = pictures(run)
    assert drawn(found["loss"], "training") == [(8, 2), (16, 1), (24, 2.0 / 3)]
    assert drawn(found["loss"], "validation loss") == [(24, 0.5)]
    assert drawn(found["batch"], "effective batch") == [(8, 8), (16, 8), (24, 8)]
    assert drawn(found["batch"], "largest micro-batch") == [(8, 4), (16, 4), (24, 2)]
    assert drawn(found["throughput"], "each window") == [(8, 80), (16, 80), (24, 80)]
    assert drawn(found["gradient-norm"], "each window") == [(8, 1), (16, 2), (24, 3)]


def test_memory_stands_beside_its_limit_and_its_prediction(run: Run, tmp_path: Path) -> None:
    """The prediction is drawn where it was good for the plan: from the end of the first window to that of the second."""
    figure = pictures(run)["memory"]
    assert figure.axes[0].get_ylabel() == "MiB"
    assert drawn(figure, "peak of a window") == [(8, 1), (16, 2), (24, 3)]
    assert drawn(figure, "limit") == [(8, 4), (16, 4), (24, 4)]
    assert drawn(figure, "predicted") == [(8, 3), (16, 3)]
    tried = [report(1), planned(4, 4, step=1, predicted_bytes=3 * MIB), report(2), report(3, (8,)), report(4)]
    figure = pictures(load_run(write(tmp_path / "tried", started(), *tried)))["memory"]
    ends = drawn(figure, "predicted")
    assert [at for at, _ in ends if not math.isnan(at)] == [8, 16, 24, 32], "not of a window that tried more"
    assert math.isnan(ends[2][0])
    lengths = [report(1), planned(2, 6, step=1, predicted_bytes=3 * MIB), report(2, (1, 7)), report(3, (2, 6))]
    figure = pictures(load_run(write(tmp_path / "lengths", started(), *lengths)))["memory"]
    assert [at for at, _ in drawn(figure, "predicted")] == [8, 24], "short samples make larger ones, as planned"


def test_the_limit_stands_with_its_headroom(run: Run) -> None:
    figure = pictures(run)["memory"]
    (band,) = figure.axes[0].collections
    assert band.get_label() == "headroom"
    low, high = band.get_datalim(figure.axes[0].transData).intervaly
    assert (low, high) == (3, 4)


def test_a_limit_far_above_leaves_the_scale_to_the_peak(tmp_path: Path) -> None:
    figure = pictures(load_run(write(tmp_path, report(1, peak_bytes=MIB, limit_bytes=64 * GIB))))["memory"]
    assert figure.axes[0].get_ylim()[1] == pytest.approx(1.08)
    assert drawn(figure, "limit: far above, 64 GiB") == []


@pytest.mark.parametrize(
    ("label", "x"),
    [
        ("out of memory", 16),
        ("re-plan", 16),
        ("memory saving", 16),
        ("step skipped", 24),
        ("resume", 16),
        ("checkpoint", 16),
        ("validation", 24),
    ],
)
def test_events_are_marked_once_each_where_they_happened(label: str, x: int, run: Run) -> None:
    for name, figure in pictures(run).items():
        (mark,) = [point for point, _ in drawn(figure, label)]
        assert mark == x, name
        assert label in [text.get_text() for text in figure.legends[0].get_texts()]


def test_outputs_have_pictures_after_the_loss(tmp_path: Path) -> None:
    outputs = [{"a/b": float(step), "a b": 1.0, "bad": np.nan} for step in range(1, 4)]
    validated = Validated(step=3, epoch=0, loss=0.5, metrics={"a/b": 2.5}, num_samples=5, micro_batch=3, seconds=1.0)
    run = load_run(write(tmp_path, *(report(n, outputs=given) for n, given in enumerate(outputs, 1)), validated))
    found = pictures(run)
    assert list(found)[:4] == ["loss", "output-a-b", "output-a-b-2", "memory"]
    assert drawn(found["output-a-b"], "training") == [(8, 1), (16, 2), (24, 3)]
    assert drawn(found["output-a-b"], "in validation") == [(24, 2.5)]
    assert found["output-a-b"].axes[0].get_title("left") == "a/b"
    many = load_run(write(tmp_path / "many", report(1, outputs={f"m{n}": 1.0 for n in range(200)})))
    assert len([name for name in pictures(many) if name.startswith("output-")]) == MOST_OUTPUTS


def test_metrics_of_validations_have_pictures(tmp_path: Path) -> None:
    said = [
        Validated(step=step, epoch=0, loss=0.5, metrics=metrics, num_samples=5, micro_batch=3, seconds=1.0)
        for step, metrics in ((1, {"f1": 0.25, "bad": np.nan}), (3, {"f1": 0.75}))
    ]
    one = load_run(write(tmp_path / "one", *(report(step, outputs={"a": 1.0}) for step in (1, 2, 3)), *said))
    found = pictures(one)
    assert list(found)[:4] == ["loss", "output-a", "output-f1", "memory"], "outputs first, and nothing of NaN alone"
    assert drawn(found["output-f1"], "in validation") == [(8, 0.25), (24, 0.75)]
    assert len({figure.axes[0].get_xlim() for figure in found.values()}) == 1, "over the same samples"
    other = load_run(write(tmp_path / "other", report(1, outputs={"f1": 0.5}), said[0]))
    both = comparison([one, other], ["1: one", "2: other"])["output-f1"]
    assert drawn(both, "1: one") == [(8, 0.25), (24, 0.75)]
    assert drawn(both, "2: other") == [(8, 0.5)]
    assert drawn(both, "_2: other, validation") == [(8, 0.25)]


def test_a_limit_far_above_all_peaks_is_not_compared(tmp_path: Path) -> None:
    near, far = (
        load_run(write(tmp_path / name, report(1, peak_bytes=MIB, limit_bytes=limit)))
        for name, limit in (("near", 2 * MIB), ("far", 64 * GIB))
    )
    figure = comparison([near, far], ["1", "2"])["memory"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["1", "1, limit", "2"]
    assert drawn(figure, "1, limit") == [(8, 2)]


def test_seconds_are_plain_numbers(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, *(report(step, seconds=0.05) for step in range(1, 4))))
    found = comparison([run], ["1"])
    assert found["loss-seconds"].axes[0].xaxis.get_major_formatter()(0.05) != "50m"
    assert found["loss"].axes[0].xaxis.get_major_formatter()(5000) == "5k"


def test_outputs_of_several_runs_share_their_axes(tmp_path: Path) -> None:
    one, two = (
        load_run(write(tmp_path / name, report(1, outputs=given)))
        for name, given in (("one", {"a": 1.0}), ("two", {"a": 2.0, "b": 3.0}))
    )
    found = comparison([one, two], ["1", "2"])
    assert drawn(found["output-a"], "1") == [(8, 1)]
    assert drawn(found["output-a"], "2") == [(8, 2)]
    assert drawn(found["output-b"], "2") == [(8, 3)]
    assert "1" not in [line.get_label() for line in found["output-b"].axes[0].lines]


def test_a_thousand_events_are_few_marks(tmp_path: Path) -> None:
    saved = [Saved(step=step, path="p", seconds=0.1) for step in range(1, 1001)]
    run = load_run(write(tmp_path, *(report(step) for step in range(1, 1001)), *saved))
    marks = drawn(pictures(run)["loss"], "checkpoint")
    assert 100 < len(marks) < 130
    assert [marks[0][0], marks[-1][0]] == pytest.approx([8, 8000], abs=8000 / 120)


def test_a_wide_range_has_a_logarithmic_axis(tmp_path: Path) -> None:
    for micro_batches, scale in (((1,) * 8, "linear"), ((1,) * 9, "log")):
        run = load_run(write(tmp_path / scale, report(1, micro_batches)))
        assert pictures(run)["batch"].axes[0].get_yscale() == scale
    run = load_run(write(tmp_path / "loss", *(report(step, loss=10.0**-step) for step in range(1, 6))))
    figure = pictures(run)["loss"]
    assert figure.axes[0].get_yscale() == "log"
    assert ">0.001</text>" in svg(figure, "loss"), "plain digits"


def test_losses_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run = load_run(write(tmp_path, *(report(step, loss=float("inf") if step == 2 else 1.0) for step in (1, 2, 3))))
    (_, first), (_, second), (_, third) = drawn(pictures(run)["loss"], "training")
    assert (first, third) == (1, 1)
    assert np.isnan(second)


def test_runs_are_compared_in_the_same_axes(run: Run, tmp_path: Path) -> None:
    other = load_run(write(tmp_path / "other", report(1, seconds=2.0), report(2, seconds=2.0)))
    empty = load_run(write(tmp_path / "empty"))
    found = comparison([run, empty, other], ["1: a", "2: b", "3: c"])
    assert list(found) == ["loss", "loss-seconds", "throughput", "memory"]
    assert drawn(found["loss"], "3: c") == [(8, 2), (16, 1)]
    assert drawn(found["loss-seconds"], "3: c") == [(2, 2), (4, 1)]
    assert drawn(found["throughput"], "1: a")[0] == (8, 80)
    assert drawn(found["throughput"], "3: c")[0] == (8, 4)
    assert drawn(found["memory"], "1: a")[-1] == (24, 3)
    colors = {line.get_label(): line.get_color() for line in found["loss"].axes[0].lines}
    assert (colors["1: a"], colors["3: c"]) == (COLORS[0], COLORS[2])
    assert comparison([empty], ["1: b"]) == {}


def test_an_svg_has_its_legend(run: Run) -> None:
    assert "peak of a window" in svg(pictures(run)["memory"], salt="memory")


def test_an_svg_takes_the_colour_of_the_text_and_shares_no_id(run: Run) -> None:
    found = [svg(figure, salt=name) for name, figure in pictures(run).items()]
    ids = [part.split('"')[0] for text in found for part in text.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) > 0
    for text in found:
        assert text.startswith("<svg")
        assert "currentColor" in text
        assert "#30343a" not in text
        assert "samples" in text, "text is text"
        used = {part.split('"')[0] for part in text.split('xlink:href="#')[1:]}
        used |= {part.split(")")[0] for part in text.split("url(#")[1:]}
        assert used <= set(ids)


def test_a_picture_is_a_file(run: Run, tmp_path: Path) -> None:
    from PIL import Image

    png(pictures(run)["loss"], tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1080, 580)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


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
