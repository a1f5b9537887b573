"""Whether a run says so when a gradient that reaches the optimizer is not that of the whole window.

    python benchmarks/verification.py [--only TEXT] [--quick] [--list] [--plans] [--write]

Each case of verification_losses_*.py and verification_models_*.py is trained under each plan of verification_runs.py,
in float64. Every window's gradient is compared with that of the user's own loss on the whole window, at the same
parameters, buffers and state. A window is *exact* (within 1e-6), *said* (not exact, and a notice of the run says so),
*silently wrong* (not exact, and nothing was said), a *false alarm* (a notice in a run all of whose windows are exact),
*said of state* (the like, but buffers do differ after it), a *raw error* (no error of autoaccum's) or *refused* (one of
autoaccum's). Which cases can be cut is never stated, only measured; but for forwards that draw random numbers, where it
is: samples that do not meet are independent, and joined windows count as their run has measured them. Cases with a
collate_fn are trained by fit, but for the plan that memory decides. Of cases that are *joined* those are counted that
hold more than half of what the full batch holds for backward (measured on seven samples).

The exit status is 1 if more than 0.5 % are silently wrong, more than 1 % false alarms, or there is a raw error.
The whole takes about half an hour on one core. With --write the table goes to benchmarks/results/verification.md.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections import Counter

import torch
import verification_catalogue
from results import write_table
from verification_cases import CASES, Case
from verification_runs import PLANS, QUICK, Plan, Run, run

VERDICTS = ("exact", "said", "silently wrong", "false alarm", "said of state", "raw error", "refused", "not comparable")
BOUNDS = {"silently wrong": 0.005, "false alarm": 0.01, "raw error": 0.0}
"""The largest share of windows that there may be of each."""
LISTED = ("silently wrong", "false alarm", "raw error", "refused")


def run_all(cases: list[Case], plans: tuple[Plan, ...], verbose: bool) -> list[Run]:
    runs = []
    for case in cases:
        for plan in plans:
            began = time.perf_counter()
            found = run(case, plan)
            found.seconds = time.perf_counter() - began
            runs.append(found)
            if verbose:
                print(f"{case.name} | {plan.name}: {found.seconds:.2f} s")
                for outcome, verdict in found.verdicts():
                    print(f"    window {outcome.window}: {verdict}, error {outcome.error:.1e}, {outcome.raised or ''}")
                    for text in outcome.notices:
                        print(f"        {text}")
    return runs


def table_of(runs: list[Run]) -> tuple[list[str], list[list[object]]]:
    """Return the header and rows of the table, a row per group, with the totals of a kind behind its groups."""
    kinds = list(dict.fromkeys(found.case.kind for found in runs))
    rows: list[list[object]] = []
    for kind in kinds:
        chosen = [found for found in runs if found.case.kind == kind]
        for group in dict.fromkeys(found.case.group for found in chosen):
            rows.append(_row(group, [found for found in chosen if found.case.group == group]))
        rows.append(_row(f"**{kind}**", chosen))
    rows.append(_row("**all**", runs))
    return ["group", "cases", "of them wrong when cut", "joined", "of these above half", "windows", *VERDICTS], rows


def _row(name: str, runs: list[Run]) -> list[object]:
    counts = Counter(verdict for found in runs for _, verdict in found.verdicts())
    windows = sum(counts.values())
    wrong = {found.case.name for found in runs if any(outcome.error > 1e-6 for outcome in found.outcomes)}
    wrong |= {found.case.name for found in runs if found.case.draws == "together"}
    shares = [
        f"{counts[verdict]} ({counts[verdict] / windows:.1%})" if counts[verdict] and verdict in LISTED else
        counts[verdict]
        for verdict in VERDICTS
    ]  # fmt: skip
    held: dict[str, float] = {}  # of each case that was joined under any plan, the most
    for found in runs:
        of_run = [outcome.held for outcome in found.outcomes if outcome.held is not None]
        if of_run:
            held[found.case.name] = max(of_run[-1], held.get(found.case.name, 0.0))
    large = sum(share > 0.5 for share in held.values())
    return [name, len({found.case.name for found in runs}), len(wrong), len(held), large, windows, *shares]


def listing(runs: list[Run]) -> list[str]:
    """Return a line for each case with windows that should not be: in which plans they are, and how far off."""
    by_case: dict[str, list[Run]] = {}
    for found in runs:
        by_case.setdefault(found.case.name, []).append(found)
    lines = [_line(wanted, name, of_case) for wanted in LISTED for name, of_case in by_case.items()]
    return [line for line in lines if line]


def _line(wanted: str, name: str, runs: list[Run]) -> str:
    parts: list[str] = []
    reasons: dict[str, None] = {}
    for found in runs:
        outcomes = [outcome for outcome, verdict in found.verdicts() if verdict == wanted]
        if not outcomes:
            continue
        last = outcomes[-1]
        part = f"{found.plan.name} [{','.join(str(outcome.window) for outcome in outcomes)}]"
        if wanted == "silently wrong" and found.case.draws is None:
            part += f" {max(outcome.error for outcome in outcomes):.0e}"
        parts.append(part)
        if last.raised is not None:
            reasons[f"{type(last.raised).__name__}: {' '.join(str(last.raised).split())[:110]}"] = None
        elif wanted == "false alarm":
            reasons[last.notices[0][:60]] = None
    return f"{wanted}: {name} | {'; '.join(parts)} | {' / '.join(reasons)}".rstrip(" |") if parts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the cases whose name contains this")
    parser.add_argument("--kind", choices=("losses", "models"), help="cases of this kind alone")
    parser.add_argument("--plan", default="", help="the plans whose name contains this")
    parser.add_argument("--quick", action="store_true", help="two plans")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--plans", action="store_true", help="name the plans and stop")
    parser.add_argument("--verbose", action="store_true", help="print every window")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    verification_catalogue.load()
    chosen = [case for case in CASES if options.only in case.name and options.kind in (None, case.kind)]
    plans = tuple(plan for plan in (QUICK if options.quick else PLANS) if options.plan in plan.name)
    if options.list:
        for case in chosen:
            print(f"{case.kind} | {case.group} | {case.name}")
        print(f"{len(chosen)} cases")
        return
    if options.plans:
        for plan in plans:
            print(plan)
        return
    began = time.perf_counter()
    runs = run_all(chosen, plans, options.verbose)
    seconds = time.perf_counter() - began
    header, rows = table_of(runs)
    if options.write:
        text = (
            f"What became of each window of {len(chosen)} cases under {len(plans)} plans, in float64: a count of "
            f"windows, and the share of those that should not be. {seconds / 60:.1f} minutes."
        )
        write_table("verification", text, header, rows)
    else:
        for row in (header, *rows):
            print(*row, sep=" | ")
    print(*listing(runs), sep="\n")
    print(f"{seconds:.0f} s")
    counts = Counter(verdict for found in runs for _, verdict in found.verdicts())
    shares = {verdict: counts[verdict] / max(counts.total(), 1) for verdict in BOUNDS}
    if any(shares[verdict] > bound for verdict, bound in BOUNDS.items()):
        raise SystemExit(
            "more than may be: " + ", ".join(f"{verdict} {share:.2%}" for verdict, share in shares.items())
        )


if __name__ == "__main__":
    main()
