"""Law 1 for parameters of every kind: training in unequal micro-batches is training in big batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from tests.devices import DEVICE, there
from tests.models import relative_error

BOUND = 1e-12
NUM_SAMPLES, EFFECTIVE_BATCH = 23, 10
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def texts(vocabulary: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """(23, 5) tokens, some of which come several times in a text, and (23,) targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary - 3, (NUM_SAMPLES, 5), generator=generator)
    return tokens, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


def features() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)


def weighted(model: Any, batch: Any) -> torch.Tensor:
    """A mean over items that are not the samples: their number differs from one to the next."""
    inputs, targets = batch
    losses = cross_entropy(model(inputs), targets, reduction="none")
    return (losses * (targets + 1)).sum() / (targets + 1).sum()


def by_hand(
    model: nn.Module, data: Any, optimizer: torch.optim.Optimizer, clip_norm: float | None, epochs: int
) -> None:
    """The big batch, with the norm of what is sparse taken from its dense form."""
    for _ in range(epochs):
        for start in range(0, NUM_SAMPLES, EFFECTIVE_BATCH):
            optimizer.zero_grad()
            weighted(model, [tensor[start : start + EFFECTIVE_BATCH] for tensor in data]).backward()
            if clip_norm is not None:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                dense = [g.to_dense() if g.is_sparse else g for g in gradients]
                norm = torch.stack([g.abs().square().sum() for g in dense]).sum().sqrt()
                for gradient in gradients:
                    gradient.mul_(float((clip_norm / (norm + 1e-6)).clamp(max=1.0)))
            optimizer.step()


def check(
    make: Callable[[], nn.Module],
    data: Any,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    clip_norm: float | None = None,
    sizes: tuple[int, ...] = (5, 1, 4),
) -> autoaccum.FitResult:
    """Two epochs of three windows each, of which the last is short; parameters and the optimizer's state are equal."""
    expected = there(make())
    expected_optimizer = make_optimizer(expected)
    start = [p.detach().clone() for p in expected.parameters()]
    by_hand(expected, there(data), expected_optimizer, clip_norm, epochs=2)
    model = make()
    result = autoaccum.fit(
        model,
        data,
        effective_batch=EFFECTIVE_BATCH,
        micro_batch=[sizes, sizes, (2, 1)] * 2,
        training_step=weighted,
        num_items=lambda batch: (batch[1] + 1).sum(),
        optimizer=make_optimizer(model),
        clip_norm=clip_norm,
        epochs=2,
        shuffle=False,
        device=DEVICE,
        progress=False,
    )
    assert [report.micro_batches for report in result.history] == [sizes, sizes, (2, 1)] * 2
    for found, wanted, before in zip(model.parameters(), expected.parameters(), start, strict=True):
        assert relative_error(found.detach(), wanted.detach()) < BOUND
        assert torch.equal(found, before) == torch.equal(wanted, before)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        found_state, wanted_state = result.optimizer.state.get(p, {}), expected_optimizer.state.get(q, {})
        for name, value in wanted_state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert found_state[name].is_sparse == value.is_sparse
                assert relative_error(found_state[name].to_dense(), value.to_dense()) < BOUND
            else:
                assert found_state.get(name) == value
    return result


