"""One optimizer step in whatever memory there is: the gradient of a window, then the step on it.

It asks the tuner how to cut the window, runs the transaction, and goes on in smaller pieces when memory runs out. Where
windows come from, and what is done between them, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from autoaccum.data.base import Window
from autoaccum.distributed.balance import Stint
from autoaccum.distributed.channel import undisturbed
from autoaccum.distributed.fsdp import Elsewhere
from autoaccum.distributed.group import Group
from autoaccum.distributed.shards import measured_by_first, num_of_all_ranks
from autoaccum.errors import AutoaccumError, LossWithoutGradError, MemoryLimitError, NothingFitsError
from autoaccum.events import Event, Joined, Notice, OutOfMemory, StepSkipped
from autoaccum.memory import clock
from autoaccum.memory.base import Memory
from autoaccum.memory.limit import Limit
from autoaccum.memory.oom import RanOut, attempt, beyond_plans, without_frames
from autoaccum.memory.waiting import Patience, Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.planning.cuts import Lengths
from autoaccum.planning.tuner import Attempt, Tuner
from autoaccum.step import error_context, notices
from autoaccum.step.across_ranks import Outcome, SharedTransaction, share_of_one
from autoaccum.step.error_context import Refusal, SingleSampleError
from autoaccum.step.gradient import Gradient, Repeat
from autoaccum.step.job import Job
from autoaccum.step.joined import JoinableTransaction, JoinedShares
from autoaccum.step.joined_measurement import Joiner
from autoaccum.step.memory_saving import NotSaved, Saving, advise
from autoaccum.step.meter import Compilations, Meter
from autoaccum.step.notices import Announcer
from autoaccum.step.optimizer_step import Closure, Stepper, WithoutClosureError
from autoaccum.step.optimizers import needs_closure, refuse_closure
from autoaccum.step.replanning import Plans
from autoaccum.step.snapshot import Moving
from autoaccum.step.split_calls import Layout
from autoaccum.step.transaction import Transaction
from autoaccum.step.verification import Examination, Examiner

Accumulate = Literal["auto", "weighted", "joined"]
"""By which rule micro-batches make the gradient."""


_NEARLY_ALL = 0.9
"""Of what full batches hold, above which a split one saves next to nothing."""


class Failure(NamedTuple):
    """An attempt that ran out of memory; it pins nothing of what must be freed."""

    piece: Piece
    """What was being run; where it was the window's end that failed, its size is that of the largest micro-batch."""
    shortage: Shortage
    """What was reached, and the error."""


