"""One command that proves all of it on a card: five stages under eight minutes each, and one table.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --stage b --budget 500 --state out/gpu     # on a machine that is lent for ten minutes
    python benchmarks/gpu.py --again compiled                          # these once more

Each check is a process of its own under a deadline, and what it finds is kept in the state directory at once: the same
call again goes on with those that are left. The table is written after each of them, to benchmarks/results/ and beside
the state. Where there is no accelerator, checks run on the stand-in of the tests, in small sizes: so it is known
to work before a card is there. Stages: a, the tests that need a device, and what only a card can say; b, GPT-2; c,
ResNet-50; d, other processes, and cold starts beside the peers; e, overhead, checkpoints, replays and restarts.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import importlib.metadata
import json
import os
import re
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import gpu_allocator
import gpu_contest
import gpu_models
import gpu_overhead
import gpu_sharing
import torch
from gpu_checks import ROOT, STAGE_SECONDS, Check, Runner
from results import write_table

from tests import standin

STAGES = "abcde"
PACKAGES = ("torch", "triton", "numpy", "accelerate", "lightning", "transformers")


def checks() -> list[Check]:
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    contests = [
        Check(stage=stage, name=f"{label}, {how}", run=partial(gpu_contest.throughput, case, how), about=about)
        for stage, case, label in (("b", "gpt", "GPT-2"), ("c", "conv", "conv net"))
        for how, about in (("plain", 100), ("compiled", 200))
    ]
    return [
        Check(stage="a", name="limit beside a fraction", run=gpu_allocator.limit_beside_fraction, about=50),
        Check(stage="a", name="no limit", run=gpu_allocator.no_limit, about=50),
        Check(stage="a", name="a fraction of 8 GiB", run=gpu_allocator.within_8_gib, about=30),
        Check(stage="a", name="lengths, native segments", run=gpu_allocator.lengths, about=30),
        Check(
            stage="a", name="lengths, expandable segments", run=gpu_allocator.lengths_expandable, about=30,
            environment=expandable,
        ),
        Check(stage="a", name="waits", run=gpu_allocator.waiting, about=20),
        Check(stage="a", name="tiny MLP", run=gpu_allocator.tiny, about=30),
        Check(
            stage="a", name="recorded plans", run=gpu_allocator.recorded_plans, about=30, environment=deterministic
        ),
        Check(stage="a", name="fractions around fitting", run=gpu_allocator.fractions, about=30),
        Check(stage="a", name="compiled", run=gpu_allocator.compiled, about=40),
        Check(stage="a", name="fifty errors in backward", run=gpu_allocator.fifty_ooms, about=30),
        Check(stage="a", name="pinned buffer", run=gpu_allocator.pinned_buffer, about=10),
        # The last, for the others are quick.
        Check(stage="a", name="tests", run=gpu_allocator.tests, about=100),
        *contests[:2],
        Check(stage="b", name="GPT-2, memory used", run=partial(gpu_contest.memory_used, "gpt"), about=40),
        *contests[2:],
        Check(stage="c", name="conv net, memory used", run=partial(gpu_contest.memory_used, "conv"), about=40),
        Check(stage="d", name="another process", run=gpu_sharing.tenant, about=100),
        Check(stage="d", name="cold start", run=gpu_sharing.cold_start, about=150),
        Check(stage="e", name="overhead", run=gpu_overhead.overhead, about=80),
        Check(stage="e", name="memory saving", run=gpu_overhead.memory_saving, about=40),
        Check(stage="e", name="checkpoints", run=gpu_overhead.checkpoints, about=50),
        Check(stage="e", name="replay", run=gpu_overhead.replay, about=40),
        Check(stage="e", name="killed and resumed", run=gpu_overhead.resume, about=100, environment=deterministic),
    ]  # fmt: skip


def load_standin() -> str | None:
    """Build and load it where there is no accelerator; return why it cannot be."""
    if torch.accelerator.is_available():
        return None
    if (why := standin.missing()) is not None:
        return why
    os.environ["STANDIN_LEDGER"] = str(os.getpid())
    standin.load()
    return None


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    if torch.version.cuda:
        found.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    free, total = torch.accelerator.get_memory_info()
    return f"{', '.join(found)}; {total / 2**30:.1f} GiB of device memory, {free / 2**30:.1f} free before"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", choices=STAGES, help="leave the others out")
    parser.add_argument("--budget", type=float, default=STAGE_SECONDS * len(STAGES), help="seconds of this call")
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "gpu", help="directory of what was found")
    parser.add_argument("--again", metavar="NAME", help="run these again, of all checks whose name holds it")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        check = next(check for check in checks() if check.name == options.check)
        faulthandler.dump_traceback_later(2 * check.about)  # where it is, should it not end in time
        torch.empty(1, device=gpu_models.device())  # an allocator that has done nothing yet refuses to be asked
        rows = check.run()
        options.into.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
        return 0
    if (why := load_standin()) is not None:
        print(f"There is no accelerator, and {why}.", file=sys.stderr)
        return 1
    # A call that is ended ends the check that it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    name = torch.get_device_module().get_device_name()
    state = options.state / re.sub(r"\W+", "-", name.lower())

    def command(check: Check, into: Path) -> list[str]:
        return [sys.executable, __file__, "--check", check.name, "--into", str(into)]

    runner = Runner(checks(), state, command)
    place = name
    if gpu_models.is_small():
        place = (
            "the stand-in, an accelerator in host memory, and not on a GPU: sizes are small, times are the host's, and "
            "one segment of its allocator is as much as a quarter of what runs use, which no prediction is finer than"
        )

    def write() -> None:
        rows = runner.rows()
        counted = ", ".join(
            f"{sum(str(row[-1]).startswith(kind) for row in rows)} {kind}"
            for kind in ("met", "missed", "failed", "not run")
        )
        text = (
            f"On {place}. {counted}. What speeds are compared with is run in turn with it, in the same check, and "
            f"ratios are medians. {versions()}."
        )
        page = write_table("gpu", text, ["stage", "check", "figures", "aim", "verdict"], rows, quiet=True)
        (options.state / "gpu.md").write_text(f"# gpu\n\n{page}")

    try:
        with tempfile.TemporaryDirectory() as pasts:
            os.environ["AUTOACCUM_CACHE_DIR"] = pasts  # nothing is known from earlier runs
            runner.run(options.again, options.stage, options.budget, write)
    finally:
        for path in Path("/dev/shm").glob(f"standin-*-{os.environ.get('STANDIN_LEDGER')}"):
            path.unlink(missing_ok=True)
    write()
    print((options.state / "gpu.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
