"""Collects what is returned beside the losses of a window: one value for each name, however the window was cut.

::

    outputs.take({"accuracy": accuracy, "scores": scores}, num_samples)    # of each micro-batch, in order
    outputs.joined()                                                       # of the window, at its end

A scalar is a mean over samples, a pair (value, count) one over what it counts, and tensors with rows are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from autoaccum._units import kind_of
from autoaccum.errors import OutputError
from autoaccum.step.readback import Numbers

Joined = Mapping[str, float | torch.Tensor]
"""Outputs of a window, by name: means as numbers, or as 0-dim tensors where they lie on a device; tensors with rows."""

_ACCEPTED = (
    "a number or a 0-dim tensor (its mean over samples is reported), a pair (value, count) of these, a tensor with a "
    "row for each sample or item (which are joined), or a dict of such"
)


class Outputs:
    """Outputs of the micro-batches of one window, joined or averaged at its end."""

    __slots__ = ("_copies", "_entries", "_joins", "_means", "are_there", "are_unwanted", "have_missed", "rows_to_host")

    def __init__(self, *, joins: bool = True) -> None:
        """Begin without any; with ``joins`` False tensors with rows are left out."""
        self.are_there = False
        """Whether any micro-batch so far, of this window or one before it, came with outputs."""
        self.are_unwanted = False
        """Whether nothing is kept: for whoever runs windows to measure something else."""
        self.rows_to_host = False
        """Whether rows are wanted on the host at a window's end; else they stay where they are, and may be many."""
        self._joins = joins
        self.begin()

    def begin(self) -> None:
        """Forget those of a window: it has ended, or is run again."""
        self._entries: dict[str, _Mean | _Rows] = {}
        self._means: dict[str, torch.Tensor] = {}  # those that are being read
        self._copies: dict[str, torch.Tensor] = {}  # of rows, which may be yet to arrive
        self.have_missed = False
        """Whether a micro-batch of this window was not computed, for nobody knew that it would have outputs."""

    def take(self, outputs: Mapping[Any, Any], num_samples: int, within: str = "") -> None:
        """Add those of a micro-batch; nothing of its graph, and no memory that it may write to, is kept.

        Args:
            outputs: by name. In a dict within them names are joined by a slash.
            num_samples: of the micro-batch.
            within: what names begin with.

        Raises:
            OutputError: one is of a kind that no window can have.
        """
        if self.are_unwanted or not outputs:
            return
        self.are_there = True
        for key, value in outputs.items():
            name = f"{within}{key}"
            # In the order of how frequent they are: there are micro-batches of 100 µs.
            if isinstance(value, torch.Tensor):
                if value.ndim:
                    self._take_rows(name, value)
                else:
                    self._mean(name).add(_scalar(name, value), num_samples)
            elif isinstance(value, tuple):
                if len(value) != 2:
                    raise OutputError(name, f"a tuple of {len(value)}", _ACCEPTED)
                self._mean(name).add(_scalar(name, value[0]), _scalar(name, value[1]))
            elif isinstance(value, Mapping):
                self.take(value, num_samples, f"{name}/")
            else:
                self._mean(name).add(_scalar(name, value), num_samples)

    def _mean(self, name: str) -> _Mean:
        # Names may come and go: what only some micro-batches return is a mean over those.
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Mean()
        if isinstance(entry, _Rows):
            raise _is_both(name)
        return entry

    def _take_rows(self, name: str, value: torch.Tensor) -> None:
        if value.layout is not torch.strided or value.is_nested or value.is_complex() or value.is_quantized:
            raise OutputError(name, _kind_of(value), "a dense tensor of real numbers")
        if not self._joins:
            return
        # Other rows would fail only at the window's end, by an error that names nothing.
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Rows()
        if isinstance(entry, _Mean):
            raise _is_both(name)
        if entry.parts and entry.parts[0].shape[1:] != value.shape[1:]:
            shapes = f"of shape {tuple(entry.parts[0].shape)} in one micro-batch and {tuple(value.shape)} in another"
            cure = "Select what counts, x[mask], or flatten it."
            raise OutputError(name, shapes, "tensors that differ in their first dimension alone", cure)
        # Copied, for it may be a small view of large activations, a buffer that the next forward writes to, or memory
        # of a CUDA graph that is run again.
        entry.parts.append(value.detach().clone())

    def absorb(self, others: Outputs) -> None:
        """Add means that were collected apart; nothing is computed, so that nothing can fail half-way."""
        for name, entry in others._entries.items():
            if isinstance(entry, _Mean):
                self._mean(name).absorb(entry)
        self.are_there = self.are_there or others.are_there

    def told(self) -> dict[str, _Mean | _Rows]:
        """Return those of this rank, for others to ``hear``."""
        return dict(self._entries)

    def hear(self, told: Sequence[dict[str, _Mean | _Rows]]) -> None:
        """Put those of all ranks in the place of this one's, in the order of the ranks."""
        # In the order of the ranks, which is that of the window's samples.
        self._entries = {}
        for entries in told:
            for name, entry in entries.items():
                if isinstance(entry, _Mean):
                    self._mean(name).absorb(entry)
                else:
                    for part in entry.parts:
                        self._take_rows(name, part)
        self.are_there = self.are_there or bool(self._entries)

    def means(self) -> dict[str, float | torch.Tensor]:
        """Return those that are means; they are kept."""
        return {name: entry.joined() for name, entry in self._entries.items() if isinstance(entry, _Mean)}

    def want(self, numbers: Numbers) -> None:
        """Ask for the means that are on a device, and for the rows where those are wanted on the host."""
        self._means = {name: mean for name, mean in self.means().items() if isinstance(mean, torch.Tensor)}
        numbers.want(self._means.values())
        self._copies = {}
        for name, entry in self._entries.items():
            if self.rows_to_host and isinstance(entry, _Rows):
                entry.parts = [entry.joined()]
                if (copy := _copy_of(entry.parts[0])) is not None:
                    self._copies[name] = copy
                    numbers.wait_for(entry.parts[0].device)

    def take_read(self, numbers: Numbers) -> None:
        """Take them as they were read."""
        for name, mean in self._means.items():
            self._entries[name] = entry = _Mean()
            entry.add(numbers.count(mean), 1.0)
        for name, copy in self._copies.items():
            self._entries[name] = rows = _Rows()
            rows.parts = [copy.clone()]  # it lies in pinned memory, which is scarce
        self._copies = {}

    def joined(self) -> dict[str, float | torch.Tensor]:
        """Return those of the window, and keep them no longer; of what lies on a device nothing is read."""
        found: dict[str, float | torch.Tensor] = {}
        for name in list(self._entries):
            # One after the other, so that at most one of them is there twice.
            found[name] = self._entries.pop(name).joined()
        return found