class Step:
    """Takes the steps of one run."""

    def __init__(
        self,
        job: Job,
        *,
        transaction: Transaction,
        examiner: Examiner,
        tuner: Tuner,
        meter: Meter,
        compilations: Compilations,
        saving: Saving,
        memory: Memory,
        limit: Limit,
        patience: float,
        emit: Callable[[Event], None],
        joiner: Joiner | None = None,
        accumulate: Accumulate = "auto",
    ) -> None:
        """Set up.

        Args:
            job: what is computed.
            transaction: adds up the gradient of a window.
            examiner: looks for what is not exact about it.
            tuner: decides how windows are cut.
            meter: measures them.
            compilations: notices what is compiled while they run.
            saving: saves memory where nothing fits otherwise.
            memory: of the device.
            limit: what may be used of it.
            patience: seconds to wait for memory that others hold, before nothing fits.
            emit: takes the events.
            joiner: measures whether windows can be joined; None where they cannot.
            accumulate: by which rule micro-batches make the gradient.
        """
        # Plans are chosen by the tuner, run by the transaction and measured by the meter. None of these knows the other
        # two: what one has to hear of another is said here.
        self.job = job
        self.transaction = transaction
        if transaction.together is None:  # of modules that lie here
            transaction.moving = Moving(job.modules)
        # Where all ranks run each micro-batch together, and what one of them alone runs of the model would hang.
        self._sharded = transaction.together
        self.tuner = tuner
        self.meter = meter
        self.compilations = compilations
        self.saving = saving
        self.limit = limit
        self.number = 0
        """Windows that were run and stepped on."""
        self.announcer = Announcer(emit)
        self.plans = Plans(
            tuner, saving, meter=meter, memory=memory, limit=limit, announcer=self.announcer, emit=emit,
            number=lambda: self.number,
        )  # fmt: skip
        """Tells how windows are cut."""
        saving.uncompile = self._uncompile
        self._examiner = examiner
        self._joiner = joiner
        self._accumulate = accumulate
        self._due = False  # whether this joined window is to be measured
        self._held = 0.0  # what joined windows hold, as a fraction of what full batches do
        self._is_tried = False  # whether it is joined to see whether that makes it finite
        self._reason = "accumulate='joined' was passed"  # why windows are joined
        # What is not measured is not known to be wrong.
        examiner.joins = joiner is not None and accumulate == "auto" and examiner.verifies
        self._stepper = Stepper(job.optimizer, memory)
        self.strays = self._stepper.strays
        self.strays.windows.add(transaction)
        self._memory = memory
        self._patience = patience
        self._emit = emit
        self._refusal: Refusal | None = None  # of this window
        self._piece = Piece(0, 0, 1, False)  # what runs at this moment
        self._is_given = not tuner.searching  # the size of micro-batches, by the user
        self._fewest_told = 1  # samples of a micro-batch, as all ranks have heard; the tuner's may be of this one alone
        self._closes = needs_closure(job.optimizer)  # whether its steps are given a closure
        self.stints: Sequence[Stint] = ()
        """What each rank did of the last window, where there are several."""
        self.within: Callable[[int], None] | None = None
        """(samples of a window that have run) -> None, after each micro-batch; for whoever shows it to set."""
        self._began = self._waited = 0.0  # when this window began, and how long was waited for others until then
        self._waited_told = 0.0  # how long until others were told of it

    def run(self, window: Window, plan: Sequence[int] | None = None) -> tuple[Gradient, int]:
        """Make the gradient of the next window, in smaller and smaller pieces until it fits.

        Args:
            window: the samples.
            plan: sizes to use; None: those that the tuner chooses.

        Returns:
            the gradient, in ``.grad``; the number of replays, in each of which memory had run out.

        Whatever it raises, an error of the user's code or Ctrl-C, the window is rolled back before.

        Raises:
            NonFiniteLossError: the loss of the very first window is NaN or infinite.
            NothingFitsError: one sample does not fit; it says what takes less memory.
        """
        # A size of it has run out of memory in this run.
        if plan is not None and max(plan) > self.tuner.largest:
            plan = None
        if clock.now() >= self.plans.next_look:
            self.plans.look(window)
        try:
            gradient, replays = self._run(window, plan)
            if not gradient.items:
                self.announcer.say_once(notices.nothing_counts(self.number + 1))
            if self.compilations.of_window:
                self.compilations.tell(self.number + 1, self._emit, self.announcer.say_once)
            refused = None
        except NothingFitsError as error:
            refused = without_frames(error)  # which hold what was computed of the window
        except BaseException:
            self._break_off()
            self._examiner.break_off()
            self._forget(self._refusal)
            raise
        self.transaction.commit()
        if self.transaction.group is not None and not self.transaction.group.is_first:
            self._examiner.break_off()
        if refused is not None and self._refusal is not None:
            self._forget(self._refusal)
            raise error_context.beyond_memory(self._refusal.error)
        if refused is not None:  # out here nothing pins the window
            job, saved = self.job, self.saving.saved
            advice = advise(job.modules, job.optimizer, job.precision, job.device, saved)
            raise refused.advised(advice, saved.told) from refused.__cause__
        if not self.saving.is_off and (measured := self.saving.committed(self.number + 1)) is not None:
            self.announcer.tell(measured)
        return gradient, replays

    def _forget(self, refusal: Refusal | None) -> None:
        """Let micro-batches have one sample again: that one could not be computed was not for want of another."""
        if refusal is not None:
            self.tuner.set_smallest(1, refusal.largest)

    def _break_off(self) -> None:
        """Leave nothing of a window that an error, or Ctrl-C, has ended in its midst."""
        if not self.transaction.is_open:
            return
        try:
            self._roll_back()
        except Exception:  # of a device that is broken nothing can be put back, as the error that is on its way says
            pass
        except BaseException:  # Ctrl-C once more
            self._roll_back()
            raise
        finally:
            self.transaction.commit()

    def _run(self, window: Window, plan: Sequence[int] | None) -> tuple[Gradient, int]:
        tuner, meter, lengths = self.tuner, self.meter, window.lengths
        meter.begin_window(is_searching=tuner.search.is_on)
        if tuner.search.is_on and self.transaction.group is None:  # ranks keep theirs for each other
            tuner.search.gradient_bytes = sum(p.nbytes for p in self.transaction.trained() if p.requires_grad)
        expected = None if self.transaction.settled is None else self._expected_pieces(window, plan)
        if expected is None:
            self.transaction.begin(window)
        else:
            self.transaction.begin_settled(window)
        if self.saving.wants_begin and window.num_samples:
            self.plans.saves(self.saving.begin(self.number + 1))
        if self._accumulate == "joined" and self.transaction.layout is None and num_of_all_ranks(window) > 1:
            self._join_at_once(window)
        self._due = False
        group = self.transaction.group
        if self.transaction.layout is not None and self._joiner is not None:
            self._due = self._joiner.is_due(self.number + 1)
            # Modules may count on one rank what they do not on another.
            self._due = self._due if group is None else any(group.exchange(self._due))
        if self._due and (group is None or group.is_first):
            # Where there is no memory for it, buffers and random states alone are put back to measure the window.
            with suppress(MemoryLimitError):
                self._examiner.remember(self.number + 1)
        # Of a window with fewer samples than ranks some have none.
        is_empty = not window.num_samples
        pieces = Attempt(tuner, 0, None, ()) if is_empty else tuner.window(window.num_samples, lengths, plan)
        # A reading of the clock waits for the device: only windows whose time is wanted pay for that.
        started = meter.now() if pieces.is_timed else None
        self._refusal = None
        patience = None  # of this window; it begins when there is nothing smaller to try
        # The recovery is out here, where no exception is being handled: that would pin the frames of the failed
        # forward, and with them the very tensors that have to go.
        self._is_timed, self.examining_seconds = started is not None, 0.0
        # What a rank waits for others is no part of how fast its plans are.
        if group is not None:
            self._began, self._waited = clock.now(), group.waited_seconds
        while not isinstance(outcome := self._saving_memory(pieces, window, expected), Gradient):
            expected = None
            self.transaction.roll_back()
            self._examiner.put_back()
            self.meter.collect()
            if isinstance(outcome, Elsewhere):
                pieces = pieces.again()
            elif isinstance(outcome, Failure):
                self.meter.release()
                level, step = self.saving.name, self.number + 1
                patience = patience or Patience(self.limit, self._patience, self._emit, step=step, phase="training")
                pieces = self._after(outcome, pieces, patience, window)
                patience = patience if self.saving.name == level else None  # what fails there may pass, too
            elif isinstance(outcome, NotSaved):
                pieces = self._without(outcome, pieces, window)
            elif outcome.sizes or not window.num_samples:
                pieces = pieces.repeated(outcome.sizes)
            else:  # cut anew, for single samples do not do
                if window.num_samples < 2 and self._refusal is not None:  # nor is there another on this rank
                    raise share_of_one(window) from self._refusal.error
                tuner.set_smallest(max(2, tuner.smallest))
                pieces = tuner.window(window.num_samples, lengths)
        if self._refusal is not None:  # told now that two samples do
            why = error_context.reason(self._refusal.error)
            self.plans.replanned(self._refusal.sizes, tuner.plan(window.num_samples, lengths), why)
            self._refusal = None
        # The tuner hears of the window before anything is said of it, and so before a callback can raise.
        if outcome.own:
            aside = self.examining_seconds + (group.waited_seconds - self._waited if group is not None else 0.0)
            is_timed = started is not None and not self.compilations.of_window
            seconds = meter.now() - (started or 0.0) - aside if is_timed else None
            pieces.committed(outcome.own, seconds)
        peak_bytes = meter.end_window(is_searching=tuner.search.is_on, target_bytes=tuner.limits.target_bytes)
        if peak_bytes is not None and outcome.own:
            if tuner.search.is_on:  # trials keep the limit, as far as they are foretold
                self.plans.tell_over(peak_bytes)
            elif self.limit.is_enforced:  # the device refuses what passes it
                tuner.ran_within(outcome.own, lengths, peak_bytes)
            else:
                self.plans.keep_limit(outcome.own, lengths, peak_bytes)
        return outcome, pieces.replays

    def _expected_pieces(self, window: Window, plan: Sequence[int] | None) -> Sequence[Piece] | None:
        """Return the pieces of a window that is expected to be like those before it; None if it may not be."""
        transaction, tuner, settled = self.transaction, self.tuner, self.transaction.settled
        assert settled is not None
        if plan is not None or window.lengths is not None or tuner.search.is_on:
            return None
        if settled.hypothesis != transaction.hypothesis or transaction.measures_parts or self.meter.is_tight:
            return None
        if self._is_tried or self._examiner.is_owed or not self.saving.is_off:
            return None
        if len(settled.sizes) > 1 and transaction.signs.want_a_look(self.number + 1):
            return None
        pieces = tuple(tuner.pieces(window.num_samples, None))
        return pieces if settled.sizes == tuple([piece.size for piece in pieces]) else None

    def _saving_memory(
        self, pieces: Attempt, window: Window, expected: Sequence[Piece] | None
    ) -> Gradient | Repeat | Failure | Elsewhere | NotSaved:
        """Run a window once, with memory saved as far as it has to be."""
        if self.saving.is_off:
            return self._try(pieces, window, expected)
        try:
            return self._try(pieces, window, expected)
        except Exception as error:
            if self.transaction.group is not None:  # others have voted by then, and go on with the window
                raise
            return self.saving.not_saved(error)

    def _failure(self, ran_out: RanOut) -> Failure:
        shortage = Shortage(micro_batch=self._piece.size, peak_bytes=self.meter.peak(), error=ran_out.error)
        return Failure(self._piece, shortage)

    def _try(
        self, pieces: Attempt, window: Window, expected: Sequence[Piece] | None
    ) -> Gradient | Repeat | Failure | Elsewhere | NotSaved:
        """Run a window once; ``expected`` are its pieces if it is expected to be like those before it."""
        number, signs, group = self.number + 1, self.transaction.signs, self.transaction.group
        is_looked_at = self._sharded is None and expected is None and number >= signs.next_look
        if self.transaction.layout is not None and self._examiner.is_checked:
            is_looked_at, self.transaction.forward = False, self.transaction.plain_forward
        if is_looked_at and (group is None or group.is_first):  # who looks for all of them
            way = self.saving.name, self.tuner.largest
            self._examiner.begin_attempt(number, self.announcer.say_once, way)
        elif is_looked_at and self._examiner.joins:
            # Where windows are joined after this one, it is run again on all ranks as if it never was.
            with suppress(MemoryLimitError):
                self._examiner.remember(number)
        sharded = self._sharded
        outcome: Gradient | Repeat | RanOut | Failure | NotSaved | Exception
        try:
            # Where ranks wait for each other in each micro-batch, a failure of this one is made up for first.
            add_all = partial(self._add_all, pieces, window)
            if expected is not None:
                add_all = partial(self._add_settled, expected, window)
            run = add_all if sharded is None else partial(sharded.run, add_all)
            if self.compilations.allowed is nullcontext:
                outcome = attempt(run)
            else:
                with self.compilations.allowed():
                    outcome = attempt(run)
        except Elsewhere as error:  # where they are not run apart, all run the window again
            return without_frames(error)
        except NothingFitsError as error:  # said by a number, a trial's peak: nothing has failed
            refused = without_frames(error)
            shortage = Shortage(
                micro_batch=self._piece.size, peak_bytes=refused.peak_bytes or 0, error=refused, ran=True
            )
            outcome = Failure(self._piece, shortage)
        except SingleSampleError as error:
            # It is told when two samples have done: till then it may as well be an error of any size.
            cause = without_frames(error).refused
            self._refusal = Refusal(pieces.sizes or (1,) * window.num_samples, self.tuner.largest, cause)
            outcome = Repeat(sizes=())
        except Exception as error:
            outcome = error
            if not self._may_be_joined(error, window):
                if group is None:
                    raise
                outcome = self.saving.not_saved(error)
        if expected is not None and isinstance(outcome, Gradient):
            return outcome
        # Out here no exception is being handled; its own frames stay, for they are the user's.
        failed = outcome if isinstance(outcome, Exception) else None
        if failed is not None:
            reason = f"The step fails on a micro-batch ({type(failed).__name__}: {failed})"
            if group is None:
                return self._joined_instead(failed, reason, window)
            self.transaction.reason = reason  # type: ignore[attr-defined]
            outcome = Repeat(sizes=pieces.sizes)
        assert not isinstance(outcome, Exception)
        if isinstance(outcome, Repeat) and self._is_joined:
            self._measure_unknown(window)
        if isinstance(self.transaction, JoinedShares) and self.transaction.is_refused:
            self._weigh(notices.joined_does_not_fit(self._reason))
            self.transaction.has_room = True
            self.tuner.start_over(saves=False)
            outcome = Repeat(sizes=self.tuner.plan(window.num_samples, window.lengths))
        if isinstance(self.transaction, SharedTransaction):
            outcome = self._voted(self.transaction, outcome, pieces)
            if self.transaction.reasons:
                return self._joined_instead(failed, self.transaction.reasons[0], window)
        if isinstance(outcome, Gradient) and self._is_tried:
            self._is_tried = False
            if not math.isfinite(outcome.loss.item()):  # because of a sample of its own
                self._weigh()
                return Repeat(sizes=outcome.own)
        if isinstance(outcome, Gradient) and len(outcome.sizes) > 1:
            if self._sharded is not None:
                self.announcer.say_once(notices.not_measured())
            elif self.transaction.layout is not None and self._is_compiled_whole():
                self.compilations.forgo()
                self.announcer.say_once(notices.compiled_whole())
                return Repeat(sizes=outcome.own)
            elif self.transaction.layout is not None:
                return self._looked_at(window, outcome)
            elif signs.want_a_look(number):
                return self._examined(window, outcome)
        elif isinstance(outcome, Gradient) and self._examiner.is_owed and group is None:
            # There is room for a window that is not cut, and so for a few of its samples.
            for event in self._examiner.measure_late(window, outcome, self.meter.aside):
                self.announcer.tell(event)
        return self._failure(outcome) if isinstance(outcome, RanOut) else outcome

    def _add_all(self, pieces: Attempt, window: Window) -> Gradient | Repeat:
        """Accumulate: this is the loop that a training step is."""
        sizes: list[int] = []
        for piece in pieces if self._sharded is None else self._sharded.cut(pieces):
            self._piece = piece  # what is to blame if it runs out of memory
            self.compilations.size = piece.size
            reading = None
            if piece.is_trial:
                with self.meter.measuring(piece) as reading:
                    self.transaction.add(piece)
            else:
                if self.meter.is_tight:
                    self.meter.make_room(piece)
                self.transaction.add(piece)
            if (compiled := self.meter.compiled()) is not None:
                self.compilations.note(piece, reading, compiled)
            if reading is not None:  # that others ran well is no news
                pieces.fitted(reading)
            sizes.append(piece.size)
            # Not of the last one, which the window's end follows: a bar is moved by that, and has news of it.
            if self.within is not None and piece.start + piece.size < window.num_samples:
                self.within(piece.start + piece.size)
        self.compilations.size = 0
        # If it is the end of the window that does, the largest of them is what has to become smaller.
        self._piece = self._piece._replace(size=max(sizes, default=0))
        outcome = self.transaction.finish()
        # Within the attempt, for to join them takes memory: where there is none, the window is run again.
        if isinstance(outcome, Gradient) and self.transaction.outputs.are_there:
            if self.transaction.outputs.have_missed:
                return Repeat(sizes=outcome.sizes)
            outcome = replace(outcome, outputs={**outcome.outputs, **self.transaction.outputs.joined()})
        if isinstance(outcome, Gradient) and self._sharded is None and not self._examiner.is_checked:
            self._examiner.check_first(outcome)
        return outcome

    def _add_settled(self, pieces: Sequence[Piece], window: Window) -> Gradient | Repeat:
        """Do the same in a window that is expected to be like those before it."""
        transaction, losses, settled = self.transaction, list[torch.Tensor](), self.transaction.settled
        assert settled is not None
        if transaction.signs.have_changed and len(pieces) > 1:  # as has shown when it began
            return transaction.unsettle(settled)
        for index, piece in enumerate(pieces):
            self._piece, self.compilations.size = piece, piece.size
            loss = transaction.add_settled(piece, settled, index)
            if loss is None:
                return transaction.unsettle(settled)
            if (compiled := self.meter.compiled()) is not None:
                self.compilations.note(piece, None, compiled)
            losses.append(loss)
            if self.within is not None and piece.start + piece.size < window.num_samples:
                self.within(piece.start + piece.size)
        self.compilations.size = 0
        self._piece = self._piece._replace(size=max(settled.sizes))
        return transaction.finish_settled(settled, losses)

    def _voted(self, transaction: SharedTransaction, outcome: Outcome, pieces: Attempt) -> Outcome | Repeat:
        """Return what comes of an attempt for all ranks, where more than this one are concerned."""
        if not isinstance(outcome, Gradient):
            transaction.give_up()
        if not transaction.is_joined:
            return outcome
        voted = transaction.voted(outcome, self._stint(transaction, transaction.waited_seconds, pieces))
        self.stints = transaction.stints
        if not transaction.comes_once:
            self.announcer.say_once(notices.comes_twice())
        return voted

    def _stint(self, transaction: SharedTransaction, waited: float, pieces: Attempt) -> Stint:
        """Return what this rank did of the window until now."""
        with undisturbed():  # others wait for it
            found = Stint(
                sizes=transaction.own_sizes,
                seconds=clock.now() - self._began - (waited - self._waited) - self.examining_seconds,
                waited_seconds=waited - self._waited_told,
                peak_bytes=self.meter.peak_bytes,
                limit_bytes=self.limit.bytes,
                is_settled=not pieces.num_samples or (self.plans.are_settled and not pieces.replays),
            )
            self._waited_told = waited
        return found

    def _examined(self, window: Window, gradient: Gradient) -> Gradient | Repeat:
        """Compare the gradient of a window that was cut with that of the whole, as far as a few samples tell.

        Return it as it is, or that the window has to be run again, for it was not weighed rightly.
        """
        now = self.meter.now if self._is_timed else clock.now
        started = now()
        most, is_enforced = max(gradient.sizes), self.limit.is_enforced
        room = self.tuner.room_at_once(most, self.meter.peak(), is_enforced=is_enforced, is_given=self._is_given)
        group, waited = self.transaction.group, 0.0
        if group is None:
            found = self._examiner.examine(window, gradient, self.number + 1, room, self.meter.aside)
        else:
            before = group.waited_seconds
            found = self._examined_by_the_first(group, window, gradient, room)
            waited = group.waited_seconds - before  # which is left out with all that is waited for
        self.examining_seconds += now() - started - waited  # no part of what the window takes
        if self._examiner.withheld or self._examiner.uncertain is not None:
            if self._join(window, room):
                return Repeat(sizes=(window.num_samples,) if self._fits_whole(window) else gradient.own)
            for notice in self._examiner.say_withheld():
                self.announcer.tell(notice)
        for event in found.events:
            self.announcer.tell(event)
        if found.is_put_off:
            return self._examined(window, gradient)
        if found.hides_items:
            self.compilations.forgo()
        if found.smallest > self._fewest_told:
            self._fewest_told = found.smallest
            self.tuner.set_smallest(max(found.smallest, self.tuner.smallest))
            if min(gradient.sizes) < found.smallest <= num_of_all_ranks(window):
                return Repeat(sizes=())
        if self._splits_least() and self.tuner.split_least(window.num_samples, window.lengths) and group is None:
            return Repeat(sizes=(window.num_samples,))
        if found.again:
            return Repeat(sizes=gradient.own)
        return gradient

    @property
    def _is_joined(self) -> bool:
        return self.transaction.layout is not None

    def _is_compiled_whole(self) -> bool:
        """Return whether a joined window has split nothing because its step is compiled, calls of modules and all."""
        was_split = self.transaction.was_split  # type: ignore[attr-defined]
        return not was_split and self.compilations.are_there() and not self.compilations.are_forgone

    def _fits_whole(self, window: Window) -> bool:
        """Use the largest micro-batches that fit; return whether the window is to be tried as one."""
        self.tuner.keeps_last = not self._is_given
        if not window.num_samples:
            return False
        # Where a split window holds as much as one that is not split, it may fit less.
        is_free = not self._is_given and window.num_samples <= self.tuner.ceiling and self.transaction.group is None
        saves_nothing = self._held > _NEARLY_ALL and is_free
        return self.tuner.split_least(window.num_samples, window.lengths) or saves_nothing

    def _join(self, window: Window, room: int) -> bool:
        """Join windows from now on, where that is measured to be exact; return whether it is so."""
        withheld = self._examiner.withheld
        self._reason = withheld[0][0].cause if withheld else self._examiner.uncertain or ""
        layout, found = self._measured_joined(window, None, room)
        group, is_off = self.transaction.group, self.saving.is_off
        if not (is_off if group is None else all(group.exchange(is_off))):
            return False
        if layout is None or found is None or not found.passed:
            return False
        self._is_tried = self._examiner.is_trying
        self._start_joined(layout, found)
        return True

    def _may_be_joined(self, error: Exception, window: Window) -> bool:
        """Return whether an error may be one of a micro-batch alone, which the full batch does not raise."""
        if self.transaction.is_reading:
            return False
        is_split = 0 < self._piece.size < num_of_all_ranks(window) and self.saving.is_off
        # A micro-batch may have nothing to learn from that the full batch has.
        is_final = isinstance(error, AutoaccumError) and not isinstance(error, LossWithoutGradError)
        return self._examiner.joins and not self._is_joined and is_split and not is_final

    def _joined_instead(self, error: Exception | None, reason: str, window: Window) -> Repeat:
        """Join windows because the step fails on a micro-batch; raise its error where the full batch has one too."""
        self._reason = reason
        layout, found = self._measured_joined(window, None, num_of_all_ranks(window))
        sizes = self.tuner.plan(window.num_samples, window.lengths) if window.num_samples else ()
        if layout is None or found is None or not found.passed:
            if error is not None:
                raise error
            return Repeat(sizes=sizes)  # in which it is heard from the rank that has failed
        self._start_joined(layout, found)
        return Repeat(sizes=(window.num_samples,) if self._fits_whole(window) else sizes)

    def _start_joined(self, layout: Layout, found: Joined) -> None:
        assert isinstance(self.transaction, JoinableTransaction)
        # The window is run again, and may have moved more than what every replay puts back.
        self._examiner.measured_by()["rewind"]()
        self._examiner.break_off()
        self.transaction.join(layout)
        self._held = found.held
        self._emit(found)

    def _measured_joined(self, window: Window, layout: Layout | None, room: int) -> tuple[Layout | None, Joined | None]:
        assert self._joiner is not None
        group, window = self.transaction.group, measured_by_first(window)
        joiner, number, how = self._joiner, self.number + 1, self._examiner.measured_by()
        how["is_shared"] = group is not None

        def measured() -> tuple[Layout | None, Joined | None, str]:
            with self.meter.aside():
                return joiner.measure(window, layout, number=number, reason=self._reason, most=room, **how)

        if group is None:
            found, event, self._why_not_joined = measured()
            return found, event

        def told() -> tuple[Any, ...]:
            found, *others = measured()
            return None if found is None else found.state_dict(), *others, joiner.state_dict(), self._reason

        state, event, self._why_not_joined, known, self._reason = group.from_first(told)
        joiner.load_state_dict(known)
        found = None if state is None else layout or Layout(self.job.modules)
        if found is not None:
            found.load_state_dict(state)
        return found, event

    def _looked_at(self, window: Window, gradient: Gradient) -> Gradient | Repeat:
        """Measure a joined window, where one is due; return it, or that it is run again, for it was not exact."""
        transaction = self.transaction
        assert isinstance(transaction, JoinableTransaction)
        assert transaction.layout is not None
        if not self._due:
            return gradient
        before = transaction.layout.state_dict()
        room = self.tuner.room_at_once(
            max(gradient.sizes), self.meter.peak(), is_enforced=self.limit.is_enforced, is_given=self._is_given
        )
        layout, found = self._measured_joined(window, transaction.layout, room)
        if layout is None or found is None or (found.passed and layout.state_dict() == before):
            self._examiner.break_off()
            return gradient
        self._examiner.measured_by()["rewind"]()
        self._examiner.break_off()
        if not found.passed:
            self._weigh(notices.not_joined(found))
        return Repeat(sizes=gradient.own)

    def _measure_unknown(self, window: Window) -> None:
        """Measure a kind of call that no measurement has met; open its module where that does not tell of it."""
        assert isinstance(self.transaction, JoinableTransaction)
        assert self.transaction.layout is not None
        layout, unknown, self.transaction.unknown = self.transaction.layout, self.transaction.unknown, None
        if unknown is None:
            return
        self._measured_joined(window, layout, window.num_samples)
        if unknown.signature not in layout.rows:
            layout.open(unknown.module)

    def _weigh(self, notice: Notice | None = None) -> None:
        """Weigh micro-batches again; say why, where joined windows are not exact, or do not fit.

        Raises:
            NotExactError: the run is strict.
        """
        assert isinstance(self.transaction, JoinableTransaction)
        self.transaction.weigh()
        self.tuner.keeps_last = False
        if notice is None:
            return
        self._examiner.withheld.append((notice, None))
        for one in self._examiner.say_withheld():
            self.announcer.tell(one)

    def _join_at_once(self, window: Window) -> None:
        """Join windows from the very first one on, as the user has asked for; say what is not exact about it.

        Raises:
            NotExactError: the run is strict, and it is not exact, or could not be measured.
        """
        assert isinstance(self.transaction, JoinableTransaction)
        layout, found = self._measured_joined(window, None, window.num_samples)
        if found is None:
            self._examiner.withheld.append((notices.not_measured_joined(self._why_not_joined), None))
        elif not found.passed:
            self._examiner.withheld.append((notices.not_joined(found), found.error))
        for one in self._examiner.say_withheld():
            self.announcer.tell(one)
        self.transaction.join(layout or Layout(self.job.modules))
        self._held = 0.0 if found is None else found.held
        self._fits_whole(window)
        if found is not None:
            self._emit(found)

    def _splits_least(self) -> bool:
        """Return whether windows are split as little as can be: splits are not exact, and no noise scale needs them."""
        return self._examiner.has_failed and not self.transaction.measures_parts

    def _examined_by_the_first(self, group: Group, window: Window, gradient: Gradient, room: int) -> Examination:
        """Have the first rank examine a window for all, which go by what it has found."""

        examiner, window = self._examiner, measured_by_first(window)

        def examined() -> tuple[Any, ...]:
            found = examiner.examine(window, gradient, self.number + 1, room, self.meter.aside)
            return found, examiner.state_dict(), examiner.withheld, examiner.uncertain, examiner.is_trying

        # What is measured runs forwards of its own, in which no rank speaks to another.
        found, state, examiner.withheld, examiner.uncertain, examiner.is_trying = group.from_first(examined)
        if not group.is_first:
            examiner.load_state_dict(state)
            self.transaction.signs.have_changed = False
        return found  # type: ignore[no-any-return]

    def _roll_back(self) -> None:
        self.transaction.roll_back()
        self._examiner.put_back()
        self.meter.collect()
        self.meter.release()

    def _after(self, failure: Failure, pieces: Attempt, patience: Patience, window: Window) -> Attempt:
        """Return the next attempt after one that ran out of memory: a smaller one, the same, or one that saves memory.

        Raises:
            NothingFitsError: there is none, and it is of no use to wait.
        """
        piece, shortage = failure
        if not shortage.ran:
            self._emit(OutOfMemory(step=self.number + 1, phase="training", micro_batch=piece.size))
        # That of a window which is cut as small as it can be: where no micro-batch may have one sample, 5 are cut 3, 2.
        smallest = max(self.tuner.cut(max(1, pieces.num_samples), 1))
        # No window is to do without memory for its measurement's sake, nor be cut smaller than those before it.
        has_settled = self.number > 0 and not self.tuner.search.is_on
        if (has_settled or piece.size <= smallest) and self._examiner.let_go():
            return pieces.again()
        # A level that has done before is gone back to at once: it may be had now, and what is waited for may not come.
        waits = piece.size <= smallest and not self.saving.has_risen
        if waits and patience.may_pass(shortage, self.tuner.limits.least_bytes):
            self.tuner.limits.heed(self.limit.read())
            return pieces.again()
        refused = shortage.error
        if not pieces.num_samples:
            raise beyond_plans("other ranks told of their samples") from refused
        if not shortage.ran:
            try:
                # The limit is read anew: that it has fallen may be why there was not enough.
                smaller = pieces.ran_out(piece.size, piece.length, shortage.peak_bytes, self.limit.now())
            except NothingFitsError as error:
                refused = without_frames(error)
                refused.__cause__ = shortage.error
            else:
                self.plans.replanned(smaller.replaced, smaller.sizes, "out of memory")
                return smaller
        if isinstance(self.transaction, JoinedShares) and self._is_joined and self._accumulate == "auto":
            self.transaction.has_room = False  # which the others hear next
            return pieces.again()
        if self._is_joined and self._accumulate == "auto":
            # What is held for the whole window leaves no room: weighted micro-batches hold nothing of each other.
            self._weigh(notices.joined_does_not_fit(self._reason))
            self.tuner.start_over(saves=False)
            return self.tuner.window(window.num_samples, window.lengths).following(pieces)
        told = self.saving.lower(self.number + 1, self.limit.bytes, shortage.needed_bytes)
        if told is None:
            raise refused
        self.plans.saves(told)
        return self.tuner.window(window.num_samples, window.lengths).following(pieces)

    def _without(self, refused: NotSaved, pieces: Attempt, window: Window) -> Attempt:
        """Return another attempt at a window in which memory was not saved to the same bits."""
        notice, told = self.saving.refuse(refused.error, self.number + 1)
        self.announcer.say(notice)
        self.plans.saves(told)
        if self.saving.is_asked_for:
            self.plans.saves(self.saving.begin(self.number + 1))
        # Where it does not fit without, other blocks are looked for once that has shown.
        return self.tuner.window(window.num_samples, window.lengths).following(pieces)

    def _uncompile(self) -> None:
        """Run forwards as they are written, for blocks of them are to be computed again."""
        if self.compilations.are_there() and not self.compilations.are_forgone:
            self.announcer.say_once(notices.saved_uncompiled())
        self.compilations.forgo()

    def apply(self, gradient: Gradient, again: Callable[[], Gradient] | None = None) -> bool:
        """Step the optimizer; return False when that was left out, for there was nothing to step on.

        Args:
            gradient: of the window, in ``.grad``.
            again: runs the window once more, for an optimizer that asks for it; None where that cannot be done.

        Raises:
            ArgumentTypeError: it asks for it where that cannot be done.
        """
        if self._closes and gradient.items and again is not None:
            self._apply_closure(gradient, again)
            return True
        # A window without items counts too: schedules and records go by windows.
        self.number += 1
        if gradient.items:
            scaler, is_refused = self.transaction.scaler, False
            try:
                with self.meter.stepping() if self.meter.takes_steps else nullcontext():
                    skipped = self._stepper.take(scaler, self.number, self.limit.bytes, gradient.overflow)
            except WithoutClosureError:
                is_refused = True
            if is_refused:  # out here, where no error is being handled that would pin what a replay needs
                self.number -= 1
                if again is None or scaler is not None:
                    raise refuse_closure(self.job.optimizer)
                self._closes = True
                self._apply_closure(gradient, again)
                return True
            self.transaction.is_unscaled = False
            if self.meter.floor_bytes > self.tuner.limits.floor_bytes:
                self.tuner.limits.learn_floor(self.meter.floor_bytes)
        else:
            skipped = "no micro-batch of the window has an item to learn from"
        if skipped is not None:
            self._emit(StepSkipped(step=self.number, reason=skipped))
        return skipped is None

    def _apply_closure(self, gradient: Gradient, again: Callable[[], Gradient]) -> None:
        """Step an optimizer that asks for gradients itself."""
        # It counts only once it has ended well: what the closure ran are windows, any of which may raise.
        closure = Closure(gradient, self.job.optimizer, again, self.transaction.snapshot.restore)
        self._stepper.take_by_closure(closure, self.number + 1, self.limit.bytes)
        self.number += 1

    def settle(self, num_samples: int, lengths: Lengths = None) -> None:
        """End the search, or the timing of plans, after a full window that left nothing to be found out."""
        tuner = self.tuner
        if tuner.settle(num_samples, lengths):
            self.plans.settled(num_samples, lengths)
        if self.plans.growing_from is not None and not (tuner.search.is_on or tuner.is_timing):
            self.plans.growing_from = None

    def announce_not_finite(self, loss: float) -> None:
        """Say once that a loss after the first window, which was stepped on, is not finite."""
        self.announcer.say_once(notices.not_finite(self.number, loss))

    # What outlives the process. The keys are those of the first version of the format.

    def state_dict(self) -> dict[str, Any]:
        """Return what has been found out about the loss, about memory and about time, and what was announced."""
        transaction, examiner = self.transaction.state_dict(), self._examiner.state_dict()
        if self.transaction.moving is not None and self.transaction.moving.unsaved:
            self.announcer.say_once(notices.not_saved(self.transaction.moving.unsaved))
        found = transaction | examiner
        return {
            "step": self.number,
            "announced": [],  # was once kept apart from the other
            "announced of windows": self.announcer.state_dict(),
            "plan": self.plans.announced,
            "runner": {name: value for name, value in found.items() if name != "scaler"},
            "scaler": transaction["scaler"],
            "tuner": self.tuner.state_dict(),
            **({"uncompiled": True} if self.compilations.are_forgone else {}),
            **self._joined_state(),
            **self.saving.state_dict(),
        }

    def _joined_state(self) -> dict[str, Any]:
        """Return how windows are joined; nothing where they are not."""
        if self._joiner is None or not isinstance(self.transaction, JoinableTransaction) or not self._is_joined:
            return {}
        assert self.transaction.layout is not None
        layout = self.transaction.layout.state_dict()
        return {"joined": {"reason": self._reason, "layout": layout, **self._joiner.state_dict()}}

    def load_state_dict(self, state: dict[str, Any], *, is_same_device: bool) -> None:
        """Put back what ``state_dict`` returned; on another device memory and time are to be found out again."""
        self.number = state["step"]
        self.announcer.load_state_dict([*state["announced"], *state["announced of windows"]])
        self._examiner.load_state_dict(state["runner"])
        self.transaction.load_state_dict(state["runner"] | {"scaler": state["scaler"]})
        self.plans.announced = state["plan"]
        if state.get("uncompiled", False):
            self.compilations.forgo()
        # What was found out on a level is true of that level.
        is_same = self.saving.load_state_dict(state) if is_same_device else False
        self.tuner.saves_memory = not self.saving.is_off
        self.tuner.load_state_dict(state["tuner"], is_same_device=is_same)
        joined = state.get("joined")
        if joined is not None and self._joiner is not None and isinstance(self.transaction, JoinableTransaction):
            layout = Layout(self.job.modules)
            layout.load_state_dict(joined["layout"])
            self.transaction.join(layout)
            self._joiner.load_state_dict(joined)
            self._reason = joined["reason"]
        if self._splits_least() or self._is_joined:
            self.tuner.keeps_last = self._is_joined and not self._is_given
            self.tuner.split_least(*self.tuner.full_window)
