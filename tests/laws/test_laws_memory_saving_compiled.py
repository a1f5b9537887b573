"""Law 1 and law 8 where blocks of compiled models are computed twice: uncompiled, with the bits of an uncompiled run."""

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
from autoaccum.events import Compiled, MemorySaving, OutOfMemory, Recomputed
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


class Dropped(Block):
    """A layer that is left out now and then."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, scale=scale)


class Still(Block):
    """Draws nothing, so that it comes to the same however a window is cut."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
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


@pytest.mark.filterwarnings("ignore:memory_saving recomputes blocks")
class TestTheSameBits:
    @pytest.mark.parametrize("how", WAYS)
    def test_with_less_saved_and_compared_once(self, how: str) -> None:
        with counted() as plainly:
            plain = fit("off", how="not at all", callbacks=[after_the_first(plainly)])
        with counted() as saved:
            found = fit("checkpoint", how=how, callbacks=[after_the_first(saved)])
        assert same(state_of(found), state_of(plain))
        assert [report.loss for report in found.history] == [report.loss for report in plain.history]
        assert 0 < sum(saved) < 0.5 * sum(plainly)
        (change,) = of(found, MemorySaving)
        assert change.blocks == 3
        (measured,) = of(found, Recomputed)
        assert (measured.step, measured.saving, measured.blocks) == (1, change.new, 3)
        assert not of(found, Compiled)

    def test_of_a_run_that_is_resumed(self, tmp_path: Path) -> None:
        whole = fit("checkpoint", steps=4)
        fit("checkpoint", steps=2, run_dir=tmp_path)
        found = fit("checkpoint", steps=4, run_dir=tmp_path, resume=True)
        assert same(state_of(found), state_of(whole))

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

        found, plain = run("checkpoint"), fit("off", how="not at all", steps=3)
        assert not of(found, Compiled)
        assert same(state_of(found), state_of(plain))
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


def test_that_it_runs_uncompiled_is_said() -> None:
    with pytest.warns(AutoaccumWarning, match="From here on the run is not compiled"):
        fit("checkpoint")


def test_nothing_of_compiled_code_goes_to_the_host() -> None:
    with pytest.raises(ArgumentError, match="compiled code decides by itself what it keeps"):
        fit("offload")
