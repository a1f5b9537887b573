"""Arguments of ``fit``: what readers and type checkers see of them, and how they are checked."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._checks import of_callbacks
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.planning.budget import Budget
from autoaccum.planning.schedules import Constant, schedule_of
from autoaccum.step.loss_functions import loss_function
from autoaccum.sweeps.options import CHECKS as CHECKS_OF_SWEEP
from autoaccum.sweeps.options import EACH as EACH_OF_SWEEP
from autoaccum.sweeps.options import SweepArguments
from autoaccum.training.declarations import arguments_of
from autoaccum.training.options import BUDGETS, CHECKS, EACH, OF_FIT, TRAINED, FitArguments

ROOT = Path(autoaccum.__file__).parent.parent
CALLS: list[Callable[..., Any]] = [
    autoaccum.fit, autoaccum.probe, autoaccum.Accumulator, autoaccum.check, autoaccum.estimate, autoaccum.evaluate,
    autoaccum.predict, autoaccum.sweep,
]  # fmt: skip
DIFFERING = {
    autoaccum.probe: {"effective_batch", "patience"},
    autoaccum.estimate: {"effective_batch"},
    autoaccum.Accumulator: {"optimizer", "micro_batch", "callbacks"},
    autoaccum.sweep: {"lr", "effective_batch"},
}
"""A probe needs no effective batch, and does not wait; a loop has an optimizer, and no recorded run."""


def given(**options: Any) -> FitArguments:
    return FitArguments(**{"model": nn.Linear(2, 1), "data": [], "effective_batch": 8, **options})


# What signatures and docstrings say.


def test_fit_has_the_arguments_that_a_run_works_with() -> None:
    """They are declared once."""
    parameters = inspect.signature(FitArguments, eval_str=True).parameters
    assert inspect.signature(autoaccum.fit).parameters == parameters
    assert inspect.signature(autoaccum.Trainer).parameters == parameters
    assert tuple(parameters) == OF_FIT


@pytest.mark.parametrize("function", CALLS)
def test_every_argument_is_described_in_one_paragraph(function: Callable[..., Any]) -> None:
    for argument in arguments_of(function).values():
        assert argument.text.endswith("."), argument.name
        assert "\n" not in argument.text


@pytest.mark.parametrize("function", CALLS)
def test_an_argument_that_several_take_has_the_same_type_and_default(function: Callable[..., Any]) -> None:
    of_fit = arguments_of(autoaccum.fit)
    differing = {
        name
        for name, argument in arguments_of(function).items()
        if name in of_fit and (argument.type, argument.default) != (of_fit[name].type, of_fit[name].default)
    }
    assert differing == DIFFERING.get(function, set())


MISTAKES = {
    "fit(model, data, effective_batch=8, batch_size=2)": 'Unexpected keyword argument "batch_size" for "fit"',
    "fit(model, data, loss_fn=None)": 'Missing named argument "effective_batch" for "fit"',
    'fit(model, data, effective_batch=8, lr="high")': 'Argument "lr" to "fit" has incompatible type "str"',
    'fit(model, data, effective_batch=8, precision="fp8")': 'Argument "precision" to "fit" has incompatible type',
    "Trainer(model, data, effective_batch=8, step=3)": 'Unexpected keyword argument "step" for "Trainer"',
    "probe(model, data, micro_batch=3)": 'Unexpected keyword argument "micro_batch" for "probe"',
    "check(model, data, lr=3)": 'Unexpected keyword argument "lr" for "check"',
    "estimate(model, data)": 'Missing named argument "device_memory" for "estimate"',
    "Accumulator(model)": 'Missing positional argument "optimizer" in call to "Accumulator"',
    'sweep("a.py", lr=(1e-4, 1e-2), clip_nrm=1.0)': 'Unexpected keyword argument "clip_nrm" for "sweep"',
    'sweep("a.py", lr=(1e-4, 1e-2), clip_norm="1")': 'Argument "clip_norm" to "sweep" has incompatible type "str"',
}
FINE = [
    'fit(model, data, effective_batch="64, 1000:256", lr=1, callbacks=[print], metrics={"a": max}, run_dir=Path("a"))',
    "probe(model, data).plan",
    "check(model, data, num_items=len).passed",
    'sweep("a.py", effective_batch=[32, 64], samples=1000, clip_norm=1.0, precision="bf16")',
]


def test_type_checkers_find_misspelt_missing_and_wrongly_typed_arguments(tmp_path: Path) -> None:
    """Of other packages nothing is read, for what mypy needs for torch is a minute."""
    others = ",".join(f"{name}.*" for name in ("torch", "numpy", "optuna", "psutil", "tqdm"))
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = True\nfollow_imports = silent\nmypy_path = {ROOT}\n[mypy-{others}]\nfollow_imports = skip\n"
    )
    head = "from pathlib import Path\nfrom typing import Any\nfrom autoaccum import Accumulator, Trainer, check, estimate, fit, probe, sweep\nmodel: Any\ndata: Any\n"
    lines = [*MISTAKES, *FINE]
    (tmp_path / "calls.py").write_text(head + "\n".join(lines) + "\n")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-pretty", "--hide-error-context", "calls.py"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    errors = dict(line.split(": error: ") for line in run.stdout.splitlines() if ": error: " in line)
    begin = head.count("\n") + 1
    found = {lines[int(place.split(":")[1]) - begin]: message for place, message in errors.items()}
    assert found.keys() == MISTAKES.keys(), run.stdout + run.stderr
    for call, message in MISTAKES.items():
        assert message in found[call]


# What is declared.


@pytest.mark.parametrize(
    ("arguments", "each", "together"), [(FitArguments, EACH, CHECKS), (SweepArguments, EACH_OF_SWEEP, CHECKS_OF_SWEEP)]
)
def test_checks_look_at_arguments_that_there_are(
    arguments: type, each: dict[str, Any], together: tuple[Callable[..., Any], ...]
) -> None:
    looked_at = {name for check in together for name in inspect.signature(check).parameters}
    assert looked_at | each.keys() <= inspect.signature(arguments).parameters.keys()


def test_the_budget_is_one_of_three_arguments() -> None:
    assert list(BUDGETS) == [field.name for field in dataclasses.fields(Budget)]


def test_what_a_resumed_run_has_to_have_in_common() -> None:
    """A change of this list is a change of what the directories of earlier versions can be gone on with."""
    assert TRAINED == (
        "lr_scaling", "base_batch", "precision", "clip_norm", "accumulate", "verify",
        "compression", "seed", "shuffle", "drop_last",
    )  # fmt: skip


# What becomes of values.


def test_checks_return_what_arguments_stand_for() -> None:
    checked = given(steps=3, callbacks=iter([print]), loss_fn=nn.functional.mse_loss).check()
    assert checked[schedule_of] == Constant(8)
    assert checked[Budget] == Budget(steps=3)
    assert checked[of_callbacks] == [print], "an iterator is read once"
    batch = torch.ones(4, 2), torch.ones(4, 1)
    assert checked[loss_function](nn.Linear(2, 1), batch).shape == ()


def test_of_several_mistakes_the_same_is_named_first() -> None:
    wrong: dict[str, Any] = {
        "headroom": 2, "num_workers": -1, "seed": -1, "lr": -1.0, "keep_checkpoints": 0, "effective_batch": 0,
        "loss_fn": 3, "validate_every": 0, "checkpoint_every": "often", "steps": 0, "micro_batch": 0,
        "callbacks": [1],
    }  # fmt: skip
    names = list(wrong)
    for position, name in enumerate(names):
        with pytest.raises(ArgumentError) as caught:
            given(run_dir=".", **{other: wrong[other] for other in names[position:]}).check()
        assert caught.value.argument == name


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in ("compile", "shuffle", "drop_last", "noise_scale", "cache", "progress")
      for value in ("False", 0, 1)),
    ({"loss_fn": lambda outputs: outputs}, "loss_fn"),
    ({"loss_fn": dict}, "loss_fn"),
    ({"training_step": lambda model, batch, more: model}, "training_step"),
    ({"num_items": lambda: 3}, "num_items"),
    ({"collate_fn": lambda: 3}, "collate_fn"),
    ({"collate_fn": 3}, "collate_fn"),
    ({"lr_scheduler": lambda optimizer: optimizer}, "lr_scheduler"),
    ({"lr_scheduler": 3}, "lr_scheduler"),
    ({"optimizer": lambda: None}, "optimizer"),
    ({"effective_batch": lambda: 8}, "function"),
    ({"metrics": {"a": lambda outputs: outputs}, "validation_data": []}, "metrics['a']"),
    ({"callbacks": [lambda: None]}, "callbacks"),
    ({"effective_batch": 2**63}, "effective_batch"),
    ({"micro_batch": 2**63}, "micro_batch"),
    ({"run_dir": "a\0"}, "run_dir"),
    ({"keep_checkpoints": 0}, "keep_checkpoints"),
    ({"keep_checkpoints": True}, "keep_checkpoints"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "argument"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_cannot_be_meant_is_refused_before_anything_is_done(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        given(**options).check()
    assert caught.value.argument == argument


def test_arguments_that_exclude_each_other() -> None:
    with pytest.raises(ConflictingArgumentsError):
        given(loss_fn=print, training_step=print).check()
    with pytest.raises(ConflictingArgumentsError):
        given(epochs=1, steps=1).check()


def test_modules_are_what_may_hold_parameters() -> None:
    loss = nn.CrossEntropyLoss()
    arguments = given(loss_fn=loss)
    assert arguments.modules() == [arguments.model, loss]
    assert given(loss_fn=print).modules()[1:] == []


def test_arguments_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        given().lr = 0.1  # type: ignore[misc]
