"""A ``training_step`` in the order of another trainer is refused in words that name the order, and a fix that works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import autoaccum
from autoaccum.cli.app import main
from autoaccum.errors import ArgumentTypeError

DATA = torch.randn(8, 3), torch.randn(8, 1)


class Module(nn.Module):
    """As those of Lightning are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self.layer(batch[0]), batch[1])


def step(batch: Any, model: nn.Module) -> torch.Tensor:
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


def accumulate(model: nn.Module, data: Any, training_step: Any) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoaccum.Accumulator(model, optimizer, training_step=training_step).step(data)


ENTRIES: dict[str, Callable[..., Any]] = {
    "fit": lambda model, data, training_step: autoaccum.fit(
        model, data, training_step=training_step, effective_batch=4, device="cpu", progress=False, cache=False
    ),
    "Accumulator": accumulate,
    "check": lambda model, data, training_step: autoaccum.check(model, data, training_step=training_step),
    "probe": lambda model, data, training_step: autoaccum.probe(
        model, data, training_step=training_step, max_micro_batch=8, device="cpu"
    ),
    "estimate": lambda model, data, training_step: autoaccum.estimate(
        model, data, training_step=training_step, device_memory="1GiB"
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("kind", ["named", "bound", "unbound"])
def test_the_order_is_named_and_the_fix_works(name: str, kind: str) -> None:
    model = Module()
    given, found, cure = {
        "named": (step, "takes (batch, model), but autoaccum calls training_step(model, batch).", "step(batch, model)"),
        "bound": (
            model.training_step,
            "takes (batch, batch_idx), but autoaccum calls training_step(model, batch).",
            "model.training_step(batch, 0)",
        ),
        "unbound": (
            Module.training_step,
            "takes (self, batch, batch_idx), but autoaccum calls training_step(model, batch).",
            "model.training_step(batch, 0)",
        ),
    }[kind]
    trained: nn.Module = model if "bound" in kind else nn.Linear(3, 1)
    with pytest.raises(ArgumentTypeError) as caught:
        ENTRIES[name](trained, DATA, training_step=given)
    fix = f"training_step=lambda model, batch: {cure}"
    assert str(caught.value) == f"training_step {found} Pass {fix}"
    assert ENTRIES[name](trained, DATA, **eval(f"dict({fix})", globals())) is not None


def test_a_lambda_has_no_name_to_call() -> None:
    model = nn.Linear(3, 1)
    told = "Write it as training_step=lambda model, batch: ..., the model first."
    with pytest.raises(ArgumentTypeError) as caught:
        ENTRIES["fit"](model, DATA, training_step=lambda batch, batch_idx: mse_loss(model(batch[0]), batch[1]))
    assert str(caught.value) == (
        f"training_step takes (batch, batch_idx), but autoaccum calls training_step(model, batch). {told}"
    )
    assert ENTRIES["fit"](model, DATA, training_step=lambda m, pair: mse_loss(m(pair[0]), pair[1])).num_steps == 2


def test_an_error_of_its_own_stays_as_it_is() -> None:
    def own(m: Any, pair: Any) -> Any:
        return mse_loss(m.no_layer(pair[0]), pair[1])

    with pytest.raises(AttributeError, match="no_layer") as caught:
        ENTRIES["fit"](nn.Linear(3, 1), DATA, training_step=own)
    assert not isinstance(caught.value, autoaccum.AutoaccumError)


def test_the_command_line_says_it_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
import torch
from torch.nn.functional import mse_loss
def step(batch, batch_idx):
    return mse_loss(model(batch[0]), batch[1])
model = torch.nn.Linear(3, 1)
def recipe():
    data = torch.randn(8, 3), torch.randn(8, 1)
    return {"model": model, "data": data, "effective_batch": 4, "training_step": step}
"""
    path = tmp_path / "swapped.py"
    path.write_text(text)
    argv = ["fit", str(path), "--run-dir", "none", "--no-progress"]
    assert main(argv) == 2
    fix = "lambda model, batch: step(batch, 0)"
    assert capsys.readouterr().err == (
        "error: training_step takes (batch, batch_idx), but autoaccum calls training_step(model, batch). Pass "
        f"training_step={fix}\n"
    )
    path.write_text(text.replace('"training_step": step', f'"training_step": {fix}'))
    assert main(argv) == 0


def of_other_names(self: Any, batch: Any) -> torch.Tensor:
    return mse_loss(self(batch[0]), batch[1])


def of_odd_names(batch: Any, data: Any) -> torch.Tensor:
    return mse_loss(batch(data[0]), data[1])


def adapted(other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(other)
    def inner(model: Any, batch: Any) -> Any:
        return other(batch, model)

    return inner


@pytest.mark.parametrize("given", [of_other_names, of_odd_names, adapted(step)])
def test_a_call_that_works_is_not_refused_by_its_names(given: Callable[..., Any]) -> None:
    ENTRIES["fit"](nn.Linear(3, 1), DATA, given)
