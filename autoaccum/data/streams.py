"""Serves iterables as data: of samples, or of batches whose sizes need not be those that training asks for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from autoaccum.data import batches, lists
from autoaccum.data.arrays import converted
from autoaccum.data.base import Collate, NextPiece, PlanAt, Reader
from autoaccum.data.collating import collate_of
from autoaccum.data.contents import digest_of
from autoaccum.data.dims import AtDim
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import PEEK, BatchLengths, Padding, repeat_longest
from autoaccum.data.pieces import Pieces, SampleReader, batches_form, items_form, with_preserved_randomness
from autoaccum.data.randomness import IsolatedRandomness, mix
from autoaccum.data.splits import Automatic, is_said
from autoaccum.errors import DataError, EmptyDatasetError
from autoaccum.memory.oom import is_out_of_memory


class StreamSource:
    """Anything that can be iterated: over samples when ``collate`` is given, else over batches."""

    num_samples: int | None = None

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        collate: Collate | None,
        seed: int,
        device: torch.device,
        argument: str = "data",
        split: Any = None,
    ) -> None:
        """Set up.

        Args:
            stream: yields samples or batches; it is iterated over once for each pass.
            collate: makes a batch of a list of samples; None where the stream yields batches.
            seed: of what the stream draws.
            device: where micro-batches go.
            argument: what errors call the stream.
            split: what cuts and joins the batches; as they are read where it is None.
        """
        self._argument = argument
        self._stream = stream
        self._seed = seed
        self._device = device
        self._length_of_batch = BatchLengths()
        self._of_samples = collate is not None
        # A DataLoader makes tensors of arrays itself; its collate_fn, or who says how batches are cut, may want arrays.
        self._converts = not (isinstance(stream, DataLoader) or is_said(split))
        # One for all passes, for what the first batch has shown of its form holds for those of the next epoch.
        self._split = Automatic() if split is None else split
        self._form = batches_form(self._split)
        self._collate = None  # of samples that may differ in length, as default_collate's may not
        if collate is not None:
            # Without a dataset, for the stream yields samples: the reader only collates.
            collate_items = with_preserved_randomness(SampleReader(None, collate_of(collate, stream), seed))
            self._form = items_form(collate_items)
            self._collate = None if collate is default_collate else collate_items

    def description(self) -> dict[str, Any]:
        """Return its class, and how many workers share it: another number of them yields it in another order."""
        stream: Any = self._stream
        workers = getattr(stream, "num_workers", 0)
        if hasattr(stream, "dataset") and hasattr(stream, "sampler"):  # a DataLoader, or what is made of one
            stream = stream.dataset
        found = {"samples": None, "stream": type(stream).__name__} | ({"workers": workers} if workers else {})
        return found | (self._split.description() if isinstance(self._split, AtDim) else {})

    def content(self) -> str | None:
        """Return a digest of the first, the last and a few more batches of a list of them."""
        stream = self._stream
        if type(stream) is not list or not stream:
            return None
        count = min(len(stream), PEEK)
        chosen = [stream[number * (len(stream) - 1) // max(count - 1, 1)] for number in range(count)]
        return digest_of([leaf for batch in chosen for leaf in batches.flatten(batch)[0]])

    def read(self, epoch: int, plan_at: PlanAt, passed: Iterable[int] = ()) -> Reader:
        """Begin a pass over what the stream yields; the stream draws from random states of its own.

        What was passed is read again, for nothing else leads to what follows.
        """
        # As a loop by hand would before each epoch; of a DataLoader it is the dataset or the sampler that shuffles.
        for part in ("dataset", "sampler"):
            _set_epoch(getattr(self._stream, part, None), epoch)
        _set_epoch(self._stream, epoch)
        if self._collate is not None:
            padding = Padding(self._collate)  # of this pass, so that it does not depend on where a run begins
            reader: Reader = GroupedSamples(
                self._read_stream(epoch), collate=self._collate, padding=padding, device=self._device
            )
            return _skip(reader, passed)
        length_of_batch = None if self._of_samples else self._length_of
        reader = Pieces(self._read_stream(epoch), form=self._form, device=self._device, length_of_batch=length_of_batch)
        return _skip(reader, passed)

    def _length_of(self, batch: Any, num_samples: int) -> int | None:
        return self._length_of_batch(batch, num_samples, self._split)

    def _read_stream(self, epoch: int) -> NextPiece:
        """Begin to iterate; return what yields as many samples as it is asked for, or one batch."""
        # The stream draws from states of its own, whose place in between pieces is kept: so it yields the same
        # whatever training draws, and training the same whatever the stream does.
        isolated = IsolatedRandomness(mix(self._seed, epoch))
        with isolated():
            iterator = iter(self._stream)
        position = 0

        def next_piece(wished: int) -> tuple[int, Any]:
            nonlocal position
            # An iterator that has failed yields no more, as generators do: unlike a dataset it is not asked again.
            try:
                with isolated():
                    if not self._of_samples:
                        batch = next(iterator)
                        if self._converts:
                            if not position:
                                lists.refuse_sample(batch, self._argument)
                            batch = converted(batch)
                        position += 1
                        return self._split.count(batch, self._argument), batch
                    items = [(epoch, position + i, sample) for i, sample in enumerate(islice(iterator, wished))]
            except Exception as error:
                if is_out_of_memory(error):  # not to be taken for a micro-batch that does not fit
                    raise DataError(
                        f"{self._argument}: iterating over it ran out of memory ({error}); it cannot go on."
                    ) from error
                raise
            if not items:
                raise StopIteration
            position += len(items)
            return len(items), items

        return next_piece

    def example(self, num_samples: int) -> Any:
        """Return the first batch or sample of a pass of its own, repeated.

        With a collate_fn it is the longest of the first few samples.
        """
        if hasattr(self._stream, "__next__"):
            raise DataError(
                f"{self._argument}: an iterator can be read only once, and looking at it would take samples from "
                f"training. Pass something that can be iterated again: a Dataset, a DataLoader, a list of batches."
            )
        next_piece = self._read_stream(0)
        try:
            size, piece = next_piece(1 if self._collate is None else PEEK)
        except StopIteration:
            raise EmptyDatasetError(self._argument, "iterating over it yields nothing.") from None
        if not size:
            raise EmptyDatasetError(self._argument, "its first batch has no rows.")
        if self._collate is None:
            # Cut, and then joined: what is cut of a batch need not be of the batch's own form.
            # Whole ones first, and then what is left to reach the number.
            sizes = [size] * (num_samples // size) + [num_samples % size] * (num_samples % size > 0)
            parts = [self._form.take(piece, 0, count) for count in sizes]
            batch = self._form.finish(self._form.join(parts))
        else:
            batch = self._collate(repeat_longest(piece, num_samples))
        return batches.to_device(batch, self._device, copy=True)

    def uneven(self, num_samples: int) -> tuple[()]:
        """Return nothing: to begin a stream once more may take long."""
        return ()

    def form(self, num_samples: int) -> Any:
        """Return None: streams are read from one end to the other, and to look at one may be all there is of it."""
        return None


def _skip(reader: Reader, passed: Iterable[int]) -> Reader:
    """Take the windows of those sizes from a reader, and give it back."""
    for num_samples in passed:
        reader.window(num_samples)
    return reader


def _set_epoch(part: Any, epoch: int) -> None:
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
