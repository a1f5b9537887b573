"""What a ``before_window`` sees, how its results are told apart, and what its pieces leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.data import batches
from autoaccum.errors import ArgumentError, ArgumentTypeError, NothingFitsError
from autoaccum.testing import simulated_memory
from autoaccum.window.before import Sharing, Stretch, before_window_of, loss_alone
from autoaccum.window.single_samples import SingleSampleError
from tests.devices import DEVICE, there
from tests.window.making import HERE

pytestmark = pytest.mark.usefixtures("made_there")


class Rows:
    """A window of the numbers from 0 on, that says what it was asked for."""

    lengths = None

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.asked: list[tuple[int, int]] = []
        self.collated: list[int] = []  # how many samples at once: what the function itself keeps is put back

    def micro_batch(self, start: int, size: int) -> Any:
        self.asked.append((start, size))
        return {"x": torch.arange(start, start + size).double()}

    def samples(self, positions: Sequence[int]) -> Any:
        self.collated.append(len(positions))
        return {"x": torch.tensor(list(positions)).double()}


def sharing(function: Any, model: Any = None) -> Sharing:
    before = before_window_of(function, None, lambda model, batch, shared: batch)
    assert before is not None
    model = nn.Identity() if model is None else model
    return Sharing(before, model=model, modules=(model,), device=HERE, autocast=nullcontext)


@pytest.mark.device
class TestRows:
    """What has one row per sample is cut along with them; what only is as long as the window is not."""

    def test_it_is_measured_where_lengths_are_those_of_the_window(self) -> None:
        def function(batch: Any) -> Any:
            count = len(batch["x"])
            return {
                "rows": batch["x"] * 2,
                "weights": torch.arange(4),
                "nested": [torch.ones(count, 2), {"texts": [str(i) for i in range(count)]}],
                "array": np.arange(count),
                "names": ["a", "b", "c", "d"],
                "number": 3,
                "scalar": torch.tensor(5.0),
                "longer": torch.arange(7),
            }

        made, window = sharing(function), Rows(4)
        found = made.begin(window).micro_batch(1, 2).shared
        assert found["rows"].tolist() == [2, 4]
        assert found["weights"].tolist() == [0, 1, 2, 3]
        assert found["nested"][0].shape == (2, 2)
        assert found["nested"][1]["texts"] == ["1", "2"]
        assert found["array"].tolist() == [1, 2]
        assert found["names"] == ["a", "b", "c", "d"]
        assert (found["number"], found["scalar"].item(), len(found["longer"])) == (3, 5, 7)
        assert window.collated == [4, 3]
        # Decided once: a window of another size asks nothing, one as long as what was too long before either.
        later = Rows(7)
        assert made.begin(later).micro_batch(6, 1).shared["rows"].tolist() == [12]
        assert later.collated == [7]

    def test_a_window_of_one_sample_tells_nothing(self) -> None:
        made = sharing(lambda batch: {"rows": batch["x"], "whole": torch.zeros(1)})
        assert made.begin(Rows(1)).micro_batch(0, 1).shared["rows"].tolist() == [0]
        found = made.begin(Rows(3)).micro_batch(2, 1).shared
        assert (found["rows"].tolist(), found["whole"].tolist()) == ([2], [0])

    def test_another_structure_is_measured_anew(self) -> None:
        def function(batch: Any) -> Any:
            rows = {"rows": batch["x"]}
            return rows if len(batch["x"]) < 5 else rows | {"more": torch.arange(5)}

        made = sharing(function)
        assert made.begin(Rows(3)).micro_batch(1, 1).shared["rows"].tolist() == [1]
        found = made.begin(Rows(6)).micro_batch(1, 1).shared
        assert (found["rows"].tolist(), found["more"].tolist()) == ([1], [0, 1, 2, 3, 4])

    def test_a_function_of_whole_groups(self) -> None:
        def function(batch: Any) -> Any:
            groups = batch["x"].view(-1, 3)
            return {"rows": (groups - groups.mean(dim=1, keepdim=True)).flatten(), "weights": torch.arange(6)}

        found = sharing(function).begin(Rows(6)).micro_batch(4, 2).shared
        assert (found["rows"].tolist(), len(found["weights"])) == ([0, 1], 6)

    def test_of_a_function_that_takes_no_fewer(self) -> None:
        def function(batch: Any) -> Any:
            return batch["x"].view(6)

        assert sharing(function).begin(Rows(6)).micro_batch(4, 2).shared.tolist() == [4, 5]

    def test_rows_that_are_none_any_more_are_refused(self) -> None:
        made = sharing(lambda batch: {"best": batch["x"][:4]})
        assert made.begin(Rows(4)).micro_batch(1, 1).shared["best"].tolist() == [1]
        with pytest.raises(ArgumentError, match=r"^before_window=.*'best'.*with 4 rows for 6 samples.*x\[None\]"):
            made.begin(Rows(6)).micro_batch(0, 3)

    def test_what_it_keeps_moves_once(self) -> None:
        calls: list[int] = []
        total = 0

        def function(batch: Any) -> Any:
            nonlocal total
            total += 1
            calls.append(len(batch["x"]))
            return batch["x"] + total

        state = torch.get_rng_state()
        window = sharing(function).begin(Rows(4))
        assert window.micro_batch(0, 2).shared.tolist() == [1, 2]
        assert (total, calls) == (1, [4])
        window.roll_back()
        assert (total, calls) == (0, [])
        assert window.micro_batch(3, 1).shared.tolist() == [4]
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("num_samples", [1, 4])
    def test_what_it_writes_to_its_batch_does_not_show(self, num_samples: int) -> None:
        data = torch.arange(4.0)
        window = Rows(num_samples)
        window.samples = lambda positions: {"x": data[: len(positions)], "one": torch.zeros(7)}  # type: ignore[method-assign]
        sharing(lambda batch: batch["x"].add_(1)).begin(window).prepare(1)
        assert data.tolist() == [0, 1, 2, 3]

    def test_what_is_written_to_it_does_not_show(self) -> None:
        kept = torch.arange(4.0)
        window = sharing(lambda batch: kept[: len(batch["x"])]).begin(Rows(4))
        window.micro_batch(0, 2).shared.zero_()
        assert kept.tolist() == [0, 1, 2, 3]


class Noisy(nn.Module):
    """Counts its calls in a buffer and an attribute, draws, and takes no single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.times = 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.times += 1
        return self.weight * x + torch.rand(len(x)) * 0


