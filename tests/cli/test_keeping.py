"""Where the command line keeps a run, what it says of it, and what it leaves of one that failed."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoaccum.cli.app import main
from autoaccum.cli.keeping import RUNS
from autoaccum.memory.clock import ManualClock, using
from tests.cli.conftest import TINY
from tests.distributed.launching import launch

PLAIN = ("--no-progress", "--device", "cpu")


def runs() -> list[Path]:
    """The directories that were made, in order."""
    base = Path(os.environ[RUNS])
    return sorted(base.iterdir()) if base.exists() else []


def fit(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["fit", *argv, *PLAIN, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_run_is_kept_by_default(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'effective_batch': 8,")
    assert main(["fit", recipe, *PLAIN, "--epochs", "2"]) == 0
    (place,) = runs()
    *said, kept, weights, drawn = capsys.readouterr().err.splitlines()
    assert f"saving to: {place} (resume: --run-dir {place})" in said
    assert kept == f"saved: {place}"
    assert weights == f"weights: {place}/checkpoints/step-00000006/model.pt"
    assert torch.load(weights.partition(": ")[2])["weight"].shape == (1, 4)
    assert drawn == f"report: autoaccum report {place}"
    # As the first line says; the last --epochs counts.
    again = ["fit", recipe, *PLAIN, "--epochs", "4", "--run-dir", str(place)]
    assert resumed(f": autoaccum {shlex.join(again)}", capsys) == (6, list(range(1, 13)))
    assert runs() == [place]
    assert main(shlex.split(drawn.partition(": ")[2])[1:]) == 0
    assert (place / "report.html").exists()


def resumed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[int]]:
    """The step from which the command of a line has resumed a run, and all steps that the run has then."""
    assert main([*shlex.split(line.partition(": ")[2])[1:], "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    (since,) = [event["step"] for event in run["events"] if event["type"] == "Resumed"]
    return since, [report["step"] for report in run["history"]]


def test_a_run_that_ctrl_c_has_ended_resumes_as_it_says(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    top = (
        "import signal\ndef stop(record):\n    if getattr(record, 'loss', None) and record.step == 2:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
    )
    recipe = tiny("'effective_batch': 8, 'callbacks': [stop],", top=top)
    assert main(["fit", recipe, *PLAIN]) == 4
    *_, summary, _, _, kept, resume, _, end = capsys.readouterr().err.splitlines()
    (place,) = runs()
    assert summary.startswith("interrupted: 2 steps") or kept == f"saved: {place}"
    assert resume == f"resume: {shlex.join(['autoaccum', 'fit', recipe, *PLAIN, '--run-dir', str(place)])}"
    assert end == "interrupted: after step 2"
    assert resumed(resume, capsys) == (2, [1, 2, 3])
    assert main(["fit", recipe, *PLAIN, "--run-dir", "none"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: after step 2"
    assert main(["fit", recipe, *PLAIN, "--run-dir", "none", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["ended"] == "interrupted"


@pytest.mark.filterwarnings("ignore:The loss of window")
def test_a_run_that_diverged_says_so_last_and_in_its_exit_code(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    steep = "'optimizer': lambda params: torch.optim.SGD(params, lr=1e30)"
    argv = ["fit", tiny(f"'effective_batch': 8, {steep},"), *PLAIN, "--steps", "6"]
    assert main(argv) == 1
    (place,) = runs()
    err = capsys.readouterr().err.splitlines()
    loss, since = err[-1].split()[4], err[-1].split()[7].rstrip(".")
    assert loss in ("inf", "nan")
    assert 1 < int(since) <= 4
    assert err[-3:] == [
        f"saved: {place}",
        f"report: autoaccum report {place}",
        f"diverged: the loss is {loss} since step {since}. Lower the learning rate, or pass --clip-norm 1.0, in a new run.",
    ]
    assert main([*argv, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ended"] == "diverged"
    gentle = tiny("'effective_batch': 8,")
    assert main(["fit", gentle, *PLAIN, "--steps", "6", "--clip-norm", "1.0"]) == 0
    assert main(["fit", gentle, *PLAIN, "--steps", "6", "--lr", "1e-4"]) == 0


def test_a_second_run_never_takes_up_the_first(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'effective_batch': 8,")
    # The clock stands still, so that both have the same name to begin with.
    with using(ManualClock(stamp=1e9)):
        first, second = fit(capsys, recipe), fit(capsys, recipe)
    assert second["run_dir"] == f"{first['run_dir']}-2"
    assert [event["type"] for run in (first, second) for event in run["events"]].count("Resumed") == 0
    assert second["num_steps"] == len(second["history"]) == 3


def test_json_has_the_commands_as_fields_and_standard_error_no_lines(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8,")
    assert main(["fit", recipe, *PLAIN, "--json", "--resume", "auto"]) == 0
    out, err = capsys.readouterr()
    run, (place,) = json.loads(out), runs()
    assert run["run_dir"] == str(place)
    assert run["resume_command"] is None, "it has ended"
    assert run["report_command"] == f"autoaccum report {place}"
    assert run["ended"] == "finished"
    assert "saved:" not in err


def test_none_keeps_nothing(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(capsys, tiny("'effective_batch': 8,"), "--run-dir", "none")
    assert [run[name] for name in ("run_dir", "resume_command", "report_command")] == [None] * 3
    assert runs() == []
    assert fit(capsys, tiny("'effective_batch': 8, 'run_dir': None,"))["run_dir"] is None, "the recipe says so"
    assert runs() == []


def test_a_directory_that_is_named_is_taken(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = fit(capsys, tiny(f"'effective_batch': 8, 'run_dir': {str(tmp_path / 'own')!r},"))
    assert run["run_dir"] == str(tmp_path / "own")
    assert runs() == []
    # A checkpoint to go on from is insisted on, and none is named.
    assert main(["fit", tiny("'effective_batch': 8,"), *PLAIN, "--resume", "true"]) == 2
    assert "--run-dir beside it" in capsys.readouterr().err
    assert runs() == []


@pytest.mark.parametrize("failure", ["'lr': -1,", "'loss_fn': lambda y, t: y - t,", "'callbacks': 5,"])
def test_a_run_that_fails_before_a_checkpoint_leaves_nothing(
    failure: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny(f"'effective_batch': 8, {failure}"), *PLAIN]) in (1, 2)
    assert not Path(os.environ[RUNS]).exists()
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_a_run_that_fails_later_is_kept_and_says_so(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    top = "def stop(record):\n    if getattr(record, 'loss', None) and record.step == 2:\n        raise RuntimeError\n"
    assert main(["fit", tiny("'effective_batch': 8, 'callbacks': [stop],", top=top), *PLAIN]) == 1
    (place,) = runs()
    err = capsys.readouterr().err
    assert f"\nsaved: {place}\nresume: autoaccum fit " in err
    assert f"\nreport: autoaccum report {place}\n" in err
    assert [path.name for path in (place / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_second_ctrl_c_in_a_validation_says_where_the_run_is_kept(
    is_named: bool, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    top = (
        "import signal\nfrom torch import nn\n\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        for _ in range(0 if self.training else 2):\n            signal.raise_signal(signal.SIGINT)\n"
        "        return super().forward(x)\n"
    )
    validated = "'validation_data': (torch.randn(4, 4), torch.randn(4, 1)),"
    recipe = tiny(f"'effective_batch': 24, 'model': Net(4, 1), {validated}", top=top)
    place = tmp_path / "own"
    assert main(["fit", recipe, *PLAIN, *(["--run-dir", str(place)] if is_named else [])]) == 130
    (place,) = [place] if is_named else runs()
    err = capsys.readouterr().err
    assert "stopping after this validation; press Ctrl-C again to stop now\n" in err
    assert f"\nsaved: {place}\nresume: autoaccum fit {recipe} " in err
    assert [path.name for path in (place / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_where_nothing_can_be_written_the_way_out_is_told(
    tiny: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RUNS, str(tmp_path / "file"))
    assert main(["fit", tiny("'effective_batch': 8,"), *PLAIN]) == 2
    assert "--run-dir none to keep nothing" in capsys.readouterr().err


def fit_on_a_rank(recipe: str, base: str) -> dict[str, Any]:
    """What the first of several ranks prints of its run; others print nothing."""
    import contextlib
    import io

    os.environ[RUNS] = base  # that of a process which was begun before this test
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["fit", recipe, *PLAIN, "--json"]) == 0
    return json.loads(out.getvalue() or "{}")


def test_ranks_have_the_directory_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(TINY.format(more="'effective_batch': 8,"))
    first, second = launch(fit_on_a_rank, 2, str(path), os.environ[RUNS])
    (place,) = runs()
    assert first["run_dir"] == str(place)
    assert first["report_command"] == f"autoaccum report {place}"
    assert second == {}


def test_a_run_that_a_callback_has_ended_is_kept(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    top = (
        "import autoaccum\ndef stop(record):\n    if getattr(record, 'loss', None) and record.step == 2:\n"
        "        raise autoaccum.StopTraining\n"
    )
    recipe = tiny("'effective_batch': 8, 'callbacks': [stop],", top=top)
    assert main(["fit", recipe, *PLAIN]) == 0
    (place,) = runs()
    assert capsys.readouterr().err.splitlines()[-3:] == [
        f"saved: {place}",
        f"weights: {place}/checkpoints/step-00000002/model.pt",
        f"report: autoaccum report {place}",
    ]
