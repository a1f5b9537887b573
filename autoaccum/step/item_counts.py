"""Weights micro-batches so that they add up to the gradient of their window.

The window's loss is the mean over its N items, L = (1/N) sum_i l_i. A micro-batch j of n_j items gives the mean over
its own, L_j = (1/n_j) sum_{i in j} l_i, so L = sum_j (n_j / N) L_j, and by linearity the same holds of the gradients.

N is known only when the whole window has been seen. So each micro-batch is weighted with n_j / G, G being a constant
guess of N, and the accumulated gradient is multiplied once by G / N at the end. With the number of samples as items
the guess is right and there is nothing to multiply; else it keeps magnitudes where float16 can hold them.

A loss that is a sum, divided by no count but perhaps by a constant d, has n_j = d in every micro-batch and N = d too.

The weights n_j / N sum to one, so a term that does not depend on the batch, such as a penalty on the parameters, is
counted once. Beside a sum they are all one, and each micro-batch would count such a term: those losses are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autoaccum.errors import ArgumentError, ArgumentTypeError
from autoaccum.memory.oom import is_out_of_memory
from autoaccum.step.infer_reduction import conclude
from autoaccum.step.readback import Numbers
from autoaccum.step.terms import (
    NONE,
    PLAIN_MEAN,
    PLAIN_SUM,
    Conclusion,
    Count,
    CountItems,
    Division,
    Hypothesis,
    Reduction,
    by_name,
    divisor_of,
)


class Tally:
    """The items of a window: weights while its micro-batches run, shares in the whole at its end."""

    def __init__(self, num_samples: int, *, deferred: bool, total: float = 0.0) -> None:
        """Begin a window of ``num_samples``; counts are read at once, or all at its end when ``deferred``.

        Where the window's ``total`` is known, it is the guess.
        """
        self._num_samples = num_samples
        self._deferred = deferred
        self._counts: list[Count] = []  # n_j of each micro-batch so far; 0 where it had no items
        self.late: list[int] = []
        """Indices of the micro-batches whose count is read at the end."""
        self.guess = total
        """G, what the window is taken to count: guessed from the first micro-batch that has items, and 0 until then."""

    @classmethod
    def of(cls, counts: Sequence[float], late: Sequence[int], *, num_samples: int, guess: float) -> Tally:
        """Return that of a window of which all is known: its counts, which of them came late, and the guess."""
        tally = cls(num_samples, deferred=False, total=guess)
        tally._counts, tally.late = list(counts), list(late)
        return tally

    def absorb(self, other: Tally) -> None:
        """Add the micro-batches of another rank, all of whose counts have been read."""
        before = len(self._counts)
        self._counts += other._counts
        self.late += [before + index for index in other.late]
        # Weighed by different guesses they do not add up: there is none that would be right for all of them.
        if other.guess and self.guess != other.guess:
            self.guess = math.nan if self.guess else other.guess

    def weight(
        self, num_samples: int, items: Count, dtype: torch.dtype = torch.float32, *, is_stated: bool = False
    ) -> Count | None:
        """Return the weight of the next micro-batch, n_j / G; None when it has no items.

        Args:
            num_samples: its samples.
            items: its items.
            dtype: of its loss, which the weight is rounded to.
            is_stated: whether the user counts them, so that they may be ``NONE``.
        """
        if isinstance(items, torch.Tensor):
            # Where nothing is known the first count is read, for the guess is made of it.
            if self._deferred and self.guess:
                self.late.append(len(self._counts))
                self._counts.append(items)
                weighed = divisor_of(items) if is_stated else items
                return weighed.to(torch.promote_types(dtype, torch.float32)) / self.guess
            items = items.item()
        self._counts.append(items)
        if not items or not math.isfinite(items):  # 0, or 0 / 0, the mean over nothing
            self._counts[-1] = 0.0
            return None
        if not self.guess:
            # Not from next to nothing, as a divisor kept from 0 is: all later weights would be immense.
            per_sample = items / num_samples if abs(items) > 1e-3 * num_samples else 1.0
            self.guess = per_sample * self._num_samples
            if dtype.itemsize == 2:
                # The weight is rounded to the loss's type, of 16 bits: a power of two leaves small counts exact.
                self.guess = power_of_two(self.guess)
        return (1.0 if items == NONE else items) / self.guess  # as ``divisor_of`` has it

    def read(self) -> list[float]:
        """Return the counts of all micro-batches so far; those that were deferred are read in one go."""
        counts = self.read_apart()
        for count in counts:
            if abs(count) > NONE:
                return counts
        # Where none counts more, ``NONE`` stands for 0 in all of them: the window has nothing to be divided by.
        return [0.0] * len(counts)

    def read_apart(self) -> list[float]:
        """Return the same of what is a part of a window, in which all may count ``NONE``."""
        # Asked five times a window, by runs with windows of 100 µs too, where nothing was ever deferred.
        if self.late and any(isinstance(count, torch.Tensor) for count in self._counts):
            numbers = Numbers()
            self.want(numbers)
            numbers.read()
            self.take_read(numbers)
        return self._counts  # type: ignore[return-value]

    def want(self, numbers: Numbers) -> None:
        """Ask for the counts that are yet to be read."""
        numbers.want(self._counts)

    def take_read(self, numbers: Numbers) -> None:
        """Take the counts that were waiting, as they were read."""
        counts = map(numbers.count, self._counts)
        self._counts = [count if math.isfinite(count) else 0.0 for count in counts]  # 0 / 0 counts nothing

    def late_zeros(self) -> list[int]:
        """Return the micro-batches whose count was read at the end, and turned out to be 0."""
        return [index for index in self.late if not self._counts[index]]

    def total(self, is_sum: bool) -> float:
        """Return what the window's sum is divided by: all of its items, or what each micro-batch's sum was."""
        counts = self.read()
        # The divisors of a sum are the same constant in all micro-batches, so that the first one stands for them.
        return next(filter(None, counts)) if is_sum else sum(counts)

    def loss(self, losses: list[torch.Tensor], is_sum: bool) -> torch.Tensor:
        """Return the loss of the window.

        Args:
            losses: of the micro-batches that had items.
            is_sum: whether they are sums over samples.
        """
        if len(losses) == 1:  # a window that is not cut, whose loss needs no arithmetic
            return losses[0].to(torch.promote_types(losses[0].dtype, torch.float32))
        stacked = torch.stack(losses)
        wide = torch.promote_types(stacked.dtype, torch.float32)  # in 16 bits a sum of losses would lose digits
        counts = list(filter(None, self.read()))
        # Most windows are of equal counts: these need no tensor of shares, which would have to be sent to the device.
        if min(counts) == max(counts):
            return stacked.sum(dtype=wide) if is_sum else stacked.mean(dtype=wide)
        total = self.total(is_sum)
        found = [divisor_of(count) / total for count in counts]
        if not stacked.is_cpu:  # where a tensor of them would be copied, for which the host waits
            return torch.stack(torch._foreach_mul(list(stacked.to(wide)), found)).sum()
        return stacked.to(wide) @ torch.tensor(found, dtype=wide, device=stacked.device)


def conclude_by(
    hypothesis: Hypothesis | None,
    stated: object,
    sizes: Sequence[int],
    reductions: Sequence[Reduction],
) -> Conclusion:
    """Return what a window is: as was measured, or as its micro-batches show.

    Args:
        hypothesis: what was measured; None where nothing was.
        stated: what the user says that the loss is.
        sizes: samples of each micro-batch.
        reductions: how each one's loss was reduced.
    """
    # What was measured holds for the run, whatever the graphs of a window look like.
    if hypothesis is not None:
        return PLAIN_SUM if hypothesis == "sum" else PLAIN_MEAN
    if len(sizes) > 1 and any(reduction.terms for reduction in reductions):
        found = conclude(sizes, reductions)
        return replace(found, is_sum=False) if stated == "mean" else found  # as the user says
    return PLAIN_MEAN


class Foresight:
    """What the next window is taken to count while it runs, where counts stay on a device: what the last one did."""

    def __init__(self, *, is_used: bool) -> None:
        """Begin with nothing known; where it is not used, nothing ever is."""
        # A guess need not be right, but where it is there is nothing to correct.
        self.is_used = is_used
        """Whether anything is foreseen."""
        self._last: tuple[float, int] | None = None  # what the last window counted that has committed, and its samples
        self._now: tuple[float, int] | None = None  # what this one did

    def begin(self, num_samples: int) -> float:
        """Begin an attempt at a window; return what it may count, or 0 where nothing is known."""
        self._now = None
        if self._last is None:
            return 0.0
        total, of_samples = self._last
        return total if num_samples == of_samples else total / of_samples * num_samples

    def see(self, total: float, num_samples: int, dtype: torch.dtype) -> None:
        """Take what a window has counted whose losses are of that type."""
        if self.is_used and abs(total) > 1e-3 * num_samples:
            # A power of two where weights are rounded to 16 bits, which leaves small counts exact.
            self._now = (power_of_two(total) if dtype.itemsize == 2 else total), num_samples

    def commit(self) -> None:
        """Keep it for the next window: only what commits may tell in what comes after it."""
        # One that is kept from a window that was rolled back would make its replay another one.
        self._last, self._now = self._now or self._last, None

    def state_dict(self) -> dict[str, tuple[float, int]]:
        """Return what is known, for a checkpoint: gradients depend on it in their last digits."""
        return {} if self._last is None else {"counted": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._last = state.get("counted") if self.is_used else None


def power_of_two(number: float) -> float:
    """Return the power of two that is nearest to a number, with its sign."""
    return math.copysign(2.0 ** round(math.log2(abs(number))), number)


class Seeds:
    """What backwards start from: the same as to multiply a loss, without an operation and its backward."""

    def __init__(self) -> None:
        """Begin with none."""
        self._seeds: dict[tuple[float, torch.dtype], torch.Tensor] = {}  # by weight, for weights recur

    def of(self, weight: Count, loss: torch.Tensor) -> torch.Tensor:
        """Return the seed of a loss that has this weight."""
        if isinstance(weight, torch.Tensor):
            return weight.to(loss.dtype)
        key = (weight, loss.dtype)
        if key not in self._seeds or self._seeds[key]._version:  # a backward of a user's own may have written to it
            if len(self._seeds) > 1000:  # weights of counted items hardly ever recur
                self._seeds.clear()
            self._seeds[key] = torch.full_like(loss, weight, requires_grad=False)
        return self._seeds[key]


def weighted_backward(loss: torch.Tensor, seed: torch.Tensor, divisions: Sequence[Division]) -> None:
    """Run the backward of a loss whose gradient begins with ``seed``.

    Args:
        loss: of a micro-batch.
        seed: its weight.
        divisions: in it, by numbers that may be 0.
    """
    if not divisions:  # nearly always
        torch.autograd.backward(loss, seed)
        return
    with guarded(divisions):
        torch.autograd.backward(loss, seed)


@contextmanager
def guarded(divisions: Sequence[Division]) -> Iterator[None]:
    """Let, within it, nothing through where a loss is divided by 0, which has no items: 0 / 0 is no number.

    What is divided by is not read for it. Where it is not 0 nothing changes.
    """
    # By hooks where it happens: there alone the gradient of one term can be told from that of others.
    handles = [division.node.register_hook(_guarding(division)) for division in divisions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _guarding(division: Division) -> Callable[[Any, Any], Any]:
    """Make a hook for a division that replaces its gradient by 0 where nothing is divided by anything."""

    def hook(to_inputs: tuple[torch.Tensor | None, ...], _: object) -> tuple[torch.Tensor | None, ...]:
        guarded, gradient = list(to_inputs), to_inputs[division.place]
        if gradient is not None:
            # A product with 0 would leave NaN as it is, so it is picked.
            is_some = division.number.isfinite() if division.is_product else division.number != 0
            guarded[division.place] = torch.where(is_some, gradient, torch.zeros_like(gradient))
        return tuple(guarded)

    return hook


def count_items(num_items: CountItems, batch: Any) -> Count | dict[str, Count]:
    """Count the items of a micro-batch as the user does; of several losses those of each.

    Raises:
        ArgumentError: a count is negative, or not a number.
    """
    # A function may count one loss or several: what it returns tells.
    if callable(num_items):
        counted = num_items(batch)
    else:
        counted = {name: count(batch) for name, count in by_name(num_items).items()}
    if isinstance(counted, Mapping | list | tuple):
        return {name: _counted(f"num_items(micro-batch)[{name!r}]", items) for name, items in by_name(counted).items()}
    return _counted("num_items(micro-batch)", counted)


def count_each(num_items: CountItems, batch: Any) -> dict[str, Count]:
    """Count the items of each of several losses; return nothing where the user counts those of one."""
    counted = count_items(num_items, batch)
    return counted if isinstance(counted, dict) else {}


def never_zero(num_items: Any) -> Any:
    """Make a ``num_items`` that counts ``NONE`` where it would count 0; of several by name, each is made one."""
    if isinstance(num_items, Mapping):
        return {name: never_zero(one) for name, one in num_items.items()}
    if isinstance(num_items, list | tuple):
        return [never_zero(one) for one in num_items]
    return lambda batch: _without_zero(num_items(batch))


def _without_zero(counted: Any) -> Any:
    if isinstance(counted, Mapping):
        return {name: _without_zero(one) for name, one in counted.items()}
    if isinstance(counted, list | tuple):
        return [_without_zero(one) for one in counted]
    if isinstance(counted, torch.Tensor) and counted.device.type != "cpu":  # not read: see ``_counted``
        wide = counted.to(torch.promote_types(counted.dtype, torch.float32))
        return torch.where(wide == 0, NONE, wide)
    try:
        return float(counted) or NONE
    except (TypeError, ValueError, RuntimeError) as error:  # it is no count, as whoever checks it says
        if is_out_of_memory(error):
            raise
        return counted


def _counted(argument: str, counted: Any) -> Count:
    if isinstance(counted, torch.Tensor) and counted.numel() == 1 and counted.device.type != "cpu":
        # Not read here, and so not checked: reading would wait for the device in every micro-batch.
        # It may be a tensor that is written to again, so it is copied.
        return counted.detach().reshape(()).clone()
    try:
        return _checked_count(argument, float(counted))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ArgumentError) or is_out_of_memory(error):  # reading a tensor may be where memory runs out
            raise
        accepted = "a count for each micro-batch, such as (labels != -100).sum()"
        raise ArgumentTypeError(argument, counted, accepted) from None


def _checked_count(argument: str, items: float) -> float:
    if not 0 <= items < float("inf"):
        raise ArgumentError(argument, items, "a count of at least 0")
    return items
