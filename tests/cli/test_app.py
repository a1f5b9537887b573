"""The command line: what reaches fit, probe and plan; what is printed where; the exit codes."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from autoaccum import __version__
from autoaccum.cli.app import main
from autoaccum.events import StepReport
from autoaccum.testing import simulated_memory
from autoaccum.training.fitting import fit
from autoaccum.training.probing import probe
from autoaccum.training.trainer import Trainer
from tests.processes import in_turn

TINY = """
import torch
from torch import nn

def recipe():
    torch.manual_seed(0)
    return {{
        "model": nn.Linear(4, 1),
        "data": (torch.randn(24, 4), torch.randn(24, 1)),
        "loss_fn": nn.functional.mse_loss,
        "micro_batch": 8,
        {more}
    }}
"""
QUIET = ("--no-progress", "--device", "cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe of a linear model and 24 samples, with further lines of its dict and of its module."""

    def write(more: str = "", top: str = "") -> str:
        path = tmp_path / "tiny.py"
        path.write_text(top + TINY.format(more=more))
        return str(path)

    return write


@pytest.fixture
def fit_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*argv: str) -> dict[str, Any]:
        assert main(["fit", *argv, *QUIET, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


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


@pytest.mark.parametrize(("command", "function", "fewest"), [("fit", Trainer, 18), ("probe", probe, 6)])
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
        documented = re.search(rf"^ +{name}: (.*)$", (fit if function is Trainer else function).__doc__ or "", re.M)
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


# Flags and the recipe.


def test_options_override_the_recipe_and_leave_it_the_rest(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 12, 'lr': 0.5, 'micro_batch': 4, 'headroom': 0.5,")
    run = fit_json(recipe, "--lr", "0.125")
    assert [report["micro_batches"] for report in run["history"]] == [[4, 4, 4]] * 2
    assert {report["lr"] for report in run["history"]} == {0.125}
    assert fit_json(recipe, "--effective-batch", "24")["plan"]["sizes"] == [4] * 6


def test_an_option_that_repeats_the_default_overrides_the_recipe_too(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 10, 'drop_last': True,")
    assert fit_json(recipe)["num_steps"] == 2
    assert fit_json(recipe, "--no-drop-last")["num_steps"] == 3


def test_a_budget_replaces_the_recipes_budget(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 8, 'epochs': 5,")
    assert fit_json(recipe)["num_steps"] == 15
    assert fit_json(recipe, "--steps", "4")["num_steps"] == 4
    assert fit_json(recipe, "--samples", "13")["num_samples"] == 13
    assert fit_json(recipe, "--epochs", "2")["num_steps"] == 6


def test_effective_batch_from_neither_is_a_usage_error(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny(), *QUIET]) == 2
    assert "Pass --effective-batch, or return it from the recipe." in capsys.readouterr().err


def test_probe_ignores_what_only_fit_takes(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'epochs': 3, 'lr_scheduler': None, 'clip_norm': 1.0, 'effective_batch': 6,")
    assert main(["probe", recipe, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["max_micro_batch"] == 6
    assert main(["probe", recipe, "--json", "--device", "cpu", "--max-micro-batch", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["sizes"] == [3, 3]


# What is printed.


def test_json_of_fit_is_one_document_with_everything_in_it(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 10, 'callbacks': [print],", top="print('imported')\n")
    assert main(["fit", recipe, "--json", "--device", "cpu", "--micro-batch", "5"]) == 0
    out, err = capsys.readouterr()
    run = json.loads(out)
    assert run.keys() == {"num_steps", "num_samples", "plan", "history", "events"}
    assert (run["num_steps"], run["num_samples"]) == (3, 24)
    assert run["plan"] == {
        "effective_batch": 10, "world_size": 1, "accumulation_steps": 2, "sizes": [5, 5], "ranks": [[5, 5]],
    }  # fmt: skip
    assert all(report.keys() == set(StepReport.__slots__) for report in run["history"])
    assert [report["num_samples"] for report in run["history"]] == [10, 20, 24]
    assert [event["type"] for event in run["events"]] == ["Started", "Planned", "Finished"]
    assert run["events"][-1] == {"type": "Finished", "step": 3, "reason": "budget"}
    assert "imported" in err
    assert "StepReport(step=1" in err


@pytest.mark.filterwarnings("ignore:The loss of window 2 is")
def test_json_has_null_for_a_loss_that_is_no_number(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 8, 'optimizer': lambda ps: torch.optim.SGD(ps, lr=float('inf')),")
    assert [report["loss"] is None for report in fit_json(recipe)["history"]] == [False, True, True]


def test_without_json_fit_prints_on_standard_error_only(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny(), "--effective-batch", "8", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "done: 3 steps, 24 samples" in err


def test_probe_prints_its_trials_the_memory_model_and_the_plan(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    wide = tiny("'model': nn.Sequential(nn.Linear(4, 8192), nn.Linear(8192, 1)),")
    with simulated_memory("1MiB"):
        assert main(["probe", wide, "--device", "cpu", "--effective-batch", "24"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["probe", wide, "--device", "cpu", "--effective-batch", "24", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "max_micro_batch", "trials", "memory_model", "time_model", "limit_bytes", "plan"
    }  # fmt: skip
    assert report["limit_bytes"] == 2**20
    assert report["memory_model"].keys() == {"fixed_bytes", "bytes_per_sample", "bytes_per_square"}
    largest = report["max_micro_batch"]
    assert 1 <= largest < 24
    assert {trial["fits"] for trial in report["trials"]} == {True, False}
    assert lines[0].split() == ["micro-batch", "fits", "peak", "predicted", "seconds", "samples/s"]
    rows = [line.split() for line in lines[1 : lines.index("")]]
    assert [(int(row[0]), row[1] == "yes") for row in rows] == [(t["micro_batch"], t["fits"]) for t in report["trials"]]
    assert rows[0][3] in ("KiB", "MiB")
    assert any(line.startswith("memory model: ") and line.endswith(" per sample") for line in lines)
    assert "limit: 1.00 MiB" in lines
    assert f"largest micro-batch: {largest}" in lines
    assert f"{largest} x" in lines[-1] or report["plan"]["sizes"][0] < largest
    assert lines[-1].startswith("plan: ")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "--effective-batch 256 --max-micro-batch 100",
            "86 x 1 + 85 x 2 = 256 samples: 3 accumulation steps on 1 rank",
        ),
        ("--effective-batch 8 --max-micro-batch 8", "8 x 1 = 8 samples: 1 accumulation step on 1 rank"),
        (
            "--effective-batch 256 --max-micro-batch 100 --world-size 4",
            "64 x 4 = 256 samples: 1 accumulation step on each of 4 ranks",
        ),
    ],
)
def test_plan_prints_one_line(argv: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv.split()]) == 0
    assert capsys.readouterr().out == line + "\n"


def test_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--effective-batch", "7", "--max-micro-batch", "2", "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "effective_batch": 7, "world_size": 2, "accumulation_steps": 2,
        "sizes": [2, 2, 2, 1], "ranks": [[2, 2], [2, 1]],
    }  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    ["plan --effective-batch 256 --max-micro-batch 100 --json", "plan --help", "--help", "cache --json", "cache clear"],
)
def test_plan_help_and_cache_import_no_torch(argv: str) -> None:
    code = (
        "import sys; from autoaccum.cli.app import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code, *argv.split()], stdout=subprocess.DEVNULL).returncode == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("fit", "probe", "plan"))


def test_python_m_autoaccum_exits_with_the_commands_code() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "autoaccum", "plan", "--effective-batch", "0", "--max-micro-batch", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: effective_batch=0: expected an int of at least 1.")


@pytest.mark.filterwarnings("default::autoaccum.AutoaccumWarning")
def test_a_warning_of_ours_is_one_line(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(top="import warnings, autoaccum\nwarnings.warn('two\\nlines', autoaccum.AutoaccumWarning)\n")
    assert main(["fit", recipe, "--effective-batch", "100", *QUIET]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first == "warning: two lines"
    assert second.startswith("warning: effective_batch=100 is more than the data's 24 samples. ")


@pytest.mark.filterwarnings("default:old habit:FutureWarning")
def test_a_warning_of_others_says_where_it_comes_from(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(top="import warnings\nwarnings.warn('old habit', FutureWarning)\n")
    assert main(["fit", recipe, "--effective-batch", "8", *QUIET]) == 0
    assert f"{recipe}:2: FutureWarning: old habit" in capsys.readouterr().err


# Memory of past runs.


def test_cache_shows_what_runs_left_and_clear_empties_it(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = os.environ["AUTOACCUM_CACHE_DIR"]
    searching = ["fit", tiny("'effective_batch': 8,"), "--micro-batch", "auto", *QUIET]
    assert main([*searching, "--no-cache"]) == 0
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{where}: 0 entries, 0 B\n"
    assert main(searching) == 0
    assert main(["cache", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (file,) = Path(where).iterdir()
    assert shown.keys() == {"directory", "num_entries", "bytes", "entries"}
    assert (shown["directory"], shown["num_entries"], shown["bytes"]) == (where, 1, file.stat().st_size)
    assert shown["entries"][0]["model"] == "Linear"
    assert main(["cache"]) == 0
    entry, total = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\+00:00  Linear on cpu \S+: [1-9] sizes?", entry)
    assert total.startswith(f"{where}: 1 entry, ")
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": where, "removed_files": 1}
    assert list(Path(where).iterdir()) == []
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"{where}: removed 0 files\n"


def test_a_cache_that_cannot_be_cleared_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    where = Path(os.environ["AUTOACCUM_CACHE_DIR"])
    where.mkdir()
    (where / f"trials-{'0' * 32}.json").write_text("")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: [Errno 13] Permission denied: ")
    assert err.count("\n") == 1


# Exit codes.


@pytest.mark.parametrize(
    "argv", [["fit"], ["train"], ["plan", "--effective-batch", "3"], ["plan", "4"], ["cache", "clean"]]
)
def test_usage_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["fit", "probe"])
def test_a_limit_below_the_model_exits_with_3(
    command: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, tiny("'effective_batch': 8,"), "--memory-limit", "1MiB", "--device", "cpu"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: memory_limit: 1.00 MiB may be used, but ")
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["fit", "probe"])
def test_a_sample_that_does_not_fit_exits_with_3(
    command: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8, 'loss_fn': lambda y, t: (y * torch.ones(100_000)).mean(),")
    with simulated_memory("100KiB"):
        assert main([command, recipe, "--device", "cpu"]) == 3
    err = capsys.readouterr().err
    assert "a micro-batch of 1, the smallest there is, does not fit" in err
    assert "Traceback" not in err


def test_our_other_errors_print_their_message_alone_and_exit_with_1(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8, 'loss_fn': lambda y, t: y - t,")
    assert main(["fit", recipe, *QUIET]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: loss_fn returned ")
    assert err.count("\n") == 1


def test_an_unexpected_error_shows_where_it_comes_from_and_exits_with_1(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8, 'loss_fn': lambda y, t: {}['missing'],")
    assert main(["fit", recipe, *QUIET, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Traceback (most recent call last):") == 1
    assert recipe in err
    assert "trainer.py" in err
    assert "cyclopts" not in err
    assert err.endswith("KeyError: 'missing'\n")


def test_what_a_recipe_raises_is_shown_once_without_our_frames(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'data': compute(),", top="def compute():\n    return 1 / 0\n")
    assert main(["fit", recipe, "--effective-batch", "8"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert files == [recipe, recipe]
    assert lines[-1] == "ZeroDivisionError: division by zero"


@in_turn
def test_ctrl_c_ends_the_run_after_the_window_with_the_summary(tiny: Callable[..., str]) -> None:
    recipe = tiny(
        "'effective_batch': 8, 'steps': 10**6, 'callbacks': [tell],",
        top="from autoaccum import StepReport\n\ndef tell(record):\n"
        "    if isinstance(record, StepReport) and record.step == 3:\n        print('now', flush=True)\n",
    )
    command = [sys.executable, "-m", "autoaccum", "fit", recipe, "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "interrupted: " in err
    assert "Traceback" not in err


def test_an_interrupted_run_still_prints_its_json(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(
        "'effective_batch': 8, 'callbacks': [interrupt],",
        top="import signal\nfrom autoaccum import StepReport\n\ndef interrupt(record):\n"
        "    if isinstance(record, StepReport):\n        signal.raise_signal(signal.SIGINT)\n",
    )
    assert main(["fit", recipe, "--json", *QUIET]) == 130
    run = json.loads(capsys.readouterr().out)
    assert run["num_steps"] == 1
    assert run["events"][-1]["reason"] == "interrupted"


@pytest.mark.parametrize("where", ["loss", "recipe"])
def test_a_ctrl_c_that_stops_at_once_exits_with_130_and_no_traceback(
    where: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    twice = "import signal\n\ndef stop(*_):\n    for _ in range(2):\n        signal.raise_signal(signal.SIGINT)\n"
    recipe = tiny("'loss_fn': stop," if where == "loss" else "'loss_fn': stop(),", top=twice)
    assert main(["fit", recipe, "--effective-batch", "8", *QUIET]) == 130
    assert capsys.readouterr().err == ""


def test_a_recipe_serves_from_its_folder_under_any_working_directory(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = Path(tiny("'effective_batch': 8,"))
    monkeypatch.chdir(recipe.parent)
    for name in (recipe.name, f".{os.sep}{recipe.name}", recipe.stem, f"{recipe.stem}:recipe"):
        assert fit_json(name)["num_steps"] == 3
    del sys.modules[recipe.stem]
