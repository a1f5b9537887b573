"""Scripts of the shape that the docs of transformers and Lightning show, moved over in one line, on data made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("trl")

import lightning.pytorch as pl
import transformers
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from autoaccum.integrations.lightning import AutoAccum
from autoaccum.integrations.transformers import AutoAccumMixin, AutoAccumTrainer
from tests.integrations.lightning_runs import QUIET, Watch, trainer_of
from tests.integrations.lightning_runs import farthest as farthest_of_modules
from tests.integrations.test_trainer_batches import tokenizer
from tests.integrations.trainer_runs import WORDS, arguments, bert_of_words, farthest, in_double, made, t5, texts, train

pytestmark = [pytest.mark.integrations, *QUIET, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class AutoAccumSeq2SeqTrainer(AutoAccumMixin, Seq2SeqTrainer):
    pass


def yolos() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_mid_position_embeddings": False}
    config = transformers.YolosConfig(**sizes, **still, image_size=[16, 16], patch_size=8, num_detection_tokens=4)
    return transformers.YolosForObjectDetection(config)


def boxes(count: int = 40) -> list[dict[str, Any]]:
    """Return images with one to three boxes each, as the docs on object detection have them."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        there = 1 + index % 3
        label = {"class_labels": torch.randint(3, (there,), generator=drawn)}
        label["boxes"] = torch.rand(there, 4, generator=drawn) * 0.3 + 0.3
        found.append({"pixel_values": torch.randn(3, 16, 16, generator=drawn), "labels": label})
    return found


def collate_boxes(samples: list[Any]) -> dict[str, Any]:
    kind = torch.get_default_dtype()
    labels = [{**sample["labels"], "boxes": sample["labels"]["boxes"].to(kind)} for sample in samples]
    return {"pixel_values": torch.stack([sample["pixel_values"] for sample in samples]).to(kind), "labels": labels}


def masked() -> dict[str, Any]:
    known = tokenizer()
    known.add_special_tokens({"mask_token": "w2"})
    return {"data_collator": transformers.DataCollatorForLanguageModeling(known, mlm_probability=0.15)}


def translated() -> dict[str, Any]:
    return {"data_collator": transformers.DataCollatorForSeq2Seq(tokenizer()), "processing_class": tokenizer()}


def plain() -> dict[str, Any]:
    return {"data_collator": collate_boxes}


@pytest.mark.parametrize(
    ("stock", "ours", "make", "data", "more"),
    [
        # Masks are drawn as each batch is made: by what is drawn here the next ones would be others.
        (Trainer, AutoAccumTrainer, bert_of_words, [{"input_ids": text["input_ids"]} for text in texts()], masked),
        (Seq2SeqTrainer, AutoAccumSeq2SeqTrainer, t5, texts(), translated),
        (Trainer, AutoAccumTrainer, yolos, boxes(), plain),
    ],
    ids=["masked language modeling", "translation", "object detection"],
)
def test_a_script_of_transformers(
    stock: type, ours: type, make: Callable[[], Any], data: Any, more: Callable[[], Any], tmp_path: Path
) -> None:
    with in_double():
        kind = Seq2SeqTrainingArguments if stock is Seq2SeqTrainer else TrainingArguments
        options = {"per_device_train_batch_size": 16, "max_steps": 10, "learning_rate": 0.01}
        args = arguments(tmp_path, kind, remove_unused_columns=False, **options)
        expected = train(stock, made(make), args, data, **more())
        found = train(ours, made(make), args, data, **more(), micro_batch=3)
    assert len(found.trainer.accumulator.micro_batches) > 1
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert farthest(found.gradients, expected.gradients) < 1e-9


class Words(Dataset[Any]):
    """Words, and the same a place further on."""

    def __init__(self) -> None:
        self._words = torch.randint(WORDS, (1000,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._words[index * 20 : index * 20 + 20], self._words[index * 20 + 1 : index * 20 + 21]


class OfWords(LightningTransformer):  # type: ignore[misc]
    """Lightning's own, without what downloads and without dropout."""

    def __init__(self) -> None:
        super().__init__(WORDS)
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0

    def prepare_data(self) -> None:
        """Make nothing."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Words(), batch_size=8)


class Transfer(pl.LightningModule):  # type: ignore[misc]
    """A frozen backbone with BatchNorm, and a classifier of its features, as the docs on transfer learning have it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.classifier = nn.Linear(64, 3)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.backbone.eval()
        with torch.no_grad():
            features = self.backbone(x)
        loss = binary_cross_entropy_with_logits(self.classifier(features), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.classifier.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        drawn = torch.Generator().manual_seed(0)
        images = torch.randn(40, 1, 6, 6, generator=drawn, dtype=torch.float64)
        return DataLoader(TensorDataset(images, images.mean((2, 3)).expand(-1, 3).gt(0).double()), batch_size=16)


class Forecast(pl.LightningModule):  # type: ignore[misc]
    """A recurrent net over time series, with a warm-up in optimizer_step, as the docs on optimization have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        series, following = batch
        loss = mse_loss(self.head(self.net(series)[0][:, -1]), following)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 5 * 0.02

    def train_dataloader(self) -> DataLoader[Any]:
        series = torch.randn(40, 7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return DataLoader(TensorDataset(series, series.sum((1, 2))[:, None]), batch_size=16)


@pytest.mark.parametrize("kind", [OfWords, Transfer, Forecast])
def test_a_module_of_lightning(kind: type) -> None:
    found = []
    for callbacks in ([], [AutoAccum(micro_batch=3)]):
        torch.manual_seed(3)
        module: Any = kind().double()
        watch = Watch()
        torch.manual_seed(7)
        trainer_of([*callbacks, watch], max_steps=10, limit_val_batches=0).fit(module)
        found.append(watch)
    expected, ours = found
    assert ours.losses == pytest.approx(expected.losses, rel=1e-10)
    # A transformer at a rate of 0.1 makes much of what is rounded in its first steps.
    assert farthest_of_modules(ours.gradients, expected.gradients) < (1e-6 if kind is OfWords else 1e-10)
    assert ours.rates == expected.rates
    assert [one.keys() for one in ours.logged] == [one.keys() for one in expected.logged]
