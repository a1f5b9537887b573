"""A window as a transaction, where ``fit`` does not show it."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.errors import OptimizerOutOfMemoryError
from autoaccum.events import Replanned, StepReport
from autoaccum.memory.devices import memory_of
from autoaccum.step.gradient import Gradient
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.step import Step
from autoaccum.testing import oom_at, simulated_memory
from autoaccum.training.setup import GivenBatch
from tests.devices import DEVICE
from tests.faults import Operations, strides
from tests.models import classes, mlp, noisy, same
from tests.step.making import step_of

HERE = torch.device(DEVICE)


class Node:
    """Refers to itself, so that only a look for cycles frees what it holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.itself, self.tensor = self, tensor


@pytest.mark.device
def test_recovery_frees_what_the_failed_forward_held() -> None:
    """Not only its locals, which an exception would pin, but reference cycles that it left behind."""
    gone: list[Any] = []
    live: list[Any] = []

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = self.net(inputs)
            if len(inputs) == 8:
                gone.extend([weakref.ref(outputs), weakref.ref(Node(torch.ones(3)))])
                raise torch.OutOfMemoryError("CUDA out of memory.")
            live.extend(ref() is not None for ref in gone)
            return outputs  # type: ignore[no-any-return]

    gc.disable()
    try:
        autoaccum.fit(
            Fails(), classes(8), effective_batch=8, micro_batch=8, loss_fn=cross_entropy, device=DEVICE, progress=False
        )
    finally:
        gc.enable()
    assert live == [False] * 4  # two micro-batches, two references each


def test_recovery_frees_what_a_trial_that_failed_has_left_in_a_cycle() -> None:
    """In a search it is first looked at whether anything is left, for to look for cycles takes long."""
    live: list[bool] = []
    kept: list[Any] = []

    class Cycles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            live.extend(ref() is not None for ref in kept)
            kept.clear()
            if len(inputs) > 4:
                kept.append(weakref.ref(Node(torch.ones(10_000))))
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return self.net(inputs)  # type: ignore[no-any-return]

    gc.disable()
    try:
        with simulated_memory("1GiB"):
            found = autoaccum.fit(
                Cycles(), classes(64), effective_batch=16, steps=4, loss_fn=cross_entropy, device="cpu",
                progress=False, cache=False, verify=False, memory_saving="off",
            )  # fmt: skip
    finally:
        gc.enable()
    assert max(max(report.micro_batches) for report in found.history) == 4
    assert live
    assert not any(live)


def test_recovery_frees_what_others_have_left_in_cycles_between_windows() -> None:
    def leave(record: Any) -> None:
        if isinstance(record, StepReport) and record.step in (1, 3):
            Node(torch.ones(50_000))

    def train(limit: int, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 3))
        with simulated_memory(limit) as device:
            found = autoaccum.fit(
                model, classes(128), effective_batch=16, micro_batch=16, steps=6, loss_fn=cross_entropy, device="cpu",
                progress=False, cache=False, verify=False, memory_saving="off", patience=0, headroom=0.0, **options,
            )  # fmt: skip
        return found, device

    _, plain = train(1 << 40)
    gc.disable()
    try:
        found, _ = train(plain.peak + 1000, callbacks=[leave])
    finally:
        gc.enable()
    # Micro-batches of a size that the user gave become smaller for good: once, for the first time that memory runs out.
    assert [report.replays for report in found.history] == [0, 1, 0, 0, 0, 0]
    assert found.history[-1].micro_batches == (8, 8)


