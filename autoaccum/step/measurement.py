"""Measures whether cut windows have the gradient of whole ones: a few samples, whole and in three cuts.

The real transaction runs both, with the run's weights, in training mode, in the type of the parameters, not compiled.
Each part is given its own samples' rows of what the whole has drawn. Of all that nothing remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoaccum.planning.attempts import Piece
from autoaccum.step.findings import Cut, NotFiniteError, Outcome, Part, ZeroGradientError
from autoaccum.step.gradient import Gradient, Repeat
from autoaccum.step.item_counts import count_items
from autoaccum.step.job import Job
from autoaccum.step.loss_graph import HALVES, has_halves, read_reduction, without_graph
from autoaccum.step.measured_samples import Parts, Stretch, cuts_of
from autoaccum.step.rng_replay import Constants, Recording, Replaying, drawing_nothing
from autoaccum.step.rounding import (
    OF_STATE,
    TOLERANCE,
    Error,
    any_of,
    error_of,
    full_precision,
    loss_tolerance_of,
    names_of,
    tolerance_of,
    widen,
    widened,
)
from autoaccum.step.snapshot import Gradients, State
from autoaccum.step.terms import NONE, Hypothesis, Reduction
from autoaccum.step.transaction import Transaction

_CPU = torch.device("cpu")


_MOST_RUNS = 6
"""Runs of a cut, whose end may show what should have been known at its beginning."""
_ALIKE = 1e-3
"""The part of a change up to which another one is the same but for rounding."""
_DIGITS = 16
"""The same as a multiple of what a type rounds by, for state that has come to rest."""


def _starts(parts: Sequence[Part]) -> list[int]:
    return [sum(map(len, parts[:index])) for index in range(len(parts))]


class _ForwardOnly(Transaction):
    """A transaction that adds up losses, and no gradients."""

    def _backward(self, accumulate: Callable[[], None], size: int) -> None:
        return


class Remains:
    """What the whole leaves: the values of tensors that it has written to, and of buffers that it has replaced."""

    def __init__(self, state: State) -> None:
        """Begin with how things are, as it is remembered."""
        self._state = state
        # A buffer is known by its place, for another tensor may be put there, but for that of a scripted module.
        self._buffers = [
            (layer._buffers, name, one)
            for layer in state.layers
            if isinstance(layer._buffers, dict)
            for name, one in layer._buffers.items()
            if one is not None
        ]
        self._whole: dict[int, torch.Tensor] = {}

    def take(self) -> None:
        """Take what the whole has left."""
        self._whole = self._left()

    def others(self) -> list[torch.Tensor]:
        """Return the tensors, as they were, in whose place there are other values now than the whole has left.

        Those of a momentum encoder are the same, which moves by the weights alone and once; those of a queue depend on
        samples, and running statistics move as often as a forward is run.
        """
        left = self._left() if self._whole else {}
        return [
            tensor
            for tensor, before in self._state.values()
            if id(tensor) in left.keys() & self._whole.keys()
            and _is_another(left[id(tensor)], self._whole[id(tensor)], before)
        ]

    def _left(self) -> dict[int, torch.Tensor]:
        """Return the values that have moved, by the ids of the tensors that they were in."""
        now = {id(one): one for one in self._state.moved()}
        for held, name, one in self._buffers:
            value = held.get(name)
            if value is not None and value is not one:
                now[id(one)] = value
        return {place: one.detach().to("cpu", copy=True) for place, one in now.items()}


def _is_another(value: torch.Tensor, whole: torch.Tensor, before: torch.Tensor) -> bool:
    if not value.shape == whole.shape == before.shape:
        return False
    rounding = _DIGITS * torch.finfo(whole.dtype).eps * _size(_wide(whole)) if whole.is_floating_point() else 0.0
    change = _size(_wide(whole) - _wide(before))
    return _size(_wide(value) - _wide(whole)) > max(_ALIKE * change, rounding)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _size(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).norm())


class Measurement:
    """A few samples of a window, whole and cut, under one state of the run; use it as a context."""

    def __init__(
        self,
        job: Job,
        window: Any,
        chosen: Sequence[int],
        *,
        written: Iterable[torch.Tensor] = (),
        rewind: Callable[[], None] = lambda: None,
        like: State | None = None,
        forward_only: bool = False,
        seed: int = 0,
    ) -> None:
        """Set up; entering it lays the state of the run aside.

        Args:
            job: what the run computes.
            window: the samples are its.
            chosen: their positions in it.
            written: parameters that forwards have been seen to write to.
            rewind: puts the state back that the window began with.
            like: that state; what has not moved since is not copied again.
            forward_only: compare losses, and leave gradients alone.
            seed: by which of several seeds they draw.
        """
        self.num_samples = len(chosen)
        self.shown: dict[Part, Reduction] = {}
        """What the graph of each part's loss shows."""
        self.moved: list[torch.Tensor] = []
        """What forwards write to, and the next one may read."""
        self._contributing = 0  # the most parts of a cut that have added to it
        self.left: list[str] = []
        """The names of state that is another after a window that is cut than after the whole."""
        self._loss, self._wanted = torch.tensor(math.nan), list[torch.Tensor | None]()  # of the whole
        self.draws_foreign = False
        """Whether Python's or NumPy's generator was drawn from."""
        self._has_halves = False  # whether the graph of the whole holds numbers of 16 bits
        self.trained: set[int] = set()
        """The ids of the parameters that have a gradient."""
        self.is_rounded = False
        """Whether parameters have 16 bits."""
        self._draws: Recording | Constants | None = None
        self.parts = Parts(job, window, chosen)
        """What makes batches of them."""
        self._written = list(written)
        self._rewind = rewind
        self._like = like
        self._forward_only, self._seed = forward_only, seed
        # Not compiled, and not in 16 bits: there right and wrong cannot be told apart.
        self.job = replace(job, model=getattr(job.model, "_orig_mod", job.model), precision="fp32")

    def __enter__(self) -> Measurement:
        """Lay the state of the run aside."""
        kind = _ForwardOnly if self._forward_only else Transaction
        # It has a snapshot of its own, taken as things are.
        self._transaction = kind(self.job)
        self._transaction.outputs.are_unwanted = True
        self.parameters = self._transaction.trained()
        self.names = names_of(self.parameters, self.job.modules)
        tolerance = loss_tolerance_of if self._forward_only else tolerance_of
        self.tolerance = tolerance(self.parameters)
        self.is_rounded = any(p.dtype in HALVES for p in self.parameters)
        # As things are, and as they were when the window began: what it has moved is not to be hidden by that.
        self._after = self._remember(self._like)
        self._gradients = Gradients(self.parameters)
        try:
            self._rewind()
            self.state = self._remember(self._after)
            self._remains = Remains(self.state)
        except BaseException:  # nobody leaves what was not entered
            self._after.restore()
            self._gradients.restore()
            raise
        self._stack = ExitStack()
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._stack.enter_context(full_precision(self.job.device))
        return self

    def __exit__(self, *raised: object) -> None:
        """Put the state of the run back."""
        self._stack.close()
        self._after.restore()
        self._gradients.restore()
        # Its forward holds this, which holds it: what is laid aside would stay until garbage is collected.
        del self._transaction.forward, self._transaction

    def _remember(self, like: State | None) -> State:
        return State(self.job.modules, self.job.functions, self.job.device, self.parameters, self._written, like)

    def make(self, part: Part) -> Any:
        """Return some of the samples as a batch, as the window makes it of them alone, on the device."""
        return self.parts.make(part)

    def collates_anew(self) -> bool:
        """Return whether the same samples make another batch each time; from then on parts are rows of one batch."""
        return self.parts.collates_anew(self._put_back)

    def run_whole(self) -> None:
        """Run the samples whole, and keep what they draw and their gradient.

        Raises:
            ZeroGradientError: it is 0, or there is none.
        """
        recording = self._record()
        if recording.has_fused:
            # The same attention, by operations that show what they draw; it takes more memory.
            self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._record()

    def _record(self) -> Recording:
        # To watch operations takes several times as long as most of them, and is of use only where something is drawn.
        self._draws = recording = self._recording()
        if not self._whole(is_watched=False):
            self._draws = recording = self._recording()
            self._whole()
        return recording

    def _recording(self) -> Recording:
        held = self.state.generators()
        return Recording(self.job.device, keeps_wide=not self.is_rounded, held=held, seed=self._seed)

    def _whole(self, *, is_watched: bool = True) -> bool:
        """Run the samples whole; return False where that is to be watched, and was not."""
        # In one piece a window's weight is 1, whatever its loss is a mean over.
        draws = self._draws
        assert draws is not None
        self._has_halves = False
        context = draws if is_watched else nullcontext()
        gradient = self._run((tuple(range(self.num_samples)),), "sum", self.make, lambda _: context)
        if not is_watched and (self._has_halves or draws.has_moved()):  # type: ignore[union-attr]
            for p in self.parameters:
                p.grad = None
            self._put_back()
            return False
        self.draws_foreign = self.draws_foreign or self.state.foreign_draws()
        self.moved = self.state.moved()
        self._remains.take()
        if self.moved and not self._forward_only and self.tolerance < TOLERANCE:
            self.tolerance = OF_STATE
        self._loss = gradient.loss.detach()
        if not math.isfinite(self._loss) or self.is_divided_by_none():
            self._put_back()
            raise NotFiniteError
        self._wanted = [p.grad for p in self.parameters]
        self.trained = {id(p) for p in self.parameters if p.grad is not None}
        for p in self.parameters:
            p.grad = None
        self._put_back()
        return True

    def is_divided_by_none(self) -> bool:
        """Return whether a sum of all samples is divided by a count of none."""
        if self.job.num_items is None:
            return False
        counted = count_items(self.job.num_items, self.make(tuple(range(self.num_samples))))
        return NONE in (map(float, counted.values()) if isinstance(counted, dict) else [float(counted)])

    def cuts(self, smallest: int) -> list[Cut]:
        """Return cuts of the samples into parts of at least so many."""
        return cuts_of(self.num_samples, smallest)

    @property
    def has_draws(self) -> bool:
        """Return whether something is drawn, and rows of all of it were taken."""
        return self.draws_anything and self._draws.has_rows  # type: ignore[union-attr]

    @property
    def draws_anything(self) -> bool:
        """Return whether something is drawn."""
        return isinstance(self._draws, Recording) and bool(self._draws.draws)

    @property
    def draws_once(self) -> bool:
        """Return whether parts were given what was drawn once for all samples, which each would draw by itself."""
        return isinstance(self._draws, Recording) and bool(self._draws.shared) and all(self._draws.shared)

    @property
    def hides_draws(self) -> bool:
        """Return whether what is drawn was not found to be each sample's own: constants stood for it, or it is not
        PyTorch's.
        """
        return isinstance(self._draws, Constants) or self.draws_foreign

    def with_constants(self) -> None:
        """Run the samples whole once more, with constants in place of draws; they stand for those of the cuts too."""
        self._draws = Constants(keeps_wide=not self.is_rounded)
        self._whole()

    def run(self, cuts: Sequence[Cut], hypothesis: Hypothesis | None, *, stop_above: float = math.inf) -> Outcome:
        """Run the samples in cuts by a hypothesis, and compare with the whole.

        Args:
            cuts: the cuts.
            hypothesis: how parts add up.
            stop_above: an error that is enough to know.

        Raises:
            UnalignedError: the draws of a part are not found among those of the whole.
        """
        errors: list[Error] = []
        self._contributing = 0
        for cut in cuts:
            gradient = self._run(cut, hypothesis, self.make, self.replaying)
            errors.append(self._error(gradient))
            for p in self.parameters:
                p.grad = None
            if len(cut) > 1 and not self.left:
                self.left = names_of(self._remains.others(), self.job.modules, other="a tensor in an attribute")
            self._put_back()
            if not errors[-1].relative <= stop_above:
                break
        worst = max(errors, key=lambda error: math.inf if math.isnan(error.relative) else error.relative)
        return Outcome(
            hypothesis=hypothesis,
            is_vacuous=self._contributing < 2,
            error=worst.relative,
            tensor=None if worst.tensor is None else self.names[worst.tensor],
            errors=tuple(error.relative for error in errors),
            tensors=dict(zip(self.names, worst.of_tensors, strict=False)),
        )

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Compute in 64 bits within it, the whole as well."""
        kept = self._draws, self._loss, self._wanted
        try:
            with widened(self.parameters, self.job.modules), self.parts.converting(widen):
                self._record()
                yield
        finally:
            self._draws, self._loss, self._wanted = kept
            self._put_back()

    def _error(self, gradient: Gradient) -> Error:
        if self._forward_only:
            found, wanted = float(gradient.loss), float(self._loss)
            return Error(abs(found - wanted) / max(abs(wanted), 1e-12), None)
        gradients = [p.grad for p in self.parameters]
        error = error_of(gradients, self._wanted)
        if error is not None:
            return error
        if not any(g is not None and any_of(g) for g in gradients):
            raise ZeroGradientError
        return Error(math.inf, None)  # the whole has a gradient of 0, and the cut has not

    def replaying(self, part: Part) -> AbstractContextManager[Any]:
        """Return the context in which some samples are given what the whole has drawn for them."""
        if isinstance(self._draws, Recording):
            if self._draws.has_shown_nothing:
                return drawing_nothing()
            return Replaying(self._draws, part, self.num_samples, keeps_wide=not self.is_rounded)
        assert self._draws is not None  # the whole comes first
        return self._draws

    def _run(
        self,
        cut: Cut,
        hypothesis: Hypothesis | None,
        make: Callable[[Part], Any],
        draws_of: Callable[[Part], AbstractContextManager[Any]],
    ) -> Gradient:
        """Run a cut as a window; its gradient is in ``.grad``."""
        transaction = self._transaction
        transaction.hypothesis = hypothesis
        outcome: Gradient | Repeat = Repeat(sizes=())
        transaction.begin(Stretch(cut, make))
        for _ in range(_MOST_RUNS):
            for start, part in zip(_starts(cut), cut, strict=True):
                # The same for each: what is drawn once a batch, by whatever generator, is the same in all of them.
                transaction.snapshot.restore_random()
                transaction.forward = self._looking(part)
                with draws_of(part):
                    transaction.add(Piece(start, len(part)))
            self._contributing = max(self._contributing, transaction.num_contributing() if len(cut) > 1 else 0)
            outcome = transaction.finish()
            if isinstance(outcome, Gradient):
                break
            self._put_back()
            transaction.repeat()
        transaction.commit()
        assert isinstance(outcome, Gradient)
        return outcome

    def _looking(self, part: Part) -> Callable[[Any, int, int], torch.Tensor]:
        """Return a forward that keeps what the graph shows."""

        def forward(batch: Any, num_samples: int, window_samples: int) -> torch.Tensor:
            loss = self._transaction.plain_forward(batch, num_samples, window_samples)
            self.shown[part] = without_graph(read_reduction(loss, num_samples))
            if len(part) == self.num_samples and not self.is_rounded:
                self._has_halves = has_halves(loss)
            return loss

        return forward

    def _put_back(self) -> None:
        """Put the state back between two runs."""
        self.state.restore()
