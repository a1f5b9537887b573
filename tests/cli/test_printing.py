"""What is printed: where, as lines and as JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from autoaccum.cli.app import main
from autoaccum.cli.printing import probe_lines
from autoaccum.events import StepReport
from autoaccum.testing import simulated_memory
from autoaccum.training.probe import ProbeReport
from tests.cli.conftest import QUIET


def test_json_of_fit_is_one_document_with_everything_in_it(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 10, 'callbacks': [print],", top="print('imported')\n")
    assert main(["fit", recipe, "--json", "--device", "cpu", "--micro-batch", "5"]) == 0
    out, err = capsys.readouterr()
    run = json.loads(out)
    places = {"run_dir", "resume_command", "report_command"}
    assert run.keys() == {"ended", "num_steps", "num_samples", "plan", "history", "events", *places}
    assert (run["num_steps"], run["num_samples"]) == (3, 24)
    assert run["plan"] == {
        "effective_batch": 10, "world_size": 1, "accumulation_steps": 2, "sizes": [5, 5], "ranks": [[5, 5]],
    }  # fmt: skip
    assert all(report.keys() == set(StepReport.__slots__) for report in run["history"])
    assert [report["num_samples"] for report in run["history"]] == [10, 20, 24]
    told = [event["type"] for event in run["events"] if event["type"] != "Saved"]  # which a directory adds
    assert told == ["Started", "Planned", "Verified", "Finished"]
    verified = next(event for event in run["events"] if event["type"] == "Verified")
    assert (verified["step"], verified["hypothesis"], verified["samples"]) == (1, "items", 6)
    assert verified["cuts"] == [[1, 2, 3], [3, 2, 1], [2, 2, 2]]
    assert verified["error"] < verified["tolerance"]
    assert run["events"][-1] == {"type": "Finished", "step": 3, "reason": "budget", "stopped_by": ""}
    assert "imported" in err
    assert "StepReport(step=1" in err


def test_json_has_what_is_beside_the_loss(tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]) -> None:
    beside = "{'ones': torch.ones(len(t)), 'mean': 0.5, 'none': (1.0, 0)}"
    recipe = tiny(f"'effective_batch': 12, 'loss_fn': lambda o, t: (nn.functional.mse_loss(o, t), {beside}),")
    assert [report["outputs"] for report in fit_json(recipe)["history"]] == [
        {"ones": [1.0] * 12, "mean": 0.5, "none": None}
    ] * 2


@pytest.mark.filterwarnings("ignore:The loss of window 2 is")
def test_json_has_null_for_a_loss_that_is_no_number(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8, 'optimizer': lambda ps: torch.optim.SGD(ps, lr=float('inf')),")
    assert main(["fit", recipe, *QUIET, "--json"]) == 1
    run = json.loads(capsys.readouterr().out)
    assert [report["loss"] is None for report in run["history"]] == [False, True, True]
    assert run["ended"] == "diverged"


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
    with simulated_memory("1500KiB"):
        assert main(["probe", wide, "--device", "cpu", "--effective-batch", "24"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["probe", wide, "--device", "cpu", "--effective-batch", "24", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "max_micro_batch", "trials", "memory_model", "time_model", "limit_bytes", "plan", "num_samples"
    }  # fmt: skip
    assert report["limit_bytes"] == 1500 * 2**10
    assert report["memory_model"].keys() == {"fixed_bytes", "bytes_per_sample", "bytes_per_square"}
    largest = report["max_micro_batch"]
    assert 1 <= largest < 24
    assert {trial["fits"] for trial in report["trials"]} == {True, False}
    assert lines[0].split() == ["micro-batch", "fits", "peak", "predicted", "seconds", "samples/s"]
    rows = [line.split() for line in lines[1 : lines.index("")]]
    assert [(int(row[0]), row[1] == "yes") for row in rows] == [(t["micro_batch"], t["fits"]) for t in report["trials"]]
    assert rows[0][3] in ("KiB", "MiB")
    assert any(line.startswith("memory model: ") and line.endswith(" per sample") for line in lines)
    assert "limit: 1.46 MiB" in lines
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


@pytest.mark.filterwarnings("default::autoaccum.AutoaccumWarning")
def test_a_warning_of_ours_is_one_line(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(top="import warnings, autoaccum\nwarnings.warn('two\\nlines', autoaccum.AutoaccumWarning)\n")
    assert main(["fit", recipe, "--effective-batch", "100", *QUIET]) == 0
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert first == "warning: two lines"
    assert second.startswith("warning: --effective-batch 100 is more than the data's 24 samples. ")


@pytest.mark.filterwarnings("default:old habit:FutureWarning")
def test_a_warning_of_others_says_where_it_comes_from(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny(top="import warnings\nwarnings.warn('old habit', FutureWarning)\n")
    assert main(["fit", recipe, "--effective-batch", "8", *QUIET]) == 0
    assert f"{recipe}:2: FutureWarning: old habit" in capsys.readouterr().err


@pytest.mark.parametrize(("num_samples", "told"), [(5, " (the data's 5, repeated)"), (8, ""), (None, "")])
def test_a_probe_says_where_it_has_repeated_the_data(num_samples: int | None, told: str) -> None:
    report = ProbeReport(
        max_micro_batch=8, trials=(), memory_model=None, time_model=None, limit_bytes=2**20, plan=None,
        num_samples=num_samples,
    )  # fmt: skip
    assert f"largest micro-batch: 8{told}" in list(probe_lines(report))
