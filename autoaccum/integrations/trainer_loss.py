"""The loss of a micro-batch, as a trainer of transformers computes it for a whole batch; and what it logs beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from autoaccum.integrations.trainer_batches import Layout

_TOKENS = "autoaccum_tokens"
"""The name by which the tokens of micro-batches are handed on, beside what a trainer calls its metrics."""
_CALL = "a call of log: "
"""Begins the names of numbers that were passed to ``trainer.log``."""

EXTREMES: dict[str, Callable[[Any], Any]] = {"min_reward": min, "max_reward": max}
"""Notes that are no means: the least and the largest of a batch, as RewardTrainer notes them."""
TOKENS_SEEN = "num_tokens"
"""The one note of TRL's trainers that is no mean: how many tokens have been trained on so far."""


class LossOfTrainer:
    """The loss of micro-batches by a trainer's own ``compute_loss``, and what that would have logged of them."""

    # An object of this package, and no method of the trainer's: what hangs on a trainer of the user's own class, its
    # state and its callbacks, is no part of a window, and is not to be put back with it.

    def __init__(self, trainer: Any, layout: Layout) -> None:
        """Set up for the batches of a trainer, which are laid out so."""
        self._trainer = trainer
        self._layout = layout

    def __call__(self, model: Any, rows: Any) -> Any:
        """Return the loss of a micro-batch, with what was logged beside it."""
        trainer, batch = self._trainer, self._layout.back(rows)
        # Counted in the micro-batch: its loss is then a mean over what its own graph divides by, which is read and
        # measured, whether the model divides by the count that it is passed or, as many do, by one of its own.
        with alone(trainer), trainer.compute_loss_context_manager(), logging_of(trainer, "train") as logged:
            items = trainer._get_num_items_in_batch([batch], trainer.args.device)
            with calls_of_log(trainer) as calls:
                loss = trainer.compute_loss(model, batch, num_items_in_batch=items)
        logged.found |= calls
        if not logged.found:
            return loss
        num_samples = self._layout.count(rows)
        return loss, logged.beside(weight(trainer, batch, num_samples), self._layout.weights(batch), num_samples)


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """Let a trainer compute the loss of what this rank has, as if there were no others: windows join the ranks."""
    args, accelerator = trainer.args, trainer.accelerator
    averages, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    # Metrics gather from all ranks, of which each has as many micro-batches as it likes: they would wait for ever.
    if accelerator.num_processes > 1:
        accelerator.gather = accelerator.gather_for_metrics = _as_it_is
    try:
        yield
    finally:
        args.average_tokens_across_devices = averages
        for name in ("gather", "gather_for_metrics"):
            vars(accelerator).pop(name, None)


def _as_it_is(found: Any, *_: Any, **__: Any) -> Any:
    return found


