"""Reads an autograd graph: which operations made a tensor, and which constants, shapes and counts they kept.

Nodes name their operation and what they saved for the backward; PyTorch documents both ("Saved tensors" in its notes on
autograd mechanics). Nothing here runs a node or changes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from autoaccum.step.readback import read_now
from autoaccum.step.terms import Count, Division, Factor, Hypothesis, Reduction, Term, divide

ADDITIONS = {"Add", "Rsub", "Sub"}
"""Operations that add two inputs, or subtract them."""
RESHAPED = {
    "Alias",
    "Clone",
    "Neg",
    "Permute",
    "Squeeze",
    "T",
    "ToCopy",
    "Transpose",
    "UnsafeView",
    "Unsqueeze",
    "View",
}
"""Operations on one input that keep its numbers: their order, their type or their sign may change."""

MEAN, SUM = 1, 2
"""What a loss's node saves for ``reduction="mean"`` and ``reduction="sum"``: the values of at::Reduction."""

# What penalties and the learnt weights of losses are made of. Whatever is not among these, such as Addmm or Embedding,
# counts as depending on the batch.
_OF_PENALTIES = (
    RESHAPED | ADDITIONS | {"Abs", "Amax", "Cat", "Clamp", "ClampMin", "Diagonal", "Div", "Exp", "HuberLoss"}
)
_OF_PENALTIES |= {"LinalgVectorNorm", "Log", "Maximum", "Max", "Mean", "Mm", "MseLoss", "Mul", "Norm", "Pow", "Relu"}
_OF_PENALTIES |= {
    "Select",
    "Sgn",
    "Sigmoid",
    "Slice",
    "SmoothL1Loss",
    "Softplus",
    "Sqrt",
    "Stack",
    "Sum",
    "Tanh",
    "Unbind",
}
_OF_PENALTIES |= {"Trace", "ViewAsReal"}

HALVES = (torch.bfloat16, torch.float16)
"""The floating-point types of 16 bits."""

# The attributes in which those operations keep an input that has no graph of its own.
_CONSTANTS = ("_saved_self", "_saved_other", "_saved_mat2", "_saved_target")


@cache
def _without_ending(name: str) -> str:
    return re.sub(r"Backward\d*$", "", name)


def operation_of(node: Any) -> str:
    """Return a node's name without its ending: Add for AddBackward0, and nothing for None."""
    # A Function of the user's may bear any name, that of an operation of PyTorch's too: it must not be taken for one.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return f"the autograd.Function {_without_ending(type(node).__name__)}"
    return _without_ending(node.name()) if node is not None else ""


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes that made a node's inputs; an input that is a constant has none."""
    return [child for child, _ in node.next_functions if child is not None]


# Of the process and not of a run: what one optimizer trains is data to no loss. Weakly, and by identity.
_HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()


def take_for_parameters(tensors: Iterable[torch.Tensor]) -> None:
    """Let tensors that an optimizer holds count as parameters, of whatever class they are."""
    for tensor in tensors:
        if not isinstance(tensor, nn.Parameter):
            _HELD[tensor] = None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or is trained as one."""
    return isinstance(tensor, nn.Parameter) or tensor in _HELD


def only_parameters(root: Any) -> bool:
    """Return whether what a node computes comes from parameters alone, by the operations that penalties are made of.

    No node says "data", but those that multiply with data save them. A constant of a parameter's own shape does not
    count as data: it may be the values that the parameter is drawn to, or how much each of its entries matters.
    """
    seen: set[Any] = set()
    shapes: set[tuple[int, ...]] = set()  # of the parameters
    constants: set[tuple[int, ...]] = set()  # the shapes of the tensors without a graph
    stack = [root]
    while stack:
        node = stack.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            # A leaf that is no parameter is an input that wants a gradient: data, unless an optimizer holds it.
            if not is_parameter(node.variable):
                return False
            shapes.add(tuple(node.variable.shape))
        elif operation_of(node) not in _OF_PENALTIES or any(_is_computed_again(node, name) for name in _CONSTANTS):
            return False
        else:
            saved: list[Any] = [getattr(node, name, None) for name in _CONSTANTS]
            constants.update(tuple(value.shape) for value in saved if _is_constant(value))
        stack.extend(inputs_of(node))
    return constants <= shapes


def _is_computed_again(node: Any, name: str) -> bool:
    """Return whether asking for a saved tensor would run a checkpointed block again, and hold what it had not kept."""
    raw = getattr(node, f"_raw{name}", None)
    # Other hooks, as our own and those of save_on_cpu, keep the tensor itself, or one on the CPU and what it was.
    return raw is not None and raw.unpack_hook is not None and not isinstance(raw.data, torch.Tensor | tuple)


def _is_constant(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and not value.requires_grad


def signed(number: int) -> int:
    """Return a number that a node saved with its sign: autograd shows -1 as 2**64 - 1."""
    return number - 2**64 if number >= 2**63 else number


def sizes_of(node: Any) -> tuple[int, ...]:
    """Return the shape of the tensor that a sum or a mean reduces."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return tuple(node._saved_self.shape if sizes is None else sizes)


