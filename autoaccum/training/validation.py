"""The loss on held-out data, in micro-batches of its own size, with no trace on training."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from autoaccum.data import batches, randomness
from autoaccum.data.base import Source, Window, in_order
from autoaccum.distributed.fsdp import Elsewhere, Sharded
from autoaccum.distributed.group import Group
from autoaccum.errors import DataError, EmptyDatasetError, LossWithoutGradError, NothingFitsError
from autoaccum.events import Event, Notice, OutOfMemory, Validated
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import RanOut, attempt, insist, is_out_of_memory
from autoaccum.memory.waiting import Patience, Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.planning.cuts import cut
from autoaccum.planning.limits import CLEARLY_OVER, Limits
from autoaccum.planning.trials import Halving, Trials
from autoaccum.step.deferred_readback import Late
from autoaccum.step.error_context import is_told, may_need_another, tell_micro_batch
from autoaccum.step.infer_reduction import BY_ONE, PENALTIES, SEVERAL, conclude, stands_for_none
from autoaccum.step.item_counts import count_items
from autoaccum.step.job import Autocast
from autoaccum.step.loss_functions import inputs_and_targets
from autoaccum.step.loss_graph import graph_alone, read_reduction, without_graph
from autoaccum.step.named_losses import named_loss
from autoaccum.step.outputs import Outputs
from autoaccum.step.python_state import Attributes
from autoaccum.step.readback import Numbers
from autoaccum.step.row_check import COUNTS, RowChecks, sizes_of
from autoaccum.step.snapshot import Snapshot
from autoaccum.step.split_calls import Layout, NotRowsError, joining
from autoaccum.step.terms import Computed, Count, CountItems, Hypothesis, LossOf, Reduction, divisor_of, without_none
from autoaccum.training.metrics import Metrics, SharedTree, Sums

AT_ONCE = 1024
"""Micro-batches whose losses are read together: a device has few bytes for each, but not without end."""

Part = tuple[str, float, Reduction]
"""A loss of a micro-batch: its name, its value, and how it was reduced."""


@dataclass(slots=True)
class Loss:
    """The loss of a micro-batch, or several that are added."""

    values: Mapping[str, torch.Tensor]
    """Each by its name, "" for one alone, in memory of its own: it is read when others have been computed."""
    reductions: Mapping[str, Reduction]
    """How each was reduced, without its graph."""
    num_samples: int
    """Of the micro-batch."""

    def want(self, numbers: Numbers) -> None:
        """Ask for the values, and for what they are means over."""
        numbers.want(self.values.values())
        numbers.want_of(self.reductions.values())

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        self.values = {name: numbers.tensor(value) for name, value in self.values.items()}
        self.reductions = {name: numbers.reduction(reduction) for name, reduction in self.reductions.items()}

    def parts(self) -> list[Part]:
        """Return each, once they are read; one that is over nothing counts nothing."""
        found = []
        for name, value in self.values.items():
            number, reduction = value.item(), self.reductions[name]
            # A mask's count is often kept from 0 by clamp(min=1).
            is_none = not math.isfinite(float(reduction.items)) or stands_for_none(reduction, number, self.num_samples)
            reduction = replace(reduction, items=0.0) if is_none else reduction
            found.append((name, number if reduction.items else 0.0, reduction))
        return found


class Losses:
    """The losses of all micro-batches so far."""

    def __init__(self) -> None:
        """Begin with none."""
        self._unread: list[tuple[int, Loss]] = []
        # Each micro-batch's by itself, joined at the end: how they go together shows only when all are there.
        self._found: list[tuple[int, list[Part]]] = []

    @property
    def num_samples(self) -> int:
        """Count the samples of those that were read."""
        return sum(size for size, _ in self._found)

    def add(self, num_samples: int, loss: Loss) -> None:
        """Add that of a micro-batch."""
        # Nothing is read here, where the next forward is to be launched.
        self._unread.append((num_samples, loss))
        if len(self._unread) >= AT_ONCE:
            insist(lambda: read_losses([self]), "the losses of a validation were read")

    def want(self, numbers: Numbers) -> None:
        """Ask for those that are yet to be read."""
        for _, loss in self._unread:
            loss.want(numbers)

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        for _, loss in self._unread:
            loss.take_read(numbers)
        # All of them or none: where memory runs out on the way it is done again.
        found = [(num_samples, loss.parts()) for num_samples, loss in self._unread]
        self._found += found
        self._unread = []

    def joined(self, hypothesis: Hypothesis | None = None) -> tuple[float, dict[str, float]]:
        """Return the loss over everything, of what was read, NaN where nothing counts; and each of several, by name.

        Args:
            hypothesis: what losses were measured to be; None where graphs alone tell.
        """
        # One that some micro-batches lack is joined over the others.
        found = {name: _joined(values, hypothesis) for name, values in self.by_name().items()}
        totals = {name: total for name, total in found.items() if total is not None}
        named = {named_loss(name): total for name, total in totals.items() if name}
        return sum(totals.values()) if totals else math.nan, named

    def are_doubtful(self) -> bool:
        """Return whether graphs speak against one weight for micro-batches, as by terms with different counts."""
        # Of all micro-batches together, for one alone leaves more in doubt.
        columns = [list(zip(*values, strict=True)) for values in self.by_name().values()]
        return any(_is_doubtful(sizes, column) for sizes, _, column in columns if len(sizes) > 1)

    def by_name(self) -> dict[str, list[tuple[int, float, Reduction]]]:
        """Return (samples, value, how it was reduced) of each loss in each micro-batch that has it."""
        found: dict[str, list[tuple[int, float, Reduction]]] = {}
        for size, parts in self._found:
            for name, value, reduction in parts:
                found.setdefault(name, []).append((size, value, reduction))
        return found


def read_losses(late: Sequence[Late]) -> None:
    """Read all that is left on a device, together."""
    numbers = Numbers()
    for each in late:
        each.want(numbers)
    numbers.read()
    for each in late:
        each.take_read(numbers)


def _is_doubtful(sizes: Sequence[int], reductions: Sequence[Reduction]) -> bool:
    is_unknown = any(term.kind == "unknown" for reduction in reductions for term in reduction.terms)
    return is_unknown or conclude(sizes, reductions).doubt in (SEVERAL, BY_ONE, PENALTIES)


def _joined(values: list[tuple[int, float, Reduction]], hypothesis: Hypothesis | None) -> float | None:
    """Return a loss over everything; None where nothing counts."""
    there = [(size, value, reduction) for size, value, reduction in values if float(reduction.items)]
    if not any(without_none(float(reduction.items)) for _, _, reduction in there):
        return None
    counts = [float(reduction.items) for _, _, reduction in there]
    is_sum = hypothesis == "sum"
    if hypothesis is None:
        is_sum = conclude([size for size, _, _ in there], [reduction for _, _, reduction in there]).is_sum
    weighted = sum(value * divisor_of(count) for (_, value, _), count in zip(there, counts, strict=True))
    # A sum has the same divisor in every micro-batch, whatever is in it; divided by one of them it is the sum of all.
    # Of a single micro-batch there is nothing to compare, and both are the same.
    return weighted / (counts[0] if is_sum and len(there) > 1 else sum(counts))


T = TypeVar("T")


class JoinedEvaluations:
    """How the modules of a model are split where it is evaluated: more may have to be opened than in training."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Set up for what is called, which torch.compile may have made of a module."""
        self._model, self._device = model, device
        self._layout: Layout | None = None

    def follow(self, trained: Layout | None) -> bool:
        """Join evaluations where training is joined; return whether it is."""
        if trained is None:
            self._layout = None
            return False
        if self._layout is None:
            self._layout = Layout(trained.roots)
        for module in trained.opened():
            self._layout.open(module)
        return True

    def measure(self, num_samples: int, few: Callable[[int], object]) -> None:
        """Find out where the rows of each call lie, and which modules have to be opened; once.

        Args:
            num_samples: that there are.
            few: (count) -> the loss of so many of them.
        """
        assert self._layout is not None
        if self._layout.rows:
            return
        for count in (count for count in COUNTS if count <= num_samples):
            try:
                if not isinstance(attempt(partial(self._measured, self._layout, count, few)), RanOut):
                    return
            except Exception:  # of a step that wants the whole batch: shapes tell where its rows lie
                return

    def _measured(self, layout: Layout, count: int, few: Callable[[int], object]) -> None:
        state = randomness.get_state(self._device)
        try:
            with joining(self._model, layout, sizes_of(count), self._device, checks=RowChecks()):
                few(count)
        finally:
            randomness.set_state(state, self._device)

    def run(self, num_samples: int, most: int, compute: Callable[[], T]) -> T:
        """Return what a function returns whose calls are split.

        Args:
            num_samples: that it computes.
            most: samples of a micro-batch.
            compute: the function.
        """
        assert self._layout is not None
        sizes = cut(num_samples, most)
        while True:
            state = randomness.get_state(self._device)
            try:
                with joining(self._model, self._layout, sizes, self._device):
                    return compute()
            except NotRowsError as error:
                self._layout.open(error.module)
            randomness.set_state(state, self._device)


