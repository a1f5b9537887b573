"""No trace: what a run computes is, to the bit, what it computes where nothing is measured."""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize
from torch.nn.utils import parametrizations

import autoaccum
from autoaccum.events import Planned, Replanned, Verified
from autoaccum.training.result import FitResult
from tests.devices import DEVICE
from tests.models import classes, mlp, noisy

pytestmark = [
    pytest.mark.measured,
    pytest.mark.filterwarnings("ignore::autoaccum.errors.AutoaccumWarning"),
    pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning"),
]

PLANS = [(3, 2, 1), (3, 2, 1), (4, 1), (2, 2, 2)]
"""Of four windows, the third of which is short."""
Case = tuple[dict[str, Any], Callable[[], Any]]
"""(arguments of fit, () -> what the user's functions hold), all of them new."""


def nothing() -> None:
    """Return what a function holds that holds nothing."""


def run(arguments: dict[str, Any], *, verify: bool) -> FitResult:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    defaults: dict[str, Any] = {
        "data": classes(17), "effective_batch": 6, "micro_batch": PLANS, "steps": 4, "device": DEVICE,
        "progress": False, "cache": False, "loss_fn": cross_entropy,
    }  # fmt: skip
    if "training_step" in arguments:
        del defaults["loss_fn"]
    if "optimizer" not in arguments:
        defaults["lr"] = 0.1
    return autoaccum.fit(**{**defaults, **arguments}, verify=verify)


def loop(arguments: dict[str, Any], *, verify: bool) -> Any:
    """Take four steps in a loop of one's own; return what ``traces`` looks at in a result of ``fit``."""
    torch.manual_seed(7)
    model, optimizer = arguments["model"], arguments["optimizer"]
    accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=cross_entropy, micro_batch=2, verify=verify)
    losses = [accumulator.step(classes(num_samples, seed=num_samples)) for num_samples in (6, 5, 6, 7)]
    return types.SimpleNamespace(
        model=model, optimizer=optimizer, events=accumulator.events, history=[Stepped(loss) for loss in losses]
    )


@dataclasses.dataclass
class Stepped:
    """What a step of a loop returns."""

    loss: torch.Tensor


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        return value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    return value if isinstance(value, int | str | bool | None) else repr(value)


def traces(result: FitResult | Any, held: Any) -> dict[str, Any]:
    """Return all that a run leaves, by name, so that what differs is named by what fails."""
    readings = ("seconds", "peak_bytes", "limit_bytes")
    reports = [{k: v for k, v in dataclasses.asdict(r).items() if k not in readings} for r in result.history]
    plans = [(type(e).__name__, e.step) for e in result.events if isinstance(e, Planned | Replanned)]
    plain = [
        {k: v for k, v in vars(module).items() if not k.startswith("_") and not isinstance(v, nn.Module)}
        for module in result.model.modules()
    ]
    found = {
        "model": result.model.state_dict(),
        "attributes": plain,
        "types": [type(module).__name__ for module in result.model.modules()],
        "gradients": [p.grad for p in result.model.parameters()],
        "optimizer": result.optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1:],  # type: ignore[index]
        "python": random.getstate(),
        "reports": reports,
        "plans": plans,
        "held": held,
    }
    return {name: bits(value) for name, value in found.items()}


