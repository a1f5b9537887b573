"""The Trainer of transformers with its windows run here: what the stock Trainer computes with the whole batch at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer

from autoaccum.errors import AutoaccumWarning
from autoaccum.events import Notice, OutOfMemory, Verified
from autoaccum.integrations.transformers import AutoAccumMixin, AutoAccumTrainer
from autoaccum.testing import oom_at, simulated_memory
from tests.integrations.trainer_runs import (
    MODELS,
    arguments,
    bert_of_sentences,
    collate,
    farthest,
    gpt2,
    in_double,
    lora,
    made,
    sentences,
    t5,
    texts,
    train,
)

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::FutureWarning", "ignore::DeprecationWarning")),  # the libraries' own
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
class TestExactness:
    def test_gradients_of_ten_windows_are_those_of_the_big_batch(self, make: Callable[[], Any], tmp_path: Path) -> None:
        # The epoch ends in a short window; micro-batches of 3 divide none of them.
        data = MODELS[make]()
        args = arguments(tmp_path, per_device_train_batch_size=16, max_steps=10, learning_rate=1e-3)
        expected = train(Trainer, made(make), args, data)
        args = arguments(tmp_path, max_steps=10, learning_rate=1e-3)
        found = train(AutoAccumTrainer, made(make), args, data, effective_batch=16, micro_batch=3)
        assert len(found.gradients) == 10
        assert found.trainer.accumulator.micro_batches == (3, 3)  # of the six that an epoch ends in
        assert farthest(found.gradients, expected.gradients) < 1e-5

    def test_losses_of_twenty_steps_are_those_of_the_big_batch(self, make: Callable[[], Any], tmp_path: Path) -> None:
        data = MODELS[make]()
        with in_double():
            args = arguments(tmp_path, per_device_train_batch_size=16, max_steps=20)
            expected = train(Trainer, made(make), args, data)
            found = train(AutoAccumTrainer, made(make), args, data, micro_batch=5)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert expected.losses[-1] != expected.losses[0]


def in_step(number: int, context: Callable[[], Any]) -> Callable[[int], Any]:
    """Return what puts one step of a training into a context."""
    return lambda step: context() if step == number else contextlib.nullcontext()


class TestMemory:
    @pytest.mark.parametrize("make", [gpt2, t5, lora, bert_of_sentences], ids=lambda make: make.__name__)
    def test_a_window_that_ran_out_of_memory_leaves_no_mark(self, make: Callable[[], Any], tmp_path: Path) -> None:
        data = MODELS[make]()
        args = arguments(tmp_path, per_device_train_batch_size=16)
        # Measurements are left out, for memory that runs out in them is no event of the window's.
        options = {"micro_batch": 8, "verify": False}
        with in_double():
            expected = train(Trainer, made(make), args, data)
            count = oom_at(None)
            train(AutoAccumTrainer, made(make), args, data, around=in_step(1, lambda: count), **options)
            assert count.operations > 100
            recovered = 0
            for n in range(1, count.operations, count.operations // 4):
                fault = oom_at(n)
                around = in_step(1, lambda fault=fault: fault)
                found = train(AutoAccumTrainer, made(make), args, data, around=around, **options)
                recovered += any(isinstance(event, OutOfMemory) for event in found.trainer.accumulator.events)
                assert found.losses == pytest.approx(expected.losses, rel=1e-10)
                assert found.calls == ["begin", "end"] * 3
            assert recovered >= 3  # what runs between micro-batches is simply done again

    def test_a_batch_that_does_not_fit_is_cut_by_itself(self, tmp_path: Path) -> None:
        args, data = arguments(tmp_path, per_device_train_batch_size=64, max_steps=4), texts(128)
        expected = train(Trainer, made(gpt2), args, data)
        with simulated_memory("700KiB"), pytest.raises(torch.OutOfMemoryError):
            train(Trainer, made(gpt2), args, data)
        with simulated_memory("700KiB") as device:
            found = train(AutoAccumTrainer, made(gpt2), args, data)
        assert device.peak <= device.limit
        assert farthest(found.gradients, expected.gradients) < 1e-5
        assert len(found.trainer.accumulator.micro_batches) > 1


class TestTheLoop:
    """What the library's own tests ask of accumulation: one log, one step of optimizer and scheduler per window."""

    def test_an_effective_batch_beyond_the_data_is_told(self, tmp_path: Path) -> None:
        args = arguments(tmp_path, max_steps=2)
        with pytest.warns(AutoaccumWarning, match="effective_batch=40 is more than the data's 24 samples") as caught:
            found = train(AutoAccumTrainer, made(gpt2), args, texts(24), effective_batch=40)
        assert len([w for w in caught if "more than the data" in str(w.message)]) == 1
        first = found.trainer.accumulator.events[0]
        assert isinstance(first, Notice)
        assert first.consequence == "Every epoch is one window of 24 samples"
        found = train(AutoAccumTrainer, made(gpt2), args, texts(24), effective_batch=24)
        assert not any(isinstance(event, Notice) for event in found.trainer.accumulator.events)

    def test_all_is_called_and_logged_once_per_window(self, tmp_path: Path) -> None:
        options = {"num_train_epochs": 2, "max_steps": -1, "warmup_steps": 3, "lr_scheduler_type": "cosine"}
        options |= {"max_grad_norm": 0.5, "include_num_input_tokens_seen": "all"}
        steps: list[int] = []
        with in_double():
            args = arguments(tmp_path, per_device_train_batch_size=16, **options)
            expected = train(Trainer, made(gpt2), args, texts())
            args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, **options)
            optimizer = torch.optim.SGD((model := made(gpt2)).parameters(), lr=0.05)
            optimizer.register_step_post_hook(lambda *_: steps.append(1))
            found = train(AutoAccumTrainer, model, args, texts(), optimizers=(optimizer, None), micro_batch=3)
        assert len(steps) == found.trainer.state.global_step == expected.trainer.state.global_step == 10
        assert found.trainer.lr_scheduler.state_dict()["last_epoch"] == 10
        assert found.calls == ["begin", "end"] * 10
        assert len(found.logged) == len(expected.logged)
        for one, other in zip(found.logged, expected.logged, strict=True):
            assert one == pytest.approx(other, rel=1e-6)  # losses are added up in single precision
        assert all("grad_norm" in entry for entry in found.logged[:-1])

    def test_label_smoothing_and_losses_of_ones_own_are_those_of_the_big_batch(self, tmp_path: Path) -> None:
        def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

        def averaged(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        with in_double():
            for options, more, precision in (
                ({"label_smoothing_factor": 0.1}, {}, 1e-7),  # the smoother sums up in single precision
                ({}, {"compute_loss_func": summed}, 1e-10),
                ({}, {"compute_loss_func": averaged}, 1e-10),
            ):
                args = arguments(tmp_path, per_device_train_batch_size=16, **options)
                expected = train(Trainer, made(gpt2), args, texts(), **more)
                found = train(AutoAccumTrainer, made(gpt2), args, texts(), micro_batch=3, **more)
                assert found.losses == pytest.approx(expected.losses, rel=precision)
                assert farthest(found.gradients, expected.gradients) < max(precision, 1e-10) * 100

    def test_a_compute_loss_of_ones_own_is_that_of_the_big_batch(self, tmp_path: Path) -> None:
        class OwnLoss(Trainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                labels = inputs.pop("labels")
                outputs = model(**inputs)
                weight = torch.tensor([1.0, 2.0, 3.0])
                loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
                return (loss, outputs) if return_outputs else loss

        class Windows(AutoAccumMixin, OwnLoss):
            pass

        with in_double():
            args = arguments(tmp_path, per_device_train_batch_size=16)
            expected = train(OwnLoss, made(bert_of_sentences), args, sentences())
            found = train(Windows, made(bert_of_sentences), args, sentences(), micro_batch=3)
        assert found.losses == pytest.approx(expected.losses, rel=1e-10)
        assert farthest(found.gradients, expected.gradients) < 1e-10

    @pytest.mark.parametrize("weight", [0.0, 0.1], ids=["weighted", "joined"])
    def test_what_compute_loss_logs_is_logged_once_for_each_window(self, weight: float, tmp_path: Path) -> None:
        class Logs(Trainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                outputs = model(**inputs)
                spread = outputs.logits.std(0).sum() if weight else outputs.logits.mean()
                self.log({"spread": float(spread.detach())})
                loss = outputs.loss + weight * spread
                return (loss, outputs) if return_outputs else loss

        class Windows(AutoAccumMixin, Logs):
            pass

        with in_double():
            args = arguments(tmp_path, per_device_train_batch_size=16)
            expected = train(Logs, made(bert_of_sentences), args, sentences())
            found = train(Windows, made(bert_of_sentences), args, sentences(), micro_batch=4)
        wanted, own = (
            [(entry["step"], entry["spread"]) for entry in run.trainer.state.log_history if "spread" in entry]
            for run in (expected, found)
        )
        assert [step for step, _ in own] == [step for step, _ in wanted]
        assert [spread for _, spread in own] == pytest.approx([spread for _, spread in wanted], rel=1e-8)

    @pytest.mark.parametrize(
        "options",
        [
            {"train_sampling_strategy": "group_by_length"},
            {"dataloader_drop_last": True, "num_train_epochs": 2, "max_steps": -1},
            {"dataloader_num_workers": 1, "max_steps": 2},
            {"activation_checkpointing": True},
            {"bf16": True},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_options_of_the_loop_do_what_they_do(self, options: dict[str, Any], tmp_path: Path) -> None:
        with in_double() if "bf16" not in options else contextlib.nullcontext():
            args = arguments(tmp_path, per_device_train_batch_size=16, **options)
            expected = train(Trainer, made(gpt2), args, texts())
            found = train(AutoAccumTrainer, made(gpt2), args, texts(), micro_batch=5)
        # In bf16 products are rounded to 8 bits, in each micro-batch.
        assert found.losses == pytest.approx(expected.losses, rel=1e-2 if "bf16" in options else 1e-10)
        assert farthest(found.gradients, expected.gradients) < (0.05 if "bf16" in options else 1e-10)
        assert found.trainer.state.global_step == expected.trainer.state.global_step

    @pytest.mark.filterwarnings("ignore")  # of the compiler's own
    def test_a_compiled_model_is_trained(self, tmp_path: Path) -> None:
        args = arguments(tmp_path, per_device_train_batch_size=16, torch_compile=True, torch_compile_backend="eager")
        expected = train(Trainer, made(gpt2), arguments(tmp_path, per_device_train_batch_size=16), texts())
        found = train(AutoAccumTrainer, made(gpt2), args, texts(), micro_batch=5)
        assert farthest(found.gradients, expected.gradients) < 1e-5

    def test_data_without_a_length_and_data_with_more_columns_are_read_as_ever(self, tmp_path: Path) -> None:
        import datasets

        columns = [{**text, "source": "of no use"} for text in texts()]

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(texts())

        args = arguments(tmp_path, per_device_train_batch_size=16, max_steps=6)
        with in_double():
            for data in (Stream(), datasets.Dataset.from_list(columns)):
                expected = train(Trainer, made(gpt2), args, data)
                found = train(AutoAccumTrainer, made(gpt2), args, data, micro_batch=3)
                assert found.losses == pytest.approx(expected.losses, rel=1e-10)

    def test_windows_stay_on_the_host(self, tmp_path: Path) -> None:
        trainer = AutoAccumTrainer(made(gpt2), arguments(tmp_path), train_dataset=texts(), data_collator=collate)
        assert trainer.get_train_dataloader().device is None
        assert trainer.get_eval_dataloader(texts()).device == torch.device("cpu")


class TestCheckpoints:
    def test_a_training_that_goes_on_ends_as_if_it_had_never_been_interrupted(self, tmp_path: Path) -> None:
        options = {"per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}
        data, checkpoint = texts(), str(tmp_path / "whole" / "checkpoint-3")
        runs = []
        # The epoch is of five windows, so that it ends in between.
        with in_double():
            for name, resume in (("whole", None), ("rest", checkpoint)):
                model, args = made(lambda: gpt2(resid_pdrop=0.1)), arguments(tmp_path / name, max_steps=7, **options)
                runs.append(train(AutoAccumTrainer, model, args, data, resume=resume, micro_batch=3))
        whole, rest = runs
        assert rest.losses == whole.losses[3:]
        for name, weight in whole.trainer.model.state_dict().items():
            assert torch.equal(weight, rest.trainer.model.state_dict()[name]), name

    def test_a_training_that_goes_on_looks_for_nothing_again(self, tmp_path: Path) -> None:
        options = {"per_device_train_batch_size": 64, "save_strategy": "steps", "save_steps": 4, "max_steps": 6}
        checkpoint, data = str(tmp_path / "whole" / "checkpoint-4"), texts(128)
        events = []
        for name, resume in (("whole", None), ("rest", checkpoint)):
            with simulated_memory("700KiB"):
                args = arguments(tmp_path / name, **options)
                run = train(AutoAccumTrainer, made(gpt2), args, data, resume=resume)
            assert len(run.trainer.accumulator.micro_batches) > 1
            events.append([type(event) for event in run.trainer.accumulator.events])
            del run  # its memory is not the next one's
            gc.collect()
        assert OutOfMemory in events[0]
        assert Verified in events[0]
        assert OutOfMemory not in events[1]
        assert Verified not in events[1]

    def test_a_checkpoint_of_the_stock_trainer_is_gone_on_with(self, tmp_path: Path) -> None:
        options = {"per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 2}
        with in_double():
            whole = train(Trainer, made(gpt2), arguments(tmp_path, max_steps=4, **options), texts())
            args = arguments(tmp_path / "rest", max_steps=4, **options)
            checkpoint = str(tmp_path / "checkpoint-2")
            rest = train(AutoAccumTrainer, made(gpt2), args, texts(), resume=checkpoint, micro_batch=3)
        assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-10)

    def test_the_best_model_and_early_stopping_are_the_stock_trainers(self, tmp_path: Path) -> None:
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 5.0}
        found: list[Any] = []
        with in_double():
            for kind in (Trainer, AutoAccumTrainer):
                args = arguments(tmp_path / kind.__name__, per_device_train_batch_size=16, max_steps=9, **options)
                more = {"eval_dataset": texts()[:20], "callbacks": [EarlyStoppingCallback(2)]}
                found.append(train(kind, made(gpt2), args, texts(), **more))
        states = [run.trainer.state for run in found]
        assert states[0].global_step == states[1].global_step < 9
        assert states[0].best_global_step == states[1].best_global_step
        assert states[0].best_metric == pytest.approx(states[1].best_metric, rel=1e-10)
