"""The house stays one in which a reader finds the way: each figure of ``house.py`` keeps to its bound, no page is stale."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from types import ModuleType

import pytest

from tests.house import (
    BOUNDS,
    FRAGMENT,
    ROOMS,
    ROOT,
    circle,
    figures,
    floors,
    functions_in,
    graph,
    table,
)

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


class TestFigures:
    @pytest.mark.parametrize("name", BOUNDS)
    def test_is_kept(self, name: str) -> None:
        figure = next(figure for figure in figures() if figure.name == name)
        assert figure.is_kept, f"{figure.value:g} instead of {figure.bound:g}: {', '.join(figure.where)}"

    def test_every_figure_has_a_bound_and_is_printed(self) -> None:
        assert [figure.name for figure in figures()] == list(BOUNDS)
        printed = [line for line in table().splitlines() if " bound " in line]
        assert [line[:30].strip() for line in printed] == list(BOUNDS)

    def test_the_script_prints_them(self) -> None:
        printed = subprocess.run(
            [sys.executable, "tests/house.py"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert printed.stdout == table() + "\n"

    def test_floors_are_a_chain_of_imports_without_the_facade(self) -> None:
        chain = floors()
        assert "autoaccum" not in chain
        assert len(set(chain)) == len(chain) > 5
        for module, target in pairwise(chain):
            assert target in graph()[module]

    def test_where_nothing_goes_in_a_circle_none_is_found(self) -> None:
        assert circle() == []

    def test_of_a_function(self) -> None:
        source = '''
class A:
    def method(self, a, /, b, *rest, c=1, **options):
        """Do it.

        In two lines.
        """
        first = 1

        def inner(x):
            return x

        return inner(first)
'''
        method, inner = functions_in(ast.parse(source), "a.py")
        assert (method.name, method.body_lines, method.parameters) == (
            "A.method",
            7,
            5,
        )  # with the quotes that end the docstring
        assert (inner.name, inner.body_lines, inner.parameters) == ("A.method.inner", 1, 1)

    @pytest.mark.parametrize(
        ("docstring", "is_fragment"),
        [
            ("Whether it fits.", True),
            ("What is made of it is called.", True),
            ("A function.", True),
            ("Of the step.", True),
            ("Return whether it fits.", False),
            ("Announce the start.", False),
            ("Assert that it fits.", False),
        ],
    )
    def test_of_a_docstring(self, docstring: str, is_fragment: bool) -> None:
        assert bool(FRAGMENT.match(docstring)) is is_fragment


class TestRooms:
    @pytest.fixture
    def rooms(self) -> ModuleType:
        return script("rooms")

    @pytest.fixture
    def page(self, rooms: ModuleType) -> str:
        text: str = rooms.PAGE.read_text()
        return text

    def test_every_file_stands_in_the_tour(self, rooms: ModuleType, page: str) -> None:
        assert rooms.files() - {*rooms.tour(page), *rooms.LEAVING} == set(), "say in docs/design.md what they do"

    def test_every_file_of_the_tour_is_there(self, rooms: ModuleType, page: str) -> None:
        assert set(rooms.tour(page)) - {*rooms.files(), *rooms.PLANNED} == set()
        assert page == rooms.linked(page), "run python docs/rooms.py --write"

    def test_files_stand_below_their_rooms_in_order(self, rooms: ModuleType, page: str) -> None:
        order = [list(ROOMS).index(rooms.room(file)) for file in rooms.tour(page)]
        assert len(order) > 90
        assert order == sorted(order)

    def test_the_tour_says_of_a_room_what_its_docstring_says(self, rooms: ModuleType, page: str) -> None:
        names = [name for name in ROOMS if name in map(rooms.room, rooms.tour(page))]
        assert rooms.said(page) == {rooms.title(name): rooms.purpose(name) for name in names}
        assert len(names) > 10

    def test_the_picture_is_the_one_of_the_imports(self, rooms: ModuleType) -> None:
        assert rooms.PICTURE.read_text() == rooms.picture(), "run python docs/rooms.py --write"

    def test_no_dot_of_the_picture_goes_up(self, rooms: ModuleType) -> None:
        """The picture says so in words."""
        said = re.findall(r"<title>(.+) imports from (.+)</title>", rooms.picture())
        titles = [rooms.title(name) for name in ROOMS]
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
        order = ["training/trainer.py", "window/step.py", "window/transaction.py", "window/stepping.py"]
        assert [file for file in walk() if file in order] == order
        assert walk()[0] == order[0]

    def test_the_walk_of_the_page_is_the_one_that_is_walked(self) -> None:
        page = script("walk").PAGE.read_text()
        assert script("walk").listed(page) == walk(), "run python docs/walk.py --write"
