"""Losses in chunks are those of all pairs at once, and so are their gradients, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.loss.contrastive import clip, in_chunks, info_nce, sig_lip, sup_con, triplet
from autoaccum.testing import simulated_memory
from tests.models import relative_error

N = 11
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3])


def whole_clip(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    logits = scale * normalize(a, dim=1) @ normalize(b, dim=1).T
    return (cross_entropy(logits, torch.arange(N)) + cross_entropy(logits.T, torch.arange(N))) / 2


def whole_sig_lip(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    logits = scale * normalize(a, dim=1) @ normalize(b, dim=1).T + bias
    return -logsigmoid((2 * torch.eye(N) - 1) * logits).sum() / N


def whole_sup_con(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    z, total, count = normalize(a, dim=1), 0, 0
    for i in range(N):
        others = [j for j in range(N) if j != i]
        positives = [j for j in others if LABELS[j] == LABELS[i]]
        if positives:
            chances = (z[others] @ z[i] * scale).log_softmax(0)
            total, count = total - sum(chances[others.index(j)] for j in positives) / len(positives), count + 1
    return total / count


def whole_triplet(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    total = 0
    for i in range(N):
        far = [(a[i] - a[j]).norm() for j in range(N)]
        positives = [far[j] for j in range(N) if j != i and LABELS[j] == LABELS[i]]
        negatives = [far[j] for j in range(N) if LABELS[j] != LABELS[i]]
        if positives:
            total = total + torch.relu(max(positives) - min(negatives) + 0.2)
    return total / N


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "info_nce": (
        lambda a, b, scale, bias, chunk: info_nce(a, b, temperature=1 / scale, chunk=chunk),
        lambda a, b, scale, bias: cross_entropy(scale * normalize(a, dim=1) @ normalize(b, dim=1).T, torch.arange(N)),
    ),
    "clip": (lambda a, b, scale, bias, chunk: clip(a, b, logit_scale=scale, chunk=chunk), whole_clip),
    "sig_lip": (
        lambda a, b, scale, bias, chunk: sig_lip(a, b, logit_scale=scale, logit_bias=bias, chunk=chunk),
        whole_sig_lip,
    ),
    "sup_con": (lambda a, b, scale, bias, chunk: sup_con(a, LABELS, temperature=1 / scale, chunk=chunk), whole_sup_con),
    "triplet": (lambda a, b, scale, bias, chunk: triplet(a, LABELS, chunk=chunk), whole_triplet),
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


def test_a_label_of_its_own_has_no_loss() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    for loss in (sup_con(rows, torch.arange(3)), triplet(rows, torch.arange(3)), triplet(rows, torch.zeros(3))):
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, rows)
        assert not gradient.any()


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


@pytest.mark.parametrize("loss", [info_nce, sup_con, triplet])
def test_embeddings_that_were_not_taken_apart_are_told(loss: Any) -> None:
    """It is called with (outputs, targets) where it is passed as the loss_fn itself."""
    both = torch.randn(4, 3), torch.arange(4)
    told = rf"='a tuple': expected a tensor .*training_step that returns {loss.__name__}\(\*model\(batch\)\)\.$"
    for batch in (both, both[0]):
        with pytest.raises(ArgumentTypeError, match=told):
            loss(both, batch)
    with pytest.raises(ArgumentTypeError, match="='a dict'.*Write a training_step"):
        loss(both[0], {"labels": both[1]})


def test_those_with_parameters_name_them() -> None:
    both = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(ArgumentTypeError, match=r"^images=.*clip\(\*model\(batch\), logit_scale=\.\.\.\)"):
        clip(both, both[0], logit_scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"sig_lip\(\*model\(batch\), logit_scale=\.\.\., logit_bias"):
        sig_lip(both, both[0], logit_scale=1.0, logit_bias=0.0)  # type: ignore[arg-type]
