"""Batches of preferences, whose samples lie in two halves: TRL's DPOTrainer and RewardTrainer, beside SFTTrainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from autoaccum.data.splits import split_of
from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.events import OutOfMemory, Verified
from autoaccum.integrations.trainer_batches import InHalves, layout_of
from autoaccum.integrations.transformers import AutoAccumMixin
from autoaccum.testing import oom_at
from tests.integrations.trainer_runs import WORDS, Run, farthest, gpt2, made, texts, train

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")),
]


class AutoAccumSFTTrainer(AutoAccumMixin, SFTTrainer):
    pass


class AutoAccumDPOTrainer(AutoAccumMixin, DPOTrainer):
    pass


class AutoAccumRewardTrainer(AutoAccumMixin, RewardTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of as many words as the models know."""
    words = {f"w{index}": index for index in range(WORDS)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )


def preferences(count: int = 40) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        parts = []
        for _ in range(3):
            length = int(torch.randint(2, 6, (1,), generator=generator))
            parts.append(torch.randint(3, WORDS, (length,), generator=generator).tolist())
        said = [" ".join(f"w{word}" for word in part) for part in parts]
        rows.append({"prompt": said[0], "chosen": " " + said[1], "rejected": " " + said[2]})
    return datasets.Dataset.from_list(rows)


