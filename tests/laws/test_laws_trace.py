"""Law 5 for models that keep more than parameters and buffers, or that are not built yet."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

import autoaccum
from autoaccum import errors
from autoaccum.testing import simulated_memory
from tests.devices import DEVICE
from tests.models import classes, same


def value_of(entry: Any) -> Any:
    """What an attribute is and holds: a tensor's values, anything else's identity, and so through containers."""
    if isinstance(entry, torch.Tensor):
        gradient = None if not entry.is_leaf or entry.grad is None else (id(entry.grad), entry.grad.tolist())
        return id(entry), type(entry), entry.requires_grad, entry.is_leaf, entry.tolist(), gradient
    if isinstance(entry, dict):
        return id(entry), [(key if isinstance(key, str) else id(key), value_of(e)) for key, e in entry.items()]
    if isinstance(entry, list | tuple):
        return id(entry), [value_of(e) for e in entry]
    if isinstance(entry, set):
        return id(entry), set(entry)
    return entry if isinstance(entry, int | float | str | None) else id(entry)


def everything(model: nn.Module, optimizer: object = None) -> Any:
    """Whatever a probe could leave a trace in, copied, with identities: equal only if they are the same objects."""
    owners = [*model.modules(), *([] if optimizer is None else [optimizer])]
    return (
        [(id(owner), type(owner), value_of(vars(owner))) for owner in owners],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
    )


def probe(model: nn.Module, **options: Any) -> autoaccum.ProbeReport:
    arguments: dict[str, Any] = {"loss_fn": cross_entropy, "device": DEVICE, "max_micro_batch": 8, **options}
    return autoaccum.probe(model, classes(32), **arguments)


class Counting(nn.Module):
    """What only Python sees: counters, caches, a layer made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.sizes: list[int] = []
        self.cache: dict[str, Any] = {"by size": {}}
        self.net = nn.Linear(8, 3)
        self.head: nn.Module | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(len(inputs))
        self.cache["by size"][len(inputs)] = inputs
        outputs: torch.Tensor = self.net(inputs)
        if self.head is None:
            self.head = nn.Linear(3, 3).to(inputs.device)
        self.last = outputs
        return outputs + self.head(outputs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.out(self.second(self.first(inputs).tanh()))
        return outputs


def with_hooks() -> nn.Module:
    """Hooks of every kind, in an order that is not that of their making, which count and rebind."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    hooked = model[1]
    hooked.calls = 0

    def rebind(module: Any, *_: Any) -> None:
        module.calls += 1
        module.seen = torch.ones(2) * module.calls

    gone = hooked.register_forward_hook(rebind)
    hooked.register_forward_hook(rebind, always_call=True)
    hooked.register_forward_hook(rebind, prepend=True)
    hooked.register_forward_pre_hook(rebind, with_kwargs=True)  # type: ignore[arg-type]
    hooked.register_full_backward_hook(rebind)  # type: ignore[arg-type]
    hooked.register_full_backward_pre_hook(rebind)
    gone.remove()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm and dropout": lambda: nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.BatchNorm1d(6, momentum=None).eval(), nn.Linear(6, 3)
    ),
    "spectral norm": lambda: nn.Sequential(
        nn.Linear(8, 5), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(5, 3), n_power_iterations=2)
    ),
    "spectral norm, the old": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 3)), nn.Linear(3, 3)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 3))),
    "weight norm, the old": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 3)), nn.Linear(3, 3)),
    "counters": Counting,
    "hooks": with_hooks,
    "tied": Tied,
}
every_model = pytest.mark.parametrize("name", MODELS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
]


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def fails_at_four(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = cross_entropy(model(batch[0]), batch[1])
    if len(batch[0]) >= 4:
        raise errors.StopTraining
    return loss


class TestModels:
    @pytest.mark.device(every=3)
    @every_model
    def test_the_model_is_as_it_was(self, name: str) -> None:
        model = make(name)
        before = everything(model)
        assert probe(model).max_micro_batch == 8
        assert everything(model) == before

    @pytest.mark.device(every=4)
    @every_model
    def test_it_is_after_an_error_too(self, name: str) -> None:
        model = make(name)
        before = everything(model)
        with pytest.raises(errors.StopTraining):
            probe(model, loss_fn=None, training_step=fails_at_four)
        assert everything(model) == before

    @every_model
    def test_it_is_where_nothing_fits(self, name: str) -> None:
        model, data = make(name), classes(32)
        before = everything(model)
        with simulated_memory(400), pytest.raises(errors.MemoryLimitError):
            autoaccum.probe(model, data, loss_fn=cross_entropy, device=DEVICE)
        assert everything(model) == before

    @pytest.mark.device(every=4)
    @every_model
    def test_it_is_in_the_middle_of_training(self, name: str) -> None:
        """With gradients there, and an optimizer whose state is there."""
        model = make(name)
        inputs, targets = classes(8)
        cross_entropy(model(inputs), targets).backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        before = everything(model, optimizer)
        probe(model, optimizer=optimizer)
        assert everything(model, optimizer) == before

    @every_model
    def test_training_goes_on_as_if_nothing_had_been(self, name: str) -> None:
        def train(probing: bool) -> list[torch.Tensor]:
            model = make(name)
            torch.manual_seed(5)
            if probing:
                probe(model)
            model(classes(8)[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in range(3):
                if probing and step == 1:
                    probe(model, optimizer=optimizer)
                optimizer.zero_grad()
                inputs, targets = classes(8, seed=step)
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            return [*(p.detach() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

        assert same(train(False), train(True))

    def test_hooks_are_called_and_their_handles_still_remove_them(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3))
        calls: list[str] = []
        handles = [
            model[0].register_forward_pre_hook(lambda *_: calls.append("first")),
            model[0].register_forward_hook(lambda *_: calls.append("second")),
        ]
        probe(model)
        calls.clear()
        model(classes(2)[0])
        assert calls == ["first", "second"]
        for handle in handles:
            handle.remove()
        model(classes(2)[0])
        assert calls == ["first", "second"]


class TestOptimizers:
    @pytest.mark.device
    def test_state_of_tied_weights_stays_theirs(self) -> None:
        model: Any = make("tied")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs, targets = classes(8)
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        momentum = optimizer.state[model.second.weight]["momentum_buffer"]
        probe(model, optimizer=optimizer)
        assert model.second.weight is model.first.weight
        assert optimizer.state[model.first.weight]["momentum_buffer"] is momentum
        assert len(optimizer.state) == 5

    def test_its_state_is_counted(self) -> None:
        def found(make: Any) -> int:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 1000), nn.ReLU(), nn.Linear(1000, 3))
            data = classes(5000)
            with simulated_memory("3MiB"):
                report = autoaccum.probe(model, data, loss_fn=cross_entropy, optimizer=make, device=DEVICE)
            return report.max_micro_batch

        weights = 4 * (9 * 1000 + 1001 * 3)
        per_sample = 3 * 1000 * 4
        plain, adam = found(lambda p: torch.optim.SGD(p, lr=0.1)), found(None)
        assert plain - adam == pytest.approx(2 * weights / per_sample, abs=6)

    def test_one_that_is_not_pytorchs_sees_no_call(self) -> None:
        """Nor is its state touched: reading what parameters it holds is all."""
        calls: list[str] = []

        class Foreign(torch.optim.Optimizer):
            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {"lr": 0.1})

            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if not callable(value) or name.startswith("__"):
                    return value

                def call(*args: Any, **kwargs: Any) -> Any:
                    calls.append(name)
                    return value(*args, **kwargs)

                return call

            def step(self, closure: Any = None) -> None:
                raise AssertionError("stepped")

        model = make("BatchNorm and dropout")
        optimizer = Foreign(model.parameters())
        optimizer.state[next(model.parameters())]["mine"] = 1
        calls.clear()
        before = copy.copy(dict(optimizer.state))
        probe(model, optimizer=optimizer)
        assert calls == []
        assert dict(optimizer.state) == before
        probe(model, optimizer=Foreign)
        assert set(calls) <= {"add_param_group", "_patch_step_function", "profile_hook_step"}, "by its own constructor"


class TestSparse:
    def test_sparse_gradients_stay_sparse_and_cost_no_table(self) -> None:
        """A table as large as the memory that is left would not fit a second time."""
        table = nn.Embedding(100_000, 2, sparse=True)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(2, 3))
        data = torch.arange(64)[:, None], torch.zeros(64, dtype=torch.long)
        lengths, before_trials = [], []
        table.register_forward_pre_hook(lambda layer, _: before_trials.append(layer.weight.grad))
        table.weight.register_post_accumulate_grad_hook(lambda weight: lengths.append(weight.grad._nnz()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = everything(nn.Module(), optimizer)
        with simulated_memory(int(1.5 * table.weight.nbytes)) as memory:
            report = autoaccum.probe(
                model, data, loss_fn=cross_entropy, optimizer=optimizer, effective_batch=64, device=DEVICE
            )
            assert memory.peak < 1.1 * table.weight.nbytes
        assert report.max_micro_batch == 64
        assert before_trials == [None] * len(report.trials), "or they would add up, unlike dense ones"
        assert lengths == [trial.micro_batch for trial in report.trials]
        assert everything(nn.Module(), optimizer)[0][1:] == before[0][1:]
        assert table.weight.grad is None
