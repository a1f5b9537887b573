"""Models of sequences: recurrent nets and transformers, and what they make of padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    TIME,
    VOCABULARY,
    Batch,
    Setting,
    language_data,
    mask_of,
    token_pair_data,
)

Tensor = torch.Tensor
cases = Cases("models", "sequences")


def over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Recurrent(nn.Module):
    """A recurrent net over (samples, time, features)."""

    def __init__(self, kind: Callable[..., nn.Module], *, batch_first: bool = True, forgets: bool = False) -> None:
        super().__init__()
        self.net, self.head = kind(FEATURES, 5, batch_first=batch_first), nn.Linear(5, CLASSES)
        self.forgets = forgets  # to put time first, so that it runs along the batch

    def forward(self, rows: Tensor) -> Tensor:
        first = self.net.batch_first or self.forgets
        outputs, _ = self.net(rows if first else rows.transpose(0, 1))
        return self.head(outputs if first else outputs.transpose(0, 1))


for kind in (nn.RNN, nn.LSTM, nn.GRU):
    name = kind.__name__
    cases.model(f"{name}, batch first", lambda kind=kind: Recurrent(kind), token_pair_data, over_tokens)
    cases.model(
        f"{name}, time first", lambda kind=kind: Recurrent(kind, batch_first=False), token_pair_data, over_tokens
    )
cases.model(
    "GRU along the batch by mistake",
    lambda: Recurrent(nn.GRU, batch_first=False, forgets=True),
    token_pair_data,
    over_tokens,
)


class Stateful(nn.Module):
    """An LSTM that goes on from where its last batch has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.hidden = nn.GRU(FEATURES, 5, batch_first=True), nn.Linear(5, CLASSES), None

    def forward(self, rows: Tensor) -> Tensor:
        if self.hidden is not None and self.hidden.shape[1] != len(rows):
            self.hidden = None
        outputs, hidden = self.net(rows, self.hidden)
        self.hidden = hidden.detach()
        return self.head(outputs)


cases.model("GRU that carries its state over", Stateful, token_pair_data, over_tokens)


class Language(nn.Module):
    """Predicts the next token of ids that are padded with 0, in one of several ways of minding the padding."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(
            VOCABULARY, 6, padding_idx=0 if way == "padding_idx" else None, sparse=way == "sparse"
        )
        self.places = nn.Embedding(TIME, 6)
        self.net = nn.GRU(6, 6, batch_first=True, bidirectional=way == "both ways")
        self.head = nn.Linear(12 if way == "both ways" else 6, VOCABULARY)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor, counts: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.way == "packed":
            packed = pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=TIME)[0])
        if self.way == "sorted":
            order = counts.argsort(descending=True)
            packed = pack_padded_sequence(x[order], counts[order], batch_first=True)
            outputs = pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=TIME)[0]
            return self.head(outputs[order.argsort()])
        if self.way in ("masked", "attends to padding", "causal"):
            padding = None if self.way == "attends to padding" else ~mask_of(counts)
            causal = nn.Transformer.generate_square_subsequent_mask(TIME).double() if self.way == "causal" else None
            places = self.places(torch.arange(TIME))
            padding = padding if causal is None else None
            return self.head(self.attention(x + places, mask=causal, src_key_padding_mask=padding))
        if self.way == "cut to the longest":
            longest = int(counts.max())
            outputs = self.attention(x[:, :longest])
            return F.pad(self.head(outputs), (0, 0, 0, TIME - longest))
        if self.way == "cut to the longest, masked":
            longest = int(counts.max())
            outputs = self.attention(x[:, :longest], src_key_padding_mask=~mask_of(counts)[:, :longest])
            return F.pad(self.head(outputs), (0, 0, 0, TIME - longest))
        if self.way == "pooled over all":
            return self.head(x + x.mean(1, keepdim=True))
        if self.way == "places from the end of the longest":
            places = torch.arange(TIME).sub(counts.max()).clamp(-TIME, -1).add(TIME)
            return self.head(self.net(x + self.places(places))[0])
        return self.head(self.net(x)[0])


def language_step(model: nn.Module, batch: Batch) -> Tensor:
    ids, counts = batch
    targets = ids.masked_fill(~mask_of(counts), -100)
    return F.cross_entropy(model(ids, counts).flatten(0, 1), targets.flatten())


for way in (
    "plain",
    "padding_idx",
    "sparse",
    "both ways",
    "packed",
    "sorted",
    "masked",
    "attends to padding",
    "causal",
    "cut to the longest",
    "cut to the longest, masked",
    "pooled over all",
    "places from the end of the longest",
):
    cases.step(f"tokens: {way}", Setting(lambda way=way: Language(way), language_data), language_step)
