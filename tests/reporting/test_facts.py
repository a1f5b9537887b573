"""What is said of a run is what its records say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoaccum.events import Finished, Notice, OutOfMemory, Recomputed, Record, Replanned, Resumed, Shared, Validated
from autoaccum.reporting import load_run, write_json
from autoaccum.reporting.facts import Facts, Period, facts_of, periods
from autoaccum.verification.notices import (
    doubt_notice,
    dropped_notice,
    joined_notice,
    ones_notice,
    part_of_state_notice,
    uncounted_notice,
    unmeasured_notice,
)
from tests.reporting.synthetic import GIB, planned, report, saving, started, verified, write

MIB = 2**20


def validated(step: int, loss: float, **metrics: float) -> Validated:
    return Validated(step=step, epoch=0, loss=loss, metrics=metrics, num_samples=5, micro_batch=3, seconds=2.0)


@pytest.fixture
def of(tmp_path: Path) -> Any:
    def facts(*records: Record) -> Facts:
        return facts_of(load_run(write(tmp_path / "run", *records)))

    return facts


def answer(facts: Facts, question: str) -> tuple[str, bool | None]:
    (found,) = [(a.text, a.good) for a in facts.answers if question in a.question]
    return found


def test_gradients_that_a_notice_tells_to_be_wrong_are_not_called_exact(of: Any) -> None:
    """Micro-batches that were measured by themselves are told by their notices alone."""
    others = [unmeasured_notice("it was too large"), part_of_state_notice(), doubt_notice("it divides by 1", "Do")]
    others.append(
        Notice(cause="The loss of 6 samples is 3 % off where they are cut otherwise", consequence="", cure="")
    )
    text, good = answer(of(started(), report(1), verified(1e-9), *others), "exact")
    assert (text.startswith("Yes: "), good) == (True, True)
    for told in (ones_notice, uncounted_notice, dropped_notice, lambda error: joined_notice(error, 8, None)):
        for error in (0.51, 1e-4, math.inf, 5.2):
            notice = told(error)
            text, good = answer(of(started(), report(1), verified(1e-9), notice), "exact")
            assert text.startswith("Not always: cut windows were measured")
            assert text.endswith(f" But: {notice.cause}.")
            assert good is False


def test_the_numbers(of: Any, tmp_path: Path) -> None:
    write(tmp_path / "run")
    write_json(tmp_path / "run" / "config.json", {"model": "MLP", "effective_batch": "8, 10:16"})
    write_json(tmp_path / "run" / "environment.json", {"device": "cpu x86_64"})
    windows = [report(step, seconds=0.5) for step in range(1, 41)]
    facts = of(started(), *windows, validated(20, 0.2), validated(40, 0.3), Finished(step=40, reason="budget"))
    assert (facts.name, facts.state, facts.model, facts.device) == ("run", "finished", "MLP", "cpu x86_64")
    assert facts.effective_batch == "8, 10:16"
    assert (facts.num_steps, facts.num_samples, facts.seconds, facts.samples_per_second) == (40, 320, 20.0, 16.0)
    assert facts.loss == pytest.approx((2 / 39 + 2 / 40) / 2)
    assert (facts.validation_loss, facts.best_validation_loss) == (0.3, 0.2)
    assert (facts.peak_bytes, facts.limit_share) == (40 * MIB, 40 / 1024)


def test_what_no_configuration_tells_is_taken_from_the_records(of: Any) -> None:
    facts = of(started(), report(1), report(2, (5, 5)), report(3, (3, 3)))
    assert (facts.model, facts.effective_batch, facts.device) == ("", "6 to 10", "cpu")


def test_a_short_last_window_is_not_the_effective_batch(of: Any) -> None:
    assert of(report(1), report(2), report(3, (3,))).effective_batch == "8"


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (Finished(step=1, reason="budget"), "finished"),
        (Finished(step=1, reason="interrupted"), "interrupted"),
        (Finished(step=1, reason="stopped"), "stopped"),
        (report(2), "running or killed: last record 1 min 15 s ago"),
    ],
)
def test_the_state(last: Record, state: str, tmp_path: Path) -> None:
    run = load_run(write(tmp_path, started(), report(1), last))
    assert run.last_time is not None
    assert facts_of(run, now=run.last_time + 75.2).state == state


def test_a_run_without_a_window(of: Any) -> None:
    facts = of()
    assert [a.text for a in facts.answers] == ["No window has committed yet."]
    assert facts.state == "nothing recorded yet"
    assert (facts.loss, facts.samples_per_second, facts.limit_share) == (None, None, None)
    assert of(started()).device == "cpu"


def test_within_memory(of: Any) -> None:
    facts = of(report(1, peak_bytes=GIB // 4), report(2, peak_bytes=GIB // 2, limit_bytes=2 * GIB))
    text = "Yes: it used at most 25% of the limit (256.00 MiB of 1.00 GiB, step 1); its largest peak was 512.00 MiB, step 2."
    assert answer(facts, "within memory") == (text, True)


@pytest.mark.parametrize(
    ("records", "config", "why"),
    [
        ([report(1, (8,)), report(2, (8,))], {}, ": none was cut"),
        ([report(1, (4, 4))], {}, ""),
        ([report(1, (4, 4))], {"verify": False}, ": verify=False was asked for"),
        (
            [
                report(1, (4, 4)),
                Notice(
                    cause="It could not be measured whether windows are exact: it draws", consequence="so", cure="it"
                ),
            ],
            {"verify": True},
            ": it draws",
        ),
    ],
)
def test_why_nothing_was_measured(
    of: Any, tmp_path: Path, records: list[Record], config: dict[str, Any], why: str
) -> None:
    write(tmp_path / "run")
    write_json(tmp_path / "run" / "config.json", config)
    expected = f"No cut window was measured against a whole one{why}."
    assert answer(of(*records), "exact") == (expected, None)


def test_over_the_limit(of: Any) -> None:
    text, good = answer(of(report(1), report(2, peak_bytes=3 * GIB), report(3)), "within memory")
    assert (
        text
        == "Not always: 1 of 3 windows went over the limit, up to 300% of the limit (3.00 GiB of 1.00 GiB, step 2)."
    )
    assert good is False


def test_out_of_memory(of: Any) -> None:
    failed = OutOfMemory(step=2, phase="training", micro_batch=4)
    text, good = answer(of(report(1), failed, failed, report(2, (2,) * 4, replays=1)), "within memory")
    assert text.endswith("The device ran out of memory twice; 1 window was replayed, and no sample lost.")
    assert text.startswith("Not always: it used")
    assert good is False


def test_a_run_that_died_of_it(of: Any) -> None:
    text, _ = answer(of(report(1), OutOfMemory(step=2, phase="training", micro_batch=4)), "within memory")
    assert text.endswith("step 1). The device ran out of memory once.")


PLAN = planned(4, 4, step=1, predicted_bytes=110 * MIB)


def test_a_prediction_is_compared_with_what_its_plan_took(of: Any) -> None:
    """Not with what was before it, nor with smaller micro-batches."""
    small = report(4, (1, 1), peak_bytes=900 * MIB)
    facts = of(
        report(1, peak_bytes=500 * MIB), PLAN, report(2, peak_bytes=90 * MIB), report(3, peak_bytes=100 * MIB), small
    )
    assert facts.prediction_error == pytest.approx(0.1)
    text, good = answer(facts, "foreseen")
    assert text == "110.00 MiB were predicted for micro-batches of 4, and 100.00 MiB were measured: 10.0% too high."
    assert good is False


def test_of_several_predictions_the_worst_counts(of: Any) -> None:
    facts = of(
        report(1),
        planned(4, 4, step=1, predicted_bytes=90 * MIB),
        report(2, peak_bytes=100 * MIB),
        Replanned(step=3, old=(4, 4), new=(2,) * 4, reason="out of memory"),
        report(3, (2,) * 4, peak_bytes=1),
        planned(2, 2, 2, 2, step=3, predicted_bytes=101 * MIB),
        report(4, (2,) * 4, peak_bytes=100 * MIB),
    )
    text, good = answer(facts, "foreseen")
    assert text == (
        "101.00 MiB were predicted for micro-batches of 2, and 100.00 MiB were measured: 1.0% too high. "
        "The worst of 2 predictions was 10.0% too low."
    )
    assert good is False


def test_of_several_predictions_the_last_may_be_the_worst(of: Any) -> None:
    facts = of(
        report(1), PLAN, report(2, peak_bytes=110 * MIB), planned(8, step=2, predicted_bytes=100), report(3, (8,))
    )
    assert answer(facts, "foreseen")[0].endswith("too low. None of 2 predictions was further off.")


def test_a_good_prediction(of: Any) -> None:
    facts = of(report(1), PLAN, report(2, peak_bytes=110 * MIB))
    assert answer(facts, "foreseen")[0].endswith("measured: right.")
    assert answer(facts, "foreseen")[1] is True


def test_no_prediction(of: Any) -> None:
    cases: Any = ((report(1),), (planned(4, 4), report(2)), (report(1), PLAN))
    for records in cases:
        text, good = answer(of(*records), "foreseen")
        assert text.startswith("There is no prediction to compare: no ")
        assert ("cut as the plan" in text) == (PLAN in records)
        assert good is None


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


def test_what_an_epoch_leaves_is_no_effective_batch_of_a_schedule(of: Any) -> None:
    grown = Replanned(step=3, old=(4, 4), new=(4,) * 4, reason="the effective batch is 16 now")
    windows = [report(1), report(2, (3,)), grown, report(3, (4,) * 4, epoch=1), report(4, (2,), epoch=1)]
    facts = of(planned(4, 4, step=1), *windows)
    assert "The effective batch changed once (8 to 16)." in answer(facts, "What changed")[0]


def test_what_changed(of: Any) -> None:
    facts = of(
        report(1),
        planned(4, 4, step=1, reason="larger micro-batches do not fit"),
        report(2),
        Replanned(step=3, old=(4, 4), new=(2,) * 4, reason="out of memory"),
        Replanned(step=3, old=(2,) * 4, new=(1,) * 8, reason="out of memory"),
        Replanned(step=3, old=(1,) * 8, new=(1,) * 16, reason="the effective batch is 16 now"),
        report(3, (1,) * 16),
        Replanned(step=4, old=(1,) * 16, new=(3,) * 5 + (1,), reason="there is room for more"),
        report(4, (3,) * 5 + (1,)),
        Resumed(step=3, num_samples=24, checkpoint="c"),
        report(4, (2,) * 8),
    )
    assert answer(facts, "What changed")[0] == (
        "It settled on 4 x 2 after 1 window, for larger micro-batches do not fit. It re-planned twice: out of memory "
        "(2 times); from 4 x 2 to 1 x 8. The effective batch changed once (8 to 16). It was resumed once; 1 window had "
        "to be run again."
    )
    assert (facts.num_replans, facts.num_out_of_memory) == (2, 0)


def test_full_windows_are_compared_with_each_other(of: Any) -> None:
    """The last window of an epoch has fewer samples, and plans of its own."""
    records = (
        planned(4, 4, step=1),
        report(2),
        Replanned(step=3, old=(4, 4), new=(3, 3, 2), reason="out of memory"),
        report(3, (3, 3, 2)),
        Replanned(step=4, old=(3, 3), new=(2, 2, 2), reason="out of memory"),
        report(4, (2, 2, 2)),
    )
    told = answer(of(report(1), *records), "What changed")[0]
    assert told.endswith("It re-planned twice: out of memory (2 times); from 4 x 2 to 2-3 x 3 in windows of 8 samples.")
    again = planned(3, 3, 2, step=4, reason="it stands")
    assert "another plan" not in answer(of(again), "What changed")[0]


def test_every_plan_that_was_settled_on_is_told(of: Any) -> None:
    first = planned(4, 4, step=1, reason="larger micro-batches do not fit")
    records = (report(1), first, report(2), planned(4, 4, step=2), saving(step=3))
    assert answer(of(*records), "What changed")[0].startswith(
        "It settled on 4 x 2 after 1 window, for larger micro-batches do not fit. Nothing made it re-plan."
    )
    told = answer(of(planned(8, step=3, reason="the full batch fits")), "What changed")[0]
    assert told.startswith(
        "It settled on 4 x 2 after 1 window, for larger micro-batches do not fit. "
        "It settled on another plan once: 8 x 1 after 3 windows, for the full batch fits. How memory is saved"
    )
    told = answer(of(planned(4, 4, step=3, reason="r")), "What changed")[0]
    assert "It settled on another plan twice, the last time 4 x 2 after 3 windows, for r. How memory" in told


def test_windows_that_tried_other_plans_between_two_are_told(of: Any) -> None:
    """As where times were not those by which the first was chosen: it is not what ran until the second was settled."""
    records = [report(1), planned(4, 4, step=1), report(2), report(3, (8,)), report(4, (2,) * 4), report(5, (3,))]
    facts = of(*records, planned(8, step=5, reason="s"), report(6, (8,)))
    told = answer(facts, "What changed")[0]
    assert told == (
        "It settled on 4 x 2 after 1 window, for r. It settled on another plan once: 8 x 1 after 5 windows, for s; "
        "2 windows in between tried other plans."
    )


def test_windows_of_different_lengths_are_each_cut_by_their_own(of: Any) -> None:
    """Those after a plan are not cut as it is, and are what it foretold: none of them has tried anything."""
    first = planned(1, 3, 4, step=1, predicted_bytes=90 * MIB)
    windows = [report(2, (2, 6), peak_bytes=100 * MIB), report(3, (1, 2, 5), peak_bytes=80 * MIB)]
    facts = of(report(1), first, *windows, planned(2, 6, step=3), report(4, (3, 5)))
    assert answer(facts, "foreseen")[0] == (
        "90.00 MiB were predicted for micro-batches of up to 4, cut by length, and 100.00 MiB were measured: 10.0% too low."
    )
    assert answer(facts, "What changed")[0] == (
        "It settled on micro-batches by length, as 1-4 x 3, after 1 window, for r. It settled on another plan once: "
        "micro-batches by length, as 2-6 x 2, after 3 windows, for r."
    )


def test_of_several_ranks_it_is_said_what_is_rank_0s(of: Any) -> None:
    told = Shared(
        step=2, micro_batches=((4,), (4,)), peak_bytes=(MIB, 3 * GIB), limit_bytes=(GIB, 2 * GIB),
        busy_seconds=(1.0, 1.0), waited_seconds=(0.0, 0.0),
    )  # fmt: skip
    facts = of(report(1), planned(3, 1, step=1, predicted_bytes=MIB), report(2), told)
    assert answer(facts, "within memory") == (
        "Not always: rank 0 used at most 0% of the limit (2.00 MiB of 1.00 GiB, step 2). Of the others rank 1 used the "
        "most, 150% (3.00 GiB of 2.00 GiB).",
        False,
    )
    assert "the plan is rank 0's, and windows hold the micro-batches of all ranks" in answer(facts, "foreseen")[0]
    assert answer(facts, "What changed")[0].endswith("Nothing made rank 0 re-plan.")


def test_nothing_changed(of: Any) -> None:
    assert answer(of(report(1)), "What changed")[0] == "Nothing made it re-plan."


def test_how_memory_was_saved_is_told(of: Any) -> None:
    told = "How memory is saved changed once: it is every second block since step 2 (out of memory)"
    assert answer(of(report(1), saving(step=2), report(2)), "What changed")[0] == f"Nothing made it re-plan. {told}."


def test_that_a_second_forward_was_measured_is_told(of: Any) -> None:
    done = Recomputed(step=3, saving="every second block", operations=1200)
    told = answer(of(report(1), saving(step=2), report(2), done), "What changed")[0]
    assert "(out of memory); what is computed twice came to the same bits, measured on 1,200 operations." in told


def test_how_fast(of: Any) -> None:
    windows = [report(step, seconds=0.5 if step <= 37 else 0.25) for step in range(1, 41)]
    measured = replace(verified(1e-7, step=1), seconds=3.0)
    text, _ = answer(of(measured, *windows[:-1], report(40, seconds=0.25, replays=1), validated(40, 1.0)), "fast")
    assert text == (
        "16.62 samples/s over 19.2 s of training; a window took 500 ms (median). In the last tenth it was 25.6 samples/s. "
        "Windows that were replayed took 1.3% of the time. Validation took 2.0 s besides. To measure that gradients are "
        "exact took 3.0 s besides."
    )


def test_it_learned(of: Any) -> None:
    windows = [report(step) for step in range(1, 41)]
    text, good = answer(of(*windows, validated(10, 0.5), validated(20, 0.25), validated(40, 0.75)), "learn")
    assert text == (
        "Yes: the training loss went from 1.5 to 0.05064 (means of the first and the last 2 windows). "
        "The validation loss is 0.75; its best was 0.25, 160 samples in."
    )
    assert good is True
    assert answer(of(validated(40, 0.1)), "learn")[0].endswith("The validation loss is 0.1, its best.")


def test_the_last_metrics_are_told_beside_the_validation_loss(of: Any) -> None:
    facts = of(report(1), validated(1, 0.5, accuracy=0.5), report(2), validated(2, 0.25, accuracy=0.953, f1=0.75))
    assert answer(facts, "learn")[0].endswith(
        "The validation loss is 0.25, its best. The last validation's metrics: accuracy 0.953, f1 0.75."
    )
    assert facts.metrics == {"accuracy": 0.953, "f1": 0.75}
    assert "metrics" not in answer(of(report(3), validated(3, 0.5)), "learn")[0]


def test_outputs_at_the_end_are_told_beside_the_loss(of: Any) -> None:
    windows = [report(step, outputs={"accuracy": step / 100, "bad": math.nan}) for step in range(1, 41)]
    facts = of(*windows)
    assert facts.outputs == {"accuracy": pytest.approx(0.395)}, "a mean over the last twentieth, as the loss is"
    assert "windows). Beside it at the end: accuracy 0.395." in answer(facts, "learn")[0]


def test_it_did_not_learn(of: Any) -> None:
    text, good = answer(of(report(1, loss=1.0), report(2, loss=1.5)), "learn")
    assert text == "Not yet: the training loss went from 1 to 1.5."
    assert good is False


def test_losses_that_are_no_numbers_are_told_and_left_out(of: Any) -> None:
    windows = [report(step, loss=math.nan if step in (3, 40) else 1 / step) for step in range(1, 41)]
    text, good = answer(of(*windows), "learn")
    assert text.startswith("The training loss went from 0.75 to 0.02564 (")
    assert text.endswith("The loss of 2 windows was NaN or infinite, the first in step 3.")
    assert good is False
    text, good = answer(of(report(1, loss=math.inf)), "learn")
    assert text == "The loss of 1 window was NaN or infinite, the first in step 1."
    assert good is False
