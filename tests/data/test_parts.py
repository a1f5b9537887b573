"""What loaders and samplers hold: generators, batch sizes, whoever is to be told the epoch."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch

from autoaccum.data.parts import generators_of, parts_of, set_epoch


class Holder:
    def __init__(self, *held: Any) -> None:
        self.held = held


def test_generators_are_found_wherever_they_are_held() -> None:
    made = [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
    nested = Holder([made[0]], {"one": Holder(made[1])}, Holder(made[2]), Holder(Holder(made[3])).__init__)
    assert set(map(id, generators_of(nested, made[0]))) == set(map(id, made))
    assert generators_of(random.SystemRandom(), Holder(partial(print)), torch.nn.Linear(1, 1)) == []


def test_data_are_not_looked_through_and_circles_end() -> None:
    circle = Holder([random.Random(0)] * 1000)
    circle.held = (*circle.held, circle)
    assert generators_of(circle) == []
    assert len(list(parts_of([Holder(number) for number in range(64)]))) == 64 * 2 + 1


def test_each_is_told_once() -> None:
    class Told:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    told = Told()
    set_epoch(3, told, None, told, 5)
    assert told.epochs == [3]
