"""Writes the scoreboard from the tables of benchmarks/results/.

    python benchmarks/scoreboard.py             # prints the scoreboard
    python benchmarks/scoreboard.py --write     # writes SCOREBOARD.md there

Nothing is measured here: ``run_all.py`` does that, or each benchmark by itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from run_all_stages import STAGES, Stage, records
from scoreboard_lines import PARTS, Line
from tables import Table, read

RESULTS = Path(__file__).parent / "results"
RECORD = "stages.json"
NOT_TIMED = "not timed"

INTRODUCTION = """\
# The scoreboard

Written by `python benchmarks/scoreboard.py --write` from the tables of this folder, and by
`python benchmarks/run_all.py`, which measures them first. autoaccum and what stands beside it did the same work in the
same run. Ratios are times beside the loop that is named, so less is better. Every line has the day and the machine of
its table; what was not measured says so. Composer, of which the README speaks from its sources, takes part in none."""


def lines(results: Path) -> list[tuple[str, Line, Table | None]]:
    """Return the lines of all parts with their areas and tables; of a part without a table, that there is none."""
    found: list[tuple[str, Line, Table | None]] = []
    for part in PARTS:
        table = read(part.table, results)
        if table is None:
            found.append((part.area, Line(what=part.what, ours="not measured", beside=""), None))
        else:
            found += [(part.area, line, table) for line in part.lines(table)]
    return found


def page(results: Path) -> str:
    """Return the scoreboard."""
    board = ["| area | what | autoaccum | beside it | measured |", "| --- | --- | --- | --- | --- |"]
    before = ""
    for area, line, table in lines(results):
        shown = "" if area == before else f"**{area}**"
        board.append(f"| {shown} | {line.what} | {line.ours} | {line.beside} | {_place(table)} |")
        before = area
    ran = records(results / RECORD)
    stages = ["| stage | its tables | took | peers |", "| --- | --- | --- | --- |"]
    stages += [_of_stage(stage, ran.get(stage.name), results) for stage in STAGES]
    taken = [entry["seconds"] for entry in ran.values()]
    total = f"{len(taken)} of {len(STAGES)} stages were timed, {sum(taken)} s together; `{NOT_TIMED}` are those whose "
    total += "table is older than `run_all.py`, and the peers of these are told by the table, if at all."
    return "\n\n".join([INTRODUCTION, "\n".join(board), "## The stages", total, "\n".join(stages)]) + "\n"


def _of_stage(stage: Stage, entry: dict[str, Any] | None, results: Path) -> str:
    tables = []
    for name in stage.tables:
        table = read(name, results)
        tables.append(
            f"{name}: not measured" if table is None else f"[{name}]({name}.md), {table.date}: {table.machine}"
        )
    took, peers = NOT_TIMED, ", ".join(stage.peers)
    if entry is not None:
        took = f"{entry['seconds']} s on {entry['date']}"
        if entry["outcome"] != "done":
            took += f", {entry['outcome']}"
        peers = ", ".join(f"{peer} {version}" for peer, version in entry["peers"].items())
    return f"| `{stage.name}.py` | {'<br>'.join(tables)} | {took} | {peers} |"


def _place(table: Table | None) -> str:
    return "" if table is None else f"[{table.place}]({table.name}.md)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write SCOREBOARD.md")
    options = parser.parse_args()
    text = page(RESULTS)
    if options.write:
        (RESULTS / "SCOREBOARD.md").write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
