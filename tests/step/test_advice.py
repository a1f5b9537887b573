"""What is advised where one sample does not fit takes less memory; what is done already is not advised."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.errors import NothingFitsError
from autoaccum.memory.waiting import AT_ONCE
from autoaccum.step.memory_saving import advise
from autoaccum.testing import simulated_memory
from tests.models import classes

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


def names(error: NothingFitsError) -> list[str]:
    return [advice.name for advice in error.advice]


CURES: dict[str, dict[str, Any]] = {
    "activation checkpointing": {"checkpointed": True},
    "bf16": {"precision": "bf16"},
    "Adafactor": {"optimizer": torch.optim.Adafactor},
    "SGD": {"optimizer": sgd},
}


def test_what_is_advised_takes_less_memory() -> None:
    error = refused(peak() - 1)
    assert names(error) == list(CURES)
    assert str(error).splitlines()[1:] == [f"  {advice}" for advice in error.advice]
    for name in CURES:
        assert peak(name) < peak(), name


def test_what_is_done_already_is_not_advised() -> None:
    everything = {"precision": "bf16", "optimizer": sgd}
    below = int(0.9 * fit(UNLIMITED, checkpointed=True, **everything))
    assert names(refused(below, **everything)) == ["activation checkpointing"]
    assert names(refused(below, **everything, memory_saving="auto")) == []
    assert names(refused(peak("Adafactor") - 1, **CURES["Adafactor"])) == ["activation checkpointing", "bf16"]


def test_probe_and_accumulator_advise_what_can_be_written_there() -> None:
    samples, model = data(), Stack(False)
    between = (peak() + peak("activation checkpointing")) // 2
    with simulated_memory(between), pytest.raises(NothingFitsError, match="probe: ") as probed:
        autoaccum.probe(model, samples, loss_fn=F.mse_loss, optimizer=adamw, device="cpu")
    with simulated_memory(between), pytest.raises(NothingFitsError, match="training: ") as stepped:
        autoaccum.Accumulator(model, adamw(model.parameters()), loss_fn=F.mse_loss, memory_saving="off").step(samples)
    assert names(probed.value) == names(stepped.value) == list(CURES)
    assert stepped.value.advice[0].how == 'memory_saving="auto"'
    by_hand = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each Block"
    assert probed.value.advice[0].how == by_hand


def test_models_of_hugging_face_have_a_method_for_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, intermediate_size=172
    )
    model = transformers.LlamaForCausalLM(config)
    (advice,) = advise([model], sgd(model.parameters()), "bf16", torch.device("cpu"))
    assert advice.name == "activation checkpointing"
    assert callable(getattr(model, advice.how.removeprefix("model.").removesuffix("()")))


def test_it_runs_nothing_and_keeps_the_cause() -> None:
    calls: list[int] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))
    with simulated_memory("1MiB"), pytest.raises(NothingFitsError) as caught:
        autoaccum.Accumulator(model, adamw(model.parameters()), training_step=step, patience=0).step(classes(1))
    assert len(calls) == 1 + AT_ONCE
    assert names(caught.value) == ["bf16", "Adafactor", "SGD"]
    assert str(caught.value.__cause__) == "CUDA out of memory."
    assert caught.value.__cause__.__traceback__ is caught.value.__context__ is None


def test_a_state_of_sparse_tensors_is_counted() -> None:
    """SGD's momentum of sparse gradients is sparse, and knows no bytes of its own."""
    model = nn.Embedding(50, 6, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(50)).sum().backward()
    optimizer.step()
    names = [one.name for one in advise([model], optimizer, "fp32", torch.device("cpu"))]
    assert names[-2:] == ["Adafactor", "SGD"]
