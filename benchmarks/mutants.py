"""Changes the package at one place at a time, and asks which tests notice: everyday ones, or only those behind slow.

Mutants are Cosmic Ray's (``pip install cosmic-ray coverage``), drawn by a seed: a place of a room by the room's lines,
then an operator that changes it. Left out are annotations, decorators, f-strings, ``__repr__``, and ``==`` in place of
``is``. Coverage tells which test runs which line. In a copy of the tree, those that run the changed one are run, the
cheapest first: of the module's own file of tests, then, for what survives, of the others of its room, then of all
others, then the slow tests of the files that run it. A call goes on where the last one was stopped.

    python benchmarks/mutants.py [--count 300] [--seed 0] [--share 0/2]
                                 [--stage own cover room everyday slow check write]
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from mutants_tests import ROOT, Covered, outcome_of

ROOMS = ("data", "memory", "planning", "runs", "step", "training")
UNSEEN = re.compile("Replace.*_(Is_Eq|IsNot_NotEq|Eq_Is|NotEq_IsNot)$|RemoveDecorator|Variable")
"""Operators that as a rule make a mutant which does the same; Variable* need names to be given."""
REASONS = Path(__file__).with_name("mutants_survivors.json")
"""Why a mutant survives, told by whoever looked at it."""
SECONDS = {"own": 60.0, "room": 60.0, "everyday": 120.0, "slow": 300.0}
"""Of processor time that the tests of one mutant may take in each stage, as measured without it."""

Mutant = dict[str, Any]


def places(source: str) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the operators and occurrences that change each place of a module."""
    hidden: list[Any] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name in ("__repr__", "__str__"):
                hidden.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                hidden += [*node.decorator_list, node.returns]
            case ast.ClassDef():
                hidden += node.decorator_list
            case ast.arg() | ast.AnnAssign():
                hidden.append(node.annotation)
            case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                hidden.append(node)
            case ast.Assign(value=ast.BinOp(op=ast.BitOr()), col_offset=0):
                hidden.append(node)
    ends = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in hidden if n is not None]
    nodes, found = list(ast_nodes(get_ast(source))), collections.defaultdict(list)
    for name in filter(lambda name: not UNSEEN.search(name), OperatorProvider()):
        operator = OperatorProvider()[name]()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, start in enumerate(starts):
            if not any(first <= start <= last for first, last in ends):
                found[start].append((name, occurrence))
    return found


def mutated(mutant: Mutant) -> str:
    source = (ROOT / mutant["module"]).read_text()
    return mutate_code(source, OperatorProvider()[mutant["operator"]](), mutant["occurrence"])


