"""What the scoreboard says of each table: ours, and beside it whatever took part in the same run.

Each function takes one table of benchmarks/results/ and returns its lines. No figure stands here: all are cells of
tables, counted, or the least and the most of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tables import Table, number

EXACT = {"autoaccum": 1e-12, "autoaccum float32": 1e-5}
"""Below what a relative error is rounding, by column; other columns are of float64, as ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the scoreboard."""

    what: str
    ours: str
    beside: str = "nothing was measured beside it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A table that the scoreboard has lines of."""

    area: str
    table: str
    what: str
    """What is not measured where there is no table."""
    lines: Callable[[Table], list[Line]]


def span(cells: Iterable[str], digits: int = 2) -> str:
    """Return the least and the most of some cells."""
    numbers = [number(cell) for cell in cells]
    least, most = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return least if least == most else f"{least} to {most}"


# Exactness and verification.


def exactness(table: Table) -> list[Line]:
    # What is measured in half precision alone has no float64 cell, and bounds of its own.
    rows = [row for row in table.rows() if row["autoaccum"]]
    columns = [column for column in table.parts[0][0] if column not in ("loss", *EXACT)]
    is_peer = re.compile(r"Accelerate|Lightning|Transformers").match
    peers = "; ".join(_exact(rows, column) for column in columns if is_peer(column))
    recipes = "; ".join(_exact(rows, column) for column in columns if not is_peer(column))
    what = "losses and models whose gradients, in the worst window, are off the big batch's by less than"
    return [
        Line(what=f"{what} 1e-12, float64", ours=_exact(rows, "autoaccum"), beside=peers),
        Line(what=f"{what} 1e-5, float32", ours=_exact(rows, "autoaccum float32")),
        Line(what=f"{what} 1e-12, float64, beside loops of tutorials", ours=_exact(rows, "autoaccum"), beside=recipes),
        *(
            Line(what=f"how far off they are, {row['loss']}", ours=row["autoaccum float32"])
            for row in table.rows()
            if not row["autoaccum"]
        ),
    ]


def logged_loss(table: Table) -> list[Line]:
    found = {(row["optimizer"], row["trainer"]): row for row in reversed(table.rows())}
    return [
        Line(
            what=f"the loss that a Trainer logs at {stock['split']}, divided by that of the full batch, {optimizer}",
            ours=found[optimizer, "AutoAccumTrainer"]["logged loss"],
            beside=f"Transformers {stock['transformers']}: {stock['logged loss']}, gradient norm "
            f"{stock['gradient norm, step 1']}",
        )
        for (optimizer, trainer), stock in reversed(found.items())
        if trainer == "Trainer"
    ]


def _exact(rows: list[dict[str, str]], column: str) -> str:
    """Return how many of a column's cells are exact, and the worst of them."""
    cells = [row[column] for row in rows if row[column]]
    numbers = [number(cell) for cell in cells if not cell.startswith("crashes")]
    # No step where there is nothing to step on is right; any other remark (a window lost, a step on nothing) is not.
    sound = [cell for cell in cells if re.fullmatch(r"[\d.e+-]+(, no step)?", cell)]
    exact = [cell for cell in sound if number(cell) < EXACT.get(column, EXACT["autoaccum"])]
    name = "" if column in EXACT else f"{column}: "
    return f"{name}{len(exact)} of {len(cells)}, worst {max(numbers):.2g}"


def verification(table: Table) -> list[Line]:
    row = table.rows()[-1]
    return [
        Line(
            what=f"windows of {row['cases']} losses and models, {row['of them wrong when cut']} of them wrong when cut",
            ours=f"silently wrong {row['silently wrong']} of {row['windows']}, false alarms {row['false alarm']}",
        )
    ]


def compositions(table: Table) -> list[Line]:
    row = table.rows()[-1]
    return [
        Line(
            what=f"{row['cases']} random compositions of losses, {row['said']} of which were not exact and said to be",
            ours=f"silently wrong {row['silently wrong']}, false alarms {row['false alarm']}",
        )
    ]


# Replay, and runs that are killed.


def kills(table: Table) -> list[Line]:
    found = table.pairs()
    return [
        Line(
            what=f"runs that were killed {found['kills']} times in all, and started again",
            ours=f"{found['bit-identical to the run never killed']} bit-identical to the run never killed; "
            f"{found['seconds lost per kill']} s lost per kill",
        )
    ]


def replays(table: Table) -> list[Line]:
    rows = [row for row in table.rows() if row["check"] in ("fifty errors in backward", "replay")]
    return [
        Line(what=f"memory that runs out, on {_device(table)}: {row['check']}", ours=row["figures"]) for row in rows
    ]


# Search, time to train, overhead.


