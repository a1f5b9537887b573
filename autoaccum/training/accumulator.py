"""``Accumulator``: the windows of ``fit`` for your own training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import default_collate

from autoaccum import _checks
from autoaccum.data import foreign
from autoaccum.data.arrays import converted, is_plain
from autoaccum.data.base import Item, Window
from autoaccum.data.grouped import GroupedSamples
from autoaccum.data.lengths import BatchLengths, Padding
from autoaccum.data.pieces import Pieces, SampleReader, items_form, with_preserved_randomness
from autoaccum.data.randomness import mix
from autoaccum.data.splits import SplitLike, is_said, split_of
from autoaccum.distributed.gradients import Compression
from autoaccum.errors import (
    ArgumentTypeError,
    CheckpointCorruptError,
    ConflictingArgumentsError,
    EmptyDatasetError,
)
from autoaccum.events import Event
from autoaccum.memory.devices import being_current, current_device_kept
from autoaccum.memory.limit import MemoryLimit
from autoaccum.memory.oom import insist, room_for_model
from autoaccum.planning.limits import SavingMode
from autoaccum.runs.past_of_run import describe
from autoaccum.step.gradient import Gradient
from autoaccum.step.job import Precision
from autoaccum.step.module_state import batch_norms, smallest_micro_batch
from autoaccum.step.optimizers import allocate_state, bare_tensors, check_optimizer, needs_closure, trainable_parameters
from autoaccum.step.outputs import on_device, placed
from autoaccum.step.split_calls import Layout
from autoaccum.step.terms import CountItems, Reducing
from autoaccum.training import notices, rank_sync
from autoaccum.training.accumulator_sync import meeting_of
from autoaccum.training.options import OF_FIT, FitArguments
from autoaccum.training.setup import GivenBatch, device_of, job_of, make_step, place_of
from autoaccum.training.single_process import Ranks, only_run
from autoaccum.training.synonyms import answering, of_one_batch


class StepSamples:
    """The samples of one step after the other, collated as those of ``fit`` are.

    A micro-batch is collated under a seed of its own, and leaves the random states as they were; samples of different
    lengths are served longest first.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], seed: int, device: torch.device) -> None:
        """Set up.

        Args:
            collate_fn: makes a batch of a list of samples.
            seed: of what it draws.
            device: where micro-batches go.
        """
        # The reader of ``fit``, which collates under a seed for each micro-batch, and gives a collate_fn copies of
        # samples that it may take apart. There is nothing for it to read: the samples are there.
        self._collate = with_preserved_randomness(SampleReader(None, collate_fn, mix(seed)))
        self._device = device
        self._padding = None if collate_fn is default_collate else Padding(self._collate)

    def window(self, samples: Any, step: int) -> Window:
        """Return the samples of a step as a window.

        Raises:
            ArgumentTypeError: they are no list.
            EmptyDatasetError: there is none.
        """
        if not isinstance(samples, list | tuple) or hasattr(samples, "_fields"):
            cure = "With collate_fn, a step is given samples; leave it out for a batch that is collated already."
            raise ArgumentTypeError("batch", samples, "a list of samples", cure)
        if not samples:
            raise EmptyDatasetError("batch", "it is an empty list.")
        items: list[Item] = [(step, position, sample) for position, sample in enumerate(samples)]
        position = 0

        # In the form in which data are read, so that windows are grouped and kept as those of ``fit``.
        def next_items(wished: int) -> tuple[int, list[Item]]:
            nonlocal position
            found = items[position : position + wished]
            if not found:
                raise StopIteration
            position += len(found)
            return len(found), found

        if self._padding is None:  # of one shape: there is nothing to group
            reader: Any = Pieces(next_items, form=items_form(self._collate), device=self._device)
        else:
            reader = GroupedSamples(next_items, collate=self._collate, padding=self._padding, device=self._device)
        window: Window = reader.window(len(items))
        return window


