"""Metrics of torchmetrics: a window is one update, however it was cut."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torchmetrics
from torch.nn.functional import cross_entropy

from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.lightning_metrics import is_metric
from tests.integrations.lightning_runs import QUIET, Classifier, module_of, run

pytestmark = [pytest.mark.integrations, *QUIET]
_CLASSES = {"task": "multiclass", "num_classes": 3}


class Measured(Classifier):
    """Metrics that are sums, lists, means of means, and a collection of some that share what they keep."""

    most = 1000

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(**_CLASSES)
        self.f1 = torchmetrics.F1Score(**_CLASSES, average="macro")
        self.auroc = torchmetrics.AUROC(**_CLASSES)
        self.mean, self.weighted = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        kinds = {"precision": torchmetrics.Precision(**_CLASSES), "recall": torchmetrics.Recall(**_CLASSES)}
        self.several = torchmetrics.MetricCollection(kinds)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.net(x)
        loss = cross_entropy(logits, y)
        shares = logits.detach().softmax(-1)
        self.log("returned", self.accuracy(shares, y))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.f1(shares, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.auroc.update(shares, y)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.mean(loss.detach())
        self.weighted(loss.detach(), weight=len(y))
        self.largest.update(logits.detach().max())
        self.log_dict({"mean": self.mean, "weighted": self.weighted}, on_step=True, on_epoch=True)
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.several.update(shares, y)
        self.log_dict(dict(self.several), on_step=False, on_epoch=True)
        if len(y) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


class Tight(Measured):
    """Runs out of memory after its metrics were updated."""

    most = 5


class TestMetrics:
    @pytest.mark.parametrize(("kind", "options"), [(Measured, {"micro_batch": 5}), (Tight, {})])
    def test_are_those_of_the_big_batch(self, kind: type, options: Any) -> None:
        expected = run(module_of(Measured), 16, max_steps=9)
        callback = AutoAccum(16, **options)
        found = run(module_of(kind), 4, callback, max_steps=9)
        assert len(callback.micro_batches) > 1
        assert set(found.logged[-1]) >= {"f1_step", "f1_epoch", "auroc", "mean_epoch", "precision", "largest"}
        for logged, stock in zip(found.logged, expected.logged, strict=True):
            assert logged == pytest.approx(stock, rel=1e-5)  # they are float32

    def test_are_told_from_values(self) -> None:
        assert is_metric(torchmetrics.MeanMetric())
        assert not is_metric(torch.zeros(()))
