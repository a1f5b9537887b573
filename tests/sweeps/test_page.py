"""The page of a study, and the command that writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import optuna
import pytest

pytest.importorskip("matplotlib")

from optuna.distributions import CategoricalDistribution

from autoaccum.cli.app import main
from autoaccum.sweeps.page import write_study_report
from tests.reporting.synthetic import report, write
from tests.reporting.test_page import NASTY, Page, blank_images, real_images  # noqa: F401
from tests.sweeps.studies import law, running, storage, study, trial


def page_of(made: optuna.Study, folder: Path) -> Page:
    return Page(write_study_report(made, folder).path.read_text())


def test_the_page_says_by_what_the_sweep_was_started(tmp_path: Path) -> None:
    made = study(trial(0.5))
    assert "origin" not in [value for name, value in page_of(made, tmp_path).attributes if name == "class"]
    origin = {
        "autoaccum": "0.1",
        "torch": "2.13",
        "command": "autoaccum sweep <r>.py",
        "commit": "abc-dirty",
        "os": "x",
    }
    made.set_user_attr("autoaccum origin", origin)
    texts = page_of(made, tmp_path).texts
    assert "autoaccum sweep <r>.py" in texts
    assert "autoaccum 0.1 · torch 2.13 · commit abc-dirty" in texts


@pytest.mark.usefixtures("real_images")
def test_the_page_has_sentences_pictures_and_a_table(tmp_path: Path) -> None:
    made = study(*law(0.5), trial(None, 0.05, 16, ooms=7, reports={500: 1.5}), running())
    written = write_study_report(made, tmp_path)
    page = Page(written.path.read_text())
    assert "sweep · 23 trials of 1,000 samples · 22,000 samples in all · 44.0 s of training" in page.texts
    assert "made: 1 running or killed, 22 ended" in page.texts
    assert len([text for text in page.texts if text.endswith("?")]) == 6
    assert "As its power 0.50 ± 0.00" in page.text
    names = ["map", "best-lr", "loss", "importance"]
    assert [image.name for image in written.images] == [f"report-{name}.png" for name in names]
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in written.images)
    assert page.tags.count("figure") == page.tags.count("svg") == 4
    head = [
        "trial",
        "state",
        "lr",
        "effective_batch",
        "validation_loss",
        "samples",
        "training time",
        "OOMs",
    ]
    assert page.rows[0] == [*head, "micro-batches"]
    best = min(made.get_trials(states=(optuna.trial.TrialState.COMPLETE,)), key=lambda one: one.values)
    lr, value = f"{best.params['lr']:.4g}", f"{best.values[0]:.4g}"
    assert page.rows[1] == [str(best.number), "complete", lr, "64", value, "1,000", "2.0 s", "1", "8 x 2"]
    assert page.rows[-2] == ["21", "pruned", "0.05", "16", "1.5 after 500", "1,000", "2.0 s", "7", "8 x 2"]
    assert page.rows[-1] == ["22", "running", *"-------"]


def test_it_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = page_of(study(*law(0.5)), tmp_path)
    assert page.runs_nothing()
    assert not {"link", "img", "image", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(link is not None and link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", (tmp_path / "report.html").read_text())


def test_the_front_is_told_in_the_table(tmp_path: Path) -> None:
    values = ((0.5, 9.0), (0.6, 9.5), (0.1, 20.0))
    page = page_of(study(*map(trial, values), metric=("validation_loss", "seconds")), tmp_path)
    assert [row[:2] for row in page.rows[1:]] == [
        ["2", "complete (Pareto front)"],
        ["0", "complete (Pareto front)"],
        ["1", "complete"],
    ]
    assert page.rows[0][4:6] == ["validation_loss", "seconds"]


def test_the_table_of_what_is_maximised(tmp_path: Path) -> None:
    trials = [trial(0.5, reports={500: 0.4}), trial(0.9, reports={500: 0.7, 1000: 0.8}), trial(None, stopped=True)]
    page = page_of(study(*trials, metric=("accuracy",), direction=("maximize",)), tmp_path)
    assert page.rows[0][4:6] == ["accuracy", "samples"]
    assert [[*row[:2], row[4]] for row in page.rows[1:]] == [
        ["1", "complete", "0.9"],
        ["0", "complete", "0.5"],
        ["2", "stopped", "1 after 500"],
    ]


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        (("seconds",), ["seconds", "last validation_loss", "samples"]),
        (("samples", "seconds"), ["samples", "seconds", "last validation_loss"]),
        (("validation_loss",), ["validation_loss", "samples", "training time"]),
    ],
)
def test_no_column_is_there_twice(metric: tuple[str, ...], shown: list[str], tmp_path: Path) -> None:
    head, row = page_of(study(trial((0.5,) * len(metric)), metric=metric), tmp_path).rows
    assert head[4:-2] == shown
    assert len(row) == len(head)


def test_metrics_may_be_called_anything(tmp_path: Path) -> None:
    values = ((0.5, 9.0), (0.6, 9.5))
    trials = [trial(value, reports={}) for value in values]
    written = write_study_report(study(*trials, metric=(NASTY, "../a/$b")), tmp_path)
    assert [image.name for image in written.images] == ["report-map.png", "report-front----a--b.png"]
    page = Page(written.path.read_text())
    assert page.runs_nothing()
    assert page.rows[0][4:7] == [NASTY, "../a/$b", "samples"], "none has reported anything"


@pytest.mark.parametrize("trials", [(), (trial(0.5),), (trial(0.5), trial(0.4)), (trial(None),) * 3, (running(),)])
def test_a_study_that_has_only_begun_has_a_page(trials: tuple[Any, ...], tmp_path: Path) -> None:
    page = page_of(study(*trials), tmp_path)
    assert "Too few trials are complete to tell: it takes 8." in page.texts
    assert len(page.rows) == (1 + len(trials) if trials else 0)


def test_nothing_that_was_written_is_taken_for_html(tmp_path: Path) -> None:
    space: dict[str, Any] = {"lr": CategoricalDistribution([NASTY]), NASTY: CategoricalDistribution([NASTY])}
    odd = optuna.trial.create_trial(value=0.5, params=dict.fromkeys(space, NASTY), distributions=space)
    page = page_of(study(*[odd] * 9, study_name=NASTY), tmp_path)
    assert page.runs_nothing()
    assert page.rows[1][2:4] == [NASTY, NASTY]
    assert NASTY in page.text


# The command.


def test_report_of_a_sweeps_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = study(trial(0.5, directory="d"), trial(0.25), storage=storage(tmp_path), study_name="a")
    (tmp_path / "id").write_text("d")
    write(tmp_path / "trial-0000", report(1))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert main(["report", str(tmp_path), "--json", "--output", str(tmp_path / "out")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "out" / "report.html")
    assert [Path(image).name for image in document["images"]] == ["report-map.png", "report-loss.png"]
    assert document["study"]["best"] == [1, 0]
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out" / "x.html")]) == 0
    assert (tmp_path / "out" / "x.html").is_file()
    capsys.readouterr()
    assert made.user_attrs.keys() == {"autoaccum"}, "it is as it was"


def test_a_trial_of_a_sweep_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(trial(0.5), storage=storage(tmp_path))
    for name in ("trial-0000", "a.log"):
        write(tmp_path / name, report(1))
        assert main(["report", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name / 'report.html'}\n"


def test_report_of_a_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = storage(tmp_path)
    study(trial(0.5), storage=url, study_name="a")
    study(trial(0.25), storage=url, study_name="b")
    assert main(["report", url]) == 2
    assert "one of a, b" in capsys.readouterr().err
    assert main(["report", url, "--study", "b"]) == 0
    assert capsys.readouterr().out == f"{Path('sweeps') / 'b' / 'report.html'}\n"
    assert "the lowest validation_loss, 0.25" in (tmp_path / "sweeps" / "b" / "report.html").read_text()


def test_of_several_sweeps_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(trial(0.5), storage=storage(tmp_path))
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "Make a page of each." in capsys.readouterr().err