class _Rows:
    """Tensors that are joined along their first dimension."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []

    def joined(self) -> torch.Tensor:
        # A window in one piece has nothing to join, and the copy would double what it takes.
        if len(self.parts) == 1:
            return self.parts[0]
        device = self.parts[0].device
        return torch.cat([part.to(device) for part in self.parts])


class _Mean:
    """A mean of values, each of which is one over a count of its own."""

    __slots__ = ("_count", "_total", "_waiting")

    def __init__(self) -> None:
        self._total = self._count = 0.0  # of what is read already
        self._waiting: list[tuple[float | torch.Tensor, float | torch.Tensor]] = []  # of which something is on a device

    def add(self, value: float | torch.Tensor, count: float | torch.Tensor) -> None:
        """Add a value; one that counts nothing may be anything."""
        # What is on the host is added up at once, in float64 as Python's numbers are. To read what is on a device would
        # wait for it in each micro-batch: it waits for the window's end itself.
        if isinstance(count, torch.Tensor) or (isinstance(value, torch.Tensor) and count):
            self._waiting.append((value, count))
        elif count and not isinstance(value, torch.Tensor):
            self._total += value * count
            self._count += count

    def absorb(self, other: _Mean) -> None:
        """Add the values of another one."""
        self._total += other._total
        self._count += other._count
        self._waiting += other._waiting

    def joined(self) -> float | torch.Tensor:
        """Return the mean, on the device where a part of it is there; NaN where nothing counts."""
        if not self._waiting:
            return self._total / self._count if self._count else float("nan")
        # On the device there are few operations, however many micro-batches there were: one sum for each count, of
        # which plans have one or two.
        total: Any = self._total
        num_counted: Any = self._count
        alike: dict[float, list[torch.Tensor]] = {}
        counts: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for value, count in self._waiting:
            if isinstance(count, torch.Tensor):
                counts.append(count)
                values.append(value if isinstance(value, torch.Tensor) else torch.full_like(count, value))
            elif isinstance(value, torch.Tensor):
                alike.setdefault(count, []).append(value)
        for count, group in alike.items():
            total = total + torch.stack(group).sum() * count
            num_counted += count * len(group)
        # A value that counts nothing may be NaN, which no product with 0 takes away.
        if counts:
            weights = torch.stack(counts)
            total = total + torch.where(weights == 0, 0.0, torch.stack(values) * weights).sum()
            num_counted = num_counted + weights.sum()
        mean: torch.Tensor = total / num_counted
        return mean


def _scalar(name: str, value: object) -> float | torch.Tensor:
    """Return a scalar as a number, or as a tensor of its own on a device, which is not read yet."""
    # Of what is on the host there is nothing to wait for.
    if isinstance(value, torch.Tensor) and not value.ndim and not value.is_complex():
        if value.is_cpu:
            return float(value.tolist())  # type: ignore[arg-type]
        return value.detach().to(_wide(value.device), copy=True)
    if isinstance(value, Real | np.bool_):
        return float(value)
    raise OutputError(name, _kind_of(value), _ACCEPTED)


def _wide(device: torch.device) -> torch.dtype:
    """Return the dtype of means: Apple's GPU has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _kind_of(value: object) -> str:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else kind_of(value)


