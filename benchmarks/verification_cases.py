"""What benchmarks/verification.py trains: a case makes a fresh model, data and a loss; the files beside it hold them.

Losses are written as people write them, not as a reader of graphs would like them. Nothing here says which of them can
be cut exactly: that is measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
"""Tensors with one row per sample."""
Step = Callable[[nn.Module, Any], torch.Tensor]

FEATURES, CLASSES, TIME, VOCABULARY = 6, 4, 5, 11
IGNORED = -100


@dataclass(frozen=True)
class Setting:
    """A task: what its samples look like, and a model that fits them."""

    model: Callable[[], nn.Module]
    data: Callable[[int, bool], Batch]
    """(samples, whether they are all of one kind: one label, one length, nothing ignored) -> batch."""


@dataclass(kw_only=True)
class Work:
    """One fresh run's model, state and loss."""

    model: nn.Module
    data: Callable[[int, bool], Batch]
    build: Callable[[Any], Any]
    """(state) -> the training step or loss function; a state beside the model is handed on, so it can be copied."""
    state: Any = None
    is_loss_fn: bool = False
    """Whether what is built is (outputs, targets) -> loss."""
    model_returns_loss: bool = False
    hooks: Callable[[nn.Module], None] | None = None
    """Registers hooks on parameters, which a copy of a model does not have."""
    num_items: Callable[[Any], Any] | None = None
    by_update: bool = False
    """Whether parameters are moved elsewhere than in the optimizer: then updates are compared, not gradients."""

    def __post_init__(self) -> None:
        self.function = self.build(self.state)
        if self.hooks is not None:
            self.hooks(self.model)

    def arguments(self) -> dict[str, Any]:
        """Return the loss as arguments of autoaccum's."""
        if self.model_returns_loss:
            return {"num_items": self.num_items}
        return {"loss_fn" if self.is_loss_fn else "training_step": self.function, "num_items": self.num_items}

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, as the user's own loop computes it."""
        if self.model_returns_loss:
            return self.model(**batch)["loss"]
        if self.is_loss_fn:
            return self.function(self.model(batch[0]), batch[1])
        return self.function(self.model, batch)

    def parameters(self) -> list[nn.Parameter]:
        """Return what the optimizer is given: all that is trained, of the model and of the state beside it."""
        found = {id(p): p for module in [self.model, *modules_in(self.state)] for p in module.parameters()}
        return [p for p in found.values() if p.requires_grad]

    def copy(self) -> Work:
        """Return the same work as it is now, which shares nothing with it."""
        memo: dict[int, Any] = {}
        for module in [self.model, *modules_in(self.state)]:
            for part in module.modules():
                # Results that a module keeps have a graph, and PyTorch refuses to copy those.
                for value in tensors_in(vars(part)):
                    if value.grad_fn is not None:
                        memo[id(value)] = value.detach().clone()
        model, state = copy.deepcopy((self.model, self.state), memo)
        return Work(
            model=model, data=self.data, build=self.build, state=state, is_loss_fn=self.is_loss_fn, hooks=self.hooks,
            model_returns_loss=self.model_returns_loss, num_items=self.num_items, by_update=self.by_update,
        )  # fmt: skip


def modules_in(state: Any) -> Iterator[nn.Module]:
    if isinstance(state, nn.Module):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from modules_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from modules_in(value)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    name: str
    kind: str
    """losses or models."""
    group: str
    make: Callable[[], Work]
    draws: str | None = None
    """Of one whose forward draws random numbers, so that windows cannot be compared: independent, together, or either
    (one draw for all samples of a forward: another distribution of the gradient, with the same mean)."""

    def fresh(self) -> Work:
        torch.manual_seed(0)
        return self.make()


CASES: list[Case] = []


