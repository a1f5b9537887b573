"""Tables of runs side by side: what is the same in all of them is told once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from autoaccum.reporting import Run, load_run
from autoaccum.reporting.facts import Best, facts_of
from autoaccum.reporting.tables import compared, differences, flat, row_of, without_trained
from tests.reporting.synthetic import report, shared, verified, write
from tests.reporting.test_page import Page


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(write(tmp_path / "run", report(1), shared(), verified(1e-7)))


def test_columns_that_are_the_same_are_told_below(run: Run) -> None:
    rows = [row_of(at, replace(facts_of(run), loss=loss), str(at)) for at, loss in enumerate((0.5, 0.25))]
    page = Page(compared(rows))
    assert page.rows == [["run", "loss at the end"], ["0", "0.5"], ["1", "0.25"]]
    assert "gradient off by 1.0e-07 · ranks 2" in page.text
    assert "steps 1 ·" in page.text
    assert "best validation" not in page.text, "nobody has one"


def test_a_best_validation_by_a_metric_is_shown_with_its_name(run: Run) -> None:
    best = [Best(metric=metric, value=0.25, step=1, epoch=0) for metric in ("loss", "accuracy")]
    rows = [row_of(at, replace(facts_of(run), best=one), str(at)) for at, one in enumerate(best)]
    assert Page(compared(rows)).rows == [["run", "best validation"], ["0", "0.25"], ["1", "accuracy 0.25"]]


def test_numbers_stand_to_the_right_whatever_is_left_out(run: Run) -> None:
    rows = [row_of(at, replace(facts_of(run), loss=loss), str(at)) for at, loss in enumerate((0.5, 0.25))]
    assert compared(rows).count('<td class="number">') == 2
    assert compared(rows).count('<td class="cut">') == 2


def difference(run: Run, *settings: tuple[dict[str, Any], dict[str, Any]]) -> list[list[str]]:
    runs = [replace(run, config=config, environment=environment) for config, environment in settings]
    return Page(differences(runs, [str(at) for at in range(len(runs))])).rows


def test_only_what_differs_is_shown_each_entry_by_itself(run: Run) -> None:
    one = {
        "lr": 0.1,
        "seed": 0,
        "run_dir": "a",
        "trained": {"seed": 0, "model": {"0.weight": "(2, 3)", "0.bias": "(3,)"}},
    }
    two = {
        "lr": 0.2,
        "seed": 1,
        "run_dir": "b",
        "trained": {"seed": 1, "model": {"0.weight": "(2, 4)", "0.bias": "(3,)"}},
    }
    known = {"torch": "2.13", "started": "1", "commit": "a", "details": {"content": "f00"}}
    assert difference(run, (one, known), (two, {**known, "started": "2", "commit": "<b>", "details": {}})) == [
        ["", "0", "1"],
        ["lr", "0.1", "0.2"],
        ["seed", "0", "1"],
        ["model 0.weight", "(2, 3)", "(2, 4)"],
        ["commit", "a", "<b>"],
    ]  # fmt: skip


def test_where_nothing_differs_there_is_no_table(run: Run) -> None:
    assert difference(run, ({"lr": 0.1}, {}), ({"lr": 0.1}, {})) == []


def test_what_was_made_of_an_argument_is_not_told_beside_it(run: Run) -> None:
    made = [{"lr": lr, "trained": {"optimizer": {"group 0": {"lr": lr, "betas": lr}}}} for lr in (0.1, 0.2)]
    assert difference(run, (made[0], {}), (made[1], {})) == [
        ["", "0", "1"],
        ["lr", "0.1", "0.2"],
        ["optimizer group 0 betas", "0.1", "0.2"],
    ]  # fmt: skip
    other = {**made[1], "lr": 0.3}
    assert ["optimizer group 0 lr", "0.1", "0.2"] in difference(run, (made[0], {}), (other, {}))


def test_the_lr_that_a_scheduler_has_made_for_the_first_step_is_left_out() -> None:
    group = {"parameters": 4, "lr": 0.0008, "initial_lr": 0.007}
    config = {"optimizer": None, "lr": 0.007, "trained": {"optimizer": {"class": "AdamW", "group 0": group}}}
    assert flat(without_trained(config)) == {
        "optimizer class": "AdamW",
        "lr": 0.007,
        "optimizer group 0 parameters": 4,
        "optimizer group 0 initial_lr": 0.007,
    }
    edited = {"trained": {"optimizer": "mine"}}
    assert without_trained(edited) == {"optimizer": "mine"}
