"""A window as a transaction: forward and backward of all its micro-batches, or no trace of them.

::

    transaction.begin(window)           # remember buffers and random states; gradients are None
    for piece in attempt:
        transaction.add(piece)          # forward and backward of a micro-batch, weighted by what its loss counts
    gradient = transaction.finish()     # corrected by what the window counts, unscaled, clipped
    transaction.roll_back()             # instead, at any time: as if the window had never run

How large the pieces are, and what becomes of a failure, is for others to decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from autoaccum.data.base import Window, in_order
from autoaccum.data.batches import flatten
from autoaccum.errors import ArgumentTypeError
from autoaccum.memory.oom import insist, is_out_of_memory
from autoaccum.planning.attempts import Piece
from autoaccum.step import gradient
from autoaccum.step.deferred_readback import Ending, Late
from autoaccum.step.error_context import may_need_another, of_one, of_window, tell_micro_batch
from autoaccum.step.gradient import (
    Contributions,
    Gradient,
    Gradients,
    Parts,
    Repeat,
    Signs,
    are_doubtful,
    count_nodes,
    is_kept_from_none,
    nothing_counts,
)
from autoaccum.step.infer_reduction import num_contributing
from autoaccum.step.item_counts import Foresight, Seeds, Tally, conclude_by, count_each, count_items, weighted_backward
from autoaccum.step.job import Forward, Job, fresh_scaler, is_slow_to_read, scaler_of
from autoaccum.step.loss_graph import plain_mean, read_by, read_reduction, without_graph
from autoaccum.step.named_losses import Named, counted_beforehand
from autoaccum.step.outputs import Outputs
from autoaccum.step.settled import Expected, Settled, are_plain, read_now
from autoaccum.step.snapshot import Moving, Snapshot, State
from autoaccum.step.split_calls import Layout
from autoaccum.step.terms import PLAIN_SUM, Computed, Conclusion, Count, Hypothesis, LossOf, Reduction, divisor_of

_MOST_REPEATS = 2
"""Times that a window is run again because it holds other numbers of items than were counted before."""


class Transaction:
    """Adds micro-batches to the gradient of a window; commits by being finished, or rolls back."""

    group: Any = None
    """The ranks that share each window; None where there is one: see ``across_ranks``."""
    is_abandoned = False  # whether other ranks have made the window's end void, so that it is run again
    together: Any = None  # itself, where all ranks run each micro-batch of it at the same time: see ``across_ranks``
    moving: Moving | None = None
    """Attributes that are put back with a window, and saved; set by whoever runs windows of a run."""
    layout: Layout | None = None
    """Which modules are split in joined windows; None where windows are weighted."""
    is_joined = False  # whether other ranks know what this one has computed: then what fails concerns all of them

    def __init__(
        self,
        job: Job,
        *,
        clip_norm: float | None = None,
        noise_scale: bool = False,
    ) -> None:
        """Set up, and take the memory that remembering the state will need.

        Args:
            job: what is computed.
            clip_norm: the 2-norm to clip each window's gradient to; None: it is measured alone.
            noise_scale: whether windows that are cut tell of the noise in their gradient.
        """
        self._job = job
        self._autocast = job.autocast
        self._clip_norm = clip_norm
        self.measures_parts = noise_scale  # of the next window: for whoever says which windows are measured
        self._contributions = Contributions()
        self.scaler = scaler_of(job.precision, job.device, job.optimizer)
        self.forward: Forward = self.plain_forward
        """How the loss of a micro-batch is computed; an examiner puts itself around it for the first windows."""
        # What windows are made of, once that is measured; None: each is taken for what its own losses show.
        is_sum = job.reduction == "sum" and job.num_items is None
        self.hypothesis: Hypothesis | None = "sum" if is_sum else None
        """How micro-batches add up; set by whoever measures it."""
        self.signs = Signs()
        """What changes where the loss does: compared in each window that is cut."""
        self._gradients = Gradients(job.modules, job.optimizer)
        self.snapshot = Snapshot(job.modules, job.device, job.functions)
        """The buffers and random states of the window's begin; between windows a validation keeps its own in it."""
        self.snapshot.take()  # so that its memory is there before the first window
        self._seeds = Seeds()
        # Whether counts stay on the device until the window's end, where reading one would wait for it; not any more
        # once one without items turned out to have spoilt the gradient.
        self._is_deferred = self._is_slow_to_read = is_slow_to_read(job.device)
        self._foresight = Foresight(is_used=self._is_slow_to_read)
        self._window: Window  # while one is open
        self._draws = False  # whether generators of the user's own are put back, which data may draw from
        self.is_reading = False
        """Whether data are being read: what is raised then is no error of a step."""
        self._nodes = 0  # of the last forward's graph
        self.counts_by_name = isinstance(job.num_items, Mapping | list | tuple)
        """Whether the user counts the items of each of several losses; of a function its first result tells."""
        self._totals: Mapping[str, float] = {}  # items of each loss in this window, counted before it is run
        self._has_totals = True  # whether it was tried to count these
        self._shown_totals: Mapping[str, float] | None = None  # what its last attempt has counted, where these differ
        self._keeps_shown = False  # whether those hold for all later attempts at the window
        self._num_repeats = 0  # of the window, for totals that differ
        self.outputs = Outputs()
        """What is returned beside the losses of the window."""
        self.is_open = False
        """Whether there is a window to commit, or to roll back."""
        self.is_uncounted = False
        """Whether a micro-batch of the window has a loss other than 0 although the user counts nothing in it."""
        self.is_unscaled = False
        """Whether the scaler waits for a step on the gradient that it has unscaled."""
        self.settled: Settled | None = None
        """What the next window is expected to be like, if the last two were alike."""
        self._last: Settled | None = None  # what the last window was like
        self._begin_anew()

    def trained(self) -> list[torch.Tensor]:
        """Return what gets gradients."""
        return self._gradients.trained()

    def compute_by(self, loss_of: LossOf) -> None:
        """Compute losses by this from now on."""
        self._job, self.settled = self._job.computed_by(loss_of), None

    def begin(self, window: Window) -> None:
        """Begin a window: remember what it may change."""
        self.begin_settled(window)
        self._begin_anew(window.num_samples)

    def begin_settled(self, window: Window) -> None:
        """Do the same for a window that ``add_settled`` is to run."""
        self._window = window
        self._gradients.drop()  # of the window before: their memory may be what the copies need
        if self.is_unscaled:  # a window that was never stepped on, for something was raised between the two
            self._renew_scaler()
        self.snapshot.take()
        if self.moving is not None:
            self.moving.take()
        self.signs.of_modes(self.snapshot.modes(), has_other_layers=self.snapshot.has_other_layers)
        self._draws = self.snapshot.has_generators
        self.is_open, self._has_totals, self._shown_totals, self._num_repeats = True, False, None, 0

    def _state(self) -> State:
        return State(self._job.modules, self._job.functions, self._job.device, self.trained())

    def _begin_anew(self, num_samples: int = 0) -> None:
        self._num_samples, self.is_joined, self.is_abandoned, self.is_uncounted = num_samples, False, False, False
        self._named = self._begin_named(num_samples) if self._weighs_by_name else None
        self._computed: Computed | None = None  # by the last forward, where that is more than one loss
        if self.outputs.are_there or self.outputs.have_missed:
            self.outputs.begin()
        # What losses with a weight each add to the window is summed.
        total = 1.0 if self._named is not None else 0.0
        if self._named is None and self._foresight.is_used:
            total = self._foresight.begin(num_samples)
        self._tally = Tally(num_samples, deferred=self._is_deferred, total=total)
        self._sizes, self._reductions = list[int](), list[Reduction]()
        self._losses: list[torch.Tensor | None] = []  # of each micro-batch; None where nothing counts
        self._shown: list[tuple[int, str, Count]] = []  # nodes, name of the root and weight of each that counts
        self.signs.begin()
        self._norms: dict[int, torch.Tensor] = {}  # of what each micro-batch adds to the gradient, by its index

    def add(self, piece: Piece) -> None:
        """Add a micro-batch to the gradient.

        Its loss is a mean over its items, or a sum; it is weighted such that all add up to the window's: see
        ``step.item_counts``. What it holds of the device's memory is free again when this returns.

        Raises:
            SingleSampleError: it has one sample of several, and may need another.
        """
        self.is_reading = True
        read = partial(self._batch_of, piece)
        batch = self.snapshot.read_by(read) if self._draws else read()
        self.is_reading = False
        # What fails with the reading of the data, above, would fail again, and may not be read twice.
        try:
            self._compute(batch, piece)
        except Exception as error:
            self._name_micro_batch(error, batch, piece)
            raise

    def _name_micro_batch(self, error: Exception, batch: Any, piece: Piece) -> None:
        """Say in an error in which micro-batch it was raised.

        Raises:
            SingleSampleError: that has one sample of several, and may need another.
        """
        running = of_window(piece.start, piece.size, self._num_samples)
        tell_micro_batch(error, lambda: flatten(batch)[0], running, collate_fn=self._job.collate_fn)
        if piece.size == 1 and may_need_another(error):
            of_one(error, self._num_samples)

    def _batch_of(self, piece: Piece) -> Any:
        # Samples that are served longest first gain nothing by that in one piece, and a loss may go by their order.
        if piece.size == self._window.num_samples:
            return in_order(self._window)
        return self._window.micro_batch(piece.start, piece.size)

    def _compute(self, batch: Any, piece: Piece) -> None:
        num_items = self._job.num_items if self.hypothesis in (None, "num_items") else None
        counted = None if num_items is None else count_items(num_items, batch)
        by_name = isinstance(counted, dict)
        if counted is not None and by_name is not self.counts_by_name and (self._sizes or self.counts_by_name):
            raise ArgumentTypeError("num_items", counted, "a dict for every micro-batch, or a number for every one")
        if isinstance(counted, dict):
            self._add_by_name(batch, piece.size, counted)
            return
        if isinstance(counted, float) and not counted:
            reduction = Reduction(counted)
            self._tally.weight(piece.size, reduction.items)  # nothing to learn from
            self._losses.append(None)
            self._look_at_uncounted(batch, piece.size)
        else:
            loss = self._forward(batch, piece.size)
            if self._computed is not None and self._computed.terms:
                if self._named is None:
                    self._named = Named(self._num_samples, {})
                self._named.keep(len(self._sizes), self._computed.terms)
            if self._computed is not None:
                self._take_outputs(piece.size)
            reduction = self._reduction(loss, piece.size, counted)
            self.signs.see_graph(len(self._sizes), piece.size, self._nodes, loss, reduction)
            self._add(loss, reduction, piece.size)
        # The nodes that a reduction names would keep the graph alive.
        self._reductions.append(without_graph(reduction) if reduction.divisions else reduction)
        self._sizes.append(piece.size)

    def _reduction(self, loss: torch.Tensor, num_samples: int, counted: Any) -> Reduction:
        """Return how the loss of a micro-batch was reduced."""
        # Of all samples at once no count decides anything, unless there is none. And what a graph has checkpointed, as
        # a loss in chunks does, would be computed to be read, all of it.
        if self.layout is not None and not math.isnan(loss.item()):
            return Reduction(float(num_samples) if counted is None else counted)
        if counted is None and self.hypothesis != "sum":
            return read_reduction(loss, num_samples, waits=not self._is_deferred)
        return read_by(self.hypothesis, loss, num_samples, counted=counted, waits=not self._is_deferred)

    @property
    def _weighs_by_name(self) -> bool:
        """Return whether each of several losses has a weight of its own: its share of what the user counts."""
        return self.counts_by_name and self.hypothesis in (None, "num_items")

    def _begin_named(self, num_samples: int) -> Named:
        """Begin an attempt at a window whose losses are weighed one by one."""
        if not self._has_totals:  # once a window
            self._totals, self._has_totals = self._count_totals() or {}, True
        totals = self._totals if self._shown_totals is None else self._shown_totals
        if not self._keeps_shown:  # an attempt that runs out of memory is run again as if it had never been
            self._shown_totals = None
        return Named(num_samples, totals)

    def _count_totals(self) -> Mapping[str, float] | None:
        """Count the items of each loss in the window; return None where that fails."""
        num_items = self._job.num_items
        assert num_items is not None
        try:
            return counted_beforehand(self._window, partial(count_each, num_items))
        except Exception:  # of which the window itself will tell, as of what it counts
            return None

    def _add_by_name(self, batch: Any, num_samples: int, counted: Mapping[str, Count]) -> None:
        """Add a micro-batch each of whose losses has a weight of its own."""
        if not self.counts_by_name:  # the first one of a run, of whose window nothing was counted before
            self.counts_by_name, self._has_totals, self._totals = True, True, {}
            self._named = Named(self._num_samples, {})
            self._tally = Tally(self._num_samples, deferred=self._is_deferred, total=1.0)
        index, loss = len(self._sizes), self._forward(batch, num_samples)
        assert self._named is not None
        computed = self._computed or Computed(loss)
        weighed, divisions = self._named.weigh(index, computed, counted, num_samples)
        self._take_outputs(num_samples)
        if weighed is None:
            self._tally.weight(num_samples, 0.0)
            self._losses.append(None)
        else:
            reduction = Reduction(1.0, divisions=divisions)
            self.signs.see_graph(index, num_samples, self._nodes, loss, reduction)
            self._add(weighed, reduction, num_samples)
        self._reductions.append(plain_mean(1.0))
        self._sizes.append(num_samples)

    def _take_outputs(self, num_samples: int) -> None:
        """Keep what was returned beside a loss, and let its graph go, which backward is to free."""
        computed, self._computed = self._computed, None
        if computed is not None:
            self.outputs.take(computed.outputs, num_samples)

    def _look_at_uncounted(self, batch: Any, num_samples: int) -> None:
        """Look whether a micro-batch in which nothing counts has a loss all the same; keep what comes beside it."""
        try:
            with torch.no_grad():
                loss = self.plain_forward(batch, num_samples, self._num_samples)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return  # where there is nothing of what it is a mean over it may well fail
        self.is_uncounted = self.is_uncounted or _is_something(loss)
        self._take_outputs(num_samples)

    def _forward(self, batch: Any, num_samples: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        before = count_nodes()
        loss = self.forward(batch, num_samples, self._num_samples)
        self._nodes = count_nodes() - before
        return loss

    def _add(self, loss: torch.Tensor, reduction: Reduction, num_samples: int) -> None:
        """Add the gradient of a loss, weighted, and keep its value."""
        is_stated = self._job.num_items is not None
        weight = self._tally.weight(num_samples, reduction.items, loss.dtype, is_stated=is_stated)
        if weight is None:
            self._losses.append(None)
            return
        self._losses.append(loss.detach())
        self._shown.append((self._nodes, "" if loss.grad_fn is None else loss.grad_fn.name(), weight))
        self._backward(partial(self._accumulate, loss, weight, reduction), num_samples)

    def plain_forward(self, batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
        """Return the loss of a micro-batch, in the job's precision."""
        self._computed = None  # that of the one before is not to take the room of this one
        if self._autocast is nullcontext:
            computed = self._job.loss_of(self._job.model, batch)
        else:
            with self._autocast():
                computed = self._job.loss_of(self._job.model, batch)
        if isinstance(computed, Computed):
            self._computed, computed = computed, computed.loss
        return computed

    def _backward(self, accumulate: Callable[[], None], size: int) -> None:
        """Add the gradient of a micro-batch; measure it by itself where that is asked for."""
        if not self.measures_parts or size == self._num_samples:
            self._gradients.add(accumulate)
            return
        accumulate = partial(self._gradients.add, accumulate)
        self._norms[len(self._losses) - 1] = self._contributions.add(accumulate, self._gradients)

    def _accumulate(self, loss: torch.Tensor, weight: Count, reduction: Reduction) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        weighted_backward(loss, self._seeds.of(weight, loss), reduction.divisions)

    def num_contributing(self) -> int:
        """Return how many micro-batches have added to the window so far."""
        return num_contributing(self._losses, self._reductions)

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient: correct it by the true count, unscale and clip it."""
        self.own_sizes = own = tuple(self._sizes)  # of this rank
        ending = self._read_end()
        if self.is_abandoned:
            return Repeat(sizes=own)
        sizes, reductions, tally = tuple(self._sizes), self._reductions, self._tally
        counts = tally.read()
        if not any(counts):
            return nothing_counts(sizes, own)
        late_losses = [self._losses[index] for index in tally.late_zeros()] if tally.late else []
        late = [loss for loss in late_losses if loss is not None] if late_losses else []
        if self._job.num_items is not None:
            self.is_uncounted = self.is_uncounted or any(map(_is_something, late))
        if (late or (self._named is not None and self._named.has_late_zero())) and not self._is_sound(ending):
            return Repeat(sizes=own)
        if not all(counts):
            self._losses = [loss if count else None for loss, count in zip(self._losses, counts, strict=True)]
        losses = [micro_loss for micro_loss in self._losses if micro_loss is not None]
        found, by_name = PLAIN_SUM, self._weighs_by_name
        if not by_name:
            found = conclude_by(self.hypothesis, self._job.reduction, sizes, reductions)
        elif self._are_totals_wrong(losses):
            return Repeat(sizes=own)
        total = tally.total(found.is_sum)
        correction = tally.guess / total
        named: Mapping[str, torch.Tensor] = {}
        if self._named is not None:
            named = self._named.losses([divisor_of(count) / total for count in counts])
        if self._named is not None and by_name:
            counts = self._named.counting(sizes)
        elif self._foresight.is_used:
            self._foresight.see(total, self._num_samples, losses[0].dtype)
        measured: Parts = ((), None)
        if self._norms:
            measured = self._parts(counts, found.is_sum and not by_name, correction, ending)
        if correction != 1:
            self._gradients.scale(correction)
        grad_norm, loss = self._unscaled_and_clipped(correction, ending), tally.loss(losses, found.is_sum)
        is_finite, is_kept, has_changed = True, False, False
        if len(sizes) > 1:
            is_finite = self._is_finite(loss, grad_norm)
            is_kept = not found.is_sum and is_kept_from_none(sizes, counts, reductions, self._losses)
            has_changed = not is_finite or is_kept or self.is_uncounted or are_doubtful(sizes, counts, reductions)
            self.signs.have_changed = self.signs.have_changed or has_changed
        if has_changed:
            self.settled = self._last = None
        elif self.layout is None:
            self._settle(found, tally, correction)
        return Gradient(
            sizes=sizes,
            own=own,
            grad_norm=grad_norm,
            loss=loss,
            outputs=named,
            overflow=None if ending is None else ending.overflow(),
            items=sum(counts),
            parts=measured[0],
            noise=measured[1],
            is_finite=is_finite,
            is_kept_from_none=is_kept,
            is_uncounted=self.is_uncounted,
            counts=tuple(counts),
            reductions=tuple(reductions),
            conclusion=found,
        )

    def _settle(self, found: Conclusion, tally: Tally, correction: float) -> None:
        """Take what a window was like; if the one before it was like it, the next one is expected to be."""
        # Settled windows are those whose weights are known before they run.
        is_one_loss = self._named is None and self._job.num_items is None and not self.outputs.are_there
        is_read = not self._is_slow_to_read and self.scaler is None and self.group is None
        last, self._last, self.settled, counts = self._last, None, None, tally.read()
        is_plain = is_one_loss and is_read and not self._draws and all(counts) and are_plain(self._reductions)
        if not is_plain or len(self._shown) != len(counts):
            return
        expected = tuple(
            Expected(nodes, root, reduction, weight)  # type: ignore[arg-type]  # no tensor, for no count is one
            for (nodes, root, weight), reduction in zip(self._shown, self._reductions, strict=True)
        )
        self._last = Settled(
            tuple(self._sizes), expected, self.hypothesis, found, tally, items=sum(counts), correction=correction
        )
        if last is not None and (last.expected, last.hypothesis) == (expected, self.hypothesis):
            self.settled = self._last

    def add_settled(self, piece: Piece, settled: Settled, index: int) -> torch.Tensor | None:
        """Add a micro-batch of a window that is expected to be settled; return its loss, or None if it is not.

        Raises:
            SingleSampleError: as ``add`` does.
        """
        expected = settled.expected[index]
        self.is_reading = True
        batch = self._batch_of(piece)
        self.is_reading = False
        try:
            before = count_nodes()
            loss = self.plain_forward(batch, piece.size, self._num_samples)
            root, nodes = loss.grad_fn, count_nodes() - before
            if nodes != expected.nodes or root is None or root.name() != expected.root or self._computed is not None:
                return None
            if settled.hypothesis != "sum" and read_reduction(loss, piece.size) != expected.reduction:
                return None
            self._gradients.add(partial(torch.autograd.backward, loss, self._seeds.of(expected.weight, loss)))
        except Exception as error:
            self._name_micro_batch(error, batch, piece)
            raise
        return loss.detach()

    def finish_settled(self, settled: Settled, losses: list[torch.Tensor]) -> Gradient | Repeat:
        """Complete the gradient of a window all of whose micro-batches were as expected."""
        if settled.correction != 1:
            self._gradients.scale(settled.correction)
        norm = self._gradients.norm() if self._clip_norm is None else self._gradients.clip(self._clip_norm)
        loss = settled.loss(losses)
        if loss is None or (len(losses) > 1 and not self._is_finite(loss, norm)):
            return self.unsettle(settled)
        sizes = settled.sizes
        return Gradient(
            sizes=sizes, own=sizes, grad_norm=norm, loss=loss, items=settled.items, conclusion=settled.conclusion
        )

    def unsettle(self, settled: Settled) -> Repeat:
        """Expect nothing of windows any more; return that this one has to be run again."""
        self.settled = self._last = None
        return Repeat(sizes=settled.sizes)

    def _read_end(self) -> Ending | None:
        """Launch all that the end of a window is decided by, and read it at once; None where reading costs nothing."""
        if not self._is_slow_to_read:
            return None
        ending = Ending(self._gradients)
        if self.group is None:  # else it is that of a part, and is looked at when it is whole
            if self._norms:
                ending.want_whole(self.scaler)
            if self.scaler is not None and any(loss is not None for loss in self._losses):
                self.is_unscaled = True
                ending.unscale(self.scaler, self._job.optimizer)
            ending.measure(clips=self._clip_norm is not None)
        others: list[Late] = [self._tally, self.outputs, *([] if self._named is None else [self._named])]
        if (known := ending.read(self._losses, self._reductions, self._norms, others)) is not None:
            self._losses, self._reductions, self._norms = known
            self.signs.see_late(self._reductions)
        return ending

    def _is_sound(self, ending: Ending | None) -> bool:
        """Return whether a micro-batch that turned out to count nothing has left the gradient finite."""
        is_finite = ending is not None and ending.is_finite()
        self._is_deferred = self._is_deferred and is_finite
        return is_finite

    def _is_finite(self, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> bool:
        """Return whether a window's loss and gradient are finite, as far as nothing has to be waited for."""
        # The gradient of a loss that is scaled may be infinite for that alone.
        if loss.is_cpu and not math.isfinite(read_now(loss)):
            return False
        if self.scaler is not None or grad_norm is None or not grad_norm.is_cpu:
            return True
        return math.isfinite(read_now(grad_norm))

    def _are_totals_wrong(self, losses: Sequence[torch.Tensor]) -> bool:
        """Return whether the window has to be run again, for it holds other numbers of items than it was taken to."""
        assert self._named is not None
        other = self._named.other_totals(is_wide=losses[0].dtype == torch.float64)
        if other is None:
            return False
        if self._num_repeats == _MOST_REPEATS:  # it holds others each time, as where a forward draws what counts
            self.signs.have_changed = True  # it is measured
            return False
        self._num_repeats += 1
        self._shown_totals = other
        return True

    def _unscaled_and_clipped(self, correction: float, ending: Ending | None) -> torch.Tensor | None:
        """Take the loss scale out of the gradient, and clip it; return the norm that it had."""
        if ending is not None:
            return ending.norm(correction) if self._clip_norm is None else ending.clip(self._clip_norm, correction)
        if self.scaler is not None:
            self.is_unscaled = True
            self.scaler.unscale_(self._job.optimizer)
        return self._gradients.norm() if self._clip_norm is None else self._gradients.clip(self._clip_norm)

    def _parts(self, counts: Sequence[float], is_sum: bool, correction: float, ending: Ending | None) -> Parts:
        """Return what each micro-batch adds to the window's gradient, which is yet to be corrected, and its noise."""
        measured = (ending and ending.whole()) or gradient.measured(self._gradients.stepped(), self.scaler)
        return gradient.parts(self._sizes, counts, self._norms, *measured, is_sum=is_sum, correction=correction)

    def commit(self) -> None:
        """Give up the window, whose end this is, and all that was kept to run it again."""
        self.is_open = False
        if self._foresight.is_used:
            self._foresight.commit()
        del self._window
        # Even a loss is memory of the device, which the optimizer's step may need.
        self._losses, self._reductions, self._norms, self._named = [], [], {}, None
        if self.outputs.are_there or self.outputs.have_missed:
            self.outputs.begin()

    def repeat(self) -> None:
        """Begin the same window again, whose state somebody else has put back."""
        self._begin_anew(self._num_samples)
        self._gradients.drop()

    def roll_back(self) -> None:
        """Undo the window as if it had never run: gradients, buffers, random states, scaler. It may be done twice.

        Raises:
            MemoryLimitError: memory ran out in this, too.
        """
        self.repeat()
        self.snapshot.restore()
        if self.moving is not None:
            insist(self.moving.restore, "attributes were put back")
        self._renew_scaler()

    def _renew_scaler(self) -> None:
        if self.scaler is not None:
            self.scaler = insist(partial(fresh_scaler, self.scaler, self._job.device), "a loss scale was read")
        self.is_unscaled = False

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out about the loss, and the loss scale."""
        found: dict[str, Any] = {"_deferred": self._is_deferred}
        found |= {"by_name": True} if self.counts_by_name else {}
        found |= {"scaler": None if self.scaler is None else self.scaler.state_dict()}
        # What came later is there only once it says something.
        moved = {} if self.moving is None else self.moving.state_dict()
        found |= {"attributes": moved} if moved else {}
        found |= {"outputs": True} if self.outputs.are_there else {}
        return found | self._foresight.state_dict() | self._contributions.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._is_deferred = state["_deferred"]
        self.outputs.are_there = state.get("outputs", False)
        if self.moving is not None:
            self.moving.load_state_dict(state.get("attributes", {}))
        self.counts_by_name = self.counts_by_name or state.get("by_name", False)
        for part in (self._foresight, self._contributions):
            part.load_state_dict(state)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _is_something(loss: torch.Tensor) -> bool:
    """Return whether a loss is a finite number other than 0."""
    value = read_now(loss)
    return math.isfinite(value) and value != 0
