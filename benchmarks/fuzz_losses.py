"""Calls check, probe, estimate, fit and Accumulator with each loss and model of benchmarks/verification.py.

Each of them works on a full batch in a plain loop. So a call ends well or in an error of autoaccum's, and nothing else.
Batches are of all sizes from one sample to eleven, and have samples that count for nothing, as at the begin of a set.

    python benchmarks/fuzz_losses.py [--calls 5] [--seed 0]
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from verification_cases import CASES, Case, Work
from verification_catalogue import load

import autoaccum

SIZES = (1, 2, 3, 5, 8, 11)


def batch_of(work: Work, size: int, is_first_alike: bool) -> Any:
    batch = work.data(size, is_first_alike)
    return batch if work.samples is None or work.collate is None else work.collate(work.samples(batch))


def check(work: Work, size: int, drawn: random.Random, is_alike: bool) -> None:
    autoaccum.check(work.model, batch_of(work, size, is_alike), **work.arguments())


def probe(work: Work, size: int, drawn: random.Random, is_alike: bool) -> None:
    arguments = {name: value for name, value in work.arguments().items() if name != "num_items"}
    autoaccum.probe(work.model, batch_of(work, size, is_alike), max_micro_batch=size, device="cpu", **arguments)


def estimate(work: Work, size: int, drawn: random.Random, is_alike: bool) -> None:
    arguments = {name: value for name, value in work.arguments().items() if name != "num_items"}
    autoaccum.estimate(work.model, batch_of(work, size, is_alike), device_memory="1GiB", **arguments)


def accumulator(work: Work, size: int, drawn: random.Random, is_alike: bool) -> None:
    optimizer = torch.optim.SGD(work.parameters(), lr=1e-3)
    micro_batch = drawn.choice(["auto", 1, 2, 3])
    made = autoaccum.Accumulator(work.model, optimizer, micro_batch=micro_batch, **work.arguments())
    for each in (size, drawn.choice(SIZES)):
        made.step(batch_of(work, each, is_alike))


def fit(work: Work, size: int, drawn: random.Random, is_alike: bool) -> None:
    autoaccum.fit(
        work.model, batch_of(work, size, is_alike), effective_batch=drawn.randint(1, size), epochs=1, device="cpu",
        micro_batch=drawn.choice(["auto", 1, 2]), cache=False, progress=False,
        optimizer=torch.optim.SGD(work.parameters(), lr=1e-3), **work.arguments(),
    )  # fmt: skip


CALLS: tuple[Callable[[Work, int, random.Random, bool], None], ...] = (check, probe, estimate, accumulator, fit)


def plain_fails(case: Case, size: int, is_alike: bool) -> bool:
    """Return whether a plain loop fails on such batches as well, or on the part of one that fit may be left with."""
    for each in {*SIZES, *range(1, size + 1)}:
        try:
            work = case.fresh()
            loss = work.loss(batch_of(work, each, is_alike))
            loss.sum().backward()
        except Exception:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=5, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load()
    drawn = random.Random(arguments.seed)
    ended: collections.Counter[str] = collections.Counter()
    num_wrong = 0
    for case in CASES:
        for call in drawn.sample(CALLS, arguments.calls):
            size, is_alike = drawn.choice(SIZES), drawn.random() < 0.3
            try:
                call(case.fresh(), size, drawn, is_alike)
                ended["well"] += 1
            except autoaccum.AutoaccumError as error:
                ended[type(error).__name__] += 1
            except Exception as error:
                if plain_fails(case, size, is_alike):
                    ended["in the loss's own error, as in a plain loop"] += 1
                    continue
                num_wrong += 1
                print(f"{case.name}: {call.__name__} of {size}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in ended.most_common()), f"{num_wrong} wrong", sep="; ")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
