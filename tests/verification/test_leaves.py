"""Whatever a batch is made of, it is looked at, or left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import autoaccum
from autoaccum.verification.leaves import numbers_of
from tests.devices import DEVICE

ROWS = [[1.0, -2.0], [0.0, 3.0]]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.tensor(ROWS),
        torch.tensor(ROWS, dtype=torch.bfloat16),
        torch.tensor(ROWS, dtype=torch.int8),
        torch.tensor(ROWS, requires_grad=True),
        torch.tensor(ROWS).to(torch.float8_e4m3fn),
        np.array(ROWS),
        np.array(ROWS, dtype=">f4"),
        np.array(ROWS)[:, ::-1][:, ::-1],
        np.array(ROWS, dtype=np.float16),
    ],
)
def test_numbers_are_those_of_the_rows_in_64_bits(leaf: Any) -> None:
    numbers = numbers_of(leaf)
    assert numbers is not None
    assert torch.equal(numbers, torch.tensor(ROWS, dtype=torch.float64))


def test_they_are_a_copy() -> None:
    leaf = torch.tensor(ROWS, dtype=torch.float64)
    numbers = numbers_of(leaf)
    assert numbers is not None
    numbers.zero_()
    assert leaf.any()


@pytest.mark.parametrize("leaf", [torch.tensor([1 + 2j]), torch.tensor([1 - 2j]).conj(), np.array([1 + 2j])])
def test_complex_ones_become_pairs(leaf: Any) -> None:
    numbers = numbers_of(leaf)
    assert numbers is not None
    assert numbers.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        None,
        3.0,
        torch.tensor(3.0),
        np.array(["a", "b"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([1], dtype=np.longdouble),
        np.array([None]),
        torch.eye(2).to_sparse(),
    ],
)
def test_what_has_no_rows_of_numbers_is_left_alone(leaf: Any) -> None:
    assert numbers_of(leaf) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, for what is in beta, or not to be used any more
def test_nor_what_lies_otherwise(make: Any) -> None:
    assert numbers_of(make()) is None


class Samples(torch.utils.data.Dataset[Any]):
    """Rows beside what cannot be compared."""

    def __init__(self, others: Any) -> None:
        self.inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)).double()
        self.others = others

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], index


@pytest.mark.parametrize("micro_batch", [4, "auto"])
@pytest.mark.parametrize(
    "others",
    [
        lambda indices: np.array([f"id {index}" for index in indices]),
        lambda indices: np.array(indices, dtype="datetime64[s]"),
        lambda indices: np.stack([np.array([index, 1.0]) for index in indices])[:, ::-1],
        lambda indices: np.array(indices, dtype=">i4"),
        lambda indices: torch.tensor(indices, dtype=torch.complex128),
        lambda indices: torch.eye(32)[indices].to_sparse(),
        lambda indices: torch.eye(32)[indices].to_sparse_csr(),
        lambda indices: torch.nested.nested_tensor([torch.ones(1 + index % 3) for index in indices]),
        lambda indices: torch.tensor(indices, dtype=torch.uint16 if len(indices) % 2 else torch.int64),
    ],
    ids=[
        "texts",
        "dates",
        "backwards",
        "big-endian",
        "complex",
        "sparse",
        "rows of sparse",
        "nested",
        "types that vary",
    ],
)
@pytest.mark.filterwarnings("ignore:.*in prototype stage", "ignore:Sparse.*beta")
def test_a_run_is_exact_beside_it(others: Any, micro_batch: Any) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([inputs for inputs, _ in samples]), others([index for _, index in samples])

    def step(model: Any, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True))

    trained = []
    for size in (8, micro_batch):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1).double()
        autoaccum.fit(
            model, Samples(others), effective_batch=8, micro_batch=size, training_step=step, steps=3, device=DEVICE,
            collate_fn=collate, progress=False,
        )  # fmt: skip
        trained.append(model.weight.detach())
    torch.testing.assert_close(*trained, rtol=1e-12, atol=1e-14)
