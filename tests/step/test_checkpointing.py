"""What is computed twice comes to the same bits: gradients, buffers, random states, counters; or it is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointError

from autoaccum.step.checkpointing import NotRepeatableError, Recomputing, is_refusal, named_submodules
from autoaccum.step.checkpointing import blocks_of as found_in
from autoaccum.testing import oom_at

CPU = torch.device("cpu")
TABLES: dict[str, torch.Tensor] = {}
WIDTH = 8


class Block(nn.Module):
    """A layer whose forward does something besides."""

    def __init__(self, does: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.does = does
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen: list[float] = []
        if does == "spectral norm":
            spectral_norm(self.linear)
        if does == "BatchNorm":
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.does == "dropout":
            y = F.dropout(y, 0.5)
        elif self.does == "Python's random":
            y = y * random.random()
        elif self.does == "NumPy's random":
            y = y * float(np.random.rand())
        elif self.does == "a generator of its own":
            y = y * torch.rand(WIDTH, generator=self.generator)
        elif self.does == "a counter":
            self.calls += 1
            y = y / self.calls
        elif self.does == "a list":
            self.seen.append(float(y.detach().mean()))
            y = y * len(self.seen)
        elif self.does == "a moving average":
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            y = y - self.mean
        elif self.does == "a moving average by .data":
            self.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            y = y - self.mean
        elif self.does == "another buffer in its place":
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            y = y - self.mean
        elif self.does == "BatchNorm":
            y = self.norm(y)
        elif self.does == "a table of all":
            if not TABLES:
                TABLES["scale"] = torch.arange(WIDTH).cos()
            y = y * TABLES["scale"]
        return y.tanh()


class Stack(nn.Module):
    def __init__(self, does: str = "", depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(does) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CalledTwice(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class Tied(Stack):
    def __init__(self) -> None:
        super().__init__("dropout")
        for block in self.blocks:
            block.linear.weight = self.blocks[0].linear.weight


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def conv() -> nn.Module:
    def block(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout())

    return nn.Sequential(block(1), block(4), block(4))


DOES = [
    "", "dropout", "Python's random", "NumPy's random", "a generator of its own", "a counter", "a list", "spectral norm",
    "a moving average", "a moving average by .data", "another buffer in its place", "BatchNorm",
]  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{does or "nothing besides": (partial(Stack, does), (4, WIDTH)) for does in DOES},
    "called twice": (partial(CalledTwice, "dropout"), (4, WIDTH)),
    "a counter, called twice": (partial(CalledTwice, "a counter"), (4, WIDTH)),
    "tied": (Tied, (4, WIDTH)),
    "LSTM": (Recurrent, (4, 5, WIDTH)),
    "transformer": (transformer, (4, 5, WIDTH)),
    "conv": (conv, (4, 1, 6, 6)),
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in named_submodules([model]).items() if name.rpartition(".")[2].isdigit()
            and "." not in name.removeprefix("model.").removeprefix("blocks.").removeprefix("layers.")]  # fmt: skip


def plain(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def train(
    model: nn.Module, batches: list[Any], loss_of: Callable[..., Any], recomputing: Recomputing | None
) -> list[Any]:
    """Return all that there is after a backward of each batch."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    found: list[Any] = []
    for batch in batches:
        loss = (loss_of if recomputing is None else recomputing.of_loss(loss_of))(model, batch)
        loss.backward()
        found.append(loss.detach())
        found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        found.extend(b.clone() for b in model.buffers())
        found.append(torch.get_rng_state())
        found.append((random.random(), np.random.rand()))
        for module in model.modules():
            if isinstance(module, Block):
                found.append((module.calls, tuple(module.seen), module.generator.get_state().tolist()))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad if p.grad is not None else 0.0)
                p.grad = None
    return found


