"""Each answer is what the records say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoaccum.events import Finished, Notice, OutOfMemory, Recomputed, Record, Replanned, Resumed, Shared
from autoaccum.reporting import write_json
from autoaccum.reporting.facts import Facts
from autoaccum.verification.notices import (
    doubt_notice,
    joined_notice,
    part_of_state_notice,
    unmeasured_notice,
)
from tests.reporting.synthetic import GIB, MIB, planned, report, saving, started, validated, verified, write


def answer(facts: Facts, question: str) -> tuple[str, bool | None]:
    (found,) = [(a.text, a.good) for a in facts.answers if question in a.question]
    return found


PLAN = planned(4, 4, step=1, predicted_bytes=110 * MIB)


def test_gradients_that_a_notice_tells_to_be_wrong_are_not_called_exact(of: Any, of_new: Any) -> None:
    """Micro-batches that were measured by themselves are told by their notices alone."""
    others = [unmeasured_notice("it was too large"), part_of_state_notice(), doubt_notice("it divides by 1", "Do")]
    others.append(
        Notice(cause="The loss of 6 samples is 3 % off where they are cut otherwise", consequence="", cure="")
    )
    text, good = answer(of(started(), report(1), verified(1e-9), *others), "exact")
    assert (text.startswith("Yes: "), good) == (True, True)
    for error in (0.51, 1e-4, math.inf, 5.2):
        notice = joined_notice(error, 8, None)
        text, good = answer(of(started(), report(1), verified(1e-9), notice), "exact")
        measured = "No: measured once, relative error 1.0e-09 (2e-05 allowed). But a notice reports an error."
        assert (text, good) == (f"{measured} {notice.cause}.", False)
        told_alone = answer(of_new(report(1), notice), "exact")
        assert told_alone == (f"No: a notice reports an error. {notice.cause}.", False)


def test_within_memory(of: Any) -> None:
    facts = of(report(1, peak_bytes=GIB // 4), report(2, peak_bytes=GIB // 2, limit_bytes=2 * GIB))
    text = "Yes: the peak was 25% of the limit (256.00 MiB of 1.00 GiB, step 1). The largest peak was 512.00 MiB (step 2), at a higher limit."
    assert answer(facts, "within memory") == (text, True)
    facts = of(report(3, peak_bytes=GIB, limit_bytes=2 * GIB), report(4, peak_bytes=GIB + MIB, limit_bytes=3 * GIB))
    text = "Yes: the peak was 50% of the limit (1.00 GiB of 2.00 GiB, step 3)."
    assert answer(facts, "within memory") == (text, True), "nearly as much is no news"


@pytest.mark.parametrize(
    ("records", "config", "why"),
    [
        ([report(1, (8,)), report(2, (4, 4))], {}, ""),
        ([report(1, (4, 4))], {"verify": False}, ": verify=False was passed"),
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
    assert answer(of(*records), "exact") == (f"Not measured{why}.", None)


def test_gradients_of_batches_that_were_not_split_are_exact(of: Any) -> None:
    assert answer(of(report(1, (8,)), report(2, (8,))), "exact") == ("Yes: no batch was split.", True)


def test_gradients_that_were_measured(of: Any) -> None:
    text = "Yes: measured once, relative error 4.2e-07 (2e-05 allowed)."
    assert answer(of(report(1), verified(4.2e-7)), "exact") == (text, True)
    text = "Yes: measured twice, relative error at most 2.0e-05 (explained by rounding)."
    assert answer(of(verified(2e-5)), "exact") == (text, True)
    text = "No: measured 3 times, relative error at most 2.7e-01 (2e-05 allowed). 1 measurement failed, the last in step 3."
    assert answer(of(verified(0.27, step=3)), "exact") == (text, False)


def test_over_the_limit(of: Any) -> None:
    text, good = answer(of(report(1), report(2, peak_bytes=3 * GIB), report(3)), "within memory")
    assert text == "No: 1 of 3 steps exceeded the limit. The peak was 300% of the limit (3.00 GiB of 1.00 GiB, step 2)."
    assert good is False


def test_out_of_memory(of: Any) -> None:
    failed = OutOfMemory(step=2, phase="training", micro_batch=4)
    text, good = answer(of(report(1), failed, failed, report(2, (2,) * 4, replays=1)), "within memory")
    told = (
        "No: the device ran out of memory twice. 1 step was replayed; no sample was lost. The peak was 0% of the limit"
    )
    assert text == f"{told} (2.00 MiB of 1.00 GiB, step 2)."
    assert good is False


def test_a_run_that_died_of_it(of: Any) -> None:
    text, _ = answer(of(report(1), OutOfMemory(step=2, phase="training", micro_batch=4)), "within memory")
    assert text.startswith("No: the device ran out of memory once. The peak was")


def test_a_prediction_is_compared_with_what_its_plan_took(of: Any) -> None:
    """Not with what was before it, nor with smaller micro-batches."""
    small = report(4, (1, 1), peak_bytes=900 * MIB)
    facts = of(
        report(1, peak_bytes=500 * MIB), PLAN, report(2, peak_bytes=90 * MIB), report(3, peak_bytes=100 * MIB), small
    )
    assert facts.prediction_error == pytest.approx(0.1)
    text, good = answer(facts, "predicted well")
    assert text == "No: 110.00 MiB predicted, 100.00 MiB measured for micro-batches of 4 (10.0% too high)."
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
    text, good = answer(facts, "predicted well")
    assert text == (
        "No: 101.00 MiB predicted, 100.00 MiB measured for micro-batches of 2 (1.0% too high). "
        "The worst of 2 predictions was 10.0% too low."
    )
    assert good is False


def test_of_several_predictions_the_last_may_be_the_worst(of: Any) -> None:
    facts = of(
        report(1), PLAN, report(2, peak_bytes=110 * MIB), planned(8, step=2, predicted_bytes=100), report(3, (8,))
    )
    assert answer(facts, "predicted well")[0].endswith("too low). None of 2 predictions was worse.")


def test_a_good_prediction(of: Any) -> None:
    facts = of(report(1), PLAN, report(2, peak_bytes=110 * MIB))
    text = "Yes: 110.00 MiB predicted, 110.00 MiB measured for micro-batches of 4 (exact)."
    assert answer(facts, "predicted well") == (text, True)


def test_no_prediction(of: Any) -> None:
    none = "Not measured: no plan has a prediction (sizes were given, or the search had not ended)."
    assert answer(of(report(1)), "predicted well") == (none, None)
    assert answer(of(planned(4, 4), report(2)), "predicted well") == (none, None)
    text = "Not measured: no step ran with the predicted plan."
    assert answer(of(planned(4, 4, step=2, predicted_bytes=5)), "predicted well") == (text, None)


def test_what_an_epoch_leaves_is_no_effective_batch_of_a_schedule(of: Any) -> None:
    grown = Replanned(step=3, old=(4, 4), new=(4,) * 4, reason="the effective batch is 16 now")
    windows = [report(1), report(2, (3,)), grown, report(3, (4,) * 4, epoch=1), report(4, (2,), epoch=1)]
    facts = of(planned(4, 4, step=1), *windows)
    assert "The effective batch changed once (8 to 16)." in answer(facts, "plan change")[0]


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
    assert answer(facts, "plan change")[0] == (
        "Yes: the run settled on 4 x 2 after 1 step (larger micro-batches do not fit). The run re-planned twice: out of "
        "memory (2 times); from 4 x 2 to 1 x 8. The effective batch changed once (8 to 16). The run resumed once; 1 step "
        "ran again."
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
    told = answer(of(report(1), *records), "plan change")[0]
    assert told.endswith("re-planned twice: out of memory (2 times); from 4 x 2 to 2-3 x 3 in batches of 8 samples.")
    again = planned(3, 3, 2, step=4, reason="it stands")
    assert "another plan" not in answer(of(again), "plan change")[0]


def test_every_plan_that_was_settled_on_is_told(of: Any) -> None:
    first = planned(4, 4, step=1, reason="larger micro-batches do not fit")
    records = (report(1), first, report(2), planned(4, 4, step=2), saving(step=3))
    assert answer(of(*records), "plan change")[0].startswith(
        "Yes: the run settled on 4 x 2 after 1 step (larger micro-batches do not fit). Memory saving changed once: "
    )
    told = answer(of(planned(8, step=3, reason="the full batch fits")), "plan change")[0]
    assert told.startswith(
        "Yes: the run settled on 4 x 2 after 1 step (larger micro-batches do not fit). "
        "It settled on another plan once: 8 x 1 after 3 steps (the full batch fits). Memory saving changed"
    )
    told = answer(of(planned(4, 4, step=3, reason="r")), "plan change")[0]
    assert "It settled on another plan twice, the last time 4 x 2 after 3 steps (r). Memory saving" in told


def test_windows_that_tried_other_plans_between_two_are_told(of: Any) -> None:
    """As where times were not those by which the first was chosen: it is not what ran until the second was settled."""
    records = [report(1), planned(4, 4, step=1), report(2), report(3, (8,)), report(4, (2,) * 4), report(5, (3,))]
    facts = of(*records, planned(8, step=5, reason="s"), report(6, (8,)))
    told = answer(facts, "plan change")[0]
    assert told == (
        "Yes: the run settled on 4 x 2 after 1 step (r). It settled on another plan once: 8 x 1 after 5 steps (s); "
        "2 steps in between tried other plans."
    )


def test_windows_of_different_lengths_are_each_cut_by_their_own(of: Any) -> None:
    """Those after a plan are not cut as it is, and are what it foretold: none of them has tried anything."""
    first = planned(1, 3, 4, step=1, predicted_bytes=90 * MIB)
    windows = [report(2, (2, 6), peak_bytes=100 * MIB), report(3, (1, 2, 5), peak_bytes=80 * MIB)]
    facts = of(report(1), first, *windows, planned(2, 6, step=3), report(4, (3, 5)))
    assert answer(facts, "predicted well")[0] == (
        "No: 90.00 MiB predicted, 100.00 MiB measured for micro-batches of up to 4, split by length (10.0% too low)."
    )
    assert answer(facts, "plan change")[0] == (
        "Yes: the run settled on micro-batches by length, such as 1-4 x 3, after 1 step (r). It settled on another plan "
        "once: micro-batches by length, such as 2-6 x 2, after 3 steps (r)."
    )


def test_of_several_ranks_it_is_said_what_is_rank_0s(of: Any) -> None:
    told = Shared(
        step=2, micro_batches=((4,), (4,)), peak_bytes=(MIB, 3 * GIB), limit_bytes=(GIB, 2 * GIB),
        busy_seconds=(1.0, 1.0), waited_seconds=(0.0, 0.0),
    )  # fmt: skip
    facts = of(report(1), planned(3, 1, step=1, predicted_bytes=MIB), report(2), told)
    assert answer(facts, "within memory") == (
        "No: the peak of rank 0 was 0% of the limit (2.00 MiB of 1.00 GiB, step 2). Rank 1 used the most of the other "
        "ranks: 150% (3.00 GiB of 2.00 GiB).",
        False,
    )
    why = "the prediction covers rank 0's plan, and steps hold the micro-batches of all ranks"
    assert answer(facts, "predicted well") == (f"Not measured: {why}.", None)
    assert answer(facts, "plan change")[0].endswith("after 1 step (r). These are the plans of rank 0.")
    assert answer(facts, "unused")[0].startswith("Yes: 100% of the limit of rank 0 was never used.")


def test_nothing_changed(of: Any) -> None:
    assert answer(of(report(1)), "plan change")[0] == "No: no plan was settled on."
    given = "No: the run settled on 4 x 2 before the first step (micro_batch is set)."
    assert answer(of(planned(4, 4, step=0, reason="micro_batch is set")), "plan change")[0] == given


def test_steps_of_a_resumed_run_in_another_plan_are_a_change(of_new: Any) -> None:
    begun = (planned(4, 4, step=0), report(1), report(2, (3,)), Resumed(step=2, num_samples=16, checkpoint="c"))
    told = answer(of_new(*begun, report(3, (8,)), report(4, (8,)), report(5, (3,))), "plan change")[0]
    assert told == (
        "Yes: the run settled on 4 x 2 before the first step (r). The last 2 steps ran as 8 x 1. The run resumed once."
    )
    assert "The last step ran as 2-3 x 3." in answer(of_new(*begun, report(3, (3, 3, 2))), "plan change")[0]
    assert answer(of_new(*begun, report(3), report(4, (3,))), "plan change")[0].startswith("No: ")
    assert answer(of_new(*begun, report(3, (2, 6))), "plan change")[0].startswith("No: "), "split by length"


def test_how_memory_was_saved_is_told(of: Any) -> None:
    told = "Yes: memory saving changed once: every second block since step 2 (out of memory)."
    assert answer(of(report(1), saving(step=2), report(2)), "plan change")[0] == told


def test_that_a_second_forward_was_measured_is_told(of: Any) -> None:
    done = Recomputed(step=3, saving="every second block", operations=1200)
    told = answer(of(report(1), saving(step=2), report(2), done), "plan change")[0]
    assert "(out of memory). Recomputed values were bit-identical in 1,200 operations." in told


def test_how_fast(of: Any) -> None:
    windows = [report(step, seconds=0.5 if step <= 37 else 0.25) for step in range(1, 41)]
    measured = replace(verified(1e-7, step=1), seconds=3.0)
    text, _ = answer(
        of(measured, *windows[:-1], report(40, seconds=0.25, replays=1), validated(40, 1.0)), "most of the time"
    )
    assert text == (
        "Yes: 79% of 24.2 s, at 16.62 samples/s. A step took 500 ms (median). The last tenth ran at 25.6 samples/s. Steps "
        "with replays took 1.3% of the training time. Validation took 2.0 s. Measuring gradients took 3.0 s."
    )
    assert answer(of(replace(measured, seconds=30.0)), "most of the time")[0].startswith("No: 35% of 54.2 s, at 16.62")


def test_without_a_duration_nothing_is_said_of_the_time(of: Any) -> None:
    text = "Not measured: no step has a duration."
    assert answer(of(report(1, seconds=0.0)), "most of the time") == (text, None)


def test_it_learned(of: Any) -> None:
    windows = [report(step) for step in range(1, 41)]
    text, good = answer(of(*windows, validated(10, 0.5), validated(20, 0.25), validated(40, 0.75)), "learn")
    assert text == (
        "Yes: the training loss fell from 1.5 to 0.05064 (means of the first and last 2 steps). "
        "The last validation loss is 0.75; the lowest was 0.25 (step 20)."
    )
    assert good is True
    assert answer(of(validated(40, 0.1)), "learn")[0].endswith("The last validation loss is 0.1, the lowest.")


def test_the_last_metrics_are_told_beside_the_validation_loss(of: Any) -> None:
    facts = of(report(1), validated(1, 0.5, accuracy=0.5), report(2), validated(2, 0.25, accuracy=0.953, f1=0.75))
    assert answer(facts, "learn")[0].endswith(
        "The last validation loss is 0.25, the lowest. Metrics of the last validation: accuracy 0.953, f1 0.75."
    )
    assert facts.metrics == {"accuracy": 0.953, "f1": 0.75}
    assert "etrics" not in answer(of(report(3), validated(3, 0.5)), "learn")[0]


def test_outputs_at_the_end_are_told_beside_the_loss(of: Any) -> None:
    windows = [report(step, outputs={"accuracy": step / 100, "bad": math.nan}) for step in range(1, 41)]
    facts = of(*windows)
    assert facts.outputs == {"accuracy": pytest.approx(0.395)}, "a mean over the last twentieth, as the loss is"
    assert "steps). Outputs at the end: accuracy 0.395." in answer(facts, "learn")[0]


def test_it_did_not_learn(of: Any) -> None:
    text, good = answer(of(report(1, loss=1.0), report(2, loss=1.5)), "learn")
    assert (text, good) == ("No: the training loss rose from 1 to 1.5.", False)
    assert answer(of(report(3, loss=1.0)), "learn") == ("No: the training loss stayed at 1.", False)


def test_one_step_does_not_tell_whether_it_learned(of: Any) -> None:
    assert answer(of(report(1)), "learn") == ("Not measured: the run has one step.", None)


def test_losses_that_are_no_numbers_are_told_and_left_out(of: Any) -> None:
    windows = [report(step, loss=math.nan if step in (3, 39) else 1 / step) for step in range(1, 41)]
    facts = of(*windows)
    assert answer(facts, "learn") == (
        "Yes: the training loss fell from 0.75 to 0.025 (means of the first and last 2 steps). The loss of 2 steps was "
        "NaN or infinite, the first in step 3.",
        False,
    )
    assert facts.loss == 1 / 40


def test_a_run_whose_last_loss_is_not_finite_diverged(of: Any) -> None:
    facts = of(report(1), report(2), report(3, loss=math.inf), Finished(step=3, reason="budget"))
    text = "No: the run diverged. The loss of 1 step was NaN or infinite, the first in step 3."
    assert answer(facts, "learn") == (text, False)
    assert (facts.state, facts.loss, facts.is_over) == ("diverged", None, True)
    assert of(report(4)).state != "diverged", "it recovered"


@pytest.mark.parametrize(
    ("sizes", "reason", "peak", "text"),
    [
        (
            (8,), "the full batch fits", 0.02,
            "Yes: 98% of the limit was never used. The full batch fits in one micro-batch. To use more memory, raise "
            "effective_batch or train a larger model.",
        ),
        (
            (4, 4), "larger micro-batches are no faster", 0.3,
            "Yes: 70% of the limit was never used. Larger micro-batches are no faster, so there is nothing to gain.",
        ),
        (
            (4, 4), "larger micro-batches do not fit", 0.7,
            "Yes: 30% of the limit was never used. Larger micro-batches do not fit, so there is nothing to gain.",
        ),
        (
            (4, 4), "max_micro_batch is reached", 0.3,
            "Yes: 70% of the limit was never used. max_micro_batch limits the micro-batch; raise it to use more memory.",
        ),
        (
            (4, 4), "micro_batch is set", 0.3,
            'Yes: 70% of the limit was never used. micro_batch is set; micro_batch="auto" searches for the fastest size '
            "that fits.",
        ),
        ((4, 4), "it rains", 0.3, "Yes: 70% of the limit was never used. The reason for the last plan: it rains."),
        ((4, 4), None, 0.3, "Yes: 70% of the limit was never used. The search for the micro-batch has not ended."),
        ((8,), "the full batch fits", 0.85, "No: the peak was 85% of the limit."),
    ],
)  # fmt: skip
def test_what_unused_memory_is_good_for(of: Any, sizes: Any, reason: str | None, peak: float, text: str) -> None:
    plans = () if reason is None else (planned(*sizes, step=1, reason=reason),)
    short = report(2, (3,), peak_bytes=1)
    assert answer(of(report(1, sizes, peak_bytes=round(peak * GIB)), *plans, short), "unused") == (text, None)


def test_unused_memory_goes_by_the_plan_that_stands(of: Any) -> None:
    settled = planned(4, 4, step=1, reason="larger micro-batches are no faster")
    replanned = Replanned(step=3, old=(4, 4), new=(2,) * 4, reason="out of memory")
    grown = Replanned(step=4, old=(2,) * 4, new=(2,) * 8, reason="the effective batch is 16 now")
    facts = of(report(1), settled, report(2), replanned, report(3, (2,) * 4), grown, report(4, (2,) * 8))
    assert answer(facts, "unused")[0].endswith("The reason for the last plan: out of memory.")


def test_a_run_that_split_no_batch_is_exact_whatever_splits_were_measured_to_be(of: Any) -> None:
    found = of(verified(0.5), report(1, (8,)), report(2, (8,)))
    assert answer(found, "exact") == (
        "Yes: no batch was split. Splitting would change them by 5.0e-01, relative.",
        True,
    )
