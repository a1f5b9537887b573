"""Law 1 and law 8 where blocks of compiled models are computed twice: the same bits, or refused with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.events import Compiled, MemorySaving, Notice, OutOfMemory, Recomputed
from autoaccum.training.trainer import FitResult
from tests.models import same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what a compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # of what it looks at
]
BACKEND = "aot_eager"
WIDTH = 32


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * F.dropout(self.down(F.gelu(self.up(self.moved(x)))), 0.1)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


class Writing(Block):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Reading(Writing):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return super().moved(x) * (1 + self.mean)


class HiddenReading(Block):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # which moves no version
        return x * (1 + self.mean)


class Last(Block):
    """Reads it in its very last operation, of which a backward saves nothing."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x, scale=scale) - self.mean


class OfSeveral(Block):
    """Writes where there are several samples, as a variance needs."""

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 1:
            self.mean.mul_(0.9).add_(x.detach().var(0), alpha=0.1)
        return x * (1 + self.mean)


class Counting(Block):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Late(Block):
    """Reads and writes once it is told to."""

    is_on = False

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        if Late.is_on:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * (1 + self.mean)


class LateCounting(Block):
    """Counts once it is told to."""

    is_on = False

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        if LateCounting.is_on:
            self.calls += 1
        return x


OF_ALL = torch.zeros(WIDTH)


class Sharing(Block):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * (1 + OF_ALL)
        OF_ALL.add_(x.detach().mean(0), alpha=0.01)
        return scaled


class Breaking(Block):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class Dropped(Reading):
    """A layer that is left out now and then."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, scale=scale)


class Still(Block):
    """Draws nothing, so that it comes to the same however a window is cut."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)  # type: ignore[no-any-return]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes of what grows with the samples and is saved for a backward."""
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (4,):
            found.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def after_the_first(counts: list[int]) -> Callable[[Any], None]:
    """Return a callback that forgets what the first window counted, in which forwards are compared as well."""
    return lambda record: counts.clear() if getattr(record, "step", None) == 1 else None


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, 1, generator=generator)


def compiled(model: Stack, how: str) -> Any:
    if how == "wrapped":
        return torch.compile(model, backend=BACKEND)
    if how == "in place":
        model.compile(backend=BACKEND)
    for i, block in enumerate(model.blocks):
        if how == "blocks":
            model.blocks[i] = torch.compile(block, backend=BACKEND)  # type: ignore[assignment]
        elif how == "blocks in place":
            block.compile(backend=BACKEND)
    return model


def step(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def fit(memory_saving: Any, kind: Callable[[], nn.Module] = Block, how: str = "wrapped", **options: Any) -> FitResult:
    torch.compiler.reset()
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "effective_batch": 8, "micro_batch": 4, "steps": 4, "optimizer": lambda p: torch.optim.SGD(p, lr=0.05),
        "training_step": step, "verify": False, **options
    }  # fmt: skip
    return autoaccum.fit(
        compiled(Stack(kind), how), data(), device="cpu", progress=False, cache=False, memory_saving=memory_saving,
        **given,
    )  # fmt: skip


def of(result: Any, kind: type) -> list[Any]:
    return [event for event in result.events if isinstance(event, kind)]


WAYS = ["wrapped", "in place", "blocks", "blocks in place"]


