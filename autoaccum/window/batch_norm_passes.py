"""BatchNorm by the statistics of the whole window, whatever its micro-batches: in many passes over them.

::

    add(piece)    the first pass: how many calls of BatchNorm there are, and the statistics of the first of them
    finish()      a pass for each further call, which finds the statistics of those before it
                  one forward and backward, as of any window, in which statistics are constants with a gradient
                  a pass back for each call, the last one first: from its statistics to what they were computed of

The last step is the chain rule. The gradient of the window by the statistics of a call is complete once the passes of
all calls behind it are done: these, and the loss, are all that depends on it. The mean's derivative by a number of the
call's input is 1 / n, the variance's 2 (x - mean) / n, of n numbers in a channel (Ioffe and Szegedy, "Batch
Normalization", 2015, section 3).

All passes begin where the window began, random states, buffers and attributes alike, and go through the same
micro-batches in the same order: they draw the same dropout. With L calls there are L passes forward, one forward and
backward, and L more of which the backward begins at a call: L + 4/3 times a plain window, where a backward takes twice
as long as a forward. A window of one micro-batch is a plain one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.loss.coupling import batch_norms
from autoaccum.loss.stated import Computed
from autoaccum.planning.attempts import Piece
from autoaccum.window.batch_norm import Forwards, refuse_layers
from autoaccum.window.batch_norm_calls import Call, Calls
from autoaccum.window.batch_norm_statistics import Norm, normalised, normalised_alone
from autoaccum.window.gradient import Gradient, Repeat
from autoaccum.window.job import Job
from autoaccum.window.transaction import Transaction


@dataclass(slots=True)
class Seen:
    """One call of BatchNorm in a forward."""

    key: int
    """Of which layer it is, or of which weights; the same for all calls of a layer."""
    mark: torch.Tensor | None
    """The sum of its input, where a layer is called more than once; by it the call is found again in a backward."""
    has_graph: bool
    """Whether a graph was recorded, from which a backward can begin."""
    moves: tuple[torch.Tensor | None, torch.Tensor | None, float]
    """The running statistics, and their momentum."""


class Passes(Forwards):
    """The contexts of the passes over one window."""

    def __init__(self, *arguments: Any) -> None:
        """Set up; ``arguments`` are those of ``Forwards``."""
        super().__init__(*arguments)
        self.begin()

    def begin(self) -> None:
        """Begin a window, of which nothing is known."""
        self.calls: list[Seen] = []
        """Those of the last forward, in their order."""
        self.num_calls: int | None = None
        """Calls of each forward of this window; None until there was one."""
        self.known: list[Norm] = []
        """The statistics of the window, of the first calls."""
        self.wanted: int | None = None
        """The call of which something is wanted."""
        self.input: torch.Tensor | None = None
        """What it was given in the last forward, with the graph, where its statistics are known."""
        self.parts: list[Norm] = []
        """Its statistics in each micro-batch, where they are not."""
        self.is_in_forward = False
        """Whether one is being computed, by whose gradients nothing goes back to statistics."""
        self.num_forwards = 0
        """Forwards of the window so far."""
        self._repeated: set[int] = set()  # keys of several calls

    def learn(self) -> None:
        """Learn from the forward of a micro-batch which calls there are.

        Raises:
            ArgumentError: they are others than before, or more than was asked for.
        """
        # The first micro-batch stands for all: whether others are like it is seen in each pass.
        if self.num_calls is None:
            refuse_layers(self._statistics, len(self.calls))
            self.num_calls = len(self.calls)
            counts = Counter(call.key for call in self.calls)
            self._repeated = {key for key, count in counts.items() if count > 1}
        if len(self.calls) != self.num_calls:
            found = f"{self.num_calls} and {len(self.calls)} calls of BatchNorm"
            accepted = "a model that calls BatchNorm as often for each micro-batch"
            cure = "Pass batch_norm='ghost:32', whose statistics are those of each forward."
            raise ArgumentError("model", found, accepted, cure)

    def _calls(self, num_samples: int, *, is_forward: bool) -> Calls:
        if is_forward:
            self.calls, self.input = [], None
            self.num_forwards += 1
        return _Given(self, is_forward=is_forward)

    def seen(self, key: int, call: Call) -> int:
        """Note a call of a forward, and return its number."""
        # A call of a layer that is called once is known by the layer.
        mark = call.input.detach().sum() if key in self._repeated else None
        moves = call.running_mean, call.running_var, call.momentum
        self.calls.append(Seen(key, mark, torch.is_grad_enabled(), moves))
        return len(self.calls) - 1

    def go_through(self, gradient: torch.Tensor) -> None:
        """Hear of a gradient that goes back through a call.

        Raises:
            ArgumentError: a loss takes it, as a penalty on gradients does.
        """
        if self.is_in_forward:
            cure = "Pass batch_norm='ghost:32' or 'frozen', or take gradients of what no BatchNorm is in."
            accepted = "a loss that takes no gradients through BatchNorm"
            raise ArgumentError("batch_norm", str(self._statistics), accepted, cure)

    def found_again(self, key: int, call: Call) -> int:
        """Return the number of the call of the last forward that a backward computes once more.

        Raises:
            ArgumentError: that forward has not seen it, or recorded no graph, so that its statistics have no gradient.
        """
        if not self.known:  # each of them has its own
            return len(self.calls)
        of_key = [index for index, call in enumerate(self.calls) if call.key == key]
        if not of_key or not all(self.calls[index].has_graph for index in of_key):
            cure = "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or batch_norm='ghost:32'."
            raise ArgumentError(
                "batch_norm", str(self._statistics), "BatchNorm layers in no reentrant checkpoint", cure
            )
        if len(of_key) == 1:
            return of_key[0]
        # The nearest, for on some devices a sum is another one each time, in its last digits.
        marks = torch.stack([mark for index in of_key if (mark := self.calls[index].mark) is not None])
        return of_key[int((marks - call.input.detach().sum()).abs().argmin())]


class _Given(Calls):
    """Normalises by the statistics that a pass has, or by those of the micro-batch where it has none yet."""

    def __init__(self, passes: Passes, *, is_forward: bool) -> None:
        super().__init__()
        self._passes = passes
        self._is_forward = is_forward

    def __enter__(self) -> _Given:
        self._passes.is_in_forward = self._is_forward
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._passes.is_in_forward = False
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def compute(self, call: Call) -> torch.Tensor:
        """Normalise by the statistics that there are; running ones are moved at the window's end."""
        passes = self._passes
        # Calls of layers without either are told apart by their order, or by what they are given.
        key = id(call.running_mean if call.running_mean is not None else call.weight)
        index = passes.seen(key, call) if self._is_forward else passes.found_again(key, call)
        affine = call.weight, call.bias, call.eps
        if index < len(passes.known):
            output = normalised(call.input, passes.known[index], *affine)
            if output.requires_grad:
                output.register_hook(passes.go_through)  # type: ignore[no-untyped-call]
        else:
            output, norm = normalised_alone(call.input, *affine)
        if self._is_forward and index == passes.wanted:
            if index < len(passes.known):
                passes.input = call.input
            else:
                passes.parts.append(norm)
        return output


