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


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--lr", "-1"], "--lr -1.0: expected a number of at least 0"),
        (["--effective-batch", "-4"], "--effective-batch -4: expected"),
        (
            ["--min-micro-batch", "9", "--max-micro-batch", "4"],
            "--min-micro-batch 9: expected at most --max-micro-batch 4",
        ),
        (["--checkpoint-every", "3", "--run-dir", "none"], "--checkpoint-every 3: expected --run-dir beside it."),
    ],
)
def test_it_is_spelt_as_it_was_typed(
    argv: list[str], told: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny("'effective_batch': 8,"), "--device", "cpu", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


@pytest.mark.parametrize(
    ("text", "spelt"),
    [
        ("rate=None: expected 3, pass rate=None", "--rate: expected 3, pass rate=None"),
        ("lr=(1e-4, 0.1), lr=[1, 2, 3], lr=1e-05", "--lr 1e-4:0.1, --lr 1,2,3, --lr 1e-05"),
        ("rate=(8, 4), rate=[8, 4], rate=1e-05", "rate=(8, 4), rate=[8, 4], --rate 1e-05"),
        ("rate=(3, 224, 224), rate='', f(1, 2)", "rate=(3, 224, 224), --rate '', f(1, 2)"),
        ("expected (1e-4, 1) or '1e-4:1', [3, 4] or '3,4'", "expected '1e-4:1', '3,4'"),
    ],
)
def test_ranges_and_lists_are_spelt_as_texts(text: str, spelt: str) -> None:
    def run(path: str, **options: Any) -> None: ...

    def function(rate: float = 1, lr: float = 1) -> None: ...

    token = offered.set(inspect.signature(command(run, of_function(function))).parameters)
    found = as_options(text)
    offered.reset(token)
    assert found == spelt


def test_an_argument_without_a_value_is_an_option_where_it_is_surely_one() -> None:
    def run(path: str, **options: Any) -> None: ...

    def function(study_name: str = "", state: str = "") -> None: ...

    call = command(run, of_function(function))
    token = offered.set(inspect.signature(call).parameters)
    kept = (
        "a state, study_name.db, 'study_name', f(study_name), a/study_name, study_name(), model.study_name, other_name"
    )
    text = as_options(f"{kept}. Choose another study_name, or pass state. recipe_arguments['state']=3")
    offered.reset(token)
    assert text == f"{kept}. Choose another --study-name, or pass --state. --set state=3"


def test_a_device_that_is_not_there_is_left_out(
    tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    argv = ["fit", tiny("'effective_batch': 8,"), "--run-dir", "none", "--no-progress"]
    assert main([*argv, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "error: --device cuda is not available: this PyTorch build is CPU-only. Leave --device out to train on the "
        "CPU, or install a build for CUDA (https://pytorch.org/get-started).\n"
    )
    assert main(argv) == 0


def test_a_number_of_gib_has_its_unit(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'effective_batch': 8,")
    assert main(["estimate", recipe, "--device-memory", "24"]) == 2
    assert capsys.readouterr().err == "error: --device-memory 24 is 24 bytes. Pass --device-memory 24GiB.\n"
    assert main(["estimate", recipe, "--device-memory", "24GiB"]) == 0
    argv = ["fit", recipe, "--run-dir", "none", "--no-progress", "--device", "cpu", "--memory-limit"]
    assert main([*argv, "24"]) == 2
    assert capsys.readouterr().err == (
        "error: --memory-limit 24 is 24 bytes. Pass --memory-limit 24GiB, or a share such as --memory-limit 0.5.\n"
    )
    assert [main([*argv, limit]) for limit in ("24GiB", "0.5")] == [0, 0]
