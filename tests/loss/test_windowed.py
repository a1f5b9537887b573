"""What a loss over the whole window is made of: its two functions, and what stands in for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import ArgumentError, ArgumentTypeError, ConflictingArgumentsError
from autoaccum.loss.windowed import embedded, joined, spread, window_loss_of


def embed(model: Any, batch: Any) -> torch.Tensor:
    return model(batch)  # type: ignore[no-any-return]


def of_embeddings(embeddings: Any) -> Any:
    return embeddings.mean()


def of_both(embeddings: Any, batch: Any) -> Any:
    return embeddings.mean()


def with_options(embeddings: Any, temperature: float = 0.1) -> Any:
    return embeddings.mean() / temperature


NOTHING: dict[str, Any] = dict.fromkeys(
    ("training_step", "num_items", "reduction", "before_window", "metrics", "batch_norm")
)


@pytest.mark.parametrize(("loss_fn", "takes_batch"), [(of_embeddings, False), (of_both, True), (with_options, False)])
def test_a_loss_is_given_what_it_takes(loss_fn: Any, takes_batch: bool) -> None:
    found = window_loss_of("window", embed, loss_fn, **NOTHING)
    assert found is not None
    assert found.takes_batch is takes_batch


def test_there_is_none_by_default() -> None:
    assert window_loss_of("micro-batch", None, of_both, **NOTHING) is None
    assert window_loss_of(None, None, of_both, **NOTHING) is None


@pytest.mark.parametrize("name", NOTHING)
def test_what_only_losses_of_micro_batches_have_is_refused(name: str) -> None:
    with pytest.raises(ConflictingArgumentsError, match=f"^{name}=.*loss_scope='window'") as caught:
        window_loss_of("window", embed, of_both, **{**NOTHING, name: True})
    assert caught.value.argument == name


def test_mistakes_are_named() -> None:
    with pytest.raises(ArgumentError, match="loss_scope='batch': expected one of 'micro-batch', 'window'"):
        window_loss_of("batch", embed, of_both, **NOTHING)
    with pytest.raises(ArgumentError, match="embed=None: expected a function"):
        window_loss_of("window", None, of_both, **NOTHING)
    with pytest.raises(ArgumentError, match="loss_fn=None: expected a function"):
        window_loss_of("window", embed, None, **NOTHING)
    with pytest.raises(ArgumentError, match=r"embed=.*pass loss_scope='window'"):
        window_loss_of("micro-batch", embed, of_both, **NOTHING)
    with pytest.raises(ArgumentTypeError, match="It is the class"):
        window_loss_of("window", nn.Linear, of_both, **NOTHING)
    with pytest.raises(ArgumentTypeError, match="embed="):
        window_loss_of("window", of_embeddings, of_both, **NOTHING)


@pytest.mark.parametrize(
    ("computed", "match"),
    [
        ({"a": torch.ones(3, 2), "b": 1.0}, "a result with a float"),
        ([torch.ones(3), torch.ones(())], r"a tensor of shape \(\) for 3 samples"),
        (torch.ones(2, 3), r"a tensor of shape \(2, 3\) for 3 samples"),
        (torch.arange(3), "a result without embeddings"),
    ],
)
def test_embeddings_are_rows(computed: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        embedded(computed, 3)


def test_embeddings_are_joined_in_their_structure() -> None:
    found = [embedded({"a": torch.ones(size, 2), "b": (torch.arange(size),)}, size) for size in (2, 3)]
    assert [tuple(leaf.shape) for leaf in joined([one.leaves for one in found])] == [(5, 2), (5,)]
    with pytest.raises(ArgumentError, match=r"tensors of shapes \(2, 3\) and \(2, 4\)"):
        joined([(torch.ones(2, 3),), (torch.ones(2, 4),)])


def test_the_stand_in_is_a_sum_over_samples_that_shows_what_batch_norm_does() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    apart = spread([rows[:2]]) + spread([rows[2:]])
    assert spread([rows]).item() == pytest.approx(apart.item())
    norm = nn.BatchNorm1d(3).double()
    (whole,) = torch.autograd.grad(spread([norm(rows)]), rows)
    (cut,) = torch.autograd.grad(spread([norm(rows[:3])]) + spread([norm(rows[3:])]), rows)
    assert whole.norm() > 0.1
    assert (whole - cut).norm() > 0.1 * whole.norm()
    assert spread([torch.ones(2, 2, dtype=torch.complex64), torch.arange(2)]).ndim == 0


def test_other_commands_know_nothing_of_it() -> None:
    with pytest.raises(TypeError, match="loss_scope"):
        autoaccum.probe(nn.Linear(2, 2), torch.ones(3, 2), loss_scope="window")  # type: ignore[call-arg]