def dimensions_of(node: Any, count: int) -> list[int]:
    """Return the dimensions, out of ``count``, that a sum or a mean reduces."""
    dimensions = getattr(node, "_saved_dim", None) or range(count)  # all of them where none are named
    return [signed(d) % count for d in dimensions]


def constant_beside(node: Any, index: int) -> tuple[float | torch.Tensor, bool] | None:
    """Read the constant that a product or a quotient takes beside its input ``index``.

    Returns:
        Its value, and whether it was a Python number; None when it has several elements, which are weights.
    """
    other = node._saved_other if index == 0 else node._saved_self
    value: float | torch.Tensor
    if not isinstance(other, torch.Tensor):
        value, was_number = float(other), True
    elif other.numel() != 1:
        return None
    else:
        value, was_number = value_of(other), is_number(other)
    if was_number and not math.isfinite(float(value)):  # the loss is not finite then, and shall be seen to be so
        return 1.0, True
    return value, was_number


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that a node saved was a Python number in the program."""
    if tensor.ndim or not tensor.is_cpu:
        return False
    # PyTorch marks such tensors, and shows the mark in nothing but type promotion: there they give way to the smallest
    # type of their kind, where a tensor of the program would not.
    small = torch.tensor(0, dtype=torch.float16 if tensor.is_floating_point() else torch.int8)
    return torch.result_type(small, tensor) == small.dtype


def value_of(count: torch.Tensor) -> float | torch.Tensor:
    """Read a tensor of one element where that waits for nothing, on the CPU; else return it as a 0-dim tensor."""
    if not count.is_cpu:
        exact = torch.float32 if count.device.type == "mps" else torch.float64  # MPS has no float64
        return count.reshape(()).to(exact)  # as a count has on the host, for 1 / 49 in 32 bits is not one over it
    # tolist() is no operation, as item() is: a dispatch mode, such as one that makes memory run out, would see and
    # fail on that.
    value = count.tolist()
    while isinstance(value, list):
        value = value[0]
    return float(value)


def has_halves(loss: torch.Tensor) -> bool:
    """Return whether anything in the graph of a loss was converted to 16 bits, as by an autocast."""
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = {*waiting}
    while waiting:
        node: Any = waiting.pop()
        if node.name() == "ToCopyBackward0" and any(one.dtype in HALVES for one in node._input_metadata):
            return True
        new = {*inputs_of(node)} - seen
        seen |= new
        waiting.extend(new)
    return False


class OwnHooks(saved_tensors_hooks):
    """Set hooks on saved tensors that the user has not asked for, without PyTorch's warning about them.

    PyTorch 2.14 warns about hooks around selective activation checkpointing, unless they have these two attributes.
    Tensors that the checkpoint itself holds bypass the hooks then, as in earlier versions.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], Any]) -> None:
        hook: Any = partial(pack)
        hook._checkpoint_internal, hook._user_hooks = True, None
        super().__init__(hook, unpack)


@contextmanager
def graph_alone() -> Iterator[None]:
    """Record, within it, graphs without what a backward would need.

    A loss can then be read in the memory that its forward takes under no_grad.
    """

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        # Counts and constants have one element, and their values are read; of activations the shape is enough, which
        # tensors on the meta device have without any memory.
        return tensor if tensor.numel() == 1 else tensor.to("meta")

    with torch.enable_grad(), OwnHooks(shape_of, lambda tensor: tensor):
        yield


