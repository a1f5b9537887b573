"""Cuts batches of any form: what a split is, the ready ones, and what is taken where nobody passes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from autoaccum import _checks
from autoaccum._units import shown
from autoaccum.data import batches
from autoaccum.data.dims import AtDim, Dims, check_dims, hint_of
from autoaccum.data.flattened import Flattened
from autoaccum.data.lists import columns, holds_samples, is_leaf_of, unpacked_levels
from autoaccum.errors import ConflictingArgumentsError, DataError, RaggedBatchError
from autoaccum.memory.oom import is_out_of_memory

SplitLike = Callable[[Any, int, int], Any]
"""(batch, start, size) -> micro-batch; with methods ``count`` and ``join`` where it knows more: see ``Split``."""


class Split(Protocol):
    """What cuts a batch of some form, counts its samples, and joins what it has cut."""

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        """Return the ``size`` samples from ``start`` on as a batch of the same form; leave the batch as it is."""

    def count(self, batch: Any) -> int:
        """Return how many samples a batch holds."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Return what this has cut, of one batch or several, as one batch in that order."""


class _Rows(batches.SaidSplit):
    """Batches whose tensors have a row for each sample; lists that hold tensors are their parts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"autoaccum.splits.{self._name}"

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        return batches.take(batch, start, start + size, self.is_leaf_of(batch))

    def count(self, batch: Any, argument: str = "batch") -> int:
        return batches.num_samples(batch, argument, self.is_leaf_of(batch))

    def join(self, parts: Sequence[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        return batches.concat(parts, self.is_leaf_of(*parts))

    def is_leaf_of(self, *parts: Any) -> batches.IsLeaf:
        """Return what tells where the leaves of batches are."""
        return batches.is_leaf


class _Lists(_Rows):
    """Batches whose lists hold one entry for each sample."""

    def is_leaf_of(self, *parts: Any) -> batches.IsLeaf:
        # Of all of them together, for each has lists of its own.
        return is_leaf_of([node for part in parts for node in columns(part, is_said=True)])


tensors = _Rows("tensors")
"""Batches whose tensors have one row for each sample: a list that holds some is a part of the batch, as in
``[inputs, targets]``."""
samples = _Lists("samples")
"""Lists of samples, whatever these are: images, dicts, tuples. Several lists of one length, in a tuple or a dict, are
cut together, and tensors beside them in dim 0."""
graphs = _Lists("graphs")
"""Graphs as PyTorch Geometric has them: a ``Batch``, or a list of ``Data``, with tensors of one row for each graph."""
packed = _Rows("packed")
"""Packed sequences, in the order in which they were given to ``pack_sequence``, with tensors of a row for each."""


def flattened(*, none_if_empty: bool = False, **counts: str | Callable[[Any], Any]) -> Flattened:
    """Return the split of batches in which what belongs to all samples stands in one tensor, as images beside texts.

    Args:
        none_if_empty: pass None in place of an entry of which no sample of a micro-batch has anything.
        counts: by the name of such an entry, how many of its rows each sample has: the name of the entry of the batch
            that holds the numbers, or a function (batch) -> numbers. Of one with rows of numbers, such as
            ``image_grid_thw``, it is their product; and one that is named here itself has its numbers for each of its
            rows.

    >>> import torch
    >>> split = flattened(pixels="num_images")
    >>> batch = {"text": torch.arange(3), "num_images": torch.tensor([2, 0, 1]), "pixels": torch.tensor([5, 6, 7])}
    >>> split(batch, 1, 2)["pixels"]
    tensor([7])
    """
    return Flattened(counts, none_if_empty=none_if_empty)


class Automatic:
    """What cuts batches whose form nobody has said: it is read off them, and stays what it was found to be."""

    is_said = False

    def __init__(self, unpacked: int = 0) -> None:
        """Begin; ``unpacked`` tells what are arguments of a model or a loss: see ``reading.columns``."""
        self._unpacked = unpacked
        self._lists: bool | None = None
        """Whether lists hold samples; None until a batch has had one that might."""

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        """Return some of the samples."""
        return (samples if self._lists else tensors)(batch, start, size)

    def count(self, batch: Any, argument: str = "batch") -> int:
        """Count the samples in a batch, and tell what its lists are.

        Raises:
            AmbiguousBatchError: they may hold samples or parts, and nothing tells which.
            RaggedBatchError: its leaves disagree on how many samples there are.
            DataError: it has none.
        """
        # Once known it holds: the last batch of an epoch may be of three samples, and look like images.
        if self._lists is None:
            self._lists = holds_samples(batch, argument, self._unpacked)
        try:
            return self._of().count(batch, argument)
        except RaggedBatchError as error:
            raise RaggedBatchError(error.sizes, argument, hint_of(batch)) from None

    def join(self, parts: Sequence[Any]) -> Any:
        """Join what was cut."""
        return self._of().join(parts)

    def is_leaf_of(self, batch: Any) -> batches.IsLeaf:
        """Return what tells where the leaves of a batch are."""
        return self._of().is_leaf_of(batch)

    def known(self, batch: Any, count: int) -> _Rows:
        """Return what cuts a batch that is known to hold ``count`` samples, as what a collate_fn makes of so many."""
        # By its own lists, and not by those of other batches: data that are collated are never cut by this.
        return samples if holds_samples(batch, known=count) else tensors

    def _of(self) -> _Rows:
        return samples if self._lists else tensors


class Given(batches.SaidSplit):
    """What a user passes as ``split``: counts, and joins, as far as it does not say how."""

    def __init__(self, function: Any) -> None:
        self._function = function
        # A plain function may bear both as attributes, so that whoever has one need not write a class.
        self._count = getattr(function, "count", None)
        self._join = getattr(function, "join", None)
        # The ready split by which its parts are joined, and why there is none.
        self._ready: _Rows | None = None
        self._why = "no batch has had two samples"
        self._is_known = False

    def __call__(self, batch: Any, start: int, size: int) -> Any:
        """Return some of the samples.

        Raises:
            DataError: it returned nothing, or another number of them.
        """
        part = self._function(batch, start, size)
        if part is None:
            raise DataError(f"split: it returned nothing for (batch, {start}, {size}). End it with a return.")
        # One that counts for itself may make micro-batches that it cannot count, of a file say.
        sizes = set() if callable(self._count) else _sizes(part)
        if sizes and size not in sizes:
            raise DataError(
                f"split: asked for {size} samples from {start} on, it returned {' or '.join(map(str, sorted(sizes)))}. "
                f"It is called as (batch, start, size), and not with a stop."
            )
        return part

    def count(self, batch: Any, argument: str = "batch") -> int:
        """Count the samples in a batch.

        Raises:
            DataError: nothing tells how many there are.
        """
        # Here a batch is whole: what is joined later may be single samples of several.
        found = self._counted(batch, argument)
        if found > 1 and not self._is_known and not callable(self._join):
            self._is_known = True
            self._find_join(batch)
        return found

    def _find_join(self, batch: Any) -> None:
        """Find the ready split that makes, of the parts of two samples, what the function cuts of both."""
        try:
            first, second, both = (self._function(batch, *where) for where in ((0, 1), (1, 1), (0, 2)))
        except Exception as error:  # which may be no mistake, if training needs no single sample
            if is_out_of_memory(error):
                raise
            self._why = f"cutting one sample failed: {error!r}"
            return
        self._why = "two samples joined in dim 0 are not what it cuts of both"
        for ready in (tensors, samples):
            try:
                if batches.are_same(ready.join([first, second]), both):
                    self._ready = ready
                    return
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._why = str(error)

    def _counted(self, batch: Any, argument: str) -> int:
        if callable(self._count):
            count = self._count(batch)
            # A number of a tensor's or an array's is one too.
            number = count.item() if hasattr(count, "item") else count
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise DataError(
                    f"split: its count(batch) returned {shown(count)}. Let it return the samples as an int."
                )
            return number
        try:
            return Automatic().count(batch, argument)
        except DataError as error:
            # The length of a mapping or a tuple is that of its parts.
            if not isinstance(batch, Mapping | tuple | list) and hasattr(batch, "__len__"):
                return len(batch)
            raise DataError(
                f"{argument}: nothing tells how many samples a batch of type {type(batch).__name__} holds ({error}) "
                f"Give the function a count: split.count = lambda batch: ..., or pass an object with __call__(batch, "
                f"start, size) and count(batch)."
            ) from None

    def join(self, parts: Sequence[Any]) -> Any:
        """Join what was cut: by its own function, or in dim 0.

        Raises:
            DataError: that does not give what it cuts.
        """
        if callable(self._join):
            return self._join(list(parts))
        if len(parts) == 1:
            return parts[0]
        why = self._why
        if self._ready is not None:
            try:
                return self._ready.join(parts)
            except DataError as error:
                why = str(error)
        raise DataError(
            f"split: what it cuts cannot be joined ({why}). Give the function a join: split.join = lambda parts: ..., "
            f"or pass an object that has a join(parts) besides."
        )


def _sizes(part: Any) -> set[int]:
    """Return how many samples a micro-batch may hold, by either reading of its lists; nothing where none fits."""
    found = set()
    for split in (tensors, samples):
        with suppress(DataError):
            found.add(split.count(part))
    return found


def split_of(
    split: object, batch_dim: Dims, loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None
) -> Any:
    """Return what cuts batches, as arguments say.

    Raises:
        ArgumentError: ``split`` is no function, or ``batch_dim`` no dim.
        ConflictingArgumentsError: both are given.
    """
    # An option that does not exist for whoever asks is None.
    # Nor has a recipe that a sweep counts the samples of.
    dims = 0 if batch_dim is None else batch_dim
    check_dims(dims)
    if split is None:
        is_first = isinstance(dims, int) and dims == 0
        return Automatic(unpacked_levels(loss_fn, training_step)) if is_first else AtDim(dims)
    if not (isinstance(dims, int) and dims == 0):
        raise ConflictingArgumentsError("batch_dim", dims, "split", "A split says itself where samples lie.")
    # The ready ones count and join themselves; of a user's function that has to be found out.
    if isinstance(split, _Rows | Flattened):
        return split
    _checks.no_class("split", split, "a function (batch, start, size) -> micro-batch, or one of autoaccum.splits")
    _checks.function("split", split, ("batch", "start", "size"), "micro-batch")
    return Given(split)


def is_said(split: Any) -> bool:
    """Return whether it is the user who has said how batches are cut."""
    return split is not None and bool(split.is_said)