def same(first: list[Any], second: list[Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return len(first) == len(second) and all(map(alike, first, second))


def recomputing_of(model: nn.Module, loss_of: Callable[..., Any] = plain) -> Recomputing:
    made = Recomputing([model], [loss_of], CPU)
    made.blocks = blocks_of(model)
    return made


class Keeping(nn.Module):
    """Keeps what its forward came to last, and the one of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, self.linear(x).tanh()
        return self.last if before is None else self.last + before.detach()


class Patched(nn.Module):
    """Has another forward for a while, which its model, its neighbour or itself gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gives: list[Patched] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in self.gives:
            other.forward = other.turned  # type: ignore[method-assign]
        return self.linear(x).tanh()  # type: ignore[no-any-return]

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        vars(self).pop("forward")
        return self.linear(x).cos()  # type: ignore[no-any-return]


class TestBits:
    @pytest.mark.parametrize("by", ["its model", "its neighbour", "itself"])
    def test_of_a_forward_that_is_put_in_the_place_of_a_blocks_for_a_while(self, by: str) -> None:
        def run(*, is_on: bool) -> list[Any]:
            torch.manual_seed(0)
            model = nn.Sequential(Patched(), Patched(), Patched())
            if by != "its model":
                model[1].gives = [model[2 if by == "its neighbour" else 1]]

            def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
                if by == "its model":
                    model[1].forward, model[2].forward = model[1].turned, model[2].turned
                return plain(model, batch)

            made = Recomputing([model], [loss_of], CPU)
            made.blocks = list(model) if is_on else []
            return train(model, [torch.ones(2, WIDTH)] * 4, loss_of, made)

        assert same(run(is_on=False), run(is_on=True))

    def test_of_what_blocks_keep_from_one_forward_to_the_next_which_goes_when_they_let_go_of_it(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Keeping(), Keeping())
        other, batches = copy.deepcopy(model), [torch.randn(4, WIDTH) for _ in range(4)]
        recomputing = recomputing_of(other)
        recomputing.blocks = list(other)
        assert same(train(model, batches, plain, None), train(other, batches, plain, recomputing))
        kept = weakref.ref(other[0].last)
        for module in other:
            module.last = None
        gc.collect()
        assert kept() is None

    def test_of_layers_that_are_added_and_buffers_that_are_replaced_from_one_forward_to_the_next(self) -> None:
        found = []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = Stack("a moving average")
            recomputing = recomputing_of(model)
            batches = [torch.randn(4, WIDTH) for _ in range(2)]
            ours = recomputing if is_on else None
            found.append(train(model, batches, plain, ours))
            for block in model.blocks:
                block.mean = torch.ones(WIDTH)
                block.linear = nn.Sequential(block.linear, nn.BatchNorm1d(WIDTH))
            found[-1] += train(model, batches, plain, ours)
        assert same(*found)

    @pytest.mark.parametrize("name", MODELS)
    def test_are_the_same(self, name: str) -> None:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        model = make()
        other = copy.deepcopy(model)
        batches = [torch.randn(shape) for _ in range(3)]
        recomputing = recomputing_of(other)
        assert len(recomputing.blocks) == 3
        assert same(train(model, batches, plain, None), train(other, batches, plain, recomputing))
        assert len(recomputing.compared) == 3
        assert type(other) is type(model)
        assert other.state_dict().keys() == model.state_dict().keys()

    def test_under_autocast(self) -> None:
        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain(model, batch)

        torch.manual_seed(0)
        model = Stack("dropout")
        other, batches = copy.deepcopy(model), [torch.randn(4, WIDTH)]
        assert same(
            train(model, batches, loss_of, None), train(other, batches, loss_of, recomputing_of(other, loss_of))
        )

    def test_of_a_block_that_autocast_meets_twice(self) -> None:
        """Its weights are cast once in the first forward, and once more in each that is computed again."""

        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain(model, batch)

        torch.manual_seed(0)
        model = CalledTwice("dropout")
        other, batches = copy.deepcopy(model), [torch.randn(4, WIDTH)] * 2
        recomputing = recomputing_of(other, loss_of)
        assert same(train(model, batches, loss_of, None), train(other, batches, loss_of, recomputing))
        assert recomputing.compared

    def test_of_a_copy_that_is_made_within_a_loss(self) -> None:
        """A teacher that begins as the model: it computes by its own weights, which stay where they were."""

        def losses() -> Callable[..., Any]:
            teachers: list[nn.Module] = []

            def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
                if not teachers:
                    teachers.append(copy.deepcopy(model))
                with torch.no_grad():
                    wanted = teachers[0](batch + 1)
                return (model(batch) - wanted).square().mean()

            return loss_of

        torch.manual_seed(0)
        model = Stack("dropout")
        other, batches = copy.deepcopy(model), [torch.randn(4, WIDTH) for _ in range(4)]
        loss_of, same_loss = losses(), losses()
        recomputing = recomputing_of(other, same_loss)
        assert same(train(model, batches, loss_of, None), train(other, batches, same_loss, recomputing))

    def test_of_layers_that_are_frozen_while_the_loss_is_computed(self) -> None:
        """As the critic is in the loss of a generator; what is as large as the batch is then taken for the batch."""

        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            model[1].requires_grad_(False)
            loss = plain(model, batch)
            model[1].requires_grad_(True)
            return loss + 0 * model[1](batch.detach()).sum()

        torch.manual_seed(0)
        model = nn.Sequential(Block("dropout"), Block("dropout"))
        other, batches = copy.deepcopy(model), [torch.randn(WIDTH, WIDTH) for _ in range(3)]
        recomputing = recomputing_of(other, loss_of)
        recomputing.blocks = list(other)
        assert same(train(model, batches, loss_of, None), train(other, batches, loss_of, recomputing))
        assert all(p.requires_grad for p in other.parameters())

    def test_of_a_generator_that_a_function_holds(self) -> None:
        def losses(generator: torch.Generator) -> Callable[..., Any]:
            class Draws(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.linear = nn.Linear(WIDTH, WIDTH)

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.linear(x) * torch.rand(WIDTH, generator=generator)  # type: ignore[no-any-return]

            torch.manual_seed(0)
            blocks = nn.Sequential(Draws(), Draws())

            def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
                torch.rand(1, generator=generator)
                return plain(model, batch)

            loss_of.blocks = blocks  # type: ignore[attr-defined]
            return loss_of

        found = []
        for is_on in (False, True):
            generator = torch.Generator().manual_seed(1)
            loss_of = losses(generator)
            model = loss_of.blocks  # type: ignore[attr-defined]
            made = Recomputing([model], [loss_of], CPU)
            made.blocks = list(model) if is_on else []
            found.append(train(model, [torch.ones(2, WIDTH)], loss_of, made))
        assert same(*found)

    def test_a_counter_that_lies_elsewhere_is_put_back_once_it_was_seen(self) -> None:
        class Elsewhere(nn.Module):
            def __init__(self, counts: list[int]) -> None:
                super().__init__()
                self.linear, self.counts = nn.Linear(WIDTH, WIDTH), [counts]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.counts[0].append(1)
                return self.linear(x).tanh()  # type: ignore[no-any-return]

        counts: list[int] = []

        def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return plain(model, batch) + 0 * len(counts)

        model = nn.Sequential(Elsewhere(counts), Elsewhere(counts))
        made = Recomputing([model], [loss_of], CPU)
        made.blocks = list(model)
        train(model, [torch.ones(2, WIDTH)], loss_of, made)
        assert len(counts) == 2
        train(model, [torch.ones(2, WIDTH)] * 3, loss_of, made)
        assert len(counts) == 8

    def test_what_hooks_collect_in_a_context_variable_is_that_of_one_forward(self) -> None:
        """As transformers collects the logits of routers, of which the loss is computed."""
        collected: ContextVar[dict[str, list[torch.Tensor]]] = ContextVar("collected")

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            token = collected.set({"outputs": []})
            try:
                loss = model(batch).square().mean()
                outputs = collected.get()["outputs"]
                assert len(outputs) == 3
                return loss + sum(one.mean() for one in outputs)
            finally:
                collected.reset(token)

        found = []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = Stack()
            for block in model.blocks:
                block.linear.register_forward_hook(
                    lambda module, args, output: collected.get({"outputs": []})["outputs"].append(output)
                )
            made = Recomputing([model], [loss_of], CPU)
            made.blocks = list(model.blocks) if is_on else []
            found.append(train(model, [torch.ones(2, WIDTH)] * 3, loss_of, made))
        assert same(*found)

    def test_counters_of_forwards_that_instances_have_of_their_own_are_put_back(self) -> None:
        def patched(block: nn.Module) -> Callable[[], int]:
            calls, plain_forward = 0, block.forward

            def forward(x: torch.Tensor) -> torch.Tensor:
                nonlocal calls
                calls += 1
                return plain_forward(x) * calls  # type: ignore[no-any-return]

            block.forward = forward  # type: ignore[method-assign]
            return lambda: calls

        found = []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = Stack()
            counts = [patched(block) for block in model.blocks]
            made = Recomputing([model], [plain], CPU)
            made.blocks = list(model.blocks) if is_on else []
            found.append(train(model, [torch.ones(2, WIDTH)] * 3, plain, made))
            assert [count() for count in counts] == [3, 3, 3]
        assert same(*found)

    @pytest.mark.parametrize("where", ["an object", "an object within an object"])
    def test_of_what_is_counted_in(self, where: str) -> None:
        class Meter:
            def __init__(self) -> None:
                self.calls, self.inner = 0, None

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.meter = nn.Linear(WIDTH, WIDTH), Meter()
                if where == "an object within an object":
                    self.meter.inner = Meter()  # type: ignore[assignment]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                meter = self.meter.inner or self.meter
                meter.calls += 1
                return self.linear(x).tanh() * meter.calls  # type: ignore[no-any-return]

        def counts(model: nn.Module) -> list[int]:
            blocks = list(model)  # type: ignore[call-overload]
            meters = [block.meter for block in blocks] + [block.meter.inner for block in blocks if block.meter.inner]
            return [meter.calls for meter in meters]

        found, counted = [], []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Counting(), Counting(), Counting())
            made = Recomputing([model], [plain], CPU)
            made.blocks = list(model) if is_on else []
            found.append(train(model, [torch.ones(2, WIDTH)] * 3, plain, made))
            counted.append(counts(model))
        assert same(*found)
        assert counted[0] == counted[1]
        assert sum(counted[0]) == 9

    def test_of_a_cache_that_the_first_forward_of_all_fills(self) -> None:
        def run(*, is_on: bool) -> list[Any]:
            torch.manual_seed(0)
            model = Stack("a table of all")
            made = Recomputing([model], [plain], CPU)
            made.blocks = list(model.blocks) if is_on else []
            TABLES.clear()
            return train(model, [torch.randn(3, WIDTH)] * 3, plain, made)

        assert same(run(is_on=False), run(is_on=True))

    def test_where_memory_runs_out_while_gradients_are_compared(self) -> None:
        """Memory that runs out in a comparison changes nothing but that."""
        torch.manual_seed(0)
        model = Stack("a moving average")
        other, batch = copy.deepcopy(model), torch.randn(4, WIDTH)
        wanted = train(model, [batch], plain, None)
        made, operations = recomputing_of(copy.deepcopy(other)), 0
        with oom_at(None) as count:
            train(made._modules[0], [batch], plain, made)
        for n in range(1, count.operations, 7):
            again = recomputing_of(copy.deepcopy(other))
            try:
                with oom_at(n):
                    found = train(again._modules[0], [batch], plain, again)
            except torch.OutOfMemoryError:
                continue
            operations += 1
            assert same(found, wanted)
            assert again.lacks_memory
            assert len(again.compared) == 2
        assert operations > 5


class TestRefusals:
    def refused(self, model: nn.Module) -> Exception:
        with pytest.raises((NotRepeatableError, CheckpointError)) as caught:
            train(model, [torch.ones(2, WIDTH)] * 2, plain, recomputing_of(model))
        assert is_refusal(caught.value)
        return caught.value

    def test_what_draws_from_elsewhere(self) -> None:
        class Foreign(Block):
            numbers = itertools.count(1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x * next(self.numbers))

        model = nn.Sequential(Foreign(), Foreign())
        error = self.refused(model)
        assert isinstance(error, NotRepeatableError)
        assert isinstance(error.block, Foreign)
        assert "gives another gradient" in str(error)

    @pytest.mark.parametrize("gate", [1.0, 0.0])
    @pytest.mark.parametrize("what", ["a view of a parameter", "a number", "of NumPy", "a slice"])
    def test_what_is_read_that_no_operation_has_computed(self, what: str, gate: float) -> None:
        """It is other the second time, in what the last operation reads, whose result may be the same."""
        values = itertools.count(1)

        class Picks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH)
                self.experts = nn.Parameter(torch.arange(9.0 * WIDTH).view(9, 1, WIDTH))
                self.gate = nn.Parameter(torch.full((1, 1), gate))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                value, x = next(values) % 9, self.linear(x)
                found = {
                    "a view of a parameter": lambda: self.experts[value],
                    "a number": lambda: torch.tensor([[float(value)]]),
                    "of NumPy": lambda: torch.from_numpy(np.full((1, 1), value, dtype=np.float32)),
                    "a slice": lambda: self.experts.view(-1, 1)[value : value + 1],
                }[what]()
                return x * (self.gate * found)

        error = self.refused(nn.Sequential(Picks(), Picks()))
        assert isinstance(error, NotRepeatableError)
        assert isinstance(error.block, Picks)

    def test_not_of_memory_that_is_written_to_in_part_at_first(self) -> None:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out, chosen = torch.empty_like(x), torch.arange(len(x)) % 4
                for number, expert in enumerate(self.experts):
                    out[chosen == number] = expert(x[chosen == number])
                return out.tanh()

        found = []
        for is_on in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Experts(), Experts())
            made = Recomputing([model], [plain], CPU)
            made.blocks = list(model) if is_on else []
            found.append(train(model, [torch.randn(16, 64)] * 3, plain, made))
        assert same(*found)

    @pytest.mark.parametrize("size", [1e-7, 1e-2])
    def test_not_of_kernels_that_do_not_repeat_their_last_bits(self, size: float) -> None:
        class Trembles(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x * (1 + size * next(numbers)))

        numbers, model = itertools.count(1), nn.Sequential(Trembles(), Trembles())
        if size > 1e-3:
            assert isinstance(self.refused(model), NotRepeatableError)
        else:
            made = recomputing_of(model)
            train(model, [torch.ones(2, WIDTH)] * 2, plain, made)
            assert len(made.compared) == 2

    def test_what_writes_to_its_input(self) -> None:
        class Writes(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.add_(self.linear(x.detach().clone()))

        model = nn.Sequential(Writes(), Writes())
        assert "inplace operation" in str(self.refused(model))

    def test_what_writes_to_a_parameter(self) -> None:
        class Moves(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.bias.add_(1)
                return super().forward(x) + self.bias

            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

        assert "bias is written to" in str(self.refused(nn.Sequential(Moves(), Moves())))

    def test_what_takes_another_way_the_second_time(self) -> None:
        class Turns(Block):
            ways = itertools.cycle([True, False])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) if next(self.ways) else x[:1].sigmoid()

        made = recomputing_of(model := nn.Sequential(Turns(), nn.Identity()))
        made.blocks = [model[0]]
        with pytest.raises((CheckpointError, NotRepeatableError)):
            train(model, [torch.ones(2, WIDTH)], plain, made)

    def test_running_out_of_memory_is_no_refusal_and_leaves_no_trace(self) -> None:
        model, batch = Stack("a moving average"), torch.randn(4, WIDTH)
        made = recomputing_of(model)
        means = [block.mean for block in model.blocks]
        made.of_loss(plain)(model, batch).backward()  # in which gradients are compared
        with oom_at(None) as count:
            made.of_loss(plain)(model, batch).backward()
        for n in range(1, count.operations + 1):
            before = [mean.clone() for mean in means]
            with pytest.raises(torch.OutOfMemoryError), oom_at(n):
                made.of_loss(plain)(model, batch).backward()
            assert [block.mean for block in model.blocks] == means, "the very tensors"
            assert not any("forward" in vars(block) for block in model.blocks)
            for block, mean in zip(model.blocks, before, strict=True):
                block.mean.copy_(mean)


class TestNoTrace:
    def test_between_windows(self) -> None:
        model = Stack()
        before = [dict(vars(module)) for module in model.modules()]
        recomputing_of(model).of_loss(plain)(model, torch.ones(2, WIDTH)).backward()
        assert [list(vars(module)) for module in model.modules()] == [list(one) for one in before]
        other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        plain(other, torch.ones(2, WIDTH)).backward()
        assert all(p.grad is not None for p in other.parameters())

    def test_a_forward_of_the_instances_own_is_wrapped_and_stays(self) -> None:
        model = Stack("dropout")
        called = itertools.count()

        def forward(x: torch.Tensor) -> torch.Tensor:
            next(called)
            return type(model.blocks[0]).forward(model.blocks[0], x)

        model.blocks[0].forward = forward
        made = recomputing_of(model)
        for last in (5, 8):  # three calls to compare gradients; two, and the one that asks for their number
            made.of_loss(plain)(model, torch.ones(2, WIDTH)).backward()
            assert model.blocks[0].forward is forward
            assert next(called) == last

    def test_of_an_error(self) -> None:
        model = Stack()
        with pytest.raises(RuntimeError):
            recomputing_of(model).of_loss(plain)(model, torch.ones(2, 3))
        assert not any("forward" in vars(module) for module in model.modules())

    def test_without_a_graph_nothing_is_wrapped(self) -> None:
        model = Stack()
        made = recomputing_of(model)
        with torch.no_grad():
            made.of_loss(lambda model, batch: [vars(b).get("forward") for b in model.blocks])(model, None)
            found = made.of_loss(lambda model, batch: [vars(b).get("forward") for b in model.blocks])(model, None)
        assert found == [None] * 3
        assert None not in made.of_loss(lambda model, batch: [vars(b).get("forward") for b in model.blocks])(
            model, None
        )


def hugging_face() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (2, 7))
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama = {**small, "intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 16}
    gpt = {"vocab_size": 50, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    t5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    bert = {**small, "intermediate_size": 32, "max_position_embeddings": 16}
    t = transformers
    return {
        "GPT2": (t.GPT2LMHeadModel(t.GPT2Config(**gpt)), {"input_ids": ids, "labels": ids}),
        "Llama": (t.LlamaForCausalLM(t.LlamaConfig(**llama)), {"input_ids": ids, "labels": ids}),
        "BERT": (t.BertForMaskedLM(t.BertConfig(**bert)), {"input_ids": ids, "labels": ids}),
        "T5": (
            t.T5ForConditionalGeneration(t.T5Config(**t5, decoder_start_token_id=0)),
            {"input_ids": ids, "labels": ids},
        ),
    }


@pytest.mark.parametrize("name", ["GPT2", "Llama", "BERT", "T5"])
def test_of_hugging_face(name: str) -> None:
    """Their configurations ask for a cache, which a second forward would append to once more."""

    def loss_of(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss

    model, batch = hugging_face()[name]
    model.train()
    other = copy.deepcopy(model)
    made = Recomputing([other], [loss_of], CPU)
    made.blocks = list(found_in([other]).values())
    kind = {"GPT2": "GPT2Block", "Llama": "LlamaDecoderLayer", "BERT": "BertLayer", "T5": "T5Block"}[name]
    assert {type(block).__name__ for block in made.blocks} == {kind}
    use_cache = getattr(other.config, "use_cache", None)
    assert same(train(model, [batch] * 2, loss_of, None), train(other, [batch] * 2, loss_of, made))
    assert made.compared
    assert getattr(other.config, "use_cache", None) is use_cache
