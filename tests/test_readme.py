"""The README: its length, its snippets as they stand, its output as it is printed, and a status that all pages share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autoaccum.events import Planned
from autoaccum.reporting.lines import line as line_of
from tests.integrations.pages import halves
from tests.test_docs import blocks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text()


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120
    assert len(TEXT.split()) <= 1100


def test_the_set_up_is_typed_as_it_stands() -> None:
    (commands,) = blocks(README, "")
    clone, install = commands.splitlines()
    assert clone == "git clone https://github.com/autoaccum/autoaccum && cd autoaccum"
    run = "autoaccum fit examples/char_gpt.py --effective-batch 256"
    assert install == f'python -m pip install -c constraints.txt ".[plot,sweep]" && {run}'
    # .ci/run takes it from here.
    assert '`python -m pip install -c constraints.txt -e ".[test]" && python -m pytest`' in TEXT


def run(code: str, place: Path) -> str:
    """Run a snippet by itself, as a reader does who pastes it; return what it prints."""
    (place / "snippet.py").write_text(code)
    done = subprocess.run([sys.executable, "snippet.py"], cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_of_fit_runs(tmp_path: Path) -> None:
    (snippet,) = blocks(README, "python")
    printed = run(snippet, tmp_path)
    assert printed.startswith("EXACT: ")
    assert "num_steps=20" in printed


def test_both_halves_of_the_loop_run_and_train_the_same(tmp_path: Path) -> None:
    loop = blocks(README, "diff")[0]
    changed = [line for line in loop.splitlines() if line.startswith(("+", "-")) and "import" not in line]
    assert len(changed) == 5  # as the page says
    show = "\nprint(float(model.weight.double().norm()))"
    before, after = (
        run(half.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1) + show, tmp_path)
        for half in halves(loop)
    )
    assert float(after) == pytest.approx(float(before), rel=1e-6)


def shape(line: str) -> str:
    """Return a line without its figures, which are those of one machine."""
    return re.sub(r"\d[\d.,e-]*( ?[KMG]iB)?( x \d+)?", "#", line).strip()


def printed_by(arguments: list[str], place: Path) -> str:
    command = [sys.executable, "-m", "autoaccum", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "AUTOACCUM_RUNS_DIR"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_its_output_is_what_the_first_run_prints(tmp_path: Path) -> None:
    """Of fewer samples; the text that the model writes is another one then."""
    shown = blocks(README, "text")[0].splitlines()
    assert len(shown) == 6
    arguments = ["fit", str(ROOT / "examples" / "char_gpt.py"), "--effective-batch", "256", "--samples", "512"]
    lines = {shape(line) for line in re.split(r"[\r\n]", printed_by([*arguments, "--no-cache"], tmp_path))}
    planned = Planned(
        step=3,
        sizes=(256,),
        reason="the full batch fits",
        predicted_bytes=2**29,
        prediction_error=0.01,
        limit_bytes=2**34,
    )
    assert shape(shown.pop(0)) == shape(str(line_of(planned)))  # two steps are too few to settle on a plan
    del shown[2]  # which the model writes
    assert [line for line in shown if shape(line) not in lines] == []


def test_its_check_is_what_a_check_prints(tmp_path: Path) -> None:
    shown = blocks(README, "text")[1].splitlines()
    printed = printed_by(["check", str(ROOT / "examples" / "char_gpt.py")], tmp_path).splitlines()
    assert [shape(line) for line in shown] == [shape(line) for line in printed[: len(shown)]]


def test_all_pages_say_the_same_of_where_it_has_run() -> None:
    status = r"^autoaccum is alpha and not on a package index\. .*$"
    said = {
        re.sub(r"\]\([^)]*\)", "]", line)
        for page in (README, ROOT / "docs" / "devices.md", ROOT / "docs" / "comparison.md")
        for line in re.findall(status, page.read_text(), re.MULTILINE)
    }
    assert len(said) == 1
    assert "758 of 766" in said.pop()


def test_it_names_no_figure_that_is_not_there() -> None:
    pictures = re.findall(r'(?:src|srcset)="([^"]*)"', TEXT)
    assert len(pictures) == 2
    assert all((ROOT / picture).exists() for picture in pictures)
