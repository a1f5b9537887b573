"""Where one sample does not fit, it is made to fit: with the gradients, states and losses of the run that has room."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import ArgumentError, AutoaccumWarning, NonFiniteLossError, NothingFitsError
from autoaccum.events import MemorySaving, Notice, OutOfMemory, Planned, Recomputed, Replanned, Waiting
from autoaccum.memory.clock import ManualClock
from autoaccum.memory.simulated import active_simulation
from autoaccum.testing import manual_clock, oom_at, simulated_memory
from autoaccum.training.trainer import FitResult
from tests.faults import strides
from tests.models import same, state_of

WIDTH, LENGTH = 32, 128
UNLIMITED = 1 << 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def data(num_samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, LENGTH, WIDTH, generator=generator)
    return inputs, torch.randn(num_samples, LENGTH, 1, generator=generator)


def fit(limit: int, kind: Callable[[], nn.Module] = Block, **options: Any) -> tuple[FitResult, Any]:
    torch.manual_seed(0)
    model, samples = Stack(kind), data()
    given: dict[str, Any] = {
        "effective_batch": 4, "micro_batch": 1, "steps": 4, "loss_fn": F.mse_loss, "optimizer": sgd, **options
    }  # fmt: skip
    with simulated_memory(limit) as device:
        found = autoaccum.fit(model, samples, device="cpu", progress=False, cache=False, **given)
    return found, device


def of(result: Any, kind: type) -> list[Any]:
    return [event for event in result.events if isinstance(event, kind)]


@pytest.fixture(scope="module")
def unlimited() -> FitResult:
    return fit(UNLIMITED)[0]


@pytest.fixture(scope="module")
def needed() -> dict[str, int]:
    """Bytes: with nothing saved, with all blocks computed twice, and half way between."""
    levels = {"off": fit(UNLIMITED)[1].peak, "all": fit(UNLIMITED, memory_saving="checkpoint")[1].peak}
    return levels | {"half": (levels["off"] + levels["all"]) // 2}


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    with manual_clock() as given:
        yield given


class TestExact:
    @pytest.mark.parametrize("share", [0.9, 0.05])
    def test_one_sample_that_does_not_fit_is_trained_on(
        self, share: float, unlimited: FitResult, needed: dict[str, int]
    ) -> None:
        limit = int(needed["all"] + share * (needed["off"] - needed["all"]))
        found, device = fit(limit)
        assert device.peak <= limit < needed["off"]
        assert same(state_of(found), state_of(unlimited))
        assert [report.loss for report in found.history] == [report.loss for report in unlimited.history]
        (change,) = of(found, MemorySaving)
        assert (change.step, change.old, change.new, change.blocks) == (1, "off", "checkpoint, every Block", 6)
        (measured,) = of(found, Recomputed)
        assert (measured.step, measured.saving, measured.blocks) == (1, change.new, 6)
        assert [report.replays for report in found.history] == [1, 0, 0, 0]

    def test_what_fits_is_not_touched(self, unlimited: FitResult, needed: dict[str, int]) -> None:
        found, _ = fit(needed["off"])
        assert same(state_of(found), state_of(unlimited))
        assert [type(event) for event in found.events] == [type(event) for event in unlimited.events]
        assert not of(found, MemorySaving)

    def test_sizes_are_found_out_anew_on_the_level(self, needed: dict[str, int]) -> None:
        plainly, _ = fit(needed["off"], micro_batch="auto", headroom=0.0, memory_saving="off")
        assert {report.micro_batches for report in plainly.history} == {(1,) * 4}
        found, _ = fit(needed["off"], micro_batch="auto", headroom=0.0, memory_saving="checkpoint")
        assert max(max(report.micro_batches) for report in found.history) > 1
        assert of(found, Planned)[-1].memory_saving == "checkpoint, every Block"
        assert of(plainly, Planned)[-1].memory_saving == "off"

    @pytest.mark.filterwarnings("ignore:Window 1 took")  # before less is kept
    def test_an_accumulator_and_a_limit_that_nobody_enforces(self, needed: dict[str, int]) -> None:
        torch.manual_seed(0)
        model = Stack()
        inputs, targets = data(4)
        with simulated_memory(UNLIMITED):
            made = autoaccum.Accumulator(
                model, sgd(model.parameters()), loss_fn=F.mse_loss, memory_limit=int(needed["off"] * 0.8), patience=0
            )
            for _ in range(3):
                made.step((inputs, targets))
        assert [event.new.startswith("checkpoint") for event in made.events if isinstance(event, MemorySaving)]

    @pytest.mark.parametrize("limit", ["off", "half", "all"])
    def test_it_can_be_asked_for(self, limit: str, unlimited: FitResult, needed: dict[str, int]) -> None:
        found, device = fit(needed[limit], memory_saving="checkpoint")
        assert same(state_of(found), state_of(unlimited))
        assert device.peak == needed["all"]
        (change,) = of(found, MemorySaving)
        assert (change.step, change.old, change.new, change.blocks) == (1, "off", "checkpoint, every Block", 6)

    def test_switched_off(self, needed: dict[str, int]) -> None:
        with pytest.raises(NothingFitsError) as caught:
            fit(needed["half"], memory_saving="off")
        assert 'memory_saving="auto"' in str(caught.value)
        assert "computed twice" not in str(caught.value)

    def test_nothing_fits_where_the_lowest_level_does_not(self, needed: dict[str, int]) -> None:
        with pytest.raises(NothingFitsError) as caught:
            fit(int(needed["all"] * 0.9))
        assert "checkpointing" not in {advice.name for advice in caught.value.advice}
        assert "), with 6 of the model's blocks computed twice. " in str(caught.value)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert caught.value.__cause__.__traceback__ is None


def conv() -> tuple[nn.Module, Any, Any]:
    def block(inputs: int) -> nn.Module:
        layers = nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.1)
        return nn.Sequential(*layers)

    model = nn.Sequential(block(1), block(16), block(16), block(16), nn.Flatten(), nn.Linear(16 * 256, 3))
    batch = torch.randn(4, 1, 16, 16), torch.randint(0, 3, (4,))
    return model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def gpt2() -> tuple[nn.Module, Any, Any]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=4, n_head=2, n_positions=64)
    ids = torch.randint(0, 50, (2, 64))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}, None


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
@pytest.mark.parametrize("make", [conv, gpt2])
def test_models_of_which_one_sample_does_not_fit(make: Callable[[], tuple[nn.Module, Any, Any]]) -> None:
    def train(limit: int, **options: Any) -> tuple[Any, list[Any], Any]:
        torch.manual_seed(0)
        model, batch, step = make()
        model.train()
        with simulated_memory(limit) as device:
            made = autoaccum.Accumulator(
                model, sgd(model.parameters()), training_step=step, verify=False, micro_batch=2 if step else 1, **options
            )  # fmt: skip
            losses = [made.step(batch) for _ in range(3)]
        return made, [*losses, *(p.detach() for p in model.parameters()), *model.buffers()], device

    _, wanted, plainly = train(UNLIMITED)
    _, asked, twice = train(UNLIMITED, memory_saving="checkpoint")
    limit = (plainly.peak + twice.peak) // 2
    made, found, device = train(limit)
    assert same(asked, wanted)
    assert same(found, wanted)
    assert twice.peak <= device.peak <= limit
    assert any(isinstance(event, MemorySaving) for event in made.events)
    assert any(isinstance(event, Recomputed) for event in made.events)


class TestFaults:
    @strides(131)
    @pytest.mark.parametrize("windows_before", [0, 1])
    @pytest.mark.parametrize("mode", ["checkpoint", "auto"])
    @pytest.mark.filterwarnings("ignore:Blocks are computed once more .* and there was no memory to compare")
    def test_at_every_operation_of_a_window(self, mode: str, windows_before: int, stride: int) -> None:
        """Whatever fails, also within what is computed twice, is replayed to the same bits: compared or not.

        Where nobody asks for it, it is gone down to in the window itself, if there are none before it.
        """

        def train(operation: int | None, memory_saving: Any, limit: int) -> tuple[list[Any], int, int]:
            torch.manual_seed(0)
            model, batch = Stack(depth=3), tuple(part[:, :16].clone() for part in data(2))
            made = autoaccum.Accumulator(
                model, sgd(model.parameters()), loss_fn=F.mse_loss, micro_batch=1, memory_saving=memory_saving,
                verify=False, patience=0,
            )  # fmt: skip
            with simulated_memory(limit) as device:
                for _ in range(windows_before):
                    made.step(batch)
                with oom_at(operation) as fault:
                    made.backward(batch)
            found = [*(p.grad for p in model.parameters()), *model.buffers()]
            changes = [event.new for event in made.events if isinstance(event, MemorySaving)]
            if operation is None and memory_saving == "auto":
                assert changes == ["checkpoint, every Block"]
            kinds = (OutOfMemory, Notice)
            assert operation is None or changes or any(isinstance(event, kinds) for event in made.events)
            return [*found, torch.get_rng_state()], fault.operations, device.peak

        plain, _, most = train(None, "off", UNLIMITED)
        lowest, _, least = train(None, "checkpoint", UNLIMITED)
        assert same(lowest, plain)
        given: Any = (mode, UNLIMITED if mode == "checkpoint" else int(least + 0.9 * (most - least)))
        _, operations, _ = train(None, *given)
        assert operations > 200
        for operation in range(1, operations + 1, stride):
            assert same(train(operation, *given)[0], plain), operation


class Draws(Block):
    """Draws from where nobody looks."""

    numbers = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * next(self.numbers))


class TestRefusals:
    def test_what_cannot_be_computed_again_is_told_and_nothing_fits(self, needed: dict[str, int]) -> None:
        with (
            pytest.warns(AutoaccumWarning, match="No forward of Draws is computed twice"),
            pytest.raises(NothingFitsError, match="a micro-batch of 1"),
        ):
            fit(needed["half"], Draws, patience=0)

    @pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning")
    def test_where_it_was_asked_for_the_run_goes_on_without(self) -> None:
        found, _ = fit(UNLIMITED, Draws, memory_saving="checkpoint", verify=False)
        assert len(found.history) == 4
        told = [event.consequence for event in of(found, Notice)]
        assert told[:2] == [
            "No forward of Draws is computed twice in this run",
            "Nothing is computed twice or kept on the host, and nothing is saved by that",
        ]

    def test_what_is_wrong_with_a_loss_is_not_put_down_to_it(self) -> None:
        with pytest.raises(NonFiniteLossError):
            fit(UNLIMITED, memory_saving="checkpoint", loss_fn=lambda outputs, targets: outputs.mean() * float("nan"))

    def test_where_it_cannot_be_had(self) -> None:
        for wrong in ("sometimes", [], ["checkpoint", "auto"], True, None):
            with pytest.raises(ArgumentError, match="memory_saving"):
                fit(UNLIMITED, memory_saving=wrong)

    @pytest.mark.parametrize("mode", ["offload", ["checkpoint", "offload"]])
    def test_a_cpu_has_no_other_memory(self, mode: Any) -> None:
        with pytest.raises(ArgumentError, match="all that cpu has of memory is the host's") as caught:
            fit(UNLIMITED, memory_saving=mode)
        assert '"checkpoint"' in str(caught.value)

    def test_a_list_of_one_is_the_same(self, unlimited: FitResult) -> None:
        found, _ = fit(UNLIMITED, memory_saving=["checkpoint"])
        assert same(state_of(found), state_of(unlimited))
        (change,) = of(found, MemorySaving)
        assert (change.new, change.reason) == ("checkpoint, every Block", 'memory_saving=["checkpoint"] was passed')


class TestHooks:
    ADDED = 3

    def train(self, hook: Callable[[list[int]], Any], **options: Any) -> tuple[list[Any], int, list[Any]]:
        torch.manual_seed(0)
        model, batch, seen = Stack(depth=2), data(2), list[int]()
        made = autoaccum.Accumulator(
            model, sgd(model.parameters()), loss_fn=F.mse_loss, micro_batch=1, verify=False, **options
        )
        for number in range(1, self.ADDED + 3):
            if number == self.ADDED:  # when nothing is compared any more
                model.blocks[0].up.register_forward_hook(hook(seen))
            made.step(batch)
        return [p.detach() for p in model.parameters()], len(seen), list(made.events)

    @pytest.mark.parametrize("grows", [False, True], ids=["counts", "grows"])
    def test_one_that_is_added_later_is_measured_too(self, grows: bool) -> None:
        def counts(seen: list[int]) -> Any:
            def hook(layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
                seen.append(1)
                return output * len(seen) if grows else None

            return hook

        wanted, called, _ = self.train(counts, memory_saving="off")
        found, again, events = self.train(counts, memory_saving="checkpoint")
        assert called == again == 6
        assert same(found, wanted)
        told = [(event.step, event.blocks) for event in events if isinstance(event, Recomputed)]
        assert told == [(1, 2), (self.ADDED, 1)]

    def test_one_that_makes_another_forward_of_it_is_refused(self) -> None:
        def grows(seen: list[int]) -> Any:
            numbers = itertools.count(1)
            return lambda layer, inputs, output: output * next(numbers)

        with pytest.warns(AutoaccumWarning) as told:
            _, _, events = self.train(grows, memory_saving="checkpoint")
        assert "No forward of Block is computed twice" in str(told[0].message)
        assert [event.step for event in events if isinstance(event, MemorySaving)] == [1, self.ADDED]


class TestMovingMemory:
    def test_up_again_as_memory_comes_back_and_down_at_once(
        self, clock: ManualClock, unlimited: FitResult, needed: dict[str, int]
    ) -> None:
        torch.manual_seed(0)
        model, samples = Stack(), data()

        def move(record: Any) -> None:
            clock.advance(1.0)
            if isinstance(record, autoaccum.StepReport):
                device.limit = {4: UNLIMITED, 30: needed["half"]}.get(record.step, device.limit)

        with simulated_memory(needed["half"]) as device:
            found = autoaccum.fit(
                model, samples, effective_batch=4, micro_batch=1, steps=40, loss_fn=F.mse_loss, optimizer=sgd,
                device="cpu", progress=False, cache=False, callbacks=[move],
            )  # fmt: skip
        changes = [(change.old == "off", change.new == "off") for change in of(found, MemorySaving)]
        assert changes == [(True, False), (False, True), (True, False)]
        assert [change.step for change in of(found, MemorySaving)][::2] == [1, 31]
        assert "memory has come back" in of(found, MemorySaving)[1].reason
        assert not of(found, Waiting)
        assert len(of(found, OutOfMemory)) == 2
        whole, _ = fit(UNLIMITED, steps=40)
        assert same(state_of(found), state_of(whole))

    @pytest.mark.parametrize(
        ("windows", "most"), [(250, 16), pytest.param(10_000, 40, id="ten thousand", marks=pytest.mark.slow)]
    )
    def test_a_limit_that_jitters_causes_few_changes_and_loses_nothing(
        self, windows: int, most: int, clock: ManualClock
    ) -> None:
        """The limit is another one before each window; at times it is calm, for shorter and for longer than is waited.

        A rise in vain doubles the wait for the next one, so that their number grows by the logarithm of the windows.
        """

        def run(limit: int, steps: int, move: Callable[[Any], None], **options: Any) -> tuple[FitResult, Any]:
            torch.manual_seed(0)
            model, (inputs, targets) = Stack(depth=2), data(8)
            with simulated_memory(limit) as device:
                devices.append(device)
                made = autoaccum.fit(
                    model, (inputs[:, :32].clone(), targets[:, :32].clone()), effective_batch=2, micro_batch=1,
                    steps=steps, loss_fn=F.mse_loss, optimizer=sgd, device="cpu", progress=False, cache=False,
                    callbacks=[move], **options,
                )  # fmt: skip
            return made, device

        devices: list[Any] = []

        def tick(record: Any) -> None:
            clock.advance(1.0)

        whole, plainly = run(UNLIMITED, windows, tick, memory_saving="off")
        _, twice = run(UNLIMITED, 2, tick, memory_saving="checkpoint")
        chance, least = random.Random(0), int(twice.peak + 0.1 * (plainly.peak - twice.peak))

        def jitter(record: Any) -> None:
            tick(record)
            if isinstance(record, autoaccum.StepReport):
                calm = {0: UNLIMITED, 1: least}.get(record.step // 50 % 5)
                devices[-1].limit = chance.randrange(least, int(1.2 * plainly.peak)) if calm is None else calm

        found, _ = run(least, windows, jitter)
        changes = of(found, MemorySaving)
        assert {change.new == "off" for change in changes} == {True, False}, "down and up"
        assert len(changes) <= most
        assert [report.effective_batch for report in found.history] == [2] * windows
        assert same(state_of(found), state_of(whole))

    @pytest.mark.filterwarnings("ignore:The limit is .* now, and the smallest micro-batch needs")
    @pytest.mark.parametrize("micro_batch", ["auto", 1])
    def test_memory_that_halves_and_quarters_and_returns(self, micro_batch: Any, clock: ManualClock) -> None:
        """Sizes are looked for on each level; with room and the same plans everything comes to the same bits."""

        def run(move: Callable[[Any], None], **options: Any) -> FitResult:
            return fit(UNLIMITED, steps=64, effective_batch=2, callbacks=[move], **options)[0]

        def tick(record: Any) -> None:
            clock.advance(1.0)

        peaks = [fit(UNLIMITED, steps=2, memory_saving=how)[1].peak for how in ("off", "checkpoint")]
        room = {5: peaks[0] * 0.9 + peaks[1] * 0.1, 20: peaks[0] * 0.1 + peaks[1] * 0.9, 35: UNLIMITED}

        def move(record: Any) -> None:
            tick(record)
            if isinstance(record, autoaccum.StepReport) and record.step in room:
                simulation = active_simulation()
                assert simulation is not None
                simulation.limit = int(room[record.step])

        found = run(move, micro_batch=micro_batch)
        assert [change.new for change in of(found, MemorySaving)] == ["checkpoint, every Block", "off"]
        assert found.history[-1].micro_batches == ((2,) if micro_batch == "auto" else (1, 1))
        assert [report.effective_batch for report in found.history] == [2] * 64
        plans = [report.micro_batches for report in found.history]
        assert same(state_of(found), state_of(run(tick, micro_batch=plans, memory_saving="off")))

    def test_a_resumed_run_stands_on_its_level(self, tmp_path: Any, needed: dict[str, int]) -> None:
        whole, _ = fit(needed["half"], steps=6)
        first, _ = fit(needed["half"], steps=3, run_dir=tmp_path, checkpoint_every=1)
        then, _ = fit(needed["half"], steps=6, run_dir=tmp_path, checkpoint_every=1)
        assert same(state_of(then)[:-2], state_of(whole)[:-2])
        assert len(of(first, MemorySaving)) == 1
        assert not of(then, MemorySaving) or [e.step for e in of(then, MemorySaving)] == [1]
        assert not [event for event in of(then, OutOfMemory) if event.step > 3]


def test_it_is_told_of_in_words(needed: dict[str, int]) -> None:
    from autoaccum.reporting.lines import line

    found, _ = fit(needed["half"])
    told = [line(event) for event in found.events if isinstance(event, MemorySaving | Recomputed | Replanned)]
    assert told[0] == (
        "step 1: memory saving off -> checkpoint, every Block: out of memory at the smallest micro-batch"
    )
    assert told[-1] == "step 1: activation checkpointing has the same gradient (checked on 6 blocks)"
