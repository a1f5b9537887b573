"""Averages of weights: what they are, where they are used, and that using them changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EMA
from autoaccum.errors import ArgumentError, CheckpointCorruptError, MemoryLimitError
from autoaccum.events import Started, Validated
from autoaccum.testing import oom_at
from tests.models import classes, mlp


def fit(model: nn.Module, *callbacks: Any, **options: Any) -> autoaccum.FitResult:
    given: dict[str, Any] = {"data": classes(20), "effective_batch": 8, "micro_batch": 3, "epochs": 2, "device": "cpu"}
    given |= {"loss_fn": cross_entropy, "progress": False, "cache": False, "verify": False, "callbacks": callbacks}
    return autoaccum.fit(model, **given | options)


def snapshots(model: nn.Module, found: list[dict[str, torch.Tensor]]) -> Any:
    """Return a callback that keeps the weights as they begin, and after each window."""

    def keep(record: Any) -> None:
        if isinstance(record, Started | autoaccum.StepReport):
            found.append({name: value.clone() for name, value in model.state_dict().items()})

    return keep


class Counting(nn.Module):
    """A model with running statistics, a counter and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(inputs)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")  # of BatchNorm over micro-batches
def test_it_is_the_moving_average_of_each_window() -> None:
    model, found, ema = Counting(), [], EMA(decay=0.8, warm_up=False)  # type: ignore[var-annotated]
    fit(model, snapshots(model, found), ema)
    assert ema.updates == 6
    expected = {name: value.double() for name, value in found[0].items()}
    for after in found[1:]:
        expected = {name: 0.8 * value + 0.2 * after[name].double() for name, value in expected.items()}
    assert set(ema.weights) == set(found[0])
    for name, average in ema.weights.items():
        if average.dtype == torch.int64:
            assert average.equal(found[-1][name]), "counters have no average"
        else:
            torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-6)
            assert not average.equal(found[-1][name])


def test_a_warm_up_lets_the_first_weights_go() -> None:
    model, found, ema = mlp(), [], EMA(decay=0.999)  # type: ignore[var-annotated]
    fit(model, snapshots(model, found), ema, epochs=1)
    average = found[0]["0.weight"]
    for window, after in enumerate(found[1:], start=1):
        decay = (1 + window) / (10 + window)
        average = decay * average + (1 - decay) * after["0.weight"]
    torch.testing.assert_close(ema.weights["0.weight"], average)


@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")  # of bfloat16, in which gradients are summed
def test_weights_in_16_bits_have_averages_in_32() -> None:
    model, ema = mlp(torch.bfloat16), EMA(decay=0.999, warm_up=False)
    inputs, targets = classes(20)
    fit(model, ema, data=(inputs.bfloat16(), targets), lr=1e-2)
    assert {average.dtype for average in ema.weights.values()} == {torch.float32}
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with ema.applied():
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert not model.state_dict()["0.weight"].equal(trained["0.weight"])
    assert all(value.equal(trained[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::autoaccum.AutoaccumWarning")  # of BatchNorm over micro-batches
class TestUse:
    def test_it_is_applied_and_taken_back_to_the_bit(self) -> None:
        model, ema = Counting(), EMA(decay=0.5)
        fit(model, ema)
        trained = {name: value.clone() for name, value in model.state_dict().items()}

        def use() -> None:
            with ema.applied(model):
                for name, value in model.state_dict().items():
                    assert value.equal(ema.weights[name])
                model.calls += 1
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            use()
        assert all(value.equal(trained[name]) for name, value in model.state_dict().items())

    def test_it_is_copied_for_good(self) -> None:
        ema, other = EMA(decay=0.5), mlp()
        fit(mlp(), ema)
        assert ema.copy_to(other) is other
        assert all(value.equal(ema.weights[name]) for name, value in other.state_dict().items())
        assert other.state_dict()["0.weight"].data_ptr() != ema.weights["0.weight"].data_ptr()

    def test_a_run_validates_with_it_where_that_is_asked_for(self) -> None:
        losses = []
        for validate in (False, True):
            model, ema = mlp(), EMA(decay=0.9, validate=validate)
            seen: list[Any] = []
            result = fit(model, ema, seen.append, validation_data=classes(12), epochs=1)
            trained = {name: value.clone() for name, value in model.state_dict().items()}
            told = next(record.loss for record in seen if isinstance(record, Validated))
            inputs, targets = classes(12)
            with ema.applied() if validate else torch.no_grad():
                expected = cross_entropy(model.eval()(inputs), targets).item()
            assert told == pytest.approx(expected, rel=1e-5)
            losses.append(([report.loss for report in result.history], trained, told))
        (first, one, plain), (second, two, averaged) = losses
        assert first == second, "training is what it was"
        assert all(value.equal(two[name]) for name, value in one.items())
        assert plain != averaged

    def test_of_another_model_and_too_early_it_is_refused(self) -> None:
        ema = EMA()
        with pytest.raises(ArgumentError, match="once a run with this EMA"), ema.applied():
            pass
        with pytest.raises(ArgumentError, match="once a run with this EMA"):
            ema.copy_to(mlp())
        fit(mlp(), ema, epochs=1)
        with pytest.raises(ArgumentError, match=r"a model with '0.weight' of shape"):
            ema.copy_to(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ArgumentError, match="'0.weight'"), ema.applied(nn.Linear(4, 3)):
            pass

    @pytest.mark.parametrize("decay", [-0.1, 1, "much"])
    def test_a_decay_that_is_none_is_refused(self, decay: Any) -> None:
        with pytest.raises(ArgumentError, match="^decay="):
            EMA(decay)


class TestRuns:
    def test_one_after_the_other_begin_anew(self) -> None:
        ema = EMA(decay=0.5)
        fit(mlp(), ema, epochs=1)
        first = ema.weights["0.weight"].clone()
        model = mlp()
        fit(model, ema, epochs=1)
        assert ema.updates == 3
        assert ema.weights["0.weight"].equal(first)

    def test_averages_of_another_model_are_refused(self) -> None:
        ema = EMA()
        ema.load_state_dict({"updates": 1, "weights": {"0.weight": torch.zeros(1)}})
        with pytest.raises(CheckpointCorruptError, match=r"callbacks.state.weights.*'0.weight'"):
            fit(mlp(), ema)

    def test_a_run_that_is_over_has_them_again(self, tmp_path: Path) -> None:
        first, again = EMA(decay=0.5), EMA(decay=0.5)
        fit(mlp(), first, run_dir=tmp_path)
        with pytest.warns(autoaccum.AutoaccumWarning, match="is finished"):
            fit(mlp(), again, run_dir=tmp_path)
        assert again.updates == 6
        assert all(value.equal(first.weights[name]) for name, value in again.weights.items())

    def test_memory_that_is_gone_for_good_is_a_typed_error(self) -> None:
        ema, model = EMA(), mlp()
        with oom_at(1):
            ema._begin(model, is_new=True)  # once is made good
        with _AlwaysOut(), pytest.raises(MemoryLimitError, match="a model's weights were averaged"):
            ema._begin(model, is_new=True)


class _AlwaysOut(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.OutOfMemoryError("none is left")
