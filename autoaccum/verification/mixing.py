"""Finds by what samples meet that no rows can be told apart by: a collate_fn that mixes them, and a broadcast."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoaccum.data.randomness import collated_otherwise
from autoaccum.verification.findings import Part
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.samples import are_equal, shapes_of


def mixes(measurement: Measurement) -> bool:
    """Return whether the batch that samples are collated to holds another first row where the others change places."""
    others = list(range(1, measurement.num_samples))
    for way in range(1, 4):  # what is drawn may mix the first sample with itself
        made = []
        for order in ((0, *others), (0, *others[1:], *others[:1]), (0, *others)):
            measurement.state.restore()  # generators that a collate_fn keeps too
            with collated_otherwise(way):
                made.append(measurement.make(order))
        measurement.state.restore()
        if not are_equal(made[0], made.pop()):  # it draws by what nobody can put back
            return False
        first, second = (
            [measurement.parts.rows(batch, (index,)) for index in range(len(others) + 1)] for batch in made
        )
        # One that sorts samples has the same rows at other places, and one that draws lengths pads otherwise.
        if shapes_of(first[0]) == shapes_of(second[0]) and not any(are_equal(row, second[0]) for row in first):
            return True
    return False


class _Shapes(TorchFunctionMode):
    """Looks for a column of samples beside a row of them, as outputs (n, 1) beside targets (n,) are."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self.are_broadcast = False
        """Whether there was such a pair, of which an operation makes a square."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shapes = {tuple(arg.shape) for arg in args[:2] if type(arg) is torch.Tensor and not arg.is_nested}
        result = func(*args, **(kwargs or {}))
        # Whoever means it writes both dims, as x[:, None] - x[None, :]. A product of matrices makes no square of them.
        if shapes == {(self._num_samples, 1), (self._num_samples,)}:
            makes_square = isinstance(result, torch.Tensor) and result.shape in ((), (self._num_samples,) * 2)
            makes_square = makes_square and result.dtype != torch.bool  # labels[:, None] == labels means all pairs
            self.are_broadcast = self.are_broadcast or makes_square
        return result


def broadcasts(measurement: Measurement) -> bool:
    """Return whether the loss sets each sample beside all others for a dim of 1 that one of two tensors has."""
    # With two numbers of samples, for a dim of features may have one of them.
    parts = [tuple(range(measurement.num_samples - fewer)) for fewer in (0, 1)]
    return all(_is_broadcast(measurement, part) for part in parts if len(part) > 1)


def _is_broadcast(measurement: Measurement, part: Part) -> bool:
    shapes = _Shapes(len(part))
    try:
        with shapes:
            measurement.loss_of(part, measurement.replaying(part))
    except Exception:  # what the user's code does not bear says nothing
        measurement.state.restore()
        return False
    return shapes.are_broadcast