class Cases:
    """The cases of one group, which its methods add."""

    def __init__(self, kind: str, group: str) -> None:
        self._kind, self._group = kind, group

    def add(self, name: str, make: Callable[[], Work], draws: str | None = None) -> None:
        assert all(case.name != name for case in CASES), name
        CASES.append(Case(name=name, kind=self._kind, group=self._group, make=make, draws=draws))

    def loss(self, name: str, setting: Setting, function: Callable[..., torch.Tensor], **options: Any) -> None:
        """Add a loss (outputs, *the batch's other tensors)."""

        def make() -> Work:
            model = setting.model()
            if len(setting.data(2, True)) == 2:
                return Work(model=model, data=setting.data, build=lambda _: function, is_loss_fn=True, **options)
            return Work(model=model, data=setting.data, build=lambda _: of_outputs(function), **options)

        self.add(name, make)

    def step(self, name: str, setting: Setting, function: Step, draws: str | None = None, **options: Any) -> None:
        """Add a training step (model, batch)."""
        make = lambda: Work(model=setting.model(), data=setting.data, build=lambda _: function, **options)  # noqa: E731
        self.add(name, make, draws)

    def kept(
        self, name: str, setting: Setting, state: Callable[[], Any], build: Callable[[Any], Step], **options: Any
    ) -> None:
        """Add a training step that keeps a state of its own from one call to the next, or has modules of its own."""
        self.add(name, lambda: Work(model=setting.model(), data=setting.data, build=build, state=state(), **options))

    def model(
        self,
        name: str,
        model: Callable[[], nn.Module],
        data: Callable[[int, bool], Batch],
        function: Any,
        draws: str | None = None,
        **options: Any,
    ) -> None:
        """Add a model, and a loss (outputs, *the batch's other tensors) for it."""
        self.step(name, Setting(model, data), of_outputs(function), draws, **options)


def of_outputs(function: Callable[..., torch.Tensor]) -> Step:
    """Return a training step that calls the model on a batch's first tensor and the function on the result."""
    return lambda model, batch: function(model(batch[0]), *batch[1:])


# Models


def mlp(outputs: int = CLASSES, inputs: int = FEATURES) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def mlp_to(outputs: int) -> Callable[[], nn.Module]:
    return lambda: mlp(outputs)


def squashed() -> nn.Module:
    return nn.Sequential(mlp(), nn.Sigmoid())


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, CLASSES, 1))


def embedder() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))


# Data


def lengths(samples: int, same: bool, longest: int = TIME, shortest: int = 1) -> torch.Tensor:
    return torch.full((samples,), longest) if same else torch.randint(shortest, longest + 1, (samples,))


def mask_of(counts: torch.Tensor, longest: int = TIME) -> torch.Tensor:
    return torch.arange(longest) < counts[:, None]


def labels(samples: int, same: bool, classes: int = CLASSES) -> torch.Tensor:
    return torch.ones(samples, dtype=torch.long) if same else torch.randint(0, classes, (samples,))


def features(samples: int) -> torch.Tensor:
    return torch.randn(samples, FEATURES)


def class_data(samples: int, same: bool) -> Batch:
    return features(samples), labels(samples, same)


def ignored_data(samples: int, same: bool) -> Batch:
    targets = labels(samples, same)
    if not same:
        targets[torch.rand(samples) < 0.4] = IGNORED
        targets[-1] = 2
    return features(samples), targets


def regression_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, CLASSES)


def scalar_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples)


def column_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, 1)


def positive_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.rand(samples, CLASSES) + 0.1


def binary_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.ones(samples, CLASSES) if same else (torch.rand(samples, CLASSES) < 0.4).double()


def binary_scalar_data(samples: int, same: bool) -> Batch:
    targets = torch.ones(samples) if same else (torch.rand(samples) < 0.5).double()
    if not same:
        targets[-1], targets[0] = 1.0, 0.0
    return features(samples), targets


def sign_data(samples: int, same: bool) -> Batch:
    inputs, targets = binary_scalar_data(samples, same)
    return inputs, 2 * targets - 1


def distribution_data(samples: int, same: bool) -> Batch:
    return features(samples), torch.randn(samples, CLASSES).softmax(-1)


def weighted_data(samples: int, same: bool) -> Batch:
    weights = torch.ones(samples) if same else torch.rand(samples) * (torch.rand(samples) < 0.8) + 1e-3
    return features(samples), labels(samples, same), weights


def masked_scalar_data(samples: int, same: bool) -> Batch:
    """Samples that may count as nothing: in some windows whole micro-batches do."""
    mask = torch.ones(samples) if same else (torch.rand(samples) < 0.6).double()
    mask[-1] = 1.0
    return features(samples), torch.randn(samples), mask


def masked_vector_data(samples: int, same: bool) -> Batch:
    mask = torch.ones(samples, CLASSES) if same else (torch.rand(samples, CLASSES) < 0.5).double()
    mask[-1] = 1.0
    return features(samples), torch.randn(samples, CLASSES), mask


def token_data(samples: int, same: bool) -> Batch:
    """Sequences, some of which have no token that counts: inputs, targets, mask."""
    counts = lengths(samples, same, shortest=0)
    counts[-1] = TIME
    mask = mask_of(counts)
    targets = torch.randint(0, CLASSES, (samples, TIME))
    return torch.randn(samples, TIME, FEATURES), targets.masked_fill(~mask, IGNORED), mask.double()


