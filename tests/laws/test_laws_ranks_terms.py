"""Law 4 for losses of several terms: joined, or weighed by what the windows of all ranks count of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

from tests.distributed.launching import launch
from tests.faults import sizes, strides
from tests.laws.test_laws_ranks import Trained, at_every_operation, fit, net
from tests.processes import in_turn

pytestmark = in_turn
SAMPLES, WINDOW, EPOCHS = 101, 23, 6
"""Both are primes; 30 windows, each epoch's last one with nine samples."""


def data(samples: int = SAMPLES) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (samples, 3), generator=generator)
    labels[torch.rand(samples, 3, generator=generator) < 0.4] = -100
    labels[::3] = -100
    rare = torch.full((samples,), -100)
    rare[::29] = 2
    return torch.randn(samples, 3, 6, generator=generator, dtype=torch.float64), labels, rare


def _outputs(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = model(batch[0])
    return outputs, cross_entropy(outputs.flatten(0, 1), batch[1].flatten()), outputs.mean(1)


def two_means(model: Any, batch: Any) -> torch.Tensor:
    _, words, pooled = _outputs(model, batch)
    return words + 0.3 * mse_loss(pooled, torch.ones_like(pooled))


def masked_and_plain(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    mask = batch[1] != -100
    each = cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), reduction="none").reshape(mask.shape)
    return (each * mask).sum() / mask.sum() + outputs.square().mean()


def a_mean_and_a_sum(model: Any, batch: Any) -> torch.Tensor:
    _, words, pooled = _outputs(model, batch)
    return words + 0.01 * (pooled - 1).square().sum()


def by_name(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    _, words, pooled = _outputs(model, batch)
    return {"words": words, "pooled": 0.3 * mse_loss(pooled, torch.ones_like(pooled))}


def with_a_penalty(model: Any, batch: Any) -> torch.Tensor:
    return two_means(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def with_a_rare_one(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    outputs, words, pooled = _outputs(model, batch)
    found = {"words": words, "outputs": outputs.square().mean()}
    if (batch[2] != -100).any():
        found["rare"] = 0.5 * cross_entropy(pooled, batch[2])
    return found


def rare_by_name(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    _, words, pooled = _outputs(model, batch)
    return {"rare": cross_entropy(pooled, batch[2]), "words": words}


COUNTS: dict[str, Any] = {"words": lambda batch: (batch[1] != -100).sum(), "pooled": lambda batch: len(batch[0])}
RUNS: dict[str, dict[str, Any]] = {
    "two means": {"training_step": two_means},
    "a mask and a mean": {"training_step": masked_and_plain, "clip_norm": 0.5},
    "a mean and a sum": {"training_step": a_mean_and_a_sum},
    "by name": {"training_step": by_name},
    "counted by name": {"training_step": by_name, "num_items": COUNTS},
    "counted by one function": {"training_step": by_name, "num_items": lambda b: {n: f(b) for n, f in COUNTS.items()}},
    "a penalty": {"training_step": with_a_penalty},
    "a term that most lack": {"training_step": with_a_rare_one},
    "a term that counts nothing in most": {
        "training_step": rare_by_name,
        "num_items": {"rare": lambda batch: (batch[2] != -100).sum(), "words": COUNTS["words"]},
    },
    "unmeasured": {"training_step": by_name, "num_items": COUNTS, "verify": False},
    "sizes that are found": {"training_step": two_means, "micro_batch": "auto", "effective_batch": 40, "epochs": 12},
    "the noise is measured": {"training_step": by_name, "noise_scale": True, "num_items": COUNTS},
}  # fmt: skip


def all_runs() -> dict[str, Trained]:
    found = {}
    for name, options in RUNS.items():
        found[name] = fit(**{"model": net(), "data": data(), "epochs": EPOCHS, **options})
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    return launch(all_runs, 1)[0]  # type: ignore[no-any-return]


@sizes(2)
def test_windows_of_several_terms_are_those_of_one_rank(size: int, alone: dict[str, Trained]) -> None:
    found = launch(all_runs, size)
    for name, one in alone.items():
        of_ranks = [of_rank[name] for of_rank in found]
        assert all(torch.equal(of_ranks[0].weights, each.weights) for each in of_ranks), name
        assert of_ranks[0].losses == of_ranks[-1].losses
        torch.testing.assert_close(of_ranks[0].weights, one.weights, rtol=1e-10, atol=1e-12)
        assert len(one.losses) >= 30
        assert of_ranks[0].losses == pytest.approx(one.losses, rel=1e-10), name


def oom_with_terms(of_rank: int, stride: int, kind: str) -> tuple[int, list[float]]:
    # With the whole of a first epoch, so that it is known in the window of the fault what is to be foretold.
    options = {"several": {"training_step": two_means}, "named": {"training_step": with_a_rare_one}}[kind]
    return at_every_operation(of_rank, stride, **{"data": data(24), "epochs": 2, **options})


@strides(307)
@pytest.mark.parametrize(("of_rank", "kind"), [(0, "several"), (1, "named")])
def test_an_oom_at_every_operation_of_a_rank_leaves_terms_as_they_are(of_rank: int, kind: str, stride: int) -> None:
    for operations, off in launch(oom_with_terms, 2, of_rank, stride, kind):
        assert operations > 150
        assert max(off) < 1e-12
