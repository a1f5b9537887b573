"""What micro-batches log and return in Lightning, made into what one run of the whole batch would have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from autoaccum.errors import OutputError
from autoaccum.integrations.lightning_metrics import Metrics, is_metric

_ACCEPTED = "numbers, 0-dim tensors, and tensors with a row for each sample"
_CURE = "Append it, or extend by it, a list that the module has: an attribute that is set holds the last micro-batch's."
_RANK_BITS = 40  # more micro-batches than any rank runs


@dataclass(slots=True)
class Record:
    """What one run of a step on a part of a batch has left."""

    serial: int
    logs: list[tuple[tuple[str, str, int], dict[str, Any]]] = field(default_factory=list)
    """What ``self.log`` was told: by the hook, the name and how often it was told before, with its arguments."""
    metrics: list[Any] = field(default_factory=list)
    """State of each torchmetrics.Metric of the module, of this part alone."""
    loss: torch.Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Scalars that were returned beside the loss."""
    lists: dict[str, list[Any]] = field(default_factory=dict)
    """What lists of the module have got, by the names of its attributes."""


class Records:
    """Records of the parts of one batch, of which those that hold are made into one."""

    def __init__(self, results: Any, module: Any, rank: int = 0) -> None:
        """Begin without any.

        Args:
            results: where Lightning's loop keeps what is logged.
            module: the LightningModule.
            rank: of this process.
        """
        self._results = results
        self._module = module
        self._metrics = Metrics(module)
        # A part that is run again, or run to measure something, has another number: those that hold are told by it.
        self._serials = count(rank << _RANK_BITS)
        self._rank = rank
        self._records: dict[int, Record] = {}

    @property
    def are_there(self) -> bool:
        """Return whether any part of this batch has had a loss."""
        return bool(self._records)

    def begin(self) -> None:
        """Begin a batch."""
        self._records = {}

    @contextmanager
    def taking(self) -> Iterator[Record]:
        """Keep what is logged within it, and what metrics and lists have then, from Lightning and the module."""
        # Where Lightning collects, and not in the module: log, log_dict and what users derive from them all end there,
        # with the checks of Lightning passed.
        record = Record(next(self._serials))
        results = self._results
        times: dict[tuple[str, str], int] = {}

        def keep(fx: str, name: str, value: Any, **options: Any) -> None:
            number = times[fx, name] = times.get((fx, name), -1) + 1
            record.logs.append(((fx, name, number), {"value": value, **options}))

        eager: Any = torch.compiler.disable
        results.log = eager(keep)
        # As the docs of Lightning have it, steps append losses and outputs to lists for the epoch's end.
        lists = {name: (held, len(held)) for name, held in vars(self._module).items() if type(held) is list}
        try:
            with self._metrics.apart(record.metrics):
                yield record
        finally:
            del results.log
            # After an error too: what a broken-off part has left is not to be there twice.
            for name, (held, length) in lists.items():
                if vars(self._module).get(name) is held and len(held) > length:
                    record.lists[name] = held[length:]
                    del held[length:]

    def take(self, record: Record, loss: torch.Tensor, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Keep the record of a micro-batch; return what of it is to be joined by the window.

        Raises:
            OutputError: ``training_step`` has returned what no window can have one of.
        """
        record.loss = loss.detach()
        # Rows go the way of outputs, which gives their memory back when a window is run again.
        rows = {}
        for name, value in extra.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                rows[name] = value
            elif isinstance(value, torch.Tensor | float | int):
                record.extra[name] = value
            else:
                raise OutputError(name, type(value).__name__, _ACCEPTED, _CURE)
        self._records[record.serial] = record
        return {"serials": torch.tensor([record.serial]), "rows": rows}

    def commit(self, outputs: Mapping[str, Any], sizes: Sequence[int], loss: torch.Tensor) -> dict[str, Any]:
        """Log what a window comes to, once; return what it returns beside the loss.

        Args:
            outputs: what the window has joined.
            sizes: of its micro-batches, on all ranks.
            loss: of the window.
        """
        # Of other ranks the serials are told too, in the order of the joined batch; their records are theirs.
        serials: list[int] = outputs["serials"].tolist()
        if len(serials) < len(sizes):  # joined: the step has run once, on each rank, and last of all there
            last = next(reversed(self._records.values()))
            own = [(self._records.get(serials[0], last), sum(sizes))]
        else:
            own = [
                (self._records[serial], size)
                for serial, size in zip(serials, sizes, strict=True)
                if serial >> _RANK_BITS == self._rank
            ]
        self._records = {}
        self.log(own, loss)
        rows = {name.removeprefix("rows/"): value for name, value in outputs.items() if name.startswith("rows/")}
        return rows | scalars(own, loss)

    def log(self, parts: Sequence[tuple[Record, int]], loss: torch.Tensor | None = None) -> None:
        """Tell Lightning what parts of a batch come to; each has its number of samples beside it."""
        self._metrics.join([record.metrics for record, _ in parts], [size for _, size in parts])
        for record, _ in parts:
            for name, entries in record.lists.items():
                getattr(self._module, name).extend(entries)
        told: dict[tuple[str, str, int], list[tuple[Record, int, dict[str, Any]]]] = {}
        for record, size in parts:
            for key, options in record.logs:
                told.setdefault(key, []).append((record, size, options))
        for (fx, name, _), calls in told.items():
            options = dict(calls[-1][2])
            stated = [call["batch_size"] for _, _, call in calls]
            # One run of the whole batch would have passed the sum; left out, Lightning reads it off the batch.
            if None not in stated:
                options["batch_size"] = sum(stated)
            value = options.pop("value")
            if not is_metric(value):
                sizes = [size if own is None else own for own, (_, size, _) in zip(stated, calls, strict=True)]
                values = [call["value"] for _, _, call in calls]
                records = [record for record, _, _ in calls]
                value = _one_of(options["reduce_fx"], values, sizes, records, loss)
            self._results.log(fx, name, value, **options)


def _one_of(
    reduce_fx: Any,
    values: list[torch.Tensor],
    sizes: Sequence[int],
    records: Sequence[Record],
    loss: torch.Tensor | None,
) -> torch.Tensor:
    """Return one value for several, by what was said in ``self.log``."""
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("max", "min", "sum"):
        one: torch.Tensor = getattr(torch.stack(values), name)()
        return one
    return _or_loss(mean(values, sizes), values, records, loss)


def scalars(parts: Sequence[tuple[Record, int]], loss: torch.Tensor) -> dict[str, Any]:
    """Return the means of what micro-batches returned beside their losses."""
    found = {}
    for name in dict.fromkeys(name for record, _ in parts for name in record.extra):
        those = [(record, size) for record, size in parts if name in record.extra]
        values = [torch.as_tensor(record.extra[name]).detach() for record, _ in those]
        own = mean(values, [size for _, size in those])
        found[name] = _or_loss(own, values, [record for record, _ in those], loss)
    return found


def mean(values: list[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Return the mean of values of parts of a batch, weighted by their samples."""
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    wide = stacked.dtype if stacked.device.type == "mps" else torch.float64
    weights = torch.tensor(sizes, dtype=wide, device=stacked.device)
    return ((stacked.to(wide) * weights).sum() / weights.sum()).to(stacked.dtype)


def _or_loss(
    value: torch.Tensor, values: list[torch.Tensor], records: Sequence[Record], loss: torch.Tensor | None
) -> torch.Tensor:
    """Return a mean over samples, or the loss of the batch where the values are the losses of its micro-batches."""
    losses = [record.loss for record in records if record.loss is not None]
    if loss is None or len(losses) < len(values):
        return value
    # The loss may be a mean over tokens, of which parts have more or fewer. It is told by its values, for what is
    # logged is a copy; nothing is read off the device.
    stacked = torch.stack(values)
    is_loss = torch.isclose(stacked, torch.stack(losses).to(stacked), rtol=0, atol=0, equal_nan=True).all()
    return torch.where(is_loss, loss.to(stacked), value)
