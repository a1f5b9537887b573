"""KTO of TRL, whose loss compares each answer with a mean over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainingArguments

from autoaccum.errors import ArgumentError
from autoaccum.integrations.trainer_arguments import with_one_batch_per_window
from autoaccum.integrations.trainer_batches import KTO, is_one_of

_OF_REFERENCE = "ref_KL_logps"
"""The entry of a batch with what the reference says of mismatched answers, where that was computed beforehand."""


class Divergence:
    """How much likelier mismatched answers are to a model than to its reference, on average over a batch.

    It stands in the loss of each answer, without a gradient (Ethayarajh and others 2024, equation 7). In training the
    trainer's own step computes it, because that runs once on the full batch. An evaluation batch that does not fit is
    split, and there it is computed first, over the full batch.
    """

    def __init__(self, trainer: Any) -> None:
        """Set up for a trainer whose loss has such a term."""
        self._trainer = trainer

    @torch.no_grad()
    def _of_samples(self, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return what it is a mean of, one value for each sample."""
        trainer = self._trainer
        with trainer.compute_loss_context_manager():
            own: torch.Tensor = trainer._compute_kl_logps(model, dict(batch))
            if _OF_REFERENCE in batch:
                reference = batch[_OF_REFERENCE]
            elif trainer.ref_model is not None:
                reference = trainer._compute_kl_logps(trainer.ref_model, dict(batch))
            else:  # the model without its adapter, to which TRL itself has a way
                reference = trainer.compute_ref_log_probs(model, batch)[1]
        found: torch.Tensor = own - reference
        return found

    @contextmanager
    def given(self, found: torch.Tensor, batch: dict[str, Any]) -> Iterator[None]:
        """Let the trainer take this one, where it would compute that of the samples of ``batch`` alone."""
        # It takes the mean of the first of two computations less the second, of the model and of the reference.
        found = found.to(self._trainer.args.device).expand(len(batch["label"]))
        answers = iter([found, torch.zeros_like(found)])
        if _OF_REFERENCE in batch:
            batch[_OF_REFERENCE] = torch.zeros_like(batch[_OF_REFERENCE])
        self._trainer._compute_kl_logps = lambda *_: next(answers)
        try:
            yield
        finally:
            del self._trainer._compute_kl_logps

    def step_of_pieces(
        self, model: Any, pieces: Sequence[Any], step: Callable[[Any], Any]
    ) -> Callable[[dict[str, Any]], Any]:
        """Return a step of evaluation for pieces of one batch, by what all of them come to."""
        # All of them first, for the loss of the first piece goes by the last one too.
        found = torch.cat([self._of_samples(model, self._trainer._prepare_inputs(piece)) for piece in pieces]).mean()

        def of_piece(batch: dict[str, Any]) -> Any:
            with self.given(found, batch):
                return step(batch)

        return of_piece


def divergence_of(trainer: Any) -> Divergence | None:
    """Return what computes the term of a trainer's loss; None for trainers without one.

    Raises:
        ArgumentError: there are several ranks, of which none has the whole window.
    """
    # Other losses of this trainer are means over answers, as any.
    if not is_one_of(type(trainer), KTO) or not trainer.calculate_KL:
        return None
    if trainer.accelerator.num_processes > 1:
        cure = "It compares all samples of a window: train in one process, or take 'apo_zero_unpaired'."
        raise ArgumentError("loss_type", trainer.loss_type, "one that needs no mean over what other ranks have", cure)
    return Divergence(trainer)


def of_windows(kind: type, argument: Any, effective_batch: int | None) -> Any:
    """Return an argument that a trainer is made with: those of training are changed where its data are made by them.

    Args:
        kind: of the trainer.
        argument: any of its arguments.
        effective_batch: as it was passed.
    """
    # Mismatched answers are those of neighbours within a batch, and are looked up when the trainer is made.
    if not (is_one_of(kind, KTO) and isinstance(argument, TrainingArguments)):
        return argument
    changed: Any = with_one_batch_per_window(argument, effective_batch)
    # What is computed beforehand is no part of a window, and has to fit as it was meant to.
    if changed.precompute_ref_batch_size is None:
        changed.precompute_ref_batch_size = argument.per_device_train_batch_size
    return changed
