"""Whether a run says so when the gradient of a random composition of losses is not that of the whole window.

    python benchmarks/compositions.py [--count 10000] [--seconds 900] [--case N] [--write]

Case N is drawn from the seed N: losses of items, masks, weights, ways to reduce, to combine and to couple samples, as
source text (compositions_strategies.py, compositions_terms.py); a tiny float64 model; six windows; and the most samples
of a micro-batch, so that ``micro_batch="auto"`` cuts them (compositions_runs.py). Each window's gradient is compared
with that of the same loss on the whole window, from the same parameters. What became of a case:

exact: all windows are within 1e-6, and nothing was said. said: some are not, each of them behind a notice.
silently wrong: one of them was before any notice, or without. false alarm: a notice, and all windows are exact.
raw error: one that is none of autoaccum's, nor the loss's own, as when it cannot be computed of a single sample.
refused: an error of autoaccum's. not comparable: the loss of a whole window is not finite. no gradient: that of all
whole windows is 0.

The exit status is 1 if there is a case silently wrong, or a raw error. A case takes about a tenth of a second of one
core. With --brief, a run ends with the first window that is not exact and was announced: of later ones only raw errors
are missed. With --case, one is run and shown. With --write the table goes to benchmarks/results/compositions.md.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from collections import Counter

import torch
from compositions_runs import TOLERANCE, Run, run
from compositions_strategies import case
from results import write_table

VERDICTS = (
    "exact", "said", "silently wrong", "false alarm", "raw error", "its own error", "refused", "not comparable",
    "no gradient",
)  # fmt: skip
BAD = ("silently wrong", "raw error", "refused", "its own error", "false alarm", "not comparable")
LISTED = 20


def groups_of(found: Run) -> list[str]:
    """Return the rows of the table that a case is counted in."""
    composition = found.composition
    groups = ["with something that couples, or is neither mean nor sum" if composition.is_coupled else "ordinary"]
    groups.append("by fit" if composition.by_fit else "by Accumulator")
    if composition.first_alike:
        groups.append("first window alike")
    groups.append("micro-batches of one" if composition.max_micro_batch == 1 else "larger micro-batches")
    return [*groups, "**all**"]


def table_of(counts: dict[str, Counter[str]]) -> tuple[list[str], list[list[object]]]:
    rows: list[list[object]] = []
    for group in sorted(counts, key=lambda name: (name == "**all**", name)):
        total = counts[group].total()
        shares = []
        for verdict in VERDICTS:
            count = counts[group][verdict]
            shares.append(f"{count} ({count / total:.2%})" if count else "0")
        rows.append([group, total, *shares])
    return ["compositions", "cases", *VERDICTS], rows


def shown(found: Run) -> str:
    """Return a case as text."""
    composition = found.composition
    lines = [f"case {found.number}: {found.verdict}", composition.source]
    lines.append(
        f"outputs {composition.outputs}, times {composition.times}, features {composition.features}, "
        f"{'two layers' if composition.is_deep else 'one layer'}, windows {composition.windows}, max_micro_batch "
        f"{composition.max_micro_batch}, by {'fit' if composition.by_fit else 'Accumulator'}"
        + (", first window alike" if composition.first_alike else "")
        + (" with equal weights" if composition.equal_weights else "")
    )
    lines.append("errors " + " ".join(f"{error:.1e}" for error in found.errors))
    if found.loss_error > TOLERANCE:
        lines.append(f"the loss that was reported is {found.loss_error:.1e} off")
    for event in found.verified:
        lines.append(f"step {event.step}: {event.hypothesis}, error {event.error:.1e}, {event.samples} samples")
    for notice in found.notices:
        lines.append(f"said in window {(found.said_at or 0) + 1} first: {notice.cause}")
    if found.skipped:
        lines.append(f"without a step: windows {[index + 1 for index in found.skipped]}")
    if found.raised is not None:
        lines.append(f"{type(found.raised).__name__}: {' '.join(str(found.raised).split())[:300]}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="cases to run")
    parser.add_argument("--start", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--case", type=int, help="run this one alone, and show it")
    parser.add_argument("--brief", action="store_true", help="end a run once a notice was said, and was right")
    parser.add_argument("--listed", type=int, default=LISTED, help="cases to show of each bad kind")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if options.case is not None:
        found = run(options.case, case(options.case))
        print(shown(found))
        for notice in found.notices:
            print(notice)
        if found.raised is not None:
            raise found.raised
        return
    # What is rolled back ends in a collection, and there is nothing to collect among what was imported.
    gc.collect()
    gc.freeze()
    began, processor = time.perf_counter(), time.process_time()
    counts: dict[str, Counter[str]] = {}
    listed = Counter[str]()
    windows, off = Counter[str](), 0
    done = 0
    for number in range(options.start, options.start + options.count):
        if time.perf_counter() - began > options.seconds:
            break
        found = run(number, case(number), brief=options.brief)
        done += 1
        for group in groups_of(found):
            counts.setdefault(group, Counter())[found.verdict] += 1
        if found.verdict in BAD and listed[found.verdict] < options.listed:
            listed[found.verdict] += 1
            print(shown(found), flush=True)
        windows["all"] += len(found.errors)
        windows["not exact"] += sum(error > TOLERANCE for error in found.errors)
        windows["silently wrong"] += sum(map(found.is_silent, range(len(found.errors))))
        off += found.verdict == "exact" and found.loss_error > TOLERANCE
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    header, rows = table_of(counts)
    text = (
        f"What became of {done:,} random compositions of losses, six windows each: {windows['all']:,} windows, of "
        f"which {windows['not exact']:,} had another gradient than the whole one, {windows['silently wrong']:,} of "
        f"them without a word. Of the exact ones {off:,} reported another loss than the whole window's. "
        f"{processor / 60:.1f} minutes of processor time ({seconds / 60:.1f} in all)."
    )
    if options.write:
        write_table("compositions", text, header, rows)
    else:
        print(text)
        for row in (header, *rows):
            print(*row, sep=" | ")
    bad = {verdict: counts["**all**"][verdict] for verdict in ("silently wrong", "raw error")}
    if any(bad.values()):
        raise SystemExit(", ".join(f"{count} {verdict}" for verdict, count in bad.items()))


if __name__ == "__main__":
    main()
