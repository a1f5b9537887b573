"""Measures the house: its entries, floors, circles, functions, docstrings, comments and files.

``python tests/house.py`` prints the figures with what they are bound to; ``tests/test_house.py`` holds them to it. The
graph of imports that is drawn here is the one that ``tests/test_layers.py`` and ``docs/rooms.py`` go by.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # measures the package beside it

import autoaccum  # noqa: E402

PACKAGE = Path(autoaccum.__file__).parent

ROOMS: dict[str, str] = {
    "facade": "__init__ callbacks schedules splits testing",
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
    "floor": "_version errors events _units _checks _kinds",
}
"""From the top down. The facade makes names public and is imported by none of the rooms."""

ROOM_OF = {name: index for index, names in enumerate(ROOMS.values()) for name in names.split()}

DECLARED_ONCE = {
    "fit": "the arguments of a run, made from training/options",
    "Trainer.__init__": "the same, made from training/options",
    "probe": "those of them that decide on a trial",
    "check": "those of them that decide on a gradient",
    "estimate": "those of a probe, and the device",
    "Accumulator.__init__": "those of them that decide on a window",
    "sweep": "what is searched over, and what all trials are told",
}
"""Public signatures that may be wide, with a word why: users name these parameters, and they are declared nowhere else."""

# Imports.


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its name: ``autoaccum.data.base``; a package by its folder's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["autoaccum", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found | {"autoaccum": PACKAGE / "__init__.py"}


def room_of(module: str) -> int:
    """Return the place of a module's room in ``ROOMS``, counted from the top."""
    parts = module.split(".")
    return ROOM_OF[parts[1] if len(parts) > 1 else "__init__"]


def named_imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the full dotted names that a module imports, also inside functions and for type checkers only.

    Attributes are among them: ``from autoaccum import plan`` gives ``autoaccum.plan``.
    """
    for node in ast.walk(tree):
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
    """Yield the modules of ours that are loaded for a dotted name: the packages on its way, and itself or its home."""
    exported = {f"autoaccum.{public}": f"autoaccum.{home}" for public, home in autoaccum._HOMES.items()}
    parts = exported.get(name, name).split(".")
    for length in range(1, len(parts) + 1):
        if (prefix := ".".join(parts[:length])) in modules():
            yield prefix


@cache
def everything_imported() -> dict[str, set[str]]:
    """Return for each module the dotted names that it imports."""
    return {
        module: set(named_imports(ast.parse(path.read_text()), module, is_package=path.name == "__init__.py"))
        for module, path in modules().items()
    }


@cache
def graph() -> dict[str, set[str]]:
    """Return for each module those of ours that it imports; the packages that it lies in are not among them."""
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


def circle() -> list[str]:
    """Return modules each of which imports the next, and the last the first; none when no imports go in a circle."""
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

    for module in sorted(graph()):
        if found := visit(module, []):
            return found
    return []


def floors() -> list[str]:
    """Return the longest chain of modules each of which imports the next; of chains that are as long, the first.

    The facade is left out, for it names nearly everything and is imported by none. Where imports go in a circle a
    chain has no end, so there is no number of floors before the circle is gone.
    """
    if circle():
        return []
    longest: dict[str, list[str]] = {}

    def chain_from(module: str) -> list[str]:
        if module not in longest:
            below = [chain_from(target) for target in sorted(graph()[module] - {"autoaccum"})]
            longest[module] = [module, *max(below, key=len, default=[])]
        return longest[module]

    return max((chain_from(module) for module in sorted(graph()) if module != "autoaccum"), key=len)


# Entries, functions, lines.


def entries() -> list[str]:
    """Return what a reader sees who opens the package's folder."""
    return sorted(path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed"))


def strangers() -> list[str]:
    """Return the entries that the list of rooms does not have."""
    return [name for name in entries() if name.removesuffix(".py") not in ROOM_OF]


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function or method, measured."""

    file: str
    """Its file, from the package's folder on."""
    name: str
    """Its qualified name: ``Class.method``, ``outer.inner``."""
    body_lines: int
    """From its first statement to its end, without the docstring."""
    parameters: int
    """Of all kinds, without ``self``."""
    docstring: str | None


def functions_in(node: ast.AST, file: str, outer: str = "") -> Iterator[Function]:
    """Yield the functions of a syntax tree, those inside others too."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions_in(child, file, outer)
            continue
        name = f"{outer}{child.name}"
        if not isinstance(child, ast.ClassDef):
            docstring = ast.get_docstring(child)
            arguments = child.args
            several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if several and several[0].arg in ("self", "cls"):
                several.pop(0)
            yield Function(
                file=file,
                name=name,
                body_lines=(child.end_lineno or 0)
                - child.body[0].lineno
                + 1
                - (len(docstring.splitlines()) if docstring else 0),
                parameters=len(several) + (arguments.vararg is not None) + (arguments.kwarg is not None),
                docstring=docstring,
            )
        yield from functions_in(child, file, f"{name}.")


@cache
def functions() -> list[Function]:
    """Return all functions of the package."""
    return [
        function
        for path in modules().values()
        for function in functions_in(ast.parse(path.read_text()), path.relative_to(PACKAGE).as_posix())
    ]


FRAGMENT = re.compile(
    r"(What|Whether|Of|The|A|An|Those|That|It|As|In|On|For|From|How|Where|When|Which|Why|With|Most|One)\b"
)
"""First words of a docstring that does not say what its function does."""


def fragments() -> list[Function]:
    """Return the functions whose docstrings open on a fragment instead of a verb."""
    return [function for function in functions() if function.docstring and FRAGMENT.match(function.docstring)]


def fragment_percent() -> float:
    """Return how many of a hundred docstrings of functions open on a fragment."""
    return 100 * len(fragments()) / sum(function.docstring is not None for function in functions())


# The figures.


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number that says how easily the house is found through, and what it is held to."""

    name: str
    value: float
    bound: float
    """What a test holds it to."""
    where: tuple[str, ...] = ()
    """What makes it what it is, worst first."""

    @property
    def is_kept(self) -> bool:
        """Tell whether the value keeps to the bound."""
        return self.value <= self.bound


BOUNDS: dict[str, float] = {
    "entries at the top": 25,  # the rooms, the floor, and the public names: callbacks and integrations came last
    "entries that are no room": 0,
    "floors": 14,
    "modules in a circle": 0,
    "fragments per 100 docstrings": 10,
}
"""What each figure is held to, at most."""


def figures() -> list[Figure]:
    """Measure everything."""
    chain = floors()
    names = {
        "entries at the top": (len(entries()), ()),
        "entries that are no room": (len(strangers()), strangers()),
        "floors": (len(chain), [module.removeprefix("autoaccum.") for module in chain]),
        "modules in a circle": (len(circle()), circle()),
        "fragments per 100 docstrings": (fragment_percent(), [f"{f.file}:{f.name}" for f in fragments()[:9]]),
    }
    return [
        Figure(name=name, value=value, bound=BOUNDS[name], where=tuple(where)) for name, (value, where) in names.items()
    ]


def table() -> str:
    """Return the figures as lines of text."""
    lines = []
    for figure in figures():
        kept = "" if figure.is_kept else "   NOT KEPT"
        lines.append(f"{figure.name:30} {figure.value:8.4g}   bound {figure.bound:g}{kept}")
        lines += [f"{'':12}{place}" for place in figure.where]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
