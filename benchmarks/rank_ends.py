"""A rank is killed at random moments: do the others end soon, by an error that says so, and does the run go on?

    python benchmarks/rank_ends.py
    python benchmarks/rank_ends.py --kills 20 --sharded-kills 0 --restarts 0 --seed 7

Ranks of ``fit`` are forked from this process, which has imported everything, and end as Python does; no launcher ends
them. Each notes what it is doing, so that a moment is drawn in this way: what the rank does, how often it has begun
that before, and how long after it. What lasts the longest would have all the kills otherwise. A rank that is killed
before all have met is waited for, unless a launcher ends them: those are started by torchrun. With ``--restarts``
a run of ranks that torchrun starts anew is killed from outside as often, at moments drawn evenly, and compared with one
that was never killed; one that goes on with fewer ranks is compared with a run of one process.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # which the first optimizer imports otherwise, in each process
from rank_elastic import alone
from results import write_table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import autoaccum
from autoaccum.distributed.channel import Channel
from autoaccum.distributed.group import Group, join
from autoaccum.events import Finished, StepReport
from autoaccum.runs.directory import RunDirectory
from autoaccum.step.across_ranks import SharedTransaction
from autoaccum.training.validation import Validator

PATIENCE = 30.0
"""Seconds after which a rank that still runs is taken to hang."""
TO_BEGIN = 60.0
"""Seconds in which the moment has to come."""
SKEW = 1.0
"""Seconds by which ranks begin apart at most, as those do that import what they need."""
MOMENTS: dict[str, tuple[int, float]] = {
    "before the first window": (1, 0.05),
    "a window": (60, 0.03),
    "a sum": (60, 0.003),
    "an exchange": (120, 0.003),
    "a checkpoint": (8, 0.02),
    "validation": (4, 0.05),
    "ending": (1, 0.02),
}
"""(how often a rank has begun it before at most, seconds after that at most)"""


class Notes:
    """What a rank does, each thing as a line of a file as soon as it begins."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        self._within = ["starting"]
        self._write()

    def _write(self) -> None:
        os.write(self._file, f"{self._within[-1]}\n".encode())

    def now(self, what: str) -> None:
        """Note what follows."""
        self._within[-1] = what
        self._write()

    def around(self, kind: type, name: str, what: str, *, then: str | None = None) -> None:
        """Note the calls of a method, and what follows them."""
        method = getattr(kind, name)

        def noted(*args: Any, **options: Any) -> Any:
            self._within.append(what)
            self._write()
            try:
                return method(*args, **options)
            finally:
                self._within.pop()
                if then is not None:
                    self._within[-1] = then
                self._write()

        setattr(kind, name, noted)


def net() -> nn.Module:
    torch.manual_seed(0)
    # Its gradients are several buckets, most of which are added up by gloo's own sum.
    return nn.Sequential(
        nn.Linear(32, 512), nn.Tanh(), nn.Dropout(0.1), nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 5)
    )


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 32, generator=generator), torch.randint(0, 5, (samples,), generator=generator)


def train(folder: Path, kind: str, windows: int) -> None:
    """Train as a rank of this process' environment, and note what is done."""
    rank = int(os.environ["RANK"])
    notes = Notes(folder / f"notes-{rank}")
    notes.around(Group, "__init__", "starting", then="before the first window")
    notes.around(Channel, "begin_sum", "a sum")
    notes.around(Group, "exchange", "an exchange")
    notes.around(RunDirectory, "save", "a checkpoint")
    notes.around(Validator, "run", "validation")
    time.sleep(random.Random(f"{folder} {rank}").uniform(0, SKEW))
    model = net()
    options: dict[str, Any] = {"run_dir": folder / "run", "checkpoint_every": 3, "validation_data": data(400)}
    options |= {"validate_every": 160}
    if kind == "sharded":
        options = {}
        join(torch.device("cpu"))
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        for layer in (model[0], model[3], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)

    def heard(record: Any) -> None:
        if isinstance(record, StepReport):
            notes.now("a window")
        if isinstance(record, Finished):
            notes.now("ending")

    before = SharedTransaction.begin

    def begin(self: Any, window: Any) -> None:
        notes.now("a window")
        before(self, window)

    SharedTransaction.begin = begin  # type: ignore[method-assign]
    autoaccum.fit(
        model, data(400), loss_fn=cross_entropy, effective_batch=40, micro_batch=5, lr=1e-3, steps=windows,
        device="cpu", progress=False, cache=False, callbacks=[heard], **options,
    )  # fmt: skip


class IsRank(BaseException):
    """This process is a rank that was forked: it has to leave what its parent was doing."""


