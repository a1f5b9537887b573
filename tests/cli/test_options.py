"""Options: those of the functions that commands call, with their types, defaults and texts."""

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from autoaccum.cli.app import main
from autoaccum.training.check import check
from autoaccum.training.estimate import estimate
from autoaccum.training.fit import fit
from autoaccum.training.probe import probe
from tests.cli.conftest import QUIET


def scalar_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Parameters of which some member is a number, a truth value, a text or one of a few."""

    def members(annotation: Any) -> tuple[Any, ...]:
        return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)

    return {
        name: parameter
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if any(m in (int, float, bool, str) or get_origin(m) is Literal for m in members(parameter.annotation))
    }


# What the options are.


@pytest.mark.parametrize(
    ("command", "function", "fewest"),
    [("fit", fit, 18), ("probe", probe, 6), ("check", check, 2), ("estimate", estimate, 7)],
)
def test_every_scalar_parameter_is_an_option_with_its_default_and_its_docstring(
    command: str, function: Callable[..., Any], fewest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    options = {flag: text for part in shown.split(" --")[1:] for flag, _, text in [part.partition(" ")]}
    expected = scalar_parameters(function)
    assert len(expected) >= fewest
    for name, parameter in expected.items():
        flag = name.replace("_", "-")
        assert flag in options
        text = f"{options[flag]} {options.get(f'no-{flag}', '')}"  # it stands behind the one or the other, or both
        documented = re.search(rf"^ +{name}: (.*)$", function.__doc__ or "", re.M)
        assert documented is not None
        assert documented[1] in text
        if parameter.default not in (None, parameter.empty):
            assert f"[default: {parameter.default}]" in text
    for name in inspect.signature(function).parameters.keys() - expected.keys():
        assert name.replace("_", "-") not in options


def test_values_reach_fit_with_their_types(tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]) -> None:
    whole = fit_json(tiny(), "--effective-batch", "8")
    assert whole["num_steps"] == 3
    assert {report["lr"] for report in whole["history"]} == {0.001}
    run = fit_json(
        tiny(), "--effective-batch", "8", "--lr", "0.25", "--steps", "2", "--micro-batch", "3", "--memory-limit", "0.5",
        "--clip-norm", "1", "--no-shuffle", "--precision", "bf16",
    )  # fmt: skip
    assert [report["micro_batches"] for report in run["history"]] == [[3, 3, 2]] * 2
    assert {report["lr"] for report in run["history"]} == {0.25}
    assert all(report["grad_norm"] > 0 for report in run["history"])
    assert run["events"][0]["limit_bytes"] == pytest.approx(whole["events"][0]["limit_bytes"] / 2, rel=0.2)
    in_bytes = fit_json(tiny(), "--effective-batch", "8", "--memory-limit", str(2**33))
    with_unit = fit_json(tiny(), "--effective-batch", "8", "--memory-limit", "8GiB")
    assert in_bytes["events"][0]["limit_bytes"] == with_unit["events"][0]["limit_bytes"] == 2**33
    searched = fit_json(tiny(), "--effective-batch", "8", "--micro-batch", "auto", "--max-micro-batch", "2")
    assert searched["plan"]["sizes"] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--effective-batch", "2.5"),
        ("--effective-batch", "many"),
        ("--micro-batch", "most"),
        ("--precision", "fp8"),
        ("--lr", "high"),
        ("--compile=maybe",),
        ("--learning-rate", "1"),
        ("--effective-batch", "0"),
        ("--seed", "-1"),
        ("--epochs", "1", "--steps", "1"),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_names_it(
    wrong: tuple[str, ...], tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny("'effective_batch': 8,"), *wrong]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == (3 if "at character" in err else 1)  # a text is shown, with a caret
    assert wrong[0].partition("=")[0].strip("-") in err.replace("_", "-")


def test_pydantic_finds_no_fault_with_what_is_left_out(tiny: Callable[..., str]) -> None:
    """Once it is imported, by a recipe or a library beside it, cyclopts has it judge each value."""
    pytest.importorskip("pydantic")
    assert main(["fit", tiny("'effective_batch': 8,"), *QUIET]) == 0
