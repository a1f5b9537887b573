"""The site of the documentation builds without a warning, loads nothing from elsewhere, and is searched offline.

It takes the extra ``docs``; without it there is nothing to build, and nothing is tested here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import autoaccum

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parent.parent
CONFIGURATION = ROOT / "docs" / "site" / "mkdocs.yml"
LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Elements that are loaded with a page, by what says from where. What a reader has to click on may lie elsewhere."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIGURATION), "-d", str(folder)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def index(site: Path) -> list[dict[str, Any]]:
    """What search looks through: a title, a text and a place for each section of each page."""
    found: list[dict[str, Any]] = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    return found


class Elements(HTMLParser):
    """Collects what a page loads, and the ids in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids.add(values.get("id") or "")
        if (source := values.get(LOADED.get(tag, ""))) and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(source)


def test_every_page_of_the_documentation_is_on_it(site: Path) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert names - {path.stem for path in site.glob("*.html")} == set()
    assert (site / "benchmarks" / "results" / "search.html").exists()
    assert (site / "examples" / "quick_start.html").exists()
    assert "Quick start" in (site / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        elements = Elements(page.read_text())
        assert len(elements.loaded) > 3
        for source in elements.loaded:
            assert not re.match(r"(\w+:)?//", source), f"{page}: {source}"
            if page.name != "404.html":  # whose links are those of a server's root
                assert (page.parent / source.partition("?")[0]).exists(), f"{page}: {source}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(\w+:)?//", sheet.read_text()), sheet


def test_search_finds_out_of_memory_among_the_messages(site: Path, index: list[dict[str, Any]]) -> None:
    found = [entry["location"] for entry in index if "out of memory" in entry["text"] + entry["title"].lower()]
    assert "troubleshooting.html#out-of-memory" in found
    assert "troubleshooting.html#optimizeroutofmemoryerror" in found
    # A page that was opened from a disk can read no JSON, and start no worker: both come as scripts.
    script = (site / "search" / "search_index.js").read_text()
    assert json.loads(script.removeprefix("var __index = "))["docs"] == index
    assert "iframe-worker.js" in (site / "troubleshooting.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    page = Elements((site / "reference" / "autoaccum.html").read_text())
    assert {f"autoaccum.{name}" for name in autoaccum.__all__ if name != "__version__"} - page.ids == set()
    for module in autoaccum._MODULES:
        page = Elements((site / "reference" / f"autoaccum.{module}.html").read_text())
        names = getattr(getattr(autoaccum, module), "__all__", ())
        assert {f"autoaccum.{module}.{name}" for name in names if not name.isupper()} - page.ids == set()
    errors = Elements((site / "reference" / "autoaccum.errors.html").read_text())
    assert {"autoaccum.errors.NothingFitsError", "autoaccum.errors.StopTraining"} <= errors.ids


def test_docstrings_are_markdown(site: Path) -> None:
    spec = importlib.util.spec_from_file_location("docs_docstrings", CONFIGURATION.with_name("docstrings.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Add.\n\n>>> 1 + 1\n2\n\n::\n\n    a picture"
    assert module.as_markdown(text) == "Add.\n\n```python\n>>> 1 + 1\n2\n```\n\n\n    a picture\n"
    for page in (site / "reference").glob("*.html"):
        assert "<blockquote>" not in page.read_text(), page  # which ">>> " is in Markdown
        assert "<p>::" not in page.read_text(), page


def test_links_to_pages_lead_to_pages(site: Path) -> None:
    """Strict building looks at links in Markdown alone, and not at what the hooks have made of them."""
    text = (site / "index.html").read_text()
    assert 'href="guide.html"' in text
    assert 'href="devices.html#the-same-numbers-twice"' in text
    assert 'href="benchmarks/results/verification.html"' in text
    assert 'srcset="readme-dark.svg"' in text
    assert 'href="docs/' not in text
    assert not re.findall(r'href="(?!https?:)[^"]*\.(?:py|md|ipynb)"', text)
