"""The first windows are looked at while they run, and what is not exact about them is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from autoaccum.errors import LossSideEffectError, NonFiniteLossError
from autoaccum.loss.weighting import CountItems
from autoaccum.planning.attempts import Piece
from autoaccum.training.accumulator import _Batch
from autoaccum.verification.examiner import Examiner
from autoaccum.verification.notices import coupling_notice, penalty_notice
from autoaccum.window.gradient import Gradient
from autoaccum.window.job import Job
from autoaccum.window.transaction import Transaction
from tests.models import classes, mlp, noisy

CPU = torch.device("cpu")


def plain(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


class Examined:
    """An examiner around a transaction, and the loop that a window is."""

    def __init__(
        self, loss_of: Any = plain, model: nn.Module | None = None, num_items: CountItems | None = None
    ) -> None:
        model = mlp() if model is None else model
        job = Job(
            model=model,
            modules=(model,),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_of=loss_of,
            num_items=num_items,
            device=CPU,
        )
        self.transaction = Transaction(job)
        self.examiner = Examiner(job, self.transaction)

    def attempt(self, *sizes: int) -> None:
        window = _Batch(classes(sum(sizes)), sum(sizes), CPU)
        self.transaction.begin(window)
        self.examiner.begin_attempt()
        start = 0
        for size in sizes:
            self.transaction.add(Piece(start, size))
            start += size

    def run(self, *sizes: int) -> Gradient:
        self.attempt(*sizes)
        gradient = self.transaction.finish()
        assert isinstance(gradient, Gradient)
        return gradient

    def causes(self, *sizes: int) -> list[str]:
        """Of what is said of a window in these sizes."""
        return [notice.cause for notice in self.examiner.notices(self.run(*sizes))]

    @property
    def looks(self) -> bool:
        """Whether forwards are looked at."""
        return self.transaction.forward == self.examiner.forward


def test_it_looks_until_a_window_that_is_cut_has_been_seen() -> None:
    made = Examined()
    assert made.looks
    made.examiner.check_first(made.run(8))
    assert made.looks, "a whole window has nothing to show"
    assert made.causes(4, 4) == []
    assert not made.looks
    assert made.transaction.forward == made.transaction.plain_forward


def test_layers_that_couple_and_parameters_of_sixteen_bits_are_said_of_the_first_window_only() -> None:
    made = Examined(model=noisy())
    assert made.causes(4, 4) == ["The model holds 1 BatchNorm layer in training mode"]
    assert made.causes(4, 4) == []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0].bfloat16()), batch[1])

    assert Examined(loss, mlp(torch.bfloat16)).causes(4, 4) == ["The model's parameters are bfloat16"]


def test_parameters_of_sixteen_bits_that_are_not_trained_are_no_matter() -> None:
    model = mlp()
    model.register_parameter("frozen", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False))
    assert Examined(model=model).causes(4, 4) == []


def pairs(model: Any, batch: Any) -> torch.Tensor:
    outputs = model(batch[0])
    return cross_entropy(outputs @ outputs.exp().T, torch.arange(len(outputs)))


def test_samples_that_meet_are_said_and_nothing_else_of_that_loss() -> None:
    made = Examined(pairs, num_items=lambda batch: 1)
    assert made.examiner.notices(made.run(5, 3)) == [coupling_notice()]


def test_counts_that_the_loss_contradicts_are_said() -> None:
    made = Examined(num_items=lambda batch: 1)
    (cause,) = made.causes(5, 3)
    assert cause == "num_items says 1, 1 for the first micro-batches, but their loss is a mean over 5, 3"
    assert Examined(num_items=lambda batch: 2 * len(batch[1])).causes(5, 3) == []


def test_an_attempt_that_was_rolled_back_is_forgotten() -> None:
    """Else its micro-batches would stand beside those of the window that is judged."""
    made = Examined(num_items=lambda batch: 1)
    made.attempt(4, 4)
    made.transaction.roll_back()
    assert len(made.causes(5, 3)) == 1
    losses = [plain, plain, pairs, pairs]
    made = Examined(lambda model, batch: losses.pop(0)(model, batch))
    made.attempt(4, 4)
    made.transaction.roll_back()
    assert made.examiner.notices(made.run(5, 3)) == [coupling_notice()]


def test_a_loss_that_cannot_be_told_is_said() -> None:
    (cause,) = Examined(lambda model, batch: plain(model, batch).sqrt()).causes(5, 3)
    assert cause == (
        "How the loss averages over a micro-batch cannot be told: its graph leads to Sqrt, which says nothing of it"
    )


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_penalty_is_said_beside_a_sum_alone(reduction: str) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return cross_entropy(model(batch[0]), batch[1], reduction=reduction) + 0.1 * penalty

    made = Examined(loss)
    assert made.examiner.notices(made.run(5, 3)) == ([penalty_notice()] if reduction == "sum" else [])


def ignores_all(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), torch.full_like(batch[1], -100))


def test_a_window_in_which_nothing_counts_says_nothing() -> None:
    for made in (Examined(num_items=lambda batch: 0), Examined(ignores_all)):
        gradient = made.run(5, 3)
        made.examiner.check_first(gradient)
        assert made.examiner.notices(gradient) == []


def losses(*factors: float) -> Any:
    """The plain loss times one factor after the other."""
    left = list(factors)
    return lambda model, batch: plain(model, batch) * left.pop(0)


def test_the_loss_of_the_first_window_that_counts_is_finite() -> None:
    made = Examined(losses(float("inf")))
    with pytest.raises(NonFiniteLossError, match="inf"):
        made.examiner.check_first(made.run(8))
    made = Examined(losses(1.0, float("nan")))
    made.examiner.check_first(made.run(8))
    made.examiner.check_first(made.run(8))  # a later one is for others to say


def test_a_window_in_which_nothing_counts_is_not_the_first() -> None:
    counts = [0, 8]
    made = Examined(losses(float("nan")), num_items=lambda batch: counts.pop(0))
    made.examiner.check_first(made.run(8))
    gradient = made.run(8)
    with pytest.raises(NonFiniteLossError):
        made.examiner.check_first(gradient)


def steps_itself(model: Any, batch: Any) -> torch.Tensor:
    loss = plain(model, batch)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("sizes", [(8,), (4, 4)])
def test_a_loss_that_changes_gradients_is_refused(sizes: Sequence[int]) -> None:
    with pytest.raises(LossSideEffectError):
        Examined(steps_itself).attempt(*sizes)


def test_whole_windows_after_the_first_are_not_looked_at_and_parts_are() -> None:
    tampers = {"now": False}
    made = Examined(lambda model, batch: (steps_itself if tampers["now"] else plain)(model, batch))
    made.examiner.check_first(made.run(8))
    tampers["now"] = True
    made.attempt(8)
    with pytest.raises(LossSideEffectError):
        made.attempt(4, 4)


def test_what_was_looked_at_is_kept() -> None:
    fresh, first, last = Examined(), Examined(), Examined()
    first.examiner.check_first(first.run(8))
    last.examiner.check_first(last.run(4, 4))
    last.causes(4, 4)
    for made, looks, refuses in ((fresh, True, True), (first, True, False), (last, False, False)):
        resumed = Examined(losses(float("nan")))
        resumed.examiner.load_state_dict(made.examiner.state_dict())
        assert resumed.looks is looks
        gradient = resumed.run(8)
        if refuses:
            with pytest.raises(NonFiniteLossError):
                resumed.examiner.check_first(gradient)
        else:
            resumed.examiner.check_first(gradient)
