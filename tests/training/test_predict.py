"""The outputs of a model for data: one for each sample, in the order of these, whatever the micro-batches."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, DataError
from tests.models import classes, mlp, noisy


class Words(nn.Module):
    """A model of padded texts, as those of transformers: it takes a mapping, and returns one with a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(30, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.embedding(ids).sum(1))
        return {"loss": None if labels is None else cross_entropy(logits, labels), "logits": logits}


class Texts:
    """Samples of different lengths."""

    def __init__(self, count: int = 23) -> None:
        generator = random.Random(0)
        self.samples = [[generator.randrange(1, 30) for _ in range(generator.randrange(1, 12))] for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[int]:
        return self.samples[index]


def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, samples))
    ids = torch.tensor([sample + [0] * (longest - len(sample)) for sample in samples])
    return {"ids": ids, "labels": torch.tensor([len(sample) % 3 for sample in samples])}


class TestPredict:
    @pytest.mark.parametrize("most", [None, 5, 1])
    def test_it_is_what_the_model_returns_for_all(self, most: int | None) -> None:
        model, (inputs, targets) = noisy(), classes(37)
        expected = model.eval()(inputs)
        model.train()
        data: list[Any] = [
            (inputs, targets),
            inputs,
            TensorDataset(inputs, targets),
            [(inputs[:30], targets[:30]), (inputs[30:], targets[30:])],
        ]
        data += [
            DataLoader(TensorDataset(inputs), batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows]))
        ]
        for one in data:
            found = autoaccum.predict(model, one, max_micro_batch=most)
            torch.testing.assert_close(found, expected)
            assert not found.requires_grad

    def test_samples_of_different_lengths_come_back_in_their_order(self) -> None:
        model, texts = Words(), Texts()
        expected = torch.cat([model(padded([sample])["ids"])["logits"] for sample in texts.samples])
        found = autoaccum.predict(model, texts, collate_fn=padded, max_micro_batch=4)
        assert list(found) == ["logits"], "a loss is none of a sample"
        torch.testing.assert_close(found["logits"], expected.detach())

    def test_any_outputs_that_have_rows(self) -> None:
        model, (inputs, _) = mlp(), classes(11)

        def forward(model: Any, batch: torch.Tensor) -> Any:
            outputs = model(batch)
            return {"best": outputs.argmax(-1), "rows": [row[: 1 + int(row.argmax())] for row in outputs], "kind": "a"}

        found = autoaccum.predict(model, inputs, forward=forward, max_micro_batch=4)
        expected = model(inputs)
        assert found["best"].equal(expected.argmax(-1))
        assert [len(row) for row in found["rows"]] == (1 + expected.argmax(-1)).tolist()
        assert found["kind"] == "a"

    def test_a_model_of_two_inputs(self) -> None:
        model = nn.Bilinear(3, 2, 4)
        first, second = torch.randn(9, 3), torch.randn(9, 2)
        torch.testing.assert_close(autoaccum.predict(model, (first, second)), model(first, second).detach())


class TestRefused:
    def test_outputs_that_are_of_no_sample(self) -> None:
        with pytest.raises(ArgumentError, match=r"one row per sample, 1 in a micro-batch of 1.*samples first"):
            autoaccum.predict(mlp(), classes(6), forward=lambda model, batch: torch.zeros(3, 2))

    def test_outputs_of_different_shapes(self) -> None:
        """The error is one, in words of its own: of windows, or of a collate_fn to be passed, none speaks."""
        texts = [torch.arange(length) for length in (5, 3, 4)]
        options: dict[str, Any] = {"collate_fn": partial(pad_sequence, batch_first=True)}
        with pytest.raises(DataError, match=r"^forward: .* cannot be joined: .*Return a list with one") as caught:
            autoaccum.predict(nn.Embedding(8, 4), texts, **options)
        told = re.search(r"forward=(lambda .*), or", str(caught.value))
        assert told is not None
        found = autoaccum.predict(nn.Embedding(8, 4), texts, forward=eval(told[1]), **options)
        assert [tuple(rows.shape[1:]) for rows in found] == [(4,)] * 3
        assert "window" not in str(caught.value)
        assert caught.value.__suppress_context__
        assert caught.value.__cause__ is None

    def test_outputs_of_different_parts(self) -> None:
        def forward(model: Any, batch: Any) -> Any:
            return {"few" if len(batch) == 1 else "many": batch}

        with pytest.raises(DataError, match="cannot be joined"):
            autoaccum.predict(mlp(), classes(6)[0], forward=forward)

    def test_what_is_of_no_sample_and_differs(self) -> None:
        with pytest.raises(DataError, match=r"cannot be joined: \['size'\] belongs to a whole batch, and is 1"):
            autoaccum.predict(mlp(), classes(6)[0], forward=lambda model, batch: {"size": len(batch), "own": batch})

    def test_an_order_that_is_drawn(self) -> None:
        loader = DataLoader(TensorDataset(*classes(6)), shuffle=True)
        with pytest.raises(ArgumentError, match="a DataLoader with shuffle=True.*pass one with shuffle=False"):
            autoaccum.predict(mlp(), loader)

    def test_a_forward_that_cannot_be_called(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"^forward=.*\(model, batch\) -> outputs"):
            autoaccum.predict(mlp(), classes(6), forward=lambda batch: batch)  # type: ignore[arg-type, misc]

    def test_batches_that_the_model_does_not_take_as_they_are(self) -> None:
        inputs, targets = classes(6)
        batch = {"input": inputs, "y": targets}
        with pytest.raises(DataError, match=r"unexpected keyword argument 'y'\)\. Pass forward=\(model, batch\)"):
            autoaccum.predict(mlp(), batch)
        assert len(autoaccum.predict(mlp(), batch, forward=lambda model, batch: model(batch["input"]))) == 6
