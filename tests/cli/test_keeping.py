"""Where the command line keeps a run, what it says of it, and what it leaves of one that failed."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from autoaccum.cli.app import main
from autoaccum.cli.keeping import RUNS
from autoaccum.memory.clock import ManualClock, using
from tests.cli.conftest import TINY
from tests.ranks.launching import launch

PLAIN = ("--no-progress", "--device", "cpu")


def runs() -> list[Path]:
    """The directories that were made, in order."""
    base = Path(os.environ[RUNS])
    return sorted(base.iterdir()) if base.exists() else []


def fit(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["fit", *argv, *PLAIN, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_a_run_is_kept_by_default_and_gone_on_with_as_it_says(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8,")
    assert main(["fit", recipe, *PLAIN, "--epochs", "2"]) == 0
    (place,) = runs()
    begun, _, _, kept, more, drawn = capsys.readouterr().err.splitlines()
    assert begun == f"saving to: {place} (resume: --run-dir {place})"
    assert kept == f"saved: {place}"
    resume = shlex.join(["autoaccum", "fit", recipe, *PLAIN, "--epochs", "4", "--run-dir", str(place)])
    assert more == f"resume: {resume}"
    assert drawn == f"report: autoaccum report {place}"
    assert resumed(more, capsys) == (6, list(range(1, 13)))
    assert runs() == [place]
    assert main(shlex.split(drawn.partition(": ")[2])[1:]) == 0
    assert (place / "report.html").exists()


def resumed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[int]]:
    """The step from which the command of a line has resumed a run, and all steps that the run has then."""
    assert main([*shlex.split(line.partition(": ")[2])[1:], "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    (since,) = [event["step"] for event in run["events"] if event["type"] == "Resumed"]
    return since, [report["step"] for report in run["history"]]


@pytest.mark.parametrize(
    ("budget", "typed", "more", "steps"),
    [
        ("", [], ["--epochs", "2"], (3, 6)),
        ("'steps': 2,", [], ["--steps", "4"], (2, 4)),
        ("'epochs': 5,", ["--samples=8"], ["--samples", "16"], (1, 2)),
    ],
)
def test_the_command_that_resumes_has_twice_the_budget(
    budget: str,
    typed: list[str],
    more: list[str],
    steps: tuple[int, int],
    tiny: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tiny(f"'effective_batch': 8, {budget}")
    assert main(["fit", recipe, *typed, *PLAIN]) == 0
    (place,) = runs()
    resume = capsys.readouterr().err.splitlines()[-2]
    assert resume == f"resume: {shlex.join(['autoaccum', 'fit', recipe, *PLAIN, *more, '--run-dir', str(place)])}"
    assert resumed(resume, capsys) == (steps[0], list(range(1, steps[1] + 1)))


@pytest.mark.filterwarnings("ignore:The run in")
@pytest.mark.parametrize(
    ("smaller", "more", "steps"),
    [
        (["--epochs", "1"], "--epochs 6", 18),
        (["--steps=2"], "--steps 16", 16),
        (["--samples", "8"], "--samples 128", 16),
    ],
)
def test_the_command_that_resumes_trains_further_than_any_command_before_it(
    smaller: list[str], more: str, steps: int, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 8,")
    assert main(["fit", recipe, *PLAIN, "--steps", "8"]) == 0
    (place,) = runs()
    capsys.readouterr()
    assert main(["fit", recipe, *PLAIN, *smaller, "--run-dir", str(place)]) == 0
    resume = capsys.readouterr().err.splitlines()[-2]
    assert f" {more} " in resume
    assert resumed(resume, capsys) == (8, list(range(1, steps + 1)))


def test_a_recipe_that_begins_again_each_time_is_resumed_all_the_same(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny("'effective_batch': 8, 'resume': False,"), *PLAIN]) == 0
    assert resumed(capsys.readouterr().err.splitlines()[-2], capsys) == (3, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("validated", ["", "'validation_data': (torch.randn(4, 4), torch.randn(4, 1)),"])
def test_a_run_that_its_scheduler_ends_is_complete_and_its_weights_load(
    validated: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = "lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)"
    assert main(["fit", tiny(f"'effective_batch': 8, 'lr_scheduler': {scheduler}, {validated}"), *PLAIN]) == 0
    (place,) = runs()
    *_, kept, weights, _, end = capsys.readouterr().err.splitlines()
    assert kept == f"saved: {place}"
    file = str(place / "checkpoints" / "step-00000003" / "model.safetensors")
    assert end == "finished: its lr_scheduler has ended (a longer run begins again, in a new run_dir)"
    assert main(["fit", tiny(f"'effective_batch': 8, 'lr_scheduler': {scheduler},"), *PLAIN, "--run-dir", "none"]) == 0
    assert "lr_scheduler" not in capsys.readouterr().err
    pasted: dict[str, Any] = {}
    exec(weights.partition(": ")[2], pasted)
    assert torch.equal(pasted["model"].weight, safetensors.torch.load_file(file)["weight"])


NEXT_TO_IT = """
import torch
from sizes import inputs

