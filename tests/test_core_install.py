"""autoaccum works with its core dependencies alone: Optuna is needed for sweeps, and nothing else asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoaccum.cli.app import main
from autoaccum.errors import MissingExtraError

BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("optuna", "sqlalchemy", "alembic"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
MODEL = """
import torch

def recipe():
    torch.manual_seed(0)
    inputs = torch.randn(24, 4)
    return {
        "model": torch.nn.Linear(4, 1),
        "data": (inputs, inputs.sum(1, keepdim=True)),
        "loss_fn": torch.nn.functional.mse_loss,
        "effective_batch": 12,
        "device": "cpu",
    }
"""


def without_optuna(script: str, folder: Path) -> str:
    """Return what a script prints in a process that cannot import Optuna or its database."""
    child = subprocess.run(
        [sys.executable, "-c", BLOCKED + script], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_functions(tmp_path: Path) -> None:
    script = """
import autoaccum

made = recipe()
model, data, loss_fn = made["model"], made["data"], made["loss_fn"]
assert autoaccum.check(model, data, loss_fn=loss_fn).passed
assert autoaccum.probe(**made).max_micro_batch == 12
assert autoaccum.estimate(model, data, loss_fn=loss_fn, device_memory="1GiB").fits
assert len(autoaccum.fit(**made, epochs=2, progress=False).history) == 4
assert autoaccum.evaluate(model, data, loss_fn=loss_fn).loss > 0
assert autoaccum.predict(model, data[0]).shape == (24, 1)
optimizer = torch.optim.SGD(model.parameters())
autoaccum.Accumulator(model, optimizer, loss_fn=loss_fn).step(data)
print("done")
"""
    assert without_optuna(MODEL + script, tmp_path) == "done\n"


def test_every_public_name_can_be_looked_up_and_sweep_says_what_it_needs_when_called(tmp_path: Path) -> None:
    script = """
from autoaccum import *
import autoaccum, pydoc

assert "sweep" in pydoc.render_doc(autoaccum)
try:
    sweep("recipe.py", samples=24)
except autoaccum.errors.MissingExtraError as error:
    print(error)
"""
    assert without_optuna(script, tmp_path) == f"{MissingExtraError('optuna', 'sweep', 'A sweep')}\n"


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(MODEL)
    script = """
from autoaccum.cli.app import main

for line in (
    "check recipe.py",
    "probe recipe.py",
    "estimate recipe.py --device-memory 1GiB",
    "fit recipe.py --epochs 1 --run-dir run --no-progress",
    "plan --effective-batch 256 --max-micro-batch 100",
    "report run",
    "cache",
):
    assert main(line.split()) == 0, line
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
"""
    pytest.importorskip("matplotlib")
    assert "sweep        Search for lr and effective batch." in without_optuna(script, tmp_path)


def test_commands_of_sweeps_say_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(MODEL)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.db").touch()
    script = """
from autoaccum.cli.app import main

sys.stderr = sys.stdout
for line in ("sweep recipe.py --lr 1e-3:1e-1 --samples 24", "sweep --help", "report study"):
    assert main(line.split()) == 1, line
"""
    assert without_optuna(script, tmp_path) == f"error: {MissingExtraError('optuna', 'sweep', 'A sweep')}\n" * 3


def test_a_mistyped_command_is_suggested_as_with_optuna(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
from autoaccum.cli.app import main

sys.stderr = sys.stdout
for line in ("fti rec.py", "sweeep rec.py --lr 1"):
    assert main(line.split()) == 2, line
"""
    told = without_optuna(script, tmp_path)
    assert told.startswith('error: Unknown command "fti". Did you mean "fit"?')
    assert main(["fti", "rec.py"]) == main(["sweeep", "rec.py", "--lr", "1"]) == 2
    assert told == capsys.readouterr().err
