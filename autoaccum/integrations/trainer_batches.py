"""How batches of trainers are laid out: whose rows are samples, and those whose samples lie in two halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoaccum.data.splits import split_of


class Layout:
    """Batches whose rows are samples already, as nearly all are; others are turned into such, and back."""

    def __init__(self, split: Any) -> None:
        """Set up for batches that are cut by ``split``."""
        self.count, self.piece = split.count, split

    def rows(self, batch: Any) -> Any:
        """Return a batch as one whose tensors have one row for each sample: as a plain dict where it is a mapping."""
        return dict(batch) if isinstance(batch, Mapping) else batch

    def back(self, rows: Any) -> Any:
        """Return a batch whose entries may be taken out without a trace."""
        return dict(rows) if isinstance(rows, Mapping) else rows

    def weights(self, batch: Any) -> Mapping[str, int]:
        """Return what means in a trainer's notes are over, by name, where that is not what its loss is over."""
        return {}


class InHalves(Layout):
    """Batches of preferences as TRL makes them: all chosen answers, and below them all that were rejected.

    Cut by rows, chosen answers would meet the rejected ones of other prompts, or none.
    """

    def __init__(self, split: Any) -> None:
        """Set up for batches that are cut by ``split``; which entries lie in halves shows in the first one."""
        super().__init__(split)
        self._halved: set[str] = set()

    def rows(self, batch: Any) -> Any:
        """Return the batch with the two answers to each prompt in one row, (2N, ...) as (N, 2, ...)."""
        num_answers = len(batch["input_ids"])
        found = dict(batch)
        # What has one row for each pair already, such as log probabilities of a reference model, stays.
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == num_answers:
                found[name] = value.reshape(2, num_answers // 2, *value.shape[1:]).transpose(0, 1)
                self._halved.add(name)
        return found

    def back(self, rows: Any) -> Any:
        """Return the batch in halves again."""
        found = dict(rows)
        for name in self._halved & found.keys():
            found[name] = found[name].transpose(0, 1).flatten(0, 1)
        return found

    def weights(self, batch: Any) -> Mapping[str, int]:
        """Return how many words of answers the notes on words are over; the loss, and all others, are over pairs."""
        if "completion_mask" not in batch:
            return {}
        # The first word of a text is never predicted.
        chosen, rejected = (int(half[:, 1:].sum()) for half in batch["completion_mask"].chunk(2))
        of_chosen = {"mean_token_accuracy": chosen, "logits/chosen": chosen}
        return {"entropy": chosen + rejected, "logits/rejected": rejected, **of_chosen}


class Unpaired(Layout):
    """Batches of KTO: answers each of which was liked or not."""

    def weights(self, batch: Any) -> Mapping[str, int]:
        """Return how many answers, or how many words of them, notes are over."""
        words, is_chosen = batch["completion_mask"][:, 1:], batch["label"].bool()  # the first one is never predicted
        # What only answers of one kind have is over these, of which a micro-batch may have none.
        found = {"entropy": int(words.sum())}
        for name, those in (("chosen", is_chosen), ("rejected", ~is_chosen)):
            found |= dict.fromkeys((f"rewards/{name}", f"logps/{name}"), int(those.sum()))
            found[f"logits/{name}"] = int(words[those].sum())
        return found


# Trainers of TRL, by name, for TRL may not be installed.
_IN_HALVES = ("DPOTrainer", "RewardTrainer")
KTO = ("KTOTrainer",)


def layout_of(trainer: Any) -> Layout:
    """Return how the batches of a trainer are laid out."""
    options = trainer.window_options
    # As the accumulator does, of the same options: an evaluation is cut as windows are.
    split = split_of(options.get("split"), options.get("batch_dim", 0), None, None)
    if is_one_of(type(trainer), _IN_HALVES):
        return InHalves(split)
    return (Unpaired if is_one_of(type(trainer), KTO) else Layout)(split)


def is_one_of(kind: type, names: tuple[str, ...]) -> bool:
    """Return whether a class has one of these names, or was made after one that has."""
    return any(base.__name__ in names for base in kind.__mro__)
