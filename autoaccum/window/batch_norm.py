"""Whose statistics BatchNorm normalises by: those of fixed groups of the window's samples, or the running ones.

*Ghost* batch normalisation (Hoffer, Hubara and Soudry, "Train longer, generalize better", 2017, section 4) takes the
statistics of groups of a fixed size. The groups are runs of the window's own order, and a micro-batch holds whole ones,
so that how a window is cut decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.planning.granules import MICRO, Statistics, granules
from autoaccum.window.batch_norm_calls import Call, Calls
from autoaccum.window.precision import Autocast

ACCEPTED = "'micro', 'frozen', or 'ghost:' and the samples of a group, 2 at least, such as 'ghost:32'"
"""What ``batch_norm`` may be."""


def statistics_of(
    batch_norm: object,
    micro_batch: object = "auto",
    max_micro_batch: object = None,
    state: object = None,
) -> Statistics:
    """Return what ``batch_norm`` says, where the other arguments leave room for it.

    Raises:
        ArgumentError: it says nothing that there is, or a micro-batch has no room for a group.
        ConflictingArgumentsError: something else would have statistics of its own.
    """
    found = _read(batch_norm)
    if found.kind == "micro":
        return found
    if found.kind == "ghost" and state == "window":
        cure = f"Running statistics move as '{found}' has it: leave state out."
        raise ConflictingArgumentsError("batch_norm", str(found), 'state="window"', cure)
    for name, value in (("micro_batch", micro_batch), ("max_micro_batch", max_micro_batch)):
        if isinstance(value, int) and value < found.group:
            cure = f"A micro-batch holds whole groups of batch_norm='{found}': raise it, or choose smaller groups."
            raise ArgumentError(name, value, f"an int of at least {found.group}", cure)
    for plan in micro_batch if isinstance(micro_batch, list | tuple) and found.kind == "ghost" else ():
        sizes = plan if isinstance(plan, list | tuple) else ()
        if any(size % found.group for size in sizes[:-1]) or (len(sizes) > 1 and sizes[-1] == 1):
            cure = f"Micro-batches hold whole groups of batch_norm='{found}': pass plans that were recorded with it."
            raise ArgumentError("micro_batch", sizes, f"multiples of {found.group}, but for the last", cure)
    return found


def _read(batch_norm: object) -> Statistics:
    if isinstance(batch_norm, str) and batch_norm in ("micro", "frozen"):
        return Statistics("frozen" if batch_norm == "frozen" else "micro")
    name, _, group = batch_norm.partition(":") if isinstance(batch_norm, str) else ("", "", "")
    if name == "window":
        cure = "Leave it out: joined micro-batches run BatchNorm on the full batch (accumulate='auto')."
        raise ArgumentError("batch_norm", batch_norm, ACCEPTED, cure)
    # One sample has no statistics, so that a group of one is none.
    if name != "ghost" or not (group.isascii() and group.isdecimal()) or not 2 <= int(group) < 2**31:
        raise ArgumentError("batch_norm", batch_norm, ACCEPTED)
    return Statistics("ghost", int(group))


def refuse_unseen(
    statistics: Statistics,
    model: object,
    modules: Sequence[nn.Module],
    *,
    is_sharded: bool = False,
) -> None:
    """Refuse what statistics cannot be chosen for.

    Args:
        statistics: what was asked for.
        model: what is called.
        modules: those that are trained.
        is_sharded: whether the model is sharded over several ranks.

    Raises:
        ArgumentError: they hold code whose BatchNorm nobody sees, or lie on ranks that do not know of each other's.
    """
    if statistics.kind == "micro":
        return
    if statistics.kind == "ghost" and is_sharded:
        cure = (
            "Ranks cut it into as many micro-batches each, which need not hold whole groups: pass batch_norm='frozen', "
            "or convert_batch_norm(model), or do not call fully_shard."
        )
        raise ArgumentError("batch_norm", str(statistics), "'micro' or 'frozen' with a sharded model", cure)
    for part in (model, *(layer for module in modules for layer in module.modules())):
        # An interpreter of its own makes the calls of the one; the other would be compiled anew in each micro-batch.
        if (
            isinstance(part, torch.jit.ScriptModule)
            or hasattr(part, "_orig_mod")
            or getattr(part, "_compiled_call_impl", None)
        ):
            cure = (
                "Pass the module that it was made of, without compile=True; or convert it, convert_batch_norm(model), "
                "and leave batch_norm out."
            )
            accepted = f"a model that is neither compiled nor scripted beside batch_norm='{statistics}'"
            raise ArgumentError("model", type(part).__name__, accepted, cure)


def _layers_of(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())
    return [layer for layer in layers if isinstance(layer, _BatchNorm)]


def forwards_of(statistics: Statistics, modules: Sequence[nn.Module], autocast: Autocast) -> Forwards | None:
    """Return what makes the contexts of forwards and backwards; None where BatchNorm is left as it is."""
    return None if statistics == MICRO else Forwards(statistics, modules, autocast)


class Forwards:
    """The contexts in which the forwards and backwards of one run are computed."""

    def __init__(self, statistics: Statistics, modules: Sequence[nn.Module], autocast: Autocast) -> None:
        """Set up.

        Args:
            statistics: whose statistics BatchNorm normalises by.
            modules: those that may hold layers of it.
            autocast: makes the context of the precision.
        """
        self._statistics = statistics
        self._autocast = autocast
        # Once, for a walk through all modules of a model takes as long as some forwards.
        self._layers = _layers_of(modules)
        self.moved: list[Moved] | None = None
        """Where forwards leave how running statistics are to ``move``; None where they move these themselves."""

    def forward(self, num_samples: int) -> AbstractContextManager[Any]:
        """Return the context of a forward of so many samples."""
        stack = ExitStack()
        stack.enter_context(self._autocast())
        stack.enter_context(self._calls(num_samples, is_forward=True))
        return stack

    def backward(self, backward: Callable[[], None], num_samples: int) -> Callable[[], None]:
        """Return a backward in its context: a forward that was checkpointed is computed once more in it."""
        return partial(self._in_context, backward, num_samples)

    def _calls(self, num_samples: int, *, is_forward: bool) -> Calls:
        """Return what computes the calls of a forward, or of those that a backward computes once more."""
        return _Seen(self._statistics, self._layers, num_samples, is_forward=is_forward, moved=self.moved)

    @torch.no_grad()
    def move(self, moved: Sequence[Moved]) -> None:
        """Move running statistics, as the forwards would have done that have left it to this."""
        for found in moved:
            layer, momentum = self._layers[found.place], found.momentum
            assert layer.running_mean is not None
            assert layer.running_var is not None
            counter, counted = layer.num_batches_tracked, set()
            if counter is not None and found.is_counted:
                # A cumulative average goes by what all ranks have counted before, which no forward has known.
                if layer.momentum is None:
                    momentum = 1 / (int(counter.item()) + 1)
                # As the layer has done in its forward, before that was undone.
                counter.add_(len(found.calls))
                counted.add(id(counter))
            moves = _Moves(layer.running_mean, layer.running_var, layer, momentum)
            device = layer.running_mean.device
            moves.calls = [[(mean.to(device), var.to(device)) for mean, var in call] for call in found.calls]
            moves.make(counted)

    def _in_context(self, backward: Callable[[], None], num_samples: int) -> None:
        seen = self._calls(num_samples, is_forward=False)
        # Autograd runs what was checkpointed outside of any mode, perhaps in another thread: layers enter one alone.
        handles = []
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(seen.enter_before))
            handles.append(layer.register_forward_hook(seen.exit_after, always_call=True))
        try:
            backward()
        finally:
            for handle in handles:
                handle.remove()


class Moved(NamedTuple):
    """How the running statistics of a layer are to move by one forward; all of it on the host, to be told."""

    place: int
    """Of the layer, among those of the run."""
    momentum: float
    """Of its first call."""
    is_counted: bool
    """Whether the layer counts batches."""
    calls: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]
    """Mean and variance of each group, by call."""


class _Moves:
    """How running statistics are to move, by the groups of all calls of one layer in one forward."""

    def __init__(
        self, running_mean: torch.Tensor, running_var: torch.Tensor, layer: _BatchNorm | None, momentum: float
    ) -> None:
        self._running = running_mean, running_var
        self._layer = layer
        self._momentum = momentum  # of the first call
        self.calls: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        """Mean and variance of each group, by call."""

    @torch.no_grad()
    def make(self, counted: set[int]) -> None:
        """Move them group by group, and within a group call by call, so that it matters not which groups lie beside.

        ``counted`` are the counters, by their ids, that each call has moved by one.
        """
        # A cumulative average gives the n-th batch the weight 1/n, and the first call has counted the first of these.
        is_cumulative = self._layer is not None and self._layer.momentum is None
        for index, own in enumerate(call for calls in zip(*self.calls, strict=True) for call in calls):
            factor = 1 / (round(1 / self._momentum) + index) if is_cumulative else self._momentum
            for running, value in zip(self._running, own, strict=True):
                running.mul_(1 - factor).add_(value, alpha=factor)
        counter = None if self._layer is None else self._layer.num_batches_tracked
        if counter is not None and id(counter) in counted:
            counter.add_(sum(map(len, self.calls)) - len(self.calls))

    @torch.no_grad()
    def later(self, place: int, counted: set[int]) -> Moved:
        """Return how they are to move, and leave them as they were; see ``make``."""
        counter = None if self._layer is None else self._layer.num_batches_tracked
        is_counted = counter is not None and id(counter) in counted
        if counter is not None and is_counted:  # by the layer itself, once a call
            counter.add_(-len(self.calls))
        calls = [[(mean.to("cpu"), var.to("cpu")) for mean, var in call] for call in self.calls]
        return Moved(place, self._momentum, is_counted, calls)


class _Seen(Calls):
    """Takes the statistics of groups, or the running ones, in place of a micro-batch's."""

    def __init__(
        self,
        statistics: Statistics,
        layers: Sequence[_BatchNorm],
        num_samples: int,
        *,
        is_forward: bool,
        moved: list[Moved] | None = None,
    ) -> None:
        super().__init__()
        self._moved = moved
        self._statistics = statistics
        self._num_samples = num_samples
        self._groups = granules(num_samples, statistics.group) if statistics.kind == "ghost" else ()
        # What is computed a second time, for a checkpoint, has moved running statistics the first time.
        self._is_forward = is_forward
        # A call names no layer, but the running statistics that it moves do.
        self._layers = {id(layer.running_mean): layer for layer in layers if layer.running_mean is not None}
        self._places = {id(layer.running_mean): place for place, layer in enumerate(layers)}
        self._counters = {id(layer.num_batches_tracked) for layer in layers if layer.running_mean is not None}
        self._counted: set[int] = set()  # of those, the ones that layers have moved
        self._moves: dict[int, _Moves] = {}  # of running means that groups move
        self._known |= {
            torch.Tensor.add_: partial(self._count, torch.Tensor.add_),
            torch.Tensor.__iadd__: partial(self._count, torch.Tensor.__iadd__),
        }

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if error is None:
            for key, moves in self._moves.items():
                if self._moved is None:
                    moves.make(self._counted)
                else:
                    self._moved.append(moves.later(self._places[key], self._counted))

    def _count(self, add: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a batch, as layers do before they normalise it, and note that they did."""
        if id(tensor) in self._counters:
            self._counted.add(id(tensor))
        return add(tensor, *args, **kwargs)

    def _recount(self, layer: _BatchNorm | None, batches: int) -> None:
        """Count so many batches where a layer has counted one."""
        counter = None if layer is None else layer.num_batches_tracked
        if counter is not None and id(counter) in self._counted:
            self._counted.remove(id(counter))
            counter.add_(batches - 1)

    def compute(self, call: Call) -> torch.Tensor:
        """Normalise by other statistics.

        Raises:
            ArgumentError: there are no such statistics.
        """
        layer = None if call.running_mean is None else self._layers.get(id(call.running_mean))
        if self._statistics.kind != "ghost":
            self._recount(layer, 0)
            return call.by(*self._running(call))
        groups = torch.split(call.input, self._rows(len(call.input)))
        if not self._is_forward:
            # Before all else: what computes once more what was checkpointed stops as soon as it has enough.
            self._recount(layer, 0)
        mean, var = call.running_mean, call.running_var
        by_its_own = partial(functional.batch_norm, weight=call.weight, bias=call.bias, training=True, eps=call.eps)
        if mean is None or var is None:
            normalised = [by_its_own(group, None, None) for group in groups]
        else:
            # With a weight of 1 they become the group's own. In a backward too, for a checkpoint saves the same again.
            own = [(torch.zeros_like(mean), torch.zeros_like(var)) for _ in groups]
            normalised = [by_its_own(group, *kept, momentum=1.0) for group, kept in zip(groups, own, strict=True)]
            if self._is_forward and self._moved is not None and layer is None:
                cure = "Hold them in an nn.BatchNorm layer: other ranks know them by the layer."
                raise ArgumentError("batch_norm", str(self._statistics), "running statistics of layers", cure)
            if self._is_forward:
                self._moves.setdefault(id(mean), _Moves(mean, var, layer, call.momentum)).calls.append(own)
        return normalised[0] if len(normalised) == 1 else torch.cat(normalised)

    def _running(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the running statistics, which stay as they are.

        Raises:
            ArgumentError: there are none.
        """
        if call.running_mean is not None and call.running_var is not None:
            return call.running_mean, call.running_var
        cure = "Keep running statistics (track_running_stats=True), or pass batch_norm='ghost:32'."
        raise ArgumentError("batch_norm", "frozen", "BatchNorm layers that have running statistics", cure)

    def _rows(self, rows: int) -> list[int]:
        """Return the rows of each group.

        Raises:
            ArgumentError: they cannot be told, for samples have no rows of their own.
        """
        each, rest = divmod(rows, self._num_samples)
        if rest or not each:
            cure = (
                "Give BatchNorm as many rows for each sample, those of a sample together; or pass batch_norm='micro' "
                "or 'frozen', or convert_batch_norm(model)."
            )
            found = f"{rows} rows of {self._num_samples} samples in a BatchNorm layer"
            raise ArgumentError("batch_norm", str(self._statistics), f"a multiple of the samples, not {found}", cure)
        return [each * size for size in self._groups]


def batch_norms(modules: Sequence[nn.Module]) -> list[_BatchNorm]:
    """List every BatchNorm layer, once."""
    layers = dict.fromkeys(layer for module in modules for layer in module.modules())  # in order, as no set would be
    return [layer for layer in layers if isinstance(layer, _BatchNorm)]


def count_batch_norms(modules: Sequence[nn.Module]) -> int:
    """Count the BatchNorm layers that normalise a sample by the statistics of those beside it.

    They do so in training mode, and without running statistics in eval mode too.
    """
    return sum(layer.training or not layer.track_running_stats for layer in batch_norms(modules))


def smallest_micro_batch(modules: Sequence[nn.Module], statistics: Statistics = MICRO) -> int:
    """Return how many samples a micro-batch needs at least: BatchNorm has no statistics of one."""
    if statistics != MICRO:
        return statistics.group  # of running statistics none, so that one sample will do
    return 2 if count_batch_norms(modules) else 1
