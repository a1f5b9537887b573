"""docs/troubleshooting.md has every error, every notice and every warning, in the words in which they are said."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from autoaccum import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autoaccum"
PAGE = ROOT / "docs" / "troubleshooting.md"
SHORTEST = 12
"""Characters of a piece of a message that is looked for; shorter ones, such as "samples", stand anywhere."""


@cache
def page() -> str:
    """The page, with white space as single spaces: it is wrapped where messages are not."""
    return " ".join(PAGE.read_text().split())


@cache
def sections() -> dict[str, str]:
    """What stands below each heading of the third level."""
    found = re.split(r"^#{2,3} (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return {title: " ".join(text.split()) for title, text in zip(found[1::2], found[2::2], strict=True)}


def pieces(expression: ast.AST, scope: ast.AST) -> Iterator[str]:
    """Yield the literal pieces of a text that is put together, what stands between them left out.

    A name stands for whatever is assigned to it in its function.
    """
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        # Alternatives such as a plural end a piece as a value does; so does what ends a sentence.
        text = " ".join(expression.value.split()).strip(" .,:;'")
        if len(text) >= SHORTEST:
            yield text
    elif isinstance(expression, ast.JoinedStr | ast.BinOp | ast.IfExp | ast.FormattedValue):
        for part in ast.iter_child_nodes(expression):
            if not (isinstance(expression, ast.IfExp) and part is expression.test):
                yield from pieces(part, scope)
    elif isinstance(expression, ast.Name):
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == expression.id:
                yield from pieces(node.value, scope)


def scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield every call of a module with the innermost function, or the module, that it stands in."""

    def visit(node: ast.AST, scope: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield scope, child
            yield from visit(child, child if isinstance(child, ast.FunctionDef) else scope)

    yield from visit(tree, tree)


SAID_BY = {
    "Notice": ("cause", "consequence"),
    "replace": ("cause", "consequence", "unmeasured"),
    "Verdict": ("unmeasured",),
}
"""Calls that word what is announced, with the arguments in which they do."""


@cache
def said() -> dict[str, list[str]]:
    """The pieces of all that is announced, by file and line: causes and consequences of notices, texts of warnings."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for scope, call in scopes(ast.parse(path.read_text())):
            name = ast.unparse(call.func).split(".")[-1]
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            texts = [words[argument] for argument in SAID_BY.get(name, ()) if argument in words]
            if name == "unmeasured_notice" or (name == "warn" and "AutoaccumWarning" in ast.unparse(call)):
                texts = call.args[:1]
            if texts:
                found[f"{path.name}:{call.lineno}"] = [piece for text in texts for piece in pieces(text, scope)]
    return found


def error_classes() -> list[str]:
    """The errors that users can catch."""
    of_module = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    return sorted(of_module - {"AutoaccumError", "AutoaccumWarning", "StopTraining"})


def constructors() -> dict[str, ast.FunctionDef]:
    """The constructor of each class of errors that words its own message."""
    tree = ast.parse(Path(errors.__file__).read_text())
    return {
        node.name: method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }


def message_of(method: ast.FunctionDef) -> list[str]:
    """The pieces of the message that a constructor hands on."""
    (call,) = [
        node for node in ast.walk(method) if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
    ]
    return [piece for argument in call.args for piece in pieces(argument, method)]


@pytest.mark.parametrize("name", error_classes())
def test_every_error_has_an_entry_with_its_message(name: str) -> None:
    entry = sections()[f"`{name}`"]
    assert len(entry) > 40
    if name in constructors():
        assert [piece for piece in message_of(constructors()[name]) if piece not in entry] == []


def test_every_error_is_among_them() -> None:
    assert len(error_classes()) >= 35
    assert len(constructors()) >= 25
    for name in ("AutoaccumError", "AutoaccumWarning", "StopTraining"):
        assert name in sections()["What is no error"]


def test_no_public_error_lies_elsewhere() -> None:
    """Those of other modules are caught inside, and derive from nothing of ``errors``."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and path != Path(errors.__file__):
                assert {ast.unparse(base).split(".")[-1] for base in node.bases} & {*vars(errors)} <= {"Any"}, node.name


@pytest.mark.parametrize("where", said())
def test_all_that_is_announced_has_an_entry_in_its_own_words(where: str) -> None:
    assert [piece for piece in said()[where] if piece not in page()] == []


def test_all_that_is_announced_is_found() -> None:
    assert len(said()) >= 45
    assert sum(map(bool, said().values())) >= 42, "messages are put together in a way that this test cannot read"


def test_no_entry_is_of_an_error_that_is_gone() -> None:
    headings = {title.strip("`") for title in sections() if title.startswith("`")}
    assert headings == set(error_classes())
