"""Measuring what micro-batches add changes no bit of what they add up to, and is what a backward of their own gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from autoaccum.step import gradient
from autoaccum.step.terms import NONE
from autoaccum.training.setup import GivenBatch
from tests.models import classes, mlp, same
from tests.step.making import step_of

CPU = torch.device("cpu")
PLAN = (5, 2, 4, 1)


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, sparse=sparse)
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.embedding(ids).mean(1)
        return (
            inner @ self.embedding.weight.T if not self.embedding.sparse else inner.repeat(1, 2)[:, :11]
        ) + self.bias


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 11))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids.reshape(-1, 1, 4, 1).expand(-1, 1, 4, 4).float())  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Parameters that take part in some micro-batches only: the first in the first one, the second in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 11) for _ in range(2))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.experts[0 if len(ids) in (5, 1) else 1](ids.float() / 10)  # type: ignore[no-any-return]


class SparseOrDense(nn.Module):
    """A matrix whose gradient is sparse in some micro-batches and dense in others."""

    def __init__(self, sparse_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 11))
        self.sparse_first = sparse_first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sparse = (len(ids) in (5, 4)) is self.sparse_first
        return nn.functional.embedding(ids, self.weight, sparse=sparse).mean(1)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 11, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(11, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids.to(torch.complex64) @ self.weight).abs().double() + self.real


def plain() -> nn.Module:
    return nn.Sequential(Floats(), nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 11))


class Floats(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float() / 10


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "tied": Tied,
    "sparse": lambda: Tied(sparse=True),
    "sparse, then dense": lambda: SparseOrDense(True),
    "dense, then sparse": lambda: SparseOrDense(False),
    "convolutions": Convolutions,
    "experts": Experts,
    "complex": Complex,
}


def ids() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 11, (12, 4), generator=generator), torch.randint(0, 11, (12,), generator=generator)


def ran(make: Callable[[], nn.Module], noise_scale: bool, batch: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A window's outcome, and its gradients."""
    torch.manual_seed(0)
    model = make()
    made = step_of(model, noise_scale=noise_scale, micro_batch=12, full_window=12, **options)
    gradient = made.run(GivenBatch(batch, 12, CPU), PLAN)[0]
    return gradient, [p.grad for p in model.parameters()]


def same_gradients(first: list[Any], second: list[Any]) -> bool:
    """Bit for bit, as they are laid out."""
    assert [g is None for g in first] == [g is None for g in second]
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None]
    assert [a.layout for a, _ in pairs] == [b.layout for _, b in pairs]
    return same([a.to_dense() for a, _ in pairs], [b.to_dense() for _, b in pairs])


@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision)
        for name in MODELS
        for precision in ("fp32", "bf16", "fp16")
        if name != "complex" or precision == "fp32"  # autocast knows no complex numbers
    ],
)
def test_no_bit_of_the_gradient_changes(name: str, precision: Any) -> None:
    without, expected = ran(MODELS[name], False, ids(), precision=precision)
    measured, found = ran(MODELS[name], True, ids(), precision=precision)
    assert same_gradients(found, expected)
    assert torch.equal(measured.loss, without.loss)
    assert (without.parts, without.noise) == ((), None)
    assert measured.noise is not None


@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
@pytest.mark.parametrize("name", MODELS)
def test_parts_are_what_a_backward_of_their_own_gives(name: str) -> None:
    measured, _ = ran(MODELS[name], True, ids())
    torch.manual_seed(0)
    model = MODELS[name]()
    assert [part[:2] for part in measured.parts] == [(size, size) for size in PLAN]
    for inputs, targets, (size, _, square) in zip(*(t.split(PLAN) for t in ids()), measured.parts, strict=True):
        model.zero_grad()
        (cross_entropy(model(inputs), targets) * (size / 12)).backward()
        expected = sum(p.grad.to_dense().abs().square().sum().item() for p in model.parameters() if p.grad is not None)
        assert square == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parts_are_in_the_unit_of_the_gradient(precision: Any) -> None:
    """Not in that of a scaled loss, and not as they are before counts are known."""
    inputs, targets = ids()
    targets[:4] = -100  # so that the first micro-batch, whose items per sample are taken for all, has fewer
    exact, _ = ran(plain, True, (inputs, targets))
    found, gradients = ran(plain, True, (inputs, targets), precision=precision)
    assert [part[:2] for part in found.parts] == [(5, 1), (2, 2), (4, 4), (1, 1)]
    for part, expected in zip(found.parts, exact.parts, strict=True):
        assert part[2] == pytest.approx(expected[2], rel=0.05)
    whole = sum(g.square().sum().item() for g in gradients)
    noise = exact.noise
    assert noise.gradient_squared + noise.gradient_variance / 12 == pytest.approx(whole, rel=0.05)


def test_squares_of_sixteen_bits_do_not_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 3e4)
    norm = gradient.norm([parameter])
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(6e4, rel=1e-3)


def test_types_may_be_mixed() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = 2 * torch.ones_like(parameter)
    norm = gradient.norm(parameters)
    assert norm.dtype is torch.float64
    assert norm.item() == 20**0.5


