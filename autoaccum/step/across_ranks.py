"""Windows that several ranks share, with a copy of the model each or one that FSDP2 shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeVar

import torch

from autoaccum.data.base import Window
from autoaccum.distributed import rows
from autoaccum.distributed.balance import Stint
from autoaccum.distributed.channel import undisturbed
from autoaccum.distributed.fsdp import Elsewhere, Sharded, is_distributed
from autoaccum.distributed.gradients import Compression
from autoaccum.distributed.group import Group
from autoaccum.distributed.shards import argument_of, measured_by_first, num_of_all_ranks
from autoaccum.errors import ArgumentError, NothingFitsError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.attempts import Piece, pieces_of
from autoaccum.planning.cuts import near_equal
from autoaccum.planning.tuner import Attempt
from autoaccum.step.deferred_readback import Ending
from autoaccum.step.error_context import SingleSampleError
from autoaccum.step.gradient import Gradient, Repeat
from autoaccum.step.item_counts import Foresight, Tally, weighted_backward
from autoaccum.step.job import Job
from autoaccum.step.loss_graph import read_by
from autoaccum.step.named_losses import Named
from autoaccum.step.terms import Count, Reduction
from autoaccum.step.transaction import Transaction

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a rank tells of its micro-batches, all of it on the host."""

    num_samples: int
    """Of the window, as it was asked of this rank."""
    sizes: Sequence[int]
    reductions: Sequence[Reduction]
    losses: Sequence[torch.Tensor | None]
    counts: Sequence[float]
    late: Sequence[int]
    """Indices of those whose count was read at the end."""
    guess: float
    """What it has taken the window to count; 0 where it had nothing to count."""
    norms: dict[int, torch.Tensor]
    """Of what each of them adds to the gradient."""
    gradients: Sequence[rows.Told]
    """What there is of the parameters', in their order."""
    has_changed: bool
    """Whether it has seen what no window before has shown."""
    is_uncounted: bool
    """Whether a micro-batch has a loss although the user counts nothing in it."""
    outputs: dict[str, Any]
    named: Named | None
    """Its losses that have names; None where there are none."""
    counts_by_name: bool
    """Whether the user has counted the items of each."""
    arrived: Sequence[int]
    """Parameters in the order in which their gradients came, by their places; empty where it was not looked at."""
    came_twice: bool
    """Whether a parameter's gradient came more than once in a backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The micro-batches of all ranks, one rank's after the other's."""

    sizes: list[int]
    reductions: list[Reduction]
    losses: list[torch.Tensor | None]
    tally: Tally
    norms: dict[int, torch.Tensor]
    gradients: list[rows.Kind]
    """What any rank has of each parameter's."""
    has_changed: bool


def told(trained: Sequence[torch.Tensor], tally: Tally, **found: Any) -> Told:
    """Return what this rank tells of its micro-batches."""
    # What an accelerator has counted was read with all else at the share's end.
    counts = tuple(tally.read_apart())
    return Told(counts=counts, late=tuple(tally.late), guess=tally.guess, gradients=rows.told(trained), **found)


def share_of_one(window: Window) -> ArgumentError:
    """Return the error for a share of one sample, of which the model cannot compute a loss."""
    cure = "Pass min_micro_batch=2: then fewer ranks share a window that is too small for all of them."
    if argument_of(window) == "batch":
        cure = "Pass two samples on each rank, or none."
    accepted = "windows of two samples for each rank"
    return ArgumentError(argument_of(window), num_of_all_ranks(window), accepted, cure)


