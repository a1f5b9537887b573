"""Evaluations that run out of memory: their results are whole and in order, and training hears nothing of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import Trainer

from autoaccum.errors import AutoaccumWarning, NothingFitsError
from autoaccum.events import OutOfMemory
from autoaccum.integrations.transformers import AutoAccumTrainer
from autoaccum.testing import oom_at, simulated_memory
from tests.integrations.trainer_runs import (
    MODELS,
    arguments,
    collate,
    distilbert,
    gpt2,
    in_double,
    made,
    t5,
    texts,
    train,
)

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore::FutureWarning")]


class TestEvaluation:
    @pytest.mark.parametrize("make", [distilbert, gpt2, t5], ids=lambda make: make.__name__)
    def test_one_that_runs_out_of_memory_is_whole_and_in_order(self, make: Callable[[], Any], tmp_path: Path) -> None:
        seen: list[Any] = []

        def accuracy(predicted: Any) -> dict[str, float]:
            logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
            seen.append((logits, predicted.label_ids))
            return {"accuracy": float((logits.argmax(-1) == predicted.label_ids).mean())}

        faults: list[Any] = []

        def trained(kind: type) -> Any:
            class Faulty(kind):  # type: ignore[misc]
                def prediction_step(self, *rest: Any, **options: Any) -> Any:
                    with faults.pop() if faults else contextlib.nullcontext():
                        return super().prediction_step(*rest, **options)

            args = arguments(tmp_path, per_device_train_batch_size=16, per_device_eval_batch_size=10, max_steps=1)
            return train(Faulty, made(make), args, MODELS[make](), compute_metrics=accuracy).trainer

        held = MODELS[make](25)
        with in_double():
            stock, found = trained(Trainer), trained(AutoAccumTrainer)
            plan = found.accumulator.micro_batches
            expected = stock.evaluate(held)
            faults.append(oom_at(None))
            count = faults[0]
            found.evaluate(held)
            for n in (1, count.operations // 2):
                faults.append(oom_at(n))
                with pytest.warns(AutoaccumWarning, match="evaluated 5 at a time"):
                    result = found.evaluate(held)
                assert found.evaluation.micro_batch == 5
                found.evaluation.micro_batch = None
                for name in ("eval_loss", "eval_accuracy"):
                    assert result[name] == pytest.approx(expected[name], rel=1e-10)
        assert len(seen) == 4
        for logits, labels in seen[1:]:
            np.testing.assert_allclose(logits, seen[0][0], rtol=1e-9)
            np.testing.assert_array_equal(labels, seen[0][1])
        # Training has heard nothing of it.
        assert found.accumulator.micro_batches == plan
        assert not any(isinstance(event, OutOfMemory) for event in found.accumulator.events)

    def test_one_in_which_not_even_one_sample_fits_says_so(self, tmp_path: Path) -> None:
        trainer = AutoAccumTrainer(made(gpt2), arguments(tmp_path), data_collator=collate)
        with simulated_memory("10KiB"), pytest.raises(NothingFitsError), pytest.warns(AutoaccumWarning):
            trainer.evaluate(texts(4))
