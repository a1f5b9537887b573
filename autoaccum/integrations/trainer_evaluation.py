"""Batches of evaluation and prediction, run in pieces once one has not fitted; training is not told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers.trainer_pt_utils import nested_concat

from autoaccum.integrations.evaluation_sizes import MEANS, SAME, smaller
from autoaccum.integrations.trainer_batches import Layout
from autoaccum.integrations.trainer_loss import (
    EXTREMES,
    TOKENS_SEEN,
    Logged,
    logging_of,
    notes_of,
    weight,
    with_margins,
)
from autoaccum.memory.oom import RanOut, attempt
from autoaccum.step.split_calls import Layout as Split
from autoaccum.training.validation import JoinedEvaluations

Predicted = tuple[Any, Any, Any]
"""The loss of a batch, its logits and its labels, as a trainer's ``prediction_step`` returns them; each may be None."""


class Evaluation:
    """The evaluations of one trainer, with the most samples that have fitted in them."""

    def __init__(self, trainer: Any, layout: Layout) -> None:
        """Set up for the batches of a trainer, which are laid out so."""
        self._trainer = trainer
        self._layout = layout
        self.micro_batch: int | None = None
        """Samples of a piece; None as long as all batches have fitted as they were."""
        self._joined = JoinedEvaluations(trainer.model, trainer.args.device)

    def predict(self, batch: Any, step: Callable[[Any], Predicted], trained: Split | None = None) -> Predicted:
        """Return what a prediction step returns for a batch, in as many pieces as it takes.

        Args:
            batch: of the loader.
            step: the trainer's own, on a batch.
            trained: how modules are split where training joins micro-batches, as evaluations then do.

        Raises:
            NothingFitsError: not even one sample fits.
        """
        is_joined = self._joined.follow(trained)
        results = SAME if is_joined else MEANS
        # As long as all fits nothing is cut, and nothing has to be known of how it could be.
        if self.micro_batch is None:
            outcome = attempt(partial(self._whole, batch, step))
            if not isinstance(outcome, RanOut):
                return outcome
            self._shrink(self._layout.count(self._layout.rows(batch)), outcome, results)
        rows = self._layout.rows(batch)
        while True:
            if is_joined:
                outcome = attempt(partial(self._in_joined_pieces, batch, rows, step))
            else:
                outcome = attempt(partial(self._in_pieces, rows, step))
            if not isinstance(outcome, RanOut):
                return outcome
            self._shrink(min(self.micro_batch or 1, self._layout.count(rows)), outcome, results)

    def _whole(self, batch: Any, step: Callable[[Any], Predicted]) -> Predicted:
        # Of a step that fails half-way nothing may be noted, for it is run again.
        with logging_of(self._trainer, "eval") as logged:
            found = step(dict(batch) if isinstance(batch, Mapping) else batch)  # steps take entries out
        self._log(logged.means(), logged)
        return found

    def _in_joined_pieces(self, batch: Any, rows: Any, step: Callable[[Any], Predicted]) -> Predicted:
        """Run a batch once, while the modules inside it run by pieces."""

        def few(count: int) -> Predicted:
            return step(self._layout.back(self._layout.piece(rows, 0, count)))

        count = self._layout.count(rows)
        with logging_of(self._trainer, "eval"):
            self._joined.measure(count, few)
        return self._joined.run(count, self.micro_batch or 1, lambda: self._whole(batch, step))

    def _shrink(self, tried: int, outcome: RanOut, results: str) -> None:
        """Take half as many samples from here on."""
        cure = "Pass per_device_eval_batch_size={size} to begin so."
        self.micro_batch = smaller(tried, outcome, "evaluation", self._trainer.args.device, cure, results)

    def _in_pieces(self, rows: Any, step: Callable[[Any], Predicted]) -> Predicted:
        count, size = self._layout.count(rows), self.micro_batch or 1
        pieces = [self._layout.piece(rows, start, min(size, count - start)) for start in range(0, count, size)]
        found: list[Predicted] = []
        noted: list[dict[str, float]] = []
        weights: list[float] = []
        of_notes: list[Mapping[str, int]] = []
        # Cut from one batch, all pieces are padded alike, so that logits and labels of them can be joined.
        for piece in pieces:
            batch = self._layout.back(piece)
            weights.append(weight(self._trainer, batch, self._layout.count(piece)))
            of_notes.append(self._layout.weights(batch))
            with logging_of(self._trainer, "eval") as logged:
                found.append(step(batch))
            noted.append(logged.means())
        parts = list(zip(noted, of_notes, weights, strict=True))
        means = {}
        # A piece may have nothing that a note is over, and then has no such note.
        for name in dict.fromkeys(name for one in noted for name in one):
            values = [one[name] for one in noted if name in one]
            own = [of.get(name, usual) for one, of, usual in parts if name in one]
            means[name] = EXTREMES[name](values) if name in EXTREMES else _mean(values, own)
        self._log(with_margins(means), logged)
        losses, logits, labels = zip(*found, strict=True)
        return _mean(losses, weights), _joined(logits), _joined(labels)

    def _log(self, means: dict[str, Any], logged: Logged) -> None:
        """Note metrics once for the whole batch."""
        for name, value in means.items():
            notes_of(self._trainer, "eval")["eval"][name].append(value)
        # How many words were trained on is no mean, and is not appended either.
        if TOKENS_SEEN in logged.found:
            notes_of(self._trainer, "eval")["eval"][TOKENS_SEEN] = logged.found[TOKENS_SEEN]


def _mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the mean of pieces, of which some may have nothing to be a mean over: theirs is no number."""
    if values[0] is None:
        return None
    counting = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return sum(value * weight for value, weight in counting) / sum(weights) if counting else values[0]


def _joined(parts: Sequence[Any]) -> Any:
    """Return the logits or labels of pieces below each other, in their order."""
    found = parts[0]
    for part in parts[1:]:
        found = None if found is None else nested_concat(found, part, padding_index=-100)
    return found
