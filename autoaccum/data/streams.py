"""Serves iterables as data: of samples, or of batches whose sizes need not be those that training asks for."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autoaccum.data import batches, lists
from autoaccum.data.arrays import converted
from autoaccum.data.base import Collate, PlanAt, Reader
from autoaccum.data.collating import collate_of
from autoaccum.data.digests import Rolling, digest_of, is_read, refuse_others
from autoaccum.data.dims import AtDim
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import PEEK, BatchLengths, Padding, repeat_longest
from autoaccum.data.parts import generators_of, set_epoch
from autoaccum.data.pieces import Pieces, SampleReader, batches_form, items_form, with_preserved_randomness
from autoaccum.data.randomness import IsolatedRandomness, mix, seed_host
from autoaccum.data.splits import Automatic, is_said
from autoaccum.errors import DataError, EmptyDatasetError
from autoaccum.memory.oom import is_out_of_memory

State = dict[str, Any]


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
        is_told: bool = True,
    ) -> None:
        """Set up.

        Args:
            stream: yields samples or batches; it is iterated over once for each pass.
            collate: makes a batch of a list of samples; None where the stream yields batches.
            seed: of what the stream draws.
            device: where micro-batches go.
            argument: what errors call the stream.
            split: what cuts and joins the batches; as they are read where it is None.
            is_told: whether ``collate`` tells what it yields; else ``collate`` is for samples, and what comes first
                tells whether it yields these.
        """
        self._is_told = is_told
        self.argument = argument
        self.stream: Any = stream
        self.seed = seed
        # Whoever can be put where it was need not be read again. A module has a state of another kind.
        names = ("state_dict", "load_state_dict")
        has_state = all(callable(getattr(stream, name, None)) for name in names)
        self.is_stateful = has_state and _can_be_called(getattr(stream, names[0]))
        self.fresh: Any = None
        """State of a stateful stream before its first read."""
        self.generators = generators_of(stream)
        """Those that the stream draws from beside the global ones, as far as it is seen from here."""
        self._newest: _Pass | None = None
        self._saved: State | None = None
        self._device = device
        self._length_of_batch = BatchLengths()
        self.yields_samples = collate is not None
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
        """Return its class, and how many workers share it: another number of them yields it in another order.

        Of a list of batches there is a digest of the first, the last and a few more.
        """
        stream = self.stream
        workers = getattr(stream, "num_workers", 0)
        if hasattr(stream, "dataset") and hasattr(stream, "sampler"):  # a DataLoader, or what is made of one
            stream = stream.dataset
        found = {"samples": None, "stream": type(stream).__name__} | ({"workers": workers} if workers else {})
        if type(stream) is list and stream:
            count = min(len(stream), PEEK)
            chosen = [stream[number * (len(stream) - 1) // max(count - 1, 1)] for number in range(count)]
            if (digest := digest_of([leaf for batch in chosen for leaf in batches.flatten(batch)[0]])) is not None:
                found["digest"] = digest
        return found | (self._split.description() if isinstance(self._split, AtDim) else {})

    def read(self, epoch: int, plan_at: PlanAt, passed: Iterable[int] = ()) -> Reader:
        """Begin a pass over what the stream yields; the stream draws from random states of its own.

        What was passed is read again, unless the stream can be put where it was: nothing else leads to what follows.

        Raises:
            DataError: an earlier process was given other samples there.
        """
        saved, self._saved = self._saved, None
        if saved is not None and saved["epoch"] != epoch:
            self._read_end(saved)
            saved = None
        begun = self._newest = self._pass(epoch, saved)
        start = begun.start
        if self._collate is not None:
            padding = Padding(self._collate)  # of this pass, so that it does not depend on where a run begins
            reader: Reader = GroupedSamples(
                begun.next_piece, collate=self._collate, padding=padding, device=self._device, start=start
            )
        else:
            reader = Pieces(
                begun.next_piece,
                form=self._form,
                device=self._device,
                length_of_batch=None if self.yields_samples else self._length_of,
                start=start,
            )
        for num_samples in (sum(passed) - start,) if start else passed:
            if num_samples:
                reader.window(num_samples)
        if saved is not None and not start:
            self._compare(begun, saved)
        return reader

    def _read_end(self, saved: State) -> None:
        """See that an epoch that has ended is the one that was trained on: by its last samples, or its first."""
        if not is_iterator(self.stream):  # which would be read once and for all
            begun = self._pass(saved["epoch"], saved)
            if begun.start:  # a stream that was put there goes on with the next epoch once this one has ended
                begun.skip()
            else:  # by its first samples alone, for all of it would have to be read again
                self._compare(begun, saved | saved["first"])

    def _compare(self, begun: _Pass, saved: State) -> None:
        if not begun.leads_to(saved):
            refuse_others(self.description()["stream"], saved["epoch"], saved["position"])

    def _pass(self, epoch: int, saved: State | None = None) -> _Pass:
        """Begin to iterate, where an earlier process has left it if that can be done at once."""
        # As a loop by hand would before each epoch; of a DataLoader it is the dataset or the sampler that shuffles.
        parts = (getattr(self.stream, name, None) for name in ("dataset", "sampler", "batch_sampler"))
        set_epoch(epoch, *parts, self.stream)
        if not self._is_told and saved is not None and "batches" in saved:
            self._settle(saved["batches"])
        if saved is not None and "fresh" in saved and self.is_stateful:
            found = _Pass(self, epoch, saved)
            if found.leads_to(saved):
                return found
            # The saved state does not lead there, because a shuffle buffer is not in it, say: read it all again.
            self.stream.load_state_dict(deepcopy(self.fresh))
        begun = _Pass(self, epoch)
        if not self._is_told and (first := begun.look()) is not None:
            self._settle(lists.are_batches(first, self.stream, self.argument))
        return begun

    def _settle(self, yields_batches: bool) -> None:
        """Take what the stream yields for batches, or for the samples that it was taken for."""
        self._is_told = True
        if yields_batches:
            self.yields_samples, self._collate, self._form = False, None, batches_form(self._split)

    def state_dict(self) -> State | None:
        """Return where the newest pass stands, and what it has come from."""
        return self._saved if self._newest is None else self._newest.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Let the next pass begin there."""
        self._newest, self._saved, self.fresh = None, state, state.get("fresh")

    def _length_of(self, batch: Any, num_samples: int) -> int | None:
        return self._length_of_batch(batch, num_samples, self._split)

    def piece(self, iterator: Iterator[Any], epoch: int, position: int, wished: int) -> tuple[int, Any]:
        """Return as many samples as wished for, or one batch, with their number; 0 where the samples have ended."""
        if self.yields_samples:
            items = [(epoch, position + i, sample) for i, sample in enumerate(islice(iterator, wished))]
            return len(items), items
        batch = next(iterator)
        if self._converts:
            if not position:
                lists.refuse_sample(batch, self.argument)
            batch = converted(batch)
        return self._split.count(batch, self.argument), batch

    def example(self, num_samples: int) -> Any:
        """Return the first batch or sample of a pass of its own, repeated.

        With a collate_fn it is the longest of the first few samples.
        """
        if is_iterator(self.stream):
            raise DataError(
                f"{self.argument}: an iterator can be read only once, and looking at it would take samples from "
                f"training. Pass something that can be iterated again: a Dataset, a DataLoader, a list of batches."
            )
        # The generators that it holds have their own states again afterwards: nothing of training is drawn here.
        begun = self._pass(0)
        try:
            size, piece = begun.next_piece(1 if self._collate is None else PEEK)
        except StopIteration:
            raise EmptyDatasetError(self.argument, "iterating over it yields nothing.") from None
        if not size:
            raise EmptyDatasetError(self.argument, "its first batch has no rows.")
        if self._collate is None:
            # Cut, and then joined: what is cut of a batch need not be of the batch's own form.
            # Whole ones first, and then what is left to reach the number.
            sizes = [size] * (num_samples // size) + [num_samples % size] * (num_samples % size > 0)
            parts = [self._form.take(piece, 0, count) for count in sizes]
            batch = self._form.finish(self._form.join(parts))
        else:
            batch = self._collate(repeat_longest(piece, num_samples))
        return batches.to_device(batch, self._device, copy=True)

    def form(self, num_samples: int) -> Any:
        """Return None: streams are read from one end to the other, and to look at one may be all there is of it."""
        return None


def is_iterator(data: object) -> bool:
    """Return whether data can be read only once. An ``IterableDataset`` that is its own iterator begins again."""
    return hasattr(data, "__next__") and not isinstance(data, IterableDataset)


def _can_be_called(function: Any) -> bool:
    """Return whether a function needs no argument, as of a dataset whose loader has to tell it what was read."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


class _Pass:
    """One iteration over a stream: it yields pieces, and knows where it stands."""

    def __init__(self, source: StreamSource, epoch: int, saved: State | None = None) -> None:
        """Begin to iterate.

        Args:
            source: of the stream.
            epoch: of the pass.
            saved: where an earlier process stood in this epoch, for a stream that can be put there.
        """
        self._source = source
        self._epoch = epoch
        self.start = self.position = 0
        self.digest = Rolling()
        # The stream draws from states of its own, whose place in between pieces is kept: so it yields the same
        # whatever training draws, and training the same whatever the stream does.
        self._isolated = IsolatedRandomness(mix(source.seed, epoch), source.generators)
        self._ahead: deque[tuple[int, Any]] = deque()  # pieces that were read to be compared
        self._first: State = {} if saved is None else saved["first"]  # where the first piece ends
        self._before: State = {}  # the newest piece, and where it begins
        self._state: Any = None  # of the stream, to put it where it was
        if saved is not None:
            self._state, self.start, self.position = saved["state"], saved["start"], saved["start"]
            self.digest = Rolling(saved["before"])
        self._iterator: Iterator[Any] | None = None

    def _begun(self) -> Iterator[Any]:
        """Return the iterator, made by whoever first asks it for something.

        So a stream that reads ahead in a thread, and draws there, has drawn before random states are changed again.
        """
        if self._iterator is None:
            if self._state is not None:
                self._source.stream.load_state_dict(deepcopy(self._state))
            elif self._source.is_stateful and self._source.fresh is None:
                # Here, because some make an iterator to tell it, which the next loop takes, and not a loaded state.
                self._source.fresh = deepcopy(self._source.stream.state_dict())
            # One that is its own iterator may begin anew whenever it is asked for one, as itertools do.
            self._iterator = (each for each in self._source.stream)
        return self._iterator

    def look(self) -> Any:
        """Return what comes first, which stays there; None where nothing comes."""
        with self._isolated():
            iterator = self._begun()
            first = next(iterator, None)
        if first is not None:
            self._iterator = chain([first], iterator)
        return first

    def leads_to(self, saved: State) -> bool:
        """Return whether what comes next is what an earlier process was given up to the place that it has saved."""
        with suppress(StopIteration):
            while self.position < saved["position"]:
                self._ahead.append(self._read(saved["position"] - self.position))
        return (self.position, self.digest.value) == (saved["position"], saved["digest"])

    def skip(self) -> None:
        """Read what is left."""
        with suppress(StopIteration):
            while True:
                self._read(1)

    def next_piece(self, wished: int) -> tuple[int, Any]:
        """Return the next samples, as a ``NextPiece``."""
        return self._ahead.popleft() if self._ahead else self._read(wished)

    def _read(self, wished: int) -> tuple[int, Any]:
        source, before = self._source, {}
        # An iterator that has failed yields no more, as generators do: unlike a dataset it is not asked again.
        try:
            if source.is_stateful and self.position:
                # Saved is the place before the newest piece, which is read again and compared: so it shows whether
                # the state leads there, and a batch may lie in two windows, or end the epoch. A stream that was just
                # put there is not asked: some would take the place that they had before for it.
                state = self._state if self._iterator is None else deepcopy(source.stream.state_dict())
                before = {
                    "start": self.position, "before": self.digest.value, "state": state, "fresh": source.fresh,
                }  # fmt: skip
            with self._isolated():
                iterator = self._begun()
                if before:  # what is drawn then follows from the place, however the stream came to it
                    seed_host(mix(source.seed, self._epoch, self.position))
                size, piece = source.piece(iterator, self._epoch, self.position, wished)
        except Exception as error:
            if is_out_of_memory(error):  # not to be taken for a micro-batch that does not fit
                raise DataError(
                    f"{source.argument}: iterating over it ran out of memory ({error}); it cannot go on."
                ) from error
            raise
        if source.yields_samples and not size:
            raise StopIteration
        for position, sample in [(at, sample) for _, at, sample in piece] if source.yields_samples else [(0, piece)]:
            if is_read(position):
                self.digest.add(sample)
        self.position += size
        self._before = before
        self._first = self._first or {"position": self.position, "digest": self.digest.value}
        return size, piece

    def state_dict(self) -> State:
        """Return where it stands, and where its first piece has ended."""
        reached = {"position": self.position, "digest": self.digest.value}
        return {
            "epoch": self._epoch,
            "batches": not self._source.yields_samples,
            **reached,
            "first": self._first or reached,
            **self._before,
        }
