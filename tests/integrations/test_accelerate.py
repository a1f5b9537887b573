"""An ``Accumulator`` of what Accelerate has prepared: what its own loop computes, in micro-batches."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autoaccum import Accumulator, errors
from autoaccum.events import OutOfMemory, Verified
from autoaccum.testing import oom_at, simulated_memory
from tests.integrations.lightning_runs import (
    OF_CHILDREN,
    QUIET,
    Classifier,
    Convolutional,
    LanguageModel,
    Tagger,
    data_of,
    farthest,
    module_of,
)

pytestmark = [pytest.mark.integrations, *QUIET]
KINDS = [Classifier, Convolutional, Tagger, LanguageModel]


@pytest.fixture(autouse=True)
def _anew() -> Any:
    """Accelerate keeps one state for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert PartialState._shared_state == {}


class Prepared:
    """What a script has after ``accelerator.prepare``."""

    def __init__(self, kind: type, dtype: torch.dtype, optimizer: Any = torch.optim.SGD, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.accelerator = Accelerator(cpu=True, **options)
        net = module_of(kind, dtype).net
        made = optimizer(net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(made, 3, 0.5)
        loader = DataLoader(data_of(kind, dtype), batch_size=16)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(net, made, loader, schedule)
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []

    def stepped(self, loss: torch.Tensor) -> None:
        self.scheduler.step()
        self.losses.append(loss.item())
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])

    def batches(self, steps: int) -> Any:
        """Yield so many batches, epoch after epoch."""
        done = 0
        while done < steps:
            for batch in self.loader:
                if done == steps:
                    return
                yield batch
                done += 1


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict) and "labels" in batch:
        logits = model(input_ids=batch["tokens"]).logits[:, :-1]
        return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    if isinstance(batch, dict):
        return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tags"].flatten())
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def by_accelerate(kind: type, steps: int, dtype: torch.dtype = torch.float64, **options: Any) -> Prepared:
    """The loop as Accelerate's docs show it."""
    own = Prepared(kind, dtype, **options)
    for batch in own.batches(steps):
        own.optimizer.zero_grad()
        loss = loss_of(own.model, batch)
        own.accelerator.backward(loss)
        own.optimizer.step()
        own.stepped(loss)
    return own


def by_accumulator(
    kind: type, steps: int, dtype: torch.dtype = torch.float64, micro_batch: Any = 5, **options: Any
) -> Prepared:
    own = Prepared(kind, dtype, **options)
    own.accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of, micro_batch=micro_batch)
    for batch in own.batches(steps):
        own.stepped(own.accumulator.step(batch))
    return own


class TestExactness:
    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_of_ten_windows_are_those_of_the_big_batch(self, kind: type) -> None:
        expected, found = by_accelerate(kind, 10, torch.float32), by_accumulator(kind, 10, torch.float32)
        assert len(found.gradients) == 10
        assert farthest(found.gradients, expected.gradients) < 1e-5

    @pytest.mark.parametrize("kind", KINDS)
    def test_losses_and_rates_of_twenty_steps_are_those_of_the_big_batch(self, kind: type) -> None:
        expected, found = by_accelerate(kind, 20), by_accumulator(kind, 20)
        assert len(found.losses) == 20
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert found.rates == expected.rates
        assert len(set(found.rates)) == 7

    def test_of_an_optimizer_that_calls_a_closure(self) -> None:
        def made(parameters: Any, lr: float) -> Any:
            return torch.optim.LBFGS(parameters, lr=lr, max_iter=3)

        found = by_accumulator(Classifier, 4, optimizer=made)
        own = Prepared(Classifier, torch.float64, made)
        for batch in own.batches(4):

            def closure(batch: Any = batch) -> torch.Tensor:
                own.optimizer.zero_grad()
                loss = loss_of(own.model, batch)
                loss.backward()
                return loss

            own.losses.append(own.optimizer.optimizer.step(closure).item())
            own.scheduler.step()
        assert found.losses == pytest.approx(own.losses, rel=1e-8)

    def test_of_autocast_it_is_the_accelerators(self) -> None:
        options = {"mixed_precision": "bf16"}
        expected = by_accelerate(Classifier, 5, torch.float32, **options)
        found = by_accumulator(Classifier, 5, torch.float32, **options)
        assert farthest(found.gradients, expected.gradients) < 2**-7
        assert found.losses == pytest.approx(expected.losses, rel=2**-9)

    def test_of_a_compiled_model(self) -> None:
        expected = by_accumulator(Classifier, 3)
        AcceleratorState._reset_state(reset_partial_state=True)
        found = by_accumulator(Classifier, 3, dynamo_backend="eager")
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)