# The ways to read off a loss what it is a mean over; checkpoints keep these names. Each costs the memory of a graph,
# the first one least. Of a loss_fn only the loss need have one: the model's forward is run without.
_LOSS_GRAPH = "the loss's graph"
# A graph through the model too, but without the activations that a backward would need.
_GRAPH_ALONE = "the graph alone"
# As in training: for code that asks for gradients itself, and so needs what a backward does.
_WHOLE_GRAPH = "all of the graph"


class Validator:
    """Runner of passes over validation data, from which it learns how large its micro-batches may be."""

    def __init__(
        self,
        model: Callable[..., Any],
        modules: Sequence[nn.Module],
        source: Source,
        *,
        loss_of: LossOf,
        of_outputs: bool,
        num_items: CountItems | None,
        autocast: Autocast,
        device: torch.device,
        memory: Memory,
        limit: Limit,
        limits: Limits,
        patience: float,
        snapshot: Snapshot,
        emit: Callable[[Event], None],
        metrics: Metrics | None = None,
    ) -> None:
        """Set up.

        Args:
            model: what ``loss_of`` is called with.
            modules: are put into eval mode while a validation goes on.
            source: the data.
            loss_of: (model, micro-batch) -> loss.
            of_outputs: whether the model is only called for its outputs, of which a ``loss_fn`` makes the loss.
            num_items: (micro-batch) -> what its loss is a mean over; None: it is read off the loss.
            autocast: makes the context of each forward.
            device: where to compute.
            memory: of that device.
            limit: what may be used of it.
            limits: what micro-batches may take: those of training, which move with it.
            patience: seconds to wait for memory that others hold, before nothing fits.
            snapshot: keeps the buffers of what is trained while a validation goes on.
            emit: takes the events.
            metrics: what else is reported.
        """
        self._metrics = metrics
        self._model = model if metrics is None else metrics.model
        self._modules = list({id(m): m for root in modules for m in root.modules()}.values())
        self._source = source
        self._loss_of = loss_of
        self._num_items = num_items
        self._window_samples = 0
        self._trained_layout: Callable[[], Layout | None] = lambda: None
        self._hypothesis: Callable[[], Hypothesis | None] = lambda: None
        self._joined = JoinedEvaluations(model, device)
        self._is_joined = False  # else losses of micro-batches are averaged
        self._autocast = autocast
        self._device = device
        self._memory = memory
        self._limit = limit
        self._limits = limits
        self._patience = patience
        self._snapshot = snapshot
        self._is_enforced = limit.is_enforced
        self.joins_doubtful = False
        """Whether micro-batches are joined where graphs speak against weighting them, and nothing was measured."""
        self.has_outputs: Callable[[], bool] = bool
        """() -> whether losses are known to come with outputs; for whoever knows it of training to set."""
        self._beside = Outputs(joins=False)  # tensors of a whole pass may be more than the host holds
        self._computed: Computed | None = None  # by the last forward, where that is more than a loss
        self._emit = emit
        # The ways that have not failed yet, of which the first is taken. Without one losses are averaged over samples.
        self._of_outputs = of_outputs
        self._ways = [*([_LOSS_GRAPH] if of_outputs else []), _GRAPH_ALONE, _WHOLE_GRAPH]
        # Sizes of its own, for without a backward more samples fit than in training.
        self._fewest = 1  # samples of a micro-batch as the user has it
        self._trials = Trials(limits)
        self._released_bytes = 0  # in use after memory was last given back

    def set_fewest(self, fewest: int) -> None:
        """Let no micro-batch have fewer samples, unless all that there are are fewer."""
        self._fewest = self._trials.smallest = fewest

    def begin_with(self, first: int) -> None:
        """Try that size first, and smaller ones where it does not fit."""
        self._trials.first = first

    def run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        """Run one pass, in micro-batches that grow up to training's, and return the loss.

        Where samples are alike training's micro-batch fits, for there is no backward.
        """
        try:
            return self._run(step, epoch, training_micro_batch)
        except Exception as error:
            # The first one has a single sample, which cannot be computed of some models: two of them may do.
            if self._trials.largest or self._trials.smallest > 1 or not may_need_another(error):
                raise
        self._trials.smallest = 2
        return self._run(step, epoch, max(2, training_micro_batch))

    def _run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        started = clock.now()
        losses = Losses()
        num_samples = largest = 0
        patience = Patience(self._limit, self._patience, self._emit, step=step, phase="validation")
        self._beside.begin()
        if self._metrics is not None:
            self._metrics.begin()
        with self._evaluating():
            ceiling = max(training_micro_batch, self._fewest)

            self._is_joined = self._joined.follow(self._trained_layout())

            def size(seen: int) -> int:
                return self._next_size(seen, ceiling)

            # Always as in the first epoch, so that all validations see the same samples in the same order.
            reader = self._source.read(0, lambda position: (size(position),))
            # As many samples are asked for as are run at once. Nothing has to be undone when they do not fit: those
            # that are left are run in smaller pieces.
            while (window := reader.window(size(num_samples))) is not None:
                for piece in self._pieces(window, ceiling):
                    if isinstance(outcome := self._try(window, piece), Shortage):
                        self._make_do(outcome, piece, patience)
                        continue
                    losses.add(window.num_samples if self._is_joined else piece.size, outcome)
                    largest = max(largest, piece.size)
                    if self._is_joined:  # by one piece all of it has run
                        break
                num_samples += window.num_samples
                self._ran(window, losses)
        if num_samples == 0:
            raise EmptyDatasetError("validation_data", _NOTHING)
        metrics = insist(lambda: self._read_all(losses), "the losses and the metrics of a validation were read")
        if self.joins_doubtful and not self._is_joined and self._hypothesis() is None and losses.are_doubtful():
            # Training splits nothing, so nothing was measured there: this is the first split.
            layout = Layout(self._modules)
            self.join(lambda: layout, self._window_samples)
            return self._run(step, epoch, training_micro_batch)
        loss, named = losses.joined(None if self._is_joined else self._hypothesis())
        found = self._agreed(
            Validated(
                step=step,
                epoch=epoch,
                loss=loss,
                metrics=named | metrics,
                num_samples=num_samples,
                micro_batch=largest,
                seconds=clock.now() - started,
            )
        )
        self._emit(found)
        return found.loss

    def _ran(self, window: Window, losses: Losses) -> None:
        """Hear that a window has run, and of all losses so far."""

    def _next_size(self, seen: int, ceiling: int) -> int:
        """Return how many samples to read next: all that are left, where fewer than may be would remain."""
        wanted, total = self._trials.size(ceiling), self._source.num_samples
        if self._is_joined:
            left = math.inf if total is None else total - seen
            # Two halves rather than a window and a few samples more, which would be of another loss.
            is_odd = self._window_samples < left < 2 * self._window_samples
            return -(-int(left) // 2) if is_odd else self._window_samples
        if total is None or not wanted < total - seen < wanted + self._fewest:
            return wanted
        return total - seen

    def _agreed(self, found: Validated) -> Validated:
        """Return what is told of a pass."""
        return found

    def _read_all(self, losses: Losses) -> dict[str, float]:
        """Read all that is left on the device, by one copy; return the means of metrics and of outputs."""
        read_losses([losses, self._beside, *([] if self._metrics is None else [self._metrics])])
        outputs = {name: float(mean) for name, mean in self._beside.means().items()}
        return outputs if self._metrics is None else outputs | self._metrics.read()  # of one name the metric counts

    def weigh(self, hypothesis: Callable[[], Hypothesis | None]) -> None:
        """Weigh micro-batches as windows of training are weighed.

        Args:
            hypothesis: () -> what losses were measured to be there; None where nothing was measured.
        """
        self._hypothesis = hypothesis

    def join(self, layout: Callable[[], Layout | None], num_samples: int) -> None:
        """Compute the loss of windows of so many samples at once while windows of training are joined.

        Args:
            layout: () -> how their modules are split; None where they are weighted.
            num_samples: of each window, but for the last two.
        """
        self._trained_layout, self._window_samples = layout, num_samples

    def _pieces(self, window: Window, ceiling: int) -> Iterator[Piece]:
        """Yield the pieces of a window; of a joined one the first micro-batch, until all of them fit."""
        if not self._is_joined:
            yield from self._trials.window(window.num_samples, ceiling)
            return
        while True:
            size = min(self._trials.size(ceiling), window.num_samples)
            yield Piece(0, size, is_trial=size > self._trials.largest)

    def _joined_outcome(self, window: Window, size: int) -> tuple[Loss, Sums, Outputs]:
        """Compute the loss of a whole window, by micro-batches of ``size`` samples."""

        def few(count: int) -> None:
            self._without_graph(window.micro_batch(0, count))
            self._computed = None

        count = window.num_samples
        self._joined.measure(count, few)
        return self._joined.run(count, size, lambda: self._outcome(lambda: in_order(window), count))

    def check_form(self, window: Window) -> None:
        """Check, beside a window that is trained on, that a ``loss_fn`` can be called with these data too.

        Raises:
            DataError: it cannot.
        """
        few = min(2 * self._fewest, window.num_samples)

        def found() -> None:
            # Those that are trained on first: what is wrong with both is to be mended there.
            inputs_and_targets(window.micro_batch(0, few))
            with of_validation_data():
                example = self._source.form(few)
                if example is not None:
                    inputs_and_targets(example)

        if few and self._of_outputs:
            attempt(found)  # should memory not do, training will say

    def try_metrics(self, metrics: Metrics) -> None:
        """Call each function on a few samples, of which nothing remains: what is wrong is said before training.

        Raises:
            ArgumentError: a function returned no tensor of values.
            EmptyDatasetError: there is no sample.
        """
        try:
            with of_validation_data():
                self._try_metrics(metrics)
        except Exception as error:
            if not is_out_of_memory(error):  # which training will say, or a validation
                raise

    def _try_metrics(self, metrics: Metrics) -> None:
        snapshot, attributes = Snapshot(self._modules, self._device), Attributes(self._modules)
        snapshot.take()
        try:
            with self._evaluating():
                metrics.check(lambda: self._source.example(3 * self._fewest), self._fewest)
        except EmptyDatasetError:
            raise EmptyDatasetError("validation_data", _NOTHING) from None
        finally:
            attributes.restore()
            snapshot.restore()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put all modules into eval mode; at its end put back their modes, their buffers, and the random states."""
        # Each module's own mode: layers may have been frozen in eval mode while the model trains.
        training = [(module, module.training) for module in self._modules]
        # An eval forward may write to buffers, to count its calls, say. Those of metrics are what these have come to.
        self._snapshot.take()
        try:
            for module in self._modules:  # set and not called: train() is often overridden, to freeze layers
                module.training = False
            yield
        except KeyboardInterrupt as error:
            error.add_note(BROKEN_OFF)
            raise
        finally:
            for module, mode in training:
                module.training = mode
            self._snapshot.restore()

    def _make_do(self, shortage: Shortage, piece: Piece, patience: Patience) -> None:
        """Go on after a piece that memory did not do for, in smaller ones, or with the same once more.

        Raises:
            NothingFitsError: it was a single sample, and it is of no use to wait.
        """
        if not shortage.ran:
            self._emit(OutOfMemory(step=patience.step, phase="validation", micro_batch=piece.size))
        if piece.size > self._fewest:
            self._trials.ran_out(piece)
        elif patience.may_pass(shortage):
            self._limits.heed(self._limit.read())
        elif shortage.ran:
            raise self._nothing_fits(piece.size, shortage.peak_bytes)
        else:  # what it would have taken is not known
            self._trials.ran_out(piece)
            raise self._nothing_fits(piece.size, None) from shortage.error

    def _ran_out(self, piece: Piece, outcome: RanOut) -> Shortage:
        """Give back what a forward that failed has left, and return what it shows."""
        self._computed = None
        gc.collect()  # a failed forward may have left reference cycles that hold tensors
        peak_bytes = self._memory.peak()
        self._memory.release()
        return Shortage(micro_batch=piece.size, peak_bytes=peak_bytes, error=outcome.error)

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        """Return the loss of a piece, or that memory did not do for it. What it took is learnt from."""
        # What the allocator holds without need is given back first: it would count in a trial's peak, and where nobody
        # else keeps the limit it would take the room of other pieces.
        if piece.is_trial or self._is_cluttered():
            self._release()
        # Of a size that is known to fit nothing is to be learnt, unless nobody but us would see it pass the limit.
        is_measured = piece.is_trial or not self._is_enforced
        if is_measured:
            self._memory.reset_peak()
        if self._is_joined:
            outcome = attempt(lambda: self._joined_outcome(window, piece.size))
        else:
            outcome = attempt(lambda: self._outcome(lambda: window.micro_batch(piece.start, piece.size), piece.size))
        if isinstance(outcome, RanOut):
            return self._ran_out(piece, outcome)
        loss, sums, outputs = outcome
        peak = self._memory.peak() if is_measured else None
        # It ran all the same, and there is nothing smaller: what is a little over is the heap's.
        if piece.size <= self._fewest and peak is not None and peak > CLEARLY_OVER * self._limits.limit_bytes:
            self._memory.release()
            refused = self._nothing_fits(piece.size, peak)
            return Shortage(micro_batch=piece.size, peak_bytes=peak, error=refused, ran=True)
        # Not sooner: what ran out of memory is run again, and would count twice.
        self._beside.absorb(outputs)
        if self._metrics is not None:
            self._metrics.keep(sums)
        if not self._trials.fitted(piece, peak):  # it ran all the same, so its loss counts
            self._memory.release()
        return loss

    def _release(self) -> None:
        """Give back what the allocator holds without need, and note what is in use then."""
        self._memory.release()
        self._released_bytes = self._memory.used()

    def _outcome(self, micro_batch: Callable[[], Any], size: int) -> tuple[Loss, Sums, Outputs]:
        """Return the loss and what it is a mean over; what the metrics add up to with it; and its outputs."""
        batch = micro_batch()
        try:
            return self._computed_of(batch, micro_batch, size)
        except Exception as error:
            running = f"was running {size} sample{'s' * (size > 1)} that are evaluated"
            tell_micro_batch(error, lambda: batches.flatten(batch)[0], running)
            raise

    def _computed_of(self, batch: Any, micro_batch: Callable[[], Any], size: int) -> tuple[Loss, Sums, Outputs]:
        if self._metrics is None:
            return self._loss(batch, size), {}, self._outputs_of(size)
        # Taken before the loss is computed, which may empty containers and write to tensors.
        shared = SharedTree(batch)
        try:
            loss, outputs = self._loss(batch, size), self._outputs_of(size)
            states = randomness.get_state(self._device)
            sums = self._metrics.measure(shared, micro_batch)
            randomness.set_state(states, self._device)  # so that losses that draw are those without metrics
            return loss, sums, outputs
        finally:
            self._metrics.forget()  # the outputs of what has failed would stand in the way of a smaller piece

    def _outputs_of(self, size: int) -> Outputs:
        """Return what was returned beside the last loss, of which nothing else is kept."""
        found, (computed, self._computed) = Outputs(joins=False), (self._computed, None)
        if computed is not None:
            found.take(computed.outputs, size)
        return found

    def _compute(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch; what else was returned is kept until it is asked for."""
        self._computed = None
        computed = self._loss_of(model, batch)
        if isinstance(computed, Computed):
            self._computed, computed = computed, computed.loss
        return computed

    def _loss(self, batch: Any, size: int) -> Loss:
        """Return the loss of a micro-batch, and what it is a mean over: as the user counts, or as is read."""
        counted = None if self._num_items is None else count_items(self._num_items, batch)
        if counted is not None:
            return self._counted(batch, size, counted)
        if self._is_joined:
            return self._alike(batch, Reduction(size), size)
        if self._hypothesis() == "sum":
            return self._alike(batch, Reduction(1.0), size)
        ways, is_untold = list(self._ways), False
        while self._ways:
            try:
                return self._read(batch, size, self._ways[0])
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # Code that writes to its outputs, or asks for gradients itself, cannot be run like this; and if
                # the error was another, it comes up again.
                del self._ways[0]
                # A loss without a gradient, an accuracy say, has no graph to be read: nothing has gone wrong.
                is_untold = not self._ways and not isinstance(error, LossWithoutGradError)
        try:
            loss = self._alike(batch, Reduction(size), size)
        except Exception:  # so that there is none, which says nothing of how others can be read
            self._ways[:] = ways
            raise
        if is_untold:  # now that it is known that there is a loss at all
            self._emit(_BY_SAMPLES)
        return loss

    def _counted(self, batch: Any, size: int, counted: Count | dict[str, Count]) -> Loss:
        """Return the loss of a micro-batch whose items the user counts."""
        if isinstance(counted, dict):
            losses = self._by_name(self._without_graph(batch))
            return _kept(losses, {name: Reduction(counted.get(name, size)) for name in losses}, size)
        try:
            # A count that is on a device is read at the end, with the loss: of 0 that is 0 / 0, and left out there.
            if isinstance(counted, torch.Tensor) or counted:
                return _kept({"": self._without_graph(batch)}, {"": Reduction(counted)}, size)
            # Its samples have outputs all the same, where any have.
            if self._beside.are_there or self.has_outputs():
                self._without_graph(batch)
        except ZeroDivisionError:  # of code that counts on the host
            if counted:
                raise
        return Loss({"": torch.tensor(0.0)}, {"": Reduction(0.0)}, size)

    def _alike(self, batch: Any, reduction: Reduction, size: int) -> Loss:
        """Return the loss of a micro-batch, whose graph has no say in how it counts."""
        losses = self._by_name(self._without_graph(batch))
        return _kept(losses, dict.fromkeys(losses, reduction), size)

    def _by_name(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each loss that the last forward returned, by its name."""
        if self._computed is None or not self._computed.terms:
            return {"": loss}
        # Numbers in the place of losses have no names.
        rest = {"": torch.tensor(self._computed.rest)} if self._computed.rest else {}
        return {**self._computed.terms, **rest}

    def _without_graph(self, batch: Any) -> torch.Tensor:
        """Return the loss of a micro-batch, of which a graph would tell nothing."""
        with torch.no_grad(), self._autocast():
            return self._compute(self._model, batch)

    def _read(self, batch: Any, size: int, way: str) -> Loss:
        """Return a loss of which a graph is kept, and what it is a mean over, as the graph tells."""
        model = self._outputs if way == _LOSS_GRAPH else self._model
        with torch.enable_grad() if way == _WHOLE_GRAPH else graph_alone(), self._autocast():
            loss = self._compute(model, batch)
        losses, waits = self._by_name(loss), self._device.type == "cpu"
        return _kept(
            losses, {name: without_graph(read_reduction(one, size, waits=waits)) for name, one in losses.items()}, size
        )

    def _outputs(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs without its graph: the loss makes one of its own, which is all that is read."""
        with torch.no_grad():
            leaves, spec = batches.flatten(self._model(*args, **kwargs))
        return spec.unflatten([_with_grad(leaf) for leaf in leaves])

    def _is_cluttered(self) -> bool:
        """Return whether what the allocator still holds is a good part of what is free, where nobody else keeps it."""
        # A release costs time, so it waits until a quarter of the room is taken by what only looks used.
        free = self._limits.target_bytes - self._released_bytes
        return not self._is_enforced and self._memory.used() - self._released_bytes > free / 4

    def state_dict(self) -> dict[str, Any]:
        """Return how it cuts the data, which shows in the last bits of its loss, and the ways left to read a loss."""
        return {"history": self._trials.state_dict(), "ways": list(self._ways)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._trials.load_state_dict(state["history"])
        self._ways[:] = state["ways"]

    def _nothing_fits(self, micro_batch: int, peak_bytes: int | None) -> NothingFitsError:
        """Return the error of as few samples as there may be that do not fit; None where their peak is not known."""
        return NothingFitsError(
            phase="validation",
            micro_batch=micro_batch,
            peak_bytes=peak_bytes,
            limit_bytes=self._limits.limit_bytes,
            min_micro_batch=self._fewest if self._fewest > 1 else None,
        )


BROKEN_OFF = "It broke off a validation."
"""Noted on a Ctrl-C that came in the midst of one."""
_OF_VALIDATION = "They are samples of validation_data."
_NOTHING = "reading it yielded nothing."
_BY_SAMPLES = Notice(
    cause="What the validation loss is a mean over could not be read: the model or the loss cannot be run with a graph",
    consequence="It is averaged over samples, and so may depend on the micro-batch of validation",
    cure="Pass num_items=(micro-batch) -> how many items its loss is a mean over",
)


def _kept(losses: Mapping[str, torch.Tensor], reductions: Mapping[str, Reduction], size: int) -> Loss:
    # They may lie in memory that the next ones are written to.
    return Loss({name: loss.detach().clone() for name, loss in losses.items()}, reductions, size)


def _with_grad(leaf: Any) -> Any:
    """Return an output as a leaf that the loss can make a graph from; numbers and whole numbers as they are."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.detach().requires_grad_()
    return leaf


@contextmanager
def of_validation_data() -> Iterator[None]:
    """Say of errors of data that they are those of ``validation_data``, and not the ones that are trained on.

    Raises:
        DataError: what was read cannot be computed with.
    """
    try:
        yield
    except DataError as error:
        text = str(error)
        if not text.startswith("data: "):  # it names its argument itself
            raise
        # An argument beside a DataLoader is refused, for that brings its own.
        loader = " Where data is a DataLoader, pass validation_data as DataLoader(dataset, collate_fn=...), too."
        raise DataError(f"validation_{text}{loader if 'collate_fn' in text else ''}") from error
    except Exception as error:
        if is_told(error) and _OF_VALIDATION not in error.__notes__:
            error.add_note(_OF_VALIDATION)
        raise


METRICS, REHEARSAL, FORWARD = "a try of metrics", "a rehearsal of validation", "a forward of validation"
"""Kinds of what ranks run together, by which what is left of one that failed is known."""


class ValidatorOfAll(Validator):
    """Runner of validations of which every rank runs all: the same samples, in the same micro-batches."""

    def __init__(
        self, *arguments: Any, group: Group, sharded: Sharded, smallest: Callable[[], int], **options: Any
    ) -> None:
        """Set up for the ranks of a group.

        Args:
            arguments: those of ``Validator``.
            group: the ranks.
            sharded: the model, as they run it.
            smallest: returns the fewest samples that training has found its model to need.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._group, self._sharded, self._smallest = group, sharded, smallest
        self._trials = Halving(self._limits)
        self._is_rehearsed = False
        self._heard: list[bool] = []  # of the last forward, whether it is to be made smaller on any rank

    def run(self, step: int, epoch: int, training_micro_batch: int) -> float:
        """Run one pass, in micro-batches that fit training on all ranks, and return the first rank's loss."""
        # Each rank has found sizes of its own in training, with a backward: the smallest of them fits all without one.
        told = self._group.exchange((training_micro_batch, self._smallest()))
        self.set_fewest(max(self._fewest, *(smallest for _, smallest in told)))
        # A loss that draws would be another on each rank.
        states = randomness.get_state(self._device)
        randomness.set_state(self._group.from_first(lambda: states), self._device)
        try:
            return self._run(step, epoch, min(largest for largest, _ in told))
        finally:
            randomness.set_state(states, self._device)

    def _agreed(self, found: Validated) -> Validated:
        """Return what the first rank tells of a pass: callbacks decide by it, alike on all ranks."""
        return self._group.exchange(found)[0]

    def try_metrics(self, metrics: Metrics) -> None:
        """Call each function on some samples; see ``Validator``. Memory that runs out in it ends all ranks."""
        # Nothing is known yet of what these forwards launch, so that nobody could make up for one that has failed.
        self._sharded.run(lambda: self._try_metrics(metrics), lambda: True, lambda _: False, kind=METRICS)
        self._sharded.reset()
        gc.collect()  # training rehearses next, which cannot be made up for either

    def _rehearse(self, window: Window) -> None:
        """Run a forward twice, so that it is known what to make up for in those that come after it."""
        # The first may find out that a loss cannot be read in one way, and run another forward.
        size = min(window.num_samples, self._fewest)
        # Here nobody can be made up for, so that what is held without need goes first.
        gc.collect()
        self._release()
        for kind in (REHEARSAL, FORWARD):
            self._forward(lambda: self._outcome(lambda: window.micro_batch(0, size), size), lambda: True, kind)
        self._is_rehearsed = True

    def _forward(self, compute: Callable[[], Any], told: Callable[[], Any], kind: str = FORWARD) -> Any:
        found: list[Any] = []

        def run() -> None:
            found[:] = [compute()]
            # Without a backward some parts would stay gathered, and the next forward launch less than this one.
            self._sharded.reset()

        self._heard = self._sharded.run(run, told, kind=kind)
        return found[0]

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        self._group.exchange(True)  # in which is heard of a rank that has failed since the last forward
        if not self._is_rehearsed:
            self._rehearse(window)
        if self._is_cluttered():
            self._release()
        # Where nobody else keeps the limit a size that passes it is given up, on all ranks.
        if not self._is_enforced:
            self._memory.reset_peak()
        peak_bytes = 0

        def is_too_large() -> bool:
            nonlocal peak_bytes
            peak_bytes = 0 if self._is_enforced else self._memory.peak()
            return not self._limits.allows(peak_bytes, is_smallest=piece.size <= self._fewest)

        def compute() -> Any:
            return self._outcome(lambda: window.micro_batch(piece.start, piece.size), piece.size)

        try:
            outcome = attempt(lambda: self._forward(compute, is_too_large))
        # Of a size that failed elsewhere this rank has a loss as well, which is thrown away: samples count once.
        except Elsewhere as error:
            self._computed = None
            return Shortage(micro_batch=piece.size, peak_bytes=0, error=error)
        if isinstance(outcome, RanOut):
            return self._ran_out(piece, outcome)
        # Said by whoever passed its limit, and heard by all with the end of the forward: they go on alike.
        if any(self._heard):
            self._memory.release()
            if piece.size <= self._fewest:
                is_own = self._heard[self._group.rank]
                why = self._nothing_fits(piece.size, peak_bytes) if is_own else Elsewhere()
                return Shortage(micro_batch=piece.size, peak_bytes=peak_bytes, error=why, ran=True)
        loss: Loss
        loss, sums, outputs = outcome
        # Not sooner: what ran out of memory on any rank is run again, and would count twice.
        self._beside.absorb(outputs)
        if self._metrics is not None:
            self._metrics.keep(sums)
        self._trials.fitted(piece, None)
        if any(self._heard):  # it ran all the same, so its loss counts
            self._trials.ran_out(piece)
        return loss

    def _make_do(self, shortage: Shortage, piece: Piece, patience: Patience) -> None:
        if not isinstance(shortage.error, Elsewhere):
            super()._make_do(shortage, piece, patience)
        elif piece.size > self._fewest:
            self._trials.ran_out(piece)
