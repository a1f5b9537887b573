"""Batches of validation, test and prediction in Lightning, run in pieces once memory has run out in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from autoaccum.data import batches, randomness
from autoaccum.data.splits import Automatic, split_of
from autoaccum.errors import DataError, OutputError
from autoaccum.integrations.evaluation_sizes import smaller
from autoaccum.integrations.lightning_records import Record, Records, mean
from autoaccum.memory.oom import RanOut, attempt

_Parts = list[tuple[Record, int, Any]]
_PREDICT = "predict_step"
_ROWS = "tensors with a row for each sample, lists with an entry for each, or a dict or tuple of these"


class Evaluation:
    """One kind of step (validation, test or prediction), with the size that is known to fit it."""

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
            OutputError: pieces of a prediction cannot be made one.
        """
        trainer = self._trainer
        if hasattr(batch, "__next__"):  # an iterator over batches has nothing to cut
            return self._stock(batch, *rest, **kwargs)
        # The loop of predictions has no results, and refuses to log: there metrics alone are kept apart.
        results = SimpleNamespace() if trainer._results is None else trainer._results
        records = Records(results, trainer.lightning_module)
        if self.largest is None:
            # Outside of any handler, which would pin what the failed forward has computed.
            outcome = attempt(partial(self._run, records, batch, rest, kwargs))
            if not isinstance(outcome, RanOut):
                records.log([(outcome[0], 1)])
                return outcome[1]
            self._shrink(self._split.count(batch, "batch"), outcome)
        parts = self._in_pieces(records, batch, rest, kwargs)
        records.log([(record, samples) for record, samples, _ in parts])
        returned, sizes = [found for *_, found in parts], [samples for _, samples, _ in parts]
        # One piece is the whole batch, whose outputs may be anything.
        return returned[0] if len(parts) == 1 else joined(returned, sizes, is_prediction=self._name == _PREDICT)

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
        of_what = "prediction" if self._name == _PREDICT else "evaluation"
        cure = f"Let the DataLoader of {of_what} have batch_size={{size}} to begin so."
        self.largest = smaller(tried, outcome, self._name, self._trainer.strategy.root_device, cure)


def joined(parts: Sequence[Any], sizes: Sequence[int], *, is_prediction: bool = False) -> Any:
    """Return what pieces of a batch have returned as one: rows and entries of samples joined, means of scalars.

    Args:
        parts: what each piece has returned.
        sizes: its samples.
        is_prediction: whether it is what the user asked for, so that it has to be right: else what cannot be made one
            is a list with an entry for each piece.

    Raises:
        OutputError: pieces of a prediction cannot be made one.
    """

    apart: list[tuple[str, Any]] = []

    def one(path: str, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if first is None:
            return None
        if isinstance(first, torch.Tensor) and not first.ndim:
            return mean(list(leaves), sizes)
        if batches.has_rows(first) and [batches.num_rows(leaf) for leaf in leaves] == list(sizes):
            return batches.join_rows(path, leaves)
        apart.append((path or "output", first))
        return list(leaves)

    is_leaf = Automatic().known(parts[0], sizes[0]).is_leaf_of(*parts)
    try:
        made = batches.joined_by(parts, is_leaf, one)
    except DataError:  # of other entries, or shapes, in each
        made = one("", parts)
    if apart and is_prediction:
        name, first = apart[0]
        kind = f"a tensor of shape {tuple(first.shape)}" if hasattr(first, "shape") else f"a {type(first).__name__}"
        cure = f"Memory ran out in a batch of {sum(sizes)}: let the DataLoader have batch_size={sizes[0]}."
        raise OutputError(name, f"{kind} for {sizes[0]} samples", _ROWS, cure)
    return made
