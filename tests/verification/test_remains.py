"""What steps leave in state: as unsplit training leaves it, or announced."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.events import Notice
from autoaccum.verification.remains import Remains
from autoaccum.window.state import State
from tests.devices import DEVICE, there
from tests.verification.making import DOUBLE

KEYS = 40


class Momentum(nn.Module):
    """An encoder beside one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 4, dtype=DOUBLE)
        self.slow = copy.deepcopy(self.encoder).requires_grad_(requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return (self.encoder(inputs) - self.slow(inputs.flip(1))).square().mean(1)


class Queue(nn.Module):
    """An encoder beside the keys of the samples before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 4, dtype=DOUBLE)
        self.register_buffer("keys", torch.randn(KEYS, 4, dtype=DOUBLE))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        encoded = F.normalize(self.encoder(inputs), dim=1)
        losses = (encoded @ self.keys.clone().T).logsumexp(1)
        self.keys = torch.cat([self.keys[len(inputs) :], encoded.detach()])
        return losses


class Normed(Queue):
    """The same without a queue, behind BatchNorm, whose statistics are told by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=DOUBLE).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.encoder(inputs)) @ self.keys.T).logsumexp(1)


def causes_of(model: nn.Module, **options: Any) -> list[str]:
    """Return what is announced of two windows, and see that the first one is exact."""
    inputs = torch.randn(24, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
        result = autoaccum.fit(
            there(model), inputs, effective_batch=12, micro_batch=4, device=DEVICE, progress=False,
            training_step=lambda model, batch: model(batch).mean(), **options,
        )  # fmt: skip
    return [event.cause[:30] for event in result.events if isinstance(event, Notice)]


@pytest.mark.weighted
@pytest.mark.device
def test_a_gradient_that_depends_on_state_is_told() -> None:
    assert causes_of(Queue()) == ["The loss is neither a mean ove"]


class Keeping(nn.Module):
    """An encoder whose loss reads what some samples before have left, wherever that is kept."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.kind = nn.Linear(6, 4, dtype=DOUBLE), kind
        self.keys = torch.ones(16, 4, dtype=DOUBLE)
        self.several: list[torch.Tensor] = []
        self.last = deque([torch.ones(4, dtype=DOUBLE)] * 8, maxlen=8)
        self.named = {"seen": 0}
        self.seen, self.mean = 0, np.zeros(4)
        self.baseline = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.encoder(inputs)
        kept = outputs.detach()
        if self.kind == "a tensor":
            read, self.keys = self.keys.mean(), torch.cat([self.keys.to(kept), kept])[-16:]
        elif self.kind == "a list":
            read = sum((one.mean() for one in self.several), kept.new_zeros(()))
            self.several.append(kept)
        elif self.kind == "a deque":
            read = torch.stack([one.to(kept) for one in self.last]).mean()
            self.last.extend(kept)
        elif self.kind == "a dict":
            read = kept.new_tensor(self.named["seen"] / 100)
            self.named["seen"] += len(kept)
        elif self.kind == "a number":
            read, self.seen = kept.new_tensor(self.seen / 100), self.seen + len(kept)
        elif self.kind == "an array":
            read, self.mean = kept.new_tensor(self.mean.mean()), 0.9 * self.mean + 0.1 * kept.mean(0).cpu().numpy()
        elif self.kind == "a count of calls":
            read, self.seen = kept.new_tensor(self.seen / 100), self.seen + 1
        else:  # of which the next one reads nothing
            read, self.map = kept.new_zeros(()), kept
            self.several.append(kept)
            self.seen, self.baseline = self.seen + len(kept), float(kept.mean())
        return (outputs - read).square().mean(1)


@pytest.mark.device
@pytest.mark.parametrize(
    "make",
    [
        *[partial(Keeping, kind) for kind in ("a tensor", "a list", "a deque", "a dict", "a number", "an array")],
        *[partial(Keeping, kind) for kind in ("a count of calls", "a log")], Queue, Momentum, Normed,
    ],
    ids=str,
)  # fmt: skip
def test_wherever_the_next_forward_finds_it_it_is_that_of_full_batches(make: Callable[[], nn.Module]) -> None:
    inputs = torch.randn(4, 12, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    left = []
    for micro_batch in (12, 4):
        model = there(make())
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=micro_batch,
            training_step=lambda model, batch: model(batch).mean(),
        )  # fmt: skip
        for batch in there(inputs):
            accumulator.step(batch)
        left.append(model.state_dict())
        assert not [event for event in accumulator.events if isinstance(event, Notice)]
    for name, value in left[0].items():
        torch.testing.assert_close(left[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.device
def test_what_is_alike_but_for_rounding_is_no_other() -> None:
    model = there(Queue())
    keys, found = model.keys, model.keys.clone()
    state = State([model], [], keys.device, [*model.parameters()])
    remains = Remains(state)
    keys[0] += 1.0
    remains.take()
    assert remains.others() == []
    keys[0] += 1e-9
    assert remains.others() == []
    keys.copy_(found)
    keys[1] += 1.0
    assert [one is keys for one in remains.others()] == [True]
    model.keys = found.clone().index_add_(0, torch.tensor([0], device=keys.device), torch.ones_like(keys[:1]))
    assert remains.others() == [], "a buffer is known by its place"
    model.keys = keys[1:]  # of another shape: it holds what is as long as a batch
    assert remains.others() == []


class Tracking(nn.Module):
    """A net with statistics that only evaluation reads; by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.net = kind, nn.Linear(6, 1, dtype=DOUBLE)
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True, dtype=DOUBLE)
        self.register_buffer("mean", torch.zeros(6, dtype=DOUBLE))
        self.register_buffer("calls", torch.tensor(0))
        self.held = torch.zeros(6, dtype=DOUBLE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean(0).detach()
        if self.kind == "a layer's own":
            inputs = self.norm(inputs.reshape(-1, 3, 2)).flatten(1)
        elif self.kind == "in place":
            self.mean.lerp_(mean, 0.1)
        elif self.kind == "through .data":
            self.mean.data.mul_(0.9).add_(mean, alpha=0.1)
        elif self.kind == "a buffer that is replaced":
            self.mean = 0.9 * self.mean + 0.1 * mean
        elif self.kind == "a count of calls":
            self.calls += 1
        elif self.kind == "a tensor in an attribute":
            self.held.lerp_(mean, 0.1)
        elif self.kind == "a sum over samples":
            self.mean += inputs.sum(0).detach()
        else:
            self.last = inputs.detach()
        return self.net(inputs)

    def left(self) -> dict[str, torch.Tensor]:
        return {**self.state_dict(), "held": self.held}


KINDS = ["a layer's own", "in place", "through .data", "a buffer that is replaced", "a count of calls"]
KINDS += ["a tensor in an attribute", "a sum over samples", "the last outputs"]
WEIGHTED = KINDS[-2:]


@pytest.mark.device
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_only_evaluation_reads_is_that_of_full_batches(kind: str) -> None:
    inputs = torch.randn(4, 12, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1)) + 1
    left, rules = [], set()
    for micro_batch in (12, 4):
        model = there(Tracking(kind))
        model.held = there(model.held)
        accumulator = autoaccum.Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=micro_batch,
            training_step=lambda model, batch: model(batch).square().mean(),
        )  # fmt: skip
        for batch in there(inputs):
            accumulator.step(batch)
        left.append(model.left())
        assert not [event for event in accumulator.events if isinstance(event, Notice)]
        rules |= {type(event).__name__ for event in accumulator.events} & {"Joined"}
    for name, value in left[0].items():
        torch.testing.assert_close(left[1][name], value, rtol=1e-9, atol=1e-12, msg=name)
    assert rules == (set() if kind in WEIGHTED else {"Joined"})


@pytest.mark.device
def test_state_of_weighted_micro_batches_is_told_by_name() -> None:
    inputs = torch.randn(12, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"training_step": lambda model, batch: model(batch).square().mean()}
    report = autoaccum.check(there(Tracking("in place")), there(inputs), accumulate="weighted", **options)
    assert report.passed
    assert report.notice is not None
    assert report.notice.cause.startswith("Forwards write to mean, and splitting the batch changes")
    assert autoaccum.check(there(Tracking("in place")), there(inputs), **options).accumulate == "joined"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
        result = autoaccum.fit(
            there(Tracking("in place")), inputs, effective_batch=6, micro_batch=2, device=DEVICE, progress=False,
            accumulate="weighted", **options,
        )  # fmt: skip
    told = [event for event in result.events if isinstance(event, Notice)]
    assert [notice.cause for notice in told] == [report.notice.cause]
