"""Samples that meet where a collate_fn mixes them, or where two tensors are broadcast to all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from autoaccum.verification.measurement import Measurement
from autoaccum.verification.mixing import broadcasts, mixes
from tests.models import classes
from tests.verification.making import DOUBLE, job_of, measurement_of


def broadcast(model: Any, batch: Any) -> torch.Tensor:
    """Outputs of one column beside targets without it."""
    return ((model(batch[0])[:, :1] - batch[1]) ** 2).mean()


def same_shape(model: Any, batch: Any) -> torch.Tensor:
    return ((model(batch[0])[:, :1] - batch[1][:, None]) ** 2).mean()


def compared(model: Any, batch: Any) -> torch.Tensor:
    """Labels that are compared with each other, and mean all pairs."""
    outputs, labels = model(batch[0]), batch[1]
    return ((outputs @ outputs.T) * (labels[:, None] == labels)).mean()


@pytest.mark.parametrize(("loss", "found"), [(broadcast, True), (same_shape, False), (compared, False)])
def test_a_column_beside_a_row_is_found(loss: Any, found: bool) -> None:
    with measurement_of(loss) as measurement:
        measurement.run_whole()
        assert broadcasts(measurement) is found


@pytest.mark.parametrize("mixed", [True, False])
def test_a_collate_fn_that_mixes_samples_is_found(mixed: bool) -> None:
    inputs, labels = classes(6, DOUBLE)

    def collate(samples: Any) -> Any:
        batch = default_collate(samples)
        order = torch.randperm(len(batch[0]))
        return [0.5 * batch[0] + 0.5 * batch[0][order] if mixed else batch[0] + torch.rand(1).double(), batch[1]]

    def plain(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    class Collated:
        num_samples, lengths = 6, None

        def samples(self, positions: Any) -> Any:
            return collate([(inputs[position], labels[position]) for position in positions])

        def micro_batch(self, start: int, size: int) -> Any:
            return self.samples(range(start, start + size))

    with Measurement(job_of(plain), Collated(), range(6)) as measurement:
        measurement.run_whole()
        assert mixes(measurement) is mixed