def made(module: str, start: tuple[int, int], name: str, occurrence: int) -> Mutant | None:
    """Return a mutant as it is kept; None where the change is no Python, or changes nothing."""
    mutant: Mutant = {"module": module, "line": start[0], "operator": name, "occurrence": occurrence}
    source, other = (ROOT / module).read_text(), mutated(mutant)
    if source.splitlines()[start[0] - 1][start[1] :].startswith("*,"):  # of parameters, which is taken for an operator
        return None
    try:
        with warnings.catch_warnings(action="error"):  # as of "is" beside a literal
            compile(other, module, "exec")
    except (SyntaxError, SyntaxWarning):
        return None
    if ast.dump(ast.parse(other)) == ast.dump(ast.parse(source)):
        return None
    lines = list(difflib.ndiff(source.splitlines(), other.splitlines()))
    old, new = (" ".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
    return mutant | {"old": old, "new": new, "key": f"{module}:{start[0]} {name} {occurrence}"}


def draw(count: int, seed: int) -> list[Mutant]:
    """Return so many mutants, of each room by its lines."""
    modules = {room: sorted((ROOT / "autoaccum" / room).rglob("*.py")) for room in ROOMS}
    lines = {room: sum(len(path.read_text().split("\n")) for path in paths) for room, paths in modules.items()}
    drawn = []
    for room, paths in modules.items():
        generator = random.Random(f"{seed} {room}")
        sites = [
            (path.relative_to(ROOT).as_posix(), start, ways)
            for path in paths
            for start, ways in sorted(places(path.read_text()).items())
        ]
        generator.shuffle(sites)
        mutants = filter(None, (made(module, start, *generator.choice(ways)) for module, start, ways in sites))
        wanted = round(count * lines[room] / sum(lines.values()))
        drawn += [mutant | {"room": room} for _, mutant in zip(range(wanted), mutants, strict=False)]
    random.Random(seed).shuffle(drawn)
    return drawn


def span(module: str, line: int, *, wide: bool = False) -> range:
    """Return the lines of the statement's own at that line; of what is around it where that runs at import."""
    holding = [n for n in ast.walk(ast.parse((ROOT / module).read_text())) if isinstance(n, ast.stmt)]
    holding = sorted((n for n in holding if n.lineno <= line <= (n.end_lineno or 0)), key=lambda n: n.lineno)
    functions = [n for n in holding if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        return range(1, 10**6)
    if wide or holding[-1] is functions[-1]:
        return range(functions[-1].lineno, (functions[-1].end_lineno or 0) + 1)
    body = getattr(holding[-1], "body", None)
    return range(holding[-1].lineno, body[0].lineno if body else (holding[-1].end_lineno or 0) + 1)


def judged(mutant: Mutant, stage: str, covered: Covered, tree: Path) -> Mutant:
    module, began = mutant["module"], time.monotonic()
    own = f"tests/{mutant['room']}/test_{Path(module).name}"
    if stage == "own":
        covered.run(own)
    run_it = covered.tests(module, span(module, mutant["line"]))
    run_around = run_it or covered.tests(module, span(module, mutant["line"], wide=True))
    row: Mutant = {"key": mutant["key"], "stage": stage, "outcome": "survived", "by": "", "tests": 0, "left": 0}
    (tree / module).write_text(mutated(mutant))
    if stage == "slow":
        for file in sorted({test.partition("::")[0] for test in run_around if test.startswith("tests/")}):
            outcome, failed = outcome_of(tree, None, [file], "slow and not integrations", SECONDS["slow"])
            row["tests"] += 1
            if failed == [signal.Signals.SIGXCPU.name]:
                row["left"] += 1
            elif outcome == "killed":
                row |= {"outcome": outcome, "by": failed[0]}
                break
    else:
        nearest = {test: _nearest(test.partition("::")[0], own, module) for test in run_around}
        tests = {test for test, near in nearest.items() if near == stage}
        if chosen := covered.fitting(tests, SECONDS[stage]):
            files = sorted({test.partition("::")[0] for test in chosen})
            limit = 60 + 4 * sum(covered.seconds[test] for test in chosen)
            outcome, failed = outcome_of(tree, chosen, files, "slow or not slow", limit)
            row |= {"outcome": outcome, "by": "".join(failed[:1])}
        row |= {"tests": len(chosen), "left": len(tests) - len(chosen), "files": len(covered.files)}
    (tree / module).write_text((ROOT / module).read_text())
    return row | {"is_run": bool(run_it), "seconds": round(time.monotonic() - began, 1)}


def _nearest(file: str, own: str, module: str) -> str:
    if file in (own, module):
        return "own"
    return "room" if Path(file).parent == Path(own).parent else "everyday"


def rows(state: Path) -> dict[str, dict[str, Mutant]]:
    """Return what was found by mutant and stage."""
    found: dict[str, dict[str, Mutant]] = collections.defaultdict(dict)
    if (state / "rows.jsonl").exists():
        for line in (state / "rows.jsonl").read_text().splitlines():
            row = json.loads(line)
            found[row["key"]][row["stage"]] = row
    return found


def run(drawn: list[Mutant], stage: str, state: Path, share: str, only: str) -> None:
    before = {"own": None, "room": "own", "everyday": "room", "slow": "everyday"}.get(stage)
    number, of = map(int, share.split("/"))
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        ignored = shutil.ignore_patterns(".git", "build", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        # Bytecode that knows its source by more than time and size.
        compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "autoaccum"]
        subprocess.run(compiling, cwd=tree, check=True)
        covered = Covered(state, tree)
        if stage == "cover":
            for file in [file for file in covered.every if file.startswith(only)][number::of]:
                covered.run(file)
        elif stage == "check":
            killers = {row["by"] for found in rows(state).values() for row in found.values() if "::" in row["by"]}
            print(
                outcome_of(
                    tree, sorted(killers), sorted({k.partition("::")[0] for k in killers}), "slow or not slow", 3600
                )
            )
        for mutant in drawn[number::of] if stage in SECONDS else ():
            found = rows(state).get(mutant["key"], {})
            if stage not in found and (before is None or found.get(before, {}).get("outcome") == "survived"):
                row = judged(mutant, stage, covered, tree)
                with (state / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def write(drawn: list[Mutant], state: Path, seed: int) -> None:
    from results import RESULTS, write_table  # which loads the package, in whose place a child loads a mutant

    found, reasons = rows(state), json.loads(REASONS.read_text()) if REASONS.exists() else {}
    counts, listed = collections.defaultdict(collections.Counter[str]), []
    done = [mutant for mutant in drawn if mutant["key"] in found]
    for mutant in done:
        stages = found[mutant["key"]]
        killed = next((stage for stage, row in stages.items() if row["outcome"] == "killed"), None)
        is_left = killed in (None, "slow")
        for room in (mutant["room"], "all"):
            counts[room].update(mutants=1, everyday=not is_left, slow=killed == "slow")
            counts[room].update(left=is_left, whole=is_left and "everyday" in stages)
        if is_left:
            why = f"killed by the slow `{stages['slow']['by']}`; " if killed else ""
            why += reasons.get(mutant["key"], f"not looked at, given to {'all' if 'everyday' in stages else 'some'}")
            listed.append(f"- `{mutant['module']}:{mutant['line']}` `{mutant['old']}` → `{mutant['new']}`: {why}")
    ran = [row for mutant in done for row in found[mutant["key"]].values()]
    text = (
        f"{len(done)} mutants of Cosmic Ray, of {len(drawn)} drawn with seed {seed}. Everyday tests are those of "
        f"`python -m pytest`: of the module's own file of tests first, then those of others. Of those that are not "
        f"killed *given to all* are those that were given to all everyday tests that run the changed line; the others "
        f"were given to some, and say nothing of the everyday tests yet. Slow tests are those behind `-m slow` in the "
        f"files that run the line; {sum(row['stage'] == 'slow' for row in ran)} mutants were given to them. By hand "
        f"were chosen the files of tests that killed {sum('by_hand' in row for row in ran)}. All runs together took "
        f"{sum(row['seconds'] for row in ran) / 60:.0f} minutes, beside other work."
    )
    header = ["room", "mutants", "killed by everyday tests", "not killed", "given to all", "killed by slow tests"]
    table = [
        [room, *(counts[room][c] for c in ("mutants", "everyday", "left", "whole", "slow"))] for room in (*ROOMS, "all")
    ]
    write_table("mutants", text, header, table, threads=1)
    page = RESULTS / "mutants.md"
    page.write_text(
        "\n".join([page.read_text(), "## Not killed by the everyday tests that were run", "", *sorted(listed), ""])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stage", nargs="+", default=["own", "cover", "room", "everyday", "slow", "check", "write"])
    parser.add_argument("--share", default="0/1", help="of the work, for two calls side by side")
    parser.add_argument("--only", default="", help="begin of the test files of which coverage is taken")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "mutants")
    options = parser.parse_args()
    options.state.mkdir(parents=True, exist_ok=True)
    if not (kept := options.state / f"drawn_{options.count}_{options.seed}.json").exists():
        kept.write_text(json.dumps(draw(options.count, options.seed), indent=1))
    drawn = json.loads(kept.read_text())
    for stage in options.stage:
        if stage == "write":
            write(drawn, options.state, options.seed)
        else:
            run(drawn, stage, options.state, options.share, options.only)


if __name__ == "__main__":
    main()
