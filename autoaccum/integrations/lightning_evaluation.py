"""Batches of validation and test in Lightning, run in pieces once memory has run out in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autoaccum.data import randomness
from autoaccum.data.splits import split_of
from autoaccum.integrations.evaluation_sizes import smaller
from autoaccum.integrations.lightning_records import Record, Records, mean
from autoaccum.memory.oom import RanOut, attempt

_Parts = list[tuple[Record, int, Any]]


class Evaluation:
    """One kind of step (validation or test), with the size that is known to fit it."""

    def __init__(self, trainer: Any, name: str, stock: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Set up.

        Args:
            trainer: whose steps they are.
            name: of the step.
            stock: Lightning's own step, on a batch.
            options: of the windows, where it is said how batches are cut.
        """
        self._trainer = trainer
        self._name = name
        self._stock = stock
        self._split = split_of(options.get("split"), options.get("batch_dim", 0), None, None)
        self.largest: int | None = None
        """Samples of a piece; None while all batches have fitted as they are."""

    def step(self, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return what the step returns for a batch, in as many pieces as it takes.

        Raises:
            NothingFitsError: not even one sample fits.
        """
        trainer = self._trainer
        if trainer._results is None or hasattr(batch, "__next__"):  # an iterator over batches has nothing to cut
            return self._stock(batch, *rest, **kwargs)
        records = Records(trainer._results, trainer.lightning_module)
        if self.largest is None:
            # Outside of any handler, which would pin what the failed forward has computed.
            outcome = attempt(partial(self._run, records, batch, rest, kwargs))
            if not isinstance(outcome, RanOut):
                records.log([(outcome[0], 1)])
                return outcome[1]
            self._shrink(self._split.count(batch, "batch"), outcome)
        parts = self._in_pieces(records, batch, rest, kwargs)
        records.log([(record, samples) for record, samples, _ in parts])
        return joined([returned for *_, returned in parts], [samples for _, samples, _ in parts])

    def _in_pieces(self, records: Records, batch: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> _Parts:
        """Return what the step has left and returned of each piece of a batch, with the samples of the piece."""
        size, done = self._split.count(batch, "batch"), 0
        parts: _Parts = []
        while done < size:
            samples = min(self.largest or size, size - done)
            piece = self._split(batch, done, samples)
            outcome = attempt(partial(self._run, records, piece, rest, kwargs))
            if isinstance(outcome, RanOut):  # what came before it holds
                self._shrink(samples, outcome)
                continue
            parts.append((outcome[0], samples, outcome[1]))
            done += samples
        return parts

    def _run(self, records: Records, piece: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Record, Any]:
        """Run the step on a piece; where it fails, random numbers are those of before."""
        # A run that failed has drawn nothing: the pieces draw what they would have drawn at first.
        device = self._trainer.strategy.root_device
        before = randomness.get_state(device)
        try:
            with records.taking() as record:
                return record, self._stock(piece, *rest, **kwargs)
        except Exception:
            randomness.set_state(before, device)
            raise

    def _shrink(self, tried: int, outcome: RanOut) -> None:
        """Let pieces from now on be half as large as one that has run out of memory."""
        cure = "Let the DataLoader of evaluation have batch_size={size} to begin so."
        self.largest = smaller(tried, outcome, self._name, self._trainer.strategy.root_device, cure)


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return what pieces of a batch have returned as one: means of scalars, rows joined, anything else as a list."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.ndim else mean(list(parts), sizes)
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts], sizes) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(column, sizes) for column in zip(*parts, strict=True))
    return list(parts)
