"""A few samples, whole and cut, under one state of the run: errors are those that there are, and nothing remains."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.events import Notice
from autoaccum.step.error_context import SingleSampleError
from autoaccum.step.findings import NotFiniteError, ZeroGradientError
from autoaccum.step.measured_samples import cuts_of
from autoaccum.step.measurement import Remains
from autoaccum.step.snapshot import State
from autoaccum.step.terms import Hypothesis
from tests.devices import DEVICE, there
from tests.models import classes, mlp
from tests.step.measuring import DOUBLE, Log, measurement_of, pairs, plain, summed

pytestmark = pytest.mark.measured

CUTS = cuts_of(6, 1)
ALIKE = [CUTS[2]]


def ignoring(model: Any, batch: Any) -> torch.Tensor:
    """A mean over the samples of two classes of three."""
    return cross_entropy(model(batch[0]), batch[1].where(batch[1] > 0, -100))


def penalised(model: Any, batch: Any) -> torch.Tensor:
    return summed(model, batch) + sum(p.square().sum() for p in model.parameters())


@pytest.mark.device
@pytest.mark.parametrize(
    ("loss", "right"),
    [
        (plain, {"items"}),
        (ignoring, {"items"}),
        (summed, {"sum"}),
        (penalised, set()),
        (pairs, set()),
    ],
)
def test_a_hypothesis_is_right_or_off_by_more_than_a_little(loss: Any, right: set[str]) -> None:
    hypotheses: tuple[Hypothesis, ...] = ("items", "sum")
    with measurement_of(loss) as measurement:
        measurement.run_whole()
        for hypothesis in hypotheses:
            error = measurement.run(CUTS, hypothesis).error
            assert error < 1e-12 if hypothesis in right else error > 1e-2, hypothesis


@pytest.mark.device
def test_the_error_is_that_of_the_gradients() -> None:
    """Of a mean that is taken for a sum: by hand, from three parts of two samples each."""
    with measurement_of(plain) as measurement:
        measurement.run_whole()
        outcome = measurement.run(ALIKE, "sum")
    assert outcome.error == pytest.approx(2.0)  # three times as much as it is
    assert outcome.tensors == pytest.approx(dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], 2.0))
    assert outcome.tensor in outcome.tensors


@pytest.mark.device
def test_it_stops_where_enough_is_known() -> None:
    with measurement_of(plain) as measurement:
        measurement.run_whole()
        assert len(measurement.run(CUTS, "sum").errors) == 3
        assert len(measurement.run(CUTS, "sum", stop_above=0.5).errors) == 1
        assert len(measurement.run(CUTS, "items", stop_above=0.5).errors) == 3


@pytest.mark.device
def test_losses_alone_show_it_too() -> None:
    with measurement_of(plain, forward_only=True) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "items").error < 1e-14
        assert measurement.run(ALIKE, "sum").error == pytest.approx(2.0)
        assert all(p.grad is None for p in measurement.parameters)
    with measurement_of(pairs, forward_only=True) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "items").error > 1e-2


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_noise_is_no_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Dropout(0.5), nn.RReLU(), nn.Linear(9, 3), nn.Dropout(0.2)).to(dtype)
    with measurement_of(plain, model, batch=classes(6, dtype)) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "items").error < measurement.tolerance / 10


@pytest.mark.device
@pytest.mark.filterwarnings("ignore:.*you have used fork_rng without explicitly")
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("is_forked", [False, True])
def test_noise_that_a_forward_sows_itself_is_what_each_part_gets(seed: int, is_forked: bool) -> None:
    """The first rows of it, whichever samples a part has: so it is in the run, and so it is measured."""

    def sown(rows: bool, model: Any, batch: Any) -> torch.Tensor:
        with torch.random.fork_rng() if is_forked else nullcontext():
            torch.manual_seed(seed)
            noise = torch.randn(batch[0].shape if rows else (8,), dtype=DOUBLE, device=batch[0].device)
        return cross_entropy(model(batch[0] + noise), batch[1])

    for rows in (False, True):
        with measurement_of(partial(sown, rows)) as measurement:
            measurement.run_whole()
            assert (measurement.run(CUTS, "items").error < measurement.tolerance) is not rows


@pytest.mark.device
def test_attention_is_measured_under_its_dropout() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.net(x).reshape(len(x), 1, 3, 8).split(1, dim=2)
            kv = torch.cat([k, v, q], 2)
            return self.out(F.scaled_dot_product_attention(q, kv, kv, dropout_p=0.4).reshape(len(x), 8))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    with measurement_of(plain, Attention(), batch=classes(6)) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "items").error < 2e-6


@pytest.mark.device
def test_in_sixteen_bits_nothing_is_measured() -> None:
    """Autocast is off: right and wrong could not be told apart with it."""
    seen = Log()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        seen.append(outputs.dtype)
        return cross_entropy(outputs, batch[1])

    with measurement_of(loss, mlp(), batch=classes(6)) as measurement:
        measurement.run_whole()
    assert set(seen) == {torch.float32}
    assert not measurement.is_rounded


@pytest.mark.device
@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda model, batch: 0 * plain(model, batch), ZeroGradientError),
        (lambda model, batch: plain(model, batch) / 0, NotFiniteError),
        (lambda model, batch: plain(model, batch) * float("nan"), NotFiniteError),
    ],
)
def test_by_nothing_nothing_can_be_told(loss: Any, error: type[Exception]) -> None:
    model = mlp(DOUBLE)

    def measured() -> None:
        with measurement_of(loss, model) as measurement:
            measurement.run_whole()
            measurement.run(CUTS, "items")

    with pytest.raises(error):
        measured()
    assert all(p.grad is None for p in model.parameters())


class Everywhere(nn.Module):
    """A forward that leaves something in every place that there is, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(DOUBLE)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3, dtype=DOUBLE))
        self.calls, self.table = 0, {"sizes": [0]}
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("mine")
        outputs: torch.Tensor = self.net(x)
        self.frozen.data.mul_(0.5)
        self.mean.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        self.calls += 1
        self.table["sizes"].append(len(x))
        self.late = outputs.detach()
        random.random()
        np.random.rand()
        return F.dropout(outputs, 0.1)


