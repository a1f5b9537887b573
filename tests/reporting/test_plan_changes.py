"""Plans of a run, and when they changed."""

from __future__ import annotations

from pathlib import Path

from autoaccum.events import Replanned
from autoaccum.reporting import load_run
from autoaccum.reporting.plan_changes import Period, last_reason, periods
from tests.reporting.synthetic import MIB, planned, report, write

PLAN = planned(4, 4, step=1, predicted_bytes=110 * MIB)


def test_periods_begin_with_plans_and_replans(tmp_path: Path) -> None:
    """A re-plan that keeps the micro-batch keeps its prediction."""
    write(
        tmp_path,
        report(1),
        PLAN,
        report(2),
        Replanned(step=3, old=(4, 4), new=(4, 4, 4), reason="the effective batch is 12 now"),
        report(3),
        Replanned(step=4, old=(4, 4, 4), new=(3,) * 4, reason="out of memory"),
        report(4),
        report(5),
    )
    assert periods(load_run(tmp_path)) == [
        Period(first=1, end=3, micro_batch=4, predicted_bytes=110 * MIB),
        Period(first=3, end=5, micro_batch=3, predicted_bytes=None),
    ]


def test_the_last_reason_is_that_of_the_plan_that_stands(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    assert last_reason(load_run(tmp_path)) is None
    write(tmp_path, planned(8, step=1, reason="the full batch fits"), report(2, (8,)))
    assert last_reason(load_run(tmp_path)) == "the full batch fits"
    write(tmp_path, Replanned(step=3, old=(8,), new=(16,), reason="the effective batch is 16 now"))
    assert last_reason(load_run(tmp_path)) == "the full batch fits", "the schedule changes no plan"
    write(tmp_path, Replanned(step=3, old=(16,), new=(8, 8), reason="out of memory"))
    assert last_reason(load_run(tmp_path)) == "out of memory"
