"""Losses in chunks are those of all pairs at once, and so are their gradients, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.step.contrastive import clip, in_chunks, info_nce
from autoaccum.testing import simulated_memory
from tests.models import relative_error

N = 11


def whole_clip(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    logits = scale * normalize(a, dim=1) @ normalize(b, dim=1).T
    return (cross_entropy(logits, torch.arange(N)) + cross_entropy(logits.T, torch.arange(N))) / 2


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "info_nce": (
        lambda a, b, scale, bias, chunk: info_nce(a, b, temperature=1 / scale, chunk=chunk),
        lambda a, b, scale, bias: cross_entropy(scale * normalize(a, dim=1) @ normalize(b, dim=1).T, torch.arange(N)),
    ),
    "clip": (lambda a, b, scale, bias, chunk: clip(a, b, logit_scale=scale, chunk=chunk), whole_clip),
}


@pytest.mark.parametrize("chunk", [1, 4, N, 100])
@pytest.mark.parametrize("name", PAIRS)
def test_value_and_gradient_are_those_of_all_pairs(name: str, chunk: int) -> None:
    in_parts, at_once = PAIRS[name]
    torch.manual_seed(0)
    leaves = [torch.randn(N, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    leaves += [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, -0.5)]
    found, expected = in_parts(*leaves, chunk), at_once(*leaves)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or relative_error(one, other) < 1e-11


def test_further_keys_are_negatives() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 3), torch.randn(9, 3)
    logits = normalize(queries, dim=1) @ normalize(keys, dim=1).T / 0.07
    assert info_nce(queries, keys, chunk=3).item() == pytest.approx(cross_entropy(logits, torch.arange(4)).item())


def test_memory_grows_with_the_samples() -> None:
    """4,096 samples compared with each other at once take 64 MiB, several times."""
    rows = torch.randn(4096, 16, requires_grad=True)
    with simulated_memory(40 * 2**20):
        info_nce(rows, rows.detach(), chunk=128).backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None


def test_a_chunk_has_rows() -> None:
    with pytest.raises(ArgumentError, match="chunk=0: expected an int of at least 1"):
        in_chunks(lambda rows: torch.zeros(()), 3, chunk=0)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_loss_of_rows_becomes_that_of_a_window(chunk: int) -> None:
    """It is told which rows they are."""
    torch.manual_seed(0)
    leaves = [torch.randn(N, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    met = []

    weight = torch.rand(N, dtype=torch.float64)

    def loss_rows(rows: slice) -> Any:
        met.append((rows.start, rows.stop))
        logits = leaves[0][rows] @ leaves[1].T
        return (cross_entropy(logits, torch.arange(N)[rows], reduction="none") * weight[rows]).sum()

    found = in_chunks(loss_rows, N, chunk) / N
    expected = (cross_entropy(leaves[0] @ leaves[1].T, torch.arange(N), reduction="none") * weight).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, leaves) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert relative_error(one, other) < 1e-11
    assert met[0] == (0, min(chunk, N))
    with pytest.raises(ArgumentError, match="chunk=0"):
        in_chunks(loss_rows, N, 0)


def test_embeddings_that_were_not_taken_apart_are_told() -> None:
    """It is called with (outputs, targets) where it is passed as the loss_fn itself."""
    both = torch.randn(4, 3), torch.arange(4)
    told = r"='a tuple': expected a tensor .*training_step that returns info_nce\(\*model\(batch\)\)\.$"
    for batch in (both, both[0]):
        with pytest.raises(ArgumentTypeError, match=told):
            info_nce(both, batch)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="='a dict'.*Write a training_step"):
        info_nce(both[0], {"labels": both[1]})  # type: ignore[arg-type]


def test_those_with_parameters_name_them() -> None:
    both = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(ArgumentTypeError, match=r"^images=.*clip\(\*model\(batch\), logit_scale=\.\.\.\)"):
        clip(both, both[0], logit_scale=1.0)  # type: ignore[arg-type]
