"""What micro-batches return beside their losses, joined and averaged over a window."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from autoaccum.errors import LossError, OutputError
from autoaccum.step.outputs import Outputs, _Mean, on_device, read
from tests.devices import DEVICE

pytestmark = pytest.mark.usefixtures("made_there")


def joined(*micro_batches: tuple[Mapping[Any, Any], int]) -> dict[str, Any]:
    """The outputs of a window of these, each with its number of samples."""
    outputs = Outputs()
    for given, num_samples in micro_batches:
        outputs.take(given, num_samples)
    return outputs.joined()


class TestMeans:
    @pytest.mark.parametrize("sizes", [(7,), (1, 6), (3, 3, 1), (1,) * 7])
    def test_are_those_of_the_whole_window(self, sizes: tuple[int, ...]) -> None:
        values = torch.randn(7, dtype=torch.float64, generator=torch.Generator(DEVICE).manual_seed(0))
        parts = values.split(sizes)
        found = joined(*(({"mean": part.mean()}, len(part)) for part in parts))
        assert found["mean"] == pytest.approx(values.mean().item(), rel=1e-14)

    @pytest.mark.device
    def test_by_counts_of_their_own(self) -> None:
        counts = (torch.tensor(3), 5, np.int64(2))
        found = joined(*(({"mean": (value, count)}, 1) for value, count in zip((1.0, 2, True), counts, strict=True)))
        assert found["mean"] == (3 * 1.0 + 5 * 2 + 2 * 1) / 10

    @pytest.mark.device
    def test_of_nothing(self) -> None:
        nothing = {"mean": (float("nan"), 0)}
        assert joined((nothing, 2), ({"mean": (torch.tensor(4.0), 3)}, 2), (nothing, 1)) == {"mean": 4.0}
        assert math.isnan(joined((nothing, 2), (nothing, 1))["mean"])
        assert math.isnan(joined(({"mean": float("nan")}, 2), ({"mean": 1.0}, 2))["mean"]), "a value that counts"

    @pytest.mark.parametrize(
        "value", [2, 2.0, np.float32(2), np.int8(2), Fraction(2), torch.tensor(2), torch.tensor(2.0).bfloat16()]
    )
    def test_of_all_kinds_of_numbers(self, value: Any) -> None:
        (found,) = joined(({"a": value}, 3)).values()
        assert (found, type(found)) == (2.0, float)

    @pytest.mark.device
    def test_of_truth_values(self) -> None:
        assert joined(({"a": True}, 1), ({"a": torch.tensor(False)}, 1), ({"a": np.bool_(True)}, 2)) == {"a": 0.75}

    def test_of_a_name_that_only_some_have(self) -> None:
        assert joined(({"a": 1.0}, 3), ({"b": 2.0}, 5), ({"a": 5.0}, 1)) == {"a": 2.0, "b": 2.0}

    @pytest.mark.device
    def test_wait_on_a_device(self) -> None:
        """Where a value lies on a device nothing is read before the end, and the same comes of it."""
        wide = lambda value: torch.tensor(value, dtype=torch.float64)  # noqa: E731
        mean = _Mean()
        for value, count in (
            (wide(2.0), 3),
            (wide(5.0), 3),
            (wide(1.0), 2),
            (wide(math.nan), 0),
            (wide(math.nan), wide(0.0)),
            (wide(7.0), wide(2.0)),
            (4.0, wide(1.0)),
            (3.0, 2),
        ):
            mean.add(value, count)
        found = mean.joined()
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (torch.float64, ())
        assert found.item() == (2 * 3 + 5 * 3 + 1 * 2 + 7 * 2 + 4 * 1 + 3 * 2) / 13
        nothing = _Mean()
        nothing.add(wide(1.0), wide(0.0))
        assert math.isnan(float(nothing.joined()))


@pytest.mark.device
class TestRows:
    def test_are_joined_in_order_and_keep_their_dtype(self) -> None:
        rows = torch.arange(10, dtype=torch.int16).reshape(5, 2)
        found = joined(*(({"rows": part}, len(part)) for part in rows.split([2, 1, 2])))
        assert torch.equal(found["rows"], rows)
        assert found["rows"].dtype == torch.int16

    def test_have_no_graph_and_nothing_of_what_they_are_views_of(self) -> None:
        activations = torch.ones(4, 1000, requires_grad=True) * 2
        alive = weakref.ref(activations)
        outputs = Outputs()
        outputs.take({"one": activations[:, 0], "mean": activations.mean()}, 4)
        del activations
        gc.collect()
        assert alive() is None
        found = outputs.joined()
        assert isinstance(rows := found["one"], torch.Tensor)
        assert not rows.requires_grad
        assert rows.untyped_storage().nbytes() == rows.nbytes == 16
        assert found == {"one": rows, "mean": 2.0}

    def test_do_not_change_with_what_they_were_taken_of(self) -> None:
        counter = torch.zeros(1)
        outputs = Outputs()
        for _ in range(3):
            counter += 1
            outputs.take({"count": counter}, 1)
        assert on_device(outputs.joined(), torch.device(DEVICE))["count"].tolist() == [1, 2, 3]

    def test_of_no_items(self) -> None:
        found = joined(({"rows": torch.ones(0)}, 2), ({"rows": torch.ones(3)}, 1))
        assert found["rows"].tolist() == [1, 1, 1]


def test_dicts_within_have_names_with_a_slash() -> None:
    given = {"train": {"top": {1: 0.5, 5: torch.ones(2)}}, "n": (1.0, 2)}
    assert list(joined((given, 2))) == ["train/top/1", "train/top/5", "n"]


class TestRefuses:
    @pytest.mark.parametrize(
        ("values", "found"),
        [
            ((None,), "is None: expected a number or a 0-dim tensor"),
            (("text",), "is a str"),
            (([1.0, 2.0],), "is a list"),
            ((np.ones(3),), "is a ndarray"),
            ((1j,), "is a complex"),
            ((torch.tensor(1j),), r"is a complex64 tensor of shape \(\)"),
            (((1.0, 2, 3),), "is a tuple of 3"),
            (((torch.ones(2), 2),), r"is a float32 tensor of shape \(2,\)"),
            ((torch.ones(2, dtype=torch.complex64),), "is a complex64 tensor of shape"),
            ((torch.ones(2, 2).to_sparse(),), "is a sparse_coo tensor"),
            ((torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),), "is a nested tensor"),
            ((torch.ones(2, 3), torch.ones(2, 4)), r"\(2, 3\) in one micro-batch and \(2, 4\) in another.*x\[mask\]"),
            ((torch.ones(2), torch.ones(())), r"a scalar in one micro-batch.*squeeze\(-1\)"),
            ((1.0, torch.ones(2)), r"a scalar in one micro-batch"),
        ],
    )
    def test_what_no_window_can_have(self, values: Sequence[Any], found: str) -> None:
        with pytest.raises(OutputError, match=f"^The output 'deep/a' beside the loss .*{found}") as raised:
            joined(*(({"deep": {"a": value}}, 2) for value in values))
        assert raised.value.output == "deep/a"
        assert isinstance(raised.value, LossError)


@pytest.mark.device
def test_are_forgotten_when_a_window_begins() -> None:
    outputs = Outputs()
    assert not outputs.are_there
    outputs.take({"a": 1.0, "b": torch.ones(1)}, 1)
    outputs.have_missed = True
    outputs.begin()
    assert (outputs.are_there, outputs.have_missed) == (True, False)
    outputs.take({"a": 3.0}, 1)
    assert outputs.joined() == {"a": 3.0}
    assert outputs.joined() == {}


def test_nothing_is_kept_of_what_is_unwanted_or_empty() -> None:
    outputs = Outputs()
    outputs.take({}, 1)
    assert not outputs.are_there
    outputs.are_unwanted = True
    outputs.take({"a": object()}, 1)
    assert not outputs.are_there
    assert outputs.joined() == {}


@pytest.mark.device
def test_means_that_were_collected_apart_are_added_without_an_operation() -> None:
    whole = Outputs(joins=False)
    for value, size in ((1.0, 3), (5.0, 1)):
        part = Outputs(joins=False)
        part.take({"a": value, "rows": torch.ones(size)}, size)
        whole.absorb(part)
    assert whole.are_there
    assert whole.means() == {"a": 2.0}
    assert whole.means() == {"a": 2.0}, "they are kept"


def test_are_read_with_the_loss() -> None:
    rows, loss, norm = torch.arange(3), torch.tensor(0.1), torch.tensor(0.2, dtype=torch.float64)
    outputs = {"a": torch.tensor(0.3, dtype=torch.float64), "loss": 0.4, "rows": rows}
    assert read(loss, norm, outputs) == (loss.item(), 0.2, {"a": 0.3, "loss": 0.4, "rows": rows})
    assert read(loss, None, {"norm": 0.5}) == (loss.item(), None, {"norm": 0.5})
    assert read(loss, norm, {}) == (loss.item(), 0.2, {})


@pytest.mark.device
def test_on_a_device_all_are_tensors() -> None:
    found = on_device({"a": 0.1, "b": torch.ones(2)}, torch.device(DEVICE))
    assert found["a"].item() == 0.1
    assert found["a"].shape == ()
    assert found["b"].tolist() == [1, 1]