def _is_both(name: str) -> OutputError:
    cure = "Keep its dimension, also of a single sample: squeeze(-1) rather than squeeze()."
    accepted = "the same kind in each micro-batch"
    return OutputError(name, "a scalar in one micro-batch and a tensor with rows in another", accepted, cure)


def on_device(outputs: Joined, device: torch.device) -> dict[str, torch.Tensor]:
    """Return outputs as tensors: means as 0-dim ones on the device."""
    found: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            found[name] = value
        else:  # filled and not copied, for a copy from the host would wait for the device
            found[name] = torch.full((), value, dtype=_wide(device), device=device)
    return found


def placed(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of one number on the device, which it may have been read off."""
    # Filled and not copied, for a copy from the host would wait for the device.
    if not number.is_cpu or device.type == "cpu":
        return number
    return torch.full((), number.item(), dtype=number.dtype, device=device)


def read(
    loss: torch.Tensor, grad_norm: torch.Tensor | None, outputs: Joined
) -> tuple[float, float | None, dict[str, float | torch.Tensor]]:
    """Return the loss, the norm and the outputs of a window on the host, having waited for the device once."""
    found, numbers = dict(outputs), Numbers()
    scalars = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor) and not value.ndim}
    numbers.want([loss, grad_norm, *scalars.values()])
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.ndim and not value.is_cpu:
            copy = _copy_of(value)
            found[name] = value.to("cpu") if copy is None else copy
            if copy is not None:
                numbers.wait_for(value.device)
    numbers.read()
    # Pinned memory, in which such copies lie, is scarce.
    found = {
        name: value.clone() if isinstance(value, torch.Tensor) and value is not outputs[name] else value
        for name, value in found.items()
    }
    found |= {name: numbers.count(value) for name, value in scalars.items()}
    return numbers.count(loss), None if grad_norm is None else numbers.count(grad_norm), found


def _copy_of(rows: torch.Tensor) -> torch.Tensor | None:
    """Return a copy on the host that is only asked for, and arrives before what is asked for after it.

    None where there is nothing to copy, or no such copy: on Apple's GPU one may read what is freed (pytorch#189690).
    """
    return None if rows.is_cpu or rows.device.type == "mps" else rows.to("cpu", non_blocking=True)
