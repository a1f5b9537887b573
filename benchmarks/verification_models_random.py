"""Models whose forward draws random numbers: for each sample, or for samples together.

No two forwards of these are alike, so that gradients cannot be compared: what is counted is whether anything is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from verification_cases import Cases
from verification_tasks import (
    CLASSES,
    FEATURES,
    PLAIN,
    REGRESSION,
    TOKEN_PAIRS,
    class_data,
    image_data,
    regression_data,
    token_pair_data,
)

Tensor = torch.Tensor
cases = Cases("models", "random draws")


class Drawing(nn.Module):
    """Layers before and after a function that draws: (module, rows) -> rows."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer
        self.before, self.after = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.after(self.function(self, self.before(rows).tanh()))


def draws(
    name: str, kind: str, function: Callable[[Any, Tensor], Tensor], layer: Callable[[], nn.Module] | None = None
) -> None:
    make = lambda: Drawing(function, None if layer is None else layer())  # noqa: E731
    cases.model(name, make, class_data, F.cross_entropy, kind)


draws("dropout", "independent", lambda m, x: m.layer(x), lambda: nn.Dropout(0.3))
draws("alpha dropout", "independent", lambda m, x: m.layer(x), lambda: nn.AlphaDropout(0.3))
draws("feature alpha dropout", "independent", lambda m, x: m.layer(x), lambda: nn.FeatureAlphaDropout(0.3))
draws("F.dropout, twice", "independent", lambda m, x: F.dropout(F.dropout(x, 0.2).relu(), 0.2))
draws("gaussian noise", "independent", lambda m, x: x + 0.1 * torch.randn_like(x))
draws("gaussian noise by torch.randn", "independent", lambda m, x: x + 0.1 * torch.randn(*x.shape))
draws("multiplied by uniform noise", "independent", lambda m, x: x * torch.rand(x.shape))
draws("bernoulli masks", "independent", lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.7)))
draws("noise in place", "independent", lambda m, x: x + torch.empty_like(x).normal_(0, 0.1))
draws("rrelu", "independent", lambda m, x: F.rrelu(x, training=True))
draws("gumbel softmax", "independent", lambda m, x: F.gumbel_softmax(x, tau=1.0))
draws("gumbel softmax, hard", "independent", lambda m, x: F.gumbel_softmax(x, tau=1.0, hard=True))
draws(
    "a categorical sample's embedding",
    "independent",
    lambda m, x: x + F.one_hot(torch.multinomial(x.softmax(1), 1)[:, 0], 8),
)
draws("a distribution's rsample", "independent", lambda m, x: torch.distributions.Normal(x, 0.1).rsample())
draws(
    "stochastic depth, rows",
    "independent",
    lambda m, x: x + m.layer(x) * (torch.rand(len(x), 1) < 0.7) / 0.7,
    lambda: nn.Linear(8, 8),
)
draws(
    "noise of a sample's own size",
    "independent",
    lambda m, x: x + x.detach().norm(dim=1, keepdim=True) * 0.1 * torch.randn_like(x),
)
draws(
    "stochastic depth, the batch",
    "either",
    lambda m, x: x + (m.layer(x) / 0.7 if float(torch.rand(())) < 0.7 else 0.0),
    lambda: nn.Linear(8, 8),
)
draws("one draw of noise for all", "either", lambda m, x: x + 0.1 * torch.randn(1, 8))
draws(
    "dropped weights",
    "either",
    lambda m, x: F.linear(x, F.dropout(m.layer.weight, 0.3), m.layer.bias),
    lambda: nn.Linear(8, 8),
)
draws("mixed with another sample", "together", lambda m, x: 0.7 * x + 0.3 * x[torch.randperm(len(x))])
draws("shuffled halves of features", "together", lambda m, x: torch.cat([x[:, :4], x[torch.randperm(len(x)), 4:]], 1))
draws(
    "dropout and BatchNorm",
    "together",
    lambda m, x: m.layer(x),
    lambda: nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(8)),
)
draws("noise of the batch's deviation", "together", lambda m, x: x + x.std(0, unbiased=False) * torch.randn_like(x))
draws("dropout, and the mean of the batch", "together", lambda m, x: F.dropout(x, 0.3) + x.mean(0))


