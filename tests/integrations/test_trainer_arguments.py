"""What training arguments mean beside an effective batch, and which are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch.utils.data import DataLoader
from transformers import Trainer

from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.integrations.trainer_arguments import makes_batches
from autoaccum.integrations.transformers import AutoAccumMixin, AutoAccumTrainer
from tests.integrations.trainer_runs import arguments, collate, gpt2, made, texts

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore::FutureWarning")]


def trainer(path: Path, kind: type = AutoAccumTrainer, args: Any = None, **options: Any) -> Any:
    given = arguments(path, **(args or {}))
    return kind(made(gpt2), given, train_dataset=texts(), data_collator=collate, **options)


def test_the_effective_batch_is_what_is_said_or_what_the_arguments_come_to(tmp_path: Path) -> None:
    for args, options, expected in (
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, {}, 12),
        ({}, {}, 8),
        ({}, {"effective_batch": 48}, 48),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, {"effective_batch": 12}, 12),
    ):
        found = trainer(tmp_path, args=args, **options)
        assert found.get_total_train_batch_size(found.args) == expected
        assert found.args.gradient_accumulation_steps == 1
        assert next(iter(found.get_train_dataloader()))["input_ids"].shape[0] == expected


def test_the_arguments_that_were_given_stay(tmp_path: Path) -> None:
    given = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    AutoAccumTrainer(made(gpt2), given)
    assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (4, 3)


@pytest.mark.parametrize(
    ("args", "options", "argument"),
    [
        ({"per_device_train_batch_size": 4}, {"effective_batch": 64}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 2}, {"effective_batch": 64}, "gradient_accumulation_steps"),
        ({"auto_find_batch_size": True}, {"effective_batch": 64}, "auto_find_batch_size"),
    ],
)
def test_what_says_another_batch_is_refused(args: Any, options: Any, argument: str, tmp_path: Path) -> None:
    with pytest.raises(ConflictingArgumentsError) as refused:
        trainer(tmp_path, args=args, **options)
    assert refused.value.argument == argument


def test_what_cannot_be_run_as_a_window_is_refused(tmp_path: Path) -> None:
    class Generating(AutoAccumMixin, Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return inputs

    for argument, kind, args, options in (
        ("optim", AutoAccumTrainer, {"optim": "galore_adamw_layerwise"}, {}),
        ("trainer", Generating, {}, {}),
        ("dispatch_batches", AutoAccumTrainer, {"accelerator_config": {"dispatch_batches": True}}, {}),
        ("effective_batch", AutoAccumTrainer, {}, {"effective_batch": 0}),
    ):
        with pytest.raises(ArgumentError) as refused:
            trainer(tmp_path, kind, args, **options)
        assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("batch_size", "Use effective_batch"),
        ("per_device_train_batch_size", "args=TrainingArguments"),
        ("learning_rate", "args=TrainingArguments"),
        ("clip_norm", "The trainer says it"),
        ("effectve_batch", "Did you mean effective_batch"),
        ("memory_limt", "Did you mean memory_limit"),
        ("train_datset", "Did you mean train_dataset"),
    ],
)
def test_arguments_by_other_names_are_answered(name: str, cure: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"^AutoAccumTrainer\(\) has no argument '{name}'\. .*{cure}"):
        trainer(tmp_path, **{name: 4})


def test_what_nobody_knows_is_the_trainers_own_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'quux'") as caught:
        trainer(tmp_path, quux=4)
    assert not isinstance(caught.value, ArgumentError)


def test_a_training_step_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *rest: Any, **options: Any) -> Any:
            return super().training_step(*rest, **options)

    class Before(AutoAccumMixin, Own):
        pass

    with pytest.raises(ArgumentError, match=r"Own.training_step.*around super\(\)\.training_step"):
        trainer(tmp_path, Before)


def test_a_loader_of_other_batches_than_windows_is_refused(tmp_path: Path) -> None:
    class Loading(Trainer):
        size: int | None = 8

        def get_train_dataloader(self) -> Any:
            size = self.size or self.args.per_device_train_batch_size
            return DataLoader(self.train_dataset, batch_size=size, collate_fn=self.data_collator)

    class Below(AutoAccumMixin, Loading):
        pass

    class Above(AutoAccumTrainer):
        size = 8
        get_train_dataloader = Loading.get_train_dataloader

    for kind in (Below, Above):
        with pytest.raises(ArgumentError, match=r"get_train_dataloader=8: expected a loader that yields 32 samples"):
            trainer(tmp_path, kind, effective_batch=32).train()
    # By the arguments it yields windows, as the stock one does.
    Below.size = None
    found = trainer(tmp_path, Below, effective_batch=32)
    found.train()
    assert sum(found.accumulator.micro_batches) in (32, 70 % 32)


def test_accumulation_that_is_set_later_is_refused(tmp_path: Path) -> None:
    """As a search over it does, by which each window would drop the gradient of the one before."""
    found = trainer(tmp_path, effective_batch=16)
    found.args.gradient_accumulation_steps = 2
    with pytest.raises(ConflictingArgumentsError, match="gradient_accumulation_steps=2"):
        found.train()


def test_two_ranks_train_what_the_stock_trainer_does_on_two(tmp_path: Path) -> None:
    script, found = Path(__file__).parent / "ranks_of_trainers.py", {}
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    for kind in ("stock", "ours"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        command += [str(tmp_path), kind, "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr
        found[kind] = [json.loads((tmp_path / f"{kind}{rank}.json").read_text()) for rank in range(2)]
    for ours, stock in zip(found["ours"], found["stock"], strict=True):
        assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-10)
        logged = [entry["loss"] for entry in stock["logged"] if "loss" in entry]  # the mean of the ranks' own
        assert ours["losses"] == pytest.approx(logged, rel=1e-6)
    assert found["ours"][0]["losses"] == found["ours"][1]["losses"]
    assert (tmp_path / "checkpoint-3" / "autoaccum_1.pt").exists()


def test_training_steps_that_make_their_batches_are_told_by_their_code() -> None:
    from trl import DPOTrainer, RewardTrainer, SFTTrainer
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.online_dpo import OnlineDPOTrainer

    assert all(makes_batches(kind.training_step) for kind in (GKDTrainer, OnlineDPOTrainer))
    kept = (SFTTrainer, DPOTrainer, RewardTrainer, Trainer)
    assert not any(makes_batches(kind.training_step) for kind in kept)
