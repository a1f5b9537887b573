"""What functions hold is found, however they hold it; tools and what libraries bring are left alone."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from autoaccum.step.loss_functions import loss_function, stated
from autoaccum.step.python_state import Surroundings, records_among, surroundings_of

LAYER = nn.Linear(1, 1)
COUNT = 3
TABLE: dict[str, Any] = {"queue": torch.ones(2)}


def found_in(*functions: object) -> Surroundings:
    return surroundings_of(functions)


class Objective:
    """Holds a layer, a list and another object."""

    def __init__(self) -> None:
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []
        self.inner: Any = None
        self.logger = logging.getLogger("mine")

    def step(self) -> None:
        """Return nothing."""

    def __call__(self) -> None:
        """Return nothing."""


def uses_globals() -> Any:
    return LAYER, COUNT, TABLE, torch.nn.functional, len


def by_closure(held: Any) -> Callable[[], Any]:
    return lambda: held


def by_default(held: Any) -> Callable[..., Any]:
    def function(given: Any = held, *, named: Any = held) -> Any:
        return given, named

    return function


def by_function(held: Any) -> Callable[[], Any]:
    inner = by_closure(held)
    return lambda: inner()


WAYS: dict[str, Callable[[Any], Any]] = {
    "closure": by_closure,
    "default": by_default,
    "partial": lambda held: functools.partial(len, held),
    "partial, by name": lambda held: functools.partial(len, key=held),
    "function that is called": by_function,
    "list": lambda held: by_closure([held]),
    "dict in a tuple": lambda held: by_closure(({"a": held},)),
}


def test_modules_tensors_and_generators_are_found_whichever_way_they_are_held() -> None:
    for name, way in WAYS.items():
        layer, tensor, generator = nn.Linear(1, 1), torch.ones(1), torch.Generator()
        found = found_in(way(layer), way(tensor), way(generator))
        assert found.modules == [layer], name
        assert [id(entry) for entry in found.tensors] == [id(tensor)], name
        assert [id(entry) for entry in found.generators] == [id(generator)], name


def test_a_method_holds_its_object_and_what_that_holds() -> None:
    for objective in (Objective(), Objective()):
        objective.inner = other = Objective()
        for function in (objective.step, objective, by_closure(objective)):
            found = found_in(function)
            assert {id(entry) for entry in found.objects} == {id(objective), id(other)}
            assert set(found.modules) == {objective.layer, other.layer}
            assert {id(entry) for entry in found.containers} == {id(objective.seen), id(other.seen)}


class Delegating:
    """Uses a layer by another of its methods, and calls that by a third."""

    def step(self) -> None:
        self.then()

    def then(self) -> Any:
        return self.further()

    def further(self) -> Any:
        return LAYER

    def never(self) -> Any:
        return TABLE


def test_a_method_holds_what_those_hold_that_it_calls() -> None:
    found = found_in(Delegating().step)
    assert found.modules == [LAYER]
    assert not found.tensors


def test_globals_are_those_that_the_function_names() -> None:
    found = found_in(uses_globals)
    assert found.modules == [LAYER]
    assert {name for _, name in found.names} == {"COUNT", "TABLE"}
    assert all(namespace is globals() for namespace, _ in found.names)
    assert found.containers == [TABLE]
    assert [id(entry) for entry in found.tensors] == [id(TABLE["queue"])]
    assert found_in(by_default).modules == []


def test_variables_of_enclosing_functions_are_found_with_or_without_a_value() -> None:
    count = 1

    def function() -> Any:
        return count, late

    assert len(found_in(function).cells) == 1  # a variable without a value holds nothing
    late = 2
    assert sorted(cell.cell_contents for cell in found_in(function).cells) == [1, 2]


def test_tools_and_libraries_are_left_alone() -> None:
    optimizer = torch.optim.SGD(LAYER.parameters(), 0.1)
    found = found_in(by_closure(optimizer), by_closure(logging.getLogger("mine")), by_closure(torch), len, Objective)
    assert (found.modules, found.tensors, found.objects, found.containers) == ([], [], [], [])


def test_what_goes_in_circles_or_is_long_or_deep_ends() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    assert found_in(by_closure(circle)).containers == [circle]
    assert found_in(by_closure([torch.ones(1)] * 101)).tensors == []
    held: Any = nn.Linear(1, 1)
    for _ in range(6):
        held = [held]
    assert found_in(by_closure(held)).modules == []


def test_a_layer_with_a_generator_of_its_own() -> None:
    layer = nn.Linear(1, 1)
    layer.generator = generator = torch.Generator()  # type: ignore[assignment]
    assert found_in(by_closure(layer)).generators == [generator]


def test_nothing_is_called() -> None:
    class Refuses:
        @property
        def value(self) -> None:
            raise AssertionError("called")

    assert len(found_in(by_closure(Refuses())).objects) == 1


def test_records_are_what_is_no_more_than_data() -> None:
    class Meter:
        def __init__(self, **held: Any) -> None:
            self.__dict__.update(held)

    inner = Meter(calls=0, seen=[1], last=torch.zeros(1), model=nn.Linear(1, 1), scale=len, array=np.zeros(1))
    outer = Meter(inner=inner, other=inner)
    locked, working = Meter(lock=threading.Lock()), Meter(inner=Meter(thread=threading.current_thread()))
    chain: Any = None
    for _ in range(40):
        chain = Meter(next=chain)

    class Closed:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    round_about = Meter(calls=1)
    round_about.own = round_about  # type: ignore[attr-defined]
    values = [outer, Closed(), locked, working, chain, round_about, nn.Linear(1, 1), 3, "a", [inner], torch.zeros(1)]
    assert records_among(values) == [outer, inner, round_about]


def test_what_we_wrap_a_function_in_is_no_step_to_what_it_holds() -> None:
    generator = torch.Generator()

    class Task:
        def __init__(self) -> None:
            self.held = [generator]

        def step(self, model: Any, batch: Any) -> Any:
            return self.held

    step = Task().step
    assert surroundings_of([step]).generators == [generator]
    wrapped = loss_function(None, step)
    wrapped, _, _, _ = stated(wrapped, len, "sum")
    assert surroundings_of([wrapped]).generators == [generator]