@pytest.mark.device
class TestPieces:
    """Forwards before the window: joined results, and nothing else."""

    def test_they_leave_nothing(self) -> None:
        model, window = Noisy(), Rows(7)

        def function(batch: Any, in_pieces: Any) -> Any:
            found = in_pieces(lambda model, part: {"y": model(part["x"]), "times": part["x"].sum()})
            assert not found["y"].requires_grad
            return found["y"], found["times"][None]

        state = torch.get_rng_state()
        shared = sharing(function, model).begin(window)
        shared.prepare(3)
        found = shared.micro_batch(3, 2).shared
        assert window.asked[:3] == [(0, 3), (3, 2), (5, 2)]
        assert found[0].tolist() == [3, 4]
        assert found[1].tolist() == [[3, 7, 11]]  # a number of each piece
        assert (model.calls.item(), model.times) == (0, 0)
        assert torch.equal(torch.get_rng_state(), state)
        assert model.weight.grad is None

    def test_results_of_every_kind_are_joined(self) -> None:
        def function(batch: Any, in_pieces: Any) -> Any:
            return in_pieces(
                lambda model, part: {
                    "array": part["x"].cpu().numpy(),
                    "list": part["x"].tolist(),
                    "n": len(part["x"]),
                    "none": None,
                }
            )

        shared = sharing(function).begin(Rows(5))
        shared.prepare(2)
        found = shared.micro_batch(0, 5).shared
        assert found["array"].tolist() == found["list"] == [0, 1, 2, 3, 4]
        assert (found["n"], found["none"]) == ([2, 2, 1], None)

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            (lambda model, part: torch.zeros(len(part["x"]), len(part["x"])), "padded to one length"),
            (lambda model, part: [part["x"]] * len(part["x"]), "Return as many for each"),
        ],
    )
    def test_results_that_cannot_be_joined(self, function: Any, text: str) -> None:
        with pytest.raises(ArgumentError, match=text):
            sharing(lambda batch, in_pieces: in_pieces(function)).begin(Rows(5)).prepare(2)

    def test_what_is_no_function(self) -> None:
        with pytest.raises(ArgumentTypeError, match=r"in_pieces\(function\)"):
            sharing(lambda batch, in_pieces: in_pieces(lambda model: model)).begin(Rows(5)).prepare(2)

    def test_a_single_sample_that_is_refused_asks_for_two(self) -> None:
        def function(batch: Any, in_pieces: Any) -> Any:
            return in_pieces(
                lambda model, part: part["x"].squeeze().cumsum(0)[1:] if len(part["x"]) > 1 else part["x"][5]
            )

        with pytest.raises(SingleSampleError):
            sharing(function).begin(Rows(3)).prepare(1)
        window = Rows(5)
        sharing(function).begin(window).prepare(2)
        assert window.asked[-2:] == [(0, 3), (3, 2)]

    def test_a_run_then_has_micro_batches_of_two(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

        def function(batch: Any, in_pieces: Any) -> Any:
            return in_pieces(lambda model, part: nn.functional.batch_norm(model(part["x"]), None, None, training=True))

        result = autoaccum.fit(
            model,
            {"x": torch.randn(8, 3)},
            effective_batch=8,
            micro_batch=1,
            # Added, for means of normalised numbers are 0 up to rounding: a factor that differs with every processor.
            training_step=lambda model, batch, shared: (model(batch["x"]) + shared).mean(),
            before_window=function,
            verify=False,
            progress=False,
        )
        assert [report.micro_batches for report in result.history] == [(2, 2, 2, 2)]


class TestAlone:
    """A batch that no window is made of is one by itself."""

    @pytest.mark.device
    def test_nothing_is_kept(self) -> None:
        calls = 0

        def function(batch: Any, in_pieces: Any) -> Any:
            nonlocal calls
            calls += 1
            return in_pieces(lambda model, part: model(part["x"])).sum() + calls

        def loss_of(model: Any, given: Any) -> Any:
            return given.shared

        before = before_window_of(function, None, lambda model, batch, shared: batch)
        given: dict[str, Any] = {"model": Noisy(), "device": HERE, "autocast": nullcontext}
        found = loss_alone(loss_of, before, modules=(given["model"],), **given)
        batch = {"x": torch.arange(4.0)}
        assert found(None, batch).item() == found(None, batch).item() == 7
        assert calls == 0
        assert loss_alone(loss_of, None, modules=(), **given) is loss_of

    @pytest.mark.device
    def test_a_probe_calls_it(self) -> None:
        seen = []

        def function(batch: Any, in_pieces: Any) -> Any:
            seen.append(len(batch["x"]))
            return in_pieces(lambda model, part: model(part["x"])).mean()

        report = autoaccum.probe(
            nn.Linear(3, 1),
            {"x": torch.randn(9, 3)},
            effective_batch=8,
            device=DEVICE,
            training_step=lambda model, batch, mean: (model(batch["x"]) - mean).square().mean(),
            before_window=function,
        )
        assert report.max_micro_batch == 8
        assert seen == []  # which is put back

    @pytest.mark.device
    def test_lazy_layers_are_built_by_its_pieces(self) -> None:
        result = autoaccum.fit(
            nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)),
            {"x": torch.randn(9, 3)},
            effective_batch=8,
            micro_batch=3,
            training_step=lambda model, batch, mean: (model(batch["x"]) - mean).square().mean(),
            before_window=lambda batch, in_pieces: in_pieces(lambda model, part: model(part["x"])).mean(dim=0),
            progress=False,
        )
        assert result.model[0].in_features == 3  # type: ignore[index]

    def test_advice_is_given_with_it(self) -> None:
        def step(model: Any, batch: Any, mean: torch.Tensor) -> torch.Tensor:
            hidden = (model(batch["x"]) - mean).expand(-1, 30_000)
            for _ in range(5):
                hidden = hidden.sin()
            return hidden.mean()

        with simulated_memory(500_000), pytest.raises(NothingFitsError) as raised:
            autoaccum.fit(
                nn.Linear(3, 1),
                {"x": torch.randn(9, 3)},
                effective_batch=8,
                training_step=step,
                before_window=lambda batch: batch["x"].mean(),
                progress=False,
            )
        # What they need is known where the forward could be run once more, with what is shared.
        assert raised.value.advice
        assert all(advice.needed_bytes for advice in raised.value.advice)


