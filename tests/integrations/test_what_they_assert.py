"""What the tests of Transformers, Accelerate and Lightning ask of accumulation and of the search for a batch size.

Each class says in our words what one of these libraries asserts of its own accumulation and of its own finder, and
holds it against ours, on small models from configs.
"""

from __future__ import annotations

import contextlib
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning")

from accelerate import Accelerator
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import autoaccum
from autoaccum.errors import ArgumentTypeError, AutoaccumWarning, MemoryLimitError
from autoaccum.events import OutOfMemory
from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.transformers import AutoAccumTrainer
from autoaccum.testing import simulated_memory
from tests.integrations.lightning_runs import QUIET, Classifier, Watch, data_of, module_of, run, trainer_of
from tests.integrations.trainer_runs import arguments, gpt2, in_double, made, texts, train

pytestmark = [pytest.mark.integrations, *QUIET, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def weights_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class TestTransformers:
    def test_half_the_batch_and_two_steps_of_accumulation_train_the_same_weights(self, tmp_path: Path) -> None:
        with in_double():
            args = arguments(tmp_path, per_device_train_batch_size=8, max_steps=-1, num_train_epochs=2)
            expected = train(Trainer, made(gpt2), args, texts(64))
            args = arguments(
                tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2
            )
            found = train(AutoAccumTrainer, made(gpt2), args, texts(64), micro_batch=3)
        ours, theirs = weights_of(found.trainer.model), weights_of(expected.trainer.model)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

    def test_the_loss_is_that_of_the_big_batch_whether_or_not_the_model_is_told_the_count(self, tmp_path: Path) -> None:
        """A mean of means is far off here, as in theirs: texts differ much in what of them counts."""
        logged = []
        with in_double():
            for kind, is_told, options in (
                (Trainer, True, {}),
                (AutoAccumTrainer, True, {"micro_batch": 1}),
                (AutoAccumTrainer, False, {"micro_batch": 1}),
            ):

                class Told(kind):  # type: ignore[misc,valid-type]
                    def __init__(self, *rest: Any, is_told: bool = is_told, **more: Any) -> None:
                        super().__init__(*rest, **more)
                        self.model_accepts_loss_kwargs = is_told

                args = arguments(tmp_path, per_device_train_batch_size=8, max_steps=5)
                logged.append([one["loss"] for one in train(Told, made(gpt2), args, texts(), **options).logged[:-1]])
        assert logged[1] == pytest.approx(logged[0], rel=1e-6)  # losses are added up in single precision
        assert logged[2] == pytest.approx(logged[0], rel=1e-6)

    @pytest.mark.parametrize("samples", [23, 20])
    @pytest.mark.parametrize("epochs", [1, 2])
    def test_each_batch_is_fetched_once_and_none_is_empty(self, samples: int, epochs: int, tmp_path: Path) -> None:
        fetched: list[int] = []

        class Counting(AutoAccumTrainer):
            def get_batch_samples(self, iterator: Any, num_batches: int, device: Any) -> Any:
                batches, items = super().get_batch_samples(iterator, num_batches, device)
                assert len(batches) == num_batches
                fetched.extend(len(batch["input_ids"]) for batch in batches)
                return batches, items

        args = arguments(
            tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=5,
            max_steps=-1,
            num_train_epochs=epochs,
        )
        trainer = train(Counting, made(gpt2), args, texts(samples)).trainer
        assert len(fetched) == len(trainer.get_train_dataloader()) * epochs == trainer.state.global_step
        assert sum(fetched) == samples * epochs
        assert min(fetched) > 0

    def test_an_interrupted_epoch_is_finished_in_as_many_steps_as_it_has(self, tmp_path: Path) -> None:
        batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        saving = {"save_strategy": "steps", "save_steps": 1, **batch}
        train(AutoAccumTrainer, made(gpt2), arguments(tmp_path / "a", max_steps=2, **saving), texts(25))
        checkpoint = str(tmp_path / "a" / "checkpoint-2")
        args = arguments(tmp_path / "b", max_steps=-1, num_train_epochs=1, **saving)
        run = train(AutoAccumTrainer, made(gpt2), args, texts(25), resume=checkpoint)
        steps = math.ceil(25 / 6)
        assert run.trainer.state.global_step == steps
        assert len(run.losses) == steps - 2
        assert (tmp_path / "b" / f"checkpoint-{steps}" / "model.safetensors").exists()

    def test_a_batch_that_fails_by_itself_is_trained_on_and_found_again_after_a_checkpoint(
        self, tmp_path: Path
    ) -> None:
        """Theirs goes on with a smaller batch; here the batch stays, and what of it fits at once is remembered."""
        args = arguments(tmp_path, per_device_train_batch_size=64, max_steps=3, save_strategy="steps", save_steps=2)
        with simulated_memory("700KiB"), pytest.raises(torch.OutOfMemoryError):
            train(Trainer, made(gpt2), args, texts(128))
        gc.collect()
        with simulated_memory("700KiB"):
            first = train(AutoAccumTrainer, made(gpt2), args, texts(128)).trainer
        pieces = first.accumulator.micro_batches
        assert max(pieces) < 64 == sum(pieces)
        del first
        gc.collect()
        with simulated_memory("700KiB"):
            again = train(AutoAccumTrainer, made(gpt2), args, texts(128), resume=str(tmp_path / "checkpoint-2")).trainer
        assert again.args.train_batch_size == 64
        assert max(again.accumulator.micro_batches) < 64
        assert not any(isinstance(event, OutOfMemory) for event in again.accumulator.events)


class TestAccelerate:
    """The script of ``test_sync`` and the tests of ``find_executable_batch_size``."""

    def test_rates_and_weights_follow_the_loop_by_hand_also_in_a_short_batch(self) -> None:
        data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
        found = []
        for is_ours in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(4, 3)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.65)
            loader = DataLoader(data, batch_size=16)
            rates = []
            if is_ours:
                accelerator = Accelerator(cpu=True)
                prepared = accelerator.prepare(model, optimizer, loader, scheduler)
                model, optimizer, loader, scheduler = prepared
                accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=5)
            for batch in loader:
                if is_ours:
                    accumulator.step(batch)
                else:
                    optimizer.zero_grad()
                    cross_entropy(model(batch[0]), batch[1]).backward()
                    optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            found.append((rates, weights_of(model)))
        assert found[1][0] == found[0][0]
        assert len(found[0][0]) == 3
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("fits", [8, 16, 113])
    def test_a_batch_is_made_smaller_until_it_fits(self, fits: int) -> None:
        tried: list[int] = []

        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            tried.append(len(outputs))
            if len(outputs) > fits:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return mse_loss(outputs, targets)

        model = nn.Linear(3, 1)
        accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)
        for _ in range(12):
            accumulator.step((torch.randn(128, 3), torch.randn(128, 1)))
        assert max(accumulator.micro_batches) <= fits
        assert sum(accumulator.micro_batches) == 128
        # Where 0.9 times as many are tried each time, 128 to 8 takes 22 failures.
        assert sum(size > fits for size in tried) <= 4

    def test_where_nothing_fits_it_says_so(self) -> None:
        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

        model = nn.Linear(3, 1)
        options: dict[str, Any] = {"loss_fn": loss_fn, "patience": 0.0}
        accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        with pytest.raises(MemoryLimitError):
            accumulator.step((torch.randn(16, 3), torch.randn(16, 1)))

    def test_any_other_error_is_the_callers_own(self) -> None:
        def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise ValueError("own")

        model = nn.Linear(3, 1)
        accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)
        with pytest.raises(ValueError, match="own"):
            accumulator.step((torch.randn(16, 3), torch.randn(16, 1)))

    def test_arguments_that_it_passes_itself_are_answered(self) -> None:
        model = nn.Linear(3, 1)
        accumulator = autoaccum.Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mse_loss)
        with pytest.raises(ArgumentTypeError, match=r"Accumulator.step\(\(inputs, targets\)\)"):
            accumulator.step(torch.randn(4, 3), torch.randn(4, 1))  # type: ignore[call-arg]


