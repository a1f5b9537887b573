"""Finds why a measurement has failed: what may be to blame is switched off, one after the other, and measured again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from autoaccum.data import batches
from autoaccum.data.dims import may_be_time_first
from autoaccum.data.randomness import collated_otherwise
from autoaccum.loss.coupling import batch_norms
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reductions import is_one
from autoaccum.verification.comparison import is_another
from autoaccum.verification.draws import Constants, UnalignedError, UnsettledError
from autoaccum.verification.findings import Cause, Cut, Part
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.samples import are_equal, shapes_of


class Suspect(NamedTuple):
    """Something that may be to blame."""

    name: Cause
    """What it is."""
    is_there: Callable[[Measurement], bool]
    """Whether there is any of it."""


def name_cause(measurement: Measurement, cuts: tuple[Cut, ...], hypothesis: Hypothesis) -> list[Cause]:
    """Return what makes the gradients of cut windows wrong: without all of it together they are right.

    Args:
        measurement: entered, and run.
        cuts: those that it failed in.
        hypothesis: by which it failed the least.

    Returns:
        The causes; empty where none of the suspects is to blame.
    """
    there = [suspect for suspect in _SUSPECTS if suspect.is_there(measurement)]
    # One alone, then all of them: where two are to blame, each looks innocent as long as the other one is there.
    for suspect in there:
        if _passes_without(measurement, cuts, hypothesis, [suspect.name]):
            return [suspect.name]
    everything = [suspect.name for suspect in there]
    if len(everything) > 1 and _passes_without(measurement, cuts, hypothesis, everything):
        return everything
    return []


def _passes_without(
    measurement: Measurement, cuts: tuple[Cut, ...], hypothesis: Hypothesis, causes: list[Cause]
) -> bool:
    """Measure with some suspects switched off; return whether the cuts have the gradient of the whole."""
    whole = tuple(range(measurement.num_samples))
    with _batch_norms_off(measurement, "batch norm" in causes), _hooks_off(measurement, "hooks" in causes):
        try:
            if "pairing" in causes:
                measurement.with_constants(keeps_order=True)
            else:
                measurement.run_whole()
            collated = measurement.make(whole) if "padding" in causes else None

            errors = []
            # A count of 1 that stands for none may be another reason why it fails, which is told apart.
            for ones_are_none in (False, True):
                outcome = measurement.run(
                    cuts,
                    hypothesis,
                    make=None if collated is None else partial(measurement.parts.rows, collated),
                    stop_above=measurement.tolerance,
                    around=measurement.state.restore if "state" in causes else None,
                    ones_are_none=ones_are_none,
                )
                errors.append(outcome.error)
                if outcome.error <= measurement.tolerance or not any(map(is_one, measurement.shown.values())):
                    break
        except (UnalignedError, UnsettledError):
            return False
        except Exception:  # a switch that the user's code does not bear clears nobody
            measurement.state.restore()
            return False
    return any(error <= measurement.tolerance for error in errors)


def pads(measurement: Measurement) -> bool:
    """Return whether a part, made into a batch of its own, has other shapes than its rows of the whole."""
    whole = measurement.make(tuple(range(measurement.num_samples)))
    # By the same hand as everywhere: of a list of images a row is an image.
    split = (measurement.job.split or batches.Rows()).known(whole, measurement.num_samples)
    for index in range(measurement.num_samples):
        alone, row = shapes_of(measurement.make((index,))), shapes_of(split(whole, index, 1))
        # Samples that are packed end to end are no rows of their batch: of one row the second is nothing.
        if row != shapes_of(whole) and all(0 not in shape for shape in row if shape is not None) and alone != row:
            return True
    return False


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


def is_time_first(measurement: Measurement) -> bool:
    """Return whether samples may lie in dim 1 of a batch that was cut in dim 0, and nobody has said where they lie."""
    whole = tuple(range(measurement.num_samples))
    # Whoever passes split= or batch_dim= has thought of it.
    is_said = measurement.job.split is not None and measurement.job.split.is_said
    return not is_said and may_be_time_first(measurement.make(whole))


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


def suspect_of(measurement: Measurement) -> Cause | None:
    """Return by what samples meet that cannot be switched off; None where neither shows."""
    if _broadcasts(measurement):
        return "broadcast"
    # Of what lies in dim 1 other rows are other times, whose order always matters.
    return "places" if not is_time_first(measurement) and _goes_by_places(measurement) else None


def _goes_by_places(measurement: Measurement) -> bool:
    """Return whether all samples have another loss in another order, as where each is mixed with that of a flip."""
    first, *others = range(measurement.num_samples)
    # Groups of BatchNorm are made by places, and that is meant.
    if len(others) < 3 or measurement.job.batch_norm.group > 1:
        return False
    # The second and the third in each other's place: by a flip, a roll, in halves or as neighbours, other pairs meet.
    whole, order = (first, *others), (first, others[1], others[0], *others[2:])
    draws = Constants(keeps_wide=not measurement.is_rounded)
    try:
        loss, ordered, again = (measurement.loss_of(part, draws) for part in (whole, order, whole))
        with measurement.nudged():
            nudged = measurement.loss_of(whole, draws)
    except Exception:  # what the user's code does not bear says nothing
        measurement.state.restore()
        return False
    # What counts its calls where nothing puts it back has another loss each time.
    is_rounding = loss != again or abs(loss - ordered) <= _ROUNDING * abs(loss - nudged)
    return not is_rounding and is_another(loss, ordered, measurement.parameters)


_ROUNDING = 100
"""Times that what a last bit makes out is what another order does: losses may cancel but for rounding."""


def _broadcasts(measurement: Measurement) -> bool:
    """Return whether the loss sets each sample beside all others for a dim of 1 that one of two tensors has."""
    # With two numbers of samples, for a dim of features may have one of them.
    parts = [tuple(range(measurement.num_samples - fewer)) for fewer in (0, 1)]
    return all(_is_broadcast(measurement, part) for part in parts if len(part) > 1)


def _is_broadcast(measurement: Measurement, part: Part) -> bool:
    measurement.shown.pop(part, None)  # or it would not be run again
    shapes = _Shapes(len(part))
    try:
        with shapes:
            measurement.shown_of(part)
    except Exception:  # what the user's code does not bear says nothing
        measurement.state.restore()
        return False
    return shapes.are_broadcast


@contextmanager
def _batch_norms_off(measurement: Measurement, is_off: bool) -> Iterator[None]:
    layers = [layer for layer in batch_norms(measurement.job.modules) if layer.training] if is_off else []
    for layer in layers:
        layer.training = False
    measurement.state.remember_attributes()
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
        measurement.state.remember_attributes()


@contextmanager
def _hooks_off(measurement: Measurement, is_off: bool) -> Iterator[None]:
    hooks = [p._backward_hooks for p in measurement.parameters if p._backward_hooks] if is_off else []
    kept = [dict(held) for held in hooks]
    for held in hooks:
        held.clear()
    try:
        yield
    finally:
        for held, before in zip(hooks, kept, strict=True):
            held.update(before)


_SUSPECTS = (
    Suspect("padding", pads),
    Suspect("batch norm", lambda m: any(layer.training for layer in batch_norms(m.job.modules))),
    Suspect("state", lambda m: True),  # which may be anywhere
    Suspect("hooks", lambda m: any(p._backward_hooks for p in m.parameters)),
    Suspect("pairing", lambda m: m.draws_orders),
)