def recipe(outputs=1):
    model = torch.nn.Linear(inputs, outputs)
    data = torch.randn(24, inputs), torch.randn(24, outputs)
    scheduler = lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return {{
        "model": model, "data": data, "loss_fn": torch.nn.functional.mse_loss, "effective_batch": 8,
        "lr_scheduler": scheduler, {more}
    }}
"""


@pytest.mark.parametrize(
    ("validated", "recipe", "given", "line"),
    [
        (True, "some/net.py", [], "import autoaccum; model = autoaccum.load_best({place!r}, 'some/net.py')"),
        (True, "some/net.py:recipe", ["--set", "outputs=3"], None),
        (True, "some.net", ["--set", "outputs=3"], None),
        (False, "some/net.py", [], None),
        (False, "some.net:recipe", [], None),
    ],
)
def test_the_line_that_loads_weights_runs_as_printed(
    validated: bool,
    recipe: str,
    given: list[str],
    line: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    is_file = recipe.startswith("some/")
    more = "'validation_data': data" if validated else ""
    source = NEXT_TO_IT.format(more=more).replace("from sizes", f"from {'' if is_file else 'some.'}sizes")
    (tmp_path / "some" / "net.py").write_text(source)
    (tmp_path / "some" / "sizes.py").write_text("inputs = 4\n")
    assert main(["fit", recipe, *given, *PLAIN, "--run-dir", "my 'run'"]) == 0
    (weights,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("weights: ")]
    code = weights.partition(": ")[2]
    assert line is None or code == line.format(place="my 'run'")
    shown = f"{code}; print(tuple(model.weight.shape), float(model.weight.detach().sum()))"
    child = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    file = next((tmp_path / "my 'run'" / "checkpoints").glob("step-00000003*")) / "model.safetensors"
    trained = safetensors.torch.load_file(file)["weight"]
    if not validated:
        assert child.stdout.split(") ")[1] == f"{float(trained.sum())}\n"
    assert child.stdout.startswith(f"{tuple(trained.shape)} ")


def test_a_validation_that_was_nan_leaves_no_best_weights_to_load(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = "lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)"
    validated = "'validation_data': (torch.full((4, 4), torch.inf), torch.randn(4, 1))"
    assert main(["fit", tiny(f"'effective_batch': 8, 'lr_scheduler': {scheduler}, {validated},"), *PLAIN]) == 0
    (weights,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("weights: ")]
    pasted: dict[str, Any] = {}
    exec(weights.partition(": ")[2], pasted)
    assert pasted["model"].weight.isfinite().all()


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
    command = ["autoaccum", "fit", recipe, *PLAIN, "--json", "--epochs", "2", "--run-dir", str(place)]
    assert run["resume_command"] == shlex.join(command)
    assert run["report_command"] == f"autoaccum report {place}"
    assert run["ended"] == "finished"
    assert "saved:" not in err
    assert main(shlex.split(run["resume_command"])[1:]) == 0
    assert len(json.loads(capsys.readouterr().out)["history"]) == 6


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
    assert capsys.readouterr().err.startswith("error: ")


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
    # Of what writes a run elsewhere only the first rank's is called.
    top, rows = "from autoaccum.reporting import CSVReporter\n", tmp_path / "rows.csv"
    path.write_text(top + TINY.format(more=f"'effective_batch': 8, 'callbacks': [CSVReporter({str(rows)!r})],"))
    first, second = launch(fit_on_a_rank, 2, str(path), os.environ[RUNS])
    (place,) = runs()
    assert first["run_dir"] == str(place)
    assert first["resume_command"].startswith("torchrun ... -m autoaccum fit ")
    assert second == {}
    assert [line.split(",")[1] for line in rows.read_text().splitlines() if "StepReport" in line] == ["1", "2", "3"]


def test_a_run_that_a_callback_has_ended_says_so(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    top = (
        "import autoaccum\ndef stop(record):\n    if getattr(record, 'loss', None) and record.step == 2:\n"
        "        raise autoaccum.StopTraining\n"
    )
    recipe = tiny("'effective_batch': 8, 'callbacks': [stop],", top=top)
    assert main(["fit", recipe, *PLAIN]) == 0
    (place,) = runs()
    file = str(place / "checkpoints" / "step-00000002" / "model.safetensors")
    assert capsys.readouterr().err.splitlines()[-4:] == [
        f"saved: {place}",
        f"weights: import safetensors.torch; import sys; sys.path.insert(0, {str(Path(recipe).parent)!r}); import runpy; "
        f"model = runpy.run_path({recipe!r})['recipe']()['model']; "
        f"model.load_state_dict(safetensors.torch.load_file({file!r}))",
        f"report: autoaccum report {place}",
        "stopped: by a callback, which has to allow more steps before the run can resume",
    ]