def token_pair_data(samples: int, same: bool) -> Batch:
    return token_data(samples, same)[:2]


def language_data(samples: int, same: bool) -> Batch:
    """Token ids padded with 0, and their lengths."""
    counts = lengths(samples, same)
    counts[-1] = TIME
    ids = torch.randint(1, VOCABULARY, (samples, TIME))
    return ids.masked_fill(~mask_of(counts), 0), counts


def pixel_data(samples: int, same: bool) -> Batch:
    targets = torch.randint(0, CLASSES, (samples, 4, 4))
    if not same:
        targets[torch.rand(samples, 4, 4) < torch.rand(samples, 1, 1)] = 255
        targets[-1, 0] = 1
    return torch.randn(samples, 3, 4, 4), targets


def mask_data(samples: int, same: bool) -> Batch:
    share = torch.full((samples, 1, 1, 1), 0.5) if same else torch.rand(samples, 1, 1, 1)
    return torch.randn(samples, 3, 4, 4), (torch.rand(samples, CLASSES, 4, 4) < share).double()


def image_data(samples: int, same: bool) -> Batch:
    return torch.randn(samples, 3, 4, 4), labels(samples, same)


def view_data(samples: int, same: bool) -> Batch:
    inputs = features(samples)
    return inputs, inputs + 0.3 * features(samples), labels(samples, same)


def triple_data(samples: int, same: bool) -> Batch:
    return features(samples), features(samples), features(samples)


def policy_data(samples: int, same: bool) -> Batch:
    """What a policy is trained on: observations, actions, old log-probabilities, advantages, returns."""
    return (
        features(samples), labels(samples, same), -torch.rand(samples) - 0.5, torch.randn(samples), torch.randn(samples)
    )  # fmt: skip


def speech_data(samples: int, same: bool) -> Batch:
    """Inputs, targets, input lengths and target lengths of a transcription."""
    counts = lengths(samples, same, 8, 5)
    return (
        torch.randn(samples, 8, FEATURES), torch.randint(1, CLASSES, (samples, 3)), counts, lengths(samples, same, 3)
    )  # fmt: skip


def survival_data(samples: int, same: bool) -> Batch:
    """Inputs, times, and whether the event was seen."""
    seen = torch.ones(samples) if same else (torch.rand(samples) < 0.6).double()
    seen[-1] = 1.0
    return features(samples), torch.rand(samples), seen


def group_data(samples: int, same: bool) -> Batch:
    """Inputs, targets, and the group that each sample belongs to."""
    return features(samples), labels(samples, same), labels(samples, same, 3)


PLAIN = Setting(mlp, class_data)
SOME_IGNORED = Setting(mlp, ignored_data)
REGRESSION = Setting(mlp, regression_data)
SCALAR = Setting(mlp_to(1), scalar_data)
COLUMN = Setting(mlp_to(1), column_data)
POSITIVE = Setting(mlp, positive_data)
BINARY = Setting(mlp, binary_data)
BINARY_SCALAR = Setting(mlp_to(1), binary_scalar_data)
PROBABILITIES = Setting(squashed, binary_data)
SIGNS = Setting(mlp_to(1), sign_data)
DISTRIBUTIONS = Setting(mlp, distribution_data)
WEIGHTED = Setting(mlp, weighted_data)
MASKED_SCALAR = Setting(mlp_to(1), masked_scalar_data)
MASKED = Setting(mlp, masked_vector_data)
TOKENS = Setting(mlp, token_data)
TOKEN_PAIRS = Setting(mlp, token_pair_data)
LANGUAGE = Setting(embedder, language_data)
PIXELS = Setting(convolution, pixel_data)
SEGMENTS = Setting(convolution, mask_data)
VIEWS = Setting(mlp, view_data)
TRIPLES = Setting(mlp, triple_data)
POLICY = Setting(mlp_to(CLASSES + 1), policy_data)
SPEECH = Setting(mlp, speech_data)
SURVIVAL = Setting(mlp_to(1), survival_data)
GROUPS = Setting(mlp, group_data)


def flat(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the loss given tokens one below the other: outputs (tokens, classes), targets, further arguments."""
    return lambda outputs, targets, *others: function(
        outputs.flatten(0, 1), targets.flatten(), *(other.flatten() for other in others)
    )


def total(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, as Python's sum would."""
    first, *others = values
    for value in others:
        first = first + value
    return first
