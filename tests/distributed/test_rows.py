"""Gradients that are sparse on some ranks: the rows of all are added up, whatever each of them has."""

from __future__ import annotations

import pytest
import torch

from autoaccum.distributed import gradients, rows
from autoaccum.distributed.group import join
from autoaccum.testing import oom_at
from tests.distributed.launching import launch
from tests.processes import in_turn

pytestmark = in_turn
KINDS = {
    "rows on both": (([4, 1, 1], [1, 3]), True),
    "none on one": (([4, 1], None), True),
    "no row on either": (([], []), True),
    "no row on one": (([], [2]), True),
    "dense on one": (([4, 1], "dense"), False),
    "dense and nothing": ((None, "dense"), False),
    "nothing": ((None, None), None),
}


def parameter() -> torch.Tensor:
    return torch.zeros(5, 3, 2, dtype=torch.float64, requires_grad=True)


def gradient(of: list[int] | str | None, seed: int) -> torch.Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    if of is None or isinstance(of, str):
        return None if of is None else torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)
    values = torch.randn(len(of), 3, 2, generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.tensor([of], dtype=torch.int64), values, (5, 3, 2), check_invariants=False)


def added_up(bucket_bytes: int, operation: int) -> tuple[list[torch.Tensor | None], str]:
    gradients._BUCKET_BYTES = bucket_bytes
    group = join(torch.device("cpu"))
    assert group is not None
    made = [parameter() for _ in KINDS]
    group.summing.prepare(made)
    for index, (p, (of_ranks, _)) in enumerate(zip(made, KINDS.values(), strict=True)):
        p.grad = gradient(of_ranks[group.rank], 10 * index + group.rank)
    kinds = rows.joined(group.exchange(rows.told(made)))
    failed = ""
    try:
        with oom_at(operation if operation and group.rank == 1 else 10**6):
            rows.add_up(group.summing, made, kinds, 0.5)
    except torch.OutOfMemoryError as error:
        failed = type(error).__name__
    assert group.exchange(group.rank) == [0, 1]
    return [p.grad for p in made], failed


@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 40, 1])
def test_the_rows_of_all_ranks_are_added_up(bucket_bytes: int) -> None:
    first, second = (found for found, _ in launch(added_up, 2, bucket_bytes, 0))
    for index, (of_ranks, is_sparse) in enumerate(KINDS.values()):
        one, other = first[index], second[index]
        if is_sparse is None:
            assert one is other is None
            continue
        assert one is not None
        assert other is not None
        assert one.is_sparse == other.is_sparse == is_sparse
        if is_sparse:
            assert one.is_coalesced()
            assert torch.equal(one.indices(), other.indices())
            assert one.indices()[0].tolist() == sorted({row for of in of_ranks for row in of or ()})
        expected = torch.zeros(5, 3, 2, dtype=torch.float64)
        for rank, of in enumerate(of_ranks):
            found = gradient(of, 10 * index + rank)
            if found is not None:
                expected += 0.5 * (found.to_dense() if found.is_sparse else found)
        torch.testing.assert_close(one.to_dense() if is_sparse else one, expected, rtol=1e-14, atol=1e-15)
        assert torch.equal(one.to_dense(), other.to_dense()) if is_sparse else torch.equal(one, other)


@pytest.mark.parametrize("operation", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_rank_that_runs_out_of_memory_goes_on_for_the_others(operation: int) -> None:
    (_, first), (_, second) = launch(added_up, 2, 40, operation)
    assert (first, second) == ("", "OutOfMemoryError")


def test_rows_are_told_once() -> None:
    p = parameter()
    p.grad = gradient([4, 1, 1], 0)
    (found,) = rows.told([p])
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [[1, 4]]
