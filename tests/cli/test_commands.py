"""Commands: what reaches fit and probe from the command line and from a recipe, and what the cache shows."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoaccum.cli.app import main
from tests.cli.conftest import QUIET

# Flags and the recipe.


def test_options_override_the_recipe_and_leave_it_the_rest(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 12, 'lr': 0.5, 'micro_batch': 4, 'headroom': 0.5,")
    run = fit_json(recipe, "--lr", "0.125")
    assert [report["micro_batches"] for report in run["history"]] == [[4, 4, 4]] * 2
    assert {report["lr"] for report in run["history"]} == {0.125}
    assert fit_json(recipe, "--effective-batch", "24")["plan"]["sizes"] == [4] * 6


def test_an_option_that_repeats_the_default_overrides_the_recipe_too(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 10, 'drop_last': True,")
    assert fit_json(recipe)["num_steps"] == 2
    assert fit_json(recipe, "--no-drop-last")["num_steps"] == 3


def test_a_budget_replaces_the_recipes_budget(
    tiny: Callable[..., str], fit_json: Callable[..., dict[str, Any]]
) -> None:
    recipe = tiny("'effective_batch': 8, 'epochs': 5,")
    assert fit_json(recipe)["num_steps"] == 15
    assert fit_json(recipe, "--steps", "4")["num_steps"] == 4
    assert fit_json(recipe, "--samples", "13")["num_samples"] == 13
    assert fit_json(recipe, "--epochs", "2")["num_steps"] == 6


def test_effective_batch_from_neither_is_a_usage_error(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", tiny(), *QUIET]) == 2
    assert "Pass --effective-batch, or return it from the recipe." in capsys.readouterr().err


def test_probe_ignores_what_only_fit_takes(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'epochs': 3, 'lr_scheduler': None, 'clip_norm': 1.0, 'effective_batch': 6,")
    assert main(["probe", recipe, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["max_micro_batch"] == 6
    assert main(["probe", recipe, "--json", "--device", "cpu", "--max-micro-batch", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["sizes"] == [3, 3]


# Estimate.


def test_estimate_prints_what_fits(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny(
        "'model': nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1)), 'effective_batch': 6000, 'epochs': 3,"
    )
    assert main(["estimate", recipe, "--device-memory", "1MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["estimate", recipe, "--device-memory", "1MiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is True
    assert report["device_memory_bytes"] == 2**20
    assert 0.9 * 0.95 * 2**20 < report["peak_bytes"] <= 0.95 * 2**20
    assert report["accumulation_steps"] == -(-6000 // report["micro_batch"])
    assert report["parts"].keys() == {
        "parameters", "gradients", "optimizer", "activations_per_sample", "working"
    }  # fmt: skip
    assert report["range_bytes"][0] <= report["peak_bytes"] < report["range_bytes"][1]
    assert lines[0] == f"MAY FIT, by tensors alone: micro-batches of {report['micro_batch']} samples in 1.00 MiB"


def test_estimate_ends_with_3_where_nothing_fits(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "estimate",
                tiny("'model': nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1)),"),
                "--device-memory",
                "4KiB",
            ]
        )
        == 3
    )
    assert capsys.readouterr().out.startswith("DOES NOT FIT: 1 sample would take ")


@pytest.mark.parametrize(
    ("given", "named"), [((), "--device-memory"), (("--device-memory", "much"), "--device-memory much")]
)
def test_estimate_wants_to_know_the_device(
    given: tuple[str, ...], named: str, tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", tiny(), *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {named}: expected bytes")


# Check.


def test_check_prints_a_page_and_exits_with_0_where_it_is_exact(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'effective_batch': 12, 'epochs': 3, 'lr': 0.5,")  # which check does not take
    assert main(["check", recipe, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("EXACT: split batches have the gradient of the full batch\n")
    assert "  1 + 2 + 3 " in out
    assert err == ""


def test_check_prints_json(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", tiny(top="print('read')\n"), "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out)
    assert err == "read\n"
    assert [shown[name] for name in ("passed", "hypothesis", "samples", "notice")] == [True, "items", 6, None]
    assert [cut["sizes"] for cut in shown["cuts"]] == [[1, 2, 3], [3, 2, 1], [2, 2, 2]]
    assert shown["tensors"].keys() == {"weight", "bias"}
    assert shown["hypotheses"]["items"] == shown["error"] < shown["tolerance"] < 0.1


def test_check_exits_with_1_where_it_is_not_exact(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny("'training_step': lambda model, batch: model(batch[0]).mean() ** 2, 'loss_fn': None,")
    assert main(["check", recipe, "--device", "cpu", "--accumulate", "weighted"]) == 1
    assert capsys.readouterr().out.startswith("NOT EXACT: ")
    assert main(["check", recipe, "--device", "cpu"]) == 0
    assert "joined" in capsys.readouterr().out


def test_check_exits_with_1_where_it_cannot_be_measured(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("'loss_fn': lambda outputs, targets: outputs.sum() * 0,")
    assert main(["check", recipe, "--device", "cpu"]) == 1
    assert capsys.readouterr().out.startswith("NOT MEASURED: ")
    assert main(["check", recipe, "--device", "cpu", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["error"]) == (None, None)
    assert shown["notice"].keys() == {"cause", "consequence", "cure"}


@pytest.mark.parametrize(
    "data",
    [
        "[(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)]",  # for a batch, a list of what?
        "iter([(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)])",
        "torch.utils.data.TensorDataset(torch.randn(9, 4), torch.randn(9, 1))",
        "[(torch.randn(4), torch.randn(1)) for _ in range(9)]",
        "[torch.randn(5) for _ in range(9)], 'collate_fn': lambda rows: torch.stack(rows).split((4, 1), 1)",
    ],
)
def test_check_takes_the_data_of_any_recipe(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str], data: str
) -> None:
    assert main(["check", tiny(f"'data': {data},"), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 6


def test_check_refuses_what_it_cannot_use(tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", tiny("'data': (torch.randn(1, 4), torch.randn(1, 1)),"), "--device", "cpu"]) == 2
    assert "at least 2 samples" in capsys.readouterr().err
    assert main(["check", tiny(), "--device", "gpu"]) == 2
    assert main(["check", tiny(), "--lr", "3"]) == 2
    assert main(["check", "not_there.py"]) == 2
    assert main(["check", tiny("'loss_fn': lambda outputs, targets: outputs,"), "--device", "cpu"]) == 1


# Memory of past runs.


def test_cache_shows_what_runs_left_and_clear_empties_it(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = os.environ["AUTOACCUM_CACHE_DIR"]
    searching = ["fit", tiny("'effective_batch': 8,"), "--micro-batch", "auto", *QUIET]
    assert main([*searching, "--no-cache"]) == 0
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{where}: 0 files, 0 B\n"
    assert main(searching) == 0
    assert main(["cache", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    (file,) = Path(where).iterdir()
    assert shown == {"directory": where, "num_files": 1, "bytes": file.stat().st_size}
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.startswith(f"{where}: 1 file, ")
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": where, "removed_files": 1}
    assert list(Path(where).iterdir()) == []
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"{where}: removed 0 files\n"


def test_a_cache_that_cannot_be_cleared_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    where = Path(os.environ["AUTOACCUM_CACHE_DIR"])
    where.mkdir()
    (where / f"trials-{'0' * 32}.json").write_text("")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: [Errno 13] Permission denied: ")
    assert err.count("\n") == 1


def test_a_seed_that_is_given_is_that_of_the_recipe_too(
    tiny: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*given: str) -> float:
        assert main(["fit", recipe, "--device", "cpu", "--run-dir", "none", "--json", *given]) == 0
        return float(json.loads(capsys.readouterr().out)["history"][0]["loss"])

    recipe = tiny("'effective_batch': 8,")
    Path(recipe).write_text(Path(recipe).read_text().replace("    torch.manual_seed(0)\n", ""))
    assert loss("--seed", "0") == loss("--seed", "0") != loss("--seed", "1")
    unseeded = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        unseeded.append(loss())
    assert unseeded[0] != unseeded[1], "without it the recipe draws on from where it is"
    assert main(["fit", recipe, "--device", "cpu", "--seed", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: --seed -1: expected an int of at least 0")
