"""Validation, test and prediction of Lightning where memory runs out: in pieces, and no business of training."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("lightning")

import torch
import torchmetrics
from torch.utils.data import DataLoader

from autoaccum import errors
from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.lightning_evaluation import Evaluation, joined
from tests.integrations.lightning_runs import QUIET, Classifier, Watch, data_of, module_of, trainer_of

pytestmark = [pytest.mark.integrations, *QUIET]


class Evaluated(Classifier):
    """Holds no more than so many samples at once in validation, which it finds out after it has logged."""

    most = 1000

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.sizes: list[int] = []
        self.ended: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("val_accuracy", self.accuracy)
        self.kept.append(logits)
        torch.rand(1)
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes.append(len(x))
        return {"logits": logits, "mean": logits.mean()}

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append((len(batch[0]), outputs))


def trained(most: int) -> tuple[Any, Any, AutoAccum, Watch]:
    module, callback, watch = module_of(Evaluated), AutoAccum(16), Watch()
    module.most = most
    trainer = trainer_of([callback, watch], max_steps=-1, max_epochs=2)
    torch.manual_seed(7)
    loaders = DataLoader(data_of(Classifier), batch_size=4), DataLoader(data_of(Classifier), batch_size=25)
    trainer.fit(module, *loaders)
    return trainer, module, callback, watch


class TestOutOfMemory:
    def test_is_made_up_for_in_halves_and_training_hears_nothing(self) -> None:
        expected, whole, _, stock = trained(1000)
        trainer, module, callback, watch = trained(8)
        assert whole.sizes == [25, 25, 10] * 2
        assert module.sizes == [7, 7, 7, 4, 7, 7, 7, 4, 7, 3] * 2
        assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(
            {name: float(value) for name, value in expected.callback_metrics.items()}, rel=1e-10
        )
        torch.testing.assert_close(torch.cat(module.kept), torch.cat(whole.kept), rtol=1e-12, atol=1e-14)
        assert callback.micro_batches == (12,)
        assert watch.losses == stock.losses
        for (rows, outputs), (stock_rows, others) in zip(module.ended, whole.ended, strict=True):
            assert rows == stock_rows
            torch.testing.assert_close(outputs, others, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("call", ["validate", "test"])
    def test_of_a_call_by_itself(self, call: str) -> None:
        found = []
        for most in (1000, 8):
            module = module_of(Evaluated)
            module.most = most
            trainer = trainer_of([AutoAccum()])
            found += getattr(trainer, call)(module, DataLoader(data_of(Classifier), batch_size=25), verbose=False)
        assert found[1] == pytest.approx(found[0], rel=1e-10)
        assert set(found[0]) == {"val_loss", "val_right", "val_accuracy"}

    def test_of_a_single_sample_says_so(self) -> None:
        with pytest.raises(errors.NothingFitsError, match="validation_step"):
            trained(0)

    def test_any_other_error_comes_through(self) -> None:
        class Failing(Classifier):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                raise KeyError("own")

        with pytest.raises(KeyError, match="own"):
            trainer_of([AutoAccum()]).validate(
                module_of(Failing), DataLoader(data_of(Classifier), batch_size=25), verbose=False
            )


class TestRandomNumbers:
    def test_of_a_run_that_failed_are_drawn_again(self) -> None:
        drawn = []

        def stock(batch: torch.Tensor) -> None:
            drawn.append((len(batch), torch.rand(1).item()))
            if len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer = SimpleNamespace(
            _results=SimpleNamespace(), lightning_module=torch.nn.Linear(1, 1), strategy=SimpleNamespace()
        )
        trainer.strategy.root_device = torch.device("cpu")
        torch.manual_seed(1)
        first, second = torch.rand(1).item(), torch.rand(1).item()
        torch.manual_seed(1)
        evaluation = Evaluation(trainer, "validation_step", stock, {})
        assert evaluation.step(torch.zeros(4, 1)) is None
        assert drawn == [(4, first), (2, first), (2, second)]
        assert evaluation.largest == 2


class TestJoined:
    def test_pieces_in_each_form(self) -> None:
        rows = [torch.arange(3.0), torch.arange(1.0)]
        assert joined([None, None], [3, 1]) is None
        assert joined(rows, [3, 1]).tolist() == [0, 1, 2, 0]
        assert joined([torch.tensor(2.0), torch.tensor(4.0)], [3, 1]) == 2.5
        parts = [{"a": (torch.tensor(2.0), "x")}, {"a": (torch.tensor(4.0), "y")}]
        assert joined(parts, [3, 1]) == {"a": (torch.tensor(2.5), ["x", "y"])}

    def test_entries_of_samples_follow_each_other_and_outputs_stand_side_by_side(self) -> None:
        assert joined([["a", "b"], ["c"]], [2, 1]) == ["a", "b", "c"]
        assert joined([("a", "b"), ("c", "d")], [2, 2]) == ("a", "b", "c", "d")
        boxes = [torch.zeros(5, 4), torch.zeros(2, 4)]
        assert [len(box) for box in joined([boxes, boxes[:1]], [2, 1])] == [5, 2, 5]
        # Two outputs for two samples: it is their rows that tell.
        logits, labels = joined([[torch.zeros(2, 3), torch.zeros(2, 3)]] * 2, [2, 2])
        assert logits.shape == labels.shape == (4, 3)

    def test_of_a_class_of_its_own_it_is_one_of_that_class(self) -> None:
        @dataclass
        class Found:
            logits: torch.Tensor
            texts: list[str]

        class Pair(NamedTuple):
            a: torch.Tensor
            b: torch.Tensor

        found = joined([Found(torch.zeros(2), ["a", "b"]), Found(torch.ones(1), ["c"])], [2, 1])
        assert (found.logits.tolist(), found.texts) == ([0, 0, 1], ["a", "b", "c"])
        assert joined([Pair(torch.zeros(2), torch.ones(2)), Pair(torch.ones(1), torch.zeros(1))], [2, 1]).b.sum() == 2

    def test_what_cannot_be_one_is_refused_of_a_prediction_alone(self) -> None:
        counts = [torch.zeros(3, 3), torch.ones(3, 3)]
        assert [part.shape for part in joined(counts, [2, 1])] == [(3, 3), (3, 3)]
        for parts in ([{"counts": part} for part in counts], [{"counts": 1}, {"counts": 2}]):
            with pytest.raises(errors.OutputError, match=r"'counts'.*batch_size=2"):
                joined(parts, [2, 1], is_prediction=True)


class Predicting(Classifier):
    """Predicts of so many samples at once, and notes what was run."""

    most = 1000

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.seen = torchmetrics.SumMetric()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, _ = batch
        logits = self.net(x)
        noise = torch.rand(len(x), 1)
        self.seen.update(len(x))
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes.append(len(x))
        classes = logits.argmax(-1)
        return {"logits": logits, "names": [f"class {one}" for one in classes.tolist()], "pair": (classes, noise)}


class TestPrediction:
    def test_is_made_of_pieces_and_is_what_it_would_have_been(self) -> None:
        found, sizes, seen = [], [], []
        for most in (1000, 8):
            module = module_of(Predicting)
            module.most = most
            torch.manual_seed(5)
            loader = DataLoader(data_of(Classifier), batch_size=25)
            found.append(trainer_of([AutoAccum()]).predict(module, [loader, loader]))
            sizes.append(module.sizes)
            seen.append(module.seen.compute())
        assert sizes == [[25, 25, 10] * 2, [7, 7, 7, 4, 7, 7, 7, 4, 7, 3] * 2]
        assert seen == [120, 120]
        for stock, others in zip(*found, strict=True):
            assert [len(one["logits"]) for one in others] == [25, 25, 10]
            for one, other in zip(stock, others, strict=True):
                assert one["names"] == other["names"]
                torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-12, atol=1e-14)
                # What is random was drawn in the pieces as in the whole.
                assert torch.equal(one["pair"][0], other["pair"][0])
                assert torch.equal(one["pair"][1], other["pair"][1])

    def test_of_a_single_sample_says_so(self) -> None:
        module = module_of(Predicting)
        module.most = 0
        with pytest.raises(errors.NothingFitsError, match="predict_step"):
            trainer_of([AutoAccum()]).predict(module, DataLoader(data_of(Classifier), batch_size=25))