class ThroughWindow(Transaction):
    """Adds up the gradient of a window whose samples meet in the statistics of BatchNorm."""

    def __init__(self, job: Job, **options: Any) -> None:
        """Set up for a job; ``options`` are those of ``Transaction``.

        Raises:
            ConflictingArgumentsError: the noise scale is asked for, as an effective batch that follows it does.
        """
        # An effective batch that follows the noise asks for it in the same way, and is no argument beside this one.
        if options.get("noise_scale"):
            cure = "What a micro-batch adds goes through statistics of all others: leave it out, or pass 'ghost:32'."
            raise ConflictingArgumentsError("batch_norm", str(job.batch_norm), "the noise scale", cure)
        self._passes = Passes(job.batch_norm, job.modules, job.autocast)
        super().__init__(job, **options)
        self._forwards = None  # of a window that is not cut, which is a plain one
        self._layers = [layer for layer in batch_norms(job.modules) if layer.num_batches_tracked is not None]

    def begin(self, window: Window) -> None:
        """Begin a window: remember what it may change, wherever it is held."""
        super().begin(window)
        self._begun = self._state()

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._forwards = None
        self._passes.begin()
        self._pieces: list[Piece] = []  # those of the first pass
        # Batches that each layer has counted when the window began, and those that it counts in a forward.
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[int] = []

    def _compute(self, batch: Any, piece: Piece) -> None:
        # Of a window that is not cut PyTorch's own layers take the statistics.
        if piece.size == self._num_samples:
            super()._compute(batch, piece)
            return
        is_first = not self._pieces
        if is_first:
            self._versions = self._written()
        if piece.is_trial:
            self._rehearse(batch, piece)
            batch = self._window.micro_batch(piece.start, piece.size)
        self._passes.wanted = 0
        before = [tracked.clone() for tracked in self._counted()] if is_first else []
        self._look(batch, piece.size)
        if is_first:
            self._counts = [(then, now - then) for then, now in zip(before, self._counted(), strict=True)]
        self._pieces.append(piece)
        self._sizes.append(piece.size)

    def _counted(self) -> list[torch.Tensor]:
        """Return how many batches each layer has counted, in the tensors in which it does."""
        return [tracked for layer in self._layers if (tracked := layer.num_batches_tracked) is not None]

    def _written(self) -> list[int]:
        return [p._version for module in self._job.modules for p in module.parameters()]

    def _look(self, batch: Any, size: int) -> None:
        """Run a forward for statistics alone."""
        # With its graph, for without one some layers choose another kernel, and round otherwise.
        self._run(batch, size)
        self._passes.learn()

    def _run(self, batch: Any, size: int) -> torch.Tensor | None:
        """Run a forward in a pass, and return its loss; None where it divides by the number of its items."""
        with self._passes.forward(size):
            try:
                computed = self._job.loss_of(self._job.model, batch)
            except ZeroDivisionError:  # BatchNorm has seen its samples all the same
                return None
        return computed.loss if isinstance(computed, Computed) else computed

    def _rehearse(self, batch: Any, piece: Piece) -> None:
        """Run a forward and backward of a trial ahead of time, of which nothing remains but its time and its memory.

        A trial tells how large the next one may be, which has to be known before the window's own passes begin.
        """
        moment = self._state()
        # By its own statistics, for those of the window are not known: what it takes is the same.
        self._passes.wanted = None
        loss = self._run(batch, piece.size)
        if loss is not None and loss.requires_grad:
            self._passes.backward(partial(loss.backward, torch.zeros_like(loss)), piece.size)()
        del loss
        self._gradients.drop()  # of zeros, or of what 0 times an infinity is
        moment.restore()

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient: all passes but the first, and what the end of any window does."""
        # A window that was not cut has its gradient already.
        if self._pieces:
            self._check_parameters()
            self._find_statistics()
            self._add_all()
            after = self._state()
            self._go_back()
            after.restore()
            self._move_running()
        return super().finish()

    def _check_parameters(self) -> None:
        # What moves with each forward would be another one in each pass, and is not followed: it may be large.
        if self._written() != self._versions:
            cure = "Pass batch_norm='ghost:32', or write to parameters between steps."
            accepted = "a model whose forward writes to no parameter"
            raise ArgumentError("batch_norm", str(self._job.batch_norm), accepted, cure)

    def _find_statistics(self) -> None:
        """Compute the statistics of one call after the other."""
        passes = self._passes
        for index in range(passes.num_calls or 0):
            if index:
                passes.parts, passes.wanted = [], index
                self._from_begin()
                for piece in self._pieces:
                    self._look(self._window.micro_batch(piece.start, piece.size), piece.size)
            # Those of the next call are of what this one makes of its input.
            passes.known.append(Norm.joined(passes.parts))
        passes.wanted = None

    def _from_begin(self) -> None:
        assert self._begun is not None
        self._begun.restore()

    def _add_all(self) -> None:
        """Run the forward and backward of all micro-batches, by these statistics, as those of any window."""
        # The backward of each micro-batch adds to their gradients as it does to those of parameters.
        for norm in self._passes.known:
            norm.mean.requires_grad_()
            norm.var.requires_grad_()
        self._from_begin()
        self._sizes = []
        self._forwards = self._passes
        for piece in self._pieces:
            before = self._passes.num_forwards
            super()._compute(self._window.micro_batch(piece.start, piece.size), piece)
            if self._passes.num_forwards == before:  # it counts nothing, but draws what those after it have to find
                self._run(self._window.micro_batch(piece.start, piece.size), piece.size)
        self._forwards = None

    def _go_back(self) -> None:
        """Go back from the statistics of each call to what they were computed of, the last call first."""
        passes = self._passes
        for index in reversed(range(len(passes.known))):
            norm, passes.wanted = passes.known[index], index
            if norm.mean.grad is None and norm.var.grad is None:  # on which nothing depends
                continue
            self._from_begin()
            for piece in self._pieces:
                self._run(self._window.micro_batch(piece.start, piece.size), piece.size)
                # None where a call is in a part of the model that records nothing: no parameter is behind it.
                found, passes.input = passes.input, None
                if found is not None and found.requires_grad:
                    back = partial(torch.autograd.backward, [found], [norm.cotangent(found)])
                    self._gradients.owned(passes.backward(back, piece.size))()
                del found
        passes.wanted = None

    @torch.no_grad()
    def _move_running(self) -> None:
        """Move running statistics and counts once, as a forward of the whole window would."""
        # All at the window's end: until then each pass finds those that the window began with.
        # Not as they are now, for what is checkpointed counts in backwards too.
        for tracked, (before, of_forward) in zip(self._counted(), self._counts, strict=True):
            tracked.copy_(before + of_forward)
        # An average of all batches gives the n-th one the weight 1 / n.
        averages = {
            id(layer.running_mean): int(before)
            for layer, (before, _) in zip(self._layers, self._counts, strict=True)
            if layer.momentum is None
        }
        for call, norm in zip(self._passes.calls, self._passes.known, strict=True):
            mean, var, factor = call.moves
            if mean is None or var is None:
                continue
            if id(mean) in averages:
                averages[id(mean)] += 1
                factor = 1 / averages[id(mean)]
            unbiased = norm.var * (norm.count / max(1, norm.count - 1))
            for running, value in ((mean, norm.mean), (var, unbiased)):
                running.mul_(1 - factor).add_(value, alpha=factor)