class Logged:
    """What a trainer of TRL has noted of a micro-batch, taken out of its notes."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.found: dict[str, list[float]] = {}
        """What was noted, by name."""
        self.tokens = 0
        """By how much the count of tokens grew."""

    def means(self) -> dict[str, float]:
        """Return the mean of each; the count of tokens is none."""
        return {name: sum(values) / len(values) for name, values in self.found.items() if name != TOKENS_SEEN}

    def beside(self, items: float, weights: Mapping[str, int], num_samples: int) -> dict[str, Any]:
        """Return them as what stands beside a loss: means over the items of the micro-batch, and a count to add up."""
        # Rows are joined and not averaged, so that their sum is that of the window, on all ranks.
        counted = {_TOKENS: torch.full((num_samples,), self.tokens / num_samples, dtype=torch.float64)}
        noted = self.means()
        means = {name: (value, weights.get(name, items)) for name, value in noted.items() if name not in EXTREMES}
        rows = {
            name: torch.full((num_samples,), noted[name], dtype=torch.float64) for name in EXTREMES if name in noted
        }
        return means | rows | (counted if self.tokens else {})


def notes_of(trainer: Any, mode: str) -> Any:
    """Return where a trainer of TRL notes what it logs, by mode and name: two names are in use; None without such."""
    for name in ("_metrics", "_stored_metrics"):
        notes = getattr(trainer, name, None)
        if isinstance(notes, dict) and (mode in notes or isinstance(notes, defaultdict)):
            return notes
    return None


@contextmanager
def logging_of(trainer: Any, mode: str) -> Iterator[Logged]:
    """Keep what a trainer notes within this apart; its own notes are found as they were."""
    # A window may be run again, and some samples of it are run to be measured: notes of these are none of training.
    logged, metrics = Logged(), notes_of(trainer, mode)
    if metrics is None:
        yield logged
        return
    kept, tokens = metrics[mode], getattr(trainer, "_total_train_tokens", 0)
    metrics[mode] = defaultdict(list)
    try:
        yield logged
        logged.found = {name: list(map(float, values)) for name, values in metrics[mode].items()}
        logged.tokens = getattr(trainer, "_total_train_tokens", 0) - tokens
    finally:
        metrics[mode] = kept
        if tokens or hasattr(trainer, "_total_train_tokens"):
            trainer._total_train_tokens = tokens


@contextmanager
def calls_of_log(trainer: Any) -> Iterator[dict[str, list[float]]]:
    """Keep the numbers that are passed to ``trainer.log`` within this: they are logged once for the window."""
    found: dict[str, list[float]] = {}
    log, own = trainer.log, vars(trainer).get("log")

    def note(logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        others = {name: value for name, value in logs.items() if not _is_number(value)}
        for name, value in logs.items():
            if name not in others:
                found.setdefault(_CALL + name, []).append(float(value))
        if others:
            log(others, *args, **kwargs)

    trainer.log = note
    try:
        yield found
    finally:
        if own is None:
            del trainer.log
        else:
            trainer.log = own


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def log_window(trainer: Any, outputs: Mapping[str, Any]) -> None:
    """Note once for the whole window what micro-batches would have noted each, where a trainer does so."""
    calls = {name.removeprefix(_CALL): float(value) for name, value in outputs.items() if name.startswith(_CALL)}
    if calls:
        trainer.log(calls)
    outputs = {name: value for name, value in outputs.items() if not name.startswith(_CALL)}
    metrics = notes_of(trainer, "train")
    if metrics is None or not outputs:
        return
    if _TOKENS in outputs:
        trainer._total_train_tokens += round(float(outputs[_TOKENS].sum()))
    if hasattr(trainer, "_total_train_tokens"):
        metrics["train"][TOKENS_SEEN] = [trainer._total_train_tokens]
    found = {}
    for name, value in outputs.items():
        if name != _TOKENS:
            # Of the least rewards of micro-batches it is the least that is the window's, and no mean.
            found[name] = EXTREMES[name](value.tolist()) if name in EXTREMES else float(value)
    for name, number in with_margins(found).items():
        metrics["train"][name].append(number)


def with_margins(means: dict[str, float]) -> dict[str, float]:
    """Return means with that of margins, which is the difference of two of them."""
    # A micro-batch may have liked answers alone, and so no margin, which is none of the mean of the others'.
    if "rewards/chosen" in means and "rewards/rejected" in means:
        means |= {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}
    return means


def weight(trainer: Any, batch: Any, num_samples: int) -> float:
    """Return what a batch weighs in a mean: the labels that count, or its samples where it has no labels of tokens."""
    labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return num_samples
    # As the trainer counts them, who knows whether its model shifts them.
    is_shifted = trainer._loss_shifts_labels and "shift_labels" not in batch
    return int((labels[..., 1:] if is_shifted else labels).ne(-100).sum())


def showing(function: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return a loss (model, batch) by which the modules are found that it trains beside the model."""

    def loss_of(model: Any, batch: Any) -> Any:
        return function(model, batch)

    shown: Any = loss_of
    # What a function holds is looked for where its user would have put it: an object of this package shows nothing.
    shown.modules = tuple(modules)
    return cast(Callable[..., Any], shown)


def trained_beside(trainer: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Return modules that a trainer holds and its optimizer trains, and that are no part of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    others = {id(p) for group in optimizer.param_groups for p in group["params"]} - own
    held = [value for value in vars(trainer).values() if isinstance(value, nn.Module)] if others else []
    return [module for module in held if any(id(parameter) in others for parameter in module.parameters())]
