"""What is said to make one sample fit does; and asking leaves no trace and hides no error."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.errors import Advice, NothingFitsError
from autoaccum.memory.waiting import AT_ONCE
from autoaccum.testing import simulated_memory
from tests.models import classes, noisy

WIDTH, LENGTH = 64, 256
UNLIMITED = 1 << 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, LENGTH, WIDTH, generator=generator), torch.randn(2, LENGTH, 1, generator=generator)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)  # its step needs no memory of its own


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def fit(limit: int, *, checkpointed: bool = False, **options: Any) -> int:
    """Train, and return the peak."""
    torch.manual_seed(0)
    samples, model = data(), Stack(checkpointed)
    with simulated_memory(limit) as device:
        autoaccum.fit(
            model,
            samples,
            **{
                "effective_batch": 2,
                "micro_batch": 1,
                "loss_fn": F.mse_loss,
                "optimizer": adamw,
                "device": "cpu",
                "progress": False,
                "memory_saving": "off",
                **options,
            },
        )
    return device.peak


@cache
def peak(cure: str | None = None) -> int:
    """With all the memory there could be."""
    return fit(UNLIMITED, **CURES.get(cure or "", {}))


def refused(limit: int, **options: Any) -> NothingFitsError:
    with pytest.raises(NothingFitsError) as caught:
        fit(limit, **options)
    return caught.value


def by_name(error: NothingFitsError) -> dict[str, Advice]:
    return {advice.name: advice for advice in error.advice}


CURES: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"checkpointed": True},
    "bf16": {"precision": "bf16"},
    "SGD": {"optimizer": sgd},
    "Adafactor": {"optimizer": torch.optim.Adafactor},
    "all together": {"checkpointed": True, "precision": "bf16", "optimizer": sgd},
}


@pytest.mark.parametrize("name", ["activation checkpointing", "bf16", "SGD", "Adafactor"])
def test_what_is_said_to_fit_does_and_what_is_not_does_not(name: str) -> None:
    now, then = peak(), peak(name)
    between = (now + then) // 2
    advice = by_name(refused(between))[name]
    assert advice.fits
    assert fit(between, **CURES[name]) == then
    assert advice.needed_bytes == pytest.approx(then, rel=0.05)
    assert advice.saves_bytes == pytest.approx(now - then, rel=0.15)
    below = int(then * 0.93)
    assert not by_name(refused(below))[name].fits
    refused(below, **CURES[name])


def test_the_largest_saving_comes_first_and_all_together_is_said_only_when_nothing_else_is_enough() -> None:
    between = (peak() + peak("activation checkpointing")) // 2
    one = refused(between).advice
    assert one[0].name == "activation checkpointing"
    assert "all together" not in [a.name for a in one]
    assert [a.saves_bytes for a in one] == sorted((a.saves_bytes for a in one), reverse=True)
    limit = int(peak("activation checkpointing") * 0.9)
    error = refused(limit)
    *single, last = error.advice
    assert not any(a.fits for a in single)
    assert (last.name, last.fits) == ("all together", True)
    assert last.needed_bytes == pytest.approx(fit(limit, **CURES["all together"]), rel=0.1)
    assert str(error).splitlines()[-1].startswith("  all together: saves ")


def test_even_all_together_may_not_be_enough() -> None:
    least = peak("all together")
    error = refused(int(least * 0.9), optimizer=sgd)
    assert error.advice
    assert not any(a.fits for a in error.advice)


def test_what_is_done_already_is_not_advised() -> None:
    least = peak("all together")
    assert refused(int(least * 0.9), **CURES["all together"]).advice == ()
    assert "SGD" not in by_name(refused(int(least * 0.9), optimizer=sgd))
    assert "save_on_cpu" not in by_name(refused(int(least * 0.9), optimizer=sgd)), "it is there already"


def test_a_limit_that_nobody_enforces() -> None:
    now, then = peak(), peak("activation checkpointing")
    error = refused(UNLIMITED, memory_limit=(now + then) // 2, micro_batch="auto")
    assert by_name(error)["activation checkpointing"].needed_bytes == pytest.approx(then, rel=0.05)


def test_memory_that_no_cure_makes_smaller_is_in_all_of_them() -> None:
    """A workspace, which is not saved, and so not on the tape."""
    workspace = 16 << 20

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]), batch[1]) + 0 * torch.zeros(workspace // 4).sum()

    options = {"micro_batch": "auto", "loss_fn": None, "training_step": step}
    error = refused(UNLIMITED, memory_limit=workspace, **options)
    assert error.peak_bytes is not None
    assert [a.needed_bytes for a in error.advice] == [error.peak_bytes - a.saves_bytes for a in error.advice]
    assert len(error.advice) > 3
    assert not any(a.fits for a in error.advice)


def test_probe_and_accumulator_say_the_same() -> None:
    between = (peak() + peak("activation checkpointing")) // 2
    fitted = by_name(refused(between))
    samples, model = data(), Stack(False)
    with simulated_memory(between), pytest.raises(NothingFitsError, match="probe: ") as probed:
        autoaccum.probe(model, samples, loss_fn=F.mse_loss, optimizer=adamw, device="cpu")
    with simulated_memory(between), pytest.raises(NothingFitsError, match="training: ") as stepped:
        autoaccum.Accumulator(model, adamw(model.parameters()), loss_fn=F.mse_loss, memory_saving="off").step(samples)
    for error in (probed.value, stepped.value):
        assert list(by_name(error)) == list(fitted)
        for name, advice in by_name(error).items():
            assert advice.needed_bytes == pytest.approx(fitted[name].needed_bytes, rel=0.02)


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    enable = ""

    def train(limit: int, checkpointed: bool = False) -> int:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64, num_hidden_layers=6, num_attention_heads=4, vocab_size=500, intermediate_size=172
        )
        model = transformers.LlamaForCausalLM(config)
        model.config.use_cache = False
        nonlocal enable
        enable = "activation_checkpointing_enable"
        if not hasattr(model, enable):
            enable = "gradient_checkpointing_enable"
        if checkpointed:
            getattr(model, enable)()
        ids = torch.randint(0, 500, (4, 128))
        with simulated_memory(limit) as device:
            autoaccum.fit(
                model,
                {"input_ids": ids, "labels": ids.clone()},
                effective_batch=4,
                micro_batch=1,
                optimizer=adamw,
                device="cpu",
                progress=False,
                memory_saving="off",
            )
        return device.peak

    now, then = train(UNLIMITED), train(UNLIMITED, checkpointed=True)
    with pytest.raises(NothingFitsError) as caught:
        train((now + then) // 2)
    advice = by_name(caught.value)["activation checkpointing"]
    assert (advice.fits, advice.how) == (True, 'memory_saving="auto"')
    assert advice.needed_bytes == pytest.approx(then, rel=0.05)


def failing(then: Callable[[], None]) -> Callable[[Any, Any], torch.Tensor]:
    """A training step that one sample is too much for; and what happens when it is asked once more."""
    calls = 0

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if calls <= 1 + AT_ONCE:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        then()
        return loss

    return step


def raising(error: Exception) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


def refused_by(step: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    with simulated_memory("1MiB"):
        options = {"patience": 0, "memory_saving": "off"}
        made = autoaccum.Accumulator(model, optimizer(model.parameters()), training_step=step, **options)
        made.step(classes(1))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), ValueError("no"), autoaccum.StopTraining(), StopIteration()],
)
def test_what_goes_wrong_while_it_is_asked_hides_nothing(error: Exception) -> None:
    """Of the optimizer's state the bytes are known, and what is needed is not."""
    weights = 8 * 16 + 16 + 16 * 3 + 3
    with pytest.raises(NothingFitsError, match="whether that is enough is not known") as caught:
        refused_by(failing(raising(error)), adamw)
    first, second = caught.value.advice
    assert (first.name, second.name) == ("SGD", "Adafactor")
    steps = 4 * 4  # a number for each parameter
    assert first.saves_bytes == 2 * 4 * weights + steps
    assert first.saves_bytes - second.saves_bytes == 4 * (8 + 16 + 16 + 16 + 3 + 3)
    assert (first.needed_bytes, first.fits) == (None, False)
    with pytest.raises(NothingFitsError, match="or take an optimizer that keeps less state") as caught:
        refused_by(failing(raising(error)), sgd)
    assert caught.value.advice == ()
    assert str(caught.value.__cause__) == "CUDA out of memory."
    assert caught.value.__cause__.__traceback__ is caught.value.__context__ is None


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_it_leaves_no_trace() -> None:
    asked = []

    def draw() -> None:
        asked.append(torch.rand(1))
        model[0].calls = len(asked)

    model = noisy()
    optimizer, options = adamw(model.parameters()), {"patience": 0, "memory_saving": "off"}
    accumulator = autoaccum.Accumulator(model, optimizer, training_step=failing(draw), **options)
    before = [t.clone() for t in (*model.parameters(), *model.buffers())]
    state, names = torch.get_rng_state(), [set(vars(m)) for m in model.modules()]
    with pytest.raises(NothingFitsError):
        accumulator.step(classes(2))
    assert len(asked) == 2, "as it is, and in bf16"
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [set(vars(m)) for m in model.modules()] == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
