"""What lies outside of a block: whether it is as it was, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from autoaccum.step.python_state import Outside, functions_run

COUNT = 1


class Counter:
    def __init__(self) -> None:
        self.calls = [0]


def made() -> tuple[nn.Module, Callable[[], Any], Counter, dict[str, Any]]:
    counter, seen, last = Counter(), {"batches": [1, 2]}, 3

    def step() -> Any:
        nonlocal last
        last += 1
        return COUNT, counter, seen, last

    return nn.Sequential(nn.Linear(2, 2), nn.Dropout()), step, counter, seen


def swapped(model: Any) -> None:
    model[1] = nn.Dropout()


def counted() -> None:
    global COUNT
    COUNT += 1


CHANGES: dict[str, Callable[..., object]] = {
    "an attribute": lambda model, step, counter, seen: setattr(model[0], "calls", 1),
    "an attribute of an object": lambda model, step, counter, seen: setattr(counter, "calls", [0]),
    "an entry of a list of an object": lambda model, step, counter, seen: counter.calls.append(1),
    "an entry of an entry": lambda model, step, counter, seen: seen["batches"].append(3),
    "a hook": lambda model, step, counter, seen: model[0].register_forward_hook(lambda *_: None),
    "a layer": lambda model, step, counter, seen: swapped(model),
    "a variable of a function around": lambda model, step, counter, seen: step(),
    "a global variable": lambda model, step, counter, seen: counted(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen_and_put_back(change: Callable[..., object]) -> None:
    model, step, counter, seen = given = made()
    before = (model[1], COUNT, seen["batches"], step.__closure__[-1].cell_contents)  # type: ignore[index]
    functions = functions_run([model], [step])
    found = Outside([model], functions)
    assert not found.has_changed()
    change(*given)
    assert found.has_changed()
    found.restore()
    assert not found.has_changed()
    assert (model[1], COUNT, seen["batches"], step.__closure__[-1].cell_contents) == before  # type: ignore[index]
    assert counter.calls == [0]
    assert seen == {"batches": [1, 2]}
    assert "calls" not in vars(model[0])
    assert not model[0]._forward_hooks