@pytest.mark.device
def test_other_errors_come_through_as_they_are() -> None:
    class Broken(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        autoaccum.fit(Broken(8, 3), classes(8), effective_batch=8, loss_fn=cross_entropy, device=DEVICE, progress=False)


@pytest.mark.device
def test_in_place_edits_of_a_micro_batch_do_not_reach_its_replay() -> None:
    failed = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(100)
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return cross_entropy(model(batch[0]), batch[1])

    inputs, targets = classes(8)
    before = inputs.clone()
    batches = [(inputs, targets)]  # the very tensors that are kept for the replay
    options: dict[str, Any] = {"effective_batch": 8, "device": DEVICE, "progress": False, "training_step": step}
    replayed = autoaccum.fit(mlp(), batches, micro_batch=8, **options)
    assert replayed.history[0].replays == 1
    clean = autoaccum.fit(mlp(), batches, micro_batch=4, **options)
    assert replayed.history[0].loss == clean.history[0].loss
    assert torch.equal(inputs, before)


@pytest.mark.device
def test_gradients_of_before_take_no_part() -> None:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    options: dict[str, Any] = {"effective_batch": 8, "loss_fn": cross_entropy, "device": DEVICE, "cache": False}
    options["progress"] = False
    dirty = autoaccum.fit(model, classes(8), **options, clip_norm=1.0)
    clean = autoaccum.fit(mlp(), classes(8), **options, clip_norm=1.0)
    assert dirty.history[0].grad_norm == clean.history[0].grad_norm


@pytest.mark.device
def test_unused_parameters_are_not_stepped() -> None:
    """Their gradient stays None, as in the big batch: zeros would let weight decay and momentum move them."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)  # type: ignore[no-any-return]

    model = Unused()
    autoaccum.fit(
        model,
        classes(8),
        effective_batch=8,
        micro_batch=3,
        loss_fn=cross_entropy,
        device=DEVICE,
        progress=False,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    )
    assert model.unused.tolist() == [1.0] * 3


@pytest.mark.device
def test_items_weigh_micro_batches() -> None:
    """Tokens that are ignored leave micro-batches with unequal items: the mean is over the window's."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, 6, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (10, 6), generator=generator)
    lengths = [6, 1, 0, 0, 0, 2, 6, 3, 5, 1]
    for row, length in enumerate(lengths):
        targets[row, length:] = -100

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    norms = []
    for micro_batch in (10, 3, 1):
        result = autoaccum.fit(
            mlp(torch.float64),
            (inputs, targets),
            effective_batch=10,
            micro_batch=micro_batch,
            training_step=step,
            num_items=lambda batch: (batch[1] != -100).sum(),
            clip_norm=1.0,
            device=DEVICE,
            progress=False,
        )
        norms.append((result.history[0].loss, result.history[0].grad_norm))
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)
    assert norms[2] == pytest.approx(norms[0], rel=1e-12)


@pytest.mark.device
def test_an_oom_while_batches_are_joined_is_replayed() -> None:
    batches = [classes(5, seed=seed) for seed in range(4)]
    options: dict[str, Any] = {"effective_batch": 20, "micro_batch": 20, "loss_fn": cross_entropy, "progress": False}
    trainer = autoaccum.Trainer(mlp(), batches, device=DEVICE, **options)
    with oom_at(1):
        result = trainer.fit()
    assert (result.num_samples, result.history[0].replays) == (20, 1)


@pytest.mark.device
def test_an_expanded_buffer_does_not_hinder_a_replay() -> None:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("ones", torch.ones(1, 8).expand(4, 8))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs * self.ones[0])  # type: ignore[no-any-return]

    trainer = autoaccum.Trainer(
        Expanded(), classes(8), effective_batch=8, micro_batch=8, loss_fn=cross_entropy, device=DEVICE, progress=False
    )
    with oom_at(10):
        assert trainer.fit().history[0].replays == 1


@pytest.mark.device
def test_parameters_added_to_the_optimizer_are_clipped_too() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.0)
    norms: list[float] = []

    def unfreeze(record: object) -> None:
        if isinstance(record, autoaccum.StepReport):
            if record.step == 1:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5)

    autoaccum.fit(
        model,
        classes(16),
        effective_batch=8,
        micro_batch=4,
        loss_fn=cross_entropy,
        optimizer=optimizer,
        clip_norm=1e-3,
        callbacks=[unfreeze],
        device=DEVICE,
        progress=False,
    )
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.device
def test_parameters_of_the_loss_are_trained() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(outputs @ self.weight, targets)

    head = Head()
    autoaccum.fit(mlp(), classes(8), effective_batch=8, loss_fn=head, device=DEVICE, progress=False)
    assert not torch.equal(head.weight.cpu(), torch.eye(3))


@pytest.mark.device
def test_batch_norm_sees_no_single_sample_at_a_streams_end() -> None:
    seen: list[int] = []
    model = noisy()
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    with pytest.warns(autoaccum.AutoaccumWarning, match="BatchNorm"):
        autoaccum.fit(
            model, [classes(13)], effective_batch=8, micro_batch=2, loss_fn=cross_entropy, device=DEVICE, progress=False
        )
    assert seen == [2, 2, 2, 2, 3, 2]


