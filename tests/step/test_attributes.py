"""Python attributes come back as they were, in the very containers that held them."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn

from autoaccum.step.python_state import Attributes


class Owner:
    def __init__(self) -> None:
        self.calls = 0
        self.names = ["a", "b"]
        self.seen = {1, 2}
        self.queue = deque([1, 2], maxlen=2)
        self.nested: dict[str, Any] = {"inner": {"deep": [1]}}
        self.hooks: OrderedDict[int, str] = OrderedDict({2: "second", 1: "first"})


def test_everything_comes_back_twice() -> None:
    owner = Owner()
    expected = repr(vars(Owner()))
    containers = [owner.names, owner.seen, owner.queue, owner.nested["inner"]["deep"], owner.hooks, vars(owner)]
    attributes = Attributes([owner])
    for _ in range(2):
        owner.calls += 1
        owner.names.append("c")
        owner.seen.clear()
        owner.queue.append(3)
        owner.nested["inner"]["deep"][0] = 5
        owner.nested["inner"] = None
        del owner.hooks[2]
        owner.hooks[2] = "other"
        owner.late = True  # type: ignore[attr-defined]
        del owner.names
        attributes.restore()
        assert repr(vars(owner)) == expected
        now = [owner.names, owner.seen, owner.queue, owner.nested["inner"]["deep"], owner.hooks, vars(owner)]
        assert all(a is b for a, b in zip(now, containers, strict=True))


def test_the_class_comes_back() -> None:
    class Other(Owner):
        pass

    owner = Owner()
    attributes = Attributes([owner])
    owner.__class__ = Other
    attributes.restore()
    assert type(owner) is Owner


def test_a_dict_that_holds_itself() -> None:
    owner = Owner()
    owner.nested["self"] = owner.nested
    attributes = Attributes([owner])
    owner.nested.clear()
    attributes.restore()
    assert owner.nested["self"] is owner.nested
    assert owner.nested["inner"] == {"deep": [1]}


def test_containers_of_other_classes_are_left_alone() -> None:
    """Nobody knows what their methods do: some refuse ``clear`` and ``update``."""

    class Closed(dict[str, int]):
        def clear(self) -> None:
            raise AssertionError("cleared")

    owner = Owner()
    owner.nested = closed = Closed(a=1)
    attributes = Attributes([owner])
    owner.nested = {}
    attributes.restore()
    assert owner.nested is closed


def test_the_handle_of_a_hook_still_removes_it() -> None:
    layer = nn.Linear(1, 1)
    calls: list[int] = []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    attributes = Attributes([layer])
    handle.remove()
    attributes.restore()
    layer(torch.ones(1, 1))
    assert calls == [1]
    handle.remove()
    layer(torch.ones(1, 1))
    assert calls == [1]


def test_keeps_what_it_holds_no_longer_than_itself() -> None:
    owner = Owner()
    attributes = Attributes([owner])
    tensor = torch.ones(1)
    gone = weakref.ref(tensor)
    owner.names = [tensor]  # type: ignore[list-item]
    del tensor
    attributes.restore()
    assert gone() is None


def test_a_change_is_noticed_and_what_is_put_back_is_none() -> None:
    owner = Owner()
    extra = [1]
    attributes = Attributes([owner], [extra])
    assert not attributes.have_changed()
    for change in (
        lambda: setattr(owner, "calls", 9),
        lambda: setattr(owner, "late", 1),
        lambda: owner.names.append("c"),
        lambda: owner.nested["inner"]["deep"].__setitem__(0, 7),
        lambda: owner.nested.update(inner={"deep": [1]}),  # equal, and another object
        lambda: extra.append(2),
        lambda: owner.nested.update(outer=owner.nested.pop("inner")),  # the same under another name
        lambda: owner.nested.clear(),
    ):
        change()
        assert attributes.have_changed()
        attributes.restore()
        assert not attributes.have_changed()
    assert extra == [1]


def test_a_set_is_the_same_in_any_order() -> None:
    owner = Owner()
    owner.seen = set(range(2000))  # type: ignore[attr-defined]
    owner.seen -= set(range(2000)) - {1, 8, 1000, 1032}  # type: ignore[attr-defined]
    assert list(owner.seen.copy()) != list(owner.seen)  # type: ignore[attr-defined]
    kept = Attributes([owner])
    assert not kept.have_changed()
    owner.seen.add(3)  # type: ignore[attr-defined]
    assert kept.have_changed()
    kept.restore()
    assert not kept.have_changed()
    owner.seen.symmetric_difference_update({8, 9})  # type: ignore[attr-defined]
    assert kept.have_changed(), "as many, and others"


def test_a_tensor_that_is_written_to_is_no_change_and_is_named() -> None:
    owner, queue, deep = Owner(), torch.zeros(2), torch.zeros(1)
    owner.queue, owner.nested["inner"]["deep"] = queue, [deep]  # type: ignore[assignment]
    attributes = Attributes([owner])
    queue.add_(1)
    assert not attributes.have_changed()
    assert {id(tensor) for tensor in attributes.tensors()} == {id(queue), id(deep)}
