"""Examines the first windows that are cut, while they run: is their gradient that of the whole window?

What may couple samples, losses that do more than return a value, counts that the loss contradicts: each is looked for
where it shows, in the graph of a real loss, once; and what cannot be exact is announced with its cause and its cure.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autoaccum.errors import NonFiniteLossError
from autoaccum.events import Notice
from autoaccum.loss.coupling import Crossing, couples_samples, crossings
from autoaccum.loss.reductions import Reduction, read, without_graph
from autoaccum.verification.notices import (
    batch_norm_notices,
    contradiction_notice,
    coupling_notice,
    doubt_notice,
    half_precision_notices,
    penalty_notice,
)
from autoaccum.verification.side_effects import SideEffects
from autoaccum.window.gradient import Gradient
from autoaccum.window.job import Job
from autoaccum.window.transaction import Transaction


class Examiner:
    """Looks at the windows of one run until a cut one has been seen, and at what each says of itself ever after."""

    def __init__(self, job: Job, transaction: Transaction) -> None:
        """Put itself around the forwards of a transaction."""
        self._job = job
        self._transaction = transaction
        self._parameters = [p for module in job.modules for p in module.parameters()]
        self._is_examining = True  # until a window has been cut and committed
        self._is_checked = False  # whether a first window had a finite loss
        # The transaction knows nothing of being examined. This is put around its forward from outside, and taken away
        # after the first window that is cut, so that later ones do not pay for it.
        transaction.forward = self.forward
        self.begin_attempt()

    @property
    def is_finished(self) -> bool:
        """Return whether a window has been cut and committed, so that later ones need not be looked at any more."""
        return not self._is_examining

    def begin_attempt(self) -> None:
        """Forget what an attempt that was rolled back has shown."""
        self._met: list[tuple[int, set[Crossing]]] = []  # by which operations samples meet, and how many there were
        self._shown: list[Reduction] = []  # how losses were reduced, whatever num_items says

    def forward(self, batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
        """Return the loss of a micro-batch, having looked at it.

        Raises:
            LossSideEffectError: gradients have changed while it was computed.
        """
        is_part = num_samples < window_samples
        if not is_part and self._is_checked:  # a whole window has nothing to hide, and needs no second look
            return self._transaction.plain_forward(batch, num_samples, window_samples)
        # Of a whole window too: gradients that a loss changes are wrong however the window is cut.
        before = SideEffects(self._parameters)
        loss = self._transaction.plain_forward(batch, num_samples, window_samples)
        before.refuse()
        if is_part:
            # The graph is walked here, for the backward that follows frees it.
            self._met.append((num_samples, crossings(loss, num_samples)))
            self._shown.append(without_graph(read(loss, num_samples)))
        return loss

    def check_first(self, gradient: Gradient) -> None:
        """Look at the loss of the very first window that counts anything, before it is stepped on.

        Raises:
            NonFiniteLossError: it is NaN or infinite.
        """
        if self._is_checked or gradient.conclusion is None:
            return
        # It waits for the device, and so is asked of one window only.
        if not math.isfinite(value := gradient.loss.item()):
            raise NonFiniteLossError(value)
        self._is_checked = True

    def notices(self, gradient: Gradient) -> list[Notice]:
        """Return why the gradient of a window that was cut may not be that of the whole; most windows say nothing."""
        notices = self._doubts(gradient)
        if self._is_examining:
            self._is_examining = False
            self._transaction.forward = self._transaction.plain_forward
            trained = [p for p in self._parameters if p.requires_grad]
            notices = [*batch_norm_notices(self._job.modules), *half_precision_notices(trained), *notices]
            self.begin_attempt()
        return notices

    def _doubts(self, gradient: Gradient) -> list[Notice]:
        found = gradient.conclusion
        if found is None:
            return []
        if couples_samples(self._met):  # no count makes it exact
            return [coupling_notice()]
        if self._job.num_items is not None:
            # What the user says is compared with what the losses show, of every micro-batch or not at all.
            claimed = [float(reduction.items) for reduction in gradient.reductions]
            if len(self._shown) != len(gradient.sizes):
                return []
            notice = contradiction_notice(claimed, gradient.sizes, self._shown)
            return [] if notice is None else [notice]
        notices = [] if found.doubt is None else [doubt_notice(*found.doubt)]
        if found.is_sum and gradient.reductions[0].constants:
            notices.append(penalty_notice())
        return notices

    def state_dict(self) -> dict[str, Any]:
        """Return what was looked at, for a checkpoint."""
        return {"_checked": self._is_checked, "_examining": self._is_examining}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._is_checked, self._is_examining = state["_checked"], state["_examining"]
        if not self._is_examining:
            self._transaction.forward = self._transaction.plain_forward