@pytest.mark.device
class TestValidation:
    """The loss of a validation is that of windows as large as the run's first one, whatever micro-batch fits."""

    def test_it_does_not_depend_on_the_micro_batch(self) -> None:
        torch.manual_seed(0)
        model, data = nn.Linear(3, 1).double(), {"x": torch.randn(20, 3).double(), "a": torch.randn(20).double()}
        calls = []

        def normalised(batch: Any) -> Any:
            calls.append(len(batch["a"]))
            return {"a": batch["a"] - batch["a"].mean()}

        def step(model: Any, batch: Any) -> torch.Tensor:
            return (model(batch["x"])[:, 0] * batch["a"]).mean()

        losses = []
        for micro_batch in (2, 5, 8):
            result = autoaccum.fit(
                model,
                data,
                effective_batch=8,
                micro_batch=micro_batch,
                training_step=step,
                before_window=normalised,
                validation_data=data,
                lr=0.0,
                steps=1,
                progress=False,
            )
            losses += [event.loss for event in result.events if isinstance(event, autoaccum.events.Validated)]
        with torch.no_grad():
            expected = 0.0
            for start in (0, 8, 16):
                part = batches.take(data, start, start + 8)
                expected += len(part["a"]) / 20 * step(model, part | normalised(part)).item()
        assert losses == pytest.approx([expected] * 3, rel=1e-12)


class TestStretch:
    """A few samples are a window, whose micro-batches are made of them in the order of a cut."""

    samples = torch.arange(10.0)

    def stretch(self) -> Stretch:
        return Stretch(((4, 2), (7, 1, 3)), lambda part: there(self.samples[list(part)]))

    def test_micro_batches_come_in_the_order_of_the_parts(self) -> None:
        stretch = self.stretch()
        assert stretch.num_samples == 5
        assert stretch.micro_batch(0, 2).tolist() == [4.0, 2.0]
        assert stretch.micro_batch(2, 3).tolist() == [7.0, 1.0, 3.0]

    def test_samples_are_read_on_the_host_by_their_places(self) -> None:
        found = self.stretch().samples([3, 0])
        assert found.tolist() == [1.0, 4.0]
        assert found.device.type == "cpu"


def test_one_that_asks_for_the_model_is_told_what_it_is_given() -> None:
    def mixed(model: Any, batch: Any) -> Any:
        return batch

    with pytest.raises(ArgumentTypeError, match=r"^before_window=.*It is not given the model, but.*in_pieces"):
        before_window_of(mixed, None, lambda model, batch, shared: shared)
