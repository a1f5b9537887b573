"""What a package index shows: links that lead somewhere without the repository beside them, and versions that agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

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
    assert len(targets) == len(re.findall(r"\]\(", text)) > 50
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
