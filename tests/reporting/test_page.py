"""The page: one file that says it all, and executes nothing that a run has written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


from autoaccum.cli.app import main
from autoaccum.errors import NoHistoryError
from autoaccum.events import Finished, Notice, OutOfMemory, Replanned, Resumed, Saved, Validated
from autoaccum.reporting import write_json
from autoaccum.reporting.page import ROWS, write_report
from tests.reporting.synthetic import planned, report, saving, started, verified, write

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


def test_the_page_says_what_the_run_was(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert page.texts.count("MLP, effective batch 8: finished") == 2, "heading and title of the window"
    line = "first · 14 November 2023, 22:13 UTC · on cpu x86_64 · 240 samples in 30 steps · 3.0 s of training"
    assert line in page.texts
    facts = dict(row for row in page.rows if len(row) == 2)
    expected = {
        "state": "finished",
        "steps": "30",
        "samples per second": "80",
        "training loss at the end": "0.06667",
        "best validation": "loss 0.1 (step 30, epoch 0)",
        "peak memory": "30.00 MiB",
        "most of the limit": "3%",
        "out of memory": "1 time, 0 steps replayed",
        "gradient error": "not measured",
    }
    assert expected.items() <= facts.items()
    assert page.tags.count("figure") == page.tags.count("img") == 5
    assert page.tags.count("details") == 2
    assert [row for row in page.rows if len(row) == 4] == [
        ["from step", "from", "to", "why"],
        ["4", "", "4 x 2", "larger ones do not fit"],
        ["9", "4 x 2", "2 x 4", "out of memory"],
        ["12", "memory saving off", "every second block", "out of memory"],
    ]
    assert [row for row in page.rows if len(row) == 3] == [
        ["cause", "consequence", "cure"],
        ["It rains", "You get wet", "Take an umbrella"],
    ]
    assert (facts["lr"], facts["torch"]) == ("0.1", "2.13")


def test_the_page_needs_nothing_but_itself(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert page.runs_nothing()
    assert not {"link", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(links) == 5
    assert all(str(link).startswith("data:image/svg+xml;base64,") for link in links)
    assert [path.name for path in run_dir.glob("*report*")] == ["report.html"]


def test_the_facts_of_what_went_wrong(tmp_path: Path) -> None:
    write(
        tmp_path / "run",
        report(1, replays=2),
        OutOfMemory(step=1, phase="training", micro_batch=4),
        verified(0.27, step=1, tensor="<b>"),
        verified(1.4e-7, step=2, tensor="net.bias"),
        Resumed(step=1, num_samples=8, checkpoint="c"),
        report(2, loss=float("nan")),
        Finished(step=2, reason="budget"),
    )
    page = page_of(tmp_path / "run")
    assert "run: diverged" in page.texts
    expected = {
        "training loss at the end": "not finite",
        "peak memory": "2.00 MiB",
        "out of memory": "1 time, 1 step replayed",
        "resumed": "1 time",
        "gradient error": "2.7e-01 (1 measurement failed)",
    }
    assert expected.items() <= dict(row for row in page.rows if len(row) == 2).items()


def test_runs_side_by_side(run_dir: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "second", started(), report(1, (5, 5), seconds=4.0))
    write_json(other / "config.json", {"model": "MLP", "effective_batch": 10, "lr": 0.1})
    page = page_of(run_dir, other)
    rows = {row[0]: row[1:] for row in page.rows if len(row) == 3}
    assert page.rows[0] == ["", "1: first", "2: second"]
    assert rows["state"][0] == "finished"
    assert rows["state"][1].startswith("running or killed")
    assert rows["samples per second"] == ["80", "2.5"]
    assert rows["best validation"] == ["loss 0.1 (step 30, epoch 0)", "-"]
    assert rows["effective_batch"] == ["8", "10"]
    assert rows["headroom"] == ["0.05", "null"]
    assert rows["torch"] == ["2.13", "null"]
    assert "model" not in rows, "it does not differ"
    assert page.tags.count("img") == 4
    assert page.tags.count("details") == 2


def test_a_ramp_of_the_effective_batch_is_not_in_the_table_of_plans(tmp_path: Path) -> None:
    ramp = [Replanned(step=step, old=(99 + step,), new=(100 + step,), reason="ramp") for step in range(1, 101)]
    memory = Replanned(step=101, old=(200,), new=(100, 100), reason="out of memory")
    rows = page_of(write(tmp_path, report(1), *ramp, memory)).rows
    assert [row for row in rows if len(row) == 4][1:] == [["101", "200 x 1", "100 x 2", "out of memory"]]


def test_a_run_without_a_window_has_a_page(tmp_path: Path) -> None:
    page = page_of(write(tmp_path / "empty"))
    assert page.rows == [["state", "nothing recorded yet"]]
    assert "img" not in page.tags
    write(tmp_path / "begun", started())
    assert "img" not in page_of(tmp_path / "empty", tmp_path / "begun", output=tmp_path).tags


def test_an_output_that_ends_in_html_is_the_page(run_dir: Path, tmp_path: Path) -> None:
    made = write_report([run_dir], tmp_path / "new" / "x.html")
    assert made.path == tmp_path / "new" / "x.html"
    assert made.path.is_file()
    assert write_report([run_dir], tmp_path / "x.htm").path == tmp_path / "x.htm"
    (tmp_path / "y.html").mkdir()
    assert write_report([run_dir], tmp_path / "y.html").path == tmp_path / "y.html" / "report.html"


def test_one_step_is_a_step(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    assert " 8 samples in 1 step " in page_of(tmp_path).text


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
    assert ["", f"1: {folder.name}", '2: $x^$ _"&quot;<b>'] in both.rows


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
    rows = [row for row in page_of(tmp_path).rows if len(row) == 4][1:]
    assert [row[0] for row in rows] == ["7", "7", "7", "9", "10"]
    assert [row[2] for row in rows] == ["4 x 2", "every second block", "8 x 1", "4 x 2", "4 x 2"]


def test_a_long_table_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    many = [Replanned(step=step, old=(2,), new=(1, 1), reason="r") for step in range(1, ROWS + 51)]
    rows = [row for row in page_of(write(tmp_path, report(1), *many)).rows if len(row) != 2]
    assert len(rows) == ROWS + 2
    assert rows[1][0] == "1"
    assert rows[ROWS // 2 + 1] == ["… 50 more …"]
    assert rows[-1][0] == str(ROWS + 50)


def test_a_notice_that_was_said_again_after_a_resume_is_there_once(tmp_path: Path) -> None:
    notice = Notice(cause="a", consequence="b", cure="c")
    rows = page_of(write(tmp_path, report(1), notice, Resumed(step=1, num_samples=8, checkpoint="c"), notice)).rows
    assert [row for row in rows if len(row) == 3] == [["cause", "consequence", "cure"], ["a", "b", "c"]]


def test_an_optimizer_by_default_is_told_as_it_was_made(run_dir: Path) -> None:
    made = {"class": "AdamW", "group 0": {"lr": 0.1}}
    write_json(run_dir / "config.json", {"optimizer": None, "trained": {"optimizer": made}})
    page = page_of(run_dir)
    assert ["optimizer class", "AdamW"] in page.rows
    assert ["optimizer", "null"] not in page.rows


def test_the_command_the_commit_and_the_versions_are_at_the_head(run_dir: Path) -> None:
    known = {"autoaccum": "0.1.0", "torch": "2.13", "python": "3.11.7", "commit": "abc-dirty", "command": f"a {NASTY}"}
    write_json(run_dir / "environment.json", {**known, "device": "cpu"})
    page = page_of(run_dir)
    assert f"a {NASTY}" in page.texts
    assert "autoaccum 0.1.0 · torch 2.13 · python 3.11.7 · commit abc-dirty" in page.texts
    assert page.runs_nothing()


def test_a_link_in_the_place_of_the_page_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (run_dir / "report.html").symlink_to(tmp_path / "mine")
    assert page_of(run_dir).tags.count("html") == 1
    assert (tmp_path / "mine").read_text() == "mine"


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


# The command.


def test_report_prints_where_the_page_is(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    assert main(["report", str(run_dir), str(run_dir), "--output", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both' / 'comparison.html'}\n"


def test_several_runs_leave_the_page_of_the_first_as_it_is(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = write_report([run_dir]).path.read_bytes()
    assert main(["report", str(run_dir), str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'comparison.html'}\n"
    assert (run_dir / "report.html").read_bytes() == own
    assert "<h1>2 runs</h1>" in (run_dir / "comparison.html").read_text()


def test_report_json_is_one_document(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(run_dir / "report.html")
    (run,) = document["runs"]
    assert (run["name"], run["num_steps"]) == ("first", 30)
    assert run["title"] == "MLP, effective batch 8: finished"
    assert run["best"] == {"metric": "loss", "value": 0.1, "step": 30, "epoch": 0}


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
    assert colours[(31, 119, 180)] > 100, "a curve"
