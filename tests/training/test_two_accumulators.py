"""Two Accumulators over modules that both use, as those of a GAN: neither disturbs the other's steps."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoaccum import errors
from autoaccum.events import Notice, OutOfMemory, Verified
from autoaccum.testing import oom_at
from tests.devices import there
from tests.faults import Operations, strides
from tests.models import relative_error

EXAMPLE = Path(__file__).parents[2] / "examples" / "gan.py"


@pytest.fixture(scope="module")
def gan() -> Any:
    spec = importlib.util.spec_from_file_location("gan", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def networks(gan: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return there(gan.make_generator().double()), there(gan.make_discriminator().double())


def draws(gan: Any, steps: int = 3, batch: int = 22) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    noise = [torch.randn(batch, gan.NOISE, dtype=torch.float64) for _ in range(2 * steps)]
    return [there((gan.real_points(batch).double(), noise[2 * step], noise[2 * step + 1])) for step in range(steps)]


def by_hand(gan: Any, clip_norm: float | None = None) -> list[torch.Tensor]:
    """The loop of whole batches that a person writes: each optimizer clears its own gradients."""
    generator, discriminator = networks(gan)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.99)) for m in (discriminator, generator)]
    for real, first, second in draws(gan):
        for model, optimizer in zip((discriminator, generator), optimizers, strict=True):
            optimizer.zero_grad()
            if model is discriminator:
                made = generator(first).detach()
                loss = F.softplus(-model(real)).mean() + F.softplus(model(made)).mean()
            else:
                loss = F.softplus(-discriminator(model(second))).mean()
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return [p.detach().clone() for p in (*discriminator.parameters(), *generator.parameters())]


Sizes = list[tuple[int, ...]]


def by_us(
    gan: Any, micro_batches: tuple[Any, Any], around: Any = None, **options: Any
) -> tuple[list[torch.Tensor], tuple[Any, Any], tuple[Sizes, Sizes]]:
    generator, discriminator = networks(gan)
    pairs = [gan.make_accumulators(generator, discriminator, micro_batch=m, **options) for m in micro_batches]
    first, second = pairs[0][0], pairs[1][1]
    sizes: tuple[Sizes, Sizes] = ([], [])
    drawn = draws(gan)
    with nullcontext() if around is None else around:
        for real, noise, other in drawn:
            first.step((real, noise))
            sizes[0].append(first.micro_batches)
            second.step(other)
            sizes[1].append(second.micro_batches)
    found = [p.detach().clone() for p in (*discriminator.parameters(), *generator.parameters())]
    return found, (first, second), sizes


@pytest.mark.device(every=4)
@pytest.mark.parametrize("clip_norm", [None, 1e-2])
@pytest.mark.parametrize("micro_batches", [(22, 22), (5, 22), (22, 3), (1, 1), ("auto", "auto")])
def test_both_are_exact(gan: Any, micro_batches: tuple[Any, Any], clip_norm: float | None) -> None:
    """The generator's step leaves a gradient in the discriminator: neither its next step nor a norm is of that."""
    found, accumulators, _ = by_us(gan, micro_batches, clip_norm=clip_norm)
    for p, q in zip(found, by_hand(gan, clip_norm), strict=True):
        assert relative_error(p, q) < 1e-9
    for accumulator, micro_batch in zip(accumulators, micro_batches, strict=True):
        assert not [event for event in accumulator.events if isinstance(event, Notice)]
        verified = [event.error < 1e-12 for event in accumulator.events if isinstance(event, Verified)]
        assert (verified[:1] == [True]) is (micro_batch != 22)


@strides(23)
def test_memory_that_runs_out_in_either_leaves_no_trace_in_the_other(gan: Any, stride: int) -> None:
    """Law 2, for each of the two: bit for bit as with the smaller plan from that window on."""
    operations = Operations()
    by_us(gan, (8, 12), operations, verify=False)
    expected: dict[tuple[int, int], list[torch.Tensor]] = {}
    hits = [0, 0]
    for place in operations.every(stride):
        try:
            found, accumulators, sizes = by_us(gan, (8, 12), oom_at(place), verify=False)
        except errors.OptimizerOutOfMemoryError:
            continue
        ran_out = [
            any(isinstance(event, OutOfMemory) and event.phase == "training" for event in accumulator.events)
            for accumulator in accumulators
        ]
        # In the first window of one of them; what is cut otherwise from a later one on has no plain run beside it.
        if any(ran_out) and all(len(set(cuts)) == 1 for cuts in sizes):
            largest = max(sizes[0][0]), max(sizes[1][0])
            if largest not in expected:
                expected[largest] = by_us(gan, largest, verify=False)[0]
            assert all(torch.equal(p, q) for p, q in zip(found, expected[largest], strict=True)), place
            hits = [hit + ran for hit, ran in zip(hits, ran_out, strict=True)]
    assert min(hits) * stride > 27


def test_the_example_learns(gan: Any) -> None:
    generator, losses = gan.train(60, batch=64, max_micro_batch=24)
    assert len(losses) == 60
    assert gan.share_near_blobs(generator) > 3 * gan.share_near_blobs(gan.make_generator())
