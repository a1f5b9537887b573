"""Losses of sentences: through the adapter they have the gradient of the loss called with the whole window.

A stand-in has classes of the shape of sentence-transformers' own, which are compared too where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from autoaccum.loss.sentences import sentence_loss
from tests.models import relative_error
from tests.window_losses import F64, WINDOW, fitted, gradient_of

WORDS = 40


class Encoder(nn.Module):
    """It pools the words that a mask leaves, adds to what it is given, and draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 16)
        self.top = nn.Linear(16, 8)

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        mask = features["attention_mask"][:, :, None]
        features["token_embeddings"] = self.words(features["input_ids"]).tanh()
        features["sentence_embedding"] = self.top((features["token_embeddings"] * mask).sum(1) / mask.sum(1))
        return features


class Ranking(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        first, *others = (normalize(self.model(column)["sentence_embedding"], dim=1) for column in features)
        return cross_entropy(20 * first @ torch.cat(others).T, torch.arange(len(first)))


class Softmax(Ranking):
    """It has a classifier of its own, and labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        torch.manual_seed(4)
        self.classifier = nn.Linear(16, 3)

    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        found = [self.model(column)["sentence_embedding"] for column in features]
        return cross_entropy(self.classifier(torch.cat(found, 1)), labels)


class Shortened(nn.Module):
    """Around another loss, with the same encoder, whose embeddings it shortens in place: as Matryoshka's does."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        forward, total = self.model.forward, torch.zeros((), dtype=F64)
        try:
            for width in (4, 8):

                def shortened(column: Any, width: int = width) -> Any:
                    found = forward(column)
                    found["sentence_embedding"] = found["sentence_embedding"][:, :width]
                    return found

                self.model.forward = shortened  # type: ignore[method-assign]
                total = total + self.loss(features, labels)
        finally:
            self.model.forward = forward  # type: ignore[method-assign]
        return total


class Embedder(nn.Module):
    """It holds its encoder by another name, and has one column."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sentence_embedder = model

    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        (found,) = (self.sentence_embedder(column)["sentence_embedding"] for column in features)
        far = torch.cdist(found, found)
        return (far * torch.where(labels[:, None] == labels, 1.0, -0.3)).mean()


class OfTokens(Ranking):
    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        return self.model(features[0])["token_embeddings"].mean()


class OfLayers(Ranking):
    def forward(self, features: Any, labels: Any) -> torch.Tensor:
        assert self.model.device == "that of the encoder"
        return super().forward(features, labels) + self.model[0].weight.sum()


SENTENCE_LOSSES: dict[str, Callable[[Any], Any]] = {
    "ranking": Ranking,
    "softmax": Softmax,
    "shortened": lambda model: Shortened(model, Ranking(model)),
    "embedder": Embedder,
}


COLUMNS = ("anchor", "positive", "negative")


def sentences(columns: int = 2, label: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """As the library's collator makes them."""
    data = {"label": torch.arange(WINDOW) % 3 if label is None else label}
    for seed, name in enumerate(COLUMNS[:columns]):
        generator = torch.Generator().manual_seed(seed)
        data[f"{name}_input_ids"] = torch.randint(0, WORDS, (WINDOW, 6), generator=generator)
        lengths = torch.randint(2, 7, (WINDOW, 1), generator=generator)
        data[f"{name}_attention_mask"] = (torch.arange(6) < lengths).long()
    return data


def as_called(data: dict[str, torch.Tensor]) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    """As a loss is called."""
    names = [name for name in COLUMNS if f"{name}_input_ids" in data]
    columns = [{entry: data[f"{name}_{entry}"] for entry in ("input_ids", "attention_mask")} for name in names]
    return columns, data["label"]


def check_sentences(encoder: Callable[[], Any], make: Callable[[Any], Any], data: Any, micro_batch: int) -> None:
    models = [encoder() for _ in range(2)]
    losses = [make(model).double() for model in models]
    features, labels = as_called(data)
    value = losses[1]([dict(column) for column in features], labels)
    value.backward()
    found, loss = fitted(models[0], data, sentence_loss(losses[0]), micro_batch)
    # The optimizer holds the encoder's parameters first.
    own = [p for p in losses[1].parameters() if not any(p is one for one in models[1].parameters())]
    assert relative_error(found, gradient_of([*models[1].parameters(), *own])) < 1e-10
    assert loss == pytest.approx(value.item(), rel=1e-10)
    assert not own or own[0].grad.abs().sum() > 0


class TestSentences:
    @pytest.mark.parametrize("micro_batch", [1, 5, WINDOW])
    @pytest.mark.parametrize("name", SENTENCE_LOSSES)
    def test_the_gradient_is_that_of_the_loss_called_with_the_whole_window(self, name: str, micro_batch: int) -> None:
        check_sentences(Encoder, SENTENCE_LOSSES[name], sentences(1 if name == "embedder" else 2), micro_batch)

    def test_batches_may_be_what_the_loss_is_called_with(self) -> None:
        arguments, encoder = [], Encoder().double()
        called = as_called(sentences())
        for batch in (sentences(), called):
            found = sentence_loss(Softmax(encoder).double())
            arguments.append(found["loss_fn"](found["embed"](encoder, batch)))
        assert arguments[0] == arguments[1]
        assert set(called[0][0]) == {"input_ids", "attention_mask"}, "what the encoder adds is not the user's"
        with pytest.raises(DataError, match="expected \\(features, labels\\)"):
            found["embed"](encoder, {"input_ids": torch.zeros(2, 2)})

    def test_the_encoder_is_back_when_the_loss_is_done_or_has_failed(self) -> None:
        for make in (SENTENCE_LOSSES["shortened"], OfTokens, OfLayers):
            encoder = Encoder()
            encoder.device = "that of the encoder"  # type: ignore[assignment]
            loss = make(encoder)
            arguments = sentence_loss(loss)
            found = arguments["embed"](encoder, sentences())
            if make in (OfTokens, OfLayers):
                with pytest.raises(ArgumentError, match="asks for (token_embeddings|its encoder's layer 0)"):
                    arguments["loss_fn"](found)
            else:
                arguments["loss_fn"](found)
                assert loss.loss.model is encoder
            assert loss.model is encoder

    def test_what_cannot_be_brought_together_is_refused(self) -> None:
        with pytest.raises(ArgumentTypeError, match="loss='Linear'"):
            sentence_loss(nn.Linear(2, 2))
        loss = Ranking(Encoder())
        loss.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(ArgumentError, match="without parameters beside its encoder"):
            sentence_loss(loss)
        loss = Ranking(Encoder())
        loss.mini_batch_size = 32  # type: ignore[assignment]
        loss.uses_gradient_cache = False  # type: ignore[assignment]
        assert sentence_loss(loss)["loss_scope"] == "window"
        del loss.uses_gradient_cache
        with pytest.raises(ArgumentError, match="no micro-batches of its own.*MultipleNegativesRankingLoss"):
            sentence_loss(loss)


def half(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(6), dtype=F64)


OF_THE_LIBRARY: dict[str, tuple[Callable[[Any], Callable[[Any], Any]], int, torch.Tensor | None]] = {
    "MultipleNegativesRankingLoss": (lambda kind: kind, 3, None),
    "MultipleNegativesSymmetricRankingLoss": (lambda kind: kind, 2, None),
    "TripletLoss": (lambda kind: lambda model: kind(model, triplet_margin=0.5), 3, None),
    "BatchHardTripletLoss": (lambda kind: kind, 1, None),
    "CosineSimilarityLoss": (lambda kind: kind, 2, half(WINDOW)),
    "CoSENTLoss": (lambda kind: kind, 2, half(WINDOW)),
    "OnlineContrastiveLoss": (lambda kind: kind, 2, torch.arange(WINDOW) % 2),
    "SoftmaxLoss": (lambda kind: lambda model: seeded(kind, model, 8, 3), 2, None),
    "MSELoss": (lambda kind: kind, 1, half(WINDOW, 8)),
    "MarginMSELoss": (lambda kind: kind, 3, half(WINDOW)),
}
"""(the library's class -> model -> loss, columns, labels)"""


def seeded(kind: Any, *arguments: Any) -> Any:
    torch.manual_seed(4)
    return kind(*arguments)


class TestLibrary:
    """sentence-transformers itself, where it is installed."""

    @pytest.fixture
    def library(self) -> Any:
        return pytest.importorskip("sentence_transformers")

    def encoder(self, library: Any) -> Any:
        return library.SentenceTransformer(modules=[Encoder()], device="cpu").double()

    @pytest.mark.filterwarnings("ignore:The .*Loss is deprecated:DeprecationWarning")
    @pytest.mark.parametrize("micro_batch", [1, 5])
    @pytest.mark.parametrize("name", OF_THE_LIBRARY)
    def test_the_gradient_is_that_of_its_own_loss_of_the_window(
        self, name: str, micro_batch: int, library: Any
    ) -> None:
        make, columns, label = OF_THE_LIBRARY[name]
        kind = getattr(library.sentence_transformer.losses, name)
        check_sentences(lambda: self.encoder(library), make(kind), sentences(columns, label), micro_batch)

    def test_a_loss_around_another_one(self, library: Any) -> None:
        losses = library.sentence_transformer.losses

        def make(model: Any) -> Any:
            return losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [8, 4, 2])

        check_sentences(lambda: self.encoder(library), make, sentences(), 5)

    def test_its_cached_losses_are_refused(self, library: Any) -> None:
        cached = library.sentence_transformer.losses.CachedMultipleNegativesRankingLoss
        with pytest.raises(ArgumentError, match="a loss that makes no micro-batches of its own"):
            sentence_loss(cached(self.encoder(library)))