class Variational(nn.Module):
    """An encoder, a draw and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 6), nn.Linear(3, CLASSES)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(rows).chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        return self.decoder(z), -0.5 * (1 + log_variance - mean.square() - log_variance.exp())


cases.model(
    "variational, means",
    Variational,
    regression_data,
    lambda o, y: F.mse_loss(o[0], y) + 0.1 * o[1].sum(1).mean(),
    "independent",
)
cases.model(
    "variational, sums",
    Variational,
    regression_data,
    lambda o, y: F.mse_loss(o[0], y, reduction="sum") + o[1].sum(),
    "independent",
)
cases.model(
    "variational, mean and sum",
    Variational,
    regression_data,
    lambda o, y: F.mse_loss(o[0], y) + o[1].sum(),
    "independent",  # each term is weighed as what it is
)


class Attending(nn.Module):
    """A transformer with dropout, as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.net(rows))


class Listening(nn.Module):
    """A recurrent net with dropout between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.LSTM(FEATURES, 5, 2, batch_first=True, dropout=0.3), nn.Linear(5, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.net(rows)[0])


def over_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


cases.model("a transformer with dropout", Attending, token_pair_data, over_tokens, "independent")
cases.model("an LSTM with dropout", Listening, token_pair_data, over_tokens, "independent")
cases.model(
    "2d dropout",
    lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(16, CLASSES)),
    image_data,
    F.cross_entropy,
    "independent",
)
cases.model(
    "fractional pooling",
    lambda: nn.Sequential(nn.FractionalMaxPool2d(2, output_size=2), nn.Flatten(), nn.Linear(12, CLASSES)),
    image_data,
    F.cross_entropy,
    "independent",
)


def mixup(model: nn.Module, batch: Any) -> Tensor:
    order, share = torch.randperm(len(batch[0])), float(torch.rand(()))
    outputs = model(share * batch[0] + (1 - share) * batch[0][order])
    return share * F.cross_entropy(outputs, batch[1]) + (1 - share) * F.cross_entropy(outputs, batch[1][order])


def masked_modelling(model: nn.Module, batch: Any) -> Tensor:
    hidden = torch.rand(batch[0].shape[:2]) < 0.5
    hidden[:, 0] = True
    outputs = model(batch[0].masked_fill(hidden[..., None], 0.0))
    loss = F.cross_entropy(outputs.transpose(1, 2), batch[1].clamp(min=0), reduction="none")
    return (loss * hidden).sum() / hidden.sum()


def masked_modelling_of_samples(model: nn.Module, batch: Any) -> Tensor:
    hidden = torch.rand(batch[0].shape[:2]) < 0.5
    outputs = model(batch[0].masked_fill(hidden[..., None], 0.0))
    loss = F.cross_entropy(outputs.transpose(1, 2), batch[1].clamp(min=0), reduction="none")
    return (loss * hidden).mean()


def diffusion(model: nn.Module, batch: Any) -> Tensor:
    time, noise = torch.rand(len(batch[0]), 1), torch.randn_like(batch[1])
    padded = F.pad(batch[1] * (1 - time) + noise * time, (0, FEATURES - CLASSES))
    return F.mse_loss(model(padded + batch[0]), noise)


def with_generator(model: nn.Module, batch: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(batch[0].shape, generator=generator)
    return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])


cases.step("mixup", PLAIN, mixup, "together")
cases.step("masked modelling, / what is masked", TOKEN_PAIRS, masked_modelling, "independent")
cases.step("masked modelling, / all", TOKEN_PAIRS, masked_modelling_of_samples, "independent")
cases.step("diffusion", REGRESSION, diffusion, "independent")
cases.step("a generator seeded in each forward", PLAIN, with_generator)
cases.step(
    "two dropouts of one batch compared",
    PLAIN,
    lambda m, b: F.mse_loss(m(F.dropout(b[0], 0.3)), m(F.dropout(b[0], 0.3))) + F.cross_entropy(m(b[0]), b[1]),
    "independent",
)
cases.step(
    "numbers of another library",
    PLAIN,
    lambda m, b: F.cross_entropy(m(b[0] * (1 + 0.1 * torch.tensor(np.random.rand(len(b[0]), 1)))), b[1]),
    "independent",
)
