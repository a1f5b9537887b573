"""Law 1 for samples of different lengths: grouped by length, they give the big batch's gradient, whatever the plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import Validated
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import relative_error, same, state_of

N, CLASSES = 23, 5


def texts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, a target for each, of which some are ignored) of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(N):
        length = int(torch.randint(1, 31, (), generator=generator))
        targets = torch.randint(0, CLASSES, (length,), generator=generator)
        targets[torch.rand(length, generator=generator) < 0.3] = -100
        targets[0] = 1
        found.append((torch.randint(1, 9, (length,), generator=generator), targets))
    return found


class Texts(Dataset[Any]):
    def __init__(self) -> None:
        self.texts = texts()

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.texts[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(texts())


widths: list[tuple[int, int]] = []
"""Of the micro-batches that were made: samples, tokens of the longest."""


def pad(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = zip(*samples, strict=True)
    batch = pad_sequence(list(tokens), batch_first=True)
    widths.append((batch.shape[0], batch.shape[1]))
    return batch, pad_sequence(list(targets), batch_first=True, padding_value=-100)


class Tagger(nn.Module):
    """(samples, tokens) -> (samples, tokens, classes), each token on its own, so that padding is nothing to the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)  # type: ignore[no-any-return]


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def masked_mean(model: Any, batch: Any) -> torch.Tensor:
    losses = cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    mask = (batch[1] != -100).double()
    return (losses * mask).sum() / mask.sum()


def sample_mean(model: Any, batch: Any) -> torch.Tensor:
    mask = (batch[0] != 0).double()[..., None]
    pooled = (model(batch[0]) * mask).sum(1) / mask.sum(1)
    return cross_entropy(pooled, batch[1][:, 0])


STEPS = {step.__name__: step for step in (token_mean, masked_mean, sample_mean)}
every_loss = pytest.mark.parametrize("step", list(STEPS))


class Recorder(torch.optim.SGD):
    """Remembers each step's gradient and leaves the weights as they are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.0)
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))
        super().step(closure)


def fit(step: str, data: Any, micro_batch: Any, **options: Any) -> autoaccum.FitResult:
    return trainer(step, data, micro_batch, **options).fit()


def trainer(step: str, data: Any, micro_batch: Any, **options: Any) -> autoaccum.Trainer:
    arguments: dict[str, Any] = {"effective_batch": 9, "optimizer": Recorder, "shuffle": False, **options}
    if not isinstance(data, DataLoader):
        arguments["collate_fn"] = pad
    return autoaccum.Trainer(
        Tagger(), data, training_step=STEPS[step], micro_batch=micro_batch, device=DEVICE, progress=False, **arguments
    )


def check(step: str, result: autoaccum.FitResult, windows: list[list[int]]) -> None:
    """Each gradient and loss beside those of the big batch, whose samples are in the data's order."""
    assert [report.num_samples for report in result.history][-1] == sum(map(len, windows))
    assert isinstance(result.optimizer, Recorder)
    data = texts()
    for found, report, indices in zip(result.optimizer.gradients, result.history, windows, strict=True):
        model = there(Tagger())
        loss = STEPS[step](model, there(pad([data[index] for index in indices])))
        loss.backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert relative_error(found, expected) < 1e-12
        assert report.loss == pytest.approx(loss.item(), rel=1e-12)


IN_ORDER = [list(range(9)), list(range(9, 18)), list(range(18, N))]


def random_plan(draw: random.Random, windows: list[list[int]]) -> list[tuple[int, ...]]:
    plans = []
    for window in windows:
        cuts = sorted(draw.sample(range(1, len(window)), draw.randint(0, len(window) - 1)))
        plans.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, len(window)], strict=True)))
    return plans


@pytest.mark.device(every=2)
@every_loss
@pytest.mark.parametrize("streamed", [False, True])
def test_gradient_is_the_windows_whatever_the_plan(step: str, streamed: bool) -> None:
    draw = random.Random(1)
    for _ in range(6):
        plans = random_plan(draw, IN_ORDER)
        result = fit(step, Stream() if streamed else Texts(), plans)
        assert [report.micro_batches for report in result.history] == plans
        check(step, result, IN_ORDER)


@pytest.mark.device(every=3)
@every_loss
def test_with_workers(step: str) -> None:
    loader = DataLoader(Texts(), batch_size=4, collate_fn=pad, num_workers=2)
    check(step, fit(step, loader, 2), IN_ORDER)


@pytest.mark.device
def test_micro_batches_hold_little_padding() -> None:
    tokens = [len(tokens) for tokens, _ in texts()]
    widths.clear()
    fit("token_mean", Texts(), [(3,) * 3, (3,) * 3, (3, 2)])
    served = [pair for pair in widths if pair[0] > 1]
    assert len(served) == 8
    best = [sorted(tokens[index] for index in window)[::-1] for window in IN_ORDER]
    assert served == [
        (len(window[start : start + 3]), window[start]) for window in best for start in range(0, len(window), 3)
    ]


@strides(17)
def test_an_oom_leaves_no_mark(stride: int) -> None:
    """Wherever in a window, or ahead of it, memory runs out: the run is that of the smaller plan from that window on."""

    def prepared(micro_batch: Any) -> autoaccum.Trainer:
        return trainer("token_mean", Texts(), micro_batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), shuffle=True)

    clean: dict[Any, Any] = {}
    running = prepared(5)
    with Operations() as operations:
        running.fit()
    replays = 0
    outside: set[str] = set()
    for operation in operations.every(stride, offset=5):
        running = prepared(5)
        try:
            with oom_at(operation):
                result = running.fit()
        except OptimizerOutOfMemoryError:
            continue
        except torch.OutOfMemoryError as error:
            outside.add(str(error).split()[-1])
            continue
        replays += sum(report.replays for report in result.history)
        plans = tuple(report.micro_batches for report in result.history)
        if plans not in clean:
            clean[plans] = state_of(prepared(list(plans)).fit())
        assert same(state_of(result), clean[plans]), f"operation {operation} left a mark"
    assert replays * stride > 25 * 13
    # An order on the host, and a number that is there already; nothing of what a window is read ahead by.
    assert outside <= {"aten.randperm.generator.", "aten._local_scalar_dense.default."}


@pytest.mark.device(every=2)
@pytest.mark.parametrize("micro_batch", [1, 4, 9])
def test_the_validation_loss_is_the_mean_over_all_of_it(micro_batch: int) -> None:
    result = fit("masked_mean", Texts(), micro_batch, validation_data=DataLoader(Texts(), collate_fn=pad))
    (validated,) = [event for event in result.events if isinstance(event, Validated)]
    assert validated.num_samples == N
    assert validated.loss == pytest.approx(masked_mean(Tagger(), pad(texts())).item(), rel=1e-12)
