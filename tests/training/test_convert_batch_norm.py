"""``convert_batch_norm``: what takes the place of BatchNorm, and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, group_norm

import autoaccum
from autoaccum import convert_batch_norm, errors
from autoaccum.events import Notice, Verified


class Own(nn.BatchNorm2d):
    """A subclass."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(8)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 64, 3), Own(64, eps=1e-3)),
        nn.Flatten(),
        nn.Linear(64, 8),
        shared,
        nn.Linear(8, 8),
        shared,
        nn.BatchNorm1d(8, affine=False),
    )


def test_each_layer_is_replaced_and_keeps_its_parameters() -> None:
    model = net()
    weight, bias = model[0][1].weight, model[0][1].bias
    parameters = list(map(id, model.parameters()))
    assert convert_batch_norm(model) is model
    assert not [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    first = model[0][1]
    assert type(first) is nn.GroupNorm
    assert (first.num_groups, first.num_channels, first.eps) == (32, 64, 1e-3)
    assert first.weight is weight
    assert first.bias is bias
    assert list(map(id, model.parameters())) == parameters
    assert model[3] is model[5]
    assert (model[6].affine, model[6].weight, model[6].bias) == (False, None, None)
    assert set(model.state_dict()) == {
        f"{path}.{name}" for path in ("0.0", "0.1", "2", "3", "4", "5") for name in ("weight", "bias")
    }


@pytest.mark.parametrize(("to", "groups"), [("group", 8), ("layer", 1)])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_of_all_dims(kind: Any, to: Any, groups: int) -> None:
    layer = kind(16).eval().double()
    with torch.no_grad():
        layer.weight.uniform_()
    dims = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2}.get(kind, 3)
    made = convert_batch_norm(layer, to=to)
    x = torch.randn(5, 16, *[3] * dims, dtype=torch.float64)
    assert torch.equal(made(x), group_norm(x, groups, layer.weight, layer.bias, layer.eps))
    assert not made.training


def test_samples_meet_no_more() -> None:
    model = convert_batch_norm(net()).double()
    data = torch.randn(60, 2, 3, 3, dtype=torch.float64), torch.randint(8, (60,))
    result = autoaccum.fit(
        model, data, effective_batch=30, micro_batch=7, loss_fn=cross_entropy, device="cpu", progress=False
    )
    (verified,) = [event for event in result.events if isinstance(event, Verified)]
    assert verified.error < 1e-10
    assert not [event for event in result.events if isinstance(event, Notice)]


def _hooked() -> nn.Module:
    layer = nn.BatchNorm1d(4)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm2d()), "have their shapes"),
        (nn.Sequential(nn.BatchNorm1d(4), _hooked()), "without hooks"),
        (nn.Linear(3, 3), "with BatchNorm layers"),
        (torch.compile(nn.BatchNorm1d(3), backend="eager"), "neither scripted nor compiled"),
    ],
)
def test_what_cannot_be_replaced_is_refused_and_nothing_changes(model: Any, words: str) -> None:
    before = list(model.modules())
    with pytest.raises(errors.ArgumentError, match=words):
        convert_batch_norm(model)
    assert list(model.modules()) == before


@pytest.mark.parametrize(("model", "to"), [(3, "group"), (nn.BatchNorm1d(3), "instance")])
def test_arguments(model: Any, to: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="model=3|to='instance'"):
        convert_batch_norm(model, to=to)
