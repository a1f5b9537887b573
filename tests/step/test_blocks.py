"""Which blocks are computed twice, told from what a model repeats; and the levels that come of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from autoaccum.step.checkpointing import OFF, blocks_of, levels_of

BOTH = ("checkpoint", "offload")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Other(Block):
    pass


class Experts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Other() for _ in range(3))


def holding(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def tower(*kinds: Callable[[], nn.Module]) -> nn.Module:
    return holding(first=nn.Linear(8, 8), layers=nn.ModuleList(kind() for kind in kinds), head=nn.Linear(8, 1))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tower(Block, Block), "layers.0 layers.1"),
        (tower(Block), "layers.0"),  # which may be called again and again
        (holding(text=tower(Block, Block), vision=tower(Other)), "text.layers.0 text.layers.1 vision.layers.0"),
        (tower(Experts, Experts), "layers.0 layers.1"),
        (nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 1)), "1 2"),
        (nn.Sequential(convolution(), convolution(), nn.Flatten()), "0 1"),
        # Stages: not these are the blocks, but what they are made of.
        (holding(features=nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))),
         "features.0.0 features.0.1 features.1.0"),
        # In no list, as a UNet has them.
        (holding(down=Block(), middle=Other(), up=Block()), "down up"),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), ""),
        (nn.Linear(1, 1), ""),
    ],
)  # fmt: skip
def test_blocks_are_what_a_model_repeats(model: nn.Module, expected: str) -> None:
    assert list(blocks_of([model])) == [f"model.{name}" for name in expected.split()]


def test_a_sequential_with_a_parametrized_layer_is_a_block() -> None:
    def level() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.ReLU())

    assert list(blocks_of([nn.ModuleList([level(), level()])])) == ["model.0", "model.1"]


def test_none_lies_within_another_and_names_are_those_of_the_model() -> None:
    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Nested(depth - 1) if depth else nn.Linear(1, 1)

    model, loss = holding(a=Nested(2), b=Nested(1)), holding(c=Nested(1))
    assert set(blocks_of([model])) == {"model.a", "model.b"}
    assert set(blocks_of([model, loss])) == {"model.a", "model.b", "model.c"}
    assert blocks_of([model], without={"Nested"}) == {}


def test_levels_go_from_what_costs_little_to_what_costs_more() -> None:
    model = holding(text=tower(Block, Block), vision=tower(Other))
    first, second = levels_of([model], BOTH)
    assert (first.name, len(first.blocks), first.kinds) == ("checkpoint, every Block and Other", 3, {"checkpoint"})
    assert (second.name, second.kinds) == (f"{first.name}; offload", set(BOTH))
    assert levels_of([model], ("checkpoint",)) == [first]
    (alone,) = levels_of([model], ("offload",))
    assert (alone.name, alone.blocks, alone.kinds) == ("offload", (), {"offload"})
    assert levels_of([nn.Linear(1, 1)], ("checkpoint",)) == []
    assert [level.name for level in levels_of([model], BOTH, {"Block"})] == [
        "checkpoint, every Other",
        "checkpoint, every Other; offload",
    ]
    assert OFF.kinds == frozenset()