Found = tuple[Any, Factor, Term]
"""The node by which a term enters a sum (None when it is all of the loss), all factors that it has there, and it."""

_LONGEST = 20_000
"""Steps of a walk: a graph of more is not a loss that a person wrote."""


class Walk:
    """A walk from the root of a loss, through what is linear, down to where its terms are reduced."""

    def __init__(self, num_samples: int) -> None:
        """Prepare to read the loss of a micro-batch of ``num_samples``."""
        self._num_samples = num_samples
        self._found: list[Found] = []
        self.divisions: list[Division] = []
        """Where something is divided by what is not read yet."""
        # Nodes yet to be visited, each with its summand of the loss and the constants on the way to it. A stack and no
        # recursion: a sum over a list of a thousand losses is a thousand additions deep.
        self._stack: list[tuple[Any, Any, Factor]] = []

    def terms(self, root: Any) -> list[Found]:
        """Find the terms of the loss whose node is ``root``; those of a sum in the order of its summands."""
        self._stack.append((root, None, Factor()))
        steps = 0
        while self._stack:
            node, summand, factor = self._stack.pop()
            steps += 1
            if steps > _LONGEST:
                return [(None, Factor(), Term(operation="a very long graph"))]
            operation = operation_of(node)
            if operation in ADDITIONS:
                self._add(node, factor)
            elif operation in ("Neg", *RESHAPED) or (operation == "Select" and node._saved_self_sym_sizes == (1,)):
                self._stack.append((inputs_of(node)[0], summand, factor))
            elif operation in ("Mul", "Div"):
                self._scale(node, operation, summand, factor)
            elif operation in ("Mean", "Sum") and not node._saved_self_sym_sizes:  # of what is a scalar already
                self._stack.append((inputs_of(node)[0], summand, factor))
            else:
                self._reduce(node, operation, summand, factor)
        return self._found

    def _add(self, node: Any, factor: Factor) -> None:
        alpha = getattr(node, "_saved_alpha", 1)  # torch.add(a, b, alpha=2) is a + 2 * b
        for index, (child, _) in reversed(list(enumerate(node.next_functions))):  # the first one ends up on top
            if child is not None:
                scaled = factor if index == 0 or alpha == 1 else factor.times("Mul", float(alpha), True)
                self._stack.append((child, child, scaled))

    def _scale(self, node: Any, operation: str, summand: Any, factor: Factor) -> None:
        indices = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
        if len(indices) == 2:
            # One of the two may be learnt, as in exp(-s) * loss + s: a constant within a window, which is the same in
            # all of its micro-batches and so is not asked for.
            learnt = [only_parameters(child) for child, _ in node.next_functions]
            if learnt == [False, True] or (learnt == [True, False] and operation == "Mul"):
                child = node.next_functions[learnt.index(False)][0]
                self._stack.append((child, summand, factor))
            else:
                self._found.append((summand, factor, _unknown(node)))
            return
        constant = constant_beside(node, indices[0])
        if (operation == "Div" and indices[0] == 1) or constant is None:  # one over the loss, or a weight a number
            self._found.append((summand, factor, _unknown(node)))
            return
        value, is_number = constant
        if isinstance(value, float) and value == 0 and operation == "Mul":
            return  # as in loss + 0.0 * outputs.sum()
        self._note_division(node, indices[0], operation, value)
        child = node.next_functions[indices[0]][0]
        self._stack.append((child, summand, factor.times(operation, value, is_number)))

    def _note_division(self, node: Any, place: int, operation: str, number: Count) -> None:
        # A number of the program, or of the host, is known by now: a mean over nothing is told from it at once.
        if isinstance(number, torch.Tensor):
            self.divisions.append(Division(node, place, operation == "Mul", number))

    def _reduce(self, node: Any, operation: str, summand: Any, factor: Factor) -> None:
        """Note the term that a node reduces a tensor to; the scalars of a list go back to the stack instead."""
        descent = _Descent(self._num_samples, factor)
        inner = node
        while descent.takes_in(inner, operation):
            if descent.number is not None:
                place = 0 if inner.next_functions[0][0] is not None else 1
                self._note_division(inner, place, operation, descent.number)
            inner = inputs_of(inner)[0]
            operation = operation_of(inner)
            if operation in ("Stack", "Cat") and descent.is_of_list(length := len(inner.next_functions)):
                if length == self._num_samples > 1:  # the list may be of losses, or of samples
                    term = Term(operation="a list as long as the batch")
                    self._found.append((summand, descent.factor, term))
                else:
                    self._split(inner, descent, summand)
                return
        self._found.append((summand, descent.factor, descent.term(node)))

    def _split(self, node: Any, descent: _Descent, summand: Any) -> None:
        """Put the scalars of a list on the stack, each perhaps with a weight of its own."""
        factor = replace(descent.factor, value=divide(descent.factor.value, descent.divisor))
        weights = descent.weights
        for index, (part, _) in enumerate(node.next_functions):
            if part is None:
                continue
            share = factor
            if weights is not None and weights.numel() == len(node.next_functions):
                share = replace(factor, value=factor.value * value_of(weights.flatten()[index]))
            # A list of one is what is in it.
            self._stack.append((part, part if len(node.next_functions) > 1 else summand, share))


