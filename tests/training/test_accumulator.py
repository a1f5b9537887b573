"""The windows of ``fit`` in a loop of one's own."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR

import autoaccum
from autoaccum import Accumulator, errors
from autoaccum.events import Notice, OutOfMemory, Planned, Replanned, StepSkipped, Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.faults import Operations, strides
from tests.models import classes, mlp, noisy, relative_error, same, wide

pytestmark = pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")


def batches(sizes: list[int], dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [classes(size, dtype, seed=index) for index, size in enumerate(sizes)]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    entries = [e for state in optimizer.state.values() for e in state.values() if isinstance(e, torch.Tensor)]
    return [t.clone() for t in (*model.parameters(), *model.buffers(), *entries, torch.get_rng_state())]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, scheduler: Any = None) -> list[float]:
    """The loop of big batches that a person writes."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


class TestGradient:
    @pytest.mark.parametrize("micro_batch", [1, 3, 100, "auto"])
    def test_is_that_of_the_batch_whatever_its_size(self, micro_batch: Any) -> None:
        data = batches([12, 5, 1, 30, 12])
        hand, own = mlp(torch.float64), mlp(torch.float64)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (hand, own)]
        schedulers = [StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
        expected = by_hand(hand, optimizers[0], data, schedulers[0])
        accumulator = Accumulator(own, optimizers[1], loss_fn=cross_entropy, micro_batch=micro_batch)
        losses = []
        for batch in data:
            losses.append(accumulator.step(batch).item())
            schedulers[1].step()
            assert sum(accumulator.micro_batches) == len(batch[0])
        assert losses == pytest.approx(expected, rel=1e-12)
        for p, q in zip(own.parameters(), hand.parameters(), strict=True):
            assert relative_error(p.detach(), q.detach()) < 1e-10
        assert schedulers[1].get_last_lr() == schedulers[0].get_last_lr()

    def test_is_left_for_a_step_of_ones_own(self) -> None:
        (batch,) = batches([10])
        model, big = mlp(torch.float64), mlp(torch.float64)
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=cross_entropy, micro_batch=3, clip_norm=1e-3
        )
        before = [p.clone() for p in model.parameters()]
        for _ in range(2):  # the second drops the gradient of the first
            loss = accumulator.backward(batch)
        expected = cross_entropy(big(batch[0]), batch[1])
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        norm = nn.utils.clip_grad_norm_(big.parameters(), 1e-3)
        assert accumulator.grad_norm is not None
        assert accumulator.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        for p, q in zip(model.parameters(), big.parameters(), strict=True):
            assert relative_error(p.grad, q.grad) < 1e-12  # type: ignore[arg-type]
        assert same(before, list(model.parameters()))

    def test_is_measured_where_it_is_not_clipped(self) -> None:
        (batch,) = batches([10])
        model, big = mlp(torch.float64), mlp(torch.float64)
        accumulator = Accumulator(
            model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=cross_entropy, micro_batch=3
        )
        assert accumulator.grad_norm is None, "before the first"
        accumulator.step(batch)
        cross_entropy(big(batch[0]), batch[1]).backward()
        expected = torch.cat([p.grad.flatten() for p in big.parameters() if p.grad is not None]).norm()
        assert accumulator.grad_norm is not None
        assert accumulator.grad_norm.item() == pytest.approx(expected.item(), rel=1e-12)

    @pytest.mark.parametrize("by_backward", [False, True])
    def test_closures_are_given_to_those_that_need_one(self, by_backward: bool) -> None:
        data = batches([20, 20])
        hand, own = mlp(torch.float64), mlp(torch.float64)
        first = torch.optim.LBFGS(hand.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        second = torch.optim.LBFGS(own.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        accumulator = Accumulator(own, second, loss_fn=cross_entropy, micro_batch=6)
        for batch in data:

            def closure(batch: Any = batch) -> torch.Tensor:
                first.zero_grad()
                loss = cross_entropy(hand(batch[0]), batch[1])
                loss.backward()
                return loss

            expected: Any = first.step(closure)
            if by_backward:
                found = second.step(lambda batch=batch: accumulator.backward(batch))  # type: ignore[arg-type,misc]
            else:
                found = accumulator.step(batch)
            assert float(found) == pytest.approx(expected.item(), rel=1e-9)
        for p, q in zip(own.parameters(), hand.parameters(), strict=True):
            assert relative_error(p.detach(), q.detach()) < 1e-6

    def test_other_forms_of_loss(self) -> None:
        class WithLoss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = mlp(torch.float64)

            def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": cross_entropy(self.net(inputs), labels)}

        (batch,) = batches([10])
        model, big = WithLoss(), mlp(torch.float64)
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4)
        loss = accumulator.step({"inputs": batch[0], "labels": batch[1]})
        assert loss.item() == pytest.approx(cross_entropy(big(batch[0]), batch[1]).item(), rel=1e-12)
        assert not loss.requires_grad

    def test_under_no_grad(self) -> None:
        model = mlp()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
        with torch.no_grad():
            accumulator.step(classes(4))
        assert all(p.grad is not None for p in model.parameters())


class TestReplay:
    @strides(5)
    def test_oom_at_every_operation_leaves_no_mark(self, stride: int) -> None:
        data = batches([6, 5], torch.float32)

        def run(micro_batches: list[int], faults: Any) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
            """What two batches leave, the first of them within ``faults``, and how they were cut."""
            model = noisy()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            # What is measured depends on the room there is; tests/laws has faults within it.
            accumulator = Accumulator(
                model, optimizer, loss_fn=cross_entropy, micro_batch=micro_batches[0], verify=False
            )
            plans = []
            torch.manual_seed(1)
            with faults:
                accumulator.backward(data[0])
            plans.append(accumulator.micro_batches)
            optimizer.step()
            if len(micro_batches) > 1:
                other = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=micro_batches[1], verify=False)
                other.step(data[1])
                plans.append(other.micro_batches)
            else:
                accumulator.step(data[1])
                plans.append(accumulator.micro_batches)
            return state_of(model, optimizer), plans

        clean: dict[Any, list[torch.Tensor]] = {}
        replayed = 0
        operations = Operations()
        run([4], operations)
        for fault in operations.every(stride, offset=1):
            try:
                found, plans = run([4], oom_at(fault))
            except torch.OutOfMemoryError:  # while the snapshot is taken: what it writes to is there already
                continue
            replayed += plans[0] != (3, 3)
            key = tuple(plans)
            if key not in clean:
                clean[key], again = run([max(plan) for plan in plans], nullcontext())
                assert again == plans
            assert same(found, clean[key]), f"operation {fault}"
        assert replayed * stride > 100

    def test_a_limit_is_found_and_kept(self) -> None:
        model = wide()
        data = batches([300] * 40, torch.float32)
        with simulated_memory("2MiB") as device:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy)
            for batch in data:
                accumulator.step(batch)
        assert device.peak <= device.limit
        assert 20 < max(accumulator.micro_batches) < 300
        assert len([event for event in accumulator.events if isinstance(event, Planned)]) == 1
        assert sum(isinstance(event, OutOfMemory) for event in accumulator.events) <= 1

    def test_a_larger_batch_than_all_before_is_searched_for(self) -> None:
        model = mlp()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
        for batch in batches([8] * 4 + [64] * 8, torch.float32):
            accumulator.step(batch)
        assert accumulator.micro_batches == (64,)

    @pytest.mark.weighted
    def test_one_sample_too_many_is_a_typed_error_and_leaves_no_mark(self) -> None:
        model = noisy()
        optimizer = torch.optim.AdamW(model.parameters())
        failing = {"now": False}

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            if failing["now"]:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        accumulator = Accumulator(model, optimizer, training_step=step, micro_batch=4, patience=0)
        accumulator.step(classes(8))
        before = state_of(model, optimizer)
        failing["now"] = True
        with pytest.raises(errors.NothingFitsError, match="a micro-batch of 2"):
            accumulator.step(classes(8))
        assert same(state_of(model, optimizer), before)
        failing["now"] = False
        accumulator.step(classes(8))
        assert accumulator.micro_batches == (2, 2, 2, 2)

    def test_the_callers_batch_is_not_written_to(self) -> None:
        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            batch[0].mul_(0)
            return cross_entropy(model(batch[0]), batch[1])

        model, batch = mlp(), classes(8)
        before = batch[0].clone()
        Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), training_step=step).step(batch)
        assert torch.equal(batch[0], before)


