"""Steps of the optimizer that nobody means are refused where they are taken first; all others pass."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoaccum
from autoaccum.errors import AlreadySteppedError, LossSideEffectError
from autoaccum.events import Notice
from autoaccum.step.optimizer_step import strays_of

Optimizer = torch.optim.Optimizer
DRAWN = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(6, 4, generator=DRAWN), torch.arange(6) % 3) for _ in range(3)]


def made(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, kind(model.parameters(), **({"lr": 0.1} | options))


def accumulator_of(model: nn.Module, optimizer: Any) -> autoaccum.Accumulator:
    return autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=4, verify=False)


def hooks_of(optimizer: Any) -> int:
    return len(optimizer._optimizer_step_pre_hooks)


def keeping(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_scaler(optimizer: Optimizer) -> None:
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def without_closure(optimizer: Optimizer) -> None:
    optimizer.step(None)  # as what wraps an optimizer does


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for p in optimizer.param_groups[0]["params"]]


def clipping(optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def clipping_nothing(optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)


def clipping_values(optimizer: Optimizer) -> None:
    nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.001)


def dividing(optimizer: Optimizer) -> None:
    for gradient in gradients_of(optimizer):
        gradient.div_(8)


def clipping_by_scaler(optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer)
    clipping(optimizer)
    scaler.step(optimizer)


CHANGES = [clipping, clipping_nothing, clipping_values, dividing, clipping_by_scaler]


@pytest.mark.filterwarnings("ignore:Gradients were clipped")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "before", [lambda optimizer: None, Optimizer.zero_grad, keeping, by_scaler, without_closure, *CHANGES]
)
def test_a_step_that_was_left_in_is_refused_before_it_writes(kind: Any, before: Callable[[Any], None]) -> None:
    model, optimizer = made(kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    accumulator = accumulator_of(model, optimizer)
    accumulator.step(BATCHES[0])
    expected = [p.clone() for p in model.parameters()]

    def left_in() -> None:
        before(optimizer)
        optimizer.step()

    with pytest.raises(
        AlreadySteppedError, match=r"^(SGD|AdamW)\.step\(\) has nothing to do: accumulator\.step\(batch\) has t"
    ):
        left_in()
    assert all(map(torch.equal, model.parameters(), expected))
    accumulator.step(BATCHES[1])
    assert not any(map(torch.equal, model.parameters(), expected))


def adding(optimizer: Optimizer) -> None:
    """As the step of another network, through which the loss goes, leaves it there."""
    for gradient in gradients_of(optimizer):
        gradient.add_(torch.randn_like(gradient))


def logging_the_norm(optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], float("inf"))


def looking(optimizer: Optimizer) -> None:
    gradients_of(optimizer)[0].norm()


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (clipping, True),
        (clipping_nothing, False),
        (clipping_values, True),
        (dividing, True),
        (keeping, False),
        (Optimizer.zero_grad, False),
        (adding, False),
        (logging_the_norm, False),
        (looking, False),
    ],
)
@pytest.mark.parametrize("zeroes", [None, False, True])
def test_a_gradient_that_is_clipped_after_its_step_is_told_once(
    change: Callable[[Any], None], is_told: bool, zeroes: bool | None
) -> None:
    model, optimizer = made()
    accumulator = accumulator_of(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in BATCHES:
            accumulator.step(batch)
            change(optimizer)
            if zeroes is not None:
                optimizer.zero_grad(set_to_none=zeroes)
    told_of = is_told and zeroes is not False  # by which nothing is left to be looked at
    told = [event.cause for event in accumulator.events if isinstance(event, Notice)]
    assert told == ["Gradients were clipped, or scaled, after accumulator.step had stepped on them"] * told_of


def test_a_gradient_of_backward_may_be_clipped() -> None:
    model, optimizer = made()
    accumulator = accumulator_of(model, optimizer)
    for batch in BATCHES:
        accumulator.backward(batch)
        clipping(optimizer)
        optimizer.step()
    accumulator.step(BATCHES[0])
    assert not [event for event in accumulator.events if isinstance(event, Notice)]


def test_a_gradient_of_ones_own_is_stepped_on() -> None:
    model, optimizer = made()
    accumulator = accumulator_of(model, optimizer)
    for inputs, targets in BATCHES:
        accumulator.step((inputs, targets))
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert not any(map(torch.equal, model.parameters(), before))


def test_a_backward_onto_the_gradient_that_was_stepped_on_is_refused() -> None:
    model, optimizer = made()
    accumulator_of(model, optimizer).step(BATCHES[0])
    cross_entropy(model(BATCHES[0][0]), BATCHES[0][1]).backward()
    with pytest.raises(AlreadySteppedError, match=r"Call optimizer.zero_grad\(\) before a backward of your own"):
        optimizer.step()


def test_after_backward_the_step_is_the_callers() -> None:
    model, optimizer = made()
    accumulator, other = accumulator_of(model, optimizer), accumulator_of(model, optimizer)
    for batch in BATCHES:
        accumulator.step(batch)
        other.backward(batch)  # whoever of those that share it leaves the gradient
        optimizer.step()
    other.step(BATCHES[0])
    with pytest.raises(AlreadySteppedError):
        optimizer.step()


def test_a_closure_computes_a_gradient_of_its_own() -> None:
    model, optimizer = made(torch.optim.LBFGS)
    accumulator = accumulator_of(model, optimizer)
    accumulator.step(BATCHES[0])
    optimizer.step(lambda: accumulator.backward(BATCHES[0]))
    accumulator.step(BATCHES[1])
    optimizer.step(closure=lambda: accumulator.backward(BATCHES[0]))


def test_schedulers_and_other_optimizers_are_let_alone() -> None:
    model, optimizer = made()
    other = torch.optim.Adam(model.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1) for one in (optimizer, other)]
    first, second = accumulator_of(model, optimizer), accumulator_of(model, other)
    for batch in BATCHES:
        first.step(batch)
        second.step(batch)
        for schedule in schedules:
            schedule.step()
    first.step(BATCHES[0])
    other.step()  # of another optimizer: what it does with this gradient is its own matter


def test_a_step_within_a_window_is_refused() -> None:
    model, optimizer = made()

    def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
        optimizer.step()  # which finds no gradient in the first micro-batch, and a part of one in the second
        return cross_entropy(model(batch[0]), batch[1])

    given: dict[str, Any] = {"training_step": training_step, "optimizer": optimizer}
    with pytest.raises(LossSideEffectError, match=r"called optimizer\.step\(\)"):
        autoaccum.fit(model, BATCHES[0], effective_batch=6, progress=False, **given)
    with pytest.raises(LossSideEffectError, match=r"called optimizer\.step\(\)"):
        autoaccum.Accumulator(model, **given).step(BATCHES[0])
    optimizer.step()  # the windows are over


def test_copies_are_nobodys() -> None:
    class Copied(torch.optim.SGD):
        def __getstate__(self) -> dict[str, Any]:
            return dict(self.__dict__)

    Copied.__qualname__, globals()["Copied"] = "Copied", Copied
    for kind in (torch.optim.AdamW, Copied):
        model, optimizer = made(kind)
        accumulator = accumulator_of(model, optimizer)
        accumulator.step(BATCHES[0])
        for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            other.step()
        with pytest.raises(AlreadySteppedError):
            optimizer.step()


def test_it_keeps_nothing_of_an_accumulator() -> None:
    model, optimizer = made()
    accumulators = [accumulator_of(model, optimizer) for _ in range(3)]
    assert hooks_of(optimizer) == 1
    for accumulator in accumulators:
        accumulator.step(BATCHES[0])
    left = [weakref.ref(accumulator) for accumulator in accumulators]
    # One that is still there keeps nothing of another one's.
    transaction = weakref.ref(accumulators[0]._step.transaction)
    del accumulator, accumulators[0]
    gc.collect()
    assert transaction() is None
    del accumulators
    gc.collect()
    assert [reference() for reference in left] == [None] * 3
    of_optimizer = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert of_optimizer() is None


def test_what_wraps_an_optimizer_is_looked_through() -> None:
    class Wrapper(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

    _, optimizer = made()
    assert strays_of(Wrapper(optimizer)) is strays_of(Wrapper(Wrapper(optimizer))) or hooks_of(optimizer) == 0
    kept = strays_of(optimizer)
    assert strays_of(Wrapper(Wrapper(optimizer))) is kept
    assert hooks_of(optimizer) == 1

    class Without(Optimizer):
        def __init__(self) -> None: ...

    strays_of(Without()).expect()  # nothing can be heard of it, and nothing fails


def test_sparse_gradients() -> None:
    model = nn.EmbeddingBag(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = accumulator_of(model, optimizer)
    batch = (torch.arange(6)[:, None] % 5, torch.arange(6) % 3)
    accumulator.step(batch)
    with pytest.raises(AlreadySteppedError):
        optimizer.step()
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def test_a_backward_that_was_left_in_the_loop_is_refused_and_deleting_it_works() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=mse_loss)
    for loss in (accumulator.step((x, y)), accumulator.backward((x, y))):
        for left in (loss, loss / 4):
            with pytest.raises(RuntimeError, match="does not require grad"):
                left.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    before = model.weight.detach().clone()
    loss = accumulator.step((x, y))
    assert not torch.equal(before, model.weight)
    # In a sum with a loss of another model it is a number like any other.
    (mse_loss(other(x), y) + loss).backward()
    (loss * mse_loss(other(x), y)).backward()
    assert other.weight.grad is not None


def test_the_loss_that_is_returned_is_a_tensor_like_any_other(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mse_loss)
    loss = accumulator.step((torch.randn(8, 3), torch.randn(8, 1)))
    torch.save({"loss": loss}, tmp_path / "loss.pt")
    kept = torch.load(tmp_path / "loss.pt", weights_only=True)["loss"]
    for one in (kept, copy.deepcopy(loss), loss.detach(), loss + 0, torch.stack([loss, loss]).mean()):
        assert type(one) is torch.Tensor
        assert one.item() == float(loss) == loss.numpy()
    assert repr(loss) == repr(kept) == str(loss)
    assert f"{loss:.4f}" == f"{loss.item():.4f}"
    assert not loss.requires_grad
