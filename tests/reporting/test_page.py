"""The page: one file that says it all, and executes nothing that a run has written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.cli.app import main
from autoaccum.errors import NoHistoryError
from autoaccum.events import Finished, Notice, OutOfMemory, Planned, Replanned, Resumed, Saved, Validated
from autoaccum.reporting import RecordWriter, environment, write_json
from autoaccum.reporting.page import write_report
from autoaccum.reporting.tables import ROWS
from autoaccum.testing import simulated_memory
from tests.models import classes, wide
from tests.reporting.synthetic import planned, report, saving, shared, started, verified, write

NASTY = "</script><script>alert('&')</script>"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a browser makes of it, as far as a test asks; elements that are not closed are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def runs_nothing(self) -> bool:
        """Whether there is no script, and no element has one of its own."""
        return "script" not in self.tags and not [name for name, _ in self.attributes if name.startswith("on")]


@pytest.fixture
def real_images() -> None:
    """For tests that read them."""


@pytest.fixture(autouse=True)
def blank_images(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files beside a page hold what is in it, and to draw them takes as long again."""
    if "real_images" not in request.fixturenames:
        monkeypatch.setattr("autoaccum.reporting.page.png", lambda figure, path: path.touch())


def page_of(*run_dirs: Path, output: Path | None = None) -> Page:
    return Page(write_report(run_dirs, output).path.read_text())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = write(
        tmp_path / "first",
        started(),
        *(report(step) for step in range(1, 31)),
        planned(4, 4, step=3, predicted_bytes=2**20, reason="larger ones do not fit"),
        OutOfMemory(step=9, phase="training", micro_batch=4),
        Replanned(step=9, old=(4, 4), new=(2,) * 4, reason="out of memory"),
        saving(step=12),
        Notice(cause="It rains", consequence="You get wet", cure="Take an umbrella"),
        Validated(step=30, epoch=0, loss=0.1, num_samples=5, micro_batch=3, seconds=1.0),
        Finished(step=30, reason="budget"),
    )
    write_json(folder / "config.json", {"model": "MLP", "effective_batch": 8, "lr": 0.1, "headroom": 0.05})
    write_json(folder / "environment.json", {"device": "cpu x86_64", "torch": "2.13"})
    return folder


def test_the_page_says_what_the_run_was_and_answers_what_people_ask(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert page.texts.count("MLP, effective batch 8: finished") == 2, "heading and title of the window"
    line = "first · 14 November 2023, 22:13 UTC · on cpu x86_64 · 240 samples in 30 steps · 3.0 s of training"
    assert line in page.texts
    asked = [page.texts.index(text) for text in page.texts if text.endswith("?")]
    assert len(asked) == 7
    answers = [page.texts[at + 1] for at in asked]
    assert [re.match("Yes|No|Not measured", text) is not None for text in answers] == [True] * 7
    assert "No: the device ran out of memory once. The peak was 3% of the limit" in page.text
    assert page.tags.count("figure") == page.tags.count("svg") == 5
    assert page.tags.count("details") == 2


def test_the_results_and_the_line_that_loads_the_best_stand_above_the_answers(tmp_path: Path) -> None:
    """The line is run as it stands."""

    def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).float()

    data, run_dir = classes(40), tmp_path / "run"
    autoaccum.fit(
        wide(), data, effective_batch=20, loss_fn=cross_entropy, lr=0.01, epochs=3, validation_data=data,
        metrics={"right": right}, callbacks=[autoaccum.callbacks.KeepBest("right", "max")], run_dir=run_dir,
        progress=False, verify=False, device="cpu",
    )  # fmt: skip
    page = page_of(run_dir)
    (facts,) = write_report([run_dir]).runs
    assert facts.best is not None
    assert (facts.best.metric, facts.state) == ("right", "finished")
    for name in ("Samples per second", "Final training loss", "Best right", "Peak memory"):
        assert page.texts.index(name) < page.texts.index("Did it stay within memory?")
    assert page.texts[page.texts.index("Best right") + 1] == f"{facts.best.value:.4g}"
    assert f" step {facts.best.step}, epoch {facts.best.epoch}" in page.texts
    line = page.texts.index(f'import autoaccum; autoaccum.load_best("{run_dir}", model)')
    assert page.texts[line + 1] == f" Loads the weights of step {facts.best.step}, the best validation."
    model = wide()
    exec(page.texts[line], {"model": model})
    with torch.inference_mode():
        assert right(model(data[0]), data[1]).mean().item() == pytest.approx(facts.best.value)