class TestWhatIsSaid:
    def test_events_go_to_callbacks_too(self) -> None:
        seen: list[Any] = []
        model = noisy()
        accumulator = Accumulator(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=cross_entropy,
            micro_batch=4,
            callbacks=[seen.append],
            verify=False,  # the operation is of a forward
        )
        with oom_at(20):
            accumulator.step(classes(8))
        assert seen == accumulator.events
        assert [type(event) for event in seen] == [OutOfMemory, Replanned, Notice]
        assert (seen[0].step, seen[0].micro_batch) == (1, 4)

    def test_batch_norm_is_never_shown_one_sample_in_training_mode(self) -> None:
        sizes: list[int] = []
        model = noisy()
        model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        model.eval()
        accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
        accumulator.step(classes(5))
        assert min(sizes) == 1
        model.train()
        sizes.clear()
        for _ in range(3):
            accumulator.step(classes(5))
        assert min(sizes) >= 2
        model[1].eval()  # frozen alone, while the model trains on
        sizes.clear()
        accumulator.step(classes(5))
        model[1].train()
        accumulator.step(classes(5))
        assert sizes[-1] >= 2

    def test_a_batch_without_items_takes_no_step(self) -> None:
        model, (inputs, targets) = mlp(), classes(6)
        optimizer = torch.optim.AdamW(model.parameters())
        accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=2)
        before = [p.clone() for p in model.parameters()]
        with pytest.warns(autoaccum.AutoaccumWarning, match="Nothing in window 1 counts"):
            accumulator.step((inputs, targets.fill_(-100)))
        accumulator.step((inputs, targets))
        assert accumulator.backward((inputs, targets)).isnan()
        assert [type(event) for event in accumulator.events] == [Notice, StepSkipped, StepSkipped]
        assert same(before, list(model.parameters()))

    def test_float16_overflow_skips_the_whole_step_once(self) -> None:
        model, (inputs, targets) = mlp(), classes(6)
        optimizer = torch.optim.AdamW(model.parameters())
        scale = {"value": 100.0}
        accumulator = Accumulator(
            model,
            optimizer,
            training_step=lambda m, b: m(b[0]).float().square().mean() * scale["value"],
            micro_batch=2,
            precision="fp16",
        )
        before = [p.clone() for p in model.parameters()]
        accumulator.step((inputs, targets))
        assert [type(event) for event in accumulator.events] == [Verified, StepSkipped]
        assert same(before, list(model.parameters()))
        scale["value"] = 1.0
        for _ in range(20):
            accumulator.step((inputs, targets))
        assert not same(before, list(model.parameters()))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"model": print}, errors.ArgumentTypeError, "model="),
        ({"optimizer": torch.optim.SGD}, errors.ArgumentTypeError, "optimizer="),
        ({"optimizer": torch.optim.SGD(mlp().parameters())}, errors.ForeignOptimizerError, "It holds none of them"),
        ({"loss_fn": "ce"}, errors.ArgumentTypeError, "loss_fn='ce'"),
        ({"training_step": print}, errors.ConflictingArgumentsError, "leave loss_fn out"),
        ({"num_items": 3}, errors.ArgumentTypeError, "num_items=3"),
        ({"micro_batch": 0}, errors.ArgumentError, "micro_batch=0"),
        ({"micro_batch": [(2, 2)]}, errors.ArgumentTypeError, "micro_batch="),
        ({"max_micro_batch": 0}, errors.ArgumentError, "max_micro_batch=0"),
        ({"memory_limit": "much"}, errors.ArgumentError, "memory_limit='much'"),
        ({"memory_limit": "1MiB"}, errors.LimitBelowModelError, r"1\.00 MiB may be used"),
        ({"headroom": 1}, errors.ArgumentError, "headroom=1"),
        ({"precision": "fp8"}, errors.ArgumentError, "precision='fp8'"),
        ({"clip_norm": -1}, errors.ArgumentError, "clip_norm=-1"),
        ({"callbacks": [3]}, errors.ArgumentTypeError, "callbacks="),
    ],
)
def test_bad_input(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = options.pop("model", None) or mlp()
    made = {"loss_fn": cross_entropy, **options}
    optimizer = made.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.SGD(mlp().parameters()) if model is print else torch.optim.SGD(model.parameters())
    with pytest.raises(kind, match=message):
        Accumulator(model, optimizer, **made)


def test_what_float16_cannot_do() -> None:
    model = mlp()
    with pytest.raises(errors.ConflictingArgumentsError, match="optimizer=LBFGS"):
        Accumulator(model, torch.optim.LBFGS(model.parameters()), loss_fn=mse_loss, precision="fp16")
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), loss_fn=cross_entropy, precision="fp16")
    with pytest.raises(errors.ConflictingArgumentsError, match=r"backward\(\)"):
        accumulator.backward(classes(4))


