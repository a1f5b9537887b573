"""A name that no validation reports is refused as soon as it can be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EarlyStopping, ReduceOnPlateau
from autoaccum.errors import ArgumentError
from autoaccum.events import StepReport
from tests.models import classes, mlp


def loss_beside(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    loss = cross_entropy(outputs, targets)
    return loss, {"acc": (outputs.argmax(1) == targets).float().mean(), "rows": outputs}


def two_losses(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return {"first": cross_entropy(outputs, targets), "second": cross_entropy(2 * outputs, targets)}


def in_eval_mode_alone(model: Any, batch: Any) -> Any:
    loss = cross_entropy(model(batch[0]), batch[1])
    return loss if model.training else (loss, {"acc": loss.detach()})


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == targets


class TestNames:
    @staticmethod
    def run(metric: str, windows: list[int], make: Any = EarlyStopping, **options: Any) -> Any:
        def count(record: Any) -> None:
            windows.extend([record.step] if isinstance(record, StepReport) else [])

        given: dict[str, Any] = {"loss_fn": cross_entropy} if "training_step" not in options else {}
        return autoaccum.fit(
            mlp(), classes(16), effective_batch=4, micro_batch=4, epochs=2, device="cpu", progress=False, cache=False,
            verify=False, validation_data=classes(8), callbacks=[count, make(metric=metric, mode="max")], **{**given, **options},
        )  # fmt: skip

    @pytest.mark.parametrize("make", [EarlyStopping, ReduceOnPlateau])
    @pytest.mark.parametrize("loss_fn", [cross_entropy, torch.nn.CrossEntropyLoss()])
    def test_before_training_where_nothing_can_stand_beside_the_loss(self, make: Any, loss_fn: Any) -> None:
        windows: list[int] = []
        with pytest.raises(
            ArgumentError, match=r"^metric='accuracy': expected one of acc, loss, .* Did you mean acc\?"
        ):
            self.run("accuracy", windows, make, loss_fn=loss_fn, metrics={"acc": accuracy})
        assert windows == []

    @pytest.mark.parametrize(
        ("options", "names", "meant"),
        [
            ({"loss_fn": loss_beside}, "acc, loss", "acc"),
            ({"loss_fn": two_losses, "metrics": {"accurate": accuracy}}, "accurate, loss, loss/first", "accurate"),
            ({"training_step": in_eval_mode_alone}, "acc, loss", "acc"),
        ],
    )
    def test_once_a_window_has_shown_what_does(self, options: Any, names: str, meant: str) -> None:
        windows: list[int] = []
        with pytest.raises(
            ArgumentError, match=rf"^metric='accuracy': expected one of {names}.* Did you mean {meant}\?"
        ):
            self.run("accuracy", windows, **options)
        assert windows == [1]

    @pytest.mark.parametrize(
        ("metric", "options"),
        [
            ("acc", {"loss_fn": loss_beside}),
            ("loss/second", {"loss_fn": two_losses}),
            ("acc", {"training_step": in_eval_mode_alone}),
            ("acc", {"metrics": {"acc": accuracy}}),
        ],
    )
    def test_what_is_reported_is_taken(self, metric: str, options: Any) -> None:
        windows: list[int] = []
        self.run(metric, windows, **options)
        assert windows == list(range(1, 9))

    def test_to_look_leaves_no_trace(self) -> None:
        """A loss that draws draws the same without it."""

        def step(model: Any, batch: Any) -> Any:
            loss = cross_entropy(model(batch[0]) + torch.randn(()), batch[1])
            return loss if model.training else (loss, {"acc": loss.detach()})

        torch.manual_seed(0)
        looked = self.run("acc", [], training_step=step)
        torch.manual_seed(0)
        plain = self.run("loss", [], training_step=step)
        assert [report.loss for report in looked.history] == [report.loss for report in plain.history]

    def test_rows_are_none_of_them(self) -> None:
        with pytest.raises(ArgumentError, match=r"^metric='rows': expected one of acc, loss, which"):
            self.run("rows", windows := [], loss_fn=loss_beside)
        assert windows == [1]
