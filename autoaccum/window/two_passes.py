"""A window whose loss is one of all its samples together: two passes over its micro-batches (Gao et al. 2021).

::

    add(piece)    the first pass: the embeddings of each micro-batch, without their graph; the last one's is kept
    finish()      the loss of all embeddings joined, and its gradient by each of them, and by parameters that it uses
                  the second pass: each micro-batch but the last once more, and back from the gradient of its embeddings

By the chain rule that is the gradient of the whole window, whatever the loss (Luyu Gao, Yunyi Zhang, Jiawei Han, Jamie
Callan: "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3). The second pass
begins where the first one began, random states, buffers and attributes alike, and goes through the same micro-batches
in the same order. So it draws the same dropout, and finds the same state; what the first pass has left is put back at
its end. A window of one micro-batch is one pass with the plain loss, by the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autoaccum.data import batches
from autoaccum.data.base import Window
from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.loss.functions import checked
from autoaccum.loss.graph import graph_alone
from autoaccum.loss.hypotheses import PLAIN_SUM
from autoaccum.loss.stated import Computed
from autoaccum.loss.terms import Reduction
from autoaccum.loss.windowed import Embedded, embedded, joined, spread
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.planning.attempts import Piece
from autoaccum.window import contributions
from autoaccum.window.gradient import Gradient, Repeat, count_nodes
from autoaccum.window.job import Job
from autoaccum.window.state import State
from autoaccum.window.transaction import Transaction


class TwoPasses(Transaction):
    """Adds up the gradient of a loss over the whole window."""

    def __init__(self, job: Job, **options: Any) -> None:
        """Set up for a job with a ``window_loss``; ``options`` are those of ``Transaction``.

        Raises:
            ArgumentTypeError: the job has no such loss.
        """
        if job.window_loss is None:
            raise ArgumentTypeError("loss_scope", "micro-batch", "'window'")
        self._loss = job.window_loss  # the user's two functions
        super().__init__(job, **options)
        # What is measured is the sum that stands in for the loss: see ``loss.windowed``.
        self.hypothesis = "sum"
        # Parameters that forwards write to, such as a momentum encoder's; None until a window has shown which.
        self._written: list[torch.Tensor] | None = None  # an empty list in nearly all runs
        self._last: State | None = None  # how the last window has left things, which is how the next one finds them

    def begin(self, window: Window) -> None:
        """Begin a window: remember what it may change, wherever it is held."""
        super().begin(window)
        # Not the snapshot alone: what functions and attributes hold would be found moved by the second pass.
        self._begun, self._last = self._begun or self._moment(self._last), None

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._pieces: list[Piece] = []  # which the second pass goes through as the first one did
        self._embedded: list[Embedded] = []  # of each piece, without a graph; that of the last one has its graph
        self._of_loss: contributions.Before = []  # the gradient by parameters of the loss, where pieces are measured
        self._versions = _versions(self._job.modules)

    def _moment(self, like: State | None = None) -> State:
        """Remember all that forwards may change, as it is now."""
        job = self._job
        # A frozen tower may be large, and still: it is copied until a window has shown that nothing writes to it.
        arguments = job.modules, job.functions, job.device, self.trained()
        written = None if job.state == "window" else self._written
        # To compare takes a fraction of the time that it takes to look for all that may move.
        is_alike = like is not None and isinstance(like, _Narrow) == (written is not None)
        if is_alike and like is not None and (known := like.renewed()) is not None:
            return known
        return State(*arguments, like=like) if written is None else _Narrow(*arguments, written=written, like=like)

    # The first pass.

    def _compute(self, batch: Any, piece: Piece) -> None:
        is_last = piece.start + piece.size == self._window.num_samples
        if piece.is_trial:
            self._rehearse(batch)
            batch = self._window.micro_batch(piece.start, piece.size)
        # The last one is followed by the loss, so that its graph is there when it is wanted, and is not made again.
        before = count_nodes()
        with self._recording(is_last):
            spread_loss = self.forward(batch, piece.size, self._num_samples)
        if spread_loss.grad_fn is not None:
            self.signs.of_graph(piece.size, count_nodes() - before, "embeddings", ())
        found = self._found_embeddings
        del self._found_embeddings, spread_loss  # a graph that nobody needs
        # Compared here, where it is known how many samples there are: whoever looks at forwards calls with few of them.
        if len(found.leaves[0]) != piece.size or any(len(leaf) != piece.size for leaf in found.leaves):
            embedded(found.spec.unflatten(list(found.leaves)), piece.size)  # which refuses them
        if self._embedded and found.spec != self._embedded[0].spec:
            raise ArgumentError("embed", "results of several structures", "the same structure for each micro-batch")
        if not is_last:
            # In memory of its own, for it may be a small view of large activations.
            found = found._replace(leaves=tuple(leaf.detach().clone() for leaf in found.leaves))
        self._embedded.append(found)
        self._pieces.append(piece)
        self._sizes.append(piece.size)

    def plain_forward(self, batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
        """Keep the embeddings of a micro-batch, and return the loss that stands in for the window's."""
        self._found_embeddings = self._embed(batch)
        return spread(self._found_embeddings.leaves)

    def _embed(self, batch: Any) -> Embedded:
        with self._autocast():
            return embedded(self._loss.embed(self._job.model, batch), None)

    @contextmanager
    def _recording(self, keeps_graph: bool) -> Iterator[None]:
        """Record graphs within this: whole ones, ones without what a backward would need, or none."""
        if keeps_graph:
            yield
        # In eval mode some layers choose another kernel where no graph is recorded, and round otherwise. Whoever looks
        # at forwards reads the graph, too.
        elif self.forward != self.plain_forward or not all(self.snapshot.modes()):
            with graph_alone():
                yield
        else:
            with torch.no_grad():
                yield

    def _rehearse(self, batch: Any) -> None:
        """Run the second pass of a trial ahead of time, of which nothing remains but its time and its memory.

        A trial tells how large the next one may be, which has to be known before the second pass begins.
        """
        # From a gradient of zeros, which makes what any gradient would make.
        moment = self._moment(self._begun)
        leaves = [leaf for leaf in self._embed(batch).leaves if leaf.requires_grad]
        if leaves:
            torch.autograd.backward(leaves, [torch.zeros_like(leaf) for leaf in leaves])
        self._gradients.drop()  # of zeros, or of what 0 times an infinity is
        moment.restore()

    # The loss, and the second pass.

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient: the loss of all embeddings, and the second pass; unscale and clip it."""
        self.own_sizes = tuple(self._sizes)
        self._check_parameters()
        loss, cotangents = self._backward_of_loss()
        if cotangents:
            self._second_pass(cotangents)
        return self._ended([loss])

    def _ended(self, losses: list[torch.Tensor | None]) -> Gradient | Repeat:
        """Return the gradient, which is there, unscaled and clipped; ``losses`` are that of the window, or none."""
        # As a window of one micro-batch would be: there is nothing to weigh, and nothing to correct.
        # Its items are its samples, whatever the loss divides by.
        self._losses, self._reductions = losses, [Reduction(float(self._num_samples)) for _ in losses]
        ending = self._read_end()
        if self.is_abandoned:
            return Repeat(sizes=self.own_sizes)
        sizes, loss = tuple(self._sizes), self._losses[0]
        assert loss is not None
        parts, noise = self._parts(sizes, False, 1.0, ending)
        return Gradient(
            sizes=sizes,
            own=self.own_sizes,
            grad_norm=self._unscaled_and_clipped(1.0, ending),
            loss=loss,
            overflow=None if ending is None else ending.overflow(),
            items=float(self._num_samples),
            parts=parts,
            noise=noise,
            counts=tuple(map(float, sizes)),
            reductions=tuple(Reduction(float(size)) for size in sizes),
            conclusion=PLAIN_SUM,
        )

    def _backward_of_loss(self) -> tuple[torch.Tensor, list[list[torch.Tensor | None]]]:
        """Compute the loss, go back from it, and return it with its gradient by the embeddings of all but the last.

        The last micro-batch's graph is there still: its parameters have their gradient when this returns.
        """
        is_measured = self.measures_parts and len(self._pieces) > 1
        # All have one structure, as each was compared with the first.
        spec, last = self._embedded[0].spec, self._embedded[-1].leaves
        # Given up as they are joined: what is held twice is held while memory is at its fullest.
        parts = [found.leaves for found in (self._embedded if is_measured else self._embedded[:-1])]
        self._embedded = []
        # One leaf for each tensor of all micro-batches but the last: the gradient that it gets is that of their rows.
        firsts = [as_leaf(leaf) for leaf in joined(parts)] if parts else []
        leaves = firsts if is_measured else joined([firsts, last]) if parts else list(last)
        del parts
        with naming_loss():
            loss = self._loss_of(spec.unflatten(leaves))
            del leaves
            self._gradients.owned(self._scaled(loss).backward)()
        columns = [leaf.grad for leaf in firsts]
        sizes = [piece.size for piece in (self._pieces if is_measured else self._pieces[:-1])]
        split = [[None] * len(sizes) if one is None else list(torch.split(one, sizes)) for one in columns]
        cotangents = [list(row) for row in zip(*split, strict=True)]
        # The last one too is measured by itself, and so goes back from its embeddings like all others.
        if is_measured:
            self._of_loss = contributions.set_aside(self._gradients.trained())
            self._measured(len(sizes) - 1, partial(self._go_back, last, cotangents.pop()))
        return loss.detach(), cotangents

    def _measured(self, index: int, go_back: Callable[[], None]) -> None:
        """Add what a micro-batch makes of the gradient, and keep its norm.

        The gradient by parameters that the loss itself uses is no sample's: each micro-batch has its share of that.
        """
        before = contributions.set_aside(self._gradients.trained())
        # By samples, so that it is the same in all of them, and cancels where they are told from each other.
        for p, gradient in self._of_loss:
            p.grad = gradient * (self._sizes[index] / self._num_samples)
        go_back()
        self._norms[index] = contributions.norm(self._gradients.stepped())
        contributions.add_back(before)

    def _loss_of(self, embeddings: Any) -> torch.Tensor:
        # What a loss needs of samples, such as labels, embed may return as well: then the window need not be gathered.
        arguments = [embeddings]
        if self._loss.takes_batch:
            batch = self._all_samples()
            arguments.append(batches.to_device(batch, self._job.device, copy=True))
        with self._autocast():
            computed = checked(self._loss.loss_fn(*arguments), "loss_fn")
        if isinstance(computed, Computed):
            self.outputs.take(computed.outputs, self._num_samples)
            computed = computed.loss
        return computed

    def _all_samples(self) -> Any:
        """Return all samples of the window as one batch, where they lie."""
        return self._window.samples(range(self._num_samples))

    def _second_pass(self, cotangents: list[list[torch.Tensor | None]]) -> None:
        """Run all micro-batches but the last once more, and go back from the gradients of their embeddings."""
        assert self._begun is not None
        # The loss may have drawn, too: the run goes on from here, and not from where the second pass ends.
        after = self._moment(self._begun)
        self._begun.restore()
        for index, (piece, gradients) in enumerate(zip(self._pieces[:-1], cotangents, strict=True)):
            if self._found is not None and index:
                self._found.restore(random=False)
            leaves = self._embed(self._window.micro_batch(piece.start, piece.size)).leaves
            if self.measures_parts:
                self._measured(index, partial(self._go_back, leaves, gradients))
            else:
                self._go_back(leaves, gradients)
            del leaves
        cotangents.clear()  # their memory may be what the state needs to be put back
        after.restore()
        self._last = after

    def _go_back(self, leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what embeddings of one micro-batch, whose graph is there, and their gradients make of the window's."""
        if len(leaves) != len(gradients):
            raise _differs(f"{len(gradients)} and {len(leaves)} tensors")
        learnt, given = [], []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and leaf.requires_grad:
                if leaf.shape != gradient.shape:
                    raise _differs(f"shapes {tuple(gradient.shape)} and {tuple(leaf.shape)}")
                learnt.append(leaf)
                given.append(gradient)
        if learnt:
            self._gradients.owned(partial(torch.autograd.backward, learnt, given))()

    def _check_parameters(self) -> None:
        """Find out which parameters forwards write to, so that the second pass finds them as the first one did.

        Raises:
            ArgumentError: they have written to others than those that the first window has shown.
        """
        assert self._begun is not None
        if self._job.state == "window" or len(self._pieces) < 2:
            return
        if self._written is None:
            self._written = [tensor for tensor in self._begun.moved() if isinstance(tensor, nn.Parameter)]
            return
        # A version tells of a write in place, which is how nearly all of them are done; the first window tells of all.
        known = {id(tensor) for tensor in self._written}
        now = _versions(self._job.modules)
        if any(version != self._versions[key] for key, version in now.items() if key not in known):
            cure = "Pass state='window', by which all that moves is followed in every window."
            accepted = "forwards that write to the same parameters in each window, or to none"
            raise ArgumentError("embed", "a parameter written to that was not before", accepted, cure)


class _Narrow(State):
    """The same, of parameters those alone that are known to be written to: large frozen ones are not copied."""

    def _to_copy(self, written: Any, trained: set[int]) -> list[torch.Tensor]:
        return list(written)


@contextmanager
def naming_loss() -> Iterator[None]:
    """Say of memory that runs out within this that it is the loss's: smaller micro-batches hardly help there."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(
                "This was in the loss of the window's embeddings, or in going back from it, whatever the micro-batch. "
                "Compute it for some rows at a time: autoaccum.loss.contrastive.in_chunks, or a smaller chunk=."
            )
        raise


def _versions(modules: Any) -> dict[int, int]:
    """Return how often each parameter was written to, by its id."""
    return {id(p): p._version for module in modules for p in module.parameters()}


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that gradients come to; of whole numbers there are none."""
    is_learnt = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_() if is_learnt else tensor


def _differs(found: str) -> ArgumentError:
    return ArgumentError("embed", found, "the same embeddings for the same samples in both passes")