def search(table: Table) -> list[Line]:
    rows = {row["finder"]: row for row in table.rows()}
    peers = "; ".join(_finder(name, row) for name, row in rows.items() if not name.startswith("autoaccum"))
    what = "the largest micro-batch that fits, found: answers that fit, found / true, samples thrown away"
    return [
        Line(what=f"{what}, by {name.split()[1]}", ours=_finder("", row), beside=peers)
        for name, row in sorted(rows.items())
        if name.startswith("autoaccum")
    ]


def _finder(name: str, row: dict[str, str]) -> str:
    thrown = f"{row['samples thrown away in all']} and {row['steps thrown away in all']} steps"
    figures = f"{row['answers that fit']}, median {row['found / true, median']}, {thrown}"
    return f"{name}: {figures}" if name else figures


def time_to_train(table: Table) -> list[Line]:
    by_hand, autoaccum = "by hand, best of all", "autoaccum fit"
    rows = table.rows()
    ours = [row for row in rows if row["contestant"] == autoaccum]
    peers = [row for row in rows if row["contestant"] not in (by_hand, autoaccum)]
    done = [row for row in peers if row["to by hand"]]
    asked = {row["model"]: row["effective"] for row in rows if row["contestant"] == by_hand}
    changed = sum(row["effective"] != asked[row["model"]] for row in done)
    beside = "no peer"
    if done:
        beside = (
            f"peers {span(row['to by hand'] for row in done)}; {len(peers) - len(done)} of {len(peers)} failed, "
            f"{changed} had another effective batch than was asked for"
        )
    lines = [
        Line(
            what="time to train from a cold start below a limit, search included, beside the best micro-batch by hand",
            ours=span(row["to by hand"] for row in ours),
            beside=beside,
        )
    ]
    for row in ours:
        others = [peer for peer in peers if (peer["model"], peer["limit"]) == (row["model"], row["limit"])]
        lines.append(
            Line(
                what=f"the same: {row['model']}, {row['limit']}",
                ours=row["to by hand"],
                beside="; ".join(f"{peer['contestant']}: {peer['to by hand'] or 'failed'}" for peer in others),
            )
        )
    return lines


def cold_start(table: Table) -> list[Line]:
    rows = table.rows()
    return [
        Line(
            what="100 windows from a cold start on the stand-in's virtual clock, beside the best fixed micro-batch",
            ours=f"{span((row['ratio'] for row in rows), 3)} in {len(rows)} settings",
            beside="the best fixed micro-batch: 1",
        )
    ]


def lengths(table: Table) -> list[Line]:
    rows = table.rows()
    of_ours = {row["memory"]: row for row in rows if row["contestant"] == "autoaccum"}
    return [
        Line(
            what=f"samples of many lengths, {memory} of memory: seconds, and tokens with padding beside those without",
            ours=f"{ours['seconds']} s, {ours['tokens with padding / tokens']}",
            beside="; ".join(
                f"{row['contestant']}: {row['ratio']} times as long, {row['tokens with padding / tokens']}"
                for row in rows
                if row["memory"] == memory and row is not ours
            ),
        )
        for memory, ours in of_ours.items()
    ]


def overhead(table: Table) -> list[Line]:
    figures = [
        f"{row['model']} {row['ratio']} ({row['beside by hand']} µs a window)"
        for row in table.rows()
        if row["loop"] == "fit"
    ]
    return [
        Line(what="a window by `fit`, beside a loop by hand", ours="; ".join(figures), beside="the loop by hand: 1")
    ]


# Pressure, window losses, ranks, sweeps.


def pressure(table: Table) -> list[Line]:
    return [
        Line(
            what=f"half of the memory goes and comes back, {row['memory']}",
            ours=f"micro-batch {row['before']}, {row['while half is gone']} meanwhile, {row['at the end']} at the end; "
            f"{row['lost']} windows lost, {row['out of memory']} out of memory; back after {row['back after']}",
        )
        for row in table.rows()
    ]


def window_losses(table: Table) -> list[Line]:
    found: dict[str, dict[str, str]] = {}
    for row in table.rows():
        size, _, way = row["micro-batch"].partition(", ")
        found.setdefault(way, {})[size] = row["beside the whole batch"]
    ours = found.pop("fit")
    others = {
        way: ratios for way, ratios in found.items() if way not in ("by hand", "fit, while windows are looked at")
    }
    return [
        Line(
            what="a contrastive loss over the whole window, beside the whole batch at once: micro-batches of "
            + ", ".join(ours),
            ours=", ".join(ours.values()),
            beside="; ".join(f"{way}: {', '.join(ratios.values())}" for way, ratios in others.items()),
        )
    ]


def ranks(table: Table) -> list[Line]:
    figures = [f"{row['model']} {row['ratio to DDP']}" for row in table.rows() if row["loop"] == "fit"]
    return [
        Line(
            what="a window of several ranks (gloo), beside DistributedDataParallel",
            ours="; ".join(figures),
            beside="DistributedDataParallel: 1",
        )
    ]


