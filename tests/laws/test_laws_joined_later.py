"""Laws 1, 5 and 8 of joined steps over several batches: what the measured samples did not show is right all the same."""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import Joined, Notice
from autoaccum.testing import simulated_memory

pytestmark = pytest.mark.measured

SAMPLES, WINDOWS = 12, 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    """Compare every sample with every other one, so that no weights of micro-batches are right."""
    outputs = F.normalize(outputs, dim=-1)
    logits = outputs @ outputs.T * 5 - 1e3 * torch.eye(len(outputs))
    return F.cross_entropy(logits, torch.arange(len(outputs)).roll(1))


def ce(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclasses.dataclass
class Case:
    """A run: its model, its step, and what the program does between steps."""

    model: nn.Module
    step: Callable[[Any, Any], torch.Tensor]
    between: Callable[[int], None] = lambda number: None
    left: Callable[[], Any] = lambda: None
    """() -> state that a run leaves, besides parameters and buffers"""
    batches: list[Any] = dataclasses.field(default_factory=lambda: batches())


def batches(samples: int = SAMPLES) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(WINDOWS)
    ]


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class OfSome(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = x.new_zeros(len(x), 4)
        if mask.any():
            found[mask] = self.layer(x[mask])
        return found


@case
def outputs_of_the_last_micro_batch_need_no_gradient() -> Case:
    made = batches()
    for index, (_, y) in enumerate(made):
        y[:] = 0
        if index > 1:
            y[-4:] = 1

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, mask = batch[0], batch[1] == 0
        of_some = model["head"](x, mask)
        return contrast(model["body"](x)) + (of_some[mask] - x[mask][:, :4]).square().sum() / mask.sum()

    return Case(nn.ModuleDict({"body": mlp(), "head": OfSome()}), step, batches=made)


class Binned(nn.Module):
    bins: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("bins", torch.linspace(-1, 1, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), self.bins


@case
def an_output_of_no_sample_has_a_multiple_of_rows() -> Case:
    def step(model: Any, batch: Any) -> torch.Tensor:
        outputs, bins = model(batch[0])
        shares = torch.softmax(-((outputs[:, :1] - bins) ** 2) * 4, 1)
        return shares.mean(0).square().sum() + contrast(outputs)

    return Case(Binned(), step)


class Counting(nn.Module):
    def __init__(self, *, as_number: bool) -> None:
        super().__init__()
        self.body, self.as_number = mlp(), as_number

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
        count = (y == 2).sum()
        return self.body(x), int(count) if self.as_number else count


def counts(*, as_number: bool) -> Case:
    made = batches()
    for index, (_, y) in enumerate(made):
        y[:] = 0 if index < 2 else torch.tensor([2, 0, 0, 1] * 3)

    def step(model: Any, batch: Any) -> torch.Tensor:
        outputs, count = model(*batch)
        return contrast(outputs) + outputs[batch[1] == 2].square().sum() / max(1, int(count))

    return Case(Counting(as_number=as_number), step, batches=made)


@case
def a_count_that_was_0_and_is_alike_in_all_micro_batches() -> Case:
    return counts(as_number=False)


@case
def a_number_that_was_0_and_is_alike_in_all_micro_batches() -> Case:
    return counts(as_number=True)


class Centring(nn.Module):
    """Centres its outputs over the batch where it is told to."""

    is_on: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.flag = mlp(), False
        self.config, self.options = types.SimpleNamespace(flag=False), {"flag": False}
        self.register_buffer("is_on", torch.tensor(False))

    def forward(self, x: torch.Tensor, task: float = 0) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        is_on = self.flag or self.config.flag or self.options["flag"] or bool(self.is_on) or task
        return outputs - outputs.mean(0) if is_on else outputs


def less_its_mean(outputs: torch.Tensor, weight: float) -> torch.Tensor:
    return outputs - weight * outputs.mean(0)


def centring(weight: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda outputs: less_its_mean(outputs, weight)


def switched(switch: Callable[[Centring], Any]) -> Case:
    model = Centring()

    def between(number: int) -> None:
        if number == 4:
            switch(model)

    return Case(model, lambda model, batch: contrast(model(batch[0])), between)


@case
def a_number_among_the_arguments() -> Case:
    task = {"is": 0}

    def between(number: int) -> None:
        task["is"] = int(number in (3, 4))

    return Case(Centring(), lambda model, batch: contrast(model(batch[0], task["is"])), between)


@case
def ever_other_numbers_among_the_arguments() -> Case:
    weight = {"is": 0.0}
    made = Case(Centring(), lambda model, batch: contrast(model(batch[0], weight["is"])))
    made.batches = made.batches * 3

    def between(number: int) -> None:
        weight["is"] = 0.1 * max(0, number - 10) if number > 10 else -1e-9 * number

    made.between = between
    return made


@case
def an_attribute_changes() -> Case:
    return switched(lambda model: setattr(model, "flag", True))


class WarmedUp(nn.Module):
    """Centres its outputs over the batch from a step on, by a strength."""

    strength: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.step = mlp(), 0
        self.register_buffer("strength", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return less_its_mean(self.body(x), float(self.strength) if self.step >= 6 else 0.0)


@case
def an_attribute_counts_steps() -> Case:
    model = WarmedUp()
    made = Case(model, lambda model, batch: contrast(model(batch[0])), lambda number: setattr(model, "step", number))
    made.batches = made.batches * 2
    return made


@case
def a_buffer_of_one_number_changes() -> Case:
    model = WarmedUp()
    model.step = 9
    return Case(
        model, lambda model, batch: contrast(model(batch[0])), lambda number: model.strength.fill_(float(number >= 4))
    )


@case
def a_buffer_of_one_number_changes_within_a_step() -> Case:
    number = {"is": 0}

    def step(model: Any, batch: Any) -> torch.Tensor:
        model.strength.fill_(float(number["is"] >= 4))
        loss = contrast(model(batch[0]))
        model.strength.fill_(0.0)
        return loss

    model = WarmedUp()
    model.step = 9
    model.strength.fill_(0.0)
    return Case(model, step, lambda at: number.update({"is": at}))


SWITCHES: dict[str, tuple[Any, Any]] = {
    "numpy_number": (np.float64(0), np.float64(1)),
    "frozenset": (frozenset(), frozenset({"flag"})),
    "tensor": (torch.zeros(()), torch.ones(())),
    "counter": (Counter(), Counter(flag=1)),
    "dtype": (torch.float32, torch.float64),
    "partial": (partial(less_its_mean, weight=0.0), partial(less_its_mean, weight=1.0)),
    "closure": (centring(0.0), centring(1.0)),
}
IS_ON: dict[str, Callable[[Any], bool]] = {
    "frozenset": lambda value: "flag" in value,
    "counter": lambda value: value["flag"] > 0,
    "dtype": lambda value: value is torch.float64,
}


class Switched(nn.Module):
    """A model that centres its outputs over the batch once an attribute says so."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.value = mlp(), kind, copy.deepcopy(SWITCHES[kind][0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        if callable(self.value) and self.kind != "dtype":
            outputs = self.value(outputs)
        elif IS_ON.get(self.kind, bool)(self.value):
            outputs = outputs - outputs.mean(0)
        return outputs


def switch_case(kind: str) -> Case:
    model = Switched(kind)

    def between(number: int) -> None:
        if number == 4:
            model.value = copy.deepcopy(SWITCHES[kind][1])

    return Case(model, lambda model, batch: contrast(model(batch[0])), between)


CASES |= {f"an_attribute_changes_{kind}": partial(switch_case, kind) for kind in SWITCHES}


@case
def a_config_changes() -> Case:
    return switched(lambda model: setattr(model.config, "flag", True))


@case
def an_entry_of_a_dict_changes() -> Case:
    return switched(lambda model: model.options.update(flag=True))


@case
def a_flag_among_buffers_changes() -> Case:
    return switched(lambda model: model.is_on.fill_(True))


@case
def a_hook_is_added() -> Case:
    return switched(
        lambda model: model.body[1].register_forward_hook(lambda _, args, outputs: outputs - outputs.mean(0))
    )


@case
def a_flag_that_the_step_sets_and_takes_back() -> Case:
    number = {"is": 0}

    def step(model: Any, batch: Any) -> torch.Tensor:
        model.flag = number["is"] > 2
        try:
            return contrast(model(batch[0]))
        finally:
            model.flag = False

    return Case(Centring(), step, lambda now: number.update({"is": now}))


@case
def a_function_among_the_arguments() -> Case:
    made = {"is": torch.sin}

    def between(number: int) -> None:
        made["is"] = centred if number > 2 else torch.sin

    return Case(Applying(), lambda model, batch: contrast(model(batch[0], made["is"])), between)


def centred(outputs: torch.Tensor) -> torch.Tensor:
    return outputs - outputs.mean(0)


class Applying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, function: Any) -> torch.Tensor:
        found: torch.Tensor = function(self.body(x))
        return found


@case
def a_micro_batch_with_nothing_to_learn_from() -> Case:
    made = batches()
    for _, y in made:
        y[:] = torch.tensor([0] * 8 + [1] * 4)

    def step(model: Any, batch: Any) -> torch.Tensor:
        mask = batch[1] == 0
        return model(batch[0])[mask].square().mean() if mask.any() else torch.zeros(())

    return Case(mlp(), step, batches=made)


class Centre(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) - torch.tanh(x).mean(0)


@case
def a_layer_is_replaced() -> Case:
    return switched(lambda model: setattr(model.body, "1", Centre()))


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        pairs = zip(x, lengths, strict=False)
        return torch.stack([self.layer(one[:length, None]).tanh().mean(0) for one, length in pairs])


@case
def a_list_of_a_value_for_each_sample() -> Case:
    made = batches()
    for index, (_, y) in enumerate(made):
        y[:] = 6 if index < 2 else torch.randint(2, 7, (SAMPLES,), generator=torch.Generator().manual_seed(index))
    return Case(Pooling(), lambda model, batch: contrast(model(batch[0], batch[1].tolist())), batches=made)


class Tracking(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind, self.average, self.count = mlp(), kind, torch.zeros(4), np.zeros(1)
        self.tracker = types.SimpleNamespace(meter=types.SimpleNamespace(count=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        if self.kind == "tensor":
            with torch.no_grad():
                self.average.mul_(0.9).add_(outputs.mean(0), alpha=0.1)
        if self.kind == "array":
            self.count += len(x)
        if self.kind == "object":
            self.tracker.meter.count += len(x)
        return outputs


def tracked(kind: str) -> Case:
    model = Tracking(kind)
    return Case(
        model,
        lambda model, batch: contrast(model(batch[0])),
        left=lambda: (model.average.norm().item(), float(model.count[0]), model.tracker.meter.count),
    )


@case
def state_in_a_tensor() -> Case:
    return tracked("tensor")


@case
def state_in_an_array() -> Case:
    return tracked("array")


@case
def state_in_an_object_of_an_object() -> Case:
    return tracked("object")


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(x) * 1
        return {"features": features, "same": features, "logits": features[:, :3]}


@case
def outputs_that_share_memory() -> Case:
    temperature = {"is": 1.0}

    def step(model: Any, batch: Any) -> torch.Tensor:
        found = model(batch[0])
        if temperature["is"] != 1:
            found["logits"].div_(temperature["is"])
        return contrast(found["features"]) + F.cross_entropy(found["logits"], batch[1]) + found["same"].mean()

    def between(number: int) -> None:
        temperature["is"] = 1.0 if number < 3 else 0.5

    return Case(Aliased(), step, between)


@case
def a_teachers_features_that_a_hook_keeps() -> Case:
    teacher, student, features = mlp().requires_grad_(False), mlp(), {}
    teacher[1].register_forward_hook(lambda _, args, outputs: features.__setitem__("teacher", outputs))
    student[1].register_forward_hook(lambda _, args, outputs: features.__setitem__("student", outputs))

    def step(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            teacher(batch[0])
        return contrast(model(batch[0])) + F.mse_loss(features["student"], features["teacher"])

    return Case(student, step)


class Two(nn.Module):
    def __init__(self, kind: type | None = None) -> None:
        super().__init__()
        self.body, self.head, self.kind = mlp(), nn.Linear(4, 3), kind or (lambda *outputs: outputs)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x).tanh()
        return self.kind(features, self.head(features))


@case
def a_gradient_between_two_outputs() -> Case:
    def step(model: Any, batch: Any) -> torch.Tensor:
        features, logits = model(batch[0])
        (own,) = torch.autograd.grad(logits.gather(1, batch[1][:, None]).sum(), features, create_graph=True)
        return contrast(features) + F.cross_entropy(logits, batch[1]) + (features * own).relu().mean()

    return Case(Two(), step)


@dataclasses.dataclass
class Outputs:
    features: torch.Tensor
    logits: torch.Tensor


@case
def fields_of_a_dataclass() -> Case:
    def step(model: Any, batch: Any) -> torch.Tensor:
        returned = model(batch[0])
        found = {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
        return contrast(found["features"]) + F.cross_entropy(found["logits"], batch[1])

    return Case(Two(Outputs), step)


def sequences(times: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(SAMPLES, times, 8, generator=generator),) for _ in range(3)]


@case
def a_mask_of_twice_as_many_times_as_are_measured() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(14)
    return Case(layer, lambda m, batch: contrast(m(batch[0], src_mask=mask).mean(1)), batches=sequences(14))


@case
def times_first_of_twice_as_many_times_as_are_measured() -> Case:
    return Case(nn.GRU(8, 8), lambda m, batch: contrast(m(batch[0].transpose(0, 1))[0].mean(0)), batches=sequences(14))


@case
def a_fixed_number_of_other_rows() -> Case:
    kept = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))

    def step(model: Any, batch: Any) -> torch.Tensor:
        return contrast(model(batch[0])) + model(kept[:20]).square().mean()

    return Case(mlp(), step)


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.body = nn.Embedding(16, 6), mlp()

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x + self.places(places)).mean(1)
        return outputs


@case
def an_argument_of_all_samples_has_a_row_for_each_later() -> Case:
    number = {"is": 0}

    def step(model: Any, batch: Any) -> torch.Tensor:
        places = torch.arange(6)[None]
        if number["is"] >= 3:
            places = (places - batch[1][:, None]).clamp(min=0)
        return contrast(model(batch[0], places))

    made = [(x[:, None] * torch.linspace(1, 2, 6)[:, None], y) for x, y in batches()]
    return Case(Placed(), step, lambda at: number.update({"is": at}), batches=made)


@case
def a_teacher_in_dict_moves() -> Case:
    model = mlp()
    teacher = model.__dict__["teacher"] = mlp().requires_grad_(False)

    def step(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for mean, p in zip(model.teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return F.mse_loss(model(batch[0]), model.teacher(batch[0] + 0.1))

    return Case(model, step, left=lambda: float(sum(p.sum() for p in teacher.parameters())))


class Gated(nn.Module):
    """A model that centres its outputs over the batch as far as a gate is open, which at first it is not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body = mlp()
        self.gate: Any = torch.zeros(4)
        if kind != "an attribute":
            del self.gate
        if kind == "a buffer":
            self.register_buffer("gate", torch.zeros(4))
        elif kind != "an attribute":
            self.gate = nn.Parameter(torch.zeros(() if kind == "a number" else 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.body(x)
        return outputs - self.gate * outputs.mean(0)


def gated(kind: str) -> Case:
    model = Gated(kind)

    def between(number: int) -> None:
        if number == 3 and kind == "a parameter that learns":
            model.gate.requires_grad_()
        elif number == 3:
            model.gate.fill_(0.5)

    return Case(model, lambda model, batch: contrast(model(batch[0])), between)


GATES = ("an attribute", "a buffer", "a frozen parameter", "a number", "a parameter that learns")
CASES |= {f"a gate opens that is {kind}": partial(gated, kind) for kind in GATES}


class Normalizing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(Normalizing.apply(x))  # type: ignore[no-untyped-call]
        return found


@case
def an_input_needs_a_gradient_later() -> Case:
    model = nn.ModuleDict({"body": mlp().requires_grad_(False), "head": Head()})

    def between(number: int) -> None:
        model["body"].requires_grad_(number > 2)

    return Case(model, lambda model, batch: contrast(model["head"](model["body"](batch[0]))), between)


@case
def a_flag_of_an_argument_that_is_called() -> Case:
    class Function:
        is_on = False

        def __init__(self) -> None:
            self.is_on = False

        def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
            return centred(outputs) if self.is_on else outputs

    function = Function()
    between = partial(setattr, function, "is_on")
    step: Any = lambda model, batch: contrast(model(batch[0], function))  # noqa: E731
    return Case(Applying(), step, lambda number: between(number > 2))


class Cache:
    def __init__(self, outputs: torch.Tensor) -> None:
        self.outputs = outputs.detach()


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        outputs = self.body(x)
        return outputs, Cache(outputs)


def catching(model: Any, call: Callable[[Any, Any, bool], torch.Tensor], *, is_raised: bool = False) -> Case:
    """A step that goes on, or raises an error of its own, where a call fails; later ones are called otherwise."""
    number = {"is": 0}

    def step(model: Any, batch: Any) -> torch.Tensor:
        try:
            return contrast(call(model, batch[0], number["is"] > 2))
        except Exception as error:
            if is_raised:
                raise RuntimeError("a call has failed") from error
            return contrast(model.body(batch[0]))

    return Case(model, step, lambda now: number.update({"is": now}))


@case
def a_step_that_catches_what_an_unknown_call_raises() -> Case:
    return catching(Centring(), lambda model, x, is_late: model(x, float(is_late)))


@case
def a_step_that_raises_its_own_error_for_an_unknown_call() -> Case:
    return catching(Centring(), lambda model, x, is_late: model(x, float(is_late)), is_raised=True)


@case
def a_step_that_catches_what_an_output_raises() -> Case:
    def call(model: Any, x: torch.Tensor, is_late: bool) -> torch.Tensor:
        outputs, cache = model(x)
        return outputs * (1 + cache.outputs.std(0)) if is_late else outputs

    return catching(Caching(), call)


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def ran(name: str, accumulate: str | None, micro_batch: int = 4) -> tuple[dict[str, torch.Tensor], Any, list[Any]]:
    """Train by a plain loop, or by steps that are cut; return what is left, and what was told."""
    torch.manual_seed(0)
    made = CASES[name]()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
    events: list[Any] = []
    if accumulate is not None:
        accumulator = autoaccum.Accumulator(
            made.model, optimizer, training_step=made.step, micro_batch=micro_batch, accumulate=accumulate
        )
        events = accumulator.events
    for number, batch in enumerate(made.batches):
        made.between(number)
        if accumulate is None:
            optimizer.zero_grad()
            made.step(made.model, batch).backward()
            optimizer.step()
        else:
            accumulator.step(batch)
    return copy.deepcopy(made.model.state_dict()), made.left(), events


@pytest.mark.parametrize("accumulate", ["auto", "joined"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_ends_as_the_plain_loop_does(name: str, accumulate: str) -> None:
    wanted, left, _ = ran(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", autoaccum.AutoaccumWarning)
        found, own, events = ran(name, accumulate)
    assert any(isinstance(event, Joined) for event in events)
    assert own == pytest.approx(left)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)


def test_what_a_sample_by_itself_is_broadcast_against_is_no_row_of_it() -> None:
    name = "an_argument_of_all_samples_has_a_row_for_each_later"
    wanted, _, _ = ran(name, None)
    found, _, _ = ran(name, "joined", micro_batch=1)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)


def train_beside_a_plain_loop(model: nn.Module, step: Any, made: list[Any], micro_batch: int) -> None:
    """Compare the parameters that both leave."""
    other = copy.deepcopy(model)
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.1), training_step=step, micro_batch=micro_batch
    )
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for batch in made:
        accumulator.step(batch)
        optimizer.zero_grad()
        step(other, batch).backward()
        optimizer.step()
    for p, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, wanted, rtol=1e-9, atol=1e-11)


def test_a_recipe_on_the_meta_device_is_no_model_of_a_run() -> None:
    base = mlp().to("meta")
    models = nn.ModuleList([mlp() for _ in range(3)])

    def step(models: Any, batch: Any) -> torch.Tensor:
        stacked = {
            name: torch.stack([dict(m.named_parameters())[name] for m in models])
            for name in dict(base.named_parameters())
        }
        outputs = torch.vmap(lambda p: torch.func.functional_call(base, p, (batch[0],)))(stacked)
        return F.cross_entropy(outputs.mean(0), batch[1])

    train_beside_a_plain_loop(models, step, batches(), micro_batch=4)


def test_a_layer_that_is_replaced_in_a_weighted_run_is_measured_at_once() -> None:
    results = []
    for plain in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accumulator = None
        if not plain:
            accumulator = autoaccum.Accumulator(model, optimizer, training_step=ce, micro_batch=4)
        for number, batch in enumerate(batches()):
            if number == 3:
                model[1] = nn.BatchNorm1d(8, affine=False)
            if accumulator is not None:
                accumulator.step(batch)
                continue
            optimizer.zero_grad()
            ce(model, batch).backward()
            optimizer.step()
        results.append(model.state_dict())
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-9, atol=1e-11, msg=key)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        outputs: torch.Tensor = self.last(x)
        return outputs


def test_joined_steps_that_checkpoint_draw_as_those_that_do_not() -> None:
    left = []
    for memory_saving in ("off", "checkpoint"):
        torch.manual_seed(0)
        model = Blocks()
        accumulator = autoaccum.Accumulator(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            training_step=lambda m, b: contrast(m(b[0])),
            micro_batch=4,
            accumulate="joined",
            memory_saving=memory_saving,
        )
        for batch in batches():
            accumulator.step(batch)
        left.append(model.state_dict())
    assert all(torch.equal(value, left[1][key]) for key, value in left[0].items())


SAVED = {
    "a_mask_of_twice_as_many_times_as_are_measured": 0.2,
    "times_first_of_twice_as_many_times_as_are_measured": 0.2,
    "a_fixed_number_of_other_rows": 0.95,
}


@pytest.mark.parametrize("name", SAVED)
def test_what_can_be_split_is_split(name: str) -> None:
    (event,) = [event for event in ran(name, "joined")[2] if isinstance(event, Joined)]
    assert event.held < SAVED[name]
    assert not event.opened


def barlow(outputs: torch.Tensor) -> torch.Tensor:
    centred = (outputs - outputs.mean(0)) / outputs.std(0)
    products = centred.T @ centred.roll(1, 0) / len(centred)
    return (products.diagonal() - 1).square().sum() + 0.01 * (products - products.diagonal().diag()).square().sum()


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("seed", range(3))
def test_rounding_opens_no_module(seed: int) -> None:
    """Before a centring a bias has no gradient but rounding, of which 64 bits tell."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.1), training_step=lambda m, b: barlow(m(b)), micro_batch=12
    )
    accumulator.step(torch.randn(48, 6))
    (event,) = [event for event in accumulator.events if isinstance(event, Joined)]
    assert not event.opened
    assert not any(isinstance(event, Notice) for event in accumulator.events)


@pytest.mark.parametrize("limit", [5.0, 4.5])
def test_a_batch_that_holds_as_much_when_it_is_split_is_tried_whole(limit: float) -> None:
    torch.set_default_dtype(torch.float32)
    made = batches(256)
    with simulated_memory(int(limit * 2**20)), warnings.catch_warnings():
        warnings.simplefilter("error", autoaccum.AutoaccumWarning)
        model = nn.Sequential(
            nn.Linear(6, 400), nn.BatchNorm1d(400), nn.GELU(), nn.Linear(400, 400), nn.GELU(), nn.Linear(400, 4)
        )
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.05), training_step=lambda m, b: contrast(m(b[0])), patience=0.5
        )
        for batch in made[:2]:
            accumulator.step(batch)
            assert accumulator.micro_batches == (256,)


def towers() -> nn.ModuleDict:
    def tower() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32))

    return nn.ModuleDict({"images": tower(), "texts": tower()})


def pair_loss(model: Any, batch: Any) -> torch.Tensor:
    logits = model["images"](batch[0]) @ model["texts"](batch[1]).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


@pytest.mark.parametrize(("megabytes", "scarce_steps"), [(2.45, 1), (2.6, 3)])
def test_steps_that_could_not_be_measured_are_measured_once_there_is_memory(
    megabytes: float, scarce_steps: int
) -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    model = towers()
    with simulated_memory(int(megabytes * 2**20)) as device, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", autoaccum.AutoaccumWarning)
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), 0.1), training_step=pair_loss, patience=0.1
        )
        for number in range(scarce_steps + 2):
            if number == scarce_steps:
                assert not told
                device.limit = 2**26
            accumulator.step((torch.randn(128, 64), torch.randn(128, 64)))
    assert [str(one.message).partition(":")[0] for one in told] == [
        "Batches were split before there was memory to measure that, and were not exact"
    ]


def test_max_micro_batch_holds_where_a_split_batch_saves_nothing() -> None:
    model = nn.Sequential(nn.Linear(6, 400), nn.BatchNorm1d(400), nn.GELU(), nn.Linear(400, 4))
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.05), training_step=ce, max_micro_batch=8
    )
    accumulator.step(batches(32)[0])
    assert any(isinstance(event, Joined) for event in accumulator.events)
    assert max(accumulator.micro_batches) <= 8


class CentringFromEight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        outputs: torch.Tensor = self.last((hidden - hidden.mean(0) if len(x) >= 8 else hidden).tanh())
        return outputs


def test_what_fails_for_two_large_micro_batches_is_joined_for_as_many_samples() -> None:
    """The few samples that are measured show nothing of it."""
    torch.manual_seed(0)
    train_beside_a_plain_loop(CentringFromEight(), ce, batches(32), micro_batch=8)


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 9, (int(torch.randint(3, 9, (1,), generator=generator)),), generator=generator)


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"ids": ids, "mask": ids > 0}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(self.embedding(ids)).tanh() * mask[..., None]
        return outputs.sum(1) / mask.sum(1, keepdim=True)


def pairs(model: Any, batch: Any) -> torch.Tensor:
    """Compare each sample at an even place with the next one."""
    outputs = F.normalize(model(**batch), dim=1)
    return F.cross_entropy(outputs[0::2] @ outputs[1::2].T * 5, torch.arange(len(outputs) // 2))


def test_a_joined_batch_of_samples_of_different_lengths_keeps_their_order() -> None:
    torch.manual_seed(0)
    model, texts = Encoder(), Texts()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for start in range(0, 48, 12):
        optimizer.zero_grad()
        pairs(other, padded([texts[index] for index in range(start, start + 12)])).backward()
        optimizer.step()
    autoaccum.fit(
        model, texts, effective_batch=12, micro_batch=4, training_step=pairs, collate_fn=padded, shuffle=False,
        progress=False, cache=False, optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