class TestLightning:
    """The tests of the batch-size finder, of ``accumulate_grad_batches`` and of its scheduler."""

    def test_nothing_larger_than_the_data_is_run(self) -> None:
        callback = AutoAccum(256)
        run(module_of(Classifier), 4, callback, max_steps=4)
        assert callback.micro_batches == (60,)

    def test_a_search_leaves_the_trainer_and_its_directory_as_they_were(self, tmp_path: Path) -> None:
        names = ("loggers", "max_steps", "limit_train_batches", "limit_val_batches", "limit_test_batches")
        callback = AutoAccum(48)
        trainer = trainer_of([callback], max_steps=5, default_root_dir=tmp_path, limit_val_batches=3)
        before = {name: getattr(trainer, name) for name in names} | {"callbacks": list(trainer.callbacks)}
        data, module = data_of(Classifier), module_of(Classifier)
        with simulated_memory("20KiB"):
            trainer.fit(module, DataLoader(data, batch_size=4))
        assert len(callback.micro_batches) > 1
        assert {name: getattr(trainer, name) for name in names} | {"callbacks": list(trainer.callbacks)} == before
        assert list(tmp_path.iterdir()) == []

    def test_the_loop_counts_what_the_big_batch_does(self) -> None:
        counts = []
        for callbacks, batch in (((), 16), ((AutoAccum(16, micro_batch=3),), 4)):
            trainer = trainer_of(callbacks, max_steps=-1, max_epochs=2)
            trainer.fit(module_of(Classifier), DataLoader(data_of(Classifier), batch_size=batch))
            progress = trainer.fit_loop.epoch_loop.batch_progress.total
            counts.append((trainer.global_step, trainer.current_epoch, progress.ready, progress.completed))
        assert counts[1] == counts[0] == (8, 2, 8, 8)

    @pytest.mark.parametrize("name", ["validate", "test", "predict"])
    def test_a_pass_that_does_not_fit_is_made_to_and_takes_no_step(self, name: str) -> None:
        class Passing(Classifier):
            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.validation_step(batch, batch_idx)

            def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                return self.net(batch[0])

        data, module = data_of(Passing, samples=256), module_of(Passing)
        found: list[Any] = []
        limit = 2**30
        for callbacks in ((), (AutoAccum(),)):
            trainer = trainer_of(callbacks)
            expects = pytest.warns(AutoaccumWarning, match="64 at a time") if callbacks else contextlib.nullcontext()
            with simulated_memory(limit) as device, expects:
                found.append(getattr(trainer, name)(module, DataLoader(data, batch_size=128)))
            assert (trainer.global_step, trainer.current_epoch) == (0, 0)
            limit = device.peak - 1
            gc.collect()
        if name == "predict":
            torch.testing.assert_close(torch.cat(found[1]), torch.cat(found[0]))
        else:
            assert found[1][0] == pytest.approx(found[0][0], rel=1e-10)

    def test_the_short_window_at_the_end_is_stepped_on_and_early_stopping_counts_epochs(self) -> None:
        found = []
        for callbacks, batch in (((), 25), ((AutoAccum(25, micro_batch=4),), 5)):
            watch, stopping = Watch(), EarlyStopping("train_loss_epoch", patience=1, min_delta=1.0)
            trainer = trainer_of([*callbacks, watch, stopping], max_steps=-1, max_epochs=9)
            trainer.fit(module_of(Classifier), DataLoader(data_of(Classifier), batch_size=batch))
            found.append((trainer.global_step, trainer.current_epoch, watch.losses))
        assert found[1][:2] == found[0][:2] == (6, 2)
        assert found[1][2] == pytest.approx(found[0][2], rel=1e-10)
