"""What was asked of a run, and in what two runs differ."""

from __future__ import annotations

import enum

import torch
from torch.nn.functional import cross_entropy

from autoaccum.runs.configuration import describe_model, describe_optimizer, differing, plain
from tests.models import mlp


def test_description_tells_models_apart() -> None:
    assert describe_model(mlp())["0.weight"] == "float32 (16, 8)"
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    assert describe_model(model)["0.weight"] == "float32 (16, 8) frozen"


def test_options_are_what_decides() -> None:
    one = describe_optimizer(torch.optim.AdamW(mlp().parameters(), lr=0.1, fused=True))
    assert one == describe_optimizer(
        torch.optim.AdamW(mlp().parameters(), lr=torch.tensor(0.1, dtype=torch.float64), fused=True)
    )
    assert one["group 0"] | {"lr": 0.1, "betas": "(0.9, 0.999)", "parameters": 4} == one["group 0"]
    assert "amsgrad" not in one["group 0"]
    other = describe_optimizer(torch.optim.AdamW(mlp().parameters(), lr=0.1, amsgrad=True))
    assert other["group 0"] == {**one["group 0"], "amsgrad": True}


class Size(enum.IntEnum):
    LARGE = 2


class Side(str, enum.Enum):  # noqa: UP042 (its text is another)
    LEFT = "left"


class Text(str):
    def __str__(self) -> str:
        return "another"


def test_members_of_enums_of_numbers_and_texts_are_these() -> None:
    found = plain({"a": Size.LARGE, "b": Side.LEFT, "c": Text("own"), "d": True})
    assert found == {"a": 2, "b": "left", "c": "own", "d": True}
    assert [type(value) for value in found.values()] == [int, str, str, bool]


def test_plain_values() -> None:
    class Loss:
        pass

    assert plain({"a": 1, "b": None, "c": Loss(), "d": cross_entropy, "e": (1, 2)}) == {
        "a": 1,
        "b": None,
        "c": "Loss",
        "d": "cross_entropy",
        "e": "(1, 2)",
    }


def test_a_dict_is_told_by_what_it_holds() -> None:
    """Without what a tensor holds, and without a function's address, which is another one in each process."""
    found = plain({"data": {"x": torch.zeros(9, 2), "y": [1, 2]}, "num_items": {"a": cross_entropy, "b": None}})
    assert found == {"data": "{'x': Tensor, 'y': [1, 2]}", "num_items": "{'a': cross_entropy, 'b': None}"}
    assert plain({"batch_dim": {"a": {"b": 1}}}) == {"batch_dim": "{'a': {'b': 1}}"}


def test_every_difference_is_shown() -> None:
    before = {"a": 1, "b": {"c": [0.1], "d": {"e": None}}, "f": "x"}
    assert list(differing(before, before)) == []
    now = {"a": 1, "b": {"c": [0.2], "d": {"e": 0}}, "g": 2}
    assert list(differing(before, now)) == [
        "b c: [0.1] -> [0.2]",
        "b d e: nothing -> 0",
        "f: x -> nothing",
        "g: nothing -> 2",
    ]
