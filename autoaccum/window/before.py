"""Calls ``before_window`` once a window, and gives micro-batches their part of what it has returned.

It sees all samples of the window on the host; by ``in_pieces`` it runs the model on them in micro-batches, of which
nothing but the results remains. Of what it returns, tensors with one row per sample are cut as the samples are, and all
else goes along whole. Which these are is measured, for ten class weights are as long as a window of ten samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoaccum import _checks
from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.loss.coupling import smallest_micro_batch
from autoaccum.loss.shared import BeforeWindow, Beside, Gives, joined, plain
from autoaccum.loss.stated import LossOf
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.cuts import cut
from autoaccum.window.attributes import Attributes
from autoaccum.window.precision import Autocast
from autoaccum.window.single_samples import SingleSampleError, may_need_another
from autoaccum.window.snapshot import Snapshot
from autoaccum.window.state import State

_CPU = torch.device("cpu")
Few = tuple[int, ...]
"""Some samples of a few, by their places among them."""


def before_window_of(
    before_window: Callable[..., Any] | None,
    loss_fn: Callable[..., Any] | None,
    training_step: Callable[..., Any] | None,
) -> BeforeWindow | None:
    """Return what is to be done before each window, as the signatures of these functions have it; None for nothing.

    Raises:
        ArgumentTypeError: it is no function of a batch, or of that and in_pieces, or a loss_fn does not take what it
            returns.
    """
    if before_window is None:
        return None
    _checks.no_class("before_window", before_window, "a function")
    names = _checks.positional(before_window)
    if names is not None and names.required == 2 and names.names[0] == "model":
        cure = "It is not given the model, but, as a second argument, in_pieces(function), which calls function(model, "
        accepted = "a function (batch) or (batch, in_pieces) -> what micro-batches get"
        raise ArgumentTypeError("before_window", before_window, accepted, f"{cure}micro_batch) on the window's pieces.")
    takes_pieces = names is not None and (names.required == 2 or names.names[1:2] == ("in_pieces",))
    parameters = ("batch", "in_pieces") if takes_pieces else ("batch",)
    cure = "It is called with all samples of a window; a second parameter is given in_pieces, which runs the model."
    _checks.function("before_window", before_window, parameters, "what micro-batches get", cure)
    return BeforeWindow(function=before_window, takes_pieces=takes_pieces, gives=_gives_of(loss_fn, training_step))


def _gives_of(loss_fn: Callable[..., Any] | None, training_step: Callable[..., Any] | None) -> Gives:
    # A loss_fn sees outputs and targets, and nothing of a batch that anything could be merged into.
    if loss_fn is not None:
        return "third"
    if training_step is None:
        return "merged"
    names = _checks.positional(training_step)
    if names is None:
        return "either"
    if names.required >= 3:
        return "third"
    return "either" if names.most >= 3 else "merged"


def counting(num_items: Any) -> Any:
    """Make a ``num_items`` that takes what micro-batches come in.

    One of one parameter is called with the micro-batch, merged or not, one of two with what is shared besides. Of
    several by name, each is made one.
    """
    if isinstance(num_items, Mapping):
        return {name: counting(one) for name, one in num_items.items()}
    if isinstance(num_items, list | tuple):
        return [counting(one) for one in num_items]
    if num_items is None:
        return None
    # Micro-batches come as one value, with all that belongs to them: a function of two is given its parts.
    names = _checks.positional(num_items)
    if names is not None and names.required >= 2:
        return lambda given: num_items(given.batch, given.shared)
    return lambda given: num_items(plain(given))


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a returned tree is to be cut."""

    rows: tuple[bool, ...]
    """Of each leaf, whether it has one row per sample."""
    leaves: tuple[Any, ...]
    """The leaves; those that are not cut are on the device."""
    spec: Any
    """The structure that they lie in."""

    def of(self, positions: Sequence[int], device: torch.device) -> Any:
        """Return the tree for some of the samples, on the device."""
        taken = []
        for is_cut, leaf in zip(self.rows, self.leaves, strict=True):
            if is_cut:
                # Copied, for a forward may write to its inputs, and a replay has to see them as they were.
                leaf = batches.to_device(_rows_of(leaf, positions), device, copy=True)
            taken.append(leaf)
        return self.spec.unflatten(taken)


