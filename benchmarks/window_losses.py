"""What a loss that compares all samples costs in joined micro-batches: time beside a whole batch, and memory.

    python benchmarks/window_losses.py
    python benchmarks/window_losses.py --rounds 60
    python benchmarks/window_losses.py --only memory

All train the same text encoder on the same pairs with the same loss, InfoNCE over all pairs of the window, and the same
optimizer. They take turns window by window, each in a process of its own that waits while the others run. A figure is
the median over the rounds. The losses of the first windows must agree, or nothing is written.

``GradCache`` is a loop by the paper, two passes over all micro-batches; ``sentence-transformers`` is its
``CachedMultipleNegativesRankingLoss``, with as many sentences at once as the other two, and takes part where it is
installed. The first hundred windows of ``fit``, which are looked at, have rows of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from results import write_table
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import autoaccum
from autoaccum._units import format_bytes
from autoaccum.events import Started
from autoaccum.step.contrastive import info_nce
from autoaccum.testing import simulated_memory

PAIRS = 128
"""Pairs of sentences of each window whose time is taken."""
LENGTH, WORDS = 16, 1000
WIDTH = 128
LOOKED_AT = 100
"""Windows that ``fit`` looks at closely."""
WARM_UP = 10
MICRO_BATCH = 32
WINDOWS = [64, 256, 1024, 4096, 16_384]
FITS = 1024
"""Pairs up to which the whole batch is run, too."""

WHOLE = "whole batch, by hand"

Seconds = Iterator[tuple[float, float]]
"""(seconds, loss) of one window after the other"""


class Encoder(nn.Module):
    """A transformer of two layers, whose outputs are averaged; in the form of a module of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(ids)).mean(1)

    def forward(self, features: dict[str, torch.Tensor], **_: Any) -> dict[str, torch.Tensor]:
        return features | {"sentence_embedding": self.embed(features["input_ids"])}


def pairs(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, WORDS, (num_samples, LENGTH), generator=generator)
    second = torch.where(torch.rand(first.shape, generator=generator) < 0.3, first.roll(1, 0), first)
    return first, second


