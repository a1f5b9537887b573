"""KTO, whose loss compares each answer with a mean over the batch: that of the window, however it is cut."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import datasets
from trl import KTOConfig, KTOTrainer

from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.events import OutOfMemory
from autoaccum.integrations.trainer_arguments import compares_batch
from autoaccum.integrations.transformers import AutoAccumMixin
from autoaccum.testing import oom_at
from tests.integrations.test_trainer_batches import options, tokenizer
from tests.integrations.trainer_runs import WORDS, Run, farthest, gpt2, lora, made, train

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")),
]


class AutoAccumKTOTrainer(AutoAccumMixin, KTOTrainer):
    pass


def answers(count: int = 40) -> datasets.Dataset:
    """Return answers that were liked in runs, so that some micro-batches have but one kind."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(count):
        said = []
        for most in (5, 9):
            length = int(torch.randint(2, most, (1,), generator=generator))
            words = torch.randint(3, WORDS, (length,), generator=generator).tolist()
            said.append(" ".join(f"w{word}" for word in words))
        rows.append({"prompt": said[0], "completion": " " + said[1], "label": index // 4 % 2 == 0})
    return datasets.Dataset.from_list(rows)


def sharp() -> torch.nn.Module:
    """Return a model that is surer of what is likely than its reference is."""
    return gpt2(initializer_range=0.3)


def run(path: Path, kind: type, more: dict[str, Any], model: Any = sharp, **args: Any) -> Run:
    given = options(KTOConfig, path, **{"beta": 1.0, "num_train_epochs": 4, **args})
    reference = {} if model is lora else {"ref_model": made(gpt2)}
    tools = {"processing_class": tokenizer(), "data_collator": None}
    return train(kind, made(model), given, answers(), **tools, **reference, **more)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"loss_type": "apo_zero_unpaired"},
        {"precompute_ref_log_probs": True},
        {"model": lora, "learning_rate": 1.0, "max_grad_norm": 0.0, "desirable_weight": 5.0},
    ],
    ids=["kto", "apo", "precomputed", "lora"],
)
def test_it_trains_and_logs_what_the_big_batch_does(args: Any, tmp_path: Path) -> None:
    expected = run(tmp_path / "stock", KTOTrainer, {}, per_device_train_batch_size=16, max_steps=10, **args)
    found = run(tmp_path / "ours", AutoAccumKTOTrainer, {"effective_batch": 16, "micro_batch": 3}, max_steps=10, **args)
    assert len(found.trainer.accumulator.micro_batches) > 1
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert farthest(found.gradients, expected.gradients) < 2e-5  # 1.03e-5 where vectors have 256 bits
    for one, other in zip(found.logged, expected.logged, strict=True):
        assert one.keys() == other.keys()
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    has_term = "loss_type" not in args
    assert any(entry.get("kl", 0) > 1e-3 for entry in expected.logged) == has_term, "else nothing was compared"


def test_a_window_that_ran_out_of_memory_is_run_again() -> None:
    runs = []
    for operation in (None, 40, 400):
        fault = oom_at(operation)

        def around(step: int, fault: Any = fault) -> Any:
            return fault if step == 1 else contextlib.nullcontext()

        more = {"effective_batch": 16, "micro_batch": 8, "verify": False, "around": around}
        runs.append(run(Path("unused"), AutoAccumKTOTrainer, more))
        events = runs[-1].trainer.accumulator.events
        assert any(isinstance(event, OutOfMemory) for event in events) == (operation is not None)
    for found in runs[1:]:
        assert found.losses == pytest.approx(runs[0].losses, rel=1e-5)


def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    runs = []
    for name, resume in (("whole", None), ("rest", str(tmp_path / "whole" / "checkpoint-4"))):
        more = {"effective_batch": 16, "micro_batch": 3, "resume": resume}
        kept = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10}
        runs.append(run(tmp_path / name, AutoAccumKTOTrainer, more, **kept))
    whole, rest = runs
    assert len(rest.losses) == 6
    assert rest.losses == whole.losses[4:]
    assert farthest(rest.gradients, whole.gradients[4:]) == 0.0


def test_an_evaluation_that_ran_out_of_memory_has_the_term_of_the_whole_batch(tmp_path: Path) -> None:
    found = []
    for kind in (KTOTrainer, AutoAccumKTOTrainer):

        class Evaluated(kind):  # type: ignore[misc]
            def prediction_step(self, *rest: Any, **options: Any) -> Any:
                is_first = isinstance(self, AutoAccumMixin) and self.evaluation.micro_batch is None
                with oom_at(50) if is_first else contextlib.nullcontext():
                    return super().prediction_step(*rest, **options)

        expects: Any = contextlib.nullcontext()
        if kind is AutoAccumKTOTrainer:
            expects = pytest.warns(AutoaccumWarning, match="with the same results")
        trainer = run(tmp_path, Evaluated, {}, per_device_eval_batch_size=12, max_steps=1, learning_rate=0.5).trainer
        with expects:
            found.append(trainer.evaluate(trainer.train_dataset.select(range(20))))
    assert trainer.evaluation.micro_batch == 6
    assert found[0].keys() == found[1].keys()
    assert found[0]["eval_kl"] > 1e-3
    for name, value in found[0].items():
        if not name.endswith(("runtime", "per_second", "preparation_time")):
            assert found[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_several_ranks_are_refused() -> None:
    class KTOTrainer(SimpleNamespace):
        pass

    several = KTOTrainer(calculate_KL=True, loss_type="kto", accelerator=SimpleNamespace(num_processes=2))
    with pytest.raises(ArgumentError, match=r"^loss_type='kto': .*apo_zero_unpaired"):
        compares_batch(several)
