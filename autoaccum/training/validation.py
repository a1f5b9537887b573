"""The loss on held-out data: a micro-batch of its own, and no trace on training."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoaccum.data import batches, randomness
from autoaccum.data.base import Source, Window, in_order
from autoaccum.errors import DataError, EmptyDatasetError, LossWithoutGradError, NothingFitsError
from autoaccum.events import Event, Notice, OutOfMemory, Validated
from autoaccum.loss.counting import count_items
from autoaccum.loss.functions import inputs_and_targets
from autoaccum.loss.graph import graph_alone
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import read, without_graph
from autoaccum.loss.stated import Computed, CountItems, LossOf
from autoaccum.loss.terms import Count, Reduction
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import RanOut, attempt, insist, is_out_of_memory
from autoaccum.memory.waiting import Patience, Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.planning.limits import CLEARLY_OVER, Limits
from autoaccum.planning.trials import Trials
from autoaccum.training.evaluating_joined import JoinedEvaluations
from autoaccum.training.metrics import Metrics, SharedTree, Sums
from autoaccum.training.validation_losses import Loss, Losses
from autoaccum.training.validation_losses import read as read_all
from autoaccum.window.attributes import Attributes
from autoaccum.window.outputs import Outputs
from autoaccum.window.precision import Autocast
from autoaccum.window.raised import is_told, tell_micro_batch
from autoaccum.window.single_samples import may_need_another
from autoaccum.window.snapshot import Snapshot
from autoaccum.window.split_calls import Layout

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
        read_all([losses, self._beside, *([] if self._metrics is None else [self._metrics])])
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

    def beside(self, window: Window, compared: Callable[[Any, Any], list[Notice]]) -> list[Notice]:
        """Return what is said of a micro-batch of a window that is trained on, and one of these data beside it.

        Raises:
            DataError: they are none that a ``loss_fn`` can be called with.
        """
        few = min(2 * self._fewest, window.num_samples)

        def found() -> list[Notice]:
            if not few:
                return []
            # Those that are trained on first: what is wrong with both is to be mended there.
            own = window.micro_batch(0, few)
            if self._of_outputs:
                inputs_and_targets(own)
            with of_validation_data():
                example = self._source.form(few)
                if example is None:
                    return []
                if self._of_outputs:
                    inputs_and_targets(example)
                return compared(own, example)

        said = attempt(found)
        return [] if isinstance(said, RanOut) else said  # training will say

    def try_metrics(self, metrics: Metrics) -> None:
        """Call each function on 1 to 3 samples, of which nothing remains: what is wrong is said before training.

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
                few = self._fewest  # what computes them need not be able to compute fewer
                two = self._source.example(2 * few)
                # A model that cannot be called on a single sample is compared with nothing.
                try:
                    metrics.measure(SharedTree(self._source.example(few)), lambda: self._source.example(few))
                except Exception as error:
                    if not may_need_another(error):
                        raise
                    metrics.measure(SharedTree(two), lambda: self._source.example(2 * few))
                    return
                metrics.check(two, 2 * few)
                # What is compared with one row, or with two classes, is broadcast by chance; of three it is not.
                metrics.measure(SharedTree(self._source.example(3 * few)), lambda: self._source.example(3 * few))
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
        return _kept(losses, {name: without_graph(read(one, size, waits=waits)) for name, one in losses.items()}, size)

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