@pytest.mark.device
def test_parameters_of_sixteen_bits_are_announced() -> None:
    with pytest.warns(autoaccum.AutoaccumWarning, match="The model's parameters are bfloat16"):
        autoaccum.fit(
            mlp(torch.bfloat16),
            classes(8, torch.bfloat16),
            effective_batch=8,
            micro_batch=4,
            loss_fn=cross_entropy,
            device=DEVICE,
            progress=False,
        )


class TestLimitThatNobodyElseKeeps:
    """``memory_limit`` below what the device would give: passing it raises nothing."""

    def test_a_size_that_passed_the_limit_is_not_used_again(self) -> None:
        class Jump(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                if len(inputs) > 40:
                    torch.zeros(3 << 20)  # a workspace of 12 MiB
                return super().forward(inputs)

        told = pytest.warns(autoaccum.AutoaccumWarning, match=r"Window 1 took 12\.10 MiB where the limit is 8\.00 MiB")
        with simulated_memory("1GiB"), told:
            result = autoaccum.fit(
                Jump(8, 3),
                classes(2048),
                effective_batch=256,
                memory_limit="8MiB",
                loss_fn=cross_entropy,
                device="cpu",
                progress=False,
            )
        assert max(result.plan.sizes) <= 40
        assert all(max(report.micro_batches) <= 40 for report in result.history[1:])

    def test_what_the_optimizers_step_takes_does_not_shrink_the_plan(self) -> None:
        model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 3))
        weights = sum(p.nbytes for p in model.parameters())

        class Hungry(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                temporaries = [[torch.zeros_like(p) for _ in range(5)] for p in model.parameters()]
                super().step(closure)
                del temporaries

        with simulated_memory("1GiB"):
            result = autoaccum.fit(
                model,
                classes(1536),
                effective_batch=64,
                memory_limit=7 * weights,
                loss_fn=cross_entropy,
                optimizer=Hungry,
                device="cpu",
                progress=False,
            )
        assert not any(isinstance(event, Replanned) for event in result.events)
        assert max(report.peak_bytes for report in result.history) > 6 * weights


@pytest.mark.filterwarnings("ignore:The model holds 1 BatchNorm")
class TestNoise:
    """``noise_scale``: what micro-batches add is measured, and nothing else changes."""

    @staticmethod
    def step(micro_batch: int = 6, **options: Any) -> Step:
        options = {"clip_norm": 0.5, "noise_scale": True, **options}
        return step_of(noisy(), micro_batch=micro_batch, full_window=12, **options)

    def train(
        self, made: Step, windows: list[GivenBatch], plans: Any = (None, None)
    ) -> tuple[list[Gradient], int, list[torch.Tensor]]:
        """Two windows: their gradients, the replays, and all the state that is left."""
        gradients, replays = [], 0
        for window, plan in zip(windows, plans, strict=True):
            gradient, again = made.run(window, plan)
            made.apply(gradient)
            gradients.append(gradient)
            replays += again
        (model,) = made.job.modules
        return gradients, replays, [*model.parameters(), *model.buffers(), torch.default_generator.get_state()]

    @strides(7)
    def test_an_oom_at_every_operation_leaves_no_mark(self, stride: int) -> None:
        """Law 2, in what was measured too: the estimate is that of a run which used the smaller plan and met no OOM."""
        windows = [GivenBatch(classes(size, seed=size), size, HERE) for size in (12, 11)]
        clean: dict[Any, Any] = {}
        made = self.step()
        with Operations() as operations:
            self.train(made, windows)
        replayed = 0
        for operation in operations.every(stride, offset=4):
            made = self.step()
            with oom_at(operation):
                try:
                    gradients, replays, state = self.train(made, windows)
                except OptimizerOutOfMemoryError:
                    continue
            plans = tuple(gradient.sizes for gradient in gradients)
            if plans not in clean:
                clean[plans] = self.train(self.step(), windows, plans)
            expected, _, expected_state = clean[plans]
            assert replays <= 1  # none where it was copying buffers, which is simply done again
            assert [g.parts for g in gradients] == [g.parts for g in expected], f"operation {operation}"
            assert [g.noise for g in gradients] == [g.noise for g in expected]
            assert all(g.noise is not None for g in gradients)
            assert same(state, expected_state)
            replayed += 1
        assert replayed * stride > 300

    def test_an_oom_at_any_operation_leaves_no_memory_held(self) -> None:
        """What was set aside goes with the attempt that failed."""
        left: list[int] = []
        window = GivenBatch(classes(12), 12, HERE)
        with simulated_memory("1GiB") as device:
            made = self.step(memory=memory_of(HERE))
            made.run(window)
            transaction = made.transaction
            roll_back = transaction.roll_back

            def rolled_back() -> None:
                roll_back()
                transaction._seeds._seeds.clear()  # one number for each weight, kept for the windows to come
                left.append(device.used)

            transaction.roll_back = rolled_back  # type: ignore[method-assign]
            transaction.roll_back()
            with Operations() as operations:
                made._run(window, (4, 4, 4))
            for number, name in enumerate(operations.names, 1):
                # PyTorch itself keeps a graph that fails at the first two of these, and what is being added to a gradient
                # at the others, until the next backward.
                if name not in (
                    "aten.t.default",
                    "aten.detach.default",
                    "aten.add_.Tensor",
                    "aten.linalg_vector_norm.default",
                ):
                    with oom_at(number), contextlib.suppress(torch.OutOfMemoryError):
                        made._run(window, (4, 4, 4))
        assert {"aten._foreach_norm.Scalar", "aten.linalg_vector_norm.default"} <= set(operations.names)
        assert len(left) > 140
        assert set(left) == {left[0]}

    @pytest.mark.device
    def test_a_window_that_is_not_cut_is_not_measured(self) -> None:
        operations = []
        for noise_scale in (True, False):
            made = self.step(12, noise_scale=noise_scale)
            with oom_at(None) as counter:
                gradient, _ = made.run(GivenBatch(classes(12), 12, HERE))
            assert (gradient.sizes, gradient.parts, gradient.noise) == ((12,), (), None)
            operations.append(counter.operations)
        assert operations[0] == operations[1]

    @pytest.mark.device
    def test_what_is_measured_is_as_before_clipping(self) -> None:
        gradient, _ = self.step(4).run(GivenBatch(classes(12), 12, HERE))
        assert gradient.noise is not None
        assert gradient.grad_norm is not None
        assert gradient.grad_norm > 0.5
        square = gradient.noise.gradient_squared + gradient.noise.gradient_variance / 12
        assert square == pytest.approx(float(gradient.grad_norm) ** 2, rel=1e-5)

    @pytest.mark.device
    def test_micro_batches_without_items_are_samples_that_add_nothing(self) -> None:
        inputs, targets = classes(12)
        targets[4:8] = -100
        gradient, _ = self.step(4).run(GivenBatch((inputs, targets), 12, HERE))
        assert [part[:2] for part in gradient.parts] == [(4, 4), (4, 0), (4, 4)]
        assert gradient.parts[1][2] == 0
        assert gradient.noise is not None

    def test_a_mask_of_which_nothing_is_left_adds_nothing(self) -> None:
        """Its count of 0 shows at the end of the window only."""

        def masked(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            there = targets != -100
            return (outputs.square().mean(1) * there).sum() / there.sum()

        inputs, targets = classes(12)
        targets[4:8] = -100
        made = self.step(4, loss_of=loss_function(masked, None))
        gradient, _ = made.run(GivenBatch((inputs, targets), 12, HERE))
        assert [part[:2] for part in gradient.parts] == [(4, 12), (4, 0), (4, 12)]
        assert gradient.noise is not None

    @pytest.mark.device
    def test_an_overflow_of_float16_tells_nothing(self) -> None:
        loss_of = loss_function(lambda outputs, targets: (1e4 * outputs.float()).square().mean(), None)
        gradient, _ = self.step(4, precision="fp16", loss_of=loss_of).run(GivenBatch(classes(12), 12, HERE))
        assert not math.isfinite(gradient.parts[0][2])
        assert gradient.noise is None

    @pytest.mark.device
    def test_a_micro_batch_that_gives_no_gradient_is_a_part(self) -> None:
        def step(model: Any, batch: Any) -> torch.Tensor:
            if seen.pop():
                return cross_entropy(model(batch[0]), batch[1])
            return torch.zeros((), requires_grad=True, device=DEVICE)

        seen = [True, False, True]
        made = self.step(4, loss_of=loss_function(None, step), num_items=lambda batch: len(batch[0]))
        gradient, _ = made.run(GivenBatch(classes(12), 12, HERE))
        assert [square > 0 for _, _, square in gradient.parts] == [True, False, True]
        assert gradient.noise is not None