class Sharing:
    """What calls the ``before_window`` of one run, and remembers what of its results has rows."""

    def __init__(
        self,
        before: BeforeWindow,
        *,
        model: Callable[..., Any],
        modules: Sequence[nn.Module],
        device: torch.device,
        autocast: Autocast,
    ) -> None:
        """Set up.

        Args:
            before: the user's function, and how its results are handed on.
            model: what functions that run in pieces are called with.
            modules: those whose buffers, attributes and random draws a forward may change; the first is the model.
            device: where micro-batches are computed.
            autocast: makes the context of each forward.
        """
        self.before = before
        self.device = device
        self._model = model
        self._modules = modules
        self._autocast = autocast
        # Whether leaves have rows, by their paths, for each structure that was returned: one decision for the run.
        self._rows: dict[tuple[str, ...], dict[str, bool]] = {}

    def begin(self, window: Window) -> SharedWindow:
        """Return a window whose micro-batches come with what is returned for it."""
        return SharedWindow(self, window)

    def state(self) -> State:
        """Remember what the function holds; the model is remembered by whoever runs it."""
        model = self._modules[0]
        return State((), (self.before.function,), self.device, (), without=frozenset(model.modules()))

    def state_of_all(self) -> State:
        """Remember the same for a call that is no part of a window, and what the function may write to the model."""
        parameters = [p for module in self._modules for p in module.parameters()]
        if any(map(is_lazy, parameters)):  # which the call builds, to stay as they are then
            return self.state()
        return State(self._modules, (self.before.function,), self.device, parameters)

    def alone(self, batch: Any) -> Beside:
        """Return a batch as the one micro-batch of a window of its own; the function's state stays as it is."""
        # The window is this batch: all that is returned belongs to it, so that there is nothing to cut.
        host = batches.to_device(batch, _CPU, copy=True)
        own = partial(batches.to_device, batch, self.device, copy=True)  # to write to, as a micro-batch is
        kept = self.state_of_all()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of statistics of the one sample that an example has
                shared = self._call(host, lambda function: self._forwards(function, iter([(own(), False)])))
        finally:
            kept.restore()
        return joined(self.before, batch, batches.to_device(shared, self.device, copy=False))

    def run(self, window: Window, num_samples: int, size: int) -> Any:
        """Call the function on the first samples of a window, in whose pieces there is room for ``size`` of them."""

        # Pieces have the size of the first micro-batch, and not those of the plan. While sizes are searched for nothing
        # else is known before the window; and whoever repeats it by its sizes gets the same pieces, to the bit.
        # Where samples differ in length the first ones are the longest, so that the others fit as well.
        def in_pieces(function: Callable[[Any, Any], Any]) -> Any:
            fewest = min(size, smallest_micro_batch(self._modules))
            try:
                return self._forwards(function, _pieces(window, cut(num_samples, size, fewest)))
            except SingleSampleError:
                # Of a plan of single samples the window is cut anew; of another one this was what is left over.
                if size == 1 or num_samples == 1:
                    raise
            return self._forwards(function, _pieces(window, cut(num_samples, size, 2)))

        # On the host, as the results of pieces are, also where the data lie on the device.
        batch = batches.to_device(window.samples(range(num_samples)), _CPU, copy=False)
        return self._call(_own(batch, is_one=num_samples == 1), in_pieces)

    # A result with a graph would be gone through by the backward of each micro-batch; the first one would free it.
    @torch.no_grad()
    def _call(self, batch: Any, in_pieces: Callable[[Any], Any]) -> Any:
        before = self.before
        shared = before.function(batch, in_pieces) if before.takes_pieces else before.function(batch)
        leaves, spec = batches.flatten(shared)
        return spec.unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    @torch.no_grad()
    def _forwards(self, function: Callable[[Any, Any], Any], pieces: Iterator[tuple[Any, bool]]) -> Any:
        """Run a function on micro-batches, of which nothing else remains; return its results joined, on the host.

        Raises:
            SingleSampleError: one sample of several has failed, and may need another.
        """
        _checks.function("before_window: in_pieces(function)", function, ("model", "micro_batch"), "tensors")
        results = []
        with self._no_trace():
            for micro_batch, is_one_of_several in pieces:
                try:
                    with self._autocast():
                        result = function(self._model, micro_batch)
                except Exception as error:
                    if is_one_of_several and may_need_another(error):
                        raise SingleSampleError(error) from error
                    raise
                # On the host, where the window is: results of all of it may be more than the device has room for.
                results.append(batches.to_device(result, _CPU, copy=False))
                del result, micro_batch  # before the next one is made
        return _joined(results)

    @contextmanager
    def _no_trace(self) -> Iterator[None]:
        # The first forward builds lazy layers, and whoever has it run puts back all else that it leaves.
        if any(is_lazy(p) for module in self._modules for p in module.parameters()):
            yield
            return
        # Not what the function itself holds: it may collect there what its forwards show.
        layers = {id(layer): layer for module in self._modules for layer in module.modules()}
        snapshot, attributes = Snapshot(self._modules, self.device), Attributes(layers.values())
        snapshot.take()
        try:
            yield
        finally:
            attributes.restore()
            # Random states too: training draws what it would have drawn without these forwards.
            snapshot.restore()

    def taken_apart(self, shared: Any, window: Window, size: int) -> _Part:
        """Return what was returned for a window, told apart in what has rows and what has none.

        Raises:
            ArgumentError: what had one row per sample in another window has not in this one.
        """
        num_samples = window.num_samples
        # By paths, for the leaves of two dicts need not come in the same order; and for each structure anew, for what
        # stands at a place of one says nothing of another.
        leaves, spec = batches.flatten(shared)
        paths = tuple(batches.paths(shared))
        known = self._rows.setdefault(paths, {})
        lengths = {path: len(leaf) for path, leaf in zip(paths, leaves, strict=True) if batches.has_rows(leaf)}
        open_ones = [path for path, length in lengths.items() if length == num_samples and path not in known]
        # A window of one sample is never cut, so that a later one may tell. What has another length than its window has
        # no rows, in this one and in those to come.
        if open_ones and num_samples > 1:
            known.update(self._measured(open_ones, window, size))
        for path, length in lengths.items():
            if known.get(path) and length != num_samples:
                found = f"{path or 'its result'} with {length} rows for {num_samples} samples"
                cure = (
                    "It had one row per sample in another window. What belongs to a window as a whole is passed whole "
                    "where it has a dim 0 of its own: x[None]."
                )
                raise ArgumentError("before_window", found, "one row per sample in each window", cure)
            if length != num_samples:
                known.setdefault(path, False)
        rows = tuple(known.get(path, False) for path in paths)
        # What is not cut is moved once a window, rows with each micro-batch: those of a whole window may be as large as
        # its samples, for which the device need not have room.
        placed = [
            leaf if is_cut else batches.to_device(leaf, self.device, copy=False)
            for is_cut, leaf in zip(rows, leaves, strict=True)
        ]
        return _Part(rows, tuple(placed), spec)

    def _measured(self, paths: Sequence[str], window: Window, size: int) -> dict[str, bool]:
        """Return which leaves have fewer rows where there are fewer samples, by calling the function once more."""
        num_samples = window.num_samples
        kept = self.state_of_all()
        try:
            # One sample fewer changes as little as can be: a length that follows is that of the samples.
            # A function of groups of samples takes no number that is none of whole groups.
            for fewer in (num_samples - divisor for divisor in range(1, num_samples) if num_samples % divisor == 0):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # of statistics of a single sample
                        shared = self.run(window, fewer, min(size, fewer))
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    continue
                finally:
                    kept.restore()
                leaves = dict(zip(batches.paths(shared), batches.flatten(shared)[0], strict=True))
                found = {}
                for path in paths:
                    leaf = leaves.get(path)
                    found[path] = batches.has_rows(leaf) and len(leaf) == fewer  # type: ignore[arg-type]
                return found
        finally:
            kept.restore()
        # It takes no fewer samples: what is as long as the window is taken for its rows, which most results are.
        return dict.fromkeys(paths, True)


