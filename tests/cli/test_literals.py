"""``--set``: what texts mean, what is refused, and what reaches the recipe of each command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum.cli.app import main
from autoaccum.cli.literals import parameters_of, value_of
from autoaccum.errors import ArgumentError
from tests.cli.conftest import QUIET

RECIPE = """
import torch
from torch import nn

def recipe(width: int = 8, *, bias=True, note="x"):
    torch.manual_seed(0)
    assert type(width) is int and type(note) is str
    data = torch.randn(24, 4), torch.randn(24, 1)
    return {
        "model": nn.Sequential(nn.Linear(4, width, bias=bias), nn.Linear(width, 1)),
        "data": data, "validation_data": data, "loss_fn": nn.functional.mse_loss, "effective_batch": 8, "micro_batch": 8,
    }

def needs(width):
    return recipe(width)

def any_of_them(**options):
    return recipe(**options)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "wide.py").write_text(RECIPE)
    return str(tmp_path / "wide.py")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64), ("-3", -3), ("64.0", 64.0), ("1e-3", 0.001), ("true", True), ("False", False), ("none", None),
        ("null", None), ("gelu", "gelu"), ("a=b", "a=b"), ("", ""), ("'3'", "3"), ('"3"', "3"), ("[1, 2.5]", [1, 2.5]),
        ('{"a": null}', {"a": None}), ("'", "'"),
    ],
)  # fmt: skip
def test_a_text_is_a_value(text: str, value: Any) -> None:
    found = value_of(text)
    assert (found, type(found)) == (value, type(value))
    assert parameters_of([f"name={text}"]) == {"name": value}


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["width"], "expected NAME=VALUE"),
        (["=3"], "expected NAME=VALUE"),
        (["a-b=3"], "expected NAME=VALUE"),
        (["width=[1, 2"], "a value that JSON can read"),
        (["width=3", "bias=true", "width=4"], "one value for width, which is 3 already"),
    ],
)
def test_another_form_is_refused(texts: list[str], told: str) -> None:
    with pytest.raises(ArgumentError, match="set='") as raised:
        parameters_of(texts)
    assert told in str(raised.value)


def test_fit_probe_and_check_call_the_recipe_with_it(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe, "--set", "width=3", "--set", "bias=false", "--device", "cpu", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["tensors"]) == {"0.weight", "1.weight", "1.bias"}
    # What comes of other widths is another loss.
    losses = {}
    for width in (3, 4):
        assert main(["fit", f"{recipe}:needs", f"--set=width={width}", *QUIET, "--json"]) == 0
        losses[width] = json.loads(capsys.readouterr().out)["history"][0]["loss"]
    assert losses[3] != losses[4]
    assert main(["fit", f"{recipe}:any_of_them", "--set", "width=4", *QUIET, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["history"][0]["loss"] == losses[4]
    assert main(["probe", recipe, "--set", "wide=3", "--device", "cpu"]) == 2


def test_what_the_recipe_does_not_take_is_refused_with_what_it_takes(
    recipe: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", recipe, "--set", "widht=3", *QUIET]) == 2
    expected = f"--set widht=3: expected a parameter of the recipe {recipe}, which takes 'width' (8), 'bias' (True), 'note' ('x'). "
    assert capsys.readouterr().err == f"error: {expected}Did you mean 'width'?\n"
    assert main(["fit", tiny("'effective_batch': 8,"), "--set", "width=3", *QUIET]) == 2
    assert "which takes none." in capsys.readouterr().err
    assert main(["fit", f"{recipe}:needs", *QUIET]) == 2
    assert "Pass --set width=VALUE, or give it a default." in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_alone(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = ("--no-progress", "--device", "cpu")
    # Not width, which the model's shapes tell of: nothing else does of this one.
    begun = ["fit", recipe, *plain, "--run-dir", str(tmp_path / "run")]
    assert main([*begun, "--set", "note=a"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trained"]["recipe parameters"] == {"note": "a"}
    capsys.readouterr()
    for other, told in ((["--set", "note=b"], "note: a -> b"), ([], "{'note': 'a'} -> nothing")):
        assert main([*begun, *other, "--epochs", "2"]) == 2
        assert f"recipe parameters{' ' if 'b' in told else ': '}{told}" in capsys.readouterr().err
    assert main([*begun, "--set", "note=a", "--set", "width=8", "--epochs", "2"]) == 0, "the default is no other value"
    # And a run that was begun with the defaults.
    begun[-1] = str(tmp_path / "other")
    assert main(begun) == 0
    assert main([*begun, "--set", "note=b", "--epochs", "2"]) == 2
    assert "recipe parameters: nothing -> {'note': 'b'}" in capsys.readouterr().err


def test_a_sweep_passes_it_to_all_trials(recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sweep = ["sweep", recipe, "--lr", "0.01,0.1", "--trials", "1", "--samples", "8", "--directory", str(tmp_path / "s")]
    sweep += ["--effective-batch", "8", "--device", "cpu", "--no-progress"]
    assert main([*sweep, "--set", "width=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 1
    # Which the command has an option of the same name for.
    assert main(["sweep", recipe, *sweep[2:], "--set", "lr=3"]) == 2
    assert capsys.readouterr().err.startswith(f"error: --set lr=3: expected a parameter of the recipe {recipe}, which ")
    assert main(["sweep", f"{recipe}:any_of_them", "--set", "lr=3", *sweep[2:]]) == 2
    assert "--lr 0.1: expected at most one of --lr and --set" in capsys.readouterr().err
