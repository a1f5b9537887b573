"""A LightningModule as it is, in one line more: what Lightning would have computed, in micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import MODULES, Classifier, farthest, module_of, run

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning")),  # Lightning's own
]


class TestExactness:
    @pytest.mark.parametrize("kind", MODULES)
    def test_gradients_of_ten_windows_are_those_of_the_big_batch(self, kind: type) -> None:
        # The data end in a short window; micro-batches of 5 divide none of them.
        expected = run(module_of(kind, torch.float32), 16, max_steps=10)
        callback = AutoAccum(effective_batch=16, micro_batch=5)
        found = run(module_of(kind, torch.float32), 4, callback, max_steps=10)
        assert len(callback.micro_batches) > 1
        assert len(found.gradients) == 10
        assert farthest(found.gradients, expected.gradients) < 1e-5

    @pytest.mark.parametrize("kind", MODULES)
    def test_losses_and_logs_of_twenty_steps_are_those_of_the_big_batch(self, kind: type) -> None:
        expected = run(module_of(kind), 16)
        found = run(module_of(kind), 4, AutoAccum(effective_batch=16, micro_batch=5))
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.rates == expected.rates
        for logged, stock in zip(found.logged, expected.logged, strict=True):
            assert logged == pytest.approx(stock, rel=1e-10)
