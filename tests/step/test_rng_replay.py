"""What is drawn for a batch is given to its parts, row by row; what has no rows is said, or stands still."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoaccum
from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Verified
from autoaccum.step.rng_replay import (
    Constants,
    Recording,
    Replaying,
    UnalignedError,
    UnsettledError,
    name_of,
    state_of,
)
from tests.devices import DEVICE

pytestmark = [pytest.mark.measured, pytest.mark.usefixtures("made_there")]

X = torch.arange(24.0).reshape(6, 4) + 1
X = X.to(DEVICE)
PARTS = ((4, 0), (5, 1, 3), (2,))


def recorded(function: Callable[[torch.Tensor], Any], batch: torch.Tensor = X) -> tuple[Recording, Any]:
    torch.manual_seed(0)
    with Recording(torch.device(DEVICE), keeps_wide=True) as recording:
        whole = function(batch)
    return recording, whole


def replayed(recording: Recording, function: Callable[[torch.Tensor], Any], part: Sequence[int]) -> Any:
    torch.manual_seed(1)
    with Replaying(recording, part, len(X), keeps_wide=True):
        return function(X[list(part)])


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout, in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "dropout of features": lambda x: F.dropout1d(x[:, :, None].repeat(1, 1, 3), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "RReLU": lambda x: F.rrelu(-x, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a shape": lambda x: x + torch.rand(len(x), 1),
    "normal": lambda x: torch.normal(x, 1.0),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)) * x,
    "multinomial": lambda x: torch.multinomial(x, 2).float(),
    "integers": lambda x: x + torch.randint(0, 100, (len(x),))[:, None],
    "Gumbel": lambda x: F.gumbel_softmax(x),
    "samples and times in one dimension": lambda x: x.reshape(-1, 2) + torch.rand(2 * len(x), 2),
    "samples second": lambda x: (x.T + torch.rand(4, len(x))).T,
    "two after each other": lambda x: F.dropout(F.dropout(x, 0.3) + torch.rand_like(x), 0.3),
    "once a batch": lambda x: x * torch.rand(()),
    "one for each feature": lambda x: x * torch.rand(4),
}


@pytest.mark.device
@pytest.mark.parametrize("name", ROWS)
def test_each_part_gets_its_own_rows_of_the_whole(name: str) -> None:
    recording, whole = recorded(ROWS[name])
    each = len(whole) // len(X)
    for part in PARTS:
        rows = [index * each + offset for index in part for offset in range(each)]
        assert torch.equal(replayed(recording, ROWS[name], part), whole[rows])


@pytest.mark.device
def test_gradients_are_those_of_its_rows_too() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        F.dropout(x.square(), 0.5).sum().backward()
        assert x.grad is not None
        return x.grad

    recording, whole = recorded(gradient)
    for part in PARTS:
        assert torch.equal(replayed(recording, gradient, part), whole[list(part)])


@pytest.mark.device
def test_a_part_draws_as_much_as_it_would_by_itself() -> None:
    """What comes after it, by a generator of the run, is what would have come."""
    recording, _ = recorded(ROWS["dropout"])
    replayed(recording, ROWS["dropout"], (1, 2))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    F.dropout(X[:2], 0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.device
def test_a_part_that_is_padded_less_gets_the_beginning() -> None:
    recording, whole = recorded(lambda x: torch.rand_like(x))
    with Replaying(recording, (3, 1), 6, keeps_wide=True):
        drawn = torch.rand_like(X[:2, :3])
    assert torch.equal(drawn, whole[[3, 1], :3])


def test_lengths_that_are_in_the_ratio_of_samples_are_lengths() -> None:
    """Heads of each sample lie side by side; the whole is padded to three times as much as two of six samples."""
    inputs = torch.zeros(24, 12, 12)
    with Recording(torch.device("cpu"), keeps_wide=True) as recording:
        whole = torch.rand_like(inputs)
    with Replaying(recording, (3, 1), 6, keeps_wide=True):
        drawn = torch.rand_like(inputs[:8, :4, :4])
    assert torch.equal(drawn, whole[[12, 13, 14, 15, 4, 5, 6, 7], :4, :4])
    with Recording(torch.device("cpu"), keeps_wide=True) as recording:
        whole = torch.rand_like(inputs[:12, :6])  # time first
    with Replaying(recording, (3, 1), 6, keeps_wide=True):
        drawn = torch.rand_like(inputs[:4, :2])
    assert torch.equal(drawn, whole[:4][:, [3, 1]])


@pytest.mark.device
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_of_a_dropout_in_one_operation_a_part_has_the_bits_of_the_whole(p: float) -> None:
    """As devices compute it; where all is dropped nothing is divided by zero."""
    recording, whole = recorded(lambda x: torch.native_dropout(x / 3, p, True)[0])
    for part in PARTS:
        found = replayed(recording, lambda x: torch.native_dropout(x / 3, p, True)[0], part)
        assert torch.equal(found, whole[list(part)])


UNALIGNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "an order of samples": lambda x: x[torch.randperm(len(x))],
    "as many as there are pairs": lambda x: torch.rand(len(x) * (len(x) - 1) // 2),
    "of another kind where there are few": lambda x: torch.rand(len(x)) if len(x) == 6 else torch.randn(len(x)),
    "more of them where there are few": lambda x: [torch.rand(1) for _ in range(7 - len(x))],
    "none in the whole": lambda x: None if len(x) == 6 else torch.rand(1),
}


@pytest.mark.device
@pytest.mark.parametrize("name", UNALIGNED)
def test_what_has_no_rows_is_said(name: str) -> None:
    recording, _ = recorded(UNALIGNED[name])
    with pytest.raises(UnalignedError):
        replayed(recording, UNALIGNED[name], (1, 2))


@pytest.mark.device
def test_a_generator_that_is_made_anew_gives_what_it_is_asked_for() -> None:
    """And one that is passed on from batch to batch gives rows."""

    def anew(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), generator=torch.Generator(DEVICE).manual_seed(3))

    recording, whole = recorded(anew)
    assert torch.equal(replayed(recording, anew, (4, 0)), whole[:2])
    kept = torch.Generator(DEVICE).manual_seed(3)

    def passed_on(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(x), generator=kept)

    recording, whole = recorded(passed_on)
    assert torch.equal(replayed(recording, passed_on, (4, 0)), whole[[4, 0]])


def test_a_dropout_of_nothing_draws_nothing() -> None:
    recording, _ = recorded(lambda x: F.dropout(x, 0.0))
    assert recording.draws == []
    with Constants(keeps_wide=True):
        F.dropout(X, 0.0)


CONSTANTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "dropout": (lambda x: F.dropout(x, 0.5), X),
    "a mask of features": (lambda x: F.dropout1d(x[:, :, None], 0.5)[:, :, 0], X),
    "bernoulli": (lambda x: torch.bernoulli(x / 100), X / 100),
    "normal": (lambda x: torch.normal(x, 2.0), X + 1),
    "randn": (lambda x: torch.randn(len(x)), torch.full((6,), 0.5)),
    "uniform": (lambda x: torch.empty(6).uniform_(2, 4), torch.full((6,), 3.0)),
    "rand_like": (lambda x: torch.rand_like(x), torch.full((6, 4), 0.5)),
    "exponential": (lambda x: torch.empty(2).exponential_(4.0), torch.full((2,), 0.25)),
    "randint": (lambda x: torch.randint(3, 9, (4,)), torch.full((4,), 3)),
    "randperm": (lambda x: torch.randperm(len(x)), torch.arange(6).flip(0)),
    "multinomial": (lambda x: torch.multinomial(x, 2), torch.tensor([[3, 2]] * 6)),
    "gamma": (lambda x: torch._standard_gamma(x), X),
    "poisson": (lambda x: torch.poisson(x + 0.25), X + 1),
    "binomial": (lambda x: torch.binomial(x, torch.full_like(x, 0.6)), (X * 0.6).ceil()),
    "geometric": (lambda x: torch.empty(3).geometric_(0.3), torch.full((3,), 3.0)),
    "cauchy": (lambda x: torch.empty(3).cauchy_(1.0, 4.0), torch.full((3,), 3.0)),
    "log_normal": (lambda x: torch.empty(3).log_normal_(1.0, 4.0), torch.full((3,), 3.0).exp()),
    # Unlike each other: of two samples that are mixed by halves the same comes as of the same two the other way round.
    "shares": (lambda x: torch._sample_dirichlet(torch.full((2,), 0.4)), torch.tensor([1 / 3, 2 / 3])),
}


@pytest.mark.device
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_stands_for_what_is_drawn(name: str) -> None:
    function, expected = CONSTANTS[name]
    with Constants(keeps_wide=True):
        torch.testing.assert_close(function(X), expected.to(DEVICE))


@pytest.mark.device
def test_for_some_draws_there_is_none() -> None:
    with pytest.raises(UnsettledError, match="rrelu"), Constants(keeps_wide=True):
        F.rrelu(-X, training=True)


@pytest.mark.device
def test_attention_that_hides_its_draws_is_noted() -> None:
    q = torch.randn(2, 1, 4, 8)
    names = []

    class Noting(Recording):  # type: ignore[misc]
        def draw(self, func: Any, *rest: Any) -> Any:
            names.append(name_of(func))
            return super().draw(func, *rest)

    with Noting(torch.device(DEVICE), keeps_wide=True) as recording:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert recording.has_fused is any(name.startswith("_") for name in names)


@pytest.mark.device
@pytest.mark.parametrize("keeps_wide", [True, False])
def test_an_autocast_of_the_users_own_rounds_nothing_beside_wide_parameters(keeps_wide: bool) -> None:
    layer = nn.Linear(4, 4)
    with Constants(keeps_wide=keeps_wide), torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
        dtype = layer(X).dtype
    assert dtype == (torch.float32 if keeps_wide else torch.bfloat16)


class Noisy(nn.Module):
    """Draws on its device by several operations, two of a generator of its own."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.drop, self.generator = nn.Linear(8, 3), nn.Dropout(0.3), torch.Generator(device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        own = torch.randn(inputs.shape, generator=self.generator, device=inputs.device)
        drawn = self.drop(inputs + 0.1 * torch.randn_like(inputs) + 0.1 * own)
        logits: torch.Tensor = self.layer(drawn)
        return logits + 0.1 * torch.rand(len(inputs), 3, device=inputs.device)


class Sowing(Noisy):
    """Sows the generator of its device alone in each forward, so that each part gets the first rows of one noise."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        module: Any = torch.get_device_module(inputs.device) if inputs.device.type != "cpu" else torch
        module.manual_seed(3)
        return super().forward(inputs)


@pytest.mark.weighted
@pytest.mark.device
@pytest.mark.parametrize(("kind", "passed"), [(Noisy, True), (Sowing, False)])
def test_what_is_drawn_on_a_device_is_given_to_parts_by_rows(kind: type[Noisy], passed: bool) -> None:
    torch.manual_seed(0)
    data = torch.randn(24, 8), torch.randint(0, 3, (24,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoaccumWarning)
        result = autoaccum.fit(
            kind(DEVICE), data, effective_batch=12, micro_batch=5, loss_fn=F.cross_entropy, device=DEVICE,
            progress=False, cache=False,
        )  # fmt: skip
    events = [event for event in result.events if isinstance(event, Verified)]
    assert [event.passed for event in events] == [passed]
    assert (events[0].error < 2e-5) is passed


def test_an_accelerator_without_a_driver_has_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA names one on every machine, and raises where its state is read."""

    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    assert len(state_of()) == 1
