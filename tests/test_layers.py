"""Section 5 of the design: an import may only go down, in no circle, and the lowest layers need no torch."""

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

LAYERS: dict[str, str] = {
    "command line": "cli __main__",
    "adapters": "sweeps objectives spaces storages trial_runs studies claims recipes integrations testing",
    "state": "fitting trainer accumulator",
    "mechanism": "engine pacing window gauge probing lazy validation metrics data checkpoint resuming run_directory cache",
    "parts": "advice memory reporting attributes batches coupling devices distributed losses learning_rate oom optimizers "
    "precision past signature tape graphs randomness reductions conclusions contributions snapshot states weighting",
    "policy": "planner tuner loads search timing pressure costs schedules budget noise",
    "standard library": "__init__ _version errors events units arguments interrupts",
}
"""From the top down. A folder is one entry; a new module has to be given a layer here."""

LAYER_OF = {name: index for index, names in enumerate(LAYERS.values()) for name in names.split()}
POLICY = list(LAYERS).index("policy")
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


def layer_of(module: str) -> int:
    parts = module.split(".")
    return LAYER_OF[parts[1] if len(parts) > 1 else "__init__"]


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that can run, in functions too: not what is only for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from nodes(other)
            continue
        yield child
        yield from nodes(child)


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


def test_every_module_has_a_layer() -> None:
    names = {module.split(".")[1] for module in modules() if module != "autoaccum"}
    assert names <= set(LAYER_OF), "give it a layer in LAYERS, above"
    assert len(LAYER_OF) == sum(len(names.split()) for names in LAYERS.values()), "a name stands in two layers"


def test_the_graph_is_not_empty() -> None:
    """The parser sees each way to import that the package uses, else the other tests mean nothing."""
    assert graph()["autoaccum.window"] >= {"autoaccum.data", "autoaccum.snapshot", "autoaccum.tuner"}
    assert graph()["autoaccum.data"] >= {"autoaccum.data.base", "autoaccum.batches"}
    assert "autoaccum.trainer" in graph()["autoaccum.recipes"], "a lazy import"
    assert graph()["autoaccum.cli"] >= {"autoaccum", "autoaccum.planner", "autoaccum.probing"}
    assert graph()["autoaccum.__main__"] == {"autoaccum.cli"}
    assert graph()["autoaccum"] == {"autoaccum._version"}, "what is only for type checkers does not count"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from autoaccum import plan", {"autoaccum.planner"}),
        ("from autoaccum import memory", {"autoaccum.memory"}),
        ("from autoaccum.memory import memory_of", {"autoaccum.memory"}),
        ("import autoaccum.data.base as base", {"autoaccum.data", "autoaccum.data.base"}),
        ("from .units import parse_bytes", {"autoaccum.units"}),
        ("from . import units", {"autoaccum.units"}),
        ("def f():\n    class A:\n        from autoaccum.oom import is_out_of_memory", {"autoaccum.oom"}),
        ("if TYPE_CHECKING:\n    import autoaccum.cli\nelse:\n    import autoaccum.oom", {"autoaccum.oom"}),
        ("try:\n    import_module('autoaccum.oom')\nexcept E:\n    importlib.import_module(name)", {"autoaccum.oom"}),
    ],
)
def test_the_parser(source: str, expected: set[str]) -> None:
    names = named_imports(ast.parse(source), "autoaccum.anything", is_package=False)
    assert {home for name in names for home in homes(name)} - {"autoaccum"} == expected


def test_imports_only_go_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if layer_of(target) < layer_of(module)
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
    return [module for module in modules() if layer_of(module) >= POLICY]


def test_the_lowest_layers_import_nothing_heavy() -> None:
    """And below policy nothing but the standard library."""
    for module in light():
        roots = {name.split(".")[0] for name in everything_imported()[module]}
        assert not roots & HEAVY, module
        assert roots <= sys.stdlib_module_names | {"autoaccum"}, module


def test_the_lowest_layers_load_nothing_heavy() -> None:
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
