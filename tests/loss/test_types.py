"""Parts of a batch that a model or a loss cannot compute with are named, with what converts them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, kl_div

from autoaccum.errors import DataError
from autoaccum.loss.functions import loss_function

INPUTS, TARGETS = torch.ones(4, 3), torch.arange(4) % 2


def of(inputs: Any, targets: Any, model: nn.Module | None = None) -> Any:
    return loss_function(cross_entropy, None)(model or nn.Linear(3, 2), (inputs, targets))


@pytest.mark.parametrize(
    ("inputs", "targets", "found"),
    [
        (
            INPUTS.double(),
            TARGETS,
            r"the tensor \[0\] of a batch is of float64, while the model is of float32 .*float32",
        ),
        (INPUTS > 0, TARGETS, r"the tensor \[0\] of a batch is of bool, while"),
        (INPUTS, TARGETS.int(), r"the tensor \[1\] of a batch is of int32, while numbers of classes are int64"),
        (INPUTS, TARGETS.float(), r"the tensor \[1\] of a batch is of float32, while numbers of classes are int64"),
        (TARGETS, INPUTS, r"inputs and targets may be swapped: .*, \[1\], is of float32, and \[0\] of int64"),
        (INPUTS, TARGETS.tolist(), r"\[1\] is a list of numbers.*torch\.tensor\(numbers\)"),
        (["a", "b", "c", "d"], TARGETS, r"\[0\] holds texts.*Tokenize them before training, or pass a collate_fn"),
    ],
)
def test_what_does_not_fit_is_named(inputs: Any, targets: Any, found: str) -> None:
    with pytest.raises(DataError, match=f"data: {found}") as caught:
        of(inputs, targets)
    assert isinstance(caught.value.__cause__, TypeError | RuntimeError)


def test_numbers_of_classes_in_columns() -> None:
    with pytest.raises(DataError, match=r"^data: \[1\] has the shape \(samples, 1\).*targets\.squeeze\(1\)\.$"):
        of(INPUTS, TARGETS[:, None])
    with pytest.raises(DataError, match=r"has the shape \(samples, 4\).*targets\.argmax\(1\)"):
        of(INPUTS, torch.stack([TARGETS] * 4, 1))
    with pytest.raises(DataError, match=r"argmax\(1\), or targets\.float\(\) as probabilities\.$"):
        of(INPUTS, nn.functional.one_hot(TARGETS, 2))


@pytest.mark.parametrize("targets", [TARGETS, TARGETS.int(), TARGETS > 0])
@pytest.mark.parametrize(
    "loss_fn",
    [
        binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss(),
        lambda outputs, targets: binary_cross_entropy(outputs.sigmoid(), targets),
        partial(kl_div, reduction="batchmean"),
    ],
)
def test_targets_that_are_to_be_numbers(loss_fn: Any, targets: torch.Tensor) -> None:
    found = rf"^data: the tensor \[1\] of a batch is of {str(targets.dtype)[6:]}, while the loss computes with float32 "
    with pytest.raises(DataError, match=rf"{found}.*Convert it: tensor\.to\(torch\.float32\)"):
        loss_function(loss_fn, None)(nn.Linear(3, 1), (INPUTS, targets[:, None]))


def test_targets_are_not_to_blame_for_what_a_model_does() -> None:
    class Counting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            torch.zeros(4, dtype=torch.int64).add_(super().forward(inputs)[:, 0])
            return inputs

    with pytest.raises(RuntimeError, match="can't be cast") as caught:
        of(INPUTS, TARGETS, Counting(3, 1))
    assert not isinstance(caught.value, DataError)


def test_another_tensor_of_the_batch_is_not_to_blame_for_targets_that_the_step_has_made() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1] > 0)

    with pytest.raises(RuntimeError) as caught:
        loss_function(None, step)(nn.Linear(3, 1), (INPUTS, torch.randn(len(INPUTS)), torch.arange(len(INPUTS))))
    assert not isinstance(caught.value, DataError)


def test_indices_of_an_embedding_are_no_labels() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(9, 2))
    with pytest.raises(DataError, match=r"the tensor \[0\] of a batch is of float32, while indices are int64"):
        loss_function(cross_entropy, None)(model, (INPUTS, TARGETS))


def test_labels_that_are_where_the_loss_has_not_looked_for_them() -> None:
    loss_of = loss_function(lambda outputs, targets: cross_entropy(targets, outputs), None)
    with pytest.raises(DataError, match=r"than those of classes .*, which \[1\] may hold\. .* either are swapped"):
        loss_of(nn.Linear(3, 2), (INPUTS, TARGETS))


def test_the_other_way_round() -> None:
    with pytest.raises(DataError, match=r"of float32, while the model is of float64 .*tensor\.to\(torch\.float64\)"):
        of(INPUTS, TARGETS, nn.Linear(3, 2).double())
    half = r"Convert it: tensor\.to\(torch\.bfloat16\); or leave the model in float32, and pass precision='bf16'\.$"
    with pytest.raises(DataError, match=half):
        of(INPUTS, TARGETS, nn.Linear(3, 2).bfloat16())


def test_arrays_are_tensors_by_now() -> None:
    loss_of = loss_function(None, lambda model, batch: torch.from_numpy(batch))
    with pytest.raises(DataError, match=r"leave torch\.from_numpy\(\) out"):
        loss_of(nn.Linear(3, 2), INPUTS)


def test_texts_are_one_argument() -> None:
    class Lengths(nn.Module):
        def forward(self, texts: list[str]) -> torch.Tensor:
            return torch.tensor([[float(len(text)), 0.0] for text in texts], requires_grad=True)

    assert of(["a", "bb", "ccc", "d"], TARGETS, Lengths()).ndim == 0
    assert of(("a", "bb", "ccc", "d"), TARGETS, Lengths()).ndim == 0


def test_errors_of_other_kinds_come_out_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        of(INPUTS[:, :2], TARGETS)
    with pytest.raises(TypeError, match="mine"):
        loss_function(None, lambda model, batch: (_ for _ in ()).throw(TypeError("mine")))(None, (INPUTS, ["a"]))
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        loss_function(None, lambda model, batch: model.missing)(nn.Linear(1, 1), (INPUTS, TARGETS))


class Reader(nn.Module):
    """Reads sequences by an RNN, the last output of which it takes; or by what is given."""

    def __init__(self, read: Any = None) -> None:
        super().__init__()
        self.embedding, self.rnn, self.out, self.read = (
            nn.Embedding(9, 3),
            nn.GRU(3, 3, batch_first=True),
            nn.Linear(3, 2),
            read,
        )

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.embedding(ids)
        return self.out(self.rnn(found)[0][:, -1] if self.read is None else self.read(found, mask))


@pytest.mark.parametrize(
    "read",
    [
        None,
        lambda found, mask: found.max(1).values,
        lambda found, mask: found[:, -1],
        lambda found, mask: found.flatten(1).reshape(4, -1),
        lambda found, mask: nn.functional.conv1d(found.mT, torch.ones(3, 3, 1)).amax(2),
    ],
)
def test_an_empty_sequence_is_named(read: Any) -> None:
    batch = {"ids": torch.ones(4, 0, dtype=torch.int64), "mask": torch.ones(4, 0, dtype=torch.bool)}
    with pytest.raises(DataError, match=r"the tensor \['ids'\] of a batch is empty, of shape \(4, 0\).*of length 0"):
        loss_function(None, lambda model, batch: model(**batch).sum())(Reader(read), batch)


def test_a_mask_is_not_to_blame_for_what_is_said_of_no_types() -> None:
    def pack(found: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.utils.rnn.pack_padded_sequence(found, mask.sum(1).cpu(), batch_first=True).data

    ids, mask = torch.ones(4, 3, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="Length of all samples has to be greater than 0, but found an element"):
        loss_function(None, lambda model, batch: model(*batch).sum())(Reader(pack), (ids, mask))


def test_an_entry_that_is_empty_by_right_is_not_to_blame() -> None:
    loss_of = loss_function(None, lambda model, batch: model(batch["inputs"]).sum())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        loss_of(nn.Linear(3, 2), {"inputs": INPUTS[:, :2], "boxes": torch.ones(4, 0, 4)})