def join(told: Sequence[Told], num_samples: int) -> Joined:
    """Return what all ranks have told, as if it were one's.

    Raises:
        ArgumentError: it is of other windows on other ranks, as a function for the effective batch may have it.
    """
    asked = [each.num_samples for each in told]
    if len(set(asked)) > 1:
        accepted = f"the same window on all ranks, which were asked for {asked} samples"
        raise ArgumentError("effective_batch", num_samples, accepted)
    # Each has weighed by a guess of its own. That of the first which had anything to weigh stands for all of them.
    guess = next((each.guess for each in told if each.guess), 0.0)
    late: list[int] = []
    norms: dict[int, torch.Tensor] = {}
    # Ranks count their micro-batches from 0; of the window they come one rank's after the other's.
    index = 0
    for each in told:
        ratio = each.guess / guess if guess else 1.0
        late += [index + place for place in each.late]
        norms |= {index + place: norm * ratio for place, norm in each.norms.items()}
        index += len(each.sizes)
    return Joined(
        sizes=[size for each in told for size in each.sizes],
        reductions=[reduction for each in told for reduction in each.reductions],
        losses=[loss for each in told for loss in each.losses],
        tally=Tally.of([count for each in told for count in each.counts], late, num_samples=num_samples, guess=guess),
        norms=norms,
        gradients=rows.joined([each.gradients for each in told]),
        has_changed=any(each.has_changed for each in told),
    )


