"""Copies without values: what holds what is the same among them, and the originals are as they were."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.utils.rnn import pack_sequence

from autoaccum.data.splits import Automatic, packed
from autoaccum.errors import ArgumentError
from autoaccum.memory.fake import Fakes
from autoaccum.training.check import open_samples
from autoaccum.training.fake_steps import FakeCopies, FakeSamples
from tests.models import mlp, noisy

CPU = torch.device("cpu")
GLOBAL = nn.Linear(2, 2)


def by_global(x: Any) -> Any:
    return by_helper(x)


def by_helper(x: Any) -> Any:
    return GLOBAL(x)


def copies() -> FakeCopies:
    return FakeCopies(Fakes())


class TestModules:
    def test_every_tensor_of_a_copy_is_fake_and_of_the_same_shape(self) -> None:
        model = noisy()
        model.table = [torch.zeros(7)]  # type: ignore[assignment]
        (copied,) = copies().of_modules([model])
        pairs = list(zip(model.state_dict().items(), copied.state_dict().items(), strict=True))
        assert len(pairs) > 8
        for (name, real), (other, fake) in pairs:
            assert name == other
            assert isinstance(fake, FakeTensor)
            assert fake.shape == real.shape
            assert not isinstance(real, FakeTensor)
        assert isinstance(copied.table[0], FakeTensor)  # type: ignore[index]

    def test_what_is_tied_stays_tied_and_what_is_frozen_frozen(self) -> None:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        first.bias.requires_grad_(False)
        one, two = copies().of_modules([first, second])
        assert one.weight is two.weight
        assert not one.bias.requires_grad  # type: ignore[union-attr]

    def test_what_cannot_be_copied_is_named(self) -> None:
        model = mlp()
        model.lock = threading.Lock()  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match="model='Sequential': expected something that can be copied.*lock"):
            copies().of_modules([model])


class TestFunctions:
    def test_closures_defaults_and_globals_hold_the_copies(self) -> None:
        model, made = mlp(), copies()
        (copied,) = made.of_modules([model])

        def step(given: Any = model) -> tuple[Any, Any]:
            return given, model

        assert made.of_function(step, "training_step")() == (copied, copied)
        assert step() == (model, model)
        weight = made.of_function(by_global, "training_step").__globals__["by_helper"].__globals__["GLOBAL"].weight
        assert isinstance(weight, FakeTensor)
        assert not isinstance(GLOBAL.weight, FakeTensor)

    def test_those_that_hold_nothing_are_as_they_are(self) -> None:
        made = copies()
        for function in (None, nn.functional.cross_entropy, len, torch.optim.SGD, lambda a, b: a):
            assert made.of_function(function, "loss_fn") is function

    def test_those_that_call_themselves(self) -> None:
        model = mlp()

        def step(depth: int) -> Any:
            return step(depth - 1) if depth else model

        assert isinstance(next(copies().of_function(step, "training_step")(3).parameters()), FakeTensor)

    def test_partials_and_methods(self) -> None:
        class Owner:
            def __init__(self) -> None:
                self.model = mlp()

            def step(self) -> nn.Module:
                return self.model

        owner, made = Owner(), copies()
        found = made.of_function(owner.step, "training_step")()
        assert isinstance(next(found.parameters()), FakeTensor)
        found = made.of_function(functools.partial(lambda model: model, owner.model), "training_step")()
        assert isinstance(next(found.parameters()), FakeTensor)

    def test_an_optimizer_holds_the_copies_and_its_own_state(self) -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        model(torch.zeros(1, 8)).sum().backward()
        optimizer.step()
        made = copies()
        (copied,) = made.of_modules([model])
        other = made.of_function(optimizer, "optimizer")
        assert [id(p) for p in other.param_groups[0]["params"]] == [id(p) for p in copied.parameters()]
        assert other.param_groups[0]["lr"] == 0.5
        state = other.state[next(copied.parameters())]
        assert isinstance(state["exp_avg"], FakeTensor)
        assert not isinstance(optimizer.state[next(model.parameters())]["exp_avg"], FakeTensor)


class TestSamples:
    def samples(self, batch: Any, split: Any) -> FakeSamples:
        window, examples = open_samples(batch, None, CPU, split)
        return FakeSamples(Fakes(), examples, window.num_samples, split)

    @pytest.mark.parametrize("size", [1, 3, 4, 1000])
    def test_of_any_number(self, size: int) -> None:
        samples = self.samples({"x": torch.zeros(3, 5), "texts": ["a", "b", "c"], "scale": 2.0}, Automatic())
        batch = samples.batch(size)
        assert isinstance(batch["x"], FakeTensor)
        assert batch["x"].shape == (size, 5)
        assert batch["x"].untyped_storage().nbytes() == 20 * size, "not a view of a larger one"
        assert len(batch["texts"]) == size
        assert batch["scale"] == 2.0

    def test_packed_sequences_are_cut_as_real_ones(self) -> None:
        batch = pack_sequence([torch.zeros(4, 2), torch.zeros(3, 2)]), torch.zeros(2)
        inputs, targets = self.samples(batch, packed).batch(1)
        assert inputs.data.shape == (4, 2)
        assert targets.shape == (1,)
