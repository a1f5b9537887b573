"""Writes plain signatures from the declared arguments: ``python -m tests.write_signatures``.

Readers, editors and type checkers want to see ``def fit(model, data, *, effective_batch, ...)``. An argument is declared
once, in ``training/options.py`` or ``sweeps/options.py``, and this writes what follows from it into the source: of each
function below its parameters, the ``Args:`` of its docstring, and the one call that hands all of them on; of each class
its fields. Everything around them is written by hand. ``tests/training/test_options.py`` fails where they differ.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from pathlib import Path

import autoaccum
from autoaccum.sweeps.options import OF_SWEEP, PASSED_ON
from autoaccum.training.declarations import Argument
from autoaccum.training.estimating import OF_ESTIMATE
from autoaccum.training.options import OF_ACCUMULATOR, OF_CHECK, OF_FIT, OF_PROBE

PACKAGE = Path(autoaccum.__file__).parent
WIDTH = 120

FUNCTIONS: list[tuple[str, str, Mapping[str, Argument], str]] = [
    ("training/fitting.py", "fit", OF_FIT, "Trainer"),
    ("training/trainer.py", "Trainer.__init__", OF_FIT, "FitArguments"),
    ("training/probing.py", "probe", OF_PROBE, "check"),
    ("training/checking.py", "check", OF_CHECK, "check_arguments"),
    ("training/estimating.py", "estimate", OF_ESTIMATE, "check"),
    ("training/accumulator.py", "Accumulator.__init__", OF_ACCUMULATOR, "check"),
    ("sweeps/sweep.py", "sweep", OF_SWEEP, "SweepArguments"),
]
"""(file, function, its arguments, the call within it that takes them all)"""
CLASSES: list[tuple[str, str, Mapping[str, Argument]]] = [("sweeps/options.py", "PassedOn", PASSED_ON)]
"""(file, class, its fields)"""


def find(tree: ast.Module, path: str) -> ast.AST:
    """Return the definition of that dotted name."""
    node: ast.AST = tree
    for name in path.split("."):
        (node,) = (
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name
        )
    return node


def literal(value: object) -> str:
    """Return a default as it is written in the source."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def annotation(argument: Argument) -> str:
    """Return a type as it is written in the source: Python keeps its text with other quotes."""
    return argument.annotation.replace("'", '"')


def parameters(declared: Mapping[str, Argument], indent: str) -> list[str]:
    """Return a line for each parameter, and one for the ``*`` before those that have to be named."""
    lines = []
    is_named = False
    for argument in declared.values():
        if not argument.is_positional and not is_named:
            lines.append(f"{indent}*,")
            is_named = True
        if argument.is_rest:
            lines.append(f"{indent}**{argument.name}: Unpack[{annotation(argument)}],")
            continue
        default = "" if argument.is_required else f" = {literal(argument.default)}"
        lines.append(f"{indent}{argument.name}: {annotation(argument)}{default},")
    return lines


def texts(declared: Mapping[str, Argument], indent: str) -> list[str]:
    """Return the lines below a docstring's ``Args:``."""
    lines = []
    for argument in declared.values():
        stars = "**" if argument.is_rest else ""
        lines += textwrap.wrap(
            f"{stars}{argument.name}: {argument.text}",
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def call_of(function: ast.AST, name: str) -> ast.Call:
    """Return the one call of that name within a function."""
    (call,) = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    )
    return call


def with_function(source: str, path: str, declared: Mapping[str, Argument], name: str) -> str:
    """Return the source with the parameters of one function, their texts, and the call that takes them."""
    lines = source.splitlines()
    function = find(ast.parse(source), path)
    assert isinstance(function, ast.FunctionDef)
    indent = " " * function.col_offset

    # From the bottom up, so that what stands above keeps its place.
    call = call_of(function, name)
    given = [*map(ast.unparse, call.args), *(f"{argument}={argument}" for argument in declared)]
    inside = " " * (len(lines[call.lineno - 1]) - len(lines[call.lineno - 1].lstrip()))
    filled = textwrap.wrap(f"{', '.join(given)},", WIDTH - len(inside) - 4, break_long_words=False)
    lines[call.lineno - 1 : call.end_lineno] = [
        f"{lines[call.lineno - 1][: call.col_offset]}{name}(",
        *(f"{inside}    {line}" for line in filled),
        f"{inside}){lines[(call.end_lineno or 0) - 1][call.end_col_offset :]}",
    ]

    docstring = function.body[0]
    first, last = docstring.lineno, docstring.end_lineno
    head = f"{indent}    Args:"
    if head in lines[first:last]:
        begin = lines.index(head, first) + 1
        end = lines.index("", begin)
        lines[begin:end] = texts(declared, f"{indent}        ")

    assert function.returns is not None
    lines[function.lineno - 1 : first - 1] = [
        f"{indent}def {function.name}(",
        *([f"{indent}    self,"] if "." in path else []),
        *parameters(declared, f"{indent}    "),
        f"{indent}) -> {ast.unparse(function.returns)}:",
    ]
    return "\n".join(lines) + "\n"


def with_class(source: str, path: str, declared: Mapping[str, Argument]) -> str:
    """Return the source with the fields of one class below its docstring."""
    lines = source.splitlines()
    definition = find(ast.parse(source), path)
    assert isinstance(definition, ast.ClassDef)
    fields = [f"    {argument.name}: {annotation(argument)}" for argument in declared.values()]
    lines[definition.body[0].end_lineno : definition.end_lineno] = ["", *fields]
    return "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """Return the text of each file as it ought to be."""
    found: dict[Path, str] = {}
    for file, path, declared, name in FUNCTIONS:
        where = PACKAGE / file
        found[where] = with_function(found.get(where) or where.read_text(), path, declared, name)
    for file, path, declared in CLASSES:
        where = PACKAGE / file
        found[where] = with_class(found.get(where) or where.read_text(), path, declared)
    return found


if __name__ == "__main__":
    for where, text in written().items():
        where.write_text(text)
