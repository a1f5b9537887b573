"""The command of sweeps: what it prints, what it says of mistakes, and the weights that it trained."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import autoaccum
from autoaccum.cli.app import main
from autoaccum.testing import simulated_memory

RECIPE = """
import torch

def recipe(lr):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator)
    return {
        "model": torch.nn.Linear(4, 1), "data": data, "validation_data": data, "micro_batch": 8,
        "loss_fn": torch.nn.functional.mse_loss, "optimizer": lambda params: torch.optim.SGD(params, lr=lr),
    }
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("digits.py").write_text(RECIPE)
    return "digits.py"


def arguments(recipe: str, *more: str) -> list[str]:
    return [
        "sweep",
        recipe,
        "--lr",
        "1e-3:1e-1",
        "--effective-batch",
        "8:16",
        "--no-progress",
        "--device",
        "cpu",
        *more,
    ]


def test_the_command(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same again has nothing to do and shows the same."""
    assert main(arguments(recipe_file, "--trials", "3")) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split() == ["trial", "validation_loss", "lr", "effective_batch"]
    assert "3 trials: 3 to the end, 0 pruned" in table
    assert "cost of searching for micro-batches: 3 sizes tried, 0 OOMs, at most 0 samples of 192 run again" in table
    assert main(arguments(recipe_file, "--trials", "3", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["study"] == "digits"
    assert document["finished"] == len(document["trials"]) == 3
    assert [trial["directory"] for trial in document["trials"]] == [f"sweeps/digits/trial-000{at}" for at in range(3)]
    values = [document["trials"][number]["values"] for number in document["best"]]
    assert values == sorted(values)
    assert {path.name for path in Path("sweeps/digits").iterdir()} == {
        *(".lock", "id", "study.db"),
        *(f"trial-{number:04d}" for number in range(3)),
    }


def test_the_command_exits_with_4_when_it_is_interrupted(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = RECIPE.replace('"micro_batch": 8,', '"micro_batch": 8, "callbacks": [stop],')
    stop = (
        "import signal\ndef stop(record):\n    if hasattr(record, 'lr'):\n        signal.raise_signal(signal.SIGINT)\n"
    )
    Path("digits.py").write_text(stop + text)
    assert main(arguments(recipe_file, "--trials", "2")) == 4
    out, err = capsys.readouterr()
    assert "0 trials: 0 to the end" in out
    assert "stopping after this step; press Ctrl-C again to stop now\n" in err
    command = shlex.join(["autoaccum", *arguments(recipe_file, "--trials", "2")])
    assert f"resume: {command}\n" in err


def test_a_micro_batch_above_a_trials_effective_batch_is_lowered_for_it(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", recipe_file, "--lr", "1e-3:1e-1", "--effective-batch", "8", "--micro-batch", "16", "--trials", "1"]
    assert main([*argv, "--no-progress", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"][0]["micro_batches"] == [8]


def test_a_ctrl_c_between_trials_ends_the_command_at_once_and_says_where(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("digits.py").write_text(f"calls = []\n{RECIPE}".replace(
        "    generator =", "    calls.append(1)\n    if len(calls) > 2:\n        raise KeyboardInterrupt\n    generator ="
    ))  # fmt: skip
    assert main(arguments(recipe_file, "--trials", "2")) == 4
    told, kept, resume, _ = capsys.readouterr().err.splitlines()[-4:]
    assert (told, kept) == ("interrupted: the same command resumes", "saved: sweeps/digits")
    assert resume == f"resume: {shlex.join(['autoaccum', *arguments(recipe_file, '--trials', '2')])}"


@pytest.mark.parametrize("storage", [(), ("--storage", "journal:trials.log")])
def test_the_command_says_where_the_sweep_is_kept(
    storage: tuple[str, ...], recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*arguments(recipe_file, "--trials", "1"), *storage]
    assert main(given) == 0
    kept, drawn, _ = capsys.readouterr().err.splitlines()[-3:]
    also = " and journal:trials.log" if storage else ""
    assert kept == f"saved: sweeps/digits{also}"
    assert drawn.startswith("report: autoaccum report ")
    assert main(shlex.split(drawn)[2:]) == 0
    capsys.readouterr()
    assert main([*arguments(recipe_file), *storage, "--trials", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["trials"]) == 2
    assert "saved:" not in err


def test_the_command_exits_with_3_when_nothing_fits(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = RECIPE.replace("Linear(4, 1)", "Linear(4, 50_000)")
    Path(recipe_file).write_text(text.replace("torch.nn.functional.mse_loss", "lambda out, targets: out.mean()"))
    with simulated_memory(1_500_000):  # the weights, and not their gradients
        assert main(arguments(recipe_file, "--trials", "2")) == 3
    assert "error: none of 2 trials fits" in capsys.readouterr().err


def test_the_command_takes_samplers_pruners_and_metrics_by_name(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--sampler", "grid", "--pruner", "none", "--metric", "samples,seconds", "--direction", "maximize,minimize"]
    given = ["1e-3,1e-2" if text == "1e-3:1e-1" else text for text in arguments(recipe_file, *more)]
    assert main([*given, "--trials", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {trial["params"]["lr"] for trial in found["trials"]} <= {1e-3, 1e-2}
    assert found["metric"] == ["samples", "seconds"]
    assert [trial["values"][0] for trial in found["trials"]] == [64, 64]


def test_the_command_tells_what_is_wrong(recipe_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("digits.py").write_text(RECIPE.replace("recipe(lr)", "recipe(lr=0.1)").replace('"validation_data": data,', ""))
    assert main(arguments(recipe_file)) == 2
    assert "error: validation_data=None" in capsys.readouterr().err
    assert main(arguments(recipe_file, "--trials", "0")) == 2
    assert "error: --trials 0: expected an int of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "--lr: expected something to search for. Pass --lr 1e-4:1e-1 or --effective-batch 32,64,128; in Python "),
        (["--lr", "0.1"], "--lr 0.1: expected something to search for. "),
        (
            ["--lr", "(1e-4, 1e-1)"],
            "--lr '(1e-4, 1e-1)': expected '1e-4:1e-1' for a range, '1e-4,1e-3' to choose from, or a number.",
        ),
        (
            ["--effective-batch", "8:x"],
            "--effective-batch 8:x: expected '32:1024' for a range, '32,64' to choose from, or a number.",
        ),
        (["--lr", "1e-2:1e-3"], "--lr 1e-2:1e-3: expected "),
        (["--epochs", "1"], "autoaccum sweep has no option --epochs. Use --samples (the budget of each trial)."),
        (["--steps=9"], "autoaccum sweep has no option --steps. Use --samples "),
        (["--num-train-epochs", "1"], "autoaccum sweep has no option --num-train-epochs. Use --samples "),
        (["--batch-size", "1"], "autoaccum sweep has no option --batch-size. Use --effective-batch "),
    ],
)
def test_the_command_says_what_to_type(
    given: list[str], told: str, recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", recipe_file, *given, "--device", "cpu", "--no-progress"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def test_the_best_weights_load_by_the_line_that_is_printed(
    recipe_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(recipe_file, "--trials", "3")) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert main(arguments(recipe_file, "--trials", "3", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["trials"][found["best"][0]]
    model = torch.nn.Linear(4, 1)
    eval(line.removeprefix("best weights: "), {"autoaccum": autoaccum, "model": model})
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(64, 4, generator=generator), torch.randn(64, 1, generator=generator)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    assert loss.item() == pytest.approx(best["values"][0], rel=1e-6)
