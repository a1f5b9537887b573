"""What is undone of forwards and backwards that are thrown away."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.training.traces import no_trace

CPU = torch.device("cpu")
_calls = 0
"""How often a step was called, in a global variable as a script has it."""


def test_everything_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    with no_trace([model], optimizer, CPU):
        model(torch.randn(5, 3)).sum().backward()
        model.eval()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is kept for p, kept in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training


def test_what_functions_count_and_keep_is_as_it_was() -> None:
    global _calls
    kept, generator, calls = [1.0], torch.Generator(), 0
    held = nn.Linear(3, 3)

    def step() -> None:
        global _calls
        nonlocal calls
        _calls, calls = _calls + 1, calls + 1
        kept.append(float(torch.rand((), generator=generator)))
        held(torch.randn(2, 3)).sum().backward()

    state = generator.get_state()
    with no_trace([held], None, CPU, functions=[step]):
        step()
        assert (_calls, calls, len(kept)) == (1, 1, 2)
    assert (_calls, calls, kept) == (0, 0, [1.0])
    assert torch.equal(generator.get_state(), state)
    assert held.weight.grad is None


def test_frozen_parameters_that_a_forward_writes_to_are_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(requires_grad=False))
    before = model[1].weight.clone()
    with no_trace([model], None, CPU):
        model[1].weight.data.lerp_(model[0].weight.data, 0.5)
    assert torch.equal(model[1].weight, before)


@pytest.mark.skipif(not hasattr(torch.zeros(()), "grad_dtype"), reason="grad_dtype came with PyTorch 2.13")
def test_a_probe_puts_back_the_types_of_gradients() -> None:
    model = nn.Linear(3, 1).bfloat16()
    model.weight.grad = gradient = torch.ones_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoaccum.probe(
        model, torch.ones(4, 3).bfloat16(), training_step=lambda model, x: model(x).sum(), optimizer=optimizer
    )
    assert model.weight.grad is gradient
    assert {p.grad_dtype for p in model.parameters()} == {torch.bfloat16}