class SharedTransaction(Transaction):
    """A window of which several ranks run a share each; its end is decided on all of them, by the same numbers."""

    def __init__(self, job: Job, group: Group, *, compression: Compression = "none", **options: Any) -> None:
        """Set up for a group; ``options`` are those of ``Transaction``."""
        super().__init__(job, **options)
        self._compression = compression
        self.group = self._group = group
        self.stints: list[Stint] = []
        """What each rank did of the last window."""
        self.reasons: Sequence[str] = ()
        """Why ranks want the last attempt to be joined."""
        self.tells: Callable[[], Any] = tuple
        """Returns what else this rank tells with what comes of a window."""
        self.heard: list[Any] = []
        """What each rank has told so of the last one."""
        # One rank may run out of memory in a window and others not; its totals are to be the same on all of them.
        self._keeps_shown = True
        # Sums are on their way in them, each of which was made a parameter's own before it was begun.
        self._gradients.are_in_use = lambda: group.summing.is_begun
        # All ranks weigh by what the last window has counted: what is weighed alike can be added up at once.
        self._foresight = Foresight(is_used=True)

    reason: str | None = None
    """Why this rank wants the window to be joined; None where it does not."""
    # Whether sums begin in the last backward is decided once a window, and alike on all ranks.
    _order: Sequence[int] = ()  # the parameters that are added up so: see ``Told.arrived``
    _comes_once = True  # whether each gradient came once in a backward, as far as was seen
    _overlaps = False  # whether sums begin in the last backward of this window
    _is_last = False  # whether the micro-batch that is being added is this rank's last one
    _has_given_up = False  # whether this rank has left an attempt whose sums had begun

    @property
    def waited_seconds(self) -> float:
        """Return how long this rank was in collectives so far."""
        return self._group.waited_seconds

    @property
    def comes_once(self) -> bool:
        """Return whether each gradient came once in a backward, so that sums can begin in the midst of one."""
        return self._comes_once

    def begin(self, window: Window) -> None:
        """Begin a window, of which a share was passed."""
        super().begin(window)
        self._begin_anew(num_of_all_ranks(window))
        is_alike = bool(self._tally.guess)
        is_measured = self.measures_parts  # of each micro-batch by itself
        self._overlaps = bool(self._order) and self._comes_once and is_alike and not is_measured
        expected = self._ordered(self._gradients.trained()) if self._overlaps else []
        self._group.summing.expect(expected, self._compression)

    def _count_totals(self) -> Mapping[str, float] | None:
        """Count the items of each loss in the window: each rank those of its share, which add up to it."""
        # As a window begins, which all ranks do; in its midst others may not be reached, or not so often.
        told = self._group.exchange(super()._count_totals())
        found = [totals for totals in told if totals is not None]
        if len(found) < len(told):
            return None
        return {name: math.fsum(totals.get(name, 0.0) for totals in found) for name in dict.fromkeys(chain(*found))}

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._has_given_up = False
        if self.group is not None:  # else this is being made
            self.group.summing.forget()

    def add(self, piece: Piece) -> None:
        """Add a micro-batch to the gradient: see ``Transaction.add``."""
        self._is_last = piece.start + piece.size == self._window.num_samples
        super().add(piece)

    def _backward(self, accumulate: Callable[[], None], size: int) -> None:
        if not self._is_last:
            super()._backward(accumulate, size)
            return
        trained = self._gradients.trained()
        ordered = self._ordered(trained) if self._overlaps else []
        # The first rank sees once in which order gradients come; that each comes once, all ranks see always.
        looks = self._group.is_first and not self._order and self._comes_once
        if not (ordered or looks):
            super()._backward(accumulate, size)
            return
        with self._group.summing.listening(ordered, trained if looks else ()):
            super()._backward(accumulate, size)

    def _ordered(self, trained: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters whose sums begin in the last backward."""
        return [trained[place] for place in self._order if place < len(trained)]

    def _read_end(self) -> None:
        """Join what all ranks have run of the window, gradients too: from here on each of them has the same."""
        super()._read_end()
        trained, summing = self._gradients.trained(), self._group.summing
        # An optimizer may have been given parameters of another type since; there is time for that as yet.
        self._make_room([p for p in trained if p.requires_grad])
        places = {id(p): place for place, p in enumerate(trained)}
        arrived = [places[id(p)] for p in summing.arrived if p.grad is not None and not p.grad.is_sparse]
        if self._overlaps:
            summing.begin_all(self._ordered(trained))
        own = told(
            trained,
            self._tally,
            num_samples=self._num_samples,
            sizes=self._sizes,
            reductions=self._reductions,
            losses=self._losses,
            norms=self._norms,
            has_changed=self.signs.have_changed,
            is_uncounted=self.is_uncounted,
            outputs=self.outputs.told(),
            named=self._named,
            counts_by_name=self.counts_by_name,
            arrived=() if self._order else arrived,
            came_twice=summing.came_twice,
        )
        if summing.made:  # gradients that have come from others already
            is_made = [any(p is made for made in summing.made) for p in trained]
            own = replace(
                own, gradients=[False if made else it for it, made in zip(own.gradients, is_made, strict=True)]
            )
        heard = self._tell(own)
        self.is_joined = True
        if any(each is None for each in heard):  # given up there: what has begun is ended, and thrown away
            self._abandon()
            return
        with undisturbed():  # nothing may fail before gradients are added up, for which others wait
            joined = join(heard, self._num_samples)
            self._join_names(heard)
            overlaps = self._overlaps
            self._agree_on_order(heard)
        self._sizes, self._reductions, self._losses = joined.sizes, joined.reductions, joined.losses
        self._tally, self._norms = joined.tally, joined.norms
        self.signs.have_changed = joined.has_changed
        self.is_uncounted = any(each.is_uncounted for each in heard)
        self._mark = self._known()
        factor = own.guess / joined.tally.guess if joined.tally.guess else 1.0
        self._add_up(trained, joined.gradients, factor, overlaps=overlaps)
        self.outputs.hear([each.outputs for each in heard])

    def _agree_on_order(self, heard: Sequence[Told]) -> None:
        """Agree on how the sums of coming attempts are made: it holds, whatever fails on a rank after it has heard."""
        if any(each.came_twice for each in heard):  # what came later is missing in the sums
            self.is_abandoned, self._comes_once, self._overlaps = self._overlaps, False, False
        self._order = self._order or heard[0].arrived

    def _unscaled_and_clipped(self, correction: float, ending: Ending | None) -> torch.Tensor | None:
        # A scaler is made ready by the first loss that it scales, and this rank may have had none.
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=self._job.device))
        return super()._unscaled_and_clipped(correction, ending)

    def _make_room(self, parameters: Sequence[torch.Tensor]) -> None:
        self._group.summing.prepare(parameters, self._compression)

    def _tell(self, own: Told) -> list[Told]:
        """Return what each rank tells of its micro-batches."""
        return self._group.exchange(own)

    def _add_up(
        self, trained: Sequence[torch.Tensor], kinds: Sequence[rows.Kind], factor: float, *, overlaps: bool
    ) -> None:
        """Replace each gradient by the sum over all ranks, those first whose sums have begun."""
        failure: Exception | None = None
        if overlaps:
            try:
                self._group.summing.end_all()
            except Exception as error:  # the others go on
                failure = error
            begun = {id(p) for p in self._ordered(trained)}
            for p, kind in zip(trained, kinds, strict=True):
                if kind is False and any(p is made for made in self._group.summing.made):
                    p.grad = None  # no rank has any
            kinds = [False if id(p) in begun else kind for p, kind in zip(trained, kinds, strict=True)]
        rows.add_up(self._group.summing, trained, kinds, factor)
        if failure is not None:
            raise failure

    def _abandon(self) -> None:
        """Leave an attempt that another rank has given up, and all run again."""
        self._group.summing.drain()
        self.is_joined = self.is_abandoned = True
        self._mark = self._known()

    @property
    def is_waited_for(self) -> bool:
        """Return whether others have begun what this rank has to take part in, should it give up the attempt."""
        return self._group.summing.is_begun

    def give_up(self) -> None:
        """End an attempt that has failed on this rank, where others have begun to add up its gradients."""
        if self.is_joined or not self.is_waited_for:
            return
        self.own_sizes = tuple(self._sizes)
        self._group.summing.drain()
        self._group.exchange(None)
        self.is_joined = self._has_given_up = True
        self._mark = self._known()

    def _join_names(self, heard: Sequence[Told]) -> None:
        """Take the losses of all ranks by their names."""
        if not self.counts_by_name and any(each.counts_by_name for each in heard):
            self.counts_by_name, self._has_totals, self._totals = True, True, {}
        if all(each.named is None for each in heard):
            return
        own = Named(self._num_samples, {}) if self._named is None else self._named
        joined, first = own.without_micro_batches(), 0
        for each in heard:
            if each.named is not None:
                joined.absorb(each.named, first)
            first += len(each.sizes)
        self._named = joined

    def _known(self) -> tuple[Any, ...]:
        """Return what the end of a window changes of what is known of the loss."""
        return (self._shown_totals, self._num_repeats), self.signs.have_changed, self._is_deferred

    def voted(self, outcome: Outcome, stint: Stint) -> Outcome | Repeat:
        """Return what comes of a window for all ranks: where memory ran out on one, the others run it again too.

        Args:
            outcome: on this rank.
            stint: what it did, which others are told.
        """
        # Between the two exchanges memory may run out on any rank, and all of them hold the same gradient or none.
        is_failed = self._has_given_up or not isinstance(outcome, Gradient | Repeat)
        with undisturbed():
            also = self.tells()
        told = self._group.exchange((not is_failed, tuple(stint), also, self.reason))
        self.stints = [Stint._make(did) for _, did, *_ in told]
        self.heard = [found for *_, found, _ in told]
        self.reasons = [reason for *_, reason in told if reason is not None]
        if all(is_done for is_done, *_ in told):
            return outcome
        self._undo_end()
        return outcome if is_failed else Repeat(sizes=self.own_sizes)

    def _undo_end(self) -> None:
        """Forget what the end of a window has shown: memory has run out on some rank, which has not seen all of it."""
        # Ranks that know different things would decide differently, and some wait for what others never do.
        (self._shown_totals, self._num_repeats), self.signs.have_changed, self._is_deferred = self._mark

    def state_dict(self) -> dict[str, Any]:
        """Return what was found out about the loss, and in which order gradients come."""
        return super().state_dict() | {"arrivals": list(self._order), "comes_once": self._comes_once}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        super().load_state_dict(state)
        # Buckets are of this order, and sums of three ranks depend on it in their last digits.
        self._order, self._comes_once = state.get("arrivals", ()), state.get("comes_once", True)


T = TypeVar("T")
Due = Literal["word", "micro-batch", "nothing"]
"""What the others wait for while an attempt runs: that this rank tells something, or runs a micro-batch; or nothing,
for they have what they need, or nobody has begun."""


class ShardedTransaction(SharedTransaction):
    """A window whose micro-batches are run by all ranks together."""

    _due: Due = "nothing"
    _own = 0  # samples of this rank's share
    _are_done = False  # whether no rank has samples left
    _num_backwards = 0
    _has_idled = False  # whether a micro-batch of any rank weighs nothing
    _squares = 0.0  # the square of the gradient's norm, as it was accumulated

    def __init__(self, job: Job, group: Group, **options: Any) -> None:
        """Set up for a model that is sharded; ``options`` are those of ``Transaction``."""
        super().__init__(job, group, **options)
        self.together = self
        self.sharded = Sharded(job.modules[0], group)
        _check_others(self._gradients.trained())
        self._gradients.scale = self.sharded.scale  # type: ignore[method-assign]
        self._foresight = Foresight(is_used=True)

    def begin(self, window: Any) -> None:
        """Begin a window, of which a share was passed."""
        self._own = window.num_samples
        super().begin(window)

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        # Gradients are summed as they come, so that all ranks weigh by one guess: what the last window has counted.
        guess = self._foresight.begin(num_samples) or float(num_samples)
        self._tally = Tally(num_samples, deferred=self._is_deferred, total=guess)
        self._due, self._are_done, self._has_idled = "word", False, False

    def run(self, attempt: Callable[[], T]) -> T:
        """Run an attempt at the window, and return what it returns; where it fails, nobody waits for this rank.

        Raises:
            Elsewhere: another rank has given up this attempt, and all begin the window anew.
        """
        try:
            return attempt()
        except Elsewhere:
            raise
        except BaseException as error:
            # Of what ends the run the others hear from whoever ends it; till then they are let go on.
            due, self._due = self._due, "nothing"
            if due == "micro-batch":
                self.sharded.pass_over(error)
            if due != "nothing" and _is_survived(error):
                self.sharded.give_up()
            raise

    def cut(self, pieces: Attempt) -> Iterable[Piece]:
        """Return the pieces of this rank's share; all ranks hear what each of them means to run."""
        if not self.sharded.is_rehearsed:
            self._rehearse()
        is_plain = self._window.lengths is None
        wishes = self.sharded.tell(len(pieces.sizes) if is_plain and (pieces.sizes or not self._own) else -1)
        self._due = "micro-batch"
        if min(wishes) < 0 or not self._own:  # one of them finds its sizes as it goes
            return pieces
        # As many as the slowest rank has, and none that weighs nothing where there is something: they are no larger.
        return pieces_of(tuple(size for size in near_equal(self._own, max(wishes)) if size))

    def _rehearse(self) -> None:
        """Run a micro-batch of next to nothing, so that it is known what to make up for in all that come after it."""
        self._run(self._idle, is_last=False)
        self._gradients.drop()
        self.snapshot.restore_random()
        self._due, self._has_idled = "word", False

    def add(self, piece: Piece) -> None:
        """Add a micro-batch to the gradient, with all other ranks: see ``Transaction.add``."""
        self._run(lambda: self._add_or_idle(piece), is_last=sum(self._sizes) + piece.size == self._own)

    def _add_or_idle(self, piece: Piece) -> None:
        before = self._num_backwards
        super().add(piece)
        if self._num_backwards > before:
            return
        # Nothing of it counts, as the user has counted. A forward of it alone is none that other ranks run.
        if self.sharded.has_begun:
            cure = "Let it divide by at least 1, and return nothing beside it."
            raise ArgumentError("loss_fn", "nothing counts", "a loss of each micro-batch of a sharded model", cure)
        self._idle()

    def _run(self, compute: Callable[[], None], *, is_last: bool) -> None:
        self._due = "nothing"  # while it runs, what it owes is known there
        told = self.sharded.run(compute, lambda: (is_last, self._has_idled), _is_survived)
        self._are_done = all(is_last for is_last, _ in told)
        self._has_idled = any(has_idled for _, has_idled in told)
        self._due = "word" if self._are_done else "micro-batch"

    def _add(self, loss: torch.Tensor, reduction: Reduction, num_samples: int) -> None:
        before = self._num_backwards
        super()._add(loss, reduction, num_samples)
        if self._num_backwards == before:
            self._backward_of_nothing(loss, reduction)

    def _accumulate(self, *arguments: Any) -> None:
        self._num_backwards += 1
        super()._accumulate(*arguments)

    def _backward_of_nothing(self, loss: torch.Tensor, reduction: Reduction) -> None:
        """Run a backward that adds nothing here, in which others get what this rank adds to their parts: nothing."""
        self._num_backwards += 1
        self._has_idled = True
        weighted_backward(loss, torch.zeros_like(loss), reduction.divisions)

    def _look_at_uncounted(self, batch: Any, num_samples: int) -> None:
        # A forward that other ranks do not run would wait for them; it is run where what it returns is wanted.
        if self.outputs.are_there:
            super()._look_at_uncounted(batch, num_samples)
        else:
            self.outputs.have_missed = True

    def _idle(self) -> None:
        """Run a micro-batch that weighs nothing, and leaves buffers as they are."""
        # Of two samples, for some models compute nothing of one.
        whole = measured_by_first(self._window)
        size = min(2, whole.num_samples)
        buffers = [(buffer, buffer.clone()) for module in self._job.modules for buffer in module.buffers()]
        loss = self.plain_forward(whole.micro_batch(0, size), size, self._num_samples)
        self._computed = None
        self._backward_of_nothing(loss, read_by(self.hypothesis, loss, size))
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def finish(self) -> Any:
        """Complete the gradient, once no rank has samples left."""
        while not self._are_done:
            self._run(self._idle, is_last=True)
        return super().finish()

    def _backward(self, accumulate: Callable[[], None], size: int) -> None:
        """Run the backward of a micro-batch, which adds up gradients by itself."""
        super(SharedTransaction, self)._backward(accumulate, size)

    def _add_by_name(self, batch: Any, num_samples: int, counted: Mapping[str, Count]) -> None:
        """Refuse to weigh losses one by one.

        Raises:
            ArgumentError: always.
        """
        cure = "Several losses are not weighed one by one where a model is sharded: do not call fully_shard."
        raise ArgumentError("num_items", list(counted), "a count for one loss", cure)

    def _make_room(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take none: gradients are added up already."""
        _check_others(parameters)

    def _tell(self, own: Told) -> list[Told]:
        # With what is told of the window anyway: to measure the gradient takes no exchange of its own.
        heard = self.sharded.tell((own, self.sharded.squares()))
        self._due = "nothing"
        self._squares = sum(squares for _, squares in heard)
        # What should have added nothing may have added what is no number.
        if self._has_idled and not math.isfinite(self._squares):
            cure = "Its gradient is not finite there: let it divide by at least 1, or leave such samples out."
            raise ArgumentError("loss_fn", "nothing counts", "a loss of micro-batches in which nothing counts", cure)
        return [told for told, _ in heard]

    def _add_up(
        self, trained: Sequence[torch.Tensor], kinds: Sequence[rows.Kind], factor: float, *, overlaps: bool
    ) -> None:
        """Add nothing up: each backward has done so."""

    def _unscaled_and_clipped(self, correction: float, ending: Ending | None) -> torch.Tensor | None:
        norm = math.sqrt(self._squares) * abs(correction)
        # As torch.nn.utils.clip_grad_norm_ has it.
        coefficient = 1.0 if self._clip_norm is None else self._clip_norm / (norm + 1e-6)
        if coefficient < 1:
            self._gradients.scale(coefficient)
        return torch.tensor(norm, dtype=torch.float64)


def _is_survived(error: BaseException) -> bool:
    """Return whether the window begins anew after an error."""
    return is_out_of_memory(error) or isinstance(error, NothingFitsError | SingleSampleError)


def _check_others(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse what is trained and not sharded: nobody would add up its gradient.

    Raises:
        ArgumentError: there is some.
    """
    if not all(is_distributed(p) for p in parameters if p.requires_grad):
        cure = "Put what the loss trains into the model, and call fully_shard on that."
        raise ArgumentError("optimizer", "a parameter that is not sharded", "parameters that are all sharded", cure)
