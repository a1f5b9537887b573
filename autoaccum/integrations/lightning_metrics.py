"""Metrics of torchmetrics in parts of a batch: each part has its own state, and the batch counts as one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import MeanMetric, Metric


def is_metric(value: object) -> bool:
    """Return whether what is logged is a metric, which has a value of its own."""
    return isinstance(value, Metric)


class Metrics:
    """All metrics of a module, and what they had before the batch that is being run."""

    def __init__(self, module: Any) -> None:
        """Begin with those of a module, which are looked for when the first batch is run."""
        self._module = module
        self._metrics: list[Metric] | None = None

    def _all(self) -> list[Metric]:
        # Once, for this runs with each micro-batch; a collection of metrics is a module that holds them.
        if self._metrics is None:
            self._metrics = [module for module in self._module.modules() if isinstance(module, Metric)]
        return self._metrics

    @contextmanager
    def apart(self, found: list[Any]) -> Iterator[None]:
        """Let metrics begin anew, give what they have at its end, and have them as they were.

        Args:
            found: takes, for each metric, (its state, its number of updates, its value), or None for no update.
        """
        metrics = self._all()
        before = [_state(metric) for metric in metrics]
        for metric in metrics:
            _clear(metric)
        try:
            yield
        finally:
            # After an error too: what was updated before memory ran out is not to be counted twice.
            for metric, state in zip(metrics, before, strict=True):
                found.append(_state(metric) if metric._update_count else None)
                _put_back(metric, state)

    def join(self, parts: Sequence[list[Any]], sizes: Sequence[int]) -> None:
        """Add to each metric what parts of a batch have of it, as if it had been updated once with the batch."""
        for index, metric in enumerate(self._all()):
            those = [(found[index], size) for found, size in zip(parts, sizes, strict=True) if found[index] is not None]
            if len(those) > 1 and isinstance(metric, MeanMetric):
                those = _weighted(those)
            if those:
                _join(metric, [found for found, _ in those])


def _weighted(parts: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Return states of a mean in which parts weigh by their samples, where each was told one value without a weight."""
    # Told so by the weights: as many as there were updates, where none was passed. It is not read off the device.
    alike = torch.stack([found[0]["weight"] == found[1] for found, _ in parts]).all()
    whole = sum(size for _, size in parts)
    if whole == len(parts):  # one sample each, which say the same by either reading
        return parts
    weighted = []
    for (held, updates, value), size in parts:
        share = torch.where(alike, size / whole, 1.0)
        weighted.append((({name: entry * share for name, entry in held.items()}, updates, value), size))
    return weighted


def _join(metric: Metric, parts: list[Any]) -> None:
    before = _state(metric)
    _put_back(metric, parts[0])
    for number, part in enumerate(parts[1:], start=2):
        so_far = _state(metric)
        _put_back(metric, part)
        metric._update_count = number  # some states are means over updates
        metric._reduce_states(so_far[0])
    value = metric._forward_cache
    # What callers of forward() want is the value of this batch alone, which is not the mean of those of its parts.
    if len(parts) > 1 and value is not None:
        value = _value_here(metric)
    metric._update_count = before[1] + 1
    if before[1]:
        metric._reduce_states(before[0])
    metric._forward_cache = value
    metric._computed = None


def _value_here(metric: Metric) -> Any:
    """Return the value of a metric by what it has, without other ranks unless it asks for them at each step."""
    metric._computed = None
    metric._to_sync, metric._should_unsync = metric.dist_sync_on_step, False
    value = metric.compute()
    metric._is_synced, metric._should_unsync, metric._to_sync = False, True, metric.sync_on_compute
    return value


def _state(metric: Metric) -> tuple[dict[str, Any], int, Any]:
    """Return the state of a metric itself; lists are copied, for metrics append to them."""
    state = {name: getattr(metric, name) for name in metric._defaults}
    held = {name: list(value) if isinstance(value, list) else value for name, value in state.items()}
    return held, metric._update_count, metric._forward_cache


def _clear(metric: Metric) -> None:
    # In the place of its lists and tensors, which are kept: reset() empties the very lists.
    for name, default in metric._defaults.items():
        held: Any = getattr(metric, name)
        anew: Any = default
        setattr(metric, name, [] if isinstance(held, list) else anew.detach().clone().to(held.device))
    metric._update_count, metric._forward_cache, metric._computed = 0, None, None


def _put_back(metric: Metric, state: tuple[dict[str, Any], int, Any]) -> None:
    held, metric._update_count, metric._forward_cache = state
    for name, value in held.items():
        setattr(metric, name, list(value) if isinstance(value, list) else value)
    metric._computed = None
