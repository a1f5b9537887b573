"""The arguments of ``fit``: their types and defaults, their checks, and what each decides.

``FitArguments`` is what ``Trainer`` works with. Their texts stand in the docstring of ``fit``; ``probe``,
``Accumulator`` and others that share some of them have signatures and texts of their own.

A check that needs no more than arguments is made before anything else is done. What needs the model, the data or the
device to be judged is judged where it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import nn

from autoaccum import _checks
from autoaccum.data.splits import SplitLike, split_of
from autoaccum.distributed.balance import Balance
from autoaccum.distributed.gradients import Compression
from autoaccum.events import Record
from autoaccum.memory.limit import MemoryLimit
from autoaccum.planning.budget import Budget
from autoaccum.planning.limits import SavingMode
from autoaccum.planning.schedules import Progress, Schedule, schedule_of
from autoaccum.step.job import Precision
from autoaccum.step.loss_functions import loss_function
from autoaccum.step.optimizers import OptimizerLike
from autoaccum.step.python_state import surroundings_of
from autoaccum.step.terms import CountItems, Reducing
from autoaccum.training.declarations import Checked, check, values_of
from autoaccum.training.learning_rate import MakeScheduler, Scaling
from autoaccum.training.metrics import Metric
from autoaccum.training.single_process import Ranks, of_ranks

Callback = Callable[[Record], None] | Callable[[Record, Any], None]
"""Takes all that a run reports, as it happens, and the ``Trainer`` where it has a second parameter: see ``hooks``."""

TRAINED = (
    *("lr_scaling", "base_batch", "precision", "clip_norm", "accumulate", "verify"),
    *("compression", "seed", "shuffle", "drop_last"),
)
"""Arguments that decide what is trained: a run that is resumed has to be given the same values.

The model, the data, the optimizer and the schedules do too: a run's directory describes these objects themselves."""
BUDGETS = ("epochs", "steps", "samples")
"""Arguments that say how long: one of them replaces another."""
SHARED_IN_SWEEPS = (*BUDGETS, "seed", "validate_every")
"""Arguments that all trials of a sweep share, because they are compared after the same samples."""
NOT_IN_SWEEPS = ("model", "data", "run_dir", "resume")
"""Arguments that no sweep passes on: the recipe returns them, or the sweep itself decides them."""

