"""Measures whether joined windows have the gradient of whole ones, and which modules are opened for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from autoaccum.data.base import Window
from autoaccum.events import Joined
from autoaccum.memory import clock
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory
from autoaccum.step import exactness_notices
from autoaccum.step.findings import NotFiniteError, ZeroGradientError
from autoaccum.step.job import Job
from autoaccum.step.loss_graph import OwnHooks
from autoaccum.step.measured_samples import choose
from autoaccum.step.measurement import Measurement
from autoaccum.step.rng_replay import Recording, UnalignedError, UnsettledError, drawing_nothing
from autoaccum.step.rounding import MOST_ROUNDING, Error, is_right_in_64_bits
from autoaccum.step.row_check import COUNTS, OF_16_BITS, RowChecks, RowsOfDraws, sizes_of
from autoaccum.step.snapshot import State
from autoaccum.step.split_calls import Layout, NotRowsError, SplitCalls, called_children

_MOST_TRIES = 200
"""Modules that may be opened in backward, one after the other."""


@dataclass(frozen=True, kw_only=True)
class JoinedVerdict:
    """Result of a measurement of joined windows."""

    layout: Layout | None = None
    """Which modules are split; None where nothing was measured."""
    error: float = 0.0
    """Relative error of the worst gradient."""
    tolerance: float = 0.0
    """Relative error up to which gradients are the same."""
    tensor: str | None = None
    """The parameter with that gradient."""
    samples: int = 0
    unmeasured: str = ""
    """Why nothing was measured."""
    fails: bool = False
    """Whether the step fails on a few samples by themselves."""
    share: float = 1.0
    """Bytes that are held for the backward of a joined window, as a fraction of those of the full batch."""
    sizes: tuple[int, ...] = ()
    """Samples of each micro-batch."""

    def event(self, *, step: int, reason: str, seconds: float) -> Joined:
        """Return what was measured, as a record of a run."""
        assert self.layout is not None
        return Joined(
            step=step,
            reason=reason,
            error=self.error,
            tolerance=self.tolerance,
            tensor=self.tensor,
            samples=self.samples,
            held=self.share,
            opened=tuple(sorted(filter(None, map(self.layout.name_in_model, self.layout.opened())))),
            seconds=seconds,
        )

    @property
    def passed(self) -> bool:
        """Return whether joined windows have the gradient of whole ones."""
        return self.layout is not None and self.error <= self.tolerance


def measure_joined(
    job: Job,
    window: Window,
    layout: Layout,
    *,
    most: int,
    written: Iterable[torch.Tensor] = (),
    rewind: Callable[[], None] = lambda: None,
    like: State | None = None,
    failed_on: Sequence[tuple[Sequence[int], tuple[int, ...]]] = (),
    needs_share: bool = True,
) -> JoinedVerdict:
    """Measure some samples of a window; of that nothing remains but what was found.

    Args:
        job: what the run computes.
        window: the samples.
        layout: opened as far as is known; it is opened further.
        most: samples that there is room for at once.
        written: parameters that forwards have been seen to write to.
        rewind: puts the state back that the window began with.
        like: that state, as far as it is remembered.
        failed_on: positions of samples for which weighted micro-batches of these sizes were wrong: joined ones have to
            be right for the same, because otherwise the reason for it was not found.
        needs_share: whether it is told how much memory joined windows take.
    """
    how: dict[str, Any] = {"written": list(written), "rewind": rewind, "like": like}
    run = partial(_measured, job, window, layout, how=how, needs_share=needs_share)
    counts = [count for count in COUNTS if count <= min(window.num_samples, most)]
    outcome: JoinedVerdict | RanOut = JoinedVerdict(unmeasured="there is no room for two samples at once")
    for count in counts:
        outcome = _twice(lambda count=count: run(choose(window, window.num_samples, count)))  # type: ignore[misc]
        if isinstance(outcome, JoinedVerdict):
            break
    if isinstance(outcome, JoinedVerdict) and outcome.fails:
        # A step that knows how many samples there are, by labels of its own say, works on all of them alone; and a few
        # may have nothing that a mean is over.
        outcome = _twice(partial(run, range(window.num_samples)))
    for chosen, sizes in failed_on:
        if isinstance(outcome, JoinedVerdict) and outcome.passed and len(sizes) > 1:
            again, share = _twice(partial(run, chosen, sizes=sizes)), outcome.share
            if isinstance(again, RanOut) or again.layout is None or again.error > outcome.error:
                outcome = again if isinstance(again, RanOut) else replace(again, share=share)
    if isinstance(outcome, RanOut):
        return JoinedVerdict(unmeasured="memory ran out in the attempt")
    return outcome


def _twice(measure: Callable[[], JoinedVerdict]) -> JoinedVerdict | RanOut:
    """Measure once more where memory ran out, which others may have held for a moment: the whole run goes by it."""
    outcome = attempt(measure)
    if isinstance(outcome, RanOut):
        gc.collect()  # what failed may have left reference cycles that hold memory
        outcome = attempt(measure)
    return outcome


def _measured(
    job: Job,
    window: Window,
    layout: Layout,
    chosen: Sequence[int],
    *,
    how: dict[str, Any],
    sizes: tuple[int, ...] | None = None,
    needs_share: bool,
) -> JoinedVerdict:
    """Measure these samples, in micro-batches of these sizes; None: of sizes that differ."""
    try:
        joined = _JoinedMeasurement(job, window, chosen, **how)
        with joined:
            own, is_known = sizes or sizes_of(len(chosen)), sizes is not None
            return joined.measured(layout, own, is_known=is_known, needs_share=needs_share)
    except NotFiniteError:
        return JoinedVerdict(unmeasured="the loss of a few samples is not finite", fails=True)
    except ZeroGradientError:
        return JoinedVerdict(unmeasured="the gradient of a few samples is 0")
    except (UnalignedError, UnsettledError) as error:
        why = f"what {error} draws for a few samples cannot be found among what it draws for all"
        return JoinedVerdict(unmeasured=why)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        words = str(error).partition("\n")[0]
        why = f"on a few samples by themselves it fails ({type(error).__name__}: {words})"
        return JoinedVerdict(unmeasured=why, fails=True)


class Joiner:
    """Measures whether the windows of a run can be joined, and measures joined ones again."""

    _ROUNDS = 2
    """Joined windows that are measured: what a first one sets up is not seen in it."""

    def __init__(self, job: Job) -> None:
        """Begin with nothing measured."""
        self.job = job
        self._rounds = 0

    def is_due(self, number: int) -> bool:
        """Return whether a joined window is to be measured whatever it does: the second, the 10th, 100th and so on."""
        return self._rounds < self._ROUNDS or (number >= 10 and str(number).rstrip("0") == "1")

    def measure(
        self,
        window: Window,
        layout: Layout | None,
        *,
        number: int,
        reason: str,
        most: int,
        is_shared: bool = False,
        **how: Any,
    ) -> tuple[Layout | None, Joined | None, str]:
        """Measure a window.

        Args:
            window: its samples.
            layout: what is known of how modules are split; None where that is nothing.
            number: of the window.
            reason: why windows are joined.
            most: samples that there is room for at once.
            is_shared: whether several ranks run the window.
            how: see ``measure_joined``.

        Returns:
            the layout, None where nothing was measured; what was measured; why nothing was.
        """
        started = clock.now()
        self._rounds += 1
        parameters = [p for module in self.job.modules for p in module.parameters()]
        if exactness_notices.has_backward_hooks(parameters):
            return None, None, "hooks that run once a gradient is accumulated would run in a measurement, too"
        if is_shared and any(p._backward_hooks for p in parameters):
            return None, None, "hooks of parameters see on each rank what its own samples add to the gradient"
        is_new, layout = layout is None, layout or Layout(self.job.modules)
        layout.name_modules()
        found = measure_joined(self.job, window, layout, most=most, needs_share=is_new, **how)
        if found.layout is None:
            return None, None, found.unmeasured
        return found.layout, found.event(step=number, reason=reason, seconds=clock.now() - started), ""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, for a checkpoint."""
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned."""
        self._rounds = state["rounds"]


class _JoinedMeasurement(Measurement):
    """A few samples of a window, whole and joined."""

    def measured(self, layout: Layout, sizes: tuple[int, ...], *, is_known: bool, needs_share: bool) -> JoinedVerdict:
        """Compare, opening modules until the gradients agree or none is left to open.

        Args:
            layout: how modules are split.
            sizes: samples of each micro-batch.
            is_known: whether the layout was measured, so that calls are looked at only where it does not do.
            needs_share: whether it is told how much memory it takes.
        """
        self.run_whole()
        checks = RowChecks()
        try:
            error = self._opened(layout, sizes, checks, is_known=is_known)
        except (UnalignedError, UnsettledError):
            if not self.draws_anything:
                raise
            self._put_back()
            self.with_constants()
            error = self._opened(layout, sizes, checks, is_known=is_known)
        return JoinedVerdict(
            layout=layout,
            error=error.relative,
            tolerance=self._bound,
            tensor=None if error.tensor is None else self.names[error.tensor],
            samples=self.num_samples,
            share=self._share_of(layout, sizes) if needs_share and not is_known else 1.0,
            sizes=sizes,
        )

    @property
    def _bound(self) -> float:
        return OF_16_BITS if self.is_rounded else self.tolerance

    def _opened(self, layout: Layout, sizes: tuple[int, ...], checks: RowChecks, *, is_known: bool) -> Error:
        for _ in range(_MOST_TRIES):
            before = layout.state_dict()
            try:
                if is_known and not checks.reasons:
                    found = self._run_split(layout, sizes, None)
                    if self._is_right(found, layout, sizes):
                        return found
                # Once with each call measured, which opens what cannot be split; and then as windows run.
                self._run_split(layout, sizes, checks)
                # What is never called itself, as where a step calls methods of a model, has children that are.
                uncalled = [m for m in layout.split() if id(m) not in self._called and any(called_children(m))]
                if not uncalled:
                    error = self._run_split(layout, sizes, None)
                    if self._is_right(error, layout, sizes) or not layout.split():
                        return error
                    # Rows agree, and something else does not: the modules' own code runs on everything then.
                    uncalled = [m for m in layout.split() if id(m) in self._called]
                    if not uncalled:
                        return error
                for module in uncalled:
                    layout.open(module)
            except NotRowsError as error:
                checks.reasons.setdefault(layout.name(error.module), str(error))
                layout.heed(error)
            except Exception as error:
                called = [m for m in layout.split() if id(m) in self._called]
                # What calls left behind while they were measured may be what the step has stumbled over. Else it wants
                # more of a call than its outputs: what a hook has kept, or the graph between two of them.
                if is_out_of_memory(error) or (layout.state_dict() == before and not called):
                    raise
                for module in called if layout.state_dict() == before else ():
                    layout.open(module)
            for p in self.parameters:
                p.grad = None
            self._put_back()
        return Error(float("inf"), None)

    def _is_right(self, error: Error, layout: Layout, sizes: tuple[int, ...]) -> bool:
        """Return whether a gradient is that of the whole but for rounding, of which 64 bits may have to tell."""
        if self._bound < error.relative < MOST_ROUNDING and is_right_in_64_bits(
            self, lambda: self._run_split(layout, sizes, None).relative
        ):
            self.tolerance = error.relative
        return error.relative <= self._bound

    def _run_split(self, layout: Layout, sizes: tuple[int, ...], checks: RowChecks | None) -> Error:
        whole = tuple(range(self.num_samples))
        draws: Any = self._draws
        if isinstance(draws, Recording):
            draws = drawing_nothing()
            if not self._draws.has_shown_nothing:  # type: ignore[union-attr]
                draws = RowsOfDraws(self._draws, self.num_samples, keeps_wide=not self.is_rounded)  # type: ignore[arg-type]
        rows = draws if isinstance(draws, RowsOfDraws) else None
        split = SplitCalls(
            layout, sizes, self.job.device, generators=self.state.generators(), checks=checks, draws=rows
        )
        self._called = split.called
        with split:
            gradient = self._run((whole,), "sum", self.make, lambda _: draws)
        error = self._error(gradient)
        for p in self.parameters:
            p.grad = None
        self._put_back()
        return error

    def _share_of(self, layout: Layout, sizes: tuple[int, ...]) -> float:
        """Return the same; 1 where it cannot be told, as of steps that take gradients in ways of their own."""
        try:
            return self._share(layout, sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._put_back()
            return 1.0

    def _share(self, layout: Layout, sizes: tuple[int, ...]) -> float:
        """Return what is held for the backward of a joined window, as a fraction of what the whole one holds."""
        whole, parts = _Held(self.parameters), _Held(self.parameters)
        batch = self.make(tuple(range(self.num_samples)))
        for held, cut in ((whole, (self.num_samples,)), (parts, sizes)):
            split = SplitCalls(layout, cut, self.job.device, generators=self.state.generators())
            with OwnHooks(held.pack, lambda kept: kept), split:
                self._transaction.plain_forward(batch, self.num_samples, self.num_samples)
            self._put_back()
        return parts.num_bytes / max(1, whole.num_bytes)


class _Held:
    """Counts the bytes that graphs keep for backward, without parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in parameters}
        self.num_bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()
        # Without its graph: of an output that is saved that would be a cycle, which nothing frees.
        return tensor.detach()
