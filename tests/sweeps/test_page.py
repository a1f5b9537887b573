"""The page of a study, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest

pytest.importorskip("matplotlib")

from optuna.distributions import CategoricalDistribution

from autoaccum.cli.app import main
from autoaccum.sweeps.page import write_study_report
from tests.reporting.synthetic import report, write
from tests.reporting.test_page import NASTY, Page
from tests.sweeps.studies import law, running, storage, study, trial


def page_of(made: optuna.Study, folder: Path) -> Page:
    return Page(write_study_report(made, folder).read_text())


def test_the_page_says_by_what_the_sweep_was_started(tmp_path: Path) -> None:
    made = study(trial(0.5))
    assert "code" not in page_of(made, tmp_path).tags
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


def test_the_page_has_facts_pictures_and_tables(tmp_path: Path) -> None:
    made = study(*law(0.5), trial(None, 0.05, 16, ooms=7, reports={500: 1.5}), running())
    page = page_of(made, tmp_path)
    assert "sweep · 23 trials of 1,000 samples · 22,000 samples in all · 44.0 s of training" in page.texts
    assert "made: 21 complete, 1 pruned, 1 running" in page.texts
    best, second = sorted(made.get_trials(states=(optuna.trial.TrialState.COMPLETE,)), key=lambda one: one.values)[:2]
    lr, value = f"{best.params['lr']:.4g}", f"{best.values[0]:.4g}"
    assert [row for row in page.rows if len(row) == 2] == [
        ["searched: lr", "FloatDistribution(high=1.0, log=True, low=0.0001, step=None)"],
        ["searched: effective_batch", "CategoricalDistribution(choices=(16, 64, 256))"],
        ["minimized", "validation_loss"],
        ["best", f"trial {best.number}: validation_loss {value} (lr {lr}, effective_batch 64, seed -)"],
        [
            "next best",
            f"trial {second.number}: validation_loss {second.values[0]:.4g} (lr {second.params['lr']:.4g}, "
            f"effective_batch {second.params['effective_batch']}, seed -)",
        ],
        [
            "search for micro-batches",
            "66 sizes tried, 28 out-of-memory errors, at most 220 of 22,000 samples run again",
        ],
    ]
    batches = [row for row in page.rows if len(row) == 4]
    assert batches[0] == ["effective batch", "lr", "validation_loss", "trial"]
    assert [row[0] for row in batches[1:]] == ["16", "64", "256"]
    assert batches[2][1:] == [lr, value, str(best.number)]
    trials = [row for row in page.rows if len(row) == 10]
    head = ["trial", "state", "lr", "effective_batch", "validation_loss", "last report", "samples trained"]
    assert trials[0] == [*head, "training time", "OOMs", "micro-batches"]
    last = f"{0.5 + best.params['lr']:.4g} after 1,000"
    assert trials[1] == [str(best.number), "complete", lr, "64", value, last, "1,000", "2.0 s", "1", "8 x 2"]
    assert trials[-2] == ["21", "pruned", "0.05", "16", "-", "1.5 after 500", "1,000", "2.0 s", "7", "8 x 2"]
    assert trials[-1] == ["22", "running", *"--------"]
    assert page.tags.count("figure") == page.tags.count("img") == 6
    assert page.runs_nothing()
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(str(link).startswith("data:image/svg+xml;base64,") for link in links)


def test_the_front_is_told_in_the_table(tmp_path: Path) -> None:
    values = ((0.5, 9.0), (0.6, 9.5), (0.1, 20.0))
    page = page_of(study(*map(trial, values), metric=("validation_loss", "seconds")), tmp_path)
    rows = [row for row in page.rows if len(row) == 11]
    assert [row[:2] for row in rows[1:]] == [
        ["2", "complete (Pareto front)"],
        ["0", "complete (Pareto front)"],
        ["1", "complete"],
    ]
    assert rows[0][4:6] == ["validation_loss", "seconds"]


@pytest.mark.parametrize("trials", [(), (trial(0.5),), (trial(0.5), trial(0.4)), (trial(None),) * 3, (running(),)])
def test_a_study_that_has_only_begun_has_a_page(trials: tuple[Any, ...], tmp_path: Path) -> None:
    page = page_of(study(*trials), tmp_path)
    assert len([row for row in page.rows if len(row) > 4]) == (1 + len(trials) if trials else 0)


def test_nothing_that_was_written_is_taken_for_html(tmp_path: Path) -> None:
    space: dict[str, Any] = {"lr": CategoricalDistribution([NASTY]), NASTY: CategoricalDistribution([NASTY])}
    odd = optuna.trial.create_trial(value=0.5, params=dict.fromkeys(space, NASTY), distributions=space)
    page = page_of(study(*[odd] * 9, study_name=NASTY), tmp_path)
    assert page.runs_nothing()
    assert [row for row in page.rows if len(row) > 4][1][2:4] == [NASTY, NASTY]
    assert NASTY in page.text


# The command.


def test_report_of_a_sweeps_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = study(trial(0.5), trial(0.25), storage=storage(tmp_path), study_name="a")
    write(tmp_path / "trial-0000", report(1))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert main(["report", str(tmp_path), "--json", "--output", str(tmp_path / "out")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "out" / "report.html")
    assert (document["study"], document["best"]) == ("a", [1, 0])
    assert [one["directory"] for one in document["trials"]] == [str(tmp_path / "trial-0000"), None]
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out" / "x.html")]) == 0
    assert (tmp_path / "out" / "x.html").is_file()
    capsys.readouterr()
    assert made.user_attrs.keys() == {"autoaccum"}, "it is as it was"


def test_a_trial_of_a_sweep_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(trial(0.5), storage=storage(tmp_path))
    write(tmp_path / "trial-0000", report(1))
    assert main(["report", str(tmp_path / "trial-0000")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'trial-0000' / 'report.html'}\n"


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
    assert "trial 0: validation_loss 0.25" in (tmp_path / "sweeps" / "b" / "report.html").read_text()


def test_of_several_sweeps_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(trial(0.5), storage=storage(tmp_path))
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "Make a page of each." in capsys.readouterr().err
