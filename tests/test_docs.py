"""What README and docs say to type works: code blocks run, commands exit with 0, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoaccum
from autoaccum.cli.app import _app, main
from autoaccum.events import Started, Validated
from tests.processes import in_turn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```\n", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


COMMANDS = list(
    dict.fromkeys(
        line
        for page in PAGES
        for block in blocks(page, "")
        for line in block.splitlines()
        if line.startswith("autoaccum ")
    )
)


def sequences() -> dict[str, list[str]]:
    """Commands by what they are about: those of one run follow one another, all others are by themselves."""
    found: dict[str, list[str]] = {}
    for command in COMMANDS:
        run = re.search(r" (runs/\w+)", command)
        found.setdefault(run[1] if run else command, []).append(command)
    return found


SHORTER = {"--samples 2560": "--samples 600"}
"""Three windows of the GPT say as much as ten."""


@pytest.mark.parametrize("commands", sequences().values(), ids=sequences())
def test_commands(commands: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands:
        for long, short in {**SHORTER, " runs/": f" {tmp_path}/"}.items():
            command = command.replace(long, short)
        arguments = shlex.split(command)[1:]
        if "GiB" in command:  # this process may have as much in use already
            code = subprocess.run([sys.executable, "-m", "autoaccum", *arguments], capture_output=True).returncode
        else:
            code = main(arguments)
        assert code == 0, command


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 8


def parsed() -> list[str]:
    """Commands that need something no test has, such as a scheduler or a run that goes on: those of all other blocks."""
    found = []
    for page in PAGES:
        lines = "".join(text for language in ("", "bash", "text") for text in blocks(page, language))
        for line in lines.replace("\\\n", " ").splitlines():
            if command := re.match(
                r"(?:|(?:srun )?torchrun .* -m )(autoaccum (?:check|fit|probe|plan|sweep|report) .*)", line
            ):
                found.append(command[1])
    return [command for command in dict.fromkeys(found) if command not in COMMANDS]


@pytest.mark.parametrize("command", parsed())
def test_commands_that_are_not_run_are_understood(command: str) -> None:
    _, bound, ignored = _app().parse_args(shlex.split(command)[1:], print_error=False, exit_on_error=False)
    assert bound.arguments
    assert not ignored


def test_there_are_commands_that_are_not_run() -> None:
    assert len(parsed()) >= 6


SHARDED = ("ranks.md", 1)
"""The block of code that all ranks run."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_code_stands_in_a_block_that_no_test_looks_at(page: Path) -> None:
    fences = re.findall(r"^( *)```(\w*)$", page.read_text(), re.MULTILINE)
    assert {language for _, language in fences} <= {"", "bash", "diff", "python", "text"}
    assert not any(indent for indent, _ in fences), "what is indented is not found"
    known = ("autoaccum ", "bash .ci/run", "python -m p", "torchrun ")
    others = [line for block in blocks(page, "") for line in block.splitlines() if not line.startswith(known)]
    code = [line for line in others if re.search(r"[=(\[]|^import |^from ", line)]
    assert not code


BY_OTHER_TESTS = {"coming_from_accelerate.md", "coming_from_lightning.md", "coming_from_transformers.md"}
"""Pages whose code trains by other libraries: tests/integrations runs it, before and after the change."""
EXCERPTS = {"design.md"}
"""Pages whose code is a piece of the package's own, and no example."""

OF_THE_READER = """
import torch

import autoaccum

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy
batch = torch.randn(256, 4), torch.randint(2, (256,))
data = torch.randn(512, 4), torch.randint(2, (512,))
loader = [batch, batch]
"""
OF_EACH_RANK = f"""{OF_THE_READER}
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential()
model.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
"""
GIVEN = {("ranks.md", 0): OF_THE_READER}
"""What the reader of a block of a page is taken to have."""


@pytest.mark.filterwarnings("ignore:The run in .*runs/a is finished")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in BY_OTHER_TESTS | EXCERPTS:
        return
    monkeypatch.chdir(tmp_path)  # where some of them write
    namespace: dict[str, Any] = {}
    for number, block in enumerate(blocks(page, "python")):
        if (page.name, number) != SHARDED:
            exec(GIVEN.get((page.name, number), ""), namespace)
            exec(block, namespace)


@in_turn
def test_the_code_of_ranks_runs_on_two(tmp_path: Path) -> None:
    page, number = SHARDED
    block = blocks(ROOT / "docs" / page, "python")[number]
    (tmp_path / "train.py").write_text(f"{OF_EACH_RANK}\n{block}\nprint('trained', flush=True)\n")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(tmp_path / "train.py")], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def test_pages_whose_code_is_not_run_here_have_some() -> None:
    with_code = {page.name for page in PAGES if blocks(page, "python")}
    assert with_code >= BY_OTHER_TESTS | EXCERPTS | {page for page, _ in GIVEN}
    assert len(with_code) >= 20


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda notebook: notebook.name)
def test_notebook_runs_and_prints_what_it_shows(notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 3
    namespace: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), namespace)
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        # Of numbers that depend on rounding the words are the same.
        assert re.sub(r"\d+%", "%", capsys.readouterr().out) == re.sub(r"\d+%", "%", shown)


