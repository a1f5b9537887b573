"""What is wrong with a loss is said with the cure for exactly that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum.errors import ArgumentError, LossError, NonScalarLossError
from autoaccum.step.loss_functions import loss_function, refuse_unknown

weight = nn.Parameter(torch.ones(()))


def loss() -> torch.Tensor:
    return weight * 2


def outputs() -> torch.Tensor:
    return weight * torch.ones(4, 3)


EITHER = (
    r"return loss, \{\"accuracy\": \.\.\.\}\. .* none of them named 'loss', or in a list, which may hold constants\.$"
)


@pytest.mark.parametrize(
    ("returned", "cure"),
    [
        ({"loss": loss(), "logits": outputs()}, rf"whose 'logits' is a tensor of shape \(4, 3\).*{EITHER}"),
        ({"loss": loss(), "accuracy": 0.5}, EITHER),
        ({"loss": loss(), "ce": loss()}, EITHER),
        ({"ce": loss(), "mse": loss(), "x": outputs()}, EITHER),
        ({"ce": loss(), "acc": torch.tensor(0.7)}, EITHER),
        ({"ce": loss(), "acc": 0.7}, EITHER),
        ((loss(), outputs()), EITHER),
        ((outputs(), loss()), rf"whose '0' is a tensor of shape \(4, 3\).*{EITHER}"),
        ((loss(), None), rf"whose '1' is a value of type NoneType.*{EITHER}"),
        (0.5, r"a value of type float.*without \.item\(\), float\(\) or \.numpy\(\)\. A sum over none"),
        (np.float32(0.5), r"a value of type float32.*without \.item\(\)"),
        (np.ones(()), r"a value of type ndarray.*without \.item\(\)"),
        ([0.5, 0.25], r"a list of 2.*without \.item\(\)"),
        (None, r"nothing.*End it with a return of the loss\.$"),
        (
            weight * torch.ones(4),
            r"Reduce it, for example with \.mean\(\); with reduction='none' a loss has a number for each sample\.$",
        ),
        (weight * torch.ones(1), r"with \.mean\(\); with reduction='none'"),  # as likely as not of one sample
        (outputs(), r"if these are outputs of the model, compute a loss of them\.$"),
        (loss() + 0j, r"a complex number.*\.abs\(\) or \.real\.$"),
        (SimpleNamespace(loss=loss()), r"return outputs\.loss\.$"),
        ({}, r"no loss, in an empty dict: .*of 0 that depends on the model: .*outputs\.sum\(\) \* 0\}\.$"),
        ({"a": "x"}, r"whose 'a' is a value of type str.*a scalar tensor that depends on the parameters\.$"),
        ({str(i): outputs() for i in range(20)}, r"'11', \.\.\. whose '0'"),
    ],
)
def test_each_is_told_what_to_return(returned: Any, cure: str) -> None:
    with pytest.raises(NonScalarLossError, match=cure):
        loss_function(None, lambda model, batch: returned)(None, None)


def test_nothing_to_compute_a_loss_of_is_no_mistake() -> None:
    for nothing in (0, 0.0, torch.zeros(())):
        computed: Any = loss_function(None, lambda model, batch, nothing=nothing: (loss(), nothing))(None, None)
        assert computed.loss == 2
        computed = loss_function(None, lambda model, batch, nothing=nothing: {"a": loss(), "b": nothing})(None, None)
        assert computed.loss == 2


def test_a_validation_adds_what_it_adds() -> None:
    """No loss has a gradient there, so that constants are not told from them."""
    with torch.no_grad():
        computed: Any = loss_function(None, lambda model, batch: (loss(), loss() / 2))(None, None)
    assert computed.loss == 3


@pytest.mark.parametrize(
    ("returned", "cure"),
    [
        ((outputs(), loss()), r"training_step=lambda model, batch: model\(\*batch\)\[1\]\.$"),
        ((loss(), outputs()), r"model\(\*batch\)\[0\]\.$"),
        ((outputs(), outputs()), r"Pass loss_fn or training_step"),
        ({"loss": None, "logits": outputs()}, r"do the batches hold labels\?$"),
    ],
)
def test_a_model_is_told_where_its_loss_may_be(returned: Any, cure: str) -> None:
    with pytest.raises(LossError, match=cure):
        loss_function(None, None)(lambda *batch: returned, (1, 2))


def test_counts_of_none_of_the_losses_are_refused() -> None:
    losses = {"words": torch.ones(()), "text": torch.ones(())}
    refuse_unknown({"words": 2.0, "boxes": 1.0}, losses)  # of boxes there are none in this micro-batch
    refuse_unknown({}, losses)
    refuse_unknown({"word": 2.0}, {})
    with pytest.raises(
        ArgumentError, match=r"num_items=\['word'\].*names of the losses that were returned, 'words', 'text'"
    ):
        refuse_unknown({"word": 2.0}, losses)