class SharedWindow:
    """A window whose micro-batches come with what ``before_window`` has returned for it."""

    def __init__(self, sharing: Sharing, window: Window) -> None:
        """Begin it: what the function holds is remembered, for it is called anew in each attempt."""
        self._sharing = sharing
        self._window = window
        # Of the function alone: buffers and random states are rolled back with the window that this is.
        self._state = sharing.state()
        self._part: _Part | None = None  # what was returned; None before it was
        self.num_samples = window.num_samples
        self.lengths = window.lengths

    def prepare(self, size: int) -> None:
        """Call the function, unless that was done since the window began; pieces have up to ``size`` samples.

        Raises:
            SingleSampleError: a piece of one sample of several could not be run, and may need another.
        """
        if self._part is None:
            shared = self._sharing.run(self._window, self.num_samples, size)
            self._part = self._sharing.taken_apart(shared, self._window, size)

    def micro_batch(self, start: int, size: int) -> Beside:
        """Return some samples on the device, beside their part of what was returned."""
        return self.beside(self._window.micro_batch(start, size), range(start, start + size))

    def beside(self, batch: Any, positions: Sequence[int]) -> Beside:
        """Return the samples at those positions, which make that batch, beside their part of what was returned."""
        self.prepare(len(positions))
        assert self._part is not None
        return joined(self._sharing.before, batch, self._part.of(positions, self._sharing.device))

    def samples(self, positions: Sequence[int]) -> Any:
        """Return some samples as the data have them."""
        return self._window.samples(positions)

    def roll_back(self) -> None:
        """Forget what was returned, and put back what the function held when the window began."""
        self._part = None
        self._state.restore()


