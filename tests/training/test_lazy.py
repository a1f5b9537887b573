"""Models with layers that are not built yet are trained as if their shapes had been written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.lazy import LazyModuleMixin

import autoaccum
from autoaccum import errors
from autoaccum.testing import oom_at, simulated_memory
from tests.models import classes, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:The model holds"),
]


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


def lazy() -> nn.Sequential:
    """Layers of both kinds, and what a forward leaves a trace in: statistics, random states, a counter, a weight."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.BatchNorm1d(8),
        nn.LazyLinear(6),
        nn.LazyBatchNorm1d(),
        nn.LazyLinear(3, bias=False),
        nn.Dropout(0.5),
        nn.utils.spectral_norm(nn.Linear(3, 3)),
        Counting(),
    )


def built_by_hand() -> nn.Sequential:
    """As the docs of PyTorch say, in eval mode, in which the forward leaves no trace but in spectral norm's weight."""
    model = lazy()
    torch.manual_seed(0)
    model[:5].eval()(torch.zeros(2, 8))
    return model.train()


def trainer(model: nn.Module, **options: Any) -> autoaccum.Trainer:
    arguments: dict[str, Any] = {"loss_fn": cross_entropy, "effective_batch": 8, "micro_batch": 3, "device": "cpu"}
    data = options.pop("data", None) or classes(16)
    return autoaccum.Trainer(model, data, progress=False, **{**arguments, **options})


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "the default": lambda model: None,
    "a function": lambda model: lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "an instance": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "a fused instance": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trains_like_a_model_that_was_built_by_hand(kind: str) -> None:
    results = []
    for model in (lazy(), built_by_hand()):
        model[4] = nn.Identity()  # dropout would draw from other states: those of a seed that built nothing
        start = model[6].weight.detach().clone()
        result = trainer(model, optimizer=OPTIMIZERS[kind](model)).fit()
        assert not torch.equal(model[6].weight, start)
        results.append([*tensors(model), torch.tensor([report.loss for report in result.history])])
        held = {id(p) for group in result.optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}
    assert same(*results)


def test_building_leaves_nothing_but_the_layers() -> None:
    model = lazy()
    weight, hooks = vars(model[5])["weight"], dict(model[1]._forward_pre_hooks)
    trainer(model, precision="bf16")
    after = torch.get_rng_state()
    expected = built_by_hand()
    assert torch.equal(after, torch.get_rng_state()), "what the layers' own first values drew, and no dropout"
    assert same(tensors(model), tensors(expected))
    assert model[2].num_batches_tracked == model[0].num_batches_tracked == 0
    assert vars(model[5])["weight"] is weight
    assert model[6].calls == 0
    assert len(hooks) == 1
    assert [len(layer._forward_pre_hooks) for layer in model] == [len(layer._forward_pre_hooks) for layer in expected]
    assert [type(layer) for layer in model] == [type(layer) for layer in expected]


def test_a_loss_with_a_lazy_layer() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.LazyLinear(3)

        def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.out(outputs), targets)

    head = Head()
    result = trainer(nn.Linear(8, 4), loss_fn=head).fit()
    assert head.out.weight.shape == (3, 4)
    assert any(p is head.out.weight for group in result.optimizer.param_groups for p in group["params"])


@pytest.mark.weighted
def test_a_lazy_layer_of_ones_own() -> None:
    """Whose first forward makes buffers and modules: they stay."""

    class Centred(LazyModuleMixin, nn.Module):
        cls_to_become = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.UninitializedParameter()

        def initialize_parameters(self, inputs: torch.Tensor) -> None:  # type: ignore[override]
            if self.has_uninitialized_params():  # type: ignore[misc]
                self.scale.materialize(inputs.shape[1:])
                nn.init.ones_(self.scale)
                self.register_buffer("mean", torch.zeros(inputs.shape[1:]))
                self.out = nn.Linear(inputs.shape[1], 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.mean += inputs.mean(0)
            outputs: torch.Tensor = self.out((inputs - self.mean) * self.scale)
            return outputs

    model = Centred()
    running = trainer(model)
    assert model.mean.tolist() == [0.0] * 8
    assert model.scale.tolist() == [1.0] * 8
    # Each micro-batch moves the mean that the next one is centred by.
    with pytest.warns(errors.AutoaccumWarning, match="windows that are cut get a gradient .* % off the whole window's"):
        running.fit()
    assert model.scale.tolist() != [1.0] * 8


def test_a_layer_that_the_forward_does_not_come_to() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.LazyLinear(3), nn.LazyLinear(3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.used(inputs)
            return outputs

    model = Unused()
    with pytest.raises(errors.ArgumentError, match="did not come to unused.weight, unused.bias") as caught:
        trainer(model)
    assert caught.value.argument == "model"
    assert len(model.unused._forward_pre_hooks) == 1, "its own"


def test_the_cause_of_a_failed_forward_is_kept() -> None:
    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        model(batch[0])
        raise KeyError("mask")

    with pytest.raises(errors.ArgumentError, match=r"failed \(KeyError: 'mask'\)") as caught:
        trainer(nn.LazyLinear(3), loss_fn=None, training_step=fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_our_own_errors_come_through() -> None:
    with pytest.raises(errors.NonScalarLossError, match="expected one scalar"):
        trainer(nn.LazyLinear(3), loss_fn=lambda outputs, targets: outputs)


def test_an_oom_anywhere_in_the_forward_is_one_of_the_model() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(3))

    model, data = make(), classes(16)
    with oom_at(None) as counter:
        trainer(model, data=data, optimizer=torch.optim.SGD)
    assert counter.operations > 20
    for operation in range(1, counter.operations + 1):
        model = make()
        with oom_at(operation), pytest.raises(errors.LimitBelowModelError):
            trainer(model, data=data, optimizer=torch.optim.SGD)


def test_a_layer_that_does_not_fit() -> None:
    with simulated_memory("1MiB"), pytest.raises(errors.LimitBelowModelError):
        trainer(nn.Sequential(nn.LazyLinear(10**6), nn.LazyLinear(3)))


def test_the_forward_is_as_in_training_but_for_the_graph() -> None:
    seen = []

    def spy(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((len(batch[0]), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training))
        return cross_entropy(model(batch[0]), batch[1])

    for model in (nn.LazyLinear(3), nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())):
        trainer(model.eval(), loss_fn=None, training_step=spy, precision="bf16")
    assert seen == [(1, False, True, True), (2, False, True, True)]
    trainer(nn.Linear(8, 3), loss_fn=None, training_step=spy)
    assert len(seen) == 2, "no forward where nothing is lazy"
