"""A loss of all samples of a window, of which several ranks embed a share each: two passes on each of them.

::

    add(piece)    the first pass of this rank's share, as one rank alone runs it
    finish()      all tell each other their embeddings; the first rank computes the loss of all of them, and tells its
                  gradient by each; the second pass of the share, and the sum of all ranks' gradients

The loss is computed once, so that whatever it draws, writes to or returns beside itself counts once, as does the
gradient of parameters that it uses. A rank that runs out of memory before it has told its embeddings runs its share
again while the others wait for them. After that it has to say so: then all run the window again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoaccum.errors import ArgumentError, ConflictingArgumentsError
from autoaccum.loss.windowed import embedded, joined
from autoaccum.ranks.shares import whole_of
from autoaccum.window.gradient import Gradient, Repeat
from autoaccum.window.job import Job
from autoaccum.window.joining import SharedTransaction
from autoaccum.window.two_passes import TwoPasses, as_leaf, naming_loss


class Embeddings(NamedTuple):
    """What a rank tells after its first pass, all of it on the host."""

    num_samples: int
    """Of its share; where it has none, nothing else is there."""
    found: Any = None
    """Tensors of one row for each of them, in the structure that ``embed`` returns."""
    batch: Any = None
    """Its samples, where the loss asks for them, and the first rank cannot read them itself."""


Cotangents = Sequence[torch.Tensor | None]
"""The gradient of the loss by each leaf of all embeddings, on the host; None by one that it does not depend on."""


class SharedTwoPasses(TwoPasses, SharedTransaction):
    """Adds up the gradient of a loss over the whole window, of which several ranks run a share each."""

    def __init__(self, job: Job, **options: Any) -> None:
        """Set up; ``options`` are those of ``TwoPasses`` and ``SharedTransaction``.

        Raises:
            ConflictingArgumentsError: the noise scale is asked for.
        """
        super().__init__(job, **options)
        # By a schedule that follows it, too, which asks for it in the same way.
        if self.measures_parts:
            cure = "Parts of other ranks have no share of the loss's own parameters: leave it out, or run one process."
            raise ConflictingArgumentsError("noise_scale", True, "loss_scope='window' on several ranks", cure)

    _has_told = False  # whether other ranks may have this one's embeddings, and go on from there

    def _begin_anew(self, num_samples: int = 0) -> None:
        super()._begin_anew(num_samples)
        self._has_told = False
        self._batches: list[Any] = []  # of all ranks, where they have told them

    @property
    def is_waited_for(self) -> bool:
        """Return whether others wait for what this rank has to tell next."""
        return self._has_told

    def finish(self) -> Gradient | Repeat:
        """Complete the gradient: the loss of all ranks' embeddings, the second pass of this one's, and the sums."""
        self.own_sizes = tuple(self._sizes)
        self._check_parameters()
        own = self._own_embeddings()
        last = self._embedded[-1].leaves if self._embedded else ()
        self._embedded = []  # but for the last one's graph, they are with the others'
        # Before it is told, and not after: it is large, so that memory may run out in packing or in unpacking it.
        # Either way the others hear None next, in this exchange or in the one that follows.
        self._has_told = True
        told = self._group.exchange(own)
        if any(each is None for each in told):
            return self._repeated()
        # One rank computes it, for a loss that draws, or looks at what its own rank's forwards have moved, would be
        # another one on each.
        losses: list[torch.Tensor | None] = []
        answer: Cotangents = ()
        if self._group.is_first:
            loss, answer = self._loss_of_all(told)
            losses.append(loss)
        start = sum(each.num_samples for each in told[: self._group.rank])
        del own, told  # which may be what the answer needs the room of
        answers = self._group.exchange(answer)
        if any(each is None for each in answers):
            return self._repeated()
        if self.own_sizes:
            self._back_through_share(last, self._own_rows(answers[0], start))
        return self._ended(losses)

    def _repeated(self) -> Repeat:
        """Leave an attempt that another rank has given up."""
        self._abandon()
        return Repeat(sizes=self.own_sizes)

    def _own_embeddings(self) -> Embeddings:
        """Return what this rank tells of its share."""
        if not self._embedded:
            return Embeddings(0)
        spec = self._embedded[0].spec
        leaves = joined([[leaf.detach().to("cpu") for leaf in found.leaves] for found in self._embedded])
        samples = self._window.num_samples
        is_apart = self._loss.takes_batch and whole_of(self._window) is None
        batch = self._window.samples(range(samples)) if is_apart else None
        # In their own structure, which is known where it is pickled by its classes alone.
        return Embeddings(samples, spec.unflatten(leaves), batch)

    def _loss_of_all(self, told: Sequence[Embeddings]) -> tuple[torch.Tensor, Cotangents]:
        """Return the loss of what all ranks have embedded, and its gradient by each of it, both on the host.

        Parameters that the loss uses have their gradient when this returns.
        """
        # In the order of the ranks, which is the window's. A rank without samples knows of no structure.
        self._batches = [each.batch for each in told if each.num_samples]
        there = [embedded(each.found, each.num_samples) for each in told if each.num_samples]
        if any(each.spec != there[0].spec for each in there):
            raise ArgumentError("embed", "results of several structures", "the same structure for each micro-batch")
        leaves = [as_leaf(leaf.to(self._job.device)) for leaf in joined([each.leaves for each in there])]
        with naming_loss():
            loss = self._loss_of(there[0].spec.unflatten(leaves))
            # Of parameters that the loss uses the other ranks have no gradient by it, so that it counts once.
            self._gradients.owned(self._scaled(loss).backward)()
        return loss.detach().to("cpu"), [None if leaf.grad is None else leaf.grad.to("cpu") for leaf in leaves]

    def _all_samples(self) -> Any:
        whole = whole_of(self._window)
        return self._job.split.join(self._batches) if whole is None else whole.samples(range(self._num_samples))

    def _own_rows(self, cotangents: Cotangents, start: int) -> list[list[torch.Tensor | None]]:
        """Return the gradient by the embeddings of each micro-batch of the share, which begins at ``start``."""
        found: list[list[torch.Tensor | None]] = []
        for size in self.own_sizes:
            rows = [None if one is None else one[start : start + size].to(self._job.device) for one in cotangents]
            found.append(rows)
            start += size
        return found

    def _back_through_share(self, last: Sequence[torch.Tensor], cotangents: list[list[torch.Tensor | None]]) -> None:
        """Go back from the gradient of each embedding of the share; the last micro-batch's graph is there still."""
        # Before the second pass, which needs the memory of its graph.
        self._go_back(last, cotangents.pop())
        if cotangents:
            self._second_pass(cotangents)