EACH: dict[str, Callable[[str, Any], Any]] = {
    "max_micro_batch": _checks.if_given(_checks.positive_int),
    "headroom": lambda name, value: _checks.number_between(name, value, 0, 1),
    "clip_norm": _checks.if_given(_checks.positive_number),
    "num_workers": _checks.non_negative_int,
    "collate_fn": _checks.if_given(lambda name, value: _checks.function(name, value, ("samples",), "a batch")),
    "seed": _checks.non_negative_int,
    "lr": _checks.if_given(lambda name, value: _checks.number_between(name, value, 0)),
    "keep_checkpoints": _checks.positive_int,
    "reduction": _checks.if_given(lambda name, value: _checks.one_of(name, value, ("mean", "sum"))),
    "accumulate": lambda name, value: _checks.one_of(name, value, ("auto", "weighted", "joined")),
    "balance": lambda name, value: _checks.one_of(name, value, get_args(Balance)),
    "compression": lambda name, value: _checks.one_of(name, value, get_args(Compression)),
    **dict.fromkeys(("compile", "shuffle", "drop_last", "noise_scale", "cache", "progress"), _checks.flag),
}
"""Checks of arguments that are looked at alone."""
CHECKS: tuple[Callable[..., Any], ...] = (
    schedule_of,
    _checks.of_num_items,
    _checks.of_smallest,
    _checks.of_patience,
    _checks.of_memory_saving,
    split_of,
    _checks.of_optimizer,
    _checks.of_lr_scheduler,
    _checks.of_verification,
    loss_function,
    _checks.of_validation,
    _checks.of_run_directory,
    _checks.of_checkpoint_every,
    Budget,
    _checks.recorded_plans,
    of_ranks,
    _checks.of_callbacks,
)
"""Other checks, which may look at several arguments, and what they return is used further on."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FitArguments:
    """The arguments of one call of ``fit``, which says what they are."""

    # In place, for a copy would take its memory twice; whoever calls has the trained model at hand.
    model: nn.Module
    # Windows are cut from samples, so the size of a loader's batches says nothing.
    data: Any
    _: KW_ONLY
    # The one argument besides that has no default: any number would be a guess at what the user wants to learn.
    effective_batch: int | str | Schedule | Callable[[Progress], int]
    # How its loss is computed: by one of these two functions, or by the model itself.
    loss_fn: Callable[[Any, Any], Any] | None = None
    training_step: Callable[[Any, Any], Any] | None = None
    # Whoever gives no count is asked for none: most losses tell it. What does not is announced with this as its cure.
    num_items: CountItems | None = None
    # What a graph shows, a measurement decides; whoever knows says so, and is told if a measurement contradicts.
    reduction: Reducing = None
    optimizer: OptimizerLike | None = None
    # None and not 1e-3, so that an lr beside an optimizer of one's own, which it could not reach, is refused.
    lr: float | None = None
    lr_scheduler: MakeScheduler | None = None
    lr_scaling: Scaling = "none"
    # No default: only the user knows at which batch a rate was found to be right.
    base_batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    samples: int | None = None
    # How windows are run. Laws 1 and 2 say that this decides speed and memory, and nothing of what is trained.
    micro_batch: int | Literal["auto"] | Sequence[Sequence[int]] = "auto"
    max_micro_batch: int | None = None
    # For what only the user knows: a loss that needs several samples, statistics of few that are poor.
    min_micro_batch: int | None = None
    memory_limit: MemoryLimit = None
    # For what no trial has shown: fragmentation, a longer sample, another process.
    headroom: float = 0.05
    memory_saving: SavingMode = "auto"
    # A minute, in which a neighbour's validation or the end of a process gives back what it held.
    patience: float = 60.0
    # From here on some decide the numbers: a rounding, a clipping.
    precision: Precision = "fp32"
    clip_norm: float | None = None
    accumulate: Literal["auto", "weighted", "joined"] = "auto"
    # What is measured decides how micro-batches are weighted, and so what a run computes.
    verify: bool = True
    strict: bool = False
    # How a forward is compiled may change the last bits of it, as another device may: runs go on with either.
    compile: bool = False
    device: str | torch.device | None = None
    # Several processes that know nothing of each other look like one run that goes well, so they have to be asked for.
    ranks: Ranks = "together"
    balance: Balance = "equal"
    # As a precision does, it decides the last digits of what is trained.
    compression: Compression = "none"
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    split: SplitLike | None = None
    batch_dim: int | Mapping[str, Any] | Sequence[Any] = 0
    num_workers: int = 0
    validation_data: Any = None
    # In samples, as budgets of trials are: windows of different sizes are compared after as many.
    validate_every: int | None = None
    metrics: Mapping[str, Metric] | None = None
    run_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | str | None = None
    # Two, so that there is one to go on from should the newest turn out to be unreadable.
    keep_checkpoints: int = 2
    resume: Literal["auto"] | bool = "auto"
    # Off, for it takes at least two micro-batches a window, and reading the gradient between them.
    noise_scale: bool = False
    # What an earlier run found is a first guess, which this run tries before it believes it.
    cache: bool = True
    callbacks: Iterable[Callback] = ()
    progress: bool = True

    def check(self) -> Checked:
        """Make the checks that need no more than the arguments.

        Raises:
            ArgumentError: an argument cannot be used; it names the argument, the value and the cure.
        """
        return check(values_of(self), EACH, CHECKS)

    def modules(self) -> list[nn.Module]:
        """Return the model, and the loss or the training step where it is a module too."""
        return modules_of(self.model, self.loss_fn, self.training_step)


OF_FIT = tuple(field.name for field in fields(FitArguments))
"""The names of the arguments of ``fit``."""


def without_schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a probe, which need no effective batch, without one that is None."""
    is_given = given["effective_batch"] is not None
    return {name: value for name, value in given.items() if name != "effective_batch" or is_given}


def modules_of(model: object, *functions: object) -> list[nn.Module]:
    """Return what a call has that may have parameters to train: its modules, and those that its functions hold.

    The model comes first. A projection head that only the closure of training_step holds is as much a part of what is
    trained as the model: it is moved to the device, saved, and put back when a window is run again.
    """
    named = [module for module in (model, *functions) if isinstance(module, nn.Module)]
    known = {layer for module in named for layer in module.modules()}
    for held in surroundings_of(functions).modules:
        # What holds a known one beside others, as a wrapper that training_step is a method of, is taken apart.
        for layer in held.modules():
            if layer not in known and known.isdisjoint(layer.modules()):
                named.append(layer)
                known.update(layer.modules())
    return named