def options(kind: type, path: Path, **more: Any) -> Any:
    usual = {"max_steps": 4, "learning_rate": 0.05, "optim": "sgd", "save_strategy": "no", "report_to": []}
    usual |= {"disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "log_level": "error", "bf16": False}
    usual |= {"activation_checkpointing": False}
    return kind(output_dir=str(path), **usual | more)


def of_answers(path: Path, kind: type, more: dict[str, Any], **args: Any) -> Run:
    data = datasets.Dataset.from_list([{**one, "attention_mask": [1] * len(one["input_ids"])} for one in texts(40)])
    given = options(SFTConfig, path, dataset_kwargs={"skip_prepare_dataset": True}, **args)
    return train(kind, made(gpt2), given, data, processing_class=tokenizer(), data_collator=None, **more)


def of_preferences(path: Path, kind: type, more: dict[str, Any], **args: Any) -> Run:
    given = options(DPOConfig, path, **args)
    reference = {"ref_model": made(lambda: gpt2(initializer_range=0.03))}
    more = more | reference
    return train(kind, made(gpt2), given, preferences(), processing_class=tokenizer(), data_collator=None, **more)


def of_rewards(path: Path, kind: type, more: dict[str, Any], **args: Any) -> Run:
    def rewarding() -> torch.nn.Module:
        sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return GPT2ForSequenceClassification(GPT2Config(**sizes, **still, num_labels=1, pad_token_id=0))

    given = options(RewardConfig, path, center_rewards_coefficient=0.1, **args)
    return train(kind, made(rewarding), given, preferences(), processing_class=tokenizer(), data_collator=None, **more)


of_each = pytest.mark.parametrize(
    ("run", "stock", "windows"),
    [
        (of_answers, SFTTrainer, AutoAccumSFTTrainer),
        (of_preferences, DPOTrainer, AutoAccumDPOTrainer),
        (of_rewards, RewardTrainer, AutoAccumRewardTrainer),
    ],
    ids=["sft", "dpo", "reward"],
)


@of_each
def test_it_trains_and_logs_what_the_big_batch_does(
    run: Callable[..., Run], stock: type, windows: type, tmp_path: Path
) -> None:
    # TRL's kernels know single precision alone, which ten steps at a large rate make much of.
    args = {"max_steps": 10, "learning_rate": 1e-2, "warmup_steps": 3, "lr_scheduler_type": "cosine"}
    expected = run(tmp_path, stock, {}, per_device_train_batch_size=16, **args)
    found = run(tmp_path, windows, {"effective_batch": 16, "micro_batch": 3}, **args)
    assert len(found.trainer.accumulator.micro_batches) > 1
    assert len(found.gradients) == found.trainer.lr_scheduler.last_epoch == 10
    assert found.calls == ["begin", "end"] * 10
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert farthest(found.gradients, expected.gradients) < 1e-5
    for one, other in zip(found.logged, expected.logged, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@of_each
def test_a_window_that_ran_out_of_memory_leaves_no_mark(
    run: Callable[..., Run], stock: type, windows: type, tmp_path: Path
) -> None:
    def faulty(operation: int | None) -> Run:
        fault = oom_at(operation)

        def around(step: int) -> Any:
            return fault if step == 1 else contextlib.nullcontext()

        return run(tmp_path, windows, {"effective_batch": 16, "micro_batch": 8, "verify": False, "around": around})

    expected = faulty(None)
    for operation in (30, 300):
        found = faulty(operation)
        assert OutOfMemory in map(type, found.trainer.accumulator.events)
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.calls == ["begin", "end"] * 4
        for one, other in zip(found.logged, expected.logged, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6), "nothing was noted of what was broken off"


@of_each
def test_a_training_that_goes_on_ends_as_if_it_had_never_been_interrupted(
    run: Callable[..., Run], stock: type, windows: type, tmp_path: Path
) -> None:
    saving, more = {"save_strategy": "steps", "save_steps": 2}, {"effective_batch": 16, "micro_batch": 3}
    whole = run(tmp_path / "whole", windows, more, **saving)
    more = more | {"resume": str(tmp_path / "whole" / "checkpoint-2")}
    rest = run(tmp_path / "rest", windows, more, **saving)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    measured = [
        [event.step for event in each.trainer.accumulator.events if isinstance(event, Verified)]
        for each in (whole, rest)
    ]
    assert measured[1] == [step for step in measured[0] if step > 2], "what was measured before is known"


@of_each
def test_an_evaluation_that_ran_out_of_memory_logs_what_it_would_have(
    run: Callable[..., Run], stock: type, windows: type, tmp_path: Path
) -> None:
    found = []
    for kind in (stock, windows):

        class Evaluated(kind):  # type: ignore[misc]
            def prediction_step(self, *rest: Any, **options: Any) -> Any:
                is_first = isinstance(self, windows) and self.evaluation.micro_batch is None
                with oom_at(50) if is_first else contextlib.nullcontext():
                    return super().prediction_step(*rest, **options)

        expects = pytest.warns(AutoaccumWarning) if kind is windows else contextlib.nullcontext()
        trainer = run(tmp_path, Evaluated, {}, per_device_eval_batch_size=12, max_steps=1).trainer
        with expects:
            found.append(trainer.evaluate(trainer.train_dataset.select(range(20))))
    assert found[0].keys() == found[1].keys()
    assert trainer.evaluation.micro_batch == 6
    for name, value in found[0].items():
        if not name.endswith(("runtime", "per_second", "preparation_time")):
            assert found[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_halves_are_paired_and_parted_again() -> None:
    batch = {"input_ids": torch.arange(12).reshape(6, 2), "ref_chosen_logps": torch.arange(3.0), "use": True}
    layout = InHalves(split_of(None, 0, None, None))
    rows = layout.rows(batch)
    assert rows["input_ids"].tolist()[1] == [[2, 3], [8, 9]]
    assert rows["ref_chosen_logps"].tolist() == [0, 1, 2]
    back = layout.back({name: value[1:] if name != "use" else value for name, value in rows.items()})
    assert back["input_ids"].tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert back["ref_chosen_logps"].tolist() == [1, 2]


def test_samples_lie_where_the_options_say() -> None:
    layout = layout_of(SimpleNamespace(window_options={"batch_dim": 1}))
    rows = layout.rows({"input_ids": torch.arange(12).reshape(2, 6)})
    assert layout.count(rows) == 6
    assert layout.piece(rows, 4, 2)["input_ids"].tolist() == [[4, 5], [10, 11]]


def test_samples_in_one_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="padding_free=True"):
        of_answers(tmp_path, AutoAccumSFTTrainer, {}, padding_free=True, max_length=None)
