"""Batches of validation and test in Lightning, run in pieces once memory has run out in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autoaccum.data import randomness
from autoaccum.data.splits import split_of
from autoaccum.errors import NothingFitsError
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
        size = self._split.count(batch, "batch") if self.largest is not None else None
        parts: _Parts = []
        done, most = 0, self.largest
        # Outside of any handler, which would pin what the failed forward has computed.
        while size is None or done < size:
            whole = most is None or size is None
            piece = batch if whole else self._split(batch, done, min(most or 1, size - done))
            outcome = attempt(partial(self._run, records, piece, rest, kwargs))
            if isinstance(outcome, RanOut):
                size = self._split.count(batch, "batch") if size is None else size
                tried = size if whole else min(most or 1, size - done)
                most = self.largest = self._smaller(tried, outcome)
                continue
            record, returned = outcome
            if whole:
                records.log([(record, 1)])
                return returned
            parts.append((record, min(most or 1, size - done), returned))
            done += parts[-1][1]
        records.log([(record, samples) for record, samples, _ in parts])
        return joined([returned for *_, returned in parts], [samples for _, samples, _ in parts])

    def _run(self, records: Records, piece: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Record, Any]:
        """Run the step on a piece; where it fails, random numbers are those of before."""
        device = self._trainer.strategy.root_device
        before = randomness.get_state(device)
        try:
            with records.taking() as record:
                return record, self._stock(piece, *rest, **kwargs)
        except Exception:
            randomness.set_state(before, device)
            raise

    def _smaller(self, tried: int, outcome: RanOut) -> int:
        if tried < 2:
            error = NothingFitsError(phase=self._name, micro_batch=1, peak_bytes=None, limit_bytes=None)
            raise error from outcome.error
        return (tried + 1) // 2


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
