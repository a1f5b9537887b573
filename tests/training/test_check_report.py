"""What a check has found, as plain data and as text."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

from autoaccum.training.check import CheckedCut, CheckReport, format_error
from tests.models import mlp
from tests.training.checks import DOUBLE, check


class TestReport:
    def test_is_plain_data(self) -> None:
        report = check(mlp(DOUBLE))
        document = json.loads(json.dumps(dataclasses.asdict(report)))
        assert document["passed"] is True
        assert document["cuts"][0] == {"sizes": [1, 2, 3], "error": report.cuts[0].error}
        assert document["hypotheses"] == dict(report.hypotheses)
        assert hash(report) == hash(dataclasses.replace(report))
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.passed = False  # type: ignore[misc]

    def test_as_text(self) -> None:
        report = CheckReport(
            passed=True, hypothesis="items", error=3e-17, tolerance=1e-9, tensor="6", samples=6,
            cuts=(CheckedCut(sizes=(1, 2, 3), error=3e-17), CheckedCut(sizes=(2, 4), error=0.0)),
            hypotheses={"items": 3e-17, "sum": 0.5}, tensors={str(n): n * 5e-18 for n in range(6, -1, -1)},
            accumulate="weighted", reason=None, held=None, notice=None, seconds=0.012,
        )  # fmt: skip
        assert str(report) == (
            "EXACT: split batches have the gradient of the full batch\n\n"
            "  the loss     a mean over its items\n"
            "  error        3e-17, relative to the gradient (up to 1e-09 is rounding)\n"
            "  measured     on 6 samples, in 0.012 s\n\n"
            "  split into     error\n"
            "  1 + 2 + 3      3e-17\n"
            "  2 + 4              0\n\n"
            "  if the loss were          error\n"
            "  a mean over its items     3e-17\n"
            "  a sum over samples         50 %  ruled out\n\n"
            "  parameter     error\n"
            "  6             3e-17\n"
            "  5           2.5e-17\n"
            "  4             2e-17\n"
            "  3           1.5e-17\n"
            "  2             1e-17\n"
            "  and 2 more, with smaller errors"
        )

    @pytest.mark.weighted
    def test_of_a_failure_it_begins_with_what_to_do(self) -> None:
        report = check(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
        lines = str(report).splitlines()
        assert lines[0].startswith("NOT EXACT: ")
        assert lines[2].startswith("  cause        The model holds 1 BatchNorm")
        assert any(line.startswith("  cure         Pass accumulate='joined'") for line in lines)
        assert any(line.endswith("not exact") and "2 + 4" in line for line in lines)
        assert all(len(line) <= 100 for line in lines)

    def test_of_joined_micro_batches_it_says_why_and_what_they_hold(self) -> None:
        report = check(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
        assert (report.passed, report.accumulate, report.hypothesis) == (True, "joined", None)
        lines = str(report).splitlines()
        assert lines[0].startswith("EXACT: ")
        assert lines[2].startswith("  joined       the loss is computed once")
        assert lines[3].startswith("  reason       The model holds 1 BatchNorm")
        assert report.held is not None
        assert report.held > 0

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (0.0, "0"),
            (3e-17, "3e-17"),
            (0.0009, "0.0009"),
            (0.273, "27 %"),
            (0.999, "100 %"),
            (5.214, "521 %"),
            (1e5, "1e+05"),
        ],
    )
    def test_errors_are_short(self, error: float, text: str) -> None:
        assert format_error(error) == text
