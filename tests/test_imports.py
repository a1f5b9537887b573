"""Imports go down the list of rooms (import-linter, by pyproject.toml), and what needs no torch loads none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import autoaccum

PACKAGE = Path(autoaccum.__file__).parent
HEAVY = {"torch", "numpy", "psutil"}


def test_imports_are_as_pyproject_has_them() -> None:
    assert lint_imports(config_filename=str(PACKAGE.parent / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


def test_planning_and_the_floor_load_nothing_heavy() -> None:
    light = [".".join(["autoaccum", "planning", path.stem]) for path in (PACKAGE / "planning").glob("[a-z]*.py")]
    light += [f"autoaccum.{name}" for name in ("_checks", "_units", "errors", "events")]
    script = (
        f"import importlib, sys\n"
        f"for module in {light!r}: importlib.import_module(module)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"
    assert len(light) > 10


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """It would take the function's place in the package once something imported it."""
    assert {path.stem for path in PACKAGE.iterdir()} & set(autoaccum.__all__) == set()
