"""Draws the rooms of the house and lists their files in the tour, ``docs/design.md``.

``python docs/rooms.py --write`` draws ``docs/rooms.svg`` and writes the table of the tour. The line of a room or file
is the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autoaccum"
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # draws the package beside it

import grimp  # noqa: E402

PAGE = ROOT / "docs" / "design.md"
PICTURE = ROOT / "docs" / "rooms.svg"

LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
ROOM_OF = {"__init__": "facade"}
"""The room of each module or folder at the top of the package."""
for _index, _layer in enumerate(LAYERS):
    _names = _layer.split(" : ")
    _room = "facade" if not _index else "floor" if _index == len(LAYERS) - 1 else _names[-1]
    ROOM_OF |= dict.fromkeys(_names, _room)
ROOMS = list(dict.fromkeys(ROOM_OF.values()))
"""From the top down, as import-linter holds them."""

TITLES = {"facade": "the top", "floor": "the floor"}
"""The names of rooms that are no folder."""
PURPOSES = {
    "facade": "The public names, each imported when it is first used: `import autoaccum` loads no torch.",
    "floor": "What every room may use: public errors and events, checks of arguments, bytes as text.",
}
"""What rooms are for that are no folder."""

TABLE = re.compile(r"(?<=<!-- rooms: written by docs/rooms.py -->\n)(.*?)(?=<!-- end of rooms -->)", re.DOTALL)


def files() -> set[str]:
    """Return the files of the package that a tour names: all but those that only make a folder a package."""
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    return {file for file in found if file == "__init__.py" or not file.endswith("/__init__.py")}


def room(file: str) -> str:
    """Return the name of a file's room."""
    return ROOM_OF[file.split("/")[0].removesuffix(".py")]


def title(name: str) -> str:
    """Return how a room is called on the page and in the picture."""
    return TITLES.get(name, f"{name}/")


def purpose(name: str) -> str:
    """Return what a room is for."""
    return PURPOSES.get(name) or first_line(PACKAGE / name / "__init__.py")


def first_line(path: Path) -> str:
    """Return the first line of a file's docstring, as Markdown."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].replace("``", "`")


def written(page: str) -> str:
    """Return the page with its table of rooms and files as the code has them."""
    lines = ["", "| file | what it does |", "| --- | --- |"]
    for name in ROOMS:
        lines.append(f"| **{title(name)}** | **{purpose(name)}** |")
        lines += [
            f"| [{file}](../autoaccum/{file}) | {first_line(PACKAGE / file)} |"
            for file in sorted(files())
            if room(file) == name
        ]
    return TABLE.sub("\n".join([*lines, "", ""]), page)


# The picture. Its colours stand on a ground of their own, so it can be read on a page of any colour.

WIDTH, LEFT, BOX, CELL, HEAD, LINE, GAP = 1130, 20, 730, 24, 110, 17, 8
"""Pixels of the picture, its margin, a room, a cell of the matrix, the matrix's head, a line of text, between rooms."""
STYLE = """
.ground { fill: #ffffff } .box { fill: #f6f8fa; stroke: #d0d7de } .line { stroke: #d0d7de }
.self { fill: #d0d7de } .dot { fill: #0969da }
text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #424a53 }
.name { font-weight: 600; font-size: 14px; fill: #1f2328 }
.files { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #0550ae }
@media (prefers-color-scheme: dark) {
.ground { fill: #0d1117 } .box { fill: #161b22; stroke: #30363d } .line { stroke: #30363d }
.self { fill: #30363d } .dot { fill: #58a6ff }
text { fill: #b7bfc8 } .name { fill: #f0f6fc } .files { fill: #79c0ff }
}
"""


def picture() -> str:
    """Return the picture: a box for each room, and beside it a matrix of which room imports from which.

    A dot to the right of the diagonal is an import that goes down; one to the left of it would go up.
    """
    rooms = [name for name in ROOMS if any(room(file) == name for file in files())]
    graph = grimp.build_graph("autoaccum")
    imported = {
        (ROOM_OF[module.split(".")[1]], ROOM_OF[target.split(".")[1]])
        for module in graph.modules - {"autoaccum"}
        for target in graph.find_modules_directly_imported_by(module) - {"autoaccum"}
    }
    columns = {name: LEFT + BOX + 30 + CELL * (index + 0.5) for index, name in enumerate(rooms)}
    parts = []
    middles = {}
    top = HEAD
    for name in rooms:
        stems = " ".join(Path(file).stem for file in sorted(files()) if room(file) == name)
        lines = [("why", line) for line in textwrap.wrap(purpose(name).replace("`", ""), 88)]
        lines += [("files", line) for line in textwrap.wrap(stems, 82)]
        height = LINE * len(lines) + 14
        middles[name] = top + height / 2
        parts.append(f'<rect class="box" x="{LEFT}" y="{top}" width="{BOX}" height="{height}" rx="6"/>')
        parts.append(f'<text class="name" x="{LEFT + 12}" y="{top + 20}">{escape(title(name))}</text>')
        for index, (kind, line) in enumerate(lines):
            y = top + 20 + LINE * index
            parts.append(f'<text class="{kind}" x="{LEFT + 112}" y="{y}">{escape(line)}</text>')
        top += height + GAP
    right = max(columns.values()) + CELL / 2
    says = "A dot says that the room of its row imports from the room of its column: imports only go down."
    parts.append(f'<text x="{LEFT}" y="{HEAD - 20}">{says}</text>')
    for name in rooms:
        x, y = columns[name], middles[name]
        parts.append(f'<line class="line" x1="{LEFT + BOX}" y1="{y:g}" x2="{right:g}" y2="{y:g}"/>')
        parts.append(f'<line class="line" x1="{x:g}" y1="{HEAD - 8}" x2="{x:g}" y2="{top - GAP}"/>')
        parts.append(
            f'<text class="name" transform="translate({x + 4:g} {HEAD - 14}) rotate(-60)">{escape(title(name))}</text>'
        )
    for name in rooms:
        x, y = columns[name], middles[name]
        parts.append(f'<rect class="self" x="{x - 5:g}" y="{y - 5:g}" width="10" height="10"/>')
        for target in rooms:
            if target != name and (name, target) in imported:
                meaning = f"<title>{title(name)} imports from {title(target)}</title>"
                parts.append(f'<circle class="dot" cx="{columns[target]:g}" cy="{y:g}" r="5">{meaning}</circle>')
    height = top - GAP + LEFT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The rooms of autoaccum and their imports">',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}" rx="10"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))
        PICTURE.write_text(picture())
    else:
        print(picture(), end="")
