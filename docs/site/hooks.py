"""Makes a site of ``docs/``: adds pages that lie elsewhere in the repository, and leads links to where things are.

Links in Markdown are those of the repository, where every page can be read as it is. On the site a link to a file that
is no page leads to the repository's address, which ``pyproject.toml`` has, and is plain text where there is none.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the public names of the package beside these pages

import autoaccum  # noqa: E402

# Pages and pictures that are not in docs/, by where they lie in the repository; "*" as in a glob. They keep their place
# on the site but for the README, which is its first page.
ELSEWHERE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/*.md", "benchmarks/results/*.png")
ASSETS = ("iframe-worker.js", "messages.css")
"""Files beside this one that pages load."""

MODULES = (
    *(f"autoaccum.{name}" for name in autoaccum._MODULES),
    "autoaccum.integrations.transformers",
    "autoaccum.integrations.lightning",
    "autoaccum.step.contrastive",
)
"""Modules that users import from, each with a page of the reference beside that of ``autoaccum`` itself."""


def places() -> dict[str, str]:
    """Return the files from elsewhere, each with its place on the site."""
    found = [path.relative_to(ROOT).as_posix() for pattern in ELSEWHERE for path in sorted(ROOT.glob(pattern))]
    return {path: "index.md" if path == "README.md" else path for path in found}


def notebooks() -> list[Path]:
    """Return the notebooks among the examples."""
    return sorted(ROOT.glob("examples/*.ipynb"))


def address() -> str | None:
    """Return where the repository's files can be seen, with a slash at the end; None where nobody has said."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    for name in ("Repository", "Source", "Homepage"):
        if name in urls:
            return f"{urls[name].rstrip('/')}/blob/main/"
    return None


# The reference.


def names_of(module: str) -> list[str]:
    """Return the public names of a module: those of its ``__all__``, or what it defines without an underscore.

    They are read and not imported, for what a module imports need not be installed.
    """
    if module == "autoaccum":
        return [name for name in autoaccum.__all__ if not name.startswith("_")]
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [name for name in defined if not name.startswith("_")]


def reference(module: str) -> str:
    """Return the page of a module: what it is for, and each of its names, of which mkdocstrings tells the rest."""
    options = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
    head = f"# {module}\n\n::: {module}\n    options: {options}\n"
    return head + "".join(f"\n::: {module}.{name}\n" for name in names_of(module))


# Notebooks.


def as_markdown(notebook: Path) -> str:
    """Return a notebook as a page: its texts, its code, and below each piece of code what it has printed."""
    pieces = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            pieces.append(text)
            continue
        pieces.append(f"```python\n{text}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            pieces.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(pieces) + "\n"


# What mkdocs calls.


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in ``docs/``."""
    for path, place in places().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for notebook in notebooks():
        place = notebook.relative_to(ROOT).with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=as_markdown(notebook)))
    for module in ("autoaccum", *MODULES):
        files.append(File.generated(config, f"reference/{module}.md", content=reference(module)))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(Path(__file__).with_name(name))))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference where the navigation has a place for them."""
    pages = [{module: f"reference/{module}.md"} for module in ("autoaccum", *MODULES)]
    for entry in config.nav or []:
        if entry.get("API reference"):
            entry["API reference"] = pages
    return config


FENCED = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r'(<(?:img|source)\b[^>]*?\b(?:src|srcset)=")docs/')
"""What begins a picture in HTML, which the README has for its version for dark pages."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where the same things are on the site, or in the repository."""
    if page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 8}  # who looks for a message is to find it before all that speaks of the matter
    of_site = {place: path for path, place in places().items()}
    uri = page.file.src_uri
    own = of_site.get(uri, uri if page.file.generated_by else f"docs/{uri}")

    def led(link: re.Match[str]) -> str:
        bang, text, target = link.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"\w+:", target):
            return link[0]
        there = normpath(join(dirname(own), path))
        place = place_of(there, files)
        if place is not None:
            return f"{bang}[{text}]({relpath(place, dirname(uri) or '.')}{hash_sign}{anchor})"
        where = address()
        return f"[{text}]({where}{there})" if where else text

    def mended(text: str) -> str:
        return PICTURE.sub(r"\1", LINK.sub(led, text))  # the README's pictures lie in docs/, whose files are the site's

    # Code is left as it is: what looks like a link there is an index and a call.
    parts, end = [], 0
    for code in FENCED.finditer(markdown):
        parts += [mended(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, mended(markdown[end:])])


def place_of(path: str, files: Files) -> str | None:
    """Return the place on the site of a file or folder of the repository; None where the site has it not."""
    if path == "benchmarks/results":
        path += "/README.md"
    for place in (places().get(path), path.removeprefix("docs/") if path.startswith("docs/") else None):
        if place is not None and (file := files.get_file_from_path(place)) and not file.inclusion.is_excluded():
            return place
    notebook = str(Path(path).with_suffix(".md"))
    return notebook if path.endswith(".ipynb") and files.get_file_from_path(notebook) else None