class Stretch:
    """A window of a few samples that are made into micro-batches as they are asked for, part by part."""

    lengths = None

    def __init__(self, parts: Sequence[Few], make: Callable[[Few], Any]) -> None:
        """Set up; ``make`` returns the batch of some of the samples."""
        self._order = [index for part in parts for index in part]
        self._make = make
        self.num_samples = len(self._order)

    def micro_batch(self, start: int, size: int) -> Any:
        """Return some samples, in the order of the parts."""
        return self._make(tuple(self._order[start : start + size]))

    def samples(self, positions: Sequence[int]) -> Any:
        """Return the samples at these positions on the host."""
        return batches.to_device(self._make(tuple(self._order[position] for position in positions)), _CPU, copy=False)


class SharedStretch(SharedWindow):
    """The same where a ``before_window`` shares something, for which the samples stay in their own order.

    A cut may take them in another one; what is computed of a window that has an order is still that of the window.
    """

    def __init__(
        self,
        sharing: Sharing,
        parts: Sequence[Few],
        make: Callable[[Few], Any],
        of: tuple[SharedWindow, Sequence[int]] | None = None,
    ) -> None:
        """Set up.

        Args:
            sharing: what calls the function.
            parts: all samples together.
            make: (part) -> its batch.
            of: a window, and where the samples are in it, whose results are to be theirs; None: it is called anew.
        """
        order = [index for part in parts for index in part]
        super().__init__(sharing, Stretch((tuple(sorted(order)),), make))
        self._order = order
        self._make = make
        self._of = of

    def prepare(self, size: int) -> None:
        """Call the function, unless another window's results are taken."""
        # A statistic of a few samples would give them other counts than those that the window has weighed them by.
        if self._of is None:
            super().prepare(size)

    def micro_batch(self, start: int, size: int) -> Beside:
        """Return some samples, in the order of the parts, beside their own rows of what was returned."""
        part = tuple(self._order[start : start + size])
        if self._of is not None:
            window, places = self._of
            return window.beside(self._make(part), [places[index] for index in part])
        return self.beside(self._make(part), part)


