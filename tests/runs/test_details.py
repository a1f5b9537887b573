"""What has changed since a run was begun: refused, said, or no difference at all."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import autoaccum
from autoaccum.errors import AutoaccumWarning, ResumeError
from autoaccum.events import Notice, Resumed, StepReport
from autoaccum.runs import details
from autoaccum.runs.details import code_of, details_of
from tests.models import classes, mlp

SCALE = 1.0


def helper(loss: Any) -> Any:
    return loss * SCALE


def scaled(outputs: Any, targets: Any) -> Any:
    return helper(cross_entropy(outputs, targets))


def compiled(source: str, name: str = "loss") -> Callable[..., Any]:
    """Return a function of a module of its own."""
    space: dict[str, Any] = {"__name__": "of_the_user", "torch": torch}
    exec(textwrap.dedent(source), space)
    return space[name]  # type: ignore[no-any-return]


class TestCode:
    BASE = """
        GAMMA = 2.0
        def helper(x):
            return x ** GAMMA
        def loss(outputs, targets, weight=0.5):
            'A loss.'
            return helper(outputs - targets).mean() * weight if 3 in {1, 2, 3} else [x for x in targets]
    """

    @pytest.mark.parametrize(
        ("old", "new"),
        [("GAMMA = 2.0", "GAMMA = 3.0"), ("x ** GAMMA", "x * GAMMA"), ("weight=0.5", "weight=0.1"), (".mean()", ".sum()"),
         ("x for x", "2 * x for x"), ("{1, 2, 3}", "{1, 2, 4}")],
    )  # fmt: skip
    def test_a_change_shows(self, old: str, new: str) -> None:
        assert code_of(compiled(self.BASE)) != code_of(compiled(self.BASE.replace(old, new)))

    @pytest.mark.parametrize(
        ("old", "new"),
        [("'A loss.'", "'The loss.'"), ("GAMMA = 2.0", "\n\n        GAMMA = 2.0  # gamma"), ("x ** GAMMA", "(x ** GAMMA)"),
         ("helper(x):\n            return x", "helper(y):\n            return y")],
    )  # fmt: skip
    def test_words_places_and_names_of_variables_do_not(self, old: str, new: str) -> None:
        changed = self.BASE.replace(old, new)
        assert changed != self.BASE
        assert code_of(compiled(self.BASE)) == code_of(compiled(changed))

    def test_it_is_the_same_in_each_process(self) -> None:
        """Whatever the order of sets and the addresses of objects."""
        program = "from tests.runs.test_details import *; print(code_of(compiled(TestCode.BASE)), code_of(scaled))"
        environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.stdout == f"{code_of(compiled(TestCode.BASE))} {code_of(scaled)}\n"

    def test_of_all_kinds_of_functions(self) -> None:
        def make(factor: float) -> Callable[..., Any]:
            return lambda outputs, targets: factor * mse_loss(outputs, targets)

        class Loss:
            def __init__(self, power: int) -> None:
                self.power = power
                self.calls = 0

            def __call__(self, outputs: Any, targets: Any) -> Any:
                return (outputs - targets).abs() ** self.power

            method = __call__

        pairs: list[tuple[Any, Any]] = [
            (make(1.0), make(2.0)),
            (partial(scaled, 1), partial(scaled, 2)),
            (partial(scaled, targets=1), partial(scaled, targets=2)),
            (Loss(1), Loss(2)),
            (Loss(1).method, Loss(2).method),
            (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()),
            (mse_loss, cross_entropy),
            (max, min),
        ]
        assert len({code_of(function) for pair in pairs for function in pair}) == 2 * len(pairs)
        called = Loss(1)
        called.calls = 3
        assert code_of(called) == code_of(Loss(1)), "a count is no hyperparameter"
        assert code_of(make(1.0)) == code_of(make(1.0))
        recursive = compiled("def loss(n):\n    return other(n)\ndef other(n):\n    return loss(n)")
        assert code_of(recursive).startswith("loss, code ")


class Net(nn.Module):
    """A model whose dropout is a number of its own."""

    def __init__(self, p: float = 0.1, activation: Callable[..., Any] = torch.relu) -> None:
        super().__init__()
        self.p, self.activation = p, activation
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 3)
        self.calls = 0

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        return self.out(nn.functional.dropout(self.activation(self.hidden(inputs)), self.p, self.training))


def net_of(p: float = 0.5, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), activation(), nn.Dropout(p), nn.Linear(16, 3))


def fit(run_dir: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "model": mlp(), "data": classes(40), "loss_fn": scaled, "effective_batch": 8, "micro_batch": 8, "epochs": 2,
        "device": "cpu", "progress": False, "cache": False, "run_dir": run_dir,
    }  # fmt: skip
    return autoaccum.fit(**{**defaults, **options})


def end(record: Any) -> None:
    if isinstance(record, StepReport) and record.step == 3:
        raise autoaccum.StopTraining


def changed_classes(samples: int, row: int) -> Any:
    inputs, targets = classes(samples)
    inputs[row, 3] += 1
    return inputs, targets


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activation": (
        {"model": net_of()},
        {"model": net_of(activation=nn.Tanh)},
        "model 1: ReLU(inplace=False) -> Tanh()",
    ),
    "dropout": (
        {"model": net_of()},
        {"model": net_of(0.1)},
        "model 2: Dropout(inplace=False, p=0.5) -> Dropout(inplace=False, p=0.1)",
    ),
    "a layer more": (
        {"model": net_of()},
        {"model": nn.Sequential(*net_of(), nn.Tanh())},
        "model 4: nothing -> Tanh()",
    ),
    "a number of the data": (
        {"data": classes(200), "effective_batch": 40},
        {"data": changed_classes(200, 17), "effective_batch": 40},  # one that is not among the 64 that tell shapes
        "data content: ",
    ),
    "a batch of the data": (
        {"data": [classes(40)]},
        {"data": [changed_classes(40, 17)]},
        "data content: ",
    ),
    "the smoothing of a loss": (
        {"loss_fn": nn.CrossEntropyLoss()},
        {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)},
        "loss: CrossEntropyLoss(ignore_index=-100, label_smoothing=0.0, reduction='mean') -> CrossEntropyLoss(",
    ),
}
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another loss": ({}, {"loss_fn": cross_entropy}, "loss_fn: scaled, code "),
    "another factor": (
        {"loss_fn": partial(torch.nn.functional.cross_entropy, label_smoothing=0.1)},
        {"loss_fn": partial(torch.nn.functional.cross_entropy, label_smoothing=0.2)},
        "loss_fn: cross_entropy, code ",
    ),
    "a dropout of one's own": ({"model": Net()}, {"model": Net(p=0.2)}, "p=0.1) -> Net("),
    "num_items": ({}, {"num_items": lambda batch: len(batch[1])}, "num_items: nothing -> "),
}


class TestRuns:
    @pytest.mark.parametrize("name", REFUSED)
    def test_other_layers_and_data_are_refused(self, name: str, tmp_path: Path) -> None:
        before, now, words = REFUSED[name]
        fit(tmp_path, **before, callbacks=[end])
        with pytest.raises(ResumeError) as caught:
            fit(tmp_path, **now)
        assert [line[: len(words)] for line in caught.value.differences] == [words]
        if words == "data content: ":  # of which the weights are wanted all the same
            assert "load its model.safetensors" in str(caught.value)
        assert fit(tmp_path, **before).num_steps > 3, "as it was it goes on"

    @pytest.mark.parametrize("name", SAID)
    def test_other_code_is_said_once(self, name: str, tmp_path: Path) -> None:
        before, now, words = SAID[name]
        fit(tmp_path, **before, callbacks=[end])
        with pytest.warns(AutoaccumWarning, match="The code is not that with which the run in"):
            result = fit(tmp_path, **now, callbacks=[lambda record: None])
        (said,) = [event for event in result.events if isinstance(event, Notice) and "The code is" in event.cause]
        assert words in said.cause
        assert any(isinstance(event, Resumed) for event in result.events)
        self.goes_on_silently(tmp_path, **now, epochs=3)

    def goes_on_silently(self, run_dir: Path, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", AutoaccumWarning)
            result = fit(run_dir, **options)
        assert [event for event in result.events if isinstance(event, Resumed)]

    @pytest.mark.parametrize("model", [mlp, Net, net_of])
    def test_nothing_is_said_of_the_same(self, model: Callable[[], nn.Module], tmp_path: Path) -> None:
        """Of a model that has been called since, too."""
        torch.manual_seed(0)
        made = model()
        fit(tmp_path, model=made, callbacks=[end])
        self.goes_on_silently(tmp_path, model=made)

    def test_nothing_is_said_of_a_finished_run(self, tmp_path: Path) -> None:
        fit(tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(tmp_path, loss_fn=cross_entropy)
        assert ["is finished" in str(warning.message) for warning in caught] == [True]

    @pytest.mark.parametrize("name", ["dropout", "a number of the data", "another loss"])
    def test_what_an_earlier_version_has_not_kept_is_no_difference(self, name: str, tmp_path: Path) -> None:
        before, now, _ = {**REFUSED, **SAID}[name]
        fit(tmp_path, **before, callbacks=[end])
        path = tmp_path / "environment.json"
        environment = json.loads(path.read_text())
        del environment["details"]
        path.write_text(json.dumps(environment))
        self.goes_on_silently(tmp_path, **now)

    @pytest.mark.parametrize("content", ["[]", '{"details": {"layers": 3}}', None])
    def test_nor_is_what_cannot_be_read(self, content: str | None, tmp_path: Path) -> None:
        fit(tmp_path, callbacks=[end])
        if content is None:
            (tmp_path / "environment.json").unlink()
        else:
            (tmp_path / "environment.json").write_text(content)
        self.goes_on_silently(tmp_path)

    @pytest.mark.parametrize("version", ["torch", "python"])
    def test_versions_are_compared_first(self, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fit(tmp_path, callbacks=[end])
        path = tmp_path / "environment.json"
        environment = json.loads(path.read_text())
        environment["details"][version] = "another"
        path.write_text(json.dumps(environment))
        self.goes_on_silently(tmp_path, loss_fn=cross_entropy)


def test_flags_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    import numpy as np

    fit(tmp_path, shuffle=True, callbacks=[end])
    TestRuns().goes_on_silently(tmp_path, shuffle=np.True_)


def test_a_loss_that_is_scripted(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        loss = torch.jit.script(nn.CrossEntropyLoss())
    fit(tmp_path, loss_fn=loss, callbacks=[end])
    TestRuns().goes_on_silently(tmp_path, loss_fn=loss)


def test_details_are_plain() -> None:
    found = details_of({"model": Net()}, {"loss_fn": scaled, "num_items": None}, "abc")
    assert json.loads(json.dumps(found)) == found
    assert set(found["code"]) == {"model", "forward of Net", "loss_fn"}
    assert details.refused({}, found) == []
    assert details.announced({}, found, Path("a")) is None