@pytest.mark.device(every=2)
class TestKinds:
    """Each with AdamW and with SGD, and clipped."""

    CLIPPED = pytest.mark.parametrize("clip_norm", [None, 0.05])
    OPTIMIZERS = pytest.mark.parametrize(
        "optimizer",
        [
            lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
        ],
        ids=["AdamW", "SGD"],
    )

    @CLIPPED
    @OPTIMIZERS
    def test_complex(self, optimizer: MakeOptimizer, clip_norm: float | None) -> None:
        class Fourier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
                self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return (inputs.to(torch.complex128) @ self.weight).abs() * self.scale

        check(Fourier, features(), lambda model: optimizer(model.parameters()), clip_norm=clip_norm)

    @CLIPPED
    @OPTIMIZERS
    def test_tied(self, optimizer: MakeOptimizer, clip_norm: float | None) -> None:
        """An embedding that is the output layer too."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.table, self.out = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
                self.out.weight = self.table.weight
                self.double()

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                outputs: torch.Tensor = self.out(self.table(tokens).mean(1))
                return outputs

        result = check(Tied, texts(), lambda model: optimizer(model.parameters()), clip_norm=clip_norm)
        assert isinstance(result.model, Tied)
        assert result.model.out.weight is result.model.table.weight
        assert len(result.optimizer.state) == 1

    @CLIPPED
    @OPTIMIZERS
    def test_groups_frozen_and_unused(self, optimizer: MakeOptimizer, clip_norm: float | None) -> None:
        """A layer is frozen, and one takes no part, so that no decay may touch it either: all are the optimizer's."""

        class Partly(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.frozen, self.first = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 8)
                self.second, self.unused = nn.Linear(8, 3), nn.Linear(3, 3)
                self.double()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                outputs: torch.Tensor = self.second(self.first(self.frozen(inputs)).tanh())
                return outputs

        def grouped(model: Any) -> torch.optim.Optimizer:
            return optimizer(
                [
                    {"params": [*model.frozen.parameters(), *model.first.parameters()], "lr": 0.01},
                    {"params": model.second.parameters(), "weight_decay": 0.3},
                    {"params": model.unused.parameters(), "lr": 1.0, "weight_decay": 0.9},
                ]
            )

        model: Any = check(Partly, features(), grouped, clip_norm=clip_norm).model
        untouched = Partly()
        assert torch.equal(model.unused.weight.cpu(), untouched.unused.weight)
        assert torch.equal(model.frozen.weight.cpu(), untouched.frozen.weight)

    @CLIPPED
    def test_one_that_only_some_micro_batches_use(self, clip_norm: float | None) -> None:
        """A mixture of experts: the last takes part in one micro-batch of some windows, and in none of others."""

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3)).double()

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                chosen = (inputs[:, 0].abs() > 1).long() + (inputs[:, 0] > 1.6)
                outputs = inputs.new_zeros(len(inputs), 3)
                for index, expert in enumerate(self.experts):
                    if (chosen == index).any():
                        outputs = outputs.index_put((chosen == index,), expert(inputs[chosen == index]))
                return outputs

        check(
            Experts,
            features(),
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
            clip_norm=clip_norm,
        )


class Bag(nn.Module):
    """Sparse gradients only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(12, 3, mode="sum", sparse=True).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.bag(tokens)
        return outputs


class Mixed(nn.Module):
    """A sparse gradient among dense ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 3)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.table(tokens).mean(1).tanh())
        return outputs


SPARSE: dict[str, MakeOptimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "SGD with momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
class TestSparse:
    @pytest.mark.parametrize("clip_norm", [None, 0.05])
    @pytest.mark.parametrize(
        ("kind", "optimizer"),
        [(kind, name) for kind in (Bag, Mixed) for name in SPARSE if (kind, name) != (Mixed, "SparseAdam")],
    )  # SparseAdam takes no dense gradients
    def test_trains_like_the_big_batch(self, kind: type[nn.Module], optimizer: str, clip_norm: float | None) -> None:
        result = check(kind, texts(), lambda model: SPARSE[optimizer](model.parameters()), clip_norm=clip_norm)
        assert next(result.model.parameters()).grad is not None
        assert next(result.model.parameters()).grad.is_sparse  # type: ignore[union-attr]

    def test_a_big_table_gets_no_dense_momentum(self) -> None:
        model = Mixed()
        trainer = autoaccum.Trainer(
            model,
            texts(),
            effective_batch=10,
            micro_batch=3,
            loss_fn=cross_entropy,
            optimizer=SPARSE["SGD with momentum"](model.parameters()),
            device=DEVICE,
            progress=False,
        )
        state = trainer.optimizer.state
        assert set(state) == {model.out.weight, model.out.bias}
        trainer.fit()
        assert state[model.table.weight]["momentum_buffer"].is_sparse
        assert not state[model.out.weight]["momentum_buffer"].is_sparse

    def test_the_norm_that_is_told_counts_an_entry_once(self) -> None:
        """A token of several micro-batches adds up before its gradient is squared."""
        norms = []
        for sizes in ((10,), (4, 3, 3)):
            result = autoaccum.fit(
                Bag(),
                texts(),
                effective_batch=10,
                micro_batch=[sizes],
                steps=1,
                loss_fn=cross_entropy,
                optimizer=SPARSE["SGD"],
                clip_norm=1.0,
                shuffle=False,
                device=DEVICE,
                progress=False,
            )
            norms.append(result.history[0].grad_norm)
        model = Bag()
        tokens, targets = texts()
        cross_entropy(model(tokens[:10]), targets[:10]).backward()
        assert model.bag.weight.grad is not None
        assert norms == [pytest.approx(model.bag.weight.grad.to_dense().norm().item(), rel=BOUND)] * 2