def _rows_of(leaf: Any, positions: Sequence[int]) -> Any:
    if isinstance(positions, range):
        return batches.take(leaf, positions.start, positions.stop)
    return batches.concat([batches.take(leaf, position, position + 1) for position in positions])


def sharing_of(job: Any) -> Sharing | None:
    """Return what calls the ``before_window`` of a job; None where there is none."""
    if job.before_window is None:
        return None
    return Sharing(job.before_window, model=job.model, modules=job.modules, device=job.device, autocast=job.autocast)


def loss_alone(
    loss_of: LossOf,
    before: BeforeWindow | None,
    *,
    model: Callable[..., Any],
    modules: Sequence[nn.Module],
    device: torch.device,
    autocast: Autocast,
) -> LossOf:
    """Make a loss of batches each of which is a window of its own: for those that no window is made of."""
    if before is None:
        return loss_of
    sharing = Sharing(before, model=model, modules=modules, device=device, autocast=autocast)

    def of_examples(called: Any, batch: Any) -> Any:
        return loss_of(called, batch if isinstance(batch, Beside) else sharing.alone(batch))

    return of_examples


def _pieces(window: Window, sizes: Sequence[int]) -> Iterator[tuple[Any, bool]]:
    """Yield the micro-batches of the first samples of a window, and whether each is one sample of several."""
    start = 0
    for size in sizes:
        yield window.micro_batch(start, size), size == 1 < sum(sizes)
        start += size


def _own(batch: Any, *, is_one: bool) -> Any:
    """Return a batch that may be written to: what nothing was gathered or joined for, as for one sample, is copied."""
    leaves, spec = batches.flatten(batch)
    owned = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (is_one or leaf._is_view()):
            leaf = leaf.clone()
        elif isinstance(leaf, np.ndarray) and (is_one or leaf.base is not None):
            leaf = leaf.copy()
        owned.append(leaf)
    return spec.unflatten(owned)


def _joined(results: Sequence[Any]) -> Any:
    """Join what a function has returned for the pieces of a window, along dim 0; numbers are put one after the other.

    Raises:
        ArgumentError: they cannot be joined.
    """
    first, spec = batches.flatten(results[0])
    flat = [batches.flatten(result)[0] for result in results]
    if any(len(leaves) != len(first) for leaves in flat):
        found = " and ".join(sorted({str(len(leaves)) for leaves in flat}))
        raise _not_joined(f"{found} tensors", "Return as many for each.")
    try:
        return spec.unflatten([_column(column) for column in zip(*flat, strict=True)])
    except (RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        cure = "Return one row for each sample or item, padded to one length, or what is summed over them."
        raise _not_joined(str(error), cure) from error


def _not_joined(found: str, cure: str) -> ArgumentError:
    accepted = "a function (model, micro_batch) -> tensors of one shape, but for dim 0"
    return ArgumentError("before_window: in_pieces(function)", found, accepted, cure)


def _column(parts: Sequence[Any]) -> Any:
    """Join what was returned at one place."""
    # What has no dim 0, such as a sum over the piece, has one row for each piece: a sum over these is the window's.
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts)) if first.ndim else torch.stack(list(parts))
    if isinstance(first, np.ndarray):
        return np.concatenate(list(parts)) if first.ndim else np.stack(list(parts))
    if isinstance(first, list | tuple):
        return type(first)([item for part in parts for item in part])
    return list(parts) if isinstance(first, int | float) else first
