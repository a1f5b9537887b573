"""How what ``before_window`` returns reaches functions of each signature, and what is refused."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import ArgumentTypeError
from autoaccum.loss.functions import loss_function
from autoaccum.loss.shared import BeforeWindow, Beside, joined, plain
from autoaccum.window.before import before_window_of, counting


def of(batch: Any) -> Any:
    return batch


def of_two(batch: Any, pieces: Any) -> Any:
    return batch


def of_default(batch: Any, scale: float = 1.0) -> Any:
    return batch


def of_pieces_at_will(batch: Any, in_pieces: Any = None) -> Any:
    return batch


def step(model: Any, batch: Any) -> Any:
    return batch


def step_of_three(model: Any, batch: Any, shared: Any) -> Any:
    return batch


def step_of_three_at_will(model: Any, batch: Any, shared: Any = None) -> Any:
    return batch


class Module(nn.Module):
    def forward(self, batch: Any, in_pieces: Any) -> Any:
        return batch


class TestSignatures:
    """What a function is called with follows from the parameters that it has to be given."""

    @pytest.mark.parametrize(
        ("function", "takes_pieces"),
        [
            (of, False),
            (of_two, True),
            (of_default, False),
            (of_pieces_at_will, True),
            (Module(), True),
            (partial(of_two, pieces=None), False),
            (lambda *batches: batches, False),
            (dict, None),
        ],
    )
    def test_of_the_function_itself(self, function: Any, takes_pieces: bool | None) -> None:
        if takes_pieces is None:
            with pytest.raises(ArgumentTypeError, match="^before_window='dict': expected a function. It is the class"):
                before_window_of(function, None, None)
            return
        found = before_window_of(function, None, None)
        assert found is not None
        assert found.takes_pieces is takes_pieces
        assert found.function is function

    def test_without_one(self) -> None:
        assert before_window_of(None, None, None) is None

    @pytest.mark.parametrize(
        ("loss_fn", "training_step", "gives"),
        [
            (step_of_three, None, "third"),
            (None, step, "merged"),
            (None, step_of_three, "third"),
            (None, step_of_three_at_will, "either"),
            (None, lambda *given: given, "either"),
            (None, None, "merged"),
        ],
    )
    def test_of_what_computes_the_loss(self, loss_fn: Any, training_step: Any, gives: str) -> None:
        found = before_window_of(of, loss_fn, training_step)
        assert found is not None
        assert found.gives == gives


def before(gives: Any) -> BeforeWindow:
    return BeforeWindow(function=of, takes_pieces=False, gives=gives)


class TestJoined:
    """What a micro-batch comes with."""

    def test_mappings_are_merged(self) -> None:
        batch = {"a": 1, "b": 2}
        found = joined(before("merged"), batch, {"b": 3, "c": 4})
        assert found == Beside({"a": 1, "b": 3, "c": 4}, {"b": 3, "c": 4}, is_merged=True)
        assert found.arguments == ()
        assert batch == {"a": 1, "b": 2}

    def test_batches_keep_their_type(self) -> None:
        batch: Any = UserDict(a=1)
        found = joined(before("either"), batch, {"b": 2}).batch
        assert type(found) is UserDict
        assert found == {"a": 1, "b": 2}
        assert batch == {"a": 1}
        assert joined(before("merged"), MappingProxyType({"a": 1}), {"a": 2}).batch == {"a": 2}

    def test_a_third_argument_is_given_where_it_is_required(self) -> None:
        found = joined(before("third"), {"a": 1}, {"b": 2})
        assert (found.batch, found.arguments) == ({"a": 1}, ({"b": 2},))
        assert joined(before("third"), (1, 2), None).arguments == (None,)

    def test_or_where_nothing_can_be_merged(self) -> None:
        assert joined(before("either"), (1, 2), {"b": 2}).arguments == ({"b": 2},)
        assert joined(before("either"), {"a": 1}, 5).arguments == (5,)
        assert joined(before("either"), {"a": 1}, None).arguments == ()

    @pytest.mark.parametrize(("batch", "shared"), [((1, 2), {"b": 2}), ({"a": 1}, torch.ones(2))])
    def test_what_nobody_can_take_is_refused(self, batch: Any, shared: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^before_window=.* third argument of a training_step"):
            joined(before("merged"), batch, shared)
        assert joined(before("merged"), batch, None).batch is batch

    def test_without_what_stands_beside_it(self) -> None:
        assert plain(Beside(1, 2, is_merged=False)) == plain(1) == 1


def test_losses_are_called_with_it() -> None:
    loss = torch.ones((), requires_grad=True)
    given = []

    def note(*arguments: Any) -> torch.Tensor:
        given.append(arguments)
        return loss

    batch = Beside((1, 2), "shared", is_merged=False)
    loss_function(note, None, of)(lambda inputs: inputs * 10, batch)
    loss_function(None, note, of)("model", batch)
    loss_function(None, note, of)("model", Beside({"a": 1}, {"a": 1}, is_merged=True))
    loss_function(None, None, of)(lambda **keywords: note(keywords), Beside({"a": 1}, {}, is_merged=True))
    assert given == [(10, 2, "shared"), ("model", (1, 2), "shared"), ("model", {"a": 1}), ({"a": 1},)]


def test_counting() -> None:
    given = Beside("batch", "shared", is_merged=False)
    assert counting(None) is None
    assert counting(lambda batch: [batch])(given) == ["batch"]
    assert counting(lambda batch, shared: [batch, shared])(given) == ["batch", "shared"]
    assert counting({"a": lambda batch: batch})["a"](given) == "batch"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"before_window": 3}, "before_window=3: expected a function"),
        ({"before_window": lambda: 3}, "before_window=.*It is called with all samples of a window"),
        ({"before_window": lambda a, b, c: 3}, "before_window=.*It is called with all samples of a window"),
        ({"before_window": of, "loss_fn": step, "training_step": None}, "loss_fn=.*what before_window has returned"),
        (
            {"before_window": of, "training_step": lambda a, b, c, d: a},
            "training_step=.*what before_window has returned",
        ),
        ({"training_step": step_of_three}, "training_step=.*cannot be called with 2"),
        ({"num_items": lambda batch, shared: 1}, "num_items=.*cannot be called with 1"),
        ({"before_window": of, "num_items": lambda a, b, c: 1}, "num_items=.*cannot be called with 1"),
    ],
)
def test_wrong_signatures_are_refused_before_training(arguments: dict[str, Any], text: str) -> None:
    model, data = nn.Linear(3, 1), {"x": torch.randn(4, 3)}
    given = {"training_step": step} | arguments
    with pytest.raises(ArgumentTypeError, match=f"^{text}"):
        autoaccum.fit(model, data, effective_batch=4, progress=False, **given)
    with pytest.raises(ArgumentTypeError, match=f"^{text}"):
        autoaccum.check(model, data, **given)
