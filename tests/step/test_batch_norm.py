"""Which layers are BatchNorm, and how few samples they allow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoaccum.step.module_state import count_batch_norms, smallest_micro_batch


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    ],
)
def test_every_batch_norm(layer: nn.Module) -> None:
    assert count_batch_norms([layer]) == 1
    assert smallest_micro_batch([layer]) == 2


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Dropout(),
        nn.Linear(4, 4),
    ],
)
def test_no_other_layer(layer: nn.Module) -> None:
    """Their outputs for a sample are the same whatever stands beside it."""
    assert count_batch_norms([layer]) == 0
    assert smallest_micro_batch([layer]) == 1


def test_only_in_training_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert count_batch_norms([model]) == 2
    model[0].eval()
    assert count_batch_norms([model]) == 1
    model.eval()
    assert (count_batch_norms([model]), smallest_micro_batch([model])) == (0, 1)


def test_over_all_modules_and_shared_ones_once() -> None:
    shared = nn.BatchNorm1d(4)
    assert count_batch_norms([nn.Sequential(shared, nn.ReLU(), shared)]) == 1
    assert count_batch_norms([nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4))]) == 2
    assert (count_batch_norms([]), smallest_micro_batch([])) == (0, 1)


def test_what_is_counted_does_couple() -> None:
    """See the reason for it all: one sample more, and another sample's output changes."""
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for layer in (nn.BatchNorm1d(4), nn.LayerNorm(4), nn.BatchNorm1d(4).eval()):
        coupled = not torch.allclose(layer(inputs)[:3], layer(inputs[:3]))
        assert coupled is (count_batch_norms([layer]) > 0)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(4)(inputs[:1])


def test_a_batch_norm_without_running_statistics_couples_in_eval_mode() -> None:
    layer = nn.BatchNorm1d(4, track_running_stats=False).eval()
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(layer(inputs)[:3], layer(inputs[:3]))
    assert count_batch_norms([layer]) == 1