def state_of(model: Everywhere) -> Any:
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    return [t.tolist() for t in tensors], gradients, model.calls, str(model.table), hasattr(model, "late"), generators


@pytest.mark.device
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_it_remains(fails: bool) -> None:
    model = Everywhere()
    for p in model.net.parameters():
        p.grad = torch.ones_like(p)
    model(torch.zeros(1, 8, dtype=DOUBLE))
    before = state_of(model)
    kept = [p.grad for p in model.parameters()]
    try:
        with measurement_of(plain, model) as measurement:
            assert all(p.grad is None for p in model.parameters())
            measurement.run_whole()
            assert len(measurement.moved) == 2  # a buffer, and the frozen parameter
            assert measurement.draws_foreign
            assert state_of(model)[2:5] == before[2:5], "put back between runs, too"
            measurement.run(CUTS, "items")
            model.fails = fails
            measurement.run(CUTS, "items")
    except (ValueError, SingleSampleError):
        assert fails
    model.fails = False
    assert state_of(model) == before
    assert [p.grad is None for p in model.parameters()] == [gradient is None for gradient in kept]


@pytest.mark.device
def test_it_begins_as_the_window_began_and_ends_as_that_ended() -> None:
    """What the window itself has moved would hide what the next one finds."""
    model = Everywhere()
    seen = Log()

    def rewind() -> None:
        model.calls = 0

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(model.calls)
        return plain(model, batch)

    model.calls = 7
    with measurement_of(loss, model, rewind=rewind) as measurement:
        measurement.run_whole()
        measurement.run(ALIKE, "items")
    assert model.calls == 7
    assert seen == [0, 0, 0, 1, 2], "whole twice, for what draws is watched"


@pytest.mark.parametrize(("drawn", "runs"), [(0, 1), (1, 2)])
def test_operations_are_watched_only_where_something_is_drawn(drawn: int, runs: int) -> None:
    seen = Log()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        seen.append(0)
        return plain(model, batch) + 0 * torch.rand(drawn).sum()

    with measurement_of(loss) as measurement:
        measurement.run_whole()
    assert len(seen) == runs


@pytest.mark.device
def test_a_part_that_counts_nothing_is_left_out_and_one_that_is_no_number_is_not() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        taken = batch[1] > 0
        return cross_entropy(model(batch[0])[taken], batch[1][taken])

    def spoilt(model: Any, batch: Any) -> torch.Tensor:
        return plain(model, batch) * (1.0 if (batch[1] > 0).any() else math.nan)

    batch = classes(6, DOUBLE)[0], torch.tensor([0, 1, 2, 1, 2, 1])
    with measurement_of(loss, batch=batch) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "items").error < 1e-12
    with measurement_of(spoilt, batch=batch) as measurement:
        measurement.run_whole()
        assert math.isnan(measurement.run(CUTS, "items").error)


@pytest.mark.device
def test_what_the_graph_of_each_part_shows_is_noted_whatever_the_user_counts() -> None:
    with measurement_of(plain, num_items=lambda batch: 10 * len(batch[1])) as measurement:
        measurement.run_whole()
        assert measurement.run(CUTS, "num_items").error < 1e-12
        assert measurement.shown[0,].items == 1
        assert measurement.shown[3, 4, 5].items == 3


@pytest.mark.device
def test_tensors_are_named_as_the_user_knows_them() -> None:
    with measurement_of(plain) as measurement:
        assert measurement.names == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, torch.zeros(3, 4))])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_keeps_the_gradient_of_a_window_that_was_not_to_be_measured(script: Any) -> None:
    """The fifth window is short, and so is measured although nobody foresaw that."""
    torch.manual_seed(0)
    model = script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1)))
    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=3, loss_fn=nn.functional.mse_loss
    )
    for size in (12, 12, 12, 12, 5):
        before = [p.detach().clone() for p in model.parameters()]
        accumulator.step((torch.randn(size, 4), torch.randn(size, 1)))
        assert not any(map(torch.equal, before, model.parameters())), "a step was taken without a gradient"


@pytest.mark.device
def test_what_fails_when_it_is_entered_leaves_the_gradient() -> None:
    def fail() -> None:
        raise RuntimeError("the state cannot be put back")

    entered = measurement_of(plain, rewind=fail)
    weight = entered.job.modules[0].get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="put back"), entered:
        pass
    assert torch.equal(weight.grad, torch.ones_like(weight))


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
