"""What a package index shows: links that lead somewhere without the repository beside them, and versions that agree."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from autoaccum.errors import MissingExtraError

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOME = PROJECT["project"]["urls"]["Homepage"]


def published(text: str) -> str:
    """The text as the build publishes it."""
    for substitution in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    return text


def test_links_of_the_published_page_lead_to_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]*)\)", published(text))
    assert len(targets) == len(re.findall(r"\]\(", text)) > 20
    for target in targets:
        if target.startswith(HOME):
            kind, branch, path = target.removeprefix(f"{HOME}/").split("#")[0].split("/", 2)
            assert (kind, branch) in (("blob", "main"), ("raw", "main"))
            assert (ROOT / path).exists(), target
        else:
            assert target.startswith(("https://", "#")), target


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ("[a](docs/a.md#b)", f"[a]({HOME}/blob/main/docs/a.md#b)"),
        ("![a](docs/a.svg)", f"![a]({HOME}/raw/main/docs/a.svg)"),
        ("[![a](docs/a.svg)](docs/a.md)", f"[![a]({HOME}/raw/main/docs/a.svg)]({HOME}/blob/main/docs/a.md)"),
        ('<img src="docs/a.svg" alt="b">', f'<img src="{HOME}/raw/main/docs/a.svg" alt="b">'),
        ('<source media="(a)" srcset="docs/a.svg">', f'<source media="(a)" srcset="{HOME}/raw/main/docs/a.svg">'),
        ('<img src="https://example.org/a.svg">', '<img src="https://example.org/a.svg">'),
        ("[a](#b)", "[a](#b)"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
    ],
)
def test_what_becomes_of_a_link(link: str, becomes: str) -> None:
    assert published(link) == becomes


def test_the_home_of_the_project_is_one() -> None:
    assert all(url.startswith(HOME) for url in PROJECT["project"]["urls"].values())
    # All addresses at the same host that the build file has are those of the home.
    host = HOME.split("/autoaccum")[0]
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(host) == text.count(HOME) >= 4


def test_classifiers_are_the_versions_that_were_tested() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    tested = re.findall(r"^\| (3\.\d+) \| (?!not tested)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert versions == tested


EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
RAISED = {
    tuple(ast.literal_eval(argument) for argument in node.args)
    for path in (ROOT / "autoaccum").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtraError"
}
"""(package, extra, purpose) of each error about an extra that is not installed."""


@pytest.mark.parametrize(("package", "extra", "purpose"), sorted(RAISED))
def test_the_command_that_an_error_names_installs_the_extra(package: str, extra: str, purpose: str) -> None:
    (needed,) = EXTRAS[extra]
    command = str(MissingExtraError(package, extra, purpose)).partition("Run: ")[2]
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", Requirement(needed).name]


@pytest.mark.parametrize("extra", ["plot", "sweep"])
def test_the_command_that_an_error_names_runs(extra: str) -> None:
    """On what the tests have installed, so that it takes no network."""
    (error,) = {MissingExtraError(*facts) for facts in RAISED if facts[1] == extra}
    command = [*shlex.split(str(error).partition("Run: ")[2]), "--no-index", "--no-deps", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert f"Requirement already satisfied: {error.package}" in done.stdout


def test_the_extras_for_errors_are_found() -> None:
    assert {extra for _, extra, _ in RAISED} == {"mlflow", "plot", "sweep", "tensorboard", "wandb"}


def test_optuna_is_needed_for_sweeps_alone() -> None:
    core = {Requirement(each).name for each in PROJECT["project"]["dependencies"]}
    assert core == {"cyclopts", "numpy", "psutil", "torch", "tqdm"}
    # Tests sweep and draw, and one example is a sweep.
    assert {*EXTRAS["sweep"], *EXTRAS["plot"]} <= {*EXTRAS["test"]}
    assert {*EXTRAS["sweep"]} <= {*EXTRAS["examples"]}
