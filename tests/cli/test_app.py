"""The command line as a whole: what is imported, and the exit codes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum import __version__
from autoaccum.cli.app import main
from autoaccum.testing import simulated_memory
from tests.cli.conftest import QUIET
from tests.processes import in_turn


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
    assert all(command in shown for command in ("check", "fit", "probe", "plan"))


def test_python_m_autoaccum_exits_with_the_commands_code() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "autoaccum", "plan", "--effective-batch", "0", "--max-micro-batch", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: --effective-batch 0: expected an int of at least 1.")


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
    assert err.startswith("error: --memory-limit: 1.00 MiB may be used, but ")
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
    plan, error = capsys.readouterr().err.splitlines()
    assert plan.startswith("plan: ")
    assert error.startswith("error: loss_fn returned ")


def test_an_unexpected_error_shows_where_it_comes_from_and_exits_with_1(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8, 'loss_fn': lambda y, t: {}['missing'],")
    assert main(["fit", recipe, *QUIET, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("Traceback (most recent call last):") == 1
    assert [line.split('"')[1] for line in err.splitlines() if line.startswith("  File ")][-1] == recipe
    told = "autoaccum was running all 8 samples of the step, of shapes (8, 4), (8, 1)."
    assert f"KeyError: 'missing'\n{told}\n" in err


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
@pytest.mark.parametrize("progress", [(), ("--no-progress",)])
def test_ctrl_c_ends_the_run_after_the_window_with_the_summary(
    progress: tuple[str, ...], tiny: Callable[..., str]
) -> None:
    recipe = tiny(
        "'effective_batch': 8, 'steps': 10**6, 'callbacks': [tell],",
        top="from autoaccum import StepReport\n\ndef tell(record):\n"
        "    if isinstance(record, StepReport) and record.step == 3:\n        print('now', flush=True)\n",
    )
    command = [sys.executable, "-m", "autoaccum", "fit", recipe, "--device", "cpu", "--run-dir", "none", *progress]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "stopping after this step; press Ctrl-C again to stop now" in err
    assert "\ninterrupted: " in err
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
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("plan: ")]
    assert told == (["stopping after this step; press Ctrl-C again to stop now"] if where == "loss" else [])


def test_a_recipe_serves_from_its_folder_under_any_working_directory(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = Path(tiny("'effective_batch': 8,"))
    monkeypatch.chdir(recipe.parent)
    for name in (recipe.name, f".{os.sep}{recipe.name}", recipe.stem, f"{recipe.stem}:recipe"):
        assert fit_json(name)["num_steps"] == 3
    del sys.modules[recipe.stem]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--batch-size", "Use --effective-batch (samples per optimizer step).\n"),
        ("--max-epochs=3", "Use --epochs (passes over the data).\n"),
        ("--epoch", "Did you mean --epochs?"),
        ("--loss-fn", "The recipe returns it: {'loss_fn': ...}."),
        ("--optimizer", "The recipe returns it: {'optimizer': ...}.\n"),
        (
            "--train-dataset",
            "Use data, the second argument (tensors, a dataset or a DataLoader). The recipe returns it: {'data': ...}.",
        ),
    ],
)
def test_what_other_trainers_call_it_is_answered(option: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "recipe.py", option, *([] if "=" in option else ["3"])]) == 2
    assert f"error: autoaccum fit has no option {option.split('=')[0]}. {told}" in capsys.readouterr().err


def test_the_option_that_is_named_in_its_place_works(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny()
    assert main(["fit", recipe, "--batch-size", "8"]) == 2
    assert capsys.readouterr().err == (
        "error: autoaccum fit has no option --batch-size. Use --effective-batch (samples per optimizer step).\n"
    )
    assert fit_json(recipe, "--effective-batch", "8")["history"][0]["effective_batch"] == 8
    assert main(["check", recipe, "--batch-size", "8"]) == 2
    assert capsys.readouterr().err == (
        "error: autoaccum check has no option --batch-size. Leave it out (autoaccum fit has --effective-batch for it).\n"
    )
    assert main(["check", recipe]) == 0


def test_what_only_training_has_is_no_entry_for_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe.py", "--max-epochs", "3"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: autoaccum check has no option --max-epochs. Leave it out (autoaccum fit has --epo")
    assert "recipe returns" not in told


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("plan --effective-batch 256", 'Command "plan" parameter --max-micro-batch is needed, and was left out.'),
        ("fit", 'Command "fit" parameter RECIPE is needed, and was left out.'),
        ("plan --effective-batch 8 --max-micro-batch", "parameter --max-micro-batch requires an argument."),
    ],
)
def test_what_was_left_out_is_told_from_what_has_no_value(
    argv: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 2
    assert capsys.readouterr().err.endswith(f"{told}\n")


def test_keys_of_a_recipes_dict_are_named_as_in_python(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny("'batchsize': 8,"), *QUIET]) == 2
    told = capsys.readouterr().err
    assert "returned 'batchsize', but fit() has no argument 'batchsize'. Use effective_batch (samples per" in told
    assert "--" not in told.split("but fit")[1]


# Whoever reads the output.


@pytest.mark.parametrize(
    "argv", ["--effective-batch 300000 --max-micro-batch 1", "--effective-batch 8 --max-micro-batch 8"]
)
def test_a_reader_that_has_gone_ends_a_command_quietly(argv: str) -> None:
    """More than a pipe holds, which is refused while it is printed, and less, which is refused in the end."""
    command = [sys.executable, "-m", "autoaccum", "plan", "--json", *argv.split()]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == ""
    assert child.returncode == 141


def test_a_pipe_of_the_recipes_own_is_an_error_like_any_other(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    top = "def loss(outputs, targets):\n    raise BrokenPipeError('a worker has gone')\n"
    assert main(["fit", tiny("'effective_batch': 8, 'loss_fn': loss,", top=top), *QUIET]) == 1
    assert capsys.readouterr().err.count("BrokenPipeError: a worker has gone\n") == 1
