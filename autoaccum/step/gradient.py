"""The gradient of a window: dropped before it, scaled and clipped at its end, and the norm of each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from autoaccum.distributed.gradients import make_own
from autoaccum.memory.oom import insist
from autoaccum.planning.noise import Noise, Part, estimate
from autoaccum.step.loss_graph import is_one, kinds_of, take_for_parameters
from autoaccum.step.outputs import read
from autoaccum.step.terms import NONE, Conclusion, Reduction


@dataclass(kw_only=True, slots=True)
class Gradient:
    """A window whose gradient is in ``.grad``, complete, unscaled and clipped: ready for the optimizer."""

    sizes: tuple[int, ...]
    """The micro-batches it was made of."""
    loss: torch.Tensor
    """Mean over the window's items; on the device, unless it was read with all else that is known of the window."""
    grad_norm: torch.Tensor | None
    """2-norm before clipping; likewise. None where nothing counts."""
    items: float
    """What the loss is a mean over."""
    parts: tuple[Part, ...] = ()
    """What each micro-batch adds to it, where that is measured: before clipping."""
    noise: Noise | None = None
    """What they tell of the noise in it, where that is measured and can be told."""
    outputs: Mapping[str, float | torch.Tensor] = field(default_factory=dict)
    """What was returned beside the losses, by name; what lies on the device is there still."""
    overflow: tuple[bool, float] | None = None
    """Whether it is not finite for the loss scale, and that scale; None without a scaler, and where that is unread."""
    own: tuple[int, ...] = ()
    """Those of the micro-batches that this rank has run: all of them, where there is one."""
    # These are for an examiner alone: see ``step.verification``.
    is_finite: bool = True
    """Whether loss and gradient are, as far as they were read."""
    is_kept_from_none: bool = False
    """Whether the loss of a micro-batch that counts items is 0."""
    is_uncounted: bool = False
    """Whether a micro-batch in which the user counts nothing has a loss other than 0."""
    counts: tuple[float, ...] = ()
    """What each micro-batch counts; 0 where it was found to count nothing."""
    reductions: tuple[Reduction, ...] = ()
    """How the loss of each micro-batch was reduced."""
    conclusion: Conclusion | None = None
    """What these were taken for, seen together; None where nothing counts."""

    def of_first_samples(self, num_samples: int) -> Gradient:
        """Return what is known of the micro-batches that lie in the first ``num_samples``; all else as it is."""
        if num_samples >= sum(self.sizes):
            return self
        count = next(index for index in range(len(self.sizes)) if sum(self.sizes[: index + 1]) > num_samples)
        return replace(
            self,
            sizes=self.sizes[:count],
            counts=self.counts[:count],
            reductions=self.reductions[:count],
        )


