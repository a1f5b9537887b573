"""Errors and warnings on the command line: arguments as its options."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoaccum.cli.app import main
from autoaccum.cli.options import command, of_function
from autoaccum.cli.spelling import as_options, offered


def test_a_cure_is_spelt_as_the_command_line_takes_it(
    tiny: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run-dir", str(tmp_path / "run"), "--no-progress", "--device", "cpu"]
    assert main(["fit", tiny("'effective_batch': 8,"), *run]) == 0
    changed = ["fit", tiny("'effective_batch': 12,"), *run]
    assert main(changed) == 2
    err = capsys.readouterr().err
    assert "resume=" not in err
    cure = re.search("or pass (--resume .*) to begin anew", err)
    assert cure is not None
    assert main([*changed, *cure[1].split()]) == 0
    assert main([*changed, "--resume", "False"]) == 0


def test_what_is_no_option_of_the_command_keeps_its_spelling() -> None:
    def run(path: str, **options: Any) -> None: ...

    def function(depth: int = 1, deep: bool = False, word: str = "") -> None: ...

    call = command(run, of_function(function))
    token = offered.set(inspect.signature(call).parameters)
    text = as_options("f(depth=2), path='a', model.depth=3, deep=True, deep=False, word='x y', name='b', depth=4.")
    offered.reset(token)
    assert text == "f(depth=2), path='a', model.depth=3, --deep, --no-deep, --word 'x y', name='b', --depth 4."
