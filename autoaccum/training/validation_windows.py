"""The loss on held-out data where it is one of whole windows: of windows as large as those that are trained on.

Each window's embeddings are made in micro-batches and joined. What is reported is the mean over windows, each weighed
by its samples; the last one may be short, and then has fewer others to be told from.
"""

from __future__ import annotations

from typing import Any

import torch

from autoaccum.data import batches
from autoaccum.data.base import Reader, Window
from autoaccum.loss.functions import checked
from autoaccum.loss.stated import Computed, WindowLoss
from autoaccum.loss.terms import Reduction
from autoaccum.loss.windowed import Embedded, embedded, joined
from autoaccum.memory.waiting import Shortage
from autoaccum.planning.attempts import Piece
from autoaccum.training.validation import Validator
from autoaccum.training.validation_losses import Loss, OneLoss
from autoaccum.window.outputs import Outputs


class ValidatorOfWindows(Validator):
    """Runner of validations whose loss is one of whole windows."""

    def __init__(self, *arguments: Any, window_loss: WindowLoss, window_samples: int, **options: Any) -> None:
        """Set up.

        Args:
            arguments: those of ``Validator``.
            window_loss: the two functions of the user's.
            window_samples: samples of each window, but for the last.
            options: further ones of ``Validator``.
        """
        super().__init__(*arguments, **options)
        self._of_outputs = False  # but of embeddings, which its own function makes of any batch
        self._loss_of_window = window_loss
        self._window_samples = window_samples
        self._parts: list[Embedded] = []  # of the window that is validated, but for its last micro-batch
        self._window: Window
        self._piece: Piece

    def _next_window(self, reader: Reader, num_samples: int) -> Window | None:
        # Also where a validation begins anew, for the one before may have ended in the midst of a window.
        self._parts = []
        return reader.window(self._window_samples)

    def _try(self, window: Window, piece: Piece) -> Loss | Shortage:
        # What computes the loss of a micro-batch is told neither: here it ends a window, or does not.
        self._window, self._piece = window, piece
        return super()._try(window, piece)

    @property
    def _is_last(self) -> bool:
        # Pieces come in order, and one that failed comes again in smaller ones.
        return self._piece.start + self._piece.size == self._window.num_samples

    def _loss(self, batch: Any, size: int) -> Loss:
        """Return the loss of the window with its last micro-batch, and one that counts nothing with all others."""
        with torch.no_grad(), self._autocast():
            found = embedded(self._loss_of_window.embed(self._model, batch), size)
            found = found._replace(leaves=tuple(leaf.detach().clone() for leaf in found.leaves))
            # One that runs out of memory comes again, so that what came before it is kept until all is well.
            parts = [*self._parts, found]
            if not self._is_last:
                self._parts = parts
                return OneLoss(0.0, Reduction(0.0), size)
            arguments = [found.spec.unflatten(joined([part.leaves for part in parts]))]
            if self._loss_of_window.takes_batch:  # read once more, for micro-batches were theirs to edit
                everything = self._window.samples(range(self._window.num_samples))
                arguments.append(batches.to_device(everything, self._device, copy=True))
            computed = checked(self._loss_of_window.loss_fn(*arguments), "loss_fn")
        if isinstance(computed, Computed):
            self._computed, computed = computed, computed.loss
        return OneLoss(computed.detach().clone(), Reduction(float(self._window.num_samples)), size)

    def _outputs_of(self, size: int) -> Outputs:
        # They stand beside the loss of the window, and count like it.
        return super()._outputs_of(self._window.num_samples)