def fork(folder: Path, rank: int, size: int, port: int, kind: str, windows: int) -> int:
    """Begin a rank; return its process' number."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1)  # says where it hangs
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()}
    try:
        train(folder, kind, windows)
    except BaseException as error:
        sys.last_value = error  # as of an error that nobody catches
        traceback.print_exc()
        raise IsRank from error
    raise IsRank


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What came of one moment."""

    kind: str
    size: int
    victim: int
    asked: str
    """What the rank was to be doing."""
    doing: str
    """What it did."""
    seconds: list[float]
    """Until each of the others had ended."""
    said: list[str]
    """How each of the others has ended: ``told`` where its error says that a rank is lost, ``well``, or the error."""
    load: float


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def said_of(folder: Path, rank: int, status: int | None) -> str:
    """Return how a rank has ended."""
    if status is None:
        return "hangs"
    if status == 0:
        return "well"
    found = lines(folder / f"output-{rank}")
    if any("RankError: another rank has ended" in line for line in found):
        return "told"
    errors = [line for line in found if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return (errors or found or ["nothing was said"])[-1][:160]


def lose(folder: Path, kind: str, generator: random.Random) -> Ended:
    """Kill a rank of a run at a moment that is drawn, and wait for the others."""
    of_one = ("a checkpoint", "validation")  # what the first rank alone does, and no sharded model
    asked = generator.choice([moment for moment in MOMENTS if kind == "plain" or moment not in of_one])
    size = generator.choice((2, 3))
    victim = 0 if asked in of_one else generator.randrange(size)
    most, longest = MOMENTS[asked]
    often, after = generator.randint(1, most), generator.uniform(0, longest)
    windows = 6 if asked == "ending" else 10_000
    port = free_port()
    pids = [fork(folder, rank, size, port, kind, windows) for rank in range(size)]
    limit = time.monotonic() + TO_BEGIN
    while lines(folder / f"notes-{victim}").count(asked) < often and time.monotonic() < limit:
        time.sleep(0.001)
    time.sleep(after)
    os.kill(pids[victim], signal.SIGKILL)
    lost_at = time.monotonic()
    doing = (lines(folder / f"notes-{victim}") or ["starting"])[-1]
    statuses: dict[int, int] = {}
    seconds: dict[int, float] = {}
    others = [rank for rank in range(size) if rank != victim]
    has_told = False
    while len(statuses) < len(others) and time.monotonic() < lost_at + PATIENCE:
        for rank in others:
            if rank not in statuses and (found := os.waitpid(pids[rank], os.WNOHANG))[0]:
                statuses[rank], seconds[rank] = found[1], time.monotonic() - lost_at
        if not has_told and time.monotonic() > lost_at + 20:
            has_told = True
            for rank in set(others) - set(statuses):
                os.kill(pids[rank], signal.SIGUSR1)
        time.sleep(0.005)
    for rank in [victim, *(set(others) - set(statuses))]:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return Ended(
        kind=kind, size=size, victim=victim, asked=asked, doing=doing,
        seconds=[seconds.get(rank, PATIENCE) for rank in others],
        said=[said_of(folder, rank, statuses.get(rank)) for rank in others],
        load=os.getloadavg()[0],
    )  # fmt: skip


def ends(options: argparse.Namespace, place: Path) -> list[Ended]:
    """Lose as many ranks as was asked for."""
    wanted = {"plain": options.kills, "sharded": options.sharded_kills}
    found: list[Ended] = []
    for kind, number in wanted.items():
        for index in range(number):
            if options.only is not None and index != options.only:
                continue
            generator = random.Random(f"{options.seed} {kind} killed {index}")
            folder = place / f"{kind}-{index}"
            folder.mkdir()
            one = lose(folder, kind, generator)
            found.append(one)
            told = f"{max(one.seconds):.2f} s, {one.said}"
            print(f"{kind} {index}: rank {one.victim} of {one.size} in {one.doing}: {told}", flush=True)
            if max(one.seconds) < 10 and not options.keep:
                shutil.rmtree(folder)
    return found


class Launched:
    """A run of ranks that torchrun starts, anew where they are killed."""

    def __init__(self, folder: Path, size: int, restarts: int, dropout: float) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1"]
        command += [str(Path(__file__).with_name("rank_elastic.py")), "--task", str(folder), "--steps", "120"]
        command += ["--seconds", "0.02", "--dropout", str(dropout)]
        self.output = (folder / "output").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.agent = subprocess.Popen(command, env=environment, stdout=self.output, stderr=self.output)
        self.folder, self.size = folder, size

    def kill(self, generator: random.Random, longest: float, before: set[int]) -> set[int]:
        """Kill a rank at some moment, once all that were started anew are there; return what was killed with it."""
        agent = psutil.Process(self.agent.pid)
        while len(ranks := {each.pid for each in agent.children()} - before) < self.size:
            if self.agent.poll() is not None:
                return set()
            time.sleep(0.005)
        until = time.monotonic() + generator.uniform(0, longest)
        while time.monotonic() < until:
            if self.agent.poll() is not None:
                return set()
            time.sleep(0.01)
        os.kill(generator.choice(sorted(ranks)), signal.SIGKILL)
        return ranks

    def left(self) -> torch.Tensor:
        """Return the weights that the run leaves, once it has ended."""
        if self.agent.wait(600):
            raise SystemExit(f"the run in {self.folder} has failed: {(self.folder / 'output').read_text()[-2000:]}")
        return torch.load(self.folder / "left-0.pt")[0]  # type: ignore[no-any-return]


def while_starting(place: Path, generator: random.Random, number: int) -> list[float]:
    """Return the seconds until torchrun has ended, with all ranks, of which it has started one that is killed soon."""
    seconds = []
    for index in range(number):
        run = Launched(place / f"starting-{index}", 3, 0, 0.0)
        run.kill(generator, 4.0, set())
        lost_at = time.monotonic()
        run.agent.wait(PATIENCE)
        seconds.append(time.monotonic() - lost_at)
        print(f"starting {index}: {seconds[-1]:.2f} s", flush=True)
    return seconds


def restarted(place: Path, generator: random.Random, kills: int) -> tuple[int, bool]:
    """Return how often a run of two ranks was killed, and whether it leaves the weights of one that was not."""
    expected = Launched(place / "whole", 2, 0, 0.1).left()
    run, done = Launched(place / "again", 2, kills, 0.1), 0
    ranks: set[int] = set()
    while done < kills and (ranks := run.kill(generator, 4.0, ranks)):
        done += 1
        print(f"restart {done}", flush=True)
    return done, bool(torch.equal(run.left(), expected))


def with_fewer(place: Path) -> float:
    """Return how far off weights are of a run whose three ranks are killed, and that goes on with two."""
    expected, _ = alone(place, 120)
    run = Launched(place / "fewer", 3, 0, 0.0)
    while not (place / "fewer" / "told").exists() or len(lines(place / "fewer" / "told")) < 60:
        time.sleep(0.01)
    run.kill(random.Random(0), 0.1, set())
    run.agent.wait(PATIENCE)
    found = Launched(place / "fewer", 2, 0, 0.0).left()
    return float((found - expected).norm() / expected.norm())


def figures_of(found: list[Ended]) -> list[str]:
    """Return how many there were, how the others have ended, and the seconds until all had."""
    last = [max(one.seconds) for one in found]
    said = Counter(word if word in ("told", "well", "hangs") else "other" for one in found for word in one.said)
    counts = [str(said[word]) for word in ("told", "well", "other", "hangs")]
    return [str(len(found)), *counts, f"{statistics.median(last):.2f}", f"{max(last):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--sharded-kills", type=int, default=10)
    parser.add_argument("--starting", type=int, default=5, help="kills of a rank that torchrun has just started")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--only", type=int, help="the number of a moment of each kind, to repeat it alone")
    parser.add_argument("--keep", type=Path, help="where to leave what ranks have said")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autoaccum.AutoaccumWarning)
    place = options.keep or Path(tempfile.mkdtemp())
    place.mkdir(exist_ok=True, parents=True)
    found = ends(options, place)
    if options.only is not None:
        return
    loads = sorted(one.load for one in found)
    starting = while_starting(place, random.Random(options.seed), options.starting)
    done, is_same = restarted(place, random.Random(options.seed), options.restarts)
    off = with_fewer(place)
    rows = []
    for kind in dict.fromkeys(one.kind for one in found):
        of_kind = [one for one in found if one.kind == kind]
        model = {"plain": "on each rank", "sharded": "sharded by FSDP2"}[kind]
        rows.append([model, "**at any moment**", *figures_of(of_kind)])
        for doing in sorted({one.doing for one in of_kind}):
            rows.append([model, doing, *figures_of([one for one in of_kind if one.doing == doing])])
    if starting:
        figures = [f"{statistics.median(starting):.2f}", f"{max(starting):.2f}"]
        rows.append(["on each rank", "starting, under torchrun", str(len(starting)), *["-"] * 4, *figures])
    left = "the weights of the run never killed, to the bit" if is_same else "OTHER WEIGHTS"
    times = f"killed {done} times at any moment and started anew by torchrun"
    of_restarts = f"A run of two ranks with dropout, {times}, left {left}. " if done else ""
    write_table(
        "rank_ends",
        f"One of 2 or 3 ranks is killed (SIGKILL) at moments drawn from seed {options.seed}; "
        f"seconds are those until the last of the others has ended, the time in which Python ends too, on a machine of "
        f"which others used the cores as well (load {loads[0]:.0f} to {loads[-1]:.0f}). Counted is each of the others: "
        f"those whose `RankError` says that a rank has ended, those that had trained to their end or did so without "
        f"it, those that ended by another error, and those that did not end in {PATIENCE:.0f} s. Of torchrun, which "
        f"ends all ranks itself, the seconds are until it has ended.\n\n"
        f"{of_restarts}A run of three ranks that was killed and went on with two is {off:.1e} off what one process "
        "trains, in float64.",
        ["model", "what the rank did", "times", "told", "ended well", "other errors", "hang",
         "median s", "largest s"],
        rows,
        threads=1,
    )  # fmt: skip
    if options.keep is None:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except IsRank as rank:
        # Past everything that its parent was in the midst of, to the end of a process.
        sys.exit(1 if rank.__cause__ is not None else 0)
