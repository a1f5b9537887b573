"""The best of a run, put into a model: which it is, and what is told where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.callbacks import EMA, KeepBest
from autoaccum.errors import ArgumentError, ArgumentTypeError, CheckpointCorruptError, NoHistoryError
from autoaccum.events import Validated
from tests.models import classes, mlp


class Spoiling:
    """A callback that spoils the weights after some windows, so that the best are not the last."""

    def __init__(self, model: nn.Module, after: int) -> None:
        self.model, self.after, self.best = model, after, {}  # type: ignore[var-annotated]

    def __call__(self, record: Any) -> None:
        if isinstance(record, Validated) and record.step == self.after:
            self.best = {name: value.clone() for name, value in self.model.state_dict().items()}
        if isinstance(record, autoaccum.StepReport) and record.step == self.after + 1:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(-30)


def run(place: Path, model: nn.Module, *callbacks: Any, **options: Any) -> autoaccum.FitResult:
    given: dict[str, Any] = {"data": classes(16), "effective_batch": 8, "micro_batch": 8, "epochs": 3, "device": "cpu"}
    given |= {"loss_fn": cross_entropy, "progress": False, "cache": False, "verify": False, "run_dir": place}
    given |= {"validation_data": classes(16), "lr": 1e-2}
    return autoaccum.fit(model, **given | options, callbacks=callbacks)


def equal(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(value.equal(state[name]) for name, value in model.state_dict().items())


class Deep(nn.Module):
    """A model with tied weights, running statistics and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.again = self.first
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(inputs)
        return self.head(self.again(self.norm(self.first(inputs))))  # type: ignore[no-any-return]


def test_the_best_is_loaded_and_not_the_last(tmp_path: Path) -> None:
    model = mlp()
    spoiling = Spoiling(model, after=4)
    run(tmp_path, model, spoiling)
    other = mlp(seed=5).eval()
    assert autoaccum.load_best(tmp_path, other) is other
    assert equal(other, spoiling.best)
    assert not equal(model, spoiling.best)
    assert not other.training, "its mode stays"
    assert equal(autoaccum.load_best(str(tmp_path), mlp(seed=6)), spoiling.best)


def test_a_run_goes_on_from_its_last_all_the_same(tmp_path: Path) -> None:
    model = mlp()
    run(tmp_path, model, Spoiling(model, after=2), epochs=2)
    autoaccum.load_best(tmp_path, mlp())
    again = mlp()
    result = run(tmp_path, again, epochs=3)
    assert result.num_steps == 6
    assert [report.step for report in result.history] == [1, 2, 3, 4, 5, 6]


def test_all_that_a_model_keeps_is_loaded(tmp_path: Path) -> None:
    model = Deep()
    run(tmp_path, model)
    other = autoaccum.load_best(tmp_path, Deep())
    assert equal(other, model.state_dict())
    assert other.seen.item() == model.seen.item() == 48
    assert other.again is other.first


class TestAverages:
    @pytest.mark.parametrize("make", [mlp, Deep])
    def test_are_those_at_the_best_checkpoint(self, tmp_path: Path, make: Any) -> None:
        model, ema = make(), EMA(decay=0.5, validate=True)
        run(tmp_path, model, ema)
        loaded = autoaccum.load_best(tmp_path, make(), averaged=True)
        names = set(dict(loaded.named_parameters()))
        assert all(loaded.state_dict()[name].equal(ema.weights[name]) for name in names)
        assert equal(autoaccum.load_best(tmp_path, make(), averaged=False), model.state_dict())
        # Left out, it is what was validated.
        assert equal(autoaccum.load_best(tmp_path, make()), loaded.state_dict())
        found = autoaccum.evaluate(loaded, classes(16), loss_fn=cross_entropy)
        with ema.applied(model):
            expected = autoaccum.evaluate(model, classes(16), loss_fn=cross_entropy)
        if make is mlp:
            assert found.loss == expected.loss

    def test_where_there_are_none(self, tmp_path: Path) -> None:
        run(tmp_path, mlp())
        with pytest.raises(ArgumentError, match="^averaged=True: expected an EMA among the callbacks"):
            autoaccum.load_best(tmp_path, mlp(), averaged=True)


class TestRefused:
    def test_where_no_run_was(self, tmp_path: Path) -> None:
        for place in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(NoHistoryError, match=r"the checkpoints of a run\. Pass the .* passed to fit\.$"):
                autoaccum.load_best(place, mlp())

    def test_where_nothing_was_validated(self, tmp_path: Path) -> None:
        run(tmp_path, mlp(), validation_data=None)
        with pytest.raises(ArgumentError, match="a run that has validated. Pass validation_data to fit"):
            autoaccum.load_best(tmp_path, mlp())

    def test_where_no_validation_had_a_finite_loss(self, tmp_path: Path) -> None:
        inputs, targets = torch.full((4, 8), float("nan")), torch.zeros(4, dtype=torch.int64)
        run(tmp_path, mlp(), validation_data=(inputs, targets))
        with pytest.raises(ArgumentError, match=r"validations had a finite loss\. .*NaN.*lower lr"):
            autoaccum.load_best(tmp_path, mlp())

    def test_where_no_validation_had_a_finite_metric(self, tmp_path: Path) -> None:
        metrics = {"odd": lambda outputs, targets: outputs.sum(1) * float("nan")}
        run(tmp_path, mlp(), KeepBest("odd", "max"), metrics=metrics)
        with pytest.raises(
            ArgumentError, match=r"validations had a finite metric, the one that KeepBest goes by\. .*NaN"
        ):
            autoaccum.load_best(tmp_path, mlp())

    def test_another_model(self, tmp_path: Path) -> None:
        run(tmp_path, mlp())
        other = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(ArgumentError, match=r"^model='Sequential': .*: in .*, weights.* not .5, 8.\.$"):
            autoaccum.load_best(tmp_path, other)
        assert equal(other, before)
        deeper = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3), nn.Linear(3, 3))
        with pytest.raises(ArgumentError, match=r"weights.*3\.(weight|bias).* is missing\.$"):
            autoaccum.load_best(tmp_path, deeper)

    def test_a_torn_checkpoint(self, tmp_path: Path) -> None:
        run(tmp_path, mlp(), keep_checkpoints=1)
        for file in tmp_path.glob("checkpoints/*/model.pt"):
            file.write_bytes(b"torn")
        with pytest.raises(CheckpointCorruptError, match="holds no whole best checkpoint"):
            autoaccum.load_best(tmp_path, mlp())

    @pytest.mark.parametrize("model", [3, None, mlp])
    def test_what_is_no_model(self, tmp_path: Path, model: Any) -> None:
        run(tmp_path, mlp(), epochs=1)
        with pytest.raises(ArgumentTypeError, match="^model="):
            autoaccum.load_best(tmp_path, model)