def test_entries_that_several_samples_add_to_count_once() -> None:
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.sparse_coo_tensor([[1, 1, 4]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    assert gradient.norm([parameter]).item() == 5.0


def test_no_gradient_has_norm_zero() -> None:
    assert gradient.norm([nn.Parameter(torch.ones(3))]).item() == 0.0


def test_the_accumulated_tensors_stay_the_same_ones() -> None:
    """No memory moves from one micro-batch to the next."""
    model = mlp()
    inputs, targets = classes(4)
    cross_entropy(model(inputs), targets).backward()
    gradients = [p.grad for p in model.parameters()]
    before = gradient.set_aside(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    cross_entropy(model(inputs), targets).backward()
    gradient.add_back(before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def heard_and_norm(parameters: list[nn.Parameter], *losses: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    """Of each loss what its backward was heard to add, and the norm of its gradient by itself."""
    found = []
    for loss in losses:
        apart = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        exact = sum((g.abs() ** 2).sum() for g in apart if g is not None)
        found.append((gradient.heard(loss.backward, parameters), torch.as_tensor(exact) ** 0.5))
    return found


def test_what_is_heard_is_what_is_added() -> None:
    """Of a parameter that is used twice, of one that is not used, of one that is frozen, and of types that differ."""
    torch.manual_seed(0)
    twice = nn.Parameter(torch.randn(3, 3))
    complex_ = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    wide, never = nn.Parameter(torch.randn(3, dtype=torch.float64)), nn.Parameter(torch.randn(2))
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    losses = [
        ((twice @ twice).double() @ wide * (row * complex_).abs().double() * frozen).sum() for row in torch.randn(2, 3)
    ]
    parameters = [twice, complex_, wide, never, frozen]
    trained = [p for p in parameters if p.requires_grad]
    for heard, exact in heard_and_norm(trained, *losses):
        assert heard.dtype is torch.float64
        assert heard.item() == pytest.approx(exact.item(), rel=1e-6)
    assert gradient.heard(lambda: None, parameters) == 0.0
    twice.grad = None
    losses = [(twice * row).sum() for row in torch.randn(2, 3)]
    _, second = heard_and_norm([twice], *losses)
    assert second[0].item() == pytest.approx(second[1].item(), rel=1e-6), "and not that of both"
    assert gradient.heard(lambda: None, [twice]) == 0.0, "what was heard before is over"


def test_a_gradient_that_comes_in_pieces_is_measured_from_the_next_one_on() -> None:
    """As that of a layer does which two reentrant checkpoints share."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 11)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = (ids.float() / 10).requires_grad_()
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True).tanh()
            return self.out(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    made = step_of(Shared(), noise_scale=True, micro_batch=12, full_window=12)
    gradients = [made.run(GivenBatch(ids(), 12, CPU), PLAN)[0] for _ in range(2)]
    assert gradients[0].noise is None, "no figure, and not a wrong one"
    state = made.transaction.state_dict()
    assert state["in_pieces"] is True
    exact = []
    for inputs, targets in zip(*(t.split(PLAN) for t in ids()), strict=True):
        (model,) = made.job.modules
        grads = torch.autograd.grad(cross_entropy(plainly(model, inputs), targets), list(model.parameters()))
        exact.append(sum(g.square().sum().item() for g in grads) * (len(inputs) / 12) ** 2)
    assert [square for *_, square in gradients[1].parts] == pytest.approx(exact, rel=1e-5)
    assert gradients[1].noise is not None


class WritesItself(torch.autograd.Function):
    """A product whose backward adds to its weight's gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.inputs, ctx.weight = inputs, weight
        return inputs @ weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        own, weight = ctx.inputs.detach().t() @ gradient, ctx.weight
        weight.grad = own if weight.grad is None else weight.grad.add_(own)
        return gradient @ weight.detach().t(), None


def test_a_gradient_that_a_backward_writes_itself_is_not_missed() -> None:
    first, last = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 1))
    for _ in range(2):  # its first gradient, and one that is added to it in place
        loss = WritesItself.apply(torch.ones(4, 2) @ first, last).sum()  # type: ignore[no-untyped-call]
        assert gradient.heard(loss.backward, [first, last]) is None
    assert gradient.heard((2 * first).sum().backward, [first, last]) == pytest.approx(24**0.5)


def plainly(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Compute what ``Shared`` does without checkpoints."""
    x = inputs.float() / 10
    for _ in range(2):
        x = model.inner(x).tanh()
    return model.out(x)  # type: ignore[no-any-return]


def test_a_sum_that_counts_none_has_a_gradient_as_its_samples_have() -> None:
    """By which the noise is told: what it counts says nothing of its gradient."""
    norms = {index: torch.tensor(1.0) for index in range(3)}
    given: Any = (4, 2, 2), (3.0, NONE, 1.0), norms, torch.tensor(1.0), torch.tensor(1.0)
    found, _ = gradient.parts(*given, is_sum=False, correction=1.0)
    assert [items for _, items, _ in found] == [4, 2, 2]
    given = (4, 2, 2), (3.0, 2.0, 1.0), *given[2:]
    found, _ = gradient.parts(*given, is_sum=False, correction=1.0)
    assert [items for _, items, _ in found] == [3.0, 2.0, 1.0]