class TestTheSameBits:
    @pytest.mark.parametrize("how", WAYS)
    def test_with_less_saved_and_compared_once(self, how: str) -> None:
        with counted() as plainly:
            plain = fit("off", how=how, callbacks=[after_the_first(plainly)])
        with counted() as saved:
            found = fit("checkpoint", how=how, callbacks=[after_the_first(saved)])
        assert same(state_of(found), state_of(plain))
        assert [report.loss for report in found.history] == [report.loss for report in plain.history]
        assert 0 < sum(saved) < 0.5 * sum(plainly)
        (change,) = of(found, MemorySaving)
        assert change.blocks == 4
        (measured,) = of(found, Recomputed)
        assert (measured.step, measured.saving, measured.blocks) == (1, change.new, 4)
        windows = [(told.step, told.compilations) for told in of(found, Compiled)]
        assert windows == [(told.step, told.compilations) for told in of(plain, Compiled)]

    @pytest.mark.filterwarnings("ignore:The model holds 4 BatchNorm")
    @pytest.mark.parametrize("how", ["wrapped", "blocks"])
    def test_of_batch_norm_which_does_not_read_what_it_writes(self, how: str) -> None:
        with counted() as plainly:
            plain = fit("off", Normed, how, callbacks=[after_the_first(plainly)])
        with counted() as saved:
            found = fit("checkpoint", Normed, how, callbacks=[after_the_first(saved)])
        assert same(state_of(found), state_of(plain))
        assert 0 < sum(saved) < 0.5 * sum(plainly)
        assert of(found, Recomputed)

    def test_of_blocks_that_hold_a_tensor_of_inference_mode(self) -> None:
        class Holding(Block):
            def __init__(self) -> None:
                super().__init__()
                with torch.inference_mode():
                    self.cached = torch.ones(WIDTH)

        found = fit("checkpoint", Holding)
        assert same(state_of(found), state_of(fit("off", Holding)))
        assert of(found, MemorySaving)[-1].new != "off"

    def test_of_what_nobody_finds(self) -> None:
        def run(memory_saving: Any) -> FitResult:
            torch.compiler.reset()
            torch.manual_seed(0)
            model = Stack()
            kept = iter([torch.compile(model, backend=BACKEND)])
            inner = next(kept)
            del kept
            hidden = type("Hidden", (), {"__slots__": ("model",)})()
            hidden.model = inner
            return autoaccum.fit(
                model, data(), effective_batch=8, micro_batch=4, steps=3, verify=False, device="cpu", progress=False,
                cache=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), memory_saving=memory_saving,
                training_step=lambda _, batch: F.mse_loss(hidden.model(batch[0]), batch[1]),
            )  # fmt: skip

        plain, found = run("off"), run("checkpoint")
        assert of(plain, Compiled)
        assert same(state_of(found), state_of(plain))
        assert [measured.step for measured in of(found, Recomputed)] == [1]

    def test_beside_a_block_that_holds_something_compiled(self) -> None:
        def run(memory_saving: Any) -> FitResult:
            torch.compiler.reset()
            torch.manual_seed(0)
            model = Stack()
            model.blocks[0].up.compile(backend=BACKEND)
            return autoaccum.fit(
                model, data(), effective_batch=8, micro_batch=4, steps=3, loss_fn=F.mse_loss, device="cpu", cache=False,
                progress=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), memory_saving=memory_saving,
            )  # fmt: skip

        plain, found = run("off"), run("checkpoint")
        assert same(state_of(found), state_of(plain))
        assert of(found, MemorySaving)[0].blocks == 3
        assert [measured.step for measured in of(found, Recomputed)] == [1]

    @pytest.mark.parametrize("number", [1, 2, 6])
    def test_of_a_window_that_ran_out_of_memory(self, number: int) -> None:
        def run(fails_at: int | None) -> FitResult:
            forwards = itertools.count(1)

            def step(model: Any, batch: Any) -> torch.Tensor:
                loss = F.mse_loss(model(batch[0]), batch[1])
                if next(forwards) == fails_at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
                return loss

            return fit("checkpoint", Still, training_step=step)

        plain, found = run(None), run(number)
        assert of(found, OutOfMemory)
        assert sum(report.replays for report in found.history) > 0
        assert len(of(found, MemorySaving)) == 1
        for ours, wanted in zip(state_of(found), state_of(plain), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)

    def test_of_a_run_that_is_resumed(self, tmp_path: Path) -> None:
        whole = fit("checkpoint", steps=4)
        fit("checkpoint", steps=2, run_dir=tmp_path)
        found = fit("checkpoint", steps=4, run_dir=tmp_path, resume=True)
        assert same(state_of(found), state_of(whole))
        assert [measured.step for measured in of(found, Recomputed)] == [1]  # what was measured before stays so

    def test_of_layers_that_are_dropped_in_a_model_that_is_not_compiled(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            x = batch[0]
            for i, block in enumerate(model.blocks):
                if i or model.blocks[1].calls % 3:
                    x = block(x)
            return F.mse_loss(model.head(x), batch[1])

        plain = fit("off", Dropped, "not at all", training_step=step)
        found = fit("checkpoint", Dropped, "not at all", training_step=step)
        assert same(state_of(found), state_of(plain))
        assert len(of(found, MemorySaving)) == 1
        assert of(found, Recomputed)


@pytest.mark.filterwarnings("ignore:Something that the loss calls was compiled anew")
@pytest.mark.filterwarnings("ignore:memory_saving=")
class TestRefused:
    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            (Writing, "mean is written to in a forward that is compiled"),
            (Reading, "mean is written to in a forward that is compiled"),
            (HiddenReading, "mean is written to in a forward that is compiled"),
            (Last, "mean is written to in a forward that is compiled"),
            (OfSeveral, "mean is written to in a forward that is compiled"),
            (Counting, "does not compile its forward as a whole"),
            (Breaking, "does not compile its forward as a whole"),
        ],
    )
    @pytest.mark.parametrize("how", ["wrapped", "blocks"])
    def test_with_the_class_and_the_reason(self, kind: Any, why: str, how: str) -> None:
        plain = fit("off", kind, how)
        with pytest.warns(AutoaccumWarning, match="is computed twice in this run"):
            found = fit("checkpoint", kind, how)
        assert same(state_of(found), state_of(plain))
        told = [notice for notice in of(found, Notice) if kind.__name__ in notice.consequence]
        assert len(told) == 1
        assert why in told[0].cause
        assert of(found, MemorySaving)[-1].new == "off"
        assert not of(found, Recomputed)

    @pytest.mark.parametrize("how", ["wrapped", "blocks in place"])
    def test_in_the_window_in_which_it_shows(self, how: str) -> None:
        def late(record: Any) -> None:
            Late.is_on = Late.is_on or getattr(record, "step", 0) == 2

        def run(memory_saving: Any) -> FitResult:
            Late.is_on = False
            return fit(memory_saving, Late, how, callbacks=[late], steps=5)

        plain = run("off")
        with pytest.warns(AutoaccumWarning, match="No forward of Late is computed twice in this run"):
            found = run("checkpoint")
        assert same(state_of(found), state_of(plain))
        assert of(found, MemorySaving)[-1].step == 3

    def test_when_it_is_compiled_after_it_was_measured(self, tmp_path: Path) -> None:
        plain = fit("off", Reading, "not at all", steps=4)
        fit("checkpoint", Reading, "not at all", steps=2, run_dir=tmp_path)
        with pytest.warns(AutoaccumWarning, match="No forward of Reading is computed twice in this run"):
            found = fit("checkpoint", Reading, "in place", steps=4, run_dir=tmp_path, resume=True)
        assert same(state_of(found), state_of(plain))

    def test_what_reads_a_tensor_that_another_block_writes(self) -> None:
        with pytest.warns(AutoaccumWarning, match="Sharing: computed again, its forward gives another gradient"):
            found = fit("checkpoint", Sharing)
        assert of(found, MemorySaving)[-1].new == "off"

    def test_what_the_compiler_refuses_later(self) -> None:
        def late(record: Any) -> None:
            LateCounting.is_on = LateCounting.is_on or getattr(record, "step", 0) == 2

        def run(memory_saving: Any) -> FitResult:
            LateCounting.is_on = False
            torch.compiler.reset()
            torch.manual_seed(0)
            model = torch.compile(Stack(LateCounting), backend=BACKEND, fullgraph=True)
            return autoaccum.fit(
                model, data(), effective_batch=8, micro_batch=4, steps=4, verify=False, device="cpu", progress=False,
                cache=False, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), memory_saving=memory_saving,
                loss_fn=F.mse_loss, callbacks=[late],
            )  # fmt: skip

        plain = run("off")
        with pytest.warns(AutoaccumWarning, match="is computed twice in this run"):
            found = run("checkpoint")
        assert same(state_of(found), state_of(plain))

    def test_what_would_go_to_the_host(self) -> None:
        with pytest.raises(ArgumentError, match="compiled code decides by itself what it keeps"):
            fit("offload")


def test_without_memory_to_compare_in_that_is_said() -> None:
    eager = itertools.count(1)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        # What is compiled needs less memory than what is not.
        if torch._dynamo.eval_frame._stance.stance == "force_eager" and next(eager):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return loss

    plain = fit("off")
    with pytest.warns(AutoaccumWarning, match="there was no memory to compare"):
        found = fit("checkpoint", training_step=step)
    assert same(state_of(found), state_of(plain))
    assert next(eager) > 1
    assert [change.new for change in of(found, MemorySaving)] == ["checkpoint, every Block"]
    assert not of(found, Recomputed)