@pytest.mark.parametrize("batch", [3, {}, (torch.ones(3, 8), torch.ones(2)), torch.ones(3, 8)])
def test_bad_batches(batch: Any) -> None:
    model = mlp()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), loss_fn=cross_entropy)
    with pytest.raises(errors.DataError):
        accumulator.step(batch)


def test_fit_points_here_for_closures() -> None:
    with pytest.raises(errors.ArgumentTypeError, match=r"autoaccum\.Accumulator"):
        autoaccum.fit(
            mlp(),
            classes(4),
            effective_batch=4,
            loss_fn=cross_entropy,
            optimizer=torch.optim.LBFGS,
            device="cpu",
            progress=False,
        )


class TestState:
    def test_goes_on_to_the_bit_without_a_search(self) -> None:
        data = batches([40] * 8)

        def made() -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
            model = mlp(torch.float64)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return model, optimizer, Accumulator(model, optimizer, loss_fn=cross_entropy, max_micro_batch=16)

        model, optimizer, accumulator = made()
        for batch in data[:4]:
            accumulator.step(batch)
        kept = accumulator.state_dict(), model.state_dict(), optimizer.state_dict()
        kept = torch.load(io.BytesIO(saved(kept)), weights_only=True)
        losses = [accumulator.step(batch).item() for batch in data[4:]]
        again, own, resumed = made()
        resumed.load_state_dict(kept[0])
        again.load_state_dict(kept[1])
        own.load_state_dict(kept[2])
        assert [resumed.step(batch).item() for batch in data[4:]] == losses
        assert resumed.micro_batches == accumulator.micro_batches
        # A new one begins by measuring, and by sizes that grow.
        assert [event for event in resumed.events if isinstance(event, Planned | Verified)] == []
        assert any(isinstance(event, Verified) for event in accumulator.events)

    def test_of_another_device_is_searched_for_anew(self) -> None:
        data, sizes = batches([40] * 6), []
        for device in ("cpu of somebody", None):
            model = mlp(torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            accumulator = Accumulator(model, optimizer, loss_fn=cross_entropy)
            for batch in data:
                accumulator.step(batch)
            state = accumulator.state_dict()
            resumed = Accumulator(model, optimizer, loss_fn=cross_entropy)
            resumed.load_state_dict(state if device is None else state | {"device": device})
            resumed.step(data[0])
            sizes.append(resumed.micro_batches)
        assert sizes[1] == (40,)
        assert len(sizes[0]) > 1  # micro-batches that grow


def test_a_state_of_something_else_is_refused_before_anything_is_changed() -> None:
    model = mlp()
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
    accumulator.step(batches([8], torch.float32)[0])
    own = accumulator.state_dict()
    for state in ({}, dict(model.state_dict()), None):
        with pytest.raises(errors.CheckpointCorruptError, match="state_dict is none of an Accumulator"):
            accumulator.load_state_dict(state)  # type: ignore[arg-type]
    assert accumulator.state_dict() == own
    accumulator.load_state_dict(own)


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def test_another_one_goes_on_with_what_was_found_out() -> None:
    # As in a program that was ended and started again: the sizes are not searched for, the loss is not measured again.
    found: list[tuple[set[type], int]] = []
    state: dict[str, Any] = {}
    for num_windows in (40, 2):
        model = wide()
        with simulated_memory("2MiB"):
            accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=cross_entropy)
            if state:
                accumulator.load_state_dict(state)
            for batch in batches([300] * num_windows, torch.float32):
                accumulator.backward(batch)
        state = accumulator.state_dict()
        found.append(({type(event) for event in accumulator.events}, max(accumulator.micro_batches)))
    (first, size), (second, again) = found
    assert {Verified, Planned} <= first
    assert not {Verified, Planned, OutOfMemory} & second
    assert 20 < size == again < 300