def loss_of(embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    first, second = (normalize(one, dim=1) for one in embeddings)
    return cross_entropy(20 * first @ second.T, torch.arange(len(first)))


def embed(model: Encoder, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # Both at once: what is compared is how windows are brought together, and not how towers are called.
    first, second = model({"input_ids": torch.cat(batch)})["sentence_embedding"].chunk(2)
    return first, second


def of_all(model: Encoder, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(embed(model, batch))


def of_all_in_chunks(model: Encoder, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return info_nce(*embed(model, batch), temperature=0.05)


def adam_w(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def windows(data: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        for start in range(0, len(data[0]), PAIRS):
            yield data[0][start : start + PAIRS], data[1][start : start + PAIRS]


def by_loop(data: Any, step: Callable[[Encoder, Any], torch.Tensor]) -> Seconds:
    """A training loop by hand; ``step`` leaves the gradient of a window, and returns its loss."""
    model = Encoder()
    optimizer = adam_w(model.parameters())
    for window in windows(data):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = step(model, window)
        optimizer.step()
        yield time.perf_counter() - started, loss.item()


def whole(model: Encoder, window: Any) -> torch.Tensor:
    loss = loss_of(embed(model, window))
    loss.backward()
    return loss.detach()


def grad_cache(micro_batch: int) -> Callable[[Encoder, Any], torch.Tensor]:
    """Gao et al., 2021, section 3: all micro-batches without a graph, the loss, all micro-batches once more."""

    def step(model: Encoder, window: Any) -> torch.Tensor:
        pieces = list(zip(*(one.split(micro_batch) for one in window), strict=True))
        found, states = [], []
        with torch.no_grad():
            for piece in pieces:
                states.append(torch.get_rng_state())
                found.append(embed(model, piece))
        leaves = [torch.cat(column).requires_grad_() for column in zip(*found, strict=True)]
        after = torch.get_rng_state()
        loss = loss_of((leaves[0], leaves[1]))
        loss.backward()
        gradients = zip(*(leaf.grad.split(micro_batch) for leaf in leaves), strict=True)
        for piece, state, gradient in zip(pieces, states, gradients, strict=True):
            torch.set_rng_state(state)
            torch.autograd.backward(embed(model, piece), gradient)
        torch.set_rng_state(after)
        return loss.detach()

    return step


def sentence_transformers(micro_batch: int) -> Callable[[Encoder, Any], torch.Tensor] | None:
    """The library's own cached loss on the same encoder; None where it is not installed."""
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    except ImportError:
        return None
    made: dict[int, nn.Module] = {}

    def step(model: Encoder, window: Any) -> torch.Tensor:
        if id(model) not in made:
            encoder = SentenceTransformer(modules=[model], device="cpu")
            made[id(model)] = CachedMultipleNegativesRankingLoss(encoder, scale=20.0, mini_batch_size=2 * micro_batch)
        loss = made[id(model)]([{"input_ids": one} for one in window], None)
        loss.backward()
        return loss.detach()

    return step


def by_fit(data: Any, micro_batch: int) -> None:
    """Tell of one window of ``fit`` after the other, each of which waits to be asked for."""
    started = 0.0

    def after(record: Any) -> None:
        nonlocal started
        if isinstance(record, autoaccum.StepReport):
            print(json.dumps([time.perf_counter() - started, record.loss]), flush=True)
        elif not isinstance(record, Started):  # which comes when all is set up
            return
        if not sys.stdin.readline():
            raise autoaccum.StopTraining
        started = time.perf_counter()

    autoaccum.fit(
        Encoder(), data, effective_batch=PAIRS, micro_batch=micro_batch, training_step=of_all, accumulate="joined",
        optimizer=adam_w, steps=10**6, shuffle=False, device="cpu", progress=False, callbacks=[after],
    )  # fmt: skip


STEPS: dict[str, Callable[[int], Callable[[Encoder, Any], torch.Tensor] | None]] = {
    WHOLE: lambda _: whole,
    "GradCache by the paper": grad_cache,
    "sentence-transformers": sentence_transformers,
}


def serve(name: str, micro_batch: int) -> None:
    """Run a contestant, window by window, as they are asked for."""
    data = pairs(8 * PAIRS)
    if name == "fit":
        by_fit(data, micro_batch)
        return
    if (step := STEPS[name](micro_batch)) is None:
        return
    steps = by_loop(data, step)
    while sys.stdin.readline():
        print(json.dumps(next(steps)), flush=True)


class Contestant:
    """One of them, in a process of its own that waits while the others run."""

    def __init__(self, name: str, micro_batch: int, threads: int) -> None:
        command = [sys.executable, __file__, "--threads", str(threads), "--serve", name, str(micro_batch)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def window(self) -> tuple[float, float] | None:
        """(seconds, loss) of the next one; None where there is no such contestant."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            print(file=self._child.stdin, flush=True)
        except BrokenPipeError:
            return None
        line = self._child.stdout.readline()
        return tuple(json.loads(line)) if line else None


def compared(rounds: int, threads: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each contestant's windows: of those that ``fit`` looks at, and of later ones."""
    contestants = {WHOLE: Contestant(WHOLE, PAIRS, threads)}
    for part in (2, 4, 8):
        for name in ("fit", *STEPS):
            if name != WHOLE:
                contestants[f"N/{part}, {name}"] = Contestant(name, PAIRS // part, threads)
    early: dict[str, list[float]] = {name: [] for name in contestants}
    late: dict[str, list[float]] = {name: [] for name in contestants}
    for window in range(LOOKED_AT + WARM_UP + rounds):
        losses = {}
        for name, contestant in contestants.items():
            # The others' windows are steady from the first few on.
            if WARM_UP <= window < LOOKED_AT and "fit" not in name and name != WHOLE:
                continue
            if (found := contestant.window()) is None:
                continue
            losses[name] = found[1]
            if window >= WARM_UP:
                (early if window < LOOKED_AT else late)[name].append(found[0])
        if window < WARM_UP:
            for name, loss in losses.items():
                if abs(loss - losses[WHOLE]) > 1e-3 * abs(losses[WHOLE]):
                    raise SystemExit(f"{name}: the loss is {loss}, not {losses[WHOLE]}: not the same training")
    return early, {name: seconds[WARM_UP:] for name, seconds in late.items()}


def write_times(rounds: int, threads: int) -> None:
    early, late = compared(rounds, threads)
    rows = []
    for found, label in ((late, "{}"), (early, "{}, while windows are looked at")):
        of_whole = found[WHOLE]
        for name, seconds in found.items():
            if seconds and (found is late or "fit" in name):
                ratios = [one / other for one, other in zip(seconds, of_whole, strict=True)]
                rows.append(
                    [label.format(name), f"{statistics.median(seconds) * 1e3:.1f}", f"{statistics.median(ratios):.3f}"]
                )
    write_table(
        "window_losses",
        f"Windows of N = {PAIRS} pairs of sentences of {LENGTH} words, by a transformer encoder of two layers and "
        f"width {WIDTH}; medians of {rounds} rounds. Without all that is not arithmetic joined micro-batches "
        "would take 1.17, 1.25 and 1.29 times the whole batch where a backward takes twice its forward: all but the "
        "last micro-batch go forward twice. Whoever runs all of them twice would take 1.33.",
        ["micro-batch", "ms a window", "beside the whole batch"],
        rows,
        threads=threads,
    )


def peak_of(window: int, micro_batch: int) -> int:
    """Bytes at the peak of one window; of the whole batch with the loss of all pairs at once, as by hand."""
    step = of_all if micro_batch == window else of_all_in_chunks
    result = autoaccum.fit(
        Encoder(), pairs(window), effective_batch=window, micro_batch=micro_batch, training_step=step,
        accumulate="joined", optimizer=adam_w, steps=1, shuffle=False, device="cpu", progress=False,
    )  # fmt: skip
    return max(report.peak_bytes for report in result.history)


def in_a_process_of_its_own(window: int, micro_batch: int, threads: int, **environment: str) -> int:
    command = [sys.executable, __file__, "--threads", str(threads), "--row", str(window), str(micro_batch)]
    whole = {**os.environ, **environment}
    return int(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=whole).stdout))


def write_memory(threads: int) -> None:
    rows = []
    for window in WINDOWS:
        for micro_batch in [MICRO_BATCH] + [window] * (window <= FITS):
            with simulated_memory("64GiB"):
                simulated = peak_of(window, micro_batch)
            resident = in_a_process_of_its_own(window, micro_batch, threads)
            what = "the whole batch" if micro_batch == window else f"{MICRO_BATCH}, chunks of 256"
            # Blocks that large are given back to the system as they go, and leave no holes in the C library's heap.
            mapped = in_a_process_of_its_own(window, micro_batch, threads, MALLOC_MMAP_THRESHOLD_=str(2**20))
            rows.append([window, what, *map(format_bytes, (simulated, resident, mapped))])
            print(rows[-1], flush=True)
    write_table(
        "window_losses_memory",
        f"Peak of one window of pairs by the same encoder, in micro-batches of {MICRO_BATCH} pairs with `info_nce` in "
        "chunks of 256 rows, and as a whole batch with all pairs at once. What still grows with the window is its "
        f"data, its embeddings (2 x N x {WIDTH} numbers, and their gradients) and a chunk of the loss (256 x N). Where "
        "the resident set grows by more than that, it is by holes in the C library's heap that chunks of 16 MiB leave "
        "there: with `MALLOC_MMAP_THRESHOLD_=1048576` in the environment it does not.",
        ["pairs of the window", "micro-batch", "simulated device memory", "resident set", "of mapped blocks"],
        rows,
        threads=threads,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["times", "memory"])
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--row", type=int, nargs=2, help="print the peak bytes of one row (used by the script itself)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return
    if options.row:
        print(peak_of(*options.row))
        return
    if options.only != "memory":
        write_times(options.rounds, options.threads)
    if options.only != "times":
        write_memory(options.threads)


if __name__ == "__main__":
    main()
