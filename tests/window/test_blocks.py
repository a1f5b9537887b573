"""Which blocks are worth computing twice: found out by what they save, for one tower, for two, and for classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoaccum.window.blocks import HIGHEST, Chosen, candidates, choose, every_second, named_blocks, rungs_of
from autoaccum.window.offloading import ABOVE_BYTES
from autoaccum.window.tape import Entry, most_held, record

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Other(Block):
    pass


class Tower(nn.Module):
    def __init__(self, kind: type[Block], depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    """As CLIP has them."""

    def __init__(self, other: type[Block] = Other) -> None:
        super().__init__()
        self.text, self.vision = Tower(Block), Tower(other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.text(x) * self.vision(x)).sum()


class Net(nn.Module):
    """As a UNet has them: blocks of a class at every level, in no list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle, self.up2, self.up1 = Block(), Block(), Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(first)
        return self.up1(self.up2(self.middle(second) + second) + first).sum()  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One block that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = self.block(x)
        return x.sum()


def tape_of(model: nn.Module) -> tuple[Entry, ...]:
    found, named = candidates([model]), named_blocks([model])
    blocks = {name: named[name] for names in found.values() for name in names}
    batch = torch.randn(64, 32)
    return record(lambda: model(batch).sum(), [model], batch, CPU, blocks)


def chosen_of(model: nn.Module) -> tuple[Chosen | None, float]:
    """Return the choice, and the share of what is held plainly that is held with it."""
    tape = tape_of(model)
    chosen = choose(tape, candidates([model]))
    return chosen, 1.0 if chosen is None else chosen.held_bytes / most_held(tape)


def test_of_a_list() -> None:
    chosen, share = chosen_of(Tower(Block))
    assert chosen is not None
    assert chosen.blocks == tuple(f"model.layers.{index}" for index in range(6))
    assert share < 0.45
    tape = tape_of(Tower(Block))
    half = every_second(tape, chosen)
    assert half.blocks == ("model.layers.0", "model.layers.2", "model.layers.4")
    assert chosen.held_bytes < half.held_bytes < most_held(tape)
    assert half.recomputed_bytes == pytest.approx(chosen.recomputed_bytes / 2, rel=0.1)


def test_of_two_towers_both_are_taken() -> None:
    one = most_held(tape := tape_of(model := TwoTowers()), checkpointed=set(candidates([model])["every Block"]))
    chosen, share = chosen_of(model)
    assert chosen is not None
    assert len(chosen.blocks) == 12
    assert one / most_held(tape) > 0.55
    assert share < 0.35
    alike, of_alike = chosen_of(TwoTowers(Block))
    assert alike is not None
    assert (len(alike.blocks), of_alike) == (12, share), "a class that both are made of"


def test_of_classes_without_a_list() -> None:
    chosen, share = chosen_of(Net())
    assert chosen is not None
    assert chosen.name == "every Block"
    assert len(chosen.blocks) == 5
    assert share < 0.6


def test_of_sequential_blocks_without_a_list() -> None:
    """As a UNet has them that is written by hand: ``self.down1 = block(1, 16)``, and an own class at the bottom."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU())

    model = Net()
    model.down1, model.down2, model.up2, model.up1 = block(), block(), block(), block()  # type: ignore[assignment]
    chosen, share = chosen_of(model)
    assert chosen is not None
    assert chosen.name == "every Sequential and every Block"
    assert len(chosen.blocks) == 5
    assert share < 0.6


def test_of_a_block_that_is_called_again_and_again() -> None:
    chosen, share = chosen_of(Shared())
    assert chosen is not None
    assert chosen.blocks == ("model.block",)
    assert share < 0.45


def test_of_what_saves_nothing_none_is_taken() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert chosen_of(model)[0] is None
    assert candidates([nn.Linear(1, 1)]) == {}


def test_none_lies_within_another_and_names_are_those_of_the_model() -> None:
    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Nested(depth - 1) if depth else nn.Linear(1, 1)

    model = nn.Module()
    model.a, model.b = Nested(2), Nested(1)
    assert candidates([model])["every Nested"] == ("model.a", "model.b")
    loss: Any = nn.Module()
    loss.c = Nested(1)
    assert set(candidates([model, loss])["every Nested"]) == {"model.a", "model.b", "model.c"}
    assert candidates([model], without={"Nested"}) == {}


# Rungs go from what costs little to what costs more, each worth it, by what a tape says.

BIG = 10 * ABOVE_BYTES
RUNG_NAMES = ("one", "two", "three", "four")
FOUND = {"model.blocks": RUNG_NAMES}


def tape_of_rungs(inner: int = 3, size: int = BIG) -> list[Entry]:
    """Four blocks, each of which is given a tensor and saves some more."""
    entries, number = [], 0
    for call, name in enumerate(RUNG_NAMES):
        number += 1
        entries.append(Entry(storage=number, held_bytes=size, input_of=name))
        for _ in range(inner):
            number += 1
            entries.append(Entry(storage=number, held_bytes=size, loaded_bytes=size, within=((name, call),)))
    return entries


def test_all_rungs_in_their_order() -> None:
    rungs = rungs_of(tape_of_rungs(), FOUND, state_bytes=BIG)
    assert [
        (rung.name, rung.held_bytes // BIG, rung.offloaded_bytes // BIG, rung.state_bytes // BIG) for rung in rungs
    ] == [
        ("checkpoint, every 2nd of model.blocks", 8, 0, 0),
        ("checkpoint, model.blocks", 7, 0, 0),
        ("checkpoint, model.blocks; offload, saved tensors", 3, 4, 0),
        ("checkpoint, model.blocks; offload, saved tensors and optimizer state", 3, 4, 1),
    ]
    assert [sorted(rung.kinds) for rung in rungs] == [["checkpoint"]] * 2 + [["checkpoint", "offload"]] * 2
    assert HIGHEST.kinds == frozenset()


def test_where_there_is_no_host_beside_the_device() -> None:
    assert [rung.kinds for rung in rungs_of(tape_of_rungs(), FOUND, None)] == [{"checkpoint"}] * 2


def test_without_blocks_nothing_is_computed_twice() -> None:
    first, second = rungs_of(tape_of_rungs(), {}, state_bytes=BIG)
    assert (first.name, first.blocks, first.held_bytes) == ("offload, saved tensors", (), BIG)
    assert first.offloaded_bytes == 12 * BIG
    assert second.name == "offload, saved tensors and optimizer state"


@pytest.mark.parametrize(
    ("size", "state_bytes", "expected"),
    [
        (ABOVE_BYTES, BIG, ["offload, optimizer state"]),
        (ABOVE_BYTES, 0, []),
        (BIG, BIG // 200, ["offload, saved tensors"]),
    ],
)
def test_what_is_not_worth_it_is_left_out(size: int, state_bytes: int, expected: list[str]) -> None:
    """Storages of no more than 1 MiB stay; and so does a state that is less than a hundredth of what is held."""
    assert [rung.name for rung in rungs_of(tape_of_rungs(size=size), {}, state_bytes)] == expected
