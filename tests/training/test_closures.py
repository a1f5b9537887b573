"""Optimizers that ask for gradients themselves, in either order: what they do is what they do in a loop of big batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum import Accumulator, errors
from autoaccum.events import Event, OutOfMemory, StepSkipped
from autoaccum.testing import oom_at
from tests.devices import DEVICE, there
from tests.faults import Operations, strides
from tests.models import classes, mlp, relative_error, same


class TwoSteps(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is mostly written: an optimizer within one, whose groups it shares."""

    def __init__(self, params: Any, rho: float = 0.05, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in held]), p=2)
        for p in held:
            self.state[p]["old_p"] = p.data.clone()
            self.move(p, p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    def move(self, p: torch.Tensor, by: torch.Tensor) -> None:
        p.add_(by)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old_p" in self.state[p]:
                    p.data = self.state[p]["old_p"]
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        loss = closure()
        self.second_step()
        return loss


class Uncounted(TwoSteps):
    """It writes where no counter is moved, and leaves the gradient as it is."""

    def move(self, p: torch.Tensor, by: torch.Tensor) -> None:
        p.data.add_(by)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if closure is None:
            raise ValueError("a closure, please")
        self.first_step(zero_grad=False)
        loss = closure()
        self.second_step()
        return loss


class Demanding(TwoSteps):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class AnyArguments(TwoSteps):
    def step(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().step(*args, **kwargs)


class ClosureFirst(TwoSteps):
    """It asks for both gradients; what was there before is dropped."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.zero_grad()
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class DemandingFirst(ClosureFirst):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Optional(torch.optim.SGD):
    """It does with a closure or without, as PyTorch's own do, and counts how often it is given one."""

    given = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.given += closure is not None
        return super().step(closure)


def net() -> nn.Module:
    """With random numbers and buffers, so that it shows how often, and in which order, forwards are run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)).double()


Make = Callable[[Any], torch.optim.Optimizer]
FIRST_USE_WHAT_IS_THERE: dict[str, Make] = {
    "asserts": TwoSteps, "raises": Uncounted, "demands": Demanding, "takes anything": AnyArguments,
    "adaptive rho": lambda params: TwoSteps(params, rho=0.5, lr=0.01),
}  # fmt: skip
CALL_IT_FIRST: dict[str, Make] = {
    "drops what is there": DemandingFirst,
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
    "LBFGS, searching": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
}
DO_WITHOUT: dict[str, Make] = {
    "its own": lambda params: Optional(params, lr=0.1),
    "PyTorch's": lambda params: torch.optim.Adam(params, lr=0.1),
}
DATA = [there(classes(20, torch.float64, seed=seed)) for seed in range(4)]


def by_hand(model: nn.Module, optimizer: Any, *, before: bool, closure: bool = True) -> list[float]:
    """The loop of big batches: with a backward before the step, or without."""
    losses = []
    for inputs, targets in DATA:

        def evaluate(inputs: Any = inputs, targets: Any = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        if before:
            losses.append(evaluate().item())
            optimizer.step(*([evaluate] if closure else []))
        else:
            losses.append(optimizer.step(evaluate).item())
    return losses


def left_by(model: nn.Module) -> list[torch.Tensor]:
    return [*(t.detach().clone() for t in (*model.parameters(), *model.buffers())), torch.get_rng_state()]


def by_us(model: nn.Module, optimizer: Any, micro_batch: Any) -> tuple[list[float], list[Event]]:
    accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=micro_batch)
    return [accumulator.step(batch).item() for batch in DATA], accumulator.events


KINDS = [
    *[(name, make, True, True) for name, make in FIRST_USE_WHAT_IS_THERE.items()],
    *[(name, make, False, True) for name, make in CALL_IT_FIRST.items()],
    *[(name, make, True, False) for name, make in DO_WITHOUT.items()],
]


@pytest.mark.device(every=2)
@pytest.mark.parametrize(("make", "before", "closure"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_whole_batches_are_those_of_a_loop_to_the_bit(make: Make, before: bool, closure: bool) -> None:
    hand = there(net())
    torch.manual_seed(5)
    expected = by_hand(hand, make(hand.parameters()), before=before, closure=closure)
    wanted, own = left_by(hand), there(net())
    torch.manual_seed(5)
    found, _ = by_us(own, make(own.parameters()), 20)
    assert found == expected
    assert same(left_by(own), wanted)


@pytest.mark.device(every=5)
@pytest.mark.parametrize("micro_batch", [1, 6, "auto"])
@pytest.mark.parametrize(("make", "before", "closure"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_cut_batches_come_to_the_same(make: Make, before: bool, closure: bool, micro_batch: Any) -> None:
    hand, own = there(mlp(torch.float64)), there(mlp(torch.float64))
    expected = by_hand(hand, make(hand.parameters()), before=before, closure=closure)
    found, _ = by_us(own, make(own.parameters()), micro_batch)
    assert found == pytest.approx(expected, rel=1e-9)
    for p, q in zip(own.parameters(), hand.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) < 1e-8


def test_those_that_do_without_are_given_none() -> None:
    model = mlp(torch.float64)
    optimizer = Optional(model.parameters(), lr=0.1)
    by_us(model, optimizer, 6)
    assert optimizer.given == 0


def test_one_that_is_resumed_is_given_a_closure() -> None:
    model = mlp(torch.float64)
    first, again = (Accumulator(model, TwoSteps(model.parameters()), loss_fn=cross_entropy) for _ in range(2))
    first.step(DATA[0])
    again.load_state_dict(first.state_dict())
    assert again.step(DATA[0]).isfinite()


class TestErrors:
    def test_that_do_not_name_a_closure_say_what_to_do(self) -> None:
        class Late(TwoSteps):
            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                self.first_step(zero_grad=True)
                return closure()

        model = mlp(torch.float64)
        with pytest.raises(TypeError, match="not callable") as caught:
            by_us(model, Late(model.parameters()), 6)
        assert any("def step(self, closure)" in note for note in caught.value.__notes__)

    def test_that_are_no_matter_of_a_closure_come_out_as_they_are(self) -> None:
        class Broken(torch.optim.SGD):
            calls = 0

            def step(self, closure: Any = None) -> Any:  # type: ignore[override]
                self.calls += 1
                raise KeyError("mine")

        model = mlp(torch.float64)
        optimizer = Broken(model.parameters(), lr=0.1)
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                by_us(model, optimizer, 6)
        with pytest.raises(KeyError, match="mine"):
            autoaccum.fit(
                model, DATA[0], effective_batch=20, loss_fn=cross_entropy, optimizer=optimizer, device=DEVICE,
                progress=False,
            )  # fmt: skip

    def test_of_the_second_evaluation_come_out_as_they_are(self) -> None:
        class Fails(TwoSteps):
            def second_step(self) -> None:
                raise KeyError("later")

        model = mlp(torch.float64)
        with pytest.raises(KeyError, match="later"):
            by_us(model, Fails(model.parameters()), 6)

    @pytest.mark.parametrize("make", [TwoSteps, Uncounted, Demanding, AnyArguments])
    def test_of_fit_which_has_none_to_give(self, make: Make) -> None:
        model = mlp(torch.float64)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(errors.ArgumentTypeError, match=r"needs no closure.*autoaccum\.Accumulator"):
            autoaccum.fit(
                model, DATA[0], effective_batch=20, loss_fn=cross_entropy, optimizer=make(model.parameters()),
                device=DEVICE, progress=False,
            )  # fmt: skip
        assert same(list(before.values()), list(model.state_dict().values()))

    @pytest.mark.parametrize(
        "by",
        [
            lambda model, optimizer: by_us(model, optimizer, 6),
            lambda model, optimizer: autoaccum.fit(
                model, DATA[0], effective_batch=20, loss_fn=cross_entropy, optimizer=optimizer, progress=False
            ),
        ],
    )
    def test_of_gradients_without_a_graph(self, by: Any) -> None:
        class Curved(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                p = self.param_groups[0]["params"][0]
                self.state[p]["taken"] = 1
                torch.autograd.grad(p.grad, p, torch.ones_like(p), retain_graph=True)
                super().step()

        Curved.__module__ = "a library"
        model = mlp(torch.float64)
        before = copy.deepcopy(model.state_dict())
        optimizer = Curved(model.parameters(), lr=0.1)
        with pytest.raises(errors.ArgumentError, match=r"optimizer='Curved'.*create_graph=True.*loop of your own"):
            by(model, optimizer)
        assert same(list(before.values()), list(model.state_dict().values()))

    def test_float16_has_none_either(self) -> None:
        model = mlp()
        with pytest.raises(errors.ConflictingArgumentsError, match="optimizer=Demanding"):
            Accumulator(model, Demanding(model.parameters()), loss_fn=cross_entropy, precision="fp16")

    def test_a_batch_of_which_nothing_counts_is_not_stepped_on(self) -> None:
        model = mlp(torch.float64)
        before = [p.detach().clone() for p in model.parameters()]
        accumulator = Accumulator(
            model, torch.optim.LBFGS(model.parameters()), loss_fn=lambda o, t: cross_entropy(o, t, ignore_index=7)
        )
        with pytest.warns(errors.AutoaccumWarning, match="nothing|item"):
            accumulator.step((DATA[0][0], torch.full((20,), 7)))
        assert [event for event in accumulator.events if isinstance(event, StepSkipped)]
        assert same(before, list(model.parameters()))


def stepped(micro_batch: int, around: Any = None) -> tuple[list[torch.Tensor], list[Event], tuple[int, ...]]:
    model = mlp(torch.float64)
    optimizer = Demanding(model.parameters())
    accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=micro_batch, verify=False)
    with nullcontext() if around is None else around:
        accumulator.step(DATA[0])
    return left_by(model), accumulator.events, accumulator.micro_batches


@strides(3)
def test_memory_that_runs_out_in_a_window_is_replayed_and_between_them_is_said(stride: int) -> None:
    operations = Operations()
    expected = stepped(10, operations)[0]
    replayed = said = 0
    for place in operations.every(stride):
        try:
            found, events, _ = stepped(10, oom_at(place))
        except errors.OptimizerOutOfMemoryError:
            said += 1
            continue
        replayed += any(isinstance(event, OutOfMemory) and event.phase == "training" for event in events)
        # Cut otherwise from somewhere on, the sums are rounded otherwise.
        for p, q in zip(found[:-1], expected[:-1], strict=True):
            assert relative_error(p, q) < 1e-12, place
    assert replayed > 5
    assert said > 5
