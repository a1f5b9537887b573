"""A window of a model that is sharded over the ranks: they run each micro-batch together, in sizes of their own.

Each forward and backward asks all ranks for their parts of the model, so that all of them run as many micro-batches;
one that has no samples left runs one that weighs nothing. After each of them all hear whether it holds everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from autoaccum.errors import ArgumentError, NothingFitsError
from autoaccum.loss.reductions import read_by
from autoaccum.loss.terms import Count, Reduction
from autoaccum.loss.weighting import Foresight, Tally, weighted_backward
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.attempts import Attempt, Piece, pieces_of
from autoaccum.planning.cuts import near_equal
from autoaccum.ranks import rows
from autoaccum.ranks.group import Group
from autoaccum.ranks.sharded import Elsewhere, Sharded
from autoaccum.ranks.shares import measured_by_first
from autoaccum.ranks.units import is_distributed
from autoaccum.window.ending import Ending
from autoaccum.window.job import Job
from autoaccum.window.joining import SharedTransaction, Told
from autoaccum.window.single_samples import SingleSampleError

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
