"""The tour of docs/design.md is that of the code: its table, its picture and its walk."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
MOST_FILES = 20
"""Files that one steady window may walk through."""


@cache
def script(name: str) -> ModuleType:
    """Load a script of ``docs/``, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestRooms:
    @pytest.fixture
    def rooms(self) -> ModuleType:
        return script("rooms")

    @pytest.fixture
    def page(self, rooms: ModuleType) -> str:
        text: str = rooms.PAGE.read_text()
        return text

    def test_the_table_is_the_one_of_the_docstrings(self, rooms: ModuleType, page: str) -> None:
        assert page == rooms.written(page), "run python docs/rooms.py --write"
        assert len(re.findall(r"^\| \[", page, re.MULTILINE)) == len(rooms.files())

    def test_the_picture_is_the_one_of_the_imports(self, rooms: ModuleType) -> None:
        assert rooms.PICTURE.read_text() == rooms.picture(), "run python docs/rooms.py --write"

    def test_no_dot_of_the_picture_goes_up(self, rooms: ModuleType) -> None:
        """The picture says so in words."""
        said = re.findall(r"<title>(.+) imports from (.+)</title>", rooms.picture())
        titles = [rooms.title(name) for name in rooms.ROOMS]
        assert len(said) > 20
        for above, below in said:
            assert titles.index(above) < titles.index(below)


@cache
def walk() -> list[str]:
    """The files that a steady window walks through, in order."""
    return list(script("walk").steady())


class TestWalk:
    def test_a_steady_window_walks_through_few_files(self) -> None:
        assert len(walk()) <= MOST_FILES, ", ".join(walk())

    def test_it_goes_from_the_loop_to_the_step_to_the_transaction(self) -> None:
        order = ["training/trainer.py", "step/step.py", "step/transaction.py", "step/optimizer_step.py"]
        assert [file for file in walk() if file in order] == order
        assert walk()[0] == order[0]

    def test_the_walk_of_the_page_is_the_one_that_is_walked(self) -> None:
        page = script("walk").PAGE.read_text()
        assert script("walk").listed(page) == walk(), "run python docs/walk.py --write"
