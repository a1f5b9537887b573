"""Which calls of BatchNorm are seen, and what is known of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

from autoaccum.window.batch_norm_calls import Call, Calls


class Doubling(Calls):
    """Keeps the calls, and answers with twice what each was given."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[Call] = []

    def compute(self, call: Call) -> torch.Tensor:
        self.met.append(call)
        return 2 * call.input


X = torch.arange(12.0).view(4, 3)
WEIGHT, BIAS = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])


def test_calls_of_layers_and_of_functions_in_either_order_of_arguments() -> None:
    layer, mean, var = nn.BatchNorm1d(3, momentum=0.3, eps=1e-3), torch.zeros(3), torch.ones(3)
    with Doubling() as calls:
        assert torch.equal(layer(X), 2 * X)
        assert torch.equal(batch_norm(X, mean, var, WEIGHT, bias=BIAS, training=True), 2 * X)
        assert torch.equal(torch.batch_norm(X, WEIGHT, BIAS, mean, var, True, 0.2, 1e-4, False), 2 * X)
        names = {"weight": WEIGHT, "bias": BIAS, "running_mean": mean, "running_var": var, "cudnn_enabled": False}
        assert torch.equal(torch.batch_norm(X, **names, training=True, momentum=0.2, eps=1e-4), 2 * X)
    of_layer, of_function, plain, by_names = calls.met
    assert by_names == plain
    assert (of_layer.running_mean is layer.running_mean, of_layer.weight is layer.weight) == (True, True)
    assert (of_layer.momentum, of_layer.eps) == (0.3, 1e-3)
    assert (of_function.running_var is var, of_function.bias is BIAS, of_function.momentum) == (True, True, 0.1)
    assert (plain.running_mean is mean, plain.weight is WEIGHT) == (True, True)
    assert (plain.momentum, plain.eps) == (0.2, 1e-4)


def test_what_is_in_eval_mode_is_left_as_it_is() -> None:
    layer = nn.BatchNorm1d(3, eps=1e-3).eval()
    expected = layer(X)
    with Doubling() as calls:
        assert torch.equal(layer(X), expected)
        assert torch.equal(batch_norm(X, X[0], X[1], WEIGHT, BIAS), Call(X, None, None, WEIGHT, BIAS).by(X[0], X[1]))
    assert calls.met == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_layer_enters_and_leaves_it_by_hooks(fails: bool) -> None:
    layer, calls = nn.BatchNorm1d(3), Doubling()
    layer.register_forward_pre_hook(calls.enter_before)
    layer.register_forward_hook(calls.exit_after, always_call=True)
    if fails:
        with pytest.raises(ValueError, match="expected 2D or 3D"):
            layer(X[0])
    else:
        assert torch.equal(layer(X), 2 * X)
    assert not torch.overrides._get_current_function_mode_stack()
