"""Trainers of sentence-transformers, whose losses compare all samples of a window."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer import losses as of_sentences
from sentence_transformers.sentence_transformer.modules import Pooling

from autoaccum.errors import ArgumentError, AutoaccumWarning
from autoaccum.events import OutOfMemory
from autoaccum.integrations.transformers import AutoAccumMixin
from autoaccum.testing import oom_at
from tests.integrations.test_trainer_batches import tokenizer
from tests.integrations.trainer_runs import WORDS, Run, bert_of_words, farthest, in_double, made, train

pytestmark = [
    pytest.mark.integrations,
    *map(pytest.mark.filterwarnings, ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")),
]


class AutoAccumSentenceTrainer(AutoAccumMixin, SentenceTransformerTrainer):
    pass


def sentence_pairs(count: int = 40, **columns: Any) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)

    def said() -> str:
        length = int(torch.randint(2, 8, (1,), generator=generator))
        return " ".join(f"w{word}" for word in torch.randint(3, WORDS, (length,), generator=generator).tolist())

    rows = [{"anchor": said(), "positive": said()} for _ in range(count)]
    return datasets.Dataset.from_list([{**row, **{n: f(i) for n, f in columns.items()}} for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], SentenceTransformer]:
    """Return what makes the same encoder each time; it is read from a directory, as such encoders are."""
    path = tmp_path_factory.mktemp("encoder")
    made(bert_of_words).bert.save_pretrained(path)
    tokenizer().save_pretrained(path)

    def make() -> SentenceTransformer:
        torch.manual_seed(1)  # of the pooler, which was not saved
        words = Transformer(str(path))
        parts = [words, Pooling(words.get_word_embedding_dimension())]
        return SentenceTransformer(modules=parts, device="cpu").to(torch.get_default_dtype())

    return make


def run(kind: type, model: Any, path: Path, loss: Any, data: Any, more: dict[str, Any], **args: Any) -> Run:
    usual = {"max_steps": 5, "learning_rate": 0.05, "optim": "sgd", "save_strategy": "no", "report_to": []}
    usual |= {"disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "log_level": "error"}
    given = SentenceTransformerTrainingArguments(output_dir=str(path), **usual | args)
    torch.manual_seed(2)
    return train(kind, model, given, data, loss=loss(model), data_collator=None, **more)


def classifier(model: Any) -> Any:
    return of_sentences.SoftmaxLoss(model, model.get_sentence_embedding_dimension(), 3)


LOSSES = {
    of_sentences.MultipleNegativesRankingLoss: {},
    of_sentences.CosineSimilarityLoss: {"label": lambda index: index / 40},
    classifier: {"label": lambda index: index % 3},
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_it_trains_what_the_big_batch_does(loss: Any, encoder: Callable[[], Any], tmp_path: Path) -> None:
    data = sentence_pairs(**LOSSES[loss])
    with in_double():
        stock, windows = SentenceTransformerTrainer, AutoAccumSentenceTrainer
        expected = run(stock, encoder(), tmp_path, loss, data, {}, per_device_train_batch_size=16, max_steps=20)
        more = {"effective_batch": 16, "micro_batch": 3}
        found = run(windows, encoder(), tmp_path, loss, data, more, max_steps=20)
    assert len(found.trainer.accumulator.micro_batches) > 1
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert farthest(found.gradients, expected.gradients) < 1e-8
    rates = [[entry.get("learning_rate") for entry in run.logged] for run in (found, expected)]
    assert rates[0] == rates[1]
    assert found.trainer.lr_scheduler.last_epoch == len(found.gradients) == 20
    for one, other in zip(found.trainer.loss.parameters(), expected.trainer.loss.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_a_window_that_ran_out_of_memory_leaves_no_mark(encoder: Callable[[], Any], tmp_path: Path) -> None:
    def faulty(operation: int | None) -> Run:
        fault = oom_at(operation)

        def around(step: int) -> Any:
            return fault if step == 1 else contextlib.nullcontext()

        more = {"effective_batch": 16, "micro_batch": 8, "accumulate": "joined", "verify": False, "around": around}
        loss = of_sentences.MultipleNegativesRankingLoss
        return run(AutoAccumSentenceTrainer, encoder(), tmp_path, loss, sentence_pairs(), more)

    with in_double():
        expected = faulty(None)
        for operation in (100, 500):  # an earlier one falls into a measurement, which goes without
            found = faulty(operation)
            assert OutOfMemory in map(type, found.trainer.accumulator.events)
            assert found.losses == pytest.approx(expected.losses, rel=1e-10)
            assert found.calls == ["begin", "end"] * 5


def test_a_training_that_goes_on_ends_as_if_it_had_never_been_interrupted(
    encoder: Callable[[], Any], tmp_path: Path
) -> None:
    runs = []
    for name, resume in (("whole", None), ("rest", str(tmp_path / "whole" / "checkpoint-2"))):
        more = {"effective_batch": 16, "micro_batch": 3, "resume": resume}
        saving = {"save_strategy": "steps", "save_steps": 2}
        loss = of_sentences.MultipleNegativesRankingLoss
        runs.append(run(AutoAccumSentenceTrainer, encoder(), tmp_path / name, loss, sentence_pairs(), more, **saving))
    whole, rest = runs
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert rest.trainer.lr_scheduler.last_epoch == 5


def test_several_datasets_have_a_loss_each(encoder: Callable[[], Any], tmp_path: Path) -> None:
    data = datasets.DatasetDict(
        {"pairs": sentence_pairs(), "scores": sentence_pairs(label=lambda index: index / 40)},
    )

    def loss(model: Any) -> Any:
        ranking, similarity = of_sentences.MultipleNegativesRankingLoss, of_sentences.CosineSimilarityLoss
        return {"pairs": ranking(model), "scores": similarity(model)}

    with in_double():
        stock, windows = SentenceTransformerTrainer, AutoAccumSentenceTrainer
        expected = run(stock, encoder(), tmp_path, loss, data, {}, per_device_train_batch_size=8)
        found = run(windows, encoder(), tmp_path, loss, data, {"effective_batch": 8, "micro_batch": 3})
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


def test_an_evaluation_that_ran_out_of_memory_has_the_loss_of_the_whole_batch(
    encoder: Callable[[], Any], tmp_path: Path
) -> None:
    class Evaluated(AutoAccumSentenceTrainer):
        def prediction_step(self, *rest: Any, **options: Any) -> Any:
            with oom_at(20) if self.evaluation.micro_batch is None and is_faulty else contextlib.nullcontext():
                return super().prediction_step(*rest, **options)

    with in_double():
        loss = of_sentences.MultipleNegativesRankingLoss
        trainer = run(Evaluated, encoder(), tmp_path, loss, sentence_pairs(), {}, max_steps=1).trainer
        is_faulty = False
        expected = trainer.evaluate(sentence_pairs(16))["eval_loss"]
        is_faulty = True
        with pytest.warns(AutoaccumWarning, match="4 at a time"):
            assert trainer.evaluate(sentence_pairs(16))["eval_loss"] == pytest.approx(expected, rel=1e-10)


def test_a_loss_that_cuts_by_itself_is_refused(encoder: Callable[[], Any], tmp_path: Path) -> None:
    loss = of_sentences.CachedMultipleNegativesRankingLoss
    with pytest.raises(ArgumentError, match="MultipleNegativesRankingLoss"):
        run(AutoAccumSentenceTrainer, encoder(), tmp_path, loss, sentence_pairs(), {})