def test_the_line_that_loads_the_last_checkpoint_is_run(tmp_path: Path) -> None:
    trained = autoaccum.fit(
        wide(), classes(40), effective_batch=20, loss_fn=cross_entropy, run_dir=tmp_path, progress=False, device="cpu"
    ).model
    load = write_report([tmp_path]).runs[0].load
    assert load is not None
    model = wide()
    exec(load.text, {"model": model})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


def test_one_step_is_a_step(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    assert " 8 samples in 1 step " in page_of(tmp_path).text


def test_a_run_whose_last_loss_was_not_finite_is_not_called_good(tmp_path: Path) -> None:
    write(tmp_path / "run", report(1), report(2, loss=float("nan")), Finished(step=2, reason="budget"))
    page = page_of(tmp_path / "run")
    assert "run, effective batch 8: diverged" in page.texts
    assert page.texts[page.texts.index("Final training loss") + 1] == "not finite"


def test_tables(run_dir: Path) -> None:
    rows = page_of(run_dir).rows
    assert rows[:4] == [
        ["from step", "from", "to", "why"],
        ["4", "", "4 x 2", "larger ones do not fit"],
        ["9", "4 x 2", "2 x 4", "out of memory"],
        ["12", "memory saving off", "every second block", "out of memory"],
    ]
    assert ["It rains", "You get wet", "Take an umbrella"] in rows
    assert ["lr", "0.1"] in rows
    assert ["torch", "2.13"] in rows


def test_the_page_needs_nothing_but_itself(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert page.runs_nothing()
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links
    assert all(link is not None and link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", (run_dir / "report.html").read_text())


@pytest.mark.usefixtures("real_images")
def test_the_pictures_lie_beside_it(run_dir: Path, tmp_path: Path) -> None:
    made = write_report([run_dir])
    assert made.path == run_dir / "report.html"
    names = [f"report-{name}.png" for name in ("loss", "memory", "batch", "throughput", "lr")]
    assert [image.name for image in made.images] == names
    assert all(image.read_bytes().startswith(b"\x89PNG") for image in made.images)
    elsewhere = write_report([run_dir], tmp_path / "a" / "b")
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"report.html", *names}
    assert elsewhere.runs == made.runs


def test_nothing_that_was_written_is_taken_for_html(tmp_path: Path) -> None:
    folder = write(
        tmp_path / NASTY.replace("/", "|"),
        report(1),
        planned(4, 4, reason=NASTY),
        Replanned(step=2, old=(4, 4), new=(2,) * 4, reason=NASTY),
        report(2),
        Notice(cause=NASTY, consequence=NASTY, cure=NASTY),
        Saved(step=1, path=NASTY, seconds=1.0),
        Resumed(step=2, num_samples=8, checkpoint=NASTY),
        Finished(step=2, reason=NASTY),
    )
    write_json(folder / "config.json", {NASTY: NASTY, "model": NASTY, "effective_batch": NASTY, "headroom": NASTY})
    write_json(folder / "environment.json", {NASTY: {NASTY: [NASTY]}, "device": NASTY})
    other = write(tmp_path / '$x^$ _"&quot;<b>', report(1))
    for page in (page_of(folder), both := page_of(folder, other, output=tmp_path / "both")):
        assert page.runs_nothing()
        assert NASTY in page.text
    assert {f"1: {folder.name}", '2: $x^$ _"&quot;<b>'} <= set(both.texts), "the legend"


def test_above_plans_it_says_how_to_read_them(run_dir: Path, tmp_path: Path) -> None:
    told = "micro-batch x accumulation steps: 8 x 32 is 32 micro-batches of 8 samples."
    assert told in page_of(run_dir).text
    assert told not in page_of(write(tmp_path / "none", report(1))).text, "without plans there is no table"


def test_plans_stand_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    """A plan that was settled on is recorded with the windows before it, and what is tried next with its window."""
    write(
        tmp_path,
        *(report(step) for step in range(1, 7)),
        planned(4, 4, step=6, reason="larger ones do not fit"),
        saving(step=7),
        planned(8, step=6, reason="the full batch fits"),
        *(report(step) for step in range(7, 10)),
        Replanned(step=9, old=(8,), new=(4, 4), reason="out of memory"),
        planned(4, 4, step=9, reason="larger ones do not fit"),
    )
    rows = page_of(tmp_path).rows[1:]
    assert [row[0] for row in rows] == ["7", "7", "7", "9", "10"]
    assert [row[2] for row in rows] == ["4 x 2", "every second block", "8 x 1", "4 x 2", "4 x 2"]


def test_windows_that_tried_others_stand_between_two_plans(tmp_path: Path) -> None:
    write(
        tmp_path,
        report(1),
        planned(4, 4, step=1),
        report(2),
        report(3, (8,)),
        report(4, (8,)),
        planned(8, step=4),
        report(5, (8,)),
    )
    rows = page_of(tmp_path).rows[1:]
    assert rows[1] == ["3", "4 x 2", "other plans", "the speeds of plans were compared again, for 2 steps"]
    assert [row[0] for row in rows] == ["2", "3", "5"]


def test_of_a_ramp_the_table_has_what_is_news(tmp_path: Path) -> None:
    ramp = [
        Replanned(step=step, old=(99 + step,), new=(100 + step,), reason=f"the effective batch is {100 + step} now")
        for step in range(1, 101)
    ]
    settled = [planned(100 + step, step=step) for step in (21, 22)]
    write(
        tmp_path,
        report(1),
        *ramp[:22],
        *settled,
        *ramp[22:],
        Replanned(step=101, old=(200,), new=(100, 100), reason="out of memory"),
    )
    rows = page_of(tmp_path).rows
    assert [row[2] for row in rows] == ["to", "101 x 1", "122 x 1", "122 x 1", "147 x 1", "177 x 1", "100 x 2"]


def test_a_long_table_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    many = [Replanned(step=step, old=(2,), new=(1, 1), reason="r") for step in range(1, ROWS + 51)]
    rows = page_of(write(tmp_path, report(1), *many)).rows
    assert len(rows) == ROWS + 2
    assert rows[1][0] == "1"
    assert rows[ROWS // 2 + 1] == ["… 50 more …"]
    assert rows[-1][0] == str(ROWS + 50)


def test_a_notice_that_was_said_again_after_a_resume_is_there_once(tmp_path: Path) -> None:
    notice = Notice(cause="a", consequence="b", cure="c")
    rows = page_of(write(tmp_path, report(1), notice, Resumed(step=1, num_samples=8, checkpoint="c"), notice)).rows
    assert rows == [["cause", "consequence", "cure"], ["a", "b", "c"]]


def test_what_was_measured_is_shown(tmp_path: Path) -> None:
    right, wrong = verified(1.4e-7, tensor="net.bias"), verified(0.27, step=3, tensor="<b>")
    again = Resumed(step=1, num_samples=8, checkpoint="c")
    rows = page_of(write(tmp_path, right, report(1), again, right, wrong)).rows
    assert rows == [
        ["step", "the loss, by", "relative error", "most in", "measured on"],
        ["1", "items", "1.4e-07 (2e-05 allowed)", "net.bias", "6 samples split 1+2+3, 3+2+1, 2+2+2"],
        ["3", "items", "2.7e-01 (2e-05 allowed)", "<b>", "6 samples split 1+2+3, 3+2+1, 2+2+2"],
    ]


def test_what_each_rank_did_is_shown(tmp_path: Path) -> None:
    rows = page_of(write(tmp_path, shared(), report(1), shared())).rows
    assert rows == [
        ["rank", "samples of a batch", "micro-batches", "peak", "limit", "computed", "waited"],
        ["0", "5", "2-3 x 2", "200 B", "1.00 GiB", "8.0 s", "2.0 s"],
        ["1", "3", "3 x 1", "100 B", "2.00 GiB", "2.0 s", "2.0 s"],
    ]


def test_runs_side_by_side(run_dir: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "second", started(), report(1, (5, 5), seconds=4.0))
    write_json(other / "config.json", {"model": "MLP", "effective_batch": 10, "lr": 0.1})
    page = page_of(run_dir, other)
    head, first, second = page.rows[:3]
    assert first[:5] == ["1: first", "finished", "8", "240", "30"]
    assert second[0] == "2: second"
    assert second[1].startswith("running or killed")
    assert dict(zip(head, second, strict=True)) | {"run": "", "state": ""} == {
        "run": "",
        "state": "",
        "effective batch": "10",
        "samples": "8",
        "steps": "1",
        "training time": "4.0 s",
        "samples/s": "2.5",
        "loss at the end": "2",
        "best validation": "-",
        "peak": "1.00 MiB",
        "most of the limit": "0%",
        "out of memory": "0",
        "re-plans": "0",
        "prediction off by": "-",
    }
    assert "gradient off by" not in head, "neither has measured it"
    assert page.rows[3:8] == [
        ["", "1: first", "2: second"],
        ["effective_batch", "8", "10"],
        ["headroom", "0.05", "null"],
        ["device", "cpu x86_64", "null"],
        ["torch", "2.13", "null"],
    ]
    assert page.tags.count("svg") == 4
    assert (run_dir / "comparison-loss-seconds.png").exists()


def test_an_optimizer_by_default_is_told_as_it_was_made(run_dir: Path) -> None:
    made = {"class": "AdamW", "group 0": {"lr": 0.1}}
    write_json(run_dir / "config.json", {"optimizer": None, "trained": {"optimizer": made}})
    page = page_of(run_dir)
    assert ["optimizer class", "AdamW"] in page.rows
    assert ["optimizer", "null"] not in page.rows


def test_the_command_the_commit_and_the_versions_are_at_the_head(run_dir: Path) -> None:
    known = {"autoaccum": "0.1.0", "torch": "2.13", "python": "3.11.7", "commit": "abc-dirty", "command": f"a {NASTY}"}
    write_json(run_dir / "environment.json", {**known, "device": "cpu", "details": {"code": {"loss": "f00"}}})
    page = page_of(run_dir)
    assert f"a {NASTY}" in page.texts
    assert "autoaccum 0.1.0 · torch 2.13 · python 3.11.7 · commit abc-dirty" in page.texts
    assert "f00" not in page.text, "a digest is nothing to read"
    assert page.runs_nothing()


def test_pictures_have_names_in_text(tmp_path: Path) -> None:
    metrics = Validated(step=2, epoch=0, loss=0.5, metrics={NASTY: 0.25}, num_samples=5, micro_batch=3, seconds=1.0)
    page = page_of(write(tmp_path, report(1, loss=float("nan")), report(2), metrics))
    assert page.tags.count("figure") == page.tags.count("svg") > 3
    assert NASTY in page.texts, "the title"
    assert "each window" in page.texts, "the legend"
    assert page.runs_nothing()


def test_a_page_that_is_followed_is_loaded_again(run_dir: Path) -> None:
    assert ("http-equiv", "refresh") not in page_of(run_dir).attributes
    for image in run_dir.glob("*.png"):
        image.unlink()
    made = write_report([run_dir], reload_every=2.5)
    page = Page(made.path.read_text())
    assert {("http-equiv", "refresh"), ("content", "2.5")} <= set(page.attributes)
    assert made.images == ()
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.json", "environment.json", "history.jsonl", "report.html",
    ]  # fmt: skip


def test_a_link_in_the_place_of_the_page_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (run_dir / "report.html").symlink_to(tmp_path / "mine")
    assert page_of(run_dir).tags.count("html") == 1
    assert (tmp_path / "mine").read_text() == "mine"


def test_terms_are_told_each_with_what_it_is_by(tmp_path: Path) -> None:
    said = replace(verified(1e-7), hypothesis='terms {"words": "items", "<b>": "sum"}')
    assert page_of(write(tmp_path, said, report(1))).rows[1][1] == "words: items, <b>: sum"


def test_a_run_without_a_window_has_a_page(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "empty"))
    assert "No: no step is complete yet." in page.texts
    assert "svg" not in page.tags
    write(tmp_path / "begun", started())
    assert "svg" not in page_of(tmp_path / "empty", tmp_path / "begun", output=tmp_path).tags


def test_a_history_with_garbled_lines_says_so(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    with open(tmp_path / "history.jsonl", "ab") as file:
        file.write(b"\x00\n")
    assert "Lines of the history that could not be read: 1." in page_of(tmp_path).texts


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    write(
        tmp_path,
        *(report(step, loss=step % 7, grad_norm=step % 5, seconds=0.1 + step % 3) for step in range(1, 20_001)),
    )
    made = write_report([tmp_path])
    assert made.path.stat().st_size < 1_500_000


def test_of_a_run_whose_limit_fell(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "history.jsonl")
    with simulated_memory(1_500_000) as memory:

        def shrink(record: Any) -> None:
            if isinstance(record, autoaccum.StepReport) and record.step == 6:
                memory.limit = 400_000

        result = autoaccum.fit(
            wide(),
            classes(400),
            effective_batch=40,
            loss_fn=cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            callbacks=[writer, shrink],
            epochs=2,
            verify=False,  # what a measurement lays aside takes a tenth of this memory, which it is not about
            progress=False,
        )
    writer.close()
    write_json(tmp_path / "environment.json", environment())
    page = page_of(tmp_path)
    assert "800 samples in 20 steps" in page.text
    table = [row for row in page.rows if len(row) == 4][1:]
    happened = [e for e in result.events if type(e).__name__ in ("Planned", "Replanned")]
    # A plan that was settled on is told with the windows before it.
    begins = [event.step + isinstance(event, Planned) for event in happened]  # type: ignore[union-attr]
    assert [row[0] for row in table] == [str(step) for step in begins]
    assert table[-1][1:3] == ["40 x 1", "20 x 2"]
    assert table[-1][3].startswith("the limit fell to ")
    assert "he run re-planned once: the limit fell to " in page.text


# The command.


def test_report_prints_where_the_page_is(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    assert main(["report", str(run_dir), str(run_dir), "--output", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both' / 'comparison.html'}\n"


@pytest.mark.usefixtures("real_images")
def test_several_runs_leave_the_page_of_the_first_as_it_is(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {path: path.read_bytes() for path in (write_report([run_dir]).path, *run_dir.glob("report-*.png"))}
    assert main(["report", str(run_dir), str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'comparison.html'}\n"
    assert {path: path.read_bytes() for path in own} == own
    assert "<h1>2 runs</h1>" in (run_dir / "comparison.html").read_text()
    assert (run_dir / "comparison-loss.png").exists()


@pytest.mark.usefixtures("real_images")
def test_an_output_that_ends_in_html_is_the_page(run_dir: Path, tmp_path: Path) -> None:
    made = write_report([run_dir], tmp_path / "new" / "x.html")
    assert made.path == tmp_path / "new" / "x.html"
    assert made.path.is_file()
    assert {image.parent for image in made.images} == {tmp_path / "new"}
    assert {image.name for image in made.images} >= {"x-loss.png"}
    assert write_report([run_dir], tmp_path / "x.htm").path == tmp_path / "x.htm"
    (tmp_path / "y.html").mkdir()
    assert write_report([run_dir], tmp_path / "y.html").path == tmp_path / "y.html" / "report.html"


def test_report_json_is_one_document(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(run_dir / "report.html")
    assert len(document["images"]) == 5
    (run,) = document["runs"]
    assert (run["name"], run["num_steps"], run["best_validation_loss"]) == ("first", 30, 0.1)
    assert run["answers"][0]["question"] == "Did it stay within memory?"
    assert set(run["answers"][0]) == {"question", "text", "good"}
    assert run["title"] == "MLP, effective batch 8: finished"
    assert (run["best"], run["load"]) == ({"metric": "loss", "value": 0.1, "step": 30, "epoch": 0}, None)


def test_a_directory_without_a_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoHistoryError):
        write_report([tmp_path])
    assert main(["report", str(tmp_path)]) == 2
    assert "a directory that holds history.jsonl" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_exits_with_1(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--output", str(run_dir / "history.jsonl")]) == 1
    assert re.fullmatch(r"error: .*File exists.*history\.jsonl'\n", capsys.readouterr().err)


def test_report_imports_no_torch(run_dir: Path) -> None:
    code = (
        "import sys; from autoaccum.cli.app import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code, "report", str(run_dir)], stdout=subprocess.DEVNULL)
    assert child.returncode == 0


# In a browser.


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    installed = sorted(Path.home().glob(".cache/ms-playwright/chromium*/chrome-*/*chrom*"))
    found = (*filter(None, map(shutil.which, names)), *(str(p) for p in installed if p.is_file()))
    return next(iter(found), None)


@pytest.mark.skipif(browser() is None, reason="there is no Chromium to look at the page with")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it(dark: bool, run_dir: Path, tmp_path: Path) -> None:
    from PIL import Image

    made = write_report([run_dir])
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1400"]
    if dark:
        options.append("--blink-settings=preferredColorScheme=0")
    command = [str(browser()), *options, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    subprocess.run([*command, made.path.as_uri()], check=True, capture_output=True, timeout=600)
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
        background = pixels.getpixel((5, 5))
        assert background == ((20, 23, 27) if dark else (255, 255, 255))
        colours = {colour: count for count, colour in pixels.getcolors(maxcolors=2**24)}
    ink = (223, 227, 232) if dark else (36, 40, 46)
    assert colours[ink] > 500, "text"
    assert colours[(59, 127, 196)] > 100, "a curve"
