"""What ``gpu.py`` trains, at the sizes of a card or of the stand-in, the loop by hand, and what the allocator says."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum.events import OutOfMemory, Planned, StepReport
from autoaccum.memory.oom import is_out_of_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from char_gpt import Block, loss_fn

MIB = 2**20


def device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None, "gpu.py loads the stand-in where there is no accelerator"
    return torch.device(found.type, 0)


def is_cuda() -> bool:
    return device().type == "cuda"


def is_small() -> bool:
    """Return whether sizes are those of the stand-in, whose work the host does."""
    return device().type == "standin"


class GPT(nn.Module):
    """GPT-2's shape: learned positions, its head tied to its embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, heads: int, checkpoints: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, 0.0) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight
        self.checkpoints = checkpoints

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, length) -> (samples, length, vocabulary)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def conv_net(depths: tuple[int, ...], width: int) -> nn.Module:
    """ResNet-50's shape for depths of 3, 4, 6 and 3 and a width of 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.AvgPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(Bottleneck(channels, width << stage, 2 if stage and not index else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model and its data."""

    model: Callable[[], nn.Module]
    """On the host, always with the same weights."""
    data: Callable[[int], tuple[Tensor, Tensor]]
    """So many samples, on the host."""
    loss_fn: Callable[[Any, Any], Tensor]
    effective_batch: int
    """More than fits below the share."""
    sizes: tuple[int, ...]
    """By hand: divisors of the effective batch, upwards."""
    share: float
    """Of the device: half of it is another contestant's."""
    precision: str = "bf16"


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def gpt(context: int | None = None, checkpoints: bool = False) -> Case:
    """GPT-2 (124 million parameters), or a toy of its kind."""
    small = is_small()
    vocabulary, longest = (97, 32) if small else (50304, 1024)
    length = longest if small else context or longest

    def data(samples: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    shape = (64, 2, 4) if small else (768, 12, 12)
    return Case(
        model=partial(_seeded, partial(GPT, vocabulary, longest, *shape, checkpoints)),
        data=data,
        loss_fn=loss_fn,
        effective_batch=192,
        sizes=(8, 12, 16, 24, 32, 48, 64, 96, 192),
        share=0.018 if small else 0.45,
    )


def images() -> Case:
    """ResNet-50 (26 million parameters), or a toy of its kind."""
    small = is_small()
    side, effective_batch = (48, 128) if small else (224, 1024)

    def data(samples: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, 3, side, side, generator=generator)
        return inputs, torch.randint(0, 1000, (samples,), generator=generator)

    shape = ((1, 1, 1, 1), 16) if small else ((3, 4, 6, 3), 64)
    return Case(
        model=partial(_seeded, partial(conv_net, *shape)),
        data=data,
        loss_fn=cross_entropy,
        effective_batch=effective_batch,
        sizes=tuple(effective_batch >> shift for shift in (5, 4, 3, 2, 1, 0)),
        share=0.02 if small else 0.45,
        precision="fp32" if small else "bf16",  # a host's convolutions in 16 bits take seconds
    )


def tiny_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def window_by_hand(
    case: Case, model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], size: int
) -> float:
    """Train on a window that lies on the device in micro-batches of one size; return its loss."""
    inputs, targets = batch
    optimizer.zero_grad()
    total = torch.zeros((), device=inputs.device)
    for start in range(0, len(inputs), size):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=case.precision == "bf16"):
            loss = case.loss_fn(model(inputs[start : start + size]), targets[start : start + size])
        loss = loss * (len(inputs[start : start + size]) / len(inputs))
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total.item()


def timed(work: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    started = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - started


def statistic(name: str) -> int:
    """Return one of the allocator's counters, by the name that CUDA has for it."""
    return int(torch.accelerator.memory_stats().get(name, 0))


@contextmanager
def fraction(share: float) -> Iterator[None]:
    """Let the allocator stop at a share of the device, as a user sets it by hand."""
    module = torch.get_device_module()
    torch.accelerator.empty_cache()
    module.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0)


def total_bytes() -> int:
    return int(torch.accelerator.get_memory_info()[1])


@dataclass(slots=True)
class Watched:
    """What a run did, looked at after each window."""

    history: list[StepReport] = field(default_factory=list)
    plans: list[Planned] = field(default_factory=list)
    ooms: int = 0
    frees: list[int] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)

    def __call__(self, record: object) -> None:
        if isinstance(record, Planned):
            self.plans.append(record)
        elif isinstance(record, OutOfMemory):
            self.ooms += 1
        elif isinstance(record, StepReport):
            self.history.append(record)
            self.frees.append(statistic("num_device_free"))
            self.retries.append(statistic("num_alloc_retries") - statistic("num_ooms"))

    @property
    def settled(self) -> int:
        """Windows until the last plan, and a few more: of the rest all are alike."""
        return min((self.plans[-1].step if self.plans else 0) + 3, len(self.history) // 2)

    def seconds(self) -> float:
        """Return the median of the settled windows."""
        return statistics.median(report.seconds for report in self.history[self.settled :])

    def error(self) -> float:
        """Return how far the prediction for the last plan was off; 0 where none was needed."""
        return abs(self.plans[-1].prediction_error or 0.0) if self.plans else 0.0

    def filled(self) -> float:
        """Return the largest peak of a settled window, as a share of its limit."""
        return max(report.peak_bytes / report.limit_bytes for report in self.history[self.settled :])


def train(case: Case, windows: int, effective_batch: int | None = None, **options: Any) -> tuple[Any, Watched]:
    """Train as a user does; return what is left of it, and what was seen on the way."""
    gc.collect()  # what is left of the run before: optimizers are parts of cycles
    watched = Watched()
    batch = effective_batch or case.effective_batch
    arguments: dict[str, Any] = {
        "effective_batch": batch, "loss_fn": case.loss_fn, "optimizer": adamw, "precision": case.precision,
        "steps": windows, "progress": False, "cache": False, **options,
    }  # fmt: skip
    arguments["callbacks"] = [watched, *arguments.get("callbacks", ())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of BatchNorm, whose statistics are those of micro-batches by hand too
        return autoaccum.fit(case.model(), case.data(2 * batch), **arguments), watched


def runs_out(work: Callable[[], object]) -> bool:
    """Return whether memory runs out."""
    try:
        work()
        return False
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()  # outside of the handler, whose frames hold tensors
    torch.accelerator.empty_cache()
    return True


def same(a: nn.Module, b: nn.Module) -> bool:
    """Return whether two models are equal to the bit."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


def furthest(a: nn.Module, b: nn.Module) -> float:
    """Return how far two models' parameters are apart, as a fraction of their norm."""
    first, second = (torch.cat([p.detach().double().cpu().flatten() for p in m.parameters()]) for m in (a, b))
    return float((first - second).norm() / first.norm())
