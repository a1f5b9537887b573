"""One command that measures everything again, and writes the scoreboard from what it found.

    python benchmarks/run_all.py                        # hours; stopped and called again, it goes on with what is left
    python benchmarks/run_all.py --stage search --stage sweep
    python benchmarks/run_all.py --again overhead       # once more, though it is done
    python benchmarks/run_all.py --quick                # only to see that it works: nothing committed is touched

Each stage is one benchmark in a process of its own, and its table is kept as soon as it is written. What is not run has
its lines in the scoreboard from the table that is there, with the day and machine of that. ``scoreboard.py`` writes it
after each stage. The exit status is 1 if a stage has not ended well; the next call runs it again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import scoreboard
from gpu_checks import ROOT
from run_all_stages import STAGES, Runner, script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="leave the others out")
    parser.add_argument("--again", metavar="NAME", help="run these though they are done, of all whose name holds it")
    parser.add_argument("--quick", action="store_true", help="small sizes; tables and scoreboard go into the state")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "scoreboard", help="directory of what is done")
    options = parser.parse_args()
    # A call that is ended ends the stage that it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    stages = [stage for stage in STAGES if options.stage is None or stage.name in options.stage]
    state, results = options.state, scoreboard.RESULTS
    if options.quick:
        state, results = state / "quick", state / "quick" / "results"
        stages = [stage for stage in stages if stage.quick is not None]
    runner = Runner(state, results, results / scoreboard.RECORD, lambda stage: script(stage, quick=options.quick))

    def write() -> None:
        (results / "SCOREBOARD.md").write_text(scoreboard.page(results))
        if not options.quick:
            scoreboard.write_readme(results)

    is_done = runner.run(stages, options.again, write)
    write()
    print(results / "SCOREBOARD.md")
    return 0 if is_done else 1


if __name__ == "__main__":
    sys.exit(main())
