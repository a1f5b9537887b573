"""Measures whether joined windows have the gradient of whole ones, and which modules are opened for it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from autoaccum.data.base import Window
from autoaccum.events import Joined
from autoaccum.memory import clock
from autoaccum.memory.oom import RanOut, attempt, is_out_of_memory
from autoaccum.verification import notices
from autoaccum.verification.comparison import MOST_ROUNDING, Error
from autoaccum.verification.draws import Recording, UnalignedError, UnsettledError, drawing_nothing
from autoaccum.verification.findings import NotFiniteError, ZeroGradientError
from autoaccum.verification.floors import is_right_in_64_bits
from autoaccum.verification.measurement import Measurement
from autoaccum.verification.rows import COUNTS, OF_16_BITS, RowChecks, RowsOfDraws, sizes_of
from autoaccum.verification.samples import choose
from autoaccum.window.attributes import CONTAINERS, Attributes, objects_of, version_of
from autoaccum.window.job import Job
from autoaccum.window.split_calls import Layout, MovedError, NotRowsError, SplitCalls, called_children
from autoaccum.window.state import State

_SETTINGS = frozenset((bool, int, float, str))
"""Types of attributes that say how a module computes."""
_SMALL_BYTES = 256
"""Bytes of an array that may be a setting, and entries of a container that are looked at."""
_COUNTER = "num_batches_tracked"
"""A buffer of BatchNorm that moves in each step."""
_DEEPEST = 2
"""Containers in containers that are looked into."""
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
        self._settings: dict[Any, Any] = {}
        self._seen: Attributes | None = None  # all that settings are among
        self._flags: list[tuple[torch.Tensor, int]] = []  # tensors that may be written to, with their versions
        self._changes = Counter[Any]()  # of each setting

    def is_due(self, number: int) -> bool:
        """Return whether a joined window is to be measured; to be asked once a window.

        That is the second one, the 10th, 100th and so on, and one of modules with other layers, hooks or settings
        (attributes that are plain values); of a setting that changes all the time ever fewer. Modes and flags are known
        of each kind of call.
        """
        before = self._settings
        if self._seen is None or self._seen.have_changed() or any(version_of(one) != seen for one, seen in self._flags):
            self._look_at_settings()
        changed = [key for key, value in self._settings.items() if before and before.get(key, before) != value]
        self._changes.update(changed)
        is_surprising = any(not self._changes[key] & (self._changes[key] - 1) for key in changed)
        is_round = number >= 10 and str(number).rstrip("0") == "1"
        return self._rounds < self._ROUNDS or is_round or is_surprising

    def _look_at_settings(self) -> None:
        layers = list({id(part): part for module in self.job.modules for part in module.modules()}.values())
        owners = [*layers, *objects_of(layers)]
        self._seen, self._settings = Attributes(owners), _settings_of(layers, owners)
        counters = {id(dict(layer.named_buffers(recurse=False)).get(_COUNTER)) for layer in layers}
        small = [one for one in self._seen.tensors() if id(one) not in counters and _is_small(one)]
        self._flags = [(one, version_of(one)) for one in small]

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
        if notices.has_backward_hooks(parameters):
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


def _settings_of(layers: Sequence[nn.Module], owners: Sequence[Any]) -> dict[Any, Any]:
    """Return by what layers compute beside their weights: hooks, plain values; by where each lies.

    Args:
        layers: of the modules.
        owners: these, and the objects that they hold.
    """
    found: dict[Any, Any] = {"layers": [(id(layer), type(layer)) for layer in layers]}
    for layer in layers:
        hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
        found[id(layer), ""] = [list(own) for own in hooks]
        for name, buffer in layer._buffers.items():
            if buffer is not None and name != _COUNTER and _is_small(buffer):
                found[id(layer), name] = buffer.tolist()
    for owner in owners:
        for name, value in vars(owner).items():
            if not (isinstance(owner, nn.Module) and name.startswith("_")):
                _note(found, (id(owner), name), value, 0)
    return found


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
                layout.open(error.module)
            except MovedError as error:
                if layout.is_copied(error.module):
                    layout.open(error.module)
                layout.copy(error.module)
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
            with saved_tensors_hooks(held.pack, lambda kept: kept), split:
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


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be a setting: a few whole numbers or flags, or one number."""
    is_plain = tensor.layout is torch.strided and not tensor.requires_grad and tensor.nbytes <= _SMALL_BYTES
    return is_plain and (tensor.numel() == 1 or not tensor.is_floating_point())


def _note(found: dict[Any, Any], key: tuple[Any, ...], value: Any, depth: int) -> None:
    """Note a plain value, or those in a container, by where it lies."""
    if type(value) in _SETTINGS:
        found[key] = value
    elif type(value) is np.ndarray and value.nbytes <= _SMALL_BYTES and value.dtype.kind in "biufc":
        found[key] = value.tobytes()
    elif isinstance(value, torch.Tensor):
        if value.is_cpu and _is_small(value):
            found[key] = value.tolist()
    elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
        found[key] = len(value)
        ordered = sorted(map(str, value)) if isinstance(value, set | frozenset) else value
        entries: Iterable[Any] = ordered.items() if isinstance(ordered, dict) else enumerate(ordered)
        for at, one in islice(entries, _SMALL_BYTES) if depth < _DEEPEST else ():
            _note(found, (*key, at), one, depth + 1)