class _Descent:
    """The way down from a node that makes a scalar of a tensor, and what the linear operations on it amount to.

    A plain class, for one is made for each term in each micro-batch.
    """

    __slots__ = (
        "_averaged",
        "_counts_items",
        "_num_samples",
        "_ones",
        "_shapes",
        "_summed",
        "_weights",
        "divisor",
        "factor",
        "number",
        "weights",
    )

    def __init__(self, num_samples: int, factor: Factor) -> None:
        self._num_samples = num_samples
        self.factor = factor
        self.divisor: Count = 1.0  # of the means alone; the constants are in the factor
        self.number: Count | None = None  # the constant that was taken in last, if that is what the last node was
        self.weights: torch.Tensor | None = None  # what the numbers were multiplied with last, each by one of its own
        self._averaged: list[int] = []  # extents of the dimensions that were averaged
        self._summed: list[int] = []  # and of those that were summed
        self._shapes: list[tuple[int, ...]] = []  # of what was reduced, the first one nearest to the loss
        self._counts_items = False  # whether the divisor is that of a loss which counts its targets
        # Weights of the samples: their sum, the least and the most, which may lie on a device, and how many there are.
        self._weights: list[tuple[torch.Tensor, int]] = []
        self._ones: list[Count] = []  # weights of one number

    def takes_in(self, node: Any, operation: str) -> bool:
        """Take a node in; return whether what lies under it is to be taken in as well."""
        self.number = None
        if operation in ("Mean", "Nansum", "Sum"):
            self._take_reduction(node, operation)
            return True
        if getattr(node, "_saved_reduction", 0) in (MEAN, SUM):
            self._take_loss(node)
            return False  # it reduces what it computed of each sample: under it nothing is linear
        # The first node is none of these: a product or a quotient that is a scalar has been walked through before.
        if operation in ("Mul", "Div") and len(inputs_of(node)) == 1:
            return self._take_constant(node, operation)
        return operation in RESHAPED

    def _take_reduction(self, node: Any, operation: str) -> None:
        sizes = sizes_of(node)
        dimensions = dimensions_of(node, len(sizes))
        extents = [sizes[d] for d in dimensions]
        if 0 in dimensions:
            # The samples are reduced under the weights, which then are not theirs, but of classes, say.
            self._weights.clear()
        if operation == "Mean":
            self._averaged.extend(extents)
            self.divisor = self.divisor * math.prod(extents)
        else:
            self._summed.extend(extents)
        self._shapes.append(sizes)

    def _take_loss(self, node: Any) -> None:
        """Take in one of PyTorch's losses that reduces by itself, such as mse_loss or nll_loss."""
        shape = tuple(node._saved_self.shape)
        total_weight = getattr(node, "_saved_total_weight", None)  # of the targets that nll_loss did not ignore
        if total_weight is not None:
            shape = (shape[0], *shape[2:])  # without the classes
        self._shapes.append(shape)
        if node._saved_reduction == SUM:
            self._summed.extend(shape)
            return
        self._averaged.extend(shape)
        self.divisor = self.divisor * (math.prod(shape) if total_weight is None else value_of(total_weight))
        self._counts_items = total_weight is not None

    def _take_constant(self, node: Any, operation: str) -> bool:
        """Take in a product with a constant, or a quotient; return whether the walk goes on under it."""
        index = 0 if node.next_functions[0][0] is not None else 1
        constant = constant_beside(node, index)
        if operation == "Div" and index == 1:
            return False  # the constant is divided by what lies under it, which is not linear
        beside = node._saved_other if index == 0 else node._saved_self
        # Of a tensor of one number a tensor of one number may be the weight, as it is in larger micro-batches; and of
        # the numbers of a single sample, as those of (samples, 1) are beside (samples, times).
        of_each = isinstance(beside, torch.Tensor) and beside.ndim > 0 and beside.numel() == 1
        of_each = of_each and (math.prod(self._shapes[-1]) == 1 or self._is_of_a_sample(beside))
        if constant is None or of_each:
            self._take_weights(beside, operation, of_each)
            return True
        value, is_number = constant
        if isinstance(value, float) and value == 0:
            return False
        self.factor, self.number = self.factor.times(operation, value, is_number), value
        return True

    def _is_of_a_sample(self, constant: torch.Tensor) -> bool:
        return self._num_samples == 1 and constant.ndim == len(self._shapes[-1])

    def _take_weights(self, weights: torch.Tensor, operation: str, of_each: bool) -> None:
        """Take in a constant for each number: it changes what is summed, and not what the sum is divided by."""
        self.weights = weights if operation == "Mul" else None
        is_of_samples = len(weights) == self._num_samples > 1 and weights.ndim == len(self._shapes[-1])
        if operation == "Mul" and is_of_samples and weights.is_floating_point() and not weights.is_meta:
            # By operations rather than over the list of all: there may be millions.
            self._weights.append((torch.stack([weights.sum(), weights.min(), weights.max()]), weights.numel()))
        elif of_each and not weights.is_meta:
            self._ones.append(value_of(weights))

    def is_of_list(self, length: int) -> bool:
        """Return whether nothing was reduced but a list of ``length`` scalars."""
        return len(self._shapes) == 1 and len(self._shapes[0]) == 1 and self._shapes[0][0] == length

    def term(self, node: Any) -> Term:
        """Return what was gathered as a term; ``node`` is the one that made the scalar."""
        if not self._shapes:
            return _unknown(node)
        return Term(
            means=self.divisor,
            factor=self.factor,
            averages=self._averages(),
            numbers=math.prod(self._shapes[-1]),
            counts_items=self._counts_items,
            weights=tuple(self._weights),
            ones=tuple(self._ones),
        )

    def _averages(self) -> bool:
        """Return whether samples look averaged."""
        n = self._num_samples
        if n in self._averaged or (self._averaged and n not in self._summed):
            return True
        # What the program divides by may be what the first dimensions of a shape hold, such as samples * times.
        counts = {count for shape in self._shapes for count in accumulate(shape, mul)} | {n}
        numbers = (*self.factor.divisors, *(1 / number for number in self.factor.multipliers))
        return any(math.isclose(abs(number), count) for number in numbers for count in counts if count > 1 or n == 1)


