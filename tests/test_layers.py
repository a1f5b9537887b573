"""Section 5 of the design: an import may only go down, in no circle, and what plans needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import autoaccum
from tests.house import ROOM_OF, ROOMS, circle, everything_imported, graph, homes, modules, named_imports, room_of

LIGHT = ("planning", "floor")
HEAVY = {"torch", "numpy", "psutil"}


def test_every_module_has_a_room() -> None:
    names = {module.split(".")[1] for module in modules() if module != "autoaccum"}
    assert names <= set(ROOM_OF), "put it into a room of ROOMS, in tests/house.py"
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
        ("from autoaccum import Plan", {"planning", "planning.plans"}),
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