class Accumulator:
    """Steps of an optimizer on batches that need not fit into memory: each is cut into micro-batches that do.

    ::

        accumulator = autoaccum.Accumulator(model, optimizer, loss_fn=loss_fn)
        for batch in loader:                    # a batch is all that one optimizer step is to see
            loss = accumulator.step(batch)
            scheduler.step()

    A batch is a window of ``fit``, with the same promises: the gradient is that of the loss over the whole batch,
    whatever it was cut into, and when memory runs out the batch is run again in smaller pieces, from the buffers and
    random states that it began with. The data, schedules, validation and checkpoints stay yours, as does the mode of
    the model. Batches may be of any size, and on the host.

    Under torchrun every rank makes one, and passes its own part of each batch: of whatever size, and of no rows where
    it has none. What is computed is that of all parts joined, the same on all ranks, which have to call it rank_sync.
    """

    @answering("Accumulator")
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        training_step: Callable[[Any, Any], Any] | None = None,
        num_items: CountItems | None = None,
        reduction: Reducing = None,
        micro_batch: int | Literal["auto"] = "auto",
        max_micro_batch: int | None = None,
        min_micro_batch: int | None = None,
        memory_limit: MemoryLimit = None,
        headroom: float = 0.05,
        memory_saving: SavingMode = "auto",
        patience: float = 60.0,
        precision: Precision = "fp32",
        clip_norm: float | None = None,
        accumulate: Literal["auto", "weighted", "joined"] = "auto",
        verify: bool = True,
        strict: bool = False,
        ranks: Ranks = "together",
        compression: Compression = "none",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        split: SplitLike | None = None,
        batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0,
        callbacks: Iterable[Callable[[Event], None]] = (),
    ) -> None:
        """Set up; the model is on its device already. The optimizer's lazily made state is allocated.

        Args:
            model: the module to train; compiled or not.
            optimizer: over its parameters. One whose ``step`` needs a closure, such as LBFGS or SAM, is given one.
            loss_fn: (outputs, targets) -> loss, a mean or a sum, for batches that are (inputs, targets); or a loss and
                a dict of what is to be seen beside it: ``return loss, {"accuracy": ...}``.
            training_step: (model, batch) -> loss, for any batch, or several that are added, in a dict or a list. With
                neither, the model returns its loss, as ``.loss`` or ``["loss"]``.
            num_items: (micro-batch) -> how many items its loss is a mean over, where that cannot be read off the loss;
                of several losses a dict of these by their names, or a list.
            reduction: mean or sum: how the loss of a micro-batch combines its samples or items; measured if left out.
                With num_items, a sum is divided by the items of the full batch.
            micro_batch: "auto", or the samples of one forward and backward.
            max_micro_batch: the most samples to try at once.
            min_micro_batch: the fewest samples of one forward and backward; a window that has fewer is run as one
                micro-batch.
            memory_limit: device memory this process may use, as bytes, "8GiB", a share such as 0.5, or a function () ->
                one of these, asked again as training goes on.
            headroom: fraction of the limit that plans leave free, but for the smallest micro-batch.
            memory_saving: auto: where not even the smallest micro-batch fits, blocks compute their forward twice
                (checkpoint), then tensors go to the host (offload), to the same bits; off: never; one of these, or
                both: always.
            patience: seconds to wait for memory that others hold where not even the smallest micro-batch fits beside
                it.
            precision: fp32 (as the model is), bf16 or fp16 (both by autocast).
            clip_norm: clip each batch's gradient to this 2-norm.
            accumulate: how micro-batches make the gradient: weighted: by what their losses count; joined: the loss is
                computed once, on the outputs of all of them, which run again in backward; auto: joined where weighted
                is not exact.
            verify: measure, on a few samples of the first window that is cut and now and then, that cut windows have
                the gradient of whole ones.
            strict: raise NotExactError before a step on a gradient that was measured not to be the whole window's, or
                could not be measured, instead of saying so.
            ranks: together: each process that torchrun has started passes its part of a batch, and all step on the
                gradient of the joined one; independent: each process that a launcher has started trains by itself.
            compression: none: ranks add up gradients in their own type; bf16: rounded to bfloat16 on their way, half
                the bytes of 32 bits. One process sends nothing, and rounds nothing.
            collate_fn: makes a micro-batch of a list of samples; ``step`` is then given a list of samples.
            split: (batch, start, size) -> micro-batch, which cuts batches of any form, or one of autoaccum.splits:
                samples, graphs, packed, flattened(...), tensors. Read off the batches when left out.
            batch_dim: the dim in which samples lie, 1 in time-first tensors, of each leaf that has the batch's extent
                there (others, such as labels, have it in dim 0); or the dim of each leaf, in the structure of a batch.
            callbacks: functions (event) -> None, called with every event: a plan, a re-plan, memory that ran out.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
            LimitBelowModelError: the limit is below what is needed before the first sample.
        """
        optimizer = _unprepared(optimizer)
        # Its callbacks take events alone, and there is no recorded run to repeat.
        _checks.of_micro_batch(micro_batch)
        self._callbacks = _checks.of_event_callbacks(callbacks)
        given = {name: value for name, value in locals().items() if name in OF_FIT}
        arguments = FitArguments(**{**given, "callbacks": ()}, data=None, effective_batch=1)
        checked = arguments.check()
        self._modules = arguments.modules()
        parameters = trainable_parameters(model, self._modules, optimizer)
        # One of another model would train nothing, and say nothing.
        check_optimizer(optimizer, parameters, functions=(loss_fn, training_step))
        if needs_closure(optimizer) and precision == "fp16":
            cure = "It looks at the loss between its own updates, which no gradient scaler can follow: take 'bf16'."
            raise ConflictingArgumentsError("precision", precision, f"optimizer={type(optimizer).__name__}", cure)
        with current_device_kept():
            # Where the caller has put it: to move it would leave an optimizer's state, or a compiled model, behind.
            # Where nothing of it is trained, it is the frozen parameters that tell, or what the optimizer holds.
            held = parameters or [p for module in self._modules for p in module.parameters()]
            place = place_of(device_of(model, held or bare_tensors(optimizer, self._modules)), memory_limit)
        self._device = place.device
        self._meeting = meeting_of(ranks, self._modules, optimizer, place.device)
        # From here on others wait for this rank: what ends it is told to them.
        with self._telling():
            if self._meeting is not None:
                rank_sync.refuse_options(self._modules, min_micro_batch)
                self._meeting.group.summing.prepare(parameters, compression)
            # Left to the first step, it would be allocated after plans have been measured without it.
            with place.limit.kept(), room_for_model(place.memory, place.limit.bytes, parameters):
                allocate_state(optimizer, self._modules)
        self.events: list[Event] = []
        """Everything that happened, in order."""
        self.micro_batches: tuple[int, ...] = ()
        """How the last batch was cut, on all ranks: those of the first come first."""
        self.grad_norm: torch.Tensor | None = None
        """2-norm of the last batch's gradient before clipping; None where nothing in it counts."""
        self.outputs: dict[str, torch.Tensor] = {}
        """What was returned beside the last batch's loss, by name, on the device: means, and tensors, joined."""
        self._is_scaled = precision == "fp16"
        self._searches = micro_batch == "auto"
        # A loop of the caller's has no largest batch that is known beforehand: it is learnt as batches come.
        self._largest_batch = 0  # samples; plans are settled for batches as large as this one
        # Kept over all steps, for what one batch has shown of its form holds for the next one.
        self._split = checked[split_of]
        self._length_of = BatchLengths()  # tells lengths once batches differ in them
        # What a collate_fn draws for a batch is a function of this and of the step, so that a replay draws the same.
        self._samples = None if collate_fn is None else StepSamples(collate_fn, self._seed(), self._device)
        self._batch_norms = batch_norms(self._modules)  # whose modes decide how small a micro-batch may be
        self._modes = [layer.training for layer in self._batch_norms]
        job = job_of(arguments, checked, place.device, model, optimizer)
        # What decides what is computed has to be the same on all ranks; how windows are cut is each one's own.
        self._given: dict[str, Any] = {"reduction": job.reduction, "compression": compression}
        self._given |= {"clip_norm": clip_norm, "precision": precision}
        with self._telling():
            self._step = make_step(
                job,
                arguments,
                place,
                self._emit,
                micro_batch=micro_batch if isinstance(micro_batch, int) else None,
                group=None if self._meeting is None else self._meeting.group,
            )

    @of_one_batch
    def step(self, batch: Any) -> torch.Tensor:
        """Take one step of the optimizer on the gradient of a batch, which is dropped when the next one begins.

        An optimizer whose step needs a closure is given one, which computes the exact gradient of the same batch as
        often as it is called, each time in as many micro-batches as memory asks for. The gradient is there before the
        step too, for those that begin by it (sharpness-aware minimisation); for those that call the closure first
        (LBFGS), the first call finds it there, and computes nothing. One is needed where the step's parameter has no
        default, and where the very first step fails without one before it has written anything, and does not with one.

        Args:
            batch: any pytree whose tensors have one row per sample, or what ``split`` cuts; beside ``collate_fn`` a
                list of samples.

        Returns:
            the loss over the batch, before the step: a 0-dim tensor on the device, without a gradient.

        Raises:
            NothingFitsError: not even one sample fits.
            OptimizerOutOfMemoryError: memory ran out in the optimizer's step, which is not repeated.
            DataError: the batch cannot be cut.
            LossError: the loss cannot be trained on; no step was taken.
            RankError: another rank has failed, or is gone; no step is taken after that.
        """
        # What the caller does between steps is his own matter, and other Accumulators have limits of their own.
        with self._telling(), self._step.limit.kept():
            if self._step.strays.were_changed():
                self._step.announcer.say_once(notices.changed_late())
            window = self._part(batch, "step")
            gradient = self._run(window)
            outputs = self.outputs
            # An optimizer may ask for gradients itself, several times in a step: each is a window of the same batch.
            # What is returned are the loss and the outputs before the step, which is what callers compare.
            with being_current(self._device):
                self._step.apply(gradient, lambda: self._run(window))
            self._step.strays.stepped(self._step.job.optimizer)
        self.outputs = outputs
        return gradient.loss

    @of_one_batch
    def backward(self, batch: Any) -> torch.Tensor:
        """Leave the gradient of a batch in ``.grad`` for a step of one's own; clipped, and nothing before it remains.

        Returns and raises what ``step`` does. With it, a closure is ``lambda: accumulator.backward(batch)``.
        """
        if self._is_scaled:
            cure = "Only step() can leave out a step on a gradient that overflowed; or take precision='bf16'."
            raise ConflictingArgumentsError("precision", "fp16", "backward()", cure)
        with self._telling(), self._step.limit.kept():
            gradient = self._run(self._part(batch, "backward"))
        self._step.strays.expect()
        self._step.number += 1  # the caller steps, and windows are numbered by steps in what is announced
        return gradient.loss

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out about the loss, about memory and about time, as plain values for a checkpoint.

        Weights, the optimizer's state and random numbers are the loop's own to keep.
        """
        return {
            "device": describe(self._device),
            "largest_batch": self._largest_batch,
            "lengths": self._length_of.state_dict(),
            "step": self._step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned; on another device memory and time are to be found out again.

        Raises:
            CheckpointCorruptError: the state is not one of an Accumulator. Nothing was changed.
        """
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise CheckpointCorruptError(
                "", "is none of an Accumulator", entry="state_dict", cure="Pass what state_dict() of one returned."
            )
        is_same_device = state["device"] == describe(self._device)
        self._step.load_state_dict(dict(state["step"]), is_same_device=is_same_device)
        self._length_of.load_state_dict(state["lengths"])
        if is_same_device:
            # What it was searched for: a batch as large begins no other search.
            self._largest_batch = state["largest_batch"]

    def _telling(self) -> AbstractContextManager[None]:
        """Return a context whose errors are told to other ranks, where there are any."""
        return nullcontext() if self._meeting is None else self._meeting.telling()

    @property
    def split_modules(self) -> Layout | None:
        """How modules are split where micro-batches are joined; None where these are weighted."""
        return getattr(self._step.transaction, "layout", None)

    def _seed(self) -> int:
        """Return the seed of what a collate_fn draws."""
        # Programs seed all ranks alike, for their weights; samples of several ranks are not to be masked alike.
        own = torch.initial_seed()
        return own if self._meeting is None else mix(own, self._meeting.group.rank)

    def _part(self, batch: Any, call: str) -> Window:
        """Return a batch as a window; as a part of it, where other ranks have others."""
        window = self._window(batch)
        if self._meeting is None:
            return window
        return self._meeting.part(window, self._given, f"{call} {self._step.number + 1}")

    def _window(self, batch: Any) -> Window:
        """Return a batch as a window, with the length of its samples where they have one."""
        # A rank may be given nothing, as where its data has ended before that of others.
        may_be_empty = self._meeting is not None
        if self._samples is not None and may_be_empty and isinstance(batch, list) and not batch:
            return GivenBatch(batch, 0, self._device)
        if self._samples is not None:
            return self._samples.window(batch, self._step.number)
        if not (is_said(self._split) or is_plain(batch)):
            foreign.refuse_as_batch(batch)
            batch = converted(batch)
        num_samples = self._split.count(batch, "batch")
        if not num_samples and not may_be_empty:
            raise EmptyDatasetError("batch", "its tensors have no rows.")
        if not num_samples:
            return GivenBatch(batch, 0, self._device)
        length = self._length_of(batch, num_samples, self._split)  # padded already, so all samples have the same
        lengths = None if length is None else (length,) * num_samples
        return GivenBatch(batch, num_samples, self._device, lengths, self._split)

    @torch.enable_grad()
    @only_run("Accumulator.step")
    def _run(self, window: Window) -> Gradient:
        """Run a window, and keep what users may look at after it."""
        # In each window, for the mode of the model is the caller's, and BatchNorm in eval mode takes single samples.
        modes = [layer.training for layer in self._batch_norms]
        if modes != self._modes:
            self._modes = modes
            self._step.tuner.set_smallest(smallest_micro_batch(self._modules))
        if window.num_samples > self._largest_batch:  # no smaller one could tell what is best for it
            self._largest_batch = window.num_samples
            self._step.tuner.searching = self._searches
        with being_current(self._device):
            gradient, _ = self._step.run(window)
        # The window has committed: what little memory this takes is asked for until it is there.
        norm, what = gradient.grad_norm, "placing a window's loss and outputs on the device"
        norm = None if norm is None else insist(partial(placed, norm, self._device), what)
        gradient = replace(gradient, loss=insist(partial(placed, gradient.loss, self._device), what), grad_norm=norm)
        self.micro_batches, self.grad_norm = gradient.sizes, gradient.grad_norm
        self.outputs = insist(partial(on_device, gradient.outputs, self._device), what) if gradient.outputs else {}
        # Of samples with lengths, smaller batches say nothing of the largest: only one as large settles the search.
        if self._largest_batch and (window.lengths is None or window.num_samples == self._largest_batch):
            self._step.settle(self._largest_batch, window.lengths)
        # After each window and not each step, for a closure runs several, each from where the last one ended.
        if self._meeting is not None:
            self._meeting.make_same()
        return gradient

    def _emit(self, event: Event) -> None:
        """Keep an event, and tell every callback of it."""
        self.events.append(event)
        for callback in self._callbacks:
            callback(event)


def _unprepared(optimizer: Any) -> Any:
    """Return the optimizer within one that Accelerate has prepared; any other as it is.

    Raises:
        ConflictingArgumentsError: the Accelerator leaves out steps, or scales losses.
    """
    # By its name, for Accelerate is not imported for this.
    if not any(kind.__name__ == "AcceleratedOptimizer" for kind in type(optimizer).__mro__):
        return optimizer
    steps = optimizer.gradient_state.num_steps
    if steps != 1:
        cure = "Each batch of an Accumulator is a step: leave it out, and let the loader yield all samples of a step."
        raise ConflictingArgumentsError("gradient_accumulation_steps", steps, "Accumulator", cure)
    if optimizer.scaler is not None:
        cure = "Its scaler waits for accelerator.backward: take mixed_precision='bf16'; or none, and Accumulator(..., "
        cure += "precision='fp16')."
        raise ConflictingArgumentsError("mixed_precision", "fp16", "Accumulator", cure)
    # What Accelerate adds are these two, so nothing is lost. Its scheduler goes by the optimizer that is within.
    return optimizer.optimizer