def nothing_counts(sizes: tuple[int, ...], own: tuple[int, ...]) -> Gradient:
    """Return what comes of a window that has no item to learn from."""
    loss = torch.tensor(float("nan"), device="cpu")
    return Gradient(sizes=sizes, own=own, loss=loss, grad_norm=None, items=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """A window that went well, but whose end showed what should have been known at its beginning.

    A micro-batch had no items, and its backward may have given NaN; or terms beside a sum were taken for beside a mean.
    It is rolled back and run again in the same sizes.
    """

    sizes: tuple[int, ...]


class Signs:
    """What a window shows of its loss for next to nothing, compared with what earlier windows have shown.

    They tell when a measurement does not speak for a window any more, as where its graph has another number of nodes.
    """

    __slots__ = ("_graphs", "_late", "_modes", "have_changed", "next_look")

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._graphs: dict[int, tuple[object, ...]] = {}  # marks of that of a micro-batch, by its samples
        self._late: list[tuple[int, int, int, str]] = []  # those of which something is yet to be read
        self._modes: list[bool] | None = None  # of each module
        self.next_look = 1
        """The number of the next window whose forwards are looked at; for whoever looks to set."""
        self.have_changed = False
        """Whether a window has shown what was not seen before; for whoever has looked into it to take back."""

    def want_a_look(self, number: int) -> bool:
        """Return whether a window of that number, which was cut, is to be examined before it is stepped on."""
        return self.have_changed or number >= self.next_look

    def of_graph(self, num_samples: int, *marks: object) -> None:
        """Take what tells the graph of a micro-batch from another one: its number of nodes, its root, its terms."""
        if self._graphs.get(num_samples) != marks:
            # The first micro-batch of its size says nothing; a loop over samples has more nodes the more there are.
            self.have_changed = self.have_changed or num_samples in self._graphs
            self._graphs[num_samples] = marks

    def see_graph(self, index: int, num_samples: int, nodes: int, loss: torch.Tensor, reduction: Reduction) -> None:
        """Take the graph of a loss, of the micro-batch of that index; at the window's end, if something is unread."""
        root = "" if loss.grad_fn is None else loss.grad_fn.name()
        if not reduction.terms:
            if self._graphs.get(num_samples) != (nodes, root, ()):
                self.of_graph(num_samples, nodes, root, ())
        elif any(term.is_unread for term in reduction.terms):
            self._late.append((index, num_samples, nodes, root))
        else:
            self.of_graph(num_samples, nodes, root, kinds_of(reduction))

    def see_late(self, reductions: Sequence[Reduction]) -> None:
        """Take those that were put off, now that it is read how the losses of a window were reduced."""
        late, self._late = self._late, []
        for index, num_samples, nodes, root in late:
            self.of_graph(num_samples, nodes, root, kinds_of(reductions[index]))

    def begin(self) -> None:
        """Begin an attempt at a window."""
        self._late.clear()

    def forget_graphs(self) -> None:
        """Let graphs be compared from now on alone: by another hypothesis other things of them are read."""
        self._graphs.clear()

    def of_modes(self, modes: list[bool], *, has_other_layers: bool = False) -> None:
        """Take whether each module is in training mode, and whether there are others than before."""
        if modes != self._modes or has_other_layers:
            self.have_changed = self.have_changed or self._modes is not None
            self._modes = modes

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, for a checkpoint."""
        return {"graphs": dict(self._graphs), "modes": self._modes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._graphs, self._modes = dict(state["graphs"]), state["modes"]


def are_terms_apart(counts: Sequence[float], reductions: Sequence[Reduction]) -> bool:
    """Return whether a loss adds means over numbers of items that are in other proportions in each micro-batch."""
    found = [reduction.terms for reduction, count in zip(reductions, counts, strict=False) if count]
    if len({len(terms) for terms in found}) > 1:
        return True
    if len(found) < 2 or len(found[0]) < 2:
        return False
    columns = [[abs(float(term.divisor)) for term in terms] for terms in zip(*found, strict=True)]
    # What a sum was divided by is a constant, and of what is unknown nothing is known.
    means = [column for column, term in zip(columns, found[0], strict=True) if term.kind == "mean"]
    return any(not _are_counts(column) or not are_alike(means[0], column) for column in means)


def _are_counts(counts: Sequence[float]) -> bool:
    return all(map(math.isfinite, counts)) and any(counts)


def are_doubtful(sizes: Sequence[int], counts: Sequence[float], reductions: Sequence[Reduction]) -> bool:
    """Return whether graphs speak against one weight: by terms that are apart, or a divisor of 1, maybe a clamped 0."""
    if not [reduction for reduction in reductions if reduction.terms]:
        return False
    rows = zip(counts, reductions, strict=True)
    has_ones = any(count and is_one(reduction) for count, reduction in rows) and not are_alike(sizes, counts)
    return has_ones or are_terms_apart(counts, reductions)


def is_kept_from_none(
    sizes: Sequence[int],
    counts: Sequence[float],
    reductions: Sequence[Reduction],
    losses: Sequence[torch.Tensor | None],
) -> bool:
    """Return whether the loss of a micro-batch that counts items is 0, as where ``clamp(min=1)`` counts some for none.

    It is of no matter where each sample counts alike, unless tensors counted 1. PyTorch's own means over nothing are no
    numbers.
    """
    # tolist() reads a loss without an operation, which a dispatch mode would see and fail on.
    rows = zip(counts, reductions, losses, strict=True)
    of_none = [found.terms for count, found, loss in rows if count and loss is not None and not loss.tolist()]
    if not of_none:
        return False
    is_clamped = any(terms and terms[0].is_one and terms[0].is_counted for terms in of_none)
    return is_clamped or (any(of_none) and not are_alike(sizes, counts))


def are_alike(sizes: Sequence[float], counts: Sequence[float]) -> bool:
    """Return whether counts are the sizes, but for a factor."""
    if min(counts) == max(counts) and min(sizes) == max(sizes):
        return True
    each = sum(counts) / sum(sizes)
    return all(abs(count - size * each) <= 1e-6 * abs(size * each) for size, count in zip(sizes, counts, strict=True))


# How many nodes autograd has made in this thread so far: a node's number is what the next one would get.
count_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""() -> the number of the next node"""


class Gradients:
    """The ``.grad`` of everything that a window trains."""

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Set up for the parameters of modules, and for those that an optimizer holds."""
        # By identity, for parameters may be shared between modules, and compare by their values.
        own = {id(p): p for module in modules for p in module.parameters()}
        self._parameters: list[torch.Tensor] = list(own.values())
        self._known = set(own)
        self._now = self._parameters  # of this window
        # Asked for each window anew, for it may be given more parameters while training goes on.
        self._optimizer = optimizer
        self.are_in_use: Callable[[], bool] = lambda: False
        """Whether something else writes to gradients, which must stay where they are."""

    def trained(self) -> list[torch.Tensor]:
        """Return what gets gradients: the modules' parameters, and what the optimizer holds by now.

        Parameters may be added to an optimizer while training goes on.
        """
        groups = self._optimizer.param_groups
        # Nearly always there are none, and the list that is there already will do.
        others = {id(p): p for group in groups for p in group["params"] if id(p) not in self._known}
        if others:  # a graph shows them as leaves, which data may be too
            take_for_parameters(others.values())
        return [*self._parameters, *others.values()] if others else self._parameters

    def stepped(self) -> list[torch.Tensor]:
        """Return what the optimizer holds: what others get reaches no step, such as that of a GAN's other network."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def drop(self) -> None:
        """Set all gradients to None: a parameter that takes no part in a window must not look like one with zeros."""
        self._now = self.trained()
        for parameter in self._now:
            parameter.grad = None

    def add(self, accumulate: Callable[[], None]) -> None:
        """Run a backward, after which no gradient lies where another one does: what is next is done in place."""
        # To those that are there a backward adds in their place, which is their own already.
        new = [p for p in self._now if p.grad is None]
        accumulate()
        if new and not self.are_in_use():
            make_own(new)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the gradients in place, in one launch."""
        # What took no part in the window has no gradient.
        gradients = [p.grad for p in self.trained() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradients that reach the optimizer, on the device; coalesce sparse ones."""
        dense: list[torch.Tensor] = []
        are_plain = True
        for p in self.stepped():
            gradient = p.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                # An entry that several samples add to must not count several times: it is the square of their sum. In
                # place, for most optimizers that take sparse gradients do the same, where no window could be run again.
                p.grad = gradient.coalesce()
                gradient = p.grad._values()  # what it does not hold is 0, and adds nothing to a 2-norm
            dense.append(gradient)
            are_plain = are_plain and type(gradient) is torch.Tensor and gradient.is_cpu
            are_plain = are_plain and gradient.dtype is dense[0].dtype
        # The same to the bit in half the time of a tiny model's: on a CPU PyTorch's own sorts the gradients first.
        if dense and are_plain:
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))
            return total
        return get_total_norm(dense)

    @torch.no_grad()
    def clip(self, max_norm: float, norm: torch.Tensor | None = None) -> torch.Tensor:
        """Clip the gradients that reach the optimizer to a 2-norm, and return the ``norm`` that they had.

        This is ``torch.nn.utils.clip_grad_norm_``, which alone knows no norm of sparse gradients.
        """
        norm = self.norm() if norm is None else norm
        clip_grads_with_norm_(self.stepped(), max_norm, norm)
        return norm


