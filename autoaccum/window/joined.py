"""A window whose step runs once, on everything, while the modules inside it run micro-batch by micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from autoaccum.loss.terms import Reduction
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.attempts import Piece
from autoaccum.window.gradient import Gradient, Repeat
from autoaccum.window.job import Job
from autoaccum.window.split_calls import Layout, MovedError, NotRowsError, Ranks, UnknownCallError, joining
from autoaccum.window.transaction import Transaction


class JoinableTransaction(Transaction):
    """Adds micro-batches to a window's gradient, or joins them: whichever of the two rules is in force.

    A joined window is a window of one micro-batch to everything around it: one loss, one backward, nothing to weigh.
    """

    layout: Layout | None = None
    """Which modules are split in joined windows; None where windows are weighted."""
    unknown: UnknownCallError | None = None
    """A kind of call that was not measured, for which the window has to be run again once it is."""

    was_split = True
    """Whether the last joined window has split any call: none is of a step that is compiled as a whole."""

    _ranks: Ranks | None = None
    """Those that run the other rows of its calls, where there are several."""

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._cut: list[int] = []

    def add(self, piece: Piece) -> None:
        """Add a micro-batch; a joined window only takes its size, and runs it as a trial where it is one."""
        if self.layout is None:
            super().add(piece)
            return
        if piece.is_trial and piece.size < self._num_samples:
            self._try(piece)
        self._cut.append(piece.size)

    def _try(self, piece: Piece) -> None:
        """Run a micro-batch by itself, of which nothing remains but its time and its memory."""
        before = self._state()
        batch = self.snapshot.read_by(lambda: self._window.micro_batch(piece.start, piece.size))
        try:
            loss = self.plain_forward(batch, piece.size, self._num_samples)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # of a step that wants the whole window: what it took until then is measured
            if is_out_of_memory(error):
                raise
        finally:
            self._computed = None
            self._gradients.drop()
            before.restore()

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient; run the window now where it is joined.

        A module that cannot be split after all is opened, and the window is run again.
        """
        if self.layout is None:
            return super().finish()
        sizes = tuple(self._cut)
        refused = self._run_joined(self.layout, sizes)
        if isinstance(refused, UnknownCallError):
            self.unknown = refused
            return Repeat(sizes=sizes)
        if refused is not None:
            is_new = isinstance(refused, MovedError) and not self.layout.is_copied(refused.module)
            (self.layout.copy if is_new else self.layout.open)(refused.module)
            return Repeat(sizes=sizes)
        if not self._sizes:  # it was not run
            return Repeat(sizes=sizes)
        outcome = super().finish()
        if isinstance(outcome, Repeat):
            return Repeat(sizes=sizes)
        return replace(outcome, sizes=sizes, own=sizes)

    def _reduction(self, loss: torch.Tensor, num_samples: int, counted: Any) -> Reduction:
        # Of all samples at once no count decides anything, unless there is none. And what a graph has checkpointed, as
        # a loss in chunks does, would be computed to be read, all of it.
        if self.layout is None or math.isnan(loss.item()):
            return super()._reduction(loss, num_samples, counted)
        return Reduction(float(num_samples) if counted is None else counted)

    def _run_joined(self, layout: Layout, sizes: tuple[int, ...]) -> NotRowsError | MovedError | None:
        """Run the window; return what has refused to be split."""
        options: dict[str, Any] = {"generators": self.snapshot.generators(), "ranks": self._ranks}
        try:
            with joining(self._job.model, layout, sizes, self._job.device, **options) as split:
                super().add(Piece(0, self._num_samples))
                self.was_split = split.num_calls > 0
        except (NotRowsError, MovedError) as error:
            return error.with_traceback(None)
        return None

    def join(self, layout: Layout) -> None:
        """Join windows from the next attempt on."""
        self.layout = layout
        self.hypothesis = None

    def weigh(self) -> None:
        """Weigh micro-batches from the next attempt on."""
        self.layout = None


def why_not_joined(job: Job, *, noise_scale: bool, is_sharded: bool) -> tuple[str, str] | None:
    """Return what stands against joined windows, with what to do; None where nothing does."""
    if is_sharded:
        return "a model sharded by FSDP2", "Its ranks weigh their micro-batches: leave accumulate out."
    if noise_scale:
        return "noise_scale=True", "It is measured on weighted micro-batches: leave one of the two out."
    return None