def test_there_is_a_notebook() -> None:
    assert (ROOT / "examples" / "quick_start.ipynb").exists()


def rows_of_windows() -> list[tuple[str, str, str]]:
    """(arguments, windows, validated after) of the table in docs/schedules.md."""
    text = (ROOT / "docs" / "schedules.md").read_text()
    return re.findall(r"^\| `(effective_batch=[^|]*)` \| ([\d ]+) \| ([\d ]+) \|$", text, re.MULTILINE)


@pytest.mark.filterwarnings("ignore:effective_batch=32 is more than")
@pytest.mark.parametrize(("arguments", "windows", "validated"), rows_of_windows())
def test_row_of_the_table_of_windows(arguments: str, windows: str, validated: str) -> None:
    data = torch.randn(20, 2), torch.randn(20, 1)
    result = autoaccum.fit(
        torch.nn.Linear(2, 1),
        data,
        loss_fn=torch.nn.functional.mse_loss,
        validation_data=data,
        device="cpu",
        progress=False,
        cache=False,
        **eval(f"dict({arguments})"),
    )
    assert [report.effective_batch for report in result.history] == [int(size) for size in windows.split()]
    seen = {report.step: report.num_samples for report in result.history}
    after = [seen[event.step] for event in result.events if isinstance(event, Validated)]
    assert after == [int(samples) for samples in validated.split()]
    started = result.events[0]
    assert isinstance(started, Started)
    assert (started.num_steps, started.num_samples) == (result.num_steps, result.num_samples)


def test_the_table_of_windows_has_rows() -> None:
    assert len(rows_of_windows()) >= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for target in re.findall(r"`((?:autoaccum|benchmarks|docs|examples|findings|tests)/[\w/]+\.\w+)", page.read_text()):
        assert (ROOT / target).exists(), target


def figures(text: str) -> list[tuple[str, int, float]]:
    """Return the numbers in a text as they stand, with how many digits follow the point."""
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", text)
    return [(each, len(each.partition(".")[2]), float(each.replace(",", ""))) for each in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_that_lead_to_a_table_stand_in_it(page: Path) -> None:
    """A table that is measured anew would make the pages that quote it untrue in silence."""
    link = r"\[([^\]]*\d[^\]]*)\]\((?:\.\./)?((?:benchmarks/results|docs)/\w+\.md)[^)]*\)"
    for text, table in re.findall(link, page.read_text()):
        measured = [value for _, _, value in figures((ROOT / table).read_text())]
        for shown, digits, value in figures(text):
            assert any(round(each, digits) == value for each in measured), f"{shown} is not in {table}"


def test_the_table_of_exactness_is_the_one_that_was_measured() -> None:
    _, measured = (ROOT / "benchmarks" / "results" / "exactness.md").read_text().split("\n\n", 1)
    assert measured in (ROOT / "docs" / "exactness.md").read_text()


def test_the_tables_of_the_comparison_are_those_that_were_measured() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    results = ROOT / "benchmarks" / "results"
    (table,) = re.findall(
        r"^\| finder \| answers.*?\n\n", (results / "search.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert table in page
    for name, shown in {
        "autoaccum fit": "autoaccum `fit`",
        "Lightning power": "Lightning, power",
        "Lightning binsearch": "Lightning, binsearch",
        "Accelerate find_executable_batch_size": "Accelerate `find_executable_batch_size`",
        "Transformers auto_find_batch_size": "Transformers `auto_find_batch_size`",
    }.items():
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in (results / "time_to_train.md").read_text().splitlines()
            if f"| {name} |" in line
        ]
        ratios = sorted({f"{float(row[4]):.2f}" for row in rows if row[4]})
        asked = {"small GPT": "256", "wide MLP": "4096"}
        is_kept = all(row[6] == asked[row[0]] for row in rows if row[4])
        span = " to ".join([*ratios[:1], *ratios[1:][-1:]])
        failed = sum(row[3].startswith("failed") for row in rows)
        assert f"| {shown} | {span} | {'yes' if is_kept else 'no'} | {failed} |" in page


def test_tests_mirror_the_package() -> None:
    """Every module has a test file of its name in the same place."""
    package = ROOT / "autoaccum"
    for module in package.rglob("*.py"):
        if module.name.startswith("_") or (module.parent.name in ("data", "memory") and module.name == "base.py"):
            continue
        place = ROOT / "tests" / module.relative_to(package).parent
        if module.parent.name == "data":
            assert (place / "test_sources.py").exists()
        else:
            assert (place / f"test_{module.name}").exists(), module