def read_end(gradient: Gradient) -> tuple[float, float | None, Mapping[str, Any]]:
    """Return the loss of a window, its gradient's norm and its outputs on the host."""
    # On a CPU there is nothing to wait for, and one number after the other costs the least.
    if gradient.outputs or not gradient.loss.is_cpu:
        return insist(partial(read, gradient.loss, gradient.grad_norm, gradient.outputs), "the loss was read")
    loss, norm = insist(gradient.loss.item, "the loss was read"), gradient.grad_norm
    return loss, None if norm is None else insist(norm.item, "the norm was read"), {}


Before = list[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, and their gradients of the micro-batches before."""


Parts = tuple[tuple[Part, ...], Noise | None]
"""What each micro-batch adds to a window's gradient, and the noise in that."""


class Contributions:
    """Adds micro-batches to a gradient, and measures each."""

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self.come_in_pieces = False
        """Whether a backward has brought a gradient in pieces, or has written one itself, as later ones will."""

    def state_dict(self) -> dict[str, bool]:
        """Return what was seen, for a checkpoint; nothing where there is nothing to say."""
        return {"in_pieces": True} if self.come_in_pieces else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self.come_in_pieces = state.get("in_pieces", False)

    def add(
        self,
        accumulate: Callable[[], None],
        gradients: Gradients,
    ) -> torch.Tensor:
        """Run a backward, and return the 2-norm of what it adds to the gradient that reaches the optimizer.

        Args:
            accumulate: the backward.
            gradients: what it adds to.
        """
        if not self.come_in_pieces:
            parameters = gradients.stepped()
            if (whole := heard(accumulate, parameters)) is not None:
                return whole
            # That is no number for this one, whose window tells nothing; from the next one on it is measured otherwise.
            self.come_in_pieces = True
            return torch.full((), math.nan, device=parameters[0].device)
        before = set_aside(gradients.trained())
        accumulate()
        found = norm(gradients.stepped())
        add_back(before)
        return found


def heard(accumulate: Callable[[], None], parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Run a backward, and return the 2-norm of what it adds to the gradients of parameters, as ``norm`` does.

    It is None where what it adds to one of them has come in pieces, whose norms are not that of their sum, or past
    autograd.
    """
    before = [_mark(p) for p in parameters]
    found: dict[int, torch.Tensor] = {}
    in_pieces: list[int] = []

    def hear(index: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        (gradient,) = gradients
        if gradient is None:
            return
        if index in found:
            in_pieces.append(index)
            return
        gradient = _real_numbers(gradient)
        found[index] = torch.linalg.vector_norm(gradient, dtype=_wide(gradient))

    # Hooks of the nodes that add, and not of the tensors, where code of users' and what is compiled would heed them.
    nodes: list[Any] = [get_gradient_edge(p).node if p.requires_grad else None for p in parameters]
    handles = [node.register_prehook(partial(hear, index)) for index, node in enumerate(nodes) if node is not None]
    try:
        accumulate()
    finally:
        for handle in handles:
            handle.remove()
    # Some backwards write gradients themselves, and nothing of that is heard.
    is_missed = any(index not in found and _mark(p) != before[index] for index, p in enumerate(parameters))
    if in_pieces or is_missed:
        return None
    # In the order of the parameters, for they come in any where there are several devices.
    norms = [found[index] for index in sorted(found)]
    if not norms:
        return torch.zeros((), device=parameters[0].device)
    # Of several types, or on several devices, where a model is laid out over these.
    if len({(each.dtype, each.device) for each in norms}) > 1:
        wide = reduce(torch.promote_types, (each.dtype for each in norms))
        norms = [each.to(norms[0].device, wide) for each in norms]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def _mark(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return what changes where a gradient does, whoever changes it."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _wide(gradient: torch.Tensor) -> torch.dtype:
    # The square of a float16 number above 256 is infinite: norms are summed in no narrower type than float32.
    return gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32


def set_aside(parameters: Sequence[torch.Tensor]) -> Before:
    """Take the gradients from the parameters; until ``add_back`` the list is all that holds them."""
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    # With no gradient there, a backward puts its own in place and adds nothing.
    for p, _ in before:
        p.grad = None
    return before


@torch.no_grad()
def add_back(before: Before) -> None:
    """Add the gradients of now onto those that were set aside, in place, in one launch."""
    sums, addends = [], []
    for p, old in before:
        new, p.grad = p.grad, old
        # This micro-batch did not use the parameter: its sum stays as it is.
        if new is None:
            continue
        # A dense tensor cannot be added onto a sparse one in place; autograd adds them the other way round, too.
        if old.is_sparse and not new.is_sparse:
            p.grad = new.add_(old)
        else:
            sums.append(old)
            addends.append(new)
    if sums:
        torch._foreach_add_(sums, addends)


@torch.no_grad()
def norm(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of the gradients, 0-dim, of 32 bits or more, on the device: nothing waits for it."""
    gradients = [_real_numbers(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    wide = reduce(torch.promote_types, map(_wide, gradients))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=wide)))
    return norm


def _real_numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return the real numbers that a gradient is made of."""
    # An entry that several samples add to is listed several times until then, and the squares would be summed apart.
    if gradient.is_sparse:
        gradient = gradient.coalesce()._values()
    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def measured(stepped: Sequence[torch.Tensor], scaler: torch.amp.GradScaler | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the gradient that reaches the optimizer, and the scale of 16 bits that is in it."""
    whole = norm(stepped)
    return whole, torch.ones_like(whole) if scaler is None else scaler.scale(torch.ones_like(whole))


def parts(
    sizes: Sequence[int],
    counts: Sequence[float],
    norms: Mapping[int, torch.Tensor],
    whole: torch.Tensor,
    scale: torch.Tensor,
    *,
    is_sum: bool,
    correction: float,
) -> Parts:
    """Return what each micro-batch adds to a window's gradient, and the noise in that.

    Args:
        sizes: samples of each micro-batch.
        counts: what each counts; 0 where nothing.
        norms: of what each adds to the gradient, by its index.
        whole: the norm of the gradient, which is yet to be corrected.
        scale: that of 16 bits, which is in all norms.
        is_sum: whether the loss is a sum over samples.
        correction: what the gradient is multiplied with in the end.
    """
    # The one wait for the device.
    loss_scale, total, *added = torch.stack([scale, whole, *norms.values()]).tolist()
    unit = correction / loss_scale
    squares = {index: (norm * unit) * (norm * unit) for index, norm in zip(norms, added, strict=True)}
    sign = math.copysign(1, sum(counts))  # a loss that is minus a mean has counts below 0
    # A sum that may count none has no more of a gradient where it counts more.
    is_sum = is_sum or NONE in counts
    found = []
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        found.append((size, size if is_sum else sign * count, squares[index] if count else 0.0))
    return tuple(found), estimate(tuple(found), (total * unit) * (total * unit))