def balance(table: Table) -> list[Line]:
    found = table.pairs()
    return [
        Line(
            what="two ranks of which one takes twice as long, shares by speed",
            ours=f"{found['speed']} ms a window",
            beside=f"equal shares: {found['equal']} ms",
        )
    ]


def rank_ends(table: Table) -> list[Line]:
    rows = [row for row in table.rows() if row["what the rank did"] == "**at any moment**"]
    total = {column: sum(int(row[column]) for row in rows) for column in ("times", "hang", "other errors")}
    return [
        Line(
            what=f"a rank is killed at any moment, {total['times']} times: what becomes of the others",
            ours=f"{total['hang']} hang, {total['other errors']} end by an error that does not name the rank",
        )
    ]


def rank_elastic(table: Table) -> list[Line]:
    return [
        Line(
            what=f"ranks go and come, {row['ranks']}: weights off those of one process, float64",
            ours=f"{row['weights off by']}; each window once: {row['each window once, with its samples']}",
        )
        for row in table.rows()
    ]


def sweep(table: Table) -> list[Line]:
    rows = table.rows()
    ours = {row["limit"]: row for row in rows if row["way"] == "autoaccum.sweep"}
    return [
        Line(
            what="twenty trials in a memory in which no effective batch fits, beside a loop that halves its batch",
            # Without a round in which both finished all of them there is no ratio.
            ours="; ".join(
                f"{limit} {row['ratio (rounds)'].split(' (')[0] or 'no ratio'}, trials ended "
                f"{row['finished in each round']}"
                for limit, row in ours.items()
            ),
            beside="; ".join(
                f"{row['way']}, {row['limit']}: {'1, ' * bool(row['ratio (rounds)'])}trials ended "
                f"{row['finished in each round']}"
                for row in rows
                if row["limit"] in ours and row is not ours[row["limit"]]
            ),
        )
    ]


def sweep_kills(table: Table) -> list[Line]:
    rows = table.rows()
    return [
        Line(
            what=f"sweeps killed {sum(int(row['kills']) for row in rows)} times: trials lost, doubled or changed",
            ours=", ".join(sorted({row["lost, doubled or changed"] for row in rows})),
        )
    ]


# GPU.


def _device(table: Table) -> str:
    return "the stand-in, which is no GPU" if table.accelerator == "Stand-in" else table.accelerator


def gpu(table: Table) -> list[Line]:
    rows = table.rows()
    counts = [
        f"{sum(row['verdict'].startswith(kind) for row in rows)} {kind}"
        for kind in ("met", "missed", "failed", "not run")
    ]
    ours = f"on {_device(table)}: {', '.join(counts)}"
    if table.accelerator == "Stand-in":
        ours = f"not on a GPU as a whole; {ours}"
    first = Line(what="the checks that are for a GPU", ours=ours, beside="a loop by hand, in the table's own lines")
    missed = [
        Line(what=f"missed: {row['check']}", ours=row["figures"], beside=f"aim: {row['aim']}")
        for row in rows
        if row["verdict"] == "missed"
    ]
    return [first, *missed]


PARTS = [
    Part(area="exactness", table="exactness", what="gradients beside the big batch's", lines=exactness),
    Part(area="exactness", table="readme_figure", what="the loss that a Trainer logs", lines=logged_loss),
    Part(
        area="verification",
        table="verification",
        what="losses and models that are silently wrong",
        lines=verification,
    ),
    Part(area="verification", table="compositions", what="random compositions of losses", lines=compositions),
    Part(area="replay", table="kills", what="runs that are killed", lines=kills),
    Part(area="replay", table="gpu", what="memory that runs out on a device", lines=replays),
    Part(area="search", table="search", what="the largest micro-batch that fits", lines=search),
    Part(
        area="time to train",
        table="time_to_train",
        what="time to train from a cold start",
        lines=time_to_train,
    ),
    Part(area="time to train", table="cold_start", what="cold starts on a virtual clock", lines=cold_start),
    Part(area="time to train", table="lengths", what="samples of many lengths", lines=lengths),
    Part(area="overhead", table="overhead", what="a window beside a loop by hand", lines=overhead),
    Part(area="pressure", table="pressure", what="memory that goes and comes back", lines=pressure),
    Part(
        area="window losses",
        table="window_losses",
        what="losses over the whole window",
        lines=window_losses,
    ),
    Part(area="ranks", table="ranks", what="ranks beside DistributedDataParallel", lines=ranks),
    Part(area="ranks", table="ranks_balance", what="ranks that are not equally fast", lines=balance),
    Part(area="ranks", table="rank_ends", what="ranks that are killed", lines=rank_ends),
    Part(area="ranks", table="rank_elastic", what="ranks that go and come", lines=rank_elastic),
    Part(area="sweeps", table="sweep", what="sweeps below a limit", lines=sweep),
    Part(area="sweeps", table="sweep_kills", what="sweeps that are killed", lines=sweep_kills),
    Part(area="GPU", table="gpu", what="all of it on a GPU", lines=gpu),
]
