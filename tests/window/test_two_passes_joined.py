"""The two passes on several ranks: what each of them runs and reads, what they tell each other, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import autoaccum
from autoaccum.errors import AutoaccumError, ConflictingArgumentsError
from tests.models import mlp
from tests.processes import in_turn
from tests.ranks.launching import launch

pytestmark = in_turn
WINDOW = 12


def rank() -> int:
    return int(os.environ["RANK"])


class Rows(Dataset[Any]):
    """Samples that tell which of them were read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return WINDOW

    def __getitem__(self, index: int) -> Any:
        self.read.add(index)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3


def loss_fn(z: torch.Tensor) -> torch.Tensor:
    return cross_entropy(z @ z.T, torch.arange(len(z)))


class Log(list[Any]):
    """Remembers what is done, in order: what a plain list has got in the second pass is undone."""


def noted(asks_for_batch: bool) -> tuple[list[Any], set[int]]:
    data, calls = Rows(), Log()

    def embed(model: Any, batch: Any) -> Any:
        calls.append((len(batch[0]), torch.is_grad_enabled()))
        return model(batch[0])

    def loss(z: torch.Tensor) -> torch.Tensor:
        calls.append(len(z))
        return loss_fn(z)

    def loss_of_batch(z: torch.Tensor, batch: Any) -> torch.Tensor:
        assert [*batch[1]] == [index % 3 for index in range(WINDOW)]
        return loss(z)

    autoaccum.fit(
        mlp(), data, effective_batch=WINDOW, loss_scope="window", embed=embed, micro_batch=3, steps=1, verify=False,
        loss_fn=loss_of_batch if asks_for_batch else loss, shuffle=False, device="cpu", progress=False,
    )  # fmt: skip
    return list(calls), data.read


def test_the_first_rank_alone_computes_the_loss_and_reads_more_than_its_share_for_it() -> None:
    for asks_for_batch in (False, True):
        (calls, read), (others, of_other) = launch(noted, 2, asks_for_batch)
        # The first window's forwards are looked at, by their graphs, where it is the first rank's.
        assert calls == [(3, True), (3, True), WINDOW, (3, True)]
        assert others == [(3, False), (3, True), (3, True)]
        assert read >= set(range(WINDOW if asks_for_batch else 6))
        assert of_other - {0} == set(range(6, 12)), "the first sample alone is looked at by all, before the run"


class Following(nn.Module):
    """Two towers, one of which follows the other in each forward: no gradient, and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fast, self.slow = nn.Linear(8, 3), nn.Linear(8, 3).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> Any:
        with torch.no_grad():
            self.slow.weight.lerp_(self.fast.weight, 0.1)
        return self.fast(rows), self.slow(rows)


def following() -> tuple[list[int], torch.Tensor]:
    model = Following()
    rows = torch.randn(26, 8, generator=torch.Generator().manual_seed(1))
    result = autoaccum.fit(
        model, (rows,), effective_batch="1, 2:12", loss_scope="window", micro_batch=3, verify=False, device="cpu",
        embed=lambda called, batch: called(batch[0]), shuffle=False, progress=False,
        loss_fn=lambda pair: cross_entropy(pair[0] @ pair[1].T, torch.arange(len(pair[0]))),
    )  # fmt: skip
    return [len(report.micro_batches) for report in result.history], model.slow.weight.detach()


def test_a_rank_that_had_no_sample_at_first_has_seen_nothing_of_what_forwards_write_to() -> None:
    (plans, first), (_, second) = launch(following, 2)
    assert plans == [1, 1, 4, 4]
    assert torch.equal(first, second)


def by_samples(is_padded: bool) -> tuple[float, int] | str:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()

    def collate(samples: list[Any]) -> Any:
        rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
        return rows, torch.tensor([label for _, label in samples])

    def loss(z: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((batch[1][:, None] == batch[1]) * (z @ z.T)).mean() + len(batch[0])

    accumulator = autoaccum.Accumulator(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_scope="window", loss_fn=loss, collate_fn=collate,
        embed=lambda called, batch: called(batch[0].mean(1)), micro_batch=2, verify=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(rank())
    lengths = [2, 2] if is_padded and rank() else [3, 3, 3]
    samples = [(torch.randn(length, 4, generator=generator).double(), index) for index, length in enumerate(lengths)]
    try:
        return float(accumulator.step(samples)), sum(accumulator.micro_batches)
    except AutoaccumError as error:
        return f"{type(error).__name__}: {error}"


def test_samples_that_a_loss_asks_for_are_told_and_joined() -> None:
    first, second = launch(by_samples, 2, False)
    assert first == second
    assert first[1] == 6
    assert first[0] > 5, "the batch has six rows"
    first, second = launch(by_samples, 2, True)
    assert first.startswith("DataError")
    assert second.startswith("RankError")


def measured() -> str:
    try:
        autoaccum.fit(
            mlp(), Rows(), effective_batch=WINDOW, loss_scope="window", embed=lambda model, batch: model(batch[0]),
            steps=1, loss_fn=loss_fn, noise_scale=True, device="cpu", progress=False,
        )  # fmt: skip
    except ConflictingArgumentsError as error:
        return str(error)
    return "trained"


def test_noise_is_that_of_one_process_alone() -> None:
    for said in launch(measured, 2):
        assert said.startswith(
            "noise_scale=True: expected at most one of noise_scale and loss_scope='window' on several"
        )
