"""Whether kinds of data of several libraries are read whole, in order and on resuming, as in a plain loop.

    python benchmarks/loaders.py
    python benchmarks/loaders.py torch datasets

In a fresh environment with torch==2.13.0, numpy==2.4.6, datasets==5.2.0, h5py==3.16.0, zarr==3.1.6, pandas==3.1.1,
pyarrow==26.0.1, tensordict==0.15.3, torch_geometric==2.8.1, torchdata==0.11.0, webdataset==1.0.2, litdata==0.2.76,
mosaicml-streaming==0.13.0 and monai==1.6.1; a library that is not installed is left out.

The model has a weight for each sample, whose gradient counts how often the step was given it: so the weights tell what
was trained. Two epochs of 48 samples are trained in steps of 12 and micro-batches of 5, then again with a stop after
step 2 or 6, after which model and data are made anew. The plain loop iterates the same data. Times are of reading an
epoch of 2048 samples in batches of 64, without a model. Each line runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from loaders_kinds import DISTRIBUTIONS, EPOCHS, LIBRARIES, Kind, table
from results import write_table
from torch import nn

import autoaccum
from autoaccum.data.sources import open_source

SECONDS = 120
"""That a line may take."""
SAMPLES, BATCH, STOPS = 48, 12, (2, 6)
TIMED_SAMPLES, TIMED_BATCH, ROUNDS = 2048, 64, 5


# One line.


class Model(nn.Module):
    """A weight for each sample, and four for what the samples hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.features = nn.Parameter(torch.arange(4, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.seen[rows[:, 0].long()] + (rows[:, 1:] @ self.features / 8).tanh()


def rows_of(batch: Any) -> torch.Tensor:
    """Return the samples of a batch of any kind."""
    while not isinstance(batch, torch.Tensor):
        batch = batch[0] if isinstance(batch, tuple | list) else batch["x"]
    return batch.double()


def ids_of(batch: Any) -> list[int]:
    return rows_of(batch)[:, 0].long().tolist()


NONE = "0 lost, 0 twice"


def plain_epochs(kind: Kind) -> list[list[int]]:
    """Return the samples of each epoch of a plain loop; of endless data as many in one."""
    loader = kind.plain(kind.make(SAMPLES, BATCH), BATCH)
    if kind.is_endless:
        samples = itertools.chain.from_iterable(map(ids_of, loader))
        return [list(itertools.islice(samples, EPOCHS * SAMPLES))]
    return [[i for batch in batches_of(loader, epoch) for i in ids_of(batch)] for epoch in range(EPOCHS)]


def batches_of(loader: Any, epoch: int) -> Iterable[Any]:
    for part in (loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    return loader


class Run:
    """Training that may be stopped and resumed, with data and model made anew."""

    def __init__(self, kind: Kind, run_dir: str | None = None) -> None:
        self._kind, self._run_dir = kind, run_dir
        self.steps: list[tuple[int, list[int]]] = []
        """The epoch and the samples of each step."""
        self.weights = torch.cat([p.detach() for p in Model().parameters()])

    def fit(self, stop: int | None = None) -> None:
        torch.manual_seed(0)  # as a script does: some loaders draw when they are made
        model, seen = Model(), self.weights[:SAMPLES]

        def note(record: Any) -> None:
            nonlocal seen
            if isinstance(record, autoaccum.StepReport):
                now = model.seen.detach().clone()
                times = ((seen - now) * record.effective_batch).round().long().tolist()
                self.steps.append((record.epoch, [i for i in range(SAMPLES) for _ in range(times[i])]))
                seen = now
                if record.step == stop:
                    raise autoaccum.StopTraining

        budget = {"steps": EPOCHS * SAMPLES // BATCH} if self._kind.is_endless else {"epochs": EPOCHS}
        autoaccum.fit(
            model, self._kind.make(SAMPLES, BATCH), effective_batch=BATCH, micro_batch=5, device="cpu", progress=False,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), training_step=step, run_dir=self._run_dir,
            callbacks=[note], **budget, **self._kind.options,
        )  # fmt: skip
        self.weights = torch.cat([p.detach() for p in model.parameters()])


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(rows_of(batch)).mean()


def by_hand(steps: list[list[int]]) -> torch.Tensor:
    """Return the weights after a plain loop over the samples of these steps."""
    model, rows = Model(), table(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for ids in steps:
        optimizer.zero_grad()
        step(model, rows[ids]).backward()
        optimizer.step()
    return torch.cat([p.detach() for p in model.parameters()])


def differences(found: list[list[int]], expected: list[list[int]]) -> str:
    lost = sum((Counter(theirs) - Counter(ours)).total() for ours, theirs in zip(found, expected, strict=True))
    twice = sum((Counter(ours) - Counter(theirs)).total() for ours, theirs in zip(found, expected, strict=True))
    return f"{lost} lost, {twice} twice"


def of_epochs(kind: Kind, run: Run) -> list[str]:
    """Return the cells of samples, order and bits."""
    plain = plain_epochs(kind)
    found: list[list[int]] = [[] for _ in plain]
    for epoch, ids in run.steps:
        found[epoch] += ids
    said = differences(found, plain)
    if kind.order == "draws":
        is_right = [len(epoch) for epoch in found] == [len(epoch) for epoch in plain]
        said = f"{sum(map(len, found))} of {sum(map(len, plain))} drawn"
    else:
        is_right = said == NONE
    cells = [said if is_right else f"WRONG: {said}"]
    windows = [sorted(epoch[at : at + BATCH]) for epoch in plain for at in range(0, len(epoch), BATCH)]
    if kind.order == "same":
        cells.append("the same" if windows == [ids for _, ids in run.steps] else "WRONG: another")
    else:
        first, second = ([ids for at, ids in run.steps if at == epoch] for epoch in range(EPOCHS))
        cells.append("another each epoch" if first != second else "WRONG: the same in both epochs")
    expected = by_hand([ids for _, ids in run.steps])
    off = float((run.weights - expected).norm() / expected.norm())
    return [*cells, f"{off:.0e}" if off < 1e-14 else f"WRONG: {off:.0e}"]


def of_resume(kind: Kind, whole: Run, stop: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(kind, folder)
        run.fit(stop)
        try:
            run.fit()
        except autoaccum.AutoaccumError as error:
            return f"refused: {short(error)}"
    if run.steps == whole.steps:
        is_same = torch.equal(run.weights, whole.weights)
        return "bit-identical" if is_same else f"WRONG: {float((run.weights - whole.weights).norm()):.0e} off"
    epochs = [[i for at, ids in of.steps if at == run.steps[stop][0] for i in ids] for of in (run, whole)]
    return f"WRONG: {differences(*([epoch] for epoch in epochs))}, another order"


def of_time(kind: Kind) -> str:
    plain = kind.plain(kind.make(TIMED_SAMPLES, TIMED_BATCH), TIMED_BATCH)
    if isinstance(plain, Iterator) and kind.is_endless:
        return "not timed"
    options = {"shuffle": True, **kind.options}
    source = open_source(kind.make(TIMED_SAMPLES, TIMED_BATCH), seed=0, device=torch.device("cpu"), **options)
    batches = TIMED_SAMPLES // TIMED_BATCH
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    began = time.perf_counter()
    for epoch in range(ROUNDS):
        start = time.perf_counter()
        for _ in itertools.islice(batches_of(plain, epoch), batches if kind.is_endless else None):
            pass
        middle = time.perf_counter()
        reader = source.read(epoch, lambda position: [TIMED_BATCH])
        # Until it ends: workers of one that is left in the midst take seconds to end.
        for _ in range(batches if kind.is_endless else batches + 1):
            window = reader.window(TIMED_BATCH)
            if window is not None:
                window.micro_batch(0, window.num_samples)
        end = time.perf_counter()
        times["plain"].append(middle - start)
        times["ours"].append(end - middle)
        if end - began > 3:
            break
    ratio = statistics.median(ours / plain for ours, plain in zip(times["ours"], times["plain"], strict=True))
    ours, own = (statistics.median(times[name]) / TIMED_SAMPLES * 1e6 for name in ("ours", "plain"))
    return f"{ratio:.2f} ({ours:.0f} / {own:.0f} µs)"


def short(error: BaseException) -> str:
    said = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")
    return " ".join(said.split())[:160].replace("|", "/")


def cells(kind: Kind) -> list[str]:
    try:
        kind.make(SAMPLES, BATCH)
    except Exception as error:
        return [f"not here: {short(error)}", *[""] * 5]
    run = Run(kind)
    try:
        run.fit()
    except autoaccum.AutoaccumError as error:
        return [f"refused: {short(error)}", *[""] * 5]
    except ImportError as error:
        return [f"not here: {short(error)}", *[""] * 5]
    found = of_epochs(kind, run)
    for of in (*(lambda stop=stop: of_resume(kind, run, stop) for stop in STOPS), lambda: of_time(kind)):
        try:
            found.append(of())
        except Exception as error:
            found.append(f"WRONG: {short(error)}")
    return found


def line(library: str, name: str, folder: str, into: Any) -> None:
    """Put the cells of a line into a queue."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        os.chdir(folder)
        try:
            into.put(cells(LIBRARIES[library]()[name]))
        except Exception as error:
            into.put([f"WRONG: {short(error)}", *[""] * 5])


def lines(libraries: list[str]) -> Iterator[list[str]]:
    context = multiprocessing.get_context("fork")
    for library in libraries:
        try:
            version = importlib.metadata.version(DISTRIBUTIONS.get(library, library))
            kinds = LIBRARIES[library]()
        except ImportError:
            continue
        for name in kinds:
            queue = context.Queue()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                process = context.Process(target=line, args=(library, name, folder, queue))
                process.start()
                try:
                    found = queue.get(timeout=SECONDS)
                except Exception:
                    found = [f"not within {SECONDS} s", *[""] * 5]
                process.kill()
                process.join()
            yield [f"{library} {version}", name, *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", nargs="*", default=list(LIBRARIES))
    rows = []
    for row in lines(parser.parse_args().libraries):
        rows.append(row)
        print(json.dumps(row), flush=True)
    wrong = sum(any("WRONG" in cell for cell in row) for row in rows)
    write_table(
        "loaders",
        f"{len(rows)} kinds of data beside a plain loop, {wrong} of them wrong. Samples lost and read twice in two "
        f"epochs, their order by steps, how far off the weights are from a plain loop's over the same steps, what is "
        f"resumed in the midst of the first and of the second epoch beside a run that was not stopped, and the time to "
        f"read an epoch over that of the plain loop (in brackets).",
        ["library", "data", "samples", "order", "weights", "resumed in epoch 1", "in epoch 2", "time"],
        rows,
        quiet=True,
    )


if __name__ == "__main__":
    main()