def _unknown(node: Any) -> Term:
    return Term(operation=operation_of(node))


def read_reduction(loss: torch.Tensor, num_samples: int, *, waits: bool = True) -> Reduction:
    """Read how the loss of a micro-batch was reduced; to be called before its backward.

    Args:
        loss: the loss.
        num_samples: samples of the micro-batch.
        waits: whether what terms are is read off a device at once, if it takes that; else it is left to
            ``reading.Numbers``.
    """
    root: Any = loss.grad_fn
    if root is None:
        return Reduction(num_samples, (Term(operation="no operation at all"),))
    if root.name() == "NllLossBackward0" and root._saved_reduction == MEAN:
        # Cross entropy, by far the most frequent loss. On an accelerator its count stays a tensor until the window's
        # end, for reading it would wait for the forward.
        weight = root._saved_total_weight
        return plain_mean(weight.tolist()) if weight.is_cpu else Reduction(weight.reshape(()))
    found = _walked(root, num_samples)
    return read_now(found) if waits and any(term.is_unread for term in found.terms) else found


def _walked(root: Any, num_samples: int) -> Reduction:
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
        return Reduction(counted, divisions=read_reduction(loss, num_samples, waits=False).divisions if is_late else ())
    return plain_mean(1.0) if hypothesis == "sum" else read_reduction(loss, num_samples, waits=waits)


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
