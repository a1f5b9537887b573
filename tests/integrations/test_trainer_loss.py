"""What a trainer notes of micro-batches, which is kept apart until their window is done."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from autoaccum.integrations.trainer_loss import log_window, logging_of, weight

pytestmark = pytest.mark.integrations


def noting() -> Any:
    return SimpleNamespace(_metrics={"train": defaultdict(list, entropy=[1.0])}, _total_train_tokens=10)


def test_what_is_noted_within_a_micro_batch_is_not_noted_by_the_trainer() -> None:
    trainer = noting()
    with logging_of(trainer, "train") as logged:
        trainer._metrics["train"]["entropy"].append(3.0)
        trainer._total_train_tokens += 6
    assert trainer._metrics["train"] == {"entropy": [1.0]}
    assert trainer._total_train_tokens == 10
    beside = logged.beside(4, {}, 3)
    assert beside["entropy"] == (3.0, 4)
    log_window(trainer, {"entropy": 2.5, "autoaccum_tokens": beside["autoaccum_tokens"]})
    assert trainer._metrics["train"] == {"entropy": [1.0, 2.5], "num_tokens": [16]}


def test_nothing_is_noted_of_one_that_failed() -> None:
    trainer = noting()

    def fail() -> None:
        with logging_of(trainer, "train"):
            trainer._metrics["train"]["entropy"].append(3.0)
            trainer._total_train_tokens += 6
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
    assert (trainer._metrics["train"], trainer._total_train_tokens) == ({"entropy": [1.0]}, 10)


def test_a_batch_weighs_what_its_labels_count() -> None:
    labels = torch.tensor([[5, -100, 7], [1, 2, -100]])
    batch = {"input_ids": labels, "labels": labels}
    assert weight(SimpleNamespace(_loss_shifts_labels=True), batch, 2) == 2
    assert weight(SimpleNamespace(_loss_shifts_labels=False), batch, 2) == 4
    scores = {"input_ids": labels, "labels": torch.rand(2)}
    assert weight(SimpleNamespace(_loss_shifts_labels=False), scores, 2) == 2