class Remembering(nn.Module):
    """Counts, caches, queues and rebinds in attributes, and uses none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.calls = 0
        self.sizes: list[int] = []
        self.cache: dict[int, Any] = {}
        self.queue = torch.zeros(4, 3)  # no buffer
        self.last: torch.Tensor | None = None
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(inputs)
        self.calls += 1
        self.sizes.append(len(inputs))
        self.cache[len(self.cache)] = outputs.detach()
        self.queue[self.calls % 4] = outputs.detach()[0]
        self.last = outputs.detach()
        self.seen += len(inputs)
        return outputs


class MomentumEncoder(nn.Module):
    """A second net, of frozen parameters, that follows the first in each forward by ``.data``, which no counter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.slow = mlp(seed=3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(inputs)
        for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return outputs + self.slow(inputs)


def of_layers(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def words(*, sparse: bool = False, **options: Any) -> dict[str, Any]:
    """A model of token numbers, with their classes."""
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(0, 9, (17, 4), generator=generator), torch.randint(0, 3, (17,), generator=generator)
    model = of_layers(nn.Embedding(9, 4, sparse=sparse, **options), nn.Flatten(), nn.Linear(16, 3))
    return {"model": model, "data": data, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


def a_closure() -> Case:
    """A training_step that counts, collects and draws by a generator, all of its own."""
    model = mlp()
    calls, sizes, table = 0, [], {"sum": 0.0}
    projection = nn.Linear(3, 3)
    generator = torch.Generator().manual_seed(5)

    def training_step(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        sizes.append(len(batch[0]))
        table["sum"] += float(batch[0].sum())
        torch.rand(2, generator=generator)
        return cross_entropy(projection(model(batch[0])), batch[1])

    optimizer = torch.optim.SGD([*model.parameters(), *projection.parameters()], 0.1)

    def held() -> Any:
        return calls, sizes, table, generator.get_state(), projection.state_dict()

    return {"model": model, "training_step": training_step, "optimizer": optimizer}, held


COUNTED = {"calls": 0}


class Loss:
    """An object whose method is the training_step."""

    def __init__(self) -> None:
        self.calls = 0
        self.values: list[float] = []

    def step(self, model: Any, batch: Any) -> torch.Tensor:
        self.calls += 1
        COUNTED["calls"] += 1
        loss = cross_entropy(model(batch[0]), batch[1])
        self.values.append(float(loss.detach()))
        return loss


def a_method() -> Case:
    COUNTED["calls"] = 0
    loss = Loss()
    return {"model": mlp(), "training_step": loss.step}, lambda: (loss.calls, loss.values, COUNTED)


def foreign(model: Any, batch: Any) -> torch.Tensor:
    """Scale each sample by what is drawn from generators that no mode watches."""
    noise = torch.as_tensor(np.random.rand(len(batch[0]), 1)).float().to(DEVICE) + random.random()
    return cross_entropy(model(dropout(batch[0], 0.2) * (1 + noise)), batch[1])


def drawn_in_vain(model: Any, batch: Any) -> torch.Tensor:
    """Draw from every generator, for nothing."""
    return 0 * foreign(model, batch) + cross_entropy(model(batch[0]), batch[1])


def optimized(kind: Callable[..., torch.optim.Optimizer], model: nn.Module | None = None, **options: Any) -> Case:
    model = mlp() if model is None else model
    return {"model": model, "optimizer": kind(model.parameters(), **options)}, nothing


def contrastive(model: Any, batch: Any) -> torch.Tensor:
    outputs = normalize(model(batch[0]))
    return cross_entropy(outputs @ outputs.T / 0.1, torch.arange(len(outputs), device=outputs.device))


ADAMW = torch.optim.AdamW
CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: ({"model": mlp()}, nothing),
    "a sum": lambda: ({"model": mlp(), "loss_fn": nn.CrossEntropyLoss(reduction="sum"), "lr": 0.01}, nothing),
    "float64": lambda: ({"model": mlp(torch.float64), "data": classes(17, torch.float64)}, nothing),
    "dropout": lambda: ({"model": of_layers(mlp(), nn.Dropout(0.5))}, nothing),
    "BatchNorm": lambda: ({"model": noisy(), "micro_batch": 3}, nothing),
    "spectral norm": lambda: ({"model": of_layers(parametrizations.spectral_norm(nn.Linear(8, 3)))}, nothing),
    "embedding, max_norm": lambda: (words(max_norm=1.0), nothing),
    "sparse gradients": lambda: (words(sparse=True), nothing),
    "sparse gradients, clipped": lambda: ({**words(sparse=True), "clip_norm": 0.1}, nothing),
    "attributes": lambda: ({"model": Remembering()}, nothing),
    "a momentum encoder": lambda: ({"model": MomentumEncoder()}, nothing),
    "a closure": a_closure,
    "a method": a_method,
    "all generators": lambda: ({"model": mlp(), "training_step": foreign}, nothing),
    "all generators, in vain": lambda: ({"model": mlp(), "training_step": drawn_in_vain}, nothing),
    "contrastive": lambda: ({"model": mlp(), "training_step": contrastive}, nothing),
    "LBFGS": lambda: optimized(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "LBFGS, dropout": lambda: optimized(
        torch.optim.LBFGS, of_layers(mlp(), nn.Dropout(0.2)), lr=0.1, line_search_fn="strong_wolfe", max_iter=3
    ),
    "Adam": lambda: optimized(torch.optim.Adam, lr=0.01),
    "momentum": lambda: optimized(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW, fused": lambda: optimized(ADAMW, lr=0.01, fused=True),
    "AdamW, foreach": lambda: optimized(ADAMW, lr=0.01, foreach=True, amsgrad=True),
    "float16": lambda: ({"model": of_layers(mlp(), nn.Dropout(0.2)), "precision": "fp16"}, nothing),
    "bfloat16": lambda: ({"model": of_layers(mlp(), nn.Dropout(0.2)), "precision": "bf16"}, nothing),
    "parameters of 16 bits": lambda: (
        {"model": mlp(torch.bfloat16), "data": classes(17, torch.bfloat16), "lr": 0.01}, nothing
    ),
    "clipped": lambda: ({"model": mlp(), "clip_norm": 0.1}, nothing),
    "noise measured": lambda: ({"model": mlp(), "noise_scale": True}, nothing),
    "auto": lambda: (
        {"model": of_layers(mlp(), nn.Dropout(0.2)), "micro_batch": "auto", "max_micro_batch": 2}, nothing
    ),
    "a regression": lambda: (
        {"model": nn.Linear(8, 1), "data": (classes(17)[0], torch.randn(17, 1)), "loss_fn": mse_loss}, nothing
    ),
}  # fmt: skip

FAIL = {"BatchNorm", "spectral norm", "a momentum encoder", "contrastive"}
"""Those that are measured to be wrong, which leaves no trace either."""
UNMEASURED = {"all generators", "parameters of 16 bits"}
"""Those that are not measured, for their draws cannot be aligned or rounding hides all."""

IN_A_LOOP = {"LBFGS", "LBFGS, dropout"}
"""Those whose optimizer asks for gradients itself, several times in a step."""


@pytest.mark.weighted
@pytest.mark.device(every=5)
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_measured_ends_as_one_that_is_not(name: str) -> None:
    found = []
    for verify in (False, True):
        torch.manual_seed(1)
        arguments, held = CASES[name]()
        in_loop = name in IN_A_LOOP
        result = (loop if in_loop else run)(arguments, verify=verify)
        found.append(traces(result, held()))
        measured = [event for event in result.events if isinstance(event, Verified)]
        assert bool(measured) is (verify and name not in UNMEASURED)
        if measured:
            assert all(event.passed is (name not in FAIL) for event in measured)
    for trace, value in found[0].items():
        assert found[1][trace] == value, trace


@pytest.mark.weighted
def test_a_momentum_encoder_of_a_large_model_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is large only what may move is copied: parameters that are frozen, and no larger than twice the others."""
    monkeypatch.setattr("autoaccum.step.snapshot.SMALL_BYTES", 8)
    test_a_run_that_is_measured_ends_as_one_that_is_not("a momentum encoder")
