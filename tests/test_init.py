"""The package's face: names that all resolve, and are loaded no sooner than they are used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autoaccum

HEAVY = ["torch", "numpy", "psutil", "optuna", "tqdm"]


def loaded_by(script: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after running it."""
    script += f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded: list[str] = json.loads(child.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize("name", autoaccum.__all__)
def test_every_name_resolves_to_what_its_module_defines(name: str) -> None:
    value = getattr(autoaccum, name)
    if name == "__version__":
        assert value.count(".") >= 1
        return
    assert value.__name__ == name
    assert value.__module__ == f"autoaccum.{autoaccum._HOMES[name]}"


def test_names_are_there_once_each() -> None:
    assert len(set(autoaccum.__all__)) == len(autoaccum.__all__)
    assert {
        "Accumulator",
        "check",
        "fit",
        "probe",
        "plan",
        "Trainer",
        "AutoaccumError",
        "StopTraining",
        "__version__",
    } <= set(autoaccum.__all__)


def test_star_imports_them_all() -> None:
    namespace: dict[str, Any] = {}
    exec("from autoaccum import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(autoaccum.__all__)


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(autoaccum.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "else type checkers take it for private"
            seen[alias.name] = f"{node.module}"
    assert seen == {name: f"autoaccum.{home}" for name, home in autoaccum._HOMES.items()}


def test_dir_lists_them() -> None:
    listed = dir(autoaccum)
    assert set(autoaccum.__all__) <= set(listed)
    assert listed == sorted(listed)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'autoaccum' has no attribute 'fitt'"):
        autoaccum.fitt  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="moe_balancing was removed: leave it out"):
        autoaccum.moe_balancing  # noqa: B018
    assert not hasattr(autoaccum, "torch")
    with pytest.raises(ImportError, match="cannot import name 'fitt'"):
        exec("from autoaccum import fitt")


@pytest.mark.parametrize(
    "script",
    [
        "import autoaccum; dir(autoaccum); autoaccum.__all__; autoaccum.__version__",
        "import autoaccum; assert autoaccum.plan(effective_batch=256, max_micro_batch=100).sizes == (86, 85, 85)",
        "from autoaccum import AutoaccumError, AutoaccumWarning, Plan, StepReport, StopTraining, plan",
        "import autoaccum.planning.cuts, autoaccum.planning.search",
    ],
)
def test_what_needs_no_torch_loads_none(script: str) -> None:
    assert loaded_by(script) == []


def test_what_needs_torch_loads_it() -> None:
    """So that the test above can fail; and no sweep library with it."""
    assert loaded_by("import autoaccum; autoaccum.fit") == ["torch", "numpy", "psutil", "tqdm"]


def test_a_submodule_in_use_takes_no_names_place() -> None:
    import autoaccum.planning.cuts
    import autoaccum.training.probe

    assert callable(autoaccum.plan)
    assert callable(autoaccum.probe)


@pytest.mark.parametrize("name", ["errors", "events", "reporting", "schedules", "testing"])
def test_a_module_of_public_names_is_an_attribute_without_an_import_of_its_own(name: str) -> None:
    """In a fresh interpreter, for each import of any of them would make it one."""
    script = f"import autoaccum\nassert autoaccum.{name}.__name__ == 'autoaccum.{name}'"
    subprocess.run([sys.executable, "-c", script], check=True)
