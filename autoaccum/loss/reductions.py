"""Reads how a loss went from its items to one number, off its autograd graph.

What a mean was divided by is known exactly where the loss was computed, and autograd keeps it: cross entropy saves the
total weight of the targets that it did not ignore, a mean the shape of what it averaged, a division its divisor. So
labels that a model shifts, class weights and masks need no rule of their own, wherever the loss is computed. (PyTorch
documents what nodes save.)

The gradient is linear in the loss, so it is enough to walk down from the root through what is linear: additions,
constant factors, changes of type and shape, sums and means (walk.py). Each term of the loss is then a sum over the
micro-batch, s_j / d_j, with a divisor d_j that holds everything it was divided by: a count, a constant factor, or both
(terms.py).

Micro-batches weighted with d_j add up to the sum over the window, whatever d_j means. That matters only for what this
sum is divided by in the end (conclusions.py): by sum_j d_j if d_j is a count, as in a mean; by d, the same in all of
them, if it is a constant, as in a sum.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from autoaccum.loss.graph import MEAN, only_parameters
from autoaccum.loss.hypotheses import Hypothesis
from autoaccum.loss.reading import read_now
from autoaccum.loss.terms import Factor, Reduction, Term
from autoaccum.loss.walk import Walk


def read(loss: torch.Tensor, num_samples: int, *, waits: bool = True) -> Reduction:
    """Read how the loss of a micro-batch was reduced; to be called before its backward.

    Args:
        loss: the loss.
        num_samples: samples of the micro-batch.
        waits: whether what terms are is read off a device at once, if it takes that; else it is left to
            ``reading.Numbers``.
    """
    found = _read(loss, num_samples)
    return read_now(found) if waits and found.terms and any(term.is_unread for term in found.terms) else found


def _read(loss: torch.Tensor, num_samples: int) -> Reduction:
    root: Any = loss.grad_fn
    if root is None:
        return Reduction(num_samples, (Term(operation="no operation at all"),))
    if root.name() == "NllLossBackward0" and root._saved_reduction == MEAN:
        # Cross entropy, by far the most frequent loss. On an accelerator its count stays a tensor until the window's
        # end, for reading it would wait for the forward.
        weight = root._saved_total_weight
        return plain_mean(weight.tolist()) if weight.is_cpu else Reduction(weight.reshape(()))
    walk = Walk(num_samples)
    found = walk.terms(root)
    if not found:  # 0 * outputs.sum(), as is written where there is nothing to learn from
        return Reduction(0.0)
    terms: list[Term] = []
    constants: list[Factor] = []  # of terms of parameters alone
    for summand, factor, term in found:
        if summand is not None and only_parameters(summand):
            constants.append(factor)
        else:
            terms.append(term)
    if not terms:  # a loss without a model, such as ((parameter - targets) ** 2).mean() + ...
        terms, constants = [term for _, _, term in found], []
    known = [term.divisor for term in terms if term.numbers or not term.operation]
    return Reduction(
        # Where nothing is known samples count alike, and that it is a guess is announced.
        items=known[0] if known else num_samples,
        terms=tuple(terms),
        constants=tuple([factor.value for factor in constants]),
        # Of two samples, or of one, the number stands in many losses as a constant.
        is_shared_out=any(abs(number) == num_samples > 2 for factor in constants for number in factor.divisors),
        divisions=tuple(walk.divisions),
    )


def read_by(
    hypothesis: Hypothesis | None,
    loss: torch.Tensor,
    num_samples: int,
    *,
    counted: Any = None,
    waits: bool = True,
) -> Reduction:
    """Return how a loss was reduced: as its graph shows, unless that has no say in it any more.

    Args:
        hypothesis: what was measured; None where nothing was.
        loss: the loss.
        num_samples: samples of the micro-batch.
        counted: what the user counts, where that is what it goes by.
        waits: whether what terms are is read off a device at once.
    """
    if counted is not None:
        # Of a count that is not read yet it is not known whether it is 0, and the loss divided by that.
        is_late = isinstance(counted, torch.Tensor)
        return Reduction(counted, divisions=read(loss, num_samples, waits=False).divisions if is_late else ())
    return plain_mean(1.0) if hypothesis == "sum" else read(loss, num_samples, waits=waits)


def is_one(reduction: Reduction) -> bool:
    """Return whether a loss was divided by 1, which a count of none may have been kept from 0 by."""
    return any(term.is_one for term in reduction.terms)


def kinds_of(reduction: Reduction) -> tuple[str, ...]:
    """Return what each term of a loss looks like: another loss has others."""
    return tuple([term.kind + "1" * term.is_one for term in reduction.terms]) if reduction.terms else ()


@lru_cache(maxsize=1024)
def plain_mean(items: float) -> Reduction:
    """Return the reduction of one mean over so many items.

    There is one object for each count: counts recur, and to make one costs as much as to read the loss.
    """
    return Reduction(items)


def without_graph(reduction: Reduction) -> Reduction:
    """Return the same reduction, holding no node: a node would keep the graph's tensors in memory."""
    # A loss of one term, as most are, names none.
    return replace(reduction, divisions=()) if reduction.divisions else reduction
