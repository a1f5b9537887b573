"""Section 5 of the design: an import may only go down, in no circle, and what plans needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import autoaccum

PACKAGE = Path(autoaccum.__file__).parent

ROOMS: dict[str, str] = {
    "facade": "__init__ schedules testing",
    "cli": "cli __main__",
    "sweeps": "sweeps",
    "integrations": "integrations",
    "training": "training",
    "verification": "verification",
    "reporting": "reporting",
    "runs": "runs",
    "window": "window",
    "ranks": "ranks",
    "data": "data",
    "loss": "loss",
    "planning": "planning",
    "memory": "memory",
    "floor": "_version errors events _units _checks",
}
"""From the top down. The facade makes names public and is imported by none of the rooms."""

ROOM_OF = {name: index for index, names in enumerate(ROOMS.values()) for name in names.split()}
LIGHT = ("planning", "floor")
HEAVY = {"torch", "numpy", "psutil"}
MAX_LINES = 600


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name: ``autoaccum.data.base``; a package by its folder's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["autoaccum", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def room_of(module: str) -> int:
    parts = module.split(".")
    return ROOM_OF[parts[1] if len(parts) > 1 else "__init__"]


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that imports: in functions too, and what is only for type checkers."""
    yield from ast.walk(tree)


def named_imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Full dotted names, of attributes too: ``from autoaccum import plan`` is ``autoaccum.plan``."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            parents = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def homes(name: str) -> Iterator[str]:
    """The modules of ours that are loaded for a dotted name: itself or what it is an attribute of, and the packages."""
    exported = {f"autoaccum.{public}": f"autoaccum.{home}" for public, home in autoaccum._HOMES.items()}
    parts = exported.get(name, name).split(".")
    for length in range(1, len(parts) + 1):
        if (prefix := ".".join(parts[:length])) in modules():
            yield prefix


@cache
def everything_imported() -> dict[str, set[str]]:
    """For each module the dotted names that it imports."""
    return {
        module: set(named_imports(ast.parse(path.read_text()), module, is_package=path.name == "__init__.py"))
        for module, path in modules().items()
    }


@cache
def graph() -> dict[str, set[str]]:
    """For each module those of ours that it imports; the packages it lies in itself are not among them."""
    return {
        module: {
            home
            for name in names
            for home in homes(name)
            if home not in ("autoaccum", module) and not module.startswith(f"{home}.")
        }
        | ({"autoaccum"} if {"autoaccum.__version__"} & names else set())
        for module, names in everything_imported().items()
    }


def test_every_module_has_a_room() -> None:
    names = {module.split(".")[1] for module in modules() if module != "autoaccum"}
    assert names <= set(ROOM_OF), "put it into a room of ROOMS, above"
    assert len(ROOM_OF) == sum(len(names.split()) for names in ROOMS.values()), "a name stands in two rooms"


def test_the_graph_is_not_empty() -> None:
    """The parser sees each way to import that the package uses, else the other tests mean nothing."""
    assert graph()["autoaccum.window.transaction"] >= {"autoaccum.data.base", "autoaccum.window.snapshot"}
    assert graph()["autoaccum.cli.commands"] >= {"autoaccum._units", "autoaccum.training.probing"}, "a lazy import"
    assert graph()["autoaccum.__main__"] == {"autoaccum.cli", "autoaccum.cli.app"}
    assert "autoaccum.training.trainer" in graph()["autoaccum"], "what is only for type checkers counts"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from autoaccum import plan", {"planning", "planning.cuts"}),
        ("from autoaccum import memory", {"memory"}),
        ("from autoaccum.memory.devices import memory_of", {"memory", "memory.devices"}),
        ("import autoaccum.data.base as base", {"data", "data.base"}),
        ("from ._units import parse_bytes", {"_units"}),
        ("from . import _units", {"_units"}),
        ("def f():\n    class A:\n        from autoaccum.memory.oom import is_out_of_memory", {"memory", "memory.oom"}),
        ("if TYPE_CHECKING:\n    import autoaccum.errors\nelse:\n    import autoaccum.events", {"errors", "events"}),
        ("try:\n    import_module('autoaccum.events')\nexcept E:\n    importlib.import_module(name)", {"events"}),
    ],
)
def test_the_parser(source: str, expected: set[str]) -> None:
    names = named_imports(ast.parse(source), "autoaccum.anything", is_package=False)
    assert {home for name in names for home in homes(name)} - {"autoaccum"} == {
        f"autoaccum.{name}" for name in expected
    }


def test_imports_only_go_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if room_of(target) < room_of(module)
    ]
    assert upward == []


def circle() -> list[str]:
    """Modules each of which imports the next, and the last the first; empty when there are none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph()[module]):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph()) if (found := visit(module, []))), [])


def test_no_imports_go_in_a_circle() -> None:
    assert " -> ".join(circle()) == ""


def light() -> list[str]:
    rooms = list(ROOMS)
    return [module for module in modules() if rooms[room_of(module)] in LIGHT]


def test_planning_and_the_floor_import_nothing_heavy() -> None:
    """And nothing but the standard library."""
    for module in light():
        roots = {name.split(".")[0] for name in everything_imported()[module]}
        assert not roots & HEAVY, module
        assert roots <= sys.stdlib_module_names | {"autoaccum"}, module


def test_planning_and_the_floor_load_nothing_heavy() -> None:
    script = (
        f"import importlib, sys\n"
        f"for module in {light()!r}: importlib.import_module(module)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
    assert len(light()) >= 11


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """It would take the function's place in the package once something imported it."""
    assert {module.split(".")[1] for module in modules() if module != "autoaccum"} & set(autoaccum.__all__) == set()


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_file_is_too_long_to_read(module: str) -> None:
    assert len(modules()[module].read_text().splitlines()) <= MAX_LINES
