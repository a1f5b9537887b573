"""Steps that go on from an earlier batch, as truncated BPTT does, go on from no other micro-batch's samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from autoaccum.integrations.lightning import AutoAccum
from tests.integrations.lightning_runs import QUIET, Stock, module_of, run

pytestmark = [pytest.mark.integrations, *QUIET]


class Recurrent(Stock):
    """A recurrent net, of which those below carry a hidden state or not."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 1)
        self.hidden: Any = None

    def before(self, x: torch.Tensor) -> Any:
        """Return the hidden state to begin with."""
        return None if self.hidden is None else self.hidden.detach()

    def keep(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        outputs, hidden = self.net(x, self.before(x))
        self.keep(hidden)
        return mse_loss(self.head(outputs[:, -1]), y)


class Cut(Recurrent):
    """Takes as much of it as it needs, so that nothing fails."""

    def before(self, x: torch.Tensor) -> Any:
        fits = self.hidden is not None and self.hidden.shape[1] >= len(x)
        return self.hidden.detach()[:, : len(x)].contiguous() if fits else None


class InAList(Recurrent):
    """Has it in a list."""

    def before(self, x: torch.Tensor) -> Any:
        return self.hidden[0] if self.hidden else None

    def keep(self, hidden: torch.Tensor) -> None:
        if self.hidden is None:
            self.hidden = [hidden.detach()]
        self.hidden[0] = hidden.detach()


class InATuple(Recurrent):
    """Has it in a tuple, as an LSTM's is."""

    def before(self, x: torch.Tensor) -> Any:
        return self.hidden[1] if self.hidden else None

    def keep(self, hidden: torch.Tensor) -> None:
        self.hidden = ("h", hidden.detach())


class Kept(Recurrent):
    """Keeps it to be looked at, and reads nothing but what it has written itself."""

    def before(self, x: torch.Tensor) -> Any:
        self.hidden = torch.zeros(1, len(x), 6, dtype=x.dtype)
        return self.hidden


def data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(64, 5, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(x, torch.randn(64, 1, generator=drawn, dtype=torch.float64))


@pytest.mark.parametrize("kind", [Recurrent, InAList, InATuple])
def test_of_whole_batches_it_goes_on_from_batch_to_batch(kind: type) -> None:
    expected = run(module_of(kind), 16, data=data(), max_steps=4, shuffle=False)
    found = run(module_of(kind), 4, AutoAccum(16, micro_batch=16), data=data(), max_steps=4, shuffle=False)
    assert found.losses == expected.losses


def test_what_is_kept_and_not_read_is_none() -> None:
    expected = run(module_of(Kept), 16, data=data(), max_steps=6, shuffle=False)
    found = run(module_of(Kept), 4, AutoAccum(16, micro_batch=4), data=data(), max_steps=6, shuffle=False)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


@pytest.mark.parametrize("kind", [Recurrent, Cut, InAList, InATuple])
@pytest.mark.parametrize(
    "options", [{"micro_batch": 4}, {"max_micro_batch": 8}, {"micro_batch": 4, "accumulate": "joined"}]
)
def test_micro_batches_are_joined_and_so_it_is_that_of_whole_batches(kind: type, options: dict[str, Any]) -> None:
    expected = run(module_of(kind), 16, data=data(), max_steps=4, shuffle=False)
    found = run(module_of(kind), 4, AutoAccum(16, **options), data=data(), max_steps=4, shuffle=False)
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