class TestReplay:
    @pytest.mark.parametrize("kind", [Classifier, Convolutional, Tagger])
    @pytest.mark.parametrize("operation", [3, 20, 45])
    def test_changes_nothing(self, kind: type, operation: int) -> None:
        expected = by_accumulator(kind, 6, micro_batch=4)
        own = Prepared(kind, torch.float64)
        accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of, micro_batch=8, verify=False)
        for index, batch in enumerate(own.batches(6)):
            with oom_at(operation if index == 0 else None):
                loss = accumulator.step(batch)
            own.stepped(loss)
        assert [e for e in accumulator.events if isinstance(e, OutOfMemory)]
        assert own.losses == pytest.approx(expected.losses, rel=1e-12)
        assert own.rates == expected.rates

    def test_in_memory_that_holds_no_whole_batch(self) -> None:
        expected = by_accelerate(Convolutional, 8)
        AcceleratorState._reset_state(reset_partial_state=True)
        own = Prepared(Convolutional, torch.float64)
        with simulated_memory("52KiB") as device:
            accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of)
            for batch in own.batches(8):
                own.stepped(accumulator.step(batch))
        assert device.peak <= device.limit
        assert len(accumulator.micro_batches) > 1
        assert own.losses == pytest.approx(expected.losses, rel=1e-10)


class TestCheckpoints:
    @pytest.mark.parametrize("kind", [Classifier, Convolutional])
    def test_of_accelerate_go_on_to_the_bit_without_a_search(self, kind: type, tmp_path: Path) -> None:
        def made() -> tuple[Prepared, Accumulator]:
            AcceleratorState._reset_state(reset_partial_state=True)
            own = Prepared(kind, torch.float64, torch.optim.AdamW)
            # Before the state is loaded: what was allocated early is not in its way.
            accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of, max_micro_batch=6)
            own.accelerator.register_for_checkpointing(accumulator)
            return own, accumulator

        own, accumulator = made()
        batches = list(own.batches(4))
        for batch in batches:
            own.stepped(accumulator.step(batch))
        own.accelerator.save_state(str(tmp_path))
        for batch in batches:
            own.stepped(accumulator.step(batch))
        again, resumed = made()
        again.accelerator.load_state(str(tmp_path))
        for batch in batches:
            again.stepped(resumed.step(batch))
        assert again.losses == own.losses[4:]
        assert again.rates == own.rates[4:]
        assert resumed.micro_batches == accumulator.micro_batches
        assert [e for e in resumed.events if isinstance(e, Verified)] == []


class TestPrepared:
    def test_steps_that_are_left_out_are_refused(self) -> None:
        own = Prepared(Classifier, torch.float64, gradient_accumulation_steps=4)
        with pytest.raises(errors.ConflictingArgumentsError, match="leave it out") as caught:
            Accumulator(own.model, own.optimizer, training_step=loss_of)
        assert (caught.value.argument, caught.value.value) == ("gradient_accumulation_steps", 4)

    def test_a_scaler_is_refused(self) -> None:
        own = Prepared(Classifier, torch.float32)
        optimizer = AcceleratedOptimizer(own.optimizer.optimizer, scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(errors.ConflictingArgumentsError, match="mixed_precision='bf16'"):
            Accumulator(own.model, optimizer, training_step=loss_of)

    def test_a_step_of_ones_own_clips_by_the_accelerator(self) -> None:
        own = Prepared(Classifier, torch.float64)
        accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of, micro_batch=5)
        stock = Prepared(Classifier, torch.float64)
        for batch, other in zip(own.batches(3), stock.batches(3), strict=True):
            accumulator.backward(batch)
            norm = own.accelerator.clip_grad_norm_(own.model.parameters(), 0.1)
            own.optimizer.step()
            stock.optimizer.zero_grad()
            stock.accelerator.backward(loss_of(stock.model, other))
            expected = stock.accelerator.clip_grad_norm_(stock.model.parameters(), 0.1)
            stock.optimizer.step()
            assert float(norm) == pytest.approx(float(expected), rel=1e-10)

    def test_a_loader_may_leave_the_window_on_the_host(self) -> None:
        own = Prepared(Classifier, torch.float64)
        loader = own.accelerator.prepare_data_loader(
            DataLoader(data_of(Classifier), batch_size=16), device_placement=False
        )
        assert loader.device is None
        accumulator = Accumulator(own.model, own.optimizer, training_step=loss_of, micro_batch=5)
        assert accumulator.step(next(iter(loader))).item() > 0


_RANKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from autoaccum import Accumulator, errors
from tests.integrations.lightning_runs import Classifier, data_of, module_of

accelerator, net = Accelerator(cpu=True), module_of(Classifier).net
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
loader = DataLoader(data_of(Classifier, samples=64), batch_size=8)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
try:
    Accumulator(model, optimizer, loss_fn=cross_entropy)
except errors.ArgumentError as error:
    assert "module within it" in str(error)
accumulator = Accumulator(accelerator.unwrap_model(model), optimizer, loss_fn=cross_entropy, micro_batch=3)
losses = [accumulator.step(batch).item() for batch in loader]
torch.save(losses, f"{sys.argv[1]}/{accelerator.process_index}.pt")
accelerator.wait_for_everyone()
os._exit(0)  # threads of gloo that hold what DistributedDataParallel gave them may abort an interpreter that ends
"""


class TestRanks:
    def test_step_on_the_gradient_of_the_joined_batch(self, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(_RANKS)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launch, str(script), str(tmp_path)]
        subprocess.run(command, check=True, capture_output=True, timeout=600, env=OF_CHILDREN)
        net = module_of(Classifier).net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        expected = []
        for inputs, targets in DataLoader(data_of(Classifier, samples=64), batch_size=16):
            optimizer.zero_grad()
            loss = cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        for rank in (0, 1):
            assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(expected, rel=1e-10)
